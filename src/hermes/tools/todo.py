"""The tool `todo`: the plan of a session, stored only as the session's last answer of this tool."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from hermes.core import limits
from hermes.tools.framework.registry import Answer, ToolArguments, ToolContext, ToolDef, ToolError

State = Literal["pending", "in_progress", "completed", "cancelled"]


class Item(ToolArguments):
    id: Annotated[str, Meta(min_length=1, max_length=100)]
    content: Annotated[str, Meta(max_length=limits.TODO_CHARS_MAX)]
    status: State


class Todo(ToolArguments):
    todos: Annotated[list[Item], Meta(max_length=limits.TODO_ITEMS_MAX)] | None = None
    merge: bool = False


def _run(ctx: ToolContext, args: Todo) -> Answer:
    stored = (ctx.last_answer("todo", "todos") or {}).get("todos")
    items: list[dict[str, str]] = stored if isinstance(stored, list) else []
    if args.todos is not None:
        new = [item.as_json() for item in args.todos]
        items = list({item["id"]: item for item in (*items, *new)}.values()) if args.merge else new
    if len(items) > limits.TODO_ITEMS_MAX:
        fault = f"A list has at most {limits.TODO_ITEMS_MAX} items; this one would have {len(items)}."
        raise ToolError(fault, "limit_reached", "Leave out what is done, and make one item of what belongs together.")
    if len({item["id"] for item in items}) != len(items):
        raise ToolError("Two items have the same id; give each its own.", "invalid_arguments")
    counts = {state: sum(item["status"] == state for item in items) for state in get_args(State)}
    return {"todos": items, "counts": counts}


TOOL = ToolDef(
    name="todo",
    toolset="todo",
    description=(
        "Plan and track work of several steps. Send the whole list, or with merge=true only the changed items; "
        "without todos it shows the list. Keep one item in_progress; mark items completed as soon as they are."
    ),
    arguments=Todo,
    run=_run,
    effect="idempotent",
    scope=lambda _: frozenset({"todo"}),
    preview=lambda args: f"{len(args.todos)} items" if args.todos is not None else "show",
)
