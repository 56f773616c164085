"""`hermes runs`: turns at work and their logs: look at them, follow, stop and steer them, answer their questions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import TYPE_CHECKING, get_args

from hermes.cli.command import Args, Argument, command, number
from hermes.cli.output import NotFound, mask, note, print_redacted, resolve_name, service_errors, tell
from hermes.cli.session_maintenance import find, opened
from hermes.cli.streams import as_json
from hermes.cli.table import print_table
from hermes.core.events import Event, Status
from hermes.core.formatting import local, one_line, with_iso, without_colours
from hermes.core.home import Home
from hermes.core.json_types import JsonObject
from hermes.core.spec import Control, ControlKind
from hermes.services import runs as service

if TYPE_CHECKING:
    from hermes.store.base import RunRecord
    from hermes.store.sessions import SessionDB

_APPLIED_S_MAX = 5.0
_POLL_S = 0.05
# The fields of an event that are printed besides its type; text is printed as it is.
_FIELDS = {
    "run.queued": "position",
    "run.started": "model provider",
    "run.resumed": "reason",
    "control.received": "control by",
    "model.started": "model attempt",
    "model.retrying": "failure message",
    "model.switched": "to reason",
    "message.completed": "finish_reason",
    "usage": "input_tokens output_tokens task",
    "approval.requested": "subject reason choices",
    "approval.resolved": "choice by",
    "clarify.requested": "question choices",
    "clarify.resolved": "by",
    "tool.started": "name preview",
    "tool.finished": "name status duration_ms",
    "subagent.started": "goal",
    "subagent.finished": "status",
    "context.compacted": "method tokens_before tokens_after",
    "notice": "message",
    "run.failed": "error",
    "run.cancelled": "reason",
}
_TEXTS = {"text.delta": "", "tool.output": "    "}


_ID = Argument("id", metavar="ID", help="an id, or the beginning of one")
_TEXT = Argument("text", metavar="TEXT")


# ---- looking


@command(
    "runs list",
    Argument("--status", choices=get_args(Status), metavar="STATUS", help=", ".join(get_args(Status))),
    Argument("--session", metavar="ID", help="only those of this session"),
    Argument("--limit", metavar="N", type=number, default=20, help="how many at most (20)"),
    help="list runs, newest first",
)
def _list(args: Args, home: Home) -> None:
    from hermes.store.runs import Runs

    with opened(home) as db:
        session_id = find(db, home, args.session)[0]["id"] if args.session else None
        statuses = [args.status] if args.status else []
        records, texts, _ = Runs(db.engine).page(
            owner=None, limit=args.limit + 1, session_id=session_id, statuses=statuses
        )
    shown = [_shown(record, texts.get(record.state.final_row)) for record in records[: args.limit]]
    rows = [(run["run_id"], run["status"], run["kind"], run["session_id"], local(run["created_at"])) for run in shown]
    more = len(records) > args.limit
    document = {"runs": with_iso(shown), "more": more}
    print_table(args, home, document, rows, flexible=3, empty="There are no runs.")
    if more:
        note(f"There are more. Try: hermes runs list --limit {max(20, args.limit * 2)}")


def _shown(record: RunRecord, output: str | None) -> JsonObject:
    """The run as the server shows it."""
    import msgspec

    from hermes.server.render_run import run_object

    shown: JsonObject = msgspec.to_builtins(run_object(record, output, record.state.model))
    return shown


def _record(db: SessionDB, text: str) -> RunRecord:
    """The run that is meant, by its id or the beginning of it."""
    from hermes.store.runs import Runs

    runs, prefix = Runs(db.engine), text if text.startswith("run_") else f"run_{text}"
    if (record := runs.get(text)) is not None:
        return record
    run_id = resolve_name(prefix, service.run_ids_with_prefix(db, prefix, text), "run", "hermes runs list")
    if (record := runs.get(run_id)) is None:  # it has just gone
        raise NotFound(f"There is no run '{text}'.", hint="hermes runs list")
    return record


@command("runs show", _ID, help="show a run")
def _show(args: Args, home: Home) -> None:
    from hermes.core.text import text_of
    from hermes.store.runs import Runs

    with opened(home) as db:
        record = _record(db, args.id)
        row_id = record.state.final_row
        row = Runs(db.engine).row(record.spec.run_id, row_id) if row_id is not None else None
    shown = _shown(record, text_of(row.content) if row else None)
    values = {name: local(value) if name.endswith("_at") else value for name, value in shown.items() if value}
    lines = [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]
    print_redacted(args, home, with_iso(shown), lines)


# ---- following


@command(
    "runs tail",
    _ID,
    Argument("--after", metavar="SEQ", type=number, default=0, help="only events after this number"),
    help="follow the events of a run until its end",
)
def _tail(args: Args, home: Home) -> int:
    from hermes.bus.memory import MemoryBus
    from hermes.runs.log import RunLog
    from hermes.store.runs import Runs
    from hermes.store.stores import AsyncRuns

    with opened(home) as db:
        run_id = _record(db, args.id).spec.run_id
        events = RunLog(MemoryBus(), journal=home.journal).subscribe(run_id, AsyncRuns(Runs(db.engine)), args.after)
        return asyncio.run(follow(args, run_id, events, mask(home)))


async def follow(args: Args, run_id: str, events: AsyncIterator[Event], hidden: Callable[[str], str]) -> int:
    """Print a run's log as it comes, and say by the exit code how the run ended."""
    from hermes.guards.secrets import redact_tree

    last, within, between = "", False, f'{{"run_id": {json.dumps(run_id)}, "events": ['
    async for event in events:
        if args.json:
            print(between + as_json(redact_tree(event.as_dict(), hidden)), end="", flush=True)
        elif event.type in _TEXTS:
            text = without_colours(hidden(event.data["text"]))
            print(text.replace("\n", "\n" + _TEXTS[event.type]), end="", flush=True)
            within = not text.endswith("\n")
        elif event.type not in ("reasoning.delta", "tool.drafted"):
            print("\n" * within + _line(event, hidden), flush=True)
            within = False
        last, between = event.type, ", "
    if args.json or within:
        print(("" if last else between) + "]}" if args.json else "", flush=True)
    if last == "run.interrupted":
        note("It was interrupted and continues when a server resumes it.")
    return 1 if last in ("run.failed", "run.cancelled") else 0


