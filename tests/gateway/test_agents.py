"""Agents that nobody here wrote speak to a gateway; what is trained on is what was sampled.

The suite drives the OpenAI SDK. `make test-agents` installs the other frameworks and sets TURNTREE_AGENTS to their
interpreter, and TURNTREE_NODE_AGENTS to the folder of the commands that come from npm. A random policy makes no tool
calls, so the shapes of agents are driven by a script that does, and the log-probabilities by a model. With
TURNTREE_AGENTS_MODEL (the folder of a pretrained policy with a chat template, as `recipes/smollm2/convert.py` makes
it) that policy drives the frameworks too.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_world import World, renderer, tokenizer, world

from scripted_engine import ScriptedEngine
from tiny_models import tiny_model
from turntree.core.completion import Finished, GenerationRequest, Sampling
from turntree.core.messages import Message, ToolCall
from turntree.core.tree import RolloutTree
from turntree.credit.credit import CreditRule
from turntree.engine.hf import HFEngine
from turntree.gateway.calls import Session
from turntree.gateway.config import GatewayLimits
from turntree.gateway.merge import Merged, merge
from turntree.gateway.process import environment_with, variables_of
from turntree.pack.packing import pack
from turntree.stages.policy import Device, load_policy
from turntree.train.forward import with_old_logprobs

INTERPRETER, MODEL = os.environ.get("TURNTREE_AGENTS"), os.environ.get("TURNTREE_AGENTS_MODEL")
NODE = os.environ.get("TURNTREE_NODE_AGENTS")
SAMPLING = Sampling(max_tokens=12)
Sampled = Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]


class Watched:
    """An engine that remembers what it saw and sampled."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.sampled, self._flying = engine, Sampled(), dict[int, GenerationRequest]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: GenerationRequest) -> int:
        ticket = self._engine.submit(request)
        self._flying[ticket] = request
        return ticket

    def poll(self, timeout: float | None = None) -> list[Finished]:
        found = self._engine.poll(timeout)
        for each in found:
            request = self._flying.pop(each.ticket)
            if each.completion is not None:
                self.sampled[request.prompt_ids, each.completion.token_ids, each.completion.logprobs] += 1
        return found


def sampled_in(tree: RolloutTree) -> Sampled:
    found = Sampled()
    for node in tree:
        if node.logprobs is not None:
            above = tree.path(node.id)[:-1]
            prompt = tuple(token for part in above for token in part.token_ids)
            found[prompt, node.token_ids, node.logprobs] += 1
    return found


def over(at: World, session: str, reward: float) -> Session:
    """End a session with a reward; the session as a value."""
    live = at.sessions.get(session)
    at.post(f"/sessions/{session}/reward", {"reward": reward}).raise_for_status()
    return live.value()


def causes(tree: RolloutTree) -> Counter[str]:
    return Counter(said.reason for said in tree.decisions if said.action == "fork")


# a model, and a loop that does all that agents do


def an_unruly_agent(client: openai.OpenAI) -> None:
    """Turns, a retry, three answers to one prompt of which one is continued, a sub-agent, a stream, a compaction."""

    def ask(messages: list[dict[str, Any]], **more: Any) -> list[str]:
        reply = client.chat.completions.create(model="policy", messages=messages, **more)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return [choice.message.content or "" for choice in reply.choices]

    said: list[dict[str, Any]] = [
        {"role": "system", "content": "You are in the middle of a room."},
        {"role": "user", "content": "Your task is to: take the mug 1."},
    ]
    ask(said)
    said += [{"role": "assistant", "content": ask(said)[0]}, {"role": "user", "content": "Nothing happens."}]
    several = [ask(said)[0] for _ in range(3)]
    said += [{"role": "assistant", "content": several[1]}, {"role": "user", "content": "You see a shelf 3."}]
    ask([{"role": "system", "content": "You search."}, {"role": "user", "content": "the capital of France"}])
    stream = client.chat.completions.create(model="policy", messages=said, stream=True)  # pyright: ignore[reportArgumentType, reportCallIssue]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    said += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    ask([*said[:2], {"role": "user", "content": "So far: nothing."}, said[-1]])


def test_log_probabilities_of_an_agents_calls_are_the_trainers() -> None:
    model = tiny_model(vocab_size=len(tokenizer()), seed=3)
    engine = Watched(HFEngine(model, renderer().stop_ids))
    made: list[Session] = []
    with world(engine, sampling=SAMPLING) as at:
        for sample in range(2):
            opened = at.open("t", sample=sample, seed=sample)
            an_unruly_agent(at.client(opened["key"]))
            made.append(over(at, opened["session"], float(sample)))
    found = merge("t", made)
    assert sampled_in(found.tree) == engine.sampled
    assert causes(found.tree) == {"retry": 6, "another conversation": 2, "compaction": 2}
    agrees_with_the_trainer(model, found)


