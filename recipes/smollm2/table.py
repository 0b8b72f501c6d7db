"""The tables of docs/results/smollm2.md: python recipes/smollm2/table.py FOLDER_OR_FILE ... [--save FILE]

A FOLDER is what the recipe made, whole or not. A FILE is what `--save` wrote: the items behind the tables, without the
weights. Runs of several machines go side by side, each with a warm start of its own; their seeds must differ.

Intervals of one policy are 95% percentile intervals of a bootstrap over tasks (games; the traces that held-out turns
come from; passages, questions, instructions) and say nothing about other seeds of training. Those over seeds cover
other seeds and other items (two-way analysis of variance).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from instructions import followed
from retention import last_number

from turntree.run.artifacts import PROFILE
from turntree.run.files import read_json, write_json
from turntree.run.statistics import crossed_interval

BASE, BEFORE = "base", "warm"
TEXTS = ("wiki", "gsm8k", "math")
INSIDE, BESIDE = ("accepted turns", "won games"), (*TEXTS, "instructions", "solved gsm8k", "solved math")

Values = Mapping[str, tuple[str, float, float]]  # by item: its task, and a ratio's numerator and denominator
Seeds = dict[str, Mapping[str, Values]]  # of an arm: the figures of each seed


def accepted(path: Path) -> Values:
    """Of every held-out turn what share of its samples the verifier accepted; the task is the trace."""
    found: dict[str, tuple[str, float, float]] = {}
    for row in PROFILE.stream(path)[1]:
        if row["reward_mean"] is not None:
            found[f"{row['trace_id']} {row['turn']}"] = (row["trace_id"], row["reward_mean"], 1.0)
    return found


def played(paths: Sequence[Path]) -> Values:
    rows = [row for path in paths for row in read_json(path)["sampled"]["outcomes"]]
    return {row["task"]: (row["task"], statistics.fmean(row["rewards"]), 1.0) for row in rows if row["rewards"]}


def kept(paths: Sequence[Path]) -> dict[str, Values]:
    """By kind of text the log-likelihood in nats, over tokens; and the instructions that were followed."""
    found: dict[str, dict[str, tuple[str, float, float]]] = defaultdict(dict)
    for result in map(read_json, paths):
        for kind, rows in result["texts"].items():
            found[kind] |= {name: (name, -row["nats"], row["tokens"]) for name, row in rows.items()}
        rows = result["instructions"].items()
        found["instructions"] |= {name: (name, float(followed(name, row["reply"])), 1.0) for name, row in rows}
    return dict(found)


def solved(path: Path) -> dict[str, Values]:
    """By kind of problem whether the last number of the reply is the answer."""
    found: dict[str, dict[str, tuple[str, float, float]]] = defaultdict(dict)
    for name, row in read_json(path)["problems"].items():
        right = last_number(row["reply"]) == last_number(row["answer"])
        found[f"solved {name.partition(' ')[0]}"][name] = (name, float(right), 1.0)
    return dict(found)


def mean(values: Values) -> str:
    """The ratio of sums, with its interval."""
    rows = list(values.values())
    return _interval([row[0] for row in rows], lambda at: _ratio([rows[i] for i in at]), len(rows))


def change(after: Values, before: Values) -> str:
    """The difference over the items that both have, tasks resampled for both together."""
    shared = sorted(after.keys() & before.keys())
    pairs = [(after[name], before[name]) for name in shared]

    def difference(at: Sequence[int]) -> float:
        return _ratio([pairs[i][0] for i in at]) - _ratio([pairs[i][1] for i in at])

    return _interval([after[name][0] for name in shared], difference, len(pairs), sign="+")


def _ratio(rows: Sequence[tuple[str, float, float]]) -> float:
    return sum(row[1] for row in rows) / sum(row[2] for row in rows)


def _resampled(tasks: Sequence[str], resamples: int) -> Iterator[np.ndarray]:
    """Row indices of bootstrap samples that draw whole tasks: rows of one task are not independent."""
    members: dict[str, list[int]] = {}
    for row, task in enumerate(tasks):
        members.setdefault(task, []).append(row)
    rows = [np.array(each) for each in members.values()]
    generator = np.random.default_rng(0)
    for _ in range(resamples):
        yield np.concatenate([rows[drawn] for drawn in generator.integers(len(rows), size=len(rows))])


def _interval(tasks: Sequence[str], statistic: Any, count: int, sign: str = "") -> str:
    if not count:
        return ""
    low, high = np.quantile([statistic(at) for at in _resampled(tasks, 2000)], [0.025, 0.975])
    return f"{statistic(range(count)):{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def figures(path: Path) -> dict[str, dict[str, Values]]:
    """Of a run or of what was saved of it: by arm, then by figure. The policies before the arms come first."""
    found = of_folder(path) if path.is_dir() else read_json(path)["arms"]
    first = [arm for arm in (BASE, BEFORE) if arm in found]
    return {arm: found[arm] for arm in (*first, *sorted(found.keys() - set(first)))}


def save(path: Path, found: Mapping[str, Mapping[str, Values]]) -> None:
    rounded = {
        arm: {
            figure: {item: (task, round(value, 4), weight) for item, (task, value, weight) in values.items()}
            for figure, values in each.items()
        }
        for arm, each in found.items()
    }
    write_json(path, {"schema": "turntree.recipes.smollm2/1", "arms": rounded})


def of_folder(folder: Path) -> dict[str, dict[str, Values]]:
    found: dict[str, dict[str, Values]] = defaultdict(dict)
    for path in sorted(folder.glob("accept.*.jsonl")):
        found[path.stem.removeprefix("accept.")]["accepted turns"] = accepted(path)
    for arm, paths in _parts(folder, "play").items():
        found[arm]["won games"] = played(paths)
    for arm, paths in _parts(folder, "keep").items():
        found[arm] |= kept(paths)
    for path in sorted(folder.glob("solve.*.json")):
        found[path.stem.removeprefix("solve.")] |= solved(path)
    return found


def _parts(folder: Path, kind: str) -> dict[str, list[Path]]:
    """By arm the files that hold a part of a figure each: KIND.ARM.FROM.json."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob(f"{kind}.*.json")):
        found[path.stem.removeprefix(f"{kind}.").rpartition(".")[0]].append(path)
    return found


