"""Verdicts on the turns of `turntree train online`: turns that teach, in the update of whole episodes.

The episodes of an iteration have visited states, which lie on the policy's own path. A teacher says what it would do at
each of them, and a verifier judges the turn that was taken against that label, as PivotRL judges turns of traces.
Nothing is sampled for it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from turntree.core import parts, seeds
from turntree.core.cost import NO_COST, Cost
from turntree.core.protocols import Teacher, TurnState, TurnVerifier
from turntree.core.tree import Node
from turntree.env.tasks import TRAIN
from turntree.logs.rollouts import turns_of
from turntree.rollout.acceptance import Acceptance
from turntree.rollout.groups import GrownGroup
from turntree.rollout.local import judge_turns
from turntree.rollout.teachers import labelled
from turntree.run.means import mean_by_kind
from turntree.stages.config import RecordConfig, TrainOnlineConfig
from turntree.stages.policy import Policy
from turntree.stages.record import require_labels, trace_of
from turntree.stages.verifier import open_verifier
from turntree.traces.candidates import candidates, skipped_turns
from turntree.train.online import JudgedTurns


@contextlib.contextmanager
def open_turn_judge(config: TrainOnlineConfig, policy: Policy) -> Iterator[TurnVerdicts | None]:
    """What judges turns; None without `train.verdicts`."""
    if config.teacher is None or config.verifier is None:  # the configuration has both or none
        yield None
        return
    with open_verifier(config.verifier, config.environment) as verifier:
        yield TurnVerdicts(config, policy, verifier, parts.build("teachers", config.teacher))


_State = tuple[int, int | None]  # the number of a group, and the node above a turn


@dataclass(frozen=True)
class _Turn:
    """A turn of an episode: the number of its group, of the episode in it, of the turn, and the nodes of the turn."""

    group: int
    sample: int
    number: int
    nodes: tuple[Node, ...]

    @property
    def state(self) -> _State:
        """The same for turns that were taken at one state."""
        return self.group, self.nodes[0].parent

    @property
    def sampled(self) -> tuple[int, int]:
        """The same for episodes that share the turn, because they forked after it."""
        return self.group, self.nodes[-1].id


@dataclass(frozen=True)
class _Judged:
    """A turn at a state with a right label, the kind of the labelled action, and the reward of the turn's own action
    (None: censored)."""

    turn: _Turn
    kind: str
    reward: float | None


@dataclass
class TurnVerdicts:
    """Protocol `train.online.TurnJudge`."""

    config: TrainOnlineConfig
    policy: Policy
    verifier: TurnVerifier
    teacher: Teacher
    unlabelled: Counter[str] = field(default_factory=Counter[str])  # since the start: what the teacher did not label
    acceptance: Acceptance = field(default_factory=Acceptance)

    def judge(self, groups: Sequence[GrownGroup], iteration: int) -> JudgedTurns:
        seed = seeds.derive(self.config.train.seed, "inside", iteration)
        turns, counts = self._turns(groups), Counter[str]()
        states, cost = self._label(groups, turns, iteration, counts)
        kinds, label_cost = self._check_labels(states, counts, seed)
        usable = [turn for turn in turns if turn.state in kinds]
        lost = len({turn.sampled for turn in turns}) - len({turn.sampled for turn in usable})
        visited = len({turn.state for turn in turns})
        if again := lost - (visited - len(kinds)):
            counts["dropped turn: at a state that was dropped"] += again
        judged, turn_cost = self._judge_taken(usable, states, kinds, counts, seed)
        usual = mean_by_kind((one.kind, one.reward) for one in judged if one.reward is not None)
        for one in judged:
            self._learn(groups[one.turn.group], one)
        slopes = self.acceptance.slopes(usual)
        figures = {
            "visited": visited,
            "not_judged": dict(counts),
            "importance": slopes,
            "accepted_by_kind": usual,
            "turns_judged": len({one.turn.sampled for one in judged if one.reward is not None}),
        }
        return JudgedTurns(cost + label_cost + turn_cost, figures, _advantages(judged, usual, slopes, len(groups)))

    def state(self) -> dict[str, Any]:
        return {"seen": self.acceptance.state(), "unlabelled": dict(self.unlabelled)}

    def restore(self, state: dict[str, Any]) -> None:
        self.acceptance.restore(state["seen"])
        self.unlabelled = Counter(state["unlabelled"])

    @cached_property
    def _recorded(self) -> RecordConfig:
        config = self.config
        return RecordConfig(
            environment=config.environment,
            split=TRAIN,
            count=config.count,
            task_seed=config.task_seed,
            episodes=config.train.episodes,
        )

    def _turns(self, groups: Sequence[GrownGroup]) -> list[_Turn]:
        """Every turn of whole episodes whose state leaves room for another one, group by group."""
        train = self.config.train
        room = min(train.max_context, self.policy.engine.max_context, train.max_tokens) - train.sampling.max_tokens
        found: list[_Turn] = []
        for number, group in enumerate(groups):
            for sample, end in enumerate(group.tree.ends() if group.cut is None else ()):
                if group.rewards.of(end) is None:
                    continue
                length, path = 0, group.tree.path(end)
                starts = {nodes[0].id: (turn, nodes) for turn, (nodes, _) in enumerate(turns_of(path))}
                for node in path:
                    if node.id in starts and length <= room:
                        turn, nodes = starts[node.id]
                        found.append(_Turn(number, sample, turn, tuple(nodes)))
                    length += len(node.token_ids)
        return found

    def _label(
        self, groups: Sequence[GrownGroup], turns: Sequence[_Turn], iteration: int, counts: Counter[str]
    ) -> tuple[dict[_State, TurnState], Cost]:
        """The states that the teacher labels, each in the first episode that visits it, and what the labels cost; the
        other states are counted by reason."""
        states: dict[_State, TurnState] = {}
        cost, seen = NO_COST, set[_State]()
        by_episode: dict[tuple[int, int], list[_Turn]] = defaultdict(list)
        for turn in turns:
            if turn.state not in seen:
                seen.add(turn.state)
                by_episode[turn.group, turn.sample].append(turn)
        for (number, sample), first in by_episode.items():
            group = groups[number]
            end = group.tree.ends()[sample]
            trace = trace_of(group, sample, end, group.rewards.verdicts[end], self._recorded, self.policy.source)
            trace = replace(trace, id=f"{trace.id}@{iteration}")
            trace, missing, spent = labelled(trace, group.task, self.teacher, {turn.number for turn in first})
            cost += spent
            dropped = {f"dropped turn: {why}": count for why, count in missing.items()}
            counts.update(dropped)
            self.unlabelled.update(dropped, turns=len(first), tasks=1)
            require_labels(self.unlabelled)
            usable = {state.turn: state for state in candidates(trace) if state.turn in trace.labels}
            skipped = skipped_turns(trace)
            for turn in first:
                if turn.number in usable:
                    states[turn.state] = usable[turn.number]
                elif turn.number in trace.labels:
                    counts[f"dropped turn: {skipped[turn.number]}"] += 1
        return states, cost

    def _check_labels(
        self, states: Mapping[_State, TurnState], counts: Counter[str], seed: int
    ) -> tuple[dict[_State, str], Cost]:
        """The kind of the label at every state whose label the verifier accepts; the others are counted by reason."""
        pairs = [(state, state.demonstration) for state in states.values()]
        verdicts = judge_turns(self.verifier, pairs, seed=seed)
        kinds: dict[_State, str] = {}
        for place, verdict in zip(states, verdicts, strict=True):
            if verdict.reward:
                kinds[place] = verdict.kind
            else:
                counts[f"dropped turn: the verifier refuses the label ({verdict.reason})"] += 1
        return kinds, sum((verdict.cost for verdict in verdicts), NO_COST)

    def _judge_taken(
        self,
        turns: Sequence[_Turn],
        states: Mapping[_State, TurnState],
        kinds: Mapping[_State, str],
        counts: Counter[str],
        seed: int,
    ) -> tuple[list[_Judged], Cost]:
        """The turns with the verdicts on their actions; a turn that episodes share is judged once."""
        actions = {turn.sampled: (turn, turn.nodes[-1].message) for turn in turns}
        asked = [(turn, action) for turn, action in actions.values() if action is not None]
        verdicts = judge_turns(
            self.verifier,
            [(states[turn.state], action) for turn, action in asked],
            cut_turns=self.config.train.cut_turns,
            seed=seeds.derive(seed, "taken"),
        )
        counts.update(f"dropped turn: not judged ({one.reason})" for one in verdicts if one.reward is None)
        if silent := len(actions) - len(asked):
            counts["dropped turn: not judged (it says nothing)"] += silent
        rewards = {turn.sampled: verdict.reward for (turn, _), verdict in zip(asked, verdicts, strict=True)}
        judged = [_Judged(turn, kinds[turn.state], rewards.get(turn.sampled)) for turn in turns]
        return judged, sum((verdict.cost for verdict in verdicts), NO_COST)

    def _learn(self, group: GrownGroup, judged: _Judged) -> None:
        """Enter what a turn of an episode says of its kind."""
        rewards = group.rewards.scored()
        own = group.rewards.of(group.tree.ends()[judged.turn.sample])
        if own is not None and judged.reward is not None and len(rewards) > 1:
            self.acceptance.episode(judged.kind, judged.reward, own - sum(rewards.values()) / len(rewards))


def _advantages(
    judged: Sequence[_Judged], usual: Mapping[str, float], slopes: Mapping[str, float], groups: int
) -> list[dict[int, float]]:
    """For each group, by node: what an action's verdict promises for the episode's reward, beyond what is `usual` for
    the kind. A node that several actions share (a fork inside a turn) has the mean of theirs."""
    by_node: list[dict[int, list[float]]] = [defaultdict(list) for _ in range(groups)]
    for one in judged:
        if one.reward is not None:
            for node in one.turn.nodes:
                by_node[one.turn.group][node.id].append(slopes[one.kind] * (one.reward - usual[one.kind]))
    return [{node: sum(of) / len(of) for node, of in nodes.items()} for nodes in by_node]
