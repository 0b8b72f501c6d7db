"""An agent never outlives the process that started it, and leaves nothing behind when it ends by itself."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from turntree.gateway.process import run_agent

TRAINER = """
import sys, threading
from pathlib import Path
from turntree.gateway.process import run_agent

run_agent([sys.executable, "-S", "-c", sys.argv[1]], Path(sys.argv[2]), {}, 600, threading.Event())
"""
AGENT = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
with open("pids.part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
time.sleep(600)
"""
CHILDREN = """
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no children")
"""


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_an_agent_and_what_it_started_die_with_a_trainer_that_was_killed(tmp_path):
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, AGENT, tmp_path])
    try:
        assert until((tmp_path / "pids").exists)
        pids = (tmp_path / "pids").read_text().split()
        assert len(pids) == 2 and all(map(runs, pids))
    finally:
        trainer.kill()
        trainer.wait()
    try:
        assert until(lambda: not any(map(runs, pids)), 20)
    finally:
        for pid in filter(runs, pids):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_what_an_agent_started_in_a_session_of_its_own_ends_with_it_and_no_other(tmp_path):
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    mark = {"TURNTREE_SESSION": "0123", "TURNTREE_REWARD_KEY": os.urandom(8).hex()}
    longer = {**mark, "TURNTREE_REWARD_KEY": f"{mark['TURNTREE_REWARD_KEY']}0"}  # of another run, its session so named
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, **longer})
    pid = run_agent([sys.executable, "-c", code], tmp_path, mark, 60, threading.Event()).last_line
    try:
        assert until(lambda: not runs(pid), 20) and runs(str(other.pid))
    finally:
        other.kill()
        other.wait()
        if runs(pid):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("agent", ["", "import os; os.kill(os.getpid(), 9)", "import time; time.sleep(0.1)"])
def test_nothing_watches_on_when_an_agent_has_ended(tmp_path, agent):
    done = subprocess.run(
        [sys.executable, "-c", f"import os\n{TRAINER}\n{CHILDREN}", agent, tmp_path], capture_output=True, text=True
    )
    assert done.stdout == "no children\n", done.stderr


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path):
    ended = run_agent(["sh", "-c", "kill -36 $$"], tmp_path, {}, 60, threading.Event())
    assert ended.problem == "the agent was killed by signal 36"


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_line_separator_inside_the_last_line_is_text(tmp_path, mark):
    said = f'{{"reward": null, "reason": "the judge{mark}is down"}}'
    ended = run_agent(
        [sys.executable, "-X", "utf8", "-c", f"print('one'); print({said!r})"], tmp_path, {}, 60, threading.Event()
    )
    assert ended.last_line == said
