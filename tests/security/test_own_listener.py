"""No tool reaches the server that it works for, whatever the settings allow and however its address is written."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from guards.stage import serving as site
from hermes import app as apps
from hermes.core.home import Home
from server.test_runner import serving
from support.model_server import Call, ModelServer, Reply

KEY = "q7Zr-4fJ0_pW2xLs9TnB6vYc1HdK8mGa"
RULE = "refused by the rule 'own_listener'"
pytestmark = pytest.mark.usefixtures("home_folder")


def own_addresses() -> list[str]:
    """Addresses of this machine besides those of loopback."""
    addresses = []
    for family, outside in ((socket.AF_INET, "192.0.2.9"), (socket.AF_INET6, "2001:db8::9")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((outside, 9))
            except OSError:
                continue
            addresses.append(str(probe.getsockname()[0]))
    return [f"[{address}]" if ":" in address else address for address in addresses]


SPELLINGS = ["127.0.0.1", "localhost", "LOCALHOST.", "127.1.2.3", "0.0.0.0", "[::1]", "[::]"]
SPELLINGS += ["[::ffff:127.0.0.1]", socket.gethostname(), *own_addresses()]


def configure(home: Home, model_url: str, **more: Any) -> None:
    folder = home.path / "profiles" / "a"
    folder.mkdir(parents=True)
    settings = {
        "model": {"default": "m", "base_url": f"{model_url}/v1"},
        "auxiliary": {"title_generation": {"enabled": False}},
        "security": {"allow_private_urls": True},
        "web": {"ask_hosts": False},
        **more,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "api_server": {"key": KEY}}))
    home.config_file.write_text(yaml.safe_dump({**settings, "api_server": {"key": KEY, "profiles": ["a"]}}))


async def ask(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "look at " + url}]}
    headers = {"Authorization": f"Bearer {KEY}"}
    place = f"{url}/v1/chat/completions"
    async with aiohttp.ClientSession(headers=headers) as client, client.post(place, json=body) as answer:
        assert answer.status == 200, await answer.text()


@pytest.mark.parametrize("prefix", ["", "/p/a"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_tools_cannot_reach_own_server(home_folder: Path, host: str, prefix: str) -> None:
    home = Home(home_folder)

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="elsewhere")

    async with ModelServer() as model, site(page) as other:
        configure(home, model.url)
        async with serving(home, host=host, allow_local_exec=True) as (url, _):
            port = url.rpartition(":")[2]
            own = [f"http://{name}:{port}/health" for name in SPELLINGS]
            calls = [Call("web_extract", {"urls": [place]}) for place in own]
            calls += [Call("vision_analyze", {"image_url": place, "question": "?"}) for place in own]
            calls.append(Call("web_extract", {"urls": [f"http://127.0.0.1:{other}/"]}))
            model.script = [Reply(tool_calls=calls), Reply(text="Done.")]
            await ask(url + prefix)
    *refused, reached = [turn.text for turn in model.requests[-1].turns if turn.role == "tool"]
    # A name or an address that is nothing here is refused as such.
    unknown = {place for place, text in zip(own * 2, refused, strict=True) if "'unresolvable'" in text}
    assert all(RULE in text for place, text in zip(own * 2, refused, strict=True) if place not in unknown), refused
    assert not unknown & set(own[:5]) and "elsewhere" in reached


async def test_mcp_server_cannot_be_own_server(home_folder: Path) -> None:
    home = Home(home_folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with ModelServer() as model:
        configure(home, model.url, mcp_servers={"self": {"url": f"http://localhost:{port}/v1/models"}})
        async with serving(home, port=port):
            app = await apps.current(home)
            state = await app.services.mcp.test("self", app.settings)
    assert state is not None and RULE in state["error"]
