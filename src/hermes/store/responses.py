"""`ResponseStore`: stored responses and conversations of the Responses API; items of a history are stored once."""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from hermes.core.ids import random_hex
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import BOUND_SESSIONS_MAX, PENDING_CALLS_KEPT_S
from hermes.store.codec import pack
from hermes.store.dialect import either, json_text
from hermes.store.engine import Engine, Tx
from hermes.store.repository import Repository, blocks, reads, reads_slowly, writes
from hermes.store.sqlite.engine import SqliteEngine
from hermes.store.sqlite.schema import RESPONSES

log = logging.getLogger(__name__)

_HISTORY = "conversation_history"
_CALL_ID = either("call_id", 'call_id COLLATE "C"')  # compared byte by byte, whatever the database's locale
_UNFINISHED = ("queued", "in_progress")


class ResponseStore(Repository):
    """Records by id; the least recently used of an owner are evicted first. Without a path the store is in memory; with
    an `engine` it uses that one."""

    def __init__(
        self,
        max_size: int = 100,
        db_path: str | Path | None = None,
        max_age_days: float | None = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        if engine is None:
            engine = SqliteEngine.of(Path(db_path) if db_path else None, RESPONSES)
        else:
            engine.shared()
        self._finalizer = weakref.finalize(self, engine.drop)
        super().__init__(engine)
        self._max_size, self._max_age_days = max_size, max_age_days
        self.notices: list[str] = engine.notices

    @blocks
    def close(self) -> None:
        if self._finalizer.detach() is not None:
            self._engine.release()

    @writes
    def put(self, tx: Tx, response_id: str, data: JsonMapping, only: Literal["known", "new"] | None = None) -> None:
        """Store a record, replacing one with the same id; with `only`, only if that is known, or new."""
        owner = data.get("owner") or "default"
        response = data.get("response")
        status = response.get("status") if isinstance(response, Mapping) else None
        body = {name: value for name, value in data.items() if name != _HISTORY}
        old = tx.row("SELECT created_at, items FROM responses WHERE id = ?", (response_id,))
        if only == ("new" if old is not None else "known"):
            return
        items = _keep_items(tx, data[_HISTORY]) if isinstance(data.get(_HISTORY), list) else None
        if items is None and _HISTORY in data:
            body[_HISTORY] = data[_HISTORY]
        if old is not None:
            _drop_items(tx, old["items"])
        tx.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET owner = excluded.owner, "
            "status = excluded.status, used = excluded.used, body = excluded.body, items = excluded.items",
            (response_id, owner, status or "", time.time(), tx.next_value("response_use"), pack(body), items),
        )
        self._evict(tx, owner, response_id)

    @blocks
    def get(self, response_id: str, owner: str | None = None) -> JsonObject | None:
        """A copy of the record, or None; counts as use. With an owner, only that owner's."""
        record, fault = self._get(response_id, owner)
        if fault:
            message = f"A stored response could not be read and was removed: {response_id}."
            self.notices.append(message)
            log.warning("%s", message)
        return record

    @writes
    def _get(self, tx: Tx, response_id: str, owner: str | None) -> tuple[JsonObject | None, bool]:
        row = tx.row("SELECT owner, body, items FROM responses WHERE id = ?", (response_id,))
        if row is None or (owner is not None and row["owner"] != owner):
            return None, False
        try:
            record = _record(tx, row["body"], row["items"])
        except (msgspec.DecodeError, ValueError, TypeError, LookupError):
            _remove(tx, response_id)
            return None, True
        tx.execute("UPDATE responses SET used = ? WHERE id = ?", (tx.next_value("response_use"), response_id))
        return record, False

    @writes
    def delete(self, tx: Tx, response_id: str) -> bool:
        return _remove(tx, response_id)

    @reads
    def known(self, tx: Tx, response_ids: Collection[str]) -> set[str]:
        sql = "SELECT 1 FROM responses WHERE id = ?"
        return {response_id for response_id in response_ids if tx.value(sql, (response_id,)) is not None}

    @reads_slowly
    def unfinished(self, tx: Tx) -> list[str]:
        return [row[0] for row in tx.rows("SELECT id FROM responses WHERE status IN (?, ?)", _UNFINISHED)]

    def __len__(self) -> int:
        return self._engine.read(lambda tx: int(tx.value("SELECT count(*) FROM responses")))

    @writes
    def set_conversation(self, tx: Tx, name: str, response_id: str, owner: str | None = None) -> None:
        """Point a name to a record; ignored if the record is missing or another owner's."""
        of = tx.value("SELECT owner FROM responses WHERE id = ?", (response_id,))
        if of is None or (owner is not None and of != owner):
            return
        tx.execute(
            "INSERT INTO conversations VALUES (?, ?, ?) ON CONFLICT (owner, name) DO UPDATE SET "
            "response_id = excluded.response_id",
            (owner or of, name, response_id),
        )

    @reads
    def get_conversation(self, tx: Tx, name: str, owner: str | None = None) -> str | None:
        mine, params = ("owner = ? AND ", [owner]) if owner is not None else ("", [])
        sql = f"SELECT response_id FROM conversations WHERE {mine}name = ? ORDER BY owner"
        response_id: str | None = tx.value(sql, (*params, name))
        return response_id

    @reads_slowly
    def find_items(self, tx: Tx, item_ids: Collection[str], owner: str) -> dict[str, JsonObject]:
        """Items of the owner's stored responses and conversations by their ids; of two with one id that of the response
        used last. Each record is read once, however many items are wanted."""
        items_by_id: dict[str, JsonObject] = {}
        missing_ids = set(item_ids)

        def take(items: Iterable[JsonObject]) -> None:
            items_by_id.update({item["id"]: item for item in reversed(list(items)) if item.get("id") in missing_ids})
            missing_ids.difference_update(items_by_id)

        for (body,) in tx.each("SELECT body FROM responses WHERE owner = ? ORDER BY used DESC", (owner,)):
            if not missing_ids:
                return items_by_id
            record = msgspec.json.decode(body)
            take([*(record.get("input_items") or ()), *record["response"].get("output", ())])
        sql = (
            "SELECT i.json FROM conversation_items i JOIN conversation_objects c ON c.id = i.conversation_id "
            "WHERE c.owner = ?"
        )
        for (text,) in tx.each(sql, (owner,)):
            if not missing_ids:
                return items_by_id
            take([msgspec.json.decode(text)])
        return items_by_id

    @writes
    def put_conversation_object(
        self, tx: Tx, conversation_id: str, owner: str, metadata: Mapping[str, str], created_at: int
    ) -> None:
        """Create a conversation or change its metadata."""
        tx.execute(
            "INSERT INTO conversation_objects VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "metadata = excluded.metadata",
            (conversation_id, owner, created_at, pack(dict(metadata))),
        )

    @reads
    def get_conversation_object(self, tx: Tx, conversation_id: str, owner: str | None = None) -> JsonObject | None:
        row = tx.row("SELECT * FROM conversation_objects WHERE id = ?", (conversation_id,))
        if row is None or owner not in (None, row["owner"]):
            return None
        return {**dict(row), "metadata": msgspec.json.decode(row["metadata"])}

    @writes
    def delete_conversation_object(self, tx: Tx, conversation_id: str, owner: str) -> bool:
        """Delete a conversation; its responses stay."""
        tx.execute("DELETE FROM conversations WHERE name = ? AND owner = ?", (conversation_id, owner))
        sql = "DELETE FROM conversation_objects WHERE id = ? AND owner = ?"
        return bool(tx.change(sql, (conversation_id, owner)))

    @writes
    def add_conversation_items(
        self, tx: Tx, conversation_id: str, owner: str, items: Sequence[JsonMapping], response_id: str | None = None
    ) -> list[JsonObject]:
        """Append items to a conversation; those of a response only once. Returns them as stored: an id that another
        item of the conversation has is replaced."""
        of = tx.value("SELECT owner FROM conversation_objects WHERE id = ?", (conversation_id,))
        if of != owner:
            return []
        if response_id is not None:
            sql = "DELETE FROM conversation_items WHERE conversation_id = ? AND response_id = ?"
            tx.execute(sql, (conversation_id, response_id))
        stored = []
        for item in map(dict, items):
            if _item_position(tx, conversation_id, item["id"]) is not None:
                item["id"] = f"{item['id'].partition('_')[0]}_{random_hex(12)}"
            sql = "INSERT INTO conversation_items (conversation_id, response_id, json) VALUES (?, ?, ?)"
            tx.execute(sql, (conversation_id, response_id, pack(item)))
            stored.append(item)
        return stored

    @writes
    def delete_conversation_item(self, tx: Tx, conversation_id: str, owner: str, item_id: str) -> bool:
        """Delete an item. The conversation then continues from its items, not from responses that contain it."""
        position = _item_position(tx, conversation_id, item_id)
        of = tx.value("SELECT owner FROM conversation_objects WHERE id = ?", (conversation_id,))
        if of != owner or position is None:
            return False
        tx.execute("DELETE FROM conversation_items WHERE position = ?", (position,))
        tx.execute("UPDATE conversation_items SET response_id = NULL WHERE conversation_id = ?", (conversation_id,))
        tx.execute("DELETE FROM conversations WHERE name = ? AND owner = ?", (conversation_id, owner))
        return True

    @reads
    def conversation_items(self, tx: Tx, conversation_id: str, owner: str) -> list[JsonObject]:
        return _items(tx, conversation_id, owner, "1 = 1", ())

    @reads
    def conversation_items_since(
        self, tx: Tx, conversation_id: str, owner: str, response_id: str | None
    ) -> list[JsonObject]:
        """Items that were added by a client since a response; all of them if there is no response."""
        last = "SELECT max(position) FROM conversation_items WHERE conversation_id = ? AND response_id = ?"
        where = f"i.response_id IS NULL AND position > coalesce(({last}), 0)"
        return _items(tx, conversation_id, owner, where, (conversation_id, response_id))

    @writes
    def suspend(self, tx: Tx, call_ids: Sequence[str], scope: str, run_id: str, history: Sequence[JsonMapping]) -> None:
        """Store the transcript of a stateless turn until its client has answered these calls. Providers that number
        their calls give several turns the same ids: each stores its own."""
        now = time.time()
        tx.execute("DELETE FROM suspended WHERE expires_at <= ?", (now,))
        for call_id in call_ids:
            sql = (
                "INSERT INTO suspended VALUES (?, ?, ?, ?) ON CONFLICT (owner, call_id) DO UPDATE SET "
                "expires_at = excluded.expires_at, history = excluded.history"
            )
            tx.execute(sql, (scope, f"{call_id}\n{run_id}", now + PENDING_CALLS_KEPT_S, pack(list(history))))

    @reads
    def suspended(self, tx: Tx, call_id: str, scope: str) -> list[list[JsonObject]]:
        """The newest transcripts in which this call waits."""
        sql = (
            f"SELECT history FROM suspended WHERE owner = ? AND {_CALL_ID} > ? AND {_CALL_ID} < ? AND expires_at > ? "
            "ORDER BY expires_at DESC LIMIT ?"
        )
        within = (scope, f"{call_id}\n", f"{call_id}\v", time.time(), BOUND_SESSIONS_MAX)
        return [msgspec.json.decode(row[0]) for row in tx.rows(sql, within)]

    @writes
    def sweep(self, tx: Tx) -> int:
        if self._max_age_days is None:
            return 0
        before = time.time() - self._max_age_days * 86_400
        sql = "SELECT id FROM responses WHERE created_at < ? AND status NOT IN (?, ?)"
        old = [row[0] for row in tx.rows(sql, (before, *_UNFINISHED))]
        for response_id in old:
            _remove(tx, response_id)
        return len(old)

    def _evict(self, tx: Tx, owner: str, newest: str) -> None:
        surplus = tx.value("SELECT count(*) FROM responses WHERE owner = ?", (owner,)) - self._max_size
        if surplus <= 0:
            return
        sql = "SELECT id FROM responses WHERE owner = ? AND status NOT IN (?, ?) AND id != ? ORDER BY used LIMIT ?"
        for (response_id,) in tx.rows(sql, (owner, *_UNFINISHED, newest, surplus)):
            _remove(tx, response_id)


