"""Growing trees: what the engine saw is what the tree holds, failures censor, and draws depend on keys only."""

from dataclasses import replace

import pytest

from rollout_view import rollout_of
from scripted_engine import ScriptedEngine
from tiny_models import tiny_tokenizer
from turntree.core.completion import Sampling
from turntree.core.cost import NO_COST
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import Observation, TurnState, TurnVerifier
from turntree.core.tree import NodeKind, StopReason
from turntree.core.verdict import Verdict
from turntree.render.template import ChatRenderer
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.local import local_request, render, sample_local, score_wave
from turntree.rollout.players import Setting, grow

TOKENIZER = tiny_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
SAMPLING = Sampling(max_tokens=16)


def say(text: str) -> tuple[int, ...]:
    return RENDERER.completion(Message("assistant", text))


def scripted(answer) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, seed: say(answer(prompt, seed)), RENDERER.stop_ids, vocab_size=len(TOKENIZER))


class Counter:
    """Done when told "stop"; breaks when told "break"."""

    tools = ()

    def __init__(self, task_id="count"):
        self.task_id, self.said = task_id, []

    def reset(self):
        return (Message("user", "count"),)

    def step(self, action):
        if action.content == "break":
            raise RuntimeError("worker died")
        self.said.append(action.content)
        return Observation((Message("user", f"{len(self.said)}"),), action.content == "stop", success=True)

    def fork(self):
        other = Counter(self.task_id)
        other.said = list(self.said)
        return other


def test_the_tokens_of_a_path_are_what_the_engine_saw():
    seen = []

    def answer(prompt, seed):
        seen.append(prompt)
        return "stop" if len(seen) == 3 else "on"

    ((tree, rewards),) = grow([Counter()], scripted(answer), RENDERER, EpisodeConfig(sampling=SAMPLING), seed=0)
    (leaf,) = tree.leaves()
    rollout = rollout_of(tree, leaf)
    for prompt in seen:
        assert rollout.token_ids[: len(prompt)] == prompt
    assert rollout.turns == 3
    assert rewards.of(leaf) == 1.0
    conversation = [Message("user", "count")]
    for said, told in (("on", "1"), ("on", "2"), ("stop", "3")):
        conversation += [Message("assistant", said), Message("user", told)]
    assert rollout.token_ids == RENDERER.prompt(conversation)
    assert sum(rollout.loss_mask) == sum(len(say(text)) for text in ("on", "on", "stop"))


def test_limits_are_outcomes_and_failures_are_not():
    environments = [Counter(name) for name in ("endless", "broken", "fine")]
    said = iter(["on", "break", "stop"])  # the three share a prompt; a wave asks in order

    def answer(prompt, seed):
        return next(said, "on")

    config = EpisodeConfig(max_turns=2, sampling=SAMPLING)
    grown = grow(environments, scripted(answer), RENDERER, config, seed=0)
    endings = {tree.task_id: (tree.stop_reason(tree.leaves()[0]), r.of(tree.leaves()[0])) for tree, r in grown}
    assert endings == {
        "endless": (StopReason.MAX_TURNS, 0.0),
        "broken": (StopReason.ENVIRONMENT_ERROR, None),
        "fine": (StopReason.COMPLETED, 1.0),
    }


def test_too_little_context_ends_a_rollout_by_name():
    config = EpisodeConfig(max_context=40, sampling=SAMPLING)
    ((tree, rewards),) = grow([Counter()], scripted(lambda p, s: "on"), RENDERER, config, seed=0)
    (leaf,) = tree.leaves()
    assert tree.stop_reason(leaf) is StopReason.MAX_TOKENS
    assert rewards.of(leaf) == 0.0


@pytest.mark.parametrize("bound", ["engine", "config"])
def test_a_task_that_leaves_no_room_is_censored_whoever_bounds_the_context(bound):
    small = len(RENDERER.prompt(Counter().reset())) + SAMPLING.max_tokens - 1
    engine, config = scripted(lambda p, s: pytest.fail("was asked")), EpisodeConfig(sampling=SAMPLING)
    if bound == "engine":
        engine = ScriptedEngine(lambda p, s: (), RENDERER.stop_ids, vocab_size=len(TOKENIZER), max_context=small)
    else:
        config = EpisodeConfig(max_context=small, sampling=SAMPLING)
    ((tree, rewards),) = grow([Counter()], engine, RENDERER, config, group_size=2, seed=0)
    (leaf,) = tree.leaves()
    assert (tree.stop_reason(leaf), rewards.of(leaf), tree.cost.turns) == (StopReason.NO_ROOM, None, 0)
    assert f"in {small} tokens" in rewards.verdicts[leaf].reason


