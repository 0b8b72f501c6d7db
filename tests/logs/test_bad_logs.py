"""Values of the wrong type, size or alphabet: a line of the log is counted by its reason, a table is refused."""

import json
import random

import pytest
from test_partner_logs import WRITERS

from turntree.audit.audit import AuditConfig, run_audit
from turntree.audit.played import play
from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit, Rewards
from turntree.core.messages import Message, ToolCall
from turntree.core.tree import Decision, NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.read import AUTO, open_log
from turntree.logs.rollouts import group_to_json
from turntree.logs.trees import KeptTree
from turntree.report.audit import build_audit_page
from turntree.run.files import write_json

GOOD = {"group": "a", "reward": 1.0, "iteration": 0, "actions": ["go"], "turn_tokens": [3], "completed": True}
HUGE = 10**400


def read(path, form="auto"):
    log = open_log([path], Part(form))
    return list(log), log.report


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reward": HUGE}, "field 'reward' is too large"),
        ({"tokens": 10**30}, "field 'tokens' is too large"),
        ({"turn_tokens": [10**30]}, "field 'turn_tokens' is too large"),
        ({"turn_tokens": [True]}, "field 'turn_tokens' is not a list of whole numbers"),
        ({"iteration": "4"}, "field 'iteration' is not a whole number from 0"),
        ({"iteration": -1}, "field 'iteration' is not a whole number from 0"),
        ({"iteration": HUGE}, "field 'iteration' is too large"),
        ({"task": ["a"]}, "field 'task' is not text"),
        ({"group": HUGE}, "field 'group' is too large"),
        ({"completed": "yes"}, "field 'completed' is not true or false"),
        ({"stop": 0.5}, "field 'stop' is not text"),
    ],
)
def test_a_value_that_cannot_be_is_counted_and_not_taken_for_unknown(tmp_path, change, reason):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    groups, report = read(path)
    assert sum(len(group.rollouts) for group in groups) == 1
    assert report.dropped == {reason: 1} and report.first == {reason: f"{path}:2"}


def test_a_line_that_says_a_key_twice_is_counted_for_readers_differ_in_which_they_take(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"group": "a", "reward": 0}\n{"group": "a", "reward": 1, "reward": 0}\n')
    groups, report = read(path)
    assert [group.rewards for group in groups] == [(0.0,)] and report.dropped == {"not JSON": 1}
    assert report.first == {"not JSON": f"{path}:2 (the key 'reward' stands in one object twice)"}


@pytest.mark.parametrize(
    "change",
    [
        {"actions": 5},
        {"actions": "go"},
        {"turn_tokens": 3},
        {"turn_tokens": [10**30]},
        {"reward": HUGE},
        {"tokens": -1},
    ],
)
def test_a_line_of_turntrees_own_log_with_a_wrong_field_is_counted_with_its_place(tmp_path, change):
    good = group_to_json(LoggedGroup(id="g", task="t", rollouts=(LoggedRollout(actions=("go",), reward=1.0),)))
    bad = good | {"rollouts": [good["rollouts"][0] | change]}
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (good, bad, good | {"iteration": 10**30}, 7)))
    groups, report = read(path, "turntree")
    assert len(groups) == 1 and report.dropped == {"a line that is not a finished group": 3}
    assert next(iter(report.first.values())).startswith(f"{path}:2 (")


