"""The protocols between the parts. Each has a contract test suite that runs over every implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from turntree.core.completion import Completion, Finished, GenerationRequest
from turntree.core.config import made_plain
from turntree.core.cost import Cost
from turntree.core.labels import Credit, Rewards
from turntree.core.messages import Message, ToolCall
from turntree.core.scalars import known_numbers, number, truth
from turntree.core.tree import RolloutTree
from turntree.core.verdict import Verdict


class Engine(Protocol):
    """Token ids in, token ids out. The engine knows nothing about tokenization.

    `generate` answers a fixed batch of requests (a wave), in order. A completion depends only on its own request and
    the weights (up to floating-point rounding of batched kernels), never on the draws of other requests.
    """

    @property
    def policy_version(self) -> int: ...

    @property
    def max_context(self) -> int:
        """The most tokens that prompt and completion may have together."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]: ...

    def update_weights(self, model: Any, policy_version: int) -> None:
        """Sample from the weights of `model` (a torch module) from now on, and stamp completions with the version. An
        engine that samples from this very module has nothing to do; another engine copies or sends the weights."""
        ...

    def clear_cache(self) -> None:
        """Drop what was kept of earlier requests, so that later costs do not depend on them, and free its memory."""
        ...


class StreamingEngine(Engine, Protocol):
    """An engine that takes requests one by one, for a scheduler of many groups.

    Laws (contract suite): every submitted ticket that is not cancelled is returned by `poll` exactly once; a
    completion is the one that `generate` gives for the same request, whatever else is in flight; requests are
    admitted in the order of submission; a cancelled ticket frees its place at once and is never returned.
    `update_weights` raises `TurntreeError` while anything is in flight: a completion is sampled by one policy.
    """

    @property
    def in_flight(self) -> int:
        """The number of requests that were submitted and neither returned nor cancelled."""
        ...

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request; returns its ticket. Raises `InputError` for a request that `generate` would refuse."""
        ...

    def cancel(self, ticket: int) -> Cost:
        """Cancel a request in any state and return its cost so far (zero if it was not admitted yet, or was returned
        before)."""
        ...

    def poll(self, timeout: float | None = None) -> list[Finished]:
        """Advance until at least one request is finished; return all finished ones in order of submission. Empty when
        nothing is in flight, or after `timeout` seconds (0: do one smallest step of work)."""
        ...


class Renderer(Protocol):
    """Messages to tokens and back, incrementally: sampled tokens are never tokenised again.

    A renderer raises `InputError` for messages that it cannot write. An error in a run censors the rollout.
    """

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        """Token ids of the conversation so far, ending where the assistant turn starts."""
        ...

    def completion(self, message: Message) -> tuple[int, ...]:
        """The token ids by which the policy would sample this assistant message, stop token included."""
        ...

    def extend(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        stopped: bool = True,
    ) -> tuple[int, ...]:
        """Token ids that follow the last sampled token of `messages[-1]` (an assistant turn) when `new` messages
        arrive, ending where the next assistant turn starts. `stopped`: the stop token was sampled."""
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()) -> Message:
        """The assistant message in sampled tokens; an invalid tool call stays text. `tools` are those of the prompt:
        where a family writes arguments without quotes, the tool's schema decides whether `true` is a string."""
        ...


@dataclass(frozen=True)
class Observation:
    """What an environment answers to an assistant message.

    `reward` is the reward of the episode if it ends here, by itself or at a limit (None: 1 for success, 0 for a
    failure; an end with neither is censored). Rewards are not added up: one that is not 0 before the end censors
    the rollout, unless the environment says with its attribute `total_reward` that it counts everything so far.
    `metrics` are the environment's own numbers about this step (for example 1.0 for an impossible command); evaluations
    report their mean over all steps as `NAME_share`, where a step without the number counts as 0. `progress` and these
    numbers can be rewards of the turn (`credit.comparisons.turn_advantages`).
    """

    messages: tuple[Message, ...]
    done: bool
    success: bool | None = None  # known once done
    progress: float | None = None  # how far the task is done, in [0, 1], where the environment knows
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # what the domain counts for itself

    @property
    def numbers(self) -> Mapping[str, float]:
        """Its metrics, with its progress for one of them."""
        return self.metrics if self.progress is None else {**self.metrics, "progress": self.progress}


class Environment(Protocol):
    """One episode of one task. Reset it once, then step it until it is done. `fork` copies it mid-episode."""

    @property
    def task_id(self) -> str: ...

    @property
    def tools(self) -> tuple[dict[str, Any], ...]: ...

    def reset(self) -> tuple[Message, ...]: ...

    def step(self, action: Message) -> Observation: ...

    def fork(self) -> Environment: ...


