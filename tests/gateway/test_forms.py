"""Stop texts, schemas, forced calls and streams: what is trained on is what was sampled from the policy."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from gateway_world import HTTP, SEARCH, World, engine, renderer, spelled, tokenizer, world
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_sessions import sequence_of

from scripted_engine import ScriptedEngine
from tiny_models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from turntree.core.completion import GenerationRequest, Sampling
from turntree.credit.comparisons import rloo
from turntree.credit.credit import CreditRule
from turntree.engine.hf import HFEngine
from turntree.engine.plain import PlainEngine
from turntree.gateway.merge import merge
from turntree.gateway.store import call_from_json, call_to_json
from turntree.render.template import ChatRenderer

PIECES = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "search", "arguments": {"q": 1}}',
    "<think>",
    "</think>",
    "<too",
    "\n",
)
PIECES += (" ", "so it is", "é", "🌲", "{", "<|tool_call_start|>", "[search(q=1)]", "<|tool_call_end|>", "Observation:")
texts = st.lists(st.sampled_from(PIECES), max_size=7).map("".join)


def echoes(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """What the user said last, letter by letter."""
    return spelled(tokenizer().decode(prompt).rpartition("<|user|>")[2].removesuffix("<|end|><|assistant|>"))


@pytest.fixture(scope="module")
def gate() -> World:
    with world(engine(echoes), sampling=Sampling(max_tokens=256)) as served:
        yield served


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


# stop texts


@given(
    st.text("abc \n", min_size=1, max_size=30), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3)
)
@settings(max_examples=40, deadline=None)
def test_an_answer_with_a_stop_text_is_cut_and_its_tokens_are_the_fewest_that_say_it(gate, text, stops):
    opened = gate.open()
    reply = gate.post("/v1/chat/completions", said(text, stop=stops), opened["key"]).json()["choices"][0]
    (call,) = gate.calls(opened["session"])
    said_after = (renderer().parse(spelled(text)[:n]).content for n in range(1, len(spelled(text)) + 1))
    content = renderer().parse(spelled(text)).content
    content = next((begun for begun in said_after if any(stop in begun for stop in stops)), content)
    place = min((content.find(stop) for stop in stops if stop in content), default=None)
    assert call.answer is not None and call.completion is not None and not call.answer.cut
    assert reply["message"]["content"] == call.answer.content == content[:place]
    assert reply["finish_reason"] == "stop"
    ids = call.completion.token_ids
    assert ids == spelled(text)[: len(ids)], "nothing but what was sampled"
    if place is None:
        assert call.completion.finish == "stop" and call.stop is None and ids == spelled(text)
        return
    assert call.completion.finish == "text" and content[place:].startswith(call.stop)
    holding = [n for n in range(1, len(ids) + 1) if any(stop in renderer().parse(ids[:n]).content for stop in stops)]
    assert holding == [len(ids)]
    found = merge("t", [replace(gate.sessions.get(opened["session"]).value(), reward=1.0)])
    (node,) = [node for node in found.tree if node.sampled]
    assert node.token_ids == ids and node.logprobs == call.completion.logprobs
    assert [(one.node, one.action) for one in found.tree.decisions] == [(node.id, "stop")]
    assert node.id in CreditRule()(found.tree, found.rewards).nodes, "it trains, on policy"
    assert call_from_json(json.loads(json.dumps(call_to_json(call))), {}) == call


def test_a_conversation_goes_on_behind_a_cut_answer_from_its_sampled_tokens(gate):
    opened = gate.open()
    body = said("Thought: go.\nObservation: none", stop=["\nObservation:"])
    answer = gate.post("/v1/chat/completions", body, opened["key"]).json()["choices"][0]["message"]
    later = {"model": "m", "messages": [*body["messages"], answer, {"role": "user", "content": "Observation: a door"}]}
    gate.post("/v1/chat/completions", later, opened["key"])
    first, second = gate.calls(opened["session"])
    assert second.cause == "continue" and second.prompt_ids[: len(sequence_of(first))] == sequence_of(first)


def test_anthropic_is_told_which_text_ended_the_answer(gate):
    body = {**said("one two three"), "max_tokens": 64, "stop_sequences": ["three", "two"]}
    for stream in (False, True):
        told = gate.post("/v1/messages", {**body, "stream": stream}, gate.open()["key"]).text
        assert '"stop_reason": "stop_sequence", "stop_sequence": "two"' in told and "three" not in told


class Ends:
    """A guide that ends after a token of a set, and allows some tokens only."""

    stop, grammar = ("x",), None

    def __init__(self, ending: set[int], allowed: set[int] | None = None) -> None:
        self.ending, self.may, self.taken = ending, allowed, list[int]()

    def allowed(self) -> bytes | None:
        if self.may is None:
            return None
        bits = np.zeros(384, dtype=np.uint8)
        bits[sorted(self.may)] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def take(self, token: int) -> bool:
        self.taken.append(token)
        return token in self.ending


@pytest.mark.parametrize("kind", [HFEngine, PlainEngine])
def test_an_engine_samples_up_to_the_end_of_a_guide_what_it_samples_without_one(kind):
    sampler = kind(tiny_model(), {1})
    plain = [
        GenerationRequest(prompt_ids=(5, 6, seed % 2), sampling=Sampling(max_tokens=12), seed=seed) for seed in range(6)
    ]
    whole = sampler.generate(plain)
    guides = [
        Ends({done.token_ids[min(3, len(done.token_ids) - 1)]}) if n % 2 else None for n, done in enumerate(whole)
    ]
    guided = sampler.generate([replace(one, guide=guide) for one, guide in zip(plain, guides, strict=True)])
    for free, held, guide in zip(whole, guided, guides, strict=True):
        count = len(held.token_ids)
        assert held.token_ids == free.token_ids[:count]
        assert held.logprobs == pytest.approx(free.logprobs[:count], abs=1e-5)
        if guide is not None:
            assert held.finish == ("stop" if held.token_ids[-1] == 1 else "text")
            assert tuple(guide.taken) == held.token_ids and not guide.ending & set(held.token_ids[:-1])


@pytest.mark.parametrize("kind", [HFEngine, PlainEngine])
def test_under_a_mask_a_token_has_its_probability_among_those_allowed(kind):
    model, may = tiny_model(), set(range(10, 40))
    request = GenerationRequest(prompt_ids=(5, 6, 7), sampling=Sampling(max_tokens=8), seed=4)
    (held,) = kind(model, {1}).generate([replace(request, guide=Ends(set(), may))])
    assert set(held.token_ids) <= may
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7, *held.token_ids]])).logits[0, 2:-1, sorted(may)].double()
    at = [sorted(may).index(token) for token in held.token_ids]
    logprobs = logits.log_softmax(-1)
    assert held.logprobs == pytest.approx([float(logprobs[t, k]) for t, k in enumerate(at)], abs=1e-4)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    assert held.entropies == pytest.approx(entropies.tolist(), abs=1e-4)


# schemas and forced calls

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["desk", "shelf"]}, "n": {"enum": [1, 2]}},
    "required": ["place", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "where", "strict": True, "schema": SCHEMA}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def free() -> World:
    """A policy without any idea, whose calls are right only where a grammar makes them."""
    pytest.importorskip("llguidance")
    tools = "{% for tool in tools or [] %}<|system|>{{ tool | tojson }}<|end|>{% endfor %}"
    speaks = ChatRenderer(
        tiny_tokenizer(tools + CHAT_TEMPLATE)
    )  # without a place for thoughts, of which such a policy finds no end
    with world(
        HFEngine(tiny_model(vocab_size=len(tokenizer())), renderer().stop_ids),
        sampling=Sampling(max_tokens=120),
        speaks=speaks,
    ) as served:
        yield served


FORMS = {
    "a schema": ("/v1/chat/completions", {"response_format": FORMAT}),
    "a forced call": (
        "/v1/chat/completions",
        {"tools": [SEARCH, LOOK], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    ),
    "any call": ("/v1/chat/completions", {"tools": [LOOK], "tool_choice": "required"}),
    "a schema, or a call": ("/v1/chat/completions", {"tools": [LOOK], "response_format": FORMAT}),
    "a schema of responses": (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}},
    ),
    "a schema of messages": ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    "a call of messages": (
        "/v1/messages",
        {"tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    ),
}


@pytest.mark.parametrize("what", FORMS)
def test_an_answer_has_the_form_that_was_asked_for_and_is_not_trained(free, what):
    path, more = FORMS[what]
    opened = free.open(seed=3)
    asked = {"input": "Where?", **more} if path.endswith("responses") else said("Where?", **more)
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    answer = free.post(path, {**asked, limit: 120}, opened["key"])
    assert answer.status_code == 200, answer.text
    free.post("/v1/chat/completions", said("And now?", max_tokens=5), opened["key"])
    formed, plain = free.calls(opened["session"])
    assert formed.answer is not None and formed.constrained and not plain.constrained
    assert not formed.answer.cut
    said_in_form = [call.arguments for call in formed.answer.tool_calls] or [json.loads(formed.answer.content)]
    assert bool(formed.answer.tool_calls) == ("call" in what) or what == "a schema, or a call"
    for one in said_in_form:
        jsonschema.validate(one, SCHEMA)
    found = merge("t", [replace(free.sessions.get(opened["session"]).value(), reward=1.0)])
    nodes = {name: node for (_, name), node in found.nodes.items()}
    assert found.tree.untrained() == {nodes[formed.call_id]}
    assert set(CreditRule()(found.tree, found.rewards).nodes) == {nodes[plain.call_id]}
    assert found.unattributed == {"a call that was sampled under a grammar": 1}
    assert call_from_json(json.loads(json.dumps(call_to_json(formed))), {}) == formed


def test_a_form_that_cannot_be_had_is_refused_in_one_line(free):
    nowhere = {"response_format": {**FORMAT, "json_schema": {"name": "w", "schema": {"type": "no such type"}}}}
    pythonic = ChatRenderer(tokenizer(), tool_format="pythonic")
    for more, speaks in ((nowhere, renderer()), (FORMS["any call"][1], pythonic)):
        with world(engine(), speaks=speaks) as gate:
            answer = gate.post("/v1/chat/completions", said("Where?", **more), gate.open()["key"])
            assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] in ("response_format", "tool_choice")


# what training on tokens that a grammar chose would do: every draw, with its probability
# Token 1 is drawn freely, token 2 from those of three that a grammar allows after it.
FREE = (0.6, 0.4)
POLICY = ((0.2, 0.3, 0.5), (0.6, 0.1, 0.3))
ALLOWED = ((0, 1), (1, 2))
REWARD = {(0, 0): 0.0, (0, 1): 1.0, (1, 1): 0.5, (1, 2): 0.25}


def gradient(rule: str, reward: dict[tuple[int, int], float] = REWARD) -> list[float]:
    """The expected update by the logits of token 1 (2 numbers) and of token 2 after each (3 + 3)."""
    total = [0.0] * 8
    for (a, b), worth in reward.items():
        mass = sum(POLICY[a][k] for k in ALLOWED[a])
        masked = [POLICY[a][k] / mass if k in ALLOWED[a] else 0.0 for k in range(3)]
        chance = FREE[a] * masked[b]
        for k in range(2):
            total[k] += chance * worth * ((k == a) - FREE[k])
        drawn = {"with the mask": masked, "without the mask": POLICY[a]}.get(rule)
        for k in range(3) if drawn else ():
            total[2 + 3 * a + k] += chance * worth * ((k == b) - drawn[k])
    return total


def true_gradient() -> list[float]:
    """Of the expected reward, by differences."""

    def value(shift: list[float]) -> float:
        first = [p * math.exp(s) for p, s in zip(FREE, shift[:2], strict=True)]
        total = 0.0
        for (a, b), worth in REWARD.items():
            after = [p * math.exp(s) for p, s in zip(POLICY[a], shift[2 + 3 * a : 5 + 3 * a], strict=True)]
            total += worth * first[a] / sum(first) * after[b] / sum(after[k] for k in ALLOWED[a])
        return total

    steps = [[h * (i == k) for i in range(8)] for k in range(8) for h in (1e-6, -1e-6)]
    return [(value(up) - value(down)) / 2e-6 for up, down in zip(steps[::2], steps[1::2], strict=True)]


def test_tokens_of_a_grammar_have_the_true_gradient_with_the_mask_and_a_biased_one_without():
    true = true_gradient()
    assert gradient("with the mask") == pytest.approx(true, abs=1e-6)
    left_out, naive = gradient("not trained"), gradient("without the mask")
    assert left_out[:2] == pytest.approx(true[:2], abs=1e-6) and not any(left_out[2:]), "the rest is exact"
    off = math.dist(naive, true) / math.hypot(*true)
    assert off == pytest.approx(1.063, abs=0.001), off
    # where every answer is worth the same there is nothing to learn: without the mask it still learns the grammar
    constant = dict.fromkeys(REWARD, 1.0)
    assert gradient("with the mask", constant) == pytest.approx([0.0] * 8, abs=1e-12)
    assert math.hypot(*gradient("without the mask", constant)) > 0.2
    # a baseline does not mend it: what it takes away is not zero on average
    assert rloo((1.0, 1.0)) == pytest.approx((0.0, 0.0))


# streams


@given(texts, st.sampled_from(["hermes", "json", "pythonic", "none"]))
@example("<too<tool_call>", "hermes")
@settings(max_examples=150, deadline=None)
def test_what_a_stream_may_send_is_a_beginning_of_the_answer_whatever_follows(text, form):
    speaks = _renderer(form)
    ids = spelled(text)
    whole = speaks.parse(ids)
    sent = 0
    for count in range(len(ids) + 1):
        begun = speaks.begun(ids[:count])
        assert whole.content.startswith(begun.content) and len(begun.content) >= sent
        assert not begun.content or begun.reasoning == whole.reasoning
        sent = len(begun.content)


def _renderer(form: str, made: dict[str, ChatRenderer] = {}) -> ChatRenderer:  # noqa: B006
    if form not in made:
        made[form] = ChatRenderer(tokenizer(), tool_format=form)
    return made[form]


class Dripping(ScriptedEngine):
    """Draws a token a step, and stops in the middle until it is told to go on."""

    def __init__(self, text: str) -> None:
        super().__init__(lambda prompt, seed: spelled(text), renderer().stop_ids, vocab_size=len(tokenizer()))
        self.text, self.seen, self.left = text, threading.Event(), list[int]()

    def submit(self, request: GenerationRequest) -> int:
        self.guide, self.left = request.guide, list(spelled(self.text))
        return super().submit(replace(request, guide=None))

    def poll(self, timeout: float | None = None) -> Any:
        if not self.left:
            return super().poll(0)
        if self.seen.is_set() or len(self.left) > len(self.text) // 2:
            token = self.left.pop(0)
            if self.guide is not None:
                self.guide.take(token)
        else:
            time.sleep(0.001)
        return []


DELTAS = {
    "/v1/chat/completions": lambda event: event["choices"][0]["delta"].get("content") if event["choices"] else None,
    "/v1/responses": lambda event: event.get("delta") if event["type"] == "response.output_text.delta" else None,
    "/v1/messages": lambda event: event.get("delta", {}).get("text"),
}


@pytest.mark.parametrize("path", DELTAS)
def test_text_reaches_the_client_while_it_is_sampled(path):
    text = "First I look at the map, then I open the door and go left."
    policy = Dripping(text)
    with world(policy, sampling=Sampling(max_tokens=256)) as gate:
        opened = gate.open()
        body = {"model": "m", "stream": True, **({"input": "Go."} if "responses" in path else said("Go."))}
        body |= {"max_tokens": 256} if "messages" in path else {}
        found, early = "", ""
        headers = {"authorization": f"Bearer {opened['key']}"}
        with HTTP.stream("POST", gate.url + path, json=body, headers=headers) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    found += DELTAS[path](json.loads(line.removeprefix("data: "))) or ""
                if found and not policy.seen.is_set():
                    early = found
                    assert not gate.calls(opened["session"]), "the answer is not whole"
                    policy.seen.set()
        assert found == text and early and text.startswith(early)
        (call,) = gate.calls(opened["session"])
        assert call.answer is not None and call.answer.content == text


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_its_place():
    policy = Dripping("First I look at the map, then I open the door and go left.")
    with world(policy) as gate:
        opened = gate.open()
        headers = {"authorization": f"Bearer {opened['key']}"}
        body = {**said("Go."), "stream": True}
        with HTTP.stream("POST", f"{gate.url}/v1/chat/completions", json=body, headers=headers) as answer:
            next(answer.iter_lines())
        until = time.monotonic() + 30
        while not gate.calls(opened["session"]) and time.monotonic() < until:
            time.sleep(0.01)
        assert [call.status for call in gate.calls(opened["session"])] == ["disconnected"]
        assert policy.in_flight == 0
