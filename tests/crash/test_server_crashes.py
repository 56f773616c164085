"""Servers killed at any moment: what clients have seen stays true, effects happen once, and runs are resumed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.gateway import CUT, Gateway, serving
from support.model_server import Handler, ModelServer
from support.waiting import until

from .plans import EFFECTS, WAYS, Json, Plan, answer, stalling
from .test_crash import seed_is_told
from .witness import Asked, Run, Witness, data_of

ROUNDS = int(os.environ.get("HERMES_SERVER_CRASH_ROUNDS", "5"))
ROUNDS_PER_HOME = 5
TURNS = 4
SESSIONS = ("hall", "attic")


@asynccontextmanager
async def started_server(
    folder: Path, handler: Handler = answer, **server: Any
) -> AsyncIterator[tuple[ModelServer, Witness]]:
    """A server with sessions to speak in, its model, and those who watch it."""
    async with ModelServer(handler=handler) as model:
        settings = {
            "model": {"default": "m", "base_url": f"{model.url}/v1", "api_key": "key-12345678"},
            "terminal": {"backend": "local"},
            "command_allowlist": ["> *"],
            "agent": {"delta_window_ms": 0},
            "api_server": server,
        }
        async with serving(folder, **settings) as gateway:
            witness = Witness(gateway)
            await witness.open(*SESSIONS)
            yield model, witness


async def killed(witness: Witness) -> None:
    """Kill the server, and start the next one when everybody has noticed."""
    await witness.gateway.end()
    await witness.cut_off()
    await witness.gateway.start()


@pytest.mark.parametrize("home", range(-(-ROUNDS // ROUNDS_PER_HOME)))
async def test_killed_server_keeps_acknowledged_data(home_folder: Path, home: int) -> None:
    async with started_server(home_folder) as (_, witness):
        for turn in range(min(ROUNDS_PER_HOME, ROUNDS - home * ROUNDS_PER_HOME)):
            with seed_is_told("server", home, turn) as chance:
                for at in range(TURNS):
                    plan = Plan.random(f"{turn}-{at}", chance)
                    key = plan.name if chance.random() < 0.3 else ""
                    witness.ask(chance.choice(list(WAYS)), plan, chance.choice(SESSIONS), key)
                await witness.has_seen(witness.frames_read + chance.randrange(80))
                await asyncio.sleep(chance.uniform(0, 0.05))
                await killed(witness)
                if chance.random() < 0.2:  # and once more, while it takes up what was cut off
                    await asyncio.sleep(chance.uniform(0, 0.2))
                    await killed(witness)
                await witness.settle()


# ---- moments that are chosen


def events(witness: Witness, name: str) -> list[Json]:
    """What the reader of a plan's run has seen."""
    return [data_of(block) for run in witness.runs.values() if run.plan.name == name for block in run.frames.values()]


def saw(witness: Witness, name: str, event: str) -> Json | None:
    """The first event of this name that a reader has seen."""
    return next((e for e in events(witness, name) if e["event"] == event), None)


def text_of(witness: Witness, name: str) -> str:
    """The text that a reader has seen."""
    return "".join(e.get("delta", "") for e in events(witness, name))


def results(witness: Witness) -> dict[str, Json]:
    """How every call has ended."""
    payloads = [data_of(block) for run in witness.runs.values() for block in run.whole]
    return {event["tool_call_id"]: event for event in payloads if event["event"] == "tool.completed"}


async def waiting(witness: Witness, name: str, status: str) -> Json:
    """The run of a plan, once it waits for an answer."""
    [run_id] = [run.run_id for run in witness.runs.values() if run.plan.name == name]
    path = f"/v1/runs/{run_id}"
    return await until(lambda: witness.gateway.get(path), lambda run: run["status"] == status)


