"""Query parameters and pagination."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from hermes.server.errors import ApiError, invalid
from hermes.server.request_bodies import flag_of

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

ID_MAX = 2**63 - 1
OFFSET_MAX = 2**53


def whole(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    """A whole number between two others."""
    given = request.query.get(name, "").strip()
    return number_of(given, name, least, most) if given else default


def number_of(given: str, name: str, least: int = 0, most: int = ID_MAX) -> int:
    """The whole number that a text is."""
    if not re.fullmatch(r"-?[0-9]{1,19}", given) or not least <= int(given) <= most:
        raise invalid(name, f"Invalid value for {name!r}: a whole number from {least} to {most} is expected.")
    return int(given)


def word(request: web.Request, name: str, words: Sequence[str]) -> str | None:
    """One of these words, or none."""
    given = request.query.get(name) or None
    if given is not None and given not in words:
        raise invalid(name, f"Invalid value for {name!r}: it is one of {', '.join(words)}.")
    return given


def flag(request: web.Request, name: str) -> bool:
    """Whether something is asked for; by default it is not."""
    return flag_of(request.query.get(name), name, False)


def shows_reasoning(adapter: APIServerAdapter, request: web.Request) -> bool:
    """Whether the model's reasoning is shown."""
    return flag_of(request.headers.get("X-Hermes-Reasoning"), "X-Hermes-Reasoning", adapter.option("show_reasoning"))


# --- pages -----------------------------------------------------------------------------------------------------------


def cursor_to(place: str) -> str:
    """A place in a list, for the client to give back."""
    return base64.urlsafe_b64encode(place.encode("utf-8", "surrogatepass")).decode().rstrip("=")


def cursor_of(request: web.Request) -> str | None:
    """The place behind which the list is to go on; none is its beginning."""
    given = request.query.get("cursor", "")
    if not given:
        return None
    try:
        return base64.b64decode(given + "=" * (-len(given) % 4), b"-_", validate=True).decode()
    except ValueError:
        raise bad_cursor() from None


def offset_of(request: web.Request) -> int:
    """The same for lists whose places are counted."""
    place = cursor_of(request)
    if place is None:
        return 0
    if not re.fullmatch(r"[0-9]{1,15}", place):
        raise bad_cursor()
    return int(place)


def bad_cursor() -> ApiError:
    """A cursor that no list has given."""
    return invalid("cursor", "The cursor is none of those that this list gives.", "invalid_cursor")


def listed(data: list[Any], next_place: str | None, total: int | None, **more: Any) -> dict[str, Any]:
    """A page of a list; `next_place` is where it goes on."""
    cursor = None if next_place is None else cursor_to(next_place)
    return {
        "object": "list",
        "data": data,
        "has_more": cursor is not None,
        "next_cursor": cursor,
        "total": total,
        **more,
    }
