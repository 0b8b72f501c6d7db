"""A group played by hand: what a gate sees of it, and what a rollout that leaves another one knows."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core.completion import Completion, Sampling
from turntree.core.cost import Cost
from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.core.tree import StopReason
from turntree.core.verdict import Verdict
from turntree.env.pool import Session
from turntree.rollout.groups import Group
from turntree.rollout.live import Ending, EpisodeConfig, LiveRollout

TOLD = Observation((Message("user", "the task"),), done=False, progress=0.0)
STOPPED = Ending(StopReason.COMPLETED, Verdict(1.0, "done"))
LOST = Ending(StopReason.ENVIRONMENT_ERROR, Verdict(None, "lost"))


def group(**settings) -> Group:
    """A group of three leaves of which two rollouts are begun, in its fifth iteration."""
    given = {"size": 3, "initial": 2, "branched": 1, "seed": 3, "iteration": 5, "occurrence": 2, "max_turns": 9}
    task = SimpleNamespace(task_id="the task", tools=())
    made = Group(index=0, task=task, begun=0.0, **{**given, **settings})
    made.prompt_ids = (1, 2)
    for sample in range(2):
        made.plant((sample,), TOLD)
    return made


def answer(sample: int, turn: int) -> Observation:
    return Observation((Message("user", f"heard {sample}.{turn}"),), done=False, progress=turn / 10)


def completion(sample: int, turn: int) -> Completion:
    numbers = (0.1 * turn, 0.2)
    return Completion(token_ids=(10 + turn, 20 + sample), logprobs=numbers, entropies=numbers, finish="stop")


def play(rollout: LiveRollout, turns: int, sample: int) -> Session:
    """So many turns more; the episode that they are."""
    episode = Session(SimpleNamespace(), [], [TOLD])
    for turn in range(rollout.turns + 1, rollout.turns + turns + 1):
        action = Message("assistant", f"said {sample}.{turn}")
        rollout.append_turn(completion(sample, turn), action)
        rollout.append_answer(answer(sample, turn), (*rollout.token_ids, 30 + turn), Cost(tool_calls=1))
        episode.actions.append(action)
        episode.answers.append(answer(sample, turn))
    return episode


@given(turn=st.integers(1, 4), ahead=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_a_gate_sees_a_group_as_it_was_at_the_turn_however_far_its_rollouts_have_come(turn, ahead) -> None:
    then, now = group(), group()
    for sample in range(2):
        play(then.rollouts[(sample,)], turn, sample)
        play(now.rollouts[(sample,)], turn + ahead[sample], sample)
    seen = then.progress(turn)
    assert now.progress(turn) == seen
    assert (seen.task_id, seen.max_turns, seen.iteration, seen.occurrence) == ("the task", 9, 5, 2)
    assert seen.actions == tuple(tuple(f"said {i}.{t}" for t in range(1, turn + 1)) for i in range(2))
    heard = [tuple(f"heard {i}.{t}" for t in range(1, turn + 1)) for i in range(2)]
    assert seen.observations == tuple(("the task", *texts) for texts in heard)
    assert (seen.progress, seen.finished) == ((turn / 10, turn / 10), (False, False))


def test_a_gate_sees_rollouts_that_ended_as_they_ended_and_none_that_a_fault_did() -> None:
    played = group()
    play(played.rollouts[(0,)], 1, 0)
    play(played.rollouts[(1,)], 3, 1)
    assert played.reached(1) and not played.reached(2)
    played.endings[(0,)] = STOPPED
    assert played.reached(3) and not played.reached(4)
    seen = played.progress(3)
    assert (seen.finished, seen.progress) == ((True, False), (0.1, 0.3))
    assert [len(actions) for actions in seen.actions] == [1, 3]
    assert played.progress(1).finished == (True, False)
    played.endings[(0,)] = LOST
    assert played.reached(3)
    assert [actions[0] for actions in played.progress(3).actions] == ["said 1.1"]


def knows(rollout: LiveRollout) -> dict[str, object]:
    """All that its next turn may depend on, and all that a gate or a brancher may see of it."""
    names = ("messages", "token_ids", "actions", "observations", "answers", "entropies", "stopped", "begun")
    return {**{name: getattr(rollout, name) for name in names}, "turns": rollout.turns}


@given(turns=st.integers(0, 3), shared=st.integers(0, 1))
def test_a_rollout_that_leaves_one_in_flight_knows_what_that_knew_and_the_tokens_that_they_share(turns, shared) -> None:
    played, then = group(), group()
    rollout, before = played.rollouts[(0,)], then.rollouts[(0,)]
    for each in (rollout, before):
        play(each, turns, 0)
    said = completion(0, turns + 1)
    rollout.append_turn(said, Message("assistant", "said"), shared=shared)
    twin = rollout.branch(said, shared)
    start = said.token_ids[:shared]
    assert knows(twin) == {**knows(before), "token_ids": (*before.token_ids, *start), "begun": start}
    assert (twin.key, twin.forked_at, twin.just_forked) == ((0, 1), turns + 1, True)
    config = EpisodeConfig(sampling=Sampling(max_tokens=8))
    assert twin.request(config, 3).sampling.max_tokens == 8 - shared
    assert twin.request(config, 3).seed != before.request(config, 3).seed, "its draws are its own"
    rest = dataclasses.replace(said, token_ids=(7,), logprobs=(0.0,), entropies=(0.5,))
    assert twin.turn_tokens(rest) == (*start, 7)
    twin.append_turn(rest, Message("assistant", "other"))
    assert twin.entropies[-1] == (*said.entropies[:shared], 0.5), "one for every token of the turn"
    assert not twin.begun and not twin.begun_entropies


@pytest.mark.parametrize("branched", range(6))
def test_the_leaves_that_may_be_forked_are_shared_out_whole(branched: int) -> None:
    played = group(size=2 + branched, branched=branched)
    budgets = [played.rollouts[(sample,)].budget for sample in range(2)]
    assert sum(budgets) == branched and max(budgets) - min(budgets) <= 1
    refill = played.plant((2,), TOLD)
    assert refill.budget == 0, "a refill forks nothing off"
