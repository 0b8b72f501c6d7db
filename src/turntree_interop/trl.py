"""TRL: pivots for its trainer, our rollouts in its asynchronous trainer, its environments, and its completions logs.

*Pivots out* (`--to trl`, `verifier_reward`): the dataset of a `GRPOTrainer`, and our verifier as its reward
function. TRL drops an unjudged completion from its group (None), so a verifier that fails gives no reward here either.

*Rollouts out* (`RolloutWorker`): TRL's `AsyncGRPOTrainer` trains the groups of a `rollout.service.RolloutService`.

*Environments in* (`trl:module:Class`): the class that TRL's `environment_factory` takes, unchanged.

`tasks` is a JSONL file. The columns of a row are the arguments of `reset`. The column `prompt` is among them where
`reset` takes it: these are the opening messages, to the last of which is appended what `reset` returns. An exception
in a tool is answered as text. The reward is what `get_reward` of the object returns, or its attribute `reward`, or
what the option `reward` (`module:function`) returns, called as TRL does: `reward(environments=[...], prompts=[...],
completions=[...], **columns)` gives a list of numbers.

*Completions logs*: `log_completions=True` writes `OUTPUT_DIR/completions/completions_STEP.parquet`.

Columns (`GRPOTrainer.log`): step, prompt, completion, one for every reward function, columns of `log_extra`,
advantage. The tables that wandb keeps (`*.table.json`) have the same columns. Texts are decoded without special
tokens; there are no token counts, no reward weights, and nothing marks which extra columns are rewards. Where their
names do not say it, `--reward` must; the advantages are checked against them.

The file of a step holds the latest generation batch. When one batch serves several updates, or logging comes more
often than generation, it is written again: a file that repeats the one before is dropped, and counted.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from turntree.core import parts
from turntree.core.completion import Sampling
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.core.outcome import is_zero_variance
from turntree.core.progress import notice
from turntree.core.protocols import Environment
from turntree.core.tree import RolloutTree
from turntree.env.adapted import named, prompt_of, rows_of, scored
from turntree.env.tool_environment import ToolEnvironment
from turntree.logs.generic import TextOptions
from turntree.logs.grouping import grouped, parsed
from turntree.logs.groups import LoggedGroup
from turntree.logs.rows import LoggedRow, ReadReport, RowRefused, count, facts_of, items, named_prompt, parse_row
from turntree.run.jsonl import read_bytes
from turntree_interop.judging import Judge, Settings, pack_state, write_reward
from turntree_interop.rows import columns, rollout_of_text, write_parquet

if TYPE_CHECKING:  # an audit recognises every partner's log, and should not load what a trainer needs
    from turntree.pack.rows import Row
    from turntree.rollout.service import EpisodeGroup, RolloutService
    from turntree.stages.export import Bundle, ExportedPivot
    from turntree.train.loss_config import LossConfig

PromptForm = Literal["auto", "messages", "text"]
"""messages: TRL applies the chat template, to which it passes no tools. text: rendered here, exact with tools too.
auto: text where a model was named and pivots have tools."""


def verifier_reward(
    verifier: str = "recommended", *, stop_ids: Collection[int] = (), **settings: Unpack[Settings]
) -> Callable[..., list[float | None]]:
    """A reward function for TRL's trainers: `reward(prompts, completions, **columns)`, one reward per completion and
    None where the verifier does not judge.

    It needs the column `state` of an exported dataset. `stop_ids` are the ids that end a turn of the policy: with them
    a completion that was cut off gets 0 (`cut_turns`); without them TRL does not say which one was, and its text is
    judged.
    """
    judge = Judge(verifier, **settings)
    ends = frozenset(stop_ids)

    def reward(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        state: Sequence[str] | None = None,
        **_: Any,
    ) -> list[float | None]:
        if state is None:
            hint = "train on the dataset of `turntree export pivots --to trl`, without remove_unused_columns"
            raise InputError("is not among the columns of the dataset", field="state", hint=hint)
        sampled: Sequence[Sequence[int]] = completion_ids or [()] * len(completions)
        cut = [bool(ends) and len(ids) > 0 and ids[-1] not in ends for ids in sampled]
        actions = [judge.action(said, cut=one) for said, one in zip(completions, cut, strict=True)]
        return [verdict.reward for verdict in judge(list(zip(state, actions, strict=True)))]

    reward.__name__ = f"turntree_{verifier.replace(':', '_').replace('.', '_')}"  # TRL logs it by this name
    return reward


def export_trl(bundle: Bundle, out: Path, *, prompt: PromptForm = "auto") -> dict[str, Any]:
    """Write `pivots.parquet` and `reward.py`, whose `reward` is the verifier.

    Args:
        prompt: As messages, to which TRL passes no tools, or as text that is rendered here (auto: text where a model
            was named and pivots have tools).
    """
    rows = _rows(bundle.pivots, prompt)
    texts = isinstance(rows[0]["prompt"], str)
    write_parquet(out / "pivots.parquet", rows, ("demonstration",) if texts else ("prompt", "demonstration"))
    names = ("turntree_interop.trl", "verifier_reward", "reward")
    settings = {**bundle.reward_settings(), "stop_ids": bundle.stop_ids}
    write_reward(out, "The verifier of these pivots, as a reward function of TRL.", names, settings)
    return {"files": ["pivots.parquet", "reward.py"], "prompt": "text" if texts else "messages"}


def _rows(pivots: Sequence[ExportedPivot], prompt: PromptForm) -> list[dict[str, Any]]:
    rendered = all(pivot.text is not None for pivot in pivots)
    if prompt == "text" and not rendered:
        raise ConfigError("needs the policy's chat template", field="pivot_format.prompt", hint="name it with --model")
    texts = prompt == "text" or (prompt == "auto" and rendered and any(pivot.state.tools for pivot in pivots))
    return [
        {
            "prompt": pivot.text if texts else pivot.prompt,
            **columns(pivot),
            "demonstration": pivot.state.demonstration.to_chat(),
            "state": pack_state(pivot.state),
        }
        for pivot in pivots
    ]


# rollouts out


@dataclass(frozen=True)
class _Sample:
    """One of TRL's samples: the first `length` tokens of a row, of which those `at` these places are trained."""

    row: Row
    at: tuple[int, ...]
    advantage: float
    length: int

    @property
    def filler(self) -> _Sample:
        """A sample as short as can be that moves nothing. A row of TRL must hold a trained token."""
        return _Sample(self.row, self.at[:1], 0.0, self.at[0] + 1)


