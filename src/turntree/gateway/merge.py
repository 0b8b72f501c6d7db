"""The calls of agents' sessions become one rollout tree (docs/design/gateway.md).

All sessions of one task share a tree. A call continues the longest path of its session that its prompt begins with,
token by token; what the prompt adds there is a given node, what was sampled is a completion below it. So a retry and
the candidates of one request are siblings, and a sub-agent or a rewritten history is a branch of its own, from the
root where no whole prompt is shared. (The packer merges equal prefixes anyway, wherever in the tree they lie.)

Laws (tests/gateway/test_merge.py): the path to a completion holds exactly the tokens that the engine saw and sampled;
each kept call is one completion; a session is one rollout, which ends at the leaf of its last call and owns the other
leaves as its parts (`RolloutTree.parts`); the cost of the tree is the cost of all calls, failed ones included.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from turntree.core.cost import Additive
from turntree.core.errors import InputError
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.tree import Decision, NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.gateway.calls import Call, Session
from turntree.gateway.lineage import common

Discarded = Literal["session", "exclude"]

ACTOR = "agent"
_ASKED_AGAIN = "asked again"
_NOT_CHOSEN = "another candidate was taken"


@dataclass(frozen=True, kw_only=True)
class Footprint(Additive):
    """Token positions that an update on the kept calls computes, by layout."""

    unique: int = 0  # the packer: every unique position once
    by_branch: int = 0  # a row per leaf: what merging prefixes within a session leaves (AReaL, rLLM)
    by_call: int = 0  # a row per call: its prompt and its answer (Agent Lightning)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The tree of one task, with the verdict on every session. `ends` are the leaves by session, `nodes` the
    completions by (session, call), `unattributed` counts by reason what no reward can reach."""

    tree: RolloutTree
    rewards: Rewards
    ends: dict[str, int]
    nodes: dict[tuple[str, str], int]
    footprint: Footprint
    unattributed: dict[str, int] = field(default_factory=dict[str, int])


def merge(task_id: str, sessions: Iterable[Session], *, discarded: Discarded = "session") -> Merged:
    """One tree of all `sessions`, in order of their place in the group.

    `discarded` is the credit of calls whose result was thrown away (docs/design/gateway.md, "Credit of a session"):
    with "session" they take part in their session's advantage like every other call, with "exclude" they are censored,
    each a leaf with its reason. Raises `InputError` for a session of another task and for one that occurs twice.
    """
    grown = _Grown(task_id, discarded)
    for session in sorted(sessions, key=lambda one: (one.sample, one.session_id)):
        grown.add(session)
    return grown.merged()


