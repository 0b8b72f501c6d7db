"""Policies on disk: ordinary checkpoint folders (config.json, safetensors, tokenizer with its chat template), and
PEFT's adapter folders, which name the folder of their base."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import peft as peft_integration

from turntree.core.errors import ConfigError, InputError, first_line
from turntree.core.foreign import package
from turntree.core.progress import notice
from turntree.engine.tokenizer import ADAPTER, GET_FOLDER, base_of, checked_folder, quiet
from turntree.run.files import replacing_folder

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SCALES = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")  # of an adapter
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def load_model(path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """The causal language model in folder `path`, in eval mode, with every weight taken from the folder.

    A folder that PEFT wrote gives the base that it names, with the trainable adapter in place. `dtype` is "float32",
    "bfloat16" or "auto" (as saved); adapters are float32. Raises `InputError` in one line for a folder that is
    missing, incomplete or unreadable, or lacks weights of its config; weights beyond these are named in a warning.
    """
    folder = checked_folder(path)
    if (folder / ADAPTER).is_file():
        return _load_adapted(folder, dtype=dtype, device=device)
    if dtype not in (*_DTYPES, "auto"):
        raise ConfigError(f"{dtype!r} is not allowed", field="dtype", hint="use float32, bfloat16 or auto")
    if not (folder / "config.json").is_file():
        raise InputError("has no config.json", path=folder, hint=GET_FOLDER)
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise InputError(f"has no weights ({' or '.join(_WEIGHTS)})", path=folder, hint=GET_FOLDER)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            reads_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
            known: Any = MODEL_FOR_CAUSAL_LM_MAPPING if reads_text else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            loaded: Any = (AutoModelForCausalLM if reads_text else AutoModelForImageTextToText).from_pretrained(
                folder,
                config=config,
                dtype=_DTYPES.get(dtype, "auto"),
                attn_implementation="sdpa" if known[type(config)]._supports_sdpa else "eager",  # not the folder's
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # the boundary to foreign files and foreign code
        raise InputError(f"cannot be loaded as a causal language model ({first_line(error)})", path=folder) from error
    model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    absent = sorted({str(key) for kind in ("missing_keys", "mismatched_keys") for key in report[kind]})
    if absent:
        raise InputError(
            f"lacks {len(absent)} weights of its config, among them {absent[0]}", path=folder, hint="save it again"
        )
    if beyond := sorted(map(str, report["unexpected_keys"])):
        notice(
            f"warning: {folder}: {len(beyond)} weights have no place in its config and are not used: {beyond[0]}, ..."
        )
    try:
        return cast(Any, model).to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"cannot put the model on {device!r} ({first_line(error)})", field="device") from error


def check_peft() -> None:
    """Raise `InputError` where PEFT is missing, `ConfigError` where it is older than Transformers wants, which loads an
    adapter all the same and fails when it is saved."""
    package("peft", "lora", "device.lora")
    wanted, found = str(getattr(peft_integration, "MIN_PEFT_VERSION", "0")), importlib.metadata.version("peft")
    if Version(found) < Version(wanted):
        problem = f"Transformers {transformers.__version__} wants PEFT {wanted}, and {found} is here"
        hint = f"pip install 'peft>={wanted}', or an older Transformers: pip install 'transformers<5.24'"
        raise ConfigError(problem, field="device.lora", hint=hint)


def _load_adapted(folder: Path, *, dtype: str, device: str) -> PreTrainedModel:
    check_peft()
    base = base_of(folder)
    model = load_model(base, dtype=dtype, device=device)
    try:
        with quiet():
            found = model.load_adapter(str(folder), is_trainable=True)
    except Exception as error:  # the boundary to foreign files and foreign code
        raise InputError(f"cannot be loaded as an adapter of {base} ({first_line(error)})", path=folder) from error
    kinds = (found.missing_keys, found.mismatched_keys, found.unexpected_keys)  # the last would be dropped
    if wrong := sorted(str(key) for keys in kinds for key in keys):
        raise InputError(f"does not fit {base}: {len(wrong)} weights differ, among them {wrong[0]}", path=folder)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.eval()


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Write a checkpoint folder that `load_model` and `load_tokenizer` read back, and return it. Of a model with an
    adapter only the adapter is written, in PEFT's format."""
    target = Path(folder).absolute()
    if target.exists() and not target.is_dir():
        raise InputError("is a file", path=folder, hint="name a folder for the checkpoint")
    with replacing_folder(target) as fresh, quiet():
        write_weights(model, fresh)
        tokenizer.save_pretrained(fresh)
    return target


def policy_hash(model: PreTrainedModel) -> str:
    """A hash of these exact weights: 32 hexadecimal digits over name, dtype, shape and bytes of every parameter and
    saved buffer, and the settings that users edit beside them: positions (RoPE, the window), an adapter's scale.

    Tied weights count once, under their first name; the device does not matter. Saving and loading in the same
    dtype keeps the hash.
    """
    digest = hashlib.blake2b(digest_size=16)
    kept = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]  # a router's bias
    for name, parameter in [*sorted(model.named_parameters(remove_duplicate=True)), *sorted(buffers)]:
        digest.update(f"{name}|{parameter.dtype}|{tuple(parameter.shape)}\n".encode())
        values = parameter.detach().to("cpu").contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    config = model.config.get_text_config()
    beside: dict[str, Any] = {name: getattr(config, name, None) for name in ("rope_parameters", "sliding_window")}
    for name, adapter in getattr(model, "peft_config", {}).items():
        beside[f"adapter {name}"] = {key: getattr(adapter, key, None) for key in _SCALES}
    digest.update(json.dumps(beside, sort_keys=True).encode())
    return digest.hexdigest()


def write_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write the weights and their config into an empty folder: of a model with an adapter, only that."""
    if getattr(model, "_hf_peft_config_loaded", False):
        _write_adapter(model, folder)
    else:
        model.save_pretrained(folder)
    share(folder)


def share(folder: Path) -> None:
    """Give weights the mode of the config beside them: safetensors (0.8) lets their owner alone read them, and a server
    may run as another user."""
    usual = next(folder.glob("*config.json")).stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(usual)


def _write_adapter(model: PreTrainedModel, folder: Path) -> None:
    """PEFT writes a set of module names in arbitrary order; sort it so that equal adapters give equal files."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Could not find a config file")  # of a base on the Hub, when offline
        model.save_pretrained(folder)
    config = json.loads((folder / ADAPTER).read_text())
    if isinstance(config["target_modules"], list):  # else one regular expression
        config["target_modules"] = sorted(config["target_modules"])
    if (base := Path(config["base_model_name_or_path"])).exists():  # else a name on the Hub
        config["base_model_name_or_path"] = str(base.resolve())
    (folder / ADAPTER).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
