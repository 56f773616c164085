"""Request bodies: reading bytes within limits, decoding the JSON object, and validating its model."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from aiohttp import web
from aiohttp.web_exceptions import HTTPException
from msgspec import inspect as kinds

from hermes.core import limits
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.text import FLAG_WORDS
from hermes.http_client.inflate import ENCODINGS, InflateError, Inflater
from hermes.server.body_memory import Spool
from hermes.server.errors import ApiError, invalid, missing

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

TAKES_FORM_TYPE = web.RequestKey("takes_form_type", bool)
_SPOOL = web.RequestKey("body", Spool)
_ROOM = web.RequestKey("room", int)
M = TypeVar("M", bound=msgspec.Struct)
R = TypeVar("R")
_SHORT_BYTES = 4096
_NAME_CHARS_READ, _NAME_CHARS_SHOWN = 256, 64
_MULTIPART, _FORM = "multipart/form-data", "application/x-www-form-urlencoded"
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}(?!\\u[dD][c-fC-F][\da-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][\da-fA-F]{2})\\u[dD][c-fC-F][\da-fA-F]{2}"
)
_MISSING = re.compile(r"missing required field `(.+?)`")


@dataclass(slots=True)
class Body(Generic[M]):
    """A parsed body: its model, the decoded object, and the fields without effect. `names` are the fields of parameters that
    the protocol calls otherwise than chat completions."""

    model: M
    raw: JsonObject
    ignored: list[str] = field(default_factory=list)
    names: Mapping[str, str] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        """The ignored fields, as far as a header can hold them."""
        listed = ""
        for name in self.ignored:
            cleaned = re.sub(r"[^\w.\[\]-]", "", name[:_NAME_CHARS_READ])[:_NAME_CHARS_SHOWN]
            longer = f"{listed}, {cleaned}" if listed and cleaned else listed or cleaned
            if len(longer.encode()) > limits.IGNORED_BYTES_MAX:
                break
            listed = longer
        return {"X-Hermes-Ignored": listed} if listed else {}


async def read(context: ServerContext, request: web.Request, kind: type[M]) -> Body[M]:
    raw, strict = await read_object(context, request), context.options.strict_parameters
    if request[_SPOOL].size <= limits.BODY_AT_ONCE_BYTES_MAX:
        return parse(raw, kind, strict=strict)
    body: Body[M] = await context.app.services.files.call(functools.partial(parse, raw, kind, strict=strict))
    return body


async def read_object(context: ServerContext, request: web.Request) -> JsonObject:
    """The JSON object of a request. It may be read again."""
    limit = context.options.max_body_bytes
    try:
        if _SPOOL not in request:
            request[_SPOOL] = await _received(request, limit, context.spool_folder)
        spool = request[_SPOOL]
        if spool.size > limits.BODY_MEMORY_BYTES_MAX and _ROOM not in request:
            await _make_room(context, request, spool.size)
        data = spool.at_once or await spool.whole()
        if spool.size <= limits.BODY_AT_ONCE_BYTES_MAX:
            return as_object(data)
        value: JsonObject = await context.app.services.files.call(functools.partial(as_object, data))
        return value
    except OSError as error:
        message = f"The body cannot be kept on disk while it is read: {error.strerror}."
        raise ApiError(503, message, "not_ready", headers={"Retry-After": "1", "x-should-retry": "true"}) from None


async def _make_room(context: ServerContext, request: web.Request, size: int) -> None:
    """Wait until a large body may be in memory; it keeps its share until the request is answered."""
    try:
        await context.body_memory.take(size, limits.BODIES_WAIT_S_MAX)
    except TimeoutError:
        message = "Too many large requests are being answered; try again, or send smaller images and files."
        headers = {"Retry-After": "5", "x-should-retry": "true"}
        raise ApiError(429, message, "rate_limit_exceeded", headers=headers) from None
    request[_ROOM] = size


def give_back_room(context: ServerContext, request: web.Request) -> None:
    """Called when the request is answered; work that goes on without it needs no body."""
    if _ROOM in request:
        context.body_memory.give_back(request[_ROOM])
        request[_ROOM] = 0


async def _received(request: web.Request, limit: int, folder: Path | None) -> Spool:
    """The body's bytes, within its limits of size and time."""
    if request.content_type == _MULTIPART or (request.content_type == _FORM and not request.get(TAKES_FORM_TYPE)):
        message = f"A body of the type {request.content_type} is not supported; send JSON."
        raise ApiError(415, message, "unsupported_media_type")
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(limit)
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding == "identity":
        encoding = ""
    if encoding not in ("", *ENCODINGS):
        message = f"The Content-Encoding {encoding!r} is not supported; send gzip or deflate, or uncompressed."
        raise ApiError(415, message, "unsupported_media_type", headers={"Accept-Encoding": "gzip, deflate"})
    try:
        is_whole = request.content.is_eof()  # then there is nothing to wait for
        spool = Spool(folder, request.content.read_nowait() if is_whole else b"")
        if not is_whole:
            async with asyncio.timeout(limits.BODY_S_MAX):
                async for part in request.content.iter_any():
                    await spool.add(part)
                    if spool.size > limit:
                        break
    except TimeoutError:
        message = f"The body did not arrive within {limits.BODY_S_MAX:.0f} seconds."
        raise ApiError(408, message, "request_timeout") from None
    except (web.RequestPayloadError, HTTPException, ValueError) as error:
        raise ApiError(400, f"The body could not be read: {error}", "bad_request") from None
    if spool.size > limit:
        raise _too_large(limit)
    return await _inflated(await spool.whole(), encoding, limit, folder) if encoding else spool


