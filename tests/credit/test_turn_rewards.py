"""Rewards of turns against the true gradient of a toy whose every group is enumerated: episodes of one to three turns,
two starts, a fork after the first answer of those that go on."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from turntree.core.labels import Rewards
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.comparisons import across_starts
from turntree.credit.credit import CreditRule
from turntree.credit.scored import path_weighted, unit_weights

P = {(): 0.4, (0,): 0.7, (0, 0): 0.3, (0, 1): 0.6}  # the probability of a one, by the bits so far
GAIN = {(1,): 0.2, (0,): -0.1, (0, 0): 0.5, (0, 1): -0.4, (0, 0, 0): 1.0, (0, 0, 1): -0.5, (0, 1, 0): 0.3}
STATES = {state: index for index, state in enumerate(P)}
EPISODES = [(1,), *((0, b, c) for b, c in itertools.product((0, 1), repeat=2))]
RULE = CreditRule(leaf_weights=path_weighted, comparison=across_starts, turn_rewards={"gain": 1.0})
EXACT = 1e-12


def chance(bits, since: int = 0) -> float:
    steps = range(since, len(bits))
    return math.prod(P[bits[:t]] if bits[t] else 1 - P[bits[:t]] for t in steps)


def grown(forks: bool):
    """Every pair of starts, each a tuple of episodes that share their first bit, with its probability."""
    starts = [((one,), chance(one)) for one in EPISODES]
    if forks:
        long = [bits for bits in EPISODES if len(bits) > 1]
        pairs = itertools.product(long, repeat=2)
        starts = [(((1,),), P[()])]
        starts += [((a, b), (1 - P[()]) * chance(a, 1) * chance(b, 1)) for a, b in pairs]
    for (first, p), (second, q) in itertools.product(starts, repeat=2):
        yield p * q, (first, second)


def planted(group):
    """The tree of a group, with d log(probability) of every sampled node; all episodes end with reward 0."""
    tree, toward = RolloutTree("toy"), {}
    root = tree.add(None, NodeKind.PROMPT, (9,)).id
    for episodes in group:
        at = {}
        for number, bits in enumerate(episodes):
            leaf = root
            for t in range(len(bits)):
                place = (bits[:1] if t == 0 else (number, *bits[: t + 1]), t)
                if place in at:
                    leaf = at[place]
                    continue
                node = tree.add(leaf, NodeKind.COMPLETION, (bits[t],), logprobs=(0.0,))
                toward[node.id] = np.zeros(len(P))
                toward[node.id][STATES[bits[:t]]] = bits[t] - P[bits[:t]]
                told = {"gain": GAIN.get(bits[: t + 1], 0.0)}
                leaf = at[place] = tree.add(node.id, NodeKind.OBSERVATION, (8,), metrics=told).id
            tree.stop(leaf, StopReason.COMPLETED)
    return tree, toward


def expected(rule: CreditRule, forks: bool) -> np.ndarray:
    """The expected gradient of a start."""
    total = np.zeros(len(P))
    for p, group in grown(forks):
        tree, toward = planted(group)
        rewards = Rewards({leaf: Verdict(0.0, "fails") for leaf in tree.ends()})
        credit = rule(tree, rewards).nodes
        total += p * sum((one.positive + one.negative) * toward[node] for node, one in credit.items()) / len(group)
    return total


def truth(discount: float = 1.0) -> np.ndarray:
    """The gradient of E[sum of gains]; with a discount, the sum over turns of what each turn's own return moves."""
    total = np.zeros(len(P))
    for bits in EPISODES:
        for t in range(len(bits)):
            ahead = sum(discount ** (k - t) * GAIN.get(bits[: k + 1], 0.0) for k in range(t, len(bits)))
            total[STATES[bits[:t]]] += chance(bits) * (bits[t] - P[bits[:t]]) * ahead
    return total


