"""A program that works on one database with many threads until it is killed. A line is printed for what is done."""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hermes.core.spec import Control
from hermes.store.leases import this_process
from hermes.store.responses import ResponseStore
from hermes.store.stores import open_store
from store.tools import Turn

# The source of every fork: so many messages, made once.
TRUNK, TRUNK_ROWS = "trunk", 12


def say(**fields: Any) -> None:
    """Report one line in one atomic write. What is reported must survive any crash."""
    os.write(1, json.dumps(fields).encode() + b"\n")


def digest(text: str) -> str:
    """The digest that represents a long text in a report."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class Worker:
    """What a thread does, again and again, on the one store."""

    def __init__(self, store: Any, responses: ResponseStore, number: int, seed: str) -> None:
        self.store, self.responses, self.number = store, responses, number
        self.random = random.Random(f"{seed}/{number}")
        self.tag = f"{secrets.token_hex(4)}-{number}"
        self.count = 0

    def text(self) -> str:
        """Words of its own, long enough now and then to need pages of their own."""
        self.count += 1
        [filler] = self.random.choices(["short", "middling " * 20, "long " * 2000, "漢字かな混じり"], [4, 4, 1, 1])
        return f"{self.tag}/{self.count} {filler}"

    # --- messages, in one session that all share and in one of its own

    def messages(self) -> None:
        session = self.random.choice(["shared", f"own-{self.number}"])
        text = self.text()
        self.store.sessions.create_session(session, "cli")
        row = self.store.sessions.append_message(session, "user", text)
        say(did="message", session=session, row=row, text=digest(text))

    # --- whole turns

    def turn(self) -> None:
        session = f"turns-{self.random.randrange(3)}"
        name = f"session:{session}"
        token = self.store.leases.acquire(name, this_process(), 60)
        if token is None:
            return
        say(did="lease", name=name, token=token)
        turn = Turn(self.store, session, token=token, source="cli")
        say(did="run", run=turn.run_id)
        question, answer = self.text(), self.text()
        self._event(turn, turn.begin(question), question)
        for step in (1, 2):
            message = f"msg_{turn.run_id}_{step}"
            started = turn.event("model.started", step, attempt=1, message_id=message, model="m", provider="p")
            turn.append(started)
            self._event(turn, started)
            pieces = [answer[at : at + 7] for at in range(0, 70, 7)]
            partial = turn.grown(message, *pieces[:4], step=step)
            self.store.runs.put_partials(turn.run_id, token, [partial])
            say(did="partial", run=turn.run_id, stream=message, seq=partial.last_seq, text=partial.text)
            calls = [{"id": f"call_{step}", "name": "clock", "arguments": "{}"}] if step == 1 else None
            result = turn.complete(message, partial.text, partial.cuts, step, tool_calls=calls)
            self._event(turn, result, partial.text)
            if calls:
                self._tool(turn, step)
        if self.random.random() < 0.3:
            control = Control("steer", {"text": "faster"})
            self.store.runs.add_control(turn.run_id, control)
            say(did="control", run=turn.run_id, control=control.control_id)
        if self.random.random() < 0.8:
            self._event(turn, turn.end())
        if self.random.random() < 0.8:
            self.store.leases.release(name, token)

    def _tool(self, turn: Turn, step: int) -> None:
        call = {"call_id": f"call_{step}", "name": "clock"}
        started = turn.event("tool.started", step, **call, args={}, preview="", effect="effect")
        turn.append(started, sync=True)
        self._event(turn, started)
        output = self.text()
        finished = turn.event("tool.finished", step, **call, status="ok", duration_ms=1, row=None, chars=len(output))
        row = turn.row("tool", output, (finished, "row"), tool_call_id=call["call_id"], tool_name="clock")
        turn.append(finished, rows=[row])
        self._event(turn, finished, output)

    @staticmethod
    def _event(turn: Turn, event: Any, text: str | None = None) -> None:
        row = event.data.get("row") or event.data.get("user_row")
        text_digest = None if text is None else digest(text)
        say(did="event", run=turn.run_id, seq=event.seq, type=event.type, row=row, text=text_digest)

    # --- branches that come and go

    def branch(self) -> None:
        name = f"branch-{self.tag}-{self.count}"
        self.count += 1
        self.store.sessions.fork_session(TRUNK, name)
        say(did="branch", session=name)
        if self.random.random() < 0.7:
            say(doing="delete", session=name)
            self.store.sessions.delete_session(name)
            say(did="delete", session=name)

    # --- a session with a run in it that goes as a whole

    def short_life(self) -> None:
        name = f"brief-{self.tag}-{self.count}"
        self.count += 1
        token = self.store.leases.acquire(f"session:{name}", this_process(), 60)
        turn = Turn(self.store, name, token=token)
        turn.begin(self.text())
        turn.complete(f"msg_{turn.run_id}", self.text())
        turn.end()
        self.store.leases.release(f"session:{name}", token)
        say(did="brief", session=name, run=turn.run_id)
        say(doing="delete", session=name)
        self.store.sessions.delete_session(name)
        say(did="delete", session=name)

    # --- compactions: each generation of rows gives way to its summary at once

    def compaction(self) -> None:
        session = f"compacted-{self.number}"
        self.store.sessions.create_session(session, "cli")
        text = f"row {self.text()}"
        row = self.store.sessions.append_message(session, "user", text)
        say(did="message", session=session, row=row, text=digest(text))
        if self.random.random() < 0.3:
            text = f"summary {self.text()}"
            summary = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
            self.store.sessions.archive_and_compact(session, summary)
            say(did="compact", session=session, text=digest(text))

    # --- claims and responses

    def claim(self) -> None:
        key = f"{self.tag}-{self.count}"
        self.count += 1
        self.store.idempotency.claim("scope", key, "print", run_id=key)
        say(did="claim", key=key)
        self.store.idempotency.finish("scope", key, 200, key.encode())
        say(did="answer", key=key)

    def response(self) -> None:
        history: list[dict[str, str]] = []
        for turn in range(4):
            history.append({"role": "user", "content": self.text()})
            name = f"resp_{self.tag}-{self.count}"
            record = {"response": {"status": "completed", "turn": turn}, "conversation_history": list(history)}
            self.responses.put(name, record)
            self.responses.set_conversation(f"name of {name}", name)
            say(did="response", id=name, texts=[digest(item["content"]) for item in history])

    def serve(self) -> None:
        work: list[tuple[Callable[[], None], int]] = [
            (self.messages, 4),
            (self.turn, 4),
            (self.branch, 2),
            (self.short_life, 1),
            (self.compaction, 3),
            (self.claim, 1),
            (self.response, 1),
        ]
        names, weights = zip(*work, strict=True)
        while True:
            [chosen] = self.random.choices(names, weights)
            chosen()


def guarded(worker: Worker) -> None:
    """A worker that fails takes the program with it: the test looks at how it ended."""
    try:
        worker.serve()
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(3)


def main(folder: Path, seed: str, threads: int) -> None:
    say(did="start")
    store = open_store(f"sqlite://{folder / 'state.db'}")
    responses = ResponseStore(max_size=40, db_path=str(folder / "response_store.db"))
    if store.sessions.get_session(TRUNK) is None:

        def plant() -> None:
            store.sessions.create_session(TRUNK, "cli", title="Trunk")
            for number in range(TRUNK_ROWS):
                store.sessions.append_message(TRUNK, "user" if number % 2 == 0 else "assistant", f"trunk {number}")

        store.transaction(plant)
    say(did="open")
    workers = [Worker(store, responses, number, seed) for number in range(threads)]
    running = [threading.Thread(target=guarded, args=(worker,)) for worker in workers]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