def micro_batches(
    rows: Sequence[Row], divisor: float, *, size: int, accumulation: int, idle: int = 0
) -> list[list[_Sample]]:
    """What TRL takes of an iteration: micro-batches of `size` samples, `accumulation` of them an optimizer step, the
    last `idle` of which are fillers; [] where no token has an advantage. A group lies in one micro-batch if it fits.

    A sample is what has one advantage in a row; TRL's trie computes once what samples share. TRL's loss of a step is
    the mean over its micro-batches of (sum over trained tokens) / (their number). Advantages are scaled by these
    numbers, so that it is (sum over the trained tokens of the step) / `divisor`. Where an iteration takes several
    steps, each stands for the whole iteration.
    """
    batches: list[list[_Sample]] = []
    for _, of_group in itertools.groupby(rows, key=lambda row: row.tree):
        group = [sample for row in of_group for sample in _samples(row)]
        if batches and len(batches[-1]) + len(group) <= size:
            batches[-1] += group
        else:
            batches += [group[start : start + size] for start in range(0, len(group), size)]
    if not batches:
        return []
    least = min((sample.filler for batch in batches for sample in batch), key=lambda sample: sample.length)
    useful = accumulation - idle
    batches += [[] for _ in range(-len(batches) % useful)]
    steps = [batches[start : start + useful] + [[]] * idle for start in range(0, len(batches), useful)]
    filled = [batch + [(batch[0].filler if batch else least)] * (size - len(batch)) for step in steps for batch in step]
    factors = [sum(len(sample.at) for sample in batch) * len(filled) / divisor for batch in filled]
    scaled = zip(filled, factors, strict=True)
    return [[replace(sample, advantage=sample.advantage * factor) for sample in batch] for batch, factor in scaled]


def _samples(row: Row) -> Iterator[_Sample]:
    for advantage in dict.fromkeys(row.advantages):
        if advantage:  # the divisor has counted the others
            at = tuple(place for place, one in enumerate(row.advantages) if one == advantage)
            yield _Sample(row, at, advantage, len(row))


