"""An archive of Inspect and a Parquet file are read as the rows that they hold, and refused in one line otherwise."""

import json
import zipfile

import pytest

from turntree.core.errors import InputError
from turntree.traces.sources import source_files, source_rows

CALL = {"id": "c1", "function": "search", "arguments": {"q": "x"}, "type": "function"}
SAMPLE = {
    "id": 7,
    "epoch": 1,
    "input": "Find x.",
    "target": "x",
    "messages": [
        {"id": "m1", "role": "user", "content": "Find x.", "source": "input"},
        {
            "role": "assistant",
            "content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Looking."}],
            "tool_calls": [CALL],
            "model": "m",
        },
        {"role": "tool", "content": "", "tool_call_id": "c1", "error": {"type": "timeout", "message": "late"}},
        {"role": "assistant", "content": "x"},
    ],
    "scores": {"match": {"value": "C"}},
    "output": {},
}  # fmt: skip


def archive(path, *samples):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("header.json", "{}")
        for number, sample in enumerate(samples):
            made.writestr(f"samples/{number}_epoch_1.json", json.dumps(sample))
    return path


def values(path):
    from collections import Counter

    return [row.value for file in source_files(path, Counter()) for row in source_rows(file.path)]


def test_the_samples_of_an_archive_are_read_one_by_one(tmp_path):
    assert values(archive(tmp_path / "a.eval", SAMPLE, {**SAMPLE, "id": 8})) == [SAMPLE, {**SAMPLE, "id": 8}]


def test_a_sample_keeps_calls_thoughts_failures_and_its_score():
    from turntree_interop.inspect import read_inspect

    chat = read_inspect(SAMPLE)
    said = chat.messages[1]
    assert (said["content"], said["reasoning"], chat.success, chat.group) == ("Looking.", "hm", True, "7")
    assert said["tool_calls"][0]["function"]["name"] == "search"
    assert chat.messages[2]["_failed"] and chat.messages[2]["content"] == "late"


def test_a_sample_that_ended_with_an_error_is_no_demonstration():
    from turntree_interop.inspect import read_inspect

    chat = read_inspect({**SAMPLE, "error": {"message": "down"}})
    assert chat.left_out["rollout_failed"] == 2 and all(one["role"] != "assistant" for one in chat.messages)


@pytest.mark.parametrize("told_by", ["output", "event"])
@pytest.mark.parametrize("reason", ["max_tokens", "model_length", "stop", None])
def test_an_answer_that_a_token_limit_ended_is_no_demonstration(told_by, reason):
    from turntree_interop.inspect import read_inspect

    question, *_, answer = SAMPLE["messages"]
    output = {"choices": [{"message": {"id": "m2"}, "stop_reason": reason}]}
    told = {"output": output} if told_by == "output" else {"events": [{"event": "model", "output": output}, "odd"]}
    chat = read_inspect({**SAMPLE, "messages": [question, answer | {"id": "m2"}], **told})
    assert [one.get("weight", 1) for one in chat.messages] == [1, int(reason in ("stop", None))]


@pytest.mark.parametrize("kind", [[], {}, ["text"], None, 3])
def test_a_part_whose_type_is_no_text_is_counted_and_left_out(kind):
    from turntree_interop.inspect import read_inspect

    said = {**SAMPLE["messages"][1], "content": [{"type": kind, "text": "Looking."}]}
    chat = read_inspect({**SAMPLE, "messages": [SAMPLE["messages"][0], said]})
    assert chat.messages[1]["content"] == "" and chat.ignored[f"parts of type {kind}"] == 1


@pytest.mark.parametrize("content", [b"no archive", b"PK\x05\x06" + b"\0" * 18])
def test_what_is_no_archive_or_holds_no_sample_is_refused(content, tmp_path):
    (tmp_path / "a.eval").write_bytes(content)
    with pytest.raises(InputError) as refused:
        values(tmp_path / "a.eval")
    assert refused.value.path == tmp_path / "a.eval"


def test_a_parquet_file_gives_the_rows_that_json_lines_would(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    said = {"role": "assistant", "content": "a"}
    rows = [{"messages": [{"role": "user", "content": f"q{n}"}, said]} for n in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert values(tmp_path / "t.parquet") == rows


def test_a_folder_is_searched_for_tables_and_archives_too(tmp_path):
    """A data set of the Hub, and a folder of Inspect's logs."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "data" / "train-00000-of-00001.parquet")
    archive(tmp_path / "logs.eval", SAMPLE)
    assert values(tmp_path) == [row, SAMPLE]
