"""What becomes of a profile that was paid for: pivots that know what they were made from, and other verdicts."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tiny_models import tiny_tokenizer
from turntree.core.completion import Sampling
from turntree.core.config import Part, to_mapping
from turntree.core.cost import Cost
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.pivots.profile import Draft, Judge, ProfileConfig
from turntree.pivots.samples import Sample
from turntree.pivots.select import SelectConfig
from turntree.pivots.stopping import AdaptiveConfig
from turntree.pivots.summary import ProfileSummary
from turntree.render.template import ChatRenderer
from turntree.run.artifacts import PIVOTS, PROFILE
from turntree.run.files import file_hash
from turntree.stages.candidates import stream_candidates
from turntree.stages.profile import ProfileStageConfig, say_lengths
from turntree.stages.rescore import RescoreConfig, run_rescore
from turntree.stages.select import THRESHOLDS, run_select
from turntree.stages.verifier import open_verifier
from turntree.traces.candidates import candidates
from turntree.traces.schema import Trace, write_traces
from turntree.verify.strict import StrictMatch

RIGHT, WRONG = Message("assistant", "left"), Message("assistant", "right")
CUT = replace(RIGHT, cut=True)
TURNS = ([RIGHT, RIGHT, WRONG, WRONG], [WRONG] * 4, [RIGHT] * 4, [RIGHT, WRONG, CUT, CUT])  # by trace
NAMED = {"policy_hash": "01", "tokenizer_hash": "23", "template_hash": "45", "renderer": "template"}
ANY = Part("tool_call", {"messages": "any"})
TOOL_CALL = Part("tool_call")


def profile(
    folder: Path, *, verifier: Part = TOOL_CALL, adaptive: AdaptiveConfig | None = None, drawn=TURNS, seed=0
) -> Path:
    """A profile of four rollouts at most at the only turn of every trace."""
    traces = folder / "traces.jsonl"
    messages = (Message("user", "go"), Message("assistant", "left"))
    made = [Trace(id=f"t{i}", messages=messages, split="train", success=True) for i in range(len(drawn))]
    write_traces(traces, made, {"made_by": "import"})
    profiling = ProfileConfig(rollouts=4, sampling=Sampling(max_tokens=9), adaptive=adaptive, seed=seed)
    config = ProfileStageConfig(traces=str(traces), verifier=verifier, split="train", profile=profiling)
    with open_verifier(verifier) as opened:
        judge, found, rows = Judge(opened, profiling), ProfileSummary(4, adaptive), []
    for trace, actions in zip(made, drawn, strict=True):
        (state,) = candidates(trace)
        draft = Draft(state, judge, *judge.demonstrated([state]))
        draft.add([Sample(action, cost=Cost(turns=1)) for action in actions])
        rows.append(json.loads(json.dumps(draft.finish(4).to_json())))
        found.add(rows[-1])
    named = {**NAMED, "verifier": judge.name, "traces_hash": file_hash(traces)}
    summary = found.summary({"too long": 2})
    header = {"config": to_mapping(config), **named, "summary": summary, "timing": {"engine_seconds": 2.0}}
    PROFILE.write(folder / "profile.jsonl", header, rows)
    return folder / "profile.jsonl"


def table(path: Path):
    header, rows = PROFILE.read(path)
    return header, list(rows)


def test_every_candidate_has_the_same_weight_in_the_miss_rate_however_often_it_was_sampled() -> None:
    """Adaptive profiling samples longer where rewards disagree: a rate over rollouts would depend on its rule."""
    found = ProfileSummary(16, None)
    for rollouts, missed in ((16, 0), (4, 4)):
        action = {"count": rollouts, "reward": 1.0, "strict": 0.0 if missed else 1.0}
        empty = {"truncated": 0, "unjudged": 0, "faults": {}, "certainty": 1.0, "cost": {}, "stop": "settled"}
        found.add({"rollouts": rollouts, "reward_mean": 1.0, "reward_var": 0.0, "actions": [action], **empty})
    assert found.summary({})["miss_rate"] == 0.5


def test_pivots_say_what_they_were_made_from_and_what_became_of_every_candidate(tmp_path) -> None:
    made = profile(tmp_path)
    found = run_select(made, SelectConfig(threshold=0.7, anchor_share=0.34, per_duplicate=0), tmp_path / "pivots.jsonl")
    header, rows = PIVOTS.read(tmp_path / "pivots.jsonl")
    rows = list(rows)
    source = table(made)[0]
    for key in (*NAMED, "verifier", "traces_hash"):
        assert header[key] == source[key], key
    assert header["sampling"] == to_mapping(Sampling(max_tokens=9))
    assert (header["traces"], header["split"], header["verifier_source"]) == (
        str(tmp_path / "traces.jsonl"),
        "train",
        {"name": "tool_call"},
    )
    assert header["cut"] == source["summary"]["truncated"] == 2
    assert header["config"] == to_mapping(SelectConfig(threshold=0.7, anchor_share=0.34, per_duplicate=0))
    assert {row["trace_id"]: row["role"] for row in rows} == {"t0": "pivot", "t2": "anchor", "t3": "pivot"}
    assert all("actions" not in row for row in rows), "the actions stay in the profile"
    kinds: dict[str, int] = {}
    for row in rows:
        kinds[row["kind"]] = kinds.get(row["kind"], 0) + 1
    assert (found["selected"], found["roles"], found["kinds"]) == (3, {"anchor": 1, "pivot": 2}, kinds)
    assert found["path"] == str(tmp_path / "pivots.jsonl") and sum(found["classes"].values()) == len(TURNS)
    assert header["summary"] == {key: value for key, value in found.items() if key != "path"}
    assert [row["threshold"] for row in found["preview"]] == list(THRESHOLDS)


def test_a_profile_without_a_pivot_makes_no_file_and_shows_what_each_threshold_would_keep(tmp_path, capsys) -> None:
    made = profile(tmp_path, drawn=TURNS[1:3])
    with pytest.raises(InputError, match=r"holds no pivot \(1 all (fail|succeed), 1 \w+"):
        run_select(made, SelectConfig(), tmp_path / "pivots.jsonl")
    assert not (tmp_path / "pivots.jsonl").exists()
    said = capsys.readouterr().err
    assert all(f"lambda {threshold:.2f}: pivots     0" in said for threshold in THRESHOLDS if threshold <= 1)


def test_a_profile_says_before_it_samples_which_limit_takes_how_many_demonstrated_turns(tmp_path, capsys) -> None:
    renderer = ChatRenderer(tiny_tokenizer())
    turns = [Message("assistant", "x" * 10 * size) for size in range(1, 11)]
    lengths = [len(renderer.completion(turn)) for turn in turns]
    made = [Trace(id=str(turn.content), messages=(Message("user", "go"), turn), split="train") for turn in turns]
    write_traces(tmp_path / "traces.jsonl", made, {"made_by": "import"})
    for limit, above in ((lengths[3], 6), (lengths[-1], 0)):
        say_lengths(stream_candidates(str(tmp_path / "traces.jsonl"), "train"), limit, renderer)
        said = capsys.readouterr().err
        assert bool(said) == bool(above)
        takes = f"{lengths[4]} takes 50%, {lengths[8]} takes 90%, {lengths[9]} takes 100%"
        assert not above or (f"{above} of 10 demonstrated turns" in said and takes in said)


def test_a_policy_that_has_mastered_every_turn_is_told_so(tmp_path) -> None:
    with pytest.raises(InputError) as refused:
        run_select(profile(tmp_path, drawn=[[RIGHT] * 4] * 2), SelectConfig(), tmp_path / "pivots.jsonl")
    assert "mastered every turn" in str(refused.value.hint)


@pytest.mark.parametrize("missing", ["profile", "sampling"])
def test_a_profile_that_does_not_say_how_it_sampled_is_one_line(tmp_path, missing) -> None:
    made = profile(tmp_path)
    first, *rows = made.read_text().splitlines()
    header = json.loads(first)
    del (header["config"] if missing == "profile" else header["config"]["profile"])[missing]
    made.write_text("\n".join([json.dumps(header), *rows]) + "\n")
    with pytest.raises(InputError, match=r"profile\.jsonl.*config\.profile\.sampling"):
        run_select(made, SelectConfig(), tmp_path / "pivots.jsonl")


def test_a_profile_that_stopped_where_one_threshold_was_settled_serves_that_one_only(tmp_path) -> None:
    made = profile(tmp_path, adaptive=AdaptiveConfig(threshold=0.7, first=2))
    with pytest.raises(InputError, match=r"was made for lambda 0\.7.*--threshold 0\.7"):
        run_select(made, SelectConfig(threshold=0.6), tmp_path / "pivots.jsonl")
    found = run_select(made, SelectConfig(threshold=0.7), tmp_path / "pivots.jsonl")
    assert [row["threshold"] for row in found["preview"]] == [0.7]


def test_a_rescored_profile_is_what_the_other_verifier_would_have_said(tmp_path) -> None:
    """Rows, header and summary; what the samples cost is told again, and nothing is sampled."""
    (tmp_path / "other").mkdir()
    made, wanted = profile(tmp_path), profile(tmp_path / "other", verifier=ANY)
    found = run_rescore(RescoreConfig(profile=str(made), verifier=ANY), tmp_path / "rescored.jsonl")
    (header, rows), (wanted_header, wanted_rows) = table(tmp_path / "rescored.jsonl"), table(wanted)
    assert rows == wanted_rows != table(made)[1]
    assert [row["reward_mean"] for row in rows] == [1.0, 1.0, 1.0, 0.5], "cut turns stay failures"
    elsewhere = {**wanted_header["config"], "traces": str(tmp_path / "traces.jsonl")}
    assert header == {**wanted_header, "config": elsewhere, "traces_hash": table(made)[0]["traces_hash"]}
    assert found == {"path": str(tmp_path / "rescored.jsonl"), **header["summary"]}
    assert found["cost"]["turns"] == 16 and found["skipped_turns"] == {"too long": 2}
    assert not list(tmp_path.glob("*.waves")), "the log has done its work"


def test_a_rescored_profile_keeps_what_a_cut_turn_is_worth_and_how_many_candidates_were_wanted(tmp_path) -> None:
    made = profile(tmp_path)
    first, *rows = made.read_text().splitlines()
    header = json.loads(first)
    header["config"]["profile"]["cut_turns"] = "judge"
    header["config"]["limit"] = 3
    header["summary"]["candidates"] = 3
    made.write_text("\n".join([json.dumps(header), rows[3], *rows[:2]]) + "\n")
    run_rescore(RescoreConfig(profile=str(made), verifier=ANY), tmp_path / "rescored.jsonl")
    assert len(table(tmp_path / "rescored.jsonl")[1]) == 3, "the candidates that were profiled, whichever were drawn"
    header["config"]["limit"] = 0
    made.write_text("\n".join([json.dumps(header), *rows[1:]]) + "\n")
    run_rescore(RescoreConfig(profile=str(made), verifier=ANY), tmp_path / "judged.jsonl")
    assert table(tmp_path / "judged.jsonl")[1][-1]["reward_mean"] == 1.0, "cut turns were judged by what they say"


def test_traces_that_have_moved_are_named_and_others_are_refused(tmp_path) -> None:
    made = profile(tmp_path)
    moved = (tmp_path / "traces.jsonl").rename(tmp_path / "moved.jsonl")
    config = RescoreConfig(profile=str(made), verifier=ANY, traces=str(moved))
    run_rescore(config, tmp_path / "rescored.jsonl")
    assert table(tmp_path / "rescored.jsonl")[0]["config"]["traces"] == str(moved)
    with moved.open("a") as more:
        more.write("\n")
    with pytest.raises(InputError, match=r"moved\.jsonl: is not the file that was profiled.*--traces"):
        run_rescore(config, tmp_path / "again.jsonl")


def test_candidates_that_new_verdicts_leave_uncertain_are_open_and_certain_ones_settled(tmp_path) -> None:
    """Two of four rollouts were drawn at the first two turns: at one both are right under the new verdicts, so the mean
    ends above lambda whatever the other two would have been; at the other one is a failure, so it may end below."""
    lam = AdaptiveConfig(threshold=0.3, first=2)
    made = profile(tmp_path, adaptive=lam, drawn=([RIGHT, WRONG], [RIGHT, CUT], TURNS[0]))
    run_rescore(RescoreConfig(profile=str(made), verifier=ANY), tmp_path / "rescored.jsonl")
    header, rows = table(tmp_path / "rescored.jsonl")
    assert [(row["stop"], row["certainty"]) for row in rows] == [("settled", 1.0), ("open", 0.0), ("K reached", 1.0)]
    assert header["config"]["profile"]["adaptive"] == to_mapping(lam)


def test_selecting_from_candidates_that_are_no_longer_settled_says_how_many_there_are(tmp_path) -> None:
    made = profile(tmp_path, adaptive=AdaptiveConfig(threshold=0.7, first=2), drawn=([RIGHT, CUT], TURNS[2]))
    run_rescore(RescoreConfig(profile=str(made), verifier=ANY), tmp_path / "rescored.jsonl")
    found = run_select(tmp_path / "rescored.jsonl", SelectConfig(threshold=0.7), tmp_path / "pivots.jsonl")
    assert (found["roles"]["pivot"], found["unsettled"]) == (1, 1)


def test_a_rescoring_that_was_interrupted_goes_on_for_the_same_verifier_only(tmp_path, monkeypatch) -> None:
    made, out = profile(tmp_path), tmp_path / "rescored.jsonl"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def killed(*arguments):
            raise KeyboardInterrupt

        patch.setattr("turntree.stages.rescore.write_profile", killed)
        run_rescore(RescoreConfig(profile=str(made), verifier=ANY), out)
    assert (tmp_path / "rescored.jsonl.waves").exists()
    with pytest.raises(InputError, match="verifier"):
        run_rescore(RescoreConfig(profile=str(made), verifier=Part("strict")), out)
    run_rescore(RescoreConfig(profile=str(made), verifier=Part("strict")), out, overwrite=True)
    assert table(out)[0]["verifier"] == StrictMatch().name


def test_a_verifier_that_draws_does_so_by_the_seed_of_the_profile_as_it_would_have_then(tmp_path, monkeypatch) -> None:
    rule = """
class Drawn:
    def judge(self, state, action):
        return 0.5
    def judge_all(self, pairs, seed):
        return [seed / 10] * len(pairs)
"""
    (tmp_path / "rules_that_draw.py").write_text(rule)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = RescoreConfig(profile=str(profile(tmp_path, seed=7)), verifier=Part("rules_that_draw:Drawn"))
    run_rescore(config, tmp_path / "again.jsonl")
    assert [row["reward_mean"] for row in table(tmp_path / "again.jsonl")[1]][:3] == pytest.approx([0.7] * 3)