def agrees_with_the_trainer(model: Any, found: Merged) -> None:
    credit = CreditRule()(found.tree, found.rewards)
    assert set(credit.nodes) == {node.id for node in found.tree if node.sampled}
    for batch in with_old_logprobs(model, pack([found.tree], [credit], max_tokens=16_384)):
        apart = (batch.old_logprobs_T.double() - batch.sampling_logprobs_T).abs().max().item()
        print("log-probabilities apart by at most", apart)
        assert apart <= 1e-4


# a script that calls tools


def scripted(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Calls the tool that the prompt shows, answers once that has, and sums up what it is asked to."""
    text = tokenizer().decode(prompt)
    last = text.split("<|end|>")[-2].strip()
    if SUMMARY in text:
        return saying("It is Paris.")
    if any(words in last for words in ASKED_TO_SUM_UP):
        return saying(f"<summary>{SUMMARY}</summary>")
    answered = any(words in last for words in RESULTS)
    if "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in text:
        if "No tool calls found" not in text:
            return saying("I would look around.")
        command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if answered else "echo hello"
        return renderer().completion(calling("bash", command=command))
    if '"final_answer"' in text and answered:  # smolagents ends with a call
        return renderer().completion(calling("final_answer", answer="It is Paris."))
    for tool, arguments in TOOLS.items():
        if f'"name": "{tool}"' in text and not answered:
            return renderer().completion(calling(tool, **arguments))
    return saying("It is Paris.")


TOOLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": "echo hello", "description": "Say hello"},
    "bash": {"command": "seq 3000", "description": "Fill the context"},
    "exec_command": {"cmd": "echo hello"},
    "shell_command": {"command": "echo hello"},
    "run_shell_command": {"command": "echo hello", "is_background": False},
    "librarian": {"input": "the capital of France"},
    "search": {"query": "capital of France"},
}
RESULTS = ("<|tool|>", "<|user|>Observation:\n")  # how the result of a tool is told; smolagents says it as a user
SUMMARY = "The shell said hello; the capital is Paris."
# how clients begin or end a request to sum up: Claude Code, Codex, OpenCode, the Anthropic SDK
ASKED_TO_SUM_UP = (
    "followed by a <summary> block",
    "CONTEXT CHECKPOINT",
    "anchored summary",
    "<summary></summary>",
)


def saying(text: str) -> tuple[int, ...]:
    return renderer().completion(Message("assistant", text))


def calling(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, arguments),))


@dataclass(frozen=True)
class Client:
    """A row of the table of clients: where its version is, what it speaks, what the gateway had to learn for it, and
    the forks that it makes by itself, beside the retry."""

    package: str
    speaks: str
    needed: str
    forks: tuple[str, ...] = ()
    title: str = ""


CHAT, RESPONSES, MESSAGES = "chat completions", "Responses", "Messages"
CLIENTS = {
    "claude_code": Client(
        "@anthropic-ai/claude-code",
        f"{MESSAGES}, streamed",
        "`thinking`, `context_management` and effort recorded; system messages in the middle; marks of caches that "
        "move from call to call; 24 tools",
        ("another continuation", "compaction"),
        "Claude Code (`claude -p`, `/compact`)",
    ),
    "codex": Client(
        "@openai/codex",
        f"{RESPONSES}, streamed",
        "tools of a namespace; its web search is not shown; several developer messages; it takes a server only from "
        "its configuration",
        ("compaction", "tools"),
        "Codex (`codex exec`)",
    ),
    "opencode": Client(
        "opencode-ai",
        f"{CHAT}, streamed",
        "nothing; it takes a server only from its configuration, and asks for a title beside the task",
        ("another conversation", "compaction"),
        "OpenCode (`opencode run`)",
    ),
    "openai_sdk": Client("openai", CHAT, "`parsed_arguments`, which it sends back beside the arguments"),
    "anthropic_sdk": Client("anthropic", f"{MESSAGES}, streamed", "counting of tokens, errors in its form"),
    "litellm": Client("litellm", f"{CHAT}, then {MESSAGES}", "one conversation in two dialects"),
    "agents_sdk": Client(
        "openai-agents",
        CHAT,
        "a second agent as a tool: another conversation of the same session",
        ("another conversation",),
        "OpenAI Agents SDK",
    ),
    "agents_sdk_responses": Client("openai-agents", f"{RESPONSES}, streamed", "nothing", (), "OpenAI Agents SDK"),
    "langgraph": Client("langgraph", CHAT, "nothing"),
    "langgraph_anthropic": Client("langgraph", MESSAGES, "nothing"),
    "pydantic_ai": Client("pydantic-ai-slim", CHAT, "nothing"),
    "pydantic_ai_anthropic": Client("pydantic-ai-slim", MESSAGES, "nothing"),
    "smolagents": Client(
        "smolagents",
        CHAT,
        "stop texts; every call is forced, so under a grammar and not trained; its history tells calls as text: a fork "
        "a turn",
        ("edited",),
    ),
    "mini_swe_agent": Client(
        "mini-swe-agent", CHAT, "an answer without a call, left out of its history: a fork", ("compaction",)
    ),
}
TERMINALS = ("claude_code", "codex", "opencode")
FRAMEWORKS = [name for name in CLIENTS if name not in TERMINALS]


def version(package: str) -> str:
    assert INTERPRETER is not None
    if NODE is not None and (found := Path(NODE).parent / package / "package.json").exists():
        return json.loads(found.read_text())["version"]
    asked = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([INTERPRETER, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Rows of docs/results/gateway.md, printed at the end."""
    rows: list[str] = []
    yield rows
    print("\n\n| client | version | API | calls | forks in the tree | what it needed of the gateway |")
    print("|---|---|---|---|---|---|", *rows, sep="\n")


def play(name: str, interpreter: str, engine: Watched, **more: Any) -> tuple[Session, subprocess.CompletedProcess[str]]:
    """One session of an agent of tests/gateway/frameworks.py, as a process that only speaks HTTP."""
    with world(engine, **more) as at:
        opened = at.open("t", seed=0)
        keys = {"ask": opened["key"], "reward": opened["reward_key"]}
        variables = variables_of(at.url, opened["session"], keys, "policy")
        command = [interpreter, str(Path(__file__).with_name("frameworks.py")), name]
        done = subprocess.run(command, env=environment_with(variables), capture_output=True, text=True, timeout=600)
        session = over(at, opened["session"], 1.0)
    return session, done


def failing_once() -> Watched:
    """The script, in an engine that gives no answer to the first prompt that holds the result of a tool."""
    failed = list[bool]()

    def fault(request: GenerationRequest) -> str | None:
        text = tokenizer().decode(request.prompt_ids)
        first = not failed and any(words in text for words in RESULTS)
        failed.extend([True] if first else [])
        return "out of luck" if first else None

    length = len(tokenizer())
    return Watched(ScriptedEngine(scripted, renderer().stop_ids, vocab_size=length, max_context=400_000, fault=fault))


@pytest.mark.skipif(INTERPRETER is None, reason="needs the clients of make test-agents (TURNTREE_AGENTS)")
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_plays_a_whole_session_unmodified_and_its_calls_are_one_tree(name: str, table: list[str]) -> None:
    """With all that it sends by default: a tool, a call that fails on the server and that the client makes again by
    itself, and a compaction where it has one."""
    if name in TERMINALS and NODE is None:
        pytest.skip("needs TURNTREE_NODE_AGENTS")
    assert INTERPRETER is not None
    client, engine = CLIENTS[name], failing_once()
    session, done = play(name, INTERPRETER, engine, sampling=Sampling(max_tokens=400), retries=0)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("Submitted" in done.stdout) if name == "mini_swe_agent" else ("Paris" in done.stdout)
    assert Counter(one.status for one in session.calls) == {"kept": len(session.calls) - 1, "failed": 1}
    goes_on = any(call.goes_on and call.added[0].role == "tool" for call in session.calls)
    assert goes_on or {"tools", "edited"} & set(client.forks)
    found = merge("t", [session])
    assert sampled_in(found.tree) == engine.sampled
    made = causes(found.tree)
    assert set(made) == {"retry", *client.forks}
    credit = CreditRule()(found.tree, found.rewards)
    assert set(credit.nodes) == {node.id for node in found.tree if node.sampled} - found.tree.untrained()
    shown = [client.title or client.package, version(client.package), client.speaks, str(len(session.calls))]
    forks = ", ".join(f"{count} {cause}" for cause, count in sorted(made.items()))
    table.append(f"| {' | '.join([*shown, forks, client.needed])} |")


@pytest.mark.skipif(None in (INTERPRETER, MODEL), reason="needs TURNTREE_AGENTS and TURNTREE_AGENTS_MODEL")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_pretrained_policy_drives_the_frameworks_and_is_recorded_as_sampled(name: str) -> None:
    """It may answer anything, also what makes an agent give up: what it said is kept all the same."""
    assert INTERPRETER is not None and MODEL is not None
    policy = load_policy(MODEL, Device(dtype="float32"))
    engine, limits = Watched(policy.engine), GatewayLimits(calls=6)
    session, done = play(
        name, INTERPRETER, engine, speaks=policy.renderer, limits=limits, sampling=Sampling(max_tokens=80)
    )
    found = merge("t", [session])
    assert session.calls and sampled_in(found.tree) == engine.sampled
    agrees_with_the_trainer(policy.model, found)
    called = Counter(call.name for one in session.calls if one.answer for call in one.answer.tool_calls)
    print(name, len(session.calls), "calls,", dict(called), dict(causes(found.tree)), done.stdout[-80:])
