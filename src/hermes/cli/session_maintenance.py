"""The database of sessions: opening it, finding a session in it, and `stats`, `optimize`, `backup`, `repair`."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.cli.output import NotFound, UsageError, note, tell
from hermes.cli.session_format import note_sessions
from hermes.core.errors import HermesError
from hermes.core.formatting import counted, size
from hermes.core.home import Home, is_served
from hermes.core.json_types import JsonObject

if TYPE_CHECKING:
    from hermes.store.sessions import SessionDB

_NEAR_MAX, _CANDIDATES_MAX, _FAULTS_MAX = 500, 20, 20
_WAYS = {"index": "The search index was made anew.", "salvage": "What could be read is in a new file."}


@contextlib.contextmanager
def opened(home: Home, to: str = "look") -> Iterator[SessionDB]:
    """The database, to `look` at (an empty one where there is none), to `change`, or to `make` if need be."""
    from hermes.services.sessions import database_exists, open_database

    if to == "change" and not database_exists(home):
        raise NotFound("There are no sessions yet.", where=str(home.path), hint="hermes chat")
    with open_database(home, write=to == "change", create=to == "make") as db:
        yield db


def find(db: SessionDB, home: Home, *texts: str) -> list[JsonObject]:
    """The sessions that are meant, each once."""
    return [session_of(db, one) for one in dict.fromkeys([_id_of(db, home, text) for text in texts])]


def _id_of(db: SessionDB, home: Home, text: str) -> str:
    if session_id := db.resolve_session_id(text):
        return session_id
    near = db.list_sessions(search=text, limit=_NEAR_MAX, include_children=True, archived="all") if text else []
    candidates = [one for one in near if one["id"].lower().startswith(text.lower()) or one["title"] == text]
    if not candidates:
        raise _unknown(text)
    note_sessions(home, candidates[:_CANDIDATES_MAX])
    raise UsageError(f"'{text}' may mean any of these sessions.", hint=f"hermes sessions show {candidates[0]['id']}")


def session_of(db: SessionDB, session_id: str) -> JsonObject:
    session = db.get_session(session_id)
    if session is None:  # somebody else was quicker
        raise _unknown(session_id)
    return session


def _unknown(text: str) -> NotFound:
    return NotFound(f"There is no session '{text}'.", hint="hermes sessions list --all")


# ---- care


def stats(args: argparse.Namespace, home: Home) -> None:
    from hermes.services import sessions
    from hermes.store.stores import place_of

    place = place_of(sessions.database_url(home))
    document: JsonObject = {"path": place, "bytes": 0, "parts": {}} | dict.fromkeys(sessions.COUNTED, 0)
    if sessions.database_exists(home):
        with opened(home) as db:
            document |= sessions.measure(db)
    lines = [f"{name}: {document[name]}" for name in sessions.COUNTED]
    lines += [f"{name}: {size(count)}" for name, count in document["parts"].items()]
    tell(args, document, *lines, f"all of {document['path']}: {size(document['bytes'])}")
    if not document["bytes"]:
        note("There are no sessions yet.")
    elif not document["parts"]:
        note("This database does not report the size of each part.")


def optimize(args: argparse.Namespace, home: Home) -> None:
    with opened(home, "change") as db:
        done = db.optimize()
    tell(args, done, f"{size(done['bytes_before'])} before, {size(done['bytes_after'])} after.")


def backup(args: argparse.Namespace, home: Home) -> None:
    from hermes.store.base import StoreError

    target = Path(os.path.abspath(os.path.expanduser(args.file)))
    if os.path.lexists(target):
        raise UsageError("There is such a file already.", where=str(target), hint="name another one")
    with opened(home, "change") as db:
        try:
            db.backup(target)
        except StoreError as error:
            if error.where != str(target):
                raise
            # The fault is the copy's: nothing is wrong with the store.
            raise HermesError(error.message, where=error.where, hint=error.hint) from error
    count = target.stat().st_size
    tell(args, {"file": str(target), "bytes": count}, f"{size(count)} in {target}.")


def repair(args: argparse.Namespace, home: Home) -> int:
    from hermes.services.sessions import database_file
    from hermes.store.base import StoreBusy, StoreDamaged
    from hermes.store.sqlite import maintenance

    path = database_file(home)
    if path is None:
        raise UsageError(
            "A database server is repaired with its own tools.", hint="hermes doctor, which checks whether it answers"
        )
    if path.exists() and is_served(home):
        raise StoreBusy("A server is using this home.", where=str(home.path), hint="hermes gateway stop")
    faults, notices = _faults(home, deep=args.deep)
    document: JsonObject = {"sound": not faults, "faults": faults, "notices": notices, "repair": None, "left": []}
    if not faults:
        sound = f"No fault was found in {path}; nothing was done to it."
        tell(args, document, *notices, "No other fault was found." if notices else sound)
        return 0
    note(*(f"  {fault}" for fault in faults[:_FAULTS_MAX]))
    report = maintenance.repair(path)
    left = _faults(home, deep=False)[0] if report["repaired"] else faults
    lines = [f"It could not be repaired: {report['error']}"]
    if report["repaired"]:
        held = f"{counted(report['rows'], 'message')} in {counted(report['sessions'], 'session')}"
        lines = [f"{_WAYS[report['strategy']]} It holds {held}."]
    if report["damaged"]:
        lines.append(f"Rows of these tables could not be read: {', '.join(report['damaged'])}.")
    if report["backup_path"]:
        lines.append(f"A copy of the database as it was: {report['backup_path']}")
    tell(args, document | {"repair": report, "left": left}, *lines)
    if report["repaired"] and left:
        note("Not all of it is right yet:", *(f"  {fault}" for fault in left[:_FAULTS_MAX]))
    return StoreDamaged.exit_code if left else 0


def _faults(home: Home, *, deep: bool) -> tuple[list[str], list[str]]:
    """What is wrong with the database, and what was put right by opening it."""
    from hermes.store.base import StoreDamaged

    try:
        # Only looked at first: an index is made anew in a file that is sound otherwise, or after the copy.
        with opened(home) as db:
            faults = db.check()
        if faults:
            return faults, []
        with opened(home, "change") as db:
            return db.check(deep=True, progress=note) if deep else [], list(db.notices)
    except StoreDamaged as error:
        return [error.message], []
