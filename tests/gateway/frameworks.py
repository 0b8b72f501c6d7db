"""Agents in a few lines each, on the packages of others as they are. Run by tests/gateway/test_agents.py with the
interpreter of `make test-agents`: `python frameworks.py NAME`. Nothing here knows of turntree."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TASK = "Look up the capital of France."


def search(query: str) -> str:
    """Search the web."""
    return f"{query}: it is Paris"


def openai_sdk() -> str:
    import json

    from openai import OpenAI, pydantic_function_tool
    from pydantic import BaseModel

    class Search(BaseModel):
        query: str

    client = OpenAI()
    messages: list = [{"role": "user", "content": TASK}]
    while True:
        reply = client.chat.completions.parse(
            model="policy", messages=messages, tools=[pydantic_function_tool(Search, name="search")]
        )
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            found = search(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


def agents_sdk() -> str:
    """A triage agent that asks a second agent as a tool: a sub-agent with a context of its own."""
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)
    librarian = Agent(name="Librarian", instructions="You search.", model="policy", tools=[function_tool(search)])
    tool = librarian.as_tool(tool_name="librarian", tool_description="Ask the librarian.")
    triage = Agent(name="Triage", instructions="You ask the librarian.", model="policy", tools=[tool])
    return asyncio.run(Runner.run(triage, TASK)).final_output


def langgraph() -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    graph = create_react_agent(ChatOpenAI(model="policy", max_retries=0), [search])
    return graph.invoke({"messages": [("user", TASK)]})["messages"][-1].content


def mini_swe_agent() -> str:
    """The command `mini`, with its own configuration, prompts and tool. What the policy writes runs in its sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"MSWEA_GLOBAL_CONFIG_DIR": folder, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
        mini = [str(Path(sys.executable).parent / "mini"), "-y", "--exit-immediately", "-m", "openai/policy"]
        mini += ["--environment-class", "bubblewrap"]
        subprocess.run([*mini, "-t", TASK, "-o", f"{folder}/run.json"], env=os.environ | quiet, check=True, cwd=folder)
        return (Path(folder) / "run.json").read_text()


if __name__ == "__main__":
    said = {f.__name__: f for f in (openai_sdk, agents_sdk, langgraph, mini_swe_agent)}[sys.argv[1]]()
    print(said[-300:])
