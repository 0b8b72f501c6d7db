"""The loop of every training run: sample, credit, learn, check, log, save.

An `Algorithm` is what a run does at a step. PivotRL (`train.pivot`) and GRPO on whole episodes (`train.online`)
are `RolloutAlgorithm`s, SFT (`train.sft`) is one without rollouts. `train` owns the order of a step and resumes from
the last checkpoint: the same seed gives the same weights and rows with a single thread, killed or not.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from turntree.core.cost import NO_COST, Cost
from turntree.core.labels import Credit
from turntree.core.protocols import Renderer, StreamingEngine
from turntree.core.tree import RolloutTree
from turntree.train.checkpoints import Checkpoints, Saved
from turntree.train.config import ReinforcedConfig
from turntree.train.ranks import SINGLE, ProcessGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Row = dict[str, Any]  # of metrics.jsonl


class Group(Protocol):
    """Rollouts of one task or state."""

    @property
    def tree(self) -> RolloutTree: ...


G = TypeVar("G", bound=Group)


class AnyLearner(Protocol):
    """Updates the policy, in this process (`update.Learner`) or elsewhere."""

    @property
    def trainers(self) -> Saved: ...

    def learn(self, trees: Sequence[RolloutTree], credits: Sequence[Credit]) -> tuple[dict[str, float], Cost]:
        """Take the optimizer steps on a batch and bring the engine to the new weights, one version on. Returns the
        metrics of the last step, and the cost. Where no tree has a scored leaf, no step is taken, the policy keeps its
        version, and the metrics show 0 trained groups."""
        ...


@dataclass(frozen=True)
class Checked:
    """The figures of a held-out check, its cost, and why the run ends with it (empty: it goes on)."""

    figures: Row
    cost: Cost = NO_COST
    stop: str = ""


Check = Callable[[int, Row], Checked]
Keep = Callable[[int, Sequence[Any], Sequence[Credit | None]], None]


@dataclass(frozen=True)
class Trained:
    """The cost of a run, the separate cost of its checks, and why it ended before its last step (empty: it did not)."""

    cost: Cost
    checks: Cost
    stopped: str = ""


@dataclass(frozen=True)
class StepResult:
    """The figures of a step, and its groups with their credit, where it had rollouts."""

    row: Row
    groups: Sequence[Any] = ()
    credits: Sequence[Credit | None] = ()


class Algorithm(ABC):
    """What a run does at each of its `steps`, and the state that the next step depends on."""

    steps: int
    check_every: int = 0  # steps between two checks, beside those before the first and after the last step
    trainers: Saved
    cost: Cost = NO_COST

    @abstractmethod
    def step(self, step: int) -> StepResult:
        """Train once."""

    def after_check(self) -> None:
        """Forget what a check has left behind, so that the next step does not depend on it."""
        return None

    def state(self) -> Row:
        """Everything that the next step depends on beside the weights, as plain JSON."""
        return {"cost": dataclasses.asdict(self.cost)}

    def restore(self, state: Row) -> None:
        """Take `state` back, after the trainers have loaded their weights."""
        self.cost = Cost(**state["cost"])


def train(
    algorithm: Algorithm,
    log: Callable[[Row], None],
    check: Check | None = None,
    keep: Keep = lambda step, groups, credits: None,
    checkpoints: Checkpoints | None = None,
) -> Trained:
    """Run the algorithm from its last checkpoint, or from the start, to its end. Updates its model in place.

    `log` gets one row a step, with the figures of `check` where one is due; `check` gets the step and its row so far.
    Before it, `keep` gets all groups of the step with the credit of those that were trained on (None: the others)."""
    checks = NO_COST
    state = None if checkpoints is None else checkpoints.restore(algorithm.trainers)
    done = 0
    if state is not None:
        done, checks = state["step"], Cost(**state["checks"])
        algorithm.restore(state)

    def checked_at(step: int, row: Row) -> Checked:
        nonlocal checks
        if check is None:
            return Checked({})
        checked = check(step, row)
        checks += checked.cost
        algorithm.after_check()
        return checked

    if done == 0 and check is not None:
        log({"step": 0, **checked_at(0, {}).figures})
    for step in range(done + 1, algorithm.steps + 1):
        result = algorithm.step(step)
        if result.groups:
            keep(step, result.groups, result.credits)
        due = step == algorithm.steps or (algorithm.check_every > 0 and step % algorithm.check_every == 0)
        checked = checked_at(step, result.row) if due else Checked({})
        log({"step": step, **result.row, **checked.figures})
        if checked.stop:
            return Trained(algorithm.cost, checks, checked.stop)
        if checkpoints is not None and checkpoints.due(step):
            saved = {**algorithm.state(), "checks": dataclasses.asdict(checks)}
            checkpoints.save(step, algorithm.trainers, saved)
    return Trained(algorithm.cost, checks)


@dataclass(frozen=True)
class Trainee:
    """The policy of a run: `engine` samples from `model` what `renderer` puts into tokens. Without `shared` every
    rollout is trained in a row of its own (`isolation.shares_prefixes`). The ranks of `group` share each update.
    `reference` is the frozen policy of the KL term (None: what `model` is when the run begins)."""

    model: PreTrainedModel
    engine: StreamingEngine
    renderer: Renderer
    shared: bool = True
    group: ProcessGroup = SINGLE
    reference: Any = None

    def learner(self, config: ReinforcedConfig, steps: int) -> AnyLearner:
        """What learns from its rollouts, in so many optimizer steps."""
        from turntree.engine.teacher import ServedPolicy
        from turntree.train.trainer import open_trainers  # they load torch, which a carrier does without
        from turntree.train.update import Learner

        wanted = self.model if self.reference is None else self.reference
        teacher = wanted if isinstance(wanted, ServedPolicy) else None
        frozen: Any = wanted if config.loss.needs_reference_logprobs and teacher is None else None
        trainers = open_trainers(self.model, config.optimizer, steps, self.group, reference=frozen)
        if self.group.size > 1 and getattr(self.engine, "model", None) is not self.model:
            cast(Any, self.model).to("cpu")  # a server samples: only what it is sent is written from here
        loss = dataclasses.replace(config.loss, temperature=config.sampling.temperature)
        most, minibatch = config.max_tokens, config.minibatch
        return Learner(self.model, trainers, self.engine, loss, config.updates, most, self.shared, minibatch, teacher)


class RolloutAlgorithm(Algorithm, Generic[G]):
    """Reinforcement learning on groups of rollouts: sample them, give them credit, learn from those that have some."""

    def __init__(self, policy: Trainee, config: ReinforcedConfig, steps: int) -> None:
        self.policy, self.engine, self.steps = policy, policy.engine, steps
        self.learner = policy.learner(config, steps * config.updates)
        self.trainers = self.learner.trainers

    @abstractmethod
    def sample(self, step: int) -> Sequence[G]:
        """The judged groups of a step."""

    @abstractmethod
    def credit(self, step: int, groups: Sequence[G]) -> Sequence[Credit | None]:
        """The credit of every group; None for those that the update does not learn from."""

    @abstractmethod
    def observe(self, step: int, groups: Sequence[G], credits: Sequence[Credit | None]) -> Row:
        """The figures of a step's groups, after the update."""

    def step(self, step: int) -> StepResult:
        groups = self.sample(step)
        credits = self.credit(step, groups)
        kept = [(group.tree, credit) for group, credit in zip(groups, credits, strict=True) if credit is not None]
        metrics, cost = self.learner.learn([tree for tree, _ in kept], [credit for _, credit in kept])
        self.cost += cost
        return StepResult({**metrics, **self.observe(step, groups, credits)}, groups, credits)

    def after_check(self) -> None:
        self.engine.clear_cache()

    def state(self) -> Row:
        return {**super().state(), "policy_version": self.engine.policy_version}

    def restore(self, state: Row) -> None:
        super().restore(state)
        self.engine.update_weights(self.policy.model, state["policy_version"])
