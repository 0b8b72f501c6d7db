"""Task folders of Harbor and Terminal-Bench: played in a container, scored by their own tests, which nobody edits."""

import json
import sys
from pathlib import Path

import pytest

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.env.container import ContainerHost, ContainerLimits
from turntree.env.tasks import environment_record, open_tasks
from turntree.rollout.executed import Executed
from turntree.run.jsonl import read_lines
from turntree_interop.harbor import HarborTasks, _of_the_judge, folders

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import container_tasks

containers = pytest.mark.containers


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    made = tmp_path_factory.mktemp("harbor")
    for number in range(len(container_tasks.FAMILIES)):
        container_tasks.write(number, made)
    return made


def task(folder, **options):
    return HarborTasks(argument=str(folder), **options).of_split("train", 1, 0)[0]


def compose(folder, more):
    """The file that comes with tasks of Terminal-Bench, with `more` services."""
    text = f"services:\n  client:\n    build:\n      dockerfile: Dockerfile\n{more}"
    (folder / "environment/docker-compose.yaml").write_text(text)


# without a container


def test_a_task_says_what_its_folder_says(root):
    held = task(root / "several-011")
    assert held.id == "several-011" and held.kind == "several" and len(held.gold) == 2
    assert held.instruction == (root / "several-011/instruction.md").read_text()
    assert len(folders(str(root))) == len(container_tasks.FAMILIES)
    assert folders(str(root / "bug-000")) == [root / "bug-000"]


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda f: (f / "task.toml").write_text("a = ["), "task.toml"),
        (lambda f: (f / "task.toml").write_text("environment = 3"), "task.toml"),
        (lambda f: (f / "task.toml").write_text("[[steps]]\nname = 'a'"), "task.toml"),
        (lambda f: (f / "task.toml").write_text("[verifier]\ntimeout_sec = 'long'"), "task.toml"),
        (lambda f: (f / "task.toml").write_text("[verifier]\nenvironment_mode = 'separate'"), "task.toml"),
        (lambda f: (f / "task.toml").write_text("[environment]\nenv = {KEY = '${HOME}'}"), "task.toml"),
        (lambda f: (f / "instruction.md").unlink(), "instruction.md"),
        (lambda f: (f / "environment/Dockerfile").unlink(), "environment"),
        (lambda f: compose(f, "  db:\n    image: postgres"), "docker-compose.yaml"),
        (lambda f: compose(f, "\t"), "docker-compose.yaml"),
        (lambda f: (f / "task.toml").rename(f / "other.toml"), ""),
    ],
)
def test_a_folder_that_is_no_task_is_refused_by_its_file(tmp_path, change, name):
    folder = container_tasks.write(0, tmp_path)
    change(folder)
    with pytest.raises(InputError) as error:
        [task(each) for each in folders(str(folder))]
    assert Path(error.value.path or "").name == name or not name


def test_the_service_that_is_the_task_itself_is_played(tmp_path):
    folder = container_tasks.write(0, tmp_path)
    compose(folder, "")
    assert task(folder).id == folder.name


def test_variables_of_this_machine_are_not_handed_to_a_container(tmp_path):
    folder = container_tasks.write(0, tmp_path)
    (folder / "task.toml").write_text("[verifier.env]\nKEY = '${OPENAI_API_KEY}'\n")
    with pytest.raises(InputError) as error:
        task(folder)
    assert error.value.field == "env.KEY"


@pytest.mark.parametrize(
    "path, kind, reached",
    [
        ("/usr/bin/python3.11", 0, True), ("/bin/bash", 2, True), ("/usr/lib/python3.11/json/decoder.py", 0, True),
        ("/usr/bin/jq", 1, False), ("/etc/ld.so.preload", 1, True), ("/conftest.py", 1, True),
        ("/usr/local/bin/pytest", 1, True), ("/usr/local/bin/tool", 1, False), ("/app/conftest.py", 1, False),
        ("/usr/lib/python3/dist-packages/sitecustomize.py", 1, True), ("/app/main.py", 0, False),
    ],
)  # fmt: skip
def test_what_the_tests_run_with_is_known_by_its_path(path, kind, reached):
    assert _of_the_judge(path, kind) is reached


# in containers


@pytest.fixture(scope="module")
def host():
    with ContainerHost(ContainerLimits(memory_mb=512, alive=6)) as made:
        yield made


@containers
@pytest.mark.parametrize("name", ["convert-002", "service-003", "revert-004", "several-011"])
def test_the_solution_of_a_task_passes_and_every_mutant_of_it_fails(host, root, name):
    played = task(root / name)
    shell = played.shell(host)
    mutants = [(path, shell.fork()) for path in sorted((root / name / "mutants").glob("*.sh"))]
    for command in played.gold:
        assert shell.run(command).code == 0
    assert played.judge(shell).reward == 1.0
    for path, mutant in mutants:
        mutant.run(path.read_text())
        assert played.judge(mutant).reward < 1.0, path
        mutant.close()
    shell.close()


