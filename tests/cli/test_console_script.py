"""The installed console script: starts fast, prints its version, fails in one line."""

import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(sys.executable).with_name("turntree"))


def test_the_script_is_installed():
    done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and "0.1.0" in done.stdout


def test_bad_input_is_one_line_and_exit_code_2():
    done = subprocess.run([SCRIPT, "select", "nowhere.jsonl", "--out", "x.jsonl"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("turntree: error: nowhere.jsonl")


def test_help_does_not_load_torch():
    code = "import sys; from turntree.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
