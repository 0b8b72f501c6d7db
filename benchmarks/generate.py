"""Sampling with statistics: `HFEngine` against `generate` of Transformers, side by side.

    python benchmarks/generate.py [--vocabulary 32000] [--repeats 7] [--clock cpu] [--json PATH]

All sides sample at temperature 1 and end with three numbers for every new token: its id, its log-probability and the
entropy of the full distribution. `HFEngine` returns them; for `generate` a logits processor computes them step by
step, which is cheaper than `output_logits` (that holds the logits of every step). The sides of a case:

- siblings: `generate` of the prompt repeated, which prefills every copy ("plain"), and with its cache managed by hand,
  as its documentation shows: the prompt prefilled once, then repeated ("reuse").
- conversation: four conversations in step. "reuse": the cache carried from turn to turn. "plain": every turn prefills
  all of it.
- unequal: 16 callers, each with four requests of unequal lengths in a row, the next submitted when the last is
  answered. The engine serves them as they come. "plain": `generate` on left-padded batches of 16, the next when all
  are done, up to the longest limit of the batch. "waves": the engine, in the same batches.

With `--vllm URL --model FOLDER` the sides are `HFEngine` and the engine `vllm` over a server of that folder (`turntree
serve --model FOLDER --requests 64`), at n siblings of one fresh prompt a call. Nothing that a server computed before
helps it. `--clock cpu --server PID` counts the CPU seconds of this process and of all of the server's (its HTTP
front end included), which a busy machine changes little; `--server` is the `pid` of `turntree serve --json -`.

`speedup` is against the first baseline of the case, with the lowest and highest ratio of `--repeats` interleaved pairs
(of seven pairs, a 98% interval of the median); `beside` are the others, with fewer repeats. `--clock cpu` counts the
seconds of this process: on a machine shared with others the wall clock times their work, too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel
from update_step import arguments_of, interleaved, random_qwen3, ratio

from turntree.cli.common import finish
from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.seeds import derive
from turntree.engine.checkpoint import load_model
from turntree.engine.hf import HFEngine
from turntree.engine.limits import VllmConfig
from turntree.engine.tokenizer import load_tokenizer
from turntree.engine.vllm import VllmEngine

BESIDE = 3  # repeats of the sides that are reported beside the first baseline
Clock = Callable[[], float]
Answers = list[list[list[float]]]  # per call of generate: ids, log-probabilities, entropies, each [sequences, new]


@dataclass(frozen=True)
class Turns:
    """`sequences` conversations from one prompt: `turns` times `new` sampled tokens, then `observed` given ones."""

    name: str
    sequences: int
    prompt: int
    new: int
    turns: int = 1
    observed: int = 0

    def given(self, vocabulary: int, turn: int) -> tuple[int, ...]:
        """The prompt (turn 0), or what is observed after turn `turn`."""
        return tokens(turn, self.observed if turn else self.prompt, vocabulary)

    @property
    def sampled(self) -> int:
        return self.sequences * self.turns * self.new

    def sides(self, model: PreTrainedModel, engine: HFEngine) -> dict[str, Callable[[], object]]:
        vocabulary = model.config.vocab_size
        baselines: dict[str, Callable[[], object]] = {
            "plain": lambda: with_generate(model, self, vocabulary, reuse=False),
            "reuse": lambda: with_generate(model, self, vocabulary, reuse=True),
        }
        first = "plain" if self.turns == 1 else "reuse"
        return {"engine": lambda: with_engine(engine, self, vocabulary), first: baselines.pop(first), **baselines}


@dataclass(frozen=True)
class Callers:
    """`callers` who ask `requests` times each, one after the other, with prompts and limits of unequal length."""

    name: str
    callers: int
    requests: int
    longest_prompt: int
    longest_answer: int

    def asked(self, vocabulary: int, caller: int, index: int) -> GenerationRequest:
        key = derive(0, caller, index)
        draw = random.Random(key)
        prompt = tokens(key, draw.randint(self.longest_prompt // 8, self.longest_prompt), vocabulary)
        limit = round(self.longest_answer * 16 ** -draw.random())  # most are short
        return GenerationRequest(prompt_ids=prompt, sampling=Sampling(max_tokens=limit), seed=key)

    @property
    def sampled(self) -> int:
        pairs = [(caller, index) for caller in range(self.callers) for index in range(self.requests)]
        return sum(self.asked(2, *pair).sampling.max_tokens for pair in pairs)

    def sides(self, model: PreTrainedModel, engine: HFEngine) -> dict[str, Callable[[], object]]:
        vocabulary = model.config.vocab_size
        batches = [
            [self.asked(vocabulary, caller, index) for caller in range(self.callers)] for index in range(self.requests)
        ]
        return {
            "engine": lambda: as_they_come(engine, self, vocabulary),
            "plain": lambda: [padded_generate(model, batch) for batch in batches],
            "waves": lambda: [engine.generate(batch) for batch in batches],
        }


@dataclass(frozen=True)
class Siblings:
    """`sequences` completions of `new` tokens behind one prompt, another one in every call."""

    name: str
    sequences: int
    prompt: int
    new: int

    @property
    def sampled(self) -> int:
        return self.sequences * self.new

    def asked(self, vocabulary: int, call: int) -> list[GenerationRequest]:
        prompt, sampling = tokens(derive(0, self.name, call), self.prompt, vocabulary), Sampling(max_tokens=self.new)
        return [GenerationRequest(prompt_ids=prompt, sampling=sampling, seed=i) for i in range(self.sequences)]


SIBLINGS = (1, 8, 64)
CASES = (
    Turns("siblings_8", sequences=8, prompt=1024, new=64),
    Turns("siblings_64", sequences=64, prompt=1024, new=64),
    Turns("conversation_30_turns", sequences=4, prompt=256, new=16, turns=30, observed=32),
    Callers("unequal_16", callers=16, requests=4, longest_prompt=512, longest_answer=128),
)
QUICK = (
    Turns("siblings_4", 4, 32, 4),
    Turns("conversation_3_turns", 2, 16, 4, turns=3, observed=8),
    Callers("unequal_3", callers=3, requests=2, longest_prompt=16, longest_answer=8),
)


def tokens(seed: int, count: int, vocabulary: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(vocabulary) for _ in range(count))


# the engine


def with_engine(engine: HFEngine, case: Turns, vocabulary: int) -> list[list[Completion]]:
    """The completions of every turn. The engine starts with nothing kept."""
    engine.clear_cache()
    sampling = Sampling(max_tokens=case.new)
    histories = [case.given(vocabulary, 0)] * case.sequences
    turns: list[list[Completion]] = []
    for turn in range(1, case.turns + 1):
        requests = [
            GenerationRequest(prompt_ids=ids, sampling=sampling, seed=derive(0, turn, i), retain=turn < case.turns)
            for i, ids in enumerate(histories)
        ]
        turns.append(engine.generate(requests))
        observed = case.given(vocabulary, turn)
        histories = [ids + said.token_ids + observed for ids, said in zip(histories, turns[-1], strict=True)]
    return turns


def as_they_come(engine: HFEngine, case: Callers, vocabulary: int) -> list[Completion]:
    """Every caller submits its next request when its last one is answered."""
    waiting = {engine.submit(case.asked(vocabulary, caller, 0)): (caller, 0) for caller in range(case.callers)}
    answers: list[Completion] = []
    while waiting:
        for end in engine.poll():
            caller, index = waiting.pop(end.ticket)
            assert end.completion is not None
            answers.append(end.completion)
            if index + 1 < case.requests:
                waiting[engine.submit(case.asked(vocabulary, caller, index + 1))] = (caller, index + 1)
    return answers


# Transformers


class Statistics(LogitsProcessor):
    """Records the log-probability of every sampled token and the entropy of its distribution, in nats."""

    def __init__(self) -> None:
        self.logprobs: list[torch.Tensor] = []
        self.entropies: list[torch.Tensor] = []
        self._last_NV: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.look_up(input_ids)
        self._last_NV = scores.float().log_softmax(-1)
        self.entropies.append(-(self._last_NV.exp() * self._last_NV).sum(-1))
        return scores

    def look_up(self, sequences: torch.Tensor) -> None:
        """A token is known one step after its distribution."""
        if self._last_NV is not None:
            self.logprobs.append(self._last_NV.gather(1, sequences[:, -1:])[:, 0])


def sampled_with(model: PreTrainedModel, ids: torch.Tensor, new: int, **how: Any) -> tuple[torch.Tensor, list[Any]]:
    """All sequences, and of the `new` tokens the ids, log-probabilities and entropies as lists [sequences, new]."""
    statistics = Statistics()
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    sequences = model.generate(ids, max_new_tokens=new, logits_processor=[statistics], **settings, **how)
    statistics.look_up(sequences)
    columns = (statistics.logprobs, statistics.entropies)
    return sequences, [sequences[:, -new:].tolist(), *(torch.stack(column, 1).tolist() for column in columns)]


@torch.inference_mode()
def with_generate(model: PreTrainedModel, case: Turns, vocabulary: int, *, reuse: bool) -> Answers:
    ids = torch.tensor([case.given(vocabulary, 0)], device=model.device)
    cache = None
    if reuse:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(case.sequences)
    ids = ids.repeat(case.sequences, 1)
    turns: Answers = []
    for turn in range(1, case.turns + 1):
        sequences, answer = sampled_with(
            model, ids, case.new, attention_mask=torch.ones_like(ids), past_key_values=cache
        )
        turns.append(answer)
        observed = torch.tensor([case.given(vocabulary, turn)], dtype=torch.long, device=model.device)
        ids = torch.cat([sequences, observed.repeat(case.sequences, 1)], 1)
    return turns


@torch.inference_mode()
def padded_generate(model: PreTrainedModel, batch: Sequence[GenerationRequest]) -> list[Any]:
    """One batch, padded on the left, until the longest limit; what is beyond a shorter limit is thrown away."""
    longest = max(len(request.prompt_ids) for request in batch)
    padding = [longest - len(request.prompt_ids) for request in batch]
    ids = torch.tensor([(0,) * pad + request.prompt_ids for pad, request in zip(padding, batch, strict=True)])
    mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long()
    limits = [request.sampling.max_tokens for request in batch]
    _, answer = sampled_with(model, ids, max(limits), attention_mask=mask)
    return [[row[:limit] for row, limit in zip(column, limits, strict=True)] for column in answer]


# ratios


def measure(model: PreTrainedModel, case: Turns | Callers, repeats: int, clock: Clock) -> dict[str, Any]:
    engine = HFEngine(model, stop_ids=())  # nothing stops: all sides sample the same number of tokens
    sides = case.sides(model, engine)
    timed = list(sides.values())
    taken = dict(zip(sides, interleaved(timed, min(repeats, BESIDE), clock), strict=True))
    for name, more in zip(sides, interleaved(timed[:2], max(0, repeats - BESIDE), clock), strict=False):
        taken[name] += more
    ours = taken.pop("engine")
    against = {name: ratio(theirs, ours[: len(theirs)]) for name, theirs in taken.items()}
    baseline = next(iter(against))
    main = against.pop(baseline)
    return {
        "name": case.name,
        "baseline": baseline,
        "speedup": main["median"],
        "low": main["low"],
        "high": main["high"],
        "beside": against,
        "tokens_per_second": case.sampled / statistics.median(ours),
    }


def cpu_seconds(group: int | None) -> float:
    """CPU seconds of this process, and of a process group on Linux."""
    total, tick = time.process_time(), os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat") if group else ():
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += (int(fields[11]) + int(fields[12])) / tick
    return total


def against_server(model: PreTrainedModel, arguments: argparse.Namespace, clock: Clock) -> list[dict[str, Any]]:
    """Tokens a second of both engines, and the ratio of their times in interleaved pairs (above 1: vLLM is faster)."""
    vocabulary = model.config.vocab_size
    ours, rows = HFEngine(model, stop_ids=()), []
    with VllmEngine(VllmConfig(url=arguments.vllm), model, load_tokenizer(arguments.model), ()) as theirs:
        for count in SIBLINGS:
            case = Siblings(f"siblings_{count}", count, arguments.prompt, arguments.new)

            def side(engine: HFEngine | VllmEngine, case: Siblings = case) -> Callable[[], object]:
                calls = itertools.count()
                return lambda: engine.generate(case.asked(vocabulary, next(calls)))

            taken = interleaved([side(ours), side(theirs)], arguments.repeats + 1, clock)
            hf, vllm = (seconds[1:] for seconds in taken)  # the first pair warms up
            per_second = {"hf": case.sampled / statistics.median(hf), "vllm": case.sampled / statistics.median(vllm)}
            rows.append({"name": case.name, "tokens_per_second": per_second, "speedup": ratio(hf, vllm)})
            print(described_server(rows[-1]), file=sys.stderr)
    return rows


def described_server(row: dict[str, Any]) -> str:
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in row["tokens_per_second"].items())
    return f"{row['name']}: tokens a second {speeds}; vllm " + "{median:.2f} times hf [{low:.2f}, {high:.2f}]".format(
        **row["speedup"]
    )


def described(row: dict[str, Any]) -> str:
    beside = "".join(
        f", {{median:.2f}} times {name} [{{low:.2f}}, {{high:.2f}}]".format(**found)
        for name, found in row["beside"].items()
    )
    return (
        "{name}: {speedup:.2f} times {baseline} [{low:.2f}, {high:.2f}]".format(**row)
        + f"{beside}; {row['tokens_per_second']:.0f} tokens a second"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="HFEngine against generate of Transformers.")
    parser.add_argument("--vocabulary", type=int, default=32000, help="the larger, the more work all sides share")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: seconds of this process only")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--vllm", metavar="URL", help="compare with the engine vllm over this server instead")
    parser.add_argument("--model", metavar="FOLDER", help="with --vllm: the model that it serves")
    parser.add_argument("--server", type=int, metavar="PID", help="with --vllm and --clock cpu: its process group")
    parser.add_argument("--prompt", type=int, default=1024, help="with --vllm: tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="with --vllm: tokens sampled behind it")
    arguments = arguments_of(parser, repeats=7)
    if arguments.vllm:
        clock = time.perf_counter if arguments.clock == "wall" else lambda: cpu_seconds(arguments.server)
        rows = against_server(load_model(arguments.model), arguments, clock)
        named = ("model", "prompt", "new", "clock", "repeats")
        setting = {name: getattr(arguments, name) for name in named} | {"threads": torch.get_num_threads()}
        return finish(setting | {"cases": rows}, arguments.json, [described_server(row) for row in rows])
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    width, vocabulary, cases = (32, 500, QUICK) if arguments.quick else (256, arguments.vocabulary, CASES)
    model = random_qwen3(vocabulary, width)
    chosen = [case for case in cases if not arguments.cases or case.name in arguments.cases]
    for case in QUICK:  # warm up
        measure(model, case, 1, clock)
    rows = [measure(model, case, arguments.repeats, clock) for case in chosen]
    setting = {"vocabulary": vocabulary, "threads": torch.get_num_threads(), "clock": arguments.clock}
    finish(setting | {"repeats": arguments.repeats, "cases": rows}, arguments.json, [described(row) for row in rows])


if __name__ == "__main__":
    main()