@pytest.mark.parametrize(
    "table",
    [
        "[]",
        '{"columns": 3, "data": []}',
        '{"columns": ["step"], "data": {"a": 1}}',
        '{"columns": ["step", "r"], "data": [[1]]}',
        '{"columns": ["r"], "data": [5]}',
        '{"columns": [["r"]], "data": []}',
        '{"columns": ["r", "r"], "data": [[1, 2]]}',
        "{",
        "[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_wandb_table_of_another_shape_is_refused_by_name(tmp_path, table):
    path = tmp_path / "a.table.json"
    path.write_bytes(table if isinstance(table, bytes) else table.encode())
    with pytest.raises(InputError, match=r"a\.table\.json: "):
        read(path)


@pytest.mark.parametrize("broken", ['{"step": 1, "pro', "[1]", "3"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_broken_line_of_trls_rows_is_counted_and_spoils_no_other(tmp_path, broken, at):
    said = [("x", 0.5, 1.0), ("y", -0.5, 0.0)]
    rows = [json.dumps({"step": 1, "prompt": "p", "completion": c, "advantage": a, "r": r}) for c, a, r in said]
    (tmp_path / "t.jsonl").write_text("\n".join([*rows[:at], broken, *rows[at:]]))
    [group], report = read(tmp_path / "t.jsonl")
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]
    assert report.lines == 3 and sum(report.dropped.values()) == 1
    assert [place.startswith(f"{tmp_path / 't.jsonl'}:{at + 1}") for place in report.first.values()] == [True]


def test_half_a_character_in_a_name_reaches_the_page_as_an_escape(tmp_path):
    rows = [{"group": f"{i}", "task": "a\ud800", "iteration": i, "reward": 0} for i in (0, 1, 2) for _ in range(2)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run_audit([path], AuditConfig())
    assert result["tasks"]["rows"][0]["task"] == "a\\ud800"
    write_json(tmp_path / "audit.json", result)
    assert "a\\ud800" in build_audit_page(result, tmp_path / "a.html").read_text(encoding="utf-8")
    prompts = [{"input": f"\udfff {i}", "output": "o", "score": 0.0, "step": 1} for i in (0, 0, 1, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    assert len({group.task for group in read(path)[0]}) == 2


WRONG = (None, True, -1, 0.5, 10**30, HUGE, "", "\ud800", "x", [], [[]], [1], ["a"], {}, {"a": []}, [None], "NaN")


def mutated(draw, value):
    """One value somewhere inside is replaced, or one field left out."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {name: one for name, one in value.items() if name != key}
        return value | {key: mutated(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.8:
        i = draw.randrange(len(value))
        return [*value[:i], mutated(draw, value[i]), *value[i + 1 :]]
    return draw.choice(WRONG)


OUTPUT = [
    {"type": "reasoning", "content": [{"text": "hm"}]},
    {"type": "function_call", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "output": "seen"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
]


def kept_tree():
    tree = RolloutTree("t")
    root = tree.add(None, NodeKind.PROMPT, (1,), messages=(Message("user", "go"),)).id
    said = Message("assistant", "", (ToolCall("f", {"a": 1}),))
    leaf = tree.add(root, NodeKind.COMPLETION, (3,), logprobs=(-0.5,), entropies=(0.1,), messages=(said,)).id
    tree.stop(leaf, StopReason.COMPLETED)
    tree.record(Decision("gate", root, "audit", "alike", {"turn": 1.0}))
    credit = Credit({leaf: NodeCredit(1.0, 0.0, 1.0)}, 1.0, 1.0, False)
    rewards = Rewards({leaf: Verdict(1.0, "right", "call", True)})
    return KeptTree(id="g", iteration=0, tree=tree, rewards=rewards, credit=credit, meta={"a": 1}).to_json()


ROWS = {
    "generic": GOOD | {"task": "t", "observations": ["a room"], "tokens": 4, "characters": 9, "stop": "end"},
    "verl": {"input": "p", "output": "o", "score": 1.0, "step": 1, "uid": "u_0_0", "data_source": "gsm8k"},
    "nemo-gym": {
        "responses_create_params": {"input": [{"role": "user", "content": "p"}]},
        "response": {"output": OUTPUT, "usage": {"output_tokens": 7}},
        "reward": 1.0,
        "_ng_task_index": 0,
        "instance_id": "i",
        "mask_sample": False,
    },
    "trees": kept_tree(),
    "turntree": group_to_json(
        LoggedGroup(
            id="g", task="t", iteration=0,
            rollouts=(LoggedRollout(actions=("go",), reward=1.0, turn_tokens=(3,), observations=("a",), stop="end"),),
        )
    ),
} | {form: row(1, 1, 0, 1.0) for form, (_, row) in WRITERS.items()}  # fmt: skip
EPISODE = {
    "trajectories": [{"steps": [{"model_response": "a", "observation": "o"}], "reward": 1.0}],
    "termination_reason": "env_done",
    "task_hash": "h",
    "training_step": 1,
    "is_correct": True,
    "task": {"question": "q"},
}
TABLE = {
    "columns": ["step", "prompt", "completion", "a_reward", "b", "advantage"],
    "data": [[1, "p", "x", 1.0, 0, 0.7], [1, "p", "y", 0.0, 1, -0.7]],
}


@pytest.mark.parametrize("form", [name for name in parts.names("log_formats") if name != AUTO.name])
def test_whatever_a_log_holds_the_audit_ends_in_figures_or_in_one_line(tmp_path, form):
    draw = random.Random(f"mutations of {form}")
    for number in range(200):
        path = tmp_path / ("log.table.json" if form == "trl" else "log.jsonl")
        if form in ("trl", "rllm"):  # a file is one document
            text = json.dumps(mutated(draw, TABLE if form == "trl" else EPISODE))
        else:
            rows = [ROWS[form], ROWS[form], *(mutated(draw, mutated(draw, ROWS[form])) for _ in range(3))]
            text = "".join(json.dumps(row) + "\n" for row in rows)
        if draw.random() < 0.1:
            cut = draw.randrange(len(text))
            text = text[:cut]
        path.write_text(text)
        cuts = form in ("verl", "trl") and draw.random() < 0.5
        format = Part(form, {"turn_separator": "x"} if cuts else {})
        try:
            play(open_log([path], format))
            if number % 20 == 0:
                run_audit([path], AuditConfig(log_format=format))
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 700
