"""`hermes sessions`: look at conversations, find, name, fork, archive, remove, export and care for them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hermes.cli import migrate_command, session_format, session_maintenance, sessions_transfer
from hermes.cli.command import YES, Args, Argument, age, command, flag, folder, number
from hermes.cli.output import UsageError, confirmed, mask, note, print_redacted, service_errors, tell
from hermes.cli.session_format import print_sessions
from hermes.cli.session_maintenance import find, opened, session_of
from hermes.core.formatting import counted
from hermes.core.home import Home
from hermes.core.json_types import JsonObject

if TYPE_CHECKING:
    from hermes.store.sessions import SessionDB

_SHOWN_MESSAGES = 20
_ID = Argument("id", metavar="ID", help="an id, the beginning of one, or a title")
_IDS = Argument("ids", metavar="ID", nargs="+", help="an id, the beginning of one, or a title")
_LIMIT = Argument("--limit", metavar="N", type=number, default=20, help="how many at most (20)")
_SOURCE = Argument("--source", metavar="NAME", help="only sessions of this source: cli, api_server, …")
_WORKSPACE = Argument("--workspace", metavar="DIR", type=folder, help="only sessions of this folder and below it")
_OLDER = Argument("--older-than", metavar="AGE", type=age, help="without activity for this long: 12h, 90d, 8w")
_FILTERS = (
    _SOURCE,
    _WORKSPACE,
    Argument("--title", metavar="TEXT", help="only sessions with this in their title"),
    Argument("--model", metavar="TEXT", dest="of_model", help="only sessions with this in their model's name"),
    Argument("--max-messages", metavar="N", type=number, help="only sessions with at most N messages"),
    Argument("--archived", action=argparse.BooleanOptionalAction, help="only archived sessions, or only others"),
)


# ---- looking


@command(
    "sessions list",
    _SOURCE,
    _LIMIT,
    _WORKSPACE,
    flag("--all", help="archived ones and those made for subtasks too"),
    Argument("--search", metavar="TEXT", help="only sessions with this in their title or id"),
    help="list sessions, newest first",
)
def _list(args: Args, home: Home) -> None:
    with opened(home) as db:
        chosen = {"source": args.source, "cwd_prefix": args.workspace, "search": args.search}
        rows = db.list_sessions(limit=args.limit + 1, include_children=args.all, archived=args.all and "all", **chosen)
    more, rows = len(rows) > args.limit, rows[: args.limit]
    document = {"sessions": [session_format.shown(row) for row in rows], "more": more}
    print_sessions(args, home, document, rows, empty="There are no sessions.")
    if more:
        note(f"There are more. Try: hermes sessions list --limit {max(20, args.limit * 2)}")


@command(
    "sessions show",
    _ID,
    Argument("--messages", metavar="N", type=number, help=f"the last N messages ({_SHOWN_MESSAGES})"),
    flag("--full", help="whole texts, reasoning, and messages that are hidden now"),
    help="show a session with its messages",
)
def _show(args: Args, home: Home) -> None:
    with opened(home) as db:
        [session] = find(db, home, args.id)
        limit = args.messages if args.messages is not None or args.full else _SHOWN_MESSAGES
        messages = db.get_messages(session["id"], include_inactive=args.full, limit=limit, order="desc")[::-1]
        total = db.count_messages(session["id"], include_inactive=args.full)
    document = session_format.shown(session, full=args.full) | {
        "messages": [session_format.shown(one) for one in messages]
    }
    lines = session_format.head_lines(session)
    for message in messages:
        lines += ["", *session_format.message_lines(message, full=args.full)]
    print_redacted(args, home, document, lines)
    if len(messages) < total and args.messages is None:
        note(f"These are the last {len(messages)} of {total} messages. Try: --messages {total}")


@command(
    "sessions search",
    Argument("query", metavar="QUERY", help='words, "phrases", AND, OR, NOT, beginnings*'),
    _LIMIT,
    help="search all messages",
)
def _search(args: Args, home: Home) -> None:
    from hermes.store.base import StoreDamaged, StoreError

    try:
        hits, complete = _hits(args, home, "look")
    except StoreError as error:
        if type(error) not in (StoreDamaged, StoreError):
            raise
        # It may only be the index, which is made anew by whoever may write.
        hits, complete = _hits(args, home, "change")
    document = {"hits": [session_format.shown(hit) for hit in hits], "complete": complete}
    print_redacted(args, home, document, (line for hit in hits for line in session_format.hit_lines(hit)))
    if not complete:
        note("The search took too long: there may be better hits, and more.")
    elif not hits:
        note("Nothing was found.")


def _hits(args: Args, home: Home, to: str) -> tuple[list[JsonObject], bool]:
    with opened(home, to) as db:
        try:
            hits = db.search_messages(args.query, limit=args.limit)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return hits, hits.complete


# ---- changing


@command(
    "sessions rename",
    _ID,
    Argument("title", metavar="TITLE"),
    help="set the title of a session; an empty one removes it",
)
def _rename(args: Args, home: Home) -> None:
    from hermes.services import sessions

    def change(db: SessionDB, session_id: str) -> str:
        sessions.change(db, session_id, title=args.title)
        return session_id

    _change(args, home, change)


@command(
    "sessions fork",
    _ID,
    Argument("--at", metavar="MESSAGE", type=number, help="up to and with this message"),
    Argument("--title", metavar="TITLE"),
    help="copy a session to a new one",
)
def _fork(args: Args, home: Home) -> None:
    from hermes.services import sessions

    _change(args, home, lambda db, session_id: sessions.fork(db, session_id, None, args.title, args.at))


def _change(args: Args, home: Home, change: Callable[[SessionDB, str], str]) -> None:
    """Change the session that is meant, and print the one whose id the change returns."""
    with opened(home, "change") as db:
        session_id = find(db, home, args.id)[0]["id"]
        with service_errors(f"hermes sessions show {session_id}"):
            session_id = change(db, session_id)
        session = session_of(db, session_id)
    print_sessions(args, home, session_format.shown(session, full=False), [session])


@command("sessions archive", _IDS, flag("--undo", help="show them in lists again"), help="hide sessions from lists")
def _archive(args: Args, home: Home) -> None:
    from hermes.services import sessions

    with opened(home, "change") as db:
        ids = [session["id"] for session in find(db, home, *args.ids)]

        def change() -> None:
            for session_id in ids:
                sessions.change(db, session_id, archived=not args.undo)

        db.transaction(change)
        rows = [session_of(db, session_id) for session_id in ids]
    print_sessions(args, home, {"sessions": [session_format.shown(row, full=False) for row in rows]}, rows)


@command(
    "sessions delete",
    _IDS,
    YES,
    flag("--force", help="also while a turn is running, which is stopped"),
    help="delete sessions with all their data",
)
def _delete(args: Args, home: Home) -> int:
    from hermes.store.base import SessionBusy

    with opened(home, "change") as db:
        rows = find(db, home, *args.ids)
        ids = [row["id"] for row in rows]
        if not _confirmed(args, home, rows):
            return 1
        try:
            deleted = db.transaction(lambda: [one for one in ids if db.delete_session(one, force=args.force)])
        except SessionBusy as error:
            raise SessionBusy(f"{error.message} Nothing was deleted.", hint="the same with --force") from None
    tell(args, {"deleted": deleted}, f"{counted(len(deleted), 'session')} deleted.")
    return 0


@command(
    "sessions prune",
    _OLDER.but(default="90d", help="without activity for this long: 12h, 90d, 8w (90d)"),
    *_FILTERS,
    flag("--dry-run", help="only list them"),
    YES,
    help="delete ended sessions without recent activity",
)
def _prune(args: Args, home: Home) -> int:
    from hermes.store.base import SessionBusy

    before = time.time() - args.older_than
    with opened(home) as db:
        rows = [session_of(db, session_id) for session_id in _prune_before(db, args, before, dry_run=True)]
    ids = [row["id"] for row in rows]
    if args.dry_run or not rows:
        print_sessions(args, home, {"dry_run": args.dry_run, "sessions": ids}, rows)
        note(f"{counted(len(rows), 'session')} would go." if rows else "There is nothing to prune.")
        return 0
    if not _confirmed(args, home, rows):
        return 1
    with opened(home, "change") as db:
        deleted = _prune_before(db, args, before, dry_run=False)
        db.give_back_space()
    tell(args, {"dry_run": False, "sessions": deleted}, f"{counted(len(deleted), 'session')} deleted.")
    if busy := len(set(ids) - set(deleted)):
        note(f"{counted(busy, 'session')} stayed: turns of them or near them are running.")
        return SessionBusy.exit_code
    return 0


def _prune_before(db: SessionDB, args: Args, before: float, *, dry_run: bool) -> list[str]:
    """Those last active before this time, however long the confirmation took."""
    chosen = {name: getattr(args, name) for name in ("source", "title", "max_messages", "archived")}
    days = (time.time() - before) / 86_400
    return db.prune_sessions(days, cwd_prefix=args.workspace, model=args.of_model, dry_run=dry_run, **chosen)


def _confirmed(args: Args, home: Home, rows: Sequence[JsonObject]) -> bool:
    count, hidden = counted(len(rows), "session"), mask(home)
    listed = (f"  {hidden(line)}" for line in session_format.session_lines(rows))
    return confirmed(
        args, f"Deleting {count}", f"{count} will be gone, with messages, files, logs and subtasks:", *listed
    )


# ---- files and the database

command(
    "sessions export",
    _IDS.but(nargs="*"),
    Argument("--format", choices=("jsonl", "md"), default="jsonl", help="JSON lines or Markdown"),
    Argument("-o", "--output", metavar="FILE", default="-", help="a file, instead of standard output"),
    flag("--force", help="replace the file if there is one"),
    flag("--with-secrets", help="do not redact secrets"),
    _OLDER,
    *_FILTERS,
    help="export all sessions or the named ones",
)(sessions_transfer.export)
command(
    "sessions import",
    Argument(
        "file",
        metavar="FILE",
        help="JSON lines of Hermes, or an export of ChatGPT, Claude or Open WebUI (zip or JSON); '-' reads standard input",
    ),
    help="import sessions; existing ones are skipped",
)(sessions_transfer.import_)
command("sessions stats", help="show counts and the size of each part of the database")(session_maintenance.stats)
command("sessions optimize", help="merge the search index and release free space")(session_maintenance.optimize)
command("sessions backup", Argument("file", metavar="FILE"), help="back up the database, also while it is in use")(
    session_maintenance.backup
)
command(
    "sessions repair",
    flag("--deep", help="check everything, however long it takes"),
    help="check the database, and recover what can be read of a damaged one",
)(session_maintenance.repair)
command("sessions migrate", *migrate_command.ARGUMENTS, help="the same as hermes migrate")(migrate_command.run)
