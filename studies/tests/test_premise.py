"""What the study of the premise says."""

import premise


def test_the_premise_is_told_in_words() -> None:
    row = {"spearman": 0.1, "spearman_interval": [0.0, 0.2], "upper_over_lower": 1.5, "interval": [1.2, 1.9]}
    told = {"profile": {}, "variance": {"2": {"forks": 90, "mean_variance": 0.1, "entropy": row}}}
    assert "teach more" in next(iter(premise.lines(told)))
    row["interval"] = [0.5, 0.9]
    assert "teach less" in next(iter(premise.lines(told)))
    row["interval"] = [0.8, 1.3]
    assert "no difference is shown" in next(iter(premise.lines(told)))


def test_forks_that_cannot_be_compared_are_told_instead_of_an_error_at_the_end() -> None:
    """A policy that solves nothing, or everything, has no variance at any fork."""
    alike = [premise.ForkSeen(f"q{n}", 2, float(n), 0.0, (0.0, 0.0)) for n in range(12)]
    for forks, said in ((alike, "12 forks, without differences"), (alike[:3], "3 forks, too few")):
        told = {"profile": {}, "variance": {"1": premise.against_variance(forks, resamples=20)}}
        assert said in next(iter(premise.lines(told)))
