"""The page of a run directory: the numbers are there, what is absent is said, nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from online_directories import mixed_group, write_lines
from run_directories import (
    candidate,
    candidates,
    write_complete_run,
    write_evaluation,
    write_profile,
    write_trace_file,
    write_training,
)

from turntree.core.errors import InputError
from turntree.report.html import build_report
from turntree.report.results import Difference, Estimate
from turntree.run.files import read_json, write_json


def text_of(page: Path) -> str:
    """What a reader sees: tags gone, white space single."""
    body = page.read_text(encoding="utf-8").split("<body>", 1)[1]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def sections(page: Path) -> list[str]:
    """Those that the page has, and leads to."""
    markup = page.read_text(encoding="utf-8")
    found = re.findall(r'<section id="([^"]*)"', markup)
    assert found == re.findall(r'<li><a href="#([^"]*)"', markup)
    return found


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_complete_run(tmp_path_factory.mktemp("runs") / "quickstart")


@pytest.fixture(scope="module")
def built(complete: Path) -> Path:
    return build_report(complete)


@pytest.fixture(scope="module")
def markup(built: Path) -> str:
    return built.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(built: Path) -> str:
    return text_of(built)


def test_the_page_lies_in_the_run_directory_unless_another_place_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_training(run, "sft", [{"step": 1, "loss": 1.5}])
    assert build_report(run) == run / "report.html"
    assert build_report(run, tmp_path / "deep" / "page.html") == tmp_path / "deep" / "page.html"
    assert (tmp_path / "deep" / "page.html").read_bytes() == (run / "report.html").read_bytes()


def test_the_same_files_give_the_same_bytes_in_another_process_too(complete: Path, built: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from turntree.report.html import build_report"
    code += "; build_report(Path(sys.argv[1]), Path(sys.argv[2]))"
    again = [sys.executable, "-c", code, str(complete), str(tmp_path / "p.html")]
    subprocess.run(again, check=True, env=os.environ | {"PYTHONHASHSEED": "7", "HOME": str(tmp_path)})
    assert (tmp_path / "p.html").read_bytes() == built.read_bytes()


def test_nothing_on_the_page_is_loaded_from_elsewhere(markup: str) -> None:
    assert not re.findall(r"https?://|//[a-z]+\.|src=|@import|<script|<link|<iframe|url\((?!#)", markup)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', markup))


def test_every_id_occurs_once_and_every_reference_has_its_target(markup: str) -> None:
    ids = re.findall(r' id="([^"]*)"', markup)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', markup)) <= set(ids)


def test_every_figure_says_in_words_what_it_shows(markup: str) -> None:
    said = re.findall(r'role="img" aria-label="([^"]*)"', markup)
    assert len(said) == markup.count("<svg") >= 6
    assert any("PivotRL from 0.25 to 0.75" in one for one in said)


def test_the_headline_says_what_was_trained_on_what_and_with_which_result(page: str) -> None:
    assert "PivotRL trained policy “default” for 2 steps on 3 turns selected from 5 candidate turns of 3 expert" in page
    assert "PivotRL succeeds in 75.0% (95% interval 53.1–88.8) on 20 tasks of split “test” of environment" in page
    assert "Base succeeds in 25.0% (95% interval 11.2–46.9)" in page
    assert "PivotRL minus Base, success on 20 held-out tasks, paired: +50.0 points [" in page
    assert "(better) sampled" in page


def test_an_interval_that_contains_zero_is_called_that(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "base", 10, 0.8)
    write_evaluation(tmp_path, "pivotrl", 11, 0.8)
    shown = text_of(build_report(tmp_path))
    assert "(not told apart) sampled" in shown
    assert "PivotRL − Base 20 +5.0" in shown and "not told apart" in shown.split("PivotRL − Base 20 +5.0")[1]


def test_a_policy_that_became_worse_is_called_that(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "base", 15, 0.8)
    write_evaluation(tmp_path, "pivotrl", 5, 0.8)
    assert "(worse) sampled" in text_of(build_report(tmp_path))


def test_a_gain_that_is_a_loss_when_played_greedily_is_called_both_at_the_top() -> None:
    """The figures of the quickstart's seed 0."""
    gained = Difference("pivotrl", "base", Estimate(0.11, 0.052, 0.17, 400), Estimate(-0.032, -0.088, 0.02, 400))
    lost = Difference("pivotrl", "sft", Estimate(0.038, -0.018, 0.095, 400), Estimate(-0.075, -0.13, -0.02, 400))
    assert gained.sentence() == (
        "PivotRL minus Base, success on 400 held-out tasks, paired: +11.0 points [+5.2, +17.0] (better) sampled, "
        "−3.2 points [−8.8, +2.0] (not told apart) greedy"
    )
    assert "(not told apart) sampled, −7.5 points [−13.0, −2.0] (worse) greedy" in lost.sentence()