async def _inflated(data: bytes, encoding: str, limit: int, folder: Path | None) -> Spool:
    spool = Spool(folder)
    inflater = Inflater(encoding)
    inflater.feed(data)
    try:
        while part := inflater.read():
            await spool.add(part)
            if spool.size > limit:
                raise _too_large(limit)
            await asyncio.sleep(0)  # a small body may inflate to a large one: yield to others
        inflater.finish()
    except InflateError as error:
        if error.reason == "too_large":
            raise ApiError(413, f"The body {error}.", "body_too_large") from None
        raise ApiError(400, f"The body {error}.", "bad_request") from None
    return spool


def _too_large(limit: int) -> ApiError:
    message = f"The body is larger than {limit} bytes; the setting api_server.max_body_bytes says how large it may be."
    return ApiError(413, message, "body_too_large", headers={"Connection": "close"})


def as_object(data: bytes | str) -> JsonObject:
    """No bytes count as an empty object."""
    raw = data.encode() if isinstance(data, str) else data
    openings = raw.count(b"[") + raw.count(b"{")
    # Objects and arrays are slow to make, so too many are refused before they are decoded.
    if openings > limits.JSON_VALUES_MAX:
        outside_strings = b"".join(raw.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
        if outside_strings.count(b"[") + outside_strings.count(b"{") - 1 > limits.JSON_VALUES_MAX:
            raise _too_many_values()
    try:
        try:
            value = msgspec.json.decode(raw)
        except (ValueError, RecursionError):
            if not raw.strip():
                return {}
            # Lone surrogates are the one thing that this decoder refuses and well-meant requests may hold.
            if (replaced := without_lone_surrogates(raw)) is None:
                raise
            value = msgspec.json.decode(replaced)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"Invalid JSON in the body: {what}.", "invalid_json") from None
    # The depth cannot exceed the number of opening brackets, and a short body has no room for many fields.
    if len(raw) > _SHORT_BYTES or openings > limits.JSON_DEPTH_MAX:
        _check_size(value)
    if not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else f"of the type {type(value).__name__}"
        raise ApiError(400, f"The body must be a JSON object; it is {kind}.", "invalid_body")
    return value


def without_lone_surrogates(raw: bytes) -> bytes | None:
    """The JSON text with escaped lone surrogates replaced; None where there are none."""
    if b"\0" in raw:  # never valid in JSON; stands for an escaped backslash below
        return None
    escapes = raw.replace(rb"\\", b"\0")
    replaced = _HALF_PAIR.sub(rb"\\ufffd", escapes)
    return None if replaced == escapes else replaced.replace(b"\0", rb"\\")


def _too_many_values() -> ApiError:
    message = f"The body has more than {limits.JSON_VALUES_MAX} fields and items; send it in parts."
    return ApiError(400, message, "too_many_fields")


def _check_size(value: object) -> None:
    """Refuse too many levels, fields in an object, or values in total."""
    level: list[JsonObject | list[Any]] = [value] if isinstance(value, dict | list) else []
    values = 0
    for _ in range(limits.JSON_DEPTH_MAX):
        for outer in level:
            values += len(outer)
            if len(outer) > limits.JSON_FIELDS_MAX and isinstance(outer, dict):
                place = _place(value, outer)
                message = f"{place or 'The body'} has more than {limits.JSON_FIELDS_MAX} fields."
                raise ApiError(400, message, "too_many_fields", place or None)
        if values > limits.JSON_VALUES_MAX:
            raise _too_many_values()
        inner = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    place = _place(value, level[0])
    message = f"Invalid JSON in the body: it is nested deeper than {limits.JSON_DEPTH_MAX} levels at {place}."
    raise ApiError(400, message, "invalid_json", place)


def _place(value: Any, wanted: Any) -> str:
    """The path in a value to one of its objects or arrays; empty for the value itself."""
    if value is wanted:
        return ""
    level = [("", value)]
    while level:
        following = []
        for path, outer in level:
            named: Iterable[tuple[Any, Any]] = outer.items() if isinstance(outer, dict) else enumerate(outer)
            for key, item in named:
                if isinstance(item, dict | list):
                    step = f".{key[:_NAME_CHARS_SHOWN]}" if isinstance(outer, dict) else f"[{key}]"
                    inner = (path + step if len(path) < _NAME_CHARS_READ else path).removeprefix(".")
                    if item is wanted:
                        return inner
                    following.append((inner, item))
        level = following
    raise AssertionError("the value is not in there")


