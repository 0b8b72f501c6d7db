"""A table of ours holds what its header says, every field in its type and range; nothing else is read."""

import gzip
import json

import pytest

from mutations.readers import write_pivots_file, write_profile_file
from turntree.core.errors import InputError
from turntree.run.artifacts import PIVOTS, PROFILE, require_same_profile
from turntree.run.files import read_json, write_json
from turntree.run.jsonl import parse_json, read_lines
from turntree.traces.schema import read_traces


@pytest.fixture
def profile(tmp_path):
    write_profile_file(tmp_path / "profile.jsonl")
    return tmp_path / "profile.jsonl"


def changed(path, number, **fields):
    """The file with fields of one line replaced."""
    lines = path.read_text().splitlines()
    lines[number - 1] = json.dumps({**json.loads(lines[number - 1]), **fields})
    path.write_text("\n".join(lines) + "\n")
    return path


def test_what_is_written_is_read(profile):
    header, rows = PROFILE.read(profile)
    assert header["summary"]["candidates"] == len(rows) == 6


def test_a_profile_may_be_finished_at_another_server(profile):
    """How a server is reached changes no figure; the seed does."""

    def header(url, seed):
        made = PROFILE.read(profile)[0]
        config = {**made["config"], "device": {"engine": {"name": "vllm", "url": url}}, "seed": seed}
        return {**made, "config": config}

    changed(profile, 1, config=header("http://one:8000", 8)["config"])
    require_same_profile(profile, header("http://other:8000", 8), overwrite=False)
    with pytest.raises(InputError, match=r"differs in seed"):
        require_same_profile(profile, header("http://one:8000", 4), overwrite=False)


@pytest.mark.parametrize("sampling", [{"min_p": 0.1}, {"max_tokens": "many"}])
def test_pivots_of_a_sampling_that_is_not_known_are_refused_by_its_field(tmp_path, sampling):
    write_pivots_file(tmp_path / "pivots.jsonl")
    with pytest.raises(InputError, match=r"pivots\.jsonl:1: field 'sampling\.(min_p|max_tokens)'"):
        PIVOTS.read(changed(tmp_path / "pivots.jsonl", 1, sampling=sampling))


@pytest.mark.parametrize("table", [PROFILE, PIVOTS])
def test_a_table_that_misses_a_line_is_refused(tmp_path, table):
    path = tmp_path / "pivots.jsonl"
    (write_profile_file if table is PROFILE else write_pivots_file)(path)
    lines = path.read_text().splitlines(keepends=True)
    for kept in (lines[:-1], [*lines[:2], *lines[3:]]):
        path.write_text("".join(kept))
        with pytest.raises(InputError, match=rf"holds {len(lines) - 2} rows, and its header counts {len(lines) - 1}"):
            table.read(path)
    path.write_text("".join([*lines[:2], lines[1], *lines[3:]]))
    with pytest.raises(InputError, match=r"pivots\.jsonl:3: turn 0 of trace 't\d' is there twice"):
        table.read(path)


def test_traces_that_miss_a_line_are_refused(profile):
    path = profile.with_name("traces.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(InputError, match=r"holds 2 traces, and its header counts 3"):
        list(read_traces(path))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"reward_mean": "0.5"}, "field 'reward_mean': '0.5' is not of type float"),
        ({"reward_mean": 10**400}, "field 'reward_mean'"),
        ({"certainty": 1.5}, "field 'certainty': is 1.5; it is from 0 to 1"),
        ({"turn": -1}, "field 'turn': is -1; it is at least 0"),
        ({"kind": None}, "field 'kind': None is not of type str"),
        ({"turns": 1}, "field 'turns': unknown key; did you mean 'turn'?"),
        ({"samples": [0, 0, 1, 9]}, "samples name action 9 of 3"),
        ({"samples": [0, 0, None, 1]}, "samples do not name every action as often as it is counted"),
        ({"rollouts": 10**12}, "field 'rollouts'"),
        ({"actions": [{"text": "x", "reward": 1, "strict": 1, "count": 10**12}]}, "field 'actions[0].count'"),
    ],
)
def test_a_row_is_checked_before_anything_is_done_with_it(profile, fields, said):
    with pytest.raises(InputError) as refused:
        PROFILE.read(changed(profile, 3, **fields))
    assert "profile.jsonl:3: " in str(refused.value) and said in str(refused.value)


def test_a_table_is_not_written_that_could_not_be_read(tmp_path, profile):
    header, rows = PROFILE.read(profile)
    del header["schema"]
    with pytest.raises(InputError, match="header counts 6"):
        PROFILE.write(tmp_path / "new.jsonl", header, rows[1:])
    with pytest.raises(InputError, match=r"new\.jsonl:2: field 'turn'"):
        PROFILE.write(tmp_path / "new.jsonl", header, [{**rows[0], "turn": 0.5}, *rows[1:]])
    assert not (tmp_path / "new.jsonl").exists()


# text and JSON


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": "\xff"}', "is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "is not UTF-8"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"a":' * 150 + b"1" + b"}" * 150, "nested too deeply"),
        (b"9" * 5000, "is not JSON"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b"NaN", "NaN is not a JSON number"),
        (b'{"x": 1e999}', "1e999 is not a JSON number"),
        (b"9" * 400 + b".0", "is not a JSON number"),
        (b"1" + b"0" * 250 + b"e99", "is not a JSON number"),
        (b"{", "JSON over several lines; write one value a line"),
    ],
)
def test_what_is_no_json_is_refused_in_one_short_line(text, said):
    with pytest.raises(InputError) as refused:
        parse_json(text, "a.jsonl", 3)
    message = str(refused.value)
    assert message.startswith("a.jsonl:3: ") and said in message and "\n" not in message and len(message) < 500


def test_whole_surrogate_pairs_and_shallow_nesting_are_read():
    assert parse_json(b'"\\ud83d\\ude00"') == "\U0001f600"
    assert parse_json(b'{"e123": [1e3, -2.5E+007, 1e-999]}') == {"e123": [1000.0, -2.5e7, 0.0]}
    assert parse_json(b"[" * 90 + b"]" * 90) is not None
    assert parse_json(b"[" + b"[]," * 500 + b"[]]") == [[]] * 501  # wide, not deep


def test_a_damaged_archive_is_named_wherever_the_damage_is(tmp_path):
    whole = gzip.compress(json.dumps(list(range(3000))).encode(), mtime=0)
    path = tmp_path / "a.jsonl.gz"
    refused = 0
    for place in range(10, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            for number, line in read_lines(path):
                parse_json(line, path, number)
        except InputError as error:
            assert "a.jsonl.gz" in str(error)
            refused += 1
    assert refused


def test_half_a_character_of_a_model_survives_in_our_own_files(tmp_path):
    write_json(tmp_path / "a.json", {"text": "\ud800 ü"})
    assert read_json(tmp_path / "a.json") == {"text": "\ud800 ü"}
