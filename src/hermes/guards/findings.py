"""The findings on a command line: the rules it matches, and verdicts on its paths. Pure."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache

from hermes.guards import rules
from hermes.guards.shell import HERE, Shell
from hermes.guards.shell_expansion import GLOBS, UNKNOWN, Value, clean, plain

PATTERN_WORK, PATTERN_CHAR_WORK = 200, 20
STAGES_SHOWN_MAX = 20
# Facts about other stages of a pipeline: downloads, decoders, interpreters of an unknown text, those whose text may
# come from around them, what sends its input away, reads outside the workspace, lists and kills.
NET, DECODER, BARE, LOOSE, SINK, OUTSIDE, PIDS, KILL = range(8)

_RAW = re.compile(
    r"/dev/(?:r?disk\d|[shv]d[a-z]|xvd[a-z]|nvme\d|mmcblk\d|md\d|dm-\d|mapper/|loop\d|nbd\d|sr\d|zd\d|ram\d|pmem\d"
    r"|k?mem\b|port\b|block/|disk/)|/proc/sysrq-trigger"
)
_SOCKET = re.compile(r"/dev/(?:tcp|udp)/")
_OTHER_ROOT = re.compile(r"^/proc/(?:self|thread-self|\d+)/root(?=/|$)")
_HOMES = re.compile(r"/root(?=/|$)|/(?:home|Users)/[^/]+(?=/|$)|\0[^/]*(?=/)")
_ANYTHING = re.compile(r"(?:\x13[^]]*+\]|[\x11\x12.])*+")
_SECRETS = re.compile(r"\.env|auth|.*\.db")
_HIDDEN = re.compile(r"/\.[^/]*\0[^/]*")
_FILE_URL = re.compile(r"file://(?:localhost)?(?=/)", re.I)


@dataclass(frozen=True, slots=True)
class Facts:
    """Where a command would run; `env` is its whole environment, if known."""

    workspace: tuple[str, ...]
    home: str
    hermes_home: str
    env: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule that a command falls under; `detail` is the simple command or pipeline in normal form."""

    rule: str
    klass: str
    detail: str


def normal_form(argv: list[str], files: Iterable[str] = ()) -> str:
    parts = [plain(arg) if arg == "<<<" or not set(arg).isdisjoint(GLOBS) else shlex.quote(arg) for arg in argv]
    return " ".join([*parts, *(f"> {shlex.quote(plain(file))}" for file in files)]).replace(UNKNOWN, "…")


@lru_cache(256)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(translate(plain(text)))


def _could_be(pattern: str, name: str) -> bool:
    if pattern == name or set(pattern).isdisjoint(GLOBS):
        return pattern == name
    return not (name[:1] == "." and pattern[0] in GLOBS) and _pattern(pattern).match(name) is not None


def is_covered(path: str, folders: tuple[str, ...]) -> bool:
    """Whether a path, perhaps a pattern, is one of these folders (written with a final slash) or in one. An unknown
    part of a hidden name matches anything."""
    path = _HIDDEN.sub(lambda match: match[0].replace(UNKNOWN, GLOBS[0]), path)
    if set(path).isdisjoint(GLOBS):
        return f"{path}/".startswith(folders)
    parts = path.split("/")
    names_of_folders = (folder.rstrip("/").split("/") for folder in folders)
    return any(len(parts) >= len(names) and all(map(_could_be, parts, names)) for names in names_of_folders)


