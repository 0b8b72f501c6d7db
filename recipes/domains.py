"""Four real domains, from files to trained adapters: python recipes/domains.py FOLDER --data DATA [--model FOLDER]

Conversational tool use (tau-bench), software engineering (SWE-agent), terminal (InterCode) and search (ReAct), each in
a folder of its own: import, cut to a length that a CPU can bear, a warm start on a part of the training traces (a
policy that never succeeds has no pivot), profile and select on others, then SFT and three kinds of reinforcement on
LoRA adapters (random turns, exact match, PivotRL), and the acceptance of all at turns of held-out traces.

  --model     a pretrained policy, for example what `recipes/smollm2/convert.py` writes; without it a tiny one (1 M)
  --smoke     a handful of everything, to see that it runs and what it costs
  --plan      list the stages, and run none;  --only PATTERN ('tau2/*', '*/accept.*') runs some
  --table     print the tables of what is there

Every stage is one command, and is recorded in FOLDER/DOMAIN/stages with its seconds. The same command goes on with a
recipe that was killed. Text is shortened (`cut`), so a figure of this recipe is none of the benchmarks'.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from book import GIVEN, Book, Stage, words

from turntree.core.errors import TurntreeError
from turntree.core.messages import Message
from turntree.pivots.select import is_pivot
from turntree.run.artifacts import PROFILE
from turntree.run.files import read_json
from turntree.run.statistics import clustered_wilson, t_interval
from turntree.stages.policy import resolve
from turntree.traces.candidates import skipped_turns
from turntree.traces.schema import Trace, read_traces, write_traces

HERE = Path(__file__).resolve().parent
ARMS = ("sft", "random", "strict", "pivot")
Accepted = dict[str, dict[int, float]]  # the share of accepted rollouts, by trace and turn


@dataclass(frozen=True)
class Domain:
    """Where its traces are, how they are imported, and how they are judged."""

    source: str
    importing: tuple[str, ...] = ()
    judging: tuple[str, ...] = ()
    sizes: dict[str, Any] = field(default_factory=dict)  # settings that differ where traces are few or commands rare


KNOWN = ("--success-only",)  # the others do not say what succeeded
FEW = ("--dev", "0.35")  # of some thirty traces a tenth is none
DOMAINS = {
    "tau2": Domain("tau2/trajectories", (*KNOWN, "--candidates", "tool_calls")),
    "swe": Domain(
        "swe_agent/demonstrations.tar.xz",
        ("--dev", "0.2"),
        judging=("--set", "verifier.domain=swe"),
        sizes={"turns": 8, "held_out": (16, 6), "epochs": 4},
    ),
    "terminal": Domain(
        "intercode/trajectories",
        judging=("--set", "verifier.domain=terminal"),
        sizes={"warm": 64, "rest": 64, "turns": 2},
    ),
    "search": Domain(
        "hotpot_react/100_questions_5_trials.txt.xz",
        (*KNOWN, *FEW),
        sizes={"turns": 8, "held_out": (16, 4), "epochs": 4},
    ),
}


@dataclass(frozen=True)
class Settings:
    """How much of everything. The usual ones are of a pretrained policy of 135 M parameters."""

    model: str
    device: tuple[str, ...] = ("--set", "device.dtype=bfloat16", "--set", "device.threads=1")
    chars: int = 6000  # of a trace; a token has three to four
    message: int = 400  # characters that are kept of a message of the user or a tool, and twice as many of the system's
    warm: int = 24  # traces of the warm start; the arms learn from others
    rest: int = 24
    known: bool = False  # the arms learn from the traces of the warm start
    turns: int = 4  # of each of those that are profiled
    held_out: tuple[int, int] = (16, 2)  # traces, and turns of each, for acceptance
    rollouts: int = 16
    samples: int = 8
    tokens: int = 96
    path: int = 2048  # tokens of a state and its completion; longer ones are left out and counted
    epochs: int = 2  # of the warm start
    warm_rate: float = 2e-4
    rate: float = 5e-4  # of the arms, which train adapters; at 1e-4 fifteen updates move nothing (KL 0.0004)
    rank: int = 8
    steps: int = 15  # updates of an arm; SFT has an epoch
    states: int = 4
    group: int = 8
    threshold: float = 1.0  # lambda: keep reward means below this


TINY = Settings(  # it memorises a few traces at most, so the arms have those of the warm start
    model="../tiny", device=(), warm=6, known=True, turns=4, held_out=(6, 2), rollouts=8, samples=4, path=8192,
    chars=6000, epochs=30, warm_rate=2e-3, rate=2e-3, steps=10, states=8,
)  # fmt: skip
SMOKE = {
    "warm": 2, "rest": 2, "turns": 2, "held_out": (1, 2), "rollouts": 4, "samples": 2, "tokens": 64, "epochs": 1,
    "steps": 1, "states": 2, "group": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The stages of one domain."""

    book: Book
    name: str
    data: Path
    settings: Settings

    def run(self, arms: Sequence[str], seeds: Sequence[int]) -> None:
        options, domain = self.settings, DOMAINS[self.name]
        made = words("traces", "import", self.data / domain.source, *domain.importing, "--out", "imported.jsonl")
        imported = Stage("imported", "imported.jsonl", made)
        lengths = [(key, getattr(options, key)) for key in ("chars", "message", "warm", "rest", "turns")]
        lengths += [("held-out", ",".join(map(str, options.held_out)))]
        told = [word for key, value in lengths for word in (f"--{key}", value)] + ["--known"] * options.known
        cut = Stage("cut", "held_out.jsonl", words("domains.py", "cut", imported.result, *told), (imported,))
        for stage in (imported, cut):
            self.book.run(stage)
        base = Stage("base", options.model, GIVEN)
        self.accept("base", base, cut)
        warm = self.sft("warm", base, "warm.traces.jsonl", options.epochs, options.warm_rate, 2, (), cut)
        self.book.run(warm)
        self.accept("warm", warm, cut)
        for seed in seeds:
            for arm in arms:
                stage = self.arm(arm, seed, warm, cut)
                if stage is not None:
                    self.book.run(stage)
                    self.accept(stage.name, stage, cut)
        if (self.book.folder / "pivot.0/cost.json").exists():
            self.book.run(Stage("report", "report.html", words("report", "pivot.0", "--out", "report.html"), (warm,)))

    def arm(self, arm: str, seed: int, warm: Stage, cut: Stage) -> Stage | None:
        """None where there is nothing to train on: no state has a variance, or its profile is not there yet."""
        options, name = self.settings, f"{arm}.{seed}"
        adapter = words("--set", f"device.lora.rank={options.rank}", "--set", f"device.lora.alpha={2 * options.rank}")
        if arm == "sft":
            return self.sft(name, warm, "rest.jsonl", 1, options.rate, 4, (*adapter, "--seed", str(seed)), cut)
        states = self.selected("random" if arm == "random" else "pivots", warm, cut)
        if states is None:
            return None
        command = words(
            *("train", "pivot", states.result, "--model", warm.model, "--seed", seed, "--steps", options.steps),
            *("--learning-rate", options.rate, "--max-tokens", options.tokens, "--keep-trees", "none"),
            *("--set", f"train.groups={options.states}", "--set", f"train.group_size={options.group}"),
            *("--set", f"train.max_tokens={options.path}", *(["--verifier", "strict"] if arm == "strict" else [])),
            *(*adapter, *options.device, "--out", name),
        )
        return Stage(name, f"{name}/cost.json", command, (states,))

    def selected(self, rule: str, warm: Stage, cut: Stage) -> Stage | None:
        profiled = self.profile("profile", warm, "pool.jsonl", "train", self.settings.rollouts, cut)
        self.book.run(profiled)
        if self.book.plan or not self.book.done(profiled):
            return None
        header, rows = PROFILE.read(self.book.folder / profiled.result)
        if not any(is_pivot(row, self.settings.threshold) for row in rows):
            classes = header["summary"]["classes"]
            print(f"{self.name}: no state is a pivot ({classes}), so nothing to reinforce", flush=True)
            return None
        command = words("select", profiled.result, "--rule", rule, "--threshold", self.settings.threshold)
        command += words("--max-per-kind", 1, "--anchor-share", 0)  # the paper's form
        stage = Stage(rule, f"{rule}.jsonl", (*command, "--out", f"{rule}.jsonl"), (profiled,))
        self.book.run(stage)
        return stage if self.book.done(stage) else None

    def sft(
        self,
        name: str,
        model: Stage,
        traces: str,
        epochs: int,
        rate: float,
        batch: int,
        more: Sequence[str],
        cut: Stage,
    ) -> Stage:
        command = words(
            *("sft", "--model", model.model, "--traces", traces, "--epochs", epochs, "--learning-rate", rate),
            *("--set", f"sft.batch={batch}", *more, *self.settings.device, "--out", name),
        )
        return Stage(name, f"{name}/cost.json", command, (model, cut))

    def accept(self, name: str, model: Stage, cut: Stage) -> None:
        self.book.run(self.profile(f"accept.{name}", model, "held_out.jsonl", "dev", self.settings.samples, cut))

    def profile(self, name: str, model: Stage, traces: str, split: str, rollouts: int, cut: Stage) -> Stage:
        options = self.settings
        command = words(
            *("profile", "--model", model.model, "--traces", traces, "--split", split, "--rollouts", rollouts),
            *("--max-tokens", options.tokens, "--set", f"profile.max_path={options.path}"),
            *("--verifier", "recommended", *DOMAINS[self.name].judging, *options.device, "--out", f"{name}.jsonl"),
        )
        return Stage(name, f"{name}.jsonl", command, (model, cut))


