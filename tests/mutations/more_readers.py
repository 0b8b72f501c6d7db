"""The readers of what turntree writes for itself, and of files in the formats of other libraries."""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stored_sessions import ROWS, write_session
from tiny_models import save_tiny_checkpoint, tiny_model


def copied(make: Callable[[Path], Path]) -> Callable[[Path], None]:
    """A good file that is made inside a folder of its own."""

    def good(path: Path) -> None:
        place = path.parent / f"{path.name}.made"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        shutil.copyfile(make(place), path)

    return good


# the gateway


def session_file(path: Path) -> None:
    write_session(path.parent, ROWS).replace(path)


def _stored(path: Path, where: str) -> Any:
    from turntree.gateway.store import SessionStore

    folder = path.parent / "store"
    shutil.rmtree(folder, ignore_errors=True)
    store = SessionStore(folder)
    shutil.copyfile(path, store.path("s", where))
    return store


def read_closed_session(path: Path) -> object:
    """As a merge reads it, into trees on disk and back."""
    from turntree.core.scalars import number
    from turntree.gateway.store import CLOSED
    from turntree.logs.trees import read
    from turntree.stages.gateway import write_trees

    _stored(path, CLOSED)
    folder = path.parent / "gate"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(path.parent / "store", folder / "sessions")
    write_trees(folder, path.with_name("trees.out"))
    verdicts = [one for kept in read(path.with_name("trees.out")) for one in kept.rewards.verdicts.values()]
    return [number(verdict.reward) for verdict in verdicts if verdict.reward is not None]


def read_open_session(path: Path) -> object:
    """As a gateway goes on with it: a file that cannot be read is set aside, and nothing is raised."""
    from turntree.core.errors import InputError
    from turntree.gateway.config import ServingConfig
    from turntree.gateway.sessions import Sessions

    store = _stored(path, "open")
    driver: Any = SimpleNamespace(engine=SimpleNamespace(max_context=64))
    sessions = Sessions(driver, SimpleNamespace(thoughts="keep"), ServingConfig(), store=store)  # type: ignore[arg-type]
    sessions.restore()
    if sessions.ledger["damaged"]:
        raise InputError("was set aside", path=path)
    return [sessions.get(name).value() for name in store.sessions()]


# checkpoints


def trainers() -> Any:
    from turntree.train.optimizer import Optimizer, OptimizerConfig
    from turntree.train.trainer import Trainer, Trainers

    model = tiny_model(vocab_size=40, layers=1).requires_grad_(True)
    return Trainers(Trainer(model, None, Optimizer(model.parameters(), OptimizerConfig(), 10)))


def _checkpoint(folder: Path) -> Path:
    from turntree.train.checkpoints import CheckpointConfig, Checkpoints

    Checkpoints(folder, CheckpointConfig()).save(3, trainers(), {"place": [1, 2], "pool": {"a": 0.5}})
    return folder / "step-00000003"


def checkpoint_state(folder: Path) -> Path:
    return _checkpoint(folder) / "state.json"


def checkpoint_tensors(folder: Path) -> Path:
    return next(_checkpoint(folder).glob("*.safetensors"))


@functools.cache
def _into() -> Any:
    return trainers()


def restoring(make: Callable[[Path], Path], *, sealed: bool = True) -> Callable[[Path], object]:
    """`sealed` False: the checksums are made to fit, as a program would that writes checkpoints of its own."""

    def read(path: Path) -> object:
        from turntree.run.identity import file_digest
        from turntree.train.checkpoints import CheckpointConfig, Checkpoints, _digest

        made = path.parent / f"{path.name}.made"
        place = next(made.glob(f"step-*/{'state.json' if make is checkpoint_state else '*.safetensors'}"))
        shutil.copyfile(path, place)
        if not sealed:
            state = place.with_name("state.json")
            try:
                held = json.loads(state.read_bytes())
                held.pop("digest", None)
                if make is checkpoint_tensors:
                    held["files"] = {place.name: file_digest(place)}
                state.write_text(json.dumps({**held, "digest": _digest(held)}))
            except (ValueError, AttributeError, RecursionError, TypeError):
                pass
        return Checkpoints(made, CheckpointConfig()).restore(_into())

    return read


