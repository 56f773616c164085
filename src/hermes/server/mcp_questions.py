"""Approvals and questions of a turn, put to the user of an MCP client that has forms for them (elicitation)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hermes.core.events import Event
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.spec import Control, ControlKind

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

# A message and the schema of a form: what was filled in; None where the user has declined.
Elicit = Callable[[str, JsonObject], Awaitable[JsonMapping | None]]
_NO_ANSWER = "[The user gave no answer.]"


class Questions:
    """The open questions of one run. One that is answered elsewhere is taken back."""

    def __init__(self, context: ServerContext, run_id: str, credential: str, elicit: Elicit | None) -> None:
        self._context, self._run_id, self._credential, self._elicit = context, run_id, credential, elicit
        self._open: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._open.values():
            task.cancel()
        if self._open:
            await asyncio.wait(self._open.values())

    def hear(self, event: Event) -> None:
        data = event.data
        if self._elicit is None:
            return
        if event.type == "approval.requested":
            self._begin(data["approval_id"], self._approve(data, self._elicit))
        elif event.type == "clarify.requested":
            self._begin(data["request_id"], self._clarify(data, self._elicit))
        elif event.type in ("approval.resolved", "clarify.resolved"):
            task = self._open.get(str(data.get("approval_id") or data.get("request_id")))
            if task is not None:
                task.cancel()

    def _begin(self, question_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._open[question_id] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._open.pop(question_id, None))

    async def _approve(self, data: JsonMapping, elicit: Elicit) -> None:
        text = self._context.redact(f"{data['reason']}\n\n{data['subject']}")
        filled = await elicit(text, _form("choice", "Allow it?", data["choices"]))
        choice = (filled or {}).get("choice")
        await self._answer("approve", id=data["approval_id"], choice=choice if choice in data["choices"] else "deny")

    async def _clarify(self, data: JsonMapping, elicit: Elicit) -> None:
        filled = await elicit(self._context.redact(data["question"]), _form("answer", "Answer", data["choices"]))
        await self._answer("answer", id=data["request_id"], answer=str((filled or {}).get("answer") or _NO_ANSWER))

    async def _answer(self, kind: ControlKind, **data: object) -> None:
        control = Control(kind, data, surface="mcp", credential=self._credential)
        await self._context.app.engine.control(self._run_id, control)


def _form(name: str, title: str, choices: list[str]) -> JsonObject:
    field: JsonObject = {"type": "string", "title": title, **({"enum": list(choices)} if choices else {})}
    return {"type": "object", "properties": {name: field}, "required": [name]}
