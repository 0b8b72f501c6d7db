"""Judged turns inside the trees of `turntree train online`: turns that teach, in the update of whole episodes.

An iteration's rollouts have visited states; that is the policy's own path. At some of them the turn is sampled again, a
few times, and judged against what a teacher says there, as PivotRL judges turns of traces. The samples are leaves of
the same tree: their prompts are paid for by the episode that went through, in the engine and in the update. The turns
that the episodes took can be judged as well, for nothing but the labels.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from turntree.core import parts, seeds
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.core.protocols import Teacher, TurnState, TurnVerifier
from turntree.core.tree import Node
from turntree.core.verdict import Verdict, censored
from turntree.environments.tasks import TRAIN
from turntree.logs.rollouts import turns_of
from turntree.renderers.thoughts import rewrites
from turntree.rollouts.acceptance import Acceptance
from turntree.rollouts.groups import GrownGroup
from turntree.rollouts.local import Inside, Prompted, grow_inside, judge_turns
from turntree.rollouts.teachers import labelled
from turntree.stages.config import RecordConfig, TrainOnlineConfig
from turntree.stages.policy import Policy
from turntree.stages.record import require_labels, trace_of
from turntree.stages.verifier import open_verifier
from turntree.traces.candidates import candidates, skipped_turns
from turntree.training.inside import GrownInside


@contextlib.contextmanager
def open_inside(config: TrainOnlineConfig, policy: Policy) -> Iterator[InsideTurns | None]:
    """What grows local rollouts and judges turns; None without either (`train.local`)."""
    if not config.train.local.judges:
        yield None
        return
    assert config.teacher is not None and config.verifier is not None  # the configuration refuses it
    if rewrites(policy.renderer):
        hint = "leave it at 0, or keep thoughts (renderer.thoughts=keep)"
        raise ConfigError("needs rollouts that are one path", field="train.local", hint=hint)
    with open_verifier(config.verifier, config.environment) as verifier:
        yield InsideTurns(config, policy, verifier, parts.build("teachers", config.teacher))


_State = tuple[int, int | None]  # the number of a group, and the node above a turn


@dataclass(frozen=True, order=True)
class _Place:
    """A turn of an episode: the number of its group, of the episode in it, of the turn, and the nodes of the turn."""

    group: int
    sample: int
    turn: int
    nodes: tuple[Node, ...] = field(compare=False)

    @property
    def state(self) -> _State:
        """The same for turns that were taken at one state."""
        return self.group, self.nodes[0].parent


@dataclass(frozen=True)
class Labelled:
    """A place with a right label: the kind of the labelled action, where its state is in the tree, and the verdict on
    the action that the episode took (None: not asked, or censored)."""

    place: _Place
    kind: str
    inside: Inside
    taken: float | None


@dataclass
class InsideTurns:
    """Protocol `training.inside.Inside`."""

    config: TrainOnlineConfig
    policy: Policy
    verifier: TurnVerifier
    teacher: Teacher
    told: Counter[str] = field(default_factory=Counter[str])  # since the start: what the teacher did not label
    seen: Acceptance = field(default_factory=Acceptance)

    def grow(self, groups: Sequence[GrownGroup], iteration: int) -> GrownInside:
        """Append local rollouts to the trees, and judge what the episodes did."""
        seed, local = self._seed(iteration), self.config.train.local
        found, visited, counts, spent = self.labelled(groups, iteration)
        chosen = self._choose(_distinct(found, lambda one: one.place), seed) if local.states else []
        verdicts, cost = self.sample(chosen, seed) if chosen else ([], NO_COST)
        kinds = [one.kind for one in chosen]
        figures = {"visited": visited, **_figures(kinds, verdicts), "not_judged": dict(counts)}
        accepted = _accepted(found)
        if self._asks_taken:
            told_by_episodes(self.seen, groups, found)
            for kind, told in zip(kinds, verdicts, strict=True):
                self.seen.group(kind, [verdict.reward for verdict in told if verdict.reward is not None])
            figures["importance"] = self.seen.slopes(accepted)
        places: list[dict[int, str]] = [{} for _ in groups]
        for one in chosen:
            places[one.place.group][one.inside.node] = one.kind
        taken: list[dict[int, float]] = []
        if local.verdicts:
            figures["accepted_by_kind"] = accepted
            figures["turns_judged"] = len({_sampled(one.place) for one in found if one.taken is not None})
            taken = _advantages(found, accepted, figures["importance"], len(groups))
        return GrownInside(spent + cost, figures, places, self.seen, taken)

    def sample(self, chosen: Sequence[Labelled], seed: int) -> tuple[list[list[Verdict]], Cost]:
        """Local rollouts at these states, in their trees: the verdicts, and what they cost."""
        episodes = self.config.train.rollouts.episodes
        return grow_inside(
            [one.inside for one in chosen],
            self.policy.engine,
            self.policy.renderer,
            self.verifier,
            episodes.sampling,
            self.config.train.local.samples,
            seed,
            cut_turns=episodes.cut_turns,
        )

    def labelled(self, groups: Sequence[GrownGroup], iteration: int) -> tuple[list[Labelled], int, Counter[str], Cost]:
        """The turns of the episodes at whose states the verifier accepts the teacher's label (of a draw of the visited
        states, where the turns that were taken are not judged); how many states were visited; the reasons of those that
        were left out; and what the labels cost."""
        turns, counts, seed = self._turns(groups), Counter[str](), self._seed(iteration)
        visited = _distinct(turns, lambda place: place)
        pool = turns
        if not self.config.train.local.verdicts:
            draw = seeds.generator(seed, "places")
            pool = sorted(draw.sample(visited, min(self.config.train.local.pool, len(visited))))
        distinct = _distinct(pool, lambda place: place)
        states, cost = list[tuple[_Place, TurnState]](), NO_COST
        for part in _by_episode(distinct):
            told, spent = self._labelled(groups, part, iteration, counts)
            states += told
            cost += spent
        accepted, spent = self._accepted(groups, states, counts, seed)
        usable = [place for place in pool if place.state in accepted]
        lost = len({_sampled(place) for place in pool}) - len({_sampled(place) for place in usable})
        if again := lost - (len(distinct) - len(accepted)):
            counts["dropped turn: at a state that was dropped"] += again
        found, judged = self._taken(usable, accepted, counts, seed)
        return found, len(visited), counts, cost + spent + judged

    def _seed(self, iteration: int) -> int:
        return seeds.derive(self.config.train.seed, "inside", iteration)

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen.state(), "told": dict(self.told)}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen.restore(state["seen"])
        self.told = Counter(state["told"])

    def _choose(self, found: Sequence[Labelled], seed: int) -> list[Labelled]:
        """The states to sample at: without replacement, weighed by what earlier iterations say of their kinds: the
        first arrivals at rates w (Efraimidis and Spirakis 2006, whose keys u^(1/w) are all 0 where w is small)."""
        wanted, draw = self.config.train.local.states, seeds.generator(seed, "chosen")
        if self.config.train.local.choose == "uniform":
            return [found[i] for i in sorted(draw.sample(range(len(found)), min(wanted, len(found))))]
        by_gain = self.config.train.local.choose == "alignment"
        weights = self.seen.weights([one.kind for one in found], by_gain=by_gain)
        arrivals = list(map(draw.expovariate, weights))
        best = sorted(range(len(found)), key=arrivals.__getitem__)[:wanted]
        return [found[i] for i in sorted(best)]

    @cached_property
    def _recorded(self) -> RecordConfig:
        config = self.config
        return RecordConfig(
            environment=config.environment,
            split=TRAIN,
            count=config.count,
            task_seed=config.task_seed,
            episodes=config.train.rollouts.episodes,
        )

    @property
    def _asks_taken(self) -> bool:
        """Whether what the episodes did is judged."""
        return self.config.train.local.verdicts > 0 or self.config.train.local.choose != "uniform"

    def _turns(self, groups: Sequence[GrownGroup]) -> list[_Place]:
        """Every turn of whole episodes whose state leaves room for another one, group by group."""
        episodes, train = self.config.train.rollouts.episodes, self.config.train
        room = (
            min(episodes.max_context, self.policy.engine.max_context, train.max_tokens) - episodes.sampling.max_tokens
        )
        found: list[_Place] = []
        for number, group in enumerate(groups):
            for sample, end in enumerate(group.tree.ends() if group.cut is None else ()):
                if group.rewards.of(end) is None:
                    continue
                length, path = 0, group.tree.path(end)
                starts = {nodes[0].id: (turn, nodes) for turn, (nodes, _) in enumerate(turns_of(path))}
                for node in path:
                    if node.id in starts and length <= room:
                        turn, nodes = starts[node.id]
                        found.append(_Place(number, sample, turn, tuple(nodes)))
                    length += len(node.token_ids)
        return found

    def _labelled(
        self, groups: Sequence[GrownGroup], places: Sequence[_Place], iteration: int, counts: Counter[str]
    ) -> tuple[list[tuple[_Place, TurnState]], Cost]:
        """The places of one episode that the teacher labels, with their states, and what the labels cost; the others
        are counted by reason."""
        group, sample = groups[places[0].group], places[0].sample
        end = group.tree.ends()[sample]
        trace = trace_of(group, sample, end, group.rewards.verdicts[end], self._recorded, self.policy.source)
        trace = replace(trace, id=f"{trace.id}@{iteration}")
        trace, missing, cost = labelled(trace, group.task, self.teacher, {place.turn for place in places})
        dropped = {f"dropped turn: {why}": count for why, count in missing.items()}
        counts.update(dropped)
        self.told.update(dropped, turns=len(places), tasks=1)
        require_labels(self.told)
        states: dict[int, TurnState] = {state.turn: state for state in candidates(trace) if state.turn in trace.labels}
        skipped = skipped_turns(trace)
        unusable = [place.turn for place in places if place.turn in trace.labels and place.turn not in states]
        counts.update(f"dropped turn: {skipped[turn]}" for turn in unusable)
        return [(place, states[place.turn]) for place in places if place.turn in states], cost

    def _accepted(
        self, groups: Sequence[GrownGroup], states: Sequence[tuple[_Place, TurnState]], counts: Counter[str], seed: int
    ) -> tuple[dict[_State, tuple[str, Inside]], Cost]:
        """The kind and the place of every state whose label the verifier accepts; the others are counted by reason."""
        said = judge_turns(self.verifier, [(state, state.demonstration) for _, state in states], seed=seed)
        accepted: dict[_State, tuple[str, Inside]] = {}
        for (place, state), verdict in zip(states, said, strict=True):
            if not verdict.reward:
                counts[f"dropped turn: the verifier refuses the label ({verdict.reason})"] += 1
                continue
            tree, above = groups[place.group].tree, place.nodes[0].parent
            assert above is not None  # a task comes before the first turn
            prompt = tuple(token for node in tree.path(above) for token in node.token_ids)
            accepted[place.state] = verdict.kind, Inside(tree, above, Prompted(state, prompt))
        return accepted, sum((verdict.cost for verdict in said), NO_COST)

    def _taken(
        self,
        places: Sequence[_Place],
        accepted: Mapping[_State, tuple[str, Inside]],
        counts: Counter[str],
        seed: int,
    ) -> tuple[list[Labelled], Cost]:
        """The turns at these states, judged where that is asked for: once, however many episodes share a turn."""
        actions = {_sampled(place): (place, place.nodes[-1].message) for place in places if self._asks_taken}
        asked = [(place, action) for place, action in actions.values() if action is not None]
        verdicts = judge_turns(
            self.verifier,
            [(accepted[place.state][1].prompted.state, action) for place, action in asked],
            cut_turns=self.config.train.rollouts.episodes.cut_turns,
            seed=seeds.derive(seed, "taken"),
        )
        counts.update(f"dropped turn: not judged ({one.reason})" for one in verdicts if one.reward is None)
        if silent := len(actions) - len(asked):
            counts["dropped turn: not judged (it says nothing)"] += silent
        rewards = {_sampled(place): verdict.reward for (place, _), verdict in zip(asked, verdicts, strict=True)}
        found = [Labelled(place, *accepted[place.state], rewards.get(_sampled(place))) for place in places]
        return found, sum((verdict.cost for verdict in verdicts), NO_COST)


def _sampled(place: _Place) -> tuple[int, int]:
    """The same for episodes that share the turn, because they forked after it."""
    return place.group, place.nodes[-1].id


_Turn = TypeVar("_Turn")


def _distinct(turns: Iterable[_Turn], place: Callable[[_Turn], _Place]) -> list[_Turn]:
    """The first turn at each state."""
    found: dict[_State, _Turn] = {}
    for one in turns:
        found.setdefault(place(one).state, one)
    return list(found.values())


def _accepted(found: Iterable[Labelled]) -> dict[str, float]:
    """The share of accepted turns among those that were taken and judged, by kind."""
    by_kind: dict[str, list[float]] = {}
    for one in found:
        if one.taken is not None:
            by_kind.setdefault(one.kind, []).append(one.taken)
    return {kind: sum(of) / len(of) for kind, of in sorted(by_kind.items())}


def _advantages(
    found: Iterable[Labelled], usual: Mapping[str, float], slopes: Mapping[str, float], groups: int
) -> list[dict[int, float]]:
    """For each group, by node: what an action's verdict promises for the episode's reward, beyond what is `usual` for
    the kind. A node that several actions share (a fork inside a turn) has the mean of theirs."""
    told: list[dict[int, list[float]]] = [{} for _ in range(groups)]
    for one in found:
        if one.taken is not None:
            advantage = slopes[one.kind] * (one.taken - usual[one.kind])
            for node in one.place.nodes:
                told[one.place.group].setdefault(node.id, []).append(advantage)
    return [{node: sum(of) / len(of) for node, of in nodes.items()} for nodes in told]


def told_by_episodes(seen: Acceptance, groups: Sequence[GrownGroup], found: Iterable[Labelled]) -> None:
    """Enter what the episodes' own actions at labelled states say of their kinds."""
    for one in found:
        group = groups[one.place.group]
        rewards = group.rewards.scored()
        own = group.rewards.of(group.tree.ends()[one.place.sample])
        if own is not None and one.taken is not None and len(rewards) > 1:
            seen.episode(one.kind, one.taken, own - sum(rewards.values()) / len(rewards))