def test_the_toy_is_what_it_says() -> None:
    for forks in (False, True):
        assert sum(p for p, _ in grown(forks)) == pytest.approx(1.0)

    def value(logits: np.ndarray) -> float:
        p = dict(zip(P, 1 / (1 + np.exp(-logits)), strict=True))
        total = 0.0
        for bits in EPISODES:
            likely = math.prod(p[bits[:t]] if bits[t] else 1 - p[bits[:t]] for t in range(len(bits)))
            total += likely * sum(GAIN.get(bits[: t + 1], 0.0) for t in range(len(bits)))
        return total

    logits = np.log([p / (1 - p) for p in P.values()])
    step = 1e-6 * np.eye(len(logits))
    slopes = [(value(logits + e) - value(logits - e)) / 2e-6 for e in step]
    assert truth() == pytest.approx(np.array(slopes), abs=1e-8) and np.linalg.norm(slopes) > 0.1


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
def test_the_gradient_is_exact_under_forks_and_unequal_lengths(forks, discount) -> None:
    """Where all episodes fail: the whole gradient is that of the turns."""
    rule = CreditRule(**{**vars(RULE), "turn_discount": discount})
    assert expected(rule, forks) == pytest.approx(truth(discount), abs=EXACT)


def bias(found: np.ndarray) -> float:
    """The part of a gradient across the true one, whatever its length."""
    right = truth()
    return float(np.linalg.norm(found - float(found @ right / (right @ right)) * right) / np.linalg.norm(found))


def test_a_start_that_counts_once_for_each_of_its_branches_is_a_bias() -> None:
    assert bias(expected(CreditRule(**{**vars(RULE), "leaf_weights": unit_weights}), True)) > 0.02


def test_the_mean_over_all_turns_of_a_group_is_a_bias() -> None:
    """The usual baseline, without any fork: long episodes are in it more often than short ones."""

    def minus_the_mean(tree: RolloutTree, toward) -> np.ndarray:
        ahead = {n: sum(step.metrics.get("gain", 0.0) for step in below(tree, n)) for n in toward}
        mean = sum(ahead.values()) / len(ahead)
        return sum((ahead[n] - mean) * toward[n] for n in toward) / 2

    def below(tree: RolloutTree, node: int):
        leaf = next(leaf for leaf in tree.leaves() if node in tree.nodes_of(leaf))
        return [step for step in tree.path(leaf) if step.id > node]

    assert bias(sum(p * minus_the_mean(*planted(group)) for p, group in grown(forks=False))) > 0.1


def test_progress_counts_by_what_it_gained_and_other_metrics_as_they_are() -> None:
    """Two rollouts of two turns: the first turn answers for all that follows, the second for its own."""
    tree, said = RolloutTree("toy"), {0: ({"progress": 0.2}, {"progress": 0.5, "wrong": 1.0}), 1: ({}, {})}
    root = tree.add(None, NodeKind.PROMPT, (9,)).id
    turns: dict[int, list[int]] = {}
    for number, answers in said.items():
        leaf = root
        for metrics in answers:
            node = tree.add(leaf, NodeKind.COMPLETION, (1,), logprobs=(0.0,))
            turns.setdefault(number, []).append(node.id)
            leaf = tree.add(node.id, NodeKind.OBSERVATION, (8,), metrics=metrics).id
        tree.stop(leaf, StopReason.MAX_TURNS)
    rewards = Rewards({leaf: Verdict(0.0, "fails") for leaf in tree.ends()})
    nodes = CreditRule(turn_rewards={"progress": 10.0, "wrong": -1.0}, turn_discount=0.5)(tree, rewards).nodes
    credit = {node: one.positive + one.negative for node, one in nodes.items()}
    assert [credit[node] for node in turns[0]] == pytest.approx([2.0 + 0.5 * 2.0, 2.0])
    assert [credit[node] for node in turns[1]] == pytest.approx([-3.0, -2.0])


def test_the_baseline_of_a_turn_is_over_initial_starts_and_a_refill_is_compared_with_all_of_them() -> None:
    tree = RolloutTree("toy")
    root = tree.add(None, NodeKind.PROMPT, (9,)).id
    turns = []
    for gain in (1.0, 3.0, 8.0):
        turns.append(tree.add(root, NodeKind.COMPLETION, (1,), logprobs=(0.0,)).id)
        leaf = tree.add(turns[-1], NodeKind.OBSERVATION, (8,), metrics={"gain": gain}).id
        tree.stop(leaf, StopReason.MAX_TURNS)
    tree.mark_refill(turns[2])
    rewards = Rewards({leaf: Verdict(0.0, "fails") for leaf in tree.ends()})
    nodes = CreditRule(turn_rewards={"gain": 1.0})(tree, rewards).nodes
    credit = [nodes[turn].positive + nodes[turn].negative for turn in turns]
    assert credit == pytest.approx([1.0 - 3.0, 3.0 - 1.0, 8.0 - 2.0])
