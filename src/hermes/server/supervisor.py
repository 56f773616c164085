"""systemd's `sd_notify` protocol."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Supervisor:
    """The service manager's socket; without one nothing is sent."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        name = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name if name.startswith("/") else ""
        self.period_s = _period_s(environ) if self._address else None

    def tell(self, *lines: str) -> None:
        """Send these assignments in one datagram, without blocking. Errors are only logged."""
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
                sock.sendto(message.encode(), self._address)
        except (OSError, ValueError) as error:
            log.warning("the service manager could not be told %s: %s", lines[0], error)


def _period_s(environ: Mapping[str, str]) -> float | None:
    """The ping interval: half of the watchdog's timeout; None without a watchdog for this process."""
    given, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not given.isascii() or not given.isdigit() or not int(given) or pid not in ("", str(os.getpid())):
        return None
    return int(given) / 2 / 1_000_000
