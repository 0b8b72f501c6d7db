"""The verifier of turns: a part (`core.parts`, kind `verifiers`), by a registered name or `module:object`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.protocols import TurnVerifier
from turntree.rollout.live import EpisodeConfig
from turntree.verify.user import wrapped

if TYPE_CHECKING:  # torch comes with it, and verifiers are opened where there is none
    from turntree.stages.policy import Policy, Speaker


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
def open_verifier(
    verifier: Part,
    environment: Part | None = None,
    policy: Speaker | Policy | None = None,
    episodes: EpisodeConfig | None = None,
) -> Iterator[TurnVerifier]:
    """The verifier, closed after the block where it can be. `environment` is the one that a verifier may play actions
    in, `policy` what it may play on with, and `episodes` how the run plays (`wrapped`).
    Raises `InputError` for an object that is not a verifier and `ConfigError` for an unknown option."""
    loaded = parts.load("verifiers", verifier.name)
    speaking = {} if policy is None else {"engine": policy.engine, "renderer": policy.renderer}
    built = loaded.build(verifier.options, {"environment": environment, "episodes": episodes, **speaking})
    options = [f"+{key}={value}" for key, value in sorted(loaded.resolved(verifier.options).items())]
    opened = wrapped(built, verifier, "".join([loaded.identity, *options]))
    with contextlib.closing(built) if hasattr(built, "close") else contextlib.nullcontext():
        yield opened