def _item_position(tx: Tx, conversation_id: str, item_id: str) -> int | None:
    sql = f"SELECT position FROM conversation_items WHERE conversation_id = ? AND {json_text('json', 'id')} = ?"
    position: int | None = tx.value(sql, (conversation_id, item_id))
    return position


def _items(tx: Tx, conversation_id: str, owner: str, where: str, params: Sequence[Any]) -> list[JsonObject]:
    sql = (
        "SELECT i.json FROM conversation_items i JOIN conversation_objects c ON c.id = i.conversation_id "
        f"WHERE c.id = ? AND c.owner = ? AND {where} ORDER BY i.position"
    )
    return [dict(msgspec.json.decode(row[0])) for row in tx.rows(sql, (conversation_id, owner, *params))]


def _keep_items(tx: Tx, items: list[Any]) -> str:
    """The hashes of the items of a history; each item is stored once."""
    hashes = []
    for item in items:
        text = pack(item)
        digest = hashlib.sha256(text.encode()).hexdigest()
        hashes.append(digest)
        sql = "INSERT INTO response_items VALUES (?, ?, 1) ON CONFLICT (sha256) DO UPDATE SET refs = response_items.refs + 1"
        tx.execute(sql, (digest, text))
    return pack(hashes)


def _drop_items(tx: Tx, items: str | None) -> None:
    try:
        hashes = msgspec.json.decode(items, type=list[str]) if items is not None else []
    except msgspec.DecodeError:
        return
    for digest in hashes:
        tx.execute("UPDATE response_items SET refs = refs - 1 WHERE sha256 = ?", (digest,))
        tx.execute("DELETE FROM response_items WHERE sha256 = ? AND refs <= 0", (digest,))


def _record(tx: Tx, body: str, items: str | None) -> JsonObject:
    record = msgspec.json.decode(body, type=JsonObject)
    if items is not None:
        history = []
        for digest in msgspec.json.decode(items, type=list[str]):
            text = tx.value("SELECT json FROM response_items WHERE sha256 = ?", (digest,))
            if text is None:
                raise LookupError(digest)
            history.append(msgspec.json.decode(text))
        record[_HISTORY] = history
    return record


def _remove(tx: Tx, response_id: str) -> bool:
    row = tx.row("SELECT items FROM responses WHERE id = ?", (response_id,))
    if row is None:
        return False
    _drop_items(tx, row["items"])
    tx.execute("DELETE FROM responses WHERE id = ?", (response_id,))
    return True