# --- models ----------------------------------------------------------------------------------------------------------


def parse(raw: JsonMapping, kind: type[M], *, strict: bool = False) -> Body[M]:
    """Unknown fields are ignored and named, or, when strict, refused."""
    shape = _shape(kind)
    ignored = [] if raw.keys() <= shape.keys() else [name for name in raw if name not in shape]
    if ignored and (strict or kind.__struct_config__.forbid_unknown_fields):
        raise invalid(ignored[0], f"Unknown parameter: {ignored[0]!r}.", "unknown_parameter")
    given = normalized(raw, kind)
    try:
        model = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error)) from None
    without_effect = getattr(kind, "WITHOUT_EFFECT", ())
    if not given.keys().isdisjoint(without_effect):
        ignored += [name for name in without_effect if given.get(name) is not None]
    return Body(model, dict(raw), ignored)


@functools.cache
def _shape(
    kind: type[msgspec.Struct],
) -> dict[str, tuple[bool, bool, type[msgspec.Struct] | None, type[msgspec.Struct] | None]]:
    """Of each field: whether it is a boolean, whether null has a meaning, its model, the model of its items."""
    info = kinds.type_info(kind)
    assert isinstance(info, kinds.StructType)
    shape = {}
    for item in info.fields:
        types = types_of(item.type)
        own = next((t.cls for t in types if isinstance(t, kinds.StructType)), None)
        lists = [t.item_type for t in types if isinstance(t, kinds.ListType)]
        nested = next((t.cls for t in lists if isinstance(t, kinds.StructType)), None)
        # msgspec reports a default of UNSET as none at all.
        unset = not item.required and item.default is msgspec.NODEFAULT is item.default_factory
        clears = unset and any(isinstance(t, kinds.NoneType | kinds.AnyType) for t in types)
        takes_words = any(isinstance(t, kinds.StrType | kinds.LiteralType) for t in types)
        is_flag = any(isinstance(t, kinds.BoolType) for t in types) and not takes_words
        shape[item.encode_name] = (is_flag, clears, own, nested)
    return shape


def types_of(kind: kinds.Type) -> list[kinds.Type]:
    """The members of a union, or the type alone, without annotations."""
    members = kind.types if isinstance(kind, kinds.UnionType) else (kind,)
    return [member.type if isinstance(member, kinds.Metadata) else member for member in members]


def normalized(raw: JsonMapping, kind: type[msgspec.Struct], where: str = "") -> JsonObject:
    """Null becomes absent, and booleans may have any form that clients send."""
    out: JsonObject = {}
    shape = _shape(kind)
    for name, value in raw.items():
        if name not in shape:
            continue
        flag, clears, own, nested = shape[name]
        if value is None:
            if clears:
                out[name] = None
            continue
        path = f"{where}{name}"
        if flag and not isinstance(value, bool):
            value = _as_flag(value, path)
        elif own is not None and isinstance(value, dict):
            value = normalized(value, own, f"{path}.")
        elif nested is not None and isinstance(value, list):
            value = [
                normalized(item, nested, f"{path}[{index}].") if isinstance(item, dict) else item
                for index, item in enumerate(value)
            ]
        out[name] = value
    return out


def _as_flag(value: object, path: str) -> bool:
    word = str(value).strip().lower() if isinstance(value, str | int) else ""
    if word not in FLAG_WORDS:
        raise invalid(path, f"Invalid value for {path!r}: true or false is expected.", "invalid_type")
    return FLAG_WORDS[word]


def flag_of(value: str | None, name: str, default: bool) -> bool:
    return default if value is None or value == "" else _as_flag(value, name)


def field_error(text: str, wrong_type: str = "invalid_type") -> ApiError:
    """The error for a msgspec message, with the field's path; `wrong_type` is the code for a type mismatch."""
    # The text before may quote the request.
    fault, _, path = text.rpartition(" - at `") if text.endswith("`") and " - at `" in text else (text, "", "")
    path = path[:-1].removeprefix("key in ").removeprefix("$").removeprefix(".")
    if match := _MISSING.search(fault):
        param = f"{path}.{match[1]}" if path else match[1]
        return missing(param)
    code = "invalid_value"
    if ", got " in fault:
        code = wrong_type
    elif "of length <=" in fault:
        code = "string_above_max_length" if "`str`" in fault else "array_above_max_length"
    problem = fault[:1].lower() + fault[1:].replace("`", "")
    return invalid(path or "body", f"Invalid value for {path or 'the body'!r}: {problem}.", code)
