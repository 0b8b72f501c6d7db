"""End-to-end GRPO: sample whole episodes with the current policy, update on them, repeat.

The budget is decided before a group starts and before it is trained on (filters such as GRESO and DAPO), and while it
grows (the gate; the brancher). `training.savings` counts what each of them saved, `rollouts.accounting` what branches
share.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedModel

from turntree.advantages.local import with_turns
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import decided
from turntree.core.labels import Credit
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.core.protocols import (
    Brancher,
    Environment,
    Estimator,
    Filter,
    FinishedGroup,
    Gate,
    GateDecision,
    Renderer,
    StreamingEngine,
)
from turntree.core.tree import RolloutTree, StopReason
from turntree.core.verdict import censored
from turntree.environments.pool import EnvironmentPool
from turntree.filters.dapo import DapoFilter, allowed, refill
from turntree.filters.greso import Greso
from turntree.gates.monitor import GateMonitor
from turntree.rollouts.accounting import TreeAccount, account, effective_leaves, intraclass_correlation
from turntree.rollouts.groups import GrownGroup
from turntree.rollouts.live import require_whole_paths
from turntree.rollouts.players import Player, player_of
from turntree.rollouts.rewards import RewardSum, figures
from turntree.rollouts.scheduler import SchedulerConfig
from turntree.rollouts.spread import Begun, Spread
from turntree.training.checkpoints import Checkpoints
from turntree.training.config import OnlineConfig
from turntree.training.group import SINGLE, ProcessGroup
from turntree.training.lora import Reference
from turntree.training.prompts import TaskStream, first_reason
from turntree.training.savings import SavingsLedger
from turntree.training.trainer import open_trainers
from turntree.training.update import Learner, credit_of


@dataclass(frozen=True)
class JudgedTurns:
    """Verdicts on the turns of an iteration's episodes: what they cost, figures for the row, and for each group the
    advantages of judged turns, by node, in the unit of an episode's reward."""

    cost: Cost
    figures: dict[str, Any]
    advantages: Sequence[Mapping[int, float]]


