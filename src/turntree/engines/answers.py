"""What a completions server answers, read as token ids with their statistics, and what it says when it refuses.

The sampled ids come from the server where it reports them (`return_token_ids`, or tokens written as "token_id:123").
Other servers return only text, which is tokenised here: good enough to read an action, but not to train on, so `exact`
is then False. Log-probabilities are those that the server reports (at a temperature other than 1 many servers report
them before the temperature is applied). Entropies are *estimates*: the middle of the range that the reported top
log-probabilities allow (`entropy_bounds`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from turntree.core.completion import Completion, GenerationRequest
from turntree.core.errors import ConfigError, InputError
from turntree.engines.requests import cost_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answer = Mapping[str, Any]  # the body of an answer


class Unusable(Exception):
    """An answer that is not a completion."""


class AnswerReader:
    """Reads the answers of one model. `top_logprobs` of them are used for the entropy of a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int], top_logprobs: int) -> None:
        self.stop_ids, self.exact, self.vocabulary = frozenset(stop_ids), True, len(tokenizer)
        self.reported = True  # whether every log-probability so far was the server's
        self.known = max(tokenizer.get_vocab().values()) + 1  # above `vocabulary` where ids have gaps (Phi-4-mini)
        self._tokenizer, self._top_logprobs = tokenizer, top_logprobs

    def read(self, request: GenerationRequest, answer: Answer, version: int) -> Completion:
        """Raises `Unusable` for an answer without a proper ending, or without tokens."""
        choice = (answer.get("choices") or [{}])[0]
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise Unusable(f"the server ended with {reason!r}, which is neither 'stop' nor 'length'")
        ids, statistics = self.tokens(choice)
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), None)
        if end is not None:
            ids, statistics = ids[: end + 1], statistics[: end + 1]
        elif reason == "stop":  # a server that keeps the stop token to itself
            ids, statistics = [*ids, self._stop_id(choice)], [*statistics, self._unreported()]
        if not ids:
            raise Unusable("the server sampled nothing")
        finish: Literal["stop", "length"] = "stop" if ids[-1] in self.stop_ids else "length"
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        prefilled = len(request.prompt_ids) - min(len(request.prompt_ids), details.get("cached_tokens") or 0)
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(logprob for logprob, _ in statistics),
            entropies=tuple(entropy for _, entropy in statistics),
            finish=finish,
            policy_version=version,
            cost=cost_of(request, decoded=len(ids), prefilled=prefilled),
        )

    def tokens(self, choice: Answer) -> tuple[list[int], list[tuple[float, float]]]:
        """The sampled ids with (log-probability, entropy) each."""
        reported = choice.get("logprobs") or {}
        names: list[str] = reported.get("tokens") or []
        ids: list[int] | None = choice.get("token_ids")
        if ids is None and names and all(name.startswith("token_id:") for name in names):
            ids = [int(name.removeprefix("token_id:")) for name in names]
        if ids is None:
            self.exact = False
            ids = list(self._tokenizer.encode(choice.get("text") or "", add_special_tokens=False))
        logprobs: list[float | None] = reported.get("token_logprobs") or []
        tops: list[Mapping[str, float] | None] = reported.get("top_logprobs") or []
        if len(logprobs) != len(ids):  # text that is cut into other tokens here than there
            return ids, [self._unreported()] * len(ids)
        tops = [*tops, *[None] * (len(ids) - len(tops))]
        return ids, [self._statistics(logprob, top) for logprob, top in zip(logprobs, tops, strict=False)]

    def check_vocabulary(self, completion: Completion, model: str) -> None:
        """Raise `ConfigError` for a token that the tokenizer does not know: then the tokenizer belongs to another model
        and decodes the server's tokens wrongly."""
        largest = max(completion.token_ids)
        if largest >= self.known:
            raise ConfigError(
                f"knows {self.known:,} tokens, and the server answers with token {largest:,}",
                field="endpoint.tokenizer",
                hint=f"name the folder with the tokenizer of {model!r} (--tokenizer)",
            )

    def _statistics(self, logprob: float | None, top: Mapping[str, float] | None) -> tuple[float, float]:
        if logprob is None:
            return self._unreported()
        if not math.isfinite(logprob) or any(map(math.isnan, (top or {}).values())):
            raise Unusable("the server reports log-probabilities that are not finite: its policy may have diverged")
        low, high = entropy_bounds(sorted((top or {}).values(), reverse=True)[: self._top_logprobs], self.vocabulary)
        return min(0.0, logprob), (low + high) / 2

    def _unreported(self) -> tuple[float, float]:
        """For a token without reported statistics: log-probability 0, and the middle of the possible entropies."""
        self.reported = False
        return 0.0, math.log(self.vocabulary) / 2

    def _stop_id(self, choice: Answer) -> int:
        for candidate in (choice.get("stop_reason"), self._tokenizer.eos_token_id):
            if isinstance(candidate, int) and candidate in self.stop_ids:
                return candidate
        return min(self.stop_ids)


