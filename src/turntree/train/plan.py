"""What memory a rank of a training run needs, before there is a run: the trainer's own code, on tensors without values.

`FakeTensorMode` gives every tensor its shape and no memory, the process group sends nothing, and torch's `MemTracker`
counts what would be alive. No layer, optimizer or loss is known by a formula here, so a change of the trainer changes
the plan. Token ids and indices are real, because the shapes of a pass depend on them.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.engine.compatibility import check_window
from turntree.pack.attention import set_tree_attention
from turntree.pack.packing import PackedBatch, pack_ranks
from turntree.train.config import LoRAConfig, OptimizerConfig
from turntree.train.forward import set_checkpointing
from turntree.train.lora import AdapterOff, add_adapter, freeze, frozen_reference
from turntree.train.loss_config import LossConfig
from turntree.train.optimizer import Optimizer
from turntree.train.ranks import SINGLE, ProcessGroup
from turntree.train.trainer import Trainer, joined
from turntree.train.update import train_windows


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What decides the memory of a rank. `tokens` are the positions of one pass, of a prompt and `branches` completions
    that share it; `context` is the longest sequence that is sampled."""

    ranks: int = 1
    bfloat16: bool = True
    lora: LoRAConfig | None = None
    frozen: tuple[str, ...] = ()
    checkpointing: bool = False
    dense: bool = False  # the whole mask, as SDPA wants it on CUDA; else attention without one
    referred: bool = False
    reference: PreTrainedConfig | None = None  # of another policy than the model's, which the KL term pulls towards
    tokens: int = 8192
    branches: int = 8
    rows: int = 8
    context: int = 8192


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on a rank. `passes` is what a forward and backward pass adds at its peak: activations, logits, and the
    layers that are gathered. `whole` are the weights that the embedded engine samples with, on rank 0 of several, and
    `caches` its keys and values, which are gone when a pass begins."""

    parameters: int  # a count
    weights: int
    masters: int
    moments: int
    gradients: int
    reference: int
    passes: int
    whole: int
    caches: int

    @property
    def steady(self) -> int:
        return self.weights + self.masters + self.moments + self.reference

    @property
    def peak(self) -> int:
        """Of a rank that only trains."""
        return self.steady + self.gradients + self.passes

    @property
    def first(self) -> int:
        """Of rank 0, which samples too."""
        return self.whole + max(self.peak, self.steady + self.caches)


def memory(config: PreTrainedConfig, asked: Planned) -> Memory:
    """What a rank needs to train a model of `config`."""
    with torch.device("meta"):
        model = outline(config, asked)
        teacher = asked.reference and outline(asked.reference, replace(asked, lora=None, frozen=()))
    try:
        check_window(model, asked.tokens, field="max_tokens")
    except InputError:  # its trees are trained chain by chain, or in rows
        asked = replace(asked, branches=1)
    windows = batches(config.get_text_config().vocab_size, asked)  # real ones
    with _group(asked.ranks) as group, warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # a copied model's
        for each in filter(None, (model, teacher)):
            each.to_empty(device="cpu")
            each.tie_weights()
            prepare(each, asked)
        caches = _cache_bytes(model, asked.context) * asked.rows
        trainer = trained(model, asked, group, teacher)
        tracker = _Tracker()
        reference = trainer.reference if isinstance(trainer.reference, PreTrainedModel) else None
        known = [trainer.model, *trainer.optimizer.masters, *([] if reference is None else [reference])]
        tracker.track_external(*known)
        loss = LossConfig(kl_coefficient=0.05 if asked.referred else 0.0)
        with _Known(), tracker:
            train_windows(trainer, windows, loss=loss, updates=1, rescores=False)
        found = sum(tracker.get_tracker_snapshot("peak")[torch.device("cpu")].values()) // 2  # the total is in it
        own = [*trainer.model.parameters(), *trainer.model.buffers()]
        masters = trainer.optimizer.masters
        moments = list(trainer.optimizer.tensors(trainer.names).values())[1 + len(masters) :]
        steady = {
            "weights": held(own),
            "masters": held(masters, besides=own),
            "moments": held(moments),
            "reference": 0 if reference is None else held(reference.parameters(), besides=own),
            "gradients": held(masters),
        }
        return Memory(
            parameters=sum(p.numel() for p in model.parameters()),
            passes=max(0, found - sum(steady.values())),
            whole=0 if group.size == 1 else held([*model.parameters(), *model.buffers()]),
            caches=caches,
            **steady,
        )


def outline(config: PreTrainedConfig, asked: Planned) -> PreTrainedModel:
    """The policy as a run loads it. Raises `ValueError` for a config of which there is no causal language model."""
    reads_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING  # else it sees, too
    model: PreTrainedModel = (
        (AutoModelForCausalLM if reads_text else AutoModelForImageTextToText)
        .from_config(
            copy.deepcopy(config), dtype=torch.bfloat16 if asked.bfloat16 else torch.float32, attn_implementation="sdpa"
        )
        .eval()
    )
    freeze(model, asked.frozen)
    if asked.lora is not None:
        add_adapter(model, asked.lora)
    return model


def prepare(model: PreTrainedModel, asked: Planned) -> None:
    """Set its passes as a run does."""
    if not asked.dense:
        set_tree_attention(model)
    if asked.checkpointing:
        set_checkpointing(model)


def trained(
    model: PreTrainedModel, asked: Planned, group: ProcessGroup, reference: PreTrainedModel | None = None
) -> Trainer:
    """Rank 0's trainer; `reference` is another policy than the model. Whether an adapter is fresh is in its values, of
    which there are none here."""
    settings, fresh = OptimizerConfig(), asked.referred and reference is None and asked.lora is not None
    if group.size == 1:
        own = AdapterOff(model) if fresh else frozen_reference(model) if asked.referred else None
        return Trainer(model, reference or own, Optimizer(model.parameters(), settings, 2))
    kind = "adapter off" if fresh else "frozen" if asked.referred else None
    return joined(model, reference or model, kind, settings, 2, torch.get_num_threads(), group)


def batches(vocabulary: int, asked: Planned) -> list[list[PackedBatch]]:
    """The passes of rank 0 in two optimizer steps: a small one, after which there are moments, and two of all tokens,
    the second beside the gradient of the first."""
    few = max(4, min(64, asked.tokens // 4))
    found: list[list[PackedBatch]] = []
    for tokens, count in ((few, 1), (asked.tokens, 2)):
        made = [_tree(tokens, asked.branches, vocabulary, number) for number in range(count * asked.ranks)]
        trees, credits = zip(*made, strict=True)
        found.append(pack_ranks(trees, credits, asked.ranks, max_tokens=asked.tokens)[0])
    return found


def _tree(tokens: int, branches: int, vocabulary: int, number: int) -> tuple[RolloutTree, Credit]:
    """A prompt of half of the tokens, which begins with `number`, and completions that share the other half."""
    branches = min(branches, tokens // 2)
    tree = RolloutTree("plan")
    root = tree.add(None, NodeKind.PROMPT, tuple((number + k) % vocabulary for k in range(tokens - tokens // 2))).id
    for branch in range(branches):
        length = tokens // 2 // branches
        zeros = (0.0,) * length
        ids = tuple((branch + k) % vocabulary for k in range(length))
        tree.stop(tree.add(root, NodeKind.COMPLETION, ids, logprobs=zeros, entropies=zeros).id, StopReason.COMPLETED)
    credits = {node.id: NodeCredit(1.0, 0.0, 1.0) for node in tree if node.sampled}
    return tree, Credit(credits, rollout_tokens=float(tokens // 2), rollouts=float(branches), zero_variance=False)


def _cache_bytes(model: PreTrainedModel, context: int) -> int:
    """Of one sequence of `context` tokens, by what the model itself keeps for a short and a longer one: keys and values
    grow, windows and recurrent states do not."""
    rows = [torch.zeros(1, length, dtype=torch.long) for length in (32, 64)]
    with torch.no_grad(), _Known():
        caches: list[Any] = [model(input_ids=row, use_cache=True).past_key_values for row in rows]
    short, longer = (held(tree_leaves([vars(layer) for layer in cache.layers])) for cache in caches)
    return short + (longer - short) * (context - 32) // 32


def held(tensors: Iterable[Any], besides: Iterable[Tensor] = ()) -> int:
    """Bytes of the tensors on this rank, each storage once, without those of `besides`."""
    found = {id(one.untyped_storage()): one for one in map(_local, tensors) if isinstance(one, Tensor)}
    for one in besides:
        found.pop(id(_local(one).untyped_storage()), None)
    return sum(one.untyped_storage().nbytes() for one in found.values())


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Group(ProcessGroup):
    """Rank 0 of ranks that are not there."""

    def __init__(self, size: int) -> None:
        self.size = self.here = size
        self.mesh = init_device_mesh("cpu", (size,))


@contextlib.contextmanager
def _group(ranks: int) -> Iterator[ProcessGroup]:
    if ranks == 1:
        yield SINGLE
        return
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield _Group(ranks)
    finally:
        dist.destroy_process_group()


class _Known(TorchDispatchMode):
    """Computes what depends on real tensors only, and says 1 where the trainer asks for a value that there is not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        fake = any(isinstance(one, FakeTensor) for one in given)
        if fake and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if given[0].is_floating_point() else 1
        if fake and func is torch.ops.aten._grouped_mm.default and given[0].dtype == torch.float32:
            # experts; its shapes are known for bfloat16 only
            narrow = [one.bfloat16() if number < 2 else one for number, one in enumerate(args)]
            return func(*narrow, **(kwargs or {})).float()
        with contextlib.nullcontext() if fake or not given else unset_fake_temporarily():
            return func(*args, **(kwargs or {}))


class _Tracker(MemTracker):
    """Of the whole, not module by module: those figures allow one pass, and we ask for three."""

    def __init__(self) -> None:
        super().__init__()
        modules: Any = self._mod_tracker
        modules.register_user_hooks = lambda *hooks: None
