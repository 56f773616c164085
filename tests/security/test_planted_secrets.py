"""Secrets planted wherever Hermes may come across them: none is in anything that leaves it, or that it keeps."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web

from guards.stage import WORLD, Stage, serving
from hermes.core.home import Home
from hermes.logs import logging_to
from hermes.sandbox import bubblewrap
from server.conftest import KEY, PROVIDER_KEY, Api, Start, start
from support.model_server import Call, Reply, Request

pytest.importorskip("mcp")
__all__ = ["start"]

_STEM = "q7Xp2"
# Values that Hermes knows, by where it knows them from.
ENVIRONMENT = {
    name: f"{_STEM}-env-{name.lower()}-0123456789"
    for name in ("OPENAI_API_KEY", "BRAVE_SEARCH_API_KEY", "TAVILY_API_KEY", "GITHUB_TOKEN", "CUSTOM_VARIABLE")
}
DOTENV = {
    "GROQ_API_KEY": f"{_STEM}-dot-groq-0123456789",
    "SOME_PHRASE": f'{_STEM} "dot" \\ a/b+c=d & ü-0123',
    "LONG": f"{_STEM}-long-" + "0123456789" * 8,
}
NAMED = {
    name: f"{_STEM}-set-{name}-0123456789"
    for name in [
        "provider",
        "keys",
        "header",
        "extra",
        "fallback",
        "second",
        "route",
        "mcp_env",
        "mcp_header",
        "auth",
        "refresh",
    ]
}
KNOWN = {**ENVIRONMENT, **DOTENV, **NAMED, "server": KEY, "model": PROVIDER_KEY}
# What nobody has told Hermes of: known by its shape.
SHAPED = {
    "github": "ghp_" + "Zq8Yw2Xe4Rt6" * 3,
    "password": "hunter2-hunter2-" + _STEM,
    "key": "MIIEvQIBADANBgkqhkiG9w0B" + _STEM,
}
SHAPES = (
    f"token {SHAPED['github']}\npassword = {SHAPED['password']}\n"
    f"-----BEGIN PRIVATE KEY-----\n{SHAPED['key']}\n-----END PRIVATE KEY-----\n"
)
_WORDS = "canine heron quartz violet"


def _settings(telling: Path) -> dict[str, Any]:
    spare = {"base_url": "http://127.0.0.1:9/v1", "api_key": NAMED["provider"], "keys": [NAMED["keys"]]}
    spare |= {"headers": {"X-Team": NAMED["header"]}, "extra_body": {"user_token": NAMED["extra"]}}
    server = {"command": sys.executable, "args": [str(Path(__file__).with_name("telling.py")), str(telling)]}
    far = {"url": "http://127.0.0.1:9/mcp", "headers": {"Authorization": f"Bearer {NAMED['mcp_header']}"}}
    return {
        "providers": {"spare": spare, "named": {"base_url": "http://127.0.0.1:9/v1", "key_env": "CUSTOM_VARIABLE"}},
        "fallback_providers": [{"model": "m", "base_url": "http://127.0.0.1:9/v1", "api_key": NAMED["fallback"]}],
        "mcp_servers": {"telling": {**server, "env": {"PASS": NAMED["mcp_env"]}}, "far": far},
        "mcp_discovery_timeout": 30,
        "terminal": {"backend": "local" if bubblewrap.probe() else "bubblewrap"},
        "approvals": {"mode": "off"},
        "logging": {"level": "DEBUG"},
    }


def _forms(value: str) -> Iterator[bytes]:
    """A value as it is, in JSON, in URLs, and in Base64 wherever in a text it may begin."""
    data = value.encode()
    yield from (data, json.dumps(value)[1:-1].encode(), quote(value, safe="").encode(), quote(value).encode())
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):
            yield encode(b"\0" * shift + data)[-(-shift * 4 // 3) : (shift + len(data)) * 4 // 3]


def leaks(data: bytes, also: Iterable[str] = SHAPED.values()) -> set[str]:
    """The secrets that some bytes hold."""
    names = {name for name, value in KNOWN.items() if any(form in data for form in _forms(value))}
    return names | {value for value in also if value.encode() in data}


def test_leak_detector_finds_every_encoding() -> None:
    """Every encoding of a planted secret is found, and nothing else."""
    for name, value in KNOWN.items():
        for form in _forms(value):
            assert name in leaks(b"before " + form + b" after")
        assert name in leaks(base64.b64encode(f"{name}={value}\n".encode()))
    assert leaks(f"x{_STEM} [redacted] {quote(_WORDS)}".encode()) == set()


class Planted:
    """The workspace and the world outside, full of secrets, and calls that go for them."""

    def __init__(self, home: Path) -> None:
        self.workspace = home / "workspace"
        self.lines = "\n".join(KNOWN.values())
        self.workspace.mkdir(parents=True)
        (self.workspace / "known.txt").write_text(f"first\n{self.lines}\nlast\n")
        (self.workspace / "shapes.txt").write_text(f"first\n{SHAPES}last\n")
        names = "\n".join(f"{name}={json.dumps(value)}" for name, value in DOTENV.items() if '"' not in value)
        phrase = DOTENV["SOME_PHRASE"]
        (home / ".env").write_text(f"{names}\nSOME_PHRASE='{phrase}'\n")
        (home / "auth.json").write_text(
            json.dumps({"tokens": {"access_token": NAMED["auth"], "refresh_token": NAMED["refresh"]}, "kind": "device"})
        )

    def steps(self) -> list[list[Call]]:
        """The calls of a turn, message by message."""
        value, phrase = KNOWN["provider"], KNOWN["SOME_PHRASE"]
        url = "import sys, urllib.parse as u; [print(u.quote(line.strip(), safe='')) for line in sys.stdin]"
        many = "i=0; while [ $i -lt 40 ]; do cat known.txt shapes.txt; base64 -w0 known.txt; i=$((i+1)); done"
        code = "import base64; t = open('known.txt').read(); print(t, base64.b64encode(t.encode()), repr(t)); 1 / 0"
        tools = (
            "from hermes_tools import read_file, terminal\n"
            f"print(read_file('known.txt'), terminal('cat known.txt; echo {value}'))"
        )
        commands = [
            "env; cat /proc/self/environ /proc/$PPID/environ", "cat known.txt", "cat shapes.txt", "base64 -w0 known.txt",
            f"python3 -c {json.dumps(url)} < known.txt", f"echo {value}; echo {value} | base64; false",
            "while read -r l; do printf %s \"$l\" | base64 -w0; echo; done < known.txt", many,
            f"cat {value}/none; ls --{value}", "sed 's/./&\\n/40' known.txt | paste -sd ''",
        ]  # fmt: skip
        reading = [
            Call("read_file", {"path": "known.txt"}), Call("read_file", {"path": "shapes.txt"}),
            Call("read_file", {"path": f"{value}.txt"}), Call("search_files", {"pattern": _STEM, "context": 3}),
            Call("search_files", {"pattern": value}), Call("search_files", {"pattern": "password", "context": 5}),
            Call("web_extract", {"urls": ["http://page.test/", "http://page.test/long", f"http://page.test/{value}"]}),
            Call("web_search", {"query": value}), Call("session_search", {"query": value}),
            Call("mcp_telling_tell", {}), Call("mcp_telling_table", {}), Call("mcp_telling_fail", {}),
        ]  # fmt: skip
        writing = [
            Call("patch", {"mode": "replace", "path": "known.txt", "old_string": "first", "new_string": "1st"}),
            Call("patch", {"mode": "replace", "path": "shapes.txt", "old_string": "last", "new_string": "end"}),
            Call("write_file", {"path": "new.txt", "content": f"{value}\n{phrase}\n"}),
            Call("todo", {"todos": [{"id": "1", "content": phrase, "status": "pending"}]}),
            Call("memory", {"target": "memory", "action": "add", "content": f"The key is {value}."}),
            Call("skill_manage", {"action": "create", "name": "x", "content": f"---\nname: x\ndescription: {value}\n---\n"}),
            Call("cronjob", {"action": "create", "schedule": "1d", "prompt": f"Use {value}.", "name": "x"}),
            Call("no_such_tool", {value: phrase}), Call("terminal", {"wrong": value, value: 1}),
        ]  # fmt: skip
        running = [Call("execute_code", {"code": code}), Call("execute_code", {"code": tools})]
        return [[Call("terminal", {"command": text}) for text in commands], reading, running, writing]

    def replies(self) -> list[Reply]:
        text = [f"It is {KNOWN['provider'][:9]}", KNOWN["provider"][9:], f" or {KNOWN['model']}, {_WORDS}."]
        return [*(Reply(tool_calls=calls) for calls in self.steps()), Reply(text=text, reasoning=text)]

    async def page(self, request: web.Request) -> web.StreamResponse:
        text = f"<title>{KNOWN['provider']}</title><p>{self.lines}<pre>{SHAPES}</pre>".replace("\n", "\n<p>")
        return web.Response(text=text * (40 if request.path == "/long" else 1), content_type="text/html")


class Client:
    """All that a client of the server ever got."""

    def __init__(self, api: Api) -> None:
        self.api, self.bodies = api, list[bytes]()

    async def post(self, path: str, body: Any) -> bytes:
        async with self.api.post(path, body) as response:
            return await self._kept(path, response)

    async def get(self, path: str) -> bytes:
        async with self.api.get(path) as response:
            return await self._kept(path, response)

    async def _kept(self, path: str, response: Any) -> bytes:
        body: bytes = await response.read()
        self.bodies.append(f"{response.status} {response.headers}\n".encode() + body)
        return body


async def _every_way(client: Client, planted: Planted) -> None:
    """A turn on every surface, and what the server tells of it afterwards."""
    model, ask = client.api.model, {"messages": [{"role": "user", "content": "Go."}]}
    surfaces: list[tuple[str, Any]] = [
        ("/v1/chat/completions", ask),
        ("/v1/chat/completions", {**ask, "stream": True}),
        ("/v1/responses", {"input": "Go."}),
        ("/v1/responses", {"input": "Go.", "stream": True}),
        ("/api/sessions", {"id": "hall"}),
        ("/api/sessions/hall/chat/stream", {"message": "Go."}),
        ("/v1/runs", {"input": "Go.", "session_id": "other"}),
    ]
    for path, body in surfaces:
        model.script = planted.replies() if path != "/api/sessions" else []
        answer = await client.post(path, body)
        if path == "/v1/runs":
            run_id = json.loads(answer)["run_id"]
            await client.get(f"/v1/runs/{run_id}/events")
            await client.get(f"/v1/runs/{run_id}")
        assert model.script == [], (path, answer[-2000:])
    # A provider that says the key in its error, as text and as a page.
    for reply in (Reply(status=401, quote_key=True), Reply(status=403, raw=f"<p>{PROVIDER_KEY} is not known</p>")):
        model.script = [reply]
        await client.post("/v1/chat/completions", {**ask, "stream": True})
        model.script = [reply]
        await client.post("/v1/responses", {"input": "Go."})
    reads = "/health/detailed /v1/models /v1/capabilities /v1/toolsets /v1/skills /v1/runs /api/sessions /metrics"
    for path in [*reads.split(), "/api/sessions/hall/messages", "/api/sessions/other/messages", "/api/jobs"]:
        await client.get(path)
    for run in json.loads(await client.get("/v1/runs?limit=50")).get("data", []):
        await client.get(f"/v1/runs/{run.get('run_id') or run['id']}/events")
    await client.get(f"/v1/models/{quote(KNOWN['provider'])}")
    await client.post("/v1/chat/completions", {**ask, "model": KNOWN["provider"], "temperature": KNOWN["provider"]})


def _received(requests: Iterable[Request]) -> Iterator[tuple[str, bytes]]:
    for request in requests:
        yield f"request {request.number} to the model", json.dumps(request.body, ensure_ascii=False).encode()


def _kept(home: Path) -> Iterator[tuple[str, bytes]]:
    """Every file of the home but those that the secrets were planted in."""
    own = {home / "config.yaml", home / ".env", home / "auth.json", home / "workspace/new.txt"}
    own |= {home / "workspace" / name for name in ("known.txt", "shapes.txt")}
    for path in sorted(home.rglob("*")):
        if path.is_file() and path not in own:
            yield str(path.relative_to(home)), path.read_bytes()


async def test_no_planted_secret_leaks(
    start: Start,
    home_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    planted = Planted(home_folder)
    telling = tmp_path / "telling.txt"
    telling.write_text(f"{planted.lines}\n\n{SHAPES}")
    second = [{"name": "second", "key": NAMED["second"]}]
    routes = {"aside": {"model": "m", "base_url": "http://127.0.0.1:9/v1", "api_key": NAMED["route"]}}
    api = await start(settings=_settings(telling), keys=second, model_routes=routes)
    client = Client(api)
    async with serving(planted.page) as port:
        stage = Stage(api.app.services.files)
        stage.answers, stage.servers = {"page.test": [[WORLD]]}, {WORLD: port}
        api.app.services.outside.network = stage
        with logging_to(Home(home_folder), api.app.settings, verbose=True):
            await _every_way(client, planted)
    data = "".join(capfd.readouterr()).encode()
    places = [(f"answer {number}", data) for number, data in enumerate(client.bodies)]
    places += [*_received(api.model.requests), *_kept(home_folder), ("standard output and error", data)]
    assert {where: leaked for where, data in places if (leaked := leaks(data))} == {}
    # All of it was there to be seen: what is told of the files without their secrets, in every kind of place.
    everything = b"".join(data for _, data in places)
    assert everything.count("«redacted:known»".encode()) > 100 and everything.count(b"[redacted]") > 1000
    assert {"state.db", "logs/agent.log"} <= {where for where, _ in places}
    assert any(where.startswith("cache/tool_results/") for where, _ in places)


async def test_client_tool_arguments_contain_no_server_key(start: Start, home_folder: Path) -> None:
    other = "sk-other-0123456789abcdef"
    call = Call("lights", json.dumps({"k": f"{PROVIDER_KEY} {KEY} {other}", KEY: ["on"]}), id="call_1")
    keys = [{"name": "other", "key": other, "scopes": ["chat"]}]
    api = await start(handler=lambda request: Reply(tool_calls=[call]), keys=keys)
    function = {"name": "lights", "parameters": {"type": "object"}}
    chat = {"messages": [{"role": "user", "content": "q"}], "tools": [{"type": "function", "function": function}]}
    response = {"input": "q", "tools": [{"type": "function", **function}]}
    contents = []
    for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
        for stream in (False, True):
            async with api.post(path, {**body, "stream": stream}) as answer:
                assert answer.status == 200
                contents.append(await answer.read())
    assert all(b"lights" in data for data in contents)
    for where, data in (*(("answer", data) for data in contents), *_kept(home_folder)):
        assert not any(key.encode() in data for key in (PROVIDER_KEY, KEY, other)) or where.endswith("config.yaml")
