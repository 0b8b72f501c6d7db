"""How far profiles of the same candidates agree: PYTHON recipes/profile_agreement.py ADAPTIVE SAME_DRAWS OTHER_DRAWS

For every pair: the Jaccard index of the two sets of pivots, the share of candidates that a selection treats alike
(pivot, mastered, all fail), and the share with the same of the four classes, each with a 95% bootstrap interval over
candidates. Two fixed profiles with draws of their own are the ceiling for anything that draws anew.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from turntree.pivots.rows import classify
from turntree.run.artifacts import PROFILE

WAYS = {"all succeed": "mastered", "mixed but easy": "mastered"}
THRESHOLD = 0.6


def classes(path: str) -> dict[tuple[str, int], str]:
    return {(row["trace_id"], row["turn"]): classify(row, THRESHOLD) for row in PROFILE.stream(Path(path))[1]}


def interval(statistic: Callable[[Sequence[int]], float], count: int, resamples: int = 1000) -> str:
    rng = random.Random(0)
    values = sorted(statistic(rng.choices(range(count), k=count)) for _ in range(resamples))
    low, high = values[int(0.025 * resamples)], values[int(0.975 * resamples) - 1]
    return f"{statistic(range(count)):.1%} [{low:.1%}, {high:.1%}]"


def compare(first: Sequence[str], second: Sequence[str]) -> str:
    pairs = list(zip(first, second, strict=True))
    alike = [WAYS.get(one, one) == WAYS.get(other, other) for one, other in pairs]

    def jaccard(chosen: Sequence[int]) -> float:
        either = sum("pivot" in pairs[i] for i in chosen)  # none among few pivots: two empty sets are equal
        return sum(pairs[i] == ("pivot", "pivot") for i in chosen) / either if either else 1.0

    found = (
        interval(jaccard, len(pairs)),
        interval(lambda chosen: sum(alike[i] for i in chosen) / len(chosen), len(pairs)),
        interval(lambda chosen: sum(pairs[i][0] == pairs[i][1] for i in chosen) / len(chosen), len(pairs)),
    )
    return " | ".join(found)


def main(paths: Sequence[str]) -> None:
    profiles = {path: classes(path) for path in paths}
    print("| profiles | pivots, Jaccard | treated alike | same class |\n|---|---|---|---|")
    for one, other in itertools.combinations(paths, 2):
        if profiles[one].keys() != profiles[other].keys():
            sys.exit(f"{one} and {other} hold different candidates")
        ordered = [[profiles[path][key] for key in profiles[one]] for path in (one, other)]
        print(f"| {Path(one).stem}, {Path(other).stem} | {compare(*ordered)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
