"""The scheduler, case by case: what a cut saves, what a straggler costs, what a fault leaves behind."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fault_drill import Corridor, FaultPlan, Faulty
from fixed_brancher import FixedBrancher
from rollout_view import rollout_of
from scripted_engine import ScriptedEngine
from tiny_models import tiny_tokenizer
from turntree.core import seeds
from turntree.core.completion import Finished, GenerationRequest, Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError, TurntreeError
from turntree.core.messages import Message
from turntree.core.protocols import GateDecision, GroupProgress, Observation
from turntree.core.tree import NodeKind, RolloutTree
from turntree.decide.gates.audited import RandomGate
from turntree.env.local import LocalPool
from turntree.env.pool import Answer, Session
from turntree.render.template import ChatRenderer
from turntree.rollout.groups import GrownGroup
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import Setting, grow
from turntree.rollout.rewards import RewardSum, build_rewards
from turntree.rollout.scheduler import Scheduler, SchedulerConfig

TOKENIZER = tiny_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
EPISODES = EpisodeConfig(max_turns=4, sampling=Sampling(max_tokens=16))
WORDS = [RENDERER.completion(Message("assistant", word)) for word in ("left", "right", "on")]


class StepByStep(ScriptedEngine):
    """Counts its steps, and never hurries on to the next answer."""

    steps = 0

    def poll(self, timeout: float | None = None) -> list[Finished]:
        self.steps += self.in_flight > 0
        return super().poll(0)


def engine(latency: Callable[[GenerationRequest], int] = lambda request: 1, **options: Any) -> StepByStep:
    return StepByStep(
        lambda prompt, seed: WORDS[seed % 3],
        RENDERER.stop_ids,
        vocab_size=len(TOKENIZER),
        latency=latency,
        **options,
    )


def config(**settings: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"episodes": EPISODES, "group_size": 2, **settings})


def corridors(*lengths: int) -> list[Corridor]:
    return [Corridor(f"task {number}", length) for number, length in enumerate(lengths)]


def only(groups: list[GrownGroup]) -> GrownGroup:
    (group,) = groups
    return group


def endings(group: GrownGroup) -> list[tuple[str, float | None, str]]:
    """(stop, reward, why) of every leaf."""
    return [
        (str(group.tree.stop_reason(leaf)), group.rewards.of(leaf), group.rewards.verdicts[leaf].reason)
        for leaf in group.tree.leaves()
    ]


def turns_asked(request: GenerationRequest) -> int:
    """How many turns the conversation in the prompt has had."""
    return sum(token in RENDERER.stop_ids for token in request.prompt_ids) // 2


def played_alone(task: Corridor, sample: int, seed: int) -> tuple[tuple[int, ...], str, float]:
    """An episode in its plainest form: one request, one answer, one step after the other. The tokens, how it ended, and
    its reward."""
    sampling, messages = EPISODES.sampling, [*task.reset()]
    tokens = RENDERER.prompt(messages)
    for turn in range(EPISODES.max_turns):
        key = seeds.of_turn(seed, task.task_id, (sample,), turn)
        (said,) = engine().generate([GenerationRequest(prompt_ids=tokens, sampling=sampling, seed=key)])
        messages.append(RENDERER.parse(said.token_ids))
        answer = task.step(messages[-1])
        tokens += said.token_ids + RENDERER.extend(messages, answer.messages, stopped=said.finish == "stop")
        messages += answer.messages
        if answer.done:
            return tokens, "completed", float(answer.success or False)
    return tokens, "max_turns", 0.0


def test_a_rollout_is_what_it_would_be_alone() -> None:
    tasks = corridors(1, 2, 3, 9)
    latency: Callable[[GenerationRequest], int] = lambda request: 1 + request.seed % 5  # noqa: E731
    scheduler = Scheduler(engine(latency), RENDERER, config(group_size=3, max_live_rollouts=4))
    groups = [(group.tree, group.rewards) for group in scheduler.run(tasks, seed=5)]
    for found in (groups, grow(tasks, engine(), RENDERER, EPISODES, group_size=3, seed=5)):
        for task, (tree, rewards) in zip(tasks, found, strict=True):
            leaves = tree.leaves()
            rollouts = [(rollout_of(tree, leaf).token_ids, tree.stop_reason(leaf), rewards.of(leaf)) for leaf in leaves]
            assert sorted(rollouts) == sorted(played_alone(task, sample, 5) for sample in range(3))


def test_what_is_played_at_once_is_the_same_and_is_judged_together() -> None:
    """`grow` has no places to wait for and asks the reward functions once, which may ask a server."""
    tasks, asked = corridors(1, 2, 3), []

    class Counting(RewardSum):
        def judge_all(self, episodes: Any, verdicts: Any) -> Any:
            asked.append(len(episodes))
            return super().judge_all(episodes, verdicts)

    functions = Counting(build_rewards([Part("success")]).functions)
    told: list[int] = []
    setting = Setting(functions=functions, finished=told.append)
    found = grow(tasks, engine(), RENDERER, EPISODES, group_size=3, seed=5, setting=setting)
    scheduler = Scheduler(engine(), RENDERER, config(group_size=3), rewards=build_rewards([Part("success")]))
    groups = list(scheduler.run(tasks, seed=5))
    assert [plain(tree) for tree, _ in found] == [plain(group.tree) for group in groups]
    assert [rewards for _, rewards in found] == [group.rewards for group in groups]
    assert asked == [9] and told == [3, 3, 3]


def plain(tree: RolloutTree) -> dict[str, Any]:
    value = tree.to_json()
    for node in value["nodes"]:
        node.pop("cost", None)
        node.pop("timing", None)
    return value


def said(tree: RolloutTree) -> list[list[tuple[int, ...]]]:
    return [[node.token_ids for node in tree.path(leaf)] for leaf in tree.leaves()]


class Late(LocalPool):
    """Answers that arrive when they like: earlier or later than others, by a draw of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__(8)
        self._draws = random.Random(seed)

    def _called(self, session: Session, action: Message | None) -> Answer:
        time.sleep(self._draws.choice((0.0, 0.001, 0.004)))
        return super()._called(session, action)