class TurnJudge(Protocol):
    """Judges the turns that the episodes of an iteration took."""

    def judge(self, groups: Sequence[GrownGroup], iteration: int) -> JudgedTurns: ...

    def state(self) -> dict[str, Any]:
        """A JSON value of what was learned from earlier iterations, for `restore`."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Parts:
    """The components of a run. `engine` samples from `model`; `gate`, `brancher`, `pool`, `rewards` are passed to the
    scheduler. With `spread`, groups are played by its workers instead. `judge` gives verdicts on turns
    (`OnlineConfig.local`)."""

    model: PreTrainedModel
    reference: Reference | None
    engine: StreamingEngine
    renderer: Renderer
    tasks: Sequence[Environment]
    gate: Gate | None = None
    brancher: Brancher | None = None
    pool: EnvironmentPool | None = None
    estimator: Estimator | None = None  # None: that of `OnlineConfig.credit`
    rewards: RewardSum | None = None
    filters: Sequence[Filter] = ()  # beside those of `OnlineConfig`
    spread: Callable[[SchedulerConfig], Spread] | None = None
    judge: TurnJudge | None = None
    shared: bool = True  # whether the model is trained on packed trees (`isolation.shares_prefixes`)


@dataclass(frozen=True)
class TrainedOnline:
    """The cost of a run, the separate cost of its checks, and what each filter saved."""

    cost: Cost
    checks: Cost
    savings: SavingsLedger


Log = Callable[[dict[str, Any]], None]
Keep = Callable[[int, Sequence[GrownGroup], Sequence[Credit | None]], None]
Check = Callable[[int], tuple[dict[str, Any], Cost]]


def train_online(
    parts: Parts,
    config: OnlineConfig,
    *,
    log: Log,
    keep: Keep = lambda iteration, groups, credits: None,
    check: Check | None = None,
    checkpoints: Checkpoints | None = None,
    group: ProcessGroup = SINGLE,
) -> TrainedOnline:
    """Update `parts.model` in place. `log` gets one row per iteration. Before it, `keep` gets all groups of the
    iteration with the credit of those that were trained on (None: cut, dropped, censored). `check(iteration)` adds
    held-out figures.

    All groups of an iteration are sampled with the weights of the previous update, or (`max_off_policy_steps` K, with
    `parts.spread`) of K updates before: the workers then play the next K iterations during the updates. The trainer
    computes the old log-probabilities of such groups, and the loss weighs their tokens by the truncated ratio of these
    to the sampled ones (`importance_cap`). Where `checkpoints` holds an earlier part of this run, it is resumed; a
    checkpoint holds the groups that were played ahead.
    """
    if not parts.tasks:
        raise InputError("there is no task to play", hint="choose a split with games in it")
    run = _Run(parts, config, check, group)
    done = run.restore(checkpoints)
    if run.row:
        log(run.closed(done))
    elif done == 0 and check is not None:
        log({"step": 0, **run.check(0)})
    for iteration in range(done + 1, config.iterations + 1):
        groups = run.play(iteration)
        judged = run.judge_turns(groups, iteration)
        credits = run.credits(groups)
        run.row = {"step": iteration, **run.update(groups, credits), **run.observe(groups), **judged}
        keep(iteration, groups, credits)
        last = iteration == config.iterations
        saves = checkpoints if checkpoints and checkpoints.due(iteration, last=last) else None
        if saves and run.only_closing(iteration):
            saves.save(iteration, run.learner.trainers, run.state())
        log(run.closed(iteration))
        if saves and not run.only_closing(iteration):
            saves.save(iteration, run.learner.trainers, run.state())
    return TrainedOnline(run.cost, run.checks, run.savings)


def _filters(config: OnlineConfig) -> list[Filter]:
    """The filters that the configuration switches on."""
    found: list[Filter] = []
    if config.greso is not None:
        seed = config.seed if config.greso.seed is None else config.greso.seed
        found.append(Greso(dataclasses.replace(config.greso, seed=seed)))
    return [*found, config.dapo] if config.dapo is not None else found


def _scheduler(parts: Parts, config: SchedulerConfig) -> Player | Spread:
    """Who plays the groups: the workers, or this process."""
    require_whole_paths(parts.renderer, parts.brancher)
    if parts.spread is not None:
        return parts.spread(config)
    return player_of(
        parts.tasks,
        parts.engine,
        parts.renderer,
        config,
        pool=parts.pool,
        gate=parts.gate,
        brancher=parts.brancher,
        rewards=parts.rewards,
    )


@dataclass
class _Begun:
    """An iteration whose tasks were drawn. `units` are what the workers play of it; None in this process."""

    tasks: Sequence[Environment]
    skipped: list[tuple[str, str]]
    counts: Counter[str]  # groups of the iteration that were begun, by task
    units: list[Begun] | None = None

    def to_json(self) -> dict[str, Any]:
        """Waits for the units."""
        units = [unit.to_json() for unit in self.units or ()]
        return {"skipped": [list(each) for each in self.skipped], "counts": dict(self.counts), "units": units}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> _Begun:
        skipped = [(task_id, why) for task_id, why in value["skipped"]]
        return cls((), skipped, Counter(value["counts"]), [Begun.from_json(unit) for unit in value["units"]])


@dataclass(frozen=True)
class _Drop:
    """A group (its id) that a filter kept out of the update, and why."""

    group: int
    part: str
    why: str


def _name_of(part: Filter) -> str:
    """What the metrics call a filter: of one's own, its class."""
    return "dapo" if isinstance(part, DapoFilter) else type(part).__name__


