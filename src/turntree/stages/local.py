"""A policy in this process: its weights, its engine, and the threads that it computes with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from turntree.core import parts
from turntree.core.errors import InputError
from turntree.engine.checkpoint import check_peft, load_model, policy_hash, save_model
from turntree.engine.compatibility import check_positions, positions_of
from turntree.engine.tokenizer import load_tokenizer, tokenizer_hash
from turntree.pack.attention import set_tree_attention
from turntree.pack.carried import set_carried
from turntree.pack.head import vocabulary_size
from turntree.stages.config import Device
from turntree.stages.policy import Policy, Weights, identity_of, renderer_of, resolve, say
from turntree.train.forward import set_checkpointing
from turntree.train.isolation import shares_prefixes
from turntree.train.likelihood import check_head
from turntree.train.lora import add_adapter, freeze


@dataclass(frozen=True)
class LocalPolicy(Policy):
    """`model` is its weights."""

    @property
    def vocabulary(self) -> int:
        return vocabulary_size(self.model)

    def trains_on_trees(self, tokens: int, *, field: str, ranks: int = 1, reference: Any = None) -> bool:
        shared = shares_prefixes(self.model, tokens, self.prefixes, field=field, ranks=ranks)
        if not isinstance(reference, PreTrainedModel):
            return shared
        reference.requires_grad_(True)  # its gradient is measured, too
        both = shares_prefixes(reference, tokens, self.prefixes if shared else "repeated", field=field, ranks=ranks)
        if shared and not both:
            set_carried(self.model, False)
            shares_prefixes(self.model, tokens, "repeated", field=field)
        reference.requires_grad_(False)
        return both

    def reads(self, tokens: int) -> int:
        check_head(self.model)
        positions = positions_of(self.model) or tokens
        check_positions(self.model, min(tokens, positions), field="sft.max_tokens")
        return positions

    def open_reference(self, source: str, device: Device) -> tuple[PreTrainedModel, str]:
        folder = resolve(source)
        if tokenizer_hash(load_tokenizer(folder)) != self.identity["tokenizer_hash"]:
            hint = "a policy is compared with another one token by token"
            raise InputError("has another tokenizer than the model", path=folder, field="reference", hint=hint)
        model = load_model(folder, dtype=device.dtype, device=device.name).requires_grad_(False)
        set_tree_attention(model, device.attention)
        return model, policy_hash(model)

    def save(self, folder: Path) -> None:
        save_model(self.model, self.tokenizer, folder)


def open_local(source: str, device: Device) -> LocalPolicy:
    """As `load_policy`."""
    folder = resolve(source)
    tokenizer = load_tokenizer(folder)
    if device.lora is not None:
        check_peft()
    model = load_model(folder, dtype=device.dtype, device=device.name)
    set_threads(model, device.threads)
    weights = policy_hash(model)
    freeze(model, device.frozen)
    if device.lora is not None:
        add_adapter(model, device.lora)
    loaded = Weights(source, model, tokenizer, renderer_of(device.renderer, tokenizer, folder), device.prefixes)
    _check_stops(loaded, folder)
    engine = parts.build("engines", device.engine, field="device.engine", policy=loaded)
    set_tree_attention(model, device.attention)
    if device.gradient_checkpointing:
        set_checkpointing(model)
    identity = identity_of(weights, tokenizer, loaded.renderer, device.renderer)
    return LocalPolicy(source, model, tokenizer, loaded.renderer, device.prefixes, engine, weights, identity)


def _check_stops(loaded: Weights, folder: Path) -> None:
    """Raises `InputError` where the policy cannot say what ends its turns."""
    tokens = loaded.model.config.get_text_config().vocab_size
    if unknown := sorted(stop for stop in loaded.renderer.stop_ids if stop >= tokens):
        stop = loaded.tokenizer.convert_ids_to_tokens(unknown[0])
        problem = f"{stop!r} ends a turn, and is token {unknown[0]} of a model with {tokens}"
        raise InputError(problem, path=folder, hint="resize_token_embeddings, or use the tokenizer that came with it")


# the number of CPU threads: by the model's size and the machine, unless the configuration sets it

# Number of parameters from which threads help. In small matrix products threads wait for each other longer than they
# compute (measured: up to a hundred times longer on a shared machine).
MANY = 30_000_000
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processor in a period, or "max"


def set_threads(model: PreTrainedModel, asked: int | None) -> int:
    """Set the threads of this process and print their number: the same number gives the same bits."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    count = asked or (1 if parameters < MANY else available())
    torch.set_num_threads(count)
    say(f"{count} thread{'s' if count > 1 else ''} for {parameters / 1e6:.1f} M parameters (key device.threads)")
    return count


def available() -> int:
    """The CPUs that this process may use: by its affinity, its container's share, and at most the user's
    OMP_NUM_THREADS (which the command keeps as TURNTREE_THREADS, 0 if unset, before it sets its own)."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    said = os.environ.get("TURNTREE_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(own, _quota() or own, int(said) if said.isdecimal() and int(said) else own))


def _quota() -> int | None:
    """Whole processors of the container's share, one at least; None where it has no limit."""
    try:
        allowed, period = _QUOTA.read_text().split()
        return max(1, int(allowed) // int(period))
    except (OSError, ValueError):
        return None
