"""Expansion of shell words as in bash, as far as the text determines it. Pure.

A word is expanded in one pass, left to right, into text with marks; what only running the command would determine is
the mark `UNKNOWN`."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

DEPTH_MAX = 30
WORDS_MAX = 256
WORK_MAX = 200_000  # how much is followed, in characters of expanded text
LEVEL_WORK, WORD_WORK = 20, 8
UNKNOWN = "\0"
GLOBS = "\x11\x12\x13"  # `*`, `?` and `[` where they are patterns and not just characters
# Braces that expand; the end of a field; what was quoted; the end of a name that may go on.
_OPEN, _COMMA, _CLOSE, _BREAK, _QUOTED, _EDGE = "\x14\x15\x16\x17\x18\x19"
_BRACES = _OPEN + _COMMA + _CLOSE
_TO_GLOBS, _TO_PATTERN = str.maketrans("*?[", GLOBS), str.maketrans("*?[{,}", GLOBS + _BRACES)
_TO_FIELD = str.maketrans(_BRACES, "{,}", _QUOTED + _EDGE)
_TO_PLAIN = str.maketrans(GLOBS + _BRACES, "*?[{,}", _BREAK + _QUOTED + _EDGE)
_TO_CLEAN = str.maketrans(dict.fromkeys(UNKNOWN + GLOBS + _BRACES + _BREAK + _QUOTED + _EDGE, "\ufffd"))
_UNCLEAR = re.compile(_EDGE + r"\w", re.A)

_RUNS = {
    "word": re.compile(r"[^ \t\n;|&<>()'\"\\$`]+"),
    "brace": re.compile(r"[^}'\"\\$`]+"),
    "brace in quotes": re.compile(r"[^}\"\\$`]+"),
    "double": re.compile(r"[^\"\\$`]+"),
    "here": re.compile(r"[^\\$`]+"),
    "sum": re.compile(r"[^()'\"\\$`]+"),
}
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]", re.A)
_PARAMETER = re.compile(
    r"\{([!#]?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[((?:[^]\n$`]|\$(?!\())*)\])?(:?[-=+?]|:|##?|%%?|/[/#%]?|\^\^?|,,?|@)?",
    re.A,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|c.|.)", re.S)
_ANSI, _BACKTICK = (re.compile(rf"[^{c}\\]*+(?:\\.[^{c}\\]*+)*+{c}", re.S) for c in "'`")
_SEQUENCE = re.compile(r"(?:(-?\d{1,9})\.\.(-?\d{1,9})|([A-Za-z])\.\.([A-Za-z]))(\.\.-?\d{1,9})?", re.A)
_TILDE = re.compile(r"((?:[A-Za-z_]\w*=)?)~([\w.+-]*)(?=/|[ \t\n;|&<>()}]|$)", re.A)
_CHARS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
# Variables that the shell itself gives a value.
_DYNAMIC = re.compile(
    r"[^A-Za-z]\w*|BASH\w*|S?RANDOM|SECONDS|LINENO|EPOCH\w+|PPID|E?UID|HOST\w+|OSTYPE|MACHTYPE|SHL?\w+|OPT\w+|REPLY|PATH"
    r"|PIPESTATUS|FUNCNAME|DIRSTACK|GROUPS|MAPFILE|COPROC\w*|COMP_\w+|OLDPWD|TERM|COLUMNS|LINES|PS\d",
    re.A,
)
T = TypeVar("T")
Value = list[str] | None  # the fields of a variable; None when only running would tell


class Unparsable(Exception):
    """The text is no shell command, or one that is nested too deep."""


def unescape(text: str) -> str:
    def char(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xuU" and len(code) > 1:
            return chr(min(int(code[1:], 16), 0x10FFFF))
        if code[0] in "01234567":
            return chr(int(code, 8) & 255)
        return chr(ord(code[1]) & 31) if code[0] == "c" and len(code) > 1 else _CHARS.get(code, code)

    return _ESCAPE.sub(char, text)


def clean(text: str) -> str:
    """Text from outside, with the characters that are used as marks replaced."""
    return text.translate(_TO_CLEAN)


def plain(text: str) -> str:
    """A word whose patterns match nothing."""
    return text.translate(_TO_PLAIN)


def _expand_braces(text: str, depth: int = 0) -> list[str]:
    """The words that brace expansion makes of a word. Raises Unparsable for too many."""
    stack: list[list[int]] = []
    groups: list[list[int]] = []  # of each outermost group: its opening brace, its commas, its closing brace
    for at, char in enumerate(text):
        if char == _OPEN:
            stack.append([at])
        elif char == _COMMA and stack:
            stack[-1].append(at)
        elif char == _CLOSE and stack:
            group = [*stack.pop(), at]
            while groups and groups[-1][0] > group[0]:
                groups.pop()
            groups.append(group)
    if depth > DEPTH_MAX or len(groups) > WORDS_MAX:
        raise Unparsable("too many braces")
    words, end_of_last = [""], 0
    for marks in groups:
        start, end = marks[0], marks[-1]
        if len(marks) > 2:
            options = [w for a, b in pairwise(marks) for w in _expand_braces(text[a + 1 : b], depth + 1)]
        else:
            inner = text[start + 1 : end]
            options = _sequence(inner) or [_OPEN + each + _CLOSE for each in _expand_braces(inner, depth + 1)]
        if len(words) * len(options) > WORDS_MAX:
            raise Unparsable("too many words")
        words = [word + text[end_of_last:start] + option for word in words for option in options]
        end_of_last = end + 1
    return [word + text[end_of_last:] for word in words]


def _sequence(text: str) -> list[str]:
    """The items of {a..b}, or none when it is no sequence."""
    match = _SEQUENCE.fullmatch(text)
    if not match:
        return []
    first, last = (int(match[1]), int(match[2])) if match[1] else (ord(match[3]), ord(match[4]))
    if abs(last - first) >= WORDS_MAX:
        return [UNKNOWN]
    step = 1 if first <= last else -1
    return [str(item) if match[1] else chr(item) for item in range(first, last + step, step)]


def _edit_value(text: str, op: str, arg: str) -> str | None:
    """The result of ${name#…}, ${name%…}, ${name/…/…}, ${name^^} and ${name,,}, where no pattern is needed."""
    if not set(text + arg).isdisjoint(f"*?[(&\\{UNKNOWN}"):
        return None
    if op[0] in "#%":
        return text.removeprefix(arg) if op[0] == "#" else text.removesuffix(arg)
    old, _, new = arg.partition("/")
    if op in ("/", "//") and old and len(text) * (1 + len(new)) <= WORK_MAX:
        return text.replace(old, new, 1 if op == "/" else -1)
    return {"^^": text.upper(), ",,": text.lower()}.get(op) if not arg else None


class ShellExpander:
    """A position in a script, and the variables as far as the script determines them. Every change of a variable is
    recorded, to undo a subshell and to make unknown what perhaps does not run."""

    def __init__(self, variables: dict[str, Value], complete: bool) -> None:
        self.s, self.i, self.n, self.depth, self.here = "", 0, 0, 0, (-1, -1)
        self.vars: dict[str, Value] = {"@": [], **variables}
        self.exported, self.complete = set(self.vars), complete
        self.top = True  # here `&` leaves something behind
        self.changes: list[tuple[str, Value, bool]] = []
        self.work_left = WORK_MAX

    def script(self, closer: str = "", feed: str | None = None) -> str | None:
        """Follow commands up to a closing word or sign. Returns what they print, if known."""
        raise NotImplementedError

    def mark_opaque(self, reason: str) -> None:
        raise NotImplementedError

    def within(self, text: str, work: Callable[[], T]) -> T:
        before = self.s, self.i, self.n, self.here, self.depth
        self.s, self.i, self.n, self.here = text, 0, len(text), (-1, -1)
        try:
            self.descend()
            return work()
        finally:
            self.s, self.i, self.n, self.here, self.depth = before

    def descend(self) -> None:
        self.depth += 1
        self.spend(LEVEL_WORK)
        if self.depth > DEPTH_MAX:
            raise Unparsable("nested too deep")

    def spend(self, work: int) -> None:
        """Use up some of the work allowed for one command line. Raises Unparsable when none is left."""
        self.work_left -= work
        if self.work_left < 0:
            raise Unparsable("too much to follow")

    def need(self, text: str) -> None:
        if not self.s.startswith(text, self.i):
            raise Unparsable(f"{text} is missing")
        self.i += len(text)

    def set(self, name: str, value: Value) -> None:
        self.changes.append((name, self.vars.get(name), name in self.vars))
        self.vars[name] = value

    def undo(self, mark: int) -> None:
        """Revert the changes since a mark, as the end of a subshell does."""
        while len(self.changes) > mark:
            name, value, was = self.changes.pop()
            if was:
                self.vars[name] = value
            else:
                self.vars.pop(name, None)

    def merge(self, mark: int) -> None:
        """Make unknown what was changed since a mark by something that perhaps does not run."""
        for name, value, was in self.changes[mark:]:
            if not was or value != self.vars.get(name):
                self.vars[name] = None

    def word(self, mode: str = "word", split: bool = False) -> str:
        """A word (or the inside of quotes, of ${…}, of a here-document) expanded, with marks for `fields`."""
        s, run, out = self.s, _RUNS[mode], []
        quoted = mode in ("double", "here", "brace in quotes")
        if not quoted and (match := _TILDE.match(s, self.i)):
            out.append(match[1] + self.tilde(match[2]))
            self.i = match.end()
        while self.i < self.n:
            if match := run.match(s, self.i):
                cut = dict.fromkeys(map(ord, self.separators()), _BREAK) if mode == "brace" and split else {}
                text = match[0].translate(cut)
                out.append(text if quoted else text.translate(_TO_PATTERN if mode == "word" else _TO_GLOBS))
                self.i = match.end()
                continue
            char = s[self.i]
            if char == "\\":
                after = s[self.i + 1 : self.i + 2]
                self.i = min(self.n, self.i + 2)
                if quoted and (after not in '$`\\\n"' or (after == '"' and mode == "here")):
                    out.append("\\" + after)
                elif after != "\n":
                    out.append(_QUOTED + (after or "\\"))
            elif char == "$":
                out.append(self.dollar(quoted, split))
            elif char == "`":
                end = _BACKTICK.match(s, self.i + 1)
                if not end:
                    raise Unparsable("an open `")
                self.i = end.end()
                inner = re.sub(r"\\([$`\\\"])" if quoted else r"\\([$`\\])", r"\1", end[0][:-1])
                out.append(self.insert([self.within(inner, self.output)], quoted, split))
            elif char == '"' and mode != "double":
                self.i += 1
                empty = s.startswith('"', self.i)
                text = self.word("double", split)
                out.append(_QUOTED + text if text or empty else "")  # "$@" is no field when there are no arguments
                self.need('"')
            elif char == "'":
                close = s.find("'", self.i + 1)
                if close < 0:
                    raise Unparsable("an open quote")
                out.append(_QUOTED + s[self.i + 1 : close])
                self.i = close + 1
            elif mode == "word" and s.startswith(("<(", ">("), self.i):
                self.i += 2
                self.output(")", UNKNOWN)
                out.append("/dev/fd/" + UNKNOWN)
            else:
                break
        return "".join(out)

    def tilde(self, user: str) -> str:
        name = {"": "HOME", "+": "PWD", "-": "OLDPWD"}.get(user)
        folder = self.vars.get(name) if name else ["/root" if user == "root" else f"/home/{user}"]
        return folder[0] if folder else UNKNOWN

    def text(self) -> str:
        self.spend(WORD_WORK)
        return plain(self.word())

    def fields(self, word: str) -> list[str]:
        words = [word]
        if _OPEN in word:
            try:
                words = _expand_braces(word)
                if any(map(_UNCLEAR.search, words)) or any(all(map(each.__contains__, _BRACES)) for each in words):
                    raise Unparsable("braces that may mean more than one thing")
                words = [
                    self.tilde(match[2]) + each[match.end() :] if (match := _TILDE.match(each)) else each
                    for each in words
                ]
            except Unparsable as error:
                self.mark_opaque(str(error))
                words = [UNKNOWN]
        fields = [each.translate(_TO_FIELD) for word in words for each in word.split(_BREAK) if each and each != _EDGE]
        self.spend(WORD_WORK * (1 + len(fields)))
        return fields

    def insert(self, value: Value, quoted: bool, split: bool, index: str = "") -> str:
        """A value as part of a word; in quotes with the index `*` one field, with `@` perhaps none."""
        texts = [UNKNOWN] if value is None else value if value or index == "@" else [""]
        self.spend(sum(map(len, texts)))
        signs = self.separators()
        if index == "*" and (quoted or not split):
            texts = [signs[:1].join(texts)]
        if not split:
            return " ".join(texts)
        if quoted:
            return _BREAK.join(_QUOTED + text for text in texts)
        if signs == UNKNOWN:
            return UNKNOWN
        cut = dict.fromkeys(map(ord, signs), _BREAK)
        return _BREAK.join(text.translate(cut).translate(_TO_GLOBS) for text in texts)

    def separators(self) -> str:
        ifs = self.vars.get("IFS")
        return " \t\n" if ifs == [] else UNKNOWN if ifs is None or UNKNOWN in ifs[0] else ifs[0]

    def output(self, closer: str = "", feed: str | None = None) -> str:
        mark, top, self.top = len(self.changes), self.top, False
        text = self.script(closer, feed)
        self.undo(mark)
        self.top = top
        return UNKNOWN if text is None else text.rstrip("\n")

    def dollar(self, quoted: bool, split: bool) -> str:
        s, i = self.s, self.i
        after = s[i + 1 : i + 2]
        if after == "(":
            if s.startswith("$((", i) and (number := self.arithmetic(i + 3)):
                return number
            self.i = i + 2
            return self.insert([self.output(")")], quoted, split)
        if after == "{" and (match := _PARAMETER.match(s, i + 1)):
            self.i, arg = match.end(), ""
            if match[4]:
                self.descend()
                arg = self.word("brace in quotes" if quoted else "brace", split)
                self.depth -= 1
            self.need("}")
            value, instead = self.parameter(match[2], match[3] or "", match[4] or "", plain(arg), match[1])
            if instead:
                return (_QUOTED if quoted and split else "") + arg
            return self.insert(value, quoted, split, match[3] or match[2])
        if after == "'" and not quoted:
            close = _ANSI.match(s, i + 2)
            if not close:
                raise Unparsable("an open quote")
            self.i = close.end()
            return _QUOTED + clean(unescape(close[0][:-1]).partition("\0")[0])
        if after in ("{", "[") or s.startswith("\\\n", i + 1):
            raise Unparsable("a substitution of an unknown kind")
        match = _NAME.match(s, i + 1)
        self.i = match.end() if match else i + 1
        if match:
            text = self.insert(self.parameter(match[0], "", "", "")[0], quoted, split, match[0])
            if match[0][0].isdigit() or not match[0][0].isidentifier():
                return text
            if s.startswith("\\\n", self.i):
                raise Unparsable("a name that goes on")
            return text + _EDGE if s.startswith(("{", ",", "}"), self.i) and not quoted else text
        return "" if after == '"' and not quoted else "$"

    def lookup(self, name: str) -> Value:
        if name.isdigit() and name != "0":
            args = self.vars["@"]
            return None if args is None else args[int(name[:4]) - 1 : int(name[:4])]
        name = "@" if name == "*" else name
        if name in self.vars:
            return self.vars[name]
        return [] if self.complete and not _DYNAMIC.fullmatch(name) else None

    def parameter(self, name: str, index: str, op: str, arg: str, sign: str = "") -> tuple[Value, bool]:
        """The value of $name or ${name…}, and whether it is the word given with it."""
        value = self.lookup(name)
        if sign == "!" and not (index or op) and value and _NAME.fullmatch(value[0]):
            value, sign = self.lookup(value[0]), ""
        if value is not None and index not in ("@", "*") and name not in ("@", "*"):
            value = value[int(index) :][:1] if re.fullmatch(r"\d{1,4}", index, re.A) else None if index else value[:1]
        unset = not value if value is not None else name not in self.vars
        unset = unset or (value == [""] and op[:1] == ":")
        kind = op[-1:] if op[-1:] in ("-", "=", "+", "?") else op
        if kind in ("-", "=") and unset:
            if kind == "=":
                self.set(name, [arg])
            return [arg], True
        if value is None or sign or (kind == "+" and not unset and UNKNOWN in "".join(value)):
            return None, False
        if kind == "+":
            return [], not unset
        if op == ":" and (match := re.fullmatch(r"\s*(\d{1,6})(?::(\d{1,6}))?", arg, re.A)):
            return [text[int(match[1]) :][: int(match[2] or WORK_MAX)] for text in value], False
        if kind in ("", "-", "=", "?"):
            return value, False
        edited = [_edit_value(text, op, arg) for text in value]
        return (None if None in edited else [text or "" for text in edited]), False

    def arithmetic(self, start: int) -> str:
        """Skip arithmetic that begins at `start`, following its commands: its number; empty if it is none."""
        self.descend()
        before, self.i, depth = self.i, start, 0
        while depth >= 0:
            self.word("sum")
            if self.i >= self.n:
                raise Unparsable("unfinished")
            depth += 1 if self.s[self.i] == "(" else -1
            self.i += 1
        self.depth -= 1
        if not self.s.startswith(")", self.i):
            self.i = before
            return ""
        self.i += 1
        text = self.s[start : self.i - 2].strip()
        return text if re.fullmatch(r"-?\d{1,9}", text, re.A) else UNKNOWN
