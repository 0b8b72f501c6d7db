"""The page of an online run: the numbers are there, what is absent is said."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from online_directories import metrics, write_lines, write_online_run

from turntree.core.errors import InputError
from turntree.report.html import build_report, over
from turntree.run.files import write_json


def text_of(page: Path) -> str:
    """What a reader sees: tags gone, white space single."""
    body = page.read_text(encoding="utf-8").split("<body>", 1)[1]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def alternatives(page: Path) -> str:
    return html.unescape(" ".join(re.findall(r'aria-label="([^"]*)"', page.read_text(encoding="utf-8"))))


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_report(write_online_run(tmp_path_factory.mktemp("runs") / "mine"))


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
    assert "went from 25.0% to 75.0%." in shown


def test_success_is_drawn_over_fresh_calls_and_over_turns(online: Path) -> None:
    said = alternatives(online)
    assert "Held-out success over fresh tool calls: from 25.0% to 75.0%." in said
    assert "Held-out success over turns sampled in training: from 25.0% to 75.0%" in said


def test_an_environment_without_tools_saves_no_calls_and_is_drawn_over_what_it_did_spend(tmp_path: Path) -> None:
    run = write_online_run(tmp_path / "mine")
    rows = metrics([0.25, 0.5], calls=0)
    rows[-1]["branching"]["calls_chain"] = 0
    write_lines(run / "metrics.jsonl", rows)
    page = build_report(run)
    assert "Tool calls 0 0 –" in text_of(page)
    assert "over fresh tool calls" not in alternatives(page)
    assert "over turns sampled in training" in alternatives(page)
    assert "over tokens sampled in training: from 25.0% to 50.0%" in alternatives(page)


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


def test_held_out_checks_have_a_line_of_their_own_in_the_ledger(online: Path) -> None:
    shown = text_of(online)
    assert "train mine 40 " in shown
    assert "held-out checks 12 " in shown
    assert "total 52 " in shown


def test_endings_are_counted(online: Path) -> None:
    assert "How rollouts ended: completed 6, max_turns 2." in text_of(online)


def test_the_page_loads_nothing_and_its_ids_are_its_own(online: Path) -> None:
    markup = online.read_text(encoding="utf-8")
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
    assert "0 iterations, 0 groups of rollouts, all of them independent." in shown


def test_a_tree_that_a_crash_cut_off_is_counted_on_both_pages(online: Path) -> None:
    assert "1 line of the trees could not be read." in text_of(online)
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
    with pytest.raises(InputError, match=r"metrics\.jsonl:\d+: is "):
        build_report(run)


def test_a_run_without_trees_leads_nowhere(tmp_path: Path) -> None:
    run = write_online_run(tmp_path / "mine")
    (run / "trees.jsonl").unlink()
    page = build_report(run)
    assert "trees.html" not in page.read_text(encoding="utf-8")
    assert not (run / "trees.html").exists()
