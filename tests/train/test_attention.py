"""Every layout shows each slot its own path and nothing else, and costs no more than it must."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import add_completion, sampled_near, scored_trees
from torch._dynamo import config as dynamo
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import StableLmConfig, StableLmForCausalLM
from transformers.integrations.flex_attention import WrappedFlexAttention

from tiny_models import tiny_model
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import NodeKind, RolloutTree
from turntree.credit.credit import CreditRule
from turntree.pack import attention
from turntree.pack.attention import BLOCK, decoder_inputs, layouts, set_tree_attention, tree_block_mask
from turntree.pack.packing import PackedBatch, pack
from turntree.train.forward import slot_scores
from turntree.train.isolation import check_path_isolation


def some_batches(model, seed: int, max_tokens: int) -> list[PackedBatch]:
    draw = random.Random(seed)
    shapes, rewards = scored_trees(draw)
    trees = [sampled_near(model, tree, draw, spread=0.0) for tree in shapes]
    return pack(trees, [CreditRule()(t, r) for t, r in zip(trees, rewards, strict=True)], max_tokens=max_tokens)


def fork(prompt: int, actions: int, length: int, *, trees: int = 1) -> PackedBatch:
    """States of `prompt` tokens with `actions` different answers each."""
    made = []
    for number in range(trees):
        tree = RolloutTree("fork")
        root = tree.add(None, NodeKind.PROMPT, tuple((number + k) % 20 for k in range(prompt))).id
        said = [tuple((i + 1) * (k + 1) % 23 for k in range(length)) for i in range(actions)]
        leaves = [add_completion(tree, root, words) for words in said]
        credit = Credit({leaf: NodeCredit(1.0, 0.0, 1.0) for leaf in leaves}, actions * length, actions, False)
        made.append((tree, credit))
    (batch,) = pack(*zip(*made, strict=True), max_tokens=trees * (prompt + actions * length))
    return batch


def tree_model(**changes) -> torch.nn.Module:
    model = tiny_model("qwen3", 24, hidden_size=32, **changes)
    set_tree_attention(model)
    return model


def visible(rows, batch: PackedBatch) -> torch.Tensor:
    """How often each query's score with each key is computed, [B, L, L]."""
    length = batch.last_BL.shape[1]
    seen = torch.zeros(len(rows), length, length, dtype=torch.long)
    for row, found in enumerate(rows):
        own = [piece.is_own for piece in found]
        assert own == sorted(own, reverse=True), "rectangles are added to what a slot's own piece gave"
        assert sorted(s for p in found if p.is_own for s in range(p.start, p.end)) == list(range(length))
        for piece in found:
            queries, keys = torch.arange(piece.start, piece.end)[:, None], torch.arange(piece.first, piece.after)
            shown = keys <= queries if piece.mask_QK is None else piece.mask_QK == 0
            seen[row, queries, keys] += shown
    return seen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("call", [0, 40, 4096])
def test_pieces_show_what_the_mask_shows_and_no_pair_twice(monkeypatch, seed: int, call: int) -> None:
    monkeypatch.setattr(attention, "CALL", call)
    monkeypatch.setattr(attention, "ADD", 0)
    model = tree_model()
    for batch in some_batches(model, seed, max_tokens=70):
        finest = decoder_inputs(model, batch, "pieces")["tree_pieces"]
        assert torch.equal(visible(finest, batch), batch.attention_mask()[:, 0].long())
        cheapest = decoder_inputs(model, batch).get("tree_pieces")
        assert cheapest is not None or call
        if cheapest is not None:
            assert torch.equal(visible(cheapest, batch), batch.attention_mask()[:, 0].long())
            assert sum(map(len, cheapest)) <= sum(map(len, finest))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.sampled_from([0, 8, 4096]))
