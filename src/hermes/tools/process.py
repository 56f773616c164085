"""Background processes, and the tool `process` that manages them.

They outlive the turn that started them, unless it is stopped, and end with the server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from msgspec import Meta

from hermes.core import limits
from hermes.core.spec import Control
from hermes.runs.engine import RunEngine
from hermes.sandbox.base import CHUNK_BYTES_MAX, Process, Sandbox
from hermes.sandbox.choose import why_no_commands
from hermes.store.base import StoreError
from hermes.tools.framework.registry import Answer, ToolArguments, ToolContext, ToolDef, ToolError
from hermes.tools.framework.session_state import SessionState
from hermes.tools.output_buffer import OutputDecoder

State = Literal["running", "exited", "timeout", "killed"]
_STATES: dict[str, State] = {"exit": "exited", "timeout": "timeout"}
_FLOOD_PAUSE_S = 0.01


@dataclass(slots=True)
class Background:
    """A background process with the end of its output. Its sandbox lives as long. A stop of one of the runs in
    `run_ids`, its own and its parent's, ends it unless `keep` is set."""

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

    def append_output(self, text: str) -> None:
        self.output += text
        if (over := len(self.output) - limits.BACKGROUND_OUTPUT_CHARS_MAX) > 0:
            self.output, self.dropped = self.output[over:], self.dropped + over


class Processes:
    """The background processes of a server. A session sees its own; the number is limited per owner."""

    def __init__(self) -> None:
        self._processes: dict[str, Background] = {}

    def of(self, owner: str, session_id: str) -> list[Background]:
        return [background for background in self._processes.values() if background.is_of(owner, session_id)]

    def get(self, owner: str, session_id: str, process_id: str) -> Background | None:
        background = self._processes.get(process_id)
        return background if background is not None and background.is_of(owner, session_id) else None

    def make_room(self, owner: str) -> bool:
        """Drop the owner's oldest ended process if there are too many. False: all of the owner's are running."""
        own = [background for background in self._processes.values() if background.owner == owner]
        ended_id = next((background.id for background in own if background.ended.is_set()), None)
        if len(own) >= limits.BACKGROUND_MAX and ended_id is not None:
            del self._processes[ended_id]
            return True
        return len(own) < limits.BACKGROUND_MAX

    def end(self, session_ids: Collection[str]) -> None:
        if not self._processes:
            return
        for background in [each for each in self._processes.values() if each.session_id in session_ids]:
            background.forgotten = True
            background.process.kill()
            if background.task is not None:
                background.task.add_done_callback(
                    partial(self._processes.pop, background.id)
                )  # with the task as default

    async def end_run(self, run_id: str) -> None:
        """End the processes that a stopped run has started, and wait for their end. Its session is not notified."""
        own = [each for each in self._processes.values() if run_id in each.run_ids and not each.keep]
        running = [background for background in own if not background.ended.is_set()]
        for background in running:
            background.stopped = True
            background.process.interrupt()
        for background in running:
            await background.ended.wait()

    def add(
        self, ctx: ToolContext, command: str, process: Process, sandbox: Sandbox, *, notify: bool, keep: bool
    ) -> Background:
        """Follow a process until it ends. `notify`: tell its session of the end; `keep`: a stop of the run does not end
        it."""
        background = Background(f"proc_{secrets.token_hex(4)}", ctx.owner, ctx.session_id, command, process, sandbox)
        self._processes[background.id] = background
        # Only what outlives the turn: no reference to its conversation.
        resources = ctx.resources
        background.run_ids, background.keep = (
            frozenset({ctx.run_id, resources.engine.root_spec(resources.spec).run_id}),
            keep,
        )
        report = partial(_report_end, resources.engine, resources.session, ctx.owner, ctx.session_id, ctx.run_id)
        following = _follow(background, OutputDecoder(ctx.secrets), report if notify else None)
        background.task = asyncio.create_task(following)
        return background

    async def close(self) -> None:
        tasks = []
        for background in self._processes.values():
            background.process.kill()
            if background.task is not None and not background.ended.is_set():
                tasks.append(background.task)
        if tasks:
            await asyncio.wait(tasks)


