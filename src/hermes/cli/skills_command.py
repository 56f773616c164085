"""`hermes skills`: ways of working kept for later: look at them, write, check, add and remove them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.cli.command import YES, Args, Argument, command, flag
from hermes.cli.output import (
    NotFound,
    Refused,
    UsageError,
    confirmed,
    mask,
    note,
    print_redacted,
    resolve_name,
    secrets,
    service_errors,
    tell,
)
from hermes.cli.table import print_table
from hermes.core.errors import HermesError
from hermes.core.formatting import counted, size
from hermes.core.home import Home, make_private_folder
from hermes.settings import config

if TYPE_CHECKING:
    from hermes.services.skills import Scan, Skill, Skills

_NAME = Argument("name", metavar="NAME")
_CATEGORY = Argument("--category", metavar="NAME", help="the category it is put into")
_REMOTE = re.compile(r"(?:https?|ssh|git|file)://\S+|[\w.-]+@[\w.-]+:\S+")
_CLONE_S_MAX = 300.0
# Nothing of the user's or the machine's settings is used that could run a program: no hooks, filters or helpers.
_GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "core.symlinks=false")
_CLONE = ("clone", "--quiet", "--depth=1", "--no-tags", "--template=", "--no-recurse-submodules", "--")
_GIT_ENV = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
_GIT_ENV |= {"GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file"}


def _skills(home: Home) -> Skills:
    from hermes.services.skills import Skills

    return Skills(config.load(home), secrets(home))


def _named(args: Args, skills: Skills) -> Skill:
    by_name = {skill.name: skill for skill in skills.all()}
    return by_name[resolve_name(args.name, by_name, "skill", "hermes skills list")]


# ---- looking


@command("skills list", help="list skills")
def _list(args: Args, home: Home) -> None:
    skills = _skills(home).all()
    rows = [(skill.name, skill.category or "-", skill.description) for skill in skills]
    document = {"skills": [{**skill._asdict(), "path": str(skill.path)} for skill in skills]}
    empty = "There are no skills. Try: hermes skills add PATH_OR_GIT_URL"
    print_table(args, home, document, rows, flexible=2, empty=empty)


@command("skills show", _NAME, help="show a skill's text and files")
def _show(args: Args, home: Home) -> None:
    from hermes.services.skills import files_of, skill_text

    skill = _named(args, _skills(home))
    text, files = skill_text(skill.path), files_of(skill)
    document = {**skill._asdict(), "path": str(skill.path), "content": text, "files": files}
    print_redacted(args, home, document, [text.rstrip(), *(f"file: {file}" for file in files)])


@command("skills check", _NAME, help="check a skill for mistakes and suspicious content")
def _check(args: Args, home: Home) -> int:
    skills = _skills(home)
    skill = _named(args, skills)
    scan = skills.scan(skill.path.parent)
    faults = [*scan.faults, *scan.suspicions]
    print_redacted(args, home, {"name": skill.name, "faults": faults}, faults or [f"{skill.name} is in order."])
    return 1 if faults else 0


# ---- changing


@command(
    "skills new",
    _NAME,
    _CATEGORY,
    Argument("--description", metavar="TEXT", help="one line that says when to use it"),
    Argument("--file", metavar="PATH", help="a SKILL.md to start from"),
    help="create a skill",
)
def _new(args: Args, home: Home) -> None:
    about = json.dumps(args.description or "One line that says when to use it.", ensure_ascii=False)
    text = f"---\nname: {args.name}\ndescription: {about}\n---\n\nThe steps.\n"
    try:
        text = Path(args.file).expanduser().read_text("utf-8") if args.file else text
    except (OSError, UnicodeError) as error:
        raise UsageError(f"The file cannot be read: {error}.", where=args.file) from None
    given = {"action": "create", "name": args.name, "content": text, "category": args.category}
    with service_errors("hermes skills list"):
        file = home.skills / _skills(home).change(given)
    tell(args, {"name": args.name, "path": str(file)}, f"{file} is there.")
    note(f"Try: hermes skills edit {args.name}")


@command("skills edit", _NAME, help="edit its SKILL.md in $VISUAL or $EDITOR")
def _edit(args: Args, home: Home) -> None:
    from hermes.cli.editor import edit
    from hermes.services.skills import Change

    skills = _skills(home)
    skill = _named(args, skills)

    def check(draft: Path) -> None:
        with service_errors():
            skills.check(skill.name, Change(skill.path, "", draft.read_text("utf-8", "replace")))

    with service_errors():
        skills.own_folder(skill)
    saved = edit(skill.path, b"", check)
    tell(args, {"path": str(skill.path), "saved": saved}, "Saved." if saved else "Nothing was changed.")


@command("skills remove", _NAME, YES, help="remove a skill with its files")
def _remove(args: Args, home: Home) -> int:
    skills = _skills(home)
    skill = _named(args, skills)
    if not confirmed(args, f"Removing '{skill.name}'", f"{skill.path.parent} will be gone."):
        return 1
    with service_errors():
        skills.change({"action": "delete", "name": skill.name})
    tell(args, {"name": skill.name, "removed": True}, f"The skill '{skill.name}' is gone.")
    return 0


# ---- adding


@command(
    "skills add",
    Argument("source", metavar="PATH_OR_GIT_URL", help="a folder, or the address of a repository"),
    _CATEGORY,
    flag("--force", help="even if something in it is suspicious"),
    YES,
    help="copy skills from a folder or repository; nothing is run",
)
def _add(args: Args, home: Home) -> int:
    from hermes.services.skills import FILE

    skills, added = _skills(home), dict[str, str]()
    with _source(args.source, home) as folder:
        paths = [path for depth in range(4) for path in sorted(folder.glob("*/" * depth + FILE))]
        scans = [skills.scan(path.parent) for path in paths if path.is_file() and not path.is_symlink()]
        if not scans:
            raise NotFound(f"There is no {FILE} in it.", where=args.source)
        note(*map(mask(home), (line for scan in scans for line in _scan_lines(scan))))
        _refuse_unfit(args, scans)
        if not confirmed(args, f"Adding {counted(len(scans), 'skill')}"):
            return 1
        for scan in scans:
            with service_errors(f"hermes skills remove {scan.name}"):
                added[scan.name] = str(skills.add(scan, args.category))
    document = [{"name": name, "path": path} for name, path in added.items()]
    tell(args, {"added": document}, *(f"{path} is there." for path in added.values()))
    return 0


@contextlib.contextmanager
def _source(text: str, home: Home) -> Iterator[Path]:
    """The folder that is named, or a copy of the repository for as long as it is looked at."""
    from hermes.sandbox.base import failure_message

    if not _REMOTE.fullmatch(text):
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise NotFound("There is no such folder, and it is no address of a repository.", where=text)
        yield folder
        return
    make_private_folder(home.cache)
    with tempfile.TemporaryDirectory(dir=home.cache) as place:
        env = {name: os.environ[name] for name in ("PATH", "HOME", "SSH_AUTH_SOCK") if name in os.environ} | _GIT_ENV
        if failure := failure_message([*_GIT, *_CLONE, text, f"{place}/clone"], env, _CLONE_S_MAX):
            raise HermesError(f"It could not be fetched: {secrets(home).redact(failure)}")
        yield Path(place) / "clone"


def _scan_lines(scan: Scan) -> Iterator[str]:
    yield f"{scan.name or scan.folder.name}: {counted(len(scan.files), 'file')}"
    yield from (f"  {file}  {size(count)}" for file, count in scan.files.items())
    yield from (f"  {file}  left out: no file of a skill" for file in scan.left_out)
    yield from (f"  fault: {fault}" for fault in scan.faults)
    yield from (f"  suspicious: {suspicion}" for suspicion in scan.suspicions or ["nothing was found"])


def _refuse_unfit(args: Args, scans: list[Scan]) -> None:
    names = [scan.name for scan in scans]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"Two of the skills are called '{twice}'.", hint="the folder of one of them")
    if faults := [fault for scan in scans for fault in scan.faults]:
        raise UsageError(f"This is no skill as it should be: {faults[0]}", hint="a folder with sound ones only")
    if not args.force and (suspected := [scan.name for scan in scans if scan.suspicions]):
        raise Refused(f"There is something suspicious in {', '.join(suspected)}.", hint="the same with --force")
