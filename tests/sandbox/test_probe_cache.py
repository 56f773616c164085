"""What a server found out about sandboxes is known only while nothing has changed that it depends on."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes.core.home import Home
from hermes.sandbox import probe_cache
from hermes.settings import config
from hermes.settings.config import Settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a home that can be written, and a folder on the path of programs."""
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/programs:{os.environ['PATH']}")
    return config.load(Home(tmp_path), environ={})


def cache(settings: Settings) -> Path:
    return settings.home.cache / "sandbox"


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "settings": lambda home, _: (home / "config.yaml").write_text("terminal: {backend: bubblewrap}\n"),
    "search path of programs": lambda _, patch: patch.setenv("PATH", "/nowhere"),
    "program for sandboxes": lambda home, _: (home / "programs/bwrap").touch(),
    "kernel": lambda _, patch: patch.setattr(os, "uname", lambda: os.uname_result(("", "", "9.9", "", ""))),
    "rule of the kernel": lambda _, patch: patch.setattr(probe_cache, "_RULES", ("kernel/ostype",)),
    "user": lambda _, patch: patch.setattr(os, "getuid", lambda: 12345),
    "another key": lambda home, _: (home / "cache/sandbox").write_text("another key\nbubblewrap"),
    "no text": lambda home, _: (home / "cache/sandbox").write_bytes(b"\xff\xfe\0"),
    "nothing": lambda home, _: (home / "cache/sandbox").write_bytes(b""),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_environment_invalidates_probe_cache(
    change: Callable[[Path, pytest.MonkeyPatch], object], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_cache.remember(settings, "bubblewrap")
    change(settings.home.path, monkeypatch)
    assert probe_cache.known(config.load(settings.home, environ={})) is None


def test_it_is_known_from_a_private_file(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    probe_cache.remember(settings, "bubblewrap")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    monkeypatch.chdir(settings.home.path)
    assert probe_cache.known(settings) == "bubblewrap" and stat.S_IMODE(cache(settings).stat().st_mode) == 0o600


def test_a_sandbox_that_does_not_work_is_tried_again(settings: Settings) -> None:
    probe_cache.remember(settings, "local (there is no bwrap)")
    assert probe_cache.known(settings) is None


def test_unwritable_home_does_not_fail(settings: Settings) -> None:
    settings.home.cache.write_text("in the way")
    probe_cache.remember(settings, "bubblewrap")
    assert probe_cache.known(settings) is None
