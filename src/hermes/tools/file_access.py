"""Shared by the file tools: paths, errors for the model, redacted lines, and atomic changes."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import mimetypes
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Protocol

from hermes.core import limits
from hermes.core.text import whole_text
from hermes.guards.paths import PathRefused, Paths
from hermes.guards.secrets import MARK
from hermes.tools.framework.registry import Args, Data, Prepared, Reconciled, ToolContext, ToolError
from hermes.tools.framework.resources import RunResources

# The real path is known only to the guard, so writing calls wait for each other and for reading ones.
SCOPE = frozenset({"files"})
BOM = b"\xef\xbb\xbf"
SNIFFED_BYTES = 8192
# A secret is also recognised if the shown part of its line ends inside it.
_BEYOND_CHARS = 4096
_SHOWN_SECRET = re.compile(r"«redacted:[a-z_]+»")
_KEY_BEGIN = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY")
_KEY_END = re.compile(rb"-----END|[^\w+/=:,.\s\"'\\-]")
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_TYPES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"%PDF-": "application/pdf",
    b"PK\x03\x04": "application/zip",
    b"\x1f\x8b": "application/gzip",
    b"\x7fELF": "application/x-executable",
    b"SQLite format 3\0": "application/vnd.sqlite3",
    b"\xff\xfe": "text/plain; charset=utf-16",
    b"\xfe\xff": "text/plain; charset=utf-16",
}


# ---- paths


class HasResources(Protocol):
    @property
    def resources(self) -> RunResources: ...


def _base(ctx: HasResources, paths: Paths) -> str:
    shell = ctx.resources.session.shell
    return str(paths.cwd) if shell is None else shell.cwd


def resolve_path(ctx: HasResources, paths: Paths, path: str) -> str:
    if (shell := ctx.resources.session.shell) is not None and re.match(r"~(/|\Z)", path):
        path = shell.env.get("HOME", "~") + path[1:]
    return path if path.startswith(("/", "~")) or not path else os.path.join(_base(ctx, paths), path)


def display_path(ctx: HasResources, paths: Paths, real: str | Path) -> str:
    text, base = str(real), _base(ctx, paths).rstrip("/") + "/"
    return whole_text(text.removeprefix(base))


@contextlib.contextmanager
def report_file_errors(ctx: ToolContext, paths: Paths, path: str) -> Iterator[None]:
    try:
        yield
    except PathRefused as refused:
        hint = "Do not try another way; tell the user if this file is needed."
        raise ToolError(f"{path}: {refused}", "path_refused", hint, rule=refused.rule) from None
    except (FileNotFoundError, NotADirectoryError):
        near = _similar_names(ctx, paths, path)
        hint = f"Near names: {', '.join(near)}." if near else "search_files with target=files finds files by name."
        raise ToolError(f"There is no file {path}.", "path_not_found", hint, near=near) from None
    except IsADirectoryError:
        hint = "search_files with target=files shows what is in it."
        raise ToolError(f"{path} is a folder, not a file.", "invalid_arguments", hint) from None
    except PermissionError:
        hint = "The system refuses it to this user; tell the user."
        raise ToolError(f"{path}: permission denied.", "path_refused", hint, rule="permissions") from None
    except OSError as error:
        hint = "Nothing was changed; tell the user."
        raise ToolError(f"{path}: {error.strerror or error}.", "tool_crashed", hint) from None


def _similar_names(ctx: ToolContext, paths: Paths, path: str) -> list[str]:
    folder, name = os.path.split(os.path.normpath(resolve_path(ctx, paths, path)))
    names = None
    while names is None:
        try:
            names = paths.names(folder)
        except (FileNotFoundError, NotADirectoryError):
            folder, name = os.path.split(folder)
        except (PathRefused, OSError):
            return []
    by_lower = {each.lower(): each for each in sorted(names)[: limits.COMPARED_LINES_MAX]}
    close = difflib.get_close_matches(name.lower(), by_lower, limits.NEAR_NAMES_MAX, 0.5)
    return [display_path(ctx, paths, os.path.join(folder, by_lower[key])) for key in close]


async def writable(ctx: ToolContext, paths: Paths, path: str) -> str:
    """The real path of a file to write, after the user has approved it where that is needed."""
    from hermes.tools.framework import approvals

    absolute = resolve_path(ctx, paths, path)

    def look() -> tuple[Path, Path | None, Path | None]:
        with report_file_errors(ctx, paths, path):
            try:
                real = paths.check(absolute, "write")
            except PathRefused as refused:
                real = Path(os.path.realpath(os.path.expanduser(absolute)))
                entry = paths.reserved_entry(str(real))
                if refused.rule not in ("git_control", "reserved_name") or entry is None:
                    raise
                return real, entry, None
            return real, None, paths.needs_grant(real)

    real, entry, folder = await ctx.blocking(look)
    if entry is not None:
        await approvals.reserved(ctx, [entry])
        real, _, folder = await ctx.blocking(look)
    if folder is not None:
        await approvals.folder(ctx, folder)
        real, _, _ = await ctx.blocking(look)
    return str(real)


# ---- lines


class Lines:
    """The lines of a file in order, in little memory however large the file or a line is."""

    def __init__(self, file: BufferedReader, cancelled: threading.Event) -> None:
        self._file, self._cancelled = file, cancelled
        self._sha, self._newlines, self._last, self._tail = hashlib.sha256(), 0, b"\n", b""
        self._in_key = False
        self.is_key = False
        self.passed_bytes = 0

    @property
    def number(self) -> int:
        return self.last + 1

    @property
    def last(self) -> int:
        return self._newlines + (self._last != b"\n")

    def skip_to(self, number: int) -> None:
        while (missing := number - 1 - self._newlines) > 0 and (block := self._file.read(limits.BLOCK_BYTES)):
            if block.count(b"\n") >= missing:
                end = 0
                for _ in range(missing):
                    end = block.index(b"\n", end) + 1
                self._file.seek(end - len(block), os.SEEK_CUR)
                block = block[:end]
            self._count(block)

    def next(self) -> bytes:
        """The next line, or the beginning of a very long one; empty at the end. `is_key`: it is part of a private
        key."""
        while self._last != b"\n" and (rest := self._file.readline(limits.BLOCK_BYTES)):
            self._count(rest)
        was_in_key = self._in_key
        self._count(line := self._file.readline(limits.LINE_BYTES_MAX))
        self.is_key = self._in_key or (was_in_key and b"-----END" in line)
        return line

    def ahead(self) -> bytes:
        return self._file.peek()

    def finish(self) -> str:
        while block := self._file.read(limits.BLOCK_BYTES):
            self._count(block)
        return self._sha.hexdigest()

    def _count(self, data: bytes) -> None:
        if self._cancelled.is_set():
            raise ToolError("Reading was stopped.", "interrupted", "Read a smaller part.")
        self._sha.update(data)
        self.passed_bytes += len(data)
        self._newlines += data.count(b"\n")
        self._last = data[-1:] or self._last
        text, start = self._tail + data, len(self._tail) if self._in_key else -1
        for begin in _KEY_BEGIN.finditer(text):
            start = begin.end()
        self._in_key = start >= 0 and _KEY_END.search(text, start) is None
        self._tail = data[-64:]


def content_chars_max(ctx: ToolContext) -> int:
    """How much file content fits into an answer without being spilled."""
    share = int(ctx.resources.window_tokens * limits.BYTES_PER_TOKEN * limits.READ_WINDOW_SHARE)
    return min(ctx.settings.file_read_max_chars, max(limits.SPILLED_CHARS_MIN, share))


class LineRedactor:
    """Lines as the model sees them: without secrets, and cut where they are too long."""

    def __init__(self, ctx: ToolContext) -> None:
        self._secrets, self._all = ctx.secrets, ctx.settings.security.redact_secrets

    def hides_nothing(self, lines: bytes) -> bool:
        text = lines.decode("utf-8", "replace")
        return self.text(text) == text

    def line(self, raw: bytes, is_key: bool = False, *, plain: bool = False) -> tuple[str, bool]:
        """A line without its end, and whether it was cut. A `plain` one is known to hold no secret."""
        if is_key:
            return "«redacted:private_key»", False
        text = raw.removeprefix(BOM).decode("utf-8", "replace").rstrip("\r\n")
        if plain and len(text) <= limits.LINE_CHARS_MAX:
            return text, False
        redacted = self.text(text[: limits.LINE_CHARS_MAX + _BEYOND_CHARS])
        cut = len(redacted) > limits.LINE_CHARS_MAX or len(text) > limits.LINE_CHARS_MAX + _BEYOND_CHARS
        return (redacted[: limits.LINE_CHARS_MAX] + " […]" if cut else redacted), cut

    def text(self, text: str) -> str:
        masked = text.replace(MARK, "\ufdd0")  # an existing mark is no secret of this file
        masked = self._secrets.mask(masked).replace(MARK, "«redacted:known»")
        if self._all:
            masked = self._secrets.redact(masked).replace(MARK, "«redacted:credential»")
        return masked.replace("\ufdd0", MARK)


def refuse_redaction_marks(*texts: str) -> None:
    """Refuse to write a redaction mark: the secret it stands for would be lost."""
    if mark := next((match[0] for text in texts if (match := _SHOWN_SECRET.search(text))), None):
        hint = "Change only the lines around it, with patch, so that the secret stays as it is."
        raise ToolError(f"The text holds {mark}, which only stands for a secret.", "redacted_marker", hint)


def type_of(head: bytes, name: str) -> str | None:
    """The media type of a file that is no text, by its first bytes; None for a text."""
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image/webp"
    kind = next((kind for magic, kind in _TYPES.items() if head.startswith(magic)), None)
    if kind or b"\0" not in head:
        return kind
    return mimetypes.guess_type(name)[0] or "application/octet-stream"


def binary_refusal(path: str, kind: str, size: int, hint: str = "") -> ToolError:
    hint = hint or "A command in the terminal can convert or inspect it."
    return ToolError(f"{path} is no text: {kind}, {size} bytes.", "binary_file", hint, type=kind, bytes=size)


def content_of(paths: Paths, real: str) -> tuple[bytes, os.stat_result] | None:
    with paths.open(real) as file:
        status = os.fstat(file.fileno())
        data = file.read(limits.WRITTEN_BYTES_MAX + 1)
    return None if len(data) > limits.WRITTEN_BYTES_MAX else (data, status)


def is_crlf(data: bytes) -> bool:
    return data.count(b"\r\n") == data.count(b"\n") > 0


# ---- changes


@dataclass(frozen=True, slots=True)
class Change:
    """The new content of a file, None to delete it. `old` and `like` are its old content and status, to undo the
    change."""

    path: str
    before: str | None
    data: bytes | None
    old: bytes | None = None
    like: os.stat_result | None = None

    @property
    def after(self) -> str | None:
        return None if self.data is None else hashlib.sha256(self.data).hexdigest()


def prepare_changes(changes: list[Change], value: object) -> Prepared:
    before = {whole_text(change.path): change.before for change in changes}
    after = {whole_text(change.path): change.after for change in changes}
    return Prepared({"before": before, "after": after}, value)


def commit(ctx: ToolContext, paths: Paths, changes: list[Change]) -> None:
    """Make all changes or none. Raises ToolError if a file has changed since it was read."""
    for change in changes:
        if paths.digest(change.path) != change.before:
            raise stale_refusal(display_path(ctx, paths, change.path), "has changed meanwhile")
    done: list[Change] = []
    try:
        for change in sorted(changes, key=lambda change: change.data is None):
            _put(paths, change.path, change.data, change.like)
            done.append(change)
    except BaseException:
        not_undone = []
        for change in reversed(done):
            try:
                _put(paths, change.path, change.old, change.like)
            except (OSError, PathRefused):
                not_undone.append(change.path)
        if not_undone:
            names = ", ".join(display_path(ctx, paths, path) for path in not_undone)
            message = f"The change failed half-way, and could not be undone in: {names}."
            raise ToolError(message, "tool_crashed", "Look at these files and tell the user.") from None
        raise
    seen = ctx.resources.session.seen
    for change in changes:
        if change.after is None:
            seen.pop(change.path, None)
        elif change.before is None or seen.get(change.path) == change.before:
            seen[change.path] = change.after


def _put(paths: Paths, path: str, data: bytes | None, like: os.stat_result | None) -> None:
    if data is None:
        paths.remove(path)
    else:
        paths.replace(path, data, like)


def stale_refusal(path: str, reason: str) -> ToolError:
    return ToolError(f"{path} {reason}.", "stale_file", "Read it first, then write again.")


async def reconcile(ctx: ToolContext, _: Args, started: Data) -> Reconciled:
    before, after = started.get("before"), started.get("after")
    if not isinstance(before, dict) or not isinstance(after, dict) or not after:
        return "unclear"
    paths = await ctx.resources.paths()
    now: dict[str, str | None] = await ctx.blocking(lambda: {path: paths.digest(path) for path in after})
    if now not in (before, after):
        return "unclear"
    # Either way it is as this session knows it.
    ctx.resources.session.seen.update({path: digest for path, digest in now.items() if digest is not None})
    return "done" if now == after else "not_done"
