"""End-to-end GRPO: what an iteration learns from, what it leaves out, and that a killed run goes on exactly."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fault_drill import Corridor, Even, FailingEngine, FaultPlan, Faulty, Hopeless
from fixed_brancher import FixedBrancher
from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.cost import Cost
from turntree.core.messages import Message
from turntree.core.protocols import Filter, FinishedGroup, GateDecision, GroupProgress, Observation
from turntree.credit.config import CreditConfig
from turntree.credit.credit import CreditRule
from turntree.decide.filters.dapo import DapoFilter
from turntree.decide.filters.greso import Greso, GresoConfig
from turntree.engine.hf import HFEngine
from turntree.env.processes import ProcessPool, ProcessPoolConfig
from turntree.render.template import ChatRenderer
from turntree.rollout.service import Parts
from turntree.train.checkpoints import CheckpointConfig, Checkpoints
from turntree.train.loop import Checked, Trainee, train
from turntree.train.losses import LossConfig
from turntree.train.online import OnlineConfig, OnlineGRPO
from turntree.train.optimizer import OptimizerConfig
from turntree.train.update import Learner

RENDERER = ChatRenderer(tiny_tokenizer())
ROLLOUTS: dict[str, Any] = {
    "sampling": Sampling(max_tokens=8),
    "cut_turns": "judge",  # a random policy does not stop in time
    "group_size": 4,
    "max_live_rollouts": 8,
    "max_retries": 1,
    "max_turns": 30,
}


class CutAll:
    def decide(self, group: GroupProgress) -> GateDecision | None:
        return GateDecision(cut=not all(group.finished), reason="all are", numbers={}, final=True)


def corridors(kind: type[Corridor] = Even, count: int = 6) -> list[Corridor]:
    return [kind(f"task {number}", 1 + number % 3) for number in range(count)]


def parts(tasks: Any = None, **others: Any) -> Parts:
    model = tiny_model(seed=1)
    tasks = corridors() if tasks is None else tasks
    return Parts(Trainee(model, HFEngine(model, RENDERER.stop_ids), RENDERER), tasks, **others)


def filtered(tasks: Any = None, **others: Any) -> Parts:
    """With filters that remember."""
    return parts(tasks, filters=[Greso(), DapoFilter(refill_cap=1.0)], **others)


def config(**settings: Any) -> OnlineConfig:
    given = {"iterations": 3, "groups": 3, "optimizer": OptimizerConfig(learning_rate=1e-3), **ROLLOUTS}
    return OnlineConfig(**{**given, **settings})


def weights(run: Parts) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.policy.model.state_dict().items()}


def test_an_iteration_plays_its_groups_and_learns_from_all_that_were_scored() -> None:
    run, rows, kept = parts(), [], []
    before = weights(run)
    train(
        OnlineGRPO(run, config()),
        log=rows.append,
        keep=lambda iteration, groups, credits: kept.append((iteration, len(groups), len(credits))),
    )
    assert kept == [(1, 3, 3), (2, 3, 3), (3, 3, 3)]
    assert [row["trained_groups"] for row in rows] == [3, 3, 3]
    assert all(sum(row["stops"].values()) == 12 for row in rows)
    assert any(not torch.equal(value, before[name]) for name, value in weights(run).items())


def test_a_cut_group_is_never_learned_from() -> None:
    run, rows = parts(corridors(count=3), gate=CutAll()), []
    before = weights(run)
    train(OnlineGRPO(run, config()), log=rows.append)
    longer = [task for task in run.tasks if task.length > 1]  # type: ignore[attr-defined]
    assert rows[0]["groups_cut"] == len(longer) == 2
    assert rows[0]["trained_groups"] == 1
    run, rows = parts(longer, gate=CutAll()), []
    train(OnlineGRPO(run, config(groups=2)), log=rows.append)
    assert [row["trained_groups"] for row in rows] == [0, 0, 0]
    assert all(torch.equal(value, before[name]) for name, value in weights(run).items())


def test_groups_without_variance_are_dropped_by_dapo_and_their_prompts_skipped_by_greso() -> None:
    run, rows = parts(corridors(Hopeless, 3)), []
    greso = Greso(GresoConfig(easy_exploration=0.05, hard_exploration=0.05))
    run = replace(run, filters=[greso, DapoFilter()])
    train(OnlineGRPO(run, config(iterations=6)), log=rows.append)
    assert [row["trained_groups"] for row in rows] == [0] * 6
    assert rows[0]["prompts_skipped"] == {}
    assert sum(sum(row["prompts_skipped"].values()) for row in rows) > 5


def test_a_refill_replaces_dropped_groups_up_to_its_cap() -> None:
    run, rows = parts(corridors(Hopeless, 3), filters=[DapoFilter(refill_cap=1.0)]), []
    train(OnlineGRPO(run, config(iterations=1)), log=rows.append)
    assert rows[0]["groups"] == 6


class Fire(Hopeless):
    def step(self, action: Message) -> Observation:
        raise RuntimeError("the room is on fire")

    def fork(self) -> Fire:
        return Fire(self.task_id, self.length)


class CutLonger(CutAll):
    """Cuts the tasks whose names say so."""

    def decide(self, group: GroupProgress) -> GateDecision | None:
        return super().decide(group) if group.task_id.startswith("cut") else None


class Picky(Filter):
    """Drops groups by their names."""

    def drop(self, group: FinishedGroup) -> str | None:
        return "not wanted" if group.task_id.startswith("own") else None


@pytest.mark.parametrize("kinds", ["cut cut cut", "cut even even", "fire even even", "cut fire even"])
def test_groups_that_a_gate_cut_or_a_fault_censored_are_not_replaced(kinds: str) -> None:
    """Selective Rollout trains on what is left."""
    rows: list[dict[str, Any]] = []
    run = parts(named_tasks(kinds), gate=CutLonger(), filters=[DapoFilter(refill_cap=2.0)])
    train(OnlineGRPO(run, config(iterations=2)), log=rows.append)
    dropped = [sum(row["groups_dropped"].values()) for row in rows]  # an even group may succeed as a whole, by chance
    assert all(row["groups"] - 3 <= most for row, most in zip(rows, dropped, strict=True))


def named_tasks(kinds: str) -> list[Corridor]:
    made = {"cut": Even, "even": Even, "own": Even, "fire": Fire, "lost": Hopeless}
    return [made[kind](f"{kind} {number}", 2 + number % 2) for number, kind in enumerate(kinds.split())]


class Noting(FailingEngine):
    """Never fails; remembers the seed of every request, by version of the policy."""

    def __init__(self, engine: HFEngine) -> None:
        super().__init__(engine, rate=0.0, seed=0)
        self.seeds: list[tuple[int, int]] = []

    def submit(self, request: GenerationRequest) -> int:
        self.seeds.append((self.policy_version, request.seed))
        return super().submit(request)


def noting(tasks: Any, **others: Any) -> tuple[Parts, Noting]:
    run = parts(tasks, **others)
    engine = Noting(run.policy.engine)  # type: ignore[arg-type]
    return replace(run, policy=replace(run.policy, engine=engine)), engine


def test_no_two_groups_of_a_run_share_a_draw_also_across_refill_rounds() -> None:
    (run, engine), groups = noting(corridors(Hopeless, 2), filters=[DapoFilter(refill_cap=2.0)]), []
    settings = config(groups=2)
    train(
        OnlineGRPO(run, settings),
        log=lambda row: None,
        keep=lambda iteration, played, credits: groups.append(len(played)),
    )
    assert groups == [6, 6, 6]
    seeds = [seed for _, seed in engine.seeds]
    assert len(seeds) == len(set(seeds))


class LuckyRefills(Corridor):
    """Of a group's rollouts the initial two fail and all later ones succeed."""

    def __init__(self, task_id: str, length: int) -> None:
        super().__init__(task_id, length)
        self.begun, self.number = [], 0

    def step(self, action: Message) -> Observation:
        told = super().step(action)
        return Observation(told.messages, told.done, self.number > 2 if told.done else None)

    def fork(self) -> LuckyRefills:
        self.begun.append(None)
        twin = LuckyRefills(self.task_id, self.length)
        twin.number = len(self.begun)
        return twin


