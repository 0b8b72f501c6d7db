"""`turntree gateway`: serve a policy to agents, and merge what they did into trees."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from turntree.core import parts
from turntree.core.config import Between, to_mapping
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import described
from turntree.core.progress import notice
from turntree.gateway.config import Reward, ServingConfig, last_words
from turntree.gateway.merge import merge
from turntree.gateway.process import run_in_front, variables_of
from turntree.gateway.sampling import EngineDriver, LiveSession
from turntree.gateway.sessions import Sessions
from turntree.gateway.store import CLOSED, DAMAGED, SessionStore, read_session
from turntree.logs.trees import KeptTree
from turntree.run.folder import open_folder
from turntree.run.jsonl import write_lines
from turntree.stages.config import Sampled

KEY = "TURNTREE_GATEWAY_KEY"
KEY_FILE = "gateway.key"
SESSIONS = "sessions"


@dataclass(frozen=True, kw_only=True)
class UpstreamConfig:
    """Traces of agents that use a server of others."""

    url: str
    """Pass requests through to this OpenAI-compatible server (https://host/v1) and write traces of chat completions
    (of no other API); nothing is sampled here."""
    redact: tuple[str, ...] = ()
    """Regular expressions: what they match in a text is not written (repeatable). Some shapes of common keys never are;
    a secret of another shape needs a rule."""
    idle: float = 300.0
    """Seconds without a further call after which a conversation is written."""


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(Sampled):
    """`turntree gateway`."""

    host: str = "127.0.0.1"
    """The address to listen on. Others than this machine reach the gateway only where you name one of theirs."""
    port: Annotated[int, Between(0, 65535)] | None = None
    """The port (0: a free one). Default: 8080, and a free one for `exec`, so that several may run."""
    serving: ServingConfig = field(default_factory=ServingConfig)
    upstream: UpstreamConfig | None = None
    """Write traces of what agents do at another server."""

    @property
    def served_port(self) -> int:
        return 8080 if self.port is None else self.port


FREE = ("config.host", "config.port", "config.serving.limits")  # what a restart may change


def run_gateway(config: GatewayConfig, out: Path) -> dict[str, Any]:
    """Serve until the process is told to end (SIGINT, SIGTERM). Sessions lie in `out/sessions`, the gateway's own key
    in `out/gateway.key` unless TURNTREE_GATEWAY_KEY holds it. A gateway that is started again on the same folder goes
    on with the sessions that are open there."""
    from turntree.gateway.server import Gateway, listening, serve, url_of

    config = parts.resolved(config)
    with _open_sessions(config, out) as sessions, listening(config.host, config.served_port) as bound:
        restored = sessions.restore()
        gateway = Gateway(sessions, model=config.model, admin_key=_admin_key(out))
        more = f"; {restored} sessions go on" if restored else ""
        where = KEY if os.environ.get(KEY) else out / KEY_FILE
        url = url_of(bound)  # the server closes the socket
        notice(f"the gateway serves {config.model} at {url}/v1 (its key: {where}){more}")
        serve(gateway.app, bound, most=config.serving.limits.connections)
        return {"url": url, **sessions.ledger}


def run_command(
    config: GatewayConfig, out: Path, command: Sequence[str], task: str, ask: Callable[[], str] | None
) -> dict[str, Any]:
    """One session around a command at this terminal. Its reward is the one that was posted, else what the user answers
    (`ask`), else by the exit code: 1 for code 0, 0 for another one. What a signal or a failed call ended has none. All
    sessions of the folder are then merged into `out/trees.jsonl`."""
    from turntree.gateway.server import Gateway, serving

    config = parts.resolved(config)
    with _open_sessions(config, out, ends=False) as sessions:
        gateway = Gateway(sessions, model=config.model, admin_key=secrets.token_urlsafe(24))
        most = config.serving.limits.connections
        with serving(gateway.app, most=most, host=config.host, port=config.port or 0) as served:
            number = len(SessionStore(out / SESSIONS).sessions(CLOSED))
            live, keys = served.call(sessions.open(task, sample=number))
            notice(f"session {live.session_id} at {served.url}: {shlex.join(command)}")
            try:
                code = run_in_front(command, variables_of(served.url, live.session_id, keys, config.model))
                given = live.reward or _worth_of(live, code, ask)
            except BaseException as error:
                served.call(sessions.close(live, described(error)))
                raise
            served.call(_ended(sessions, live, given))
    trees = write_trees(out, out / "trees.jsonl")
    return {**trees, "session": live.session_id, "code": code, **given.to_json(), "calls": len(live.calls)}


@contextlib.contextmanager
def _open_sessions(config: GatewayConfig, out: Path, *, ends: bool = True) -> Iterator[Sessions]:
    """The sessions in `out`, over the policy; not `ends`: they have no limit of time."""
    from turntree.stages.policy import open_speaker  # loads torch, and help is read from this module

    with (
        open_folder(out, "gateway", to_mapping(config), free=FREE),
        open_speaker(config.model, config.endpoint, config.device) as speaker,
        contextlib.closing(EngineDriver(speaker.engine)) as driver,
    ):
        limits = config.serving.limits if ends else replace(config.serving.limits, seconds=math.inf)
        serving = replace(config.serving, limits=limits)
        yield Sessions(driver, speaker.renderer, serving, store=SessionStore(out / SESSIONS))


async def _ended(sessions: Sessions, live: LiveSession, given: Reward) -> None:
    if given.reward is not None:
        sessions.reward(live, given)  # once: the same one may be given again
    await sessions.close(live, given.reason or "")


def _worth_of(live: LiveSession, code: int, ask: Callable[[], str] | None) -> Reward:
    failed = next((call.error for call in live.calls if call.status == "failed"), None)
    if failed is not None or not 0 <= code < 126:  # shells say 126 and more for what was not run, or was killed
        return Reward(reward=None, reason=failed or f"the command ended with code {code}")
    unanswered = live.limit or live.refused or (live.calls[-1].error if live.calls else "")
    if not any(call.completion for call in live.calls):
        return Reward(reward=None, reason=unanswered or "no call was answered")
    if ask is not None:
        return _asked(ask)
    if code and unanswered:  # it may be why the command failed
        return Reward(reward=None, reason=f"exit code {code} after a call that was not answered: {unanswered}")
    return Reward(reward=float(code == 0), success=code == 0, reason=f"exit code {code}")


def _asked(ask: Callable[[], str]) -> Reward:
    """What the user says, who is asked again after what is no reward."""
    while said := ask().strip():
        try:
            return last_words(said, ())
        except InputError as error:
            notice(str(error))
    return Reward(reward=None, reason="its user gave none")


def run_upstream(config: GatewayConfig, traces: Path) -> dict[str, Any]:
    """Pass everything through to another server until the process is told to end; conversations are appended to
    `traces`."""
    if config.upstream is None:
        raise ConfigError("is missing", field="upstream.url", hint="give --upstream URL")
    from turntree.gateway.server import listening, serve, url_of
    from turntree.gateway.upstream import Redaction, TraceWriter, Upstream

    writer = TraceWriter(traces, Redaction(config.upstream.redact), idle=config.upstream.idle)
    upstream = Upstream(config.upstream.url, writer)
    with listening(config.host, config.served_port) as bound:
        notice(f"requests to {url_of(bound)}/v1 pass to {config.upstream.url}; traces of chat completions: {traces}")
        serve(upstream.app, bound, most=config.serving.limits.connections)
    return dict(writer.counts)


def _admin_key(out: Path) -> str:
    if given := os.environ.get(KEY):
        return given
    path = out / KEY_FILE
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
    return path.read_text(encoding="utf-8").strip()


def write_trees(folder: Path, out: Path) -> dict[str, Any]:
    """Merge the closed sessions of a gateway's folder into one tree a task (trees.jsonl), for `report` and `audit`."""
    if not (folder / SESSIONS / CLOSED).is_dir():
        raise InputError("holds no sessions of a gateway", path=folder, hint="name the --out of turntree gateway")
    store = SessionStore(folder / SESSIONS)
    by_task: dict[str, list[str]] = {}
    for name in store.sessions(CLOSED):
        by_task.setdefault(store.task_of(name), []).append(name)
    counts = Counter[str]()
    kept = _trees(store, by_task, counts)
    write_lines(out, (tree.to_json() for tree in kept))
    left = {"open": len(store.sessions()), "damaged": len(store.sessions(DAMAGED))}
    return {"path": str(out), "trees": len(by_task), **left, **counts}


def _trees(store: SessionStore, by_task: dict[str, list[str]], counts: Counter[str]) -> Iterator[KeptTree]:
    for number, (task, names) in enumerate(sorted(by_task.items())):
        read = [read_session(store, name) for name in names]
        merged = merge(task, read)
        counts.update(
            sessions=len(read),
            calls=sum(len(session.calls) for session in read),
            unattributed=sum(merged.unattributed.values()),
        )
        tools = next((call.tools for session in read for call in session.calls if call.tools), ())
        yield KeptTree(id=f"0.{number}", iteration=0, tree=merged.tree, rewards=merged.rewards, tools=tools)
