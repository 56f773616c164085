"""A large database of made-up conversations, the same each time, kept between runs of the bench."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hermes.core.spec import RunSpec
from hermes.store.codec import pack
from hermes.store.sessions import SessionDB

# Raised when anything below changes what is generated.
GENERATOR = 2
FULL, QUICK = (3_000_000, 20_000), (50_000, 1_000)  # messages and sessions
CACHE = Path(__file__).parent / ".cache"
WORDS = 200_000
# The shortest and the longest text of a role.
CHARS = {"user": (20, 400), "assistant": (40, 900), "tool": (60, 1_600)}
PROMPT_CHARS = (2_000, 6_000)
RUNS_MAX = 5_000
# So many sessions are talked to at a time, so that the messages of one do not lie side by side.
AT_A_TIME = 16
GUEST = "guest"
FIRST_AT, SECONDS_APART = 1_700_000_000.0, 30.0
BATCH = 50_000
ROLES = ("user", "assistant", "tool", "assistant")
SOURCES = ("api_server", "api_server", "cli", "cron")
KINDS = ("chat", "response", "run", "session")
_CALLS = '[{{"id": "call_{0}", "type": "function", "function": {{"name": "terminal", "arguments": "{{\\"command\\": \\"{1}\\"}}"}}}}]'
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
    name = f"state-{messages}-{sessions}-{GENERATOR}"
    path, unfinished = CACHE / f"{name}.db", CACHE / f"{name}.unfinished"
    if not path.exists():
        for old in CACHE.glob(f"state-{messages}-*"):
            old.unlink()
        _make(unfinished, messages, sessions)
        unfinished.rename(path)
    SessionDB(path).close()  # one of an older schema is migrated, once
    return path


@contextmanager
def copied(database: Path) -> Iterator[Path]:
    """A copy that may be written to, in a folder of its own, as `state.db`."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        copy = Path(folder) / "state.db"
        shutil.copyfile(database, copy)
        # Runs are kept for days only, and the corpus for longer.
        with closing(sqlite3.connect(copy)) as db, db:
            for name in ("created_at", "updated_at", "started_at", "ended_at"):
                db.execute(f"UPDATE runs SET {name} = ? - ((SELECT max(rowid) FROM runs) - rowid)", (time.time() - 60,))
        # Or the first commit that reaches the disk would wait for all of it.
        with open(copy, "rb") as file:
            os.fsync(file.fileno())
        yield copy


