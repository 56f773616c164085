"""Sessions as resources: listed, made, searched, taken in, read, changed, branched and forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

import msgspec
from aiohttp import web

from hermes.core.limits import QUERY_CHARS_MAX
from hermes.server import middleware
from hermes.server.errors import ApiError, answer, invalid, refused
from hermes.server.models import ForkRequest, ImportRequest, SessionPatch, SessionRequest
from hermes.server.query_params import (
    OFFSET_MAX,
    bad_cursor,
    cursor_of,
    flag,
    listed,
    number_of,
    offset_of,
    shows_reasoning,
    whole,
    word,
)
from hermes.server.render_session import (
    MARKS,
    file_object,
    message_match,
    message_object,
    session_object,
    title_match,
)
from hermes.server.request_bodies import parse, read, read_object
from hermes.server.request_options import max_iterations_of, session_id_of, toolsets_of, workdir_of
from hermes.server.turns import route_of
from hermes.store.base import SessionBusy, SessionExists
from hermes.store.codec import BadSessionId, plain_title
from hermes.store.search import words_of

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

Json = dict[str, Any]
_ROLES = ("user", "assistant", "tool", "system")
_ORDERS = {"asc": "asc", "oldest": "asc", "desc": "desc", "latest": "desc"}
_READ_BYTES = 256 * 1024
# form of an export: its media type, and how its file ends
_EXPORTS = {
    "json": ("application/json", "json"),
    "jsonl": ("application/jsonl", "jsonl"),
    "markdown": ("text/markdown", "md"),
}


# --- many sessions ---------------------------------------------------------------------------------------------------


async def list_sessions(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /api/sessions"""
    limit, offset = whole(request, "limit", 50, 1, 200), whole(request, "offset", 0, 0, OFFSET_MAX)
    archived = word(request, "archived", ("false", "true", "all")) or "false"
    chosen: Json = {
        "source": request.query.get("source") or None,
        "owner": adapter.visible_owner(request),
        "include_children": flag(request, "include_children"),
        "archived": "all" if archived == "all" else archived == "true",
        "pinned": flag(request, "pinned") if request.query.get("pinned") else None,
    }
    order = word(request, "order", ("last_active", "started_at")) or "last_active"
    place = cursor_of(request)
    try:
        found, around, total = await adapter.database().session_page(
            limit=limit + 1, offset=offset, cursor=place, order=order, **chosen
        )
    except ValueError:
        raise bad_cursor() from None
    page = found[:limit]
    data = [
        {**session_object(session, around.get(session["id"], {})), **adapter.owner_field(session["owner"])}
        for session in page
    ]
    following = page[-1]["cursor"] if len(found) > limit else None
    return answer(listed(data, following, total, limit=limit, offset=offset))


