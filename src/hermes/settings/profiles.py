"""Creating, renaming and deleting profiles."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from hermes.core import home as homes
from hermes.core.home import DEFAULT_PROFILE, Home, ProfileBusy, ProfileError, locked, sync_folder, write_private
from hermes.settings.write import without_secrets

_CLONED_FOLDERS = ("memories", "skills")


def create_profile(home: Home, name: str, *, clone: bool = False, with_secrets: bool = False) -> Home:
    """A new profile, empty or with the settings, memory and skills of `home`; created atomically."""
    homes.check_name(name)
    profiles = home.root / "profiles"
    draft = profiles / f".new-{os.urandom(6).hex()}"
    with locked(profiles):
        _refuse_taken(profiles, name)
        try:
            homes.make_private_folder(draft)
            if clone:
                _clone(home, Home(draft, name), with_secrets)
            os.rename(draft, profiles / name)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove_tree(draft)
            raise
        sync_folder(profiles)
    return Home(profiles / name, name)


def rename_profile(home: Home, old: str, new: str) -> Home:
    """The sticky choice follows the name."""
    homes.check_name(new)
    profiles = home.root / "profiles"
    with locked(profiles):
        _refuse_fixed_or_served(home, old)
        _refuse_taken(profiles, new)
        os.rename(profiles / old, profiles / new)
        sync_folder(profiles)
        if homes.sticky_profile(home.root) == old:
            homes.use_profile(home, new)
    return Home(profiles / new, new)


def delete_profile(home: Home, name: str) -> None:
    """The sticky choice falls back to `default`."""
    profiles = home.root / "profiles"
    trash = profiles / f".gone-{os.urandom(6).hex()}"
    with locked(profiles):
        _refuse_fixed_or_served(home, name)
        if homes.sticky_profile(home.root) == name:
            homes.use_profile(home, DEFAULT_PROFILE)
        # Renamed first: an interrupted removal leaves no partial profile in use.
        os.rename(profiles / name, trash)
        sync_folder(profiles)
    _remove_tree(trash)


def _refuse_taken(profiles: Path, name: str) -> None:
    if name == DEFAULT_PROFILE or os.path.lexists(profiles / name):
        raise ProfileError(f"There is a profile '{name}' already.", hint="hermes profile list")


def _refuse_fixed_or_served(home: Home, name: str) -> None:
    profile = homes.open_profile(home.root, name)
    if name == DEFAULT_PROFILE:
        raise ProfileError("The profile 'default' is the home itself and stays.", hint="hermes profile list")
    if homes.is_served(profile):
        raise ProfileBusy(f"A server is running in the profile '{name}'.", hint=f"hermes -p {name} gateway stop")


def _clone(source: Home, target: Home, with_secrets: bool) -> None:
    if source.config_file.is_file():
        settings = source.config_file.read_bytes()
        if not with_secrets:
            settings = without_secrets(settings)
        write_private(target.config_file, settings)
    if with_secrets and source.env_file.is_file():
        write_private(target.env_file, source.env_file.read_bytes())
    if source.soul_file.is_file():
        write_private(target.soul_file, source.soul_file.read_bytes())
    for name in _CLONED_FOLDERS:
        if (source.path / name).is_dir():
            _copy_tree(source.path / name, target.path / name)


def _copy_tree(source: Path, target: Path) -> None:
    homes.make_private_folder(target)
    for entry in os.scandir(source):
        copy = target / entry.name
        if entry.is_dir() and entry.is_symlink():
            # Linked folders are not copied; following one could loop.
            os.symlink(os.path.realpath(entry.path), copy)
        elif entry.is_dir():
            _copy_tree(Path(entry.path), copy)
        elif entry.is_file():
            executable = bool(entry.stat().st_mode & stat.S_IXUSR)
            write_private(copy, Path(entry.path).read_bytes(), executable=executable)


def _remove_tree(path: Path) -> None:
    import shutil

    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