class _Grown:
    """The tree while sessions are added to it."""

    def __init__(self, task_id: str, discarded: Discarded) -> None:
        self.tree = RolloutTree(task_id)
        self._discarded = discarded
        self._verdicts: dict[int, Verdict] = {}
        self._ends: dict[str, int] = {}
        self._completions: dict[int, float] = {}
        self._nodes: dict[tuple[str, str], int] = {}
        self._messages: dict[int | None, int] = {None: 0}  # on the path to each node, itself included
        self._owners: dict[int, str] = {}  # the session of every node; a shared prompt has none
        self._failed: set[int] = set()  # the leaves of calls without an answer
        self._by_call = 0
        self._unattributed = Counter[str]()

    def add(self, session: Session) -> None:
        if session.task_id != self.tree.task_id:
            problem = f"session {session.session_id!r} is of task {session.task_id!r}, not {self.tree.task_id!r}"
            raise InputError(problem, field="task_id", hint="merge the sessions of one task")
        if session.session_id in self._ends:
            raise InputError(f"session {session.session_id!r} occurs twice", field="session_id")
        calls = sorted(session.calls, key=lambda one: one.index)
        nodes = [self._add_call(call) for call in calls]
        answered = [node for node, call in zip(nodes, calls, strict=True) if call.completion is not None]
        last = [*nodes, *answered][-1:] or [self._given(None, (), (), session.session_id)]
        self._finish(session, self._below(last[0]))
        for call_id, reward in session.call_rewards.items():
            node = self._nodes.get((session.session_id, call_id))
            if node is None:
                self._unattributed["a reward of a call that the session does not hold"] += 1
            else:
                self._completions[node] = reward

    def merged(self) -> Merged:
        rewards = Rewards(self._verdicts, self._completions)
        rewards.check(self.tree)
        return Merged(
            tree=self.tree,
            rewards=rewards,
            ends=self._ends,
            nodes=self._nodes,
            footprint=self._footprint(),
            unattributed=dict(self._unattributed.most_common()),
        )

    # calls

    def _add_call(self, call: Call) -> int:
        """The node of a call: its completion, or an empty observation that carries the cost of a failed one."""
        above, length = self._deepest(call)
        rest = call.prompt_ids[length:]
        given = above
        if rest or given is None or self.tree[given].sampled:
            given = self._given(above, rest, call.messages[self._messages[above] :], call.session_id)
        self._record_fork(call, given)
        if call.completion is None:
            node = self.tree.add(given, NodeKind.OBSERVATION, (), cost=call.cost).id
            self._failed.add(node)
        else:
            answer = call.answer if call.answer is not None else Message("assistant", "")
            node = self.tree.add_completion(given, call.completion, answer).id
            self._nodes[call.session_id, call.call_id] = node
            self._messages[node] = self._messages[given] + 1
            self._by_call += len(call.prompt_ids) + len(call.completion.token_ids)
        self._owners[node] = call.session_id
        return node

    def _deepest(self, call: Call) -> tuple[int | None, int]:
        """The deepest node that this session may continue and whose path the prompt begins with, and the length of
        that path. Among twins (the same tokens sampled twice) the call that `follows` names, else the latest."""
        named = None if call.follows is None else self._nodes.get((call.session_id, call.follows))
        best: tuple[int, bool, int] = (0, False, -1)
        left: list[tuple[int, int]] = [(root, 0) for root in self.tree.roots]
        while left:
            node, start = left.pop()
            end = start + len(self.tree[node].token_ids)
            mine = self._owners.get(node, call.session_id) == call.session_id and node not in self._failed
            if not mine or self.tree[node].token_ids != call.prompt_ids[start:end]:
                continue
            best = max(best, (end, node == named, node))
            left += [(child, end) for child in self.tree.children(node)]
        end, _, node = best
        return (None, 0) if node < 0 or not end else (node, end)

    def _given(self, above: int | None, ids: tuple[int, ...], messages: tuple[Message, ...], session: str) -> int:
        """A node for what a prompt adds. Prompts at the root are shared by the sessions of the task."""
        kind = NodeKind.PROMPT if above is None else NodeKind.OBSERVATION
        node = self.tree.add(above, kind, ids, messages=messages).id
        self._messages[node] = self._messages[above] + len(messages)
        if above is not None or not ids:
            self._owners[node] = session
        return node

    def _record_fork(self, call: Call, given: int) -> None:
        """A first call and a continuation need no explanation; all other branches say why they are there."""
        above = self.tree[given].parent
        asked = any(child not in self._failed for child in self.tree.children(given))
        forks = asked or (above is not None and len(self.tree.children(above)) > 1)
        if (call.cause == "continue" and not forks) or (call.cause == "start" and call.index == 0):
            return
        reasons = {"start": "another conversation", "continue": "another continuation"}
        reason = reasons.get(call.cause, call.cause)
        numbers = {"call": float(call.index), "shared": float(self._shared(call, given))}
        self.tree.record(Decision(ACTOR, given, "fork", reason, numbers))

    def _shared(self, call: Call, given: int) -> int:
        """How many tokens a prompt begins with that were in the session's reach before, whatever nodes they lie in."""
        if self.tree.children(given):
            return len(call.prompt_ids)
        found, left = 0, [(root, 0) for root in self.tree.roots]
        while left:
            node, start = left.pop()
            if node != given and self._owners.get(node, call.session_id) == call.session_id:
                ids = self.tree[node].token_ids
                end = start + common(ids, call.prompt_ids[start : start + len(ids)])
                found = max(found, end)
                left += [(child, end) for child in self.tree.children(node)] if end == start + len(ids) else []
        return found

    # sessions

    def _finish(self, session: Session, end: int) -> None:
        """Stop the leaves of a session: one is its end, the others are its parts or are left out."""
        self._ends[session.session_id] = end
        leaves = [leaf for leaf in self.tree.leaves() if self._owners.get(leaf) == session.session_id]
        away = self._thrown_away(session, end) if self._discarded == "exclude" else {}
        for leaf in leaves:
            if leaf == end:
                self._stop(end, *self._outcome(session, end))
            elif leaf in away:
                self._stop(leaf, StopReason.CANCELLED, Verdict(None, f"thrown away by the agent ({away[leaf]})"))
            else:
                self.tree.stop(leaf, StopReason.CONTINUED, part_of=end)

    def _stop(self, leaf: int, reason: StopReason, verdict: Verdict) -> None:
        self.tree.stop(leaf, reason)
        self._verdicts[leaf] = verdict
        if verdict.reward is None:
            self._unattributed[verdict.reason] += 1

    def _outcome(self, session: Session, end: int) -> tuple[StopReason, Verdict]:
        kept = [call for call in session.calls if call.completion is not None]
        if not kept:
            return StopReason.ENVIRONMENT_ERROR, Verdict(None, "the session holds no model call that was answered")
        if session.reward is None:
            return StopReason.ENVIRONMENT_ERROR, Verdict(None, session.reason or "no reward was given")
        last = max(kept, key=lambda call: call.index).completion
        cut = last is not None and last.finish == "length"
        return StopReason.MAX_TOKENS if cut else session.stop, Verdict(
            session.reward, session.reason, success=session.success
        )

    def _thrown_away(self, session: Session, end: int) -> dict[int, str]:
        """Leaves whose answer the agent cannot have used: the same prompt was asked again, or it went on with another
        answer to it. Of the candidates of one request none counts as lost unless another one was continued. What else
        became of an answer cannot be seen: a sub-agent's last one comes back in the words of another prompt."""
        asked: dict[int, list[tuple[Call, int]]] = {}  # by the node of their prompt
        for call in sorted(session.calls, key=lambda one: one.index):
            node = self._nodes.get((session.session_id, call.call_id))
            if node is not None:
                asked.setdefault(self.tree.path(node)[-2].id, []).append((call, node))
        found: dict[int, str] = {}
        for twins in asked.values():
            latest = twins[-1][0]
            continued = any(self.tree.children(node) for _, node in twins)
            for call, node in twins:
                alike = bool(call.request_id) and call.request_id == latest.request_id
                again = call is not latest and not alike
                judged = call.call_id in session.call_rewards
                if node != end and not self.tree.children(node) and not judged and (continued or again):
                    found[node] = _ASKED_AGAIN if again else _NOT_CHOSEN
        return found

    def _below(self, node: int) -> int:
        """The latest leaf at or below a node."""
        while children := self.tree.children(node):
            node = children[-1]
        return node

    # figures

    def _footprint(self) -> Footprint:
        rows = [self._sequence(node) for node in self._nodes.values() if not self._continued(node)]
        return Footprint(unique=unique_tokens(rows), by_branch=sum(map(len, rows)), by_call=self._by_call)

    def _sequence(self, node: int) -> tuple[int, ...]:
        return tuple(token for part in self.tree.path(node) for token in part.token_ids)

    def _continued(self, node: int) -> bool:
        """Whether a completion lies below."""
        left = [*self.tree.children(node)]
        while left:
            below = left.pop()
            if self.tree[below].sampled:
                return True
            left += self.tree.children(below)
        return False


def unique_tokens(sequences: Sequence[tuple[int, ...]]) -> int:
    """Positions of the trie of all sequences: in sorted order each adds what it does not share with the one before."""
    ordered = sorted(sequences)
    shared = (common(before, now) for before, now in itertools.pairwise(ordered))
    return sum(map(len, ordered)) - sum(shared)
