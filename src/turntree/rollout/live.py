"""An unfinished rollout: its place in the tree, its conversation, and the tokens that the engine has seen.

The requests, appended nodes and endings of a rollout that the scheduler plays.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from turntree.core import seeds
from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.config import Bounded, Positive
from turntree.core.cost import Cost
from turntree.core.errors import TurntreeError
from turntree.core.foreign import reason_of
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation, Renderer, task_of
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.logs.groups import action_text
from turntree.rollout.rewards import Episode, RewardSum

_TOTAL = "only its last reward counts; give the sum so far and say total_reward = True, or give 0 until the end"
CutTurns = Literal["fail", "judge"]  # reward of a cut turn: 0, or the verdict on its text


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig(Bounded):
    """Limits on the length of an episode."""

    max_turns: Positive = 30
    """Longest episode."""
    max_context: Positive = 4096
    """Longest prompt plus completion, in tokens, beside the engine's own limit."""
    cut_turns: CutTurns = "fail"
    """A turn that the token limit cut ends the episode as a failure, or the environment judges its text. Its tool calls
    are never executed."""
    sampling: Sampling = field(default_factory=Sampling)

    def fails(self, action: Message) -> bool:
        """Whether the episode ends with this turn, which its environment does not see."""
        return action.cut and self.cut_turns == "fail"


@dataclass(frozen=True)
class Ending:
    """How a rollout ended, and the environment's verdict on it. `episode` is what reward functions judge, where the
    rollout came to an end."""

    stop: StopReason
    verdict: Verdict
    episode: Episode | None = None


def judged(trees: Sequence[Mapping[int, Ending]], functions: RewardSum | None) -> list[Rewards]:
    """The verdict on every leaf of some trees: that of the functions on its episode, where there are functions and it
    has one. All episodes are judged together."""
    verdicts = [{leaf: ending.verdict for leaf, ending in endings.items()} for endings in trees]
    if functions is not None:
        told = [(found, leaf, e) for found, tree in zip(verdicts, trees, strict=True) for leaf, e in tree.items()]
        told = [(found, leaf, ending.episode) for found, leaf, ending in told if ending.episode is not None]
        given = functions.judge_all([episode for *_, episode in told], [found[leaf] for found, leaf, _ in told])
        for (found, leaf, _), verdict in zip(told, given, strict=True):
            found[leaf] = verdict
    return [Rewards(found) for found in verdicts]


