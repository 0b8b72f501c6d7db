"""Hypothesis strategies for conversations, tidy and untidy."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from turntree.core.messages import Message, ToolCall
from turntree.traces.schema import SPLITS, Trace

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=3,
)
json_objects = st.dictionaries(st.text(max_size=4), json_values, max_size=2)
optional_text = st.none() | st.text(max_size=6)

calls = st.builds(ToolCall, name=st.sampled_from(["a", "b", "c"]), arguments=json_objects, id=optional_text)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=st.text(max_size=12),
    tool_calls=st.lists(calls, max_size=3).map(tuple),
    tool_call_id=optional_text,
    name=optional_text,
)
turns = messages.map(lambda message: Message("assistant", message.content, message.tool_calls))
tools = st.lists(st.sampled_from(["a", "b"]), unique=True, max_size=2).map(
    lambda names: tuple({"type": "function", "function": {"name": name}} for name in names)
)


@st.composite
def traces(draw: st.DrawFn, trace_id: str | None = None) -> Trace:
    before = draw(st.lists(messages, max_size=4))
    after = draw(st.lists(messages, max_size=4))
    return Trace(
        id=trace_id or draw(st.text(min_size=1, max_size=6)),
        messages=(*before, draw(turns), *after),
        tools=draw(tools),
        domain=draw(st.text(max_size=5)),
        split=draw(st.none() | st.sampled_from(SPLITS)),
        success=draw(st.none() | st.booleans()),
        environment=draw(st.none() | json_objects),
        meta=draw(st.dictionaries(st.sampled_from(["note", "reward", "extra"]), json_values, max_size=2)),
    )


ids = st.sampled_from(["1", "2", None])
raw_calls = st.fixed_dictionaries(
    {
        "id": ids,
        "function": st.fixed_dictionaries(
            {
                "name": st.sampled_from(["a", "x"]),
                "arguments": st.sampled_from(['{"k": 1}', "{}", "[]", "{oops", "NaN"]),
            }
        ),
    }
)
untidy_messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "robot"]), "content": st.just("hello")}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.sampled_from(["", "hi", None])}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.just(""), "weight": st.just(0)}),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": st.just(""),
            "tool_calls": st.lists(raw_calls, min_size=1, max_size=2),
        }
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": st.just("ok"), "tool_call_id": ids}),
    st.just("not an object"),
)
untidy_rows = st.fixed_dictionaries(
    {"messages": st.lists(untidy_messages, max_size=7)},
    optional={
        "id": st.sampled_from(["one", "two"]),
        "success": st.sampled_from([True, False, None, "yes"]),
        "tools": st.just([{"type": "function", "function": {"name": "a"}}]),
        "surprise": st.just(1),
    },
)
untidy_lines = st.lists(untidy_rows.map(json.dumps) | st.sampled_from(['{"messages": [{"ro', "[1]", "3"]), max_size=6)


def row(*messages: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}
