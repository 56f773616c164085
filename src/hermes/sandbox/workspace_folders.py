"""Folders that the user and commands share, reached by descriptor and through no symbolic link. Everything blocks.

What a command must not leave there is set aside: renamed to `NAME.needs-approval`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence

from hermes.guards.path_lists import below

log = logging.getLogger(__name__)
# Device, inode, and kind or for a link where it leads: the number of an inode is given out again.
Identity = tuple[int, int, str]

SUFFIX = ".needs-approval"
# A command that makes the same reserved name this often is killed.
_REPEATS_MAX = 5
_TEXT_BYTES_MAX = 1024 * 1024
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class WorkspaceFolders:
    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = roots

    def holds(self, path: str) -> bool:
        return any(below(path, root) for root in self.roots)

    def holds_below_root(self, path: str) -> bool:
        return any(path != root and below(path, root) for root in self.roots)

    @contextlib.contextmanager
    def opened(self, path: str, *, force: bool = False) -> Iterator[int]:
        """A descriptor of a folder, entered name by name from its root without following links."""
        root = max((root for root in self.roots if below(path, root)), key=len)
        fd = os.open(root, _OPEN)
        try:
            for name in path[len(root) :].strip("/").split("/"):
                if name:
                    inner = open_folder(name, fd, force=force)
                    os.close(fd)
                    fd = inner
            if force and not os.access(f"/proc/self/fd/{fd}", os.W_OK):
                os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | stat.S_IRWXU)
            yield fd
        finally:
            os.close(fd)

    def read(self, folder: str, name: str) -> str | None:
        try:
            with self.opened(folder) as parent:
                fd = os.open(name, _READ, dir_fd=parent)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _TEXT_BYTES_MAX:
                return None
            return os.pread(fd, _TEXT_BYTES_MAX, 0).decode("utf-8", "surrogateescape")
        finally:
            os.close(fd)


class SetAside:
    """Paths that were set aside since the last `take`, with the reason, and how often since `times` was cleared."""

    def __init__(
        self, folders: WorkspaceFolders, is_granted: Callable[[str], bool], end_commands: Callable[[str], object]
    ) -> None:
        self._folders, self._is_granted, self._end_commands = folders, is_granted, end_commands
        self._reasons: dict[str, str] = {}
        self.times: dict[str, int] = {}

    def take(self) -> dict[str, str]:
        reasons, self._reasons = self._reasons, {}
        return reasons

    def restore(self, path: str) -> None:
        folder, name = os.path.split(path)
        with contextlib.suppress(OSError), self._folders.opened(folder) as fd:
            os.rename(f"{name}{SUFFIX}", name, src_dir_fd=fd, dst_dir_fd=fd)

    def rename(self, folder: str, name: str, reason: str) -> None:
        if self._is_granted(f"{folder}/{name}"):
            return
        try:
            with self._folders.opened(folder, force=True) as fd:
                target = f"{name}{SUFFIX}"
                os.lstat(name, dir_fd=fd)
                with contextlib.suppress(FileNotFoundError):
                    os.lstat(target, dir_fd=fd)
                    os.rename(target, f"{target}-{time.time_ns():x}", src_dir_fd=fd, dst_dir_fd=fd)
                os.rename(name, target, src_dir_fd=fd, dst_dir_fd=fd)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s/%s could not be set aside: %s", folder, name, error)
            self._end_commands(f"{folder}/{name} needs the user's approval and could not be set aside.")
        self._report(f"{folder}/{name}", reason)

    def replace(self, folder: str, name: str, text: str, reason: str) -> None:
        """Set a file aside and leave this text in its place."""
        with self._folders.opened(folder, force=True) as fd:
            draft = f".{name}-{os.urandom(8).hex()}"
            draft_fd = os.open(
                draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=fd
            )
            with os.fdopen(draft_fd, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
            with contextlib.suppress(OSError):
                os.rename(name, f"{name}{SUFFIX}", src_dir_fd=fd, dst_dir_fd=fd)
            os.rename(draft, name, src_dir_fd=fd, dst_dir_fd=fd)
        self._report(f"{folder}/{name}", reason)

    def _report(self, path: str, reason: str) -> None:
        self._reasons[path] = reason
        self.times[path] = self.times.get(path, 0) + 1
        if self.times[path] >= _REPEATS_MAX:
            log.warning("%s was made again and again; the commands that run in the workspace are ended", path)
            self._end_commands(f"It kept making {path}, which needs the user's approval.")


def open_folder(name: str, parent: int, *, force: bool) -> int:
    """`force`: make a folder accessible whose mode forbids it; it is ours, because commands run as this user."""
    try:
        return os.open(name, _OPEN, dir_fd=parent)
    except PermissionError:
        if not force:
            raise
    closed = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{closed}", stat.S_IMODE(os.fstat(closed).st_mode) | stat.S_IRWXU)
    finally:
        os.close(closed)
    return os.open(name, _OPEN, dir_fd=parent)


def path_in(folder: str, text: str | None) -> str:
    """The real path that a file in a folder names; empty if it is none."""
    try:
        return os.path.realpath(os.path.join(folder, (text or "").strip())) if text is not None else ""
    except ValueError:
        return ""


def git_file_target(folder: str, text: str | None) -> str:
    """The repository that a file `.git` names; empty if it names none."""
    return path_in(folder, text.removeprefix("gitdir:")) if text is not None and text.startswith("gitdir:") else ""


def identity(path: str) -> Identity:
    try:
        status = os.lstat(path)
        kind = os.readlink(path) if stat.S_ISLNK(status.st_mode) else oct(stat.S_IFMT(status.st_mode))
    except (OSError, ValueError):
        return (0, 0, "")
    return (status.st_dev, status.st_ino, kind)


def exists(folder: str, name: str) -> bool:
    return os.path.lexists(f"{folder}/{name}")


def is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
