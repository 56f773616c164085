"""The tool `session_search`: what was said in earlier conversations of the same owner and session key."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from hermes.core.json_types import JsonObject
from hermes.core.limits import (
    QUERY_CHARS_MAX,
    RECALL_BATCH,
    RECALL_BATCHES_MAX,
    RECALL_WINDOW,
    RECALL_WINDOW_MAX,
    RECALLED,
    RECALLED_CHARS_MAX,
    RECALLED_MAX,
    SESSION_ID_CHARS_MAX,
)
from hermes.core.text import text_of
from hermes.tools.framework.registry import Answer, Args, ToolContext, ToolDef, ToolError

_ROLES = ("user", "assistant", "tool", "system")
_SORTS = ("relevance", "newest", "oldest")


async def _run(ctx: ToolContext, args: Args) -> Answer:
    past = _Past(ctx)
    roles = {role.strip() for role in args.get("role_filter", "").split(",") if role.strip()}
    if unknown := sorted(roles - set(_ROLES)):
        hint = f"Roles are {', '.join(_ROLES)}, with commas between."
        raise ToolError(f"There is no role {', '.join(unknown)}.", "invalid_arguments", hint)
    session_id, limit = args.get("session_id"), args.get("limit", RECALLED)
    if session_id is not None:
        await past.require(session_id)
    if args.get("around_message_id") is not None and session_id is None:
        hint = "Both come with every hit."
        raise ToolError("`around_message_id` needs the `session_id`.", "invalid_arguments", hint)
    if args.get("query", "").strip() and args.get("around_message_id") is None:
        answer = await _hits(past, args, roles, limit)
        ctx.foreign = any(hit["role"] == "tool" for hit in answer["hits"])
        return answer
    if session_id is not None:
        around, window = args.get("around_message_id"), args.get("window", RECALL_WINDOW)
        answer = await _window(past, session_id, around, window, roles)
        ctx.foreign = any(message["role"] == "tool" for message in answer["messages"])
        return answer
    return await _recent(past, limit)


class _Past:
    """The conversations of one scope, but for the one that is going on."""

    def __init__(self, ctx: ToolContext) -> None:
        # Also a turn that leaves nothing behind may look at what others have left.
        self.sessions: Any = ctx.resources.engine.store.sessions
        self.owner, self.key = ctx.owner, ctx.session_key
        self._present = {ctx.session_id, ctx.resources.spec.parent_session_id}
        self._known: dict[str, JsonObject | None] = {}

    def holds(self, session: JsonObject | None) -> bool:
        """Whether a session is of this scope, and past."""
        return (
            session is not None
            and (session["owner"], session["session_key"]) == (self.owner, self.key)
            and session["id"] not in self._present
        )

    async def holds_id(self, session_id: str) -> bool:
        """The same of a session by its id."""
        if session_id not in self._known:
            self._known[session_id] = await self.sessions.get_session(session_id)
        return self.holds(self._known[session_id])

    async def require(self, session_id: str) -> None:
        """Refuse what is not of this scope as what is not there."""
        if not await self.holds_id(session_id):
            hint = "Search with a query, or call without arguments for the recent ones."
            raise ToolError(f"There is no earlier session {session_id[:80]!r}.", "not_found", hint)


async def _hits(past: _Past, args: Args, roles: set[str], limit: int) -> Answer:
    """Matches in their order, asked for in batches: of each only those of the scope are of use."""
    where = {"owner": past.owner, "session_key": past.key, "session_id": args.get("session_id")}
    where |= {"role": next(iter(roles)) if len(roles) == 1 else None, "sort": args.get("sort", "relevance")}
    found: list[Answer] = []
    complete = True
    for batch in range(RECALL_BATCHES_MAX):
        place = {"limit": RECALL_BATCH, "offset": batch * RECALL_BATCH}
        hits = await past.sessions.search_messages(args["query"], **where, **place)
        wanted = [hit for hit in hits if not roles or hit["role"] in roles]
        found += [_hit(hit) for hit in wanted if await past.holds_id(hit["session_id"])]
        complete = hits.complete
        if len(found) >= limit or len(hits) < RECALL_BATCH:
            break
    else:
        complete = False
    hint = "Read around a hit with its session_id and around_message_id." if found else "Try fewer or other words."
    return {"hits": found[:limit], "complete": complete, "hint": hint}


def _hit(hit: JsonObject) -> Answer:
    return {
        "session_id": hit["session_id"],
        "title": hit["title"],
        "source": hit["source"],
        "message_id": hit["id"],
        "role": hit["role"],
        "tool_name": hit["tool_name"],
        "when": _when(hit["timestamp"]),
        "snippet": hit["snippet"],
        "context": hit["context"],
    }


async def _window(past: _Past, session_id: str, message_id: int | None, window: int, roles: set[str]) -> Answer:
    if message_id is None:
        rows = await past.sessions.get_messages(session_id, limit=2 * window + 1, order="desc")
        rows = rows[::-1]
    else:
        rows = await past.sessions.get_messages_around(session_id, message_id, window)
        if not rows:
            hint = "Take the message_id of a hit in this session."
            raise ToolError(f"The session has no message {message_id}.", "not_found", hint)
    session = await past.sessions.get_session(session_id) or {}
    messages = [_message(row) for row in rows if not roles or row["role"] in roles or row["id"] == message_id]
    return {"session_id": session_id, "title": session.get("title"), "messages": messages}


def _message(row: JsonObject) -> Answer:
    text = text_of(row["content"])
    if len(text) > RECALLED_CHARS_MAX:
        text = f"{text[:RECALLED_CHARS_MAX]} [… {len(text) - RECALLED_CHARS_MAX} more characters]"
    calls = [(call.get("function") or call).get("name") for call in row.get("tool_calls") or ()]
    told = {"message_id": row["id"], "role": row["role"], "when": _when(row["timestamp"]), "content": text}
    named = {"tool_name": row.get("tool_name"), "calls": calls}
    return told | {name: value for name, value in named.items() if value}


async def _recent(past: _Past, limit: int) -> Answer:
    found: list[Answer] = []
    for batch in range(RECALL_BATCHES_MAX):
        place = {"limit": RECALL_BATCH, "offset": batch * RECALL_BATCH}
        rows = await past.sessions.list_sessions(owner=past.owner, session_key=past.key, archived="all", **place)
        found += (_session(row) for row in rows if past.holds(row))
        if len(found) >= limit or len(rows) < RECALL_BATCH:
            break
    return {"sessions": found[:limit], "hint": "Search them with a query, or read the end of one by its session_id."}


def _session(row: JsonObject) -> Answer:
    told = {"session_id": row["id"], "title": row["title"], "source": row["source"], "preview": row["preview"]}
    return told | {"messages": row["message_count"], "last_active": _when(row["last_active"])}


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
    parameters={
        "type": "object",
        "properties": {
            "query": {"type": "string", "maxLength": QUERY_CHARS_MAX},
            "limit": {"type": "integer", "minimum": 1, "maximum": RECALLED_MAX, "description": "3 if not given."},
            "sort": {"type": "string", "enum": list(_SORTS)},
            "session_id": {"type": "string", "minLength": 1, "maxLength": SESSION_ID_CHARS_MAX},
            "around_message_id": {"type": "integer", "minimum": 1, "maximum": 2**53},
            "window": {
                "type": "integer",
                "minimum": 1,
                "maximum": RECALL_WINDOW_MAX,
                "description": "Messages on either side; 5 if not given.",
            },
            "role_filter": {"type": "string", "description": "Roles with commas between, such as user,assistant."},
        },
        "additionalProperties": False,
    },
    run=_run,
    effect="read",
    scope=lambda _: frozenset(),
    preview=lambda args: args.get("query") or args.get("session_id") or "recent sessions",
)
