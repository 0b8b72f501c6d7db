"""A name on the Hub is as good as a folder; what cannot be fetched is one line that says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from tiny_models import save_tiny_checkpoint
from turntree.core.errors import InputError
from turntree.engine.checkpoint import load_model, policy_hash, save_model
from turntree.engine.hub import folder_of
from turntree.engine.limits import EndpointConfig
from turntree.engine.tokenizer import load_tokenizer
from turntree.stages.policy import Device, load_policy, load_renderer, open_speaker
from turntree.train.lora import LoRAConfig, add_adapter

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache that holds the model someone/tiny."""
    held = tmp_path / "cache" / "models--someone--tiny"
    save_tiny_checkpoint(held / "snapshots" / COMMIT)
    (held / "refs").mkdir()
    (held / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return held / "snapshots" / COMMIT


def test_a_model_that_was_fetched_once_is_found_offline(cache: Path) -> None:
    assert folder_of("someone/tiny") == folder_of(f"someone/tiny@{COMMIT}") == cache
    policy = load_policy("someone/tiny", Device())
    assert policy.source == "someone/tiny" and policy.hash == load_policy(str(cache), Device()).hash


def test_an_adapter_finds_its_base_by_its_name_on_the_hub(cache: Path, tmp_path: Path) -> None:
    """As published adapters name it."""
    model = load_model(cache)
    add_adapter(model, LoRAConfig(rank=2))
    folder = save_model(model, load_tokenizer(cache), tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "someone/tiny"}))
    assert policy_hash(load_model(folder)) == policy_hash(model)
    again = save_model(load_model(folder), load_tokenizer(cache), tmp_path / "again")
    assert json.loads((again / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/tiny"


def test_without_weights_only_tokenizer_templates_and_configs_are_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    weights = ["model.safetensors", "model-00001-of-2.safetensors", "model.safetensors.index.json"]
    others = ["onnx/model.safetensors", "original/params.json", "alt/b.json", "consolidated.safetensors", "model.bin"]
    fetched: list[set[str]] = []

    def snapshot(name: str, **asked: list[str]) -> str:
        patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
        fetched.append(set(filter_repo_objects(files + weights + others, **patterns)))
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    load_renderer("someone/tiny")
    folder_of("someone/tiny")
    assert fetched == [set(files), {*files, *weights}]


def test_the_tokenizer_of_a_server_s_model_is_found_there_too(cache: Path) -> None:
    """With its context, which the folder tells."""
    endpoint = EndpointConfig(url="http://localhost:1/v1", tokenizer="someone/tiny")
    with open_speaker("served", endpoint, Device()) as speaker:
        assert speaker.engine.max_context == 4096
        assert speaker.renderer.stop_ids == load_policy("someone/tiny", Device()).renderer.stop_ids


def test_offline_an_unknown_model_is_one_line(cache: Path) -> None:
    with pytest.raises(
        InputError, match=r"^someone/other: is not a folder here, and the Hub cannot be reached \(HF_HUB_"
    ):
        load_policy("someone/other", Device())


def test_a_path_is_never_asked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that exists, nor one whose last part is mistyped, nor one that is no name there."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    for path in ("runs/sft", "runs/stf", "runs/sft/model", "/no/where", "./some/model", "model", "../x/y"):
        assert folder_of(path) == Path(path)


def refusal(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "a paragraph\nof text")
    return error


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.GatedRepoError, r"the Hub asks for permission; ask for access on its page"),
        (errors.RepositoryNotFoundError, r"the Hub does not show it; correct the name, or `hf auth login`"),
        (errors.RevisionNotFoundError, r"the Hub does not have this revision; leave @REVISION out"),
        (ConnectionError, r"the Hub cannot be reached \(a paragraph\); give the folder"),
    ],
)
def test_what_is_missing_is_said(kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise refusal(kind)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(InputError, match=rf"^owner/name@x: is not a folder here, and {said}"):
        folder_of("owner/name@x")
