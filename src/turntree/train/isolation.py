"""How a model is trained: on packed trees where it can be, on a row per rollout where it cannot.

Sliding windows, chunked attention, ALiBi, length-dependent RoPE, state-space layers, attention sinks, dropout and
unknown head scalings all break the packed forward pass in their own way: branches see each other. Instead of a list of
architectures, one small random tree is scored both ways and the difference is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.progress import notice
from turntree.core.seeds import generator
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.engine.compatibility import check_positions, check_window
from turntree.engine.limits import Prefixes
from turntree.pack.attention import Layout, layouts
from turntree.pack.carried import set_carried
from turntree.pack.head import vocabulary_size
from turntree.pack.packing import PackedBatch, pack
from turntree.train.forward import slot_scores

# (log-probability in nats, relative gradient): rounding of the type with room to spare, far below a broken mask, which
# is off by nats. In half precision rounding grows with the logits: up to _ROUNDING of the largest log-probability.
# SmolLM2-135M, fine-tuned, in bfloat16 on paths of 48 to 2,048 tokens: at most 0.48 nats and 0.28 of the gradient. A
# window of nine tenths of the path is off by 6.8 and 3.5 there. After PivotRL on own states it is off by up to 1.0 and
# 0.49, in float32 by 5e-5: a model that is off by up to _ROOM times the tolerances is one whose float32 is exact
TOLERANCES = {
    torch.float64: (1e-6, 1e-5),  # stock decoders normalise in float32 whatever their type
    torch.float32: (1e-4, 1e-3),
    torch.float16: (0.05, 0.05),
    torch.bfloat16: (0.2, 0.5),
}
_ROUNDING = {torch.float16: 0.004, torch.bfloat16: 0.03}
_ROOM = 2.0
_PATH = 48  # tokens of the longest path


def shares_prefixes(model: PreTrainedModel, tokens: int, prefixes: Prefixes, *, field: str, ranks: int = 1) -> bool:
    """Whether trees are packed, or have a row per rollout because the model computes only those exactly on paths of up
    to `tokens` tokens, which `field` bounds. A model that keeps a state goes through a tree chain by chain
    (`pack.carried`), but not on several `ranks`. Says the reason. Raises `InputError` for a model that does not even
    compute padded rows exactly, or that is to be packed (`prefixes` is "shared") and cannot."""
    check_positions(model, tokens, field=field)
    if prefixes != "repeated":
        try:
            check_window(model, tokens, field=field)
            with _named(model, "packed"):
                check_path_isolation(model)
            return True
        except InputError as error:
            if prefixes == "shared":
                raise
            advice = f" ({field}: {error.hint})" if error.field == field else ""
            if not (why := _carried(model, ranks)):
                notice(f"trees go through the model chain by chain: {error.problem}{advice}")
                return True
            notice(f"a row per rollout, which computes shared prefixes again: {error.problem}{advice}; {why}")
    with _named(model, "trained in padded batches"):
        check_rows(model)
    return False


def _carried(model: PreTrainedModel, ranks: int) -> str:
    """Let trees go through the model chain by chain; where it cannot, why not."""
    if ranks > 1:
        return "its state is not carried over forks on several ranks"
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "its state is not carried over forks with device.gradient_checkpointing"
    set_carried(model, True)
    try:
        with _named(model, "carried over forks"):
            check_path_isolation(model)
    except InputError as error:
        set_carried(model, False)
        return error.problem[:160]
    return ""


@contextmanager
def _named(model: PreTrainedModel, what: str) -> Iterator[None]:
    """An error of the model's own code, which was not made for this, is the user's to know and not ours."""
    try:
        yield
    except (ValueError, IndexError, TypeError, RuntimeError, AttributeError) as error:
        problem = f"{type(model).__name__} cannot be {what} ({type(error).__name__}: {error})"
        raise InputError(problem, hint="use another decoder") from error


def check_rows(model: PreTrainedModel) -> tuple[float, float]:
    """As `check_path_isolation`, for rows of unequal length in one batch: they must not see each other or the
    padding."""
    tree, credit = _probe(model, _PATH)
    batch = pack([tree], [credit], max_tokens=5 * _PATH, shared=False)[0].to(model.device)
    return _compared(model, tree, batch, [None])


def check_path_isolation(model: PreTrainedModel, *, path_tokens: int = _PATH) -> tuple[float, float]:
    """Score a small random tree packed and as plain `model(input_ids)` rows; refuse the model if they differ.

    Every attention layout that a batch may take (`pack.attention.layouts`) is checked, with the model as it is
    set up: its mode, gradient checkpointing, adapter. `path_tokens` is the length of the longest path. A sliding window
    shows only on paths longer than it; `engine.compatibility.check_window` refuses one by its size, without a pass
    over paths as long as those that are trained. Leaves `.grad` alone. Returns the errors of log-probabilities (the
    largest, nats) and of the gradient (relative, L2) in the worst layout. Raises `InputError` with them.
    """
    tree, credit = _probe(model, path_tokens)
    batch = pack([tree], [credit], max_tokens=3 * path_tokens)[0].to(model.device)
    return _compared(model, tree, batch, layouts(model))


def _compared(
    model: PreTrainedModel, tree: RolloutTree, batch: PackedBatch, layouts: Sequence[Layout | None]
) -> tuple[float, float]:
    """The errors in the worst of these layouts. Raises `InputError` for errors above what rounding explains."""
    plain = _scores(model, _plain_logprobs(model, tree, batch))
    found = {one: _errors(_scores(model, slot_scores(model, batch, layout=one).logprobs_S), plain) for one in layouts}
    dtype = model.dtype if model.dtype in TOLERANCES else plain[0].dtype
    nats, relative = TOLERANCES[dtype]
    nats = max(nats, _ROUNDING.get(dtype, 0.0) * float(plain[0].abs().max()))
    within = all(off[0] <= nats and off[1] <= relative for off in found.values())
    if dtype in _ROUNDING and not within:
        with _in_float32(model):
            _compared(model, tree, batch, layouts)
        nats, relative = _ROOM * nats, _ROOM * relative
    for layout, off in found.items():
        if not (off[0] <= nats and off[1] <= relative):
            what = f"packed: on a random tree ({layout} attention)" if layout else "trained in padded batches:"
            told = f"its log-probabilities are off by {off[0]:.2g} nats and its gradient by {off[1]:.2g}"
            hint = "leave device.prefixes at auto, which gives every rollout a row of its own"
            hint = hint if layout else "use another decoder, and no dropout"
            raise InputError(f"{type(model).__name__} cannot be {what} {told}", hint=hint)
    return max(found.values())


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Its weights of half precision as wide as float32 meanwhile; they come back as they were."""
    half = [(one, one.data) for one in itertools.chain(model.parameters(), model.buffers()) if one.dtype in _ROUNDING]
    try:
        for one, data in half:
            one.data = data.float()
        yield
    finally:
        for one, data in half:
            one.data = data


