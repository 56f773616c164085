"""The tool `patch`: matches lines that are not quoted exactly, and changes several files atomically."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from hermes.core import limits
from hermes.guards.paths import Paths
from hermes.tools import file_access as access
from hermes.tools.diagnostics import diagnostics
from hermes.tools.diffs import lines_of, printable, shorten, text_of, unified_diff
from hermes.tools.framework.registry import Answer, Prepared, ToolArguments, ToolContext, ToolDef, ToolError

# The ways to compare two lines, strictest first.
LEVELS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("exact", str),
    ("trailing_space", str.rstrip),
    ("indentation", str.strip),
)
_NEAREST, _NEAREST_LINES, _COMPARED_CHARS = 3, 6, 200
_COMPARED_AT_ONCE = 200
_GRAMMAR = (
    "*** Begin Patch\n*** Update File: path\n@@ a line above, if the place is not unique\n context\n-old\n+new\n"
    "*** Add File: path\n+line\n*** Delete File: path\n*** End Patch; `*** Move to: path` may follow Update File."
)


# ---- finding


def find_blocks(lines: list[str], sought: list[str], form: Callable[[str], str]) -> list[int]:
    keys = [form(line) for line in sought]
    # Knuth-Morris-Pratt: repeated lines would otherwise be compared at each place where they could begin.
    shorter = [0] * len(keys)
    matched = 0
    for at in range(1, len(keys)):
        while matched and keys[at] != keys[matched]:
            matched = shorter[matched - 1]
        matched += keys[at] == keys[matched]
        shorter[at] = matched
    starts, matched = [], 0
    for at, line in enumerate(map(form, lines)):
        while matched and (matched == len(keys) or line != keys[matched]):
            matched = shorter[matched - 1]
        matched += line == keys[matched]
        if matched == len(keys):
            starts.append(at + 1 - matched)
    return starts


def reindent(new: list[str], old: list[str], block: list[str]) -> list[str]:
    """New lines, indented relative to `block` as they were relative to `old`."""
    first = next((at for at, line in enumerate(old) if line.strip()), 0)
    was, now = _indent(old[first]), _indent(block[first])
    if was == now:
        return new
    out = []
    for line in new:
        own = _indent(line)
        head = now + own[len(was) :] if own.startswith(was) else now[: max(0, len(now) - len(was) + len(own))]
        out.append(head + line[len(own) :] if line.strip() else line)
    return out


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def replace_text(text: str, old: str, new: str, every: bool) -> tuple[str, str]:
    """The text with `old` replaced, and how `old` was matched. Raises ToolError where it matches several times or
    never."""
    starts = [match.start() for match in re.finditer(re.escape(old), text)]
    if starts:
        if len(starts) > 1 and not every:
            numbers = [text.count("\n", 0, start) + 1 for start in starts[: limits.PLACES_TOLD_MAX]]
            raise ambiguous_match(numbers, len(starts))
        return text.replace(old, new), "exact"
    lines, sought, instead = lines_of(text), lines_of(old), lines_of(new)
    for by, form in LEVELS[1:] if old.strip() else ():
        if places := find_blocks(lines, sought, form):
            if len(places) > 1 and not every:
                raise ambiguous_match([at + 1 for at in places], len(places))
            pieces: list[list[str]] = []
            free = len(lines)
            for at in reversed(places):
                end = at + len(sought)
                if end <= free:  # matches may overlap
                    replacement = reindent(instead, sought, lines[at:end]) if by == "indentation" else instead
                    pieces += (lines[end:free], replacement)
                    free = at
            pieces.append(lines[:free])
            return _join_lines([line for piece in reversed(pieces) for line in piece], text), by
    raise no_match("old_string does not occur in the file", lines, sought)


def _join_lines(lines: list[str], before: str) -> str:
    return "\n".join(lines) + ("" if before and not before.endswith("\n") else "\n") if lines else ""


def ambiguous_match(numbers: list[int], count: int) -> ToolError:
    numbers = numbers[: limits.PLACES_TOLD_MAX]
    more = f" and {count - len(numbers)} more" if count > len(numbers) else ""
    hint = "Give more of the lines around it, or replace_all=true to change every place."
    message = f"That occurs {count} times, at the lines {', '.join(map(str, numbers))}{more}."
    return ToolError(message, "ambiguous_match", hint, lines=numbers)


def no_match(problem: str, lines: list[str], sought: list[str]) -> ToolError:
    near = [{"line": at + 1, "text": "\n".join(lines[at : at + _NEAREST_LINES])} for at in nearest(lines, sought)]
    hint = "Compare with the nearest places, or read the file again." if near else "Read the file again."
    if any("«redacted:" in line for line in sought):
        hint = "A «redacted:kind» is not in the file: it stands for a secret. Quote only lines without one."
    return ToolError(f"{problem}.", "no_match", hint, nearest=near)


def nearest(lines: list[str], sought: list[str]) -> list[int]:
    """Up to three positions most like the lines sought: where most of them occur, else where one is like the longest."""
    stripped, votes = [line.strip() for line in lines], Counter[int]()
    places: dict[str, list[int]] = {}
    for at, line in enumerate(stripped):
        places.setdefault(line, []).append(at)
    for offset, line in enumerate(line.strip() for line in sought):
        if line and len(positions := places.get(line, [])) <= limits.PLACES_TOLD_MAX:
            votes.update(max(0, at - offset) for at in positions)
    if votes:
        return [at for at, _ in votes.most_common(_NEAREST)]
    longest = max((line.strip() for line in sought), key=len, default="")[:_COMPARED_CHARS]
    candidates = [line for line in places if 0 < len(line) <= _COMPARED_CHARS][: limits.COMPARED_LINES_MAX]
    return (
        [places[line][0] for line in difflib.get_close_matches(longest, candidates, _NEAREST, 0.5)] if longest else []
    )


# ---- patches of several files


@dataclass(slots=True)
class Hunk:
    """Rows of sign and line; `anchors` are lines above it."""

    anchors: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    at_end: bool = False


@dataclass(slots=True)
class Section:
    kind: str
    path: str
    move: str = ""
    hunks: list[Hunk] = field(default_factory=list)


def parse_patch(patch: str) -> list[Section]:
    sections: list[Section] = []
    for number, line in enumerate(patch.replace("\r\n", "\n").split("\n"), 1):
        section = sections[-1] if sections else None
        if match := re.fullmatch(r"\*\*\* (Add|Update|Delete) File: (.*\S)\s*", line):
            sections.append(Section(match[1], match[2]))
        elif (match := re.fullmatch(r"\*\*\* Move to: (.*\S)\s*", line)) and section and section.kind == "Update":
            section.move = match[1]
        elif re.fullmatch(r"\*\*\* (Begin|End) Patch\s*", line) or (section is None and not line.strip()):
            continue
        elif section is None or (section.kind == "Delete" and line.strip()):
            raise _syntax_error(number, line)
        elif line.startswith("@@") and section.kind == "Update":
            if not section.hunks or section.hunks[-1].rows:
                section.hunks.append(Hunk())
            section.hunks[-1].anchors += [line[2:].strip()] if line[2:].strip() else []
        elif line.startswith("*** End of File") and section.hunks:
            section.hunks[-1].at_end = True
        elif line[:1] in ("+", "-", " ", "") and not (section.kind == "Add" and line[:1] in ("-", " ")):
            if section.kind != "Delete":
                section.hunks = section.hunks or [Hunk()]
                section.hunks[-1].rows.append((line[:1], line[1:]))
        else:
            raise _syntax_error(number, line)
    for kind, hunk in ((section.kind, hunk) for section in sections for hunk in section.hunks):
        while hunk.rows and hunk.rows[-1][0] == "":  # an empty line after a hunk belongs to nothing
            hunk.rows.pop()
        hunk.rows = [("+", line) for _, line in hunk.rows] if kind == "Add" else hunk.rows
    if not sections or any(s.kind == "Update" and not (s.move or any(h.rows for h in s.hunks)) for s in sections):
        raise ToolError("The patch changes nothing.", "invalid_arguments", f"A patch looks so:\n{_GRAMMAR}")
    return sections


def _syntax_error(number: int, line: str) -> ToolError:
    message = f"Line {number} of the patch is not understood: {line[:80]!r}."
    return ToolError(message, "invalid_arguments", f"A patch looks so:\n{_GRAMMAR}")


def apply_hunks(text: str, hunks: list[Hunk]) -> tuple[str, str]:
    """The text after all hunks, and the weakest level at which one was matched."""
    places = _LineIndex(lines_of(text))
    lines, out = places.lines, list[str]()
    at, level = 0, 0
    for hunk in (hunk for hunk in hunks if hunk.rows):
        old = [line for sign, line in hunk.rows if sign != "+"]
        start, match_level = _locate_hunk(places, old, hunk, at)
        level = max(level, match_level)
        block = lines[start : start + len(old)]
        added = [line for sign, line in hunk.rows if sign == "+"]
        new = iter(reindent(added, old, block) if LEVELS[match_level][0] == "indentation" else added)
        context = iter(block)
        out += lines[at:start]
        for sign, _ in hunk.rows:
            if sign == "+":
                out.append(next(new))
            else:
                line = next(context)
                out += [line] if sign != "-" else []
        at = start + len(old)
    return _join_lines([*out, *lines[at:]], text), LEVELS[level][0]


class _LineIndex:
    """The positions of each line of a file, so that not every hunk has to read all of it."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self._compared = lines, 0
        self._by_level: dict[int, tuple[list[str], dict[str, list[int]]]] = {}

    def blocks(self, sought: list[str], level: int, above: int) -> list[int]:
        if level not in self._by_level:
            formed, positions = list(map(LEVELS[level][1], self.lines)), dict[str, list[int]]()
            for at, line in enumerate(formed):
                positions.setdefault(line, []).append(at)
            self._by_level[level] = formed, positions
        formed, positions = self._by_level[level]
        keys = list(map(LEVELS[level][1], sought))
        first = min(range(len(keys)), key=lambda at: len(positions.get(keys[at], ())))
        possible = positions.get(keys[first], [])
        starts = [at - first for at in possible[bisect_left(possible, above + first) :]]
        if len(starts) * len(keys) <= _COMPARED_AT_ONCE:
            return [start for start in starts if formed[start : start + len(keys)] == keys]
        self._compared += len(formed)
        if self._compared > limits.REPEATED_LINES_MAX:
            message = "The patch changes too many places that look alike."
            raise ToolError(message, "too_large", "Apply it in several smaller patches.")
        return [start for start in find_blocks(formed, keys, str) if start >= above]