def _check_agree(sampling: Sampling, loss: LossConfig, args: Any, ahead: int) -> None:
    """Raise `ConfigError` where TRL's trainer would not take the step of `loss`."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    for field, ours, theirs, hint in (
        ("loss.kl_coefficient", loss.kl_coefficient, 0.0, "this trainer has no KL term: set it to 0"),
        ("loss.ratio", loss.ratio, "token", "this trainer has token ratios"),
        ("loss.clip_low", loss.clip_low, args.epsilon, "set AsyncGRPOConfig.epsilon to it"),
        ("loss.clip_high", loss.clip_high, high, "set AsyncGRPOConfig.epsilon_high to it"),
        ("sampling.temperature", sampling.temperature, args.temperature, "set AsyncGRPOConfig.temperature to it"),
        ("token_budget", args.token_budget, 0, "the worker fills micro-batches by number of samples: set it to 0"),
        ("weight_sync_steps", args.weight_sync_steps, 1, "versions count steps: leave it at 1"),
    ):
        if ours != theirs:
            raise ConfigError(f"is {ours!r}, and TRL's trainer needs {theirs!r}", field=field, hint=hint)
    if ahead < 0 or ahead > args.max_staleness:
        problem = f"is {ahead}, and TRL drops what is older than {args.max_staleness}"
        raise ConfigError(problem, field="max_off_policy_steps", hint="raise AsyncGRPOConfig.max_staleness")
    if ahead == 0 and args.gradient_accumulation_steps < 2:
        problem = "leaves no micro-batch idle, and TRL takes one ahead of the update"
        hint = "set it to 2 or more, or max_off_policy_steps to 1"
        raise ConfigError(problem, field="gradient_accumulation_steps", hint=hint)


class RolloutWorker:
    """The `rollout_worker` of TRL's `AsyncGRPOTrainer` (as of TRL 1.16): trains the groups of `service` with the loss
    of `loss`, exactly (`micro_batches`; docs/scale.md says with what settings, and what TRL adds).

    An iteration is sampled when all but `max_off_policy_steps` of the steps before it are taken. It plays in a thread
    of the trainer's process. `args` is the trainer's `AsyncGRPOConfig`; `keep` is given the number and the groups of
    every iteration. Raises `ConfigError` where `args` and `loss` do not go together.
    """

    def __init__(
        self,
        service: RolloutService,
        loss: LossConfig,
        args: Any,
        *,
        max_off_policy_steps: int = 1,
        keep: Callable[[int, Sequence[EpisodeGroup]], object] = lambda iteration, groups: None,
    ) -> None:
        _check_agree(service.iterations.rollouts.episodes.sampling, loss, args, max_off_policy_steps)
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._service, self._loss, self._keep, self._ahead = service, loss, keep, max_off_policy_steps
        self._size = args.per_device_train_batch_size * args.world_size
        self._accumulation = args.gradient_accumulation_steps
        self._thread = threading.Thread(target=self._run, name="turntree-rollouts", daemon=True)
        self._changed, self._stopped = threading.Condition(), False
        self._version = self._first = 0  # of the policy: now, and at the start
        self._steps = self._groups = 0  # that were given to the trainer
        self._alive = time.monotonic()
        self._failure: BaseException | None = None

    # what the trainer calls

    def start(self) -> None:
        self._first = self._version
        self._thread.start()

    def stop(self) -> None:
        """The group that is being played is the last."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def update_model_version(self, model_version: int) -> None:
        with self._changed:
            self._version = model_version
            self._changed.notify_all()

    def check_health(self, stale_after_s: float) -> None:
        """Raises `TurntreeError` where no further sample will come, or where no group has ended for longer than this
        and than a group may take."""
        if self._failure is not None:
            raise TurntreeError(f"the rollouts failed: {self._failure}") from self._failure
        if not self._thread.is_alive():
            raise TurntreeError(f"all {self._service.iterations.last} iterations were trained: set max_steps lower")
        limit = max(stale_after_s, self._service.iterations.rollouts.longest_group)
        if (silent := time.monotonic() - self._alive) > limit:
            raise TurntreeError(f"no group has ended for {silent:.0f} seconds")

    # its thread

    def _run(self) -> None:
        last = self._service.iterations.last
        try:
            for iteration in itertools.count(1) if last is None else range(1, last + 1):
                if not self._may_sample():
                    return
                self._service.update(self._version)
                groups: list[EpisodeGroup] = []
                for group in self._service.groups(iteration):
                    self._alive = time.monotonic()
                    if self._stopped:
                        return
                    groups.append(group)
                self._keep(iteration, groups)
                self._give(iteration, groups, ends=iteration == last)
        except BaseException as error:  # `check_health` tells the trainer
            self._failure = error

    def _may_sample(self) -> bool:
        """Wait until enough steps are taken; False: the trainer has ended."""
        with self._changed:
            while not self._stopped and self._version - self._first < self._steps - self._ahead:
                self._changed.wait(1.0)
                self._alive = time.monotonic()
            return not self._stopped

    def _give(self, iteration: int, groups: Sequence[EpisodeGroup], *, ends: bool) -> None:
        """Put the samples of an iteration into the trainer's queue."""
        from turntree.pack.rows import rows
        from turntree.rollout.episode_figures import group_figures

        learned = [(group.tree, credit) for group in groups if (credit := group.trained_credit) is not None]
        trees, credits = [tree for tree, _ in learned], [credit for _, credit in learned]
        made, batches = rows(trees, credits), list[list[_Sample]]()
        if made:
            divisor = self._loss.divisor(
                math.fsum(m for row in made for m in row.multiplicities),
                rollout_tokens=sum(credit.rollout_tokens for credit in credits),
                rollouts=sum(credit.rollouts for credit in credits),
            )
            idle = int(self._ahead == 0)
            batches = micro_batches(made, divisor, size=self._size, accumulation=self._accumulation, idle=idle)
        figures = group_figures([group.grown for group in groups], amplifies=False)
        told = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        given = sum(sample.advantage != 0 for batch in batches for sample in batch)
        steps = len(batches) // self._accumulation
        self.metrics_queue.put({f"turntree/{key}": x for key, x in {**told, "samples": given, "steps": steps}.items()})
        if not batches:
            notice(f"iteration {iteration}: no group has a gradient; the trainer waits for the next one")
            return
        if self._ahead == 0 and self._steps == 0:
            batches.insert(0, batches[-1])  # of fillers: from now on the last micro-batch of a step is the next one's
        elif ends and self._ahead:
            batches.append([sample.filler for sample in batches[-1]])  # TRL takes one more before it ends
        for sample in itertools.chain.from_iterable(batches):
            self.rollout_buffer.put(self._trl_sample(sample, trees[sample.row.tree]))
        self._groups, self._steps = self._groups + len(trees), self._steps + steps

    def _trl_sample(self, sample: _Sample, tree: RolloutTree) -> Any:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # pyright: ignore[reportMissingImports]

        length, at = sample.length, list(sample.at)
        mask, logprobs = np.zeros(length, np.int64), np.zeros(length, np.float32)
        mask[at], logprobs[at] = 1, [sample.row.logprobs[place] for place in at]
        told, *path = tree.path(sample.row.nodes[length - 1])
        return RolloutSample(
            prompt=[message.to_chat() for message in told.messages],
            completion=[message.to_chat() for node in path for message in node.messages],
            input_ids=np.array(sample.row.tokens[:length], np.int64),
            completion_mask=mask,
            old_log_probs=logprobs,
            advantage=sample.advantage,
            model_version=self._version if sample.row.policy_version is None else sample.row.policy_version,
            group_id=self._groups + sample.row.tree,
            metrics={},
            enqueued_at=time.time(),
        )