class _Run:
    """The state of a run between two iterations, and the steps of one iteration."""

    def __init__(self, parts: Parts, config: OnlineConfig, checker: Check | None, group: ProcessGroup) -> None:
        self.config, self.checker, self._engine = config, checker, parts.engine
        steps = config.iterations * config.updates
        trainers = open_trainers(parts.model, parts.reference, config.optimizer, steps, group)
        limits = (config.updates, config.max_tokens, parts.shared)
        loss = config.loss.of(config.rollouts.episodes.sampling)
        self.learner = Learner(parts.model, trainers, parts.engine, loss, *limits)
        rollouts = config.rollouts.of_training(
            config.groups,
            branching=parts.brancher is not None,
            counts_refills=parts.estimator is not None or config.credit.leaf_weights != "path_weighted",
        )
        self.scheduler = _scheduler(parts, rollouts)
        self._brancher = parts.brancher
        self._judge = parts.judge
        self._filters = [*_filters(config), *parts.filters]
        self.credit = parts.estimator or config.loss.estimator(config.credit)
        self._cap = max((one.refill_cap for one in self._filters), default=0.0)
        self.stream = TaskStream(parts.tasks, config.seed, self._filters)
        self.savings = SavingsLedger()
        self.monitor = GateMonitor()
        self._judged: list[tuple[GateDecision, bool | None]] = []  # all that the monitor was told
        self.cost, self.checks = NO_COST, NO_COST
        self.account = self._grown = TreeAccount()  # since the start, and in this iteration
        self._skipped: list[tuple[str, str]] = []  # (task, reason), in this iteration
        self._ahead: dict[int, _Begun] = {}  # iterations that were begun, by number
        self._first = 0  # groups of this iteration that are no refills
        self._refills: list[Cost] = []  # what each of its refills cost, without local rollouts
        self._drops: list[_Drop] = []  # of this iteration; the first of them are replaced by the refills, in order
        self._sampled_for = 0  # the version of the policy before the update of this iteration
        self._waited = 0.0  # seconds for the groups of this iteration
        if config.max_off_policy_steps and parts.spread is None:
            raise ConfigError("needs rollout workers", field="max_off_policy_steps", hint="set cluster.workers")
        self.row: dict[str, Any] = {}  # of an iteration that was trained and is not logged yet
        self._labels: dict[int, Credit | None] = {}  # the credit of this iteration's groups, by id
        self._turn_advantages: Sequence[Mapping[int, float]] = ()  # of their judged turns, by group and node
        rule = config.loss.estimator(config.credit)
        # an advantage in the unit of a reward, in that of the estimator: by a group with as many successes as failures
        self._unit = config.local.verdicts * 2 * rule.advantages([1.0, 0.0] * 4)[0]

    def state(self) -> dict[str, Any]:
        """Everything that the next iteration depends on, as plain JSON."""
        return {
            "row": self.row,
            "cost": dataclasses.asdict(self.cost),
            "checks": dataclasses.asdict(self.checks),
            "policy_version": self._engine.policy_version,
            "stream": self.stream.state(),
            "filters": [one.state() for one in self._filters],
            "savings": self.savings.state(),
            "judged": [[dataclasses.asdict(decision), zero] for decision, zero in self._judged],
            "account": dataclasses.asdict(self.account),
            "brancher": None if self._brancher is None else self._brancher.state(),
            "judge": None if self._judge is None else self._judge.state(),
            "ahead": {str(iteration): begun.to_json() for iteration, begun in self._ahead.items()},
        }

    def restore(self, checkpoints: Checkpoints | None) -> int:
        """The iteration after which this run resumes; 0 for a new run."""
        state = None if checkpoints is None else checkpoints.restore(self.learner.trainers)
        if state is None:
            return 0
        self.row = state["row"]
        self.cost, self.checks = Cost(**state["cost"]), Cost(**state["checks"])
        self.stream.restore(state["stream"])
        for one, held in zip(self._filters, state["filters"], strict=True):
            one.restore(held)
        self.savings.restore(state["savings"])
        self.account = TreeAccount(**state["account"])
        if self._brancher is not None:
            self._brancher.restore(state["brancher"])
        if self._judge is not None:
            self._judge.restore(state["judge"])
        for decision, zero in state["judged"]:
            self._judge_gate(GateDecision(**decision), zero)
        self._ahead = {int(key): _Begun.from_json(held) for key, held in state.get("ahead", {}).items()}
        self._engine.update_weights(self.learner.model, state["policy_version"])
        self.scheduler.rendered = True  # an iteration was played: a task that fails now is one of many, as it was then
        return state["step"]

    def play(self, iteration: int) -> list[GrownGroup]:
        """The groups of an iteration. Where a filter refills, further rounds replace what filters dropped; groups
        that a gate cut (as in Selective Rollout) or faults censored are not replaced."""
        started = time.perf_counter()
        for one in range(iteration, min(iteration + self.config.max_off_policy_steps, self.config.iterations) + 1):
            if one not in self._ahead:
                self._ahead[one] = self._begin(self.config.groups, one, Counter())
        begun = self._ahead.pop(iteration)
        self._skipped, self._grown, self._labels, self._drops = [], TreeAccount(), {}, []
        groups = self._round(begun, iteration)
        wanted = self._first = len(groups)
        while more := refill(self._cap, wanted=wanted, kept=len(groups) - len(self._drops), started=len(groups)):
            groups += self._round(self._begin(more, iteration, begun.counts), iteration)
        self._refills = [group.tree.cost for group in groups[wanted:]]
        self._waited = time.perf_counter() - started
        self.account += self._grown
        if isinstance(self.scheduler, Spread):
            self.scheduler.learn()
        for one in self._filters:
            decided("filter", one.end_iteration)
        left = allowed(self._cap, wanted=wanted, started=len(groups))
        self.savings.skipped([task for task, _ in self._skipped], refills_left=left)
        return groups

    def _begin(self, count: int, iteration: int, counts: Counter[str]) -> _Begun:
        """Draw `count` tasks and, with workers, give them out. `counts` are the iteration's groups by task, so that no
        group repeats another's draws."""
        begun = _Begun(*self.stream.draw(count, iteration), counts)
        if isinstance(self.scheduler, Spread):
            begun.units = self.scheduler.begin(
                begun.tasks,
                seed=self.config.seed,
                iteration=iteration,
                begun=counts,
                urgent=bool(counts),
            )
        return begun

    def _round(self, begun: _Begun, iteration: int) -> list[GrownGroup]:
        """The groups that were begun."""
        self._skipped += begun.skipped
        if isinstance(self.scheduler, Spread):
            groups = list(self.scheduler.groups(begun.units or ()))
        else:
            seed = self.config.seed
            groups = list(self.scheduler.run(begun.tasks, seed=seed, iteration=iteration, begun=begun.counts))
        for group in groups:
            self.cost += group.tree.cost
            self._grown += account(group.tree)
            self.savings.came_back(group)
            self._filter(group, iteration)
            if group.decision is not None:
                outcome = group_outcome(_rewards(group))
                known = outcome is not GroupOutcome.CENSORED
                self._judge_gate(group.decision, outcome.zero_variance if known else None)
        return groups

    def _filter(self, group: GrownGroup, iteration: int) -> None:
        """The credit of a finished group; None where it is censored or a filter drops it."""
        rewards = tuple(_rewards(group))
        credit = self._credit(group)
        shown = FinishedGroup(task_id=group.tree.task_id, iteration=iteration, rewards=rewards, credit=credit)
        found = None if credit is None else first_reason(self._filters, lambda one: one.drop(shown))
        if found is not None:
            self._drops.append(_Drop(id(group), _name_of(found[0]), found[1]))
            credit = None
        self._labels[id(group)] = credit
        for one in self._filters:
            decided("filter", one.finished, shown)

    def _credit(self, group: GrownGroup) -> Credit | None:
        """What the estimator says of a group; None where there is nothing to compare."""
        if not _is_scored(group):
            return None
        return credit_of(self.credit, group.tree, group.rewards)

    def _judge_gate(self, decision: GateDecision, zero_variance: bool | None) -> None:
        self.monitor.record(decision, zero_variance)
        self._judged.append((decision, zero_variance))

    def _kept(self, groups: Sequence[GrownGroup]) -> list[GrownGroup]:
        """The groups that the update trains on: scored ones that no filter dropped."""
        return [group for group in groups if self._labels[id(group)] is not None]

    def judge_turns(self, groups: Sequence[GrownGroup], iteration: int) -> dict[str, Any]:
        """Verdicts on the turns of the episodes, whose credit lies beside that of the episodes."""
        if self._judge is None:
            return {}
        judged = self._judge.judge(groups, iteration)
        self._turn_advantages = [
            {node: self._unit * advantage for node, advantage in advantages.items()} for advantages in judged.advantages
        ]
        self.cost += judged.cost
        return {"local": judged.figures}

    def credits(self, groups: Sequence[GrownGroup]) -> list[Credit | None]:
        """The credit of every group that the update learns from; None for the others."""
        return self._with_turns([self._labels[id(group)] for group in groups])

    def _with_turns(self, episodes: Sequence[Credit | None]) -> list[Credit | None]:
        """The credit of the first groups' whole rollouts together with that of their judged turns."""
        if self._judge is None:
            return list(episodes)
        pairs = zip(episodes, self._turn_advantages, strict=False)
        return [with_turns(credit, turns) if credit is not None else None for credit, turns in pairs]

    def update(self, groups: Sequence[GrownGroup], labels: Sequence[Credit | None]) -> dict[str, Any]:
        """One update on the groups that have credit; no step where none has."""
        self._sampled_for = self._engine.policy_version
        kept = [(group, credit) for group, credit in zip(groups, labels, strict=True) if credit is not None]
        credits = [credit for _, credit in kept]
        self._book(groups, labels)
        metrics, cost = self.learner.learn([group.tree for group, _ in kept], credits)
        self.cost += cost
        return {
            "redistributed_weight": sum(credit.redistributed for credit in credits),
            "uncounted_leaves": sum(credit.uncounted for credit in credits),
            "biased_forks": sum(credit.biased_forks for credit in credits),
            **metrics,
        }

    def _book(self, groups: Sequence[GrownGroup], labels: Sequence[Credit | None]) -> None:
        """Enter what the filters saved and cost, each for the groups that it dropped and the refills that replaced
        them: one after the other, so that their parts add up to the difference of the whole update."""
        if not self._drops:
            return
        now = self._with_turns([self._credit(group) for group in groups[: self._first]])
        now += [None] * (len(groups) - self._first)
        before, place = self._trained_tokens(groups, now), {id(group): i for i, group in enumerate(groups)}
        for name in dict.fromkeys(drop.part for drop in self._drops):
            own = [number for number, drop in enumerate(self._drops) if drop.part == name]
            refills = [number for number in own if number < len(self._refills)]
            for i in (*(place[self._drops[number].group] for number in own), *(self._first + k for k in refills)):
                now[i] = labels[i]
            after = self._trained_tokens(groups, now)
            self.savings.filtered(name, before - after, [self._refills[number] for number in refills])
            before = after

    def _trained_tokens(self, groups: Sequence[GrownGroup], labels: Sequence[Credit | None]) -> int:
        """The tokens that an update on these groups computes."""
        kept = [(group.tree, credit) for group, credit in zip(groups, labels, strict=True) if credit is not None]
        trees, credits = [tree for tree, _ in kept], [credit for _, credit in kept]
        return self.learner.slots(trees, credits)

    def observe(self, groups: Sequence[GrownGroup]) -> dict[str, Any]:
        """The metrics of the groups. Means are over scored rollouts; a cut group has none, and no outcome.

        `predicted_amplification` is the factor by which the gradient of the other groups grows if the cut groups,
        assumed to have no variance, are removed from a normaliser that counts trained tokens or rollouts. A constant
        normaliser does not change, and DAPO removes such groups anyway.
        """
        outcomes = Counter(group_outcome(_rewards(group)) for group in groups if group.cut is None)
        scored = [reward for group in groups for reward in _rewards(group) if reward is not None]
        cut = sum(group.cut is not None for group in groups)
        zero = outcomes[GroupOutcome.ALL_FAIL] + outcomes[GroupOutcome.ALL_SUCCEED]
        whole = zero + outcomes[GroupOutcome.MIXED]
        stops = Counter(group.tree.stop_reason(leaf) for group in groups for leaf in group.tree.ends())
        unmoved = self.config.loss.normalizer == "constant" or any(isinstance(f, DapoFilter) for f in self._filters)
        reasons = censored(v for g in groups if g.cut is None for v in g.rewards.verdicts.values())
        told = (v for g in groups for v in g.rewards.verdicts.values())
        solved = [v.success for v in told if v.reward is not None and v.success is not None]
        return {
            "reward_mean": sum(scored) / len(scored) if scored else None,
            "success_share": sum(map(bool, solved)) / len(solved) if solved else None,
            **figures(v for g in groups for v in g.rewards.verdicts.values()),
            "groups": len(groups),
            **{f"groups_{outcome.value}": outcomes[outcome] for outcome in GroupOutcome},
            "groups_cut": cut,
            "groups_audited": sum(group.decision is not None and group.decision.audited for group in groups),
            **self._gate_figures(),
            **self._branch_figures(groups),
            **self._staleness(groups),
            "censored": sum(reasons.values()),
            "censored_reasons": reasons,
            "groups_dropped": dict(Counter(drop.why for drop in self._drops)),
            "prompts_skipped": dict(Counter(dict(self._skipped).values())),
            "zero_variance_share": zero / whole if whole else None,
            "predicted_amplification": 1.0 if unmoved or not whole else (whole + cut) / whole,
            "stops": {reason.value: stops[reason] for reason in StopReason if stops[reason]},
            "spent": self.cost.counts(),
            "trees": dataclasses.asdict(self.account),
            "saved": self.savings.counts(),
            "timing": {
                "seconds": self.cost.seconds,
                "busy_share": self.scheduler.usage.busy_share,
                "gate_seconds": self.scheduler.usage.gate_seconds,
                "wait_seconds": self._waited,
                "saved": self.savings.seconds(),
            },
        }

    def _gate_figures(self) -> dict[str, Any]:
        """The gate's precision over the run, from audited would-be cuts; empty without any."""
        precision = self.monitor.precision()
        if not precision.audits:
            return {}
        return {"gate_precision": dataclasses.asdict(precision), "gate_alarm": self.monitor.alarm}

    def _branch_figures(self, groups: Sequence[GrownGroup]) -> dict[str, Any]:
        """What branching made and shared in this iteration; nothing without a brancher."""
        if self._brancher is None:
            return {}
        whole = [group for group in groups if group.cut is None]
        alike = intraclass_correlation((group.tree, group.rewards) for group in whole)
        worth = [effective_leaves(group.tree, group.rewards, max(0.0, alike or 0.0)) for group in whole]
        return {
            "branching": {
                **dataclasses.asdict(self._grown),
                "unfilled_leaves": sum(group.unfilled for group in groups),
                "structural_saving": self._grown.structural_saving,
                "decisions": sum(said.actor == "brancher" for group in groups for said in group.tree.decisions),
                "forks_by_turn": _forks_by_turn(groups),
                "correlation_within_starts": alike,
                "effective_leaves": sum(worth) / len(worth) if worth and alike is not None else None,
            },
        }

    def _staleness(self, groups: Sequence[GrownGroup]) -> dict[str, float]:
        """Updates between the weights that sampled a tree and those that were trained on it; nothing where rollouts
        are synchronous."""
        if not self.config.max_off_policy_steps:
            return {}
        found = [age for group in self._kept(groups) if (age := staleness(group.tree, self._sampled_for)) is not None]
        return {"staleness_mean": sum(found) / len(found), "staleness_max": max(found)} if found else {}

    def only_closing(self, iteration: int) -> bool:
        """Whether the iteration is checked only because the run ends with it. The checkpoint is saved before that
        check, because an extended run does not make it."""
        every = self.config.check_every
        return iteration == self.config.iterations and not (every and iteration % every == 0)

    def closed(self, iteration: int) -> dict[str, Any]:
        """The row of an iteration that was trained, with its check where one is due."""
        row, self.row, every = self.row, {}, self.config.check_every
        due = self.only_closing(iteration) or (every and iteration % every == 0)
        return {**row, **(self.check(iteration) if due else {})}

    def check(self, iteration: int) -> dict[str, Any]:
        """Held-out figures, where the caller measures any."""
        if self.checker is None:
            return {}
        figures, cost = self.checker(iteration)
        self.checks += cost
        self._engine.clear_cache()  # what a check kept must not serve the next step
        return figures


def staleness(tree: RolloutTree, version: int) -> int | None:
    """How many updates before `version` the tree's oldest tokens were sampled; None where nothing was sampled."""
    sampled = [node.policy_version for node in tree if node.policy_version is not None]
    return version - min(sampled) if sampled else None


def _forks_by_turn(groups: Sequence[GrownGroup]) -> dict[str, int]:
    said = [decision for group in groups for decision in group.tree.decisions if decision.actor == "brancher"]
    turns = Counter(int(decision.numbers["turn"]) for decision in said if decision.action == "fork")
    return {str(turn): count for turn, count in sorted(turns.items())}


def _is_scored(group: GrownGroup) -> bool:
    """Whether there is something to compare: a whole group with at least two rewards."""
    return group_outcome(_rewards(group)) is not GroupOutcome.CENSORED


def _rewards(group: GrownGroup) -> list[float | None]:
    return [verdict.reward for verdict in group.rewards.verdicts.values()]
