"""What a completions server answers, read as token ids with their statistics, and what it says when it refuses.

The sampled ids come from the server where it reports them (`return_token_ids`, or tokens written as "token_id:123").
Other servers return only text, which is tokenised here: good enough to read an action, but not to train on, so `exact`
is then False. Log-probabilities are those that the server reports (at a temperature other than 1 many servers report
them before the temperature is applied). Entropies are *estimates*: the middle of the range that the reported top
log-probabilities allow (`entropy_bounds`).
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turntree.core.completion import NARROW, Completion, GenerationRequest
from turntree.core.errors import ConfigError, InputError
from turntree.engine.requests import cost_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOP_LOGPROBS = 5  # of a token, from which its entropy is estimated
_ECHO = 8  # tokens: no answer repeats so long a prompt by chance
NEVER = -9999.0  # a log-probability of minus infinity, as servers write it in JSON
_NAMED = re.compile(r"token_id:(\d{1,15})")


class Unusable(Exception):
    """An answer that is not a completion."""


class TooSlow(Unusable):
    """None that was whole in time."""


class _Row(BaseModel):
    model_config = ConfigDict(strict=True)


Count = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=1e-3, ge=-1e300, allow_inf_nan=False)]  # a little above 0 is rounding


class Logprobs(_Row):
    tokens: list[Any] | None = None
    token_logprobs: list[Logprob] | None = None
    top_logprobs: list[dict[str, Logprob] | None] | None = None


class Scored(_Row):
    logprob: Logprob


class Choice(_Row):
    index: Literal[0] = 0
    finish_reason: Literal["stop", "length"]
    text: str | None = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Scored] | None] | None = None
    stop_reason: Any = None
    logprobs: Logprobs | None = None
    routed_experts: str | None = None  # of every token but the last, as base64 of an .npy file

    @property
    def ids(self) -> list[int] | None:
        """The sampled ids that the server reports, as numbers or in the names of tokens; None for text alone."""
        names = (self.logprobs and self.logprobs.tokens) or []
        matches = [_NAMED.fullmatch(name) if isinstance(name, str) else None for name in names]
        named = [int(match[1]) for match in matches if match]
        if named and self.token_ids is not None and (named != self.token_ids or len(named) < len(names)):
            raise Unusable("the server reports other ids of tokens than their names say")
        if any(isinstance(name, str) and name.startswith("token_id:") for name in names) and len(named) < len(names):
            raise Unusable(f"the server names tokens that are no ids ({_short(names[matches.index(None)])})")
        return self.token_ids if self.token_ids is not None else named or None

    @property
    def largest(self) -> list[float]:
        """The log-probability of the likeliest token at every sampled one; NaN where it is not reported."""
        tops = (self.logprobs and self.logprobs.top_logprobs) or [None] * len(self.ids or ())
        return [max(top.values()) if top else math.nan for top in tops]


class _Details(_Row):
    cached_tokens: Count | None = None


class _Usage(_Row):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


class Answer(_Row):
    """The body of an answer: one completion."""

    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]
    usage: _Usage | None = None
    model: str | None = None
    system_fingerprint: str | None = None

    @property
    def choice(self) -> Choice:
        return self.choices[0]


def answer_of(text: str) -> Answer:
    """Raises `Unusable`, naming what is wrong, for whatever is not one completion."""
    if not text.strip():
        raise Unusable("the answer is empty")
    try:
        body = json.loads(text)
        if isinstance(body, dict) and (failed := cast("dict[str, Any]", body).get("error")):
            raise Unusable(one_line(f"the server answered with an error: {failed}"))
        return Answer.model_validate(body)
    except RecursionError as error:
        raise Unusable("the answer is nested too deeply to read") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise Unusable("the answer is no JSON object: this is not a completions API") from error
        where, wrong = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Input ")
        raise Unusable(one_line(f"{where!r} of the answer {wrong}, and is {_short(first['input'])}")) from error
    except ValueError as error:
        raise Unusable(f"the answer is no complete JSON: it begins with {one_line(text[:60])!r}") from error


class AnswerReader:
    """Reads the answers of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> None:
        self.stop_ids, self.exact, self.vocabulary = frozenset(stop_ids), True, len(tokenizer)
        self.reported = True  # whether every log-probability so far was the server's
        self.mixture: tuple[int, int, int] = (0, 0, 0)  # `engine.routes.mixture_of` the policy, where routes are read
        self.known = max(tokenizer.get_vocab().values()) + 1  # above `vocabulary` where ids have gaps (Phi-4-mini)
        self._tokenizer = tokenizer

    def read(self, request: GenerationRequest, answer: Answer, version: int, max_context: int) -> Completion:
        """Raises `Unusable`, naming what is wrong, for whatever is not one completion of this request."""
        choice, usage = answer.choice, answer.usage or _Usage()
        stopped, prompt = choice.finish_reason == "stop", list(request.prompt_ids)
        ids, statistics = self.tokens(choice)
        if choice.ids is not None:
            _check_sampled(request, ids, usage.completion_tokens, stopped=stopped)
        if usage.prompt_tokens not in (None, len(prompt)) or choice.prompt_token_ids not in (None, prompt):
            raise Unusable("the server answers another prompt than it was sent")
        routes = self.routes(choice, len(prompt) + len(ids) - 1)
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), None)
        if end is not None:
            ids, statistics = ids[: end + 1], statistics[: end + 1]
        by_text = end is None and stopped and choice.stop_reason in (request.guide.stop if request.guide else ())
        if end is None and stopped and not by_text:  # a server that keeps the stop token to itself
            ids, statistics = [*ids, self._stop_id(choice)], [*statistics, self._unreported()]
        if not ids:
            raise Unusable("the server sampled nothing")
        count = usage.completion_tokens if choice.ids is None else len(ids)
        asked = request.longest(max_context)
        # it would be a turn that the policy left unfinished
        if end is None and not stopped and count is not None and count < asked:
            raise Unusable(f"the server ends the answer after {count} of {asked} tokens: it has a limit of its own")
        cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(logprob for logprob, _ in statistics),
            entropies=tuple(entropy for _, entropy in statistics),
            finish="stop" if ids[-1] in self.stop_ids else "text" if by_text else "length",
            policy_version=version,
            cost=cost_of(request, decoded=len(ids), prefilled=max(0, len(prompt) - cached)),
            routes=routes[: len(prompt) + len(ids) - 1],
        )

    def routes(self, choice: Choice, tokens: int) -> tuple[str, ...]:
        """`Completion.routes` of so many tokens, where the policy is a mixture and the server reports them."""
        layers, count, experts = self.mixture
        if not experts or choice.routed_experts is None:
            return ()
        try:
            file = io.BytesIO(base64.b64decode(choice.routed_experts, validate=True))
            np.lib.format.read_magic(file)  # by the header, so that no array is made that is larger than the text
            shape, turned, kind = np.lib.format.read_array_header_1_0(file)
            found = np.frombuffer(file.read(), kind).reshape(shape)
        except (ValueError, TypeError) as error:
            raise Unusable(one_line(f"the server reports experts that are no array ({error})")) from error
        fits = not turned and shape == (tokens, layers, count) and kind.kind in "iu"
        if not (fits and 0 <= found.min() <= found.max() < experts):
            told = f"{shape} of type {kind}, not numbers below {experts} for {tokens} tokens"
            raise Unusable(f"the server reports experts {told} in {layers} layers with {count} each")
        kept = found.astype("<i1" if experts <= NARROW else "<i2")
        return tuple(base64.b64encode(each.tobytes()).decode() for each in kept)

    def tokens(self, choice: Choice) -> tuple[list[int], list[tuple[float, float]]]:
        """The sampled ids with (log-probability, entropy) each."""
        ids, reported = choice.ids, choice.logprobs or Logprobs()
        given = ids is not None
        if ids is None:
            self.exact = False
            ids = list(self._tokenizer.encode(choice.text or "", add_special_tokens=False))
        logprobs, tops = reported.token_logprobs or [], reported.top_logprobs or []
        if not logprobs or (len(logprobs) != len(ids) and not given):  # text is cut into other tokens here than there
            return ids, [self._unreported()] * len(ids)
        if len(logprobs) != len(ids) or len(tops) not in (0, len(ids)):
            counts = f"{len(logprobs)} log-probabilities and {len(tops)} lists of the likeliest"
            raise Unusable(f"the server reports {counts} for {len(ids)} tokens")
        if min(logprobs) <= NEVER:
            raise Unusable(f"the server says that it drew a token of probability 0 (log-probability {min(logprobs):g})")
        return ids, list(zip([min(0.0, each) for each in logprobs], self._entropies(tops, len(ids)), strict=True))

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

    def _entropies(self, tops: Sequence[Mapping[str, float] | None], count: int) -> list[float]:
        likeliest = [sorted((top or {}).values(), reverse=True)[:TOP_LOGPROBS] for top in tops or [None] * count]
        return [sum(entropy_bounds([min(0.0, p) for p in each], self.vocabulary)) / 2 for each in likeliest]

    def _unreported(self) -> tuple[float, float]:
        """For a token without reported statistics: log-probability 0, and the middle of the possible entropies."""
        self.reported = False
        return 0.0, math.log(self.vocabulary) / 2

    def _stop_id(self, choice: Choice) -> int:
        named = (choice.stop_reason, self._tokenizer.eos_token_id)
        return next((each for each in named if isinstance(each, int) and each in self.stop_ids), min(self.stop_ids))


