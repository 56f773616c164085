"""Query parameters, parsed into the struct that a route declares, and pagination."""

from __future__ import annotations

import base64
import functools
import re
from typing import TYPE_CHECKING, Annotated, Generic, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct, inspect

from hermes.core.json_types import JsonObject
from hermes.server.errors import ApiError, invalid
from hermes.server.request_bodies import field_error, flag_of, normalized, types_of

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

Q = TypeVar("Q", bound=Struct)
T = TypeVar("T")
ID_MAX = 2**63 - 1
OFFSET_MAX = 2**53
_INTEGER = re.compile(r"-?[0-9]{1,19}")
# What several routes take.
Cursor = Annotated[str, Meta(description="the place to go on from, as `next_cursor` gave it")]
Offset = Annotated[int, Meta(ge=0, le=OFFSET_MAX, description="how many to pass over")]


class ItemQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100, description="how many items")] = 20
    order: Annotated[Literal["desc", "asc"], Meta(description="which way they go")] = "desc"
    after: Annotated[str, Meta(description="the id of the item before the first")] | None = None


def parse_query(request: web.Request, kind: type[Q]) -> Q:
    """An empty value counts as absent; unknown names are ignored."""
    given: JsonObject = {}
    for name, types in _types(kind).items():
        if (text := request.query.get(name, "")).strip():
            if inspect.ListType in types:
                given[name] = request.query.getall(name)
            else:
                given[name] = int(text) if inspect.IntType in types and _INTEGER.fullmatch(text.strip()) else text
    try:
        return msgspec.convert(normalized(given, kind), kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), wrong_type="invalid_value") from None


@functools.cache
def _types(kind: type[Struct]) -> dict[str, set[type]]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.name: {type(member) for member in types_of(field.type)} for field in info.fields}


def number_of(given: str, name: str) -> int:
    if not _INTEGER.fullmatch(given) or not 0 <= int(given) <= ID_MAX:
        raise invalid(name, f"Invalid value for {name!r}: a whole number from 0 to {ID_MAX} is expected.")
    return int(given)


def shows_reasoning(context: ServerContext, request: web.Request) -> bool:
    return flag_of(request.headers.get("X-Hermes-Reasoning"), "X-Hermes-Reasoning", context.options.show_reasoning)


# --- pages -----------------------------------------------------------------------------------------------------------


class Page(Struct, Generic[T], kw_only=True, tag_field="object", tag="list"):
    data: list[T]
    has_more: bool
    next_cursor: str | None
    total: int | None


def paging(next_place: str | None, total: int | None) -> JsonObject:
    """The fields of a page besides its data; `next_place` is the next cursor's place."""
    if next_place is None:
        return {"has_more": False, "next_cursor": None, "total": total}
    cursor = base64.urlsafe_b64encode(next_place.encode("utf-8", "surrogatepass")).decode().rstrip("=")
    return {"has_more": True, "next_cursor": cursor, "total": total}


def place_of(cursor: str | None) -> str | None:
    """The place after which the list continues; None: its beginning."""
    if cursor is None:
        return None
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True).decode()
    except ValueError:
        raise bad_cursor() from None


def offset_of(cursor: str | None) -> int:
    """The same for lists with offsets."""
    place = place_of(cursor)
    if place is None:
        return 0
    if not re.fullmatch(r"[0-9]{1,15}", place):
        raise bad_cursor()
    return int(place)


def bad_cursor() -> ApiError:
    return invalid("cursor", "The cursor is none of those that this list gives.", "invalid_cursor")
