"""What requests may hold besides their bodies: query, headers and path of each route, and an example of each body."""

from __future__ import annotations

from typing import Any

from hermes.core.limits import QUERY_CHARS_MAX, SESSION_ID_CHARS_MAX, SESSION_KEY_CHARS_MAX

Json = dict[str, Any]


def parameter(where: str, name: str, about: str, schema: Json, *, required: bool = False) -> Json:
    """One parameter."""
    told = {"name": name, "in": where, "description": about, "schema": schema}
    return {**told, "required": True} if required or where == "path" else told


def _query(name: str, about: str, **schema: Any) -> Json:
    return parameter("query", name, about, {"type": "string", **schema})


def _whole(name: str, about: str, low: int = 0, high: int | None = None, default: int | None = None) -> Json:
    bounds = {"minimum": low, "maximum": high, "default": default}
    return _query(name, about, type="integer", **{word: value for word, value in bounds.items() if value is not None})


def _flag(name: str, about: str) -> Json:
    return _query(name, about, type="boolean", default=False)


def _choice(name: str, about: str, *words: str) -> Json:
    return _query(name, about, enum=list(words), default=words[0])


def _header(name: str, about: str, **schema: Any) -> Json:
    return parameter("header", name, about, {"type": "string", **schema})


def _items(default_order: str) -> tuple[Json, ...]:
    other = "asc" if default_order == "desc" else "desc"
    return (
        _whole("limit", "how many items", 1, 100, 20),
        _choice("order", "which way they go", default_order, other),
        _query("after", "the id of the item before the first"),
    )


_ORDERS = ["asc", "desc", "oldest", "latest"]
_CURSOR = _query("cursor", "the place to go on from, as `next_cursor` gave it")
_STATUSES = ("queued", "running", "waiting_for_approval", "waiting_for_input", "stopping")
_FINISHED = ("completed", "failed", "cancelled")
_KINDS = ("chat", "response", "session", "run", "job", "cli", "subagent")
QUERIES: dict[str, tuple[Json, ...]] = {
    "response": (
        _query("include", "what else to show", type="array", items={"type": "string"}),
        _flag("stream", "send the events of the response instead of the object"),
        _whole("starting_after", "the `sequence_number` of the last event that is known"),
    ),
    "response_input_items": _items("desc"),
    "conversation_items": _items("desc"),
    "run_list": (
        _whole("limit", "how many runs", 1, 200, 50),
        _CURSOR,
        _query("status", "only runs of this status", enum=[*_STATUSES, *_FINISHED]),
        _query("kind", "only runs of this kind", enum=list(_KINDS)),
        _query("session_id", "only runs of this session"),
    ),
    "jobs": (_flag("include_disabled", "paused and finished jobs, too"),),
    "job_runs": (_whole("limit", "how many runs", 1, 200, 50), _CURSOR),
    "run_events": (
        _whole("starting_after", "the number of the last event that is known"),
        _flag("event_names", "give every frame an `event:` line"),
    ),
    "sessions": (
        _whole("limit", "how many sessions", 1, 200, 50),
        _whole("offset", "how many to pass over"),
        _CURSOR,
        _query("source", "only sessions that were begun there"),
        _flag("include_children", "sessions of subagents too"),
        _choice("archived", "whether archived ones are shown", "false", "true", "all"),
        _query("pinned", "only those that are pinned, or are not", type="boolean"),
        _choice("order", "what comes first", "last_active", "started_at"),
    ),
    "session_search": (
        parameter(
            "query",
            "q",
            'words, "phrases", prefix*, AND, OR, NOT',
            {"type": "string", "minLength": 1, "maxLength": QUERY_CHARS_MAX},
            required=True,
        ),
        _query("role", "only messages of this role", enum=["user", "assistant", "tool", "system"]),
        _query("source", "only sessions that were begun there"),
        _query("session_id", "only this session"),
        _choice("sort", "what comes first", "relevance", "newest", "oldest"),
        _whole("limit", "how many matches", 1, 100, 20),
        _CURSOR,
    ),
    "session_messages": (
        _whole("limit", "how many messages", 1, 2000, 500),
        _whole("before", "only those before this message"),
        _whole("after", "only those after this message"),
        _whole("offset", "how many to pass over"),
        _query("order", "from the first on, or from the latest back; without it the latest, in order", enum=_ORDERS),
        _flag("include_inactive", "also messages that were taken back and those that only the model sees"),
    ),
    "session_files": (_whole("limit", "how many files", 1, 1000, 200), _CURSOR),
    "session_export": (_choice("format", "the form", "json", "jsonl", "markdown"),),
}

