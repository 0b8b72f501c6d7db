"""Agents that are stepped as environments are, so that a gate can cut their groups and a brancher fork them.

What an agent asks is what its environment says; what the scheduler samples is what the agent is answered. So gates,
branchers, refills and the tree are those of `rollout.scheduler`, as they are. An agent cannot be copied: a fork is a
new agent, which is given the recorded answers again up to the fork and must ask then what the first one asked
(`env.pool.replay` compares). An agent has one conversation here: whoever starts another one, or rewrites its history,
is censored for that reason.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from turntree.core.completion import Completion
from turntree.core.foreign import EnvironmentFault, reason_of
from turntree.core.messages import Message
from turntree.core.protocols import Observation, Task
from turntree.env.local import LocalPool
from turntree.env.pool import Session as Episode
from turntree.gateway.calls import Call, Session, Tools
from turntree.gateway.config import Refused
from turntree.gateway.listening import RequestGuide, cut_at
from turntree.gateway.sampling import Ask, LiveSession, Sampler

_REPEATS = 3  # of one request
_GRACE = 5.0  # seconds in which an agent whose rollout is over may end by itself
_OVER = "the trainer ended this rollout: its group was cut, or it reached a limit; stop here"


@dataclass(eq=False)
class Dialogue:
    """What one agent asks and is answered: between its requests, in the gateway's event loop, and whoever steps it.

    `news` holds what the agent said since its last answer, the session once it ended, or why it cannot go on.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    news: queue.SimpleQueue[tuple[Message, ...] | Session | str] = field(
        default_factory=queue.SimpleQueue[tuple[Message, ...] | Session | str]
    )
    tools: Tools = ()
    over: bool = False
    _asked: Call | None = None
    _repeats: int = 0  # of what was asked last
    _answer: asyncio.Future[Message] | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    # in the event loop

    async def answered(self, session: LiveSession, call: Call) -> Message:
        """What the agent is answered. A request that is repeated gets the same answer: the client had lost it. Not more
        often than clients try again: an agent that goes on asking would never end."""
        asked = self._asked
        self._repeats += 1
        if self._answer is None or asked is None or self._repeats > _REPEATS or call.prompt_ids != asked.prompt_ids:
            self._check(call)
            self._repeats = 0
            self._asked, self._loop, self.tools = call, asyncio.get_running_loop(), call.tools
            self._answer = self._loop.create_future()
            session.asked += 1
            self.news.put(call.added)
        else:
            call.call_id, call.index = asked.call_id, asked.index  # the next call has the next name
        return await asyncio.shield(self._answer)

    def _check(self, call: Call) -> None:
        if self.over:
            raise Refused(403, _OVER, code="session_over")
        if self._asked is None and call.base is None:
            return
        if call.goes_on and call.base and self._asked and call.base.prompt_ids == self._asked.prompt_ids:
            return
        what = "began another conversation" if call.cause in ("start", "continue") else f"rewrote it ({call.cause})"
        problem = f"the agent left its conversation: it {what}; gates and branching need agents that have one"
        self.news.put(problem)
        raise Refused(400, problem, code="unsupported_conversation", param="messages")

    # elsewhere

    def say(self, action: Message) -> None:
        """Answer the agent, which waits."""
        self._settle(lambda answer: answer.set_result(action))

    def end(self, grace: float) -> None:
        """Refuse what the agent asks from now on, and stop it if it does not end by itself within `grace` seconds."""
        self.over = True
        self._settle(lambda answer: answer.set_exception(Refused(403, _OVER, code="session_over")))
        self.news.put(_OVER)
        timer = threading.Timer(grace, self.stop.set)
        timer.daemon = True
        timer.start()

    def _settle(self, settled: Callable[[asyncio.Future[Message]], None]) -> None:
        answer, loop = self._answer, self._loop
        if answer is not None and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if answer.done() else settled(answer))


Plays = Callable[[Any, int, Dialogue], Session]  # runs an agent for a task, in the session of a number, to its end


