"""What an MCP client can do here: tools, sessions as resources, skills as prompts. Each is an operation of the API."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, unquote

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from hermes.core.events import Event
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import MCP_PROGRESS_S, SESSION_ID_CHARS_MAX
from hermes.runs.schedule import GRAMMAR
from hermes.server import discovery, runs
from hermes.server.errors import ApiError
from hermes.server.jobs import add_job
from hermes.server.keys import caller_of
from hermes.server.mcp_questions import Elicit, Questions
from hermes.server.models import JobRequest, SessionChatRequest
from hermes.server.outcome import Outcome
from hermes.server.request_bodies import parse
from hermes.server.session_chat import session_turn
from hermes.server.session_routes import (
    MessageQuery,
    SearchQuery,
    SessionQuery,
    export,
    list_sessions,
    message_page,
    search_sessions,
    session_of,
)
from hermes.server.skill_routes import skill_text
from hermes.server.sse import ClientGone
from hermes.server.start_gate import START
from hermes.server.turns import Turn
from hermes.services.session_markdown import name_of
from hermes.services.sessions import unknown_session

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

URI_PREFIX = "hermes://sessions/"
_MESSAGES = 50


@dataclass(slots=True)
class McpCall:
    """A request of an MCP client. `report` tells the client how far its request is, `elicit` asks its user. With a
    `run_id` the turn of the request has this id."""

    context: ServerContext
    request: web.Request
    report: Callable[[str], Awaitable[None]]
    run_id: str | None = None
    elicit: Elicit | None = None

    def check_scope(self, scope: str) -> None:
        if (refusal := self.context.scope_refusal(caller_of(self.request), scope)) is not None:
            raise refusal

    def may(self, scope: str) -> bool:
        return caller_of(self.request).opens(scope)


@dataclass(frozen=True, slots=True)
class McpTool:
    name: str
    description: str
    scope: str
    arguments: type[Struct]
    run: Callable[[McpCall, Any], Awaitable[Struct]]
    read_only: bool = True

    async def call(self, call: McpCall, arguments: JsonMapping) -> JsonObject:
        call.check_scope(self.scope)
        result = await self.run(call, parse(arguments, self.arguments, strict=True).model)
        document: JsonObject = msgspec.to_builtins(result)
        return document

    def schema(self) -> JsonObject:
        return _schema(self.arguments)


@functools.cache
def _schema(kind: type[Struct]) -> JsonObject:
    """The JSON Schema of a tool's arguments. It is shared: nobody changes it."""
    _, components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    schema: JsonObject = {**components.pop(kind.__name__), "additionalProperties": False}
    return {**schema, "$defs": components} if components else schema


# --- a turn ----------------------------------------------------------------------------------------------------------


class AskArguments(Struct, kw_only=True):
    message: Annotated[str, Meta(min_length=1, description="what to ask or to have done")]
    session_id: (
        Annotated[str, Meta(min_length=1, max_length=SESSION_ID_CHARS_MAX, description="continue this session")] | None
    ) = None
    model: Annotated[str, Meta(description="use this model")] | None = None
    instructions: Annotated[str, Meta(description="added to the system prompt of this turn")] | None = None


class Answer(Struct, kw_only=True):
    answer: str
    session_id: str
    run_id: str
    completed: bool
    usage: JsonObject
    hermes: JsonObject | msgspec.UnsetType = msgspec.UNSET


async def _ask(call: McpCall, params: AskArguments) -> Answer:
    context, request = call.context, call.request
    refusal = await context.rate_refusal(caller_of(request), counted=True)
    if refusal is not None:
        raise refusal
    given = {name: getattr(params, name) for name in ("message", "model", "instructions")}
    request[START] = start = await context.start_gate.enter()
    try:
        body = parse(given, SessionChatRequest)
        turn = await session_turn(context, request, body, params.session_id, on_detach="cancel")
        if call.run_id is not None:
            turn.spec = turn.spec.replace(run_id=call.run_id)
        if call.elicit is not None and turn.options.approvals is None:
            turn.spec = turn.spec.replace(answerable=True)
        try:
            await turn.admit()
            ended = await _followed(call, turn)
        finally:
            await turn.release()
    finally:
        start.leave()
    if ended.is_failure or ended.interrupted:  # a part of an answer would pass for the answer
        failure = ended.failure()
        failure.hermes |= {"session_id": turn.session_id, "run_id": turn.spec.run_id, "answer": ended.text}
        raise failure
    return Answer(
        answer=ended.text,
        session_id=turn.session_id,
        run_id=turn.spec.run_id,
        completed=ended.code is None,
        usage=ended.response_usage(),
        hermes=ended.flags() or msgspec.UNSET,
    )


async def _followed(call: McpCall, turn: Turn) -> Outcome:
    """Run the turn to its end and report its steps. It is stopped when whoever waits for it leaves."""
    try:
        run = await turn.start(streamed=True)
        credential = caller_of(call.request).credential
        async with (
            _alive(call) as report,
            Questions(call.context, turn.spec.run_id, credential, call.elicit) as questions,
            contextlib.aclosing(run.events(frozenset(), None)) as batches,
        ):
            async for batch in batches:
                for event in batch:
                    if not isinstance(event, Event):
                        continue
                    questions.hear(event)
                    if (step := _STEPS.get(event.type)) is not None:
                        await report(call.context.redact(step(event.data)))
        return await turn.outcome()
    except BaseException:
        await turn.leave()
        raise


