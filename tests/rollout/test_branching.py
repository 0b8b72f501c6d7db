"""Trees that fork: what was asked and answered is what lies on their paths, budgets are kept, and nothing is paid
twice."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fault_drill import FaultPlan, Faulty
from fixed_brancher import FixedBrancher
from rollout_view import rollout_of
from token_world import (
    EPISODES,
    LONGEST,
    TASK,
    TURNS,
    VOCABULARY,
    TokenRenderer,
    TokenWorld,
    WatchedEngine,
    chances,
    entropy,
    episode_in,
    over,
)
from turntree.core.cost import NO_COST
from turntree.core.errors import ConfigError
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.protocols import (
    BranchDecision,
    Brancher,
    Environment,
    ForkMoment,
    GateDecision,
    GroupProgress,
    Observation,
)
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.comparisons import across_starts, rloo
from turntree.credit.credit import CreditRule
from turntree.credit.scored import path_weighted
from turntree.decide.branching.published import ArpoBrancher, ReleasedArpoBrancher
from turntree.decide.branching.rules import EntropyBrancher, RandomBrancher, bounded
from turntree.env.tasks import Replayed
from turntree.rollout.groups import GrownGroup
from turntree.rollout.rewards import Episode, RewardSum, WeightedReward
from turntree.rollout.scheduler import Scheduler, SchedulerConfig

BRANCHERS: dict[str, Callable[[], Brancher]] = {
    "entropy": lambda: EntropyBrancher(vocabulary=VOCABULARY, probe_tokens=3, tau=0.5, beta=1.0),
    "entropy, first token": lambda: EntropyBrancher(vocabulary=VOCABULARY, probe_tokens=1, beta=1.0, tau=0.5),
    "random": lambda: RandomBrancher(rate=0.5, probe_tokens=2, branches=3),
    "fixed": lambda: FixedBrancher(turns=(2, 3)),
    "as printed": lambda: ArpoBrancher(vocabulary=VOCABULARY, probe_tokens=3, beta=1.0),
    "as released": lambda: ReleasedArpoBrancher(vocabulary=VOCABULARY),
}


def settings(**others: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"episodes": EPISODES, "group_size": 8, "initial_rollouts": 3, **others})


def play(
    brancher: Brancher, count: int = 12, *, tasks: Sequence[Environment] | None = None, **others: Any
) -> tuple[list[GrownGroup], WatchedEngine, Scheduler]:
    engine = WatchedEngine(latency=lambda request: 1 + request.seed % 5)
    given = {name: others.pop(name, None) for name in ("gate", "rewards")}
    scheduler = Scheduler(engine, TokenRenderer(), settings(**others), brancher=brancher, **given)
    tasks = [TokenWorld(f"task {n}") for n in range(count)] if tasks is None else tasks
    return list(scheduler.run(tasks, seed=1)), engine, scheduler


def turns_spoken(tree: RolloutTree) -> int:
    return sum(node.sampled and node.message is not None for node in tree)


def split_turns(tree: RolloutTree) -> list[int]:
    return [node.id for node in tree if node.sampled and node.message is None]


# what the engine saw


@pytest.mark.parametrize("name", BRANCHERS)
def test_every_path_is_what_the_engine_was_asked_and_answered_and_every_turn_was_asked_once(name: str) -> None:
    groups, engine, _ = play(BRANCHERS[name]())
    asked = Counter(request.prompt_ids for request in engine.requests)
    answers: Counter[tuple[int, ...]] = Counter()
    for group in groups:
        for node in group.tree:
            if node.sampled and node.message is not None:
                before = tuple(token for above in group.tree.path(node.id)[:-1] for token in above.token_ids)
                answers[before[: _asked_at(group.tree, node.id, len(before))]] += 1
    assert answers == asked
    assert len(engine.requests) == sum(turns_spoken(group.tree) for group in groups), "nothing was asked as a probe"
    for group in groups:
        for leaf in group.tree.leaves():
            *episode, nothing = episode_in(rollout_of(group.tree, leaf).token_ids)
            assert nothing == (), "it ends with what the environment answered"
            assert over(tuple(episode)), "whole turns, each once"
            messages = [node.message.content for node in group.tree.path(leaf) if node.sampled and node.message]
            said = [tuple(int(w) for w in text.split()[:-1]) for text in messages]
            assert said == episode, "the action is the whole turn, shared tokens included"


def _asked_at(tree: RolloutTree, node: int, depth: int) -> int:
    """How many tokens the request for the turn that ends in `node` had: those of the shared part too, unless it was
    this very request that sampled them."""
    above = tree[node].parent
    assert above is not None
    shared = tree[above]
    incumbent = tree.children(above)[0] == node
    return depth - len(shared.token_ids) if shared.sampled and incumbent else depth


@pytest.mark.parametrize("name", BRANCHERS)
def test_a_reward_function_sees_the_path_of_its_leaf_and_every_answer_on_it(name: str) -> None:
    seen: list[Episode] = []

    def number(episode: Episode) -> float:
        seen.append(episode)
        return len(seen) - 1

    groups, _, _ = play(BRANCHERS[name](), rewards=RewardSum([WeightedReward("number", 1.0, number)]))
    leaves = [(group.tree, leaf, group.rewards.of(leaf)) for group in groups for leaf in group.tree.leaves()]
    assert len(seen) == len(leaves) > 8 * len(groups) - 1
    for tree, leaf, reward in leaves:
        assert reward is not None
        episode = seen[int(reward)]
        path = tree.path(leaf)
        assert episode.messages == tuple(message for node in path for message in node.messages)
        answers = [node.messages for node in path if node.kind is not NodeKind.COMPLETION]
        assert [observation.messages for observation in episode.observations] == answers
        assert episode.stop is tree.stop_reason(leaf) and episode.task_id == tree.task_id


@pytest.mark.parametrize("name", ["entropy", "random"])
def test_a_branch_is_asked_for_the_rest_of_its_turn_and_for_no_more_tokens_than_the_turn_may_have(name: str) -> None:
    groups, engine, _ = play(BRANCHERS[name]())
    begun = [(len(episode_in(request.prompt_ids)[-1]), request.sampling.max_tokens) for request in engine.requests]
    assert {tokens + most for tokens, most in begun} == {LONGEST + 1}
    shared = 2 if name == "entropy" else 1
    twins = sum(len(group.tree.children(node)) - 1 for group in groups for node in split_turns(group.tree))
    assert Counter(begun)[(shared, LONGEST + 1 - shared)] == twins > 20
    assert {tokens for tokens, _ in begun} == {0, shared}


@pytest.mark.parametrize("name", ["entropy", "random"])
def test_log_probabilities_and_entropies_of_a_split_turn_are_those_of_the_engine(name: str) -> None:
    for group in play(BRANCHERS[name]())[0]:
        for leaf in group.tree.leaves():
            tokens: list[int] = []
            for node in group.tree.path(leaf):
                for k, token in enumerate(node.token_ids):
                    if node.logprobs is not None and node.entropies is not None:
                        episode = episode_in(tokens)
                        assert node.logprobs[k] == pytest.approx(math.log(dict(chances(episode))[token]))
                        assert node.entropies[k] == pytest.approx(entropy(episode))
                    tokens.append(token)


@pytest.mark.parametrize("name", BRANCHERS)
def test_the_environment_of_a_branch_knows_its_own_past_and_no_other(name: str) -> None:
    """`TokenWorld` answers with all that it was told."""
    forks = 0
    for group in play(BRANCHERS[name]())[0]:
        forks += len(group.tree.branch_points())
        for leaf in group.tree.leaves():
            said: list[str] = []
            for node in group.tree.path(leaf):
                if node.sampled and node.message is not None:
                    said.append(node.message.content)
                elif node.kind is NodeKind.OBSERVATION:
                    assert node.message is not None
                    assert node.message.content == " / ".join(said)
    assert forks > 10


# budgets


@pytest.mark.parametrize("name", BRANCHERS)
@pytest.mark.parametrize(("initial", "most"), [(1, None), (3, None), (3, 2), (7, None), (8, None), (2, 0)])
def test_a_group_has_exactly_the_leaves_that_were_wanted(name: str, initial: int, most: int | None) -> None:
    groups, _, _ = play(BRANCHERS[name](), 8, initial_rollouts=initial, max_branched=most)
    most = 8 - initial if most is None else min(most, 8 - initial)
    for group in groups:
        tree = group.tree
        assert len(tree.leaves()) == 8
        forked = 8 - len(tree.starts())
        assert forked <= most
        assert len(tree.refills()) == 8 - initial - forked
        assert len(tree.starts()) == initial + len(tree.refills())


@dataclass
class Asked:
    """Forks as `rule` does; remembers every moment and what was said to it."""

    rule: Brancher
    moments: list[ForkMoment] = field(default_factory=list[ForkMoment])
    decisions: list[BranchDecision | None] = field(default_factory=list["BranchDecision | None"])

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        self.moments.append(moment)
        self.decisions.append(self.rule.decide(moment))
        return self.decisions[-1]

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("name", BRANCHERS)
def test_a_brancher_is_asked_once_about_every_turn_after_a_tool_result_except_those_that_refills_say(name: str) -> None:
    asked = Asked(BRANCHERS[name]())
    groups, _, _ = play(asked)
    assert all(2 <= moment.turn == len(moment.entropies) <= TURNS for moment in asked.moments)
    assert len({(moment.task_id, moment.key, moment.turn) for moment in asked.moments}) == len(asked.moments)
    expected = 0
    for group in groups:
        tree, refills = group.tree, group.tree.refills()
        initial = [
            node
            for node in tree
            if node.sampled and node.message is not None and not refills & {above.id for above in tree.path(node.id)}
        ]
        branches = len(tree.leaves()) - len(tree.starts())  # whose first turns were asked about before
        expected += sum(node.turn > 1 for node in initial) - branches
    assert len(asked.moments) == expected


@pytest.mark.parametrize("name", BRANCHERS)
def test_a_brancher_is_shown_the_entropies_of_the_whole_turns_of_its_rollout(name: str) -> None:
    asked = Asked(BRANCHERS[name]())
    groups, _, _ = play(asked)
    seen: set[tuple[str, tuple[tuple[float, ...], ...]]] = set()
    for group in groups:
        for leaf in group.tree.leaves():
            turns: dict[int, tuple[float, ...]] = {}
            for node in group.tree.path(leaf):
                if node.entropies is not None:
                    turns[node.turn] = (*turns.get(node.turn, ()), *node.entropies)
            whole = tuple(turns.values())
            seen |= {(group.tree.task_id, whole[:turn]) for turn in range(1, len(whole) + 1)}
    assert {(moment.task_id, moment.entropies) for moment in asked.moments} <= seen
    assert any(len(moment.key) > 1 for moment in asked.moments)


def test_a_branch_is_not_asked_to_fork_at_the_turn_that_it_was_made_for() -> None:
    """Also where branches share no token of it: a fixed rule would fork them again until the budget is spent."""
    (group,), _, _ = play(FixedBrancher(turns=(2,)), 1, initial_rollouts=1)
    forks = group.tree.branch_points()
    assert [len(group.tree.children(fork)) for fork in forks] == [2]
    assert len(group.tree.refills()) == 8 - 2


def test_budgets_are_handed_down_evenly() -> None:
    asked = Asked(FixedBrancher(turns=(2, 3)))
    play(asked, 3, group_size=13, initial_rollouts=3)
    first = {(m.task_id, m.key): m.budget for m in asked.moments if m.turn == 2}
    assert [first[("task 0", (sample,))] for sample in range(3)] == [4, 3, 3]
    for moment in asked.moments:
        if moment.turn == 3:
            left = first[(moment.task_id, moment.key[:1])] - 1
            assert moment.budget == left // 2 + (left % 2 if len(moment.key) == 1 else 0)


def test_the_printed_rule_branches_until_the_prompt_has_used_its_budget_whoever_asks() -> None:
    """Z^ counts the branches of the prompt: with tau below every P, each turn that may fork does, until M - N are
    there, and the first rollout to come may take them all. A divided budget gives each of four rollouts one."""
    always = ArpoBrancher(vocabulary=VOCABULARY, probe_tokens=1, tau=-9.0)
    assert always.prompt_wide
    groups, _, _ = play(always, initial_rollouts=4)
    taken = [Counter(_starts_of_branches(group)) for group in groups]
    assert all(counts.total() == 8 - 4 for counts in taken)
    assert max(max(counts.values()) for counts in taken) > 1
    divided = EntropyBrancher(vocabulary=VOCABULARY, probe_tokens=1, tau=-9.0)
    for group in play(divided, initial_rollouts=4)[0]:
        assert max(Counter(_starts_of_branches(group)).values()) == 1


def _starts_of_branches(group: GrownGroup) -> list[int]:
    """For every leaf that is not the first of its start: the start."""
    above = [next(n.id for n in group.tree.path(leaf) if n.id in group.tree.starts()) for leaf in group.tree.leaves()]
    return [start for start in set(above) for _ in range(above.count(start) - 1)]


class Everywhere:
    """Forks more than it may."""

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        return BranchDecision(branches=moment.budget + 2, reason="greed", numbers={})


def test_a_brancher_that_exceeds_its_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"brancher.*a fork into 7 branches where 5 leaves may be added"):
        play(Everywhere(), 1, initial_rollouts=1, max_branched=5)  # type: ignore[arg-type]


class Impossible(Brancher):
    """Shares tokens that were not sampled."""

    def __init__(self, shared: int) -> None:
        self.shared = shared

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        return bounded(moment, 2, "all", {}, shared=self.shared)


@pytest.mark.parametrize(
    ("brancher", "told"),
    [
        (Impossible(shared=1000), "share 1000 of"),
        (Impossible(shared=-1), "share -1 of"),
    ],
)
def test_a_fork_that_cannot_be_made_is_refused_by_the_name_of_the_field(brancher: Impossible, told: str) -> None:
    with pytest.raises(ConfigError, match=f"brancher.*{told}"):
        play(brancher, 1, initial_rollouts=1)


# refills


def test_refills_start_together_after_everybody_has_ended_and_are_marked() -> None:
    groups, _, _ = play(RandomBrancher(rate=0.15, probe_tokens=1), 6)
    for group in groups:
        tree = group.tree
        assert tree.refills() == set(tree.starts()[3:]), "refills come after the initial starts"
        assert all(not tree.branch_points() or above not in tree.refills() for above in tree.branch_points())
    assert sum(len(group.tree.refills()) for group in groups) > 10


def test_a_refill_is_asked_for_only_when_the_last_initial_rollout_is_over() -> None:
    (group,), engine, _ = play(RandomBrancher(rate=0.0, probe_tokens=1), 1)
    starts = [number for number, request in enumerate(engine.requests) if request.prompt_ids == (TASK,)]
    initial = group.tree.starts()[:3]
    turns = sum(
        node.message is not None and node.sampled and any(above.id in initial for above in group.tree.path(node.id))
        for node in group.tree
    )
    assert starts == [0, 1, 2, *range(turns, turns + 5)]


def test_a_refill_is_no_baseline_for_initial_starts() -> None:
    """Whatever a refill earned, the credit of initial starts is the same; with path weights it has none itself."""
    rule = CreditRule(comparison=across_starts, advantages=rloo)
    weighed = dataclasses.replace(rule, leaf_weights=path_weighted)
    changed = 0
    for group in play(RandomBrancher(rate=0.2, probe_tokens=1), 6)[0]:
        tree, refills = group.tree, group.tree.refills()
        richer = {
            leaf: dataclasses.replace(verdict, reward=9.0)
            if refills & {node.id for node in tree.path(leaf)}
            else verdict
            for leaf, verdict in group.rewards.verdicts.items()
        }
        assert weighed(tree, group.rewards) == weighed(tree, Rewards(richer))
        before, after = rule(tree, group.rewards).nodes, rule(tree, Rewards(richer)).nodes
        for node, credit in before.items():
            below_refill = bool(refills & {above.id for above in tree.path(node)})
            assert below_refill or credit == after[node]
            changed += below_refill and credit != after[node]
    assert changed


Labelled = Counter[tuple[Any, ...]]


def labelled(tree: RolloutTree, rewards: Rewards, rule: CreditRule) -> Labelled:
    """The credit of every node that has any, by the tokens on the way to it."""
    return Counter(
        (tuple(above.token_ids for above in tree.path(node)), *dataclasses.astuple(credit))
        for node, credit in rule(tree, rewards).nodes.items()
    )


@pytest.mark.parametrize("name", ["random", "fixed", "entropy"])
def test_leaving_refills_out_changes_no_credit_under_path_weights_and_counts_what_was_not_sampled(name: str) -> None:
    rule = CreditRule(comparison=across_starts, advantages=rloo, leaf_weights=path_weighted)
    filled, asked, _ = play(BRANCHERS[name](), max_branched=2)
    without, asked_less, _ = play(BRANCHERS[name](), max_branched=2, refills=False)
    left_out = 0
    for full, less in zip(filled, without, strict=True):
        assert not less.tree.refills()
        assert less.unfilled == len(full.tree.refills())
        assert labelled(less.tree, less.rewards, rule) == labelled(full.tree, full.rewards, rule)
        left_out += less.unfilled
    assert left_out > 0
    assert len(asked_less.requests) < len(asked.requests)


@pytest.mark.parametrize("name", BRANCHERS)
def test_forks_under_way_say_why(name: str) -> None:
    for group in play(BRANCHERS[name]())[0]:
        tree = group.tree
        told = {d.node: d for d in tree.decisions if d.actor == "brancher" and d.action == "fork"}
        assert set(told) == set(tree.branch_points())
        for node, decision in told.items():
            assert decision.numbers["branches"] == len(tree.children(node))
            assert decision.numbers["shared"] == (len(tree[node].token_ids) if tree[node].sampled else 0)


def test_a_fork_replays_nothing_where_an_environment_has_copies() -> None:
    for group in play(BRANCHERS["entropy"](), 10)[0]:
        assert group.tree.cost.tool_calls == turns_spoken(group.tree)


# with gates and faults


class CutLate:
    """Cuts every group that somebody plays on after turn 2."""

    def decide(self, group: GroupProgress) -> GateDecision | None:
        if max(map(len, group.actions)) < 2 or all(group.finished):
            return None
        return GateDecision(cut=True, reason="enough", numbers={}, final=True)


@pytest.mark.parametrize("name", [name for name in BRANCHERS if name != "as printed"])  # first come, first served
def test_a_cut_tree_is_the_same_however_far_its_branches_had_come(name: str) -> None:
    def trees(live: int) -> list[dict[str, Any]]:
        groups, _, _ = play(BRANCHERS[name](), 12, gate=CutLate(), max_live_rollouts=live)
        assert any(group.cut for group in groups)
        values = [group.tree.to_json() for group in groups]
        for value in values:
            for node in value["nodes"]:
                node.pop("cost", None)
                node.pop("timing", None)
        return values

    assert trees(1) == trees(3) == trees(40)


def test_what_the_branches_of_a_cut_group_cost_is_in_its_tree() -> None:
    groups, engine, _ = play(FixedBrancher(turns=(2,)), 12, gate=CutLate(), max_live_rollouts=5)
    spent = sum((group.tree.cost for group in groups), NO_COST)
    assert dataclasses.replace(spent, tool_calls=0, environment_seconds=0.0) == engine.charged
    cut = [group for group in groups if group.cut]
    assert cut
    for group in cut:
        branches = [n for fork in group.tree.branch_points() for n in group.tree.children(fork)[1:]]
        assert {group.tree.stop_reason(node) for node in branches} <= {StopReason.GATED}
        assert all(verdict.reward is None for verdict in group.rewards.verdicts.values())


def test_faults_are_retried_in_branches_too_and_change_no_tree(tmp_path: Any) -> None:
    plan = FaultPlan(seed=3, raising=0.1, tally=str(tmp_path))
    calm, _, _ = play(BRANCHERS["entropy"](), 6)
    tasks: list[Environment] = [Faulty(TokenWorld(f"task {n}"), plan) for n in range(6)]
    drilled, _, _ = play(BRANCHERS["entropy"](), tasks=tasks, max_retries=20)
    assert sum(decision.action == "retry" for group in drilled for decision in group.tree.decisions) > 5
    for here, there in zip(drilled, calm, strict=True):
        assert [(n.parent, n.token_ids) for n in here.tree] == [(n.parent, n.token_ids) for n in there.tree]
        assert here.rewards == there.rewards


def test_a_branch_that_fails_for_good_is_censored_and_its_siblings_are_not() -> None:
    first = {request.seed for request in play(RandomBrancher(rate=0.0, probe_tokens=1), 1, group_size=3)[1].requests}
    engine = WatchedEngine(fault=lambda request: None if request.seed in first else "out of memory")
    scheduler = Scheduler(
        engine,
        TokenRenderer(),
        settings(group_size=6, max_retries=0),
        brancher=FixedBrancher(turns=(2,)),
    )
    (group,) = scheduler.run([TokenWorld("task 0")], seed=1)
    tree = group.tree
    for fork in tree.branch_points():
        incumbent, branch = tree.children(fork)
        assert tree.stop_reason(branch) is StopReason.ENGINE_ERROR
        assert tree[branch].token_ids == ()
        assert group.rewards.verdicts[branch] == Verdict(None, "out of memory")
        assert all(group.rewards.of(leaf) is not None for leaf in tree.leaves() if _above(tree, incumbent, leaf))
    assert len(tree.branch_points()) == 3
    assert len(tree.leaves()) == 6


class Stamped(TokenWorld):
    """Stamps each answer with a number of its own, so that no replay is answered as the episode was."""

    stamps = itertools.count()

    def step(self, action: Message) -> Observation:
        told = super().step(action)
        return dataclasses.replace(told, metrics={"stamp": float(next(self.stamps))})


def test_a_fork_that_a_replay_refuses_censors_its_branch_and_nothing_else() -> None:
    """`Replayed` refuses it at once: this must not end the run."""
    (group,), _, _ = play(FixedBrancher(turns=(2, 3)), tasks=[Replayed(Stamped("task 0"))], max_retries=0)
    verdicts = group.rewards.verdicts
    refused = {leaf for leaf in verdicts if group.tree.stop_reason(leaf) is StopReason.ENVIRONMENT_ERROR}
    assert refused and len(refused) < len(verdicts)
    assert all(re.fullmatch("a replay was answered differently at turn [12]", verdicts[x].reason) for x in refused)
    assert {leaf for leaf, verdict in verdicts.items() if verdict.reward is None} == refused


def _above(tree: RolloutTree, node: int, leaf: int) -> bool:
    return any(above.id == node for above in tree.path(leaf))
