"""The verifier of turns: a part (`core.parts`, kind `verifiers`), by a registered name or `module:object`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.protocols import TurnVerifier
from turntree.verifiers.user import UserVerifier


def is_registered(verifier: Part) -> bool:
    """Whether the name is of an installed verifier, so that using it runs no code of the current folder."""
    return verifier.name in parts.names("verifiers")


@contextlib.contextmanager
def open_verifier(verifier: Part, environment: Part | None = None) -> Iterator[TurnVerifier]:
    """The verifier, closed after the block where it can be. `environment` is the one that a verifier may play actions
    in. A user's function is wrapped (`UserVerifier`), and so is the `judge` of an object: an exception is counted and
    gives no reward. Raises `InputError` for an object that is not a verifier and `ConfigError` for an unknown
    option."""
    loaded = parts.load("verifiers", verifier.name)
    built = loaded.build(verifier.options, {"environment": environment})
    with contextlib.closing(built) if hasattr(built, "close") else contextlib.nullcontext():
        if is_registered(verifier) and hasattr(built, "judge"):
            yield built
            return
        function = getattr(built, "judge", built)
        if not callable(function):
            problem = f"{verifier.name!r} is {type(built).__name__}, not a function"
            raise InputError(problem, field="verifier", hint="a verifier is a function of (state, action)")
        options = [f"+{key}={value}" for key, value in sorted(loaded.resolved(verifier.options).items())]
        yield UserVerifier("".join([loaded.identity, *options]), function)