PATH_WEIGHTED = CreditConfig(advantages="rloo", comparison="starts", leaf_weights="path_weighted")


def one_group(*, credit: CreditConfig, **rollouts: Any) -> OnlineConfig:
    """One iteration on one group, under the normaliser that path weights need."""
    loss = LossConfig(normalizer="constant", constant=100.0)
    return config(iterations=1, groups=1, credit=credit, loss=loss, **rollouts)


@pytest.mark.parametrize(
    ("credit", "estimator", "sampled"),
    [(PATH_WEIGHTED, None, 0), (CreditConfig(), None, 2), (PATH_WEIGHTED, CreditRule(), 2)],
    ids=["path weights", "unit weights", "an estimator of one's own"],
)
def test_refills_are_sampled_only_where_the_credit_may_count_them(
    credit: CreditConfig, estimator: CreditRule | None, sampled: int
) -> None:
    """A task of two independent rollouts and two leaves that no branch is made for."""
    run, rows = parts(corridors(count=1), brancher=FixedBrancher(turns=(9,)), estimator=estimator), []
    settings = one_group(initial_rollouts=2, credit=credit)
    train(OnlineGRPO(run, settings), log=rows.append)
    figures = rows[0]["branching"]
    assert (figures["refills"], figures["unfilled_leaves"], figures["leaves"]) == (sampled, 2 - sampled, 2 + sampled)


