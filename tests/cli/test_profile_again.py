"""A profile that is asked again: re-scored, extended, from a server, for one threshold only."""

import json

import pytest

from completions_server import completion, serve
from turntree.run.artifacts import PROFILE
from turntree_worlds.household.entry import POLICY as EMBEDDED

SHAPE = ("--max-tokens", 24, "--limit", 30)


def lines(path, *dropped):
    """Header and rows without `timing` and what is named."""
    header, rows = PROFILE.read(path)
    header = {**header, "timing": None, "config": {**header["config"], "reuse": None}}
    header["summary"] = {key: value for key, value in header["summary"].items() if key not in dropped}
    return header, [{key: value for key, value in row.items() if key not in dropped} for row in rows]


@pytest.fixture(scope="module")
def fixed(turntree, household, tmp_path_factory):
    out = tmp_path_factory.mktemp("fixed") / "fixed.jsonl"
    turntree("profile", "--traces", household / "traces.jsonl", *SHAPE, "--rollouts", 8, "--out", out)
    return out


def test_a_rescored_profile_is_the_profile_under_the_other_verifier(turntree, household, fixed, tmp_path):
    turntree("rescore", fixed, "--verifier", "strict", "--out", tmp_path / "rescored.jsonl")
    traces = household / "traces.jsonl"
    turntree(
        *("profile", "--traces", traces, *SHAPE, "--rollouts", 8, "--verifier", "strict"),
        *("--out", tmp_path / "fresh.jsonl"),
    )
    assert lines(tmp_path / "rescored.jsonl") == lines(tmp_path / "fresh.jsonl")
    assert lines(tmp_path / "rescored.jsonl") != lines(fixed)


def test_an_extended_profile_is_a_fresh_one_that_cost_less(turntree, household, fixed, tmp_path):
    more = ("profile", "--traces", household / "traces.jsonl", "--max-tokens", 24, "--limit", 35, "--rollouts", 10)
    extended = turntree.json(*more, "--reuse", fixed, "--out", tmp_path / "extended.jsonl")
    fresh = turntree.json(*more, "--out", tmp_path / "fresh.jsonl")
    assert lines(tmp_path / "extended.jsonl", "cost") == lines(tmp_path / "fresh.jsonl", "cost")
    assert (extended["cost"]["turns"], fresh["cost"]["turns"]) == (30 * 2 + 5 * 10, 350)
    message = turntree.error(*more, "--reuse", fixed, "--seed", 5, "--out", tmp_path / "other.jsonl")
    assert "field 'seed': was made with 0, not 5" in message


def test_an_adaptive_profile_serves_the_threshold_that_it_settled(turntree, household, fixed, tmp_path):
    out = tmp_path / "adaptive.jsonl"
    arguments = ("profile", "--traces", household / "traces.jsonl", *SHAPE, "--rollouts", 8, "--adaptive")
    result = turntree.json(*arguments, "--threshold", 0.7, "--reuse", fixed, "--out", out)
    assert result["cost"]["turns"] == 0, "every sample was there"
    assert result["rollouts"] < 30 * 8
    _, rows = PROFILE.read(out)
    assert {row["stop"] for row in rows} <= {"settled", "audited", "K reached"}
    assert "--threshold 0.7" in turntree.error("select", out, "--out", tmp_path / "p.jsonl")
    chosen = turntree.json("select", out, "--threshold", 0.7, "--out", tmp_path / "p.jsonl")
    assert [row["threshold"] for row in chosen["preview"]] == [0.7]


def test_a_server_is_profiled_and_its_failures_are_no_rewards(turntree, household, tmp_path):
    """It says "look" to even seeds, fails for a quarter of them, and walks otherwise."""

    def answer(asked):
        if asked["seed"] % 4 == 0:
            return 400
        return completion("look" if asked["seed"] % 2 else "go to nowhere", None)

    arguments = ("profile", "--traces", household / "traces.jsonl", *SHAPE, "--rollouts", 4, "--model", "served")
    with serve(answer) as server:
        where = ("--endpoint", server.url, "--tokenizer", EMBEDDED, "--set", "endpoint.retries=0")
        result = turntree.json(*arguments, *where, "--out", tmp_path / "p.jsonl")
        assert len(server.asked) == 120 == result["rollouts"], result["faults"]
    (reason,) = result["faults"]
    assert "400" in reason
    assert 0 < result["faults"][reason] == result["unjudged"] == sum(asked["seed"] % 4 == 0 for asked in server.asked)
    header, rows = PROFILE.read(tmp_path / "p.jsonl")
    assert header["policy_hash"] == "endpoint:served"
    assert {action["text"] for row in rows for action in row["actions"]} == {"look", "go to nowhere"}
    turntree("profile", *arguments[1:], *where, "--out", tmp_path / "gone.jsonl", code=2)
    assert "--tokenizer" in turntree.error(*arguments, "--endpoint", server.url, "--out", tmp_path / "q.jsonl")


def test_actions_that_a_verifier_could_not_judge_are_counted_with_the_reason(turntree, fixed, tmp_path):
    rule = "def judge(state, action):\n    return 1 / ('open' not in action.content)\n"
    (tmp_path / "broken_rule.py").write_text(rule)
    said = turntree("rescore", fixed, "--verifier", "broken_rule:judge", "--out", tmp_path / "p.jsonl", cwd=tmp_path)
    header, rows = PROFILE.read(tmp_path / "p.jsonl")
    opened = [one for row in rows for one in row["actions"] if "open" in one["text"] and not one.get("truncated")]
    assert opened and {one["reward"] for one in opened} == {None}
    unjudged = header["summary"]["unjudged"]
    assert unjudged == sum(one["count"] for one in opened)
    assert f"{unjudged} samples that the verifier did not judge" in said.stdout
    assert said.stderr.count("not judged: the verifier raised ZeroDivisionError") == 1


def test_a_group_in_two_splits_is_refused_before_anything_is_paid_for(turntree, household, tmp_path):
    header, first, *rest = (household / "traces.jsonl").read_text().splitlines()
    twin = {**json.loads(first), "id": "twin", "split": "test"}
    twin["meta"] = {**twin["meta"], "group": json.loads(first)["meta"].get("group", json.loads(first)["id"])}
    traces = tmp_path / "traces.jsonl"
    traces.write_text("\n".join([header, first, *rest, json.dumps(twin)]) + "\n")
    message = turntree.error("profile", "--traces", traces, *SHAPE, "--out", tmp_path / "p.jsonl")
    assert "its group" in message and "'test'" in message
