"""All stores of one database, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload
from urllib.parse import urlsplit

from hermes.core.errors import ConfigError
from hermes.store.base import OpenedSession, SessionNotFound
from hermes.store.engine import Conflict, Engine, Tx
from hermes.store.history_match import Bound, find_session
from hermes.store.idempotency import Idempotency
from hermes.store.jobs import Jobs
from hermes.store.leases import Leases, acquire, acquire_free
from hermes.store.owner_limits import OwnerLimits
from hermes.store.repository import AsyncPart, async_class
from hermes.store.responses import ResponseStore
from hermes.store.runs import Runs
from hermes.store.sessions import SessionDB
from hermes.store.sign_ins import SignIns
from hermes.store.sqlite.engine import SqliteEngine
from hermes.store.sqlite.schema import STATE
from hermes.store.usage_days import UsageDays

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

    class AsyncSignIns(AsyncPart, SignIns): ...

    class AsyncUsageDays(AsyncPart, UsageDays): ...

    class AsyncResponses(AsyncPart, ResponseStore): ...

    class AsyncOwnerLimits(AsyncPart, OwnerLimits): ...

else:
    AsyncSessions, AsyncRuns, AsyncLeases, AsyncIdempotency, AsyncJobs = map(
        async_class, (SessionDB, Runs, Leases, Idempotency, Jobs)
    )
    AsyncSignIns, AsyncUsageDays, AsyncResponses, AsyncOwnerLimits = map(
        async_class, (SignIns, UsageDays, ResponseStore, OwnerLimits)
    )


class Store:
    """Sessions, runs, leases, idempotency records, jobs, sign-ins and usage in one database, responses in one beside
    it. The constructor opens nothing; a file is opened by the first operation."""

    def __init__(self, where: Path | Engine | None, *, read_threads: int = 4) -> None:
        self.engine = engine = (
            where.shared() if isinstance(where, Engine) else SqliteEngine.of(where, STATE, read_threads=read_threads)
        )
        self.sessions = SessionDB.on(engine)
        self.runs, self.leases = Runs(engine), Leases(engine)
        self.idempotency, self.jobs = Idempotency(engine), Jobs(engine)
        self.sign_ins, self.usage_days, self.owner_limits = SignIns(engine), UsageDays(engine), OwnerLimits(engine)
        self._closed = False

    @functools.cached_property
    def responses(self) -> ResponseStore:
        return self.make_responses(_RESPONSES_KEPT, _RESPONSES_DAYS)

    def make_responses(self, max_size: int, max_age_days: float) -> ResponseStore:
        """The responses that belong to this database: on a server in the same schema, else in a file beside it."""
        if self.engine.backend == "postgres":
            return ResponseStore(max_size, max_age_days=max_age_days, engine=self.engine)
        return ResponseStore(max_size, self.path and responses_file(self.path), max_age_days)

    @property
    def path(self) -> Path | None:
        return self.engine.path

    @property
    def in_memory(self) -> bool:
        return self.engine.path is None and self.engine.backend == "sqlite"

    def transaction(self, work: Callable[[], R]) -> R:
        """Run `work` so that all changes it makes through these stores (except responses) are committed together."""
        return self.engine.write(lambda _: work())

    def open(self) -> None:
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
        self.sessions, self.runs = AsyncSessions(store.sessions), AsyncRuns(store.runs)
        self.leases = AsyncLeases(store.leases)
        self.idempotency, self.jobs = AsyncIdempotency(store.idempotency), AsyncJobs(store.jobs)
        self.sign_ins, self.usage_days = AsyncSignIns(store.sign_ins), AsyncUsageDays(store.usage_days)
        self.owner_limits = AsyncOwnerLimits(store.owner_limits)

    @functools.cached_property
    def responses(self) -> AsyncResponses:
        return AsyncResponses(self.blocking.responses)

    async def transaction(self, work: Callable[[], R]) -> R:
        """Like `Store.transaction`; `work` runs in the store's own thread with the blocking parts."""
        return await self.blocking.engine.submit_write(lambda _: work())

    def begin(self, spec: RunSpec, holder: str, ttl: float, *, bind: bool) -> asyncio.Future[OpenedSession | None]:
        """Acquire the lease of a turn's session and load what the turn needs of it. With `bind` the session is the one
        that matches the spec's history, or a new one. A session of another owner raises `SessionNotFound`, whether or
        not it is free."""
        sessions, runs = self.blocking.sessions, self.blocking.runs
        base_id, history = spec.base_id or spec.session_id, spec.history or []

        def work(tx: Tx) -> OpenedSession | None:
            binding = Bound(spec.session_id, None)
            if bind:
                call_ids = [str(result["tool_call_id"]) for result in spec.results]
                identity, shown_tools = (spec.owner, spec.session_key), spec.kind != "chat"
                binding = find_session(tx, base_id, history, *identity, call_ids, shown_tools=shown_tools)
            name = f"session:{binding.session_id}"
            if (free := binding.new) is not None:  # a new session has no unfinished runs
                return OpenedSession(
                    free.id, acquire_free(tx, name, holder, ttl, free.next_token), (), None, binding.history
                )
            session = sessions.get_session(binding.session_id)
            if session is not None and session["owner"] != spec.owner:
                raise SessionNotFound(binding.session_id)
            if (token := acquire(tx, name, holder, ttl)) is None:
                if bind:  # it was free a moment ago
                    raise Conflict(binding.session_id)
                return None
            unfinished = runs.unfinished(binding.session_id)
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
    """The asynchronous counterpart of a store or of one of its parts. Any other object is called in a thread."""
    if isinstance(store, Store):
        return AsyncStore(store)
    kind: Any = type(store)
    return async_class(kind)(store) if hasattr(store, "_engine") else AsyncPart(store)


