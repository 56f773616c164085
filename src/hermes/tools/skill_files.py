"""The skills of a home as they lie on the disk: a folder each, with a SKILL.md that says what it is for. It blocks."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hermes.core.ids import scope_name
from hermes.core.limits import SKILL_CHARS_MAX, SKILL_FILE_BYTES_MAX
from hermes.guards.paths import PathRefused, read_inside

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.settings.config import Settings

FILE = "SKILL.md"
SCOPES = "scopes"
_FENCE = "---"


class Skill(NamedTuple):
    """One skill. Without a category it lies beside the categories."""

    name: str
    description: str
    category: str | None
    path: Path


def skills_root(home: Home, owner: str, session_key: str | None) -> Path:
    """Where a scope's own skills lie, as with memory: the profile's folder, or one per owner and session key."""
    if owner == "default" and session_key is None:
        return home.skills
    return home.skills / SCOPES / scope_name(owner, session_key)


def find_skills(settings: Settings, owner: str = "default", session_key: str | None = None) -> list[Skill]:
    """A scope's own skills, the shared ones of the home, and those of the folders that the settings add; the first of a
    name counts."""
    shared = settings.home.skills
    external = (Path(folder).expanduser() for folder in settings.skills.external_dirs)
    found: dict[str, Skill] = {}
    for root in dict.fromkeys((skills_root(settings.home, owner, session_key), shared, *external)):
        for path in sorted((*root.glob(f"*/{FILE}"), *root.glob(f"*/*/{FILE}"))):
            if root == shared and path.is_relative_to(shared / SCOPES):
                continue
            if skill := _skill(path, root):
                found.setdefault(skill.name, skill)
    return sorted(found.values(), key=lambda skill: (skill.category or "", skill.name))


def _skill(path: Path, root: Path) -> Skill | None:
    try:
        stamp = path.stat()
        name, description = _head(path, stamp.st_mtime_ns, stamp.st_size)
    except (OSError, PathRefused):
        return None
    folders = path.relative_to(root).parts[:-1]
    return Skill(name or folders[-1], description, folders[0] if len(folders) > 1 else None, path)


@lru_cache(maxsize=1024)
def _head(path: Path, mtime_ns: int, size: int) -> tuple[str, str]:
    """Name and description from the head of a file; read again only when the file has changed."""
    return front_matter(skill_text(path)[:SKILL_CHARS_MAX])


def skill_text(path: Path) -> str:
    """The text of a skill's file in its folder. Raises PathRefused where it leads out of it, or OSError."""
    return read_inside(path, path.parent, SKILL_FILE_BYTES_MAX).decode("utf-8", "replace")


def front_matter(text: str) -> tuple[str, str]:
    """The name and the description that the text of a skill begins with; empty where it does not say them."""
    before, fence, rest = text.partition(f"{_FENCE}\n")
    head, end, _ = rest.partition(f"\n{_FENCE}")
    fields = _fields(head) if fence and end and not before.strip("\ufeff \n") else {}
    # Only plain values: a tangle of references would be endless as text.
    plain = {name: str(value) for name, value in fields.items() if isinstance(value, str | int | float)}
    name, description = (" ".join(plain.get(field, "").split()) for field in ("name", "description"))
    return name, description


def _fields(head: str) -> dict[str, Any]:
    import yaml

    try:
        fields = yaml.safe_load(head)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
