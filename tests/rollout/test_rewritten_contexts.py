"""Rollouts whose earlier thoughts are dropped as the model's own template drops them: the tree branches there, what was
sampled is trained in the context in which it was sampled, and the rollout counts once."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("renderers", reason="needs the extra turntree[renderers]", exc_type=ImportError)

from family_tokenizers import with_tokens_of
from fault_drill import Corridor, Even
from packed_gradient import gradient, library_gradient
from tiny_models import tiny_model
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.protocols import GateDecision, GroupProgress, Observation
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.credit.config import CreditConfig
from turntree.decide.branching.rules import FixedBrancher
from turntree.engine.hf import HFEngine
from turntree.engine.scripted import ScriptedAnswer, ScriptedEngine
from turntree.logs.rollouts import group_from_tree
from turntree.logs.trees import KeptTree
from turntree.pack.packing import flat_batches, pack
from turntree.render.families import family
from turntree.render.probes import CALL, RESULT, SAY, TOOL
from turntree.render.thoughts import Thoughts
from turntree.report.browser import group_view
from turntree.report.rollout_tree import rollout_tree, tree_of
from turntree.rollout.accounting import account
from turntree.rollout.groups import GrownGroup
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.stages.config import RecordConfig
from turntree.stages.record import trace_of
from turntree.train.checkpoints import CheckpointConfig, Checkpoints
from turntree.train.config import LossConfig, OptimizerConfig
from turntree.train.loop import Hooks, Trainee, train
from turntree.train.online import OnlineConfig, OnlineGRPO, Parts

TOKENIZER = with_tokens_of("qwen3")
RENDERERS = {thoughts: family(TOKENIZER, "qwen3", thoughts=thoughts) for thoughts in ("keep", "model")}
RENDERER, TOOLS = RENDERERS["model"], (TOOL,)
EPISODES = EpisodeConfig(max_turns=6, sampling=Sampling(max_tokens=200))
TURNS = [
    replace(CALL, reasoning="Is there a map?"),
    replace(SAY, reasoning="Left or right?"),
    replace(SAY, content="Go right.", reasoning="Right."),
    replace(SAY, content="Straight on."),
]


class Walk(Corridor):
    """Answers a call with a result and all else with a question; the last word decides."""

    tools = TOOLS

    def step(self, action: Message) -> Observation:
        self.said.append(action.content)
        done = len(self.said) >= self.length
        told = Message("user", f"And now, {len(self.said)}?")
        if action.tool_calls:
            told = replace(RESULT, content=f"Map {len(self.said)}.", tool_call_id=action.tool_calls[0].id)
        return Observation((told,), done, action.content == SAY.content if done else None)

    def fork(self) -> Walk:
        twin = Walk(self.task_id, self.length)
        twin.said = list(self.said)
        return twin


TASKS = [Walk("t", 5), Walk("u", 4)]


@dataclass
class Asked:
    """A policy of four sentences, which writes down what it was asked and what it said."""

    thoughts: Thoughts = "model"
    calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def engine(self, **how: Any) -> ScriptedEngine:
        words = [RENDERER.completion(turn) for turn in TURNS]

        def answer(prompt: tuple[int, ...], seed: int) -> ScriptedAnswer:
            said = words[seed % len(words)]
            self.calls.append((prompt, said))
            return ScriptedAnswer(said, logprobs=tuple(-0.5 - (seed % 7 + i % 3) / 9 for i in range(len(said))))

        return ScriptedEngine(answer, RENDERER.stop_ids, vocab_size=len(TOKENIZER), **how)

    def groups(self, size: int = 5, gate: Any = None, **how: Any) -> list[GrownGroup]:
        config = SchedulerConfig(episodes=EPISODES, group_size=size, max_live_rollouts=how.pop("places", 64))
        scheduler = Scheduler(self.engine(**how), RENDERERS[self.thoughts], config, gate=gate)
        return list(scheduler.run(TASKS, seed=3))

    def scheduled(self, size: int = 5) -> list[tuple[RolloutTree, Rewards]]:
        return [(group.tree, group.rewards) for group in self.groups(size)]


def calls_of(tree: RolloutTree, end: int) -> list[tuple[tuple[int, ...], int, list[Message]]]:
    """The model calls of a rollout: the prompt, the completion's node, and the conversation before it."""
    said: list[Message] = []
    found: list[tuple[tuple[int, ...], int, list[Message]]] = []
    for node in map(tree.__getitem__, tree.nodes_of(end)):
        if node.sampled:
            above = tuple(token for each in tree.path(node.id)[:-1] for token in each.token_ids)
            found.append((above, node.id, list(said)))
        said += node.messages
    return found


