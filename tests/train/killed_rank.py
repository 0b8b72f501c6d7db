"""The command as a rank of a launcher; rank 0 is killed at step 3."""

from __future__ import annotations

import os
import signal
from typing import Any

from turntree.cli.main import main
from turntree.run.folder import RunDirectory

log = RunDirectory.log


def deadly(run: RunDirectory, row: dict[str, Any]) -> None:
    log(run, row)
    if row["step"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)


RunDirectory.log = deadly  # type: ignore[method-assign]
main()
