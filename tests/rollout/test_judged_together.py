"""A verifier that waits for a server is asked for many verdicts at once, wherever a stage judges."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from turntree.core.cost import Cost
from turntree.core.messages import Message
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.pivots.profile import Draft, Judge, ProfileConfig, judge_drafts
from turntree.pivots.samples import Sample
from turntree.rollout.local import judge_turns, score_wave
from turntree.verify.strict import StrictMatch

SAMPLED: dict[str, Any] = {"logprobs": (-0.1,), "entropies": (0.1,), "policy_version": 0}


class Meeting(TurnVerifier):
    """Answers only when `people` verdicts are asked for at the same time."""

    name = "meeting"

    def __init__(self, people: int) -> None:
        self.concurrency = people
        self._barrier = threading.Barrier(people, timeout=20)
        self.asked: Counter[str] = Counter()

    def judge(self, state: TurnState, action: Message) -> Verdict:
        self.asked[f"{state.id} {action.content}"] += 1
        self._barrier.wait()
        return Verdict(float(action.content == "right"), "met", "said")


def state(name: str) -> TurnState:
    return TurnState(name, 0, (Message("user", "go"),), Message("assistant", "right"))


def said(content: str) -> Message:
    return Message("assistant", content)


def test_verdicts_come_in_order_and_side_by_side() -> None:
    pairs = [(state("a"), said(text)) for text in ("right", "left", "right", "up")]
    assert [verdict.reward for verdict in judge_turns(Meeting(4), pairs)] == [1, 0, 1, 0]


def test_a_verifier_that_says_nothing_is_asked_one_by_one() -> None:
    threads: set[str] = set()

    class ProcessGroup(StrictMatch):
        def judge(self, state: TurnState, action: Message) -> Verdict:
            threads.add(threading.current_thread().name)
            return super().judge(state, action)

    judge_turns(ProcessGroup(), [(state("a"), said("right"))] * 5)
    assert threads == {threading.current_thread().name}


def test_a_profile_asks_for_all_actions_of_a_wave_together_and_for_equal_ones_once() -> None:
    meeting = Meeting(4)
    judge = Judge(meeting, ProfileConfig())
    drafts = [Draft(state(name), judge, Verdict(1.0, "", "said")) for name in ("a", "b")]
    for draft in drafts:
        draft.add([Sample(said(text), cost=Cost(turns=1)) for text in ("right", "left", "right")])
    judge_drafts(drafts, judge)
    assert [draft.rewards for draft in drafts] == [[1, 0, 1]] * 2
    assert set(meeting.asked.values()) == {1} and len(meeting.asked) == 4


def test_training_scores_the_trees_of_a_step_together() -> None:
    grown: list[tuple[RolloutTree, TurnState]] = []
    for name in ("a", "b"):
        tree = RolloutTree(name)
        root = tree.add(None, NodeKind.PROMPT, (1,))
        for text in ("right", "left", "right"):
            leaf = tree.add(root.id, NodeKind.COMPLETION, (2,), messages=(said(text),), **SAMPLED)
            tree.stop(leaf.id, StopReason.COMPLETED)
        grown.append((tree, state(name)))
    rewards = score_wave(grown, Meeting(4))
    assert [[one.of(leaf) for leaf in tree.leaves()] for one, (tree, _) in zip(rewards, grown, strict=True)] == [
        [1, 0, 1],
        [1, 0, 1],
    ]


def test_an_error_of_one_verdict_is_no_verdict_and_says_what_it_was() -> None:
    class Broken(Meeting):
        def judge(self, state: TurnState, action: Message) -> Verdict:
            raise RuntimeError("broken")

    verdicts = judge_turns(Broken(2), [(state("a"), said("x")), (state("b"), said("y"))])
    assert [verdict.reward for verdict in verdicts] == [None, None]
    assert all("RuntimeError: broken" in verdict.reason for verdict in verdicts)
