"""A question as a chat environment: the policy calls tools until it answers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turntree.core.config import Bounded, Positive
from turntree.core.errors import TurntreeError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Observation
from turntree.env.tools.runtime import ToolRuntime
from turntree.env.tools.tool import ToolStatus
from turntree_worlds.qa.generate import Posed
from turntree_worlds.qa.hierarchical import ExecutedCall, HierarchicalReward, Judgement
from turntree_worlds.qa.questions import Question

INSTRUCTIONS = (
    "Answer the question. Call the tools as often as you need, one step at a time, before you answer. Then give the "
    "answer alone, in as few words as possible, between <answer> and </answer>."
)
"""For a policy that has not learned the format: `QaConfig(instructions=INSTRUCTIONS)`."""


@dataclass(frozen=True, kw_only=True)
class QaConfig(Bounded):
    """How a question is answered."""

    max_calls: Positive = 12
    """Tool calls of an episode, refused ones included; further calls are answered with an error."""
    instructions: str | None = None
    """The system's message that opens the conversation, where there is any."""


class QaEnvironment:
    """One episode of one question (protocol `Environment`). The first message without a call is the answer.

    A fork copies what was called so far and shares the tools, whose answers depend on nothing but the call. A tool
    that fails raises `ToolFailed` out of `step`, an answer whose comparison is open `Undecided`: the rollout is
    censored.
    """

    def __init__(
        self,
        question: Question,
        runtime: ToolRuntime,
        reward: HierarchicalReward | None = None,
        config: QaConfig | None = None,
        gold: Sequence[Message] = (),
        posed: Posed | None = None,
    ) -> None:
        self.question = question
        self.gold = tuple(gold)  # an expert's messages, where they are known
        self.posed = posed  # the way to the answer of a generated question, for teachers
        self.calls: tuple[ExecutedCall, ...] = ()  # of this episode's own path
        self._runtime = runtime
        self._reward = reward or HierarchicalReward()
        self._config = config or QaConfig()

    total_reward = True  # what the format so far costs

    @property
    def task_id(self) -> str:
        return self.question.id

    @property
    def task_type(self) -> str:
        return self.question.kind

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return self._runtime.schemas

    @property
    def failure_reward(self) -> float:
        """The reward of an episode that a limit ends before its first call: there is no answer."""
        return self._judge(None)[1]

    def reset(self) -> tuple[Message, ...]:
        self.calls = ()
        system = (Message("system", self._config.instructions),) if self._config.instructions else ()
        return (*system, Message("user", self.question.text))

    def step(self, action: Message) -> Observation:
        if not action.tool_calls:
            judged, reward = self._judge(action)
            return Observation((Message("user", "done"),), done=True, success=judged.correct, reward=reward)
        results = tuple(self._call(call) for call in action.tool_calls)
        return Observation(results, done=False, reward=self._judge(None)[1])

    def fork(self) -> QaEnvironment:
        return copy.copy(self)

    def _call(self, call: ToolCall) -> Message:
        if len(self.calls) >= self._config.max_calls:
            text, answered = f"error: all {self._config.max_calls} calls are used; give your answer", False
        else:
            result = self._runtime.call(call)
            text, answered = result.observation(), result.status is ToolStatus.ANSWERED
        self.calls = (*self.calls, ExecutedCall(call.name, answered))
        return Message("tool", text, tool_call_id=call.id, name=call.name)

    def _judge(self, answer: Message | None) -> tuple[Judgement, float]:
        """The judgement and its reward. Raises `Undecided` where it has none."""
        question = self.question
        judged = self._reward.judge(
            answer, answers=question.answers, answer_type=question.answer_type, calls=self.calls
        )
        if judged.reward is None:
            raise Undecided(f"the answer {(judged.answer or '')[:60]!r} is {judged.reason}")
        return judged, judged.reward


class Undecided(TurntreeError):
    """Whether an answer is right was not decided, which is no fault of the policy's."""
