"""Does training on the policy's own states pay? python recipes/own_states.py FOLDER

From one policy, for every seed the arms below, with the same number of updates (SFT: three passes over the same
traces). The settings were chosen on development tasks with seed 100 (docs/LOG.md); the test tasks are played once by
every policy. The tables of what is there come at the end, and with `--table` nothing else is done.

  base              the policy itself
  sft               the expert's traces (sft-clean: of an expert that does not slip)
  all               GRPO at every turn of the expert's, without a profile; strict-all: rewarded by exact match
  random            ... at as many turns as there are pivots, drawn blindly
  filter            PivotRL with the paper's rule alone (at lambda 0.6): no cap, pivots drawn alike
  capped            PivotRL at mixed states of the expert's, no kind of action above a share: the quickstart's arm
  strict            ... rewarded by exact match
  clean             every mixed turn of an expert that does not slip, no cap: `traces`, `select`, `train` untuned
  clean-matched     ... profiled and rewarded by matching strings (verifier `paper`)
  balanced-clean    ... balanced as `select` does by itself: 30% a kind of action, 30% mastered turns
  balanced          the same of an expert with slips: the defaults of today
  expert            ... without a cap, drawn by variance
  own               the same at states of the policy's own path, which are searched again while training
  own-balanced      own states with the defaults of today: kept, balanced
  own-lean          ... with the updates, games and states of LEAN: half of those of hard games, in every world
  lean-shared       own-lean, a step's states four to an episode, whose beginning is prefilled and trained on once
  own-shared        own-balanced, drawn so
  grpo              GRPO on whole episodes of the same tasks
  grpo-long         ... for four times as long: of questions it then costs what own states cost
  grpo-short        ... for a sixth of the iterations: of hard games it then costs what `lean-shared` costs
  own-grpo          own-balanced, and from there half of grpo's iterations
  lean-grpo         own-lean, and from there three quarters of them: together grpo's decoded tokens at hard games
  third             lean-shared, and from there a sixth of them: at most a third of grpo's whole bill at hard games
  union             lean-shared, and from there three quarters of them: at most grpo's whole bill at hard games
  own-third         own-shared, and from there an eighth of them
  own-union         own-shared, and from there two thirds of them
  own-filtered      own-union, whose groups without a difference in rewards are not trained on
  filtered          grpo so: DAPO's filter without its refill
  taught            grpo's first quarter with own-union's policy for a teacher (on-policy distillation)
  balanced-union    balanced, and from there two thirds of them: the union without own states
  sft-grpo          sft, and from there all of them
  sft-few           sft on the first 128 games
  sft-shared        sft (of ALFWorld sft-few), and from there own-shared
  sft-union         sft-shared, and from there two thirds of grpo's iterations
  progress          grpo whose turns are also rewarded by the progress that the environment reports
  progress-short    ... a third of it; own-progress: own-union so
  dapo, reinforce   DAPO and REINFORCE++ in grpo's place, with as many tool calls
  gigpo             GRPO whose turns are also compared with the turns that were taken at the same state (GiGPO)
  own-gigpo         ... own-union so
  third-gigpo       own-shared, and from there a twelfth of gigpo's iterations: at ALFWorld a third of grpo's whole bill
  arpo              ARPO, with as many tool calls (docs/results/paper-tables.md)

  --world household   generated games and the embedded policy (the usual one); --difficulty easy, medium or hard
                      (docs/results/hard.md)
  --world alfworld    ALFWorld's own games: --source json_2.1.1 (or packed files), --base a policy for them
                      (docs/results/alfworld-pivotrl.md says how it is made)
  --world questions   generated questions with search and Python, and the embedded policy for them
  --world containers  Harbor's tasks: --source has the folders `train` and `held`, --base a policy for them
                      (docs/results/containers.md)

Every stage is one command, and its record lies in `stages` of FOLDER: kill the recipe at any time, the same command
goes on. Generated games are played in parts of 250, so `--games 1000` after `--games 500` plays 500 more, and `--seeds`
and `--arms` add what is missing. `--plan` lists the stages. docs/results/own-states.md has the results.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from book import Book, Stage, words

from turntree.experiments.paired import Outcomes, over_seeds_and_tasks, paired_outcomes, task_matrix
from turntree.run.artifacts import PROFILE
from turntree.run.files import read_json

HERE = Path(__file__).resolve().parent
BASE = "base"
ARMS = (BASE, "sft", "random", "capped", "expert", "own")
MORE = (  # where they are asked for
    "sft-clean", "all", "strict-all", "filter", "strict", "clean", "clean-matched", "balanced-clean",
    "balanced", "own-balanced", "own-lean", "lean-shared", "own-shared", "grpo", "grpo-long",
    "grpo-short", "own-grpo", "lean-grpo", "third", "own-third", "union", "own-union",
    "progress", "progress-short", "own-progress", "own-filtered", "filtered", "taught",
    "balanced-union", "sft-few", "sft-grpo", "sft-shared",
    "sft-union", "dapo", "reinforce", "gigpo", "own-gigpo", "third-gigpo", "arpo",
)  # fmt: skip
COMPARED = (
    ("own", "sft"), ("own", "expert"), ("capped", "sft"), ("expert", "sft"), ("filter", "sft"), ("strict", "capped"),
    ("filter", BASE),
    ("capped", BASE), ("capped", "random"), ("filter", "random"), ("all", BASE), ("filter", "all"), ("capped", "all"),
    ("all", "strict-all"), ("random", BASE), ("all", "random"),
    ("sft", BASE), ("grpo", "sft"), ("grpo-long", "sft"),
    ("clean", BASE), ("clean-matched", BASE), ("clean", "clean-matched"), ("clean", "sft-clean"),
    ("clean-matched", "sft-clean"), ("clean", "grpo"), ("grpo", "sft-clean"),
    ("balanced-clean", "clean"), ("expert", "clean"), ("balanced", "expert"), ("balanced", "clean"),
    ("balanced", BASE), ("balanced", "sft"), ("own-balanced", BASE), ("own-balanced", "sft"), ("own-balanced", "own"),
    ("own-balanced", "balanced"), ("balanced", "grpo"), ("own-balanced", "grpo"),
    ("grpo", BASE), ("own-lean", BASE), ("own-lean", "sft"), ("own-lean", "own-balanced"), ("own-lean", "grpo"),
    ("own-grpo", BASE), ("own-grpo", "own-balanced"), ("own-grpo", "grpo"), ("lean-grpo", BASE), ("lean-grpo", "sft"),
    ("lean-grpo", "own-lean"), ("lean-grpo", "grpo"), ("lean-grpo", "own-grpo"),
    ("lean-shared", BASE), ("lean-shared", "sft"), ("lean-shared", "own-lean"), ("lean-shared", "grpo"),
    ("third", BASE), ("third", "sft"), ("third", "lean-shared"), ("third", "grpo"), ("union", BASE), ("union", "sft"),
    ("union", "lean-shared"), ("union", "own-grpo"), ("union", "grpo"),
    ("own-shared", "grpo-long"),
    ("own-shared", "own-balanced"), ("own-shared", "lean-shared"), ("own-shared", "grpo"), ("own-third", "own-shared"),
    ("own-third", "third"), ("own-third", "grpo"), ("own-union", "own-shared"), ("own-union", "grpo"),
    ("own-filtered", "own-union"), ("own-filtered", "grpo"), ("own-filtered", "own-shared"), ("filtered", "grpo"),
    ("own-filtered", "filtered"), ("own-filtered", "dapo"), ("dapo", "filtered"),
    ("progress", "grpo"), ("progress-short", "grpo"), ("progress", "own-union"),
    ("own-progress", "progress"), ("own-progress", "own-union"), ("own-progress", "grpo"),
    ("taught", "grpo"), ("taught", "own-union"), ("taught", "own-shared"),
    ("own-union", "balanced-union"), ("balanced-union", "balanced"), ("balanced-union", "grpo"),
    ("own-union", "sft-grpo"), ("own-shared", "sft-grpo"), ("sft-grpo", "sft"), ("sft-grpo", "grpo"),
    ("sft-shared", "sft"), ("sft-shared", "sft-few"), ("sft-shared", "own-shared"), ("sft-shared", "sft-grpo"),
    ("sft-shared", "grpo"),
    ("sft-union", "own-union"), ("sft-union", "sft-grpo"), ("sft-union", "sft-shared"), ("sft-union", "grpo"),
    ("own-union", "dapo"), ("own-shared", "dapo"),
    ("filter", "strict-all"), ("balanced", "all"), ("balanced", "random"), ("balanced", "filter"), ("all", "sft"),
    ("balanced", "strict"), ("strict", BASE), ("strict-all", BASE), ("strict-all", "sft"), ("random", "sft"),
    ("lean-shared", "grpo-short"), ("grpo-short", BASE), ("sft-clean", BASE), ("lean-shared", "sft-clean"),
    ("balanced-clean", "sft-clean"), ("lean-shared", "balanced-clean"),
    ("gigpo", "grpo"), ("gigpo", "own-union"), ("gigpo", "progress"),
    ("own-gigpo", "gigpo"), ("own-gigpo", "own-union"), ("own-gigpo", "grpo"), ("own-gigpo", "own-shared"),
    ("third-gigpo", "grpo"), ("third-gigpo", "own-shared"),
    ("arpo", "grpo"), ("arpo", "dapo"), ("arpo", "reinforce"), ("arpo", BASE), ("dapo", "grpo"),
    ("reinforce", "grpo"), ("dapo", BASE), ("reinforce", BASE),
)  # fmt: skip
WEIGHTS = dict.fromkeys(("expert", "own"), "variance")
CONTINUED = {  # after an arm, a share of the iterations
    "own-grpo": ("own-balanced", 1 / 2), "lean-grpo": ("own-lean", 3 / 4),
    "third": ("lean-shared", 1 / 6), "union": ("lean-shared", 3 / 4), "own-third": ("own-shared", 1 / 8),
    "own-union": ("own-shared", 2 / 3), "own-filtered": ("own-shared", 2 / 3),
    "balanced-union": ("balanced", 2 / 3), "sft-grpo": ("sft", 1.0),
    "sft-union": ("sft-shared", 2 / 3), "own-progress": ("own-shared", 2 / 3), "own-gigpo": ("own-shared", 2 / 3),
    "third-gigpo": ("own-shared", 1 / 12),
}  # fmt: skip
WHOLE = {  # the share of the iterations that makes grpo's tool calls, and what differs
    "grpo": (1.0, ()), "grpo-long": (4.0, ()), "grpo-short": (1 / 6, ()),
    "filtered": (1.0, ()), "taught": (1 / 4, ()), "progress": (1.0, ()), "progress-short": (1 / 3, ()),
    "dapo": (0.6, words("--filter", "dapo", "--set", "filters.0.refill_cap=2", "--set", "train.loss.clip_high=0.28")),
    "reinforce": (1.0, words("--set", "train.credit.advantages=reinforce_pp")),
    "gigpo": (1.0, ()),
    "arpo": (1.23, words("--brancher", "entropy", "--set", "brancher.probe_tokens=2")),  # a turn has some six tokens
}  # fmt: skip
LEAN = {"steps": 20, "refresh": 7, "tasks": 32, "own_candidates": 300, "own_rollouts": 4}
PROFILES = {"clean": "clean-profile", "balanced-clean": "clean-profile", "clean-matched": "matched-profile"}
BALANCED = (  # by the defaults of `select`
    "balanced", "balanced-clean", "own-balanced", "own-lean", "lean-shared", "own-shared", "sft-shared",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How much of everything."""

    games: int = 700  # that are demonstrated; own states come from as many as train SFT
    few: int = 0  # of them, for SFT that only prepares (0: `sft`)
    candidates: int = 2500
    rollouts: int = 16
    cap: float = 0.4  # of a kind of action, in the arm `capped`
    steps: int = 30
    rate: float = 5e-4
    kl: float = 0.02
    refresh: int = 15
    tasks: int = 192  # that a search plays
    own_rollouts: int = 8
    own_candidates: int = 0  # states of a search that are profiled (0: all)
    max_turns: int = 16  # of training
    own_turns: int = 0  # of a search's games, where they are longer
    test_turns: int = 0  # of test games, where they are longer
    max_tokens: int = 24
    part: int = 250
    iterations: int = 20  # of whole episodes
    groups: int = 8
    group_size: int = 8
    online_rate: float = 5e-4
    constant: float = 5000.0  # that the loss of whole episodes is divided by: some 64 episodes of 80 tokens (0: tokens)


