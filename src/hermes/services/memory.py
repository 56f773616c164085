"""Memory: small files of entries that every session sees. Blocks."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hermes.core.errors import ServiceError
from hermes.core.home import locked, make_private_folder, write_private
from hermes.core.ids import scope_name
from hermes.core.json_types import JsonObject
from hermes.core.limits import PROMPT_FILE_BYTES_MAX
from hermes.guards.injection import suspicious
from hermes.guards.paths import PathRefused, read_inside

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.guards.secrets import Secrets
    from hermes.settings.config import Settings

log = logging.getLogger(__name__)
Target = Literal["memory", "user"]
# target: its file, and the settings that hold its limit and whether it is used
FILES: dict[Target, tuple[str, str, str]] = {
    "memory": ("MEMORY.md", "memory_char_limit", "memory_enabled"),
    "user": ("USER.md", "user_char_limit", "user_profile_enabled"),
}
SEPARATOR = "\n§\n"
_OLD_TEXT = "Copy a piece of the entry that stands in no other one."


def memory_dir(home: Home, owner: str, session_key: str | None) -> Path:
    """A scope's memory: the profile's own, or one per owner and session key."""
    if owner == "default" and session_key is None:
        return home.memories
    return home.memories / "scopes" / scope_name(owner, session_key)


def memory_file(home: Home, settings: Settings, target: Target, owner: str, session_key: str | None) -> MemoryFile:
    name, limit_key, _ = FILES[target]
    return MemoryFile(memory_dir(home, owner, session_key) / name, getattr(settings.memory, limit_key))


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """Entries separated by lines that hold only `§`."""

    path: Path
    chars_max: int

    def entries(self) -> list[str]:
        """Empty where there is no readable file."""
        try:
            return self._read()
        except (PathRefused, OSError) as error:
            log.warning("%s cannot be read: %s", self.path, error)
            return []

    def _read(self) -> list[str]:
        try:
            data = read_inside(self.path, self.path.parent, PROMPT_FILE_BYTES_MAX, links=False)
        except FileNotFoundError:
            return []
        text = data.decode("utf-8", "replace")
        return [entry for part in re.split(r"^§[ \t]*$", text, flags=re.M) if (entry := part.strip())]

    def change(self, operations: list[JsonObject], secrets: Secrets) -> list[str]:
        """Apply a batch, under a lock among all processes."""
        make_private_folder(self.path.parent)
        with locked(self.path.parent):
            try:
                entries = apply(self._read(), operations, self, secrets)
            except (PathRefused, OSError):
                hint = "Tell the user; it must be a plain file that can be read."
                raise ServiceError(f"{self.path.name} cannot be read.", "path_refused", hint) from None
            write_private(self.path, SEPARATOR.join(entries) + "\n" if entries else "")
        return entries

    def remove(self) -> None:
        with locked(self.path.parent):
            self.path.unlink(missing_ok=True)

    def describe(self, entries: list[str]) -> JsonObject:
        return {"entries": entries, "chars": len(SEPARATOR.join(entries)), "limit": self.chars_max}


def apply(entries: list[str], operations: list[JsonObject], file: MemoryFile, secrets: Secrets) -> list[str]:
    """The entries after all operations, or a refusal: a batch is all or nothing. Pure."""
    entries = list(entries)
    for operation in operations:
        action, content = operation.get("action", "add"), (operation.get("content") or "").strip()
        if action == "list":
            continue
        if action in ("add", "replace"):
            _check_content(content, secrets)
        if action == "add":
            if content not in entries:
                entries.append(content)
            continue
        index = _find(entries, operation.get("old_text") or "")
        if action == "replace":
            entries[index] = content
        else:
            del entries[index]
    size = len(SEPARATOR.join(entries))
    if size > file.chars_max:
        raise ServiceError(
            f"That would make {size} characters; the limit is {file.chars_max}.",
            "memory_full",
            "Shorten or remove entries first; one batch can do both.",
            chars=len(SEPARATOR.join(file.entries())),
            entries=file.entries(),
        )
    return entries


def _check_content(content: str, secrets: Secrets) -> None:
    if not content:
        raise ServiceError("`content` is missing or empty.", "invalid_arguments", "Say what is to be remembered.")
    if re.search(r"^§\s*$", content, re.M):
        message = "A line holding only § separates entries and cannot be part of one."
        raise ServiceError(message, "invalid_arguments", "Leave it out.")
    if secrets.redact(content) != content:
        message = "That holds a secret; memory is no place for one."
        raise ServiceError(message, "contains_secret", "Leave the secret out.")
    if why := suspicious(content):
        raise ServiceError(f"That cannot be remembered: {why}.", "injection_suspected", "Say it as a plain fact.")


def _find(entries: list[str], old_text: str) -> int:
    if not old_text:
        raise ServiceError("`old_text` must name the entry.", "invalid_arguments", _OLD_TEXT)
    if old_text in entries:  # the entry itself, which may be part of others
        return entries.index(old_text)
    indexes = [index for index, entry in enumerate(entries) if old_text in entry]
    if len(indexes) == 1:
        return indexes[0]
    code = "ambiguous_match" if indexes else "no_match"
    message = f"`old_text` fits {len(indexes)} entries; it must fit one."
    raise ServiceError(message, code, _OLD_TEXT, entries=entries)
