"""The command line, as a user types it. In this process, because loading torch anew costs seconds a command;
`test_console_script.py` runs the installed script itself."""

import contextlib
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from turntree.cli.main import main


class Turntree:
    """Runs `turntree ...`; keeps standard output and standard error, checks the exit code."""

    def __call__(self, *arguments, cwd=None, code=0):
        out, err = io.StringIO(), io.StringIO()
        found = 0
        before = os.getcwd()
        os.chdir(cwd or before)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            found = stopped.code or 0
        finally:
            os.chdir(before)
        assert found == code, f"exit {found}\n{out.getvalue()}\n{err.getvalue()}"
        return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())

    def json(self, *arguments, cwd=None):
        """The result of `--json -`: standard output holds it and nothing else."""
        return json.loads(self(*arguments, "--json", "-", cwd=cwd).stdout)

    def error(self, *arguments, cwd=None):
        """The single line that bad input ends in."""
        done = self(*arguments, cwd=cwd, code=2)
        lines = [line for line in done.stderr.splitlines() if line.startswith("turntree: error: ")]
        assert len(lines) == 1, done.stderr
        assert "Traceback" not in done.stderr
        return lines[0]


@pytest.fixture(scope="session")
def turntree():
    return Turntree()


@pytest.fixture(scope="session")
def household(turntree, tmp_path_factory) -> Path:
    """A folder with traces, a profile and pivots of the embedded policy."""
    folder = tmp_path_factory.mktemp("household")
    turntree("traces", "household", "--count", 16, "--out", folder / "traces.jsonl")
    turntree(
        *("profile", "--traces", folder / "traces.jsonl", "--limit", 60, "--rollouts", 8, "--max-tokens", 24),
        *("--out", folder / "profile.jsonl"),
    )
    turntree("select", folder / "profile.jsonl", "--anchor-share", 0.3, "--out", folder / "pivots.jsonl")
    return folder
