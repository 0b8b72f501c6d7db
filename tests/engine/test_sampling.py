"""Draws: exact frequencies, exact truncation, one stream a request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turntree.core.completion import GenerationRequest, Sampling
from turntree.engine.sampling import draw, invert, uniforms, uniforms_of


def laws_of(count: int, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, set[float]]:
    sampling = Sampling(temperature=temperature)
    requests = [GenerationRequest(prompt_ids=(1,), sampling=sampling, seed=seed) for seed in range(count)]
    return torch.full((count,), temperature), uniforms_of(requests, [1] * count)[:, 0], {temperature}


def test_the_first_draws_do_not_depend_on_how_many_follow() -> None:
    assert np.array_equal(uniforms(5, 3), uniforms(5, 100)[:3])
    assert not np.array_equal(uniforms(5, 3), uniforms(6, 3))


def test_draws_are_uniform_and_independent_over_seeds_and_positions() -> None:
    table = np.stack([uniforms(seed, 20) for seed in range(5000)])
    assert table.min() >= 0
    assert table.max() < 1
    assert np.abs(table.mean(0) - 0.5).max() < 0.02
    correlation = np.corrcoef(table.T) - np.eye(20)
    assert np.abs(correlation).max() < 0.06


def test_frequencies_are_the_tempered_probabilities() -> None:
    count, temperature = 20_000, 0.7
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -30.0])
    drawn = draw(logits.expand(count, -1), *laws_of(count, temperature))
    expected = (logits / temperature).softmax(-1)
    frequencies = torch.bincount(drawn.tokens, minlength=5) / count
    assert torch.allclose(frequencies, expected, atol=0.012)
    assert torch.allclose(drawn.logprobs, expected.log()[drawn.tokens], atol=1e-6)
    assert torch.allclose(drawn.entropies, -(expected * expected.log()).sum().expand(count), atol=1e-6)


def test_greedy_takes_the_likeliest_with_its_untempered_probability() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    drawn = draw(logits, *laws_of(1, temperature=0.0))
    assert drawn.tokens.tolist() == [1]
    assert drawn.logprobs.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item())
    assert drawn.entropies.item() > 0.5, "of the full distribution, not of the greedy choice"


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.9999999, 1.0])
def test_inversion_never_picks_a_token_without_mass(uniform: float) -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0]])
    token = int(invert(probs, torch.tensor([uniform])))
    assert probs[0, token] > 0


def test_inversion_cuts_the_unit_interval_at_the_distribution_function() -> None:
    probs = torch.tensor([[0.25, 0.5, 0.25]]).expand(4, -1)
    assert invert(probs, torch.tensor([0.0, 0.25, 0.74, 0.75])).tolist() == [0, 1, 1, 2]


def test_a_token_that_the_model_forbids_costs_no_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    drawn = draw(logits, *laws_of(1))
    assert drawn.entropies.item() == pytest.approx(np.log(2), abs=1e-6)
