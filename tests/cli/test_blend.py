"""Several environments in one run, and pivots as tasks of one turn beside whole episodes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.env.tasks import open_tasks
from turntree.rollout.players import PlayedTask
from turntree.stages.blend import PivotTask, dealt
from turntree.stages.candidates import SelectedState, read_selected
from turntree.stages.verifier import open_verifier


@given(st.integers(0, 5000), st.lists(st.floats(0.01, 10), min_size=2, max_size=6))
def test_shares_are_dealt_to_less_than_one_task_and_add_up(count, shares):
    found = dealt(count, shares)
    assert sum(found) == count and min(found) >= 0
    assert all(abs(one - count * share / sum(shares)) <= 1 for one, share in zip(found, shares, strict=True))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"of": [{"name": "household"}]}, "of"), ({"shares": [1.0]}, "shares"), ({"shares": [1.0, 0.0]}, "shares")],
)
def test_a_blend_of_one_and_shares_that_are_none_are_refused(wrong, field):
    options = {"of": [{"name": "household"}, {"name": "household"}], **wrong}
    with pytest.raises(ConfigError) as refused, open_tasks(Part("blend", options), {"train": 4}):
        pass
    assert refused.value.field.endswith(field)


class Judge(TurnVerifier):
    name = "right"

    def judge(self, state, action):
        return Verdict(None, "the judge is down") if action.content == "?" else Verdict(float(action.content), "")


def task(verifier=None):
    history = (Message("system", "Play."), Message("user", "Which way?"), Message("assistant", "look"))
    history += (Message("user", "A fork."),)
    state = TurnState("t", 1, history, Message("assistant", "left"))
    return PivotTask(SelectedState({"kind": "move"}, state, "g"), verifier or Judge())


def test_a_pivot_is_one_turn_whose_reward_is_the_verdict_and_no_verdict_is_no_reward():
    pivot = task()
    assert [message.content for message in pivot.reset()][-1] == "A fork." and pivot.task_id == "t#1"
    for said, success in (("1", True), ("0.5", False), ("0", False)):
        seen = pivot.fork().step(Message("assistant", said))
        assert (seen.done, seen.reward, seen.success, seen.messages) == (True, float(said), success, ())
    with pytest.raises(EnvironmentFault, match="down"):
        pivot.step(Message("assistant", "?"))


def test_pivots_are_the_rows_of_their_file_and_held_out_ones_are_of_other_traces(household):
    path = household / "pivots.jsonl"
    _, states = read_selected(str(path))
    with open_tasks(Part(f"pivots:{path}"), {"train": 1000}) as opened:
        train = {one.task_id: one for one in opened.of("train")}
    homes = {one.state.id: one.group for one in states}
    assert len(train) > 5 and train.keys() <= homes.keys()
    left = {homes[name] for name in homes.keys() - train.keys()}
    assert not left & {homes[name] for name in train}, "a group of traces is in one split"
    with open_verifier(Part("household")) as verifier:
        for one in states:
            if (found := train.get(one.state.id)) is not None:
                assert found.reset() == one.state.history and found.tools == one.state.tools
                assert found.step(found.gold[0]).reward == verifier.judge(one.state, one.state.demonstration).reward


def test_of_many_pivots_as_many_as_wanted_are_drawn_and_heavy_ones_more_often(household, tmp_path):
    header, *rows = (household / "pivots.jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in rows]
    heavy = {(row["trace_id"], row["turn"]) for row in rows[::2]}
    for row in rows:
        row["weight"] = 20.0 if (row["trace_id"], row["turn"]) in heavy else 1.0
    path = tmp_path / "weighed.jsonl"
    path.write_text("\n".join([header, *map(json.dumps, rows)]) + "\n")
    drawn = Counter()
    for seed in range(60):
        with open_tasks(Part(f"pivots:{path}"), {"train": 3}, seed=seed) as opened:
            found = [one.task_id for one in opened.of("train")]
        assert len(set(found)) == 3
        drawn.update((name.rpartition("#")[0], int(name.rpartition("#")[2])) in heavy for name in found)
    assert drawn[True] > 3 * drawn[False]


def test_pivots_without_weights_are_drawn_alike(household, tmp_path):
    """As `select` writes them by rule random."""
    header, *rows = (household / "pivots.jsonl").read_text().splitlines()
    rows = [{key: value for key, value in json.loads(row).items() if key != "weight"} for row in rows]
    path = tmp_path / "alike.jsonl"
    path.write_text("\n".join([header, *map(json.dumps, rows)]) + "\n")
    with open_tasks(Part(f"pivots:{path}"), {"train": 3}) as opened:
        assert len({one.task_id for one in opened.of("train")}) == 3


class Played(PlayedTask):
    player, tools = object(), ()

    def __init__(self, task_id):
        self.task_id = task_id

    def refusal(self):
        return InputError("plays itself")


def test_tasks_that_play_themselves_are_no_part_of_a_blend(monkeypatch):
    module = ModuleType("played_tasks")
    module.tasks, module.__file__ = lambda split, count, *, seed: [Played(f"{n}") for n in range(count)], __file__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    own, other = {"name": f"{module.__name__}:tasks"}, {"name": "household"}
    for place, of in enumerate(([own, other], [other, own])):
        with pytest.raises(ConfigError) as refused, open_tasks(Part("blend", {"of": of}), {"train": 4}):
            pass
        assert refused.value.field.endswith(f"of.{place}")


def test_a_blend_has_its_shares_and_says_which_contents_it_was_made_of(household):
    path = household / "pivots.jsonl"
    blend = {"of": [{"name": "household"}, {"name": f"pivots:{path}"}], "shares": [3.0, 1.0]}
    with open_tasks(Part("blend", blend), {"train": 12}) as opened:
        kinds = Counter(type(one).__name__ == "PivotTask" for one in opened.of("train"))
    assert kinds == {False: 9, True: 3} and opened.pool is None
    assert "pivots_hash" in opened.contents["of.1"]
    with pytest.raises(InputError) as refused, open_tasks(Part("blend", blend), {"train": 12, "test": 1}):
        pass
    assert refused.value.field == "count"


def test_where_an_environment_waits_for_tools_the_blend_does(bubblewrap):
    with open_tasks(Part("blend", {"of": [{"name": "household"}, {"name": "qa"}]}), {"train": 4}) as opened:
        assert opened.pool is not None and opened.pool.concurrency and len(opened.of("train")) == 4
        assert opened.figures()["of.0"] == {} != opened.figures()["of.1"]


def test_pivots_beside_whole_episodes_are_trained_in_one_update(turntree, household, tmp_path):
    blend = [{"name": "household", "difficulty": "easy"}, {"name": f"pivots:{household / 'pivots.jsonl'}"}]
    done = turntree.json(
        *("train", "online", "--environment", "blend", "--set", f"environment.of={json.dumps(blend)}"),
        *("--count", 12, "--iterations", 2, "--max-turns", 4, "--max-tokens", 24, "--set", "check.tasks=0"),
        *("--set", "train.groups=12", "--set", "train.group_size=4", "--out", tmp_path / "run"),
    )
    assert done["iterations"] == 2
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    pivots = [row for row in rollouts if "#" in row["task"]]
    assert Counter(row["task"] for row in rollouts).most_common(1)[0][1] == 2, "every task once an epoch"
    assert (len(rollouts), len(pivots)) == (24, 12)
    assert max(len(one["actions"]) for row in pivots for one in row["rollouts"]) == 1
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(row["trained_groups"] == 12 and not row["censored_reasons"] for row in metrics if row["step"])
