"""Learning on a server of Tinker's API: rows out of credited trees in place of packed batches (`pack.rows`).

A clip is the loss `ppo` of the API, which takes token ratios; the old log-probabilities are the sampler's. The KL term
becomes advantages: its gradient at a token with d = log pi_old - log pi_ref is that of -m beta d (k2) or of
-m beta (1 - exp(-d)) (k3), exact where a batch is learned from in one step. With several steps it has rows of its own,
which the clip leaves alone, and d stays that of the sampler.

Tinker adds up the losses of all tokens. Some servers divide by the rows of a step and by the length of each row
(SkyRL's JAX back end), which is measured at the start by the norms of three gradients and taken back.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.core.labels import Credit
from turntree.core.progress import notice
from turntree.core.tree import RolloutTree
from turntree.engine.teacher import ServedPolicy
from turntree.engine.tinker import TinkerAdapter, TinkerEngine
from turntree.pack.rows import Row, rows
from turntree.run.files import write_json
from turntree.run.identity import file_digest
from turntree.run.jsonl import read_config
from turntree.train.config import OptimizerConfig, ReinforcedConfig, SFTConfig
from turntree.train.loop import Trainee
from turntree.train.sft import SFT, Example

Figures = dict[str, float]
STATE = "tinker.json"  # in a checkpoint: where the server has the adapter
_LARGE = 0.05  # a mean difference of log-probabilities between trainer and sampler that is said


@dataclass(frozen=True)
class Reduction:
    """What a server divides a step's gradient by."""

    rows: bool = False
    lengths: bool = False

    def factor(self, targets: int, count: int) -> float:
        """What takes it back for a row of so many targets, in a step of `count` rows."""
        return (count if self.rows else 1) * (targets if self.lengths else 1)


class TinkerWeights:
    """The adapter with its optimizer: steps, and what a checkpoint holds of them."""

    def __init__(self, adapter: TinkerAdapter, config: OptimizerConfig, total_steps: int) -> None:
        config.require_steps(total_steps)
        self.adapter, self.config, self.total_steps, self.steps = adapter, config, total_steps, 0
        self.reduction = self._measured()

    def step(self, data: Sequence[tuple[str, dict[str, float] | None, Sequence[Any]]]) -> tuple[list[Any], Figures]:
        """One optimizer step on data by their loss and its settings; what the passes gave, and the step's metrics."""
        passes = [self.adapter.forward_backward(part, loss, settings) for loss, settings, part in data if part]
        rate = self.config.learning_rate * self.config.factor(self.steps, self.total_steps)
        told = self._adam(rate)
        self.steps += 1
        norm = _norm(told)
        return passes, {"learning_rate": rate, **({} if norm is None else {"grad_norm": norm})}

    def save(self, folder: Path) -> dict[str, str]:
        path = folder / STATE
        write_json(path, {"state": self.adapter.save(f"step-{self.steps}"), "steps": self.steps})
        return {STATE: file_digest(path)}

    def load(self, folder: Path) -> None:
        held = read_config(folder / STATE)
        self.adapter.load(held["state"])
        self.steps = held["steps"]

    def _adam(self, rate: float) -> dict[str, float]:
        config = self.config
        clip = config.max_grad_norm if math.isfinite(config.max_grad_norm) else 0.0
        return self.adapter.step(
            learning_rate=rate,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=clip,
        )

    def _measured(self) -> Reduction:
        """How the server adds up, by steps that change nothing: their rate is 0, and the moments are brought back."""
        start = self.adapter.save("start")
        short, long = [5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 9, 10, 11, 12] + [5] * 8

        def norm(*prompts: Sequence[int]) -> float | None:
            pushed = [np.where(np.arange(len(ids) - 1) < len(short) - 1, 1.0, 0.0) for ids in prompts]
            old = [np.full(len(ids) - 1, -5.0) for ids in prompts]
            made = [self.datum(ids, logprobs=o, advantages=a) for ids, o, a in zip(prompts, old, pushed, strict=True)]
            self.adapter.forward_backward(made, "importance_sampling")
            return _norm(self._adam(0.0))

        one = norm(short)
        if not one:  # no norm is told: as the API is documented
            self.adapter.load(start)
            return Reduction()
        if math.isfinite(self.config.max_grad_norm):
            notice("the server tells norms of gradients, as SkyRL does, which clips none: max_grad_norm may do nothing")
        twice, longer = (norm(short, short) or 0.0) / one, (norm(long) or 0.0) / one
        self.adapter.load(start)
        found = Reduction(abs(twice - 1) < 0.05, abs(longer - (len(short) - 1) / (len(long) - 1)) < 0.05)
        if not (found.rows or abs(twice - 2) < 0.1) or not (found.lengths or abs(longer - 1) < 0.05):
            problem = (
                f"adds up gradients in no known way (two equal rows: {twice:.3g}, a row twice as long: {longer:.3g})"
            )
            raise InputError(problem, path=self.adapter.session.url, hint="use another server")
        return found

    def datum(self, tokens: Sequence[int], **targets: Any) -> Any:
        """A row as the API takes it: what belongs to each target, which are all tokens but the first."""
        types = self.adapter.session.sdk.types
        tensor = types.TensorData.from_numpy
        inputs = {name: tensor(np.asarray(values, dtype=np.float32)) for name, values in targets.items()}
        inputs["target_tokens"] = tensor(np.asarray(tokens[1:], dtype=np.int64))
        return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs)


