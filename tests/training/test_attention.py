"""Every layout shows each slot its own path and nothing else, and costs no more than it must."""

from __future__ import annotations

import json
import random

import pytest
import torch
from random_trees import add_completion, sampled_near, scored_trees

from tiny_models import tiny_model
from turntree.advantages.credit import soft_credit
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import NodeKind, RolloutTree
from turntree.training import attention
from turntree.training.attention import decoder_inputs, layouts, set_tree_attention, tree_block_mask
from turntree.training.forward import policy_logprobs
from turntree.training.isolation import check_path_isolation
from turntree.training.packing import PackedBatch, pack


def some_batches(model, seed: int, max_tokens: int) -> list[PackedBatch]:
    draw = random.Random(seed)
    shapes, rewards = scored_trees(draw)
    trees = [sampled_near(model, tree, draw, spread=0.0) for tree in shapes]
    return pack(trees, [soft_credit(t, r) for t, r in zip(trees, rewards, strict=True)], max_tokens=max_tokens)


def fork(prompt: int, actions: int, length: int) -> PackedBatch:
    """One state of `prompt` tokens with `actions` different answers."""
    tree = RolloutTree("fork")
    root = tree.add(None, NodeKind.PROMPT, tuple(k % 20 for k in range(prompt))).id
    leaves = [add_completion(tree, root, tuple((i + 1) * (k + 1) % 23 for k in range(length))) for i in range(actions)]
    credit = Credit({leaf: NodeCredit(1.0, 0.0, 1.0) for leaf in leaves}, actions * length, actions, False)
    (batch,) = pack([tree], [credit], max_tokens=prompt + actions * length)
    return batch


def tree_model(**changes) -> torch.nn.Module:
    model = tiny_model("qwen3", 24, hidden_size=32, **changes)
    set_tree_attention(model)
    return model


def visible(blocks, batch: PackedBatch) -> torch.Tensor:
    """The mask that a partition into blocks amounts to, [B, L, L]."""
    rows, length = batch.last_BL.shape
    seen = torch.zeros(rows, length, length, dtype=torch.bool)
    for row, found in enumerate(blocks):
        assert [slot for block in found for slot in range(block.start, block.end)] == list(range(length))
        for block in found:
            keys = torch.cat([torch.arange(a, b) for a, b in block.keys])
            queries = torch.arange(block.start, block.end)
            assert block.mask_QK is not None or block.keys == ((block.start, block.end),)
            mask = (keys <= queries[:, None]) if block.mask_QK is None else block.mask_QK == 0
            seen[row, queries[:, None], keys] = mask
    return seen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("call", [0, 40, 4096])
