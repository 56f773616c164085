"""A store with rows in all of its tables, and all that can be read of one."""

from __future__ import annotations

from typing import Any

from hermes.core.spec import Control
from hermes.store.stores import Store
from hermes.store.usage_days import UsageKey

from .test_transfer import rich
from .tools import Turn

NASTY = "half \ud800 a pair, NUL \x00, 😀, quotes '\"\\ and %s ?"


def fill(store: Store) -> None:
    db = store.sessions
    rich(db, "s")
    db.create_session("z-parent", "api_server", owner="ada")
    # Its id comes before that of its parent.
    db.create_session("a-child", "api_server", owner="ada", parent_session_id="z-parent")
    db.append_message("a-child", "user", NASTY)
    db.append_message("a-child", "assistant", "日本の台所 Straße café " + "long " * 100_000)
    deleted = db.append_message("a-child", "user", "taken back")
    store.engine.write(lambda tx: tx.execute("DELETE FROM messages WHERE id = ?", (deleted,)))
    db.put_pending_calls("s", "run_1", ["c1", "c2"], owner="ada")
    db.add_file("s", "a.txt", bytes=3, mime="text/plain", direction="upload", path="/somewhere/a.txt")
    db.put_compaction("s", "ada", "digest", 4, [{"role": "user", "content": "summary"}])
    db.set_meta("seal", "secret of the server")
    finished = Turn(store, "turns", owner="ada", instructions="Be brief.")
    finished.begin()
    text = finished.grown("m1", "It ", "is ", "noon")
    finished.store.runs.put_partials(finished.run_id, None, [text])
    finished.complete("m1", text.text, text.cuts)
    finished.end()
    cut_off = Turn(store, "turns", owner="ada", kind="chat")
    cut_off.begin(NASTY)
    store.runs.put_partials(cut_off.run_id, None, [cut_off.grown("m2", "It ", "was ")])
    store.runs.add_control(cut_off.run_id, Control("steer", {"text": NASTY}))
    store.idempotency.claim("POST /v1", "k1", "f", run_id=cut_off.run_id)
    store.idempotency.claim("POST /v1", "k2", "f")
    store.idempotency.finish("POST /v1", "k2", 200, bytes(range(256)))
    store.jobs.create({"id": "0123456789ab", "name": "News", "schedule": {"kind": "once"}, "next_run_at": 5.0})
    store.sign_ins.add("token hash", "ada", "key hash", 3600.0)
    store.usage_days.add({UsageKey(20_000, "ada", "p", NASTY): {"turns": 1.0, "output_tokens": 2.0**40 + 0.5}})
    token = store.leases.acquire("session:s", "somebody", 60)
    assert token is not None
    store.leases.release("session:s", token)
    responses = store.responses
    items = [{"type": "message", "id": f"msg_{number}", "text": NASTY} for number in range(3)]
    for number in range(3):
        record = {"owner": "ada", "response": {"status": "completed"}, "conversation_history": items[: number + 1]}
        responses.put(f"resp_{number}", record)
    responses.set_conversation("name", "resp_2", "ada")
    responses.put_conversation_object("conv_1", "ada", {"topic": "kitchen"}, 1_790_000_000)
    responses.add_conversation_items("conv_1", "ada", items)
    responses.suspend(["c9"], "ada", "run_9", [{"role": "user", "content": "?"}])


def everything(store: Store) -> dict[str, Any]:
    """What callers get to see."""
    db, runs, responses = store.sessions, store.runs, store.responses
    words = ["noon", "台所", "straße", "cafe", "never", "clock"]
    run_ids = store.engine.read(lambda tx: [row[0] for row in tx.rows("SELECT run_id FROM runs ORDER BY rowid")])
    return {
        "sessions": list(db.export_all()),
        "search": {word: sorted(hit["id"] for hit in db.search_messages(word, limit=50)) for word in words},
        "runs": [runs.get(run_id) for run_id in run_ids],
        "logs": {run_id: runs.read(run_id, 0, 1000) for run_id in run_ids},
        "unfinished": [record.spec.run_id for record in runs.unfinished()],
        "files": db.list_files("s"),
        "calls": db.pending_calls(["c1", "c2"], owner="ada"),
        "compaction": db.find_compaction("ada", ["digest"]),
        "meta": db.get_meta("seal"),
        "jobs": store.jobs.list(),
        "sign_in": store.sign_ins.get("token hash"),
        "usage": store.usage_days.sums(0, ["day", "owner", "provider", "model"]),
        "claim": store.idempotency.claim("POST /v1", "k2", "f"),
        "responses": [responses.get(f"resp_{number}", "ada") for number in range(3)],
        "conversation": responses.get_conversation("name", "ada"),
        "items": responses.conversation_items("conv_1", "ada"),
        "object": responses.get_conversation_object("conv_1", "ada"),
        "suspended": responses.suspended("c9", "ada"),
    }
