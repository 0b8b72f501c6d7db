"""Tokenizers with the special tokens of a model family, for renderers of families whose own tokenizer is not at hand.

>>> from family_tokenizers import TOKENS, with_tokens_of
"""

from __future__ import annotations

from typing import Any

from tiny_models import tiny_tokenizer

_CHATML = (
    "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
)
_VISION = "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
_GLM = (
    "[gMASK] <sop> <|endoftext|> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> "
    "</tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value> /nothink"
)
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think> "
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
_KIMI = (
    "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|> <|endoftext|> <think> </think> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> "
    "<|tool_call_end|> <|media_begin|> <|media_content|> <|media_pad|> <|media_end|>"
)
_LAGUNA = (
    "〈|EOS|〉 <system> </system> <user> </user> <assistant> </assistant> <think> </think> <tool_call> "
    "</tool_call> <tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value> "
    "<available_tools> </available_tools>"
)
_NEMOTRON = f"{_CHATML} </function> </parameter>"
TOKENS = {
    "qwen3": _CHATML,
    "qwen3.5": f"{_CHATML} {_VISION}",
    "qwen3.6": f"{_CHATML} {_VISION}",
    "qwen3.8": f"{_CHATML} {_VISION}",
    "qwen3-vl": f"{_CHATML} {_VISION}",
    "nemotron-3": _NEMOTRON,
    "nemotron-3-ultra": _NEMOTRON,
    "nemotron-3.5": _NEMOTRON,
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.3": _GLM,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v4": (
        f"{_DEEPSEEK} ｜DSML｜ <｜latest_reminder｜> <｜action｜> <｜authority｜> <｜domain｜> <｜query｜> "
        "<｜read_url｜> <｜title｜>"
    ),
    "llama-3": "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>",
    "gemma4": (
        "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> "
        '<|tool_response> <tool_response|> <|think|> <|image> <|image|> <image|> <|"|> <|audio|>'
    ),
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "minimax-m2": "]~!b[ ]~b] [e~[ <think> </think> <minimax:tool_call> </minimax:tool_call>",
    "laguna-xs.2": _LAGUNA,
    "laguna-s-2.1": _LAGUNA,
    "inkling": (
        "<|message_user|> <|message_model|> <|message_system|> <|message_tool|> <|content_text|> <|content_thinking|> "
        "<|content_xml|> <|content_invoke_tool_json|> <|content_invoke_tool_text|> <|content_model_end_sampling|> "
        "<|end_message|> <|endoftext|> <|content_image|> <|content_audio_input|> <|audio_end|> <|unused_200053|> "
        "<|unused_200054|>"
    ),
    "gpt-oss": "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|>",
    "lfm2": "<|startoftext|> <|im_start|> <|im_end|> <|tool_call_start|> <|tool_call_end|> <|tool_list_start|> "
    "<|tool_list_end|> <|tool_response_start|> <|tool_response_end|> <think> </think>",
}
_ENDS = {"gemma4": "<turn|>", "llama-3": "<|eot_id|>", "kimi-k2": "<|im_end|>", "kimi-k2.5": "<|im_end|>"}
_BEGINS = {"gemma4": "<bos>", "llama-3": "<|begin_of_text|>", "lfm2": "<|startoftext|>"}


def with_tokens_of(family: str, tokenizer: Any = None) -> Any:
    """The tokenizer (default: the tiny one) with all special tokens of a family."""
    tokenizer = tiny_tokenizer(None) if tokenizer is None else tokenizer
    known = tokenizer.get_vocab()
    missing = [token for token in TOKENS[family].split() if token not in known]
    tokenizer.add_special_tokens({"additional_special_tokens": missing})
    if family in _ENDS:
        tokenizer.eos_token = _ENDS[family]
    if family.startswith("deepseek"):
        tokenizer.bos_token, tokenizer.eos_token = TOKENS[family].split()[:2]
    if family in _BEGINS:
        tokenizer.bos_token = _BEGINS[family]
    return tokenizer
