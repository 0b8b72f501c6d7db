"""Cases from public bug reports (`../shared/cases`): the command of each, run in this process in the case's folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from turntree.cli.main import main

CASES = Path(os.environ.get("TURNTREE_SHARED_CASES", Path(__file__).resolve().parents[2] / "shared" / "cases"))

missing = pytest.mark.skipif(not CASES.is_dir(), reason=f"no cases at {CASES}; set TURNTREE_SHARED_CASES")


def cases(folder: str, command: str) -> dict[str, dict[str, Any]]:
    """The cases of a folder whose command begins so, by their names; none where a checkout has none."""
    table = CASES / folder / "cases.json"
    found = json.loads(table.read_text()) if table.is_file() else []
    return {case["case"]: case for case in found if case["command"].startswith(command)}


@dataclass(frozen=True)
class Ran:
    """What a command of a case did. `error` is the one line that it ended in; `rows` are those of the file it wrote."""

    code: int
    stdout: str
    error: str
    rows: list[dict[str, Any]]

    @property
    def field(self) -> str | None:
        found = re.search(r"field '([^']*)'", self.error)
        return found[1] if found else None


def run_case(folder: str, case: dict[str, Any], out: Path) -> Ran:
    """Run the case, with `OUT` a folder of the test's."""
    where = CASES / folder / case["case"]
    command = case["command"].replace("OUT", str(out)).replace("$D", str(where))
    stdout, stderr, code, before = io.StringIO(), io.StringIO(), 0, Path.cwd()
    os.chdir(where)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            main(shlex.split(command)[1:])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    finally:
        os.chdir(before)
    errors = [line for line in stderr.getvalue().splitlines() if line.startswith("turntree: error: ")]
    assert "Traceback" not in stderr.getvalue()
    assert len(errors) == (1 if code else 0), stderr.getvalue()
    written = [json.loads(line) for path in sorted(out.glob("*.jsonl")) for line in path.read_text().splitlines()[1:]]
    return Ran(code, stdout.getvalue(), errors[0] if errors else "", written)
