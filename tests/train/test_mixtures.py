"""A mixture's router stays as it is where it is frozen, and the rest learns as it would beside it."""

from __future__ import annotations

import random
from functools import partial

import pytest
from random_trees import sampled_near, scored_trees

from tiny_models import tiny_mixture, tiny_model
from turntree.core.errors import ConfigError
from turntree.credit.config import CreditConfig
from turntree.pack.packing import pack
from turntree.stages.config import Device
from turntree.train.config import LoRAConfig, LossConfig, OptimizerConfig
from turntree.train.lora import freeze
from turntree.train.trainer import open_trainers
from turntree.train.update import train_windows

LOSS = LossConfig(kl_coefficient=0.05)


def test_a_frozen_router_is_unchanged_to_the_bit_by_steps_that_move_all_else() -> None:
    model, draw = tiny_mixture(24), random.Random(0)
    freeze(model, ["mlp.gate"])
    trees, rewards = scored_trees(draw)
    trees = [sampled_near(model, tree, draw, 0.3) for tree in trees]
    rule = LOSS.estimator(CreditConfig())
    batches = pack(trees, [rule(*pair) for pair in zip(trees, rewards, strict=True)], max_tokens=4096)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainers = open_trainers(model, OptimizerConfig(learning_rate=1e-2), 9, reference=model)
    for _ in range(2):
        trainers.run(partial(train_windows, loss=LOSS, updates=1, rescores=False), [[batches]])
    same = {name for name, value in model.named_parameters() if value.equal(before[name])}
    assert same == {name for name in before if "mlp.gate." in name} != set()


@pytest.mark.parametrize("names", [["router"], ["model", "lm_head"]])
def test_a_name_that_no_module_has_and_one_that_leaves_nothing_are_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        freeze(tiny_model(tied=False), names)
    assert refused.value.field == "device.frozen"


def test_frozen_modules_and_an_adapter_exclude_each_other() -> None:
    with pytest.raises(ConfigError) as refused:
        Device(frozen=("mlp.gate",), lora=LoRAConfig())
    assert refused.value.field == "device.frozen"
