"""Label the states of a policy's own episodes with what a teacher would do there."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, cast

from turntree.core.config import Bounded, Positive, require_url
from turntree.core.cost import Cost
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault, call_foreign, reason_of
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Teacher
from turntree.env.tasks import Replayed
from turntree.rollout.rebuild import walk
from turntree.run.received import client_of
from turntree.traces.schema import Trace

NO_LABEL, FAILED = "no_label", "the teacher failed"


def labelled(trace: Trace, task: Environment, teacher: Teacher) -> tuple[Trace, Counter[str], Cost]:
    """The trace with a label at every turn that the teacher has one for, the reasons of the others, and what that cost:
    the steps of the environment, and the time for them and the teacher.

    The episode is played again on a copy of `task`. Where the environment fails or answers differently, the states from
    there on have no label. A teacher that fails at a state gives it none. One that waits for a server says in
    `concurrency` how many states are worth asking for at the same time."""
    spoken = trace.turn_positions
    said: dict[int, Future[Message | str]] = {}
    unsaid: dict[int, str] = {}
    started, played = time.perf_counter(), 0
    steps = walk(task, trace.messages[: spoken[-1]], f"trace {trace.id!r}")
    threads = max(1, getattr(teacher, "concurrency", 1))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="turntree-teacher")
    try:
        for turn, (place, (environment, _)) in enumerate(zip(spoken, steps, strict=False)):
            played = turn
            said[turn] = pool.submit(_said, teacher, _copy(environment), trace.messages[:place])
            if threads == 1:  # it may share something with the environment, which is not stepped meanwhile
                wait([said[turn]])
    except (EnvironmentFault, InputError) as fault:
        unsaid = {turn: reason_of(fault) for turn in range(len(spoken)) if turn not in said}
    finally:
        pool.shutdown(cancel_futures=sys.exc_info()[0] is not None)
    answers = {turn: answer.result() for turn, answer in said.items()} | unsaid
    labels = {turn: answer for turn, answer in answers.items() if isinstance(answer, Message)}
    missing = {turn: f"{NO_LABEL}: {answer}" for turn, answer in answers.items() if turn not in labels}
    marks = {"skip_turns": {str(turn): reason for turn, reason in missing.items()}} if missing else {}
    meta = {key: value for key, value in trace.meta.items() if key != "skip_turns"}  # a cut turn is a state like others
    cost = Cost(tool_calls=played, environment_seconds=time.perf_counter() - started)
    return replace(trace, labels=labels, meta={**meta, **marks}), Counter(missing.values()), cost


def _copy(environment: Environment) -> Environment | str:
    """A copy for the teacher to look at, or why there is none."""
    try:
        return call_foreign(environment.fork)
    except EnvironmentFault as fault:
        return f"{FAILED} ({fault})"


def _said(teacher: Teacher, environment: Environment | str, history: Sequence[Message]) -> Message | str:
    if isinstance(environment, str):
        return environment
    try:
        said = teacher(environment.own if isinstance(environment, Replayed) else environment, history)
        if isinstance(said, Message):  # what no file can hold (NaN, half a character) must not reach one
            json.dumps(said.to_chat(), ensure_ascii=False, allow_nan=False).encode()
    except BaseException as error:  # the boundary to foreign code
        return f"{FAILED} ({reason_of(error)})"
    if isinstance(said, Message) and said.role != "assistant":
        return f"the teacher gave a message of {said.role!r}"
    return said


@dataclass(kw_only=True, eq=False)
class ModelTeacher(Bounded):
    """A model behind a server that speaks OpenAI's chat completions (a key, where one is needed, is OPENAI_API_KEY)."""

    url: str
    """The address, as http://host:port/v1."""
    model: str
    """The name of the model there."""
    max_tokens: int = 1024
    """Longest answer; one that is cut labels nothing."""
    temperature: float = 0.0
    """Sampling temperature (0: greedy)."""
    timeout: float = 120.0
    """Seconds that an answer may take; it is asked for five times."""
    concurrency: Positive = 8
    """Requests at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_url(self.url, "teacher.url")
        self._client = client_of(self.url, timeout=self.timeout, field="teacher")

    def __call__(self, environment: Environment, history: Sequence[Message]) -> Message | str:
        asked: dict[str, Any] = {"tools": list(environment.tools)} if environment.tools else {}
        answer = self._client.chat.completions.create(
            model=self.model,
            messages=cast(Any, [_spelled(message) for message in history]),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            **asked,
        )
        choice = answer.choices[0]
        if choice.finish_reason not in ("stop", "tool_calls"):  # cut by the limit or by a filter
            return f"the teacher's answer was cut ({choice.finish_reason})"
        # what a server adds to a call is no part of the label
        return Message.from_chat(choice.message.model_dump(exclude_none=True), strict=False)


def _spelled(message: Message) -> dict[str, Any]:
    """The message as servers take it: arguments are JSON text there, and our own marks are unknown."""
    chat = {key: value for key, value in message.to_chat().items() if key != "cut"}
    for call in chat.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return chat
