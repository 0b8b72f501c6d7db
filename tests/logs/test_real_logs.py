"""Logs that the frameworks' own writers made (`real_writers.py`), with TRL 1.16, verl 0.9.1 (both trainers), SkyRL
0.4.0, AReaL 1.0.4, Agent Lightning 1.0.2, NeMo Gym 0.7.0, and checkouts of August 2026 of prime-rl (on verifiers
0.4.0), slime and rLLM: naming the folder is enough, and what is read is what was played."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_writers import PLAYED, WRITERS, rollouts

from chromium import browser
from turntree.cli.main import main
from turntree.logs.read import open_log

REAL = Path(__file__).parent / "real"
FIRST = {"trl": 1}  # the number of the first step
WITHOUT_FAILURES = {  # what stands in the log for a rollout that failed, where the framework does not say that it did
    "verl": [0.0], "verl-v1": [0.0], "skyrl": [0.0], "skyrl-steps": [0.0], "agent-lightning": [0.0], "areal": [],
}  # fmt: skip

HAVE_A_FILTER = {"verl", "verl-v1", "skyrl", "skyrl-steps", "slime", "rllm"}  # which a setting of theirs turns on


def wanted(name: str) -> Counter[tuple[int, tuple[str, ...]]]:
    """The rewards of every group, by step."""
    failed = WITHOUT_FAILURES.get(name, [None])
    return Counter(
        (step + FIRST.get(name, 0), tuple(sorted(str(one) for r in rewards for one in (failed if r is None else [r]))))
        for step, groups in enumerate(PLAYED)
        for rewards in groups.values()
    )


@pytest.mark.parametrize("name", WRITERS)
def test_a_framework_s_own_log_is_recognised_by_its_folder_and_holds_what_was_played(name: str) -> None:
    log = open_log([REAL / name])
    groups = list(log)
    assert log.report.format == name.removesuffix("-v1").removesuffix("-steps")
    assert Counter((g.iteration, tuple(sorted(map(str, g.rewards)))) for g in groups) == wanted(name)
    assert len({group.task for group in groups}) == len({row.question for row in rollouts()})
    assert not log.report.dropped


@pytest.mark.parametrize("name", WRITERS)
def test_its_audit_says_how_many_groups_bought_no_gradient(name: str, tmp_path, capsys) -> None:
    main(["audit", str(REAL / name), "--out", str(tmp_path / "page.html"), "--json", "-"])
    told = json.loads(capsys.readouterr().out)
    assert (told["zero_variance"], told["scored"]) == (4, 6)
    setting = told["log"]["filter_setting"]
    assert (setting is not None) == (name in HAVE_A_FILTER)
    where = f" ({told['log']['format']}: {setting})" if setting else ""
    assert f"DAPO’s filter leaves them out{where}." in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_its_page_fits_a_phone(tmp_path: Path) -> None:
    main(["audit", str(REAL / "slime"), "--out", str(tmp_path / "page.html")])  # whose setting is long
    with browser(390, 780) as window:
        window.get((tmp_path / "page.html").as_uri())
        assert window.execute_script("return document.documentElement.scrollWidth") <= 390


def test_a_trajectory_whose_steps_are_rows_is_one_rollout_and_not_one_a_step() -> None:
    assert {r.turns for group in open_log([REAL / "skyrl-steps"]) for r in group.rollouts} == {2}


def test_a_rollout_that_succeeded_at_its_second_try_has_its_reward() -> None:
    rows = (REAL / "prime-rl/rollouts/step_0/train/all/traces.jsonl").read_text().splitlines()
    tried = [trace for row in rows for trace in json.loads(row)["traces"] if trace["errors"]]
    assert tried and all(trace["ok"] for trace in tried)
    assert None not in {reward for g in open_log([REAL / "prime-rl"]) if g.iteration == 0 for reward in g.rewards}


def test_a_failure_beside_a_collection_is_a_rollout_without_a_reward_of_the_same_group(tmp_path) -> None:
    shutil.copytree(REAL / "nemo-gym", tmp_path / "log")
    main_file = tmp_path / "log/rollouts_0.jsonl"
    *kept, last = main_file.read_text().splitlines(keepends=True)
    main_file.write_text("".join(kept))
    failed = {key: value for key, value in json.loads(last).items() if key not in ("response", "reward")}
    failed |= {"_ng_failure_class": "agent_request_failed"}
    (tmp_path / "log/rollouts_0_failures.jsonl").write_text(json.dumps(failed) + "\n")
    log = open_log([tmp_path / "log"])
    assert sorted(len(group.rollouts) for group in log if group.iteration == 0) == [4, 4, 4]
    assert not log.report.dropped


FACT = {  # format: a real file, where its row says what is right or asked, and where it has its reward
    "verl": ("verl/0.jsonl", ("gts",), ("score",)),
    "verl-v1": ("verl-v1/0.jsonl", ("gts",), ("score",)),
    "skyrl": ("skyrl/dumped_evals/global_step_0_evals/sums.jsonl", ("env_extras", "reward_spec"), ("score",)),
    "slime": ("slime/0.jsonl", ("label",), ("reward",)),
    "agent-lightning": ("agent-lightning/step_0/train_trajectories.jsonl", ("data_source",), ("reward",)),
    "nemo-gym": ("nemo-gym/rollouts_0.jsonl", ("expected_answer",), ("reward",)),
    "prime-rl": (
        "prime-rl/rollouts/step_0/train/all/traces.jsonl",
        ("traces", 0, "task", "data", "answer"),
        ("traces", 0, "rewards", "correct", "score"),
    ),
    "rllm": (
        "rllm/episodes/train_step_0_epoch_0/episode_hash8f5dedfb_id1+1_0.json",
        ("task", "answer"),
        ("trajectories", 0, "reward"),
    ),
}


def put(row: Any, place: tuple[Any, ...], value: Any) -> None:
    *above, last = place
    for key in above:
        row = row[key]
    row[last] = value


def test_every_framework_has_a_row_here() -> None:
    # TRL's tables: test_told_apart.py; AReaL's rows tell no more than a task_id
    assert {*FACT, "skyrl-steps", "trl", "areal"} == set(WRITERS)


@pytest.mark.parametrize("name", FACT)
@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=3), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_rows_of_one_key_that_say_something_else_is_right_are_never_one_group(
    name: str, sizes: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file, fact, reward = FACT[name]
    text = (REAL / file).read_text()
    real = json.loads(text if name == "rllm" else text.splitlines()[0])
    rows = []
    for task, size in enumerate(sizes):
        for _ in range(size):
            row = copy.deepcopy(real)
            put(row, fact, f"gold {task}")
            put(row, reward, float(10 * task + len(rows)))
            rows.append(row | {key: len(rows) for key in ("sample_idx", "_ng_rollout_index") if key in row})
    random.Random(seed).shuffle(rows)
    folder = tmp_path_factory.mktemp("log")
    for number, row in enumerate(rows):
        row |= {"uid": f"1+1_{number}_0"} if "uid" in row else {}
        with (folder / (f"episode_hash0_id{number}.json" if name == "rllm" else "0.jsonl")).open("a") as log:
            log.write(json.dumps(row) + "\n")
    groups = list(open_log([folder]))
    made = sorted(sorted(group.rewards) for group in groups)
    wanted = [sorted(float(10 * t + sum(sizes[:t]) + n) for n in range(size)) for t, size in enumerate(sizes)]
    assert made == sorted(wanted)
