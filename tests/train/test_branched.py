"""Learning from trees whose turns forked half-way: packed equals flat, and a killed run goes on exactly."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from random_trees import add_completion, ids, sampled_near, score
from test_online import Even, config, parts, weights, without_timing
from test_parity import in_pieces

from packed_gradient import gradient, library_gradient, relative_error
from rollout_view import rollout_of, rollouts_of
from tiny_models import tiny_model
from turntree.core.labels import Rewards
from turntree.core.protocols import Brancher
from turntree.core.tree import NodeKind, RolloutTree
from turntree.credit.comparisons import across_starts, rloo
from turntree.credit.credit import CreditRule
from turntree.credit.scored import path_weighted
from turntree.decide.branching.rules import EntropyBrancher, RandomBrancher
from turntree.pack.packing import PackingStats, flat_batches, pack
from turntree.rollout.scheduler import Scheduler
from turntree.train.checkpoints import CheckpointConfig, Checkpoints
from turntree.train.loop import train
from turntree.train.losses import LossConfig
from turntree.train.online import OnlineGRPO

VOCABULARY = 24
LOW, HIGH, BETA, CONSTANT = 0.2, 0.28, 0.05, 17.0
CONFIG = LossConfig(
    clip_low=LOW, clip_high=HIGH, kl="k2", kl_coefficient=BETA, normalizer="constant", constant=CONSTANT
)


def branched(draw: random.Random) -> RolloutTree:
    """Three starts of up to three turns; of the later turns, half fork after their first tokens, and siblings repeat
    each other now and then."""
    tree = RolloutTree("branched")
    prompt = tree.add(None, NodeKind.PROMPT, ids(draw, 2, 4)).id
    frontier = [(add_completion(tree, prompt, ids(draw, 1, 4)), 1) for _ in range(3)]
    while frontier:
        node, turn = frontier.pop(0)
        if turn == 3:
            continue
        seen = tree.add(node, NodeKind.OBSERVATION, ids(draw, 1, 3)).id
        if draw.random() < 0.5:
            frontier.append((add_completion(tree, seen, ids(draw, 1, 4)), turn + 1))
            continue
        shared = add_completion(tree, seen, ids(draw, 1, 3))
        rest = ids(draw, 1, 3)
        for said in (rest, draw.choice([rest, ids(draw, 1, 3)])):
            frontier.append((add_completion(tree, shared, said), turn + 1))
    return tree


Terms = list[tuple[int, float, float]]  # leaf, weight, advantage


def soft_terms(tree: RolloutTree, rewards: Rewards) -> Terms:
    scored = rewards.scored()
    mean = sum(scored.values()) / len(scored)
    std = math.sqrt(sum((r - mean) ** 2 for r in scored.values()) / len(scored))
    varies = max(scored.values()) > min(scored.values())
    return [(leaf, 1.0, (r - mean) / (std + 1e-6) if varies else 0.0) for leaf, r in scored.items()]


def path_terms(tree: RolloutTree, rewards: Rewards) -> Terms:
    """w = product of 1/children below the start; A = reward minus the mean value of the other starts."""
    scored = rewards.scored()
    start_of = {leaf: next(node.id for node in tree.path(leaf) if node.sampled) for leaf in scored}
    weight = {leaf: math.prod(1 / len(tree.children(n.id)) for n in tree.path(leaf)[1:-1]) for leaf in scored}
    value = {
        start: sum(weight[leaf] * r for leaf, r in scored.items() if start_of[leaf] == start) for start in tree.starts()
    }
    others = {start: [v for s, v in value.items() if s != start] for start in value}
    return [(leaf, weight[leaf], r - sum(others[start_of[leaf]]) / 2) for leaf, r in scored.items()]


def flat_loss(model: Any, reference: Any, trees: list[RolloutTree], terms: list[Terms]) -> torch.Tensor:
    """One stock call per rollout, nothing shared: sum of w (min(rho A, clip(rho) A) - beta rho gap^2 / 2)."""
    total = torch.tensor(0.0, dtype=torch.float64)
    for tree, weighted in zip(trees, terms, strict=True):
        for leaf, weight, advantage in weighted:
            rollout = rollout_of(tree, leaf)
            path = torch.tensor([rollout.token_ids])
            here = torch.tensor([t for t, sampled in enumerate(rollout.loss_mask) if sampled])
            old = torch.tensor([lp for lp in rollout.logprobs if lp is not None], dtype=torch.float64)
            new = torch.log_softmax(model(input_ids=path).logits[0], -1)[here - 1, path[0, here]]
            with torch.no_grad():
                anchor = torch.log_softmax(reference(input_ids=path).logits[0], -1)[here - 1, path[0, here]]
            ratio = torch.exp(new - old)
            gain = torch.min(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
            total = total - weight * (gain - BETA * ratio.detach() * (new - anchor) ** 2 / 2).sum()
    return total / CONSTANT


SOFT = CreditRule()
PATH = CreditRule(leaf_weights=path_weighted, comparison=across_starts, advantages=rloo)


@pytest.mark.parametrize("layout", [pack, in_pieces, flat_batches], ids=["packed", "cut", "flat"])
@pytest.mark.parametrize(("rule", "terms"), [(SOFT, soft_terms), (PATH, path_terms)], ids=["soft", "path weighted"])
def test_trees_with_split_turns_have_the_loss_and_gradient_of_their_rollouts_one_by_one(
    layout: Any, rule: CreditRule, terms: Any
) -> None:
    draw = random.Random(7)
    model, reference = (tiny_model("qwen3", VOCABULARY, hidden_size=32, seed=s, dtype=torch.float64) for s in (1, 2))
    trees = [sampled_near(model, branched(draw), draw, spread=0.2) for _ in range(3)]
    rewards = [score(draw, tree, censor=False) for tree in trees]
    assert sum(tree[n].sampled for tree in trees for n in tree.branch_points()) > 5
    credits = [rule(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]
    batches = layout(trees, credits, max_tokens=70)
    loss, found = library_gradient(model, reference, batches, CONFIG)
    model.zero_grad()
    expected = flat_loss(model, reference, trees, [terms(t, r) for t, r in zip(trees, rewards, strict=True)])
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert relative_error(found, gradient(model)) < 1e-5
    stats = sum((batch.stats for batch in batches), PackingStats())
    assert (stats.rho > 1.3) == (layout is pack) or layout is in_pieces


BRANCHERS = {
    "entropy": lambda: EntropyBrancher(vocabulary=384, probe_tokens=2),
    "random": lambda: RandomBrancher(rate=None, probe_tokens=2),
}


def branching_parts(brancher: Brancher) -> Any:
    return parts([Even(f"task {number}", 2 + number % 3) for number in range(6)], brancher=brancher)


def test_what_the_engine_says_of_split_turns_is_what_the_model_says_of_the_whole_path() -> None:
    """A branch is asked for with the tokens that it shares in its prompt, wherever their keys and values lie."""
    run = branching_parts(EntropyBrancher(vocabulary=384, probe_tokens=3, tau=0.0))
    rollouts = config(group_size=6, initial_rollouts=2).rollouts
    trees = [group.tree for group in Scheduler(
        run.policy.engine, run.policy.renderer, rollouts, brancher=run.brancher
    ).run(run.tasks[:3], seed=0)]  # fmt: skip
    assert sum(tree[fork].sampled for tree in trees for fork in tree.branch_points()) > 3
    for rollout in (rollout for tree in trees for rollout in rollouts_of(tree)):
        path = torch.tensor([rollout.token_ids])
        with torch.no_grad():
            scores = torch.log_softmax(run.policy.model(input_ids=path).logits[0], -1)
        for t, logprob in enumerate(rollout.logprobs):
            if logprob is not None:
                assert logprob == pytest.approx(float(scores[t - 1, path[0, t]]), abs=1e-4)


@pytest.mark.parametrize("rule", BRANCHERS)
def test_a_killed_run_with_a_paced_brancher_goes_on_to_the_same_weights_and_rows(rule: str, tmp_path: Path) -> None:
    settings = config(iterations=4, group_size=5, initial_rollouts=2, max_retries=2)
    calm, calm_rows = branching_parts(BRANCHERS[rule]()), []
    train(OnlineGRPO(calm, settings), log=calm_rows.append)
    assert all(row["branching"]["forks"] for row in calm_rows[1:])
    assert [row["branching"]["leaves"] for row in calm_rows] == [3 * 5] * 4

    rows: list[dict[str, Any]] = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(every=1))

    def killed(row: dict[str, Any]) -> None:
        if row["step"] == 3:
            raise KeyboardInterrupt
        rows.append(json.loads(json.dumps(row)))

    with pytest.raises(KeyboardInterrupt):
        train(OnlineGRPO(branching_parts(BRANCHERS[rule]()), settings), log=killed, checkpoints=checkpoints)
    again = branching_parts(BRANCHERS[rule]())
    train(OnlineGRPO(again, settings), log=rows.append, checkpoints=checkpoints)
    assert without_timing(json.loads(json.dumps(rows))) == without_timing(json.loads(json.dumps(calm_rows)))
    assert all(torch.equal(value, weights(calm)[name]) for name, value in weights(again).items())
