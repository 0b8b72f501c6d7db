"""Rows of SWE-bench: a repository in its image, judged by the tests that its issue must make pass."""

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault
from turntree.env.container import ContainerHost, ContainerLimits
from turntree.run.files import tree_hash
from turntree_interop.swebench import SweBenchTasks

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import container_tasks

GIT = "git -c user.name=a -c user.email=a@localhost"
OLD, NEW = "def half(n):\n    return n / 2\n", "def half(n):\n    return n // 2\n"
OLD_TESTS = "import half\n\n\ndef test_even():\n    assert half.half(4) == 2\n"
NEW_TESTS = OLD_TESTS + (
    "\n\nimport pytest\n\n\n@pytest.mark.parametrize('n', [3, 'a b'])\ndef test_odd(n):\n"
    "    assert n == 'a b' or half.half(n) == 1\n\n\n@pytest.mark.xfail\ndef test_text():\n    half.half('a')\n"
)


def patch(folder: Path, path: str, old: str, new: str) -> str:
    """The change of a file as git writes it."""
    for name, text in (("a", old), ("b", new)):
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)
    command = ["git", "diff", "--no-index", "--no-prefix", f"a/{path}", f"b/{path}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


@pytest.fixture
def row(tmp_path):
    return {
        "instance_id": "me__half-1",
        "repo": "me/half",
        "base_commit": "base",
        "problem_statement": "half(3) is 1.5, and must be 1.",
        "patch": patch(tmp_path, "half.py", OLD, NEW),
        "test_patch": patch(tmp_path, "tests/test_half.py", OLD_TESTS, NEW_TESTS),
        "FAIL_TO_PASS": json.dumps(["tests/test_half.py::test_odd[3]"]),
        "PASS_TO_PASS": ["tests/test_half.py::test_even", "tests/test_half.py::test_odd[a b]"],
        "test_cmd": "PYTHONPATH=. python3 -m pytest",
        "docker_image": "half",
    }


def task(tmp_path, row, **options):
    (tmp_path / "none.jsonl").touch()
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tasks = SweBenchTasks(argument=str(tmp_path / "rows.jsonl"), held_out=str(tmp_path / "none.jsonl"), **options)
    return tasks.of_split("train", 1, 0)[0]


# without a container


def test_a_task_says_what_its_row_says(tmp_path, row):
    made = task(tmp_path, row)
    assert (made.id, made.kind, made.folder) == ("me__half-1", "me/half", "/testbed")
    assert made.instruction == row["problem_statement"] and row["patch"].strip() in made.gold[0]


def test_the_images_of_swe_bench_are_named_by_the_instance(tmp_path, row):
    class Host:
        def image(self, name):
            return name

    del row["docker_image"]
    made = task(tmp_path, row, image="swebench/sweb.eval.x86_64.{instance}:latest")
    assert made.image(Host()) == "swebench/sweb.eval.x86_64.me_1776_half-1:latest"


@pytest.mark.parametrize(
    "change, field",
    [
        ({"instance_id": 3}, "instance_id"), ({"problem_statement": " "}, "problem_statement"),
        ({"base_commit": None}, "base_commit"), ({"test_patch": ""}, "test_patch"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS"), ({"FAIL_TO_PASS": "[1"}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": ["test_x (app.Tests)"]}, "FAIL_TO_PASS"), ({"PASS_TO_PASS": 3}, "PASS_TO_PASS"),
        ({"docker_image": None}, "docker_image"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_played_is_refused_by_its_field(tmp_path, row, change, field):
    with pytest.raises(InputError) as error:
        task(tmp_path, row | change)
    assert error.value.field == field and str(tmp_path / "rows.jsonl") in str(error.value.path)


def rewarded(tmp_path, row, change, *commands):
    """The reward of commands in a repository here, whose tests are patched by what `change` (commands) does to it."""
    here, told = tmp_path / "testbed", tmp_path / "told"
    (here / "tests").mkdir(parents=True)
    told.mkdir()
    (here / "half.py").write_text(OLD)
    (here / "tests/test_half.py").write_text(OLD_TESTS)
    (here / "tests/test_other.py").write_text("def test_other():\n    pass\n")

    def shell(command):
        return subprocess.run(["bash", "-c", command], cwd=here, capture_output=True, text=True).stdout

    shell(f"git init -q . && git add -A && {GIT} commit -qm base && git tag base\n{change}\ngit add -A")
    row = row | {"test_patch": shell("git diff --cached -M HEAD"), "test_cmd": f"{sys.executable} -m pytest"}
    shell("git reset -q --hard HEAD && git clean -fdq")
    for command in commands:
        shell(command)
    for name, data in task(tmp_path, row, folder=str(here)).judge.__self__.files().items():
        text = data.decode().replace("/tests/", f"{told}/").replace("/logs/verifier", str(told))
        (told / name).write_text(text if name == "test.sh" else data.decode())
    shell(f"PYTHONPATH=. bash {told}/test.sh")
    reward = told / "reward.txt"
    return float(reward.read_text()) if reward.exists() else None


WRITTEN = f"cat > tests/test_half.py <<'END'\n{NEW_TESTS}END"
MENDED = f"printf '%s' '{NEW}' > half.py"


@pytest.mark.parametrize(
    "change, name",
    [
        (f"{WRITTEN}\necho 1 > tests/data.json", "half"),
        (f"{WRITTEN}\nmv tests/test_half.py tests/test_new.py", "new"),
        (f"{WRITTEN}\nrm tests/test_other.py", "half"),
    ],
)
def test_files_that_a_patch_of_tests_removes_or_that_hold_no_tests_are_not_given_to_pytest(tmp_path, row, change, name):
    due = {"FAIL_TO_PASS": [f"tests/test_{name}.py::test_odd[3]"], "PASS_TO_PASS": [f"tests/test_{name}.py::test_even"]}
    assert rewarded(tmp_path, row | due, change, MENDED) == 1


@pytest.mark.parametrize("name", ["tests/test_half.py::test_odd[a", "tests/test_half.py::test_odd[a b]"])
@pytest.mark.parametrize("other, reward", [("a c", 1), ("a fails", 0)])
def test_a_name_is_cut_at_its_first_space_as_swebench_cuts_it(tmp_path, row, name, other, reward):
    change = WRITTEN.replace("3, 'a b'", f"3, 'a b', {other!r}").replace("n == 'a b'", "n in ('a b', 'a c')")
    assert rewarded(tmp_path, row | {"PASS_TO_PASS": [name]}, change, MENDED) == reward


@pytest.mark.parametrize(
    "due, command, reward",
    [
        (["tests/test_none.py::test_x"], "true", None),  # neither the base nor the patch has it
        (["tests/test_other.py::test_other"], "rm tests/test_other.py", 1),  # put back
        (["tests/test_other.py::test_other"], "echo 'def half(' > half.py", 0),
        (["tests/test_other.py::test_other"], "echo 'import nothing' > conftest.py", 0),
        (["tests/test_other.py::test_other"], "echo '[tool' > pyproject.toml", 0),
    ],
)
def test_what_pytest_cannot_use_is_no_reward_unless_the_episode_broke_it(tmp_path, row, due, command, reward):
    assert rewarded(tmp_path, row | {"PASS_TO_PASS": due}, WRITTEN, MENDED, command) == reward


# in containers


@pytest.fixture(scope="module")
def host():
    with ContainerHost(ContainerLimits(memory_mb=512, alive=4)) as made:
        yield made


@pytest.fixture(scope="module")
def image(host, tmp_path_factory):
    """The repository, and pytest as this process has it."""
    folder = tmp_path_factory.mktemp("half")
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in metadata.files(name):
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (folder / "site" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), folder / "site" / file)
    (folder / "testbed/tests").mkdir(parents=True)
    (folder / "testbed/half.py").write_text(OLD)
    (folder / "testbed/tests/test_half.py").write_text(OLD_TESTS)
    lines = [f"FROM {container_tasks.IMAGE}", "COPY site /usr/lib/python3/dist-packages", "COPY testbed /testbed",
             f"WORKDIR /testbed\nRUN git init -q . && git add -A && {GIT} commit -qm base && git tag base"]  # fmt: skip
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    return host.build(folder, f"localhost/turntree-test-half:{tree_hash(folder)}")


@pytest.mark.containers
@pytest.mark.parametrize(
    "commands, reward",
    [
        ((), 0.0),
        (("GOLD",), 1.0),
        (("GOLD", "printf 'def test_even(): assert 0\\n' > tests/test_half.py"), 1.0),
        (("GOLD", "rm -r tests; touch tests"), 1.0),
        (("GOLD", f"git add -A; {GIT} commit -qm done"), 1.0),
        (("printf 'def half(n):\\n    return 1\\n' > half.py",), 0.0),
        (("echo 'def half(' > half.py",), 0.0),
        (("echo 'import nothing' > conftest.py",), 0.0),
        (("printf 'def test_odd(): pass\\n' > tests/test_half.py; git commit -qam tests",), 0.0),
        (("mkdir -p .git/hooks /logs/verifier; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt; kill -9 $PPID'"
          "> .git/hooks/post-checkout; chmod +x .git/hooks/*",), 0.0),
    ],
)  # fmt: skip
def test_an_episode_is_paid_where_the_tests_of_the_issue_pass(host, image, tmp_path, row, commands, reward):
    made = task(tmp_path, row | {"docker_image": image})
    shell = made.shell(host)
    for command in commands:
        shell.run(made.gold[0] if command == "GOLD" else command)
    judged = made.judge(shell)
    assert judged.reward == reward and not judged.tampered, judged
    shell.close()


@pytest.mark.containers
@pytest.mark.parametrize(
    "change", [{"test_cmd": "nothing"}, {"test_cmd": "exit 3;"}, {"base_commit": "none"}, {"test_patch": "no patch\n"}]
)
def test_tests_that_cannot_run_give_no_reward(host, image, tmp_path, row, change):
    made = task(tmp_path, row | {"docker_image": image} | change)
    shell = made.shell(host)
    with pytest.raises(EnvironmentFault):
        made.judge(shell)
    shell.close()
