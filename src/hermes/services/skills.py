"""Skills: a folder each, with a SKILL.md that says what it is for. Finding, reading, changing and checking them.
Blocks."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hermes.core import limits
from hermes.core.errors import ServiceError
from hermes.core.home import locked, write_private
from hermes.core.ids import scope_name
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.guards.injection import suspicious
from hermes.guards.paths import PathRefused, read_inside

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.guards.secrets import Secrets
    from hermes.settings.config import Settings

FILE = "SKILL.md"
SCOPES = "scopes"
FOLDERS = ("references", "templates", "scripts", "assets")
_FENCE = "---"
_NAME = re.compile(rf"(?!-)[a-z0-9-]{{1,{limits.SKILL_NAME_CHARS_MAX}}}")
# A name in a skill's folders: nothing hidden, nothing that leads elsewhere.
_PART = re.compile(r"(?!\.)[^\x00-\x1f\x7f/\\]{1,100}")
_DEPTH_MAX = 6
_FILES_MAX = 500
_EXAMPLE = "---\nname: the-name\ndescription: One line that says when to use it.\n---\n\nThe steps."


class Skill(NamedTuple):
    """Without a category it is in the root folder."""

    name: str
    description: str
    category: str | None
    path: Path


def skills_root(home: Home, owner: str, session_key: str | None) -> Path:
    """A scope's own skills, as with memory: the profile's folder, or one per owner and session key."""
    if owner == "default" and session_key is None:
        return home.skills
    return home.skills / SCOPES / scope_name(owner, session_key)


def find_skills(settings: Settings, owner: str = "default", session_key: str | None = None) -> list[Skill]:
    """A scope's own skills, the home's shared ones, and those of configured folders; the first of a name wins."""
    shared = settings.home.skills
    external = (Path(folder).expanduser() for folder in settings.skills.external_dirs)
    skills: dict[str, Skill] = {}
    for root in dict.fromkeys((skills_root(settings.home, owner, session_key), shared, *external)):
        for path in sorted((*root.glob(f"*/{FILE}"), *root.glob(f"*/*/{FILE}"))):
            if root == shared and path.is_relative_to(shared / SCOPES):
                continue
            if skill := _skill(path, root):
                skills.setdefault(skill.name, skill)
    return sorted(skills.values(), key=lambda skill: (skill.category or "", skill.name))


def _skill(path: Path, root: Path) -> Skill | None:
    try:
        stamp = path.stat()
        name, description = _head(path, stamp.st_mtime_ns, stamp.st_size)
    except (OSError, PathRefused):
        return None
    folders = path.relative_to(root).parts[:-1]
    return Skill(name or folders[-1], description, folders[0] if len(folders) > 1 else None, path)


@lru_cache(maxsize=1024)
def _head(path: Path, mtime_ns: int, size: int) -> tuple[str, str]:
    """Name and description from the head of a file; cached until the file changes."""
    return front_matter(skill_text(path)[: limits.SKILL_CHARS_MAX])


def skill_text(path: Path) -> str:
    """Raises PathRefused for a path that leads out of the skill's folder, or OSError."""
    return read_inside(path, path.parent, limits.SKILL_FILE_BYTES_MAX).decode("utf-8", "replace")


def front_matter(text: str) -> tuple[str, str]:
    """The name and description at the start of a skill's text; empty where missing."""
    before, fence, rest = text.partition(f"{_FENCE}\n")
    head, end, _ = rest.partition(f"\n{_FENCE}")
    fields = _fields(head) if fence and end and not before.strip("\ufeff \n") else {}
    # Only plain values: nested YAML aliases could expand without end.
    plain = {name: str(value) for name, value in fields.items() if isinstance(value, str | int | float)}
    name, description = (" ".join(plain.get(field, "").split()) for field in ("name", "description"))
    return name, description


def _fields(head: str) -> JsonObject:
    import yaml

    try:
        fields = yaml.safe_load(head)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def files_of(skill: Skill) -> list[str]:
    """The paths of a skill's files."""
    folder = skill.path.parent
    paths = [path for name in FOLDERS for path in sorted((folder / name).rglob("*")) if path.is_file()]
    return [path.relative_to(folder).as_posix() for path in paths][: limits.SKILL_FILES_LISTED_MAX]


def read_file(skill: Skill, file_path: str = FILE) -> str:
    parts = (FILE,) if file_path == FILE else _parts(file_path)
    folder = skill.path.parent
    path = folder.joinpath(*parts)
    try:
        data = read_inside(path, folder, limits.SKILL_FILE_BYTES_MAX + 1)
    except PathRefused as refused:
        why = "it is a link that leads out of the skill." if refused.rule == "outside_root" else refused
        raise ServiceError(f"{file_path}: {why}", "path_refused", "Tell the user.", rule=refused.rule) from None
    except OSError:
        names = ", ".join(files_of(skill)[:20])
        hint = f"Its files: {names}." if names else f"It has no files but {FILE}."
        raise ServiceError(f"The skill {skill.name} has no readable file {file_path}.", "not_found", hint) from None
    if len(data) > limits.SKILL_FILE_BYTES_MAX:
        hint = "Look at it with a command, if it is needed."
        raise ServiceError(f"{file_path} has more than {limits.SKILL_FILE_BYTES_MAX} bytes.", "too_large", hint)
    if b"\0" in data:
        hint = "It can be used by commands, not read."
        raise ServiceError(f"{file_path} is no text.", "binary_file", hint, path=str(path))
    return data.decode("utf-8", "replace")