class Batches(StepByStep):
    """Keeps which requests shared each of its steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.batches: list[tuple[int, ...]] = []
        self._seeds: dict[int, int] = {}

    def submit(self, request: GenerationRequest) -> int:
        ticket = super().submit(request)
        self._seeds[ticket] = request.seed
        return ticket

    def poll(self, timeout: float | None = None) -> list[Finished]:
        self.batches.append(tuple(self._seeds.values()))
        found = super().poll(timeout)
        for finished in found:
            del self._seeds[finished.ticket]
        return found


@pytest.mark.parametrize("places", [5, 16, 72])
def test_which_requests_share_a_batch_does_not_depend_on_when_the_environments_answer(places: int) -> None:
    def batches(seed: int) -> list[tuple[int, ...]]:
        watched = Batches(
            lambda prompt, seed: WORDS[seed % 3],
            RENDERER.stop_ids,
            vocab_size=len(TOKENIZER),
            latency=lambda request: 1 + request.seed % 5,
        )
        with Late(seed) as pool:
            settings = config(group_size=3, max_live_rollouts=places)
            scheduler = Scheduler(watched, RENDERER, settings, pool=pool)
            assert len(list(scheduler.run(corridors(2, 4, 9, 3), seed=5))) == 4
        return watched.batches

    first = batches(0)
    assert max(map(len, first)) > 1 and all(batches(seed) == first for seed in (1, 2, 3))


@pytest.mark.parametrize(("places", "works_on"), [(16, True), (24, True), (7, False)])
def test_the_engine_works_on_while_a_tool_is_slow_for_as_many_generations_as_may_overlap(
    places: int, works_on: bool
) -> None:
    meanwhile: list[int] = []

    class Watched(StepByStep):
        def poll(self, timeout: float | None = None) -> list[Finished]:
            meanwhile.append(pool.in_flight)
            return super().poll(timeout)

    class Slow(LocalPool):
        def _called(self, session: Session, action: Message | None) -> Answer:
            time.sleep(0.02)
            return super()._called(session, action)

    watched = Watched(
        lambda prompt, seed: WORDS[seed % 3],
        RENDERER.stop_ids,
        vocab_size=len(TOKENIZER),
        latency=lambda request: 1 + request.seed % 5,
    )
    with Slow(16) as pool:
        settings = config(group_size=8, max_live_rollouts=places)
        list(Scheduler(watched, RENDERER, settings, pool=pool).run(corridors(3, 4), seed=5))
    assert any(meanwhile) == works_on


def test_a_task_that_comes_again_draws_anew_and_so_does_the_next_iteration() -> None:
    task = Corridor("again", 4)
    scheduler = Scheduler(engine(), RENDERER, config(group_size=6))

    def said(iteration: int) -> list[tuple[str, ...]]:
        groups = scheduler.run([task, task], seed=0, iteration=iteration)
        return [tuple(node.message.content for node in group.tree if node.sampled and node.message) for group in groups]

    assert len({*said(0), *said(1)}) == 4
    assert said(1) == said(1)


class Losing(StepByStep):
    """Forgets what it was asked."""

    def poll(self, timeout: float | None = None) -> list[Finished]:
        super().poll(timeout)
        return []


class Misnumbering(StepByStep):
    def poll(self, timeout: float | None = None) -> list[Finished]:
        return [replace(finished, ticket=finished.ticket + 100) for finished in super().poll(timeout)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Losing, "the engine lost 2 requests"),
        (Misnumbering, r"the engine returned ticket 10\d, which nobody waits for"),
    ],
)
def test_an_engine_that_breaks_the_law_of_tickets_ends_the_run_and_says_which(
    kind: type[StepByStep], said: str
) -> None:
    broken = kind(lambda prompt, seed: WORDS[0], RENDERER.stop_ids, vocab_size=len(TOKENIZER))
    with pytest.raises(TurntreeError, match=said):
        next(Scheduler(broken, RENDERER, config()).run(corridors(1), seed=0))


def test_an_engine_that_serves_others_is_refused() -> None:
    busy = engine()
    busy.submit(GenerationRequest(prompt_ids=WORDS[0], sampling=Sampling(max_tokens=16), seed=0))
    with pytest.raises(ValueError, match="requests in flight that are not this run's"):
        next(Scheduler(busy, RENDERER, config()).run(corridors(1), seed=0))


@pytest.mark.parametrize("wrong", [{"group_size": 0}, {"max_live_rollouts": 0}])
def test_a_configuration_that_cannot_work_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**wrong)
    assert refused.value.field == next(iter(wrong))


def test_a_completion_that_was_cut_short_is_closed_by_what_follows_it() -> None:
    short = EpisodeConfig(max_turns=4, sampling=Sampling(max_tokens=2), cut_turns="judge")
    words = ScriptedEngine(
        lambda prompt, seed: (WORDS[0][0], WORDS[1][0]) if seed % 2 else (WORDS[0][0], WORDS[0][-1]),
        RENDERER.stop_ids,
        vocab_size=len(TOKENIZER),
    )
    group = only(list(Scheduler(words, RENDERER, config(episodes=short)).run(corridors(4), seed=0)))
    ends = {
        (node.token_ids[-1] in RENDERER.stop_ids, group.tree[child].token_ids[0] in RENDERER.stop_ids)
        for node in group.tree
        if node.sampled
        for child in group.tree.children(node.id)
    }
    assert ends == {(True, False), (False, True)}


# gates


class CutAt:
    """Cuts at a turn; remembers what it was shown."""

    def __init__(self, turn: int, *, audited: bool = False) -> None:
        self.turn, self.audited, self.shown = turn, audited, []

    def decide(self, group: GroupProgress) -> GateDecision | None:
        self.shown.append(group)
        if max(map(len, group.actions)) < self.turn:
            return None
        numbers = {"rollouts": float(len(group.actions))}
        return GateDecision(cut=not self.audited, reason="enough", numbers=numbers, final=True, audited=self.audited)


def test_a_cut_cancels_what_is_in_flight_and_the_next_task_takes_its_places() -> None:
    def latency(request: GenerationRequest) -> int:
        """One rollout of each group is at its second turn for ages; the other takes its time over the first."""
        first = turns_asked(request) == 0
        return 1000 if not first else 1 + 4 * (request.seed % 2)

    slow = engine(latency)
    gate = CutAt(1)
    scheduler = Scheduler(slow, RENDERER, config(max_live_rollouts=2), gate=gate)
    groups = list(scheduler.run(corridors(4, 4, 4, 4, 4), seed=0))
    assert [group.cut for group in groups] == [1] * 5
    assert slow.steps <= 5 * 5, "a place is free in the step of the cut, and no second turn was waited for"
    assert slow.in_flight == 0


def test_a_cut_group_holds_the_turns_that_were_judged_and_pays_for_those_that_ran_ahead() -> None:
    run = Scheduler(engine(one_slow_start), RENDERER, config(), gate=CutAt(1))
    group = only(list(run.run(corridors(4), seed=seed_of_one_slow_start())))
    assert group.cut == 1
    assert [node.turn for node in group.tree if node.sampled] == [1, 1]
    assert endings(group) == [("gated", None, "the group was cut at turn 1")] * 2
    last = [group.tree[leaf] for leaf in group.tree.leaves()]
    assert [(node.kind, node.token_ids) for node in last] == [(NodeKind.OBSERVATION, ())] * 2
    ahead = max(last, key=lambda node: node.cost.turns).cost
    assert (ahead.turns, ahead.tool_calls) == (3, 3), "the fast one had finished all four turns"
    assert group.tree.cost.turns == 5
    (decision,) = group.tree.decisions
    assert (decision.actor, decision.action, decision.reason) == ("gate", "cut", "enough")
    assert decision.numbers == {"turn": 1.0, "rollouts": 2.0}


def first_seeds(seed: int) -> list[int]:
    """The seeds of the first turns of a group of two, as an engine sees them."""
    seen: list[int] = []

    def note(request: GenerationRequest) -> int:
        seen.append(request.seed)
        return 1

    list(Scheduler(engine(note), RENDERER, config()).run(corridors(1), seed=seed))
    return seen


def one_slow_start(request: GenerationRequest) -> int:
    return 9 if turns_asked(request) == 0 and request.seed % 2 else 1


def seed_of_one_slow_start() -> int:
    return next(seed for seed in range(99) if {first % 2 for first in first_seeds(seed)} == {0, 1})


def test_a_generation_that_a_cut_cancels_is_charged_to_its_rollout() -> None:
    def latency(request: GenerationRequest) -> int:
        return one_slow_start(request) if turns_asked(request) == 0 else 20

    slow = engine(latency)
    run = Scheduler(slow, RENDERER, config(), gate=CutAt(1)).run(corridors(4), seed=seed_of_one_slow_start())
    group = only(list(run))
    cancelled = max((group.tree[leaf].cost for leaf in group.tree.leaves()), key=lambda cost: cost.turns)
    assert cancelled.turns == 1
    assert cancelled.tool_calls == 0
    assert cancelled.decoded_tokens in range(1, len(WORDS[0]))
    assert cancelled.prefilled_tokens + cancelled.reused_tokens > len(group.tree[0].token_ids)


def test_a_fault_after_the_turn_of_the_cut_is_cut_like_all_that_came_after_it() -> None:
    def fault(request: GenerationRequest) -> str | None:
        return "out of memory" if turns_asked(request) else None

    broken = engine(one_slow_start, fault=fault)
    run = Scheduler(broken, RENDERER, config(max_retries=0), gate=CutAt(1)).run(
        corridors(4), seed=seed_of_one_slow_start()
    )
    assert endings(only(list(run))) == [("gated", None, "the group was cut at turn 1")] * 2


def test_a_rollout_that_had_ended_keeps_its_ending_and_loses_its_reward() -> None:
    class OneStops(Corridor):
        """Over at once for those who say "left"."""

        def step(self, action: Message) -> Observation:
            observation = super().step(action)
            done = observation.done or action.content == "left"
            return Observation(observation.messages, done, True if done else None)

        def fork(self) -> OneStops:
            return OneStops(self.task_id, self.length)

    groups = Scheduler(engine(), RENDERER, config(group_size=8), gate=CutAt(2)).run([OneStops("t", 9)], seed=0)
    stops = {(stop, reward) for stop, reward, _ in endings(only(list(groups)))}
    assert stops == {("completed", None), ("gated", None)}


def test_a_group_that_has_ended_is_not_cut_whatever_the_gate_says() -> None:
    group = only(list(Scheduler(engine(), RENDERER, config(), gate=CutAt(3)).run(corridors(3), seed=0)))
    (decision,) = group.tree.decisions
    assert (decision.action, decision.reason) == ("continue", "enough (not cut: the group had ended)")
    assert (group.cut, {stop for stop, _, _ in endings(group)}) == (None, {"completed"})


def test_a_gate_sees_every_turn_of_its_group_as_it_was_then() -> None:
    gate = CutAt(99)
    latency: Callable[[GenerationRequest], int] = lambda request: 1 + request.seed % 7  # noqa: E731
    list(Scheduler(engine(latency), RENDERER, config(group_size=3), gate=gate).run(corridors(3), seed=0))
    assert [{len(actions) for actions in group.actions} for group in gate.shown] == [{1}, {2}, {3}]
    assert [set(group.finished) for group in gate.shown] == [{False}, {False}, {True}]
    assert all(group.max_turns == 4 for group in gate.shown)
    last = gate.shown[-1]
    for actions, observations in zip(last.actions, last.observations, strict=True):
        assert observations == ("walk 3", actions[0], " ".join(actions[:2])), "what ended them led to no action"


def test_a_random_gate_draws_anew_for_every_group_of_a_task_also_in_a_later_run_of_the_iteration() -> None:
    scheduler = Scheduler(engine(), RENDERER, config(), gate=RandomGate(turn=1, rate=0.5))
    tasks, begun = [Corridor("again", 4)] * 8, Counter[str]()
    cuts = [[group.cut for group in scheduler.run(tasks, seed=0, iteration=3, begun=begun)] for _ in range(2)]
    assert {*cuts[0]} == {*cuts[1]} == {None, 1}
    assert cuts[0] != cuts[1]


def test_an_audited_group_runs_on_and_says_so() -> None:
    group = only(list(Scheduler(engine(), RENDERER, config(), gate=CutAt(1, audited=True)).run(corridors(3), seed=0)))
    assert group.cut is None
    assert group.decision is not None
    assert group.decision.audited
    assert {stop for stop, _, _ in endings(group)} == {"completed"}
    assert [(decision.action, decision.node) for decision in group.tree.decisions] == [("audit", 0)]


# stragglers


class Silent(StepByStep):
    """Never answers the requests that `ignores` picks."""

    def __init__(self, ignores: Callable[[GenerationRequest], bool]) -> None:
        super().__init__(
            lambda prompt, seed: WORDS[seed % 3],
            RENDERER.stop_ids,
            vocab_size=len(TOKENIZER),
            latency=lambda request: 10**9 if ignores(request) else 1,
        )


def ticking() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is read."""
    return itertools.count(0.0, 1.0).__next__


