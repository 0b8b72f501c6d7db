"""What a command says while it works: lines and a progress bar on standard error. Standard output carries results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

from turntree.core.errors import printable

T = TypeVar("T")

_FORMAT = "{desc}: |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"  # figures fit into 80 columns
_LOG_EVERY = 30.0  # seconds between two lines of progress where standard error is not a terminal


class _Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
    def refresh(self, *args: Any, **kwargs: Any) -> Any:
        """Not before the delay: tqdm would draw a bar after every notice, and never end the line of one so young."""
        young = getattr(self, "delay", 0) > 0 and time.time() - self.start_t < self.delay
        return None if young else super().refresh(*args, **kwargs)


def progress(
    items: Iterable[T], what: str, total: int | None = None, *, initial: int = 0, quiet: bool = False
) -> tqdm[T]:
    """Progress on standard error (standard output carries results only); `quiet` inside another bar. In a log file,
    where every update is a line, there is one each 30 s, and none for what takes less."""
    terminal = sys.stderr.isatty()
    return _Bar(
        items,
        desc=what,
        total=total,
        initial=initial,
        file=sys.stderr,
        mininterval=1.0 if terminal else _LOG_EVERY,
        maxinterval=10.0 if terminal else _LOG_EVERY,
        delay=0 if terminal else _LOG_EVERY,
        dynamic_ncols=True,
        bar_format=_FORMAT if total else None,
        disable=quiet,
    )


def notice(text: str) -> None:
    """Write one line to standard error, above the progress bar if one is drawn."""
    tqdm.write(printable(f"turntree: {text}"), file=sys.stderr)
