"""What every estimator estimates: bias and variance of the policy gradient, by enumeration.

An agent makes one tool call and answers with two tokens; its policy has seven parameters, one for each state, so the
true gradient is a sum over eight episodes. Every tree that a group of rollouts can become under a branching rule is
built with its probability, labelled by the library's own estimators, and its on-policy gradient is averaged. No
sampling anywhere: the figures are exact.

    python recipes/credit_table.py            # the tables of docs/design/credit.md, about four minutes
    python recipes/credit_table.py --starts 2
    python recipes/credit_table.py --oracle   # forks at the highest and at the lowest variance, about a minute
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from turntree.core.labels import Rewards
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.comparisons import (
    AcrossAnchors,
    Advantages,
    across_siblings,
    across_starts,
    mean_centred,
    rloo,
)
from turntree.credit.credit import CreditRule, hard, hard_dedup
from turntree.credit.scored import LeafWeighting, ScoredTree, path_weighted

# The toy: states are the tokens sampled so far, tokens are bits; P[state] is the probability of a one.
P = {(): 0.4, (0,): 0.5, (1,): 0.7, (0, 0): 0.9, (0, 1): 0.45, (1, 0): 0.15, (1, 1): 0.55}
STATES = {state: index for index, state in enumerate(P)}
WINS = {(0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 1, 1)}  # episodes with reward 1

Draw = Callable[[float], bool]  # True with the given probability
T = TypeVar("T")


class Script:
    """Bits as scripted, then ones; keeps what else could have been drawn, and the probability of it all."""

    def __init__(self, fixed: Sequence[bool] = ()) -> None:
        self.drawn: list[bool] = []
        self.fixed = fixed
        self.probability = 1.0
        self.alternatives: list[list[bool]] = []

    def __call__(self, p: float) -> bool:
        new = len(self.drawn) == len(self.fixed)
        bit = True if new else self.fixed[len(self.drawn)]
        if new:
            self.alternatives.append([*self.drawn, False])
            self.fixed = [*self.fixed, True]
        self.drawn.append(bit)
        self.probability *= p if bit else 1 - p
        return bit


def outcomes(program: Callable[[Draw], T]) -> Iterator[tuple[float, T]]:
    """Every run of a program that draws bits, with its probability."""
    pending: list[list[bool]] = [[]]
    while pending:
        script = Script(pending.pop())
        result = program(script)
        pending += script.alternatives
        yield script.probability, result


# One start and its forks


@dataclass(frozen=True, order=True)
class Start:
    """A tool call, whether the children of a fork share the probed token, and the answers, one per leaf."""

    call: int
    shared_probe: bool
    answers: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return 1 + 2 * len(self.answers) - (self.shared_probe and len(self.answers) > 1)


Branching = Callable[[Draw], Start]


def answer(draw: Draw, call: int) -> tuple[int, int]:
    probe = int(draw(P[call,]))
    return probe, int(draw(P[call, probe]))


def entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def torn(call: int, probe: int) -> bool:
    """Whether the two tokens after the tool result are more uncertain on average than the call itself was."""
    return (entropy(P[call,]) + entropy(P[call, probe])) / 2 > entropy(P[()])


def never(draw: Draw) -> Start:
    call = int(draw(P[()]))
    return Start(call, False, (answer(draw, call),))


def at_random(rate: float) -> Branching:
    """After the tool result, by a coin."""

    def grow(draw: Draw) -> Start:
        call = int(draw(P[()]))
        answers = tuple(sorted(answer(draw, call) for _ in range(1 + draw(rate))))
        return Start(call, False, answers)

    return grow


def after_the_probe(fork: Callable[[Draw, int, int], bool]) -> Branching:
    """The children share the probed token on which the decision rests."""

    def grow(draw: Draw) -> Start:
        call = int(draw(P[()]))
        probe = int(draw(P[call,]))
        ends = sorted(int(draw(P[call, probe])) for _ in range(1 + fork(draw, call, probe)))
        return Start(call, True, tuple((probe, end) for end in ends))

    return grow


def at_the_probe(draw: Draw) -> Start:
    """The incumbent's probed token decides, and the new sibling draws its own."""
    call = int(draw(P[()]))
    incumbent = answer(draw, call)
    if not torn(call, incumbent[0]):
        return Start(call, False, (incumbent,))
    return Start(call, False, tuple(sorted((incumbent, answer(draw, call)))))


