"""What clients of pydantic's kind take for a schema."""

from __future__ import annotations

from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    born: int
