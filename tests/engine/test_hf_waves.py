"""Seeds, stopping, the ledger, and what is kept between waves."""

from __future__ import annotations

import pytest
import torch
from plain_model import ask, prefilled, prompt, reused, worst_error

from tiny_models import tiny_model
from turntree.core.errors import TurntreeError
from turntree.engine import prefix_cache
from turntree.engine.hf import HFEngine
from turntree.engine.limits import EngineConfig

STOPS = range(8, 16)


def test_tokens_depend_on_the_request_and_not_on_its_neighbours() -> None:
    model = tiny_model()
    request = ask(prompt(25, 1), seed=77, max_tokens=20)
    alone = HFEngine(model, STOPS).generate([request])[0]
    siblings = [ask(prompt(25, 1), seed, max_tokens=20) for seed in range(5)]
    strangers = [ask(prompt(length, length), length, max_tokens=3) for length in range(1, 30)]
    engine = HFEngine(model, STOPS, EngineConfig(max_batch_rows=16))
    assert engine.generate([*siblings, request, *strangers])[5].token_ids == alone.token_ids
    assert engine.generate([*strangers, request])[-1].token_ids == alone.token_ids
    engine.generate([ask(prompt(25, 1), 3, retain=True)])
    assert engine.generate([request])[0].token_ids == alone.token_ids, "nor on what was kept"


def test_the_seed_decides() -> None:
    engine = HFEngine(tiny_model(), [])
    one, same, other = engine.generate([ask(prompt(5, 1), seed, max_tokens=12) for seed in (1, 1, 2)])
    assert one.token_ids == same.token_ids != other.token_ids


def test_a_completion_ends_at_its_first_stop_token_or_at_its_limit() -> None:
    requests = [ask(prompt(5, 1), seed, max_tokens=1 + seed % 30) for seed in range(60)]
    completions = HFEngine(tiny_model(), STOPS).generate(requests)
    for request, completion in zip(requests, completions, strict=True):
        stops = [token in STOPS for token in completion.token_ids]
        assert not any(stops[:-1])
        assert completion.finish == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(completion.token_ids) == request.sampling.max_tokens
    assert {completion.finish for completion in completions} == {"stop", "length"}


def test_a_completion_is_cut_where_the_context_ends() -> None:
    engine = HFEngine(tiny_model(), [], EngineConfig(max_context=20))
    (completion,) = engine.generate([ask(prompt(15, 1), max_tokens=50)])
    assert len(completion.token_ids) == 5
    assert completion.finish == "length"


def test_the_ledger_charges_a_shared_prompt_to_its_first_request() -> None:
    requests = [ask(ids, seed) for ids in (prompt(30, 1), prompt(20, 2)) for seed in range(3)]
    completions = HFEngine(tiny_model(), STOPS).generate(requests)
    assert [completion.cost.prefilled_tokens for completion in completions] == [30, 0, 0, 20, 0, 0]
    assert [completion.cost.reused_tokens for completion in completions] == [0, 30, 30, 0, 20, 20]
    assert [completion.cost.decoded_tokens for completion in completions] == [len(c.token_ids) for c in completions]
    assert all(completion.cost.turns == 1 and completion.cost.engine_seconds > 0 for completion in completions)


def test_prefilled_plus_reused_is_the_prompts_and_each_position_is_computed_once() -> None:
    engine = HFEngine(tiny_model(), STOPS)
    requests = [ask(prompt(32, 1), seed, retain=True) for seed in range(4)]
    first = engine.generate(requests)
    assert prefilled(first) == 32
    follow = [ask(r.prompt_ids + c.token_ids + (1, 2, 3), 9) for r, c in zip(requests, first, strict=True)]
    second = engine.generate(follow)
    assert prefilled(second) + reused(second) == sum(len(request.prompt_ids) for request in follow)
    assert prefilled(second) == 4 * 4, "the last token of each, which was drawn but not fed, and three new ones"


