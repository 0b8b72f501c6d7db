"""The hierarchical reward of a question-answering episode: format, then correctness, then the tools (ARPO, Tool-Star).

It reads only the policy's last message and the record of executed calls: tool outputs, the prompt and the calls that
the policy *claims* cannot change the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from turntree.core.errors import ConfigError
from turntree.core.messages import Message
from turntree_worlds.qa.answers import AnswerType, equal, overlap

_OPEN, _CLOSE, _BOX, _THOUGHT = "<answer>", "</answer>", "\\boxed", "</think>"


@dataclass(frozen=True)
class ExecutedCall:
    """One tool call as the environment made it. `answered`: the tool took it and answered (a program's traceback is
    an answer); False where it was refused, so that nothing was executed."""

    tool: str
    answered: bool = True


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A reward, the penalty where `answer` is None, or None where it was not decided whether the answer is right."""

    reward: float | None
    reason: str
    answer: str | None = None  # as extracted; None: the format is wrong, or there is no answer
    correct: bool = False  # equal to one of the answers by its type, whatever the score is


class NoAnswer(Exception):
    """A message from which no answer can be taken. The text says why."""


@dataclass(frozen=True, kw_only=True)
class HierarchicalReward:
    """R = `format_penalty` without a well-formed answer, else its score, plus `tool_bonus`.

    A policy's mistake is data: every message is judged, but for an answer whose comparison is open (`answers.equal`),
    which has no reward. (A tool that failed censors the rollout before it comes here.)
    """

    score: Literal["equal", "overlap"] = "equal"
    """1 for an answer that is equal by its type, else 0; or F1 for spans and lists."""
    format_penalty: float = -1.0
    """The reward without a well-formed answer."""
    tool_bonus: float = 0.1
    """Added where every one of bonus_tools answered in the episode (the paper's r_M)."""
    bonus_tools: tuple[str, ...] = ("search", "python")
    """The tools that the bonus asks for."""
    bonus_for: Literal["correct", "any_overlap"] = "correct"
    """Correct answers (the paper), or those with any overlap (the released code, F1 > 0)."""
    boxed: Literal["optional", "required"] = "optional"
    """Whether an answer must stand in a \\boxed{} inside its tags, or may."""
    cut_turns: Literal["fail", "judge"] = "fail"
    """Whether an answer that the token limit cut is refused (fail) or read (judge)."""

    def __post_init__(self) -> None:
        if self.format_penalty > 0 or self.tool_bonus < 0:
            raise ConfigError("format_penalty must not be positive, nor tool_bonus negative")
        if self.tool_bonus and not self.bonus_tools:
            raise ConfigError("no tools to pay a bonus for", field="bonus_tools", hint="name them, or set tool_bonus=0")

    def judge(
        self,
        message: Message | None,
        *,
        answers: Sequence[str],
        answer_type: AnswerType,
        calls: Sequence[ExecutedCall],
    ) -> Judgement:
        """Judge an episode by its last assistant `message` (None: it ended at a limit while tools were still called),
        the right `answers`, each right by itself, and all `calls` of the episode."""
        try:
            if message is not None and message.cut and self.cut_turns == "fail":
                raise NoAnswer("cut by the token limit")
            answer = extract_answer(message, boxed=self.boxed == "required")
        except NoAnswer as why:
            return Judgement(reward=self.format_penalty, reason=str(why))
        verdicts = [equal(answer, gold, answer_type) for gold in answers]
        correct = True in verdicts
        if None in verdicts and not correct:
            return Judgement(
                reward=None, reason="not decided: its comparison with the right answer is open", answer=answer
            )
        score = float(correct)
        if self.score == "overlap" and not correct:
            score = max(overlap(answer, gold, answer_type) for gold in answers)
        earned = correct if self.bonus_for == "correct" else score > 0
        bonus = (
            self.tool_bonus
            if earned and set(self.bonus_tools) <= {call.tool for call in calls if call.answered}
            else 0.0
        )
        reason = "correct" if correct else "partly right" if score else "wrong"
        return Judgement(
            reward=score + bonus,
            reason=f"{reason}, with {' and '.join(self.bonus_tools)}" if bonus else reason,
            answer=answer,
            correct=correct,
        )


def extract_answer(message: Message | None, *, boxed: bool = False) -> str:
    """What stands between the only `<answer>` and the only `</answer>` of a message, after its thinking; of that, what
    stands in its only `\\boxed{}`, where there is one (`boxed`: there must be). Raises `NoAnswer`."""
    if message is None:
        raise NoAnswer("no answer before the limit")
    if message.tool_calls:
        raise NoAnswer("a call instead of an answer")
    text = message.content.rpartition(_THOUGHT)[2]
    if "<think>" in text:
        raise NoAnswer("thinking that does not end")
    before, opening, rest = text.partition(_OPEN)
    answer, closing, after = rest.partition(_CLOSE)
    if not opening:
        raise NoAnswer("no answer")
    if not closing or _CLOSE in before:
        raise NoAnswer("an answer that does not end")
    if _OPEN in answer + after or _CLOSE in after:
        raise NoAnswer("several answers")
    answer = _unboxed(answer, boxed).strip()
    if not answer:
        raise NoAnswer("an empty answer")
    return answer


def _unboxed(text: str, required: bool) -> str:
    """The content of the only box, whose braces may be nested (`\\{` and `\\}` are characters, not braces)."""
    _, box, rest = text.partition(_BOX)
    if not box:
        if required:
            raise NoAnswer("no box in the answer")
        return text
    if _BOX in rest:
        raise NoAnswer("several boxes")
    rest, depth, k = rest.lstrip(), 0, 0
    if not rest.startswith("{"):
        raise NoAnswer("a box that does not begin")
    while k < len(rest):
        depth += {"{": 1, "}": -1}.get(rest[k], 0)
        if depth == 0:
            return rest[1:k]
        k += 2 if rest[k] == "\\" else 1
    raise NoAnswer("a box that does not end")
