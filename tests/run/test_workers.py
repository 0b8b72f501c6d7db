"""Workers do not outlive their parent, whatever they are doing, and an interrupt prints nothing of theirs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, os, signal, subprocess, sys, time
from pathlib import Path
from turntree.run.workers import die_with_parent, without_interrupts

def work(kind, folder):
    if kind == "leads a group":
        os.setsid()
    die_with_parent()
    child = subprocess.Popen(["sleep", "600"]) if kind == "leads a group" else None
    Path(folder, "pids").write_text(f"{os.getpid()} {child.pid if child else ''}")
    if kind == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        sum(range(1000))

if __name__ == "__main__":
    kind, folder = sys.argv[1:]
    with without_interrupts():
        process = multiprocessing.get_context("spawn").Process(target=work, args=(kind, folder))
        process.start()
    try:
        Path(folder, "started").touch()
        time.sleep(600)
    except KeyboardInterrupt:
        process.kill()
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


@pytest.fixture
def parent(tmp_path):
    """Starts the parent with a worker of some kind; the whole group is killed at the end."""
    (tmp_path / "parent.py").write_text(PARENT)
    begun = []

    def start(kind):
        process = subprocess.Popen(
            [sys.executable, tmp_path / "parent.py", kind, tmp_path],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
@pytest.mark.parametrize("kind", ["computes", "leads a group", "is stopped"])
def test_a_worker_dies_with_a_parent_that_was_killed(parent, tmp_path, kind) -> None:
    process = parent(kind)
    assert until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == (2 if kind == "leads a group" else 1) and all(map(runs, pids))
    process.kill()
    process.wait()
    try:
        assert until(lambda: not any(map(runs, pids)), 20)
    finally:
        for pid in filter(runs, pids):
            os.kill(int(pid), signal.SIGKILL)


def test_an_interrupt_of_the_whole_group_is_silent_even_while_a_worker_starts(parent, tmp_path) -> None:
    process = parent("computes")
    assert until((tmp_path / "started").exists)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to parent and workers
    assert process.communicate(timeout=60)[1] == ""
