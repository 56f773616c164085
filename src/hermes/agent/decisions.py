"""What to do about a failure: `decide`, with a table of actions for each kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from hermes.core.failures import Kind, lost
from hermes.core.limits import RETRY_AFTER_S_MAX, RETRY_WAIT_S_MAX, SHORT_RETRY_AFTER_S

Action = Literal[
    "reconnect",
    "retry",
    "fallback",
    "give_up",
    "continue",
    "keep_partial",
    "unstream",
    "drop_option",
    "rotate",
    "compact",
    "shrink_images",
    "describe_images",
    "drop_opaque",
    "raise_output",
    "nudge",
    "repair",
    "halve_context",
    "excerpt",
    "accept",
]
# These end the step at once.
ENDS: frozenset[Action] = frozenset({"keep_partial", "give_up", "excerpt", "accept"})


class CallState(msgspec.Struct, frozen=True):
    """What this step has tried and what is left to try."""

    tried: Mapping[Action, int] = msgspec.field(default_factory=dict)
    reconnects_max: int = 2
    retries_max: int = 3
    possible: frozenset[Action] = frozenset()
    larger_window: bool = False
    retry_after_s: float | None = None
    time_left_s: float | None = None
    delivered: int = 0
    drafting: tuple[str, ...] = ()
    own_limit: bool = False
    worker_died: bool = False
    interrupted: bool = False
    jitter: float = 0.0


class Decision(msgspec.Struct, frozen=True):
    """The next action, the delay before it, and why an earlier one was skipped."""

    action: Action
    wait_seconds: float = 0.0
    note: str = ""


Limit = int | Literal["R", "N"] | None
When = Literal["", "long_wait", "larger_window", "died", "not_own_limit", "delivered", "nothing_delivered"]
Row = tuple[tuple[Action, Limit, When], ...]


def _row(*steps: str) -> Row:
    """Parses `"retry*N"`, `"fallback"`, `"continue*3?not_own_limit"`."""
    out: list[tuple[Action, Limit, When]] = []
    for step in steps:
        name, _, when = step.partition("?")
        name, _, limit = name.partition("*")
        count: Limit = None if not limit else limit if limit in ("R", "N") else int(limit)  # type: ignore[assignment]
        out.append((name, count, when))  # type: ignore[arg-type]
    return tuple(out)


TABLE: dict[Kind, Row] = {
    "interrupted": _row("keep_partial"),
    "connect": _row("reconnect*R", "retry*N", "fallback", "give_up"),
    "stream_lost": _row("reconnect*R", "retry*N", "fallback", "give_up"),
    "stream_lost_text": _row("continue*3", "fallback", "keep_partial", "give_up"),
    "stream_lost_tool": _row(
        "reconnect*R?nothing_delivered", "continue*R?delivered", "fallback", "keep_partial", "give_up"
    ),
    "stream_unsupported": _row("unstream*1", "give_up"),
    "option_rejected": _row("drop_option*4", "give_up"),
    "timeout": _row("retry*1", "fallback", "give_up"),
    "overloaded": _row("retry*1", "fallback", "retry*N", "give_up"),
    "server_error": _row("retry*N", "fallback", "give_up"),
    "rate_limit": _row("rotate", "fallback?long_wait", "retry*N", "give_up"),
    "billing": _row("rotate", "fallback", "give_up"),
    "auth": _row("rotate", "fallback", "give_up"),
    "forbidden": _row("fallback", "give_up"),
    "model_not_found": _row("fallback", "give_up"),
    "context_overflow": _row("compact*3", "fallback?larger_window", "give_up"),
    "payload_too_large": _row("shrink_images*1", "compact*3", "describe_images*1", "give_up"),
    "image_rejected": _row("shrink_images*1", "describe_images*1", "give_up"),
    "opaque_rejected": _row("drop_opaque*1", "give_up"),
    "policy_blocked": _row("fallback", "give_up"),
    "filtered": _row("keep_partial", "give_up"),
    "bad_request": _row("give_up"),
    "tls": _row("give_up"),
    "truncated_text": _row("continue*3?not_own_limit", "keep_partial", "excerpt", "give_up"),
    "answer_too_long": _row("keep_partial", "excerpt", "give_up"),
    "truncated_tool": _row("raise_output*2", "nudge*1", "keep_partial", "give_up"),
    "bad_structure": _row("repair*1", "give_up"),
    "empty": _row("nudge*1", "retry*2", "fallback", "excerpt", "give_up"),
    "missing_call": _row("nudge*1", "accept"),
    "local_unavailable": _row("reconnect*1?died", "fallback", "give_up"),
    "local_memory": _row("halve_context*1", "fallback", "give_up"),
    "deadline": _row("keep_partial", "give_up"),
    "unknown": _row("retry*1", "fallback", "give_up"),
}

# These need something that only the caller knows: another key, another route, an image, room to grow.
_CONDITIONAL: frozenset[Action] = frozenset(
    {
        "rotate",
        "fallback",
        "unstream",
        "drop_option",
        "compact",
        "shrink_images",
        "describe_images",
        "drop_opaque",
        "raise_output",
        "halve_context",
        "excerpt",
    }
)


def decide(kind: Kind, state: CallState) -> Decision:
    """The first action of the kind's row that is not used up, is possible, and fits into the time left."""
    if state.interrupted:
        kind = "interrupted"
    row_kind = lost(state.delivered, state.drafting) if kind == "stale" else kind
    passed: list[str] = []
    for action, limit, when in TABLE.get(row_kind, TABLE["bad_request"]):
        if obstacle := _obstacle(action, limit, when, row_kind, state):
            passed.append(f"{action}: {obstacle}")
            continue
        wait = _wait(action, state)
        if wait is None or (wait and state.time_left_s is not None and wait >= state.time_left_s):
            passed.append(f"{action}: no time")
            continue
        return Decision(action, wait, "; ".join(passed))
    return Decision("give_up", 0.0, "; ".join(passed))


def _obstacle(action: Action, limit: Limit, when: When, kind: Kind, state: CallState) -> str:
    count = state.reconnects_max if limit == "R" else state.retries_max if limit == "N" else limit
    if count is not None and state.tried.get(action, 0) >= count:
        return "used up"
    if action in _CONDITIONAL and action not in state.possible:
        return "not possible"
    if action == "keep_partial" and kind != "interrupted" and not state.delivered and not state.own_limit:
        return "no text"
    if action not in ENDS and state.time_left_s is not None and state.time_left_s <= 0:
        return "no time"
    holds: dict[When, bool] = {
        "": True,
        "long_wait": state.retry_after_s is None or state.retry_after_s > SHORT_RETRY_AFTER_S,
        "larger_window": state.larger_window,
        "died": state.worker_died,
        "not_own_limit": not state.own_limit,
        "delivered": state.delivered > 0,
        "nothing_delivered": state.delivered == 0,
    }
    return "" if holds[when] else "does not apply"


def _wait(action: Action, state: CallState) -> float | None:
    """Seconds before the action; None if the provider demands more than is left."""
    if action in ("reconnect", "continue"):
        return 0.05 + 0.25 * state.jitter
    if action != "retry":
        return 0.0
    if state.retry_after_s is not None:
        return state.retry_after_s if state.retry_after_s <= RETRY_AFTER_S_MAX else None
    base = min(RETRY_WAIT_S_MAX, 2.0 ** (state.tried.get("retry", 0) + 1))
    return base * (1 + 0.5 * state.jitter)