# refusals

# of 4xx, those of one request alone (it is too long for the server), and those that another time may end well
_ONE_REQUEST, _PASSING = (400, 413), (408, 409, 425, 429)
_KEY = "set OPENAI_API_KEY to a key that it takes"
_CHECK = "use a server that takes prompts of token ids and vLLM's fields (vLLM does, `transformers serve` does not)"
_ADVICE = {
    401: _KEY,
    403: _KEY,
    404: "check the URL (most end in /v1) and --model, which is the name that the server gives the model",
}


def status_of(error: Exception) -> int | None:
    """The HTTP status of an error, where a server answered."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def refusal(error: Exception, url: str) -> InputError | None:
    """The end of the run, if the error means that the server refuses every request of it; else None."""
    status = status_of(error)
    if status is None or not 400 <= status < 500 or status in (*_ONE_REQUEST, *_PASSING):
        return None
    problem = f"the server refuses the request (HTTP {status}: {words_of(error)})"
    return InputError(problem, path=url, hint=_ADVICE.get(status, _CHECK))


def words_of(error: Exception) -> str:
    """The error message of the server, else that of the connection."""
    body: Any = getattr(error, "body", None)
    if isinstance(body, Mapping):
        row = cast("Mapping[str, Any]", body)
        body = next((row[name] for name in ("message", "detail", "error") if row.get(name)), row)
    if body:
        return one_line(body if isinstance(body, str) else json.dumps(body, default=str))
    cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ is not None else ""
    return one_line(f"{error}{cause}")


def fault_of(error: Exception) -> str:
    """One line for a request that failed."""
    status = status_of(error)
    said = words_of(error)
    with_status = f"{status} {said}" if status is not None and getattr(error, "body", None) else said
    return one_line(f"{type(error).__name__}: {with_status}")


def one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:299]}…"


# entropies


def entropy_bounds(top_logprobs: Sequence[float], vocabulary: int) -> tuple[float, float]:
    """The least and the largest entropy (nats) of a distribution over `vocabulary` tokens with these largest
    log-probabilities.

    The entropy is least where the remaining mass lies in as few tokens as possible, none likelier than the least of the
    given ones, and largest where it is spread evenly over all other tokens. Without any given: (0, log vocabulary).

    >>> entropy_bounds([math.log(0.5), math.log(0.5)], 100) == (math.log(2), math.log(2))
    True
    """
    if not top_logprobs:
        return 0.0, math.log(vocabulary)
    largest = [math.exp(min(0.0, logprob)) for logprob in top_logprobs]
    known, rest, others = _entropy(largest), max(0.0, 1 - math.fsum(largest)), vocabulary - len(largest)
    cap = min(largest)
    if rest < 1e-9 or others <= 0 or cap == 0.0:
        return known, known
    full = int(rest / cap)
    low = known + full * _entropy([cap]) + _entropy([max(0.0, rest - full * cap)])
    return low, max(low, known + rest * math.log(others / rest))


def _entropy(probabilities: Sequence[float]) -> float:
    return -math.fsum(p * math.log(p) for p in probabilities if p > 0)