def test_blocks_show_what_the_mask_shows(monkeypatch, seed: int, call: int) -> None:
    monkeypatch.setattr(attention, "_CALL", call)
    monkeypatch.setattr(attention, "_PER_SLOT", 0)
    model = tree_model()
    for batch in some_batches(model, seed, max_tokens=70):
        finest = decoder_inputs(model, batch, "blocks")["tree_blocks"]
        assert torch.equal(visible(finest, batch), batch.attention_mask()[:, 0])
        merged = decoder_inputs(model, batch).get("tree_blocks")
        assert merged is not None or call
        if merged is not None:
            assert torch.equal(visible(merged, batch), batch.attention_mask()[:, 0])
            assert sum(map(len, merged)) <= sum(map(len, finest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_layouts_score_alike(dtype: torch.dtype) -> None:
    model = tree_model(dtype=dtype)
    for batch in some_batches(model, seed=1, max_tokens=70):
        dense, blocks = (policy_logprobs(model, batch, layout=layout) for layout in ("dense", "blocks"))
        assert torch.allclose(dense, blocks, rtol=0, atol=1e-5)


def test_a_long_prompt_goes_by_blocks_and_a_short_one_by_the_mask() -> None:
    model = tree_model()
    (row,) = decoder_inputs(model, fork(prompt=512, actions=4, length=16))["tree_blocks"]
    assert (row[0].start, row[0].end, row[0].mask_QK) == (0, 528, None)  # the first answer goes on causally
    assert "tree_blocks" not in decoder_inputs(model, fork(prompt=10, actions=4, length=2))


def test_siblings_are_apart_where_they_are_long_and_together_where_they_are_short() -> None:
    model = tree_model()
    (long,) = decoder_inputs(model, fork(prompt=512, actions=3, length=200))["tree_blocks"]
    assert [(block.start, block.end, block.keys) for block in long] == [
        (0, 712, ((0, 712),)),
        (712, 912, ((0, 512), (712, 912))),
        (912, 1112, ((0, 512), (912, 1112))),
    ]
    (short,) = decoder_inputs(model, fork(prompt=512, actions=3, length=8))["tree_blocks"]
    assert [(block.start, block.end) for block in short] == [(0, 520), (520, 536)]


def test_a_model_with_tree_attention_reads_plain_rows_as_before() -> None:
    stock, tree = tiny_model("llama", 24), tiny_model("llama", 24)
    set_tree_attention(tree)
    ids = torch.tensor([[3, 4, 5, 6, 7], [0, 0, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    for kwargs in ({}, {"attention_mask": mask}, {"position_ids": torch.tensor([[0, 1, 0, 1, 2]] * 2)}):
        assert torch.equal(stock(input_ids=ids, **kwargs).logits, tree(input_ids=ids, **kwargs).logits)


def test_a_saved_policy_does_not_carry_the_attention_of_its_training(tmp_path) -> None:
    tree_model().save_pretrained(tmp_path)
    assert "turntree" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_the_self_check_covers_every_layout_the_model_may_take() -> None:
    assert layouts(tiny_model()) == ("dense",) and layouts(tree_model()) == ("dense", "blocks")
    report = check_path_isolation(tree_model())
    assert report.logprob_error < 1e-4 and report.gradient_error < 1e-3


@pytest.mark.parametrize(("layout", "broken"), [("dense", "attention_mask"), ("blocks", "tree_blocks")])
def test_a_decoder_that_drops_what_carries_the_tree_is_refused(layout: str, broken: str) -> None:
    model = tree_model()
    decoder = model.get_decoder()
    forward = decoder.forward

    def forgetful(*args, **kwargs):
        if ("tree_blocks" in kwargs) == (layout == "blocks"):
            kwargs.pop(broken, None)
        return forward(*args, **kwargs)

    decoder.forward = forgetful
    with pytest.raises(InputError, match=rf"cannot be packed: on a random tree \({layout} attention\)"):
        check_path_isolation(model)


def test_a_wrong_gradient_is_refused_even_where_the_scores_are_right() -> None:
    model = tree_model()
    layer = model.get_decoder().layers[0]
    forward = layer.forward

    def half_blind(hidden, *args, **kwargs):
        return forward(hidden.detach() if kwargs.get("tree_blocks") else hidden, *args, **kwargs)

    layer.forward = half_blind
    with pytest.raises(InputError, match=r"\(blocks attention\) its log-probabilities are off by \d.*its gradient by"):
        check_path_isolation(model)


def test_flex_attention_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"field 'attention': 'flex_attention' has no backward pass off CUDA"):
        set_tree_attention(tiny_model(), "flex_attention")


@pytest.mark.parametrize("seed", range(3))
def test_the_block_mask_of_flex_attention_is_the_tree_mask(seed: int) -> None:
    from torch.nn.attention.flex_attention import create_mask

    for batch in some_batches(tiny_model("qwen3", 24, hidden_size=32), seed, max_tokens=70):
        rows, length = batch.last_BL.shape
        block_mask = tree_block_mask(batch)
        assert torch.equal(create_mask(block_mask.mask_mod, rows, None, length, length, "cpu"), batch.attention_mask())


def test_the_block_mask_leaves_out_what_siblings_cannot_see() -> None:
    """16 answers of 128 tokens on 1024: of 24 x 24 tiles 36 + 16 x 9 hold a visible pair."""
    tiles = tree_block_mask(fork(prompt=1024, actions=16, length=128)).to_dense()
    assert int(tiles.sum()) == 36 + 16 * 9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has no backward pass on CPU")
def test_flex_attention_passes_the_self_check_on_cuda() -> None:
    model = tiny_model("qwen3", 24, hidden_size=64).cuda()
    set_tree_attention(model, "flex_attention")
    assert layouts(model) == ("flex",)
    assert check_path_isolation(model, path_tokens=300).gradient_error < 1e-3