def _parts(file_path: str) -> tuple[str, ...]:
    """The parts of a path in a skill; refused where it could lead anywhere else."""
    parts = tuple(file_path.split("/"))
    fits = 2 <= len(parts) <= _DEPTH_MAX and parts[0] in FOLDERS and all(map(_PART.fullmatch, parts))
    if not fits or any(part.upper() == FILE.upper() for part in parts):
        hint = f"It is a relative path below {', '.join(FOLDERS)}, such as references/notes.md."
        raise ServiceError("The file path is not one of a skill.", "path_refused", hint)
    return parts


# --- changing --------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A change of a file, or of a whole skill. Without text it is deleted."""

    path: Path
    before: str
    text: str | None


class Scan(NamedTuple):
    """A folder with a skill: its files with sizes, those left out, faults and suspicious findings."""

    folder: Path
    name: str
    files: dict[str, int]
    left_out: list[str]
    faults: list[str]
    suspicions: list[str]


class Skills:
    """The skills that an owner and session key see, and changes to their own; all others are read-only."""

    def __init__(
        self, settings: Settings, secrets: Secrets, owner: str = "default", session_key: str | None = None
    ) -> None:
        self._settings, self._secrets, self._owner, self._session_key = settings, secrets, owner, session_key
        self.root = skills_root(settings.home, owner, session_key)

    def all(self) -> list[Skill]:
        return find_skills(self._settings, self._owner, self._session_key)

    def get(self, name: str) -> Skill:
        skills = {skill.name: skill for skill in self.all()}
        if name not in skills:
            near = difflib.get_close_matches(name, skills, n=5)
            hint = f"Near names: {', '.join(near)}." if near else "skills_list shows all there are."
            raise ServiceError(f"There is no skill {name[:80]!r}.", "not_found", hint)
        return skills[name]

    def is_own(self, skill: Skill) -> bool:
        """Whether it is in the scope's own folder, and behind no link."""
        folder, root = skill.path.parent, Path(os.path.realpath(self.root))
        return folder.is_relative_to(self.root) and Path(os.path.realpath(folder)) == root / folder.relative_to(
            self.root
        )

    def own_folder(self, skill: Skill) -> Path:
        folder = skill.path.parent
        if not self.is_own(skill):
            hint = "Create a skill of another name, or tell the user."
            raise ServiceError(f"The skill {skill.name} lies elsewhere and is read-only.", "path_refused", hint)
        return folder

    def change(self, args: JsonMapping) -> Path:
        """Execute an action of the tool `skill_manage`. The path that was written or removed, relative to the root."""
        with locked(self.root):
            change = self.plan(args)
            if change.text is not None:
                write_private(change.path, change.text)
            else:
                if args["action"] == "delete":
                    trash = self.root / f".gone-{os.urandom(6).hex()}"
                    os.rename(change.path, trash)
                    shutil.rmtree(trash)
                else:
                    change.path.unlink()
                folder = change.path.parent
                with contextlib.suppress(OSError):  # remove folders that are empty now
                    while folder != self.root:
                        folder.rmdir()
                        folder = folder.parent
        return change.path.relative_to(self.root)

    def plan(self, args: JsonMapping) -> Change:
        """Validate an action fully; nothing is written."""
        action, name = args["action"], args["name"]
        if not _NAME.fullmatch(name) or name == SCOPES:
            hint = f"Up to {limits.SKILL_NAME_CHARS_MAX} small letters, digits and hyphens, the first no hyphen."
            raise ServiceError("That is no name for a skill.", "invalid_arguments", hint)
        if action == "create":
            path = self._new_path(name, args.get("category"))
            return self.check(name, Change(path, "", _required(args, "content")))
        skill = self.get(name)
        folder = self.own_folder(skill)
        if action == "delete":
            return Change(folder, "", None)
        whole = action == "edit" or (action == "patch" and args.get("file_path") in (None, FILE))
        file_path = FILE if whole else "/".join(_parts(_required(args, "file_path")))
        path = folder / file_path
        if os.path.realpath(path) != os.path.join(os.path.realpath(folder), file_path):
            raise ServiceError(f"{file_path} is a link, or lies behind one.", "path_refused", "Tell the user.")
        if action == "remove_file" and path.is_file():
            return Change(path, "", None)
        before = ""
        with contextlib.suppress(ServiceError) if action == "write_file" else contextlib.nullcontext():
            before = read_file(skill, file_path)
        if action == "patch":
            return self.check(name, Change(path, before, _patch(before, args)))
        return self.check(name, Change(path, before, _required(args, "content" if whole else "file_content")))

    def _new_path(self, name: str, category: str | None) -> Path:
        if category is not None and (not _NAME.fullmatch(category) or category == SCOPES):
            hint = "Small letters, digits and hyphens, as in a skill's name."
            raise ServiceError("That is no name for a category.", "invalid_arguments", hint)
        folder = self.root / category if category else self.root
        exists = any(skill.name == name for skill in self.all()) or os.path.lexists(folder / name)
        if exists or os.path.lexists(self.root / (category or name) / FILE):
            hint = "Change the one there is with edit or patch, or take another name."
            message = f"There is a skill or a category of that name already: {name}."
            raise ServiceError(message, "invalid_arguments", hint)
        if folder.is_symlink():
            raise ServiceError("The category is a link to somewhere else.", "path_refused", "Take another category.")
        return folder / name / FILE

    def check(self, name: str, change: Change) -> Change:
        """Refuse a text that may not be stored in the skill."""
        text = change.text or ""
        if change.path.name == FILE:
            own_name, description = front_matter(text)
            if len(text) > limits.SKILL_CHARS_MAX:
                hint = "Move the details into files below references/."
                raise ServiceError(f"{FILE} has at most {limits.SKILL_CHARS_MAX} characters.", "too_large", hint)
            if own_name != name or not 0 < len(description) <= limits.SKILL_ABOUT_CHARS_MAX:
                most = limits.SKILL_ABOUT_CHARS_MAX
                message = f"{FILE} begins with its name, {name}, and a description of at most {most} characters."
                hint = f"For example:\n{_EXAMPLE.replace('the-name', name)}"
                raise ServiceError(message, "invalid_arguments", hint)
        elif len(text.encode()) > limits.SKILL_FILE_BYTES_MAX:
            message = f"A file has at most {limits.SKILL_FILE_BYTES_MAX} bytes."
            raise ServiceError(message, "too_large", "Write it in several files.")
        if self._secrets.mask(text) != text:
            raise ServiceError("That holds a secret.", "contains_secret", "Say where to find the secret instead.")
        if why := suspicious(text):
            raise ServiceError(f"That cannot be kept: {why}.", "injection_suspected", "Say it as plain advice.")
        return change

    def scan(self, folder: Path) -> Scan:
        """Read a skill in any folder as the tools would. Nothing in it is run."""
        name = front_matter((folder / FILE).read_text("utf-8", "replace"))[0]
        scan = Scan(folder, name, {}, [], [], [])
        if not _NAME.fullmatch(name):
            scan.faults.append(f"{FILE}: its head does not name it in small letters, digits and hyphens.")
        for path in (path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()):
            file = path.relative_to(folder).as_posix()
            try:
                fits = not path.is_symlink() and (file == FILE or bool(_parts(file)))
            except ServiceError:
                fits = False
            if not fits:
                scan.left_out.append(file)
                continue
            scan.files[file] = path.stat().st_size
            try:
                self.check(name, Change(path, "", read_file(Skill(name, "", None, folder / FILE), file)))
            except ServiceError as error:
                if error.code != "binary_file":
                    is_suspicion = error.code in ("injection_suspected", "contains_secret")
                    (scan.suspicions if is_suspicion else scan.faults).append(f"{file}: {error}")
        if len(scan.files) > _FILES_MAX:
            scan.faults.append(f"It has {len(scan.files)} files; at most {_FILES_MAX} are possible.")
        return scan

    def add(self, scan: Scan, category: str | None) -> Path:
        """Copy a scanned skill into the home; its folder there."""
        with locked(self.root):
            target = self._new_path(scan.name, category).parent
            draft = target.with_name(f".new-{os.urandom(6).hex()}")
            try:
                for file in scan.files:
                    source = scan.folder / file
                    write_private(draft / file, source.read_bytes(), executable=os.access(source, os.X_OK))
                os.rename(draft, target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return target


def _required(args: JsonMapping, field: str) -> str:
    value = args.get(field)
    if value is None:
        raise ServiceError(f"`{field}` is needed to {args['action']}.", "invalid_arguments", "Call again with it.")
    return str(value)


def _patch(before: str, args: JsonMapping) -> str:
    old, new = _required(args, "old_string"), _required(args, "new_string")
    count = before.count(old) if old else 0
    if not count:
        raise ServiceError("`old_string` is not in the text.", "no_match", "View the file and copy the place exactly.")
    if count > 1 and not args.get("replace_all"):
        hint = "Take more of the text around it, or set replace_all."
        raise ServiceError(f"`old_string` is in the text {count} times.", "ambiguous_match", hint)
    return before.replace(old, new)
