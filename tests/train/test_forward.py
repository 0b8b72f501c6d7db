"""Scores of slots, and the models that must be refused."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import sampled_near, scored_trees

from tiny_models import tiny_model
from turntree.core.errors import InputError
from turntree.credit.credit import CreditRule
from turntree.engine.teacher import ServedPolicy
from turntree.pack.head import head_logits, token_scores
from turntree.pack.packing import pack, pack_ranks
from turntree.pack.slots import trained_paths
from turntree.train import forward, isolation
from turntree.train.forward import slot_scores, with_old_logprobs, with_reference_logprobs, with_served_logprobs
from turntree.train.isolation import check_path_isolation

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}


def stock(name: str, **changes) -> transformers.PreTrainedModel:
    """A tiny random model of a stock class."""
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def some_trees(model, seed: int = 0):
    draw = random.Random(seed)
    shapes, rewards = scored_trees(draw)
    trees = [sampled_near(model, tree, draw, spread=0.0) for tree in shapes]
    return trees, [CreditRule()(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]


def some_batches(model, seed: int = 0, max_tokens: int = 70, **options):
    return pack(*some_trees(model, seed), max_tokens=max_tokens, **options)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_scores_are_those_of_the_tempered_distribution(temperature: float) -> None:
    model = tiny_model("qwen3", 24, hidden_size=32)
    for batch in some_batches(model, shared=False):
        found = slot_scores(model, batch, temperature=temperature)
        logits_SV = model(input_ids=batch.tokens_BL).logits.flatten(0, 1)[batch.predecessor_S]
        expected = torch.distributions.Categorical(logits=logits_SV / temperature)
        assert torch.allclose(found.logprobs_S, expected.log_prob(batch.target_S), atol=1e-5)
        assert torch.allclose(found.entropies_S, expected.entropy(), atol=1e-5)
        assert not found.entropies_S.requires_grad


def test_the_head_in_chunks_gives_the_same_scores_and_gradient(monkeypatch) -> None:
    model = tiny_model("llama", 24, hidden_size=32, dtype=torch.float64)
    batch = some_batches(model)[0]

    def scores_and_gradient():
        model.zero_grad()
        scores = slot_scores(model, batch)
        scores.logprobs_S.square().sum().backward()
        return scores, torch.cat([p.grad.flatten() for p in model.parameters()])

    whole, gradient = scores_and_gradient()
    monkeypatch.setattr(forward, "CHUNK_LOGITS", 24 * 3)
    chunked, again = scores_and_gradient()
    assert torch.allclose(chunked.logprobs_S, whole.logprobs_S, rtol=1e-12)
    assert torch.allclose(chunked.entropies_S, whole.entropies_S, rtol=1e-12)
    assert torch.allclose(again, gradient, rtol=1e-9, atol=1e-12)


def test_old_logprobs_are_recomputed_per_slot_and_sampling_ones_kept() -> None:
    sampler, trainer = tiny_model("qwen3", 24, hidden_size=32), tiny_model("qwen3", 24, hidden_size=32, seed=1)
    batches = some_batches(sampler)
    for before, after in zip(batches, with_old_logprobs(trainer, batches), strict=True):
        assert torch.equal(after.sampling_logprobs_T, before.sampling_logprobs_T)
        assert torch.equal(after.old_logprobs_T, slot_scores(trainer, before).logprobs_S.detach()[before.slot_T])
        assert not after.old_logprobs_T.requires_grad


def test_reference_logprobs_are_attached_once() -> None:
    model, reference = tiny_model("qwen3", 24, hidden_size=32), tiny_model("qwen3", 24, hidden_size=32, seed=1)
    batches = some_batches(model)
    for batch in with_reference_logprobs(reference, batches, temperature=0.7):
        expected = slot_scores(reference, batch, temperature=0.7).logprobs_S
        assert torch.equal(batch.reference_logprobs_S, expected.detach())
        assert not batch.reference_logprobs_S.requires_grad


class ByPath(ServedPolicy):
    """A policy that scores whole sequences, as one behind a server does."""

    def logprobs(self, paths):
        model = tiny_model("qwen3", 24, hidden_size=32, seed=1)
        rows = [(torch.tensor([path]), torch.tensor(path[1:])) for path in paths]
        scores = [(model(row).logits[0, :-1].log_softmax(-1), after) for row, after in rows]
        return [found.gather(1, after[:, None])[:, 0].tolist() for found, after in scores]


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([40, 70, 400]), st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_a_reference_that_scores_paths_gives_what_one_that_scores_slots_does(seed, shared, max_tokens, ranks) -> None:
    """Of whole trees, of several in a row, of trees that are cut, and of batches that only fill up a rank's passes."""
    model, reference = tiny_model("qwen3", 24, hidden_size=32), tiny_model("qwen3", 24, hidden_size=32, seed=1)
    trees, credits = some_trees(model, seed)
    dealt = pack_ranks(trees, credits, ranks, max_tokens=max_tokens, shared=shared)
    taught, sent = with_served_logprobs(ByPath("http://teacher", "policy"), dealt, trees, credits)
    rollouts = [path for pair in zip(trees, credits, strict=True) for path in trained_paths(*pair)]
    paths = {tuple(token for node in path for token in node.token_ids) for path in rollouts}
    assert sent == sum(map(len, paths))  # no path is sent twice
    for batch in itertools.chain(*taught):
        expected = slot_scores(reference, batch).logprobs_S.detach() * bool(batch.stats.unique_tokens)
        assert torch.allclose(batch.reference_logprobs_S.to(expected), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["Qwen3", "Llama", "Qwen2", "Mistral", "Granite", "Cohere", "Phi3", "Olmo2"])
