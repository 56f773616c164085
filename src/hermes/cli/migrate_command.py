"""`hermes migrate`: move a home's store to another database, SQLite or PostgreSQL."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING

from hermes.cli import output
from hermes.cli.command import Argument, command, flag
from hermes.cli.output import note, tell
from hermes.cli.streams import draw
from hermes.core.formatting import counted
from hermes.core.home import Home

if TYPE_CHECKING:
    from hermes.store.migrate import Progress

_WORDS = {"copy": "copying", "verify": "comparing"}
_SHOWN_EVERY_S = 0.1

ARGUMENTS = (
    Argument("--from", metavar="URL", dest="source", help="the database to move (that of storage.url)"),
    Argument("--to", metavar="URL", required=True, help="the empty database to move to"),
    flag("--switch", help="then write the new address to storage.url"),
)


@command("migrate", *ARGUMENTS)
def run(args: argparse.Namespace, home: Home) -> int:
    from hermes.server.status import hold
    from hermes.services.sessions import database_url
    from hermes.store.migrate import migrate, open_sides
    from hermes.store.stores import is_server, path_of

    source_url, target_url = (args.source or database_url(home)), args.to
    progress = _ProgressLine()
    with contextlib.ExitStack() as stack:
        # Neither a server nor another migration of these homes may begin meanwhile.
        files = [path_of(url) for url in (source_url, target_url) if not is_server(url)]
        folders = {file.resolve().parent for file in files if file is not None and file.name == home.state_db.name}
        others = [folder for folder in sorted(folders - {home.path.resolve()}) if folder.is_dir()]
        for one in (home, *map(Home, others)):
            stack.enter_context(hold(one))
        source, target = stack.enter_context(open_sides(source_url, target_url, home))
        with progress:
            report = migrate(source, target, progress.show)
    document = {
        "from": source.place,
        "to": target.place,
        "rows": report.rows,
        "tables": {name: table._asdict() for name, table in report.tables.items()},
        "unfinished_runs": report.unfinished_runs,
        "continued": report.is_continued,
        "unchanged": report.is_unchanged,
        "switched": args.switch,
    }
    done = "All of it was there already" if report.is_unchanged else "Everything was moved"
    lines = [f"{done}: {counted(report.rows, 'row')} in {target.place}, compared row by row with {source.place}."]
    if args.switch:
        lines += _switch(home, target_url)
    tell(args, document, *lines)
    if report.unfinished_runs:
        note(f"{counted(report.unfinished_runs, 'unfinished run')} moved too: the next server continues them.")
    if not args.switch:
        address = f"{target.place}, with user and password" if is_server(target_url) else target_url
        note(f"To use it, set storage.url to {address}: the same command with --switch, or hermes config set.")
    return 0


def _switch(home: Home, url: str) -> list[str]:
    from hermes.settings import config

    config.unset_value(home, "storage.url")  # an older one in .env would come first
    written = config.set_value(home, "storage.url", url)
    variable = f" as {written.variable}" if written.variable else ""
    origin = config.load(home).origin("storage.url")
    if origin.source == "environment":
        note(f"storage.url is still taken from {origin.where}, which comes first.")
    return [f"storage.url is in {written.file}{variable}."]


class _ProgressLine:
    """One line that is written over, on a terminal."""

    def __init__(self) -> None:
        self._shown_at, self._chars = 0.0, 0
        self._visible = sys.stderr.isatty() and not output.quiet

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if not self._visible or now - self._shown_at < _SHOWN_EVERY_S:
            return
        self._shown_at = now
        line = f"{_WORDS[progress.work]} {progress.table}: {progress.rows:,} of {progress.total:,}"
        draw(f"\r{line.ljust(self._chars)}")
        self._chars = len(line)

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._chars:
            draw(f"\r{' ' * self._chars}\r")
