"""Processes of one home that ask each other over Unix sockets: what travels, and what becomes of it when one is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hermes.bus import peers as module
from hermes.bus.peers import PeerGone, Peers, PeerServer, name_of
from hermes.core import unix_sockets
from hermes.core.processes import this_process

VALUES = [None, 1, 1.5, "ä", "half \ud800 of a pair", {"a": [1, {"b": None}]}, 1 << 80, "x" * 3_000_000]


class PeerFixture:
    """A folder with a process that answers, and one that asks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, name_of(this_process())
        self.closed = asyncio.Event()
        self.go_on = asyncio.Event()
        self.server = PeerServer(folder, {"echo": self.echo, "fail": self.fail}, {"count": self.count})
        self.peers = Peers(folder)

    async def echo(self, value: Any) -> Any:
        return value

    async def fail(self) -> None:
        raise RuntimeError("no")

    async def count(self, to: int, hang: bool) -> AsyncGenerator[list[int], None]:
        try:
            for number in range(to):
                yield [number]
            if hang:
                await self.go_on.wait()
        finally:
            self.closed.set()


@pytest.fixture(params=["short", "long"])
async def peer(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PeerFixture]:
    peer_fixture = PeerFixture(tmp_path / ("run" if request.param == "short" else "x" * 120) / "run")
    await peer_fixture.server.start()
    yield peer_fixture
    await peer_fixture.server.close()


@pytest.mark.parametrize("at", range(len(VALUES)))
async def test_peer_value_round_trip(peer: PeerFixture, at: int) -> None:
    assert await peer.peers.ask(peer.name, "echo", VALUES[at]) == VALUES[at]


async def test_peer_socket_is_private_and_removed_on_close(peer: PeerFixture) -> None:
    [path] = peer.folder.iterdir()
    assert path.name == peer.name and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(peer.folder.stat().st_mode) == 0o700
    await peer.server.close()
    assert not list(peer.folder.iterdir())


@pytest.mark.parametrize("operation", ["fail", "unknown"])
async def test_failing_peer_operation_raises_peer_gone(peer: PeerFixture, operation: str) -> None:
    with pytest.raises(PeerGone):
        await peer.peers.ask(peer.name, operation)
    assert await peer.peers.ask(peer.name, "echo", 1) == 1


async def test_peer_of_other_user_is_rejected(peer: PeerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_same_user", lambda _: False)
    with pytest.raises(PeerGone):
        await peer.peers.ask(peer.name, "echo", 1)
    monkeypatch.undo()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert unix_sockets.is_same_user(ours.fileno())
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not unix_sockets.is_same_user(ours.fileno())


async def test_socket_of_dead_process_is_removed(peer: PeerFixture) -> None:
    stale = peer.folder / name_of("elsewhere:1:2.00")
    with socket.socket(socket.AF_UNIX) as sock, unix_sockets.reachable(stale) as path:
        sock.bind(path)
    assert peer.peers.names() == [stale.name]
    assert await peer.peers.ask_all("echo", 1) == {}
    assert not stale.exists() and peer.peers.names() == []


async def test_peer_stream_is_followed_to_end(peer: PeerFixture) -> None:
    assert [value async for value in peer.peers.follow(peer.name, "count", 3, False)] == [[0], [1], [2]]


@pytest.mark.parametrize("ends", ["the reader", "the process"])
async def test_peer_stream_ends_when_either_side_closes(peer: PeerFixture, ends: str) -> None:
    async with contextlib.aclosing(peer.peers.follow(peer.name, "count", 1, True)) as values:
        assert await anext(values) == [0]
        if ends == "the process":
            await peer.server.close()
            assert [value async for value in values] == []
    await peer.closed.wait()


async def test_peer_stream_idle_keepalive(peer: PeerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PEER_IDLE_S", 0.01)
    assert [value async for value in peer.peers.follow(peer.name, "count", 0, True)] == [[]]
