"""The tools `skills_list`, `skill_view` and `skill_manage`: ways of working kept for later, read and written as text."""

from __future__ import annotations

import difflib

from hermes.guards.injection import fenced
from hermes.services.skills import FILE, Skills, files_of, read_file
from hermes.tools.framework import approvals
from hermes.tools.framework.registry import Answer, Args, Prepared, ToolContext, ToolDef


def _skills(ctx: ToolContext) -> Skills:
    return Skills(ctx.settings, ctx.secrets, ctx.owner, ctx.session_key)


def _list(ctx: ToolContext, args: Args) -> Answer:
    skills, category = _skills(ctx).all(), args.get("category")
    return {
        "skills": [
            {"name": skill.name, "description": fenced(skill.description, "a skill"), "category": skill.category}
            for skill in skills
            if category is None or skill.category == category
        ],
        "categories": sorted({skill.category for skill in skills if skill.category}),
    }


def _view(ctx: ToolContext, args: Args) -> Answer:
    skill = _skills(ctx).get(args["name"])
    if (file_path := args.get("file_path")) is not None and file_path != FILE:
        content = fenced(read_file(skill, file_path), f"a file of the skill {skill.name}")
        return {"name": skill.name, "file_path": file_path, "content": content}
    return {
        "name": skill.name,
        "description": fenced(skill.description, "a skill"),
        "category": skill.category,
        "content": fenced(read_file(skill), f"the skill {skill.name}"),
        "files": files_of(skill),
    }


async def _prepare(ctx: ToolContext, args: Args) -> Prepared:
    """Say no before the call begins, or ask whoever has to say yes."""
    skills = _skills(ctx)

    def describe() -> str:
        change = skills.plan(args)
        place = change.path.relative_to(skills.root).as_posix()
        before, after = change.before.splitlines(), (change.text or "").splitlines()
        return "\n".join([f"{args['action']} {place}", *list(difflib.unified_diff(before, after, lineterm=""))[2:]])

    subject = await ctx.blocking(describe)
    wanted = ctx.settings.skills.write_approval
    await approvals.write(ctx, "skill", subject, wanted=wanted, reason="Changes of skills are to be approved.")
    return Prepared()


def _manage(ctx: ToolContext, args: Args) -> Answer:
    place = _skills(ctx).change(args).as_posix()
    note = "The index in view is the one of the session's beginning; skills_list shows the present one."
    return {"done": args["action"], "name": args["name"], "path": place, "note": note}


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
