"""Notifications: the operator's `notify` command, e-mail through `sendmail`, and terminal sequences."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hermes.core.errors import ServiceError
from hermes.core.formatting import one_line
from hermes.core.limits import NOTIFICATION_CHARS_MAX, NOTIFY_S_MAX
from hermes.sandbox.choose import child_env
from hermes.sandbox.piped import piped_process

if TYPE_CHECKING:
    from hermes.settings.config import Settings

# Variables through which a program finds the user's desktop.
_DESKTOP = ("DISPLAY", "WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR", "XAUTHORITY")
_SENDMAIL_PATH = ("/usr/sbin", "/usr/lib", "/usr/local/sbin", "/opt/homebrew/bin")
_ADDRESS = re.compile(r"[A-Za-z0-9][\w.+-]*@[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?\Z", re.ASCII)
_PLACEHOLDER = re.compile(r"((?:--?[\w-]+=)?)(\{(?:title|text)\})")
# What a terminal understands, by `display.notify`.
_SEQUENCES = {"bell": "\a", "osc9": "\x1b]9;{title}: {text}\a", "osc777": "\x1b]777;notify;{title};{text}\a"}


class NotificationFailed(Exception):
    """The text says why and holds no secret."""


def terminal_sequence(kind: str, title: str, text: str) -> str:
    """The escape sequence that makes a terminal notify its user; empty where that is off."""
    # Semicolons end a field, and control characters the sequence.
    fields = (one_line(value).replace(";", ",")[:NOTIFICATION_CHARS_MAX] for value in (title, text))
    return _SEQUENCES[kind].format(**dict(zip(("title", "text"), fields, strict=True))) if kind in _SEQUENCES else ""


async def run_notify_command(settings: Settings, title: str, text: str) -> None:
    """Run `notify.command`: `{title}` and `{text}` in it are replaced, and its input is the whole text."""
    try:
        parts = shlex.split(settings.notify.command)
    except ValueError as error:
        raise NotificationFailed(f"notify.command cannot be read: {error}.") from None
    if not parts:
        raise NotificationFailed("notify.command is not set.")
    values = {"{title}": _argument(title), "{text}": _argument(text)}
    await _run(settings, [_filled(part, values) for part in parts], text.encode())


def _filled(part: str, values: Mapping[str, str]) -> str:
    """An argument with its value. The text is untrusted: it is a whole argument, or follows an option, and is never
    inside a script."""
    if not any(name in part for name in values):
        return part
    if (match := _PLACEHOLDER.fullmatch(part)) is None:
        raise NotificationFailed("{title} and {text} of notify.command are arguments of their own, or --option={text}.")
    return f"{match[1]}{values[match[2]]}"


def _argument(text: str) -> str:
    """A value in one line, short enough for an argument, that is no option."""
    line = one_line(text)
    line = line if len(line) <= NOTIFICATION_CHARS_MAX else f"{line[: NOTIFICATION_CHARS_MAX - 1]}…"
    return f" {line}" if line.startswith("-") else line


def checked_address(text: str) -> str:
    if not _ADDRESS.match(text) or len(text) > 254:
        raise ServiceError(f"{text!r} is not an e-mail address.", "invalid_arguments", field="deliver")
    return text


async def send_mail(settings: Settings, to: str, subject: str, text: str) -> None:
    from email.message import EmailMessage

    program = shutil.which(settings.notify.sendmail) or next(
        filter(None, (shutil.which(settings.notify.sendmail, path=path) for path in _SENDMAIL_PATH)), None
    )
    if program is None:
        raise NotificationFailed(f"There is no program {settings.notify.sendmail!r} (notify.sendmail).")
    message = EmailMessage()
    message["To"], message["Subject"] = checked_address(to), one_line(subject)[:200]
    if settings.notify.email_from:
        message["From"] = checked_address(settings.notify.email_from)
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(text)
    await _run(settings, [program, "-i", "-t"], message.as_bytes())


async def _run(settings: Settings, argv: Sequence[str], data: bytes) -> None:
    """Run a program of the operator's to its end, with the data as its input."""
    notes: list[str] = []
    env = {**child_env(settings, "local", settings.home.path, os.environ), **_desktop(os.environ)}
    try:
        async with (
            asyncio.timeout(NOTIFY_S_MAX),
            piped_process(argv, env, notes.append, line_bytes_max=65_536, end_s=2.0) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(data)
                await process.stdin.drain()
            except ConnectionError:
                pass  # it does not read its input
            process.stdin.close()
            while await process.stdout.read(65_536):
                pass
            code = await process.wait()
    except TimeoutError:
        raise NotificationFailed(f"{argv[0]} took longer than {NOTIFY_S_MAX:g} s.") from None
    except OSError as error:
        raise NotificationFailed(f"{argv[0]} cannot be run: {error.strerror}.") from None
    if code:
        detail = f": {one_line(notes[-1])[:200]}" if notes else ""
        raise NotificationFailed(f"{argv[0]} ended with exit code {code}{detail}.")


def _desktop(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in _DESKTOP if name in environ}
