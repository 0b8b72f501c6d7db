"""`turntree gateway`: an OpenAI-compatible server for agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from turntree.cli.common import finish, out_option
from turntree.cli.options import Read, StageCommand, short
from turntree.core.errors import InputError

_FILE = click.Path(path_type=Path)


@click.command(
    "gateway",
    cls=StageCommand,
    config="turntree.stages.gateway:GatewayConfig",
    options={
        **short(
            "model host port serving.sampling.max_tokens serving.sampling.temperature "
            "serving.thoughts endpoint=endpoint.url endpoint.tokenizer upstream=upstream.url"
        ),
        "--redact": Read("upstream.redact", str, "REGEX", repeated=True),
        **short("carrier=device.carrier device.engine device.renderer"),
    },
    short_help="Serve a policy to agents; their calls become rollout trees.",
)
@click.option("--merge", type=_FILE, help="Merge the sessions that are over into this file of trees, and end.")
@click.option("--traces", type=_FILE, help="With --upstream: the file of traces to append to.")
@out_option("The folder of sessions, from which a gateway that is started again goes on.", folder=True, required=False)
def gateway(config: Any, out: Path | None, merge: Path | None, traces: Path | None, json_path: str | None) -> None:
    """An OpenAI-compatible server in front of a policy, for agents of any framework.

    Open a session with POST /sessions under the gateway's key; it answers with the key and base URL for the agent, and
    with where to post its reward (docs/how-to/gateway.md). With --upstream it samples nothing and writes traces of what
    agents do at another server.

    \b
    Example: turntree gateway --model models/mine --out runs/gateway --port 8080

    \b
    Example: turntree gateway --out runs/gateway --merge runs/trees.jsonl

    \b
    Example: turntree gateway --upstream https://api.example.com/v1 --traces traces.jsonl --redact "[0-9]{16}"
    """
    from turntree.report.wording import plural
    from turntree.stages.gateway import run_gateway, run_upstream, write_trees

    if (traces is None) != (config.upstream is None):
        raise InputError("go together", field="--upstream and --traces", hint="give both, or neither")
    if traces is not None:
        if out is not None or merge is not None:
            hint = "traces go to --traces; leave it out"
            raise InputError("does nothing with --upstream", field="--merge" if merge else "--out", hint=hint)
        result, lines = run_upstream(config, traces), []
    elif out is None:
        raise InputError("is missing", field="--out", hint="name a folder")
    elif merge is not None:
        result = write_trees(out, merge)
        figures = f"{plural(result.get('sessions', 0), 'session')}, {plural(result.get('calls', 0), 'call')}"
        lines = [f"{plural(result['trees'], 'tree')} of {figures} -> {merge}"]
    else:
        result, lines = run_gateway(config, out), []
    finish(result, json_path, lines or [f"{name}: {count}" for name, count in result.items()])
