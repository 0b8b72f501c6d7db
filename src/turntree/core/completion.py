"""The requests to an engine and its completions, in token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from turntree.core.config import Amount, Bounded, Positive, made_plain
from turntree.core.cost import Cost
from turntree.core.errors import TurntreeError

LARGEST_LOGPROB = 1e30  # of a log-probability or an entropy, which training and trees on disk can hold
NARROW = 128  # experts of a layer, up to which the number of one is a byte


@dataclass(frozen=True, kw_only=True)
class Sampling(Bounded):
    """How to sample: always from softmax(logits / temperature) itself, the policy of the loss."""

    temperature: Amount = 1.0
    """0 is greedy."""
    max_tokens: Positive = 64
    """Longest completion; longer ones are cut."""


class Guide(Protocol):
    """Where one completion ends beside its stop tokens, and which tokens it may hold. An engine in this process asks it
    before every draw and tells it every token, from its own thread; a server is told `stop` and `grammar`. A guide is
    made for one request and used once.
    """

    stop: tuple[str, ...]
    """The texts that end it."""
    grammar: Mapping[str, Any] | None
    """What restricts it, as vLLM's `structured_outputs` says it; None: nothing does."""

    def allowed(self) -> bytes | None:
        """A bit a token (the lowest of a byte first): whether it may come next. None: every token may."""
        ...

    def take(self, token: int) -> bool:
        """A token was drawn; whether the completion ends with it. Raises `TurntreeError` for one that is forbidden."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One completion of `prompt_ids`. `seed` decides every draw, independent of other requests in the wave."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    retain: bool = False  # a later request may extend this sequence: keep its keys and values
    guide: Guide | None = None

    def longest(self, max_context: int) -> int:
        """The most tokens that it may sample in a context of so many."""
        return min(self.sampling.max_tokens, max_context - len(self.prompt_ids))


def _integers(values: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError as error:
        raise TurntreeError(f"a completion has token ids that are none: {error}") from error


def _floats(values: Iterable[Any]) -> tuple[float, ...]:
    try:
        return tuple([value.__float__() + 0.0 for value in values])  # a text has none
    except (TypeError, AttributeError) as error:
        raise TurntreeError(f"a completion has log-probabilities or entropies that are none: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Sampled token ids (at least one) with their statistics; all three sequences have the same length.

    `logprobs[t]` is log softmax(logits / temperature)[token] in nats (temperature 1 for greedy), `entropies[t]` the
    full-vocabulary entropy of that same distribution in nats. Where a grammar (`Guide.allowed`) forbids tokens, both
    are those of the distribution over the others. `finish` is "stop" when the last token is a stop token, "text" when
    a text of `Guide.stop` ended it, "length" when `max_tokens` cut it.

    `routes` are the experts that computed the tokens before the last one in a mixture, prompt included, as far back as
    they are told. Those of a token are in base64: the numbers of its experts, layer by layer, signed and little-endian,
    in 1 byte each (2 where a layer has more than `NARROW`).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    finish: Literal["stop", "text", "length"]
    policy_version: int = 0
    cost: Cost = field(default_factory=Cost)
    routes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises `TurntreeError` for what no engine may give: the mistake is the engine's, and none of turntree."""
        made_plain(self, token_ids=_integers, logprobs=_floats, entropies=_floats)
        if not len(self.token_ids) == len(self.logprobs) == len(self.entropies):
            raise TurntreeError("a completion needs one log-probability and one entropy per token")
        if not self.token_ids:  # it would end its rollout as a cut turn, with reward 0
            raise TurntreeError("a completion needs at least one token; an engine that gave none returns a fault")
        if min(self.token_ids) < 0:
            raise TurntreeError("a completion has a token id below 0")
        if not all(abs(value) < LARGEST_LOGPROB for value in (*self.logprobs, *self.entropies)):
            raise TurntreeError("a completion has a log-probability or an entropy that is nan or not finite")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of one submitted request: a completion, or the fault that kept the engine from giving one."""

    ticket: int
    completion: Completion | None = None
    fault: str | None = None

    def __post_init__(self) -> None:
        if (self.completion is None) == (self.fault is None):
            raise ValueError("a finished request has either a completion or a fault")
