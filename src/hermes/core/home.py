"""The home folder and its profiles: paths, and files that only their owner can read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hermes.core.errors import HermesError

DEFAULT_PROFILE = "default"
FOLDER_MODE = 0o700
FILE_MODE = 0o600
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
# Files of tools keep their modes; these folders are private, so nobody else reaches them.
_FOREIGN_FOLDERS = frozenset({"workspace", "sandbox", "models", "profiles", "cluster"})


class ProfileError(HermesError):
    exit_code = 2


class ProfileNotFound(ProfileError):
    exit_code = 5


class ProfileBusy(ProfileError):
    exit_code = 4


class _At:
    """A path below the home."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts
        self.name = parts[0]

    def __get__(self, home: Home | None, owner: type[Home] | None = None) -> Path:
        if home is None:
            raise AttributeError("only a home has paths")
        return home.path.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class Home:
    """One profile's folder. Constructing it does not touch the disk."""

    path: Path
    profile: str = DEFAULT_PROFILE

    config_file = _At("config.yaml")
    env_file = _At(".env")
    state_db = _At("state.db")
    response_db = _At("response_store.db")
    soul_file = _At("SOUL.md")
    memories = _At("memories")
    skills = _At("skills")
    models = _At("models")
    run_folder = _At("run")
    workspace = _At("workspace")
    uploads = _At("uploads")
    sandbox = _At("sandbox")
    cache = _At("cache")
    tool_results = _At("cache", "tool_results")
    model_lists = _At("cache", "models.json")
    logs = _At("logs")
    journal = _At("journal")
    history_file = _At("history")
    pid_file = _At("gateway.pid")
    lock_file = _At("gateway.lock")
    state_file = _At("gateway_state.json")
    cluster = _At("cluster")
    server_states = _At("cluster", "servers")

    @property
    def root(self) -> Path:
        return self.path if self.profile == DEFAULT_PROFILE else self.path.parent.parent


def own_entries(root: Path) -> list[Path]:
    """What Hermes has written into a root folder, all profiles included."""
    names = {at.name for at in vars(Home).values() if isinstance(at, _At)} | {"profiles", "active_profile"}
    # WAL files, and backups of settings.
    prefixes = tuple(f"{name}{sign}" for name in names for sign in ("-", "."))
    return sorted(path for path in root.iterdir() if path.name in names or path.name.startswith(prefixes))


class ModeChange(NamedTuple):
    """A mode that was too wide; `now` equals `was` where it could not be changed."""

    path: Path
    was: int
    now: int


# ---- private files and folders


def make_private_folder(path: Path) -> None:
    """Create a folder and its missing parents with mode 0700, whatever the umask."""
    if path.is_dir():
        return
    make_private_folder(path.parent)
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        return
    # The umask may have removed the owner's rights; the folder is still empty.
    os.chmod(path, FOLDER_MODE)


def private_opener(path: str | os.PathLike[str], flags: int, mode: int = FILE_MODE) -> int:
    """`opener` for `open`: a file that it creates is private before anything is written to it."""
    try:
        fd = os.open(path, flags | os.O_EXCL, mode) if flags & os.O_CREAT else -1
    except FileExistsError:
        fd = -1
    if fd < 0:
        return os.open(path, flags, mode)
    os.fchmod(fd, mode)
    return fd


