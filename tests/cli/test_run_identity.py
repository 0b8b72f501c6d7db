"""What decides a result belongs to the identity: of the profile that training relies on, and of a run that goes on.
And commands say what they play, and where."""

import fcntl
import json
import os
import shutil

import pytest

from turntree.core.errors import InputError
from turntree.env.processes import ProcessPool
from turntree.stages.local import LocalPolicy
from turntree_worlds.household.entry import POLICY as EMBEDDED
from turntree_worlds.sandboxes.sandbox import Sandbox

PIVOT = (
    "--steps",
    1,
    "--max-tokens",
    24,
    "--set",
    "train.groups=2",
    "--set",
    "train.group_size=2",
    "--set",
    "check.tasks=0",
)
ONLINE = (
    "--iterations", 2, "--groups", 2, "--group-size", 2, "--max-turns", 3, "--max-tokens", 24, "--count", 2,
    "--set", "checkpoints.every=1", "--learning-rate", 3e-4,
)  # fmt: skip
CHECKED = ("--set", "check.tasks=2", "--set", "train.check_every=1")
COOLER = ("--temperature", "0.6")


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.fixture
def policy(tmp_path):
    """A copy of the embedded policy: the same weights, tokenizer and chat template."""
    return shutil.copytree(EMBEDDED, tmp_path / "policy")


def another_template(policy):
    path = policy / "chat_template.jinja"
    path.write_text("Be brief. " + path.read_text())


def another_tokenizer(policy):
    """Decomposes accents first: other ids for some texts."""
    path = policy / "tokenizer.json"
    rules = json.loads(path.read_text())
    path.write_text(json.dumps({**rules, "normalizer": {"type": "NFD"}}))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (COOLER, "temperature 1.0, training 0.6"),
        (("--max-tokens", 12), "max_tokens 24, training 12"),
    ],
    ids=["temperature", "max_tokens"],
)
def test_pivots_of_other_sampling_are_refused_by_its_name(turntree, household, tmp_path, settings, named) -> None:
    command = ("train", "pivot", household / "pivots.jsonl", "--out", tmp_path / "run", *PIVOT, *settings)
    message = turntree.error(*command)
    assert f"profile {named}" in message and "--allow-stale" in message
    assert not (tmp_path / "run").exists()
    turntree(*command, "--allow-stale")


def test_a_higher_limit_changes_nothing_where_no_rollout_reached_the_limit(turntree, household, tmp_path) -> None:
    header, *rows = (json.loads(line) for line in (household / "pivots.jsonl").read_text().splitlines())
    for cut in (0, 3):
        path = tmp_path / f"{cut}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in [{**header, "cut": cut}, *rows]))
        command = ("train", "pivot", path, "--out", tmp_path / f"run{cut}", *PIVOT, "--max-tokens", 30)
        if cut:
            assert "profile max_tokens 24, training 30" in turntree.error(*command)
        else:
            turntree(*command)


def test_pivots_that_were_sampled_from_a_truncated_distribution_are_refused(turntree, household, tmp_path) -> None:
    header, *rows = (json.loads(line) for line in (household / "pivots.jsonl").read_text().splitlines())
    path = tmp_path / "older.jsonl"
    older = {**header, "sampling": {**header["sampling"], "top_k": 2}}
    path.write_text("".join(json.dumps(row) + "\n" for row in [older, *rows]))
    assert "sampling.top_k" in turntree.error("train", "pivot", path, "--out", tmp_path / "run", *PIVOT)


@pytest.mark.parametrize(
    ("change", "named"),
    [(another_template, "profile chat template"), (another_tokenizer, "profile tokenizer")],
    ids=["template", "tokenizer"],
)
def test_pivots_of_another_template_or_tokenizer_are_refused(
    turntree, household, tmp_path, policy, change, named
) -> None:
    command = ("train", "pivot", household / "pivots.jsonl", "--model", policy, *PIVOT)
    turntree(*command, "--out", tmp_path / "same")
    change(policy)
    message = turntree.error(*command, "--out", tmp_path / "run")
    assert named in message and "profile weights" not in message


