"""Questions to a language model that judges (any OpenAI-compatible server): cached, and never above a budget.

`judge` (two actions) and `rubric` (whole episodes) ask through it. An answer ends in one line `VERDICT: WORD`.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from turntree.core.config import Bounded, Positive, require_url
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import needs, reason_of
from turntree.core.messages import THOUGHT, Message, whole_characters
from turntree.core.protocols import TurnVerifier
from turntree.run import identity
from turntree.run.received import client_of

if TYPE_CHECKING:
    from openai import OpenAI

UNSURE = "unsure"  # what every question offers beside its words
_AROUND = r"""[\s*#>:\uff1a|`"'\u2018-\u201d.\u3002,()\[\]{}<=\u2013\u2014-]"""  # layout: no cross, no doubt, no denial
_RETRIES = 4  # of a request that failed, after growing pauses
_TIMEOUT = 300.0  # seconds for one request
_VERDICT = re.compile(rf"^{_AROUND}*VERDICT{_AROUND}+([A-Z]+(?: [A-Z]+)*){_AROUND}*$", re.IGNORECASE)


class Vote(NamedTuple):
    """What one answer says: a word of the question's, or None where the judge is unsure or cannot be read. `failed`
    says why there is no answer."""

    word: str | None
    failed: str = ""


@needs("openai", "endpoint")
@dataclass(kw_only=True, eq=False)
class Asking(Bounded, TurnVerifier):
    """What asks a language model (`judge`, `rubric`): the options, which are fields of it, and the questions."""

    url: str
    """The base of the API: http://host:8000/v1. A key, where one is needed, is OPENAI_API_KEY."""
    model: str
    """The name that the server gives the model."""
    votes: Positive = 1
    """How often each question is asked; the majority decides. More than one needs a temperature."""
    temperature: float = 0.0
    """Sampling temperature of the answers."""
    answer_tokens: int = 512
    """Longest answer."""
    concurrency: Positive = 8
    """Requests, and verdicts that are worth asking for, at the same time."""
    cache: str = ""
    """An SQLite file: an answer that was paid for is not asked for again. Models of one name need a file each."""
    max_requests: int = 0
    """No more answers after this many requests (0: no limit)."""

    def __post_init__(self) -> None:
        require_url(self.url, "url")
        super().__post_init__()
        if self.votes > 1 and self.temperature == 0:
            raise ConfigError("votes are equal at temperature 0", field="votes", hint="set verifier.temperature=0.7")
        self.client: OpenAI = client_of(self.url, timeout=_TIMEOUT, field="verifier", retries=_RETRIES)
        self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="turntree-judge")
        self._lock, self._requests = threading.Lock(), 0
        self._answers = _Cache(Path(self.cache)) if self.cache else None

    @property
    def asks(self) -> str:
        """Whom it asks and how, for the name of the rule."""
        return f"model={self.model}+votes={self.votes}+temperature={self.temperature:g}"

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.client.close()
        if self._answers is not None:
            self._answers.close()

    def ask(self, prompts: Sequence[str], words: Sequence[str]) -> list[list[Vote]]:
        """The votes on every prompt, which ask for one of `words`. All requests are made at the same time, as far as
        `concurrency` allows; safe to call from many threads."""
        asked = [(prompt, vote) for prompt in prompts for vote in range(self.votes)]
        votes = list(self._threads.map(lambda each: self._ask(each[0], each[1], words), asked))
        return [votes[start : start + self.votes] for start in range(0, len(votes), self.votes)]

    def _ask(self, prompt: str, vote: int, words: Sequence[str]) -> Vote:
        key = json.dumps([self.model, self.temperature, self.answer_tokens, prompt, vote])
        text = None if self._answers is None else self._answers.get(key)
        if text is None:
            with self._lock:
                if self.max_requests and self._requests >= self.max_requests:
                    return Vote(None, "the judge's budget is spent")
                self._requests += 1
            try:
                text = self._request(prompt, vote)
            except BaseException as error:  # a proxy may answer with HTML, half of a JSON, or an error and status 200
                return Vote(None, f"the judge failed: {reason_of(error)}")
            if self._answers is not None:
                self._answers.put(key, text)
        return Vote(read_verdict(text, words))

    def _request(self, prompt: str, vote: int) -> str:
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": prompt}],
            temperature=self.temperature,
            max_tokens=self.answer_tokens,
            seed=vote,
        )
        return _text_of(answer.choices)


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
    matches = [_VERDICT.match(line.strip()) for line in lines]
    last_words = [match[1].lower() if match else "" for match in matches]
    verdicts = {word for word in last_words if word in (*words, UNSURE)}
    return verdicts.pop() if len(verdicts) == 1 and last_words[-1] in verdicts.intersection(words) else None


def failure(votes: Sequence[Sequence[Vote]]) -> str:
    """Why one of the votes was not given; empty where all were."""
    return next((vote.failed for some in votes for vote in some if vote.failed), "")


def majority(votes: Sequence[Vote]) -> str | None:
    """What more than half of the votes say; abstentions count as votes."""
    word, count = Counter(vote.word for vote in votes).most_common(1)[0]
    return word if word is not None and count * 2 > len(votes) else None


def shown(message: Message, text: str) -> dict[str, Any]:
    """A message as a judge sees it: `text` of it, and its calls without ids."""
    chat = message.to_chat()
    calls = [call["function"] for call in chat.get("tool_calls", [])]
    return {"text": text, **({"calls": calls} if calls else {})}


def quoted(value: Any) -> str:
    """JSON on one line. What is no visible character (line ends of Unicode, marks that turn or hide text, half of a
    surrogate pair) is spelled out."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def digest(text: str, size: int = 4) -> str:
    """A digest; by default a short one, for names."""
    return identity.digest(text.encode(errors="surrogatepass"), size)


class _Cache:
    """Answers by the digest of their question."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock, self._path = threading.Lock(), path
        try:
            self._file = sqlite3.connect(path, check_same_thread=False, timeout=30, isolation_level=None)
            self._file.execute("create table if not exists answers (question text primary key, answer text not null)")
        except sqlite3.Error as error:
            raise InputError(f"is not a judge cache ({error})", path=path, hint="name another file") from error

    def get(self, key: str) -> str | None:
        row = self._run("select answer from answers where question = ?", digest(key, 32))
        return row[0] if row is not None and isinstance(row[0], str) else None  # else it is damaged: ask again

    def put(self, key: str, answer: str) -> None:
        self._run("insert or replace into answers values (?, ?)", digest(key, 32), answer)

    def _run(self, command: str, *values: str) -> tuple[Any, ...] | None:
        try:
            with self._lock:
                return self._file.execute(command, values).fetchone()
        except sqlite3.Error as error:
            hint = "free some space, or name another file"
            raise InputError(f"cannot be used as the judge's cache ({error})", path=self._path, hint=hint) from error

    def close(self) -> None:
        self._file.close()
