"""The verifier that plays on: an action is worth the episodes that follow it, and they are on the bill."""

from dataclasses import replace

import pytest

from scripted_engine import ScriptedEngine
from turntree.core.completion import Completion, Sampling
from turntree.core.config import Part
from turntree.core.cost import NO_COST
from turntree.core.errors import ConfigError
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.protocols import TurnState
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.rollout.continuations import Continuation, Outcome
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.local import Prompted, judge_demonstrated, judge_turns, render, score_wave
from turntree.stages.config import Device
from turntree.stages.policy import load_policy
from turntree.stages.verifier import open_verifier
from turntree.train.config import PivotConfig
from turntree.train.pivot import draw_local
from turntree_worlds.household.entry import GamesConfig, games
from turntree_worlds.household.experts import shortest_plan

HOUSEHOLD = Part("household")


@pytest.fixture(scope="module")
def policy():
    return load_policy("household", Device())


def near_the_end(left: int) -> tuple[TurnState, Message]:
    """A state of the shortest plan with `left` turns of it to go, and the plan's next command."""
    (game, source), *_ = games(GamesConfig(split="train", count=1))
    world, messages = game.reset(), [Message("user", game.intro)]
    plan = shortest_plan(world)
    for command in plan[:-left]:
        messages += [Message("assistant", command), Message("user", world.step(command).observation)]
    told = Message("assistant", plan[-left])
    return TurnState("t", len(plan) - left, tuple(messages), Message("assistant", "look"), environment=source), told


def outcome(policy, **options) -> Outcome:
    options = {"max_tokens": 24, **options}
    return Outcome(HOUSEHOLD, policy.engine, policy.renderer, **options)


def test_an_action_that_ends_the_episode_is_worth_its_outcome_and_nothing_is_sampled(policy) -> None:
    state, winning = near_the_end(1)
    verifier = outcome(policy, max_turns=state.turn + 1)
    won, lost = verifier.judge_all([(state, winning), (state, Message("assistant", "look"))])
    assert (won.reward, lost.reward) == (1.0, 0.0)
    assert won.cost.turns == lost.cost.turns == 0
    assert won.cost.tool_calls == state.turn + 1 and lost.cost.tool_calls == 1  # the history is played again once


def test_other_actions_are_worth_the_share_of_continuations_that_succeed_whatever_was_demonstrated(policy) -> None:
    state, right = near_the_end(2)
    verifier = outcome(policy, forks=32, max_turns=state.turn + 3)
    good, bad = verifier.judge_all([(state, right), (state, state.demonstration)])
    assert good.reward is not None and bad.reward is not None and good.reward > bad.reward
    assert (32 * good.reward).is_integer() and good.cost.turns >= 32 and good.cost.decoded_tokens > good.cost.turns
    assert judge_demonstrated(verifier, state).reward is None  # nobody said that it is right


def test_draws_are_of_the_seed_and_of_the_action_and_not_of_what_is_judged_beside_it(policy) -> None:
    """So a search and the update that follows it do not share the noise of their forks."""
    state, right = near_the_end(3)
    thought = Message("assistant", right.content, reasoning="It is the last one.")
    actions = [(state, Message("assistant", command)) for command in (right.content, "look", "inventory", "help")]
    actions.append((state, thought))

    def rewards(pairs, seed=7):
        verifier = outcome(policy, forks=16, max_turns=state.turn + 5)
        return [verdict.reward for verdict in verifier.judge_all(pairs, seed)]

    first = rewards(actions)
    assert [rewards([pair])[0] for pair in actions] == first
    assert rewards(actions, seed=8) != first and rewards(actions) == first
    assert first[0] != first[-1]  # what goes on has read the thought


def test_equal_actions_are_judged_once_and_billed_once_and_a_cut_turn_is_not_played(policy) -> None:
    state, _ = near_the_end(2)
    tree = RolloutTree(state.id)
    root = tree.add(None, NodeKind.PROMPT, (1, 2), messages=state.history).id
    for number, action in enumerate((Message("assistant", "look"), Message("assistant", "look"))):
        tree.stop(
            tree.add_completion(
                root,
                Completion(token_ids=(3, number), logprobs=(0.0, 0.0), entropies=(0.0, 0.0), finish="stop"),
                action,
            ).id,
            StopReason.COMPLETED,
        )
    verifier = outcome(policy, forks=2)
    policy.engine.clear_cache()  # nothing is kept from what was played before
    (rewards,) = score_wave([(tree, state)], verifier)
    policy.engine.clear_cache()
    (once,) = outcome(policy, forks=2).judge_all([(state, Message("assistant", "look"))])
    assert len(set(rewards.scored().values())) == 1
    assert rewards.cost.counts() == once.cost.counts() != NO_COST.counts()
    cut = replace(Message("assistant", "look"), cut=True)
    (verdict,) = judge_turns(verifier, [(state, cut)])
    assert verdict.reward == 0.0 and verdict.cost == NO_COST


