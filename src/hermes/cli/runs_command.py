"""`hermes runs`: turns at work and their logs: look at them, follow, stop and steer them, answer their questions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import TYPE_CHECKING, get_args

from hermes.cli.actions import Actions, Args, Arguments, command, number
from hermes.cli.output import NotFound, UsageError, mask, note, print_redacted, resolve_name, tell
from hermes.cli.session_maintenance import find, opened
from hermes.cli.streams import as_json
from hermes.core.errors import HermesError
from hermes.core.events import Event, Status
from hermes.core.formatting import columns, local, one_line, with_iso
from hermes.core.home import Home
from hermes.core.json_types import JsonObject
from hermes.core.spec import Control, ControlKind
from hermes.services import sessions

if TYPE_CHECKING:
    from hermes.store.base import RunRecord
    from hermes.store.sessions import SessionDB

_APPLIED_S_MAX = 5.0
_POLL_S = 0.05
# What of an event is told besides its type; text is told as it is.
_TOLD = {
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


class NotActive(HermesError):
    """The run has ended, or waits for nothing of the kind."""


# ---- looking


def _list(args: Args, home: Home) -> None:
    from hermes.store.runs import Runs

    with opened(home) as db:
        session = find(db, home, args.session)[0]["id"] if args.session else None
        found = Runs(db.engine).list(session_id=session, status=args.status, limit=args.limit + 1)
        more, found = len(found) > args.limit, found[: args.limit]
        objects = [_object(db, record) for record in found]
    rows = [
        (one["run_id"], one["status"], one["kind"], one["session_id"], local(record.created_at))
        for one, record in zip(objects, found, strict=True)
    ]
    print_redacted(args, home, {"runs": with_iso(objects), "more": more}, columns(rows, 3))
    if more:
        note(f"There are more. Try: hermes runs list --limit {max(20, args.limit * 2)}")
    elif not found:
        note("There are no runs.")


def _object(db: SessionDB, record: RunRecord) -> JsonObject:
    """The run as the server shows it."""
    import msgspec

    from hermes.core.text import text_of
    from hermes.server.render_run import run_object
    from hermes.store.runs import Runs

    row = record.state.final_row
    last = Runs(db.engine).row(record.spec.run_id, row) if row is not None else None
    shown: JsonObject = msgspec.to_builtins(
        run_object(record, text_of(last.content) if last else None, record.state.model)
    )
    return shown


def _record(db: SessionDB, text: str) -> RunRecord:
    """The run that is meant, by its id or the beginning of it."""
    from hermes.store.runs import Runs

    prefix = text if text.startswith("run_") else f"run_{text}"
    near = sessions.run_ids_with_prefix(db, prefix, text)
    found = Runs(db.engine).get(text) or Runs(db.engine).get(resolve_name(prefix, near, "run", "hermes runs list"))
    if found is None:  # it has just gone
        raise NotFound(f"There is no run '{text}'.", hint="hermes runs list")
    return found


def _show(args: Args, home: Home) -> None:
    with opened(home) as db:
        shown = _object(db, _record(db, args.id))
    told = {name: local(value) if name.endswith("_at") else value for name, value in shown.items() if value}
    lines = [f"{name}: {one if isinstance(one, str) else json.dumps(one)}" for name, one in told.items()]
    print_redacted(args, home, with_iso(shown), lines)


# ---- following


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
            text = hidden(event.data["text"])
            print(text.replace("\n", "\n" + _TEXTS[event.type]), end="", flush=True)
            within = not text.endswith("\n")
        elif event.type not in ("reasoning.delta", "tool.drafted"):
            print("\n" * within + _line(event, hidden), flush=True)
            within = False
        last, between = event.type, ", "
    if args.json or within:
        print(("" if last else between) + "]}" if args.json else "", flush=True)
    if last == "run.interrupted":
        note("It was cut off, and goes on when a server takes it up.")
    return 1 if last in ("run.failed", "run.cancelled") else 0


def _line(event: Event, hidden: Callable[[str], str]) -> str:
    told = [event.data.get(name) for name in _TOLD.get(event.type, "").split()]
    if event.type == "approval.requested":  # whoever decides must see where its lines end
        told[0] = str(told[0]).replace("\n", "\\n")
    words = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in told if value]
    when = f"{datetime.fromtimestamp(event.ts):%H:%M:%S}"
    return one_line(hidden(f"{event.seq:>5} {when} {event.type} {', '.join(words)}"))


# ---- steering


def _stop(args: Args, home: Home) -> None:
    _control(args, home, "interrupt", lambda _: {})


def _steer(args: Args, home: Home) -> None:
    _control(args, home, "steer", lambda _: {"text": _said(args.text)})


def _approve(args: Args, home: Home) -> None:
    _control(args, home, "approve", lambda record: _choice(record, getattr(args, "choice", "deny")))


def _answer(args: Args, home: Home) -> None:
    _control(args, home, "answer", lambda record: _answered(record, args.text))


def _said(text: str) -> str:
    if not text.strip():
        raise UsageError("TEXT says nothing.")
    return text


def _answered(record: RunRecord, text: str) -> JsonObject:
    if not record.state.questions:
        raise NotActive("It has asked nothing that is not answered.", where=record.spec.run_id)
    return {"id": next(iter(record.state.questions)), "answer": _said(text)}


def _choice(record: RunRecord, choice: str) -> JsonObject:
    if not record.state.approvals:
        raise NotActive("It has not asked for leave.", where=record.spec.run_id)
    approval_id, request = next(iter(record.state.approvals.items()))
    if choice not in request["choices"]:
        raise UsageError(f"The choice is one of {', '.join(request['choices'])}.", where="--choice")
    return {"id": approval_id, "choice": choice}


def _control(args: Args, home: Home, kind: ControlKind, data_for: Callable[[RunRecord], JsonObject]) -> None:
    """Leave a wish where whoever carries on the run finds it, and see what becomes of it."""
    from hermes.store.leases import Leases
    from hermes.store.runs import Runs

    with opened(home, "change") as db:
        record = _record(db, args.id)
        run_id, runs = record.spec.run_id, Runs(db.engine)
        if record.state.ended:
            raise NotActive(f"It has ended: {record.state.status}.", where=run_id, hint=f"hermes runs show {run_id}")
        control = Control(kind, data_for(record), surface="cli", credential="default")
        held = Leases(db.engine).holder(f"session:{record.spec.session_id}") is not None
        runs.add_control(run_id, control)
        until = time.monotonic() + (_APPLIED_S_MAX if held else 0.0)
        now = runs.get(run_id) or record
        while not now.state.ended and control.control_id not in now.state.controls and time.monotonic() < until:
            time.sleep(_POLL_S)
            now = runs.get(run_id) or record
    taken = control.control_id in now.state.controls
    if now.state.ended and not taken:
        raise NotActive(f"It has ended meanwhile: {now.state.status}.", where=run_id)
    applied = "applied" if taken else "left"
    document = {"run_id": run_id, "control": kind, "control_id": control.control_id, "result": applied}
    tell(args, document | {"status": now.state.status}, f"{run_id}: {kind} {applied}, {now.state.status}.")
    if not taken:
        whose = "Whoever carries the run on has not taken it yet." if held else "Nobody carries the run on now."
        note(f"{whose} It is done when the run goes on.")


_ARGUMENTS: Arguments = {
    "id": {"metavar": "ID", "help": "an id, or the beginning of one"},
    "text": {"metavar": "TEXT"},
    "--after": {"metavar": "SEQ", "type": number, "default": 0, "help": "only what comes after this number"},
    "--choice": {"choices": ("once", "session", "always"), "default": "once", "help": "for how long (once)"},
    "--limit": {"metavar": "N", "type": number, "default": 20, "help": "how many at most (20)"},
    "--session": {"metavar": "ID", "help": "only those of this session"},
    "--status": {"choices": get_args(Status), "metavar": "STATUS", "help": ", ".join(get_args(Status))},
}
_ACTIONS: Actions = {
    "list": (_list, "runs, the latest first", "--status --session --limit"),
    "show": (_show, "one run as it stands", "id"),
    "tail": (_tail, "its events, as they come, until its end", "id --after"),
    "stop": (_stop, "end it, and keep what there is", "id"),
    "steer": (_steer, "say something to it while it works", "id text"),
    "approve": (_approve, "allow what it asks leave for", "id --choice"),
    "deny": (_approve, "do not allow it", "id"),
    "answer": (_answer, "answer its question", "id text"),
}
add_arguments, run = command(_ACTIONS, _ARGUMENTS)
