"""Instructions that a few lines can check. Replies are kept, so an edited check needs no sampling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

TOPICS = ("the sea", "bread", "a cat", "winter", "music", "trains", "the moon", "coffee", "football", "gardens")


@dataclass(frozen=True)
class Kind:
    """An instruction and its check. `{topic}` is filled in."""

    name: str
    text: str
    check: Callable[[str], bool]


def _words(reply: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", reply)


def _is_sentence(reply: str) -> bool:
    """Five words at least: a model that answers everything with a short command has followed nothing."""
    return len(_words(reply)) >= 5


def _is_capitals(reply: str) -> bool:
    return _is_sentence(reply) and reply == reply.upper()


def _is_lowercase(reply: str) -> bool:
    return _is_sentence(reply) and reply == reply.lower()


def _no_commas(reply: str) -> bool:
    return len(_words(reply)) > 8 and "," not in reply


def _three_bullets(reply: str) -> bool:
    return sum(line.startswith("- ") for line in reply.splitlines()) == 3


def _is_quoted(reply: str) -> bool:
    return re.fullmatch(r'"[^"]+"', reply) is not None


def _is_json(reply: str) -> bool:
    try:
        found = json.loads(reply)
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() == {"topic"}


KINDS = (
    Kind("capitals", "Write one sentence about {topic} in capital letters only.", _is_capitals),
    Kind("lowercase", "Write one sentence about {topic} in lowercase letters only.", _is_lowercase),
    Kind("no_commas", "Write three sentences about {topic}. Do not use any commas.", _no_commas),
    Kind("short", "Describe {topic} in at most ten words.", lambda r: _is_sentence(r) and len(_words(r)) <= 10),
    Kind("bullets", "Name three facts about {topic}. Start every fact with '- ' on its own line.", _three_bullets),
    Kind("begin", "Write about {topic}. Begin your answer with the word 'Today'.", lambda r: r.startswith("Today")),
    Kind("quotes", "Write a title for a story about {topic}, in double quotation marks, and nothing else.", _is_quoted),
    Kind("json", 'Answer with JSON only, like {{"topic": "..."}}. The topic is {topic}.', _is_json),
    Kind("one_word", "Answer with one word: do you like {topic}, yes or no?", lambda r: len(_words(r)) == 1),
    Kind("question", "Ask one question about {topic}. End with a question mark.", lambda r: r.endswith("?")),
)  # fmt: skip

ASKED = {f"{kind.name}: {topic}": kind.text.format(topic=topic) for topic in TOPICS for kind in KINDS}


def followed(name: str, reply: str) -> bool:
    """Whether the reply to the instruction of this name does what was asked."""
    return next(kind for kind in KINDS if kind.name == name.partition(":")[0]).check(reply)
