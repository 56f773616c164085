"""`hermes acp` with the SDK's own client side as the editor: sessions, prompts, tools, approvals, files, models, ends."""

from __future__ import annotations

import asyncio
import base64
import signal
from typing import Any

import pytest
from acp import RequestError, text_block
from acp.schema import (
    BlobResourceContents,
    EmbeddedResourceContentBlock,
    ImageContentBlock,
    ResourceContentBlock,
    TextResourceContents,
)

from support.model_server import Call, Reply

from .acp_client import WAIT_S, editing, real, stderr_of
from .conftest import Place

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()


@pytest.fixture(params=["here", "server"])
def way(place: Place, request: pytest.FixtureRequest) -> tuple[Place, list[str]]:
    """The agent in the process of `hermes acp`, and in a server that it is told of."""
    if request.param == "here":
        return place, []
    place.serve()
    from hermes.core.home import Home
    from hermes.server.status import local_url

    return place, ["--server", local_url(Home(place.home))]


async def prompt(editor: Any, session_id: str, text: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await editor.agent.prompt(session_id=session_id, prompt=[text_block(text)])


async def new_session(editor: Any, place: Place) -> str:
    await editor.initialize()
    return str((await editor.agent.new_session(cwd=str(place.folder), mcp_servers=[])).session_id)


async def test_initialize_declares_capabilities(place: Place) -> None:
    async with editing(place) as editor:
        answer = (await editor.initialize()).model_dump(by_alias=True, exclude_none=True)
    assert answer["protocolVersion"] == 1 and answer["agentInfo"]["name"] == "hermes"
    able = answer["agentCapabilities"]
    assert able["loadSession"] and able["promptCapabilities"]["image"] and able["promptCapabilities"]["embeddedContext"]
    assert set(able["sessionCapabilities"]) == {"list", "resume", "close"}
    assert editor.process.returncode == 0


async def test_prompt_streams_thoughts_and_message(way: tuple[Place, list[str]]) -> None:
    place, words = way
    place.script(Reply(reasoning=["I ", "wonder."], text=["Hel", "lo."], usage={"input": 12, "output": 3}))
    async with editing(place, *words) as editor:
        session_id = await new_session(editor, place)
        await editor.until(lambda: "available_commands_update" in editor.kinds())
        answer = await prompt(editor, session_id, "hi")
        assert (answer.stop_reason, answer.usage.input_tokens) == ("end_turn", 12)
        assert editor.text() == "Hello." and editor.text("agent_thought_chunk") == "I wonder."
        assert editor.of("usage_update")[0]["used"] == 15
    assert place.said() == [("user", "hi"), ("assistant", "Hello.")]
    assert place.sessions()[0]["cwd"] == str(place.folder)
    assert stderr_of(place) == ""
