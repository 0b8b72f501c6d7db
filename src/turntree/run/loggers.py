"""Loggers: copy the metrics of a run to another tool (TensorBoard, trackio, W&B, or your own).

A logger (`core.parts`, kind `loggers`) is built by a factory with the options that its configuration gives, and with
`run` (`RunInfo`) where it declares that. `metrics.jsonl` stays the reference:

- It gets every row after it was written, as numbers by flat names (`timing/seconds`), and never a row twice. The last
  step that each logger got is kept in `loggers.json` of the run directory, and written before the logger is called. A
  resumed run sends the rows after that step, beginning with those already in `metrics.jsonl`, so a logger that is added
  later gets the whole curve. (A process that is killed in between loses one row in that logger only.)
- A logger that raises (or exits) is reported once and switched off. Training goes on.
- No result depends on a logger, so the loggers may differ when a run is resumed.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.foreign import needs, reason_of
from turntree.core.progress import notice
from turntree.run import files
from turntree.run.folder import LOGGER_MARKS, RunDirectory


class Logger(Protocol):
    """What a factory of loggers builds."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step. Steps increase."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that a logger follows. `config` is its resolved configuration, as in `config.json`. `id` identifies the
    run and stays the same when it is resumed; `resumed` then says that this logger has logged it before."""

    name: str
    folder: Path
    stage: str
    config: Mapping[str, Any]
    id: str
    resumed: bool


def check(named: Sequence[Part]) -> None:
    """Raise `InputError` or `ConfigError` for a logger that cannot be built. Call it before anything is loaded."""
    for number, part in enumerate(named):
        parts.resolve("loggers", part, field=f"loggers.{number}")
        if part.name in {other.name for other in named[:number]}:
            raise InputError(f"{part.name!r} is named twice", field="logger", hint="name each logger once")


def flat(row: Mapping[str, Any], above: str = "") -> dict[str, float]:
    """The numbers of a metrics row under flat names such as `timing/seconds`; booleans become 1 or 0, the step is left
    out."""
    found: dict[str, float] = {}
    for key, value in row.items():
        name = above + (key or "_")
        if isinstance(value, Mapping):
            found |= flat(value, name + "/")
        elif isinstance(value, (bool, int, float)) and name != "step":
            found[name] = float(value) if isinstance(value, bool) else value
    return found


@contextlib.contextmanager
def following(run: RunDirectory, named: Sequence[Part]) -> Iterator[None]:
    """Send the loggers the rows of `run` that they do not have, then every row that it logs while the block lasts.
    Enter it after the logs have been cut back to the checkpoint that the run resumes from."""
    if not named:
        yield
        return
    with contextlib.ExitStack() as stack:
        followers = _Followers(run, named)
        stack.callback(followers.close)
        for row in run.metrics():
            followers.tell(row)
        run.listeners.append(followers.tell)
        stack.callback(run.listeners.remove, followers.tell)
        yield


class _Followers:
    """The working loggers of one run, and the last step of each."""

    def __init__(self, run: RunDirectory, named: Sequence[Part]) -> None:
        self._path = run.path / LOGGER_MARKS
        held = files.read_json(self._path) if self._path.exists() else {"id": uuid.uuid4().hex[:12], "steps": {}}
        self._id, self._steps = str(held["id"]), dict(held["steps"])
        self._live: dict[str, Logger] = {}
        for part in named:
            self._guarded(part.name, lambda part=part: self._build(run, part))
        for name, logger in self._live.items():
            _require_logger(name, logger)

    def _build(self, run: RunDirectory, part: Part) -> None:
        info = RunInfo(
            name=run.path.resolve().name,
            folder=run.path.resolve(),
            stage=run.identity["stage"],
            config=run.identity["config"],
            id=self._id,
            resumed=part.name in self._steps,
        )
        self._live[part.name] = parts.build("loggers", part, run=info)

    def tell(self, row: Mapping[str, Any]) -> None:
        step, metrics = int(row["step"]), flat(row)
        told = {name: logger for name, logger in self._live.items() if self._steps.get(name, -1) < step}
        if not told:
            return
        self._steps |= dict.fromkeys(told, step)
        files.write_json(self._path, {"id": self._id, "steps": self._steps})
        for name, logger in told.items():
            self._guarded(name, lambda logger=logger: logger.log(dict(metrics), step))

    def close(self) -> None:
        for name, logger in list(self._live.items()):
            self._guarded(name, logger.close)

    def _guarded(self, name: str, call: Callable[[], object]) -> None:
        """Call foreign code: an exception switches the logger off."""
        try:
            call()
        except BaseException as error:  # the boundary to foreign code
            self._live.pop(name, None)
            said = reason_of(error)
            notice(f"warning: logger {name!r} is switched off, it raised {said} (metrics.jsonl has every figure)")


def _require_logger(name: str, logger: object) -> None:
    """Raise `InputError` for what could not log."""
    verbs: list[Any] = [getattr(logger, verb, None) for verb in ("log", "close")]
    if not all(map(callable, verbs)):
        problem = "which has no log and close"
    elif any(map(inspect.iscoroutinefunction, verbs)) or any(map(inspect.isgeneratorfunction, verbs)):
        problem = "which would log nothing: its log or close is asynchronous or a generator"
    else:
        return
    hint = "see turntree.run.loggers.Logger"
    raise InputError(f"{name!r} gave {type(logger).__name__}, {problem}", field="logger", hint=hint)


@needs("tensorboard", "tensorboard")
class TensorBoard:
    """Event files in `RUN/tensorboard` (`tensorboard --logdir RUN`); the configuration is a text."""

    def __init__(self, run: RunInfo) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]

        folder = run.folder / "tensorboard"
        if not run.resumed:  # of a run that was overwritten
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        self._writer = EventFileWriter(str(folder))
        if not run.resumed:
            self._add(text_pb("config", f"```\n{json.dumps(dict(run.config), indent=2)}\n```"), 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb  # pyright: ignore[reportMissingImports]

        for name, value in metrics.items():
            self._add(scalar_pb(name, float(value)), step)
        self._writer.flush()  # a killed run has sent what it logged

    def close(self) -> None:
        self._writer.close()

    def _add(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportMissingImports]

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


class _Tracked:
    """What W&B and trackio have in common: trackio speaks W&B's API."""

    _run: Any

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@needs("trackio", "trackio")
class Trackio(_Tracked):
    """A run of trackio in its own local folder (`trackio show`; `TRACKIO_DIR` moves it).

    Args:
        project: The project that the run belongs to.
        space_id: Publish it in this Space of Hugging Face.
    """

    def __init__(self, run: RunInfo, *, project: str = "turntree", space_id: str | None = None) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project,
            name=f"{run.name}-{run.id}",
            space_id=space_id,
            config=dict(run.config),
            resume="allow" if run.resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


@needs("wandb", "wandb")
class WandB(_Tracked):
    """A run of Weights & Biases in `RUN/wandb` (`wandb sync` uploads one that was offline).

    Args:
        project: The project that the run belongs to.
        mode: offline, online or disabled (default: `WANDB_MODE`, else offline).
    """

    def __init__(self, run: RunInfo, *, project: str = "turntree", mode: str | None = None) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=project,
            name=run.name,
            id=run.id,
            dir=str(run.folder),
            config=dict(run.config),
            job_type=run.stage,
            mode=mode or os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
