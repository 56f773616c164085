"""The root of Hermes' own exceptions."""

from __future__ import annotations

from typing import Any

from hermes.core.json_types import JsonObject


class HermesError(Exception):
    """`message` is one sentence and never holds a secret; `exit_code` is that of a command that it ends."""

    exit_code = 1

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        remedy = f" Try: {self.hint}" if self.hint else ""
        return f"{where}{self.message}{remedy}"


class ConfigError(HermesError):
    """A setting, or a settings file, that cannot be used."""

    exit_code = 78


class ServiceError(Exception):
    """A refusal of a `services` operation: a sentence, a code for programs, and perhaps what to try next.

    `field` is the argument it is about; `details` are for callers that get the refusal as an object. HTTP, command line
    and tools each turn it into their own form in one place.
    """

    foreign = False

    def __init__(self, message: str, code: str, hint: str = "", *, field: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message, self.code, self.hint, self.field = message, code, hint, field
        self.answer: JsonObject = {"error": message, "code": code, **({"hint": hint} if hint else {}), **details}