class Findings(Shell):
    def __init__(self, cwd: str, facts: Facts, exists: Callable[[str], bool] | None = None) -> None:
        variables: dict[str, Value] = {
            "HOME": [facts.home],
            "PWD": [cwd],
            HERE: [cwd],
            "HERMES_HOME": [facts.hermes_home],
        }
        variables |= {"IFS": [" \t\n"]} | {name: [clean(value)] for name, value in (facts.env or {}).items()}
        super().__init__(variables, facts.env is not None)
        self.exists = exists
        self.home, self.hermes = posixpath.normpath(facts.home), (facts.hermes_home.rstrip("/") + "/",)
        self.workspace = tuple(f"{each.rstrip('/')}/" for each in facts.workspace)
        self._rules: dict[tuple[str, str, int, int], None] = {}  # a rule, why, from which stage to which
        self.stages: list[tuple[list[str], list[str]]] = []  # each simple command, and what its redirects write
        self.files: dict[str, str | None] = {}  # what this command line has written; None: it was downloaded
        self.counts = [0] * 8
        self.opaque = False

    def hit(self, rule: str, since: int = -1, reason: str = "") -> None:
        end = len(self.stages)
        self._rules[rule, reason, max(end - 1, 0) if since < 0 else since, end] = None

    def mark_opaque(self, reason: str, since: int = -1) -> None:
        self.opaque = True
        self.hit("opaque", since, reason)

    def report_fork_bomb(self) -> None:
        self.hit("hard")

    def hits(self) -> list[Hit]:
        hits: dict[Hit, None] = {}
        for rule, reason, start, end in self._rules:
            text = " | ".join(normal_form(*stage) for stage in self.stages[start:end][-STAGES_SHOWN_MAX:])
            hits[Hit(rule, rules.CLASSES[rule], f"{text} ({reason})" if reason else text)] = None
        return list(hits)

    def count(self, kind: int, happened: bool = True) -> None:
        self.counts[kind] += happened

    def snapshot(self) -> tuple[list[int], int]:
        return self.counts.copy(), len(self.stages)

    def judge_pipeline(self, before: tuple[list[int], int], fed: bool) -> None:
        if self.counts == before[0]:
            return
        net, decoder, bare, loose, sink, outside, pids, kill = map(int.__gt__, self.counts, before[0])
        if loose and fed:
            self.mark_opaque("a text that is run", before[1])
        if (bare and (net or decoder)) or (sink and outside):
            self.hit("remote", before[1])
        if kill and pids:
            self.hit("procs", before[1])

    def resolve(self, arg: str) -> str:
        arg = _FILE_URL.sub("", arg, count=1) if arg[:1] in "fF" else arg
        if arg[:1] not in ("/", UNKNOWN):
            here = self.vars.get(HERE)
            arg = f"{here[0] if here else UNKNOWN}/{arg}"
        path = posixpath.normpath(arg)
        path = path[1:] if path.startswith("//") else path
        path = path if path[:1] in ("/", UNKNOWN) else f"{UNKNOWN}/{path}"
        if not set(path).isdisjoint(GLOBS):
            self.spend(PATTERN_WORK + PATTERN_CHAR_WORK * len(path))
        return _OTHER_ROOT.sub("", path) or "/"

    def with_tilde(self, path: str) -> str:
        if f"{path}/".startswith(self.home.rstrip("/") + "/") and self.home != "/":
            return "~" + path[len(self.home) :]
        return _HOMES.sub("~", path, count=1) if _HOMES.match(path) else path

    def in_workspace(self, path: str) -> bool:
        return f"{path}/".startswith(self.workspace)

    def is_vital(self, path: str) -> bool:
        """Whether deleting this folder, or all that is in it, destroys the system or a home folder."""
        folder, _, last = path.rpartition("/")
        if not set(last).isdisjoint(GLOBS) and _ANYTHING.fullmatch(last):
            path = folder or "/"
        if (
            path in rules.SYSTEM_FOLDERS
            or self.with_tilde(path) == "~"
            or f"{self.home}/".startswith(f"{path.rstrip('/')}/")
        ):
            return True
        parts = path.split("/")
        return not set(path).isdisjoint(GLOBS) and any(
            len(parts) == name.count("/") + 1 and all(map(_could_be, parts, name.split("/")))
            for name in (*rules.SYSTEM_FOLDERS, self.home)
        )

    def write(self, arg: str) -> str:
        path = self.resolve(arg)
        short = self.with_tilde(path)
        if _RAW.match(path):
            self.hit("hard")
        if _SOCKET.match(path):
            self.hit("remote")
        if is_covered(short, rules.SYSTEM_WRITES):
            self.hit("system")
        if is_covered(short, rules.PRIVATE):
            self.hit("creds")
        if is_covered(path, self.hermes) and not self.in_workspace(path):
            self.hit("agent")
        return path

    def read(self, arg: str) -> str:
        """Judge a path that is read. Returns the content, as far as this command line has written it."""
        path = self.resolve(arg)
        if _SOCKET.match(path):
            self.hit("remote")
        own = is_covered(path, self.hermes) and not self.in_workspace(path)
        secret = is_covered(self.with_tilde(path), rules.PRIVATE)
        if (secret and not path.endswith((".pub", "/known_hosts"))) or (
            own and _SECRETS.match(path[len(self.hermes[0]) :])
        ):
            self.hit("creds")
        self.count(OUTSIDE, not self.in_workspace(path) and not path.startswith("/dev/"))
        return self.files.get(path) or UNKNOWN
