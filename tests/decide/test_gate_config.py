"""A gate from plain values."""

from __future__ import annotations

import pytest

from group_progress import progress
from turntree.core.config import from_mapping, to_mapping
from turntree.core.errors import ConfigError
from turntree.decide.gates.config import CheckpointConfig, GateConfig, build_gate


def test_the_default_is_the_paper_s_point():
    gate = build_gate(GateConfig(), seed=0)
    assert (gate.turn, gate.threshold, gate.termination, gate.bounds) == (10, 0.12, None, None)


def test_checkpoints_early_decisions_and_audits_compose():
    looks = (CheckpointConfig(turn=3, threshold=0.1), CheckpointConfig(turn=5, threshold=0.3, termination=0.9))
    config = GateConfig(checkpoints=looks, early=True, audit=1.0)
    decision = build_gate(config, seed=0).decide(progress("aaa", "aaa"))
    assert decision.audited and "0.threshold" in decision.numbers
    plain = build_gate(GateConfig(checkpoints=looks[1:]), seed=0)
    assert plain.decide(progress("aaaa", "aaaa")) is None, "without bounds it waits for its turn"
    early = build_gate(GateConfig(checkpoints=looks[1:], early=True), seed=0)
    assert early.decide(progress("aaaa", "aaaa")).cut


def test_it_survives_a_round_trip_and_refuses_nonsense_in_one_line():
    config = GateConfig(checkpoints=(CheckpointConfig(turn=4),), audit=0.1)
    assert from_mapping(GateConfig, to_mapping(config)) == config
    for wrong in ({"audit": 2.0}, {"checkpoints": []}, {"checkpoints": [{"turn": 0}]}, {"audits": 0.1}):
        with pytest.raises(ConfigError):
            from_mapping(GateConfig, wrong)
