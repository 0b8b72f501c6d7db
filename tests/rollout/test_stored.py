"""Training on groups that were played before: tier 2 of Selective Rollout, end to end on the embedded policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Rewards
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.credit import CreditRule
from turntree.decide.gates.signals import prefix_edit_distance_mean
from turntree.decide.gates.table import progress_at
from turntree.logs.trees import read
from turntree.stages.config import EpisodesCheckConfig, EvaluateConfig, TrainOnlineConfig
from turntree.stages.evaluate import evaluate
from turntree.stages.train_online import run_train_online
from turntree.train.config import LossConfig, OnlineConfig

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "papers"
TURNS, AT, BELOW = 6, 3, 0.7


@pytest.fixture(autouse=True)
def recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RECIPES)


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("buffer") / "played.json"
    easy = Part("household", {"difficulty": "easy"})
    played = EvaluateConfig(
        environment=easy, split="train", count=6, samples=4, temperature=0.7, max_turns=TURNS, max_tokens=24,
        greedy=False, keep_trees=True,
    )  # fmt: skip
    evaluate(played, out)
    return out.with_name("played.trees.jsonl")


def trained(buffer: Path, out: Path, **environment: Any) -> list[dict[str, Any]]:
    config = TrainOnlineConfig(
        environment=Part("stored_groups:Stored", {"trees": str(buffer), **environment}),
        model="household",
        check=EpisodesCheckConfig(tasks=0),
        estimator=Part("stored_groups:SampledTurns", {"turns": 2}),
        train=OnlineConfig(
            iterations=3,
            groups=2,
            group_size=4,
            max_turns=TURNS,
            max_context=1024,
            sampling=Sampling(temperature=0.7, max_tokens=24),
            loss=LossConfig(kl_coefficient=0.0),
        ),
    )
    run_train_online(config, out)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_every_step_trains_on_groups_of_the_buffer_and_samples_nothing(buffer: Path, tmp_path: Path) -> None:
    rows = trained(buffer, tmp_path / "all")
    assert [row["groups"] for row in rows] == [2, 2, 2]
    assert rows[-1]["spent"]["turns"] == rows[-1]["spent"]["decoded_tokens"] == 0
    assert rows[-1]["spent"]["trained_tokens"] > 0 and any(row.get("grad_norm") for row in rows)


def test_a_gate_leaves_out_exactly_the_groups_whose_recorded_divergence_is_below_its_threshold(
    buffer: Path, tmp_path: Path
) -> None:
    """Six groups in three steps of two: each comes once. A group that had ended at K is not cut, as it is online."""
    gate = {"name": "divergence", "turn": AT, "threshold": BELOW}
    rows = trained(buffer, tmp_path / "gated", gate=gate)
    expected = 0
    for kept in read(buffer):
        group = kept.group()
        progress = progress_at(group, group.rollouts, AT, TURNS)
        running = not all(progress.finished)
        expected += running and prefix_edit_distance_mean(progress, AT) < BELOW
    assert 0 < expected < 6
    assert sum(row["groups_cut"] for row in rows) == expected


def test_a_buffer_plays_no_held_out_task(buffer: Path) -> None:
    with pytest.raises(InputError, match=r"check\.tasks=0"):
        evaluate(EvaluateConfig(environment=Part("stored_groups:Stored", {"trees": str(buffer)}), model="household"))


def test_sampled_turns_train_on_as_many_turns_of_a_rollout_as_were_asked_for_with_their_credit() -> None:
    tree = RolloutTree("long")
    root = tree.add(None, NodeKind.PROMPT, (9,)).id
    leaves = []
    for sample, turns in enumerate((5, 2)):
        node = root
        for turn in range(turns):
            above = tree.add(node, NodeKind.OBSERVATION, (8,)).id if turn else node
            node = tree.add(above, NodeKind.COMPLETION, (sample, turn), logprobs=(0.0, 0.0)).id
        leaves.append(node)
        tree.stop(node, StopReason.COMPLETED)
    rewards = Rewards({leaf: Verdict(float(n), "") for n, leaf in enumerate(leaves)})
    whole = CreditRule()(tree, rewards)
    from stored_groups import SampledTurns

    estimator = SampledTurns(turns=3, seed=1)
    credit = estimator(tree, rewards)
    assert [sum(node in credit.nodes for node in tree.nodes_of(leaf)) for leaf in leaves] == [3, 2]
    assert all(credit.nodes[node] == whole.nodes[node] for node in credit.nodes)
    assert (credit.rollout_tokens, credit.rollouts) == (2 * (3 + 2), 2)
    assert estimator(tree, rewards) == credit
    drawn = {tuple(SampledTurns(turns=3, seed=n)(tree, rewards).nodes) for n in range(9)}
    assert len(drawn) > 1
    with pytest.raises(ConfigError) as refused:
        SampledTurns(normalizer="rollouts", per_rollout=True)
    assert refused.value.field == "loss.normalizer"
