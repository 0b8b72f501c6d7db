"""The loss of SFT: the mean over learned tokens, with the output head at those tokens only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, ModernBertDecoderConfig

from tiny_models import tiny_model
from turntree.core.errors import InputError
from turntree.train import forward
from turntree.train.config import LoRAConfig
from turntree.train.likelihood import check_head, negative_log_likelihood
from turntree.train.lora import add_adapter
from turntree.train.sft import Example

ROWS = [
    Example(tuple(range(1, 10)), (False,) * 4 + (True,) * 2 + (False,) * 3),
    Example(tuple(range(20, 26)), (False,) * 3 + (True,) * 3),
]


class Louder(LlamaForCausalLM):
    """Scales its logits in a way that its configuration does not say."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = 2 * found.logits
        return found


def by_full_logits(model, rows: list[Example]) -> Tensor:
    """Each row alone, every position through the whole model."""
    total = torch.zeros(())
    for row in rows:
        ids = torch.tensor(row.token_ids)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        total = total - logprobs[torch.arange(len(ids) - 1), ids[1:]][torch.tensor(row.loss_mask[1:])].sum()
    return total


def gradient(model, loss: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad], allow_unused=True)
    return [each for each in found if each is not None]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_loss_and_gradient_are_those_of_the_full_logits_and_the_head_runs_at_learned_tokens_only(
    kind: str, adapted: bool
) -> None:
    model = tiny_model(kind, 32)
    if adapted:
        add_adapter(model, LoRAConfig(rank=2))
    seen: list[int] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, inputs, output: seen.append(output.numel() // output.shape[-1]))
    loss = negative_log_likelihood(model, ROWS)
    hook.remove()
    assert sum(seen) == 5  # 15 positions, 5 of them learned
    expected = by_full_logits(model, ROWS)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(gradient(model, loss), gradient(model, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_head_in_chunks_gives_the_same_loss_and_gradient_and_never_sees_more_tokens_than_a_chunk(
    adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", 32, dtype=torch.float64)
    if adapted:
        add_adapter(model, LoRAConfig(rank=2))
    whole = negative_log_likelihood(model, ROWS)
    expected = gradient(model, whole)
    monkeypatch.setattr(forward, "CHUNK_LOGITS", 2 * 32)
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    loss = negative_log_likelihood(model, ROWS)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)
    for ours, theirs in zip(gradient(model, loss), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    assert sorted(seen) == [1, 1, 2, 2, 2, 2]  # five learned tokens, computed again in the backward pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_logits_are_not_those_of_its_head_is_refused_before_training(dtype: torch.dtype) -> None:
    model = tiny_model("llama", 32, dtype=dtype)
    check_head(model)
    model.__class__ = Louder
    with pytest.raises(InputError, match=r"Louder cannot be trained: its logits are not those of its head"):
        check_head(model)


def test_a_model_whose_head_is_more_than_a_layer_is_refused_before_training() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    torch.manual_seed(0)
    config = ModernBertDecoderConfig(**sizes, **special, num_attention_heads=2)
    with pytest.raises(InputError, match="ModernBertDecoderForCausalLM cannot be trained"):
        check_head(AutoModelForCausalLM.from_config(config).eval())
