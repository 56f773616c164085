"""The tool `session_search`: search in earlier conversations of the same owner and session key."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta

from hermes.core import limits
from hermes.core.json_types import JsonObject
from hermes.core.text import text_of
from hermes.tools.framework.registry import Answer, ToolArguments, ToolContext, ToolDef, ToolError

_ROLES = ("user", "assistant", "tool", "system")


class SessionSearch(ToolArguments):
    query: Annotated[str, Meta(max_length=limits.QUERY_CHARS_MAX)] = ""
    limit: Annotated[int, Meta(ge=1, le=limits.RECALLED_MAX, description="3 if not given.")] = limits.RECALLED
    sort: Literal["relevance", "newest", "oldest"] = "relevance"
    session_id: Annotated[str, Meta(min_length=1, max_length=limits.SESSION_ID_CHARS_MAX)] | None = None
    around_message_id: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    window: Annotated[
        int, Meta(ge=1, le=limits.RECALL_WINDOW_MAX, description="Messages on either side; 5 if not given.")
    ] = limits.RECALL_WINDOW
    role_filter: Annotated[str, Meta(description="Roles with commas between, such as user,assistant.")] = ""


async def _run(ctx: ToolContext, args: SessionSearch) -> Answer:
    scope, session_id, message_id = _Scope(ctx), args.session_id, args.around_message_id
    roles = {role.strip() for role in args.role_filter.split(",") if role.strip()}
    if unknown := sorted(roles - set(_ROLES)):
        hint = f"Roles are {', '.join(_ROLES)}, with commas between."
        raise ToolError(f"There is no role {', '.join(unknown)}.", "invalid_arguments", hint)
    if session_id is not None and not await scope.has_id(session_id):  # another scope's session is treated as missing
        hint = "Search with a query, or call without arguments for the recent ones."
        raise ToolError(f"There is no earlier session {session_id[:80]!r}.", "not_found", hint)
    if message_id is not None and session_id is None:
        hint = "Both come with every hit."
        raise ToolError("`around_message_id` needs the `session_id`.", "invalid_arguments", hint)
    if args.query.strip() and message_id is None:
        answer = await _search(scope, args, roles)
        ctx.foreign = any(hit["role"] == "tool" for hit in answer["hits"])
    elif session_id is not None:
        answer = await _window(scope, session_id, message_id, args.window, roles)
        ctx.foreign = any(message["role"] == "tool" for message in answer["messages"])
    else:
        answer = await _recent(scope, args.limit)
    return answer


class _Scope:
    """The conversations of one owner and session key, except the current one."""

    def __init__(self, ctx: ToolContext) -> None:
        # A turn that stores nothing may search, too.
        self.sessions: Any = ctx.resources.engine.store.sessions
        self.owner, self.key = ctx.owner, ctx.session_key
        self._present = {ctx.session_id, ctx.resources.spec.parent_session_id}
        self._cache: dict[str, JsonObject | None] = {}

    def has(self, session: JsonObject | None) -> bool:
        if session is None or session["id"] in self._present:
            return False
        return (session["owner"], session["session_key"]) == (self.owner, self.key)

    async def has_id(self, session_id: str) -> bool:
        if session_id not in self._cache:
            self._cache[session_id] = await self.sessions.get_session(session_id)
        return self.has(self._cache[session_id])


async def _search(scope: _Scope, args: SessionSearch, roles: set[str]) -> Answer:
    """Matches in their order, read in batches: only some of each batch are of the scope."""
    role = next(iter(roles)) if len(roles) == 1 else None
    filters = {"owner": scope.owner, "session_key": scope.key, "session_id": args.session_id, "role": role}
    hits: list[Answer] = []
    complete = True
    for batch in range(limits.RECALL_BATCHES_MAX):
        page = {"limit": limits.RECALL_BATCH, "offset": batch * limits.RECALL_BATCH}
        rows = await scope.sessions.search_messages(args.query, sort=args.sort, **filters, **page)
        matching = [row for row in rows if not roles or row["role"] in roles]
        hits += [_hit(row) for row in matching if await scope.has_id(row["session_id"])]
        complete = rows.complete
        if len(hits) >= args.limit or len(rows) < limits.RECALL_BATCH:
            break
    else:
        complete = False
    hint = "Read around a hit with its session_id and around_message_id." if hits else "Try fewer or other words."
    return {"hits": hits[: args.limit], "complete": complete, "hint": hint}


def _hit(row: JsonObject) -> Answer:
    hit = {name: row[name] for name in ("session_id", "title", "source")}
    hit |= {"message_id": row["id"], "role": row["role"], "tool_name": row["tool_name"]}
    return hit | {"when": _when(row["timestamp"]), "snippet": row["snippet"], "context": row["context"]}


async def _window(scope: _Scope, session_id: str, message_id: int | None, window: int, roles: set[str]) -> Answer:
    if message_id is None:
        rows = await scope.sessions.get_messages(session_id, limit=2 * window + 1, order="desc")
        rows = rows[::-1]
    else:
        rows = await scope.sessions.get_messages_around(session_id, message_id, window)
        if not rows:
            hint = "Take the message_id of a hit in this session."
            raise ToolError(f"The session has no message {message_id}.", "not_found", hint)
    session = await scope.sessions.get_session(session_id) or {}
    messages = [_message(row) for row in rows if not roles or row["role"] in roles or row["id"] == message_id]
    return {"session_id": session_id, "title": session.get("title"), "messages": messages}


def _message(row: JsonObject) -> Answer:
    text, chars_max = text_of(row["content"]), limits.RECALLED_CHARS_MAX
    if len(text) > chars_max:
        text = f"{text[:chars_max]} [… {len(text) - chars_max} more characters]"
    calls = [(call.get("function") or call).get("name") for call in row.get("tool_calls") or ()]
    message = {"message_id": row["id"], "role": row["role"], "when": _when(row["timestamp"]), "content": text}
    optional = {"tool_name": row.get("tool_name"), "calls": calls}
    return message | {name: value for name, value in optional.items() if value}


async def _recent(scope: _Scope, limit: int) -> Answer:
    sessions: list[Answer] = []
    for batch in range(limits.RECALL_BATCHES_MAX):
        page = {"limit": limits.RECALL_BATCH, "offset": batch * limits.RECALL_BATCH}
        rows = await scope.sessions.list_sessions(owner=scope.owner, session_key=scope.key, archived="all", **page)
        sessions += (_session(row) for row in rows if scope.has(row))
        if len(sessions) >= limit or len(rows) < limits.RECALL_BATCH:
            break
    return {"sessions": sessions[:limit], "hint": "Search them with a query, or read the end of one by its session_id."}


def _session(row: JsonObject) -> Answer:
    session = {"session_id": row["id"], "title": row["title"], "source": row["source"], "preview": row["preview"]}
    return session | {"messages": row["message_count"], "last_active": _when(row["last_active"])}


def _when(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp).astimezone().isoformat(timespec="minutes")


TOOL = ToolDef(
    name="session_search",
    toolset="session_search",
    description=(
        'Find what was said in earlier conversations. With `query` (words, "phrases", AND, OR, NOT, prefix*): hits with '
        "context. With `session_id` and `around_message_id` of a hit: the messages around it. Without anything: the most "
        "recent conversations. The present one is left out."
    ),
    arguments=SessionSearch,
    run=_run,
    effect="read",
    scope=lambda _: frozenset(),
    preview=lambda args: args.query or args.session_id or "recent sessions",
)
