"""Configuration of the stages from traces to a policy, as plain values. No torch: the command line reads it for help.

The line of text below a field is its documentation: `turntree config` and `--help` show it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from turntree.core import parts
from turntree.core.completion import Sampling
from turntree.core.config import FIXED, Above0, Amount, Between, Bounded, Count, Part, Positive, Share, Usual, is_url
from turntree.core.errors import ConfigError
from turntree.core.protocols import Brancher, Estimator, Filter, Gate
from turntree.credit.config import CreditConfig, refuse_biased
from turntree.credit.credit import CreditRule
from turntree.credit.scored import path_weighted
from turntree.engine.limits import EndpointConfig, Prefixes
from turntree.env.processes import ProcessPoolConfig
from turntree.pivots.profile import ProfileConfig
from turntree.pivots.select import BalanceConfig
from turntree.rollout.cluster.config import WorkersConfig
from turntree.rollout.live import CutTurns, EpisodeConfig
from turntree.traces.schema import Split
from turntree.train.config import CheckpointConfig, LoRAConfig, OnlineConfig, PivotConfig, ReinforcedConfig, SFTConfig

HF = Part("hf")  # the engine in this process
AUTO = Part("auto")  # the renderer that the model's folder asks for


@dataclass(frozen=True)
class Device(Bounded):
    """Where and how to compute."""

    name: str = "cpu"
    """The torch device: cpu, cuda, cuda:1."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """dtype of the weights ('auto': as saved). Training keeps float32 copies of bfloat16 weights."""
    threads: Positive | None = None
    """CPU threads (default: one below 30 million parameters, else all)."""
    attention: Literal["sdpa", "flex_attention"] = "sdpa"
    """Attention over packed trees; FlexAttention on CUDA only."""
    prefixes: Prefixes = "auto"
    """Compute what rollouts share once (shared), or in each of them (repeated), for models that cannot share: linear
    attention, windows, sinks. auto: shared where the model computes it exactly, which is measured at the start."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    lora: LoRAConfig | None = None
    """Train a fresh adapter instead of the weights."""
    frozen: tuple[str, ...] = ()
    """Modules whose weights training leaves as they are, by the end of their names: mlp.gate, a mixture's router."""
    engine: Part = HF
    """The sampling engine: hf (in this process), vllm (servers), or your own module:object."""
    carrier: Part | None = None
    """Who samples and trains in place of this process: tinker (a server of Tinker's API), or your own module:object."""
    renderer: Part = AUTO
    """Messages to tokens and back: auto (by the model's folder), template, family:NAME, or your own module:object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frozen and self.lora is not None:
            hint = "leave it out: an adapter leaves all weights as they are"
            raise ConfigError("has no effect beside device.lora", field="device.frozen", hint=hint)
        if self.carrier is not None:
            idle = ("name", "dtype", "threads", "attention", "prefixes", "gradient_checkpointing", "frozen")
            changed = [name for name in idle if getattr(self, name) != getattr(Device, name)]
            if changed := changed + ["engine"] * (self.engine.name != HF.name):
                problem, hint = "has no effect where a carrier computes", "leave it out, or the carrier"
                raise ConfigError(problem, field=f"device.{changed[0]}", hint=hint)


# options that several stages share


@dataclass(frozen=True, kw_only=True)
class Sampled(Bounded):
    """A policy that is sampled from, and not trained."""

    model: str = "default"
    """A folder in Hugging Face format, a name on the Hub, or a registered policy ('default': where there is an
    environment, its own). With an endpoint, the name that it serves."""
    endpoint: EndpointConfig | None = None
    """Sample from a server, such as vLLM."""
    device: Device = field(default_factory=Device)


@dataclass(frozen=True, kw_only=True)
class Playing(Bounded):
    """Who plays what."""

    model: str = "default"
    """A folder in Hugging Face format, a name on the Hub, or a registered policy ('default': the environment's own)."""
    environment: Part = parts.DEFAULT
    """The environment: a registered name, your own module:object, or for example gymnasium:ID. Its options are given
    like those of the command."""
    task_seed: int = 0
    """Seed for environments that draw their tasks."""
    device: Device = field(default_factory=Device)


@dataclass(frozen=True, kw_only=True)
class TracesPlayed:
    """Traces whose turns a verifier judges."""

    environment: Part | None = field(default=None, metadata=parts.AS_GIVEN)
    """The environment of the traces, under the name that they record, for a verifier that plays actions (executed).
    Options given here replace those of the trace. `train pivot --states own` plays it."""


@dataclass(frozen=True, kw_only=True)
class FromProfile(TracesPlayed):
    """As `TracesPlayed`, where a profile names the traces."""

    traces: str | None = None
    """Path of the traces, if not the one in the profile."""


@dataclass(frozen=True, kw_only=True)
class Training(Bounded):
    """What changes weights."""

    loggers: tuple[Part, ...] = ()
    """Log to tensorboard, trackio or wandb as well, or to your own module:object (repeatable)."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: WorkersConfig = field(default_factory=WorkersConfig)
    device: Device = field(default_factory=Device)


@dataclass(frozen=True, kw_only=True)
class ReinforcedTraining(Training):
    """Training on rollouts."""

    reference: str | None = None
    """The policy that the KL term pulls towards: a folder, a name on the Hub, or the URL of a vLLM server, with the
    tokenizer of the model (default: the policy that training starts from). A better one is a teacher, on the policy's
    own rollouts: on-policy distillation, with train.loss.kl_coefficient at 1."""
    train: ReinforcedConfig = field(default_factory=ReinforcedConfig)
    keep_trees: Count | None = None
    """Write whole rollout trees (trees.jsonl) of this many steps, spread evenly, or of none (0). Default: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference is not None and not self.train.loss.needs_reference_logprobs:
            hint = "set train.loss.kl_coefficient above 0, or leave it out"
            raise ConfigError("has no effect without a KL term", field="reference", hint=hint)
        if self.reference is not None and is_url(self.reference) and self.train.sampling.temperature != 1:
            hint = "set it to 1, or name a folder: a server's log-probabilities are those of temperature 1"
            raise ConfigError("does not go with a reference on a server", field="train.sampling.temperature", hint=hint)
        if self.cluster.workers and self.device.carrier is not None:
            hint = "leave it at 0: the carrier samples on its own machines"
            raise ConfigError("does not go with a carrier", field="cluster.workers", hint=hint)


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig(Bounded):
    """Whole tasks that are played before, during and after a training, whose reward may run away from success
    (docs/results/hard.md)."""

    tasks: Count | None = None
    """Number of tasks of the split "dev" to play (0: none). Default: 64 where an environment is known, else none."""
    stops: bool = field(default=True, metadata=FIXED)
    """Whether a run ends where its reward runs away from success, and keeps its best weights. (The arms of an
    experiment go on to their end, and nothing reads but their last.)"""

    @property
    def wanted(self) -> int:
        """How many tasks: a collapse from one success in five is seen in 64 (`train.success.has_fallen`)."""
        return 64 if self.tasks is None else self.tasks


@dataclass(frozen=True, kw_only=True)
class EpisodesCheckConfig(HeldOutConfig):
    """For a training on whole episodes, as which they are played."""

    temperature: Amount = 0.0
    """Sampling temperature of held-out episodes (0: greedy)."""


@dataclass(frozen=True, kw_only=True)
class SuccessConfig(HeldOutConfig):
    """For a training on turns. Episodes are sampled as it samples turns."""

    environment: Part | None = None
    """The environment of the held-out tasks. Default: that of --environment, or the one that the traces name."""
    max_turns: Positive | None = None
    """Longest episode (default: own.max_turns, or the longest of the traces)."""


@dataclass(frozen=True, kw_only=True)
class SFTCheckConfig(SuccessConfig):
    """For a training that samples nothing itself."""

    max_tokens: Positive = 256
    """Longest completion of one turn."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig(SuccessConfig):
    """Held-out figures during training: success on whole tasks, and acceptance at states of the traces."""

    states: Count = 0
    """Development candidates for measuring acceptance by kind of action, drawn by `task_seed` (0: none)."""
    samples: Positive = field(default=4, metadata=FIXED)
    """Rollouts per development candidate."""


# the stages


@dataclass(frozen=True, kw_only=True)
class SFTStageConfig(Training):
    """`turntree sft`."""

    traces: str
    """A traces file."""
    model: str = "default"
    """A folder in Hugging Face format, a name on the Hub, or a registered policy."""
    split: Literal[Split, ""] = "train"
    """The split of the traces ('' for all)."""
    task_seed: int = 0
    """Seed for environments that draw their tasks."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    check: SFTCheckConfig = field(default_factory=SFTCheckConfig)
    checkpoints: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=100))

    def __post_init__(self) -> None:
        if self.cluster.workers:
            raise ConfigError("play rollouts, and sft has none", field="cluster.workers", hint="leave it out")


