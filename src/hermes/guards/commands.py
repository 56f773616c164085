"""The verdict on a command line: which rules it falls under. Pure; nothing is run, opened or looked up."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable

from hermes.guards import rules, snippets
from hermes.guards.findings import (
    BARE,
    DECODER,
    KILL,
    LOOSE,
    NET,
    PIDS,
    SINK,
    Facts,
    Findings,
    Hit,
    is_covered,
    normal_form,
)
from hermes.guards.shell import HERE
from hermes.guards.shell_expansion import GLOBS, UNKNOWN, Unparsable, Value, clean, plain

__all__ = ["Facts", "Hit", "check", "detaches", "simple_forms"]

WRAPPERS_MAX = 5
_DEVICE = re.compile(r"/dev/(?:null|zero|full|tty|stdin|stdout|stderr|fd/|pts/|shm/|u?random)|&?\d*-?$")
_STDIN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.A)
_RUNNING = re.compile(r"(?:\w+_)?(?:PAGER|EDITOR|VISUAL|BROWSER|ASKPASS)|GIT_\w*COMMAND")
_WORLD_WRITABLE = re.compile(r"[0-7]*[2367]|(?:.*,)?[ug]*[oa][ugoa]*[+=][rxXst]*w.*", re.S)
_SETUID = re.compile(r"0*[4-7][0-7]{3}|(?:.*,)?(?:[goa]*u[ugoa]*|a)?[+=][rwxXt]*s.*", re.S)
_OPTION_RUNS = re.compile(
    r"(?:--(?:checkpoint-action=exec|to-command|use-compress-program|rsh|rsync-path|pager|editor)"
    r"|(?i:alias\.\w+=!|core\.(?:pager|editor|sshcommand|fsmonitor)|(?:-o)?(?:proxy|local)command))=?(.+)",
    re.S,
)


# A line that is run, or one that a substitution makes.
_SED_RUNS = re.compile(
    r"(?:^|[;{}\n]|[\d$/!])[^\S\n]*+(?:e[ \t]+([^\n]+)|s([!-/:-@[\]^`{-~])(?:(?!\2).)*\2(?:(?!\2).)*\2[gpimI\d]*e)",
    re.S,
)
_FROM_STDIN = re.compile(r" (?:-\w*f ?|--(?:make)?file[= ])(?:-(?: |\Z)|/dev/stdin|/dev/fd/|/proc/self/fd/)")
_TAR_FOLDER = re.compile(r"(?:.*? (?:--directory=|-C)|(?:--directory|-C) )([^-].*)", re.S)


def check(command: str, cwd: str, facts: Facts, exists: Callable[[str], bool] | None = None) -> list[Hit]:
    """The rules that a command line falls under. Without `exists` every file that it writes to counts as existing."""
    return _CommandAnalyzer(cwd, facts, exists).begin(command).hits()


def detaches(command: str) -> bool:
    return _CommandAnalyzer("/", Facts((), "/", "/")).begin(command).detached


def simple_forms(command: str, cwd: str = "/", facts: Facts | None = None) -> list[str]:
    """Each simple command, and each redirect that writes, in normal form; none if something is opaque."""
    analyzer = _CommandAnalyzer(cwd, facts or Facts((), "~", "~/.hermes")).begin(command)
    parts = [part for argv, files in analyzer.stages for part in ((argv, []), *(([], [file]) for file in files))]
    return [] if analyzer.opaque else [normal_form(*part) for part in parts if any(part)]


def _options(argv: list[str], with_value: str) -> tuple[set[str], dict[str, str], list[str]]:
    """The options before the first operand, the values of those that take one, and the rest from that operand on."""
    takes, options, values, at = with_value.split(), set(), {}, 1
    while at < len(argv) and argv[at][:1] == "-" and argv[at] != "-":
        arg = argv[at]
        at += 1
        if arg == "--":
            break
        name, equals, value = arg.partition("=")
        options.add(name)
        if name in takes and (equals or len(name) > 2):
            values[name] = value if equals else "".join(argv[at : at + 1])
            at += not equals
        elif not arg.startswith("--"):
            for number, letter in enumerate(arg[1:], 2):
                options.add("-" + letter)
                if "-" + letter in takes:
                    values["-" + letter] = arg[number:] or "".join(argv[at : at + 1])
                    at += len(arg) == number
                    break
    return options, values, argv[at:]


def _is_recursive(argv: list[str], letters: str) -> bool:
    short = any(arg[:1] == "-" and arg[1:2] != "-" and not set(letters).isdisjoint(arg) for arg in argv[1:])
    return short or any(len(arg) > 2 and "--recursive".startswith(arg) for arg in argv)


class _CommandAnalyzer(Findings):
    def __init__(self, cwd: str, facts: Facts, exists: Callable[[str], bool] | None = None) -> None:
        super().__init__(cwd, facts, exists)
        self.level, self.root, self.many = 0, False, False  # commands around this one; run as root; on many files
        self.stdin: str | None = None  # what `exec <` has left for the commands after it

    def begin(self, command: str) -> _CommandAnalyzer:
        try:
            self.within(clean(command), self.script)
        except Unparsable as error:
            self.mark_opaque(str(error))
        return self

    def run(self, argv: list[str], redirects: list[tuple[str, str]], names: list[str], feed: str | None) -> str | None:
        files = [target for op, target in redirects if op not in ("<", "<&") and not _DEVICE.match(target)]
        if not self.level:
            sets = [f"{name}={' '.join(self.vars.get(name) or [UNKNOWN])}" for name in names]
            self.stages.append((sets + argv, files))
        for name in names:
            self.check_variable(name)
        for op, target in redirects:
            feed = self.read(target) if op == "<" else feed
        if argv == ["exec"] and feed is not None:
            self.stdin = feed
        net = self.counts[NET]
        out = self.call(argv, self.stdin if feed is None else feed) if argv else ""
        for target in files:
            path = self.write(target)
            old = self.files.get(path, "")
            self.files[path] = (
                None if self.counts[NET] > net or old is None else old + (UNKNOWN if out is None else out)
            )
            is_safe = path[0] == UNKNOWN or path.startswith(("/dev/", "/proc/")) or self.in_workspace(path)
            is_safe = is_safe or any(op.endswith(">>") for op, _ in redirects)
            if not is_safe and (self.exists is None or self.exists(plain(path))):
                self.hit("delete")
        return None if any(">" in op for op, _ in redirects) else out

    def check_variable(self, name: str) -> None:
        if name.startswith("HERMES_"):
            self.hit("agent")
        elif name in rules.HIDING:
            self.mark_opaque("a variable that runs something")
        elif _RUNNING.fullmatch(name):
            self.enter(" ".join(self.vars.get(name) or [UNKNOWN]))

    def enter(
        self, command: list[str] | str, feed: str | None = None, args: Value = None, child: bool = True
    ) -> str | None:
        if self.level >= WRAPPERS_MAX:
            self.mark_opaque("nested too deep")
            return None
        self.level += 1
        try:
            return self.call(command, feed) if isinstance(command, list) else self.follow(command, feed, args, child)
        finally:
            self.level -= 1

    def call(self, argv: list[str], feed: str | None) -> str | None:
        """Judge a command. Returns its output, if known."""
        name = argv[0].rpartition("/")[2].lower()
        if not name or UNKNOWN in name or (argv[0] != GLOBS[2] and not set(argv[0]).isdisjoint(GLOBS)):
            self.count(BARE)
            self.mark_opaque("the name of a command")
            return None
        if name in rules.RESERVED or _ASSIGNMENT.match(argv[0]) or argv[0].startswith("/proc/"):
            self.mark_opaque("a name that is none")
        if body := self.functions.pop(argv[0], ""):
            self.spend(len(body))
            self.enter(body, feed, argv[1:], child=False)
            self.judge(name, argv, feed)  # perhaps it is not defined when it comes to that
            self.functions[argv[0]] = body
            return None
        return self.judge(name, argv, feed)

    def judge(self, name: str, argv: list[str], feed: str | None) -> str | None:
        """Judge a command by its name, which no function of the script replaces."""
        if UNKNOWN in argv[1:]:  # may be nothing at all
            self.judge(name, [arg for arg in argv if arg != UNKNOWN], feed)
        if "/" in argv[0] and self.resolve(argv[0]) in self.files:
            return self.run_written("sh", argv, feed)
        for arg in argv:
            if "=" in arg and (match := _OPTION_RUNS.match(arg)):
                self.enter(plain(match[1]))
        name = rules.name_of(name)
        argv = [name, *argv[1:]]
        self.builtin(name, argv)
        self.detached = self.detached or (self.top and name in ("nohup", "setsid", "disown"))
        while name in rules.VALUES:
            argv = [name, *_options(argv, rules.VALUES[name])[2]]
            if argv[1:2] != ["compose"]:
                break
            name, argv = "docker-compose", ["docker-compose", *argv[2:]]
        for rule in rules.hits(argv, self.root):
            self.hit(rule)
        self.count(NET, name in rules.NETWORK)
        self.count(PIDS, name in rules.PIDS)
        self.count(SINK, name in rules.SINKS and feed is not None)
        if needed := rules.DECODERS.get(name):
            self.count(DECODER, not _options(argv, "")[0].isdisjoint(needed.split()))
        self.count(DECODER, needed == "")
        for count in (1, 2, 3):
            if (wrapper := " ".join(argv[:count])) in rules.WRAPPERS:
                return self.run_wrapped(wrapper, argv[count - 1 :], feed)
        return _KINDS.get(name, _CommandAnalyzer.judge_files)(self, argv, feed)

    def run_wrapped(self, wrapper: str, argv: list[str], feed: str | None) -> str | None:
        traits = rules.WRAPPERS[wrapper].split()
        options, values, rest = _options(argv, rules.WRAPPERS[wrapper])
        rest = rest[next((int(word) for word in traits if word.isdigit()), 0) :]
        if wrapper == "sudo" and feed is not None and options & {"-S", "--stdin"}:
            self.hit("hard")
        if wrapper == "command" and options & {"-v", "-V"}:
            return snippets.printed_text(["which", *rest], "")
        if wrapper == "sudo" and options & {"-e", "--edit"}:
            return self.judge_files(["sudoedit", *rest], feed)
        text = values.get("-S") or values.get("--split-string") if wrapper == "env" else None
        if "c" in traits:
            at = next((i for i, arg in enumerate(argv) if re.match(r"-[a-z]*c$|--command", arg)), len(argv))
            text = " ".join(argv[at : at + 1]).partition("=")[2] or " ".join(argv[at + 1 : at + 2])
        mark, root = len(self.changes), self.root
        while "env" in traits and rest and (_ASSIGNMENT.match(rest[0]) or rest[0] == "-"):
            name, _, value = rest.pop(0).partition("=")
            self.set(name, [plain(value)])
            self.exported.add(name)
            self.check_variable(name)
        rest = rest[1:] if rest[:1] == ["--"] else rest
        if wrapper == "env" and (to := values.get("-C") or values.get("--chdir")):
            self.builtin("cd", ["cd", to])
        self.root = root or wrapper in rules.ROOT
        if text or ("text" in traits and rest):
            quoted = shlex.join(map(plain, rest))
            out = self.enter(f"{plain(text)} {quoted}" if text else " ".join(map(plain, rest)), feed, [])
        elif rest:
            out = self.enter(rest, feed)
        else:
            out = self.shell(["sh"], feed) if feed is not None and (self.root or wrapper in ("ssh", "chroot")) else None
        self.root = root
        if wrapper not in ("command", "builtin", "exec", "time"):
            self.undo(mark)
        return out

    def run_written(self, interpreter: str, argv: list[str], feed: str | None) -> str | None:
        """Judge a file that this command line has written, and now runs."""
        text = self.files[self.resolve(argv[0])]
        if text is None:
            self.hit("remote")
        elif interpreter in rules.CODE or re.match(r"#!.*(?:python|perl|ruby|node|php)", text):
            self.code(text, interpreter)
        else:
            self.enter(text, feed, argv[1:])
        return None

    def run_unknown(self, fed: bool = True) -> None:
        """An interpreter runs a text that is not known; without `fed` it may yet get one from a pipe around it."""
        self.count(BARE)
        self.count(LOOSE, not fed)
        if fed:
            self.mark_opaque("a text that is run")

    def record_input(self, text: str) -> str:
        """Add a text that is run from standard input to the normal form of its command."""
        self.stages[-1][0].extend(("<<<", text))
        return text

    def shell(self, argv: list[str], feed: str | None) -> str | None:
        options, _, rest = _options([arg for arg in argv if arg[:1] != "+"], "-o -O --rcfile --init-file")
        if "-c" in options and rest:
            self.count(BARE, UNKNOWN in rest[0])
            return self.enter(plain(rest[0]), feed, rest[2:])
        if rest and "-s" not in options:
            path = self.resolve(rest[0])
            if path in self.files:
                return self.run_written("sh", rest, feed)
            if not path.startswith(_STDIN):
                return self.judge_files(argv, feed)
            feed = UNKNOWN if UNKNOWN in path else feed
        if feed is None or feed == UNKNOWN:
            self.run_unknown(feed is not None)
            return None
        return self.enter(self.record_input(feed), None, rest)

    def interpreter(self, argv: list[str], feed: str | None) -> str | None:
        name, options = argv[0], rules.CODE[argv[0]].split()
        others = "-m -W -X" if name.startswith("py") else "-f -v -F" if "awk" in name else "-I -M"
        _, values, rest = _options(argv, f"{rules.CODE[name]} {others}")
        if "-m" in values and name.startswith("py"):
            return self.enter([values["-m"] or UNKNOWN, *rest], feed)
        codes = [value for option, value in values.items() if option in options]
        if "awk" in name:
            codes = rest[:1] if "-f" not in values else [""]
        if not codes and rest and rest[0] != "-":
            path = self.resolve(rest[0])
            if path in self.files:
                self.run_written(name, rest, feed)
            elif path.startswith(_STDIN):
                self.run_unknown()
        elif not codes and feed is not None:
            codes = [self.record_input(feed)]
        for code in codes:
            if UNKNOWN in code:
                self.count(BARE)
            if code == UNKNOWN:
                self.run_unknown()
            self.code(plain(code), name)
        return self.judge_files(argv, feed)

    def code(self, text: str, language: str) -> None:
        for rule in snippets.rules_of(text):
            self.hit(rule)
            self.opaque = self.opaque or rule == "opaque"
        for command in snippets.commands_of(text, language):
            self.enter(command)
        for literal in {each for each in snippets.literals_of(text) if "/" in each or each[:1] == "."}:
            self.read(re.sub("^~(?=/)", self.home, literal))

    def evaluate(self, argv: list[str], feed: str | None) -> str | None:
        text = " ".join(map(plain, argv[1:]))
        if UNKNOWN in text:
            self.run_unknown()
        return self.enter(text, feed, child=False)

    def source(self, argv: list[str], feed: str | None) -> str | None:
        path = self.resolve(argv[1]) if len(argv) > 1 else ""
        if path.startswith(_STDIN):
            if feed is None or UNKNOWN in path + feed:
                self.run_unknown()
            else:
                self.enter(self.record_input(feed), child=False)
        elif path in self.files:
            self.run_written("sh", argv[1:], feed)
        elif path and not is_covered(self.with_tilde(path), rules.START_FILES):
            self.read(path)
        return None

    def deferred(self, argv: list[str], feed: str | None) -> str | None:
        if argv[0] in ("at", "batch"):
            return self.shell(["sh"], feed)
        for arg in argv[1:2] if argv[0] == "trap" else argv[1:]:
            text = plain(arg).partition("=")[2] if argv[0] == "alias" else plain(arg)
            if text not in ("-", ""):
                self.enter(text)
        return None

    def xargs(self, argv: list[str], feed: str | None) -> str | None:
        _, values, rest = _options(
            argv, "-a -d -E -I -j -L -n -N -P -s -S --arg-file --delimiter --max-args --max-procs --jobs"
        )
        for option in {"-a", "--arg-file"} & values.keys():
            self.read(values[option])
        if argv[0] == "parallel" and not rest:
            return self.shell(["sh"], feed)
        inputs = self.record_input(feed).split()[:100] if feed and UNKNOWN not in feed else [UNKNOWN]
        inputs = [] if ":::" in rest else inputs
        rest = [arg for arg in rest if arg != ":::"] or ["echo"]
        command: list[str] = []
        placeholder = values.get("-I")
        for arg in rest:
            is_template = placeholder and placeholder in arg
            command += [arg.replace(placeholder or "", text) for text in inputs] if is_template else [arg]
        command += [] if placeholder else inputs
        return self.run_each(command) if argv[0] == "xargs" else self.enter(" ".join(map(plain, command)))

    def run_each(self, argv: list[str]) -> str | None:
        mark, many, self.many = len(self.changes), self.many, True
        out = self.enter(argv)
        self.many = many
        self.undo(mark)
        return out

    def find(self, argv: list[str], feed: str | None) -> str | None:
        args = [arg for arg in argv[1:] if arg not in ("-H", "-L", "-P")]
        start = next((i for i, arg in enumerate(args) if arg[:1] in ("-", "(", "!")), len(args))
        actions: list[list[str]] = []
        picks, open_action = False, False
        for at, arg in enumerate(args[start:], start):
            if open_action:
                open_action = arg != ";" and (arg != "+" or args[at - 1] != "{}")
                actions[-1] += [arg] if open_action else []
            elif arg in ("-exec", "-execdir", "-ok", "-okdir"):
                open_action = True
                actions.append([])
            elif arg == "-delete":
                actions.append(["rm", "-r", "{}"])
            else:
                picks = picks or (arg[:1] == "-" and arg not in rules.FIND_WALKS)
        for root in args[:start] or ["."]:
            self.read(root)
            for action in filter(None, actions[:50]):
                self.run_each([arg.replace("{}", f"{root}/{UNKNOWN}" if picks else root) for arg in action])
        return None

    def remove(self, argv: list[str], feed: str | None) -> str | None:
        deep = _is_recursive(argv, "rR")
        may_be_option = any(arg[:1] == UNKNOWN for arg in argv)
        targets = [arg for arg in argv[1:] if arg[:1] != "-"]
        if deep or self.many or any(not set(arg).isdisjoint(GLOBS) for arg in targets):
            self.hit("delete")
        for path in map(self.write, targets):
            if (deep or may_be_option) and self.is_vital(path):
                self.hit("hard") if deep else self.mark_opaque("how much is deleted")
            elif deep and (
                path[0] == UNKNOWN or (UNKNOWN in path and self.is_vital(posixpath.normpath(path.replace(UNKNOWN, ""))))
            ):
                self.mark_opaque("what is deleted")
        return None

    def modes(self, argv: list[str], feed: str | None) -> str | None:
        _, values, rest = _options(argv, "-m --mode -o -g" if argv[0] in ("install", "mkdir") else "")
        mode = values.get("-m") or values.get("--mode") or (rest[0] if argv[0] == "chmod" and rest else "")
        outside = any(arg[:1] != "-" and not self.in_workspace(self.resolve(arg)) for arg in rest[1:])
        if (
            _WORLD_WRITABLE.fullmatch(mode)
            or _SETUID.fullmatch(mode)
            or (argv[0][:2] == "ch" and outside and _is_recursive(argv, "R"))
        ):
            self.hit("perms")
        return self.judge_files(argv, feed)

    def kill(self, argv: list[str], feed: str | None) -> str | None:
        options, values, _ = _options(argv, "-s -n --signal")
        signal = " ".join([*options, *values.values()]).upper()
        self.count(KILL, "9" in signal or "KILL" in signal)
        if "-1" in argv[2:] or argv[1:] == ["-1"]:
            self.hit("hard")
        return None

    def sql(self, argv: list[str], feed: str | None) -> str | None:
        if snippets.is_destructive_sql(f"{' '.join(map(plain, argv[1:]))};{feed or ''}"):
            self.hit("data")
        return self.judge_files(argv, feed)

    def transfer(self, argv: list[str], feed: str | None) -> str | None:
        name, operands = argv[0], [arg for arg in argv[1:] if arg[:1] != "-"]
        into = "-O --output-document" if name == "wget" else "-o --output"
        options, values, rest = _options(argv, f"-T --upload-file --post-file --body-file {into}")
        uploads = [arg.rpartition("@")[2].partition(";")[0] for arg in argv[1:] if "@" in arg]
        uploads += [values[option] for option in values if option not in into.split()]
        if name not in ("curl", "wget") and operands and re.match(r"[^/]*:", operands[-1]):
            uploads += operands[:-1]
        if argv[:3] == ["gh", "gist", "create"]:
            uploads += operands[2:]
        self.count(SINK, feed is not None and not {"-", "."}.isdisjoint(uploads))
        if any(
            each not in ("", "-") and "://" not in each and not self.in_workspace(self.resolve(each))
            for each in uploads
        ):
            self.hit("remote")
        downloads = [values[option] for option in values if option in into.split()]
        if name == "wget" or options & {"-O", "--remote-name"}:
            downloads += [url.rpartition("/")[2] for url in rest if "/" in url]
        self.files |= {self.resolve(each): None for each in downloads if each}
        return self.judge_files(argv, feed)

    def make(self, argv: list[str], feed: str | None) -> str | None:
        if _FROM_STDIN.search(" ".join(map(plain, argv))):
            self.run_unknown()
        return self.judge_files(argv, feed)

    def sed(self, argv: list[str], feed: str | None) -> str | None:
        for text in map(plain, argv[1:]):
            for match in _SED_RUNS.finditer(text):
                self.enter(match[1]) if match[1] else self.run_unknown()
        return self.judge_files(argv, feed)

    def judge_files(self, argv: list[str], feed: str | None) -> str | None:
        """Judge the files that a command names. Returns its output, if known."""
        name = argv[0]
        if name in rules.PRINTS:
            return snippets.printed_text(argv, (self.vars.get(HERE) or [UNKNOWN])[0])
        outputs = rules.OUTPUTS.get(name, "").split()
        operands = [at for at, arg in enumerate(argv) if at and arg[:1] != "-"]
        in_place = name in rules.IN_PLACE and any(arg.startswith(("-i", "--in-place", "-pi")) for arg in argv)
        writes = "all" if in_place else rules.WRITES.get(name)
        written = operands if writes == "all" else operands[-1:] if writes else []
        base = ""
        for at, arg in enumerate(argv[1:], 1):
            if name == "tar" and (match := _TAR_FOLDER.fullmatch(f"{argv[at - 1]} {arg}")):
                base = match[1]
            elif base and arg[:1] not in ("-", "/"):
                self.read(f"{base}/{arg}")
            key, equals, value = arg.partition("=")
            if argv[at - 1] in outputs or key in outputs:
                self.write(value if equals else arg)
            elif at >= (written or [len(argv)])[0] and arg[:1] != "-" and not (name in ("scp", "rsync") and ":" in arg):
                self.write(arg)
            elif name not in ("scp", "rsync", "sftp") or argv[at - 1] != "-i":
                self.read(value if equals else arg.removeprefix("@"))
        return feed if name == "tee" or (name == "cat" and all(argv[at] == "-" for at in operands)) else None


_KINDS: dict[str, Callable[[_CommandAnalyzer, list[str], str | None], str | None]] = {
    "eval": _CommandAnalyzer.evaluate,
    "find": _CommandAnalyzer.find,
    "kill": _CommandAnalyzer.kill,
    **dict.fromkeys(("make", "gmake"), _CommandAnalyzer.make),
    **dict.fromkeys(("sed", "gsed"), _CommandAnalyzer.sed),
    **dict.fromkeys(("rm", "srm"), _CommandAnalyzer.remove),
    **dict.fromkeys(("xargs", "parallel"), _CommandAnalyzer.xargs),
    **dict.fromkeys((".", "source"), _CommandAnalyzer.source),
    **dict.fromkeys(("alias", "trap", "at", "batch"), _CommandAnalyzer.deferred),
    **dict.fromkeys(("chmod", "chown", "chgrp", "install", "mkdir"), _CommandAnalyzer.modes),
    **dict.fromkeys(rules.TRANSFERS, _CommandAnalyzer.transfer),
    **dict.fromkeys(rules.SQL, _CommandAnalyzer.sql),
    **dict.fromkeys(rules.SHELLS, _CommandAnalyzer.shell),
    **dict.fromkeys(rules.CODE, _CommandAnalyzer.interpreter),
}
