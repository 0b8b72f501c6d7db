"""Containers of services, by SWE-ReX, on its own server: every deployment is one in a box of bubblewrap. The services
themselves were not run."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import uuid

import pytest

from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message, ToolCall
from turntree.env.container import ContainerLimits, Snapshot
from turntree.env.tasks import open_tasks

config = pytest.importorskip("swerex.deployment.config")
pytest.importorskip("aiohttp")
remote = pytest.importorskip("swerex.deployment.remote")
from turntree_interop.swerex import SwerexContainers  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
BOX = ["bwrap", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--unshare-pid", "--die-with-parent"]
# What a server needs, and not the whole disk: a shell looks through all of it for what was changed.
for needed in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", sys.base_prefix, sys.prefix):
    BOX += ["--ro-bind-try", needed, needed]


class Boxed(remote.RemoteDeployment):
    """A server of SWE-ReX in a box of its own, with this machine's programs, which are not to be written to."""

    living: list[Boxed] = []  # noqa: RUF012

    async def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._config.port = free.getsockname()[1]
        server = [sys.executable, "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(self._config.port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([*BOX, "--chdir", "/tmp", *server, "--auth-token", "key"], **quiet)
        self.living.append(self)
        self._config.timeout = 60.0
        await super().start()
        await self.runtime.wait_until_alive(timeout=60.0)

    async def stop(self) -> None:
        if self not in self.living:
            return
        self.living.remove(self)
        if self.process.poll() is None:
            await super().stop()
        self.process.kill()
        self.process.wait()

    async def is_alive(self, *, timeout: float | None = None):
        return await super().is_alive(timeout=60.0)


@pytest.fixture
def service(monkeypatch):
    """The images that were asked for."""
    asked = []

    def deployment(settings):
        asked.append(settings.image)
        return Boxed(auth_token="key", host="http://127.0.0.1")

    monkeypatch.setattr(config.ModalDeploymentConfig, "get_deployment", deployment)
    yield asked
    assert Boxed.living == [], "a deployment was left running"


@pytest.fixture
def shell(service):
    with SwerexContainers(limits=ContainerLimits(seconds=20, output_chars=1000)) as host:
        yield host.shell(Snapshot("debian:12"), folder="", user="", environment={"GIVEN": "a b"})


def test_a_shell_persists_between_commands_and_its_limits_are_answers(shell):
    said = [
        str(shell.run(command))
        for command in (
            "echo $GIVEN; pwd; cd /; x='a  b'; f() { echo \"f $1\"; }; umask 027",
            'echo "$x|$(umask)"; f 3; pwd; false',
            "echo $?; exit 7",
            "sleep 300 & echo on",
        )
    ]
    assert said == ["a b\n/tmp", "a  b|0027\nf 3\n/\n[exit code 1]", "1\n[exit code 7]", "on"]
    assert shell.run("sleep 60", seconds=1).stopped == "took too long"
    assert shell.run("yes | head -c 10000000").stopped == "wrote too much"
    assert len(shell.run("seq 5000").output) < 1100
    assert shell.run("rm -rf /tmp/*; echo still; exit 125").code == 125, "an exit code is the command's own"
    shell.restart()
    assert not shell.background and shell.run("ps -e | grep -c sleep").output == "0\n"


def test_files_go_in_and_out_and_changes_are_told(shell):
    import io
    import tarfile

    shell.run("mkdir /tmp/w; echo 1 > /tmp/w/old; echo x > /tmp/w/gone")
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        entry = tarfile.TarInfo("new")
        entry.size = 3
        archive.addfile(entry, io.BytesIO(b"abc"))
    shell.put(held.getvalue(), "/tmp/w")
    with tarfile.open(fileobj=io.BytesIO(shell.get("/tmp/w"))) as archive:
        assert archive.extractfile("w/new").read() == b"abc"
    assert shell.get("/tmp/nothing") is None
    assert shell.changed()["/tmp/w/new"] == 1
    before = shell.state()
    assert shell.state() == before
    shell.run("rm /tmp/w/gone")
    assert shell.state() != before, "a file that was deleted is a change"


def test_processes_of_an_episode_are_stopped_and_go_on_and_the_server_answers(shell):
    shell.run("(while :; do echo x >> /tmp/now; done) & disown")

    def written():
        return shell.run("stat -c %s /tmp/now").output

    shell.signal("STOP")
    assert written() == written()
    shell.signal("CONT")
    before = written()
    time.sleep(0.2)
    assert written() != before


def test_a_deployment_that_is_lost_is_a_fault(shell):
    shell.run("true")
    Boxed.living[0].process.kill()
    Boxed.living[0].process.wait()
    with pytest.raises(EnvironmentFault):
        shell.run("true")


def called(name, **arguments):
    return Message("assistant", "", (ToolCall(name, arguments, "c"),))


def test_an_episode_is_set_up_played_forked_by_replay_and_judged(service, tmp_path):
    row = {"instruction": "write", "image": "python:3.12", "setup": "echo 3 > /tmp/n", "check": "grep -q 4 /tmp/n"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "others.jsonl").write_text(json.dumps({**row, "instruction": "other"}) + "\n")
    options = {"tasks": str(tmp_path / "tasks.jsonl"), "held_out": str(tmp_path / "others.jsonl")}
    part = Part("container", {**options, "provider": "swerex"})
    with open_tasks(part, {"train": 1}) as tasks:
        episode = tasks.of("train")[0]
        episode.reset()
        assert episode.step(called("bash", command="cat /tmp/n; echo 4 > /tmp/n")).messages[0].content == "3"
        twin = episode.fork()
        assert twin.step(called("bash", command="cat /tmp/n; echo 5 > /tmp/n")).messages[0].content == "4"
        assert [each.step(called("submit")).reward for each in (episode, twin)] == [1.0, 0.0]
    assert set(service) == {"python:3.12"}


@pytest.mark.parametrize(
    ("options", "field"), [({"deployment": "Mars"}, "deployment"), ({"options": {"colour": 1}}, "options")]
)
def test_what_swe_rex_does_not_know_is_named(options, field):
    with pytest.raises(ConfigError) as error:
        SwerexContainers(limits=ContainerLimits(), **options)
    assert error.value.field == field


def test_a_dockerfile_is_refused_with_what_to_do(tmp_path):
    with SwerexContainers(limits=ContainerLimits()) as host, pytest.raises(InputError) as error:
        host.build(tmp_path, uuid.uuid4().hex)
    assert error.value.hint


def test_a_user_that_the_container_lacks_is_a_fault_and_root_has_its_other_names(service):
    with SwerexContainers(limits=ContainerLimits(seconds=20, output_chars=1000)) as host:
        for user in ("root:root", "0:0"):
            assert host.shell(Snapshot("debian:12"), folder="", user=user, environment={}).run("id -u").output == "0\n"
        with pytest.raises(EnvironmentFault):
            host.shell(Snapshot("debian:12"), folder="", user="nobody-there", environment={}).run("true")


def test_a_changed_program_of_the_system_is_told_from_a_new_one_whatever_its_birth(shell):
    """A disk of layers gives a file that is changed a birth of its own."""
    shell.ready()
    known = {path for path in shell._system if path.startswith("/usr/bin/")}
    assert "/usr/bin/env" in known
    assert [shell._kind(path, born) for path in ("/usr/bin/env", "/usr/bin/new-one") for born in (0, 2**40)] == [
        0,
        0,
        1,
        1,
    ]
