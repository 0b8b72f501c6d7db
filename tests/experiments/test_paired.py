"""Comparisons of matched arms: what counts as one observation, and what a summary keeps."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from turntree.core.config import to_mapping
from turntree.core.cost import Cost
from turntree.core.errors import InputError
from turntree.experiments import gate, paired
from turntree.experiments.config import GateExperimentConfig
from turntree.experiments.paired import (
    held_out_outcomes,
    over_seeds,
    paired_outcomes,
    ratio_over_seeds,
    run_or_reuse,
    write_experiment,
)
from turntree.report.html import build_report
from turntree.run.files import write_json
from turntree.run.folder import RunDirectory, open_run
from turntree.run.means import mean
from turntree.run.statistics import crossed_interval, sign_flip, t_interval
from turntree.stages.train_online import TrainOnlineConfig


def test_seeds_that_repeat_each_other_add_no_tasks():
    """The same 20 outcomes under four seeds are 20 observations: the interval is that of one seed."""
    one = {f"t{i}": float(i % 2) for i in range(20)}
    other = {f"t{i}": float(i % 5 == 0) for i in range(20)}
    once = paired_outcomes([one], [other])["held_out_difference"]
    four = paired_outcomes([one] * 4, [other] * 4)["held_out_difference"]
    assert once == pytest.approx(four)
    assert once["mean"] == pytest.approx(0.3) and once["tasks"] == 20


def test_tasks_are_compared_over_tasks_and_seeds_over_both():
    """Each with its own interval: the means of tasks over seeds, and the crossed one of all differences."""
    mine = [{"a": 1.0, "b": 0.5, "c": 0.0}, {"a": 1.0, "b": 1.0, "c": 0.5}]
    theirs = [{"a": 0.0, "b": 0.5, "c": 0.0}, {"a": 0.5, "b": 0.0, "c": 0.5}]
    found, by_task = paired_outcomes(mine, theirs), [0.75, 0.5, 0.0]
    interval = t_interval(by_task)._asdict()
    wanted = interval | {"p_value": sign_flip(by_task), "tasks": 3, "left_out": 0}
    assert found["held_out_difference"] == pytest.approx(wanted)
    crossed = crossed_interval(np.array([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0]]))._asdict()
    assert {key: found["by_seed"][key] for key in crossed} == pytest.approx(crossed)
    assert found["by_seed"]["values"] == pytest.approx([1 / 3, 0.5])


def test_one_value_a_seed_keeps_its_values_beside_its_interval():
    assert over_seeds([1.0, 2.0, 3.0]) == t_interval([1.0, 2.0, 3.0])._asdict() | {"values": [1.0, 2.0, 3.0]}


def test_a_ratio_is_averaged_geometrically_and_inverts_with_its_interval():
    ratios = [0.5, 1.0, 4.0]
    found, inverted = ratio_over_seeds(ratios), ratio_over_seeds([1 / ratio for ratio in ratios])
    assert found["mean"] == pytest.approx(2 ** (1 / 3)) and found["values"] == ratios
    assert found["low"] < found["mean"] < found["high"]
    assert (inverted["mean"], inverted["low"]) == pytest.approx((1 / found["mean"], 1 / found["high"]))
    once = ratio_over_seeds([2.0])
    assert (once["mean"], once["low"], once["high"]) == (pytest.approx(2.0), None, None)
    assert found["low"] == pytest.approx(math.exp(t_interval([math.log(r) for r in ratios]).low))


def test_a_mean_is_of_what_is_known():
    assert mean([1.0, None, 0.0, 0.5]) == 0.5
    assert mean([None]) is None and mean([]) is None


def test_an_arm_that_is_finished_is_not_run_again_and_another_one_is_not_taken_for_it(tmp_path, monkeypatch):
    ran = []

    def run(config, folder):
        ran.append(config.train.seed)
        with open_run(folder, "train online", to_mapping(config), {}) as arm:
            arm.write_cost(Cost())

    monkeypatch.setattr(paired, "run_train_online", run)
    config = TrainOnlineConfig()
    for _ in range(2):
        run_or_reuse(config, tmp_path / "arm")
    assert ran == [config.train.seed]
    other = replace(config, train=replace(config.train, seed=7))
    with pytest.raises(InputError, match="seed"):
        run_or_reuse(other, tmp_path / "arm")
    run_or_reuse(other, tmp_path / "other")
    assert ran == [config.train.seed, 7]


def test_tasks_without_an_outcome_in_some_run_are_left_out_and_counted():
    found = paired_outcomes([{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.0, "c": 1.0}], [{"a": 0.0, "b": 0.0}] * 2)
    assert found["held_out_difference"]["mean"] == 0.75
    assert (found["held_out_difference"]["tasks"], found["held_out_difference"]["left_out"]) == (2, 1)
    assert found["by_seed"]["values"] == [1.0, 0.5]
    with pytest.raises(InputError, match="no held-out task"):
        paired_outcomes([{"a": 1.0}], [{"b": 1.0}])


def test_outcomes_by_task_lie_beside_the_summary(tmp_path):
    run = tmp_path / "seed3" / "none"
    run.mkdir(parents=True)
    rows = [{"iteration": 0, "task": "a", "rewards": [0.0, 1.0]}, {"iteration": 0, "task": "b", "rewards": []}]
    (run / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert RunDirectory(run).outcomes() == {0: {"a": 0.5}}
    assert held_out_outcomes(run) == {"a": 0.5}
    with (run / "held_out.jsonl").open("a") as more:
        for iteration, rewards in ((20, [1.0]), (9, [0.0])):
            more.write(json.dumps({"iteration": iteration, "task": "\u00e4", "rewards": rewards}) + "\n")
    assert held_out_outcomes(run) == {"\u00e4": 1.0} and RunDirectory(run).outcomes()[9] == {"\u00e4": 0.0}
    with pytest.raises(InputError, match="no outcomes by task"):
        held_out_outcomes(tmp_path / "seed4" / "none")
    write_experiment(tmp_path, {"gain": 0.5}, [3], ["none"])
    assert json.loads((tmp_path / "summary.json").read_text()) == {"gain": 0.5}
    kept, *later = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [row["check"] for row in later] == [20, 9]
    assert kept == {"arm": "none", "seed": 3, "check": 0, "success": {"a": 0.5}}


def test_arms_that_began_with_other_weights_in_the_same_folder_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "summarise", lambda config, out: {})
    monkeypatch.setattr(gate, "run_or_reuse", lambda *args: None)
    config = GateExperimentConfig(seeds=(0,), arms=("none",))
    for weights in ("one", "one", "other"):
        monkeypatch.setattr(paired, "policy_hash", lambda model, weights=weights: weights)
        if weights == "other":
            with pytest.raises(InputError, match="another configuration or policy"):
                gate.run_gate_experiment(config, tmp_path)
        else:
            gate.run_gate_experiment(config, tmp_path)


def test_a_folder_of_arms_is_no_run_and_the_report_says_so(tmp_path, monkeypatch):
    """It said that no policy was trained there, or that the summary was broken."""
    monkeypatch.setattr(gate, "run_or_reuse", lambda *args: None)
    summary = {"seeds": [0], "arms": {"none": {}}, "differences": {"gate": {"saved": {}}}}
    monkeypatch.setattr(gate, "summarise", lambda config, out: summary)
    gate.run_gate_experiment(GateExperimentConfig(seeds=(0,), arms=("none",)), tmp_path)
    for _ in range(2):
        with pytest.raises(InputError, match="is a summary of an experiment"):
            build_report(tmp_path)
        write_json(tmp_path / "summary.json", summary)  # as it was before it had a schema
