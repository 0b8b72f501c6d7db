"""Tiny random models and a tiny tokenizer, made on the spot: no download, a few milliseconds each.

>>> from tiny_models import save_tiny_checkpoint, tiny_model, tiny_tokenizer
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers import PreTrainedTokenizerFast as FastTokenizer

VOCAB_SIZE = 384
SPECIAL_TOKENS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>\n{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}\n"
    "</tool_call>"
    "{% endfor %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SENTENCES = [
    "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a drawer 2 and a shelf 3.",
    "Your task is to: put a clean mug in the cabinet. go to the drawer 1. open the drawer 1. take the mug 1.",
    "What is 12 + 30? The answer is 42. Search the web for the capital of France: it is Paris.",
    '<tool_call>\n{"name": "search", "arguments": {"query": "capital of France"}}\n</tool_call>',
]


def tiny_model(
    kind: Literal["qwen3", "llama"] = "qwen3",
    vocab_size: int = VOCAB_SIZE,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    hidden_size: int = 64,
    layers: int = 2,
    initializer_range: float = 0.15,
    tied: bool | None = None,
) -> PreTrainedModel:
    """A random decoder in eval mode (grouped-query attention; tied embeddings for Qwen3, untied for Llama).

    The wide initialisation makes attention and the next-token distribution sharp, so that a wrong mask or position
    shows in the log-probabilities.
    """
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 4096,
        "initializer_range": initializer_range,
        "tie_word_embeddings": kind == "qwen3" if tied is None else tied,
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    return model.to(dtype).eval()


def tiny_mixture(vocab_size: int = VOCAB_SIZE, *, seed: int = 0) -> PreTrainedModel:
    """A random mixture of experts in eval mode: two layers, two of four experts a token."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "initializer_range": 0.15}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(vocab_size=vocab_size, num_experts=4, num_experts_per_tok=2, **sizes, **heads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).eval()
        for name, parameter in model.named_parameters():  # Transformers leaves routers at zero
            if name.endswith("mlp.gate.weight"):
                torch.nn.init.normal_(parameter)
    return model


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> FastTokenizer:
    """A byte-level BPE (any text round-trips); "<|end|>" ends a turn. `chat_template=None` leaves it out."""
    tokenizer = FastTokenizer(tokenizer_object=Tokenizer.from_str(_trained_bpe()), eos_token="<|end|>")
    tokenizer.chat_template = chat_template
    return tokenizer


@functools.cache
def _trained_bpe() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer.to_str()


def save_tiny_checkpoint(folder: str | Path, kind: Literal["qwen3", "llama"] = "qwen3", *, seed: int = 0) -> Path:
    """Write a tiny model and its tokenizer as an ordinary checkpoint folder, and return it."""
    folder = Path(folder)
    tiny_model(kind, seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
