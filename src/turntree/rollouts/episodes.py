"""Whole episodes: every task's rollouts grown to their end in lockstep waves, one model call a turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from turntree.core import seeds
from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.cost import Cost
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.protocols import Engine, Environment, Renderer
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """How long an episode may become. `max_context` bounds prompt plus completion, in tokens, beside the engine's."""

    max_turns: int = 30
    max_context: int = 4096
    sampling: Sampling = field(default_factory=Sampling)


@dataclass
class _Live:
    """One unfinished rollout: its environment, its conversation and the tokens that the engine has seen."""

    tree: RolloutTree
    sample: int
    environment: Environment
    leaf: int
    messages: list[Message]
    token_ids: tuple[int, ...]


Finished = Callable[[int], object]  # told how many rollouts ended


def grow(
    environments: Sequence[Environment],
    engine: Engine,
    renderer: Renderer,
    config: EpisodeConfig,
    *,
    group_size: int = 1,
    seed: int,
    finished: Finished | None = None,
) -> list[tuple[RolloutTree, Rewards]]:
    """Play `group_size` episodes of every environment to the end; returns a tree and its rewards for each, in order.

    The reward of a leaf is 1.0 when its environment reported success, 0.0 when the episode ended without it (turn
    and context limits included), and None when the environment failed. `finished` is told
    how many rollouts ended after every wave. The draws of (task, sample, turn) depend on `seed` only.
    """
    trees = [RolloutTree(environment.task_id) for environment in environments]
    verdicts: list[dict[int, Verdict]] = [{} for _ in trees]
    place = {id(tree): index for index, tree in enumerate(trees)}
    live: list[_Live] = []
    config = replace(config, max_context=min(config.max_context, engine.max_context))
    for tree, environment, found in zip(trees, environments, verdicts, strict=True):
        planted = _plant(tree, environment, renderer, group_size)
        root = tree.roots[0]
        if len(tree[root].token_ids) + config.sampling.max_tokens > config.max_context:
            tree.stop(root, StopReason.MAX_TOKENS)
            found[root] = Verdict(0.0, f"the task alone leaves no room in {config.max_context} tokens of context")
        else:
            live += planted
    while live:
        requests = [_request(rollout, config, seed) for rollout in live]
        completions = engine.generate(requests)
        survivors: list[_Live] = []
        for rollout, completion in zip(live, completions, strict=True):
            verdict = _advance(rollout, completion, renderer, config)
            if verdict is None:
                survivors.append(rollout)
            else:
                verdicts[place[id(rollout.tree)]][rollout.leaf] = verdict
        if finished is not None:
            finished(len(live) - len(survivors))
        live = survivors
    results = [(tree, Rewards(found)) for tree, found in zip(trees, verdicts, strict=True)]
    for tree, rewards in results:
        rewards.check(tree)
    return results


def _plant(tree: RolloutTree, environment: Environment, renderer: Renderer, group_size: int) -> list[_Live]:
    messages = list(environment.reset())
    prompt_ids = renderer.prompt(messages, environment.tools)
    root = tree.add(None, NodeKind.PROMPT, prompt_ids)
    return [
        _Live(tree, sample, environment.fork(), root.id, list(messages), prompt_ids) for sample in range(group_size)
    ]


def _request(rollout: _Live, config: EpisodeConfig, seed: int) -> GenerationRequest:
    turn = rollout.tree[rollout.leaf].turn
    key = seeds.derive(seed, "episode", rollout.tree.task_id, rollout.sample, turn)
    return GenerationRequest(prompt_ids=rollout.token_ids, sampling=config.sampling, seed=key, retain=True)


def _advance(rollout: _Live, completion: Completion, renderer: Renderer, config: EpisodeConfig) -> Verdict | None:
    """Append the completion, step the environment; the verdict if the rollout ended, else None."""
    tree, environment = rollout.tree, rollout.environment
    action = renderer.parse(completion.token_ids)
    node = tree.add_completion(rollout.leaf, completion, action)
    rollout.leaf = node.id
    started = time.perf_counter()
    try:
        observation = environment.step(action)
    except Exception as error:  # a bad rollout is data: the boundary to foreign code
        return _stop(rollout, StopReason.ENVIRONMENT_ERROR, None, f"{type(error).__name__}: {error}")
    cost = Cost(tool_calls=1, environment_seconds=time.perf_counter() - started)
    added = renderer.extend(
        [*rollout.messages, action], observation.messages, environment.tools, stopped=completion.finish == "stop"
    )
    told = tree.add(node.id, NodeKind.OBSERVATION, added, message=observation.messages[-1], cost=cost)
    rollout.leaf = told.id
    rollout.messages += [action, *observation.messages]
    rollout.token_ids = (*rollout.token_ids, *completion.token_ids, *added)
    if observation.done:
        return _stop(rollout, StopReason.COMPLETED, 1.0 if observation.success else 0.0, "the episode is over")
    if node.turn >= config.max_turns:
        return _stop(rollout, StopReason.MAX_TURNS, 0.0, f"{config.max_turns} turns")
    if len(rollout.token_ids) + config.sampling.max_tokens > config.max_context:
        return _stop(rollout, StopReason.MAX_TOKENS, 0.0, f"{config.max_context} tokens of context")
    return None


def _stop(rollout: _Live, reason: StopReason, reward: float | None, why: str) -> Verdict:
    rollout.tree.stop(rollout.leaf, reason)
    return Verdict(reward, why)
