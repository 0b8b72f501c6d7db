"""`turntree audit`: logs of any framework in, every figure of the audit out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.auditing.audit import audit
from turntree.auditing.comparison import AuditConfig
from turntree.logs.read import LogFormat, open_log
from turntree.logs.rows import ReadConfig


def run_audit(
    paths: Sequence[Path], form: LogFormat | None, reading: ReadConfig, config: AuditConfig
) -> dict[str, Any]:
    """The audit with what was read, and dropped, under `log`."""
    log = open_log(paths, form, reading)
    result = audit(log, config)
    return {**result, "log": {"paths": [str(path) for path in paths], **log.report.to_json()}}
