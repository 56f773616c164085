"""Processes in the background, and the tool `process` that looks after them.

They outlive the turn that started them, unless it is stopped, and end with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from hermes.core.limits import (
    BACKGROUND_MAX,
    BACKGROUND_OUTPUT_CHARS_MAX,
    PREVIEW_CHARS_MAX,
    PROCESS_SLICE_CHARS,
    PROCESS_WAIT_S,
    PROCESS_WAIT_S_MAX,
)
from hermes.core.spec import Control
from hermes.sandbox.base import CHUNK_BYTES_MAX
from hermes.sandbox.choose import why_no_commands
from hermes.store.base import StoreError
from hermes.tools.framework.registry import Answer, Args, ToolContext, ToolDef, ToolError, object_schema
from hermes.tools.output_buffer import OutputDecoder

if TYPE_CHECKING:
    from hermes.runs.engine import RunEngine
    from hermes.sandbox.base import Process, Sandbox
    from hermes.tools.framework.session_state import SessionState

State = Literal["running", "exited", "timeout", "killed"]
_STATES: dict[str, State] = {"exit": "exited", "timeout": "timeout"}
_FLOOD_PAUSE_S = 0.01


@dataclass(slots=True)
class Background:
    """One of them, with the last of what it has said. Its sandbox lives as long as it does.

    A stop of one of the runs in `run_ids`, its own and the one that this is part of, ends it unless it is to `keep` on.
    """

    id: str
    owner: str
    session_id: str
    command: str
    process: Process
    sandbox: Sandbox | None
    foreign: bool = False
    output: str = ""
    dropped: int = 0
    state: State = "running"
    exit_code: int | None = None
    began_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    forgotten: bool = False
    run_ids: frozenset[str] = frozenset()
    keep: bool = False
    stopped: bool = False

    def is_of(self, owner: str, session_id: str) -> bool:
        return not self.forgotten and (self.owner, self.session_id) == (owner, session_id)

    @property
    def total(self) -> int:
        return self.dropped + len(self.output)

    def say(self, text: str) -> None:
        self.output += text
        if (over := len(self.output) - BACKGROUND_OUTPUT_CHARS_MAX) > 0:
            self.output, self.dropped = self.output[over:], self.dropped + over


class Processes:
    """Those of a server. A session sees its own, and each owner has places of its own."""

    def __init__(self) -> None:
        self._known: dict[str, Background] = {}

    def of(self, owner: str, session_id: str) -> list[Background]:
        return [found for found in self._known.values() if found.is_of(owner, session_id)]

    def get(self, owner: str, session_id: str, process_id: str) -> Background | None:
        found = self._known.get(process_id)
        return found if found is not None and found.is_of(owner, session_id) else None

    def make_room(self, owner: str) -> bool:
        """Forget the owner's one that has been over for longest, if need be. False: all of the owner's run."""
        own = [found for found in self._known.values() if found.owner == owner]
        over = next((found.id for found in own if found.ended.is_set()), None)
        if len(own) >= BACKGROUND_MAX and over is not None:
            del self._known[over]
            return True
        return len(own) < BACKGROUND_MAX

    def end(self, session_ids: Collection[str]) -> None:
        for found in [process for process in self._known.values() if process.session_id in session_ids]:
            found.forgotten = True
            found.process.kill()
            if found.task is not None:
                found.task.add_done_callback(partial(self._known.pop, found.id))  # with the task as default

    async def end_run(self, run_id: str) -> None:
        """End those that a stopped run has started, and wait until they are gone. Its session is not told of them."""
        found = [
            process
            for process in self._known.values()
            if run_id in process.run_ids and not process.keep and not process.ended.is_set()
        ]
        for process in found:
            process.stopped = True
            process.process.interrupt()
        for process in found:
            await process.ended.wait()

    def add(
        self, ctx: ToolContext, command: str, process: Process, sandbox: Sandbox, *, notify: bool, keep: bool
    ) -> Background:
        """Look after a process from now on; with `notify` its session is told of its end, with `keep` no stop ends it."""
        made = Background(f"proc_{secrets.token_hex(4)}", ctx.owner, ctx.session_id, command, process, sandbox)
        self._known[made.id] = made
        # Only what outlives the turn: nothing here leads to its conversation.
        resources = ctx.resources
        made.run_ids, made.keep = frozenset({ctx.run_id, resources.engine.root_spec(resources.spec).run_id}), keep
        tell = (
            partial(_tell, resources.engine, resources.session, ctx.owner, ctx.session_id, ctx.run_id)
            if notify
            else None
        )
        made.task = asyncio.create_task(_follow(made, OutputDecoder(ctx.secrets), tell))
        return made

    async def close(self) -> None:
        tasks = [found.task for found in self._known.values() if found.task is not None and not found.ended.is_set()]
        for found in self._known.values():
            found.process.kill()
        if tasks:
            await asyncio.wait(tasks)


async def _follow(made: Background, readable: OutputDecoder, tell: Callable[[str], Awaitable[None]] | None) -> None:
    process = made.process
    try:
        async with process:
            async for data in process.chunks():
                made.say(readable.feed(data))
                if len(data) == CHUNK_BYTES_MAX:  # nobody waits for a flood; it can wait for others
                    await asyncio.sleep(_FLOOD_PAUSE_S)
            made.say(readable.feed(b"", end=True))
            made.exit_code = await process.wait()
    finally:
        made.state, made.ended_at, made.sandbox = _STATES.get(process.ended_by, "killed"), time.time(), None
        made.ended.set()
    if tell is not None and not made.forgotten and not made.stopped:
        await tell(f"[The background process {made.id} has ended with exit code {made.exit_code}.]")


async def _tell(engine: RunEngine, session: SessionState, owner: str, session_id: str, run_id: str, text: str) -> None:
    """To the turn that runs in the session, like words of the user; or as a notice of its next turn."""
    if engine.draining:
        return
    with contextlib.suppress(StoreError):
        runs = await engine.list(owner=owner, session_id=session_id)
        later = [record.spec.run_id for record in runs if not record.state.ended]
        for running in (run_id, *later):
            if await engine.control(running, Control("steer", {"text": text}, by="process")) == "applied":
                return
    session.notices.append(text)


# ---- the tool

_LOST = "Nothing is known of it here: it ended when the server did, or was never started in this session."


async def _run(ctx: ToolContext, args: Args) -> Answer:
    processes, action = ctx.resources.processes, args["action"]
    if action == "list":
        return {"processes": [_summary(found) for found in processes.of(ctx.owner, ctx.session_id)]}
    if not args.get("session_id"):
        raise ToolError(f"`{action}` needs a session_id.", "invalid_arguments", "The action list shows them.")
    found = processes.get(ctx.owner, ctx.session_id, args["session_id"])
    if found is None:
        if not re.fullmatch(r"proc_[0-9a-f]{8}", args["session_id"]):
            raise ToolError("There is no such process.", "not_found", "The action list shows those of this session.")
        return {"session_id": args["session_id"], "state": "lost", "exit_code": None, "note": _LOST}
    if action == "kill":
        found.process.interrupt()
        await found.ended.wait()
    elif action == "wait":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(args.get("timeout", PROCESS_WAIT_S)), ctx.resources.session.hosts.call(ctx):
                await found.ended.wait()
    ctx.foreign = found.foreign
    return {**_summary(found), **_slice(found, args.get("offset"), args.get("limit", PROCESS_SLICE_CHARS))}


def _summary(found: Background) -> Answer:
    summary = {"session_id": found.id, "state": found.state, "exit_code": found.exit_code, "pid": found.process.pid}
    seconds = (found.ended_at or time.time()) - found.began_at
    return {**summary, "command": found.command[:PREVIEW_CHARS_MAX], "seconds": round(seconds, 3)}


def _slice(found: Background, offset: int | None, limit: int) -> Answer:
    wanted = max(0, found.total - limit) if offset is None else min(offset, found.total)
    begin = max(wanted, found.dropped)
    text = found.output[begin - found.dropped :][:limit]
    lost = {"dropped": begin - wanted} if begin > wanted else {}
    return {"output": text, "offset": begin, "next_offset": begin + len(text), "total": found.total, **lost}


TOOL = ToolDef(
    name="process",
    toolset="terminal",
    description=(
        "Look after background processes of this session: list them; poll one for its state and output; wait for its "
        "end; kill it. Output comes from `offset` on (characters; give the last next_offset to read on), without one "
        "its end."
    ),
    parameters=object_schema(
        {
            "action": {"type": "string", "enum": ["list", "poll", "wait", "kill"]},
            "session_id": {"type": "string", "description": "The id that terminal gave: proc_…"},
            "timeout": {
                "type": "number",
                "minimum": 0,
                "maximum": PROCESS_WAIT_S_MAX,
                "description": "seconds to wait",
            },
            "offset": {"type": "integer", "minimum": 0},
            "limit": {"type": "integer", "minimum": 1, "maximum": 5 * PROCESS_SLICE_CHARS},
        },
        "action",
    ),
    run=_run,
    effect=lambda args: "effect" if args["action"] == "kill" else "read",
    scope=lambda args: frozenset({f"process:{args.get('session_id', '')}"}),
    timeout_s=None,
    available=why_no_commands,
    preview=lambda args: f"{args['action']} {args.get('session_id', '')}".strip(),
)
