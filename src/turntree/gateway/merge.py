"""The calls of agents' sessions become one rollout tree (docs/design/gateway.md).

All sessions of one task share a tree. A call continues the longest path of its session that its prompt begins with,
token by token; what the prompt adds there is a given node, what was sampled is a completion below it. So retries
are siblings, and a sub-agent or a rewritten history is a branch of its own, from the root where no whole prompt is
shared. (The packer merges equal prefixes anyway, wherever in the tree they lie.)

Laws (tests/gateway/test_merge.py): the path to a completion holds exactly the tokens that the engine saw and sampled;
each kept call is one completion; a session is one rollout, which ends at the leaf of its last call and owns the other
leaves as its parts (`RolloutTree.parts`); the cost of the tree is the cost of all calls, failed ones included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from turntree.core.errors import InputError
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.tree import CONSTRAIN, Decision, NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.gateway.calls import Call, Session

ACTOR = "agent"


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The tree of one task, with the verdict on every session. `ends` are the leaves by session, `nodes` the
    completions by (session, call), `unattributed` counts by reason what no reward can reach."""

    tree: RolloutTree
    rewards: Rewards
    ends: dict[str, int]
    nodes: dict[tuple[str, str], int]
    unattributed: Counter[str]


def merge(task_id: str, sessions: Iterable[Session]) -> Merged:
    """One tree of all `sessions`, in order of their place in the group. Raises `InputError` for a session of another
    task and for one that occurs twice."""
    merging = _Merging(task_id)
    for session in sorted(sessions, key=lambda session: (session.sample, session.session_id)):
        merging.add(session)
    merging.found.rewards.check(merging.tree)
    return merging.found


class _Merging:
    """The tree while sessions are added to it."""

    def __init__(self, task_id: str) -> None:
        self.tree = RolloutTree(task_id)
        self._verdicts: dict[int, Verdict] = {}
        self._completions: dict[int, float] = {}
        rewards = Rewards(self._verdicts, self._completions)
        self.found = Merged(tree=self.tree, rewards=rewards, ends={}, nodes={}, unattributed=Counter())
        self._messages: dict[int | None, int] = {None: 0}  # on the path to each node, itself included
        self._owners: dict[int, str] = {}  # the session of every node; a shared prompt has none
        self._failed: set[int] = set()  # the leaves of calls without an answer

    def add(self, session: Session) -> None:
        if session.task_id != self.tree.task_id:
            problem = f"session {session.session_id!r} is of task {session.task_id!r}, not {self.tree.task_id!r}"
            raise InputError(problem, field="task_id", hint="merge the sessions of one task")
        if session.session_id in self.found.ends:
            raise InputError(f"session {session.session_id!r} occurs twice", field="session_id")
        calls = sorted(session.calls, key=lambda one: one.index)
        nodes = [self._add_call(call, session.session_id) for call in calls]
        answered = [node for node, call in zip(nodes, calls, strict=True) if call.completion is not None]
        last = [*nodes, *answered][-1:] or [self._given(None, (), (), session.session_id)]
        self._finish(session, self._below(last[0]))
        for call_id, reward in session.call_rewards.items():
            node = self.found.nodes.get((session.session_id, call_id))
            if node is None:
                self.found.unattributed["a reward of a call that the session does not hold"] += 1
            else:
                self._completions[node] = reward

    # calls

    def _add_call(self, call: Call, session: str) -> int:
        """The node of a call: its completion, or an empty observation that carries the cost of a failed one."""
        prompt = call.prompt_ids
        above, length = self._deepest(call, prompt, session)
        given = above
        if prompt[length:] or given is None or self.tree[given].sampled:
            given = self._given(above, prompt[length:], call.messages[self._messages[above] :], session)
        self._record_fork(call, given)
        if call.completion is None:
            node = self.tree.add(given, NodeKind.OBSERVATION, (), cost=call.cost).id
            self._failed.add(node)
        else:
            answer = call.answer if call.answer is not None else Message("assistant", "")
            node = self.tree.add_completion(given, call.completion, answer).id
            self.found.nodes[session, call.call_id] = node
            self._messages[node] = self._messages[given] + 1
            self._record_form(call, node)
        self._owners[node] = session
        return node

    def _deepest(self, call: Call, prompt: tuple[int, ...], session: str) -> tuple[int | None, int]:
        """The deepest node that this session may continue and whose path the prompt begins with, and the length of
        that path. Among twins (the same tokens sampled twice) the call's base, else the latest."""
        named = None if call.base is None else self.found.nodes.get((session, call.base.call_id))
        best: tuple[int, bool, int] = (0, False, -1)
        left: list[tuple[int, int]] = [(root, 0) for root in self.tree.roots]
        while left:
            node, start = left.pop()
            end = start + len(self.tree[node].token_ids)
            mine = self._owners.get(node, session) == session and node not in self._failed
            if not mine or self.tree[node].token_ids != prompt[start:end]:
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

    def _record_form(self, call: Call, node: int) -> None:
        """What the agent decided about an answer: where its text ends, and what it may hold."""
        numbers = {"call": float(call.index)}
        if call.stop is not None:
            self.tree.record(Decision(ACTOR, node, "stop", f"the text ends before {call.stop!r}", numbers))
        if call.constrained:
            self.tree.record(Decision(ACTOR, node, CONSTRAIN, "sampled under a grammar: not trained", numbers))
            self.found.unattributed["a call that was sampled under a grammar"] += 1

    def _record_fork(self, call: Call, given: int) -> None:
        """A first call and a continuation need no explanation; all other branches say why they are there."""
        above = self.tree[given].parent
        asked = any(child not in self._failed for child in self.tree.children(given))
        forks = asked or (above is not None and len(self.tree.children(above)) > 1)
        if (call.cause == "continue" and not forks) or (call.cause == "start" and call.index == 0):
            return
        reasons = {"start": "another conversation", "continue": "another continuation"}
        reason = reasons.get(call.cause, call.cause)
        self.tree.record(Decision(ACTOR, given, "fork", reason, {"call": float(call.index)}))

    # sessions

    def _finish(self, session: Session, end: int) -> None:
        """Stop the leaves of a session: one is its end, the others are its parts."""
        self.found.ends[session.session_id] = end
        leaves = [leaf for leaf in self.tree.leaves() if self._owners.get(leaf) == session.session_id]
        for leaf in leaves:
            if leaf != end:
                self.tree.stop(leaf, StopReason.CONTINUED, part_of=end)
        stop, verdict = self._outcome(session)
        self.tree.stop(end, stop)
        self._verdicts[end] = verdict
        if verdict.reward is None:
            self.found.unattributed[verdict.reason] += 1

    def _outcome(self, session: Session) -> tuple[StopReason, Verdict]:
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

    def _below(self, node: int) -> int:
        """The latest leaf at or below a node."""
        while children := self.tree.children(node):
            node = children[-1]
        return node
