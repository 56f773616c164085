"""Full-text search: any text becomes a valid query, and the result says whether it is complete."""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, Unpack

from hermes.core.json_types import JsonMapping, JsonObject
from hermes.core.limits import (
    CHOSEN_ROWS_MAX,
    CHOSEN_SESSIONS_MAX,
    COUNT_S_MAX,
    PREFIXES_MAX,
    QUERY_CHARS_MAX,
    QUERY_TERMS_MAX,
    SEARCH_CONTEXT_CHARS,
    SEARCH_S_MAX,
    SEARCHED_CHARS_MAX,
    SNIPPET_TOKENS,
    SORTED_MATCHES_MAX,
)
from hermes.store.codec import clean, spaced, unspaced
from hermes.store.dialect import either, index_hint, like, not_indexed, placeholders
from hermes.store.engine import Record, TimeUp, Tx
from hermes.store.lists import escaped
from hermes.store.repository import Repository, reads_slowly
from hermes.store.rows import TRANSCRIPT
from hermes.store.words import WORD, line_of, ts_phrase

R = TypeVar("R")

_TOKEN = re.compile(r'"([^"]*)"(\*)?|(\()|(\))|([^\s"()]+)')
_OPERATORS = ("AND", "OR", "NOT")
_DEPTH_MAX = 16
_FORMS_CHARS_MIN = 3
_SORTS = ("relevance", "newest", "oldest")
_INDEX = either(
    "messages_fts f JOIN messages m ON m.id = f.rowid",
    "(SELECT ?::tsquery AS query) q JOIN messages m ON m.search @@ q.query",
)
_MATCHING = (
    f"FROM {_INDEX} JOIN sessions s ON s.id = m.session_id WHERE {either('messages_fts MATCH ?', 'TRUE')} {{where}}"
)
_ID = either("f.rowid", "m.id")
_MATCHES = f"SELECT {_ID}, {{score}} {_MATCHING} ORDER BY {{order}} LIMIT ? OFFSET ?"
_COUNT = f"SELECT count(*) {_MATCHING}"
# Lower is better. For few sessions SQLite scores only their rows: `rank` would score all matches first.
_RANK, _RANK_OF_FEW = (either(sqlite, "-ts_rank(m.search, q.query, 1)") for sqlite in ("f.rank", "bm25(messages_fts)"))
_SHOWN = f"""SELECT m.id, m.session_id, m.role, m.timestamp, m.tool_name, s.source, s.title,
  s.started_at AS session_started, coalesce(m.search_text, substr(m.content, 1, {SEARCHED_CHARS_MAX})) AS snippet
FROM messages m JOIN sessions s ON s.id = m.session_id WHERE m.id IN ({{ids}})"""


# Around a word of the query in the text of a match: characters that no text has.
MARKS = ("\x02", "\x03")


class Found(list[JsonObject]):
    """Matches; `complete` is false if the search ran out of time."""

    complete = True


class SessionsSearched(TypedDict, total=False):
    """Which sessions are searched; None means no condition."""

    source: str | None
    owner: str | None
    session_id: str | None


