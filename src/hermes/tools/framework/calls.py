"""The calls of one message: the state of each, and which must wait for which."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hermes.core.json_types import JsonObject
from hermes.core.spec import Content
from hermes.core.stream_parts import ToolCall
from hermes.tools.framework.registry import Answer, Args, Reconciled, ToolDef

Status = Literal["ok", "error", "blocked", "timeout", "interrupted", "unknown"]


@dataclass(slots=True)
class Outcome:
    call: ToolCall
    status: Status
    content: Content
    name: str
    code: str = ""
    invalid: bool = False
    steered: bool = False


@dataclass(slots=True)
class PendingCall:
    call: ToolCall
    tool: ToolDef | None = None
    args: JsonObject = field(default_factory=dict)
    decoded: Args = None  # as the tool is given them
    refusal: Answer | None = None
    same_as: PendingCall | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Outcome | None = None
    started: bool = False
    repeated: bool = False
    parent: str | None = None
    images: Sequence[str] = ()
    quotes: bool = False
    reads: bool = False
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class PriorOutcome:
    """The outcome of an interrupted call, and its output until then."""

    known: Reconciled
    output: str

    def answer(self) -> tuple[Status, Answer]:
        if self.known == "done":
            return "ok", {"status": "done", "note": "The server stopped while this call ran; it had taken effect."}
        note = "The server stopped while this call ran. It may have taken effect; check before repeating it."
        return "unknown", {"status": "interrupted", "outcome": "unknown", "note": note, "output_so_far": self.output}


def dependencies(works: Sequence[PendingCall]) -> list[list[PendingCall]]:
    """For each call the earlier ones it must wait for, transitively reduced."""
    waits: list[list[PendingCall]] = []
    keys = _Conflicts()
    for work in works:
        earlier = [work.same_as] if work.same_as is not None else []
        if work.tool is not None and not work.refusal:
            earlier += keys.take(work, *_scope_of(work.tool, work.decoded))
        waits.append(earlier)
    return waits


def _scope_of(tool: ToolDef, args: Args) -> tuple[bool, frozenset[str]]:
    """Whether a call only reads, and its scope. If the tool's functions fail it conflicts with all calls; running it
    reports why."""
    reads = False
    try:
        reads = not tool.alone and tool.effect_of(args) == "read"
        return reads, tool.scope_of(args)
    except Exception:  # noqa: BLE001
        return reads, frozenset({"*"})


class _Conflicts:
    def __init__(self) -> None:
        # The last call that conflicts with all others; what follows is of calls after it.
        self._alone: PendingCall | None = None
        self._since: list[PendingCall] = []
        self._writers: list[PendingCall] = []
        self._readers_of_all: list[PendingCall] = []
        self._last: dict[str, tuple[PendingCall | None, list[PendingCall]]] = {}

    def take(self, work: PendingCall, reads: bool, scope: frozenset[str]) -> list[PendingCall]:
        waits = [self._alone] if self._alone is not None else []
        if "*" in scope and not reads:
            waits += self._since
            self._alone, self._since, self._writers, self._readers_of_all, self._last = work, [], [], [], {}
            return waits
        waits += self._writers if "*" in scope else [] if reads else self._readers_of_all
        keys = frozenset() if "*" in scope else scope
        for near in {near for key in keys for near in self._near(key)}:
            writer, readers = self._last[near]
            waits += [writer] if writer is not None else []
            waits += [] if reads else readers
        for key in keys:
            writer, readers = self._last.get(key, (None, []))
            if reads:
                readers.append(work)
            self._last[key] = (writer, readers) if reads else (work, [])
        self._since.append(work)
        if not reads:
            self._writers.append(work)
        elif "*" in scope:
            self._readers_of_all.append(work)
        return waits

    def _near(self, key: str) -> list[str]:
        keys = [key] if key in self._last else []
        if key.startswith("file:"):
            path = key[5:]
            trees = {f"tree:{path[:at]}{end}" for at in range(len(path)) if path[at] == "/" for end in ("", "/")}
            keys += trees & self._last.keys()
        elif key.startswith("tree:"):
            root = f"file:{key[5:].rstrip('/')}/"
            keys += (other for other in self._last if other.startswith(root))
        return keys
