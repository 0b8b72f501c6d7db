"""What a model knows beside its task: python recipes/smollm2/retention.py MODEL --out FILE

- wiki: log-likelihood of Wikipedia passages, at most 128 tokens of each (data/wiki2/corpus.json.xz: the corpus of
  2WikiMultiHopQA as HippoRAG holds it).
- gsm8k, math: log-likelihood of the answer to a question in the chat template (data/math/gsm8k_test.jsonl.xz with its
  steps, without the calculator's marks; data/math/math500_test.jsonl.xz, the final answer).
- instructions: greedy replies of at most 64 tokens to instructions that a few lines of Python can check.
- with `--problems`, in place of all this: greedy replies of at most 256 tokens to problems of GSM8K and of MATH whose
  answer is a number. Replies are kept beside the answers; the last number of a reply counts.

The data lie in `data` of the current folder. The passages and questions are the same for every model; the file has the
nats of each, so that two models are compared item by item.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from instructions import ASKED

from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.messages import Message
from turntree.core.protocols import Renderer
from turntree.run.files import write_json
from turntree.stages.config import Device
from turntree.stages.policy import Policy, load_policy
from turntree.train.likelihood import negative_log_likelihood
from turntree.train.sft import Example

PASSAGE = 128  # tokens
REPLY, SOLUTION = 64, 256
QUESTIONS = {"gsm8k": "gsm8k_test", "math": "math500_test"}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def texts(data: Path, items: slice, policy: Policy) -> Iterator[tuple[str, str, Example]]:
    """(kind, id, example) of everything that is scored by teacher forcing."""
    corpus = _drawn(json.loads(_read(data / "wiki2" / "corpus.json.xz")), items)
    for number, row in corpus:
        ids = policy.tokenizer(f"{row['title']}\n{row['text']}", add_special_tokens=False)["input_ids"][:PASSAGE]
        if len(ids) > 1:
            yield "wiki", str(number), Example(tuple(ids), (False, *[True] * (len(ids) - 1)))
    for kind in QUESTIONS:
        for number, row in _drawn(_questions(data, kind), items):
            answer = re.sub(r"<<.*?>>", "", row["answer"])
            yield kind, str(number), answered(policy.renderer, row["question"], answer)


def problems(data: Path, items: slice) -> Iterator[tuple[str, str, str]]:
    """(name, question, answer) of those whose answer is a number."""
    for kind in QUESTIONS:
        rows = [row | {"answer": row["answer"].rpartition("#### ")[2]} for row in _questions(data, kind)]
        for number, row in _drawn([row for row in rows if NUMBER.fullmatch(row["answer"])], items):
            yield f"{kind} {number}", row["question"], row["answer"]


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _questions(data: Path, kind: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in _read(data / "math" / f"{QUESTIONS[kind]}.jsonl.xz").splitlines()]


def answered(renderer: Renderer, question: str, answer: str) -> Example:
    prompt = renderer.prompt((Message("user", question),))
    said = renderer.completion(Message("assistant", answer))
    return Example((*prompt, *said), (*[False] * len(prompt), *[True] * len(said)))


def _read(path: Path) -> str:
    if not path.exists():
        sys.exit(f"{path} is missing: put the data there (see the docstring of retention.py)")
    return lzma.decompress(path.read_bytes()).decode()


def _drawn(rows: list[Any], items: slice) -> list[tuple[int, Any]]:
    """A part of the rows in one shuffled order, with their numbers: the same for every model."""
    order = random.Random(0).sample(range(len(rows)), len(rows))[items]
    return [(number, rows[number]) for number in order]


@torch.inference_mode()
def score(policy: Policy, data: Path, items: slice) -> dict[str, dict[str, Any]]:
    """By kind, of every item its nats and its tokens."""
    found: dict[str, dict[str, Any]] = {}
    for kind, name, row in texts(data, items, policy):
        nats = float(negative_log_likelihood(policy.model, [row]))
        found.setdefault(kind, {})[name] = {"nats": round(nats, 4), "tokens": sum(row.loss_mask)}
    return found


def replies(policy: Policy, asked: Mapping[str, str], tokens: int) -> dict[str, Any]:
    """Greedy replies, by name."""
    if not asked:
        return {}
    prompts = [policy.renderer.prompt((Message("user", text),)) for text in asked.values()]
    greedy = Sampling(temperature=0.0, max_tokens=tokens)
    completions = policy.engine.generate(
        [GenerationRequest(prompt_ids=ids, sampling=greedy, seed=0) for ids in prompts]
    )
    said = (policy.renderer.parse(completion.token_ids).content.strip() for completion in completions)
    return {name: {"reply": reply} for name, reply in zip(asked, said, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a model knows beside its task.")
    parser.add_argument("model", help="a folder or a name")
    parser.add_argument("--start", type=int, default=0, help="the first item of each kind")
    parser.add_argument("--count", type=int, default=50, help="items of each kind; half as many instructions")
    parser.add_argument("--problems", action="store_true", help="only solve problems, by sampling")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    policy = load_policy(given.model, Device(name=given.device, dtype=given.dtype, threads=1))
    began = time.process_time()
    items = slice(given.start, given.start + given.count)
    result: dict[str, Any] = {"policy_hash": policy.hash}
    if given.problems:
        asked = {name: (question, answer) for name, question, answer in problems(given.data, items)}
        said = replies(policy, {name: question for name, (question, _) in asked.items()}, SOLUTION)
        result["problems"] = {name: row | {"answer": asked[name][1]} for name, row in said.items()}
    else:
        result["texts"] = score(policy, given.data, items)
        asked = dict(list(ASKED.items())[items.start // 2 : items.stop // 2])
        result["instructions"] = replies(policy, asked, REPLY)
    write_json(given.out, result | {"cpu_seconds": round(time.process_time() - began, 1)})


if __name__ == "__main__":
    main()
