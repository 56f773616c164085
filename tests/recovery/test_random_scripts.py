"""Providers that misbehave at random: whatever they do, every turn ends once, truthfully, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest

from hermes.agent import decisions
from hermes.agent import turn as turn_module
from recovery.harness import PROTOCOLS, at_most, check_log, running_app, turn
from support.model_server import Call, ModelServer, Reply, Request
from support.waiting import until

AT_ONCE = 48
WORDS = ["plain ", "Grüße ", "世界 ", "🜁", "\n\n", "<think>", "</think>", "```\n", "a < b ", "1. one\n", " "]
STATUSES = [400, 401, 402, 403, 404, 408, 413, 422, 429, 500, 502, 503, 504, 529]


def _text(rng: random.Random) -> list[str]:
    return [rng.choice(WORDS) for _ in range(rng.randint(0, 12))]


def _calls(rng: random.Random) -> list[Call]:
    arguments = [
        '{"todos":[{"id":"1","content":"x","status":"pending"}]}',
        "{}",
        '{"todos": [',
        '{"merge": "true",}',
        "nonsense",
    ]
    return [
        Call(rng.choice(["todo", "Todo", "to-do", "nothing"]), rng.choice(arguments)) for _ in range(rng.randint(1, 3))
    ]


def _reply(rng: random.Random) -> Reply:
    """One answer, good or bad in one of many ways."""
    reply = Reply(text=_text(rng), reasoning=_text(rng) if rng.random() < 0.3 else "", continues=rng.random() < 0.7)
    if rng.random() < 0.3:
        reply.tool_calls = _calls(rng)
    kind = rng.randrange(16)
    if kind == 0:
        reply.status, reply.headers = rng.choice(STATUSES), rng.choice([{}, {"Retry-After": "0"}])
        reply.quote_key = True
    elif kind == 1:
        reply.cut_at = rng.randint(0, 1500)
        reply.cut_clean = rng.random() < 0.5
    elif kind == 2:
        reply.stall_at = rng.randint(0, 800)
    elif kind == 3:
        reply.malformed_at = rng.randint(0, 5)
    elif kind == 4:
        reply.packets = rng.choice([1, 3, [1, 50]])
    elif kind == 5:
        reply.error_event = {
            "message": rng.choice(["Network connection lost.", "overloaded", "sk-abcdefghijkl is bad"])
        }
    elif kind == 6:
        reply.reset_before_headers = True
    elif kind == 7:
        reply.finish = rng.choice(["length", "content_filter", "stop"])
    elif kind == 8:
        reply.refuse_stream = True
    elif kind == 9:
        reply.duplicate_index = reply.missing_id = rng.random() < 0.5
        reply.missing_index = not reply.duplicate_index
    elif kind == 10:
        reply.as_json = True
    elif kind == 11:
        reply.no_done = reply.no_usage = reply.crlf = True
    return reply


async def _run_seeds(seeds: range, folder: Path) -> None:
    randoms: dict[str, random.Random] = {}

    def handler(request: Request) -> Reply:
        text = next(turn.text for turn in request.turns if turn.role == "user")
        return _reply(randoms[text])

    async with running_app(folder) as app, ModelServer(handler=handler) as server:

        async def run_one(seed: int) -> None:
            rng = random.Random(seed)
            randoms[f"seed {seed}"] = rng
            api_mode = rng.choice(list(PROTOCOLS))
            deadline = rng.choice([None, None, None, 0.3])
            result, events = await turn(
                app, server.url, api_mode, f"seed {seed}", max_iterations=4, deadline_seconds=deadline
            )
            _check(seed, result, events)

        await at_most(AT_ONCE, (partial(run_one, seed) for seed in seeds))
        await server.until(lambda: server.open_streams == 0)
    current = asyncio.current_task()
    await until(lambda: asyncio.all_tasks() - {current}, lambda tasks: not tasks)


def _check(seed: int, result: dict[str, object], events: list) -> None:
    texts = check_log(events)
    where = f"seed {seed}"
    final = str(result["final_response"])
    delivered = list(texts.values())
    assert not final or final in delivered, where
    assert result["completed"] or result["error"], where
    assert sum(map(bool, (result["completed"], result["failed"], result["interrupted"]))) <= 1, where
    everything = repr(result) + repr([event.as_dict() for event in events])
    assert "key-12345678" not in everything, where
    # A call that a stop kept from starting is finished as interrupted; none starts twice or stays open.
    started = [(e.step, e.data["call_id"]) for e in events if e.type == "tool.started"]
    finished = [(e.step, e.data["call_id"]) for e in events if e.type == "tool.finished"]
    assert len(finished) == len(set(finished)) and len(started) == len(set(started)), where
    assert set(started) <= set(finished), where
    roles = [message["role"] for message in result["messages"]]
    assert (roles[0] == "user" and roles[-1] == "assistant") or result["pending_calls"], (where, roles)


@pytest.fixture
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "RETRY_WAIT_S_MAX", 0.01)
    monkeypatch.setattr(turn_module, "STALE_LOCAL_S", 0.15)


@pytest.mark.usefixtures("_no_long_waits")
@pytest.mark.parametrize("chunk", range(4))
async def test_random_scripts_break_no_invariant(chunk: int, tmp_path: Path) -> None:
    await _run_seeds(range(chunk * 50, chunk * 50 + 50), tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("_no_long_waits")
@pytest.mark.parametrize("chunk", range(40))
async def test_ten_thousand_random_scripts_break_no_invariant(chunk: int, tmp_path: Path) -> None:
    await _run_seeds(range(1000 + chunk * 250, 1250 + chunk * 250), tmp_path)