async def create(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /api/sessions"""
    body = await read(adapter, request, SessionRequest)
    asked = body.model
    if asked.id is not None and asked.session_id is not None and asked.id != asked.session_id:
        raise invalid("session_id", "id and session_id name different sessions.", "invalid_session_id")
    session_id = _new_id(asked.id, "id") or _new_id(asked.session_id, "session_id")
    route_of(adapter, asked.model)
    fields = {
        "owner": adapter.owner_of(request),
        "title": _title(asked.title),
        "model": asked.model or None,
        "instructions": _system_prompt(adapter, asked.system_prompt),
        "pinned": asked.pinned,
        **await _turn_settings(adapter, request, msgspec.structs.asdict(asked)),
    }
    try:
        made = await adapter.database().create_session(session_id, "api_server", exist_ok=False, **fields)
    except SessionExists as error:
        raise ApiError(409, str(error), "session_exists", "id") from None
    except BadSessionId as error:
        raise invalid("id" if asked.id is not None else "session_id", str(error), "invalid_session_id") from None
    except ValueError as error:  # the id is sound: it is the title that is taken
        raise invalid("title", str(error), "invalid_title") from None
    return await _shown(adapter, made, 201, body.headers())


async def import_sessions(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /api/sessions/import"""
    body = await read(adapter, request, ImportRequest)
    owner = adapter.owner_of(request)
    hides = adapter.visible_owner(request) is not None
    done = await adapter.database().import_sessions(body.model.sessions, owner=owner, hide_others=hides)
    told = {name: done[name] for name in ("imported", "skipped", "detached", "errors")}
    return answer({"object": "hermes.session.import", **told}, 200, body.headers())


async def search(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /api/sessions/search: titles that hold the words, then messages that do."""
    query = request.query.get("q", "").strip()
    if not query:
        raise invalid("q", "Missing required parameter: 'q'.", "missing_required_parameter")
    if len(query) > QUERY_CHARS_MAX:
        raise invalid("q", f"'q' is longer than {QUERY_CHARS_MAX} characters.", "string_above_max_length")
    limit, offset = whole(request, "limit", 20, 1, 100), offset_of(request)
    role = word(request, "role", _ROLES)
    sort = word(request, "sort", ("relevance", "newest", "oldest")) or "relevance"
    chosen: Json = {name: request.query.get(name) or None for name in ("source", "session_id")}
    chosen["owner"] = adapter.visible_owner(request)
    titled, said, total = await adapter.database().search_page(
        query, role=role, limit=limit + 1, offset=offset, sort=sort, marks=MARKS, **chosen
    )
    words = words_of(query)
    data = [*(title_match(one, words) for one in titled), *map(message_match, said)]
    following = str(offset + limit) if len(data) > limit else None
    return answer(listed(data[:limit], following, total, complete=said.complete))


# --- one session -----------------------------------------------------------------------------------------------------


async def session_of(adapter: APIServerAdapter, request: web.Request) -> Json:
    """The session that a path names; one of somebody else's is as good as none."""
    session_id = request.match_info["session_id"]
    found: Json | None = await adapter.database().get_session(session_id)
    if found is None or not adapter.may_see(request, found["owner"]):
        raise unknown_session(session_id)
    return found


def unknown_session(session_id: str) -> ApiError:
    """There is no such session."""
    return ApiError(404, f"There is no session {session_id!r}.", "session_not_found")


async def get(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /api/sessions/{session_id}"""
    found = await session_of(adapter, request)
    around = await adapter.database().around_sessions([found["id"]])
    return _answer_with(adapter, found, around)


async def update(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """PATCH /api/sessions/{session_id}: all of it or nothing."""
    raw = await read_object(adapter, request)
    for name in raw:
        if name not in SessionPatch.__struct_fields__:
            known = ", ".join(SessionPatch.__struct_fields__)
            message = f"{name!r} of a session cannot be changed; these can be: {known}."
            raise invalid(name, message, "unsupported_session_field")
    asked = parse(raw, SessionPatch).model
    session_id = (await session_of(adapter, request))["id"]
    given = msgspec.structs.asdict(asked)
    fields = {name: given[name] for name in ("archived", "model", "pinned") if given[name] is not msgspec.UNSET}
    if fields.get("model") == "":
        fields["model"] = None
    if asked.system_prompt is not msgspec.UNSET:
        fields["instructions"] = _system_prompt(adapter, asked.system_prompt)
    if isinstance(asked.model, str):
        route_of(adapter, asked.model)
    fields |= await _turn_settings(adapter, request, given)
    title = msgspec.UNSET if asked.title is msgspec.UNSET else _title(asked.title)
    database = adapter.database()
    db = database.blocking

    def change() -> None:
        if title is not msgspec.UNSET:
            try:
                db.set_session_title(session_id, title)
            except ValueError as error:
                raise invalid("title", str(error), "invalid_title") from None
        if fields:
            db.update_session(session_id, **fields)
        if isinstance(asked.end_reason, str):
            try:
                db.end_session(session_id, asked.end_reason)
            except ValueError as error:
                raise invalid("end_reason", str(error)) from None

    try:
        await database.transaction(change)
    except KeyError:
        raise unknown_session(session_id) from None
    return await _shown(adapter, session_id)


async def delete(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """DELETE /api/sessions/{session_id}"""
    session_id = (await session_of(adapter, request))["id"]
    db = adapter.database()
    try:
        gone = await db.delete_session(session_id)
    except SessionBusy as error:
        busy = refused("session_busy", str(error), status=409)
        if run_id := (await db.around_sessions([session_id])).get(session_id, {}).get("active_run_id"):
            busy.headers["X-Hermes-Run-Id"] = run_id
        raise busy from None
    if not gone:
        raise unknown_session(session_id)
    return answer({"object": "hermes.session.deleted", "id": session_id, "deleted": True})


async def fork(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /api/sessions/{session_id}/fork"""
    body = await read(adapter, request, ForkRequest)
    asked = body.model
    new_id, title = _new_id(asked.id, "id"), _title(asked.title)
    session_id = (await session_of(adapter, request))["id"]
    try:
        made = await adapter.database().fork_session(session_id, new_id, title, asked.at_message_id)
    except SessionExists as error:
        raise ApiError(409, str(error), "session_exists", "id") from None
    except BadSessionId as error:
        raise invalid("id", str(error), "invalid_session_id") from None
    except ValueError as error:
        raise invalid("title", str(error), "invalid_title") from None
    except KeyError:
        message = f"There is no message {asked.at_message_id} in this session."
        raise ApiError(404, message, "message_not_found", "at_message_id") from None
    return await _shown(adapter, made, 201, body.headers())


# --- what is in it ---------------------------------------------------------------------------------------------------


async def messages(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /api/sessions/{session_id}/messages"""
    limit = whole(request, "limit", 500, 1, 2000)
    order = _ORDERS.get(word(request, "order", tuple(_ORDERS)) or "")
    offset = whole(request, "offset", 0, 0, OFFSET_MAX)
    between = {name: number_of(given, name) for name in ("before", "after") if (given := request.query.get(name))}
    everything, reasoning = flag(request, "include_inactive"), shows_reasoning(adapter, request)
    session_id = (await session_of(adapter, request))["id"]
    # Without an order and a place to go on from, the latest are the ones that are wanted, in their order.
    forward = order != "desc" and ("after" in between or (order == "asc" and "before" not in between))
    found, total = await adapter.database().message_page(
        session_id,
        everything,
        limit=limit + 1,
        offset=offset,
        before_id=between.get("before"),
        after_id=between.get("after"),
        order="asc" if forward else "desc",
    )
    page = found[:limit]
    if order != "desc" and not forward:
        page.reverse()
    data = [message_object(row, reasoning=reasoning, state=everything) for row in page]
    told = {
        "object": "list",
        "session_id": session_id,
        "data": data,
        "has_more": len(found) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "total": total,
    }
    return answer(told)


async def export(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /api/sessions/{session_id}/export"""
    form = word(request, "format", tuple(_EXPORTS)) or "json"
    session_id = (await session_of(adapter, request))["id"]
    item = await adapter.database().export_session(session_id, adapter.redact)
    if item is None:
        raise unknown_session(session_id)
    kind, suffix = _EXPORTS[form]
    data = await asyncio.to_thread(_written, item, form)
    headers = {"Content-Disposition": attachment(f"{session_id}.{suffix}")}
    return web.Response(body=data, content_type=kind, charset="utf-8", headers=headers)


def _written(item: Json, form: str) -> bytes:
    if form == "markdown":
        from hermes.services.session_markdown import markdown

        return markdown(item).encode()
    return msgspec.json.encode(item) + (b"\n" if form == "jsonl" else b"")


async def files(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /api/sessions/{session_id}/files"""
    limit, offset = whole(request, "limit", 200, 1, 1000), offset_of(request)
    session_id = (await session_of(adapter, request))["id"]
    found = await adapter.database().list_files(session_id)
    following = str(offset + limit) if len(found) > offset + limit else None
    return answer(listed([file_object(row) for row in found[offset : offset + limit]], following, len(found)))


async def file(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /api/sessions/{session_id}/files/{file_id}"""
    session_id, file_id = (await session_of(adapter, request))["id"], request.match_info["file_id"]
    found = await adapter.database().get_file(session_id, file_id)
    opened = await asyncio.to_thread(_opened, found["path"]) if found else None
    if found is None or opened is None:
        raise ApiError(404, f"There is no file {file_id!r} in this session.", "file_not_found")
    with opened[0] as data:
        told = {"Content-Type": found["mime"] or "application/octet-stream", "Content-Length": str(opened[1])}
        headers = {**middleware.own_headers(adapter, request), **told}
        response = web.StreamResponse(headers={**headers, "Content-Disposition": attachment(found["name"] or file_id)})
        with contextlib.suppress(ConnectionError):  # whoever asked for it has left
            await response.prepare(request)
            while request.method != "HEAD" and (part := await asyncio.to_thread(data.read, _READ_BYTES)):
                await response.write(part)
    return response


def _opened(path: str) -> tuple[BinaryIO, int] | None:
    try:
        data = open(path, "rb")  # noqa: SIM115  (closed by whoever sends it)
    except (OSError, ValueError):
        return None
    return data, os.fstat(data.fileno()).st_size


def attachment(name: str) -> str:
    """The header under which a file is saved, whatever its name is."""
    plain = "".join(c if " " <= c <= "~" and c not in '"\\' else "_" for c in name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"


# --- fields ----------------------------------------------------------------------------------------------------------


async def _shown(
    adapter: APIServerAdapter, session_id: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A session as it is now."""
    db = adapter.database()
    found = await db.get_session(session_id)
    if found is None:
        raise unknown_session(session_id)
    return _answer_with(adapter, found, await db.around_sessions([session_id]), status, headers)


def _answer_with(
    adapter: APIServerAdapter,
    found: Json,
    around: Mapping[str, Json],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    told = {**session_object(found, around.get(found["id"], {})), **adapter.owner_field(found["owner"])}
    return answer({"object": "hermes.session", "session": told}, status, headers)


def _new_id(given: Any, where: str) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str):
        raise invalid(where, f"{where} must be text.", "invalid_session_id")
    return session_id_of(given, where)


def _title(given: Any) -> str | None:
    """A title as it is kept."""
    if given is not None and not isinstance(given, str):
        raise invalid("title", "A title must be text.", "invalid_title")
    try:
        return plain_title(given)
    except ValueError as error:
        raise invalid("title", str(error), "invalid_title") from None


async def _turn_settings(adapter: APIServerAdapter, request: web.Request, given: Mapping[str, Any]) -> Json:
    """What a session keeps for its turns, as far as the request says; checked like that of a run."""
    named = ("workdir", "toolsets", "max_iterations")
    fields = {name: given[name] for name in named if given[name] is not msgspec.UNSET}
    if fields.get("workdir") is not None:
        await workdir_of(adapter, adapter.owner_of(request), None, fields["workdir"])
    if fields.get("toolsets") is not None:
        fields["toolsets"] = sorted(toolsets_of(fields["toolsets"], "toolsets"))
    await max_iterations_of(adapter, fields.get("max_iterations"))
    return fields


def _system_prompt(adapter: APIServerAdapter, given: Any) -> str | None:
    longest = adapter.option("max_text_chars")
    if given is not None and (not isinstance(given, str) or len(given) > longest):
        message = f"A system prompt is text of at most {longest} characters."
        raise invalid("system_prompt", message, "invalid_system_prompt")
    return given or None
