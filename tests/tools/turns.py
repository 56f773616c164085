"""Turns in which a scripted model calls one tool, and the answers of the tool."""

from __future__ import annotations

import json
from typing import Any

from agent.harness import CompletedRun, Harness, Json
from hermes.core.text import text_of
from hermes.tools.framework.registry import ToolDef
from support.model_server import Call, ModelServer, Reply


async def turn(harness: Harness, server: ModelServer, tool: ToolDef, *arguments: Json, **fields: Any) -> CompletedRun:
    """A turn in which the model calls a tool once for each of the arguments, one step after the other."""
    harness.offer(tool)
    server.script = [*(Reply(tool_calls=[Call(tool.name, argument)]) for argument in arguments), Reply(text="Done.")]
    run = await harness.run(server, **fields)
    assert run.result["final_response"] == "Done."
    return run


async def tool_answers(
    harness: Harness, server: ModelServer, tool: ToolDef, *arguments: Json, **fields: Any
) -> list[Json]:
    """Run such a turn, and return the answers."""
    return answers(await turn(harness, server, tool, *arguments, **fields))


def answers(run: CompletedRun) -> list[Json]:
    """The answers of the tools, without the frame around foreign content."""
    return [json.loads(unframed(text_of(m["content"]))) for m in run.result["messages"] if m["role"] == "tool"]


def unframed(content: str) -> str:
    return "\n".join(content.split("\n")[1:-1]) if content.startswith("[") else content
