"""The scripted engine says what it is told, and refuses scripts that no model could have said."""

from __future__ import annotations

import pytest
from plain_model import ask

from scripted_engine import ScriptedAnswer, ScriptedEngine
from turntree.core.errors import InputError, TurntreeError


def test_the_answer_is_that_of_the_prompt_and_the_seed() -> None:
    answers = engine().generate([ask((1, 2), 3), ask((1, 2), 4), ask((5,), 9)])
    assert [answer.token_ids for answer in answers] == [(1, 2, 3, 0), (1, 2, 4, 0), (5, 9, 0)]


def test_an_answer_without_an_end_is_an_error() -> None:
    engine = ScriptedEngine(lambda prompt, seed: (5, 6), [0], vocab_size=10)
    with pytest.raises(InputError, match="answers 2 tokens without a stop token, 6 were to be sampled"):
        engine.generate([ask((1,))])


def test_an_answer_is_cut_at_its_stop_token_or_limit() -> None:
    engine = ScriptedEngine(lambda prompt, seed: (5, 6, 0, 7), [0], vocab_size=10)
    stopped, cut = engine.generate([ask((1,)), ask((1,), max_tokens=2)])
    assert (stopped.token_ids, stopped.finish) == ((5, 6, 0), "stop")
    assert (cut.token_ids, cut.finish) == ((5, 6), "length")


def test_statistics_may_be_scripted() -> None:
    answer = ScriptedAnswer((5, 0), logprobs=(-0.5, -0.25), entropies=(1.0, 0.5))
    (completion,) = ScriptedEngine(lambda prompt, seed: answer, [0], vocab_size=10).generate([ask((1,))])
    assert completion.logprobs == (-0.5, -0.25)
    assert completion.entropies == (1.0, 0.5)


def engine(**how) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, seed: (*prompt, seed, 0), [0], vocab_size=100, **how)


def tickets(finished) -> list[int]:
    return [end.ticket for end in finished]


def test_a_request_takes_as_many_steps_as_its_latency() -> None:
    streaming = engine(latency=lambda request: request.seed)
    assert [streaming.submit(ask((7,), seed)) for seed in (2, 1, 3, 1)] == [0, 1, 2, 3]
    assert [tickets(streaming.poll(0)) for _ in range(3)] == [[1, 3], [0], [2]]
    assert (streaming.in_flight, streaming.poll()) == (0, [])


def test_poll_goes_on_until_something_is_finished() -> None:
    streaming = engine(latency=lambda request: request.seed)
    for seed in (5, 3):
        streaming.submit(ask((7,), seed))
    assert [tickets(streaming.poll()) for _ in range(2)] == [[1], [0]]


def test_only_so_many_requests_are_admitted_at_once_in_order_of_submission() -> None:
    streaming = engine(latency=lambda request: request.seed, max_batch_rows=2)
    for seed in (3, 1, 1, 1):
        streaming.submit(ask((7,), seed))
    assert [tickets(streaming.poll(0)) for _ in range(4)] == [[1], [2], [0, 3], []]


def test_a_cancelled_request_costs_the_steps_it_took_and_is_never_returned() -> None:
    streaming = engine(latency=lambda request: 3, max_batch_rows=2)
    for prompt in ((1, 2), (1, 2), (3,)):
        streaming.submit(ask(prompt, 9))
    assert streaming.poll(0) == []
    payer, sharer, waiting, unknown = (streaming.cancel(ticket).counts() for ticket in (0, 1, 2, 7))
    assert (payer["prefilled_tokens"], payer["reused_tokens"], payer["decoded_tokens"]) == (2, 0, 1), "a third of four"
    assert (sharer["prefilled_tokens"], sharer["reused_tokens"], sharer["decoded_tokens"]) == (0, 2, 1)
    assert not any((waiting | unknown).values())
    assert (streaming.in_flight, streaming.poll()) == (0, [])


def test_a_faulty_request_ends_with_its_reason_and_leaves_its_neighbours_alone() -> None:
    streaming = engine(fault=lambda request: "no machine" if request.seed == 1 else None)
    for seed in (0, 1, 2):
        streaming.submit(ask((7,), seed))
    assert [end.fault for end in streaming.poll()] == [None, "no machine", None]
    with pytest.raises(TurntreeError, match="no machine"):
        streaming.generate([ask((7,), 1)])