class Search(Repository):
    @reads_slowly
    def search_page(
        self,
        tx: Tx,
        query: str,
        *,
        role: str | None = None,
        limit: int = 20,
        offset: int = 0,
        sort: str = "relevance",
        **filters: Unpack[SessionsSearched],
    ) -> tuple[list[JsonObject], Found, int | None]:
        """Sessions by their titles, then messages: together at most `limit`. Matched words stand between `MARKS`. The
        total is None if counting would take too long."""
        titled, titles = ([], 0) if role else self.search_titles(query, limit=limit, offset=offset, **filters)
        remaining, skipped = limit - len(titled), max(0, offset - titles)
        messages = self.search_messages(
            query, role=role, limit=remaining, offset=skipped, sort=sort, marks=MARKS, **filters
        )
        total = self.count_matches(query, role=role, **filters)
        return titled, messages, None if total is None else titles + total

    @reads_slowly
    def search_messages(
        self,
        tx: Tx,
        query: str,
        source: str | None = None,
        role: str | None = None,
        owner: str | None = None,
        session_key: str | None = None,
        session_id: str | None = None,
        limit: int = 20,
        offset: int = 0,
        sort: str = "relevance",
        include_inactive: bool = False,
        marks: tuple[str, str] = (">>>", "<<<"),
    ) -> Found:
        """Messages that match. Rewound and generated ones are hidden, compacted ones are found."""
        if len(query) > QUERY_CHARS_MAX:
            raise ValueError(f"A query has at most {QUERY_CHARS_MAX} characters; this one has {len(query)}.")
        if sort not in _SORTS:
            raise ValueError(f"`sort` is one of {', '.join(_SORTS)}.")
        if limit <= 0:
            return Found()
        of_sessions = {"source": source, "owner": owner, "session_key": session_key, "id": session_id}
        where, params, few = _conditions(tx, role, include_inactive, of_sessions)

        def find(expression: str, phrases: list[str]) -> Found:
            return _Matches(tx, expression, phrases, where, params, few).page(limit, offset, sort, marks)

        return _run_query(tx, query, find, Found())

    @reads_slowly
    def count_matches(
        self, tx: Tx, query: str, role: str | None = None, **filters: Unpack[SessionsSearched]
    ) -> int | None:
        """The number of matching messages; None if counting would take too long."""
        of_sessions = {name.removeprefix("session_"): value for name, value in filters.items()}
        where, params, _ = _conditions(tx, role, False, of_sessions)
        sql = _COUNT.format(where=where)
        try:
            with tx.within(COUNT_S_MAX):
                return _run_query(tx, query, lambda e, _: int(tx.value(sql, [e, *params])), 0)
        except TimeUp:
            return None

    @reads_slowly
    def search_titles(
        self, tx: Tx, query: str, limit: int = 20, offset: int = 0, **filters: Unpack[SessionsSearched]
    ) -> tuple[list[JsonObject], int]:
        """Sessions with these words in their titles, latest first, and how many there are."""
        where, params = title_condition(query)
        if not where:
            return [], 0
        # The index holds all titles with their owners; the rows themselves hold whole prompts.
        if (owner := filters.get("owner")) is not None:
            where, params = f"{where} AND owner = ?", [*params, owner]
        key, hint = either("rowid", "id"), index_hint("sessions_title")
        where = f"{key} IN (SELECT {key} FROM sessions {hint} WHERE title IS NOT NULL AND {where})"
        for name, value in (("source", filters.get("source")), ("id", filters.get("session_id"))):
            if value is not None:
                where += f" AND {not_indexed(name)} = ?"
                params.append(value)
        count = int(tx.value(f"SELECT count(*) FROM sessions WHERE {where}", params))
        order = f"{not_indexed('last_active')} DESC, id DESC"
        sql = f"SELECT id, title, source, last_active FROM sessions WHERE {where} ORDER BY {order}"
        return [dict(row) for row in tx.rows(f"{sql} LIMIT ? OFFSET ?", [*params, limit, offset])], count


def _conditions(
    tx: Tx, role: str | None, include_inactive: bool, of_sessions: Mapping[str, object]
) -> tuple[str, list[Any], bool]:
    """The conditions on matches, their values, and whether they leave only few messages."""
    where = "" if include_inactive else " AND (m.active OR m.compacted)"
    params: list[Any] = []
    few = False
    if role is not None:
        where += " AND m.role = ?"
        params.append(role)
    chosen = {name: value for name, value in of_sessions.items() if value is not None}
    if chosen:
        sql = " AND ".join(f"s.{name} = ?" for name in chosen)
        if few := _is_small(tx, sql, chosen):
            sql = f"{either('+f.rowid', 'm.id')} IN (SELECT m.id FROM sessions s JOIN messages m ON m.session_id = s.id WHERE {sql})"
        where += f" AND {sql}"
        params += chosen.values()
    return where, params, few


