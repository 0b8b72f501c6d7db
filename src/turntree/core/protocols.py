"""The protocols between the parts. One contract test suite each, run over every implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from turntree.core.completion import Completion, Finished, GenerationRequest
from turntree.core.cost import Cost
from turntree.core.labels import Credit, Rewards
from turntree.core.messages import Message
from turntree.core.tree import RolloutTree
from turntree.core.verdict import Verdict


class Engine(Protocol):
    """Token ids in, token ids out. The engine knows nothing about text.

    `generate` answers a wave of fixed membership, in order. A completion depends on its own request and the weights
    only (up to floating-point rounding of batched kernels), never on its neighbours' draws.
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
        engine that samples from this very module takes nothing over; one elsewhere copies or sends them."""
        ...

    def weights_changed(self, policy_version: int) -> None:
        """Drop every kept key and value, stamp later completions with the version."""
        ...


class StreamingEngine(Engine, Protocol):
    """An engine whose requests come and go one by one: what a scheduler of many groups drives.

    Laws (contract suite): every submitted ticket that is not cancelled is returned by `poll` exactly once; a
    completion is the one that `generate` gives for the same request, whatever else is in flight; requests are
    admitted in the order of submission; a cancelled ticket frees its place at once and is never returned.
    `weights_changed` raises `TurntreeError` while anything is in flight: a completion is sampled by one policy.
    """

    @property
    def in_flight(self) -> int:
        """Requests submitted and neither returned nor cancelled."""
        ...

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request; returns its ticket. Raises `InputError` for a request that `generate` would refuse."""
        ...

    def cancel(self, ticket: int) -> Cost:
        """Give a request up wherever it is; returns what it cost so far (nothing if it was not admitted yet, or is
        unknown because it was returned before)."""
        ...

    def poll(self, timeout: float | None = None) -> list[Finished]:
        """Advance until at least one request is finished and return those that are, in order of submission; empty
        when nothing is in flight, or after `timeout` seconds (0: do the least piece of work there is)."""
        ...


class Renderer(Protocol):
    """Messages to tokens and back, incrementally: sampled tokens are never tokenised again.

    A renderer may refuse messages that it cannot write with `InputError`. What it raises in a run censors the rollout.
    """

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        """Token ids of the conversation so far, ending where the assistant starts to speak."""
        ...

    def completion(self, message: Message) -> tuple[int, ...]:
        """The token ids with which the policy would have said this assistant message, stop token included."""
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
        arrive, ending where the assistant speaks again. `stopped` says that the stop token was sampled."""
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()) -> Message:
        """The assistant message in sampled tokens; text that is no valid tool call stays text. `tools` are those of the
        prompt: where a family writes arguments without quotes, their schema says whether `true` is a text."""
        ...


@dataclass(frozen=True)
class Observation:
    """What an environment answers to an assistant message.

    `reward` is that of an episode which ends here, of its own or at a limit, where success alone does not say it
    (None: 1 for success, 0 otherwise). `metrics` are numbers of the domain about this step (1.0 for an impossible
    command); evaluations report their mean over steps.
    """

    messages: tuple[Message, ...]
    done: bool
    success: bool | None = None  # known once done
    progress: float | None = None  # how far the task is done, in [0, 1], where the environment knows
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # what the domain counts for itself


class Environment(Protocol):
    """One episode of one task; single use: reset it, step it until done. `fork` copies it mid-episode."""

    @property
    def task_id(self) -> str: ...

    @property
    def tools(self) -> tuple[dict[str, Any], ...]: ...

    def reset(self) -> tuple[Message, ...]: ...

    def step(self, action: Message) -> Observation: ...

    def fork(self) -> Environment: ...


class TurnVerifier(Protocol):
    """Judges one assistant action at a state inside a demonstration (PivotRL, Eq. 6).

    `name` identifies the rule and its version: profiles record it, and re-scoring depends on it.
    """

    @property
    def name(self) -> str: ...

    def judge(self, state: TurnState, action: Message) -> Verdict: ...


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
    """What a gate may see of a group in flight: its independent roots only (branched siblings share their prefix).

    One entry per rollout, in order of sample. `observations[i][t]` is what rollout i saw before its action t + 1
    (index 0: the task itself). `progress` is an optional signal of the environment in [0, 1]. `iteration`
    and `occurrence` (groups of the task begun before in the iteration) tell the groups of one task apart, so that what
    a gate draws at random is drawn anew for each.
    """

    task_id: str
    max_turns: int
    actions: tuple[tuple[str, ...], ...]
    observations: tuple[tuple[str, ...], ...]
    finished: tuple[bool, ...]
    progress: tuple[float | None, ...]
    iteration: int = 0
    occurrence: int = 0


@dataclass(frozen=True, kw_only=True)
class GateDecision:
    """`cut` stops the whole group now; `numbers` are what the gate saw. `final`: the gate need not be asked again.

    `audited`: the gate would have cut, and lets the group run on so that its precision can be measured.
    """

    cut: bool
    reason: str
    numbers: dict[str, float]
    final: bool
    audited: bool = False


class Gate(Protocol):
    """Decides mid-rollout whether a group has anything left to teach (Selective Rollout, section 3).

    Asked after every turn of the group that all its unfinished rollouts have completed.
    """

    def decide(self, group: GroupProgress) -> GateDecision | None:
        """None: nothing to decide at this turn."""
        ...


@dataclass(frozen=True, kw_only=True)
class ForkMoment:
    """What a brancher may see of a rollout that has just spoken after a tool result.

    `key` names the rollout in its group: its sample, then one number a fork. `turn` is the turn that it has just
    sampled, from 1 (so it is at least 2 here); `entropies[t - 1]` are those of turn t, one a token, over the full
    vocabulary in nats (an engine that is shown only the likeliest tokens estimates them). `budget` is how many leaves
    may still be added below this rollout. `seed` and (task, key, turn) key what a brancher draws.
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
class FinishedRollouts:
    """What a brancher may see of a group whose rollouts have all ended: how many turns each took, by key. `budget`
    leaves may still be added by branching; `round` counts how often it was asked before."""

    task_id: str
    turns: Mapping[tuple[int, ...], int]
    budget: int
    round: int
    seed: int
    iteration: int = 0


