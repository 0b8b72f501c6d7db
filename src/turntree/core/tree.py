"""The rollout tree: an append-only arena of nodes, what ended each leaf, and every decision with its reason.

Facts only. Rewards, advantages and every other label live beside the tree, keyed by node id (`core.labels`).

Laws (tests/laws): a node never changes once appended; a parent comes before its children; the token ids of a path,
concatenated, are exactly what the engine saw; a stopped leaf never grows; each sampling event is one node, so two
siblings that happen to sample the same tokens stay two nodes.

A turn is one model call as the environment sees it. Where sampling forked inside a turn, its tokens lie in several
nodes: the tokens up to the fork in a completion that the branches share, the rest of each branch in one below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from turntree.core.completion import Completion
from turntree.core.cost import NO_COST, Cost
from turntree.core.messages import Message


class NodeKind(StrEnum):
    PROMPT = "prompt"  # given: a task, or a state inside an expert trace
    COMPLETION = "completion"  # sampled by the policy
    OBSERVATION = "observation"  # answered by the environment


class StopReason(StrEnum):
    """Every ending has a name."""

    COMPLETED = "completed"  # the environment said that the episode is over, or a one-turn rollout was sampled
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_SECONDS = "max_seconds"  # an agent's session that used up its time, and was given a reward
    GATED = "gated"  # a gate stopped the whole tree
    CANCELLED = "cancelled"
    ENVIRONMENT_ERROR = "environment_error"
    ENGINE_ERROR = "engine_error"
    RENDERER_ERROR = "renderer_error"  # a chat template or a parser failed on this rollout's messages
    NO_ROOM = "no_room"  # the task alone fills the context: the policy was never asked
    CONTINUED = "continued"  # the rollout went on in another branch and ended at another leaf (`RolloutTree.parts`)

    @property
    def censors(self) -> bool:
        """Whether such a leaf has no reward: it is left out of means, variances and the loss, but not of the costs."""
        return self in _CENSORING


_FAULTS = (StopReason.ENVIRONMENT_ERROR, StopReason.ENGINE_ERROR, StopReason.RENDERER_ERROR)
_CENSORING = frozenset({StopReason.GATED, StopReason.CANCELLED, StopReason.CONTINUED, StopReason.NO_ROOM, *_FAULTS})


@dataclass(frozen=True, kw_only=True)
class Node:
    """The tokens that one step adds to its parent's sequence.

    `logprobs` and `entropies` are None unless the policy sampled the node; then they align with `token_ids`.
    """

    id: int
    parent: int | None
    kind: NodeKind
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    turn: int = 0  # turns on the path up to and including this node; a completion below one continues its turn
    policy_version: int | None = None
    messages: tuple[Message, ...] = ()  # what the tokens say: a task, a completion, all that a step answered
    cost: Cost = NO_COST
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # of the step: `Observation.metrics`

    def __post_init__(self) -> None:
        for name in ("logprobs", "entropies"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(f"node {self.id}: {len(values)} {name} for {len(self.token_ids)} tokens")
        if (self.kind is NodeKind.COMPLETION) != (self.logprobs is not None):
            raise ValueError(f"node {self.id}: log-probabilities belong to completions, and only to them")

    @property
    def sampled(self) -> bool:
        return self.logprobs is not None

    @property
    def tells(self) -> bool:
        """Whether the policy was told something here. A node that was not sampled and has neither messages nor metrics
        holds the cost of a rollout that ended without an answer."""
        return not self.sampled and bool(self.messages or self.metrics)

    @property
    def message(self) -> Message | None:
        """The last of the node's messages (a completion has one)."""
        return self.messages[-1] if self.messages else None


CONSTRAIN = "constrain"  # the action of a decision to sample a completion under a grammar


@dataclass(frozen=True)
class Decision:
    """A branch or gate decision, or what an agent decided about a call: what was decided, why, and the numbers it was
    based on.

    A fork is recorded at its branch point, a refill at the start that it added.
    """

    actor: str
    node: int
    action: str
    reason: str
    numbers: dict[str, float] = field(default_factory=dict[str, float])