def test_a_straggler_is_cancelled_by_name_and_its_place_goes_to_the_next() -> None:
    (lost, *_) = first_seeds(3)
    silent = Silent(lambda request: request.seed == lost)
    limits = config(max_live_rollouts=2, rollout_seconds=200.0)
    scheduler = Scheduler(silent, RENDERER, limits, clock=ticking())
    groups = list(scheduler.run(corridors(2, 2, 2, 2), seed=3))
    assert ("cancelled", None, "the rollout took longer than 200 seconds") in endings(groups[0])
    assert {stop for group in groups for stop, _, _ in endings(group)} == {"completed", "cancelled"}
    (decision,) = groups[0].tree.decisions
    assert (decision.actor, decision.action, decision.numbers) == ("scheduler", "cancel", {"limit_seconds": 200.0})
    assert silent.in_flight == 0


def test_a_group_that_takes_too_long_ends_with_all_its_rollouts_even_those_not_begun() -> None:
    scheduler = Scheduler(
        Silent(lambda request: True),
        RENDERER,
        config(group_size=3, max_live_rollouts=2, group_seconds=50.0),
        clock=ticking(),
    )
    groups = list(scheduler.run(corridors(2, 2), seed=0))
    assert [endings(group) for group in groups] == [
        [("cancelled", None, "the group took longer than 50 seconds")] * 3
    ] * 2


