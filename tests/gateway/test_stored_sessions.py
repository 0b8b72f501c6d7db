"""A session's file is read as it was written, or refused with its line; one that is damaged stops no other session."""

import json

import pytest
from gateway_world import world

from stored_sessions import ROWS, write_session
from turntree.cli.main import main
from turntree.core.errors import InputError
from turntree.gateway.merge import merge
from turntree.gateway.store import CLOSED, DAMAGED, SessionStore, read_session
from turntree.logs.trees import read as read_trees

NO_REWARDS = ["high", "1", True, False, [], [1.0], {}, 1e308, -1e308, 10**400]


def edited(rows, line, **changes):
    return [*rows[:line], {**rows[line], **changes}, *rows[line + 1 :]]


def in_call(rows, line, **changes):
    return edited(rows, line, call={**rows[line]["call"], **changes})


def without(rows, line, key):
    return [*rows[:line], {"call": {k: v for k, v in rows[line]["call"].items() if k != key}}, *rows[line + 1 :]]


def completion(rows, **changes):
    return in_call(rows, 1, completion={**rows[1]["call"]["completion"], **changes})


BROKEN = {
    "another session": edited(ROWS, 0, session="other"),
    "another schema": edited(ROWS, 0, schema="turntree.session/2"),
    "an unknown key": edited(ROWS, 0, extra=1),
    "a key in clear": edited(ROWS, 0, keys={"ask": "sesame", "reward": "sesame"}),
    "a seed below 0": edited(ROWS, 0, seed=-1),
    "a task that is a number": edited(ROWS, 0, task=1),
    "an unknown row": edited(ROWS, 1, note="x"),
    "a call twice": [*ROWS[:2], *ROWS[1:]],
    "a number twice": in_call(ROWS, 2, index=0),
    "a base that is missing": in_call(ROWS, 2, base="x"),
    "a base with fewer tokens": in_call(ROWS, 2, base_tokens=99),
    "a base with fewer messages": in_call(ROWS, 2, base_messages=9),
    "a token below 0": in_call(ROWS, 1, ids=[1, -2]),
    "a token that is no number": in_call(ROWS, 1, ids=[1, 2.5]),
    "a sampled token below 0": completion(ROWS, token_ids=[5, -1]),
    "a log-probability that is missing": completion(ROWS, logprobs=[-0.5]),
    "no completion": without(ROWS, 1, "completion"),
    "an answer of the user": in_call(ROWS, 1, answer={"role": "user", "content": "x"}),
    "a message with another key": in_call(ROWS, 1, messages=[{"role": "user", "content": "x", "args": {}}]),
    "a cause that does not exist": in_call(ROWS, 1, cause="whim"),
    "two rewards": [*ROWS[:4], ROWS[3], *ROWS[4:]],
    "an end that censors": edited(ROWS, 4, stop="gated"),
    **{f"a reward {value!r:.9}": edited(ROWS, 3, reward={"reward": value}) for value in NO_REWARDS},
    **{f"a success {value!r}": edited(ROWS, 3, reward={"reward": 1.0, "success": value}) for value in (1, "yes", [])},
    **{
        f"a call's reward {value!r:.9}": edited(ROWS, 3, reward={"reward": 1.0, "call_rewards": {"c0": value}})
        for value in NO_REWARDS
    },
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("where", ["open", "closed"])
def test_a_session_that_could_not_have_been_written_is_refused_with_its_line(name, where, tmp_path):
    rows = BROKEN[name]
    line = 1 + next((i for i, (a, b) in enumerate(zip(rows, ROWS, strict=False)) if a != b), len(ROWS))
    path = write_session(tmp_path, rows, where)
    with pytest.raises(InputError) as refused:
        read_session(SessionStore(tmp_path), "s")
    assert refused.value.path == path and refused.value.line == line and refused.value.hint


def test_a_session_is_read_as_it_was_written(tmp_path):
    write_session(tmp_path, ROWS, CLOSED)
    session = read_session(SessionStore(tmp_path), "s")
    assert (session.reward, session.success, session.call_rewards) == (0.5, True, {"c1": 1.0})
    assert [call.prompt_ids for call in session.calls] == [(1, 2, 3), (1, 2, 3, 5, 6, 4)]
    merged = merge("t", [session])
    assert [verdict.reward for verdict in merged.rewards.verdicts.values()] == [0.5]


def test_a_closed_session_without_its_end_was_cut_off(tmp_path):
    write_session(tmp_path, ROWS[:3], CLOSED)
    with pytest.raises(InputError, match="cut off"):
        read_session(SessionStore(tmp_path), "s")


def test_a_damaged_session_is_set_aside_and_counted_and_the_others_go_on(tmp_path, capsys):
    write_session(tmp_path, edited(ROWS, 0, seed="x"), "open")
    with world(folder=tmp_path) as gate:
        opened = gate.open()
    with world(folder=tmp_path) as gate:
        assert gate.sessions.get(opened["session"]) and len(gate.sessions) == 1
        assert gate.post("/sessions", {"session": "s"}).status_code == 409  # its name is not given again
    store = SessionStore(tmp_path)
    assert store.sessions(DAMAGED) == ["s"] and store.sessions() == [opened["session"]]
    assert "s.jsonl:1: field 'seed'" in capsys.readouterr().err


def test_a_merge_says_how_many_sessions_are_damaged_and_takes_no_reward_from_one(tmp_path, capsys):
    folder = tmp_path / "gate"
    write_session(folder / "sessions", ROWS, CLOSED)
    write_session(folder / "sessions", [{**ROWS[0], "session": "d", "seed": "x"}], DAMAGED, "d")
    arguments = ["gateway", "--out", str(folder), "--merge", str(tmp_path / "trees.jsonl"), "--json", "-"]
    main(arguments)
    counts = json.loads(capsys.readouterr().out)
    assert (counts["sessions"], counts["damaged"], len(list(read_trees(tmp_path / "trees.jsonl")))) == (1, 1, 1)
    write_session(folder / "sessions", edited(ROWS, 3, reward={"reward": "high"}), CLOSED)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and "s.jsonl:4: field 'reward'" in capsys.readouterr().err