def test_without_retain_nothing_is_kept() -> None:
    engine = HFEngine(tiny_model(), STOPS)
    requests = [ask(prompt(32, 1), seed) for seed in range(4)]
    completions = engine.generate(requests)
    assert engine._kept.held_tokens == 0
    again = engine.generate([ask(requests[0].prompt_ids + completions[0].token_ids + (1,))])
    assert reused(again) == 0


def test_a_changed_policy_forgets_every_key_and_value() -> None:
    model = tiny_model()
    engine = HFEngine(model, STOPS)
    request = ask(prompt(40, 1), 1, retain=True)
    (completion,) = engine.generate([request])
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    engine.update_weights(model, 3)
    follow = ask(request.prompt_ids + completion.token_ids + (5, 6), 2)
    (answer,) = engine.generate([follow])
    (fresh,) = HFEngine(model, STOPS).generate([follow])
    assert answer.policy_version == engine.policy_version == 3
    assert answer.token_ids == fresh.token_ids
    assert answer.cost.reused_tokens == 0
    assert worst_error(model, [follow], [answer]) < 1e-5


def test_weights_that_change_without_notice_are_an_error() -> None:
    model = tiny_model()
    engine = HFEngine(model, STOPS)
    engine.generate([ask(prompt(40, 1), 1, retain=True)])
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(TurntreeError, match="call update_weights after an update"):
        engine.generate([ask(prompt(40, 1), 1)])


def test_kept_sequences_respect_their_bound_and_forget_the_oldest_first() -> None:
    engine = HFEngine(tiny_model(), [])
    engine._kept.max_tokens = 200
    waves = [ask(prompt(50, wave), wave, max_tokens=4, retain=True) for wave in range(6)]
    for request in waves:
        engine.generate([request])
        assert 0 < engine._kept.held_tokens <= 200
    assert reused(engine.generate([ask((*waves[0].prompt_ids, 1))])) == 0
    assert reused(engine.generate([ask((*waves[-1].prompt_ids, 1))])) == 50


def test_without_a_number_the_bound_is_in_bytes_whatever_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of a model of 135 M parameters takes 23 KiB in bfloat16, of one of 7 B some 128 KiB."""
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        model = tiny_model(dtype=dtype)
        config = model.config
        slot = 2 * width * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size
        slot //= config.num_attention_heads
        monkeypatch.setattr(prefix_cache, "_BYTES", 200 * slot)
        engine = HFEngine(model, [])
        for wave in range(6):
            engine.generate([ask(prompt(50, wave), wave, max_tokens=4, retain=True)])
        assert 100 < engine._kept.held_tokens <= 200


def test_conversations_that_go_on_together_are_never_copied() -> None:
    """Memory stays one row a conversation: the slots of the longest, and what is reserved ahead."""
    engine = HFEngine(tiny_model(), [])
    requests = [ask(prompt(30, seed), seed, max_tokens=4, retain=True) for seed in range(8)]
    for turn in range(12):
        completions = engine.generate(requests)
        requests = [
            ask(r.prompt_ids + c.token_ids + prompt(3 + turn % 3, turn), turn, max_tokens=4, retain=True)
            for r, c in zip(requests, completions, strict=True)
        ]
    assert engine._kept.held_tokens <= 8 * 2 * max(len(request.prompt_ids) for request in requests)


def test_sampling_leaves_the_model_as_it_was() -> None:
    model = tiny_model()
    model.train()
    before = [parameter.clone() for parameter in model.parameters()]
    HFEngine(model, STOPS).generate([ask(prompt(5, 1))])
    assert model.training
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_an_empty_wave_is_answered() -> None:
    assert HFEngine(tiny_model(), STOPS).generate([]) == []


def test_prompts_that_were_answered_are_forgotten() -> None:
    model = tiny_model()
    engine = HFEngine(model, STOPS)
    engine.generate([ask(prompt(5, 1), seed) for seed in range(3)])
    engine.cancel(engine.submit(ask(prompt(6, 2), 0)))
    assert not engine._waiting