async def ask_all(witness: Witness, *turns: tuple[str, str, str]) -> None:
    """Ask for turns: by which way, under which name, with which calls. Each has a session of its own."""
    await witness.open(*(f"of-{name}" for _, name, _ in turns))
    for kind, name, steps in turns:
        witness.ask(kind, Plan(name, tuple(filter(None, steps.split("/")))), f"of-{name}")


def lines(witness: Witness) -> list[str]:
    file = witness.gateway.folder / "workspace" / EFFECTS
    return file.read_text().split() if file.exists() else []


async def test_turn_resumes_wherever_it_was_killed(home_folder: Path) -> None:
    stalls = stalling(("silent", 0, 0), ("text", 0, 900), ("between", 1, 0), ("after", 1, 900))
    async with started_server(home_folder, stalls) as (model, witness):
        await ask_all(
            witness,
            ("run", "silent", "c"),
            ("chat detached", "text", "c"),
            ("run", "between", "c/r"),
            ("response background", "after", "ct"),
            ("run", "during", "cw"),
            ("run", "approval", "a/c"),
            ("run", "question", "q"),
        )
        await until(lambda: any("Turn silent" in str(request.body) for request in model.requests))
        await until(lambda: saw(witness, "text", "message.delta"))
        await until(lambda: any("call-between-0-0" in str(request.body) for request in model.requests))
        await until(lambda: "message 1" in text_of(witness, "after"))
        await until(lambda: "call-during-0-1" in lines(witness))
        pending = [(await waiting(witness, "approval", "waiting_for_approval"))["pending_approvals"]]
        pending.append((await waiting(witness, "question", "waiting_for_input"))["pending_question"])
        await killed(witness)
        approval = await waiting(witness, "approval", "waiting_for_approval")
        question = await waiting(witness, "question", "waiting_for_input")
        [request] = approval["pending_approvals"]
        assert request["approval_id"] == pending[0][0]["approval_id"] and "call-approval-0-0" not in lines(witness)
        decision = {"choice": "once", "approval_id": request["approval_id"]}
        assert (await witness.gateway.post(f"/v1/runs/{approval['run_id']}/approval", decision))["resolved"] == 1
        assert question["pending_question"]["request_id"] == pending[1]["request_id"]
        await witness.gateway.post(f"/v1/runs/{question['run_id']}/clarify", {"answer": "The red one."})
        await witness.settle()
        (witness.gateway.folder / "workspace" / "go").touch()
        result = results(witness)
        assert result["call-during-0-1"]["status"] == "unknown"
        assert {e["status"] for id_, e in result.items() if id_ != "call-during-0-1"} == {"ok"}
        assert "The red one." in result["call-question-0-0"]["result"]


@pytest.mark.parametrize("moment", ["the model has said all", "message.completed", "run.completed"])
async def test_run_has_exactly_one_final_event(home_folder: Path, moment: str) -> None:
    async with started_server(home_folder) as (model, witness):
        await ask_all(witness, ("run", "one", ""), ("session stream", "two", ""), ("chat stream", "three", ""))
        if moment.startswith("the"):
            await until(lambda: len(model.requests) == 3 and not model.open_streams)
        else:
            await until(lambda: any(saw(witness, name, moment) for name in ("one", "two", "three")))
        await killed(witness)
        await witness.settle()
        assert len(model.requests) <= 6


# ---- asked again under a key

NAMES = re.compile(rb'"((?:chatcmpl-|resp_|msg_|run_)[0-9a-f]+)"')
TOLD = ("X-Hermes-Run-Id", "X-Hermes-Session-Id", "X-Hermes-History", "Content-Type")
Answer = tuple[int, dict[str, str], bytes]


async def answer_to(asked: Asked, gateway: Gateway) -> Answer:
    """All that comes of an answer, be it that the server is gone before its end."""
    status, headers, text = 0, {}, b""
    with contextlib.suppress(*CUT):
        async with asked.post(gateway.client) as response:
            status, headers = response.status, dict(response.headers)
            async for chunk in response.content.iter_any():
                text += chunk
    return status, headers, text


