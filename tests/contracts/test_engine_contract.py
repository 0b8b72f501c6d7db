"""What every engine promises, over the model engine and the scripted one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tiny_models import VOCAB_SIZE, tiny_model
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.errors import InputError
from turntree.core.protocols import Engine
from turntree.core.seeds import generator
from turntree.engines.hf import HFEngine
from turntree.engines.requests import ContextOverflow
from turntree.engines.scripted import ScriptedEngine

STOP = 9
CONTEXT = 64


def model_engine() -> Engine:
    return HFEngine(tiny_model(), [STOP], max_context=CONTEXT)


def scripted_engine() -> Engine:
    def answer(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
        draw = generator(seed, *prompt)
        length = draw.randint(1, 8)
        return (*(draw.randrange(10, VOCAB_SIZE) for _ in range(length)), STOP)

    return ScriptedEngine(answer, [STOP], vocab_size=VOCAB_SIZE, max_context=CONTEXT)


@pytest.fixture(params=[model_engine, scripted_engine])
def make(request: pytest.FixtureRequest) -> Callable[[], Engine]:
    return request.param


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
    requests = wave()
    completions = make().generate(requests)
    costs = [completion.cost for completion in completions]
    assert sum(c.prefilled_tokens + c.reused_tokens for c in costs) == sum(len(r.prompt_ids) for r in requests)
    assert sum(c.prefilled_tokens for c in costs) <= 3 + 12 + 20, "siblings share their prompt"
    assert [c.decoded_tokens for c in costs] == [len(completion.token_ids) for completion in completions]
    assert all(c.turns == 1 and c.tool_calls == c.trained_tokens == 0 for c in costs)


def test_completions_carry_the_policy_version(make: Callable[[], Engine]) -> None:
    engine = make()
    assert engine.policy_version == 0
    assert {completion.policy_version for completion in engine.generate(wave())} == {0}
    engine.weights_changed(4)
    assert engine.policy_version == 4
    assert {completion.policy_version for completion in engine.generate(wave())} == {4}


def test_a_prompt_without_room_for_an_answer_is_refused_by_name(make: Callable[[], Engine]) -> None:
    full = GenerationRequest(prompt_ids=(10,) * CONTEXT, sampling=Sampling(), seed=0)
    with pytest.raises(ContextOverflow, match="request 9 has a prompt of 64 tokens, the context holds 64"):
        make().generate([*wave(), full])


@pytest.mark.parametrize("prompt_ids", [(), (5, VOCAB_SIZE), (-1,)])
def test_a_prompt_that_is_empty_or_not_of_the_vocabulary_is_refused(
    make: Callable[[], Engine], prompt_ids: tuple[int, ...]
) -> None:
    with pytest.raises(InputError, match=r"request 0 has an empty prompt or a token id outside 0\.\.383"):
        make().generate([GenerationRequest(prompt_ids=prompt_ids, sampling=Sampling(), seed=0)])
