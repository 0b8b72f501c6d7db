"""The sessions of a gateway: who may ask and reward, how sessions begin and end, and those of an earlier process."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter, OrderedDict
from typing import Any

from turntree.core import seeds
from turntree.core.config import to_mapping
from turntree.core.errors import InputError, TurntreeError
from turntree.core.progress import notice
from turntree.core.protocols import Renderer
from turntree.core.tree import StopReason
from turntree.gateway.calls import Lineage, Session
from turntree.gateway.config import Refused, Reward, ServingConfig
from turntree.gateway.sampling import EngineDriver, LiveSession, Sampler
from turntree.gateway.store import CLOSED, SCHEMA, Head, SessionStore, call_to_json
from turntree.run import identity

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_REMEMBERED = 4096  # sessions that ended
_PARALLEL = 32  # requests of one session that are sampled at once; further ones wait in line


class Sessions:
    """The open sessions. Not thread-safe: everything runs in one event loop; the engine has a thread of its own.

    With a `store` they survive the process: `restore` goes on with those that were open.
    """

    def __init__(
        self,
        driver: EngineDriver,
        renderer: Renderer,
        config: ServingConfig,
        *,
        store: SessionStore | None = None,
        sampler: type[Sampler] = Sampler,
    ) -> None:
        self.driver, self.config, self.ledger = driver, config, Counter[str]()
        self._renderer, self._store = renderer, store
        self._open: dict[str, LiveSession] = {}
        self._over = OrderedDict[str, LiveSession]()  # those that ended last, without their calls
        self.sampler = sampler(
            driver,
            renderer,
            config,
            self.ledger,
            write=lambda session, call: self._write(session, {"call": call_to_json(call)}),
        )

    async def open(
        self,
        task_id: str,
        *,
        seed: int | None = None,
        sample: int = 0,
        session_id: str | None = None,
        meta: dict[str, Any] | None = None,
    ) -> tuple[LiveSession, dict[str, str]]:
        """A new session and its keys: one to ask with, one to reward with. Without a seed it draws as no other does."""
        if len(self._open) >= self.config.limits.sessions:
            raise Refused(429, f"{len(self._open)} sessions are open, as many as are allowed", code="too_many_sessions")
        name = secrets.token_hex(8) if session_id is None else session_id
        if not _ID.fullmatch(name):
            raise Refused(400, "a session id has up to 64 letters, digits, - and _", param="session_id")
        if name in self._open or (self._store is not None and self._store.has(name)):
            raise Refused(409, f"there is a session {name!r} already", param="session_id")
        keys = {use: f"{name}.{secrets.token_urlsafe(24)}" for use in ("ask", "reward")}
        head = Head(
            schema=SCHEMA,
            session=name,
            task=task_id,
            sample=sample,
            seed=seeds.derive(0, "session", name) if seed is None else seed,
            opened=time.time(),
            keys={use: digest(key) for use, key in keys.items()},
            meta=meta or {},
        )
        session = self._live(head)
        self._write(session, to_mapping(head))
        self._open[name] = session
        self.ledger["sessions"] += 1
        return session, keys

    def _live(self, head: Head) -> LiveSession:
        lineage = Lineage(self._renderer, self.config.thoughts)
        return LiveSession(head, lineage, asyncio.Semaphore(_PARALLEL))

    def find(self, key: str, named: str | None, *, use: str = "ask", admin: bool = False) -> LiveSession:
        """The session of a key, also one of those that ended last. An unknown session and a wrong key are not told
        apart."""
        name = named or key.partition(".")[0]
        session = self._open.get(name) or self._over.get(name) or self._closed(name)
        held = session.head.keys[use] if session is not None else digest("")
        right = secrets.compare_digest(digest(key), held)
        if session is None or not (right or admin):
            message = "no session has this key: it is wrong, or the session was over long ago"
            raise Refused(401, message, code="invalid_api_key")
        return session

    def _closed(self, name: str) -> LiveSession | None:
        """A session that ended in an earlier process."""
        if self._store is None or not _ID.fullmatch(name) or not self._store.path(name, CLOSED).exists():
            return None
        if (held := self._store.read(name)) is not None:
            self._remember(held.head, held.reward)
        return self._over.get(name)

    def get(self, session_id: str) -> LiveSession:
        session = self._open.get(session_id) or self._over.get(session_id)
        if session is None:
            raise Refused(404, f"no session {session_id!r} is open", code="no_session")
        return session

    def __len__(self) -> int:
        return len(self._open)

    def reward(self, session: LiveSession, given: Reward) -> None:
        """Keep the reward of a session, once. Raises `Refused` where it has another one already, or ended without one
        (its file is closed, and nobody would read a reward behind that)."""
        if session.reward is not None:
            if session.reward.worth == given.worth:
                return
            message = f"session {session.session_id!r} has another reward already: {session.reward.reward}"
            raise Refused(409, message, code="rewarded", param="reward")
        if session.over:
            raise Refused(403, f"session {session.session_id!r} ended without a reward", code="session_over")
        self._write(session, {"reward": given.to_json()}, sync=True)
        session.reward = given

    async def close(self, session: LiveSession, reason: str = "") -> Session:
        """End a session, with what it has under way; or give what came of it when it was ended before. It stays open
        where that cannot be written, so that it can be ended later."""
        async with session.ending:
            if session.over:
                return session.value(reason)
            running = [task for task in session.running if task is not asyncio.current_task()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._write(session, {"closed": reason, "stop": session.stop}, sync=True)
            if self._store is not None:
                self._store.close(session.session_id)
            session.over = True
            del self._open[session.session_id]
            self._remember(session.head, session.reward)
            rewarded = session.reward is not None and session.reward.reward is not None
            self.ledger["rewarded" if rewarded else "unrewarded"] += 1
            return session.value(reason)

    def _remember(self, head: Head, reward: Reward | None) -> None:
        """Know a session that ended: whoever asks or rewards again is told so, and not that the key is wrong."""
        session = self._over[head.session] = self._live(head)
        session.reward, session.over = reward, True
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    async def expire(self) -> None:
        """Close the sessions that took too long, those that cannot be written (a full disk, a file that was moved away)
        another time."""
        limit = self.config.limits.seconds
        for session in [each for each in self._open.values() if time.time() - each.head.opened > limit]:
            reason = session.ran_into(StopReason.MAX_SECONDS, f"the session took longer than {limit:g} seconds")
            try:
                await self.close(session, reason)
                self.ledger["expired"] += 1
            except (OSError, TurntreeError) as error:
                notice(f"warning: session {session.session_id} cannot be closed: {error}")

    def _write(self, session: LiveSession, row: dict[str, Any], *, sync: bool = False) -> None:
        if self._store is not None:
            self._store.append(session.session_id, row, sync=sync)

    def restore(self) -> int:
        """Go on with the sessions that are open on disk; returns their number."""
        if (store := self._store) is None:
            return 0
        for name in store.sessions():
            try:
                held = store.read(name)
            except InputError as error:  # the other sessions go on
                self.ledger["damaged"] += 1
                notice(f"warning: {error}; this session does not go on: its file is now {store.set_aside(name)}")
                continue
            if held is None:  # killed while it was opened: nobody has its key
                store.path(name).unlink()
            elif held.reward is not None or held.end is not None:  # killed while it was ended
                if held.end is None:
                    store.append(name, {"closed": ""}, sync=True)
                store.close(name)
                self._remember(held.head, held.reward)
            else:
                session = self._open[name] = self._live(held.head)
                for call in held.calls:
                    session.restore(call)
        self.ledger["restored"] += len(self._open)
        return len(self._open)


def digest(key: str) -> str:
    return identity.digest(key.encode("utf-8", "surrogatepass"), 32)
