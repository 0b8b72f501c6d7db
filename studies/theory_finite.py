"""PivotRL's Proposition 3.1 and Theorems 3.2 and 3.3 on finite action spaces, and ARPO's theorem on macro-actions, for
`experiments.theory`.

Exactly: groups are enumerated and gradients solved for, and nothing is sampled but the instances. Where a statement
does not hold as it is used, the counterexample is computed beside the statement that does (docs/results/theory.md).

    A  actions of a state     G  rollouts of a group     N  the A^G groups that can be drawn
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turntree.credit.comparisons import grpo_advantages, mean_centred, rloo

Floats = NDArray[np.float64]

_GROUPS = range(2, 11)  # sizes whose 2^G groups are enumerated
_BETAS = (2.0, 1.0, 0.5, 0.2, 0.1)
_RATES = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
_SIZES = (4, 8, 16, 64)
_STARTS = (0.1, 0.5, 0.9)


def check_finite(seed: int, instances: int) -> dict[str, Any]:
    """Every statement, each on as many instances where it is checked on random ones."""
    draws = np.random.default_rng(seed)
    return {
        "proposition_3_1": proposition_3_1(draws, instances),
        "theorem_3_2": theorem_3_2(draws, instances),
        "group_update": group_update(draws),
        "theorem_3_3": theorem_3_3(draws, instances),
        "regularised_groups": regularised_groups(draws),
        "gradient_flow": gradient_flow(draws, instances),
        "macro_actions": macro_actions(draws, max(2, instances // 20)),
    }


# instances


def instance(draws: np.random.Generator, *, binary: bool) -> tuple[Floats, Floats, float]:
    """A reference (A,), rewards (A,) that are not all equal, and beta."""
    size = int(draws.integers(2, 11))
    reference = draws.dirichlet(np.full(size, draws.uniform(0.3, 3.0))) + 1e-6
    rewards = (draws.permutation(size) < draws.integers(1, size)).astype(float) if binary else draws.uniform(size=size)
    return reference / reference.sum(), rewards, float(math.exp(draws.uniform(math.log(0.2), math.log(5.0))))


def tilted(reference: Floats, rewards: Floats, beta: float) -> Floats:
    """The KL path of Theorem 3.2, pi_0 exp(r / beta) / Z."""
    weights = reference * np.exp((rewards - rewards.max()) / beta)
    return weights / weights.sum()


def deviation(policy: Floats, rewards: Floats) -> float:
    mean = policy @ rewards
    return math.sqrt(max(0.0, float(policy @ (rewards - mean) ** 2)))


def fisher_norm(policy: Floats, rewards: Floats) -> float:
    """Of the natural gradient of J at a softmax policy, solved in its logits: sqrt(g' F^+ g)."""
    gradient = policy * (rewards - policy @ rewards)
    fisher = np.diag(policy) - np.outer(policy, policy)
    return math.sqrt(float(gradient @ np.linalg.lstsq(fisher, gradient, rcond=None)[0]))


# Proposition 3.1


def proposition_3_1(draws: np.random.Generator, instances: int) -> dict[str, Any]:
    """Every group of binary rewards through the library's advantages: zeros where the rewards are equal and nowhere
    else. And what the proposition leaves out: with the KL term of Eq. 7, a group without variance does move the policy
    (the Fisher norm of that pull is beta times the deviation of log pi / pi_0)."""
    exceptions: dict[str, int] = {}
    for name, advantages in (("grpo", grpo_advantages), ("mean_centred", mean_centred), ("rloo", rloo)):
        exceptions[name] = sum(
            any(advantages(group)) == (len(set(group)) == 1)
            for size in _GROUPS
            for group in itertools.product((0.0, 1.0), repeat=size)
        )
    pulls: list[float] = []
    for _ in range(instances):
        reference, rewards, beta = instance(draws, binary=True)
        policy = tilted(reference, rewards, beta)
        pulls.append(deviation(policy, np.log(policy / reference)))
    return {
        "groups": sum(2**size for size in _GROUPS),
        "exceptions": exceptions,
        "kl_pull_over_beta": {"median": float(np.median(pulls)), "zero": int(np.sum(np.array(pulls) < 1e-12))},
    }


# ARPO's generalised policy gradient theorem


def macro_actions(draws: np.random.Generator, instances: int) -> dict[str, Any]:
    """grad J = E[sum_T grad log pi(MA_T | MS_T) A_T] where a sequence is cut into macro-actions MA_T, each after its
    macro-state MS_T, with A_T the return minus the value of MS_T. All sequences of a small softmax policy are
    enumerated, the left side is the complex step of J along a random direction. It holds where a cut depends on what
    was said before it, as a fork after a tool result does. Where cuts depend on what comes, it does not
    (`cut_by_the_end`): the baseline is then no baseline."""
    errors = {"by_history": 0.0, "every_token": 0.0, "whole": 0.0, "cut_by_the_end": 0.0}
    length, size = 4, 3
    prefixes = [p for n in range(length) for p in itertools.product(range(size), repeat=n)]
    sequences = list(itertools.product(range(size), repeat=length))
    for _ in range(instances):
        logits, way = ({p: draws.normal(size=size) for p in prefixes} for _ in range(2))
        returns = dict(zip(sequences, draws.uniform(size=len(sequences)), strict=True))
        stepped = {p: _log_softmax(logits[p] + 1e-30j * way[p]) for p in prefixes}  # log-probabilities and slopes
        chance = {y: math.exp(sum(stepped[y[:t]][y[t]].real for t in range(length))) for y in sequences}
        slope = sum(
            chance[y] * returns[y] * stepped[y[:t]][y[t]].imag / 1e-30 for y in sequences for t in range(length)
        )
        value = {p: _value(p, chance, returns) for p in prefixes}
        opens = {p: bool(draws.random() < 0.5) for p in prefixes}
        cuts = {
            "by_history": lambda y, opens=opens: [t for t in range(1, length) if opens[y[:t]]],
            "every_token": lambda y: [*range(1, length)],
            "whole": lambda y: [],
            "cut_by_the_end": lambda y: [1 + y[-1]],
        }
        for name, cut in cuts.items():
            total = 0.0
            for y in sequences:
                starts = [0, *cut(y)]
                for start, end in zip(starts, [*starts[1:], length], strict=True):
                    grad = sum(stepped[y[:t]][y[t]].imag for t in range(start, end)) / 1e-30
                    total += chance[y] * grad * (returns[y] - value[y[:start]])
            errors[name] = max(errors[name], abs(total - slope))
    return {"instances": instances, "largest_error": errors}


def _log_softmax(logits: NDArray[np.complex128]) -> NDArray[np.complex128]:
    return logits - np.log(np.exp(logits).sum())


def _value(prefix: tuple[int, ...], chance: dict[Any, float], returns: dict[Any, float]) -> float:
    """The expected return after a prefix."""
    below = [y for y in chance if y[: len(prefix)] == prefix]
    return sum(chance[y] * returns[y] for y in below) / sum(chance[y] for y in below)


# Theorem 3.2


def theorem_3_2(draws: np.random.Generator, instances: int) -> dict[str, Any]:
    """Eq. 10 on random instances: the score by a complex step of the path, the norm solved in logits, and sigma /
    beta^2. Then whether the variance under the *reference*, by which pivots are selected, orders the scores."""
    errors = {"score": 0.0, "norm": 0.0}
    for number in range(instances):
        reference, rewards, beta = instance(draws, binary=number % 2 == 0)
        policy = tilted(reference, rewards, beta)
        sigma = deviation(policy, rewards)
        moved = np.log(reference) + rewards / (beta + 1e-30j)
        slope = (moved - np.log(np.exp(moved - moved.real.max()).sum())).imag / 1e-30
        score = -float(policy @ ((rewards - policy @ rewards) / sigma * slope))
        errors["score"] = max(errors["score"], abs(score * beta**2 / sigma - 1))
        errors["norm"] = max(errors["norm"], abs(fisher_norm(policy, rewards) / sigma - 1))
    return {
        "instances": instances,
        "largest_relative_error": errors,
        "orders_inverted": {str(beta): _inverted(beta) for beta in _BETAS},
        "counterexample": {
            "beta": 0.5,
            "states": [
                {"start": rho, "variance_at_reference": rho * (1 - rho), "score": 4 * _spread(_moved(rho, 0.5))}
                for rho in (0.5, 0.1)
            ],
        },
    }


def _moved(rho: float | Floats, beta: float) -> Any:
    """q_beta of Theorem 3.3: the acceptable mass on the path."""
    return 1 / (1 + (1 - rho) / rho * math.exp(-1 / beta))


def _spread(p: float) -> float:
    return math.sqrt(p * (1 - p))


def _inverted(beta: float) -> float:
    """The share of pairs of binary states (starts on a grid) whose order by variance at the reference is not that by
    variance, and so by score, on the path."""
    grid = np.arange(1, 400) / 400
    before, after = (values * (1 - values) for values in (grid, _moved(grid, beta)))
    one, other = np.triu_indices(len(grid), 1)
    first, second = before[one] - before[other], after[one] - after[other]
    known = np.abs(first) > 1e-12
    return float((first[known] * second[known] < 0).mean())


# the update that a group gives


def expected_deviation(p: float, size: int) -> float:
    """E of the population deviation of G binary rewards with mean p."""
    ways = (math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(size + 1))
    return math.fsum(way * _spread(k / size) for k, way in enumerate(ways))


def slope_of_groups(p: float, size: int) -> float:
    """c, where the expected update of GRPO is c (r - p): the deviation of a group, on average, over p (1 - p). Tends to
    1 / sigma for large groups and is at most sqrt(G - 1) at the edges."""
    return expected_deviation(p, size) / (p * (1 - p))


def group_update(draws: np.random.Generator) -> dict[str, Any]:
    """The expected update of GRPO (Eq. 1) at a state is c (r - p) as a tangent vector. So its Fisher norm is
    E[deviation] / sigma, which is 1 for large groups *whatever the variance*, and the gain in success for a step along
    it is E[deviation]. Checked by enumerating all A^G groups through the library's advantages."""
    worst = 0.0
    for _ in range(20):
        policy, rewards = draws.dirichlet(np.ones(3)), np.array([1.0, 0.0, float(draws.integers(2))])
        p = float(policy @ rewards)
        if not 0 < p < 1:
            continue
        expected = slope_of_groups(p, 5) * (rewards - p)
        worst = max(worst, float(np.abs(_Groups(rewards, 5).update(policy) - expected).max()))
    return {
        "largest_error": worst,
        "table": [
            {
                "p": p,
                "sigma": _spread(p),
                "gain": {str(size): expected_deviation(p, size) for size in _SIZES},
                "norm": {str(size): expected_deviation(p, size) / _spread(p) for size in _SIZES},
                "no_variance": {str(size): p**size + (1 - p) ** size for size in _SIZES},
            }
            for p in _RATES
        ],
    }


class _Groups:
    """All groups of G that can be drawn at a state, with their advantages (eps 0)."""

    def __init__(self, rewards: Floats, size: int) -> None:
        self._drawn_NG = np.array(list(itertools.product(range(len(rewards)), repeat=size)))
        self._advantages_NG = np.array([grpo_advantages(list(rewards[group]), eps=0.0) for group in self._drawn_NG])

    def update(self, policy: Floats) -> Floats:
        """E[(1/G) sum_i A_i 1(a_i = a)] / pi(a), [A]: the expected update as a tangent vector."""
        chance_N = policy[self._drawn_NG].prod(axis=1)
        mass = [
            float(chance_N @ (self._advantages_NG * (self._drawn_NG == a)).mean(axis=1)) for a in range(len(policy))
        ]
        return np.array(mass) / policy


# Theorem 3.3


def theorem_3_3(draws: np.random.Generator, instances: int) -> dict[str, Any]:
    """With the closed form pi* of the theorem, L(p) - L(pi*) = beta KL(p | pi*) for every p: so pi* is the minimiser,
    and the only one. Checked at random p, with Eqs. 12 to 14."""
    identity, mass, ratios, fell = 0.0, 0.0, 0.0, 0
    for _ in range(instances):
        reference, rewards, beta = instance(draws, binary=True)
        best, rho = tilted(reference, rewards, beta), float(reference @ rewards)
        other = draws.dirichlet(np.ones(len(reference))) + 1e-9
        other /= other.sum()
        gap = _objective(other, reference, rewards, beta) - _objective(best, reference, rewards, beta)
        identity = max(identity, abs(gap - beta * _kl(other, best)) / max(1.0, abs(gap)))
        q = float(best @ rewards)
        mass = max(mass, abs(q - _moved(rho, beta)))
        fell += q <= rho
        for block in (rewards > 0, rewards == 0):
            scale = (best / reference)[block]
            ratios = max(ratios, float(np.ptp(scale) / scale.mean()))
    return {
        "instances": instances,
        "largest_error": {"objective_gap": identity, "mass": mass, "ratios_in_blocks": ratios},
        "mass_did_not_rise": fell,
    }


def _kl(first: Floats, second: Floats) -> float:
    return float(first @ np.log(first / second))


def _objective(policy: Floats, reference: Floats, rewards: Floats, beta: float) -> float:
    """Eq. 11 at one state."""
    return float(-(policy @ rewards) + beta * _kl(policy, reference))


def regularised_groups(draws: np.random.Generator) -> dict[str, Any]:
    """Eq. 7 divides by the group's deviation and Eq. 11 does not. What Eq. 7 converges to keeps the ratios within both
    sets too, but its acceptable mass solves logit q = logit rho + c(q) / beta with c of `slope_of_groups`: further from
    the reference than q_beta, and in the limit of large groups without any rest below 1 where beta is small."""
    worst = {"mass": 0.0, "ratios_in_blocks": 0.0}
    for rho, beta in itertools.product((0.2, 0.5), (1.0, 2.0)):
        inside, outside = draws.dirichlet(np.ones(2)) * rho, draws.dirichlet(np.ones(2)) * (1 - rho)
        reference, rewards = np.concatenate([inside, outside]), np.array([1.0, 1.0, 0.0, 0.0])
        policy, groups = reference.copy(), _Groups(rewards, 5)
        for _ in range(400):
            policy = policy * np.exp(0.2 * (groups.update(policy) - beta * np.log(policy / reference)))
            policy /= policy.sum()
        found = resting_mass(rho, beta, 5)
        assert found is not None  # c is bounded for finite groups
        worst["mass"] = max(worst["mass"], abs(float(policy @ rewards) - found))
        for block in (rewards > 0, rewards == 0):
            scale = (policy / reference)[block]
            worst["ratios_in_blocks"] = max(worst["ratios_in_blocks"], float(np.ptp(scale) / scale.mean()))
    table = [
        {
            "start": rho,
            "beta": beta,
            "theorem": float(_moved(rho, beta)),
            **{str(size): resting_mass(rho, beta, size) for size in (8, 16)},
            "large": resting_mass(rho, beta, None),
        }
        for beta in (2.0, 1.0, 0.5)
        for rho in _STARTS
    ]
    return {"largest_error": worst, "table": table}


def resting_mass(rho: float, beta: float, size: int | None) -> float | None:
    """The acceptable mass at which GRPO with a KL term first comes to rest above rho (`size` None: large groups); None
    where nothing stops it below 1 - 1e-9."""
    logits = np.linspace(math.log(rho / (1 - rho)), math.log(1e9), 501)
    start = logits[0]

    def push(logit: float) -> float:
        p = 1 / (1 + math.exp(-logit))
        rest = 1 / (1 + math.exp(logit))
        slope = 1 / math.sqrt(p * rest) if size is None else slope_of_groups(p, size)
        return slope - beta * (logit - start)

    for low, high in itertools.pairwise(logits):
        if push(float(high)) <= 0:
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if push(float(middle)) > 0 else (low, middle)
            return float(1 / (1 + math.exp(-low)))
    return None


def gradient_flow(draws: np.random.Generator, instances: int) -> dict[str, Any]:
    """Theorem 3.3 is about where the objective is least. A policy gradient that is stopped earlier gets there on
    another path: in logits it moves likely actions more. Softmax policies climb E[r] by small steps until their
    acceptable mass is q_beta (beta 1): how far the distribution *within* each set has moved (total variation; the
    theorem says 0), and in how many instances its entropy fell."""
    count, size = min(instances, 500), 8
    reference = draws.dirichlet(np.ones(size), size=count) + 1e-6
    reference /= reference.sum(axis=1, keepdims=True)
    rewards = (
        np.argsort(draws.uniform(size=(count, size)), axis=1) < draws.integers(2, size - 1, size=(count, 1))
    ) * 1.0
    target = _moved((reference * rewards).sum(axis=1), 1.0)
    logits, policy = np.log(reference), reference
    for _ in range(20_000):
        policy = np.exp(logits - logits.max(axis=1, keepdims=True))
        policy /= policy.sum(axis=1, keepdims=True)
        mass = (policy * rewards).sum(axis=1)
        if (mass >= target).all():
            break
        gradient = policy * (rewards - mass[:, None])
        step = 0.02 / np.abs(gradient).max(axis=1, keepdims=True)
        logits += np.where((mass < target)[:, None], step * gradient, 0.0)
    found: dict[str, Any] = {"instances": count}
    for name, inside in (("accepted", rewards > 0), ("refused", rewards == 0)):
        before, after = (np.where(inside, each, 0.0) for each in (reference, policy))
        before, after = (each / each.sum(axis=1, keepdims=True) for each in (before, after))
        moved = 0.5 * np.abs(before - after).sum(axis=1)
        sharper = _entropy(after) < _entropy(before)
        found[name] = {"moved": float(moved.mean()), "most": float(moved.max()), "sharper": float(sharper.mean())}
    return found


def _entropy(policies: Floats) -> Floats:
    return -(policies * np.log(np.where(policies > 0, policies, 1.0))).sum(axis=1)


# in words


def lines(result: dict[str, Any]) -> Iterable[str]:
    first, second, third = (result[name] for name in ("proposition_3_1", "theorem_3_2", "theorem_3_3"))
    yield (
        f"Proposition 3.1: {sum(first['exceptions'].values())} exceptions in {first['groups']:,} groups; with a KL "
        f"term, groups without variance pull at the policy in all but {first['kl_pull_over_beta']['zero']} instances"
    )
    errors = second["largest_relative_error"]
    yield (
        f"Theorem 3.2: holds on {second['instances']:,} instances to {max(errors.values()):.0e}; variance at the "
        f"reference orders {second['orders_inverted']['0.5']:.0%} of the pairs the wrong way round at beta 0.5"
    )
    row = next(row for row in result["group_update"]["table"] if row["p"] == 0.1)
    yield (
        f"a group's expected update has the Fisher norm {row['norm']['8']:.2f} at p = 0.1 and G = 8, and 1 in the "
        f"limit, where sigma is {row['sigma']:.2f}; its gain is {row['gain']['8']:.2f}"
    )
    yield (
        f"Theorem 3.3: holds on {third['instances']:,} instances to {max(third['largest_error'].values()):.0e}; "
        "Eq. 7, which divides by the deviation, rests elsewhere:"
    )
    for row in result["regularised_groups"]["table"]:
        large = "1 (no rest)" if row["large"] is None else f"{row['large']:.3f}"
        yield (
            f"  from {row['start']:.1f} at beta {row['beta']:.1f}: q_beta {row['theorem']:.3f}, groups of 8 "
            f"{row['8']:.3f}, large groups {large}"
        )
    flow = result["gradient_flow"]
    yield (
        f"on the way there by policy gradient, {flow['accepted']['moved']:.1%} of the accepted and "
        f"{flow['refused']['moved']:.1%} of the refused mass moves within its set"
    )
