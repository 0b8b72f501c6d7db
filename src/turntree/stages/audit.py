"""`turntree audit`: logs of any framework in, every figure of the audit out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turntree.auditing.audit import audit
from turntree.auditing.comparison import AuditConfig
from turntree.logs.read import LogFormat, open_log
from turntree.logs.report import ReadReport
from turntree.logs.rows import ReadConfig


def run_audit(
    paths: Sequence[Path],
    form: LogFormat | None,
    reading: ReadConfig,
    config: AuditConfig,
    watch: Callable[[ReadReport], None] | None = None,
) -> dict[str, Any]:
    """The audit with what was read, and dropped, under `log`. `watch` sees what has been counted, as it goes."""
    log = open_log(paths, form, reading)
    log.report.watch = watch
    result = audit(log, config)
    return {**result, "log": {"paths": [str(path) for path in paths], **log.report.to_json()}}
