"""Rows of results: values by column name or by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from psycopg import pq


class Row(tuple[Any, ...]):
    """A row of a result; each set of column names has a subclass with its `columns`."""

    __slots__ = ()
    columns: ClassVar[dict[str, int]] = {}

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.columns[key] if type(key) is str else key)

    def keys(self) -> Sequence[str]:
        return list(self.columns)


@lru_cache(maxsize=512)
def row_type(names: tuple[bytes, ...]) -> type[Row]:
    columns = {name.decode(): index for index, name in enumerate(names)}
    return type("Row", (Row,), {"__slots__": (), "columns": columns})


def make_rows(cursor: Any) -> Callable[[Sequence[Any]], Any]:
    """The row factory of psycopg's own cursors."""
    result: pq.abc.PGresult | None = cursor.pgresult
    if result is None or not result.nfields:
        return tuple
    return row_type(tuple([result.fname(index) or b"" for index in range(result.nfields)]))