def _run_query(tx: Tx, query: str, ask: Callable[[str, list[str]], R], nothing: R) -> R:
    """The answer to a query, or to its plain words if it is too complex for the index; with the phrases to
    highlight."""
    expression = fts_query(query)
    if tx.backend == "postgres":
        return ask(ts, phrases_of(expression)) if (ts := ts_query(query)) else nothing
    if not expression:
        return nothing
    try:
        return ask(expression, phrases_of(expression))
    except sqlite3.OperationalError as error:
        if "fts5" not in str(error):
            raise
        plain = plain_query(query)
        return ask(plain, phrases_of(plain))


def _is_small(tx: Tx, condition: str, values: JsonMapping) -> bool:
    """Whether the chosen sessions are so small that it is quicker to start with them."""
    sessions = f"SELECT s.message_count AS held FROM sessions s WHERE {condition} LIMIT {CHOSEN_SESSIONS_MAX + 1}"
    count, message_count = tx.rows(f"SELECT count(*), sum(held) FROM ({sessions}) AS chosen", list(values.values()))[0]
    return count <= CHOSEN_SESSIONS_MAX and (message_count or 0) <= CHOSEN_ROWS_MAX


Ids = list[tuple[int, float | None]]


@dataclass(slots=True)
class _Matches:
    """The messages that match an index expression and further conditions."""

    tx: Tx
    expression: str
    phrases: list[str]
    where: str
    params: Sequence[Any]
    few: bool

    def page(self, limit: int, offset: int, sort: str, marks: tuple[str, str]) -> Found:
        ids, complete = self._ordered(limit, offset, sort)
        results = Found()
        if not ids:
            results.complete = complete
            return results
        matched = self.tx.rows(_SHOWN.format(ids=placeholders(ids)), [message_id for message_id, _ in ids])
        rows = {row["id"]: row for row in matched}
        for message_id, score in ids:
            if (row := rows.get(message_id)) is not None:
                text = excerpt((row["snippet"] or "", row["tool_name"] or ""), self.phrases, marks)
                match = dict(row) | {"snippet": unspaced(text), "score": score}
                results.append(match | {"context": _context(self.tx, row["session_id"], message_id)})
        results.complete = complete and len(results) == len(ids)
        return results

    def _ordered(self, limit: int, offset: int, sort: str) -> tuple[Ids, bool]:
        """The matches of a page, and whether there was time to find the right ones."""
        seconds, complete = SEARCH_S_MAX, True
        if sort == "relevance":
            # Ranking reads every match before it returns the first; the newest matches come at once.
            order = _RANK_OF_FEW if self.few else _RANK
            ids, complete = self._gather(limit, offset, order, seconds * 0.8)
            if complete:
                return ids, True
            sort, seconds = "newest", seconds * 0.1
        order = f"{_ID} DESC" if sort == "newest" else f"{_ID} ASC"
        # Imported messages are older than their ids: few matches are sorted by time.
        few, whole = self._gather(SORTED_MATCHES_MAX + 1, 0, order, seconds)
        if whole and len(few) <= SORTED_MATCHES_MAX:
            if not few:
                return [], complete
            sql = f"SELECT id, timestamp FROM messages WHERE id IN ({placeholders(few)})"
            times = {row[0]: row[1] for row in self.tx.rows(sql, [match[0] for match in few])}
            few.sort(key=lambda match: (times[match[0]], match[0]), reverse=sort == "newest")
            return few[offset : offset + limit], complete
        if offset + limit > len(few):
            few, whole = self._gather(offset + limit, 0, order, seconds)
        return few[offset : offset + limit], complete and whole

    def _gather(self, limit: int, offset: int, order: str, seconds: float) -> tuple[Ids, bool]:
        """Matches in an order. False: the time ran out."""
        ids: Ids = []
        score = "NULL" if order.startswith(_ID) else f"-({order})"
        try:
            with self.tx.within(seconds):
                ties = "" if order.startswith(_ID) else either("", ", m.id")
                sql = _MATCHES.format(score=score, where=self.where, order=order + ties)
                for row in self.tx.each(sql, [self.expression, *self.params, limit, offset]):
                    ids.append((row[0], row[1]))
        except TimeUp:
            return ids, False
        return ids, True


