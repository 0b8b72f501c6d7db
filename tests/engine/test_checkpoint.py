"""A checkpoint folder comes back as it was written, is replaced as a whole, and says in one line what is wrong."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from tiny_models import save_tiny_checkpoint, tiny_model, tiny_tokenizer
from turntree.core.errors import ConfigError, InputError
from turntree.engine.checkpoint import load_model, policy_hash, save_model
from turntree.engine.tokenizer import base_of, load_tokenizer, template_hash, tokenizer_hash
from turntree.render.choice import renderer_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tiny_model(), tiny_tokenizer(), tmp_path / "policy")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# there and back


@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # tied and untied embeddings
def test_a_saved_policy_comes_back_bit_by_bit(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    loaded = load_model(save_model(model, tiny_tokenizer(), tmp_path / "new" / "policy"))
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert policy_hash(loaded) == policy_hash(model)


def test_a_loaded_policy_is_ready_to_sample(folder: Path) -> None:
    model = load_model(folder)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert model.dtype == torch.float32


@pytest.mark.parametrize("wanted", ["eager", "flash_attention_2"])
def test_the_attention_that_a_folder_asks_for_does_not_count(folder: Path, wanted: str) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attn_implementation": wanted}))
    assert load_model(folder).config._attn_implementation == "sdpa"


def test_the_tokenizer_comes_back_with_its_template(folder: Path) -> None:
    tokenizer, original = load_tokenizer(folder), tiny_tokenizer()
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer.encode("open the drawer 1<|end|>") == original.encode("open the drawer 1<|end|>")


def test_the_name_of_a_tokenizer_survives_saving_and_leaves_the_template_out(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    name, template = tokenizer_hash(tokenizer), template_hash(tokenizer)
    tokenizer(["a", "a longer text"], truncation=True, max_length=5)
    again = load_tokenizer(save_model(tiny_model(), tokenizer, tmp_path / "again"))
    assert (tokenizer_hash(again), template_hash(again)) == (name, template)
    again.chat_template = "{{ messages }}" + str(again.chat_template)
    assert tokenizer_hash(again) == name and template_hash(again) != template
    again.add_tokens(["<new>"])
    assert tokenizer_hash(again) != name


def test_who_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    """A server or a container may run as another user; safetensors lets the owner alone read what it writes."""
    before = os.umask(0o027)
    try:
        folder = save_model(tiny_model(), tiny_tokenizer(), tmp_path / "policy")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == 0o640


def test_a_folder_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    assert policy_hash(load_model(save_tiny_checkpoint(tmp_path / "policy", seed=3))) == policy_hash(tiny_model(seed=3))


def test_nothing_on_disk_is_pickled(folder: Path) -> None:
    assert not [path for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".pkl"}]


# the hash


def test_any_changed_bit_changes_the_hash() -> None:
    model = tiny_model()
    before = policy_hash(model)
    with torch.no_grad():
        weight = model.model.layers[1].mlp.down_proj.weight
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(10.0))
    assert policy_hash(model) != before


def test_equal_bytes_of_another_shape_dtype_or_name_have_another_hash() -> None:
    def zeros(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Module:
        module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype))})
        module.config = tiny_model().config
        return module

    modules = [
        zeros("a", (2, 3), torch.bfloat16),
        zeros("a", (3, 2), torch.bfloat16),
        zeros("a", (2, 3), torch.float16),
        zeros("b", (2, 3), torch.bfloat16),
    ]
    assert len({policy_hash(module) for module in modules}) == 4


def test_other_weights_have_another_hash() -> None:
    hashes = {
        policy_hash(tiny_model()),
        policy_hash(tiny_model(seed=1)),
        policy_hash(tiny_model().to(torch.bfloat16)),
        policy_hash(tiny_model(tied=False)),
    }
    assert len(hashes) == 4


@pytest.mark.parametrize("edit", [{"rope_theta": 5e5}, {"rope_type": "yarn", "factor": 4.0}])
def test_other_positions_have_another_hash(edit: dict, folder: Path) -> None:
    """As a model card asks users to write into config.json."""
    before = policy_hash(load_model(folder))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= edit
    (folder / "config.json").write_text(json.dumps(config))
    assert policy_hash(load_model(folder)) != before


def test_nothing_else_changes_the_hash() -> None:
    model = tiny_model().train()
    assert policy_hash(model) == policy_hash(tiny_model())
    assert len(policy_hash(model)) == 32


# replacing


def test_a_checkpoint_is_replaced_whole(folder: Path) -> None:
    (folder / "left_over.txt").write_text("of the old one")
    save_model(tiny_model(seed=2), tiny_tokenizer(), folder)
    assert policy_hash(load_model(folder)) == policy_hash(tiny_model(seed=2))
    assert "left_over.txt" not in names(folder)
    assert names(folder.parent) == {"policy"}, "nothing temporary stays"


def test_a_failed_save_leaves_the_old_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()

    def fail(path: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        save_model(tiny_model(seed=2), tokenizer, folder)
    assert policy_hash(load_model(folder)) == policy_hash(tiny_model())
    assert names(folder.parent) == {"policy"}


def test_a_failed_rename_brings_the_old_checkpoint_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def fail_for_the_new_one(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError("gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="gone"):
        save_model(tiny_model(seed=2), tiny_tokenizer(), folder)
    assert policy_hash(load_model(folder)) == policy_hash(tiny_model())
    assert names(folder.parent) == {"policy"}


def test_a_file_is_not_replaced_by_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(InputError, match="notes: is a file; name a folder"):
        save_model(tiny_model(), tiny_tokenizer(), tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"


# silence


def test_loading_and_saving_print_nothing_and_change_no_setting(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = transformers_logging.get_logger("transformers")
    level, bars = logger.level, transformers_logging.is_progress_bar_enabled()
    try:
        logger.setLevel(logging.INFO)
        transformers_logging.enable_progress_bar()
        folder = save_model(tiny_model(), tiny_tokenizer(), tmp_path / "policy")
        load_model(folder)
        load_tokenizer(folder)
        assert capfd.readouterr() == ("", "")
        assert (logger.level, transformers_logging.is_progress_bar_enabled()) == (logging.INFO, True)
    finally:
        logger.setLevel(level)
        if not bars:
            transformers_logging.disable_progress_bar()


# one line each


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def truncate_weights(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json; give the folder of a checkpoint"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights .model.safetensors or .*; give the"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "cannot be loaded as a causal language model"),
    "unknown model": (lambda f: edit_config(f, model_type="abacus"), "cannot be loaded as a causal language model"),
    "cut weights": (truncate_weights, "cannot be loaded as a causal language model"),
    "a weight missing": (drop_a_weight, "lacks 1 weights of its config, among them model.norm.weight; save it again"),
    "other shapes": (lambda f: edit_config(f, intermediate_size=32), "causal language model|lacks"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_line(folder: Path, damage: str) -> None:
    """Above all, a missing weight is never filled with random numbers."""
    break_it, problem = DAMAGES[damage]
    break_it(folder)
    with pytest.raises(InputError, match=problem) as refused:
        load_model(folder)
    assert str(refused.value).startswith(f"{folder}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_missing_folder_is_refused_in_one_line(load: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"policy: does not exist; give the folder of a checkpoint on this machine"):
        load(tmp_path / "policy")
    (tmp_path / "policy").write_text("")
    with pytest.raises(InputError, match="policy: is not a folder; give the folder"):
        load(tmp_path / "policy")


def test_a_name_on_a_hub_is_not_downloaded() -> None:
    with pytest.raises(InputError, match=r"^someone/some-model: does not exist; give the folder"):
        load_model("someone/some-model")


def test_a_tokenizer_that_cannot_chat_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match=r"has no chat template .*; use an instruction-tuned policy, or add"):
        renderer_of(load_tokenizer(folder), folder)


def test_a_missing_or_broken_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="the tokenizer cannot be loaded"):
        load_tokenizer(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(InputError, match=r"has no tokenizer .tokenizer.json."):
        load_tokenizer(folder)


def test_unknown_dtypes_and_devices_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="field 'dtype': 'float8' is not allowed; use float32, bfloat16 or auto"):
        load_model(folder, dtype="float8")
    with pytest.raises(ConfigError, match="field 'device': cannot put the model on 'abacus'"):
        load_model(folder, device="abacus")


def test_weights_beyond_the_config_are_named_in_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(folder)
    assert "warning" not in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    fewer = {"num_hidden_layers": 1, "layer_types": config.get("layer_types", [None])[:1]}
    (folder / "config.json").write_text(json.dumps(config | {k: v for k, v in fewer.items() if k in config}))
    load_model(folder)
    assert "weights have no place in its config and are not used: model.layers.1." in capsys.readouterr().err


@pytest.mark.parametrize("base", ["itself", "another adapter"])
def test_an_adapter_whose_base_is_an_adapter_is_refused_and_not_followed_without_end(tmp_path, base):
    for name, of in (("one", "one" if base == "itself" else "two"), ("two", "one")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"")
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / of)}))
    for read in (load_model, load_tokenizer, base_of):
        with pytest.raises(InputError) as refused:
            read(tmp_path / "one")
        assert refused.value.field == "base_model_name_or_path"


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 5000, '{"base_model_name_or_path": 1}', "\ud800"])
def test_an_adapters_config_that_cannot_be_read_is_one_line(tmp_path, text):
    (tmp_path / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError) as refused:
        base_of(tmp_path)
    assert refused.value.path == tmp_path / "adapter_config.json"


def test_a_saved_buffer_counts_and_others_do_not() -> None:
    """The bias of a router is one; the frequencies of positions are computed."""
    model = tiny_model()
    bare = policy_hash(model)
    model.register_buffer("frequencies", torch.ones(3), persistent=False)
    assert policy_hash(model) == bare
    model.register_buffer("bias", torch.zeros(3))
    before = policy_hash(model)
    model.bias[1] = 1.0
    assert len({bare, before, policy_hash(model)}) == 3
