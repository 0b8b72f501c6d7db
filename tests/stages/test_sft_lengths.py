"""Examples that are too long for SFT are left out, counted by reason and said; an error where all are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_models import save_tiny_checkpoint
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.engine.tokenizer import load_tokenizer
from turntree.render.template import ChatRenderer
from turntree.stages.config import SFTStageConfig
from turntree.stages.sft import run_sft
from turntree.traces.schema import Trace, write_traces
from turntree.train.config import SFTConfig
from turntree.train.sft import examples

WORDS = (1, 2, 30, 200)  # of the four traces


def trace(words: int) -> Trace:
    said = (Message("user", "say it"), Message("assistant", " ".join(["yes"] * words)))
    return Trace(id=f"t{words}", messages=said, split="train")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "policy")


@pytest.fixture
def sft(model: Path, tmp_path: Path):
    def command(max_tokens: int, words: tuple[int, ...] = WORDS, more: tuple[Trace, ...] = ()):
        write_traces(tmp_path / "traces.jsonl", [*map(trace, words), *more])
        settings = SFTConfig(epochs=1, batch=4, max_tokens=max_tokens)
        return run_sft(
            SFTStageConfig(traces=str(tmp_path / "traces.jsonl"), model=str(model), sft=settings), tmp_path / "run"
        )

    return command


@pytest.fixture
def sizes(model: Path) -> list[int]:
    """Tokens of each trace's example."""
    renderer = ChatRenderer(load_tokenizer(model))
    return [len(row.token_ids) for words in WORDS for row in examples(trace(words), renderer)]


def set_positions(model: Path, positions: int) -> None:
    config = model / "config.json"
    config.write_text(
        config.read_text().replace('"max_position_embeddings": 4096', f'"max_position_embeddings": {positions}')
    )


def test_examples_above_the_limit_are_left_out_counted_and_said(sft, sizes, capsys) -> None:
    result = sft(sizes[1])
    assert result["traces"] == 2 and result["left_out"] == 2
    assert result["dropped"] == {"example_above_sft_max_tokens": 2}
    said = f"2 of 4 examples have more than {sizes[1]} tokens (up to {sizes[3]}) and are left out"
    assert f"{said}; --max-tokens {sizes[3]} " in capsys.readouterr().err


def test_what_fits_exactly_is_learned(sft, sizes) -> None:
    result = sft(sizes[3])
    assert result["traces"] == 4 and result["dropped"] == {}


def test_the_positions_of_the_model_are_a_limit_too(sft, model, sizes, capsys) -> None:
    """Beyond them a model computes, but nothing that it was made for."""
    set_positions(model, sizes[2])
    assert sft(8192)["dropped"] == {"example_above_model_positions": 1}
    assert f"it has {sizes[2]} positions: use one with more, or shorter traces" in capsys.readouterr().err


def test_where_every_example_is_too_long_the_error_names_the_setting(sft, model, sizes) -> None:
    said = f"field 'sft.max_tokens': 4 of 4 examples have more than 3 tokens (up to {sizes[3]}); "
    with pytest.raises(InputError) as refused:
        sft(3)
    assert str(refused.value).startswith(f"{said}--max-tokens {sizes[3]} ")
    set_positions(model, sizes[3] - 1)
    with pytest.raises(InputError, match=f"field 'model': 1 of 1 .*it has {sizes[3] - 1} positions"):
        sft(8192, words=WORDS[3:])


def test_tokens_that_the_model_does_not_know_are_left_out_counted_and_said(sft, model, capsys) -> None:
    """Words were added to the tokenizer, and the embeddings were not resized."""
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens(["hurrah"])
    tokenizer.save_pretrained(model)
    new = Trace(id="new", messages=(Message("user", "say it"), Message("assistant", "hurrah")), split="train")
    result = sft(8192, more=(new,))
    assert result["dropped"] == {"example_outside_vocabulary": 1} and result["traces"] == 4
    said = "1 of 5 examples have tokens above the 384 that the model knows and are left out; resize_token_embeddings"
    assert said in capsys.readouterr().err
    with pytest.raises(InputError, match="field 'model': 1 of 1 examples have tokens above"):
        sft(8192, words=(), more=(new,))


def test_a_stop_that_the_model_does_not_know_is_refused_with_the_folder(sft, model) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.add_special_tokens({"eos_token": "<|stop|>"})
    tokenizer.save_pretrained(model)
    with pytest.raises(InputError, match=r"policy: '<\|stop\|>' ends a turn, and is token 384 of a model with 384"):
        sft(8192)