def test_dapo_keeps_no_group_that_differs_only_in_refills_which_path_weights_do_not_count() -> None:
    """Such a group has no gradient; kept, it takes the place of a refill that has one."""
    run = parts([LuckyRefills("lucky", 2)], brancher=FixedBrancher(turns=(9,)), filters=[DapoFilter()])
    rows: list[dict[str, Any]] = []
    settings = one_group(initial_rollouts=2, max_live_rollouts=1, refills=True, credit=PATH_WEIGHTED)
    before = weights(run)
    train(OnlineGRPO(run, settings), log=rows.append)
    assert rows[0]["groups_mixed"] == 1
    assert rows[0]["trained_groups"] == 0
    assert all(torch.equal(value, before[name]) for name, value in weights(run).items())


def test_dapo_keeps_no_group_in_which_one_start_is_left_to_compare() -> None:
    """Its branches differ, and no start is compared with another."""

    class Coin(Corridor):
        drawn = itertools.count()

        def step(self, action: Message) -> Observation:
            told = super().step(action)
            return Observation(told.messages, told.done, next(Coin.drawn) % 2 == 0 if told.done else None)

        def fork(self) -> Coin:
            twin = Coin(self.task_id, self.length)
            twin.said = list(self.said)
            return twin

    run = parts([Coin("coin", 3)], brancher=FixedBrancher(turns=(2,), branches=4), filters=[DapoFilter()])
    rows: list[dict[str, Any]] = []
    settings = one_group(initial_rollouts=1, credit=PATH_WEIGHTED)
    train(OnlineGRPO(run, settings), log=rows.append)
    assert rows[0]["groups_mixed"] == 1 and rows[0]["branching"]["leaves"] == 4
    assert rows[0]["trained_groups"] == 0 and rows[0]["groups_dropped"] == {"no difference among rewards that count": 1}


def spent(rows: list[dict[str, Any]], what: str) -> float:
    return rows[-1]["spent"][what]


@pytest.mark.parametrize(
    ("settings", "filters", "amplified"),
    [
        ({}, [], True),
        ({}, [DapoFilter()], False),
        ({"loss": LossConfig(normalizer="constant", constant=100.0)}, [], False),
    ],
)
def test_cutting_amplifies_only_where_the_cut_groups_would_have_been_in_the_normaliser(
    settings: dict[str, Any], filters: list[DapoFilter], amplified: bool
) -> None:
    rows: list[dict[str, Any]] = []
    run = parts([Even("short", 1), Even("long", 3), Even("brief", 1)], gate=CutAll(), filters=filters)
    train(OnlineGRPO(run, config(iterations=1, **settings)), log=rows.append)
    assert (rows[0]["groups_cut"], rows[0]["groups_censored"]) == (1, 0)
    assert rows[0]["predicted_amplification"] == (1.5 if amplified else 1.0)


def test_a_resumed_run_knows_the_version_of_its_policy_also_after_iterations_without_an_update(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every=1))
    tasks = [Hopeless("a", 1), *corridors(count=2)]
    settings, filters = config(iterations=4, groups=1), [DapoFilter()]
    calm, engine = noting(tasks, filters=filters)
    rows: list[dict[str, Any]] = []
    train(OnlineGRPO(calm, settings), log=rows.append)
    assert {row["trained_groups"] for row in rows} == {0, 1}
    with pytest.raises(KeyboardInterrupt):
        train(OnlineGRPO(parts(tasks, filters=filters), settings), log=stop_at(3), checkpoints=checkpoints)
    again, resumed = noting(tasks, filters=filters)
    train(OnlineGRPO(again, settings), log=lambda row: None, checkpoints=checkpoints)
    assert resumed.seeds and resumed.seeds == engine.seeds[-len(resumed.seeds) :]
    assert resumed.policy_version == engine.policy_version < 4


