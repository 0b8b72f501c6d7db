"""Supervised fine-tuning on the assistant turns of traces: the baseline on the same data (PivotRL, section 2)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from turntree.core import seeds
from turntree.core.cost import Cost
from turntree.core.protocols import Renderer
from turntree.traces.candidates import skipped_turns
from turntree.traces.schema import Trace
from turntree.train.config import SFTConfig
from turntree.train.loop import Algorithm, StepResult
from turntree.train.ranks import SINGLE, ProcessGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Example:
    """A conversation in tokens, or a part of one; `loss_mask[t]` is True where token t is learned."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def examples(trace: Trace, renderer: Renderer) -> list[Example]:
    """What is learned from a trace: the episode, or, where a teacher labelled it, every label after its history.

    Prompts and completions are those of sampling. The loss covers the turns that are pivot candidates, so that all
    methods train on the same turns, each in the context in which it would be sampled.
    """
    skipped = skipped_turns(trace)
    found: list[Example] = []
    for turn, index in enumerate(trace.turn_positions):
        if trace.labels and turn in skipped:
            continue
        prompt = renderer.prompt(trace.messages[:index], trace.tools)
        said = renderer.completion(trace.labels[turn] if trace.labels else trace.messages[index])
        before = found.pop() if found and not trace.labels else Example((), ())
        if prompt[: len(before.token_ids)] != before.token_ids:
            found.append(before)
            before = Example((), ())
        given = (False,) * (len(prompt) - len(before.token_ids))
        mask = (*before.loss_mask, *given, *(turn not in skipped,) * len(said))
        found.append(Example((*prompt, *said), mask))
    return found


class SFT(Algorithm):
    """Minimises the mean token negative log-likelihood of examples. The ranks of `group` share each step."""

    def __init__(
        self, model: PreTrainedModel, examples: Sequence[Example], config: SFTConfig, group: ProcessGroup = SINGLE
    ) -> None:
        from turntree.train.trainer import open_trainers  # loads torch, which a carrier does without

        self._prepare(examples, config)
        self._ranks = self.trainers = open_trainers(model, config.optimizer, self.steps, group)

    def _prepare(self, examples: Sequence[Example], config: SFTConfig) -> None:
        self.examples, self.config = examples, config
        self.steps = config.steps(len(examples))
        self.check_every = math.ceil(self.steps / 4)

    def imitate(self, examples: Sequence[Example], seed: int) -> Mapping[str, float]:
        """One optimizer step on these examples; its metrics. `seed` draws dropout."""
        from turntree.train.likelihood import deal, imitate

        work = partial(imitate, learned=sum(sum(row.loss_mask) for row in examples), seed=seed)
        return self._ranks.run(work, deal(examples, self._ranks.size, self.config.max_tokens))

    def step(self, step: int) -> StepResult:
        started = time.perf_counter()
        epoch, place = divmod(step - 1, self.steps // self.config.epochs)
        order = list(range(len(self.examples)))  # each once in an epoch
        seeds.generator(self.config.seed, "sft", epoch).shuffle(order)
        rows = [self.examples[index] for index in order[place * self.config.batch :][: self.config.batch]]
        seed = seeds.derive(self.config.seed, "dropout", step)  # a step's draws depend on its number only
        metrics = self.imitate(rows, seed)
        self.cost += Cost(
            trained_tokens=sum(len(row.token_ids) for row in rows), training_seconds=time.perf_counter() - started
        )
        return StepResult({"epoch": epoch, "trained_tokens": self.cost.trained_tokens, **metrics})