def tasks(
    split: str,
    count: int,
    *,
    seed: int,
    argument: str | None,
    tasks: str,
    held_out: str | None = None,
    reward: str | None = None,
) -> list[Environment]:
    """At most `count` rows of the split, one environment each (`env.adapted.rows_of` says which row is in which split).

    Args:
        tasks: A file of rows: what `reset` takes, and a prompt.
        held_out: A second such file, for held-out tasks (default: the first one is split by a hash of the row).
        reward: A reward function of TRL that judges an episode, as module:function.
    """
    name = named(argument, "trl:module:Class")
    owner = parts.load("environments", name).target
    if not inspect.isclass(owner) or not callable(getattr(owner, "reset", None)):
        raise InputError(f"{name!r} is not a class with a reset", field="environment", hint="name the class itself")
    return [
        scored(
            ToolEnvironment(
                owner,
                task_id=task_id,
                arguments={key: value for key, value in row.items() if key != "prompt" or _takes_prompt(owner)},
                prompt=prompt_of(row.get("prompt"), tasks),
                task_type=owner.__name__,
            ),
            reward,
            row,
        )
        for task_id, row in rows_of(tasks, held_out, split, count, seed)
    ]


def _takes_prompt(owner: type) -> bool:
    """Whether `reset` has a place for the column `prompt`, which TRL gives to every class."""
    taken = inspect.signature(owner.reset).parameters  # pyright: ignore[reportAttributeAccessIssue]
    return "prompt" in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())


