"""Words are found in every script, whatever the syntax of the query, and the index stays small."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.core.limits import QUERY_TERMS_MAX
from hermes.store.search import fts_query
from hermes.store.sessions import SessionDB
from hermes.store.stores import open_store

from .conftest import call, create_conversation, raw

FRUIT = "the apple and the pear, or not: near body and tool content"

KEYS = {
    "id",
    "session_id",
    "role",
    "snippet",
    "timestamp",
    "tool_name",
    "source",
    "title",
    "session_started",
    "context",
}


def hits(db: SessionDB, query: str, **options: Any) -> list[int]:
    return [row["id"] for row in db.search_messages(query, **options)]


def matching_contents(db: SessionDB, query: str, **options: Any) -> set[str]:
    """The contents of the rows that a query finds."""
    ids = set(hits(db, query, limit=100, **options))
    sessions = {row["session_id"] for row in db.search_messages(query, limit=100, **options)}
    return {row["content"] for s in sessions for row in db.get_messages(s, include_inactive=True) if row["id"] in ids}


@pytest.fixture(scope="module")
def fruit() -> Iterator[SessionDB]:
    """A store that holds one sentence, and one that has nothing to do with it."""
    db = SessionDB(":memory:")
    create_conversation(db, "s", FRUIT, "unrelated words here")
    yield db
    db.close()


# ---- words and syntax


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("apple", "ab"),
        ("APPLE", "ab"),
        ("apple pear", "a"),
        ("pear apple", "a"),
        ('"apple pear"', ""),
        ('"apple and pear"', "a"),
        ("apple AND plum", "b"),
        ("pear OR fig", "ac"),
        ("apple NOT plum", "a"),
        ("plum OR fig AND tart", "bc"),
        ("app*", "ab"),
        ("ap* plu*", "b"),
        ('"fig tart"*', "c"),
        ("fig-tart", "c"),
        ("tart-fig", ""),
        ("v1.2.3", "c"),
        ("x@example.com", "c"),
        ("config.yaml", "c"),
        ("can't", "c"),
        ("C++", "c"),
        ("appl", "ab"),
        ("apples", "ab"),
        ('"appl"', ""),
        ('"apples"', ""),
        ("apple NOT plu", "ab"),
        ("pear OR figs", "ac"),
        ("exampl", "c"),
        ("ap", ""),
        ("nothing", ""),
        ("", ""),
        ("   ", ""),
    ],
)
def test_search_words_phrases_operators_and_prefixes(db: SessionDB, query: str, expected: str) -> None:
    texts = {
        "a": "an apple and pear",
        "b": "apple, plum",
        "c": "a fig-tart of v1.2.3 for x@example.com; we can't open config.yaml in C++",
    }
    create_conversation(db, "s", *texts.values())
    answer = db.search_messages(query)
    assert answer.complete is True
    assert matching_contents(db, query) == {texts[letter] for letter in expected}


BROKEN = [
    "apple AND",
    "AND apple",
    "apple OR",
    "OR apple",
    "OR",
    "AND",
    "NOT",
    "apple AND AND pear",
    "apple OR AND pear",
    '"apple',
    'apple"',
    'apple "and the',
    '"""apple',
    "(apple",
    "apple)",
    "((apple) pear",
    "apple ()",
    "() apple",
    "apple *",
    "* apple",
    "apple **",
    "^apple",
    "apple ^ pear",
    "apple + pear",
    "pear + apple",
    "body: apple",
    "tool: apple",
    "content : apple",
    "{body tool}: apple",
    "- body : apple",
    "-apple",
    "+apple",
    "NEAR(apple",
    "NEAR(apple content)",
    "apple NEAR pear",
    "apple,",
    "apple;",
    "'apple'",
    "apple -- pear",
    "apple\\",
    "[apple]",
    "<apple>",
    "apple\x00",
    "apple\ud800",
    "apple \u200b pear",
    "apple\tpear\r\n",
    "apple?!",
    "$apple",
    "not apple",
    "apple | pear",
    "apple & pear",
    "«apple»",
    "apple…",
]


@pytest.mark.parametrize("query", BROKEN)
def test_invalid_search_syntax_is_read_as_plain_words(fruit: SessionDB, query: str) -> None:
    answer = fruit.search_messages(query)
    assert ([row["session_id"] for row in answer], answer.complete) == (["s"], True)


WORDS = ["apple", "pear", "and", "near"]
SIGNS = ["AND", "OR", "NEAR", "(", ")", "*", "^", "+", "-", ":", "{", "}", ",", "body:", "tool :", "'", ";", "\\", "/"]


