"""Exports of other chat programs (ChatGPT, Claude, Open WebUI) as session documents. Nothing in them is trusted.

Of each conversation the branch shown last is imported, as the texts of user and assistant, without reasoning, tool calls
and pictures. Session ids are derived from the export's, so that a conversation is not imported twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, BinaryIO

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import FOREIGN_EXPORT_BYTES_MAX, SESSION_TITLE_CHARS_MAX
from hermes.store.transfer import FORMAT

_ZIP = b"PK\x03\x04"
_MEMBER = re.compile(r"(?:^|/)(?:conversations|chat-export)[^/]*\.json\Z")
_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_ROLES = {"user": "user", "human": "user", "assistant": "assistant"}
# Other content types of ChatGPT are reasoning, account settings and tools.
_TEXT_TYPES = ("text", "multimodal_text")
_SECONDS_MAX = 1e11
# How ChatGPT writes references to its search results.
_CITATION = re.compile("\ue200[^\ue200\ue201]{0,2000}\ue201")
# How Open WebUI writes what is beside the answer.
_DETAILS = re.compile(r'<details type="(?:reasoning|tool_calls|code_interpreter)"')
_DETAILS_END = "</details>"


class BadExport(Exception):
    """Why a file cannot be imported."""


def is_foreign(head: bytes) -> bool:
    """Whether a file that starts like this is another program's export: an archive, a list, or one conversation."""
    if head.startswith(_ZIP):
        return True
    text = head.decode("utf-8-sig", "ignore").lstrip()
    is_one = text.startswith("{") and '"format"' not in text and any(f'"{key}"' in text for _, key, _ in _PROGRAMS)
    return text.startswith("[") or is_one


def conversations(file: BinaryIO) -> Iterator[tuple[int, JsonObject | None, str]]:
    """Each conversation with its number, as a session or with what is wrong with it."""
    number = 0
    for document in _documents(file):
        for entry in document if isinstance(document, list) else [document]:
            number += 1
            try:
                yield number, _session(entry), ""
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
                why = str(error) if isinstance(error, BadConversation) else f"It is malformed ({type(error).__name__})."
                yield number, None, why
    if not number:
        raise BadExport("There are no conversations in this file.")


class BadConversation(ValueError):
    pass


def _documents(file: BinaryIO) -> Iterator[Any]:
    head = file.read(len(_ZIP))
    file.seek(0)
    if head != _ZIP:
        yield _parsed(file.read(FOREIGN_EXPORT_BYTES_MAX + 1))
        return
    try:
        with zipfile.ZipFile(file) as archive:
            names = sorted(name for name in archive.namelist() if _MEMBER.search(name))
            if not names:
                raise BadExport("The archive has no conversations.json, so it is no export of a known program.")
            for name in names:
                # The declared size is not trusted: at most the limit is unpacked.
                with archive.open(name) as member:
                    yield _parsed(member.read(FOREIGN_EXPORT_BYTES_MAX + 1))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise BadExport(f"The archive cannot be read: {error}.") from None


def _parsed(data: bytes) -> Any:
    if len(data) > FOREIGN_EXPORT_BYTES_MAX:
        raise BadExport(f"The conversations take more than {FOREIGN_EXPORT_BYTES_MAX} bytes.")
    try:
        document = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise BadExport("This is not UTF-8.") from None
    except json.JSONDecodeError as error:
        raise BadExport(f"This is not JSON: {error.msg} at line {error.lineno}.") from None
    except (ValueError, RecursionError):
        raise BadExport("This is not valid JSON.") from None
    if not isinstance(document, list | dict):
        raise BadExport("This is no list of conversations.")
    return document


# --- what each program writes ----------------------------------------------------------------------------------------


def _chatgpt(entry: JsonMapping) -> JsonObject:
    nodes, node = entry["mapping"], entry.get("current_node")
    if node is None:
        node = next(reversed(nodes), None)
    messages = []
    for one in _branch(nodes, node, "parent"):
        message = one.get("message") or {}
        content = message.get("content") or {}
        hidden = (message.get("metadata") or {}).get("is_visually_hidden_from_conversation")
        # What is addressed to somebody else is a tool call.
        is_shown = message.get("recipient") in (None, "all") and not hidden
        if content.get("content_type") in _TEXT_TYPES and is_shown:
            text = "\n\n".join(filter(None, map(_chatgpt_text, content.get("parts") or ())))
            messages.append(((message.get("author") or {}).get("role"), text, message.get("create_time")))
    return {
        "id": entry.get("conversation_id") or entry.get("id"),
        "title": entry.get("title"),
        "model": entry.get("default_model_slug"),
        "times": (entry.get("create_time"), entry.get("update_time")),
        "messages": messages,
    }


def _chatgpt_text(part: Any) -> str:
    """A part of a message; of speech what was said, without the sound."""
    if isinstance(part, str):
        return _CITATION.sub("", part)
    if part.get("content_type") == "image_asset_pointer" or "content_type" not in part:
        return "[image]"
    return str(part.get("text") or "")


