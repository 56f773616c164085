"""Sessions: list, create, search, import, export, read, change, fork, delete."""

from __future__ import annotations

import asyncio
import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal
from urllib.parse import quote

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import QUERY_CHARS_MAX
from hermes.server.errors import ApiError, invalid, refused
from hermes.server.headers import common_headers
from hermes.server.keys import caller_of
from hermes.server.models import ForkRequest, ImportRequest, SessionPatch, SessionRequest
from hermes.server.query_params import (
    ID_MAX,
    Cursor,
    Offset,
    Page,
    bad_cursor,
    offset_of,
    paging,
    place_of,
    shows_reasoning,
)
from hermes.server.render_session import (
    Branch,
    Match,
    Session,
    StoredMessage,
    message_match,
    message_object,
    session_object,
    title_match,
)
from hermes.server.request_bodies import parse, read_object
from hermes.server.request_options import max_iterations_of, session_id_of, toolsets_of, workdir_of
from hermes.server.routes import REASONING_HEADER, route
from hermes.server.turn_spec import route_of
from hermes.services import sessions
from hermes.store.base import SessionBusy
from hermes.store.codec import plain_title
from hermes.store.search import words_of

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

_SESSION = "/api/sessions/{session_id}"
_READ_BYTES = 256 * 1024
# export format: media type, file extension
_EXPORTS = {
    "json": ("application/json", "json"),
    "jsonl": ("application/jsonl", "jsonl"),
    "markdown": ("text/markdown", "md"),
}


# --- many sessions ---------------------------------------------------------------------------------------------------


class SessionQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=200, description="how many sessions")] = 50
    offset: Offset | None = None
    cursor: Cursor | None = None
    source: Annotated[str, Meta(description="only sessions that were begun there")] | None = None
    include_children: Annotated[bool, Meta(description="sessions of subagents too")] = False
    archived: Annotated[Literal["false", "true", "all"], Meta(description="whether archived ones are shown")] = "false"
    pinned: Annotated[bool, Meta(description="only those that are pinned, or are not")] | None = None
    order: Annotated[Literal["last_active", "started_at"], Meta(description="what comes first")] = "last_active"


class SessionList(Page[Session], kw_only=True):
    limit: int
    offset: int


@route("GET /api/sessions", "sessions", "List sessions", scope="sessions:read", features="session_resources")
async def list_sessions(context: ServerContext, request: web.Request, query: SessionQuery) -> SessionList:
    try:
        rows, around, total = await context.database().session_page(
            limit=query.limit + 1,
            offset=query.offset or 0,
            cursor=place_of(query.cursor),
            order=query.order,
            source=query.source,
            owner=caller_of(request).visible_owner,
            include_children=query.include_children,
            archived="all" if query.archived == "all" else query.archived == "true",
            pinned=query.pinned,
        )
    except ValueError:
        raise bad_cursor() from None
    page = rows[: query.limit]
    data = [
        session_object(row, around.get(row["id"], {}), caller_of(request).shown_owner(row["owner"])) for row in page
    ]
    following = page[-1]["cursor"] if len(rows) > query.limit else None
    return SessionList(data=data, **paging(following, total), limit=query.limit, offset=query.offset or 0)


class SessionAnswer(Struct, kw_only=True, tag_field="object", tag="hermes.session"):
    session: Session