SMOKE: dict[str, float] = {
    "cap": 1.0, "games": 8, "candidates": 20, "rollouts": 4, "steps": 2, "refresh": 1, "tasks": 2, "own_rollouts": 4,
    "max_turns": 4, "part": 2,
    "iterations": 2, "groups": 2, "group_size": 2,
}  # fmt: skip
FIRST_GAME = 3000  # of the test split: no other experiment has used these
DIFFICULT = {  # what docs/results/hard.md has; medium between it and the easy games
    "easy": Settings(),
    "medium": Settings(max_turns=25, iterations=24, groups=16, online_rate=5e-4, constant=0.0),
    "hard": Settings(
        games=128, candidates=600, rollouts=8, steps=40, tasks=64, own_rollouts=4, own_candidates=600, own_turns=40,
        test_turns=40, part=200, iterations=24, groups=16, online_rate=3e-4, constant=0.0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """Generated household games: what is demonstrated, played and judged, as words of commands."""

    settings: Settings = field(default_factory=Settings)
    model: str = "default"
    environment: str = "household"
    teacher: str = "household"
    verifier: str = "household"
    fresh: bool = True  # every seed has training tasks of its own
    retold: bool = True  # ... and demonstrations of its own
    difficulty: str = "easy"  # of generated games
    lean: Mapping[str, int] = field(default_factory=lambda: LEAN)  # of the arm `own-lean`

    def demonstrated(self, seed: int, slips: float) -> tuple[str, ...]:
        """Every seed has training games of its own."""
        shown = words("traces", "household", "--count", self.settings.games, "--slips", slips, "--seed", seed)
        shown += () if self.difficulty == "easy" else words("--difficulty", self.difficulty)
        return shown + words("--set", f"environment.offset={1000 * seed}")

    @property
    def tasks(self) -> int:
        """That own states and whole episodes come from: as many as train SFT."""
        return self.settings.games * 4 // 5

    def moved(self, seed: int) -> tuple[str, ...]:
        """The tasks of a seed, among those of the environment."""
        return ("--set", f"environment.offset={1000 * seed}") if self.fresh else ()

    def own(self, seed: int) -> tuple[str, ...]:
        """The tasks of own states."""
        return (*self.moved(seed), "--set", f"own.count={self.tasks}")

    @property
    def played(self) -> tuple[str, ...]:
        """The environment of own states."""
        return ("--environment", "household", "--set", f"environment.difficulty={self.difficulty}")

    @property
    def started(self) -> tuple[str, ...]:
        """The policy that all arms start from, where it is not what commands take without a word."""
        return () if self.model == "default" else ("--model", self.model)

    @property
    def judged(self) -> tuple[str, ...]:
        """How turns of traces are judged, where it is not what commands take without a word: by playing them."""
        return ("--verifier", self.verifier, *self.played) if self.verifier == "executed" else ()

    def sets(self, games: int) -> dict[str, list[str]]:
        """The parts in which a policy plays, by what the tables call them together."""
        return {"test games": [str(start) for start in range(0, games, self.settings.part)]}

    def tested(self, part: str) -> tuple[str, ...]:
        offset = FIRST_GAME + int(part)
        games = words("--environment", "household", "--difficulty", self.difficulty)
        return games + words("--count", self.settings.part, "--offset", offset)


@dataclass(frozen=True)
class Alfworld(World):
    """ALFWorld's own games, those to train on drawn anew by every seed; own states and whole episodes have the settings
    of hard games, tests at most 30 turns (docs/results/alfworld-pivotrl.md)."""

    settings: Settings = field(
        default_factory=lambda: replace(
            DIFFICULT["hard"],
            games=1200,
            few=128,
            candidates=6000,
            rollouts=16,
            cap=0.25,
            refresh=20,
            own_turns=30,
            test_turns=30,
        )
    )
    fresh: bool = False
    source: Path = Path()

    def demonstrated(self, seed: int, slips: float) -> tuple[str, ...]:
        shown = words("traces", "household", "--games", self._file("train"), "--count", self.settings.games)
        return shown + words("--slips", slips, "--seed", seed, "--set", f"max_turns={self.settings.test_turns}")

    def moved(self, seed: int) -> tuple[str, ...]:
        return words("--set", f"task_seed={seed}")

    @property
    def played(self) -> tuple[str, ...]:
        return words("--environment", "household", "--set", f"environment.games={self._file('train')}")

    def sets(self, games: int) -> dict[str, list[str]]:
        return {"seen rooms": ["seen"], "unseen rooms": ["unseen"]}

    def tested(self, part: str) -> tuple[str, ...]:
        games = self._file(f"valid_{part}")
        count = {"seen": 140, "unseen": 134}[part]
        return words(
            "--environment", "household", "--set", f"environment.games={games}", "--count", count, "--samples", 2
        )

    def _file(self, name: str) -> Path:
        packed = self.source / f"{name}.jsonl.xz"
        return packed if packed.exists() else self.source / name


@dataclass(frozen=True)
class Questions(World):
    """Generated questions; a turn is accepted if it has the effect of the expert's."""

    settings: Settings = field(
        default_factory=lambda: Settings(games=500, candidates=1500, max_turns=10, max_tokens=48, part=400)
    )
    model: str = "qa"
    environment: str = "qa"
    teacher: str = "qa"
    verifier: str = "executed"
    fresh: bool = False

    def demonstrated(self, seed: int, slips: float) -> tuple[str, ...]:
        """All seeds have the same questions."""
        return words("traces", "qa", "--count", self.settings.games, "--slips", slips, "--seed", seed)

    @property
    def played(self) -> tuple[str, ...]:
        return ("--environment", "qa")

    def sets(self, games: int) -> dict[str, list[str]]:
        return {"test questions": ["test"]}

    def tested(self, part: str) -> tuple[str, ...]:
        return words("--environment", "qa", "--count", self.settings.part)


@dataclass(frozen=True)
class Containers(World):
    """Harbor's tasks, played in containers; a turn is accepted if it has the effect of the solution's."""

    settings: Settings = field(
        default_factory=lambda: Settings(
            games=180, candidates=120, rollouts=6, steps=12, max_turns=8, max_tokens=160, part=40, iterations=6,
            groups=6, rate=1e-4, online_rate=1e-4, constant=0.0,
        )
    )  # fmt: skip
    verifier: str = "executed"
    fresh: bool = False
    retold: bool = False
    source: Path = Path()

    def demonstrated(self, seed: int, slips: float) -> tuple[str, ...]:
        """Solutions have no slips."""
        return words("traces", "gold", *self.played, "--count", self.settings.games, "--seed", seed)

    @property
    def played(self) -> tuple[str, ...]:
        held = f"environment.held_out={self.source / 'held'}"
        return words("--environment", f"harbor:{self.source / 'train'}", "--set", held)

    def sets(self, games: int) -> dict[str, list[str]]:
        return {"test tasks": ["test"]}

    def tested(self, part: str) -> tuple[str, ...]:
        return words(*self.played, "--count", self.settings.part)


@dataclass(frozen=True)
class Recipe:
    book: Book
    world: World

    @property
    def settings(self) -> Settings:
        return self.world.settings

    def run(self, arms: Sequence[str], seeds: Sequence[int], games: int) -> None:
        """Seed by seed, so that what is there is whole seeds. An arm plays as soon as it is trained."""
        for seed in seeds:
            models: dict[str, Stage | None] = {}
            parts = itertools.chain(*self.world.sets(games).values())
            for part, arm in itertools.product(parts, arms):
                if arm not in models:
                    models[arm] = self.trained(arm, seed)
                self.ran(self.play(arm, seed, models[arm], part))

    def trained(self, arm: str, seed: int) -> Stage | None:
        """None for the policy that all arms start from."""
        if arm == BASE:
            return None
        if arm in CONTINUED:
            return self.model(arm, seed, self.whole(arm, seed), start=self.trained(CONTINUED[arm][0], seed))
        if arm == "taught":
            teacher = self.trained("own-union", seed)
            assert teacher is not None
            return self.model(arm, seed, self.whole(arm, seed) + words("--reference", teacher.model), teacher)
        if arm in WHOLE:
            return self.model(arm, seed, self.whole(arm, seed))
        traces = self.traces(seed, "few-" if arm == "sft-few" else "clean-" if "clean" in arm else "")
        if arm == "sft-shared":
            start = self.trained("sft-few" if self.settings.few else "sft", seed)
            return self.model(arm, seed, self.own(arm, seed), traces, start=start)
        if arm.startswith("sft"):
            command = words(
                "sft", "--traces", traces.result, "--epochs", 3, "--learning-rate", 3e-4, "--set", "check.tasks=0"
            )
            return self.model(arm, seed, command, traces)
        if arm.startswith(("own", "lean")):
            return self.model(arm, seed, self.own(arm, seed), traces)
        judged = ("--verifier", "strict") if arm.startswith("strict") else self.judged(arm)
        if arm in ("all", "strict-all"):  # without a profile no file names the verifier
            judged = judged or ("--verifier", self.world.verifier)
            return self.model(arm, seed, self.reinforced("--traces", traces.result, *judged), traces)
        pivots = self.pivots(arm, seed, traces)
        return self.model(arm, seed, self.reinforced(pivots.result, *judged), pivots)

    def judged(self, arm: str) -> tuple[str, ...]:
        return ("--verifier", "paper") if arm == "clean-matched" else self.world.judged

    def model(self, arm: str, seed: int, command: tuple[str, ...], *needs: Stage, start: Stage | None = None) -> Stage:
        """From the policy that all arms start from, or from another arm's."""
        name = f"{arm}.{seed}"
        begun = ("--model", start.model) if start else self.world.started
        command += words(*begun, "--seed", seed, "--out", name)
        return self.ran(Stage(name, f"{name}/cost.json", command, (*needs, start) if start else needs))

    def traces(self, seed: int, which: str = "") -> Stage:
        """Of an expert with slips; `which`: "clean-" without, "few-" of the first games alone."""
        seed = seed if self.world.retold else 0
        name = f"{which}traces.{seed}"
        games = self.settings.few if which == "few-" else self.settings.games
        world = replace(self.world, settings=replace(self.settings, games=games))
        command = world.demonstrated(seed, 0.0 if which == "clean-" else 0.2) + words("--out", f"{name}.jsonl")
        return self.ran(Stage(name, f"{name}.jsonl", command))

    def pivots(self, arm: str, seed: int, traces: Stage) -> Stage:
        options = self.settings
        command = words("profile", "--traces", traces.result, "--limit", options.candidates, "--seed", seed)
        command += words("--rollouts", options.rollouts, "--max-tokens", options.max_tokens)
        command += self.world.started + self.judged(arm)
        source = self.file(PROFILES.get(arm, "profile"), seed, command, traces)
        below = 0.6 if arm == "filter" else 1.0
        command = words("select", source.result, "--threshold", below)
        if arm in BALANCED:
            return self.file(f"pivots-{arm}", seed, command + words("--seed", seed), source)
        command += words("--per-duplicate", 0, "--seed", seed)
        command += words("--max-per-kind", options.cap if arm in ("capped", "strict") else 1, "--anchor-share", 0)
        command += words("--rule", "random") if arm == "random" else words("--weight", WEIGHTS.get(arm, "equal"))
        return self.file(f"pivots-{arm}", seed, command, source)

    def file(self, name: str, seed: int, command: tuple[str, ...], need: Stage) -> Stage:
        out = f"{name}.{seed}.jsonl"
        return self.ran(Stage(f"{name}.{seed}", out, command + words("--out", out), (need,)))

    def ran(self, stage: Stage) -> Stage:
        self.book.run(stage)
        return stage

    def own(self, arm: str, seed: int) -> tuple[str, ...]:
        options, world = self.settings, self.world
        if arm in ("own-lean", "lean-shared"):
            options = replace(options, **world.lean)
        command = self.reinforced("--states", "own", *world.played, options=options) + world.own(seed)
        command += words("--teacher", world.teacher, "--verifier", world.verifier, "--refresh", options.refresh)
        chosen = {"tasks": options.tasks, "rollouts": options.own_rollouts}
        chosen |= {"max_turns": options.own_turns or options.max_turns}
        if options.own_candidates:
            chosen |= {"candidates": options.own_candidates}
        if arm in WEIGHTS:
            chosen |= {"select.weight": WEIGHTS[arm]}
        if arm not in BALANCED:  # as they were measured
            chosen |= {"select.max_per_kind": 1, "select.anchor_share": 0, "keep": 0}
        if arm.endswith("-shared"):
            command += words("--set", "train.per_trace=4")
        return command + _set("own", chosen)

    def whole(self, arm: str, seed: int) -> tuple[str, ...]:
        options, world = self.settings, self.world
        command = words("train", "online", *world.played, *world.moved(seed), "--count", world.tasks)
        share, more = WHOLE.get(arm, (CONTINUED.get(arm, (BASE, 1.0))[1], ()))
        more += words("--filter", "dapo") if arm.endswith("filtered") else ()
        more += words("--set", "train.turn_rewards.progress=3") if "progress" in arm else ()
        more += words("--estimator", "turntree.credit.config:GIGPO") if "gigpo" in arm else ()
        command += more + words("--iterations", round(options.iterations * share), "--groups", options.groups)
        command += words("--group-size", options.group_size, "--learning-rate", options.online_rate)
        command += words("--kl", 1.0 if arm == "taught" else options.kl)
        command += words("--max-turns", options.max_turns, "--max-tokens", options.max_tokens, "--keep-trees", "none")
        command += _set("train", {"check_every": 0})
        if options.constant:
            command += _set("train", {"loss.normalizer": "constant", "loss.constant": options.constant})
        command += words("--set", "train.optimizer.warmup_steps=3", "--set", "check.tasks=0")
        return command

    def reinforced(self, *states: str, options: Settings | None = None) -> tuple[str, ...]:
        options = options or self.settings
        command = words("train", "pivot", *states, "--steps", options.steps, "--learning-rate", options.rate)
        command += words("--kl", options.kl, "--max-tokens", options.max_tokens, "--keep-trees", "none")
        return command + words("--set", "train.optimizer.warmup_steps=3", "--set", "check.tasks=0")

    def play(self, arm: str, seed: int, model: Stage | None, part: str) -> Stage:
        options, needs = self.settings, () if model is None else (model,)
        command = words("evaluate", "--model", model.model if model else self.world.model, *self.world.tested(part))
        turns = options.test_turns or options.max_turns
        command += words("--seed", seed, "--max-turns", turns, "--max-tokens", options.max_tokens)
        out = f"play.{arm}.{seed}.{part}.json"
        return Stage(out.removesuffix(".json"), out, (*command, "--out", out), needs)


def _set(section: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    return words(*(word for key, value in values.items() for word in ("--set", f"{section}.{key}={value}")))


# the tables

KEYS = ("sampled", "greedy")
Played = Mapping[int, Mapping[str, Path]]  # the evaluations of an arm by seed and part
BILLED = ("turns", "tool_calls", "decoded_tokens", "prefilled_tokens", "trained_tokens")
NEEDED = {
    **dict.fromkeys(("expert", "capped", "strict", "filter", "balanced"), ("profile",)),
    **{arm: (profile,) for arm, profile in PROFILES.items()},
}


def played(folder: Path, parts: Sequence[str] = ()) -> dict[str, Played]:
    """All evaluations, or those of some parts."""
    found: dict[str, dict[int, dict[str, Path]]] = {}
    for path in folder.glob("play.*.json"):
        _, arm, seed, part, _ = path.name.split(".")
        if not parts or part in parts:
            found.setdefault(arm, {}).setdefault(int(seed), {})[part] = path
    return {arm: found[arm] for arm in (*ARMS, *MORE) if arm in found}


def outcomes(key: str, *arms: Played) -> list[list[Outcomes]]:
    """Of every arm the success by game, seed by seed: of the seeds that all of these arms have played, and of the games
    that all have played then."""
    seeds = sorted(set.intersection(*(set(arm) for arm in arms)))
    starts = sorted(set.intersection(*(set(arm[seed]) for arm in arms for seed in seeds)) if seeds else ())
    found = [[_success(key, [arm[seed][start] for start in starts]) for seed in seeds] for arm in arms]
    return found if starts else []


def _success(key: str, paths: Sequence[Path]) -> Outcomes:
    rows = [row for path in paths for row in read_json(path)[key]["outcomes"]]
    return {row["task"]: fmean(row["rewards"]) for row in rows if row["rewards"]}


def told(found: Mapping[str, Any], form: str = "{:+.1f}") -> str:
    """In points: the mean with its interval, and the seeds."""
    edges = [found[edge] for edge in ("low", "high")]
    interval = "" if None in edges else " [{}, {}]".format(*(form.format(100 * edge) for edge in edges))
    seeds = ", ".join(form.format(100 * value) for value in found["values"])
    return form.format(100 * found["mean"]) + f"{interval} ({seeds})"


def success(arms: Mapping[str, Played]) -> list[str]:
    rows = ["| arm | seeds | games | sampled | greedy | impossible commands, sampled / greedy |", "|---" * 6 + "|"]
    for arm, runs in arms.items():
        matrices = [task_matrix(outcomes(key, runs)[0])[0][0] for key in KEYS]
        cells = [told(over_seeds_and_tasks(matrix), "{:.1f}") for matrix in matrices]
        found = [read_json(path) for parts in runs.values() for path in parts.values()]
        invalid = " / ".join(f"{fmean(one[key].get('invalid_share', 0.0) for one in found):.0%}" for key in KEYS)
        rows.append(f"| {arm} | {_names(runs)} | {matrices[0].shape[1]} | " + " | ".join(cells) + f" | {invalid} |")
    return rows


def differences(arms: Mapping[str, Played]) -> list[str]:
    rows = ["| difference | seeds | games | sampled | greedy |", "|---" * 5 + "|"]
    for one, other in COMPARED:
        pairs = [outcomes(key, arms.get(one, {}), arms.get(other, {})) for key in KEYS]
        if all(pairs):
            found = [paired_outcomes(*pair) for pair in pairs]
            cells = [_names(arms[one].keys() & arms[other].keys()), str(found[0]["held_out_difference"]["tasks"])]
            cells += [told(each["by_seed"]) for each in found]
            rows.append(f"| {one} - {other} | " + " | ".join(cells) + " |")
    return rows


def _names(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def costs(folder: Path, arms: Mapping[str, Played]) -> list[str]:
    """Of making the policy, its profile and forks included (not the traces): the mean over the seeds."""
    rows = ["| arm | turns | tool calls | decoded tokens | prefilled | trained | seconds of a processor |"]
    rows.append("|---" * 7 + "|")
    for arm, runs in arms.items():
        bills = [_bill(folder, arm, seed) for seed in runs if arm != BASE]
        cells = [f"{fmean(column):,.0f}" for column in zip(*bills, strict=True)]
        rows += [f"| {arm} | " + " | ".join(cells) + " |"] if cells else []
    return rows


def _bill(folder: Path, arm: str, seed: int) -> tuple[float, ...]:
    """Random turns need no profile. Seconds are those of the stages' records: a stage that was killed and went on has
    those of its last attempt, and nan where it was killed after its result was written."""
    given = read_json(folder / "stages" / f"{arm}.{seed}.json")["command"]
    start, _, rest = (given[given.index("--model") + 1] if "--model" in given else "").partition(f".{seed}/")
    before = _bill(folder, start, seed) if rest == "model" else (0.0,) * (len(BILLED) + 1)  # or not of this recipe
    bills = [read_json(folder / f"{arm}.{seed}" / "cost.json")]
    for name in NEEDED.get(arm, ()):
        header, _ = PROFILE.stream(folder / f"{name}.{seed}.jsonl")
        bills.append(header["summary"]["cost"])
    records = [read_json(folder / "stages" / f"{name}.{seed}.json") for name in (arm, *NEEDED.get(arm, ()))]
    counts = (float(sum(bill[key] for bill in bills)) for key in BILLED)
    spent = (*counts, sum(record.get("cpu_seconds", math.nan) for record in records))
    return tuple(one + other for one, other in zip(before, spent, strict=True))


def world_of(given: argparse.Namespace) -> World:
    if given.world in ("alfworld", "containers"):
        if given.source is None or given.base is None:
            raise SystemExit(f"--world {given.world} needs --source, its games, and --base, a policy for them")
        kind = Alfworld if given.world == "alfworld" else Containers
        world: World = kind(model=str(given.base.resolve()), source=given.source.resolve())
    else:
        generated = World(settings=DIFFICULT[given.difficulty], difficulty=given.difficulty)
        world = Questions() if given.world == "questions" else generated
    if given.iterations:
        world = replace(world, settings=replace(world.settings, iterations=given.iterations))
    if not given.smoke:
        return world
    lean = {key: int(SMOKE.get(key, value)) for key, value in LEAN.items()}
    return replace(world, settings=replace(world.settings, **SMOKE), lean=lean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("--world", choices=("household", "alfworld", "questions", "containers"), default="household")
    parser.add_argument("--difficulty", choices=tuple(DIFFICULT), default="easy", help="of generated games")
    parser.add_argument("--source", type=Path, help="ALFWorld's games, or Harbor's tasks")
    parser.add_argument("--base", type=Path, help="the policy that plays them")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"(default: %(default)s; also {', '.join(MORE)})")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="(default: %(default)s)")
    parser.add_argument("--games", type=int, default=1000, help="generated test games (default: %(default)s)")
    parser.add_argument("--iterations", type=int, help="of whole episodes, in place of the world's")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="run only the stages that match")
    parser.add_argument("--plan", action="store_true", help="list the stages, and run none")
    parser.add_argument("--table", action="store_true", help="print the tables of what is there, and run none")
    parser.add_argument("--smoke", action="store_true", help="a handful of everything, to see that it runs")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    world, arms = world_of(given), given.arms.split(",")
    if unknown := set(arms) - {*ARMS, *MORE}:
        parser.error(f"{min(unknown)!r} is not an arm: {', '.join((*ARMS, *MORE))}")
    if not given.table:
        recipe = Recipe(Book(given.folder, HERE, given.only, given.plan), world)
        recipe.run(arms, [int(seed) for seed in given.seeds.split(",")], given.games)
    for name, parts in world.sets(given.games).items():
        if found := played(given.folder, parts):
            print(f"\n## {name}\n")
            for table in (success(found), differences(found)):
                print("\n".join(table), end="\n\n")
    if found := played(given.folder):
        print("\n".join(costs(given.folder, found)))


if __name__ == "__main__":
    main()
