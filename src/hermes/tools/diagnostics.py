"""Syntax check of JSON, YAML, TOML and Python files."""

from __future__ import annotations

import ast
import json
import os
import re
import tomllib
from collections.abc import Callable

from hermes.core.json_types import JsonObject
from hermes.core.limits import DIAGNOSED_BYTES_MAX


class _Fault(ValueError):
    def __init__(self, lineno: int, colno: int, msg: str) -> None:
        super().__init__(msg)
        self.lineno, self.colno, self.msg = lineno, colno, msg


def diagnostics(path: str, data: bytes) -> list[JsonObject] | None:
    """Syntax errors of a file's content; None if it is too large to be parsed."""
    parse = _PARSERS.get(os.path.splitext(path)[1].lower())
    if parse is None:
        return []
    if len(data) > DIAGNOSED_BYTES_MAX:
        return None
    try:
        parse(data.decode("utf-8-sig"))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        text = str(getattr(error, "msg", error)) or "nested too deeply"
        match = re.search(r" \(at line (\d+), column (\d+)\)$", text)  # the way of tomllib
        line, column = match.groups() if match else (getattr(error, "lineno", 1), getattr(error, "colno", None))
        column = getattr(error, "offset", 1) if column is None else column
        message = text[: match.start()] if match else text
        return [{"line": int(line or 1), "column": int(column or 1), "message": message}]
    return []


def _yaml(text: str) -> None:
    import yaml

    try:
        for _ in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            pass
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        message = str(getattr(error, "problem", None) or error).partition("\n")[0]
        raise _Fault(mark.line + 1 if mark else 1, mark.column + 1 if mark else 1, message) from None


def _python(text: str) -> None:
    compile(text, "<content>", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)


_PARSERS: dict[str, Callable[[str], object]] = {
    ".json": json.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".toml": tomllib.loads,
    ".py": _python,
    ".pyi": _python,
}
