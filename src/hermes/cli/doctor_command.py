"""`hermes doctor`: what Hermes stands on, looked at piece by piece, with what helps where something is wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hermes.cli.command import Args, command, flag
from hermes.cli.output import mask, note, settings_of, silence_logs, tell
from hermes.cli.session_maintenance import database_file, opened
from hermes.core.errors import ConfigError, HermesError
from hermes.core.formatting import counted, size, span
from hermes.core.home import Home, is_served, tighten
from hermes.core.json_types import JsonObject
from hermes.services import runs, sessions

if TYPE_CHECKING:
    from hermes.settings.config import Settings

OK, WARN, FAIL = "ok", "warn", "fail"
CHECKS_S_MAX = 9.0
_MODEL_S_MAX, _SERVERS_S_MAX, _PARTS_S_MAX = 7.0, 6.0, 2.0
_STALE_S, _CLOCK_S_MAX = 3_600.0, 300.0
_DISK_BYTES_FEW, _DISK_BYTES_MIN, _WAL_BYTES_MANY = 1024**3, 64 * 1024**2, 1024**3
_NEEDED = (
    "aiohttp",
    "httptools",
    "msgspec",
    "jsonschema_rs",
    "cryptography",
    "idna",
    "yaml",
    "ruamel.yaml",
    "croniter",
    "dateutil",
)
_EXTRAS = {"mcp": "mcp", "web": "lxml", "images": "PIL"}
_LITTER = (".*.tmp", "*/.*.tmp", "profiles/.gone-*", "profiles/.new-*", "skills/.gone-*", "skills/.new-*", "*/.new-*")


class Look(NamedTuple):
    """What a check may look at, and whether it may put things right."""

    home: Home
    settings: Settings
    fix: bool
    deep: bool


class Finding(NamedTuple):
    """How something stands, in a sentence, and what helps."""

    state: str
    message: str
    remedy: str = ""


@command(
    "doctor",
    flag("--fix", help="put right what is safe to put right: modes, stale files, search index"),
    flag("--deep", help="check all of the database, however long it takes"),
)
def _doctor(args: Args, home: Home) -> int:
    silence_logs(args)
    began, hidden, checks, lines = time.monotonic(), mask(home), list[JsonObject](), list[str]()
    for name, found in _found(args, home).items():
        state, message, remedy = map(hidden, found)
        checks.append({"name": name, "state": state, "message": message, "remedy": remedy or None})
        lines.append(f"{state:<5}{name}: {message}{f' Try: {remedy}' if remedy else ''}")
    failed = any(check["state"] == FAIL for check in checks)
    tell(args, {"ok": not failed, "seconds": round(time.monotonic() - began, 2), "checks": checks}, *lines)
    return 1 if failed else 0


def _found(args: Args, home: Home) -> dict[str, Finding]:
    """All checks, made at once; one that does not come to an end in time is not waited for."""
    from hermes.settings import config

    found: dict[str, Finding] = {}
    try:
        look = Look(home, settings_of(args, home, {"agent.api_max_retries": 0}), args.fix, args.deep)
        wanted = {name: check for name, (check, _) in CHECKS.items()}
    except ConfigError as error:
        look = Look(home, config.load(home, safe_mode=True, environ={}), args.fix, args.deep)
        wanted = {name: check for name, (check, plain) in CHECKS.items() if plain}
        found["configuration"] = Finding(FAIL, str(HermesError(error.message, where=error.where)), "hermes config edit")

    def make(name: str, check: Callable[[Look], Finding]) -> None:
        try:
            found[name] = check(look)
        except HermesError as error:
            found[name] = Finding(FAIL, str(HermesError(error.message, where=error.where)), error.hint)
        except Exception as error:  # noqa: BLE001  (whatever is wrong with what is looked at, is what is told)
            found[name] = Finding(FAIL, f"It could not be looked at: {type(error).__name__}: {error}")

    threads = {name: threading.Thread(target=make, args=(name, check), daemon=True) for name, check in wanted.items()}
    until = time.monotonic() + CHECKS_S_MAX
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(None if args.deep and name == "database" else max(0.0, until - time.monotonic()))
        found.setdefault(name, Finding(WARN, f"It took longer than {CHECKS_S_MAX:g} s and was given up."))
    return {name: found[name] for name in CHECKS if name in found}


# ---- what is installed


def _python(look: Look) -> Finding:
    from hermes.local import runtime_version

    version = f"Python {sys.version.split()[0]}"
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        return Finding(FAIL, f"{version}; these packages are missing: {', '.join(missing)}.", "pip install hermes")
    without = [extra for extra, module in _EXTRAS.items() if find_spec(module) is None]
    without += [] if runtime_version() else ["local"]
    more = f"; not installed: {', '.join(without)}" if without else ""
    return Finding(OK, f"{version}, all packages are there{more}.")


def _home(look: Look) -> Finding:
    path, said = look.home.path, list[str]()
    if not path.exists():
        return Finding(OK, f"{path} does not exist yet; it is made when something is to be kept.")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return Finding(FAIL, f"{path} cannot be written to.", f"chown -R {os.getuid()} {path}")
    if look.fix:
        said += [f"{change.path} is private now" for change in tighten(look.home) if change.now != change.was]
        said += [f"{litter} is gone" for litter in _litter(look.home) if _removed(litter)]
    bare = [one for one in (path, *path.iterdir()) if not one.is_symlink() and one.stat().st_mode & 0o077]
    if bare:
        return Finding(WARN, f"Others can get at {', '.join(one.name for one in bare)}.", "hermes doctor --fix")
    if litter := _litter(look.home):
        return Finding(WARN, f"{counted(len(litter), 'stale file')}: {litter[0]}.", "hermes doctor --fix")
    return Finding(OK, "; ".join([f"{path} (profile {look.home.profile}) is private", *said]) + ".")


def _litter(home: Home) -> list[Path]:
    """What was left behind by processes that were cut short."""
    old = time.time() - _STALE_S
    found = [path for pattern in _LITTER for path in sorted(home.path.glob(pattern)) if path.lstat().st_mtime < old]
    return [*found, *([home.pid_file] if home.pid_file.exists() and not is_served(home) else [])]


def _removed(path: Path) -> bool:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return True
    return False


def _configuration(look: Look) -> Finding:
    problems = look.settings.problems
    if not problems:
        return Finding(OK, "The settings are in order.")
    state = FAIL if look.settings.errors else WARN
    return Finding(state, f"{counted(len(problems), 'problem')}: {problems[0]}", "hermes config check")


# ---- models and commands


def _model(look: Look) -> Finding:
    from hermes.cli.model_command import tried
    from hermes.core.spec import RouteChoice

    found = tried(look.home, look.settings, RouteChoice(), _MODEL_S_MAX)
    name = f"{found['provider']}/{found['model']}"
    if not found["error"]:
        return Finding(OK, f"{name} answers after {found['seconds']:g} s.")
    state = WARN if found["seconds"] >= _MODEL_S_MAX else FAIL
    return Finding(state, f"{name} does not answer: {found['error']}", "hermes setup model")


def _local(look: Look) -> Finding:
    from hermes import local
    from hermes.core.spec import RouteChoice
    from hermes.services import models

    found = local.status(look.home, look.settings)
    if found["problem"] is None:
        return Finding(OK, f"The runtime {found['runtime']} has {found['file']}.")
    if models.primary(look.settings, RouteChoice()).api_mode != "local":
        return Finding(OK, f"It is not used. {found['problem']}")
    return Finding(FAIL, found["problem"], "hermes setup model")


def _sandbox(look: Look) -> Finding:
    from hermes.core.limits import SANDBOX_OPEN_FILES_MAX, SANDBOX_PROCESSES_MAX
    from hermes.sandbox.choose import choose_backend
    from hermes.sandbox.local import INSTALL
    from hermes.sandbox.proxy import network_of

    terminal, chosen = look.settings.terminal, choose_backend(look.settings)
    limits = f"{terminal.timeout:g} s (at most {terminal.max_timeout:g})"
    if chosen.reason is not None:
        return Finding(WARN, f"No command can be run: {chosen.failure}", INSTALL)
    if not chosen.isolated:
        remedy = "install bubblewrap" if chosen.failure else "hermes config set terminal.backend auto"
        message = f"Commands run without a sandbox and can read and write all that you can, {limits}. {chosen.failure}"
        return Finding(WARN, message.strip(), remedy)
    limits += f", {terminal.container_memory} MB, {SANDBOX_PROCESSES_MAX} processes, {SANDBOX_OPEN_FILES_MAX} files"
    return Finding(OK, f"Commands run in {chosen.name}, {network_of(look.settings, chosen.name)}: {limits}.")


# ---- the store


def _database(look: Look) -> Finding:
    file = database_file(look.home)
    if not file.exists():
        return Finding(OK, f"{file} does not exist yet.")
    with opened(look.home, "change" if look.fix or look.deep else "look") as db:
        faults = db.check(deep=look.deep, progress=note if look.deep else lambda _: None)
        sizes, mended = sessions.part_sizes(db, _PARTS_S_MAX), list(db.notices)
    wal = file.with_name(f"{file.name}-wal")
    count = wal.stat().st_size if wal.exists() else 0
    parts = ", ".join(f"{name} {size(part)}" for name, part in sizes.items() if part) or "its parts were not measured"
    told = f"{size(file.stat().st_size)} ({parts}), WAL {size(count)}"
    if faults:
        return Finding(FAIL, f"{counted(len(faults), 'fault')} in {file}: {faults[0]}", "hermes sessions repair")
    if count > _WAL_BYTES_MANY:
        return Finding(WARN, f"The WAL is large: {told}.", "hermes gateway restart")
    return Finding(OK, " ".join([f"No fault was found; {told}.", *mended]))


def _left_over(look: Look) -> Finding:
    with opened(look.home) as db:
        unfinished, left = runs.unfinished_runs(db)
    if left and not is_served(look.home):
        message = f"{counted(len(left), 'run')} without an end, that nobody carries on: {left[0]}."
        return Finding(WARN, message, "hermes gateway run, which takes them up or closes them")
    return Finding(OK, f"{counted(len(unfinished), 'run')} at work or waiting, none left behind.")


def _disk(look: Look) -> Finding:
    place = next(path for path in (look.home.path, *look.home.path.parents) if path.exists())
    free = shutil.disk_usage(place).free
    state = FAIL if free < _DISK_BYTES_MIN else WARN if free < _DISK_BYTES_FEW else OK
    return Finding(state, f"{size(free)} free at {place}.", "" if state == OK else "hermes sessions prune")


def _clock(look: Look) -> Finding:
    from hermes.runs.schedule import BadSchedule, zone_named

    with opened(look.home) as db:
        last = sessions.last_active(db)
    ahead = max(last, Path(__file__).stat().st_mtime) - time.time()
    if ahead > _CLOCK_S_MAX:
        return Finding(WARN, f"The clock is {span(ahead)} behind what is on record.", "timedatectl")
    try:
        zone_named(look.settings.timezone)
    except BadSchedule:
        return Finding(WARN, "The time zone of the settings is not known.", "hermes config unset timezone")
    return Finding(OK, time.strftime("%Y-%m-%d %H:%M:%S %Z."))


# ---- what is reached, and who reaches it


def _servers(look: Look) -> Finding:
    wanted = [name for name, server in look.settings.mcp_servers.items() if server.enabled]
    if not wanted:
        return Finding(OK, "None is configured.")
    down = [state for state in asyncio.run(_states(look, wanted)) if state["state"] != "up"]
    if not down:
        return Finding(OK, f"{counted(len(wanted), 'server')} up: {', '.join(wanted)}.")
    name, why = down[0]["name"], down[0]["error"] or "it has not answered yet"
    return Finding(WARN, f"{len(down)} of {len(wanted)} not up. {name}: {why}", f"hermes mcp test {name}")


async def _states(look: Look, wanted: list[str]) -> list[JsonObject]:
    from hermes.app import App

    app = App(look.home, look.settings)
    try:
        tests = [asyncio.ensure_future(app.services.mcp.test(name, look.settings)) for name in wanted]
        _, late = await asyncio.wait(tests, timeout=_SERVERS_S_MAX)
        for test in late:
            test.cancel()
        return app.services.mcp.states()
    finally:
        await app.close()


def _web(look: Look) -> Finding:
    from hermes.tools.web import backend_of, why_no_search

    if why := why_no_search(look.settings):
        return Finding(WARN, f"The web can be read, but not searched: {why}.", "hermes config env-path")
    return Finding(OK, f"Searches go to {backend_of(look.settings)}.")


def _key(look: Look) -> Finding:
    from hermes.server.startup_checks import check_settings, key_weakness, keys_of

    check_settings(look.settings)
    keys = keys_of(look.settings)
    if weak := [f"{where} {fault}" for where, key in keys.items() if key and (fault := key_weakness(key))]:
        return Finding(WARN, f"{'; '.join(weak)}.", "hermes gateway key --new")
    return Finding(
        OK, f"{counted(len(keys), 'key')}." if keys else "The server has no key: it is open to this machine."
    )


def _listener(look: Look) -> Finding:
    from hermes.server.startup_checks import check_exposure, is_loopback, resolved

    host, port = look.settings.api_server.host, look.settings.api_server.port
    near = is_loopback(resolved(host, port))
    check_exposure(look.settings, host, loopback=near, allow_local_exec=False)
    return Finding(OK, f"{host or '*'}:{port} can be reached from {'this machine only' if near else 'other machines'}.")


def _bus(look: Look) -> Finding:
    kind = look.settings.bus.url.partition(":")[0]
    if kind == "memory":
        return Finding(OK, "Events stay within the process.")
    return Finding(WARN, f"There is no bus of the kind {kind!r} here.", "hermes config unset bus.url")


# name: (the check, whether it makes sense without settings)
CHECKS: dict[str, tuple[Callable[[Look], Finding], bool]] = {
    "python": (_python, True),
    "home": (_home, True),
    "configuration": (_configuration, False),
    "model": (_model, False),
    "local runtime": (_local, False),
    "sandbox": (_sandbox, False),
    "database": (_database, True),
    "runs left over": (_left_over, True),
    "disk": (_disk, True),
    "clock": (_clock, True),
    "MCP servers": (_servers, False),
    "web": (_web, False),
    "key": (_key, False),
    "listener": (_listener, False),
    "bus": (_bus, False),
}
