"""A running server on a real socket, with a scripted model behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from hermes import app as apps
from hermes.app import App
from hermes.core import home
from hermes.server import readiness
from hermes.server.application import Runner, build
from hermes.server.compat import APIServerAdapter
from hermes.server.context import ServerContext
from hermes.server.settings import Platform, load_gateway_config
from support.model_server import ModelServer, Reply
from support.waiting import DEADLINE_S

KEY = "sk-server-0123456789abcdef0123456789"
PROVIDER_KEY = "sk-provider-0123456789abcdef"
Json = dict[str, Any]


@dataclass
class Api:
    """The server, a client that has its key, and the scripted model."""

    url: str
    client: aiohttp.ClientSession
    model: ModelServer
    adapter: APIServerAdapter
    context: ServerContext
    app: App

    def post(self, path: str, json: Any = None, **more: Any) -> Any:
        return self.client.post(self.url + path, json=json, **more)

    def get(self, path: str, **more: Any) -> Any:
        return self.client.get(self.url + path, **more)

    def patch(self, path: str, json: Any = None, **more: Any) -> Any:
        return self.client.patch(self.url + path, json=json, **more)

    def delete(self, path: str, **more: Any) -> Any:
        return self.client.delete(self.url + path, **more)

    async def ask(self, text: str, **fields: Any) -> Json:
        """The body of a successful chat completion."""
        body = {"messages": [{"role": "user", "content": text}], **fields}
        async with self.post("/v1/chat/completions", body) as response:
            assert response.status == 200, await response.text()
            payload: Json = await response.json()
            return payload


Start = Callable[..., Awaitable[Api]]


@pytest.fixture(autouse=True)
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is not a store out of reach."""
    monkeypatch.setattr(readiness, "CHECK_S_MAX", DEADLINE_S)


@pytest.fixture
async def start(home_folder: Path) -> AsyncIterator[Start]:
    """Starts servers; `key=""` starts one without authentication, `options` are settings below `api_server`."""
    running: list[Callable[[], Awaitable[Any]]] = []

    async def begin(
        *script: Reply, handler: Any = None, key: str = KEY, settings: Json | None = None, **options: Any
    ) -> Api:
        model = ModelServer(*script, handler=handler)
        await model.start()
        config = {
            "model": {"default": "test-model", "base_url": f"{model.url}/v1", "api_key": PROVIDER_KEY},
            "auxiliary": {"title_generation": {"enabled": False}},
            "agent": {"api_max_retries": 0},
            "api_server": {"key": key, **options},
            **(settings or {}),
        }
        home_folder.mkdir(exist_ok=True)
        (home_folder / "config.yaml").write_text(yaml.safe_dump(config))
        app = await apps.current(home.resolve())
        adapter = APIServerAdapter(load_gateway_config(app.settings).platforms[Platform.API_SERVER])
        adapter.context.attach(app)
        runner = Runner(build(adapter.context), shutdown_s=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = aiohttp.ClientSession(headers=headers)
        app.engine.start_background_tasks()
        running.extend((model.stop, app.close, runner.cleanup, client.close))
        return Api(f"http://127.0.0.1:{port}", client, model, adapter, adapter.context, app)

    yield begin
    while running:
        await running.pop()()


@pytest.fixture
async def api(start: Start) -> Api:
    """A server with a key; its model's script is empty at first: `api.model.script = [...]`."""
    return await start()
