"""Expert episodes on generated questions as traces: an SFT start for a policy that searches and computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, cast

from turntree.core import seeds
from turntree.core.config import Between, Part, Positive, to_mapping
from turntree.core.messages import Message
from turntree.core.protocols import Environment
from turntree.env.tasks import TRAIN, environment_record
from turntree.traces.schema import Trace
from turntree.traces.splits import demonstrated_split
from turntree_worlds.qa.entry import GeneratedQuestions, Questions
from turntree_worlds.qa.environment import QaEnvironment
from turntree_worlds.qa.experts import Mistake, NotFound, Played, next_turn, play
from turntree_worlds.qa.generate import Posed

_RECOVERABLE: tuple[Mistake, ...] = ("another relation", "another entity", "an earlier step")


@dataclass(frozen=True, kw_only=True)
class QaDemonstrator:
    """Expert answers to generated questions, with search and Python.

    An expert looks up, computes and answers `count` questions of the split "train": an SFT start for your own policy.
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
    count: Positive = 200
    """How many questions."""
    slips: Annotated[float, Between(0, 0.99)] = 0.0
    """Chance of a wrong look-up before each look-up of the expert."""
    dev: Annotated[float, Between(0, 0.99)] = 0.2
    """Share of traces held out for development."""
    seed: int = 0
    """Of slips and splits."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Trace | str]:
        """Every question answered once: the episode, or why there is none."""
        questions = Questions(**{each.name: getattr(self.questions, each.name) for each in fields(self.questions)})
        with questions.open({TRAIN: self.count}, seed=0) as opened:
            for environment in cast("Sequence[QaEnvironment]", opened.tasks[TRAIN]):
                posed = environment.posed
                assert posed is not None, "generated questions are posed"
                rng = seeds.generator(self.seed, "expert", environment.task_id)
                played = play(environment, posed, rng, self.slips, _RECOVERABLE)
                yield _trace(posed, played, environment.tools, self) if played.success else "answered wrong"


def teacher(environment: Environment, history: Sequence[Message]) -> Message | str:
    """What the expert does next on a generated question (part `qa` of kind `teachers`)."""
    if not isinstance(environment, QaEnvironment) or environment.posed is None:
        return "not a generated question"
    try:
        return next_turn(environment.posed, history)
    except NotFound:
        return "not found by searching"


def _trace(posed: Posed, played: Played, tools: tuple[dict[str, Any], ...], config: QaDemonstrator) -> Trace:
    messages = played.messages[:-1]  # the last one only says that the episode is over
    spoken = [position for position, message in enumerate(messages) if message.role == "assistant"]
    skipped = {str(turn): "slip" for turn, position in enumerate(spoken) if position in played.slips}
    marks = {"skip_turns": skipped} if skipped else {}
    return Trace(
        id=posed.question.id,
        messages=messages,
        tools=tools,
        domain="qa",
        split=demonstrated_split("train", posed.question.id, config.seed, config.dev),
        success=True,
        environment=environment_record(
            _environment(config.questions), TRAIN, config.count, 0, posed.question.id, config.questions.model
        ),
        meta={"task_type": posed.question.kind, **marks},
    )


def _environment(questions: GeneratedQuestions) -> Part:
    """With the options that differ from the usual ones."""
    usual = to_mapping(type(questions)())
    return Part("qa", {key: value for key, value in to_mapping(questions).items() if value != usual[key]})
