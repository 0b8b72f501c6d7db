"""Forgetting, through lm-eval, offline: a task and its questions in files of their own."""

import json
import sys

import pytest

from turntree.core.errors import ConfigError, InputError
from turntree.stages.forgetting import ForgettingConfig, compare, run_forgetting
from turntree.stages.policy import load_policy


def result(values, *, task="t", metric="acc", mean=None):
    samples = [{"doc_id": i, "filter": "none", metric: value} for i, value in enumerate(values)]
    mean = sum(values) / len(values) if mean is None else mean
    figures = {"alias": task, f"{metric},none": mean, f"{metric}_stderr,none": 0.1, "sample_len": len(values)}
    return {"results": {task: figures}, "samples": {task: samples}, "higher_is_better": {task: {metric: True}}}


def test_changes_are_paired_by_question() -> None:
    """(after - before) = 1, 0, 0, -1, 1: mean 0.2, deviation sqrt(0.7), half width 1.96 sqrt(0.7 / 5)."""
    (row,) = compare(result([0.0, 1.0, 0.0, 1.0, 0.0]), result([1.0, 1.0, 0.0, 0.0, 1.0]))
    assert (row["task"], row["metric"], row["questions"], row["higher_is_better"]) == ("t", "acc", 5, True)
    assert (row["base"], row["policy"], row["change"]) == pytest.approx((0.4, 0.6, 0.2))
    half = 1.959964 * (0.7 / 5) ** 0.5
    assert (row["low"], row["high"]) == pytest.approx((0.2 - half, 0.2 + half))


def test_a_metric_that_is_no_mean_over_questions_has_no_interval() -> None:
    (row,) = compare(result([1.0, 2.0], metric="perplexity", mean=7.0), result([1.0, 3.0], metric="perplexity"))
    assert (row["base"], row["low"], row["questions"]) == (7.0, None, 0)
    group = result([1.0])
    group["samples"] = {}
    assert compare(group, group)[0]["low"] is None


def test_different_questions_are_not_paired() -> None:
    assert compare(result([1.0, 0.0]), result([1.0, 0.0, 0.0]))[0]["questions"] == 0


def test_without_a_task_there_is_nothing_to_ask() -> None:
    with pytest.raises(ConfigError):
        ForgettingConfig(model="default", tasks=())


def test_a_missing_extra_is_one_line_that_says_what_to_install(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"pip install 'turntree\[lm-eval\]'"):
        run_forgetting(ForgettingConfig(model="default", tasks=("hellaswag",)))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Which of two household commands follows? The answers are those of the policy's own world, so it knows some."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"asked": f"open drawer {i}", "choices": ["drawer", "sky"], "answer": i % 2} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "commands.yaml").write_text(
        f"""
task: commands
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "rows.jsonl"}}}, cache_dir: {folder / "cache"}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{asked}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    return folder


@pytest.mark.filterwarnings("default")  # of libraries that are not ours
def test_a_local_task_compares_base_and_policy(questions, tmp_path, capfd) -> None:
    import torch

    changed = load_policy("default", ForgettingConfig(model="x", tasks=("x",)).device)
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in changed.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    changed.model.save_pretrained(tmp_path / "model")
    changed.tokenizer.save_pretrained(tmp_path / "model")
    config = ForgettingConfig(model=str(tmp_path / "model"), tasks=("commands",), include=str(questions))
    found = run_forgetting(config, tmp_path / "retention.json")
    assert json.loads((tmp_path / "retention.json").read_text()) == found
    assert found["base_hash"] != found["policy_hash"]
    (row,) = found["tasks"]
    assert (row["task"], row["metric"], row["questions"]) == ("commands", "acc", 12)
    assert row["base"] == pytest.approx(0.5)  # the same answer to every question is right every other time
    assert row["low"] <= row["change"] <= row["high"]
    assert capfd.readouterr().out == ""


@pytest.mark.filterwarnings("default")
def test_a_limit_asks_the_first_questions_and_the_base_against_itself_has_no_change(questions) -> None:
    config = ForgettingConfig(model="default", tasks=("commands",), include=str(questions), limit=5)
    (row,) = run_forgetting(config)["tasks"]
    assert (row["questions"], row["change"], row["low"], row["high"]) == (5, 0.0, 0.0, 0.0)


@pytest.mark.filterwarnings("default")
def test_a_task_whose_data_are_out_of_reach_is_one_line(questions, tmp_path) -> None:
    text = (questions / "commands.yaml").read_text()
    (tmp_path / "lost.yaml").write_text(text.replace("task: commands", "task: lost").replace("rows.jsonl", "no.jsonl"))
    with pytest.raises(InputError, match="cannot be loaded") as error:
        run_forgetting(ForgettingConfig(model="default", tasks=("lost",), include=str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_is_one_line(tmp_path) -> None:
    pytest.importorskip("lm_eval")
    with pytest.raises(InputError, match="is not a folder"):
        run_forgetting(ForgettingConfig(model="default", tasks=("x",), include=str(tmp_path / "none")))
