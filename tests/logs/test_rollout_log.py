"""turntree's own rollout log: what a stage writes is what an audit reads."""

import json

from hypothesis import given
from hypothesis import strategies as st

from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.read import open_log
from turntree.logs.rollouts import group_from_json, group_from_tree, group_to_json
from turntree.run.jsonl import json_line


@st.composite
def rollouts(draw):
    turns = draw(st.integers(0, 3))
    lists = {"min_size": turns, "max_size": turns}
    return LoggedRollout(
        actions=tuple(draw(st.lists(st.text(max_size=4), **lists))),
        reward=draw(st.none() | st.floats(-1, 1)),
        completed=draw(st.none() | st.booleans()),
        turn_tokens=draw(st.none() | st.lists(st.integers(0, 9), **lists).map(tuple)),
        observations=draw(st.none() | st.lists(st.text(max_size=4), **lists).map(tuple)),
        tokens=draw(st.none() | st.integers(0, 9)),
        characters=draw(st.none() | st.integers(0, 9)),
        stop=draw(st.none() | st.text(max_size=4)),
        forked=draw(st.booleans()),
    )


groups = st.builds(
    LoggedGroup,
    id=st.text(max_size=4),
    task=st.text(max_size=4),
    rollouts=st.lists(rollouts(), max_size=3).map(tuple),
    iteration=st.none() | st.integers(0, 5),
    task_type=st.none() | st.text(max_size=4),
)


@given(groups)
def test_a_group_survives_its_json(group):
    assert group_from_json(json.loads(json.dumps(group_to_json(group)))) == group


def test_an_appended_log_is_read_back_and_a_line_cut_off_by_a_crash_is_counted(tmp_path):
    first, second = (LoggedGroup(id=i, task="t", rollouts=(LoggedRollout(actions=("a",), reward=1.0),)) for i in "xy")
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json_line(group_to_json(group)) for group in (first, second)))
    with path.open("a") as handle:
        handle.write(json.dumps(group_to_json(first))[:40])
    log = open_log([tmp_path])
    assert list(log) == [first, second]
    assert log.report.format == "turntree" and sum(log.report.dropped.values()) == 1


def test_half_a_character_that_a_model_wrote_is_logged_and_read_back(tmp_path):
    told = LoggedGroup(id="g", task="t", rollouts=(LoggedRollout(actions=("say \ud800",), reward=1.0),))
    (tmp_path / "rollouts.jsonl").write_text(json_line(group_to_json(told)))
    assert list(open_log([tmp_path])) == [told]


def test_a_tree_becomes_rollouts_whose_shared_turns_are_paid_for_once():
    tree = RolloutTree("task")

    def say(parent, text, tokens):
        ids = tuple(range(tokens))
        return tree.add(
            parent, NodeKind.COMPLETION, ids, logprobs=(0.0,) * tokens, messages=(Message("assistant", text),)
        ).id

    prompt = tree.add(None, NodeKind.PROMPT, (1,), messages=(Message("user", "find it"),)).id
    shared = say(prompt, "look", 5)
    seen = tree.add(shared, NodeKind.OBSERVATION, (2,), messages=(Message("user", "a drawer"),)).id
    leaves = [say(seen, "open", 3), say(seen, "go", 4), say(prompt, "wait", 2)]
    reasons = [StopReason.COMPLETED, StopReason.MAX_TURNS, StopReason.ENGINE_ERROR]
    for leaf, reason in zip(leaves, reasons, strict=True):
        tree.stop(leaf, reason)
    verdicts = [Verdict(1.0, "done"), Verdict(0.0, "late"), Verdict(None, "fault")]
    rewards = Rewards(dict(zip(leaves, verdicts, strict=True)))

    group = group_from_tree(tree, rewards, id="3/task", iteration=3)

    by_action = {rollout.actions[-1]: rollout for rollout in group.rollouts}
    assert group.task == "task" and sum(r.generated_tokens for r in group.rollouts) == 5 + 3 + 4 + 2
    assert by_action["open"].actions == ("look", "open") and by_action["open"].turn_tokens == (5, 3)
    assert by_action["go"].turn_tokens == (0, 4) and by_action["go"].forked and not by_action["open"].forked
    assert by_action["open"].observations == ("find it", "a drawer")
    assert [by_action[name].completed for name in ("open", "go", "wait")] == [True, False, None]
    assert [by_action[name].reward for name in ("open", "go", "wait")] == [1.0, 0.0, None]
    assert by_action["wait"].stop == "engine_error" and not by_action["wait"].forked
