"""The configurations of the studies, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from turntree.core import parts
from turntree.core.completion import Sampling
from turntree.core.config import Between, Bounded, Part
from turntree.core.errors import ConfigError
from turntree.experiments.config import COMMAND
from turntree.pivots.profile import ProfileConfig
from turntree.pivots.select import SelectConfig
from turntree.rollout.live import EpisodeConfig
from turntree.stages.config import Device, OwnPathConfig, Playing, TrainOnlineConfig
from turntree.train.config import LossConfig, OnlineConfig, OptimizerConfig, PivotConfig

_TwoOrMore = Annotated[int, Between(2)]
ANSWER = EpisodeConfig(max_turns=10, max_context=1024, sampling=Sampling(temperature=1.0, max_tokens=48))


def household_selection() -> SelectConfig:
    """The selection of docs/results/quickstart.md at easy games."""
    return SelectConfig(threshold=1.0, max_per_kind=0.4, anchor_share=0.0, per_duplicate=0)


def household_own() -> OwnPathConfig:
    """The search for own states of the embedded household policy (docs/results/own-states.md), without importance,
    which has left the library."""
    return OwnPathConfig(refresh=15, tasks=192, max_turns=16)


def household_pivots(*, check_every: int, steps: int = 60) -> PivotConfig:
    """The vetted PivotRL settings of the embedded household policy at easy games."""
    return PivotConfig(
        steps=steps,
        check_every=check_every,
        sampling=COMMAND,
        loss=LossConfig(kl_coefficient=0.02),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=3),
    )


def check_once(**lists: tuple[Any, ...]) -> None:
    """Raise `ConfigError` for a list that is empty or names something twice: a repeated seed narrows intervals."""
    for name, values in lists.items():
        if not values or len(set(values)) < len(values):
            raise ConfigError("must be there, and each once", field=name)


LadderArm = Literal["none", "coin", "entropy", "oracle", "oracle_pooled", "worst", "foresight"]


@dataclass(frozen=True, kw_only=True)
class PremiseConfig(Playing):
    """`studies/run.py premise`: training tasks whose rollouts are forked once, all of it once for each probe."""

    environment: Part = field(default_factory=lambda: Part("qa"))
    count: int = 150
    """Training tasks to play."""
    episodes: EpisodeConfig = ANSWER
    initial: int = 4
    """Rollouts of a task, each forked once."""
    children: int = 8
    """Rollouts that go on from a fork."""
    rate: float = 0.4
    """Chance of forking after a tool result."""
    probes: tuple[int, ...] = (1, 2, 3, 4)
    """Tokens of a turn that are seen before it forks."""
    seed: int = 0
    """Of every draw."""

    def __post_init__(self) -> None:
        if self.initial < 1 or self.children < 2 or not self.probes or min(self.probes) < 1:
            raise ConfigError("needs a rollout, 2 children and probes of at least 1 token", field="children")


def _on_cpu(device: Device) -> None:
    if device.name != "cpu":
        raise ConfigError("must be cpu: whole gradients are compared in numpy", field="device.name")


@dataclass(frozen=True, kw_only=True)
class TheoryConfig(Bounded):
    """`studies/run.py theory`."""

    seed: int = 0
    """Of every draw."""
    instances: _TwoOrMore = 2000
    """Random finite action spaces that every statement is checked on."""
    model: str = "default"
    """A folder in Hugging Face format, a name on the Hub, or a registered policy."""
    device: Device = field(default_factory=Device)
    verifier: Part = parts.DEFAULT
    """Judges the actions of the policy."""
    demonstrator: Part = field(
        default_factory=lambda: Part("household", {"count": 24, "environment": {"difficulty": "easy"}})
    )
    """Whose traces the states come from."""
    candidates: _TwoOrMore = 96
    """States that are sampled to find the mixed ones."""
    samples: _TwoOrMore = 32
    """Rollouts at each, whose distinct actions become the action space of the state."""
    mixed: _TwoOrMore = 12
    """States with reward variance, the first ones found; half as many without."""
    group_size: _TwoOrMore = 8
    """Rollouts of a group."""
    draws: _TwoOrMore = 2000
    """Batches that each variance is measured on."""
    steps: _TwoOrMore = 20
    """Steps of PivotRL after which Theorem 3.3 is held against the trained policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _on_cpu(self.device)


def _grpo() -> TrainOnlineConfig:
    easy = Part("household", {"difficulty": "easy"})
    train = OnlineConfig(
        iterations=20,
        groups=8,
        check_every=2,
        sampling=COMMAND,
        loss=LossConfig(kl_coefficient=0.02, normalizer="constant", constant=5000.0),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=3),
    )
    return TrainOnlineConfig(environment=easy, train=train)


def playing(demonstrator: Part, environment: Part, count: int, **options: Any) -> Part:
    """The demonstrator on the first `count` training tasks of `environment`, with further options."""
    played = {"environment": environment.options, "count": count}
    return Part(demonstrator.name, {**demonstrator.options, **played, **options})


STAGES = ("grpo", "pivot", "own")
ADDED = ("dapo", "greso", "gate", "branching")  # what a GRPO stage can have


_SET_BY_ARMS = {  # settings of `online`, and where they are set instead
    **{name: name for name in ("gate", "brancher")},
    "check": "held_out",
    "filters": "",
}


