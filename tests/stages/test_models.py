"""`turntree models`: what it writes is a folder like any other, and says what it is asked to say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tiny_models import tiny_model, tiny_tokenizer
from turntree.cli.main import cli
from turntree.core.errors import InputError
from turntree.engine.checkpoint import load_model, save_model
from turntree.engine.tokenizer import load_tokenizer
from turntree.stages.models import get_adapter, merge_adapter
from turntree.train.lora import LoRAConfig, add_adapter

IDS = torch.arange(1, 12)[None]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def an_adapter(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, Path]:
    """A trained adapter in `folder/adapter`, on the base in `folder/base`."""
    tiny_model(dtype=dtype).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    model = load_model(folder / "base")
    add_adapter(model, LoRAConfig(rank=4, alpha=8))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model, save_model(model, load_tokenizer(folder / "base"), folder / "adapter")


def test_a_merged_adapter_says_what_the_adapted_policy_says_and_needs_no_peft(tmp_path: Path) -> None:
    model, folder = an_adapter(tmp_path)
    result = merge_adapter(folder, tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    merged = load_model(tmp_path / "merged")
    assert torch.allclose(logits(merged), logits(model), atol=1e-4)
    assert not torch.allclose(logits(merged), logits(load_model(tmp_path / "base")), atol=1e-1)
    assert result["parameters"] == tiny_model().num_parameters() and result["base"] == str(tmp_path / "base")
    assert load_tokenizer(tmp_path / "merged").chat_template


def test_a_bfloat16_base_is_rounded_once_and_stays_bfloat16(tmp_path: Path) -> None:
    """The sum is made in float32; a sum of rounded parts would be off by another half a step."""
    _, folder = an_adapter(tmp_path, torch.bfloat16)
    merge_adapter(folder, tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    wide = merge_wide(folder)
    assert all(torch.equal(value, wide[name].bfloat16()) for name, value in found.items())


def test_a_float16_base_stays_float16(tmp_path: Path) -> None:
    save_model(tiny_model(), tiny_tokenizer(), tmp_path / "base", "float16")
    model = load_model(tmp_path / "base")
    add_adapter(model, LoRAConfig(rank=2))
    save_model(model, load_tokenizer(tmp_path / "base"), tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.float16}


def merge_wide(folder: Path) -> dict[str, torch.Tensor]:
    from turntree.engine.checkpoint import merged

    return merged(folder).state_dict()


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = an_adapter(tmp_path)
    command = ["models", "merge", "--adapter", str(folder), "--out", str(tmp_path / "merged"), "--json", "-"]
    cli.main(args=command, standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told["model"] == str(tmp_path / "merged") and told["base"] == str(tmp_path / "base")
    assert load_model(told["model"])


def test_what_is_not_to_be_merged_or_replaced_is_refused_in_one_line(tmp_path: Path) -> None:
    _, folder = an_adapter(tmp_path)
    with pytest.raises(InputError, match=r"base: holds no adapter; a whole model needs no merge"):
        merge_adapter(tmp_path / "base", tmp_path / "merged")
    with pytest.raises(InputError, match=r"base: exists already; pass --overwrite"):
        merge_adapter(folder, tmp_path / "base")
    merge_adapter(folder, tmp_path / "merged")
    merge_adapter(folder, tmp_path / "merged", overwrite=True)
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    for name in ("runs", "."):
        with pytest.raises(InputError, match="holds more than a model"):
            merge_adapter(folder, tmp_path / name, overwrite=True)
    assert (tmp_path / "runs" / "sft").exists()


def test_what_names_no_adapter_on_a_server_is_refused(tmp_path: Path) -> None:
    _, folder = an_adapter(tmp_path)
    with pytest.raises(InputError, match=r"adapter: names no adapter on a server; name RUN/model"):
        get_adapter(folder, tmp_path / "model")
    assert not (tmp_path / "model").exists()
