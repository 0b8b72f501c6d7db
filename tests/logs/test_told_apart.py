"""A group is the rollouts of one task, whatever names the rows of a log give it.

Random logs of every format, in which tasks share prompts, names and indices. The reward of a rollout is its number, so
the rewards of a group say which rollouts it was made of.
"""

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.audit.audit import AuditConfig, run_audit
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.logs.read import open_log
from turntree.logs.rows import FACTS, step_of

NAMED = {
    "generic": ("prompt", "gold_answer", "data_source", "agent"),
    "verl": ("input", "gts", "data_source", "agent_name"),
    "nemo-gym": ("prompt", "expected_answer", "dataset", "agent_ref"),
    "trl": ("prompt", "golden_answer", "data_source", "agent_name"),
}
"""The fields in which each format says what was asked, what is right, where it comes from and who played it."""


def read(path, form="auto"):
    log = open_log([path], Part(form))
    return list(log), log.report


def row(form, facts, number, index):
    """A rollout of a task with these facts; the tasks of a log have one name."""
    told = dict(zip(NAMED[form], facts, strict=True))
    if form == "generic":
        return told | {"group": "g", "reward": number, "iteration": 1}
    if form == "verl":
        return told | {"output": "o", "score": number, "step": 1}
    if form == "trl":
        return told | {"step": 1, "completion": "o", "reward": number}
    told["agent_ref"] = {"name": facts[3]}
    asked = {"input": [{"role": "user", "content": told.pop("prompt")}]}
    numbered = {"_ng_task_index": 0, "_ng_rollout_index": index}
    return told | numbered | {"responses_create_params": asked, "response": {"output": []}, "reward": number}


def write(folder, form, rows):
    if form == "trl":
        columns = list(dict.fromkeys(name for one in rows for name in one))
        path = folder / "completions_1.table.json"
        path.write_text(json.dumps({"columns": columns, "data": [[one.get(name) for name in columns] for one in rows]}))
        return path
    path = folder / "1.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


TASKS = st.tuples(*(st.sampled_from([f"{name} 1", f"{name} 2"]) for name in ("prompt", "gold", "source", "agent")))


