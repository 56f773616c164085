"""Follows a shell script as bash would run it, without running anything: each simple command is passed to `run`."""

from __future__ import annotations

import re

from hermes.guards.shell_expansion import GLOBS, UNKNOWN, ShellExpander, Unparsable, Value, plain
from hermes.guards.snippets import printed_text

HERE = "."  # the working directory among the variables, by a name that none can have
ROUNDS_MAX = 8
COMMAND_WORK = 40

_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_LOOP_NAME = re.compile(r"[A-Za-z_]\w*", re.A)
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\[(?:[^]\n$`]|\$(?!\())*\])?(\+?)=", re.A)
_FUNCTION = re.compile(
    r"(?:function[ \t]+([^ \t\n;|&<>()]+)(?:[ \t]*\([ \t]*\))?|([^ \t\n;|&<>()'\"\\$`=]+)[ \t]*\([ \t]*\))"
)
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-?|<&|<>|<(?!\()|>>|>&|>\||>(?!\()|&>>?)", re.A)
_HERE = re.compile(r"(?:[^ \t\n;|&<>()'\"\\$`]|\\.|'[^'\n]*'|\"[^\"\n\\$`]*\")+(?=[ \t\n;|&<>()]|$)")
_HERE_PART = re.compile(r"\\(.)|'([^']*)'|\"([^\"]*)\"")
_PREFIX = re.compile(r"(?:!(?=[ \t\n(])|time(?=[ \t]+[^ \t-])|time[ \t]+-p\b|coproc(?=[ \t]))[ \t]*")
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|while|until|do|done|for|select|case|esac|in|\{|\}|\[\[)(?![^ \t\n;|&<>()])"
)
_CLOSERS = {"{": "}", "if": "fi", "while": "done", "until": "done"}
_DECLARE = frozenset({"export", "declare", "typeset", "local", "readonly"})
_READ = frozenset({"read", "mapfile", "readarray", "getopts", "let"})


class Shell(ShellExpander):
    """Reads a script and passes each simple command to `run`."""

    def __init__(self, variables: dict[str, Value], complete: bool) -> None:
        super().__init__(variables, complete)
        self.functions: dict[str, str] = {}
        self.called: list[str] = []  # the names of all commands in order
        self.spawned: list[str] = []  # those in pipes or in the background
        self.detached = False

    def run(self, argv: list[str], redirects: list[tuple[str, str]], names: list[str], feed: str | None) -> str | None:
        """Judge a simple command that sets some variables. Returns what it prints, if known. `feed` is its standard
        input."""
        raise NotImplementedError

    def snapshot(self) -> tuple[list[int], int]:
        raise NotImplementedError

    def judge_pipeline(self, before: tuple[list[int], int], fed: bool) -> None:
        """Judge what was run since `before` as one pipeline; `fed`: its standard input was connected."""
        raise NotImplementedError

    def report_fork_bomb(self) -> None:
        raise NotImplementedError

    def follow(self, text: str, feed: str | None = None, args: Value = None, child: bool = True) -> str | None:
        """Follow a whole script, in a child shell or in this one. Returns what it prints, if known."""
        mark, before, self.top = len(self.changes), (self.top, self.exported, self.vars["@"]), False
        if child:
            self.spend(len(self.vars))
            self.exported = set(before[1])
            for name in self.vars.keys() - self.exported:
                self.set(name, [] if self.complete else None)
        if args is not None or child:
            self.set("@", args)
        try:
            return self.within(text, lambda: self.script(feed=feed))
        except Unparsable as error:
            self.mark_opaque(str(error))
            return None
        finally:
            self.top, exported, arguments = before
            if child:
                self.undo(mark)
                self.exported = exported
            elif args is not None:
                self.set("@", arguments)

    def builtin(self, name: str, argv: list[str]) -> None:
        operands = [arg for arg in argv[1:] if arg[:1] not in ("-", "+") or arg == "-"]
        if name in ("cd", "pushd", "popd"):
            here, before, home = (self.vars.get(each) for each in (HERE, "OLDPWD", "HOME"))
            to = operands[0] if operands else UNKNOWN if name == "popd" else (home or [UNKNOWN])[0]
            to = (before or [UNKNOWN])[0] if to == "-" else to
            at = to if to[:1] in ("/", UNKNOWN) else f"{here[0]}/{to}" if here else UNKNOWN
            if "CDPATH" in self.vars and not re.match(r"/|\.\.?(?:/|\Z)", to):
                self.mark_opaque("where it goes")
                at = UNKNOWN
            self.set("OLDPWD", here)
            for each in (HERE, "PWD"):
                self.set(each, None if at[0] == UNKNOWN else [at])
        elif name in _READ or (name == "printf" and argv[1:2] and argv[1].startswith("-v")):
            if name == "printf":
                into, *rest = [argv[1][2:], *argv[2:]] if argv[1] != "-v" else [*argv[2:], ""]
                text = printed_text(["printf", *rest], "") if "[" not in into else None
                self.set(into.partition("[")[0], None if text is None or UNKNOWN in text else [text])
                operands = []
            for operand in operands:
                self.set(re.split(r"[=[]", operand)[0], None)
        elif name == "unset":
            for operand in operands:
                self.set(operand, [])
        elif name in _DECLARE:
            for operand in operands:
                each, equals, value = operand.partition("=")
                self.exported.add(each)
                if equals:
                    self.set(each, [plain(value)])
        elif name == "set":
            start = next((at for at, arg in enumerate(argv) if at and (arg == "--" or arg[:1] not in ("-", "+"))), 0)
            if start:
                self.set("@", list(map(plain, argv[start + (argv[start] == "--") :])))
        elif name == "shift":
            args = self.vars["@"]
            self.set("@", None if args is None or len(argv) > 1 else args[1:])

    def space(self, lines: bool = False) -> None:
        """Skip blanks and comments; with `lines` also line ends, with the here-documents that begin there."""
        while self.i < self.n:
            char = self.s[self.i]
            if char in " \t\\" and (match := _BLANK.match(self.s, self.i)):
                self.i = match.end()
            elif char == "#":
                end = self.s.find("\n", self.i)
                self.i = self.n if end < 0 else end
            elif char == "\n" and lines:
                self.i += 1
                if self.here[0] >= 0:
                    if self.i != self.here[0]:
                        raise Unparsable("a here-document that begins within a word")
                    self.i, self.here = self.here[1], (-1, -1)
            else:
                break

    def reserved(self) -> str:
        match = _RESERVED.match(self.s, self.i)
        return match[0] if match else ""

    def script(self, closer: str = "", feed: str | None = None) -> str | None:
        """Follow jobs up to a closing word or sign (in a case also up to `;;`, which is not consumed), or to the
        end."""
        self.descend()
        out: list[str | None] = []
        mark = len(self.changes)
        while True:
            self.space(lines=True)
            if self.i >= self.n:
                if closer:
                    raise Unparsable("unfinished")
                break
            word = ")" if self.s[self.i] == ")" else self.reserved()
            if closer and word == closer:
                self.i += len(closer)
                break
            if closer == "esac" and self.s.startswith((";;", ";&"), self.i):
                break
            if word in ("then", "elif", "else", "do"):
                self.i += len(word)
                if word in ("elif", "else"):
                    self.merge(mark)
            else:
                out.append(self.job(feed))
        self.depth -= 1
        return None if None in out else "".join(filter(None, out))

    def job(self, feed: str | None) -> str | None:
        mark, calls = len(self.changes), len(self.called)
        out = self.pipeline(feed)
        after = len(self.changes)
        while self.s.startswith(("&&", "||"), self.i):
            other, mark = self.s[self.i] == "|", len(self.changes)
            self.i += 2
            self.space(lines=True)
            self.pipeline(feed)
            out = None
            if other:
                self.merge(mark)
        self.merge(after)
        if self.s.startswith("&", self.i):
            self.i += 1
            self.detached = self.detached or self.top
            self.spawned += self.called[calls:]
            self.undo(mark)
        elif self.s.startswith(";", self.i) and not self.s.startswith((";;", ";&"), self.i):
            self.i += 1
        return out

    def pipeline(self, feed: str | None) -> str | None:
        calls, before, stages = len(self.called), self.snapshot(), 0
        while True:
            self.space(lines=bool(stages))
            while match := _PREFIX.match(self.s, self.i):
                self.i = match.end()
            mark = len(self.changes)
            out = self.command(feed)
            stages += 1
            self.space()
            more = self.s.startswith("|", self.i) and not self.s.startswith("||", self.i)
            if more or stages > 1:
                self.undo(mark)
            if not more:
                break
            self.i += 2 if self.s.startswith("|&", self.i) else 1
            feed = UNKNOWN if out is None else out
        if stages > 1:
            self.spawned += self.called[calls:]
        self.judge_pipeline(before, stages > 1)
        return out

    def command(self, feed: str | None) -> str | None:
        word = self.reserved()
        function = None if word else _FUNCTION.match(self.s, self.i)
        if not (word or function or self.s.startswith("(", self.i)):
            return self.simple(feed)
        mark, before, top = len(self.changes), self.snapshot(), self.top
        out: str | None = None
        if self.s.startswith("((", self.i) and self.arithmetic(self.i + 2):
            out = ""
        elif self.s.startswith("(", self.i):
            self.i += 1
            out = self.script(")", feed)
            self.undo(mark)
        elif function:
            self.i = function.end()
            self.function(function[1] or function[2])
        else:
            self.i += len(word)
            self.top = top and word == "{"
            out = self.compound(word, feed)
            self.top = top
            if word != "{":
                self.merge(mark)
        self.space()
        if _REDIRECT.match(self.s, self.i):
            self.simple(feed)
            self.judge_pipeline(before, True)
            out = None
        return out

    def function(self, name: str) -> None:
        """A definition: its body is followed here with unknown arguments, and at each call with those given."""
        self.space(lines=True)
        start, mark, spawned, top = self.i, len(self.changes), len(self.spawned), self.top
        self.functions.pop(name, None)
        self.descend()
        self.top = False
        self.set("@", None)
        self.command(UNKNOWN)
        self.undo(mark)
        self.top = top
        self.depth -= 1
        self.functions[name] = self.s[start : self.i]
        if name in self.spawned[spawned:]:
            self.report_fork_bomb()

    def compound(self, word: str, feed: str | None) -> str | None:
        if closer := _CLOSERS.get(word):
            start, mark = self.i, len(self.changes)
            out = self.script(closer, feed)
            if closer == "done" and len(self.changes) > mark:
                self.merge(mark)
                self.spend(self.i - start)
                self.i = start
                self.script(closer, feed)
            return out if word == "{" else None
        if word in ("for", "select"):
            self.loop(feed)
            return None
        if word == "[[":
            self.words("", "]]")
            return ""
        if word != "case":
            raise Unparsable(f"{word} is out of place")
        self.space()
        self.word()
        self.space(lines=True)
        self.need("in")
        while True:
            self.space(lines=True)
            if self.reserved() == "esac":
                self.i += 4
                return None
            self.i += self.s.startswith("(", self.i)
            self.words("|", ")")
            mark = len(self.changes)
            self.script("esac", feed)
            self.merge(mark)
            if not self.s.startswith((";;", ";&"), self.i):
                return None
            while self.s.startswith((";", "&"), self.i):
                self.i += 1

    def loop(self, feed: str | None) -> None:
        """A for loop: its body is followed for each word, up to a limit."""
        self.space()
        name, values = "", [UNKNOWN]
        if self.s.startswith("((", self.i) and self.arithmetic(self.i + 2):
            pass
        elif match := _LOOP_NAME.match(self.s, self.i):
            name, self.i = match[0], match.end()
        self.space(lines=True)
        if self.reserved() == "in":
            self.i += 2
            values = self.words(None, "") or [UNKNOWN]
        self.space()
        self.i += self.s.startswith(";", self.i)
        self.space(lines=True)
        self.need("do")
        start, mark = self.i, len(self.changes)
        for number, value in enumerate(values[: ROUNDS_MAX + 1]):
            self.spend(self.i - start)
            self.i = start
            is_known = number < ROUNDS_MAX and UNKNOWN not in value and set(value).isdisjoint(GLOBS)
            self.set(name, [value] if is_known else None)
            self.script("done", feed)
            self.merge(mark)

    def words(self, between: str | None, end: str) -> list[str]:
        out: list[str] = []
        while True:
            self.space(lines=between is not None)
            if between is None and (self.i >= self.n or self.s[self.i] in ";\n"):
                return out
            if self.i >= self.n:
                raise Unparsable(f"{end} is missing")
            if end and self.s.startswith(end, self.i):
                self.i += len(end)
                return out
            start = self.i
            out += self.fields(self.word(split=True))
            if self.i == start:
                if between is None or (between and self.s[start] not in between):
                    raise Unparsable("a sign out of place")
                self.i += 1

    def simple(self, feed: str | None) -> str | None:
        argv: list[str] = []
        assigns: list[tuple[str, Value]] = []
        redirects: list[tuple[str, str]] = []
        declares, start = True, self.i
        while self.i < self.n:
            self.space()
            if match := _REDIRECT.match(self.s, self.i):
                feed = self.redirect(match, redirects, feed)
            elif self.i >= self.n or self.s[self.i] in "\n;|&()":
                break
            elif declares and (match := _ASSIGN.match(self.s, self.i)):
                assigns.append(self.assignment(match))
            else:
                at = self.i
                argv += self.fields(self.word(split=True))
                if self.i == at:
                    raise Unparsable("a sign out of place")
                declares = not argv or argv[0] in _DECLARE
        if self.i == start or self.s.startswith("(", self.i):
            raise Unparsable("a command is missing")
        previous = [(name, self.vars.get(name)) for name, _ in assigns]
        for name, value in assigns:
            self.set(name, value)
            if argv:
                self.exported.add(name)
        self.called += argv[:1]
        self.spend(COMMAND_WORK)
        out = self.run(argv, redirects, [name for name, _ in assigns], feed)
        if not declares:
            for name, value in previous:
                self.set(name, value)
        return out

    def assignment(self, match: re.Match[str]) -> tuple[str, Value]:
        self.i = match.end()
        name, old = match[1], self.vars.get(match[1], [])
        if self.s.startswith("(", self.i):
            self.i += 1
            value = list(map(plain, self.words("", ")")))
            self.spend(len(old or ()))
            if any(each.startswith("[") and "]=" in each for each in value):
                return name, None
            return name, value if not match[3] else None if old is None else old + value
        text = self.text()
        self.spend(len(text) + sum(map(len, old or ())))
        if match[2] or (match[3] and old is None):
            return name, None
        return name, ["".join(old[:1] if match[3] and old else []) + text]

    def redirect(self, match: re.Match[str], redirects: list[tuple[str, str]], feed: str | None) -> str | None:
        """Record the target of a redirect. Returns standard input after it."""
        op = match[1]
        self.i = match.end()
        self.space()
        start = self.i
        if op in ("<<", "<<-"):
            if not (mark := _HERE.match(self.s, start)):
                raise Unparsable("a here-document without an end")
            self.i = mark.end()
            return self.here_document(mark[0], op == "<<-")
        if op == "<<<":
            feed = self.text() + "\n"
        else:
            fields = self.fields(self.word(split=True))
            redirects.append((op, fields[0] if len(fields) == 1 else UNKNOWN))
            feed = UNKNOWN if op in ("<", "<>") or (op == "<&" and feed is None) else feed
        if self.i == start:
            raise Unparsable("a redirect to nothing")
        return feed

    def here_document(self, mark: str, tabs: bool) -> str:
        start, at = self.here
        if start < 0:
            end = self.s.find("\n", self.i)
            start = at = self.n if end < 0 else end + 1
        close = _HERE_PART.sub(lambda part: "".join(filter(None, part.groups())), mark)
        lines: list[str] = []
        while at < self.n:
            end = self.s.find("\n", at)
            line = self.s[at : self.n if end < 0 else end]
            at = min(self.n, at + len(line) + 1)
            while close == mark and at < self.n and (len(line) - len(line.rstrip("\\"))) % 2:
                end = self.s.find("\n", at)
                more = self.s[at : self.n if end < 0 else end]
                at = min(self.n, at + len(more) + 1)
                self.spend(len(line))
                line = line[:-1] + more
            line = line.lstrip("\t") if tabs else line
            if line == close:
                break
            lines.append(line + "\n")
        self.here = start, at
        text = "".join(lines)
        return text if close != mark else plain(self.within(text, lambda: self.word("here")))