def stop_at(step: int) -> Any:
    def log(row: dict[str, Any]) -> None:
        if row["step"] == step:
            raise KeyboardInterrupt

    return log


def check(iteration: int, row: dict[str, Any]) -> Checked:
    return Checked({"checked": iteration}, Cost(turns=1))


def without_timing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_run_that_was_killed_goes_on_to_the_same_weights_and_rows(stop: int, tmp_path: Path) -> None:
    settings = config(iterations=5, check_every=2)
    calm, calm_rows = filtered(), []
    train(OnlineGRPO(calm, settings), log=calm_rows.append, check=check)
    assert [row["checked"] for row in calm_rows if "checked" in row] == [0, 2, 4, 5], "every second, and the last"

    rows: list[dict[str, Any]] = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(every=1))

    def killed(row: dict[str, Any]) -> None:
        if row["step"] == stop + 1:
            raise KeyboardInterrupt
        rows.append(json.loads(json.dumps(row)))

    with pytest.raises(KeyboardInterrupt):
        train(OnlineGRPO(filtered(), settings), log=killed, check=check, checkpoints=checkpoints)
    again = filtered()
    train(OnlineGRPO(again, settings), log=rows.append, check=check, checkpoints=checkpoints)
    assert without_timing(json.loads(json.dumps(rows))) == without_timing(json.loads(json.dumps(calm_rows)))
    assert all(torch.equal(value, weights(calm)[name]) for name, value in weights(again).items())


class CutOdd:
    """Cuts in odd iterations, and in even ones only says that it would have."""

    def decide(self, group: GroupProgress) -> GateDecision | None:
        numbers = {"turn": 1.0}
        cut = group.iteration % 2 == 1 and not all(group.finished)
        return GateDecision(cut=cut, audited=not cut, audit_share=0.5, reason="odd", numbers=numbers, final=True)


def test_a_resumed_run_remembers_all_that_the_run_remembered_which_was_never_killed(tmp_path: Path) -> None:
    """What was spent, skipped, judged and grown: what its next checkpoint holds, but for the clock."""
    settings = config(iterations=4, check_every=1)
    tasks = [Hopeless("lost", 2), *corridors(count=3)]
    held: list[Any] = []
    for name, stops in (("calm", [4]), ("killed", [3, 4])):
        checkpoints = Checkpoints(tmp_path / name, CheckpointConfig(every=1))
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                run = filtered(tasks, gate=CutOdd())
                train(OnlineGRPO(run, settings), log=stop_at(stop), check=check, checkpoints=checkpoints)
        held.append(without_clock(json.loads(json.dumps(checkpoints.held()))["state"]))
    calm, killed = held
    assert killed == calm
    assert calm["step"] == 3 and calm["checks"]["turns"] == 4 and len(calm["audits"]) > 0
    assert calm["account"]["leaves"] > 0


def without_clock(value: Any) -> Any:
    if isinstance(value, list):
        return [without_clock(inner) for inner in value]
    if isinstance(value, dict):
        return {key: without_clock(inner) for key, inner in value.items() if not key.endswith("seconds")}
    return value


class Wordy(Even):
    """Its tasks are long enough to be kept by an engine."""

    def reset(self) -> tuple[Message, ...]:
        return (Message("user", super().reset()[0].content + " again" * 40),)

    def fork(self) -> Wordy:
        twin = Wordy(self.task_id, self.length)
        twin.said = list(self.said)
        return twin


