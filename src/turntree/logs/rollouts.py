"""turntree's own rollout log, `rollouts.jsonl` of a run directory: one finished group a line, appended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from turntree.core.config import from_mapping
from turntree.core.errors import InputError
from turntree.core.labels import Rewards
from turntree.core.tree import Node, RolloutTree, StopReason
from turntree.logs.generic import LogFormat
from turntree.logs.groups import LoggedGroup, LoggedRollout, action_text
from turntree.logs.rows import ReadReport
from turntree.run import jsonl

T = TypeVar("T")
SCHEMA = "turntree.rollout/1"
FILE_NAME = "rollouts.jsonl"


def group_to_json(group: LoggedGroup) -> dict[str, Any]:
    """What is unknown is left out; a censored reward is null."""
    rollouts = [
        {key: value for key, value in asdict(rollout).items() if key == "reward" or value is not None}
        for rollout in group.rollouts
    ]
    known = {key: value for key, value in vars(group).items() if value is not None}
    return {"schema": SCHEMA, **known, "rollouts": rollouts}


def group_from_json(value: Any) -> LoggedGroup:
    """`group_from_json(group_to_json(group)) == group`. Raises `InputError` for another schema or unknown fields."""
    found = value.get("schema") if isinstance(value, dict) else None
    if found != SCHEMA:
        raise InputError(f"is {str(found)[:40]!r}, not {SCHEMA!r}", field="schema")
    return from_mapping(LoggedGroup, {key: field for key, field in value.items() if key != "schema"})


def group_from_tree(
    tree: RolloutTree, rewards: Rewards, *, id: str, iteration: int | None = None, task_type: str | None = None
) -> LoggedGroup:
    """The leaves of a finished tree as rollouts. A turn that several leaves share is paid for by the first.

    Depth first: the first child of a fork is the rollout that was forked, whose distribution no fork has changed.
    Taking the leaf that ended first instead would count short branches as independent rollouts.
    """
    paid: set[int] = set()
    refills = tree.refills()
    rollouts = [_rollout(tree, leaf, rewards.of(leaf), paid, refills) for leaf in depth_first(tree)]
    return LoggedGroup(id=id, task=tree.task_id, rollouts=tuple(rollouts), iteration=iteration, task_type=task_type)


def depth_first(tree: RolloutTree) -> Iterator[int]:
    """The leaves at which a rollout ended, those below an earlier child first."""
    left, wanted = [*reversed(tree.roots)], set(tree.ends())
    while left:
        node = left.pop()
        left += reversed(tree.children(node))
        if node in wanted:
            yield node


def _turns_of(nodes: Iterable[Node]) -> list[tuple[list[Node], str]]:
    """The turns of a path or of all nodes of a rollout, in order: the nodes of each (several where it forked half-way;
    the last has the message), and what was answered before it."""
    turns: list[tuple[list[Node], str]] = []
    seen: list[str] = []
    for node in nodes:
        if node.sampled and turns and turns[-1][0][-1].id == node.parent:
            turns[-1][0].append(node)
        elif node.sampled:
            turns.append(([node], "\n".join(seen)))
            seen = []
        else:
            seen += [message.content for message in node.messages]
    return turns


def _rollout(
    tree: RolloutTree, leaf: int, reward: float | None, paid: set[int], refills: frozenset[int]
) -> LoggedRollout:
    turns = _turns_of(map(tree.__getitem__, tree.nodes_of(leaf)))
    said = [nodes[-1].message for nodes, _ in turns]
    new = [[node for node in nodes if node.id not in paid] for nodes, _ in turns]
    forked = any(node.id in paid for nodes, _ in turns for node in nodes)
    paid.update(node.id for nodes, _ in turns for node in nodes)
    stop = tree.stop_reason(leaf)
    return LoggedRollout(
        actions=tuple("" if message is None else action_text(message) for message in said),
        reward=reward,
        completed=None if stop is None or stop.censors else stop is StopReason.COMPLETED,
        turn_tokens=tuple(sum(len(node.token_ids) for node in nodes) for nodes in new),
        observations=tuple(before for _, before in turns),
        stop=None if stop is None else stop.value,
        forked=forked,
        refill=not refills.isdisjoint(node.id for nodes, _ in turns for node in nodes),
    )


def read_own(path: Path, read: Callable[[Any], T], what: str, report: ReadReport | None) -> Iterator[T]:
    """What `read` makes of every line of a log of a run. Raises `InputError` with the line, unless there is a `report`,
    in which lines that cannot be read (a run that is being written, or was killed) are counted."""
    for number, line in jsonl.read_lines(path):
        if report is not None:
            report.saw_line()
        try:
            found = read(jsonl.parse_json(line, half_characters=True))
        except InputError as error:
            if report is None:
                raise jsonl.located(error, path=path, line=number) from error
            report.drop(f"a line that is not {what}", path, number, detail=str(error))
            continue
        yield found


class Rollouts(LogFormat):
    """turntree's own rollout logs (a log format)."""

    marks: ClassVar = (frozenset({"schema", "task", "rollouts"}),)

    def groups(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedGroup]:
        for path in paths:
            for group in self.of_file(path, report):
                report.saw_group(len(group.rollouts))
                yield group

    def of_file(self, path: Path, report: ReadReport) -> Iterator[LoggedGroup]:
        return read_own(path, group_from_json, "a finished group", report)
