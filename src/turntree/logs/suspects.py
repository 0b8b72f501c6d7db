"""Rollouts that look like failures of the machine, not of the policy: their texts say so before they are dropped.

A suspicion is no fact: a policy may write a traceback itself. So nothing is censored for it; an audit counts those that
have the lowest reward, and compares how often the others look so.
"""

from __future__ import annotations

import re
from typing import Any

NO_ANSWER, LIMIT = "no answer", "cut by a limit"
_SIGNS = {
    "a traceback": re.compile(r"Traceback \(most recent call last\)"),
    "a time limit": re.compile(r"\b(?:TimeoutError|ReadTimeout|DeadlineExceeded|time[ds]?[ -]?out)\b", re.IGNORECASE),
    "a server's error": re.compile(
        r"\b(?:Connection(?:Reset|Refused)?Error|connection (?:refused|reset|error)|Internal Server Error|Bad Gateway|"
        r"Service Unavailable|RateLimitError|APIConnectionError|(?:HTTP|status(?: code)?)[ :/]*5\d\d)\b",
        re.IGNORECASE,
    ),
}
_END = 4000  # characters: what ended a rollout stands at the end of its text
_CUT = frozenset({"length", "truncated", "max_tokens", "max_turns", "aborted", "abort"})


def suspect_of(text: str, *, stop: Any = None, completed: bool | None = None) -> str | None:
    """The first sign in the end of a rollout's text, and in the name `stop` of its ending; None where there is none."""
    named = str(stop or "")
    for sign, pattern in _SIGNS.items():
        if pattern.search(text[-_END:]) or pattern.search(named.replace("_", " ")):
            return sign
    if not text.strip():
        return NO_ANSWER
    return LIMIT if completed is False or named.lower() in _CUT else None
