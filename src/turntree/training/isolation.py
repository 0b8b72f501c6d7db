"""A load-time check that a model can be packed: branches must not see each other.

Sliding windows, chunked attention, ALiBi, length-dependent RoPE, state-space layers, attention sinks, dropout and
unknown head scalings all break the packed forward pass in their own way. Instead of a list of architectures, one
random three-leaf tree is scored both ways and the difference is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.seeds import generator
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.training.attention import layouts
from turntree.training.forward import policy_logprobs
from turntree.training.head import vocabulary_size
from turntree.training.packing import PackedBatch, pack

# (log-probability in nats, relative gradient): rounding of the type with room to spare, far below a broken mask, which
# is off by nats. In half precision rounding grows with the logits: up to _ROUNDING of the largest log-probability.
# SmolLM2-135M, fine-tuned, in bfloat16 on paths of 48 to 2,048 tokens: at most 0.48 nats and 0.28 of the gradient. A
# window of nine tenths of the path is off by 6.8 and 3.5 there
TOLERANCES = {
    torch.float64: (1e-6, 1e-5),  # stock decoders normalise in float32 whatever their type
    torch.float32: (1e-4, 1e-3),
    torch.float16: (0.05, 0.05),
    torch.bfloat16: (0.2, 0.5),
}
_ROUNDING = {torch.float16: 0.004, torch.bfloat16: 0.03}


@dataclass(frozen=True)
class IsolationReport:
    """Packed against plain rows: largest log-probability difference (nats) and relative L2 error of the gradient, of
    the worst attention layout that the model may take."""

    logprob_error: float
    gradient_error: float


def check_path_isolation(model: PreTrainedModel, *, path_tokens: int = 48, seed: int = 0) -> IsolationReport:
    """Score a random three-leaf tree packed and as plain `model(input_ids)` rows; refuse the model if they differ.

    Every attention layout that a batch may take (`training.attention.layouts`) is checked, with the model as it is
    set up: its mode, gradient checkpointing, adapter. `path_tokens` is the length of the longest path. A sliding window
    shows only on paths longer than it; `engines.compatibility.check_window` refuses one by its size, without a pass
    over paths as long as those that are trained. Leaves `.grad` alone. Raises `InputError` with the measured errors.
    """
    tree, credit = _probe(model, path_tokens, seed)
    batch = pack([tree], [credit], max_tokens=3 * path_tokens)[0].to(model.device)
    plain_S = _plain_logprobs(model, tree, batch)
    plain_gradient = _gradient(plain_S, model)
    errors: list[IsolationReport] = []
    for layout in layouts(model):
        packed_S = policy_logprobs(model, batch, layout=layout)
        logprob_error = float((packed_S - plain_S).detach().abs().max())
        errors.append(IsolationReport(logprob_error, _relative_error(_gradient(packed_S, model), plain_gradient)))
        dtype = model.dtype if model.dtype in TOLERANCES else packed_S.dtype
        nats, relative = TOLERANCES[dtype]
        nats = max(nats, _ROUNDING.get(dtype, 0.0) * float(plain_S.detach().abs().max()))
        _refuse(model, layout, errors[-1], (nats, relative))
    return IsolationReport(max(e.logprob_error for e in errors), max(e.gradient_error for e in errors))


def _refuse(model: PreTrainedModel, layout: str, errors: IsolationReport, limits: tuple[float, float]) -> None:
    if not (errors.logprob_error <= limits[0] and errors.gradient_error <= limits[1]):
        raise InputError(
            f"{type(model).__name__} cannot be packed: on a random tree ({layout} attention) its log-probabilities are "
            f"off by {errors.logprob_error:.2g} nats and its gradient by {errors.gradient_error:.2g}",
            hint="use full attention over whole paths (no sliding window, no dropout) or train on flat batches",
        )


def _probe(model: PreTrainedModel, path_tokens: int, seed: int) -> tuple[RolloutTree, Credit]:
    """Two branches below a prompt, one of which forks again: three leaves, the longest path `path_tokens` long."""
    draw = generator(seed, "path isolation")
    vocabulary = vocabulary_size(model)
    part = max(2, path_tokens // 3)

    def sampled(tree: RolloutTree, parent: int, length: int) -> int:
        ids = tuple(draw.randrange(vocabulary) for _ in range(length))
        zeros = (0.0,) * length
        return tree.add(parent, NodeKind.COMPLETION, ids, logprobs=zeros, entropies=zeros).id

    tree = RolloutTree("probe")
    root = tree.add(None, NodeKind.PROMPT, tuple(draw.randrange(vocabulary) for _ in range(part))).id
    fork = sampled(tree, root, part)
    for leaf in (sampled(tree, fork, part), sampled(tree, fork, max(1, part // 2)), sampled(tree, root, part)):
        tree.stop(leaf, StopReason.COMPLETED)
    nodes = {node.id: NodeCredit(1.0, 0.0, 1.0) for node in tree if node.sampled}
    return tree, Credit(nodes, rollout_tokens=1.0, rollouts=3.0, zero_variance=False)


def _plain_logprobs(model: PreTrainedModel, tree: RolloutTree, batch: PackedBatch) -> Tensor:
    """The same slots from stock forward passes, one row per rollout."""
    of_node: dict[int, Tensor] = {}
    for rollout in tree.rollouts():
        ids_1L = torch.tensor([rollout.token_ids], device=model.device)
        logits_LV = model(input_ids=ids_1L).logits[0]
        wide = logits_LV.float() if logits_LV.dtype in (torch.bfloat16, torch.float16) else logits_LV
        scores_L = torch.log_softmax(wide[:-1], dim=-1).gather(1, ids_1L[0, 1:, None]).squeeze(1)
        end = 0
        for node in rollout.nodes:
            start, end = end, end + len(node.token_ids)
            if node.sampled:
                of_node.setdefault(node.id, scores_L[start - 1 : end - 1])
    terms_T = torch.cat([of_node[node] for node in sorted(of_node)])
    plain_S = torch.zeros(len(batch.target_S), dtype=terms_T.dtype, device=terms_T.device)
    return plain_S.index_copy(0, batch.slot_T, terms_T)


def _gradient(scores_S: Tensor, model: PreTrainedModel) -> Tensor:
    """The gradient of a fixed mixture of the scores, all parameters in one vector."""
    mixture_S = torch.linspace(-1.0, 1.0, len(scores_S), dtype=scores_S.dtype, device=scores_S.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((mixture_S * scores_S).sum(), parameters, allow_unused=True)
    pairs = zip(parameters, found, strict=True)
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in pairs])


def _relative_error(found: Tensor, expected: Tensor) -> float:
    scale = float(torch.linalg.vector_norm(expected.double()))
    return float(torch.linalg.vector_norm((found - expected).double())) / max(scale, 1e-30)
