"""`turntree gateway`: an OpenAI-compatible server for agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from turntree.cli.common import finish, out_option
from turntree.cli.options import StageCommand


@click.command(
    "gateway",
    cls=StageCommand,
    config="turntree.stages.gateway:GatewayConfig",
    options={
        "--model": "model",
        "--host": "host",
        "--port": "port",
        "--max-tokens": "serving.sampling.max_tokens",
        "--temperature": "serving.sampling.temperature",
        "--parameters": "serving.parameters",
        "--thoughts": "serving.thoughts",
        "--endpoint": "endpoint.url",
        "--tokenizer": "endpoint.tokenizer",
        "--engine": "device.engine",
        "--renderer": "device.renderer",
    },
    short_help="Serve a policy to agents; their calls become rollout trees.",
)
@click.option(
    "--merge", type=click.Path(path_type=Path), help="Merge the sessions that are over into this trees file, and end."
)
@out_option("The folder of sessions, from which a gateway that is started again goes on.")
def gateway(config: Any, out: Path, merge: Path | None, json_path: str | None) -> None:
    """An OpenAI-compatible server in front of a policy, for agents of any framework.

    Open a session with POST /sessions under the gateway's key; it answers with the key and base URL for the agent, and
    with where to post its reward (docs/how-to/gateway.md).

    \b
    Example: turntree gateway --model models/mine --out runs/gateway --port 8080

    \b
    Example: turntree gateway --out runs/gateway --merge runs/trees.jsonl
    """
    from turntree.report.wording import plural
    from turntree.stages.gateway import run_gateway, write_trees

    if merge is not None:
        result = write_trees(out, merge)
        figures = f"{plural(result.get('sessions', 0), 'session')}, {plural(result.get('calls', 0), 'call')}"
        finish(result, json_path, [f"{plural(result['trees'], 'tree')} of {figures} -> {merge}"])
        return
    result = run_gateway(config, out)
    finish(result, json_path, [", ".join(f"{count} {name}" for name, count in result.items() if name != "url")])
