"""`turntree index`: search indexes over documents."""

from __future__ import annotations

from pathlib import Path

import click

from turntree.cli.common import finish, json_option
from turntree.cli.options import OutputCommand
from turntree.core.errors import InputError


@click.group(short_help="Make a search index of documents.")
def index() -> None:
    """Search indexes for the `search` tool."""


@index.command("build", cls=OutputCommand, short_help="Index a corpus (JSONL, text files, or a folder).")
@click.argument("documents", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The index file to write.")
@click.option("--overwrite", is_flag=True, help="Replace the file that lies there already.")
@json_option
def build(documents: Path, out: Path, overwrite: bool, json_path: str | None) -> None:
    """Index DOCUMENTS: JSONL rows (`text`, optional `id` and `title`), text files, or a folder of both.

    \b
    Example: turntree index build corpus.jsonl --out runs/index.db
    """
    from turntree_worlds.documents import read_documents
    from turntree_worlds.search import build_index

    if out.exists() and not overwrite:
        raise InputError("is there already", path=out, hint="choose another --out, or add --overwrite")
    result = {**build_index(read_documents(documents), out), "bytes": out.stat().st_size}
    finish(result, json_path, [f"{result['documents']} documents (hash {result['hash']}) -> {out}"])