def text_in(body: str) -> str:
    """All that is said in an answer, or the whole of one that is no stream."""
    payloads = [json.loads(line.removeprefix("data: ")) for line in body.split("\n") if line.startswith("data: {")]
    deltas = [
        payload["choices"][0]["delta"].get("content") if "choices" in payload else payload.get("delta")
        for payload in payloads
    ]
    return "".join(filter(None, deltas)) if payloads else body


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
async def test_idempotent_retry_joins_resumed_turn(home_folder: Path, ending: int) -> None:
    plans = {kind: Plan(kind.replace(" ", "-"), ("c",)) for kind in WAYS}
    stalls = stalling(*((plan.name, 1, 900) for plan in plans.values()))
    async with started_server(home_folder, stalls, drain_seconds=0) as (model, witness):
        gateway = witness.gateway
        await witness.open(*(plan.name for plan in plans.values()))
        requests = {kind: Asked(WAYS[kind], plan, plan.name, f"key-{plan.name}") for kind, plan in plans.items()}
        first = {kind: asyncio.create_task(answer_to(request, gateway)) for kind, request in requests.items()}
        await until(lambda: len(model.requests) == 2 * len(plans))
        await gateway.end(ending)
        cut = {kind: await task for kind, task in first.items()}
        await gateway.start()
        again = dict(
            zip(
                requests,
                await asyncio.gather(*(answer_to(request, gateway) for request in requests.values())),
                strict=True,
            )
        )
        for kind, (status, headers, text) in again.items():
            assert (status, headers.get("Idempotency-Replayed")) == (202 if kind == "run" else 200, "true"), text
            if kind not in ("run", "response background"):
                assert plans[kind].texts[-1] in text_in(text.decode()), text
            before, sent_headers, body = cut[kind]
            if "stream" in kind or before == 202:
                assert NAMES.findall(body) and set(NAMES.findall(body)) <= set(NAMES.findall(text)), (body, text)
                assert {name: sent_headers.get(name) for name in TOLD} == {name: headers.get(name) for name in TOLD}
            assert (await answer_to(requests[kind], gateway))[2] == text
        runs = (await gateway.get("/v1/runs?limit=200"))["data"]
        assert {run["run_id"] for run in runs} == {headers["X-Hermes-Run-Id"] for _, headers, _ in again.values()}
        witness.runs = {
            h["X-Hermes-Run-Id"]: Run(h["X-Hermes-Run-Id"], plans[kind], True) for kind, (_, h, _) in again.items()
        }
        await witness.settle()


# Loaded by every Python of the test: a server that is killed once, when a run is on record and its first event is not.
KILL_BEFORE_START = """
import os, signal
from hermes.runs.writer import RunWriter

append, mark = RunWriter.append, os.environ["KILL_MARK"]

async def append_or_die(self, *events, **options):
    if self.creates is None and events[0].type == "run.started" and os.path.exists(mark):
        os.unlink(mark)
        os.kill(os.getpid(), signal.SIGKILL)
    await append(self, *events, **options)

RunWriter.append = append_or_die
"""


