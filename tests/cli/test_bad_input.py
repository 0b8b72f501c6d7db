"""Bad input ends in one clear line and exit code 2, and nothing is lost."""

import json
import sys

import pytest

from turntree.stages import evaluate, local, train_online

ROW = {
    "messages": [
        {"role": "user", "content": "what is 2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
}


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_truncated_line_is_named(turntree, tmp_path):
    source = write(tmp_path / "a.jsonl", json.dumps(ROW), json.dumps(ROW)[:40])
    message = turntree.error("traces", "import", source, "--out", tmp_path / "t.jsonl")
    assert "a.jsonl:2" in message
    assert not (tmp_path / "t.jsonl").exists()


def test_tool_arguments_that_are_not_json_are_named(turntree, tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": "{2, 2}"}}
    row = {"messages": [ROW["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    source = write(tmp_path / "a.jsonl", json.dumps(row))
    message = turntree.error("traces", "import", source, "--out", tmp_path / "t.jsonl")
    assert "a.jsonl:1" in message and "arguments" in message and "JSON" in message


def test_a_trace_without_assistant_turns_is_named(turntree, tmp_path):
    source = write(tmp_path / "a.jsonl", json.dumps({"messages": ROW["messages"][:1]}))
    message = turntree.error("traces", "import", source, "--out", tmp_path / "t.jsonl")
    assert "a.jsonl:1" in message and "assistant" in message


def test_dropping_is_asked_for_and_counted(turntree, tmp_path):
    source = write(tmp_path / "a.jsonl", json.dumps(ROW), json.dumps({"messages": ROW["messages"][:1]}))
    result = turntree.json("traces", "import", source, "--on-error", "drop", "--dev", 0, "--out", tmp_path / "t.jsonl")
    text = json.dumps(result)
    assert "no_assistant_turn" in text


def test_an_import_says_what_it_kept_in_a_sentence_and_names_no_empty_count(turntree, tmp_path):
    source, out = write(tmp_path / "a.jsonl", json.dumps(ROW), json.dumps({"messages": ROW["messages"][:1]})), "t.jsonl"
    said = turntree("traces", "import", source, "--on-error", "drop", "--dev", 0, "--out", out, cwd=tmp_path).stdout
    assert said.startswith("1 trace (1 train), 1 candidate turn -> t.jsonl\n")
    assert "dropped of 2 traces: 1 no_assistant_turn\n" in said
    assert "{" not in said and "cut" not in said and "joined" not in said


@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        ("gymnasium", "gymnasium", ("train", "online", "--environment", "gymnasium:CartPole-v1")),
        ("verifiers", "verifiers", ("evaluate", "--environment", "verifiers:wordle", "--model", "default")),
        ("openai", "endpoint", ("profile", "--traces", "t.jsonl", "--verifier", "judge")),
        ("renderers", "renderers", ("train", "online", "--set", "device.renderer=family:qwen3")),
        ("wandb", "wandb", ("train", "online", "--log", "wandb")),
        ("ray", "ray", ("train", "online", "--set", "cluster.workers=2")),
        ("peft", "lora", ("train", "online", "--set", "device.lora.rank=8")),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra_before_a_model_is_loaded(
    turntree, tmp_path, monkeypatch, package, extra, words
):
    def load(*_, **__):
        raise AssertionError("the model is loaded")

    monkeypatch.setitem(sys.modules, package, None)  # as an import finds what is not installed
    for stage, name in ((train_online, "load_policy"), (evaluate, "load_policy"), (local, "load_model")):
        if package != "peft" or stage is local:
            monkeypatch.setattr(stage, name, load)
    message = turntree.error(*words, "--out", tmp_path / "run")
    assert package in message and f"'turntree[{extra}]'" in message
    assert not (tmp_path / "run").exists(), "the corrected command would be refused"


@pytest.mark.parametrize(
    ("key", "unknown"),
    [("profil.rollouts=4", "profil"), ("profile.rolouts=4", "profile.rolouts"), ("seeds=1", "seeds")],
)
def test_an_unknown_key_is_an_error(turntree, household, tmp_path, key, unknown):
    message = turntree.error(
        *("profile", "--traces", household / "traces.jsonl", "--out", tmp_path / "p.jsonl", "--set", key)
    )
    assert f"field {unknown!r}: unknown key" in message


def test_an_unknown_option_is_an_error(turntree):
    assert "--sead" in turntree.error("evaluate", "--sead", 3)


def test_a_missing_model_folder_is_named(turntree):
    message = turntree.error("evaluate", "--environment", "household", "--model", "no/such/model", "--count", 1)
    assert "no/such/model" in message


@pytest.mark.parametrize("words", [("plan",), ("evaluate", "--environment", "household", "--model")])
def test_the_folder_of_a_run_in_place_of_a_model_names_the_model_in_it(turntree, tmp_path, words):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text('{"stage": "sft", "config": {}}')
    assert str(tmp_path / "run" / "model") in turntree.error(*words, tmp_path / "run")


def test_a_template_without_generation_prompt_is_refused(turntree, household, tmp_path):
    from turntree_worlds.household.entry import POLICY as EMBEDDED

    folder = tmp_path / "model"
    folder.mkdir()
    for file in EMBEDDED.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    message = turntree.error("evaluate", "--environment", "household", "--model", folder, "--count", 1)
    assert "generation prompt" in message


def test_a_missing_profile_and_a_wrong_file_are_told_apart(turntree, household, tmp_path):
    assert "no such file" in turntree.error("select", tmp_path / "none.jsonl", "--out", tmp_path / "p.jsonl")
    message = turntree.error("select", household / "traces.jsonl", "--out", tmp_path / "p.jsonl")
    assert "turntree.profile/2" in message
    message = turntree.error("sft", "--traces", household / "pivots.jsonl", "--out", tmp_path / "sft")
    assert "turntree.traces/1" in message and "import" not in message, "it was never imported"


def test_changed_traces_are_refused(turntree, household, tmp_path):
    lines = (household / "traces.jsonl").read_text().splitlines()
    other = write(tmp_path / "traces.jsonl", *lines[:-1])
    message = turntree.error(
        *("train", "pivot", household / "pivots.jsonl", "--traces", other, "--out", tmp_path / "run")
    )
    assert "not the file that was profiled" in message


def test_a_verifier_that_does_not_exist_is_named(turntree, household, tmp_path):
    for name in ("nonsense", "no_such_module:function"):
        message = turntree.error(
            *("profile", "--traces", household / "traces.jsonl", "--verifier", name, "--out", tmp_path / "p.jsonl")
        )
        assert name.split(":")[0] in message


@pytest.mark.parametrize(
    "words",
    [
        ("select", "profile.jsonl", "--out", "profile.jsonl"),
        ("select", "profile.jsonl", "--out", "pivots.jsonl", "--json", "link.jsonl"),
        ("profile", "--traces", "traces.jsonl", "--out", "../WORK/traces.jsonl"),
        ("rescore", "profile.jsonl", "--verifier", "strict", "--out", "link.jsonl"),
        ("traces", "import", "traces.jsonl", "--out", "traces.jsonl"),
        ("traces", "import", ".", "--out", "traces.jsonl"),
        ("traces", "import", "other.jsonl", "--set", "tools=tools.json", "--out", "tools.json"),
        ("verifier", "score", "--verifier", "strict", "--gold", "a", "--candidate", "b", "--json", "b"),
        ("verifier", "audit", "traces.jsonl", "--verifier", "strict", "--json", "traces.jsonl"),
        ("audit", "other.jsonl", "--out", "other.jsonl"),
        ("gate", "calibrate", "other.jsonl", "--json", "other.jsonl"),
        ("report", "other.jsonl", "--out", "other.jsonl"),
        ("index", "build", "other.jsonl", "--out", "other.jsonl", "--overwrite"),
        ("sft", "--traces", "traces.jsonl", "--model", "run/model", "--out", "run", "--overwrite"),
        ("sft", "--traces", "traces.jsonl", "--config", "keys.toml", "--out", "new", "--json", "keys.toml"),
        ("evaluate", "--out", "new.json", "--json", "new.json"),
    ],
    ids=" ".join,
)
def test_no_command_replaces_what_it_reads(turntree, household, tmp_path, words):
    work = tmp_path / "WORK"
    (work / "run" / "model").mkdir(parents=True)
    (work / "run" / "model" / "config.json").write_text("{}")
    for name in ("profile.jsonl", "traces.jsonl"):
        (work / name).write_text((household / name).read_text())
    for name in ("other.jsonl", "tools.json", "a", "b", "keys.toml"):
        (work / name).touch()
    (work / "link.jsonl").symlink_to("profile.jsonl")
    before = {path: path.read_bytes() for path in work.rglob("*") if path.is_file()}
    assert "would replace" in turntree.error(*words, cwd=work)
    assert {path: path.read_bytes() for path in work.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "--environment", "household", "--out", "folder"),
        ("evaluate", "--environment", "household", "--out", "file/x.json"),
        ("evaluate", "--environment", "household", "--json", "folder"),
        ("profile", "--traces", "none", "--out", "folder"),
        ("sft", "--traces", "none", "--out", "file"),
        ("sft", "--traces", "none", "--out", "file/run"),
        ("audit", "none", "--out", "folder"),
        ("audit", "none", "--json", "file/x.json"),
        ("report", "none", "--json", "folder"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_written_is_found_before_anything_is_done(turntree, tmp_path, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    message = turntree.error(*words, cwd=tmp_path)
    assert any(said in message for said in ("is a folder", "is a file", "cannot be written"))


def test_a_folder_without_permission_is_found_before_anything_is_done(turntree, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    message = turntree.error("evaluate", "--environment", "household", "--out", tmp_path / "new" / "x.json")
    assert f"cannot be written: {tmp_path} is read-only" in message


def test_a_word_that_is_no_path_is_no_input(turntree, tmp_path):
    (tmp_path / "dev").touch()
    turntree("evaluate", "--split", "dev", "--out", "dev", "--dry-run", cwd=tmp_path)
