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
from turntree.engine.requests import cost_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answer = Mapping[str, Any]  # the body of an answer
_ECHO = 8  # tokens: no answer repeats so long a prompt by chance
_NEVER = -9999.0  # a log-probability of minus infinity, as servers write it in JSON
_ROUNDING = 1e-3


class Unusable(Exception):
    """An answer that is not a completion."""


class AnswerReader:
    """Reads the answers of one model. `top_logprobs` of them are used for the entropy of a token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int], top_logprobs: int = 5) -> None:
        self.stop_ids, self.exact, self.vocabulary = frozenset(stop_ids), True, len(tokenizer)
        self.reported = True  # whether every log-probability so far was the server's
        self.known = max(tokenizer.get_vocab().values()) + 1  # above `vocabulary` where ids have gaps (Phi-4-mini)
        self._tokenizer, self.top_logprobs = tokenizer, top_logprobs

    def read(self, request: GenerationRequest, answer: Answer, version: int) -> Completion:
        """Raises `Unusable`, naming what is wrong, for whatever is not one completion of this request."""
        choice, usage = choice_of(answer), _object(answer, "usage")
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise Unusable(f"the server ended with {reason!r}, which is neither 'stop' nor 'length'")
        ids, statistics, given = self.tokens(choice)
        if given:
            _check_sampled(request, ids, _whole(usage, "completion_tokens"), stopped=reason == "stop")
        seen, echoed = _whole(usage, "prompt_tokens"), choice.get("prompt_token_ids")
        if seen not in (None, len(request.prompt_ids)) or echoed not in (None, list(request.prompt_ids)):
            told = "" if seen is None else f" ({seen} tokens, and {len(request.prompt_ids)} were sent)"
            raise Unusable(f"the server answers another prompt than it was sent{told}")
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), None)
        if end is not None:
            ids, statistics = ids[: end + 1], statistics[: end + 1]
        elif reason == "stop":  # a server that keeps the stop token to itself
            ids, statistics = [*ids, self._stop_id(choice)], [*statistics, self._unreported()]
        if not ids:
            raise Unusable("the server sampled nothing")
        finish: Literal["stop", "length"] = "stop" if ids[-1] in self.stop_ids else "length"
        cached = _whole(_object(usage, "prompt_tokens_details"), "cached_tokens") or 0
        prefilled = len(request.prompt_ids) - min(len(request.prompt_ids), cached)
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(logprob for logprob, _ in statistics),
            entropies=tuple(entropy for _, entropy in statistics),
            finish=finish,
            policy_version=version,
            cost=cost_of(request, decoded=len(ids), prefilled=prefilled),
        )

    def tokens(self, choice: Answer) -> tuple[list[int], list[tuple[float, float]], bool]:
        """The sampled ids with (log-probability, entropy) each, and whether the ids are the server's."""
        reported = _object(choice, "logprobs")
        ids, given = _ids(choice, _list(reported, "tokens")), True
        if ids is None:
            text = choice.get("text") or ""
            if not isinstance(text, str):
                raise Unusable(f"the server's text is {_short(text)}")
            self.exact = given = False
            ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        logprobs, tops = _list(reported, "token_logprobs"), _list(reported, "top_logprobs")
        if not logprobs or (len(logprobs) != len(ids) and not given):  # text is cut into other tokens here than there
            return ids, [self._unreported()] * len(ids), given
        if len(logprobs) != len(ids) or len(tops) not in (0, len(ids)):
            counts = f"{len(logprobs)} log-probabilities and {len(tops)} lists of the likeliest"
            raise Unusable(f"the server reports {counts} for {len(ids)} tokens")
        tops = tops or [None] * len(ids)
        return ids, [self._statistics(logprob, top) for logprob, top in zip(logprobs, tops, strict=True)], given

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

    def _statistics(self, logprob: Any, top: Any) -> tuple[float, float]:
        if not isinstance(top, Mapping | None):
            raise Unusable(f"the likeliest tokens are {_short(top)}")
        likeliest = [_logprob(value) for value in cast("Mapping[str, Any]", top or {}).values()]
        own = _logprob(logprob)
        if not math.isfinite(own) or any(map(math.isnan, likeliest)):
            raise Unusable("the server reports log-probabilities that are not finite: its policy may have diverged")
        if own <= _NEVER:
            raise Unusable(f"the server says that it drew a token of probability 0 (log-probability {own:g})")
        low, high = entropy_bounds(sorted(likeliest, reverse=True)[: self.top_logprobs], self.vocabulary)
        return own, (low + high) / 2

    def _unreported(self) -> tuple[float, float]:
        """For a token without reported statistics: log-probability 0, and the middle of the possible entropies."""
        self.reported = False
        return 0.0, math.log(self.vocabulary) / 2

    def _stop_id(self, choice: Answer) -> int:
        for candidate in (choice.get("stop_reason"), self._tokenizer.eos_token_id):
            if isinstance(candidate, int) and candidate in self.stop_ids:
                return candidate
        return min(self.stop_ids)


# what an answer holds: whatever is not as it must be is `Unusable`, by name


def choice_of(answer: Answer) -> Answer:
    """The one choice of an answer."""
    choices = answer.get("choices")
    if answer.get("error"):
        raise Unusable(f"the server answered with an error: {_told(answer)}")
    if not isinstance(choices, list) or not all(isinstance(one, Mapping) for one in cast("list[Any]", choices)):
        raise Unusable(f"the answer holds no list of choices but {_short(choices)}")
    found = cast("list[Answer]", choices)
    if [one.get("index", 0) for one in found] != [0]:
        raise Unusable(f"the server gives the choices {[one.get('index', 0) for one in found]}, and 0 was asked for")
    return found[0]


