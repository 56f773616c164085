"""`hermes sessions export` and `import`: sessions as JSON lines or as text to read."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from hermes.cli.output import NotFound, UsageError, note, secrets, tell
from hermes.cli.session_maintenance import find, opened
from hermes.cli.streams import as_json
from hermes.core.errors import HermesError
from hermes.core.formatting import counted
from hermes.core.home import Home, private_opener
from hermes.core.json_types import JsonObject
from hermes.core.limits import FOREIGN_EXPORT_BYTES_MAX
from hermes.services.session_markdown import markdown

if TYPE_CHECKING:
    from hermes.store.sessions import SessionDB

_PAGE = 500
# A batch is closed well before the store's own bounds: the same numbers can be written in more letters.
_BATCH_SESSIONS, _BATCH_MESSAGES, _BATCH_BYTES = 500, 20_000, 20 * 1024 * 1024
# How much of a file tells its format.
_HEAD_BYTES = 4096
_DATABASE = b"SQLite format 3\0"
_OF_DATABASE = "HERMES_HOME=<folder with it, named state.db> hermes sessions export -o all.jsonl, then import that file"
# How many faults of a file are told one by one.
_FAULTS_SHOWN = 10
Batch = list[tuple[int, Any, str]]
# A session with its number, what is wrong with it, and its size.
Entry = tuple[int, Any, str, int]


# What stands before, between and behind sessions, and a session itself.
_FORMS: dict[str, tuple[str, str, str, Callable[[JsonObject], str]]] = {
    "json": ('{"sessions": [', ", ", "]}\n", as_json),
    "jsonl": ("", "", "", lambda item: as_json(item) + "\n"),
    "md": ("", "\n---\n\n", "", markdown),
}


def export(args: argparse.Namespace, home: Home) -> None:
    form, to_file = args.format, args.output != "-"
    if getattr(args, "json", False) and not to_file:
        if form == "md":
            raise UsageError("Text to read is not JSON.", hint="hermes sessions export --format md -o FILE --json")
        form = "json"
    redact = None if args.with_secrets else secrets(home).redact
    with opened(home) as db, _output(args) as file:
        items = (item for one in _chosen(db, home, args) if (item := db.export_session(one, redact)) is not None)
        count = _write(file, items, form)
    if to_file:
        document = {"file": args.output, "format": form, "sessions": count}
        tell(args, document, f"{counted(count, 'session')} in {args.output}.")
    elif not count:
        note("There are no sessions to export.")


def _chosen(db: SessionDB, home: Home, args: argparse.Namespace) -> list[str]:
    """Those that are named, else all, parents before what came of them."""
    rows = find(db, home, *args.ids) if args.ids else _latest_first(db)
    ids = [row["id"] for row in rows if _is_wanted(row, args)]
    return ids if args.ids else ids[::-1]


def _latest_first(db: SessionDB) -> Iterator[JsonObject]:
    cursor = None
    while page := db.list_sessions(
        limit=_PAGE, cursor=cursor, include_children=True, archived="all", order="started_at"
    ):
        yield from page
        cursor = page[-1]["cursor"]


def _is_wanted(session: JsonObject, args: argparse.Namespace) -> bool:
    from hermes.store.lists import is_inside

    return (
        (args.older_than is None or session["last_active"] < time.time() - args.older_than)
        and args.source in (None, session["source"])
        and args.archived in (None, session["archived"])
        and (args.workspace is None or is_inside(session["cwd"], args.workspace))
        and (args.title is None or args.title.lower() in (session["title"] or "").lower())
        and (args.of_model is None or args.of_model.lower() in (session["model"] or "").lower())
        and (args.max_messages is None or session["message_count"] <= args.max_messages)
    )


def _write(file: TextIO, items: Iterable[JsonObject], form: str) -> int:
    before, between, behind, encode = _FORMS[form]
    count = 0
    file.write(before)
    for count, item in enumerate(items, 1):
        file.write((between if count > 1 else "") + encode(item))
    file.write(behind)
    return count


@contextlib.contextmanager
def _output(args: argparse.Namespace) -> Iterator[TextIO]:
    """Where an export goes. A file is there when it is whole, and only its owner can read it."""
    if args.output == "-":
        yield sys.stdout
        return
    target = Path(os.path.realpath(os.path.expanduser(args.output)))
    if target.exists() and not (args.force and target.is_file()):
        hint = "name another one, or add --force" if target.is_file() else "name another one"
        raise UsageError("There is such a file already.", where=str(target), hint=hint)
    draft = target.with_name(f".{target.name}.{os.urandom(6).hex()}.tmp")
    try:
        with open(draft, "x", encoding="utf-8", opener=private_opener) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except OSError as error:
        raise HermesError(f"The file cannot be written: {error.strerror}.", where=str(target)) from error
    finally:
        draft.unlink(missing_ok=True)


# ---- import


def import_(args: argparse.Namespace, home: Home) -> int:
    from hermes.services.foreign_exports import is_foreign

    report: JsonObject = {"imported": 0, "skipped": 0, "detached": 0, "refused": 0, "errors": []}
    with _input(args.file) as file:
        head, file = _read_head(file)
        if head.startswith(_DATABASE):
            raise UsageError("This is a database, not an export.", where=args.file, hint=_OF_DATABASE)
        foreign = is_foreign(head)
        entries = _foreign_entries(file, args.file) if foreign else _line_entries(file)
        # A file that cannot be read leaves no new database behind.
        first = next(entries, None)
        with opened(home, "make") as db:
            for batch in _batches(itertools.chain([first] if first else (), entries)):
                _take_in(db, batch, report, each_alone=foreign)
    place = "conversation" if foreign else "line"
    for error in report["errors"][:_FAULTS_SHOWN]:
        note(f"{place} {error['line']}: {error['message']}")
    if len(report["errors"]) > _FAULTS_SHOWN:
        note(f"… and {len(report['errors']) - _FAULTS_SHOWN} more faults; --json lists them all.")
    lines = [f"{counted(report['imported'], 'session')} imported, {report['skipped']} skipped: already there."]
    if report["detached"]:
        lines.append(f"{counted(report['detached'], 'session')} without the parent, which is not here.")
    if report["refused"]:
        why = "" if foreign else ": one fault keeps its whole batch out"
        lines.append(f"{counted(report['refused'], 'session')} refused{why}.")
    tell(args, {"ok": not report["errors"], **report}, *lines)
    return 1 if report["errors"] else 0


def _take_in(db: SessionDB, batch: Batch, report: JsonObject, *, each_alone: bool) -> None:
    """Import a batch, which one fault keeps out whole; with `each_alone`, what is faulty stays out alone."""
    done = db.import_sessions([item for _, item, _ in batch])
    faults = {error["index"]: batch[error["index"]][2] or error["message"] for error in done["errors"]}
    report["errors"] += [{"line": batch[index][0], "message": fault} for index, fault in faults.items()]
    if faults and each_alone:
        sound = [entry for index, entry in enumerate(batch) if index not in faults]
        report["refused"] += len(faults)
        if sound:
            _take_in(db, sound, report, each_alone=True)
        return
    report["refused"] += len(batch) if faults else 0
    for name in ("imported", "skipped", "detached"):
        report[name] += done[name]


def _read_head(file: BinaryIO) -> tuple[bytes, BinaryIO]:
    """How a file begins, and the file from its beginning, which can be read at any place of it."""
    from hermes.services.foreign_exports import is_foreign

    head = file.peek(_HEAD_BYTES)[:_HEAD_BYTES] if isinstance(file, io.BufferedReader) else b""
    if is_foreign(head) and not file.seekable():
        return head, io.BytesIO(file.read(FOREIGN_EXPORT_BYTES_MAX + 1))
    return head, file


def _foreign_entries(file: BinaryIO, name: str) -> Iterator[Entry]:
    from hermes.services.foreign_exports import BadExport, conversations

    try:
        for number, item, fault in conversations(file):
            yield number, item, fault, len(json.dumps(item))
    except BadExport as error:
        raise UsageError(str(error), where=name) from None


def _line_entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, *_parsed(line), len(line)


def _input(name: str) -> contextlib.AbstractContextManager[BinaryIO]:
    try:
        return contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(os.path.expanduser(name), "rb")
    except FileNotFoundError:
        raise NotFound("There is no such file.", where=name) from None
    except OSError as error:
        raise HermesError(f"The file cannot be read: {error.strerror}.", where=name) from None


def _batches(entries: Iterable[Entry]) -> Iterator[Batch]:
    """Sessions with their line numbers and what is wrong with a line, as many at a time as the store takes."""
    batch: Batch = []
    messages = size = 0
    for number, item, fault, length in entries:
        held = item.get("messages") if isinstance(item, dict) else None
        more = len(held) if isinstance(held, list) else 0
        full = len(batch) == _BATCH_SESSIONS or messages + more > _BATCH_MESSAGES or size + length > _BATCH_BYTES
        if batch and full:
            yield batch
            batch, messages, size = [], 0, 0
        batch.append((number, item, fault))
        messages, size = messages + more, size + length
    if batch:
        yield batch


def _parsed(line: bytes) -> tuple[Any, str]:
    try:
        return json.loads(line.decode("utf-8-sig"), parse_constant=_no_number), ""
    except UnicodeDecodeError:
        return None, "This is not UTF-8."
    except json.JSONDecodeError as error:
        return None, f"This is not JSON: {error.msg} at character {error.pos + 1}."
    except (ValueError, RecursionError) as error:
        return None, f"This is not JSON that can be taken: {error}."


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")
