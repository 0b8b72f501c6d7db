"""Several environments in one run, and pivots as tasks of one turn, so that both can be trained in one update
(PivotRL, Table 5: a stage that mixes PivotRL with other environments)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from turntree.core import seeds
from turntree.core.config import Bounded, Part, Positive
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation, Task, TurnVerifier, task_of
from turntree.env.adapted import named
from turntree.env.local import LocalPool
from turntree.env.tasks import TaskSet, identity, open_tasks
from turntree.run.files import file_hash
from turntree.stages.candidates import SelectedState, read_selected
from turntree.stages.verifier import chosen_verifier, open_verifier
from turntree.traces.splits import assign_split
from turntree.train.sampler import PivotSampler


@dataclass(frozen=True, kw_only=True)
class Blend(Bounded):
    """The tasks of several environments, each with a share of them (`--environment blend`)."""

    of: tuple[Part, ...] = ()
    """The environments: [{"name": "qa"}, {"name": "pivots:runs/pivots.jsonl"}]."""
    shares: tuple[float, ...] = ()
    """Of the tasks, in the order of the environments (default: equal ones). Every task is played once an epoch."""
    threads: Positive = 64
    """Concurrent calls, where an environment waits for tools."""
    model: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.of) < 2:
            raise ConfigError("names fewer than two environments", field="of", hint='[{"name": "qa"}, ...]')
        if self.shares and (len(self.shares) != len(self.of) or min(self.shares) <= 0):
            raise ConfigError(f"are not {len(self.of)} numbers above 0", field="shares", hint="one an environment")

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        """Raises `InputError` where a split has fewer tasks than there are environments, and what these raise."""
        counts = {split: dealt(count, self.shares or (1.0,) * len(self.of)) for split, count in splits.items()}
        if short := [split for split, found in counts.items() if not all(found)]:
            problem = f"of split {short[0]!r} are {splits[short[0]]}, which leaves an environment without one"
            raise InputError(problem, field="count", hint="play more tasks, or change environment.shares")
        with contextlib.ExitStack() as stack:
            opened: dict[str, TaskSet] = {}
            contents: dict[str, str] = {}
            for place, part in enumerate(self.of):
                name, own = f"of.{place}", {split: found[place] for split, found in counts.items()}
                opened[name] = stack.enter_context(open_tasks(part, own, seed=seed, model=self.model))
                if any(task_of(task).player is not None for split in own for task in opened[name].of(split)):
                    raise ConfigError("plays its tasks by itself", field=name, hint="leave it out: a blend steps them")
                contents[name] = str(identity(part, opened[name]))
            waits = any(one.pool is not None for one in opened.values())
            yield TaskSet(
                tasks={split: [task for one in opened.values() for task in one.of(split)] for split in splits},
                pool=stack.enter_context(LocalPool(self.threads)) if waits else None,
                figures=lambda: {name: one.figures() for name, one in opened.items()},
                read=[row for one in opened.values() for row in one.read],
                contents=contents,
            )


def dealt(count: int, shares: Sequence[float]) -> list[int]:
    """`count` in whole numbers of these shares, which are off by less than 1 each."""
    ends = [round(count * end / sum(shares)) for end in accumulate(shares, initial=0.0)]
    return [end - start for start, end in pairwise(ends)]


@dataclass(frozen=True, kw_only=True)
class Pivots:
    """Selected turns as tasks (`--environment pivots:FILE`, a file of `turntree select`): the policy sees the history,
    says one turn, and is paid by the verifier of the profile."""

    argument: str | None
    traces: str | None = None
    """Where the traces lie, if not where the profile found them."""
    verifier: Part | None = None
    """Default: that of the profile. One that plays actions or asks the policy is for `train pivot`."""

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        """Whatever is wanted, a tenth of the traces' groups are of the split "test" and a tenth of "dev". Turns are
        drawn by their weights where there are more. Raises `InputError` as `read_selected`, and where a split has no
        turn."""
        path = named(self.argument, "pivots:FILE")
        header, states = read_selected(path, self.traces)
        own = {split: [one for one in states if _split(one) == split] for split in splits}
        if empty := [split for split, found in own.items() if not found]:
            problem = f"holds no turn of split {empty[0]!r}: of {len({one.group for one in states})} groups of traces"
            raise InputError(problem, path=path, hint="select from more traces")
        with open_verifier(chosen_verifier(self.verifier, header, path)) as verifier:
            tasks: dict[str, list[PivotTask]] = {}
            for split, found in own.items():
                sampler = PivotSampler([one.row["weight"] for one in found], seed)
                drawn = sampler.draw(min(splits[split], len(found)), step=0)
                tasks[split] = [PivotTask(found[place], verifier) for place in drawn]
            hashes = {"pivots_hash": file_hash(Path(path)), "traces_hash": str(header["traces_hash"])}
            yield TaskSet(tasks=tasks, contents={**hashes, "verifier": verifier.name})


def _split(selected: SelectedState) -> str:
    return assign_split(selected.group, seeds.derive(0, "pivots as tasks"), {"train": 0.8, "dev": 0.1, "test": 0.1})


class PivotTask(Task):
    """One turn. Its reward is the verdict; without one the episode is censored."""

    def __init__(self, selected: SelectedState, verifier: TurnVerifier) -> None:
        self._state, self._verifier = selected.state, verifier
        self.task_id, self.task_type = selected.state.id, str(selected.row["kind"])
        self.tools, self.gold = selected.state.tools, (selected.state.demonstration,)

    def reset(self) -> tuple[Message, ...]:
        return self._state.history

    def step(self, action: Message) -> Observation:
        verdict = self._verifier.judge(self._state, action)
        if verdict.reward is None:
            raise EnvironmentFault(verdict.reason)
        return Observation((), done=True, success=verdict.reward == 1.0, reward=verdict.reward)

    def fork(self) -> Environment:
        return self