class Task:
    """What a task may say of itself beside `Environment`, with what holds where it says nothing. A task of one's own is
    a subclass, or a plain object with those of these attributes that it needs (`task_of`)."""

    task_type: str | None = None
    """Its kind, by which figures are told apart."""
    failure_reward: float = 0.0
    """The reward of an episode that a limit ends, where its last answer gives none."""
    total_reward: bool = False
    """Whether the reward of a step counts everything so far, so that one before the end is no fault."""
    gold: Sequence[Message] = ()
    """Assistant messages that solve it."""
    player: Any = None
    """A program that plays the task by itself (`rollout.players.Plays`)."""

    def state(self) -> Any:
        """The state as plain data, equal for equal states; None where it cannot be compared."""
        return None

    def state_problem(self) -> str | None:
        """Why states cannot be compared, where that is known."""
        return None


def task_of(environment: Environment) -> Task:
    """What an environment says of itself."""
    if isinstance(environment, Task):
        return environment
    task = Task()
    for name in ("task_type", "failure_reward", "total_reward", "gold", "player"):
        if hasattr(environment, name):
            setattr(task, name, getattr(environment, name))
    for name in ("state", "state_problem"):
        if callable(own := getattr(environment, name, None)):
            setattr(task, name, own)
    return task


class Teacher(Protocol):
    """Says what to do at a state that a policy has reached (part of kind `teachers`; a plain function is one)."""

    def __call__(self, environment: Environment, history: Sequence[Message]) -> Message | str:
        """The assistant message that the teacher would give after `history`, or why it gives none. `environment` is a
        copy of the task at this state, for teachers that look inside."""
        ...


