"""Memory: the entries that every session of a caller sees, read and changed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, get_args

from aiohttp import web
from msgspec import Struct, structs

from hermes.server.errors import ApiError
from hermes.server.keys import caller_of
from hermes.server.models import MemoryPatch
from hermes.server.routes import SESSION_KEY_HEADER, route
from hermes.services.memory import FILES, MemoryFile, Target, memory_file

if TYPE_CHECKING:
    from hermes.server.context import ServerContext


class MemoryEntries(Struct, kw_only=True):
    """The entries of one file of memory; `enabled`: turns are shown them."""

    entries: list[str]
    chars: int
    limit: int
    enabled: bool


class Memory(Struct, kw_only=True, tag_field="object", tag="hermes.memory"):
    """`user`: who the user is; `memory`: everything else."""

    memory: MemoryEntries
    user: MemoryEntries


@route(
    "GET /api/memory",
    "memory",
    "Read memory",
    scope="sessions:read",
    headers=(SESSION_KEY_HEADER,),
    features="memory_api",
)
async def memory(context: ServerContext, request: web.Request) -> Memory:
    files = {target: _file(context, request, target) for target in FILES}
    blocking = context.app.services.files.call
    return Memory(
        **{target: _shown(context, target, file, await blocking(file.entries)) for target, file in files.items()}
    )


@route(
    "PATCH /api/memory/{memory_target}",
    "memory_update",
    "Change memory",
    scope="sessions:write",
    headers=(SESSION_KEY_HEADER,),
    example={"operations": [{"action": "add", "content": "The garden is watered at six."}]},
)
async def change_memory(context: ServerContext, request: web.Request, body: MemoryPatch) -> MemoryEntries:
    """All operations or none."""
    target: Target | None = next((one for one in get_args(Target) if one == request.match_info["memory_target"]), None)
    if target is None:
        raise ApiError(404, f"There is no memory of that name; there are {' and '.join(FILES)}.", "not_found")
    file = _file(context, request, target)
    operations = [structs.asdict(operation) for operation in body.operations]
    entries = await context.app.services.files.call(partial(file.change, operations, context.secrets))
    return _shown(context, target, file, entries)


def _file(context: ServerContext, request: web.Request, target: Target) -> MemoryFile:
    app, session_key = context.app, context.session_key(request)
    return memory_file(app.home, app.settings, target, caller_of(request).owner, session_key)


def _shown(context: ServerContext, target: Target, file: MemoryFile, entries: list[str]) -> MemoryEntries:
    enabled = bool(getattr(context.settings.memory, FILES[target][2]))
    described = file.describe(entries)
    return MemoryEntries(**{**described, "entries": list(map(context.secrets.mask, entries))}, enabled=enabled)
