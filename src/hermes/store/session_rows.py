"""The sessions table, and the operations on it that other stores use in their own transactions."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.store.base import USAGE_FIELDS, LeaseLost, SessionNotFound
from hermes.store.codec import BadSessionId, clean_or_none, numbered, pack, plain_title, unpack
from hermes.store.dialect import FOR_UPDATE, placeholders
from hermes.store.engine import Record, Tx
from hermes.store.leases import is_current
from hermes.store.prompts import put


class SessionRow(msgspec.Struct):
    """The columns of a session as `SessionDB` returns them; `system_prompt` is a text of `prompts`."""

    id: str
    owner: str
    source: str
    kind: str
    parent_session_id: str | None
    forked_at_message_id: int | None
    session_key: str | None
    base_id: str | None
    user_id: str | None
    title: str | None
    model: str | None
    model_config: dict | None  # type: ignore[type-arg]
    instructions: str | None
    system_prompt: str | None
    prompt_digest: str | None
    transcript_digest: str | None
    cwd: str | None
    started_at: float
    last_active: float
    ended_at: float | None
    end_reason: str | None
    archived: bool
    pinned: bool
    workdir: str | None
    toolsets: list | None  # type: ignore[type-arg]
    max_iterations: int | None
    reasoning_effort: str | None
    message_count: int
    tool_call_count: int
    api_call_count: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    actual_cost_usd: float | None
    preview: str | None
    stateless: bool


# The fields of a session that its creator can set.
CREATED_WITH = (
    *("model", "model_config", "instructions", "system_prompt", "prompt_digest", "owner", "user_id", "session_key"),
    *("parent_session_id", "kind", "cwd", "title", "base_id", "pinned", "workdir", "toolsets", "max_iterations"),
    *("reasoning_effort", "stateless"),
)
# A session with its prompt, for `session_fields`.
SESSION = (
    "SELECT s.*, p.text AS system_prompt FROM sessions s LEFT JOIN prompts p ON p.sha256 = s.prompt_sha256 "
    "WHERE s.id = ?"
)
_JSON, _FLAGS = ("model_config", "toolsets"), ("archived", "pinned", "stateless")
_KINDS = ("root", "branch", "delegate", "job")
_TOKENS = tuple(name for name in SessionRow.__struct_fields__ if name.endswith("_tokens"))
_USAGE = f"SELECT usage FROM sessions WHERE id = ? {FOR_UPDATE}"
_TITLE_HOLDER = "SELECT id FROM sessions WHERE owner = ? AND title = ?"
_CALL_USED = f"""UPDATE sessions SET usage = ?, api_call_count = api_call_count + 1,
  {", ".join(f"{name} = {name} + ?" for name in _TOKENS)},
  actual_cost_usd = CASE WHEN CAST(? AS DOUBLE PRECISION) IS NULL THEN actual_cost_usd
    ELSE coalesce(actual_cost_usd, 0) + CAST(? AS DOUBLE PRECISION) END WHERE id = ?"""


def exists(tx: Tx, session_id: str) -> bool:
    return tx.value("SELECT 1 FROM sessions WHERE id = ?", (session_id,)) is not None


def require(tx: Tx, session_id: str) -> None:
    if not exists(tx, session_id):
        raise KeyError(f"There is no session '{session_id}'.")


def owner_of(tx: Tx, session_id: str) -> str | None:
    owner: str | None = tx.value("SELECT owner FROM sessions WHERE id = ?", (session_id,))
    return owner


def check_owner(tx: Tx, session_id: str, owner: str) -> None:
    """Raise `SessionNotFound` if the session belongs to another owner; a missing session is accepted."""
    if owner_of(tx, session_id) not in (None, owner):
        raise SessionNotFound(session_id)


def refuse_foreign(tx: Tx, session_id: str, owner: str) -> None:
    """Raise `BadSessionId` if the id of a session to be created is another owner's."""
    if owner_of(tx, session_id) not in (None, owner):
        raise BadSessionId.unusable(session_id)