def _context(tx: Tx, session_id: str, message_id: int) -> list[JsonObject]:
    sql = (
        "SELECT id, role, substr(content, 1, ?) AS content FROM messages WHERE session_id = ? AND id {sign} ? "
        f"AND {TRANSCRIPT} ORDER BY id {{order}} LIMIT 1"
    )
    near: list[Record | None] = []
    for sign, order in (("<", "DESC"), (">", "ASC")):
        near.append(tx.row(sql.format(sign=sign, order=order), (SEARCH_CONTEXT_CHARS, session_id, message_id)))
    return [dict(row) for row in near if row is not None]


# --- what is shown of a match. Pure. ---------------------------------------------------------------------------------

# FTS5's `snippet` compares every hit with every other one, and cannot be interrupted.
_TERM = re.compile(r'"((?:[^"]|"")*+)"( \*)?')


def phrases_of(expression: str) -> list[str]:
    """The phrases of a query as they appear in a line of words."""
    lines = ((line_of(WORD.finditer(term[1])), term[2]) for term in _TERM.finditer(expression))
    return list(dict.fromkeys(line[:-1] if prefix else line for line, prefix in lines if line.strip()))


def excerpt(texts: Sequence[str], phrases: Sequence[str], marks: tuple[str, str]) -> str:
    """A part of the first text with hits, with marks around them; without hits the beginning of the first text."""
    for text in texts:
        words = list(WORD.finditer(text))
        line = line_of(words)
        firsts = {position: phrase for phrase in phrases if (position := line.find(phrase)) >= 0}
        if firsts:
            windows = [
                _window(line.count(" ", 0, position), phrase, len(words)) for position, phrase in sorted(firsts.items())
            ]
            lines = [line_of(words[start:end]) for start, end in windows]
            counts = [sum(phrase in line for phrase in phrases) for line in lines]
            best = counts.index(max(counts))
            return _marked(text, words, windows[best], _hits(lines[best], phrases), marks)
    words = list(WORD.finditer(texts[0]))
    return _marked(texts[0], words, (0, min(SNIPPET_TOKENS, len(words))), [], marks)


def _window(first: int, phrase: str, count: int) -> tuple[int, int]:
    length = max(SNIPPET_TOKENS, len(phrase.split()))
    before = (length - len(phrase.split())) // 2
    start = max(0, min(first - before, count - length))
    return start, min(start + length, count)


def _hits(line: str, phrases: Sequence[str]) -> list[tuple[int, int]]:
    """The ranges of words that are hits."""
    hits: list[tuple[int, int]] = []
    for phrase in phrases:
        length, position = len(phrase.split()), -1
        while (position := line.find(phrase, position + 1)) >= 0:
            first = line.count(" ", 0, position)
            hits.append((first, first + length))
    isolated: list[tuple[int, int]] = []
    for first, end in sorted(hits):
        if isolated and first < isolated[-1][1]:
            isolated[-1] = (isolated[-1][0], max(end, isolated[-1][1]))
        else:
            isolated.append((first, end))
    return isolated


def _marked(
    text: str,
    words: Sequence[re.Match[str]],
    window: tuple[int, int],
    hits: Sequence[tuple[int, int]],
    marks: tuple[str, str],
) -> str:
    start, end = window
    at = words[start].start() if start else 0
    out = ["…"] if start else []
    for first, after in hits:
        begin, stop = words[start + first].start(), words[start + after - 1].end()
        out += (text[at:begin], marks[0], text[begin:stop], marks[1])
        at = stop
    out += (text[at : words[end - 1].end()], "…") if end < len(words) else (text[at:],)
    return "".join(out)


# --- from what is typed to a query. Pure. ----------------------------------------------------------------------------


@dataclass
class _Group:
    """Terms, operators and groups between a pair of brackets."""

    items: list[str | _Group] = field(default_factory=list)


def fts_query(text: str) -> str:
    """Phrases, AND, OR, NOT, brackets and prefixes in the syntax of FTS5; what is invalid is left out."""
    return _render(_parse(text)) or plain_query(text)


def ts_query(text: str) -> str:
    """The query in the syntax of `tsquery`."""

    def phrase(term: str) -> str:
        return ts_phrase(_unquoted(term), prefix=term.endswith(" *"))

    operators = {"": "&", "AND": "&", "OR": "|", "NOT": "& !"}
    return _render(_parse(text), phrase, operators) or " & ".join(
        filter(None, (phrase(term) for term in plain_query(text).split(" AND ")))
    )