def test_policies_that_did_not_play_the_same_tasks_are_not_compared_in_silence(complete: Path, tmp_path: Path) -> None:
    run = shutil.copytree(complete, tmp_path / "run")
    told = "the arms were not evaluated on the same tasks at the same settings"
    assert told not in text_of(build_report(run))
    written = read_json(run / "evaluation" / "base.json")
    for key, other in (("split", "dev"), ("environment", {"name": "qa"}), ("max_turns", 3)):
        changed = {**written, "config": {**written["config"], key: other}}
        write_json(run / "evaluation" / "base.json", changed)
        assert told in text_of(build_report(run))


def test_the_table_holds_every_arm(page: str) -> None:
    assert "SFT 35.0% 18.1–56.7 35.0% 18.1–56.7 12.5% 60.0% −20.0 16 112 512 1 min 02 s" in page
    assert "PivotRL 75.0% 53.1–88.8 75.0% 53.1–88.8 12.5% 70.0% −10.0 36 252 1,552 1 min 04 s" in page


def test_task_types_and_skills_are_told_apart_by_arm(page: str) -> None:
    assert "clean 50.0% 23.7–76.3 70.0% 39.7–89.2 100.0% 72.2–100.0 80.0% 49.0–94.3 10" in page
    assert "sort 80.0% 60.0% 70.0% 75.0% 25.0% 40" in page


def test_the_ledger_adds_up_and_weighs_rho_by_tokens(page: str) -> None:
    assert "profile 20 140 900 2,700 – – 1.5 0.0 0.0 1.5" in page
    assert "train pivotrl 16 112 – – 400 3.50 2.0 0.0 60.0 62.0" in page  # (100 x 2 + 300 x 4) / 400
    assert "total 1,268 8,876 900 2,700 1,200 – 23.5 0.0 180.0 203.5" in page


def test_the_profile_counts_classes_kinds_and_what_each_threshold_keeps(page: str) -> None:
    assert "all fail 1 20.0% all succeed 1 20.0% mixed but easy 1 20.0% pivot 2 40.0%" in page
    assert "An exact match would have refused 37.5% of the actions that the verifier accepts." in page
    assert "Turns that are not candidates, by reason: empty_turn 7." in page
    assert "0.3 1 0 1 0.6 2 1 1 every mixed group 3 2 1" in page


def test_example_pivots_show_state_demonstration_and_samples(page: str) -> None:
    assert "take: 1 of 4 sampled actions accepted" in page
    assert "Last observation You arrive at shelf 1. Demonstrated take cup 1 from shelf 1" in page
    assert "take pan 1 3 0 0 take cup 1 from shelf 1 1 1 1" in page


def test_what_users_wrote_is_text_and_never_markup(tmp_path: Path) -> None:
    write_trace_file(tmp_path / "traces.jsonl")
    evil = "<script>alert(1)</script> $x_1$"
    write_profile(tmp_path, [*candidates(), candidate(2, 1, evil, 1, [(evil, 0.0, 3), ("b", 1.0, 1)])])
    markup = build_report(tmp_path).read_text(encoding="utf-8")
    assert "<script" not in markup
    assert "put a &lt;cup&gt; on the shelf" in markup
    assert evil in text_of(tmp_path / "report.html")


def test_a_profile_alone_gives_a_page_that_says_what_is_absent(tmp_path: Path) -> None:
    write_profile(tmp_path)
    shown = text_of(build_report(tmp_path))
    assert "This run profiled 5 candidate turns of 3 expert traces. No policy was trained or evaluated" in shown
    assert "The traces that were profiled were not found" in shown
    assert sections(tmp_path / "report.html") == ["profile", "ledger", "examples", "configuration"]
    assert "No selection was made from this profile yet" in shown


def test_one_arm_alone_gives_a_page_without_a_comparison(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "base", 5, 0.8)
    shown = text_of(build_report(tmp_path))
    assert "Base succeeds in 25.0% (95% interval 11.2–46.9) on 20 tasks of split" in shown
    assert "There is no second policy to compare it with." in shown
    assert sections(tmp_path / "report.html") == ["results", "task_types", "skills", "ledger", "configuration"]


def test_a_training_run_named_directly_is_an_arm_of_its_own_name(tmp_path: Path) -> None:
    write_training(tmp_path / "mine", "train pivot", [{"step": 1, "reward_mean": 0.5}])
    shown = text_of(build_report(tmp_path / "mine"))
    assert "Run “mine” (train pivot) trained policy “default” for 1 step." in shown
    assert "says nothing about success" in shown
    assert "0.95" not in shown  # a step is a whole number on the axis, too
    assert "model" not in re.findall(r"train (\w+)", shown)  # the model's own folder is no run