_TEXT_COLUMNS = ("prompt", "completion")
_NOT_REWARDS = ("step", "advantage", *_TEXT_COLUMNS)
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CompletionsTables(TextOptions):
    """TRL's tables. Rows of one step with the same prompt, and facts about it, are one group, or several where other
    prompts show that a group is smaller; a prompt with its facts is a task."""

    marks: ClassVar = (frozenset({"step", "prompt", "completion", "advantage"}),)
    file_marks: ClassVar = ("completions_*.parquet", ".table.json")
    folders: ClassVar = ("completions_*.parquet", "completions/completions_*.parquet", "*.table.json")

    def groups(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedGroup]:
        chosen = replace(self, rewards=self.rewards or _reward_columns(paths, report))
        yield from _groups(chosen, paths, report, weighted=bool(self.rewards))


def _groups(
    options: CompletionsTables, paths: Sequence[Path], report: ReadReport, *, weighted: bool
) -> Iterator[LoggedGroup]:
    before: list[tuple[Any, ...]] = []
    for path in paths:
        numbered = _records(path, report)
        records = [record for _, record in numbered]
        told = ("prompt", "completion", "advantage")
        generated = [tuple(map(record.get, told)) for record in records]
        if generated == before:
            report.drop("the generation batch of the step before, logged again", path, count=len(records))
            continue
        before = generated
        rows: list[LoggedRow] = []
        batches: dict[tuple[str, int], list[tuple[float | None, Record]]] = {}
        for (line, record), group in zip(numbered, _groups_of(records), strict=True):
            try:
                rows.append(_row(record, options, group[1]))
                batches.setdefault(group, []).append((rows[-1].rollout.reward, record))
            except RowRefused as refused:
                report.drop(refused.reason, path, line)
        _check_advantages(list(batches.values()), options.rewards, path, report, weighted=weighted)
        yield from grouped(rows, path, report)


def _records(path: Path, report: ReadReport) -> list[tuple[int, Record]]:
    """The rows of one file, which is one generation batch, with their numbers; what is none is dropped and counted."""
    if not path.name.endswith(".table.json"):
        return list(parsed(path, report))
    rows = _table(path)
    for _ in rows:
        report.saw_line()
    return list(enumerate(rows, start=1))


def _table(path: Path) -> list[Record]:
    """A table of wandb: the names of the columns, and a list of values for every row."""
    try:
        table = parse_row(read_bytes(path))
        columns, data = items(table, "columns", str, needed=True), items(table, "data", list, needed=True)
    except RowRefused as refused:
        hint = "name wandb's *.table.json files, or copy it again"
        raise InputError(f"is not a table ({str(refused)[:200]})", path=path, hint=hint) from refused
    if len(set(columns)) < len(columns):
        raise InputError("has columns without a name of their own", path=path, field="columns", hint="copy it again")
    for number, values in enumerate(data, start=1):
        if len(values) != len(columns):
            problem = f"row {number} is not a list of {len(columns)} values"
            raise InputError(problem, path=path, field="data", hint="copy the file again")
    return [dict(zip(columns, values, strict=True)) for values in data]


def _reward_columns(paths: Sequence[Path], report: ReadReport) -> tuple[str, ...]:
    """The columns that were rewards: the only one of numbers, else those that are named so. (Where the advantages are
    not theirs, `_check_advantages` refuses them.)"""
    told = ReadReport("trl")  # of a look: `_groups` counts the lines
    found = (_numeric((row for _, row in _records(path, told)), _NOT_REWARDS) for path in paths)
    names = list(dict.fromkeys(itertools.chain.from_iterable(found)))
    rewards = tuple(names if len(names) == 1 else [name for name in names if "reward" in name.lower()])
    if not rewards:
        problem = f"does not tell which of {', '.join(names)[:300]} were rewards" if names else "has no reward column"
        raise InputError(problem, path=paths[0], hint="name every column that was one with --reward NAME (repeatable)")
    left = [name for name in names if name not in rewards]
    others = f"; {', '.join(left)} left out" if left else ""
    report.note(f"the reward is the sum of {', '.join(rewards)}{others}; --reward says otherwise")
    return rewards


