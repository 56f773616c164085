"""A large database of made-up conversations, the same each time, kept between runs of the bench."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hermes.store.sessions import SessionDB

# Raised when anything below changes what is generated.
GENERATOR = 1
FULL, QUICK = (1_000_000, 20_000), (50_000, 1_000)  # messages and sessions
CACHE = Path(__file__).parent / ".cache"
WORDS = 200_000
CHARS_MIN, CHARS_MAX = 20, 800
# So many sessions are talked to at a time, so that the messages of one do not lie side by side.
AT_A_TIME = 16
GUEST = "guest"
FIRST_AT, SECONDS_APART = 1_700_000_000.0, 30.0
BATCH = 50_000
ROLES = ("user", "assistant", "tool", "assistant")
CONSONANTS = "bcdfghjklmnpqrstvwxz"
SYLLABLES = [consonant + vowel for consonant in CONSONANTS for vowel in "aeiou"]


def word(rank: int) -> str:
    """The word of this rank: three letters for the hundred most common ones, five, then seven for the rare."""
    at, last = rank, CONSONANTS[rank % 20]
    for syllables in (1, 2, 3):
        band = len(SYLLABLES) ** syllables
        if at < band:
            break
        at -= band
    # Neighbours in rank are no neighbours in spelling.
    at = (at * 37 + 11) % band
    return "".join(SYLLABLES[at // len(SYLLABLES) ** n % len(SYLLABLES)] for n in range(syllables)) + last


def session_id(number: int) -> str:
    return f"bench-{number:06d}"


def owner(number: int) -> str:
    """One person has few of the sessions, everybody else the rest."""
    return GUEST if number % 500 == 250 else "default"


def corpus(messages: int, sessions: int) -> Path:
    """The database with this many messages, from the last time or made anew."""
    CACHE.mkdir(exist_ok=True)
    name = f"state-{messages}-{_digest(messages, sessions)}"
    path, note = CACHE / f"{name}.db", CACHE / f"{name}.json"
    if not note.exists():
        for old in CACHE.glob(f"state-{messages}-*"):
            old.unlink()
        _make(path, messages, sessions)
        note.write_text("{}")
    return path


@contextmanager
def copied(database: Path) -> Iterator[Path]:
    """A copy that may be written to, in a folder of its own, as `state.db`."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        copy = Path(folder) / "state.db"
        shutil.copyfile(database, copy)
        # Or the first commit that reaches the disk would wait for all of it.
        with open(copy, "rb") as file:
            os.fsync(file.fileno())
        yield copy


def _digest(messages: int, sessions: int) -> str:
    """Of all that decides what the file looks like: the generator and the tables."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.db"
        SessionDB(empty).close()
        with closing(sqlite3.connect(empty)) as db:
            tables = db.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
    return hashlib.sha256(repr((GENERATOR, messages, sessions, tables)).encode()).hexdigest()[:12]


def _make(path: Path, messages: int, sessions: int) -> None:
    print(f"making {path.name}: {messages:,} messages in {sessions:,} sessions")
    SessionDB(path).close()
    chance = random.Random(GENERATOR)
    sizes = _sizes(chance, messages, sessions)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for setting in ("synchronous=OFF", "foreign_keys=OFF", "cache_size=-262144"):
            db.execute(f"PRAGMA {setting}")
        opening, spans = _add_messages(db, chance, sizes)
        rows = [
            (session_id(n), owner(n), f"{opening[n][:30].strip()} {n}", *spans[n], sizes[n], opening[n])
            for n in range(sessions)
        ]
        db.execute("BEGIN")
        db.executemany(
            "INSERT INTO sessions(id, owner, title, started_at, last_active, message_count, preview, source, kind, model) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, 'api_server', 'root', 'bench')",
            rows,
        )
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _add_messages(
    db: sqlite3.Connection, chance: random.Random, sizes: list[int]
) -> tuple[dict[int, str], dict[int, tuple[float, float]]]:
    """Write all messages. How each session begins, and from when to when it went on."""
    opening: dict[int, str] = {}
    spans: dict[int, tuple[float, float]] = {}
    texts = _texts(chance)
    order = enumerate(_order(chance, sizes), 1)
    while batch := list(itertools.islice(order, BATCH)):
        rows = []
        for row_id, (session, turn) in batch:
            text, when, role = next(texts), FIRST_AT + SECONDS_APART * row_id, ROLES[turn % len(ROLES)]
            rows.append((row_id, session_id(session), role, text, when, "terminal" if role == "tool" else None))
            opening.setdefault(session, text[:60])
            spans[session] = (spans.get(session, (when, when))[0], when)
        db.execute("BEGIN")
        db.executemany(
            "INSERT INTO messages(id, session_id, role, content, timestamp, tool_name) VALUES (?, ?, ?, ?, ?, ?)", rows
        )
        db.execute("COMMIT")
        print(f"\r{batch[-1][0]:>10,}", end="", flush=True)
    print()
    return opening, spans


def _sizes(chance: random.Random, messages: int, sessions: int) -> list[int]:
    """How many messages each session has: most few, some very many, the longest first."""
    weights = sorted((min(200.0, chance.paretovariate(1.5)) for _ in range(sessions)), reverse=True)
    spare, total = messages - 2 * sessions, sum(weights)
    sizes = [2 + int(weight / total * spare) for weight in weights]
    sizes[0] += messages - sum(sizes)
    return sizes


def _order(chance: random.Random, sizes: list[int]) -> Iterator[tuple[int, int]]:
    """The session of each message and its place therein."""
    waiting = list(range(len(sizes)))
    chance.shuffle(waiting)
    going: list[list[int]] = []
    while waiting or going:
        while waiting and len(going) < AT_A_TIME:
            going.append([waiting.pop(), 0])
        at = chance.randrange(len(going))
        session, turn = going[at]
        yield session, turn
        going[at][1] += 1
        if going[at][1] == sizes[session]:
            going.pop(at)


def _texts(chance: random.Random) -> Iterator[str]:
    """Texts of words that are as common as their rank is low."""
    words = [word(rank) for rank in range(WORDS)]
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(WORDS)))
    while True:
        pool = " ".join(chance.choices(words, cum_weights=weights, k=100_000))
        at = 0
        while at + CHARS_MAX < len(pool):
            end = pool.rindex(" ", at, at + chance.randint(CHARS_MIN, CHARS_MAX))
            yield pool[at:end]
            at = end + 1
