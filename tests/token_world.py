"""A world whose every law is known: a policy that samples token by token from a distribution of three tokens that
depends on the whole episode, an environment whose reward depends on all of it, and the expected reward, enumerated."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

from scripted_engine import ScriptedAnswer, ScriptedEngine
from turntree.core.completion import Finished, GenerationRequest, Sampling
from turntree.core.cost import NO_COST, Cost
from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.rollout.live import EpisodeConfig

STOP, TASK, TOLD, CALM, WILD = range(5)
VOCABULARY = 5
LONGEST = 3  # words of a turn, before its stop token
TURNS = 3
EPISODES = EpisodeConfig(max_turns=TURNS, sampling=Sampling(max_tokens=LONGEST + 1))

Turns = tuple[tuple[int, ...], ...]


@functools.cache
def chances(episode: Turns) -> tuple[tuple[int, float], ...]:
    """The next token of the last turn. First turns are calm; later, a wild word makes the next one uncertain."""
    *before, turn = episode
    if len(turn) == LONGEST:
        return ((STOP, 1.0),)
    if not before:
        return ((STOP, 0.0), (CALM, 0.95), (WILD, 0.05))
    if turn:
        return (
            ((STOP, 0.1), (CALM, 0.45), (WILD, 0.45)) if turn[-1] == WILD else ((STOP, 0.1), (CALM, 0.8), (WILD, 0.1))
        )
    wild = 0.4 + 0.1 * (sum(words.count(WILD) for words in before) % 3)
    return ((STOP, 0.0), (CALM, 1 - wild), (WILD, wild))


def entropy(episode: Turns) -> float:
    return -math.fsum(p * math.log(p) for _, p in chances(episode) if p)


def over(episode: Turns) -> bool:
    """After three turns, or two the last of which was short."""
    return len(episode) == TURNS or (len(episode) == 2 and len(episode[-1]) < 2)


def reward(episode: Turns) -> float:
    """How wild the last two turns were: 1 for two wild words, and a little for an even number of words in all."""
    wild = sum(words.count(WILD) > 1 for words in episode[-2:])
    return wild + 0.1 * (sum(map(len, episode)) % 2 == 0)


def expected_reward(episode: Turns = ((),)) -> float:
    """Over all ways to go on from `episode`, which the policy is in the middle of."""
    total = 0.0
    for token, chance in chances(episode):
        said = (*episode[:-1], (*episode[-1], token))
        if not chance:
            continue
        if token != STOP:
            total += chance * expected_reward(said)
        elif over(episode):
            total += chance * reward(episode)
        else:
            total += chance * expected_reward((*episode, ()))
    return total


def episode_in(token_ids: Sequence[int]) -> Turns:
    """The words of a conversation by turn, of which the last is not over."""
    turns: list[tuple[int, ...]] = [()]
    for token in token_ids:
        if token == TOLD:
            turns.append(())
        elif token in (CALM, WILD):
            turns[-1] = (*turns[-1], token)
    return tuple(turns)


def sample(prompt_ids: tuple[int, ...], seed: int) -> ScriptedAnswer:
    """The rest of the turn that `prompt_ids` end in."""
    draw, episode = random.Random(seed), episode_in(prompt_ids)
    said: list[int] = []
    logprobs: list[float] = []
    entropies: list[float] = []
    while STOP not in said:
        tokens, weights = zip(*chances(episode), strict=True)
        (token,) = draw.choices(tokens, weights)
        said.append(token)
        logprobs.append(math.log(weights[tokens.index(token)]))
        entropies.append(entropy(episode))
        episode = (*episode[:-1], (*episode[-1], token))
    return ScriptedAnswer(tuple(said), tuple(logprobs), tuple(entropies))


class WatchedEngine(ScriptedEngine):
    """The policy; remembers what it was asked and adds up what it charges."""

    def __init__(self, **options: Any) -> None:
        super().__init__(sample, {STOP}, vocab_size=VOCABULARY, **options)
        self.requests: list[GenerationRequest] = []
        self.charged = NO_COST

    def submit(self, request: GenerationRequest) -> int:
        self.requests.append(request)
        return super().submit(request)

    def cancel(self, ticket: int) -> Cost:
        cost = super().cancel(ticket)
        self.charged += cost
        return cost

    def poll(self, timeout: float | None = None) -> list[Finished]:
        found = super().poll(timeout)
        self.charged += sum((each.completion.cost for each in found if each.completion), NO_COST)
        return found


class TokenRenderer:
    """Messages are token ids in decimal: nothing is lost between text and tokens."""

    stop_ids = frozenset({STOP})

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        return (TASK,)

    def completion(self, message: Message) -> tuple[int, ...]:
        return tuple(map(int, message.content.split()))

    def extend(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Any = (), *, stopped: bool = True
    ) -> tuple[int, ...]:
        return (TOLD,)

    def parse(self, token_ids: Sequence[int], tools: Any = ()) -> Message:
        return Message("assistant", " ".join(map(str, token_ids)))


class TokenWorld:
    """The environment: it answers with all that it was told, so that a fork which saw another past shows."""

    tools: tuple[dict[str, Any], ...] = ()

    def __init__(self, task_id: str = "task", said: tuple[str, ...] = ()) -> None:
        self.task_id, self.said = task_id, said

    def reset(self) -> tuple[Message, ...]:
        self.said = ()
        return (Message("user", "go"),)

    def step(self, action: Message) -> Observation:
        self.said = (*self.said, action.content)
        episode = tuple(tuple(int(w) for w in turn.split() if int(w) != STOP) for turn in self.said)
        done = over(episode)
        return Observation(
            (Message("user", " / ".join(self.said)),), done, done, reward=reward(episode) if done else None
        )

    def fork(self) -> TokenWorld:
        return TokenWorld(self.task_id, self.said)
