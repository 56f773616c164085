"""SQL that differs between SQLite and PostgreSQL: named fragments that hold both forms, for use in any statement.

`?` is the placeholder in both. The PostgreSQL form is put in place by `translate`; SQLite sees it as a comment."""

from __future__ import annotations

import re
from collections.abc import Sized
from functools import lru_cache
from itertools import count
from typing import Any

_EITHER = re.compile(r"(?:/\*sqlite\*/.*?)?/\*pg ?(.*?)\*/", re.DOTALL)


def either(sqlite: str, postgres: str) -> str:
    return f"/*sqlite*/{sqlite}/*pg {postgres}*/"


@lru_cache(maxsize=4096)
def translate(sql: str) -> bytes:
    """The statement for PostgreSQL, with its placeholders."""
    numbers = count(1)
    return re.sub(r"\?", lambda _: f"${next(numbers)}", _EITHER.sub(r"\1", sql)).encode()


def placeholders(values: Sized) -> str:
    return ", ".join("?" * len(values))


def all_of(*conditions: tuple[str, Any]) -> tuple[str, list[Any]]:
    """The conjunction of those conditions whose value is given, and the values."""
    chosen = [condition for condition in conditions if condition[1] is not None]
    return " AND ".join(["TRUE", *(sql for sql, _ in chosen)]), [value for _, value in chosen]


def index_hint(name: str) -> str:
    """The index that SQLite must use; an empty name means none. PostgreSQL chooses by its statistics."""
    return either(f"INDEXED BY {name}" if name else "NOT INDEXED", "")


def greatest(first: str, second: str) -> str:
    return either(f"max({first}, {second})", f"greatest({first}, {second})")


def is_same(column: str) -> str:
    """Equal, or both NULL."""
    return either(f"{column} IS ?", f"{column} IS NOT DISTINCT FROM ?")


def like(column: str) -> str:
    r"""A case-insensitive pattern match; `\` escapes wildcards."""
    return either(rf"{column} LIKE ? ESCAPE '\'", rf"{column} ILIKE ? ESCAPE '\'")


def in_json_list(column: str) -> str:
    """Membership in a list of numbers given as JSON, which may be longer than the number of parameters allowed."""
    return either(
        f"{column} IN (SELECT value FROM json_each(?))",
        f"{column} IN (SELECT value::bigint FROM json_array_elements_text(?::json))",
    )


def json_text(column: str, key: str) -> str:
    return either(f"json_extract({column}, '$.{key}')", f"({column}->>'{key}')")


def not_indexed(column: str) -> str:
    """A column that SQLite must not look up in an index."""
    return either(f"+{column}", column)


# The time in seconds: by this process's clock for a file, by the server's where others use it too.
CLOCK = either("clock()", "extract(epoch FROM clock_timestamp())::float8")
# FOR SHARE: others cannot change the row until this transaction ends; FOR UPDATE: nor lock it. SKIP LOCKED: locked rows
# are left out.
FOR_SHARE, FOR_UPDATE = either("", "FOR SHARE"), either("", "FOR UPDATE")
FOR_UPDATE_SKIP_LOCKED = either("", "FOR UPDATE SKIP LOCKED")
