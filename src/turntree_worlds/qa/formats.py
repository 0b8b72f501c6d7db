r"""Questions from the files in which they are published.

One row is one question. Its fields decide the schema, not the name of the file:

| schema | question | answers |
|---|---|---|
| plain, 2WikiMultihopQA, HotpotQA, ... | `question` | `answers`, `golden_answers` or `answer` |
| GSM8K | `question` | after `####` in `answer` |
| MATH | `problem` | `answer` |
| ARPO, verl (Parquet) | `extra_info.question`, or the last user message of `prompt` | `reward_model.ground_truth` |

Answers are numbers where all can be read as such, expressions where the schema is MATH's, `ability` is "math" or there
is LaTeX in them, and spans otherwise; or what a row says in `answer_type`.

Other fields are left alone, system prompts too: an environment writes its own. (All of ARPO's published ones hold a
backspace and "oxed{" where `\boxed{` was meant. Their number is reported.) The same damage in a question or an answer
(`\b`, `\f` read as escapes) is repaired and counted; a row with any other control character is dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.run.jsonl import located
from turntree.run.opening import parquet_rows
from turntree.traces.formats.row import RowRefused, part_of
from turntree.traces.sources import source_rows
from turntree_worlds.qa.answers import ANSWER_TYPES, AnswerType, check_answer, read_number
from turntree_worlds.qa.questions import Question

_DAMAGE = {"\b": "\\b", "\f": "\\f"}  # LaTeX commands whose backslash was read as the beginning of an escape
_DAMAGED = re.compile(r"[\x08\x0c](?=[a-z])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass
class QuestionFile:
    """The questions of a file, and what reading counted: `rows` = questions + all `dropped`; `first` shows where each
    reason was met first."""

    questions: tuple[Question, ...] = ()
    rows: int = 0
    repaired: int = 0  # rows with a damaged LaTeX command in their question or answer
    damaged_prompts: int = 0  # rows with a damaged system prompt, which is not used
    dropped: Counter[str] = field(default_factory=Counter[str])
    first: dict[str, str] = field(default_factory=dict[str, str])

    def drop(self, reason: str, error: InputError) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, str(error))

    def to_json(self) -> dict[str, Any]:
        """The counts."""
        kept = len(self.questions)
        return vars(self) | {"questions": kept, "kept": kept, "dropped": dict(sorted(self.dropped.items()))}

    def without(self, others: Iterable[Question], reason: str) -> QuestionFile:
        """Those that ask none of `others`; the rest counts as dropped."""
        known = {question.key for question in others}
        left_out = [question for question in self.questions if question.key in known]
        if not left_out:
            return self
        return replace(
            self,
            questions=tuple(question for question in self.questions if question.key not in known),
            dropped=self.dropped + Counter({reason: len(left_out)}),
            first={reason: f"question {left_out[0].id!r}"} | self.first,
        )


def read_questions(path: str | Path) -> QuestionFile:
    """The questions of a JSON, JSON lines (also .gz, .xz) or Parquet file, in order, each (`Question.key`) once.

    A row that cannot be used is dropped and counted. Raises `InputError` for a file that cannot be read, or when no
    question is left.
    """
    found, kept, ids = QuestionFile(), dict[str, Question](), set[str]()
    for row in _rows(Path(path)):
        found.rows += 1
        try:
            question = row.question(found)
            _check_new(question, kept, ids, row)
        except RowRefused as refused:
            found.drop(refused.reason, located(refused, path=row.path, line=row.number))
        else:
            kept[question.key] = question
            ids.add(question.id)
    found.questions = tuple(kept.values())
    if not kept:
        why = "; ".join(found.first.values()) or "it is empty"
        raise InputError(f"holds no question that can be used ({why})", path=path)
    return found


@dataclass(frozen=True)
class _Row:
    """One row of a file. `number` counts lines of JSON lines, else rows, from 1."""

    values: dict[str, Any]
    path: Path
    number: int

    def refused(self, problem: str, field: str | None = None, hint: str | None = None) -> RowRefused:
        return RowRefused(problem if field is None else f"{field}: {problem}", problem, field=field, hint=hint)

    def question(self, file: QuestionFile) -> Question:
        """Raises `RowRefused`; counts damage for `file`."""
        name, raw_text = self._text()
        raw_answers = self._answers()
        text, answers = self._clean(name, raw_text), [self._clean("answer", answer) for answer in raw_answers]
        if not text:
            raise self.refused("is empty", name)
        if not all(answers):
            raise self.refused("is empty", "answer")
        declared = self.values.get("answer_type")
        if declared is not None and declared not in ANSWER_TYPES:
            raise self.refused(f"is none of {', '.join(ANSWER_TYPES)}", "answer_type")
        question = Question(
            id=self._first("id", "_id", "unique_id") or f"{self.path.name.partition('.')[0]}:{self.number}",
            text=text,
            answers=tuple(dict.fromkeys(answers)),
            answer_type=self._checked(declared, answers) if declared else self._inferred(answers),
            kind=self._first("question_type", "type", "kind", "ability", "subject", "data_source"),
            evidence=self._evidence(),
        )
        file.repaired += [text, *answers] != [raw_text.strip(), *(answer.strip() for answer in raw_answers)]
        file.damaged_prompts += any("\boxed{" in content for content in self._prompt("system"))
        return question

    def _text(self) -> tuple[str, str]:
        """The question and the name of its field."""
        extra = part_of(self.values, "extra_info").get("question")
        for name, value in (
            ("question", self.values.get("question")),
            ("problem", self.values.get("problem")),
            ("extra_info.question", extra),
            ("prompt", next(reversed(self._prompt("user")), None)),
        ):
            if isinstance(value, str):
                return name, value
        raise self.refused("is missing", "question", "name it question, problem, extra_info.question or prompt")

    def _answers(self) -> list[str]:
        """The right answers as text; of GSM8K's solutions, what follows `####`."""
        truth = part_of(self.values, "reward_model").get("ground_truth")
        truth = cast("dict[str, Any]", truth).get("target") if isinstance(truth, dict) else truth
        values = self.values
        for value in (*(values.get(name) for name in ("answers", "golden_answers", "answer")), truth):
            if value is None:
                continue
            found = cast("list[Any]", value) if isinstance(value, list) else [value]
            if not found or not all(_plain(answer) for answer in found):
                raise self.refused("is neither text nor a number, nor a list of such", "answer")
            return [str(answer).rpartition("####")[2] for answer in found]
        raise self.refused("is missing", "answer", "name it answer, answers, golden_answers or reward_model")

    def _clean(self, name: str, text: str) -> str:
        repaired = _DAMAGED.sub(lambda damage: _DAMAGE[damage[0]], text).strip()
        if _CONTROL.search(repaired):
            raise self.refused("holds a control character", name)
        return repaired

    def _checked(self, declared: AnswerType, answers: Sequence[str]) -> AnswerType:
        try:
            for answer in answers:
                check_answer(answer, declared)
        except InputError as error:
            reason = f"answer: cannot be read as {declared}"
            raise RowRefused(reason, error.problem, field="answer", hint=error.hint) from None
        return declared

    def _inferred(self, answers: Sequence[str]) -> AnswerType:
        if all(read_number(answer) is not None for answer in answers):
            return "number"
        schema = "problem" in self.values or self.values.get("ability") == "math"
        if not schema and not any("\\" in answer for answer in answers):
            return "span"
        try:
            return self._checked("expression", answers)
        except RowRefused:
            return "span"

    def _evidence(self) -> tuple[str, ...]:
        """The subjects of the facts (subject, relation, value) that 2WikiMultihopQA lists, each once."""
        found = (self.values.get(name) for name in ("evidences", "evidence"))
        facts = next((cast("list[Any]", facts) for facts in found if isinstance(facts, list) and facts), [])
        triples = [fact for fact in facts if isinstance(fact, list) and len(cast("list[Any]", fact)) == 3]
        return tuple(dict.fromkeys(str(fact[0]) for fact in triples))

    def _prompt(self, role: str) -> list[str]:
        messages = self.values.get("prompt")
        rows = cast("list[Any]", messages) if isinstance(messages, list) else []
        found = (cast("dict[str, Any]", row) for row in rows if isinstance(row, dict))
        return [row["content"] for row in found if row.get("role") == role and isinstance(row.get("content"), str)]

    def _first(self, *names: str) -> str:
        values = (self.values.get(name) for name in names)
        return next((str(value) for value in values if isinstance(value, str | int) and str(value)), "")


def _rows(path: Path) -> Iterator[_Row]:
    """Raises `InputError` for a file that cannot be read, and for a damaged line, since more may be damaged."""
    if path.suffix == ".parquet":
        yield from (_Row(values, path, number) for number, values in enumerate(parquet_rows(path), start=1))
        return
    for number, row in enumerate(source_rows(path), start=1):
        line = row.line if row.line is not None else number
        if isinstance(row.value, InputError):
            raise InputError(row.value.problem, path=path, line=line, hint=row.value.hint)
        yield _Row(row.value, path, line)


def _check_new(question: Question, kept: dict[str, Question], ids: set[str], row: _Row) -> None:
    same = kept.get(question.key)
    if same is not None:
        again = "asked before" if same.answers == question.answers else "asked before, with another answer"
        raise row.refused(again, "question")
    if question.id in ids:
        raise row.refused("names another question too", "id")


def _plain(answer: Any) -> bool:
    return isinstance(answer, str | int | float) and not isinstance(answer, bool)
