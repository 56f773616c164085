"""The tools `skills_list`, `skill_view` and `skill_manage`: ways of working kept for later, read and written as text."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hermes.core.home import locked, write_private
from hermes.core.limits import (
    SKILL_ABOUT_CHARS_MAX,
    SKILL_CHARS_MAX,
    SKILL_FILE_BYTES_MAX,
    SKILL_FILES_LISTED_MAX,
    SKILL_NAME_CHARS_MAX,
)
from hermes.guards.injection import fenced, suspicious
from hermes.guards.paths import PathRefused, read_inside
from hermes.tools.framework.registry import Answer, Args, Prepared, ToolContext, ToolDef, ToolError
from hermes.tools.skill_files import FILE, SCOPES, Skill, find_skills, front_matter, skills_root

FOLDERS = ("references", "templates", "scripts", "assets")
_NAME = re.compile(rf"(?!-)[a-z0-9-]{{1,{SKILL_NAME_CHARS_MAX}}}")
# A name in a skill's folders: nothing hidden, nothing that leads elsewhere.
_PART = re.compile(r"(?!\.)[^\x00-\x1f\x7f/\\]{1,100}")
_DEPTH_MAX = 6
_SKILL = "---\nname: the-name\ndescription: One line that says when to use it.\n---\n\nThe steps."


# --- looking ---------------------------------------------------------------------------------------------------------


def _found(ctx: ToolContext) -> list[Skill]:
    return find_skills(ctx.settings, ctx.owner, ctx.session_key)


def _root(ctx: ToolContext) -> Path:
    """Where the session's own skills lie; all others are read-only to it."""
    return skills_root(ctx.home, ctx.owner, ctx.session_key)


def _list(ctx: ToolContext, args: Args) -> Answer:
    found, wanted = _found(ctx), args.get("category")
    chosen = [skill for skill in found if wanted is None or skill.category == wanted]
    told = [{"name": s.name, "description": fenced(s.description, "a skill"), "category": s.category} for s in chosen]
    return {"skills": told, "categories": sorted({skill.category for skill in found if skill.category})}


def _view(ctx: ToolContext, args: Args) -> Answer:
    skill = _skill(ctx, args["name"])
    if (inner := args.get("file_path")) is not None and inner != FILE:
        text = _text(skill, _parts(inner))
        return {"name": skill.name, "file_path": inner, "content": fenced(text, f"a file of the skill {skill.name}")}
    told = {"name": skill.name, "description": fenced(skill.description, "a skill"), "category": skill.category}
    content = fenced(_text(skill, (FILE,)), f"the skill {skill.name}")
    return {**told, "content": content, "files": _files(skill.path.parent)}


def _skill(ctx: ToolContext, name: str) -> Skill:
    found = {skill.name: skill for skill in _found(ctx)}
    if name not in found:
        near = difflib.get_close_matches(name, found, n=5)
        hint = f"Near names: {', '.join(near)}." if near else "skills_list shows all there are."
        raise ToolError(f"There is no skill {name[:80]!r}.", "not_found", hint)
    return found[name]


def _files(folder: Path) -> list[str]:
    """The files that a skill brings along, as they are asked for."""
    found = [path for name in FOLDERS for path in sorted((folder / name).rglob("*")) if path.is_file()]
    return [path.relative_to(folder).as_posix() for path in found][:SKILL_FILES_LISTED_MAX]


def _parts(text: str) -> tuple[str, ...]:
    """The names that a path in a skill is made of; one that could lead anywhere else is refused."""
    parts = tuple(text.split("/"))
    fits = 2 <= len(parts) <= _DEPTH_MAX and parts[0] in FOLDERS and all(map(_PART.fullmatch, parts))
    if not fits or any(part.upper() == FILE.upper() for part in parts):
        hint = f"It is a relative path below {', '.join(FOLDERS)}, such as references/notes.md."
        raise ToolError("The file path is not one of a skill.", "path_refused", hint)
    return parts


def _text(skill: Skill, parts: tuple[str, ...]) -> str:
    folder, name = skill.path.parent, "/".join(parts)
    path = folder.joinpath(*parts)
    try:
        data = read_inside(path, folder, SKILL_FILE_BYTES_MAX + 1)
    except PathRefused as refused:
        why = "it is a link that leads out of the skill." if refused.rule == "outside_root" else refused
        raise ToolError(f"{name}: {why}", "path_refused", "Tell the user.", rule=refused.rule) from None
    except OSError:
        listed = ", ".join(_files(folder)[:20])
        hint = f"Its files: {listed}." if listed else f"It has no files but {FILE}."
        raise ToolError(f"The skill {skill.name} has no readable file {name}.", "not_found", hint) from None
    if len(data) > SKILL_FILE_BYTES_MAX:
        hint = "Look at it with a command, if it is needed."
        raise ToolError(f"{name} has more than {SKILL_FILE_BYTES_MAX} bytes.", "too_large", hint)
    if b"\0" in data:
        raise ToolError(f"{name} is no text.", "binary_file", "It can be used by commands, not read.", path=str(path))
    return data.decode("utf-8", "replace")