def _by_episode(places: Sequence[_Place]) -> list[list[_Place]]:
    found: dict[tuple[int, int], list[_Place]] = {}
    for place in places:
        found.setdefault((place.group, place.sample), []).append(place)
    return list(found.values())


def _figures(kinds: Sequence[str], verdicts: Sequence[Sequence[Verdict]]) -> dict[str, Any]:
    """States by outcome, the mean reward, and that of every kind of demonstrated action."""
    rewards = [[verdict.reward for verdict in group] for group in verdicts]
    outcomes = Counter(map(group_outcome, rewards))
    by_kind: dict[str, list[float]] = {}
    for kind, group in zip(kinds, rewards, strict=True):
        by_kind.setdefault(kind, []).extend(reward for reward in group if reward is not None)
    scored = [reward for of in by_kind.values() for reward in of]
    reasons = censored(verdict for group in verdicts for verdict in group)
    return {
        "states": len(kinds),
        **{outcome.value: outcomes[outcome] for outcome in GroupOutcome},
        "rollouts": sum(map(len, rewards)),
        "reward_mean": sum(scored) / len(scored) if scored else None,
        "reward_by_kind": {kind: sum(of) / len(of) if of else None for kind, of in sorted(by_kind.items())},
        "censored_reasons": reasons,
    }
