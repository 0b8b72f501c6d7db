"""How busy slow tools leave the engine: rollouts that wait each for itself against a loop that waits for all.

    python benchmarks/tools.py [--repeats 5] [--tool-seconds 0.2] [--json PATH]

Real tools (`search` over the index of a generated world, `python` in the sandbox) answer late by a draw that is keyed
by the call, so that a call takes equally long wherever it is made: always the mean, or with a lognormal (sigma 1) or
Pareto (alpha 1.5) tail of the same mean, capped at 20 times that. The policy is scripted: experts who slip. Its engine
has as many rows as rollouts are played at once and takes real time: a step for every token, whatever the batch.

- `overlapped`: `rollout.scheduler.Scheduler` with `env.local.LocalPool`, with `deterministic` off.
- `deterministic`: the same with `deterministic` on: answers are taken `overlap` generations after their calls.
- `barrier`: all rollouts of a batch of prompts take their turns together; the tools of a turn run at the same time, and
  the next turn begins when the last of them answered. The next batch begins when the last rollout ended.
- `barrier_refilled`: the same, but places that became free are filled with the next prompts at every turn.

Barriers are put around the same scheduler, pool and tools: all modes grow the same trees, which is checked. `busy` is
the share of time in which the engine had any request, `full` the share of its rows times time that was used; both
also up to the moment at which the last prompt was begun (`_begun`), because then there is nothing left to overlap with.
`speedup` is that of `overlapped` in time. No distinct call may be executed twice: checked in every run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from update_step import arguments_of, spread

from scripted_engine import ScriptedEngine
from turntree.cli.common import finish
from turntree.core import seeds
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.messages import Message
from turntree.env.local import LocalPool
from turntree.env.pool import Answer, Session
from turntree.env.tools.runtime import ToolCounts, ToolRuntime
from turntree.env.tools.tool import Tool, ToolOutput
from turntree.render.tool_calls import parse_message
from turntree.rollout.groups import GrownGroup
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree_worlds.qa.build import QaWorld, QaWorldConfig
from turntree_worlds.qa.environment import QaEnvironment
from turntree_worlds.qa.experts import play
from turntree_worlds.qa.generate import Posed
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.tools import SandboxTool, SearchTool

MODES = ("overlapped", "deterministic", "barrier", "barrier_refilled")
STOP = 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`tool_seconds` is the mean delay, about what the mean turn takes to decode."""

    prompts: int = 24
    group_size: int = 8
    places: int = 64
    step_seconds: float = 0.004
    tool_seconds: float = 0.2
    variants: int = 6  # ways to play a question
    tails: tuple[str, ...] = ("constant", "lognormal", "pareto")


QUICK = Setting(prompts=4, group_size=4, places=8, step_seconds=0.0005, tool_seconds=0.02, tails=("pareto",))


# tools that answer late, an engine that takes its time


def delay(tail: str, mean: float, *key: str) -> float:
    draw = seeds.generator(0, "tools benchmark", tail, *key)
    seconds = {
        "constant": lambda: mean,
        "lognormal": lambda: mean * draw.lognormvariate(-0.5, 1.0),
        "pareto": lambda: mean / 3 * draw.paretovariate(1.5),
    }[tail]()
    return min(seconds, 20 * mean)


@dataclass
class Delayed:
    """A tool that answers late, and whose every answer is cached. `executed` holds every execution."""

    tool: Tool
    tail: str
    mean: float
    executed: list[str] = field(default_factory=list)
    pure: bool = True

    def __post_init__(self) -> None:
        self.spec, self.version = self.tool.spec, self.tool.version
        self._lock = threading.Lock()

    def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolOutput:
        key = json.dumps([self.spec.name, arguments], sort_keys=True)
        with self._lock:
            self.executed.append(key)
        time.sleep(delay(self.tail, self.mean, key))
        return ToolOutput(self.tool.call(arguments, seconds).text)


class PacedEngine(ScriptedEngine):
    """A scripted engine whose steps take time, as those of a batch that is memory-bound do. `barrier`: nothing is
    returned before everything in flight is finished."""

    def __init__(self, answer: Callable[[tuple[int, ...], int], bytes], setting: Setting, *, barrier: bool) -> None:
        super().__init__(
            answer,
            {STOP},
            vocab_size=256,
            max_context=1 << 17,
            latency=tokens_of,
            max_batch_rows=setting.places,
        )
        self.row_seconds = self._idle_seconds = 0.0
        self._idle_since: float | None = time.perf_counter()  # None while there is anything to do
        self._step_seconds, self._barrier = setting.step_seconds, barrier

    def idle_seconds(self, now: float) -> float:
        """How long it had no request at all."""
        return self._idle_seconds + (0.0 if self._idle_since is None else now - self._idle_since)

    def submit(self, request: GenerationRequest) -> int:
        self._idle_seconds, self._idle_since = self.idle_seconds(time.perf_counter()), None
        return super().submit(request)

    def poll(self, timeout: float | None = None) -> list[Any]:
        until = math.inf if timeout is None else time.perf_counter() + timeout
        found: list[Any] = []
        while self.in_flight and (self._barrier or (not found and time.perf_counter() < until)):
            rows, started = self.in_flight, time.perf_counter()
            time.sleep(self._step_seconds)
            found += super().poll(0)
            self.row_seconds += rows * (time.perf_counter() - started)
        if not self.in_flight and self._idle_since is None:
            self._idle_since = time.perf_counter()
        return found


