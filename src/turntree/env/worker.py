"""The worker's side of a process pool: holds environments, steps them one call at a time, answers through a pipe."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from turntree.core.foreign import EnvironmentFault, EnvironmentGone, described
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation
from turntree.env.pool import Answer, checked, replay, start
from turntree.run.workers import die_with_parent


@dataclass(frozen=True)
class Call:
    """One call, on the wire. `action` None is `reset`; `forget` names sessions that are over. Where the worker does not
    hold the session, `source` is its pickled environment, for a replay of `actions`, which had `answers`."""

    session: int
    action: Message | None
    forget: Sequence[int]
    source: bytes | None = None
    actions: Sequence[Message] = ()
    answers: Sequence[Observation] = ()


def serve(pipe: Connection) -> None:
    """Answer calls until the other end closes.

    It sends `None` when a step begins, so that the time limit does not include the start of the worker, imports of
    environments or replayed steps. The worker leads a process group: processes that its environments start are killed
    with it, and an interrupt at the terminal reaches only the parent. It ends with its parent, even during a call.
    """
    os.setsid()
    die_with_parent()
    held: dict[int, Environment] = {}
    pipe.send(None)  # ready
    while True:
        try:
            call: Call = pipe.recv()
        except EOFError:
            return
        for session in call.forget:
            held.pop(session, None)
        pipe.send(_answer(call, held, lambda: pipe.send(None)))


def _answer(call: Call, held: dict[int, Environment], next_step: Callable[[], None]) -> Answer | EnvironmentGone:
    started, calls = time.perf_counter(), 0
    environment = held.pop(call.session, None)
    try:
        if call.source is not None:
            environment = pickle.loads(call.source)
            next_step()
            for turn in replay(environment, call.actions, call.answers):
                calls = turn
                next_step()
        if environment is None:
            raise EnvironmentFault("the worker does not hold the session")
        calls += call.action is not None
        observation = start(environment) if call.action is None else checked(environment.step(call.action))
    except EnvironmentGone as gone:
        return EnvironmentGone(str(gone))  # also one of a class that the other end does not know
    except BaseException as error:  # the boundary to foreign code, which may even try to exit
        return Answer(fault=described(error), calls=calls, seconds=time.perf_counter() - started)
    held[call.session] = environment
    return Answer(observation=observation, calls=calls, seconds=time.perf_counter() - started)