def _locate_hunk(places: _LineIndex, old: list[str], hunk: Hunk, at: int) -> tuple[int, int]:
    lines = places.lines
    numbered = next((int(m[1]) for text in hunk.anchors if (m := re.match(r"-(\d+)", text))), None)
    named = [anchor for anchor in hunk.anchors if not re.match(r"-\d+", anchor)]
    above = at
    for anchor in named:
        index = next((i for i in range(above, len(lines)) if anchor in lines[i]), None)
        if index is None:
            raise no_match(f"The line {anchor!r} behind @@ does not occur there", lines, [anchor])
        above = index + (not old)
    if not old:
        if named or hunk.at_end or not lines:
            return (above if named else len(lines)), 0
        raise no_match("A hunk that only adds lines needs a line of context or one behind @@", lines, [])
    for level in range(len(LEVELS)):
        starts = places.blocks(old, level, above) if any(map(str.strip, old)) or not level else []
        if len(starts) > 1 and hunk.at_end and starts[-1] + len(old) == len(lines):
            starts = starts[-1:]
        if len(starts) > 1 and numbered is not None:
            starts = [i for i in starts if i == numbered - 1] or starts
        if len(starts) == 1 or (starts and named):
            return starts[0], level
        if starts:
            raise ambiguous_match([i + 1 for i in starts], len(starts))
    raise no_match("The lines of a hunk do not occur in the file", lines, old)