def tokens_of(request: GenerationRequest) -> int:
    """How many tokens a turn takes to decode: 10 to 200, half of them below 40."""
    return round(min(200.0, max(10.0, seeds.generator(request.seed, "tokens").lognormvariate(math.log(40), 0.6))))


class BarrierPool(LocalPool):
    """Answers nobody before all have been answered."""

    def poll(self, timeout: float | None = None) -> dict[Session, Answer]:
        found: dict[Session, Answer] = {}
        while self.in_flight:
            found |= super().poll()
        return found


# a scripted policy, in bytes


class ByteRenderer:
    """`core.protocols.Renderer` for a policy whose tokens are bytes."""

    stop_ids = frozenset({STOP})

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        return tuple("".join(map(rendered, messages)).encode() + b"<|assistant|>")

    def completion(self, message: Message) -> tuple[int, ...]:
        return (*said(message).encode(), STOP)

    def extend(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Any] = (), *, stopped: bool = True
    ) -> tuple[int, ...]:
        return self.prompt(new)

    def parse(self, token_ids: Sequence[int], tools: Sequence[Any] = ()) -> Message:
        return parse_message(bytes(token_ids).rstrip(b"\0").decode(errors="replace"), "hermes")


def rendered(message: Message) -> str:
    return f"<|{message.role}|>{said(message)}\0"


def said(message: Message) -> str:
    calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in message.tool_calls]
    return message.content + "".join(f"<tool_call>{call}</tool_call>" for call in calls)


class Script:
    """What may be said next, by what was asked and said so far: the turns of experts who played the questions."""

    def __init__(self, posed: Sequence[Posed], tools: ToolRuntime, variants: int) -> None:
        self._next: dict[tuple[str, ...], list[bytes]] = {}
        for one in posed:
            for variant in range(variants):
                rng = seeds.generator(0, "tools benchmark", "expert", one.question.id, variant)
                environment = QaEnvironment(one.question, tools)
                turns = [said(m) for m in play(environment, one, rng, noise=0.3).messages if m.role == "assistant"]
                for turn, text in enumerate(turns):
                    self._next.setdefault((one.question.text, *turns[:turn]), []).append(text.encode())

    def __call__(self, prompt_ids: tuple[int, ...], seed: int) -> bytes:
        roles = re.findall(r"<\|(\w+)\|>([^\0]*)", bytes(prompt_ids).decode())
        asked = tuple(text for role, text in roles if role == "user")
        options = self._next[(*asked, *(text for role, text in roles[:-1] if role == "assistant"))]
        return options[seeds.generator(seed, "choice").randrange(len(options))] + bytes([STOP])


# what is measured


@dataclass(frozen=True, kw_only=True)
class Run:
    seconds: float
    busy: float
    full: float
    busy_begun: float
    full_begun: float
    counts: ToolCounts
    executed: tuple[str, ...]
    trees: tuple[Any, ...]


def played(mode: str, posed: Sequence[Posed], script: Script, tools: Sequence[Delayed], setting: Setting) -> Run:
    runtime, barrier = ToolRuntime(tools), mode.startswith("barrier")
    tasks = [QaEnvironment(one.question, runtime) for one in posed]
    config = SchedulerConfig(
        episodes=EpisodeConfig(max_turns=16, max_context=1 << 17, sampling=Sampling(max_tokens=1000)),
        group_size=setting.group_size,
        max_live_rollouts=setting.places,
        deterministic=mode == "deterministic",
    )
    begun: list[tuple[float, float, float]] = []  # what was spent when a prompt was begun

    def spent() -> tuple[float, float, float]:
        now = time.perf_counter()
        return now - started, now - started - engine.idle_seconds(now), engine.row_seconds / setting.places

    def begin(batch: Sequence[QaEnvironment]) -> Iterator[QaEnvironment]:
        for task in batch:
            begun.append(spent())
            yield task

    together = setting.places // setting.group_size if mode == "barrier" else len(tasks)
    started = time.perf_counter()
    engine = PacedEngine(script, setting, barrier=barrier)
    with (BarrierPool if barrier else LocalPool)(setting.places) as pool:
        scheduler = Scheduler(engine, ByteRenderer(), config, pool=pool)
        batches = [tasks[first : first + together] for first in range(0, len(tasks), together)]
        groups = [group for batch in batches for group in scheduler.run(begin(batch), seed=0)]
    seconds, busy, full = spent()
    executed = tuple(key for tool in tools for key in tool.executed)
    for tool in tools:
        tool.executed.clear()
    return Run(
        seconds=seconds,
        busy=busy / seconds,
        full=full / seconds,
        busy_begun=begun[-1][1] / begun[-1][0],
        full_begun=begun[-1][2] / begun[-1][0],
        counts=runtime.ledger.total(),
        executed=executed,
        trees=tuple(tree_of(group) for group in groups),
    )