def model_file(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> Path:
        base = save_tiny_checkpoint(folder / "base")
        if name.startswith("adapter"):
            from turntree.engine.checkpoint import load_model, save_model
            from turntree.engine.tokenizer import load_tokenizer
            from turntree.train.lora import LoRAConfig, add_adapter

            model = load_model(base)
            add_adapter(model, LoRAConfig(rank=2))
            save_model(model, load_tokenizer(base), folder / "model")
        else:
            shutil.copytree(base, folder / "model")
        return folder / "model" / name

    return copied(make)


def loading(name: str) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        from turntree.engine.checkpoint import load_model
        from turntree.engine.hub import context_of
        from turntree.engine.tokenizer import load_tokenizer
        from turntree.render.choice import choose

        folder = path.parent / f"{path.name}.made" / "model"
        shutil.copyfile(path, folder / name)
        if "token" in name:
            return choose(load_tokenizer(folder), folder)
        return load_model(folder), context_of(folder) if (folder / "config.json").exists() else 0

    return read


def _model(name: str) -> tuple[Callable[[Path], None], Callable[[Path], object]]:
    return model_file(name), loading(name)


# indexes and tables


def search_index(path: Path) -> None:
    from turntree_worlds.documents import Document
    from turntree_worlds.search import build_index

    build_index([Document(f"d{i}", f"Ada {i}", f"Ada number {i} was born in {1800 + i}.") for i in range(40)], path)


def read_search_index(path: Path) -> object:
    from turntree_worlds.search import SearchIndex

    with SearchIndex(path) as index:
        return index.search("ada born"), index.page("Ada 7"), index.search("1815")


def judge_cache(path: Path) -> None:
    from turntree.verify.asking import _Cache

    path.unlink(missing_ok=True)
    cache = _Cache(path)
    cache.put("a question", "yes")
    cache.close()


def read_judge_cache(path: Path) -> object:
    from turntree.verify.asking import _Cache

    cache = _Cache(path)
    try:
        answers = cache.get("a question"), cache.get("another")
        assert all(isinstance(answer, str | None) for answer in answers)
        cache.put("new", "no")
        return answers
    finally:
        cache.close()


def parquet(rows: list[dict[str, Any]]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="zstd")

    return write


COMPLETIONS = [
    {
        "step": 1,
        "prompt": f"q{i // 2}",
        "completion": "a",
        "accuracy": float(i % 2),
        "advantage": 1.0 if i % 2 else -1.0,
    }
    for i in range(4)
]
QUESTIONS: list[dict[str, Any]] = [
    {"question": f"Who is {i}?", "answer": "Ada", "id": str(i), "hops": 2} for i in range(5)
]


# folders, archives and settings


def tree_rows(path: Path) -> None:
    from turntree.gateway.store import CLOSED
    from turntree.stages.gateway import write_trees

    folder = path.parent / "good"
    write_session(folder / "sessions", ROWS, CLOSED)
    write_trees(folder, path)


def read_tree_rows(path: Path) -> object:
    from turntree.logs.trees import read

    return [(kept.group(), json.dumps(kept.to_json(), allow_nan=False)) for kept in read(path)]


def metric_rows(path: Path) -> None:
    rows = [{"step": i, "loss": 0.5, "reward_mean": 0.25, "trained_tokens": 10, "seconds": 0.5} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_metric_rows(path: Path) -> object:
    from turntree.report.read import read_metrics
    from turntree.run.folder import RunDirectory

    run = RunDirectory(path.parent)
    run._metrics = path
    return run.metrics(), read_metrics(path)


def trace_archive(path: Path) -> None:
    import io
    import tarfile

    from mutations.readers import chat_rows

    chat_rows(path.with_name("inside.jsonl"))
    data = path.with_name("inside.jsonl").read_bytes()
    with tarfile.open(path, "w") as archive:
        for name in ("a/rows.jsonl", "b/rows.jsonl", "c/notes.md"):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("d.jsonl")
        link.type, link.linkname = tarfile.LNKTYPE, "a/rows.jsonl"
        archive.addfile(link)


def read_trace_archive(path: Path) -> object:
    from turntree.traces.sources import source_files, source_rows

    ignored = Counter[str]()
    return [row for file in source_files(path, ignored) for row in source_rows(file.path)]


def settings_table(path: Path) -> None:
    path.write_text(
        'seed = 1\n[train]\nsteps = 3\n[[criteria]]\ntext = "a"\nname = "n"\nweight = 1.0\n', encoding="utf-8"
    )


def read_settings_table(path: Path) -> object:
    from turntree.run.jsonl import read_toml
    from turntree.verify.rubric import read_rubric

    table = read_toml(path)
    only = path.with_name("rubric.toml")
    only.write_bytes(path.read_bytes().partition(b"[[")[2].join([b"[[", b""]))
    return table, read_rubric(only)


_BINARY: dict[str, Any] = {"structured": False}
_BESIDE: dict[str, Any] = {"names_file": False}  # the error names the file that is read in its place
_TENSORS = {**_BINARY, **_BESIDE}


def readers() -> Any:
    from mutations import readers as found

    return found


MORE: list[tuple[str, Callable[[Path], Any], Callable[[Path], object], dict[str, Any]]] = [
    ("closed.session.jsonl", session_file, read_closed_session, _BESIDE),
    ("open.session.jsonl", session_file, read_open_session, {}),
    ("checkpoint.json", copied(checkpoint_state), restoring(checkpoint_state), _BESIDE),
    ("resealed.json", copied(checkpoint_state), restoring(checkpoint_state, sealed=False), _BESIDE),
    ("checkpoint.safetensors", copied(checkpoint_tensors), restoring(checkpoint_tensors), _TENSORS),
    ("resealed.safetensors", copied(checkpoint_tensors), restoring(checkpoint_tensors, sealed=False), _TENSORS),
    ("config.model.json", *_model("config.json"), _BESIDE),
    ("model.safetensors", *_model("model.safetensors"), _TENSORS),
    ("tokenizer.json", *_model("tokenizer.json"), _BESIDE),
    ("tokenizer_config.json", *_model("tokenizer_config.json"), _BESIDE),
    ("adapter_config.json", *_model("adapter_config.json"), _BESIDE),
    ("index.sqlite", search_index, read_search_index, _BINARY),
    ("judge.sqlite", judge_cache, read_judge_cache, _BINARY),
    ("completions_1.parquet", parquet(COMPLETIONS), lambda path: readers().read_log(path), _BINARY),
    ("questions.parquet", parquet(QUESTIONS), lambda path: readers().read_question_rows(path), _BINARY),
    ("trees.jsonl", tree_rows, read_tree_rows, {}),
    ("metrics.jsonl", metric_rows, read_metric_rows, {}),
    ("logs.tar", trace_archive, read_trace_archive, _BINARY),
    ("logs.tar.gz", trace_archive, read_trace_archive, {**_BINARY, "packed": "gz"}),
    ("settings.toml", settings_table, read_settings_table, _BINARY),
]  # fmt: skip
