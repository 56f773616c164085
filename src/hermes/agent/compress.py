"""Compaction of a conversation: its size, and the plan of what to shorten. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from hermes.core.json_types import JsonObject, Message
from hermes.core.message_marks import FOREIGN_SUMMARY_MARK, SUMMARY_MARK
from hermes.core.tokens import estimate

_LEFT_OUT = "[…]"


def size_of(messages: Sequence[Message]) -> int:
    return sum(map(estimate, messages))


class Budget(msgspec.Struct, frozen=True):
    """The available space, in tokens."""

    window: int
    max_output: int
    threshold: float = 0.75
    target_ratio: float = 0.2
    protect_first: int = 3

    @property
    def total(self) -> int:
        return self.window - min(self.max_output, self.window // 4)

    @property
    def limit(self) -> int:
        return int(self.total * self.threshold)

    @property
    def tail(self) -> int:
        return int(self.total * self.target_ratio)

    @property
    def goal(self) -> int:
        """Low enough that compaction is not needed again at once."""
        return self.limit - self.tail


class Plan(msgspec.Struct, frozen=True):
    """A conversation in three parts; the middle is shortened."""

    head: list[Message]
    middle: list[Message]
    tail: list[Message]


def plan(messages: Sequence[Message], budget: Budget, protect_first: int | None = None) -> Plan:
    """Where to cut. A message with calls and its results stay together; the last user message and all after it stay."""
    pieces = _pieces(messages)
    first = budget.protect_first if protect_first is None else protect_first
    last_user = next((i for i in range(len(pieces) - 1, -1, -1) if pieces[i][0].get("role") == "user"), len(pieces) - 1)
    start, room = len(pieces), budget.tail
    while start > 0:
        size = size_of(pieces[start - 1])
        if start <= last_user and size > room:
            break
        start -= 1
        room -= size
    head_end, count = 0, 0
    while head_end < start and count < first:
        count += len(pieces[head_end])
        head_end += 1
    return Plan(_flatten(pieces[:head_end]), _flatten(pieces[head_end:start]), _flatten(pieces[start:]))


def _pieces(messages: Sequence[Message]) -> list[list[Message]]:
    pieces: list[list[Message]] = []
    for message in messages:
        if message.get("role") == "tool" and pieces and pieces[-1][0].get("tool_calls"):
            pieces[-1].append(message)
        else:
            pieces.append([message])
    return pieces


def _flatten(pieces: Sequence[Sequence[Message]]) -> list[Message]:
    return [message for piece in pieces for message in piece]


def prune(messages: Sequence[Message]) -> list[Message]:
    calls = {call["id"]: call["function"] for m in messages for call in m.get("tool_calls") or ()}
    return [_prune_message(message, calls) if message.get("role") == "tool" else message for message in messages]


def _prune_message(message: Message, calls: JsonObject) -> Message:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    call = calls.get(message.get("tool_call_id", ""), {})
    gist = " ".join(str(call.get("arguments", "")).split())[:80]
    line = f"[{message.get('tool_name') or call.get('name', 'tool')}({gist}): {len(text)} characters, left out]"
    pruned = text.startswith("[") and text.endswith("characters, left out]")
    return {**message, "content": line} if len(line) < len(text) and not pruned else message


def extract(messages: Sequence[Message], chars_max: int) -> str:
    lines: list[str] = []
    for message in messages:
        text = _text(message).strip()
        if text and message.get("role") == "user":
            lines.append(f"User: {' '.join(text.split())[:400]}")
        elif text and message.get("role") == "assistant":
            lines.append(f"You: {text.splitlines()[0][:200]}")
    head, tail = _kept_ends(lines, chars_max, 1)
    return "\n".join([*lines[:head], *lines[tail:]])[:chars_max]


def _kept_ends(texts: Sequence[str], chars_max: int, between: int) -> tuple[int, int]:
    """The end of the head and the start of the tail that fit with `between`; at least two texts are kept."""
    head = tail = (len(texts) + 1) // 2
    count, chars = len(texts), sum(map(len, texts)) + between * len(texts)
    while count > 2 and chars > chars_max:
        if count // 2 < head:
            head -= 1
            chars -= len(texts[head]) + between
        else:
            chars -= len(texts[tail]) + between
            tail += 1
        count -= 1
    return head, tail


def transcript(messages: Sequence[Message], chars_max: int) -> str:
    """The messages as text for a summary; long ones are shortened, then the middle is left out."""
    lines = [f"{m.get('role')}: {_text(m)}{_calls(m)}" for m in messages]
    if sum(map(len, lines)) + 2 * len(lines) > chars_max:
        each = max(200, chars_max // max(1, len(lines)) - 2)
        lines = [t if len(t) <= each else f"{t[: each * 2 // 3 - 4]} […] {t[-(each // 3) :]}" for t in lines]
    head, tail = _kept_ends(lines, chars_max, 2)
    if head < tail:
        head, tail = _kept_ends(lines, chars_max - len(_LEFT_OUT) - 2, 2)
    return "\n\n".join([*lines[:head], *([_LEFT_OUT] if head < tail else []), *lines[tail:]])[:chars_max]


def _calls(message: Message) -> str:
    return "".join(
        f"\n[calls {c['function']['name']}({c['function']['arguments']})]" for c in message.get("tool_calls") or ()
    )


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(p.get("text", "[image]") for p in content if isinstance(p, dict))
    return content or ""


SUMMARY_REQUEST = (
    "Below is a conversation between a user and an assistant that uses tools. Write notes that let the assistant go on "
    "without it. Use these headings: Goal; Decisions; Files and facts; Open ends; Next step. Keep names, paths, numbers "
    "and exact wordings that matter. Leave out pleasantries. Do not answer the user."
)


def joined(plan: Plan, summary: str, todo: str | None, *, foreign: bool = False) -> list[Message]:
    """The conversation with the summary in place of the middle, followed by the todo list. `foreign`: the middle has
    text from outside, and so may the summary."""
    text = f"{FOREIGN_SUMMARY_MARK if foreign else SUMMARY_MARK}\n{summary}"
    if todo:
        text += f"\n\nThe todo list as it stands:\n{todo}"
    note: Message = {"role": "user", "content": text}
    answer: Message = {"role": "assistant", "content": "Understood; I go on from there."}
    tail = plan.tail
    # Roles must alternate on both sides of the note.
    head = plan.head
    if head and head[-1].get("role") == "user":
        head = [*head, {"role": "assistant", "content": "…"}]
    return [*head, note, *([answer] if tail and tail[0].get("role") != "assistant" else []), *tail]