@dataclass(frozen=True)
class TinkerTrainee(Trainee):
    """A policy that is trained on a server: `model` is its adapter, `reference` samples from other weights."""

    def learner(self, config: ReinforcedConfig, steps: int) -> TinkerLearner:
        _require_loss(config)
        engine: Any = self.engine
        adapter: Any = self.model
        weights = TinkerWeights(adapter, config.optimizer, steps)
        return TinkerLearner(weights, engine, config, self.reference if config.loss.needs_reference_logprobs else None)


def _require_loss(config: ReinforcedConfig) -> None:
    """Raise `ConfigError` for what the API cannot train."""
    if config.sampling.temperature != 1:
        hint = "set it to 1: Tinker's log-probabilities are those of temperature 1"
        raise ConfigError(f"is {config.sampling.temperature:g}", field="sampling.temperature", hint=hint)
    if config.loss.ratio == "action" and (config.updates > 1 or config.minibatch is not None):
        hint = "use ratio 'token', or one step a batch, where both have the same gradient"
        raise ConfigError("'action' is no loss of Tinker's API", field="loss.ratio", hint=hint)


@dataclass(frozen=True)
class _Window:
    """What an optimizer step learns from: rows with their whole multiplicity, the distances of a KL term at their
    tokens, and what is sent, for the loss with the clip and for the one without."""

    rows: Sequence[Row]
    multiplicity: float
    pulls: Sequence[Sequence[float]] = ()
    pushed: Sequence[Any] = ()
    pulled: Sequence[Any] = ()

    @property
    def pull(self) -> float:
        """The sum of the distances, by multiplicity."""
        weights = (m for row in self.rows for m in row.multiplicities)
        return math.fsum(m * d for m, d in zip(weights, itertools.chain(*self.pulls), strict=True))


