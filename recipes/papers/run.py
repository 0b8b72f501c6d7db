"""A paper's method at the paper's numbers: python recipes/papers/run.py RECIPE FOLDER [NAME=VALUE ...]

  python recipes/papers/run.py pivotrl/qwen3-30b-a3b-thinking runs/pivotrl traces=swe.jsonl environment=my_swe:tasks
  python recipes/papers/run.py selective_rollout/qwen2.5-7b runs/gate --small
  python recipes/papers/run.py arpo/qwen2.5-7b runs/arpo --dry-run

A recipe is one file per paper and model. Its settings stand under what says them: `stated` (with the section and the
words of the paper), `chosen` (the paper does not say; with the reason for the value), `machine` (a node of GPUs). Its
steps are commands of turntree. NAME=VALUE gives what a recipe cannot know (`[given]` in the file).

  --small     the same steps on a CPU, with an embedded policy and tiny sizes (`small` in the file)
  --tinker    on a server of Tinker's API (docs/scale.md) in place of GPUs. What it cannot do has another value
              (`tinker` in the file, with the reason), or is left out (`not_tinker`, `without`)
  --prices PREFILL SAMPLE TRAIN   of a million tokens there: the dry run prints the most that each step can cost
  --dry-run   print what would be done: what to start before, every command, where each setting comes from. Nothing is
              run, and turntree checks every key
  --only PATTERN   the steps whose name matches a shell pattern, where what they need is there

A step that is done is not repeated; the same command goes on after a kill (recipes/book.py).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE)]
from book import TURNTREE, Book, Stage, shown  # noqa: E402

Recipe = Mapping[str, Any]
SAMPLES = {"device", "server"}  # the groups of settings of commands with a policy


@dataclass(frozen=True)
class Setting:
    """A key of a command. `source` is the section, table or equation with the paper's words; why the value was chosen;
    or the machine."""

    key: str
    value: Any
    kind: str
    source: str

    @property
    def word(self) -> str:
        return f"{self.key}={self.value if isinstance(self.value, str) else json.dumps(self.value)}"


@dataclass(frozen=True)
class Form:
    """How a recipe is run: "full", on the machine of the file, "small", or on a server ("tinker") with these prices."""

    name: str = "full"
    prices: Mapping[str, float] | None = None

    def settings(self, group: Mapping[str, Any]) -> Iterator[Setting]:
        """What a group sets in this form only."""
        if self.name == "tinker":
            yield from (
                Setting(key, told["value"], "tinker", told["why"]) for key, told in group.get("tinker", {}).items()
            )
        else:
            kind = "machine" if self.name == "full" else self.name
            yield from (Setting(key, value, kind, "") for key, value in group.get(kind, {}).items())


@dataclass(frozen=True)
class Step:
    """A command, and where its settings come from."""

    stage: Stage
    settings: tuple[Setting, ...]


def read(name: str) -> Recipe:
    """The recipe of this name, or of this path."""
    path = Path(name) if name.endswith(".toml") else HERE / f"{name}.toml"
    if not path.is_file():
        known = sorted(str(found.relative_to(HERE).with_suffix("")) for found in HERE.glob("*/*.toml"))
        sys.exit(f"there is no recipe {name!r}; there are {', '.join(known)}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def settings(recipe: Recipe, step: Mapping[str, Any], form: Form) -> tuple[Setting, ...]:
    """Those of the groups that the step names, and its own, which win. Only the full form has a machine; the others
    have none of the keys under `not_small` or `not_tinker`, and take values from `small` or `tinker`."""
    found: dict[str, Setting] = {}
    groups = [*(recipe["settings"][name] for name in step.get("settings", ())), step]
    left_out = {key for group in groups for key in group.get(f"not_{form.name}", ())}
    for group in groups:
        for key, told in group.get("stated", {}).items():
            found[key] = Setting(key, told["value"], "stated", f'{told["where"]}: "{told["words"]}"')
        for key, told in group.get("chosen", {}).items():
            found[key] = Setting(key, told["value"], "not stated", told["why"])
        found |= {setting.key: setting for setting in form.settings(group)}
    if form.name == "tinker" and SAMPLES & set(step.get("settings", ())):
        found["device.carrier"] = Setting("device.carrier", {"name": "tinker", "prices": form.prices}, "tinker", "")
    return tuple(setting for key, setting in found.items() if key not in left_out)


def steps(recipe: Recipe, given: Mapping[str, str], form: Form) -> Iterator[Step]:
    """In their order. `{name}` in a command is what was given, or the file or folder that the step `name` makes. Ends
    the script where something is neither."""
    made: dict[str, Stage] = {}
    names = dict(given)
    for told in recipe["step"]:
        if form.name in told.get("without", ()):
            continue
        for seed in (
            recipe.get("seeds_small" if form.name == "small" else "seeds", [0]) if told.get("every_seed") else [None]
        ):
            name = told["name"] if seed is None else f"{told['name']}.{seed}"
            out = told["out"].format(name=name)
            text = told.get(f"{form.name}_run", told["run"])
            own = names | {"seed": str(seed), "out": out}
            try:
                command = shlex.split(text.format_map(own))
            except KeyError as missing:
                what = recipe["given"].get(missing.args[0], {"what": "no step makes it"})["what"]
                sys.exit(f"{name} needs {missing.args[0]}=...: {what}")
            found = settings(recipe, told, form)
            command += [word for setting in found for word in ("--set", setting.word)]
            if recipe.get("ranks") and told.get("on_ranks") and form.name == "full":
                command = ["torchrun", "--nproc-per-node", str(recipe["ranks"]), *TURNTREE, *command]
            after = told.get("after", ())
            needs = tuple(stage for each, stage in made.items() if f"{{{each}}}" in text or each in after)
            result = told.get("result", out if Path(out).suffix in (".json", ".jsonl") else f"{out}/cost.json")
            made[name] = Stage(name, result, tuple(command), needs, codes=(0, *told.get("codes", ())))
            names[name] = out
            yield Step(made[name], found)


def show(recipe: Recipe, found: Sequence[Step], form: Form) -> Iterator[str]:
    """What would be done."""
    yield f"# {recipe['paper']}"
    for command in recipe.get("before", ()) if form.name == "full" else ():
        yield f"# start this first, in a terminal of its own:\n{command}"
    for step in found:
        yield f"\n# {step.stage.name}"
        yield shown(step.stage.command)
        for setting in step.settings:
            yield f"#   {setting.word}   {setting.kind}{setting.source and f' ({setting.source})'}"
        yield from (f"#   {line}" for line in check(step))
    yield "\n# what the paper does not state:"
    yield from (f"#   {what}" for what in recipe["not_stated"])


def check(step: Step) -> list[str]:
    """What turntree says of the bill. Ends the script where it would refuse the command."""
    from turntree.cli.main import main

    words = list(step.stage.command)
    if words[0].endswith(".py") or words[0] == "index":  # which have no dry run
        return []
    words = words[words.index(TURNTREE[-1]) + 1 :] if words[0] == "torchrun" else words
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            main([*words, "--dry-run"])
    except SystemExit as stopped:
        if stopped.code:
            sys.exit(f"{step.stage.name} would be refused: {said.getvalue().strip()}")
    return [line for line in said.getvalue().splitlines() if "your prices" in line or "the bill" in line]


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="such as pivotrl/qwen3-30b-a3b-thinking, or your own copy of a file")
    parser.add_argument("folder", type=Path)
    parser.add_argument("given", nargs="*", metavar="NAME=VALUE")
    forms = parser.add_mutually_exclusive_group()
    for name in ("small", "tinker"):
        forms.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="full")
    parser.add_argument("--prices", nargs=3, type=float, default=(0.0, 0.0, 0.0))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="*")
    options = parser.parse_args(arguments)
    recipe = read(options.recipe)
    prices = dict(zip(("prefill", "sample", "train"), options.prices, strict=True))
    form = Form(options.form, prices)
    pairs = [each.partition("=") for each in options.given]
    given = {"model": recipe["small_model"] if form.name == "small" else recipe["model"]}
    if options.dry_run:
        given |= {name: told["example"] for name, told in recipe["given"].items()}
    given |= {name: value for name, _, value in pairs}
    if unknown := set(given) - set(recipe["given"]) - {"model"}:
        sys.exit(f"{', '.join(sorted(unknown))}: the recipe asks for {', '.join(recipe['given'])} and model")
    found = list(steps(recipe, given, form))
    if options.dry_run:
        print("\n".join(show(recipe, found, form)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))  # of its parts
    book = Book(options.folder, HERE.parent, only=options.only)
    for step in found:
        book.run(step.stage)


if __name__ == "__main__":
    run()
