"""`python studies/run.py alignment`: does the reward of a turn point along success?

PivotRL trains on verdicts about single turns, GRPO on the outcomes of episodes. A frozen policy, one step, no training:
the gradient of mean success on some tasks comes from many independent episodes (RLOO, which is unbiased). Against it
are held the gradient of GRPO on one batch of episodes, that of one-turn groups at states of the same episodes, by kind
of action, and that of one-turn groups at the states of an expert's play of the same tasks.

A gradient that is estimated from a sample has noise, which makes every cosine smaller. *Alignment* is the cosine of the
expectations: inner products of independent estimates (of other seeds, of two halves of the reference) are unbiased, so
the noise is left out. The *cosine* of one batch has it, and is what a step of given length gains.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from configs import REFERENCE_SEEDS, AlignmentConfig, playing
from theory_spaces import (
    Floats,
    Vector,
    cosine,
    demonstrated,
    gradient_by,
    gradient_of,
    inner_products,
)

from turntree.advantages.comparisons import rloo
from turntree.advantages.config import CreditConfig
from turntree.advantages.credit import CreditRule
from turntree.advantages.local import local_credit
from turntree.core import seeds
from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.core.labels import Credit
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.core.progress import notice, progress
from turntree.core.protocols import Environment
from turntree.core.tree import RolloutTree
from turntree.environments.tasks import TRAIN, TaskSet, identity, open_tasks
from turntree.experiments.paired import claim, over_seeds
from turntree.observe.files import read_json, write_json
from turntree.rollouts.acceptance import Acceptance
from turntree.rollouts.groups import GrownGroup
from turntree.rollouts.local import Limits, Prompted, sample_local, score_wave
from turntree.rollouts.scheduler import Scheduler
from turntree.stages.inside import InsideTurns, open_inside, told_by_episodes
from turntree.stages.policy import Policy, load_sharing, policy_name
from turntree.training.config import LossConfig

SCHEMA = "turntree.alignment/1"
_LOSS = LossConfig(normalizer="constant", constant=2000.0, kl_coefficient=0.0, old_logprobs="engine")
EPISODES, OWN, EXPERT = "episodes", "own", "expert"  # a family of vectors: one of all, or one of each kind of action


def run_alignment(config: AlignmentConfig, out: Path) -> dict[str, Any]:
    """Measure what is not there yet, then compare; `out/summary.json` holds the result. Raises `InputError` where `out`
    is of another configuration or policy."""
    online = config.online
    policy = load_sharing(policy_name(online.model, online.environment), online.device)
    splits = {TRAIN: config.batches * online.train.groups}
    with (
        open_tasks(online.environment, splits, seed=online.task_seed, model=policy.source) as opened,
        open_inside(online, policy) as inside,
    ):
        assert inside is not None  # the configuration has local rollouts
        made_from = {"policy_hash": policy.hash, "tasks": identity(online.environment, opened)}
        claim(out, {**to_mapping(config), "seeds": [], **made_from})
        stage = _Stage(config, policy, opened, inside)
        for half in range(2):
            _kept(out / f"reference{half}", lambda half=half: stage.reference(REFERENCE_SEEDS[half]))
        for seed in config.seeds:
            _kept(out / f"seed{seed}", lambda seed=seed: stage.seed(seed))
    summary = {"schema": SCHEMA, "policy_hash": policy.hash, "config": to_mapping(config), **summarise(config, out)}
    write_json(out / "summary.json", summary)
    return summary


@dataclass(frozen=True)
class Measured:
    """Vectors by name, and what is told of them."""

    vectors: Mapping[str, Vector]
    told: dict[str, Any]


def _kept(place: Path, measure: Callable[[], Measured]) -> None:
    """Measure and write, unless it is there; the JSON file comes last."""
    if place.with_suffix(".json").exists():
        return
    notice(f"alignment: {place.name}")
    found = measure()
    place.parent.mkdir(parents=True, exist_ok=True)
    np.savez(place.with_suffix(".npz"), **cast("dict[str, Any]", found.vectors))
    write_json(place.with_suffix(".json"), found.told)


# measuring


@dataclass(frozen=True)
class _Stage:
    config: AlignmentConfig
    policy: Policy
    opened: TaskSet
    inside: InsideTurns

    def tasks(self, batch: int) -> Sequence[Environment]:
        groups = self.config.online.train.groups
        return self.opened.of(TRAIN)[batch * groups : (batch + 1) * groups]

    def play(self, batch: int, size: int, seed: int) -> list[GrownGroup]:
        rollouts = replace(self.config.online.train.rollouts, group_size=size, max_live_rollouts=128)
        scheduler = Scheduler(self.policy.engine, self.policy.renderer, rollouts, pool=self.opened.pool)
        return list(scheduler.run(self.tasks(batch), seed=seed, iteration=batch))

    def reference(self, seed: int) -> Measured:
        total, rewards = np.float32(0), list[float]()
        for batch in progress(range(self.config.batches), "reference"):
            groups = self.play(batch, self.config.reference // 2, seed)
            rewards += [reward for group in groups for reward in group.rewards.scored().values()]
            pairs = [(group.tree, group.rewards) for group in groups]
            total = total + gradient_of(self.policy, pairs, _LOSS, CreditConfig(advantages="rloo"))
        return Measured({"true": np.asarray(total)}, {"success": sum(rewards) / len(rewards), "rollouts": len(rewards)})

    def seed(self, seed: int) -> Measured:
        """The vectors of one seed: `episodes`, and `own/KIND` and `expert/KIND` for each kind of action."""
        vectors: dict[str, Vector] = {}
        told: dict[str, Any] = {"states": Counter(), "mixed": Counter(), "tokens": Counter()}
        seen = Acceptance()

        def add(name: str, vector: Vector) -> None:
            vectors[name] = vectors[name] + vector if name in vectors else vector

        for batch in progress(range(self.config.batches), f"seed {seed}"):
            groups = self.play(batch, self.config.online.train.rollouts.group_size, seed)
            trees = [group.tree for group in groups]
            add(EPISODES, gradient_by(self.policy, trees, [CreditRule()(g.tree, g.rewards) for g in groups], _LOSS))
            told["tokens"][EPISODES] += sum(tree.cost.decoded_tokens for tree in trees)
            for kind, vector in self._own(groups, seed, batch, seen, told):
                add(f"{OWN}/{kind}", vector)
        for kind, vector in self._expert(seed, told):
            add(f"{EXPERT}/{kind}", vector)
        return Measured(vectors, {**told, "slopes": seen.slopes()})

    def _own(
        self, groups: Sequence[GrownGroup], seed: int, batch: int, seen: Acceptance, told: dict[str, Any]
    ) -> Iterator[tuple[str, Vector]]:
        """The gradient of local rollouts in the trees of `groups`, by kind."""
        found, *_ = self.inside.labelled(groups, seeds.derive(seed, "own", batch))
        verdicts, cost = self.inside.sample(found, seeds.derive(seed, "local", batch))
        told["tokens"][OWN] += cost.decoded_tokens
        told_by_episodes(seen, groups, found)
        places: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))  # by kind, then by tree
        for one, group in zip(found, verdicts, strict=True):
            places[one.kind][id(one.inside.tree)].add(one.inside.node)
            _count(told, f"{OWN}/{one.kind}", [verdict.reward for verdict in group])
        trees = [group.tree for group in groups]
        for kind, wanted in sorted(places.items()):
            credits = [local_credit(tree, advantages=rloo, places=wanted[id(tree)]) for tree in trees]
            yield kind, gradient_by(self.policy, trees, credits, _LOSS)

    def _expert(self, seed: int, told: dict[str, Any]) -> Iterator[tuple[str, Vector]]:
        """The same at states of the expert's play, as many as of the policy's own."""
        train = self.config.online.train
        states = _expert_states(self.config, self.policy)
        wanted = min(train.local.states * self.config.batches, len(states))
        drawn = seeds.generator(seed, "expert").sample(states, wanted)
        trees: dict[str, list[tuple[RolloutTree, Credit]]] = defaultdict(list)
        for start in range(0, len(drawn), 64):
            part = drawn[start : start + 64]
            episodes, verifier = train.rollouts.episodes, self.inside.verifier
            engine, renderer = self.policy.engine, self.policy.renderer
            grown = sample_local(part, engine, renderer, episodes.sampling, train.local.samples, seed)
            places = [(tree, item.state) for tree, item in zip(grown, part, strict=True)]
            scored = score_wave(places, verifier, cut_turns=episodes.cut_turns)
            for tree, item, rewards in zip(grown, part, scored, strict=True):
                said = verifier.judge(item.state, item.state.demonstration)
                if said.reward:
                    trees[said.kind].append((tree, CreditRule(advantages=rloo)(tree, rewards)))
                    _count(told, f"{EXPERT}/{said.kind}", [rewards.of(leaf) for leaf in rewards.verdicts])
                told["tokens"][EXPERT] += tree.cost.decoded_tokens
        for kind, pairs in sorted(trees.items()):
            yield kind, gradient_by(self.policy, [t for t, _ in pairs], [c for _, c in pairs], _LOSS)


def _count(told: dict[str, Any], name: str, rewards: Sequence[float | None]) -> None:
    told["states"][name] += 1
    told["mixed"][name] += group_outcome(rewards) is GroupOutcome.MIXED


def _expert_states(config: AlignmentConfig, policy: Policy) -> list[Prompted]:
    """The candidates of the demonstrator's play of the training tasks."""
    train = config.online.train
    part = playing(config.demonstrator, config.online.environment, config.batches * train.groups)
    limits = Limits(train.rollouts.episodes.sampling.max_tokens, policy.engine.max_context, train.max_tokens)
    found = demonstrated(part, policy, limits)
    if not found:
        raise InputError("the demonstrator gave no state", field="demonstrator")
    return found


