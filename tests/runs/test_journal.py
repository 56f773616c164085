"""The tail journal: what readers were given is in a file first, and is found there by whoever takes over."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.harness import joined
from hermes.bus.memory import MemoryBus
from hermes.core.events import Event
from hermes.core.spec import RunSpec
from hermes.guards.secrets import Secrets
from hermes.runs import journal as journal_module
from hermes.runs import streams
from hermes.runs.journal import JournalReader, left_behind
from hermes.runs.log import RunLog
from hermes.store.base import LeaseLost, Row, StoreError
from hermes.store.stores import AsyncRuns, AsyncStore, Store
from support.waiting import idle, until

SESSION = "the-session"


class LogWriter:
    """A log with a journal."""

    def __init__(self, folder: Path, database: Path | None = None) -> None:
        self.folder = folder
        self.store = AsyncStore(Store(database))
        self.runs = self.store.runs
        self.log = RunLog(MemoryBus(), window_s=0.0, journal=folder)
        self.spec = RunSpec("hi", SESSION)
        self.writer = self.log.open(self.spec.run_id, self.runs, secrets=Secrets())

    async def begin(self) -> LogWriter:
        await self.runs.create(self.spec)
        session = {"id": SESSION, "source": "cli"}
        await self.writer.append(self.writer.event("run.started", model="m", provider="p"), session=session)
        return self

    async def complete(self, message_id: str) -> None:
        row = Row(SESSION, "assistant", "", self.spec.run_id)
        await self.writer.complete(message_id, row, finish_reason="stop", tool_calls=[], partial=False)

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*")) if self.folder.exists() else []

    async def stored_texts(self) -> list[tuple[str, str]]:
        return [(partial.stream_id, partial.text) for partial in await self.runs.partials(self.spec.run_id)]

    def journalled(self) -> dict[str, str]:
        tails = JournalReader(self.folder).tails(self.spec.run_id)
        return {tail.stream_id: "".join(text for _, _, text in tail.deltas) for tail in tails}


@pytest.fixture
async def log_writer(tmp_path: Path) -> AsyncIterator[LogWriter]:
    log_writer = await LogWriter(tmp_path / "journal").begin()
    yield log_writer
    await log_writer.log.close(log_writer.writer)
    log_writer.log.shut()


async def test_reader_is_used_by_many_threads(log_writer: LogWriter, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    reader, texts = JournalReader(log_writer.folder), list[str]()
    for number in range(100):
        for piece in range(50):
            log_writer.writer.text("m1", f"{number}.{piece} ")
            texts.append(f"{number}.{piece} ")
        await idle()  # then the deltas of this tick are in the file
        reading = (asyncio.to_thread(reader.tails, log_writer.spec.run_id) for _ in range(8))
        for [tail] in await asyncio.gather(*reading):
            assert "".join(text for _, _, text in tail.deltas) == "".join(texts)


async def test_delta_is_journalled_before_delivery(log_writer: LogWriter) -> None:
    texts: list[tuple[str, dict[str, str]]] = []

    def sink(event: Event) -> bool:
        texts.append((event.data.get("text", ""), log_writer.journalled()))
        return True

    reader = asyncio.create_task(anext(log_writer.log.batches(log_writer.spec.run_id, log_writer.runs, 1, sink)))
    await joined(log_writer.log, log_writer.spec.run_id)
    for count, piece in enumerate(("Hällo", " \U0001f600", "!"), 1):
        log_writer.writer.text("m1", piece)
        await until(lambda count=count: len(texts) == count)
    log_writer.writer.reasoning("m1", "hm", "raw")
    await until(lambda: len(texts) == 4)
    reader.cancel()
    whole = {"m1": "Hällo \U0001f600!", "m1:reasoning": "hm"}
    assert texts == [
        ("Hällo", {"m1": "Hällo"}),
        (" \U0001f600", {"m1": "Hällo \U0001f600"}),
        ("!", {"m1": "Hällo \U0001f600!"}),
        ("hm", whole),
    ]
    assert await log_writer.stored_texts() == []


@pytest.mark.parametrize("error", [StoreError("The connection was lost."), LeaseLost("Another has it.")], ids=type)
async def test_text_within_failed_transaction_is_journalled_before_delivery(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    """Of a run that another process has taken over, nothing more is shown."""
    shown: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(
        log_writer.log.bus,
        "publish",
        lambda _, event: shown.append((event.data["text"], log_writer.journalled())) if "text" in event.data else None,
    )

    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AsyncRuns, "append", fail)
    notice = log_writer.writer.event("notice", level="info", code="c", message="m")
    await log_writer.writer.append(notice, hold=True)
    log_writer.writer.text("m1", "Once")
    with pytest.raises(type(error)):
        await log_writer.complete("m1")
    await idle()
    is_lost = isinstance(error, LeaseLost)
    assert shown == ([] if is_lost else [("Once", {"m1": "Once"})])
    monkeypatch.undo()
    await until(lambda: is_lost or log_writer.writer._saver._due)  # it is saved with what follows


async def test_deltas_of_one_tick_are_one_write(log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = os.write
    monkeypatch.setattr(journal_module.os, "write", lambda fd, data: (writes.append(len(data)), write(fd, data))[1])
    other = log_writer.log.open("run_other", log_writer.runs, secrets=Secrets())
    for _ in range(20):
        log_writer.writer.text("m1", "a ")
        other.text("m2", "b ")
    await idle()
    assert len(writes) == 1
    await log_writer.log.close(other)


async def test_journal_files_are_private_and_removed_when_unneeded(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "JOURNAL_REUSED_BYTES_MAX", 10)
    log_writer.writer.text("m1", "Some words that are longer than ten bytes.")
    await idle()
    [file] = log_writer.files()
    assert file.stat().st_mode & 0o777 == 0o600
    assert log_writer.folder.stat().st_mode & 0o777 == 0o700
    await log_writer.complete("m1")
    assert log_writer.files() == []


async def test_full_journal_file_is_rotated_and_removed_when_saved(
    log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "JOURNAL_FILE_BYTES_MAX", 1_000)
    for n in range(100):
        log_writer.writer.text("m1", f"{n} is a number, and this is what is said of it. ")
        await idle()
    await until(lambda: len(log_writer.files()) <= 2)
    await until(log_writer.stored_texts)
    [(_, text)] = await log_writer.stored_texts()
    assert text.startswith("0 is a number")
    events = [event async for event in _first(log_writer, 101)]
    assert "".join(event.data.get("text", "") for event in events) == "".join(
        f"{n} is a number, and this is what is said of it. " for n in range(100)
    )
    await log_writer.complete("m1")
    assert await log_writer.stored_texts() == []


async def _first(log_writer: LogWriter, count: int) -> AsyncIterator[Event]:
    async for event in log_writer.log.subscribe(log_writer.spec.run_id, log_writer.runs):
        yield event
        count -= 1
        if not count:
            return


async def test_only_new_part_of_text_is_saved(log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[tuple[int, str]] = []
    put = type(log_writer.runs).put_partials

    async def has_subscribers(runs: Any, run_id: str, token: int | None, partials: Any) -> None:
        saved.extend((partial.offset, partial.text) for partial in partials)
        await put(runs, run_id, token, partials)

    monkeypatch.setattr(type(log_writer.runs), "put_partials", has_subscribers)
    for piece in ("One. ", "Two. ", "Three."):
        log_writer.writer.text("m1", piece)
        await log_writer.writer.settle()
    assert saved == [(0, "One. "), (5, "Two. "), (10, "Three.")]
    assert await log_writer.stored_texts() == [("m1", "One. Two. Three.")]


async def test_journal_write_failure_does_not_fail_runs(log_writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PARTIAL_S_MAX", 0.01)
    monkeypatch.setattr(journal_module, "JOURNAL_RETRY_S", 0.0)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module.os, "write", full)
    log_writer.writer.text("m1", "Hello")
    await idle()
    log_writer.writer.text("m1", " there")
    await until(log_writer.stored_texts, lambda texts: texts == [("m1", "Hello there")])
    monkeypatch.undo()
    log_writer.writer.text("m1", ".")
    await idle()
    assert log_writer.journalled()["m1"].endswith(".")


_DIES = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from hermes.bus.memory import MemoryBus
from hermes.guards.secrets import Secrets
from hermes.runs.log import RunLog
from hermes.store.stores import AsyncStore, Store

async def main():
    log = RunLog(MemoryBus(), window_s=0.0, journal=Path(sys.argv[1]))
    writer = log.open(sys.argv[3], AsyncStore(Store(None)).runs, secrets=Secrets(), last_seq=1)
    for piece in ("Left ", "behind"):
        writer.text("m1", piece)
        await asyncio.sleep(0)  # then it is in the file
    writer.output("call_1", "said")
    await asyncio.sleep(0)
    print("written", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_journal_of_dead_process_is_moved_to_store(log_writer: LogWriter) -> None:
    argv = [sys.executable, "-c", _DIES, str(log_writer.folder), "src", log_writer.spec.run_id]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == b"written\n"
            # While it lives, its text can be read, and is nobody else's to take.
            assert log_writer.journalled() == {"m1": "Left behind", "call_1/stdout": "said"}
            assert left_behind(log_writer.folder) == []
        finally:
            process.kill()
    [file] = log_writer.files()
    with file.open("ab") as torn:
        torn.write(b"\x01\x00\x01\x00\x7fnot all of it")
    await log_writer.log.absorb(log_writer.runs)
    assert await log_writer.stored_texts() == [("m1", "Left behind"), ("call_1/stdout", "said")]
    assert log_writer.files() == []


async def test_completed_message_in_journal_is_not_restored_as_open(log_writer: LogWriter) -> None:
    log_writer.writer.text("m1", "Whole.")
    await idle()
    tails = JournalReader(log_writer.folder).tails(log_writer.spec.run_id)
    await log_writer.complete("m1")
    await log_writer.runs.absorb({log_writer.spec.run_id: tails, "run_unknown": tails})
    assert await log_writer.stored_texts() == []


async def test_answer_write_amplification_is_at_most_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_writer = LogWriter(tmp_path / "journal", tmp_path / "state.db")
    await log_writer.begin()
    log = tmp_path / "state.db-wal"
    before = log.stat().st_size
    journaled: list[int] = []
    write = os.write
    monkeypatch.setattr(journal_module.os, "write", lambda fd, data: (journaled.append(len(data)), write(fd, data))[1])
    for number in range(60_000):
        log_writer.writer.text("m1", f"{number % 1000:3} ")
        if number % 2:  # two tokens in a tick of the loop
            await asyncio.sleep(0)
    await log_writer.complete("m1")
    written = sum(journaled) + log.stat().st_size - before
    await log_writer.log.close(log_writer.writer)
    log_writer.log.shut()
    log_writer.store.close()
    assert written < 3 * 60_000 * 4


async def test_journal_being_moved_by_other_process_is_waited_for(tmp_path: Path) -> None:
    """Another run of the same file must not continue before its tail is in the database."""
    dead_process = subprocess.Popen(["true"])
    dead_process.wait()
    path = tmp_path / f"{dead_process.pid}-0.tail"
    path.touch()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = asyncio.create_task(asyncio.to_thread(left_behind, tmp_path))
        waits = f":{path.stat().st_ino} "

        def is_blocked() -> bool:
            assert not waiting.done()
            return any("->" in line and waits in line for line in Path("/proc/locks").read_text().splitlines())

        await until(is_blocked)
    [journal] = await waiting
    journal.close()
