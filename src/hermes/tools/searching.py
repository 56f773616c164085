"""The tool `search_files`: ripgrep or a fallback finds the lines; they are read through the path guard."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from hermes.core import limits
from hermes.guards.paths import PathRefused, Paths
from hermes.sandbox.base import Sandbox, SandboxError
from hermes.sandbox.local import Local, NoSandbox
from hermes.tools import file_access as access
from hermes.tools import rg_fallback
from hermes.tools.framework.registry import Answer, ToolArguments, ToolContext, ToolDef, ToolError

_RG = "rg --no-config --no-messages --no-ignore-global --no-ignore-exclude --no-require-git --color never --null -H"
_RG_TEXT = "--no-mmap --encoding none --crlf --no-heading"
_RG_MODES = {"files": "--files", "count": "--count --include-zero", "lines": "--line-number --max-columns 1"}
_LISTED = re.compile(rb"\./([^\0]+)\0(?:(\d+)[^\n]*\n)?")
_SIMPLE_GLOB = re.compile(r"[\w.*?{},-]+")
Listed = list[tuple[str, int]]


@dataclass(slots=True)
class Search:
    """One call. `name` is set where a single file is searched; a path must match all `globs`."""

    ctx: ToolContext
    paths: Paths
    pattern: str
    globs: list[str]
    ignore_case: bool
    deadline: float
    root: str = ""
    name: str = ""
    withheld: int = 0
    complete: bool = True

    def begin(self, path: str) -> None:
        paths = self.paths
        with access.report_file_errors(self.ctx, paths, path):
            real = str(paths.check(access.resolve_path(self.ctx, paths, path), "read"))
            self.ctx.foreign = self.ctx.resources.is_foreign_file(real)
            try:
                with paths.open(real) as file:
                    size, kind = os.fstat(file.fileno()).st_size, access.type_of(file.read(access.SNIFFED_BYTES), real)
            except IsADirectoryError:
                self.root = real
                return
        if kind is not None:
            raise access.binary_refusal(path, kind, size)
        self.root, self.name = os.path.split(real)

    async def listed(self, mode: str, names: list[str], hits_max: int = 0) -> Listed:
        """Paths with a number each: the count of matching lines, or the number of a matching line."""
        sandbox = await self.ctx.resources.sandbox()
        if isinstance(sandbox, NoSandbox):
            sandbox = Local(sandbox.place)  # it runs our own search only, below what the guard lets be read
        if Path(self.root).is_relative_to(self.ctx.resources.spill):
            sandbox = Local(sandbox.place)  # spill files are not shown to commands, but this run may read them
        for argv in (
            self._rg_argv(mode, names, hits_max),
            [sandbox.python, *self._fallback_argv(mode, names, hits_max)],
        ):
            try:
                code, output = await self._output(sandbox, argv)
            except SandboxError:
                continue
            if code in (0, 1, 2) and (not output or output.startswith(b"./")):
                return await self.ctx.blocking(partial(_parse_listing, output))
            if output.startswith(b"!"):
                hint = r"It is a regular expression; a backslash makes a character plain, as in \( or \[."
                error = output[1:].decode(errors="replace")
                raise ToolError(f"The pattern cannot be used: {error}.", "invalid_arguments", hint)
        hint = "Where commands run there must be rg or python3; tell the user, or use other commands."
        raise ToolError("Nothing that searches can be started.", "tool_unavailable", hint)

    def _rg_argv(self, mode: str, names: list[str], hits_max: int) -> list[str]:
        argv = [*_RG.split(), *_RG_MODES[mode].split(), *(["--hidden"] if self._hidden else [])]
        if glob := self._narrow(mode, names):  # as a type: a glob would override ignore files
            argv += ["--type-add", f"wanted:{glob}", "--type", "wanted"]
        if mode != "files":
            argv += [*_RG_TEXT.split(), *(["--ignore-case"] if self.ignore_case else [])]
            argv += [*(["--max-count", str(hits_max)] if hits_max else []), "--regexp", self.pattern]
        return [*argv, "--", *([f"./{name}" for name in names] or ["./"])]

    def _fallback_argv(self, mode: str, names: list[str], hits_max: int) -> list[str]:
        request = {"mode": mode, "pattern": self.pattern if mode != "files" else "", "ignore_case": self.ignore_case}
        request |= {"paths": names, "most": hits_max, "hidden": self._hidden, "glob": self._narrow(mode, names)}
        return ["-I", "-S", "-c", _source(), json.dumps(request)]

    @property
    def _hidden(self) -> bool:
        return any(re.search(r"(^|[/{,])\.", glob) for glob in self.globs)

    def _narrow(self, mode: str, names: list[str]) -> str:
        if names or (mode == "files" and self.ignore_case):
            return ""
        return next((glob for glob in self.globs if _SIMPLE_GLOB.fullmatch(glob) and glob != "*"), "")

    async def _output(self, sandbox: Sandbox, argv: list[str]) -> tuple[int, bytes]:
        left = max(0.1, self.deadline - asyncio.get_running_loop().time())
        output = bytearray()
        async with await sandbox.spawn(argv, cwd=self.root, seconds=left, network=False) as process:
            async for chunk in process.chunks():
                output += chunk
                if len(output) > limits.SEARCH_LISTED_BYTES_MAX:
                    process.kill()
                    break
            code = await process.wait()
        if process.ended_by == "exit":
            return code, bytes(output)
        self.complete = False
        return 0, bytes(output[: max(output.rfind(b"\n"), output.rfind(b"\0")) + 1])

    def let_through(self, listed: Listed, *, content: bool) -> Listed:
        """The paths that match the globs and may be read, sorted. Refused files are counted whether they match or not,
        so that the count reveals nothing of their content. Blocks."""
        try:
            anchored = [glob.lstrip("/") if "/" in glob else f"**/{glob}" for glob in self.globs]
            ignore_case = self.ignore_case and not content
            globs = [rg_fallback.Glob(glob, dots=False, ignore_case=ignore_case) for glob in anchored]
        except ValueError as error:
            hint = "A glob looks like *.py, src/**/*.ts or *.{c,h}."
            raise ToolError(f"The glob cannot be used: {error}.", "invalid_arguments", hint) from None
        out: Listed = []
        for path, count in sorted(listed):
            if not self.name and not all(glob.matches(path.split("/")) for glob in globs):
                continue
            if not self.paths.lets_read(os.path.join(self.root, path)):
                self.withheld += 1
            elif not content:
                out.append((path, count))
            elif count:
                try:
                    self.paths.check(os.path.join(self.root, path), "read")
                    out.append((path, count))
                except PathRefused:
                    self.withheld += 1
        return out

    def display_path(self, path: str) -> str:
        return access.display_path(self.ctx, self.paths, os.path.join(self.root, path))

    def hits(self, numbers: dict[str, list[int]], context: int) -> list[Answer]:
        """The lines of these numbers with their context. Blocks."""
        out: list[Answer] = []
        paths, redactor, chars_left = self.paths, access.LineRedactor(self.ctx), access.content_chars_max(self.ctx)
        for path, line_numbers in numbers.items():
            texts: dict[int, str] = {}
            try:
                with paths.open(os.path.join(self.root, path)) as file:
                    lines = access.Lines(file, self.ctx.cancelled)
                    for number in line_numbers:
                        lines.skip_to(number - context)
                        while lines.number <= number + context and (raw := lines.next()):
                            texts[lines.last] = redactor.line(raw, lines.is_key)[0][: limits.SEARCH_LINE_CHARS_MAX]
            except (PathRefused, OSError):  # it has changed meanwhile
                continue
            for number in (number for number in line_numbers if number in texts):
                hit: Answer = {"path": self.display_path(path), "line": number, "text": texts[number]}
                if context:
                    hit["before"] = [texts[n] for n in range(number - context, number) if n in texts]
                    hit["after"] = [texts[n] for n in range(number + 1, number + context + 1) if n in texts]
                chars_left -= len(json.dumps(hit, ensure_ascii=False)) + 2
                if chars_left < 0 and out:
                    return out
                out.append(hit)
        return out


@cache
def _source() -> str:
    """Passed with the command, because not every sandbox shows our own files."""
    return inspect.getsource(rg_fallback)


def _parse_listing(output: bytes) -> Listed:
    return [(os.fsdecode(match[1]), int(match[2] or 0)) for match in _LISTED.finditer(output)]


_Pattern = Annotated[str, Meta(min_length=1, max_length=limits.SEARCH_PATTERN_CHARS_MAX)]


class SearchFiles(ToolArguments):
    pattern: _Pattern
    target: Literal["content", "files"] = "content"
    path: Annotated[str, Meta(min_length=1, description="A folder or a file.")] = "."
    file_glob: _Pattern | None = None
    limit: Annotated[int, Meta(ge=1, le=limits.SEARCH_HITS_MAX)] = limits.SEARCH_HITS
    offset: Annotated[int, Meta(ge=0)] = 0
    output_mode: Literal["content", "files_only", "count"] = "content"
    context: Annotated[int, Meta(ge=0, le=limits.SEARCH_CONTEXT_LINES_MAX)] = 0
    ignore_case: bool = False


async def _run(ctx: ToolContext, args: SearchFiles) -> Answer:
    offset, limit = args.offset, args.limit
    content = args.target == "content"
    globs = [glob for glob in (args.file_glob, None if content else args.pattern) if glob]
    deadline = asyncio.get_running_loop().time() + limits.SEARCH_FILES_S_MAX
    paths = await ctx.resources.paths()
    search = Search(ctx, paths, args.pattern, globs or ["*"], args.ignore_case, deadline)
    await ctx.blocking(partial(search.begin, args.path))
    names = [search.name] if search.name else []
    listed = await search.listed("count" if content else "files", names)
    files = await ctx.blocking(partial(search.let_through, listed, content=content))
    matches: Sequence[Answer | str] = []
    if content and args.output_mode == "content":
        total, ranges = sum(count for _, count in files), _hits_on_page(files, offset, limit)
        if ranges:
            numbers: dict[str, list[int]] = {}
            for path, number in await search.listed("lines", list(ranges), max(end for _, end in ranges.values())):
                numbers.setdefault(path, []).append(number)
            page_numbers = {path: numbers.get(path, [])[first:end] for path, (first, end) in ranges.items()}
            matches = await ctx.blocking(partial(search.hits, page_numbers, args.context))
    else:
        total, page = len(files), files[offset : offset + limit]
        counted = content and args.output_mode == "count"
        matches = [{"path": search.display_path(p), "count": n} if counted else search.display_path(p) for p, n in page]
    return _answer(search, matches, total, offset)


def _hits_on_page(files: Listed, offset: int, limit: int) -> dict[str, tuple[int, int]]:
    ranges, before = {}, 0
    for path, count in files:
        first, end = max(0, offset - before), min(count, offset + limit - before)
        if first < end:
            ranges[path] = (first, end)
        before += count
    return ranges


def _answer(search: Search, matches: Sequence[Answer | str], total: int, offset: int) -> Answer:
    more = offset + len(matches) < total and bool(matches)
    answer: Answer = {"matches": matches, "total": total, "truncated": more or not search.complete}
    answer |= {"next_offset": offset + len(matches) if more else None, "withheld": search.withheld}
    if not search.complete:
        answer |= {"timed_out": True, "hint": "Not everything was searched; name a smaller folder or a file_glob."}
    return answer


TOOL = ToolDef(
    name="search_files",
    toolset="file",
    description=(
        "Search in files, or for files. target=content: pattern is a regular expression, matched line by line. "
        "target=files: pattern is a glob for names (*.py) or paths (src/**/*.ts). Files that ignore files name are left "
        "out, hidden ones too unless path or a glob names them. `withheld` counts files that may not be read."
    ),
    arguments=SearchFiles,
    run=_run,
    effect="read",
    scope=lambda _: access.SCOPE,
    preview=lambda args: f"{args.pattern} in {args.path}",
)
