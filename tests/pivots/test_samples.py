"""Samples by number: the same whatever surrounds them, from an engine or from a store; a fault is no reward."""

from collections import defaultdict
from dataclasses import replace

import pytest

from scripted_engine import ScriptedEngine
from turntree.core.completion import Finished, Sampling
from turntree.core.cost import Cost
from turntree.core.errors import TurntreeError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.pivots.profile import Judge, ProfileConfig, profile_wave
from turntree.pivots.rows import samples_of
from turntree.pivots.samples import Sample, Sampler, one_by_one, together
from turntree.pivots.stopping import AdaptiveConfig, Prior
from turntree.rollout.local import Prompted

STOP = 9


class Digits:
    """A renderer whose messages are the digits of the tokens."""

    stop_ids = frozenset({STOP})

    def parse(self, token_ids, tools=()):
        if token_ids[0] == 7:
            return Message("assistant", "7", (ToolCall("say", {"b": "\ud800", "a": [1]}),))
        return Message("assistant", "".join(map(str, token_ids[:-1])))


class AtLeast(TurnVerifier):
    name = "at-least"

    def __init__(self, least):
        self.least = least

    def judge(self, state, action):
        return Verdict(float(int(action.content or 0) >= self.least), "", "digit")


def prompted(count=6):
    states = [TurnState(f"t{i}", 0, (Message("user", str(i)),), Message("assistant", "5")) for i in range(count)]
    return [Prompted(state, (1, i + 1)) for i, state in enumerate(states)]


def engine(fault=lambda request: None):
    return ScriptedEngine(lambda prompt, seed: (seed % 9, STOP), [STOP], vocab_size=10, fault=fault)


def profiled(config, *, answer=None, least=3, store=None, renderer=Digits):
    sampler = Sampler(answer or together(engine()), renderer(), config.sampling, config.seed, store)
    judge = Judge(AtLeast(least), config)
    return [c.to_json() for c in profile_wave(prompted(), sampler, judge, config, Prior(config.rollouts))]


def config(rollouts=16, **settings):
    return ProfileConfig(rollouts=rollouts, sampling=Sampling(max_tokens=4), **settings)


def test_an_adaptive_profile_holds_the_first_samples_of_a_fixed_one():
    adaptive = profiled(config(adaptive=AdaptiveConfig(confidence=0.7, audit=0.0)))
    fixed = profiled(config())
    assert any(row["rollouts"] < 16 for row in adaptive)
    for few, all_of_them in zip(adaptive, fixed, strict=True):
        assert samples_of(few) == samples_of(all_of_them)[: few["rollouts"]]
        assert few["stop"] == ("settled" if few["rollouts"] < 16 else "K reached")
        assert few["cost"]["turns"] == few["rollouts"]


def test_audited_candidates_are_run_to_the_end_and_say_what_was_forecast():
    audited = profiled(config(adaptive=AdaptiveConfig(confidence=0.7, audit=1.0)))
    assert {row["rollouts"] for row in audited} == {16}
    assert any(row["stop"] == "audited" and row["audit"]["rollouts"] < 16 for row in audited)


def test_a_row_holds_its_samples_faithfully():
    for row in profiled(config(64)):
        samples = samples_of(row)
        assert len(samples) == row["rollouts"] == 64
        called = [sample.action for sample in samples if sample.action and sample.action.tool_calls]
        assert all(m == Message("assistant", "7", (ToolCall("say", {"b": "\ud800", "a": [1]}),)) for m in called)
        assert sum(int(sample.action.content) >= 3 for sample in samples) == row["successes"]
        assert row["low"] < row["reward_mean"] < row["high"]


class Thinking(Digits):
    """The same answers, some after a thought."""

    def parse(self, token_ids, tools=()):
        return replace(super().parse(token_ids), reasoning="Hm." if token_ids[0] % 2 else "")


def test_what_was_thought_before_an_answer_is_read_back_so_a_profile_is_extended_to_what_a_longer_one_is():
    held = {row["trace_id"]: samples_of(row) for row in profiled(config(8), renderer=Thinking)}

    class Store:
        def samples(self, state):
            return held[state.trace_id]

    extended = profiled(config(12), store=Store(), renderer=Thinking)
    for row, fresh in zip(extended, profiled(config(12), renderer=Thinking), strict=True):
        assert {**row, "cost": None} == {**fresh, "cost": None}


def test_a_fault_is_censored_and_counted():
    failing = engine(fault=lambda request: "cut off" if request.seed % 4 == 0 else None)
    rows = profiled(config(), answer=one_by_one(failing))
    whole = profiled(config())
    assert {reason for row in rows for reason in row["faults"]} == {"cut off"}
    for row, other in zip(rows, whole, strict=True):
        assert row["unjudged"] == sum(row["faults"].values()) == row["samples"].count(None)
        kept = [s for s, t in zip(samples_of(other), samples_of(row), strict=True) if t.action is not None]
        assert row["reward_mean"] == sum(int(s.action.content) >= 3 for s in kept) / len(kept)


def test_an_outage_stops_the_run():
    with pytest.raises(TurntreeError, match=r"all 96 requests failed \(gone\); run the command again"):
        profiled(config(), answer=one_by_one(engine(fault=lambda request: "gone")))


def test_an_engine_that_loses_a_request_is_named_and_not_waited_for(monkeypatch):
    forgetful, polls = engine(), []

    def poll(timeout=None):
        polls.append(type(forgetful).poll(forgetful))
        assert len(polls) < 9, "it waits for ever"
        return [done for done in polls[-1] if done.ticket != 5]

    monkeypatch.setattr(forgetful, "poll", poll)
    with pytest.raises(TurntreeError, match=r"the engine lost 1 requests: its in_flight is 0"):
        profiled(config(), answer=one_by_one(forgetful))
    monkeypatch.setattr(forgetful, "poll", lambda timeout=None: [Finished(ticket=999, fault="whose?")])
    with pytest.raises(TurntreeError, match=r"ticket 999, which nobody waits for"):
        profiled(config(), answer=one_by_one(forgetful))


def test_what_is_in_the_store_is_not_asked_for_and_a_stored_fault_is():
    held = defaultdict(list)
    for row in profiled(config(8)):
        held[row["trace_id"]] = samples_of(row)
    held["t0"][2] = Sample(None)
    asked = []

    def counting(requests):
        asked.extend(requests)
        return together(engine())(requests)

    class Store:
        def samples(self, state):
            return held[state.trace_id]

    extended = profiled(config(12), answer=counting, store=Store())
    assert len(asked) == 6 * 4 + 1
    for row, fresh in zip(extended, profiled(config(12)), strict=True):
        assert {**row, "cost": None} == {**fresh, "cost": None}
    asked.clear()
    again = profiled(config(4), answer=counting, store=Store())
    assert len(asked) == 1
    assert again[1]["cost"] == Cost().counts(), "what was paid for before costs nothing now"
