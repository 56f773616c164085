"""`hermes doctor`: what Hermes stands on, looked at piece by piece, with what helps where something is wrong."""

from __future__ import annotations

import asyncio
import threading
import time

from hermes.cli.command import Args, command, flag
from hermes.cli.output import mask, note, settings_of, silence_logs, tell
from hermes.core.errors import ConfigError, HermesError
from hermes.core.formatting import counted
from hermes.core.home import Home, is_served
from hermes.core.json_types import JsonObject
from hermes.services import health
from hermes.services.health import Check, Finding, State, Subject

CHECKS_S_MAX = 9.0
_MODEL_S_MAX, _SERVERS_S_MAX = 7.0, 6.0


@command(
    "doctor",
    flag("--fix", help="fix what is safe to fix: modes, stale files, search index"),
    flag("--deep", help="check the whole database, however long it takes"),
)
def _doctor(args: Args, home: Home) -> int:
    silence_logs(args)
    started_at, hidden, checks, lines = time.monotonic(), mask(home), list[JsonObject](), list[str]()
    for name, finding in _findings(args, home).items():
        message, remedy = hidden(finding.message), hidden(finding.remedy)
        checks.append({"name": name, "state": finding.state, "message": message, "remedy": remedy or None})
        lines.append(f"{finding.state:<5}{name}: {hidden(str(finding))}")
    failed = any(check["state"] == "fail" for check in checks)
    tell(args, {"ok": not failed, "seconds": round(time.monotonic() - started_at, 2), "checks": checks}, *lines)
    return 1 if failed else 0


def _findings(args: Args, home: Home) -> dict[str, Finding]:
    """All checks, made at once; one that does not come to an end in time is not waited for."""
    from hermes.settings import config

    findings: dict[str, Finding] = {}
    checks = CHECKS
    try:
        settings = settings_of(args, home, {"agent.api_max_retries": 0})
    except ConfigError as error:
        settings = config.load(home, safe_mode=True, environ={})
        checks = {name: check for name, check in CHECKS.items() if not check.needs_settings}
        message = str(HermesError(error.message, where=error.where))
        findings["configuration"] = Finding("fail", message, "hermes config edit")
    subject = Subject(home, settings, args.fix, args.deep)
    if args.deep:
        subject = subject._replace(progress=note)

    def make(name: str, check: Check) -> None:
        try:
            findings[name] = check.look(subject)
        except HermesError as error:
            findings[name] = Finding("fail", str(HermesError(error.message, where=error.where)), error.hint)
        except Exception as error:  # noqa: BLE001  (whatever is wrong with what is looked at, is the finding)
            findings[name] = Finding("fail", f"It could not be looked at: {type(error).__name__}: {error}")

    threads = {name: threading.Thread(target=make, args=(name, check), daemon=True) for name, check in checks.items()}
    until = time.monotonic() + CHECKS_S_MAX
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(None if args.deep and name == "database" else max(0.0, until - time.monotonic()))
        findings.setdefault(name, Finding("warn", f"It took longer than {CHECKS_S_MAX:g} s and was given up."))
    return {name: findings[name] for name in CHECKS if name in findings}


# ---- checks that need an agent or the server


def _model(subject: Subject) -> Finding:
    from hermes.cli.model_command import tried
    from hermes.core.spec import RouteChoice

    trial = tried(subject.home, subject.settings, RouteChoice(), _MODEL_S_MAX)
    name = f"{trial['provider']}/{trial['model']}"
    if not trial["error"]:
        return Finding("ok", f"{name} answers after {trial['seconds']:g} s.")
    state: State = "warn" if trial["seconds"] >= _MODEL_S_MAX else "fail"
    return Finding(state, f"{name} does not answer: {trial['error']}", "hermes setup model")


def _servers(subject: Subject) -> Finding:
    wanted = [name for name, server in subject.settings.mcp_servers.items() if server.enabled]
    if not wanted:
        return Finding("ok", "None is configured.")
    down = [state for state in asyncio.run(_states(subject, wanted)) if state["state"] != "up"]
    if not down:
        return Finding("ok", f"{counted(len(wanted), 'server')} up: {', '.join(wanted)}.")
    name, why = down[0]["name"], down[0]["error"] or "it has not answered yet"
    return Finding("warn", f"{len(down)} of {len(wanted)} not up. {name}: {why}", f"hermes mcp test {name}")


async def _states(subject: Subject, wanted: list[str]) -> list[JsonObject]:
    from hermes.app import App

    app = App(subject.home, subject.settings)
    try:
        tests = [asyncio.ensure_future(app.services.mcp.test(name, subject.settings)) for name in wanted]
        _, late = await asyncio.wait(tests, timeout=_SERVERS_S_MAX)
        for test in late:
            test.cancel()
        return app.services.mcp.states()
    finally:
        await app.close()


def _web(subject: Subject) -> Finding:
    from hermes.tools.web import backend_of, why_no_search

    if why := why_no_search(subject.settings):
        return Finding("warn", f"The web can be read, but not searched: {why}.", "hermes config env-path")
    return Finding("ok", f"Searches go to {backend_of(subject.settings)}.")


def _key(subject: Subject) -> Finding:
    from hermes.server.startup_checks import check_settings, key_weakness, keys_of

    check_settings(subject.settings)
    keys = keys_of(subject.settings)
    if weak := [f"{where} {fault}" for where, key in keys.items() if key and (fault := key_weakness(key))]:
        return Finding("warn", f"{'; '.join(weak)}.", "hermes gateway key --new")
    return Finding(
        "ok", f"{counted(len(keys), 'key')}." if keys else "The server has no key: it is open to this machine."
    )


def _listener(subject: Subject) -> Finding:
    from hermes.server import status
    from hermes.server.startup_checks import check_exposure, is_loopback, resolved

    host, port = subject.settings.api_server.host, subject.settings.api_server.port
    # A server may listen elsewhere than the settings say: by an option, or at any port that was free.
    running = (status.read_runtime_status(subject.home) if is_served(subject.home) else None) or {}
    host, port = running.get("host", host), running.get("port") or port
    near = is_loopback(resolved(host, port))
    check_exposure(subject.settings, host, loopback=near, allow_local_exec=False)
    state = "The server listens at" if running else "No server runs; one would listen at"
    reach = "this machine only" if near else "other machines"
    return Finding("ok", f"{state} {host or '*'}:{port}, which can be reached from {reach}.")


# That of the model asks it, instead of only looking at the settings.
CHECKS = {
    **health.CHECKS,
    "model": Check(_model),
    "MCP servers": Check(_servers),
    "web": Check(_web),
    "key": Check(_key),
    "listener": Check(_listener),
}
