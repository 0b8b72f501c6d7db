"""Moments at which a brancher is asked, and a sampler in miniature that hands budgets down as the scheduler does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from turntree.core.protocols import Brancher, ForkMoment


def moment(
    *entropies: Sequence[float],
    task: str = "task",
    key: tuple[int, ...] = (0,),
    budget: int = 4,
    seed: int = 0,
    iteration: int = 0,
) -> ForkMoment:
    """The moment after the last of the turns with these entropies."""
    return ForkMoment(
        task_id=task,
        key=key,
        turn=len(entropies),
        max_turns=12,
        budget=budget,
        entropies=tuple(map(tuple, entropies)),
        seed=seed,
        iteration=iteration,
    )


def moments(count: int, *, seed: int = 0, iteration: int = 0, tokens: int = 4) -> list[ForkMoment]:
    """Of `count` tasks, four rollouts each, at turns 2 to 5, with random entropies."""
    draw = random.Random(f"{seed}/{iteration}")
    found: list[ForkMoment] = []
    for task in range(count):
        for sample in range(4):
            turns = [[draw.random() for _ in range(draw.randint(1, 2 * tokens))] for _ in range(draw.randint(2, 5))]
            for turn in range(2, len(turns) + 1):
                one = moment(
                    *turns[:turn],
                    task=f"task {task}",
                    key=(sample,),
                    budget=draw.randint(0, 3),
                    seed=seed,
                    iteration=iteration,
                )
                found.append(one)
    return found


def forks_by_turn(
    brancher: Brancher,
    iteration: int,
    length: Callable[[random.Random], int],
    *,
    rollouts: int,
    budget: int,
    branches: int = 2,
) -> Counter[int]:
    """How many leaves were added at each turn when independent rollouts of random lengths, with a budget each and
    random entropies, are played to their end. A branch is as long as a rollout that has come as far."""
    draw = random.Random(iteration)
    added: Counter[int] = Counter()
    for number in range(rollouts):
        playing: list[tuple[tuple[int, ...], int, int, int]] = [((number,), 1, budget, length(draw))]
        while playing:
            key, turn, left, last = playing.pop()
            forks = 0
            while turn < last:
                turn += 1
                seen = [[1.0]] * (turn - 1) + [[draw.random()]]
                decision = brancher.decide(moment(*seen, key=key, budget=left, seed=iteration, iteration=iteration))
                if decision is None or decision.branches == 1:
                    continue
                assert decision.branches <= left + 1
                added[turn] += decision.branches - 1
                left -= decision.branches - 1
                shares = [left // branches + (i < left % branches) for i in range(decision.branches)]
                left = shares[0]
                for share in shares[1:]:
                    forks += 1
                    playing.append(((*key, forks), turn, share, _at_least(turn, length, draw)))
    return added


def _at_least(turn: int, length: Callable[[random.Random], int], draw: random.Random) -> int:
    while (found := length(draw)) < turn:
        pass
    return found