@given(st.lists(st.sampled_from(WORDS + SIGNS), max_size=12), st.sampled_from(WORDS), st.integers(0, 12))
def test_search_ignores_punctuation_between_words(fruit: SessionDB, soup: list[str], word: str, at: int) -> None:
    assert len(fruit.search_messages(" ".join([*soup[:at], word, *soup[at:]]))) == 1


pieces = st.sampled_from(
    [*WORDS, *SIGNS, '"', "NOT", "**", "日本", "é", "\x00", "\ud800", "\u200b", " ", "123", "%", "👍"]
)


@given(st.one_of(st.text(max_size=60), st.lists(pieces, max_size=20).map("".join), st.lists(pieces).map(" ".join)))
def test_no_search_query_is_an_error(fruit: SessionDB, query: str) -> None:
    answer = fruit.search_messages(query[:2048])
    assert isinstance(answer, list)
    assert answer.complete is True


@pytest.mark.parametrize("query", ["x " * 1024, "(" * 2048, '"' * 2048, "a OR " * 409 + "a", "NOT " * 512, "日" * 2048])
def test_longest_search_queries_are_answered(fruit: SessionDB, query: str) -> None:
    assert isinstance(fruit.search_messages(query), list)


def test_too_long_search_query_is_rejected(fruit: SessionDB) -> None:
    with pytest.raises(ValueError, match=r"2,?048"):
        fruit.search_messages("x" * 2049)


# ---- scripts


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Un café à Zürich", "cafe"),
        ("Un cafe a Zurich", "café"),
        ("Un café à Zürich", "ZURICH"),
        ("cafe\u0301 noir", "café"),
        ("Żółć naïve Ångström", "angstrom"),
        ("Привет, мир", "привет"),
        ("Привет, мир", "МИР"),
        ("Καλημέρα κόσμε", "κόσμε"),
        ("مرحبا بالعالم", "بالعالم"),
        ("שלום עולם", "שלום"),
        ("สวัสดี ครับ", "สวัสดี"),
        ("ภาษา ไทย ง่าย", "ไทย"),
        ("สวัสดีครับ", "ครับ"),
        ("नमस्ते दुनिया", "दुनिया"),
        ("Xin chào thế giới", "thế giới"),
        ("我今天在北京大学学习机器学习", "我"),
        ("我今天在北京大学学习机器学习", "北京"),
        ("我今天在北京大学学习机器学习", "京大"),
        ("我今天在北京大学学习机器学习", "机器学习"),
        ("我今天在北京大学学习机器学习", "我今天在北京大学学习机器学习"),
        ("我今天在北京大学学习机器学习", "北京 机器"),
        ("我今天在北京大学学习机器学习", '"大学学习"'),
        ("我今天在北京大学学习机器学习", "北京 OR apple"),
        ("我今天在北京大学学习机器学习", "北京 NOT apple"),
        ("東京タワーへ行きました", "東京"),
        ("東京タワーへ行きました", "タワー"),
        ("東京タワーへ行きました", "行きました"),
        ("안녕하세요 세계", "안녕하세요"),
        ("안녕하세요 세계", "안녕"),
        ("안녕하세요 세계", "계"),
        ("𠀋と𠮷野家", "𠮷"),
        ("Pythonで書く", "Python"),
        ("Pythonで書く", "python"),
        ("Pythonで書く", "Pyth*"),
        ("Pythonで書く", "書く"),
        ("Pythonで書く", "Pythonで書く"),
        ("版本2.0发布", "2.0"),
        ("版本2.0发布", "发布"),
        ("用café写作", "cafe"),
    ],
)
def test_search_finds_words_in_every_script(db: SessionDB, text: str, query: str) -> None:
    create_conversation(db, "s", text, "something else")
    assert matching_contents(db, query) == {text}


@pytest.mark.parametrize("query", ["北习", "学大", "器机", '"北京机器"', "日", "北京 NOT 大学", "北京 AND 东京"])
def test_search_requires_adjacent_cjk_characters(db: SessionDB, query: str) -> None:
    create_conversation(db, "s", "我今天在北京大学学习机器学习")
    assert hits(db, query) == []


@pytest.mark.parametrize(
    ("text", "query", "marked"),
    [
        ("an apple a day", "apple", ">>>apple<<<"),
        ("Un café noir", "cafe", ">>>café<<<"),
        ("我在北京大学学习", "京", "我在北>>>京<<<大学学习"),
        ("我在北京大学学习", "北京", "我在>>>北京<<<大学学习"),
        ("我在北京大学学习", "大学学习", ">>>大学学习<<<"),
        ("Pythonで書く", "Python", ">>>Python<<<で書く"),
        ("Привет, мир", "мир", ">>>мир<<<"),
    ],
)
def test_snippet_marks_match(db: SessionDB, text: str, query: str, marked: str) -> None:
    create_conversation(db, "s", text)
    [row] = db.search_messages(query)
    assert marked in row["snippet"]
    assert "\u200b" not in row["snippet"]


