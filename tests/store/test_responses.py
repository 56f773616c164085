"""Stored responses: an equal dict back, the least recently used goes first, and a history costs what is new in it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hermes.store.responses import ResponseStore
from hermes.store.stores import Async, Store, open_store

from .conftest import BACKENDS
from .tools import Json, at_once, contents, look, mode, raw, run, side, umask


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "response_store.db"


Open = Callable[[int], ResponseStore]


@pytest.fixture(params=BACKENDS)
def open_any(request: pytest.FixtureRequest, path: Path) -> Open:
    """Opens a store of so many responses."""
    if request.param == "postgres":
        store: Store = request.getfixturevalue("postgres_store")
        return lambda max_size: store.make_responses(max_size, 30.0)
    place = str(path) if request.param == "file" else None
    return lambda max_size: ResponseStore(max_size=max_size, db_path=place)


durable = pytest.mark.parametrize("open_any", ["file", "postgres"], indirect=True)


@pytest.fixture
def store(open_any: Open) -> Iterator[ResponseStore]:
    with contextlib.closing(open_any(3)) as store:
        yield store


def record(name: str = "r", status: str = "completed", **fields: Any) -> Json:
    return {"response": {"id": name, "status": status, "output": []}, **fields}


def item(number: int) -> Json:
    return {"role": "assistant" if number % 2 else "user", "content": f"item {number}"}


# ---- putting and getting


def test_response_round_trip(store: ResponseStore) -> None:
    stored_record = record(
        conversation_history=[item(0), item(1), {"role": "user", "content": [{"type": "text", "text": "ü"}]}],
        instructions=None,
        session_id="s",
        extra={"nested": [1, 2.5, None, True, {"": []}]},
    )
    store.put("resp_1", stored_record)
    assert store.get("resp_1") == stored_record


def test_stored_response_is_a_copy(store: ResponseStore) -> None:
    stored_record = record(conversation_history=[item(0)])
    store.put("resp_1", stored_record)
    stored_record["conversation_history"].append("changed")
    stored = store.get("resp_1")
    assert stored is not None
    stored["response"]["status"] = "changed"
    assert store.get("resp_1") == record(conversation_history=[item(0)])


def test_missing_response_is_none(store: ResponseStore) -> None:
    assert store.get("resp_1") is None
    assert store.get("") is None
    assert store.get_conversation("c") is None


def test_delete_reports_whether_response_existed(store: ResponseStore) -> None:
    store.put("resp_1", record())
    assert store.delete("resp_1") is True
    assert store.delete("resp_1") is False
    assert store.get("resp_1") is None
    assert len(store) == 0


def test_put_of_new_or_known_record_only(store: ResponseStore) -> None:
    store.put("resp_1", {"response": {"status": "completed"}}, "known")
    assert store.get("resp_1") is None
    store.put("resp_1", {"response": {"status": "completed"}}, "new")
    store.put("resp_1", {"response": {"status": "queued"}}, "new")
    assert store.get("resp_1") == {"response": {"status": "completed"}}


def test_put_overwrites(store: ResponseStore) -> None:
    store.put("resp_1", record(conversation_history=[item(0)]))
    store.put("resp_1", record(conversation_history=[item(1)]))
    assert store.get("resp_1") == record(conversation_history=[item(1)])
    assert len(store) == 1


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"response": None},
        {"response": {}},
        {"response": {"status": 7}},
        {"conversation_history": None},
        {"conversation_history": []},
        {"conversation_history": "a text"},
        {"conversation_history": {"not": "a list"}},
        {"conversation_history": [[], "x", None, 1, {}]},
        {"conversation_history": [item(0), item(0), item(0)]},
        {"conversation_history": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]},
        {"conversation_history": [{"n": 1}, {"n": 1.0}, {"n": True}]},
    ],
    ids=repr,
)
def test_record_of_any_shape_round_trip(store: ResponseStore, value: Json) -> None:
    store.put("resp_1", value)
    stored = store.get("resp_1")
    assert stored == value
    # 1, 1.0 and True are equal to each other, and still not the same.
    assert json.dumps(stored, sort_keys=True) == json.dumps(value, sort_keys=True)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    # A lone surrogate or a NUL is no text that a database keeps.
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")), inner, max_size=4
        )
    ),
    max_leaves=10,
)


@given(
    history=st.lists(JSON, max_size=6),
    rest=st.dictionaries(st.sampled_from(["response", "instructions", "session_id", "x"]), JSON, max_size=4),
)
def test_any_json_round_trip(history: list[Any], rest: Json) -> None:
    with contextlib.closing(ResponseStore(max_size=10)) as store:
        changed = {**rest, "conversation_history": history}
        store.put("resp_1", changed)
        assert store.get("resp_1") == changed


@pytest.mark.parametrize("text", ["a\ud800b", "a\x00b"])
def test_put_accepts_any_text(store: ResponseStore, text: str) -> None:
    store.put("resp_1", record(conversation_history=[{"role": "user", "content": text}], instructions=text))
    stored = store.get("resp_1")
    assert stored is not None
    assert len(stored["conversation_history"][0]["content"]) == len(stored["instructions"]) == len(text)


# ---- the least recently used goes first


def there(store: ResponseStore, *names: str) -> set[str]:
    """Which of them are there, without using any: names that point to a record vanish with it."""
    return {name for name in names if store.get_conversation(f"mark {name}") is not None}


def put_marked(store: ResponseStore, name: str, **fields: Any) -> None:
    store.put(name, record(name, **fields))
    store.set_conversation(f"mark {name}", name, owner=fields.get("owner"))


def test_lru_evicts_least_recently_put(store: ResponseStore) -> None:
    for name in "abcd":
        put_marked(store, name)
    assert there(store, *"abcd") == {"b", "c", "d"}
    assert store.get("a") is None
    assert len(store) == 3


def test_get_refreshes_lru_order(store: ResponseStore) -> None:
    for name in "abc":
        put_marked(store, name)
    store.get("a")
    put_marked(store, "d")
    assert there(store, *"abcd") == {"a", "c", "d"}


def test_put_refreshes_lru_order(store: ResponseStore) -> None:
    for name in "abc":
        put_marked(store, name)
    put_marked(store, "a")
    put_marked(store, "d")
    assert there(store, *"abcd") == {"a", "c", "d"}


def test_get_conversation_does_not_refresh_lru_order(store: ResponseStore) -> None:
    for name in "abc":
        put_marked(store, name)
    assert there(store, "a") == {"a"}
    put_marked(store, "d")
    assert there(store, *"abcd") == {"b", "c", "d"}


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_unfinished_response_is_never_evicted(store: ResponseStore, status: str) -> None:
    store.put("open", record("open", status))
    for number in range(10):
        store.put(f"r{number}", record())
    assert store.get("open") == record("open", status)
    assert store.get("r9") is not None


def test_unfinished_responses_may_exceed_limit(store: ResponseStore) -> None:
    for number in range(6):
        store.put(f"r{number}", record(status="in_progress"))
    assert len(store) == 6
    assert all(store.get(f"r{number}") for number in range(6))


def test_finished_response_can_be_evicted_again(store: ResponseStore) -> None:
    for number in range(6):
        store.put(f"r{number}", record(status="queued"))
    for number in range(6):
        store.put(f"r{number}", record(status="completed"))
    store.put("last", record())
    assert len(store) == 3
    assert store.get("last") is not None


@pytest.mark.parametrize("status", ["completed", "failed", "incomplete", "cancelled"])
def test_all_terminal_statuses_can_be_evicted(store: ResponseStore, status: str) -> None:
    for number in range(5):
        store.put(f"r{number}", record(status=status))
    assert len(store) == 3


@durable
def test_lru_order_survives_restart(open_any: Open) -> None:
    with contextlib.closing(open_any(3)) as store:
        for name in "abc":
            store.put(name, record(name))
        store.get("a")
    with contextlib.closing(open_any(3)) as store:
        store.put("d", record("d"))
        assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]


@durable
def test_smaller_max_size_applies_from_next_put(open_any: Open) -> None:
    with contextlib.closing(open_any(10)) as store:
        for name in "abcdef":
            store.put(name, record(name))
    with contextlib.closing(open_any(2)) as store:
        store.put("g", record("g"))
        assert len(store) == 2
        assert store.get("f") and store.get("g")


# ---- names


def test_conversation_name_maps_to_response(store: ResponseStore) -> None:
    store.put("resp_1", record())
    store.put("resp_2", record())
    store.set_conversation("c", "resp_1")
    assert store.get_conversation("c") == "resp_1"
    store.set_conversation("c", "resp_2")
    assert store.get_conversation("c") == "resp_2"


def test_conversation_names_are_deleted_with_response(store: ResponseStore) -> None:
    for name in ("resp_1", "resp_2"):
        store.put(name, record())
    for name, target in (("a", "resp_1"), ("b", "resp_1"), ("c", "resp_2")):
        store.set_conversation(name, target)
    store.delete("resp_1")
    assert [store.get_conversation(name) for name in "abc"] == [None, None, "resp_2"]


def test_conversation_names_are_deleted_with_evicted_response(store: ResponseStore) -> None:
    for number in range(3):
        store.put(f"r{number}", record())
        store.set_conversation(f"c{number}", f"r{number}")
    store.put("r3", record())
    assert [store.get_conversation(f"c{number}") for number in range(3)] == [None, "r1", "r2"]


def test_conversation_name_is_not_restored_with_reused_id(store: ResponseStore) -> None:
    store.put("resp_1", record())
    store.set_conversation("c", "resp_1")
    store.delete("resp_1")
    store.put("resp_1", record())
    assert store.get_conversation("c") is None


def test_overwriting_response_keeps_conversation_names(store: ResponseStore) -> None:
    store.put("resp_1", record(status="in_progress"))
    store.set_conversation("c", "resp_1")
    store.put("resp_1", record())
    assert store.get_conversation("c") == "resp_1"


# ---- owners


def test_response_of_other_owner_is_not_found(store: ResponseStore) -> None:
    store.put("resp_a", record(owner="a"))
    assert store.get("resp_a", owner="a") == record(owner="a")
    assert store.get("resp_a", owner="b") is None
    assert store.get("resp_a") == record(owner="a")


def test_get_by_other_owner_does_not_refresh_lru_order(store: ResponseStore) -> None:
    for name in "xyz":
        put_marked(store, name, owner="a")
    store.get("x", owner="b")
    put_marked(store, "w", owner="a")
    assert store.get("x", owner="a") is None


def test_response_limit_is_per_owner(store: ResponseStore) -> None:
    for number in range(5):
        for owner in ("a", "b"):
            store.put(f"{owner}{number}", record(owner=owner))
        store.put(f"n{number}", record())
    assert len(store) == 9
    texts = [f"{owner}{number}" for owner in "abn" for number in range(5) if store.get(f"{owner}{number}")]
    assert texts == [f"{owner}{number}" for owner in "abn" for number in (2, 3, 4)]


def test_conversation_names_are_per_owner(store: ResponseStore) -> None:
    store.put("resp_a", record(owner="a"))
    store.put("resp_b", record(owner="b"))
    store.set_conversation("c", "resp_a", owner="a")
    store.set_conversation("c", "resp_b", owner="b")
    assert store.get_conversation("c", owner="a") == "resp_a"
    assert store.get_conversation("c", owner="b") == "resp_b"
    assert store.get_conversation("c", owner="x") is None
    store.delete("resp_a")
    assert store.get_conversation("c", owner="a") is None
    assert store.get_conversation("c", owner="b") == "resp_b"


def test_conversation_name_does_not_resolve_to_other_owner(store: ResponseStore) -> None:
    store.put("resp_a", record(owner="a"))
    store.set_conversation("c", "resp_a", owner="b")
    assert store.get_conversation("c", owner="b") is None


# ---- what a history costs


def items(store: ResponseStore) -> int:
    return int(store._engine.read(lambda tx: tx.value("SELECT count(*) FROM response_items")))


def chain(store: ResponseStore, turns: int) -> list[Json]:
    history = [item(number) for number in range(turns)]
    for turn in range(turns):
        store.put(f"r{turn}", record(conversation_history=history[: turn + 1]))
    return history


@durable
def test_response_chain_stores_one_item_per_turn(open_any: Open) -> None:
    with contextlib.closing(open_any(1000)) as store:
        history = chain(store, 200)
        assert items(store) == 200
        assert store.get("r150") == record(conversation_history=history[:151])


def test_long_response_chain_file_size(path: Path) -> None:
    text = "x" * 2000
    with contextlib.closing(ResponseStore(max_size=1000, db_path=str(path))) as store:
        history: list[Json] = []
        for turn in range(100):
            history.append({"role": "user", "content": f"{turn} {text}"})
            store.put(f"r{turn}", record(conversation_history=list(history)))
    # One copy of every history would be ten million characters.
    assert path.stat().st_size < 1_500_000


@durable
def test_items_are_deleted_with_last_referencing_response(open_any: Open) -> None:
    with contextlib.closing(open_any(1000)) as store:
        history = chain(store, 10)
        store.delete("r9")
        assert items(store) == 9
        for turn in range(8):
            store.delete(f"r{turn}")
        assert items(store) == 9
        assert store.get("r8") == record(conversation_history=history[:9])
        store.delete("r8")
        assert items(store) == 0


@durable
def test_items_are_deleted_with_evicted_response(open_any: Open) -> None:
    with contextlib.closing(open_any(2)) as store:
        for turn in range(10):
            store.put(f"r{turn}", record(conversation_history=[item(2 * turn), item(2 * turn + 1)]))
        assert items(store) == 4


@durable
def test_overwriting_response_releases_old_items(open_any: Open) -> None:
    with contextlib.closing(open_any(10)) as store:
        store.put("r", record(conversation_history=[item(0), item(1)]))
        store.put("r", record(conversation_history=[item(1), item(2)]))
        assert items(store) == 2
        store.put("r", record(conversation_history=[item(1), item(2)]))
        assert store.get("r") == record(conversation_history=[item(1), item(2)])
        store.put("r", record())
        assert items(store) == 0


@durable
def test_repeated_history_item_is_stored_once(open_any: Open) -> None:
    with contextlib.closing(open_any(10)) as store:
        store.put("r", record(conversation_history=[item(0)] * 3))
        assert items(store) == 1
        assert store.get("r") == record(conversation_history=[item(0)] * 3)
        store.delete("r")
        assert items(store) == 0


# ---- rows that cannot be read


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE responses SET body = 'not json' WHERE id = 'r1'",
        "UPDATE responses SET body = x'ff00' WHERE id = 'r1'",
        "UPDATE responses SET body = '[]' WHERE id = 'r1'",
        "DELETE FROM response_items WHERE json LIKE '%item 1%'",
        "UPDATE response_items SET json = '{' WHERE json LIKE '%item 1%'",
    ],
)
def test_unreadable_response_row_is_removed_with_notice(path: Path, damage: str) -> None:
    with contextlib.closing(ResponseStore(max_size=10, db_path=str(path))) as store:
        for number in range(3):
            store.put(f"r{number}", record(conversation_history=[item(number)]))
            store.set_conversation(f"c{number}", f"r{number}")
        with raw(path) as other:
            other.execute(damage)
        assert store.get("r1") is None
        assert len(store) == 2
        assert look(path, "SELECT id FROM responses ORDER BY id") == [("r0",), ("r2",)]
        [notice] = store.notices
        assert "r1" in notice
        assert store.get_conversation("c1") is None
        for number in (0, 2):
            assert store.get(f"r{number}") == record(conversation_history=[item(number)])
        store.put("r1", record(conversation_history=[item(1)]))
        assert store.get("r1") == record(conversation_history=[item(1)])


# ---- the file


@pytest.mark.parametrize("value", [0o000, 0o022, 0o077], ids=oct)
def test_response_file_is_private_with_any_umask(path: Path, value: int) -> None:
    with umask(value):
        store = ResponseStore(max_size=10, db_path=str(path))
        store.put("resp_1", record())
        store.get("resp_1")
        modes = {mode(file) for suffix in ("", "-wal", "-shm") if (file := side(path, suffix)).exists()}
        assert modes == {0o600}
        assert mode(path.parent) == 0o700
        store.close()
        assert {mode(file) for file in path.parent.iterdir()} == {0o600}


def test_response_store_without_path_creates_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        store = ResponseStore(max_size=10)
        assert len(store) == 0
        store.put("resp_1", record())
        assert len(store) == 1
        store.close()
    assert contents(tmp_path) == {}


@durable
def test_responses_and_names_survive_restart(open_any: Open) -> None:
    with contextlib.closing(open_any(10)) as store:
        store.put("resp_1", record(conversation_history=[item(0)]))
        store.set_conversation("c", "resp_1")
    with contextlib.closing(open_any(10)) as store:
        assert store.get("resp_1") == record(conversation_history=[item(0)])
        assert store.get_conversation("c") == "resp_1"


def test_put_is_committed_on_return(path: Path) -> None:
    source = """
        import os, sys
        from hermes.store.responses import ResponseStore
        store = ResponseStore(max_size=10, db_path=sys.argv[1])
        store.put("resp_1", {"response": {"status": "completed"}, "conversation_history": [{"a": 1}]})
        store.set_conversation("c", "resp_1")
        os.write(1, b'"done"')
        os._exit(0)
    """
    assert run(source, path) == "done"
    with contextlib.closing(ResponseStore(max_size=10, db_path=str(path))) as store:
        assert store.get("resp_1") == {"response": {"status": "completed"}, "conversation_history": [{"a": 1}]}
        assert store.get_conversation("c") == "resp_1"


def test_response_store_is_thread_safe(open_any: Open) -> None:
    with contextlib.closing(open_any(1000)) as store:

        def work(number: int) -> list[bool]:
            same = []
            for turn in range(20):
                stored_record = record(conversation_history=[item(n) for n in range(turn + 1)], by=number)
                store.put(f"{number}/{turn}", stored_record)
                same.append(store.get(f"{number}/{turn}") == stored_record)
            return same

        assert at_once(8, work) == [[True] * 20] * 8
        assert len(store) == 160


async def test_response_store_async(store: ResponseStore) -> None:
    async_class = Async(store)
    await async_class.put("resp_1", record(owner="a"))
    assert await async_class.get("resp_1", owner="a") == record(owner="a")
    await async_class.set_conversation("c", "resp_1", owner="a")
    assert await async_class.get_conversation("c", owner="a") == "resp_1"
    assert await async_class.delete("resp_1") is True


def test_store_bundle_includes_responses(durable_url: str) -> None:
    with contextlib.closing(open_store(durable_url)) as store:
        store.responses.put("resp_1", record())
        assert store.responses.get("resp_1") == record()


# ---- against a model


class Responses(RuleBasedStateMachine):
    """Any order of calls, beside a dict in order of use."""

    names = st.sampled_from("abcdefg")
    owners = st.sampled_from([None, "x", "y"])

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, Json] = {}
        self.pointers: dict[tuple[str | None, str], str] = {}

    @initialize(size=st.integers(1, 4))
    def open(self, size: int) -> None:
        self.size = size
        self.store = ResponseStore(max_size=size)

    def forget(self, name: str) -> None:
        del self.records[name]
        self.pointers = {key: target for key, target in self.pointers.items() if target != name}

    def used(self, name: str) -> None:
        self.records[name] = self.records.pop(name)

    @rule(
        name=names,
        owner=owners,
        status=st.sampled_from(["completed", "failed", "in_progress", "queued"]),
        history=st.lists(st.integers(0, 4), max_size=5),
    )
    def put(self, name: str, owner: str | None, status: str, history: list[int]) -> None:
        if name in self.records and self.records[name].get("owner") != owner:
            return  # an id belongs to one owner
        fields = {} if owner is None else {"owner": owner}
        stored_record = record(name, status, conversation_history=[item(n) for n in history], **fields)
        after = {**self.records, name: stored_record}
        of_owner = [n for n in after if after[n].get("owner") == owner]
        ended = [n for n in of_owner if n != name and after[n]["response"]["status"] in ("completed", "failed")]
        if status in ("completed", "failed") and len(of_owner) - len(ended) > self.size:
            return  # what then happens to the new one is left open
        self.store.put(name, stored_record)
        self.records.pop(name, None)
        self.records[name] = stored_record
        for old in [n for n in self.records if n in ended][: max(0, len(of_owner) - self.size)]:
            self.forget(old)

    @rule(name=names, owner=owners)
    def get(self, name: str, owner: str | None) -> None:
        known = self.records.get(name)
        if known is not None and owner is not None and known.get("owner") != owner:
            known = None
        assert self.store.get(name, owner=owner) == known
        if known is not None:
            self.used(name)

    @rule(name=names)
    def delete(self, name: str) -> None:
        assert self.store.delete(name) is (name in self.records)
        if name in self.records:
            self.forget(name)

    @rule(name=names, label=st.sampled_from(["one", "two"]))
    def point(self, name: str, label: str) -> None:
        if name in self.records:
            owner = self.records[name].get("owner")
            self.store.set_conversation(label, name, owner=owner)
            self.pointers[owner, label] = name

    @invariant()
    def as_long_as_the_model(self) -> None:
        assert len(self.store) == len(self.records)
        for owner in ("x", "y"):
            for label in ("one", "two"):
                assert self.store.get_conversation(label, owner=owner) == self.pointers.get((owner, label))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for name, known in self.records.items():
                assert self.store.get(name) == known
            self.store.close()


TestResponsesInAnyOrder = Responses.TestCase
TestResponsesInAnyOrder.settings = settings(max_examples=50)
