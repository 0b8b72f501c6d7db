"""Tiny random models of families whose prefixes can be shared by position, or cannot, with what stands in the way."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tiny_models import VOCAB_SIZE

WINDOW = 16  # of those that have one: shorter than the probes of the checks
_CONV = ["conv", "full_attention", "conv", "full_attention"]
_MAMBA = ["mamba", "attention", "mamba", "attention"]
_SMALL_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
_NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
}
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_LATENT = {
    "head_dim": 4,  # the part that is rotated
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
} | _EXPERTS

# by name: the class of the config, what it says beside the usual sizes, and why prefixes are not shared ("": they are)
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen3": ("Qwen3Config", {}, ""),
    "MiniMax-M2": ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2}, ""),
    "GLM-4.5 MoE": ("Glm4MoeConfig", {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}, ""),
    "Qwen3.5, 3.6": ("Qwen3_5TextConfig", _DELTA, "linear attention"),
    "Qwen3.5, 3.6 MoE": ("Qwen3_5MoeTextConfig", {**_DELTA, **_EXPERTS, "num_experts": 4}, "linear attention"),
    "Qwen3-Next": ("Qwen3NextConfig", {**_DELTA, **_EXPERTS, "num_experts": 4}, "linear attention"),
    "Nemotron-H (Nemotron 3)": ("NemotronHConfig", _NEMOTRON, "linear attention"),
    "LFM2": ("Lfm2Config", {"layer_types": _CONV, "conv_L_cache": 3}, "short convolutions"),
    "Falcon-H1": ("FalconH1Config", _SMALL_MAMBA | {"mamba_d_ssm": 64}, "linear attention"),
    "Granite 4 hybrid": (
        "GraniteMoeHybridConfig",
        _SMALL_MAMBA
        | {"layer_types": _MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
        "linear attention",
    ),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        "attention sinks",
    ),
    "DeepSeek-V3": ("DeepseekV3Config", _LATENT, "latent attention"),
    "Gemma 2": ("Gemma2Config", {"sliding_window": WINDOW}, "capped scores"),
    "Gemma 3": ("Gemma3TextConfig", {"sliding_window": WINDOW}, "windows"),
    "Gemma 4": (
        "Gemma4TextConfig",
        {"sliding_window": WINDOW, "num_hidden_layers": 6, "hidden_size_per_layer_input": 8},
        "windows",
    ),
    "OLMo 3": ("Olmo3Config", {"sliding_window": WINDOW}, "windows"),
    "Llama 4": (
        "Llama4TextConfig",
        {
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": WINDOW,
        },
        "chunks",
    ),
    "Mistral with its window": ("MistralConfig", {"sliding_window": WINDOW}, "windows"),
}
# of models that also see: what their text model says, as above; they are trained on text
WITH_VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3-VL": ("Qwen3VL", {}, {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}),
    "Qwen3.5, 3.6": ("Qwen3_5", _DELTA, {"depth": 1, "num_heads": 2, "out_hidden_size": 32}),
    "Gemma 3": ("Gemma3", {"sliding_window": WINDOW}, {"num_hidden_layers": 1, "num_attention_heads": 2}),
    "Mistral 3, Devstral 2": (
        "Mistral3",
        {"model_type": "mistral"},
        {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
    ),
}
SHARED = [name for name, (_, _, why) in FAMILIES.items() if not why]
REPEATED = [name for name in FAMILIES if name not in SHARED]
# of these, in the update: shared, a row per rollout because a state is overwritten; the others are carried
SHARED_IN_UPDATE = ["DeepSeek-V3"]
ROWS = ["Nemotron-H (Nemotron 3)", "Falcon-H1", "Granite 4 hybrid"]


_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide, so that a wrong mask or state shows in the log-probabilities
    "bos_token_id": 4,
    "eos_token_id": 4,
    "pad_token_id": 0,
}


def family_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """In eval mode."""
    kind, told, _ = FAMILIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**{**_SIZES, **told})
    return AutoModelForCausalLM.from_config(config).eval()


def seeing_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """The whole model, as its folder on the Hub has it."""
    kind, text, vision = WITH_VISION[name]
    small = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        text_config={**_SIZES, **text}, vision_config={**small, **vision}, tie_word_embeddings=False
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
