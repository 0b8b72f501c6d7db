"""Which verifier judges turns: a shipped one by name, or the user's own `module:function`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.core.protocols import TurnVerifier

NAMES = ("household", "tool_call", "strict")
_OPTIONS = "tool_call+messages=any+ignore_case+ignore_whitespace"


def is_shipped(name: str) -> bool:
    """Whether a name is of a shipped verifier, so that using it runs no code of a user's."""
    return name.partition("+")[0] in NAMES


def resolve_verifier(name: str) -> TurnVerifier:
    """A shipped verifier, or module:function (looked for among the installed packages, then in the current folder).
    `tool_call` takes options after plus signs, as its recorded name shows them: `tool_call+messages=any+ignore_case`.
    Raises `InputError` for any other name."""
    if name == "household":
        from turntree.domains.household.verifier import HouseholdVerifier

        return HouseholdVerifier()
    if name.partition("+")[0] == "tool_call":
        return _tool_call(name)
    if name == "strict":
        from turntree.verifiers.strict import StrictMatch

        return StrictMatch()
    if ":" in name:
        from turntree.verifiers.user import load_verifier

        return load_verifier(name, Path.cwd())
    raise InputError(
        f"{name!r} is no verifier", field="verifier", hint=f"use {', '.join(NAMES)} or module:function of your own"
    )


def _tool_call(name: str) -> TurnVerifier:
    from turntree.verifiers.tool_call import ToolCallMatch

    options: dict[str, Any] = {}
    for option in name.split("+")[1:]:
        key, equals, value = option.partition("=")
        if key in options or (key, bool(equals)) not in (
            ("messages", True),
            ("ignore_case", False),
            ("ignore_whitespace", False),
        ):
            raise InputError(f"{name!r} has an unknown option {option!r}", field="verifier", hint=f"as in {_OPTIONS}")
        options[key] = value if equals else True
    return ToolCallMatch(**options)
