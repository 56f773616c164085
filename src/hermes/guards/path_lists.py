"""The files that the model's tools never read or write: the lists, and matching a path with them."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

Mode = Literal["read", "write"]


# A rule's name, whether it is about reading (r) or writing (w), where its names begin (at the top, in a user's home,
# in the Hermes home, in any folder), the names with everything below them, and after `!` those that are free.
# `*` stands for any part of one name; after `=` nothing below it is meant, and no folder.
_TABLE = """
kernel_files rw / proc sys dev !proc/cpuinfo !proc/meminfo !proc/version
system_secrets rw / etc/shadow* etc/gshadow* etc/sudoers* etc/master.passwd etc/ssl/private etc/ssh/ssh_host_*_key
control_sockets rw / run/docker* run/containerd run/podman run/crio run/systemd run/dbus run/user/*/gnupg
control_sockets rw / run/user/*/keyring var/run/docker* var/run/containerd var/run/podman var/run/crio var/run/dbus
system_files w / etc boot efi usr bin sbin lib* proc var/spool/cron var/spool/at var/cron var/lib/systemd
system_files w / System Library/LaunchAgents Library/LaunchDaemons
credentials rw ~ .ssh .gnupg .aws .azure .kube .docker .config/gh .config/gcloud .netrc _netrc .pgpass .my.cnf .npmrc
credentials rw ~ .pypirc .git-credentials .config/git/credentials .cargo/credentials .cargo/credentials.toml
credentials rw ~ .vault-token .password-store .local/share/keyrings
start_files w ~ .profile .bashrc .bash_profile .bash_login .bash_logout .bash_aliases .zshrc .zshenv .zprofile .zlogin
start_files w ~ .zlogout .kshrc .cshrc .tcshrc .login .xprofile .xinitrc .xsession .pam_environment .config/fish
start_files w ~ .gitconfig .config/git .config/environment.d .config/systemd .config/autostart Library/LaunchAgents
environment_files r any .env .env.* !.env.example
key_stores r any *.p12 *.pfx *.jks *.keystore *.kdbx *.ppk
git_control w any .git/hooks .git/config .git/config.worktree .git/modules/*/hooks .git/modules/*/config
git_control w any =.git .git/commondir .git/modules/*/commondir .git/worktrees/*/commondir
hermes_secrets rw hermes .env .env.* auth* *.db *.db-* *.db.* *.sqlite* sessions history
hermes_secrets rw hermes *.key *.pem *_key* *keys.* *token* *secret* *credential*
hermes_files w hermes config.yaml* logs gateway.* gateway_state* active_profile
"""


# Names in a workspace that the user's own tools take orders from: editors, shells, other agents, managers of git hooks.
# In lower case. `.git` is looked into instead, and `head` makes a folder a repository.
_RESERVED_NAMES_TEXT = """
.envrc .autoenv .autoenv.zsh .mise.toml .mise.local.toml mise.toml mise.local.toml .mise .vscode .idea .fleet .zed .devcontainer .devcontainer.json .exrc
.vimrc .lvimrc .nvimrc .nvim.lua .dir-locals.el .dir-locals-2.el .husky .huskyrc .huskyrc.json .huskyrc.js .githooks
.lefthook .lefthook.yml .lefthook.yaml lefthook.yml lefthook.yaml lefthook.toml lefthook.json lefthook-local.yml
.overcommit.yml .pre-commit-config.yaml .lintstagedrc .lintstagedrc.json .lintstagedrc.yaml .lintstagedrc.yml
.lintstagedrc.js .lintstagedrc.mjs .lintstagedrc.cjs lint-staged.config.js lint-staged.config.mjs lint-staged.config.cjs
.mcp.json agent.md agents.md agents.override.md claude.md claude.local.md gemini.md hermes.md .hermes.md .claude .codex
.gemini .cursor .cursorrules .windsurf .windsurfrules .clinerules .roo .aider.conf.yml
.kiro .opencode opencode.json qwen.md crush.md warp.md copilot-instructions.md
"""
RESERVED_NAMES = frozenset(_RESERVED_NAMES_TEXT.split())


_GIT_CONTROL = frozenset({"hooks", "config", "config.worktree", "commondir"})


def git_entry(path: str) -> str | None:
    """The `.git` around a path that controls a repository, if it does; also `HEAD`, which makes a folder one."""
    names = path.split("/")
    at = next((index for index, name in enumerate(names) if plain(name) == ".git"), None)
    if at is None:
        return path if names[-1] == "HEAD" else None
    is_control = at == len(names) - 1 or any(plain(name) in _GIT_CONTROL for name in names[at + 1 :])
    return "/".join(names[: at + 1]) if is_control else None


def reserved_entry(root: str, path: str) -> str | None:
    entry = root.rstrip("/")
    for name in path[len(entry) :].strip("/").split("/"):
        entry = f"{entry}/{name}"
        if plain(name) in RESERVED_NAMES:
            return entry
    return None


class Rule(NamedTuple):
    name: str
    modes: str
    base: str
    entries: list[str]
    free: list[str]


def _parse_rule(line: str) -> Rule:
    name, modes, base, *names = line.split()
    free = [text[1:] for text in names if text.startswith("!")]
    return Rule(name, modes, base, [text for text in names if not text.startswith("!")], free)


RULES = tuple(map(_parse_rule, _TABLE.strip().splitlines()))

# Below the Hermes home: each holds a folder per session or owner, and only the one that is a root is for this run.
APART = ("cache/tool_results", "uploads", "sandbox", "workspace/scopes", "memories/scopes", "skills/scopes")

PRIVATE_KEY = re.compile(
    rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\s|\\r|\\n)+"
    rb"(?:[A-Za-z0-9+/=]{16}|Proc-Type:|Version:|Comment:)"
    rb"|PuTTY-User-Key-File-\d|AGE-SECRET-KEY-1[0-9A-Z]{16}|SSH PRIVATE KEY FILE FORMAT"
    rb"|\A0\x82..\x02\x01\x00(?:0\r\x06|\x02\x82)",
    re.S,
)


class Lists:
    def __init__(self, home: Path, user_home: Path) -> None:
        homes = [str(user_home)]
        with contextlib.suppress(KeyError):
            homes.append(pwd.getpwuid(os.getuid()).pw_dir)
        self._own = {"/": [""], "~": _both_names(homes), "hermes": _both_names([str(home)]), "any": []}
        others = {"~": ["/root", "/home/*", "/Users/*"], "any": ["*"]}
        self._rules: list[tuple[Rule, re.Pattern[str]]] = []
        self._names: dict[str, Rule] = {}
        for rule in RULES:
            own = self._own[rule.base]
            self._rules.append((rule, _pattern(rule, [*own, *others.get(rule.base, [])])))
            self._names |= {f"{base}/{entry}": rule for base in own for entry in rule.entries if "*" not in entry}
        # Where a listed name is a link, the place that it leads to is meant too.
        self._moved = [
            (rule, plain(os.path.realpath(name)))
            for name, rule in self._names.items()
            if os.path.realpath(name) != name
        ]

    def hits(self, path: str, real: str, mode: Mode) -> Iterator[str]:
        path, real = plain(path), plain(real)
        for rule, pattern in self._rules:
            if mode[0] in rule.modes and (pattern.match(path) or pattern.match(real)):
                yield rule.name
        for rule, target in self._moved:
            if mode[0] in rule.modes and below(real, target):
                yield rule.name

    def sealed(self) -> set[tuple[int, int]]:
        names = [name for name, rule in self._names.items() if rule.name in ("credentials", "hermes_secrets")]
        for folder in (*names, *self._own["hermes"]):
            with contextlib.suppress(OSError):
                names += [f"{folder}/{name}" for name in os.listdir(folder)]
        identities: set[tuple[int, int]] = set()
        for name in names:
            with contextlib.suppress(OSError):
                if name in self._names or any(self.hits(name, name, "read")):
                    status = os.stat(name)
                    identities.add((status.st_dev, status.st_ino))
        return identities


def _pattern(rule: Rule, bases: list[str]) -> re.Pattern[str]:
    start = "|".join(".*" if base == "*" else _glob(base) for base in bases)
    unless = "".join(f"(?!{_glob(entry)}\\Z)" for entry in rule.free)
    return re.compile(f"(?:{start})/{unless}(?:{'|'.join(map(_glob, rule.entries))})(?:/|\\Z)", re.S)


def _glob(text: str) -> str:
    last = r"\Z" if text[:1] == "=" else ""
    return re.escape(plain(text.removeprefix("="))).replace(r"\*", "[^/]*") + last


def plain(text: str) -> str:
    """A path for comparison: without case and invisible characters, which not every file system distinguishes."""
    if text.isascii():
        return text.lower()
    visible = (char for char in unicodedata.normalize("NFC", text) if unicodedata.category(char) != "Cf")
    return "".join(visible).casefold()


def below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _both_names(folders: Iterable[str]) -> list[str]:
    named = [name(folder).rstrip("/") for folder in folders for name in (os.path.abspath, os.path.realpath)]
    return list(dict.fromkeys(named))
