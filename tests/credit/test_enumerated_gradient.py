"""Estimators against the true policy gradient of a toy whose every tree is enumerated (recipes/credit_table.py)."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from turntree.core.labels import Rewards
from turntree.core.verdict import Verdict
from turntree.credit.comparisons import across_siblings, across_starts, grpo_advantages, mean_centred, rloo
from turntree.credit.config import GIGPO
from turntree.credit.credit import CreditRule, hard_dedup
from turntree.credit.scored import path_weighted

PATH = Path(__file__).resolve().parents[2] / "recipes" / "credit_table.py"
EXACT = 1e-12


@pytest.fixture(scope="module")
def toy():
    spec = importlib.util.spec_from_file_location("credit_table", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["credit_table"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def measured(toy, branching: str, rule: CreditRule, starts: int = 2):
    grow = toy.branchings()[branching]
    (found,), _ = toy.estimate([toy.Estimator("", rule)], toy.groups(grow, starts), starts)
    return found


HISTORY_ONLY = ["no forks", "random, after the tool result", "random, after the probe", "entropy, after the probe"]


def test_the_toy_is_what_it_says(toy) -> None:
    """Probabilities of all groups add up; the gradient is that of the expected reward, by finite differences."""
    for grow in toy.branchings().values():
        assert sum(group.probability for group in toy.groups(grow, 2)) == pytest.approx(1.0)

    def expected_reward(logits: np.ndarray) -> float:
        p = dict(zip(toy.P, 1 / (1 + np.exp(-logits)), strict=True))
        total = 0.0
        for bits in itertools.product((0, 1), repeat=3):
            chances = [p[bits[:t]] if bits[t] else 1 - p[bits[:t]] for t in range(3)]
            total += float(np.prod(chances)) * (bits in toy.WINS)
        return total

    logits = np.log([p / (1 - p) for p in toy.P.values()])
    step = 1e-6 * np.eye(len(logits))
    slopes = [(expected_reward(logits + e) - expected_reward(logits - e)) / 2e-6 for e in step]
    assert toy.true_gradient() == pytest.approx(np.array(slopes), abs=1e-8)
    assert np.linalg.norm(slopes) > 0.1


@pytest.mark.parametrize("branching", HISTORY_ONLY)
@pytest.mark.parametrize("comparison", [across_starts, across_siblings])
def test_path_weights_with_rloo_are_unbiased_where_forks_are_decided_from_history(toy, branching, comparison) -> None:
    rule = CreditRule(leaf_weights=path_weighted, comparison=comparison, advantages=rloo)
    for starts in (2,) if branching.startswith("random") else (2, 3):
        found = measured(toy, branching, rule, starts)
        assert found.scale == pytest.approx(1.0, abs=EXACT) and found.bias < EXACT


@pytest.mark.parametrize("branching", HISTORY_ONLY)
def test_centring_by_the_mean_of_the_starts_only_shortens_the_gradient(toy, branching) -> None:
    rule = CreditRule(leaf_weights=path_weighted, comparison=across_starts, advantages=mean_centred)
    found = measured(toy, branching, rule)
    assert found.scale == pytest.approx(1 / 2, abs=EXACT) and found.bias < EXACT


def test_a_fork_decided_on_tokens_that_its_children_do_not_share_biases_path_weights(toy) -> None:
    rule = CreditRule(leaf_weights=path_weighted, comparison=across_starts, advantages=rloo)
    assert measured(toy, "entropy, at the probe", rule).bias > 0.1


@pytest.mark.parametrize(
    "rule",
    [
        CreditRule(advantages=rloo),
        CreditRule(advantages=rloo, attribution=hard_dedup),
        GIGPO,
        CreditRule(advantages=rloo, leaf_weights=path_weighted),  # baseline of all leaves: the configuration refuses it
    ],
    ids=["soft", "hard_dedup", "anchors", "path_weighted with the leaves as baseline"],
)
def test_other_estimators_are_biased_on_branched_groups(toy, rule) -> None:
    assert measured(toy, "random, after the tool result", rule).bias > 0.02


def test_leaving_the_own_start_out_is_what_makes_rloo_exact_on_flat_groups_and_grpo_is_not(toy) -> None:
    assert measured(toy, "no forks", CreditRule(advantages=rloo), 3).scale == pytest.approx(1.0, abs=EXACT)
    grpo = measured(toy, "no forks", CreditRule(advantages=grpo_advantages), 3)
    assert abs(grpo.scale - 1.0) > 0.1


PROMPTS = ["no forks", "entropy, after the probe"]  # one whose rollouts never fork, one whose do


def expected(toy, branching: str, rule: CreditRule, starts: int, leaves: int) -> np.ndarray:
    """The expected gradient of a prompt's tree, a sum over its nodes: what the loss divides by a constant."""
    grown = toy.groups(toy.branchings()[branching], starts, leaves)
    return sum(group.probability * gradient(toy, rule, group.tree, group.rewards) for group in grown)


