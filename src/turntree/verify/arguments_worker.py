"""The process in which `arguments` applies schemas that may take endless time: those with regular expressions or
references. A question is (task, schema, arguments, ignore_case, ignore_whitespace)."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from turntree.verify.arguments import Folding, SchemaUnusable, rules_here
from turntree.verify.workers import serve

_rules = lru_cache(maxsize=256)(rules_here)


def answer(question: list[Any]) -> tuple[str, Any]:
    """("value", what the rules say), ("unusable", why the schema decides nothing) or ("invalid", why the arguments
    cannot be written)."""
    task, schema_text, arguments, *folded = question
    try:
        rules, value = _rules(schema_text), json.loads(arguments)
        if task == "problem":
            return "value", rules.problem(value)
        return "value", rules.canonical(value, Folding(*folded)) if task == "canonical" else None
    except SchemaUnusable as error:
        return "unusable", str(error)
    except (ValueError, RecursionError) as error:
        return "invalid", str(error)


if __name__ == "__main__":
    serve(answer)