def test_full_attention_decoders_pass_the_isolation_check(name: str) -> None:
    changes = {"sliding_window": None} if name in ("Mistral", "Phi3") else {}
    changes |= {"Granite": {"logits_scaling": 3.0}, "Cohere": {"logit_scale": 0.2}}.get(name, {})
    report = check_path_isolation(stock(name, **changes))
    assert report[0] < 1e-4 and report[1] < 1e-3


def test_a_sliding_window_shorter_than_the_path_is_refused_with_the_measured_error() -> None:
    model = stock("Mistral", sliding_window=8)
    with pytest.raises(InputError, match=r"MistralForCausalLM cannot be packed: .* off by [\d.e-]+ nats"):
        check_path_isolation(model)


def sharp(name: str, scale: float, **changes: object) -> transformers.PreTrainedModel:
    """In bfloat16, with logits as large as training makes them."""
    model = stock(name, **changes)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    return model.bfloat16()


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_in_half_precision_rounding_may_grow_with_the_logits_and_a_broken_mask_is_still_seen(scale: float) -> None:
    assert check_path_isolation(sharp("Llama", scale))[0] < 0.05 * scale + 0.1  # steps of the largest logits
    with pytest.raises(InputError, match="cannot be packed"):
        check_path_isolation(sharp("Mistral", scale, sliding_window=8))


