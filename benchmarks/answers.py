"""How answers are compared: `turntree_worlds.qa.answers` beside `math-verify`, on labelled pairs and on real answers.

    python benchmarks/answers.py [--data ../shared/data] [--json PATH] [--list]

`answers/pairs.jsonl` has pairs of answers with their type, what kind of difference they show, and whether they are
equal (null: open, either is left out of the counts, but symmetry is asked of them too). From MATH500 and GSM8K come
each right answer beside itself in other hands (equal), beside the next one, with another sign, and with two units
(not equal). `math-verify` is asked where it is installed (pip install math-verify), about pairs of every type, each
in a box. Prints the table of docs/results/verifiers.md; `--list` also every wrong one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from turntree_worlds.qa import answers

PAIRS = Path(__file__).resolve().parent / "answers" / "pairs.jsonl"
Row = dict[str, Any]
Compare = Callable[[str, str, str], "bool | None"]


def labelled() -> list[Row]:
    return [{"set": "labelled pairs", **json.loads(line)} for line in PAIRS.read_text("utf-8").splitlines()]


def real(data: Path) -> Iterator[Row]:
    """Pairs made of the right answers of MATH500 (expressions) and GSM8K (numbers)."""
    for name, file, answer_type in (
        ("MATH500", "math500_test.jsonl.xz", "expression"),
        ("GSM8K", "gsm8k_test.jsonl.xz", "number"),
    ):
        with lzma.open(data / "math" / file, "rt") as lines:
            golds = [json.loads(line)["answer"].rpartition("####")[2].strip() for line in lines]
        golds = list(dict.fromkeys(golds))
        for kind, given, gold, want in itertools.chain(*(_made(one, two) for one, two in itertools.pairwise(golds))):
            yield {"set": name, "kind": kind, "type": answer_type, "given": given, "gold": gold, "want": want}


def _made(gold: str, following: str) -> Iterator[tuple[str, str, str, bool | None]]:
    other_hand = gold.replace(r"\frac", r"\dfrac").replace(r"\left", "").replace(r"\right", "").replace(", ", ",")
    yield "another hand", f"${other_hand}$", gold, True
    yield "the next answer", following, gold, False
    if re.fullmatch(r"[\d,]+|\\frac\{\d+\}\{\d+\}", gold) and gold != "0":
        yield "another sign", f"-{gold}", gold, False
        yield "a unit left out", rf"{gold}\text{{ cm}}", gold, True
        yield "two units", rf"{gold}\text{{ cm}}", rf"{gold}\text{{ km}}", False


def math_verify() -> Compare | None:
    try:
        import math_verify as library  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None

    def compare(given: str, gold: str, answer_type: str) -> bool | None:
        found = [library.parse(rf"\boxed{{{text.strip('$')}}}") for text in (gold, given)]
        return library.verify(*found)

    return compare


def ours(given: str, gold: str, answer_type: str) -> bool | None:
    return answers.equal(given, gold, answer_type)  # pyright: ignore[reportArgumentType]


def judged(row: Row, compare: Compare) -> tuple[str, bool]:
    """What becomes of a pair, and whether it is the same the other way round."""
    there = compare(row["given"], row["gold"], row["type"])
    back = compare(row["gold"], row["given"], row["type"])
    if row["want"] is None:
        return "open", there is back
    if there is None:
        return "abstained", there is back
    return "right" if there is row["want"] else "false equal" if there else "false unequal", there is back


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    rows = labelled() + (list(real(options.data)) if options.data else [])
    found: dict[str, dict[str, Counter[str]]] = {}
    library = math_verify()
    engines: dict[str, Compare] = {"turntree": ours, **({"math-verify": library} if library else {})}
    for name, compare in engines.items():
        for row in rows:
            what, symmetric = judged(row, compare)
            counts = found.setdefault(f"{row['set']}, {row['type']}", {}).setdefault(name, Counter())
            counts.update([what, *(() if symmetric else ("another answer the other way round",))])
            if options.list and what not in ("right", "open"):
                print(f"{name:12} {what:14} {row['kind']:18} {row['given']!r} {row['gold']!r}")
    columns = ("right", "false equal", "false unequal", "abstained", "another answer the other way round")
    print("| pairs | compared by |", " | ".join(columns), "|\n|---|---|" + "---|" * len(columns))
    for kind, by in found.items():
        for name, counts in by.items():
            print(f"| {kind} | {name} |", " | ".join(str(counts[column]) for column in columns), "|")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