@contextlib.asynccontextmanager
async def _alive(call: McpCall) -> AsyncIterator[Callable[[str], Awaitable[None]]]:
    """What steps are reported with. A step that takes long is reported again: clients give up on a request of which they
    hear nothing."""
    step, reported_at = "Started", time.monotonic()

    async def report(text: str) -> None:
        nonlocal step, reported_at
        step, reported_at = text, time.monotonic()
        await call.report(text)

    async def repeat() -> None:
        while True:
            await asyncio.sleep(max(0.01, reported_at + MCP_PROGRESS_S - time.monotonic()))
            if time.monotonic() - reported_at >= MCP_PROGRESS_S:
                with contextlib.suppress(ClientGone):
                    await report(step)

    await report(step)
    repeating = asyncio.create_task(repeat())
    try:
        yield report
    finally:
        repeating.cancel()
        await asyncio.wait([repeating])


# event of a run's log: the step that its client is told of
_STEPS: dict[str, Callable[[JsonMapping], str]] = {
    "run.queued": lambda data: "Waiting for the session",
    "model.started": lambda data: f"Asking {data.get('model') or 'the model'}",
    "model.retrying": lambda data: str(data.get("message") or "Asking the model again"),
    "tool.started": lambda data: f"{data['name']}: {data['preview']}" if data.get("preview") else str(data["name"]),
    "tool.finished": lambda data: f"{data['name']}: {data['status']}",
    "subagent.started": lambda data: f"Subagent: {data.get('goal') or ''}",
    "approval.requested": lambda data: f"Waiting for approval: {data.get('subject') or ''}",
    "clarify.requested": lambda data: f"Waiting for an answer: {data.get('question') or ''}",
    "context.compacted": lambda data: "Compacted the conversation",
    "notice": lambda data: str(data.get("message") or ""),
}


# --- the other tools -------------------------------------------------------------------------------------------------


class ReadArguments(MessageQuery, kw_only=True):
    session_id: Annotated[str, Meta(min_length=1, description="which session")]
    limit: Annotated[int, Meta(ge=1, le=2000, description="how many messages")] = _MESSAGES


class RunArguments(Struct, kw_only=True):
    run_id: Annotated[str, Meta(min_length=1, description="which run, as `ask` gave it")]


async def _read(call: McpCall, params: ReadArguments) -> Struct:
    session = await session_of(call.context, call.request, params.session_id)
    return await message_page(call.context, call.request, session, params)


TOOLS = {
    tool.name: tool
    for tool in (
        McpTool(
            "ask",
            "Ask the Hermes agent, or have it do something: one turn of a session, with the agent's own tools, on the "
            "agent's machine. Without session_id a new session begins; its id is in the answer, to continue it.",
            "chat sessions:write",
            AskArguments,
            _ask,
            read_only=False,
        ),
        McpTool(
            "list_sessions",
            "List the sessions (conversations) of Hermes, the last active first.",
            "sessions:read",
            SessionQuery,
            lambda call, params: list_sessions(call.context, call.request, params),
        ),
        McpTool(
            "search_sessions",
            "Search the titles and messages of all sessions of Hermes.",
            "sessions:read",
            SearchQuery,
            lambda call, params: search_sessions(call.context, call.request, params),
        ),
        McpTool(
            "read_session",
            "Read the messages of a session; without `order` the latest ones, in order.",
            "sessions:read",
            ReadArguments,
            _read,
        ),
        McpTool(
            "run_status",
            "Get the status of a run (one turn of the agent), its output once it has ended, and its open questions.",
            "runs|chat|jobs",
            RunArguments,
            lambda call, params: runs.shown_run(call.context, call.request, params.run_id),
        ),
        McpTool(
            "schedule",
            f"Have the agent do something (`prompt`) later or regularly (`schedule`). {GRAMMAR}",
            "jobs",
            JobRequest,
            lambda call, params: add_job(call.context, call.request, params),
            read_only=False,
        ),
    )
}


# --- sessions as resources -------------------------------------------------------------------------------------------


async def session_resources(call: McpCall, cursor: str | None) -> tuple[list[JsonObject], str | None]:
    """Sessions, the last active first, and where the list goes on. A key that may read none is shown none."""
    if not call.may("sessions:read"):
        return [], None
    page = await list_sessions(call.context, call.request, SessionQuery(cursor=cursor))
    resources = [
        {
            "uri": URI_PREFIX + quote(session.id, safe=""),
            "name": session.id,
            "title": name_of({"title": session.title, "preview": session.preview}),
        }
        for session in page.data
    ]
    return resources, page.next_cursor


async def read_resource(call: McpCall, uri: str) -> str:
    """The session of a URI as Markdown."""
    call.check_scope("sessions:read")
    session_id = unquote(uri.removeprefix(URI_PREFIX))
    if not uri.startswith(URI_PREFIX) or not session_id:
        raise ApiError(404, f"There is no resource {uri!r}.", "resource_not_found", "uri")
    if len(session_id) > SESSION_ID_CHARS_MAX:
        raise unknown_session(session_id)
    return (await export(call.context, await session_of(call.context, call.request, session_id), "markdown")).decode()


# --- skills as prompts -----------------------------------------------------------------------------------------------


async def skill_prompts(call: McpCall) -> list[discovery.Skill]:
    return (await discovery.skills(call.context, call.request)).data


async def skill_prompt(call: McpCall, name: str, task: str) -> tuple[str, str]:
    """The description of a skill, and the message that has a model follow it."""
    skill = await skill_text(call.context, call.request, name, None)
    return skill.description, f"Follow the skill {skill.name}: {task or skill.description}\n\n{skill.content}"
