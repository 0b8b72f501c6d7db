"""Whole episodes: every task's rollouts grown to their end in lockstep waves, one model call a turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from turntree.core.completion import Completion
from turntree.core.cost import Cost
from turntree.core.errors import InputError
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.protocols import Engine, Environment, Observation, Renderer
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.rollouts.live import (
    Ending,
    EpisodeConfig,
    LiveRollout,
    RendererFault,
    cut_ending,
    ending_of,
    has_room,
    judged,
    leave_parts,
    next_prompt,
    no_room,
    played_turn,
    start_rollout,
    task_tokens,
)
from turntree.rollouts.rewards import RewardSum

__all__ = ["EpisodeConfig", "grow"]

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
    part: bool = False,
    functions: RewardSum | None = None,
) -> list[tuple[RolloutTree, Rewards]]:
    """Play `group_size` episodes of every environment to the end; returns a tree and its rewards for each, in order.

    The reward of a leaf is the one that its environment gave, or else 1.0 for success and 0.0 for an episode that ended
    without it (turn and context limits included); None when the environment failed. With `functions` it is theirs; they
    judge when all episodes have ended. `finished` is called after every wave with the number of rollouts that ended.
    The draws of (task, sample, turn) depend on `seed` only. Raises `InputError` where no task can be rendered, unless
    these are a `part` of the tasks.
    """
    trees = [RolloutTree(environment.task_id) for environment in environments]
    endings: list[dict[int, Ending]] = [{} for _ in trees]
    place = {id(tree): index for index, tree in enumerate(trees)}
    live: list[_Played] = []
    refused: list[RendererFault] = []
    config = replace(config, max_context=min(config.max_context, engine.max_context))
    for tree, environment, found in zip(trees, environments, endings, strict=True):
        try:
            planted = _plant(tree, environment, renderer, group_size)
        except RendererFault as fault:
            refused.append(fault)
            root = tree.add(None, NodeKind.PROMPT, ()).id
            tree.stop(root, fault.ending.stop)
            found[root] = fault.ending
            continue
        root = tree.roots[0]
        if has_room(tree[root].token_ids, config):
            live += planted
        else:
            ending = no_room(config, environment, Observation(tree[root].messages, done=False))
            tree.stop(root, ending.stop)
            found[root] = ending
    if refused and len(refused) == len(trees) and not part:  # all of them: the model and the tasks do not fit
        raise InputError(str(refused[0]), hint="see turntree check model") from refused[0]
    while live:
        completions = engine.generate([played.rollout.request(config, seed) for played in live])
        survivors: list[_Played] = []
        for played, completion in zip(live, completions, strict=True):
            ending, rollout = _advance(played, completion, renderer, config), played.rollout
            if ending is None:
                survivors.append(played)
            else:
                rollout.tree.stop(rollout.leaf, ending.stop)
                leave_parts(rollout.tree, rollout.rewritten, rollout.leaf)
                endings[place[id(rollout.tree)]][rollout.leaf] = ending
        if finished is not None:
            finished(len(live) - len(survivors))
        live = survivors
    results = list(zip(trees, judged(endings, functions), strict=True))
    for tree, rewards in results:
        rewards.check(tree)
    return results


@dataclass(frozen=True)
class _Played:
    rollout: LiveRollout
    environment: Environment


def _plant(tree: RolloutTree, environment: Environment, renderer: Renderer, group_size: int) -> list[_Played]:
    task = Observation(environment.reset(), done=False)
    prompt_ids = task_tokens(renderer, task, environment.tools)
    root = tree.add(None, NodeKind.PROMPT, prompt_ids, messages=task.messages).id
    return [
        _Played(start_rollout(tree, root, (sample,), task, prompt_ids), environment.fork())
        for sample in range(group_size)
    ]


def _advance(played: _Played, completion: Completion, renderer: Renderer, config: EpisodeConfig) -> Ending | None:
    """Append the completion and step the environment (unless the turn was cut). Returns how the rollout ended, None if
    it continues."""
    rollout, environment = played.rollout, played.environment
    try:
        action = played_turn(renderer, completion.token_ids, completion, config, environment.tools)
    except RendererFault as fault:
        rollout.append_turn(completion, Message("assistant"))  # sampled tokens stay in the tree and its cost
        return fault.ending
    rollout.append_turn(completion, action)
    if config.fails(action):
        return cut_ending(rollout, environment, config)
    started = time.perf_counter()
    try:
        observation = environment.step(action)
    except Exception as error:  # a bad rollout is data: the boundary to foreign code
        return Ending(StopReason.ENVIRONMENT_ERROR, Verdict(None, f"{type(error).__name__}: {error}"))
    cost = Cost(tool_calls=1, environment_seconds=time.perf_counter() - started)
    try:
        prompt = next_prompt(rollout, observation, environment, renderer, config)
        rollout.append_answer(observation, prompt, cost)
    except RendererFault as fault:
        rollout.append_answer(observation, rollout.token_ids, cost)
        return fault.ending
    return ending_of(rollout, environment, config)
