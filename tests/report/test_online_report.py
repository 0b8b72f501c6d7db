"""The pages of an online run and of matched arms over seeds: the numbers are there, what is absent is said."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from online_directories import metrics, write_experiment, write_lines, write_online_run

from turntree.core.errors import InputError
from turntree.core.tree import Decision
from turntree.experiments.page import build_experiment_page, mean_curve, read_experiment
from turntree.report.html import build_report
from turntree.report.online import cumulative, decisions, over
from turntree.run.files import read_json, write_json


def text_of(page: Path) -> str:
    """What a reader sees: tags gone, white space single."""
    body = page.read_text(encoding="utf-8").split("<body>", 1)[1]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def alternatives(page: Path) -> str:
    return html.unescape(" ".join(re.findall(r'aria-label="([^"]*)"', page.read_text(encoding="utf-8"))))


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_report(write_online_run(tmp_path_factory.mktemp("runs") / "mine"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = build_experiment_page(write_experiment(tmp_path_factory.mktemp("runs") / "arms"))
    assert page is not None
    return page


def test_the_headline_says_what_was_trained_and_the_paired_gain_over_tasks(online: Path) -> None:
    shown = text_of(online)
    assert "policy “qa”: 2 iterations, 2 groups of rollouts, forked by the brancher “entropy”; 2 of 4 rollouts" in shown
    assert "went from 25.0% to 75.0% on 4 tasks: a paired gain of +50.0 points (95% interval −43.7 to +100.0" in shown
    assert "which contains zero" in shown


def test_checks_without_a_task_in_common_have_a_page_too_and_it_says_that_nothing_is_paired(tmp_path: Path) -> None:
    """Censored rollouts leave tasks without an outcome."""
    run = write_online_run(tmp_path / "mine")
    rows = [
        {"iteration": 0, "task": "t0", "rewards": [0.0]},
        {"iteration": 0, "task": "t1", "rewards": []},
        {"iteration": 2, "task": "t0", "rewards": []},
        {"iteration": 2, "task": "t1", "rewards": [1.0]},
    ]
    write_lines(run / "held_out.jsonl", rows)
    shown = text_of(build_report(run))
    assert "went from 25.0% to 75.0%. No task has an outcome in both checks, so there is no paired gain." in shown


def test_success_is_drawn_over_fresh_calls_and_over_turns(online: Path) -> None:
    said = alternatives(online)
    assert "Held-out success over fresh tool calls, up to 20: from 25.0% to 75.0%." in said
    assert "Held-out success over turns sampled in training, up to 40: from 25.0% to 75.0%" in said


def test_an_environment_without_tools_saves_no_calls_and_is_drawn_over_what_it_did_spend(tmp_path: Path) -> None:
    run = write_online_run(tmp_path / "mine")
    rows = metrics([0.25, 0.5], calls=0)
    rows[-1]["branching"]["calls_chain"] = 0
    write_lines(run / "metrics.jsonl", rows)
    page = build_report(run)
    assert "Tool calls 0 0 –" in text_of(page)
    assert "over fresh tool calls" not in alternatives(page)
    assert "over turns sampled in training" in alternatives(page)
    assert "over tokens sampled in training, up to 100: from 25.0% to 50.0%" in alternatives(page)


def test_a_check_counts_what_was_spent_before_it() -> None:
    assert over(metrics([0.25, 0.5, 0.75]), "trees.calls_fresh", "held_out_success") == [
        (0, 0.25),
        (10, 0.5),
        (20, 0.75),
    ]
    assert over([{"step": 0, "held_out_success": 0.5}], "trees.calls_fresh", "held_out_success") == []


def test_branching_adds_up_over_iterations_and_turns_are_in_their_order(online: Path) -> None:
    shown = text_of(online)
    assert "Tool calls 20 32 37.5%" in shown
    assert "8 leaves: 4 independent starts, 2 forks, 2 refills" in shown
    assert "Forks by turn. turn 2: 4, turn 3: 0" in alternatives(online)
    assert "turn 9: 0, turn 10: 2." in alternatives(online)


def test_what_the_rule_measured_is_told_apart_by_what_became_of_it(online: Path) -> None:
    assert "forked: median 0.7 of 3; no leaf left: median 0.8 of 1; passed: median 0.5 of 5" in alternatives(online)
    assert "3 forks at 9 moments" in text_of(online)
    assert "entropy rose, but no leaf is left to add 1" in text_of(online)


def test_a_rule_that_tosses_a_coin_measures_nothing() -> None:
    toss = Decision("brancher", 0, "pass", "drawn to go on", {"turn": 2.0, "rate": 0.5})
    found = decisions([toss])
    assert found is not None
    assert (found.forks, found.passes, found.measured) == (0, 1, {})


def test_a_brancher_that_measures_only_where_it_forks_has_a_curve_of_its_forks() -> None:
    fork = Decision("brancher", 0, "fork", "uncertain", {"turn": 2.0, "value": 0.7})
    found = decisions([fork, Decision("brancher", 0, "pass", "too early", {"turn": 2.0})])
    assert found is not None
    assert found.measured == {"forked": [0.7]}
    assert cumulative(found.measured, found.unit)


def test_the_drawn_tree_is_told_as_a_table_too(online: Path) -> None:
    shown = text_of(online)
    assert "group 2.0 of iteration 2: 4 rollouts, 1 fork, of which 1 changed the reward." in shown
    assert "One of 1 group with different rewards (of 2)" in shown
    assert (
        'fork after 1 shared turn search({"query": "mayor of <Eaton>"}) search({"query": "the right thing"})' in shown
    )
    assert "<Eaton>" not in online.read_text(encoding="utf-8")


def test_held_out_checks_have_a_line_of_their_own_in_the_ledger(online: Path) -> None:
    shown = text_of(online)
    assert "train mine 40 " in shown
    assert "held-out checks 12 " in shown
    assert "total 52 " in shown


def test_endings_other_than_completion_are_counted_and_drawn(online: Path) -> None:
    assert "How rollouts ended: completed 6, max_turns 2." in text_of(online)
    assert "Rollouts that did not complete over iteration, up to 2: max_turns from 25.0% to 25.0%." in alternatives(
        online
    )


@pytest.mark.parametrize("page", ["online", "compared"])
def test_pages_load_nothing_and_their_ids_are_their_own(page: str, request: pytest.FixtureRequest) -> None:
    markup = request.getfixturevalue(page).read_text(encoding="utf-8")
    assert not re.findall(r"https?://|src=|@import|<script|<link|<iframe|url\((?!#)", markup)
    ids = re.findall(r' id="([^"]*)"', markup)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', markup)) <= set(ids)
    assert markup.count("<svg") == markup.count('role="img" aria-label=')


def test_a_run_that_has_just_begun_says_what_is_not_there_yet(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"stage": "train online", "config": {"model": "qa", "brancher": None}})
    (tmp_path / "metrics.jsonl").touch()
    shown = text_of(build_report(tmp_path))
    assert "No check on held-out tasks was logged" in shown
    assert "No iteration was logged yet." in shown
    assert "every rollout was independent" in shown
    assert "This run kept no trees" in shown


def test_a_tree_that_a_crash_cut_off_is_counted_on_both_pages(online: Path) -> None:
    assert "trees.jsonl holds 2 groups of 2 iterations (0.0 MB; 1 line could not be read)." in text_of(online)
    assert '"unread":1' in (online.parent / "trees.html").read_text(encoding="utf-8")


def test_a_page_leads_to_the_trees_wherever_it_is_written(tmp_path: Path) -> None:
    run = write_online_run(tmp_path / "runs" / "mine")
    assert '<a href="trees.html">' in build_report(run).read_text(encoding="utf-8")
    elsewhere = build_report(run, tmp_path / "pages" / "mine.html").read_text(encoding="utf-8")
    assert '<a href="../runs/mine/trees.html">' in elsewhere
    odd = build_report(run.rename(run.with_name("lr=1e-3#2")), tmp_path / "pages" / "odd.html").read_text(
        encoding="utf-8"
    )
    assert '<a href="../runs/lr%3D1e-3%232/trees.html">' in odd


@pytest.mark.parametrize("line", [b'{"step": \xff}', b'{"step": ' + b"9" * 5000 + b"}", b"[" * 100_000])
def test_a_damaged_line_of_metrics_is_named(tmp_path: Path, line: bytes) -> None:
    run = write_online_run(tmp_path / "mine")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl:\d+: is not JSON"):
        build_report(run)


def test_a_run_without_trees_says_so_and_leads_nowhere(tmp_path: Path) -> None:
    run = write_online_run(tmp_path / "mine")
    (run / "trees.jsonl").unlink()
    page = build_report(run)
    shown = text_of(page)
    assert "This run kept no trees: there is no trees.jsonl in its folder." in shown
    assert "The run kept no trees, which hold the decisions." in shown
    assert "trees.html" not in page.read_text(encoding="utf-8")
    assert not (run / "trees.html").exists()


def test_the_table_of_arms_has_success_gain_and_what_they_spent(compared: Path) -> None:
    shown = text_of(compared)
    assert (
        "2 arms over 2 matched seeds, from 25.0% held-out success. The highest mean is 60.0%, of “Entropy forks”"
        in shown
    )
    assert "Entropy forks entropy 60.0% 55.0 to 65.0 +35.0 +30.0 to +40.0 1,234 9,876 37.5% 3.25 40.0% 3.50 –" in shown


def test_differences_are_read_by_their_interval_and_say_what_could_be_detected(compared: Path) -> None:
    shown = text_of(compared)
    assert "+10.0 +5.0 to +15.0 above zero 7.5 +2.0 −3.0 to +7.0 contains zero 7.5 +2.0" in shown
    assert (
        "“Entropy forks” − “Random forks” at matched calls: +2.0 points (95% interval −3.0 to +7.0, contains" in shown
    )


def test_a_single_seed_has_no_interval_and_the_page_says_so(tmp_path: Path) -> None:
    page = build_experiment_page(write_experiment(tmp_path, half=None))
    assert page is not None
    shown = text_of(page)
    assert "at matched calls: +2.0 points; one seed has no interval." in shown
    assert "Entropy forks entropy 60.0% +35.0 1,234" in shown


def test_curves_are_means_over_seeds_of_calls_and_success(tmp_path: Path, compared: Path) -> None:
    found = read_experiment(write_experiment(tmp_path))
    assert found is not None
    flat = [number for point in mean_curve(found.curves["entropy"]) for number in point]
    assert flat == pytest.approx([0, 0.25, 11, 0.4, 22, 0.6])
    assert "Entropy forks 60.0% after 22 calls; Random forks 50.0% after 20 calls." in alternatives(compared)
    assert "Not in this folder, so not drawn: seed1/random" in text_of(compared)


def test_summaries_of_before_they_had_a_schema_are_read(tmp_path: Path) -> None:
    found = read_experiment(write_experiment(tmp_path))
    summary = read_json(tmp_path / "summary.json")
    del summary["schema"]
    write_json(tmp_path / "summary.json", summary)
    assert read_experiment(tmp_path) == found is not None


def test_a_summary_of_another_kind_is_no_such_experiment_and_an_incomplete_one_is_named(tmp_path: Path) -> None:
    assert build_experiment_page(tmp_path) is None
    write_json(tmp_path / "summary.json", {"arms": {"base": {"success": 0.5}}, "seeds": [0]})
    assert read_experiment(tmp_path) is None
    summary = read_json(write_experiment(tmp_path) / "summary.json")
    del summary["arms"]["random"]["gain"]
    write_json(tmp_path / "summary.json", summary)
    with pytest.raises(InputError, match=r"summary\.json: field 'gain': is missing"):
        build_experiment_page(tmp_path)