def test_rounding_above_the_tolerance_is_told_from_a_broken_mask_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some policies round so badly in bfloat16 that 3% of their largest log-probability do not cover it."""
    monkeypatch.setattr(isolation, "_ROUNDING", {torch.bfloat16: 0.0})

    def tolerate(*bounds: float) -> None:
        monkeypatch.setitem(isolation.TOLERANCES, torch.bfloat16, bounds)

    rounds, broken = sharp("Llama", 1.0), sharp("Mistral", 1.0, sliding_window=8)
    before = {name: one.clone() for name, one in rounds.state_dict().items()}
    tolerate(1e9, 1e9)
    off, far = check_path_isolation(rounds), check_path_isolation(broken)
    tolerate(*(0.6 * one for one in off))
    assert check_path_isolation(rounds) == off
    assert all(one.dtype == before[name].dtype and one.equal(before[name]) for name, one in rounds.state_dict().items())
    tolerate(*(0.4 * one for one in off))
    with pytest.raises(InputError, match="cannot be packed"):
        check_path_isolation(rounds)
    tolerate(*(0.6 * one for one in far))  # as near in bfloat16, and not exact in float32
    with pytest.raises(InputError, match="cannot be packed"):
        check_path_isolation(broken)


def test_a_tree_that_the_layers_would_not_see_is_refused_where_it_is_scored_and_a_row_per_rollout_is_not() -> None:
    """As it would be by a caller who forgot that this model shares no prefixes."""
    model = stock("Mistral", sliding_window=4)
    with pytest.raises(InputError, match="attends to the last 4 tokens only"):
        slot_scores(model, some_batches(model)[0])
    assert slot_scores(model, some_batches(model, max_tokens=200, shared=False)[0]).logprobs_S.isfinite().all()


def test_a_sliding_window_longer_than_the_path_is_harmless() -> None:
    assert check_path_isolation(stock("Mistral", sliding_window=64), path_tokens=48)[0] < 1e-4


def test_dropout_is_refused() -> None:
    model = stock("Llama", attention_dropout=0.1).train()
    with pytest.raises(InputError, match="cannot be packed"):
        check_path_isolation(model)


def test_an_unknown_head_scaling_is_refused(monkeypatch) -> None:
    model = stock("Granite", logits_scaling=3.0)
    monkeypatch.setattr(forward, "head_logits", lambda model, hidden: model.get_output_embeddings()(hidden))
    with pytest.raises(InputError, match="cannot be packed"):
        check_path_isolation(model)


def test_eager_attention_is_refused_because_it_misreads_boolean_masks() -> None:
    model = stock("Qwen3", attn_implementation="eager")
    with pytest.raises(InputError, match="'attn_implementation': attention backend 'eager' does not read the boolean"):
        slot_scores(model, some_batches(model)[0])


def test_the_check_leaves_gradients_and_weights_alone() -> None:
    model = stock("Qwen3")
    before = [p.detach().clone() for p in model.parameters()]
    check_path_isolation(model)
    assert all(p.grad is None and torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_the_gradient_of_token_scores_is_the_one_of_log_softmax() -> None:
    logits = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    logits.requires_grad_()
    row, target = torch.tensor([0, 0, 0, 2, 4, 4]), torch.tensor([1, 7, 7, 3, 0, 10])
    weight = torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0, 3.0], dtype=torch.float64)
    for temperature in (1.0, 0.6):
        full = torch.log_softmax(logits / temperature, -1)
        (expected,) = torch.autograd.grad((weight * full[row, target]).sum(), logits)
        logprobs, entropies = token_scores(logits, row, target, temperature)
        (found,) = torch.autograd.grad((weight * logprobs).sum(), logits)
        assert torch.allclose(logprobs, full[row, target]) and torch.allclose(found, expected)
        assert torch.allclose(entropies, torch.distributions.Categorical(logits=full).entropy()[row])
        assert not entropies.requires_grad


def test_token_scores_refuse_a_second_backward_pass_instead_of_answering_wrong() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    logprobs, _ = token_scores(logits, torch.tensor([0]), torch.tensor([1]), 1.0)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_bfloat16_logits_are_scored_in_single_precision() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    row, target = torch.tensor([0, 1, 2]), torch.tensor([4, 5, 6])
    logprobs, entropies = token_scores(logits, row, target, 1.0)
    expected = torch.log_softmax(logits.detach().float(), -1)[row, target]
    assert logprobs.dtype == entropies.dtype == torch.float32 and torch.allclose(logprobs, expected, atol=1e-6)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_first_tokens_of_a_fork_go_through_the_head_once(monkeypatch) -> None:
    model = tiny_model("qwen3", 24, hidden_size=32)
    rows = []
    monkeypatch.setattr(forward, "head_logits", lambda m, hidden: rows.append(len(hidden)) or head_logits(m, hidden))
    batch = some_batches(model)[0]
    slot_scores(model, batch)
    assert rows == [len(set(batch.predecessor_S.tolist()))] and rows[0] < len(batch.predecessor_S)