def title_condition(text: str) -> tuple[str, list[Any]]:
    """The query as a condition on titles, each word anywhere; empty if there is no word."""
    params: list[Any] = []

    def has_word(term: str) -> str:
        params.append(f"%{escaped(_bare(term))}%")
        return like("title")

    sql = _render(_parse(text), has_word, {"NOT": "AND NOT"})
    return f"({sql})" if sql else "", params


def words_of(text: str) -> list[str]:
    terms: list[str] = []
    _render(_parse(text), lambda term: terms.append(_bare(term)) or term)  # type: ignore[func-returns-value]
    return terms


def _bare(term: str) -> str:
    return unspaced(_unquoted(term))


def _unquoted(term: str) -> str:
    return term.removesuffix(" *")[1:-1].replace('""', '"')


def _parse(text: str) -> _Group:
    top = _Group()
    open_groups = [top]
    prefixes = terms = 0
    tokens = _TOKEN.findall(clean(text))
    # Frequent words are short: of many words, only the longest are searched with other endings.
    simple = {word for *_, word in tokens if word not in _OPERATORS and _has_forms(word)}
    inflected = set(sorted(simple, key=lambda word: (-len(word), word))[:PREFIXES_MAX])
    for quoted, starred, opens, closes, word in tokens:
        group = open_groups[-1]
        if opens:
            if len(open_groups) < _DEPTH_MAX:
                inner = _Group()
                group.items.append(inner)
                open_groups.append(inner)
        elif closes:
            if len(open_groups) > 1:
                open_groups.pop()
        elif word in _OPERATORS:
            group.items.append(word)
        else:
            # Few prefixes, and none of one letter: each is looked up in all words that begin with it.
            plain = quoted or word.rstrip("*")
            prefix = bool(starred or word.endswith("*")) and len(plain) > 1 and prefixes < PREFIXES_MAX
            prefixes += prefix
            # An excluded word is taken literally.
            if word in inflected and group.items[-1:] != ["NOT"]:
                plain, prefix = _stem(word), True
            term = _term(plain, prefix)
            # Each term is looked up and counted in every match, so repeated ones are dropped.
            again = term in group.items and not any(item in _OPERATORS for item in group.items)
            if term and not again and terms < QUERY_TERMS_MAX:
                terms += 1
                group.items.append(term)
    return top


def _has_forms(word: str) -> bool:
    """Whether a word is searched with all endings: letters only, in a script with spaces between words."""
    return len(word) >= _FORMS_CHARS_MIN and word.isalpha() and spaced(word) == word


def _stem(word: str) -> str:
    """The word without a plural ending, so that each form finds the other."""
    has_plural = len(word) > _FORMS_CHARS_MIN and word[-1] in "sS" and word[-2] not in "sSuUiI"
    return word[:-1] if has_plural else word


def plain_query(text: str) -> str:
    words = [_term(word.strip('"()*'), False) for word in clean(text).split()]
    return " AND ".join(list(dict.fromkeys(word for word in words if word))[:QUERY_TERMS_MAX])


def _term(text: str, prefix: bool) -> str:
    """A quoted word or phrase; empty if nothing in it is indexed."""
    if not any(unicodedata.category(char)[0] in "LN" or unicodedata.category(char) == "Co" for char in text):
        return ""
    quoted = spaced(text).replace('"', '""')
    return f'"{quoted}" *' if prefix else f'"{quoted}"'


def _render(
    group: _Group, render: Callable[[str], str] = str, operators: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Operators without two operands are left out; adjacent operands are joined by AND."""
    out: list[str] = []
    operator = ""
    for item in group.items:
        if isinstance(item, str) and item in _OPERATORS:
            operator = item
            continue
        operand = render(item) if isinstance(item, str) else _render(item, render, operators)
        if not operand:
            continue
        if out:
            out.append(operators.get(operator, operator) or "AND")
        out.append(operand if isinstance(item, str) else f"({operand})")
        operator = ""
    return " ".join(out)
