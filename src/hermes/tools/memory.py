"""The tool `memory` and the files behind it: what is worth knowing in every session, small enough to be always in view."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hermes.core.home import locked, make_private_folder, write_private
from hermes.core.ids import scope_name
from hermes.core.limits import PROMPT_FILE_BYTES_MAX
from hermes.guards.injection import suspicious
from hermes.guards.paths import PathRefused, read_inside
from hermes.tools.framework import approvals
from hermes.tools.framework.registry import Answer, Args, Prepared, ToolContext, ToolDef, ToolError

if TYPE_CHECKING:
    from hermes.core.home import Home
    from hermes.guards.secrets import Secrets
    from hermes.settings.config import Settings

log = logging.getLogger(__name__)
Target = Literal["memory", "user"]
FILES: dict[Target, tuple[str, str, str]] = {
    "memory": ("MEMORY.md", "memory_char_limit", "memory_enabled"),
    "user": ("USER.md", "user_char_limit", "user_profile_enabled"),
}
SEPARATOR = "\n§\n"
_OLD_TEXT = "Copy a piece of the entry that stands in no other one."


class MemoryFile:
    """One memory file: entries between lines that hold only `§`."""

    def __init__(self, path: Path, chars_max: int) -> None:
        self.path = path
        self.chars_max = chars_max

    def entries(self) -> list[str]:
        """The entries, or none where there is no file that may be read."""
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

    def change(self, operations: list[dict[str, Any]], secrets: Secrets) -> list[str]:
        """Apply a batch, alone with the file among all processes."""
        make_private_folder(self.path.parent)
        with locked(self.path.parent):
            try:
                entries = apply(self._read(), operations, self, secrets)
            except (PathRefused, OSError):
                hint = "Tell the user; it must be a plain file that can be read."
                raise ToolError(f"{self.path.name} cannot be read.", "path_refused", hint) from None
            write_private(self.path, SEPARATOR.join(entries) + "\n" if entries else "")
        return entries


def memory_dir(home: Home, owner: str, session_key: str | None) -> Path:
    """Where a scope's memory lives: the profile's own, or one per owner and session key."""
    if owner == "default" and session_key is None:
        return home.memories
    return home.memories / "scopes" / scope_name(owner, session_key)


def memory_file(home: Home, settings: Settings, target: Target, owner: str, session_key: str | None) -> MemoryFile:
    """The file of a target in a scope."""
    name, limit_key, _ = FILES[target]
    return MemoryFile(memory_dir(home, owner, session_key) / name, getattr(settings.memory, limit_key))


def apply(entries: list[str], operations: list[dict[str, Any]], file: MemoryFile, secrets: Secrets) -> list[str]:
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
        at = _place(entries, operation.get("old_text") or "")
        if action == "replace":
            entries[at] = content
        else:
            del entries[at]
    size = len(SEPARATOR.join(entries))
    if size > file.chars_max:
        raise ToolError(
            f"That would make {size} characters; the limit is {file.chars_max}.",
            "memory_full",
            "Shorten or remove entries first; one batch can do both.",
            chars=len(SEPARATOR.join(file.entries())),
            entries=file.entries(),
        )
    return entries


def _check_content(content: str, secrets: Secrets) -> None:
    if not content:
        raise ToolError("`content` is missing or empty.", "invalid_arguments", "Say what is to be remembered.")
    if re.search(r"^§\s*$", content, re.M):
        raise ToolError(
            "A line holding only § separates entries and cannot be part of one.", "invalid_arguments", "Leave it out."
        )
    if secrets.redact(content) != content:
        raise ToolError("That holds a secret; memory is no place for one.", "contains_secret", "Leave the secret out.")
    if why := suspicious(content):
        raise ToolError(f"That cannot be remembered: {why}.", "injection_suspected", "Say it as a plain fact.")


def _place(entries: list[str], old_text: str) -> int:
    if not old_text:
        raise ToolError("`old_text` must name the entry.", "invalid_arguments", _OLD_TEXT)
    hits = [i for i, entry in enumerate(entries) if old_text in entry]
    if len(hits) == 1:
        return hits[0]
    code = "ambiguous_match" if hits else "no_match"
    raise ToolError(f"`old_text` fits {len(hits)} entries; it must fit one.", code, _OLD_TEXT, entries=entries)


def _operations(args: Args) -> list[dict[str, Any]]:
    return args.get("operations") or ([] if args.get("action", "list") == "list" else [args])


async def _prepare(ctx: ToolContext, args: Args) -> Prepared:
    if operations := _operations(args):
        wanted = ctx.settings.memory.write_approval
        subject = "\n".join(map(_told, operations))
        await approvals.write(ctx, "memory", subject, wanted=wanted, reason="Memory writes are to be approved.")
    return Prepared()


async def _run(ctx: ToolContext, args: Args) -> Answer:
    target: Target = args["target"]
    file = memory_file(ctx.home, ctx.settings, target, ctx.owner, ctx.session_key)
    if not (operations := _operations(args)):
        return _answer(await ctx.blocking(file.entries), file)
    entries = await ctx.blocking(lambda: file.change(operations, ctx.secrets))
    return {**_answer(entries, file), "note": "It will be in view from the next session or compaction on."}


def _told(operation: dict[str, Any]) -> str:
    """A change as it is approved: what goes, and what comes in its place."""
    old, new = operation.get("old_text") or "", operation.get("content") or ""
    return f"{operation.get('action', 'add')}: {f'{old} -> {new}' if old and new else old or new}"


def _answer(entries: list[str], file: MemoryFile) -> Answer:
    return {"entries": entries, "chars": len(SEPARATOR.join(entries)), "limit": file.chars_max}


_OPERATION = {
    "action": {"type": "string", "enum": ["add", "replace", "remove", "list"]},
    "content": {"type": "string"},
    "old_text": {"type": "string", "description": "A piece of the entry to replace or remove; must fit exactly one."},
}

TOOL = ToolDef(
    name="memory",
    toolset="memory",
    description=(
        "Keep facts for later sessions: `user` for who the user is and likes, `memory` for everything else. "
        "Short entries; replace what has changed instead of adding to it."
    ),
    parameters={
        "type": "object",
        "properties": {
            "target": {"type": "string", "enum": list(FILES)},
            **_OPERATION,
            "operations": {
                "type": "array",
                "items": {"type": "object", "properties": _OPERATION, "additionalProperties": False},
                "description": "Several changes, made together or not at all.",
            },
        },
        "required": ["target"],
        "additionalProperties": False,
    },
    run=_run,
    prepare=_prepare,
    effect=lambda args: "read" if args.get("action", "list") == "list" and not args.get("operations") else "effect",
    scope=lambda _: frozenset({"memory"}),
    available=lambda settings: None if settings.memory.memory_enabled else "memory is turned off",
    preview=lambda args: (
        f"{args.get('action', 'list')} {args['target']}: {args.get('content') or args.get('old_text') or ''}"
    ),
)