def _line(event: Event, hidden: Callable[[str], str]) -> str:
    values = [event.data.get(name) for name in _FIELDS.get(event.type, "").split()]
    if event.type == "approval.requested":  # whoever decides must see where its lines end
        values[0] = str(values[0]).replace("\n", "\\n")
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values if value]
    when = f"{datetime.fromtimestamp(event.ts):%H:%M:%S}"
    return one_line(hidden(f"{event.seq:>5} {when} {event.type} {', '.join(texts)}"))


# ---- steering


@command("runs stop", _ID, help="stop a run and keep what it has")
def _stop(args: Args, home: Home) -> None:
    _control(args, home, "interrupt", lambda _: {})


@command("runs steer", _ID, _TEXT, help="add a message to a running turn")
def _steer(args: Args, home: Home) -> None:
    _control(args, home, "steer", lambda _: {"text": _checked_text(args)})


@command(
    "runs approve",
    _ID,
    Argument("--choice", choices=("once", "session", "always"), default="once", help="for how long (once)"),
    help="approve the pending call",
)
def _approve(args: Args, home: Home) -> None:
    _control(args, home, "approve", lambda record: service.approval_data(record, args.choice)[0])


@command(
    "runs deny",
    _ID,
    Argument("comment", metavar="COMMENT", nargs="?", help="what the model should do instead"),
    help="deny the pending call",
)
def _deny(args: Args, home: Home) -> None:
    def data(record: RunRecord) -> JsonObject:
        comment = service.denial_comment("deny", args.comment)
        return service.approval_data(record, "deny", comment=comment)[0]

    _control(args, home, "approve", data)


@command("runs answer", _ID, _TEXT, help="answer the pending question")
def _answer(args: Args, home: Home) -> None:
    _control(args, home, "answer", lambda record: service.answer_data(record, _checked_text(args)))


def _checked_text(args: Args) -> str:
    return service.checked_text(args.text, "TEXT")


def _control(args: Args, home: Home, kind: ControlKind, data_for: Callable[[RunRecord], JsonObject]) -> None:
    """Leave a control where the process that carries the run on finds it, and wait a while for its effect."""
    from hermes.store.leases import Leases
    from hermes.store.runs import Runs

    with opened(home, "change") as db:
        record = _record(db, args.id)
        run_id, runs = record.spec.run_id, Runs(db.engine)
        with service_errors(f"hermes runs show {run_id}"):
            if record.state.ended:
                raise service.ended_run(record)
            control = Control(kind, data_for(record), surface="cli", credential="default")
            held = Leases(db.engine).holder(f"session:{record.spec.session_id}") is not None
            runs.add_control(run_id, control)
            until = time.monotonic() + (_APPLIED_S_MAX if held else 0.0)
            record = runs.get(run_id) or record
            while not record.state.ended and control.control_id not in record.state.controls:
                if time.monotonic() >= until:
                    break
                time.sleep(_POLL_S)
                record = runs.get(run_id) or record
            is_applied = control.control_id in record.state.controls
            if record.state.ended and not is_applied:
                raise service.ended_run(record)
    result = "applied" if is_applied else "left"
    document = {"run_id": run_id, "control": kind, "control_id": control.control_id, "result": result}
    tell(args, document | {"status": record.state.status}, f"{run_id}: {kind} {result}, {record.state.status}.")
    if not is_applied:
        reason = "Whoever carries the run on has not taken it yet." if held else "Nobody carries the run on now."
        note(f"{reason} It takes effect when the run continues.")