@pytest.mark.parametrize("comparison", [across_starts, across_siblings])
@pytest.mark.parametrize("branching", PROMPTS)
def test_every_prompt_takes_the_same_step_for_each_unit_of_its_gradient(toy, branching, comparison) -> None:
    """Two initial starts, refilled to four leaves: the prompt that never forks has four starts, the other one fewer.
    The step of both is two true gradients: of the initial starts, whose number is no outcome."""
    rule = CreditRule(leaf_weights=path_weighted, comparison=comparison, advantages=rloo)
    assert expected(toy, branching, rule, 2, 4) == pytest.approx(2 * toy.true_gradient(), abs=EXACT)
    group = next(iter(toy.groups(toy.never, 2, 4)))
    credit = rule(group.tree, group.rewards)
    assert credit.uncounted == 2 and credit.rollouts == 2.0
    assert not group.tree.refills() & set(credit.nodes)


def test_neither_counting_refills_nor_dividing_by_all_starts_is_a_way_out(toy) -> None:
    """Counted, refills lengthen the step of the prompt that never forks most (4 against 3.4 true gradients); divided by
    the starts that there are, the forking prompt is tilted by a tenth, since forking depends on what was sampled."""
    truth, rule = toy.true_gradient(), CreditRule(comparison=across_starts, advantages=rloo)

    def steps(weights) -> list[np.ndarray]:
        counted = dataclasses.replace(rule, leaf_weights=weights)
        return [expected(toy, branching, counted, 2, 4) for branching in PROMPTS]

    counted = steps(toy.refills_weigh_one)
    assert counted[0] == pytest.approx(4.0 * truth) and counted[1] == pytest.approx(3.4 * truth)
    flat, forking = steps(toy.divided_by_starts)
    assert flat == pytest.approx(2.0 * truth)
    across = forking - float(forking @ truth / (truth @ truth)) * truth
    assert np.linalg.norm(across) > 0.09 * np.linalg.norm(forking)


def test_refills_are_no_baseline(toy) -> None:
    """Not marked as refills, they would enter the baseline of the starts whose outcomes called for them."""
    rule = CreditRule(leaf_weights=path_weighted, comparison=across_starts, advantages=rloo)
    tilted, starts = np.zeros(len(toy.P)), 0.0
    for group in toy.groups(toy.branchings()["entropy, after the probe"], 2, 3):
        tree = type(group.tree).from_json(group.tree.to_json() | {"decisions": []})
        tilted += group.probability * gradient(toy, rule, tree, group.rewards)
        starts += group.probability * len(tree.starts())
    assert np.linalg.norm(tilted - starts * toy.true_gradient()) > 1e-3


def gradient(toy, rule: CreditRule, tree, rewards: Rewards) -> np.ndarray:
    toward = toy.scores(tree)
    return sum((c.positive + c.negative) * toward[n] for n, c in rule(tree, rewards).nodes.items())


def test_values_of_forks_on_the_probe_and_of_refills_by_enumeration(toy) -> None:
    assert toy.probe_value() == pytest.approx(0.375)  # true: 0.5
    values = toy.refill_values()
    assert values["path weights of the initial start"] == pytest.approx(0.875)  # true
    assert values["self-normalised path weights, refills at 1"] == pytest.approx(0.987, abs=5e-4)
    assert values["mean over leaves"] > 1.0


def test_censoring_that_looks_at_nothing_leaves_path_weights_unbiased(toy) -> None:
    """Of half of all forks one branch is lost, either one alike; its sibling takes over its weight."""
    rule = CreditRule(leaf_weights=path_weighted, comparison=across_starts, advantages=rloo)
    grow = toy.branchings()["entropy, after the probe"]
    total, moved = np.zeros(len(toy.P)), 0.0
    for group in toy.groups(grow, 2):
        losses = [[(0.5, None), *((0.25, n) for n in group.tree.children(f))] for f in group.tree.branch_points()]
        for lost in itertools.product(*losses):
            tree, rewards = censored(group, {leaf for _, leaf in lost if leaf is not None})
            chance = group.probability * float(np.prod([p for p, _ in lost]))
            total += chance * gradient(toy, rule, tree, rewards) / 2
            moved += chance * rule(tree, rewards).redistributed
    forks = 2 * sum(p for p, start in toy.outcomes(grow) if len(start.answers) > 1)
    assert total == pytest.approx(toy.true_gradient(), abs=EXACT)
    assert moved == pytest.approx(forks / 4)  # half of the forks, half of a start each


def censored(group, gone: set[int]):
    value = group.tree.to_json()
    for leaf in gone:
        value["stops"][str(leaf)] = "environment_error"
    verdicts = {leaf: Verdict(None, "broken") if leaf in gone else v for leaf, v in group.rewards.verdicts.items()}
    return type(group.tree).from_json(value), Rewards(verdicts)
