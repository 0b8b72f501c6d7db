"""Pages as a reader would follow them: files are written, programs and commands run in order in one folder."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from turntree.cli.main import cli, main

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^(<!-- parsed, not run: .+ -->\n)?```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"# (\w+)\.py\n")


@dataclass(frozen=True)
class Block:
    """One block of code of a page. `file` is what a Python block calls itself in its first line. Commands that need
    what a test does not have are parsed only."""

    kind: str
    text: str
    is_run: bool

    @property
    def file(self) -> str | None:
        named = _NAMED.match(self.text)
        return f"{named.group(1)}.py" if named else None

    def commands(self) -> list[list[str]]:
        """The words of each command behind `turntree`."""
        lines = [shlex.split(line, comments=True) for line in self.text.replace("\\\n", " ").splitlines()]
        assert all(words[0] == "turntree" for words in lines if words), f"only turntree is known here: {self.text}"
        return [words[1:] for words in lines if words]


def blocks(page: Path) -> list[Block]:
    return [Block(kind, text, not parsed) for parsed, kind, text in _BLOCK.findall(page.read_text())]


def run_python(code: str, folder: Path) -> str:
    """What a program prints, in a fresh interpreter."""
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run_command(words: list[str], small: list[str]) -> None:
    """In this process, because loading torch anew costs seconds. `small` comes last, and so wins."""
    try:
        main([*words, *small])
    except SystemExit as stopped:
        if stopped.code:
            pytest.fail(f"turntree {shlex.join(words)} ended with exit code {stopped.code}")


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command, or group of commands, that the words name, and what follows it. Fails where there is none."""
    found, rest = cli, list(words)
    while isinstance(found, click.Group) and rest and rest[0] != "--help":
        inner = found.get_command(click.Context(found), rest.pop(0))
        assert inner is not None, f"there is no command `turntree {shlex.join(words)}`"
        found = inner
    return found, rest


def parse(words: list[str]) -> None:
    """Parse a whole command line as it stands, and run nothing."""
    command, rest = command_of(words)
    try:
        command.make_context("turntree", rest)
    except click.ClickException as error:
        pytest.fail(f"turntree {shlex.join(words)}: {error.format_message()}")


def unknown_options(words: list[str]) -> list[str]:
    """The options among the words that their command does not have; one with an environment may have any."""
    command, rest = command_of(words)
    if command.context_settings.get("ignore_unknown_options"):
        return []
    known = {name for parameter in command.get_params(click.Context(command)) for name in parameter.opts} | {"--help"}
    return [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
