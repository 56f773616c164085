"""Viewers of a response that were connected when its server was killed: nothing that they read is ever another thing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.gateway import CUT, Gateway
from support.model_server import Handler, Reply, Request

from .test_server_crashes import started_server
from .witness import TAKEN_UP_S

Frames = dict[int, bytes]


async def read(response: aiohttp.ClientResponse, frames: Frames, deltas_max: int = 1_000_000) -> str:
    """Read a stream, to its end or to so many deltas; the id of the response."""
    response_id, deltas = "", 0
    while deltas < deltas_max:
        line = await response.content.readline()
        if not line or line == b"data: [DONE]\n":
            break
        if line.startswith(b"data: "):
            data = json.loads(line[6:])
            assert data["sequence_number"] not in frames
            frames[data["sequence_number"]] = line
            response_id = response_id or data.get("response", {}).get("id", "")
            deltas += data["type"] == "response.output_text.delta"
    return response_id


async def whole(gateway: Gateway, response_id: str, after: int | None = None) -> Frames:
    """All that a reader is shown who comes later."""
    frames: Frames = {}
    query: dict[str, Any] = {"stream": "true"} | ({} if after is None else {"starting_after": after})
    async with (
        asyncio.timeout(TAKEN_UP_S),
        gateway.client.get(f"/v1/responses/{response_id}", params=query) as response,
    ):
        assert response.status == 200
        await read(response, frames)
    return frames


def text(frames: Frames) -> str:
    payloads = [json.loads(line[6:]) for _, line in sorted(frames.items())]
    return "".join(event["delta"] for event in payloads if event["type"] == "response.output_text.delta")


def two_answers() -> Handler:
    """A model that stops in the middle of its answer and, asked again, says something else."""
    replies = [Reply(text=[f"Word {n}. " for n in range(8)], gap_s=0.004, stall_at=2_000)]

    def reply(_: Request) -> Reply:
        return replies.pop() if replies else Reply(text=[f"Another {n}. " for n in range(8)])

    return reply


@pytest.mark.parametrize("deltas", range(1, 7))
async def test_replayed_sequence_number_never_changes_content(home_folder: Path, deltas: int) -> None:
    async with started_server(home_folder, two_answers()) as (_, witness):
        gateway, frames = witness.gateway, Frames()
        body = {"input": "Count.", "stream": True, "background": True}
        async with gateway.client.post("/v1/responses", json=body) as response:
            response_id = await read(response, frames, deltas)
            await gateway.end()
            with contextlib.suppress(CUT):
                await read(response, frames)
        await gateway.start()
        rest = await whole(gateway, response_id, max(frames))
        assert frames | rest == await whole(gateway, response_id)
        assert not set(frames) & set(rest)
        assert sorted(frames | rest) == list(range(len(frames) + len(rest)))
        stored = await gateway.get(f"/v1/responses/{response_id}")
        assert stored["status"] == "completed"
        assert text(frames | rest) == "".join(
            part["text"] for item in stored["output"] if item["type"] == "message" for part in item["content"]
        )
