"""Health checks of everything Hermes depends on, with a remedy for each fault. They block.

`hermes doctor` runs all of them and adds those that ask a model or look at the server; a server's readiness uses those
of model and disk beside its own; `hermes status` uses that of the model.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from hermes import local
from hermes.core.errors import HermesError
from hermes.core.formatting import counted, size, span
from hermes.core.home import Home, is_served, tighten
from hermes.core.json_types import JsonMapping
from hermes.core.spec import RouteChoice
from hermes.runs.schedule import BadTimeZone, zone_named
from hermes.services import models, runs, sessions
from hermes.services.settings import doubtful_values
from hermes.store.stores import place_of

if TYPE_CHECKING:
    from hermes.settings.config import Settings

State = Literal["ok", "warn", "fail"]
DISK_FREE_BYTES_MIN = 64 * 1024**2
_PARTS_S_MAX = 2.0
_STALE_S, _CLOCK_S_MAX = 3_600.0, 300.0
_DISK_BYTES_FEW, _WAL_BYTES_MANY = 1024**3, 1024**3
_NEEDED = (
    *("aiohttp", "httptools", "msgspec", "jsonschema_rs", "cryptography", "idna", "yaml", "ruamel.yaml", "croniter"),
    "dateutil",
)
_EXTRAS = {"mcp": "mcp", "web": "lxml", "images": "PIL"}
_LITTER = (".*.tmp", "*/.*.tmp", "profiles/.gone-*", "profiles/.new-*", "skills/.gone-*", "skills/.new-*", "*/.new-*")


class Subject(NamedTuple):
    """What a check may use, and whether it may fix faults and may be slow."""

    home: Home
    settings: Settings
    fix: bool = False
    deep: bool = False
    progress: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result in a sentence, with a remedy; `facts` are for programs."""

    state: State
    message: str
    remedy: str = ""
    facts: JsonMapping = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.message} Try: {self.remedy}" if self.remedy else self.message


class Check(NamedTuple):
    look: Callable[[Subject], Finding]
    needs_settings: bool = True


# --- installation and settings ---------------------------------------------------------------------------------------


def _python(subject: Subject) -> Finding:
    version = f"Python {sys.version.split()[0]}"
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        return Finding("fail", f"{version}; these packages are missing: {', '.join(missing)}.", "hermes update")
    without = [extra for extra, module in _EXTRAS.items() if find_spec(module) is None]
    without += [] if local.runtime_version() else ["local"]
    more = f"; not installed: {', '.join(without)}" if without else ""
    return Finding("ok", f"{version}, all packages are there{more}.")


def _home(subject: Subject) -> Finding:
    path, changes = subject.home.path, list[str]()
    if not path.exists():
        return Finding("ok", f"{path} does not exist yet; it is made when something is to be kept.")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return Finding("fail", f"{path} cannot be written to.", f"chown -R {os.getuid()} {path}")
    if subject.fix:
        changes += [f"{change.path} is private now" for change in tighten(subject.home) if change.now != change.was]
        changes += [f"{litter} was removed" for litter in _litter(subject.home) if _removed(litter)]
    bare = [one for one in (path, *path.iterdir()) if not one.is_symlink() and one.stat().st_mode & 0o077]
    if bare:
        return Finding("warn", f"Others can get at {', '.join(one.name for one in bare)}.", "hermes doctor --fix")
    if litter := _litter(subject.home):
        return Finding("warn", f"{counted(len(litter), 'stale file')}: {litter[0]}.", "hermes doctor --fix")
    return Finding("ok", "; ".join([f"{path} (profile {subject.home.profile}) is private", *changes]) + ".")


def _litter(home: Home) -> list[Path]:
    """Temporary files of processes that were killed."""
    old = time.time() - _STALE_S
    stale = [path for pattern in _LITTER for path in sorted(home.path.glob(pattern)) if path.lstat().st_mtime < old]
    return [*stale, *([home.pid_file] if home.pid_file.exists() and not is_served(home) else [])]


def _removed(path: Path) -> bool:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return True
    return False


def _configuration(subject: Subject) -> Finding:
    problems = [*subject.settings.problems, *doubtful_values(subject.settings)]
    if not problems:
        return Finding("ok", "The settings are in order.")
    state: State = "fail" if subject.settings.errors else "warn"
    return Finding(state, f"{counted(len(problems), 'problem')}: {problems[0]}", "hermes config check")


# --- models and commands ---------------------------------------------------------------------------------------------


def _model(subject: Subject) -> Finding:
    """Whether a model is configured, as far as can be known without asking it."""
    route, problem = models.configured_route(subject.settings)
    if problem == models.NOT_CONFIGURED:
        return Finding("fail", problem, f"hermes config set model.provider {models.EXAMPLE_PROVIDER}")
    facts = {"provider": route.provider, "model": route.model}
    return Finding("fail" if problem else "ok", problem or f"{route.provider}/{route.model}", facts=facts)


def _local(subject: Subject) -> Finding:
    status = local.status(subject.home, subject.settings)
    if status["problem"] is None:
        return Finding("ok", f"The runtime {status['runtime']} has {status['file']}.")
    if models.primary(subject.settings, RouteChoice()).api_mode != "local":
        return Finding("ok", f"It is not used. {status['problem']}")
    return Finding("fail", status["problem"], "hermes setup model")