def test_a_group_that_expires_while_it_is_refilled_starts_nothing_more() -> None:
    """One place: the second refill waits for the first, which never answers."""
    asked = itertools.count()
    scheduler = Scheduler(
        Silent(lambda request: next(asked) >= 2),
        RENDERER,
        config(group_size=4, initial_rollouts=2, max_live_rollouts=1, group_seconds=200.0),
        clock=ticking(),
        brancher=FixedBrancher(turns=(9,)),
    )
    group = only(list(scheduler.run(corridors(1), seed=0)))
    assert [stop for stop, _, _ in endings(group)] == ["completed", "completed", "cancelled", "cancelled"]
    assert next(asked) == 3, "the second refill was never asked for"


def test_the_leaves_that_an_expired_group_never_got_are_counted_as_left_out() -> None:
    scheduler = Scheduler(
        Silent(lambda request: True),
        RENDERER,
        config(group_size=4, initial_rollouts=2, group_seconds=50.0),
        clock=ticking(),
        brancher=FixedBrancher(turns=(9,)),
    )
    group = only(list(scheduler.run(corridors(1), seed=0)))
    assert (len(group.tree.ends()), group.unfilled) == (2, 2)


class Patient(StepByStep):
    """Never answers, waits for as long as it is told to, and moves the clock by that."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, seed: WORDS[0], RENDERER.stop_ids, vocab_size=len(TOKENIZER))
        self.now, self.waited = 0.0, list[float]()

    def poll(self, timeout: float | None = None) -> list[Finished]:
        assert timeout is not None and timeout > 0, "it would wait for nothing"
        self.waited.append(timeout)
        self.now += timeout
        return []


def test_a_wait_ends_when_the_oldest_rollout_or_the_oldest_group_has_used_up_its_time() -> None:
    """Two places, groups A and B of three: A3 and B1 start at 50 in place of A1 and A2, A is over at 70, which lets B2
    start, B1 at 100, and the rest with B at 120."""
    silent = Patient()
    limits = config(group_size=3, max_live_rollouts=2, rollout_seconds=50.0, group_seconds=70.0)
    groups = list(Scheduler(silent, RENDERER, limits, clock=lambda: silent.now).run(corridors(2, 2), seed=0))
    assert silent.waited == [50.0, 20.0, 30.0, 20.0]
    assert [[why.split()[1] for _, _, why in endings(group)] for group in groups] == [
        ["rollout", "rollout", "group"],
        ["rollout", "group", "group"],
    ]


# faults


def test_an_engine_fault_is_tried_again_with_the_same_draws() -> None:
    failed: set[int] = set()

    def once(request: GenerationRequest) -> str | None:
        if request.seed in failed:
            return None
        failed.add(request.seed)
        return "out of memory"

    patient = config(max_retries=2)
    group = only(list(Scheduler(engine(fault=once), RENDERER, patient).run(corridors(2), seed=0)))
    calm = only(list(Scheduler(engine(), RENDERER, patient).run(corridors(2), seed=0)))
    assert [node.token_ids for node in group.tree] == [node.token_ids for node in calm.tree]
    assert [(d.action, d.reason, d.numbers) for d in group.tree.decisions] == [
        ("retry", "out of memory", {"failures": number, "turn": number}) for number in (1, 1, 2, 2)
    ]


def test_a_rollout_that_has_used_up_its_retries_is_censored_by_the_name_of_the_fault() -> None:
    hopeless = Scheduler(engine(fault=lambda request: "out of memory"), RENDERER, config(max_retries=1))
    group = only(list(hopeless.run(corridors(2), seed=0)))
    assert endings(group) == [("engine_error", None, "out of memory")] * 2
    broken = Faulty(Corridor("t", 2), FaultPlan(seed=0, raising=1.0))
    group = only(list(Scheduler(engine(), RENDERER, config(max_retries=1)).run([broken], seed=0)))
    assert endings(group) == [("environment_error", None, "RuntimeError: the simulator crashed")] * 2


class Unstable(Corridor):
    """Loses its connection at the third and at the seventh call of all its copies."""

    calls = 0

    def step(self, action: Message) -> Observation:
        Unstable.calls += 1
        if Unstable.calls in (3, 7):
            raise ConnectionError("lost")
        return super().step(action)

    def fork(self) -> Unstable:
        return Unstable(self.task_id, self.length)


def test_an_environment_fault_replays_the_episode_and_counts_every_call() -> None:
    Unstable.calls = 0
    scheduler = Scheduler(engine(), RENDERER, config(group_size=1, max_retries=9))
    group = only(list(scheduler.run([Unstable("t", 4)], seed=0)))
    assert {stop for stop, _, _ in endings(group)} == {"completed"}
    said = [node.message.content for node in group.tree if node.sampled and node.message]
    told = [node.message.content for node in group.tree if node.kind is NodeKind.OBSERVATION and node.message]
    assert told == [" ".join(said[: turn + 1]) for turn in range(4)]
    assert [decision.action for decision in group.tree.decisions] == ["retry"] * 2
    assert group.tree.cost.tool_calls == Unstable.calls == 2 + (1 + 3) + (1 + 4)


class Whimsical(Corridor):
    """Tells every rollout another task."""

    told = 0

    def reset(self) -> tuple[Message, ...]:
        Whimsical.told += 1
        return (Message("user", f"task number {Whimsical.told}"),)

    def fork(self) -> Whimsical:
        return Whimsical(self.task_id, self.length)


def test_rollouts_that_are_told_another_task_are_no_group() -> None:
    group = only(list(Scheduler(engine(), RENDERER, config(group_size=3)).run([Whimsical("t", 2)], seed=0)))
    assert sorted(stop for stop, _, _ in endings(group)) == ["completed", "environment_error", "environment_error"]


def test_a_task_that_leaves_no_room_is_one_leaf_without_a_reward() -> None:
    short = config(episodes=EpisodeConfig(max_context=20, sampling=Sampling(max_tokens=16)))
    group = only(list(Scheduler(engine(), RENDERER, short).run(corridors(2), seed=0)))
    assert endings(group) == [("no_room", None, "the task alone leaves no room in 20 tokens of context")]


def test_no_gate_is_asked_about_a_group_that_ends_before_its_first_turn() -> None:
    """For want of room, also where other rollouts of it have failed by then: there is nothing to stop."""

    class Counting(CutAt):
        asked = 0

        def decide(self, group: GroupProgress) -> GateDecision | None:
            self.asked += 1
            return super().decide(group)

    gate = Counting(0)
    short = config(
        episodes=EpisodeConfig(max_context=20, sampling=Sampling(max_tokens=16)), group_size=4, max_retries=0
    )
    tasks = [Faulty(task, FaultPlan(seed=1, raising=0.5)) for task in corridors(*[2] * 12)]
    groups = list(Scheduler(engine(), RENDERER, short, gate=gate).run([*tasks, *corridors(2)], seed=0))
    assert {stop for group in groups for stop, _, _ in endings(group)} == {"no_room", "environment_error"}
    assert gate.asked == 0
    assert all(group.cut is None and not group.tree.decisions for group in groups)


def test_the_time_of_a_run_is_accounted_for() -> None:
    scheduler = Scheduler(engine(), RENDERER, config(max_live_rollouts=4), gate=CutAt(99), clock=ticking())
    list(scheduler.run(corridors(3, 3, 3), seed=0))
    usage = scheduler.usage
    assert usage.request_seconds > 0
    assert 0 < usage.gate_seconds < usage.seconds
    assert 0 < usage.busy_share < 1


def test_the_time_that_the_caller_takes_for_a_group_is_not_that_of_the_rollouts_in_flight() -> None:
    """It may label a group with a slow teacher before it takes the next one."""
    now = [0.0]
    limits = config(group_size=2, max_live_rollouts=8, rollout_seconds=1.0, group_seconds=1.0)
    scheduler = Scheduler(engine(), RENDERER, limits, clock=lambda: now[0])
    stops: list[str] = []
    for group in scheduler.run(corridors(1, 2, 3, 4), seed=0):
        stops += [stop for stop, _, _ in endings(group)]
        now[0] += 10.0
    assert len(stops) == 8 and "cancelled" not in stops


def test_a_slow_reward_takes_no_time_of_the_rollouts_that_run_on() -> None:
    now = [0.0]

    class Slow(RewardSum):
        def judge_all(self, episodes: Any, verdicts: Any) -> Any:
            now[0] += 100.0
            return super().judge_all(episodes, verdicts)

    scheduler = Scheduler(
        engine(lambda request: 1 + request.seed % 5),
        RENDERER,
        config(group_size=2, rollout_seconds=50.0),
        rewards=Slow(build_rewards([Part("success")]).functions),
        clock=lambda: now[0],
    )
    groups = list(scheduler.run(corridors(1, 2, 3, 1), seed=5))
    assert now[0] == 400.0
    assert {stop for group in groups for stop, _, _ in endings(group)} <= {"completed", "max_turns"}
