"""`turntree verifier score` and `audit`, from the files that a user has to the JSON that a script reads."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from turntree.cli.main import cli, main
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.traces.schema import Trace, write_traces

pytest.importorskip("tree_sitter_bash")
pytestmark = pytest.mark.skipif(
    "recommended" not in importlib.metadata.entry_points(group="turntree.verifiers").names,
    reason="turntree was installed before `recommended` was registered",
)

LS = {"type": "function", "function": {"name": "bash", "arguments": '{"command": "ls -la"}'}}
SAME = {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls -al\n"}}}

PAY_ANN = {"type": "function", "function": {"name": "pay", "args": {"to": "Ann", "amount": 5}}}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(tmp_path: Path, *words: object) -> dict[str, Any]:
    out = tmp_path / "out.json"
    cli.main(args=[*map(str, words), "--json", str(out)], prog_name="turntree", standalone_mode=False)
    return json.loads(out.read_text())


def score(tmp_path: Path, gold: list[Any], candidate: list[Any], *more: object, verifier: str = "recommended") -> Any:
    files = lines(tmp_path / "gold.jsonl", *gold), lines(tmp_path / "candidate.jsonl", *candidate)
    words = ["--verifier", verifier, "--gold", files[0], "--candidate", files[1], *more]
    return run(tmp_path, "verifier", "score", *words)


def chat(*calls: Any, text: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


@pytest.mark.parametrize(
    "candidate",
    [
        chat(SAME),
        {"message": chat(SAME)},
        {"messages": [{"role": "user", "content": "Look."}, chat(SAME)]},
        {"type": "function_call", "name": "bash", "arguments": '{"command": "ls -al"}'},
        [{"type": "reasoning", "summary": []}, {"type": "function_call", **SAME["function"]}],
        {"output": [{"type": "function_call", **SAME["function"], "call_id": "c", "generation_token_ids": [1]}]},
    ],
    ids=lambda row: "items" if isinstance(row, list) else next(iter(row)) + str(len(row)),
)
def test_an_action_is_read_in_every_form(tmp_path: Path, candidate: Any) -> None:
    found = score(tmp_path, [chat(LS)], [candidate])
    assert found["verifier"] == "recommended/8"
    assert found["verdicts"] == [{"reward": 1.0, "reason": "does the same", "kind": "bash"}]


def test_verdicts_come_in_order_and_null_is_not_judged(tmp_path: Path) -> None:
    broken = {"type": "function", "function": {"name": "bash", "arguments": "{"}}
    gold = [chat(LS), chat(LS), chat(broken), chat(text="Hello")]
    items = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}]
    found = score(tmp_path, gold, [chat(broken), chat(SAME), chat(LS), items])
    assert [verdict["reward"] for verdict in found["verdicts"]] == [0.0, 1.0, None, 1.0]
    assert "not JSON" in found["verdicts"][2]["reason"]
    assert (found["judged"], found["accepted"]) == (3, 2)


def test_declared_tools_stand_on_the_line_or_in_a_file(tmp_path: Path) -> None:
    flat = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}, "required": ["why"]}}
    found = score(tmp_path, [{**chat(LS), "tools": [flat]}], [chat(SAME)])
    assert found["verdicts"][0]["reward"] is None  # the demonstration breaks the declaration
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": {"name": "bash"}}]))
    assert score(tmp_path, [chat(LS)], [chat(SAME)], "--tools", tmp_path / "tools.json")["accepted"] == 1


def test_options_are_keys_and_labels_say_how_far_it_agrees(tmp_path: Path) -> None:
    labels = lines(tmp_path / "labels.jsonl", 1, {"label": 0})
    gold, candidate = [chat(LS), chat(text="Hello")], [chat(SAME), chat(text="Bye")]
    found = score(tmp_path, gold, candidate, "--labels", labels, "--set", "verifier.messages=any")
    assert found["verifier"] == 'recommended/8+messages="any"'
    assert found["agreement"]["accuracy"] == 0.5
    assert found["agreement"]["accepted_wrong"] == 1
    nemo = score(tmp_path, gold, candidate, "--set", "verifier.domain=swe", verifier="nemo")
    assert [verdict["reward"] for verdict in nemo["verdicts"]] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("gold", "candidate", "said"),
    [
        ([chat(LS)], [], "has 0 actions, and"),
        ([chat(LS)], [3], "candidate.jsonl:1: is no action"),
        ([{"role": "user", "content": "x"}], [chat(LS)], "'role': is 'user'"),
        ([chat({"function": {}})], [chat(LS)], "has no function name"),
        ([chat(LS)], [{"role": "assistant", "function_call": LS["function"]}], "'tool_calls': is not a list of calls"),
        ([chat(LS)], [{"expected_action": chat(LS)}], "candidate.jsonl:1: is no action"),
        ([chat(LS)], [[{"type": "image"}]], "holds an item of type 'image'"),
        ([chat(PAY_ANN)], [chat(PAY_ANN)], "gold.jsonl:1: field 'tool_calls.args': unknown key"),
        ([chat(LS)], [{"type": "function_call", **PAY_ANN["function"]}], "field 'tool_calls.args': unknown key"),
        ([chat(LS)], [chat(LS) | {"content": [{"type": "text", "text": "x", "y": 1}]}], "'content.y': unknown key"),
        ([chat(LS) | {"tools": [{"name": "bash", "schema": {}}]}], [chat(LS)], "field 'tools[0].schema': unknown"),
    ],
)
def test_a_line_that_is_no_action_is_an_error_with_its_line(
    tmp_path: Path, gold: Any, candidate: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = lines(tmp_path / "gold.jsonl", *gold), lines(tmp_path / "candidate.jsonl", *candidate)
    with pytest.raises(SystemExit) as stopped:
        main(["verifier", "score", "--verifier", "strict", "--gold", str(files[0]), "--candidate", str(files[1])])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def a_trace(path: Path) -> Path:
    call = ToolCall("bash", {"command": "cat src/a.py && ls -la", "description": "look"}, "1")
    messages = (
        Message("user", "Look."),
        Message("assistant", "", (call,)),
        Message("tool", "ok\n[Current working directory: /repo]", (), "1"),
        Message("assistant", "", (ToolCall("bash", {"command": "cat src/a.py"}, "2"),)),
        Message("tool", "x", (), "2"),
        Message("assistant", "It is x."),
    )
    write_traces(path, [Trace(id="t", messages=messages)])
    return path


def test_the_audit_holds_for_recommended_and_finds_what_nemo_pays(tmp_path: Path) -> None:
    traces = a_trace(tmp_path / "traces.jsonl")
    found = run(tmp_path, "verifier", "audit", traces, "--verifier", "recommended")
    assert found["holds"] and found["paid"] == found["refused"] == []
    assert found["gold"]["accepted"] == 3
    for name in ("dropped_argument", "changed_value", "surplus_call", "destroyed", "premature_message"):
        assert found["mutations"][name]["refused"] == 2, name
    with pytest.raises(SystemExit, match="1"):
        run(tmp_path, "verifier", "audit", traces, "--verifier", "nemo")
    nemo = json.loads((tmp_path / "out.json").read_text())
    assert not nemo["holds"]
    paid = {one["copy"] for one in nemo["paid"]}
    assert {"repeated_call", "surplus_call", "other_message"} <= paid


def test_labels_in_another_encoding_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "labels.jsonl").write_bytes(b"\xff1\n")
    with pytest.raises(InputError, match="is not UTF-8"):
        score(
            tmp_path,
            [{"role": "assistant", "content": "a"}],
            [{"role": "assistant", "content": "a"}],
            "--labels",
            tmp_path / "labels.jsonl",
        )