def _of_seed(found: Mapping[str, Mapping[str, Values]], arm: str) -> dict[str, Mapping[str, Values]]:
    """The arms that were trained with the seed of `arm`."""
    seed = arm.rpartition(".")[2]
    return {name: values for name, values in found.items() if name.rpartition(".")[2] == seed}


def by_seed(runs: Sequence[Mapping[str, Mapping[str, Values]]]) -> dict[str, Seeds]:
    """The arms that have several seeds, and the warm start that each of these began from."""
    seeds: dict[str, Seeds] = defaultdict(dict)
    for found in runs:
        for name, values in found.items():
            arm, _, seed = name.rpartition(".")
            if seed in seeds[arm]:
                sys.exit(f"two of these runs have {name}: train one of them with another seed")
            if arm:
                seeds[arm][seed] = values
                seeds[BEFORE][seed] = found.get(BEFORE, {})
    return {arm: each for arm, each in seeds.items() if len(each) > 1}


def over_seeds(after: Seeds, before: Seeds, figure: str) -> str:
    """The mean difference over the seeds and the items that all of them have, with an interval for other seeds and
    other items, and the difference of every seed."""
    seeds = sorted(seed for seed in after.keys() & before.keys() if figure in after[seed] and figure in before[seed])
    pairs = [(after[seed][figure], before[seed][figure]) for seed in seeds]
    items = sorted(set.intersection(*(one.keys() & other.keys() for one, other in pairs))) if pairs else []
    if not items:
        return ""
    weight = statistics.fmean(pairs[0][0][item][2] for item in items)  # a ratio of sums as a mean over items
    values = [[(one[item][1] - other[item][1]) / weight for item in items] for one, other in pairs]
    found = crossed_interval(values)
    edges = "" if found.low is None else f" [{found.low:+.3f}, {found.high:+.3f}]"
    return f"{found.mean:+.3f}{edges} ({', '.join(f'{statistics.fmean(row):+.3f}' for row in values)})"


def seeds_table(seeds: Mapping[str, Seeds], names: Sequence[str], minus: str) -> list[str]:
    lines = ["| policy | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for arm in sorted(seeds.keys() - {BEFORE, minus}):
        lines.append(f"| {arm} | " + " | ".join(over_seeds(seeds[arm], seeds[minus], name) for name in names) + " |")
    return lines


def table(found: Mapping[str, Mapping[str, Values]], names: Sequence[str], *, minus: str | None = None) -> list[str]:
    """A line per arm: its figures, or how they differ from those of the arm `minus`."""
    counts = {name: max((len(each[name]) for each in found.values() if name in each), default=0) for name in names}
    columns = " | ".join(f"{name} (n = {counts[name]})" for name in names)
    lines = [f"| policy | {columns} |", "|---" * (len(names) + 1) + "|"]
    for arm, values in found.items():
        if arm == minus:
            continue
        before = found.get(minus or "", {})
        cells = (
            "" if name not in values else change(values[name], before.get(name, {})) if minus else mean(values[name])
            for name in names
        )
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return lines


def seconds(folder: Path) -> list[str]:
    rows = [(path.stem, read_json(path)) for path in (folder / "stages").glob("*.json")]
    lines = ["| stage | seconds | of a processor | load |", "|---|---|---|---|"]
    for name, row in sorted(rows, key=lambda one: one[0]):
        if row["finished"]:
            load = " to ".join(f"{value:.1f}" for value in row["load"])
            lines.append(f"| {name} | {row['seconds']:,.0f} | {row['cpu_seconds']:,.0f} | {load} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="The tables of a pretrained policy.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="FOLDER_OR_FILE")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the items behind the tables, and no table")
    given = parser.parse_args()
    runs = {path: figures(path) for path in given.runs}
    if given.save:
        if len(runs) > 1:
            parser.error("--save takes one run")
        save(given.save, *runs.values())
        return
    for path, found in runs.items():
        print(f"# {path}\n")
        show(tables(found))
        if path.is_dir():
            show([("Seconds", seconds(path))])
    seeds = by_seed(list(runs.values()))
    for arm in (BEFORE, "pivot", "pivot-r16", "online"):
        if arm in seeds:
            show([(f"Over seeds and items, change from {arm}", seeds_table(seeds, (*INSIDE, *BESIDE), arm))])


def tables(found: Mapping[str, Mapping[str, Values]]) -> list[tuple[str, list[str]]]:
    """Of one run: a title and its lines each."""
    return [
        ("In the task", table(found, INSIDE)),
        (f"In the task, change from {BEFORE}", table(found, INSIDE, minus=BEFORE)),
        ("Beside it: log-likelihood in nats a token; instructions followed", table(found, BESIDE)),
        (f"Beside it, change from {BEFORE}", table(found, BESIDE, minus=BEFORE)),
        *(
            (f"Change from {arm}", table(_of_seed(found, arm), (*INSIDE, *BESIDE), minus=arm))
            for arm in found
            if arm.startswith("pivot.")
        ),
    ]


def show(parts: Sequence[tuple[str, list[str]]]) -> None:
    for title, lines in parts:
        print(f"## {title}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
