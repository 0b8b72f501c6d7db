"""Questions to a language model that judges (any OpenAI-compatible server): cached, counted, never above a budget.

`judge` (two actions) and `rubric` (whole episodes) ask through it. An answer ends in one line `VERDICT: WORD`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import reason_of
from turntree.core.messages import THOUGHT, Message, answer_text, whole_characters
from turntree.core.protocols import TurnVerifier

if TYPE_CHECKING:
    from openai import OpenAI

UNSURE = "unsure"  # what every question offers beside its words
_AROUND = r"[^\w!?~\u00ac\u2260]"  # marks of layout; those of a doubt, a denial or a word struck out are none
_VERDICT = re.compile(rf"^{_AROUND}*VERDICT{_AROUND}+([A-Z]+(?: [A-Z]+)*){_AROUND}*$", re.IGNORECASE)


class Vote(NamedTuple):
    """What one answer says: a word of the question's, or None where the judge is unsure or cannot be read. `failed`
    says why there is no answer."""

    word: str | None
    failed: str = ""


@dataclass(kw_only=True, eq=False)
class Asking(TurnVerifier):
    """Options of everything that asks a language model (`judge`, `rubric`): they are fields of it."""

    url: str
    """The base of the API: http://host:8000/v1. A key, where one is needed, is OPENAI_API_KEY."""
    model: str
    """The name that the server gives the model."""
    votes: int = 1
    """How often each question is asked; the majority decides. More than one needs a temperature."""
    temperature: float = 0.0
    """Sampling temperature of the answers."""
    answer_tokens: int = 512
    """Longest answer."""
    concurrency: int = 8
    """Requests, and verdicts that are worth asking for, at the same time."""
    retries: int = 4
    """Of a request that failed, after growing pauses."""
    timeout: float = 60.0
    """Seconds for one request."""
    cache: str = ""
    """An SQLite file: an answer that was paid for is not asked for again."""
    max_requests: int = 0
    """No more answers after this many requests (0: no limit)."""
    max_tokens: int = 0
    """No more answers after this many tokens in all (0: no limit). A request on its way counts as one token per 3
    bytes of its question and a full answer, so that requests side by side do not pass the limit."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.url!r} is not a URL", field="url", hint="write http://host:port/v1")
        if self.votes < 1 or self.concurrency < 1 or self.retries < 0 or self.timeout <= 0:
            hint = "votes and concurrency >= 1, timeout > 0"
            raise ConfigError("impossible judge settings", field="votes", hint=hint)
        if self.votes > 1 and self.temperature == 0:
            raise ConfigError("votes are equal at temperature 0", field="votes", hint="set verifier.temperature=0.7")
        self.asker = Asker(self)

    def close(self) -> None:
        self.asker.close()


class Asker:
    """Asks the questions of one judge and counts what they cost."""

    def __init__(self, options: Asking) -> None:
        self._model, self._votes, self._temperature = options.model, options.votes, options.temperature
        self._answer_tokens, self._most = options.answer_tokens, (options.max_requests, options.max_tokens)
        self._client = _client(options.url, options.timeout, options.retries)
        self._threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix="turntree-judge")
        self._lock = threading.Lock()
        self._cache = _Cache(Path(options.cache)) if options.cache else None
        self.requests, self.tokens = 0, 0  # spent so far
        self._reserved = 0  # tokens of requests on their way
        self.told = f"model={self._model}+votes={self._votes}+temperature={self._temperature:g}"

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._client.close()
        if self._cache is not None:
            self._cache.close()

    def ask(self, prompts: Sequence[str], words: Sequence[str]) -> list[list[Vote]]:
        """The votes on every prompt, which ask for one of `words`. All requests are made at the same time, as far as
        `concurrency` allows; safe to call from many threads."""
        asked = [(prompt, vote) for prompt in prompts for vote in range(self._votes)]
        found = list(self._threads.map(lambda one: self._ask(one[0], one[1], words), asked))
        return [found[start : start + self._votes] for start in range(0, len(found), self._votes)]

    def _ask(self, prompt: str, vote: int, words: Sequence[str]) -> Vote:
        key = json.dumps([self._model, self._temperature, self._answer_tokens, prompt, vote])
        text = None if self._cache is None else self._cache.get(key)
        if text is None:
            text, problem = self._request(prompt, vote)
            if text is None:
                return Vote(None, problem)
            if self._cache is not None:
                self._cache.put(key, text)
        return Vote(read_verdict(text, words))

    def _request(self, prompt: str, vote: int) -> tuple[str | None, str]:
        most = len(prompt.encode()) // 3 + self._answer_tokens
        with self._lock:
            spent = self._most[1] and self.tokens + self._reserved + most > self._most[1]
            if spent or (self._most[0] and self.requests >= self._most[0]):
                return None, "the judge's budget is spent"
            self.requests += 1
            self._reserved += most
        try:
            answer = self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": prompt}],
                temperature=self._temperature,
                max_tokens=self._answer_tokens,
                seed=vote,
            )
            spent = getattr(answer.usage, "total_tokens", None)
            with self._lock:
                self.tokens += spent if type(spent) is int and spent >= 0 else most
            return _text_of(answer.choices), ""
        except BaseException as error:  # a proxy may answer with HTML, half of a JSON, or an error and status 200
            return None, f"the judge failed: {reason_of(error)}"
        finally:
            with self._lock:
                self._reserved -= most


def _text_of(choices: Any) -> str:
    """What the only choice says; nothing where the token limit cut it, whose last line may be one that it only quotes.
    Raises `ValueError` for every answer that the judge did not end itself with text (a filter, a call, parts)."""
    (choice,) = choices
    message = choice.message
    if choice.finish_reason == "length":
        return ""
    if choice.finish_reason != "stop" or message.tool_calls or getattr(message, "refusal", None):
        raise ValueError(f"its answer ended with {choice.finish_reason!r}, or calls or refuses")
    if not isinstance(message.content, str | None):
        raise ValueError(f"its content is {type(message.content).__name__}, not text")
    return whole_characters(message.content or "")


def read_verdict(text: str, words: Sequence[str]) -> str | None:
    """The word on the last line that is not empty, in lower case; None where the judge is unsure, is still thinking,
    says nothing readable, or says another verdict on another line."""
    text = text.rpartition(THOUGHT)[2]
    lines = [line for line in text.split("\n") if line.strip() and "<think>" not in text]
    found = [_VERDICT.match(line.strip()) for line in lines]
    said_words = [one[1].lower() if one else "" for one in found]
    verdicts = {word for word in said_words if word in (*words, UNSURE)}
    return verdicts.pop() if len(verdicts) == 1 and said_words[-1] in verdicts.intersection(words) else None


def failure(votes: Sequence[Sequence[Vote]]) -> str:
    """Why one of the votes was not given; empty where all were."""
    return next((vote.failed for some in votes for vote in some if vote.failed), "")


def majority(votes: Sequence[Vote]) -> str | None:
    """What more than half of the votes say; abstentions count as votes."""
    word, count = Counter(vote.word for vote in votes).most_common(1)[0]
    return word if word is not None and count * 2 > len(votes) else None


def shown(message: Message) -> dict[str, Any]:
    """A message as a judge sees it: what follows the thinking, without ids."""
    chat = message.to_chat()
    calls = [call["function"] for call in chat.get("tool_calls", [])]
    return {"text": answer_text(message), **({"calls": calls} if calls else {})}


def quoted(value: Any) -> str:
    """JSON on one line. What is no visible character (line ends of Unicode, marks that turn or hide text, half of a
    surrogate pair) is spelled out."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def digest(text: str) -> str:
    """A short digest, for names."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4).hexdigest()


def _client(url: str, timeout: float, retries: int) -> OpenAI:
    try:
        import openai

        from turntree.run.received import UNPACKED, bound
    except ImportError as error:
        hint = "pip install 'turntree[endpoint]'"
        raise InputError("needs the openai package", field="verifier", hint=hint) from error
    key = os.environ.get("OPENAI_API_KEY") or "none"  # also where it is empty
    http = openai.DefaultHttpxClient(event_hooks={"response": [bound]})
    options: dict[str, Any] = {"default_headers": UNPACKED, "http_client": http, "timeout": timeout}
    return openai.OpenAI(base_url=url, api_key=key, max_retries=retries, **options)  # retries with growing pauses


class _Cache:
    """Answers by the digest of their question."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock, self._path = threading.Lock(), path
        try:
            self._file = sqlite3.connect(path, check_same_thread=False, timeout=30)
            self._file.execute("create table if not exists answers (question text primary key, answer text not null)")
            self._file.commit()
        except sqlite3.Error as error:
            raise InputError(f"is not a judge cache ({error})", path=path, hint="name another file") from error

    def get(self, key: str) -> str | None:
        with self._using():
            row = self._file.execute("select answer from answers where question = ?", (_digest(key),)).fetchone()
        return row[0] if row is not None and isinstance(row[0], str) else None  # else it is damaged: ask again

    def put(self, key: str, answer: str) -> None:
        with self._using():
            self._file.execute("insert or replace into answers values (?, ?)", (_digest(key), answer))
            self._file.commit()

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except sqlite3.Error as error:
            hint = "free some space, or name another file"
            raise InputError(f"cannot be used as the judge's cache ({error})", path=self._path, hint=hint) from error

    def close(self) -> None:
        self._file.close()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
