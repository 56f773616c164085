"""The path guard: where the model may read and write, and opening files without following swapped links."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import NamedTuple, Protocol

from hermes.core.home import DEFAULT_PROFILE, Home
from hermes.guards.path_lists import APART, PRIVATE_KEY, Lists, Mode, below, git_entry, plain, reserved_entry

PATH_BYTES_MAX = 4096
# A larger file is read from the disk, whatever an editor has of it.
EDITED_BYTES_MAX = 8 << 20
SNIFFED_BYTES = 64 * 1024

# A folder on the way need not be readable, only passable; not every system has a way to say so.
_STEP = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
# Without waiting for the other end of a pipe, and without taking on a terminal.
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DRAFT = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A real path holds no link: one that is met on the way was put there after the check.
_KINDS = {stat.S_IFREG: "", stat.S_IFDIR: "", stat.S_IFLNK: "changed", stat.S_IFSOCK: "socket", stat.S_IFIFO: "pipe"}


class PathRefused(Exception):
    """A path that the model may not use. Names the rule, and reveals nothing of what is there."""

    code = "path_refused"

    def __init__(self, rule: str) -> None:
        super().__init__(f"This path is refused by the rule '{rule}'.")
        self.rule = rule


class Written(NamedTuple):
    path: Path
    created: bool


class EditorFiles(Protocol):
    """Files as the user's editor has them open. Both calls block, and are only made for paths that the guard allows."""

    def read(self, path: str) -> str | None:
        """The text of a file with what is not saved yet; None: the file on the disk counts."""

    def write(self, path: str, text: str) -> bool:
        """Write a file through the editor. False: it is to be written to the disk. Raises OSError."""


class _UnsavedFile(BufferedReader):
    """The content that an editor has of a file, with the descriptor of the file itself."""

    def __init__(self, file: BufferedReader, data: bytes) -> None:
        super().__init__(BytesIO(data))
        self._file = file

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        super().close()
        self._file.close()


