"""AgentBench: a line of `runs.jsonl`, `output` with `history` of `{role: user or agent, content}`. Every bash action is
a candidate (PivotRL, appendix A.2); in other environments every turn.
"""

from __future__ import annotations

import re
from typing import Any, cast

from turntree.traces.formats.row import (
    ACT,
    ChatRow,
    count_unknown,
    each_object,
    list_of,
    misfit,
    object_of,
    told_by,
    words,
)

_RUN_KEYS = words("index error info output time")
_BASH = re.compile(r"Act(?:ion)?:\s*bash\b|```(?:bash|sh)\b", re.IGNORECASE)


@told_by(lambda row: misfit(row, output=dict) or misfit(row["output"], history=list))
def read_agentbench(row: dict[str, Any]) -> ChatRow:
    """A sample of an AgentBench run."""
    output = object_of(row, "output")
    result: Any = output.get("result")
    won = cast("dict[str, Any]", result).get("result") if isinstance(result, dict) else result
    chat = ChatRow.of(row, _RUN_KEYS, group="index")
    chat.success = won if isinstance(won, bool) else None
    chat.meta = {"status": output["status"]} if output.get("status") is not None else {}
    history = list_of(output, "history", "a list of {role, content}")
    chat.messages = each_object(history, lambda said: [_message(said, chat)])
    if any(isinstance(message, dict) and message.get(ACT) for message in chat.messages):
        chat.rule, chat.domain = "bash", "terminal"
    if row.get("error") or output.get("status") in ("unknown", "task error"):  # of the environment or its judge
        chat.drop_turns()
    return chat


def _message(said: dict[str, Any], chat: ChatRow) -> dict[str, Any]:
    count_unknown(said, ("role", "content"), "output.history[].", chat.ignored)
    if said.get("role") not in ("agent", "assistant"):
        return {"role": said.get("role"), "content": said.get("content")}
    act = "bash" if _BASH.search(str(said.get("content"))) else ""
    return {"role": "assistant", "content": said.get("content"), ACT: act}
