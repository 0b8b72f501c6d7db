"""Rows out of trees: a trainer of flat sequences that knows nothing of trees gets the packed loss and gradient."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import sampled_near, scored_trees

import turntree as tt
from packed_gradient import gradient, library_gradient, relative_error
from tiny_models import tiny_model
from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import NodeKind, RolloutTree
from turntree.credit.config import CreditConfig
from turntree.pack.packing import pack
from turntree.train.losses import LossConfig

VOCABULARY = 24
MODEL = tiny_model(vocab_size=VOCABULARY).double()


def credited(seed: int, spread: float, config: LossConfig, **credit: str) -> tuple[list[RolloutTree], list[Credit]]:
    draw = random.Random(seed)
    trees, rewards = scored_trees(draw)
    trees = [sampled_near(MODEL, tree, draw, spread) for tree in trees]
    rule = config.estimator(CreditConfig(**credit))
    return trees, [rule(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]


def flat_loss(rows: list[tt.Row], clip: tuple[float, float] | None) -> torch.Tensor:
    """PPO's loss over flat sequences, as any trainer writes it: min(r A, clip(r) A), or r A without a clip."""
    total = torch.tensor(0.0, dtype=torch.float64)
    for row in rows:
        tokens = torch.tensor([row.tokens])
        scores = torch.log_softmax(MODEL(input_ids=tokens).logits[0, :-1], -1)
        new = scores.gather(1, tokens[0, 1:, None])[:, 0]
        old, advantage, mask = (torch.tensor(x[1:]) for x in (row.logprobs, row.advantages, row.mask))
        ratio = torch.exp(torch.where(mask, new - old.double(), 0.0))
        clipped = ratio if clip is None else ratio.clamp(1 - clip[0], 1 + clip[1])
        total = total - torch.where(mask, torch.min(ratio * advantage, clipped * advantage), 0.0).sum()
    return total


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    attribution=st.sampled_from(["soft", "hard"]),
    normalizer=st.sampled_from(["tokens", "rollouts", "constant"]),
    spread=st.sampled_from([0.0, 0.3]),
)
def test_rows_have_the_packed_loss_and_gradient(seed: int, attribution: str, normalizer: str, spread: float) -> None:
    constant = 7.0 if normalizer == "constant" else None
    config = LossConfig(kl_coefficient=0, clip_high=0.28, normalizer=normalizer, constant=constant)
    trees, credits = credited(seed, spread, config, attribution=attribution)
    loss, packed = library_gradient(MODEL, None, pack(trees, credits, max_tokens=400), config)
    rows = tt.rows(trees, credits)
    divisor = config.divisor(
        sum(map(math.fsum, (row.multiplicities for row in rows))),
        rollout_tokens=sum(credit.rollout_tokens for credit in credits),
        rollouts=sum(credit.rollouts for credit in credits),
    )
    MODEL.zero_grad()
    flat = flat_loss(rows, (0.2, 0.28)) / divisor
    flat.backward()
    assert float(flat.detach()) == pytest.approx(loss, abs=1e-6, rel=1e-6)
    assert relative_error(gradient(MODEL), packed) < 1e-6


@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_without_a_clip_one_row_a_rollout_is_enough(seed: int) -> None:
    wide = LossConfig(kl_coefficient=0, clip_low=1, clip_high=1e6)  # no ratio reaches it
    trees, credits = credited(seed, 0.3, wide)
    loss, packed = library_gradient(MODEL, None, pack(trees, credits, max_tokens=400), wide)
    rows = tt.rows(trees, credits, clipped=False)
    MODEL.zero_grad()
    flat = flat_loss(rows, None) / sum(map(math.fsum, (row.multiplicities for row in rows)))
    flat.backward()
    assert float(flat.detach()) == pytest.approx(loss, abs=1e-6, rel=1e-6)
    assert relative_error(gradient(MODEL), packed) < 1e-6


@given(seed=st.integers(0, 10**6), clipped=st.booleans())
def test_each_sampled_token_is_trained_once(seed: int, clipped: bool) -> None:
    draw = random.Random(seed)
    trees, rewards = scored_trees(draw)
    credits = [
        LossConfig().estimator(CreditConfig())(tree, labels) for tree, labels in zip(trees, rewards, strict=True)
    ]
    rows = tt.rows(trees, credits, clipped=clipped)
    counted: dict[tuple[int, int], float] = {}
    pushes: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        path = trees[row.tree].path(row.nodes[-1])
        assert row.tokens == tuple(token for node in path for token in node.token_ids)
        for node in path:
            at = [i for i, n in enumerate(row.nodes) if n == node.id and row.mask[i]]
            assert len(at) in (0, len(node.token_ids))  # a sampling event is never split
            if at:
                key = (row.tree, node.id)
                assert [row.logprobs[i] for i in at] == list(node.logprobs or ())
                counted[key] = counted.get(key, 0.0) + row.multiplicities[at[0]]
                pushes.setdefault(key, []).append(row.advantages[at[0]])
        untrained = [i for i, trained in enumerate(row.mask) if not trained]
        assert not any(row.advantages[i] or row.logprobs[i] or row.multiplicities[i] for i in untrained)
    want = {(t, n): c for t, credit in enumerate(credits) for n, c in credit.nodes.items() if trees[t][n].token_ids}
    assert counted == pytest.approx({key: c.multiplicity for key, c in want.items()})
    for key, c in want.items():
        both = [c.positive, c.negative] if c.positive and c.negative else [c.positive or c.negative]
        assert pushes[key] == (both if clipped else [c.positive + c.negative])


def test_the_oldest_version_of_what_a_row_trains_is_told() -> None:
    tree = RolloutTree("t")
    at = tree.add(None, NodeKind.PROMPT, (1, 2)).id
    for version in (4, 3):
        at = tree.add(at, NodeKind.COMPLETION, (3,), logprobs=(-1.0,), entropies=(0.0,), policy_version=version).id
    credit = Credit({n: NodeCredit(1.0, 0.0, 1.0) for n in (1, 2)}, rollout_tokens=2, rollouts=1, zero_variance=False)
    assert [row.policy_version for row in tt.rows([tree], [credit])] == [3]


def test_a_sampled_token_that_nothing_predicts_is_refused() -> None:
    tree = RolloutTree("t")
    tree.add(None, NodeKind.COMPLETION, (3,), logprobs=(-1.0,), entropies=(0.0,))
    credit = Credit({0: NodeCredit(1.0, 0.0, 1.0)}, rollout_tokens=1, rollouts=1, zero_variance=False)
    with pytest.raises(InputError):
        tt.rows([tree], [credit])


def test_rows_need_no_torch() -> None:
    blocked = "import sys; sys.modules['torch'] = None; import turntree; turntree.rows, turntree.Row"
    assert subprocess.run([sys.executable, "-c", blocked], check=False).returncode == 0