@route(
    "POST /api/sessions",
    "session_create",
    "Create a session",
    scope="sessions:write",
    example={"title": "Kitchen", "system_prompt": "Be brief."},
    status=201,
    faults=(404, 409),
    link=("session_id", "/session/id"),
    idempotent=True,
)
async def create_session(context: ServerContext, request: web.Request, body: SessionRequest) -> SessionAnswer:
    if body.id is not None and body.session_id is not None and body.id != body.session_id:
        raise invalid("session_id", "id and session_id name different sessions.", "invalid_session_id")
    session_id = _new_id(body.id, "id") or _new_id(body.session_id, "session_id")
    route_of(context, caller_of(request), body.model)
    fields = {
        "owner": caller_of(request).owner,
        "title": _title(body.title),
        "model": body.model or None,
        "instructions": _system_prompt(context, body.system_prompt),
        "pinned": body.pinned,
        **await _turn_settings(context, request, msgspec.structs.asdict(body)),
    }
    id_field = "id" if body.id is not None else "session_id"
    create = partial(sessions.create, context.database().blocking, session_id, "api_server", id_field=id_field)
    return await _shown(context, request, await asyncio.to_thread(create, **fields))


class Imported(Struct, kw_only=True, tag_field="object", tag="hermes.session.import"):
    """What became of sessions that were sent in."""

    imported: int
    skipped: int
    detached: int
    errors: list[JsonObject]


@route(
    "POST /api/sessions/import",
    "session_import",
    "Import sessions",
    scope="sessions:write",
    example={"sessions": []},
    features="session_import",
    idempotent=True,
)
async def import_sessions(context: ServerContext, request: web.Request, body: ImportRequest) -> Imported:
    caller = caller_of(request)
    result = await context.database().import_sessions(
        body.sessions, owner=caller.owner, hide_others=caller.visible_owner is not None
    )
    return Imported(**{name: result[name] for name in Imported.__struct_fields__})


class SearchQuery(Struct, kw_only=True):
    q: Annotated[
        str, Meta(min_length=1, max_length=QUERY_CHARS_MAX, description='words, "phrases", prefix*, AND, OR, NOT')
    ]
    role: (
        Annotated[Literal["user", "assistant", "tool", "system"], Meta(description="only messages of this role")] | None
    ) = None
    source: Annotated[str, Meta(description="only sessions that were begun there")] | None = None
    session_id: Annotated[str, Meta(description="only this session")] | None = None
    sort: Annotated[Literal["relevance", "newest", "oldest"], Meta(description="what comes first")] = "relevance"
    limit: Annotated[int, Meta(ge=1, le=100, description="how many matches")] = 20
    cursor: Cursor | None = None


class MatchList(Page[Match], kw_only=True):
    """What a search found; not complete when its time was up."""

    complete: bool


@route(
    "GET /api/sessions/search", "session_search", "Search sessions", scope="sessions:read", features="session_search"
)
async def search_sessions(context: ServerContext, request: web.Request, query: SearchQuery) -> MatchList:
    """Titles that hold the words, then messages that do."""
    text, limit, offset = query.q.strip(), query.limit, offset_of(query.cursor)
    sessions_page, messages, total = await context.database().search_page(
        text,
        role=query.role,
        limit=limit + 1,
        offset=offset,
        sort=query.sort,
        source=query.source,
        session_id=query.session_id,
        owner=caller_of(request).visible_owner,
    )
    terms = words_of(text)
    data = [*(title_match(session, terms) for session in sessions_page), *map(message_match, messages)]
    following = str(offset + limit) if len(data) > limit else None
    return MatchList(data=data[:limit], **paging(following, total), complete=messages.complete)


# --- one session -----------------------------------------------------------------------------------------------------


async def session_of(context: ServerContext, request: web.Request, session_id: str | None = None) -> JsonObject:
    """The session of this id, or of the path's; other owners' sessions are not found."""
    session_id = request.match_info["session_id"] if session_id is None else session_id
    row: JsonObject | None = await context.database().get_session(session_id)
    if row is None or not caller_of(request).may_see(row["owner"]):
        raise sessions.unknown_session(session_id)
    return row


@route(f"GET {_SESSION}", "session", "Get a session", scope="sessions:read")
async def get_session(context: ServerContext, request: web.Request) -> SessionAnswer:
    return await _answer_with(context, request, await session_of(context, request))


