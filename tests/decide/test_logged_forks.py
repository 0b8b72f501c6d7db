"""What the rollout log says of trees that fork, and what those who read it leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fixed_brancher import FixedBrancher
from rollout_view import rollout_of
from token_world import EPISODES, VOCABULARY, TokenRenderer, TokenWorld, WatchedEngine, episode_in
from turntree.core.labels import Rewards
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import GateDecision, GroupProgress, Observation
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.decide.branching.rules import EntropyBrancher, RandomBrancher
from turntree.decide.gates.table import shown_at, table_from_groups
from turntree.logs.groups import LoggedGroup
from turntree.logs.rollouts import group_from_tree
from turntree.rollout.groups import GrownGroup
from turntree.rollout.scheduler import Scheduler, SchedulerConfig


def played(brancher, count: int = 20) -> list[GrownGroup]:
    config = SchedulerConfig(episodes=EPISODES, group_size=8, initial_rollouts=3)
    scheduler = Scheduler(WatchedEngine(), TokenRenderer(), config, brancher=brancher)
    return list(scheduler.run([TokenWorld(f"task {n}") for n in range(count)], seed=2))


def logged(group: GrownGroup) -> LoggedGroup:
    return group_from_tree(group.tree, group.rewards, id="1.0")


def test_a_split_turn_is_one_action_of_every_branch_and_paid_for_once() -> None:
    tree = RolloutTree("task")

    def say(parent: int, tokens: int, text: str | None) -> int:
        message = None if text is None else Message("assistant", text)
        return tree.add(
            parent,
            NodeKind.COMPLETION,
            (5,) * tokens,
            logprobs=(0.0,) * tokens,
            messages=() if message is None else (message,),
        ).id

    prompt = tree.add(None, NodeKind.PROMPT, (1,), messages=(Message("user", "find it"),)).id
    seen = tree.add(say(prompt, 4, "look"), NodeKind.OBSERVATION, (2,), messages=(Message("user", "a drawer"),)).id
    shared = say(seen, 3, None)
    long, short = say(shared, 2, "open it"), say(shared, 1, "go")
    heard = tree.add(long, NodeKind.OBSERVATION, (2,), messages=(Message("user", "a mug"),)).id
    last = say(heard, 6, "take it")
    for leaf in (short, last):
        tree.stop(leaf, StopReason.COMPLETED)
    rewards = Rewards({short: Verdict(0.0, ""), last: Verdict(1.0, "")})

    incumbent, branch = group_from_tree(tree, rewards, id="1.0").rollouts

    assert incumbent.actions == ("look", "open it", "take it")
    assert incumbent.turn_tokens == (4, 3 + 2, 6)
    assert incumbent.observations == ("find it", "a drawer", "a mug")
    assert (incumbent.forked, incumbent.reward) == (False, 1.0), "the one that was forked, though it ended later"
    assert branch.actions == ("look", "go")
    assert branch.turn_tokens == (0, 1)
    assert branch.observations == ("find it", "a drawer")
    assert (branch.forked, branch.reward) == (True, 0.0)


def test_a_log_pays_for_every_sampled_token_once_and_tells_whole_actions() -> None:
    for group in played(EntropyBrancher(vocabulary=VOCABULARY, probe_tokens=2, beta=1.0, tau=0.6)):
        log = logged(group)
        sampled = sum(len(node.token_ids) for node in group.tree if node.sampled)
        assert sum(rollout.generated_tokens or 0 for rollout in log.rollouts) == sampled
        told = sorted(rollout.actions for rollout in log.rollouts)
        paths = [episode_in(rollout_of(group.tree, leaf).token_ids)[:-1] for leaf in group.tree.leaves()]
        assert told == sorted(tuple(" ".join(map(str, (*turn, 0))) for turn in path) for path in paths)


def test_the_rollouts_that_count_as_independent_are_those_that_nobody_forked() -> None:
    """The same seeds without a brancher: the independent rollouts of a group are the same ones."""
    plain = played(RandomBrancher(rate=0.0, probe_tokens=1))
    for branched, alone in zip(played(FixedBrancher(turns=(2, 3))), plain, strict=True):
        ours = [r for r in logged(branched).rollouts if not r.forked and not r.refill]
        theirs = [r for r in logged(alone).rollouts if not r.refill]
        assert len(ours) == len(theirs) == 3
        assert [(r.actions, r.reward) for r in ours] == [(r.actions, r.reward) for r in theirs]
        log = logged(branched).rollouts
        assert sum(r.forked for r in log) == 8 - len(branched.tree.starts())
        assert sum(r.refill for r in log) == len(branched.tree.refills())


def test_calibration_leaves_out_what_no_gate_would_have_seen() -> None:
    groups = [logged(group) for group in played(RandomBrancher(rate=0.3, probe_tokens=1))]
    table = table_from_groups(groups, source="log")
    assert set(table.sizes_N) == {3.0}
    forked, refilled = (sum(getattr(r, name) for g in groups for r in g.rollouts) for name in ("forked", "refill"))
    assert forked > 20
    assert refilled > 20
    assert table.dropped == {
        "rollouts that began after others had ended": refilled,
        "rollouts that share their first turns with another": forked,
    }


class CallingRenderer(TokenRenderer):
    """Every turn thinks aloud and calls a tool; many turns make one call with different words."""

    def parse(self, token_ids: Sequence[int], tools: Any = ()) -> Message:
        return replace(super().parse(token_ids), tool_calls=(ToolCall("move", {"to": token_ids[0] % 2, "by": 1}),))


class Watching:
    """A gate that stops nothing and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[GroupProgress] = []

    def decide(self, group: GroupProgress) -> GateDecision | None:
        self.shown.append(group)
        return None


class Breaking(TokenWorld):
    def step(self, action: Message) -> Observation:
        seen = super().step(action)
        if len(self.said) == 2 and int(action.content.split()[0]) % 2:
            raise RuntimeError("it broke")
        return seen

    def fork(self) -> TokenWorld:
        return Breaking(self.task_id, self.said)


@pytest.mark.parametrize("world", [TokenWorld, Breaking])
def test_a_gate_is_shown_what_calibration_reads_in_the_log(world: type[TokenWorld]) -> None:
    """Else a threshold that the log supports is another one online: words beside a call are no part of the action."""
    gate = Watching()
    config = SchedulerConfig(episodes=EPISODES, group_size=4)
    scheduler = Scheduler(WatchedEngine(), CallingRenderer(), config, gate=gate)
    logs = {group.task.task_id: logged(group) for group in scheduler.run([world(f"{n}") for n in range(5)], seed=2)}
    assert len({action for log in logs.values() for r in log.rollouts for action in r.actions}) == 2
    lost = 0
    for shown in gate.shown:
        turn, log = max(map(len, shown.actions)), logs[shown.task_id]
        there = shown_at(log, turn)
        lost += len(log.rollouts) - len(there)
        assert shown.actions == tuple(r.actions[:turn] for r in there)
        read = [(r.observations or ())[:turn] for r in there]
        ended = zip(shown.observations, shown.finished, strict=True)
        assert [seen if finished else seen[:turn] for seen, finished in ended] == read
    assert bool(lost) is (world is Breaking)
