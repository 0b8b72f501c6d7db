"""A user's own model, chat traces with tool calls, and verifiers of their own: the README's second half."""

import json

import pytest

from tiny_models import CHAT_TEMPLATE, save_tiny_checkpoint, tiny_tokenizer

WITH_TOOLS = "{% for tool in tools or [] %}<|system|>{{ tool | tojson }}<|end|>{% endfor %}" + CHAT_TEMPLATE
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer", "default": 5}},
                "required": ["query"],
            },
        },
    }
]


def conversation(index):
    call = {"type": "function", "id": "1", "function": {"name": "search", "arguments": f'{{"query": "fact {index}"}}'}}
    return {
        "messages": [
            {"role": "user", "content": f"look up fact {index}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "it is true"},
            {"role": "assistant", "content": "It is true."},
        ],
        "tools": TOOLS,
    }


@pytest.fixture(scope="module")
def own(turntree, tmp_path_factory):
    """A saved model, imported traces and a profile made with the schema-aware verifier."""
    folder = tmp_path_factory.mktemp("own")
    save_tiny_checkpoint(folder / "model")
    tiny_tokenizer(WITH_TOOLS).save_pretrained(folder / "model")
    (folder / "chat.jsonl").write_text("".join(json.dumps(conversation(i)) + "\n" for i in range(12)))
    turntree("traces", "import", folder / "chat.jsonl", "--dev", 0.2, "--out", folder / "traces.jsonl")
    turntree(
        *("profile", "--model", folder / "model", "--traces", folder / "traces.jsonl", "--verifier", "tool_call"),
        *("--rollouts", 4, "--max-tokens", 64, "--out", folder / "profile.jsonl"),
    )
    return folder


def test_the_profile_has_every_turn_and_gold_is_accepted(own):
    header, *rows = (json.loads(line) for line in (own / "profile.jsonl").read_text().splitlines())
    assert header["summary"]["gold_refused"] == header["summary"]["gold_unjudged"] == 0
    assert {row["kind"] for row in rows} == {"search", "message"}
    assert all(row["gold"] == 1.0 for row in rows)


def test_a_policy_that_never_succeeds_has_no_pivot_and_is_told_so(turntree, own, tmp_path):
    message = turntree.error("select", own / "profile.jsonl", "--out", tmp_path / "pivots.jsonl")
    assert "holds no pivot" in message


def test_training_uses_the_verifier_of_the_profile(turntree, own, tmp_path):
    turntree(
        "select",
        own / "profile.jsonl",
        "--rule",
        "random",
        "--threshold",
        1.0,
        "--anchor-share",
        0.0,
        "--out",
        tmp_path / "x.jsonl",
        code=2,
    )  # as many as there are pivots: none
    rows = (own / "profile.jsonl").read_text().splitlines()
    edited = [json.loads(row) for row in rows]
    for row in edited[1:]:
        row |= {"reward_mean": 0.5, "reward_var": 0.25}  # as if the policy could do it
    (tmp_path / "profile.jsonl").write_text("".join(json.dumps(row) + "\n" for row in edited))
    turntree("select", tmp_path / "profile.jsonl", "--out", tmp_path / "pivots.jsonl")
    arguments = (
        "train",
        "pivot",
        tmp_path / "pivots.jsonl",
        "--model",
        own / "model",
        "--steps",
        1,
        "--max-tokens",
        64,
        "--set",
        "train.groups=2",
        "--set",
        "train.group_size=2",
    )
    turntree(*arguments, "--out", tmp_path / "run")
    assert "tool-call" in (tmp_path / "pivots.jsonl").read_text().splitlines()[0].replace("_", "-")
    message = turntree.error(*arguments, "--verifier", "household", "--out", tmp_path / "other")
    assert "were profiled with verifier" in message
    message = turntree.error(*arguments, "--set", "device.dtype=bfloat16", "--out", tmp_path / "half")
    assert "were not profiled with" in message  # a policy's hash covers the type of its weights


def test_a_verifier_of_the_current_folder_is_found(turntree, own, tmp_path):
    (tmp_path / "my_own_rules.py").write_text(
        "def accept(state, action):\n    return action.content.strip() == state.demonstration.content.strip()\n"
    )
    result = turntree.json(
        *("profile", "--model", own / "model", "--traces", own / "traces.jsonl", "--rollouts", 2, "--limit", 3),
        *("--max-tokens", 64, "--verifier", "my_own_rules:accept", "--out", tmp_path / "profile.jsonl"),
        cwd=tmp_path,
    )
    assert result["candidates"] == 3


def test_demonstrations_that_cannot_be_sampled_are_counted(turntree, own, tmp_path):
    message = turntree.error(
        *("profile", "--model", own / "model", "--traces", own / "traces.jsonl", "--verifier", "tool_call"),
        *("--max-tokens", 2, "--out", tmp_path / "profile.jsonl"),
    )
    assert "demonstration_above_max_tokens" in message and "--max-tokens" in message


def test_a_folder_as_output_file_is_one_line(turntree, own, tmp_path):
    assert str(tmp_path) in turntree.error("traces", "household", "--count", 1, "--out", tmp_path)


def test_a_seed_cannot_reach_into_another_split(turntree, tmp_path):
    arguments = ("traces", "household", "--out", tmp_path / "t.jsonl", "--count", 2)
    assert "leave the split" in turntree.error(*arguments, "--set", "environment.offset=999999")
