"""Laws of the scheduler, with engines that answer when they please, environments that fail and gates that cut.

Exactly once, nobody starves, what is cancelled makes room, the same seed gives the same trees whatever the
interleaving, the trees cost what was charged, and a censored leaf has no reward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fault_drill import Corridor, FaultPlan, Faulty
from fixed_brancher import FixedBrancher
from scripted_engine import ScriptedAnswer, ScriptedEngine
from tiny_models import tiny_tokenizer
from turntree.core import seeds
from turntree.core.completion import Completion, Finished, GenerationRequest, Sampling
from turntree.core.cost import NO_COST, Cost
from turntree.core.messages import Message
from turntree.core.protocols import Brancher, Environment, Gate, GateDecision, GroupProgress, StreamingEngine
from turntree.core.tree import RolloutTree, StopReason
from turntree.decide.branching.published import ReleasedArpoBrancher
from turntree.decide.branching.rules import EntropyBrancher, RandomBrancher
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.env.local import LocalPool
from turntree.env.pool import Answer, Session
from turntree.render.template import ChatRenderer
from turntree.rollout.groups import GrownGroup
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.scheduler import Scheduler, SchedulerConfig

TOKENIZER = tiny_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
EPISODES = EpisodeConfig(max_turns=4, sampling=Sampling(max_tokens=16))
WORDS = [RENDERER.completion(Message("assistant", word)) for word in ("left", "right", "on")]
FIRST = {word[0] for word in WORDS}
BRANCHERS: dict[str, Callable[[], Brancher | None]] = {
    "none": lambda: None,
    "fixed": lambda: FixedBrancher(turns=(2, 3), branches=3),
    "random": lambda: RandomBrancher(rate=0.5, probe_tokens=2),
    "entropy": lambda: EntropyBrancher(vocabulary=len(TOKENIZER), probe_tokens=2, tau=0.5),
    "released": lambda: ReleasedArpoBrancher(vocabulary=len(TOKENIZER)),
}


class Charging:
    """A streaming engine around another that adds up what it charges and counts its steps."""

    def __init__(self, engine: StreamingEngine) -> None:
        self._engine, self.max_context, self.policy_version = engine, engine.max_context, 0
        self.charged, self.steps, self.most = NO_COST, 0, 0

    @property
    def in_flight(self) -> int:
        return self._engine.in_flight

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        raise AssertionError("not a wave")

    def clear_cache(self) -> None:
        raise AssertionError("not now")

    def submit(self, request: GenerationRequest) -> int:
        ticket = self._engine.submit(request)
        self.most = max(self.most, self.in_flight)
        return ticket

    def cancel(self, ticket: int) -> Cost:
        cost = self._engine.cancel(ticket)
        self.charged += cost
        return cost

    def poll(self, timeout: float | None = None) -> list[Finished]:
        found: list[Finished] = []
        while self._engine.in_flight and not found:
            found = self._engine.poll(0)
            self.steps += 1
            if timeout == 0:
                break
        self.charged += sum((each.completion.cost for each in found if each.completion), NO_COST)
        return found


class Leisurely:
    """A pool that answers a call some polls after it was made."""

    concurrency = 1

    def __init__(self, seed: int, slowest: int) -> None:
        self._pool, self._seed, self._slowest = LocalPool(), seed, slowest
        self._waiting: dict[Session, tuple[int, Answer]] = {}
        self._numbers = itertools.count()
        self.open, self.fork, self.reset, self.step = (
            self._pool.open,
            self._pool.fork,
            self._pool.reset,
            self._pool.step,
        )

    @property
    def in_flight(self) -> int:
        return self._pool.in_flight + len(self._waiting)

    def poll(self, timeout: float | None = None) -> dict[Session, Answer]:
        for session, answer in self._pool.poll().items():
            delay = seeds.generator(self._seed, next(self._numbers)).randint(0, self._slowest)
            self._waiting[session] = (delay, answer)
        ripe: dict[Session, Answer] = {}
        while self._waiting and not ripe:
            self._waiting = {session: (delay - 1, answer) for session, (delay, answer) in self._waiting.items()}
            ripe = {session: answer for session, (delay, answer) in self._waiting.items() if delay < 0}
            if timeout == 0:
                break
        for session in ripe:
            del self._waiting[session]
        return ripe

    def close(self, session: Session) -> int:
        _, answer = self._waiting.pop(session, (0, None))
        return self._pool.close(session) + (answer.calls if answer else 0)


class Frail(ChatRenderer):
    """Refuses a share of the turns and of the answers, by what was said."""

    def __init__(self, rate: float, seed: int) -> None:
        super().__init__(TOKENIZER)
        self._rate, self._seed = rate, seed

    def parse(self, token_ids: Sequence[int], tools: Any = ()) -> Message:
        self._suffer("parse", tuple(token_ids))
        return super().parse(token_ids, tools)

    def extend(self, messages: Any, new: Any, tools: Any = (), *, stopped: bool = True) -> tuple[int, ...]:
        self._suffer("extend", repr(messages), repr(new))
        return super().extend(messages, new, tools, stopped=stopped)

    def _suffer(self, *what: Any) -> None:
        if seeds.generator(self._seed, "renderer", repr(what)).random() < self._rate:
            raise KeyError("the template's own")


@dataclass
class Hunch:
    """Cuts the groups that a hash of what it sees says to, and remembers what it saw."""

    modulus: int
    seen: dict[str, GateDecision | None] = field(default_factory=dict)

    def decide(self, group: GroupProgress) -> GateDecision | None:
        number = seeds.derive(0, repr(group))
        cut = number % self.modulus == 0 and not all(group.finished)
        numbers = {"number": float(number % 97)}
        decision = GateDecision(cut=cut, reason="a hunch", numbers=numbers, final=number % 5 == 0)
        self.seen[repr(group)] = decision if cut or number % 3 else None
        return self.seen[repr(group)]


@dataclass(frozen=True)
class World:
    """What is played: it decides the trees."""

    lengths: tuple[int, ...]
    group_size: int
    seed: int
    engine_faults: float = 0.0
    environment_faults: float = 0.0
    renderer_faults: float = 0.0
    gate: str = "none"
    retries: int = 1
    brancher: str = "none"
    initial: int = 4  # of the group size, at most
    cuts: float = 0.0  # turns that do not stop by themselves
    refills: bool | None = None

    def tasks(self) -> list[Environment]:
        plan = FaultPlan(seed=self.seed, raising=self.environment_faults / 2, garbage=self.environment_faults / 2)
        tasks = [Corridor(f"task {number % 3}", length) for number, length in enumerate(self.lengths)]
        return [Faulty(task, plan) for task in tasks] if self.environment_faults else list(tasks)


@dataclass(frozen=True)
class Weather:
    """When things happen and in how much room: it decides nothing."""

    live: int
    rows: int | None
    slowest_answer: int
    slowest_environment: int
    seed: int


WORLDS = st.builds(
    World,
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple),
    group_size=st.integers(1, 6),
    initial=st.integers(1, 4),
    brancher=st.sampled_from(["none", "none", *BRANCHERS]),
    seed=st.integers(0, 99),
    engine_faults=st.sampled_from([0.0, 0.0, 0.2]),
    environment_faults=st.sampled_from([0.0, 0.0, 0.2]),
    renderer_faults=st.sampled_from([0.0, 0.0, 0.1]),
    gate=st.sampled_from(["none", "hunch", "hunch", "divergence"]),
    retries=st.integers(0, 2),
    cuts=st.sampled_from([0.0, 0.0, 0.2]),
    refills=st.sampled_from([None, None, False]),
)
WEATHERS = st.builds(
    Weather,
    live=st.integers(1, 9),
    rows=st.sampled_from([None, 1, 2, 5]),
    slowest_answer=st.integers(1, 7),
    slowest_environment=st.integers(0, 5),
    seed=st.integers(0, 99),
)


@dataclass
class Played:
    groups: list[GrownGroup]
    engine: Charging
    scheduler: Scheduler
    seen: Any


def play(world: World, weather: Weather, **run: Any) -> Played:
    attempts: Counter[int] = Counter()

    def answer(prompt: tuple[int, ...], seed: int) -> ScriptedAnswer:
        """Two words; one, if the first is there already because the rollout forked after it."""
        said = (*WORDS[seed % 3][:-1], *WORDS[seed // 3 % 3])[prompt[-1] in FIRST :]
        if seeds.generator(seed, "cut").random() < world.cuts:
            said = said[:1] * (EPISODES.sampling.max_tokens + 1)
        entropies = tuple(seeds.generator(seed, k).random() for k in range(len(said)))
        return ScriptedAnswer(said, (-1.0,) * len(said), entropies)

    def latency(request: GenerationRequest) -> int:
        return seeds.generator(weather.seed, request.seed).randint(1, weather.slowest_answer)

    def fault(request: GenerationRequest) -> str | None:
        attempts[request.seed] += 1
        draw = seeds.generator(world.seed, "fault", request.seed, attempts[request.seed]).random()
        return "the engine hiccuped" if draw < world.engine_faults else None

    engine = ScriptedEngine(
        answer,
        RENDERER.stop_ids,
        vocab_size=len(TOKENIZER),
        latency=latency,
        fault=fault,
        max_batch_rows=weather.rows,
    )
    gates: dict[str, Gate | None] = {
        "none": None,
        "hunch": Hunch(modulus=4),
        "divergence": PrefixDivergenceGate(turn=2, threshold=0.4),
    }
    gate, charging = gates[world.gate], Charging(engine)
    scheduler = Scheduler(
        charging,
        Frail(world.renderer_faults, world.seed) if world.renderer_faults else RENDERER,
        SchedulerConfig(
            episodes=EPISODES,
            group_size=world.group_size,
            initial_rollouts=min(world.initial, world.group_size) if world.brancher != "none" else None,
            max_live_rollouts=weather.live,
            max_retries=world.retries,
            refills=world.refills,
        ),
        pool=Leisurely(weather.seed, weather.slowest_environment),
        gate=gate,
        brancher=BRANCHERS[world.brancher](),
    )
    groups = list(scheduler.run(world.tasks(), seed=world.seed, **run))
    return Played(groups, charging, scheduler, getattr(gate, "seen", None))


def without_costs(tree: RolloutTree) -> dict[str, Any]:
    value = tree.to_json()
    for node in value["nodes"]:
        node.pop("cost", None)
        node.pop("timing", None)
    return value


@settings(max_examples=30)
@given(WORLDS, WEATHERS)
def test_every_task_comes_back_exactly_once_with_named_endings(world: World, weather: Weather) -> None:
    played = play(world, weather)
    assert [group.index for group in played.groups] == list(range(len(world.lengths)))
    for group, task in zip(played.groups, world.tasks(), strict=True):
        assert group.tree.task_id == task.task_id
        assert len(group.tree.leaves()) + group.unfilled == world.group_size or group.cut is not None
        assert not (group.tree.refills() if world.refills is False else group.unfilled)
        assert all(group.tree.stop_reason(leaf) for leaf in group.tree.leaves())
        assert (group.cut is not None) == (StopReason.GATED in map(group.tree.stop_reason, group.tree.leaves()))
    assert played.engine.in_flight == played.scheduler.pool.in_flight == 0
    assert played.engine.most <= weather.live


@settings(max_examples=50)
@given(WORLDS, WEATHERS, WEATHERS)
def test_the_same_seed_gives_the_same_trees_whatever_the_interleaving(
    world: World, one: Weather, other: Weather
) -> None:
    first, second = play(world, one), play(world, other)
    for here, there in zip(first.groups, second.groups, strict=True):
        assert without_costs(here.tree) == without_costs(there.tree)
        assert (here.rewards, here.cut, here.decision) == (there.rewards, there.cut, there.decision)
    assert first.seen == second.seen, "a gate sees the group as it was at the turn, whoever has gone on since"


@settings(max_examples=30)
@given(WORLDS, WEATHERS)
def test_the_trees_cost_what_the_engine_charged(world: World, weather: Weather) -> None:
    played = play(replace(world, gate="hunch"), weather)
    assert sum((group.tree.cost for group in played.groups), NO_COST).counts() == {
        **played.engine.charged.counts(),
        "tool_calls": sum(group.tree.cost.tool_calls for group in played.groups),
    }


@settings(max_examples=30)
@given(WORLDS, WEATHERS)
def test_a_censored_leaf_has_no_reward_and_a_cut_group_has_none_at_all(world: World, weather: Weather) -> None:
    for group in play(world, weather).groups:
        group.rewards.check(group.tree)
        for leaf in group.tree.leaves():
            stop = group.tree.stop_reason(leaf)
            assert stop is not None
            assert (group.rewards.of(leaf) is None) == (stop.censors or group.cut is not None)
        if group.cut is not None:
            assert max(node.turn for node in group.tree) <= group.cut


@settings(max_examples=20)
@given(WORLDS, WEATHERS)
def test_a_refill_is_marked_once_at_the_turn_that_it_starts_with_and_no_other_rollout_is(
    world: World, weather: Weather
) -> None:
    calm = replace(world, engine_faults=0.0, environment_faults=0.0, renderer_faults=0.0, gate="none", refills=None)
    for group in play(calm, weather).groups:
        tree = group.tree
        marked = [decision.node for decision in tree.decisions if decision.action == "refill"]
        assert len(set(marked)) == len(marked)
        assert all(tree[node].sampled and tree[node].turn == 1 for node in marked)
        assert tree.refills() == set(marked) == set(tree.starts()[len(tree.starts()) - len(marked) :])
        initial = world.group_size if world.brancher == "none" else min(world.initial, world.group_size)
        assert len(tree.starts()) - len(marked) == initial


@settings(max_examples=20)
@given(WORLDS, WEATHERS)
def test_no_environment_takes_a_step_for_a_cut_turn(world: World, weather: Weather) -> None:
    for group in play(replace(world, cuts=0.3), weather).groups:
        for node in group.tree:
            if node.message is not None and node.message.cut and node.sampled:
                assert all(not group.tree[child].messages for child in group.tree.children(node.id))


@settings(max_examples=20)
@given(WORLDS, WEATHERS)
def test_faults_cost_retries_and_never_change_what_was_sampled(world: World, weather: Weather) -> None:
    """With enough retries, the trees of a world of faults are those of a world without."""
    world = replace(world, environment_faults=0.0, gate="none", retries=50, brancher="none")
    faulty = play(replace(world, engine_faults=0.3), weather)
    calm = play(replace(world, engine_faults=0.0), weather)
    for here, there in zip(faulty.groups, calm.groups, strict=True):
        assert without_costs(here.tree) == {
            **without_costs(there.tree),
            "decisions": [vars(decision) for decision in here.tree.decisions],
        }
        assert here.rewards == there.rewards
    retried = [decision for group in faulty.groups for decision in group.tree.decisions]
    assert {decision.action for decision in retried} <= {"retry"}


@settings(max_examples=10)
@given(WEATHERS)
def test_nobody_starves_when_tasks_never_end(weather: Weather) -> None:
    world = World(lengths=(3,), group_size=3, seed=1)
    engine = ScriptedEngine(
        lambda prompt, seed: WORDS[seed % 3],
        RENDERER.stop_ids,
        vocab_size=len(TOKENIZER),
        latency=lambda request: seeds.generator(weather.seed, request.seed).randint(1, weather.slowest_answer),
        max_batch_rows=weather.rows,
    )
    config = SchedulerConfig(episodes=EPISODES, group_size=world.group_size, max_live_rollouts=weather.live)
    endless = (Corridor(f"task {number}", 1 + number % 4) for number in itertools.count())
    scheduler = Scheduler(engine, RENDERER, config, pool=Leisurely(weather.seed, weather.slowest_environment))
    run = scheduler.run(endless, seed=0)
    returned = {group.index for group in itertools.islice(run, 40)}
    run.close()
    assert set(range(20)) <= returned
    assert engine.in_flight == scheduler.pool.in_flight == 0, "a caller that stops asking leaves nothing in flight"