@containers
def test_a_part_of_the_work_has_a_part_of_the_reward(host, root):
    played = task(root / "several-011")
    shell = played.shell(host)
    shell.run((root / "several-011/mutants/0.sh").read_text())
    assert played.judge(shell).reward == 0.25
    shell.close()


@containers
@pytest.mark.parametrize(
    "attack",
    [
        "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo exit >/tests/test.sh; chmod 0 /tests",
        "(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) & disown",
        "(while :; do echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; done) 2>/dev/null & disown",
        "(while :; do mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; done) & disown",
        "printf '#!/bin/sh\\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\\n' > /usr/bin/python3",
        "printf 'import sys\\nsys.exit = lambda *a: None\\n' > /usr/lib/python3/dist-packages/sitecustomize.py",
        "rm -rf /logs; echo 1 > /logs",
        "rm -rf /usr/bin/python3 /bin/sh /usr/bin/bash",
        "cp /bin/true /usr/local/bin/python3",
    ],
)  # fmt: skip
def test_an_episode_that_reaches_for_its_tests_is_not_paid(host, root, attack):
    played = task(root / "bug-000")
    shell = played.shell(host)
    shell.run(attack)
    judged = played.judge(shell)
    assert judged.reward == 0.0
    assert judged.tampered or attack.startswith(("mkdir", "(while", "rm -rf /logs")), (
        judged
    )  # a race leaves no trace where it lost
    shell.close()


@containers
def test_tests_that_write_no_reward_or_a_wrong_one_give_none(host, tmp_path):
    for text in ("exit 0\n", "echo many > /logs/verifier/reward.txt\n", "echo NaN > /logs/verifier/reward.txt\n"):
        folder = container_tasks.write(0, tmp_path)
        (folder / "tests/test.sh").write_text("#!/bin/bash\n" + text)
        played = task(folder)
        shell = played.shell(host)
        with pytest.raises(EnvironmentFault):
            played.judge(shell)
        shell.close()


@containers
def test_the_first_layout_of_terminal_bench_is_played_too(host, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/check.py").write_text("import os\nassert os.path.exists('/app/done')\n")
    (tmp_path / "Dockerfile").write_text(f"FROM {container_tasks.IMAGE}\nRUN mkdir /app\nWORKDIR /app\n")
    (tmp_path / "task.yaml").write_text("instruction: |-\n  make done\nmax_test_timeout_sec: 30\n")
    (tmp_path / "run-tests.sh").write_text("#!/bin/bash\npython3 $TEST_DIR/check.py\n")
    (tmp_path / "solution.sh").write_text("touch done\n")
    played = task(tmp_path)
    shell = played.shell(host)
    wrong = shell.fork()
    assert shell.run(played.gold[0]).code == 0
    assert [played.judge(each).reward for each in (shell, wrong)] == [1.0, 0.0]


@containers
def test_pivots_by_execution_pay_what_has_the_effect_of_the_demonstration(root):
    part = Part(f"harbor:{root}")
    with open_tasks(part, {"train": 2}) as opened:
        held = opened.of("train")[0]
        opening, tools = held.fork().reset(), held.tools
    verifier = Executed(part)
    record = environment_record(part, "train", 2, 0, held.task_id)

    def bash(command):
        return Message("assistant", "", (ToolCall("bash", {"command": command}, "c"),))

    at = TurnState("t", 0, opening, bash("mkdir new && chmod 700 new"), tools, record)

    def reward(command):
        return verifier.judge(at, bash(command)).reward

    try:
        assert reward("mkdir -m 700 new") == 1.0 and reward("(umask 077; mkdir /app/new)") == 1.0
        for other in (
            "mkdir new",
            "ls",
            "mkdir -m 700 new; echo done",
            "mkdir -m 700 new; cd new",
            "mkdir -m 700 new; false",
        ):
            assert reward(other) == 0.0, other
    finally:
        verifier.close()


@containers
def test_a_folder_of_tasks_becomes_demonstrations_and_a_profile_at_the_command_line(root, tmp_path):
    from turntree.cli.main import cli

    traces = tmp_path / "gold.jsonl"
    cli(
        ["traces", "gold", "--environment", f"harbor:{root}", "--count", "3", "--out", str(traces)],
        standalone_mode=False,
    )
    rows = [json.loads(line) for _, line in read_lines(str(traces))]
    assert len(rows) == 4 and all(row["success"] for row in rows[1:]), "a header and three traces"
