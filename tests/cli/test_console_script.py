"""The installed console script: starts fast, prints its version, fails in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(sys.executable).with_name("turntree"))


def test_the_script_is_installed():
    done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and "0.1.0" in done.stdout


def test_the_package_is_a_module_too():
    done = subprocess.run([sys.executable, "-m", "turntree", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip()


def test_bad_input_is_one_line_and_exit_code_2():
    done = subprocess.run([SCRIPT, "select", "nowhere.jsonl", "--out", "x.jsonl"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("turntree: error: nowhere.jsonl")


def test_a_character_that_the_terminal_cannot_show_is_spelled_out(tmp_path):
    said = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": x}}}]} for x in "aü"]
    kinds = {"type": "object", "properties": {"x": {"enum": ["a"]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": kinds}}]
    words = ["verifier", "score", "--verifier", "recommended"]
    for name, value in (("gold", said[0]), ("candidate", said[1]), ("tools", tools)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
        words += [f"--{name}", str(tmp_path / f"{name}.json")]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert "'\\xfc' is not one of ['a']" in done.stdout


def test_help_does_not_load_torch():
    code = "import sys; from turntree.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
