"""One configuration sets a policy up for every training stage, and what is loaded still samples."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from family_tokenizers import with_tokens_of
from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.config import Part, from_mapping, to_mapping
from turntree.core.errors import ConfigError
from turntree.pack.attention import layouts
from turntree.render import choice
from turntree.render.choice import Choice
from turntree.stages import local, policy
from turntree.stages.config import AUTO
from turntree.stages.policy import Device, Policy, load_policy
from turntree.train.isolation import check_path_isolation
from turntree.train.lora import AdapterOff, LoRAConfig, frozen_reference


def sampled(policy: Policy) -> tuple[int, ...]:
    request = GenerationRequest(prompt_ids=tuple(range(10, 30)), sampling=Sampling(max_tokens=8), seed=1)
    return policy.engine.generate([request])[0].token_ids


def test_a_fresh_adapter_keeps_the_name_of_the_weights_and_what_they_say() -> None:
    plain = load_policy("default", Device())
    adapted = load_policy("default", Device(lora=LoRAConfig(rank=2, alpha=4), gradient_checkpointing=True))
    assert adapted.hash == plain.hash and sampled(adapted) == sampled(plain)
    assert check_path_isolation(adapted.model)[0] < 1e-4
    assert sampled(adapted) == sampled(plain)  # after a training pass too
    assert isinstance(frozen_reference(adapted.model), AdapterOff)
    assert layouts(plain.model) == ("dense", "pieces")


def test_the_device_is_configured_like_everything_else() -> None:
    device = from_mapping(Device, {"lora": {"rank": 4, "targets": ["q_proj"]}, "gradient_checkpointing": True})
    assert device.lora == LoRAConfig(rank=4, targets=("q_proj",))
    assert from_mapping(Device, to_mapping(device)) == device
    with pytest.raises(ConfigError, match=r"field 'lora\.dropout': unknown key"):
        from_mapping(Device, {"lora": {"dropout": 0.1}})


@pytest.mark.parametrize(
    ("model", "asked", "machine", "expected"),
    [
        ("tiny", None, {}, 1),
        ("tiny", 3, {}, 3),
        ("large", None, {}, 8),
        ("large", 2, {}, 2),
        ("large", None, {"quota": "250000 100000"}, 2),
        ("large", None, {"quota": "50000 100000"}, 1),
        ("large", None, {"OMP_NUM_THREADS": "3"}, 3),
        ("large", None, {"TURNTREE_THREADS": "4", "OMP_NUM_THREADS": "1"}, 4),
        ("large", None, {"OMP_NUM_THREADS": "64"}, 8),
    ],
)
def test_threads_go_by_the_model_and_the_machine_and_are_said(
    model: str, asked: int | None, machine: dict[str, str], expected: int, monkeypatch, tmp_path, capsys
) -> None:
    """One for a tiny model; for a large one all that the affinity, the container and the user allow."""
    for name in ("OMP_NUM_THREADS", "TURNTREE_THREADS"):
        monkeypatch.setenv(name, machine.get(name, ""))
    (tmp_path / "cpu.max").write_text(machine.get("quota", "max 100000"))
    monkeypatch.setattr(local, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    policy.say.cache_clear()
    size = torch.nn.Linear(100, 100) if model == "tiny" else SimpleNamespace(parameters=lambda: [_Weight(40_000_000)])
    assert local.set_threads(size, asked) == expected
    assert f"turntree: {expected} thread" in capsys.readouterr().err


@pytest.mark.parametrize(("said", "expected"), [({}, 8), ({"OMP_NUM_THREADS": "2"}, 2), ({"OMP_NUM_THREADS": "0"}, 8)])
def test_the_command_s_own_setting_does_not_bound_the_threads_and_the_user_s_does(said, expected: int) -> None:
    """The command sets OMP_NUM_THREADS itself before torch is loaded."""
    code = "import os; os.sched_getaffinity = lambda pid: range(8); import turntree.cli.main; "
    code += "from turntree.stages import local; local._quota = lambda: None; print(local.available())"
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_THREADS")}
    shown = subprocess.run([sys.executable, "-c", code], env=clean | said, capture_output=True, text=True, check=True)
    assert shown.stdout == f"{expected}\n"


@dataclass(frozen=True)
class _Weight:
    size: int

    def numel(self) -> int:
        return self.size


def test_low_precision_weights_train_with_masters() -> None:
    policy = load_policy("default", Device(dtype="bfloat16"))
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}
    assert check_path_isolation(policy.model)[0] < 0.2


def test_the_identity_names_the_renderer_that_was_chosen_and_not_that_one_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a run of the template does not go on with a family, which `auto` may choose once the package is installed."""
    pytest.importorskip("renderers", reason="needs the extra turntree[renderers]", exc_type=ImportError)
    tokenizer = with_tokens_of("qwen3", tiny_tokenizer())
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def named(renderer: Part = AUTO) -> str:
        return load_policy(str(tmp_path), Device(renderer=renderer)).identity["renderer"]

    assert named() == named(Part("template")) == named(Part("auto", {"tool_format": None})) == "template"
    assert named(Part("auto", {"tool_format": "hermes"})) == "template", "which is how the template writes calls"
    assert named(Part("auto", {"tool_format": "json"})) == named(Part("template", {"tool_format": "json"})) != named()
    before = named()
    monkeypatch.setattr(choice, "choose", lambda tokenizer, folder: Choice("family:qwen3", "it is installed now"))
    assert named() == named(Part("family:qwen3")) != before
    assert named() != named(Part("family:qwen3", {"enable_thinking": False}))
    assert metadata.version("renderers") in named()