def _sandbox(subject: Subject) -> Finding:
    from hermes.core.limits import SANDBOX_OPEN_FILES_MAX, SANDBOX_PROCESSES_MAX
    from hermes.sandbox.choose import choose_backend
    from hermes.sandbox.local import INSTALL
    from hermes.sandbox.proxy import network_of

    terminal, chosen = subject.settings.terminal, choose_backend(subject.settings)
    limits = f"{terminal.timeout:g} s (at most {terminal.max_timeout:g})"
    if chosen.reason is not None:
        return Finding("warn", f"No command can be run: {chosen.failure}", INSTALL)
    if not chosen.isolated:
        remedy = "install bubblewrap" if chosen.failure else "hermes config set terminal.backend auto"
        message = f"Commands run without a sandbox and can read and write all that you can, {limits}. {chosen.failure}"
        return Finding("warn", message.strip(), remedy)
    limits += f", {terminal.container_memory} MB, {SANDBOX_PROCESSES_MAX} processes, {SANDBOX_OPEN_FILES_MAX} files"
    return Finding("ok", f"Commands run in {chosen.name}, {network_of(subject.settings, chosen.name)}: {limits}.")


# --- the store -------------------------------------------------------------------------------------------------------


def _database(subject: Subject) -> Finding:
    file = sessions.database_file(subject.home)
    if file is not None and not file.exists():
        return Finding("ok", f"{file} does not exist yet.")
    with sessions.open_database(subject.home, write=subject.fix or subject.deep) as db:
        faults = db.check(deep=subject.deep, progress=subject.progress)
        sizes, notices = db.sizes(_PARTS_S_MAX), list(db.notices)
        total = db.total_bytes()
    if file is None:
        return Finding("ok", f"{place_of(sessions.database_url(subject.home))} answers; {size(total)}.")
    wal = file.with_name(f"{file.name}-wal")
    count = wal.stat().st_size if wal.exists() else 0
    parts = ", ".join(f"{name} {size(part)}" for name, part in sizes.items() if part) or "its parts were not measured"
    sizes_text = f"{size(total)} ({parts}), WAL {size(count)}"
    if faults:
        return Finding("fail", f"{counted(len(faults), 'fault')} in {file}: {faults[0]}", "hermes sessions repair")
    if count > _WAL_BYTES_MANY:
        return Finding("warn", f"The WAL is large: {sizes_text}.", "hermes gateway restart")
    return Finding("ok", " ".join([f"No fault was found; {sizes_text}.", *notices]))


def _left_over(subject: Subject) -> Finding:
    with sessions.open_database(subject.home) as db:
        unfinished, abandoned = runs.unfinished_runs(db)
    if abandoned and not is_served(subject.home):
        message = f"{counted(len(abandoned), 'run')} without an end, that nobody carries on: {abandoned[0]}."
        return Finding("warn", message, "hermes gateway run, which takes them up or closes them")
    return Finding("ok", f"{counted(len(unfinished), 'run')} at work or waiting, none left behind.")


def _disk(subject: Subject) -> Finding:
    folder = next(path for path in (subject.home.path, *subject.home.path.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    state: State = "fail" if free < DISK_FREE_BYTES_MIN else "warn" if free < _DISK_BYTES_FEW else "ok"
    remedy = "" if state == "ok" else "hermes sessions prune"
    return Finding(state, f"{size(free)} free at {folder}.", remedy, {"free_bytes": free})


def _clock(subject: Subject) -> Finding:
    with sessions.open_database(subject.home) as db:
        last = sessions.last_active(db)
    ahead = max(last, Path(__file__).stat().st_mtime) - time.time()
    if ahead > _CLOCK_S_MAX:
        return Finding("warn", f"The clock is {span(ahead)} behind what is on record.", "timedatectl")
    try:
        zone_named(subject.settings.timezone)
    except BadTimeZone:
        return Finding("warn", "The time zone of the settings is not known.", "hermes config unset timezone")
    return Finding("ok", time.strftime("%Y-%m-%d %H:%M:%S %Z."))


def _bus(subject: Subject) -> Finding:
    from hermes.bus.nats_connection import NatsConnection, is_nats, namespace_of

    async def connect(connection: NatsConnection) -> None:
        await connection.connect()
        await connection.close()

    bus = subject.settings.bus
    try:
        if not is_nats(bus.url):
            return Finding("ok", "Events stay within the process.")
        connection = NatsConnection(bus.url, namespace_of(bus.namespace, subject.home.profile))
        asyncio.run(connect(connection))
    except HermesError as error:
        return Finding("fail", error.message, error.hint)
    return Finding("ok", f"NATS at {connection.shown_url} answers.")


CHECKS = {
    "python": Check(_python, needs_settings=False),
    "home": Check(_home, needs_settings=False),
    "configuration": Check(_configuration),
    "model": Check(_model),
    "local runtime": Check(_local),
    "sandbox": Check(_sandbox),
    "database": Check(_database, needs_settings=False),
    "runs left over": Check(_left_over, needs_settings=False),
    "disk": Check(_disk, needs_settings=False),
    "clock": Check(_clock, needs_settings=False),
    "bus": Check(_bus),
}
