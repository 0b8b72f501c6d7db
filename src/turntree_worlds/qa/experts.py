"""Experts that know what to look up: one for generated questions, which may slip, one for questions with evidence."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from turntree.core.errors import TurntreeError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Environment
from turntree_worlds.qa.generate import Chain, Posed
from turntree_worlds.qa.questions import Question
from turntree_worlds.qa.world import RELATIONS
from turntree_worlds.search import SearchIndex

Mistake = Literal["another relation", "another entity", "an earlier step", "an answer too soon"]
MISTAKES: tuple[Mistake, ...] = get_args(Mistake)

_PASSAGE = re.compile(r"^\[\d+\] (.*)\n(.*)$", re.MULTILINE)
_FACT = re.compile(r"The ([a-z ]+) is ([^.]+)\.")
_RELATIONS = sorted({relation for told in RELATIONS.values() for relation in told})


class NotFound(TurntreeError):
    """The search results do not tell what the expert looked for."""


@dataclass(frozen=True)
class Played:
    """An episode: the conversation, which of its messages are slips (in the context of later turns, but not trained
    on), and how it ended."""

    messages: tuple[Message, ...]
    slips: frozenset[int]
    success: bool


def search(query: str) -> Message:
    return Message("assistant", "", (ToolCall("search", {"query": query}),))


def look_at(title: str) -> Message:
    return Message("assistant", "", (ToolCall("open", {"title": title}),))


def compute(code: str) -> Message:
    return Message("assistant", "", (ToolCall("python", {"code": code}),))


def answer(text: str) -> Message:
    return Message("assistant", f"<answer>{text}</answer>")


def gold(posed: Posed, pages: bool) -> tuple[Message, ...]:
    """The expert's messages to a generated question."""
    messages: list[Message] = []
    for chain in posed.chains:
        for held, relation in zip((chain.start, *chain.values), chain.relations, strict=False):
            messages += [search(f"{relation} of {held}"), *([look_at(held)] if pages else [])]
    if posed.operation != "none":
        messages.append(_arithmetic(posed, [chain.values[-1] for chain in posed.chains]))
    return (*messages, answer(posed.question.answers[0]))


def gold_of_evidence(question: Question, index: SearchIndex, pages: bool) -> tuple[Message, ...]:
    """The expert's messages to a question whose evidence is known: it looks up every subject. None where the pages of
    the subjects do not hold the answer (yes and no need not be held)."""
    found = [page for page in map(index.page, question.evidence) if page is not None]
    shown = " ".join(page.text for page in found).casefold()
    known = [text for text in question.answers if text.casefold() in ("yes", "no") or text.casefold() in shown]
    if not found or not known:
        return ()
    steps = [(search(page.title), *([look_at(page.title)] if pages else [])) for page in found]
    return (*(message for step in steps for message in step), answer(known[0]))


def _arithmetic(posed: Posed, ends: Sequence[str]) -> Message:
    return compute(f"{ends[0]}+{ends[1]}" if posed.operation == "sum" else f"abs({ends[0]}-{ends[1]})")


def play(
    environment: Environment,
    posed: Posed,
    rng: random.Random | None = None,
    noise: float = 0.0,
    mistakes: Sequence[Mistake] = MISTAKES,
) -> Played:
    """An episode of the expert. With probability `noise` it makes one of `mistakes` before a look-up, sees the result,
    and then continues correctly (unless it answered). Raises `NotFound` where the tools do not give the answer."""
    messages, slips = list(environment.reset()), set[int]()
    for message, slipped in _turns(posed, messages, rng or random.Random(0), noise, mistakes):
        if slipped:
            slips.add(len(messages))
        observation = environment.step(message)
        messages += [message, *observation.messages]
        if observation.done:
            return Played(tuple(messages), frozenset(slips), observation.success is True)
    raise AssertionError("the last turn of an expert is an answer")


def next_turn(posed: Posed, messages: Sequence[Message]) -> Message:
    """What the expert does after `messages`, which another policy may have written: look up the first thing that no
    result has told yet, then compute, then answer. Raises `NotFound` where a look-up did not tell what it was for."""
    facts = _facts(message.content for message in messages if message.role == "tool")
    asked = {str(call.arguments.get("query")) for message in messages for call in message.tool_calls}
    ends: list[str] = []
    for chain in posed.chains:
        held = chain.start
        for relation in chain.relations:
            if (held, relation) not in facts:
                if f"{relation} of {held}" in asked:
                    raise NotFound(f"the results do not tell the {relation} of {held}")
                return search(f"{relation} of {held}")
            held = facts[held, relation]
        ends.append(held)
    if posed.operation == "none":
        return answer(ends[0])
    computing = _arithmetic(posed, ends)
    (wanted,) = computing.tool_calls
    for message, after in itertools.pairwise(messages):
        if [(call.name, call.arguments) for call in message.tool_calls] == [(wanted.name, wanted.arguments)]:
            return answer(after.content)
    return computing


def _turns(
    posed: Posed, messages: Sequence[Message], rng: random.Random, noise: float, mistakes: Sequence[Mistake]
) -> Iterator[tuple[Message, bool]]:
    """The expert's messages, each with whether it is a slip. The caller appends the result to `messages` before the
    next one."""
    ends: list[str] = []
    for chain in posed.chains:
        held = chain.start
        for step, relation in enumerate(chain.relations):
            while rng.random() < noise:
                yield _slip(rng.choice(mistakes), chain, step, held, _seen(messages, chain), rng), True
            yield search(f"{relation} of {held}"), False
            held = _read(messages[-1].content, held, relation)
        ends.append(held)
    result = ends[0]
    if posed.operation != "none":
        yield _arithmetic(posed, ends), False
        result = messages[-1].content
    yield answer(result), False


def _slip(mistake: Mistake, chain: Chain, step: int, held: str, seen: Sequence[str], rng: random.Random) -> Message:
    relation = chain.relations[step]
    if mistake == "another relation":
        return search(f"{rng.choice([other for other in _RELATIONS if other != relation])} of {held}")
    if mistake == "another entity":
        return search(f"{relation} of {rng.choice(seen)}")
    if mistake == "an earlier step":
        return search(f"{rng.choice(chain.relations[: step + 1])} of {chain.start}")
    return answer(rng.choice(seen))


def _seen(messages: Sequence[Message], chain: Chain) -> list[str]:
    """Values and subjects of the last search, which a careless reader may take for the right one."""
    last = messages[-1].content if messages[-1].role == "tool" else ""
    return [
        word for title, text in _PASSAGE.findall(last) for word in (title, *dict(_FACT.findall(text)).values())
    ] or [chain.start]


def _read(results: str, subject: str, relation: str) -> str:
    """The value that the results tell."""
    facts = _facts([results])
    if (subject, relation) not in facts:
        raise NotFound(f"the results do not tell the {relation} of {subject}")
    return facts[subject, relation]


def _facts(results: Iterable[str]) -> dict[tuple[str, str], str]:
    """The values that results tell, by subject and relation."""
    return {
        (title, relation): value
        for result in results
        for title, text in _PASSAGE.findall(result)
        for relation, value in _FACT.findall(text)
    }
