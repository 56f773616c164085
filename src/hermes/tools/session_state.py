"""What a session has on its desk between turns, in this process: its shell, files it has seen, leave it was given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.core.limits import DESKS_MAX
from hermes.tools.egress import HostGrants

if TYPE_CHECKING:
    from hermes.sandbox.shell import Shell


_LEAVE = ("granted", "folders", "reserved", "hosts", "yolo")


@dataclass(slots=True)
class SessionState:
    """One session's. `seen` has the digest of each file as it was last read or written, by its real path; `told` is what
    it knows of its MCP servers."""

    shell: Shell | None = None
    seen: dict[str, str] = field(default_factory=dict)
    granted: set[str] = field(default_factory=set)
    folders: list[Path] = field(default_factory=list)
    reserved: list[Path] = field(default_factory=list)
    hosts: HostGrants = field(default_factory=HostGrants)
    yolo: bool = False
    told: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class SessionStates:
    """The desks of a process, each of one owner's session; those that nobody has used for long are cleared first."""

    def __init__(self) -> None:
        self._desks: OrderedDict[tuple[str, str], SessionState] = OrderedDict()

    def notices(self, owner: str, session_id: str) -> list[str]:
        """What is to be told in a session; one without a desk has nothing."""
        desk = self._desks.get((owner, session_id))
        return [] if desk is None else desk.notices

    def of(self, owner: str, session_id: str, parent_id: str | None = None) -> SessionState:
        """The desk of a session. A child's has the leave that was given to its parent, and shares what is given later."""
        key = (owner, session_id)
        desk = self._desks.get(key)
        if desk is None:
            above = self._desks.get((owner, parent_id)) if parent_id is not None else None
            given = {name: getattr(above, name) for name in _LEAVE} if above is not None else {}
            desk = self._desks[key] = SessionState(**given)
        self._desks.move_to_end(key)
        while len(self._desks) > DESKS_MAX:
            self._desks.popitem(last=False)
        return desk

    def drop(self, session_ids: Collection[str]) -> None:
        """Forget the desks of sessions that are gone, whoever they belonged to."""
        for key in [key for key in self._desks if key[1] in session_ids]:
            del self._desks[key]
