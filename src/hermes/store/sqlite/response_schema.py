"""The tables of `response_store.db`, as migration steps."""

from __future__ import annotations

from hermes.store.sqlite.connections import Schema
from hermes.store.sqlite.space import give_back

_TABLES = (
    """CREATE TABLE responses (
      id TEXT PRIMARY KEY,
      owner TEXT NOT NULL,
      status TEXT NOT NULL,
      created_at REAL NOT NULL,
      used INTEGER NOT NULL,
      body TEXT NOT NULL,
      items TEXT
    )""",
    "CREATE INDEX responses_used ON responses(owner, used)",
    "CREATE TABLE response_items (sha256 TEXT PRIMARY KEY, json TEXT NOT NULL, refs INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE conversations (
      owner TEXT NOT NULL,
      name TEXT NOT NULL,
      response_id TEXT NOT NULL REFERENCES responses(id) ON DELETE CASCADE,
      PRIMARY KEY (owner, name)
    ) WITHOUT ROWID""",
    "CREATE INDEX conversations_response ON conversations(response_id)",
    "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO counters VALUES ('used', 0)",
)
_CONVERSATIONS = (
    """CREATE TABLE conversation_objects (
      id TEXT PRIMARY KEY,
      owner TEXT NOT NULL,
      created_at INTEGER NOT NULL,
      metadata TEXT NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE conversation_items (
      position INTEGER PRIMARY KEY,
      conversation_id TEXT NOT NULL REFERENCES conversation_objects(id) ON DELETE CASCADE,
      response_id TEXT,
      json TEXT NOT NULL
    )""",
    "CREATE INDEX conversation_items_of ON conversation_items(conversation_id, position)",
    """CREATE TABLE suspended (
      owner TEXT NOT NULL,
      call_id TEXT NOT NULL,
      expires_at REAL NOT NULL,
      history TEXT NOT NULL,
      PRIMARY KEY (owner, call_id)
    ) WITHOUT ROWID""",
)
RESPONSES = Schema((_TABLES, _CONVERSATIONS), upkeep=give_back)
