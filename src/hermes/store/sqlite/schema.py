"""The tables of `state.db` and `response_store.db`, as migration steps. A released step is never changed, only followed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from hermes.core.limits import MERGED_PAGES_AT_ONCE, SEARCHED_CHARS_MAX, UPKEEP_STEP_S
from hermes.store.base import PURGE_DUE, USAGE_FIELDS
from hermes.store.sqlite.connections import Done, Schema, Tx
from hermes.store.sqlite.space import give_back

_SESSIONS = (
    """CREATE TABLE sessions (
      id TEXT PRIMARY KEY,
      owner TEXT NOT NULL,
      source TEXT NOT NULL,
      kind TEXT NOT NULL,
      parent_session_id TEXT REFERENCES sessions(id) ON DELETE SET NULL,
      forked_at_message_id INTEGER,
      session_key TEXT,
      base_id TEXT,
      user_id TEXT,
      title TEXT,
      model TEXT,
      cwd TEXT,
      started_at REAL NOT NULL,
      last_active REAL NOT NULL,
      ended_at REAL,
      end_reason TEXT,
      archived INTEGER NOT NULL DEFAULT 0,
      message_count INTEGER NOT NULL DEFAULT 0,
      tool_call_count INTEGER NOT NULL DEFAULT 0,
      api_call_count INTEGER NOT NULL DEFAULT 0,
      input_tokens INTEGER NOT NULL DEFAULT 0,
      output_tokens INTEGER NOT NULL DEFAULT 0,
      cache_read_tokens INTEGER NOT NULL DEFAULT 0,
      cache_write_tokens INTEGER NOT NULL DEFAULT 0,
      reasoning_tokens INTEGER NOT NULL DEFAULT 0,
      actual_cost_usd REAL,
      preview TEXT,
      transcript_digest TEXT,
      prompt_digest TEXT,
      model_config TEXT,
      instructions TEXT,
      system_prompt TEXT
    )""",
    "CREATE UNIQUE INDEX sessions_title ON sessions(owner, title) WHERE title IS NOT NULL",
    "CREATE INDEX sessions_active ON sessions(last_active, id)",
    "CREATE INDEX sessions_owner ON sessions(owner, last_active, id)",
    "CREATE INDEX sessions_started ON sessions(started_at, id)",
    "CREATE INDEX sessions_parent ON sessions(parent_session_id) WHERE parent_session_id IS NOT NULL",
    "CREATE INDEX sessions_base ON sessions(base_id, last_active) WHERE base_id IS NOT NULL",
    """CREATE TABLE messages (
      id INTEGER PRIMARY KEY AUTOINCREMENT,
      session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
      run_id TEXT,
      role TEXT NOT NULL,
      active INTEGER NOT NULL DEFAULT 1,
      compacted INTEGER NOT NULL DEFAULT 0,
      synthetic INTEGER NOT NULL DEFAULT 0,
      copy_of INTEGER,
      timestamp REAL NOT NULL,
      token_count INTEGER,
      finish_reason TEXT,
      tool_call_id TEXT,
      tool_name TEXT,
      content TEXT,
      parts TEXT,
      tool_calls TEXT,
      reasoning TEXT,
      opaque TEXT,
      api_content TEXT,
      search_text TEXT
    )""",
    "CREATE INDEX messages_session ON messages(session_id, id)",
    "CREATE INDEX messages_run ON messages(run_id, id) WHERE run_id IS NOT NULL",
    "CREATE TABLE blobs (sha256 TEXT PRIMARY KEY, media_type TEXT NOT NULL, bytes BLOB NOT NULL)",
    """CREATE TABLE message_blobs (
      sha256 TEXT NOT NULL REFERENCES blobs(sha256),
      message_id INTEGER NOT NULL,
      PRIMARY KEY (sha256, message_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX message_blobs_message ON message_blobs(message_id)",
    """CREATE TRIGGER messages_gone AFTER DELETE ON messages BEGIN
      DELETE FROM message_blobs WHERE message_id = old.id;
    END""",
    """CREATE TRIGGER blobs_gone AFTER DELETE ON message_blobs BEGIN
      DELETE FROM blobs WHERE sha256 = old.sha256
        AND NOT EXISTS (SELECT 1 FROM message_blobs WHERE sha256 = old.sha256);
    END""",
    """CREATE TABLE session_model_usage (
      session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
      model TEXT NOT NULL,
      provider TEXT NOT NULL,
      task TEXT NOT NULL,
      calls INTEGER NOT NULL DEFAULT 0,
      input_tokens INTEGER NOT NULL DEFAULT 0,
      output_tokens INTEGER NOT NULL DEFAULT 0,
      cache_read_tokens INTEGER NOT NULL DEFAULT 0,
      cache_write_tokens INTEGER NOT NULL DEFAULT 0,
      reasoning_tokens INTEGER NOT NULL DEFAULT 0,
      actual_cost_usd REAL,
      PRIMARY KEY (session_id, model, provider, task)
    ) WITHOUT ROWID""",
    """CREATE TABLE session_files (
      id TEXT PRIMARY KEY,
      session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
      name TEXT NOT NULL,
      bytes INTEGER NOT NULL,
      mime TEXT NOT NULL,
      direction TEXT NOT NULL,
      path TEXT NOT NULL,
      created_at REAL NOT NULL
    )""",
    "CREATE INDEX session_files_session ON session_files(session_id, created_at)",
    """CREATE TABLE pending_calls (
      call_id TEXT NOT NULL,
      owner TEXT NOT NULL,
      session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
      run_id TEXT,
      expires_at REAL NOT NULL,
      PRIMARY KEY (owner, call_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX pending_calls_session ON pending_calls(session_id)",
    "CREATE TABLE state_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)

_RUNS = (
    """CREATE TABLE runs (
      run_id TEXT PRIMARY KEY,
      owner TEXT NOT NULL,
      kind TEXT NOT NULL,
      session_id TEXT NOT NULL,
      response_id TEXT,
      session_key TEXT,
      source TEXT NOT NULL,
      holder TEXT NOT NULL,
      status TEXT NOT NULL,
      created_at REAL NOT NULL,
      updated_at REAL NOT NULL,
      started_at REAL,
      ended_at REAL,
      last_event TEXT NOT NULL DEFAULT '',
      last_seq INTEGER NOT NULL DEFAULT 0,
      failure TEXT,
      error TEXT,
      usage TEXT,
      final_row INTEGER,
      job_id TEXT,
      parent_run_id TEXT,
      parent_call_id TEXT,
      resumes INTEGER NOT NULL DEFAULT 0,
      log_expired INTEGER NOT NULL DEFAULT 0,
      route TEXT,
      open TEXT,
      spec TEXT NOT NULL
    )""",
    "CREATE INDEX runs_created ON runs(created_at)",
    "CREATE INDEX runs_session ON runs(session_id, created_at)",
    "CREATE INDEX runs_owner ON runs(owner, created_at)",
    "CREATE INDEX runs_unfinished ON runs(created_at) WHERE ended_at IS NULL",
    """CREATE TABLE run_events (
      run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
      seq INTEGER NOT NULL,
      ts REAL NOT NULL,
      type TEXT NOT NULL,
      step INTEGER NOT NULL,
      data TEXT NOT NULL,
      PRIMARY KEY (run_id, seq)
    ) WITHOUT ROWID""",
    """CREATE TABLE run_partials (
      run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
      stream_id TEXT NOT NULL,
      kind TEXT NOT NULL,
      step INTEGER NOT NULL,
      form TEXT NOT NULL,
      last_seq INTEGER NOT NULL,
      cuts TEXT NOT NULL,
      text TEXT NOT NULL,
      PRIMARY KEY (run_id, stream_id)
    ) WITHOUT ROWID""",
    """CREATE TABLE run_controls (
      control_id TEXT NOT NULL,
      run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
      control TEXT NOT NULL,
      data TEXT NOT NULL,
      created_at REAL NOT NULL,
      taken_at REAL,
      PRIMARY KEY (run_id, control_id)
    ) WITHOUT ROWID""",
    "CREATE TABLE leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, token INTEGER NOT NULL, until REAL NOT NULL)",
)

_WORK = (
    """CREATE TABLE idempotency (
      scope TEXT NOT NULL,
      key TEXT NOT NULL,
      fingerprint TEXT NOT NULL,
      state TEXT NOT NULL,
      run_id TEXT,
      status INTEGER,
      body BLOB,
      created_at REAL NOT NULL,
      expires_at REAL NOT NULL,
      PRIMARY KEY (scope, key)
    )""",
    "CREATE INDEX idempotency_created ON idempotency(created_at)",
    "CREATE INDEX idempotency_run ON idempotency(run_id) WHERE run_id IS NOT NULL",
    """CREATE TABLE jobs (
      id TEXT PRIMARY KEY,
      owner TEXT NOT NULL,
      name TEXT NOT NULL,
      enabled INTEGER NOT NULL,
      state TEXT NOT NULL,
      created_at REAL NOT NULL,
      next_run_at REAL,
      claimed_by TEXT,
      claimed_until REAL NOT NULL DEFAULT 0,
      data TEXT NOT NULL
    )""",
    "CREATE INDEX jobs_due ON jobs(next_run_at) WHERE enabled AND next_run_at IS NOT NULL",
)


def _indexed(row: str, more: str = "") -> str:
    return f"NOT {row}synthetic{more} AND ({row}content IS NOT NULL OR {row}tool_name IS NOT NULL)"


def _indexed_if_said(row: str) -> str:
    return _indexed(row, f" AND NOT {row}model_only")


def _indexed_unless_copy(row: str) -> str:
    return _indexed(row, f" AND {row}copy_of IS NULL")


def _body(row: str) -> str:
    return f"coalesce({row}search_text, substr({row}content, 1, {SEARCHED_CHARS_MAX}))"


def _index(row: str) -> str:
    return f"INSERT INTO messages_fts(rowid, body, tool) VALUES ({row}id, {_body(row)}, {row}tool_name);"


def _unindex(row: str) -> str:
    return (
        "INSERT INTO messages_fts(messages_fts, rowid, body, tool) "
        f"VALUES ('delete', {row}id, {_body(row)}, {row}tool_name);"
    )


def _search_view(indexed: Callable[[str], str]) -> str:
    columns = f"id, {_body('')} AS body, tool_name AS tool"
    return f"CREATE VIEW search_src AS SELECT {columns} FROM messages WHERE {indexed('')}"


def _search_triggers(indexed: Callable[[str], str], columns: str) -> tuple[str, ...]:
    return (
        f"CREATE TRIGGER search_added AFTER INSERT ON messages WHEN {indexed('new.')} BEGIN {_index('new.')} END",
        f"CREATE TRIGGER search_gone AFTER DELETE ON messages WHEN {indexed('old.')} BEGIN {_unindex('old.')} END",
        f"CREATE TRIGGER search_leaves BEFORE UPDATE OF {columns} ON messages "
        f"WHEN {indexed('old.')} BEGIN {_unindex('old.')} END",
        f"CREATE TRIGGER search_enters AFTER UPDATE OF {columns} ON messages "
        f"WHEN {indexed('new.')} BEGIN {_index('new.')} END",
    )


_SEARCH = (
    _search_view(_indexed_unless_copy),
    """CREATE VIRTUAL TABLE messages_fts USING fts5(
      body, tool, content='search_src', content_rowid='id', tokenize='unicode61 remove_diacritics 2'
    )""",
    *_search_triggers(_indexed_unless_copy, "content, search_text, tool_name, synthetic, copy_of"),
    "INSERT INTO messages_fts(messages_fts) VALUES ('rebuild')",
)

_GIVEN = (
    "ALTER TABLE messages ADD COLUMN name TEXT",
    "ALTER TABLE messages ADD COLUMN digest TEXT",
    """CREATE TABLE compactions (
      owner TEXT NOT NULL,
      digest TEXT NOT NULL,
      session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
      created_at REAL NOT NULL,
      first_kept INTEGER NOT NULL,
      messages TEXT NOT NULL,
      PRIMARY KEY (owner, digest)
    )""",
    "CREATE INDEX compactions_session ON compactions(session_id)",
)

# A message is one row, whatever was compacted since. Copies that older versions made of rows they kept are put back into
# the rows they repeat: those are live in the copy's place, with the words that stood for them before the model.
_ONE_ROW_EACH = (
    *(f"DROP TRIGGER search_{name}" for name in ("added", "gone", "leaves", "enters")),
    "DROP VIEW search_src",
    "ALTER TABLE messages ADD COLUMN model_only INTEGER NOT NULL DEFAULT 0",
    # Rows that close a turn are written by us as well; they have a reason for their end.
    "UPDATE messages SET model_only = 1 "
    "WHERE synthetic AND copy_of IS NULL AND run_id IS NULL AND finish_reason IS NULL",
    """CREATE TEMP TABLE model_view AS
      SELECT coalesce(copy_of, id) AS id, api_content, row_number() OVER (PARTITION BY session_id ORDER BY id) AS place
      FROM messages WHERE active AND session_id IN (SELECT session_id FROM messages WHERE copy_of IS NOT NULL)""",
    "UPDATE sessions SET forked_at_message_id = (SELECT copy_of FROM messages m WHERE m.id = forked_at_message_id) "
    "WHERE forked_at_message_id IN (SELECT id FROM messages WHERE copy_of IS NOT NULL)",
    "DELETE FROM messages WHERE copy_of IS NOT NULL",
    "ALTER TABLE messages RENAME COLUMN copy_of TO position",
    "UPDATE messages SET active = 1, compacted = 0, position = v.place, api_content = v.api_content "
    "FROM temp.model_view v WHERE v.id = messages.id",
    "DROP TABLE temp.model_view",
    "UPDATE sessions SET message_count = (SELECT count(*) FROM messages m "
    "WHERE m.session_id = sessions.id AND NOT m.model_only AND (m.active OR m.compacted)) "
    "WHERE id IN (SELECT session_id FROM messages WHERE compacted OR model_only)",
    "CREATE INDEX messages_live ON messages(session_id, coalesce(position, id)) WHERE active",
    _search_view(_indexed_if_said),
    *_search_triggers(_indexed_if_said, "content, search_text, tool_name, synthetic, model_only"),
    "ALTER TABLE sessions ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE sessions ADD COLUMN workdir TEXT",
    "ALTER TABLE sessions ADD COLUMN toolsets TEXT",
    "ALTER TABLE sessions ADD COLUMN max_iterations INTEGER",
)

# A text that grows is kept in pieces, each of which is written once.
_PIECES = (
    "ALTER TABLE run_partials RENAME TO run_partials_whole",
    """CREATE TABLE run_partials (
      run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
      stream_id TEXT NOT NULL,
      offset INTEGER NOT NULL,
      kind TEXT NOT NULL,
      step INTEGER NOT NULL,
      form TEXT NOT NULL,
      last_seq INTEGER NOT NULL,
      cuts TEXT NOT NULL,
      text TEXT NOT NULL,
      PRIMARY KEY (run_id, stream_id, offset)
    ) WITHOUT ROWID""",
    "INSERT INTO run_partials SELECT run_id, stream_id, 0, kind, step, form, last_seq, cuts, text FROM run_partials_whole",
    "DROP TABLE run_partials_whole",
)

# Lists are read, filtered and counted from their indexes alone: rows hold whole prompts.
_LIST_FILTERS = "kind, archived, pinned, source, session_key"
_LIST_INDEXES = (
    "DROP INDEX sessions_owner",
    "DROP INDEX sessions_active",
    "DROP INDEX sessions_started",
    f"CREATE INDEX sessions_owner ON sessions(owner, last_active, id, {_LIST_FILTERS})",
    f"CREATE INDEX sessions_active ON sessions(last_active, id, {_LIST_FILTERS})",
    f"CREATE INDEX sessions_started ON sessions(started_at, id, owner, {_LIST_FILTERS})",
    "DROP INDEX runs_created",
    "DROP INDEX runs_owner",
    "DROP INDEX runs_unfinished",
    "CREATE INDEX runs_owner ON runs(owner, created_at, run_id, kind, status, job_id)",
    "CREATE INDEX runs_unfinished ON runs(session_id, created_at) WHERE ended_at IS NULL",
)

# Of a session from before nobody knows whether it was ever named: it stays.
_GROWTH = (
    "ALTER TABLE sessions ADD COLUMN stateless INTEGER NOT NULL DEFAULT 0",
    "CREATE TABLE prompts (sha256 TEXT PRIMARY KEY, used_at REAL NOT NULL, text TEXT NOT NULL) WITHOUT ROWID",
    "ALTER TABLE sessions ADD COLUMN prompt_sha256 TEXT",
    "INSERT OR IGNORE INTO prompts SELECT sha256(system_prompt), 0, system_prompt FROM sessions "
    "WHERE system_prompt IS NOT NULL",
    "UPDATE sessions SET prompt_sha256 = sha256(system_prompt) WHERE system_prompt IS NOT NULL",
    "ALTER TABLE sessions DROP COLUMN system_prompt",
    "ALTER TABLE runs ADD COLUMN instructions_sha256 TEXT",
)

# What every turn writes to is in as few places as can be: each is a page of the log of changes.
_FEWER_PAGES = (
    "ALTER TABLE sessions ADD COLUMN usage TEXT",
    f"""UPDATE sessions SET usage = (
      SELECT json_group_array(json_object({", ".join(f"'{name}', {name}" for name in USAGE_FIELDS)}))
      FROM session_model_usage WHERE session_id = sessions.id
    ) WHERE id IN (SELECT session_id FROM session_model_usage)""",
    "DROP TABLE session_model_usage",
    f"""CREATE VIEW session_model_usage AS SELECT sessions.id AS session_id,
      {", ".join(f"json_extract(entry.value, '$.{name}') AS {name}" for name in USAGE_FIELDS)}
      FROM sessions, json_each(sessions.usage) AS entry""",
    "DROP INDEX messages_live",
    "DROP INDEX messages_session",
    "CREATE INDEX messages_session ON messages(session_id, id, active)",
    "ALTER TABLE leases RENAME TO leases_by_rowid",
    """CREATE TABLE leases (
      name TEXT PRIMARY KEY, holder TEXT NOT NULL, token INTEGER NOT NULL, until REAL NOT NULL
    ) WITHOUT ROWID""",
    "INSERT INTO leases SELECT name, holder, token, until FROM leases_by_rowid",
    "DROP TABLE leases_by_rowid",
    "INSERT INTO leases SELECT '', '', CAST(value AS INTEGER), 0 FROM state_meta WHERE key = 'lease_token'",
    "DELETE FROM state_meta WHERE key = 'lease_token'",
)

# The events of one commit are one value: those of the commit that makes the run are in its row, which is one page less
# to write. A session that has its plain id is found by that alone, and the messages of a run from its first one on.
_EVENT_COLUMNS = ", ".join(
    f"json_extract(event.value, '$[{at}]') AS {name}" for at, name in enumerate(("seq", "ts", "type", "step", "data"))
)
_FEWER_ROWS = (
    """CREATE TABLE run_log (
      run_id TEXT NOT NULL REFERENCES runs(run_id) ON DELETE CASCADE,
      last_seq INTEGER NOT NULL,
      events TEXT NOT NULL,
      PRIMARY KEY (run_id, last_seq)
    ) WITHOUT ROWID""",
    "INSERT INTO run_log SELECT run_id, seq, json_array(json_array(seq, ts, type, step, json(data))) FROM run_events",
    "DROP TABLE run_events",
    "ALTER TABLE runs ADD COLUMN first_events TEXT",
    f"""CREATE VIEW run_events AS
      SELECT run_id, {_EVENT_COLUMNS} FROM runs, json_each(runs.first_events) AS event
      UNION ALL SELECT run_id, {_EVENT_COLUMNS} FROM run_log, json_each(run_log.events) AS event""",
    "ALTER TABLE runs ADD COLUMN first_row INTEGER",
    "UPDATE runs SET first_row = (SELECT min(id) FROM messages WHERE messages.run_id = runs.run_id)",
    "DROP INDEX messages_run",
    "DROP INDEX sessions_base",
    "CREATE INDEX sessions_base ON sessions(base_id, last_active) WHERE base_id <> id",
)

# Who is signed in with a browser, and what was used on which day.
_PAGE = (
    "ALTER TABLE sessions ADD COLUMN reasoning_effort TEXT",
    """CREATE TABLE sign_ins (
      token_sha256 TEXT PRIMARY KEY,
      owner TEXT NOT NULL,
      key_sha256 TEXT NOT NULL,
      created_at REAL NOT NULL,
      expires_at REAL NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX sign_ins_owner ON sign_ins(owner, created_at)",
    """CREATE TABLE usage_days (
      day INTEGER NOT NULL,
      owner TEXT NOT NULL,
      provider TEXT NOT NULL,
      model TEXT NOT NULL,
      name TEXT NOT NULL,
      value REAL NOT NULL,
      PRIMARY KEY (day, owner, provider, model, name)
    ) WITHOUT ROWID""",
)

MIGRATIONS = (
    *(_SESSIONS, _RUNS, _WORK, _SEARCH, _GIVEN, _ONE_ROW_EACH, _PIECES, _LIST_INDEXES, _GROWTH, _FEWER_PAGES),
    *(_FEWER_ROWS, _PAGE),
)


def _upkeep(tx: Tx) -> Done:
    stage = tx.value("SELECT value FROM state_meta WHERE key = ?", (PURGE_DUE,))
    if stage is not None:
        return _purge(tx, merging=stage != "1")
    done = give_back(tx)
    if done == "nothing":
        tx.execute("PRAGMA optimize")
    return done


def _purge(tx: Tx, *, merging: bool) -> Done:
    """Merge the index for a few milliseconds."""
    until = time.monotonic() + UPKEEP_STEP_S
    # A negative number starts a full merge; positive ones continue it.
    pages = MERGED_PAGES_AT_ONCE if merging else -MERGED_PAGES_AT_ONCE
    while True:
        before = tx.changes
        tx.execute("INSERT INTO messages_fts(messages_fts, rank) VALUES ('merge', ?)", (pages,))
        if tx.changes - before < 2:
            tx.execute("DELETE FROM state_meta WHERE key = ?", (PURGE_DUE,))
            return "all"
        if time.monotonic() > until:
            break
        pages = MERGED_PAGES_AT_ONCE
    if not merging:
        tx.execute("UPDATE state_meta SET value = '2' WHERE key = ?", (PURGE_DUE,))
    return "more"


def _probe(tx: Tx) -> bool:
    """Whether the newest message is found by one of its words."""
    newest = tx.row("SELECT id, body FROM search_src ORDER BY id DESC LIMIT 1")
    # Between spaces: the index may know a part of a longer word under other letters.
    word = re.search(r"(?:^|\s)([A-Za-z0-9]+)(?=\s|$)", newest["body"] or "") if newest else None
    if newest is None or word is None:
        return True
    sql = "SELECT 1 FROM messages_fts WHERE messages_fts MATCH ? AND rowid = ?"
    return tx.value(sql, (f'"{word[1]}"', newest["id"])) is not None


STATE = Schema(MIGRATIONS, "messages_fts", _probe, _upkeep, has_marks=True)


# --- response_store.db ------------------------------------------------------------------------------------------------

_RESPONSES = (
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
RESPONSES = Schema((_RESPONSES, _CONVERSATIONS), upkeep=give_back)
