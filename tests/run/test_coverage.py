"""Every interval holds the truth as often as it says, however much tasks and seeds differ; by simulation.

Outcomes are successes of tasks whose chance is drawn anew for every sample, so task effects belong to the population:
`task_sd` is the standard deviation of a task's chance (or of its difference between two arms), `seed_sd` that of a
training run's effect on its arm. Two arms come from one distribution, so their true difference is zero.
"""

import numpy as np
import pytest

from turntree.experiments.paired import paired_outcomes
from turntree.run.statistics import (
    clustered_wilson,
    crossed_interval,
    paired_bootstrap,
    sign_flip,
    t_interval,
    wilson,
)

SAMPLES = 1500
TASK_SD = pytest.mark.parametrize("task_sd", [0.0, 0.25, 0.4])


def chances(draw: np.random.Generator, mean: float, sd: float, shape: tuple[int, ...]) -> np.ndarray:
    if sd == 0:
        return np.full(shape, mean)
    strength = mean * (1 - mean) / sd**2 - 1
    return draw.beta(mean * strength, (1 - mean) * strength, shape)


def arm(draw: np.random.Generator, seeds: int, tasks: int, task_sd: float, seed_sd: float = 0.0) -> np.ndarray:
    """Success of an arm as (samples, seeds, tasks)."""
    chance = chances(draw, 0.65, task_sd, (SAMPLES, 1, tasks)) + draw.normal(0, seed_sd, (SAMPLES, seeds, 1))
    return draw.random((SAMPLES, seeds, tasks)) < np.clip(chance, 0, 1)


def differences(seeds: int, tasks: int, task_sd: float, seed_sd: float = 0.0) -> np.ndarray:
    draw, root = np.random.default_rng(0), 2**0.5
    one, two = (arm(draw, seeds, tasks, task_sd / root, seed_sd / root) for _ in range(2))
    return one.astype(float) - two


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


@TASK_SD
def test_a_difference_of_these_policies_is_covered_and_tested_over_tasks(task_sd):
    """Over (seed, task) pairs as units the same samples are covered to 86% and McNemar rejects 12.5%."""
    tasks = [f"t{i}" for i in range(100)]
    samples = differences(4, 100, task_sd)
    found = [t_interval(sample.mean(0)) for sample in samples]
    assert 0.93 <= share([one.low <= 0 <= one.high for one in found]) <= 0.97
    p_values = [sign_flip(sample.mean(0), resamples=400) for sample in samples]
    assert 0.03 <= share([p_value <= 0.05 for p_value in p_values]) <= 0.07
    told = paired_outcomes([dict(zip(tasks, row, strict=True)) for row in samples[0]], [dict.fromkeys(tasks, 0.0)] * 4)[
        "held_out_difference"
    ]
    assert told["low"] == pytest.approx(found[0].low)
    assert told["p_value"] == pytest.approx(sign_flip(samples[0].mean(0)), abs=0.03)


