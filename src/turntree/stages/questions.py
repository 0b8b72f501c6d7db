"""The questions that a stage plays: generated ones over a generated world, or a user's own over their own documents."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turntree.core.errors import ConfigError, InputError
from turntree.domains.qa.build import QaWorld, QaWorldConfig, SearchConfig, environments, open_tools
from turntree.domains.qa.environment import QaConfig, QaEnvironment
from turntree.domains.qa.formats import read_questions
from turntree.domains.qa.generate import Posed, Split
from turntree.domains.qa.questions import Question
from turntree.sandboxes.limits import SandboxConfig
from turntree.tools.pool import ThreadPool
from turntree.tools.runtime import ToolRuntime, ToolRuntimeConfig
from turntree.tools.search import SearchIndex
from turntree.verifiers.hierarchical import HierarchicalConfig, HierarchicalReward


@dataclass(frozen=True, kw_only=True)
class QuestionsConfig:
    """What is asked, and with what it is answered.

    `source` is "generated" or a file of questions (`domains.qa.formats`), which needs `index`, made by
    `turntree index build`. Of generated ones `count` of split "train" are trained on and `held_out_count` of
    `held_out_split` checked on; of a file, its first `count` questions and the next `held_out_count`, or the first of
    `held_out`. No question of `held_out` is trained on, whether it is checked on or not (`Question.key`).
    """

    source: str = "generated"
    index: str | None = None
    held_out: str | None = None
    count: int = 400
    held_out_count: int = 200
    held_out_split: Split = "dev"
    world: QaWorldConfig = field(default_factory=QaWorldConfig)
    episodes: QaConfig = field(default_factory=QaConfig)
    reward: HierarchicalConfig = field(default_factory=HierarchicalConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    runtime: ToolRuntimeConfig = field(default_factory=lambda: ToolRuntimeConfig(seconds=300.0))  # waits for a box
    threads: int = 64

    def __post_init__(self) -> None:
        if min(self.count, self.held_out_count, self.threads) < 1:
            raise ConfigError("count, held_out_count and threads must be at least 1", field="count")
        if (self.source == "generated") != (self.index is None):
            raise ConfigError(
                "a file of questions needs an index of the documents to search, generated ones bring their own",
                field="index",
                hint="make one with `turntree index build`",
            )
        if self.source == "generated" and self.held_out is not None:
            raise ConfigError("goes with a file of questions; generated ones have splits", field="held_out")


@dataclass(frozen=True)
class Questions:
    """Environments to train on and to check on, with the pool to step them in. They share their tools. `posed` says how
    the generated ones among the first are answered."""

    tasks: Sequence[QaEnvironment]
    held_out: Sequence[QaEnvironment]
    pool: ThreadPool
    tools: ToolRuntime
    posed: Sequence[Posed] = ()
    read: Sequence[dict[str, Any]] = ()  # what reading files counted, one entry a file

    def figures(self) -> dict[str, Any]:
        """What the tools of this process were asked so far and what they executed, by name: hits of their cache and
        joined calls depend on when things happened, so this belongs to the timing of a run."""
        return {"tools": {name: asdict(count) for name, count in sorted(self.tools.ledger.counts().items())}}


@contextlib.contextmanager
def open_questions(config: QuestionsConfig) -> Iterator[Questions]:
    """Build what has to be built and close it again. Raises `InputError` on a machine without a sandbox."""
    with contextlib.ExitStack() as stack:
        if config.index is None:
            world = QaWorld(config.world)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            index = stack.enter_context(world.build_index(folder / "index.sqlite"))
            posed, read = world.questions("train", config.count), list[dict[str, Any]]()
            asked: Sequence[Question] = [each.question for each in posed]
            checked: Sequence[Question] = [
                each.question for each in world.questions(config.held_out_split, config.held_out_count)
            ]
        else:
            posed = ()
            index = stack.enter_context(SearchIndex(Path(config.index)))
            asked, checked, read = read_splits(config)
        tools = stack.enter_context(
            open_tools(index, search=config.search, sandbox=config.sandbox, runtime=config.runtime)
        )
        pool = stack.enter_context(ThreadPool(config.threads))
        reward = HierarchicalReward(config.reward)
        tasks, held_out = (environments(part, tools, reward, config.episodes) for part in (asked, checked))
        yield Questions(tasks, held_out, pool, tools, posed, read)


def read_splits(config: QuestionsConfig) -> tuple[Sequence[Question], Sequence[Question], list[dict[str, Any]]]:
    """Those to train on and those to check on, which have none in common, and what reading them counted."""
    first = read_questions([config.source])
    if config.held_out is None:
        checked = first.questions[config.count : config.count + config.held_out_count]
        if not checked:
            raise InputError(
                f"all {len(first.questions)} questions would be trained on and none is left to check on",
                path=config.source,
                hint=f"lower --count (now {config.count}), or name a file as --held-out",
            )
        return first.questions[: config.count], checked, [first.report.to_json()]
    if Path(config.held_out).resolve() == Path(config.source).resolve():
        checked = first.questions[: config.held_out_count]
        rest = first.without(checked, "checked on")
        return rest.questions[: config.count], checked, [first.report.to_json()]
    second = read_questions([config.held_out])
    rest = first.without(second.questions, "held out")
    if not rest.questions:
        raise InputError("holds no question that is not held out too", path=config.source, field="held_out")
    reports = [rest.report.to_json(), second.report.to_json()]
    return rest.questions[: config.count], second.questions[: config.held_out_count], reports
