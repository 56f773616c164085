"""Sessions in words: lines of a list, a transcript, hits of a search, a document to read; and printing them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hermes.cli.output import mask, note
from hermes.cli.table import print_table
from hermes.core.formatting import columns, counted, iso, local, one_line, printable
from hermes.core.json_types import JsonMapping, JsonObject
from hermes.services.session_markdown import call_lines, name_of, speaker, text_of

if TYPE_CHECKING:
    from hermes.core.home import Home

_TIMES = frozenset({"started_at", "last_active", "ended_at", "timestamp", "session_started"})
# The long texts of a session that are told only when everything is asked for.
_LONG = frozenset({"system_prompt", "instructions"})
# The column of a list that holds the name.
_NAME = 1
_CLIPPED_CHARS, _CLIPPED_LINES = 1_000, 12


# ---- printing


def print_sessions(
    args: argparse.Namespace, home: Home, document: object, sessions: Sequence[JsonObject], empty: str = ""
) -> None:
    print_table(args, home, document, _rows(sessions), flexible=_NAME, empty=empty)


def note_sessions(home: Home, sessions: Sequence[JsonObject]) -> None:
    hidden = mask(home)
    note(*(f"  {hidden(line)}" for line in session_lines(sessions)))


def shown(row: JsonMapping, *, full: bool = True) -> JsonObject:
    """A row for a JSON document; without `full`, without prompts."""
    left_out = {"cursor", "score"} if full else {"cursor", "score", *_LONG}
    fields = {name: value for name, value in row.items() if name not in left_out}
    return {name: iso(value) if name in _TIMES else value for name, value in fields.items()}


# ---- lists


def session_lines(sessions: Sequence[JsonMapping], wide: int | None = None) -> list[str]:
    """A line for each, no wider than a terminal of this width."""
    return columns(_rows(sessions), _NAME, wide)


def _rows(sessions: Sequence[JsonMapping]) -> list[list[str]]:
    return [
        [
            session["id"],
            name_of(session),
            session["source"],
            session["model"] or "-",
            counted(session["message_count"], "message"),
            local(session["last_active"]),
            "archived" if session["archived"] else "",
        ]
        for session in sessions
    ]


# ---- one session


def head_lines(session: JsonMapping) -> list[str]:
    ended = f"{local(session['ended_at'])} ({session['end_reason'] or 'no reason'})" if session["ended_at"] else ""
    tokens = f"{session['input_tokens']} in, {session['output_tokens']} out"
    facts = {name: session[name] for name in ("id", "title", "source", "model")}
    facts |= {"folder": session["cwd"], "parent": session["parent_session_id"]}
    facts |= {"started": local(session["started_at"]), "last active": local(session["last_active"]), "ended": ended}
    facts |= {"archived": "yes" if session["archived"] else "", "messages": session["message_count"], "tokens": tokens}
    return [f"{name}: {one_line(str(value))}" for name, value in facts.items() if value not in (None, "")]


def message_lines(message: JsonMapping, *, full: bool) -> Iterator[str]:
    state = "" if message["active"] else ", compacted" if message["compacted"] else ", taken back"
    state = ", for the model only" if message["model_only"] else state
    ours = ", written by Hermes" if message["synthetic"] else ""
    yield f"[{message['id']}] {speaker(message)}, {local(message['timestamp'])}{state}{ours}"
    if full and message["reasoning"]:
        yield from _indented(f"(reasoning) {message['reasoning']}")
    for text in (text_of(message["content"]), *call_lines(message)):
        yield from _indented(text if full else _clipped(text))


def _indented(text: str) -> Iterator[str]:
    for line in printable(text).splitlines():
        yield f"    {line}".rstrip()


def _clipped(text: str) -> str:
    short = "\n".join(text[:_CLIPPED_CHARS].splitlines()[:_CLIPPED_LINES])
    left = len(text) - len(short)
    return f"{short}\n… ({counted(left, 'character')} more)" if left > 1 else text


# ---- search


def hit_lines(hit: JsonMapping) -> Iterator[str]:
    title = f"  {one_line(hit['title'])}" if hit["title"] else ""
    yield f"{one_line(hit['session_id'])}{title}  [{hit['id']}] {speaker(hit)}, {local(hit['timestamp'])}"
    for one in sorted([*hit["context"], hit], key=lambda one: int(one["id"])):
        if one is hit:
            yield f"  > {one_line(hit['snippet'])}"
        else:
            yield f"    {one['role']}: {one_line(one['content'] or '')}".rstrip()
