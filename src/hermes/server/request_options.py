"""Request headers that apply to every route: session, narrowing, what is shown, and disconnecting."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from aiohttp import web

from hermes.core.limits import SESSION_KEY_CHARS_MAX, USER_ID_CHARS_MAX
from hermes.runs.engine import Admission
from hermes.sandbox.base import SandboxError
from hermes.sandbox.choose import workspace_of
from hermes.server.errors import ApiError, invalid
from hermes.server.headers import OPTION_HEADERS
from hermes.server.idempotency import RECORDING, Recording
from hermes.server.keys import caller_of
from hermes.server.request_bodies import flag_of
from hermes.store.codec import checked_id
from hermes.tools.framework.toolsets import DEFAULTS
from hermes.tools.mcp import PREFIX as SERVER_PREFIX

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

# Open WebUI sends it with ENABLE_FORWARD_USER_INFO_HEADERS.
USER_HEADER = "X-OpenWebUI-User-Id"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# A client with its own tools gets these only on request: its model would confuse the server's files with the client's.
ON_REQUEST = frozenset({"terminal", "file", "code_execution"})
# Sent by generated SDKs, and by Open WebUI, whose User-Agent is that of any program.
_STRICT_CLIENT_HEADERS = ("X-Stainless-Lang", USER_HEADER)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    session_id: str | None = None
    session_key: str | None = None
    seed: bool = False
    detach: bool = False
    approvals: str | None = None
    tool_progress: str = "event"
    tool_items: str = "function"
    reasoning: bool = False
    toolsets: frozenset[str] | None = None
    disabled_toolsets: frozenset[str] = frozenset()
    deadline_s: float | None = None
    strict: bool = False
    recording: Recording | None = None

    @property
    def resumed(self) -> Admission | None:
        """The admission of the run that a previous process started for this request, or None."""
        return self.recording.resumed_admission if self.recording is not None else None


def parse_options(
    context: ServerContext, request: web.Request, *, client_tools: bool = False, user: str | None = None
) -> RequestOptions:
    header, recording, own = request.headers.get, request.get(RECORDING), context.options
    agent = header("User-Agent", "")
    strict = any(map(request.headers.__contains__, _STRICT_CLIENT_HEADERS)) or _is_strict_agent(
        agent, tuple(own.strict_clients or ())
    )
    usual = not (client_tools or recording is not None or own.memory_scope == "user")
    usual = usual and not any(map(request.headers.__contains__, OPTION_HEADERS))
    if usual and strict in context.usual_options:  # most requests ask for nothing special
        return context.usual_options[strict]
    session_key = context.session_key(request, user)
    progress = _one_of(request, "X-Hermes-Tool-Progress", ("event", "chunk", "off")) or own.tool_progress
    shown = _one_of(request, "X-Hermes-Tool-Items", ("function", "mcp", "none")) or own.tool_items
    session_id, toolsets = header("X-Hermes-Session-Id"), _toolsets(header("X-Hermes-Toolsets"))
    detach = flag_of(header("X-Hermes-Detach"), "X-Hermes-Detach", False) or recording is not None
    only_server_tools = not client_tools or toolsets is not None
    options = RequestOptions(
        session_id=session_id_of(session_id, "X-Hermes-Session-Id") if session_id else None,
        session_key=session_key,
        seed=flag_of(header("X-Hermes-Seed-History"), "X-Hermes-Seed-History", False),
        detach=detach or own.on_disconnect == "detach",
        approvals=_one_of(request, "X-Hermes-Approvals", ("wait", "deny")),
        tool_progress=progress if progress != "auto" else "off" if strict else "event",
        tool_items=shown if shown != "auto" else "mcp" if strict or client_tools else "function",
        reasoning=flag_of(header("X-Hermes-Reasoning"), "X-Hermes-Reasoning", own.show_reasoning),
        toolsets=toolsets,
        disabled_toolsets=frozenset() if only_server_tools else ON_REQUEST - (caller_of(request).toolsets or set()),
        deadline_s=_deadline(header("X-Hermes-Timeout"), own.turn_timeout_seconds),
        strict=strict,
        recording=recording,
    )
    if usual:
        context.usual_options[strict] = options
    return options


def session_id_of(given: str, where: str) -> str:
    """Refuse an id that could name something else."""
    try:
        return checked_id(given)
    except ValueError as error:
        raise invalid(where, str(error), "invalid_session_id") from None


def check_session_key(value: str) -> None:
    if len(value) > SESSION_KEY_CHARS_MAX:
        message = f"X-Hermes-Session-Key is longer than {SESSION_KEY_CHARS_MAX} characters."
        raise invalid("X-Hermes-Session-Key", message, "invalid_session_key")
    if _CONTROL.search(value):
        message = "X-Hermes-Session-Key holds control characters."
        raise invalid("X-Hermes-Session-Key", message, "invalid_session_key")


def user_scope(request: web.Request, user: str | None) -> str | None:
    """The memory scope of the user that a front end names by header or field."""
    forwarded = request.headers.get(USER_HEADER, "").strip()
    where, given = (USER_HEADER, forwarded) if forwarded else ("user", (user or "").strip())
    if len(given) > USER_ID_CHARS_MAX or _CONTROL.search(given):
        raise invalid(where, f"{where} is at most {USER_ID_CHARS_MAX} characters, without control characters.")
    return f"user:{given}" if given else None


@functools.lru_cache(maxsize=256)
def _is_strict_agent(agent: str, patterns: tuple[str, ...]) -> bool:
    return bool(agent) and any(pattern.search(agent) for pattern in _patterns(patterns))


@functools.cache
def _patterns(given: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    lines = given or tuple(files("hermes.server").joinpath("strict_clients.txt").read_text().splitlines())
    patterns = []
    for line in lines:
        if line.strip() and not line.startswith("#"):
            try:
                patterns.append(re.compile(line.strip(), re.IGNORECASE))
            except re.error:
                patterns.append(re.compile(re.escape(line.strip()), re.IGNORECASE))
    return tuple(patterns)


def _one_of(request: web.Request, name: str, choices: tuple[str, ...]) -> str | None:
    given = request.headers.get(name, "").strip().lower()
    if given and given not in choices:
        raise invalid(name, f"{name} is one of {', '.join(choices)}.")
    return given or None


def _toolsets(given: str | None) -> frozenset[str] | None:
    if given is None:
        return None
    names = [name.strip() for name in given.split(",") if name.strip()]
    return toolsets_of([] if names == ["none"] else names, "X-Hermes-Toolsets")


def toolsets_of(names: list[str], where: str) -> frozenset[str]:
    if unknown := sorted(name for name in names if name not in DEFAULTS and not name.startswith(SERVER_PREFIX)):
        raise invalid(where, f"There is no toolset {unknown[0]!r}; there are {', '.join(sorted(DEFAULTS))}.")
    return frozenset(names)


async def workdir_of(context: ServerContext, owner: str, session_key: str | None, workdir: str) -> str:
    """Refuse a folder outside `terminal.workspaces`."""
    app = context.app
    try:
        await app.services.files.call(
            functools.partial(workspace_of, app.home, app.settings, owner, session_key, workdir)
        )
    except SandboxError as error:
        raise invalid("workdir", str(error)) from None
    except ValueError:  # no path can have these characters
        raise invalid("workdir", "workdir is not a path.") from None
    return workdir


async def max_iterations_of(context: ServerContext, given: int | None) -> int | None:
    """Never more than configured."""
    most = context.app.settings.agent.max_turns
    if given is not None and given > most:
        raise invalid("max_iterations", f"max_iterations is a whole number from 1 to {most} (agent.max_turns).")
    return given


def _deadline(given: str | None, longest_s: float) -> float | None:
    if given is None:
        return longest_s or None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ApiError(400, "X-Hermes-Timeout is a number of seconds above 0.", "invalid_value", "X-Hermes-Timeout")
    return min(seconds, longest_s) if longest_s else seconds
