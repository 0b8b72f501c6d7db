"""`turntree verifier audit`: its figures and the worst verdicts as one static page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turntree.observe.files import atomic_write
from turntree.report.page import templates


def build_verifier_page(result: dict[str, Any], out: Path) -> Path:
    """Write the page of `stages.score.run_audit` to `out`. The same result gives the same bytes."""
    page = templates().get_template("verifier.html.j2").render(result=result, action=_action)
    with atomic_write(out) as handle:
        handle.write(page)
    return out


def _action(chat: dict[str, Any]) -> str:
    """A message for a reader: its text, then its calls."""
    calls = [f"{c['function']['name']}({json.dumps(c['function']['arguments'])})" for c in chat.get("tool_calls", [])]
    return "\n".join([*([chat["content"]] if chat["content"] else []), *calls]) or "(empty)"
