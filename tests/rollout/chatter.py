"""A task that rewards what a random policy says differently: every group has a gradient."""

from turntree.core.messages import Message
from turntree.core.protocols import Observation


class Chatter:
    tools = ()
    total_reward = True

    def __init__(self, task_id, turns):
        self.task_id, self.turns = task_id, turns
        self.said = ""

    def reset(self):
        self.said = ""
        return (Message("user", f"Talk about {self.task_id}."),)

    def step(self, action):
        self.said += action.content + "|"
        done = self.said.count("|") >= self.turns
        return Observation((Message("user", "go on"),), done, done or None, reward=sum(map(ord, self.said)) % 10 / 10)


def tasks(split, count, *, seed, turns: int = 3):
    return [Chatter(f"{split} {seed} {number}", turns) for number in range(count)]
