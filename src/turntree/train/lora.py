"""LoRA through PEFT: the policy is a base with a small adapter. The base without the adapter is the reference where
training starts with a fresh one."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from turntree.core import seeds
from turntree.core.errors import ConfigError, InputError
from turntree.engine.checkpoint import check_peft
from turntree.pack.head import decoder_of
from turntree.train.config import LoRAConfig


@dataclass(frozen=True)
class AdapterOff:
    """The frozen base of a LoRA policy as the reference, without a second copy of the weights. It is the policy that
    training starts from only where the adapter was fresh then (`frozen_reference`)."""

    policy: PreTrainedModel


ALL_LINEAR = "all-linear"
Reference = PreTrainedModel | AdapterOff


@contextmanager
def reference_model(reference: Reference) -> Iterator[PreTrainedModel]:
    """The model that scores as `reference` inside the block; with an adapter, it is the policy again after the
    block."""
    if not isinstance(reference, AdapterOff):
        yield reference
        return
    reference.policy.disable_adapters()
    try:
        yield reference.policy
    finally:
        reference.policy.enable_adapters()


def frozen_reference(model: PreTrainedModel) -> Reference:
    """A reference that stays what the policy is now, for the KL term: the base of a fresh adapter, else a frozen copy.

    The copy of an adapter that was trained before shares the frozen base, so that it takes the memory of an adapter.
    """
    if is_fresh(model):
        return AdapterOff(model)
    shared = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False)


def is_fresh(model: PreTrainedModel) -> bool:
    """Whether the model has an adapter that adds nothing to its base yet: LoRA's product B A with B = 0."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    only_lora = all("lora_A" in name or "lora_B" in name for name in trained)
    return (
        has_adapter(model) and only_lora and not any(value.any() for name, value in trained.items() if "lora_B" in name)
    )


def freeze(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Leave the weights of the modules of these names (a mixture's router: `mlp.gate`) as they are in training. Raises
    `ConfigError` for a name that no module has, and where nothing would be left to train."""
    for name in names:
        found = [p for key, p in model.named_parameters() if f".{name}." in f".{key}"]
        if not found:
            problem = f"{type(model).__name__} has no module {name!r} with weights"
            raise ConfigError(problem, field="device.frozen", hint="a mixture's router is often mlp.gate")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("leaves nothing to train", field="device.frozen", hint="name fewer modules")


def has_adapter(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _linear(model: PreTrainedModel) -> list[str]:
    """The names of the linear modules of the decoder; their full names where others (of a model that also sees) share
    the last part. PEFT's own "all-linear" takes in the experts and the router of a mixture, too, whose weights it then
    replaces in every pass."""
    head, decoder = model.get_output_embeddings(), set(decoder_of(model).modules())
    modules = [(name, one) for name, one in model.named_modules() if _is_linear(one)]
    inside = {name for name, one in modules if one in decoder}
    short, others = (
        {name.rpartition(".")[2] for name, one in modules if one is not head and (name in inside) is own}
        for own in (True, False)
    )
    return sorted(inside if short & others else short)


def _is_linear(module: torch.nn.Module) -> bool:
    """Not a model's own class below a linear one, which computes more (Llama 4's router)."""
    return isinstance(module, torch.nn.Linear | Conv1D) and ".models." not in type(module).__module__


def add_adapter(model: PreTrainedModel, config: LoRAConfig) -> None:
    """Freeze `model` and give it a fresh adapter in float32, which leaves its distribution as it is.

    Raises `ConfigError` where PEFT is not installed or too old, or `targets` name no linear module.
    """
    check_peft()
    from peft import LoraConfig

    if has_adapter(model):
        raise InputError("the policy already has an adapter", hint="train it as it is, or merge it first")
    named = [target for target in config.targets if target != ALL_LINEAR]
    stacked = [f".{name}" for name, parameter in model.named_parameters() if parameter.dim() == 3]
    experts = [target for target in named if any(name.endswith(f".{target}") for name in stacked)]
    linear = _linear(model) if ALL_LINEAR in config.targets else []
    modules = [*linear, *(target for target in named if target not in experts)]
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=modules,
        target_parameters=experts or None,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*_pattern keys")  # of experts, no target
            torch.manual_seed(seeds.derive(0, "lora"))
            model.add_adapter(settings)
    except ValueError as error:
        raise ConfigError(str(error).splitlines()[0][:200], field="lora.targets") from error
    _require_linear(model, experts)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _require_linear(model: PreTrainedModel, experts: Collection[str]) -> None:
    """PEFT takes the names of a dense layer for the experts of some mixtures, whose weights it would replace in every
    pass. Those of `experts` were named as what they are."""
    layers = {name: one for name, one in model.named_modules() if hasattr(one, "lora_A")}
    bases = {name: one.base_layer for name, one in layers.items() if not _is_named(name, one, experts)}
    if others := sorted(name for name, base in bases.items() if not isinstance(base, torch.nn.Linear | Conv1D)):
        named = {name.rpartition(".")[2] for name, base in bases.items() if isinstance(base, torch.nn.Linear | Conv1D)}
        hint = f"name others (--set 'device.lora.targets={json.dumps(sorted(named))}')"
        raise ConfigError(f"PEFT would adapt {others[0]!r}, no linear module", field="lora.targets", hint=hint)


def _is_named(module: str, layer: torch.nn.Module, experts: Collection[str]) -> bool:
    """Whether the weights of experts that a layer of PEFT adapts are among those that were named. One layer is around
    the other where a module has several."""
    whole = f".{module.replace('.base_layer', '')}.{getattr(layer, 'parameter_name', '')}"
    return any(whole.endswith(f".{name}") for name in experts)
