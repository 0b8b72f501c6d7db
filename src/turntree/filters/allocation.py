"""Before the rollouts: group sizes by what is known of each task, at the same number of rollouts.

The gradient of a task of pass rate p, estimated from n rollouts, has a variance of about p (1 - p) / n, so the variance
of the sum over tasks is least where n is proportional to the deviation sqrt(p (1 - p)) (Neyman 1934;
docs/results/theory.md). p is not known. Its posterior is a Beta distribution: rollouts of earlier iterations, counting
less with every iteration because the policy changes, and a prior with the mean pass rate of the run's tasks. A task's
size is proportional to the expected deviation.

A task whose share is below the smallest group gets no rollouts. It comes back at the latest when its evidence weighs
less than the prior. Sizes depend on earlier iterations only, never on the rewards that are compared, and groups
weigh alike whatever their size (`Allocation.weighed`), so the expected gradient of the played tasks stays as it is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turntree.core.errors import ConfigError
from turntree.core.labels import Credit
from turntree.core.outcome import SUCCESS_REWARD
from turntree.core.protocols import Filter, FinishedGroup

HOPELESS, SOLVED = "allocated none: hopeless", "allocated none: solved"


@dataclass(frozen=True, kw_only=True)
class AllocationConfig:
    """Group sizes by the posterior of each task's pass rate."""

    smallest: int | None = None
    """Least rollouts of a group; a task with a smaller share gets none (default: half of `rollouts.group_size`)."""
    largest: int | None = None
    """Most rollouts of a group (default: twice `rollouts.group_size`)."""
    discount: float = 0.95
    """What a rollout's weight as evidence is multiplied by in every iteration (1: a hopeless task stays hopeless)."""
    prior: float = 1.0
    """Rollouts that the prior is worth, with the mean pass rate of the run's tasks as its mean."""
    success: float = SUCCESS_REWARD
    """A reward from this on is a success."""

    def __post_init__(self) -> None:
        if self.smallest is not None and self.smallest < 2:
            raise ConfigError("must be at least 2: one rollout has nothing to be compared with", field="smallest")
        if not 0 < self.discount <= 1:
            raise ConfigError("is outside (0, 1]", field="discount")
        if not 0 < self.prior < math.inf:
            raise ConfigError("must be a finite number above 0", field="prior")

    def bounds(self, group_size: int) -> tuple[int, int]:
        """The smallest and the largest group. Raises `ConfigError` unless equal groups of `group_size` lie between."""
        smallest = max(2, group_size // 2) if self.smallest is None else self.smallest
        largest = 2 * group_size if self.largest is None else self.largest
        for name, bound, wrong in (
            ("smallest", smallest, smallest > group_size),
            ("largest", largest, largest < group_size),
        ):
            if wrong:
                problem = f"is {bound}, on the wrong side of rollouts.group_size ({group_size})"
                raise ConfigError(problem, field=f"allocation.{name}", hint="equal groups must be possible")
        return smallest, largest


@dataclass(frozen=True)
class Beta:
    """A distribution of a pass rate p."""

    a: float
    b: float

    @property
    def mean(self) -> float:
        return self.a / (self.a + self.b)

    @property
    def deviation(self) -> float:
        """E[sqrt(p (1 - p))]: the deviation of a reward, in expectation."""
        return math.exp(_log_beta(self.a + 0.5, self.b + 0.5) - _log_beta(self.a, self.b))

    def zero_variance(self, size: int) -> float:
        """The chance that `size` rollouts all succeed or all fail."""
        whole = _log_beta(self.a, self.b)
        alike = (_log_beta(self.a + size, self.b), _log_beta(self.a, self.b + size))
        return min(1.0, sum(math.exp(one - whole) for one in alike))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


@dataclass(frozen=True)
class Evidence:
    """Successes and failures of a task, with the weight that they had in `iteration`."""

    successes: float = 0.0
    failures: float = 0.0
    iteration: int = 0

    def at(self, iteration: int, discount: float) -> Evidence:
        kept = discount ** max(0, iteration - self.iteration)
        return Evidence(self.successes * kept, self.failures * kept, max(iteration, self.iteration))

    @property
    def weight(self) -> float:
        return self.successes + self.failures


@dataclass(frozen=True)
class Allotment:
    """The rollouts of each task of an iteration, in the order of the tasks; a task without any has a reason."""

    sizes: tuple[int, ...]
    reasons: tuple[str | None, ...]
    zero_variance: float  # the predicted share of the rollouts that lie in groups whose rewards are all equal


class Allocation(Filter):
    """Ask `allot` for the sizes of an iteration's groups; it learns from every finished group. `centred`: the baseline
    of an advantage contains its own reward and nothing is divided by a deviation (`mean_centred`)."""

    def __init__(self, config: AllocationConfig, group_size: int, *, centred: bool = False) -> None:
        self.config, self.group_size, self._centred = config, group_size, centred
        self.smallest, self.largest = config.bounds(group_size)
        self._evidence: dict[str, Evidence] = {}

    def allot(self, tasks: Sequence[str], iteration: int) -> Allotment:
        """As many rollouts as groups of `group_size` of all tasks would have. The same call gives the same answer."""
        posteriors = [self.posterior(task, iteration) for task in tasks]
        known = [self._known(task, iteration).weight >= self.config.prior for task in tasks]
        deviations = [one.deviation for one in posteriors]
        budget = self.group_size * len(tasks)
        played = worth_playing(deviations, known, budget, smallest=self.smallest, largest=self.largest)
        given = neyman([deviations[i] for i in played], budget, smallest=self.smallest, largest=self.largest)
        size_of = dict(zip(played, given, strict=True))
        sizes = tuple(size_of.get(i, 0) for i in range(len(tasks)))
        reasons = tuple(
            None if size else HOPELESS if one.mean < 0.5 else SOLVED
            for size, one in zip(sizes, posteriors, strict=True)
        )
        alike = sum(size * one.zero_variance(size) for size, one in zip(sizes, posteriors, strict=True) if size)
        return Allotment(sizes, reasons, alike / budget)

    def weighed(self, credit: Credit, size: int) -> Credit:
        """The credit of a group of `size` rollouts, as one of `group_size` rollouts that pulls as much in expectation.

        With `rloo` the sum over a group's rollouts is `size` times the gradient, with `mean_centred` `size` - 1 times.
        GRPO's division by the group's deviation has no such rule: small groups of hard or easy tasks pull less there.
        """
        weight = self.group_size / size
        return credit.scaled((self.group_size - 1) / (size - 1) if self._centred else weight, weight)

    def posterior(self, task: str, iteration: int) -> Beta:
        """What is known of the task's pass rate in this iteration."""
        known, mean = self._known(task, iteration), self._pooled()
        return Beta(self.config.prior * mean + known.successes, self.config.prior * (1 - mean) + known.failures)

    def _known(self, task: str, iteration: int) -> Evidence:
        return self._evidence.get(task, Evidence()).at(iteration, self.config.discount)

    def _pooled(self) -> float:
        """The mean pass rate of the tasks played so far, each counted once, and of one success and one failure."""
        rates = [one.successes / one.weight for one in self._evidence.values()]
        return (1 + math.fsum(rates)) / (2 + len(rates))

    # as a filter

    def finished(self, group: FinishedGroup) -> None:
        scored = [reward >= self.config.success for reward in group.rewards if reward is not None]
        if scored:
            old = self._known(group.task_id, group.iteration)
            successes, failures = old.successes + sum(scored), old.failures + len(scored) - sum(scored)
            self._evidence[group.task_id] = Evidence(successes, failures, old.iteration)

    def state(self) -> dict[str, Any]:
        return {task: [one.successes, one.failures, one.iteration] for task, one in self._evidence.items()}

    def restore(self, state: dict[str, Any]) -> None:
        self._evidence = {task: Evidence(*held) for task, held in state.items()}


def worth_playing(
    deviations: Sequence[float], known: Sequence[bool], budget: int, *, smallest: int, largest: int
) -> list[int]:
    """The tasks that are played, by position: without those that are `known` and whose share of the budget, in
    proportion to the deviation, is less than the smallest group. Those that stay can use the whole budget."""
    played = set(range(len(deviations)))
    for i in sorted(played, key=lambda i: (deviations[i], i)):
        share = budget * deviations[i] / math.fsum(deviations[j] for j in played)
        if share >= smallest or (len(played) - 1) * largest < budget:
            break
        if known[i]:
            played.remove(i)
    return sorted(played)


def neyman(deviations: Sequence[float], budget: int, *, smallest: int, largest: int) -> list[int]:
    """Whole sizes between the bounds that add up to `budget` and make the sum of deviation^2 / size least (Wright 2014,
    "A simple method of exact optimal sample allocation"): every further rollout goes where it helps most."""
    sizes = [smallest] * len(deviations)

    def place(i: int) -> tuple[float, int]:
        return -(deviations[i] ** 2) / (sizes[i] * (sizes[i] + 1)), i

    queue = [place(i) for i in range(len(sizes))] if smallest < largest else []
    heapq.heapify(queue)
    for _ in range(budget - smallest * len(sizes)):
        _, i = heapq.heappop(queue)
        sizes[i] += 1
        if sizes[i] < largest:
            heapq.heappush(queue, place(i))
    return sizes
