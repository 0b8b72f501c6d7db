"""Agents in a few lines each, on the packages of others as they are. Run by tests/gateway/test_agents.py with the
interpreter of `make test-agents`: `python frameworks.py NAME`. Nothing here knows of turntree.

The clients of a terminal (Claude Code, Codex) come from npm; TURNTREE_NODE_AGENTS is the folder of their
commands."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it looks for prices on the network otherwise
TASK = "Look up the capital of France."
CALLED = {"name": "search", "description": "Search the web."}
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


def search(query: str) -> str:
    """Search the web.

    Args:
        query: What to look for.
    """
    return f"{query}: it is Paris"


def openai_sdk() -> str:
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


def anthropic_sdk() -> str:
    from anthropic import Anthropic

    client, messages = Anthropic(), [{"role": "user", "content": TASK}]
    asked = {"model": "claude", "max_tokens": 300, "tools": [{**CALLED, "input_schema": SCHEMA}]}
    while True:
        with client.messages.stream(messages=messages, **asked) as stream:
            reply = stream.get_final_message()
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return reply.content[0].text
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": search(**call.input)} for call in calls]
        messages.append({"role": "user", "content": results})


def litellm() -> str:
    """One conversation: its first call by OpenAI's API, its second by Anthropic's."""
    import litellm

    messages: list = [{"role": "user", "content": TASK}]
    tools = [{"type": "function", "function": {**CALLED, "parameters": SCHEMA}}]
    for model in ("openai/policy", "anthropic/policy"):
        message = (
            litellm.completion(model, messages=messages, tools=tools, max_tokens=300, num_retries=2).choices[0].message
        )
        messages.append(message)
        for call in message.tool_calls or ():
            found = search(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return message.content


def agents_sdk() -> str:
    """A triage agent that asks a second agent as a tool: a sub-agent with a context of its own."""
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)
    librarian = Agent(name="Librarian", instructions="You search.", model="policy", tools=[function_tool(search)])
    tool = librarian.as_tool(tool_name="librarian", tool_description="Ask the librarian.")
    triage = Agent(name="Triage", instructions="You ask the librarian.", model="policy", tools=[tool])
    return asyncio.run(Runner.run(triage, TASK)).final_output


def agents_sdk_responses() -> str:
    """The same SDK with its own default, the Responses API, as a stream."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    async def run() -> str:
        agent = Agent(name="Librarian", instructions="You search.", model="policy", tools=[function_tool(search)])
        result = Runner.run_streamed(agent, TASK)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def langgraph() -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    graph = create_react_agent(ChatOpenAI(model="policy"), [search])
    return graph.invoke({"messages": [("user", TASK)]})["messages"][-1].content


def langgraph_anthropic() -> str:
    from langchain_anthropic import ChatAnthropic
    from langgraph.prebuilt import create_react_agent

    graph = create_react_agent(ChatAnthropic(model="claude", max_tokens=300), [search])
    return graph.invoke({"messages": [("user", TASK)]})["messages"][-1].content


def pydantic_ai() -> str:
    from pydantic_ai import Agent

    return Agent("openai-chat:policy", tools=[search]).run_sync(TASK).output


def pydantic_ai_anthropic() -> str:
    from pydantic_ai import Agent

    return Agent("anthropic:claude-sonnet-4-5", tools=[search]).run_sync(TASK).output


def smolagents() -> str:
    """Its own prompts, its stop texts, and a final answer that is a call of a tool."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    model = OpenAIServerModel("policy", api_base=base, api_key=key)
    return str(ToolCallingAgent(tools=[tool(search)], model=model, max_steps=4).run(TASK))


def mini_swe_agent() -> str:
    """The command `mini`, with its own configuration, prompts and tool. What the policy writes runs in its sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"MSWEA_GLOBAL_CONFIG_DIR": folder, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
        mini = [str(Path(sys.executable).parent / "mini"), "-y", "--exit-immediately", "-m", "openai/policy"]
        mini += ["--environment-class", "bubblewrap"]
        subprocess.run([*mini, "-t", TASK, "-o", f"{folder}/run.json"], env=os.environ | quiet, check=True, cwd=folder)
        return (Path(folder) / "run.json").read_text()


# clients of a terminal

SAY = "Say hello with the shell, then tell me the capital of France."
AGAIN = "Which capital was it?"


class Terminal:
    """Runs commands from npm in an empty folder with an empty home, which a later command finds as they were left."""

    def __init__(self, home: str, **variables: str) -> None:
        self.home = home
        self._env = {**os.environ, "HOME": home, "IS_SANDBOX": "1", **variables}

    def __call__(self, *words: str) -> str:
        program = str(Path(os.environ["TURNTREE_NODE_AGENTS"]) / words[0])
        done = subprocess.run(
            [program, *words[1:]],
            env=self._env,
            cwd=self.home,
            text=True,
            capture_output=True,
            timeout=500,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise SystemExit(f"code {done.returncode}: {done.stdout[-1000:]}\n{done.stderr[-1000:]}")
        return done.stdout


def claude_code() -> str:
    """Three commands of one conversation, the second of which has it summed up."""
    with tempfile.TemporaryDirectory() as home:
        run = Terminal(home)
        run("claude", "-p", SAY, "--allowedTools", "Bash")
        run("claude", "-p", "--continue", "/compact")
        return run("claude", "-p", "--continue", AGAIN)


def codex() -> str:
    """It takes another server only from its configuration. It sums up what is longer than its limit."""
    base = os.environ["OPENAI_BASE_URL"]
    provider = f'model_providers.own={{name="own",base_url="{base}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
    options = ["-c", provider, "-c", 'model_provider="own"', "-c", 'model="policy"', "--skip-git-repo-check"]
    options += ["-c", "model_auto_compact_token_limit=1000", "--dangerously-bypass-approvals-and-sandbox"]
    with tempfile.TemporaryDirectory() as home:
        return Terminal(home, CODEX_HOME=home)("codex", "exec", *options, SAY)


def opencode() -> str:
    """It takes another server only from its configuration. It sums up what does not fit the context that it is told."""
    options = {"baseURL": os.environ["OPENAI_BASE_URL"], "apiKey": os.environ["OPENAI_API_KEY"]}
    model = {"name": "policy", "limit": {"context": 30_000, "output": 500}}
    own = {"npm": "@ai-sdk/openai-compatible", "name": "own", "options": options, "models": {"policy": model}}
    config = json.dumps({"provider": {"own": own}, "model": "own/policy", "autoupdate": False})
    with tempfile.TemporaryDirectory() as home:
        return Terminal(home, OPENCODE_CONFIG_CONTENT=config, OPENCODE_DISABLE_MODELS_FETCH="1")("opencode", "run", SAY)


if __name__ == "__main__":
    print(str(globals()[sys.argv[1]]())[-300:])
