"""`turntree serve`: a vLLM server for the engine `vllm`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from turntree.cli.common import finish
from turntree.cli.options import StageCommand, short


@click.command(
    cls=StageCommand,
    config="turntree.engine.vllm_server:ServeConfig",
    options=short("model host port venv dtype max_context requests lora_rank kv_gib"),
    short_help="A vLLM server to sample from.",
)
@click.option("--log", type=click.Path(path_type=Path), help="Write what the server says here, not to this terminal.")
def serve(config: Any, log: Path | None, json_path: str | None) -> None:
    """Start a vLLM server for a run with --engine vllm, print the options that the run needs, and keep it alive: a
    server that dies or hangs is started again, and the run sends it its weights. Ends with Ctrl-C.

    vLLM lies in a virtual environment of its own (--venv), because it pins packages. Whoever asks it needs its key:
    that in OPENAI_API_KEY, which the run sends too, else one that is made and printed.

    \b
    Example: turntree serve --model models/mine --port 8000
             turntree train online --model models/mine --engine vllm --set device.engine.url=http://127.0.0.1:8000
    """
    from turntree.engine.checkpoint import base_of
    from turntree.engine.vllm_server import KEY, rank_of, serving, settings
    from turntree.stages.policy import resolve

    folder = resolve(config.model)
    if rank := rank_of(folder):  # of an adapter its base is served, and the run sends the adapter
        folder, config = Path(base_of(folder)), dataclasses.replace(config, lora_rank=max(rank, config.lora_rank))
    with serving(config, folder, log) as server:
        made = server.key if server.made_key else None
        result = {"url": server.url, "options": settings(config, adapted=rank > 0), "pid": server.pid, "key": made}
        lines = [f"serving {folder} at {server.url}; sample from it with", f"  {result['options']}"]
        lines += [f"under its key: export {KEY}={made}"] if made else [f"under the key in {KEY}"]
        finish(result, json_path, lines)
        sys.stdout.flush()
        server.keep(lambda text: print(f"turntree: {text}", file=sys.stderr, flush=True))