@pytest.mark.parametrize(
    "kind",
    [
        "chat stream",
        "session",
        *(pytest.param(k, marks=pytest.mark.long) for k in ("chat", "response", "session stream")),
    ],
)
async def test_accepted_but_unstarted_turn_runs_once(
    home_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    code, mark = tmp_path / "code", tmp_path / "kill"
    code.mkdir()
    (code / "sitecustomize.py").write_text(KILL_BEFORE_START)
    monkeypatch.setenv("PYTHONPATH", str(code))
    monkeypatch.setenv("KILL_MARK", str(mark))
    plan = Plan("made", ("c",))
    async with started_server(home_folder) as (_, witness):
        gateway = witness.gateway
        await witness.open("of-made")
        asked = Asked(WAYS[kind], plan, "of-made", "key-made")
        mark.touch()
        await answer_to(asked, gateway)
        assert await gateway.wait_for_exit() == -signal.SIGKILL
        await gateway.start()
        status, headers, text = await answer_to(asked, gateway)
        assert (status, headers.get("Idempotency-Replayed")) == (200, "true"), text
        assert plan.texts[-1] in text_in(text.decode())
        [run] = (await gateway.get("/v1/runs"))["data"]
        assert (run["run_id"], run["status"]) == (headers["X-Hermes-Run-Id"], "completed")
        messages = (await gateway.get("/api/sessions/of-made/messages"))["data"]
        assert [message["content"] for message in messages if message["role"] == "user"] == [plan.message]
        assert lines(witness) == plan.effects


# ---- told to end


async def test_graceful_shutdown_finishes_runs_within_drain_time(home_folder: Path) -> None:
    async with started_server(home_folder, drain_seconds=30) as (_, witness):
        gateway = witness.gateway
        await ask_all(witness, ("run", "tool", "w"), ("chat stream", "text", "r/r"))
        await until(lambda: lines(witness) and saw(witness, "text", "message.delta"))
        gateway.process.send_signal(signal.SIGTERM)
        await until(lambda: "draining" in (home_folder / "gateway_state.json").read_text())
        async with gateway.client.post("/v1/runs", json={"input": "more"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "gateway_draining")
            assert int(response.headers["Retry-After"]) >= 1
        assert (await waiting(witness, "tool", "running"))["finished_at"] is None
        (home_folder / "workspace" / "go").touch()
        assert await gateway.wait_for_exit() == 0
        await witness.cut_off()
        assert all(run.closed for run in witness.runs.values()), "a reader was not told the end"
        answer = witness.requests["text"].answer
        assert answer is not None and answer[1].endswith(b"data: [DONE]\n\n")
        await gateway.start()
        await witness.settle()
        assert {data_of(run.whole[-1])["event"] for run in witness.runs.values()} == {"run.completed"}


async def test_graceful_shutdown_hands_over_or_ends_remaining_runs(home_folder: Path) -> None:
    stalls = stalling(("answer", 0, 900), ("client", 0, 900))
    async with started_server(home_folder, stalls, drain_seconds=0) as (_, witness):
        await ask_all(
            witness,
            ("run", "tool", "wc"),
            ("session stream", "answer", "c"),
            ("run", "approval", "a"),
            ("run", "question", "q"),
            ("chat stream", "client", ""),
        )
        await until(lambda: lines(witness) and all(saw(witness, n, "message.delta") for n in ("answer", "client")))
        await waiting(witness, "approval", "waiting_for_approval")
        await waiting(witness, "question", "waiting_for_input")
        assert await witness.gateway.end(signal.SIGTERM) == 0
        await witness.cut_off()
        assert {run.plan.name for run in witness.runs.values() if run.closed} == {"client"}
        for name, expected in (("client", b'"server_shutdown"'), ("answer", b"message 0")):
            answer = witness.requests[name].answer
            assert answer is not None and expected in answer[1], answer
        await witness.gateway.start()
        approval = await waiting(witness, "approval", "waiting_for_approval")
        await witness.gateway.post(f"/v1/runs/{approval['run_id']}/approval", {"choice": "once"})
        question = await waiting(witness, "question", "waiting_for_input")
        await witness.gateway.post(f"/v1/runs/{question['run_id']}/clarify", {"answer": "The red one."})
        witness.cut = ("run.cancelled", "server_shutdown")
        await witness.settle()
        ended = {call_id: event["status"] for call_id, event in results(witness).items()}
        assert ended.pop("call-tool-0-0") == "interrupted"
        assert set(ended.values()) == {"ok"}, ended
        for run in witness.runs.values():
            seams = [e for e in map(data_of, run.whole) if e["event"] == "warning" and e["code"] == "resumed"]
            assert len(seams) == (run.plan.name != "client")
