"""Requests that come and go while others are in decoding: exact, shared, in order, and gone when cancelled."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from plain_model import ask, prefilled, prompt, worst_error

from tiny_models import tiny_model
from turntree.core.completion import Completion, GenerationRequest
from turntree.core.errors import ConfigError, TurntreeError
from turntree.engine.cache import RowCache
from turntree.engine.hf import HFEngine
from turntree.engine.limits import EngineConfig

STOPS = range(8, 16)
EXACT = 1e-5
Answered = list[tuple[GenerationRequest, Completion]]


def drain(engine: HFEngine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.in_flight:
        done |= {end.ticket: end.completion for end in engine.poll() if end.completion}
    return done


def traffic(engine: HFEngine, seed: int, calls: int = 120) -> Answered:
    """Random arrivals (new prompts, siblings, next turns, forks), cancellations and polls."""
    generator = random.Random(seed)
    asked: dict[int, GenerationRequest] = {}
    answered: Answered = []
    known = [prompt(generator.randint(1, 40), k) for k in range(4)]
    for _ in range(calls):
        kind = generator.choices(["submit", "poll", "cancel"], [6, 6, 1])[0]
        if kind == "submit":
            ids = generator.choice(known)
            ids = ids[: generator.choice([len(ids), len(ids), generator.randint(1, len(ids))])]
            request = ask(
                ids + prompt(generator.choice([0, 0, 3, 20]), generator.randrange(5)),
                generator.randrange(10**6),
                max_tokens=generator.choice([1, 3, 12]),
                temperature=generator.choice([0.0, 0.7, 1.0]),
                retain=generator.random() < 0.7,
            )
            asked[engine.submit(request)] = request
        elif kind == "cancel" and asked:
            ticket = generator.choice(list(asked))
            del asked[ticket]
            engine.cancel(ticket)
        else:
            for end in engine.poll(0):
                if (request := asked.pop(end.ticket, None)) is not None and end.completion is not None:
                    answered.append((request, end.completion))
                    known = [*known, request.prompt_ids + end.completion.token_ids][-8:]
    answered += [(asked[ticket], completion) for ticket, completion in drain(engine).items() if ticket in asked]
    return answered


@pytest.mark.parametrize(("kind", "seed"), [("qwen3", 0), ("llama", 1), ("qwen3", 2), ("llama", 3)])
def test_statistics_are_exact_whatever_comes_and_goes(kind, seed: int) -> None:
    model = tiny_model(kind)
    engine = HFEngine(model, STOPS, EngineConfig(max_batch_rows=(6, 40)[seed % 2], max_prefill_tokens=60))
    engine._kept.max_tokens = (500, 10**6)[seed // 2]
    answered = traffic(engine, seed)
    assert len(answered) > 30
    assert worst_error(model, *zip(*answered, strict=True)) < EXACT


def test_the_same_calls_give_the_same_bits() -> None:
    one, other = (traffic(HFEngine(tiny_model(), STOPS, EngineConfig(max_batch_rows=6)), 5, 60) for _ in range(2))

    def bits(answered: Answered) -> list[tuple]:
        return [(c.token_ids, c.logprobs, c.entropies, c.cost.counts()) for _, c in answered]

    assert bits(one) == bits(other)


def test_requests_that_arrive_apart_share_every_forward() -> None:
    model = tiny_model()
    engine = HFEngine(model, [])
    forwards: list[tuple[int, ...]] = []
    model.model.register_forward_pre_hook(
        lambda module, inputs, named: forwards.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    for length in (5, 17, 9):
        engine.submit(ask(prompt(length, length), max_tokens=8))
        engine.poll(0)
    drain(engine)
    decoding = [shape for shape in forwards if shape not in {(1, 5), (1, 17), (1, 9)}]
    assert decoding == [(1, 1), (1, 2), *[(1, 3)] * 5, (1, 2), (1, 1)]


def test_a_sibling_that_comes_late_joins_without_a_prefill_and_is_kept_too() -> None:
    model = tiny_model()
    engine = HFEngine(model, [])
    requests = [ask(prompt(30, 1), seed, max_tokens=10, retain=True) for seed in range(3)]
    for request in requests:
        engine.submit(request)
        engine.poll(0)
    completions = list(drain(engine).values())
    assert [completion.cost.prefilled_tokens for completion in completions] == [30, 0, 0]
    assert worst_error(model, requests, completions) < EXACT
    follow = [ask(r.prompt_ids + c.token_ids + (1, 2), 7) for r, c in zip(requests, completions, strict=True)]
    answers = engine.generate(follow)
    assert prefilled(answers) == 3 * 3
    assert worst_error(model, follow, answers) < EXACT


def test_a_prompt_is_computed_once_for_siblings_that_wait_for_a_place() -> None:
    engine = HFEngine(tiny_model(), STOPS, EngineConfig(max_batch_rows=4))
    completions = engine.generate([ask(prompt(30, 1), seed, max_tokens=2) for seed in range(10)])
    assert prefilled(completions) == 30


def test_requests_are_admitted_in_order_of_submission_as_places_become_free() -> None:
    engine = HFEngine(tiny_model(), [], EngineConfig(max_batch_rows=2))
    tickets = [engine.submit(ask(prompt(9, limit), max_tokens=limit)) for limit in (6, 2, 3, 9, 1)]
    ends = [[tickets.index(end.ticket) for end in engine.poll()] for _ in range(4)]
    assert ends == [[1], [2], [0], [4]]
    assert list(drain(engine)) == [tickets[3]]


def test_a_cancelled_request_makes_room_at_once_and_costs_what_it_drew() -> None:
    engine = HFEngine(tiny_model(), [], EngineConfig(max_batch_rows=1))
    long, short = engine.submit(ask(prompt(20, 1), max_tokens=200)), engine.submit(ask(prompt(5, 2), max_tokens=3))
    for _ in range(4):
        assert engine.poll(0) == []
    cost = engine.cancel(long)
    assert (cost.prefilled_tokens, cost.decoded_tokens, cost.turns) == (20, 5, 1)
    assert cost.engine_seconds > 0
    assert list(drain(engine)) == [short]


def test_when_all_are_cancelled_no_keys_and_values_are_left() -> None:
    engine = HFEngine(tiny_model(), [], EngineConfig(max_batch_rows=6))
    gc.collect()
    before = sum(type(thing) is RowCache for thing in gc.get_objects())
    tickets = [engine.submit(ask(prompt(20, seed % 3), seed, max_tokens=50, retain=True)) for seed in range(9)]
    engine.poll(0)
    assert sum(type(thing) is RowCache for thing in gc.get_objects()) > before
    for ticket in tickets:
        engine.cancel(ticket)
    gc.collect()
    assert sum(type(thing) is RowCache for thing in gc.get_objects()) == before
    assert (engine.in_flight, engine._kept.held_tokens) == (0, 0)


def test_a_sibling_goes_on_exactly_when_the_one_that_paid_for_the_prompt_is_cancelled() -> None:
    model = tiny_model()
    engine = HFEngine(model, [])
    requests = [ask(prompt(20, 1), seed, max_tokens=12, retain=True) for seed in range(3)]
    first, *others = map(engine.submit, requests)
    engine.poll(0)
    assert engine.cancel(first).prefilled_tokens == 20
    done = drain(engine)
    assert list(done) == others
    assert worst_error(model, requests[1:], list(done.values())) < EXACT


def test_conversations_out_of_step_prefill_only_what_is_new_and_stay_where_they_are() -> None:
    model = tiny_model()
    engine = HFEngine(model, [])
    histories = [prompt(20 + k, k) for k in range(4)]
    turns: dict[int, tuple[int, GenerationRequest]] = {}
    for step in range(40):
        for k in range(4):
            if step % (k + 2) == 0 and k not in {who for who, _ in turns.values()}:
                request = ask(histories[k], step, max_tokens=2 + k, retain=True)
                turns[engine.submit(request)] = (k, request)
        for end in engine.poll(0):
            k, request = turns.pop(end.ticket)
            assert end.completion is not None
            assert worst_error(model, [request], [end.completion]) < EXACT
            first = len(request.prompt_ids) == 20 + k
            assert end.completion.cost.prefilled_tokens == (20 + k if first else 4)
            histories[k] = request.prompt_ids + end.completion.token_ids + prompt(3, step)
    drain(engine)
    assert engine._kept.held_tokens <= 4 * 2 * max(map(len, histories))


def test_a_wave_between_requests_in_flight_disturbs_neither() -> None:
    model = tiny_model()
    engine = HFEngine(model, [])
    requests = [ask(prompt(12, seed), seed, max_tokens=9) for seed in range(6)]
    tickets = [engine.submit(request) for request in requests[:3]]
    engine.poll(0)
    wave = engine.generate(requests[3:])
    done = drain(engine)
    assert worst_error(model, requests, [*(done[ticket] for ticket in tickets), *wave]) < EXACT


def test_an_error_leaves_nothing_in_flight_and_the_engine_usable() -> None:
    model = tiny_model()
    engine = HFEngine(model, [])
    for seed in range(3):
        engine.submit(ask(prompt(20, seed), seed, retain=True))
    engine.poll(0)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(TurntreeError, match="call update_weights after an update"):
        engine.poll()
    assert engine.in_flight == 0
    engine.update_weights(model, 1)
    request = ask(prompt(20, 1), 1)
    assert worst_error(model, [request], engine.generate([request])) < EXACT


@pytest.mark.parametrize("limit", [{"max_batch_rows": 0}, {"max_context": 0}])
def test_impossible_limits_are_refused_by_name(limit: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limit))):
        EngineConfig(**limit)


def test_what_siblings_leave_behind_respects_the_bound_once_they_are_done() -> None:
    engine = HFEngine(tiny_model(), [])
    engine._kept.max_tokens = 130
    requests = [ask(prompt(50, 1), seed, max_tokens=2 + seed, retain=True) for seed in range(4)]
    tickets = [engine.submit(request) for request in requests]
    engine.poll()
    engine.cancel(tickets[2])
    drain(engine)
    assert 0 < engine._kept.held_tokens <= 130


def test_a_long_answer_to_a_short_prompt_and_the_reverse_may_end_in_one_step_and_one_block() -> None:
    model = tiny_model()
    engine = HFEngine(model, [])
    requests = [ask(prompt(length, length), max_tokens=1, retain=True) for length in (60, 17)]
    said = engine.generate(requests)
    late, early = (r.prompt_ids + c.token_ids + (1,) for r, c in zip(requests, said, strict=True))
    asked = {engine.submit(request): request for request in [ask(early, max_tokens=130, retain=True)]}
    for _ in range(128):
        assert engine.poll(0) == []
    asked |= {engine.submit(request): request for request in [ask(late, max_tokens=2, retain=True)]}
    done = drain(engine)
    follow = [ask(asked[ticket].prompt_ids + c.token_ids + (1, 2), 7) for ticket, c in done.items()]
    answers = engine.generate(follow)
    assert prefilled(answers) == 3 * 2
    assert worst_error(model, [*asked.values(), *follow], [*done.values(), *answers]) < EXACT