@pytest.mark.parametrize(
    ("change", "key"), [(another_template, "template_hash"), (another_tokenizer, "tokenizer_hash")]
)
def test_a_run_does_not_go_on_with_another_template_or_tokenizer(
    monkeypatch, turntree, household, tmp_path, policy, change, key
) -> None:
    command = ("sft", "--traces", household / "traces.jsonl", "--model", policy, "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(LocalPolicy, "save", interrupt)
        turntree(*command, code=130)
    change(policy)
    assert f"differs in inputs.{key}" in turntree.error(*command)


def test_training_does_not_go_on_with_edited_questions_or_another_index(monkeypatch, turntree, tmp_path) -> None:
    try:
        Sandbox().close()
    except InputError as error:
        pytest.skip(str(error))
    documents, index, questions = (tmp_path / name for name in ("d.jsonl", "index.sqlite", "q.jsonl"))
    documents.write_text('{"id": "a", "title": "Ada", "text": "Ada lives in Oslo."}\n')
    turntree("index", "build", documents, "--out", index)
    rows = [{"question": f"Where does Ada live, asked {n} times?", "answer": "Oslo"} for n in range(5)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = (
        *("train", "online", "--environment", "qa", "--questions", questions, "--index", index),
        *("--out", tmp_path / "run", *ONLINE),
    )
    with monkeypatch.context() as patch:
        patch.setattr(LocalPolicy, "save", interrupt)
        turntree(*command, code=130)
    before = questions.read_text()
    questions.write_text(before.replace("Oslo", "Rome"))
    assert "differs in inputs.questions_hash" in turntree.error(*command)
    questions.write_text(before)
    documents.write_text('{"id": "a", "title": "Ada", "text": "Ada lives in Rome."}\n')
    turntree("index", "build", documents, "--out", index, "--overwrite")
    assert "differs in inputs.index_hash" in turntree.error(*command)


def test_training_on_pivots_does_not_go_on_with_other_tasks_to_check_on(monkeypatch, turntree, household, tmp_path):
    (tmp_path / "my_checks.py").write_text(CHECKS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "goals.txt").write_text("lamp")
    command = (
        *("train", "pivot", household / "pivots.jsonl", "--out", tmp_path / "run", *PIVOT),
        *("--set", 'check.environment={"name": "my_checks:Checks"}', "--set", "check.tasks=1"),
    )
    with monkeypatch.context() as patch:
        patch.setattr(LocalPolicy, "save", interrupt)
        turntree(*command, code=130)
    (tmp_path / "goals.txt").write_text("table")
    assert "differs in inputs.check.goals_hash" in turntree.error(*command)


CHECKS = """
import contextlib
import turntree as tt
from turntree.env.tasks import TaskSet, contents

class Find:
    def reset(self):
        self.done = self.success = False
    def look(self, where: str) -> str:
        '''Look somewhere.

        Args:
            where: The place.
        '''
        return "nothing"

class Checks:
    @contextlib.contextmanager
    def open(self, splits, *, seed):
        tasks = {s: [tt.ToolEnvironment(Find, task_id=f"{s}{i}") for i in range(n)] for s, n in splits.items()}
        yield TaskSet(tasks=tasks, contents=contents({"goals": "goals.txt"}))
"""


@pytest.fixture(scope="module")
def killed(turntree, tmp_path_factory):
    """An online run that came to its last iteration and no further."""
    run = tmp_path_factory.mktemp("online") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPolicy, "save", interrupt)
        turntree("train", "online", "--out", run, *ONLINE, *CHECKED, code=130)
    return run


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "trees.jsonl", "held_out.jsonl"])
def test_rows_of_finished_iterations_that_are_gone_are_named(turntree, killed, tmp_path, name) -> None:
    run = shutil.copytree(killed, tmp_path / "run")
    lines = (run / name).read_text().splitlines(keepends=True)
    (run / name).write_text("".join(lines[:-1]))
    message = turntree.error("train", "online", "--out", run, *ONLINE, *CHECKED)
    assert f"{name}: has " in message and "rows are missing" in message


def test_a_run_whose_configuration_is_gone_or_is_anothers_is_not_gone_on_with(turntree, killed, tmp_path) -> None:
    run, other = shutil.copytree(killed, tmp_path / "run"), tmp_path / "other"
    command = ("train", "online", *ONLINE, *CHECKED)
    (run / "config.json").unlink()
    assert "no config.json" in turntree.error(*command, "--seed", 5, "--out", run)
    config = json.loads((killed / "config.json").read_text())
    config["config"]["train"]["seed"] = 5
    (run / "config.json").write_text(json.dumps(config))
    assert "differs in train.seed (0, not 5)" in turntree.error(*command, "--seed", 5, "--out", run)
    assert not other.exists()


def test_games_are_stepped_in_worker_processes_on_demand_with_the_same_result(
    monkeypatch, turntree, killed, tmp_path
) -> None:
    opened = []
    open_session = ProcessPool.open
    monkeypatch.setattr(ProcessPool, "open", lambda pool, task: opened.append(task) or open_session(pool, task))
    run = shutil.copytree(killed, tmp_path / "run")
    command = ("train", "online", *ONLINE, *CHECKED, "--set", "workers.workers=1")
    turntree(*command, "--out", run)  # where they are stepped may differ when a run goes on
    assert not opened, "nothing was left to play"
    turntree(*command, "--out", tmp_path / "whole")
    assert len(opened) == 2 * 2 * 2 + 6, "the groups of two iterations, and the held-out tasks of the checks"
    for name in ("model/model.safetensors", "rollouts.jsonl", "held_out.jsonl"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.usefixtures("bubblewrap")
def test_an_environment_with_a_pool_of_its_own_takes_no_worker_processes(turntree, tmp_path) -> None:
    command = ("train", "online", "--environment", "qa", *ONLINE, *CHECKED, "--set", "workers.workers=1")
    message = turntree.error(*command, "--out", tmp_path / "qa")
    assert "'workers.workers': is for environments without a pool of their own" in message


def test_an_evaluation_says_what_it_plays(turntree, policy) -> None:
    few = ("--count", 1, "--max-turns", 1, "--set", "greedy=false")
    shown = turntree("evaluate", *few).stderr
    assert "evaluates 'default' on up to 1 tasks of split 'test' of 'default' games=generated" in shown
    message = turntree.error("evaluate", "--model", policy, *few)
    assert "does not name the environment that it was made for; give --environment SPEC" in message
    shown = turntree("evaluate", "--model", policy, "--environment", "household", *few).stderr
    assert "tasks of split 'test' of 'household'" in shown


def test_quickstart_shares_its_folder_with_no_other_process_and_no_other_seed(turntree, tmp_path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert "in use by another process" in turntree.error("quickstart", "--out", tmp_path, "--seed", 1)
    finally:
        os.close(descriptor)
    assert not list(tmp_path.iterdir())
    (tmp_path / "config.json").write_text(json.dumps({"stage": "quickstart", "config": {"seed": 0}}))
    before = (tmp_path / "config.json").read_text()
    assert "is of another run" in turntree.error("quickstart", "--out", tmp_path, "--seed", 1)
    assert (tmp_path / "config.json").read_text() == before