def test_snippet_of_long_text_is_short_and_shows_match(db: SessionDB) -> None:
    create_conversation(
        db, "s", "filler words " * 600 + "apple" + " more filler" * 600, "填充" * 2000 + "苹果" + "更多" * 2000
    )
    snippets = [db.search_messages(query)[0]["snippet"] for query in ("apple", "苹果")]
    assert [">>>apple<<<" in snippets[0], ">>>苹果<<<" in snippets[1]] == [True, True]
    assert max(map(len, snippets)) < 1000


LONG = "filler " * 100


@pytest.mark.parametrize(
    ("text", "query", "snippet"),
    [
        ("an apple a day", "a apple", "an >>>apple<<< >>>a<<< day"),
        ("apple apple", "apple apple", ">>>apple<<< >>>apple<<<"),
        ("an apple, a pear", '"apple a" "a pear"', "an >>>apple, a pear<<<"),
        ("(an) Apples!", "app*", "(an) >>>Apples<<<!"),
        ("cafe\u0301 noir", "café", ">>>cafe\u0301<<< noir"),
        (f"{LONG}apple", "apple", "…" + "filler " * 31 + ">>>apple<<<"),
        (f"apple {LONG}", "apple", ">>>apple<<< " + ("filler " * 31).rstrip() + "…"),
        (f"apple {LONG}pear apple", "apple pear", "…" + "filler " * 30 + ">>>pear<<< >>>apple<<<"),
        (f"{LONG}not here", "NOT", "…" + "filler " * 30 + ">>>not<<< here"),
    ],
)
def test_snippet_shows_densest_match(db: SessionDB, text: str, query: str, snippet: str) -> None:
    create_conversation(db, "s", text)
    assert [row["snippet"] for row in db.search_messages(query)] == [snippet]


def test_snippet_shows_tool_name_if_only_that_matched(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.append_message("s", "tool", "result", tool_call_id="c", tool_name="web_search")
    assert db.search_messages("search")[0]["snippet"] == "web_>>>search<<<"


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        (" ".join(f"w{n}" for n in range(50)), QUERY_TERMS_MAX),
        (" OR ".join(f"w{n}" for n in range(50)), QUERY_TERMS_MAX),
        ("w0 " * 50 + "w1", 2),
        ("w0 OR w0 " * 50, QUERY_TERMS_MAX),
    ],
)
def test_search_query_terms_are_limited(db: SessionDB, query: str, terms: int) -> None:
    [id] = create_conversation(db, "s", " ".join(f"w{n}" for n in range(QUERY_TERMS_MAX)))
    assert (hits(db, query), fts_query(query).count('"')) == ([id], 2 * terms)


# ---- what is looked at


def test_search_hit_fields(db: SessionDB) -> None:
    db.create_session("s", "cron", title="Plans")
    id = db.append_message("s", "tool", "an apple", tool_call_id="c", tool_name="market", timestamp=1000.5)
    [row] = db.search_messages("apple")
    assert row.keys() >= KEYS
    assert [row[key] for key in ("id", "session_id", "role", "timestamp", "tool_name", "source", "title")] == [
        *[id, "s", "tool", 1000.5, "market", "cron", "Plans"]
    ]
    assert row["session_started"] == db.get_session("s")["started_at"]


def test_search_finds_tool_by_name(db: SessionDB) -> None:
    db.create_session("s", "cli")
    id = db.append_message("s", "tool", "result", tool_call_id="c", tool_name="web_search")
    assert (hits(db, "web_search"), hits(db, "web")) == ([id], [id])


def test_search_finds_text_parts_but_not_data(db: SessionDB) -> None:
    url = "data:image/png;base64," + "QUJD" * 3000
    [id] = create_conversation(
        db, "s", [{"type": "text", "text": "an apple"}, {"type": "image_url", "image_url": {"url": url}}]
    )
    assert (hits(db, "apple"), hits(db, "QUJD*"), hits(db, "base64")) == ([id], [], [])