# --- changing --------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """What becomes of a file, or of a whole skill. No text: it goes."""

    path: Path
    before: str
    text: str | None


async def _prepare(ctx: ToolContext, args: Args) -> Prepared:
    """Say no before the call begins, or ask whoever has to say yes."""
    change: Change = await ctx.blocking(partial(_planned, ctx, args))
    from hermes.tools.framework.approvals import write

    subject = await ctx.blocking(partial(_told, ctx, args, change))
    wanted = ctx.settings.skills.write_approval
    await write(ctx, "skill", subject, wanted=wanted, reason="Changes of skills are to be approved.")
    return Prepared()


def _told(ctx: ToolContext, args: Args, change: Change) -> str:
    place = change.path.relative_to(_root(ctx)).as_posix()
    before, after = change.before.splitlines(), (change.text or "").splitlines()
    return "\n".join([f"{args['action']} {place}", *list(difflib.unified_diff(before, after, lineterm=""))[2:]])


def _manage(ctx: ToolContext, args: Args) -> Answer:
    root = _root(ctx)
    with locked(root):
        change = _planned(ctx, args)
        if change.text is not None:
            write_private(change.path, change.text)
        elif args["action"] == "delete":
            gone = root / f".gone-{os.urandom(6).hex()}"
            os.rename(change.path, gone)
            shutil.rmtree(gone)
            _tidy(change.path.parent, root)
        else:
            change.path.unlink()
            _tidy(change.path.parent, root)
    place = change.path.relative_to(root).as_posix()
    note = "The index in view is the one of the session's beginning; skills_list shows the present one."
    return {"done": args["action"], "name": args["name"], "path": place, "note": note}


def _tidy(folder: Path, root: Path) -> None:
    """Take away folders that are empty now."""
    with contextlib.suppress(OSError):
        while folder != root:
            folder.rmdir()
            folder = folder.parent


def _planned(ctx: ToolContext, args: Args) -> Change:
    """What a call changes, checked whole; nothing is written."""
    action, name = args["action"], args["name"]
    if not _NAME.fullmatch(name) or name == SCOPES:
        hint = f"Up to {SKILL_NAME_CHARS_MAX} small letters, digits and hyphens, the first no hyphen."
        raise ToolError("That is no name for a skill.", "invalid_arguments", hint)
    if action == "create":
        return _checked(ctx, name, Change(_new_place(ctx, args), "", _given(args, "content")))
    skill = _skill(ctx, name)
    folder = _own_folder(ctx, skill)
    if action == "delete":
        return Change(folder, "", None)
    whole = action == "edit" or (action == "patch" and args.get("file_path") in (None, FILE))
    parts = (FILE,) if whole else _parts(_given(args, "file_path"))
    place = folder.joinpath(*parts)
    if os.path.realpath(place) != os.path.join(os.path.realpath(folder), *parts):
        raise ToolError(f"{'/'.join(parts)} is a link, or lies behind one.", "path_refused", "Tell the user.")
    if action == "remove_file" and place.is_file():
        return Change(place, "", None)
    before = ""
    with contextlib.suppress(ToolError) if action == "write_file" else contextlib.nullcontext():
        before = _text(skill, parts)
    if action == "patch":
        return _checked(ctx, name, Change(place, before, _patched(before, args)))
    return _checked(ctx, name, Change(place, before, _given(args, "content" if whole else "file_content")))


def _given(args: Args, field: str) -> str:
    value = args.get(field)
    if value is None:
        raise ToolError(f"`{field}` is needed to {args['action']}.", "invalid_arguments", "Call again with it.")
    return str(value)


def _new_place(ctx: ToolContext, args: Args) -> Path:
    name, category, root = args["name"], args.get("category"), _root(ctx)
    if category is not None and (not _NAME.fullmatch(category) or category == SCOPES):
        hint = "Small letters, digits and hyphens, as in a skill's name."
        raise ToolError("That is no name for a category.", "invalid_arguments", hint)
    folder: Path = root / category if category else root
    taken = any(skill.name == name for skill in _found(ctx)) or os.path.lexists(folder / name)
    if taken or os.path.lexists(root / (category or name) / FILE):
        hint = "Change the one there is with edit or patch, or take another name."
        raise ToolError(f"There is a skill or a category of that name already: {name}.", "invalid_arguments", hint)
    if folder.is_symlink():
        raise ToolError("The category is a link to somewhere else.", "path_refused", "Take another category.")
    return folder / str(name) / FILE


