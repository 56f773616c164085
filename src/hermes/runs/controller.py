"""Controls of runs: applied here, forwarded to the process of the run, or stored for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from hermes.bus.frames import EncodedEvent, encode_events
from hermes.bus.peers import Operation, Stream
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import CLOSE_S_MAX, CONTROL_POLL_S
from hermes.core.spec import Applied, Control
from hermes.runs.commits import Commit
from hermes.runs.live_run import LiveRun
from hermes.runs.remote_runs import encode_record, encode_row
from hermes.runs.writer import LogEnded
from hermes.store.base import LeaseLost, Row, RunRecord, StoreError

if TYPE_CHECKING:
    from hermes.runs.engine import RunEngine

log = logging.getLogger(__name__)


class Controller:
    def __init__(self, engine: RunEngine) -> None:
        self._engine = engine

    async def control(self, run_id: str, control: Control) -> Applied:
        """Record a control and apply it. A repeated id does nothing."""
        live = self._engine.by_id.get(run_id)
        if live is None:
            return await self._leave_control(run_id, control)
        if control.control_id in live.controls.seen:
            return "applied"
        live.controls.seen.add(control.control_id)
        event = live.log.event(
            "control.received", by=control.by, surface=control.surface, credential=control.credential
        )
        event.data |= {"control_id": control.control_id, "control": control.control, "data": dict(control.data)}
        applied: list[Applied] = []
        try:
            await self._engine.lifecycle.check_unstarted(live)
            await live.log.commit(Commit((event,), then=lambda: applied.append(_apply(live, control))))
        except (LogEnded, LeaseLost):
            return "not_active"
        if control.control in ("approve", "answer"):
            credential = control.credential or control.by
            message = "%s: %s of run %s with the credential %r over %r"
            log.info(message, applied[0], control.control, run_id, credential, control.surface)
        return applied[0]

    async def _leave_control(self, run_id: str, control: Control) -> Applied:
        """Store a control for a run of another process, or of one that is to be resumed."""
        record = await self._engine.get(run_id)
        if record is None:
            return "unknown"
        if run_id in self._engine.by_id:  # it was about to start
            return await self.control(run_id, control)
        stored = self._engine.store.runs
        if not record.state.ended:
            carrier = await stored.carrier(run_id)
            if (applied := await self._engine.elsewhere.control(run_id, carrier or "", control)) != "unknown":
                return applied
            if await self._take_queued(record, control):
                return await self.control(run_id, control)
        # Whoever continues or resumes the run finds it in the store.
        if not record.state.ended and not await stored.add_control(run_id, control):
            record = await self._engine.get(run_id)  # it was stored before, or the run has ended meanwhile
        if record is None or record.state.ended:
            return "not_active"
        # The run may have moved meanwhile, and its new process may have looked too early.
        carrier = await stored.carrier(run_id)
        applied = await self._engine.elsewhere.control(run_id, carrier or "", control) if carrier else "unknown"
        return "applied" if applied == "unknown" else applied

    async def _take_queued(self, record: RunRecord, control: Control) -> bool:
        """Take a run out of the queue to stop it without waiting for a free replica."""
        run_id, stops = record.spec.run_id, control.control in ("interrupt", "cancel")
        if not stops or self._engine.work_queue is None or record.holder:
            return False
        if not await self._engine.store.runs.adopt(run_id, ""):
            return False
        return await self._engine.recovery.requeue(record) is not None

    async def take(self, run_ids: Sequence[str]) -> None:
        """Apply the controls that other processes have stored for these runs."""
        stored = self._engine.store.runs
        for run_id in await stored.controlled(run_ids) if run_ids else ():
            for control in await stored.take_controls(run_id):
                await self.control(run_id, control)

    async def poll(self) -> None:
        while not self._engine.draining:
            await asyncio.sleep(CONTROL_POLL_S)
            run_ids = [run_id for run_id, live in self._engine.by_id.items() if live.spec.persist]
            try:
                await self.take(run_ids)
            except StoreError as error:
                log.warning("controls of other processes could not be read: %s", error)

    def attach(self, run_id: str) -> object:
        owner = object()
        if (live := self._engine.by_id.get(run_id)) is not None:
            live.owners.add(owner)
        return owner

    async def detach(self, run_id: str, owner: object) -> None:
        """Detach a reader; after the last one, the run ends if its spec says so."""
        live = self._engine.by_id.get(run_id)
        if live is None or owner not in live.owners:
            return
        live.owners.discard(owner)
        if not live.owners and live.spec.on_detach == "cancel":
            await self.control(run_id, Control("cancel", {"reason": "client_disconnected"}))
            await self._engine.wait(run_id, CLOSE_S_MAX)

    # --- for other processes --------------------------------------------------------------------------------------

    def operations(self) -> dict[str, Operation]:
        return {
            "get": self._get_for_peer,
            "has": self._has_for_peer,
            "control": self._control_for_peer,
            "durable": self._durable_for_peer,
            "row": self._row_for_peer,
        }

    def streams(self) -> dict[str, Stream]:
        return {"batches": self._batches_for_peer}

    async def _get_for_peer(self, run_id: str) -> JsonObject | None:
        exists = run_id in self._engine.creating or self._engine.is_ephemeral(run_id)
        record = await self._engine.get_here(run_id) if exists else None
        return encode_record(record) if record is not None else None

    async def _has_for_peer(self, run_id: str) -> bool:
        return run_id in self._engine.by_id

    async def _control_for_peer(self, run_id: str, control: JsonObject) -> Applied:
        if run_id in self._engine.creating:
            await self._engine.get_here(run_id)
        return await self.control(run_id, Control(**control)) if run_id in self._engine.by_id else "unknown"

    async def _durable_for_peer(self, run_id: str) -> Sequence[EncodedEvent]:
        return encode_events(await self._engine.durable(run_id)) if self._engine.is_ephemeral(run_id) else []

    async def _row_for_peer(self, run_id: str, row_id: int) -> Row | None:
        row = await self._engine.row(run_id, row_id) if self._engine.is_ephemeral(run_id) else None
        return encode_row(row) if row is not None else None

    async def _batches_for_peer(self, run_id: str, after: int) -> AsyncGenerator[Sequence[EncodedEvent], None]:
        if run_id in self._engine.by_id or self._engine.is_ephemeral(run_id):
            async with contextlib.aclosing(self._engine.batches(run_id, after)) as batches:
                async for batch in batches:
                    yield encode_events(batch)


def _apply(live: LiveRun, control: Control) -> Applied:
    controls, data = live.controls, control.data
    if control.control in ("interrupt", "cancel"):
        controls.stop.request(data.get("reason", "stop"), control.by)
        return "applied"
    if control.control == "steer":
        controls.steers.append((control.control_id, str(data["text"])))
        return "applied"
    questions = controls.approvals if control.control == "approve" else controls.clarifications
    origin = {"by": control.by, "surface": control.surface, "credential": control.credential}
    answer: JsonMapping = {**data, **origin}
    return "applied" if questions.answer(data.get("id"), answer) else "already_resolved"