@pytest.mark.parametrize("filler", ["word ", "字"])
def test_search_indexes_first_16384_characters(db: SessionDB, filler: str) -> None:
    head = filler * (16_000 // len(filler))
    [id] = create_conversation(db, "s", f"{head} apple {filler * 1000} pear")
    assert (hits(db, "apple"), hits(db, "pear")) == ([id], [])


def test_search_hides_rewound_rows_by_default(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "apple one", "two", "apple three")
    db.rewind_to_message("s", ids[2])
    assert (hits(db, "apple"), sorted(hits(db, "apple", include_inactive=True))) == ([ids[0]], [ids[0], ids[2]])


def test_search_never_finds_synthetic_rows(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.append_message("s", "assistant", "[apple 苹果]", synthetic=True)
    assert (hits(db, "apple"), hits(db, "苹果"), hits(db, "apple", include_inactive=True)) == ([], [], [])


def test_search_finds_compacted_rows_once(db: SessionDB) -> None:
    ids = create_conversation(db, "s", "an apple", "东京 pear")
    for _ in range(2):
        db.archive_and_compact("s", [{"role": "user", "content": "summary"}])
    assert (hits(db, "apple"), hits(db, "东京")) == ([ids[0]], [ids[1]])


def test_search_finds_rows_retained_by_compaction_once(db: SessionDB) -> None:
    create_conversation(db, "s", "old", "news", "an apple", "东京 pear")
    messages = [{"role": "user", "content": "an apple"}, {"role": "assistant", "content": "东京 pear"}]
    for _ in range(2):
        db.archive_and_compact("s", [{"role": "user", "content": "summary"}, *messages])
    assert [len(hits(db, query)) for query in ("apple", "东京", "pear", "news")] == [1, 1, 1, 1]


def test_search_hides_rows_rewound_after_compaction(db: SessionDB) -> None:
    create_conversation(db, "s", "old", "news", "an apple", "pear")
    messages = [{"role": "user", "content": "an apple"}, {"role": "assistant", "content": "pear"}]
    db.archive_and_compact("s", [{"role": "user", "content": "summary"}, *messages])
    db.rewind_to_message("s", db.get_messages("s")[2]["id"])
    assert [len(hits(db, query)) for query in ("apple", "pear", "news")] == [0, 0, 1]


def test_search_ignores_api_content_and_reasoning(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.append_message("s", "user", "pear", api_content="apple", reasoning="apple")
    assert hits(db, "apple") == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "abcdt"),
        ({"source": "cron"}, "b"),
        ({"role": "user"}, "abcd"),
        ({"role": "tool"}, "t"),
        ({"owner": "alice"}, "c"),
        ({"owner": "default"}, "abdt"),
        ({"session_key": "k"}, "d"),
        ({"session_id": "A"}, "at"),
        ({"session_id": "A", "role": "user"}, "a"),
        ({"session_id": "none"}, ""),
    ],
)
@pytest.mark.parametrize("word", ["apple", "苹果"])
def test_search_filters(db: SessionDB, word: str, options: dict[str, Any], expected: str) -> None:
    create_conversation(db, "A", f"{word} a")
    db.append_message("A", "tool", f"{word} t", tool_call_id="c", tool_name="x")
    create_conversation(db, "B", f"{word} b", source="cron")
    create_conversation(db, "C", f"{word} c", owner="alice")
    create_conversation(db, "D", f"{word} d", session_key="k")
    assert sorted(text[-1] for text in matching_contents(db, word, **options)) == sorted(expected)


# ---- order and pages


def test_search_sort_newest_oldest_relevance(db: SessionDB) -> None:
    db.create_session("s", "cli")
    texts = {"apple " * 5: 3000.0, "apple " + "filler words " * 80: 1000.0, "an apple in words": 2000.0}
    best, old, middle = [db.append_message("s", "user", text, timestamp=at) for text, at in texts.items()]
    assert hits(db, "apple", sort="newest") == [best, middle, old]
    assert hits(db, "apple", sort="oldest") == [old, middle, best]
    assert (hits(db, "apple")[0], hits(db, "apple")[-1]) == (best, old)


def test_unknown_search_sort_is_rejected(fruit: SessionDB) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        fruit.search_messages("apple", sort="random()")


@pytest.mark.parametrize("sort", ["relevance", "newest", "oldest"])
def test_search_pagination_has_no_gap_or_repetition(db: SessionDB, sort: str) -> None:
    ids = create_conversation(db, "s", *[f"apple number {n}" for n in range(25)])
    assert len(hits(db, "apple", sort=sort)) == 20
    paged = [id for offset in range(0, 28, 4) for id in hits(db, "apple", sort=sort, limit=4, offset=offset)]
    assert (paged, sorted(paged)) == (hits(db, "apple", sort=sort, limit=100), ids)


