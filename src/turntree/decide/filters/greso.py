"""Before the rollouts: skip prompts whose history predicts a zero-variance group (GRESO, arXiv 2506.02177).

A task whose last z observed groups all ended alike is skipped with probability 1 - max(p^z, keep_at_least). The base
exploration probability p is one for easy tasks (all succeed) and one for hard tasks (all fail); both adjust
themselves after every iteration so that the share of zero-variance groups approaches its targets.

Where paper and released code differ, this follows the code: z counts groups of the same kind only, the adjustment
starts once a history exists, p stays within [0.05, 0.95]. Two things are in neither. A censored group (gated, failed)
neither extends nor ends a streak. Every draw is keyed by (seed, task, iteration), so that a decision depends only on
the histories and a resumed run repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from turntree.core import seeds
from turntree.core.config import Between, Bounded, Share, from_mapping
from turntree.core.errors import ConfigError
from turntree.core.outcome import SUCCESS_REWARD, GroupOutcome, group_outcome
from turntree.core.protocols import Filter, FinishedGroup

SCHEMA = "turntree.greso/2"
LEAST, MOST, STEP = 0.05, 0.95, 0.01  # bounds of an exploration chance, and what it changes by after an iteration
Exploration = Annotated[float, Between(LEAST, MOST)]


@dataclass(frozen=True, kw_only=True)
class GresoConfig(Bounded):
    """The authors' settings. Targets are shares of the groups played in one iteration."""

    easy_exploration: Exploration = 0.5
    """Initial chance that a task predicted to be too easy is played anyway."""
    hard_exploration: Exploration = 0.5
    """Initial chance that a task predicted to be too hard is played anyway."""
    easy_target: Share = 0.25 / 3
    """Target share of too easy groups in an iteration."""
    hard_target: Share = 0.25 * 2 / 3
    """Target share of too hard groups; hard tasks are likelier to change, since the policy improves."""
    keep_at_least: Share = 0.01
    """Least chance that any task is played."""
    success: float = SUCCESS_REWARD
    """A reward from this on is a success."""
    seed: int | None = None
    """Seed of the draws (default: that of the run)."""


@dataclass(frozen=True, kw_only=True)
class TaskHistory:
    """The history of a task: its last observed outcome and how many groups in a row had this outcome."""

    outcome: GroupOutcome | None = None
    streak: int = 0

    def after(self, outcome: GroupOutcome) -> TaskHistory:
        if outcome is GroupOutcome.CENSORED:
            return self
        return TaskHistory(outcome=outcome, streak=self.streak + 1 if outcome is self.outcome else 1)


class Greso(Filter):
    """Skips tasks by what their earlier groups ended as."""

    def __init__(self, config: GresoConfig | None = None) -> None:
        self.config = config or GresoConfig()
        self.exploration = {
            GroupOutcome.ALL_SUCCEED: self.config.easy_exploration,
            GroupOutcome.ALL_FAIL: self.config.hard_exploration,
        }
        self._histories: dict[str, TaskHistory] = {}
        self._played = dict.fromkeys(GroupOutcome, 0)  # since the last adjustment
        self._predicting = False  # whether some task was asked about that has a history

    def history(self, task: str) -> TaskHistory:
        return self._histories.get(task, TaskHistory())

    def skip_probability(self, task: str) -> float:
        """1 - max(p^z, keep_at_least) after z equal zero-variance groups in a row; 0 without such a history."""
        history = self.history(task)
        if history.outcome is None or not history.outcome.zero_variance:
            return 0.0
        return 1 - max(self.exploration[history.outcome] ** history.streak, self.config.keep_at_least)

    def skip(self, task_id: str, iteration: int) -> str | None:
        history = self.history(task_id)
        self._predicting |= history.outcome is not None
        draw = seeds.generator(self.config.seed or 0, "greso", task_id, iteration).random()
        if history.outcome is None or draw >= self.skip_probability(task_id):
            return None
        return f"predicted {history.outcome.value}"

    def finished(self, group: FinishedGroup) -> None:
        self.record(group.task_id, group.rewards, teaches=group.credit is not None and group.credit.teaches)

    def record(self, task: str, rewards: Sequence[float | None], *, teaches: bool = False) -> None:
        """Record the rewards of a finished group; None is a censored rollout (all rollouts of a gated group are). One
        that `teaches` by rewards of turns counts as mixed."""
        outcome = GroupOutcome.MIXED if teaches else group_outcome(rewards, success=self.config.success)
        self._histories[task] = self.history(task).after(outcome)
        self._played[outcome] += 1

    def end_iteration(self) -> None:
        """Explore less of a kind that is above its target share, more of one that is below.

        Censored groups are not counted. Nothing changes until a task comes back, because nothing was predicted before.
        """
        targets = {GroupOutcome.ALL_SUCCEED: self.config.easy_target, GroupOutcome.ALL_FAIL: self.config.hard_target}
        scored = sum(count for outcome, count in self._played.items() if outcome is not GroupOutcome.CENSORED)
        if scored and self._predicting:
            for outcome, target in targets.items():
                moved = self.exploration[outcome] + (-STEP if self._played[outcome] / scored >= target else STEP)
                self.exploration[outcome] = min(max(moved, LEAST), MOST)
        self._played = dict.fromkeys(GroupOutcome, 0)
        self._predicting = False

    def state(self) -> dict[str, Any]:
        """What `restore` restores exactly, in the middle of an iteration too."""
        return {
            "schema": SCHEMA,
            "config": asdict(self.config),
            "exploration": {outcome.value: p for outcome, p in self.exploration.items()},
            "played": {outcome.value: count for outcome, count in self._played.items()},
            "predicting": self._predicting,
            "tasks": {task: asdict(history) for task, history in self._histories.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("schema") != SCHEMA:
            raise ConfigError(f"is {state.get('schema')!r}, not {SCHEMA!r}", field="schema")
        self.config = from_mapping(GresoConfig, state["config"])
        self.exploration = {GroupOutcome(name): p for name, p in state["exploration"].items()}
        self._played = {GroupOutcome(name): count for name, count in state["played"].items()}
        self._predicting = state["predicting"]
        self._histories = {
            task: TaskHistory(**{**row, "outcome": row["outcome"] and GroupOutcome(row["outcome"])})
            for task, row in state["tasks"].items()
        }