def _claude(entry: JsonMapping) -> JsonObject:
    messages = []
    for message in entry["chat_messages"]:
        blocks = message.get("content") or ()
        texts = (
            [block.get("text") for block in blocks if block.get("type") == "text"] if blocks else [message.get("text")]
        )
        for attachment in message.get("attachments") or ():
            name, content = attachment.get("file_name") or "file", attachment.get("extracted_content")
            texts.append(f"File {name}:\n{content}" if content else f"[file {name}]")
        texts += [f"[file {file.get('file_name') or ''}]" for file in message.get("files") or ()]
        messages.append((message.get("sender"), "\n\n".join(filter(None, texts)), message.get("created_at")))
    times = entry.get("created_at"), entry.get("updated_at")
    return {"id": entry["uuid"], "title": entry.get("name"), "model": None, "times": times, "messages": messages}


def _open_webui(entry: JsonMapping) -> JsonObject:
    chat = entry.get("chat") or entry
    history = chat.get("history") or {}
    nodes = history.get("messages") or {}
    branch = _branch(nodes, history.get("currentId"), "parentId") if nodes else chat["messages"]
    messages = [(one.get("role"), _without_details(_text(one.get("content"))), one.get("timestamp")) for one in branch]
    return {
        "id": entry.get("id") or chat.get("id"),
        "title": entry.get("title") or chat.get("title"),
        "model": next(iter(chat.get("models") or ()), None),
        "times": (entry.get("created_at") or chat.get("timestamp"), entry.get("updated_at")),
        "messages": messages,
    }


_PROGRAMS: tuple[tuple[str, str, Callable[[JsonMapping], JsonObject]], ...] = (
    ("chatgpt", "mapping", _chatgpt),
    ("claude", "chat_messages", _claude),
    ("openwebui", "chat", _open_webui),
    ("openwebui", "history", _open_webui),
)


def _branch(nodes: Mapping[str, JsonMapping], leaf: str | None, parent: str) -> list[JsonMapping]:
    """From the first message to a leaf; a cycle ends it."""
    branch: list[JsonMapping] = []
    seen: set[str] = set()
    while leaf is not None and leaf in nodes and leaf not in seen:
        seen.add(leaf)
        branch.append(nodes[leaf])
        leaf = nodes[leaf].get(parent)
    return branch[::-1]


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n\n".join(str(part.get("text") or "") if part.get("type") == "text" else "[image]" for part in parts)


def _without_details(text: str) -> str:
    shown, at = [], 0
    while (match := _DETAILS.search(text, at)) and (end := text.find(_DETAILS_END, match.end())) >= 0:
        shown.append(text[at : match.start()])
        at = end + len(_DETAILS_END)
    return "".join([*shown, text[at:]]).strip()


# --- a session of it -------------------------------------------------------------------------------------------------


def _session(entry: Any) -> JsonObject:
    program = next((one for one in _PROGRAMS if isinstance(entry, dict) and one[1] in entry), None)
    if program is None:
        raise BadConversation("It is no conversation of ChatGPT, Claude or Open WebUI.")
    source, _, read = program
    chat = read(entry)
    started_at, ended = map(_time, chat["times"])
    messages: list[JsonObject] = []
    for role, text, when in chat["messages"]:
        if role not in _ROLES or not isinstance(text, str) or not text.strip():
            continue
        role, at = _ROLES[role], _time(when) or started_at or 0.0
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text, "timestamp": at})
    if not messages:
        raise BadConversation("There is no text in it.")
    started_at = started_at or messages[0]["timestamp"]
    ended = max(ended or 0.0, messages[-1]["timestamp"], started_at)
    title, model = chat["title"], chat["model"]
    return {
        "format": FORMAT,
        "id": f"{source}-{_id_of(chat['id'], messages)}",
        "source": source,
        "title": _title(title) if isinstance(title, str) else None,
        "model": model[:200] if isinstance(model, str) else None,
        "started_at": started_at,
        "last_active": ended,
        "ended_at": ended,
        "end_reason": f"imported from {source}",
        "messages": messages,
    }


def _title(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SESSION_TITLE_CHARS_MAX else f"{line[: SESSION_TITLE_CHARS_MAX - 1]}…"


def _id_of(given: object, messages: list[JsonObject]) -> str:
    if isinstance(given, str) and _PLAIN_ID.fullmatch(given):
        return given
    basis = given if isinstance(given, str) and given else json.dumps(messages)
    return hashlib.sha256(basis.encode("utf-8", "replace")).hexdigest()[:32]


def _time(value: object) -> float | None:
    """Seconds since 1970, from a number (also of milliseconds or less) or an ISO time."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    seconds = float(value)
    while seconds > _SECONDS_MAX:
        seconds /= 1000
    return seconds
