"""Delivers the results of jobs elsewhere than their session: a file, a webhook, the notify command, e-mail.

The target is set at the machine (`hermes cron create --deliver`), never over the API and never by the model.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hermes.core.errors import ServiceError
from hermes.core.home import append_private
from hermes.core.json_types import JsonMapping
from hermes.core.limits import DELIVERED_FILE_BYTES_MAX, DELIVERY_ERROR_CHARS_MAX
from hermes.guards.path_lists import below
from hermes.guards.url_text import parse
from hermes.guards.urls import FetchFailed, UrlGuard, UrlRefused
from hermes.runs.jobs import LOCAL, Report
from hermes.services.notifications import NotificationFailed, checked_address, run_notify_command, send_mail

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.guards.secrets import Secrets
    from hermes.settings.config import Settings

TARGETS = "session, file:PATH, webhook:URL, notify, or email:ADDRESS"
# Between the results in a file.
_BETWEEN = "\n---\n\n"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}\Z")


class NotDelivered(Exception):
    """The reason, without the address, which may itself be a secret."""


def checked_target(text: str, home: Home | None = None) -> str:
    """A job's `deliver` as it is stored. Raises ServiceError."""
    kind, _, value = text.strip().partition(":")
    if text in (LOCAL, "session"):
        return LOCAL
    if text == "notify":
        return text
    if kind == "email":
        return f"email:{checked_address(value)}"
    if kind == "webhook" and value:
        if not _VARIABLE.match(value):
            try:
                parse(value)
            except (UrlRefused, ValueError):
                raise _bad("A webhook is a URL of http or https, or ${NAME} for a variable that holds it.") from None
        return f"webhook:{value}"
    if kind == "file" and value:
        path = os.path.abspath(os.path.expanduser(value))
        if home is not None and below(os.path.realpath(path), os.path.realpath(home.path)):
            raise _bad("A file inside the home of Hermes is not delivered to.")
        return f"file:{path}{'/' if value.endswith('/') else ''}"
    raise _bad(f"`deliver` is one of {TARGETS}.")


def _bad(message: str) -> ServiceError:
    return ServiceError(message, "invalid_arguments", field="deliver")


def shown_target(text: str) -> str:
    """Of a webhook only the host: its path is often a secret."""
    kind, _, value = text.partition(":")
    if kind != "webhook" or _VARIABLE.match(value):
        return text
    try:
        return f"webhook:{parse(value).origin}/…"
    except (UrlRefused, ValueError):
        return "webhook:…"


class Deliverer:
    def __init__(
        self,
        home: Home,
        settings: Callable[[], Settings],
        secrets: Callable[[], Secrets],
        guard: Callable[[], UrlGuard],
    ) -> None:
        self._home, self._settings, self._secrets, self._guard = home, settings, secrets, guard

    async def __call__(self, job: JsonMapping, report: Report) -> None:
        """Raises NotDelivered."""
        report = msgspec.structs.replace(report, text=self._secrets().redact(report.text))
        kind, _, value = str(job["deliver"]).partition(":")
        settings = self._settings()
        try:
            if kind == "file":
                await asyncio.to_thread(self._write, Path(value), value.endswith("/"), report)
            elif kind == "webhook":
                await self._post(settings, value, report)
            elif kind == "notify":
                await run_notify_command(settings, report.title, report.text)
            elif kind == "email":
                await send_mail(settings, value, report.title, report.text)
            else:
                raise NotDelivered(f"There is no way {kind!r}.")
        except (NotificationFailed, FetchFailed, OSError, ServiceError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NotDelivered(self._secrets().redact(reason)[:DELIVERY_ERROR_CHARS_MAX]) from None

    def _write(self, path: Path, is_folder: bool, report: Report) -> None:
        """Append to the file; in a folder each result is its own file."""
        if is_folder or path.is_dir():
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(report.finished_at))
            path = path / f"{re.sub(r'[^A-Za-z0-9]+', '-', report.job_name).strip('-')[:60] or 'job'}-{stamp}.md"
        checked_target(f"file:{path}", self._home)
        if path.is_symlink():
            raise NotDelivered("The file is a symbolic link.")
        append_private(path, report.text + "\n", _BETWEEN, DELIVERED_FILE_BYTES_MAX)

    async def _post(self, settings: Settings, url: str, report: Report) -> None:
        if match := _VARIABLE.match(url):
            url = settings.variable(match[1]) or ""
            if not url:
                raise NotDelivered(f"The variable {match[1]} is not set.")
        headers = {"Content-Type": "application/json"}
        body = msgspec.json.encode({"event": "job.finished", **msgspec.structs.asdict(report)})
        async with self._guard().open(url, trusted=True, method="POST", headers=headers, body=body) as opened:
            if not 200 <= opened.status < 300:
                raise NotDelivered(f"The webhook answered with status {opened.status}.")
