"""The lifetime of the watch over a sandbox's workspace, and sandboxes that have one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from hermes.sandbox.base import Sandbox
from hermes.sandbox.mounts import Mount, Place, plan_mounts, reserved_paths, writable_roots
from hermes.sandbox.quota import quota_of
from hermes.sandbox.workspace_watch import WorkspaceWatch


class Watching:
    """The watch of a sandbox: made before its first command, and anew when what it covers has changed while none
    ran."""

    def __init__(
        self,
        roots: Callable[[], Sequence[str]],
        is_granted: Callable[[str], bool],
        end_commands: Callable[[str], None],
        reserved_paths: Callable[[], Sequence[str]],
    ) -> None:
        self._roots, self._is_granted, self._end_commands = roots, is_granted, end_commands
        self._reserved_paths = reserved_paths
        self._watch: WorkspaceWatch | None = None
        self._lock = asyncio.Lock()
        self._set_aside: dict[str, str] = {}
        self.commands = 0

    async def enter(self) -> WorkspaceWatch:
        async with self._lock:
            watch = self._watch
            if watch is None or not (self.commands or await asyncio.to_thread(watch.begin)):
                await self._close()
                loop, end = asyncio.get_running_loop(), self._end_commands
                watch = self._watch = await asyncio.to_thread(
                    self._make, lambda reason: loop.call_soon_threadsafe(end, reason)
                )
            self.commands += 1
            return watch

    async def leave(self) -> None:
        """A command has ended. Reserved names that it has made are set aside when this returns."""
        async with self._lock:
            self.commands -= 1
            if (watch := self._watch) is not None:
                await asyncio.to_thread(watch.settle if self.commands else watch.end)
                self._set_aside |= watch.take_set_aside()

    async def abandon(self) -> None:
        """The command could not be started. The scan may be out of date: the next command scans again."""
        async with self._lock:
            self.commands -= 1
            if not self.commands:
                await self._close()

    def take_set_aside(self) -> dict[str, str]:
        reasons, self._set_aside = self._set_aside, {}
        return reasons

    def restore(self, path: str) -> None:
        if self._watch is not None:
            self._watch.restore(path)

    async def close(self) -> None:
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            await asyncio.to_thread(watch.close)

    def _make(self, end_commands: Callable[[str], object]) -> WorkspaceWatch:
        watch = WorkspaceWatch(self._roots(), self._is_granted, end_commands, self._reserved_paths())
        try:
            watch.scan()
            watch.activate()
        except BaseException:
            watch.close()
            raise
        return watch


class WatchedSandbox(Sandbox):
    """A sandbox with a disk quota, whose commands share a workspace with the user."""

    isolated = True

    def __init__(self, place: Place, is_granted: Callable[[str], bool] | None = None) -> None:
        super().__init__(place)
        self.quota = quota_of(place)
        granted, reserved = is_granted or place.is_granted, partial(reserved_paths, place)
        self.watching = self._watching = Watching(partial(writable_roots, place), granted, self.kill_commands, reserved)

    def mounts(self) -> list[Mount]:
        return plan_mounts(self.place)

    async def _enter_workspace(self) -> WorkspaceWatch:
        """Watch the workspace for one more command. Refuses a folder that can be no workspace before it is scanned."""
        await asyncio.to_thread(plan_mounts, self.place)
        return await self._watching.enter()
