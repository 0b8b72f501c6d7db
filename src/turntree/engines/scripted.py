"""An engine without a model: its answers come from a function. For tests, tutorials and dry runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from turntree.core.completion import Completion, GenerationRequest
from turntree.core.cost import Cost
from turntree.core.errors import InputError
from turntree.engines.requests import check_requests


@dataclass(frozen=True)
class ScriptedAnswer:
    """Token ids with statistics of one's own; None stands for the uniform distribution over the vocabulary."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None


Answer = Callable[[tuple[int, ...], int], Sequence[int] | ScriptedAnswer]


class ScriptedEngine:
    """`core.protocols.Engine` whose completion of (prompt_ids, seed) is whatever `answer` returns.

    An answer is cut after its first stop token or after `max_tokens`; one that ends before either is an `InputError`,
    because no model does that. Equal prompts of a wave are charged once, as a real engine would.

    >>> engine = ScriptedEngine(lambda prompt, seed: (7, 0), stop_ids={0}, vocab_size=10)
    """

    def __init__(
        self,
        answer: Answer,
        stop_ids: Collection[int],
        *,
        vocab_size: int,
        policy_version: int = 0,
        max_context: int = 4096,
    ) -> None:
        self.stop_ids = frozenset(stop_ids)
        self.max_context = max_context
        self._answer, self._vocabulary, self._version = answer, vocab_size, policy_version

    @classmethod
    def from_scripts(
        cls,
        scripts: Mapping[tuple[int, ...], Sequence[Sequence[int]]],
        stop_ids: Collection[int],
        *,
        vocab_size: int,
    ) -> ScriptedEngine:
        """Answers by prompt; where there are several, the seed picks one (`seed % number`)."""

        def answer(prompt: tuple[int, ...], seed: int) -> Sequence[int]:
            if prompt not in scripts:
                raise InputError(f"no script answers the prompt {prompt}", hint="add it to the scripts")
            return scripts[prompt][seed % len(scripts[prompt])]

        return cls(answer, stop_ids, vocab_size=vocab_size)

    @property
    def policy_version(self) -> int:
        return self._version

    def weights_changed(self, policy_version: int) -> None:
        self._version = policy_version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        check_requests(requests, vocab_size=self._vocabulary, max_context=self.max_context)
        charged: set[tuple[int, ...]] = set()
        completions: list[Completion] = []
        for request in requests:
            new = 0 if request.prompt_ids in charged else len(request.prompt_ids)
            charged.add(request.prompt_ids)
            completions.append(self._complete(request, new))
        return completions

    def _complete(self, request: GenerationRequest, new: int) -> Completion:
        answer = self._answer(request.prompt_ids, request.seed)
        if not isinstance(answer, ScriptedAnswer):
            answer = ScriptedAnswer(tuple(answer))
        stop = next((k for k, token in enumerate(answer.token_ids) if token in self.stop_ids), None)
        room = min(request.sampling.max_tokens, self.max_context - len(request.prompt_ids))
        count = room if stop is None else min(stop + 1, room)
        if len(answer.token_ids) < count:
            raise InputError(
                f"the script answers {len(answer.token_ids)} tokens without a stop token, {room} were to be sampled",
                hint="end it with a stop token",
            )
        uniform = math.log(self._vocabulary)
        return Completion(
            token_ids=answer.token_ids[:count],
            logprobs=(answer.logprobs or (-uniform,) * count)[:count],
            entropies=(answer.entropies or (uniform,) * count)[:count],
            finish="stop" if stop is not None and stop < count else "length",
            policy_version=self._version,
            cost=Cost(
                turns=1,
                decoded_tokens=count,
                prefilled_tokens=new,
                reused_tokens=len(request.prompt_ids) - new,
            ),
        )
