"""A turn that the token limit cut is worth nothing wherever turns are judged, and every record says so."""

import json
from dataclasses import replace

import pytest

from scripted_engine import ScriptedEngine
from tiny_models import tiny_tokenizer
from turntree.core.completion import Sampling
from turntree.core.labels import Rewards
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Observation, TurnState, TurnVerifier
from turntree.core.tree import RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.env.tools.runtime import ToolRuntime
from turntree.pivots.profile import Draft, Judge, ProfileConfig, profile_wave
from turntree.pivots.rows import judgements_of, samples_of
from turntree.pivots.samples import Sampler, together
from turntree.pivots.stopping import Prior
from turntree.render.template import ChatRenderer
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.local import judge_turn, render, rule_name, sample_local, score_wave
from turntree.rollout.players import Setting, grow
from turntree.rollout.rewards import Episode, RewardSum, WeightedReward
from turntree.verify.tool_call import ToolCallMatch
from turntree_worlds.qa.environment import QaEnvironment
from turntree_worlds.qa.questions import Question

TOKENIZER = tiny_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
CALL = Message("assistant", "", (ToolCall("look", {"at": "shelf"}),))
WHOLE = RENDERER.completion(CALL)
ENDLESS = (*WHOLE[:-1], *TOKENIZER(" blah blah" * 50, add_special_tokens=False)["input_ids"])
STATE = TurnState("t", 0, (Message("user", "look at the shelf"),), CALL)
SAMPLING = Sampling(max_tokens=len(ENDLESS))


def engine() -> ScriptedEngine:
    """Makes the right call, and goes on without end in every second sample."""
    return ScriptedEngine(
        lambda prompt, seed: ENDLESS if seed % 2 else WHOLE, RENDERER.stop_ids, vocab_size=len(TOKENIZER)
    )


def leaves(tree: RolloutTree, *, cut: bool) -> list[int]:
    return [leaf for leaf in tree.leaves() if (tree.stop_reason(leaf) is StopReason.MAX_TOKENS) is cut]


def test_the_right_call_with_endless_text_behind_it_is_a_failure_and_no_gap() -> None:
    (tree,) = sample_local([render(STATE, RENDERER)], engine(), RENDERER, SAMPLING, 8, seed=0)
    cut, whole = leaves(tree, cut=True), leaves(tree, cut=False)
    assert cut and whole
    assert all(tree[leaf].message.tool_calls == CALL.tool_calls for leaf in cut + whole)  # the same call in both
    (rewards,) = score_wave([(tree, STATE)], ToolCallMatch())
    assert {rewards.of(leaf) for leaf in whole} == {1.0}
    assert {rewards.verdicts[leaf] for leaf in cut} == {Verdict(0.0, "cut by the token limit", "look")}
    assert all(judge_turn(ToolCallMatch(), STATE, tree[leaf].message).reward == 0.0 for leaf in cut), "by default"
    (judged,) = score_wave([(tree, STATE)], ToolCallMatch(), cut_turns="judge")
    assert {judged.of(leaf) for leaf in tree.leaves()} == {1.0}


def test_a_verifier_that_is_asked_about_a_cut_turn_sees_that_it_was_cut() -> None:
    class Whole(TurnVerifier):
        name = "whole/1"

        def judge(self, state: TurnState, action: Message) -> Verdict:
            return Verdict(0.25 if action.cut else 1.0, "")

    (tree,) = sample_local([render(STATE, RENDERER)], engine(), RENDERER, SAMPLING, 8, seed=0)
    (judged,) = score_wave([(tree, STATE)], Whole(), cut_turns="judge")
    assert {judged.of(leaf) for leaf in leaves(tree, cut=True)} == {0.25}
    again = RolloutTree.from_json(json.loads(json.dumps(tree.to_json())))
    assert [node.message for node in again] == [node.message for node in tree]


def profiled(cut_turns: str) -> dict:
    config = ProfileConfig(rollouts=16, sampling=SAMPLING, cut_turns=cut_turns)
    judge = Judge(ToolCallMatch(), config)
    sampler = Sampler(together(engine()), RENDERER, SAMPLING, 0)
    (found,) = profile_wave([render(STATE, RENDERER)], sampler, judge, config, Prior(16))
    return json.loads(json.dumps(found.to_json()))


@pytest.mark.parametrize("before", ["fail", "judge"])
@pytest.mark.parametrize("after", ["fail", "judge"])
def test_a_stored_profile_judged_anew_is_the_profile_that_would_have_been_made(before: str, after: str) -> None:
    row = profiled(before)
    assert 0 < row["truncated"] < 16
    assert row["reward_mean"] == (1.0 if before == "judge" else 1 - row["truncated"] / 16)
    judge = Judge(ToolCallMatch(), ProfileConfig(cut_turns=after))
    draft = Draft(STATE, judge, *judge.demonstrated([STATE]))
    draft.add(samples_of(row))
    expected = profiled(after)
    found = json.loads(json.dumps(draft.finish(16).to_json()))
    assert {key: found[key] for key in found if key != "cost"} == {k: expected[k] for k in expected if k != "cost"}


def test_what_older_profiles_say_of_cut_turns_is_not_taken_over() -> None:
    """They hold the verdict on the text, under the name that the rule still has."""
    row = profiled("judge")
    assert [judgement.reward for judgement in judgements_of(row).values()] == [1.0]
    assert len(row["actions"]) == 2


