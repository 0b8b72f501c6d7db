"""The `turntree` command: the composition root. Every sub-command is thin and calls one stage."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

# One OpenMP thread until the model's size is known (`stages.policy`). Set before torch is loaded. A number that the
# user has set stays the upper limit.
os.environ.setdefault("TURNTREE_THREADS", os.environ.get("OMP_NUM_THREADS", "0"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import click

from turntree import __version__
from turntree.cli import check, config, logs, pipeline, results, serving, traces
from turntree.core import parts
from turntree.core.errors import TurntreeError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Agentic RL post-training that pays only for turns that teach.

    The path from traces to a better policy: traces, sft, profile, select, train, evaluate, report.
    """


for _command in (
    *(traces.traces, pipeline.sft, pipeline.profile, pipeline.rescore, pipeline.select),
    *(pipeline.train, pipeline.plan, pipeline.export, results.experiment, results.evaluate),
    *(logs.gate, serving.gateway, logs.audit, serving.models, serving.serve, check.check, check.verifier),
    *(results.report, results.quickstart, config.config),
):
    cli.add_command(_command)
for _point in parts.entry_points("turntree.commands"):  # of the worlds, or of a package of one's own
    cli.add_command(_point.load(), _point.name)


DEBUG = "TURNTREE_DEBUG"  # set to anything: tracebacks are shown


class Terminated(KeyboardInterrupt):
    """SIGTERM, which a cluster sends some seconds before it kills: it ends a command as Ctrl-C does."""


@contextlib.contextmanager
def _termination() -> Iterator[None]:
    """While the block lasts, SIGTERM raises `Terminated`. Repeats within a second are ignored: senders such as
    `timeout` signal a process and its group, and the second one would break off the cleaning up after the first."""
    last = float("-inf")

    def stop(number: int, frame: object) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > 1:
            raise Terminated

    try:
        replaced = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: signals are for whoever called
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, replaced)


@_termination()
def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Bad input ends in one line on standard error and exit code 2, a defect of turntree in one
    line and exit code 70 (the traceback where `TURNTREE_DEBUG` is set), an interrupt in exit code 130, SIGTERM in
    143."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal does not know must not end a command
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        cli.main(args=arguments, prog_name="turntree", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as shown:
        print(shown.ctx.get_help())
    except click.ClickException as error:
        _fail(error.format_message())
    except TurntreeError as error:
        _fail(str(error))
    except OSError as error:
        _fail(_of_own_part(error) or _of_system(error))
    except (KeyboardInterrupt, click.Abort) as error:
        again = "give the same command again: sft, train, profile, rescore, record, experiment, quickstart go on"
        print(f"turntree: interrupted; finished files are complete; {again}", file=sys.stderr)
        stopped = isinstance(error.__cause__ or error, Terminated)  # click wraps the interrupt
        sys.exit(128 + (signal.SIGTERM if stopped else signal.SIGINT))
    except BaseException as error:
        known = _of_own_part(error) or _of_device(error) or _of_extra(error)
        if isinstance(error, SystemExit) and not known:
            raise  # a command's own code
        _fail(known or _of_defect(error), code=2 if known else 70)  # EX_SOFTWARE of sysexits.h


def _fail(message: str, code: int = 2) -> None:
    if os.environ.get(DEBUG):
        traceback.print_exc()
    print("turntree: error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)


def _of_system(error: OSError) -> str:
    """The system's error with the file that it is about."""
    if error.strerror is None:
        return f"{type(error).__name__}: {error}"
    name = error.filename2 or error.filename  # of a renaming, where to
    return error.strerror if name is None else f"{name}: {error.strerror}"


def _of_own_part(error: BaseException) -> str | None:
    """Where a part of the user raised this error; None unless its frame is the innermost of ours and the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if parts.is_brought(f.filename) or parts.is_ours(f.filename)), None)
    if last is None or not parts.is_brought(last.filename):
        return None
    said = f"{type(error).__name__}: {error}"[:300]
    return f"{last.filename}:{last.lineno}: {last.name} raised {said}; {DEBUG}=1 shows how it was called"


TRAIN = frozenset({"torch", "transformers", "tokenizers", "safetensors", "packaging", "pydantic", "matplotlib"})


def _of_extra(error: BaseException) -> str | None:
    """Which extra a command lacks, of a package that an installation without it does not have."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"this command needs the package {name}; pip install 'turntree[train]'" if name in TRAIN else None


def _of_device(error: BaseException) -> str | None:
    """Where a GPU's memory was too small: torch's error, by its name, because torch may not be loaded."""
    if type(error).__name__ != "OutOfMemoryError":
        return None
    less = "device.gradient_checkpointing=true, less train.max_tokens, sft.max_tokens or device.engine.max_batch_rows"
    return f"the device's memory is too small: {str(error)[:200]}; --set {less}"


def _of_defect(error: BaseException) -> str:
    """One line for an unexpected error: what, where, and what to do."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if parts.is_ours(frame.filename)]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}{where}" + (f": {text[:300]}" if text else "")
    return f"turntree did not expect this ({what}); please report it, with what {DEBUG}=1 shows"


if __name__ == "__main__":
    main()
