"""`turntree audit`: logs of any framework in, every figure of the audit out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.auditing.audit import audit
from turntree.auditing.comparison import AuditConfig
from turntree.core.config import Part
from turntree.logs.read import AUTO, open_log
from turntree.logs.rows import ReadReport


@dataclass(frozen=True, kw_only=True)
class AuditStageConfig(AuditConfig):
    """`turntree audit`."""

    log_format: Part = AUTO
    """Of the logs, where their fields do not tell it: turntree, trees, verl, trl, nemo-gym, generic, or module:object
    of your own."""


def run_audit(
    paths: Sequence[Path],
    config: AuditStageConfig,
    watch: Callable[[ReadReport], None] | None = None,
) -> dict[str, Any]:
    """The audit with what was read, and dropped, under `log`. `watch` sees what has been counted, as it goes."""
    log = open_log(paths, config.log_format)
    log.report.watch = watch
    result = audit(log, config)
    return {**result, "log": {"paths": [str(path) for path in paths], **log.report.to_json()}}
