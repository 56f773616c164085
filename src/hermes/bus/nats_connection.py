"""The connection to NATS: its address, its streams, how it is told apart what is wrong with it, and that it comes back.

`nats` is imported when a connection is made. Nothing that is told or logged holds the credentials of the address.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hermes.core.errors import ConfigError, HermesError
from hermes.core.limits import (
    NATS_API_S_MAX,
    NATS_CONNECT_S_MAX,
    NATS_EVENTS_BYTES_MAX,
    NATS_EVENTS_KEPT_S,
    NATS_PING_S,
    NATS_RECONNECT_S,
    NATS_SYNC_S_MAX,
)

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

    from hermes.bus.nats_client import DirectClient

log = logging.getLogger(__name__)
_NAMESPACE = re.compile(r"[a-z0-9_-]{1,97}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")
_SCHEMES = ("nats", "tls")
_OLDEST = (2, 10)
_EXAMPLE = "nats://127.0.0.1:4222"
OnMessage = Callable[["Msg"], Awaitable[None]]


class BusError(HermesError):
    """NATS is out of reach, or does not do what it was asked."""

    exit_code = 69


def is_nats(url: str) -> bool:
    """Whether an address names NATS, rather than the memory of the process. Raises ConfigError for any other."""
    if url == "memory:":
        return False
    for one in url.split(","):
        try:
            parts = urlsplit(one.strip())
            good = parts.scheme in _SCHEMES and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            good = False
        if not good:
            message = "bus.url is not 'memory:' and not the address of a NATS server."
            raise ConfigError(message, where="bus.url", hint=_EXAMPLE)
    return True


def namespace_of(namespace: str, profile: str) -> str:
    """The name that a profile's subjects have in common."""
    name = namespace if profile == "default" else f"{namespace}-{profile}"
    if not _NAMESPACE.fullmatch(name):
        message = "bus.namespace must be 1 to 32 small letters, digits, '_' and '-'."
        raise ConfigError(message, where="bus.namespace", hint="default")
    return name


