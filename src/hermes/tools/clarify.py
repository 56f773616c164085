"""The tool `clarify`: one question to the user, answered by whoever is there."""

from __future__ import annotations

from hermes.core.limits import CLARIFY_CHARS_MAX, CLARIFY_CHOICES_MAX
from hermes.tools.framework.registry import Answer, Args, ToolContext, ToolDef, object_schema


async def _run(ctx: ToolContext, args: Args) -> Answer:
    answer = await ctx.asking.clarify(ctx.call_id, args["question"], args.get("choices", []))
    return {"answer": answer, "answered": answer is not None}


TOOL = ToolDef(
    name="clarify",
    toolset="clarify",
    description="Ask the user one question when going on would be a guess that matters. Offer up to four choices.",
    parameters=object_schema(
        {
            "question": {"type": "string", "minLength": 1, "maxLength": CLARIFY_CHARS_MAX},
            "choices": {"type": "array", "items": {"type": "string"}, "maxItems": CLARIFY_CHOICES_MAX},
        },
        "question",
    ),
    run=_run,
    reconcile=lambda ctx, args, started: "not_done",  # a question that was cut off is asked again
    timeout_s=None,
    alone=True,
    resumable=True,
    preview=lambda args: str(args["question"]),
)
