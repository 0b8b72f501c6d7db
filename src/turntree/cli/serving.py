"""`turntree models | gateway | serve`: folders that `--model` takes, and servers of what lies in them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import click

from turntree.cli.common import finish, json_option, out_option, overwrite_option
from turntree.cli.options import OutputCommand, Read, StageCommand, short
from turntree.core.errors import InputError

_FILE = click.Path(path_type=Path)


@click.group(short_help="Get an adapter from a server.")
def models() -> None:
    """Folders in Hugging Face format, which --model takes."""


@models.command("get", cls=OutputCommand, short_help="The adapter of a run, from its server.")
@click.argument("run", type=click.Path(path_type=Path))
@out_option("The folder to write.", folder=True)
@overwrite_option("Replace the model that lies there.")
@json_option
def get(run: Path, out: Path, overwrite: bool, json_path: str | None) -> None:
    """Write the adapter that a run with --carrier tinker trained, from its server (TINKER_BASE_URL), in PEFT's format.

    \b
    Example: turntree models get runs/online/model --out adapters/mine
    """
    from turntree.stages.tinker import get_adapter

    result = get_adapter(run, out, overwrite=overwrite)
    finish(result, json_path, [f"{result['parameters'] / 1e6:.1f} M parameters -> {out}"])


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
@click.argument("run", nargs=-1, metavar="[exec -- COMMAND]")
@click.option("--task", help="With exec: the task that the session is an attempt at.  [default: exec]")
@click.option("--ask", is_flag=True, help="With exec: ask at the end what the session is worth.")
@out_option("The folder of sessions, from which a gateway that is started again goes on.", folder=True, required=False)
def gateway(
    config: Any,
    run: tuple[str, ...],
    task: str | None,
    ask: bool,
    out: Path | None,
    merge: Path | None,
    traces: Path | None,
    json_path: str | None,
) -> None:
    """An OpenAI-compatible server in front of a policy, for agents of any framework.

    Open a session with POST /sessions under the gateway's key; it answers with the key and base URL for the agent, and
    with where to post its reward (docs/how-to/gateway.md). With --upstream it samples nothing and writes traces of what
    agents do at another server.

    \b
    Example: turntree gateway --model models/mine --out runs/gateway --port 8080

    exec runs one command at this terminal, as one session: the clients of OpenAI, Anthropic and LiteLLM find the server
    in their environment variables. Its reward is its exit code's (0: 1, else 0), or --ask.

    \b
    Example: turntree gateway exec --model Qwen/Qwen3-4B -- claude -p "Fix it"
             turntree gateway --out runs/gateway --merge runs/trees.jsonl
             turntree gateway --upstream https://api.example.com/v1 \\
                 --traces traces.jsonl --redact "[0-9]{16}"
    """
    from turntree.report.wording import plural
    from turntree.stages.gateway import run_command, run_gateway, run_upstream, write_trees

    if run:
        _check_command(run, {"--merge": merge, "--traces": traces, "--upstream": config.upstream})
        result = run_command(config, out or Path("runs/gateway"), run[1:], task or "exec", _asked if ask else None)
        worth = "no reward" if result["reward"] is None else f"reward {result['reward']:g}"
        lines = [f"{plural(result['calls'], 'call')}, {worth} ({result['reason']}) -> {result['path']}"]
        return finish(result, json_path, lines)
    if task is not None or ask:
        raise InputError("does nothing without exec", field="--task, --ask", hint="write gateway exec -- COMMAND")
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


def _asked() -> str:
    question = "What is this session worth (a number; nothing: no reward)"
    return click.prompt(question, default="", show_default=False)


def _check_command(run: tuple[str, ...], others: dict[str, Any]) -> None:
    hint = "write turntree gateway exec -- COMMAND"
    if run[0] != "exec":
        raise InputError(f"{run[0]!r} is not an argument", field="exec", hint=hint)
    if len(run) == 1:
        raise InputError("names no command", field="exec", hint=hint)
    if idle := [name for name, value in others.items() if value is not None]:
        raise InputError("does nothing with exec", field=", ".join(idle), hint="leave it out")


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
             turntree train online --model models/mine --engine vllm \\
                 --set device.engine.url=http://127.0.0.1:8000
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
    os.execve(words[0], words, variables)
