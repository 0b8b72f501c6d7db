"""Rollouts that were logged apart, put back into their groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from turntree.logs.groups import LoggedGroup
from turntree.logs.report import ReadReport
from turntree.logs.rows import LoggedRow


def grouped(rows: Iterable[LoggedRow], report: ReadReport) -> Iterator[LoggedGroup]:
    """The groups in order of iteration, then of first appearance (stable: a log in order stays in order).

    All rows of one file are held at once, because asynchronous frameworks log rollouts in order of completion.
    """
    groups: dict[tuple[int | None, str], list[LoggedRow]] = {}
    for row in rows:
        groups.setdefault((row.iteration, row.group), []).append(row)
    for (iteration, name), members in sorted(groups.items(), key=lambda item: item[0][0] or 0):
        report.groups += 1
        report.rollouts += len(members)
        yield LoggedGroup(
            id=name if iteration is None else f"{iteration}/{name}",
            task=members[0].task,
            rollouts=tuple(row.rollout for row in members),
            iteration=iteration,
            task_type=members[0].task_type,
        )
