"""Hostile programs and commands are contained, each within its time, and the caller goes on."""

import ctypes
import os
import resource
import socket
import subprocess
import threading
import time
from dataclasses import replace

import pytest
from hostile import CONFIG, ENDLESS, INFLUENCE, PROBE, PYTHON, SHELL
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree_worlds.sandboxes.limits import File
from turntree_worlds.sandboxes.sandbox import Sandbox

SHORT, LONG = 0.4, 20.0
GRACE = 10.0  # for a machine with much else to do


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What a program may not touch."""
    folder = tmp_path_factory.mktemp("host")
    folder.chmod(0o777)
    secret = folder / "secret"
    secret.write_text("SECRET")
    victim = subprocess.Popen(["sleep", "600"])
    libc = ctypes.CDLL(None)
    objects = {
        "memory": libc.shmget(0, 4096, 0o1666), "queue": libc.msgget(0, 0o1666), "semaphore": libc.semget(0, 1, 0o1666)
    }  # fmt: skip
    posix = f"/turntree-{os.getpid()}".encode()
    assert libc.mq_open(posix, os.O_CREAT | os.O_RDWR, 0o666, None) >= 0
    assert libc.msgsnd(objects["queue"], ctypes.create_string_buffer(b"\1", 16), 8, 0) == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {
            "secret": secret,
            "outside": folder / "outside",
            "port": server.getsockname()[1],
            "host": os.getpid(),
            "victim": victim.pid,
        } | objects
    removed = [
        libc.shmctl(objects["memory"], 0, None), libc.msgctl(objects["queue"], 0, None),
        libc.semctl(objects["semaphore"], 0, 0), libc.mq_unlink(posix),
    ]  # fmt: skip
    assert removed == [0, 0, 0, 0], "a program removed shared objects of the host"
    assert victim.poll() is None, "a program killed a process of the host"
    victim.kill()
    victim.wait()


def attack(sandbox, language, name, host, files=None):
    program, seconds = (PYTHON | SHELL)[name], SHORT if name in ENDLESS else LONG
    before = os.stat(host["secret"])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    execution = sandbox.run(program.format(**host), language=language, seconds=seconds, files=files)
    assert time.monotonic() - started < seconds + GRACE
    assert not execution.timed_out or name in ENDLESS, "it had no time to do its worst"
    for text in (execution.stdout, execution.stderr, execution.value or ""):
        assert len(text) <= sandbox.config.limits.output_bytes
        assert "SECRET" not in text
    assert "ESCAPED" not in execution.stdout
    after = os.stat(host["secret"])
    assert (after.st_mode, after.st_size, after.st_mtime, after.st_nlink) == (
        before.st_mode, before.st_size, before.st_mtime, 1,
    )  # fmt: skip
    assert not host["outside"].exists()
    assert not os.path.exists("/usr/turntree-escaped") and not os.path.exists("/dev/shm/turntree-escaped")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 * 2**10  # kilobytes
    assert sandbox.lost == 0, "the box died, so that nobody can say whose fault it was"


@pytest.fixture(scope="module")
def untouched():
    with Sandbox(CONFIG) as fresh:
        return answer(fresh)


def answer(sandbox):
    execution = sandbox.run(PROBE, seconds=30.0)
    return execution.stdout, execution.stderr, execution.value, execution.exit_code


@pytest.mark.parametrize("name", PYTHON)
def test_a_program_is_contained_and_changes_nothing_for_the_next_that(name, sandbox, host, untouched):
    attack(sandbox, "python", name, host)
    assert answer(sandbox) == untouched


@pytest.mark.parametrize("name", SHELL)
def test_a_command_is_contained_and_changes_nothing_for_the_next_that(name, sandbox, host, untouched):
    attack(sandbox, "shell", name, host)
    assert answer(sandbox) == untouched


AMONG = {"work/a.txt": File(b"a\n"), "work/link": File(b"/usr", "link")}


@pytest.mark.parametrize("name", [*INFLUENCE, *SHELL])
def test_a_program_among_files_is_contained_and_changes_nothing_for_the_next_that(name, sandbox, host, untouched):
    """The box is emptied instead of replaced: nothing of the files, or of what a program did to them, stays."""
    attack(sandbox, "python" if name in PYTHON else "shell", name, host, AMONG)
    assert answer(sandbox) == untouched


@pytest.mark.skipif("TURNTREE_PAIRS" not in os.environ, reason="make test-pairs")
@pytest.mark.parametrize("name", [*PYTHON, *SHELL])
def test_a_program_changes_nothing_for_another_one_beside_it_that(name, host, untouched):
    language, source = ("python" if name in PYTHON else "shell"), (PYTHON | SHELL)[name].format(**host)
    with Sandbox(replace(CONFIG, boxes=2)) as sandbox:
        beside = threading.Thread(target=sandbox.run, args=(source,), kwargs={"language": language, "seconds": 1.0})
        beside.start()
        answers = [answer(sandbox) for _ in range(3)]
        beside.join()
    assert answers == [untouched] * 3


def test_what_a_program_answers_does_not_depend_on_what_ran_before_it(sandbox, host, untouched):
    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.sampled_from(sorted(INFLUENCE)), min_size=2, max_size=4))
    def holds(names):
        for name in names:
            sandbox.run(INFLUENCE[name].format(**host), seconds=LONG)
        assert answer(sandbox) == untouched

    holds()


def test_the_corpus_is_as_large_as_promised():
    assert len(PYTHON) + len(SHELL) >= 40


def test_nothing_is_left_running_on_the_host(sandbox, host):
    marker = "987654.25"
    sandbox.run(f"(setsid sleep {marker} &); setsid nohup sleep {marker} & exit 0", language="shell")
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert f"sleep {marker}" not in listed