def branchings() -> dict[str, Branching]:
    """Random forks at the rate of the entropy rule, so that each rule pays for about as many leaves."""
    rate = sum(p for p, start in outcomes(at_the_probe) if len(start.answers) > 1)
    return {
        "no forks": never,
        "random, after the tool result": at_random(rate),
        "random, after the probe": after_the_probe(lambda draw, call, probe: draw(rate)),
        "entropy, after the probe": after_the_probe(lambda draw, call, probe: torn(call, probe)),
        "entropy, at the probe": at_the_probe,
    }


def by_variance(*, highest: bool) -> Branching:
    """As often as the entropy rule, after the prefixes whose children differ most (or least) in reward: an oracle."""
    left = sum(p for p, start in outcomes(at_the_probe) if len(start.answers) > 1)
    prefixes = [(P[call, probe] * (1 - P[call, probe]), call, probe) for call in (0, 1) for probe in (0, 1)]
    chances: dict[tuple[int, int], float] = {}
    for _, call, probe in sorted(prefixes, reverse=highest):
        mass = (P[()] if call else 1 - P[()]) * (P[call,] if probe else 1 - P[call,])
        chances[call, probe] = min(1.0, left / mass)
        left = max(0.0, left - mass)
    return after_the_probe(lambda draw, call, probe: draw(chances[call, probe]))


def oracles() -> dict[str, Branching]:
    """What knowing the variance between children is worth (docs/results/ladder.md)."""
    rules = branchings()
    asked = {name: rules[name] for name in ("random, after the probe", "entropy, after the probe")}
    ends = {"highest variance, after the probe": True, "lowest variance, after the probe": False}
    return asked | {name: by_variance(highest=highest) for name, highest in ends.items()}


def plans(starts: int) -> dict[str, tuple[Branching, int]]:
    """Each column of the table: a rule, and up to how many leaves its groups are refilled."""
    plain: dict[str, tuple[Branching, int]] = {name: (rule, 0) for name, rule in branchings().items()}
    refilled = ("no forks", "entropy, after the probe")
    return plain | {f"{name}, refilled": (plain[name][0], starts + 1) for name in refilled}


# Groups of starts, as trees


@dataclass(frozen=True)
class Group:
    """One tree that can come about, its probability, its rewards and the tokens that it cost."""

    probability: float
    tree: RolloutTree
    rewards: Rewards
    tokens: int


def groups(branching: Branching, starts: int, leaves: int = 0) -> Iterator[Group]:
    """Every group of independent starts, with refills where they have fewer than `leaves` leaves."""
    for chance, chosen in draws(branching, starts):
        for refill_chance, refills in draws(never, max(0, leaves - sum(len(start.answers) for start in chosen))):
            tokens = sum(start.tokens for start in (*chosen, *refills))
            yield Group(chance * refill_chance, *as_tree(chosen, refills), tokens)


def draws(branching: Branching, count: int) -> Iterator[tuple[float, tuple[Start, ...]]]:
    """`count` independent starts with their probability; their order does not matter, so equal ones come once."""
    chances: dict[Start, float] = {}
    for probability, start in outcomes(branching):
        chances[start] = chances.get(start, 0.0) + probability
    for chosen in itertools.combinations_with_replacement(sorted(chances), count):
        orders = math.factorial(count) / math.prod(math.factorial(n) for n in Counter(chosen).values())
        yield orders * math.prod(chances[start] for start in chosen), chosen


