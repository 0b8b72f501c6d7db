"""Real rollouts, counted by hand from the raw files: what the importer keeps and why it leaves the rest."""

from __future__ import annotations

import json
import lzma
import re
import tarfile
from pathlib import Path

import pytest
from trace_fixtures import adds_up

from chat_import import import_chat
from turntree.core.errors import InputError
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.traces.candidates import candidates
from turntree.verify.audit import audit_verifier
from turntree.verify.strict import StrictMatch
from turntree.verify.tool_call import ToolCallMatch

GYM = "nemo_gym/resources_servers__{}__data__{}.jsonl.xz"
AGENTS = "nemo_gym/responses_api_agents__{}.jsonl.xz"
COUNTS = {  # file: (traces kept, traces read, turns kept, dropped turns)
    GYM.format("google_search", "example_rollouts"): (5, 5, 10, {}),
    GYM.format("math_with_code", "example_rollouts"): (5, 5, 36, {}),
    GYM.format("workplace_assistant", "example_rollouts"): (5, 5, 13, {}),
    GYM.format("single_step_tool_use_with_argument_comparison", "example"): (5, 5, 5, {"history_of_a_pivot_row": 15}),
    GYM.format("single_step_tool_use_with_argument_comparison", "example_rollouts"): (
        5, 5, 5, {"history_of_a_pivot_row": 15},
    ),
    GYM.format("terminal_multi_harness", "example"): (5, 5, 5, {}),
    GYM.format("terminus_judge", "example"): (5, 5, 5, {}),
    AGENTS.format("mini_swe_agent_2__data__example_rollouts"): (5, 5, 62, {}),
    AGENTS.format("anyswe_agent__data__example_rollouts_hermes"): (5, 5, 73, {}),
    AGENTS.format("anyswe_agent__data__example_rollouts_claude_code"): (5, 5, 21, {}),
    AGENTS.format("harbor_agent__example__example_output"): (3, 3, 40, {"not_a_bash_action": 6}),
    AGENTS.format("tau2__data__example_rollouts"): (5, 5, 25, {"canned_opening": 5}),
    "tau2/trajectories/taubench1_gpt-4o-airline.json.xz": (200, 200, 2454, {}),
    "tau2/trajectories/toolorchestra_retail.json.xz": (114, 114, 1027, {"canned_opening": 114}),
    "tau2/trajectories/MockRetailDomainEnv-few_shot.jsonl.xz": (68, 69, 79, {"call_not_recorded": 864}),
    "tau2/trajectories/MockAirlineDomainEnv-few_shot.jsonl.xz": (
        19, 19, 45, {"call_not_recorded": 174, "result_without_call": 3},
    ),
    "swe_agent/demonstrations.tar.xz": (19, 19, 209, {}),
    "hotpot_react/100_questions_5_trials.txt.xz": (140, 512, 389, {"not_a_search_step": 464, "in_dropped_trace": 1014}),
    "intercode/trajectories/gpt-4_fs_1.json.xz": (60, 60, 401, {}),
    "intercode/trajectories/gpt-4_fs_2.json.xz": (53, 53, 310, {}),
    "intercode/trajectories/gpt-4_fs_3.json.xz": (60, 60, 334, {}),
    "intercode/trajectories/gpt-4_fs_4.json.xz": (27, 27, 131, {}),
    "intercode/trajectories/gpt-3.5_fs_3.json.xz": (60, 60, 366, {}),
    "intercode/trajectories/gpt-3.5_fs_4.json.xz": (27, 27, 174, {"empty_turn": 1}),
}  # fmt: skip


def test_no_file_of_trajectories_is_forgotten(shared_data: Path) -> None:
    folders = ("nemo_gym", "tau2/trajectories", "swe_agent", "hotpot_react", "intercode/trajectories")
    found = {path.relative_to(shared_data).as_posix() for one in folders for path in (shared_data / one).iterdir()}
    assert found - COUNTS.keys() == {GYM.format("workplace_assistant", "example")}  # tasks, refused below


@pytest.mark.parametrize("name", COUNTS)
def test_every_turn_is_kept_or_counted(shared_data: Path, name: str) -> None:
    traces, report = import_chat([shared_data / name])
    assert adds_up(report)
    assert (len(traces), report.traces_read, report.turns_kept, report.dropped_turns) == COUNTS[name]


def test_turns_are_counted_as_an_independent_reader_counts_them(shared_data: Path) -> None:
    with tarfile.open(shared_data / "swe_agent/demonstrations.tar.xz") as archive:
        trajectories = [json.load(archive.extractfile(m)) for m in archive if m.name.endswith(".traj")]
    assert sum(m["role"] == "assistant" for one in trajectories for m in one["history"]) == 209
    for path in sorted((shared_data / "intercode/trajectories").iterdir()):
        episodes = json.loads(lzma.decompress(path.read_bytes())).values()
        _, report = import_chat([path])
        assert report.turns_read == sum(len(one["turn_history"]["actions"]) for one in episodes)
    react = shared_data / "hotpot_react/100_questions_5_trials.txt.xz"
    text = lzma.decompress(react.read_bytes()).decode()
    _, report = import_chat([react])
    assert report.turns_read == len(re.findall(r"^Action \d+:", text, re.MULTILINE)) == 1867
    assert report.traces_read == text.count("\nQuestion: ") == 512


@pytest.mark.parametrize("name", ["intercode/nl2bash_fs_1", "agentbench_os/training", "bfcl/BFCL_v4_multi_turn_base"])
def test_tasks_without_episodes_are_refused_saying_what_was_tried(shared_data: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"is of no known format \(keys: .*\). Tried agentbench, .*, verifiers;"):
        import_chat([shared_data / f"{name}.json.xz"])


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
    assert (audit.gold.accepted, audit.states) == (6203, 6203)
    for name, tally in audit.mutations.items():
        assert (tally.accepted, tally.partial, tally.unjudged) == (0, 0, 0), name
        assert tally.refused > 1000 or name == "destroyed", name  # few of these traces run a shell
