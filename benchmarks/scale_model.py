"""A model of a run on 64 to 1,024 GPUs: seconds of a step, and what rollout and train GPUs do meanwhile.

    python benchmarks/scale_model.py [--gpus 64 256 1024] [--tool-seconds 2] [--thinking 500] [--json PATH]

It simulates (`scale_events`) tasks drawn from recorded rollouts (`scale_rollouts.json`) on GPUs whose costs are assumed
(`Assumed`): none was at hand. docs/results/scale.md says what it assumes and does not know.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from scale_events import REFILL, Cluster, Costs, Engine, Group, Rollout, Run, figures

from turntree.cli.common import finish
from turntree.report.figures import MUTED, OTHERS, drawing

FIGURE = "only draw what --json of this and of scale_check.py wrote"
ROLLOUTS = Path(__file__).with_name("scale_rollouts.json")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Groups drawn from recorded tasks: `size` rollouts with replacement from a task's own, so tasks stay long or
    short. Every turn also samples `thinking` tokens, which stay in the context. Tools take lognormal seconds of this
    mean and sigma, independently."""

    tasks: Sequence[Sequence[Sequence[tuple[int, int]]]]
    prompt: float
    size: int = 8
    thinking: int = 0
    tool_seconds: float = 2.0
    tool_sigma: float = 1.0

    def group(self, draw: random.Random) -> Group:
        task = draw.choice(self.tasks)
        return Group(prompt=self.prompt, rollouts=[self._rollout(draw, draw.choice(task)) for _ in range(self.size)])

    def _rollout(self, draw: random.Random, turns: Sequence[tuple[int, int]]) -> Rollout:
        middle = math.log(self.tool_seconds) - self.tool_sigma**2 / 2
        sizes = [(given, sampled + self.thinking) for given, sampled in turns]
        return Rollout(turns=[(*size, draw.lognormvariate(middle, self.tool_sigma)) for size in sizes])


Mode = Literal["none", "gate", "branching"]
MODES: tuple[Mode, ...] = ("none", "gate", "branching")


def gated(group: Group, draw: random.Random, *, turn: int = 10, share: float = 0.2) -> Group:
    """Cut at `turn` with this chance, where a rollout goes on: nothing of the group is trained on."""
    if draw.random() >= share or max(len(one.turns) for one in group.rollouts) <= turn:
        return group
    return replace(group, rollouts=[replace(one, turns=one.turns[:turn]) for one in group.rollouts], trained=False)


