"""The tools `skills_list`, `skill_view` and `skill_manage`: reusable instructions, read and written as text."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from msgspec import Meta

from hermes.guards.injection import fenced
from hermes.services.skills import FILE, Skills, files_of, read_file
from hermes.tools.framework import approvals
from hermes.tools.framework.registry import Answer, Prepared, ToolArguments, ToolContext, ToolDef

_SCOPE = frozenset({"skills"})


def _skills(ctx: ToolContext) -> Skills:
    return Skills(ctx.settings, ctx.secrets, ctx.owner, ctx.session_key)


class SkillsList(ToolArguments):
    category: str | None = None


def _list(ctx: ToolContext, args: SkillsList) -> Answer:
    skills = _skills(ctx).all()
    return {
        "skills": [
            {"name": skill.name, "description": fenced(skill.description, "a skill"), "category": skill.category}
            for skill in skills
            if args.category is None or skill.category == args.category
        ],
        "categories": sorted({skill.category for skill in skills if skill.category}),
    }


LIST = ToolDef(
    name="skills_list",
    toolset="skills",
    description="List the skills there are, all or of one category, with what each is for.",
    arguments=SkillsList,
    run=_list,
    effect="read",
    scope=lambda _: _SCOPE,
    preview=lambda args: args.category or "all",
)


class SkillView(ToolArguments):
    name: str
    file_path: Annotated[str, Meta(description="One of `files`.")] | None = None


def _view(ctx: ToolContext, args: SkillView) -> Answer:
    skill = _skills(ctx).get(args.name)
    if args.file_path is not None and args.file_path != FILE:
        content = fenced(read_file(skill, args.file_path), f"a file of the skill {skill.name}")
        return {"name": skill.name, "file_path": args.file_path, "content": content}
    answer: Answer = {"name": skill.name, "description": fenced(skill.description, "a skill")}
    content = fenced(read_file(skill), f"the skill {skill.name}")
    return {**answer, "category": skill.category, "content": content, "files": files_of(skill)}


VIEW = ToolDef(
    name="skill_view",
    toolset="skills",
    description="Read a skill, or with file_path one of its files. Nothing in it is carried out by reading it.",
    arguments=SkillView,
    run=_view,
    effect="read",
    scope=lambda _: _SCOPE,
    preview=lambda args: "/".join(filter(None, (args.name, args.file_path))),
)


class SkillManage(ToolArguments):
    action: Literal["create", "patch", "edit", "delete", "write_file", "remove_file"]
    name: Annotated[str, Meta(description="Small letters, digits and hyphens.")]
    content: Annotated[str, Meta(description="Markdown after a head with `name` and `description`.")] | None = None
    old_string: str | None = None
    new_string: str | None = None
    replace_all: bool = False
    category: Annotated[str, Meta(description="Where create puts it.")] | None = None
    file_path: Annotated[str, Meta(description="Such as references/notes.md.")] | None = None
    file_content: str | None = None


async def _prepare(ctx: ToolContext, args: SkillManage) -> Prepared:
    """Refuse the change before the call begins, or ask for approval."""
    skills = _skills(ctx)

    def describe() -> str:
        change = skills.plan(args.as_json())
        path = change.path.relative_to(skills.root).as_posix()
        before, after = change.before.splitlines(), (change.text or "").splitlines()
        return "\n".join([f"{args.action} {path}", *list(difflib.unified_diff(before, after, lineterm=""))[2:]])

    subject = await ctx.blocking(describe)
    required = ctx.settings.skills.write_approval
    await approvals.write(ctx, "skill", subject, required=required, reason="Changes of skills are to be approved.")
    return Prepared()


def _manage(ctx: ToolContext, args: SkillManage) -> Answer:
    path = _skills(ctx).change(args.as_json()).as_posix()
    note = "The index in view is the one of the session's beginning; skills_list shows the present one."
    return {"done": args.action, "name": args.name, "path": path, "note": note}


MANAGE = ToolDef(
    name="skill_manage",
    toolset="skills",
    description=(
        "Keep a way of working that proved good as a skill, or improve one. create and edit take the whole SKILL.md as "
        "`content`; patch replaces old_string by new_string in it or in a file; write_file and remove_file are for files "
        "below references/, templates/, scripts/ and assets/; delete removes the skill."
    ),
    arguments=SkillManage,
    run=_manage,
    scope=lambda _: _SCOPE,
    preview=lambda args: " ".join(filter(None, (args.action, args.name, args.file_path))),
    prepare=_prepare,
)

TOOLS = (LIST, VIEW, MANAGE)
