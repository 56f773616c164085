"""An answer with text, reasoning and a call, cut at every byte: the turn recovers, and no word comes twice."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from recovery.harness import PROTOCOLS, at_most, check_log, running_app, turn
from support.model_server import Call, ModelServer, Reply, Request, body_bytes

AT_ONCE = 64
TEXT = ["Grüße, 世界", "! 🜁\n<two>."]
WHOLE = "".join(TEXT)
CALL = Call("todo", ['{"todos":[{"id":"1","content":"é",', '"status":"pending"}]}'], id="call_1")
# Written at once: where the bytes end is what matters here, not how they are divided.
ANSWER = Reply(text=TEXT, reasoning="hm", tool_calls=[CALL], signature="sig", packets=65_536)


def _script(cuts: dict[str, Reply]):
    """The first request of each conversation is cut; the rest are answered as they should be."""

    def reply(request: Request) -> Reply:
        text = next(turn.text for turn in request.turns if turn.role == "user")
        if any(turn.role == "tool" for turn in request.turns):
            return Reply(text="All done.", continues=False)
        return cuts.pop(text, ANSWER)

    return reply


# Every byte is some part's; one of the parts is quick enough for every day.
PARTS = 32


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
@pytest.mark.parametrize("clean", [False, True], ids=["reset", "clean-end"])
@pytest.mark.parametrize("api_mode", PROTOCOLS)
async def test_stream_cut_at_any_byte_is_recovered_without_repetition(
    api_mode: str, clean: bool, part: int, tmp_path: Path
) -> None:
    async with running_app(tmp_path) as app, ModelServer() as server:
        size = len(
            body_bytes(
                PROTOCOLS[api_mode], ANSWER, {"stream": True, "model": "m", "stream_options": {"include_usage": True}}
            )
        )
        step = 7 if clean else 1
        places = range(part * step, size, PARTS * step)
        cuts = {f"cut {n}": Reply(**{**vars_of(ANSWER), "cut_at": n, "cut_clean": clean}) for n in places}
        server.handler = _script(dict(cuts))

        async def run_one(question: str) -> None:
            result, events = await turn(app, server.url, api_mode, question)
            texts = check_log(events)
            assert result["completed"], (question, result["error"])
            assert result["final_response"] == "All done."
            assert list(texts.values()) == [WHOLE, "All done."], question
            assert [e.type for e in events].count("tool.finished") == 1, question

        await at_most(AT_ONCE, (partial(run_one, question) for question in cuts))
        await server.until(lambda: server.open_streams == 0)


def vars_of(reply: Reply) -> dict[str, object]:
    return {name: getattr(reply, name) for name in reply.__dataclass_fields__}
