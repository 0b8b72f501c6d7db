"""Which verifier judges turns: a shipped one by name, or the user's own `module:function`."""

from __future__ import annotations

from pathlib import Path

from turntree.core.errors import InputError
from turntree.core.protocols import TurnVerifier

NAMES = ("household", "tool_call", "strict")


def resolve_verifier(name: str) -> TurnVerifier:
    """Raises `InputError` for a name that is neither shipped nor of the form module:function
    (looked for among the installed packages, then in the current folder)."""
    if name == "household":
        from turntree.domains.household.verifier import HouseholdVerifier

        return HouseholdVerifier()
    if name == "tool_call":
        from turntree.verifiers.tool_call import ToolCallMatch

        return ToolCallMatch()
    if name == "strict":
        from turntree.verifiers.strict import StrictMatch

        return StrictMatch()
    if ":" in name:
        from turntree.verifiers.user import load_verifier

        return load_verifier(name, Path.cwd())
    raise InputError(
        f"{name!r} is no verifier", field="verifier", hint=f"use {', '.join(NAMES)} or module:function of your own"
    )