def _make(path: Path, messages: int, sessions: int) -> None:
    print(f"making {path.name}: {messages:,} messages in {sessions:,} sessions")
    SessionDB(path).close()
    chance = random.Random(GENERATOR)
    sizes = _sizes(chance, messages, sessions)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for setting in ("synchronous=OFF", "foreign_keys=OFF", "cache_size=-262144"):
            db.execute(f"PRAGMA {setting}")
        opening, spans, last_rows = _add_messages(db, chance, sizes)
        db.execute("BEGIN")
        _add_sessions(db, chance, sizes, opening, spans)
        _add_runs(db, chance, spans, last_rows)
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _add_messages(
    db: sqlite3.Connection, chance: random.Random, sizes: list[int]
) -> tuple[dict[int, str], dict[int, tuple[float, float]], dict[int, int]]:
    """Write all messages. How each session begins, from when to when it went on, and the id of its last message."""
    opening: dict[int, str] = {}
    spans: dict[int, tuple[float, float]] = {}
    last_rows: dict[int, int] = {}
    texts = _Texts(chance)
    order = enumerate(_order(chance, sizes), 1)
    while batch := list(itertools.islice(order, BATCH)):
        rows = []
        for row_id, (session, turn) in batch:
            when, role = FIRST_AT + SECONDS_APART * row_id, ROLES[turn % len(ROLES)]
            text, calls = texts.of(role), None
            if role == "assistant" and turn % len(ROLES) == 1:
                calls = _CALLS.format(f"{session}_{turn}", texts.some(40))
            tool = ("terminal", f"call_{session}_{turn - 1}") if role == "tool" else (None, None)
            rows.append((row_id, session_id(session), role, text, calls, when, *tool, len(text) // 4))
            opening.setdefault(session, text[:60])
            spans[session] = (spans.get(session, (when, when))[0], when)
            last_rows[session] = row_id
        db.execute("BEGIN")
        db.executemany(
            "INSERT INTO messages(id, session_id, role, content, tool_calls, timestamp, tool_name, tool_call_id, "
            "token_count) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        db.execute("COMMIT")
        print(f"\r{batch[-1][0]:>10,}", end="", flush=True)
    print()
    return opening, spans, last_rows


def _add_sessions(
    db: sqlite3.Connection,
    chance: random.Random,
    sizes: list[int],
    opening: dict[int, str],
    spans: dict[int, tuple[float, float]],
) -> None:
    """Most sessions share one of a few system prompts, each with its own date and folder at the end."""
    texts = _Texts(chance)
    prompts = [texts.some(chance.randint(*PROMPT_CHARS)) for _ in range(20)]
    texts_by_sha256: dict[str, str] = {}
    rows = []
    for n, size in enumerate(sizes):
        title = f"{opening[n][:30].strip()} {n}" if n % 5 else None
        prompt = f"{chance.choice(prompts)}\nDate: {spans[n][0]:.0f}\nFolder: /home/user/{word(n)}"
        prompt_sha256 = hashlib.sha256(prompt.encode()).hexdigest()
        texts_by_sha256[prompt_sha256] = prompt
        kind, source = ("delegate", "subagent") if n % 20 == 7 else ("root", chance.choice(SOURCES))
        rows.append(
            (
                *(session_id(n), owner(n), title, *spans[n], size, opening[n], source, kind, f"model-{n % 4}"),
                prompt_sha256,
                *(
                    texts.some(300) if n % 10 == 0 else None,
                    n % 50 == 3,
                    n % 100 == 9,
                    size // 4,
                    size * 400,
                    size * 90,
                ),
            )
        )
    db.executemany(
        "INSERT INTO sessions(id, owner, title, started_at, last_active, message_count, preview, source, kind, model, "
        "prompt_sha256, instructions, archived, pinned, tool_call_count, input_tokens, output_tokens) "
        f"VALUES ({', '.join('?' * 17)})",
        rows,
    )
    used_at = max(end for _, end in spans.values())
    db.executemany(
        "INSERT INTO prompts VALUES (?, ?, ?)", [(key, used_at, text) for key, text in texts_by_sha256.items()]
    )


def _add_runs(
    db: sqlite3.Connection, chance: random.Random, spans: dict[int, tuple[float, float]], last_rows: dict[int, int]
) -> None:
    """The last run of the sessions that were talked to last."""
    texts = _Texts(chance)
    latest = sorted(spans, key=lambda n: spans[n][1])[-RUNS_MAX:]
    rows = []
    for n in latest:
        spec = RunSpec(texts.of("user"), session_id(n), owner=owner(n), kind=chance.choice(KINDS))
        status = "failed" if n % 30 == 0 else "completed"
        ended = spans[n][1]
        rows.append(
            (
                *(spec.run_id, spec.owner, spec.kind, spec.session_id, "api_server", "bench", status, ended - 5, ended),
                *(ended - 5, ended, f"run.{status}", 8, last_rows[n], pack(spec.stored())),
            )
        )
    db.executemany(
        "INSERT INTO runs(run_id, owner, kind, session_id, source, holder, status, created_at, updated_at, started_at, "
        f"ended_at, last_event, last_seq, final_row, spec) VALUES ({', '.join('?' * 15)})",
        rows,
    )


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


class _Texts:
    """Texts of words that are as common as their rank is low, in the form that each role has."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._words = [word(rank) for rank in range(WORDS)]
        self._weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(WORDS)))
        self._pool, self._at = "", 0

    def some(self, chars: int) -> str:
        """Words, and no more than so many characters."""
        if self._at + chars >= len(self._pool):
            self._pool = " ".join(self._chance.choices(self._words, cum_weights=self._weights, k=100_000))
            self._at = 0
        begin, end = self._at, self._pool.rindex(" ", self._at, self._at + chars)
        self._at = end + 1
        return self._pool[begin:end]

    def of(self, role: str) -> str:
        # Most texts are short and a few are long.
        least, most = CHARS[role]
        text = self.some(least + int((most - least) * self._chance.random() ** 2))
        if role == "tool":
            lines = [text[at : at + 90] for at in range(0, len(text), 90)]
            return "\n".join(f"src/{line[:9].replace(' ', '_')}.py:{at}: {line}" for at, line in enumerate(lines, 1))
        if role == "assistant" and self._chance.random() < 0.2:
            return f"{text}\n\n```python\nfor item in range({len(text)}):\n    print(item)\n```\n"
        return text
