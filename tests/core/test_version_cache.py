"""What `hermes --version` told is told again only while nothing has changed that it depends on."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hermes
from hermes.core import version_cache

SETTINGS = "terminal: {backend: local}\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose version can be remembered, and a folder on the path of packages and one on that of programs."""
    for name in list(os.environ):
        if name.startswith("HERMES_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    for path in (folder / "profiles/work", folder / "cache", tmp_path / "packages", tmp_path / "programs"):
        path.mkdir(parents=True)
    (folder / "config.yaml").write_text(SETTINGS + "storage: {url: 'sqlite:///${WHERE}/state.db'}\n")
    monkeypatch.setenv("HERMES_HOME", str(folder))
    monkeypatch.setenv("WHERE", "/here")
    monkeypatch.setenv("PATH", f"{tmp_path}/programs:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "packages")])
    return folder


def told(**env: str) -> list[str]:
    """The lines of the command, in a process of its own."""
    command = [sys.executable, "-m", "hermes", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **env})
    return done.stdout.splitlines()


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "settings": lambda home, _: (home / "config.yaml").write_text(SETTINGS),
    "no settings": lambda home, _: (home / "config.yaml").unlink(),
    "variables in .env": lambda home, _: (home / ".env").write_text("HERMES_DATABASE_URL=sqlite:////x.db\n"),
    "profile that was chosen": lambda home, _: (home / "active_profile").write_text("work\n"),
    "profile of this call": lambda _, patch: patch.setenv("HERMES_PROFILE", "work"),
    "variable that is a setting": lambda _, patch: patch.setenv("HERMES_DATABASE_URL", "sqlite:////x.db"),
    "variable that a setting names": lambda _, patch: patch.setenv("WHERE", "/there"),
    "that variable gone": lambda _, patch: patch.delenv("WHERE"),
    "sandbox that a server found": lambda home, _: (home / "cache/sandbox").write_text("key\nbubblewrap"),
    "version": lambda _, patch: patch.setattr(hermes, "__version__", "99"),
    "Python": lambda _, patch: patch.setattr(sys, "version", "4.0"),
    "search path of packages": lambda _, patch: patch.setattr(sys, "path", sys.path[:-1]),
    "package installed": lambda home, _: (home.parent / "packages/xllamacpp-1.dist-info").mkdir(),
    "search path of programs": lambda _, patch: patch.setenv("PATH", "/nowhere"),
    "program for sandboxes": lambda home, _: (home.parent / "programs/bwrap").touch(),
    "kernel": lambda _, patch: patch.setattr(os, "uname", lambda: os.uname_result(("", "", "9.9", "", ""))),
    "user": lambda _, patch: patch.setattr(os, "getuid", lambda: 12345),
    "rule of the kernel": lambda home, patch: patch.setattr(version_cache, "_RULES", ("kernel/ostype",)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_it_depends_on_changes_its_key(
    change: Callable[[Path, pytest.MonkeyPatch], object], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = version_cache.version()[2]
    assert version_cache.version()[2] == before
    change(home, monkeypatch)
    assert version_cache.version()[2] != before


def test_what_it_does_not_depend_on_does_not(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = version_cache.version()
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    monkeypatch.chdir(home)
    (home / "config.yaml").write_bytes((home / "config.yaml").read_bytes())
    assert version_cache.version() == before


def test_it_is_told_again_from_a_private_file_and_never_stale(home: Path) -> None:
    first, file = told(), home / "cache/version"
    assert f"store {'sqlite:////here/state.db'}" in first and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "/here" not in file.read_text().partition("\n")[0], "the key tells nothing of what is in it"
    file.write_text(file.read_text().replace("profile default", "profile remembered"))
    assert "profile remembered" in told()
    assert "store sqlite:////there/state.db" in told(WHERE="/there")
    (home / "active_profile").write_text("work\n")
    assert "profile work" in told()
    (home / "active_profile").unlink()
    assert told() == first


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\0", b"another key\nprofile remembered\n"], ids=repr)
def test_a_file_that_is_not_ours_to_read_is_ignored(home: Path, content: bytes) -> None:
    (home / "cache/version").write_bytes(content)
    assert "profile default" in told()
    (home / "cache/version").unlink()
    (home / "cache/version").mkdir()
    assert "profile default" in told()


def test_a_file_of_another_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("key\ntext")
    assert version_cache.known(str(tmp_path / "file"), "key") == "text"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert version_cache.known(str(tmp_path / "file"), "key") is None


def test_a_home_that_cannot_be_written_is_told_of_all_the_same(home: Path) -> None:
    (home / "cache").rmdir()
    (home / "cache").write_text("in the way")
    assert "profile default" in told()


def test_a_sandbox_that_does_not_work_is_tried_again(home: Path) -> None:
    from hermes.core.home import Home
    from hermes.sandbox.remembered import remember
    from hermes.sandbox.remembered import told as known
    from hermes.settings import config

    settings = config.load(Home(home))
    remember(settings, "bubblewrap")
    assert known(settings) == "bubblewrap"
    remember(settings, "local (there is no bwrap)")
    assert known(settings) is None