def as_tree(chosen: Sequence[Start], refills: Sequence[Start] = ()) -> tuple[RolloutTree, Rewards]:
    tree = RolloutTree("toy")
    prompt = tree.add(None, NodeKind.PROMPT, (9,)).id
    verdicts: dict[int, Verdict] = {}
    for number, start in enumerate((*chosen, *refills)):
        called = sampled(tree, prompt, start.call)
        if number >= len(chosen):
            tree.mark_refill(called)
        fork = tree.add(called, NodeKind.OBSERVATION, (7, start.call)).id
        ends = start.answers
        if start.shared_probe and len(ends) > 1:
            fork = sampled(tree, fork, ends[0][0])
        for end in ends:
            leaf = sampled(tree, fork, *(end[1:] if tree[fork].sampled else end))
            tree.stop(leaf, StopReason.COMPLETED)
            verdicts[leaf] = Verdict(float((start.call, *end) in WINS), "toy")
    return tree, Rewards(verdicts)


def sampled(tree: RolloutTree, parent: int, *bits: int) -> int:
    return tree.add(parent, NodeKind.COMPLETION, bits, logprobs=(0.0,) * len(bits)).id


# Gradients


def true_gradient() -> np.ndarray:
    """sum over episodes of pi(episode) R d log pi(episode)."""
    total = np.zeros(len(P))
    for probability, start in outcomes(never):
        bits = (start.call, *start.answers[0])
        total += probability * (bits in WINS) * score((), bits)
    return total


def score(before: tuple[int, ...], bits: tuple[int, ...]) -> np.ndarray:
    """d log pi(bits | before) by the logit of each state."""
    found = np.zeros(len(P))
    for bit in bits:
        found[STATES[before]] = bit - P[before]
        before = (*before, bit)
    return found


def scores(tree: RolloutTree) -> dict[int, np.ndarray]:
    """d log pi of every sampled node."""
    before: dict[int | None, tuple[int, ...]] = {None: ()}
    found: dict[int, np.ndarray] = {}
    for node in tree:
        if node.sampled:
            found[node.id] = score(before[node.parent], node.token_ids)
        before[node.id] = before[node.parent] + (node.token_ids if node.sampled else ())
    return found


@dataclass(frozen=True)
class Estimate:
    """`scale`: how long the mean estimate is along the true gradient. `bias`: what points elsewhere, and `variance`:
    the trace of the covariance, both as a share of the (squared) part along the true gradient."""

    scale: float
    bias: float
    variance: float


@dataclass(frozen=True)
class Estimator:
    name: str
    rule: CreditRule
    by_tokens: bool = False  # divide by realised trained tokens instead of a constant


def refills_weigh_one(tree: RolloutTree, leaves: Sequence[int]) -> LeafWeighting:
    """Path weights that count refills like initial starts (not offered)."""
    forks = set(tree.branch_points())
    paths = [[len(tree.children(node.id)) for node in tree.path(leaf) if node.id in forks] for leaf in leaves]
    return LeafWeighting(tuple(math.prod(1 / children for children in path) for path in paths))


def within_and_across_trees(scored: ScoredTree, advantages: Advantages) -> dict[int, list[float]]:
    """Tree-GRPO: the advantage among the leaves of the same start plus that among all leaves (in the paper z-scores).

    Among two leaves of a start a z-score is always +-1, however close they are.
    """
    found = advantages(scored.rewards)
    for start in scored.tree.starts():
        inside = scored.below.get(start, ())
        for i, a in zip(inside, advantages([scored.rewards[i] for i in inside]), strict=True):
            found[i] += a
    return scored.at_trained(found)


def divided_by_starts(tree: RolloutTree, leaves: Sequence[int]) -> LeafWeighting:
    """The same, with weights that add up to the number of initial starts (not offered)."""
    share = 1 - len(tree.refills()) / len(tree.starts())
    return LeafWeighting(tuple(share * weight for weight in refills_weigh_one(tree, leaves).weights))