def open_session(
    tx: Tx,
    session_id: str,
    source: str,
    fields: JsonMapping,
    *,
    reopen: bool = False,
    counters: JsonMapping | None = None,
) -> bool:
    """Create the session, or fill the empty fields of an existing one. True if it was created; then `auto_title` is its
    title if it has no other, and `counters` are its first values."""
    session = tx.row("SELECT * FROM sessions WHERE id = ?", (session_id,))
    if session is None:
        make_session(tx, session_id, source, fields, counters=counters)
        return True
    _check_kind(fields)
    columns = {name: column(name, fields[name]) for name in CREATED_WITH if fields.get(name) is not None}
    columns["title"] = title = plain_title(fields.get("title"))
    system_prompt = columns.pop("system_prompt", None)
    if system_prompt is not None and session["prompt_sha256"] is None:
        columns["prompt_sha256"] = put(tx, system_prompt)
    if title is not None and session["title"] is None:
        refuse_taken(tx, session["owner"], title, session_id)
    empty = {name: value for name, value in columns.items() if value is not None and session[name] is None}
    if reopen and session["ended_at"] is not None:
        tx.execute("UPDATE sessions SET ended_at = NULL, end_reason = NULL WHERE id = ?", (session_id,))
    for name, value in empty.items():
        tx.execute(f"UPDATE sessions SET {name} = ? WHERE id = ?", (value, session_id))
    if session["stateless"] and not fields.get("stateless"):
        keep(tx, session_id)
    return False


def make_session(
    tx: Tx, session_id: str, source: str, fields: JsonMapping, *, counters: JsonMapping | None = None
) -> None:
    """Create a session that does not exist. `auto_title` is its title if it has no other, `counters` are its first
    values."""
    kind = _check_kind(fields)
    owner, title = fields.get("owner") or "default", plain_title(fields.get("title"))
    columns = {name: column(name, fields[name]) for name in CREATED_WITH if fields.get(name) is not None}
    if (system_prompt := columns.pop("system_prompt", None)) is not None:
        columns["prompt_sha256"] = put(tx, system_prompt)
    refuse_taken(tx, owner, title, session_id)
    columns["title"] = title or free_title(tx, owner, fields.get("auto_title"))
    now = time.time()
    columns |= {"id": session_id, "owner": owner, "kind": kind, "source": clean_or_none(source) or ""}
    columns |= {"started_at": now, "last_active": now, **(counters or {})}
    names = ", ".join(columns)
    tx.execute(f"INSERT INTO sessions ({names}) VALUES ({placeholders(columns)})", list(columns.values()))


def _check_kind(fields: JsonMapping) -> str:
    kind: str = fields.get("kind") or "root"
    if kind not in _KINDS:
        raise ValueError(f"A session's kind is one of {', '.join(_KINDS)}.")
    return kind


def keep(tx: Tx, session_id: str) -> None:
    """Mark the session as named by a caller: it is no longer deleted as stateless."""
    tx.execute("UPDATE sessions SET stateless = FALSE WHERE id = ? AND stateless", (session_id,))


def count_usage(tx: Tx, session_id: str, usage: JsonMapping, model: str, provider: str, task: str) -> None:
    """Add one call to the counters; ignored if the session does not exist."""
    row = tx.row(_USAGE, (session_id,))
    if row is None:
        return
    entries: list[JsonObject] = unpack(row[0]) or []
    numbers, cost = _add_call(entries, usage, model, provider, task)
    if task:
        tx.execute("UPDATE sessions SET usage = ? WHERE id = ?", (pack(entries), session_id))
    else:
        tx.execute(_CALL_USED, (pack(entries), *numbers.values(), cost, cost, session_id))