def test_every_prompt_is_the_models_own_rendering_and_every_call_lies_in_the_tree() -> None:
    asked = Asked()
    trees = asked.scheduled()
    seen = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    for tree, _ in trees:
        for end in tree.ends():
            for prompt, node, before in calls_of(tree, end):
                assert prompt == RENDERER.whole(before, TOOLS) == RENDERER.prompt(before, TOOLS)
                seen[prompt, tree[node].token_ids] += 1
    assert seen == Counter(asked.calls)
    assert any(tree.parts() for tree, _ in trees)


def test_the_rollout_counts_once_and_its_branches_are_its_parts() -> None:
    trees = Asked().scheduled()
    for tree, rewards in trees:
        rewards.check(tree)
        assert len(tree.ends()) == len(rewards.scored()) == 5
        questions = 0
        for end in tree.ends():
            mine = [part for part, of in tree.parts().items() if of == end]
            turns = [tree[node].message for _, node, _ in calls_of(tree, end)]
            assert [tree.stop_reason(part) for part in mine] == [StopReason.CONTINUED] * len(mine)
            dropped = [t for t in turns if t and not t.tool_calls and (t.reasoning or "Straight" in t.content)]
            assert len(mine) == sum(turn is not turns[-1] for turn in dropped), "none after the last turn"
            questions += len(mine)
        forks = [d for d in tree.decisions if d.action == "fork"]
        assert len(forks) == questions and {(d.actor, d.reason) for d in forks} == {("renderer", "dropped_reasoning")}
        given = [tree[d.node] for d in forks]
        assert all(node.kind is NodeKind.OBSERVATION and not node.sampled for node in given)
        assert all(d.numbers["shared"] >= len(tree[0].token_ids) for d in forks), "what they share are shared nodes"


def test_logs_say_what_the_same_rollouts_say_with_their_thoughts_kept() -> None:
    for (tree, rewards), (kept, whole) in zip(Asked().scheduled(), Asked("keep").scheduled(), strict=True):
        assert tree.parts() and not kept.parts()
        one, other = (group_from_tree(*each, id="0") for each in ((tree, rewards), (kept, whole)))
        assert Counter(one.rollouts) == Counter(other.rollouts)


def test_the_same_seed_gives_the_same_trees_whatever_the_interleaving() -> None:
    def told(groups: list[GrownGroup]) -> list[Any]:
        return [json.dumps(bare(group.tree), sort_keys=True) for group in groups]

    calm = told(Asked().groups())
    slow = Asked().groups(latency=lambda request: 1 + request.seed % 5, max_batch_rows=3, places=4)
    assert told(slow) == calm


def bare(tree: RolloutTree) -> dict[str, Any]:
    """Without costs, which differ with the batches."""
    value = tree.to_json()
    return {**value, "nodes": [{k: v for k, v in n.items() if k not in ("cost", "timing")} for n in value["nodes"]]}


def test_the_trees_cost_what_the_same_calls_cost() -> None:
    for group in Asked().groups():
        sampled = sum(len(node.token_ids) for node in group.tree if node.sampled)
        assert group.tree.cost.decoded_tokens == sampled
        assert group.tree.cost.turns == sum(node.sampled for node in group.tree)


def test_a_tree_comes_back_from_disk_and_is_drawn_with_its_parts() -> None:
    (group, _) = Asked().groups()
    kept = KeptTree(id="1.0", iteration=1, tree=group.tree, rewards=group.rewards, credit=None, tools=TOOLS)
    again = KeptTree.from_json(json.loads(json.dumps(kept.to_json())))
    assert again.tree.parts() == group.tree.parts() and again.tree.decisions == group.tree.decisions
    assert [n.token_ids for n in again.tree] == [n.token_ids for n in group.tree]
    drawn = tree_of(kept, max_rollouts=99, max_turns=99)
    assert sum(leaf.part for leaf in drawn.leaves) == len(group.tree.parts()) > 0
    assert ">part of " in rollout_tree(kept).svg
    assert sum("part" in row for row in group_view(kept)["nodes"]) == len(group.tree.parts())


# what is trained


MODEL = tiny_model(vocab_size=len(TOKENIZER), hidden_size=16, layers=1, dtype=torch.float64)


