"""`turntree serve`: a vLLM server for the engine `vllm`."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import click

from turntree.cli.common import finish
from turntree.cli.options import StageCommand, short


@click.command(
    cls=StageCommand,
    config="turntree.engine.vllm_server:ServeConfig",
    options=short("model host port venv dtype max_context requests lora_rank"),
    short_help="A vLLM server to sample from.",
)
def serve(config: Any, json_path: str | None) -> None:
    """Print the options that a run with --engine vllm needs, and become the vLLM server that it samples from. Ends with
    Ctrl-C. A server that you start again gets the run's weights from the run.

    vLLM lies in a virtual environment of its own (--venv), because it pins packages. Whoever asks it needs its key:
    that in OPENAI_API_KEY, which the run sends too, else one that is made and printed.

    \b
    Example: turntree serve --model models/mine --port 8000
             turntree train online --model models/mine --engine vllm --set device.engine.url=http://127.0.0.1:8000
    """
    from turntree.engine.tokenizer import base_of
    from turntree.engine.vllm_server import KEY, command, rank_of, settings
    from turntree.stages.policy import resolve

    folder = resolve(config.model)
    if rank := rank_of(folder):  # of an adapter its base is served, and the run sends the adapter
        folder, config = Path(base_of(folder)), dataclasses.replace(config, lora_rank=max(rank, config.lora_rank))
    words, variables = command(config, folder)
    made = None if os.environ.get(KEY) else variables["VLLM_API_KEY"]
    options = settings(config, adapted=rank > 0)
    result = {"url": config.url, "options": options, "pid": os.getpid(), "key": made}
    lines = [f"{folder} at {config.url}, once vLLM says that it has started; sample from it with", f"  {options}"]
    lines += [f"under its key: export {KEY}={made}"] if made else [f"under the key in {KEY}"]
    finish(result, json_path, lines)
    sys.stdout.flush()
    os.execve(words[0], words, variables)
