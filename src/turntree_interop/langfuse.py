"""Langfuse: observations as JSON lines, one list or Parquet (its API, its export to a bucket, with either spelling of
the names), or whole traces with their `observations`. Generations hold the conversations. A file is one recording: its
calls are put together by their trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from turntree.core.messages import as_object
from turntree.traces.formats.row import BrokenMessage, ChatRow, count_unknown, list_of, text_of, told_by, words
from turntree_interop.observed import Observed, from_text

_KEYS = words(
    "id traceid starttime endtime projectid parentobservationid type isrootobservation name level statusmessage "
    "version environment bookmarked public userid sessionid completionstarttime createdat updatedat input output "
    "metadata model internalmodelid providedmodelname modelparameters usage usagedetails costdetails unit promptid "
    "promptname promptversion latency timetofirsttoken totalcost inputcost outputcost inputprice outputprice "
    "totalprice calculatedinputcost calculatedoutputcost calculatedtotalcost inputusage outputusage totalusage "
    "release tags modelid tracename usagepricingtiername toolcalls tooldefinitions toolcallnames"
)
_TRACE_KEYS = words(
    "id timestamp name input output sessionId release version userId metadata tags public environment htmlPath latency "
    "totalCost observations scores projectId createdAt updatedAt bookmarked"
)
_SPELLED = ({"type", "traceId", "startTime"}, {"type", "trace_id", "start_time"})


def _is_observed(first: dict[str, Any]) -> str:
    one = any(names <= first.keys() for names in _SPELLED)
    whole = isinstance(first.get("observations"), list) and "timestamp" in first
    return "" if one or whole else "no 'traceId', 'type' and 'startTime', and no 'observations'"


@told_by(session=_is_observed)
def read_langfuse(row: dict[str, Any]) -> Iterator[ChatRow]:
    """The conversations of each session, of traces without one of each trace."""
    observed = Observed()
    for line in list_of(row, "events", "the lines of an export"):
        if isinstance(line, dict) and "observations" in line:
            count_unknown(cast("dict[str, Any]", line), _TRACE_KEYS, "", observed.ignored)
            for one in list_of(cast("dict[str, Any]", line), "observations", "a list of observations"):
                _take(one, observed, line.get("sessionId"))
        else:
            _take(line, observed)
    yield from observed.rows()


def _take(raw: Any, observed: Observed, session: Any = None) -> None:
    if not isinstance(raw, dict):
        observed.damaged.append(raw if isinstance(raw, Exception) else BrokenMessage("is not an object"))
        return
    one = {str(key).replace("_", "").lower(): value for key, value in cast("dict[str, Any]", raw).items()}
    count_unknown(one, _KEYS, "", observed.ignored)
    if one.get("type") != "GENERATION":
        observed.ignored[f"observations of type {one.get('type')}"] += 1
        return
    asked, said = from_text(one.get("input")), from_text(one.get("output"))
    given = as_object(asked)
    failed = one.get("level") == "ERROR"
    if not isinstance(said, dict) and not failed:
        said = {"role": "assistant", "content": said} if isinstance(said, str) else said
        said = BrokenMessage("is neither text nor a message", turn=True, field="output") if said is None else said
    messages = given.get("messages") if given else asked
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    at = one.get("starttime")
    thread = text_of({"sessionId": session or one.get("sessionid")}, ("sessionId",))
    observed.add(thread, text_of(one, ("traceid",)), messages, None if failed else said, given.get("tools"), at)