@TASK_SD
@pytest.mark.parametrize("seed_sd", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("seeds", [3, 4, 6])
def test_a_difference_of_trained_arms_is_covered_over_seeds_and_tasks(seeds, seed_sd, task_sd):
    """Three seeds do not tell what belongs to tasks; the interval is then rather too wide than too narrow."""
    found = [crossed_interval(sample) for sample in differences(seeds, 100, task_sd, seed_sd)]
    assert 0.93 <= share([one.low <= 0 <= one.high for one in found]) <= (0.985 if seeds == 3 else 0.98)


@pytest.mark.parametrize("seed_sd", [0.03, 0.1])
def test_an_interval_over_tasks_alone_does_not_speak_of_other_seeds(seed_sd):
    found = [t_interval(sample.mean(0)) for sample in differences(4, 300, 0.25, seed_sd)]
    assert share([one.low <= 0 <= one.high for one in found]) < 0.93


@TASK_SD
@pytest.mark.parametrize(("seeds", "tasks"), [(1, 100), (4, 100), (4, 40)])
def test_the_success_of_an_arm_is_covered_over_tasks(seeds, tasks, task_sd):
    """Wilson over pooled episodes covers 73% of the same samples at a task effect of 0.4. Above 97% where tasks are
    alike, because no sample is taken to be worth more than its episodes."""
    played = arm(np.random.default_rng(1), seeds, tasks, task_sd).sum(1)
    found = [clustered_wilson(row, [seeds] * tasks) for row in played]
    assert 0.93 <= share([low <= 0.65 <= high for low, high in found]) <= 0.98


def test_a_share_over_clusters_of_unequal_size_is_covered():
    """Groups that a gate cut: a task is cut once in one run, three times in another."""
    draw, hits = np.random.default_rng(2), []
    for _ in range(SAMPLES):
        trials = draw.integers(0, 4, 40)
        low, high = clustered_wilson(draw.binomial(trials, chances(draw, 0.7, 0.4, (40,))), trials)
        hits.append(low <= 0.7 <= high)
    assert 0.93 <= share(hits) <= 0.97


def test_the_paired_bootstrap_over_games_covers_one_pair_of_policies():
    samples = differences(1, 100, 0.4)[:400, 0].tolist()
    found = [paired_bootstrap(row, [0.0] * 100, resamples=400) for row in samples]
    assert 0.92 <= share([low <= 0 <= high for _, low, high in found]) <= 0.98


@pytest.mark.parametrize("tasks", [4, 6, 10, 15])
def test_the_paired_bootstrap_over_a_few_tasks_covers_too(tasks):
    """Four episodes of a task each before and after; tasks differ. Without the widening: 0.82 to 0.93."""
    draw, hits = np.random.default_rng(tasks), []
    for _ in range(SAMPLES // 2):
        chance = draw.beta(1, 1, tasks)
        before, after = (draw.binomial(4, one) / 4 for one in (0.7 * chance, 0.3 + 0.7 * chance))
        _, low, high = paired_bootstrap(after.tolist(), before.tolist(), resamples=400)
        hits.append(low <= 0.3 <= high)
    assert 0.93 <= share(hits) <= 0.99


def test_the_detectable_effect_is_detected_in_four_of_five_samples():
    for found in (lambda sample: t_interval(sample.mean(0)), crossed_interval):
        sample = differences(4, 100, 0.4, 0.1 if found is crossed_interval else 0.0)[:500]
        effect = np.mean([found(one).detectable for one in sample])
        shifted = [found(one + effect) for one in sample]
        assert 0.72 <= share([one.low > 0 for one in shifted]) <= 0.88


def test_one_seed_has_no_interval_for_training_and_equal_tasks_have_a_point():
    assert crossed_interval([[0.0, 1.0, 1.0]]) == (pytest.approx(2 / 3), None, None, None)
    assert t_interval([0.0, 0.0]) == (0.0, 0.0, 0.0, 0.0)
    assert crossed_interval(np.full((3, 4), 0.5))[:3] == (0.5, 0.5, 0.5)


def test_without_task_effects_the_crossed_interval_is_that_over_seeds():
    """Two tasks that differ in the residual only: the excess of their mean square is below zero."""
    values = np.array([[0.0, 1.0], [1.0, 0.0], [0.5, 0.7]])
    assert crossed_interval(values) == pytest.approx(t_interval(values.mean(1)))


def test_one_episode_a_task_has_wilson_s_interval_with_student_s_quantile():
    low, high = clustered_wilson([1.0] * 60 + [0.0] * 40, [1.0] * 100)
    assert (low, high) == pytest.approx(wilson(60 * 99 / 100, 99, 1.9842169), abs=1e-6)
    assert clustered_wilson([], []) == (0.0, 1.0)
    low, high = clustered_wilson([8] * 9 + [9], [16] * 10)  # alike by chance: never worth more than the 160 episodes
    assert (low, high) == pytest.approx(wilson(81, 160, 2.2621572), abs=1e-6)
    assert clustered_wilson([4, 4], [4, 4]) == pytest.approx(wilson(2, 2, 12.7062), abs=1e-4)


def test_flipping_the_signs_of_tasks_gives_the_exact_p_value_of_few_tasks():
    """Of the 2^4 sign vectors of four equal differences, two are as far from zero."""
    assert sign_flip([1.0] * 4, resamples=20000) == pytest.approx(2 / 16, abs=0.01)
    assert sign_flip([1.0, -1.0]) == 1.0
