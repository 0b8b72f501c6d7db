"""Expert traces: won games, slips in the history and never among the candidates, no split shared."""

import pytest

from turntree.core.config import Part, from_mapping
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message
from turntree.stages.demonstrate import demonstrate
from turntree.traces.candidates import candidates, skipped_turns
from turntree.traces.schema import read_traces
from turntree_worlds.household.demonstrator import HouseholdDemonstrator
from turntree_worlds.household.environment import state_at


def traces(tmp_path, **settings):
    demonstrate(Part("household", {"count": 24, **settings}), tmp_path / "traces.jsonl")
    return list(read_traces(tmp_path / "traces.jsonl"))


def test_every_trace_replays_to_the_state_that_it_shows(tmp_path):
    for trace in traces(tmp_path, slips=0.3):
        for state in candidates(trace):
            played = state_at(state)
            assert not played.won
        last = candidates(trace)[-1]
        ends_it = last.turn == len(trace.turn_positions) - 1  # else a lucky slip did
        assert state_at(last).step(last.demonstration.content).won is ends_it


def test_under_a_react_prompt_the_expert_answers_in_its_form(tmp_path):
    for trace in traces(tmp_path, slips=0.3, environment={"prompt": "react_admissible"}):
        assert trace.messages[0].role == "system"
        for state in candidates(trace):
            assert state.demonstration.content.startswith("Action: ") and not state_at(state).won


def test_slips_are_history_and_never_candidates(tmp_path):
    slipped = [trace for trace in traces(tmp_path, slips=0.3) if skipped_turns(trace)]
    assert len(slipped) > 10
    for trace in slipped:
        marked = {int(turn) for turn in trace.meta["skip_turns"]}
        assert set(trace.meta["skip_turns"].values()) == {"slip"}
        assert {state.turn for state in candidates(trace)} == set(range(len(trace.turn_positions))) - marked


def test_without_slips_every_turn_is_a_candidate(tmp_path):
    assert all(len(candidates(trace)) == len(trace.turn_positions) for trace in traces(tmp_path))


def test_the_same_seed_gives_the_same_file(tmp_path):
    demonstrator = Part("household", {"count": 5, "slips": 0.2, "seed": 3})
    for name in ("a", "b"):
        demonstrate(demonstrator, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("split", ["dev", "test"])
def test_traces_of_held_out_games_stay_in_their_split(tmp_path, split):
    assert {trace.split for trace in traces(tmp_path, split=split)} == {split}


def test_a_trace_of_another_game_is_refused(tmp_path):
    one, other, *_ = traces(tmp_path)
    state = candidates(one)[1]
    wrong = type(state)(**{**vars(state), "environment": other.environment})
    with pytest.raises(InputError, match="does not fit its game"):
        state_at(wrong)


def test_the_loss_of_fine_tuning_covers_the_candidates_only(tmp_path):
    from turntree.stages.policy import Device, load_policy
    from turntree.train.sft import examples

    renderer = load_policy("default", Device()).renderer
    for trace in traces(tmp_path, slips=0.3)[:6]:
        (row,) = examples(trace, renderer)
        learned = sum(len(renderer.completion(state.demonstration)) for state in candidates(trace))
        assert sum(row.loss_mask) == learned
        last = trace.turn_positions[-1]
        assert row.token_ids == (
            *renderer.prompt(trace.messages[:last]),
            *renderer.completion(Message("assistant", trace.messages[last].content)),
        )


@pytest.mark.parametrize(
    "bad",
    [
        {"slips": 1.0},
        {"dev": -0.1},
        {"count": 0},
        {"slips": 0.1, "expert": "shortest"},
        {"environment": {"offset": -1}},
    ],
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        from_mapping(HouseholdDemonstrator, bad)
