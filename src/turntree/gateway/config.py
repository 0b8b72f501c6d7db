"""Settings of a gateway, and the errors that it answers with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from turntree.core.completion import Sampling
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.gateway.lineage import Thoughts

_LONGEST = 500  # characters of an error

Parameters = Literal["gateway", "agent"]


@dataclass(frozen=True, kw_only=True)
class GatewayLimits:
    """What sessions may use. Whoever asks for more gets an error in OpenAI's form that says which limit it is."""

    sessions: int = 1024
    """Open sessions."""
    calls: int = 512
    """Calls of one session, candidates counted one by one."""
    tokens: int = 1_000_000
    """New tokens of one session: those of prompts that no earlier call had, and sampled ones."""
    seconds: float = 3600.0
    """A session that is open for longer is closed without a reward."""
    parallel: int = 32
    """Requests of one session that are sampled at once; further ones wait in line."""
    waiting: int = 4096
    """Calls of all sessions that are sampled or wait in line; a quarter of them may be of one session."""
    candidates: int = 16
    """Answers to one request (n)."""
    body_bytes: int = 8_000_000
    """The largest request."""
    body_seconds: float = 30.0
    """How long a client may take to send a request."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ConfigError("must be above 0", field=f"limits.{name}")

    @property
    def connections(self) -> int:
        """Connections at once: one for every call, and one that every session may keep."""
        return self.waiting + self.sessions


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """How a gateway samples and what it accepts."""

    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=1024))
    """The distribution to sample from. `max_tokens` is the longest answer; a request may ask for a shorter one."""
    parameters: Parameters = "gateway"
    """Whose temperature and top_p: the gateway's, which training needs (what agents ask for is recorded), or the
    agent's."""
    thoughts: Thoughts = "fork"
    """An answer that an agent sends back without its reasoning is a fork, rendered without it; or keep the sampled
    thoughts in the context."""
    max_context: int | None = None
    """Longest prompt plus answer, in tokens, beside the engine's own limit."""
    retries: int = 2
    """How often a failed generation is asked again, with the same draws."""
    limits: GatewayLimits = field(default_factory=GatewayLimits)


class Refused(TurntreeError):
    """A request that is answered with an error in OpenAI's form: HTTP status, type, code, the parameter at fault."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message[:_LONGEST])  # it may quote what an agent sent
        self.status, self.code, self.param = status, code, param and param[:_LONGEST]

    @property
    def kind(self) -> str:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def body(self) -> dict[str, object]:
        said = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": said}


def bad_request(error: InputError) -> Refused:
    """Without the file that an error names: it is one of this machine."""
    return Refused(400, str(InputError(error.problem, field=error.field, hint=error.hint)), param=error.field)
