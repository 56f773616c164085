"""`hermes sessions`: look at conversations, find, name, fork, move and remove them, and care for their database."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hermes.cli import sessions_print as words
from hermes.errors import ConfigError, HermesError
from hermes.home import Home, is_served, private_opener

if TYPE_CHECKING:
    from hermes.store.engine import Tx
    from hermes.store.sessions import SessionDB

Json = dict[str, Any]
EXIT_BUSY, EXIT_DAMAGED = 4, 74
_SECONDS = {"h": 3_600, "d": 86_400, "w": 604_800}
_SHOWN_MESSAGES, _CANDIDATES_MAX, _FAULTS_MAX, _PAGE = 20, 20, 20, 500
# A batch is closed well before the store's own bound: the same numbers can be written in more letters.
_BATCH_SESSIONS, _BATCH_BYTES = 500, 20 * 1024 * 1024
# What the tables of the database are for; the others are small.
_PARTS = {
    "rows": ("sessions", "messages", "session_model_usage", "session_files", "pending_calls"),
    "blobs": ("blobs", "message_blobs"),
    "logs": ("runs", "run_events", "run_partials", "run_controls"),
}
_COUNTS = {
    "sessions": "SELECT count(*) FROM sessions",
    "open": "SELECT count(*) FROM sessions WHERE ended_at IS NULL",
    "archived": "SELECT count(*) FROM sessions WHERE archived",
    "messages": "SELECT count(*) FROM messages",
    "blobs": "SELECT count(*) FROM blobs",
    "runs": "SELECT count(*) FROM runs",
}


class UsageError(HermesError):
    """What was asked for cannot be done like this."""

    exit_code = 2


class Ambiguous(UsageError):
    """A text that may mean any of several sessions."""

    def __init__(self, text: str, meant: Sequence[Json]) -> None:
        super().__init__(f"'{text}' may mean any of these sessions.", hint=f"hermes sessions show {meant[0]['id']}")
        self.meant = meant[:_CANDIDATES_MAX]


class NotFound(HermesError):
    exit_code = 5


class Busy(HermesError):
    exit_code = EXIT_BUSY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="sessions_action", required=True, metavar="ACTION")
    _add_looking(actions)
    _add_changing(actions)
    _add_moving(actions)
    actions.add_parser("stats", help="how many there are, and the size of each part of the database")
    actions.add_parser("optimize", help="merge the search index and give free space back")
    backup = actions.add_parser("backup", help="copy the database while it is in use")
    backup.add_argument("file", metavar="FILE", type=Path)
    repair = actions.add_parser("repair", help="check the database, and save what can be saved of a damaged one")
    repair.add_argument("--deep", action="store_true", help="check everything, however long it takes")


def _add_looking(actions: Any) -> None:
    list_ = actions.add_parser("list", help="sessions, the latest first")
    list_.add_argument("--source", metavar="NAME", help="only those that began there: cli, api_server, …")
    list_.add_argument("--limit", metavar="N", type=_number, default=20, help="how many at most (20)")
    list_.add_argument("--workspace", metavar="DIR", help="only those whose folder begins with this")
    list_.add_argument("--all", action="store_true", help="archived ones and those made for subtasks too")
    list_.add_argument("--search", metavar="TEXT", help="only those with this in their title or id")
    show = actions.add_parser("show", help="one session and what was said in it")
    show.add_argument("id", metavar="ID", help="an id, the beginning of one, or a title")
    show.add_argument("--messages", metavar="N", type=_number, help=f"the last N messages ({_SHOWN_MESSAGES})")
    show.add_argument("--full", action="store_true", help="whole texts, reasoning, and messages that are hidden now")
    search = actions.add_parser("search", help="find messages by their words")
    search.add_argument("query", metavar="QUERY", help='words, "phrases", AND, OR, NOT, beginnings*')
    search.add_argument("--limit", metavar="N", type=_number, default=20, help="how many at most (20)")


def _add_changing(actions: Any) -> None:
    rename = actions.add_parser("rename", help="give a session a title; an empty one takes it away")
    rename.add_argument("id", metavar="ID")
    rename.add_argument("title", metavar="TITLE")
    fork = actions.add_parser("fork", help="a new session that begins like this one")
    fork.add_argument("id", metavar="ID")
    fork.add_argument("--at", metavar="MESSAGE", type=_number, help="up to and with this message")
    fork.add_argument("--title", metavar="TITLE")
    archive = actions.add_parser("archive", help="keep sessions out of lists")
    archive.add_argument("ids", metavar="ID", nargs="+")
    archive.add_argument("--undo", action="store_true", help="put them back into lists")
    delete = actions.add_parser("delete", help="remove sessions with everything that belongs to them")
    delete.add_argument("ids", metavar="ID", nargs="+")
    delete.add_argument("-y", "--yes", action="store_true", help="do not ask")
    delete.add_argument("--force", action="store_true", help="also while a turn is running, which is cut off")
    prune = actions.add_parser("prune", help="remove sessions that ended and have long been left alone")
    _add_filters(prune, "90d")
    prune.add_argument("--dry-run", action="store_true", help="only say which")
    prune.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _add_moving(actions: Any) -> None:
    export = actions.add_parser("export", help="write sessions out, all or those that are named")
    export.add_argument("ids", metavar="ID", nargs="*")
    export.add_argument("--format", choices=("jsonl", "md"), default="jsonl", help="JSON lines, or text to read")
    export.add_argument("-o", "--output", metavar="FILE", default="-", help="a file, instead of standard output")
    export.add_argument("--force", action="store_true", help="replace the file if there is one")
    export.add_argument("--with-secrets", action="store_true", help="do not redact secrets")
    _add_filters(export, None)
    import_ = actions.add_parser("import", help="take exported sessions in; those that are there already stay")
    import_.add_argument("file", metavar="FILE", help="JSON lines; '-' reads standard input")


def _add_filters(parser: argparse.ArgumentParser, age: str | None) -> None:
    default = f" ({age})" if age else ""
    parser.add_argument(
        "--older-than", metavar="AGE", type=_age, default=age, help=f"left alone for so long: 12h, 90d, 8w{default}"
    )
    parser.add_argument("--source", metavar="NAME", help="only those that began there")
    parser.add_argument("--workspace", metavar="DIR", help="only those whose folder begins with this")
    parser.add_argument("--title", metavar="TEXT", help="only those with this in their title")
    parser.add_argument("--model", metavar="TEXT", dest="of_model", help="only those with this in their model's name")
    parser.add_argument("--max-messages", metavar="N", type=_number, help="only those with so many messages at most")
    parser.add_argument(
        "--archived", action=argparse.BooleanOptionalAction, help="only those that are archived, or are not"
    )


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _age(text: str) -> float:
    """Seconds."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([hdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 12h, 90d or 8w")
    return float(match[1]) * _SECONDS[match[2]]