# the script of the stage `cut`


def cut_main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("imported", type=Path)
    for name in ("chars", "message", "warm", "rest", "turns"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--known", action="store_true")
    given = parser.parse_args(arguments)
    held_out, turns = map(int, given.held_out.split(","))
    folder, traces = (
        given.imported.parent,
        [cut(one, given.chars, given.message) for one in read_traces(given.imported)],
    )
    kept = [one for one in traces if one is not None and _candidates(one)]
    whole = sorted(kept, key=lambda trace: trace.id[::-1])  # mixes the sources
    train, dev = ([one for one in whole if one.split == split] for split in ("train", "dev"))
    warm = min(given.warm, len(train) // 2)  # of few traces both parts have some
    rest = train[:warm] if given.known else train[warm : warm + given.rest]
    parts = {
        "warm.traces": train[:warm],
        "rest": rest,
        "pool": [_some(trace, given.turns) for trace in rest],
        "held_out": [_some(trace, turns) for trace in dev[:held_out]],  # last: its file says that all are there
    }
    for name, part in parts.items():
        if not part:
            told = f"{len(train)} training and {len(dev)} held-out traces"
            raise SystemExit(f"{given.imported}: {told} leave none for {name}")
        write_traces(folder / f"{name}.jsonl", part)


def cut(trace: Trace, chars: int, message: int) -> Trace | None:
    """The beginning of a trace, its last message an assistant's; None where that is not in it. Long messages that the
    policy did not write are shortened; its own are demonstrations and stay whole."""
    said: list[Message] = []
    for one in trace.messages:
        most = {"system": 2 * message, "assistant": len(one.content)}.get(one.role, message)
        said.append(one if len(one.content) <= most else replace(one, content=f"{one.content[:most]} ..."))
        if sum(len(m.content) + sum(len(json.dumps(c.arguments)) for c in m.tool_calls) for m in said) > chars:
            said.pop()
            break
    while said and said[-1].role != "assistant":
        said.pop()
    if not said:
        return None
    turns = sum(one.role == "assistant" for one in said)
    skipped = {turn: why for turn, why in trace.meta.get("skip_turns", {}).items() if int(turn) < turns}
    return replace(trace, messages=tuple(said), meta={**trace.meta, "skip_turns": skipped})


def _candidates(trace: Trace) -> list[int]:
    marked = skipped_turns(trace)
    return [turn for turn in range(len(trace.turn_positions)) if turn not in marked]


def _some(trace: Trace, count: int) -> Trace:
    """`count` of its candidates, spread over it."""
    turns = _candidates(trace)
    kept = {turns[place * len(turns) // min(count, len(turns))] for place in range(min(count, len(turns)))}
    drawn = {str(turn): "not_drawn" for turn in turns if turn not in kept}
    return replace(trace, meta={**trace.meta, "skip_turns": {**trace.meta.get("skip_turns", {}), **drawn}})


# the tables


def table(folder: Path, domains: Sequence[str]) -> Iterator[str]:
    """Markdown: what was profiled with processor hours; acceptance by arm, and minus the warm start."""
    yield "| domain | candidates profiled | classes | left out | CPU hours so far |"
    yield "|---|---|---|---|---|"
    found: dict[str, dict[str, Accepted]] = {}
    samples: set[int] = set()  # rollouts of a turn
    for name in domains:
        told = _summary(folder / name / "profile.jsonl")
        classes, skipped = (", ".join(f"{n} {k}" for k, n in told[key].items()) for key in ("classes", "skipped_turns"))
        records = [read_json(path) for path in sorted((folder / name / "stages").glob("*.json"))]
        hours = math.fsum(record.get("cpu_seconds", 0.0) for record in records) / 3600
        yield f"| {name} | {told['candidates']} | {classes} | {skipped} | {hours:.2f} |"
        files = sorted((folder / name).glob("accept.*.jsonl"))
        found[name] = {}
        for path in files:
            header, rows = PROFILE.read(path)
            samples.add(header["config"]["profile"]["rollouts"])
            found[name][path.name.removeprefix("accept.").removesuffix(".jsonl")] = _accepted(rows)
        found[name] |= _over_seeds(found[name])
    arms = sorted({arm for cells in found.values() for arm in cells}, key=_order)
    together: dict[str, Accepted] = {arm: {} for arm in arms}
    for name, cells in found.items():
        for arm, traces in cells.items() if len(cells) == len(arms) else ():  # of domains that have every arm
            together[arm] |= {f"{name}/{trace}": turns for trace, turns in traces.items()}
    pivot = next((arm for arm in arms if arm.partition(".")[0] == "pivot"), "")  # over seeds, where it has several
    tables: list[tuple[str, Callable[[Accepted, dict[str, Accepted]], str]]] = [
        ("acceptance at held-out turns", lambda arm, cells: _share(arm, min(samples))),
        ("minus the warm start, points", lambda arm, cells: _difference(arm, cells.get("warm", {}))),
        (f"{pivot} minus, points", lambda arm, cells: _difference(cells.get(pivot, {}), arm)),
    ]
    for title, cell in tables:
        yield ""
        yield f"| {title} | {' | '.join(arms)} |"
        yield "|---" * (len(arms) + 1) + "|"
        for name, cells in (found | {"together": together}).items():
            yield f"| {name} | {' | '.join(cell(cells[arm], cells) if arm in cells else 'none' for arm in arms)} |"


def _over_seeds(cells: dict[str, Accepted]) -> dict[str, Accepted]:
    """The arms with several seeds: the mean at the turns that all of them were judged at."""
    seeds: dict[str, list[Accepted]] = {}
    for arm, accepted in cells.items():
        seeds.setdefault(arm.partition(".")[0], []).append(accepted)
    return {
        arm: {
            trace: {
                turn: math.fsum(one[trace][turn] for one in several) / len(several)
                for turn in turns
                if all(turn in one.get(trace, {}) for one in several)
            }
            for trace, turns in several[0].items()
        }
        for arm, several in seeds.items()
        if len(several) > 1
    }


def _order(arm: str) -> tuple[int, str]:
    kind = arm.partition(".")[0]
    known = ("base", "warm", *ARMS)
    return known.index(kind) if kind in known else len(known), arm


def _summary(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"candidates": 0, "classes": {}, "skipped_turns": {}}
    return PROFILE.read(path)[0]["summary"]


def _accepted(rows: Iterable[dict[str, Any]]) -> Accepted:
    found: Accepted = {}
    for row in rows:
        if row["reward_mean"] is not None:
            found.setdefault(row["trace_id"], {})[row["turn"]] = row["reward_mean"]
    return found


def _share(arm: Accepted, rollouts: int) -> str:
    """Accepted ones of `rollouts` at each turn, with an interval over traces: turns of one trace, and samples at one
    turn, are not independent."""
    sums = [rollouts * math.fsum(turns.values()) for turns in arm.values()]
    counts = [rollouts * len(turns) for turns in arm.values()]
    if not sums:
        return "none judged"
    low, high = clustered_wilson(sums, counts)
    turns = sum(counts) // rollouts
    return f"{sum(sums) / sum(counts):.1%} [{low:.1%}, {high:.1%}] of {turns} ({len(sums)} traces)"


def _difference(arm: Accepted, other: Accepted) -> str:
    """At the turns that both were judged at: the mean over traces of a trace's mean, with Student's interval."""
    paired = [
        [mean - other[trace][turn] for turn, mean in turns.items() if turn in other[trace]]
        for trace, turns in arm.items()
        if trace in other
    ]
    values = [math.fsum(each) / len(each) for each in paired if each]
    if not values or arm is other:
        return ""
    found = t_interval(values)
    interval = "" if found.low is None else f" [{100 * found.low:+.1f}, {100 * (found.high or 0):+.1f}]"
    return f"{100 * found.mean:+.1f}{interval}"


def tiny(folder: Path) -> None:
    """The embedded policy whose template shows tools, with room for long prompts (its positions are rotary)."""
    if not folder.exists():
        shutil.copytree(resolve("qa"), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32_768}))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the traces (default: %(default)s)")
    parser.add_argument("--model", default="", help="a pretrained policy (default: a tiny one)")
    parser.add_argument("--domains", default=",".join(DOMAINS))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of DOMAIN/STAGE")
    for flag in ("--plan", "--smoke", "--table"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args(arguments)
    domains, folder = given.domains.split(","), given.folder.resolve()
    wrong = [*(set(domains) - DOMAINS.keys()), *(set(given.arms.split(",")) - {*ARMS})]
    if wrong:
        parser.error(f"{wrong[0]!r} is not known; domains: {', '.join(DOMAINS)}; arms: {', '.join(ARMS)}")
    usual = Settings(str(Path(given.model).resolve())) if given.model else TINY
    for name in domains if not given.table else ():
        (folder / name).mkdir(parents=True, exist_ok=True)
        if not given.model:
            tiny(folder / "tiny")
        of, slash, stages = given.only.partition("/")
        only = (stages if slash else "*") if fnmatch.fnmatch(name, of) else ""
        sizes = SMOKE if given.smoke else DOMAINS[name].sizes if given.model else {}
        settings = replace(usual, **sizes)
        book = Book(folder / name, HERE, only, given.plan)
        Recipe(book, name, given.data.resolve(), settings).run(
            given.arms.split(","), [int(seed) for seed in given.seeds.split(",")]
        )
    if not given.plan:
        print("\n".join(table(folder, domains)))


if __name__ == "__main__":
    try:
        cut_main(sys.argv[2:]) if sys.argv[1:2] == ["cut"] else main()
    except TurntreeError as error:
        raise SystemExit(str(error)) from error