def estimators() -> list[Estimator]:
    def made(name: str, by_tokens: bool = False, **credit: Any) -> Estimator:
        return Estimator(name, CreditRule(**credit), by_tokens)

    starts: dict[str, Any] = {"leaf_weights": path_weighted, "comparison": across_starts}
    siblings: dict[str, Any] = {"leaf_weights": path_weighted, "comparison": across_siblings}
    unbiased = CreditRule(advantages=rloo, comparison=across_starts)
    return [
        made("soft, GRPO"),
        made("soft, mean-centred (Dr. GRPO)", advantages=mean_centred),
        made("soft, mean-centred, Z = tokens", by_tokens=True, advantages=mean_centred),
        made("soft, RLOO", advantages=rloo),
        made("hard, RLOO", advantages=rloo, attribution=hard),
        made("hard_dedup, RLOO", advantages=rloo, attribution=hard_dedup),
        made("hard_dedup, RLOO, Z = tokens", by_tokens=True, advantages=rloo, attribution=hard_dedup),
        made("trees, GRPO (Tree-GRPO)", comparison=within_and_across_trees),
        made("anchors, GRPO (GiGPO)", comparison=AcrossAnchors()),
        made("anchors, mean-centred (GiGPO)", comparison=AcrossAnchors(), advantages=mean_centred),
        Estimator("path_weighted, leaves, RLOO (refused)", CreditRule(advantages=rloo, leaf_weights=path_weighted)),
        made("path_weighted, starts, GRPO", **starts),
        made("path_weighted, starts, mean-centred", advantages=mean_centred, **starts),
        made("path_weighted, starts, RLOO", advantages=rloo, **starts),
        made("path_weighted, siblings, mean-centred", advantages=mean_centred, **siblings),
        made("path_weighted, siblings, RLOO", advantages=rloo, **siblings),
        Estimator("refills weigh 1, starts, RLOO (not offered)", replace(unbiased, leaf_weights=refills_weigh_one)),
        Estimator("the same over all starts (not offered)", replace(unbiased, leaf_weights=divided_by_starts)),
    ]


def estimate(chosen: Sequence[Estimator], all_groups: Iterator[Group], starts: int) -> tuple[list[Estimate], float]:
    """Moments of each estimator's on-policy gradient, sum over nodes of (P + N) d log pi / Z, and expected tokens."""
    mean, square, tokens = np.zeros((len(chosen), len(P))), np.zeros(len(chosen)), 0.0
    for group in all_groups:
        tokens += group.probability * group.tokens
        toward = scores(group.tree)
        for k, estimator in enumerate(chosen):
            credit = estimator.rule(group.tree, group.rewards)
            normalizer = credit.rollout_tokens / 3 if estimator.by_tokens else starts  # an episode has three tokens
            found = np.zeros(len(P))
            for node, c in credit.nodes.items():
                found += (c.positive + c.negative) * toward[node] / normalizer
            mean[k] += group.probability * found
            square[k] += group.probability * float(found @ found)
    return [_moments(m, float(s)) for m, s in zip(mean, square, strict=True)], tokens


def _moments(mean: np.ndarray, square: float) -> Estimate:
    truth = true_gradient()
    scale = float(mean @ truth / (truth @ truth))
    along = scale * float(np.linalg.norm(truth))
    bias = float(np.linalg.norm(mean - scale * truth) / along)
    return Estimate(scale, bias, (square - float(mean @ mean)) / along**2)


# Refills: three calls at most, each with probability one half; how many are made?