def one_row_a_call(model: Any, tree: RolloutTree, rewards: Rewards, config: LossConfig) -> torch.Tensor:
    """Every call a row of its own in the context that it was sampled in, with the advantage of its rollout."""
    scored = rewards.scored()
    mean = sum(scored.values()) / len(scored)
    std = math.sqrt(sum((r - mean) ** 2 for r in scored.values()) / len(scored))
    total, tokens = torch.tensor(0.0, dtype=torch.float64), dict.fromkeys(scored, 0)
    sums = dict.fromkeys(scored, total)
    for end, reward in scored.items():
        advantage = (reward - mean) / (std + 1e-6)
        for prompt, number, _ in calls_of(tree, end):
            node = tree[number]
            row = torch.tensor([(*prompt, *node.token_ids)])
            scores = torch.log_softmax(model(input_ids=row).logits[0], -1)
            new = scores[torch.arange(len(prompt) - 1, row.shape[1] - 1), row[0, len(prompt) :]]
            ratio = torch.exp(new - torch.tensor(node.logprobs, dtype=torch.float64))
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            sums[end] = sums[end] + torch.min(ratio * advantage, clipped * advantage).sum()
            tokens[end] += len(node.token_ids)
    if config.normalizer == "rollouts":
        return -sum((sums[end] / tokens[end] for end in scored), total) / len(scored)
    return -sum(sums.values(), total) / sum(tokens.values())


@pytest.mark.parametrize("normalizer", ["tokens", "rollouts"])
def test_packed_equals_flattened_equals_one_row_a_call(normalizer: Any) -> None:
    model = copy.deepcopy(MODEL)
    config = LossConfig(normalizer=normalizer, kl_coefficient=0.0, clip_low=0.2, clip_high=0.28)
    (tree, rewards), *_ = [
        (tree, rewards) for tree, rewards in Asked().scheduled() if len(set(rewards.scored().values())) > 1
    ]
    assert tree.parts()
    expected = one_row_a_call(model, tree, rewards, config)
    expected.backward()
    wanted = gradient(model)
    credit = config.estimator(CreditConfig())(tree, rewards)
    for layout in (pack, flat_batches):
        total, got = library_gradient(model, None, layout([tree], [credit], max_tokens=8192), config)
        assert total == pytest.approx(float(expected.detach()), abs=1e-6)
        assert float((got - wanted).norm()) <= 1e-6 * float(wanted.norm())


# a real engine, training, resuming


def of_training(**more: Any) -> tuple[Parts, OnlineConfig]:
    model = tiny_model(vocab_size=len(TOKENIZER), hidden_size=32, layers=1, seed=1)
    tasks = [Even(f"task {number}", 3) for number in range(4)]
    run = Parts(Trainee(model, None, HFEngine(model, RENDERER.stop_ids), RENDERER), tasks, **more)
    episodes = EpisodeConfig(max_turns=4, sampling=Sampling(max_tokens=12), cut_turns="judge")
    rollouts = SchedulerConfig(episodes=episodes, group_size=4, max_live_rollouts=8)
    optimizer = OptimizerConfig(learning_rate=1e-3)
    settings = OnlineConfig(
        iterations=3, groups=2, rollouts=rollouts, optimizer=optimizer, loss=LossConfig(kl_coefficient=0)
    )
    return run, settings


