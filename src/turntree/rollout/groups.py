"""Groups in flight and finished groups: the views for gate and brancher, and the final tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from turntree.core.completion import Completion
from turntree.core.config import FIXED, Above0, Bounded, Positive
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError
from turntree.core.labels import Rewards
from turntree.core.protocols import BranchDecision, Environment, ForkMoment, GateDecision, GroupProgress, Observation
from turntree.core.tree import Decision, Node, NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.rollout.live import Ending, EpisodeConfig, LiveRollout, judged
from turntree.rollout.rewards import RewardSum

Key = tuple[int, ...]


def _of_kind(kind: type, answer: object, field: str) -> None:
    if answer is not None and not isinstance(answer, kind):
        hint = f"return a turntree.core.protocols.{kind.__name__}, or None where there is nothing to decide"
        raise ConfigError(f"answered {answer!r}", field=field, hint=hint)


def checked_decision(decision: GateDecision | None, progress: GroupProgress) -> GateDecision | None:
    """The decision of a gate. A group that has ended goes on to its update whatever the gate says: a cut would save
    nothing and lose its gradient. Raises `ConfigError` for an answer that is no decision."""
    _of_kind(GateDecision, decision, "gate")
    if decision is not None and decision.cut and all(progress.finished):
        return replace(decision, cut=False, reason=f"{decision.reason} (not cut: the group had ended)")
    return decision


def checked_fork(fork: BranchDecision | None, rollout: LiveRollout, completion: Completion) -> BranchDecision | None:
    """The decision of a brancher. Raises `ConfigError` for a fork at `completion` that cannot be made."""
    _of_kind(BranchDecision, fork, "brancher")
    if fork is None or fork.branches < 2:
        return fork
    said, tokens = f"asks for a fork into {fork.branches} branches", len(completion.token_ids)
    if fork.branches - 1 > rollout.budget:
        hint = "keep to ForkMoment.budget (turntree.decide.branching.rules.bounded does)"
        raise ConfigError(f"{said} where {rollout.budget} leaves may be added", field="brancher", hint=hint)
    if not 0 <= fork.shared < tokens:
        hint = "leave at least the last token of the turn to every branch"
        raise ConfigError(f"{said} that share {fork.shared} of {tokens} tokens", field="brancher", hint=hint)
    return fork


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Bounded):
    """The rollouts of one task, and how many are played at once."""

    group_size: Positive = 8
    """Episodes of one task: the leaves of its tree."""
    initial_rollouts: int | None = None
    """Rollouts of a group that begin independently; the rest is the brancher's. Default: all, half with a brancher."""
    max_branched: int | None = field(default=None, metadata=FIXED)
    """Most leaves of a group that the brancher may add (default: all that are left to it)."""
    refills: bool | None = field(default=None, metadata=FIXED)
    """Sample fresh rollouts in place of leaves that no branch was made for. Default: where the credit counts them,
    which path weights do not."""
    greedy_first: bool = field(default=False, metadata=FIXED)
    """The first rollout of a group takes the likeliest tokens: ReMax's baseline."""
    max_live_rollouts: Positive | None = None
    """Rollouts played at once, of as many tasks as that takes. Default: all of an iteration, 64 outside of training."""
    max_retries: int = field(default=2, metadata=FIXED)
    """Retries of failed calls per rollout, engine and environment together."""
    rollout_seconds: Above0 = 1800.0
    """A rollout that takes longer from its start is cancelled."""
    group_seconds: float | None = field(default=None, metadata=FIXED)
    """A group that takes longer from its first rollout's start is cancelled (default: twice `rollout_seconds`)."""
    deterministic: bool = True
    """Runs repeat bit for bit. Off: up to rounding, since an answer of an environment is taken when it arrives."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.initial <= self.group_size:
            raise ConfigError(f"must be from 1 to group_size ({self.group_size})", field="initial_rollouts")

    @property
    def initial(self) -> int:
        return self.group_size if self.initial_rollouts is None else self.initial_rollouts


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(GroupConfig):
    """How groups are played."""

    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)

    @property
    def longest_group(self) -> float:
        return 2 * self.rollout_seconds if self.group_seconds is None else self.group_seconds

    @property
    def places(self) -> int:
        return 64 if self.max_live_rollouts is None else self.max_live_rollouts

    @property
    def branched(self) -> int:
        """The most leaves of a group that a brancher may add."""
        return min(self.group_size - self.initial, self.group_size if self.max_branched is None else self.max_branched)

    def of_training(self, groups: int, *, branching: bool, counts_refills: bool = True) -> SchedulerConfig:
        """With the defaults that depend on the rest of a training run filled in."""
        initial = (self.group_size + 1) // 2 if branching and self.initial_rollouts is None else self.initial
        places = groups * self.group_size if self.max_live_rollouts is None else self.places
        refills = counts_refills if self.refills is None else self.refills
        return replace(self, initial_rollouts=initial, max_live_rollouts=places, refills=refills)


@dataclass(frozen=True, kw_only=True)
class GrownGroup:
    """A finished task. `index` is its place among the tasks of the run, `seconds` the time from the start of
    its first rollout to the end of its last. `cut` is the turn at which a gate stopped it, None where none did.

    Every rollout of the group is a leaf of the tree with a named `StopReason` (a task that leaves no room for a
    completion is one leaf without a reward, its root); forked rollouts share nodes. A rollout that was stopped
    (gated, cancelled, a fault) ends in an empty observation, which carries the cost of its unfinished calls, so
    `tree.cost` is the whole cost of the group. A group cut at turn t holds t turns; the cost of later turns, which
    faster rollouts had already sampled, is charged there too.
    """

    index: int
    task: Environment
    tree: RolloutTree
    rewards: Rewards
    seconds: float
    cut: int | None = None
    decision: GateDecision | None = None  # the gate's last (cut, audited or passed); the tree holds all of them
    unfilled: int = 0  # leaves that neither a branch nor a fresh rollout was made for
    endings: Mapping[int, Ending] = field(default_factory=dict[int, Ending], repr=False)  # of what the scheduler played


def in_order(groups: Iterable[GrownGroup]) -> Iterator[GrownGroup]:
    """Groups that end in any order, by their index."""
    held: dict[int, GrownGroup] = {}
    following = 0
    for group in groups:
        held[group.index] = group
        while following in held:
            yield held.pop(following)
            following += 1


@dataclass(eq=False)
class Group:
    """The rollouts of one task while they are played.

    The tree grows in order of arrival; `grown` reorders it (by turn, then sample), so that the same draws give the same
    tree under any interleaving.

    `size` leaves are wanted. `initial` rollouts begin independently; each may fork off its share of `branched` leaves
    (budgets are passed down, so that no fork depends on the speed of another rollout). Leaves that no fork was made for
    become `refills`, independent rollouts that are started together when all others have ended, or are `unfilled`.
    """

    index: int
    task: Environment
    size: int
    initial: int
    branched: int
    seed: int
    iteration: int
    occurrence: int  # groups of the task begun before in the iteration
    max_turns: int
    begun: float
    prompt_wide: bool = False  # whether `branched` is one budget, and not divided down the tree
    started: int = 0  # independent rollouts that have been given a place
    refills: int = 0
    unfilled: int = 0
    prompt_ids: tuple[int, ...] = ()
    opening: Observation | None = None  # what tells the task, once a rollout of the group has received it
    rollouts: dict[Key, LiveRollout] = field(default_factory=dict[Key, LiveRollout])
    endings: dict[Key, Ending] = field(default_factory=dict[Key, Ending])
    owed: defaultdict[Key, Cost] = field(default_factory=lambda: defaultdict(Cost))  # paid for, and not yet in a node
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
        return self.cut is not None or self.ending is not None or (self.ended and not self.missing)

    @property
    def wanted(self) -> int:
        """Independent rollouts to start, refills included."""
        return self.initial + self.refills

    @property
    def forked(self) -> list[Key]:
        return [key for key in self.rollouts if len(key) > 1]

    @property
    def ended(self) -> bool:
        """Whether every rollout that was started, forked or is to be started has ended."""
        return len(self.endings) == self.wanted + len(self.forked)

    @property
    def missing(self) -> int:
        """Leaves with no rollout in progress, apart from those that stay unfilled."""
        return self.size - self.wanted - len(self.forked) - self.unfilled

    def plant(self, key: Key, told: Observation) -> LiveRollout:
        """Begin the rollout `key` with its task."""
        self.rollouts[key] = rollout = LiveRollout(
            key=key,
            tree=self.tree,
            leaf=self._root,
            messages=list(told.messages),
            token_ids=self.prompt_ids,
            answers=[told],
        )
        if key[0] < self.initial:
            rollout.budget = self.branched // self.initial + (key[0] < self.branched % self.initial)
        return rollout

    def moment(self, rollout: LiveRollout, completion: Completion) -> ForkMoment:
        """What a brancher may see of `rollout`, which is about to say `completion`."""
        if self.prompt_wide:
            rollout.budget = self.branched - len(self.forked)
        return ForkMoment(
            task_id=self.task.task_id,
            key=rollout.key,
            turn=rollout.turns + 1,
            max_turns=self.max_turns,
            budget=rollout.budget,
            entropies=(*rollout.entropies, completion.entropies),
            seed=self.seed,
            iteration=self.iteration,
        )

    def fork(self, rollout: LiveRollout, completion: Completion, decision: BranchDecision) -> list[LiveRollout]:
        """The rollouts that leave `rollout`, which has said `completion`, and share the budget with it from now on."""
        left = rollout.budget - (decision.branches - 1)
        twins = [rollout.branch(completion, decision.shared) for _ in range(decision.branches - 1)]
        for number, each in enumerate((rollout, *twins)):
            each.budget = left // decision.branches + (number < left % decision.branches)
        self.rollouts |= {twin.key: twin for twin in twins}
        return twins

    def record(self, actor: str, key: Key | None, action: str, reason: str, numbers: dict[str, float]) -> None:
        """Record a decision about one rollout, or about the group (`key` None)."""
        rollout = None if key is None else self.rollouts.get(key)
        node = self._root if rollout is None else rollout.leaf
        self.decisions.append((key or (), Decision(actor, node, action, reason, numbers)))

    def mark_refill(self, key: Key, rollout: LiveRollout) -> None:
        """Record of the first turn of a refill, which `rollout` has just appended, that it is one."""
        if key[0] >= self.initial and len(key) == 1 and rollout.turns == 0:
            self.tree.mark_refill(rollout.leaf)
            self.record("scheduler", key, "refill", "leaves that no branch was made for", {})

    def branched_at(self, rollout: LiveRollout, decision: BranchDecision) -> None:
        """Record what a brancher said of the turn that `rollout` has just appended, at the node above the last: the
        deepest that its decision depended on, and the one that the branches of a fork have in common."""
        above = self.tree[rollout.leaf].parent
        assert above is not None
        action = "fork" if decision.branches > 1 else "pass"
        said = {"branches": decision.branches, "shared": decision.shared, "turn": self.tree[rollout.leaf].turn}
        numbers = {**{name: float(value) for name, value in said.items()}, **decision.numbers}
        self.decisions.append((rollout.key, Decision("brancher", above, action, decision.reason, numbers)))

    # what a gate sees

    def reached(self, turn: int) -> bool:
        """Whether every rollout has played `turn` turns or ended before."""
        return all(
            (sample,) in self.endings or ((sample,) in self.rollouts and self.rollouts[(sample,)].turns >= turn)
            for sample in range(self.initial)
        )

    def progress(self, turn: int) -> GroupProgress:
        """The group as of `turn`, without later turns of faster rollouts, because a gate's decision must not depend on
        the interleaving. Rollouts that a fault had ended by then are left out."""
        initial = [self.rollouts[(i,)] for i in range(self.initial) if (i,) in self.rollouts]
        seen = [rollout for rollout in initial if rollout.turns >= turn or self._ended(rollout.key)]
        finished = tuple(rollout.turns <= turn and self._ended(rollout.key) for rollout in seen)
        return GroupProgress(
            task_id=self.task.task_id,
            max_turns=self.max_turns,
            actions=tuple(tuple(rollout.actions[:turn]) for rollout in seen),
            observations=tuple(  # what ended a rollout led to no action
                tuple(one.observations[: one.turns if ended else turn + 1])
                for one, ended in zip(seen, finished, strict=True)
            ),
            finished=finished,
            progress=tuple(rollout.answers[: turn + 1][-1].progress for rollout in seen),
            iteration=self.iteration,
            occurrence=self.occurrence,
        )

    def _ended(self, key: Key) -> bool:
        """Whether the rollout ended by itself."""
        return key in self.endings and not self.endings[key].stop.censors

    # what it becomes

    def grown(self, now: float, functions: RewardSum | None = None) -> GrownGroup:
        """The finished group. Its episodes are judged here, at the same time where a judge is a server, and never those
        of a group that was cut."""
        layout = _Layout(self, self._root)
        tree, [rewards] = layout.tree, judged([layout.endings], functions)
        rewards.check(tree)
        return GrownGroup(
            index=self.index,
            task=self.task,
            tree=tree,
            rewards=rewards,
            seconds=now - self.begun,
            cut=self.cut,
            decision=self.decision,
            unfilled=self.unfilled,
            endings=layout.endings,
        )


class _Layout:
    """The tree of a group that is over, by turn, then rollout, with its endings, decisions and verdicts."""

    def __init__(self, group: Group, root: int) -> None:
        self._group = group
        self.tree = RolloutTree(group.task.task_id)
        self.endings: dict[int, Ending] = {}
        task = () if group.opening is None else group.opening.messages
        self._ids = {root: self.tree.add(None, NodeKind.PROMPT, group.prompt_ids, messages=task).id}
        self._dropped: defaultdict[Key, Cost] = defaultdict(Cost)
        self._refills = group.tree.refills()
        appended = [(turn, r.key, node) for r in group.rollouts.values() for node, turn in r.nodes.items()]
        for turn, key, node in sorted(appended):
            self._place(turn, key, group.tree[node])
        self.tree.take_routes(group.tree, self._ids)
        if group.ending is not None:
            self._stop(self._ids[root], group.ending)
        else:
            keys = [*((sample,) for sample in range(group.wanted)), *sorted(group.forked)]
            for key in keys:
                if (survivor := self._survivor(key)) != key:
                    self._dropped[survivor] += group.owed[key]
            for key in keys:
                if self._survivor(key) == key:
                    self._finish(key)
        kept = [(key, d) for key, d in group.decisions if d.node in self._ids and not self._dropped_with(key, d)]
        for _, decision in sorted(kept, key=lambda pair: (self._ids[pair[1].node], pair[0])):
            self.tree.record(replace(decision, node=self._ids[decision.node]))

    def _place(self, turn: int, key: Key, node: Node) -> None:
        cut = self._group.cut
        if cut is not None and (turn > cut or len(key) > 1):
            self._dropped[self._survivor(key)] += node.cost
            return
        fields = {name: value for name, value in vars(node).items() if name not in ("id", "parent", "kind", "turn")}
        above = None if node.parent is None else self._ids[node.parent]
        self._ids[node.id] = self.tree.add(above, node.kind, **fields).id
        if node.id in self._refills:
            self.tree.mark_refill(self._ids[node.id])

    def _dropped_with(self, key: Key, decision: Decision) -> bool:
        """Whether the decision is about a forked rollout of a cut group, or about a turn after the cut, which a faster
        rollout may have reached."""
        cut = self._group.cut
        return cut is not None and (len(key) > 1 or decision.numbers.get("turn", 0) > cut)

    def _survivor(self, key: Key) -> Key:
        """`key`; in a cut group the rollout that it was forked from, if that happened after the cut or in a branch.

        A gate waits for the independent rollouts only. The progress of their branches at the cut depends on the
        interleaving, so the tree keeps only the beginning of a branch, and its cost.
        """
        cut, rollout = self._group.cut, self._group.rollouts.get(key)
        if cut is None or rollout is None or (rollout.forked_at <= cut and len(key) <= 2):
            return key
        return self._survivor(key[:-1])

    def _finish(self, key: Key) -> None:
        """Stop the rollout's leaf, after an empty observation if its last call gave nothing."""
        group, ending = self._group, self._ending(key)
        rollout = group.rollouts.get(key)
        where = [] if rollout is None else [*reversed(rollout.nodes), rollout.origin]
        leaf = next((self._ids[node] for node in where if node in self._ids), 0)
        if ending.stop.censors:
            cost = group.owed[key] + self._dropped[key]
            leaf = self.tree.add(leaf, NodeKind.OBSERVATION, (), cost=cost).id
        self._stop(leaf, ending)

    def _ending(self, key: Key) -> Ending:
        """How the rollout ended; in a group that was cut at turn t, its state then, without a reward."""
        group, ending = self._group, self._group.endings.get(key)
        if group.cut is None:
            assert ending is not None
            return ending
        gated = Verdict(None, f"the group was cut at turn {group.cut}")
        turns = group.rollouts[key].turns if key in group.rollouts else 0
        if ending is None or len(key) > 1 or turns > group.cut or (turns == group.cut and ending.stop.censors):
            return Ending(StopReason.GATED, gated)
        return ending if ending.stop.censors else Ending(ending.stop, gated)

    def _stop(self, leaf: int, ending: Ending) -> None:
        self.tree.stop(leaf, ending.stop)
        self.endings[leaf] = ending
