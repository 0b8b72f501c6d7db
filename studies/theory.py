"""`python studies/run.py theory`: are the published statements about groups and their gradients true?

`theory_finite` checks PivotRL's Proposition 3.1 and Theorems 3.2 and 3.3 on finite action spaces, exactly. Here the
same is asked of a trained policy, with Selective Rollout's dilution and the variance of the gradient under allocations.
The gradient of every action's log-probability is computed once. What a theory predicts about groups then follows from
probabilities, rewards and inner products of these *scores*, and is held against gradients that the library's own
credit, packing and loss give, and against what a step does to the policy.

    A  actions of a state     R  actions of all mixed states     P  parameters
    D  drawn groups     G  rollouts of a group
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import theory_finite
from configs import TheoryConfig, household_pivots
from numpy.typing import NDArray
from ranks import spearman
from theory_finite import slope_of_groups
from theory_spaces import (
    Floats,
    Group,
    Space,
    Vector,
    chances_now,
    gradient_of,
    inner_products,
    moved,
    scores_of,
    spaces_of,
)

from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.core.outcome import is_zero_variance
from turntree.core.protocols import TurnVerifier
from turntree.credit.comparisons import Advantages, grpo_advantages, rloo
from turntree.credit.config import Normalizer
from turntree.experiments.config import COMMAND
from turntree.rollout.local import sample_local, score_wave
from turntree.run.files import write_json
from turntree.stages.policy import Policy, load_policy
from turntree.stages.verifier import open_verifier
from turntree.train.config import LossConfig
from turntree.train.loop import Trainee, train
from turntree.train.lora import Reference, frozen_reference
from turntree.train.pivot import Pivot, PivotRL

SCHEMA = "turntree.theory/1"
_GAIN = 0.01  # that a step is to bring, on average over states
_PAPER = ((0.40, 0.28), (0.40625, 0.3661))  # zero-variance shares of both arms: as printed; over the same denominator
_NORMALIZERS: dict[Normalizer, float | None] = {"tokens": None, "rollouts": None, "constant": 500.0}


def run_theory(config: TheoryConfig, out: Path) -> dict[str, Any]:
    """Check everything and write `out` (JSON). Raises `InputError` where the policy has too few mixed states."""
    result = {
        "schema": SCHEMA,
        "config": to_mapping(config),
        "finite": theory_finite.check_finite(config.seed, config.instances),
        "policy": measure_policy(config),
    }
    write_json(out, result)
    return result


def measure_policy(config: TheoryConfig) -> dict[str, Any]:
    """Raises `InputError` where too few mixed states are found, or where rewards are not 0 or 1."""
    policy = load_policy(config.model, replace(config.device, prefixes="shared"))
    generator = np.random.default_rng(config.seed)
    with open_verifier(config.verifier) as verifier:
        spaces = spaces_of(policy, verifier, config)
        mixed = [space for space in spaces if space.mixed]
        sure = [space for space in spaces if not space.mixed][: max(1, config.mixed // 2)]
        if len(mixed) < 2 * config.mixed or not sure:
            problem = f"{len(mixed)} of {len(spaces)} states are mixed, and {2 * config.mixed} are needed"
            raise InputError(problem, field="candidates", hint="raise it, or lower mixed")
        studied, others = mixed[: config.mixed], mixed[config.mixed : 2 * config.mixed]
        for space in studied:
            space.scores_AP = scores_of(policy, space)
        found = {
            "states": _described(spaces, studied, sure),
            "signal": _signal(policy, studied, config.group_size),
            "dilution": _dilution(policy, studied, sure, generator, config),
            "allocation": allocation(studied, sure, generator, config),
        }
        return found | _trained(policy, verifier, studied, others, config)


def _described(spaces: Sequence[Space], studied: Sequence[Space], sure: Sequence[Space]) -> dict[str, Any]:
    return {
        "sampled": len(spaces),
        "mixed": sum(space.mixed for space in spaces),
        "studied": len(studied),
        "without_variance": len(sure),
        "actions": sum(len(space.chances) for space in studied),
        "covered": float(np.mean([space.covered for space in studied])),
    }


# Theorem 3.2


def _signal(policy: Policy, studied: Sequence[Space], size: int) -> dict[str, Any]:
    """By state: the deviation, the Fisher norm of the gradient within the policy's own parameters, its Euclidean norm
    (which a trainer steps along), the norm of the expected update of GRPO, and the gain in success of a step of fixed
    length, predicted and measured. And whether deviation orders them."""
    gradients = [_ascent(space) for space in studied]
    norms = np.array([float(np.linalg.norm(each.astype(float))) for each in gradients])
    length = _GAIN / float(norms.mean())
    rows: list[dict[str, float]] = []
    for space, gradient, norm in zip(studied, gradients, norms, strict=True):
        with moved(policy, gradient * np.float32(length / norm)):
            gain = float(chances_now(policy, space) @ space.rewards) - space.mean
        rows.append(
            {
                "mean": space.mean,
                "sigma": math.sqrt(space.variance),
                "fisher_norm": _fisher_norm(space),
                "norm": float(norm),
                "grpo_norm": slope_of_groups(space.mean, size) * float(norm),
                "gain_predicted": length * float(norm),
                "gain_measured": gain,
            }
        )
    sigma = [row["sigma"] for row in rows]
    other = inner_products(np.stack([g / np.float32(n) for g, n in zip(gradients, norms, strict=True)]))
    return {
        "rows": rows,
        "largest_fisher_error": max(abs(row["fisher_norm"] / row["sigma"] - 1) for row in rows),
        "largest_gain_error": max(abs(row["gain_measured"] / row["gain_predicted"] - 1) for row in rows),
        "rank_with_sigma": {
            name: spearman(sigma, [r[name] for r in rows]) for name in ("norm", "grpo_norm", "gain_measured")
        },
        "norm_over_sigma": [min(r["norm"] / r["sigma"] for r in rows), max(r["norm"] / r["sigma"] for r in rows)],
        "cosines": _between(other),
    }


def _between(cosines: Floats) -> dict[str, float]:
    """Of the gradients of different states, which share parameters: the theorem is about one state alone."""
    pairs = cosines[np.triu_indices(len(cosines), 1)]
    return {"mean": float(pairs.mean()), "least": float(pairs.min()), "negative": float((pairs < 0).mean())}


def _ascent(space: Space) -> Vector:
    """The gradient of success, [P]."""
    assert space.scores_AP is not None
    return (space.chances * (space.rewards - space.mean)).astype(np.float32) @ space.scores_AP


def _fisher_norm(space: Space) -> float:
    """sqrt(g' F^+ g) in the policy's parameters: the part of sqrt(pi) (r - q) that the scores span."""
    assert space.scores_AP is not None
    root = np.sqrt(space.chances)
    values, vectors = np.linalg.eigh(root[:, None] * inner_products(space.scores_AP) * root[None])
    spanned = vectors[:, values > 1e-9 * values.max()]
    return float(np.linalg.norm(spanned.T @ (root * (space.rewards - space.mean))))


# Selective Rollout's dilution


def _dilution(
    policy: Policy,
    studied: Sequence[Space],
    sure: Sequence[Space],
    generator: np.random.Generator,
    config: TheoryConfig,
) -> dict[str, Any]:
    """The gradient norm of a batch without its zero-variance groups over that with them, under every normaliser, from
    the library's own update; and what the inner products of the scores predict for arms that train on equally many
    groups, of which fewer are without variance."""
    drawn = [_drawn(space, generator, config.group_size) for space in studied]
    groups = [space.group(actions.tolist()) for space, actions in zip(studied, drawn, strict=True)]
    flat = [space.group(space.draw(generator, config.group_size).tolist()) for space in sure]
    weights = [coefficients(space, actions[None]) for space, actions in zip(studied, drawn, strict=True)]
    expected = sum(c[0].astype(np.float32) @ s.scores_AP for c, s in zip(weights, studied, strict=True))
    found = gradient_of(policy, groups, _loss())
    error = np.linalg.norm(found - expected / len(groups)) / np.linalg.norm(found)  # type: ignore[operator]
    return {
        "largest_error_of_an_update": float(error),
        "removed": [_removed(policy, groups, flat[:count], name) for count in _parts(flat) for name in _NORMALIZERS],
        "replaced": _replaced(studied, generator, config),
    }


def _parts(flat: Sequence[Any]) -> list[int]:
    return sorted({max(1, len(flat) // 2), len(flat)})


def _drawn(space: Space, generator: np.random.Generator, size: int) -> NDArray[np.int64]:
    """A group with reward variance: first how many of it are accepted, given that neither all nor none are."""
    counts = np.arange(1, size)
    weights = np.array([math.comb(size, k) * space.mean**k * (1 - space.mean) ** (size - k) for k in counts])
    accepted = int(generator.choice(counts, p=weights / weights.sum()))
    drawn: list[NDArray[np.int64]] = []
    for reward, count in ((1.0, accepted), (0.0, size - accepted)):
        own = np.where(space.rewards == reward, space.chances, 0.0)
        drawn.append(generator.choice(len(own), size=count, p=own / own.sum()))
    return np.concatenate(drawn)


def _loss(normalizer: Normalizer = "rollouts", kl: float = 0.0) -> LossConfig:
    ratio = "action" if normalizer == "rollouts" else "token"
    return LossConfig(
        ratio=ratio, normalizer=normalizer, constant=_NORMALIZERS[normalizer], kl_coefficient=kl, old_logprobs="engine"
    )


def _removed(policy: Policy, groups: Sequence[Group], flat: Sequence[Group], name: Normalizer) -> dict[str, Any]:
    both, alone = (gradient_of(policy, part, _loss(name)).astype(float) for part in ([*groups, *flat], groups))
    weights = {"tokens": _tokens, "rollouts": len, "constant": lambda _: 1}[name]
    norms = [float(np.linalg.norm(each)) for each in (alone, both)]
    return {
        "normalizer": name,
        "share": len(flat) / (len(groups) + len(flat)),
        "predicted": float(weights([*groups, *flat]) / weights(groups)),
        "measured": norms[0] / norms[1],
        "cosine": float(alone @ both / norms[0] / norms[1]),
    }


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(node.token_ids) for tree, _ in groups for node in tree if node.sampled)


def _replaced(studied: Sequence[Space], generator: np.random.Generator, config: TheoryConfig) -> list[dict[str, float]]:
    """Batches of N groups, each without variance with some chance. E|g|^2 = (E[k] m + E[k (k - 1)] u) / N^2 for k
    groups with variance, where m is the mean square of their gradients and u the product of two: between
    proportional to 1 - f (all signal) and to its root (all noise)."""
    inner = inner_products(np.concatenate([space.scores_AP for space in studied if space.scores_AP is not None]))
    each = max(2, config.draws // len(studied))
    blocks = [
        coefficients(s, np.stack([_drawn(s, generator, config.group_size) for _ in range(each)])) for s in studied
    ]
    weights = diagonal(blocks)
    products = weights @ inner @ weights.T
    square = float(np.trace(products)) / len(products)
    both = (float(products.sum()) - np.trace(products)) / len(products) / (len(products) - 1)
    rows: list[dict[str, float]] = []
    for count, (before, after) in itertools.product((10, 64), _PAPER):
        norms: list[float] = []
        measured: list[float] = []
        for share in (before, after):
            k, pairs = count * (1 - share), count * (count - 1) * (1 - share) ** 2
            norms.append(math.sqrt(k * square + pairs * both))
            kept = generator.binomial(count, 1 - share, size=config.draws)
            batches = [generator.integers(len(products), size=k) for k in kept]
            measured.append(float(np.mean([math.sqrt(max(0.0, products[np.ix_(b, b)].sum())) for b in batches])))
        rows.append(
            {
                "groups": count,
                "before": before,
                "after": after,
                "dilution": (1 - after) / (1 - before),
                "predicted": norms[1] / norms[0],
                "measured": measured[1] / measured[0],
                "noise_over_signal": square / both / (count * (1 - before)),
            }
        )
    return rows


# Theorem 3.3


def _trained(
    policy: Policy,
    verifier: TurnVerifier,
    studied: Sequence[Space],
    others: Sequence[Space],
    config: TheoryConfig,
) -> dict[str, Any]:
    """After some steps of PivotRL on the studied states: what Theorem 3.3 says about actions within a set, at these
    states and at mixed states that were not trained on; and the pull of groups without variance (Eq. 7's KL term)."""
    reference = frozen_reference(policy.model)
    settings = household_pivots(check_every=0)
    settings = replace(
        settings, steps=config.steps, groups=len(studied), group_size=config.group_size, seed=config.seed
    )
    pivots = [Pivot(space.prompted, "", "pivot") for space in studied]
    trainee = Trainee(policy.model, policy.engine, policy.renderer)
    train(PivotRL(trainee, settings, pivots, verifier), lambda row: None)
    states = [space.prompted for space in studied]
    trees = sample_local(states, policy.engine, policy.renderer, COMMAND, config.group_size, config.seed + 1)
    groups = list(
        zip(trees, score_wave([(t, s.state) for t, s in zip(trees, states, strict=True)], verifier), strict=True)
    )
    flat = [group for group in groups if is_zero_variance(list(group[1].scored().values()))]
    return {
        "zero_variance": {
            "groups": len(flat),
            "of": len(groups),
            "norm_with_kl": _norm(policy, flat, _loss(kl=0.02), reference),
            "norm_without": _norm(policy, flat, _loss(), reference),
            "all_groups": _norm(policy, groups, _loss(kl=0.02), reference),
        },
        "blocks": {"trained": _blocks(policy, studied), "others": _blocks(policy, others)},
    }


def _norm(policy: Policy, groups: Sequence[Group], loss: LossConfig, reference: Reference) -> float:
    return float(np.linalg.norm(gradient_of(policy, groups, loss, reference=reference))) if groups else 0.0


def _blocks(policy: Policy, spaces: Sequence[Space]) -> dict[str, float]:
    """Means over states: acceptable mass before and after, the distribution within each set moved (total variation),
    and the share of pairs of actions of one set (both of 1% or more before) that changed their order."""
    rows: list[dict[str, float]] = []
    for space in spaces:
        after = chances_now(policy, space)
        row = {"before": space.mean, "after": float(after @ space.rewards)}
        pairs = swapped = 0
        for name, inside in (("accepted", space.rewards > 0), ("refused", space.rewards == 0)):
            old, new = (each[inside] / each[inside].sum() for each in (space.chances, after))
            row[name] = 0.5 * float(np.abs(old - new).sum())
            known = np.flatnonzero(space.chances[inside] >= 0.01)
            for one, other in itertools.combinations(known, 2):
                pairs += 1
                swapped += (old[one] - old[other]) * (new[one] - new[other]) < 0
        row |= {"pairs": pairs, "swapped": swapped}
        rows.append(row)
    means = {name: float(np.mean([row[name] for row in rows])) for name in ("before", "after", "accepted", "refused")}
    return {**means, "swapped": sum(r["swapped"] for r in rows) / max(1, sum(r["pairs"] for r in rows))}


# in words


def lines(result: dict[str, Any]) -> Iterable[str]:
    found = result["policy"]
    yield from theory_finite.lines(result["finite"])
    states, signal, rules = found["states"], found["signal"], found["allocation"]["rules"]
    ranks = signal["rank_with_sigma"]
    yield (
        f"on a trained policy ({states['studied']} mixed states, {states['actions']} actions, {states['covered']:.0%} "
        f"of the probability): Fisher norm = deviation to {signal['largest_fisher_error']:.0e}; rank correlation of "
        f"deviation with the norm that a trainer steps along {ranks['norm']:.2f}, with a step's gain "
        f"{ranks['gain_measured']:.2f}, with the norm of GRPO's update {ranks['grpo_norm']:.2f}"
    )
    for row in found["dilution"]["removed"]:
        yield (
            f"without {row['share']:.0%} of zero-variance groups, normaliser {row['normalizer']}: norm times "
            f"{row['measured']:.3f}, predicted {row['predicted']:.3f}"
        )
    for row in found["dilution"]["replaced"]:
        yield (
            f"{row['groups']:.0f} groups, zero-variance share {row['before']:.0%} to {row['after']:.0%}: norm times "
            f"{row['measured']:.3f}, predicted {row['predicted']:.3f}, by dilution alone {row['dilution']:.3f}"
        )
    for row in rules:
        yield (
            f"{row['rule']}: variance at equal tokens {row['measured']:.2f}, predicted {row['predicted']:.2f}; scale "
            f"{row['scale']:.2f}, bias {row['bias']:.2f}"
        )
    flat = found["zero_variance"]
    yield (
        f"after training {flat['groups']} of {flat['of']} groups have no variance; their gradient has the norm "
        f"{flat['norm_with_kl']:.3f} with the KL term and {flat['norm_without']:.0g} without (all groups "
        f"{flat['all_groups']:.3f})"
    )
    for name, row in found["blocks"].items():
        yield (
            f"after training, {name} states: accepted mass {row['before']:.2f} to {row['after']:.2f}; moved within the "
            f"sets {row['accepted']:.0%} and {row['refused']:.0%}, pairs that changed order {row['swapped']:.0%}"
        )


# the variance of a batch's gradient when rollouts are shared out among states in different ways


def allocation(
    studied: Sequence[Space], sure: Sequence[Space], generator: np.random.Generator, config: TheoryConfig
) -> dict[str, Any]:
    """The variance of the gradient of mean success (RLOO, which is unbiased) at equal tokens, under rules that give
    states groups of different sizes; states without variance are part of the mean, and of the cost where a rule plays
    them. A rule that leaves nothing of the gradient is left out. `scale` and `bias` of what a rule estimates as in
    docs/design/credit.md."""
    budget = config.group_size * sum(space.tokens for space in (*studied, *sure))
    moments = [_moments(space) for space in studied]
    deviations = [math.sqrt(space.variance / space.tokens) for space in studied]
    spread = [
        math.sqrt(max(0.0, m["own"] - m["square"]) / space.tokens) for m, space in zip(moments, studied, strict=True)
    ]
    hard = [float(space.mean < 0.6) for space in studied]
    lost = config.group_size * sum(space.tokens for space in sure)
    rules: dict[str, tuple[Sequence[float], float]] = {
        "equal": ([1.0] * len(studied), budget - lost),
        "variance above zero": ([1.0] * len(studied), budget),
        "by deviation of the reward": (deviations, budget),
        "by deviation of the gradient": (spread, budget),
        "variance above zero, mean below 0.6": (hard, budget),
    }
    gradients = diagonal([(s.chances * (s.rewards - s.mean))[None] for s in studied])
    inner = (
        gradients
        @ inner_products(np.concatenate([s.scores_AP for s in studied if s.scores_AP is not None]))
        @ gradients.T
    )
    rows: list[dict[str, Any]] = []
    for name, (weights, tokens) in rules.items():
        sizes = _sizes(weights, [space.tokens for space in studied], tokens)
        kept = np.array([size > 0 for size in sizes], dtype=float)
        scale = float(kept @ inner.sum(axis=1) / inner.sum())
        if scale <= 0:  # no state is left, or those left point the other way
            continue
        found = _rule(studied, moments, sizes, generator, config.draws)
        across = math.sqrt(max(0.0, float(kept @ inner @ kept) / inner.sum() - scale**2)) / scale
        played = sum(size * space.tokens for size, space in zip(sizes, studied, strict=True)) + budget - tokens
        unit = played / (scale**2 * inner.sum())
        rows.append(
            {
                "rule": name,
                "sizes": sizes,
                "tokens": played,
                "scale": scale,
                "bias": across,
                **{key: value * unit for key, value in found.items()},
            }
        )
    tilted = np.array([slope_of_groups(space.mean, config.group_size) for space in studied])
    cosine = tilted @ inner.sum(axis=1) / math.sqrt(float(tilted @ inner @ tilted) * inner.sum())
    return {"rules": rows, "cosine_of_grpo": float(cosine)}


def _moments(space: Space) -> dict[str, float]:
    """Of one sample: E[(r - q)^2 |s|^2], |g|^2 and Var(r) E|s|^2."""
    assert space.scores_AP is not None
    inner, centred = inner_products(space.scores_AP), space.rewards - space.mean
    lengths, gradient = np.diag(inner), space.chances * centred
    return {
        "own": float(space.chances @ (centred**2 * lengths)),
        "square": float(gradient @ inner @ gradient),
        "apart": space.variance * float(space.chances @ lengths),
    }


def _sizes(weights: Sequence[float], lengths: Sequence[float], tokens: float) -> list[int]:
    """Whole group sizes, at least 2 where the weight is above 0, of about as many tokens."""
    least = np.array([2.0 if weight > 0 else 0.0 for weight in weights])
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        found = np.maximum(least, middle * np.array(weights))
        low, high = (middle, high) if found @ np.array(lengths) < tokens else (low, middle)
    return [round(each) for each in np.maximum(least, low * np.array(weights))]


def _rule(
    studied: Sequence[Space], moments: Sequence[dict[str, float]], sizes: Sequence[int], generator: Any, draws: int
) -> dict[str, float]:
    """The summed variance of the states' gradients: by the variance of a sample covariance, and of drawn groups."""
    predicted = measured = 0.0
    for space, of, size in zip(studied, moments, sizes, strict=True):
        if size < 2:
            continue
        assert space.scores_AP is not None
        predicted += (of["own"] - of["square"]) / size + (of["apart"] + of["square"]) / (size * (size - 1))
        drawn = generator.choice(len(space.chances), size=(draws, size), p=space.chances)
        off = coefficients(space, drawn, rloo) - (space.chances * (space.rewards - space.mean))[None]
        measured += float(np.einsum("da,ab,db->d", off, inner_products(space.scores_AP), off).mean())
    return {"predicted": predicted, "measured": measured}


def coefficients(space: Space, drawn_DG: NDArray[np.int64], advantages: Advantages = grpo_advantages) -> Floats:
    """[D, A]: the gradient of each group as weights of the scores, (1/G) sum of advantages."""
    found = np.zeros((len(drawn_DG), len(space.chances)))
    for row, drawn in zip(found, drawn_DG, strict=True):
        np.add.at(row, drawn, np.array(advantages(list(space.rewards[drawn]))) / len(drawn))
    return found


def diagonal(blocks: Sequence[Floats]) -> Floats:
    """The blocks along the diagonal of a matrix of zeros."""
    found = np.zeros((sum(len(b) for b in blocks), sum(b.shape[1] for b in blocks)))
    row = column = 0
    for block in blocks:
        found[row : row + len(block), column : column + block.shape[1]] = block
        row, column = row + len(block), column + block.shape[1]
    return found