REQUEST_ID = _header("X-Request-Id", "an id of the client's own for this request: up to 128 of A-Z a-z 0-9 . _ -")
_SESSION_ID = _header("X-Hermes-Session-Id", "the session of the turn", minLength=1, maxLength=SESSION_ID_CHARS_MAX)
_SEED = _header("X-Hermes-Seed-History", "begin an empty session with the body's earlier messages", type="boolean")
_REASONING = _header("X-Hermes-Reasoning", "whether reasoning is shown", enum=["on", "off"])
_WISHES = (
    _header("X-Hermes-Session-Key", "the scope of long-term memory; needs a key", maxLength=SESSION_KEY_CHARS_MAX),
    _header("X-OpenWebUI-User-Id", "the user whose memory is used, with `api_server.memory_scope: user`"),
    _header("X-Hermes-Detach", "the turn goes on when the client leaves", type="boolean"),
    _header("X-Hermes-Approvals", "wait for answers to the agent's questions, or deny", enum=["wait", "deny"]),
    _header("X-Hermes-Tool-Progress", "how a chat stream tells of tools", enum=["event", "chunk", "off"]),
    _header("X-Hermes-Tool-Items", "how a response shows server tools", enum=["function", "mcp", "none"]),
    _REASONING,
    _header(
        "X-Hermes-Toolsets",
        "the toolsets of this turn, comma separated, or `none`; with `tools` of the client, `terminal`, `file` and "
        "`code_execution` are offered only where this or the key names them",
    ),
    _header("X-Hermes-Timeout", "the most seconds that the turn may take", type="number", minimum=1),
)
_LAST_EVENT = _header("Last-Event-ID", "the number of the last event that is known", type="integer", minimum=0)
HEADERS: dict[str, tuple[Json, ...]] = {
    "chat_completions": (_SESSION_ID, _SEED, *_WISHES),
    "responses": (_SESSION_ID, *_WISHES),
    "runs": (_SESSION_ID, *_WISHES),
    "responses_compact": _WISHES,
    "responses_input_tokens": (_SESSION_ID, *_WISHES),
    "session_chat": _WISHES,
    "session_compact": _WISHES,
    "session_chat_stream": _WISHES,
    "run_events": (_LAST_EVENT, _REASONING),
    "session_messages": (_REASONING,),
}
PATHS: dict[str, tuple[str, Json]] = {
    "model_id": ("the name of a model; it may hold slashes", {"minLength": 1}),
    "session_id": ("the id of a session", {"minLength": 1, "maxLength": SESSION_ID_CHARS_MAX}),
    "response_id": ("the id of a response", {"minLength": 1}),
    "conversation_id": ("the id of a conversation", {"minLength": 1}),
    "item_id": ("the id of an item", {"minLength": 1}),
    "run_id": ("the id of a run", {"minLength": 1}),
    "job_id": ("the id of a job", {"pattern": "^[0-9a-f]{12}$"}),
    "file_id": ("the id of a file", {"minLength": 1}),
}
_SAID = {"role": "user", "content": "Which files are here?"}
_ITEM = {"type": "message", **_SAID}
EXAMPLES: dict[str, Json] = {
    "chat_completions": {"model": "hermes-agent", "messages": [_SAID], "stream": False},
    "responses": {"model": "hermes-agent", "input": "Which files are here?", "store": True},
    "responses_compact": {"model": "hermes-agent", "input": [_ITEM]},
    "responses_input_tokens": {"model": "hermes-agent", "input": [_ITEM]},
    "conversations": {"items": [_ITEM], "metadata": {"topic": "files"}},
    "conversation_update": {"metadata": {"topic": "letters"}},
    "conversation_items_add": {"items": [_ITEM]},
    "runs": {"input": "Write a shopping list.", "session_id": "kitchen"},
    "job_create": {"schedule": "0 9 * * mon-fri", "prompt": "Say what is new in the news folder.", "name": "Morning"},
    "job_update": {"schedule": "every 2h"},
    "run_steer": {"text": "Leave out the milk."},
    "run_approval": {"choice": "once"},
    "run_clarify": {"answer": "The blue one."},
    "session_create": {"title": "Kitchen", "system_prompt": "Be brief."},
    "session_import": {"sessions": []},
    "session_update": {"title": "Garden"},
    "session_fork": {"title": "Kitchen, otherwise"},
    "session_compact": {"focus": "the shopping list"},
    "session_chat": {"message": "Which files are here?"},
    "session_chat_stream": {"message": "Which files are here?"},
}