class TinkerLearner:
    """`loop.AnyLearner` over rows on a server. `base` scores for the KL term."""

    def __init__(
        self, weights: TinkerWeights, engine: TinkerEngine, config: ReinforcedConfig, base: Any = None
    ) -> None:
        self.trainers, self.engine, self.loss, self._base = weights, engine, config.loss, base
        self.updates, self.minibatch = config.updates, config.minibatch

    def learn(self, trees: Sequence[RolloutTree], credits: Sequence[Credit]) -> tuple[Figures, Cost]:
        started, size = time.perf_counter(), self.minibatch or max(1, len(trees))
        parts = [slice(start, start + size) for start in range(0, len(trees), size)]
        windows = [found for part in parts if (found := self._window(trees[part], credits[part])).rows]
        if not windows:
            return {"trained_groups": 0}, NO_COST
        clip = {"clip_low_threshold": 1 - self.loss.clip_low, "clip_high_threshold": 1 + self.loss.clip_high}
        metrics: Figures = {}
        differences: list[float] = []
        for window in windows * self.updates:
            passes, told = self.trainers.step(
                [("ppo", clip, window.pushed), ("importance_sampling", None, window.pulled)]
            )
            figures = self._figures(window, passes[0])
            differences.append(figures.pop("difference"))
            metrics = {**figures, **told}
        if differences[0] > _LARGE:  # before the first step both have the same weights
            off = f"{differences[0]:.2g} nats a token on average (weights of another dtype?)"
            notice(f"warning: trainer and sampler differ by {off}")
        self.engine.update_weights(self.trainers.adapter, self.engine.policy_version + 1)
        data = [datum for window in windows for datum in (*window.pushed, *window.pulled)]
        sent = sum(len(datum.loss_fn_inputs["target_tokens"].data) for datum in data)
        cost = Cost(
            trained_tokens=self.updates * sent,
            scored_tokens=sum(len(row) for window in windows if window.pulls for row in window.rows),
            training_seconds=time.perf_counter() - started,
        )
        if windows[0].pulls:
            metrics["kl"] = math.fsum(w.pull for w in windows) / math.fsum(w.multiplicity for w in windows)
        counted = {
            "trained_groups": sum(bool(credit.nodes) for credit in credits),
            "trees": float(len(trees)),
            "rows": float(sum(len(window.rows) for window in windows)),
            "trained_tokens": float(sent),
            "zero_variance_fraction": sum(credit.zero_variance for credit in credits) / len(credits),
        }
        return {**counted, **metrics}, cost

    def _window(self, trees: Sequence[RolloutTree], credits: Sequence[Credit]) -> _Window:
        made = rows(trees, credits, clipped=True)
        multiplicity = math.fsum(m for row in made for m in row.multiplicities)
        if not made:
            return _Window(made, multiplicity)
        divisor = self.loss.divisor(
            multiplicity,
            rollout_tokens=math.fsum(credit.rollout_tokens for credit in credits),
            rollouts=math.fsum(credit.rollouts for credit in credits),
        )
        pulls = self._pulls(made)
        return _Window(made, multiplicity, pulls, *self._data(made, pulls, divisor))

    def _pulls(self, made: Sequence[Row]) -> list[list[float]]:
        """log pi_old - log pi_ref at every token of every row, where it is trained; nothing without a KL term."""
        if self._base is None or not self.loss.kl_coefficient:
            return []
        if isinstance(self._base, ServedPolicy):
            found = self._base.logprobs([row.tokens for row in made])
        else:
            types, session = self.trainers.adapter.session.sdk.types, self.trainers.adapter.session
            asked = [self._base.compute_logprobs(types.ModelInput.from_ints(list(row.tokens))) for row in made]
            found = [session.guarded(lambda one=one: one) for one in asked]
        return [
            [
                old - ref if m else 0.0
                for old, ref, m in zip(row.logprobs, _of_all(scored, len(row)), row.multiplicities, strict=True)
            ]
            for row, scored in zip(made, found, strict=True)
        ]

    def _data(
        self, made: Sequence[Row], pulls: Sequence[Sequence[float]], divisor: float
    ) -> tuple[list[Any], list[Any]]:
        """Every row for the loss with the clip, and for the one without where the KL term has rows of its own."""
        clipped: list[Any] = []
        free: list[Any] = []
        apart = bool(pulls) and (self.updates > 1 or self.minibatch is not None)
        count = len(made) * (1 + apart)
        for number, row in enumerate(made):
            scale = self.trainers.reduction.factor(len(row) - 1, count) / divisor
            pushed = np.asarray(row.advantages[1:])
            pulled = np.zeros(len(row) - 1)
            if pulls:
                d, weight = np.asarray(pulls[number][1:]), self.loss.kl_coefficient * np.asarray(row.multiplicities[1:])
                pulled = -weight * (d if self.loss.kl == "k2" else -np.expm1(-d))
            old = row.logprobs[1:]
            whole = pushed if apart else pushed + pulled
            clipped.append(self.trainers.datum(row.tokens, logprobs=old, advantages=whole * scale))
            if apart:
                free.append(self.trainers.datum(row.tokens, logprobs=old, advantages=pulled * scale))
        return clipped, free

    def _figures(self, window: _Window, passed: Any) -> Figures:
        """Ratios of a pass over the trained tokens, and how far the log-probabilities were from the sampler's."""
        found = [output["logprobs"].data for output in passed.loss_fn_outputs]
        cells = [
            (m, a, math.exp(min(new - old, 20.0)), abs(new - old))
            for row, scored in zip(window.rows, found, strict=True)
            for m, a, old, new in zip(row.multiplicities[1:], row.advantages[1:], row.logprobs[1:], scored, strict=True)
            if m or a
        ]
        low, high = 1 - self.loss.clip_low, 1 + self.loss.clip_high
        push = math.fsum(abs(a) for _, a, _, _ in cells)
        clipped = math.fsum(abs(a) for _, a, r, _ in cells if (r > high if a > 0 else r < low))
        if not all(math.isfinite(r) for _, _, r, _ in cells):
            raise TurntreeError("the server's log-probabilities are not finite: the policy has diverged")
        return {
            "ratio_mean": math.fsum(m * r for m, _, r, _ in cells) / window.multiplicity,
            "ratio_max": max((r for m, _, r, _ in cells if m), default=1.0),
            "clip_fraction": clipped / push if push else 0.0,
            "difference": math.fsum(m * d for m, _, _, d in cells) / window.multiplicity,
        }