class Paths:
    """The files of one run. Everything here blocks: it belongs in a thread.

    `roots_rw` and `roots_ro` are the workspace and the mounts; the innermost one counts. With `isolated` there is
    nothing outside them. `safe_root` bounds all writing. With an `editor` text files are read and written through it.
    """

    def __init__(
        self,
        *,
        cwd: Path,
        home: Home,
        roots_rw: tuple[Path, ...] = (),
        roots_ro: tuple[Path, ...] = (),
        isolated: bool = False,
        safe_root: tuple[Path, ...] = (),
        user_home: Path | None = None,
        editor: EditorFiles | None = None,
    ) -> None:
        self.cwd = cwd
        self._editor = editor
        self._user_home = user_home or Path.home()
        self._lists = Lists(home.path, self._user_home)
        self._isolated = isolated
        self._home, self._top = os.path.realpath(home.path), os.path.realpath(home.root)
        self._is_default = home.profile == DEFAULT_PROFILE
        self._roots = {os.path.realpath(root): True for root in roots_rw}
        self._roots |= {os.path.realpath(root): False for root in roots_ro}
        self._granted: tuple[str, ...] = ()
        self._reserved_granted: tuple[str, ...] = ()
        self._safe = tuple(os.path.realpath(root.expanduser()) for root in safe_root)

    # ---- verdicts

    def check(self, path: str, mode: Mode) -> Path:
        """The real path, which need not exist. Raises PathRefused."""
        real = self._decide(path, mode)
        with contextlib.suppress(OSError):
            status = os.lstat(real)
            self._examine(status)
            if mode == "read" and stat.S_ISREG(status.st_mode):
                os.close(self._open_checked(real))
        return real

    def needs_grant(self, path: Path) -> Path | None:
        return None if self._isolated or self._root_of(str(path)) else path.parent

    def grant(self, folder: Path) -> None:
        self._granted = (*self._granted, str(folder))
        self._roots = {**self._roots, str(folder): True}

    def grant_reserved(self, path: Path) -> None:
        self._reserved_granted = (*self._reserved_granted, str(path))

    def reserved_entry(self, path: str) -> Path | None:
        entry = git_entry(path) or reserved_entry(self._root_of(path) or "/", path)
        return None if entry is None or self._is_reserved_granted(path) else Path(entry)

    def _is_reserved_granted(self, path: str) -> bool:
        return any(below(path, granted) for granted in self._reserved_granted)

    def lets_read(self, real: str) -> bool:
        """Whether a real path may be read, by its name alone, without looking at the disk."""
        try:
            self._judge(real, real, "read")
        except PathRefused:
            return False
        return True

    def _decide(self, path: str, mode: Mode) -> Path:
        try:
            fits = 0 < len(os.fsencode(path)) <= PATH_BYTES_MAX and "\0" not in path
        except UnicodeError:
            fits = False
        if not fits:
            raise PathRefused("bad_path")
        if path == "~" or path.startswith("~/"):
            path = f"{self._user_home}{path[1:]}"
        absolute = os.path.join(self.cwd, os.path.expanduser(path))
        try:
            real = os.path.realpath(absolute)
        except OSError:
            raise PathRefused("changed") from None
        self._judge(os.path.normpath(absolute), real, mode)
        return Path(real)

    def _judge(self, path: str, real: str, mode: Mode) -> None:
        for rule in self._lists.hits(path, real, mode):
            if rule != "git_control" or not self._is_reserved_granted(real):
                raise PathRefused(rule)
        if mode == "write" and self.reserved_entry(real) is not None:
            raise PathRefused("reserved_name")
        self._bound(real, mode)

    def _bound(self, real: str, mode: Mode) -> None:
        """Refuse what belongs to another profile, run or owner, and what is outside the roots."""
        # As in the lists, what is refused is refused in any spelling; what is allowed is so in the right one only.
        text, root = plain(real), self._root_of(real)
        mine = not below(text, plain(f"{self._top}/profiles")) if self._is_default else below(real, self._home)
        if below(text, plain(self._top)) and not mine:
            raise PathRefused("other_profile")
        for area in (f"{self._home}/{area}" for area in APART):
            if below(text, plain(area)) and not (root and root != area and below(root, area)):
                raise PathRefused("other_session")
        if self._isolated and root is None:
            raise PathRefused("outside_sandbox")
        if mode == "write" and root is not None and not self._roots[root]:
            raise PathRefused("read_only")
        if mode == "write" and not self._is_safe(real):
            raise PathRefused("outside_safe_root")

    def _is_safe(self, real: str) -> bool:
        return not self._safe or any(below(real, safe) for safe in self._safe)

    def _root_of(self, path: str) -> str | None:
        return max((root for root in self._roots if below(path, root)), key=len, default=None)

    def _examine(self, status: os.stat_result) -> None:
        """Refuse what is neither file nor folder, and a hard link to a refused file."""
        if rule := _KINDS.get(stat.S_IFMT(status.st_mode), "device"):
            raise PathRefused(rule)
        is_linked = stat.S_ISREG(status.st_mode) and status.st_nlink > 1
        if is_linked and (status.st_dev, status.st_ino) in self._lists.sealed():
            raise PathRefused("hard_link")

    # ---- files

    def open(self, path: str) -> BufferedReader:
        real = self._decide(path, "read")
        return self._edited(real, _as_file(self._open_checked(real)))

    def _edited(self, real: Path, file: BufferedReader, *, for_digest: bool = False) -> BufferedReader:
        """The file, or what the editor has of it where that differs in more than line ends."""
        if self._editor is None or os.fstat(file.fileno()).st_size > EDITED_BYTES_MAX:
            return file
        saved = file.read()
        file.seek(0)
        text = None if b"\0" in saved[:SNIFFED_BYTES] else self._editor.read(str(real))
        if text is None or _plain_lines(text.encode()) == _plain_lines(saved):
            return file
        if not for_digest and PRIVATE_KEY.search(text.encode()[:SNIFFED_BYTES]):
            file.close()
            raise PathRefused("private_key")
        return _UnsavedFile(file, text.encode())

    def names(self, path: str) -> list[str]:
        fd = self._open_checked(self._decide(path, "read"))
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def digest(self, path: str) -> str | None:
        """The SHA-256 of a file that may be written, even if it may not be read; None where there is none."""
        real = self._decide(path, "write")
        try:
            fd = self._open_checked(real, for_digest=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with self._edited(real, _as_file(fd), for_digest=True) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def replace(self, path: str, data: bytes, like: os.stat_result | None = None) -> Written:
        """Write a file in one step: readers see the old content or the new. Mode, owner and links to it stay. Where an
        editor writes it, that is up to the editor.

        A new file gets the mode and owner of `like`.
        """
        real = self._decide_writing(path)
        with self._folder(real.parent, make=True) as folder:
            before = self._stat_target(folder, real.name)
            if self._editor is not None and _is_text(data) and self._editor.write(str(real), data.decode()):
                return Written(real, before is None)
            model = before or like
            draft = f".hermes-{os.urandom(8).hex()}.tmp"
            try:
                fd = os.open(draft, _DRAFT, 0o666 if model is None else 0o600, dir_fd=folder)
                with os.fdopen(fd, "wb") as file:
                    if model is not None:
                        now = os.fstat(fd)
                        if (now.st_uid, now.st_gid) != (model.st_uid, model.st_gid):
                            os.fchown(fd, model.st_uid, model.st_gid)
                        # What is new never runs with another's rights.
                        os.fchmod(fd, stat.S_IMODE(model.st_mode) & 0o777)
                    file.write(data)
                    file.flush()
                    os.fsync(fd)
                os.rename(draft, real.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(draft, dir_fd=folder)
                raise
            _sync(folder)
        return Written(real, before is None)

    def remove(self, path: str) -> Path:
        real = self._decide_writing(path)
        with self._folder(real.parent) as folder:
            self._stat_target(folder, real.name)
            os.unlink(real.name, dir_fd=folder)
            _sync(folder)
        return real

    def _decide_writing(self, path: str) -> Path:
        real = self._decide(path, "write")
        if self.needs_grant(real) is not None:
            raise PathRefused("not_granted")
        return real

    def _stat_target(self, folder: int, name: str) -> os.stat_result | None:
        try:
            status = os.stat(name or ".", dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        self._examine(status)
        if not os.access(name or ".", os.W_OK, dir_fd=folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return status

    def _open_checked(self, real: Path, *, for_digest: bool = False) -> int:
        """A descriptor for reading. The content is checked to be no private key, unless it is only hashed."""
        name = real.name or "."
        with self._folder(real.parent) as folder:
            self._examine(os.stat(name, dir_fd=folder, follow_symlinks=False))
            fd = os.open(name, _LOOK, dir_fd=folder)
        try:
            status = os.fstat(fd)
            self._examine(status)
            sniffed = b"" if for_digest or not stat.S_ISREG(status.st_mode) else os.pread(fd, SNIFFED_BYTES, 0)
            if PRIVATE_KEY.search(sniffed):
                raise PathRefused("private_key")
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextlib.contextmanager
    def _folder(self, real: Path, *, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder, entered name by name from the top without following links."""
        fd, path = os.open("/", _STEP), ""
        try:
            for name in real.parts[1:]:
                path += f"/{name}"
                inner = self._enter(fd, name, make and self._may_make(path))
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _enter(self, folder: int, name: str, make: bool) -> int:
        try:
            return os.open(name, _STEP, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            return self._enter(folder, name, False)
        except OSError:
            self._examine(os.stat(name, dir_fd=folder, follow_symlinks=False))
            raise

    def _may_make(self, folder: str) -> bool:
        """Whether a missing folder may be made: in a root, or on the way to a granted one."""
        inside = self._root_of(folder) is not None or any(below(granted, folder) for granted in self._granted)
        return inside and self._is_safe(folder)


def read_inside(path: Path, root: Path, bytes_max: int, lists: Lists | None = None, *, links: bool = True) -> bytes:
    """The beginning of a file whose content is to reach a prompt: a regular file below `root`, opened name by name.

    Links are followed only as far as they stay below `root`, and none without `links`; `root` itself may be one. With
    `lists` the names that are never read are refused. Raises PathRefused, or OSError as opening does.
    """
    os.stat(path, follow_symlinks=False)  # most of these files are missing, and that is quickly known
    top = os.path.realpath(root)
    real = os.path.realpath(path) if links else os.path.join(top, os.path.relpath(path, root))
    if not below(real, top) or real == top:
        raise PathRefused("outside_root")
    if lists is not None and (rule := next(lists.hits(os.path.abspath(path), real, "read"), "")):
        raise PathRefused(rule)
    *folders, name = real[len(top.rstrip("/")) + 1 :].split("/")
    fd = os.open(top, _STEP)
    try:
        for folder in folders:
            inner = os.open(folder, _STEP, dir_fd=fd)
            os.close(fd)
            fd = inner
        if not stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            raise PathRefused("not_a_regular_file")
        inner = os.open(name, _LOOK, dir_fd=fd)
    finally:
        os.close(fd)
    with _as_file(inner) as file:
        if not stat.S_ISREG(os.fstat(inner).st_mode):  # it was swapped
            raise PathRefused("changed")
        data = file.read(bytes_max)
    if PRIVATE_KEY.search(data[:SNIFFED_BYTES]):
        raise PathRefused("private_key")
    return data


def _plain_lines(data: bytes) -> bytes:
    """For comparing: editors represent line ends, BOM and the last newline of a file in their own ways."""
    return data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").rstrip(b"\n")


def _is_text(data: bytes) -> bool:
    try:
        return len(data) <= EDITED_BYTES_MAX and "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def _as_file(fd: int) -> BufferedReader:
    try:
        return os.fdopen(fd, "rb")
    except OSError:
        os.close(fd)
        raise


def _sync(folder: int) -> None:
    # A folder that can be written to but not listed cannot be opened for this; the rename stands all the same.
    with contextlib.suppress(PermissionError):
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
