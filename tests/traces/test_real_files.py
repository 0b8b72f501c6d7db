"""Real rollouts, counted by hand from the raw files: what the importer keeps and why it leaves the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from turntree.core.protocols import TurnState, TurnVerifier
from turntree.traces.candidates import candidates
from turntree.traces.chat import import_chat
from turntree.verifiers.audit import audit_verifier
from turntree.verifiers.strict import StrictMatch
from turntree.verifiers.tool_call import ToolCallMatch

GYM = "nemo_gym/resources_servers__{}__data__{}.jsonl.xz"
AGENTS = "nemo_gym/responses_api_agents__{}.jsonl.xz"
COUNTS = {  # file: (traces kept, traces read, turns kept, dropped turns)
    GYM.format("google_search", "example_rollouts"): (5, 5, 10, {}),
    GYM.format("math_with_code", "example_rollouts"): (5, 5, 36, {}),
    GYM.format("workplace_assistant", "example_rollouts"): (5, 5, 13, {}),
    GYM.format("single_step_tool_use_with_argument_comparison", "example"): (5, 5, 5, {"history_of_a_pivot_row": 15}),
    GYM.format("terminal_multi_harness", "example"): (5, 5, 5, {}),
    GYM.format("terminus_judge", "example"): (5, 5, 5, {}),
    AGENTS.format("mini_swe_agent_2__data__example_rollouts"): (5, 5, 62, {}),
    AGENTS.format("anyswe_agent__data__example_rollouts_hermes"): (5, 5, 73, {}),
    AGENTS.format("anyswe_agent__data__example_rollouts_claude_code"): (5, 5, 21, {}),
    AGENTS.format("harbor_agent__example__example_output"): (
        3, 3, 24, {"unanswered_call": 15, "result_without_call": 7},
    ),  # several calls answered by one screen
    AGENTS.format("tau2__data__example_rollouts"): (5, 5, 25, {"canned_opening": 5}),
    "tau2/trajectories/taubench1_gpt-4o-airline.json.xz": (200, 200, 2454, {}),
    "tau2/trajectories/toolorchestra_retail.json.xz": (114, 114, 1027, {"canned_opening": 114}),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_every_turn_is_kept_or_counted(shared_data: Path, name: str) -> None:
    traces, report = import_chat([shared_data / name])
    assert report.adds_up
    assert (len(traces), report.traces_read, report.turns_kept, report.dropped_turns) == COUNTS[name]


def test_a_task_without_a_demonstration_is_refused_by_name(shared_data: Path) -> None:
    path = shared_data / GYM.format("workplace_assistant", "example")
    _, report = import_chat([path], on_error="drop")
    assert report.dropped_traces == {"no_assistant_turn": 5}


def test_outcomes_are_those_of_the_benchmarks(shared_data: Path) -> None:
    retail, _ = import_chat([shared_data / "tau2/trajectories/toolorchestra_retail.json.xz"])
    airline, _ = import_chat([shared_data / "tau2/trajectories/taubench1_gpt-4o-airline.json.xz"])
    assert (sum(t.success is True for t in retail), len(retail)) == (96, 114)
    assert (sum(t.success is True for t in airline), len(airline)) == (84, 200)
    assert len({trace.group for trace in airline}) == 50


@pytest.fixture(scope="module")
def states(shared_data: Path) -> list[TurnState]:
    traces, _ = import_chat([shared_data / name for name in COUNTS])
    return [state for trace in traces for state in candidates(trace)]


@pytest.mark.parametrize("verifier", [StrictMatch(), ToolCallMatch()], ids=lambda verifier: verifier.name)
def test_real_demonstrations_match_themselves_and_no_broken_copy(
    states: list[TurnState], verifier: TurnVerifier
) -> None:
    audit = audit_verifier(verifier, states)
    assert (audit.gold.accepted, audit.states) == (3760, 3760)
    for name, tally in audit.mutations.items():
        assert (tally.accepted, tally.partial, tally.unjudged) == (0, 0, 0), name
        assert tally.refused > 1000, name
