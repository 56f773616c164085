"""Keeps commands from planting what the user's own tools would run: reserved names and settings of git.

What is there when a sandbox is built is covered by read-only mounts (`covers`). What appears while commands run is found
by inotify and made harmless at once: a reserved name is renamed to `NAME.needs-approval`, and a repository keeps only
settings that run nothing. Everything here blocks; folders are reached by descriptor, through no symbolic link.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import logging
import os
import re
import select
import stat
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from hermes.core.limits import PROTECTED_PATHS_MAX, WATCHED_DEPTH_MAX, WATCHED_FOLDERS_MAX
from hermes.guards.path_lists import RESERVED_NAMES, RULES, below, plain
from hermes.sandbox.base import SandboxError
from hermes.sandbox.git_config import check_config, referenced_paths

log = logging.getLogger(__name__)
Cover = Literal["ro", "rw", "hide"]
# Device, inode, and kind or for a link where it leads: the number of an inode is given out again.
Identity = tuple[int, int, str]

SUFFIX = ".needs-approval"
# Where packages bring reserved names of their own, nobody's shell or editor works; repositories are looked for.
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", ".venv", ".tox", ".mypy_cache", ".pytest_cache"})
_GIT_FILES = ("config", "config.worktree", "commondir", "gitdir")
_GIT_PARTS = {"head", "objects", "refs", "hooks", *_GIT_FILES}
_CONFIG_BYTES_MAX = 1024 * 1024
_RECHECK_S = 0.02
# Who makes the same reserved name so often in one command does not take no for an answer.
_REPEATS_MAX = 5
# A checkout goes on with other files after it has made a reserved name.
_PENDING_S = 1.0
_ROUNDS_MAX = 10
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE, _IN_Q_OVERFLOW, _IN_IGNORED = 0x2, 0x80, 0x100, 0x4000, 0x8000
_IN_ONLYDIR, _IN_EXCL_UNLINK, _IN_MASK_ADD = 0x1000000, 0x4000000, 0x20000000
_APPEARS = _IN_CREATE | _IN_MOVED_TO | _IN_ONLYDIR | _IN_EXCL_UNLINK
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)
_HIDDEN_RULES = [rule for rule in RULES if rule.base == "any" and "r" in rule.modes]
_HIDDEN = re.compile("|".join(fnmatch.translate(entry) for rule in _HIDDEN_RULES for entry in rule.entries))
_NOT_HIDDEN = frozenset(name for rule in _HIDDEN_RULES for name in rule.free)
_SPECIAL = RESERVED_NAMES | {".git"}


class Watching:
    """The watch of a sandbox over its life: made before its first command, and anew when what is to be covered has
    changed while no command ran."""

    def __init__(
        self,
        roots: Callable[[], Sequence[str]],
        is_granted: Callable[[str], bool],
        end_commands: Callable[[str], None],
        reserved_paths: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._roots, self._is_granted, self._end_commands = roots, is_granted, end_commands
        self._reserved_paths = reserved_paths
        self._watch: WorkspaceWatch | None = None
        self._lock = asyncio.Lock()
        self._set_aside: dict[str, str] = {}
        self.commands = 0

    async def enter(self) -> WorkspaceWatch:
        async with self._lock:
            watch = self._watch
            if watch is None or not (self.commands or await asyncio.to_thread(watch.begin)):
                await self._close()
                loop, end = asyncio.get_running_loop(), self._end_commands
                watch = self._watch = await asyncio.to_thread(
                    self._make, lambda reason: loop.call_soon_threadsafe(end, reason)
                )
            self.commands += 1
            return watch

    async def leave(self) -> None:
        """A command has ended. What it has planted is set aside when this returns."""
        async with self._lock:
            self.commands -= 1
            if (watch := self._watch) is not None:
                await asyncio.to_thread(watch.settle if self.commands else watch.end)
                self._set_aside |= watch.take_set_aside()

    async def abandon(self) -> None:
        """The command could not be started. What was found may be out of date: the next one looks again."""
        async with self._lock:
            self.commands -= 1
            if not self.commands:
                await self._close()

    def take_set_aside(self) -> dict[str, str]:
        found, self._set_aside = self._set_aside, {}
        return found

    def restore(self, path: str) -> None:
        if self._watch is not None:
            self._watch.restore(path)

    async def close(self) -> None:
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            await asyncio.to_thread(watch.close)

    def _make(self, end_commands: Callable[[str], object]) -> WorkspaceWatch:
        watch = WorkspaceWatch(self._roots(), self._is_granted, end_commands, self._reserved_paths())
        try:
            watch.scan()
            watch.activate()
        except BaseException:
            watch.close()
            raise
        return watch


class WorkspaceWatch:
    """The writable folders of one sandbox. `scan` looks at all of them; `active` says that commands run, so that what
    appears is theirs. `is_granted` tells what the user has allowed to be written, `reserved_paths` are reserved besides
    the names that are so everywhere."""

    def __init__(
        self,
        roots: Sequence[str],
        is_granted: Callable[[str], bool],
        end_commands: Callable[[str], object] = lambda _: None,
        reserved_paths: Iterable[str] = (),
    ) -> None:
        self._roots, self._is_granted, self._end_commands = roots, is_granted, end_commands
        self._reserved_paths = set(reserved_paths)
        self._lock = threading.RLock()
        self._inotify = _check(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._watches: dict[int, str] = {}
        self._budget = WATCHED_FOLDERS_MAX
        # A look at everything is due: the system gave out no more watches, lost events, or something failed.
        self._unwatched = self._doubtful = False
        # The identities of what is covered and of the folders around it, and of other special names at the scan.
        self._ids: dict[str, Identity] = {}
        self._known: dict[Identity, str] = {}
        # Repositories and `.git` files that were not there at the scan, and reserved names that have just appeared.
        self._made: set[str] = set()
        self._git_files: set[str] = set()
        self._pending: dict[str, float] = {}
        self._set_aside: dict[str, str] = {}
        self._times: dict[str, int] = {}
        # What the scan has made itself: the event of each is not somebody else's.
        self._own_events: set[str] = set()
        self._recheck_s = _RECHECK_S
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._closed = self._stale = False
        self.covers: dict[str, Cover] = {}
        self.active = False

    # ---- from outside

    def scan(self) -> None:
        with self._lock:
            for root in self._roots:
                self._enter(root, baseline=True)
            for path in self.covers:
                for entry in (path, os.path.dirname(path)):
                    self._ids[entry] = _identity(entry)
        if len(self.covers) > PROTECTED_PATHS_MAX:
            raise SandboxError(
                f"The workspace has more than {PROTECTED_PATHS_MAX} protected files.", hint="a smaller one"
            )

    def begin(self) -> bool:
        """Commands are about to run. False: what is to be covered has changed since the scan, by other hands."""
        with self._lock:
            if self._stale or any(self._steers(path) for path, _ in self._events()):
                return False
            self.activate()
            return True

    def activate(self) -> None:
        """Commands are about to run: what has happened since the scan is dealt with as what happens from now on."""
        with self._lock:
            self.active = True
            self._times.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="workspace-watch", daemon=True)
                self._thread.start()
            self._wake()

    def settle(self) -> None:
        with self._lock:
            if self.active:
                for _ in range(_ROUNDS_MAX):
                    if not self._handle_events():
                        break
                self._rename_pending(now=True)
                self._check_made()
                if self._unwatched or self._doubtful:
                    self._doubtful = False
                    self._look_everywhere()

    def end(self) -> None:
        with self._lock:
            self.settle()
            self._handle_events()  # what setting aside has caused
            self.active = False

    def take_set_aside(self) -> dict[str, str]:
        with self._lock:
            found, self._set_aside = self._set_aside, {}
            return found

    def restore(self, path: str) -> None:
        folder, name = os.path.split(path)
        with self._lock, contextlib.suppress(OSError), _opened(folder, self._roots) as fd:
            os.rename(f"{name}{SUFFIX}", name, src_dir_fd=fd, dst_dir_fd=fd)

    def close(self) -> None:
        self._closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        for fd in (self._inotify, self._wake_read, self._wake_write):
            os.close(fd)

    # ---- what happens

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        """While commands run, deal with what happens at once; otherwise leave it for `begin` to look at."""
        while not self._closed:
            fds = [self._wake_read, self._inotify] if self.active else [self._wake_read]
            # A repository that a command has made can also be changed through another name of its files.
            waits = self.active and (self._made or self._git_files or self._pending)
            ready, _, _ = select.select(fds, [], [], self._recheck_s if waits else None)
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            with self._lock:
                if self.active and not self._closed:
                    began = time.monotonic()
                    self._handle_events()
                    self._rename_pending()
                    self._check_made()
                    # Many repositories are looked at less often: never for more than a tenth of the time.
                    self._recheck_s = max(_RECHECK_S, 10 * (time.monotonic() - began))

    def _attempt(self, look: Callable[[str], None], path: str) -> None:
        """Whatever is wrong with one file, the others are looked at, and it is so once more at the end."""
        try:
            look(path)
        except Exception:
            log.warning("%s could not be looked at", path, exc_info=True)
            self._doubtful = True

    def _look_everywhere(self) -> None:
        for root in self._roots:
            self._attempt(self._enter, root)
        for path in [path for path, mode in self.covers.items() if mode == "rw"]:
            self._attempt(self._check_repository, path)
        self._rename_pending(now=True)

    def _check_made(self) -> None:
        for path in list(self._made):
            self._attempt(self._check_repository, path)
        for path in list(self._git_files):
            self._attempt(self._check_git_file, path)

    def _handle_events(self) -> int:
        count = 0
        for path, is_new in self._events():
            count += 1
            if path in self._own_events:
                self._own_events.discard(path)
            elif is_new:
                self._attempt(self._replaced if path in self.covers else self._appeared, path)
            elif path in self._git_files:
                self._attempt(self._check_git_file, path)
            else:
                self._attempt(self._check_repository, os.path.dirname(path))
        return count

    def _events(self) -> Iterator[tuple[str, bool]]:
        """Paths with whether they are new there, as far as there are any now: others may go on making them."""
        (left,) = struct.unpack("i", fcntl.ioctl(self._inotify, termios.FIONREAD, bytes(4)))
        while left > 0:
            data = os.read(self._inotify, 65_536)
            left -= len(data)
            at = 0
            while at < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, at)
                name = os.fsdecode(data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0"))
                at += _EVENT.size + length
                if mask & _IN_Q_OVERFLOW:
                    self._doubtful = True
                elif mask & _IN_IGNORED:
                    self._watches.pop(watch, None)
                elif (folder := self._watches.get(watch)) is not None and name:
                    yield f"{folder}/{name}", bool(mask & (_IN_CREATE | _IN_MOVED_TO))

    def _steers(self, path: str) -> bool:
        name = plain(os.path.basename(path))
        return name in _SPECIAL or name in _GIT_PARTS or _is_hidden(name) or path in self._reserved_paths

    def _appeared(self, path: str) -> None:
        if self._is_granted(path) or self._is_covered(path):
            return
        folder, name = os.path.split(path)
        if path in self.covers and _identity(folder) == self._ids.get(folder):
            self._changed_by_user(path)
            return
        key = plain(name)
        if (key in RESERVED_NAMES and not self._in_skipped(path)) or path in self._reserved_paths:
            self._pending.setdefault(path, time.monotonic())
        elif key == ".git":
            self._appeared_git(folder, name)
        else:
            if key in _GIT_PARTS:
                self._check_repository(folder)
            if _is_folder(path):
                self._enter(path)

    def _replaced(self, path: str) -> None:
        """Something was put at a covered path. Its identity says nothing: the number of the inode that was replaced is
        given out again, and a file that is put back has lost its cover."""
        folder = os.path.dirname(path)
        if _identity(folder) != self._ids.get(folder):
            self._appeared(path)
        elif not self._is_granted(path):
            self._changed_by_user(path)

    def _changed_by_user(self, path: str) -> None:
        """Commands cannot replace what is covered. Who did has taken the cover off: nothing runs on without it."""
        if not self._stale:
            self._stale = True
            self._end_commands(f"{path} was changed by somebody else meanwhile; try again.")

    def _is_covered(self, path: str) -> bool:
        return path in self.covers and _identity(path) == self._ids.get(path)

    def _in_skipped(self, path: str) -> bool:
        root = max((root for root in self._roots if below(path, root)), key=len, default="")
        return not _SKIPPED.isdisjoint(path[len(root) :].split("/"))

    def _rename_pending(self, *, now: bool = False) -> None:
        """Set aside reserved names, but not while they are still being written with other files."""
        for path, since in list(self._pending.items()):
            if now or time.monotonic() - since >= _PENDING_S:
                del self._pending[path]
                self._rename(*os.path.split(path), "reserved name")

    def _appeared_git(self, folder: str, name: str) -> None:
        path = f"{folder}/{name}"
        if _is_folder(path):
            self._enter_repository(path)
            return
        self._git_files.add(path)
        with contextlib.suppress(OSError), _opened(folder, self._roots) as fd:
            self._watch(fd, folder, _IN_MODIFY)
        self._check_git_file(path)

    def _check_git_file(self, path: str) -> None:
        """A file `.git` may lead to a repository in the same folders, which is then looked at like any other. While it
        is empty, or leads to nothing, it does nothing."""
        folder, name = os.path.split(path)
        if not _exists(folder, name):
            self._git_files.discard(path)
            return
        text = self._read(folder, name)
        if text == "":
            return
        target = _git_file_target(folder, text)
        if not any(below(target, root) for root in self._roots):
            self._git_files.discard(path)
            self._rename(folder, name, "leads to a repository elsewhere")
        elif not self._is_covered(target) and _is_folder(target):
            self._enter_repository(target)

    # ---- folders

    def _enter(self, path: str, *, baseline: bool = False) -> None:
        self._budget = WATCHED_FOLDERS_MAX
        depth = path.count("/") - min(root.count("/") for root in self._roots if below(path, root))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), _opened(path, self._roots) as fd:
            self._walk(fd, path, depth, baseline=baseline)
        if self._budget <= 0:
            log.warning("%s has more than %d folders; those beyond are not watched", path, WATCHED_FOLDERS_MAX)

    def _walk(self, fd: int, here: str, depth: int, *, baseline: bool) -> None:
        self._budget -= 1
        self._watch(fd, here)
        with os.scandir(fd) as found:
            entries = list(found)
        names = {entry.name for entry in entries}
        if "HEAD" in names and names & {"objects", "commondir"}:
            self._cover_repository(here) if baseline else self._enter_repository(here)
        for name in list(self._look(here, entries, baseline=baseline)):
            if self._budget > 0 and depth < WATCHED_DEPTH_MAX:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    inner = _open_folder(name, fd, force=not baseline)
                    try:
                        self._walk(inner, f"{here}/{name}", depth + 1, baseline=baseline)
                    finally:
                        os.close(inner)

    def _look(self, folder: str, entries: list[os.DirEntry[str]], *, baseline: bool) -> Iterator[str]:
        """The names of ordinary folders to go on with; what is special is dealt with."""
        skipped = self._in_skipped(folder)
        for entry in entries:
            name = entry.name
            key = plain(name)
            path = f"{folder}/{name}"
            is_special = key == ".git" or (key in RESERVED_NAMES and not skipped) or path in self._reserved_paths
            if is_special:
                self._look_at_special(path, entry, baseline=baseline)
            elif entry.is_dir(follow_symlinks=False):
                yield name
            elif baseline and not skipped and _is_hidden(key) and entry.is_file(follow_symlinks=False):
                self.covers[path] = "hide"

    def _look_at_special(self, path: str, entry: os.DirEntry[str], *, baseline: bool) -> None:
        identity = _identity(path)
        known = self._known.get(identity)
        if baseline:
            self._ids[path] = identity
            self._known[identity] = path
            if plain(entry.name) == ".git" and entry.is_dir(follow_symlinks=False):
                self._cover_repository(path)
            elif not self._is_granted(path):
                self._cover(path)
                if plain(entry.name) == ".git":
                    self._cover_git_file(path)
        elif known is None or (known == path and not self._is_covered(path) and path in self.covers):
            self._appeared(path)
        elif known != path:
            self._follow(known, path)

    def _follow(self, before: str, path: str) -> None:
        """A folder around something that is covered was renamed: it is still covered, at its new path."""
        for covered, mode in list(self.covers.items()):
            if below(covered, before):
                moved = path + covered.removeprefix(before)
                self.covers[moved] = mode
                for entry in (moved, os.path.dirname(moved)):
                    self._ids[entry] = _identity(entry)

    def _cover(self, path: str) -> None:
        real = os.path.realpath(path)
        if os.path.exists(real) and any(real != root and below(real, root) for root in self._roots):
            self.covers.setdefault(real, "ro")

    def _watch(self, fd: int, path: str, more: int = 0) -> None:
        name = f"/proc/self/fd/{fd}".encode()
        watch = _libc.inotify_add_watch(self._inotify, name, _APPEARS | more | (_IN_MASK_ADD if more else 0))
        if watch >= 0:
            self._watches[watch] = path
        elif ctypes.get_errno() in (errno.ENOSPC, errno.ENOMEM):
            self._unwatched = True

    # ---- repositories

    def _cover_repository(self, path: str) -> None:
        """Keep what steers an existing repository as it is: its settings, hooks, and where it finds them."""
        if self._is_granted(path) or path in self.covers:
            return
        if not _exists(path, "config") and not _exists(path, "commondir"):
            self._made.add(path)
            return
        self.covers[path] = "rw"
        with contextlib.suppress(OSError), _opened(path, self._roots) as fd:
            self._watch(fd, path)
            if _exists(path, "config"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir("hooks", dir_fd=fd)  # what is not there cannot be covered
                    self._own_events.add(f"{path}/hooks")
        for name in (*_GIT_FILES, "hooks"):
            if _exists(path, name):
                self._ids[f"{path}/{name}"] = _identity(f"{path}/{name}")
                self._cover(f"{path}/{name}")
        self._cover_references(path)
        inner = [f"{path}/modules", f"{path}/worktrees"]
        while inner:
            here = inner.pop()
            with contextlib.suppress(OSError), _opened(here, self._roots) as fd:
                names = os.listdir(fd)
                if "HEAD" in names:
                    self._cover_repository(here)
                inner += [f"{here}/{name}" for name in names if name not in ("objects", "refs", "logs", "hooks")]

    def _cover_git_file(self, path: str) -> None:
        """A file `.git` of the user: what it leads to is a repository like any other, also one that is not there yet."""
        folder, name = os.path.split(path)
        target = _git_file_target(folder, self._read(folder, name))
        if any(target != root and below(target, root) for root in self._roots):
            if _is_folder(target):
                self._cover_repository(target)
            elif not os.path.lexists(target):
                self._reserved_paths.add(target)

    def _cover_references(self, repository: str) -> None:
        """What the settings of a repository name as more settings or as hooks, if it lies in the workspace."""
        tree, files, seen = os.path.dirname(repository), [f"{repository}/config"], set[str]()
        while files:
            file = files.pop()
            for value in referenced_paths(self._read(*os.path.split(file)) or ""):
                for base in (tree, os.path.dirname(file)):
                    path = os.path.normpath(os.path.join(base, os.path.expanduser(value)))
                    if path not in seen and any(path != root and below(path, root) for root in self._roots):
                        seen.add(path)
                        self._reserved_paths.add(path)
                        if os.path.lexists(path):
                            self._ids[path] = _identity(path)
                            self._known[self._ids[path]] = path
                            self._cover(path)
                            files.append(path)

    def _enter_repository(self, path: str) -> None:
        if self._is_granted(path) or self._is_covered(path) or path in self._made:
            return
        self._made.add(path)
        try:
            with _opened(path, self._roots) as fd:
                self._watch(fd, path, _IN_MODIFY)
        except OSError:
            self._rename(*os.path.split(path), "cannot be looked at")
            return
        for name in ("modules", "worktrees"):
            if _is_folder(f"{path}/{name}"):
                self._enter(f"{path}/{name}")
        self._check_repository(path)

    def _check_repository(self, path: str) -> None:
        if os.path.basename(path) == "hooks":
            path = os.path.dirname(path)
        if path in self._made:
            for name in ("config", "config.worktree"):
                self._check_config(path, name)
            if _exists(path, "commondir"):
                target = _path_in(path, self._read(path, "commondir"))
                if target not in self._made and not self._is_covered(target):
                    self._rename(path, "commondir", "other settings for a repository")
            self._check_hooks(path)
        elif self._is_covered(path):
            for entry in (f"{path}/{name}" for name in (*_GIT_FILES, "hooks") if _exists(path, name)):
                if _identity(entry) == self._ids.get(entry):
                    continue
                if entry in self.covers:
                    self._changed_by_user(entry)
                else:
                    self._rename(*os.path.split(entry), "other settings for a repository")
        elif _exists(path, "HEAD") and (_exists(path, "objects") or _exists(path, "commondir")):
            self._enter_repository(path)

    def _check_config(self, path: str, name: str) -> None:
        if not _exists(path, name) or self._is_granted(f"{path}/{name}"):
            return
        text = self._read(path, name)
        if text is None:
            self._rename(path, name, "not a plain file")
            return
        checked = check_config(text, lambda value: any(below(_path_in(path, value), root) for root in self._roots))
        if not checked.removed:
            return
        with _opened(path, self._roots, force=True) as fd:
            draft = f".{name}-{os.urandom(8).hex()}"
            made = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=fd)
            with os.fdopen(made, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(checked.text)
            with contextlib.suppress(OSError):
                os.rename(name, f"{name}{SUFFIX}", src_dir_fd=fd, dst_dir_fd=fd)
            os.rename(draft, name, src_dir_fd=fd, dst_dir_fd=fd)
        self._report(f"{path}/{name}", f"has {', '.join(dict.fromkeys(checked.removed))}")

    def _check_hooks(self, path: str) -> None:
        hooks = f"{path}/hooks"
        if not _exists(path, "hooks"):
            return
        if not _is_folder(hooks):
            self._rename(path, "hooks", "not a plain folder")
            return
        with contextlib.suppress(FileNotFoundError), _opened(hooks, self._roots, force=True) as fd:
            self._watch(fd, hooks)
            for name in os.listdir(fd):
                if not name.endswith(".sample") and SUFFIX not in name:
                    self._rename(hooks, name, "git hook")

    # ---- files

    def _read(self, folder: str, name: str) -> str | None:
        try:
            with _opened(folder, self._roots) as parent:
                fd = os.open(name, _READ, dir_fd=parent)
        except OSError:
            return None
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_size > _CONFIG_BYTES_MAX:
                return None
            return os.pread(fd, _CONFIG_BYTES_MAX, 0).decode("utf-8", "surrogateescape")
        finally:
            os.close(fd)

    def _rename(self, folder: str, name: str, reason: str) -> None:
        if self._is_granted(f"{folder}/{name}"):
            return
        try:
            with _opened(folder, self._roots, force=True) as fd:
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

    def _report(self, path: str, reason: str) -> None:
        self._set_aside[path] = reason
        self._times[path] = self._times.get(path, 0) + 1
        if self._times[path] >= _REPEATS_MAX:
            log.warning("%s was made again and again; the commands that run in the workspace are ended", path)
            self._end_commands(f"It kept making {path}, which needs the user's approval.")


@contextlib.contextmanager
def _opened(path: str, roots: Sequence[str], *, force: bool = False) -> Iterator[int]:
    """A descriptor of a folder, entered name by name from its root without following links."""
    root = max((root for root in roots if below(path, root)), key=len)
    fd = os.open(root, _OPEN)
    try:
        for name in path[len(root) :].strip("/").split("/"):
            if name:
                inner = _open_folder(name, fd, force=force)
                os.close(fd)
                fd = inner
        if force and not os.access(f"/proc/self/fd/{fd}", os.W_OK):
            os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | stat.S_IRWXU)
        yield fd
    finally:
        os.close(fd)


def _open_folder(name: str, parent: int, *, force: bool) -> int:
    """`force`: one that its maker has closed to everybody is opened first; it is ours, for commands run as this user."""
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


def _path_in(folder: str, text: str | None) -> str:
    """Where a path in a file leads; nowhere if it is none."""
    try:
        return os.path.realpath(os.path.join(folder, (text or "").strip())) if text is not None else ""
    except ValueError:
        return ""


def _git_file_target(folder: str, text: str | None) -> str:
    return _path_in(folder, text.removeprefix("gitdir:")) if text is not None and text.startswith("gitdir:") else ""


def _identity(path: str) -> Identity:
    try:
        about = os.lstat(path)
        kind = os.readlink(path) if stat.S_ISLNK(about.st_mode) else oct(stat.S_IFMT(about.st_mode))
    except (OSError, ValueError):
        return (0, 0, "")
    return (about.st_dev, about.st_ino, kind)


def _is_hidden(name: str) -> bool:
    return _HIDDEN.match(name) is not None and name not in _NOT_HIDDEN


def _exists(folder: str, name: str) -> bool:
    return os.path.lexists(f"{folder}/{name}")


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