class TurnVerifier:
    """Judges one assistant action at a state inside a demonstration (PivotRL, Eq. 6). One of your own is a subclass, or
    a function of (state, action)."""

    name: str
    """The rule and its version: profiles record it, and re-scoring depends on it."""
    compares: bool = True
    """Whether it looks at the demonstration."""
    concurrency: int = 1
    """How many verdicts are worth asking for at the same time."""
    batches: bool = False
    """Whether many verdicts are cheaper together, by `judge_all`."""
    whole_episodes: bool = False
    """Whether it judges episodes without a demonstration, by `grade`."""

    def judge(self, state: TurnState, action: Message) -> Verdict:
        raise NotImplementedError

    def judge_all(self, pairs: Sequence[tuple[TurnState, Message]], seed: int = 0) -> list[Verdict]:
        """The verdicts in order. `seed`: of what it draws."""
        return [self.judge(state, action) for state, action in pairs]

    def grade(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Verdict:
        raise NotImplementedError

    def reads(self, message: Message, state: TurnState) -> Sequence[ToolCall] | None:
        """The calls that it takes a message for; None for words."""
        return message.tool_calls or None

    def close(self) -> None:
        """Let go of what it holds."""


@dataclass(frozen=True)
class TurnState:
    """A pivot candidate: the history before an assistant turn, and the demonstrated turn (PivotRL, Eq. 3)."""

    trace_id: str
    turn: int  # index among the assistant turns of the trace, from 0
    history: tuple[Message, ...]
    demonstration: Message
    tools: tuple[dict[str, Any], ...] = ()
    environment: dict[str, Any] | None = None  # how to rebuild the environment, where the trace says so

    @property
    def id(self) -> str:
        return f"{self.trace_id}#{self.turn}"


@dataclass(frozen=True, kw_only=True)
class GroupProgress:
    """What a gate may see of a group in flight: its independent rollouts only (branched siblings share their prefix).

    One entry per rollout, in order of sample. `actions[i][t]` is what rollout i did in turn t + 1, as the rollout log
    tells it: its calls, or what it said where it called nothing. `observations[i][t]` is what it saw before that
    (index 0: the task itself). `progress` is an optional signal of the environment in [0, 1]. `iteration` and
    `occurrence` (the number of groups of this task begun earlier in the iteration) distinguish the groups of one
    task, so that a gate's random draws differ between them.
    """

    task_id: str
    max_turns: int
    actions: tuple[tuple[str, ...], ...]
    observations: tuple[tuple[str, ...], ...]
    finished: tuple[bool, ...]
    progress: tuple[float | None, ...]
    iteration: int = 0
    occurrence: int = 0


def _known(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in known_numbers(numbers).items() if value is not None}


def _whole(value: Any) -> int:
    if number(value) != int(number(value)):
        raise ValueError(f"{value} is not a whole number")
    return int(number(value))


@dataclass(frozen=True, kw_only=True)
class GateDecision:
    """`cut` stops the whole group now; `numbers` are what the gate measured, unknown ones left out. `final`: do not ask
    the gate again.

    `audited`: the gate would have cut, and lets the group run on so that its precision can be measured; it does so with
    the probability `audit_share`.
    """

    cut: bool
    reason: str
    numbers: dict[str, float]
    final: bool
    audited: bool = False
    audit_share: float = 1.0

    def __post_init__(self) -> None:
        made_plain(self, cut=truth, numbers=_known, final=truth, audited=truth, audit_share=number)


class Gate(Protocol):
    """Decides mid-rollout whether a group is likely to have a gradient (Selective Rollout, section 3).

    It is asked after every turn that all unfinished rollouts of the group have completed (`rollout.scheduler`). A
    subclass overrides what it needs; `--gate` names it, registered or as module:object.
    """

    @property
    def first_look(self) -> int:
        """The first turn at which it may decide to cut a group of two rollouts or more."""
        return 1

    def decide(self, group: GroupProgress) -> GateDecision | None:
        """None: nothing to decide at this turn."""
        ...


@dataclass(frozen=True, kw_only=True)
class ForkMoment:
    """What a brancher may see of a rollout that has just sampled a turn after a tool result.

    `key` names the rollout in its group: its sample, then one number per fork. `turn` is the turn just sampled, from 1
    (so it is at least 2 here). `entropies[t - 1]` are the entropies of turn t, one per token, over the full vocabulary
    in nats (an engine that sees only the likeliest tokens estimates them). `budget` is how many leaves may still be
    added below this rollout. Random draws of a brancher are keyed by `seed` and (task, key, turn).
    """

    task_id: str
    key: tuple[int, ...]
    turn: int
    max_turns: int
    budget: int
    entropies: tuple[tuple[float, ...], ...]
    seed: int
    iteration: int = 0


@dataclass(frozen=True, kw_only=True)
class BranchDecision:
    """`branches` rollouts continue after the first `shared` tokens of the turn, the rollout itself included (1: no
    fork). Path weights stay unbiased if the decision used nothing after these tokens (docs/design/branching.md)."""

    branches: int
    reason: str
    numbers: dict[str, float]
    shared: int = 0

    def __post_init__(self) -> None:
        made_plain(self, branches=_whole, numbers=_known, shared=_whole)


class Brancher(Protocol):
    """Decides where a tree forks (ARPO, adaptive rollout). `--brancher` names it, registered or as module:object.

    `decide` is asked after every turn that follows a tool result and may fork (those of a refill may not, nor the first
    turn of a new fork), also where the budget is spent. Leaves that no fork adds become fresh rollouts. Decisions must
    depend only on their arguments and on earlier iterations, never on the order of the calls. A subclass overrides what
    it needs; the base class learns nothing.
    """

    splits_turns: bool = False
    """Whether branches may share the first tokens of the turn in which they fork."""
    probe_tokens: int = 0
    """How many tokens a turn must have to fork."""
    biased: bool = False
    """Whether forks are chosen by what was sampled below them."""
    prompt_wide: bool = False
    """Whether the rollouts of a group draw on one budget, first come, first served; else it is divided down the tree,
    and a fork depends on its own history only."""
    reads_entropies: bool = False
    """Whether it decides by entropies, which not every server tells."""

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        """None: nothing to decide at this turn."""
        ...

    def state(self) -> dict[str, Any]:
        """A JSON value of what was learned from earlier iterations, for `restore`."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """What a filter may see of a group that has ended. `rewards` has one entry per rollout, None where it is censored
    (every rollout of a group that a gate cut is). `credit` is the credit that the update would use; None where there
    is nothing to compare."""

    task_id: str
    iteration: int
    rewards: tuple[float | None, ...]
    credit: Credit | None = None


class Filter(Protocol):
    """Decides which tasks are played (GRESO) and which finished groups are learned from (DAPO, section 3.2).

    A subclass overrides what it needs; the base class filters nothing. `skip` and `drop` return a reason or None.
    Reasons are few fixed texts, because groups are counted by reason. They depend only on their arguments and on the
    groups passed to `finished`, in any order within an iteration, so the same call gives the same answer. Censored
    groups never reach `drop`: they have no credit.
    """

    refill_cap: float = 0.0
    """How many replacement groups an iteration may start for dropped ones, as a multiple of its groups (0: none)."""

    def skip(self, task_id: str, iteration: int) -> str | None:
        """Why a task is not played now; it comes again in the next epoch."""
        return None

    def drop(self, group: FinishedGroup) -> str | None:
        """Why a finished group stays out of the update."""
        return None

    def finished(self, group: FinishedGroup) -> None:
        """Called with every finished group of an iteration, dropped ones included."""
        return None

    def end_iteration(self) -> None:
        """Called once all groups of an iteration are finished."""
        return None

    def state(self) -> dict[str, Any]:
        """A JSON value of what was learned so far, for `restore`."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        return None


class Estimator(Protocol):
    """Labels nodes with credit from the rewards of leaves."""

    def __call__(self, tree: RolloutTree, rewards: Rewards) -> Credit: ...