class RolloutTree:
    """The rollouts of one task. What changes it, appends: `add`, `take_routes`, `stop`, `mark_refill` and `record`."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self._nodes: list[Node] = []
        self._children: list[list[int]] = []
        self._stops: dict[int, StopReason] = {}
        self._parts: dict[int, int] = {}
        self._refills: set[int] = set()
        self._routes: dict[int, tuple[str, ...]] = {}
        self._starts: list[int] = []
        self._sampled: list[bool] = []  # whether a node or one above it was sampled
        self._decisions: list[Decision] = []

    # growing

    def add(
        self,
        parent: int | None,
        kind: NodeKind,
        token_ids: tuple[int, ...],
        *,
        logprobs: tuple[float, ...] | None = None,
        entropies: tuple[float, ...] | None = None,
        policy_version: int | None = None,
        messages: tuple[Message, ...] = (),
        cost: Cost = NO_COST,
        metrics: Mapping[str, float] | None = None,
    ) -> Node:
        """Append a node below `parent` (None for a root) and return it."""
        if parent is not None:
            self._check(parent)
            if parent in self._stops:
                raise ValueError(f"node {parent} is stopped ({self._stops[parent]}) and cannot grow")
        above = None if parent is None else self._nodes[parent]
        speaks = kind is NodeKind.COMPLETION and (above is None or above.kind is not NodeKind.COMPLETION)
        node = Node(
            id=len(self._nodes),
            parent=parent,
            kind=kind,
            token_ids=tuple(token_ids),
            logprobs=logprobs,
            entropies=entropies,
            turn=(above.turn if above else 0) + speaks,
            policy_version=policy_version,
            messages=messages,
            cost=cost,
            metrics=dict(metrics or {}),
        )
        self._nodes.append(node)
        self._children.append([])
        begun = parent is not None and self._sampled[parent]
        self._sampled.append(begun or node.sampled)
        if node.sampled and not begun:
            self._starts.append(node.id)
        if parent is not None:
            self._children[parent].append(node.id)
        return node

    def add_completion(self, parent: int, completion: Completion, message: Message, *, shared: int = 0) -> Node:
        """Append a sampled completion and the message that the renderer parsed from it.

        With `shared`, the first `shared` tokens become a separate node, the parent of the returned one, from which
        other branches may continue. The message and the whole cost belong to the returned node."""
        if not 0 <= shared < max(1, len(completion.token_ids)):
            raise ValueError(f"{shared} of {len(completion.token_ids)} sampled tokens cannot be shared by branches")
        if shared:
            parent = self._add_sampled(parent, completion, slice(0, shared), None, NO_COST).id
        node = self._add_sampled(parent, completion, slice(shared, None), message, completion.cost)
        path = self.path(node.id) if completion.routes else ()
        end = len(completion.routes) + bool(path) - sum(len(above.token_ids) for above in path)
        at = min(0, end)  # more routes than tokens are those of a prompt that is not known yet, at the root
        for above in path:  # what is known of a token stays: a prompt has the routes of its first completion
            known, end = self.routes(above.id), end + len(above.token_ids)
            if at + len(known) >= 0:
                self._routes[above.id] = known + completion.routes[at + len(known) : end]
            at = end
        return node

    def _add_sampled(
        self, parent: int, completion: Completion, part: slice, message: Message | None, cost: Cost
    ) -> Node:
        return self.add(
            parent,
            NodeKind.COMPLETION,
            completion.token_ids[part],
            logprobs=completion.logprobs[part],
            entropies=completion.entropies[part],
            policy_version=completion.policy_version,
            messages=() if message is None else (message,),
            cost=cost,
        )

    def take_routes(self, other: RolloutTree, ids: Mapping[int, int]) -> None:
        """Those of another tree's nodes, by their ids there and here."""
        self._routes |= {ids[node]: told for node, told in other._routes.items() if node in ids}

    def stop(self, leaf: int, reason: StopReason, *, part_of: int | None = None) -> None:
        """Stop a leaf. `part_of` is the leaf at which its rollout ended, where that is another (`parts`). Raises
        ValueError for a node that has children or was stopped before."""
        self._check(leaf)
        if self._children[leaf]:
            raise ValueError(f"node {leaf} has children and cannot be stopped")
        if leaf in self._stops:
            raise ValueError(f"node {leaf} is already stopped ({self._stops[leaf]})")
        if part_of is not None:
            self._check(part_of)
            self._parts[leaf] = part_of
        self._stops[leaf] = reason

    def mark_refill(self, start: int) -> None:
        """Mark a start that was added after outcomes had been seen. Raises ValueError for a node that is no start."""
        if start not in self._starts:
            raise ValueError(f"node {start} begins no rollout and cannot be a refill")
        self._refills.add(start)

    def record(self, decision: Decision) -> None:
        self._check(decision.node)
        self._decisions.append(decision)

    def _check(self, node: int) -> None:
        if not 0 <= node < len(self._nodes):
            raise ValueError(f"the tree of {self.task_id!r} has no node {node}")

    # views

    def routes(self, node: int) -> tuple[str, ...]:
        """The routes (`core.completion.Completion`) of the node's first tokens; of the others they are not known."""
        return self._routes.get(node, ())

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, node: int) -> Node:
        self._check(node)
        return self._nodes[node]

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    @property
    def roots(self) -> tuple[int, ...]:
        return tuple(node.id for node in self._nodes if node.parent is None)

    def children(self, node: int) -> tuple[int, ...]:
        self._check(node)
        return tuple(self._children[node])

    def leaves(self) -> tuple[int, ...]:
        """Ids of the nodes without children, in order of creation."""
        return tuple(node for node, children in enumerate(self._children) if not children)

    def stop_reason(self, leaf: int) -> StopReason | None:
        return self._stops.get(leaf)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self._decisions)

    def untrained(self) -> frozenset[int]:
        """The completions that were not drawn from the policy alone (`CONSTRAIN`): they are in no loss."""
        return frozenset(decision.node for decision in self._decisions if decision.action == CONSTRAIN)

    def parts(self) -> dict[int, int]:
        """The leaves at which no rollout ended, each with the leaf at which its rollout did.

        An agent that retries, asks a sub-agent or rewrites its history makes one rollout of several branches: it ends
        once, is rewarded once, and owns the sampled tokens of all of them. Elsewhere a rollout is one path.
        """
        return dict(self._parts)

    def refills(self) -> frozenset[int]:
        """The starts that were added after outcomes had been seen; all others are initial."""
        return frozenset(self._refills)

    def ends(self) -> tuple[int, ...]:
        """The leaves at which a rollout ended, in order of creation: all but parts."""
        return tuple(leaf for leaf in self.leaves() if leaf not in self._parts)

    def nodes_of(self, end: int) -> tuple[int, ...]:
        """The nodes of the rollout that ended at `end`, parents first: the path to it and to each of its parts."""
        mine = [end, *(part for part, of in self._parts.items() if of == end)]
        return tuple(sorted({node.id for leaf in mine for node in self.path(leaf)}))

    def starts(self) -> tuple[int, ...]:
        """The sampled nodes without a sampled node above them, in order of creation: where independent rollouts begin.

        Rollouts of different starts are independent samples of the same prompt. Rollouts of one start share it and
        forked later. Several starts below one prompt are not branching.
        """
        return tuple(self._starts)

    def branch_points(self) -> tuple[int, ...]:
        """The nodes at or below a start with several children: where sampling forked."""
        return tuple(node for node, below in enumerate(self._sampled) if below and len(self._children[node]) > 1)

    def path(self, node: int) -> tuple[Node, ...]:
        """The nodes from the root down to `node`."""
        self._check(node)
        found: list[Node] = []
        current: int | None = node
        while current is not None:
            found.append(self._nodes[current])
            current = self._nodes[current].parent
        return tuple(reversed(found))

    @property
    def cost(self) -> Cost:
        return sum((node.cost for node in self._nodes), NO_COST)

    # on disk

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` restores exactly. What a clock said is under `timing`."""
        return {
            "task_id": self.task_id,
            "nodes": [_node_to_json(node) for node in self._nodes],
            "stops": {str(leaf): reason.value for leaf, reason in sorted(self._stops.items())},
            "parts": {str(leaf): end for leaf, end in sorted(self._parts.items())},
            "roles": dict.fromkeys(map(str, sorted(self._refills)), "refill"),
            "decisions": [asdict(decision) for decision in self._decisions],
            **({"routes": {str(node): list(told) for node, told in self._routes.items()}} if self._routes else {}),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RolloutTree:
        tree = cls(value["task_id"])
        for row in value["nodes"]:
            tree.add(row["parent"], NodeKind(row["kind"]), tuple(row["token_ids"]), **_facts_of(row))
        for leaf, reason in value["stops"].items():
            tree.stop(int(leaf), StopReason(reason), part_of=value["parts"].get(leaf))
        for node in value["roles"]:
            tree.mark_refill(int(node))
        for row in value["decisions"]:
            row.pop("saw", None)  # of earlier versions: always null
            tree.record(Decision(**row))
        for node, told in value.get("routes", {}).items():
            tree._routes[tree[int(node)].id] = tuple(told)
        return tree


def _facts_of(row: dict[str, Any]) -> dict[str, Any]:
    """What `RolloutTree.add` takes beside the place, the kind and the tokens of a node."""
    return {
        "logprobs": None if row.get("logprobs") is None else tuple(row["logprobs"]),
        "entropies": None if row.get("entropies") is None else tuple(row["entropies"]),
        "policy_version": row.get("policy_version"),
        "messages": tuple(Message.from_chat(message) for message in row.get("messages", ())),
        "cost": Cost(**row.get("cost", {}), **row.get("timing", {})),
        "metrics": row.get("metrics"),
    }


def _node_to_json(node: Node) -> dict[str, Any]:
    row: dict[str, Any] = {"parent": node.parent, "kind": node.kind.value, "token_ids": list(node.token_ids)}
    for name, values in (("logprobs", node.logprobs), ("entropies", node.entropies)):
        if values is not None:
            row[name] = list(values)
    if node.policy_version is not None:
        row["policy_version"] = node.policy_version
    if node.messages:
        row["messages"] = [message.to_chat() for message in node.messages]
    if node.metrics:
        row["metrics"] = dict(node.metrics)
    for name, spent in (("cost", node.cost.counts()), ("timing", node.cost.timing())):
        if any(spent.values()):
            row[name] = {key: value for key, value in spent.items() if value}
    return row
