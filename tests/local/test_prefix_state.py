"""What every conversation begins with: read once, kept in a private file, restored, and read again when that is bad."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from hermes import local
from hermes.core.home import Home
from hermes.http_client.client import HttpClient
from hermes.http_client.exchange import Timeouts
from hermes.local.client import LocalModel
from hermes.local.prefix_state import PrefixState
from hermes.providers import local_grammar
from hermes.providers.local import _offered
from hermes.settings import config
from local.test_translation import TOOLS

PREFIX = [
    {"role": "system", "content": "You count ships. " * 20},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Two."},
]


@pytest_asyncio.fixture
async def http(home: Home) -> AsyncIterator[HttpClient]:
    home.config_file.write_text("local: {context: 2048, threads: 1}\n")
    model = LocalModel(home, lambda: config.load(home))
    yield await model.ready(lambda code, message: None)
    await model.close()


def options(home: Home, **changes: Any) -> dict[str, Any]:
    path = str(home.models / "tiny.gguf")
    return {"path": path, "states": str(home.models), "parallel": 1, "context": 2048, "idle_seconds": 600, **changes}


async def reads(http: HttpClient, options: dict[str, Any]) -> int:
    """How often a new process of the home has to let the model read."""
    count: list[None] = []
    await PrefixState(options).prepare(http, PREFIX, lambda: count.append(None))
    return len(count)


async def ask(http: HttpClient, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = json.dumps({"messages": messages, "max_tokens": 1, "temperature": 0, **more}).encode()
    headers = {"Content-Type": "application/json"}
    async with http.send("POST", "http://local/v1/chat/completions", headers, body, Timeouts(300, 300)) as answer:
        data = json.loads(await answer.body())
        assert answer.status == 200, data
        return data  # type: ignore[no-any-return]


def files(home: Home) -> list[Path]:
    return sorted(home.models.glob("*.state"))


async def test_prefix_is_read_once_and_restored(http: HttpClient, home: Home) -> None:
    assert await reads(http, options(home)) == 1
    [file] = files(home)
    assert file.stat().st_mode & 0o777 == 0o600 and not list(home.models.glob("*.new"))
    await ask(http, [{"role": "user", "content": "Something else altogether, so that the cache is of no use."}])
    assert await reads(http, options(home)) == 0
    usage = (await ask(http, [*PREFIX, {"role": "user", "content": "And now?"}]))["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 12


async def test_bad_file_is_made_anew(http: HttpClient, home: Home) -> None:
    assert await reads(http, options(home)) == 1
    [file] = files(home)
    file.write_bytes(file.read_bytes()[:-100] + b"\0" * 100)
    assert await reads(http, options(home)) == 1 and not file.exists()
    [file] = files(home)
    assert await reads(http, options(home)) == 0
    file.chmod(0o644)
    assert await reads(http, options(home)) == 1
    [file] = files(home)
    file.rename(home.models / "other")
    file.symlink_to(home.models / "other")
    assert await reads(http, options(home)) == 1 and not file.is_symlink()


async def test_other_context_or_model_does_not_use_file(http: HttpClient, home: Home) -> None:
    assert await reads(http, options(home)) == 1
    assert await reads(http, options(home, context=1024)) == 1
    assert len(files(home)) == 2


async def test_folder_that_cannot_be_written_is_no_failure(http: HttpClient, home: Home) -> None:
    assert await reads(http, options(home, states="/proc/nowhere")) == 1
    assert files(home) == []


async def test_runtime_takes_grammar_of_all_tools(http: HttpClient) -> None:
    calls = [(name, schema) for name, (_, schema) in _offered(TOOLS).items()]
    for answer in ({"type": "string"}, {"type": "object", "properties": {"n": {"type": "integer"}}}, None):
        grammar = local_grammar.call_or_answer(calls, answer)
        data = await ask(http, [{"role": "user", "content": "Hi"}], grammar=grammar, max_tokens=24)
        assert data["choices"][0]["message"]["content"].startswith(('{"tool": "', '{"answer": '))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": '{"answer": "Hel'}]
    assert await ask(http, messages, grammar=local_grammar.REST_OF_ANSWER, max_tokens=8)


def test_profile_uses_model_of_default_home(tmp_path: Path) -> None:
    root = Home(tmp_path)
    profile = Home(tmp_path / "profiles" / "work", "work")
    settings = config.load(root)
    assert local.model_file(profile, settings) is None
    root.models.mkdir()
    shared = root.models / "a.gguf"
    shared.write_text("x")
    assert local.model_file(profile, settings) == shared and local.state_folder(profile, shared) == root.models
    profile.models.mkdir(parents=True)
    own = profile.models / "b.gguf"
    own.write_text("x")
    assert local.model_file(profile, settings) == own and local.state_folder(profile, own) == profile.models
    assert local.state_folder(profile, Path("/elsewhere/c.gguf")) == profile.models