def run(args: argparse.Namespace, home: Home) -> int:
    try:
        return _ACTIONS[args.sessions_action](args, home)
    except HermesError as error:
        if isinstance(error, Ambiguous):
            _note_sessions(home, error.meant)
        _note(str(error))
        return error.exit_code


# ---- saying


def _print(args: argparse.Namespace, document: Any, *lines: str) -> None:
    """The result: one JSON document, or lines."""
    if getattr(args, "json", False):
        print(json.dumps(document, ensure_ascii=False))
    else:
        for line in lines:
            print(line)


def _print_said(args: argparse.Namespace, home: Home, document: Any, lines: Iterable[str]) -> None:
    """The same for what was said by anybody: secrets are not shown."""
    from hermes.guards.secrets import redact_tree

    mask = _mask(home)
    _print(args, redact_tree(document, mask), *map(mask, lines))


def _mask(home: Home) -> Callable[[str], str]:
    from hermes import config
    from hermes.guards.secrets import Secrets

    try:
        return Secrets(config.load(home).secret_values()).mask
    except ConfigError as error:
        # Without settings no secret is known: then whatever looks like one is not shown.
        _note(str(error))
        return Secrets().redact


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _note_sessions(home: Home, sessions: Sequence[Json]) -> None:
    mask = _mask(home)
    for line in words.session_lines(sessions):
        _note(f"  {mask(line)}")