@dataclass(frozen=True, kw_only=True)
class ProfileStageConfig(Sampled, TracesPlayed):
    """`turntree profile`."""

    traces: str
    """A traces file."""
    verifier: Part = parts.DEFAULT
    """recommended, paper, nemo, judge, tool_call, strict, executed, another registered name, or module:function of your
    own. 'default' is that of the games which the default policy plays."""
    split: Literal[Split, ""] = "train"
    """The split of the traces ('' for all)."""
    limit: Count = 0
    """Profile this many candidates, drawn by `profile.seed` (0: all)."""
    reuse: str | None = None
    """An earlier profile of this policy: what it holds is not sampled again."""
    published: bool = False
    """Take the pass rates that the traces record (published pivot data sets) and sample nothing. They are those of the
    publisher's model and verifier: training needs allow_stale."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.published and (self.profile != ProfileConfig() or self.reuse or self.endpoint):
            hint = "leave out --rollouts, --adaptive and what else says how to sample"
            raise ConfigError("samples nothing, so the settings of sampling do nothing", field="published", hint=hint)


@dataclass(frozen=True, kw_only=True)
class RescoreConfig(FromProfile):
    """`turntree rescore`."""

    profile: str
    """The profile to rescore."""
    verifier: Part
    """recommended, paper, nemo, judge, tool_call, strict, executed, another registered name, or module:function of your
    own."""


@dataclass(frozen=True, kw_only=True)
class OwnPathConfig(Bounded):
    """Pivots on the policy's own path: the policy plays training tasks, a teacher labels the states that it reached,
    and these are profiled and selected like those of traces."""

    refresh: Count = 20
    """Steps between two searches (0: only before the first step)."""
    keep: Annotated[float, Between(0, below=1)] = 0.5
    """Share of the weight that pivots of earlier searches keep (0: new pivots replace them). It is their share of the
    draws where a step draws few of the pivots; it draws distinct ones, so where new pivots are few, earlier ones fill
    it up."""
    tasks: Positive = 32
    """Tasks that a search plays, each once."""
    count: Positive = 400
    """Tasks of the split "train" that they are drawn from."""
    greedy: Share = field(default=0.5, metadata=FIXED)
    """Share of a search's tasks that are played at temperature 0: the loops of greedy play are states that sampled play
    rarely reaches. They are profiled and trained on at the temperature of training, as the others are."""
    max_turns: Positive = 30
    """Longest episode."""
    candidates: Positive | None = None
    """Most states of a search that are profiled, drawn from every kind of action alike (default: all)."""
    rollouts: Annotated[int, Between(2)] = 8
    """Rollouts of the profile at every state."""
    select: BalanceConfig = field(default_factory=BalanceConfig)


@dataclass(frozen=True, kw_only=True)
class TrainPivotConfig(ReinforcedTraining, FromProfile):
    """`turntree train pivot`."""

    pivots: str | None = None
    """The pivots file of `turntree select`; none with --states own. Without one, every candidate of `traces` (its split
    train) is a state: the paper's D_cand, its random pivots, which nothing profiled or filtered."""
    states: Literal["expert", "own", "mixed"] = "expert"
    """Whose states are trained on: the pivots file's, the policy's own, or both."""
    teacher: Part | None = None
    """Labels the policy's own states: household, qa, model, or your own module:object. None with a verifier that does
    not compare with a label (`TurnVerifier.compares`)."""
    own: OwnPathConfig = field(default_factory=OwnPathConfig)
    task_seed: int = 0
    """Seed for environments that draw their tasks."""
    model: str = "default"
    """A folder in Hugging Face format, a name on the Hub, or a registered policy."""
    verifier: Part | None = None
    """Default: the verifier of the profile; name custom code again. "strict" is the baseline of Eq. 2."""
    allow_stale: bool = False
    """Accept pivots that were profiled with another policy, sampling or verifier: their means are then not those of
    the start."""
    train: PivotConfig = field(default_factory=PivotConfig)
    check: CheckConfig = field(default_factory=CheckConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        unfiltered = self.states == "expert" and self.traces is not None and self.verifier is not None
        if self.states != "own" and self.pivots is None and not unfiltered:
            hint = (
                "name the file of `turntree select`, train on all candidates with --traces and --verifier, or on the "
                "policy's own states with --states own"
            )
            raise ConfigError("is missing", field="pivots", hint=hint)
        if self.states == "expert":
            for name, idle in (("teacher", self.teacher is not None), ("own", self.own != OwnPathConfig())):
                if idle:
                    hint = "leave it out, or add --states own or mixed"
                    raise ConfigError("has no effect with the states of an expert", field=name, hint=hint)
            return
        if self.states == "own" and self.pivots is not None:
            raise ConfigError("trains on no pivots file", field="states", hint="leave the file out, or use mixed")
        needed = {"environment": self.environment}
        if self.states == "own":
            needed["verifier"] = self.verifier
        for name, value in needed.items():
            if value is None:
                hint = f"pass --{name} NAME: the policy plays, and a verifier judges"
                raise ConfigError(f"is missing, and --states {self.states} needs it", field=name, hint=hint)
        if self.states == "own" and self.check.states:
            raise ConfigError("are states of traces, and there are none", field="check.states", hint="set it to 0")


@dataclass(frozen=True, kw_only=True)
class TrainOnlineConfig(ReinforcedTraining, Playing):
    """`turntree train online`. A brancher needs `train.initial_rollouts` below the group size."""

    count: Positive = 400
    """Tasks of the split "train" to train on."""
    train: OnlineConfig = field(default_factory=OnlineConfig)
    check: EpisodesCheckConfig = field(default_factory=EpisodesCheckConfig)
    rewards: tuple[Part, ...] = ()
    """Functions that judge episodes in training, as module:function=0.5 (repeatable). Their sum replaces the reward of
    the environment, which is the reward 'environment'."""
    gate: Annotated[Part | None, Usual("divergence")] = None
    """Stop groups mid-rollout: divergence (once their rollouts have converged on the same actions), random (the control
    of an experiment), or your own module:object."""
    brancher: Annotated[Part | None, Usual("entropy")] = None
    """Fork episodes after tool results: entropy, random, arpo, arpo_released, or a module:object."""
    filters: tuple[Part, ...] = ()
    """Skip tasks, or drop finished groups from the update: greso, dapo, or your own module:object (repeatable)."""
    estimator: Part | None = None
    """Credit by your own module:object (default: `train.credit`)."""
    workers: ProcessPoolConfig = field(default_factory=lambda: ProcessPoolConfig(workers=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.max_off_policy_steps and not self.cluster.workers:
            hint = "set cluster.workers, or leave it at 0"
            raise ConfigError("needs rollout workers", field="train.max_off_policy_steps", hint=hint)
        if self.brancher is not None and self.train.credit.advantages == "remax":
            hint = "leave the brancher out: branches of the greedy rollout are not greedy"
            raise ConfigError("has a greedy rollout for its baseline", field="train.credit.advantages", hint=hint)
        for name, used in (("credit", self.train.credit != CreditConfig()), ("turn_rewards", self.train.turn_rewards)):
            if self.estimator is not None and used:
                problem = "has no effect: an estimator of your own gives the credit"
                raise ConfigError(problem, field=f"train.{name}", hint="leave one of the two out")
        rollouts = self.train.rollouts.of_training(self.train.groups, branching=self.brancher is not None)
        if (self.brancher is not None) != (rollouts.initial < rollouts.group_size):
            raise ConfigError(
                f"{rollouts.initial} of {rollouts.group_size} rollouts begin independently, with"
                + ("out a brancher" if self.brancher is None else " a brancher that has none left to add"),
                field="train.initial_rollouts",
                hint="set it below group_size together with brancher, or neither",
            )
        if self.estimator is None and self.train.credit.comparison == "starts" and rollouts.initial < 2:
            raise ConfigError(
                f"{rollouts.initial} rollout begins independently, and 'starts' compares those that do: no gradient",
                field="train.initial_rollouts",
                hint="at least 2 (a brancher takes half of group_size by default), or another train.credit.comparison",
            )

    def build_gate(self) -> Gate | None:
        """Raises `ConfigError` for a gate that could never cut a group."""
        if self.gate is None:
            return None
        gate = parts.build("gates", self.gate, seed=self.train.seed)
        first, longest = gate.first_look, self.train.max_turns
        if first >= longest:
            problem = f"first looks at turn {first}, and episodes end at turn {longest}: nothing is left to cut"
            raise ConfigError(problem, field="gate", hint="an earlier turn, or train.max_turns")
        rollouts = self.train.rollouts.of_training(self.train.groups, branching=self.brancher is not None)
        if rollouts.initial < 2:
            problem = "compares rollouts that begin independently, and one does"
            raise ConfigError(problem, field="gate", hint="set train.initial_rollouts to at least 2")
        return gate

    def build_brancher(self, vocabulary: int) -> Brancher | None:
        """For a policy over `vocabulary` tokens. Raises `ConfigError` for a brancher that could never fork, and where
        loss or credit do not go with it."""
        if self.brancher is None:
            return None
        brancher = parts.build("branchers", self.brancher, vocabulary=vocabulary, seed=self.train.seed)
        longest = self.train.sampling.max_tokens
        if brancher.probe_tokens > longest:
            problem = f"looks at the first {brancher.probe_tokens} tokens of turns that end at {longest}: none can fork"
            raise ConfigError(problem, field="brancher.probe_tokens", hint=f"set it to {longest} or less")
        if brancher.reads_entropies and self.device.carrier is not None:
            hint = "use random"
            raise ConfigError("decides by entropies, which the carrier does not tell", field="brancher", hint=hint)
        if brancher.splits_turns and self.train.loss.ratio == "action":
            problem = "'action' takes the ratio of whole turns, and branches share a part of one"
            hint = "use ratio 'token', or brancher.probe_tokens 1"
            raise ConfigError(problem, field="train.loss.ratio", hint=hint)
        rule = self.build_estimator() or self.train.estimator
        chosen = brancher.biased or brancher.prompt_wide
        if chosen and isinstance(rule, CreditRule) and rule.leaf_weights is path_weighted:
            problem = (
                f"forks of {self.brancher.name!r} depend on other rollouts or later tokens: path weights are biased"
            )
            raise ConfigError(problem, field="train.credit.leaf_weights", hint="use 'unit'")
        return brancher

    def build_filters(self) -> list[Filter]:
        named = enumerate(self.filters)
        return [parts.build("filters", part, field=f"filters.{i}", seed=self.train.seed) for i, part in named]

    def build_estimator(self) -> Estimator | None:
        if self.estimator is None:
            return None
        loss = self.train.loss
        context = {"normalizer": loss.normalizer, "per_rollout": loss.per_rollout_credit}
        built = parts.build("estimators", self.estimator, **context)
        if not isinstance(built, CreditRule):
            return built
        refuse_biased(built, loss.normalizer)
        return replace(built, per_rollout=loss.per_rollout_credit)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Playing):
    """`turntree evaluate`."""

    count: Positive = 200
    """Tasks to play."""
    split: Split = "test"
    """The split of the tasks: train, dev or test."""
    samples: Positive = 1
    """Sampled episodes per task."""
    temperature: Above0 = 1.0
    """Temperature of the sampled episodes."""
    greedy: bool = True
    """Also play each task once greedily."""
    max_turns: Positive = 16
    """Longest episode."""
    max_tokens: Positive = 48
    """Longest completion of one turn."""
    max_context: int = 4096
    """Longest prompt plus completion, in tokens."""
    cut_turns: CutTurns = "fail"
    """A turn that the token limit cut ends the episode as a failure, or the environment judges its text."""
    skills_per_kind: Count = 0
    """Questions per unrelated skill, to measure what a tiny policy forgets (0: none)."""
    seed: int = 0
    """Of every draw."""
    max_live_rollouts: Positive = 256
    """Episodes that are played at the same time, and most copies of the environment that are open."""
    keep_trees: bool = False
    """Write the episodes beside the result (NAME.trees.jsonl), all tokens included."""
    rewards: tuple[Part, ...] = ()
    """Functions that judge the episodes, as module:function=0.5 (repeatable): the mean of each is told beside success,
    which stays the environment's."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig(Sampled, Playing):
    """`turntree traces record`."""

    split: Split = "train"
    """The split of the tasks: train, dev or test."""
    count: Positive = 100
    """Number of tasks of the split."""
    samples: Positive = 1
    """Episodes per task."""
    only: Literal["all", "successes"] = "all"
    """Which episodes are kept; the others are counted."""
    teacher: Part | None = None
    """Label every state of the episodes with what a teacher would do there: household, qa, model, or your own
    module:object. The labels are the demonstrations of later stages (default: what was played is)."""
    episodes: EpisodeConfig = field(default_factory=lambda: EpisodeConfig(sampling=Sampling(max_tokens=256)))
    wave: Positive = 16
    """Tasks that are played and logged together."""
    seed: int = 0
    """Draws the episodes."""
    workers: ProcessPoolConfig = field(default_factory=lambda: ProcessPoolConfig(workers=0))
