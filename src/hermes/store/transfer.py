"""Export and import of sessions as documents; an import takes all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import IMPORT_BYTES_MAX, IMPORT_ROWS_AT_ONCE_MAX, IMPORT_ROWS_MAX, IMPORT_SESSIONS_MAX
from hermes.store import rows
from hermes.store.base import MESSAGE_COLUMNS, USAGE_FIELDS, Row
from hermes.store.codec import BadSessionId, checked_id, checked_role, end_reason, pack, pack_or_none, plain_title
from hermes.store.dialect import all_of, placeholders
from hermes.store.engine import Tx
from hermes.store.repository import Repository, blocks, reads_slowly, writes
from hermes.store.session_rows import (
    SESSION,
    SessionRow,
    column,
    exists,
    next_title,
    owner_of,
    refuse_foreign,
    session_fields,
    title_holder,
    usage_of,
)

FORMAT = "hermes.session/1"
Redact = Callable[[str], str]
# The exported fields of a message; its id is exported too, and replaced on import.
_NOT_EXPORTED = ("session_id", "model_only", "name", "digest")
_OF_MESSAGE = tuple(name for name in MESSAGE_COLUMNS if name not in _NOT_EXPORTED)
_FLAGS = ("synthetic", "active", "compacted")
# Names are not secret, and must not change.
_NAMES = {"format", "id", "parent_session_id", "base_id", "run_id", "tool_call_id", "kind", "role", "source", "owner"}
_TEXTS = (str, type(None))
_NUMBERS = (int, float)
# The exported columns of a session with their types. The message that a fork began with is left out: ids are replaced
# on import.
_OF_SESSION: dict[str, tuple[type, ...]] = {
    name: tuple(kind for one in get_args(hint) or (hint,) for kind in (_NUMBERS if one is float else (one,)))
    for name, hint in get_type_hints(SessionRow).items()
    if name not in ("id", "forked_at_message_id", "stateless")
}
# A document cannot decide who owns the session, where it works, and what the model is told besides the conversation.
# Digests are computed on import.
_NOT_IMPORTED = frozenset(
    {"owner", "session_key", "cwd", "workdir", "instructions", "system_prompt", "prompt_digest", "transcript_digest"}
)


class Transfer(Repository):
    @reads_slowly
    def export_session(self, tx: Tx, session_id: str, redact: Redact | None = None) -> JsonObject | None:
        """A session with its transcript, rewound messages flagged. What only the model sees is a separate list.
        `redact` is applied to every text."""
        record = tx.row(SESSION, (session_id,))
        if record is None:
            return None
        session = session_fields(record)
        messages = rows.read(tx, "session_id = ? ORDER BY id", (session_id,))
        out: JsonObject = {"format": FORMAT, "id": session_id}
        out |= {name: session[name] for name in _OF_SESSION}
        out["messages"] = [_exported_message(row) for row in messages if not row.model_only]
        out["model_messages"] = [_exported_message(row) for row in messages if row.model_only]
        out["usage"] = usage_of(record["usage"])
        return _redacted(out, redact) if redact else out

    @blocks
    def export_all(
        self, source: str | None = None, session_key: str | None = None, redact: Redact | None = None
    ) -> Iterator[JsonObject]:
        """Every session, one at a time, parents before their children."""
        for session_id in self._ids(source, session_key):
            if (item := self.export_session(session_id, redact)) is not None:
                yield item

    @reads_slowly
    def _ids(self, tx: Tx, source: str | None, session_key: str | None) -> list[str]:
        where, params = all_of(("source = ?", source), ("session_key = ?", session_key))
        sql = f"SELECT id FROM sessions WHERE {where} ORDER BY started_at, id"
        return [row[0] for row in tx.rows(sql, params)]

    @blocks
    def import_sessions(
        self,
        items: Iterable[JsonMapping],
        on_conflict: str = "skip",
        *,
        owner: str = "default",
        hide_others: bool = False,
    ) -> JsonObject:
        """Import sessions for an owner. One invalid document rejects all of them; an existing session is skipped. With
        `hide_others` an id of another owner is reported like an invalid one."""
        if on_conflict != "skip":
            raise ValueError("`on_conflict` can only be 'skip': existing sessions are kept.")
        batch = list(items)
        errors = _faults(batch)
        if errors:
            return {"ok": False, "imported": 0, "skipped": 0, "detached": 0, "errors": errors}
        return self._take_in(batch, owner, hide_others)

    @writes
    def _take_in(self, tx: Tx, batch: list[JsonMapping], owner: str, hide_others: bool) -> JsonObject:
        errors = []
        for index, item in enumerate(batch if hide_others else ()):
            try:
                refuse_foreign(tx, item["id"], owner)
            except BadSessionId as error:
                errors.append({"index": index, "message": str(error)})
        if errors:
            return {"ok": False, "imported": 0, "skipped": 0, "detached": 0, "errors": errors}
        imported: list[JsonMapping] = []
        skipped = detached = 0
        for item in batch:
            if exists(tx, item["id"]):
                skipped += 1
                continue
            _insert(tx, item, owner)
            imported.append(item)
        for item in imported:
            parent = item.get("parent_session_id")
            if parent is None:
                continue
            if parent != item["id"] and owner_of(tx, parent) == owner:
                tx.execute("UPDATE sessions SET parent_session_id = ? WHERE id = ?", (parent, item["id"]))
            else:
                detached += 1
        return {"ok": True, "imported": len(imported), "skipped": skipped, "detached": detached, "errors": []}


def _exported_message(row: Row) -> JsonObject:
    fields = {name: getattr(row, name) for name in ("id", *_OF_MESSAGE)}
    fields["position"] = row.position if row.active else None
    return {name: value for name, value in fields.items() if value is not None or name == "content"}


def _redacted(value: object, redact: Redact) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: item if key in _NAMES else _redacted(item, redact) for key, item in value.items()}
    return [_redacted(item, redact) for item in value] if isinstance(value, list) else value


def _faults(batch: list[JsonMapping]) -> list[JsonObject]:
    """The faults, each with the index of its session."""
    if len(batch) > IMPORT_SESSIONS_MAX:
        return [{"index": IMPORT_SESSIONS_MAX, "message": f"At most {IMPORT_SESSIONS_MAX} sessions are taken at once."}]
    errors: list[JsonObject] = []
    seen: set[str] = set()
    size = message_count = 0
    for index, item in enumerate(batch):
        try:
            size += len(pack(item))
            _check(item, seen)
            message_count += len(_messages(item))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            errors.append({"index": index, "message": str(error.args[0] if error.args else error)})
    if message_count > IMPORT_ROWS_AT_ONCE_MAX:
        message = f"At most {IMPORT_ROWS_AT_ONCE_MAX} messages are taken at once."
        errors.append({"index": len(batch) - 1, "message": message})
    if size > IMPORT_BYTES_MAX:
        errors.append({"index": len(batch) - 1, "message": f"At most {IMPORT_BYTES_MAX} bytes are taken at once."})
    return errors


def _check(item: object, seen: set[str]) -> None:
    if not isinstance(item, Mapping):
        raise ValueError("A session is an object.")
    if item.get("format") != FORMAT:
        raise ValueError(f"`format` is not '{FORMAT}'.")
    session_id = checked_id(item.get("id"))
    if session_id in seen:
        raise ValueError(f"The session '{session_id}' appears twice.")
    seen.add(session_id)
    for name, types in _OF_SESSION.items():
        if name in item and (not isinstance(item[name], types) or (isinstance(item[name], bool) and bool not in types)):
            raise ValueError(f"`{name}` is not of the right type.")
        _check_number(name, item.get(name))
    if not all(isinstance(name, str) for name in item.get("toolsets") or ()):
        raise ValueError("`toolsets` is a list of names.")
    if item.get("end_reason") is not None:
        end_reason(item["end_reason"])
    if item.get("parent_session_id") is not None:
        checked_id(item["parent_session_id"])
    if item.get("kind", "root") not in ("root", "branch", "delegate", "job"):
        raise ValueError("`kind` is not a kind of session.")
    plain_title(item.get("title"))
    for name in ("messages", "model_messages"):
        if not isinstance(item.get(name, []), list):
            raise ValueError(f"`{name}` is a list.")
        for index, message in enumerate(item.get(name, [])):
            _check_message(f"{name}[{index}]", message)
    if (count := len(_messages(item))) > IMPORT_ROWS_MAX:
        raise ValueError(f"A session of {count} messages; at most {IMPORT_ROWS_MAX} can be imported.")
    usage = item.get("usage", [])
    if not isinstance(usage, list) or not all(isinstance(entry, Mapping) for entry in usage):
        raise ValueError("`usage` is a list of objects.")
    for entry in usage:
        if not all(isinstance(entry.get(name, ""), str) for name in ("model", "provider", "task")) or not all(
            isinstance(entry.get(name) or 0, _NUMBERS) for name in USAGE_FIELDS[3:]
        ):
            raise ValueError("`usage` holds names and numbers.")
        for name in USAGE_FIELDS[3:]:
            _check_number(f"usage.{name}", entry.get(name))


def _check_number(name: str, value: object) -> None:
    if isinstance(value, int | float) and not 0 <= value < 2**63:
        raise ValueError(f"`{name}` is not a number in range.")


def _messages(item: JsonMapping) -> list[JsonMapping]:
    return [*item.get("messages", []), *item.get("model_messages", [])]


def _check_message(where: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"`{where}` is an object.")
    checked_role(message.get("role"))
    types: dict[str, tuple[type, ...]] = {
        "content": (str, list, type(None)),
        "api_content": (str, list, type(None)),
        "tool_calls": (list, type(None)),
        "opaque": (dict, type(None)),
        "timestamp": _NUMBERS,
        "token_count": (int, type(None)),
        "position": (int, type(None)),
        "copy_of": (int, type(None)),
    }
    types |= dict.fromkeys(("tool_call_id", "tool_name", "finish_reason", "reasoning", "run_id"), _TEXTS)
    types |= dict.fromkeys(_FLAGS, (bool, int))
    for name, allowed in types.items():
        if name in message and not isinstance(message[name], allowed):
            raise ValueError(f"`{where}.{name}` is not of the right type.")
        _check_number(f"{where}.{name}", message.get(name))
    for name in ("content", "api_content", "tool_calls"):
        value = message.get(name)
        if isinstance(value, list) and not all(isinstance(part, Mapping) for part in value):
            raise ValueError(f"`{where}.{name}` is a list of objects.")


def _insert(tx: Tx, item: JsonMapping, owner: str) -> None:
    fields = {name: item[name] for name in _OF_SESSION if item.get(name) is not None and name not in _NOT_IMPORTED}
    for name in ("parent_session_id", "title"):
        fields.pop(name, None)
    fields = {name: value if isinstance(value, int | float) else column(name, value) for name, value in fields.items()}
    fields |= {
        "id": item["id"],
        "owner": owner,
        "source": fields.get("source") or "import",
        "kind": fields.get("kind") or "root",
    }
    times = [message["timestamp"] for message in _messages(item) if message.get("timestamp")]
    fields.setdefault("started_at", min(times, default=0.0))
    fields.setdefault("last_active", max(times, default=fields["started_at"]))
    usage: dict[tuple[str, ...], JsonObject] = {}
    for entry in item.get("usage", []):
        key = tuple(entry.get(name) or "" for name in USAGE_FIELDS[:3])
        numbers = {name: entry.get(name) or 0 for name in USAGE_FIELDS[3:-1]}
        cost = entry.get("actual_cost_usd")
        usage.setdefault(key, dict(zip(USAGE_FIELDS, key, strict=False)) | numbers | {"actual_cost_usd": cost})
    fields["usage"] = pack_or_none(list(usage.values()))
    title = plain_title(item.get("title"))
    if title is not None:
        fields["title"] = title if title_holder(tx, owner, title) is None else next_title(tx, owner, title)
    names = ", ".join(fields)
    sql = f"INSERT INTO sessions ({names}) VALUES ({placeholders(fields)})"
    tx.execute(sql, list(fields.values()))
    rows.add(tx, _rows_of(item))
    # Counters of the document, or counted if it has none.
    counters = {
        name: fields[name] for name in ("last_active", "tool_call_count", "preview") if item.get(name) is not None
    }
    for name, value in counters.items():
        tx.execute(f"UPDATE sessions SET {name} = ? WHERE id = ?", (value, item["id"]))
    rows.recount(tx, item["id"])


def _rows_of(item: JsonMapping) -> list[Row]:
    """The rows of a session; those that only the model sees come last."""
    messages: list[JsonMapping] = item.get("messages", [])
    loaded = [_row_of(item["id"], message) for message in messages]
    for message in item.get("model_messages", []):
        loaded.append(row := _row_of(item["id"], message))
        row.synthetic = row.model_only = True
    if "model_messages" not in item:
        loaded = _one_row_each(loaded, [message.get("copy_of") for message in messages])
    positioned = sorted(
        (row for row in loaded if row.active and row.position is not None), key=lambda row: row.position or 0
    )
    for row in loaded:
        row.position = None
    for position, row in enumerate(positioned, 1):
        row.position = position
    return loaded


def _one_row_each(loaded: list[Row], origins: list[int | None]) -> list[Row]:
    """The rows of a document of an older version, which repeats messages that a compaction kept and refers to the
    originals: those are live in the place of their copies."""
    unique: list[Row] = []
    for index, (row, origin) in enumerate(zip(loaded, origins, strict=True)):
        if origin is None or origin >= index:
            # Rows that close a turn have a run or a reason; a summary has neither.
            row.model_only = row.synthetic and row.run_id is None and row.finish_reason is None
            row.position = index
            unique.append(row)
        elif row.active:
            first = loaded[origin]
            first.active, first.compacted, first.position, first.api_content = True, False, index, row.api_content
    return unique


def _row_of(session_id: str, message: JsonMapping) -> Row:
    # A system message would be a system prompt: it is stored, but not shown to a model.
    active = bool(message.get("active", True)) and message["role"] != "system"
    row = Row(session_id, message["role"], message.get("content"), active=active)
    for name in _OF_MESSAGE:
        if name in message and name not in ("role", "content", "active"):
            setattr(row, name, bool(message[name]) if name in _FLAGS else message[name])
    return row
