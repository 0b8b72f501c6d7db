"""Our `nemo` and `recommended` on every pair of actions that NVIDIA's own unit tests compare, and on random pairs.

    git clone https://github.com/NVIDIA-NeMo/Gym && python benchmarks/nemo_gym.py Gym [--random 20000] [--json PATH]

Their test files run unchanged, with the few names stubbed that their servers import; each comparison that a test asks
for is also made by `nemo`, which must pay the same, and by `recommended`, whose differences are counted by reason.
Needs pydantic and pytest. Covers `single_step_tool_use_with_argument_comparison` and `swe_pivot`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from turntree.cli.common import finish
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.verify.recommended import Recommended
from turntree_interop.nemo_gym import MALFORMED, Nemo

SINGLE = "resources_servers.single_step_tool_use_with_argument_comparison.common.verification_utils"
TESTS = (
    "resources_servers/single_step_tool_use_with_argument_comparison/tests/common/test_verification_utils.py",
    "resources_servers/swe_pivot/tests/test_verifier.py",
)


class Comparison:
    """What was compared: pairs by their text, and how `recommended` differs from the released reward."""

    def __init__(self) -> None:
        self.pairs: dict[str, tuple[float, float | None, str]] = {}
        self.wrong: list[str] = []
        self._rules = Recommended()

    def add(self, shown: Message, tried: Message, released: float, nemo: Nemo) -> None:
        state = TurnState("t", 0, (), shown)
        ours = nemo.judge(state, tried).reward
        key = json.dumps([nemo.name, shown.to_chat(), tried.to_chat()], sort_keys=True)
        if ours is None or abs(ours - released) > 1e-9:
            self.wrong.append(f"{key}: released {released}, nemo {ours}")
        verdict = self._rules.judge(state, tried)
        self.pairs[key] = (released, verdict.reward, verdict.reason)

    def result(self) -> dict[str, Any]:
        differing = Counter(pair for pair in self.pairs.values() if pair[0] != pair[1])
        rows = [
            {"released": released, "recommended": reward, "reason": reason, "pairs": count}
            for (released, reward, reason), count in differing.most_common()
        ]
        return {"pairs": len(self.pairs), "nemo_differs": self.wrong, "recommended_differs": rows}


def stub() -> None:
    """The names of NeMo-Gym and FastAPI that the two servers import, without what they do."""
    base = types.ModuleType("nemo_gym.base_resources_server")
    for name in ("BaseResourcesServerConfig", "BaseRunRequest", "BaseVerifyRequest", "BaseVerifyResponse"):
        setattr(base, name, type(name, (), {}))
    base.SimpleResourcesServer = type("SimpleResourcesServer", (), {})  # type: ignore[attr-defined]
    fastapi = types.ModuleType("fastapi")
    fastapi.FastAPI = object  # type: ignore[attr-defined]
    sys.modules |= {
        "fastapi": fastapi,
        "nemo_gym": types.ModuleType("nemo_gym"),
        "nemo_gym.base_resources_server": base,
    }


def message(action: Any) -> Message:
    if action.type == "message":
        return Message("assistant", action.content)
    calls = action.calls if action.type == "function_call_batch" else [action]
    return Message("assistant", "", tuple(ToolCall(call.name, arguments(call.arguments)) for call in calls))


def arguments(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:
        return {MALFORMED: text}


def watch_single_step(found: Comparison) -> Any:
    """Make every comparison of their comparator also ours."""
    module = importlib.import_module(SINGLE)
    batch, comparator = module.FunctionCallBatchAction, module.ActionComparator

    def watched(name: str, as_actions: Any) -> None:
        released = getattr(comparator, name)

        def compare(self: Any, shown: Any, tried: Any) -> Any:
            answer, config = released(self, shown, tried), self.config
            mode = str(config.parallel_tool_call_reward_mode.value)
            nemo = Nemo(
                similarity=config.word_count_similarity_threshold,
                counting=mode if config.parallel_tool_call_rewarding else "ignore",  # type: ignore[arg-type]
                allow_subset=config.allow_subset,
                allow_superset=config.allow_superset,
            )
            found.add(message(as_actions(shown)), message(as_actions(tried)), answer.reward, nemo)
            return answer

        setattr(comparator, name, compare)

    watched("compare_action", lambda one: one)
    watched("compare_tool_call", lambda one: one)
    watched("compare_tool_calls", lambda calls: batch(type="function_call_batch", calls=calls))
    return module


class SwePivot:
    """Their levels one after the other, as their server takes them in binary mode."""

    def __init__(self, found: Comparison) -> None:
        self._found = found
        self.module = importlib.import_module("resources_servers.swe_pivot.app")
        sys.modules["app"] = self.module  # as their test imports it
        self._target, self._alike = self.module.verify_target_match, self.module.compute_argument_similarity
        self.module.verify_target_match = self.target
        self.module.compute_argument_similarity = self.alike

    def judge(self, name: tuple[str, str], shown: dict[str, Any], tried: dict[str, Any]) -> None:
        kinds = [self.module.get_tool_category(one) for one in name]
        same = self.module.verify_tool_name_match(name[1], kinds[1], name[0], kinds[0])
        same = same and self._target(kinds[1], tried, kinds[0], shown)
        released = float(same and self._alike(kinds[1], tried, kinds[0], shown) >= 0.8)
        messages = [Message("assistant", "", (ToolCall(*one),)) for one in zip(name, (shown, tried), strict=True)]
        self._found.add(*messages, released, Nemo(domain="swe_pivot"))

    def target(self, kind: str, tried: dict[str, Any], other: str, shown: dict[str, Any]) -> Any:
        self.judge((self._name(other), self._name(kind)), shown, tried)
        return self._target(kind, tried, other, shown)

    def alike(self, kind: str, tried: dict[str, Any], other: str, shown: dict[str, Any]) -> Any:
        self.judge((self._name(other), self._name(kind)), shown, tried)
        return self._alike(kind, tried, other, shown)

    @staticmethod
    def _name(kind: str) -> str:
        """Their tests name categories; a tool of each."""
        return {"edit": "str_replace_editor", "bash": "execute_bash", "read": "read", "search": "grep"}.get(kind, kind)


def random_pairs(module: Any, pivot: SwePivot, count: int) -> None:
    draw = random.Random(0)
    words = ["a", "rm", "-rf", "/", "Order", "x.py", "src/a/b.py", "./t/x.py", "view", "str_replace", "1"]

    def value(depth: int = 0) -> Any:
        kinds = ["text", "text", "text", 1, 1.0, 1.0000001, 2.5, True, False, None, "list", "object"]
        kind = draw.choice(kinds if depth < 2 else kinds[:-2])
        if kind == "list":
            return [value(depth + 1) for _ in range(draw.randint(0, 2))]
        if kind == "object":
            return {draw.choice("xy"): value(depth + 1) for _ in range(draw.randint(0, 2))}
        return " ".join(draw.choices(words, k=draw.randint(0, 4))) if kind == "text" else kind

    def action() -> Any:
        if draw.random() < 0.1:
            return module.MessageAction(type="message", content=str(value(2)))
        calls = [
            module.FunctionCallAction(
                type="function_call",
                name=draw.choice("fg"),
                arguments=json.dumps({key: value() for key in draw.sample("xyz", draw.randint(0, 2))}),
            )
            for _ in range(draw.randint(1, 3))
        ]
        return calls[0] if len(calls) == 1 else module.FunctionCallBatchAction(type="function_call_batch", calls=calls)

    keys = ["command", "path", "old_str", "new_str", "view_range", "file_text", "cmd", "content", "patch"]
    names = ["str_replace_editor", "bash", "execute_bash", "grep", "read", "finish", "foo", "StrReplaceEditor", "edit"]
    for _ in range(count):
        config = module.ToolCallComparatorConfig(
            word_count_similarity_threshold=draw.choice([0, 0.1, 0.3]),
            parallel_tool_call_rewarding=draw.random() < 0.5,
            allow_subset=draw.random() < 0.5,
            allow_superset=draw.random() < 0.5,
            parallel_tool_call_reward_mode=draw.choice(["binary_strict", "fractional", "f1"]),
        )
        shown = action()
        module.ActionComparator(config=config).compare_action(shown, shown if draw.random() < 0.4 else action())
        spans = [[1, 10], [2, 12], "[1, 9]", [1], None]
        one, other = (
            {
                k: draw.choice(spans) if k == "view_range" else str(value(2))
                for k in draw.sample(keys, draw.randint(0, 4))
            }
            for _ in range(2)
        )
        name = draw.choice(names)
        pivot.judge((name, name if draw.random() < 0.6 else draw.choice(names)), one, other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gym", type=Path, help="a checkout of NVIDIA-NeMo/Gym")
    parser.add_argument("--random", type=int, default=20000, metavar="N", help="random pairs for either server")
    parser.add_argument("--json", type=str, default=None, metavar="PATH")
    given = parser.parse_args()
    sys.path.insert(0, str(given.gym.resolve()))
    stub()
    tested, drawn = Comparison(), Comparison()
    module, pivot = watch_single_step(tested), SwePivot(tested)
    files = [str(given.gym / name) for name in TESTS]
    failed = pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "addopts=", *files])
    if failed:
        raise SystemExit(f"their own tests fail here (exit code {failed})")
    tested_result = tested.result()
    tested.__dict__.update(drawn.__dict__)  # the watchers go on into the other count
    random_pairs(module, pivot, given.random)
    drawn_result = tested.result()
    result = {"tests": tested_result, "random": {k: v for k, v in drawn_result.items() if k != "recommended_differs"}}
    lines = [
        f"{name}: {one['pairs']:,} pairs, nemo differs in {len(one['nemo_differs'])}" for name, one in result.items()
    ]
    for row in tested_result["recommended_differs"]:
        lines.append(
            f"released {row['released']:g}, recommended {row['recommended']}: {row['pairs']} x {row['reason']}"
        )
    finish(result, given.json, lines)
    if any(one["nemo_differs"] for one in result.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
