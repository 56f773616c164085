"""The tool `process`: looking after what runs in the background."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

from hermes.core.limits import PREVIEW_CHARS_MAX, PROCESS_SLICE_CHARS, PROCESS_WAIT_S, PROCESS_WAIT_S_MAX
from hermes.sandbox.choose import no_commands
from hermes.tools.background import Background
from hermes.tools.registry import Answer, Args, ToolContext, ToolDef, ToolError, object_schema

_LOST = "Nothing is known of it here: it ended when the server did, or was never started in this session."


async def _run(ctx: ToolContext, args: Args) -> Answer:
    processes, action = ctx.world.processes, args["action"]
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
            async with asyncio.timeout(args.get("timeout", PROCESS_WAIT_S)), ctx.world.desk.hosts.call(ctx):
                await found.ended.wait()
    ctx.foreign = found.foreign
    return {**_summary(found), **_slice(found, args.get("offset"), args.get("limit", PROCESS_SLICE_CHARS))}


def _summary(found: Background) -> Answer:
    told = {"session_id": found.id, "state": found.state, "exit_code": found.exit_code, "pid": found.process.pid}
    seconds = (found.ended_at or time.time()) - found.began_at
    return {**told, "command": found.command[:PREVIEW_CHARS_MAX], "seconds": round(seconds, 3)}


def _slice(found: Background, offset: int | None, limit: int) -> Answer:
    """What it has said from an offset on, or last. What was dropped by then is named."""
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
    available=no_commands,
    preview=lambda args: f"{args['action']} {args.get('session_id', '')}".strip(),
)
