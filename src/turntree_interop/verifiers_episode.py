"""verifiers 0.4: an environment is a set of tasks, agents that play them, and rewards of what they did.

The library drives its agents itself, so each rollout is a process of its own behind a gateway (`gateway:COMMAND`):
this module, which plays one task with the library's own loop, tools, limits and rewards, and prints the reward. An
episode with an error has none. Agents are asked as chat clients; the default harness, which runs what a policy writes
as commands on this machine, is replaced by a plain loop over the tools of the task.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.env.adapted import of_split
from turntree.gateway.environment import AgentPlayer, AgentTask, AgentTasks

HARNESS = "turntree_plain"  # the name by which the library finds this module's harness


def tasks(name: str, split: str, count: int, *, seed: int, load: dict[str, Any], seconds: float) -> list[AgentTask]:
    """At most `count` tasks of the split, which a hash of a task tells. `load` is the environment's configuration."""
    here = str(Path.cwd())  # tasks may be modules of this folder; episodes find them there too (gateway.process)
    sys.path += [here] if here not in sys.path else []
    taskset = environment(name, load).taskset
    _check_tools(taskset)
    if not taskset.bounded:
        taskset = taskset.take(10 * count)
    rows = [{"key": task.key, "index": task.data.idx} for task in taskset]
    settings = AgentTasks(argument=None, seconds=seconds)
    player = partial(AgentPlayer, settings, [sys.executable, "-m", __name__])
    found = of_split(rows, split, count, seed=seed, where=name, key=lambda row: row["key"])
    what = {"name": name, "load": load}
    return [AgentTask(f"{name}/{key[:16]}", {**what, "index": row["index"]}, player) for key, row in found]


def environment(name: str, load: dict[str, Any]) -> Any:
    from verifiers.v1 import Env, EnvConfig, TasksetConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.generic import concrete_type  # pyright: ignore[reportMissingImports]

    _offer_harness()
    try:
        of_env = concrete_type(loaders.environment_class(name, str(load.get("id", ""))), EnvConfig, origin=Env)
        of_tasks = concrete_type(loaders.taskset_class(name), TasksetConfig)
        given = {**load, "taskset": (of_tasks or TasksetConfig)(**{**load.get("taskset", {}), "id": name})}
        if "agent" in of_env.model_fields:
            given.setdefault("agent", {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}})
        return loaders.load_environment(of_env(**given))
    except (ModuleNotFoundError, TypeError, ValueError, AttributeError) as error:
        problem, hint = f"{name!r} was not loaded ({str(error)[:200]})", "install its package, or correct load"
        raise InputError(problem, field="environment", hint=hint) from error


def _check_tools(taskset: Any) -> None:
    """The library starts the module of a tool set as a program, and waits three minutes for one that serves nothing."""
    for tools in (*taskset.toolsets(taskset.config), *taskset.task_type().toolsets(taskset.config.task)):
        kind = type(tools)
        if not tools.config.url and "__main__" not in inspect.getsource(sys.modules[kind.__module__]):
            problem = f"{kind.__module__} serves no tools when it is started as a program"
            hint = f"end it with: if __name__ == '__main__': {kind.__name__}.run()"
            raise InputError(problem, field="environment", hint=hint)


def _offer_harness() -> None:
    """A harness of ours, where the library looks for harnesses. (Its own chat loop is a script that `uv` runs.)"""
    module = sys.modules[__name__]
    sys.modules[f"verifiers.v1.harnesses.{HARNESS}"] = module
    if hasattr(module, "Plain"):
        return
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from openai import AsyncOpenAI
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyright: ignore[reportMissingImports]

    class Plain(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
            messages += [one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in asked]
            async with AsyncExitStack() as stack:
                servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
                tools, dispatch, open_ = await connect_mcp({"mcpServers": servers}, stack)
                client = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret))
                while True:
                    given = {"tools": tools} if tools else {}
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **given)
                    said = answer.choices[0].message
                    messages.append(said.model_dump(exclude_none=True))
                    if not said.tool_calls:
                        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                    for call in said.tool_calls:
                        told = await _told(call.function, dispatch, partial(call_mcp, open_, dispatch))
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": told})

    module.Plain, module.__all__ = Plain, ["Plain"]  # type: ignore[attr-defined]


async def _told(function: Any, dispatch: Any, call: Any) -> Any:
    if function.name not in dispatch:
        return f"error: unknown tool {function.name!r}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error})"
    return await call(function.name, arguments) if isinstance(arguments, dict) else "error: arguments are no object"


async def _play(task: dict[str, Any]) -> float:
    """The reward of one episode. Raises where it had an error."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    played = environment(task["name"], task["load"])
    (chosen,) = played.taskset.include(idx=[task["index"]])
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with played.serving():
        episode = await played.run_episode(chosen, vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok")
    if len(episode.traces) > 1:
        raise RuntimeError("several agents played, whose rewards are not those of one policy")
    return episode.traces[0].reward


if __name__ == "__main__":
    print(asyncio.run(_play(json.loads(Path(os.environ["TURNTREE_TASK"]).read_text()))))
