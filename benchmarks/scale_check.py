"""The simulated runs of `scale_events` against measured ones with 1, 2 and 4 rollout workers.

    python benchmarks/scale_check.py --out FOLDER [--tool-seconds 0.5] [--json PATH]

The rooms of async_rollouts.py in groups of four, with tools so slow that two cores are enough for four workers. All
costs and all rollouts are taken from the run with one worker; the other runs are `predicted` from them. Where other
work makes the engine slower in one run than in another, that fails for a reason of its own: `schedule` is predicted
from the rollouts and the engine's and the trainer's seconds of the run itself. `measured` are the seconds of a step,
from the end of the first to that of the last but one. Killed, the same command goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rollouts import config, measured, start_ray
from scale_events import Cluster, Costs, Engine, Group, Rollout, Run, Turn

from turntree.cli.common import finish
from turntree.core.tree import RolloutTree
from turntree.logs.trees import KeptTree
from turntree.run.folder import RunDirectory
from turntree.stages.config import EpisodesCheckConfig, TrainOnlineConfig

RUNS = ((1, 0), (2, 0), (4, 0), (4, 1), (2, 1), (4, 2))  # workers, staleness


def settings(workers: int, staleness: int, given: argparse.Namespace) -> TrainOnlineConfig:
    plain = config(given.seed, staleness, argparse.Namespace(**vars(given), workers=workers))
    return replace(
        plain, train=replace(plain.train, group_size=given.size), check=EpisodesCheckConfig(tasks=1), keep_trees=None
    )


def recorded(folder: Path) -> list[list[RolloutTree]]:
    """The kept trees of a run, by iteration."""
    kept = [KeptTree.from_json(row) for row in RunDirectory(folder).rows("trees.jsonl")]
    by_iteration = itertools.groupby(kept, key=lambda one: one.iteration)
    return [[one.tree for one in trees] for _, trees in by_iteration]


def group(tree: RolloutTree) -> Group:
    """A tree without forks, as the simulation reads it."""
    prompt = len(tree[0].token_ids)
    return Group(prompt=prompt, rollouts=[Rollout(turns=_turns(tree, leaf)) for leaf in tree.ends()])


def _turns(tree: RolloutTree, leaf: int) -> list[Turn]:
    turns: list[Turn] = []
    given = 0.0
    for node in tree.nodes_of(leaf):
        one = tree[node]
        if one.sampled:
            turns.append((given, len(one.token_ids), 0.0))
            given = 0.0
        elif turns:
            told, sampled, seconds = turns[-1]
            turns[-1] = (told, sampled, seconds + one.cost.environment_seconds)
            given = len(one.token_ids)
    return turns


def costs(folder: Path, iterations: Sequence[Sequence[RolloutTree]]) -> Costs:
    """A decoding step gets all of the engine's seconds, prompts included. With one worker, a unit gets what the trainer
    waited beyond tools and engine."""
    trees = [tree for one in iterations for tree in one]
    groups = [group(tree) for tree in trees]
    engine = sum(tree.cost.engine_seconds for tree in trees)
    tools = sum(tree.cost.environment_seconds for tree in trees)
    steps = sum(longest(one) for one in groups)
    rows = [row for row in RunDirectory(folder).metrics() if row["step"]]
    ends = [row["at"] for row in RunDirectory(folder).rows("clock.jsonl") if row["step"]]
    waits = [row["timing"]["wait_seconds"] for row in rows]
    inner = range(1, len(rows) - 1)  # the first waits for the worker to start, the last is checked
    update = sum(ends[i] - ends[i - 1] - waits[i] for i in inner) / len(inner)
    busy = [sum(tree.cost.engine_seconds + tree.cost.environment_seconds for tree in iterations[i]) for i in inner]
    idle = sum(waits[i] for i in inner) - sum(busy)
    unit = idle / sum(len(iterations[i]) for i in inner)
    print(f"engine {engine:.1f} s, tools {tools:.1f} s, update {update:.2f} s, unit {unit:.3f} s", file=sys.stderr)
    return Costs(engine=Engine(step=engine / steps), trained=0.0, update=update, unit=unit, inline_tools=True)


def longest(one: Group) -> float:
    """Decoding steps of a group whose rollouts take their turns together."""
    turns = itertools.zip_longest(*(rollout.turns for rollout in one.rollouts), fillvalue=(0.0, 0.0, 0.0))
    return sum(max(sampled for _, sampled, _ in turn) for turn in turns)


def predicted(paid: Costs, iterations: Sequence[Sequence[Group]], workers: int, staleness: int) -> float:
    """Seconds of a step, over those that are measured."""
    cluster = Cluster(replicas=workers, staleness=staleness)
    steps = Run(paid, cluster, lambda i: iterations[i], len(iterations)).steps
    return (steps[-2].ended - steps[0].ended) / (len(steps) - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--size", type=int, default=4, help="rollouts of a group")
    parser.add_argument("--tool-seconds", type=float, default=0.5)
    parser.add_argument("--runs", type=int, default=len(RUNS), help=f"the first of {RUNS} (workers, staleness)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH")
    given = parser.parse_args()
    start_ray(max(workers for workers, _ in RUNS))
    rows: list[dict[str, Any]] = []
    first: tuple[Costs, list[list[Group]]] | None = None
    for workers, staleness in RUNS[: given.runs]:
        folder = given.out / f"workers{workers}.staleness{staleness}"
        seconds = measured(settings(workers, staleness, given), folder)["seconds"] / (given.iterations - 2)
        trees = recorded(folder)
        own = costs(folder, trees), [[group(tree) for tree in one] for one in trees]
        first = first or own
        models = {
            "predicted": predicted(*first, workers, staleness),
            "schedule": predicted(replace(own[0], unit=first[0].unit), own[1], workers, staleness),
        }
        errors = {f"{name}_error": round(model / seconds - 1, 4) for name, model in models.items()}
        row = {"workers": workers, "staleness": staleness, "measured": seconds, **models, **errors}
        rows.append(row | {"decoding_step": own[0].engine.step, "update": own[0].update})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    text = (
        "{workers} workers, staleness {staleness}: {measured:.2f} s a step, predicted {predicted:.2f} "
        "({predicted_error:+.1%}), its schedule {schedule:.2f} ({schedule_error:+.1%})"
    )
    result = {"rows": rows, "settings": {**vars(given), "out": str(given.out)}}
    finish(result, given.json, [text.format(**row) for row in rows])


if __name__ == "__main__":
    main()
