"""Expert episodes on generated questions as traces: an SFT start for a policy that searches and computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, cast

from turntree.core import seeds
from turntree.core.config import Between, Part, to_mapping
from turntree.core.messages import Message
from turntree.core.protocols import Environment
from turntree.stages.gold import Demonstrations
from turntree.traces.schema import Trace
from turntree_worlds.qa.entry import GeneratedQuestions, Questions
from turntree_worlds.qa.environment import QaEnvironment
from turntree_worlds.qa.experts import Mistake, NotFound, next_turn, play

_RECOVERABLE: tuple[Mistake, ...] = ("another relation", "another entity", "an earlier step")


@dataclass(frozen=True, kw_only=True)
class QaDemonstrator(Demonstrations):
    """Expert answers to generated questions, with search and Python.

    An expert looks up, computes and answers `count` questions: an SFT start for your own policy.
    A slip is part of the history of later turns; it is marked in `meta["skip_turns"]`, so no stage learns from it.
    `--model` names the policy that will be trained: its traces begin with the instructions that it will get.

    \b
    Example: turntree traces qa --count 500 --slips 0.2 --out runs/qa.jsonl
    """

    noun: ClassVar[str] = "questions"
    short: ClassVar[dict[str, str]] = {
        "--model": "questions.model",
        "--count": "count",
        "--slips": "slips",
        "--seed": "seed",
    }

    questions: GeneratedQuestions = field(default_factory=GeneratedQuestions)
    slips: Annotated[float, Between(0, 0.99)] = 0.0
    """Chance of a wrong look-up before each look-up of the expert."""

    def __iter__(self) -> Iterator[Trace | str]:
        """Every question answered once: the episode, or why there is none."""
        questions = Questions(**{each.name: getattr(self.questions, each.name) for each in fields(self.questions)})
        with questions.open({self.split: self.count}, seed=self.seed) as opened:
            for environment in cast("Sequence[QaEnvironment]", opened.of(self.split)):
                posed = environment.posed
                assert posed is not None, "generated questions are posed"
                rng = seeds.generator(self.seed, "expert", environment.task_id)
                played = play(environment, posed, rng, self.slips, _RECOVERABLE)
                if not played.success:
                    yield "answered wrong"
                    continue
                told = played.messages[:-1]  # the last one only says that the episode is over
                record, model = Part("qa", to_mapping(self.questions)), self.questions.model
                yield self.trace(environment, told, record, slips=played.slips, model=model)


def teacher(environment: Environment, history: Sequence[Message]) -> Message | str:
    """What the expert does next on a generated question (part `qa` of kind `teachers`)."""
    if not isinstance(environment, QaEnvironment) or environment.posed is None:
        return "not a generated question"
    try:
        return next_turn(environment.posed, history)
    except NotFound:
        return "not found by searching"
