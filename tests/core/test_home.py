"""The home folder: which one, private whatever the umask, written in one step; profiles as whole homes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes.core import home as homes
from hermes.core.errors import HermesError
from hermes.core.home import Home, ProfileBusy, ProfileError, ProfileNotFound
from hermes.settings import profiles


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "hermes"


@pytest.fixture
def home(root: Path) -> Home:
    return Home(root)


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


# ---- which home


def with_profiles(root: Path, *names: str) -> None:
    for name in names:
        (root / "profiles" / name).mkdir(parents=True)


def test_home_from_hermes_home(root: Path) -> None:
    assert homes.resolve(environ={"HERMES_HOME": str(root)}) == Home(root)


def test_default_home_is_in_user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert homes.resolve(environ={}).path == tmp_path / ".hermes"


def test_tilde_in_hermes_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert homes.resolve(environ={"HERMES_HOME": "~/h"}).path == tmp_path / "h"


def test_resolving_home_creates_nothing(root: Path) -> None:
    homes.resolve(environ={"HERMES_HOME": str(root)})
    assert not root.exists()


@pytest.mark.parametrize(
    ("flag", "inside", "variable", "sticky", "chosen"),
    [
        ("a", "b", "c", "d", "a"),
        (None, "b", "c", "d", "b"),
        (None, None, "c", "d", "c"),
        (None, None, None, "d", "d"),
        (None, None, None, None, "default"),
        ("default", "b", "c", "d", "default"),
        (None, None, "default", "d", "default"),
    ],
)
def test_profile_selection_precedence(
    root: Path, flag: str | None, inside: str | None, variable: str | None, sticky: str | None, chosen: str
) -> None:
    with_profiles(root, "a", "b", "c", "d")
    environ = {"HERMES_HOME": str(root / "profiles" / inside if inside else root)}
    if variable:
        environ["HERMES_PROFILE"] = variable
    if sticky:
        (root / "active_profile").write_text(f"{sticky}\n")
    resolved = homes.resolve(flag, environ)
    assert (resolved.profile, resolved.path) == (chosen, root if chosen == "default" else root / "profiles" / chosen)


def test_profile_knows_its_root(root: Path) -> None:
    with_profiles(root, "work")
    assert homes.resolve("work", {"HERMES_HOME": str(root)}).root == root


@pytest.mark.parametrize("source", ["flag", "home", "variable", "sticky"])
def test_missing_profile_is_an_error_and_not_created(root: Path, source: str) -> None:
    root.mkdir()
    environ = {"HERMES_HOME": str(root)}
    if source == "home":
        environ["HERMES_HOME"] = str(root / "profiles" / "gone")
    if source == "variable":
        environ["HERMES_PROFILE"] = "gone"
    if source == "sticky":
        (root / "active_profile").write_text("gone")
    with pytest.raises(ProfileNotFound, match="no profile 'gone'"):
        homes.resolve("gone" if source == "flag" else None, environ)
    assert not (root / "profiles").exists()


def test_missing_sticky_profile_error_has_hint(root: Path) -> None:
    root.mkdir()
    (root / "active_profile").write_text("gone")
    with pytest.raises(ProfileNotFound) as caught:
        homes.resolve(environ={"HERMES_HOME": str(root)})
    assert str(caught.value).endswith("Try: hermes -p default profile use default")


@pytest.mark.parametrize("name", ["", "Work", "-a", "_a", "a b", "../x", "a/b", "ä", "a" * 65, "a\n"])
def test_invalid_profile_name_is_rejected(root: Path, name: str) -> None:
    with pytest.raises(ProfileError) as caught:
        homes.resolve(name, {"HERMES_HOME": str(root)})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["a", "0", "a-b_c", "a" * 64])
def test_valid_profile_name_is_accepted(home: Home, name: str) -> None:
    assert profiles.create_profile(home, name).path.is_dir()


def test_active_profile_name_follows_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_profiles(root, "work")
    monkeypatch.setenv("HERMES_HOME", str(root))
    monkeypatch.delenv("HERMES_PROFILE", raising=False)
    before = homes.get_active_profile_name()
    monkeypatch.setenv("HERMES_PROFILE", "work")
    assert (before, homes.get_active_profile_name()) == ("default", "work")


def test_unresolvable_user_home_names_hermes_home(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HermesError, match="HERMES_HOME"):
        homes.resolve(environ={"HERMES_HOME": "~no-such-user-here/x"})


def test_home_paths(home: Home) -> None:
    assert home.config_file == home.path / "config.yaml"
    assert home.tool_results == home.path / "cache" / "tool_results"


# ---- private files


def test_written_file_is_private_under_any_umask(home: Home, umask: int) -> None:
    homes.write_private(home.env_file, "A=1\n")
    assert (mode(home.env_file), home.env_file.read_text()) == (0o600, "A=1\n")


def test_created_folders_are_private_under_any_umask(home: Home, umask: int) -> None:
    homes.write_private(home.memories / "scopes" / "x" / "MEMORY.md", "m")
    assert [mode(p) for p in (home.path, home.memories, home.memories / "scopes")] == [0o700] * 3


def test_private_opener_creates_private_file(tmp_path: Path, umask: int) -> None:
    with open(tmp_path / "log", "a", opener=homes.private_opener) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600


def test_private_opener_keeps_existing_content(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\n")
    with open(tmp_path / "log", "a", opener=homes.private_opener) as file:
        file.write("two\n")
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_content_is_never_in_a_readable_file(home: Home, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    modes: list[int] = []
    sync = os.fsync

    def watched(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        sync(fd)

    change = os.chmod

    def folders_only(path: Path, mode: int) -> None:
        assert path.is_dir(), "changed after the fact"
        change(path, mode)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(os, "chmod", folders_only)
    homes.write_private(home.env_file, "A=1\n")
    assert modes == [0o600]


def test_replaced_file_becomes_private(home: Home) -> None:
    home.path.mkdir()
    home.env_file.write_text("A=1")
    home.env_file.chmod(0o644)
    homes.write_private(home.env_file, b"A=2")
    assert mode(home.env_file) == 0o600


def test_write_private_keeps_symbolic_link(home: Home, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "config.yaml"
    homes.write_private(real, "a: 1")
    home.path.mkdir()
    home.config_file.symlink_to(real)
    homes.write_private(home.config_file, "a: 2")
    assert (home.config_file.is_symlink(), real.read_text()) == (True, "a: 2")


def test_failed_write_keeps_old_file_and_no_draft(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    homes.write_private(home.env_file, "old")

    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        homes.write_private(home.env_file, "new")
    assert {p.name: p.read_text() for p in home.path.iterdir()} == {".env": "old"}


def test_write_private_is_atomic_for_readers(home: Home) -> None:
    texts = [letter * 100_000 for letter in "ab"]
    homes.write_private(home.config_file, texts[0])
    finished = threading.Event()

    def write() -> None:
        for i in range(60):
            homes.write_private(home.config_file, texts[i % 2])
        finished.set()

    writer = threading.Thread(target=write)
    writer.start()
    observed = {home.config_file.read_text()}
    while not finished.is_set():
        observed.add(home.config_file.read_text())
    writer.join()
    assert observed <= set(texts)


def test_folder_lock_is_exclusive(home: Home) -> None:
    homes.write_private(home.config_file, "0")

    def add() -> None:
        for _ in range(25):
            with homes.locked(home.path):
                homes.write_private(home.config_file, str(int(home.config_file.read_text()) + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert home.config_file.read_text() == "100"


def test_tighten_fixes_and_reports_loose_modes(home: Home) -> None:
    homes.write_private(home.logs / "agent.log", "")
    home.path.chmod(0o755)
    (home.logs / "agent.log").chmod(0o644)
    changes = homes.tighten(home)
    assert changes == [(home.path, 0o755, 0o700), (home.logs / "agent.log", 0o644, 0o600)]
    assert (mode(home.path), mode(home.logs / "agent.log")) == (0o700, 0o600)


def test_tighten_keeps_scripts_executable(home: Home) -> None:
    homes.write_private(home.skills / "a" / "run.sh", "", executable=True)
    (home.skills / "a" / "run.sh").chmod(0o755)
    homes.tighten(home)
    assert mode(home.skills / "a" / "run.sh") == 0o700


def test_tighten_skips_workspace_content(home: Home) -> None:
    homes.write_private(home.workspace / "page.html", "")
    home.workspace.chmod(0o755)
    (home.workspace / "page.html").chmod(0o644)
    assert homes.tighten(home) == [(home.workspace, 0o755, 0o700)]


def test_tighten_does_not_follow_links(home: Home, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("")
    outside.chmod(0o644)
    home.path.mkdir(mode=0o700)
    (home.path / "link").symlink_to(outside)
    assert (homes.tighten(home), mode(outside)) == ([], 0o644)


def test_tighten_of_missing_home_creates_nothing(home: Home) -> None:
    assert (homes.tighten(home), home.path.exists()) == ([], False)


# ---- profiles


def fill_home(home: Home) -> Home:
    homes.write_private(home.config_file, "agent:\n  max_turns: 7\nmodel:\n  api_key: sk-inline-secret\n")
    homes.write_private(home.env_file, "API_SERVER_KEY=sk-env-secret\n")
    homes.write_private(home.memories / "MEMORY.md", "likes tea")
    homes.write_private(home.skills / "x" / "y" / "SKILL.md", "how")
    homes.write_private(home.skills / "x" / "y" / "run.sh", "#!/bin/sh", executable=True)
    homes.write_private(home.state_db, "sessions")
    return home


def everything(folder: Path) -> str:
    return "".join(p.read_text() for p in sorted(folder.rglob("*")) if p.is_file())


def test_new_profile_is_empty_private_folder(home: Home, umask: int) -> None:
    profile = profiles.create_profile(home, "work")
    assert (mode(profile.path), list(profile.path.iterdir())) == (0o700, [])


def test_cloned_profile_has_settings_memory_and_skills(home: Home) -> None:
    profile = profiles.create_profile(fill_home(home), "work", clone=True)
    assert profile.config_file.read_text().startswith("agent:\n  max_turns: 7\n")
    assert (profile.memories / "MEMORY.md").read_text() == "likes tea"
    assert mode(profile.skills / "x" / "y" / "run.sh") == 0o700


def test_cloned_profile_has_no_sessions_or_secrets(home: Home) -> None:
    profile = profiles.create_profile(fill_home(home), "work", clone=True)
    assert not profile.state_db.exists()
    assert not profile.env_file.exists()
    assert "secret" not in everything(profile.path)


def test_cloned_profile_with_secrets(home: Home) -> None:
    profile = profiles.create_profile(fill_home(home), "work", clone=True, with_secrets=True)
    assert profile.env_file.read_text() == "API_SERVER_KEY=sk-env-secret\n"
    assert "sk-inline-secret" in profile.config_file.read_text()


def test_cloned_profile_is_private_under_any_umask(home: Home, umask: int) -> None:
    profile = profiles.create_profile(fill_home(home), "work", clone=True, with_secrets=True)
    assert {mode(p) & 0o077 for p in [profile.path, *profile.path.rglob("*")]} == {0}


def test_cloned_profile_copies_linked_files(home: Home, tmp_path: Path) -> None:
    (tmp_path / "shared.md").write_text("shared")
    homes.make_private_folder(home.memories)
    (home.memories / "USER.md").symlink_to(tmp_path / "shared.md")
    profile = profiles.create_profile(home, "work", clone=True)
    assert ((profile.memories / "USER.md").is_symlink(), (profile.memories / "USER.md").read_text()) == (
        False,
        "shared",
    )


def test_clone_tolerates_link_cycle_in_skills(home: Home) -> None:
    homes.write_private(home.skills / "a" / "SKILL.md", "how")
    (home.skills / "a" / "loop").symlink_to(home.skills)
    profile = profiles.create_profile(home, "work", clone=True)
    assert (profile.skills / "a" / "loop").is_symlink()


def test_clone_of_broken_settings_leaves_nothing(home: Home) -> None:
    homes.write_private(home.config_file, "a: [")
    with pytest.raises(HermesError):
        profiles.create_profile(home, "work", clone=True)
    assert list((home.path / "profiles").iterdir()) == []


def test_clone_copies_from_current_profile(home: Home) -> None:
    work = profiles.create_profile(home, "work")
    homes.write_private(work.soul_file, "I am at work")
    assert profiles.create_profile(work, "play", clone=True).soul_file.read_text() == "I am at work"


@pytest.mark.parametrize("name", ["work", "default"])
def test_taken_profile_name_is_rejected(home: Home, name: str) -> None:
    profiles.create_profile(home, "work")
    with pytest.raises(ProfileError, match="already"):
        profiles.create_profile(home, name)


def test_concurrent_profile_creation_has_one_winner(home: Home) -> None:
    results: list[bool] = []

    def create() -> None:
        try:
            profiles.create_profile(home, "work")
            results.append(True)
        except ProfileError:
            results.append(False)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 7 + [True]


def test_profiles_are_listed_with_default_first(home: Home) -> None:
    for name in ("work", "aunt"):
        profiles.create_profile(home, name)
    (home.path / "profiles" / ".new-half").mkdir()
    (home.path / "profiles" / "file").write_text("")
    assert homes.list_profiles(home) == ["default", "aunt", "work"]


def test_home_without_profiles_lists_default(home: Home) -> None:
    assert homes.list_profiles(home) == ["default"]


def test_profile_use_is_sticky(home: Home) -> None:
    profiles.create_profile(home, "work")
    homes.use_profile(home, "work")
    assert homes.resolve(environ={"HERMES_HOME": str(home.path)}).profile == "work"


def test_profile_use_default_clears_sticky_choice(home: Home) -> None:
    homes.use_profile(profiles.create_profile(home, "work"), "work")
    homes.use_profile(home, "default")
    assert not (home.path / "active_profile").exists()


def test_profile_use_of_missing_profile_changes_nothing(home: Home) -> None:
    with pytest.raises(ProfileNotFound):
        homes.use_profile(home, "gone")
    assert not home.path.exists()


def test_profile_rename_moves_home_and_sticky_choice(home: Home) -> None:
    homes.write_private(profiles.create_profile(home, "work").soul_file, "me")
    homes.use_profile(home, "work")
    renamed = profiles.rename_profile(home, "work", "job")
    assert (renamed.soul_file.read_text(), homes.sticky_profile(home.path)) == ("me", "job")


def test_profile_rename_to_taken_name_is_rejected(home: Home) -> None:
    profiles.create_profile(home, "a")
    profiles.create_profile(home, "b")
    with pytest.raises(ProfileError, match="already"):
        profiles.rename_profile(home, "a", "b")


def test_profile_delete_removes_home_and_sticky_choice(home: Home) -> None:
    homes.use_profile(profiles.create_profile(fill_home(home), "work", clone=True), "work")
    profiles.delete_profile(home, "work")
    assert list((home.path / "profiles").iterdir()) == []
    assert homes.sticky_profile(home.path) == "default"


def test_delete_of_linked_profile_removes_link_only(home: Home, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    homes.write_private(elsewhere / "SOUL.md", "me")
    homes.make_private_folder(home.path / "profiles")
    (home.path / "profiles" / "work").symlink_to(elsewhere)
    profiles.delete_profile(home, "work")
    assert (homes.list_profiles(home), (elsewhere / "SOUL.md").exists()) == (["default"], True)


@pytest.mark.parametrize(
    "change", [profiles.delete_profile, lambda home, name: profiles.rename_profile(home, name, "x")]
)
def test_default_profile_cannot_be_renamed_or_deleted(home: Home, change: object) -> None:
    assert callable(change)
    with pytest.raises(ProfileError, match="stays"):
        change(home, "default")


@pytest.mark.parametrize("lock", ["flock", "lockf"])
def test_profile_with_live_server_is_not_deleted(home: Home, lock: str) -> None:
    work = profiles.create_profile(home, "work")
    homes.write_private(work.lock_file, "")
    program = "import fcntl, sys; f = open(sys.argv[1], 'r+'); getattr(fcntl, sys.argv[2])(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    command = [sys.executable, "-c", program, str(work.lock_file), lock]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"held\n"
        with pytest.raises(ProfileBusy):
            profiles.delete_profile(home, "work")
        server.communicate(b"\n")
    profiles.delete_profile(home, "work")
    assert not work.path.exists()
