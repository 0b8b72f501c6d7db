"""The recipe of own states: seeds are finished one after another, arms differ by what they are named for, and tables
compare what all have played."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from turntree.run.files import read_json, write_json

FOLDER = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("own_states")
    sys.modules.pop("own_states", None)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch):
    """The names of the results; each command leaves its result without computing it."""
    found: list[str] = []

    class Answer:
        returncode = 0

    def command(argv, cwd):
        out = Path(cwd) / argv[argv.index("--out") + 1]
        found.append(out.name)
        write_json(out if out.suffix.startswith(".json") else out / "cost.json", {})
        return Answer()

    monkeypatch.setattr(subprocess, "run", command)
    return found


def run(recipe, folder: Path, seeds=(0,), games=2, arms=None) -> None:
    world = recipe.World(recipe.Settings(**recipe.SMOKE))
    recipe.Recipe(recipe.Book(folder, FOLDER), world).run(arms or recipe.ARMS, seeds, games)


def test_the_key_of_a_stage_is_that_of_records_on_disk(recipe) -> None:
    """A changed key would refuse every folder that a recipe was begun in."""
    first = recipe.Stage("traces", "traces.jsonl", ("traces", "household", "--out", "traces.jsonl"))
    assert first.key == "12c514746359f23d"
    assert recipe.Stage("sft", "sft/cost.json", ("sft",), (first,)).key == "6f4816bf9266f707"


def test_a_seed_is_finished_before_the_next_and_more_games_are_all_that_is_played_again(recipe, ran, tmp_path) -> None:
    run(recipe, tmp_path, seeds=(0, 1))
    seeds = [name.split(".")[2 if name.startswith("play") else 1] for name in ran]
    assert seeds == sorted(seeds) and len(ran) == len(set(ran))
    ran.clear()
    run(recipe, tmp_path, seeds=(0, 1), games=4)
    assert ran == [f"play.{arm}.{seed}.2.json" for seed in (0, 1) for arm in recipe.ARMS]


def test_two_arms_differ_by_what_they_are_named_for(recipe, ran, tmp_path) -> None:
    arms = (
        *recipe.ARMS,
        "all",
        "strict-all",
        "grpo",
        "progress",
        "own-union",
        "own-progress",
        "sft-shared",
        "own-shared",
        "own-lean",
        "lean-shared",
        "third",
        "dapo",
        "arpo",
    )
    run(recipe, tmp_path, arms=arms)

    def command(name: str) -> set[str]:
        words = read_json(tmp_path / "stages" / f"{name}.0.json")["command"]
        return set(words) - {f"{name}.0", f"pivots-{name}.0.jsonl"}

    assert command("progress") - command("grpo") == {"train.turn_rewards.progress=3"}
    assert command("own-progress") - command("own-union") == {"train.turn_rewards.progress=3"}
    assert command("sft-shared") - command("own-shared") == {"--model", "sft.0/model"}
    assert command("lean-shared") ^ command("own-lean") == {"train.per_trace=4"}
    assert command("third") - command("grpo") == {"--model", "lean-shared.0/model"}
    assert "--filter" in command("dapo") - command("grpo")
    assert {"entropy", "brancher.probe_tokens=2"} <= command("arpo") - command("grpo")
    assert command("strict-all") ^ command("all") == {"strict", "household"}
    assert not (tmp_path / "stages" / "pivots-all.0.json").exists()
    trained = {arm: command(arm) for arm in ("random", "capped", "expert")}
    assert all(words == trained["random"] for words in trained.values())
    assert {"--steps", "2", "--learning-rate", "0.0005", "--kl", "0.02"} <= trained["random"] & command("own")


def play(folder: Path, arm: str, seed: int, start: int, won: float) -> None:
    rows = [{"task": f"game {start + place}", "rewards": [won]} for place in range(4)]
    shares = {key: {"outcomes": rows, "invalid_share": 0.1} for key in ("sampled", "greedy")}
    write_json(folder / f"play.{arm}.{seed}.{start}.json", shares)


def test_two_arms_are_compared_on_the_games_and_seeds_that_both_have_played(recipe, tmp_path) -> None:
    for arm, won in (("sft", 0.0), ("own", 1.0)):
        for seed in (0, 1):
            play(tmp_path, arm, seed, 0, won)
    play(tmp_path, "sft", 0, 4, 1.0)  # a part of one policy alone
    play(tmp_path, "sft", 2, 0, 1.0)  # a seed of one arm alone
    play(tmp_path, "random", 3, 0, 1.0)  # an arm that shares no seed
    arms = recipe.played(tmp_path)
    _, _, *rows = recipe.differences(arms)
    told = "+100.0 [+100.0, +100.0] (+100.0, +100.0)"
    assert rows == [f"| own - sft | 0, 1 | 4 | {told} | {told} |"]
    assert "| sft | 0, 1, 2 | 4 | 33.3 [-110.1, 176.8] (0.0, 0.0, 100.0) |" in "\n".join(recipe.success(arms))


def test_a_stage_that_was_killed_after_its_result_was_written_has_no_known_seconds(recipe, tmp_path) -> None:
    """Its record ends with its beginning; the tables of everything else are printed all the same."""
    write_json(tmp_path / "sft.0" / "cost.json", dict.fromkeys(recipe.BILLED, 5))
    write_json(tmp_path / "stages" / "sft.0.json", {"command": ["sft"], "key": "k", "finished": False})
    assert recipe.costs(tmp_path, {"sft": {0: {}}})[-1] == "| sft | 5 | 5 | 5 | 5 | 5 | nan |"


def test_profiles_without_pivots_agree_and_few_pivots_may_be_missing_from_a_resample(recipe) -> None:
    agreement = importlib.import_module("profile_agreement")
    assert agreement.compare(["all fail"] * 5, ["all fail"] * 5).startswith("100.0% [100.0%, 100.0%]")
    one = ["pivot", *["all fail"] * 9]
    assert agreement.compare(one, ["all fail"] * 10).startswith("0.0% [0.0%, 100.0%]")


def test_tasks_in_containers_are_demonstrated_once_and_judged_by_effect_or_by_the_papers_strings(
    recipe, ran, tmp_path
) -> None:
    world = recipe.Containers(recipe.Settings(**recipe.SMOKE), model="base", source=Path("tasks"))
    arms = ("sft-clean", "clean", "clean-matched", "grpo")
    recipe.Recipe(recipe.Book(tmp_path, FOLDER), world).run(arms, (0, 1), 2)
    assert sum("traces" in name for name in ran) == 1 and sum(name.startswith("play.") for name in ran) == 8
    stages = {path.stem: read_json(path)["command"] for path in (tmp_path / "stages").glob("*.json")}
    for name, verifier in (("clean-profile.1", "executed"), ("matched-profile.1", "paper")):
        assert stages[name][stages[name].index("--verifier") + 1] == verifier
    for name, verifier in (("clean.1", "executed"), ("clean-matched.1", "paper")):
        assert stages[name][stages[name].index("--verifier") + 1] == verifier
    assert all("environment.held_out=tasks/held" in stages[name] for name in ("grpo.0", "play.grpo.0.test"))
