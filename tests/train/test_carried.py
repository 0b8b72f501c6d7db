"""Trees through models that keep a state have the loss and the gradient of one row per rollout, for each unique token
computed once."""

from __future__ import annotations

import random

import pytest
import torch
from random_trees import sampled_near, scored_trees

from model_families import family_model
from packed_gradient import library_gradient, relative_error
from turntree.core.labels import Credit
from turntree.core.tree import RolloutTree
from turntree.credit.config import CreditConfig
from turntree.pack.carried import set_carried
from turntree.pack.head import decoder_of
from turntree.pack.packing import pack
from turntree.train.config import LossConfig

LOSS = LossConfig(kl_coefficient=0.0)
QWEN = "Qwen3.5, 3.6"


def labelled(model: torch.nn.Module, seed: int) -> tuple[list[RolloutTree], list[Credit]]:
    draw = random.Random(seed)
    trees, rewards = scored_trees(draw)  # forks inside turns and between them, and of one token
    trees = [sampled_near(model, tree, draw, 0.3) for tree in trees]
    rule = LOSS.estimator(CreditConfig())
    return trees, [rule(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]


WHOLE, CUT = 4096, 40  # tokens of a batch


@pytest.mark.parametrize(
    ("name", "max_tokens"), [(QWEN, WHOLE), (QWEN, CUT), ("gpt-oss", CUT), ("Gemma 3", WHOLE), ("LFM2", WHOLE)]
)
def test_loss_and_gradient_are_those_of_a_row_per_rollout(name: str, max_tokens: int) -> None:
    model = family_model(name).double()
    model.set_experts_implementation("eager")  # the others take no float64
    trees, credits = labelled(model, 0)
    flat = library_gradient(model, None, pack(trees, credits, max_tokens=4096, shared=False), LOSS)
    set_carried(model, True)
    packed = library_gradient(model, None, pack(trees, credits, max_tokens=max_tokens), LOSS)
    assert packed[0] == pytest.approx(flat[0], rel=1e-5)
    assert relative_error(packed[1], flat[1]) < 1e-5


def test_no_token_is_computed_twice() -> None:
    model = family_model(QWEN)
    batches = pack(*labelled(model, 3), max_tokens=4096)
    set_carried(model, True)
    computed: list[int] = []
    count = decoder_of(model).register_forward_pre_hook(
        lambda module, args, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    library_gradient(model, None, batches, LOSS)
    count.remove()
    unique, flat = (sum(getattr(batch.stats, kind) for batch in batches) for kind in ("unique_tokens", "flat_tokens"))
    assert sum(computed) <= unique < 0.8 * flat, "leaves on which nothing depends are left out"