@route(
    f"PATCH {_SESSION}",
    "session_update",
    "Update a session",
    scope="sessions:write",
    body=SessionPatch,
    example={"title": "Garden"},
)
async def patch_session(context: ServerContext, request: web.Request) -> SessionAnswer:
    """All of it or nothing."""
    raw = await read_object(context, request)
    for name in raw:
        if name not in SessionPatch.__struct_fields__:
            known = ", ".join(SessionPatch.__struct_fields__)
            message = f"{name!r} of a session cannot be changed; these can be: {known}."
            raise invalid(name, message, "unsupported_session_field")
    params = parse(raw, SessionPatch).model
    session_id = (await session_of(context, request))["id"]
    values = msgspec.structs.asdict(params)
    fields = {name: values[name] for name in ("archived", "model", "pinned") if values[name] is not msgspec.UNSET}
    if fields.get("model") == "":
        fields["model"] = None
    if params.system_prompt is not msgspec.UNSET:
        fields["instructions"] = _system_prompt(context, params.system_prompt)
    if isinstance(params.model, str):
        route_of(context, caller_of(request), params.model)
    fields |= await _turn_settings(context, request, values)
    if params.title is not msgspec.UNSET:
        fields["title"] = _title(params.title)
    if isinstance(params.end_reason, str):
        fields["end_reason"] = params.end_reason
    await asyncio.to_thread(partial(sessions.change, context.database().blocking, session_id, **fields))
    return await _shown(context, request, session_id)


class SessionDeleted(Struct, kw_only=True, tag_field="object", tag="hermes.session.deleted"):
    id: str
    deleted: bool = True


@route(f"DELETE {_SESSION}", "session_delete", "Delete a session", scope="sessions:write", faults=(409,))
async def delete_session(context: ServerContext, request: web.Request) -> SessionDeleted:
    session_id = (await session_of(context, request))["id"]
    db = context.database()
    try:
        deleted = await db.delete_session(session_id)
    except SessionBusy as error:
        busy = refused("session_busy", str(error), status=409)
        if run_id := (await db.around_sessions([session_id])).get(session_id, {}).get("active_run_id"):
            busy.headers["X-Hermes-Run-Id"] = run_id
        raise busy from None
    if not deleted:
        raise sessions.unknown_session(session_id)
    return SessionDeleted(id=session_id)


@route(
    f"POST {_SESSION}/fork",
    "session_fork",
    "Fork a session",
    scope="sessions:write",
    example={"title": "Kitchen, otherwise"},
    status=201,
    faults=(409,),
    features="session_fork session_fork_at_message",
    idempotent=True,
)
async def fork_session(context: ServerContext, request: web.Request, body: ForkRequest) -> SessionAnswer:
    new_id, title = _new_id(body.id, "id"), _title(body.title)
    session_id = (await session_of(context, request))["id"]
    db = context.database().blocking
    place = {"at_message_id": body.at_message_id, "before_message_id": body.before_message_id}
    new_id = await asyncio.to_thread(partial(sessions.fork, db, session_id, new_id, title, **place))
    return await _shown(context, request, new_id)


class BranchList(Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[Branch]


@route(
    f"GET {_SESSION}/branches",
    "session_branches",
    "List the forks that a session belongs to",
    scope="sessions:read",
    features="session_branches",
)
async def session_branches(context: ServerContext, request: web.Request) -> BranchList:
    """The session from which all others come, and everything that was forked from it, the oldest first."""
    session_id, caller = (await session_of(context, request))["id"], caller_of(request)
    rows = await context.database().branches(session_id)
    seen = {row["id"]: (row, shared) for row, shared in rows if caller.may_see(row["owner"])}
    around = await context.database().around_sessions(list(seen))
    data = []
    for row, shared in seen.values():
        session = session_object(row, around.get(row["id"], {}), caller.shown_owner(row["owner"]))
        data.append(Branch(**msgspec.structs.asdict(session), shared_messages=shared))
    return BranchList(data=data)


# --- what is in it ---------------------------------------------------------------------------------------------------


class MessageQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=2000, description="how many messages")] = 500
    before: Annotated[int, Meta(ge=0, le=ID_MAX, description="only those before this message")] | None = None
    after: Annotated[int, Meta(ge=0, le=ID_MAX, description="only those after this message")] | None = None
    offset: Offset | None = None
    order: (
        Annotated[
            Literal["asc", "desc", "oldest", "latest"],
            Meta(description="from the first on, or from the latest back; without it the latest, in order"),
        ]
        | None
    ) = None
    include_inactive: Annotated[
        bool, Meta(description="also messages that were taken back and those that only the model sees")
    ] = False


