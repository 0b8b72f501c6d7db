"""A group in flight and a grown one: what its gate sees, and the tree that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from turntree.core.cost import NO_COST, Cost
from turntree.core.labels import Rewards
from turntree.core.protocols import Environment, GateDecision, GroupProgress, Observation
from turntree.core.tree import Decision, Node, NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.rollouts.live import Ending, LiveRollout, start_rollout

Key = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GrownGroup:
    """A task that came back. `index` is its place among the tasks of the run, `seconds` the time from the start of
    its first rollout to the end of its last. `cut` is the turn at which a gate stopped it, None where none did.

    Every rollout of the group is a leaf of the tree with a named `StopReason` (a task that leaves no room for a
    completion is one leaf, its root). A rollout that did not come to an end of its own (gated, cancelled, a fault)
    ends in an empty observation, which carries the cost of the calls that gave nothing; so `tree.cost` is what the
    group cost, all included. A group cut at turn t holds t turns: what ran ahead of the gate is charged there too.
    """

    index: int
    task: Environment
    tree: RolloutTree
    rewards: Rewards
    seconds: float
    cut: int | None = None
    decision: GateDecision | None = None  # the gate's last word: cut, audited or let go on; the tree holds them all


@dataclass(eq=False)
class Group:
    """The rollouts of one task while they are played.

    The tree grows in the order in which things happen to arrive; `grown` lays it out in an order of its own (by turn,
    then sample), so that the same draws give the same tree whatever the interleaving.
    """

    index: int
    task: Environment
    size: int
    seed: int
    iteration: int
    max_turns: int
    begun: float
    started: int = 0  # samples that have been given a place
    prompt_ids: tuple[int, ...] = ()
    told: Observation | None = None  # the task, once a rollout of the group was told it
    rollouts: dict[Key, LiveRollout] = field(default_factory=dict[Key, LiveRollout])
    endings: dict[Key, Ending] = field(default_factory=dict[Key, Ending])
    owed: dict[Key, Cost] = field(default_factory=dict[Key, Cost])  # paid for, and not yet in a node
    decisions: list[tuple[Key, Decision]] = field(default_factory=list[tuple[Key, Decision]])  # a group's key is ()
    asked: int = 0  # the last turn at which the gate was asked
    decision: GateDecision | None = None  # the gate's last
    decided: bool = False  # the gate need not be asked again
    cut: int | None = None
    ending: Ending | None = None  # of all rollouts at once: the task leaves no room

    def __post_init__(self) -> None:
        self.tree = RolloutTree(self.task.task_id)
        self._root = self.tree.add(None, NodeKind.PROMPT, ()).id  # stands for the prompt, which is not known yet

    @property
    def over(self) -> bool:
        return self.cut is not None or self.ending is not None or len(self.endings) == self.size

    def plant(self, key: Key, told: Observation) -> LiveRollout:
        """The rollout `key`, which was told the task."""
        self.rollouts[key] = start_rollout(self.tree, self._root, key, told, self.prompt_ids)
        return self.rollouts[key]

    def charge(self, key: Key, cost: Cost) -> None:
        """Count what was paid for a call of the rollout that gave nothing."""
        self.owed[key] = self.owed.get(key, NO_COST) + cost

    def settle(self, key: Key) -> Cost:
        """What the rollout owes, to be carried by the node that its call gave after all."""
        return self.owed.pop(key, NO_COST)

    def record(self, actor: str, key: Key | None, action: str, reason: str, numbers: dict[str, float]) -> None:
        """Record a decision about one rollout, or about the group (`key` None)."""
        rollout = None if key is None else self.rollouts.get(key)
        node = self._root if rollout is None else rollout.leaf
        self.decisions.append((key or (), Decision(actor, node, action, reason, numbers)))

    # what a gate sees

    def reached(self, turn: int) -> bool:
        """Whether every rollout has played `turn` turns or ended before."""
        return all(
            (sample,) in self.endings or ((sample,) in self.rollouts and self.rollouts[(sample,)].turns >= turn)
            for sample in range(self.size)
        )

    def progress(self, turn: int) -> GroupProgress:
        """The group as it was when everybody had played `turn` turns, whoever has gone on since: a gate's decision
        must not depend on the interleaving. Rollouts that a fault had ended by then are left out."""
        seen = [r for r in self.rollouts.values() if len(r.key) == 1 and (r.turns >= turn or self._ended(r.key))]
        seen.sort(key=lambda rollout: rollout.key)
        finished = tuple(rollout.turns <= turn and self._ended(rollout.key) for rollout in seen)
        return GroupProgress(
            task_id=self.task.task_id,
            max_turns=self.max_turns,
            actions=tuple(tuple(rollout.actions[:turn]) for rollout in seen),
            observations=tuple(tuple(rollout.observations[: turn + 1]) for rollout in seen),
            finished=finished,
            progress=tuple(rollout.progress[min(turn, rollout.turns)] for rollout in seen),
            iteration=self.iteration,
        )

    def _ended(self, key: Key) -> bool:
        """Whether the rollout came to an end of its own."""
        return key in self.endings and not self.endings[key].stop.censors

    # what it becomes

    def grown(self, now: float) -> GrownGroup:
        layout = _Layout(self, self._root)
        tree, rewards = layout.tree, Rewards(layout.verdicts)
        rewards.check(tree)
        return GrownGroup(
            index=self.index,
            task=self.task,
            tree=tree,
            rewards=rewards,
            seconds=now - self.begun,
            cut=self.cut,
            decision=self.decision,
        )


class _Layout:
    """The tree of a group that is over, by turn, then rollout, with its endings, decisions and verdicts."""

    def __init__(self, group: Group, root: int) -> None:
        self._group = group
        self.tree = RolloutTree(group.task.task_id)
        self.verdicts: dict[int, Verdict] = {}
        self._ids = {root: self.tree.add(None, NodeKind.PROMPT, group.prompt_ids).id}
        self._dropped: dict[Key, Cost] = {}
        for _, key, node in sorted((group.tree[n].turn, r.key, n) for r in group.rollouts.values() for n in r.nodes):
            self._place(key, group.tree[node])
        if group.ending is not None:
            self._stop(self._ids[root], group.ending)
        else:
            for sample in range(group.size):
                self._finish((sample,))
        kept = [(key, d) for key, d in group.decisions if d.node in self._ids]  # those of dropped turns go with them
        for _, decision in sorted(kept, key=lambda pair: (self._ids[pair[1].node], pair[0])):
            self.tree.record(replace(decision, node=self._ids[decision.node]))

    def _place(self, key: Key, node: Node) -> None:
        assert node.parent is not None
        if self._group.cut is not None and node.turn > self._group.cut:
            self._dropped[key] = self._dropped.get(key, NO_COST) + node.cost
            return
        fields = {name: value for name, value in vars(node).items() if name not in ("id", "parent", "kind", "turn")}
        self._ids[node.id] = self.tree.add(self._ids[node.parent], node.kind, **fields).id

    def _finish(self, key: Key) -> None:
        """Stop the rollout's leaf, after an empty observation if its last call gave nothing."""
        group, ending = self._group, self._ending(key)
        rollout = group.rollouts.get(key)
        leaf = next((self._ids[node] for node in reversed(rollout.nodes) if node in self._ids), 0) if rollout else 0
        if ending.stop.censors:
            cost = group.owed.get(key, NO_COST) + self._dropped.get(key, NO_COST)
            leaf = self.tree.add(leaf, NodeKind.OBSERVATION, (), cost=cost).id
        self._stop(leaf, ending)

    def _ending(self, key: Key) -> Ending:
        """How the rollout ended; in a group that was cut at turn t: how it stood then, without a reward."""
        group, ending = self._group, self._group.endings.get(key)
        if group.cut is None:
            assert ending is not None
            return ending
        gated = Verdict(None, f"the group was cut at turn {group.cut}")
        turns = group.rollouts[key].turns if key in group.rollouts else 0
        if ending is None or turns > group.cut or (turns == group.cut and ending.stop.censors):
            return Ending(StopReason.GATED, gated)
        return ending if ending.stop.censors else Ending(ending.stop, gated)

    def _stop(self, leaf: int, ending: Ending) -> None:
        self.tree.stop(leaf, ending.stop)
        self.verdicts[leaf] = ending.verdict
