"""Expert episodes on generated questions as traces: an SFT start for a policy that searches and computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.core import seeds
from turntree.core.config import to_mapping
from turntree.core.errors import ConfigError, InputError
from turntree.domains.qa.door import Questions
from turntree.domains.qa.experts import Mistake, Played, play
from turntree.domains.qa.generate import Posed
from turntree.environments.tasks import TRAIN
from turntree.observe.run import progress
from turntree.traces.schema import Trace, write_traces
from turntree.traces.splits import assign_split

_RECOVERABLE: tuple[Mistake, ...] = ("another relation", "another entity", "an earlier step")


@dataclass(frozen=True, kw_only=True)
class QaTracesConfig:
    """`count` generated questions of the split "train". A slip is part of the history of later turns, marked in
    `meta["skip_turns"]` and learned by no stage."""

    questions: Questions = field(default_factory=Questions)
    count: int = 200
    """How many questions."""
    slips: float = 0.0
    """Chance that the expert looks something else up before a look-up."""
    dev: float = 0.2
    """Share of traces held out for development."""
    seed: int = 0
    """Of slips and splits."""

    def __post_init__(self) -> None:
        for name in ("dev", "slips"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError("is outside [0, 1)", field=name)
        if self.questions.questions != "generated":
            raise ConfigError(
                "only generated questions say how they are answered",
                field="questions.questions",
                hint="record episodes of your own expert and `turntree traces import` them",
            )


def make_traces(config: QaTracesConfig, out: Path) -> dict[str, Any]:
    """Answer every question once and write the episodes; those not answered right are counted by reason."""
    counts: Counter[str] = Counter()
    traces: list[Trace] = []
    with config.questions.play({TRAIN: config.count}) as opened:
        pairs = zip(opened.tasks[TRAIN], opened.posed[TRAIN], strict=True)
        for environment, posed in progress(pairs, "expert answers", total=config.count):
            rng = seeds.generator(config.seed, "expert", environment.task_id)
            played = play(environment, posed, rng, config.slips, _RECOVERABLE)
            counts["questions"] += 1
            if not played.success:
                counts["dropped: answered wrong"] += 1
                continue
            trace = _trace(posed, played, environment.tools, config)
            counts["traces"] += 1
            counts["turns"] += len(trace.turn_positions)
            traces.append(trace)
    if not traces:
        raise InputError(f"expert answers keep no trace ({dict(counts)})", hint="raise questions.count")
    write_traces(out, traces, {"made_by": "qa", "config": to_mapping(config), "counts": dict(counts)})
    return {"path": str(out), **counts}


def _trace(posed: Posed, played: Played, tools: tuple[dict[str, Any], ...], config: QaTracesConfig) -> Trace:
    messages = played.messages[:-1]  # the last one only says that the episode is over
    spoken = [position for position, message in enumerate(messages) if message.role == "assistant"]
    skipped = {str(turn): "slip" for turn, position in enumerate(spoken) if position in played.slips}
    marks = {"skip_turns": skipped} if skipped else {}
    return Trace(
        id=posed.question.id,
        messages=messages,
        tools=tools,
        domain="qa",
        split=assign_split(posed.question.id, config.seed, {"train": 1 - config.dev, "dev": config.dev}),
        success=True,
        meta={"task_type": posed.question.kind, **marks},
    )