def test_an_iteration_costs_the_same_whatever_a_check_asked_before_it() -> None:
    """A run resumed after a check has an engine that kept nothing: neither may the run that was never killed."""
    found: list[list[Any]] = []
    tasks = [Wordy(f"task {number}", 1) for number in range(3)]
    for asks in (False, True):
        run, rows = parts(tasks), []

        def checker(iteration: int, row: dict[str, Any], run: Parts = run, asks: bool = asks) -> Checked:
            few = {"sampling": Sampling(max_tokens=4), "seed": iteration, "retain": True}
            prompts = [RENDERER.prompt(task.reset(), task.tools) for task in tasks] if asks else []
            run.policy.engine.generate([GenerationRequest(prompt_ids=ids, **few) for ids in prompts])
            return Checked({})

        train(OnlineGRPO(run, config(check_every=1)), log=rows.append, check=checker)
        found.append([row["spent"] for row in rows if row["step"]])
    assert found[0] == found[1] and len(found[0]) == 3


def test_faults_at_random_end_no_run_lose_no_group_and_reach_no_loss(tmp_path: Path, monkeypatch: Any) -> None:
    """Workers killed, hanging and answering garbage, engine calls failing, through ten iterations of training."""
    learned: list[tuple[Any, Any]] = []
    learn = Learner.learn

    def watched(self: Learner, trees: Any, credits: Any) -> Any:
        learned.extend(zip(trees, credits, strict=True))
        return learn(self, trees, credits)

    monkeypatch.setattr(Learner, "learn", watched)
    plan = FaultPlan(seed=4, killed=0.01, hanging=0.005, garbage=0.02, raising=0.02, tally=str(tmp_path))
    tasks = [Faulty(task, plan) for task in corridors(count=4)]
    run = parts(tasks)
    engine = FailingEngine(run.policy.engine, rate=0.1, seed=4)
    rows: list[dict[str, Any]] = []
    rewards: dict[int, Any] = {}
    kept: Counter[int] = Counter()

    def keep(iteration: int, groups: Any, credits: Any) -> None:
        kept[iteration] += len(groups)
        rewards.update({id(group.tree): group.grown for group in groups})

    with ProcessPool(ProcessPoolConfig(workers=2, step_seconds=1.0)) as pool:
        run = Parts(replace(run.policy, engine=engine), tasks, pool=pool)
        train(OnlineGRPO(run, config(iterations=10, groups=4)), log=rows.append, keep=keep)
    assert kept == dict.fromkeys(range(1, 11), 4)
    stops: Counter[str] = sum((Counter(row["stops"]) for row in rows), Counter())
    assert stops.total() == 10 * 4 * 4
    assert stops["environment_error"] and stops["engine_error"] and engine.failed
    assert learned
    for tree, credit in learned:
        scored = rewards[id(tree)].rewards.scored()
        honest = {node.id for leaf in scored for node in tree.path(leaf) if node.sampled and node.token_ids}
        assert set(credit.nodes) == honest, "credit reaches the rollouts that were scored, and only them"
        assert credit.censored == len(tree.leaves()) - len(scored)
    assert sum(credit.censored for _, credit in learned), "some group was learned from although a rollout was lost"


def test_remax_plays_the_first_rollout_of_every_group_greedily_and_reinforce_pp_learns_across_groups() -> None:
    """The greedy rollout has the likeliest tokens: it is the same at every seed; the others are not."""

    def first_rollouts(seed: int) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        rule = CreditConfig(advantages="remax")
        algorithm = OnlineGRPO(parts(corridors(count=2)), config(groups=2, seed=seed, credit=rule))
        for group in sorted(algorithm.sample(1), key=lambda group: group.tree.task_id):
            starts = group.tree.starts()
            assert len(starts) == ROLLOUTS["group_size"]
            found.append(group.tree[starts[0]].token_ids)
            assert group.credit is None or starts[0] not in group.credit.nodes
        return found

    assert first_rollouts(1) == first_rollouts(2)
    rule = CreditConfig(advantages="reinforce_pp")
    algorithm = OnlineGRPO(parts(), config(groups=4, credit=rule))
    groups = algorithm.sample(1)
    scored = [r for group in groups for r in group.grown.rewards.scored().values()]
    mean = sum(scored) / len(scored)
    std = (sum((r - mean) ** 2 for r in scored) / len(scored)) ** 0.5
    for group, credit in zip(groups, algorithm.credit(1, groups), strict=True):
        assert credit is not None
        for leaf, reward in group.grown.rewards.scored().items():
            nodes = [node for node in group.tree.nodes_of(leaf) if node in credit.nodes]
            found = [credit.nodes[node].positive + credit.nodes[node].negative for node in nodes]
            assert found == pytest.approx([(reward - mean) / (std + 1e-6)] * len(nodes))