def branched(group: Group, draw: random.Random, *, spent: float = 0.7) -> Group:
    """Half of the rollouts leave another one after a turn at random; where none is left to leave, and for the part of
    the budget that a paced rule does not spend, they are refills."""
    starts = list(group.rollouts[: (len(group.rollouts) + 1) // 2])
    found = list(starts)
    for number, other in enumerate(group.rollouts[len(starts) :]):
        parent = number % len(starts)
        turns = starts[parent].turns
        forks = range(1, min(len(turns), len(other.turns)))
        if not forks or draw.random() >= spent:
            found.append(replace(other, parent=REFILL))
            continue
        fork = draw.choice(forks)
        shared = sum(given + sampled for given, sampled, _ in turns[:fork])
        found.append(Rollout(turns=other.turns[fork:], parent=parent, fork=fork, shared=shared))
    return replace(group, rollouts=found)


def drawn(workload: Workload, mode: Mode, count: int, seed: int = 0) -> Callable[[int], Sequence[Group]]:
    """The groups of an iteration: the same for all modes before a gate or a brancher changes them."""

    def draw(iteration: int) -> Sequence[Group]:
        plain, own = random.Random(f"{seed} {iteration}"), random.Random(f"{seed} {iteration} {mode}")
        groups = [workload.group(plain) for _ in range(count)]
        change = {"none": lambda group, _: group, "gate": gated, "branching": branched}[mode]
        return [change(group, own) for group in groups]

    return draw


# GPUs: assumed, because none was at hand


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """A dense model in bfloat16 on H100 SXM cards. From the data sheet: 3.35 TB/s, 989 dense TFLOP/s. The rest are
    assumptions, with what they rest on."""

    parameters: float = 8e9
    context_bytes: float = 131072.0  # keys and values of a token: 32 layers, 8 heads of 128, two bytes
    bandwidth: float = 3.35e12
    flops: float = 989e12
    decode_share: float = 0.7  # of the bandwidth; vLLM reached 0.77 on an A100 at one request
    prefill_share: float = 0.5  # of the FLOP/s
    train_share: float = 0.35  # of the FLOP/s, with FSDP over hundreds of cards
    train_flops: float = 8.0  # a parameter and token: forward, backward, and the forward again (checkpointing)
    transfer: float = 10e9  # bytes a second of new weights into a replica
    sync: float = 1.0  # seconds to stop a replica and start it again
    unit: float = 0.05

    def costs(self) -> Costs:
        reads = self.bandwidth * self.decode_share
        engine = Engine(
            step=2 * self.parameters / reads,
            sequence=2 * self.parameters / self.flops,
            context=self.context_bytes / reads,
            prefill=2 * self.parameters / (self.flops * self.prefill_share),
        )
        token = self.parameters / (self.flops * self.train_share)
        sync = self.sync + 2 * self.parameters / self.transfer
        return Costs(engine=engine, trained=self.train_flops * token, scored=2 * token, sync=sync, unit=self.unit)


def grid(given: argparse.Namespace, workload: Workload, costs: Costs) -> Iterator[dict[str, Any]]:
    for gpus, share, mode, staleness in itertools.product(given.gpus, given.shares, given.modes, given.staleness):
        replicas, count = round(gpus * share), max(1, round(gpus * given.groups))
        workers = max(1, min(given.workers, math.ceil(count * (1 + staleness) / replicas)))
        cluster = Cluster(
            replicas=replicas,
            workers=workers,
            trainers=gpus - replicas,
            staleness=staleness,
            max_tokens=given.max_tokens,
        )
        draw = drawn(workload, mode, count, given.seed)
        run = Run(costs, cluster, draw, given.iterations + staleness)
        found = {name: round(value, 4) for name, value in figures(run).items()}
        yield {"gpus": gpus, "rollout_share": share, "mode": mode, "staleness": staleness, **found}


def best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The split with the shortest step, for every number of GPUs, mode and staleness."""
    key = ("gpus", "mode", "staleness")
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["seconds"]):
        found[tuple(row[name] for name in key)] = row
    return [found[each] for each in sorted(found, key=lambda each: (each[0], MODES.index(each[1]), each[2]))]


def figure(chosen: Sequence[dict[str, Any]], checked: Sequence[dict[str, Any]]) -> str:
    """Seconds of a step, measured and predicted on rollout workers (where `checked`), and predicted on GPUs."""
    with drawing("scale", 8.8, 3.0) as (drawn_on, made):
        left, right = drawn_on.subplots(1, 2)
        for staleness, mark in ((0, "o"), (1, "^"), (2, "s")):
            rows = [row for row in checked if row["staleness"] == staleness]
            points = [[row[name] for row in rows] for name in ("measured", "predicted")]
            left.plot(*points, mark, color=OTHERS[staleness][0], label=f"staleness {staleness}")
        most = max([row["measured"] for row in checked], default=1.0)
        left.plot([0, most], [0, most], color=MUTED, linewidth=0.8)
        left.set(title="Workers, seconds of a step", xlabel="measured", ylabel="predicted")
        left.legend()
        for mode, line_style in (("none", "-"), ("gate", "--"), ("branching", ":")):
            for staleness in (0, 2):
                rows = [row for row in chosen if (row["mode"], row["staleness"]) == (mode, staleness)]
                points = [[row[name] for row in rows] for name in ("gpus", "seconds")]
                name = f"{mode}, staleness {staleness}"
                right.plot(*points, line_style, marker="o", color=OTHERS[staleness][0], label=name)
        right.set(title="GPUs, seconds of a step", xlabel="GPUs", xscale="log", ylim=(0, None))
        gpus = sorted({row["gpus"] for row in chosen})
        right.set_xticks(gpus, [str(count) for count in gpus])
        right.minorticks_off()
        right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return made[0].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def line(row: dict[str, Any]) -> str:
    return (
        "{gpus:>5} GPUs, {rollout_share:.0%} for rollouts, {mode}, staleness {staleness}: {seconds:.1f} s a step; "
        "rollout GPUs busy {rollout_busy:.0%} (effective {rollout_effective:.0%}), train GPUs {train_busy:.0%}, "
        "tail {tail:.0%}"
    ).format(**row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="of the GPUs, to sample")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--groups", type=float, default=0.5, help="tasks of an iteration for each GPU, of 8 rollouts each"
    )
    parser.add_argument("--workers", type=int, default=16, help="most groups that a replica plays at once")
    parser.add_argument("--max-tokens", type=int, default=16384, help="train.max_tokens: larger trees are cut")
    parser.add_argument("--iterations", type=int, default=6, help="simulated, the first two left out")
    parser.add_argument("--tool-seconds", type=float, default=2.0, help="mean seconds of a tool")
    parser.add_argument("--tool-sigma", type=float, default=1.0, help="of its logarithm")
    parser.add_argument("--thinking", type=int, default=500, help="tokens that a turn samples beside the recorded ones")
    parser.add_argument("--parameters", type=float, default=8e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one small setting, to see that it runs")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--figure", nargs=3, type=Path, metavar=("SVG", "ROWS", "CHECK"), help=FIGURE)
    given = parser.parse_args()
    if given.figure:
        path, rows_path, check_path = given.figure
        chosen, checked = (json.loads(each.read_text()) for each in (rows_path, check_path))
        path.write_text(figure(chosen["best"], checked["rows"]))
        return
    if given.quick:
        given.gpus, given.shares, given.iterations = [16], [0.5], 4
    recorded = json.loads(ROLLOUTS.read_text())
    sizes = {"thinking": given.thinking, "tool_seconds": given.tool_seconds, "tool_sigma": given.tool_sigma}
    workload = Workload(tasks=recorded["tasks"], prompt=recorded["prompt"], **sizes)
    rows: list[dict[str, Any]] = []
    for row in grid(given, workload, Assumed(parameters=given.parameters).costs()):
        rows.append(row)
        print(line(row), file=sys.stderr, flush=True)
    chosen = best(rows)
    finish({"settings": vars(given), "rows": rows, "best": chosen}, given.json, [line(row) for row in chosen])


if __name__ == "__main__":
    main()