# comparing


def summarise(config: AlignmentConfig, out: Path) -> dict[str, Any]:
    """Alignments and cosines of every family and kind with the gradient of success."""
    true = np.stack([_load(out / f"reference{half}")["true"] for half in range(2)])
    loaded = [_load(out / f"seed{seed}") for seed in config.seeds]
    told = [read_json(out / f"seed{seed}.json") for seed in config.seeds]
    kinds = {family: _kinds(loaded, family) for family in (OWN, EXPERT)}
    families: dict[str, list[Vector]] = {EPISODES: [vectors[EPISODES] for vectors in loaded]}
    slopes = {kind: float(np.mean([one["slopes"].get(kind, 0.0) for one in told])) for kind in kinds[OWN]}
    for family in (OWN, EXPERT):
        families[family] = [_sum(vectors, family, dict.fromkeys(kinds[family], 1.0), true) for vectors in loaded]
    # each seed's by the slopes that it saw itself: shared ones would make the seeds' vectors dependent
    weighed = [{kind: one["slopes"].get(kind, 0.0) for kind in kinds[OWN]} for one in told]
    families[f"{OWN}, by slope"] = [_sum(vectors, OWN, of, true) for vectors, of in zip(loaded, weighed, strict=True)]
    found = {name: _against(true, np.stack(vectors)) for name, vectors in families.items()}
    by_kind = {
        f"{family}/{kind}": _against(true, np.stack([_vector(vectors, family, kind, true) for vectors in loaded]))
        for family in (OWN, EXPERT)
        for kind in kinds[family]
    }
    sums = {key: Counter[str]() for key in ("states", "mixed", "tokens")}
    for one in told:
        for key, counter in sums.items():
            counter.update(one[key])
    return {
        "seeds": list(config.seeds),
        "reference": {
            "cosine_of_halves": cosine(*true),
            "success": read_json(out / "reference0.json")["success"],
        },
        "families": found,
        "kinds": by_kind,
        "slopes": slopes,
        **{key: dict(sorted(counter.items())) for key, counter in sums.items()},
    }


