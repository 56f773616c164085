"""`python -m bench state`: what the store costs on a large database, while others write and the loop must go on."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.corpus import CACHE, CONSONANTS, GUEST, WORDS, Corpus, corpus, session_id, word
from bench.results import keep
from hermes.app import new_loop, settle_memory
from hermes.processes import this_process
from hermes.runs.events import Event
from hermes.runs.spec import RunSpec
from hermes.store.base import Row
from hermes.store.bundle import Async, open_store

FULL, QUICK = (1_000_000, 20_000), (50_000, 1_000)
READ_MS_MAX, APPEND_MS_MAX, RARE_MS_MAX, MEDIAN_MS_MAX = 10.0, 1.0, 10.0, 50.0
BLOCKED_MS_MAX, SEARCH_MS_MAX, SIZE_MAX = 10.0, 3_100.0, 1.7
# Each of these writes, waits, and writes again for as long as anything is measured.
WRITERS, WRITER_PAUSE_S = 4, 0.02
TICK_S = 0.001
SECONDS_EACH = 20.0
WARM_UP = 3

Call = Callable[[], Awaitable[object]]


@dataclass
class Figure:
    """One line of the table. The target is one for the median, or for the worst where that is what counts."""

    name: str
    p50: float
    p99: float
    worst: float
    target: float
    judged: float
    unit: str = "ms"
    blocked_ms: float = 0.0
    count: int = 0

    @property
    def ok(self) -> bool:
        return self.judged <= self.target


class Ticker:
    """How late the loop comes to a task that asks for the next millisecond again and again.

    `blocked_ms` leaves out the time in which the loop's thread could have gone on and had no processor: other programs
    take that from it, and the bench is to tell what the store does.
    """

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self.blocked_ms: list[float] = []

    async def run(self) -> None:
        while True:
            began, waited = time.perf_counter(), queued_s()
            await asyncio.sleep(TICK_S)
            late = time.perf_counter() - began - TICK_S
            self.late_ms.append(late * 1e3)
            self.blocked_ms.append(max(0.0, late - (queued_s() - waited)) * 1e3)

    def figures(self, when: str) -> list[Figure]:
        return [
            figure(f"the loop, blocked {when}", self.blocked_ms, BLOCKED_MS_MAX, judge=max),
            figure("the same, with waiting for a processor", self.late_ms, float("inf"), judge=max),
        ]


class Collections:
    """How long Python looked for garbage each time: nothing else goes on meanwhile, on any thread."""

    def __init__(self) -> None:
        self.times_ms: list[float] = []
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.times_ms.append((time.perf_counter() - self._began) * 1e3)

    def figure(self) -> Figure:
        gc.callbacks.remove(self._note)
        return figure("of which: collecting garbage", self.times_ms or [0.0], float("inf"))


def queued_s() -> float:
    """How long this thread has waited for a processor in all; nothing where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def at(share: float, numbers: list[float]) -> float:
    """The number below which this share of them lies."""
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(numbers: list[float]) -> float:
    return at(0.5, numbers)


def figure(name: str, numbers: list[float], target: float, judge: Callable[[list[float]], float] = median) -> Figure:
    worst = max(numbers)
    return Figure(name, median(numbers), at(0.99, numbers), worst, target, judge(numbers), count=len(numbers))


