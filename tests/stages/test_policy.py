"""One configuration sets a policy up for every training stage, and what is loaded still samples."""

from __future__ import annotations

import pytest

from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.config import from_mapping, to_mapping
from turntree.core.errors import ConfigError
from turntree.stages.policy import Device, Policy, load_policy
from turntree.training.attention import layouts
from turntree.training.isolation import check_path_isolation
from turntree.training.lora import AdapterOff, LoRAConfig


def sampled(policy: Policy) -> tuple[int, ...]:
    request = GenerationRequest(prompt_ids=tuple(range(10, 30)), sampling=Sampling(max_tokens=8), seed=1)
    return policy.engine.generate([request])[0].token_ids


def test_a_fresh_adapter_keeps_the_name_of_the_weights_and_what_they_say() -> None:
    plain = load_policy("default", Device())
    adapted = load_policy("default", Device(lora=LoRAConfig(rank=2, alpha=4), gradient_checkpointing=True))
    assert adapted.hash == plain.hash and sampled(adapted) == sampled(plain)
    assert check_path_isolation(adapted.model).logprob_error < 1e-4
    assert sampled(adapted) == sampled(plain)  # after a training pass too
    assert isinstance(adapted.reference(), AdapterOff) and plain.reference() is not plain.model
    assert layouts(plain.model) == ("dense", "blocks")


def test_the_device_is_configured_like_everything_else() -> None:
    device = from_mapping(Device, {"lora": {"rank": 4, "targets": ["q_proj"]}, "gradient_checkpointing": True})
    assert device.lora == LoRAConfig(rank=4, targets=("q_proj",))
    assert from_mapping(Device, to_mapping(device)) == device
    with pytest.raises(ConfigError, match="field 'dropout': unknown key"):
        from_mapping(Device, {"lora": {"dropout": 0.1}})


def test_low_precision_weights_train_an_adapter_only() -> None:
    Device(dtype="bfloat16", lora=LoRAConfig()).check_trainable()
    with pytest.raises(ConfigError, match=r"field 'device\.dtype': 'bfloat16' weights round .*device\.lora"):
        Device(dtype="bfloat16").check_trainable()
