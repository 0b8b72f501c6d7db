"""What a model knows beside its task: python recipes/smollm2/retention.py MODEL --out FILE

- wiki: log-likelihood of Wikipedia passages, at most 128 tokens of each (data/wiki2/corpus.json.xz: the corpus of
  2WikiMultiHopQA as HippoRAG holds it).
- gsm8k, math: log-likelihood of the answer to a question in the chat template (data/math/gsm8k_test.jsonl.xz with its
  steps, without the calculator's marks; data/math/math500_test.jsonl.xz, the final answer).
- instructions: greedy replies of at most 64 tokens to instructions that a few lines of Python can check.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.messages import Message
from turntree.core.protocols import Renderer
from turntree.observe.files import write_json
from turntree.stages.config import Device
from turntree.stages.policy import Policy, load_policy
from turntree.training.sft import Example, negative_log_likelihood

PASSAGE = 128  # tokens
REPLY = 64
TOPICS = ("the sea", "bread", "a cat", "winter", "music", "trains", "the moon", "coffee", "football", "gardens")


@dataclass(frozen=True)
class Kind:
    """An instruction and its check. `{topic}` is filled in."""

    name: str
    text: str
    check: Callable[[str], bool]


def _words(reply: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", reply)


def _is_capitals(reply: str) -> bool:
    return reply == reply.upper() != reply.lower()


def _is_lowercase(reply: str) -> bool:
    return reply == reply.lower() != reply.upper()


def _no_commas(reply: str) -> bool:
    return len(_words(reply)) > 8 and "," not in reply


def _three_bullets(reply: str) -> bool:
    return sum(line.startswith("- ") for line in reply.splitlines()) == 3


def _is_quoted(reply: str) -> bool:
    return re.fullmatch(r'"[^"]+"', reply) is not None


def _is_json(reply: str) -> bool:
    try:
        return set(json.loads(reply)) == {"topic"}
    except (ValueError, TypeError):
        return False


KINDS = (
    Kind("capitals", "Write one sentence about {topic} in capital letters only.", _is_capitals),
    Kind("lowercase", "Write one sentence about {topic} in lowercase letters only.", _is_lowercase),
    Kind("no_commas", "Write three sentences about {topic}. Do not use any commas.", _no_commas),
    Kind("short", "Describe {topic} in at most ten words.", lambda r: 2 <= len(_words(r)) <= 10),
    Kind("bullets", "Name three facts about {topic}. Start every fact with '- ' on its own line.", _three_bullets),
    Kind("begin", "Write about {topic}. Begin your answer with the word 'Today'.", lambda r: r.startswith("Today")),
    Kind("quotes", "Write a title for a story about {topic}, in double quotation marks, and nothing else.", _is_quoted),
    Kind("json", 'Answer with JSON only, like {{"topic": "..."}}. The topic is {topic}.', _is_json),
    Kind("one_word", "Answer with one word: do you like {topic}, yes or no?", lambda r: len(_words(r)) == 1),
    Kind("question", "Ask one question about {topic}. End with a question mark.", lambda r: r.endswith("?")),
)  # fmt: skip


def texts(data: Path, items: slice, policy: Policy) -> Iterator[tuple[str, str, Example]]:
    """(kind, id, example) of everything that is scored by teacher forcing."""
    corpus = _drawn(json.loads(_read(data / "wiki2" / "corpus.json.xz")), items)
    for number, row in corpus:
        ids = policy.tokenizer(f"{row['title']}\n{row['text']}", add_special_tokens=False)["input_ids"][:PASSAGE]
        if len(ids) > 1:
            yield "wiki", str(number), Example(tuple(ids), (False, *[True] * (len(ids) - 1)))
    for kind, name in (("gsm8k", "gsm8k_test"), ("math", "math500_test")):
        rows = [json.loads(line) for line in _read(data / "math" / f"{name}.jsonl.xz").splitlines()]
        for number, row in _drawn(rows, items):
            answer = re.sub(r"<<.*?>>", "", row["answer"])
            yield kind, str(number), answered(policy.renderer, row["question"], answer)


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


def instructions(policy: Policy, items: slice) -> dict[str, Any]:
    """Greedy replies, each with whether it does what was asked."""
    asked = [(kind, topic) for topic in TOPICS for kind in KINDS][items]
    if not asked:
        return {}
    prompts = [policy.renderer.prompt((Message("user", kind.text.format(topic=topic)),)) for kind, topic in asked]
    greedy = Sampling(temperature=0.0, max_tokens=REPLY)
    completions = policy.engine.generate(
        [GenerationRequest(prompt_ids=ids, sampling=greedy, seed=0) for ids in prompts]
    )
    found: dict[str, Any] = {}
    for (kind, topic), completion in zip(asked, completions, strict=True):
        reply = policy.renderer.parse(completion.token_ids).content.strip()
        found[f"{kind.name}: {topic}"] = {"followed": kind.check(reply), "reply": reply}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What a model knows beside its task.")
    parser.add_argument("model", help="a folder or a name")
    parser.add_argument("--start", type=int, default=0, help="the first item of each kind")
    parser.add_argument("--count", type=int, default=50, help="items of each kind; half as many instructions")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    policy = load_policy(given.model, Device(dtype=given.dtype, threads=1))
    began = time.process_time()
    items = slice(given.start, given.start + given.count)
    result = {"policy_hash": policy.hash, "texts": score(policy, given.data, items)}
    result["instructions"] = instructions(policy, slice(items.start // 2, items.stop // 2))
    write_json(given.out, result | {"cpu_seconds": round(time.process_time() - began, 1)})


if __name__ == "__main__":
    main()
