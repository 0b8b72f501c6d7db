"""The verifier `outcome`: play an action, let the policy go on to the end a few times, and count the successes.

It needs no demonstration, so it judges states that nobody labelled (`train pivot --states own` without a teacher). The
reward is the Monte-Carlo value of VinePPO (Kazemnejad et al. 2024), of a turn; none of turntree's three papers has it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turntree.core import parts, seeds
from turntree.core.completion import Sampling
from turntree.core.config import Part, to_value
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError
from turntree.core.foreign import EnvironmentFault, call_foreign, reason_of
from turntree.core.labels import Rewards
from turntree.core.messages import Message, action_kind
from turntree.core.protocols import (
    Environment,
    Observation,
    Renderer,
    StreamingEngine,
    Task,
    TurnState,
    TurnVerifier,
    task_of,
)
from turntree.core.tree import StopReason
from turntree.core.verdict import Verdict
from turntree.env.pool import checked
from turntree.rollout.live import EpisodeConfig, has_room
from turntree.rollout.players import Setting, grow
from turntree.rollout.rebuild import Misfit, Rebuilder, Walked
from turntree.run.identity import fingerprint


class Outcome(TurnVerifier):
    """The share of `forks` continuations that solve the task, for an action (protocol `TurnVerifier`). `environment` is
    the one that the states were played in; its options replace those of the trace. Episodes have the limits of the run
    where it plays itself (`episodes`), unless options say otherwise.

    The reward has the noise of few continuations: actions that make no difference differ. Verdicts hold for the weights
    that play on, which `name` does not say. What continuing cost is in the verdict (`Verdict.cost`).

    Args:
        forks: Continuations of every action.
        max_turns: Longest episode, counted from the task (default: the run's).
        max_tokens: Longest completion of one turn (default: the run's, else 256).
        temperature: Sampling temperature of continuations (default: the run's, else 1).
    """

    compares = False
    batches = True

    def __init__(
        self,
        environment: Part | None = None,
        engine: StreamingEngine | None = None,
        renderer: Renderer | None = None,
        episodes: EpisodeConfig | None = None,
        *,
        forks: int = 8,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        if environment is None:
            hint = "name the environment that the states were played in: --environment NAME"
            raise ConfigError("`outcome` plays on and needs one", field="environment", hint=hint)
        if engine is None or renderer is None:
            hint = "use it where a policy samples: profile, train pivot"
            raise ConfigError("`outcome` plays on with a policy, and here is none", field="verifier", hint=hint)
        if forks < 1:
            raise ConfigError("must be at least 1", field="verifier.forks")
        usual = episodes or EpisodeConfig(sampling=Sampling(temperature=1.0, max_tokens=256))
        sampling = replace(
            usual.sampling,
            max_tokens=max_tokens or usual.sampling.max_tokens,
            temperature=usual.sampling.temperature if temperature is None else temperature,
        )
        context = min(usual.max_context, engine.max_context)
        limited = replace(usual, max_turns=max_turns or usual.max_turns, max_context=context, sampling=sampling)
        code = fingerprint([parts.identity("environments", environment), to_value(environment.options)])
        limits = {"forks": forks, "max_turns": limited.max_turns, "max_tokens": sampling.max_tokens}
        limits |= {"temperature": sampling.temperature, "max_context": context}
        options = "+".join(f"{key}={value:g}" for key, value in limits.items())
        self.name = f"outcome/1+{options}+environment={environment.name}@{code}"
        self._play_on = PlayOn(Rebuilder(environment), engine, renderer, limited, forks)

    def close(self) -> None:
        """Close the environments' tasks."""
        self._play_on.rebuilder.close()

    def judge(self, state: TurnState, action: Message) -> Verdict:
        return self.judge_all([(state, action)])[0]

    def judge_all(self, pairs: Sequence[tuple[TurnState, Message]], seed: int = 0) -> list[Verdict]:
        """The verdicts in order; all play on together. The draws depend on `seed`, the state's id and the action; those
        of an equal pair on how often it came before. Raises `InputError` where a trace does not say how to build its
        environment."""
        begun = [Continuation(state, action, fingerprint(action.to_chat())) for state, action in pairs]
        self._play_on(begun, seeds.derive(seed, "outcome"))
        return [_verdict(one) for one in begun]


def _verdict(one: Continuation) -> Verdict:
    kind, count = action_kind(one.action), len(one.outcomes)
    if not count:
        return Verdict(None, one.reason, kind, cost=one.cost)
    won = sum(one.outcomes)
    told = "the action ends the episode" if one.exact else f"{won:g} of {count} continuations solve the task"
    return Verdict(won / count, told, kind, cost=one.cost)


# continuations


@dataclass
class Continuation:
    """An action at a state, and how episodes that went on from it ended. `name` tells the actions of one state apart:
    the draws depend on it. Without outcomes, `reason` says why. `exact`: nothing was sampled after the action."""

    state: TurnState
    action: Message
    name: str
    outcomes: list[float] = field(default_factory=list[float])
    exact: bool = True
    reason: str = ""
    cost: Cost = NO_COST

    def begin(self, at: Environment, episodes: EpisodeConfig) -> Rest | None:
        """The rest of the episode after the action; None where the action ends it, or fails."""
        if episodes.fails(self.action):
            self.outcomes = [0.0]  # a cut turn ends the episode as a failure
            return None
        left = episodes.max_turns - self.state.turn - 1
        if left < 0:
            self.reason = f"the state is beyond the {episodes.max_turns} turns of an episode (max_turns)"
            return None
        action = replace(self.action, tool_calls=()) if self.action.cut else self.action  # its calls are never executed
        try:
            environment = call_foreign(at.fork)
            answer = call_foreign(lambda: checked(environment.step(action)))
        except EnvironmentFault as fault:
            self.reason = reason_of(fault)
            return None
        if answer.done or not left:
            self._end([answer.success if answer.done else bool(answer.success)])
            return None
        self.exact = False
        said = (*self.state.history, action, *answer.messages)
        return Rest(f"{self.state.id}/{self.name}", environment, said, left)

    def fill(self) -> None:
        """The answer to the action leaves no room for a turn: the episode ends there, as a failure."""
        self.outcomes, self.exact = [0.0], True

    def end(self, rewards: Rewards) -> None:
        judged = [verdict for verdict in rewards.verdicts.values() if verdict.reward is not None]
        if not judged:
            self.reason = next((verdict.reason for verdict in rewards.verdicts.values()), "no continuation")
        else:
            self._end([verdict.success for verdict in judged])

    def _end(self, successes: Sequence[bool | None]) -> None:
        self.outcomes = [float(success) for success in successes if success is not None]
        if not self.outcomes:
            self.reason = "the environment does not say whether the task is solved (success)"


@dataclass(frozen=True)
class PlayOn:
    """Lets the policy go on from actions at states to the end of their episodes, `forks` times each."""

    rebuilder: Rebuilder
    engine: StreamingEngine
    renderer: Renderer
    episodes: EpisodeConfig
    forks: int

    def __call__(self, begun: Sequence[Continuation], seed: int) -> None:
        """Enter the outcomes of all; they are played together. A state that cannot be rebuilt gives a reason. Raises
        `InputError` for traces that do not say how to build their environment."""
        states: dict[int, Walked | str] = {}
        rests: list[tuple[Continuation, Rest]] = []
        for one in begun:
            started, played = time.perf_counter(), 1
            if id(one.state) not in states:
                played += one.state.turn  # the state's history is played again, once
                try:
                    states[id(one.state)] = self.rebuilder.at(one.state)
                except (EnvironmentFault, Misfit) as fault:
                    states[id(one.state)] = reason_of(fault)
            found = states[id(one.state)]
            if isinstance(found, str):
                one.reason = found
            elif (rest := one.begin(found[0], self.episodes)) is not None:
                rests.append((one, rest))
            one.cost += Cost(tool_calls=played, environment_seconds=time.perf_counter() - started)
        tasks = [rest for _, rest in rests]
        part = Setting(part=True)
        grown = grow(tasks, self.engine, self.renderer, self.episodes, group_size=self.forks, seed=seed, setting=part)
        for (one, rest), (tree, rewards) in zip(rests, grown, strict=True):
            if tree.stop_reason(tree.ends()[0]) is StopReason.NO_ROOM and self._had_room(one.state, rest):
                one.fill()
            else:
                one.end(rewards)
            one.cost += tree.cost

    def _had_room(self, state: TurnState, rest: Rest) -> bool:
        """Whether a turn at the state itself fits the context."""
        context = min(self.episodes.max_context, self.engine.max_context)
        return has_room(self.renderer.prompt(state.history, rest.tools), replace(self.episodes, max_context=context))


class Rest(Task):
    """The rest of an episode from a state inside it (protocol `Environment`): the conversation so far is the task, and
    after `turns` more turns the episode ends as a failure."""

    def __init__(self, task_id: str, environment: Environment, messages: Sequence[Message], turns: int) -> None:
        self.task_id, self._environment = task_id, environment
        self._messages, self._turns = tuple(messages), turns
        self.total_reward = task_of(environment).total_reward

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return tuple(self._environment.tools)

    def reset(self) -> tuple[Message, ...]:
        return self._messages

    def step(self, action: Message) -> Observation:
        self._turns -= 1
        answer = self._environment.step(action)
        if answer.done or self._turns > 0:
            return answer
        return Observation(answer.messages, done=True, success=False, reward=answer.reward, metrics=answer.metrics)

    def fork(self) -> Rest:
        return Rest(self.task_id, self._environment.fork(), self._messages, self._turns)
