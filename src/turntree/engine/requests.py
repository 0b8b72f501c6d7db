"""The checks of requests that every engine makes before it computes anything, the wait for what an engine finishes, and
the cost of a request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from turntree.core.completion import Finished, GenerationRequest
from turntree.core.cost import Cost
from turntree.core.errors import InputError, TurntreeError
from turntree.core.foreign import call_part
from turntree.core.protocols import StreamingEngine


class ContextOverflow(InputError):
    """A prompt leaves no room for a completion; callers end such rollouts before (`engine.max_context`)."""


def check_requests(requests: Sequence[GenerationRequest], *, vocab_size: int, max_context: int) -> None:
    """Raise `ContextOverflow` for a prompt of `max_context` tokens or more, `InputError` for an empty prompt or a
    token id that the model does not have."""
    for index, request in enumerate(requests):
        size = len(request.prompt_ids)
        if size >= max_context:
            raise ContextOverflow(
                f"request {index} has a prompt of {size} tokens, the context holds {max_context}",
                hint="end such rollouts before they reach the engine (engine.max_context)",
            )
        if not size or not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
            raise InputError(
                f"request {index} has an empty prompt or a token id outside 0..{vocab_size - 1}",
                hint="render prompts with the tokenizer of this model",
            )


def polled(engine: StreamingEngine, waiting: Collection[int], timeout: float | None = None) -> list[Finished]:
    """What `engine.poll` gives to one who waits for these tickets. Raises `TurntreeError` where the engine has lost
    them, which would never come, and for a ticket that nobody waits for."""
    if waiting and not engine.in_flight:
        told = f"the engine lost {len(waiting)} requests"
        raise TurntreeError(f"{told}: its in_flight is 0, and `poll` never returned them")
    found: Any = call_part("engine", engine.poll, timeout)
    seen = set[int]()
    if not isinstance(found, list) or not all(isinstance(each, Finished) for each in cast("list[Any]", found)):
        raise TurntreeError("the engine's `poll` gave something that is not a list of finished requests")
    for finished in cast("list[Finished]", found):
        if finished.ticket not in waiting or finished.ticket in seen:
            raise TurntreeError(f"the engine returned ticket {finished.ticket}, which nobody waits for")
        seen.add(finished.ticket)
    return cast("list[Finished]", found)


def check_idle(in_flight: int) -> None:
    """Raise `TurntreeError` while requests are in flight: a completion is sampled by one policy."""
    if in_flight:
        raise TurntreeError(f"requests are in flight ({in_flight}); poll or cancel them before the weights change")


def hashes_of_prefixes(ids: tuple[int, ...], stride: int) -> list[int]:
    """Chained hashes of the prefixes of length stride, 2 stride, ... (ints hash alike in every process)."""
    hashes: list[int] = []
    for end in range(stride, len(ids) + 1, stride):
        hashes.append(hash((hashes[-1] if hashes else end, ids[end - stride : end])))
    return hashes


def cost_of(request: GenerationRequest, *, decoded: int, prefilled: int, seconds: float = 0.0) -> Cost:
    """The cost of one model call. Positions of its prompt that were not prefilled for it count as reused."""
    return Cost(
        turns=1,
        decoded_tokens=decoded,
        prefilled_tokens=prefilled,
        reused_tokens=len(request.prompt_ids) - prefilled,
        engine_seconds=seconds,
    )
