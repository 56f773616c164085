"""Turns of a session: parses a message, builds a turn, and renders its answer or stream. They outlive their client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web
from msgspec import UNSET

from hermes.core.spec import OnDetach, RunSpec
from hermes.server.content import check_not_empty, content
from hermes.server.errors import ApiError, answer, invalid
from hermes.server.keys import caller_of
from hermes.server.models import SessionChatRequest, SessionCompactRequest
from hermes.server.render_run import THOUGHTS
from hermes.server.render_session import ROWS, SessionRenderer
from hermes.server.request_bodies import Body, read
from hermes.server.request_options import parse_options
from hermes.server.routes import TURN_FAULTS, TURN_HEADERS, route
from hermes.server.session_routes import session_of
from hermes.server.shapes import SessionCompacted, SessionTurn, Usage
from hermes.server.turn_spec import build_spec
from hermes.server.turns import Turn
from hermes.store.sessions import new_session_id

if TYPE_CHECKING:
    from hermes.server.context import ServerContext


@route(
    "POST /api/sessions/{session_id}/chat",
    "session_chat",
    "Send a message to a session",
    scope="chat sessions:write",
    headers=TURN_HEADERS,
    body=SessionChatRequest,
    example={"message": "Which files are here?"},
    answers=SessionTurn,
    faults=TURN_FAULTS,
    features="session_chat session_turn_lease",
    idempotent=True,
    begins_turns=True,
)
async def session_chat(context: ServerContext, request: web.Request) -> web.StreamResponse:
    body = await read(context, request, SessionChatRequest)
    turn = await session_turn(context, request, body, request.match_info["session_id"])
    ended = await turn.complete()
    headers = turn.response_headers(ended, body)
    message = {"role": "assistant", "content": ended.text}
    if ended.reasoning and _shows_reasoning(body, turn):
        message["reasoning_content"] = ended.reasoning
    result = SessionTurn(
        object="hermes.session.chat.completion",
        session_id=turn.session_id,
        run_id=turn.spec.run_id,
        message=message,
        usage=Usage(**ended.response_usage()),
        completed=ended.code is None,
        partial=ended.partial,
        interrupted=ended.interrupted,
        hermes=ended.flags() or UNSET,
    )
    return answer(result, 200, headers)


@route(
    "POST /api/sessions/{session_id}/chat/stream",
    "session_chat_stream",
    "Send a message to a session and stream the answer",
    scope="chat sessions:write",
    headers=TURN_HEADERS,
    body=SessionChatRequest,
    example={"message": "Which files are here?"},
    faults=TURN_FAULTS,
    stream="events from `run.started` to `done`",
    features="session_chat_streaming",
    idempotent=True,
    begins_turns=True,
)
async def session_chat_stream(context: ServerContext, request: web.Request) -> web.StreamResponse:
    body = await read(context, request, SessionChatRequest)
    turn = await session_turn(context, request, body, request.match_info["session_id"], announces=True)
    try:
        await turn.admit()
        spec = turn.spec
        renderer = SessionRenderer(spec.session_id, spec.run_id, spec.user_message, context.redact)
        rows = ROWS | THOUGHTS if _shows_reasoning(body, turn) else ROWS
        return await turn.stream(renderer, {**turn.headers(), **body.headers()}, rows)
    finally:
        await turn.release()


@route(
    "POST /api/sessions/{session_id}/compact",
    "session_compact",
    "Compact a session",
    scope="sessions:write",
    headers=TURN_HEADERS,
    body=SessionCompactRequest,
    example={"focus": "the shopping list"},
    answers=SessionCompacted,
    faults=TURN_FAULTS,
    features="session_compact",
    idempotent=True,
    begins_turns=True,
)
async def compact_session(context: ServerContext, request: web.Request) -> web.StreamResponse:
    """A turn that asks nothing. It does not wait for another one to end."""
    body = await read(context, request, SessionCompactRequest)
    params, longest = body.model, context.options.max_text_chars
    for name in ("focus", "instructions"):
        if len(getattr(params, name) or "") > longest:
            raise invalid(name, f"{name} is longer than {longest} characters.", "string_above_max_length")
    options = parse_options(context, request)
    session = await session_of(context, request)
    spec = RunSpec(
        user_message="",
        session_id=session["id"],
        kind="session",
        owner=session["owner"],
        compact="\n".join(text for text in (params.focus, params.instructions) if text),
    )
    spec = build_spec(context, caller_of(request), options, body, spec)
    turn = Turn(context, request, spec, options, wait_s=0)
    try:
        await turn.acquire_session()
        ended = await turn.finish()
    finally:
        await turn.release()
    if ended.code is not None:
        raise ended.failure()
    run_id = turn.spec.run_id
    done = [e.data for e in await context.app.engine.durable(run_id) if e.type == "context.compacted"]
    compacted = SessionCompacted(
        object="hermes.session.compaction",
        session_id=session["id"],
        run_id=run_id,
        compacted=bool(done),
        messages_archived=sum(data["messages_archived"] for data in done),
        tokens_before=done[0]["tokens_before"] if done else None,
        tokens_after=done[-1]["tokens_after"] if done else None,
        usage=ended.response_usage(),
    )
    return answer(compacted, 200, {**turn.headers(ended), **body.headers()})


def _shows_reasoning(body: Body[SessionChatRequest], turn: Turn) -> bool:
    include_reasoning = body.model.include_reasoning
    return turn.options.reasoning if include_reasoning is None else include_reasoning


async def session_turn(
    context: ServerContext,
    request: web.Request,
    body: Body[SessionChatRequest],
    session_id: str | None,
    *,
    announces: bool = False,
    on_detach: OnDetach = "continue",
) -> Turn:
    """A turn of an existing session, or without an id of a new one. `announces`: see `build_spec`."""
    params = body.model
    options = parse_options(context, request, user=params.user)
    if session_id is None:
        session = {"id": new_session_id(), "owner": caller_of(request).owner}
    else:
        session = await session_of(context, request, session_id)
    spec = RunSpec(
        user_message=_message(params, context.options.max_text_chars),
        session_id=session["id"],
        kind="session",
        owner=session["owner"],
        instructions=_instructions(params, context.options.max_text_chars),
        on_detach=on_detach,
    )
    spec = build_spec(context, caller_of(request), options, body, spec, announces=announces)
    return Turn(context, request, spec, options)


def _message(params: SessionChatRequest, text_chars_max: int) -> Any:
    for name in ("message", "input"):
        given = getattr(params, name)
        if given is not None:
            message = content(given, name, text_chars_max)
            check_not_empty(message, name)
            return message
    raise ApiError(400, "The request has no message.", "missing_message", "message")


def _instructions(params: SessionChatRequest, text_chars_max: int) -> str | None:
    for name in ("system_message", "instructions"):
        given = getattr(params, name)
        if given is None:
            continue
        if not isinstance(given, str):
            raise invalid(name, f"{name} must be text.", "invalid_system_message")
        if len(given) > text_chars_max:
            raise invalid(name, f"{name} is longer than {text_chars_max} characters.", "string_above_max_length")
        return given
    return None
