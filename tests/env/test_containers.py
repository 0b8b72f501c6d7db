"""Containers that fork, on real ones (`TURNTREE_CONTAINERS=1`): a fork is what a replay is, nothing is left behind, and
no program in a container reaches another one, the host or its reward."""

import contextlib
import gc
import itertools
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentFault, EnvironmentGone
from turntree.core.messages import Message, ToolCall
from turntree.env.check import check_environment
from turntree.env.container import LABEL, ContainerHost, ContainerLimits, Snapshot
from turntree.env.container_shell import ContainerShell, Heard
from turntree.env.container_tasks import ContainerTask, ContainerTasks, ContainerTools, checked_by
from turntree.env.local import LocalPool
from turntree.env.tasks import open_tasks
from turntree.env.tool_environment import ToolEnvironment
from turntree_interop.harbor import _packed

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import container_kills
import container_tasks
import container_verdicts

IMAGE = container_tasks.IMAGE
HISTORIES = int(os.environ.get("TURNTREE_CONTAINER_HISTORIES", "6"))
FORKS = int(os.environ.get("TURNTREE_CONTAINER_FORKS", "12"))
containers = pytest.mark.containers


@pytest.fixture(scope="module")
def host():
    with ContainerHost(ContainerLimits(seconds=60, disk_mb=256, memory_mb=256, processes=64, alive=8)) as made:
        yield made


@pytest.fixture(scope="module")
def base(host):
    return Snapshot(host.image(IMAGE))


@pytest.fixture
def shell(host, base):
    made = ContainerShell(host, base)
    yield made
    made.close()


def left(host, owner=None):
    """Containers and images that bear the label of `owner`, or of this run."""
    return tuple(sum(each["Labels"][LABEL] == (owner or host.owner) for each in kind) for kind in host.made())


def gone(host, owner=None):
    """What is left, once nothing more is removed: the test's own time limit ends a wait for what stays."""
    while left(host, owner) != (0, 0):
        time.sleep(0.1)
    return left(host, owner)


# without a container