def test_every_row_of_subtrees_is_covered(parents: list[int], call: int) -> None:
    """Slot k hangs `parents[k]` steps above slot k - 1 on its path; above the root, it begins a tree of its own."""
    path: list[int] = []
    last = [0] * len(parents)
    for slot, up in enumerate(parents):
        for done in path[max(0, len(path) - up) :]:
            last[done] = slot
        path = [*path[: max(0, len(path) - up)], slot]
    for slot in path:
        last[slot] = len(parents)
    _, planned = attention.plan(last, call)
    last_L = torch.tensor(last)
    batch_mask = (torch.arange(len(last)) <= torch.arange(len(last))[:, None]) & (
        torch.arange(len(last))[:, None] < last_L
    )
    seen = torch.zeros(len(last), len(last), dtype=torch.long)
    for piece in attention.pieces(last_L, planned, torch.float32):
        queries, keys = torch.arange(piece.start, piece.end)[:, None], torch.arange(piece.first, piece.after)
        seen[queries, keys] += (keys <= queries) if piece.mask_QK is None else piece.mask_QK == 0
    assert torch.equal(seen, batch_mask.long())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pieces_have_the_values_and_gradients_of_the_mask(dtype: torch.dtype) -> None:
    """In float64 to rounding, for heads that share keys and for several rows."""
    batch = fork(prompt=70, actions=5, length=40)
    last_BL = batch.last_BL.repeat(2, 1)
    last_BL[1] = last_BL.shape[1]  # a chain
    mask = (torch.arange(last_BL.shape[1]) <= torch.arange(last_BL.shape[1])[:, None]) & (
        torch.arange(last_BL.shape[1])[:, None] < last_BL[:, None, None, :]
    )
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, n, last_BL.shape[1], 8, generator=generator, dtype=dtype) for n in (4, 2, 2, 4)]
    rows = tuple(attention.pieces(one, attention.plan(one.tolist(), 100)[1], dtype) for one in last_BL)
    assert [sum(piece.mask_QK is not None for piece in row) for row in rows] == [0, 0] and len(rows[0]) == 7

    def gradients(attend) -> list[torch.Tensor]:
        query, key, value = (tensor.clone().requires_grad_() for tensor in inputs[:3])
        found = attend(query, key, value)
        found.backward(inputs[3])
        return [found.detach(), *(tensor.grad for tensor in (query, key, value))]

    ours = gradients(lambda q, k, v: attention.PieceAttention.apply(q, k, v, rows, None))
    theirs = gradients(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
    )
    within = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype and float((one - other).abs().max()) <= within * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_layouts_score_alike(dtype: torch.dtype) -> None:
    model = tree_model(dtype=dtype)
    for batch in some_batches(model, seed=1, max_tokens=70):
        dense, apart = (slot_scores(model, batch, layout=layout).logprobs_S for layout in ("dense", "pieces"))
        assert torch.allclose(dense, apart, rtol=0, atol=1e-5)


def test_a_long_prompt_goes_by_pieces_and_a_short_one_by_the_mask() -> None:
    model = tree_model()
    assert "tree_pieces" in decoder_inputs(model, fork(prompt=512, actions=4, length=16))
    assert "tree_pieces" not in decoder_inputs(model, fork(prompt=10, actions=4, length=2))


def slots(row) -> list[tuple[int, int, int, int, bool]]:
    return [(piece.start, piece.end, piece.first, piece.after, piece.mask_QK is not None) for piece in row]


def test_siblings_are_apart_where_they_are_long_and_together_where_they_are_short() -> None:
    model = tree_model()
    (long,) = decoder_inputs(model, fork(prompt=512, actions=2, length=200))["tree_pieces"]
    triangles = [(0, 512, 0, 512, False), (512, 712, 512, 712, False), (712, 912, 712, 912, False)]
    assert slots(long) == [*triangles, (512, 912, 0, 512, False)]
    (short,) = decoder_inputs(model, fork(prompt=512, actions=3, length=8))["tree_pieces"]
    assert slots(short) == [(0, 512, 0, 512, False), (512, 536, 512, 536, True), (512, 536, 0, 512, False)]


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
    assert layouts(tiny_model()) == ("dense",) and layouts(tree_model()) == ("dense", "pieces")
    report = check_path_isolation(tree_model())
    assert report[0] < 1e-4 and report[1] < 1e-3


@pytest.mark.parametrize(("layout", "broken"), [("dense", "attention_mask"), ("pieces", "tree_pieces")])
def test_a_decoder_that_drops_what_carries_the_tree_is_refused(layout: str, broken: str) -> None:
    model = tree_model()
    decoder = model.get_decoder()
    forward = decoder.forward

    def forgetful(*args, **kwargs):
        if ("tree_pieces" in kwargs) == (layout == "pieces"):
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
        return forward(hidden.detach() if kwargs.get("tree_pieces") else hidden, *args, **kwargs)

    layer.forward = half_blind
    with pytest.raises(InputError, match=r"\(pieces attention\) its log-probabilities are off by \d.*its gradient by"):
        check_path_isolation(model)


def test_a_decoder_that_passes_no_keywords_on_reads_trees_by_the_mask() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = StableLmForCausalLM(StableLmConfig(vocab_size=64, num_key_value_heads=1, **shape)).eval()
    set_tree_attention(model)
    assert layouts(model) == ("dense",)
    check_path_isolation(model)
    usual = tiny_model()
    set_tree_attention(usual)
    assert layouts(usual) == ("dense", "pieces")


