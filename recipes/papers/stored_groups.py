"""Groups that were played before, as tasks that play themselves: training on a frozen buffer.

Selective Rollout isolates what its gate saves in the update that way (tier 2, section 4.2): the same groups in every
step, with and without those that the gate would have cut. `turntree train online --environment stored_groups:Stored
--set environment.trees=FILE` (with this folder in PYTHONPATH) draws `train.groups` of them a step; nothing is sampled,
and nothing of what they once cost is counted again. The trees are older than the weights, so that the loss weighs their
tokens by the truncated ratio of the two; the paper leaves that out.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from turntree.core import parts, seeds
from turntree.core.config import Between, Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Credit, Rewards
from turntree.core.protocols import Environment, Gate, GateDecision, Renderer, StreamingEngine
from turntree.core.tree import RolloutTree
from turntree.core.verdict import Verdict
from turntree.credit.credit import CreditRule
from turntree.decide.gates.table import progress_at
from turntree.env.tasks import TRAIN, TaskSet, contents
from turntree.logs.trees import KeptTree, read
from turntree.rollout.accounting import Usage
from turntree.rollout.groups import GrownGroup
from turntree.rollout.players import PlayedTask
from turntree.rollout.rewards import RewardSum
from turntree.rollout.scheduler import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The groups of a `trees.jsonl` as tasks to train on."""

    trees: str
    """The file, of `turntree evaluate --keep-trees` or of a run."""
    gate: Part | None = None
    """Leave out the groups that this gate would have cut, as far as they still ran."""

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        """Raises `InputError` where held-out tasks are asked for: stored groups answer no new policy."""
        if set(splits) != {TRAIN}:
            raise InputError("holds no task to play", path=self.trees, hint="train on it, with check.tasks=0")
        gate = None if self.gate is None else parts.build("gates", self.gate, seed=seed)
        kept = seeds.shuffled(seed, list(read(Path(self.trees))), lambda one: one.id)[: splits[TRAIN]]
        tasks = [StoredTask(f"{one.tree.task_id}@{one.id}", one, partial(StoredPlayer, gate)) for one in kept]
        yield TaskSet(tasks={TRAIN: tasks}, contents=contents({TRAIN: self.trees}))


@dataclass(frozen=True)
class StoredTask(PlayedTask):
    """A task (protocol `Environment`) whose group is there already."""

    task_id: str
    kept: KeptTree
    player: Any
    tools: tuple[dict[str, Any], ...] = ()

    def refusal(self) -> InputError:
        return InputError("was played before", field="environment", hint="use it with train online")


class StoredPlayer:
    """`rollout.players.Player`: hands out the stored groups."""

    def __init__(
        self,
        gate: Gate | None,
        engine: StreamingEngine,
        renderer: Renderer,
        config: SchedulerConfig,
        rewards: RewardSum | None,
    ) -> None:
        if rewards is not None:
            raise InputError(
                "judges episodes that are played", field="rewards", hint="stored groups have their rewards"
            )
        self._gate, self._turns = gate, config.episodes.max_turns
        self.usage, self.rendered = Usage(places=config.places), True

    def run(
        self, tasks: Iterable[Environment], *, seed: int, iteration: int = 0, begun: Counter[str] | None = None
    ) -> Iterator[GrownGroup]:
        for index, task in enumerate(tasks):
            assert isinstance(task, StoredTask)
            started, kept = time.perf_counter(), task.kept
            decision = self._decided(kept)
            cut = None if decision is None or not decision.cut else int(decision.numbers["turn"])
            gated = Verdict(None, f"the gate cuts the group at turn {cut}")
            rewards = kept.rewards if cut is None else Rewards(dict.fromkeys(kept.rewards.verdicts, gated))
            seconds = time.perf_counter() - started
            yield GrownGroup(
                index=index,
                task=task,
                tree=_free(kept.tree),
                rewards=rewards,
                seconds=seconds,
                cut=cut,
                decision=decision,
            )

    def _decided(self, kept: KeptTree) -> GateDecision | None:
        """What the gate says of the group, turn by turn as it once grew."""
        group = kept.group()
        for turn in range(1, self._turns + 1 if self._gate is not None else 1):
            assert self._gate is not None
            decision = self._gate.decide(progress_at(group, group.rollouts, turn, self._turns))
            if decision is not None and (decision.final or decision.cut):
                return decision
        return None


def _free(tree: RolloutTree) -> RolloutTree:
    """The tree without what it cost."""
    value = tree.to_json()
    nodes = [{key: node[key] for key in node if key not in ("cost", "timing")} for node in value["nodes"]]
    return RolloutTree.from_json({**value, "nodes": nodes})


@dataclass(frozen=True, kw_only=True)
class SampledTurns:
    """GRPO on a few turns of every rollout, drawn by seed and task; the others are not trained on (Selective Rollout
    trains on 8 action steps of a trajectory in tier 2). A turn that rollouts share is kept where one drew it.

    Args:
        turns: Turns of a rollout that are trained on.
        seed: Of the draw.
    """

    turns: int = 8
    seed: int = 0
    normalizer: str = "tokens"
    per_rollout: bool = False

    def __post_init__(self) -> None:
        Between(1).check(self.turns, "turns")
        if self.per_rollout:
            hint = "use tokens or constant, or ratio action"
            raise ConfigError("divides by all turns of a rollout", field="loss.normalizer", hint=hint)

    def __call__(self, tree: RolloutTree, rewards: Rewards) -> Credit:
        credit = CreditRule()(tree, rewards)
        kept: set[int] = set()
        for leaf in rewards.scored():
            trained = [node for node in tree.nodes_of(leaf) if node in credit.nodes]
            draw = seeds.generator(self.seed, "sampled turns", tree.task_id, leaf)
            kept.update(draw.sample(trained, min(self.turns, len(trained))))
        nodes = {node: one for node, one in credit.nodes.items() if node in kept}
        tokens = math.fsum(one.multiplicity * len(tree[node].token_ids) for node, one in nodes.items())
        return replace(credit, nodes=nodes, rollout_tokens=tokens)