def _width() -> int | None:
    """That of the terminal; what is piped is not cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _confirmed(args: argparse.Namespace, what: str) -> bool:
    """Whether the user wants it, who is asked on a terminal and must have said so elsewhere."""
    if args.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{what} must be confirmed.", hint="the same with -y")
    print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    _note("Nothing was deleted.")
    return False


# ---- the database


@contextlib.contextmanager
def _looking(home: Home) -> Iterator[SessionDB | None]:
    """The database, only to be read; None where there is none. That of an older Hermes is brought up to date."""
    from hermes.store.base import StoreError
    from hermes.store.sessions import SessionDB

    if not home.state_db.exists():
        yield None
        return
    try:
        db = SessionDB(home.state_db, read_only=True)
    except StoreError as error:
        if type(error) is not StoreError:
            raise
        db = SessionDB(home.state_db)
    with contextlib.closing(db):
        yield db


@contextlib.contextmanager
def _changing(home: Home) -> Iterator[SessionDB]:
    """The database, to be changed; where there is none, there is nothing to change."""
    from hermes.store.sessions import SessionDB

    if not home.state_db.exists():
        raise _no_database(home)
    with contextlib.closing(SessionDB(home.state_db)) as db:
        yield db


def _no_database(home: Home) -> NotFound:
    return NotFound("There are no sessions yet.", where=str(home.path), hint="hermes chat")


def _unknown(text: str) -> NotFound:
    return NotFound(f"There is no session '{text}'.", hint="hermes sessions list --all")


def _find(db: SessionDB, text: str) -> str:
    """The id of the session that is meant."""
    if found := db.resolve_session_id(text):
        return found
    if not text:
        raise _unknown(text)
    near = db.list_sessions(search=text, limit=_PAGE, include_children=True, archived="all")
    meant = [one for one in near if one["id"].lower().startswith(text.lower()) or one["title"] == text]
    if not meant:
        raise _unknown(text)
    raise Ambiguous(text, meant)


def _find_all(db: SessionDB, texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_find(db, text) for text in texts))


def _session(db: SessionDB, session_id: str) -> Json:
    session = db.get_session(session_id)
    if session is None:  # somebody else was quicker
        raise _unknown(session_id)
    return session


def _folder(text: str | None) -> str | None:
    return None if text is None else os.path.abspath(os.path.expanduser(text))


# ---- looking


def _list(args: argparse.Namespace, home: Home) -> int:
    found: list[Json] = []
    with _looking(home) as db:
        if db is not None:
            found = db.list_sessions(
                source=args.source,
                cwd_prefix=_folder(args.workspace),
                limit=args.limit + 1,
                include_children=args.all,
                archived="all" if args.all else False,
                search=args.search,
            )
    more, found = len(found) > args.limit, found[: args.limit]
    document = {"sessions": [words.with_iso(session) for session in found], "more": more}
    _print_said(args, home, document, words.session_lines(found, _width()))
    if more:
        _note(f"There are more. Try: hermes sessions list --limit {max(20, args.limit * 2)}")
    elif not found:
        _note("There are no sessions.")
    return 0


def _show(args: argparse.Namespace, home: Home) -> int:
    with _looking(home) as db:
        if db is None:
            raise _unknown(args.id)
        session = _session(db, _find(db, args.id))
        limit = args.messages if args.messages is not None or args.full else _SHOWN_MESSAGES
        messages = db.get_messages(session["id"], include_inactive=args.full, limit=limit, order="desc")[::-1]
        total = db.count_messages(session["id"], include_inactive=args.full)
    document = words.with_iso(session, full=args.full) | {"messages": [words.with_iso(one) for one in messages]}
    lines = list(words.head_lines(session))
    for message in messages:
        lines += ["", *words.message_lines(message, full=args.full)]
    _print_said(args, home, document, lines)
    if len(messages) < total and args.messages is None:
        _note(f"These are the last {len(messages)} of {total} messages. Try: --messages {total}")
    return 0


def _search(args: argparse.Namespace, home: Home) -> int:
    from hermes.store.base import StoreDamaged, StoreError

    try:
        with _looking(home) as db:
            found, complete = _hits(db, args) if db else ([], True)
    except StoreError as error:
        if type(error) not in (StoreDamaged, StoreError):
            raise
        # It may only be the index, which is made anew by whoever may write.
        with _changing(home) as db:
            found, complete = _hits(db, args)
    document = {"hits": [words.with_iso(hit) for hit in found], "complete": complete}
    _print_said(args, home, document, (line for hit in found for line in words.hit_lines(hit)))
    if not complete:
        _note("The search took too long: there may be better hits, and more.")
    elif not found:
        _note("Nothing was found.")
    return 0


def _hits(db: SessionDB, args: argparse.Namespace) -> tuple[list[Json], bool]:
    try:
        found = db.search_messages(args.query, limit=args.limit)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return found, found.complete


# ---- changing


def _rename(args: argparse.Namespace, home: Home) -> int:
    with _changing(home) as db:
        session_id = _find(db, args.id)
        try:
            db.set_session_title(session_id, args.title)
        except ValueError as error:
            raise UsageError(str(error)) from None
        _print_session(args, home, _session(db, session_id))
    return 0


def _fork(args: argparse.Namespace, home: Home) -> int:
    with _changing(home) as db:
        source_id = _find(db, args.id)
        try:
            made = db.fork_session(source_id, title=args.title, at_message_id=args.at)
        except KeyError as error:
            raise NotFound(error.args[0], hint=f"hermes sessions show {source_id}") from None
        except ValueError as error:
            raise UsageError(str(error)) from None
        _print_session(args, home, _session(db, made))
    return 0


def _print_session(args: argparse.Namespace, home: Home, session: Json) -> None:
    _print_said(args, home, words.with_iso(session, full=False), words.session_lines([session], _width()))


def _archive(args: argparse.Namespace, home: Home) -> int:
    with _changing(home) as db:
        ids = _find_all(db, args.ids)
        db.transaction(lambda: [db.update_session(one, archived=not args.undo) for one in ids])
        found = [_session(db, one) for one in ids]
    document = {"sessions": [words.with_iso(session, full=False) for session in found]}
    _print_said(args, home, document, words.session_lines(found, _width()))
    return 0


def _delete(args: argparse.Namespace, home: Home) -> int:
    from hermes.store.base import SessionBusy

    with _changing(home) as db:
        ids = _find_all(db, args.ids)
        going = words.counted(len(ids), "session")
        if not args.yes:
            _tell_what_goes(home, [_session(db, one) for one in ids])
            if not _confirmed(args, f"Deleting {going}"):
                return 1
        try:
            gone = db.transaction(lambda: [one for one in ids if db.delete_session(one, force=args.force)])
        except SessionBusy as error:
            raise Busy(f"{error.message} Nothing was deleted.", hint="the same with --force") from None
    _print(args, {"deleted": gone}, f"{words.counted(len(gone), 'session')} deleted.")
    return 0


def _tell_what_goes(home: Home, sessions: Sequence[Json]) -> None:
    _note(f"{words.counted(len(sessions), 'session')} will be gone, with messages, files, logs and subtasks:")
    _note_sessions(home, sessions)


def _prune(args: argparse.Namespace, home: Home) -> int:
    before = time.time() - args.older_than
    with _looking(home) as db:
        found = [_session(db, one) for one in _pruned(db, args, before, dry_run=True)] if db else []
    document: Json = {"dry_run": args.dry_run, "sessions": [session["id"] for session in found]}
    if args.dry_run or not found:
        _print_said(args, home, document, words.session_lines(found, _width()))
        _note(f"{words.counted(len(found), 'session')} would go." if found else "There is nothing to prune.")
        return 0
    if not args.yes:
        _tell_what_goes(home, found)
        if not _confirmed(args, f"Deleting {words.counted(len(found), 'session')}"):
            return 1
    with _changing(home) as db:
        gone = _pruned(db, args, before, dry_run=False)
    _print(args, document | {"sessions": gone}, f"{words.counted(len(gone), 'session')} deleted.")
    if stayed := len({session["id"] for session in found} - set(gone)):
        _note(f"{words.counted(stayed, 'session')} stayed: turns of them or near them are running.")
        return EXIT_BUSY
    return 0


def _pruned(db: SessionDB, args: argparse.Namespace, before: float, *, dry_run: bool) -> list[str]:
    """Those left alone since `before`, however long the question was thought about."""
    return db.prune_sessions(
        older_than_days=(time.time() - before) / 86_400,
        source=args.source,
        cwd_prefix=_folder(args.workspace),
        title=args.title,
        model=args.of_model,
        max_messages=args.max_messages,
        archived=args.archived,
        dry_run=dry_run,
    )


# ---- moving


def _export(args: argparse.Namespace, home: Home) -> int:
    as_json = getattr(args, "json", False)
    if as_json and args.output == "-" and args.format == "md":
        raise UsageError("Text to read is not JSON.", hint="hermes sessions export --format md -o FILE --json")
    redact = None if args.with_secrets else _redact(home)
    with _looking(home) as db, _output(args) as file:
        ids = _chosen(db, args) if db else []
        if db is None and args.ids:
            raise _unknown(args.ids[0])
        items = (item for one in ids if db and (item := db.export_session(one, redact)) is not None)
        one_document = as_json and args.output == "-"
        count = _write_document(file, items) if one_document else _write_each(file, items, args.format)
    if args.output != "-":
        told = f"{words.counted(count, 'session')} in {args.output}."
        _print(args, {"file": args.output, "format": args.format, "sessions": count}, told)
    elif not count:
        _note("There are no sessions to export.")
    return 0


def _redact(home: Home) -> Callable[[str], str]:
    from hermes import config
    from hermes.guards.secrets import Secrets

    return Secrets(config.load(home).secret_values()).redact


def _chosen(db: SessionDB, args: argparse.Namespace) -> list[str]:
    """The sessions to export: those that are named, else all, parents before what came of them."""
    named = [_session(db, one) for one in _find_all(db, args.ids)]
    found = named if args.ids else _oldest_last(db)
    ids = [one["id"] for one in found if _is_wanted(one, args)]
    return ids if args.ids else ids[::-1]


def _oldest_last(db: SessionDB) -> Iterator[Json]:
    cursor = None
    while True:
        page = db.list_sessions(limit=_PAGE, cursor=cursor, include_children=True, archived="all", order="started_at")
        yield from page
        if len(page) < _PAGE:
            return
        cursor = page[-1]["cursor"]


def _is_wanted(session: Json, args: argparse.Namespace) -> bool:
    """Whether the filters let it through."""
    return (
        (args.older_than is None or session["last_active"] < time.time() - args.older_than)
        and args.source in (None, session["source"])
        and args.archived in (None, session["archived"])
        and (args.workspace is None or (session["cwd"] or "").startswith(_folder(args.workspace) or ""))
        and (args.title is None or args.title.lower() in (session["title"] or "").lower())
        and (args.of_model is None or args.of_model.lower() in (session["model"] or "").lower())
        and (args.max_messages is None or session["message_count"] <= args.max_messages)
    )


def _write_each(file: TextIO, items: Iterable[Json], format_: str) -> int:
    count = 0
    for item in items:
        if format_ == "md":
            file.write(("\n---\n\n" if count else "") + words.markdown(item))
        else:
            file.write(json.dumps(item, ensure_ascii=False) + "\n")
        count += 1
    return count


def _write_document(file: TextIO, items: Iterable[Json]) -> int:
    count = 0
    file.write('{"sessions": [')
    for item in items:
        file.write((", " if count else "") + json.dumps(item, ensure_ascii=False))
        count += 1
    file.write("]}\n")
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


def _import(args: argparse.Namespace, home: Home) -> int:
    from hermes.store.sessions import SessionDB

    report: Json = {"imported": 0, "skipped": 0, "detached": 0, "refused": 0, "errors": []}
    with _input(args.file) as file, contextlib.closing(SessionDB(home.state_db)) as db:
        for batch in _batches(file):
            _take_in(db, batch, report)
    for error in report["errors"]:
        _note(f"line {error['line']}: {error['message']}")
    _print(args, {"ok": not report["errors"], **report}, *_import_lines(report))
    return 1 if report["errors"] else 0


@contextlib.contextmanager
def _input(name: str) -> Iterator[Iterable[bytes]]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(os.path.expanduser(name), "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise NotFound("There is no such file.", where=name) from None
    except OSError as error:
        raise HermesError(f"The file cannot be read: {error.strerror}.", where=name) from None
    with file:
        yield file


Batch = list[tuple[int, Any, str]]


def _batches(lines: Iterable[bytes]) -> Iterator[Batch]:
    """Sessions with their line numbers and what is wrong with a line, as many at a time as the store takes."""
    batch: Batch = []
    held = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if batch and (len(batch) == _BATCH_SESSIONS or held + len(line) > _BATCH_BYTES):
            yield batch
            batch, held = [], 0
        batch.append((number, *_parsed(line)))
        held += len(line)
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


def _take_in(db: SessionDB, batch: Batch, report: Json) -> None:
    """One batch, wholly or not at all."""
    import sqlite3

    try:
        done = db.import_sessions([item for _, item, _ in batch])
    except (sqlite3.Error, OverflowError) as error:
        done = {"errors": [{"index": 0, "message": f"From here on to line {batch[-1][0]}: {error}."}]}
    if not done["errors"]:
        for name in ("imported", "skipped", "detached"):
            report[name] += done[name]
        return
    report["refused"] += len(batch)
    for found in done["errors"]:
        number, _, fault = batch[found["index"]]
        report["errors"].append({"line": number, "message": fault or found["message"]})


def _import_lines(report: Json) -> Iterator[str]:
    yield f"{words.counted(report['imported'], 'session')} imported, {report['skipped']} skipped: already there."
    if report["detached"]:
        yield f"{words.counted(report['detached'], 'session')} without the parent, which is not here."
    if report["refused"]:
        yield f"{words.counted(report['refused'], 'session')} refused: one fault keeps its whole batch out."


# ---- care


def _stats(args: argparse.Namespace, home: Home) -> int:
    document: Json = {"path": str(home.state_db), "bytes": 0, "parts": {}} | dict.fromkeys(_COUNTS, 0)
    with _looking(home) as db:
        if db is not None:
            document |= db.engine.read(_measured)
    lines = [f"{name}: {document[name]}" for name in _COUNTS]
    lines += [f"{name}: {words.size(count)}" for name, count in document["parts"].items()]
    _print(args, document, *lines, f"all of {document['path']}: {words.size(document['bytes'])}")
    if not document["bytes"]:
        _note("There are no sessions yet.")
    elif not document["parts"]:
        _note("This SQLite cannot tell the size of each part.")
    return 0


def _measured(tx: Tx) -> Json:
    page = int(tx.value("PRAGMA page_size"))
    counts = {name: int(tx.value(sql)) for name, sql in _COUNTS.items()}
    free = int(tx.value("PRAGMA freelist_count")) * page
    return {**counts, "bytes": int(tx.value("PRAGMA page_count")) * page, "parts": _part_sizes(tx, free)}


def _part_sizes(tx: Tx, free: int) -> dict[str, int]:
    """Bytes by what they are for; nothing where SQLite does not tell."""
    import sqlite3

    sizes = {"rows": 0, "index": 0, "blobs": 0, "logs": 0, "other": 0, "free": free}
    part_of = {table: part for part, tables in _PARTS.items() for table in tables}
    sql = (
        "SELECT coalesce(m.tbl_name, s.name), sum(s.pgsize) FROM dbstat s LEFT JOIN sqlite_master m "
        "ON m.name = s.name GROUP BY 1"
    )
    try:
        for table, count in tx.rows(sql):
            part = "index" if table.startswith("messages_fts") else part_of.get(table, "other")
            sizes[part] += count
    except sqlite3.OperationalError as error:
        if "dbstat" not in str(error):
            raise
        return {}
    return sizes


def _optimize(args: argparse.Namespace, home: Home) -> int:
    with _changing(home) as db:
        done = db.optimize()
    before, after = words.size(done["bytes_before"]), words.size(done["bytes_after"])
    _print(args, done, f"{before} before, {after} after.")
    return 0


def _backup(args: argparse.Namespace, home: Home) -> int:
    import sqlite3

    target = Path(os.path.abspath(args.file.expanduser()))
    if os.path.lexists(target):
        raise UsageError("There is such a file already.", where=str(target), hint="name another one")
    with _changing(home) as db:
        try:
            db.backup(target)
        except OSError as error:
            raise HermesError(f"The copy cannot be made: {error.strerror}.", where=str(target)) from error
        except sqlite3.Error as error:
            raise HermesError(f"The copy cannot be made: {error}.", where=str(target)) from error
    count = target.stat().st_size
    _print(args, {"file": str(target), "bytes": count}, f"{words.size(count)} in {target}.")
    return 0


def _repair(args: argparse.Namespace, home: Home) -> int:
    from hermes.store.base import StoreBusy
    from hermes.store.upkeep import repair

    if not home.state_db.exists():
        raise _no_database(home)
    if is_served(home):
        raise Busy("A server is using this home.", where=str(home.path), hint="hermes gateway stop")
    faults, notices = _faults(home, deep=args.deep)
    if not faults:
        document = {"sound": True, "faults": [], "notices": notices, "repair": None, "left": []}
        sound = f"No fault was found in {home.state_db}; nothing was done to it."
        _print(args, document, *notices, "No other fault was found." if notices else sound)
        return 0
    _note_faults(faults)
    try:
        report = repair(home.state_db)
    except StoreBusy as error:
        raise Busy(error.message, where=error.where, hint=error.hint) from None
    left = _faults(home, deep=False)[0] if report["repaired"] else faults
    document = {"sound": False, "faults": faults, "notices": notices, "repair": report, "left": left}
    _print(args, document, *_repair_lines(report))
    if report["repaired"] and left:
        _note("Not all of it is right yet:")
        _note_faults(left)
    return EXIT_DAMAGED if left else 0


def _note_faults(faults: Sequence[str]) -> None:
    for fault in faults[:_FAULTS_MAX]:
        _note(f"  {fault}")


def _faults(home: Home, *, deep: bool) -> tuple[list[str], list[str]]:
    """What is wrong with the database, and what was put right by opening it."""
    from hermes.store.base import StoreDamaged

    try:
        # Only looked at first: an index is made anew in a file that is sound otherwise, or after the copy.
        with _looking(home) as db:
            found = db.check() if db else []
        if found:
            return found, []
        with _changing(home) as db:
            return db.check(deep=True, progress=_note) if deep else [], list(db.notices)
    except StoreDamaged as error:
        return [error.message], []


def _repair_lines(report: Json) -> Iterator[str]:
    ways = {"index": "The search index was made anew.", "salvage": "What could be read is in a new file."}
    if report["repaired"]:
        yield f"{ways[report['strategy']]} It holds {words.counted(report['rows'], 'message')}."
    else:
        yield f"It could not be repaired: {report['error']}"
    if report["backup_path"]:
        yield f"A copy of the database as it was: {report['backup_path']}"


_ACTIONS: dict[str, Callable[[argparse.Namespace, Home], int]] = {
    "list": _list,
    "show": _show,
    "search": _search,
    "rename": _rename,
    "fork": _fork,
    "archive": _archive,
    "delete": _delete,
    "prune": _prune,
    "export": _export,
    "import": _import,
    "stats": _stats,
    "optimize": _optimize,
    "backup": _backup,
    "repair": _repair,
}
