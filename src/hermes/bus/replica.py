"""This process as one of several replicas that NATS connects: its connection, bus and peers, made and ended together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hermes.bus.nats_connection import is_nats, namespace_of
from hermes.bus.peers import AnyPeerServer, Operation, Stream

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.settings.config import Settings


class Replica:
    """Nothing is connected before `connect`: until then events reach local readers only, and there are no peers."""

    def __init__(self, url: str, namespace: str, max_inflight: int, queue_copies: int = 1) -> None:
        from hermes.bus.nats_bus import NatsBus
        from hermes.bus.nats_connection import NatsConnection
        from hermes.bus.nats_members import Members
        from hermes.bus.nats_peers import NatsPeers
        from hermes.bus.nats_queue import NatsQueue

        self.max_inflight = max_inflight
        self.connection = NatsConnection(url, namespace, queue_copies)
        self.bus = NatsBus(self.connection)
        self.members = Members(self.connection)
        self.peers = NatsPeers(self.connection, self.members)
        self.queue = NatsQueue(self.connection)

    async def connect(self) -> None:
        """Raises ConfigError, or BusError where NATS is out of reach."""
        await self.connection.connect()
        self.bus.start()

    def peer_server(self, operations: Mapping[str, Operation], streams: Mapping[str, Stream]) -> AnyPeerServer:
        from hermes.bus.nats_peers import NatsPeerServer

        return NatsPeerServer(self.connection, operations, streams)

    async def close(self) -> None:
        await self.members.close()
        await self.bus.stop()
        await self.connection.close()


def replica_of(home: Home, settings: Settings) -> Replica | None:
    """None where `bus.url` says that this process is alone with its home."""
    bus = settings.bus
    if not is_nats(bus.url):
        return None
    return Replica(bus.url, namespace_of(bus.namespace, home.profile), bus.max_inflight, bus.queue_copies)