def responses_file(path: Path) -> Path:
    return path.with_name("response_store.db")


def address(home: Home, settings: Settings) -> str:
    return settings.storage.url.replace("<home>", str(home.path))


def store_at(url: str, *, read_threads: int = 4, home: Home | None = None) -> Store:
    if not is_server(url):
        return Store(path_of(url), read_threads=read_threads)
    engine = _server_engine(url, home)
    try:
        return Store(engine)
    finally:
        engine.release()


def is_server(url: str) -> bool:
    return url.partition("://")[0] in ("postgresql", "postgres")


def place_of(url: str) -> str:
    """A description of the database's location, without its password."""
    if not is_server(url):
        return str(path_of(url) or "in memory")
    try:
        parts = urlsplit(url)
        port = parts.port or 5432
    except ValueError:
        raise _invalid_address() from None
    rest = f"{parts.path}?{parts.query}#{parts.fragment}"
    if parts.netloc.count("@") > 1 or "@" in rest:  # part of a password, most likely
        raise _invalid_address()
    if not parts.hostname and "host=" not in parts.query:
        hint = "name host and database: postgresql://user:password@host:5432/database"
        raise ConfigError("The address of PostgreSQL has no host.", where="storage.url", hint=hint)
    return f"postgresql://{parts.hostname or 'localhost'}:{port}{parts.path}"


def _invalid_address() -> ConfigError:
    hint = "postgresql://user:password@host:5432/database, with special characters of the password as %40, %2F, ..."
    return ConfigError("The address of PostgreSQL is not valid.", where="storage.url", hint=hint)


def held_alone(url: str, home: Home) -> AbstractAsyncContextManager[None]:
    """Hold the database as its only server; a file is protected by the lock of its home."""
    if not is_server(url):
        return contextlib.nullcontext()
    with _extra_needed():
        from hermes.store.postgres.single_server import held
    return held(url, _schema(home), place_of(url))


def _server_engine(url: str, home: Home | None) -> Engine:
    with _extra_needed():
        from hermes.store.postgres.engine import PostgresEngine
    return PostgresEngine.of(url, _schema(home), place_of(url), home.path if home is not None else None)


def _schema(home: Home | None) -> str:
    return "hermes" if home is None or home.profile == "default" else f"hermes_{home.profile}"


@contextlib.contextmanager
def _extra_needed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        message = f"A database on PostgreSQL needs {error.name}, which is not installed."
        raise ConfigError(message, where="storage.url", hint="hermes install postgres") from None


def path_of(url: str) -> Path | None:
    """The file of a URL; None for a database in memory."""
    scheme, separator, path = url.partition("://")
    if not separator or scheme != "sqlite":
        kind = re.match(r"([a-z0-9+]{1,20}):", url)  # anything else may hold a password
        problem = f"There is no store of the kind {kind[1]!r}." if kind else "This is not an address of a database."
        hint = "sqlite:///path/state.db, or postgresql://user@host/database"
        raise ConfigError(problem, where="storage.url", hint=hint)
    if not path:
        return None
    if not path.startswith("/"):
        hint = f"sqlite:///absolute/path/{Path(path).name}"
        raise ConfigError("The address of a SQLite database needs an absolute path.", where="storage.url", hint=hint)
    return Path("/" + path.lstrip("/"))


def open_store(url: str, *, read_threads: int = 4, home: Home | None = None) -> Store:
    """Open the store of a URL: `sqlite:///path/to/state.db`, `sqlite://` for one in memory, or `postgresql://…`."""
    store = store_at(url, read_threads=read_threads, home=home)
    try:
        store.open()
    except BaseException:
        store.close()
        raise
    return store