@pytest.mark.parametrize("stage", ["train pivot", "sft"])
def test_a_training_that_looked_at_held_out_tasks_says_what_came_of_them(tmp_path: Path, stage: str) -> None:
    rows = [{"step": 0, "held_out_success": 0.25}, {"step": 1, "held_out_success": 0.5}]
    write_training(tmp_path / "mine", stage, rows)
    played = [{"iteration": i, "task": f"t{n}", "rewards": [float(n <= i)]} for i in (0, 1) for n in range(4)]
    write_lines(tmp_path / "mine" / "held_out.jsonl", played)
    shown = text_of(build_report(tmp_path / "mine"))
    assert "from 25.0% to 50.0% on 4 tasks: a paired gain of +25.0 points" in shown
    assert "nothing about success" not in shown


def test_what_the_summary_says_of_the_whole_run_is_shown(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "base", 5, 0.8)
    summary = {"schema": "turntree.quickstart/1", "arms": {}, "seed": 3, "wall_seconds": 725.0}
    write_json(tmp_path / "summary.json", summary)
    assert "The run: seed 3, 12 min 05 s in all." in text_of(build_report(tmp_path))


def test_the_quickstart_leads_to_the_trees_of_every_arm(complete: Path, tmp_path: Path) -> None:
    run = shutil.copytree(complete, tmp_path / "run")
    for arm in ("pivotrl", "random"):
        write_lines(run / arm / "trees.jsonl", [mixed_group().to_json()])
    markup = build_report(run).read_text(encoding="utf-8")
    assert re.findall(r'href="([^"#]+)"', markup) == ["pivotrl/trees.html", "random/trees.html"]
    assert all((run / arm / "trees.html").exists() for arm in ("pivotrl", "random"))


def test_a_folder_without_trees_has_no_section_of_them(built: Path) -> None:
    assert "tree" not in sections(built)


def test_traces_that_were_changed_after_profiling_are_not_shown(complete: Path, tmp_path: Path) -> None:
    run = shutil.copytree(complete, tmp_path / "run")
    with (run / "traces.jsonl").open("a", encoding="utf-8") as handle:
        handle.write("\n")
    assert "The traces that were profiled were not found" in text_of(build_report(run))


def test_a_file_of_the_current_folder_is_taken_for_the_traces_by_its_content_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run, elsewhere):
        folder.mkdir()
    write_trace_file(run / "traces.jsonl")
    write_profile(run)
    shutil.move(run / "traces.jsonl", elsewhere / "traces.jsonl")
    monkeypatch.chdir(elsewhere)
    assert "take: 1 of 4 sampled actions accepted" in text_of(build_report(run))
    (elsewhere / "traces.jsonl").write_text("something else")
    assert "The traces that were profiled were not found" in text_of(build_report(run))


def test_an_empty_folder_and_a_missing_one_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds nothing that a report can show; name a run directory"):
        build_report(tmp_path)
    with pytest.raises(InputError, match=r"no such folder"):
        build_report(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("evaluation/base.json", "{", r"base\.json:1: is not complete JSON"),
        ("evaluation/base.json", '{"schema": "turntree.evaluation/2"}', r"field 'schema': is 'turntree.evaluation/2'"),
        (
            "evaluation/base.json",
            '{"schema": "turntree.evaluation/1", "config": {}}',
            r"field 'policy_hash': is missing",
        ),
        ("sft/metrics.jsonl", '{"step": 1}\n{"st', r"metrics\.jsonl:2: is not complete JSON"),
        ("sft/metrics.jsonl", "{}", r"metrics\.jsonl:1: field 'step': is missing"),
        (
            "evaluation/base.json",
            '{"schema": "turntree.evaluation/1", "config": {}, "policy_hash": "", "retention": {"by_skill": {"a": 3}}}',
            r"base\.json",
        ),
        ("summary.json", '{"arms": 3}', r"summary\.json: holds a value of the wrong type"),
        ("profile.jsonl", '{"schema": "turntree.pivots/2"}', r"profile\.jsonl:1: field 'schema'"),
    ],
)
def test_a_broken_file_is_named_and_no_page_is_written(
    complete: Path, tmp_path: Path, name: str, content: str, said: str
) -> None:
    run = shutil.copytree(complete, tmp_path / "run", ignore=shutil.ignore_patterns("report.html"))
    (run / name).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=said) as caught:
        build_report(run)
    assert "\n" not in str(caught.value)
    assert not (run / "report.html").exists()


def test_a_candidate_without_a_kind_is_named_by_its_line(tmp_path: Path) -> None:
    rows = candidates()
    del rows[1]["kind"]
    write_profile(tmp_path, rows)
    with pytest.raises(InputError, match=r"profile\.jsonl:3: field 'kind': is missing"):
        build_report(tmp_path)


def test_importing_the_report_loads_neither_matplotlib_nor_torch() -> None:
    code = "import json, sys, turntree.report.html"
    code += "; print(json.dumps([name for name in ('torch', 'matplotlib', 'jinja2') if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == []
