"""Questions as an environment (`--environment qa`): generated questions over a generated world, or your own questions
over your own documents. All episodes share a search tool and sandboxed Python."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from turntree.core import seeds
from turntree.core.config import Bounded, Count, Positive, is_url
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message
from turntree.env.local import LocalPool
from turntree.env.tasks import TRAIN, TaskSet, contents, must_be_held_out, shared_out
from turntree.env.tools.runtime import ToolRuntimeConfig
from turntree.run.files import read_json
from turntree_worlds.qa.build import QaWorld, QaWorldConfig, SearchConfig, open_tools
from turntree_worlds.qa.environment import INSTRUCTIONS, QaConfig, QaEnvironment
from turntree_worlds.qa.experts import gold, gold_of_evidence
from turntree_worlds.qa.formats import QuestionFile, read_questions
from turntree_worlds.qa.generate import Posed, Split
from turntree_worlds.qa.hierarchical import HierarchicalReward
from turntree_worlds.qa.questions import Question
from turntree_worlds.sandboxes.limits import SandboxConfig
from turntree_worlds.search import SearchIndex
from turntree_worlds.search_http import RetrievalServer

POLICY = Path(__file__).resolve().parents[1] / "models" / "qa_tiny"  # answers a third of the generated questions
EMBEDDED = "qa"  # the name of that policy
GENERATED = "generated"


@dataclass(frozen=True, kw_only=True)
class GeneratedQuestions(Bounded):
    """What decides which questions are generated, and how an episode of one looks."""

    offset: Count = 0
    """Skip this many generated questions to train on, as those of traces that the policy learned from; or of those to
    play, where nothing is trained."""
    world: QaWorldConfig = field(default_factory=QaWorldConfig)
    episodes: QaConfig = field(default_factory=QaConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    model: str = EMBEDDED
    """The policy that answers. It gets instructions about the answer format, unless it is the embedded one or was
    trained from it (it has the same tokenizer): these have learned the format without them."""


@dataclass(frozen=True, kw_only=True)
class Questions(GeneratedQuestions):
    """Questions, and the tools to answer them.

    Generated questions have splits. Of a file (`qa.formats`) the split "train" is drawn by the seed of the tasks; a
    command that trains on it checks on others of the file, or on some of `held_out` (`Question.key`). A
    command that plays only held-out questions needs `held_out`. A `model` is told how to answer, unless
    `episodes.instructions` say it in other words, or it is the embedded one or was trained from it.
    """

    questions: str = GENERATED
    """'generated', or a file of questions, which needs an index."""
    index: str | None = None
    """With a file of questions: the index of your documents, made by `turntree index build`, or the address of a
    retrieval server (http://HOST/retrieve, in the form of Search-R1's)."""
    held_out: str | None = None
    """A file of questions for checks; none of them is trained on, even if it is not used in a check."""
    reward: HierarchicalReward = field(default_factory=HierarchicalReward)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    runtime: ToolRuntimeConfig = field(default_factory=lambda: ToolRuntimeConfig(seconds=300.0))  # waits for a box
    threads: Positive = 64
    """Concurrent tool calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.questions == GENERATED) != (self.index is None):
            raise ConfigError(
                "a file of questions needs an index of the documents to search; generated questions have their own",
                field="index",
                hint="make one with `turntree index build`",
            )
        if self.questions == GENERATED and self.held_out is not None:
            raise ConfigError("goes with a file of questions; generated ones have splits", field="held_out")
        if self.questions != GENERATED and self.offset:
            raise ConfigError("goes with generated questions", field="offset", hint="leave rows out of your file")

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        """`seed` draws questions of a file; the generated world has its own (`world.seed`). Raises `InputError` on a
        machine without a sandbox."""
        with contextlib.ExitStack() as stack:
            ways: dict[str, Posed] = {}
            shown: dict[str, Sequence[Message]] = {}
            read: list[dict[str, Any]] = []
            files = {"held_out": self.held_out}
            if self.index is None:
                world = QaWorld(self.world)
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                index = stack.enter_context(world.build_index(folder / "index.sqlite"))
                posed = self.generated(world, splits)
                asked = {split: [each.question for each in found] for split, found in posed.items()}
                ways = {each.question.id: each for found in posed.values() for each in found}
                shown = {id: gold(way, self.search.pages) for id, way in ways.items()}
            else:
                asked, read = self.read(splits, seed)
                files["questions"] = self.questions
                if is_url(self.index):
                    index = RetrievalServer(self.index)
                else:
                    files["index"] = self.index
                    index = stack.enter_context(SearchIndex(Path(self.index)))
                    every = (question for found in asked.values() for question in found)
                    shown = {each.id: gold_of_evidence(each, index, self.search.pages) for each in every}
            tools = stack.enter_context(
                open_tools(index, search=self.search, sandbox=self.sandbox, runtime=self.runtime)
            )
            pool = stack.enter_context(LocalPool(self.threads))
            episodes = self._episodes()
            tasks = {
                split: [
                    QaEnvironment(each, tools, self.reward, episodes, shown.get(each.id, ()), ways.get(each.id))
                    for each in found
                ]
                for split, found in asked.items()
            }
            yield TaskSet(tasks=tasks, pool=pool, figures=tools.ledger.figures, read=read, contents=contents(files))

    def generated(self, world: QaWorld, splits: Mapping[str, int]) -> dict[str, Sequence[Posed]]:
        """The questions of each split; `offset` is of those to train on, or of those to play where there are none."""
        skipped = {split: self.offset if split == TRAIN or TRAIN not in splits else 0 for split in splits}
        return {split: world.questions(cast(Split, split), n, skipped[split]) for split, n in splits.items()}

    def read(self, splits: Mapping[str, int], seed: int) -> tuple[dict[str, Sequence[Question]], list[dict[str, Any]]]:
        """The questions of each split from files, of which none has one of another, and what reading them counted."""
        must_be_held_out(splits, self.questions, self.held_out)
        source = self.questions if TRAIN in splits else self.held_out or self.questions
        found = read_questions(source)
        if self.held_out is None or TRAIN not in splits or len(splits) == 1:
            return shared_out(_drawn(found, seed), splits, source), [found.to_json()]
        held_out = read_questions(self.held_out)
        rest = found.without(held_out.questions, "held out")
        if not rest.questions:
            raise InputError("holds no question that is not held out too", path=self.questions, field="held_out")
        checked = {split: count for split, count in splits.items() if split != TRAIN}
        asked = shared_out(_drawn(rest, seed), {TRAIN: splits[TRAIN]}, self.questions)
        asked |= shared_out(_drawn(held_out, seed), checked, self.held_out)
        return asked, [rest.to_json(), held_out.to_json()]

    def _episodes(self) -> QaConfig:
        """As they are given; else instructions for policies that have not learned the format."""
        if self.episodes.instructions is not None:
            return self.episodes
        learned = self.model == EMBEDDED or _has_tokenizer_of_embedded(Path(self.model))
        return QaConfig(max_calls=self.episodes.max_calls, instructions="" if learned else INSTRUCTIONS)


@dataclass(frozen=True, kw_only=True)
class Browsing(Questions):
    """Questions over pages: a search shows titles and a few words, and a page has to be opened to be read."""

    search: SearchConfig = field(default_factory=lambda: SearchConfig(count=5, passage_chars=60, pages=True))
    episodes: QaConfig = field(default_factory=lambda: QaConfig(max_calls=24))


def _has_tokenizer_of_embedded(folder: Path) -> bool:
    """By its vocabulary: another release of Transformers may write the rest of the file in other words."""
    if not (folder / "tokenizer.json").is_file():
        return False
    theirs, own = (read_json(place / "tokenizer.json").get("model", {}).get("vocab") for place in (folder, POLICY))
    return theirs == own


def _drawn(found: QuestionFile, seed: int) -> list[Question]:
    return seeds.shuffled(seed, found.questions, lambda question: question.id)
