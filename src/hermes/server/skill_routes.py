"""Skills: list, read, write and delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

from aiohttp import web
from msgspec import Meta, Struct

from hermes.core.errors import ServiceError
from hermes.core.json_types import JsonObject
from hermes.server.keys import caller_of
from hermes.server.models import SkillPatch, SkillRequest
from hermes.server.routes import SESSION_KEY_HEADER, route
from hermes.services.skills import FILE, Skills, files_of, read_file

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

T = TypeVar("T")
_SKILL = "/v1/skills/{skill_name}"
# code of the service: code of the API
_CODES = {"not_found": "skill_not_found", "path_refused": "skill_read_only", "too_large": "string_above_max_length"}


class SkillQuery(Struct, kw_only=True):
    file: Annotated[str, Meta(description="one of its files, such as `references/notes.md`")] | None = None


class SkillText(Struct, kw_only=True, tag_field="object", tag="hermes.skill"):
    """A skill with the text of its SKILL.md, or of the file that was asked for. `editable`: it is the caller's own."""

    name: str
    description: str
    category: str | None
    editable: bool
    file: str
    content: str
    files: list[str]


class SkillDeleted(Struct, kw_only=True, tag_field="object", tag="hermes.skill.deleted"):
    name: str
    deleted: bool = True


@route(f"GET {_SKILL}", "skill", "Get a skill", scope="any", headers=(SESSION_KEY_HEADER,), features="skill_texts")
async def get_skill(context: ServerContext, request: web.Request, query: SkillQuery) -> SkillText:
    return await skill_text(context, request, request.match_info["skill_name"], query.file)


@route(
    "POST /v1/skills",
    "skill_create",
    "Write a skill",
    scope="sessions:write",
    headers=(SESSION_KEY_HEADER,),
    example={"name": "tea", "content": "---\nname: tea\ndescription: How tea is made here.\n---\n\nWater first.\n"},
    status=201,
    link=("skill_name", "/name"),
)
async def create_skill(context: ServerContext, request: web.Request, body: SkillRequest) -> SkillText:
    skills = _skills(context, request)
    action = {"action": "create", "name": body.name, "content": body.content, "category": body.category}
    await _blocking(context, lambda: skills.change(action))
    return await skill_text(context, request, body.name, None)


@route(
    f"PATCH {_SKILL}",
    "skill_update",
    "Change the text of a skill or of one of its files",
    scope="sessions:write",
    headers=(SESSION_KEY_HEADER,),
    example={"content": "Water first, then leaves.", "file": "references/notes.md"},
)
async def change_skill(context: ServerContext, request: web.Request, body: SkillPatch) -> SkillText:
    """A file that is not there is made."""
    skills, name = _skills(context, request), request.match_info["skill_name"]
    action: JsonObject = {"action": "edit", "name": name, "content": body.content}
    if body.file not in (None, FILE):
        action = {"action": "write_file", "name": name, "file_path": body.file, "file_content": body.content}
    await _blocking(context, lambda: skills.change(action))
    return await skill_text(context, request, name, body.file)


@route(
    f"DELETE {_SKILL}",
    "skill_delete",
    "Delete a skill, or one of its files",
    scope="sessions:write",
    headers=(SESSION_KEY_HEADER,),
)
async def delete_skill(context: ServerContext, request: web.Request, query: SkillQuery) -> SkillDeleted:
    skills, name = _skills(context, request), request.match_info["skill_name"]
    action = {"action": "delete", "name": name}
    if query.file is not None:
        action = {"action": "remove_file", "name": name, "file_path": query.file}
    await _blocking(context, lambda: skills.change(action))
    return SkillDeleted(name=name)


def _skills(context: ServerContext, request: web.Request) -> Skills:
    return Skills(context.settings, context.secrets, caller_of(request).owner, context.session_key(request))


async def skill_text(context: ServerContext, request: web.Request, name: str, file: str | None) -> SkillText:
    skills = _skills(context, request)

    def work() -> SkillText:
        skill = skills.get(name)
        return SkillText(
            name=skill.name,
            description=skill.description,
            category=skill.category,
            editable=skills.is_own(skill),
            file=file or FILE,
            content=context.secrets.mask(read_file(skill, file or FILE)),
            files=files_of(skill),
        )

    return await _blocking(context, work)


async def _blocking(context: ServerContext, work: Callable[[], T]) -> T:
    """Service errors are raised without their hints, which are for a model."""
    try:
        result: T = await context.app.services.files.call(work)
        return result
    except ServiceError as error:
        field = error.field or ("content" if error.code in ("injection_suspected", "contains_secret") else None)
        raise ServiceError(error.message, _CODES.get(error.code, error.code), field=field) from None
