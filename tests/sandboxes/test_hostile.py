"""Hostile programs and commands are contained, each within its time, and the caller goes on."""

import os
import resource
import socket
import subprocess
import time

import pytest
from hostile import ENDLESS, PYTHON, SHELL

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
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {
            "secret": secret,
            "outside": folder / "outside",
            "port": server.getsockname()[1],
            "host": os.getpid(),
            "victim": victim.pid,
        }
    assert victim.poll() is None, "a program killed a process of the host"
    victim.kill()
    victim.wait()


def attack(sandbox, language, name, host):
    program, seconds = (PYTHON | SHELL)[name], SHORT if name in ENDLESS else LONG
    before = os.stat(host["secret"])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    execution = sandbox.run(program.format(**host), language=language, seconds=seconds)
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


def assert_goes_on(sandbox):
    again = sandbox.run("import json, time, os\nprint('fine')\nlen(json.dumps([1]))", seconds=30.0)
    assert (again.stdout, again.value, again.exit_code) == ("fine\n", "3", 0)


@pytest.mark.parametrize("name", PYTHON)
def test_a_program_is_contained_that(name, sandbox, host):
    attack(sandbox, "python", name, host)
    assert_goes_on(sandbox)


@pytest.mark.parametrize("name", SHELL)
def test_a_command_is_contained_that(name, shell_sandbox, host):
    attack(shell_sandbox, "shell", name, host)
    assert_goes_on(shell_sandbox)


def test_the_corpus_is_as_large_as_promised():
    assert len(PYTHON) + len(SHELL) >= 40


def test_nothing_is_left_running_on_the_host(shell_sandbox, host):
    marker = "987654.25"
    shell_sandbox.run(f"(setsid sleep {marker} &); setsid nohup sleep {marker} & exit 0", language="shell")
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert f"sleep {marker}" not in listed
