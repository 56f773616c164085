"""Readiness checks of what the server depends on; none blocks the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from hermes.bus.nats_connection import BusError
from hermes.core.errors import ConfigError
from hermes.core.json_types import JsonObject
from hermes.server import status
from hermes.services import health
from hermes.settings import config
from hermes.store.repository import Repository

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

Facts = JsonObject
OK: Final = "ok"
DEGRADED: Final = "degraded"
CHECK_S_MAX = 2.0
# How long the result of a write probe is reused.
CHECK_KEPT_S = 1.0


class Probes:
    """Write probes, each shared by everybody who asks at the same time or shortly after."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Exception | None]] = {}
        self._ended_at: dict[str, float] = {}

    async def __call__(self, name: str, attempt: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Raise what the probe raised. A hanging one is not repeated before it ends."""
        task = self._tasks.get(name)
        if task is None or (task.done() and time.monotonic() - self._ended_at[name] >= CHECK_KEPT_S):
            task = self._tasks[name] = asyncio.create_task(self._make(name, attempt))
        await asyncio.wait([task])
        if (error := task.result()) is not None:
            raise error

    async def _make(self, name: str, attempt: Callable[[], Coroutine[Any, Any, None]]) -> Exception | None:
        try:
            await attempt()
        except Exception as error:  # noqa: BLE001  (it belongs to those who ask)
            return error
        finally:
            self._ended_at[name] = time.monotonic()
        return None


class Check(Struct, kw_only=True):
    """One thing that the server stands on; only the full key sees more than its status."""

    ADMIN_ONLY: ClassVar = ("problems", "provider", "model", "free_bytes", "state", "active", "limit", "kind")

    status: Literal["ok", "degraded"]
    problems: int | UnsetType = UNSET
    provider: str | UnsetType | None = UNSET
    model: str | UnsetType | None = UNSET
    free_bytes: int | UnsetType = UNSET
    state: str | UnsetType | None = UNSET
    active: int | UnsetType = UNSET
    limit: int | UnsetType | None = UNSET
    kind: str | UnsetType = UNSET
    error: str | UnsetType = UNSET


class Readiness(Struct, kw_only=True):
    status: Literal["ok", "degraded"]
    checks: dict[str, Check]


async def runtime_state(context: ServerContext) -> Facts:
    """The server's state file; empty where there is none."""
    app = context.attached_app
    with contextlib.suppress(OSError):
        state = await asyncio.to_thread(status.read_runtime_status, app.home if app is not None else None) or {}
        if app is None or app.replica is None or state.get("pid") in (os.getpid(), os.getppid()):
            return state
    # The file is of another replica.
    return {"gateway_state": "running"} if app is not None and app.replica is not None else {}


async def readiness(context: ServerContext, *, whole: bool) -> Readiness:
    """All checks, run concurrently. Without `whole` only each status is shown."""
    results = await asyncio.gather(*(_checked(context, name) for name in CHECKS))
    checks = dict(zip(CHECKS, results, strict=True))
    if not whole:
        checks = {name: Check(status=check.status) for name, check in checks.items()}
    is_ready = all(check.status == OK for check in results)
    return Readiness(status=OK if is_ready else DEGRADED, checks=checks)


async def _checked(context: ServerContext, name: str) -> Check:
    try:
        async with asyncio.timeout(CHECK_S_MAX):
            facts = await CHECKS[name](context)
    except TimeoutError:
        facts = {"error": f"{_engine_name(context, name)} gave no answer within {CHECK_S_MAX:g} seconds."}
    except Exception as error:  # noqa: BLE001  (whatever is wrong with what is checked, is what the check tells)
        facts = {"error": str(error) or type(error).__name__}
    if "error" not in facts:
        return Check(status=OK, **facts)
    return Check(status=DEGRADED, **{**facts, "error": context.redact(facts["error"])})


def _engine_name(context: ServerContext, check: str) -> str:
    """The name of the checked component, for the administrator."""
    stores = {"state_db": context.session_db, "response_store": context.response_store}
    if isinstance(store := stores.get(check), Repository):
        return {"sqlite": "SQLite", "postgres": "PostgreSQL"}[store.engine.backend]
    if check == "bus" and context.app.run_log.bus.kind == "nats":
        return "NATS"
    return "What is checked"


# --- the checks: each returns facts, with an `error` where it fails ---------------------------------------------------


async def _state_db(context: ServerContext) -> Facts:
    await asyncio.to_thread(context.open_session_db)
    if isinstance(context.session_db, Repository):  # which notices a lost server sooner than a read does
        await context.probes("state_db", context.session_db.engine.check)
    await context.database().get_session("")
    return {}


async def _response_store(context: ServerContext) -> Facts:
    await context.probes("response_store", context.response_store.engine.check)
    await context.stored_responses.get_conversation("", "")
    return {}


async def _config(context: ServerContext) -> Facts:
    settings = context.app.settings
    fault = await asyncio.to_thread(_fault_in_files, settings)
    return {"problems": len(settings.problems), **({"error": fault} if fault else {})}


@lru_cache(maxsize=4)
def _fault_in_files(settings: config.Settings) -> str:
    """Why the files differ from the settings in force. Settings are reloaded when a file changes, so each is checked
    once."""
    try:
        fresh = config.load(settings.home)
    except ConfigError as error:
        return str(error)
    known = {problem.key for problem in settings.errors}
    return next((str(problem) for problem in fresh.errors if problem.key not in known), "")


async def _shared_check(context: ServerContext, name: str) -> Facts:
    """A check that `hermes doctor` makes too; a warning does not make the server unready."""
    subject = health.Subject(context.app.home, context.app.settings)
    finding = await asyncio.to_thread(health.CHECKS[name].look, subject)
    return {**finding.facts, **({"error": str(finding)} if finding.state == "fail" else {})}


async def _disk(context: ServerContext) -> Facts:
    app, facts = context.app, await _shared_check(context, "disk")
    if "error" not in facts:
        try:
            await context.probes("disk", lambda: asyncio.to_thread(app.run_log.check_journal))
        except OSError as error:
            facts["error"] = f"The journal in {app.home.journal} cannot be written: {error}."
    return facts


async def _gateway(context: ServerContext) -> Facts:
    state = await runtime_state(context)
    gateway_state = "draining" if context.app.engine.draining else state.get("gateway_state")
    error = {"error": f"The server is {gateway_state}."} if gateway_state not in (None, "running") else {}
    return {"state": gateway_state, **error}


async def _background_queues(context: ServerContext) -> Facts:
    limit, active = context.app.engine.limits.runs_max, context.app.engine.permits.everywhere
    full = limit and active >= limit
    return {"active": active, "limit": limit, **({"error": "No further turn is taken now."} if full else {})}


async def _bus(context: ServerContext) -> Facts:
    bus = context.app.run_log.bus
    try:
        await bus.check()
    except BusError as error:
        return {"kind": bus.kind, "error": error.message}
    return {"kind": bus.kind}


CHECKS: dict[str, Callable[[ServerContext], Awaitable[Facts]]] = {
    "state_db": _state_db,
    "response_store": _response_store,
    "config": _config,
    "model": partial(_shared_check, name="model"),
    "disk": _disk,
    "gateway": _gateway,
    "background_queues": _background_queues,
    "bus": _bus,
}
