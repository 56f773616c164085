"""Codex CLI with its defaults: each set of tools that it has for a model, over HTTP and over its WebSocket."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import pytest

from clients.drivers.codex_cli import Codex
from clients.scenes import HELLO, REFUSAL, SCENES
from clients.server import Hermes, running
from support.model_server import Call, Reply, Request

PATCH = "*** Begin Patch\n*** Add File: poem.txt\n+Roses are red.\n*** End Patch\n"
COMMAND = "echo violets > out.txt && cat out.txt"


# ---- the model


def _tools(request: Request) -> set[str]:
    return {tool["function"]["name"] for tool in request.body.get("tools") or ()}


def _once(call: Callable[[set[str]], Call]) -> Callable[[Request], Reply]:
    """Call a tool of those that there are, and repeat what it says."""

    def reply(request: Request) -> Reply:
        if request.turns[-1].role == "tool":
            return Reply(text=f"Result: {request.turns[-1].text}", continues=False)
        return Reply(tool_calls=[call(_tools(request))], continues=False)

    return reply


def _run(tools: set[str]) -> Call:
    if "functions__exec" in tools:
        code = f"text(await tools.exec_command({{cmd: {json.dumps(COMMAND)}}}))"
        return Call("functions__exec", {"input": code})
    return Call("exec_command", {"cmd": COMMAND})


def _patch(tools: set[str]) -> Call:
    if "functions__exec" in tools:
        return Call("functions__exec", {"input": f"text(await tools.apply_patch({json.dumps(PATCH)}))"})
    if "apply_patch" in tools:
        return Call("apply_patch", {"input": PATCH})
    return Call("exec_command", {"cmd": f"apply_patch <<'EOF'\n{PATCH}EOF"})


SCENES |= {
    "run a command": _once(_run),
    "write a poem": _once(_patch),
    "search the web": _once(lambda _: Call("web_search", {"query": "roses"})),
}


# ---- the server, and what it searches with


class _Search(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        results = [{"title": "Roses", "url": "https://roses.example/", "content": "Roses are red."}]
        body = json.dumps({"results": results}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hermes]:
    engine = ThreadingHTTPServer(("127.0.0.1", 0), _Search)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{engine.server_port}"
    with running(tmp_path_factory.mktemp("home"), SEARXNG_URL=url) as server:
        yield server
    engine.shutdown()


# Codex knows the first two and has other tools for each; what it does not know is used as any model is.
MODELS = {"default": None, "gpt-5.5": "gpt-5.5", "hermes-agent": "hermes-agent"}


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def model(request: pytest.FixtureRequest) -> str | None:
    name: str | None = request.param
    return name


@pytest.fixture(params=[False, True], ids=["http", "websocket"])
def websockets(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def codex(websockets: bool, hermes: Hermes, model: str | None, tmp_path: Path) -> Iterator[Codex]:
    before = _posts(hermes)
    yield Codex(tmp_path, hermes.url, hermes.key, model=model, websockets=websockets)
    # Where the socket fails, Codex tries HTTP without a word.
    assert (_posts(hermes) == before) is websockets


def _posts(hermes: Hermes) -> float:
    """How many responses were asked for over HTTP."""
    address = hermes.url.removesuffix("/v1") + "/metrics"
    request = HttpRequest(address, headers={"Authorization": f"Bearer {hermes.key}"})
    with urlopen(request) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if 'method="POST",route="/v1/responses"' in line)


# ---- flows


@pytest.mark.parametrize("model", ["hermes-agent"], indirect=True)
def test_turn_and_resume(hermes: Hermes, codex: Codex) -> None:
    before = len(hermes.model.requests)
    first = codex.ask("say hello")
    assert first.text == "".join(HELLO), first
    assert len(hermes.model.requests) == before + 1
    assert "Codex" in hermes.model.requests[-1].turns[0].text
    assert codex.ask("think, then say hello", resume=True).text == "".join(HELLO)
    messages = [(turn.role, turn.text) for turn in hermes.model.requests[-1].turns]
    place = messages.index(("user", "say hello"))
    assert messages[place + 1] == ("assistant", "".join(HELLO))
    assert messages[-1] == ("user", "think, then say hello")


def test_command_runs_on_client_machine(codex: Codex) -> None:
    answer = codex.ask("run a command")
    assert "violets" in answer.text, answer
    assert (codex.project / "out.txt").read_text() == "violets\n"


over_socket = pytest.mark.parametrize("websockets", [True], indirect=True, ids=["websocket"])


@over_socket
def test_patch_is_applied_on_client_machine(codex: Codex) -> None:
    answer = codex.ask("write a poem")
    assert (codex.project / "poem.txt").read_text() == "Roses are red.\n", answer
    assert answer.items("file_change"), answer


@over_socket
def test_web_search_runs_on_server(codex: Codex, model: str | None) -> None:
    answer = codex.ask("search the web")
    assert "Roses are red." in answer.text, answer
    if model is not None:  # with its default model Codex does not ask for a search by the server
        assert [item["query"] for item in answer.items("web_search")] == ["roses"]


@pytest.mark.parametrize("model", ["hermes-agent"], indirect=True)
def test_failure_is_reported(codex: Codex) -> None:
    answer = codex.ask("be refused")
    failed = [event for event in answer.events if event["type"] == "turn.failed"]
    assert REFUSAL in str(failed), answer