def _load(place: Path) -> Mapping[str, Vector]:
    return np.load(place.with_suffix(".npz"), allow_pickle=False)


def _kinds(loaded: Sequence[Mapping[str, Vector]], family: str) -> list[str]:
    names = {name for vectors in loaded for name in vectors if name.startswith(f"{family}/")}
    return sorted(name.partition("/")[2] for name in names)


def _vector(vectors: Mapping[str, Vector], family: str, kind: str, like: Vector) -> Vector:
    """Zero where a seed has no state of the kind."""
    name = f"{family}/{kind}"
    return vectors[name] if name in vectors else np.zeros(like.shape[1], dtype=np.float32)


def _sum(vectors: Mapping[str, Vector], family: str, weights: Mapping[str, float], like: Vector) -> Vector:
    parts = [weight * _vector(vectors, family, kind, like) for kind, weight in weights.items()]
    return np.asarray(sum(parts, np.zeros(like.shape[1])), dtype=np.float32)


def _against(true_2P: Vector, found_SP: Vector) -> dict[str, Any]:
    """`alignment`: the cosine of the expectations. `cosine`: of one batch with the reference. `gain`: the inner product
    with the direction of the reference, relative to the length of the true gradient, seed by seed."""
    products: Floats = inner_products(np.concatenate([true_2P, found_SP]))
    across, seeds_count = products[:2, 2:], len(found_SP)
    signal = float(products[0, 1])  # |true|^2
    own = products[2:, 2:]
    between = (own.sum() - np.trace(own)) / (seeds_count * (seeds_count - 1))  # |expectation|^2
    both = products[:2, :2].sum() / 4  # |mean of the halves|^2, with its noise
    cosines = across.mean(axis=0) / np.sqrt((both * np.diag(own)).clip(1e-60))  # 0 where there is no gradient
    known = signal > 0 and between > 0
    return {
        "alignment": float(across.mean() / math.sqrt(signal * between)) if known else None,
        "cosine": over_seeds(cosines.tolist()),
        "gain": over_seeds((across.mean(axis=0) / signal).tolist()) if signal > 0 else None,
        "signal_share": float(between / np.diag(own).mean()) if np.diag(own).mean() > 0 else None,
    }


def lines(result: Mapping[str, Any]) -> Iterable[str]:
    halves = result["reference"]["cosine_of_halves"]
    yield f"success {result['reference']['success']:.1%}; cosine of the two halves of the true gradient {halves:.3f}"
    for name, row in {**result["families"], **result["kinds"]}.items():
        states = f", {result['states'][name]:,} states" if name in result["states"] else ""
        aligned = "unknown" if row["alignment"] is None else f"{row['alignment']:.3f}"
        yield f"{name}: alignment {aligned}, cosine of a batch {_interval(row['cosine'])}{states}"


def _interval(row: Mapping[str, Any]) -> str:
    return f"{row['mean']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
