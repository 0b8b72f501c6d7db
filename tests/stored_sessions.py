"""The file of a gateway's session, written by hand: two calls, a reward and an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _call(name: str, index: int, said: str, **more: Any) -> dict[str, Any]:
    sampled = {"token_ids": [5, 6], "logprobs": [-0.5, -0.25], "entropies": [0.5, 0.5], "finish": "stop"}
    answer = {"role": "assistant", "content": said}
    call = {"id": name, "index": index, "cause": "start", "ids": [1, 2, 3], "answer": answer}
    return {"call": {**call, "messages": [{"role": "user", "content": "go"}], "completion": sampled, **more}}


ROWS: list[dict[str, Any]] = [
    {"schema": "turntree.session/1", "session": "s", "task": "t", "sample": 0, "seed": 7, "opened": 1.5,
     "keys": {"ask": "a" * 64, "reward": "b" * 64}, "meta": {"who": "me"}},
    _call("c0", 0, "one"),
    _call("c1", 1, "two", cause="continue", base="c0", base_tokens=5, base_messages=2, ids=[4],
          tools=[{"type": "function", "function": {"name": "f"}}]),
    {"reward": {"reward": 0.5, "success": True, "reason": "half", "call_rewards": {"c1": 1.0}}},
    {"closed": "", "stop": "completed"},
]  # fmt: skip


def write_session(folder: Path, rows: list[dict[str, Any]], where: str = "open", name: str = "s") -> Path:
    path = folder / where / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
