"""Agents that nobody here wrote speak to a gateway; what is trained on is what was sampled.

The suite drives the OpenAI SDK. `make test-agents` installs the other frameworks and sets TURNTREE_AGENTS to their
interpreter, and TURNTREE_NODE_AGENTS to the folder of the commands that come from npm. A random policy makes no tool
calls, so the shapes of agents are driven by a script that does, and the log-probabilities by a model. With
TURNTREE_AGENTS_MODEL (the folder of a pretrained policy with a chat template, as `turntree models get smollm2` makes
it) that policy drives the frameworks too.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_world import World, renderer, tokenizer, world

from tiny_models import tiny_model
from turntree.core.completion import Finished, GenerationRequest, Sampling
from turntree.core.messages import Message, ToolCall
from turntree.core.tree import RolloutTree
from turntree.credit.credit import CreditRule
from turntree.engine.hf import HFEngine
from turntree.engine.scripted import ScriptedEngine
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
    """Calls the tool that the prompt shows, and answers once that has."""
    text = tokenizer().decode(prompt)
    answered = text.rsplit("<|", 3)[1].startswith("tool|>")
    if '"bash"' in text:
        if "No tool calls found" not in text:
            return renderer().completion(Message("assistant", "I would look around."))
        command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if answered else "echo hello"
        return renderer().completion(calling("bash", command=command))
    if '"final_answer"' in text and answered:  # smolagents ends with a call
        return renderer().completion(calling("final_answer", answer="It is Paris."))
    if answered:
        return renderer().completion(Message("assistant", "It is Paris."))
    for tool, more in TERMINAL.items():
        if f'"name": "{tool}"' in text:
            return renderer().completion(calling(tool, **more))
    if '"librarian"' in text:
        return renderer().completion(calling("librarian", input="the capital of France"))
    return renderer().completion(calling("search", query="capital of France"))


TERMINAL: dict[str, dict[str, Any]] = {  # the shells of the clients of a terminal
    "Bash": {"command": "echo hello", "description": "Say hello"},
    "exec_command": {"cmd": "echo hello"},
    "shell_command": {"command": "echo hello"},
}


def calling(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(name, arguments),))


def play(name: str, interpreter: str, engine: Watched, **more: Any) -> tuple[Session, subprocess.CompletedProcess[str]]:
    """One session of an agent of tests/gateway/frameworks.py, as a process that only speaks HTTP."""
    with world(engine, **more) as at:
        opened = at.open("t", seed=0)
        keys = {"ask": opened["key"], "reward": opened["reward_key"]}
        variables = variables_of(at.url, opened["session"], keys, "policy")
        command = [interpreter, str(Path(__file__).with_name("frameworks.py")), name]
        done = subprocess.run(command, env=environment_with(variables), capture_output=True, text=True, timeout=600)
        session = over(at, opened["session"], 1.0)
    assert {one.status for one in session.calls} == {"kept"}
    return session, done


# The forks that each framework makes by itself: the agents SDK asks its second agent in a new conversation, and
# mini-swe-agent leaves an answer without a tool call out of its history, with a complaint in its place.
FORKS: dict[str, dict[str, int]] = {
    "openai_sdk": {},
    "anthropic_sdk": {"retry": 1},
    "litellm": {},
    "agents_sdk": {"another conversation": 1},
    "agents_sdk_responses": {},
    "langgraph": {},
    "langgraph_anthropic": {},
    "pydantic_ai": {},
    "pydantic_ai_anthropic": {},
    "smolagents": {},
    "mini_swe_agent": {"compaction": 1},
}
TERMINALS = ("claude_code", "codex")


def scripted_engine() -> Watched:
    return Watched(ScriptedEngine(scripted, renderer().stop_ids, vocab_size=len(tokenizer()), max_context=400_000))


@pytest.mark.skipif(INTERPRETER is None, reason="needs the frameworks of make test-agents (TURNTREE_AGENTS)")
@pytest.mark.parametrize("name", FORKS)
def test_frameworks_run_unmodified_and_their_calls_are_one_tree(name: str) -> None:
    assert INTERPRETER is not None
    engine = scripted_engine()
    session, done = play(name, INTERPRETER, engine, sampling=Sampling(max_tokens=400))
    assert done.returncode == 0, done.stderr[-2000:]
    found = merge("t", [session])
    assert sampled_in(found.tree) == engine.sampled
    assert ("Submitted" in done.stdout) if name == "mini_swe_agent" else ("Paris" in done.stdout)
    assert causes(found.tree) == FORKS[name]
    assert len(found.tree.leaves()) == 1 + len(FORKS[name])
    print(name, len(found.tree), "nodes")


@pytest.mark.skipif(None in (INTERPRETER, NODE), reason="needs TURNTREE_AGENTS and TURNTREE_NODE_AGENTS")
@pytest.mark.parametrize("name", TERMINALS)
def test_a_client_of_a_terminal_plays_a_whole_session_with_a_tool(name: str) -> None:
    """Unmodified, with all that it sends by default. Whatever else it asks beside (titles) is in the tree too."""
    assert INTERPRETER is not None
    engine = scripted_engine()
    session, done = play(name, INTERPRETER, engine, sampling=Sampling(max_tokens=400))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Paris" in done.stdout
    found = merge("t", [session])
    assert sampled_in(found.tree) == engine.sampled
    main = [call for call in session.calls if call.turn is not None]
    assert any(call.goes_on and call.added[0].role == "tool" for call in session.calls)
    credit = CreditRule()(found.tree, found.rewards)
    assert set(credit.nodes) == {node.id for node in found.tree if node.sampled}
    print(name, len(session.calls), "calls,", len(main), "in the first conversation,", dict(causes(found.tree)))


@pytest.mark.skipif(None in (INTERPRETER, MODEL), reason="needs TURNTREE_AGENTS and TURNTREE_AGENTS_MODEL")
@pytest.mark.parametrize("name", FORKS)
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
