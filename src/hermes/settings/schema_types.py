"""Marks, types and sections of the settings schema."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct


@dataclass(frozen=True, slots=True)
class Mark:
    """What is to be known of a setting beyond its type.

    `text` describes it. `env` is the environment variable that sets it; those of `api_server` follow from their names. `names_variable`: the
    value is itself the name of a variable, which holds a secret. `follows` names the setting whose value is the default.
    `null` is what a null in the file stands for; None: for the default.
    """

    text: str = ""
    env: str = ""
    secret: bool = False
    names_variable: bool = False
    follows: str = ""
    null: Any = None


ApiMode = Literal["chat_completions", "codex_responses", "anthropic_messages", "local"]
# From least to most; a model offers some of them.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)

Secret = Annotated[str, Mark(secret=True)]
VariableName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z"), Mark(names_variable=True)]
Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(ge=0.01)]


class Section(Struct, frozen=True):
    def __repr__(self) -> str:
        # The values may be secrets.
        return f"{type(self).__name__}()"
