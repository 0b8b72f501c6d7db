"""The experts that a server chose are those of the update: packed as flat, and as written out by hand."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from random_trees import sampled_near, scored_trees

from model_families import family_model
from packed_gradient import library_gradient, relative_error
from routed import by_token, chosen, mixed, routed_at_random, to_replay
from tiny_models import tiny_mixture
from turntree.core.errors import InputError
from turntree.core.labels import Credit
from turntree.core.tree import RolloutTree
from turntree.credit.config import CreditConfig
from turntree.engine.routes import mixture_of, replayed, routes_of
from turntree.pack.carried import set_carried
from turntree.pack.packing import PackedBatch, pack
from turntree.train.config import LossConfig
from turntree.train.forward import set_checkpointing, slot_scores

LOSS = LossConfig(kl_coefficient=0.0)
FAMILIES = ["MiniMax-M2", "GLM-4.5 MoE", "DeepSeek-V3", "gpt-oss", "Qwen3-Next", "Qwen3.5, 3.6 MoE", "Granite 4 hybrid"]
IDS = torch.tensor([[5, 9, 11, 6, 7, 5, 9, 8, 10, 5, 6, 9]])


def model_of(name: str) -> torch.nn.Module:
    """Its routers choose at random; Transformers leaves some at zero."""
    model = tiny_mixture(24) if name == "Qwen3-MoE" else family_model(name)
    torch.manual_seed(1)
    for layer in mixed(model).values():
        router = next(getattr(layer, name) for name in ("gate", "router") if hasattr(layer, name))
        for parameter in router.parameters():
            torch.nn.init.normal_(parameter)
    return model.eval()


def labelled(model: torch.nn.Module, seed: int) -> tuple[list[RolloutTree], list[Credit]]:
    draw = random.Random(seed)
    trees, rewards = scored_trees(draw)
    trees = [routed_at_random(model, sampled_near(model, tree, draw, 0.3)) for tree in trees]
    rule = LOSS.estimator(CreditConfig())
    return trees, [rule(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]


def without(batches: list[PackedBatch]) -> list[PackedBatch]:
    return [dataclasses.replace(batch, routes_BLR=None) for batch in batches]


def logits(model: torch.nn.Module, told: np.ndarray | None) -> torch.Tensor:
    with torch.no_grad(), replayed(None if told is None else to_replay(model, told)):
        return model(input_ids=IDS, use_cache=False).logits


def own_choice(model: torch.nn.Module) -> np.ndarray:
    """[tokens, layers, experts of a token]"""
    with chosen(model) as found:
        logits(model, None)
    return by_token(model, found).astype(int)


@pytest.mark.parametrize("name", ["Qwen3-MoE", *FAMILIES])
def test_its_own_choice_replayed_changes_no_bit(name: str) -> None:
    model = model_of(name)
    own = own_choice(model)
    plain = logits(model, None)
    assert torch.equal(logits(model, own), plain)
    assert torch.equal(logits(model, np.full_like(own, -1)), plain), "unknown is the model's own, not expert 0"


@pytest.mark.parametrize("name", ["Qwen3-MoE", *FAMILIES])
def test_the_experts_are_those_that_are_replayed(name: str) -> None:
    model = model_of(name)
    _, _, experts = mixture_of(model)
    other = (own_choice(model) + 1) % experts
    with chosen(model) as found:
        changed = logits(model, other)
    for number in found:
        assert torch.equal(torch.cat(found[number]), torch.tensor(other[:, number]))
    assert not torch.allclose(changed, logits(model, None), atol=1e-3)


@pytest.mark.parametrize("normed", [False, True])
def test_other_routes_are_a_forward_pass_written_out_with_those_experts(normed: bool) -> None:
    model = tiny_mixture(24)
    for layer in mixed(model).values():
        layer.gate.norm_topk_prob = normed  # whether the experts of a token weigh one together
    other = (own_choice(model) + np.array([1, 2])) % 4

    def by_hand(layer: torch.nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(states)
        weights = torch.softmax(states @ layer.gate.weight.T, -1)  # of all experts
        for token in range(states.shape[1]):
            two = other[token, number].tolist()
            for expert in two:
                up = layer.experts.gate_up_proj[expert] @ states[0, token]
                gate, up = up.chunk(2)
                made = layer.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                out[0, token] += weights[0, token, expert] / (weights[0, token, two].sum() if normed else 1) * made
        return out

    def graded(routes: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        with replayed(None if routes is None else to_replay(model, routes)):
            found = model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)[0, :, 3]
        found.sum().backward()
        return found.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    found = graded(other)
    for number, layer in mixed(model).items():
        layer.forward = functools.partial(by_hand, layer, number)
    wanted = graded(None)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert relative_error(found[1], wanted[1]) < 1e-5


@pytest.mark.parametrize(("name", "max_tokens"), [("Qwen3-MoE", 4096), ("Qwen3-MoE", 40), ("gpt-oss", 40)])
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_and_flat_replay_the_same(name: str, max_tokens: int, seed: int) -> None:
    model = model_of(name)
    trees, credits = labelled(model, seed)
    flat = pack(trees, credits, max_tokens=4096, shared=False)
    packed = pack(trees, credits, max_tokens=max_tokens)
    wanted = library_gradient(model, None, flat, LOSS)
    unlike = library_gradient(model, None, without(flat), LOSS)
    set_carried(model, name == "gpt-oss")
    found = library_gradient(model, None, packed, LOSS)
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert relative_error(found[1], wanted[1]) < 1e-5 < 0.05 < relative_error(unlike[1], wanted[1])
    replayed_tokens = sum(batch.stats.replayed_tokens for batch in packed)
    assert 0 < replayed_tokens < sum(batch.stats.unique_tokens for batch in packed)


def test_layers_that_the_backward_pass_computes_again_replay_too() -> None:
    model = tiny_mixture(24)
    batches = pack(*labelled(model, 3), max_tokens=4096)
    wanted = library_gradient(model, None, batches, LOSS)
    set_checkpointing(model)
    found = library_gradient(model, None, batches, LOSS)
    assert relative_error(found[1], wanted[1]) < 1e-6
    assert relative_error(library_gradient(model, None, without(batches), LOSS)[1], wanted[1]) > 0.05


def test_what_is_sampled_after_an_update_is_routed_by_the_model() -> None:
    model = tiny_mixture(24)
    plain = logits(model, None)
    library_gradient(model, None, pack(*labelled(model, 0), max_tokens=4096), LOSS)
    assert torch.equal(logits(model, None), plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_replays_too_also_one_that_another_rank_was_sent(copied: Callable[[Any], Any]) -> None:
    model = tiny_mixture(24)
    other = (own_choice(model) + 1) % 4
    changed = logits(model, other)
    assert torch.equal(logits(copied(model), other), changed)
    assert torch.equal(logits(copied(model), None), logits(model, None))


def test_a_family_that_chooses_in_another_way_and_routes_of_another_model_are_refused() -> None:
    from transformers import AutoModelForCausalLM, PhimoeConfig

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_local_experts": 4}
    config = PhimoeConfig(vocab_size=24, num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InputError, match="cannot be replayed"):
        logits(model, np.zeros((IDS.shape[1], 1, 2), int))
    logits(model, None)  # nothing of it is left behind
    with pytest.raises(InputError, match="another model"):
        routes_of(model, torch.zeros(1, 4, 6, dtype=torch.uint8))
    trees, credits = labelled(tiny_mixture(24), 0)
    with pytest.raises(InputError, match="another model"):
        slot_scores(model, pack(trees, credits, max_tokens=4096)[0])