class Bench:
    """The measurements, on one store and one loop."""

    def __init__(self, store: Any, known: Corpus) -> None:
        self.store, self.known = store, known
        self.chance = random.Random(7)
        self.ticker = Ticker()
        self.collections = Collections()
        self.figures: list[Figure] = []

    async def run(self, quick: bool) -> list[Figure]:
        """All of them, under a load of others who write."""
        await self._idle()
        ticking = asyncio.ensure_future(self.ticker.run())
        writers = [asyncio.ensure_future(self._write_on(n)) for n in range(WRITERS)]
        share = 0.2 if quick else 1.0
        append = await self._run_append()
        for name, count, target, call in (
            ("list of 50 sessions", 300, READ_MS_MAX, self._list),
            ("list of the sessions of one who has few", 100, READ_MS_MAX, self._list_few),
            ("open a session", 300, READ_MS_MAX, self._open_any),
            ("open a session of 500 messages or more", 100, READ_MS_MAX, self._open_long),
            ("append a message", 500, APPEND_MS_MAX, self._append),
            ("append an event with its row", 500, APPEND_MS_MAX, append),
            ("search: rare word", 200, RARE_MS_MAX, self._search_rare),
            ("search: two words, by relevance", 100, MEDIAN_MS_MAX, self._search_two),
            ("search: common word, newest first", 100, MEDIAN_MS_MAX, self._search_common),
            ("search: the same, of one who has few", 50, float("inf"), self._search_few),
            ("search: common word, by relevance", 10, SEARCH_MS_MAX, self._search_relevant),
            ("search: beginnings of three letters", 50, MEDIAN_MS_MAX, self._search_beginning),
            ("search: beginnings of one letter", 3, SEARCH_MS_MAX, self._search_letter),
            ("fork a session", 50, MEDIAN_MS_MAX, self._fork),
        ):
            await self._measure(name, max(3, int(count * share)), target, call)
        for task in (ticking, *writers):
            task.cancel()
        await asyncio.gather(ticking, *writers, return_exceptions=True)
        self.figures += self.ticker.figures("meanwhile")
        self.figures.append(self.collections.figure())
        return self.figures

    async def _idle(self) -> None:
        """What the machine itself does to a loop that has nothing to do."""
        ticker = Ticker()
        with suppress(TimeoutError):
            await asyncio.wait_for(ticker.run(), 2)
        self.figures += ticker.figures("while idle")

    async def _measure(self, name: str, count: int, target: float, call: Call) -> None:
        for _ in range(WARM_UP):
            await call()
        first, until, times = len(self.ticker.blocked_ms), time.perf_counter() + SECONDS_EACH, []
        for _ in range(count):
            began = time.perf_counter()
            await call()
            times.append((time.perf_counter() - began) * 1e3)
            if time.perf_counter() > until:
                break
        # Whatever the last call did to the loop shows in the next tick.
        await asyncio.sleep(5 * TICK_S)
        measured = figure(name, times, target)
        measured.blocked_ms = max(self.ticker.blocked_ms[first:], default=0.0)
        self.figures.append(measured)

    async def _write_on(self, number: int) -> None:
        chance = random.Random(number)
        while True:
            text = " ".join(word(chance.randrange(WORDS)) for _ in range(40))
            await self.store.sessions.append_message(self._any(chance), "user", text)
            await asyncio.sleep(WRITER_PAUSE_S)

    # --- what is measured ---------------------------------------------------------------------------------------

    def _any(self, chance: random.Random | None = None) -> str:
        return session_id((chance or self.chance).randrange(self.known.sessions))

    async def _list(self) -> object:
        return await self.store.sessions.list_sessions(limit=50)

    async def _list_few(self) -> object:
        return await self.store.sessions.list_sessions(limit=50, owner=GUEST)

    async def _open_any(self) -> object:
        return await self._open(self._any())

    async def _open_long(self) -> object:
        # The longest come first.
        return await self._open(session_id(self.chance.randrange(self.known.long_sessions)))

    async def _open(self, session: str) -> object:
        await self.store.sessions.get_session(session)
        return await self.store.sessions.get_messages(session, limit=500)

    async def _append(self) -> object:
        return await self.store.sessions.append_message(self._any(), "user", "another question about the same thing")

    async def _run_append(self) -> Call:
        """A turn under way; each call adds an answer to its log and its transcript."""
        session = self._any()
        spec = RunSpec("hi", session_id=session)
        token = await self.store.leases.acquire(f"session:{session}", this_process(), 3600)
        await self.store.runs.create(spec)
        numbers = iter(range(1, 1_000_000))

        async def append() -> None:
            event = Event(spec.run_id, "message.completed", 1, {"message_id": "m"}, next(numbers), time.time())
            row = Row(session, "assistant", "an answer of some words", spec.run_id, told=((event, "row"),))
            await self.store.runs.append(spec.run_id, token, [event], [row])

        return append

    async def _search_rare(self) -> object:
        return await self._search(word(self.chance.randrange(WORDS - WORDS // 4, WORDS)))

    async def _search_two(self) -> object:
        first, second = self.chance.sample(range(500, 5_000), 2)
        return await self._search(f"{word(first)} {word(second)}")

    async def _search_common(self) -> object:
        return await self._search(word(self.chance.randrange(10)), sort="newest")

    async def _search_few(self) -> object:
        return await self._search(word(self.chance.randrange(10)), sort="newest", owner=GUEST)

    async def _search_relevant(self) -> object:
        return await self._search(word(self.chance.randrange(10)))

    async def _search_beginning(self) -> object:
        return await self._search(f"{word(self.chance.randrange(100, WORDS))[:3]}*")

    async def _search_letter(self) -> object:
        return await self._search(f"{self.chance.choice(CONSONANTS)}*")

    async def _search(self, query: str, **options: Any) -> object:
        return await self.store.sessions.search_messages(query, **options)

    async def _fork(self) -> object:
        return await self.store.sessions.fork_session(self._any())


# --- size ------------------------------------------------------------------------------------------------------------


def sizes(known: Corpus, folder: Path) -> list[Figure]:
    """Bytes per message of the file, of the same file without its index, and of the bare text."""
    bare = folder / "bare.db"
    source, copy = sqlite3.connect(known.path), sqlite3.connect(bare, isolation_level=None)
    source.backup(copy)
    source.close()
    copy.execute("PRAGMA journal_mode=OFF")
    for kind, name in _parts_of_index(copy):
        copy.execute(f"DROP {kind} {name}")
    copy.execute("VACUUM")
    copy.close()
    full, without = known.path.stat().st_size, bare.stat().st_size
    bare.unlink()
    return [
        _size("bytes per message", full / known.messages, "B", float("inf")),
        _size("file : its text", full / known.text_bytes, "×", float("inf")),
        _size("file : file without the index", full / without, "×", SIZE_MAX),
    ]


def _parts_of_index(db: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """The index and what hangs on it, in the order in which they can be dropped."""
    found = db.execute("SELECT type, name FROM sqlite_master WHERE sql LIKE '%messages_fts%' AND type = 'trigger'")
    yield from found.fetchall()
    yield from (("table", "messages_fts"), ("view", "search_src"))


def _size(name: str, number: float, unit: str, target: float) -> Figure:
    return Figure(name, number, number, number, target, number, unit, count=1)


# --- all of it -------------------------------------------------------------------------------------------------------


async def measure(path: Path, known: Corpus, quick: bool) -> list[Figure]:
    store = open_store(f"sqlite://{path}")
    try:
        return await Bench(Async(store), known).run(quick)
    finally:
        store.close()


def show(figures: list[Figure]) -> None:
    print(f"{'':44}{'p50':>10}{'p99':>10}{'worst':>10}{'target':>16}  ok     loop blocked")
    for f in figures:
        kind = "worst" if f.judged == f.worst != f.p50 else "p50"
        bound = "" if f.target == float("inf") else f"{kind} ≤ {f.target:g} {f.unit}"
        numbers = "".join(f"{number:>10.2f}" for number in (f.p50, f.p99, f.worst))
        blocked = f"{f.blocked_ms:8.2f} ms" if f.blocked_ms else ""
        print(f"{f.name:44}{numbers}{bound:>16}  {'yes' if f.ok else 'NO':5}{blocked}")


def run(quick: bool) -> None:
    """Make the database if it is not there, measure on a copy of it, print, and keep the figures."""
    known = corpus(*(QUICK if quick else FULL))
    loop = new_loop()
    asyncio.set_event_loop(loop)
    settle_memory()
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        figures = sizes(known, Path(folder))
        copy = Path(folder) / "state.db"
        shutil.copyfile(known.path, copy)
        # Or the first commit that reaches the disk would wait for all of it.
        with open(copy, "rb") as file:
            os.fsync(file.fileno())
        figures = loop.run_until_complete(measure(copy, known, quick)) + figures
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    show(figures)
    shown = {f.name: {"p50": f.p50, "p99": f.p99, "worst": f.worst, "unit": f.unit, "ok": f.ok} for f in figures}
    keep({"state": {"messages": known.messages, "sessions": known.sessions, **shown}})