def _ids(choice: Answer, names: list[Any]) -> list[int] | None:
    """The sampled ids that a server reports, as numbers or in the names of tokens; None for text alone."""
    found: list[list[Any]] = []
    if names and all(isinstance(name, str) and name.startswith("token_id:") for name in names):
        digits = [name.removeprefix("token_id:") for name in names]
        found.append([int(one) if one.isdecimal() and len(one) < 16 else one for one in digits])
    if choice.get("token_ids") is not None:
        found.append(_list(choice, "token_ids"))
    for ids in found:
        if wrong := [one for one in ids if type(one) is not int or one < 0]:
            raise Unusable(f"the server reports {_short(wrong[0])} as the id of a token")
        if ids != found[0]:
            raise Unusable("the server reports other ids of tokens than their names say")
    return found[0] if found else None


def _check_sampled(request: GenerationRequest, ids: list[int], counted: int | None, *, stopped: bool) -> None:
    """Whether these ids are what was sampled: no more than were asked for or counted, and not the prompt."""
    count, prompt = len(ids), list(request.prompt_ids)
    if len(prompt) >= _ECHO and ids[: len(prompt)] == prompt:
        raise Unusable("the answer begins with the prompt: the server echoes it")
    if count > request.sampling.max_tokens:
        raise Unusable(f"the server gives {count} tokens, and {request.sampling.max_tokens} were asked for")
    if counted is not None and counted not in (count, count + stopped):  # the stop token may be left out
        raise Unusable(f"the server gives {count} tokens, and says that it sampled {counted}")


def _object(row: Answer, name: str) -> Answer:
    value = row.get(name)
    if not isinstance(value, Mapping | None):
        raise Unusable(f"{name!r} of the answer is {_short(value)}, and no object")
    return cast("Answer", value or {})


def _list(row: Answer, name: str) -> list[Any]:
    value = row.get(name)
    if not isinstance(value, list | None):
        raise Unusable(f"{name!r} of the answer is {_short(value)}, and no list")
    return cast("list[Any]", value or [])


def _whole(row: Answer, name: str) -> int | None:
    value = row.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise Unusable(f"{name!r} of the answer is {_short(value)}, and no whole number")
    return value


def _logprob(value: Any) -> float:
    """At most 0 (a little above it is rounding), or NaN."""
    if type(value) not in (int, float) or value > _ROUNDING:
        raise Unusable(f"the server reports {_short(value)} as a log-probability")
    return 0.0 if value > 0 else float(max(value, -1.7e308) if isinstance(value, int) else value)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:59]}…"


# refusals

# of 4xx, those of one request alone (it is too long for the server), and those that another time may end well
_ONE_REQUEST, _PASSING = (400, 413), (408, 409, 425, 429)
_KEY = "set OPENAI_API_KEY to a key that it takes"
_LONGEST_WAIT = 120.0  # seconds
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
    if status is None or not 300 <= status < 500 or status in (*_ONE_REQUEST, *_PASSING):
        return None
    if status < 400:
        place = error.response.headers.get("location", "")  # pyright: ignore[reportAttributeAccessIssue]
        problem = one_line(f"the server redirects requests (HTTP {status}) to {place}")
        return InputError(problem, path=url, hint="give the URL of the server that answers them")
    problem = f"the server refuses the request (HTTP {status}: {words_of(error)})"
    return InputError(problem, path=url, hint=_ADVICE.get(status, _CHECK))


def pause_before(error: Exception, tries: int) -> float | None:
    """The seconds after which a request is tried again that failed `tries` times: what the server asks for
    (`Retry-After`), or more each time. None where it would fail again, and where the server asks for too long."""
    import openai

    status, asked = status_of(error), ""
    if status is None and not isinstance(error, openai.APIConnectionError):
        return None
    if status is not None:
        if status < 500 and status not in _PASSING:
            return None
        asked = error.response.headers.get("retry-after", "")  # pyright: ignore[reportAttributeAccessIssue]
    wait = float(asked) if asked.isdecimal() and len(asked) < 9 else min(8.0, 0.25 * 2**tries)
    return wait if wait <= _LONGEST_WAIT else None


def words_of(error: Exception) -> str:
    """The error message of the server, else that of the connection."""
    if body := getattr(error, "body", None):
        return _told(body)
    cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ is not None else ""
    return one_line(f"{error}{cause}")


def _told(body: Any) -> str:
    """What the body of a refusal says."""
    for _ in range(2):
        if isinstance(body, Mapping):
            row = cast("Mapping[str, Any]", body)
            body = next((row[name] for name in ("message", "detail", "error") if row.get(name)), row)
    try:
        return one_line(body if isinstance(body, str) else json.dumps(body, default=str))
    except (RecursionError, ValueError):
        return f"a {type(body).__name__}"


def fault_of(error: Exception) -> str:
    """One line for a request that failed: what the server said, with its status."""
    if isinstance(error, Unusable):
        return one_line(str(error))
    status, said = status_of(error), words_of(error)
    if status is None:
        return one_line(f"{type(error).__name__}: {said}")
    wait = error.response.headers.get("retry-after")  # pyright: ignore[reportAttributeAccessIssue]
    return one_line(f"HTTP {status}: {said}{f' (it asks to wait {wait} s)' if wait else ''}")


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
