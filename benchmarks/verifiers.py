"""How many verdicts a second on one core: `recommended` and `tool_call` on tool calls and shell commands.

    python benchmarks/verifiers.py [--quick] [--repeats 5] [--json PATH]

Every action is another one, as samples of a policy are; every demonstration judges 16 of them, as in a profile. Half of
the actions are equal to the demonstration in other words. Beside them `difflib` compares the same pairs as JSON text
(what the released verifiers of terminal traces do), and rapidfuzz, which `paper` uses. What is measured is
`Verifier.judge`, without reading files.
"""

from __future__ import annotations

import argparse
import difflib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rapidfuzz.distance import Indel

from turntree.cli.common import finish
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.verify.recommended import Recommended
from turntree.verify.tool_call import ToolCallMatch

SAMPLES = 16
Pair = tuple[TurnState, Message]


def tool_calls(count: int) -> list[Pair]:
    """Bookings under a declared schema with a nested list; equal ones leave out a default and write 1 as 1.0."""
    flight = {"type": "object", "properties": {"number": {"type": "string"}, "date": {"type": "string"}}}
    properties = {
        "user_id": {"type": "string"},
        "cabin": {"type": "string", "enum": ["economy", "business"]},
        "bags": {"type": "integer"},
        "flights": {"type": "array", "items": {**flight, "required": ["number", "date"]}},
        "insurance": {"type": "boolean", "default": False},
    }
    parameters = {"type": "object", "properties": properties, "required": ["user_id", "cabin", "bags", "flights"]}
    tools = ({"type": "function", "function": {"name": "book", "parameters": parameters}},)

    def arguments(n: int, **other: Any) -> dict[str, Any]:
        flights = [{"number": f"HAT{n:05}", "date": "2024-05-20"}, {"number": "HAT039", "date": "2024-05-21"}]
        return {"user_id": f"mia_{n}", "cabin": "economy", "bags": 3, "flights": flights, "insurance": False, **other}

    pairs: list[Pair] = []
    for n in range(count):
        if n % SAMPLES == 0:
            state = TurnState(f"t{n}", 0, (), _call("book", arguments(n)), tools)
            shown = n
        tried = arguments(shown, bags=3.0) if n % 2 else arguments(shown, bags=n + 4)
        if n % 2:
            del tried["insurance"]
        pairs.append((state, _call("book", tried)))
    return pairs


def shell_commands(count: int) -> list[Pair]:
    """Test runs with a pipe and a redirection; equal ones order options and paths otherwise."""
    pairs: list[Pair] = []
    for n in range(count):
        if n % SAMPLES == 0:
            shown = f"cd /repo && pytest -xvs tests/test_{n}.py tests/b.py 2>&1 | tail -n 20"
            state = TurnState(f"t{n}", 0, (), _call("execute_bash", {"command": shown}))
            first = n
        other = first if n % 2 else n + 10**6
        tried = f"cd /repo && pytest {'-v ' * (n % SAMPLES)}tests/b.py tests/test_{other}.py 2>&1 | tail -20"
        pairs.append((state, _call("execute_bash", {"command": tried, "timeout": n})))
    return pairs


def _call(name: str, arguments: dict[str, Any]) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments),))


def _text(message: Message) -> str:
    return json.dumps([[call.name, call.arguments] for call in message.tool_calls])


def measure(
    judge: Callable[[TurnState, Message], float], make: Callable[[], list[Pair]], repeats: int
) -> dict[str, Any]:
    """Verdicts a second of one core: median, lowest and highest of the repeats; and the share that is paid."""
    rates, paid = [], 0.0
    for _ in range(repeats):
        pairs = make()  # new objects, so that nothing is remembered of them
        began = time.process_time()
        rewards = [judge(*pair) for pair in pairs]
        rates.append(len(pairs) / (time.process_time() - began))
        paid = sum(reward == 1.0 for reward in rewards) / len(rewards)
    return {"median": statistics.median(rates), "low": min(rates), "high": max(rates), "paid": paid}


def cases(quick: bool, repeats: int) -> list[dict[str, Any]]:
    count = 320 if quick else 8000
    found: list[dict[str, Any]] = []
    for kind, make in (("tool calls", tool_calls), ("shell commands", shell_commands)):
        rules: dict[str, Callable[[TurnState, Message], float]] = {
            name: lambda s, a, v=verifier: v.judge(s, a).reward or 0.0
            for name, verifier in (("recommended", Recommended()), ("tool_call", ToolCallMatch()))
        }
        rules["difflib"] = lambda s, a: difflib.SequenceMatcher(None, _text(s.demonstration), _text(a)).ratio()
        rules["rapidfuzz"] = lambda s, a: Indel.normalized_similarity(_text(s.demonstration), _text(a))
        for name, judge in rules.items():
            few = count // 8 if name == "difflib" else count
            one = measure(judge, lambda few=few, make=make: make(few), repeats)
            found.append({"kind": kind, "rule": name, "verdicts": few, **one})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few verdicts, to see that it runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=str, default=None, metavar="PATH")
    given = parser.parse_args()
    found = cases(given.quick, given.repeats)
    lines = [
        f"{one['kind']:15} {one['rule']:12} {one['median']:>9,.0f}/s [{one['low']:,.0f}, {one['high']:,.0f}], "
        f"{one['paid']:.0%} paid"
        for one in found
    ]
    finish({"benchmark": Path(__file__).name, "cases": found}, given.json, lines)


if __name__ == "__main__":
    main()
