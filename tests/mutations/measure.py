"""Mutate every reader's input and count what became of it.

PYTHONPATH=tests python -m mutations.measure [COUNT[:SEED]] [NAME ...]

COUNT mutants of every reader (or of those named); another SEED draws others. The suite draws a few of seed 0; the
figures of a run of 20,000 stand in docs/results/reliability.md. All mutants of a run are read by one process, and the
most memory that it ever held is printed beside what it held before.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from mutations.mutate import mutations, pack
from mutations.readers import READERS, Reader
from turntree.core.errors import InputError

SECONDS = 5  # of the processor for one input, or twenty times as many of the clock: a reader is then said to hang
MOST_MEMORY = 2**35  # bytes of address space, of which torch reserves much
LONGEST = 1000  # characters of a message beside the name of the file


class Hangs(BaseException):
    """Not an `Exception`: what is tested catches those."""


def outcome(reader: Reader, path: Path) -> str:
    """ "read", "refused", or what is wrong with how the file was refused."""

    def stop(*_: Any) -> None:
        raise Hangs

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, 20 * SECONDS)}
    before = {number: signal.signal(number, stop) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        reader.read(path)
    except InputError as error:
        return _how_refused(reader, path, str(error))
    except Hangs:
        return "hangs"
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "turntree" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        return f"{type(error).__name__} at {where}"
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
    return "read"


def _how_refused(reader: Reader, path: Path, message: str) -> str:
    if "\n" in message or len(message) > LONGEST + len(str(path)):
        return f"a message of {len(message)} characters"
    if reader.names_file and path.name not in message and path.parent.name not in message:
        return f"a message that names no file: {message[:80]}"
    return "refused"


def outcomes(reader: Reader, folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """What became of `count` damaged inputs of a reader; those that are not damaged are read."""
    path = folder / reader.name
    plain = path.with_suffix("") if reader.packed else path
    reader.good(plain)
    good = plain.read_bytes()
    path.write_bytes(pack(good, reader.packed))
    reader.read(path)  # untimed: the first one imports what it reads with
    assert outcome(reader, path) == "read", outcome(reader, path)
    found: Counter[str] = Counter()
    drawn = zlib.crc32(f"{seed}/{reader.name}".encode() if seed else reader.name.encode())
    for damaged in mutations(good, count, drawn, structured=reader.structured, packed=reader.packed):
        path.write_bytes(damaged)
        found[outcome(reader, path)] += 1
    return found


def _megabytes() -> int:
    """The most memory that this process held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    count, _, seed = sys.argv[1].partition(":") if len(sys.argv) > 1 else ("200", "", "")
    os.fsync = lambda descriptor: None  # thousands of small files: a disk would take minutes
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    total = Counter[str]()
    for name in sys.argv[2:] or READERS:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = outcomes(READERS[name], Path(folder), int(count), int(seed or 0))
        bad = Counter({key: value for key, value in found.items() if key not in ("read", "refused")})
        total.update({"read": found["read"], "refused": found["refused"], "wrong": bad.total()})
        print(f"{name:24} {found['read']:4} read {found['refused']:4} refused {bad.total():4} wrong", end="  ")
        print(
            f"{time.monotonic() - start:5.1f} s {_megabytes():5} MB  {dict(bad.most_common(6)) if bad else ''}",
            flush=True,
        )
    print(dict(total))


if __name__ == "__main__":
    main()
