"""What an environment costs: its tasks' own gold is played, and timed.

    python benchmarks/environments.py terminal swe browsing [--count 40] [--quick] [--json PATH]

For each environment: how many of its tasks are solved by their gold, steps a second in one thread (the judgement at the
end included; nothing for an environment without gold), and the median milliseconds of `reset`, of a step, of a `fork`
at every turn but the last, and of the first step in that fork (which pays for a copy that is made late). Options of an
environment are written after it: `browsing questions=q.json index=i.sqlite`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from turntree.cli.common import finish
from turntree.core.config import Part
from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.env.tasks import TRAIN, open_tasks


def timed(times: list[float], call: Callable[..., Any], *arguments: Any) -> Any:
    started = time.perf_counter()
    found = call(*arguments)
    times.append(1000 * (time.perf_counter() - started))
    return found


def measured(part: Part, count: int) -> dict[str, Any]:
    resets, steps, forks, first = ([] for _ in range(4))
    solved = played = 0
    with open_tasks(part, {TRAIN: count}) as opened:
        for task in opened.of(TRAIN):
            gold: Sequence[Message] = getattr(task, "gold", ())
            if not gold:
                continue
            environment = task.fork()
            timed(resets, environment.reset)
            solved += bool(play(gold, partial(timed, steps, environment.step)))
            played += 1
            again = task.fork()
            again.reset()
            for message in gold[:-1]:
                twin = timed(forks, again.fork)
                timed(first, twin.step, message)
                again.step(message)
    middle = {"reset_ms": resets, "step_ms": steps, "fork_ms": forks, "first_step_in_fork_ms": first}
    rate = 1000 * len(steps) / sum(steps) if steps else None
    share = {"name": part.name, "tasks": played, "solved_by_gold": solved, "steps_per_second": rate}
    return share | {name: statistics.median(times) if times else None for name, times in middle.items()}


def play(gold: Sequence[Message], step: Callable[[Message], Observation]) -> bool | None:
    for message in gold:
        observation = step(message)
        if observation.done:
            return observation.success
    return None


def named(words: Sequence[str]) -> list[Part]:
    """Environments, each with the KEY=VALUE words that follow it."""
    found: list[tuple[str, dict[str, Any]]] = []
    for word in words:
        key, is_option, value = word.partition("=")
        if is_option and found:
            found[-1][1][key] = value
        else:
            found.append((word, {}))
    return [Part(name, options) for name, options in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", default=["terminal", "swe", "browsing"])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=str)
    options = parser.parse_args()
    cases = [measured(part, 3 if options.quick else options.count) for part in named(options.environments)]
    lines = [json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in case.items()}) for case in cases]
    finish({"cases": cases, "command": Path(__file__).name}, options.json, lines)


if __name__ == "__main__":
    main()