class MessageList(Struct, kw_only=True, tag_field="object", tag="list"):
    session_id: str
    data: list[StoredMessage]
    has_more: bool
    first_id: int | None
    last_id: int | None
    total: int | None


@route(
    f"GET {_SESSION}/messages",
    "session_messages",
    "List the messages of a session",
    scope="sessions:read",
    headers=(REASONING_HEADER,),
    features="session_message_paging",
)
async def session_messages(context: ServerContext, request: web.Request, query: MessageQuery) -> MessageList:
    return await message_page(context, request, await session_of(context, request), query)


async def message_page(
    context: ServerContext, request: web.Request, session: JsonObject, query: MessageQuery
) -> MessageList:
    backward, oldest = query.order in ("desc", "latest"), query.order in ("asc", "oldest")
    reasoning = shows_reasoning(context, request)
    session_id = session["id"]
    # Without order and position: the latest messages, in their order.
    forward = not backward and (query.after is not None or (oldest and query.before is None))
    rows, total = await context.database().message_page(
        session_id,
        query.include_inactive,
        limit=query.limit + 1,
        offset=query.offset or 0,
        before_id=query.before,
        after_id=query.after,
        order="asc" if forward else "desc",
    )
    page = rows[: query.limit]
    if not backward and not forward:
        page.reverse()
    data = [message_object(row, reasoning=reasoning, state=query.include_inactive) for row in page]
    return MessageList(
        session_id=session_id,
        data=data,
        has_more=len(rows) > query.limit,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        total=total,
    )


class ExportQuery(Struct, kw_only=True):
    format: Annotated[Literal["json", "jsonl", "markdown"], Meta(description="the form")] = "json"


@route(
    f"GET {_SESSION}/export",
    "session_export",
    "Export a session",
    scope="sessions:read",
    types=tuple(media_type for media_type, _ in _EXPORTS.values()),
    features="session_export",
)
async def export_session(context: ServerContext, request: web.Request, query: ExportQuery) -> web.Response:
    session = await session_of(context, request)
    media_type, suffix = _EXPORTS[query.format]
    data = await export(context, session, query.format)
    headers = {"Content-Disposition": attachment(f"{session['id']}.{suffix}")}
    return web.Response(body=data, content_type=media_type, charset="utf-8", headers=headers)


async def export(context: ServerContext, session: JsonObject, form: str) -> bytes:
    exported = await context.database().export_session(session["id"], context.redact)
    if exported is None:
        raise sessions.unknown_session(session["id"])
    if form == "markdown":
        from hermes.services.session_markdown import markdown

        return (await asyncio.to_thread(markdown, exported)).encode()
    return await asyncio.to_thread(msgspec.json.encode, exported) + (b"\n" if form == "jsonl" else b"")


class FileQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=1000, description="how many files")] = 200
    cursor: Cursor | None = None


class File(Struct, kw_only=True):
    id: str
    name: str
    bytes: int
    mime: str | None
    created_at: float
    direction: str


class FileList(Page[File], kw_only=True):
    """The files of a session."""


