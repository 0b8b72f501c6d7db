"""Agents whose last words are odd, and what clients of other frameworks ask for: read rightly, or named in one line."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from gateway_world import SAMPLING, SEARCH, World, engine, renderer, spelled, world

from turntree.core.config import Part
from turntree.credit.credit import CreditRule
from turntree.env.tasks import open_tasks
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import player_of
from turntree.rollout.scheduler import SchedulerConfig

SHARED = Path(__file__).parents[2].parent / "shared" / "cases" / "running" / "c24_agent" / "ag.py"
KINDS = re.findall(r'K == "(\w+)"', SHARED.read_text()) if SHARED.is_file() else []
# by kind: a word of the reason for which a session is censored; the others have the reward that they mean
CENSORED = {
    "bool": "'true'|'false'",
    "python_bool": "'True'|'False'",
    "text_then": "'reward: ",
    "percent": "'100%'|'0%'",
    "nan": "'NaN'",
    "trailing": "'bye'",
    "stderr": "no line",
    "success_only": '"success"',
    "int_success": "success",
    "exit1": "code 1",
    "color": "x1b",
    "bom": "ufeff",
}
HUGE = ("1e200", "1e39", "post1e200")  # censored where they say so, and 0 where the agent failed


@pytest.mark.skipif(not SHARED.is_file(), reason="needs the shared cases beside the project")
@pytest.mark.parametrize("kind", KINDS)
def test_every_odd_agent_of_the_shared_cases_has_its_reward_or_a_reason(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("KIND", kind)
    (tmp_path / "ag.py").write_text(SHARED.read_text())
    monkeypatch.chdir(tmp_path)
    policy = engine(lambda prompt, seed: spelled("go to desk 1" if seed % 2 else "go"))
    config = SchedulerConfig(group_size=4, episodes=EpisodeConfig(max_turns=4, sampling=SAMPLING))
    with open_tasks(Part(f"gateway:{sys.executable} -S ag.py", {"seconds": 60.0}), {"train": 1}) as opened:
        player = player_of(opened.of("train"), policy, renderer(), config)
        (group,) = player.run(opened.of("train"), seed=3)
    ends = group.rewards.verdicts
    first = {leaf: min(node for node in group.tree.nodes_of(leaf) if group.tree[node].sampled) for leaf in ends}
    right = {leaf: float("desk" in group.tree[node].messages[0].content) for leaf, node in first.items()}
    assert set(right.values()) == {0.0, 1.0}, "the seeds give both"
    for leaf, verdict in ends.items():
        good = right[leaf]
        assert "\n" not in verdict.reason and len(verdict.reason) < 700
        if kind in CENSORED or (kind in HUGE and good):
            assert verdict.reward is None and re.search(CENSORED.get(kind, "1e|no reward|code 1"), verdict.reason), (
                verdict
            )
        else:
            worth = {"big_int": 1e30, "1e30": 1e30 * good}.get(kind, good)
            assert verdict.reward == worth and verdict.reason, verdict
    credits = CreditRule()(group.tree, group.rewards).nodes.values()
    if len({one.reward for one in ends.values()} - {None}) > 1:
        values = [value for credit in credits for value in (credit.positive, credit.negative)]
        assert all(map(math.isfinite, values)) and any(values), "rewards that differ teach something"


# clients: what is refused by default is one clear line in the API's own form


@pytest.fixture(scope="module")
def gate() -> World:
    with world() as served:
        yield served


ASKED = {"model": "m", "messages": [{"role": "user", "content": "Bob"}]}
SCHEMA = {"name": "U", "strict": True, "schema": {"type": "object", "properties": {"name": {"type": "string"}}}}
FORCED = {"tools": [SEARCH], "tool_choice": {"type": "function", "function": {"name": "search"}}}
FORMED: dict[str, tuple[str, dict[str, Any]]] = {
    "instructor": ("chat/completions", {**ASKED, **FORCED}),
    "instructor in JSON mode": ("chat/completions", {**ASKED, "response_format": {"type": "json_object"}}),
    "pydantic-ai's output_type": ("chat/completions", {**ASKED, "tools": [SEARCH], "tool_choice": "required"}),
    "LangChain's structured output": ("chat/completions", {**ASKED, **FORCED, "parallel_tool_calls": False}),
    "chat.completions.parse": (
        "chat/completions",
        {**ASKED, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    ),
    "responses.parse": (
        "responses",
        {"model": "m", "input": "Bob", "text": {"format": {"type": "json_schema", **SCHEMA}}},
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "an embedding": ("embeddings", {"model": "m", "input": "Bob"}),
    "a legacy completion": ("completions", {"model": "m", "prompt": "Bob"}),
}


@pytest.mark.parametrize("who", FORMED)
def test_a_form_that_a_client_asks_for_is_kept_or_its_lack_is_one_line(gate, who, monkeypatch):
    """Without the package llguidance it is refused, naming the package; tests/gateway/test_forms.py has it."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    path, body = FORMED[who]
    answer = gate.post(f"/v1/{path}", body, gate.open()["key"])
    error = answer.json()["error"]
    assert answer.status_code == 400 and set(error) == {"message", "type", "param", "code"}
    assert error["param"] in ("tool_choice", "response_format") and "llguidance" in error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 200


@pytest.mark.parametrize("who", REFUSED)
def test_what_a_client_cannot_have_is_one_line_that_names_the_field(gate, who):
    path, body = REFUSED[who]
    answer = gate.post(f"/v1/{path}", body, gate.open()["key"])
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] is None
    assert "\n" not in error["message"] and len(error["message"]) < 200


TAKEN = {
    "smolagents": {**ASKED, "stop": ["Observation:", "Calling tools:"]},
    "LangChain with stop": {**ASKED, "stop": ["\nObservation:"]},
    "litellm": {**ASKED, "max_tokens": 8},
    "litellm with tools": {**ASKED, "max_tokens": 8, "tools": [SEARCH], "tool_choice": "auto"},
    "langgraph": {**ASKED, "tools": [SEARCH], "stream": False},
    "pydantic-ai": {**ASKED, "stream": False, "tools": [], "tool_choice": None},
    "dspy": {**ASKED, "temperature": 1.0, "max_tokens": 8, "n": 1},
    "a choice in an object": {**ASKED, "tools": [SEARCH], "tool_choice": {"type": "auto"}},
}


@pytest.mark.parametrize("who", TAKEN)
def test_what_clients_send_by_themselves_is_taken(gate, who):
    answer = gate.post("/v1/chat/completions", TAKEN[who], gate.open()["key"])
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.text)["choices"][0]["message"]["content"]