# ---- the tool


def _bytes(text: str, before: bytes) -> bytes:
    """A text encoded as the file was before: BOM, line ends, and bytes that are no UTF-8."""
    data = text.encode("utf-8", "surrogateescape")
    data = re.sub(rb"\r?\n", b"\r\n", data) if access.is_crlf(before) else data
    return (access.BOM if before.startswith(access.BOM) else b"") + data


def _load(paths: Paths, path: str, real: str) -> tuple[bytes, os.stat_result]:
    if (content := access.content_of(paths, real)) is None:
        hint = "A command in the terminal can change it."
        raise ToolError(f"{path} has more than {limits.WRITTEN_BYTES_MAX} bytes.", "too_large", hint)
    if (kind := access.type_of(content[0][:8192], real)) is not None:
        raise access.binary_refusal(path, kind, len(content[0]))
    return content


class Patch(ToolArguments):
    mode: Literal["replace", "patch"]
    path: Annotated[str, Meta(min_length=1)] | None = None
    old_string: str | None = None
    new_string: str | None = None
    replace_all: bool = False
    patch: str | None = None


async def _prepare(ctx: ToolContext, args: Patch) -> Prepared:
    single = args.mode == "replace"
    needed = ("path", "old_string", "new_string") if single else ("patch",)
    if missing := [name for name in needed if getattr(args, name) is None]:
        hint = "path, old_string and new_string." if single else f"A patch looks so:\n{_GRAMMAR}"
        raise ToolError(f"mode={args.mode} needs {', '.join(missing)}.", "invalid_arguments", hint)
    if single and args.old_string in ("", args.new_string):
        hint = "Quote what is to be changed; write_file makes new files."
        raise ToolError("old_string is empty, or the same as new_string.", "invalid_arguments", hint)
    sections = [Section("Update", args.path or "")] if single else parse_patch(args.patch or "")
    added = [line for section in sections for hunk in section.hunks for sign, line in hunk.rows if sign == "+"]
    access.refuse_redaction_marks(args.new_string or "" if single else "\n".join(added))
    paths = await ctx.resources.paths()
    real = {path: await access.writable(ctx, paths, path) for s in sections for path in (s.path, s.move) if path}
    named = [real[path] for s in sections for path in (s.path, s.move) if path]
    if len(set(named)) < len(named):
        raise ToolError("A file is named twice in the patch.", "invalid_arguments", "Put its hunks into one section.")
    return await ctx.blocking(lambda: _plan(ctx, paths, args, sections, real))


