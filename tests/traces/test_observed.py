"""Calls that LangSmith and Langfuse recorded are the conversations that were had, each turn once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_fixtures import REAL, adds_up, lines

from chat_import import import_chat
from turntree.traces.candidates import candidates
from turntree_interop.observed import Observed


@pytest.mark.parametrize("name", ["langsmith_graph", "langfuse_graph", "langfuse_loop"])
def test_one_run_is_one_trace_whichever_service_and_client_recorded_it(name: str) -> None:
    [trace], _ = import_chat([REAL / f"{name}.jsonl"])
    [same], _ = import_chat([REAL / "langsmith_loop.jsonl"])
    assert trace.messages == same.messages and len(candidates(trace)) == 3
    assert [one["function"]["name"] for one in trace.tools] == ["weather"] and trace.tools == same.tools


FORMS = [("langsmith_graph", form) for form in ("list", "table")]
FORMS += [("langfuse_graph", form) for form in ("list", "table", "table of a bucket", "traces")]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_list_a_table_and_whole_traces_hold_the_same_calls(name: str, form: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (REAL / f"{name}.jsonl").read_text().splitlines()]
    path = tmp_path / "export.json"
    if form == "traces":
        path.write_text(json.dumps([{"id": "t", "timestamp": "2026", "observations": rows}]))
    elif form == "list":
        path.write_text(json.dumps(rows))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        inside = ("inputs", "outputs", "extra", "input", "output")  # of a bulk export, which has them as JSON
        told = [{key: json.dumps(row[key]) if key in inside else row[key] for key in sorted(row)} for row in rows]
        if form == "table of a bucket":
            spelled = {"traceId": "trace_id", "startTime": "start_time", "parentObservationId": "parent_observation_id"}
            told = [{spelled.get(key, key): value for key, value in row.items()} for row in told]
        path = tmp_path / "export.parquet"
        names = sorted({key for row in told for key in row} - {"events", "serialized", "tags", "attachments"})
        table = {name: [row.get(name) for row in told] for name in names}
        parquet.write_table(pyarrow.table(table), path)
    [trace], _ = import_chat([path])
    [same], _ = import_chat([REAL / f"{name}.jsonl"])
    assert (trace.messages, trace.tools) == (same.messages, same.tools)


@given(st.lists(st.integers(0, 100), max_size=12), st.randoms(use_true_random=False))
def test_of_any_tree_of_calls_every_answer_is_a_candidate_once_and_every_leaf_a_conversation(
    parents: list[int], random: object
) -> None:
    """Retries, sub-conversations and histories that were taken up again, logged in any order."""
    histories: list[list[dict[str, str]]] = []
    calls: list[tuple[list[dict[str, str]], dict[str, str], str]] = []
    for number, parent in enumerate(parents):
        before = histories[parent % len(histories)] if histories and parent % 3 else []
        asked = [*before, {"role": "user", "content": f"question {number if parent % 2 else 'again'}"}]
        said = {"role": "assistant", "content": f"answer {number}"}
        histories.append([*asked, said])
        calls.append((asked, said, f"{number:03d}"))
    shuffled = list(calls)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    observed = Observed()
    for asked, said, at in shuffled:
        observed.add(None, "t", asked, said, [], at)
    rows = list(observed.rows())
    turns = [m["content"] for row in rows for m in row.messages if m["role"] == "assistant" and "_skip" not in m]
    assert sorted(turns) == sorted(said["content"] for _, said, _ in calls)
    leaves = [whole for whole in histories if not any(whole == other[: len(whole)] != other for other in histories)]
    assert sorted(len(row.messages) for row in rows) == sorted(map(len, leaves))
    assert len({(row.id, row.context) for row in rows}) == len(rows) and {row.group for row in rows} <= {"t"}


def test_a_file_with_only_failed_calls_says_so(tmp_path: Path) -> None:
    run = {"id": "r", "trace_id": "t", "run_type": "llm", "inputs": {"messages": []}, "error": "timeout"}
    (tmp_path / "runs.jsonl").write_text(lines(run))
    traces, report = import_chat([tmp_path / "runs.jsonl"])
    assert not traces and report.dropped_turns == {"failed_call": 1} and adds_up(report)


ASKED = [{"role": "user", "content": "Write a story."}]
SAID = {"role": "assistant", "content": "Once upon a"}
LENGTH = {"finish_reason": "length"}


def smith(asked: list[object], outputs: object, at: int) -> dict[str, object]:
    return {"id": str(at), "trace_id": "t", "run_type": "llm", "start_time": at, "inputs": {"messages": asked},
            "outputs": outputs}  # fmt: skip


def fuse(asked: list[object], output: object, at: int) -> dict[str, object]:
    return {"id": str(at), "traceId": "t", "type": "GENERATION", "startTime": at, "input": asked, "output": output}


CUT = {
    "a choice": (smith, {"choices": [{**LENGTH, "message": SAID}]}),
    "a generation": (smith, {"generations": [[{"generation_info": LENGTH, "message": {"kwargs": SAID}}]]}),
    "LangChain's metadata": (
        smith,
        {"generations": [[{"message": {"kwargs": SAID | {"response_metadata": {"stop_reason": "max_tokens"}}}}]]},
    ),
    "a message": (fuse, SAID | LENGTH),
    "a message's metadata": (fuse, SAID | {"response_metadata": LENGTH}),
}


@pytest.mark.parametrize("how", CUT)
def test_an_answer_that_the_token_limit_cut_is_no_demonstration_in_whatever_goes_on_from_it(
    how: str, tmp_path: Path
) -> None:
    made, output = CUT[how]
    whole = {"role": "assistant", "content": "The end."}
    again = [*ASKED, SAID, {"role": "user", "content": "Go on."}]
    rows = [made(ASKED, output, 1), made(again, whole if made is fuse else {"choices": [{"message": whole}]}, 2)]
    (tmp_path / "runs.jsonl").write_text(lines(*rows))
    [trace], report = import_chat([tmp_path / "runs.jsonl"])
    assert trace.meta["skip_turns"] == {"0": "marked_not_trained"} and len(trace.messages) == 4
    assert report.dropped_turns == {"marked_not_trained": 1} and adds_up(report)


@pytest.mark.parametrize("service", ["langsmith", "langfuse", "langfuse traces"])
def test_the_turns_of_a_thread_count_once_though_each_is_a_trace_with_the_whole_history(
    service: str, tmp_path: Path
) -> None:
    said: list[dict[str, str]] = [{"role": "system", "content": "S"}]
    rows: list[dict[str, Any]] = []
    for n in range(3):
        said.append({"role": "user", "content": f"question {n}"})
        answer, at = {"role": "assistant", "content": f"answer {n}"}, f"2026-01-01T00:00:0{n}"
        if service == "langsmith":
            row = {"id": str(n), "trace_id": f"t{n}", "run_type": "llm", "start_time": at}
            row |= {"inputs": {"messages": [*said]}, "outputs": {"choices": [{"message": answer}]}}
            row |= {"extra": {"metadata": {"thread_id": "T"}}}
        else:
            row = {"id": str(n), "traceId": f"t{n}", "type": "GENERATION", "startTime": at, "input": [*said],
                   "output": answer, "sessionId": "T"}  # fmt: skip
            if service == "langfuse traces":
                del row["sessionId"]
                row = {"id": f"t{n}", "timestamp": at, "sessionId": "T", "observations": [row]}
        rows.append(row)
        said.append(answer)
    (tmp_path / "a.jsonl").write_text(lines(*rows))
    [trace], report = import_chat([tmp_path / "a.jsonl"])
    assert len(candidates(trace)) == 3 == report.turns_read and trace.group == "T" and trace.id == "t2"
