"""A walk on a line, for tests of what actions do. It has no `fork`, so that a copy is a replay."""

from turntree.core.messages import Message
from turntree.core.protocols import Observation

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