@dataclass(frozen=True, kw_only=True)
class BranchDecision:
    """`branches` go on from here, the rollout itself among them (1: no fork), after the first `shared` tokens of its
    turn. Path weights stay unbiased as long as nothing after these tokens was looked at (docs/design/branching.md)."""

    branches: int
    reason: str
    numbers: dict[str, float]
    shared: int = 0


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """One more rollout that shares the first `turn - 1` turns of the finished rollout `key` and samples turn `turn`
    anew; with `turn` 1 it shares nothing but the task."""

    key: tuple[int, ...]
    turn: int
    reason: str
    numbers: dict[str, float]


class Brancher(Protocol):
    """Decides where a tree forks (ARPO, adaptive rollout; Tree-GRPO, expansion).

    `decide` is asked after every turn that follows a tool result, also where the budget is spent, `expand` whenever
    all rollouts of a group have ended and leaves are missing. What neither uses is filled with fresh rollouts.
    Decisions must depend on what they are shown and on earlier iterations only, never on the order of the calls.
    """

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        """None: nothing to decide at this turn."""
        ...

    def expand(self, group: FinishedRollouts) -> Sequence[Expansion]: ...

    def state(self) -> dict[str, Any]:
        """A JSON value of what was learned from earlier iterations, for `restore`."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """What a filter may see of a group that has ended. `rewards` has one entry per rollout, None where it is censored
    (all of a group that a gate cut are). `credit` is what the update would learn; None where there is nothing to
    compare."""

    task_id: str
    iteration: int
    rewards: tuple[float | None, ...]
    credit: Credit | None = None


class Filter(Protocol):
    """Decides which tasks are played (GRESO) and which finished groups are learned from (DAPO, section 3.2).

    A subclass overrides what it needs; as it stands nothing is filtered. `skip` and `drop` give the reason, one of few
    fixed texts by which it is counted, or None. They depend on their arguments and on the groups that `finished` was
    told of, in any order within an iteration, so the same question has the same answer. Censored groups never reach
    `drop`: they have no credit.
    """

    refill_cap: float = 0.0
    """An iteration may start this many times its groups in further ones, for those that are dropped (0: none)."""

    def skip(self, task_id: str, iteration: int) -> str | None:
        """Why a task is not played now; it comes again in the next epoch."""
        return None

    def drop(self, group: FinishedGroup) -> str | None:
        """Why a finished group stays out of the update."""
        return None

    def finished(self, group: FinishedGroup) -> None:
        """Told every group of an iteration, those that are dropped too."""
        return None

    def end_iteration(self) -> None:
        """Told once all groups of an iteration are finished."""
        return None

    def state(self) -> dict[str, Any]:
        """A JSON value of what was learned so far, for `restore`."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        return None


class Estimator(Protocol):
    """Labels nodes with credit from the rewards of leaves."""

    def __call__(self, tree: RolloutTree, rewards: Rewards) -> Credit: ...