def test_what_a_judge_could_not_judge_is_asked_again() -> None:
    """It may have been down, or out of its budget."""
    row = profiled("judge")
    for action in row["actions"]:
        action["reward"] = None
    assert judgements_of(row) == {}


def test_rewards_by_another_rule_for_cut_turns_have_another_name() -> None:
    assert rule_name(ToolCallMatch(), "fail") == ToolCallMatch().name != rule_name(ToolCallMatch(), "judge")


class Once:
    """An environment that executes every call it is given, keeps what it was told, and pays for each."""

    tools = ()
    total_reward = True
    told: list[Message]

    def __init__(self, failure_reward: float = 0.0, paid: float = 1.0, patience: int = 1) -> None:
        self.task_id, self.told, self.failure_reward = "once", [], failure_reward
        self._paid, self._patience, self._turns = paid, patience, 0

    def reset(self) -> tuple[Message, ...]:
        return (Message("user", "go"),)

    def step(self, action: Message) -> Observation:
        self.told.append(action)
        self._turns += 1
        done = self._turns == self._patience
        return Observation((Message("user", "done"),), done=done, success=done, reward=self._paid)

    def fork(self) -> "Once":
        twin = Once(self.failure_reward, self._paid, self._patience)
        twin.told, twin._turns = self.told, self._turns
        return twin


def play(task: Once, episodes: EpisodeConfig, functions: RewardSum | None = None) -> tuple[RolloutTree, Rewards]:
    return grow([task], engine(), RENDERER, episodes, group_size=8, seed=0, setting=Setting(functions=functions))[0]


def test_no_environment_sees_a_cut_turn_and_its_rollout_fails() -> None:
    """The policy did not finish the turn, so its call is no call: it used to be executed, and paid for."""
    task = Once()
    tree, rewards = play(task, EpisodeConfig(sampling=SAMPLING))
    cut, whole = leaves(tree, cut=True), leaves(tree, cut=False)
    assert cut and whole and len(cut) + len(whole) == 8
    assert [action.cut for action in task.told] == [False] * len(whole)
    why = f"cut by the limit of {len(ENDLESS)} tokens a turn"
    assert {rewards.verdicts[leaf] for leaf in cut} == {Verdict(0.0, why, success=False)}
    assert {rewards.of(leaf) for leaf in whole} == {1.0}
    for leaf in cut:  # the tree says what was sampled, and that nothing answered it
        assert tree[leaf].message.tool_calls == CALL.tool_calls and tree[leaf].message.cut


def test_an_environment_that_judges_cut_turns_is_told_their_text_without_the_call() -> None:
    task = Once()
    tree, rewards = play(task, EpisodeConfig(sampling=SAMPLING, cut_turns="judge"))
    assert {action.cut for action in task.told} == {True, False}
    assert all(action.cut == ("blah" in action.content) == (not action.tool_calls) for action in task.told)
    assert {rewards.of(leaf) for leaf in tree.leaves()} == {1.0}


@pytest.mark.parametrize(("paid", "first", "worth"), [(1.0, 0.0, {0.0}), (-0.5, -0.5, {-0.5}), (-2.0, -1.0, {-1, -2})])
def test_endless_text_is_never_worth_more_than_failing(paid: float, first: float, worth: set) -> None:
    """Where an ending costs something, being cut costs as much: before the first answer `failure_reward` says it."""
    tree, rewards = play(Once(first, paid, patience=5), EpisodeConfig(max_turns=4, sampling=SAMPLING))
    assert {rewards.of(leaf) for leaf in leaves(tree, cut=True)} == worth
    assert len({tree[leaf].turn for leaf in leaves(tree, cut=True)}) > 1, "first turns and later ones"


def test_stalling_is_worth_what_the_environment_says_of_a_failure() -> None:
    """An episode that no answer gives a reward: a wrong end would cost, and a limit would be free."""

    class Silent(Once):
        def step(self, action: Message) -> Observation:
            return replace(super().step(action), reward=None)

        def fork(self) -> "Silent":
            return Silent(self.failure_reward, self._paid, self._patience)

    for worth in (-1.0, 0.0):
        tree, rewards = play(Silent(worth, patience=9), EpisodeConfig(max_turns=3, sampling=SAMPLING))
        stops = {tree.stop_reason(leaf) for leaf in tree.leaves()}
        assert stops == {StopReason.MAX_TURNS, StopReason.MAX_TOKENS}
        assert {rewards.of(leaf) for leaf in tree.leaves()} == {worth}


def test_reward_functions_of_your_own_judge_a_cut_episode_as_any_other() -> None:
    seen = []

    def judge(episode: Episode) -> float:
        seen.append((episode.stop, episode.cut_turns, episode.reward))
        return 0.25 * episode.cut_turns

    rewards = RewardSum([WeightedReward("judge", 2.0, judge)])
    tree, found = play(Once(), EpisodeConfig(sampling=SAMPLING), rewards)
    assert {found.of(leaf) for leaf in leaves(tree, cut=True)} == {0.5}
    assert set(seen) == {(StopReason.MAX_TOKENS, 1, 0.0), (StopReason.COMPLETED, 0, 1.0)}


def test_a_question_that_is_cut_before_its_first_call_has_no_answer() -> None:
    question = Question(id="q", text="?", answers=("4",), answer_type="number")
    task = QaEnvironment(question, ToolRuntime([]))
    tree, rewards = play(task, EpisodeConfig(sampling=SAMPLING))
    assert {rewards.of(leaf) for leaf in leaves(tree, cut=True)} == {-1.0}