def _plan(ctx: ToolContext, paths: Paths, args: Patch, sections: list[Section], real: dict[str, str]) -> Prepared:
    """The content of every file after the patch; nothing is written yet."""
    changes: list[access.Change] = []
    diffs: list[str] = []
    answer: Answer = {"diff": "", "files": [], "matched_by": "exact"}
    faults: list[dict[str, object]] = []
    for section in sections:
        path, target = section.path, section.move or section.path
        with access.report_file_errors(ctx, paths, path):
            for new in [p for p in (section.move, path if section.kind == "Add" else "") if p]:
                if paths.digest(real[new]) is not None:
                    raise ToolError(f"{new} exists already.", "stale_file", "Read it, and use *** Update File instead.")
            old, like = (b"", None) if section.kind == "Add" else _load(paths, path, real[path])
        before, after, by = text_of(old), None, "exact"
        try:
            if args.mode == "replace":
                after, by = replace_text(before, args.old_string or "", args.new_string or "", args.replace_all)
            elif section.kind != "Delete":
                after, by = apply_hunks(before, section.hunks)
        except ToolError as refusal:
            refusal.answer["error"] = f"{path}: {printable(refusal.answer['error'])}"
            for place in refusal.answer.get("nearest", ()):
                place["text"] = access.LineRedactor(ctx).line(place["text"].encode("utf-8", "surrogateescape"))[0]
            raise
        data = None if after is None else _bytes(after, old)
        if section.move:
            changes.append(access.Change(real[target], None, data, like=like))
        digest = None if like is None else hashlib.sha256(old).hexdigest()
        content = None if section.move else data
        changes.append(access.Change(real[path], digest, content, None if like is None else old, like))
        names = ("/dev/null" if like is None else path), ("/dev/null" if after is None else target)
        text, added, removed = unified_diff(lines_of(before), lines_of(after or ""), names)
        diffs.append(text)
        shown_path = access.display_path(ctx, paths, real[target])
        answer["files"].append({"path": shown_path, "added": added, "removed": removed})
        answer["matched_by"] = max(answer["matched_by"], by, key=[name for name, _ in LEVELS].index)
        faults += [{"path": target, **fault} for fault in diagnostics(target, data) or ()] if data else []
    answer["diff"] = shorten(ctx, "\n".join(diffs))
    return access.prepare_changes(changes, (paths, changes, answer | ({"diagnostics": faults} if faults else {})))


def _run(ctx: ToolContext, args: Patch) -> Answer:
    paths, changes, answer = ctx.prepared
    with access.report_file_errors(ctx, paths, args.path or ", ".join(file["path"] for file in answer["files"])):
        access.commit(ctx, paths, changes)
    return answer  # type: ignore[no-any-return]


TOOL = ToolDef(
    name="patch",
    toolset="file",
    description=(
        "Change files. mode=replace: old_string, which must occur once (or replace_all), becomes new_string in path; "
        "spaces at the ends of lines and indentation need not be exact. mode=patch: several files as one, all or none:\n"
        + _GRAMMAR
    ),
    arguments=Patch,
    run=_run,
    scope=lambda _: access.SCOPE,
    preview=lambda args: args.path or ", ".join(re.findall(r"^\*\*\* \w+ File: (.*)$", args.patch or "", re.M)),
    prepare=_prepare,
    reconcile=access.reconcile,
)
