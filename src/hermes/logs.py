"""Logging: private rotating files without secrets, written by their own thread."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hermes.core import home as homes
from hermes.core.home import Home
from hermes.guards.secrets import Secrets
from hermes.settings import config

_SERVER_LOGGERS = ("hermes.server", "aiohttp", "asyncio")
_LINE = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"
# The id of the current request, also in tasks it started.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
_LOGS: dict[str, Callable[[logging.LogRecord], bool]] = {
    "agent": lambda record: not record.name.startswith(_SERVER_LOGGERS),
    "gateway": lambda record: record.name.startswith(_SERVER_LOGGERS),
    "errors": lambda record: record.levelno >= logging.WARNING,
}


class _PrivateFile(RotatingFileHandler):
    """A log file that only its owner can read, created with the first record. Several processes may write it."""

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        """A file that another process has rotated is reopened instead."""
        self._leave_if_moved()
        return bool(super().shouldRollover(record))

    def doRollover(self) -> None:
        """Rotate the file, unless another process already has."""
        with homes.locked(Path(self.baseFilename).parent):
            if not self._leave_if_moved():
                super().doRollover()

    def _leave_if_moved(self) -> bool:
        if self.stream is None:
            return False
        try:
            if os.path.samestat(os.fstat(self.stream.fileno()), os.stat(self.baseFilename)):
                return False
        except FileNotFoundError:
            pass
        self.stream.close()
        self.stream = self._open()
        return True

    def _open(self) -> Any:
        path = self.baseFilename
        homes.make_private_folder(Path(path).parent)
        return open(path, self.mode, encoding=self.encoding, errors=self.errors, opener=homes.private_opener)


class _Redacting(logging.Formatter):
    def __init__(self, form: str, secrets: Callable[[], Secrets]) -> None:
        super().__init__(form)
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        return self._secrets().redact(super().format(record))


def _with_request(record: logging.LogRecord) -> bool:
    record.request = f" [{request_id}]" if (request_id := REQUEST_ID.get()) else ""
    return True


@contextlib.contextmanager
def logging_to(home: Home, settings: config.Settings, *, verbose: bool | None) -> Iterator[None]:
    """Log to the home's files; standard error gets warnings, or with `verbose` all, and nothing where it is None."""
    handlers = list(_handlers(home, settings, verbose=verbose))
    lines: SimpleQueue[Any] = SimpleQueue()
    entrance, listener = QueueHandler(lines), QueueListener(lines, *handlers, respect_handler_level=True)
    entrance.addFilter(_with_request)
    root = logging.getLogger()
    before = root.level, logging.raiseExceptions
    # Errors while logging are not printed: they would not be redacted.
    logging.raiseExceptions = False
    root.setLevel(settings.logging.level)
    root.addHandler(entrance)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(entrance)
        listener.stop()
        for handler in handlers:
            handler.close()
        level, logging.raiseExceptions = before
        root.setLevel(level)


def _handlers(home: Home, settings: config.Settings, *, verbose: bool | None) -> Iterator[logging.Handler]:
    current = [settings]

    def secrets() -> Secrets:
        current[0], _ = config.reload_if_changed(current[0])
        return known_secrets(current[0])

    stderr = logging.StreamHandler(sys.stderr)
    stderr.setLevel(logging.NOTSET if verbose else logging.WARNING)
    stderr.setFormatter(_Redacting(_LINE if verbose else "hermes: %(message)s", secrets))
    if verbose is not None:
        yield stderr
    size, backups = int(settings.logging.max_size_mb * 1_000_000), settings.logging.backup_count
    for name, takes in _LOGS.items():
        path = home.logs / f"{name}.log"
        file = _PrivateFile(path, "a", size, backups, encoding="utf-8", delay=True, errors="replace")
        file.setFormatter(_Redacting(_LINE, secrets))
        file.addFilter(takes)
        yield file


@lru_cache(maxsize=4)
def known_secrets(settings: config.Settings) -> Secrets:
    return Secrets(settings.secret_values())
