"""Search without ripgrep: globs, ignore files, and a program that walks, matches and prints like it.

It runs where commands run, and needs only Python; a pattern that never terminates ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

# The strongest first.
IGNORE_FILES = (".rgignore", ".ignore", ".gitignore")
GLOBS_MAX = 64
LINE_BYTES_MAX = 16 * 1024 * 1024


class Glob:
    """A glob over the parts of a path: `*`, `?`, `[…]`, `{a,b}`, `\\` and `**` for any folders. ValueError if it is none.

    Without `dots` no wildcard stands for a name, or its beginning, that is hidden.
    """

    def __init__(self, glob: str, *, dots: bool = True, ignore_case: bool = False) -> None:
        self._dots = dots
        flags = re.S | (re.I if ignore_case else 0)
        self._forms = [
            [None if part == "**" else re.compile(_regex(part, dots), flags) for part in form.split("/")]
            for form in _expand_braces(glob)
        ]

    def matches(self, names: list[str]) -> bool:
        return any(self._fits(form, names) for form in self._forms)

    def _fits(self, form: list[re.Pattern[str] | None], names: list[str]) -> bool:
        states = _skip_globstars(form, {0})
        for name in names:
            step = set()
            for i in (i for i in states if i < len(form)):
                if (part := form[i]) is None:
                    step |= {i} if self._dots or name[:1] != "." else set()
                elif part.fullmatch(name):
                    step.add(i + 1)
            states = _skip_globstars(form, step)
        return len(form) in states


def _skip_globstars(form: list[re.Pattern[str] | None], states: set[int]) -> set[int]:
    """The states of a match, including those after a `**` that matches nothing."""
    for i in range(len(form)):
        states |= {i + 1} if i in states and form[i] is None else set()
    return states


def _expand_braces(glob: str) -> list[str]:
    forms, braces = [glob], re.compile(r"(?<!\\)\{([^{}]*)\}")
    while braces.search(forms[0]):
        matches = [(form, match) for form in forms if (match := braces.search(form))]
        forms = [form[: m.start()] + choice + form[m.end() :] for form, m in matches for choice in m[1].split(",")]
        if len(forms) > GLOBS_MAX:
            raise ValueError("too many choices in braces")
    return forms


def _regex(part: str, dots: bool) -> str:
    """A part of a glob as a regular expression without backtracking over what a `*` has matched."""
    pieces, at = [""], 0
    while at < len(part):
        char, end = part[at], at + 1
        if char == "*":
            pieces.append("")
        elif char == "[":
            end = part.find("]", at + (3 if part[at + 1 : at + 2] in ("!", "^") else 2)) + 1
            if not end:
                raise ValueError("a [ without its ]")
            inner = re.sub(r"([\\\[\]&~|])", r"\\\1", part[at + 1 : end - 1])
            pieces[-1] += f"[^{inner[1:]}]" if inner[0] in "!^" else f"[{inner}]"
        elif char == "\\":
            if end == len(part):
                raise ValueError("a backslash at the end")
            pieces[-1] += re.escape(part[end])
            end += 1
        else:
            pieces[-1] += "." if char == "?" else re.escape(char)
        at = end
    first, *others = pieces
    middle = "".join(f"(?=(?P<p{n}>.*?{piece}))(?P=p{n})" for n, piece in enumerate(others[:-1]) if piece)
    regex = first + middle + (f".*{others[-1]}" if others else "")
    try:
        re.compile(regex)
    except re.error as error:
        raise ValueError(str(error)) from None
    return regex if dots or part.startswith(".") else rf"(?!\.){regex}"


class Rule(NamedTuple):
    glob: Glob
    keeps: bool
    only_folders: bool


class Level(NamedTuple):
    parts: int
    rules: list[list[Rule]]
    has_git: bool


def rule_of(line: str) -> Rule | None:
    line = line if line.endswith("\\ ") else line.rstrip()
    if not line or line.startswith("#"):
        return None
    keeps = line.startswith("!")
    line = line[1:] if keeps or line.startswith(("\\!", "\\#")) else line
    only_folders = line.endswith("/")
    line = line[:-1] if only_folders else line
    anchored = "/" in line
    line = line.removeprefix("/") if anchored else f"**/{line}"
    try:
        return Rule(Glob(f"{line}/*" if line.endswith("/**") else line), keeps, only_folders)
    except ValueError:
        return None


def level_of(folder: str) -> Level:
    rules: list[list[Rule]] = []
    for name in IGNORE_FILES:
        text = ""
        with contextlib.suppress(OSError), open(os.path.join(folder, name), errors="surrogateescape") as file:
            text = file.read()
        rules.append([rule for line in text.split("\n") if (rule := rule_of(line))])
    return Level(len(_parts(folder)), rules, os.path.exists(os.path.join(folder, ".git")))


def ignored(levels: list[Level], parts: list[str], is_folder: bool) -> bool:
    """Whether ignore files exclude a path: the last matching rule of the nearest file decides."""
    for kind in range(len(IGNORE_FILES)):
        for level in reversed(levels):
            for rule in reversed(level.rules[kind]):
                if (is_folder or not rule.only_folders) and rule.glob.matches(parts[level.parts :]):
                    return not rule.keeps
            if level.has_git and IGNORE_FILES[kind] == ".gitignore":
                break
    return False


def walk(root: str, hidden: bool) -> Iterator[str]:
    above = _parts(root)
    levels = [level_of("/" + "/".join(above[:n])) for n in range(len(above))]

    def enter(folder: str, inner: list[str], levels: list[Level]) -> Iterator[str]:
        levels = [*levels, level_of(folder)]
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            return
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            parts = [*inner, entry.name]
            if (entry.name[0] == "." and not hidden) or ignored(levels, above + parts, is_folder):
                continue
            if is_folder:
                yield from enter(entry.path, parts, levels)
            elif entry.is_file(follow_symlinks=False):
                yield "/".join(parts)

    return enter(root, [], levels)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def matching_lines(path: str, pattern: re.Pattern[str]) -> Iterator[int]:
    """The numbers of the lines that match. ValueError if the file is no text; OSError if it cannot be read."""
    with open(path, "rb") as file:
        number, begins = 0, True
        while raw := file.readline(LINE_BYTES_MAX):
            if b"\0" in raw:
                raise ValueError("no text")
            if begins:
                number += 1
                text = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "surrogateescape")
                if pattern.search(text):
                    yield number
            begins = raw.endswith(b"\n")


def main(request: dict[str, Any]) -> int:
    """Print like ripgrep: paths, paths with counts, or paths with line numbers up to a maximum per file."""
    try:
        warnings.simplefilter("error")
        pattern = re.compile(request["pattern"], re.I if request["ignore_case"] else 0)
        glob = Glob(request["glob"]) if request["glob"] else None
    except (re.error, RecursionError, OverflowError, ValueError, FutureWarning, DeprecationWarning) as error:
        emit(f"!{error}")
        return 2
    for path in request["paths"] or walk(os.getcwd(), request["hidden"]):
        path = path.removeprefix("./")
        head = f"./{path}\0"
        if glob is not None and not glob.matches([path.rpartition("/")[2]]):
            continue
        if request["mode"] == "files":
            emit(head)
            continue
        with contextlib.suppress(OSError, ValueError):
            numbers = []
            for number in matching_lines(path, pattern):
                numbers.append(number)
                if len(numbers) == request["most"]:
                    break
            emit(f"{head}{len(numbers)}\n" if request["mode"] == "count" else "".join(f"{head}{n}:\n" for n in numbers))
    return 0


def emit(text: str) -> None:
    """Print at once: when time runs out, what was printed counts."""
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