def _check_sampled(request: GenerationRequest, ids: list[int], counted: int | None, *, stopped: bool) -> None:
    """Whether these ids are what was sampled: no more than were asked for or counted, and not the prompt."""
    count, prompt = len(ids), list(request.prompt_ids)
    if len(prompt) >= _ECHO and ids[: len(prompt)] == prompt:
        raise Unusable("the answer begins with the prompt: the server echoes it")
    if count > request.sampling.max_tokens:
        raise Unusable(f"the server gives {count} tokens, and {request.sampling.max_tokens} were asked for")
    if counted not in (None, count, count + stopped):  # the stop token may be left out
        raise Unusable(f"the server gives {count} tokens, and says that it sampled {counted}")


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:59]}…"


# refusals

# of 4xx, those of one request alone (it is too long for the server), and those that another time may end well
_OF_ONE_REQUEST = (400, 413, 408, 409, 425, 429)
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
    if status is None or not 300 <= status < 500 or status in _OF_ONE_REQUEST:
        return None
    if status < 400:
        place = error.response.headers.get("location", "")  # pyright: ignore[reportAttributeAccessIssue]
        problem = one_line(f"the server redirects requests (HTTP {status}) to {place}")
        return InputError(problem, path=url, hint="give the URL of the server that answers them")
    return InputError(f"the server refuses the request ({words_of(error)})", path=url, hint=_ADVICE.get(status, _CHECK))


def words_of(error: Exception) -> str:
    """One line for a request that failed: what the server said, with its status, or what the connection did."""
    if (status := status_of(error)) is not None:
        return one_line(f"HTTP {status}: {getattr(error, 'body', None) or error}")
    cause = None if isinstance(error, Unusable) else error.__cause__
    return one_line(str(error) if cause is None else f"{error} ({type(cause).__name__}: {cause})")


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
