"""A run that goes nowhere says so early, why, and what to do: no learning rate helps where nothing is learned."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.pivots.profile import ProfileConfig
from turntree.pivots.select import SelectConfig
from turntree.stages.config import CheckConfig, ProfileStageConfig, TrainPivotConfig
from turntree.stages.demonstrate import demonstrate
from turntree.stages.gradients import CUT, STILL, GradientWatch, reasons, remedy, require_rewards
from turntree.stages.profile import run_profile
from turntree.stages.select import run_select
from turntree.stages.train_pivot import run_train_pivot
from turntree.train.config import PivotConfig

MOVES, STANDS = {"kl": 1.0}, {"kl": STILL / 2}
TAUGHT = {"trained_groups": 2, "zero_variance_fraction": 0.5, "reward_mean": 0.5, **MOVES}
FLAT = {"trained_groups": 2, "zero_variance_fraction": 1.0, "reward_mean": 0.0, **STANDS}
DROPPED = {"trained_groups": 0, "reward_mean": 0.0}  # by DAPO: no update, so no KL


def online(mean, *, failed=0, solved=0, stops=None, **more):
    stops = stops or {"completed": 8}
    return {
        **DROPPED,
        "reward_mean": mean,
        "groups_all_fail": failed,
        "groups_all_succeed": solved,
        "stops": stops,
        **more,
    }


def said(rows, steps=40):
    beginning = GradientWatch(steps)
    return [line for number, row in enumerate(rows, start=1) for line in beginning.warnings({"step": number, **row})]


KINDS = {
    "every reward is 0; look at": online(0.0, failed=2),
    "every reward is -1; look at": online(-1.0, failed=2),
    "every reward is 1; the tasks are solved": online(1.0, solved=2),
    "(3 groups failed as a whole, 3 succeeded as a whole); take tasks of medium": online(0.5, failed=1, solved=1),
    "24 of 24 rollouts ended at the limit of their tokens; allow longer turns: --max-tokens": online(
        0.0, failed=2, stops={"max_tokens": 8}
    ),
    "24 of 24 rollouts ended at the limit of their turns; allow more of them: --max-turns": online(
        0.0, failed=2, stops={"max_turns": 8, "environment_error": 2, "gated": 4}, censored_reasons={"fire": 2}
    ),
    "every reward is 0; look": {**FLAT, "rollouts": 16, "cut_turns": 3},  # of one-turn groups
    "48 of 48 rollouts ended at the limit of their tokens": {**FLAT, "rollouts": 16, "cut_turns": 16},
}


@pytest.mark.parametrize("told", KINDS)
def test_the_kind_is_said_once_after_three_steps_with_what_to_do_and_never_a_learning_rate(told):
    (line,) = said([KINDS[told]] * 40)
    assert line.startswith("warning: step 3: no group has had a gradient so far: ") and told in line
    assert "learning-rate" not in line


def test_rewards_that_are_equal_within_their_groups_only_are_not_called_one_reward():
    (line,) = said([{**FLAT, "reward_mean": mean} for mean in (0.25, 0.5, 0.75)])
    assert "all rewards of a group are equal (means 0.25 to 0.75)" in line


def test_groups_that_lost_their_rewards_are_not_called_too_easy_or_too_hard():
    row = online(0.5, failed=2, solved=2, groups=8, groups_censored=4, censored_reasons={"fire": 19})
    (line,) = said([row] * 40)
    assert "12 of 24 groups have fewer than two rewards (57 x fire)" in line and "check environment" in line
    (few,) = said([row | {"groups_censored": 1}] * 40)
    assert "take tasks of medium difficulty" in few


def test_a_shorter_run_says_it_at_its_end():
    assert [line.split(":")[1] for line in said([FLAT, FLAT], steps=2)] == [" step 2"]
    assert said([FLAT, FLAT], steps=3) == []


def test_a_step_without_any_reward_names_the_most_frequent_reasons_once_for_all_that_follow():
    lost = {"trained_groups": 0, "reward_mean": None, "censored_reasons": {"fire": 8, "flood": 2, "frost": 1, "fog": 1}}
    told = "no rollout has a reward, so nothing was trained (8 x fire; 2 x flood; 1 x frost)"
    assert said([lost] * 5) == [f"warning: step 1: {told}"]
    assert said([TAUGHT, lost, lost, TAUGHT, lost]) == [f"warning: step {step}: {told}" for step in (2, 5)]


def test_groups_that_were_all_cut_are_named():
    cut = {"trained_groups": 0, "reward_mean": None, "censored_reasons": {}, "groups_cut": 2}
    assert said([cut])[0].endswith("so nothing was trained (2 x group cut by the gate)")
    with pytest.raises(InputError, match=r"no rollout of the run has a reward.*\(4 x group cut by the gate\).*loosen"):
        require_rewards([{"step": 1, **cut}, {"step": 2, **cut}])
    require_rewards([{"step": 1, **cut}, {"step": 2, **cut, "reward_mean": 0.0}])
    assert reasons([cut]) == {}, "a cut is no fault"


@pytest.mark.parametrize(
    "why",
    ["RateLimitError: 429 slow down", "InternalServerError: 500 boom", "APIConnectionError: none", "APITimeoutError"],
)
def test_what_a_server_answered_is_not_blamed_on_the_model_or_the_verifier(why):
    assert "server" in remedy({why: 4, "other": 1}) and "check model" not in remedy({why: 4})
    assert "check model" in remedy({"the room is on fire": 4, why: 1}) and "gate" in remedy({CUT: 4})


@given(st.lists(st.sampled_from([TAUGHT, FLAT, DROPPED]), min_size=1, max_size=12), st.data())
def test_a_resumed_run_says_what_the_run_that_was_not_killed_says(rows, data):
    rows = [{"step": 0}, *({"step": number, **row} for number, row in enumerate(rows, start=1))]
    done = data.draw(st.integers(0, len(rows)))
    whole, second = GradientWatch(12), GradientWatch(12, rows[:done])
    expected = [whole.warnings(row) for row in rows]
    assert [second.warnings(row) for row in rows[done:]] == expected[done:]
    assert second.at_the_end() == whole.at_the_end()
    assert (whole.at_the_end() is None) == any(row.get("kl") == MOVES["kl"] for row in rows)


@pytest.mark.parametrize(
    ("step", "steps", "told"), [(3, 8, True), (2, 8, False), (4, 40, True), (3, 40, False), (5, 40, False)]
)
def test_a_policy_that_learns_and_hardly_moves_is_said_once_at_a_tenth_of_the_steps_and_not_before_the_third(
    step, steps, told
):
    for kl in (STILL / 2, 0.0):
        beginning = GradientWatch(steps, [{"step": number, **TAUGHT} for number in range(1, step)])
        lines = beginning.warnings({"step": step, **TAUGHT, "kl": kl})
        assert any("raise --learning-rate" in line for line in lines) == told


@pytest.mark.parametrize("kl", [STILL, None, math.nan])
def test_a_policy_that_moves_and_one_that_was_not_measured_are_not_warned_of(kl):
    assert said([{**TAUGHT, "kl": kl}] * 5) == []
    assert said([{"trained_groups": 0}] * 5) == [], "a search that found nothing is no step"


def test_training_on_pivots_that_give_no_gradient_says_so(tmp_path, capfd):
    """Turns of one token: every rollout is cut, so every reward is 0."""
    traces, pivots, sampling = tmp_path / "traces.jsonl", tmp_path / "pivots.jsonl", Sampling(max_tokens=12)
    demonstrate(Part("household", {"count": 2}), traces)
    profile = ProfileConfig(rollouts=4, sampling=sampling)
    run_profile(ProfileStageConfig(traces=str(traces), limit=6, profile=profile), tmp_path / "profile.jsonl")
    run_select(tmp_path / "profile.jsonl", SelectConfig(threshold=1.0), pivots)
    train = PivotConfig(steps=3, groups=2, group_size=2, sampling=Sampling(max_tokens=1))
    config = TrainPivotConfig(
        pivots=str(pivots), train=train, check=CheckConfig(states=0, tasks=0), verifier=Part("strict"), allow_stale=True
    )
    run_train_pivot(config, tmp_path / "run")
    said = capfd.readouterr().err
    assert (
        said.count("step 3: no group has had a gradient so far: 12 of 12 rollouts ended at the limit of their tok") == 1
    )
    assert said.count("no group of the run had a gradient, so the policy is that of the start: 12 of 12 rollouts") == 1
    assert "learning-rate" not in said
