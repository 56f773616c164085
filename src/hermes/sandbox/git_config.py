"""Filters the settings of a repository that a command has created: only those that make git run nothing stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

# Section and key in lower case. `*` is any subsection.
_HARMLESS_TEXT = """
core.repositoryformatversion core.filemode core.bare core.logallrefupdates core.ignorecase
core.precomposeunicode core.symlinks core.autocrlf core.eol core.safecrlf core.quotepath core.abbrev
core.compression core.untrackedcache core.sparsecheckout core.sparsecheckoutcone core.protecthfs
core.protectntfs core.longpaths core.preloadindex extensions.objectformat extensions.compatobjectformat
extensions.refstorage extensions.partialclone extensions.preciousobjects extensions.worktreeconfig
remote.*.fetch remote.*.push remote.*.tagopt remote.*.mirror remote.*.prune remote.*.prunetags remote.*.promisor
remote.*.partialclonefilter remote.*.skipdefaultupdate remote.*.skipfetchall branch.*.merge branch.*.rebase
branch.*.description branch.autosetupmerge branch.autosetuprebase branch.sort submodule.*.active
submodule.*.branch submodule.*.ignore submodule.*.shallow submodule.*.fetchrecursesubmodules submodule.recurse
submodule.active user.name user.email user.useconfigonly init.defaultbranch pull.rebase pull.ff push.default
push.autosetupremote push.followtags fetch.prune fetch.prunetags fetch.parallel merge.ff merge.conflictstyle
merge.renames rebase.autosquash rebase.autostash rerere.enabled diff.algorithm diff.renames diff.colormoved
gc.auto gc.autodetach maintenance.auto index.version index.threads feature.manyfiles advice.* color.* status.*
lfs.repositoryformatversion commit.verbose commit.status tag.sort versionsort.suffix
"""
_HARMLESS = frozenset(_HARMLESS_TEXT.split())
# Only with these values.
_WITH_VALUE = {"core.fsmonitor": {"false"}, "commit.gpgsign": {"false"}, "tag.gpgsign": {"false"}}
_REFERENCES = frozenset({"core.hookspath", "include.path", "includeif.path"})
_ADDRESSES_TEXT = """
remote.*.url remote.*.pushurl submodule.*.url branch.*.remote branch.*.pushremote
"""
_ADDRESSES = frozenset(_ADDRESSES_TEXT.split())
# A known scheme, host:path, or a path or name. `helper::address` starts a program.
_ADDRESS = re.compile(r"(?:https?|ssh|git|file)://[^\s]+|(?!-)(?:[\w.@~/+-]+:(?!:))?[\w.@~/+-]*(?:\?\S*)?", re.ASCII)

_SECTION = re.compile(r'\[([A-Za-z0-9-]+)(?: "([^"\\]*)")?\]')
_ENTRY = re.compile(r'([A-Za-z][A-Za-z0-9-]*)(?:\s*=\s*(?:"([^"\\]*)"|([^"\\#;]*?)))?')
# What no line of the file may hold: it would be read in another way than as one plain line.
_ODD = re.compile(r"[\0-\x08\x0b-\x1f\x7f]")


class Checked(NamedTuple):
    text: str
    removed: list[str]


def check_config(text: str, worktree_allowed: Callable[[str], bool] = lambda _: False) -> Checked:
    """Keep settings that are known to run nothing. A line that is not a plain `key = value` is removed, too: git might
    read it otherwise. `worktree_allowed` decides about a value of `core.worktree`."""
    lines, removed, section = list[str](), list[str](), ""
    for line in text.split("\n"):
        plain = line.strip(" \t\r")
        if not plain or plain[0] in "#;":
            if not line.rstrip("\r").endswith("\\"):
                continue
        elif not _ODD.search(plain) and (match := _SECTION.fullmatch(plain)):
            name, inner = match[1].lower(), match[2]
            section = name if inner is None else f"{name}.{inner}"
            lines.append(plain)
            continue
        elif not _ODD.search(plain) and section and (match := _ENTRY.fullmatch(plain)):
            key, value = match[1].lower(), match[2] if match[2] is not None else match[3]
            if _is_harmless(section, key, value, worktree_allowed):
                lines.append(f"\t{plain}")
            else:
                removed.append(f"{section}.{key}")
            continue
        removed.append("an unusual line")
    return Checked("".join(f"{line}\n" for line in lines), removed)


def _is_harmless(section: str, key: str, value: str | None, worktree_allowed: Callable[[str], bool]) -> bool:
    name, _, inner = section.partition(".")
    pattern = f"{name}.*.{key}" if inner else f"{name}.{key}"
    if pattern in _ADDRESSES:
        return value is not None and _ADDRESS.fullmatch(value) is not None
    if pattern == "core.worktree":
        return value is not None and worktree_allowed(value)
    if pattern in _WITH_VALUE:
        return (value or "").lower() in _WITH_VALUE[pattern]
    return pattern in _HARMLESS or (not inner and f"{name}.*" in _HARMLESS)


def referenced_paths(text: str) -> list[str]:
    """The paths of further settings and hooks that a config file names, as far as its lines are plain."""
    values, section = list[str](), ""
    for line in text.split("\n"):
        plain = line.strip(" \t\r")
        if match := _SECTION.match(plain):
            section = match[1].lower()
            plain = plain[match.end() :].strip(" \t")
        key, _, value = plain.partition("=")
        if f"{section}.{key.strip().lower()}" in _REFERENCES and (value := value.strip(' \t"')):
            values.append(value)
    return values