async def _follow(
    background: Background, decoder: OutputDecoder, report: Callable[[str], Awaitable[None]] | None
) -> None:
    process = background.process
    try:
        async with process:
            async for data in process.chunks():
                background.append_output(decoder.feed(data))
                if len(data) == CHUNK_BYTES_MAX:  # a flood of output must not starve other tasks
                    await asyncio.sleep(_FLOOD_PAUSE_S)
            background.append_output(decoder.feed(b"", end=True))
            background.exit_code = await process.wait()
    finally:
        background.state, background.ended_at, background.sandbox = (
            _STATES.get(process.ended_by, "killed"),
            time.time(),
            None,
        )
        background.ended.set()
    if report is not None and not background.forgotten and not background.stopped:
        await report(f"[The background process {background.id} has ended with exit code {background.exit_code}.]")


async def _report_end(
    engine: RunEngine, session: SessionState, owner: str, session_id: str, run_id: str, text: str
) -> None:
    """Steer the turn that runs in the session with the text, or keep it as a notice for the next turn."""
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


class ProcessAction(ToolArguments):
    action: Literal["list", "poll", "wait", "kill"]
    session_id: Annotated[str, Meta(description="The id that terminal gave: proc_…")] = ""
    timeout: Annotated[float, Meta(ge=0, le=limits.PROCESS_WAIT_S_MAX, description="seconds to wait")] = (
        limits.PROCESS_WAIT_S
    )
    offset: Annotated[int, Meta(ge=0)] | None = None
    limit: Annotated[int, Meta(ge=1, le=5 * limits.PROCESS_SLICE_CHARS)] = limits.PROCESS_SLICE_CHARS


async def _run(ctx: ToolContext, args: ProcessAction) -> Answer:
    processes, action = ctx.resources.processes, args.action
    if action == "list":
        return {"processes": [_summary(background) for background in processes.of(ctx.owner, ctx.session_id)]}
    if not args.session_id:
        raise ToolError(f"`{action}` needs a session_id.", "invalid_arguments", "The action list shows them.")
    background = processes.get(ctx.owner, ctx.session_id, args.session_id)
    if background is None:
        if not re.fullmatch(r"proc_[0-9a-f]{8}", args.session_id):
            raise ToolError("There is no such process.", "not_found", "The action list shows those of this session.")
        return {"session_id": args.session_id, "state": "lost", "exit_code": None, "note": _LOST}
    if action == "kill":
        background.process.interrupt()
        await background.ended.wait()
    elif action == "wait":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(args.timeout), ctx.resources.session.hosts.call(ctx):
                await background.ended.wait()
    ctx.foreign = background.foreign
    return {**_summary(background), **_slice(background, args.offset, args.limit)}


def _summary(background: Background) -> Answer:
    summary: Answer = {"session_id": background.id, "state": background.state}
    summary |= {"exit_code": background.exit_code, "pid": background.process.pid}
    seconds = (background.ended_at or time.time()) - background.began_at
    return {**summary, "command": background.command[: limits.PREVIEW_CHARS_MAX], "seconds": round(seconds, 3)}


def _slice(background: Background, offset: int | None, limit: int) -> Answer:
    start = max(0, background.total - limit) if offset is None else min(offset, background.total)
    begin = max(start, background.dropped)
    text = background.output[begin - background.dropped :][:limit]
    dropped = {"dropped": begin - start} if begin > start else {}
    return {"output": text, "offset": begin, "next_offset": begin + len(text), "total": background.total, **dropped}


TOOL = ToolDef(
    name="process",
    toolset="terminal",
    description=(
        "Look after background processes of this session: list them; poll one for its state and output; wait for its "
        "end; kill it. Output comes from `offset` on (characters; give the last next_offset to read on), without one "
        "its end."
    ),
    arguments=ProcessAction,
    run=_run,
    effect=lambda args: "effect" if args.action == "kill" else "read",
    scope=lambda args: frozenset({f"process:{args.session_id}"}),
    timeout_s=None,
    available=why_no_commands,
    preview=lambda args: f"{args.action} {args.session_id}".strip(),
)
