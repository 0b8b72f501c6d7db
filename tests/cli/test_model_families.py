"""Models whose state is carried over forks go through every stage, from demonstrations to a trained policy."""

import json

import pytest

from model_families import family_model
from tiny_models import tiny_tokenizer


@pytest.fixture(scope="module", params=["Qwen3.5, 3.6", "gpt-oss"])
def begun(request, turntree, tmp_path_factory):
    """A random model that was fitted to a few games."""
    folder = tmp_path_factory.mktemp("family")
    family_model(request.param).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    turntree("traces", "household", "--count", 6, "--out", folder / "traces.jsonl")
    turntree(
        *("sft", "--model", folder / "model", "--traces", folder / "traces.jsonl", "--learning-rate", 3e-3),
        *("--epochs", 8, "--out", folder / "sft", "--set", "check.tasks=0"),
    )
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pivots_are_profiled_and_trained(turntree, begun):
    profile, pivots, out = begun / "profile.jsonl", begun / "pivots.jsonl", begun / "pivot"
    model = ("--model", begun / "sft" / "model")
    turntree(
        *("profile", *model, "--traces", begun / "traces.jsonl", "--rollouts", 4, "--limit", 8, "--max-tokens", 12),
        *("--verifier", "test_model_families:by_length", "--set", "profile.cut_turns=judge", "--out", profile),
    )
    turntree("select", profile, "--threshold", 1.0, "--out", pivots)
    turntree(
        *("train", "pivot", pivots, *model, "--verifier", "test_model_families:by_length", "--steps", 2),
        *("--max-tokens", 12, "--set", "train.groups=2", "--set", "train.group_size=4"),
        *("--set", "train.cut_turns=judge", "--set", "check.tasks=0", "--out", out),
    )
    trained = [row for row in rows(out / "metrics.jsonl") if row.get("trained_tokens")]
    assert trained and all(row["rho"] > 2 for row in trained), "the prompt is computed once"
    assert all(abs(row["ratio_max"] - 1) < 1e-3 for row in trained), "and is scored as it was sampled"


def test_whole_episodes_are_trained_with_branching(turntree, begun):
    out = begun / "online"
    turntree(
        *("train", "online", "--environment", "household", "--model", begun / "sft" / "model", "--iterations", 2),
        *(
            "--max-turns",
            3,
            "--max-tokens",
            40,
            "--reward",
            "test_model_families:wordy",
            "--brancher",
            "fixed_brancher:FixedBrancher",
        ),
        *("--set", "train.groups=2", "--set", "train.group_size=4", "--set", "check.tasks=1"),
        *("--set", "train.initial_rollouts=2", "--set", "brancher.turns=[2]", "--out", out),
    )
    trained = [row for row in rows(out / "metrics.jsonl") if row.get("trained_tokens")]
    assert len(trained) == 2 and all(row["rho"] > 2 for row in trained)
    assert sum(row["trees"]["forks"] for row in trained) > 0


def by_length(state, action):
    return len(action.content) % 2 == 0


def wordy(episode):
    return len(repr(episode.messages)) % 7 / 7