# ---- context


def test_search_hit_context_is_truncated(db: SessionDB) -> None:
    db.create_session("s", "cli")
    db.create_session("other", "cli")
    for text in ("f" * 500, "b" * 500, "apple", "n" * 500, "g" * 500):
        db.append_message("s", "user", text)
        db.append_message("other", "user", "o" * 500)
    context = json.dumps(db.search_messages("apple")[0]["context"])
    assert ["b" * 200 in context, "b" * 201 in context] == [True, False]
    assert ["n" * 200 in context, "n" * 201 in context] == [True, False]
    assert ["fff" in context, "ggg" in context, "ooo" in context] == [False, False, False]


def test_search_hit_context_in_other_scripts(db: SessionDB) -> None:
    create_conversation(db, "s", "北京大学", "apple", "东京")
    context = json.dumps(db.search_messages("apple")[0]["context"], ensure_ascii=False)
    assert ["北京大学" in context, "东京" in context] == [True, True]


# ---- the index


def test_latin_text_is_not_copied_for_index(file_db: SessionDB) -> None:
    create_conversation(file_db, "s", "plain", "Un café à Zürich", "Привет, мир", "مرحبا", "e\u0301 👍 “quoted” – …")
    assert raw(file_db, "select count(*) from messages where search_text is not null") == [(0,)]


def test_index_copy_of_cjk_text_is_limited(file_db: SessionDB) -> None:
    create_conversation(file_db, "s", "字" * 40_000, "字 and Latin")
    copies = [text.replace("\u200b", "") for [text] in raw(file_db, "select search_text from messages order by id")]
    assert [len(text) for text in copies] == [16_384, 11]


def test_index_is_consistent_after_every_change(file_db: SessionDB, tmp_path: Path) -> None:
    db = file_db
    ids = create_conversation(
        db, "s", "apple", "北京 pear", [{"type": "text", "text": "plum 苹果"}], "fig", "kiwi", "lime"
    )
    db.append_message("s", "assistant", None, tool_calls=[call("c")])
    db.append_message("s", "tool", "x" * 20_000, tool_call_id="c", tool_name="clock")
    db.append_message("s", "assistant", "[东京]", synthetic=True)
    db.fork_session("s", "f", at_message_id=ids[2])
    db.rewind_to_message("s", ids[4])
    db.archive_and_compact("s", [{"role": "user", "content": "summary 北"}])
    create_conversation(db, "gone", "北京", "words")
    db.delete_session("gone")
    db.import_sessions([db.export_session("f") | {"id": "again"}])
    db.optimize()
    db.backup(tmp_path / "copy.db")
    with closing(sqlite3.connect(tmp_path / "copy.db", isolation_level=None)) as copy:
        copy.execute("insert into messages_fts (messages_fts, rank) values ('integrity-check', 1)")
    assert db.check(deep=True) == []


def latin_texts(count: int) -> list[str]:
    """Messages as people write them: a few words often, many words seldom."""
    chance = random.Random(7)
    syllables = ["ka", "ri", "to", "men", "sa", "lo", "ver", "in", "del", "po", "u", "stra", "ne", "ing", "er", "ly"]
    words = {"".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(12_000)}
    vocabulary = sorted(words, key=lambda word: (len(word), word))
    weights = list(accumulate(1 / (rank + 2) for rank in range(len(vocabulary))))
    lengths = [8, 20, 40, 60, 120]
    return [" ".join(chance.choices(vocabulary, cum_weights=weights, k=chance.choice(lengths))) for _ in range(count)]


def test_index_size_of_latin_text_is_bounded(tmp_path: Path) -> None:
    texts = latin_texts(20_000)
    store = open_store(f"sqlite://{tmp_path / 'state.db'}")

    def write() -> None:
        for n in range(200):
            create_conversation(store.sessions, f"s{n}", *texts[n * 100 : n * 100 + 100])

    store.transaction(write)
    store.sessions.backup(tmp_path / "copy.db")
    store.close()
    indexed = (tmp_path / "copy.db").stat().st_size
    with closing(sqlite3.connect(tmp_path / "copy.db", isolation_level=None)) as copy:
        assert copy.execute("select count(*) from messages").fetchone() == (20_000,)
        copy.execute("drop table messages_fts")
        copy.execute("vacuum")
    assert indexed <= 1.7 * (tmp_path / "copy.db").stat().st_size


def test_fts_prefix_terms_are_limited() -> None:
    query = fts_query("a* bc* de* fg* hi* jk*")
    assert query.count("*") == 4 and '"a" AND' in query
