"""The recipe of the four domains: cut traces keep what they demonstrate, done work is not repeated, every command is
one that turntree understands, and a domain without a pivot does not end the others."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.cli.main import cli
from turntree.core.messages import Message
from turntree.pivots.rows import class_of_moments
from turntree.run.files import write_json
from turntree.traces.candidates import candidates
from turntree.traces.schema import Trace, read_traces, write_traces

FILE = Path(__file__).resolve().parents[2] / "recipes" / "domains.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("domains_recipe", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


sys.path.append(str(FILE.parent))  # of the modules that recipes share
recipe = load()
messages = st.lists(
    st.builds(Message, st.sampled_from(["user", "assistant", "system"]), st.text("ab", max_size=90)), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(messages, st.integers(0, 300), st.integers(1, 60))
def test_a_cut_trace_is_a_beginning_whose_own_turns_are_whole(said: list[Message], chars: int, most: int) -> None:
    said.append(Message("assistant", "b"))
    turns = sum(message.role == "assistant" for message in said)
    marks = {"skip_turns": {str(turn): "x" for turn in range(0, turns, 2)}}
    found = recipe.cut(Trace(id="t", messages=tuple(said), meta=marks), chars, most)
    if found is None:
        first = next(place for place, message in enumerate(said) if message.role == "assistant")
        shown = [min(len(one.content), {"system": 2 * most}.get(one.role, most)) for one in said[:first]]
        assert sum(shown) + len(said[first].content) + 4 * first >= chars
        return
    assert sum(len(message.content) for message in found.messages) <= chars
    assert found.messages[-1].role == "assistant"
    for message, whole in zip(found.messages, said, strict=False):
        assert message.role == whole.role
        limit = {"assistant": len(whole.content), "system": 2 * most}.get(whole.role, most)
        shortened = f"{whole.content[:limit]} ..." if len(whole.content) > limit else whole.content
        assert message.content == shortened
    assert all(int(turn) < len(found.turn_positions) for turn in found.meta["skip_turns"])


def demonstrations(count: int = 12) -> list[Trace]:
    said = [Message("user", "Go."), *[Message("assistant", "ls"), Message("user", "a.txt")] * 5]
    return [
        Trace(id=f"{split}-{number}", messages=tuple(said), split=split, success=True)
        for split, many in (("train", count), ("dev", 4))
        for number in range(many)
    ]


def test_the_parts_share_no_trace_and_hold_some_turns(tmp_path: Path) -> None:
    write_traces(tmp_path / "imported.jsonl", demonstrations())
    words = ["--chars", "6000", "--message", "400", "--warm", "4", "--rest", "5", "--turns", "2", "--held-out", "3,1"]
    recipe.cut_main([str(tmp_path / "imported.jsonl"), *words])
    names = ("warm.traces", "rest", "pool", "held_out")
    parts = {name: list(read_traces(tmp_path / f"{name}.jsonl")) for name in names}
    ids = {name: {trace.id for trace in traces} for name, traces in parts.items()}
    assert (len(ids["warm.traces"]), len(ids["rest"]), len(ids["held_out"])) == (4, 5, 3)
    assert not ids["warm.traces"] & ids["rest"] and ids["pool"] == ids["rest"]
    assert all(one.startswith("dev") for one in ids["held_out"])
    assert [len(list(candidates(trace))) for trace in parts["pool"]] == [2] * 5
    assert [len(list(candidates(trace))) for trace in parts["held_out"]] == [1] * 3
    write_traces(tmp_path / "imported.jsonl", demonstrations(count=4))  # fewer than both parts want
    recipe.cut_main([str(tmp_path / "imported.jsonl"), *words])
    assert [len(list(read_traces(tmp_path / f"{name}.jsonl"))) for name in ("warm.traces", "rest")] == [2, 2]
    write_traces(tmp_path / "imported.jsonl", demonstrations(count=0))
    with pytest.raises(SystemExit, match="0 training and 4 held-out traces leave none"):
        recipe.cut_main([str(tmp_path / "imported.jsonl"), *words])


class Commands(list[list[str]]):
    """What was run; each command leaves its result without computing it. `moments` are the reward's mean and variance
    at the states that profiles find."""

    moments: list[tuple[float, float]]

    def __call__(self, argv: list[str], cwd: Path) -> Any:
        words = [word for word in argv[1:] if word not in ("-m", "turntree.cli.main")]
        self.append(words)
        out = Path(cwd) / ("held_out.jsonl" if words[1] == "cut" else words[words.index("--out") + 1])
        if words[0] in ("sft", "train"):
            write_json(out / "cost.json", {})
        else:
            out.write_text("")
        return SimpleNamespace(returncode=0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands()
    found.moments = [(0.0, 0.0), (0.75, 0.1875)]  # mixed, and above the paper's lambda

    def read(path: Path) -> Any:
        rows = [{"reward_mean": mean, "reward_var": variance} for mean, variance in found.moments]
        counts = Counter(class_of_moments(each, 0.6).value for each in found.moments)
        summary = {"candidates": len(rows), "classes": dict(counts), "skipped_turns": {}}
        return {
            "summary": summary,
            "config": {"profile": {"rollouts": 4}},
        }, rows if path.name == "profile.jsonl" else []

    monkeypatch.setattr(recipe, "PROFILE", SimpleNamespace(read=read))
    monkeypatch.setattr(subprocess, "run", found)
    return found


def test_every_arm_is_trained_and_measured_once_and_never_again(ran: Commands, tmp_path: Path, capsys: Any) -> None:
    told = [str(tmp_path), "--model", "m", "--domains", "terminal,search", "--smoke"]
    recipe.main(told)
    made = [words[words.index("--out") + 1] for words in ran if "--out" in words]
    arms = ["base", "warm", "sft.0", "random.0", "strict.0", "pivot.0"]
    assert [one for one in made if one.startswith("accept.")] == [f"accept.{arm}.jsonl" for arm in arms] * 2
    assert made.count("profile.jsonl") == 2 and made.count("pivots.jsonl") == 2
    assert "| terminal | none judged |" in capsys.readouterr().out
    ran.clear()
    recipe.main(told)
    assert ran == []
    with pytest.raises(SystemExit, match="was begun with other settings"):
        recipe.main(told[:-1])


def test_a_domain_without_a_pivot_is_told_and_the_others_go_on(ran: Commands, tmp_path: Path, capsys: Any) -> None:
    ran.moments = [(0.0, 0.0), (1.0, 0.0)]
    recipe.main([str(tmp_path), "--model", "m", "--domains", "terminal,search"])
    assert capsys.readouterr().out.count("no state is a pivot") == 6
    assert [words[0] for words in ran if words[0] in ("sft", "train")] == ["sft"] * 4


def test_every_command_is_one_that_turntree_understands(ran: Commands, tmp_path: Path) -> None:
    recipe.main([str(tmp_path), "--model", "qa"])
    assert len(ran) > 4 * 12
    for words in {tuple(words[:2]): words for words in ran}.values():
        if words[1] != "cut" and words[0] not in ("select", "report", "traces"):
            cli.main(args=[*words, "--dry-run"], prog_name="turntree", standalone_mode=False)


def test_a_plan_and_a_part_run_nothing_else(ran: Commands, tmp_path: Path, capsys: Any) -> None:
    recipe.main([str(tmp_path), "--model", "m", "--domains", "swe", "--plan"])
    assert ran == [] and "open accept.base" in capsys.readouterr().out
    recipe.main([str(tmp_path), "--model", "m", "--only", "swe/imported"])
    assert [words[:2] for words in ran] == [["traces", "import"]]
    with pytest.raises(SystemExit):
        recipe.main([str(tmp_path), "--domains", "chess"])


def test_seeds_are_averaged_at_the_turns_that_all_were_judged_at_and_every_rollout_is_a_trial() -> None:
    cells = {"warm": {"a": {1: 0.0}}, "pivot.0": {"a": {1: 0.5, 2: 1.0}}, "pivot.1": {"a": {1: 1.0}}}
    assert recipe._over_seeds(cells) == {"pivot": {"a": {1: 0.75}}}
    few, many = (recipe._share({"a": {1: 0.25}, "b": {1: 0.5}, "c": {1: 0.25}}, rollouts) for rollouts in (1, 8))
    assert (few, many) == ("33.3% [1.7%, 93.7%] of 3 (3 traces)", "33.3% [8.6%, 72.5%] of 3 (3 traces)")