@dataclass(eq=False)
class LiveRollout:
    """One rollout of a group. `key` is its sample, followed by one number per branch it was forked at.

    `leaf` is its current node: at first `origin`, then the last of `nodes`, which it appended itself, each with the
    rollout's turn then. `answers` are the environment's observations, the task first. A gate may see their `progress`,
    their texts (`observations`) and `actions`, as the rollout log tells them. `begun` are the tokens that its next turn
    already has, where it forked inside a turn; `token_ids` end with them.
    """

    key: tuple[int, ...]
    tree: RolloutTree
    leaf: int
    messages: list[Message]
    token_ids: tuple[int, ...]
    answers: list[Observation]
    nodes: dict[int, int] = field(default_factory=dict[int, int])
    actions: list[str] = field(default_factory=list[str])
    entropies: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])  # by turn
    stopped: bool = True  # whether the last completion ended with its stop token
    cut: bool = False  # whether it ended with a turn that the token limit cut
    begun: tuple[int, ...] = ()
    begun_entropies: tuple[float, ...] = ()
    forked_at: int = 0  # the turn at which it left the rollout that it was forked from; 0: an independent rollout
    budget: int = 0  # leaves that may still be forked off it
    forks: int = 0  # rollouts that were forked off it

    def __post_init__(self) -> None:
        self.origin = self.leaf

    @property
    def turns(self) -> int:
        """Turns that the environment has answered, and the cut one that ended the rollout."""
        return len(self.answers) - 1 + self.cut

    @property
    def observations(self) -> list[str]:
        return ["\n".join(message.content for message in answer.messages) for answer in self.answers]

    @property
    def just_forked(self) -> bool:
        """Whether its next turn is the one at which it left another rollout."""
        return self.turns + 1 == self.forked_at

    def request(self, config: EpisodeConfig, seed: int) -> GenerationRequest:
        """The request for the rest of the next turn. Its draws depend on (seed, task, key, turn) only."""
        key = seeds.of_turn(seed, self.tree.task_id, self.key, self.turns)
        sampling = replace(config.sampling, max_tokens=config.sampling.max_tokens - len(self.begun))
        return GenerationRequest(prompt_ids=self.token_ids, sampling=sampling, seed=key, retain=True)

    def turn_tokens(self, completion: Completion) -> tuple[int, ...]:
        """The whole turn that ends with `completion`."""
        return (*self.begun, *completion.token_ids)

    def append_turn(self, completion: Completion, action: Message, *, shared: int = 0) -> None:
        """Append the sampled completion, its first `shared` tokens as a separate node."""
        node = self.tree.add_completion(self.leaf, completion, action, shared=shared)
        assert node.parent is not None
        self.nodes |= dict.fromkeys([node.parent, node.id] if shared else [node.id], len(self.answers))
        self.leaf = node.id
        self.messages.append(action)
        self.token_ids = (*self.token_ids, *completion.token_ids)
        self.stopped = completion.finish == "stop"
        self.actions.append(action_text(action))
        self.entropies.append((*self.begun_entropies, *completion.entropies))
        self.begun = self.begun_entropies = ()

    def branch(self, completion: Completion, shared: int) -> LiveRollout:
        """A rollout that leaves this one after the first `shared` tokens of `completion`. Call it after this rollout
        has appended the completion."""
        last = self.tree[self.leaf]
        assert last.parent is not None
        self.forks += 1
        before = len(self.token_ids) - len(completion.token_ids) + shared
        return LiveRollout(
            key=(*self.key, self.forks),
            tree=self.tree,
            leaf=last.parent,
            messages=self.messages[:-1],
            token_ids=self.token_ids[:before],
            actions=self.actions[:-1],
            answers=[*self.answers],
            entropies=self.entropies[:-1],
            begun=completion.token_ids[:shared],
            begun_entropies=completion.entropies[:shared],
            forked_at=last.turn,
        )

    def append_answer(self, observation: Observation, prompt: tuple[int, ...], cost: Cost) -> None:
        """Append the environment's answer. `prompt` is that of the next turn, which begins with the tokens so far."""
        added, said = prompt[len(self.token_ids) :], {"messages": observation.messages, "metrics": observation.numbers}
        node = self.tree.add(self.leaf, NodeKind.OBSERVATION, added, **said, cost=cost)
        self.nodes[node.id] = len(self.answers)
        self.leaf = node.id
        self.messages += observation.messages
        self.token_ids = prompt
        self.answers.append(observation)


def cancelled(what: str, limit: float) -> Ending:
    return Ending(StopReason.CANCELLED, Verdict(None, f"the {what} took longer than {limit:g} seconds"))


class RendererFault(TurntreeError):
    """A chat template or a parser failed on the messages of one rollout, which is then censored."""

    def __init__(self, error: BaseException, reason: str) -> None:
        super().__init__(str(error) if isinstance(error, TurntreeError) else reason)

    @property
    def ending(self) -> Ending:
        return Ending(StopReason.RENDERER_ERROR, Verdict(None, str(self)))


