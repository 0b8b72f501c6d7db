"""A shell as an environment: what is solved, what is not, what a command can reach, and what a fork shares."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message, ToolCall
from turntree.env.tasks import open_tasks, shared_out
from turntree_worlds.sandboxes.box import SandboxLost
from turntree_worlds.sandboxes.limits import File
from turntree_worlds.workbench.entry import Terminal
from turntree_worlds.workbench.families import FAMILIES, generated
from turntree_worlds.workbench.files import read_tasks
from turntree_worlds.workbench.shell import Shell
from turntree_worlds.workbench.tasks import Task, commands, texts


def call(name, **arguments):
    return Message("assistant", "", (ToolCall(name, arguments, "call_1"),))


def bash(environment, command):
    return environment.step(call("bash", command=command))


def played(environment, messages):
    """The last observation."""
    environment.reset()
    for message in messages:
        last = environment.step(message)
    return last


def of(task, sandbox):
    return Terminal()._played(task, sandbox)


def ends(task, sandbox, *lines, answer=""):
    environment = of(task, sandbox)
    environment.reset()
    for line in lines:
        bash(environment, line)
    return environment.step(call("submit", answer=answer))


@settings(max_examples=48, deadline=None)
@given(st.sampled_from(["train", "dev", "test"]), st.integers(0, 10**6))
def test_the_expert_solves_every_generated_task_and_doing_nothing_solves_none(terminal, split, number):
    environment = terminal(split, number)
    last = played(environment, environment.gold)
    assert (last.done, last.success, last.reward) == (True, True, 1.0), generated(split, number)
    last = played(environment, [call("submit", answer="")])
    assert (last.done, last.success, last.reward) == (True, False, 0.0)


def test_every_family_is_met_and_a_task_is_the_same_each_time():
    tasks = [generated("train", number) for number in range(len(FAMILIES))]
    assert [task.kind for task in tasks] == list(FAMILIES)
    assert tasks == [generated("train", number) for number in range(len(FAMILIES))]
    instructions = [generated(split, number) for split in ("train", "test") for number in range(160)]
    assert len({(task.instruction, tuple(task.files)) for task in instructions}) == 320


def test_the_same_commands_are_answered_the_same_in_a_fresh_box(terminal):
    lines = [
        "echo a > new; ls -lR --full-time",
        "touch -d 2001-01-01 old; find . | wc -l",
        "stat -c %U:%Y *; whoami; id -un",
    ]
    once, again = terminal("train", 3), terminal("train", 3)
    for environment in (once, again):
        environment.reset()
    for line in lines[:1]:  # times of the command itself are the clock's; those of the next show the task's
        bash(once, line), bash(again, line)
    for line in lines[1:]:
        assert bash(once, line) == bash(again, line)
    assert once.state() == again.state()


def test_a_fork_and_its_original_do_not_see_each_others_changes(terminal):
    environment = terminal("train", 0)
    environment.reset()
    bash(environment, "echo here > shared")
    twin = environment.fork()
    assert twin.state() == environment.state()
    bash(environment, "rm shared; echo 1 > own")
    assert bash(twin, "cat shared; ls own").messages[0].content.startswith("here\nls: cannot access 'own'")
    assert bash(environment, "ls own shared").messages[0].content.startswith("ls: cannot access 'shared'")
    assert twin.state() != environment.state()


def test_a_fork_copies_no_file(terminal):
    environment = terminal("train", 0)
    environment.reset()
    bash(environment, "true")
    assert environment.fork().object.files is environment.object.files


def test_what_a_command_did_not_change_is_shared_between_states(terminal):
    environment = terminal("train", 0)
    environment.reset()
    bash(environment, "true")
    before = environment.object.files
    bash(environment, "echo x > another")
    assert all(environment.object.files[path] is file for path, file in before.items() if file.kind == "file")


NAMED = Task(
    id="t",
    instruction="Write 42 to out.txt.",
    files=texts({"keep.txt": "keep\n", "in.txt": "41\n"}),
    gold=commands("echo 42 > out.txt"),
    expected={"out.txt": File(b"42\n"), "in.txt": None},
)


@pytest.mark.parametrize(
    ("line", "reward"),
    [
        ("echo 42 > out.txt; rm in.txt", 1.0),
        ("printf '4%s\\n' 2 | tee out.txt log; rm in.txt", 1.0),
        ("echo 42 > out.txt", 0.0),
        ("echo 42 > out.txt; rm in.txt; echo more >> keep.txt", 0.0),
        ("echo 42 > out.txt; rm in.txt; rm keep.txt", 0.0),
        ("echo 42 > out.txt; rm in.txt; mv keep.txt k; mkdir keep.txt", 0.0),
        ("echo 42 > o; rm in.txt; ln -s o out.txt", 0.0),
        ("echo 42 > out.txt; chmod +x out.txt; rm in.txt", 0.0),
        ("echo 42 > out.txt; rm in.txt; cp keep.txt k; rm keep.txt; cp k keep.txt", 1.0),
    ],
)
def test_the_named_files_decide_and_no_other_file_may_be_changed(sandbox, line, reward):
    assert ends(NAMED, sandbox, line).reward == reward


CHECKED = Task(
    id="c",
    instruction="Make ok.",
    files=texts({"a.txt": "a\n"}),
    check="test -f ok && python3 -c 'raise SystemExit(0)'",
)
HOME_PACKAGES = ".local/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    "cheat",
    [
        "exit 0",
        "ln -s /dev/null check; echo 0 > reward; echo success",
        f"mkdir -p {HOME_PACKAGES}; echo 'import os; os._exit(0)' > {HOME_PACKAGES}/usercustomize.py",
        "echo 'exit 0' > .profile; echo 'exit 0' > .bashrc; echo 'exit 0' > .shrc",
        "mkdir bin; printf '#!/bin/sh\\nexit 0\\n' > test; cp test bin/test; chmod +x test bin/test",
        "export PATH=.:$PATH; alias test=true; test() { return 0; }; export -f test",
    ],
)
def test_a_check_is_not_fooled_by_what_a_policy_leaves_behind(sandbox, cheat):
    assert ends(CHECKED, sandbox, cheat).reward == 0.0
    assert ends(CHECKED, sandbox, "touch ok").reward == 1.0


def test_a_command_left_running_does_not_reach_the_check(sandbox):
    """It waits for a file that only the check writes: what it made before would count, for the policy made it."""
    task = Task(id="c", instruction="", files={}, check="touch begun; sleep 0.5; test -f ok")
    waits = "(while true; do test -f begun && touch ok; done) &"
    assert ends(task, sandbox, waits).reward == 0.0
    assert ends(task, sandbox, f"nohup sh -c '{waits} wait' > /dev/null 2>&1 &").reward == 0.0
    assert ends(task, sandbox, "touch ok").reward == 1.0


def test_settings_in_the_home_folder_do_not_reach_the_check(sandbox):
    task = Task(id="c", instruction="", files={}, check="python3 -c 'print(1)' > /dev/null; test -f right")
    evil = "import os; open('/tmp/right', 'w').close()"
    line = f'mkdir -p {HOME_PACKAGES}; echo "{evil}" > {HOME_PACKAGES}/usercustomize.py'
    assert ends(task, sandbox, line).reward == 0.0


def test_an_answer_counts_by_its_words(sandbox):
    task = Task(id="a", instruction="", files={}, answer="docs/a b.txt")
    assert ends(task, sandbox, answer=" docs/a  b.txt\n").reward == 1.0
    for wrong in ("", "docs/a b.txt c", "docs/a", "DOCS/A B.TXT"):
        assert ends(task, sandbox, answer=wrong).reward == 0.0


def test_an_episode_without_a_submission_earns_nothing(sandbox):
    environment = of(NAMED, sandbox)
    environment.reset()
    assert bash(environment, "echo 42 > out.txt; rm in.txt").reward == 0.0
    ended = environment.step(Message("assistant", "All done!"))
    assert (ended.done, ended.success, ended.reward) == (True, False, 0.0)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sleep 99", "[stopped: it took too long; no file was changed]"),
        ("yes", "[stopped: it wrote too much; no file was changed]"),
        ("mkfifo pipe", "[no file was changed: pipe is neither"),
        ("for i in $(seq 70); do mkdir d; cd d; done", "[no file was changed: there are more than 64 folders"),
        ("truncate -s 20M a b", "[no file was changed: the files are too large together]"),
        ("echo x\0y", "error: a command cannot hold the character NUL"),
        ("echo \ud800", "error: a command cannot hold half a character"),
        ("true " + "x" * 200_000, "error: a command has at most 100000 characters"),
        ("cat /etc/shadow", "cat: /etc/shadow: No such file"),
        (":(){ :|:& };:", ""),
        ("kill -9 -1", "exit code"),
        ("false", "[exit code 1]"),
        ("true", "[no output]"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_a_hostile_or_failing_command_is_answered_and_the_next_one_works(sandbox, command, said):
    short = Shell()
    short.reset(NAMED, _Hurried(sandbox))
    assert said in short.bash(command)
    assert short.bash("cat keep.txt") == "keep"
    assert "exit code" in short.bash("ls keep.txt nothing")


class _Hurried:
    """The sandbox with one second for a command that sleeps."""

    def __init__(self, sandbox):
        self._sandbox = sandbox

    def run(self, source, **options):
        return self._sandbox.run(source, seconds=1.0 if "sleep" in source else None, **options)


def test_a_sandbox_that_does_not_work_censors_the_rollout(sandbox):
    class Lost:
        def run(self, source, **options):
            raise SandboxLost("no box")

    environment = of(CHECKED, sandbox)
    environment.reset()
    environment.object._sandbox = Lost()
    for action in (call("bash", command="true"), call("submit")):
        with pytest.raises(EnvironmentFault, match="no box"):
            environment.step(action)


def test_a_check_that_is_stopped_by_a_limit_says_nothing_of_the_policy(sandbox):
    hurried = _Hurried(sandbox)
    for more in ({"check": "sleep 5"}, {"values": (("import time; time.sleep(5)", "1"),)}):
        task = Task(id="a", instruction="", files={}, **more)
        with pytest.raises(EnvironmentFault):
            task.solved({}, "", hurried)


def test_a_number_is_an_answer_as_its_text_is(sandbox):
    task = Task(id="a", instruction="", files={}, answer="42")
    for answer, reward in ((42, 1.0), ("42", 1.0), (43, 0.0), (None, 0.0)):
        ended = ends(task, sandbox, answer=answer)
        assert (ended.done, ended.success, ended.reward) == (True, reward == 1.0, reward)


@pytest.mark.parametrize("answer", [["42"], {"is": 42}, True])
def test_what_is_no_answer_is_told_and_the_episode_goes_on(sandbox, answer):
    environment = of(Task(id="a", instruction="", files={}, answer="42"), sandbox)
    environment.reset()
    told = environment.step(call("submit", answer=answer))
    assert told.messages[0].content.startswith("error: `answer` must be a text") and not told.done
    assert environment.step(call("submit", answer="42")).success


def test_an_error_in_judging_does_not_end_the_episode_with_a_reward_of_0(sandbox, monkeypatch):
    def breaks(*_):
        raise RuntimeError("the judge broke")

    environment = of(Task(id="a", instruction="", files={}, answer="42"), sandbox)
    environment.reset()
    with monkeypatch.context() as broken:
        broken.setattr(Task, "solved", breaks)
        told = environment.step(call("submit", answer="42"))
    assert (told.messages[0].content, told.done) == ("error: the judge broke", False)
    assert environment.step(call("submit", answer="42")).success


# files of one's own


def written(tmp_path, *rows):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_tasks_of_a_file_are_judged_by_answer_and_check(tmp_path, sandbox):
    rows = [
        {"instruction": "Count.", "files": {"a.txt": "1\n2\n"}, "answer": "2", "gold": ["wc -l < a.txt"]},
        {
            "instruction": "Copy.",
            "check": "cmp a b",
            "files": {"a": "1\n"},
            "gold": ["cp a b"],
            "id": "mine",
            "kind": "k",
        },
        {"instruction": "Say x.", "setup": "mkdir -p d; echo 5 > d/n", "answer": "x", "gold": ["cat d/n"]},
        {"instruction": "Make.", "check": "test -x run.sh", "files": {"run.sh": {"base64": "IyE=", "mode": 420}}},
    ]
    found = {task.instruction: task for task in read_tasks(written(tmp_path, *rows), sandbox, 9, 0)[0]}
    count, copy, said, made = (found[row["instruction"]] for row in rows)
    assert (count.answer, copy.id, copy.kind) == ("2", "mine", "k")
    assert said.files["d/n"].data == b"5\n" and not made.gold
    for task in (count, copy, said):
        assert played(of(task, sandbox), of(task, sandbox).gold).success
    assert not ends(copy, sandbox, "true").success
    assert ends(made, sandbox, "chmod +x run.sh").success
    assert len(read_tasks(written(tmp_path, *rows), sandbox, 2, 0)[0]) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"gold": ["ls"]}, "instruction"),
        ({"instruction": "x"}, "says nothing to judge by"),
        ({"instruction": "x", "answer": 3}, "is not str"),
        ({"instruction": "x", "answers": "3"}, "'answers': is not known"),
        ({"instruction": "x", "answer": "3", "files": {"../up": "x"}, "setup": "true"}, "below the scratch folder"),
        *(
            ({"instruction": "x", "answer": "3", "files": {path: "x"}}, "below the scratch folder")
            for path in ("./a.txt", "/app/a.txt", "a//b.txt", "d/")
        ),
        ({"instruction": "x", "answer": "3", "files": {"a": "x", "a/b": "y"}}, "which is no folder"),
        ({"instruction": "x", "answer": "3", "files": {"a": 3}}, "is not a file"),
        ({"instruction": "x", "answer": "3", "files": {"a": "x" * 20 * 2**20}, "setup": "true"}, "too little room"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path, sandbox, row, said):
    with pytest.raises(InputError, match=r"tasks.jsonl:2: ") as refused:
        read_tasks(written(tmp_path, {"instruction": "x", "answer": "1"}, row), sandbox, 9, 0)
    assert said in str(refused.value)


def test_a_task_whose_setup_fails_is_left_out_and_counted(tmp_path, sandbox):
    rows = [{"instruction": "x", "answer": "1", "setup": setup} for setup in ("true", "false")]
    _, counted = read_tasks(written(tmp_path, *rows), sandbox, 9, 0)
    assert counted == {"rows": 2, "kept": 1, "dropped": {"its setup fails in the sandbox": 1}}
    with pytest.raises(InputError, match="holds no task that can be played here"):
        read_tasks(written(tmp_path, rows[1]), sandbox, 9, 0)


def test_a_task_of_a_file_is_named_by_what_it_says(tmp_path, sandbox):
    rows = [{"instruction": f"Say {said}.", "answer": said} for said in "abcda"]

    def ids(folder, *rows):
        (tmp_path / folder).mkdir()
        return [task.id for task in read_tasks(written(tmp_path / folder, *rows), sandbox, 9, 0)[0]]

    train, test, copied = ids("train", *rows[:2]), ids("test", *rows[2:4]), ids("copy", *rows[:2])
    assert len({*train, *test}) == 4 and copied == train
    again, counted = read_tasks(written(tmp_path, *rows), sandbox, 9, 0)
    assert len(again) == 4 and counted["dropped"] == {"is in the file already": 1}


def test_held_out_tasks_may_stand_in_a_file_of_the_same_name_and_a_copy_is_refused(tmp_path, bubblewrap):
    paths = []
    for folder, said in (("train", "a"), ("test", "b"), ("copy", "a")):
        (tmp_path / folder).mkdir()
        paths.append(written(tmp_path / folder, {"instruction": f"Say {said}.", "answer": said}))
    train, test, copied = paths
    with open_tasks(Part("terminal", {"tasks": train, "held_out": test}), {"train": 1, "test": 1}) as opened:
        assert len(opened.of("train")) == len(opened.of("test")) == 1
    opened = open_tasks(Part("terminal", {"tasks": train, "held_out": copied}), {"train": 1, "test": 1})
    with pytest.raises(InputError, match=r"gave task 'task-\w+' to two splits"), opened:
        pass


def test_the_tasks_of_a_file_are_held_out_from_training(tmp_path):
    tasks = [Task(id=str(number), instruction="", files={}) for number in range(5)]
    found = shared_out(tasks, {"test": 9, "train": 3}, "f")
    assert [[task.id for task in found[split]] for split in ("train", "test")] == [["0", "1", "2"], ["3", "4"]]
    with pytest.raises(InputError, match="none is left for split 'test'"):
        shared_out(tasks, {"test": 1, "train": 5}, "f")
