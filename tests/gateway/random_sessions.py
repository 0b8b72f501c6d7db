"""Random sessions of agents: chains of calls with retries, candidates, sub-agents, compactions and faults."""

from __future__ import annotations

import random
from collections.abc import Callable

from turntree.core.completion import Completion
from turntree.core.cost import Cost
from turntree.core.messages import Message
from turntree.gateway.calls import Call, Cause, Session

Ids = tuple[int, ...]
Sampler = Callable[[Ids, random.Random], tuple[Ids, tuple[float, ...]]]
ALPHABET = range(2, 9)  # few tokens, so that prompts and answers coincide often
SYSTEM: Ids = (1, 2, 3)


def ids(draw: random.Random, low: int, high: int) -> Ids:
    return tuple(draw.choice(ALPHABET) for _ in range(draw.randint(low, high)))


def sequence_of(call: Call) -> Ids:
    """All that the engine saw and sampled."""
    return call.prompt_ids + call.sampled_ids


def any_tokens(prompt: Ids, draw: random.Random) -> tuple[Ids, tuple[float, ...]]:
    sampled = ids(draw, 1, 3)
    return sampled, tuple(-draw.random() for _ in sampled)


class Agent:
    """Plays one session. `calls` are what a gateway would have kept."""

    def __init__(self, name: str, draw: random.Random, sampler: Sampler = any_tokens, task: str = "task") -> None:
        self.name, self.task, self._draw, self._sampler = name, task, draw, sampler
        self.calls: list[Call] = []

    def ask(self, prompt: Ids, cause: Cause, *, follows: Call | None = None) -> Call:
        sampled, logprobs = self._sampler(prompt, self._draw)
        completion = Completion(
            token_ids=sampled,
            logprobs=logprobs,
            entropies=(0.0,) * len(sampled),
            finish="stop",
            cost=Cost(turns=1, decoded_tokens=len(sampled), prefilled_tokens=len(prompt)),
        )
        return self._keep(prompt, cause, completion, follows)

    def fail(self, prompt: Ids, cause: Cause) -> Call:
        return self._keep(prompt, cause, None, None)

    def _keep(self, prompt: Ids, cause: Cause, completion: Completion | None, follows: Call | None) -> Call:
        index = len(self.calls)
        call = Call(
            call_id=f"{self.name}.{index}",
            index=index,
            added_ids=prompt,
            added=(Message("user", f"prompt {index}"),),
            base=follows,
            completion=completion,
            cause=cause,
            status="failed" if completion is None else "kept",
            cost=Cost(prefilled_tokens=len(prompt)) if completion is None else Cost(),
        )
        self.calls.append(call)
        return call

    def session(self, reward: float | None, sample: int = 0, reason: str = "") -> Session:
        calls = tuple(self.calls)
        return Session(
            session_id=self.name, task_id=self.task, calls=calls, reward=reward, sample=sample, reason=reason
        )


def play(agent: Agent, task: Ids, draw: random.Random, steps: int) -> None:
    """One random session: a main conversation, and what agents do beside it."""
    last = agent.ask(SYSTEM + task, "start")
    for _ in range(steps):
        kind = draw.choice(["continue", "continue", "retry", "candidates", "sub-agent", "compaction", "fault", "back"])
        if kind == "continue":
            last = agent.ask(sequence_of(last) + ids(draw, 1, 2), "continue", follows=last)
        elif kind == "retry":
            last = agent.ask(last.prompt_ids, "retry", follows=last)
        elif kind == "candidates":
            prompt = sequence_of(last) + ids(draw, 1, 2)
            several = [agent.ask(prompt, "retry" if i else "continue", follows=last) for i in range(3)]
            last = draw.choice(several)
        elif kind == "sub-agent":
            inner = agent.ask(SYSTEM[: draw.randint(0, 3)] + ids(draw, 1, 3), "start")
            for _ in range(draw.randint(0, 2)):
                inner = agent.ask(sequence_of(inner) + ids(draw, 1, 2), "continue", follows=inner)
        elif kind == "compaction":
            kept = last.prompt_ids[: draw.randint(len(SYSTEM), len(last.prompt_ids))]
            last = agent.ask(kept + ids(draw, 1, 2), "compaction")
        elif kind == "fault":
            agent.fail(sequence_of(last) + ids(draw, 1, 2), "continue")
        else:  # the agent goes on from an earlier call
            earlier = draw.choice([call for call in agent.calls if call.completion is not None])
            last = agent.ask(sequence_of(earlier) + ids(draw, 1, 2), "continue", follows=earlier)


def sessions(draw: random.Random, sampler: Sampler = any_tokens, count: int = 4) -> list[Session]:
    """The sessions of one task. One in six has no reward."""
    task, found = ids(draw, 1, 3), list[Session]()
    for sample in range(count):
        agent = Agent(f"s{sample}", draw, sampler)
        play(agent, task, draw, draw.randint(0, 7))
        reward = None if draw.random() < 1 / 6 else draw.choice([0.0, 0.25, 1.0])
        found.append(agent.session(reward, sample, "" if reward is not None else "the agent was killed"))
    return found