def _groups_of(records: Sequence[Record]) -> Iterator[tuple[str, int]]:
    """The group of every row: its prompt, and how often that was drawn before. All groups of TRL have one size, and lie
    one after the other: so where the rows of every prompt are a multiple of the fewest, more rows are more draws."""
    told = [json.dumps([record.get("step"), facts_of(record)], default=str) for record in records]
    sizes, seen = Counter(told), Counter[str]()
    least = min(sizes.values(), default=1)
    for place in told:
        size = least if least > 1 and all(many % least == 0 for many in sizes.values()) else sizes[place]
        yield place, seen[place] // size
        seen[place] += 1


def _row(record: Record, options: CompletionsTables, drawn: int) -> LoggedRow:
    prompt, completion = (_text(record.get(name)) for name in _TEXT_COLUMNS)
    task, rollout = named_prompt(prompt), rollout_of_text(record, completion, options)
    if rollout.reward is not None:  # TRL adds in float32, where 0.2 + 0.3 is 0.5
        rollout = replace(rollout, reward=float(np.float32(rollout.reward)))
    return LoggedRow(
        group=f"{task} ({drawn + 1})" if drawn else task,
        task=task,
        rollout=rollout,
        iteration=count(record, "step"),
        facts=facts_of(record),
    )


def _text(value: Any) -> str:
    """Conversations of older versions are lists of messages."""
    if value is None:
        raise RowRefused("no prompt or no completion")
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _check_advantages(
    groups: Sequence[Sequence[tuple[float | None, Record]]],
    rewards: tuple[str, ...],
    path: Path,
    report: ReadReport,
    *,
    weighted: bool,
) -> None:
    """Raise `InputError` where the advantages of a group do not rise with its reward on a straight line: the wrong
    columns were summed, or one prompt stands for several tasks. `weighted`: any weights but negative ones will do.
    TRL has trained on completions without any reward as on failures: where advantages show it, it is said."""
    failed = 0
    for group in groups:
        known = [(value, row) for value, row in group if _is_number(row.get("advantage"))]
        taught = sum(value is None and abs(row["advantage"]) > FLAT for value, row in known)
        if taught and _fits([(value or 0.0, row) for value, row in known], rewards, weighted=weighted):
            failed += taught
            continue
        scored = [(value, row) for value, row in known if value is not None]
        if len(scored) > 1 and not _fits(scored, rewards, weighted=weighted):
            raise InputError(
                f"the advantages of {len(scored)} rows of one step with one prompt are not those of a group "
                f"whose reward is the sum of {', '.join(rewards)}",
                path=path,
                hint="name the columns that were rewards with --reward, also if all were and had weights; where an "
                "evaluation wrote into the file, or several tasks share a prompt, this log does not tell groups apart",
            )
    if failed:
        report.note(f"{path.name}: completions without a reward were trained on as if it were 0: {failed}")


def _fits(pairs: Sequence[tuple[float, Record]], rewards: tuple[str, ...], *, weighted: bool) -> bool:
    """Whether the advantages of these rows are those of a group with these rewards."""
    advantage = np.array([float(row["advantage"]) for _, row in pairs])
    sums = [value for value, _ in pairs]
    columns = [[float(row[name]) if _is_number(row.get(name)) else 0.0 for name in rewards] for _, row in pairs]
    values = np.array(columns if weighted else [[value] for value in sums])
    off = _off(values - values.mean(axis=0), advantage - advantage.mean())
    largest = float(np.abs(advantage).max())
    fits = off <= max(FLAT, FIT * largest) * math.sqrt(len(pairs))
    return fits and is_zero_variance(sums) == (largest <= FLAT)


def _off(columns_NC: NDArray[np.float64], target_N: NDArray[np.float64]) -> float:
    """The least distance from the target of a sum of the columns with weights from 0: that of the best set of columns
    whose least squares need no negative weight. Rewards are few."""
    best = float(np.linalg.norm(target_N))
    for size in range(1, columns_NC.shape[1] + 1):
        for chosen in itertools.combinations(range(columns_NC.shape[1]), size):
            weights = np.linalg.lstsq(columns_NC[:, chosen], target_N)[0]
            if (weights >= 0).all():
                best = min(best, float(np.linalg.norm(columns_NC[:, chosen] @ weights - target_N)))
    return best


FLAT, FIT = 1e-6, 1e-2  # advantages are written in float32, and some scales have an epsilon


def _numeric(rows: Iterable[Record], but: Sequence[str]) -> list[str]:
    """The columns, in order, whose values are all numbers or null, and not null alone."""
    kinds: dict[str, set[type]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in but:
                kinds.setdefault(name, set()).add(type(value))
    return [name for name, found in kinds.items() if found & {int, float} and found <= {int, float, type(None)}]


def _is_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
