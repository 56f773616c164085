"""Runs of other processes of the home: their events, records and controls."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

import msgspec

from hermes.bus.frames import decode_events
from hermes.bus.peers import PeerGone, Peers, name_of
from hermes.core.events import Event, RunState
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import PEER_RUNS_KNOWN_MAX
from hermes.core.processes import this_process
from hermes.core.spec import Applied, Control, RunSpec
from hermes.store.base import Row, RunRecord


def encode_record(record: RunRecord) -> JsonObject:
    """A record without credentials, as in the store."""
    return {**{name: getattr(record, name) for name in _PLAIN}, "spec": record.spec.stored(), "state": record.state}


def encode_row(row: Row) -> Row:
    return replace(row, announced_in=())


_PLAIN = ("created_at", "updated_at", "resumes", "log_expired", "holder")


def _record(encoded: JsonMapping) -> RunRecord:
    state = msgspec.convert(encoded["state"], RunState)
    return RunRecord(RunSpec.from_stored(encoded["spec"]), state, **{name: encoded[name] for name in _PLAIN})


class Elsewhere:
    """The other processes. The store is read directly; the process of a run is asked for the rest."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        # The process that has a run which is not in the store, the latest last.
        self._known: dict[str, str] = {}

    async def get(self, run_id: str) -> RunRecord | None:
        """A run that is not in the store: it is being created, or ephemeral."""
        for name, encoded in (await self.peers.ask_all("get", run_id)).items():
            if encoded is not None:
                self._known.pop(run_id, None)
                self._known[run_id] = name
                if len(self._known) > PEER_RUNS_KNOWN_MAX:
                    del self._known[next(iter(self._known))]
                return _record(encoded)
        return None

    async def has(self, run_id: str, holder: str) -> bool:
        answer = await self._ask(self._name(run_id, holder), "has", run_id)
        return bool(answer)

    async def control(self, run_id: str, holder: str, control: Control) -> Applied:
        """Send a control; `unknown` if no process there knows the run."""
        applied: Applied | None = await self._ask(self._name(run_id, holder), "control", run_id, asdict(control))
        return applied or "unknown"

    async def durable(self, run_id: str) -> list[Event]:
        return decode_events(run_id, await self._ask(self._known.get(run_id, ""), "durable", run_id) or [])

    async def row(self, run_id: str, row_id: int) -> Row | None:
        answer = await self._ask(self._known.get(run_id, ""), "row", run_id, row_id)
        return None if answer is None else msgspec.convert(answer, Row)

    async def batches(self, run_id: str, after: int, holder: str = "") -> AsyncGenerator[list[Event], None]:
        """The run's log after `after`, as far as its process answers."""
        if not (name := self._name(run_id, holder)):
            return
        async with aclosing(self.peers.follow(name, "batches", run_id, after)) as answers:
            async for encoded in answers:
                yield decode_events(run_id, encoded)

    def _name(self, run_id: str, holder: str) -> str:
        return self._known.get(run_id, "") if holder in ("", this_process()) else name_of(holder)

    async def _ask(self, name: str, operation: str, *arguments: object) -> Any:
        if not name:
            return None
        try:
            return await self.peers.ask(name, operation, *arguments)
        except PeerGone:
            return None
