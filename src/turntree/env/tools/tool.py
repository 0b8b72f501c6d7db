"""The protocol of tools, and the results of calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from turntree.core.errors import TurntreeError


@dataclass(frozen=True)
class ToolSpec:
    """`parameters` is the JSON schema of the arguments object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def to_chat(self) -> dict[str, Any]:
        """The shape that chat templates and `Environment.tools` use."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolOutput:
    """`final` False: another execution may give another answer (a time limit was hit), so it is not cached."""

    text: str
    final: bool = True


class Tool(Protocol):
    """Something a policy may call. `call` may be made from any thread, several at a time."""

    @property
    def spec(self) -> ToolSpec: ...

    @property
    def version(self) -> str:
        """Everything else that the answer depends on (the hash of an index, the limits of a sandbox)."""
        ...

    @property
    def pure(self) -> bool:
        """Same arguments, same answer, no effects: may be cached, shared and tried again. Else a call is made once."""
        ...

    def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolOutput:
        """Answer within about `seconds`, or raise why it could not. A policy's mistake is an answer, not an
        exception."""
        ...


class ToolStatus(StrEnum):
    ANSWERED = "answered"
    REFUSED = "refused"  # the policy's mistake (no such tool, wrong arguments): the answer says so, nothing is executed
    FAILED = "failed"  # not the policy's mistake: the rollout is censored


@dataclass(frozen=True)
class ToolResult:
    """`text` is the answer for the policy; for a failure, the reason."""

    text: str
    status: ToolStatus

    def observation(self) -> str:
        """The text, for the conversation. Raises `ToolFailed` for a failure: an environment lets it pass, its pool
        answers a fault, and the rollout is censored instead of punished."""
        if self.status is ToolStatus.FAILED:
            raise ToolFailed(self.text)
        return self.text


class ToolFailed(TurntreeError):
    """A tool did not answer, after every retry."""
