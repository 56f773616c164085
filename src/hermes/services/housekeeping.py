"""Retention: the sweep that deletes what is older than the settings allow."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from hermes.core.json_types import JsonObject
from hermes.core.limits import UNRECORDED_KEPT_S, USAGE_KEPT_DAYS
from hermes.core.processes import this_process
from hermes.store.stores import responses_file

if TYPE_CHECKING:
    from hermes.settings.config import Settings
    from hermes.store.stores import Store

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 3600.0
_LEASE_S = 600.0
_OWN_DAYS = 30.0
# Logs of turns that have their answer elsewhere; all others live as long as their run.
_LOG_HOURS = {"chat": 1.0, "session": 1.0, "job": 24.0, "cli": 24.0}


def sweep_if_due(store: Store, settings: Settings, every_s: float = SWEEP_EVERY_S) -> JsonObject | None:
    """Sweep, unless that was done a short time ago or another process is doing it."""
    last = float(store.sessions.get_meta("swept_at") or 0)
    if 0 <= time.time() - last < every_s:
        return None
    token = store.leases.acquire("maintenance", this_process(), _LEASE_S)
    if token is None:
        return None
    try:
        return _sweep(store, settings)
    finally:
        store.leases.release("maintenance", token)


def _sweep(store: Store, settings: Settings) -> JsonObject:
    server = settings.api_server
    days = {"": server.runs.max_age_days, "job": _OWN_DAYS, "cli": _OWN_DAYS}
    days["response"] = server.responses.max_age_days
    done: JsonObject = store.runs.sweep(days, _LOG_HOURS, server.runs.max_stored)
    done["idempotency"] = store.idempotency.sweep()
    done["sign_ins"] = store.sign_ins.sweep()
    done["usage_days"] = store.usage_days.sweep(int(time.time() // 86_400) - USAGE_KEPT_DAYS)
    done["leases"] = store.leases.release_gone()
    done["responses"] = store.responses.sweep() if _has_responses(store) else 0
    done["sessions"] = _prune(store, settings) + _prune_stateless(store, settings)
    done["prompts"] = store.sessions.remove_unused_prompts()
    done["unrecorded"] = store.sessions.remove_unrecorded_folders(time.time() - UNRECORDED_KEPT_S)
    store.sessions.set_meta("swept_at", repr(time.time()))
    log.info("swept: %s", done)
    return done


def _has_responses(store: Store) -> bool:
    """A response store that nobody has needed yet is not created for this."""
    return store.engine.backend == "postgres" or (store.path is not None and responses_file(store.path).exists())


def _prune_stateless(store: Store, settings: Settings) -> int:
    """Sessions of API calls that named none. One with a stored response stays as long as that."""
    days = settings.sessions.api_retention_days
    if not days:
        return 0
    before = time.time() - days * 86_400
    sessions = store.sessions.stateless_sessions(before)
    stored = {one for responses in sessions.values() for one in responses}
    stored = store.responses.known(stored) if stored and _has_responses(store) else set()
    old = [session_id for session_id, responses in sessions.items() if stored.isdisjoint(responses)]
    deleted = store.sessions.delete_stateless(old, before)
    if deleted:
        store.sessions.vacuum_if_worthwhile()
    return len(deleted)


def _prune(store: Store, settings: Settings) -> int:
    """Sessions that ended long ago, where retention is configured."""
    if not settings.sessions.auto_prune:
        return 0
    last = float(store.sessions.get_meta("pruned_at") or 0)
    if time.time() - last < settings.sessions.min_interval_hours * 3600:
        return 0
    deleted = store.sessions.prune_sessions(older_than_days=settings.sessions.retention_days)
    store.sessions.set_meta("pruned_at", repr(time.time()))
    return len(deleted)
