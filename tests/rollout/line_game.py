"""A walk on a line, for tests of what actions do. It has no `fork`, so that a copy is a replay."""

import contextlib
import copy
import threading
import time

from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.env.local import LocalPool
from turntree.env.tasks import TaskSet

RESETS = []
CALLS = [0]


class Line:
    """At 0 the walk begins, at `goal` it is won. A mute line says "ok" to everything and tells no progress."""

    tools = ()

    def __init__(self, task_id, goal, mute, noise):
        self.task_id, self.goal, self.mute, self.noise = task_id, goal, mute, noise
        self.at = 0

    def reset(self):
        RESETS.append(self.task_id)
        self.at = 0
        return (Message("user", f"walk to {self.goal}"),)

    def step(self, action):
        word = action.content.strip()
        if word == "crash":
            raise RuntimeError("the line is cut")
        moves = {"right": 1, "east": 1, "left": -1, "run": 2}
        self.at = max(0, self.at + moves.get(word, 0))
        CALLS[0] += 1
        said = "nothing happens" if word not in (*moves, "look") else f"you are at {self.at}"
        said += f" ({CALLS[0]})" if self.noise and word == "look" else ""
        won = self.at == self.goal
        progress = None if self.mute else min(1.0, self.at / self.goal)
        return Observation((Message("user", "ok" if self.mute else said),), won, True if won else None, progress)

    def state(self):
        return self.at


def tasks(split, count, *, seed, goal: int = 5, mute: bool = False, noise: bool = False):
    return [Line(f"{split}-{seed}-{number}", goal, mute, noise) for number in range(count)]


class Slow(Line):
    """A line that waits for its answers."""

    stepping, at_once = [], [0]
    lock = threading.Lock()

    def fork(self):
        return copy.copy(self)

    def step(self, action):
        with self.lock:
            self.stepping.append(self.task_id)
            self.at_once[0] = max(self.at_once[0], len(self.stepping))
        time.sleep(0.002)
        with self.lock:
            self.stepping.pop()
        return super().step(action)


class InThreads:
    """Slow lines, stepped in four threads."""

    @contextlib.contextmanager
    def open(self, splits, *, seed):
        with LocalPool(threads=4) as pool:
            made = {
                split: [Slow(f"{split}-{seed}-{number}", 5, False, False) for number in range(count)]
                for split, count in splits.items()
            }
            yield TaskSet(tasks=made, pool=pool)
