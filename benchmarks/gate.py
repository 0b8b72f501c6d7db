"""The share of rollout time that is spent in the gate, for groups of 8 to 64 and decisions at turn 10 to 40.

    python benchmarks/gate.py [--repeats 5] [--json PATH]

A gate is asked after every turn up to K and does its whole work at K; its seconds are all of that, for one group. What
they are compared with is stated per basis:

- `household`: the cheapest rollouts that this library has. The embedded tiny policy plays household games on this
  CPU, measured here in turn with the gate; a group of G takes G K times one rollout turn up to its decision.
- `paper`: the released runs' 27.7 s for a whole group of 8 over 30 turns (Qwen2.5-7B, one group at a time on one GPU),
  taken for groups of every size, although larger ones take longer.

Seconds are CPU seconds of this process on one thread, so that other work on the machine does not disturb the ratio.
`share_of_rollout` is the largest share over all sizes, turns and both bases.
`in_scheduler` is what the gate took of whole household episodes (groups of 8, 16 turns, K = 10), as the scheduler
counts it, on cold caches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from update_step import arguments_of

from turntree.cli.common import finish
from turntree.core import seeds
from turntree.core.protocols import Gate, GroupProgress
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.stages.policy import Device, Policy, load_policy
from turntree_worlds.household.entry import Household
from turntree_worlds.household.environment import HouseholdEnvironment

SIZES, TURNS = (8, 16, 32, 64), (10, 20, 40)
GROUPS = 8  # that each timing of the gate averages over
PAPER_SECONDS = 27.7  # of a group: 8 rollouts of up to 30 turns, one group at a time
NEVER = 0.0  # a threshold below which nothing lies: all of the work and no cut


def group_in_flight(index: int, size: int, turns: int, reached: int) -> GroupProgress:
    """A group whose rollouts part at a random turn, of commands as long as ALFWorld's."""
    rollouts: list[tuple[str, ...]] = []
    for sample in range(size):
        draw = seeds.generator(index, "gate benchmark", sample)
        parts = draw.randrange(turns)
        alone = tuple(f"take object {draw.randrange(40)} from shelf {draw.randrange(40)}" for _ in range(turns - parts))
        rollouts.append((*(f"go to drawer {turn} and look inside" for turn in range(parts)), *alone)[:reached])
    return GroupProgress(
        task_id="benchmark",
        max_turns=turns + 1,
        actions=tuple(rollouts),
        observations=tuple(("you see nothing special",) * (len(actions) + 1) for actions in rollouts),
        finished=(False,) * size,
        progress=(None,) * size,
    )


def whole_group(index: int, size: int, turns: int) -> list[GroupProgress]:
    return [group_in_flight(index, size, turns, reached) for reached in range(1, turns + 1)]


def gate_seconds(gate: Gate, groups: Sequence[Sequence[GroupProgress]]) -> float:
    """Of asking about every turn of a group, in order; mean over the groups."""
    started = time.process_time()
    for turns in groups:
        for group in turns:
            gate.decide(group)
    return (time.process_time() - started) / len(groups)


def played(policy: Policy, tasks: Sequence[HouseholdEnvironment], max_turns: int) -> tuple[float, float]:
    """CPU seconds of one rollout turn as the scheduler plays groups of 8, and the share of them that its gate, asked
    up to turn 10, took there."""
    config = SchedulerConfig(episodes=EpisodeConfig(max_turns=max_turns), group_size=8)
    gate = plain_gate(10)
    scheduler = Scheduler(policy.engine, policy.renderer, config, gate=gate, clock=time.process_time)
    started = time.process_time()
    turns = sum(group.tree.cost.turns for group in scheduler.run(tasks, seed=0))
    seconds = time.process_time() - started
    return seconds / turns, scheduler.usage.gate_seconds / seconds


def median_and_range(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def measure(repeats: int, sizes: Sequence[int], turns: Sequence[int], games_played: int) -> dict[str, Any]:
    policy = load_policy("default", Device())
    with Household(difficulty="hard").open({"train": games_played}, seed=0) as opened:
        tasks = opened.of("train")
    cases = [
        (size, turn, plain_gate(turn), [whole_group(index, size, turn) for index in range(GROUPS)])
        for size in sizes
        for turn in turns
    ]
    turn_costs: list[float] = []
    inside: list[float] = []
    gate_costs: list[list[float]] = [[] for _ in cases]
    played(policy, tasks[:1], 4)  # the first run compiles and allocates
    for _ in range(repeats):
        turn_cost, share_inside = played(policy, tasks, 16)
        turn_costs.append(turn_cost)
        inside.append(share_inside)
        for (_, _, gate, groups), seconds in zip(cases, gate_costs, strict=True):
            seconds.append(gate_seconds(gate, groups))
    rows = [
        {
            "group_size": size,
            "turn": turn,
            "gate_seconds": median_and_range(seconds),
            "household": share(seconds, [cost * size * turn for cost in turn_costs]),
            "paper": share(seconds, [PAPER_SECONDS] * repeats),
        }
        for (size, turn, _, _), seconds in zip(cases, gate_costs, strict=True)
    ]
    worst = {basis: max(row[basis]["median"] for row in rows) for basis in ("household", "paper")}
    return {
        "share_of_rollout": max(worst.values()),
        "by_basis": worst,
        "in_scheduler": median_and_range(inside),
        "household_turn_seconds": median_and_range(turn_costs),
        "paper_group_seconds": PAPER_SECONDS,
        "cases": rows,
    }


def plain_gate(turn: int) -> Gate:
    return PrefixDivergenceGate(turn=turn, threshold=NEVER)


def share(gate: Sequence[float], rollout: Sequence[float]) -> dict[str, float]:
    """Ratio of the medians, and the smallest and largest ratio within one repeat."""
    pairs = [g / r for g, r in zip(gate, rollout, strict=True)]
    return {"median": statistics.median(gate) / statistics.median(rollout), "low": min(pairs), "high": max(pairs)}


def main() -> None:
    arguments = arguments_of(argparse.ArgumentParser(description="The gate's share of rollout time."), repeats=5)
    sizes, turns = (SIZES[:1], TURNS[:1]) if arguments.quick else (SIZES, TURNS)
    result = measure(arguments.repeats, sizes, turns, games_played=1 if arguments.quick else 6)
    text = (
        "{group_size} rollouts, turn {turn}: {gate_seconds[median]:.2e} s, {household[median]:.3%} of "
        "household rollouts, {paper[median]:.4%} of the released runs'"
    )
    finish(result, arguments.json, [text.format(**case) for case in result["cases"]])


if __name__ == "__main__":
    main()
