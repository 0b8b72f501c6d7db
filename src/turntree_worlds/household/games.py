"""Loads ALFWorld's official games: the tree of `game.tw-pddl` files that `alfworld-download` leaves, or packed lines.

A packed file (`*.jsonl` or `*.jsonl.xz`) has one JSON object a line: game (its id), task_type, pddl_problem, grammar,
walkthrough, solvable. What the official loader leaves out is left out here as well, counted by reason.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.core import seeds
from turntree.core.errors import InputError
from turntree.run.jsonl import parse_object, placed, read_lines, read_text
from turntree_worlds.household.parse import parse_game
from turntree_worlds.household.tasks import TASK_TYPES
from turntree_worlds.household.world import Game

GAME_FILE, TRAJECTORY_FILE = "game.tw-pddl", "traj_data.json"
_PACKED_ENDINGS = (".jsonl.xz", ".jsonl")
_DOWNLOAD_FOLDER = "json_2.1.1"


@dataclass(frozen=True, slots=True)
class Record:
    """One game as it lies on disk: its id, the fields of its file, and where they came from."""

    id: str
    task_type: str
    fields: dict[str, Any]
    path: Path
    line: int | None = None

    def game(self) -> Game:
        """The parsed game. InputError names the file and the line."""
        with placed(path=self.path, line=self.line):
            return parse_game(self.text("pddl_problem"), self.text("grammar"), id=self.id, task_type=self.task_type)

    def text(self, field: str) -> str:
        value = self.fields.get(field)
        if not isinstance(value, str):
            raise InputError("is missing or not text", field=field, hint="fetch the games anew with alfworld-download")
        return value

    def reason_to_skip(self) -> str | None:
        """Why the official loader would leave this game out, or None."""
        if "movable" in self.id or "Sliced" in self.id:
            return "movable or sliced task"
        if self.task_type not in TASK_TYPES:
            return f"unknown task type {self.task_type!r}"
        if "solvable" not in self.fields:
            return "never checked for solvability"
        return None if self.fields["solvable"] else "unsolvable"


def playable_games(path: str | Path, skipped: Counter[str] | None = None) -> Iterator[Record]:
    """The games of a packed file or a tree of `game.tw-pddl` files, in a fixed order; what is left out is counted in
    `skipped` by its reason. The path may hold variables such as `$ALFWORLD_DATA`. InputError names the file and line
    of anything unreadable."""
    skipped = Counter() if skipped is None else skipped
    for record in _records(Path(os.path.expanduser(os.path.expandvars(path))), skipped):
        reason = record.reason_to_skip()
        if reason is None:
            yield record
        else:
            skipped[reason] += 1


def draw_games(path: str | Path, count: int, *, offset: int = 0, seed: int = 0) -> tuple[list[Game], dict[str, Any]]:
    """`count` games drawn from all that can be played, and what they are: how many, by task type, and what reading
    counted (`env.tasks.TaskSet`).

    Games lie sorted by task type, so the first ones would be of one or two types. The order is drawn by `seed`, and
    `offset` games of it are skipped. Raises `InputError` where there are fewer games.
    """
    skipped = Counter[str]()
    records = seeds.shuffled(seed, playable_games(path, skipped), lambda record: record.id)
    if len(records) < offset + count:
        problem = f"holds {len(records)} games that can be played, and games {offset} to {offset + count} are asked for"
        raise InputError(problem, path=path, field="count", hint=f"ask for {max(0, len(records) - offset)}")
    drawn = records[offset : offset + count]
    types = Counter(record.task_type for record in drawn)
    counted = {"rows": len(records) + skipped.total(), "kept": len(records), "dropped": dict(skipped)}
    report = {"path": str(path), "games": count, "types": dict(sorted(types.items())), **counted}
    return [record.game() for record in drawn], report


def _records(path: Path, skipped: Counter[str]) -> Iterator[Record]:
    if not path.exists():
        hint = "run alfworld-download and give its folder ($ALFWORLD_DATA), or give a packed .jsonl.xz file"
        raise InputError("no such file or folder", path=path, hint=hint)
    if path.is_file():
        if path.name.endswith(_PACKED_ENDINGS):
            return _packed_records(path)
        raise InputError("is not a packed file of games", path=path, hint="give a .jsonl or .jsonl.xz file or a folder")
    downloaded = path / _DOWNLOAD_FOLDER
    return _tree_records(downloaded if downloaded.is_dir() else path, skipped)


def _packed_records(path: Path) -> Iterator[Record]:
    for number, line in read_lines(path):
        fields = parse_object(line, path, number)
        if not isinstance(fields.get("game"), str):
            raise InputError("is missing or not text", path=path, line=number, field="game", hint="name the game")
        yield Record(fields["game"], fields.get("task_type", ""), fields, path, number)


def _tree_records(root: Path, skipped: Counter[str]) -> Iterator[Record]:
    """Sorted by path, the same on every machine (the official order is the disk's)."""
    folders = sorted({file.parent for name in (GAME_FILE, TRAJECTORY_FILE) for file in root.rglob(name)})
    if not folders:
        raise InputError(f"holds no {GAME_FILE}", path=root, hint="run alfworld-download and give its folder")
    for folder in folders:
        if not (folder / GAME_FILE).is_file():
            skipped[f"no {GAME_FILE}"] += 1
            continue
        fields = _object(folder / GAME_FILE)
        task_type = folder.parent.name.split("-")[0]
        if (folder / TRAJECTORY_FILE).is_file():
            task_type = _object(folder / TRAJECTORY_FILE).get("task_type", task_type)
        yield Record("/".join(folder.parts[-3:]), task_type, fields, folder / GAME_FILE)


def _object(path: Path) -> dict[str, Any]:
    return parse_object(read_text(path), path)