def write_private(path: Path, data: bytes | str, *, executable: bool = False) -> None:
    """Replace a file atomically. A symbolic link keeps pointing there."""
    target = Path(os.path.realpath(path))
    make_private_folder(target.parent)
    draft = target.with_name(f".{target.name}.{os.urandom(6).hex()}.tmp")
    mode = FOLDER_MODE if executable else FILE_MODE
    try:
        fd = private_opener(draft, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(fd)
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def append_private(path: Path, text: str, between: str, bytes_max: int) -> None:
    """Add a text to a regular file, with `between` behind what is there. Raises OSError, also past the limit."""
    make_private_folder(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(private_opener(path, flags), "ab") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "It is no regular file.")
        if status.st_size > bytes_max:
            raise OSError(errno.EFBIG, f"The file has more than {bytes_max:,} bytes; move it away.")
        file.write(f"{between if status.st_size else ''}{text}".encode())


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other writers, for read-modify-write of a file in it.

    The folder itself is the lock: there is no lock file to leave behind.
    """
    make_private_folder(folder)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some network file systems cannot lock folders; the replacement is still atomic there.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def tighten(home: Home) -> list[ModeChange]:
    """Remove the rights of group and others from the home and its contents; returns the changes, for a notice."""
    changes: list[ModeChange] = []
    if home.path.is_dir():
        _tighten_one(home.path, os.stat(home.path).st_mode, changes)
        _tighten_inside(home.path, _FOREIGN_FOLDERS, changes)
    return changes


def _tighten_inside(folder: Path, closed: frozenset[str], changes: list[ModeChange]) -> None:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_symlink():
            continue
        try:
            _tighten_one(Path(entry.path), entry.stat(follow_symlinks=False).st_mode, changes)
        except FileNotFoundError:
            continue
        if entry.is_dir(follow_symlinks=False) and entry.name not in closed:
            _tighten_inside(Path(entry.path), frozenset(), changes)


def _tighten_one(path: Path, mode: int, changes: list[ModeChange]) -> None:
    was = stat.S_IMODE(mode)
    now = was & FOLDER_MODE
    if was == now:
        return
    try:
        os.chmod(path, now)
    except PermissionError:
        now = was
    changes.append(ModeChange(path, was, now))


# ---- which home


def resolve(profile: str | None = None, environ: Mapping[str, str] | None = None) -> Home:
    """The home to use, from `profile` (the flag), HERMES_HOME inside `profiles/`, HERMES_PROFILE, the sticky choice."""
    env = os.environ if environ is None else environ
    text = env.get("HERMES_HOME") or "~/.hermes"
    base = _folder(text) if text.startswith("/") else _base_folder(text)
    inside = base.name if base.parent.name == "profiles" and _NAME.fullmatch(base.name) else None
    root = base.parent.parent if inside else base
    if profile is not None:
        return open_profile(root, profile)
    if inside:
        return open_profile(root, inside)
    if name := env.get("HERMES_PROFILE"):
        return open_profile(root, name, where="HERMES_PROFILE")
    sticky = sticky_profile(root)
    return open_profile(root, sticky, where="active_profile", hint="hermes -p default profile use default")


@lru_cache(maxsize=16)
def _folder(text: str) -> Path:
    return Path(os.path.abspath(text))


def _base_folder(text: str) -> Path:
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError:
        raise HermesError("This user has no home folder.", hint="export HERMES_HOME=/path/to/folder") from None


def open_profile(root: Path, name: str, *, where: str = "", hint: str = "hermes profile list") -> Home:
    """An existing profile. Only `default` may still be without a folder."""
    check_name(name, where=where)
    if name == DEFAULT_PROFILE:
        return Home(root)
    path = root / "profiles" / name
    if not path.is_dir():
        raise ProfileNotFound(f"There is no profile '{name}'.", where=where, hint=hint)
    return Home(path, name)


def check_name(name: str, *, where: str = "") -> None:
    if not _NAME.fullmatch(name):
        raise ProfileError(
            f"{name[:80]!r} is not a profile name: 1 to 64 small letters, digits, '_' and '-', starting with a letter or digit.",
            where=where,
            hint="hermes profile list",
        )


def sticky_profile(root: Path) -> str:
    path = f"{root}/active_profile"
    if not os.path.exists(path):
        return DEFAULT_PROFILE
    return Path(path).read_text(errors="replace").strip() or DEFAULT_PROFILE


def get_active_profile_name() -> str:
    return resolve().profile


# ---- profiles as a whole


def list_profiles(home: Home) -> list[str]:
    try:
        names = [entry.name for entry in os.scandir(home.root / "profiles") if entry.is_dir()]
    except FileNotFoundError:
        names = []
    return [DEFAULT_PROFILE, *sorted(name for name in names if _NAME.fullmatch(name) and name != DEFAULT_PROFILE)]


def use_profile(home: Home, name: str) -> None:
    open_profile(home.root, name)
    choice = home.root / "active_profile"
    if name == DEFAULT_PROFILE:
        choice.unlink(missing_ok=True)
    else:
        write_private(choice, f"{name}\n")


def is_served(home: Home) -> bool:
    """Whether a live server holds this home; both kinds of advisory lock are checked."""
    try:
        fd = os.open(home.lock_file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
