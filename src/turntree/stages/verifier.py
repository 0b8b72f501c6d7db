"""The verifier of turns: a part (`core.parts`, kind `verifiers`), by a registered name or `module:object`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.protocols import TurnVerifier
from turntree.verify.user import build_verifier


def chosen_verifier(given: Part | None, header: dict[str, Any], path: str) -> Part:
    """The named verifier, or that of the profile. Code runs only if the user names it: code that is named only by a
    file is refused, without importing anything."""
    source = Part.from_value(header["verifier_source"], "verifier_source")
    if given is None and source.name not in parts.names("verifiers"):
        raise InputError(
            f"were profiled with {source.name!r}, which is not installed, and a file does not decide what code runs",
            path=path,
            field="verifier_source",
            hint=f"pass --verifier {source.name} to use it",
        )
    return given or source


@contextlib.contextmanager
def open_verifier(verifier: Part, environment: Part | None = None) -> Iterator[TurnVerifier]:
    """The verifier, closed after the block where it can be. `environment` is the one that it may play actions in.
    Raises `InputError` for an object that is not a verifier and `ConfigError` for an unknown option."""
    with contextlib.closing(build_verifier(verifier, environment)) as built:
        yield built
