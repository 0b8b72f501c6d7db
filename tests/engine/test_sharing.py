"""Every family of models can be sampled from and trained: on shared prefixes where it computes them exactly, else on a
row per rollout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from plain_model import ask, prompt, worst_error

from model_families import FAMILIES, REPEATED, ROWS, SHARED, SHARED_IN_UPDATE, WITH_VISION, family_model, seeing_model
from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.errors import InputError
from turntree.engine import limits
from turntree.engine.checkpoint import load_model, save_model
from turntree.engine.hf import HFEngine
from turntree.engine.limits import EngineConfig, Prefixes
from turntree.engine.plain import PlainEngine
from turntree.pack.carried import is_carried
from turntree.train.forward import set_checkpointing
from turntree.train.isolation import check_rows, shares_prefixes

STOPS = range(8, 16)
EXACT = 2e-4


def opened(model, prefixes: Prefixes = "auto"):
    policy = SimpleNamespace(model=model, renderer=SimpleNamespace(stop_ids=frozenset(STOPS)), prefixes=prefixes)
    return limits.hf(policy, EngineConfig(max_prefill_tokens=512))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_sampled_exactly_whatever_shares_its_batch(name: str) -> None:
    model = family_model(name)
    engine = opened(model)
    requests = [
        ask(prompt(length, length), seed, max_tokens=1 + seed) for length in (40, 3, 21, 40) for seed in range(6)
    ]
    completions = engine.generate(requests)
    assert worst_error(model, requests, completions) < EXACT
    assert len({completion.token_ids for completion in completions}) > 6


@pytest.mark.parametrize("name", SHARED)
def test_a_family_of_full_attention_shares_prefixes(name: str) -> None:
    model = family_model(name)
    assert isinstance(opened(model), HFEngine)
    assert shares_prefixes(model, 64, "auto", field="tokens")


@pytest.mark.parametrize("name", REPEATED)
def test_a_family_that_cannot_share_says_why_and_refuses_only_where_it_is_told_to(name: str, capsys) -> None:
    model = family_model(name)
    assert isinstance(opened(model), PlainEngine)
    assert "sampling prefills every turn's prompt as a whole" in capsys.readouterr().err
    with pytest.raises(InputError):
        opened(model, "shared")
    assert shares_prefixes(model, 64, "auto", field="tokens") == (name not in ROWS)
    assert is_carried(model) == (name not in ROWS + SHARED_IN_UPDATE)
    if name in SHARED_IN_UPDATE:
        return
    how = "a row per rollout, which" if name in ROWS else "trees go through the model chain by chain"
    assert how in capsys.readouterr().err
    with pytest.raises(InputError):
        shares_prefixes(family_model(name), 64, "shared", field="tokens")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_is_carried_in_one_process_and_where_it_is_kept(ranks: int, capsys) -> None:
    model = family_model("Qwen3-Next")
    if ranks == 1:
        set_checkpointing(model)
    assert not shares_prefixes(model, 64, "auto", field="tokens", ranks=ranks) and not is_carried(model)
    told = capsys.readouterr().err
    assert "a row per rollout, which computes shared prefixes again" in told
    assert ("gradient_checkpointing" if ranks == 1 else "on several ranks") in told


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_batch_are_scored_as_they_are_alone(name: str) -> None:
    assert check_rows(family_model(name))[0] < EXACT


def test_the_guide_has_every_family_with_what_is_done_for_it() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "your-model.md").read_text()
    for name, (_, _, why) in FAMILIES.items():
        sampled = f"repeated: {why}" if why else "shared"
        trained = "repeated" if name in ROWS else "shared" if name in SHARED + SHARED_IN_UPDATE else "carried"
        assert f"| {name} | {sampled} | {trained} |" in guide


@pytest.mark.parametrize("name", WITH_VISION)
def test_a_model_that_also_sees_is_loaded_and_trained_on_text(name: str, tmp_path: Path) -> None:
    whole = seeing_model(name)
    whole.save_pretrained(tmp_path / "hub")
    ids = torch.arange(10, 60)[None]
    expected = whole(input_ids=ids).logits
    loaded = load_model(save_model(load_model(tmp_path / "hub"), tiny_tokenizer(), tmp_path / "saved"))
    assert torch.equal(loaded(input_ids=ids).logits, expected)
    assert isinstance(opened(loaded), PlainEngine if name in REPEATED else HFEngine)
    assert shares_prefixes(loaded, 64, "auto", field="tokens")
    assert is_carried(loaded) == (name in REPEATED)


def test_prefixes_can_be_repeated_by_a_model_that_could_share_them() -> None:
    model = tiny_model()
    assert isinstance(opened(model, "repeated"), PlainEngine)
    assert not shares_prefixes(model, 64, "repeated", field="tokens")


def test_a_model_whose_rows_see_each_other_is_refused() -> None:
    model = tiny_model()
    stock = model.forward
    noise = torch.randn(1, 400, model.config.vocab_size)

    def forward(*args, **kwargs):
        output = stock(*args, **kwargs)
        output.logits = output.logits + noise[:, : output.logits.shape[1]] * (len(kwargs["input_ids"]) == 1)
        return output

    model.forward = forward
    with pytest.raises(InputError, match="cannot be trained in padded batches"):
        check_rows(model)


def test_a_decoder_that_was_not_made_for_this_is_refused_in_one_line(monkeypatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(model.model, "forward", lambda **_: torch.zeros(1))  # in place of an output with hidden states
    with pytest.raises(InputError, match=r"cannot be trained in padded batches \(AttributeError"):
        shares_prefixes(model, 64, "auto", field="tokens")