class Relay(Sampler):
    """Answers agents with what their dialogues are told, and samples nothing."""

    dialogues: dict[str, Dialogue]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.dialogues = {}

    def attend(self, dialogue: Dialogue, session: LiveSession) -> None:
        self.dialogues[session.session_id] = dialogue

    async def _sample(self, session: LiveSession, call: Call, asked: Ask, guide: RequestGuide | None) -> None:
        if asked.form is not None or asked.logprobs:
            form = "a form of the answer (a schema, a forced call)", "tool_choice"
            what, param = form if asked.form is not None else ("log-probabilities", "logprobs")
            raise Refused(400, f"{what}: not with a gate or a brancher", code="unsupported_form", param=param)
        self._sampling(session, call, asked)  # whether the context has room
        try:
            action = await self.dialogues[session.session_id].answered(session, call)
        except asyncio.CancelledError:
            self._end(session, call, "disconnected", "the agent hung up")
            raise
        ids = self._renderer.completion(action)
        # what the agent may know of its tokens: the tree has those that were sampled, with their log-probabilities
        call.completion = Completion(
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            entropies=(0.0,) * len(ids),
            finish="length" if action.cut else "stop",
        )
        answer, call.stop = cut_at(action, asked.stop)
        # names that a replay has again, because the agent sends them back
        called = () if action.cut else answer.tool_calls
        named = [replace(made, id=f"call_{call.message_count}_{i}") for i, made in enumerate(called)]
        call.answer = replace(answer, cut=action.cut and call.stop is None, tool_calls=tuple(named))
        self._end(session, call)


class SteppedAgent(Task):
    """An agent at a task (protocol `Environment`). A copy is a new agent at the beginning of the task, which takes the
    place of an earlier copy; what runs has no copies, so that a pool replays it."""

    def __init__(self, task: Any, plays: Plays, numbers: itertools.count[int], shown: list[Tools]) -> None:
        self.task_id: str = task.task_id
        self.task_type = task.task_type
        self._made = task, plays, numbers, shown
        self._shown = shown
        self._dialogue, self._copy = Dialogue(), None
        self._thread: threading.Thread | None = None

    @property
    def tools(self) -> Tools:
        """Those of the group's first prompt."""
        return self._shown[0] if self._shown else ()

    def another(self) -> SteppedAgent:
        return SteppedAgent(*self._made)

    def fork(self) -> SteppedAgent:
        if self._thread is not None:
            raise EnvironmentFault("a running agent has no copies")
        self.end()
        self._copy = self.another()
        return self._copy

    def reset(self) -> tuple[Message, ...]:
        self._thread = threading.Thread(target=self._play, name="turntree-agent", daemon=True)
        self._thread.start()
        said = self._heard()
        if isinstance(said, Session):
            raise EnvironmentFault("the agent ended before its first model call")
        return said

    def step(self, action: Message) -> Observation:
        self._dialogue.say(action)
        said = self._heard()
        if isinstance(said, Session):
            return Observation((), done=True, success=said.success, reward=said.reward)
        return Observation(said, done=False)

    def end(self, *, wait: bool = False) -> None:
        """End the agent, and its copy; `wait` until their processes are gone."""
        if self._copy is not None:
            self._copy.end(wait=wait)
        if self._thread is not None and self._thread.is_alive():
            self._dialogue.end(0.0 if wait else _GRACE)
            if wait:
                self._thread.join()

    def _play(self) -> None:
        task, plays, numbers, _ = self._made
        try:
            self._dialogue.news.put(plays(task, next(numbers), self._dialogue))
        except BaseException as error:  # nobody would see it in this thread
            self._dialogue.news.put(reason_of(error))

    def _heard(self) -> tuple[Message, ...] | Session:
        """What the agent asks next, or its session. Raises `EnvironmentFault` where it has no reward."""
        said = self._dialogue.news.get()
        if isinstance(said, str):
            raise EnvironmentFault(said)
        if isinstance(said, Session):
            if said.reward is None:
                raise EnvironmentFault(said.reason or "the agent gave no reward")
            if said.call_rewards:
                raise EnvironmentFault("call_rewards do not go with a gate or a brancher")
            return said
        if not self._shown:
            self._shown.append(self._dialogue.tools)
        if self._dialogue.tools != self._shown[0]:
            raise EnvironmentFault("the agent shows other tools than the first of its group")
        return said


class AgentPool(LocalPool):
    """A `LocalPool` of agents: every episode has an agent of its own, which ends with it."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._agents: dict[Episode, SteppedAgent] = {}

    def open(self, environment: Any) -> Episode:
        return self._kept(Episode(environment.another()))

    def fork(self, session: Episode) -> Episode:
        twin, agent = session.twin(), session.environment
        assert isinstance(agent, SteppedAgent)
        return self._kept(Episode(agent.another(), twin.actions, twin.answers))

    def _kept(self, session: Episode) -> Episode:
        assert isinstance(session.environment, SteppedAgent)
        self._agents[session] = session.environment
        return session

    def close(self, session: Episode) -> int:
        calls = super().close(session)
        if (agent := self._agents.pop(session, None)) is not None:
            agent.end()
        return calls

    def shut_down(self) -> None:
        super().shut_down()
        for agent in self._agents.values():
            agent.end(wait=True)
        self._agents.clear()
