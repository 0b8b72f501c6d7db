"""LangSmith: runs as JSON lines or Parquet (`Run.model_dump_json()` of what `Client.list_runs` gives, the export of its
pages, its bulk export). The runs of type `llm` hold the conversations; those of LangChain's and OpenAI's chat models
are read. A whole file is one recording: its calls are put together by their `trace_id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from turntree.core.messages import as_object
from turntree.traces.formats.row import (
    BrokenMessage,
    ChatRow,
    count_unknown,
    first_object,
    list_of,
    misfit,
    part_of,
    text_of,
    told_by,
    was_cut,
    words,
)
from turntree_interop.observed import Observed, from_text

_KEYS = words(
    "id name start_time end_time run_type extra error serialized events inputs outputs reference_example_id "
    "parent_run_id tags attachments session_id child_run_ids child_runs feedback_stats app_path manifest_id status "
    "prompt_tokens completion_tokens total_tokens prompt_token_details completion_token_details first_token_time "
    "total_cost prompt_cost completion_cost prompt_cost_details completion_cost_details parent_run_ids trace_id "
    "dotted_order in_dataset tenant_id is_root trace_tier ttl_seconds trace_first_received_at"
)


@told_by(session=lambda first: misfit(first, run_type=object, trace_id=object, inputs=object))
def read_langsmith(row: dict[str, Any]) -> Iterator[ChatRow]:
    """The conversations of each thread, of runs without one of each trace."""
    observed = Observed()
    for line in list_of(row, "events", "the lines of an export"):
        if not isinstance(line, dict):
            observed.damaged.append(line)
            continue
        run = cast("dict[str, Any]", line)
        count_unknown(run, _KEYS, "", observed.ignored)
        if run.get("run_type") != "llm":
            observed.ignored[f"runs of type {run.get('run_type')}"] += 1
            continue
        asked, said = as_object(from_text(run.get("inputs"))), from_text(run.get("outputs"))
        given = as_object(from_text(run.get("extra")))
        messages = asked.get("messages")
        tools = asked.get("tools") or part_of(given, "invocation_params").get("tools")
        if isinstance(messages, list) and messages and isinstance(messages[0], list):
            messages = messages[0]  # LangChain's batches of one
        answer = None if run.get("error") else _said(said)
        thread = text_of(part_of(given, "metadata"), ("session_id", "thread_id", "conversation_id"))
        observed.add(thread, text_of(run, ("trace_id",)), messages, answer, tools, run.get("start_time"))
    yield from observed.rows()


def _said(outputs: Any) -> Any:
    """The message of a chat completion, or of LangChain's generations."""
    answer = as_object(outputs)
    batch = answer.get("generations")
    first = first_object(batch[0] if isinstance(batch, list) and batch and isinstance(batch[0], list) else batch)
    first = first or first_object(answer.get("choices"))
    message = part_of(first, "message") or (answer if "role" in answer else {})
    if was_cut(first) or was_cut(first.get("generation_info")):
        return message | {"finish_reason": "length"}
    return message or BrokenMessage("is neither a chat completion nor LangChain's", turn=True, field="outputs")
