"""The skills of a home as they lie on the disk: a folder each, with a SKILL.md that says what it is for. It blocks."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hermes.config import Settings

_FILE = "SKILL.md"
_FENCE = "---"
_CHARS_MAX = 100_000


class Skill(NamedTuple):
    """One skill. Without a category it lies beside the categories."""

    name: str
    description: str
    category: str | None
    path: Path


def find_skills(settings: Settings) -> list[Skill]:
    """The skills of the home and of the folders that the settings add; the first of a name counts."""
    roots = [settings.home.skills, *(Path(folder).expanduser() for folder in settings.get("skills.external_dirs"))]
    found: dict[str, Skill] = {}
    for root in roots:
        for path in sorted((*root.glob(f"*/{_FILE}"), *root.glob(f"*/*/{_FILE}"))):
            if skill := _skill(path, root):
                found.setdefault(skill.name, skill)
    return sorted(found.values(), key=lambda skill: (skill.category or "", skill.name))


def _skill(path: Path, root: Path) -> Skill | None:
    try:
        stamp = path.stat()
        name, description = _head(path, stamp.st_mtime_ns, stamp.st_size)
    except OSError:
        return None
    folders = path.relative_to(root).parts[:-1]
    return Skill(name or folders[-1], description, folders[0] if len(folders) > 1 else None, path)


@lru_cache(maxsize=1024)
def _head(path: Path, mtime_ns: int, size: int) -> tuple[str, str]:
    """Name and description from the head of a file; read again only when the file has changed."""
    with path.open(encoding="utf-8", errors="replace") as file:
        before, fence, rest = file.read(_CHARS_MAX).partition(f"{_FENCE}\n")
    head, end, _ = rest.partition(f"\n{_FENCE}")
    fields = _fields(head) if fence and end and not before.strip("\ufeff \n") else {}
    name, description = (" ".join(str(fields.get(field) or "").split()) for field in ("name", "description"))
    return name, description


def _fields(head: str) -> dict[str, Any]:
    import yaml

    try:
        fields = yaml.safe_load(head)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
