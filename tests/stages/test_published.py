"""Published pivot rows as a profile: their pass rates select pivots, and never pass for those of the user's policy."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from turntree.cli.main import cli
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.pivots.select import SelectConfig
from turntree.run.artifacts import PIVOTS, PROFILE
from turntree.stages.config import ProfileStageConfig, RescoreConfig
from turntree.stages.import_traces import ImportConfig, import_traces
from turntree.stages.profile import run_profile
from turntree.stages.rescore import run_rescore
from turntree.stages.select import run_select

SHARED = "nemo_gym/resources_servers__single_step_tool_use_with_argument_comparison__data__example.jsonl.xz"


def row(name: str, **told: Any) -> dict[str, Any]:
    """A row of the documented columns."""
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    request = {"input": [{"role": "user", "content": f"Look at {name}."}], "tools": [tool]}
    action = {"type": "function_call", "name": "look", "arguments": "{}"}
    return {"trajectory_id": name, "responses_create_params": request, "expected_action": action, **told}


def profiled(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    report = import_traces([folder / "rows.jsonl"], folder / "traces.jsonl", ImportConfig(dev=0))
    assert not [key for key in report["ignored"] if key.startswith("unknown")], "every documented column is known"
    config = ProfileStageConfig(traces=str(folder / "traces.jsonl"), published=True, **changes)
    run_profile(config, folder / "profile.jsonl")
    header, found = PROFILE.read(folder / "profile.jsonl")
    return header, list(found)


def test_pass_rates_become_rewards_and_select_pivots_without_a_model(tmp_path: Path) -> None:
    info = {"rewards": [1, 0, 1, 0], "reward_mean": 0.5, "reward_std": 0.5, "reward_var": 0.25}
    rows = [
        row("a", pass_rate=0.25, pass_rate_total=16, pass_rate_passed=4, qwen_235b_info=info, num_unique_actions=3),
        row("b", pass_rate=0.0, pass_rate_total=16, meta_info={"turn": 1, "step": 2, "assistant_depth": 1}),
        row("c", qwen_235b_info=info, scenario="s", agent_ref={"type": "responses_api_agents", "name": "x"}),
        row("d", pass_rate=0.9, pass_rate_total=10),
        row("e"),
    ]
    header, found = profiled(tmp_path, rows)
    by_id = {one["trace_id"]: one for one in found}
    assert [(one["rollouts"], one["reward_mean"]) for one in found] == [(16, 0.25), (16, 0.0), (4, 0.5), (10, 0.9)]
    assert [one["reward_var"] for one in found] == pytest.approx([0.1875, 0, 0.25, 0.09])
    assert header["summary"]["skipped_turns"] == {"no_pass_rate_with_its_number_of_rollouts": 1}
    assert header["summary"]["classes"] == {"pivot": 2, "all fail": 1, "mixed but easy": 1}
    run_select(tmp_path / "profile.jsonl", SelectConfig(anchor_share=0.0), tmp_path / "pivots.jsonl")
    told, pivots = PIVOTS.read(tmp_path / "pivots.jsonl")
    assert {one["reward_mean"] for one in pivots} == {0.25, 0.5} and len(by_id) == 4
    assert told["policy_hash"] == told["verifier"] == "published", "they are no policy's of the user"
    assert told["verifier_source"]["name"] == "nemo"


def test_published_rates_raise_no_alarm_and_what_needs_samples_says_that_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(tmp_path, [row("a", pass_rate=0.25, pass_rate_total=16), row("b")])
    command = ["profile", "--published", "--traces", str(tmp_path / "traces.jsonl"), "--out"]
    cli.main([*command, str(tmp_path / "profile.jsonl")], standalone_mode=False)
    said = capsys.readouterr().out
    assert "look at this first" not in said and "would miss" not in said
    assert "not candidates: 1 no_pass_rate_with_its_number_of_rollouts\n" in said
    assert PROFILE.read(tmp_path / "profile.jsonl")[0]["summary"]["gold_unjudged"] == 0
    rescoring = RescoreConfig(profile=str(tmp_path / "profile.jsonl"), verifier=Part("strict"))
    with pytest.raises(InputError, match="holds no samples: its pass rates are published ones"):
        run_rescore(rescoring, tmp_path / "out.jsonl")
    with pytest.raises(InputError, match="is of another run"):  # as any finished profile
        cli.main([*command, str(tmp_path / "profile.jsonl"), "--limit", "1"], standalone_mode=False)


@pytest.mark.parametrize("words", [["--rollouts", "3"], ["--adaptive"], ["--max-tokens", "9"], ["--reuse", "p.jsonl"]])
def test_settings_of_sampling_are_refused_with_published_rates(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="the settings of sampling do nothing"):
        cli.main(["profile", "--published", "--traces", "t.jsonl", "--out", "p.jsonl", *words], standalone_mode=False)


def test_impossible_rates_and_traces_without_any_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a pass rate"):
        profiled(tmp_path, [row("a", pass_rate=1.5, pass_rate_total=16)])
    with pytest.raises(InputError, match="record no pass rate"):
        profiled(tmp_path, [row("a")])


def test_published_rows_of_the_other_servers_are_read_whole(tmp_path: Path) -> None:
    terminal = {"uuid": "u", "source_trajectory_uid": "t", "pivot_agent_turn_index": 3, "threshold": 0.9}
    action = {"expected_answer": "{}", "metadata": {"harness": "terminus_2"}, "pass_rate": 0.5, "pass_rate_total": 8}
    asked = {"responses_create_params": {"input": [{"role": "user", "content": "ls"}]}}
    header, found = profiled(tmp_path, [{**asked, **terminal, **action}])
    assert found[0]["successes"] == 4 and header["summary"]["candidates"] == 1


def test_the_shared_rows_import_and_a_named_verifier_is_kept(shared_data: Path, tmp_path: Path) -> None:
    with lzma.open(shared_data / SHARED) as file:
        rows = [json.loads(line) for line in file]
    rated = [{**one, "pass_rate": 0.5, "pass_rate_total": 4, "trajectory_id": str(n)} for n, one in enumerate(rows)]
    header, found = profiled(tmp_path, rated, verifier=Part("recommended"))
    assert len(found) == len(rows) == 5
    assert header["config"]["verifier"]["name"] == "recommended"


def test_a_rate_of_one_rollout_says_nothing_and_whole_numbers_are_numbers(tmp_path: Path) -> None:
    rates = [{"pass_rate": 1.0, "pass_rate_total": 1}, {"pass_rate": 0.25, "pass_rate_total": 16.0}]
    _, rows = profiled(tmp_path, [row(f"t{n}", **rate) for n, rate in enumerate(rates)])
    assert [(each["rollouts"], each["reward_mean"]) for each in rows] == [(1, None), (16, 0.25)]