class TinkerSFT(SFT):
    """`SFT` on a server. Where it divides by the length of a row, which weights would not change, the loss is `cispo`
    with all ratios clipped to 1, which is the weighted likelihood too."""

    def __init__(self, adapter: TinkerAdapter, examples: Sequence[Example], config: SFTConfig) -> None:
        self._prepare(examples, config)
        self._weights = self.trainers = TinkerWeights(adapter, config.optimizer, self.steps)

    def imitate(self, examples: Sequence[Example], seed: int) -> Mapping[str, float]:
        weights, learned = self._weights, sum(sum(row.loss_mask) for row in examples)
        even = not weights.reduction.lengths
        data: list[Any] = []
        for row in examples:
            mask = np.asarray(row.loss_mask[1:], dtype=float)
            weight = mask * weights.reduction.factor(len(mask), len(examples)) / learned
            old = np.zeros(len(mask))
            targets = {"weights": weight} if even else {"logprobs": old, "advantages": weight}
            data.append(weights.datum(row.token_ids, **targets))
        settings = None if even else {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
        passes, told = weights.step([("cross_entropy" if even else "cispo", settings, data)])
        found = [output["logprobs"].data for output in passes[0].loss_fn_outputs]
        loss = -math.fsum(
            new
            for row, scored in zip(examples, found, strict=True)
            for said, new in zip(row.loss_mask[1:], scored, strict=True)
            if said
        )
        return {"loss": loss / learned, **told}


def _norm(metrics: Mapping[str, float]) -> float | None:
    """The norm of a step's gradient, where the server tells it."""
    return next((value for name, value in metrics.items() if "grad_norm" in name), None)


def _of_all(scored: Sequence[float | None], tokens: int) -> list[float]:
    """Log-probabilities of a sequence, token by token. The first has none: Tinker says None, SkyRL leaves it out."""
    known = [value for value in scored if value is not None]
    if len(known) < tokens - 1:
        raise InputError(f"the server scored {len(known)} of {tokens} tokens, without saying which")
    return [0.0, *known[len(known) - tokens + 1 :]]
