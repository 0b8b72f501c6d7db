"""The cosine of expectations, from noisy vectors."""

from __future__ import annotations

import alignment
import numpy as np
import pytest
from configs import REFERENCE_SEEDS, AlignmentConfig

from turntree.core.errors import ConfigError
from turntree.observe.files import write_json


def test_the_alignment_is_that_of_the_expectations_whatever_the_noise() -> None:
    rng = np.random.default_rng(0)
    true, held = np.zeros(400, dtype=np.float32), np.zeros(400, dtype=np.float32)
    true[0], held[0], held[1] = 1.0, 0.6, 0.8
    found = [
        alignment._against(
            (true + rng.normal(0, 0.03, (2, 400))).astype(np.float32),
            (held + rng.normal(0, 0.1, (4, 400))).astype(np.float32),
        )
        for _ in range(200)
    ]
    assert np.mean([one["alignment"] for one in found]) == pytest.approx(0.6, abs=0.02)
    assert np.mean([one["cosine"]["mean"] for one in found]) < 0.3
    assert np.mean([one["gain"]["mean"] for one in found]) == pytest.approx(0.6, abs=0.02)


def test_each_seed_is_weighed_by_its_own_slopes(tmp_path) -> None:
    """Slopes that all seeds share would make their vectors dependent, and the inner product of two of them biased."""
    config = AlignmentConfig(seeds=(0, 1))
    one, other = np.eye(4, dtype=np.float32)[:2]
    for half in range(2):
        np.savez(tmp_path / f"reference{half}.npz", true=one + other)
        write_json(tmp_path / f"reference{half}.json", {"success": 0.5})
    for seed, slopes in enumerate(({"take": 1.0, "go": 0.0}, {"take": 0.0, "go": 1.0})):
        vectors = {"episodes": one, "own/take": one, "own/go": other, "expert/take": one}
        np.savez(tmp_path / f"seed{seed}.npz", **vectors)
        told = {"states": {}, "mixed": {}, "tokens": {}, "slopes": slopes}
        write_json(tmp_path / f"seed{seed}.json", told)
    found = alignment.summarise(config, tmp_path)["families"]
    assert found["own"]["alignment"] == pytest.approx(1.0)
    assert found["own, by slope"]["alignment"] is None, "one seed weighs take alone, the other go alone"


def test_what_a_seed_does_not_have_counts_as_no_gradient(tmp_path) -> None:
    """No success in the reference, no mixed state of the policy's own: both are found after hours of play."""
    for half in range(2):
        np.savez(tmp_path / f"reference{half}.npz", true=np.zeros(4, dtype=np.float32))
        write_json(tmp_path / f"reference{half}.json", {"success": 0.0})
    for seed in range(2):
        vectors = {"episodes": np.ones(4, dtype=np.float32), **({"own/take": np.ones(4, np.float32)} if seed else {})}
        np.savez(tmp_path / f"seed{seed}.npz", **vectors)
        write_json(tmp_path / f"seed{seed}.json", {"states": {}, "mixed": {}, "tokens": {}, "slopes": {}})
    found = alignment.summarise(AlignmentConfig(seeds=(0, 1)), tmp_path)
    assert {name: row["cosine"]["values"] for name, row in found["families"].items()} == {
        name: [0.0, 0.0] for name in ("episodes", "own", "own, by slope", "expert")
    }
    assert "nan" not in " ".join(alignment.lines(found))


def test_no_seed_is_one_of_the_reference() -> None:
    with pytest.raises(ConfigError, match="a seed of the reference"):
        AlignmentConfig(seeds=(0, REFERENCE_SEEDS[1]))
