"""One turn at a time per session: turns queue within the process, and for the store's lease beyond it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from hermes.core.limits import LEASE_CHECK_S, LEASE_POLL_S, LEASE_RENEW_S, LEASE_TTL_S, LEASES_RENEWED_MAX
from hermes.core.processes import this_process
from hermes.core.spec import RunSpec
from hermes.store.base import OpenedSession, SessionBusy, SessionNotFound, StoreError
from hermes.store.runs import ClaimedSession
from hermes.store.stores import AsyncStore

log = logging.getLogger(__name__)
T = TypeVar("T")


class Lease(msgspec.Struct, eq=False):
    """The right to a session's next turn. Without a token it holds in this process only: the store is unavailable, or
    the session is created and claimed with the run's first commit (`unclaimed`)."""

    session_id: str
    owner: str
    run_id: str
    turn: asyncio.Future[None]
    store: AsyncStore
    token: int | None = None
    opened: OpenedSession | None = None
    unclaimed: bool = False
    # When it was last known to be held, by the loop's clock; and whether that is too long ago.
    confirmed_at: float = 0.0
    expired: bool = False


class SessionLeases:
    """The leases of one process. `on_lost` is called with the run whose session was taken over. `on_expired` is called
    with True when a lease could not be renewed in time, so that others may hold it, and with False once it is known to
    be held; it is set where other hosts can take leases over."""

    def __init__(self, turn_queue: int, on_lost: Callable[[str], None]) -> None:
        self._turn_queue, self._lost = turn_queue, on_lost
        self.on_expired: Callable[[str, bool], None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._lines: dict[str, list[Lease]] = {}
        self._held: set[Lease] = set()
        # Tokens that could not be released: the store was unavailable.
        self._unreleased: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._holder = this_process()

    def first(self, session_id: str, owner: str) -> str | None:
        line = self._lines.get(session_id)
        return line[0].run_id if line and line[0].owner == owner else None

    def waiting(self, session_id: str) -> int:
        return len(self._lines.get(session_id, ()))

    def others(self, session_id: str, run_id: str) -> bool:
        return any(lease.run_id != run_id for lease in self._lines.get(session_id, ()))

    async def acquire(
        self,
        spec: RunSpec,
        wait_s: float | None,
        store: AsyncStore,
        *,
        unrecorded: bool,
        next_in_line: bool = False,
        after_run: str | None = None,
    ) -> Lease:
        """Wait in order of arrival, or as the next one. With `unrecorded`, an unavailable store is ignored; with
        `after_run`, wait for no other run than that one."""
        line = self._lines.setdefault(spec.session_id, [])
        if line and line[0].token is not None and line[0].owner != spec.owner:
            raise SessionNotFound(spec.session_id)
        if after_run is not None and self.others(spec.session_id, after_run):
            raise SessionBusy("Another turn of this session is running.")
        if len(line) > self._turn_queue and not next_in_line:
            raise SessionBusy(f"{self._turn_queue} turns of this session are waiting already.")
        lease = Lease(spec.session_id, spec.owner, spec.run_id, asyncio.get_running_loop().create_future(), store)
        line.insert(1 if next_in_line else len(line), lease)
        if line[0] is lease:
            lease.turn.set_result(None)
        try:
            # The next one in line that does not want to wait asks the store once, however long that takes.
            once = wait_s == 0 and lease.turn.done()
            async with asyncio.timeout(None if once else wait_s):
                await lease.turn
                await self._claim(lease, spec, once=once, after_run=after_run)
        except StoreError:
            if not unrecorded:
                self._leave(lease)
                raise
        except TimeoutError:
            self._leave(lease)
            raise SessionBusy("Another turn of this session is still running.") from None
        except BaseException:
            self._leave(lease)
            raise
        return lease

    async def _claim(self, lease: Lease, spec: RunSpec, *, once: bool, after_run: str | None) -> None:
        if (token := self._unreleased.get(lease.session_id)) is not None:
            await lease.store.leases.release(f"session:{lease.session_id}", token)
            self._unreleased.pop(lease.session_id, None)
        # Another process may hold it, and cannot notify us when it releases it.
        while (opened := await self._ask(spec, lease.store, bind=False)) is None:
            if once or (after_run and not await self._is_running(after_run, spec.session_id, lease.store)):
                raise TimeoutError
            await asyncio.sleep(LEASE_POLL_S)
        self._hold(lease, opened)

    @staticmethod
    async def _is_running(run_id: str, session_id: str, store: AsyncStore) -> bool:
        return any(record.spec.run_id == run_id for record in await store.runs.unfinished(session_id))

    def _hold(self, lease: Lease, opened: OpenedSession) -> None:
        loop = asyncio.get_running_loop()
        lease.opened, lease.token, lease.confirmed_at = opened, opened.token, loop.time()
        self._held.add(lease)
        if self._timer is None and self._renewing is None:
            self._timer = loop.call_later(LEASE_RENEW_S, self._begin_to_renew)
        if self._expiry is None and self.on_expired is not None:
            self._expiry = loop.call_later(LEASE_CHECK_S, self._check_expiry)

    def _check_expiry(self) -> None:
        """Also detects that this process was suspended: timers fire before the tasks that wait for socket input run."""
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(LEASE_CHECK_S, self._check_expiry) if self._held else None
        late = loop.time() - LEASE_TTL_S + 2 * LEASE_CHECK_S
        expired = [lease for lease in self._held if lease.confirmed_at < late]
        for lease in expired:
            if not lease.expired and self.on_expired is not None:
                lease.expired = True
                self.on_expired(lease.run_id, True)
        if expired and self._renewing is None:
            if self._timer is not None:
                self._timer.cancel()
            self._begin_to_renew()

    async def _ask(self, spec: RunSpec, store: AsyncStore, *, bind: bool) -> OpenedSession | None:
        """Ask the store; a cancelled caller releases what the answer brings."""
        answer = store.begin(spec, self._holder, LEASE_TTL_S, bind=bind)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.wait([answer])
            if not answer.cancelled() and answer.exception() is None and (opened := answer.result()) is not None:
                assert opened.token is not None
                await store.leases.release(f"session:{opened.session_id}", opened.token)
            raise

    async def bind(self, spec: RunSpec, store: AsyncStore) -> Lease:
        """Acquire the session that matches a spec's history, or a new one, in one step."""
        opened = await self._ask(spec, store, bind=True)
        assert opened is not None, "a session that is held is not found"
        lease = Lease(opened.session_id, spec.owner, spec.run_id, asyncio.get_running_loop().create_future(), store)
        lease.turn.set_result(None)
        self._lines.setdefault(opened.session_id, []).insert(0, lease)
        self._hold(lease, opened)
        return lease

    def unclaimed_lease(self, spec: RunSpec, store: AsyncStore) -> Lease:
        """A lease on a session that is not stored yet, so that nobody else can know of it."""
        turn = asyncio.get_running_loop().create_future()
        opened = OpenedSession(spec.session_id, None, (), None)
        return Lease(spec.session_id, spec.owner, spec.run_id, turn, store, opened=opened, unclaimed=True)

    def mark_claimed(self, lease: Lease, claimed: ClaimedSession) -> None:
        """The session of an unclaimed lease was created under this id; without a token the run has ended already."""
        lease.session_id = claimed.session_id
        if claimed.token is not None:
            lease.unclaimed = False
            lease.turn.set_result(None)
            self._lines.setdefault(claimed.session_id, []).insert(0, lease)
            self._hold(lease, OpenedSession(claimed.session_id, claimed.token, (), None))

    async def acquire_if_free(self, spec: RunSpec, store: AsyncStore) -> Lease | None:
        if spec.session_id in self._lines:
            return None
        try:
            return await self.acquire(spec, 0, store, unrecorded=False)
        except SessionBusy:
            return None

    async def release(self, lease: Lease) -> None:
        if lease.unclaimed:
            return
        self._held.discard(lease)
        try:
            if lease.token is not None:
                await lease.store.leases.release(f"session:{lease.session_id}", lease.token)
        except StoreError:
            self._unreleased[lease.session_id] = lease.token or 0
            raise
        finally:
            self._leave(lease)

    def turn_away(self) -> None:
        """Cancel all waiting turns at shutdown."""
        for line in tuple(self._lines.values()):
            for lease in tuple(line):
                if not lease.turn.done():
                    lease.turn.set_exception(SessionBusy("The server is stopping."))

    def close(self) -> None:
        for work in (self._timer, self._renewing, self._expiry):
            if work is not None:
                work.cancel()
        self._timer = self._renewing = self._expiry = None

    def _leave(self, lease: Lease) -> None:
        """Remove a turn from the queue; the first one left may go."""
        line = self._lines[lease.session_id]
        line.remove(lease)
        if not line:
            del self._lines[lease.session_id]
        elif not line[0].turn.done():
            line[0].turn.set_result(None)

    def _begin_to_renew(self) -> None:
        self._timer = None
        if self._held:
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        held = tuple(self._held)
        for store in {lease.store for lease in held}:
            leases = [lease for lease in held if lease.store is store]
            for first in range(0, len(leases), LEASES_RENEWED_MAX):
                await self._renew_some(store, leases[first : first + LEASES_RENEWED_MAX])
        self._renewing = None
        self._timer = asyncio.get_running_loop().call_later(LEASE_RENEW_S, self._begin_to_renew)

    async def _renew_some(self, store: AsyncStore, leases: Sequence[Lease]) -> None:
        """Renew leases of one store in one transaction."""
        asked_at = asyncio.get_running_loop().time()
        tokens = {f"session:{lease.session_id}": lease.token for lease in leases if lease.token is not None}
        try:
            renewed = await store.leases.renew_all(tokens, LEASE_TTL_S)
        except Exception as error:  # noqa: BLE001  (the store may be back before the leases have expired)
            log.warning("the leases of %d sessions could not be renewed: %s", len(leases), error)
            return
        for lease in leases:
            if f"session:{lease.session_id}" in renewed:
                lease.confirmed_at = asked_at
                if lease.expired and self.on_expired is not None:
                    lease.expired = False
                    self.on_expired(lease.run_id, False)
            elif lease in self._held:
                self._held.discard(lease)
                self._lost(lease.run_id)
