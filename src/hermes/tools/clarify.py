"""The tool `clarify`: one question to the user, answered by whoever is there."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hermes.core import limits
from hermes.tools.framework.registry import Answer, ToolArguments, ToolContext, ToolDef


class Clarify(ToolArguments):
    question: Annotated[str, Meta(min_length=1, max_length=limits.CLARIFY_CHARS_MAX)]
    choices: Annotated[list[str], Meta(max_length=limits.CLARIFY_CHOICES_MAX)] | None = None


async def _run(ctx: ToolContext, args: Clarify) -> Answer:
    answer = await ctx.asking.clarify(ctx.call_id, args.question, args.choices or ())
    return {"answer": answer, "answered": answer is not None}


TOOL = ToolDef(
    name="clarify",
    toolset="clarify",
    description="Ask the user one question when going on would be a guess that matters. Offer up to four choices.",
    arguments=Clarify,
    run=_run,
    reconcile=lambda ctx, args, started: "not_done",  # an interrupted question is asked again
    timeout_s=None,
    alone=True,
    resumable=True,
    preview=lambda args: str(args.question),
)