def refilled(draw: Draw, starts: int = 1, leaves: int = 4, fork: float = 0.5) -> tuple[RolloutTree, Rewards]:
    """`starts` chains that may fork after each call, then refills from the prompt until there are `leaves` leaves."""
    tree = RolloutTree("refill")
    prompt = tree.add(None, NodeKind.PROMPT, (9,)).id
    verdicts: dict[int, Verdict] = {}
    planned = 0
    while planned < leaves:
        first = planned == 0
        active = [(prompt, 0)] * (starts if first else leaves - planned)
        planned += len(active)
        while active:
            called: list[tuple[int, int]] = []
            for parent, calls in active:
                again = calls < 3 and draw(0.5)
                node = sampled(tree, parent, int(again))
                if parent == prompt and not first:
                    tree.mark_refill(node)
                if again:
                    called.append((tree.add(node, NodeKind.OBSERVATION, (7,)).id, calls + 1))
                else:
                    tree.stop(node, StopReason.COMPLETED)
                    verdicts[node] = Verdict(float(calls), "calls made")
            active = list(called)
            for branch in called:
                if planned < leaves and draw(fork):
                    active.append(branch)
                    planned += 1
    return tree, Rewards(verdicts)


def refill_values() -> dict[str, float]:
    """Three estimates of the calls per episode (true: 1/2 + 1/4 + 1/8)."""
    leaves = normalised = initial = 0.0
    for probability, (tree, rewards) in outcomes(refilled):
        calls = rewards.scored()
        weighed = dict(zip(calls, refills_weigh_one(tree, list(calls)).weights, strict=True))
        first = [leaf for leaf in calls if tree.starts()[0] in (node.id for node in tree.path(leaf))]
        leaves += probability * sum(calls.values()) / len(calls)
        normalised += probability * sum(w * calls[leaf] for leaf, w in weighed.items()) / sum(weighed.values())
        initial += probability * sum(weighed[leaf] * calls[leaf] for leaf in first)  # they weigh one together
    return {
        "mean over leaves": leaves,
        "self-normalised path weights, refills at 1": normalised,
        "path weights of the initial start": initial,
    }


def probe_value() -> float:
    """A fair coin, forked whenever the incumbent shows a one: the path-weighted mean of what is 1/2 in truth."""

    def program(draw: Draw) -> float:
        tree = RolloutTree("coin")
        start = sampled(tree, tree.add(None, NodeKind.PROMPT, (9,)).id, 0)
        bits = [draw(0.5)]
        bits += [draw(0.5)] if bits[0] else []
        leaves = [sampled(tree, start, int(bit)) for bit in bits]
        return sum(w * bit for w, bit in zip(path_weighted(tree, leaves).weights, bits, strict=True))

    return sum(probability * value for probability, value in outcomes(program))


def main() -> None:
    parser = argparse.ArgumentParser(description="Bias and variance of every estimator, by enumeration.")
    parser.add_argument("--starts", type=int, default=3, help="initial starts of a group")
    parser.add_argument("--oracle", action="store_true", help="only what knowing the variance of a fork is worth")
    arguments = parser.parse_args()
    starts = arguments.starts
    print(f"{starts} starts; true gradient of norm {np.linalg.norm(true_gradient()):.3f}\n")
    flat = 3.0 * starts
    asked = {name: (rule, 0) for name, rule in oracles().items()} if arguments.oracle else plans(starts)
    for name, (branching, leaves) in asked.items():
        found, tokens = estimate(estimators(), groups(branching, starts, leaves), starts)
        print(f"**{name}**: {tokens / flat:.2f} times the tokens of a flat group\n")
        print("| estimator | scale | bias | variance | variance x tokens |\n|---|---|---|---|---|")
        for estimator, e in zip(estimators(), found, strict=True):
            cells = f"{e.scale:.3f} | {e.bias:.3f} | {e.variance:.2f} | {e.variance * tokens / flat:.2f}"
            print(f"| {estimator.name} | {cells} |")
        print()
    if arguments.oracle:
        return
    print("| calls per episode, 1 start refilled to 4 leaves | expectation (true: 0.875) |\n|---|---|")
    for name, value in refill_values().items():
        print(f"| {name} | {value:.3f} |")
    print(f"\nA fair coin that forks when the incumbent shows a one: {probe_value():.3f} instead of 0.5")


if __name__ == "__main__":
    main()