def test_training_counts_rollouts_and_a_killed_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    calm, settings = of_training()
    calm_rows: list[Any] = []
    kept: list[GrownGroup] = []
    train(
        OnlineGRPO(calm, settings), Hooks(log=calm_rows.append, keep=lambda step, groups, credits: kept.extend(groups))
    )
    assert any(group.tree.parts() for group in kept)
    assert [sum(row["stops"].values()) for row in calm_rows if row["step"]] == [2 * 4] * 3, "a rollout is one ending"
    rows: list[Any] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every=1))

    def killed(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            raise KeyboardInterrupt
        rows.append(row)

    with pytest.raises(KeyboardInterrupt):
        train(OnlineGRPO(of_training()[0], settings), Hooks(log=killed, checkpoints=checkpoints))
    again = of_training()[0]
    train(OnlineGRPO(again, settings), Hooks(log=rows.append, checkpoints=checkpoints))
    assert [{**row, "timing": None} for row in rows] == [{**row, "timing": None} for row in calm_rows]
    for name, value in again.policy.model.state_dict().items():
        assert torch.equal(value, calm.policy.model.state_dict()[name])


def test_what_the_engine_says_of_a_turn_is_what_the_model_says_in_its_own_context() -> None:
    run, settings = of_training()
    for group in Scheduler(run.policy.engine, RENDERER, settings.rollouts).run(run.tasks[:2], seed=0):
        assert group.tree.parts()
        for rollout in group.tree.rollouts():
            path = torch.tensor([rollout.token_ids])
            with torch.no_grad():
                scores = torch.log_softmax(run.policy.model(input_ids=path).logits[0], -1)
            for t, logprob in enumerate(rollout.logprobs):
                if logprob is not None:
                    assert logprob == pytest.approx(float(scores[t - 1, path[0, t]]), abs=1e-4)


# gates and branchers


class CutAt:
    """Cuts every group at turn 3."""

    def decide(self, group: GroupProgress) -> GateDecision | None:
        reached = max(map(len, group.actions)) >= 3
        return GateDecision(cut=True, reason="enough", numbers={}, final=True) if reached else None


def test_a_group_that_a_gate_cuts_has_the_turns_up_to_the_cut_and_no_rewards() -> None:
    for group in Asked().groups(gate=CutAt(), latency=lambda request: 1 + request.seed % 4):
        assert group.cut == 3 and not group.rewards.scored() and len(group.tree.ends()) == 5
        for end in group.tree.ends():
            assert len(calls_of(group.tree, end)) == 3 and group.tree.stop_reason(end) is StopReason.GATED
        for part in group.tree.parts():
            assert group.tree.stop_reason(part) is StopReason.CONTINUED
    assert all(group.cut == 3 for group in Asked().groups(gate=CutAt()))


def test_a_brancher_is_refused_where_contexts_are_rewritten_and_works_where_thoughts_are_kept() -> None:
    config = SchedulerConfig(episodes=EPISODES, group_size=4)
    with pytest.raises(ConfigError, match="cannot fork rollouts whose earlier thoughts are dropped"):
        Scheduler(Asked().engine(), RENDERER, config, brancher=FixedBrancher(turns=(2,)))
    Scheduler(Asked().engine(), RENDERERS["keep"], config, brancher=FixedBrancher(turns=(2,)))


def test_a_comparison_that_reads_forks_is_refused() -> None:
    tree, rewards = Asked().scheduled()[0]
    rule = LossConfig(normalizer="constant", constant=10.0).estimator(
        CreditConfig(comparison="siblings", advantages="rloo")
    )
    with pytest.raises(ConfigError, match="branches that were not drawn"):
        rule(tree, rewards)


class Crashing(Walk):
    """Fails at its fourth turn."""

    def step(self, action: Message) -> Observation:
        if len(self.said) == 3:
            raise RuntimeError("lost")
        return super().step(action)

    def fork(self) -> Crashing:
        twin = Crashing(self.task_id, self.length)
        twin.said = list(self.said)
        return twin


def test_a_rollout_that_fails_in_a_rewritten_context_is_censored_once_with_all_of_its_branches() -> None:
    asked = Asked()
    config = SchedulerConfig(episodes=EPISODES, group_size=4, max_retries=0)
    (group,) = Scheduler(asked.engine(), RENDERER, config).run([Crashing("t", 6)], seed=3)
    tree = group.tree
    assert len(tree.ends()) == 4 and not group.rewards.scored() and tree.parts()
    assert {tree.stop_reason(end) for end in tree.ends()} == {StopReason.ENVIRONMENT_ERROR}
    assert Counter(calls_of(tree, end)[0][0] for end in tree.ends()) == {tree[0].token_ids: 4}
    assert sum(len(calls_of(tree, end)) for end in tree.ends()) == len(asked.calls) == 16


def test_a_recorded_trace_holds_the_whole_episode() -> None:
    """Also the turns that lie in contexts which the rollout left."""
    parts_seen = 0
    for kept, group in zip(Asked("keep").groups(), Asked().groups(), strict=True):
        ends = [one.tree.ends() for one in (kept, group)]
        for sample, (whole, end) in enumerate(zip(*ends, strict=True)):
            config = RecordConfig(environment=Part("household"))
            traces = [
                trace_of(one, sample, leaf, one.rewards.verdicts[leaf], config, "m")
                for one, leaf in ((kept, whole), (group, end))
            ]
            assert traces[0].messages == traces[1].messages
            parts_seen += group.tree.nodes_of(end) != tuple(node.id for node in group.tree.path(end))
    assert parts_seen


def test_a_rollout_begins_once_however_often_its_context_is_rewritten() -> None:
    for group in Asked().groups():
        assert len(group.tree.starts()) > len(group.tree.ends())
        assert account(group.tree).starts == len(group.tree.ends()) == 5
