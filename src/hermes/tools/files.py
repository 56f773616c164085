"""The tools `read_file` and `write_file`."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from io import BufferedReader
from typing import Annotated

from msgspec import Meta

from hermes.core import limits
from hermes.core.text import spaced_json
from hermes.guards.paths import PathRefused, Paths
from hermes.tools import file_access as access
from hermes.tools.diagnostics import diagnostics
from hermes.tools.diffs import lines_of, shorten, text_of, unified_diff
from hermes.tools.framework.registry import Answer, Prepared, ToolArguments, ToolContext, ToolDef, ToolError
from hermes.tools.vision import data_url

# ---- read_file


class ReadFile(ToolArguments):
    path: Annotated[str, Meta(min_length=1)]
    offset: Annotated[int, Meta(ge=1, description="First line, from 1.")] = 1
    limit: Annotated[int, Meta(ge=1, le=limits.READ_LINES_MAX, description="Lines; 500 if not given.")] = (
        limits.READ_LINES
    )


async def _paths(ctx: ToolContext, _: ReadFile) -> Prepared:
    return Prepared(value=await ctx.resources.paths())


def _read(ctx: ToolContext, args: ReadFile) -> Answer:
    paths: Paths = ctx.prepared
    path = args.path
    with access.report_file_errors(ctx, paths, path):
        real = str(paths.check(access.resolve_path(ctx, paths, path), "read"))
        ctx.foreign = ctx.resources.is_foreign_file(real)
        with paths.open(real) as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(access.SNIFFED_BYTES)
            kind = access.type_of(head, real)
            is_image = kind is not None and kind.startswith("image/")
            if kind is not None and not (is_image and ctx.sees_images):
                has_vision = is_image and "vision_analyze" in ctx.tools
                raise access.binary_refusal(path, kind, size, "vision_analyze can look at it." if has_vision else "")
            file.seek(0)
            answer: Answer = {"path": access.display_path(ctx, paths, real)}
            if not is_image:
                return answer | _slice(ctx, args, file, size, real)
            ctx.images.append(data_url(file.read(limits.IMAGE_BYTES_MAX + 1)))
            return answer | {"type": kind, "bytes": size, "note": "The image itself comes with this answer."}


def _slice(ctx: ToolContext, args: ReadFile, file: BufferedReader, size: int, real: str) -> Answer:
    offset, limit = args.offset, args.limit
    lines, redactor, chars_left = (
        access.Lines(file, ctx.cancelled),
        access.LineRedactor(ctx),
        access.content_chars_max(ctx),
    )
    lines.skip_to(offset)
    content: list[str] = []
    cut_lines: list[int] = []
    more = replaced = plain = False
    looked_at = 0  # secrets are searched in many lines at once, and per line only if there are any
    while lines.number >= offset:
        number = lines.number
        if lines.passed_bytes >= looked_at:
            ahead = lines.ahead()
            looked_at, plain = lines.passed_bytes + len(ahead), redactor.hides_nothing(ahead)
        if not (raw := lines.next()):
            break
        text, cut = redactor.line(raw, lines.is_key, plain=plain and lines.passed_bytes <= looked_at)
        chars_left -= len(spaced_json(text)) + len(str(number))
        if more := len(content) == limit or (chars_left < 0 and bool(content)):
            break
        content.append(f"{number}|{text}")
        cut_lines += [number] if cut else []
        replaced = replaced or ("\ufffd" in text and "\ufffd".encode() not in raw)
    total = None
    if size <= limits.SEEN_BYTES_MAX:
        ctx.resources.session.seen[real], total = lines.finish(), lines.last
    answer: Answer = {"content": "\n".join(content), "total_lines": total, "truncated": more}
    answer["next_offset"] = offset + len(content) if more else None
    notes = [
        f"The file has {size} bytes; its lines were not counted." if total is None else "",
        "The file is empty." if total == 0 else "" if content else f"There is no line {offset}.",
        "Cut lines end with […]; change them with patch only." if cut_lines else "",
        "Bytes that are no UTF-8 are shown as �; change this file with patch only." if replaced else "",
    ]
    answer |= {"note": " ".join(filter(None, notes))} if any(notes) else {}
    return answer | ({"cut_lines": cut_lines} if cut_lines else {})


READ = ToolDef(
    name="read_file",
    toolset="file",
    description=(
        "Read a text file, or look at an image. Lines come as N|text; N| is not part of the file. Long files: go on at next_offset. "
        "What looks like «redacted:kind» stands for a secret that is not shown."
    ),
    arguments=ReadFile,
    run=_read,
    effect="read",
    scope=lambda _: access.SCOPE,
    preview=lambda args: args.path,
    prepare=_paths,
)


# ---- write_file


class WriteFile(ToolArguments):
    path: Annotated[str, Meta(min_length=1)]
    content: str
    overwrite: Annotated[bool, Meta(description="Replace a file without having read it.")] = False


async def _prepare_write(ctx: ToolContext, args: WriteFile) -> Prepared:
    path, content = args.path, args.content
    access.refuse_redaction_marks(content)
    if len(content) > limits.WRITTEN_BYTES_MAX or len(content.encode()) > limits.WRITTEN_BYTES_MAX:
        hint = "Write it in parts, or make it with a command."
        raise ToolError(f"That is more than {limits.WRITTEN_BYTES_MAX} bytes.", "too_large", hint)
    paths = await ctx.resources.paths()
    real = await access.writable(ctx, paths, path)

    def look() -> Prepared:
        with access.report_file_errors(ctx, paths, path):
            before, old = paths.digest(real), None
            if before is not None and not args.overwrite and ctx.resources.session.seen.get(real) != before:
                is_read = real in ctx.resources.session.seen
                reason = "has changed since it was read" if is_read else "was not read in this session"
                raise access.stale_refusal(path, reason)
            if before is not None:
                with contextlib.suppress(PathRefused):  # it may be replaced, but not read
                    old = access.content_of(paths, real)
        data = content.encode()
        if old is not None and access.is_crlf(old[0]) and "\r" not in content:
            data = data.replace(b"\n", b"\r\n")
        if old is not None and old[0].startswith(access.BOM) and not data.startswith(access.BOM):
            data = access.BOM + data
        answer: Answer = {"path": access.display_path(ctx, paths, real), "bytes": len(data), "created": before is None}
        answer |= _count_lines(b"" if before is None else old and old[0], data)
        if old is not None and b"\0" not in old[0] and old[0] != data:
            answer["diff"] = _diff(ctx, answer["path"], old[0], data)
        answer["diagnostics"] = diagnostics(real, data)
        change = access.Change(real, before, data)
        return access.prepare_changes([change], (paths, change, answer))

    return await ctx.blocking(look)


def _count_lines(old: bytes | None, new: bytes) -> Answer:
    """Lines that only moved do not count."""
    if old is None:
        return {"added": len(new.splitlines()), "removed": None}
    lines = [Counter(data.splitlines()) for data in (old, new)]
    return {"added": (lines[1] - lines[0]).total(), "removed": (lines[0] - lines[1]).total()}


def _diff(ctx: ToolContext, path: str, old: bytes, new: bytes) -> str:
    text, *_ = unified_diff(lines_of(text_of(old)), lines_of(text_of(new)), (path, path))
    return shorten(ctx, text, limits.WRITTEN_DIFF_CHARS_MAX)


def _write(ctx: ToolContext, args: WriteFile) -> Answer:
    paths, change, answer = ctx.prepared
    with access.report_file_errors(ctx, paths, args.path):
        access.commit(ctx, paths, [change])
    ctx.resources.session.seen[change.path] = change.after
    return answer  # type: ignore[no-any-return]


WRITE = ToolDef(
    name="write_file",
    toolset="file",
    description=(
        "Write a whole file; folders on the way are made. A file that exists must have been read before, unless "
        "overwrite=true. To change a part of a file use patch. `diagnostics` tells where the content does not parse."
    ),
    arguments=WriteFile,
    run=_write,
    effect="idempotent",
    scope=lambda _: access.SCOPE,
    preview=lambda args: f"{args.path} ({len(args.content)} characters)",
    prepare=_prepare_write,
    reconcile=access.reconcile,
)
