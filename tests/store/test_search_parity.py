"""The same corpus on SQLite and on PostgreSQL: every query finds the same messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from hermes.store.stores import Store, open_store

from .conftest import create_conversation, empty

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Déjà vu in a café: naïve résumé, Ångström, ñandú.",
    "Die Straße führt über die Brücke; Fußgänger grüßen. STRASSE",
    "日本の台所で料理をする。東京都",
    "我在北京大学学习数据库",
    "ภาษาไทยไม่มีช่องว่าง",
    "한국어 검색은 조사 때문에 어렵다",
    "البحث في النص العربي مع التشكيل: مُحَمَّد",
    "def parse_options(args: list[str]) -> dict: return foo_bar.baz(args[0])",
    "C++ and C# and .NET, node.js v18.2.1, user@example.com, https://example.com/a/b?c=d",
    "Numbers: 3.14 1,000 0x1F 42 2024-05-06 12:30",
    "🎉 party time 👍🏽 emoji",
    "web_search read_file terminal",
    "don't can't it's O'Reilly's",
    'a "quoted phrase" here, and the quoted other phrase',
    "AND OR NOT NEAR are words too",
    "word " * 3300 + "end-of-long-text",
    "x\x00y \ud800 broken",
]
QUERIES = [
    "fox", "FOX", "brown fox", '"brown fox"', '"fox brown"', "quick AND dog", "quick OR kitchen", "fox NOT dog", "fox NOT cat",
    "bro*", "dej*", "cafe", "café", "resume", "RÉSUMÉ", "angstrom", "strasse", "straße", "brucke", "brücke", "grüßen",
    "台所", "日本", "東京", "料理", "北京", "数据库", "数据", "ภาษา", "ไทย", "한국어", "검색", "البحث", "محمد", "العربي",
    "parse_options", "foo_bar", "foo", "baz", "args", "C++", "C#", ".NET", "node.js", "18.2.1", "user@example.com",
    "example.com", "3.14", "42", "1,000", "0x1F", "2024-05-06", "12:30", "🎉", "👍🏽", "party", "web_search", "search",
    "read_file", "don't", "dont", "O'Reilly", '"quoted phrase"', "quoted phrase", "AND", "OR", "NOT", "NEAR", "fox AND",
    "AND fox", "NOT fox", "(fox OR party) AND time", "(fox", "fox)", '"unclosed', "fox*dog", "*", "**", "fox & dog", "fox | dog",
    "!fox", "fox:*", "fox <-> dog", "a:b", "'", "\\", "';--", "^fox", "{fox}", "[fox]", "fox~", "-fox", "+fox", "fo", "f", "fo*",
    "jump", "jumping", "dogs", "foxes", "Straßen", "grüß", "quot", "parties", "resumes", "naiv lazi", "lazy NOT jump",
    "end-of-long-text", "word end", "x\x00y", "\ud800", " ", "fox  dog", "fox\ndog", "quick brown fox jumps over the lazy",
]  # fmt: skip


@pytest.fixture(scope="module")
def stores(postgres_schema: str) -> Iterator[list[Store]]:
    empty(postgres_schema)
    with closing(open_store("sqlite://")) as sqlite, closing(open_store(postgres_schema)) as postgres:
        for store in (sqlite, postgres):
            for number in range(3):
                create_conversation(store.sessions, f"s{number}", *CORPUS[number::3])
        yield [sqlite, postgres]


def search(store: Store, query: str, **options: Any) -> list[Any]:
    try:
        return [(hit["session_id"], hit["id"]) for hit in store.sessions.search_messages(query, limit=100, **options)]
    except ValueError as error:
        return [type(error).__name__]


@pytest.mark.parametrize("query", QUERIES)
def test_query_has_the_same_results_on_both_databases(stores: list[Store], query: str) -> None:
    sqlite, postgres = stores
    assert sorted(search(postgres, query)) == sorted(search(sqlite, query))
    for order in ("newest", "oldest"):
        assert search(postgres, query, sort=order) == search(sqlite, query, sort=order)


def test_corpus_is_searched(stores: list[Store]) -> None:
    for store in stores:
        assert all(search(store, query) for query in ("fox", "cafe", "台所", "ภาษา", "검색", "3.14", "web_search"))
