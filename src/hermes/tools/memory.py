"""The tool `memory`: what is worth knowing in every session, small enough to be always in view."""

from __future__ import annotations

from hermes.core.json_types import JsonObject
from hermes.services.memory import FILES, memory_file
from hermes.tools.framework import approvals
from hermes.tools.framework.registry import Answer, Args, Prepared, ToolContext, ToolDef


def _operations(args: Args) -> list[JsonObject]:
    return args.get("operations") or ([] if args.get("action", "list") == "list" else [args])


async def _prepare(ctx: ToolContext, args: Args) -> Prepared:
    if operations := _operations(args):
        wanted = ctx.settings.memory.write_approval
        subject = "\n".join(map(_describe, operations))
        await approvals.write(ctx, "memory", subject, wanted=wanted, reason="Memory writes are to be approved.")
    return Prepared()


def _describe(operation: JsonObject) -> str:
    """A change as it is approved: what goes, and what comes in its place."""
    old, new = operation.get("old_text") or "", operation.get("content") or ""
    return f"{operation.get('action', 'add')}: {f'{old} -> {new}' if old and new else old or new}"


async def _run(ctx: ToolContext, args: Args) -> Answer:
    file = memory_file(ctx.home, ctx.settings, args["target"], ctx.owner, ctx.session_key)
    if not (operations := _operations(args)):
        return file.describe(await ctx.blocking(file.entries))
    entries = await ctx.blocking(lambda: file.change(operations, ctx.secrets))
    return {**file.describe(entries), "note": "It will be in view from the next session or compaction on."}


_OPERATION = {
    "action": {"type": "string", "enum": ["add", "replace", "remove", "list"]},
    "content": {"type": "string"},
    "old_text": {"type": "string", "description": "A piece of the entry to replace or remove; must fit exactly one."},
}

TOOL = ToolDef(
    name="memory",
    toolset="memory",
    description=(
        "Keep facts for later sessions: `user` for who the user is and likes, `memory` for everything else. "
        "Short entries; replace what has changed instead of adding to it."
    ),
    parameters={
        "type": "object",
        "properties": {
            "target": {"type": "string", "enum": list(FILES)},
            **_OPERATION,
            "operations": {
                "type": "array",
                "items": {"type": "object", "properties": _OPERATION, "additionalProperties": False},
                "description": "Several changes, made together or not at all.",
            },
        },
        "required": ["target"],
        "additionalProperties": False,
    },
    run=_run,
    prepare=_prepare,
    effect=lambda args: "read" if args.get("action", "list") == "list" and not args.get("operations") else "effect",
    scope=lambda _: frozenset({"memory"}),
    available=lambda settings: None if settings.memory.memory_enabled else "memory is turned off",
    preview=lambda args: (
        f"{args.get('action', 'list')} {args['target']}: {args.get('content') or args.get('old_text') or ''}"
    ),
)
