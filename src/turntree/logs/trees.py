"""The rollout trees of a run on disk, `trees.jsonl`: every node, decision, verdict and credit, one tree a line.

Everything that reports, audits and calibrates can be read from it (docs/design/trees.md). It is one of the logs of a
run directory (`run.folder`): an iteration is in it whole or not at all, and a run that goes on cuts it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from turntree.core.completion import LARGEST_LOGPROB
from turntree.core.config import Between, from_mapping
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit, Rewards
from turntree.core.tree import Decision, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.logs.groups import LARGEST, LoggedGroup
from turntree.logs.rollouts import Rollouts, group_from_tree, read_own
from turntree.logs.rows import ReadReport

SCHEMA = "turntree.trees/1"
FILE_NAME = "trees.jsonl"


@dataclass(frozen=True, kw_only=True)
class _Group:
    """What is written of a group as it is."""

    id: str
    iteration: Annotated[int, Between(0, LARGEST)]
    task_type: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    cut: int | None = None
    meta: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class KeptTree(_Group):
    """One group as it was grown and learned from. `credit` is None where nothing was learned from it (dropped by a
    filter, cut, censored, played in an evaluation); `tools` are those that its prompts showed; `cut` is the turn at
    which a gate stopped it; `meta` is what the stage adds (docs/design/trees.md)."""

    tree: RolloutTree
    rewards: Rewards
    credit: Credit | None = None

    def group(self) -> LoggedGroup:
        """What audits and calibrations read."""
        return group_from_tree(self.tree, self.rewards, id=self.id, iteration=self.iteration, task_type=self.task_type)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` restores: facts exactly, log-probabilities and entropies to single precision
        (they were computed in no better one), what a clock said to the microsecond."""
        row: dict[str, Any] = {"schema": SCHEMA, "id": self.id, "iteration": self.iteration}
        row |= {"task_type": self.task_type} if self.task_type is not None else {}
        row |= {"tools": list(self.tools)} if self.tools else {}
        row |= {"cut": self.cut} if self.cut is not None else {}
        row |= {"meta": self.meta} if self.meta else {}
        verdicts = {str(leaf): _verdict(verdict) for leaf, verdict in sorted(self.rewards.verdicts.items())}
        tree = self.tree.to_json()
        for node in tree["nodes"]:
            for name in ("logprobs", "entropies"):
                if name in node:
                    # the shortest decimal that is the same number in single precision
                    node[name] = [float(f"{value:.9g}") for value in node[name]]
            if "timing" in node:
                node["timing"] = {name: round(seconds, 6) for name, seconds in node["timing"].items()}
        completions = {str(node): reward for node, reward in sorted(self.rewards.completions.items())}
        return row | {
            "tree": tree,
            "verdicts": verdicts,
            **({"completions": completions} if completions else {}),
            "credit": None if self.credit is None else _credit(self.credit),
        }

    @classmethod
    def from_json(cls, row: Any) -> KeptTree:
        """Raises `InputError` for another schema and for a row that is not a tree."""
        if not isinstance(row, dict) or row.get("schema") != SCHEMA:
            found = row.get("schema") if isinstance(row, dict) else type(row).__name__
            raise InputError(f"is {found!r}, not {SCHEMA!r}", field="schema")
        try:
            found = from_mapping(_Row, row)
            for node in found.tree.nodes:
                _check_node(node)
            kept = cls(
                tree=RolloutTree.from_json(row["tree"]),
                rewards=found.rewards(),
                credit=None if found.credit is None else found.credit.restored(),
                **{one.name: getattr(found, one.name) for one in fields(_Group)},
            )
            kept.rewards.check(kept.tree)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            problem = f"is not a rollout tree ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            raise InputError(problem, field="tree", hint="the line is damaged: restore the file") from error
        return kept


@dataclass(frozen=True)
class _Labels(Credit):
    """A `Credit` as it is written."""

    nodes: dict[str, tuple[float, float, float]]  # pyright: ignore[reportIncompatibleVariableOverride]
    biased_forks: int = 0  # of earlier versions

    def restored(self) -> Credit:
        nodes = {int(node): NodeCredit(*numbers) for node, numbers in self.nodes.items()}
        kept = {name: value for name, value in vars(self).items() if name != "biased_forks"}
        return Credit(**{**kept, "nodes": nodes})


@dataclass(frozen=True)
class _Decision(Decision):
    saw: int | None = None  # of earlier versions


@dataclass(frozen=True, kw_only=True)
class _Tree:
    task_id: str
    nodes: list[dict[str, Any]]
    stops: dict[str, StopReason]
    decisions: list[_Decision]
    parts: dict[str, int]
    routes: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    roles: dict[str, Literal["refill"]]


@dataclass(frozen=True, kw_only=True)
class _Row(_Group):
    """What a line holds; the tree is checked node by node."""

    schema: str
    tree: _Tree
    verdicts: dict[str, Verdict]
    credit: _Labels | None
    completions: dict[str, float] = field(default_factory=dict[str, float])

    def rewards(self) -> Rewards:
        own = {int(node): reward for node, reward in self.completions.items()}
        return Rewards({int(leaf): verdict for leaf, verdict in self.verdicts.items()}, own)


def _check_node(node: dict[str, Any]) -> None:
    """Raise TypeError for values of another type than a node's (`core.config` would take long over every token)."""
    from_mapping(Cost, {**node.get("cost", {}), **node.get("timing", {})})
    ids = node["token_ids"]
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise TypeError("token_ids are not whole numbers")
    if type(node.get("policy_version", 0)) is not int or type(node["parent"] or 0) is not int:
        raise TypeError("parent and policy_version are whole numbers")
    for name in ("logprobs", "entropies"):
        found = node.get(name, [])
        if not isinstance(found, list) or not all(type(v) in (float, int) and abs(v) < LARGEST_LOGPROB for v in found):
            raise TypeError(f"{name} are not numbers")


def is_kept(iteration: int, iterations: int, keep: int | None) -> bool:
    """Whether the trees of an iteration are kept: all of them (`keep` None), none (0), or those of `keep` iterations
    that are spread evenly over a run of `iterations`, the last among them."""
    if keep is None or not keep:
        return keep is None
    return iteration * keep // iterations > (iteration - 1) * keep // iterations


def read(path: Path, report: ReadReport | None = None) -> Iterator[KeptTree]:
    """The trees of a file, or of a run's folder, in order, one at a time; `report` as in `logs.rollouts.read_own`."""
    path = path / FILE_NAME if path.is_dir() else path
    return read_own(path, KeptTree.from_json, "a rollout tree", report)


class Trees(Rollouts):
    """The groups of kept trees, for audits and calibrations (a log format)."""

    marks: ClassVar = (frozenset({"schema", "tree", "verdicts"}),)

    def of_file(self, path: Path, report: ReadReport) -> Iterator[LoggedGroup]:
        return map(KeptTree.group, read(path, report))


def _verdict(verdict: Verdict) -> dict[str, Any]:
    always, empty = ("reward", "reason"), (None, "", {})
    told = {**asdict(verdict), "cost": {} if verdict.cost == NO_COST else verdict.cost.counts()}
    return {key: value for key, value in told.items() if key in always or value not in empty}


def _credit(credit: Credit) -> dict[str, Any]:
    nodes = {str(node): [c.positive, c.negative, c.multiplicity] for node, c in sorted(credit.nodes.items())}
    return {**{key: value for key, value in vars(credit).items() if key != "nodes"}, "nodes": nodes}
