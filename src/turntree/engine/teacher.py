"""A policy behind a server that scores what another one sampled: the teacher of on-policy distillation.

vLLM gives the log-probability of every token of a prompt (`prompt_logprobs`), at temperature 1. It computes such a
prompt without its prefix cache, so a path costs its whole length, whatever it shares with others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from turntree.core.errors import InputError, TurntreeError
from turntree.core.progress import notice
from turntree.engine.answers import NEVER, Choice, Unusable, answer_of, refusal, words_of
from turntree.engine.endpoint import api_of
from turntree.run.received import client_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TIMEOUT = 600.0  # seconds for one answer
_CONCURRENCY = 32
_PROBED = 64  # tokens from all over the vocabulary, which both tokenizers must cut alike, and all that were added
_HINT = "name a vLLM server; other servers do not score the tokens of a prompt (prompt_logprobs)"

T = TypeVar("T")


@dataclass(frozen=True)
class ServedPolicy:
    """The policy that the server of the API `url` knows as `model`."""

    url: str
    model: str
    context: int | None = None  # tokens that it takes; None: it does not say

    def logprobs(self, paths: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of every token but the first of each path, in nats. Raises `InputError` where the server refuses to score,
        and `TurntreeError` where it cannot be reached, tried again after pauses."""
        longest = max(map(len, paths), default=0)
        if self.context is not None and longest >= self.context:  # it asks for one token more
            hint = "start it with a longer context (--max-model-len); the run goes on from its last checkpoint"
            problem = f"the server takes {self.context - 1} tokens, and a rollout has {longest}"
            raise InputError(problem, path=self.url, field="reference", hint=hint)
        with (
            client_of(self.url, timeout=_TIMEOUT, field="reference") as client,
            ThreadPoolExecutor(_CONCURRENCY) as pool,
        ):
            return list(pool.map(lambda path: self.read(path, self.ask(client, prompt=list(path))), paths))

    def ask(self, client: Any, **fields: Any) -> Choice:
        """What the server says of one prompt."""
        body = {"model": self.model, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, **fields}
        return _asked(self.url, lambda: answer_of(client.post("/completions", cast_to=str, body=body)).choice)

    def read(self, path: Sequence[int], choice: Choice) -> list[float]:
        """The log-probabilities in an answer. Raises `InputError` where a token but the first has none."""
        told = choice.prompt_logprobs or []
        rows = [row[str(token)].logprob for token, row in zip(path, told, strict=False) if row and str(token) in row]
        found = [logprob for logprob in rows if logprob > NEVER]
        if len(told) != len(path) or len(found) != len(path) - 1:
            problem = f"the server scores {len(found)} of {len(path)} tokens of a prompt"
            raise InputError(problem, path=self.url, field="reference", hint=_HINT)
        return found


def open_teacher(source: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> ServedPolicy:
    """The teacher at URL, or at URL#NAME where the server has several models, for rollouts of up to `longest` tokens.
    Raises `InputError` for a server that does not score prompts, or that has another tokenizer than the policy."""
    address, _, name = source.partition("#")
    url, wrong = api_of(address), partial(InputError, path=source, field="reference")
    with client_of(url, timeout=_TIMEOUT, field="reference") as client:
        names = _asked(url, lambda: {one.id: getattr(one, "max_model_len", None) for one in client.models.list().data})
        if name not in names and (name or len(names) != 1):
            problem = f"has no model {name!r}" if name else f"has {len(names)} models"
            raise wrong(problem, hint=f"write URL#NAME with one of these names: {', '.join(names)}")
        name = name or next(iter(names))
        teacher = ServedPolicy(url, name, names[name])
        if teacher.context is not None and teacher.context <= longest:
            notice(f"warning: {url} scores up to {teacher.context - 1} tokens: a longer rollout ends the run")
        size, added = len(tokenizer), sorted(cast(Any, tokenizer).get_added_vocab().values())
        text = str(tokenizer.decode([*range(0, size, -(-size // _PROBED)), *added]))
        fields = {"add_special_tokens": False, "return_token_ids": True}
        found = teacher.ask(client, prompt=text, **fields)
    if found.prompt_token_ids is None:
        raise wrong("does not say the tokens of a prompt", hint=_HINT)
    if found.prompt_token_ids != tokenizer.encode(text, add_special_tokens=False):
        hint = "a policy is compared with another one token by token"
        raise wrong("has another tokenizer than the model", hint=hint)
    teacher.read(found.prompt_token_ids, found)
    return teacher


def _asked(url: str, ask: Callable[[], T]) -> T:
    """What the server answers, or one line of why it does not."""
    try:
        return ask()
    except TurntreeError:
        raise
    except Unusable as error:
        raise InputError(str(error), path=url, field="reference", hint=_HINT) from error
    except Exception as error:  # the boundary to foreign software: whatever it was, nothing is scored
        raise refusal(error, url) or TurntreeError(f"{url} does not score a prompt: {words_of(error)}") from error
