"""The tool `todo`: the plan of a session. The list is the session's last answer of this tool; it is kept nowhere else."""

from __future__ import annotations

from typing import Any

from hermes.core.limits import TODO_CHARS_MAX, TODO_ITEMS_MAX
from hermes.tools.framework.registry import Answer, Args, ToolContext, ToolDef, ToolError, object_schema

STATES = ("pending", "in_progress", "completed", "cancelled")


def _run(ctx: ToolContext, args: Args) -> Answer:
    known = (ctx.last_answer("todo", "todos") or {}).get("todos")
    items: list[dict[str, Any]] = known if isinstance(known, list) else []
    given: list[dict[str, Any]] | None = args.get("todos")
    if given is not None:
        if args.get("merge"):
            by_id = {item["id"]: item for item in items}
            by_id.update({item["id"]: item for item in given})
            items = list(by_id.values())
        else:
            items = given
    ids = [item["id"] for item in items]
    if len(items) > TODO_ITEMS_MAX:
        fault = f"A list has at most {TODO_ITEMS_MAX} items; this one would have {len(items)}."
        raise ToolError(fault, "limit_reached", "Leave out what is done, and make one item of what belongs together.")
    if len(set(ids)) != len(ids):
        raise ToolError("Two items have the same id; give each its own.", "invalid_arguments")
    counts = {state: sum(item["status"] == state for item in items) for state in STATES}
    return {"todos": items, "counts": counts}


TOOL = ToolDef(
    name="todo",
    toolset="todo",
    description=(
        "Plan and track work of several steps. Send the whole list, or with merge=true only the changed items; "
        "without todos it shows the list. Keep one item in_progress; mark items completed as soon as they are."
    ),
    parameters=object_schema(
        {
            "todos": {
                "type": "array",
                "maxItems": TODO_ITEMS_MAX,
                "items": object_schema(
                    {
                        "id": {"type": "string", "minLength": 1, "maxLength": 100},
                        "content": {"type": "string", "maxLength": TODO_CHARS_MAX},
                        "status": {"type": "string", "enum": list(STATES)},
                    },
                    "id",
                    "content",
                    "status",
                ),
            },
            "merge": {"type": "boolean"},
        }
    ),
    run=_run,
    effect="idempotent",
    scope=lambda _: frozenset({"todo"}),
    preview=lambda args: f"{len(args['todos'])} items" if args.get("todos") is not None else "show",
)