class NatsConnection:
    """One connection, which is tried again for as long as it is not closed.

    `changes` are called whenever it is lost or back.
    """

    def __init__(self, url: str, namespace: str, queue_copies: int = 1) -> None:
        self._urls = [one.strip() for one in url.split(",")]
        self.namespace, self._queue_copies = namespace, queue_copies
        self.prefix = f"hermes.{namespace}"
        self.events_stream, self.runs_stream = f"HERMES_EVENTS_{namespace}", f"HERMES_RUNS_{namespace}"
        self.changes: list[Callable[[], None]] = []
        self.client: DirectClient | None = None
        self._js: JetStreamContext | None = None
        # What was wrong with the first connection: the server may close it before it has been heard.
        self._errors: list[str] = []

    def events_subject(self, run_id: str) -> str:
        """Of a run's events. An id that is no token of a subject is replaced by its hash."""
        token = run_id if _TOKEN.fullmatch(run_id) else hashlib.sha256(run_id.encode("utf-8", "replace")).hexdigest()
        return f"{self.prefix}.events.{token}"

    @property
    def shown_url(self) -> str:
        """The addresses without credentials."""
        parts = [urlsplit(url) for url in self._urls]
        return ",".join(f"{one.scheme}://{one.hostname}:{one.port or 4222}" for one in parts)

    @property
    def connected(self) -> bool:
        return self.client is not None and self.client.is_connected

    @property
    def js(self) -> JetStreamContext:
        assert self._js is not None
        return self._js

    async def connect(self) -> None:
        """Connect and make the streams. Raises ConfigError or BusError."""
        try:
            from hermes.bus.nats_client import DirectClient
        except ImportError:
            message = "bus.url names a NATS server, and what speaks to one is not installed."
            raise ConfigError(message, where="bus.url", hint="hermes install nats") from None
        client = DirectClient()
        try:
            async with asyncio.timeout(2 * NATS_CONNECT_S_MAX):
                await client.connect(
                    self._urls,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_change,
                    reconnected_cb=self._on_reconnected,
                    name=f"hermes {self.namespace}",
                    connect_timeout=NATS_CONNECT_S_MAX,  # type: ignore[arg-type]
                    reconnect_time_wait=NATS_RECONNECT_S,  # type: ignore[arg-type]
                    max_reconnect_attempts=1,
                    ping_interval=NATS_PING_S,  # type: ignore[arg-type]
                    no_echo=True,
                    # Every subject is made of tokens that are known to be good.
                    skip_subject_validation=True,
                )
        except Exception as error:  # noqa: BLE001  (whatever it is, it is told in one sentence)
            with contextlib.suppress(Exception):
                await client.close()
            raise self._unreachable(error) from None
        # A start that fails is told; a connection that was there is tried again for ever.
        client.options["max_reconnect_attempts"] = -1
        try:
            self._js = client.jetstream(timeout=NATS_API_S_MAX)
            await self._check_server(client)
            await self._make_streams()
        except BaseException:
            with contextlib.suppress(Exception):
                await client.close()
            raise
        self.client = client

    def _unreachable(self, error: Exception) -> HermesError:
        reason = f"{self._errors} {error}".lower()
        if "permission" in reason:  # what may not be asked is not answered either
            message = f"NATS at {self.shown_url} does not let this user use JetStream."
            return ConfigError(message, where="bus.url", hint="permissions for $JS.API.> and hermes.>")
        if "authorization" in reason:
            message = f"NATS at {self.shown_url} refuses the credentials of bus.url."
            return ConfigError(message, where="bus.url", hint="nats://user:password@host:4222")
        message = f"NATS at {self.shown_url} is out of reach."
        return BusError(message, where="bus.url", hint="start nats-server -js, or set bus.url to memory:")

    async def _check_server(self, client: Client) -> None:
        version = client.connected_server_version
        if (version.major, version.minor) < _OLDEST:
            needed = ".".join(map(str, _OLDEST))
            message = f"NATS at {self.shown_url} is version {version.major}.{version.minor}, which is too old."
            raise ConfigError(message, where="bus.url", hint=f"nats-server {needed} or later")
        from nats.js.errors import ServiceUnavailableError

        try:
            await self.js.account_info()
        except ServiceUnavailableError as error:
            message = f"NATS at {self.shown_url} has no JetStream."
            raise ConfigError(message, where="bus.url", hint="nats-server -js") from error
        except Exception as error:
            raise self._unreachable(error) from error

    async def _make_streams(self) -> None:
        """The streams, as far as they are not there; their limits and replicas may be changed by whoever runs NATS."""
        from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

        await self._make_stream(
            StreamConfig(
                name=self.events_stream,
                subjects=[f"{self.prefix}.events.*"],
                storage=StorageType.MEMORY,
                max_age=NATS_EVENTS_KEPT_S,
                max_bytes=NATS_EVENTS_BYTES_MAX,
                discard=DiscardPolicy.OLD,
            )
        )
        await self._make_stream(
            StreamConfig(
                name=self.runs_stream,
                subjects=[f"{self.prefix}.runs"],
                storage=StorageType.FILE,
                retention=RetentionPolicy.WORK_QUEUE,
                num_replicas=self._queue_copies,
            )
        )

    async def _make_stream(self, wanted: Any) -> None:
        from nats.js.errors import APIError, NotFoundError

        try:
            try:
                present = (await self.js.stream_info(wanted.name)).config
            except NotFoundError:
                await self.js.add_stream(wanted)
                return
        except APIError as error:
            message = f"NATS at {self.shown_url} does not make the stream {wanted.name}."
            raise ConfigError(
                message, where="bus.url", hint="more room for JetStream, or fewer bus.queue_copies"
            ) from error
        except Exception as error:
            raise self._unreachable(error) from error
        same = present.subjects == wanted.subjects and (present.retention == (wanted.retention or present.retention))
        if not same:
            message = f"The stream {wanted.name} of NATS at {self.shown_url} is not one of Hermes."
            raise ConfigError(message, where="bus.namespace", hint="another bus.namespace")

    async def sync(self) -> None:
        """Wait until NATS has done all that was sent to it, subscriptions included. (The client's own `flush` overtakes
        what waits to be written.)"""
        from nats.errors import NoRespondersError

        if not self.connected or self.client is None:
            raise ConnectionError("not connected")
        with contextlib.suppress(NoRespondersError):
            await self.client.request(f"{self.prefix}.sync", b"", timeout=NATS_SYNC_S_MAX)

    async def try_sync(self) -> None:
        """The same, as long as NATS answers: what was subscribed to is asked for again with the next connection."""
        with contextlib.suppress(Exception):
            await self.sync()

    async def check(self) -> None:
        """Raise BusError while NATS does not answer."""
        try:
            await self.sync()
        except Exception as error:
            raise BusError(f"NATS at {self.shown_url} is out of reach.", where="bus.url") from error

    async def close(self) -> None:
        self.changes.clear()
        await self.try_sync()
        client, self.client = self.client, None
        if client is not None:
            with contextlib.suppress(Exception):
                await client.close()

    async def _on_error(self, error: Exception) -> None:
        if self.client is None:
            self._errors.append(f"{type(error).__name__} {error}")
        log.debug("NATS: %s", type(error).__name__)

    async def _on_change(self) -> None:
        if self.client is not None:
            log.warning("NATS at %s is %s", self.shown_url, "there again" if self.connected else "out of reach")
        for change in tuple(self.changes):
            change()

    async def _on_reconnected(self) -> None:
        # A server that has lost its disk has lost the streams too.
        try:
            await self._make_streams()
        except Exception as error:  # noqa: BLE001  (without them the store is read; the next connection tries again)
            log.warning("the streams of NATS could not be made: %s", error)
        await self._on_change()
