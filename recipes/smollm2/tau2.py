"""Acceptance on real conversations: python recipes/smollm2/tau2.py FOLDER --model ../base [--plan] [--only PATTERN]

Tool calls in conversations of tau-bench (airline: gpt-4o; retail: NVIDIA's ToolOrchestra), judged turn by turn by the
verifier `tool_call`, before and after training: the pretrained model, a warm start by SFT on 40 conversations, and from
it SFT on 40 others, PivotRL, PivotRL with exact matching, and random turns. Conversations of one task share a split, so
the held-out ones are of other tasks. Stages, records and tables are those of recipe.py, and paths are seen from FOLDER.
FOLDER/data/tau2/trajectories holds `taubench1_gpt-4o-airline.json.xz` and `toolorchestra_retail.json.xz` (tau2-bench).

Shortened, so that a CPU can do it: successful conversations only, cut after 16 messages; one line for the system's
policy, with the names of the tools and of their arguments (the sources have no schemas); 300 characters of an answer.
A figure of this recipe is therefore none of tau2-bench.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipe import HERE, Recipe, Settings, divide

from turntree.core.messages import Message
from turntree.experiments.book import Book, Stage, words
from turntree.traces.candidates import skipped_turns
from turntree.traces.schema import Trace, read_traces

SOURCES = ("taubench1_gpt-4o-airline.json.xz", "toolorchestra_retail.json.xz")
MESSAGES, ANSWER = 16, 300
SETTINGS = Settings(
    parts=(40,), rest=40, turns=6, held_out=(30, 4), max_tokens=96, states=4, verifier=("--verifier", "tool_call")
)


class Conversations(Recipe):
    """The recipe with other traces, and without games."""

    def warm_start(self) -> Stage | None:
        options, base = self.settings, Stage("base", self.settings.model, ("given",))
        sources = [f"data/tau2/trajectories/{name}" for name in SOURCES]
        made = words("traces", "import", *sources, "--candidates", "tool_calls", "--out", "traces.jsonl")
        imported = Stage("traces", "traces.jsonl", made)
        self.book.run(imported)
        if not self.book.done(imported):
            return None
        divide(self.book.folder, shortened(read_traces(self.book.folder / "traces.jsonl")), options)
        self.measure("base", base)
        size = options.parts[0]
        warm = self.sft(f"warm-{size}", base.model, f"warm-{size}.traces.jsonl", options.warm_rate, 2, 0, [imported])
        self.book.run(warm)
        return warm

    def arm(self, arm: str, seed: int, warm: Stage) -> Iterator[Stage]:
        if arm != "strict":
            yield from super().arm(arm, seed, warm)
        else:
            yield self.reinforced(f"{arm}.{seed}", warm, self.selection(warm)["pivot"], seed, "--strict")

    def retention(self, name: str, model: Stage) -> None:
        """Measured in the household recipe."""


def shortened(traces: Iterator[Trace]) -> list[Trace]:
    """Successful conversations that still have a candidate when they are cut, in an order that mixes the sources."""
    found = [trace for trace in traces if trace.success]
    tools: dict[str, dict[str, Any]] = defaultdict(dict)
    for trace in found:
        for call in (call for message in trace.messages for call in message.tool_calls):
            tools[trace.domain].setdefault(call.name, {}).update(dict.fromkeys(call.arguments))
    said: dict[str, str] = {}
    for domain, calls in tools.items():
        said[domain] = "; ".join(f"{name}({', '.join(names)})" for name, names in sorted(calls.items()))
    cut = [_cut(trace, said.get(trace.domain, "")) for trace in found]
    whole = [trace for trace in cut if len(skipped_turns(trace)) < len(trace.turn_positions)]
    return sorted(whole, key=lambda trace: trace.id[::-1])


def _cut(trace: Trace, tools: str) -> Trace:
    system = Message("system", f"You serve the customers of a company. Your tools: {tools}.")
    rest = [message for message in trace.messages if message.role != "system"][: MESSAGES - 1]
    while rest and rest[-1].role != "assistant":
        rest.pop()
    messages = (system, *map(_short, rest))
    turns = sum(message.role == "assistant" for message in rest)
    marked = {turn: why for turn, why in trace.meta.get("skip_turns", {}).items() if int(turn) < turns}
    return replace(trace, messages=messages, meta={**trace.meta, "skip_turns": marked})


def _short(message: Message) -> Message:
    long = message.role == "tool" and len(message.content) > ANSWER
    return replace(message, content=f"{message.content[:ANSWER]} ...") if long else message


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Acceptance on real conversations.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="../base", help="the pretrained model, seen from FOLDER")
    parser.add_argument("--arms", default="sft,pivot,strict,random")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="run only the stages that match")
    parser.add_argument("--plan", action="store_true", help="list the stages, and run none")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    book = Book(given.folder, HERE, given.only, given.plan)
    recipe = Conversations(book, replace(SETTINGS, model=given.model), 0)
    recipe.run(given.arms.split(","), [int(seed) for seed in given.seeds.split(",")], 0)


if __name__ == "__main__":
    main()
