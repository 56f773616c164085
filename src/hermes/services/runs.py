"""Runs: finding them, and the data of controls, with refusals as `ServiceError`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hermes.core.errors import ServiceError
from hermes.core.json_types import JsonObject
from hermes.store.leases import Leases

if TYPE_CHECKING:
    from hermes.store.base import RunRecord
    from hermes.store.sessions import SessionDB

_CHOICES = ("once", "session", "always", "deny")
_ALIASES = {"approve": "once", "approved": "once", "allow": "once"}


def unknown_run(run_id: str) -> ServiceError:
    return ServiceError(f"There is no run {run_id!r}.", "run_not_found")


def ended_run(record: RunRecord) -> ServiceError:
    return ServiceError(f"The run {record.spec.run_id!r} has ended: {record.state.status}.", "run_finished")


# --- controls --------------------------------------------------------------------------------------------------------


def checked_text(text: str, field: str, chars_max: int | None = None) -> str:
    if not text.strip():
        raise ServiceError(f"{field!r} says nothing.", "invalid_arguments", field=field)
    if chars_max is not None and len(text) > chars_max:
        raise ServiceError(f"{field!r} is longer than {chars_max} characters.", "string_above_max_length", field=field)
    return text


def approval_choice(text: str) -> str:
    choice = _ALIASES.get(text, text)
    if choice not in _CHOICES:
        raise _bad_choice(_CHOICES)
    return choice


def denial_comment(choice: str, comment: str | None, chars_max: int | None = None) -> str:
    """What the model reads with a denial; may be empty."""
    if comment is None:
        return ""
    if choice != "deny":
        raise ServiceError("'comment' is only for a denial.", "invalid_arguments", field="comment")
    return checked_text(comment, "comment", chars_max).strip()


def approval_data(
    record: RunRecord, choice: str, approval_id: str | None = None, *, every: bool = False, comment: str = ""
) -> list[JsonObject]:
    """The data of the controls that answer the named approval request, or the first, or every one."""
    pending = record.state.approvals
    if record.state.ended:
        raise ServiceError(f"The run {record.spec.run_id!r} has ended.", "approval_not_active")
    ids = list(pending) if every else [approval_id] if approval_id else list(pending)[:1]
    ids = [one for one in ids if one in pending]
    if not ids:
        raise no_approval()
    for one in ids:
        if choice not in pending[one]["choices"]:
            raise _bad_choice(pending[one]["choices"])
    return [{"id": one, "choice": choice, **({"comment": comment} if comment else {})} for one in ids]


def answer_data(record: RunRecord, text: str, request_id: str | None = None) -> JsonObject:
    """The data of the control that answers the named question, or the first."""
    pending = {} if record.state.ended else record.state.questions
    request_id = request_id or next(iter(pending), "")
    if request_id not in pending:
        raise no_question()
    return {"id": request_id, "answer": text}


def no_approval() -> ServiceError:
    return ServiceError("No such approval request is open.", "approval_not_pending")


def no_question() -> ServiceError:
    return ServiceError("No such question is open.", "clarify_not_pending")


def _bad_choice(choices: Iterable[str]) -> ServiceError:
    message = f"The choice is one of {', '.join(choices)}."
    return ServiceError(message, "invalid_approval_choice", field="choice")


# --- the database ----------------------------------------------------------------------------------------------------


def unfinished_runs(db: SessionDB) -> tuple[list[str], list[str]]:
    """The unfinished runs, and those of them that no process carries on."""
    sql, leases = "SELECT run_id, session_id FROM runs WHERE ended_at IS NULL", Leases(db.engine)
    runs = db.engine.read(lambda tx: [(str(run_id), str(session_id)) for run_id, session_id in tx.rows(sql)])
    abandoned = [run_id for run_id, session_id in runs if leases.holder(f"session:{session_id}") is None]
    return [run_id for run_id, _ in runs], abandoned


def run_ids_with_prefix(db: SessionDB, *prefixes: str) -> list[str]:
    """The newest runs whose id starts with one of these prefixes, all of one length."""
    sql = "SELECT run_id FROM runs WHERE substr(run_id, 1, ?) IN (?, ?) ORDER BY created_at DESC LIMIT 50"
    return db.engine.read(lambda tx: [str(row[0]) for row in tx.rows(sql, (len(prefixes[0]), *prefixes))])