@route(
    f"GET {_SESSION}/files",
    "session_files",
    "List the files of a session",
    scope="sessions:read",
    features="session_files",
)
async def session_files(context: ServerContext, request: web.Request, query: FileQuery) -> FileList:
    offset = offset_of(query.cursor)
    session_id = (await session_of(context, request))["id"]
    rows = await context.database().list_files(session_id)
    end = offset + query.limit
    data = [File(**{name: row[name] for name in File.__struct_fields__}) for row in rows[offset:end]]
    return FileList(data=data, **paging(str(end) if len(rows) > end else None, len(rows)))


@route(
    f"GET {_SESSION}/files/{{file_id}}",
    "session_file",
    "Download a file of a session",
    scope="sessions:read",
    types=("*/*",),
)
async def session_file(context: ServerContext, request: web.Request) -> web.StreamResponse:
    session_id, file_id = (await session_of(context, request))["id"], request.match_info["file_id"]
    row = await context.database().get_file(session_id, file_id)
    opened = await asyncio.to_thread(_open, row["path"]) if row else None
    if row is None or opened is None:
        raise ApiError(404, f"There is no file {file_id!r} in this session.", "file_not_found")
    with opened[0] as data:
        headers = {
            **common_headers(request),
            "Content-Type": row["mime"] or "application/octet-stream",
            "Content-Length": str(opened[1]),
            "Content-Disposition": attachment(row["name"] or file_id),
        }
        response = web.StreamResponse(headers=headers)
        with contextlib.suppress(ConnectionError):  # the client has disconnected
            await response.prepare(request)
            while request.method != "HEAD" and (part := await asyncio.to_thread(data.read, _READ_BYTES)):
                await response.write(part)
    return response


def _open(path: str) -> tuple[BinaryIO, int] | None:
    try:
        data = open(path, "rb")  # noqa: SIM115  (closed by whoever sends it)
    except (OSError, ValueError):
        return None
    return data, os.fstat(data.fileno()).st_size


def attachment(name: str) -> str:
    """A Content-Disposition header for any file name."""
    plain = "".join(c if " " <= c <= "~" and c not in '"\\' else "_" for c in name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"


# --- fields ----------------------------------------------------------------------------------------------------------


async def _shown(context: ServerContext, request: web.Request, session_id: str) -> SessionAnswer:
    row = await context.database().get_session(session_id)
    if row is None:
        raise sessions.unknown_session(session_id)
    return await _answer_with(context, request, row)


async def _answer_with(context: ServerContext, request: web.Request, row: JsonObject) -> SessionAnswer:
    around = (await context.database().around_sessions([row["id"]])).get(row["id"], {})
    return SessionAnswer(session=session_object(row, around, caller_of(request).shown_owner(row["owner"])))


def _new_id(value: object, field: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise invalid(field, f"{field} must be text.", "invalid_session_id")
    return session_id_of(value, field)


def _title(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise invalid("title", "A title must be text.", "invalid_title")
    try:
        return plain_title(value)
    except ValueError as error:
        raise invalid("title", str(error), "invalid_title") from None


async def _turn_settings(context: ServerContext, request: web.Request, values: JsonMapping) -> JsonObject:
    """The session's settings for its turns that the request sets; validated like those of a run."""
    names = ("workdir", "toolsets", "max_iterations", "reasoning_effort")
    fields = {name: values[name] for name in names if values[name] is not msgspec.UNSET}
    if fields.get("workdir") is not None:
        await workdir_of(context, caller_of(request).owner, None, fields["workdir"])
    if fields.get("toolsets") is not None:
        fields["toolsets"] = sorted(toolsets_of(fields["toolsets"], "toolsets"))
    await max_iterations_of(context, fields.get("max_iterations"))
    return fields


def _system_prompt(context: ServerContext, value: object) -> str | None:
    chars_max = context.options.max_text_chars
    if value is not None and (not isinstance(value, str) or len(value) > chars_max):
        message = f"A system prompt is text of at most {chars_max} characters."
        raise invalid("system_prompt", message, "invalid_system_prompt")
    return value or None
