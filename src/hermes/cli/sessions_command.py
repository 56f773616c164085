"""`hermes sessions`: look at conversations, find, name, fork and remove them; the table of all its actions."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hermes.cli import session_format as words
from hermes.cli import session_maintenance, sessions_transfer
from hermes.cli.actions import FLAG, YES, Actions, Args, Arguments, age, command, folder, number
from hermes.cli.output import NotFound, UsageError, confirmed, mask, note, print_redacted, tell
from hermes.cli.session_format import tell_sessions
from hermes.cli.session_maintenance import find, opened, session_of
from hermes.core.formatting import counted
from hermes.core.home import Home
from hermes.core.json_types import JsonObject

if TYPE_CHECKING:
    from hermes.store.sessions import SessionDB

_SHOWN_MESSAGES = 20


# ---- looking


def _list(args: Args, home: Home) -> None:
    with opened(home) as db:
        chosen = {"source": args.source, "cwd_prefix": args.workspace, "search": args.search}
        found = db.list_sessions(limit=args.limit + 1, include_children=args.all, archived=args.all and "all", **chosen)
    more, found = len(found) > args.limit, found[: args.limit]
    tell_sessions(args, home, {"sessions": [words.shown(session) for session in found], "more": more}, found)
    if more:
        note(f"There are more. Try: hermes sessions list --limit {max(20, args.limit * 2)}")
    elif not found:
        note("There are no sessions.")


def _show(args: Args, home: Home) -> None:
    with opened(home) as db:
        [session] = find(db, home, args.id)
        limit = args.messages if args.messages is not None or args.full else _SHOWN_MESSAGES
        messages = db.get_messages(session["id"], include_inactive=args.full, limit=limit, order="desc")[::-1]
        total = db.count_messages(session["id"], include_inactive=args.full)
    document = words.shown(session, full=args.full) | {"messages": [words.shown(one) for one in messages]}
    lines = words.head_lines(session)
    for message in messages:
        lines += ["", *words.message_lines(message, full=args.full)]
    print_redacted(args, home, document, lines)
    if len(messages) < total and args.messages is None:
        note(f"These are the last {len(messages)} of {total} messages. Try: --messages {total}")


def _search(args: Args, home: Home) -> None:
    from hermes.store.base import StoreDamaged, StoreError

    try:
        found, complete = _hits(args, home, "look")
    except StoreError as error:
        if type(error) not in (StoreDamaged, StoreError):
            raise
        # It may only be the index, which is made anew by whoever may write.
        found, complete = _hits(args, home, "change")
    document = {"hits": [words.shown(hit) for hit in found], "complete": complete}
    print_redacted(args, home, document, (line for hit in found for line in words.hit_lines(hit)))
    if not complete:
        note("The search took too long: there may be better hits, and more.")
    elif not found:
        note("Nothing was found.")


def _hits(args: Args, home: Home, to: str) -> tuple[list[JsonObject], bool]:
    with opened(home, to) as db:
        try:
            found = db.search_messages(args.query, limit=args.limit)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return found, found.complete


# ---- changing


def _rename(args: Args, home: Home) -> None:
    _change(args, home, lambda db, one: db.set_session_title(one, args.title))


def _fork(args: Args, home: Home) -> None:
    _change(args, home, lambda db, one: db.fork_session(one, title=args.title, at_message_id=args.at))


def _change(args: Args, home: Home, change: Callable[[SessionDB, str], str | bool]) -> None:
    """Do it to the session that is meant, and tell it, or the new one whose id came of it."""
    with opened(home, "change") as db:
        [session] = find(db, home, args.id)
        try:
            made = change(db, session["id"])
        except KeyError as error:
            raise NotFound(error.args[0], hint=f"hermes sessions show {session['id']}") from None
        except ValueError as error:
            raise UsageError(str(error)) from None
        told = session_of(db, made if isinstance(made, str) else session["id"])
    tell_sessions(args, home, words.shown(told, full=False), [told])


def _archive(args: Args, home: Home) -> None:
    with opened(home, "change") as db:
        ids = [session["id"] for session in find(db, home, *args.ids)]
        db.transaction(lambda: [db.update_session(one, archived=not args.undo) for one in ids])
        found = [session_of(db, one) for one in ids]
    tell_sessions(args, home, {"sessions": [words.shown(session, full=False) for session in found]}, found)


def _delete(args: Args, home: Home) -> int:
    from hermes.store.base import SessionBusy

    with opened(home, "change") as db:
        going = find(db, home, *args.ids)
        ids = [session["id"] for session in going]
        if not _confirmed(args, home, going):
            return 1
        try:
            gone = db.transaction(lambda: [one for one in ids if db.delete_session(one, force=args.force)])
        except SessionBusy as error:
            raise SessionBusy(f"{error.message} Nothing was deleted.", hint="the same with --force") from None
    tell(args, {"deleted": gone}, f"{counted(len(gone), 'session')} deleted.")
    return 0


def _prune(args: Args, home: Home) -> int:
    from hermes.store.base import SessionBusy

    before = time.time() - args.older_than
    with opened(home) as db:
        found = [session_of(db, one) for one in _pruned(db, args, before, dry_run=True)]
    ids = [session["id"] for session in found]
    if args.dry_run or not found:
        tell_sessions(args, home, {"dry_run": args.dry_run, "sessions": ids}, found)
        note(f"{counted(len(found), 'session')} would go." if found else "There is nothing to prune.")
        return 0
    if not _confirmed(args, home, found):
        return 1
    with opened(home, "change") as db:
        gone = _pruned(db, args, before, dry_run=False)
        db.give_back_space()
    tell(args, {"dry_run": False, "sessions": gone}, f"{counted(len(gone), 'session')} deleted.")
    if stayed := len(set(ids) - set(gone)):
        note(f"{counted(stayed, 'session')} stayed: turns of them or near them are running.")
        return SessionBusy.exit_code
    return 0


def _pruned(db: SessionDB, args: Args, before: float, *, dry_run: bool) -> list[str]:
    """Those left alone since `before`, however long the question was thought about."""
    chosen = {name: getattr(args, name) for name in ("source", "title", "max_messages", "archived")}
    days = (time.time() - before) / 86_400
    return db.prune_sessions(days, cwd_prefix=args.workspace, model=args.of_model, dry_run=dry_run, **chosen)


def _confirmed(args: Args, home: Home, going: Sequence[JsonObject]) -> bool:
    count, hidden = counted(len(going), "session"), mask(home)
    listed = (f"  {hidden(line)}" for line in words.session_lines(going))
    return confirmed(
        args, f"Deleting {count}", f"{count} will be gone, with messages, files, logs and subtasks:", *listed
    )


# ---- the table

_ARGUMENTS: Arguments = YES | {
    "id": {"metavar": "ID", "help": "an id, the beginning of one, or a title"},
    "ids": {"metavar": "ID", "nargs": "+", "help": "an id, the beginning of one, or a title"},
    "export ids": {"nargs": "*"},
    "query": {"metavar": "QUERY", "help": 'words, "phrases", AND, OR, NOT, beginnings*'},
    "title": {"metavar": "TITLE"},
    "file": {"metavar": "FILE"},
    "import file": {"help": "JSON lines; '-' reads standard input"},
    "--all": FLAG | {"help": "archived ones and those made for subtasks too"},
    "--archived": {"action": argparse.BooleanOptionalAction, "help": "only those that are archived, or are not"},
    "--at": {"metavar": "MESSAGE", "type": number, "help": "up to and with this message"},
    "--deep": FLAG | {"help": "check everything, however long it takes"},
    "--dry-run": FLAG | {"help": "only say which"},
    "--force": FLAG | {"help": "also while a turn is running, which is cut off"},
    "export --force": {"help": "replace the file if there is one"},
    "--format": {"choices": ("jsonl", "md"), "default": "jsonl", "help": "JSON lines, or text to read"},
    "--full": FLAG | {"help": "whole texts, reasoning, and messages that are hidden now"},
    "--limit": {"metavar": "N", "type": number, "default": 20, "help": "how many at most (20)"},
    "--max-messages": {"metavar": "N", "type": number, "help": "only those with so many messages at most"},
    "--messages": {"metavar": "N", "type": number, "help": f"the last N messages ({_SHOWN_MESSAGES})"},
    "--model": {"metavar": "TEXT", "dest": "of_model", "help": "only those with this in their model's name"},
    "--older-than": {"metavar": "AGE", "type": age, "help": "left alone for so long: 12h, 90d, 8w"},
    "prune --older-than": {"default": "90d", "help": "left alone for so long: 12h, 90d, 8w (90d)"},
    "-o/--output": {"metavar": "FILE", "default": "-", "help": "a file, instead of standard output"},
    "--search": {"metavar": "TEXT", "help": "only those with this in their title or id"},
    "--source": {"metavar": "NAME", "help": "only those that began there: cli, api_server, …"},
    "--title": {"metavar": "TEXT", "help": "only those with this in their title"},
    "fork --title": {"metavar": "TITLE", "help": None},
    "--undo": FLAG | {"help": "put them back into lists"},
    "--with-secrets": FLAG | {"help": "do not redact secrets"},
    "--workspace": {"metavar": "DIR", "type": folder, "help": "only those of this folder and below it"},
}
_FILTERS = "--older-than --source --workspace --title --model --max-messages --archived"
_EXPORT = f"ids --format -o/--output --force --with-secrets {_FILTERS}"
_ACTIONS: Actions = {
    "list": (_list, "sessions, the latest first", "--source --limit --workspace --all --search"),
    "show": (_show, "one session and what was said in it", "id --messages --full"),
    "search": (_search, "find messages by their words", "query --limit"),
    "rename": (_rename, "give a session a title; an empty one takes it away", "id title"),
    "fork": (_fork, "a new session that begins like this one", "id --at --title"),
    "archive": (_archive, "keep sessions out of lists", "ids --undo"),
    "delete": (_delete, "remove sessions with everything that belongs to them", "ids -y/--yes --force"),
    "prune": (_prune, "remove sessions that ended and have long been left alone", f"{_FILTERS} --dry-run -y/--yes"),
    "export": (sessions_transfer.export, "write sessions out, all or those that are named", _EXPORT),
    "import": (sessions_transfer.import_, "take exported sessions in; those that are there already stay", "file"),
    "stats": (session_maintenance.stats, "how many there are, and the size of each part of the database", ""),
    "optimize": (session_maintenance.optimize, "merge the search index and give free space back", ""),
    "backup": (session_maintenance.backup, "copy the database while it is in use", "file"),
    "repair": (session_maintenance.repair, "check the database, and save what can be saved of a damaged one", "--deep"),
}
add_arguments, run = command(_ACTIONS, _ARGUMENTS)
