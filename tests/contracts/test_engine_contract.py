"""What every engine promises: the two model engines, the scripted one, that of Tinker over a fake SDK, and `vllm` over
a fake server and (`make test-vllm`) over a real one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_tinker import BASE, FakeTinker
from fake_vllm import FakeVllm, running
from model_families import family_model
from scripted_engine import ScriptedEngine
from scripted_tinker import ScriptedTinker, installed, path
from tiny_models import VOCAB_SIZE, tiny_model, tiny_tokenizer
from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.cost import NO_COST
from turntree.core.errors import InputError, TurntreeError
from turntree.core.protocols import Engine, StreamingEngine
from turntree.core.seeds import generator
from turntree.engine.hf import HFEngine
from turntree.engine.limits import EngineConfig, TinkerConfig, VllmConfig
from turntree.engine.plain import PlainEngine
from turntree.engine.tinker import TinkerAdapter, TinkerEngine, TinkerSession
from turntree.engine.vllm import VllmEngine

STOP = 9
CONTEXT = 64


def model_engine() -> StreamingEngine:
    return HFEngine(tiny_model(), [STOP], EngineConfig(max_context=CONTEXT))


def plain_engine() -> StreamingEngine:
    return PlainEngine(family_model("LFM2"), [STOP], EngineConfig(max_context=CONTEXT))


def scripted_engine() -> StreamingEngine:
    def answer(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
        draw = generator(seed, *prompt)
        length = draw.randint(1, 8)
        return (*(draw.randrange(10, VOCAB_SIZE) for _ in range(length)), STOP)

    return ScriptedEngine(answer, [STOP], vocab_size=VOCAB_SIZE, max_context=CONTEXT)


def tinker_engine() -> StreamingEngine:
    session = TinkerSession(TinkerConfig(), [BASE])
    engine = TinkerEngine(session, session.sampler(), [STOP], VOCAB_SIZE, CONTEXT)
    engine.model = TinkerAdapter(session, 2)  # type: ignore[attr-defined] # of which `update` takes the weights
    return engine


@contextlib.contextmanager
def server_engines(kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[[], StreamingEngine]]:
    """Makes engines over one server, and closes them."""
    with contextlib.ExitStack() as stack:
        if kind == "tinker":
            stack.enter_context(installed(FakeTinker(tiny_model())))
            yield tinker_engine
            return
        url, model = (
            (stack.enter_context(running(FakeVllm(tiny_model()))), tiny_model())
            if kind == "vllm"
            else request.getfixturevalue("real_vllm")
        )
        config = VllmConfig(url=url, max_context=CONTEXT)
        yield lambda: stack.enter_context(VllmEngine(config, model, tiny_tokenizer(), {STOP}))


ENGINES: list[Any] = [
    model_engine,
    plain_engine,
    scripted_engine,
    "tinker",
    "vllm",
    pytest.param("real vllm", marks=pytest.mark.vllm),
]


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Engine]]:
    if callable(request.param):
        yield request.param
        return
    with server_engines(request.param, request) as factory:
        yield factory


def update(engine: Engine, version: int) -> None:
    """New weights, which are the old ones."""
    held = getattr(engine, "model", None) or getattr(engine, "_policy", None)  # of a server's engine
    engine.update_weights(held or tiny_model(), version)


def wave() -> list[GenerationRequest]:
    sampling = Sampling(max_tokens=5)
    return [
        GenerationRequest(prompt_ids=tuple(range(10, 10 + length)), sampling=sampling, seed=seed, retain=seed == 1)
        for length in (3, 12, 20)
        for seed in range(3)
    ]


def test_answers_come_in_the_order_of_the_requests(make: Callable[[], Engine]) -> None:
    requests = wave()
    forwards, backwards = make().generate(requests), make().generate(requests[::-1])
    assert [c.token_ids for c in forwards] == [c.token_ids for c in backwards[::-1]]


def test_an_answer_depends_on_its_own_request_only(make: Callable[[], Engine]) -> None:
    engine, requests = make(), wave()
    together = engine.generate(requests)
    assert [c.token_ids for c in together] == [make().generate([request])[0].token_ids for request in requests]
    assert [c.token_ids for c in together] == [c.token_ids for c in engine.generate(requests)], "nor on earlier waves"


def test_every_answer_ends_with_its_stop_token_or_at_its_limit(make: Callable[[], Engine]) -> None:
    for completion in make().generate(wave()):
        assert 1 <= len(completion.token_ids) <= 5
        assert STOP not in completion.token_ids[:-1]
        assert completion.finish == ("stop" if completion.token_ids[-1] == STOP else "length")
        assert completion.finish == "stop" or len(completion.token_ids) == 5


def test_statistics_are_those_of_a_distribution_over_the_vocabulary(make: Callable[[], Engine]) -> None:
    for completion in make().generate(wave()):
        assert all(logprob <= 0 for logprob in completion.logprobs)
        assert all(0 <= entropy <= math.log(VOCAB_SIZE) + 1e-5 for entropy in completion.entropies)


def test_the_ledger_accounts_for_every_prompt_position_once(make: Callable[[], Engine]) -> None:
    requests, engine = wave(), make()
    completions = engine.generate(requests)
    costs = [completion.cost for completion in completions]
    assert sum(c.prefilled_tokens + c.reused_tokens for c in costs) == sum(len(r.prompt_ids) for r in requests)
    # a server shares whole blocks, which are longer than these prompts, or says nothing of what it shares
    in_blocks = isinstance(engine, VllmEngine | TinkerEngine)
    assert in_blocks or sum(c.prefilled_tokens for c in costs) <= 3 + 12 + 20, "siblings share their prompt"
    assert [c.decoded_tokens for c in costs] == [len(completion.token_ids) for completion in completions]
    assert all(c.turns == 1 and c.tool_calls == c.trained_tokens == 0 for c in costs)


def test_completions_carry_the_policy_version(make: Callable[[], Engine]) -> None:
    engine = make()
    assert engine.policy_version == 0
    assert {completion.policy_version for completion in engine.generate(wave())} == {0}
    update(engine, 4)
    assert engine.policy_version == 4
    assert {completion.policy_version for completion in engine.generate(wave())} == {4}


def test_a_prompt_without_room_for_an_answer_is_refused_by_name(make: Callable[[], Engine]) -> None:
    full = GenerationRequest(prompt_ids=(10,) * CONTEXT, sampling=Sampling(), seed=0)
    with pytest.raises(InputError, match="request 9 has a prompt of 64 tokens, the context holds 64"):
        make().generate([*wave(), full])


@pytest.mark.parametrize("prompt_ids", [(), (5, VOCAB_SIZE), (-1,)])
def test_a_prompt_that_is_empty_or_not_of_the_vocabulary_is_refused(
    make: Callable[[], Engine], prompt_ids: tuple[int, ...]
) -> None:
    with pytest.raises(InputError, match=r"request 0 has an empty prompt or a token id outside 0\.\.383"):
        make().generate([GenerationRequest(prompt_ids=prompt_ids, sampling=Sampling(), seed=0)])


# requests that come and go one by one


@pytest.fixture(params=ENGINES)
def streaming(request: pytest.FixtureRequest) -> Iterator[StreamingEngine]:
    if callable(request.param):
        yield request.param()
        return
    with server_engines(request.param, request) as factory:
        yield factory()


def answer_of(completion: Completion | None) -> tuple[object, ...]:
    assert completion is not None
    return completion.token_ids, completion.finish, completion.policy_version


def check_statistics(one: Completion, other: Completion) -> None:
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert one.entropies == pytest.approx(other.entropies, abs=1e-5)


PROMPTS = [tuple(range(10, 10 + length)) for length in (1, 3, 12, 13, 20, 40)]
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, len(PROMPTS) - 1), st.integers(0, 9), st.integers(1, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("poll"), st.sampled_from([0, 0.001, None])),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CALLS)
def test_whatever_comes_and_goes_each_ticket_is_returned_once_with_its_own_answer(
    streaming: StreamingEngine, calls: list[tuple]
) -> None:
    asked: dict[int, GenerationRequest] = {}
    returned: dict[int, Completion] = {}
    cancelled: set[int] = set()
    tickets: list[int] = []

    def poll(timeout: float | None) -> None:
        finished = streaming.poll(timeout)
        assert [end.ticket for end in finished] == sorted(end.ticket for end in finished)
        assert finished or timeout is not None or not streaming.in_flight
        for end in finished:
            assert end.ticket not in returned
            assert end.completion is not None
            returned[end.ticket] = end.completion

    for kind, *how in calls:
        if kind == "submit":
            which, seed, limit = how
            request = GenerationRequest(
                prompt_ids=PROMPTS[which], sampling=Sampling(max_tokens=limit), seed=seed, retain=seed % 2 == 0
            )
            tickets.append(streaming.submit(request))
            asked[tickets[-1]] = request
        elif kind == "poll":
            poll(*how)
        elif how[0] < len(tickets):
            ticket = tickets[how[0]]
            cost = streaming.cancel(ticket)
            assert cost == NO_COST or ticket not in returned
            cancelled |= {ticket} - set(returned)
        assert streaming.in_flight == len(asked) - len(returned) - len(cancelled)
    while streaming.in_flight:
        poll(None)
    assert streaming.poll() == []
    assert tickets == sorted(set(tickets)), "tickets are in order of submission"
    assert set(returned) == set(asked) - cancelled
    for ticket, completion in returned.items():
        (alone,) = streaming.generate([asked[ticket]])
        assert answer_of(completion) == answer_of(alone)
        check_statistics(completion, alone)
        cost = completion.cost
        assert cost.prefilled_tokens + cost.reused_tokens == len(asked[ticket].prompt_ids)
        assert cost.decoded_tokens == len(completion.token_ids)


def test_a_wave_between_submissions_leaves_what_is_in_flight_alone(streaming: StreamingEngine) -> None:
    requests = wave()
    tickets = [streaming.submit(request) for request in requests]
    finished = streaming.poll(0)
    together = [answer_of(completion) for completion in streaming.generate(requests)]
    while streaming.in_flight:
        finished += streaming.poll()
    assert sorted(end.ticket for end in finished) == tickets
    assert [answer_of(end.completion) for end in sorted(finished, key=lambda end: end.ticket)] == together


def test_submitting_refuses_what_a_wave_would_refuse(streaming: StreamingEngine) -> None:
    with pytest.raises(InputError, match="64 tokens"):
        streaming.submit(GenerationRequest(prompt_ids=(10,) * CONTEXT, sampling=Sampling(), seed=0))
    with pytest.raises(InputError, match="an empty prompt"):
        streaming.submit(GenerationRequest(prompt_ids=(), sampling=Sampling(), seed=0))
    assert streaming.in_flight == 0


def test_weights_do_not_change_under_a_request_in_flight(streaming: StreamingEngine) -> None:
    ticket = streaming.submit(wave()[0])
    with pytest.raises(TurntreeError, match=r"requests are in flight \(1\); poll or cancel"):
        update(streaming, 1)
    streaming.cancel(ticket)
    update(streaming, 1)
    streaming.submit(wave()[0])
    (end,) = streaming.poll()
    assert end.completion is not None
    assert end.completion.policy_version == 1


def test_a_server_that_falls_silent_ends_the_run_whoever_waits_for_it_and_however_often_he_looks() -> None:
    """A scheduler looks again and again; a rollout that is out of time would be censored for a server that is gone."""

    class Mute(ScriptedTinker):
        def sample(self, **_: object) -> Future[object]:
            return Future()

    with installed(Mute([BASE], VOCAB_SIZE)):
        session = TinkerSession(TinkerConfig(timeout=0.5), [BASE])
        engine = TinkerEngine(session, session.sampler(), [STOP], VOCAB_SIZE, CONTEXT)
        engine.submit(GenerationRequest(prompt_ids=(1, 2), sampling=Sampling(), seed=0))
        started = time.monotonic()
        with pytest.raises(TurntreeError, match="no answer"):
            while time.monotonic() < started + 20:
                engine.poll(0.1)
        assert engine.in_flight == 0


@pytest.mark.parametrize(
    ("tokens", "logprobs", "reason"),
    [
        ([3, STOP], [-math.inf, -1.0], "stop"),
        ([3, STOP], [2.0, -1.0], "stop"),
        ([3, STOP], [None, -1.0], "stop"),
        ([3, STOP], [-1.0], "stop"),
        ([3] * 9, [-1.0] * 9, "length"),
        ([3, STOP, 5], [-1.0] * 3, "length"),
        ([3, 5], [-1.0] * 2, "length"),
    ],
)
def test_what_no_turn_of_the_policy_is_ends_the_run_in_one_line(tokens: Any, logprobs: Any, reason: str) -> None:
    class Odd(ScriptedTinker):
        def sample(self, **_: object) -> Future[object]:
            return path(sequences=[SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason=reason)])

    with installed(Odd([BASE], VOCAB_SIZE)):
        session = TinkerSession(TinkerConfig(), [BASE])
        engine = TinkerEngine(session, session.sampler(), [STOP], VOCAB_SIZE, CONTEXT)
        with pytest.raises(InputError):
            engine.generate([GenerationRequest(prompt_ids=(1, 2), sampling=Sampling(max_tokens=8), seed=0)])
