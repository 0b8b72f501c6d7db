"""Tar archives, opened like every other file (`observe.opening`): damage is an `InputError`, and what comes out, of
sparse members and links too, is bounded by the size of the archive."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from turntree.core.errors import InputError
from turntree.observe.opening import most_unpacked, opened, unpacks_too_far

_CHUNK = 1 << 20


def members_of(path: str | Path) -> Iterator[tuple[tarfile.TarInfo, Callable[[], Iterator[bytes]]]]:
    """The members of an archive in its order, each with what gives its content, in pieces. Raises `InputError`."""
    path, left = Path(path), 0

    def pieces(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
        nonlocal left
        with _named_errors(path):
            inside = archive.extractfile(member)
            while inside is not None and (piece := inside.read(_CHUNK)):
                left -= len(piece)
                if left < 0:
                    raise unpacks_too_far(path)
                yield piece

    with opened(path) as file, _named_errors(path):
        left = most_unpacked(path)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                yield member, lambda member=member: pieces(archive, member)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, ValueError, OverflowError, KeyError, RecursionError) as error:
        raise InputError(f"is not a readable tar archive ({error})", path=path, hint="copy it again") from error
