"""Comparisons of matched arms: what counts as one observation, and what a summary keeps."""

import json

import pytest

from turntree.core.errors import InputError
from turntree.stages.experiment_branching import area, at
from turntree.stages.paired import held_out_checks, held_out_outcomes, paired_outcomes, write_experiment


def test_seeds_that_repeat_each_other_add_no_tasks():
    """The same 20 outcomes under four seeds are 20 observations: the interval is that of one seed."""
    one = {f"t{i}": float(i % 2) for i in range(20)}
    other = {f"t{i}": float(i % 5 == 0) for i in range(20)}
    once = paired_outcomes([one], [other])["held_out_difference"]
    four = paired_outcomes([one] * 4, [other] * 4)["held_out_difference"]
    assert once == pytest.approx(four)
    assert once["mean"] == pytest.approx(0.3) and once["tasks"] == 20


def test_tasks_without_an_outcome_in_some_run_are_left_out_and_counted():
    found = paired_outcomes([{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.0, "c": 1.0}], [{"a": 0.0, "b": 0.0}] * 2)
    assert found["held_out_difference"]["mean"] == 0.75
    assert (found["held_out_difference"]["tasks"], found["held_out_difference"]["left_out"]) == (2, 1)
    assert found["by_seed"]["values"] == [1.0, 0.5]
    with pytest.raises(InputError, match="no held-out task"):
        paired_outcomes([{"a": 1.0}], [{"b": 1.0}])


def test_success_at_a_number_of_calls_lies_on_the_line_between_checks():
    curve = [(0.0, {"a": 0.0, "b": 1.0}), (10.0, {"a": 1.0, "b": 1.0}), (20.0, {"a": 0.0, "b": 1.0})]
    assert at(curve, 5.0) == {"a": 0.5, "b": 1.0}
    assert at(curve, 15.0) == {"a": 0.5, "b": 1.0}
    assert area(curve) == {"a": 0.5, "b": 1.0}


def test_outcomes_by_task_lie_beside_the_summary(tmp_path):
    run = tmp_path / "seed3" / "none"
    run.mkdir(parents=True)
    rows = [{"iteration": 0, "task": "a", "rewards": [0.0, 1.0]}, {"iteration": 0, "task": "b", "rewards": []}]
    (run / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert held_out_checks(run) == {0: {"a": 0.5}}
    with pytest.raises(InputError, match="no outcomes by task"):
        held_out_outcomes(tmp_path / "seed4" / "none")
    write_experiment(tmp_path, {}, [3], ["none"])
    (kept,) = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert kept == {"arm": "none", "seed": 3, "check": 0, "success": {"a": 0.5}}
