"""All stores of one database, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from hermes.core.errors import ConfigError
from hermes.store.base import OpenedSession, SessionNotFound
from hermes.store.connections import Tx
from hermes.store.engine import Engine
from hermes.store.history_match import Bound, find_session
from hermes.store.idempotency import Idempotency
from hermes.store.jobs import Jobs
from hermes.store.leases import Leases, acquire
from hermes.store.repository import AsyncPart, async_class
from hermes.store.responses import ResponseStore
from hermes.store.runs import Runs
from hermes.store.schema import STATE
from hermes.store.sessions import SessionDB

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.core.spec import RunSpec
    from hermes.settings.config import Settings

R = TypeVar("R")
_RESPONSES_KEPT, _RESPONSES_DAYS = 1000, 30.0

if TYPE_CHECKING:

    class AsyncSessions(AsyncPart, SessionDB): ...

    class AsyncRuns(AsyncPart, Runs): ...

    class AsyncLeases(AsyncPart, Leases): ...

    class AsyncIdempotency(AsyncPart, Idempotency): ...

    class AsyncJobs(AsyncPart, Jobs): ...

    class AsyncResponses(AsyncPart, ResponseStore): ...

else:
    AsyncSessions, AsyncRuns, AsyncLeases, AsyncIdempotency, AsyncJobs, AsyncResponses = map(
        async_class, (SessionDB, Runs, Leases, Idempotency, Jobs, ResponseStore)
    )


class Store:
    """Sessions, runs, leases, idempotency records and jobs in one database, responses in one beside it.

    Making it opens nothing: a file is opened by the first who asks something of it.
    """

    def __init__(self, where: Path | Engine | None, *, read_threads: int = 4) -> None:
        self.engine = engine = (
            where.shared() if isinstance(where, Engine) else Engine.of(where, STATE, read_threads=read_threads)
        )
        self.responses_file = engine.path.with_name("response_store.db") if engine.path else None
        self.sessions = SessionDB.on(engine)
        self.runs, self.leases = Runs(engine), Leases(engine)
        self.idempotency, self.jobs = Idempotency(engine), Jobs(engine)
        self._closed = False

    @functools.cached_property
    def responses(self) -> ResponseStore:
        return ResponseStore(_RESPONSES_KEPT, self.responses_file, _RESPONSES_DAYS)

    @property
    def path(self) -> Path | None:
        return self.engine.path

    def transaction(self, work: Callable[[], R]) -> R:
        """Do several things as one: all that `work` asks of these stores (but for responses) happens, or nothing."""
        return self.engine.write(lambda _: work())

    def open(self) -> None:
        """Open the file now, so that what is wrong with it is told now."""
        self.engine.open()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if "responses" in self.__dict__:
                self.responses.close()
            self.engine.release()


class AsyncStore:
    """A store for an event loop: every method of its parts is a coroutine."""

    def __init__(self, store: Store) -> None:
        self.blocking = store
        self.sessions, self.runs, self.leases = (
            AsyncSessions(store.sessions),
            AsyncRuns(store.runs),
            AsyncLeases(store.leases),
        )
        self.idempotency, self.jobs = AsyncIdempotency(store.idempotency), AsyncJobs(store.jobs)

    @functools.cached_property
    def responses(self) -> AsyncResponses:
        return AsyncResponses(self.blocking.responses)

    async def transaction(self, work: Callable[[], R]) -> R:
        """Do several things as one; `work` is carried out in the store's own thread, with the blocking parts."""
        return await self.blocking.engine.submit_write(lambda _: work())

    def begin(self, spec: RunSpec, holder: str, ttl: float, *, bind: bool) -> asyncio.Future[OpenedSession | None]:
        """The lease on a turn's session, and what is to be known of that, in one step.

        With `bind` it is the session that holds the spec's history, or one for it to begin in. A session of another
        owner raises `SessionNotFound`, whether or not it is free.
        """
        sessions, runs = self.blocking.sessions, self.blocking.runs
        base_id, history = spec.base_id or spec.session_id, spec.history or []

        def work(tx: Tx) -> OpenedSession | None:
            binding = Bound(spec.session_id, False)
            if bind:
                call_ids = [str(result["tool_call_id"]) for result in spec.results]
                identity, shown_tools = (spec.owner, spec.session_key), spec.kind != "chat"
                binding = find_session(tx, base_id, history, *identity, call_ids, shown_tools=shown_tools)
            session = None if binding.new else sessions.get_session(binding.session_id)
            if session is not None and session["owner"] != spec.owner:
                raise SessionNotFound(binding.session_id)
            token = acquire(tx, f"session:{binding.session_id}", holder, ttl, free=binding.new)
            if token is None:
                return None
            # What was begun in a session has made it: a new one has nothing left over.
            unfinished = () if binding.new else runs.unfinished(binding.session_id)
            return OpenedSession(binding.session_id, token, unfinished, session, binding.history)

        return self.blocking.engine.submit_write(work)

    def close(self) -> None:
        self.blocking.close()


@overload
def Async(store: Store) -> AsyncStore: ...
@overload
def Async(store: SessionDB) -> AsyncSessions: ...
@overload
def Async(store: ResponseStore) -> AsyncResponses: ...
@overload
def Async(store: object) -> Any: ...
def Async(store: object) -> Any:
    """The methods of a store, or of one of its parts, as coroutines. A stand-in for a store is awaited in a thread."""
    if isinstance(store, Store):
        return AsyncStore(store)
    kind: Any = type(store)
    return async_class(kind)(store) if hasattr(store, "_engine") else AsyncPart(store)


def address(home: Home, settings: Settings) -> str:
    return settings.storage.url.replace("<home>", str(home.path))


def store_at(url: str, *, read_threads: int = 4) -> Store:
    return Store(path_of(url), read_threads=read_threads)


def path_of(url: str) -> Path | None:
    """The file of an address; None for one in memory."""
    scheme, separator, path = url.partition("://")
    if not separator or scheme != "sqlite":
        kind = scheme.partition(":")[0][:20]  # what follows may hold a password
        raise ConfigError(f"There is no store of the kind {kind!r}.", hint="sqlite:///path/state.db")
    if not path:
        return None
    return Path("/" + path.lstrip("/")) if path.startswith("/") else Path(path)


def open_store(url: str, *, read_threads: int = 4) -> Store:
    """The store of an address, open: `sqlite:///path/to/state.db`, or `sqlite://` for one in memory."""
    store = store_at(url, read_threads=read_threads)
    try:
        store.open()
    except BaseException:
        store.close()
        raise
    return store