def test_flex_attention_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"field 'attention': 'flex_attention' has no backward pass off CUDA"):
        set_tree_attention(tiny_model(), "flex_attention")


@pytest.mark.parametrize("seed", range(3))
def test_the_block_mask_of_flex_attention_is_the_tree_mask(seed: int) -> None:
    for batch in some_batches(tiny_model("qwen3", 24, hidden_size=32), seed, max_tokens=70):
        rows, length = batch.last_BL.shape
        block_mask = tree_block_mask(batch)
        assert torch.equal(create_mask(block_mask.mask_mod, rows, None, length, length, "cpu"), batch.attention_mask())


@pytest.mark.parametrize("lengths", [(3, 2, 5), (128, 3, 128), (300, 4, 90), (500, 2, 256)])
def test_the_blocks_are_those_of_the_whole_mask_without_making_it(lengths: tuple[int, int, int]) -> None:
    """A whole mask of 65,536 slots took 40 GB; here no tensor is as large as a row of it."""
    batch = fork(*lengths)
    rows, slots = batch.last_BL.shape
    with Largest() as largest:
        ours = tree_block_mask(batch)
    assert largest.numbers <= max(slots + BLOCK, 4 * (slots // BLOCK + 2) ** 2)
    theirs = create_block_mask(ours.mask_mod, rows, None, slots, slots, "cpu")
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("layout", ["dense", "flex"])
def test_what_the_decoder_is_given_is_made_without_waiting_for_the_device(monkeypatch, layout: str) -> None:
    batch, model = fork(300, 4, 90), tiny_model("qwen3", 24, hidden_size=32)
    assert batch.longest == int(batch.positions_BL.max()) + 1 == 390
    monkeypatch.setattr(attention, "layouts", lambda model: (layout,))
    with Largest() as seen:
        decoder_inputs(model, batch)
    assert seen.numbers and not seen.read


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that was made, and how many numbers were read from one."""

    numbers = read = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        self.read += func is torch.ops.aten._local_scalar_dense.default
        sizes = [each.numel() for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return found


def test_on_a_gpu_without_flex_attention_every_mask_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3", 24)
    assert layouts(model) == ("dense",), "stock attention"
    set_tree_attention(model)
    assert layouts(model) != ("dense",)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert layouts(model) == ("dense",)
    set_tree_attention(model, "flex_attention")
    assert layouts(model) != ("dense",)


@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor")
def test_batches_of_any_shape_are_compiled_and_never_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch compiles a function eight times and then runs it as it is. Here the compiler keeps the graph, and the
    check that there is no backward pass on CPUs is left out: that pass is written in Python, too."""
    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, expected = (tiny_model("qwen3", 24, hidden_size=32) for _ in range(2))
    monkeypatch.setattr(dynamo, "recompile_limit", 8)
    monkeypatch.setattr(dynamo, "fail_on_recompile_limit_hit", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    compiled = staticmethod(torch.compile(flex_attention.flex_attention, backend=kept))
    for name, value in {"_compiled_flex_attention": compiled, "_is_flex_compiled": True, "training": False}.items():
        monkeypatch.setattr(WrappedFlexAttention, name, value, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "device", torch.device("cuda"))
        set_tree_attention(model, "flex_attention")
    check_path_isolation(model)
    for rows, shape in ((1, (200, 3, 20)), (3, (200, 2, 20)), (2, (50, 2, 2)), (1, (50, 5, 2))):
        batch = fork(*shape, trees=rows)
        with torch.no_grad():
            slot_scores(model, batch)
        found, wanted = slot_scores(model, batch).logprobs_S, slot_scores(expected, batch).logprobs_S
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        for one in (found, wanted):
            one.sum().backward()
    assert len(graphs) > 8
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_the_block_mask_leaves_out_what_siblings_cannot_see() -> None:
    """16 answers of 128 tokens on 1024: of 24 x 24 tiles 36 + 16 x 9 hold a visible pair."""
    tiles = tree_block_mask(fork(prompt=1024, actions=16, length=128)).to_dense()
    assert int(tiles.sum()) == 36 + 16 * 9


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has no backward pass on CPU")
def test_flex_attention_passes_the_self_check_on_cuda() -> None:
    model = tiny_model("qwen3", 24, hidden_size=64).cuda()
    set_tree_attention(model, "flex_attention")
    assert layouts(model) == ("flex",)
    assert check_path_isolation(model, path_tokens=300)[1] < 1e-3
