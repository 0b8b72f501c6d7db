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
from turntree.training.forward import check_attention_backend, policy_logprobs, vocabulary_size
from turntree.training.packing import PackedBatch, pack

# (log-probability in nats, relative gradient): rounding of the type with room to spare, far below a broken mask
TOLERANCES = {
    torch.float64: (1e-6, 1e-5),  # stock decoders normalise in float32 whatever their type
    torch.float32: (1e-4, 1e-3),
    torch.float16: (0.05, 0.05),
    torch.bfloat16: (0.2, 0.2),
}


@dataclass(frozen=True)
class IsolationReport:
    """Packed against plain rows: largest log-probability difference (nats) and relative L2 error of the gradient."""

    logprob_error: float
    gradient_error: float


def check_path_isolation(model: PreTrainedModel, *, path_tokens: int = 48, seed: int = 0) -> IsolationReport:
    """Score a random three-leaf tree packed and as plain `model(input_ids)` rows; refuse the model if they differ.

    `path_tokens` is the length of the longest path: a sliding window shows only on paths longer than it, so pass the
    longest that will be trained. Runs in the model's present mode (call `model.train()` first to catch dropout) and
    leaves `.grad` alone. Raises `InputError` with the measured errors.
    """
    check_attention_backend(model)
    tree, credit = _probe(model, path_tokens, seed)
    batch = pack([tree], [credit], max_tokens=3 * path_tokens)[0].to(model.device)
    packed_S = policy_logprobs(model, batch)
    plain_S = _plain_logprobs(model, tree, batch)
    logprob_error = float((packed_S - plain_S).detach().abs().max())
    gradient_error = _relative_error(_gradient(packed_S, model), _gradient(plain_S, model))
    limits = TOLERANCES[packed_S.dtype if model.dtype not in TOLERANCES else model.dtype]
    if not (logprob_error <= limits[0] and gradient_error <= limits[1]):
        raise InputError(
            f"{type(model).__name__} cannot be packed: on a random tree its log-probabilities are off by "
            f"{logprob_error:.2g} nats and its gradient by {gradient_error:.2g}",
            hint="use full attention over whole paths (no sliding window, no dropout) or train on flat batches",
        )
    return IsolationReport(logprob_error, gradient_error)


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