def task_tokens(renderer: Renderer, task: Observation, tools: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """The prompt of a task. Raises `RendererFault`."""
    try:
        return _ids(renderer.prompt(task.messages, tools))
    except BaseException as error:  # a bad rollout is data: the boundary to foreign templates and parsers
        raise RendererFault(error, reason_of(error)) from error


def _ids(rendered: Any) -> tuple[int, ...]:
    """Token ids as a renderer, which may be foreign code, gives them. Raises `TypeError`."""
    if isinstance(rendered, str | bytes):  # bytes are numbers, too, and an empty text holds nothing wrong
        raise TypeError("the renderer gave a text instead of token ids")
    return tuple(map(operator.index, rendered))


def sampled_turn(
    renderer: Renderer, token_ids: Sequence[int], completion: Completion, tools: Sequence[dict[str, Any]] = ()
) -> Message:
    """The assistant message in a sampled turn, which ends with `completion` and says whether that was cut. Raises
    `RendererFault`."""
    try:
        return replace(renderer.parse(token_ids, tools), cut=completion.finish == "length")
    except BaseException as error:
        raise RendererFault(error, reason_of(error)) from error


def played_turn(
    renderer: Renderer,
    token_ids: Sequence[int],
    completion: Completion,
    config: EpisodeConfig,
    tools: Sequence[dict[str, Any]] = (),
) -> Message:
    """The same in an episode. A cut turn that its environment is to judge has no tool calls: the policy did not finish
    the turn, so they must not be executed."""
    action = sampled_turn(renderer, token_ids, completion, tools)
    return replace(action, tool_calls=()) if action.cut and not config.fails(action) else action


def next_prompt(
    rollout: LiveRollout, observation: Observation, task: Environment, renderer: Renderer
) -> tuple[int, ...]:
    """The prompt of the turn after `observation`: what the engine has seen and the tokens that the observation adds.
    Raises `RendererFault`."""
    said, new, tools = rollout.messages, observation.messages, task.tools
    try:
        return (*rollout.token_ids, *_ids(renderer.extend(said, new, tools, stopped=rollout.stopped)))
    except BaseException as error:
        raise RendererFault(error, reason_of(error)) from error


def ending_of(rollout: LiveRollout, task: Environment, config: EpisodeConfig) -> Ending | None:
    """How the rollout ended with its last answer; None: it goes on. Limits are outcomes and are scored."""
    observation = rollout.answers[-1]
    if observation.done:
        stop, why = StopReason.COMPLETED, "the episode is over"
    elif rollout.turns >= config.max_turns:
        stop, why = StopReason.MAX_TURNS, f"{config.max_turns} turns"
    elif not has_room(rollout.token_ids, config):
        stop, why = StopReason.MAX_TOKENS, f"{config.max_context} tokens of context"
    elif observation.reward and not task_of(task).total_reward:
        why = f"the environment gave reward {observation.reward:g} at turn {rollout.turns}, and goes on: {_TOTAL}"
        return Ending(StopReason.ENVIRONMENT_ERROR, Verdict(None, why))
    else:
        return None
    success, reward = observation.success, observation.reward
    if not observation.done:
        success, reward = False, _at_a_limit(rollout, task)
    elif reward is None and success is not None:
        reward = float(success)
    if reward is None:
        why = "the episode is over, and its environment says neither reward nor success"
    verdict = Verdict(reward, why, success=success)
    return ended(stop, verdict, task, rollout.messages, rollout.answers)


def cut_ending(rollout: LiveRollout, task: Environment, config: EpisodeConfig) -> Ending:
    """How the rollout ends after a cut turn. The reward is 0, or the environment's reward for an ending there if that
    is less, so that a policy cannot avoid a penalty with endless text."""
    rollout.cut = True
    why = f"cut by the limit of {config.sampling.max_tokens} tokens a turn"
    verdict = Verdict(min(0.0, _at_a_limit(rollout, task)), why, success=False)
    return ended(StopReason.MAX_TOKENS, verdict, task, rollout.messages, rollout.answers)


def _at_a_limit(rollout: LiveRollout, task: Environment) -> float:
    """The reward of an episode that a limit ends here."""
    last = rollout.answers[-1].reward
    return float(task_of(task).failure_reward) if last is None else last


def has_room(token_ids: Sequence[int], config: EpisodeConfig) -> bool:
    """Whether another completion fits the context."""
    return len(token_ids) + config.sampling.max_tokens <= config.max_context


def no_room(config: EpisodeConfig) -> Ending:
    """The ending of a whole group whose task leaves no room for a completion. It says nothing about the policy, which
    was never asked."""
    why = f"the task alone leaves no room in {config.max_context} tokens of context"
    return Ending(StopReason.NO_ROOM, Verdict(None, why))


def ended(
    stop: StopReason, verdict: Verdict, task: Environment, messages: Sequence[Message], answers: Sequence[Observation]
) -> Ending:
    """The ending of a rollout that came to an end, with its episode. `answers[0]` is the task."""
    episode = Episode(
        task_id=task.task_id,
        task_type=task_of(task).task_type,
        messages=tuple(messages),
        tools=tuple(task.tools),
        observations=tuple(answers),
        stop=stop,
        reward=verdict.reward,
        success=verdict.success,
    )
    return Ending(stop, verdict, episode)