def test_a_state_that_cannot_be_rebuilt_gives_no_reward(policy) -> None:
    state, right = near_the_end(2)
    other = replace(state, history=(*state.history[:-1], Message("user", "Something else happened.")))
    (verdict,) = outcome(policy).judge_all([(other, right)])
    assert verdict.reward is None and "does not fit its environment" in verdict.reason


def test_a_state_beyond_the_last_turn_and_an_environment_that_tells_no_success_give_no_reward(policy) -> None:
    state, right = near_the_end(1)
    (late,) = outcome(policy, max_turns=state.turn).judge_all([(state, right)])
    assert late.reward is None and "max_turns" in late.reason
    one = Continuation(state, right, "x")
    one.end(Rewards({0: Verdict(0.7, "graded")}))
    assert one.outcomes == [] and "does not say" in one.reason


def test_the_episodes_are_those_of_the_run_unless_options_say_otherwise(policy) -> None:
    run = EpisodeConfig(max_turns=9, max_context=700, cut_turns="judge", sampling=Sampling(max_tokens=11))
    told = Outcome(HOUSEHOLD, policy.engine, policy.renderer, run).name
    assert "max_turns=9" in told and "max_tokens=11" in told and "max_context=700" in told
    assert "max_turns=5" in Outcome(HOUSEHOLD, policy.engine, policy.renderer, run, max_turns=5).name


def test_it_says_what_it_needs() -> None:
    for given in (None, HOUSEHOLD):
        with pytest.raises(ConfigError, match="plays on"), open_verifier(Part("outcome"), given):
            pass


@pytest.mark.parametrize(("failing", "rewards"), [(0.0, {0.0}), (0.5, {0.0}), (1.0, {None})])
def test_a_request_that_fails_costs_its_continuation_and_not_the_run(policy, failing: float, rewards: set) -> None:
    """On a server a request may fail for good; what is left of the continuations says what the action is worth."""
    state, _ = near_the_end(3)
    look = policy.renderer.completion(Message("assistant", "look"))
    engine = ScriptedEngine(
        lambda prompt, seed: look,
        policy.renderer.stop_ids,
        vocab_size=1 << 17,
        fault=lambda request: "no answer" if request.seed % 100 < 100 * failing else None,
    )
    limited = Outcome(HOUSEHOLD, engine, policy.renderer, forks=16, max_tokens=24, max_turns=state.turn + 2)
    (verdict,) = limited.judge_all([(state, Message("assistant", "look"))])
    assert {verdict.reward} == rewards
    assert ("no answer" in verdict.reason) == (verdict.reward is None)
    if 0 < failing < 1:
        count = int(verdict.reason.split(" of ")[1].split()[0])
        assert 0 < count < 16


def test_an_action_whose_answer_fills_the_context_is_a_failure_as_it_is_in_an_episode(policy) -> None:
    """It had no reward: nothing was lost by calling for what no context holds."""
    state, right = near_the_end(3)
    needed = len(policy.renderer.prompt(state.history))

    def judged(context: int) -> Verdict:
        limits = EpisodeConfig(max_context=context, sampling=Sampling(max_tokens=24))
        return outcome(policy, episodes=limits).judge(state, right)

    full = judged(needed + 24)
    assert (full.reward, full.reason, full.cost.turns) == (0.0, "the action ends the episode", 0)
    never_asked = judged(needed + 23)
    assert never_asked.reward is None and "leaves no room" in never_asked.reason


def test_a_state_that_comes_again_in_a_wave_is_judged_alike_whichever_worker_plays_it(policy) -> None:
    state, _ = near_the_end(4)
    item, sampling = render(state, policy.renderer), Sampling(max_tokens=24)
    config = PivotConfig(sampling=sampling, group_size=8)

    def rewards(wave: list[Prompted], occurrences: list[int] | None = None) -> list[list[float | None]]:
        verifier = outcome(policy, forks=8, temperature=2.0, max_turns=state.turn + 6)
        drawn = draw_local(wave, policy.engine, policy.renderer, verifier, config, 3, occurrences)
        return [[verdict.reward for verdict in judged.verdicts.values()] for _, judged in drawn]

    together = rewards([item, item])
    assert together[0] != together[1], "they draw for themselves"
    assert together == [*rewards([item], [0]), *rewards([item], [1])]