def tree_of(group: GrownGroup) -> tuple[Any, ...]:
    return tuple((node.parent, node.token_ids) for node in group.tree)


def check(runs: Mapping[str, Run]) -> None:
    """The laws that make the figures comparable. Raises `SystemExit`."""
    distinct = {frozenset(run.executed) for run in runs.values()}
    if len({run.trees for run in runs.values()}) != 1 or len(distinct) != 1:
        raise SystemExit("the modes did not do the same")
    for mode, run in runs.items():
        counts = run.counts
        if not len(run.executed) == len(set(run.executed)) == counts.executions:
            raise SystemExit(f"{mode}: {counts.executions} executions of {len(set(run.executed))} distinct calls")
        if counts.calls != counts.hits + counts.joined + counts.misses or counts.retries or counts.failures:
            raise SystemExit(f"{mode}: the ledger does not add up: {counts}")


def measure(
    tail: str, posed: Sequence[Posed], script: Script, real: Sequence[Tool], setting: Setting, repeats: int
) -> dict[str, Any]:
    tools = [Delayed(tool, tail, setting.tool_seconds) for tool in real]
    repeated: list[dict[str, Run]] = []
    for repeat in range(repeats):
        order = MODES[repeat % len(MODES) :] + MODES[: repeat % len(MODES)]
        runs = {mode: played(mode, posed, script, tools, setting) for mode in order}
        check(runs)
        repeated.append(runs)
    counts = [runs["overlapped"].counts for runs in repeated]
    return {
        "name": tail,
        "speedup": {m: spread([r[m].seconds / r["overlapped"].seconds for r in repeated]) for m in MODES[1:]},
        **{
            share: {mode: spread([getattr(runs[mode], share) for runs in repeated]) for mode in MODES}
            for share in ("busy", "busy_begun", "full", "full_begun")
        },
        "seconds": {mode: statistics.median(runs[mode].seconds for runs in repeated) for mode in MODES},
        "rollouts": len(posed) * setting.group_size,
        "calls": counts[0].calls,
        "distinct": len(set(repeated[0]["overlapped"].executed)),
        "executions": counts[0].executions,
        "joined": spread([float(count.joined) for count in counts]),
        "hits": spread([float(count.hits) for count in counts]),
        "executed_twice": max(count.executions for count in counts) - len(set(repeated[0]["overlapped"].executed)),
    }


def line(case: dict[str, Any]) -> str:
    def of(values: dict[str, float]) -> str:
        return "{median:.2f} [{low:.2f}, {high:.2f}]".format(**values)

    busy = ", ".join(f"{mode} {case['busy_begun'][mode]['median']:.0%}" for mode in MODES)
    return (
        f"{case['name']}: {of(case['speedup']['barrier'])} times the barrier, "
        f"{of(case['speedup']['barrier_refilled'])} refilled, {of(case['speedup']['deterministic'])} deterministic; "
        f"busy {busy}; "
        f"{case['calls']} calls, {case['executions']} executed, {case['joined']['median']:.0f} joined"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Rollouts with slow tools, overlapped against barriers.")
    parser.add_argument("--tool-seconds", type=float, default=None, help="The mean delay [default: 0.2].")
    arguments = arguments_of(parser, repeats=5)
    setting = QUICK if arguments.quick else Setting()
    if arguments.tool_seconds is not None:
        setting = replace(setting, tool_seconds=arguments.tool_seconds)
    world = QaWorld(QaWorldConfig())
    posed = world.questions("train", setting.prompts)
    with tempfile.TemporaryDirectory() as folder, Sandbox() as sandbox:
        real = [SearchTool(world.build_index(Path(folder) / "index.sqlite"), count=3), SandboxTool(sandbox)]
        script = Script(posed, ToolRuntime(real), setting.variants)
        cases = [measure(tail, posed, script, real, setting, arguments.repeats) for tail in setting.tails]
    result = {"setting": asdict(setting), "repeats": arguments.repeats, "cases": cases}
    finish(result, arguments.json, [line(case) for case in cases])


if __name__ == "__main__":
    main()