def test_every_rollout_is_told_of_once_when_its_task_ends():
    told = []
    engine = scripted(lambda prompt, seed: "stop" if seed % 3 == 0 else "on")
    config = EpisodeConfig(max_turns=3, sampling=SAMPLING)
    tasks, setting = [Counter("a"), Counter("b")], Setting(finished=told.append)
    grow(tasks, engine, RENDERER, config, group_size=4, seed=1, setting=setting)
    assert told == [4, 4], "task by task"


def test_a_step_of_the_environment_is_charged_where_it_was_answered():
    ((tree, _),) = grow(
        [Counter()], scripted(lambda p, s: "on"), RENDERER, EpisodeConfig(max_turns=3, sampling=SAMPLING), seed=0
    )
    heard = [node.cost for node in tree if node.kind is NodeKind.OBSERVATION]
    assert [cost.tool_calls for cost in heard] == [1, 1, 1]
    assert all(0 < cost.environment_seconds < 60 for cost in heard)


def test_a_failure_of_the_environment_keeps_what_it_said():
    ((tree, rewards),) = grow(
        [Counter()], scripted(lambda p, s: "break"), RENDERER, EpisodeConfig(sampling=SAMPLING), seed=0
    )
    assert rewards.verdicts[tree.leaves()[0]].reason == "RuntimeError: worker died"


def test_tools_that_a_template_would_leave_out_are_refused_and_never_left_out():
    class Armed(Counter):
        tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)

    with pytest.raises(InputError, match="leaves out the tools"):
        grow([Armed()], scripted(lambda p, s: "stop"), RENDERER, EpisodeConfig(sampling=SAMPLING), seed=0)


def test_siblings_get_draws_of_their_own_and_neighbours_do_not_matter():
    def answer(prompt, seed):
        return "stop" if seed % 3 == 0 else "on"

    config = EpisodeConfig(max_turns=4, sampling=SAMPLING)
    alone = grow([Counter("b")], scripted(answer), RENDERER, config, group_size=6, seed=1)[0][0]
    together = grow([Counter("a"), Counter("b")], scripted(answer), RENDERER, config, group_size=6, seed=1)[1][0]

    def paths(tree):
        return sorted(rollout_of(tree, leaf).token_ids for leaf in tree.leaves())

    assert paths(alone) == paths(together)
    assert len(set(paths(alone))) > 1
    assert len(alone.leaves()) == 6


STATE = TurnState("t", 0, (Message("user", "go"),), Message("assistant", "left"))


class OnlyLeft(TurnVerifier):
    name = "only-left/1"

    def __init__(self):
        self.judged = 0

    def judge(self, state, action):
        self.judged += 1
        if action.content == "unsure":
            return Verdict(None, "no verdict")
        return Verdict(1.0 if action.content == "left" else 0.0, "rule")


def test_equal_actions_stay_separate_nodes_and_are_judged_once():
    verifier = OnlyLeft()
    item = render(STATE, RENDERER)
    (tree,) = sample_local([item], scripted(lambda p, s: "left" if s % 2 else "right"), RENDERER, SAMPLING, 8, seed=0)
    (rewards,) = score_wave([(tree, STATE)], verifier)
    assert len(tree) == 9
    assert len(tree.leaves()) == 8
    assert verifier.judged == 2
    assert set(rewards.scored().values()) == {0.0, 1.0}


def test_an_action_that_could_not_be_judged_has_no_reward():
    item = render(STATE, RENDERER)
    (tree,) = sample_local([item], scripted(lambda p, s: "unsure"), RENDERER, SAMPLING, 3, seed=0)
    assert score_wave([(tree, STATE)], OnlyLeft())[0].scored() == {}


def test_a_state_that_occurs_twice_in_a_wave_is_sampled_twice():
    item = render(STATE, RENDERER)
    seeds = []

    def answer(prompt, seed):
        seeds.append(seed)
        return "left"

    trees = sample_local([item, item], scripted(answer), RENDERER, SAMPLING, 4, seed=0)
    assert len(set(seeds)) == 8
    places = [{"occurrence": n, "sample": s} for n in range(2) for s in range(4)]
    assert seeds == [local_request(item, SAMPLING, seed=0, **place).seed for place in places], "as a profile draws them"
    for tree in trees:
        assert (tree.task_id, tree[tree.roots[0]].messages) == (STATE.id, STATE.history)


def test_a_state_is_rendered_with_its_tools_or_refused():
    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    with pytest.raises(InputError, match="leaves out the tools"):
        render(replace(STATE, tools=tools), RENDERER)


def test_the_ledger_charges_a_shared_prompt_once():
    item = render(STATE, RENDERER)
    (tree,) = sample_local([item], scripted(lambda p, s: "left"), RENDERER, SAMPLING, 4, seed=0)
    assert tree.cost.prefilled_tokens == len(item.prompt_ids)
    assert tree.cost.reused_tokens == 3 * len(item.prompt_ids)
    assert tree.cost.turns == 4
    assert tree.cost == sum((node.cost for node in tree), NO_COST)
    assert [node.kind for node in tree].count(NodeKind.COMPLETION) == 4
