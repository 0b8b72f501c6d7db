"""Sampling with statistics: `HFEngine` against `generate` of Transformers, side by side.

    python benchmarks/generate.py [--vocabulary 32000] [--repeats 3] [--json PATH]

Both sides sample at temperature 1 and end with three numbers for every new token: its id, its log-probability and the
entropy of the full distribution. `HFEngine` returns them; `generate` returns the logits of every step, from which
they are computed here, inside the clock. It is measured twice: as it is (every turn prefills every sequence), and
with its cache managed by hand, as its documentation shows: the prompt is prefilled once and repeated, and the cache
carried from turn to turn. That needs sequences of equal length, which these cases happen to have.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from update_step import arguments_of, interleaved, random_qwen3, ratio

from turntree.cli.common import finish
from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.seeds import derive
from turntree.engines.hf import HFEngine


@dataclass(frozen=True)
class Case:
    """`sequences` conversations from one prompt: `turns` times `new` sampled tokens, then `observed` given ones."""

    name: str
    sequences: int
    prompt: int
    new: int
    turns: int = 1
    observed: int = 0

    def tokens(self, vocabulary: int, turn: int) -> tuple[int, ...]:
        """The prompt (turn 0), or what is observed after turn `turn`."""
        draw = random.Random(turn)
        return tuple(draw.randrange(vocabulary) for _ in range(self.observed if turn else self.prompt))


CASES = (
    Case("siblings_8", sequences=8, prompt=1024, new=64),
    Case("siblings_64", sequences=64, prompt=1024, new=64),
    Case("conversation_30_turns", sequences=4, prompt=256, new=16, turns=30, observed=32),
)
QUICK = (Case("siblings_4", 4, 32, 4), Case("conversation_3_turns", 2, 16, 4, turns=3, observed=8))


def with_engine(engine: HFEngine, case: Case, vocabulary: int) -> list[list[Completion]]:
    """The completions of every turn. The engine starts with nothing kept."""
    engine.weights_changed(0)
    sampling = Sampling(max_tokens=case.new)
    histories = [case.tokens(vocabulary, 0)] * case.sequences
    turns: list[list[Completion]] = []
    for turn in range(1, case.turns + 1):
        requests = [
            GenerationRequest(prompt_ids=ids, sampling=sampling, seed=derive(0, turn, i), retain=turn < case.turns)
            for i, ids in enumerate(histories)
        ]
        turns.append(engine.generate(requests))
        observed = case.tokens(vocabulary, turn)
        histories = [ids + said.token_ids + observed for ids, said in zip(histories, turns[-1], strict=True)]
    return turns


@torch.inference_mode()
def with_generate(model: PreTrainedModel, case: Case, vocabulary: int, *, reuse: bool) -> list[list[list[Any]]]:
    """Per turn the tokens, log-probabilities and entropies, each as lists [sequences][new]."""
    ids = torch.tensor([case.tokens(vocabulary, 0)])
    cache = None
    if reuse:
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(case.sequences)
    ids = ids.repeat(case.sequences, 1)
    turns: list[list[list[Any]]] = []
    for turn in range(1, case.turns + 1):
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=case.new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        sampled = answer.sequences[:, -case.new :]
        steps = [scored(logits_NV, sampled[:, t]) for t, logits_NV in enumerate(answer.logits)]
        turns.append([sampled.tolist(), *(torch.stack(column, 1).tolist() for column in zip(*steps, strict=True))])
        observed = torch.tensor([case.tokens(vocabulary, turn)], dtype=torch.long).repeat(case.sequences, 1)
        ids = torch.cat([answer.sequences, observed], 1)
    return turns


def scored(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of one step, in nats."""
    logprobs_NV = logits_NV.float().log_softmax(-1)
    return logprobs_NV.gather(1, tokens_N[:, None])[:, 0], -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def measure(model: PreTrainedModel, case: Case, repeats: int) -> dict[str, Any]:
    vocabulary = model.config.vocab_size
    engine = HFEngine(model, stop_ids=())  # nothing stops: all sides sample the same number of tokens
    sides: list[Callable[[], object]] = [
        lambda: with_engine(engine, case, vocabulary),
        lambda: with_generate(model, case, vocabulary, reuse=False),
        lambda: with_generate(model, case, vocabulary, reuse=True),
    ]
    interleaved(sides, 1)  # warm up
    ours, plain, reusing = interleaved(sides, repeats)
    against, by_hand = ratio(plain, ours), ratio(reusing, ours)
    return {
        "name": case.name,
        "speedup": against["median"],
        "low": against["low"],
        "high": against["high"],
        "speedup_by_hand": by_hand,
        "tokens_per_second": case.sequences * case.turns * case.new / statistics.median(ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="HFEngine against generate of Transformers.")
    parser.add_argument("--vocabulary", type=int, default=32000, help="the larger, the more work all sides share")
    arguments = arguments_of(parser, repeats=3)
    width, vocabulary, cases = (32, 500, QUICK) if arguments.quick else (256, arguments.vocabulary, CASES)
    model = random_qwen3(vocabulary, width)
    rows = [measure(model, case, arguments.repeats) for case in cases]
    lines = [
        "{name}: {speedup:.2f} times generate [{low:.2f}, {high:.2f}], {speedup_by_hand[median]:.2f} times with its "
        "cache managed by hand; {tokens_per_second:.0f} tokens a second".format(**row)
        for row in rows
    ]
    finish({"vocabulary": vocabulary, "threads": torch.get_num_threads(), "cases": rows}, arguments.json, lines)


if __name__ == "__main__":
    main()
