"""LangSmith's and Langfuse's own records of one agent's run, as they export them: `python real_exports.py NAME FILE`.

The model behind OpenAI's client is scripted (a call that fails, a call, an answer); nothing leaves this process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx

SAID = [
    {"role": "assistant", "content": "I look.", "tool_calls": [("weather", '{"city": "Olso"}')]},
    {"role": "assistant", "content": None, "tool_calls": [("weather", '{"city": "Oslo"}')]},
    {"role": "assistant", "content": "It rains in Oslo."},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def server() -> httpx.Client:
    def answer(request: httpx.Request) -> httpx.Response:
        turn = sum(one["role"] == "assistant" for one in json.loads(request.content)["messages"])
        message = dict(SAID[turn])
        calls = [
            {"id": f"call_{turn}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in message.pop("tool_calls", ())
        ]
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop"}
        choice["message"] = message | ({"tool_calls": calls} if calls else {})
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
        body = {"id": f"chatcmpl-{turn}", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return httpx.Response(200, json=body | {"usage": usage})

    return httpx.Client(transport=httpx.MockTransport(answer))


def weather(city: str) -> str:
    """The weather in a city."""
    if city != "Oslo":
        raise ValueError(f"no city {city}")
    return "rain"


def loop(client: Any) -> None:
    """An agent of a dozen lines on OpenAI's client."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain in Oslo?"}]
    while True:
        said = client.chat.completions.create(model="m", messages=messages, tools=[TOOL]).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return
        for call in said.tool_calls:
            try:
                told = weather(**json.loads(call.function.arguments))
            except ValueError as error:
                told = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})


def graph(callback: Any) -> None:
    """The prebuilt agent of LangGraph."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather_tool(city: str) -> str:
        """The weather in a city."""
        return weather(city) if city == "Oslo" else f"Error: no city {city}"

    weather_tool.name = "weather"
    model = ChatOpenAI(model="m", api_key="none", http_client=server())
    agent = create_agent(model, [weather_tool], system_prompt="Be brief.")
    agent.invoke({"messages": [("user", "Rain in Oslo?")]}, config={"callbacks": [callback]})


def langsmith(agent: str) -> list[str]:
    """Runs as `Client.list_runs` gives them and `Run.model_dump_json` writes them."""
    from langsmith import Client, schemas, trace, tracing_context
    from langsmith.wrappers import wrap_openai

    runs: dict[str, dict[str, Any]] = {}

    class Kept(Client):
        def create_run(self, name: str, inputs: Any, run_type: str, **more: Any) -> None:
            row = {"name": name, "inputs": inputs, "run_type": run_type} | more
            runs[str(row["id"])] = _plain({key: value for key, value in row.items() if value is not None})

        def update_run(self, run_id: Any, **more: Any) -> None:
            runs[str(run_id)] |= _plain({key: value for key, value in more.items() if value is not None})

    client = Kept(api_url="http://nowhere", api_key="none", auto_batch_tracing=False)
    if agent == "graph":
        from langchain_core.tracers import LangChainTracer

        graph(LangChainTracer(client=client))
    else:
        from openai import OpenAI

        with tracing_context(enabled=True, client=client), trace("agent", client=client):
            loop(wrap_openai(OpenAI(api_key="none", http_client=server())))
    found = []
    for row in runs.values():
        found.append(schemas.Run(**row).model_dump_json(exclude_none=True))
    return found


def _plain(value: Any) -> Any:
    from langsmith._internal._serde import dumps_json

    return json.loads(dumps_json(value))


def langfuse(agent: str) -> list[str]:
    """Observations as the API (v2) gives them."""
    from langfuse import Langfuse
    from langfuse.api.commons.types.observation_v2 import ObservationV2
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    client = Langfuse(public_key="pk", secret_key="sk", base_url="http://127.0.0.1:9", span_exporter=kept)
    if agent == "graph":
        from langfuse.langchain import CallbackHandler

        graph(CallbackHandler())
    else:
        from langfuse.openai import OpenAI

        with client.start_as_current_observation(name="agent"):
            loop(OpenAI(api_key="none", http_client=server()))
    client.flush()
    found = []
    for span in kept.get_finished_spans():
        told = dict(span.attributes or {})
        parent = span.parent and f"{span.parent.span_id:016x}"
        row = ObservationV2(
            id=f"{span.context.span_id:016x}",
            trace_id=f"{span.context.trace_id:032x}",
            start_time=span.start_time / 1e9,
            end_time=span.end_time / 1e9,
            project_id="p",
            parent_observation_id=parent or None,
            type=str(told.get("langfuse.observation.type", "span")).upper(),
            name=span.name,
            input=_parsed(told.get("langfuse.observation.input")),
            output=_parsed(told.get("langfuse.observation.output")),
            metadata=None,
        )
        found.append(json.dumps(json.loads(row.json(by_alias=True, exclude_none=True))))
    return found


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


if __name__ == "__main__":
    name, _, agent = sys.argv[1].partition(":")
    Path(sys.argv[2]).write_text("".join(f"{line}\n" for line in globals()[name](agent)))
