"""A pretrained policy on real work: python recipes/smollm2/recipe.py FOLDER [--plan] [--only PATTERN]

SmolLM2-135M-Instruct (`convert.py`) plays household games in rooms that it has not seen. From one warm start: SFT on
the rest of the traces at several learning rates, PivotRL, and GRPO at random turns, all with the same number of
updates. Then acceptance at held-out turns, what was forgotten, and success in held-out games.

RUNBOOK
  Every stage is one command, printed before it runs in FOLDER. `stages/NAME.json` there records the command, its
  seconds and the load of the machine. A stage whose record and result are there is skipped. Kill the recipe at any
  time: the same command goes on, a training after its last checkpoint (at most 300 s are lost), a profile after its
  last wave. A stage that was begun with other settings is refused: use another folder, or delete its record and
  its result. Run one training at a time on 24 GB: `online` takes up to 11 GB, `pivot` has taken 12.
  Tables grow: `--games 200` plays 150 more games after `--games 50`, `--items 100` scores 50 more passages and answers
  of each kind, `--seeds 0,1` adds a seed, `--arms` adds arms.
  `python recipes/smollm2/table.py FOLDER` prints the tables of what is there; docs/results/smollm2.md has the last
  ones, the seconds that stages took, and what is still open. In their order:

  base                     the pretrained policy as a folder
  traces                   expert play in easy games, divided into parts that share no game
  warm-N, warm-N.dev       SFT on N traces, more of them until it solves 15% of the development games
  accept.ARM               4 samples at each of 2 turns of 60 held-out traces: how many the verifier accepts
  keep.ARM.FROM            retention.py: 50 items each of Wikipedia, GSM8K and MATH by teacher forcing; instructions
  solve.ARM                with --problems N: N problems each of GSM8K and MATH, by sampling
  sft-RATE.SEED            an arm; its acceptance and retention follow it
  profile, pivots, random  16 samples at each of 4 turns of 60 traces, and what is selected of them
  pivot.SEED, random.SEED  arms
  online.SEED, branching.SEED   arms that play whole games (not in the default of --arms)
  gigpo.SEED               online whose turns are also compared at the same state
  own.SEED                 an arm at states of the policy's own games, with the balance of `select` (--arms own)
  own-online.SEED          from there half of online's updates
  sft-own.SEED, sft-own-online.SEED, sft-online.SEED   own, own-online and online after SFT at its first rate
  play.ARM.FROM            50 test games, from game number FROM

  `--rank 16` trains an adapter in each arm, from the same warm start and pivots, in the same folder; `--rate 1.5e-4`
  trains the arms other than sft at that rate (`pivot-0.00015.SEED`), in the same folder too. `--questions` is
  the same recipe on generated questions with tools, in a folder of its own; all of its `--games` are one stage. So is
  `--device cuda`, which computes on a GPU.

  `--only PATTERN` runs the stages whose name matches a shell pattern ('sft-*', 'keep.*'), where what they need is
  there. `--plan` lists the stages with their state.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from turntree.run.files import read_json
from turntree.traces.candidates import skipped_turns
from turntree.traces.schema import Trace, read_traces, write_traces

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from book import Book, Stage, words  # noqa: E402

ARMS = (
    "sft", "pivot", "random", "online", "branching", "gigpo", "own", "own-online", "sft-own", "sft-own-online",
    "sft-online",
)  # fmt: skip
ONLINE = {
    "online": (),
    "branching": words("--brancher", "entropy", "--set", "brancher.probe_tokens=2"),  # a command has some eight tokens
    "gigpo": words("--estimator", "turntree.credit.config:GIGPO"),
}


@dataclass(frozen=True)
class Settings:
    """How much of everything."""

    model: str = ""  # a folder or name; empty: get SmolLM2
    environment: tuple[str, ...] = ("household", "--difficulty", "easy")  # its name and options
    rank: int = 0  # of the adapter that the arms train; 0: all weights
    device: str = "cpu"
    dtype: str = "bfloat16"
    games: int = 480
    parts: tuple[int, ...] = (120, 180)  # traces of a warm start
    least: float = 0.15  # success below which there is too little to reinforce; above 60% too little is left to gain
    development: int = 24
    rest: int = 60  # traces that the arms learn from
    turns: int = 4  # of each of them that are profiled
    rollouts: int = 16
    held_out: tuple[int, int] = (60, 2)  # traces, and turns of each, for acceptance
    samples: int = 4
    batch: int = 4  # traces of an SFT update
    steps: int = 15  # updates of the other arms; an epoch of SFT has as many
    states: int = 8
    group: int = 8
    warm_rate: float = 2e-4
    rates: tuple[float, ...] = (7e-5, 2e-4, 5e-4)  # of SFT: what is forgotten is compared at equal gain
    rate: float = 5e-5  # of the other arms
    swept: bool = False  # another than that: their names have it
    max_turns: int = 16
    max_tokens: int = 24  # a command has some eight
    verifier: tuple[str, ...] = ()  # as options of `profile`; empty: that of the default policy's games
    cap: float = 0.4  # largest share of one kind of action among the pivots
    own: tuple[int, int, int, int] = (64, 600, 8, 32)  # games of a search, its states, updates to the next, states each
    play: int = 50  # test games of one stage
    items: int = 50  # passages and answers of each kind, of one stage

    @property
    def where(self) -> tuple[str, ...]:
        """Options of every command that computes, except retention.py."""
        found = () if self.device == "cpu" else words("--set", f"device.name={self.device}")
        return (*found, *words("--set", f"device.dtype={self.dtype}", "--set", "device.threads=1"))


QUESTIONS = Settings(  # with tools; a call has up to forty tokens
    environment=("qa",), max_turns=10, max_tokens=48, verifier=("--verifier", "recommended"), play=200, cap=1.0,
    parts=(240, 300), development=100,  # 120 traces won 6 of 24 development questions, and 17 of 200 test questions
)  # fmt: skip
SMOKE = Settings(
    dtype="float32", games=16, parts=(2, 4), least=0.0, development=2, rest=4, turns=2, rollouts=4, held_out=(2, 1),
    samples=2, steps=1, states=2, group=2, rates=(1e-4,), max_turns=3, play=2, items=2, own=(2, 8, 0, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The stages in their order; which warm start serves is known when the first ones have played."""

    book: Book
    settings: Settings
    items: int  # passages and answers of each kind
    problems: int = 0  # of each kind, solved by sampling

    def run(self, arms: Sequence[str], seeds: Sequence[int], games: int) -> None:
        warm = self.warm_start()
        if warm is None:
            return
        models = {"warm": warm}
        self.measure("warm", warm)
        for seed in seeds:
            for arm in arms:
                for stage in self.arm(arm, seed, warm):
                    models[stage.name] = stage
                    self.book.run(stage)
                    self.measure(stage.name, stage)
        for start in range(0, games, self.settings.play):
            for name, model in models.items():
                self.book.run(self.play(f"play.{name}.{start}", model, "test", start, self.settings.play))

    def measure(self, name: str, model: Stage) -> None:
        self.book.run(self.profile(f"accept.{name}", model, "held_out.jsonl", "dev", self.settings.samples))
        self.retention(name, model)

    # the policies

    def warm_start(self) -> Stage | None:
        """The first warm start that solves enough, else the largest; None while that is not known."""
        options, needs = self.settings, []
        if not options.model:
            needs.append(Stage("base", "base", words("convert.py", "--out", "base")))
            self.book.run(needs[0])
        asked = () if self.of_games else ("--model", options.model or "base")  # with the instructions that it will get
        made = words("traces", *self.flags("--count", options.games, *asked), "--out", "traces.jsonl")
        needs.append(Stage("traces", "traces.jsonl", made))
        self.book.run(needs[-1])
        if self.book.done(needs[-1]):
            write_parts(self.book.folder, options)
        warm: Stage | None = None
        for size in options.parts:
            name, part = f"warm-{size}", f"warm-{size}.traces.jsonl"
            warm = self.sft(name, options.model or "base", part, options.warm_rate, 2, 0, needs)
            played = self.play(f"{name}.dev", warm, "dev", 0, options.development)
            for stage in (warm, played):
                self.book.run(stage)
            if not self.book.done(played):
                return None
            if (read_json(self.book.folder / played.result)["sampled"]["success"] or 0.0) >= options.least:
                break
        if not options.model:
            self.measure("base", needs[0])
        return warm

    def arm(self, arm: str, seed: int, warm: Stage) -> Iterator[Stage]:
        options = self.settings
        name = f"{arm}{f'-{options.rate:g}' if options.swept else ''}{self.suffix}.{seed}"
        if arm == "sft":
            for rate in options.rates:
                yield self.sft(
                    f"sft-{rate:g}{self.suffix}.{seed}", warm.model, "rest.jsonl", rate, options.batch, seed, [warm]
                )
        elif arm in ("pivot", "random"):
            chosen = self.selection(warm)[arm]
            states = words(chosen.result, "--set", f"train.groups={options.states}")
            yield self.reinforced(name, warm, states, seed, chosen)
        elif arm in ONLINE:
            yield self.online(name, warm, seed, ONLINE[arm])
        else:
            start, steps = warm, options.steps
            if arm.startswith("sft-"):
                start = next(self.arm("sft", seed, warm))
            if "own" in arm:
                start = self.reinforced(name.replace("-online", ""), start, self.own_states, seed)
                steps = max(1, steps // 2)
                yield start
            if arm.endswith("-online"):
                yield self.online(name, start, seed, steps=steps)

    def sft(
        self, name: str, model: str, traces: str, rate: float, batch: int, seed: int, needs: Sequence[Stage]
    ) -> Stage:
        command = words(
            *("sft", "--model", model, "--traces", traces, "--epochs", 1, "--learning-rate", rate, "--seed", seed),
            *("--set", f"sft.batch={batch}", "--set", "check.tasks=0", *self.training(name)),
        )
        return Stage(name, f"{name}/cost.json", command, tuple(needs))

    def selection(self, warm: Stage) -> dict[str, Stage]:
        """The pivots, and as many turns drawn blindly, by the settings of docs/results/quickstart.md."""
        profiled = self.profile("profile", warm, "pool.jsonl", "train", self.settings.rollouts)
        self.book.run(profiled)
        chosen: dict[str, Stage] = {}
        for arm, rule in (("pivot", "pivots"), ("random", "random")):
            cap = self.settings.cap if rule == "pivots" else 1
            command = words("select", profiled.result, "--rule", rule, "--threshold", 1.0, "--max-per-kind", cap)
            command += words("--anchor-share", 0, "--per-duplicate", 0, "--out", f"{rule}.jsonl")
            chosen[arm] = Stage(rule, f"{rule}.jsonl", command, (profiled,))
            self.book.run(chosen[arm])
        return chosen

    @property
    def own_states(self) -> tuple[str, ...]:
        """Searches in tasks that no trace shows; half of the weight stays with the pivots of earlier ones, and a step
        draws four states an episode. Questions are judged by what a turn does."""
        options = self.settings
        name, *more = options.environment
        tasks, states, refresh, step = options.own
        chosen = {"environment.offset": options.games, "own.tasks": tasks, "own.candidates": states, "own.rollouts": 4}
        chosen |= {"own.max_turns": options.max_turns, "own.refresh": refresh}
        chosen |= {"train.per_trace": 4, "train.groups": step}
        if more:
            chosen["environment.difficulty"] = more[-1]
        settings = (word for key, value in chosen.items() for word in ("--set", f"{key}={value}"))
        judged = words("--teacher", name, "--verifier", "household" if self.of_games else "executed")
        return words("--states", "own", "--environment", name, *judged, *settings)

    def reinforced(self, name: str, warm: Stage, states: tuple[str, ...], seed: int, *needs: Stage) -> Stage:
        options = self.settings
        command = words(
            *("train", "pivot", *states, "--model", warm.model, "--seed", seed, "--steps", options.steps),
            *("--learning-rate", options.rate, "--set", "train.optimizer.warmup_steps=2"),
            *("--set", f"train.group_size={options.group}"),
            *("--set", f"train.sampling.max_tokens={options.max_tokens}", "--set", "check.tasks=0"),
            *self.training(name),
        )
        return Stage(name, f"{name}/cost.json", command, needs or (warm,))

    def online(self, name: str, start: Stage, seed: int, way: Sequence[str] = (), steps: int | None = None) -> Stage:
        """GRPO on whole training games; with branching half of the rollouts begin, and the others are forks."""
        options = self.settings
        begun = ("--set", f"train.initial_rollouts={options.group // 2}") if "--brancher" in way else ()
        command = words(
            *("train", "online", "--environment", *self.flags("--offset", options.games, "--model", start.model)),
            *("--seed", seed),  # tasks that no trace shows
            *("--iterations", steps or options.steps, "--learning-rate", options.rate, "--set", "check.tasks=0"),
            *("--max-turns", options.max_turns, "--max-tokens", options.max_tokens, "--set", "train.groups=4"),
            *("--set", "train.max_tokens=4096"),  # the longest episode: a larger pass takes more memory
            *("--set", f"train.group_size={options.group}", *way, *begun, *self.training(name)),
        )
        return Stage(name, f"{name}/cost.json", command, (start,))

    def flags(self, *more: object) -> tuple[object, ...]:
        """The name of the environment, then other words, then its options."""
        name, *options = self.settings.environment
        return (name, *more, *options)

    @property
    def suffix(self) -> str:
        """Of the names of arms that train an adapter."""
        return f"-r{self.settings.rank}" if self.settings.rank else ""

    @property
    def of_games(self) -> bool:
        return self.settings.environment[0] == "household"

    def training(self, name: str) -> tuple[str, ...]:
        """An arm may train an adapter; a warm start trains all weights."""
        rank = 0 if name.startswith("warm-") else self.settings.rank
        adapter = words("--set", f"device.lora.rank={rank}", "--set", f"device.lora.alpha={2 * rank}") if rank else ()
        return (*self.settings.where, *adapter, "--out", name)

    # what is measured of them

    def profile(self, name: str, model: Stage, traces: str, split: str, rollouts: int) -> Stage:
        command = words(
            *("profile", "--model", model.model, "--traces", traces, "--split", split, "--rollouts", rollouts),
            *("--max-tokens", self.settings.max_tokens, *self.settings.verifier, *self.settings.where),
        )
        return Stage(name, f"{name}.jsonl", (*command, "--out", f"{name}.jsonl"), (model,))

    def retention(self, name: str, model: Stage) -> None:
        options, count = self.settings, self.settings.items
        where = words("--dtype", options.dtype, *(() if options.device == "cpu" else ("--device", options.device)))
        stages = {f"keep.{name}.{start}": ("--start", start, "--count", count) for start in range(0, self.items, count)}
        if self.problems:
            stages[f"solve.{name}"] = ("--problems", "--count", self.problems)
        for label, which in stages.items():
            command = words("retention.py", model.model, *which, *where, "--out", f"{label}.json")
            self.book.run(Stage(label, f"{label}.json", command, (model,)))

    def play(self, name: str, model: Stage, split: str, start: int, count: int) -> Stage:
        """Some games of a split: test games are played in parts, so that the table can grow."""
        command = words(
            *("evaluate", "--model", model.model, "--environment"),
            *self.flags("--split", split, "--count", count, *(("--offset", start) if start or self.of_games else ())),
            *("--max-turns", self.settings.max_turns),
            *("--max-tokens", self.settings.max_tokens, "--set", "greedy=false", *self.settings.where),
        )
        return Stage(name, f"{name}.json", (*command, "--out", f"{name}.json"), (model,))


def write_parts(folder: Path, options: Settings) -> None:
    """The traces of warm starts and of the arms (`rest`), and with fewer turns as candidates those that are profiled
    (`pool`) and those that are held out for acceptance. Equal settings give equal files."""
    divide(folder, list(read_traces(folder / "traces.jsonl")), options)


def divide(folder: Path, traces: Sequence[Trace], options: Settings) -> None:
    train, dev = ([trace for trace in traces if trace.split == split] for split in ("train", "dev"))
    rest = train[max(options.parts) :][: options.rest]
    held_out, turns = options.held_out
    parts = {f"warm-{size}.traces": train[:size] for size in options.parts} | {
        "rest": rest,
        "pool": [some_turns(trace, options.turns) for trace in rest],
        "held_out": [some_turns(trace, turns) for trace in dev[:held_out]],
    }
    for name, part in parts.items():
        if not (folder / f"{name}.jsonl").exists():
            write_traces(folder / f"{name}.jsonl", part)


def some_turns(trace: Trace, count: int) -> Trace:
    """The trace with `count` of its candidates, drawn by its id: some turns of many rooms tell more than all turns of a
    few."""
    marked = skipped_turns(trace)
    turns = [turn for turn in range(len(trace.turn_positions)) if turn not in marked]
    kept = random.Random(trace.id).sample(turns, min(count, len(turns)))
    drawn = {str(turn): "not_drawn" for turn in turns if turn not in kept}
    return replace(trace, meta={**trace.meta, "skip_turns": {**trace.meta.get("skip_turns", {}), **drawn}})


def settings_of(smoke: bool, questions: bool, rank: int) -> Settings:
    settings = SMOKE if smoke else QUESTIONS if questions else Settings()
    if smoke and questions:
        settings = replace(
            settings, environment=QUESTIONS.environment, verifier=QUESTIONS.verifier, cap=1.0, max_tokens=48
        )
    if rank:  # an adapter wants higher rates; rounded, since 10 * 7e-5 is 0.0006999999999999999
        rates = tuple(round(10 * rate, 6) for rate in settings.rates)
        settings = replace(settings, rank=rank, rate=round(10 * settings.rate, 6), rates=rates)
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description="A pretrained policy on real work.")
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("--model", default="", help="start from this folder or name (default: get SmolLM2)")
    parser.add_argument("--arms", default="sft,pivot,random", help=f"of {', '.join(ARMS)} (default: %(default)s)")
    parser.add_argument("--seeds", default="0", help="of the arms (default: %(default)s)")
    parser.add_argument("--games", type=int, default=50, help="test games of every arm (default: %(default)s)")
    parser.add_argument(
        "--items", type=int, default=50, help="passages and answers of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--problems", type=int, default=0, help="of GSM8K and of MATH, solved by sampling (default: none)"
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="run only the stages that match")
    parser.add_argument("--plan", action="store_true", help="list the stages, and run none")
    parser.add_argument("--warm", type=int, help="traces of the warm start (default: the first that solves enough)")
    parser.add_argument("--rank", type=int, default=0, help="arms train an adapter, at ten times the rates")
    parser.add_argument("--rate", type=float, help="of the arms other than sft (default: 5e-5; it is in their names)")
    parser.add_argument("--questions", action="store_true", help="questions with tools, not games (in its own folder)")
    parser.add_argument("--device", default="cpu", help="where to compute, as cuda (default: %(default)s)")
    parser.add_argument("--dtype", help="of the weights (default: bfloat16; some processors are faster in float32)")
    parser.add_argument("--smoke", action="store_true", help="a handful of everything, to see that it runs")
    given = parser.parse_args()
    if unknown := set(given.arms.split(",")) - {*ARMS}:
        parser.error(f"{min(unknown)!r} is not an arm: {', '.join(ARMS)}")
    given.folder.mkdir(parents=True, exist_ok=True)
    model = str(Path(given.model).resolve()) if given.model and Path(given.model).exists() else given.model
    settings = replace(settings_of(given.smoke, given.questions, given.rank), model=model, device=given.device)
    settings = replace(settings, dtype=given.dtype or settings.dtype)
    if given.device != "cpu":
        settings = replace(settings, play=200)  # at once
    if given.warm:
        settings = replace(settings, parts=(given.warm,))
    if given.rate:
        settings = replace(settings, rate=given.rate, swept=True)
    games, items = (settings.play, settings.items) if given.smoke else (given.games, given.items)
    recipe = Recipe(Book(given.folder, HERE, given.only, given.plan), settings, items, given.problems)
    recipe.run(given.arms.split(","), [int(seed) for seed in given.seeds.split(",")], games)


if __name__ == "__main__":
    main()