def test_output_beyond_the_limit_keeps_its_beginning_and_its_end():
    for size in (10, 100, 101, 5000, 100_000):
        heard = Heard(100)
        heard.take(b"a" * (size // 2), False)
        heard.take(b"state", True)
        heard.take(b"z" * (size - size // 2), False)
        text, cut = heard.text(), size > 100
        assert text.startswith("a") and text.endswith("z") and bytes(heard.error) == b"state"
        assert text.count("a") + text.count("z") - 2 * cut * ("bytes" in text) <= 106
        assert ("more" in text) is cut


@pytest.mark.parametrize("wrong", [{"alive": 0}, {"seconds": 0}, {"mounts": ("/only",)}, {"memory_mb": 1}])
def test_impossible_limits_are_refused(wrong):
    with pytest.raises(ConfigError) as error:
        ContainerLimits(**wrong)
    assert error.value.field == next(iter(wrong))


@pytest.mark.parametrize(
    "row, field",
    [
        ('{"instruction": "x"}', "check"),
        ('{"check": "true"}', "instruction"),
        ('{"instruction": "x", "check": "true"}', "image"),
        ('{"instruction": "x", "check": "true", "image": "i", "colour": 1}', "colour"),
        ('{"instruction": "x", "check": "true", "image": "i", "gold": "ls"}', "gold"),
    ],
)
def test_a_row_that_is_no_task_is_named_by_its_field(tmp_path, row, field):
    pytest.importorskip("docker")
    paths = {"tasks": tmp_path / "tasks.jsonl", "held_out": tmp_path / "others.jsonl"}
    paths["tasks"].write_text(row + "\n")
    paths["held_out"].write_text('{"instruction": "other", "check": "true"}\n')
    part = Part("container", {name: str(path) for name, path in paths.items()})
    with pytest.raises(InputError) as error, open_tasks(part, {"train": 1}):
        pass
    assert error.value.field == field


def test_tasks_are_drawn_by_their_number_alone():
    one, two = container_tasks.generated(17), container_tasks.generated(17)
    assert one[0] == two[0] and vars(one[1]) | {"rng": 0} == vars(two[1]) | {"rng": 0}
    drafts = [container_tasks.generated(number)[1] for number in range(65)]
    assert len({str((draft.say, draft.files, draft.run, draft.checks)) for draft in drafts}) == 65


def test_the_table_of_verdicts_counts_what_one_judge_pays_and_another_one_refuses(tmp_path, capsys):
    def row(task, kind, names, strings, executed, outcome, acts=True):
        judged = {"names": names, "strings": strings, "executed": executed, "outcome": outcome}
        return json.dumps({"task": task, "turn": 0, "kind": kind, "acts": acts, **judged}) + "\n"

    rows = [
        row("a", "control", 1.0, 1.0, 1.0, 1.0),
        row("a", "slip", 1.0, 1.0, 0.0, 0.25),
        row("a", "reworded", 1.0, 0.0, 1.0, 1.0),
        row("b", "slip", 1.0, 1.0, 0.0, 1.0, acts=False),
        row("b", "look", 1.0, 0.0, None, 1.0),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    container_verdicts.table([tmp_path / "rows.jsonl"])
    said = capsys.readouterr().out
    assert "2 tasks, 1 turns, 4 actions" in said and "time): 1 actions of 0 turns" in said
    assert "| paid by strings, refused by executed | 2 of 2: 100% [34%, 100%] | 1 of 1: 100% [21%, 100%] |" in said
    assert "| refused by strings, paid by executed | 1 of 1: 100% [21%, 100%] |" in said
    assert "| paid by strings, refused by outcome | 1 of 2: 50% [0%, 100%] | 1 of 1" in said


def test_the_table_of_samples_counts_every_sample_and_leaves_out_what_one_judge_does_not_know(tmp_path, capsys):
    def profile(name, *rewards):
        made = [
            {"text": text, "reward": reward, "strict": strict, "count": count}
            for text, reward, (strict, count) in zip("abc", rewards, ((1.0, 2), (0.0, 3), (0.0, 1)), strict=True)
        ]
        rows = [{"schema": "x"}, {"trace_id": "t", "turn": 0, "actions": made}]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    container_verdicts.samples([profile("one", 1.0, 0.0, None), profile("two", 1.0, 1.0, 1.0)])
    said = capsys.readouterr().out
    assert "| paid by executed | 2 of 5: 40% [4%, 92%] | 0 of 3: 0%" in said
    assert "| paid by strings, refused by executed | 3 of 5: 60%" in said and "| 3 of 3: 100%" in said


def test_an_action_in_place_of_the_demonstrated_one_is_another_one():
    for number in range(len(container_tasks.FAMILIES)):
        _, draft = container_tasks.generated(number)
        for turn, shown in enumerate(draft.commands):
            drawn = container_verdicts.actions(draft, turn, random.Random(turn))
            assert drawn.pop("control") == shown and drawn.keys() >= {"look", "slip"}
            assert shown not in drawn.values() and drawn.keys() <= container_verdicts.KINDS.keys()


def test_output_that_comes_with_the_head_of_the_answer_is_heard(tmp_path):
    docker = pytest.importorskip("docker")
    path = tmp_path / "daemon"

    def frame(channel, data):
        return bytes([channel, 0, 0, 0]) + len(data).to_bytes(4, "big") + data

    def answer(listener):
        taken, _ = listener.accept()
        with taken:
            while not taken.recv(4096).endswith(b"}"):
                pass
            head = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
            taken.sendall(head + frame(2, b"12\n") + frame(1, b"all of") + frame(1, b" it"))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        daemon = threading.Thread(target=answer, args=(listener,), daemon=True)
        daemon.start()
        client, heard = docker.DockerClient(base_url=f"unix://{path}", version="1.41"), Heard(100)
        shell = ContainerShell(SimpleNamespace(client=client), Snapshot("image"))
        shell._listen("made", heard)
        daemon.join()
        client.close()
    assert (heard.text(), bytes(heard.error)) == ("all of it", b"12\n")


def test_a_daemon_that_refuses_is_gone_and_no_socket_stays_open(tmp_path, monkeypatch):
    pytest.importorskip("docker")
    monkeypatch.setattr("turntree.env.container._AWAY_SECONDS", 0.1)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/daemon")
    with socket.socket(socket.AF_UNIX) as bound, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        bound.bind(f"{tmp_path}/daemon")  # and does not listen
        with pytest.raises(EnvironmentGone):
            ContainerHost().call(dict)
        gc.collect()
    assert [str(each.message) for each in warned if "socket" in str(each.message)] == []


# a shell


@containers
def test_what_a_shell_holds_persists_from_command_to_command(shell):
    said = [
        str(shell.run(command))
        for command in (
            "cd /tmp; x='a  b'; export y=$'1\n2'; f() { echo \"f $1\"; }; declare -A m=([k]=v); umask 027; alias l=ls",
            'echo "$x|$y|${m[k]}|$(umask)"; f 3; pwd; false',
            "echo $?; shopt -s nullglob; readonly z=1; exit 7",
            "echo $?; (z=2) 2>/dev/null || echo fixed; shopt -q nullglob && echo on; exec sleep 0",
            'echo "$x"; trap "echo bye" EXIT; unset x',
            'echo "[$x]"; IFS=:; cd() { echo mine; }; cd /; pwd',
        )
    ]
    assert said == [
        "[no output]",
        "a  b|1\n2|v|0027\nf 3\n/tmp\n[exit code 1]",
        "1\n[exit code 7]",
        "7\nfixed\non",
        "a  b",
        "[]\nmine\n/tmp",
    ]


@containers
def test_a_command_is_stopped_at_its_limits_and_the_files_stay(host, shell):
    shell.run("echo kept > /kept; sleep 300 & disown")
    assert shell.background
    assert shell.run("sleep 60", seconds=1).stopped == "took too long"
    assert shell.run("yes").stopped == "wrote too much"
    filled = shell.run("for n in 1 2 3; do head -c 200000000 /dev/zero > /big$n; done; sleep 30")
    assert filled.stopped == "filled its disk"
    assert shell.run("rm /big*; cat /kept").output == "kept\n"
    assert shell.run("python3 -c 'x = b\"a\" * (600 << 20)'").code not in (0, None), "more memory than there is"
    assert shell.run(":(){ :|:& };:; sleep 60", seconds=2).stopped is not None
    assert shell.run("cat /kept").output == "kept\n"


@containers
def test_a_command_whose_files_come_and_go_is_no_fault(shell):
    """The daemon cannot count a layer in which a file vanishes meanwhile."""
    code = "import os, time\nend = time.time() + 6\nwhile time.time() < end:\n"
    code += " os.makedirs('/x', exist_ok=True)\n for n in range(200): open(f'/x/{n}', 'w').close()\n"
    code += " for n in range(200): os.remove(f'/x/{n}')\n"
    assert shell.run(f"python3 -c {shlex.quote(code)}; echo done").output == "done\n"


def test_what_vanishes_while_it_is_counted_is_counted_again_and_other_faults_are_told():
    def counted(*answers):
        said = iter(answers)

        def call(asked):
            if isinstance(answer := next(said), EnvironmentFault):
                raise answer
            return [{"SizeRw": answer}]

        shell = object.__new__(ContainerShell)
        shell._container, api = SimpleNamespace(id="a"), SimpleNamespace(containers=None)
        shell._host = SimpleNamespace(client=SimpleNamespace(api=api), call=call)
        return shell.written()

    gone = EnvironmentFault('Internal Server Error ("lstat /x/1: no such file or directory")')
    assert counted(7) == 7 and counted(gone, gone, 7) == 7 and counted(gone, gone, gone) is None
    with pytest.raises(EnvironmentFault):
        counted(EnvironmentFault("no space left on device"))


def test_an_archive_that_breaks_off_is_a_fault_and_not_the_files_that_came():
    """Else files of the tests were missing, as if the episode had removed them."""
    whole = _packed({"test.sh": b"a" * 600, "more": b"b"})
    shell = object.__new__(ContainerShell)
    shell._lock, shell.ready = contextlib.nullcontext(), lambda: None
    shell._host = SimpleNamespace(call=lambda asked: asked())
    shell._container = SimpleNamespace(get_archive=lambda path: ([whole[:700], whole[700:]], {}))
    assert shell.get("/tests") == whole
    for length in range(0, 3073, 256):  # its end is two blocks of zeros, and padding
        shell._container = SimpleNamespace(get_archive=lambda path, length=length: ([whole[:length]], {}))
        with pytest.raises(EnvironmentFault):
            shell.get("/tests")


@containers
def test_a_limit_is_an_answer_and_a_lost_container_is_a_fault(host, shell):
    shell.run("echo 1 > /one")
    shell._container.kill()
    with pytest.raises(EnvironmentFault):
        shell.run("cat /one")


@containers
def test_a_full_disk_of_the_store_is_a_fault_and_no_failure_of_the_command(host, shell, monkeypatch):
    shell.run("echo 1 > /one")
    with monkeypatch.context() as full:
        full.setattr("turntree.env.container._FULL", 1 << 60)
        with pytest.raises(EnvironmentFault):
            shell.run("cat /one")
    assert shell.run("cat /one").output == "1\n"


# forks

PARTS = (
    lambda r: f"mkdir -p /w/{r.choice('abc')} && cd /w/{r.choice('abc')}",
    lambda r: f"echo {r.random()} >> {r.choice('xyz')}; cat {r.choice('xyz')}",
    lambda r: f"chmod {r.choice(['600', '755', '4711'])} {r.choice('xyz')}",
    lambda r: f"ln -s{r.choice(['', 'f'])} {r.choice('xyz')} {r.choice('lmn')}; readlink {r.choice('lmn')}",
    lambda r: f"ln -f {r.choice('xyz')} hard; stat -c %h hard",
    lambda r: f"export V{r.choice('ab')}={r.randint(0, 99)}; W=$Va-$Vb; echo $W",
    lambda r: f"rm -f {r.choice('xyzlmn')}; ls",
    lambda r: f"f{r.choice('ab')}() {{ echo {r.randint(0, 9)} $1; return {r.randint(0, 3)}; }}; fa $Vb",
    lambda r: f"umask {r.choice(['022', '077'])}; (exit {r.randint(0, 255)})",
    lambda r: f"mv {r.choice('xyz')} /w/{r.choice('ab')}/ ; chown {r.randint(1, 9)} * ; stat -c '%n %a %u' *",
    lambda r: f"exit {r.randint(0, 9)}",
    lambda r: f"echo $? $PWD $OLDPWD $-; cd ..; touch -d @{r.randint(1, 9)} x; stat -c %Y x",
    lambda r: "dd if=/dev/zero of=sparse bs=1 count=0 seek=1M 2>/dev/null; stat -c %s sparse; mkfifo p; ls",
)


def ran(shell, commands):
    return [(done.output, done.code) for done in map(shell.run, commands)]


@pytest.mark.parametrize(
    ("below", "above", "together"),
    [
        ({"/x": 1}, {"/x": 2}, {}),
        ({"/d": 1, "/d/f": 1}, {"/d": 2}, {}),
        ({"/d": 0, "/d/f": 1, "/e": 1}, {"/d": 2}, {"/d": 2, "/e": 1}),
        ({"/x": 1}, {"/x": 0}, {"/x": 1}),
        ({"/x": 2}, {"/x": 1}, {"/x": 0}),
        ({"/x": 0}, {"/x": 2}, {"/x": 2}),
    ],
)
def test_the_changes_of_two_layers_are_those_of_one(below, above, together):
    """Added 1, changed 0, deleted 2: what was added below and deleted above leaves nothing, with all that was in it."""
    shell = object.__new__(ContainerShell)
    shell._lock, shell._paths = contextlib.nullcontext(), below
    shell._container = SimpleNamespace(diff=lambda: [{"Path": path, "Kind": kind} for path, kind in above.items()])
    shell._host = SimpleNamespace(call=lambda asked: asked())
    assert shell.changed() == together


@containers
@pytest.mark.parametrize(
    "seed", sorted({*range(HISTORIES), 6, 14, 34, 42, 51, 64, 118, 140, 251})
)  # these add, fork and delete, or change one of a file's names
def test_a_fork_is_what_a_replay_is_and_neither_sees_the_other(host, base, seed):
    draw = random.Random(seed)
    history = [draw.choice(PARTS)(draw) for _ in range(draw.randint(2, 8))]
    mine, its = ([draw.choice(PARTS)(draw) for _ in range(3)] for _ in range(2))
    parent, replay, other = (ContainerShell(host, base) for _ in range(3))
    before = ran(parent, history)
    fork = parent.fork()
    if fork is None:  # replayed, as where a file has several names
        assert any(command.startswith("ln -f") for command in history)
        fork = ContainerShell(host, base)
        ran(fork, history)
    after, apart = ran(parent, mine), ran(fork, its)
    assert ran(replay, [*history, *mine]) == [*before, *after]
    assert ran(other, [*history, *its]) == [*before, *apart]
    assert replay.state() == parent.state() and other.state() == fork.state()
    for each in (parent, replay, other, fork):
        each.close()


@containers
def test_a_file_with_several_names_is_not_forked(shell):
    """A layer parts the names where one of them is changed."""
    assert shell.run("mkdir /w; cd /w; echo a > x; ln -s x soft; ln x y").code == 0
    assert shell.fork() is None
    assert shell.run("rm y").code == 0
    assert shell.fork() is not None


@containers
def test_processes_in_the_background_are_not_forked(shell):
    shell.run("sleep 100 &")
    assert shell.fork() is None
    shell.restart()
    assert shell.fork() is not None


@containers
def test_a_container_in_the_way_of_the_budget_goes_on_as_if_nothing_had_happened(host, base):
    shells = [ContainerShell(host, base) for _ in range(host.limits.alive + 2)]
    for number, each in enumerate(shells):
        each.run(f"cd /tmp; n={number}; echo $n > file")
    assert sum(each.alive for each in shells) <= host.limits.alive
    assert [each.run("echo $n $(cat file) $PWD").output for each in shells[:3]] == [f"{n} {n} /tmp\n" for n in range(3)]
    for each in shells:
        each.close()


@containers
def test_forks_of_forks_leave_no_container_and_no_image(base):
    with ContainerHost(ContainerLimits(alive=6)) as own:
        shells = [ContainerShell(own, base)]
        for number in range(FORKS):
            parent = shells[number // 2]
            parent.run(f"echo {number} >> /log")
            shells.append(parent.fork())
        assert shells[-1].run("cat /log").code == 0
        for each in shells:
            each.close()
        del shells, parent, each
        assert gone(own) == (0, 0), "while the run goes on"


CHILD = """
import sys, time
from turntree.env.container import ContainerHost, Snapshot
from turntree.env.container_shell import ContainerShell
with ContainerHost() as host:
    shell = ContainerShell(host, Snapshot(host.image(sys.argv[1])))
    shell.run("echo 1 > /one")
    fork = shell.fork()
    fork.run("echo 2 > /two")
    print(host.owner, flush=True)
    while True:
        shell.run("date > /now")
"""


@containers
def test_what_a_killed_run_leaves_the_next_one_removes(host):
    with subprocess.Popen([sys.executable, "-c", CHILD, IMAGE], stdout=subprocess.PIPE, text=True) as child:
        owner = child.stdout.readline().strip()
        assert left(host, owner) > (1, 0)
        child.send_signal(signal.SIGKILL)
    with ContainerHost() as following:
        assert gone(following, owner) == (0, 0)


@containers
@pytest.mark.parametrize("size", [1_100_000, 6_000_000])
def test_what_a_shell_cannot_keep_is_told_and_it_stays_as_it_was(shell, size):
    """A fault would let a rollout that fails censor itself; in silence its folder and variables would be lost."""
    shell.run("cd /usr; x=1")
    assert "of more than 1,000,000 bytes" in str(shell.run(f"big=$(head -c {size} /dev/zero | tr '\\0' a); cd /"))
    assert shell.run('echo "$PWD $x ${#big}"').output == "/usr 1 0\n"


@containers
def test_a_shell_is_counted_in_bytes_and_shows_nothing_of_ours(shell):
    for command in ("export LANG=C.UTF-8", "x=$(printf '中%.0s' $(seq 60000))", "unset x"):
        assert shell.run(command).code == 0
    assert shell.run('echo "$#:$1"').output == "0:\n"


@containers
def test_an_image_that_the_daemon_refuses_and_a_folder_that_is_none_are_named(host, base):
    with pytest.raises(InputError) as error:
        host.image("My Image:1")
    assert error.value.field == "image"
    task = task_in(host, base, missing="/nowhere")
    with pytest.raises(EnvironmentFault, match="/nowhere"):
        task.reset()
    assert not [each for each in host.made()[0] if each["Labels"][LABEL] == host.owner] or gone(host)


@containers
def test_a_check_that_the_kernel_killed_says_nothing_of_the_policy(shell):
    with pytest.raises(EnvironmentFault):
        checked_by(shell, "kill -9 $$")


@pytest.mark.parametrize("key", ["setup", "folder", "user", "kind", "image"])
def test_what_is_no_text_in_a_task_is_refused(tmp_path, key):
    row = {"instruction": "do", "check": "true", "image": "i", key: ["mkdir /app"]}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row | {"id": str(n)}) + "\n" for n in range(9)))
    source = ContainerTasks(tasks=str(tmp_path / "tasks.jsonl"))
    with pytest.raises(InputError) as error:
        source.of_split("train", 1, 0)
    assert error.value.field == key


# episodes


def task_in(host, base, missing="", **more):
    task = ContainerTask(
        id="a", instruction="make /app/done", image=lambda _: base.image, folder=missing or "/app", setup="mkdir /app",
        judge=lambda shell: checked_by(shell, "test -f /app/done"), gold=("echo yes > done",), **more,
    )  # fmt: skip
    arguments = {"task": task, "host": host}
    return ToolEnvironment(ContainerTools, task_id="a", arguments=arguments, gold=task.messages())


def bash(command):
    return Message("assistant", "", (ToolCall("bash", {"command": command}, "call_1"),))


SUBMIT = Message("assistant", "", (ToolCall("submit", {}, "call_2"),))


@containers
def test_what_the_drill_of_kills_plays_has_the_rewards_that_it_expects(tmp_path):
    folder = container_tasks.write(0, tmp_path / "tasks")
    container_kills.run(tmp_path / "tasks", tmp_path / "rows.jsonl")
    rewards = {row["episode"].split("/")[1]: row["reward"] for row in container_kills.rows(tmp_path / "rows.jsonl")}
    assert rewards == {"solution": 1.0} | {path.stem: 0.0 for path in (folder / "mutants").glob("*.sh")}


@containers
def test_an_episode_in_a_container_keeps_the_laws(host, base):
    law = {found.law for found in check_environment(task_in(host, base), turns=4)}
    assert law <= {"a task can be sent to a worker process"}


@containers
def test_a_lost_container_is_replayed_and_changes_no_answer(host, base):
    with LocalPool(2) as pool:
        session = pool.open(task_in(host, base))
        pool.reset(session)
        pool.poll()
        for number, action in enumerate(
            [bash("echo 1 > x; n=5"), bash("cat x; echo $n"), bash("echo yes > done"), SUBMIT]
        ):
            if number in (1, 2):  # the judgement at the end restarts its container, whose files are there
                pool._held[session].object._shell._container.kill()
                pool.step(session, action)
                [lost] = pool.poll().values()
                assert lost.observation is None and lost.fault, "censored, not failed"
            pool.step(session, action)
            [answer] = pool.poll().values()
            assert answer.fault is None
        assert [each.messages[-1].content for each in session.answers[1:]] == [
            "[no output]",
            "1\n5",
            "[no output]",
            "submitted",
        ]
        assert answer.observation.reward == 1.0
        pool.close(session)


@containers
def test_a_daemon_that_ends_is_started_again_and_shells_go_on(base):
    with ContainerHost() as own:
        if own._service is None:
            pytest.skip("the daemon here is not ours to end")
        shell = ContainerShell(own, base)
        shell.run("echo 1 > /one")
        own._service.kill()
        own._service.wait()
        assert shell.run("cat /one").output == "1\n"
        shell.close()


@containers
@pytest.mark.parametrize("begun", [False, True], ids=["before the command began", "in the middle of it"])
@pytest.mark.parametrize("script", [False, True], ids=["command", "script"])
def test_a_daemon_that_ends_under_a_command_gives_no_answer(base, monkeypatch, begun, script):
    """What the command said until then is not all of it, and an exit code of 0 is that of nothing."""
    listen = ContainerShell._listen

    def ended(shell, made, heard):
        if not begun:
            own._service.kill()
            own._service.wait()
            own._answers()
            return
        killer = threading.Timer(0.7, own._service.kill)
        killer.start()
        listen(shell, made, heard)
        killer.join()
        own._service.wait()

    with ContainerHost() as own:
        if own._service is None:
            pytest.skip("the daemon here is not ours to end")
        shell = ContainerShell(own, base)
        shell.run("echo 1 > /one")
        monkeypatch.setattr(ContainerShell, "_listen", ended)
        with pytest.raises(EnvironmentFault):
            command = "echo begun; sleep 2; echo done"
            shell.script(["bash", "-c", command], seconds=9) if script else shell.run(command)
        monkeypatch.undo()
        assert shell.run("cat /one").output == "1\n"
        shell.close()


@containers
def test_a_shell_that_its_command_ends_has_an_exit_code(shell):
    """`exec` and signals leave nobody who could save the shell's state."""
    assert [shell.run(command).code for command in ("exec true", "exec false", "kill -9 $$", "kill -9 -1")] == [
        0, 1, 137, 137,
    ]  # fmt: skip
    assert shell.script(["bash", "-c", "exit 3"], seconds=9).code == 3
    assert shell.script(["bash", "-c", "kill -9 -1"], seconds=9).code == 137


HOSTILE = (
    "echo 1 > /proc/sysrq-trigger",
    "mount -t tmpfs none /mnt",
    "mount --bind / /mnt",
    "mknod /dev/sdz b 8 0",
    "unshare -rm mount -o remount,rw /sys",
    "chroot /proc/1/root test -e CANARY",
    "nsenter -t 1 -a hostname",
    "cat /proc/kcore | head -c 1 | grep -q .",
    "test -S /var/run/docker.sock",
    "find / -xdev -name 'podman.sock' -o -xdev -name 'docker.sock' | grep .",
    "python3 -c \"import socket; socket.create_connection(('10.88.0.1', 22), 2)\"",
    "python3 -c \"import socket; socket.create_connection(('169.254.169.254', 80), 2)\"",
    "python3 -c \"import socket; socket.getaddrinfo('example.com', 80)\"",
    "python3 -c \"import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\"",
    "kill -9 1; kill -9 -1; sleep 0.2; test ! -d /proc/1",
    "echo c > /sys/fs/cgroup/memory/release_agent",
    "echo -1 > /sys/fs/cgroup/pids/pids.max",
    "echo x > /proc/sys/kernel/core_pattern",
    "hostname other",
    "date -s 2001-01-01",
    "swapon /dev/zero",
    "insmod x.ko 2>/dev/null || modprobe loop",
    "dmesg | grep -q .",
    "ls /tests /solution",
    "test -e /logs/verifier/reward.txt",
    "ip link set lo down",
    "grep -z TURNTREE /proc/1/environ",
    "head -c 400000000 /dev/zero > /big",
    "python3 -c \"import ctypes; raise SystemExit(ctypes.CDLL(None).reboot(0x1234567) == -1)\"",
    "ls /proc/*/root/work 2>/dev/null | grep .",
)  # fmt: skip


@containers
def test_thirty_hostile_programs_reach_neither_host_nor_sibling_nor_reward(host, base, tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("whole")
    inside, sibling = ContainerShell(host, base), ContainerShell(host, base)
    sibling.run("echo mine > /mine")
    worked = [each for each in HOSTILE if inside.run(each.replace("CANARY", str(canary)), seconds=10).code == 0]
    assert worked == []
    assert inside.run(f"cat {canary}").code != 0 and canary.read_text() == "whole"
    assert sibling.run("cat /mine; ls /big").output.startswith("mine\n")
    assert abs(time.time() - float(sibling.run("date +%s").output)) < 60
    for each in (inside, sibling):
        each.close()
    assert len(HOSTILE) == 30 and len(set(itertools.chain(HOSTILE))) == 30
