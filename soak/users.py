"""Users who ask for turns in every way, read, leave, come back and stop them; and a model that fails in every way."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from dataclasses import replace
from typing import Any

import aiohttp

from crash.plans import WAYS, Way
from support.gateway import CUT
from support.model_server import Call, Reply, Request

TURNS_PER_SESSION, FAULTY_SHARE, CALLING_SHARE, KEYED_SHARE = 4, 0.15, 0.3, 0.15
# When a user leaves; and after how long a turn hangs, on the slowest machine.
LEAVES_S_MAX, PATIENCE_S = 1.0, 240.0
# What a user does with a turn, and how often. Who resets is gone without a farewell.
DEEDS = {"read": 6, "leave": 2, "reset": 2, "stop": 2, "follow": 2}
FAULTS: dict[str, dict[str, Any]] = {
    "500": {"status": 500, "error": "broken"},
    "429": {"status": 429, "error": "too much", "headers": {"Retry-After": "1"}},
    "400": {"status": 400, "error": "not like this"},
    "reset": {"reset_before_headers": True},
    "silence, then reset": {"delay_s": 1.0, "reset_before_headers": True},
    "cut": {"cut_at": 900},
    "slow, then cut": {"gap_s": 0.5, "cut_at": 900},
    "cut cleanly": {"cut_at": 900, "cut_clean": True},
    "silence": {"stall_at": 900},
    "garbage in the stream": {"malformed_at": 2},
    "garbage": {"raw": b"<html>\xff\x00 bad gateway"},
    "error in the stream": {"error_event": {"message": "overloaded", "code": 503}},
}
CALLS = (
    Call("terminal", {"command": "echo one; sleep 0.05; echo two"}),
    Call("terminal", {"command": "yes | head -n 5000"}),
    Call("read_file", {"path": "notes.txt"}),
    Call("todo", {"todos": [{"id": "1", "content": "milk", "status": "pending"}]}),
    Call("no_such_tool", {}),
)
ASKED = (*WAYS.values(), Way("/v1/responses", lambda text: {"input": text}, goes_on=False))
# What only a defect of the server answers with.
DEFECTS = ('"internal_error"', '"agent_error"')


def answer(chance: random.Random, request: Request, faults: Counter[str]) -> Reply:
    """The next message of the model."""
    words = [f"word {n} " for n in range(chance.randint(5, 40))]
    reply = Reply(text=words, gap_s=chance.choice((0.0, 0.01, 0.03)), continues=False)
    if request.turns[-1].role == "user" and chance.random() < CALLING_SHARE:
        reply.tool_calls = chance.sample(CALLS, k=chance.randint(1, 3))
    name = chance.choice(list(FAULTS)) if chance.random() < FAULTY_SHARE else ""
    faults[name] += bool(name)
    return replace(reply, **FAULTS.get(name, {}))


def _resetting(address: Any) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return made


class Users:
    """Some users at once, each with sessions of its own; what they did and met is counted."""

    def __init__(self, url: str, chance: random.Random) -> None:
        self._url, self._chance = url, chance
        self._clients: dict[bool, aiohttp.ClientSession] = {}
        self.counts: Counter[str] = Counter()
        self.defects: list[str] = []

    async def come(self, count: int, seconds: float) -> None:
        """So many users for so long; each ends what it has begun, and none keeps a connection."""
        until = asyncio.get_running_loop().time() + seconds
        async with self._client(None) as polite, self._client(_resetting) as rude, asyncio.TaskGroup() as group:
            self._clients = {False: polite, True: rude}
            for _ in range(count):
                group.create_task(self._come(until))

    def _client(self, sockets: Any) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, socket_factory=sockets)
        return aiohttp.ClientSession(self._url, connector=connector, timeout=aiohttp.ClientTimeout(None))

    async def _come(self, until: float) -> None:
        while asyncio.get_running_loop().time() < until:
            self.counts["sessions"] += 1
            session = f"session-{self.counts['sessions']}"
            async with self._clients[False].post("/api/sessions", json={"id": session}) as response:
                self._look_at(response, await response.text())
            for _ in range(TURNS_PER_SESSION):
                await self._turn(session)
            async with self._clients[False].delete(f"/api/sessions/{session}") as response:
                self.counts["sessions deleted"] += response.status == 200

    async def _turn(self, session: str) -> None:
        """One turn; under a key it is asked for twice."""
        self.counts["turns"] += 1
        way, number = self._chance.choice(ASKED), self.counts["turns"]
        headers = dict(way.headers) | ({} if "{session}" in way.path else {"X-Hermes-Session-Id": session})
        self.counts["keyed"] += (keyed := self._chance.random() < KEYED_SHARE)
        headers |= {"Idempotency-Key": f"key-{number}"} if keyed else {}
        for _ in range(1 + keyed):
            await self._ask(way, session, f"Question {number}.", headers)

    async def _ask(self, way: Way, session: str, question: str, headers: dict[str, str]) -> None:
        [deed] = self._chance.choices(list(DEEDS), list(DEEDS.values()))
        self.counts[deed] += 1
        client, gone = self._clients[deed == "reset"], deed in ("leave", "reset")
        try:
            async with (
                asyncio.timeout(self._chance.uniform(0, LEAVES_S_MAX) if gone else PATIENCE_S),
                client.post(way.path.format(session=session), json=way.body(question), headers=headers) as response,
            ):
                await self._go_on(way, deed, response)
        except (TimeoutError, *CUT) as error:
            if not (gone and isinstance(error, TimeoutError)):
                self.defects.append(f"{way.path} was cut off, or has not ended: {error!r} ({deed}, {session})")

    async def _go_on(self, way: Way, deed: str, response: aiohttp.ClientResponse) -> None:
        run_id = response.headers.get("X-Hermes-Run-Id")
        if run_id and deed == "stop":
            path = f"/v1/runs/{run_id}/stop"
            if way.submitted and "response" in way.path:
                path = f"/v1/responses/{(await response.json()).get('id')}/cancel"
            async with self._clients[False].post(path) as stopped:
                self.counts["stopped"] += stopped.status < 300
        if run_id and (deed == "follow" or way.submitted):
            await self._follow(run_id)
        self._look_at(response, await response.text())

    async def _follow(self, run_id: str) -> None:
        """Read a run to its end, with connections that are lost now and then."""
        last, lost = "0", True
        while lost:
            left, lost = self._chance.randint(1, 60), False
            self.counts["viewers"] += 1
            async with self._clients[left % 2 == 0].get(
                f"/v1/runs/{run_id}/events", headers={"Last-Event-ID": last}
            ) as response:
                if response.status != 200:
                    return  # its session is gone
                async for line in response.content:
                    if line.startswith(b"id: "):
                        last, left = line[4:].decode().strip(), left - 1
                    if lost := not left:
                        break

    def _look_at(self, response: aiohttp.ClientResponse, text: str) -> None:
        self.counts[f"status {response.status}"] += 1
        if any(code in text for code in DEFECTS):
            self.defects.append(text[-500:])
