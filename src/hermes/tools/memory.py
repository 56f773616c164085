"""The tool `memory`: facts for every session, small enough to be in every prompt."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hermes.core.json_types import JsonObject
from hermes.services.memory import Target, memory_file
from hermes.tools.framework import approvals
from hermes.tools.framework.registry import Answer, Prepared, ToolArguments, ToolContext, ToolDef

_Action = Literal["add", "replace", "remove", "list"]
_OldText = Annotated[str, Meta(description="A piece of the entry to replace or remove; must fit exactly one.")]


class Operation(ToolArguments):
    action: _Action | None = None
    content: str | None = None
    old_text: _OldText | None = None


class Memory(ToolArguments):
    target: Target
    action: _Action = "list"
    content: str | None = None
    old_text: _OldText | None = None
    operations: Annotated[list[Operation], Meta(description="Several changes, made together or not at all.")] | None = (
        None
    )

    def changes(self) -> list[JsonObject]:
        if self.operations:
            return [operation.as_json() for operation in self.operations]
        return [] if self.action == "list" else [self.as_json()]


async def _prepare(ctx: ToolContext, args: Memory) -> Prepared:
    if changes := args.changes():
        required = ctx.settings.memory.write_approval
        subject = "\n".join(map(_describe, changes))
        await approvals.write(ctx, "memory", subject, required=required, reason="Memory writes are to be approved.")
    return Prepared()


def _describe(change: JsonObject) -> str:
    old, new = change.get("old_text") or "", change.get("content") or ""
    return f"{change.get('action', 'add')}: {f'{old} -> {new}' if old and new else old or new}"


async def _run(ctx: ToolContext, args: Memory) -> Answer:
    file = memory_file(ctx.home, ctx.settings, args.target, ctx.owner, ctx.session_key)
    if not (changes := args.changes()):
        return file.describe(await ctx.blocking(file.entries))
    entries = await ctx.blocking(lambda: file.change(changes, ctx.secrets))
    return {**file.describe(entries), "note": "It will be in view from the next session or compaction on."}


TOOL = ToolDef(
    name="memory",
    toolset="memory",
    description=(
        "Keep facts for later sessions: `user` for who the user is and likes, `memory` for everything else. "
        "Short entries; replace what has changed instead of adding to it."
    ),
    arguments=Memory,
    run=_run,
    prepare=_prepare,
    effect=lambda args: "effect" if args.changes() else "read",
    scope=lambda _: frozenset({"memory"}),
    available=lambda settings: None if settings.memory.memory_enabled else "memory is turned off",
    preview=lambda args: f"{args.action} {args.target}: {args.content or args.old_text or ''}",
)