def chain(arm: str) -> list[tuple[str, tuple[str, ...]]]:
    """The stages of an arm, each with what is added to it: `pivot/grpo+gate` is PivotRL, then GRPO with the gate.
    Raises `ConfigError`."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for told in arm.split("/"):
        stage, *added = told.split("+")
        wrong = [one for one in added if stage != "grpo" or one not in ADDED]
        if stage not in STAGES or wrong or len(set(added)) < len(added):
            hint = f"a chain of {', '.join(STAGES)}, as pivot/grpo+dapo; grpo takes {', '.join(ADDED)}, each once"
            raise ConfigError(f"has no stage {told!r}", field="arms", hint=hint)
        if stage == "pivot" and found:
            reason = "its states are profiled for the policy that all arms start from"
            hint = "put pivot first; own finds states for the policy that it gets"
            raise ConfigError(f"has pivot after another stage: {reason}", field="arms", hint=hint)
        found.append((stage, tuple(added)))
    return found


@dataclass(frozen=True, kw_only=True)
class ComposeConfig:
    """`studies/run.py compose`."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Every arm is run once with each."""
    arms: tuple[str, ...] = (
        "grpo",
        "grpo+dapo",
        "grpo+greso",
        "grpo+gate",
        "grpo+branching",
        "pivot",
        "pivot/grpo",
        "own",
        "own/grpo",
        "own/grpo+dapo+greso",
    )
    """Chains of stages: grpo (whole episodes), pivot (PivotRL on an expert's states; comes first), own (on the policy's
    own). The others are compared with the first."""
    online: TrainOnlineConfig = field(default_factory=_grpo)
    """The GRPO stages; their tasks are also those that are demonstrated, and those of own states."""
    gate: Part = field(default_factory=lambda: Part("divergence", {"turn": 8, "threshold": 0.64}))
    """The gate of `+gate`."""
    brancher: Part = field(default_factory=lambda: Part("entropy", {"probe_tokens": 2}))
    """The brancher of `+branching`, which forks half of the rollouts."""
    demonstrator: Part = field(default_factory=lambda: Part("household", {"slips": 0.2}))
    """The demonstrator whose traces the stage pivot learns from."""
    profile: ProfileConfig = field(default_factory=lambda: ProfileConfig(sampling=COMMAND))
    candidates: int = 5000
    """Most candidates that are profiled."""
    select: SelectConfig = field(default_factory=household_selection)
    pivot: PivotConfig = field(default_factory=lambda: household_pivots(steps=30, check_every=5))
    """The stages pivot and own. PivotRL rises in 15 to 25 steps (docs/results/cost.md), own states search twice."""
    teacher: Part = field(default_factory=lambda: Part("household"))
    """Labels the states of the stage own."""
    verifier: Part = field(default_factory=lambda: Part("household"))
    """Judges them."""
    own: OwnPathConfig = field(default_factory=household_own)
    """How the stage own searches; its tasks and longest episode are those of `online`."""
    held_out: int = 200
    """Tasks of the split "dev" that are played at every check."""

    def __post_init__(self) -> None:
        check_once(seeds=self.seeds, arms=self.arms)
        stages = [stage for arm in self.arms for stage in chain(arm)]
        if not self.pivot.check_every or not self.online.train.check_every:
            raise ConfigError("must be above 0 in every stage: a curve needs points", field="pivot.check_every")
        self._check_set_by_arms()
        cut = any({"gate", "branching"} & set(added) for _, added in stages)
        if cut and self.online.train.loss.normalizer != "constant":
            problem = "lets a cut or a fork change the step size"
            raise ConfigError(problem, field="online.train.loss.normalizer", hint="use 'constant'")

    def _check_set_by_arms(self) -> None:
        """Raise `ConfigError` for settings of `online` that the arms replace: they would be ignored without a word."""
        usual = TrainOnlineConfig()
        for name, other in _SET_BY_ARMS.items():
            if getattr(self.online, name) != getattr(usual, name):
                hint = f"set {other} instead" if other else "an arm that names this part has its defaults"
                raise ConfigError("is replaced by what the arms say", field=f"online.{name}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class LadderConfig(Playing):
    """`studies/run.py ladder`: a frozen policy."""

    environment: Part = field(default_factory=lambda: Part("qa"))
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    """Of the rollouts; the tasks are the same."""
    arms: tuple[LadderArm, ...] = ("coin", "entropy", "oracle", "oracle_pooled", "worst", "foresight")
    """Where rollouts fork. coin and entropy: as those branchers do; oracle: where the measured variance is
    highest among the moments of a turn, oracle_pooled: of all turns; worst: lowest; foresight: once a rollout, at its
    best moment; none: nowhere, so that all leaves are independent."""
    iterations: int = 5
    """Batches of tasks; the first sets the pace and is not counted."""
    groups: int = 8
    """Tasks of a batch."""
    group_size: int = 8
    """Leaves of a task, half of which begin independently."""
    probe_tokens: int = 2
    """Entropies that a brancher looks at; branches share one token less."""
    children: int = 8
    """Children of every moment that are measured and not billed."""
    reference: int = 32
    """Independent rollouts of a task, for the true gradient."""
    reference_seed: int = 1000
    """Of these."""
    episodes: EpisodeConfig = ANSWER

    def __post_init__(self) -> None:
        _on_cpu(self.device)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or self.reference_seed in self.seeds:
            raise ConfigError("must be there, each once, and not that of the reference", field="seeds")
        if self.iterations < 2:
            raise ConfigError("must be at least 2: the first sets the pace", field="iterations")
        if self.children < 2 or self.group_size < 4 or self.group_size % 2 or self.probe_tokens < 1:
            # of an odd number one rollout would fork twice, into a child that the oracle has measured
            raise ConfigError(
                "needs 2 children, an even number of leaves from 4, and a probe of 1 token", field="children"
            )
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError("must be there, and each once", field="arms")