def _probe(model: PreTrainedModel, path_tokens: int) -> tuple[RolloutTree, Credit]:
    """Two branches below a prompt, one of which forks again and again; the longest path is `path_tokens` long."""
    draw = generator(0, "path isolation")
    vocabulary = vocabulary_size(model)
    part = max(2, path_tokens // 3)
    numbers = itertools.count()

    def sampled(tree: RolloutTree, parent: int, length: int) -> int:
        # siblings begin with different tokens: else they would share slots, which plain rows do not
        ids = (next(numbers) % vocabulary, *(draw.randrange(vocabulary) for _ in range(length - 1)))
        zeros = (0.0,) * length
        return tree.add(parent, NodeKind.COMPLETION, ids, logprobs=zeros, entropies=zeros).id

    tree = RolloutTree("probe")
    root = tree.add(None, NodeKind.PROMPT, tuple(draw.randrange(vocabulary) for _ in range(part))).id
    fork = sampled(tree, root, part)
    one = sampled(tree, fork, 1)  # chains of one token, which models with a state compute by other code
    two = sampled(tree, one, 1)
    lengths = ((fork, part), (two, 2), (two, 3), (one, max(1, part // 2 - 1)), (root, part))
    for leaf in [sampled(tree, parent, length) for parent, length in lengths]:
        tree.stop(leaf, StopReason.COMPLETED)
    nodes = {node.id: NodeCredit(1.0, 0.0, 1.0) for node in tree if node.sampled}
    return tree, Credit(nodes, rollout_tokens=1.0, rollouts=5.0, zero_variance=False)


def _plain_logprobs(model: PreTrainedModel, tree: RolloutTree, batch: PackedBatch) -> Tensor:
    """The same slots from stock forward passes, one row per rollout."""
    of_node: dict[int, Tensor] = {}
    for path in map(tree.path, tree.leaves()):
        ids_L = torch.tensor([token for node in path for token in node.token_ids], device=model.device)
        logits_LV = model(input_ids=ids_L[None]).logits[0]
        wide = logits_LV.float() if logits_LV.dtype in (torch.bfloat16, torch.float16) else logits_LV
        scores_L = torch.log_softmax(wide[:-1], dim=-1).gather(1, ids_L[1:, None]).squeeze(1)
        end = 0
        for node in path:
            start, end = end, end + len(node.token_ids)
            if node.sampled:
                of_node.setdefault(node.id, scores_L[start - 1 : end - 1])
    terms_T = torch.cat([of_node[node] for node in batch.node_A.tolist()])
    plain_S = torch.zeros(len(batch.target_S), dtype=terms_T.dtype, device=terms_T.device)
    return plain_S.index_copy(0, batch.slot_T, terms_T)


def _scores(model: PreTrainedModel, scores_S: Tensor) -> tuple[Tensor, Tensor]:
    """The scores, and the gradient of a fixed mixture of them, all parameters in one vector."""
    mixture_S = torch.linspace(-1.0, 1.0, len(scores_S), dtype=scores_S.dtype, device=scores_S.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((mixture_S * scores_S).sum(), parameters, allow_unused=True, materialize_grads=True)
    return scores_S.detach(), torch.cat([gradient.flatten() for gradient in found])


def _errors(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Of the scores the largest, of the gradient the relative one (L2)."""
    off, scale = (float(torch.linalg.vector_norm(one.double())) for one in (found[1] - expected[1], expected[1]))
    return float((found[0] - expected[0]).abs().max()), off / max(scale, 1e-30)