def _own_folder(ctx: ToolContext, skill: Skill) -> Path:
    root, folder = _root(ctx), skill.path.parent
    real = Path(os.path.realpath(folder))
    if not folder.is_relative_to(root) or real != Path(os.path.realpath(root)) / folder.relative_to(root):
        hint = "Create a skill of another name, or tell the user."
        raise ToolError(f"The skill {skill.name} lies elsewhere and is read-only.", "path_refused", hint)
    return folder


def _patched(before: str, args: Args) -> str:
    old, new = _given(args, "old_string"), _given(args, "new_string")
    count = before.count(old) if old else 0
    if not count:
        raise ToolError("`old_string` is not in the text.", "no_match", "View the file and copy the place exactly.")
    if count > 1 and not args.get("replace_all"):
        hint = "Take more of the text around it, or set replace_all."
        raise ToolError(f"`old_string` is in the text {count} times.", "ambiguous_match", hint)
    return before.replace(old, new)


def _checked(ctx: ToolContext, name: str, change: Change) -> Change:
    text = change.text or ""
    if change.path.name == FILE:
        told, about = front_matter(text)
        if len(text) > SKILL_CHARS_MAX:
            hint = "Move the details into files below references/."
            raise ToolError(f"{FILE} has at most {SKILL_CHARS_MAX} characters.", "too_large", hint)
        if told != name or not 0 < len(about) <= SKILL_ABOUT_CHARS_MAX:
            fault = (
                f"{FILE} begins with its name, {name}, and a description of at most {SKILL_ABOUT_CHARS_MAX} characters."
            )
            raise ToolError(fault, "invalid_arguments", f"For example:\n{_SKILL.replace('the-name', name)}")
    elif len(text.encode()) > SKILL_FILE_BYTES_MAX:
        raise ToolError(f"A file has at most {SKILL_FILE_BYTES_MAX} bytes.", "too_large", "Write it in several files.")
    if ctx.secrets.mask(text) != text:
        raise ToolError("That holds a secret.", "contains_secret", "Say where to find the secret instead.")
    if why := suspicious(text):
        raise ToolError(f"That cannot be kept: {why}.", "injection_suspected", "Say it as plain advice.")
    return change


# --- the tools -------------------------------------------------------------------------------------------------------

_SCOPE = frozenset({"skills"})
_TEXT = {"type": "string"}

LIST = ToolDef(
    name="skills_list",
    toolset="skills",
    description="List the skills there are, all or of one category, with what each is for.",
    parameters={"type": "object", "properties": {"category": _TEXT}, "additionalProperties": False},
    run=_list,
    effect="read",
    scope=lambda _: _SCOPE,
    preview=lambda args: args.get("category") or "all",
)

VIEW = ToolDef(
    name="skill_view",
    toolset="skills",
    description="Read a skill, or with file_path one of its files. Nothing in it is carried out by reading it.",
    parameters={
        "type": "object",
        "properties": {"name": _TEXT, "file_path": {**_TEXT, "description": "One of `files`."}},
        "required": ["name"],
        "additionalProperties": False,
    },
    run=_view,
    effect="read",
    scope=lambda _: _SCOPE,
    preview=lambda args: "/".join(filter(None, (args["name"], args.get("file_path")))),
)

MANAGE = ToolDef(
    name="skill_manage",
    toolset="skills",
    description=(
        "Keep a way of working that proved good as a skill, or improve one. create and edit take the whole SKILL.md as "
        "`content`; patch replaces old_string by new_string in it or in a file; write_file and remove_file are for files "
        "below references/, templates/, scripts/ and assets/; delete removes the skill."
    ),
    parameters={
        "type": "object",
        "properties": {
            "action": {
                "type": "string",
                "enum": ["create", "patch", "edit", "delete", "write_file", "remove_file"],
            },
            "name": {**_TEXT, "description": "Small letters, digits and hyphens."},
            "content": {**_TEXT, "description": "Markdown after a head with `name` and `description`."},
            "old_string": _TEXT,
            "new_string": _TEXT,
            "replace_all": {"type": "boolean"},
            "category": {**_TEXT, "description": "Where create puts it."},
            "file_path": {**_TEXT, "description": "Such as references/notes.md."},
            "file_content": _TEXT,
        },
        "required": ["action", "name"],
        "additionalProperties": False,
    },
    run=_manage,
    scope=lambda _: _SCOPE,
    preview=lambda args: " ".join(filter(None, (args["action"], args["name"], args.get("file_path")))),
    prepare=_prepare,
)

TOOLS = (LIST, VIEW, MANAGE)
