"""Keeps commands from planting what the user's own tools would run: reserved names and settings of git.

What is there when a sandbox is built is covered by read-only mounts (`covers`). What appears while commands run is found
by inotify and made harmless at once: a reserved name is renamed to `NAME.needs-approval`, and a repository keeps only
settings that run nothing. Everything here blocks; folders are reached by descriptor, through no symbolic link.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from hermes.core.limits import PROTECTED_PATHS_MAX, WATCHED_DEPTH_MAX, WATCHED_FOLDERS_MAX
from hermes.guards.path_lists import RESERVED_NAMES, RULES, below, plain
from hermes.sandbox import inotify
from hermes.sandbox import workspace_folders as folders
from hermes.sandbox.base import SandboxError
from hermes.sandbox.git_config import check_config, referenced_paths
from hermes.sandbox.inotify import Inotify
from hermes.sandbox.workspace_folders import SUFFIX, SetAside, WorkspaceFolders

log = logging.getLogger(__name__)
Cover = Literal["ro", "rw", "hide"]

# Where packages bring reserved names of their own, nobody's shell or editor works; repositories are looked for.
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", ".venv", ".tox", ".mypy_cache", ".pytest_cache"})
_GIT_FILES = ("config", "config.worktree", "commondir", "gitdir")
_GIT_PARTS = {"head", "objects", "refs", "hooks", *_GIT_FILES}
_RECHECK_S = 0.02
# A checkout goes on with other files after it has made a reserved name.
_PENDING_S = 1.0
_ROUNDS_MAX = 10
_HIDDEN_RULES = [rule for rule in RULES if rule.base == "any" and "r" in rule.modes]
_HIDDEN = re.compile("|".join(fnmatch.translate(entry) for rule in _HIDDEN_RULES for entry in rule.entries))
_NOT_HIDDEN = frozenset(name for rule in _HIDDEN_RULES for name in rule.free)
_SPECIAL = RESERVED_NAMES | {".git"}


class WorkspaceWatch:
    """The writable folders of one sandbox. `scan` looks at all of them; while `active`, commands run, so that what
    appears is theirs. `is_granted` tells what the user has allowed to be written; `reserved_paths` are reserved besides
    the names that are so everywhere."""

    def __init__(
        self,
        roots: Sequence[str],
        is_granted: Callable[[str], bool],
        end_commands: Callable[[str], object] = lambda _: None,
        reserved_paths: Iterable[str] = (),
    ) -> None:
        self._roots, self._is_granted, self._end_commands = roots, is_granted, end_commands
        self._folders = WorkspaceFolders(roots)
        self._reserved_paths = set(reserved_paths)
        self._lock = threading.RLock()
        self._inotify = Inotify()
        self._budget = WATCHED_FOLDERS_MAX
        self._needs_rescan = False  # something could not be looked at: a look at everything is due
        # The identities of what is covered and of the folders around it, and of other special names at the scan.
        self._ids: dict[str, folders.Identity] = {}
        self._path_of_identity: dict[folders.Identity, str] = {}
        # Repositories and `.git` files that were not there at the scan, and reserved names that have just appeared.
        self._new_repositories: set[str] = set()
        self._git_files: set[str] = set()
        self._pending: dict[str, float] = {}
        self._set_aside = SetAside(self._folders, is_granted, end_commands)
        # What the scan has made itself: the event of each is not somebody else's.
        self._own_events: set[str] = set()
        self._recheck_s = _RECHECK_S
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._closed = self._is_stale = False
        self.covers: dict[str, Cover] = {}
        self.active = False

    # ---- from outside

    def scan(self) -> None:
        with self._lock:
            for root in self._roots:
                self._enter(root, baseline=True)
            for path in self.covers:
                for entry in (path, os.path.dirname(path)):
                    self._ids[entry] = folders.identity(entry)
        if len(self.covers) > PROTECTED_PATHS_MAX:
            raise SandboxError(
                f"The workspace has more than {PROTECTED_PATHS_MAX} protected files.", hint="a smaller one"
            )

    def begin(self) -> bool:
        """Commands are about to run. False: what is covered has been changed by others since the scan."""
        with self._lock:
            if self._is_stale or any(self._steers(path) for path, _ in self._inotify.events()):
                return False
            self.activate()
            return True

    def activate(self) -> None:
        """Commands are about to run: events since the scan count as theirs."""
        with self._lock:
            self.active = True
            self._set_aside.times.clear()
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
                if self._needs_rescan or self._inotify.overflowed or self._inotify.exhausted:
                    self._needs_rescan = self._inotify.overflowed = False
                    self._look_everywhere()

    def end(self) -> None:
        with self._lock:
            self.settle()
            self._handle_events()  # what setting aside has caused
            self.active = False

    def take_set_aside(self) -> dict[str, str]:
        with self._lock:
            return self._set_aside.take()

    def restore(self, path: str) -> None:
        with self._lock:
            self._set_aside.restore(path)

    def close(self) -> None:
        self._closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._inotify.close()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    # ---- what happens

    def _wake(self) -> None:
        os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        """While commands run, handle events at once; otherwise leave them for `begin`."""
        while not self._closed:
            fds = [self._wake_read, self._inotify.fd] if self.active else [self._wake_read]
            # A repository that a command has made can also be changed through another name of its files.
            waits = self.active and (self._new_repositories or self._git_files or self._pending)
            ready, _, _ = select.select(fds, [], [], self._recheck_s if waits else None)
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            with self._lock:
                if self.active and not self._closed:
                    started_at = time.monotonic()
                    self._handle_events()
                    self._rename_pending()
                    self._check_made()
                    # Many repositories are looked at less often: never for more than a tenth of the time.
                    self._recheck_s = max(_RECHECK_S, 10 * (time.monotonic() - started_at))

    def _attempt(self, look: Callable[[str], None], path: str) -> None:
        """A failure with one file does not stop the others; everything is looked at again at the end."""
        try:
            look(path)
        except Exception:
            log.warning("%s could not be checked", path, exc_info=True)
            self._needs_rescan = True

    def _look_everywhere(self) -> None:
        for root in self._roots:
            self._attempt(self._enter, root)
        for path in [path for path, mode in self.covers.items() if mode == "rw"]:
            self._attempt(self._check_repository, path)
        self._rename_pending(now=True)

    def _check_made(self) -> None:
        for path in list(self._new_repositories):
            self._attempt(self._check_repository, path)
        for path in list(self._git_files):
            self._attempt(self._check_git_file, path)

    def _handle_events(self) -> int:
        """How many events there were. Each path is looked at once however often it has changed: a command that changes
        it all the time would otherwise keep the queue full, and the end of every command waiting for it."""
        events = Counter(self._inotify.events())
        for (path, is_new), times in events.items():
            if path in self._own_events:
                self._own_events.discard(path)
                if times == 1:
                    continue
            if is_new:
                self._attempt(self._replaced if path in self.covers else self._appeared, path)
            elif path in self._git_files:
                self._attempt(self._check_git_file, path)
            else:
                self._attempt(self._check_repository, os.path.dirname(path))
        return events.total()

    def _steers(self, path: str) -> bool:
        name = plain(os.path.basename(path))
        return name in _SPECIAL or name in _GIT_PARTS or _is_hidden(name) or path in self._reserved_paths

    def _appeared(self, path: str) -> None:
        if self._is_granted(path) or self._is_covered(path):
            return
        folder, name = os.path.split(path)
        if path in self.covers and folders.identity(folder) == self._ids.get(folder):
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
            if folders.is_folder(path):
                self._enter(path)

    def _replaced(self, path: str) -> None:
        """Something was put at a covered path. Its identity says nothing: inode numbers are used again, and a file that
        is put back has lost its cover."""
        folder = os.path.dirname(path)
        if folders.identity(folder) != self._ids.get(folder):
            self._appeared(path)
        elif not self._is_granted(path):
            self._changed_by_user(path)

    def _changed_by_user(self, path: str) -> None:
        """Commands cannot replace what is covered: somebody else has, and so removed the cover. Nothing runs on without
        it."""
        if not self._is_stale:
            self._is_stale = True
            self._end_commands(f"{path} was changed by somebody else meanwhile; try again.")

    def _is_covered(self, path: str) -> bool:
        return path in self.covers and folders.identity(path) == self._ids.get(path)

    def _in_skipped(self, path: str) -> bool:
        root = max((root for root in self._roots if below(path, root)), key=len, default="")
        return not _SKIPPED.isdisjoint(path[len(root) :].split("/"))

    def _rename_pending(self, *, now: bool = False) -> None:
        """Set reserved names aside, but not while they are still being written together with other files."""
        for path, since in list(self._pending.items()):
            if now or time.monotonic() - since >= _PENDING_S:
                del self._pending[path]
                self._set_aside.rename(*os.path.split(path), "reserved name")

    def _appeared_git(self, folder: str, name: str) -> None:
        path = f"{folder}/{name}"
        if folders.is_folder(path):
            self._enter_repository(path)
            return
        self._git_files.add(path)
        with contextlib.suppress(OSError), self._folders.opened(folder) as fd:
            self._inotify.watch(fd, folder, inotify.MODIFY)
        self._check_git_file(path)

    def _check_git_file(self, path: str) -> None:
        """A file `.git` may lead to a repository in the same folders, which is then checked like any other. An empty
        one does nothing."""
        folder, name = os.path.split(path)
        if not folders.exists(folder, name):
            self._git_files.discard(path)
            return
        text = self._folders.read(folder, name)
        if text == "":
            return
        target = folders.git_file_target(folder, text)
        if not self._folders.holds(target):
            self._git_files.discard(path)
            self._set_aside.rename(folder, name, "leads to a repository elsewhere")
        elif not self._is_covered(target) and folders.is_folder(target):
            self._enter_repository(target)

    # ---- folders

    def _enter(self, path: str, *, baseline: bool = False) -> None:
        self._budget = WATCHED_FOLDERS_MAX
        depth = path.count("/") - min(root.count("/") for root in self._roots if below(path, root))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._folders.opened(path) as fd:
            self._walk(fd, path, depth, baseline=baseline)
        if self._budget <= 0:
            log.warning("%s has more than %d folders; those beyond are not watched", path, WATCHED_FOLDERS_MAX)

    def _walk(self, fd: int, path: str, depth: int, *, baseline: bool) -> None:
        self._budget -= 1
        self._inotify.watch(fd, path)
        with os.scandir(fd) as listing:
            entries = list(listing)
        names = {entry.name for entry in entries}
        if "HEAD" in names and names & {"objects", "commondir"}:
            self._cover_repository(path) if baseline else self._enter_repository(path)
        for name in list(self._look(path, entries, baseline=baseline)):
            if self._budget > 0 and depth < WATCHED_DEPTH_MAX:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    inner = folders.open_folder(name, fd, force=not baseline)
                    try:
                        self._walk(inner, f"{path}/{name}", depth + 1, baseline=baseline)
                    finally:
                        os.close(inner)

    def _look(self, folder: str, entries: list[os.DirEntry[str]], *, baseline: bool) -> Iterator[str]:
        """The names of ordinary folders to walk; special names are handled here."""
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
        identity = folders.identity(path)
        known_path = self._path_of_identity.get(identity)
        if baseline:
            self._ids[path] = identity
            self._path_of_identity[identity] = path
            if plain(entry.name) == ".git" and entry.is_dir(follow_symlinks=False):
                self._cover_repository(path)
            elif not self._is_granted(path):
                self._cover(path)
                if plain(entry.name) == ".git":
                    self._cover_git_file(path)
        elif known_path is None or (known_path == path and not self._is_covered(path) and path in self.covers):
            self._appeared(path)
        elif known_path != path:
            self._follow(known_path, path)

    def _follow(self, before: str, path: str) -> None:
        """A folder around covered paths was renamed: they are still covered, at their new paths."""
        for covered, mode in list(self.covers.items()):
            if below(covered, before):
                moved = path + covered.removeprefix(before)
                self.covers[moved] = mode
                for entry in (moved, os.path.dirname(moved)):
                    self._ids[entry] = folders.identity(entry)

    def _cover(self, path: str) -> None:
        real = os.path.realpath(path)
        if os.path.exists(real) and self._folders.holds_below_root(real):
            self.covers.setdefault(real, "ro")

    # ---- repositories

    def _cover_repository(self, path: str) -> None:
        """Protect the settings and hooks of an existing repository, and where it finds them."""
        if self._is_granted(path) or path in self.covers:
            return
        if not folders.exists(path, "config") and not folders.exists(path, "commondir"):
            self._new_repositories.add(path)
            return
        self.covers[path] = "rw"
        with contextlib.suppress(OSError), self._folders.opened(path) as fd:
            self._inotify.watch(fd, path)
            if folders.exists(path, "config"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir("hooks", dir_fd=fd)  # what is not there cannot be covered
                    self._own_events.add(f"{path}/hooks")
        for name in (*_GIT_FILES, "hooks"):
            if folders.exists(path, name):
                self._ids[f"{path}/{name}"] = folders.identity(f"{path}/{name}")
                self._cover(f"{path}/{name}")
        self._cover_references(path)
        inner = [f"{path}/modules", f"{path}/worktrees"]
        while inner:
            here = inner.pop()
            with contextlib.suppress(OSError), self._folders.opened(here) as fd:
                names = os.listdir(fd)
                if "HEAD" in names:
                    self._cover_repository(here)
                inner += [f"{here}/{name}" for name in names if name not in ("objects", "refs", "logs", "hooks")]

    def _cover_git_file(self, path: str) -> None:
        """A file `.git` of the user: the repository it leads to is covered, also one that does not exist yet."""
        folder, name = os.path.split(path)
        target = folders.git_file_target(folder, self._folders.read(folder, name))
        if self._folders.holds_below_root(target):
            if folders.is_folder(target):
                self._cover_repository(target)
            elif not os.path.lexists(target):
                self._reserved_paths.add(target)

    def _cover_references(self, repository: str) -> None:
        """Cover what a repository's settings name as further settings or hooks, if it lies in the workspace."""
        tree, files, seen = os.path.dirname(repository), [f"{repository}/config"], set[str]()
        while files:
            file = files.pop()
            for value in referenced_paths(self._folders.read(*os.path.split(file)) or ""):
                for base in (tree, os.path.dirname(file)):
                    path = os.path.normpath(os.path.join(base, os.path.expanduser(value)))
                    if path not in seen and self._folders.holds_below_root(path):
                        seen.add(path)
                        self._reserved_paths.add(path)
                        if os.path.lexists(path):
                            self._ids[path] = folders.identity(path)
                            self._path_of_identity[self._ids[path]] = path
                            self._cover(path)
                            files.append(path)

    def _enter_repository(self, path: str) -> None:
        if self._is_granted(path) or self._is_covered(path) or path in self._new_repositories:
            return
        self._new_repositories.add(path)
        try:
            with self._folders.opened(path) as fd:
                self._inotify.watch(fd, path, inotify.MODIFY)
        except OSError:
            self._set_aside.rename(*os.path.split(path), "cannot be looked at")
            return
        for name in ("modules", "worktrees"):
            if folders.is_folder(f"{path}/{name}"):
                self._enter(f"{path}/{name}")
        self._check_repository(path)

    def _check_repository(self, path: str) -> None:
        if os.path.basename(path) == "hooks":
            path = os.path.dirname(path)
        if path in self._new_repositories:
            for name in ("config", "config.worktree"):
                self._check_config(path, name)
            if folders.exists(path, "commondir"):
                target = folders.path_in(path, self._folders.read(path, "commondir"))
                if target not in self._new_repositories and not self._is_covered(target):
                    self._set_aside.rename(path, "commondir", "other settings for a repository")
            self._check_hooks(path)
        elif self._is_covered(path):
            for entry in (f"{path}/{name}" for name in (*_GIT_FILES, "hooks") if folders.exists(path, name)):
                if folders.identity(entry) == self._ids.get(entry):
                    continue
                if entry in self.covers:
                    self._changed_by_user(entry)
                else:
                    self._set_aside.rename(*os.path.split(entry), "other settings for a repository")
        elif folders.exists(path, "HEAD") and (folders.exists(path, "objects") or folders.exists(path, "commondir")):
            self._enter_repository(path)

    def _check_config(self, path: str, name: str) -> None:
        if not folders.exists(path, name) or self._is_granted(f"{path}/{name}"):
            return
        text = self._folders.read(path, name)
        if text is None:
            self._set_aside.rename(path, name, "not a plain file")
            return
        checked = check_config(text, lambda value: self._folders.holds(folders.path_in(path, value)))
        if not checked.removed:
            return
        self._set_aside.replace(path, name, checked.text, f"has {', '.join(dict.fromkeys(checked.removed))}")

    def _check_hooks(self, path: str) -> None:
        hooks = f"{path}/hooks"
        if not folders.exists(path, "hooks"):
            return
        if not folders.is_folder(hooks):
            self._set_aside.rename(path, "hooks", "not a plain folder")
            return
        with contextlib.suppress(FileNotFoundError), self._folders.opened(hooks, force=True) as fd:
            self._inotify.watch(fd, hooks)
            for name in os.listdir(fd):
                if not name.endswith(".sample") and SUFFIX not in name:
                    self._set_aside.rename(hooks, name, "git hook")


def _is_hidden(name: str) -> bool:
    return _HIDDEN.match(name) is not None and name not in _NOT_HIDDEN
