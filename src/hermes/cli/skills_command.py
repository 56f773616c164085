"""`hermes skills`: ways of working kept for later: look at them, write, check, add and remove them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from hermes.cli.actions import FLAG, YES, Actions, Args, Arguments, command
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
    tell,
    tool_errors_as_cli,
)
from hermes.core.errors import HermesError
from hermes.core.formatting import columns, counted, size
from hermes.core.home import Home, locked, make_private_folder, write_private
from hermes.settings import config

if TYPE_CHECKING:
    from hermes.tools.skill_files import Skill

_REMOTE = re.compile(r"(?:https?|ssh|git|file)://\S+|[\w.-]+@[\w.-]+:\S+")
_CLONE_S_MAX = 300.0
_FILES_MAX = 500
# Nothing of the user's or the machine's settings is used that could run a program: no hooks, filters or helpers.
_GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "core.symlinks=false")
_CLONE = ("clone", "--quiet", "--depth=1", "--no-tags", "--template=", "--no-recurse-submodules", "--")
_GIT_ENV = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
_GIT_ENV |= {"GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file"}


def _context(home: Home) -> Any:
    """What the tools for skills need to know."""
    return SimpleNamespace(
        home=home, settings=config.load(home), secrets=secrets(home), owner="default", session_key=None
    )


def _skill(args: Args, context: Any) -> Skill:
    from hermes.tools.skill_files import find_skills

    found = {skill.name: skill for skill in find_skills(context.settings)}
    return found[resolve_name(args.name, found, "skill", "hermes skills list")]


# ---- looking


def _list(args: Args, home: Home) -> None:
    from hermes.tools.skill_files import find_skills

    found = find_skills(config.load(home))
    lines = columns([(skill.name, skill.category or "-", skill.description) for skill in found], 2)
    print_redacted(args, home, {"skills": [{**skill._asdict(), "path": str(skill.path)} for skill in found]}, lines)
    if not found:
        note("There are no skills. Try: hermes skills add PATH_OR_GIT_URL")


def _show(args: Args, home: Home) -> None:
    from hermes.tools.skill_files import skill_text
    from hermes.tools.skills import _files

    skill = _skill(args, _context(home))
    text, files = skill_text(skill.path), _files(skill.path.parent)
    document = {**skill._asdict(), "path": str(skill.path), "content": text, "files": files}
    print_redacted(args, home, document, [text.rstrip(), *(f"file: {file}" for file in files)])


def _check(args: Args, home: Home) -> int:
    context = _context(home)
    skill = _skill(args, context)
    scan = _scan(context, skill.path.parent)
    faults = [*scan.faults, *scan.suspicions]
    print_redacted(args, home, {"name": skill.name, "faults": faults}, faults or [f"{skill.name} is in order."])
    return 1 if faults else 0


class Scan(NamedTuple):
    """A folder with a skill as it was found: what is kept of it, what not, what is wrong, and what is suspicious."""

    folder: Path
    name: str
    files: dict[str, int]
    left_out: list[str]
    faults: list[str]
    suspicions: list[str]


def _scan(context: Any, folder: Path) -> Scan:
    """Read a skill as the tools would. Nothing in it is run."""
    from hermes.tools import skills as tools
    from hermes.tools.framework.registry import ToolError
    from hermes.tools.skill_files import FILE, Skill, front_matter

    name = front_matter((folder / FILE).read_text("utf-8", "replace"))[0]
    scan = Scan(folder, name, {}, [], [], [])
    if not tools._NAME.fullmatch(name):
        scan.faults.append(f"{FILE}: its head does not name it in small letters, digits and hyphens.")
    for path in (path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()):
        file, code = path.relative_to(folder).as_posix(), "path_refused"
        with contextlib.suppress(ToolError):
            parts, code = (FILE,) if file == FILE else tools._parts(file), ""
        if path.is_symlink() or code:
            scan.left_out.append(file)
            continue
        scan.files[file] = path.stat().st_size
        try:
            text = tools._text(Skill(name, "", None, folder / FILE), parts)
            tools._checked(context, name, tools.Change(path, "", text))
        except ToolError as error:
            if (code := error.answer["code"]) != "binary_file":
                suspected = code in ("injection_suspected", "contains_secret")
                (scan.suspicions if suspected else scan.faults).append(f"{file}: {error}")
    if len(scan.files) > _FILES_MAX:
        scan.faults.append(f"It has {len(scan.files)} files; at most {_FILES_MAX} are possible.")
    return scan


# ---- changing


def _new(args: Args, home: Home) -> None:
    from hermes.tools.skills import _manage

    about = json.dumps(args.description or "One line that says when to use it.", ensure_ascii=False)
    text = f"---\nname: {args.name}\ndescription: {about}\n---\n\nThe steps.\n"
    try:
        text = Path(args.file).expanduser().read_text("utf-8") if args.file else text
    except (OSError, UnicodeError) as error:
        raise UsageError(f"The file cannot be read: {error}.", where=args.file) from None
    given = {"action": "create", "name": args.name, "content": text, "category": args.category}
    with tool_errors_as_cli("hermes skills list"):
        file = home.skills / _manage(_context(home), given)["path"]
    tell(args, {"name": args.name, "path": str(file)}, f"{file} is there.")
    note(f"Try: hermes skills edit {args.name}")


def _edit(args: Args, home: Home) -> None:
    from hermes.cli.editor import edit
    from hermes.tools import skills as tools

    context = _context(home)
    skill = _skill(args, context)

    def check(draft: Path) -> None:
        with tool_errors_as_cli():
            tools._checked(context, skill.name, tools.Change(skill.path, "", draft.read_text("utf-8", "replace")))

    with tool_errors_as_cli():
        tools._own_folder(context, skill)
    saved = edit(skill.path, b"", check)
    tell(args, {"path": str(skill.path), "saved": saved}, "Saved." if saved else "Nothing was changed.")


def _remove(args: Args, home: Home) -> int:
    from hermes.tools.skills import _manage

    context = _context(home)
    skill = _skill(args, context)
    if not confirmed(args, f"Removing '{skill.name}'", f"{skill.path.parent} will be gone."):
        return 1
    with tool_errors_as_cli():
        _manage(context, {"action": "delete", "name": skill.name})
    tell(args, {"name": skill.name, "removed": True}, f"The skill '{skill.name}' is gone.")
    return 0


# ---- adding


def _add(args: Args, home: Home) -> int:
    from hermes.tools.skill_files import FILE

    context = _context(home)
    with _source(args.source, home) as folder:
        places = [path for depth in range(4) for path in sorted(folder.glob("*/" * depth + FILE))]
        found = [_scan(context, path.parent) for path in places if path.is_file() and not path.is_symlink()]
        if not found:
            raise NotFound(f"There is no {FILE} in it.", where=args.source)
        note(*map(mask(home), (line for scan in found for line in _told(scan))))
        _refuse_unfit(args, found)
        if not confirmed(args, f"Adding {counted(len(found), 'skill')}"):
            return 1
        added = {scan.name: str(_copied(context, scan, args.category)) for scan in found}
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


def _told(scan: Scan) -> Iterator[str]:
    yield f"{scan.name or scan.folder.name}: {counted(len(scan.files), 'file')}"
    yield from (f"  {file}  {size(count)}" for file, count in scan.files.items())
    yield from (f"  {file}  left out: no file of a skill" for file in scan.left_out)
    yield from (f"  fault: {fault}" for fault in scan.faults)
    yield from (f"  suspicious: {suspicion}" for suspicion in scan.suspicions or ["nothing was found"])


def _refuse_unfit(args: Args, found: list[Scan]) -> None:
    names = [scan.name for scan in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"Two of the skills are called '{twice}'.", hint="the folder of one of them")
    if faults := [fault for scan in found for fault in scan.faults]:
        raise UsageError(f"This is no skill as it should be: {faults[0]}", hint="a folder with sound ones only")
    if not args.force and (suspected := [scan.name for scan in found if scan.suspicions]):
        raise Refused(f"There is something suspicious in {', '.join(suspected)}.", hint="the same with --force")


def _copied(context: Any, scan: Scan, category: str | None) -> Path:
    from hermes.tools.skills import _new_place

    with locked(context.home.skills), tool_errors_as_cli(f"hermes skills remove {scan.name}"):
        target = _new_place(context, {"name": scan.name, "category": category}).parent
        draft = target.with_name(f".new-{os.urandom(6).hex()}")
        try:
            for file in scan.files:
                source = scan.folder / file
                write_private(draft / file, source.read_bytes(), executable=os.access(source, os.X_OK))
            os.rename(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


_ARGUMENTS: Arguments = YES | {
    "name": {"metavar": "NAME"},
    "source": {"metavar": "PATH_OR_GIT_URL", "help": "a folder, or the address of a repository"},
    "--category": {"metavar": "NAME", "help": "the category it is put into"},
    "--description": {"metavar": "TEXT", "help": "one line that says when to use it"},
    "--file": {"metavar": "PATH", "help": "a SKILL.md to begin with"},
    "--force": FLAG | {"help": "although something in it is suspicious"},
}
_ACTIONS: Actions = {
    "list": (_list, "the skills there are", ""),
    "show": (_show, "a skill's text and files", "name"),
    "new": (_new, "begin a skill", "name --category --description --file"),
    "edit": (_edit, "change its SKILL.md in $VISUAL or $EDITOR", "name"),
    "check": (_check, "whether a skill is in order, and nothing in it suspicious", "name"),
    "remove": (_remove, "remove a skill with its files", "name -y/--yes"),
    "add": (_add, "copy skills from a folder or repository; nothing is run", "source --category --force -y/--yes"),
}
add_arguments, run = command(_ACTIONS, _ARGUMENTS, "list")