@pytest.mark.parametrize("form", NAMED)
@given(tasks=st.lists(TASKS, min_size=1, max_size=5, unique=True), size=st.integers(2, 4), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_rollouts_of_tasks_that_differ_in_any_fact_are_never_one_group_and_those_of_one_task_are(
    tmp_path_factory, form, tasks, size, seed
):
    rows = [(facts, row(form, facts, float(size * i + k), k)) for i, facts in enumerate(tasks) for k in range(size)]
    random.Random(seed).shuffle(rows)
    groups, report = read(write(tmp_path_factory.mktemp("log"), form, [one for _, one in rows]), form)
    made = sorted(sorted(group.rewards) for group in groups)
    assert made == [[float(size * i + k) for k in range(size)] for i in range(len(tasks))]
    assert len({group.id for group in groups}) == len({group.task for group in groups}) == len(tasks)
    known_by_prompt = form in ("verl", "trl") and len({facts[0] for facts in tasks}) == len(tasks)
    assert bool(report.apart) == (len(tasks) > 1 and not known_by_prompt) and not report.dropped


@pytest.mark.parametrize("form", NAMED)
@given(tasks=st.lists(TASKS, min_size=2, max_size=4, unique=True), lost=st.integers(0, 3), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_a_rollout_that_lacks_what_tells_its_group_is_dropped_and_counted(tmp_path_factory, form, tasks, lost, seed):
    """Of one task some rows lack a fact: they stay where the others agree on it, and never join another task."""
    draw = random.Random(seed)
    rows = [(facts, row(form, facts, float(3 * i + k), k)) for i, facts in enumerate(tasks) for k in range(3)]
    for _, one in draw.sample(rows, 2):
        one.pop(NAMED[form][lost], None)
    try:
        groups, report = read(write(tmp_path_factory.mktemp("log"), form, [one for _, one in rows]), form)
    except InputError:
        return  # every row was dropped
    assert sum(len(group.rewards) for group in groups) + sum(report.dropped.values()) == len(rows)
    for group in groups:
        assert len({int(number) // 3 for number in group.rewards}) == 1


@pytest.mark.parametrize("form", ["generic", "verl"])
@pytest.mark.parametrize("name", sorted(FACTS))
def test_every_fact_tells_tasks_apart_whatever_its_value_is(tmp_path, form, name):
    base = (
        {"group": "g", "reward": 0.0} if form == "generic" else {"input": "p", "output": "o", "score": 0.0, "step": 1}
    )
    values = [("a", "b"), (3, 4), ([1, 2], [2, 1]), ({"name": "a"}, {"name": "b"})]
    for one, other in values[: 2 if name == "data_source" else None]:  # verl's is text, or its row is dropped
        groups, _ = read(write(tmp_path, form, [base | {name: one}, base | {name: other}] * 2), form)
        assert [len(group.rewards) for group in groups] == [2, 2]


@pytest.mark.parametrize("name", ["answer", "solution", "id", "seed", "pred", "request_id", "output"])
def test_what_a_rollout_said_or_is_called_is_no_fact_of_its_task(tmp_path, name):
    rows = [{"group": "g", "reward": 0.0, name: f"{i}"} for i in range(4)]
    assert [len(group.rewards) for group in read(write(tmp_path, "generic", rows))[0]] == [4]


@pytest.mark.parametrize("uid", ["u", "3b6f-77", "task_12_{i}", "{i}_1_2", "a_{i}", 7])
def test_a_uid_that_rollouts_share_is_the_name_of_their_group(tmp_path, uid):
    """Cut, or left out, it would merge the two tasks of one text."""
    names = [uid, "other"] if "{i}" not in str(uid) else [uid.format(i=i) for i in (3, 4)]
    rows = [
        {"input": "p", "output": "o", "score": float(i), "step": 1, "uid": name}
        for i, name in enumerate(names)
        for _ in range(3)
    ]
    groups, _ = read(write(tmp_path, "verl", rows))
    assert [group.rewards for group in groups] == [(0.0,) * 3, (1.0,) * 3]


def test_a_uid_of_one_rollout_names_its_group_by_what_is_before_the_numbers(tmp_path):
    rows = [
        {"input": "p", "output": "o", "score": float(i), "step": 1, "uid": f"{name}_{i}_0"}
        for name in ("b_1", "b_2")
        for i in range(3)
    ]
    groups, report = read(write(tmp_path, "verl", rows))
    assert [group.rewards for group in groups] == [(0.0, 1.0, 2.0)] * 2 and not report.apart


def test_rollouts_of_one_uid_with_other_prompts_are_not_compared(tmp_path):
    rows = [{"input": p, "output": "o", "score": r, "step": 1, "uid": "u"} for p, r in (("a", 0.0), ("b", 1.0))] * 2
    groups, _ = read(write(tmp_path, "verl", rows))
    assert [group.rewards for group in groups] == [(0.0, 0.0), (1.0, 1.0)]


def test_tasks_without_a_prompt_are_known_by_their_uid(tmp_path):
    rows = [{"input": "", "output": "o", "score": 1.0, "step": 1, "uid": f"u{i}"} for i in (0, 0, 1, 1)]
    assert [group.task for group in read(write(tmp_path, "verl", rows))[0]] == ["u0", "u1"]


def test_an_index_that_begins_again_is_another_collection(tmp_path):
    facts = ("p", "g", "s", "a")
    rows = [row("nemo-gym", facts, float(run), k) for run in range(2) for k in (2, 0, 1)]
    groups, report = read(write(tmp_path, "nemo-gym", rows))
    assert [group.rewards for group in groups] == [(0.0,) * 3, (1.0,) * 3] and len({g.task for g in groups}) == 1
    assert "rollout index" in str(report.to_json()["notes"])


def test_an_index_stands_for_other_tasks_in_another_file(tmp_path):
    """As one task it would look like one that is never solved at first, and always later."""
    for step, prompt in enumerate(("p", "q", "p")):
        one = [row("nemo-gym", (prompt, "g", "s", "a"), float(step), k) for k in range(2)]
        write(tmp_path, "nemo-gym", one).rename(tmp_path / f"step_{step}.jsonl")
    first, second, third = (group.task for group in read(tmp_path)[0])
    assert first == third != second


def test_the_words_of_a_simulated_user_are_no_other_task(tmp_path):
    rows = [row("nemo-gym", ("policy", "g", "s", "a"), float(k), k) | {"task": {"id": "5"}} for k in range(2)]
    for number, one in enumerate(rows):
        said = [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": f"I want {number}"}]
        one["responses_create_params"]["input"] += said
    (group,), _ = read(write(tmp_path, "nemo-gym", rows))
    assert group.rewards == (0.0, 1.0)
    rows[1]["task"] = {"id": "6"}
    assert len(read(write(tmp_path, "nemo-gym", rows))[0]) == 2


def test_tasks_and_kinds_that_one_group_names_are_told_apart(tmp_path):
    rows = [{"group": "g", "reward": 1, "task": f"t{i}", "task_type": f"k{j}"} for i in (0, 1) for j in (0, 1)] * 2
    groups, _ = read(write(tmp_path, "generic", rows))
    assert [(g.task, g.task_type) for g in groups] == [("t0", "k0"), ("t0 (2)", "k1"), ("t1", "k0"), ("t1 (2)", "k1")]


def trl(tmp_path, groups, *, shared, columns=("reward",), advantages=True):
    """A table in which every group is a list of rows of rewards; weights of 1 and 2, divided by the deviation."""
    data = []
    for number, group in enumerate(groups):
        sums = [rewards[0] + 2 * sum(rewards[1:]) for rewards in group]
        mean = sum(sums) / len(sums)
        scale = (sum((value - mean) ** 2 for value in sums) / len(sums)) ** 0.5 or 1.0
        prompt = "Play." if shared else f"Play {number}."
        data += [
            [1, prompt, "o", *map(float, rewards), *([(value - mean) / scale] if advantages else [])]
            for rewards, value in zip(group, sums, strict=True)
        ]
    names = ["step", "prompt", "completion", *columns, *(["advantage"] if advantages else [])]
    path = tmp_path / "completions_1.table.json"
    path.write_text(json.dumps({"columns": names, "data": data}))
    return path


def test_rewards_of_several_columns_do_not_hide_that_a_prompt_stands_for_two_tasks(tmp_path):
    """The advantages do not vanish, and the weights are not known; but no weights make them those of one group."""
    one, other = [(1, 0), (0, 1), (0, 0), (1, 1)], [(1, 1), (1, 1), (1, 1), (1, 1)]
    columns = ("a", "b")
    log = open_log([trl(tmp_path, [one, other], shared=False, columns=columns)], Part("trl", {"rewards": columns}))
    assert [len(set(group.rewards)) for group in log] == [3, 1]
    with pytest.raises(InputError, match="tasks share a prompt"):
        list(open_log([trl(tmp_path, [one, other], shared=True, columns=columns)], Part("trl", {"rewards": columns})))


def test_a_prompt_that_was_drawn_twice_in_one_step_is_two_groups(tmp_path):
    path = trl(tmp_path, [[(0,), (0,)], [(1,), (1,)], [(0,), (1,)]], shared=False, advantages=False)
    path.write_text(path.read_text().replace("Play 1.", "Play 0."))
    groups, _ = read(path)
    assert [(group.rewards, group.task) for group in groups] == [
        ((0.0, 0.0), groups[0].task),
        ((1.0, 1.0), groups[0].task),
        ((0.0, 1.0), groups[2].task),
    ]
    assert groups[0].id != groups[1].id and groups[0].task != groups[2].task


@given(dead=st.integers(1, 12), live=st.integers(0, 4), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_the_share_of_dead_groups_is_that_of_the_tasks_and_not_of_their_texts(tmp_path_factory, dead, live, seed):
    """All tasks have one text; dead ones have equal rewards, at either end."""
    draw = random.Random(seed)
    tasks = [[float(draw.random() < 0.5)] * 4 for _ in range(dead)] + [[0.0, 1.0, 0.0, 1.0]] * live
    rows = [
        {"input": "Find x.", "output": "o", "gts": str(i), "score": reward, "step": 1}
        for i, rewards in enumerate(tasks)
        for reward in rewards
    ]
    draw.shuffle(rows)
    found = run_audit([write(tmp_path_factory.mktemp("log"), "verl", rows)], AuditConfig())
    assert (found["zero_variance"], found["scored"]) == (dead, dead + live)
    assert Counter(found["counts"]["group_sizes"]) == {4: dead + live}


@pytest.mark.parametrize("key", ["args", "parameters", "input", "tool_input", "kwargs"])
def test_a_call_whose_arguments_stand_under_another_key_is_counted_and_never_one_without_any(tmp_path, key):
    rows = [row("nemo-gym", ("p", "g", "s", "a"), float(k), k) for k in range(3)]
    right = {"type": "function_call", "name": "pay", "arguments": "{}"}
    for one, call in zip(
        rows, (right, right, {"type": "function_call", "name": "pay", key: {"to": "Eve"}}), strict=True
    ):
        one["response"]["output"] = [call]
    (group,), report = read(write(tmp_path, "nemo-gym", rows))
    assert len(group.rollouts) == 2 and sum(report.dropped.values()) == 1


def test_what_is_no_text_in_an_observation_or_an_action_keeps_two_of_them_apart(tmp_path):
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "input_image", "image_url": "a"},
             {"type": "input_image", "image_url": "b"}, {"type": "output_text", "text": "b"}, 5]  # fmt: skip
    rows = [row("nemo-gym", ("p", "g", "s", "a"), float(k), k) for k in range(len(parts))]
    for one, part in zip(rows, parts, strict=True):
        one["response"]["output"] = [{"role": "assistant", "content": [part]}]
    (group,), _ = read(write(tmp_path, "nemo-gym", rows))
    assert len({rollout.actions for rollout in group.rollouts}) == len(parts) and ("",) not in [
        rollout.actions for rollout in group.rollouts
    ]


def test_groups_of_one_name_in_several_files_are_said_with_and_without_a_step(tmp_path):
    for step in ({}, {"iteration": 3}):
        for name, reward in (("a", 0.0), ("b", 1.0)):
            rows = [{"group": f"g{n}", "reward": reward} | step for n in range(3) for _ in range(2)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        log = open_log([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], Part("generic"))
        assert len(list(log)) == 6
        assert any("lie in several files" in note for note in log.report.notes)


@pytest.mark.parametrize(
    ("path", "step"),
    [("4711/rollouts/rollout_0.jsonl", None), ("2026/12.jsonl", 12), ("step_7/x/a.jsonl", 7), ("30/step_2.jsonl", 2)],
)
def test_a_folder_that_is_a_number_is_no_step(tmp_path, path, step):
    assert step_of(tmp_path / path) == step