def used(calls: Sequence[JsonMapping]) -> JsonObject:
    """The counters of a new session after these calls."""
    entries: list[JsonObject] = []
    columns: JsonObject = {"api_call_count": 0, **dict.fromkeys(_TOKENS, 0), "actual_cost_usd": None}
    for call in calls:
        numbers, cost = _add_call(entries, call, call.get("model", ""), call.get("provider", ""), call.get("task", ""))
        if not call.get("task"):
            columns["api_call_count"] += 1
            for name, number in numbers.items():
                columns[name] += number
            if cost is not None:
                columns["actual_cost_usd"] = (columns["actual_cost_usd"] or 0) + cost
    return {**columns, "usage": pack(entries)} if entries else {}


def _add_call(
    entries: list[JsonObject], usage: JsonMapping, model: str, provider: str, task: str
) -> tuple[dict[str, int], float | None]:
    """Add one call to the entries of a session; returns its tokens and its cost."""
    numbers = {name: int(usage.get(name) or 0) for name in _TOKENS}
    cost: float | None = usage.get("actual_cost_usd", usage.get("cost_usd"))
    key = {"model": model or "", "provider": provider or "", "task": task or ""}
    entry = next((entry for entry in entries if entry | key == entry), None)
    if entry is None:
        entries.append(key | {"calls": 1, **numbers, "actual_cost_usd": cost})
    else:
        entry["calls"] += 1
        for name, number in numbers.items():
            entry[name] += number
        if cost is not None:
            entry["actual_cost_usd"] = (entry["actual_cost_usd"] or 0) + cost
    return numbers, cost


def usage_of(packed: str | None) -> list[JsonObject]:
    return sorted(unpack(packed) or (), key=itemgetter(*USAGE_FIELDS[:3]))


def check_token(tx: Tx, session_id: str, token: int) -> None:
    if not is_current(tx, f"session:{session_id}", token):
        raise LeaseLost(f"The session '{session_id}' is held by somebody else now.")


def free_title(tx: Tx, owner: str, title: str | None) -> str | None:
    """The title as it is stored, numbered if it is taken."""
    plain = plain_title(title)
    return plain if plain is None or title_holder(tx, owner, plain) is None else next_title(tx, owner, plain)


def next_title(tx: Tx, owner: str, title: str) -> str:
    """The title with the next free number, found by bisection."""
    stem = re.sub(r" #\d+$", "", title)

    def is_taken(number: int) -> bool:
        return title_holder(tx, owner, numbered(stem, number)) is not None

    used, free = 1, 2
    while is_taken(free):
        used, free = free, 2 * free
    while free - used > 1:
        middle = (used + free) // 2
        used, free = (middle, free) if is_taken(middle) else (used, middle)
    return numbered(stem, free)


def title_holder(tx: Tx, owner: str, title: str) -> str | None:
    holder: str | None = tx.value(_TITLE_HOLDER, (owner, title))
    return holder


def prefetch_usage(tx: Tx, session_id: str) -> None:
    tx.prefetch(_USAGE, (session_id,))


def prefetch_titles(tx: Tx, fields: JsonMapping) -> None:
    owner = fields.get("owner") or "default"
    if title := plain_title(fields.get("title")) or plain_title(fields.get("auto_title")):
        tx.prefetch(_TITLE_HOLDER, (owner, title))


def refuse_taken(tx: Tx, owner: str, title: str | None, session_id: str) -> None:
    if title is not None and (holder := title_holder(tx, owner, title)) not in (None, session_id):
        raise ValueError(f"The title '{title}' belongs to the session '{holder}'.")


def session_fields(row: Record) -> JsonObject:
    fields = dict(row)
    fields.pop("prompt_sha256", None)
    fields.pop("usage", None)
    for name in _FLAGS:
        if name in fields:
            fields[name] = bool(fields[name])
    for name in _JSON:
        if name in fields:
            fields[name] = unpack(fields[name])
    return fields


def column(name: str, value: object) -> Any:
    if name in _JSON:
        return None if value is None else pack(value)
    if name in _FLAGS:
        return bool(value)
    return value if name == "max_iterations" else clean_or_none(value)
