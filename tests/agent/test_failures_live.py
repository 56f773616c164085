"""Provider failures over real sockets: retries, fallbacks, stored text, and errors for the user."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest

from hermes.agent import prompt
from hermes.core import limits
from hermes.core.limits import REASONING_EXCERPT_CHARS_MAX, REDACTED_AT_ONCE_CHARS_MAX
from hermes.core.spec import RouteChoice
from hermes.guards.secrets import Secrets
from support.model_server import Call, ModelServer, Protocol, Reply, Request
from support.ports import refusing_port

from .conftest import MakeHarness
from .harness import (
    KEY,
    MODES,
    PROTOCOLS,
    SILENT_S,
    Clock,
    CompletedRun,
    Harness,
    cut_after,
    hold_answers,
    nothing_left,
    schema,
    scripted,
    sent_messages,
    tool,
)

each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
OUTPUT_LIMIT = {"chat": "max_tokens", "responses": "max_output_tokens", "anthropic": "max_tokens"}
# A key that no pattern would recognise: only its value gives it away.
ODD_KEY = "plain.value.of.a.key.0123"


def fallback_to(other: ModelServer, protocol: str = "chat", **fields: Any) -> dict[str, Any]:
    address = {"base_url": f"{other.url}/v1", "api_mode": MODES[protocol], "api_key": "sk-other-9876543210"}
    return {"provider": "spare", "model": "n", **address, **fields}


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address without a listener."""
    with refusing_port() as port:
        yield f"http://127.0.0.1:{port}"


def with_keys(server: ModelServer, *keys: str, **fields: Any) -> dict[str, Any]:
    """Settings with one provider `p` that has these keys."""
    return {"providers": {"p": {"base_url": f"{server.url}/v1", "keys": list(keys), **fields}}}


TO_P = RouteChoice(provider="p", model="m")


def assert_failed(run: CompletedRun, failure: str, code: str) -> None:
    assert run.final["type"] == "run.failed"
    assert (run.final["failure"], run.result["failure"], run.result["error_code"]) == (failure, failure, code)
    assert run.result["failed"] is True
    assert run.result["completed"] is False
    assert run.result["error"]


# ---- no connection


@pytest.mark.usefixtures("quick")
async def test_connection_refused_is_retried_then_falls_back(
    harness: Harness, nowhere: str, other: ModelServer
) -> None:
    other.script = [Reply(text="From elsewhere.")]
    run = await harness.run(nowhere, fallbacks=(fallback_to(other),))
    assert run.actions() == ["reconnect", "reconnect", "retry", "retry", "retry", "fallback"]
    switched = run.event("model.switched")
    assert switched["from"] == {"model": "m", "provider": "custom"}
    assert switched["to"] == {"model": "n", "provider": "spare"}
    assert run.result["final_response"] == "From elsewhere."
    assert (run.result["model"], run.result["provider"]) == ("n", "spare")
    assert run.result["failed"] is False


@pytest.mark.usefixtures("quick")
async def test_connection_refused_without_fallback_fails(harness: Harness, nowhere: str) -> None:
    run = await harness.run(nowhere)
    assert_failed(run, "connect", "provider_unavailable")
    assert run.result["final_response"] == ""
    assert run.final["retryable"] is True


@pytest.mark.parametrize(("jitter", "seconds"), [(0.0, 0.05), (1.0, 0.3)])
async def test_reconnect_backoff_with_jitter(
    harness: Harness, server: ModelServer, jitter: float, seconds: float
) -> None:
    harness.app.services = replace(harness.app.services, jitter=lambda: jitter)
    server.script = [Reply(reset_before_headers=True), Reply(text="Done.")]
    run = await harness.run(server)
    retrying = run.event("model.retrying")
    assert (retrying["failure"], retrying["action"]) == ("connect", "reconnect")
    assert retrying["wait_seconds"] == pytest.approx(seconds)
    assert server.requests[1].time - server.requests[0].time >= seconds


@pytest.mark.usefixtures("quick")
async def test_reconnect_count_is_read_from_environment(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = [Reply(reset_before_headers=True), Reply(text="Done.")] * 2
    first = await harness.run(server)
    monkeypatch.setenv("HERMES_STREAM_RETRIES", "0")
    second = await harness.run(server)
    assert (first.actions(), second.actions()) == (["reconnect"], ["retry"])


@pytest.mark.usefixtures("quick")
async def test_api_max_retries_setting(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness({"agent": {"api_max_retries": 1}})
    server.script = [Reply(status=500)] * 2
    run = await harness.run(server)
    assert len(server.requests) == 2
    assert_failed(run, "server_error", "provider_unavailable")


# ---- refusals, by status

REFUSALS = [
    # status, kind, code, requests alone, requests when there is another route
    (402, "billing", "provider_quota_exceeded", 1, 1),
    (403, "forbidden", "provider_rejected_request", 1, 1),
    (404, "model_not_found", "provider_model_not_found", 1, 1),
    (408, "timeout", "provider_timeout", 2, 2),
    (429, "rate_limit", "provider_rate_limited", 4, 1),
    (500, "server_error", "provider_unavailable", 4, 4),
    (503, "overloaded", "provider_unavailable", 4, 2),
    (504, "timeout", "provider_timeout", 2, 2),
    (529, "overloaded", "provider_unavailable", 4, 2),
]


@pytest.mark.usefixtures("quick")
@each_protocol
@pytest.mark.parametrize(("status", "kind", "code", "alone", "_"), REFUSALS, ids=[str(r[0]) for r in REFUSALS])
async def test_rejected_request_fails_after_all_retries(
    harness: Harness, server: ModelServer, protocol: Protocol, status: int, kind: str, code: str, alone: int, _: int
) -> None:
    server.repeat, server.script = True, [Reply(status=status, error="ZEBRA says no")]
    run = await harness.run(server, protocol=protocol)
    assert_failed(run, kind, code)
    assert len(server.requests) == alone
    assert "ZEBRA says no" in run.result["error"]
    assert run.result["final_response"] == ""
    assert "ZEBRA" not in json.dumps([m for m in run.result["messages"] if m["role"] == "assistant"])


@pytest.mark.usefixtures("quick")
@each_protocol
@pytest.mark.parametrize(("status", "kind", "_", "__", "before"), REFUSALS, ids=[str(r[0]) for r in REFUSALS])
async def test_rejected_request_falls_back_to_other_route(
    harness: Harness,
    server: ModelServer,
    other: ModelServer,
    protocol: Protocol,
    status: int,
    kind: str,
    _: str,
    __: int,
    before: int,
) -> None:
    server.repeat, server.script = True, [Reply(status=status)]
    other.script = [Reply(text="From elsewhere.")]
    run = await harness.run(server, protocol=protocol, fallbacks=(fallback_to(other, protocol),))
    assert len(server.requests) == before
    assert run.event("model.switched")["reason"] == kind
    assert run.result["final_response"] == "From elsewhere."


@each_protocol
@pytest.mark.parametrize(("status", "kind"), [(400, "bad_request"), (409, "bad_request"), (422, "bad_request")])
async def test_bad_request_does_not_fall_back(
    harness: Harness, server: ModelServer, other: ModelServer, protocol: Protocol, status: int, kind: str
) -> None:
    server.script = [Reply(status=status, error="no")]
    run = await harness.run(server, protocol=protocol, fallbacks=(fallback_to(other),))
    assert_failed(run, kind, "provider_rejected_request")
    assert (len(server.requests), len(other.requests)) == (1, 0)


async def test_moderation_error_falls_back_and_is_reported(
    harness: Harness, server: ModelServer, other: ModelServer
) -> None:
    refusal = Reply(status=400, error={"code": "content_policy_violation", "message": "Your request was rejected."})
    server.script, other.script = [refusal], [refusal]
    run = await harness.run(server, fallbacks=(fallback_to(other),))
    assert_failed(run, "policy_blocked", "content_policy_violation")
    assert len(other.requests) == 1


@each_protocol
async def test_request_too_large_is_reported(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    server.repeat, server.script = True, [Reply(status=413)]
    run = await harness.run(server, protocol=protocol)
    assert_failed(run, "payload_too_large", "context_length_exceeded")
    assert len(server.requests) <= 4


@each_protocol
async def test_html_error_page_is_classified_by_status(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    server.script = [Reply(status=403, raw="<html>\x07Forbidden</html>")]
    run = await harness.run(server, protocol=protocol)
    assert_failed(run, "forbidden", "provider_rejected_request")
    assert "\x07" not in run.result["error"]


async def test_provider_error_text_is_limited_to_500_characters(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(status=403, error="z" * 5000)]
    run = await harness.run(server)
    assert 400 <= run.result["error"].count("z") <= 510


# ---- rate limits


async def test_short_retry_after_is_waited_for(harness: Harness, server: ModelServer, other: ModelServer) -> None:
    server.script = [Reply(status=429, headers={"Retry-After": "1"}), Reply(text="Done.")]
    run = await harness.run(server, fallbacks=(fallback_to(other),))
    assert run.result["final_response"] == "Done."
    assert other.requests == []
    assert run.event("model.retrying")["wait_seconds"] == pytest.approx(1.0)
    assert server.requests[1].time - server.requests[0].time >= 1.0


async def test_long_retry_after_falls_back_and_persists_to_next_turn(
    harness: Harness, server: ModelServer, other: ModelServer
) -> None:
    server.script = [Reply(status=429, headers={"Retry-After": "30"})]
    other.script = [Reply(text="One."), Reply(text="Two.")]
    first = await harness.run(server, fallbacks=(fallback_to(other),))
    second = await harness.run(server, fallbacks=(fallback_to(other),))
    assert [run.result["final_response"] for run in (first, second)] == ["One.", "Two."]
    assert (len(server.requests), len(other.requests)) == (1, 2)


@pytest.mark.usefixtures("quick")
async def test_fallback_lasts_for_turn_and_next_turn_uses_primary(
    harness: Harness, server: ModelServer, other: ModelServer
) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(status=403), Reply(text="Back again.")]
    other.script = [Reply(tool_calls=[Call("look")]), Reply(text="Done.")]
    first = await harness.run(server, fallbacks=(fallback_to(other),))
    second = await harness.run(server, fallbacks=(fallback_to(other),))
    assert (first.result["final_response"], second.result["final_response"]) == ("Done.", "Back again.")
    assert (len(server.requests), len(other.requests)) == (2, 2)


# ---- keys


@each_protocol
@pytest.mark.parametrize("status", [401, 402, 429])
async def test_rejected_key_rotates_to_next_key(
    make_harness: MakeHarness, server: ModelServer, protocol: Protocol, status: int
) -> None:
    harness = make_harness(with_keys(server, "sk-first-00000001", "sk-second-0000002", api_mode=MODES[protocol]))
    server.script = [Reply(status=status), Reply(text="One."), Reply(text="Two.")]
    run = await harness.run(None, route=TO_P)
    assert run.result["final_response"] == "One."
    assert run.actions() == ["rotate"]
    await harness.run(None, route=TO_P)
    assert [r.key for r in server.requests] == ["sk-first-00000001", "sk-second-0000002", "sk-second-0000002"]


@pytest.mark.parametrize(("status", "failure"), [(401, "auth"), (404, "model_not_found"), (400, "bad_request")])
async def test_error_names_the_address_that_refused(
    harness: Harness, server: ModelServer, status: int, failure: str
) -> None:
    server.script = [Reply(status=status, error="no")]
    url = f"http://user:secret@127.0.0.1:{server.port}/v1"
    run = await harness.run(None, route=RouteChoice(model="m", base_url=url, api_key=KEY))
    assert run.result["failure"] == failure
    assert run.result["error"].endswith(f". 127.0.0.1:{server.port}: no")
    assert "secret" not in run.result["error"]


async def test_all_keys_rejected_fails_with_auth(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness(with_keys(server, "sk-first-00000001", "sk-second-0000002"))
    server.repeat, server.script = True, [Reply(status=401)]
    run = await harness.run(None, route=TO_P)
    assert_failed(run, "auth", "provider_auth_failed")
    assert [r.key for r in server.requests] == ["sk-first-00000001", "sk-second-0000002"]
    assert run.final["retryable"] is False


# ---- streams that break before anything was said


@each_protocol
@pytest.mark.parametrize(
    "broken",
    [
        Reply(text="Hello", cut_at=20),
        Reply(text="Hello", cut_at=20, cut_clean=True),
        Reply(text="Hello", cut_at=0),
        Reply(raw=""),
        Reply(text="Hello", malformed_at=0),
    ],
    ids=["cut", "ended", "headers only", "empty", "malformed"],
)
async def test_stream_lost_before_text_is_retried(
    harness: Harness, server: ModelServer, protocol: Protocol, broken: Reply
) -> None:
    server.script = [broken, Reply(text="Hello")]
    run = await harness.run(server, protocol=protocol)
    assert run.result["final_response"] == run.text() == "Hello"
    assert run.actions() == ["reconnect"]
    assert run.event("model.retrying")["failure"] == "stream_lost"
    assert sent_messages(server.requests[1]) == [("user", "hi")]


@pytest.mark.usefixtures("quick")
@each_protocol
async def test_error_event_before_text_is_recovered(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    server.script = [Reply(error_event={}), Reply(text="Hello")]
    run = await harness.run(server, protocol=protocol)
    assert run.result["final_response"] == run.text() == "Hello"


async def test_stream_without_done_but_with_finish_reason_is_complete(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Hello", no_done=True)]
    run = await harness.run(server)
    assert run.result["final_response"] == "Hello"
    assert run.actions() == []


@pytest.mark.usefixtures("quick")
async def test_stream_that_always_breaks_fails(harness: Harness, server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(text="Hello", cut_at=20)]
    run = await harness.run(server)
    assert_failed(run, "stream_lost", "provider_unavailable")
    assert run.actions() == ["reconnect", "reconnect", "retry", "retry", "retry"]


# ---- streams that break after something was said

SENTENCE = ["The quick brown fox ", "jumps over ", "the lazy dog."]
WHOLE = "".join(SENTENCE)


@each_protocol
@pytest.mark.parametrize("clean", [False, True], ids=["cut", "ended"])
async def test_cut_answer_continues_in_same_message(
    harness: Harness, server: ModelServer, protocol: Protocol, clean: bool
) -> None:
    reply = Reply(text=SENTENCE, cut_clean=clean)
    server.handler = scripted(cut_after("the lazy", reply), Reply(text=SENTENCE))
    run = await harness.run(server, protocol=protocol)
    assert run.result["final_response"] == run.text() == WHOLE
    assert run.result["completed"] is True
    assert run.actions() == ["continue"]
    assert run.event("model.retrying")["failure"] == "stream_lost_text"
    assert len({event["message_id"] for event in run.events_of("text.delta")}) == 1
    assert [m["role"] for m in run.result["messages"]] == ["user", "assistant"]


@each_protocol
async def test_continuation_request_carries_text_and_is_not_stored(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    server.handler = scripted(cut_after("the lazy", Reply(text=SENTENCE)), Reply(text=SENTENCE), Reply(text="Next."))
    spec = harness.spec(server, protocol=protocol, persist=True)
    await harness.carry_out(spec)
    messages = sent_messages(server.requests[1])
    assert messages[:2] == [("user", "hi"), ("assistant", "The quick brown fox jumps over ")]
    assert [role for role, _ in messages[2:]] == ["user"]
    assert [(row.role, row.content) for row in await harness.rows(spec.session_id)] == [
        ("user", "hi"),
        ("assistant", WHOLE),
    ]


async def test_continuation_uses_assistant_prefill_if_supported(harness: Harness, server: ModelServer) -> None:
    server.handler = scripted(cut_after("the lazy", Reply(text=SENTENCE)), Reply(text=SENTENCE))
    run = await harness.run(server, protocol="anthropic", model="claude-3-5-haiku-latest")
    assert run.result["final_response"] == WHOLE
    last_role, last_text = sent_messages(server.requests[1])[-1]
    assert (last_role, last_text.rstrip()) == ("assistant", "The quick brown fox jumps over")


async def test_continuation_removes_repeated_words(harness: Harness, server: ModelServer) -> None:
    again = Reply(text=["brown fox ju", "mps over ", "the lazy dog."], continues=False)
    server.handler = scripted(cut_after("the lazy", Reply(text=SENTENCE)), again)
    run = await harness.run(server)
    assert run.result["final_response"] == run.text() == WHOLE


async def test_continuation_overlap_below_twelve_characters_is_kept(harness: Harness, server: ModelServer) -> None:
    text = ["Well, well, he said: ", "well, ", "fine"]
    server.handler = scripted(cut_after("fine", Reply(text=text)), Reply(text="well, enough.", continues=False))
    run = await harness.run(server)
    assert run.result["final_response"] == "Well, well, he said: well, well, enough."


@each_protocol
async def test_partial_answer_is_kept_after_three_continuations(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    pieces = ["One. ", "Two. ", "Three. ", "Four. ", "Five."]
    cuts = [cut_after(piece, Reply(text=pieces)) for piece in pieces[1:]]
    server.handler = scripted(*cuts)
    spec = harness.spec(server, protocol=protocol, persist=True)
    run = await harness.carry_out(spec)
    assert_failed(run, "stream_lost_text", "provider_unavailable")
    assert run.actions() == ["continue"] * 3
    assert run.result["final_response"] == run.text() == "One. Two. Three. Four. "
    assert run.result["partial"] is True
    rows = await harness.rows(spec.session_id)
    assert (rows[-1].content, rows[-1].finish_reason) == ("One. Two. Three. Four. ", "error")


async def test_failed_run_names_partial_row(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Once upon", finish="content_filter")]
    spec = harness.spec(server, persist=True)
    run = await harness.carry_out(spec)
    assert run.final["partial_row"] == (await harness.rows(spec.session_id))[-1].id
    assert run.final["text_length"] == len("Once upon")


async def test_fallback_continues_same_message(harness: Harness, server: ModelServer, other: ModelServer) -> None:
    pieces = ["One. ", "Two. ", "Three. ", "Four. ", "Five."]
    server.handler = scripted(*[cut_after(piece, Reply(text=pieces)) for piece in pieces[1:]])
    other.script = [Reply(text=pieces)]
    run = await harness.run(server, fallbacks=(fallback_to(other, "anthropic"),))
    assert run.actions() == ["continue"] * 3 + ["fallback"]
    assert run.result["final_response"] == run.text() == "".join(pieces)
    assert len({event["message_id"] for event in run.events_of("text.delta")}) == 1
    assert ("assistant", "One. Two. Three. Four. ") in sent_messages(other.requests[0])


@each_protocol
async def test_malformed_event_after_text_is_continued(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    place = {"chat": 2, "responses": 5, "anthropic": 4}[protocol]
    server.script = [Reply(text=SENTENCE, malformed_at=place), Reply(text=SENTENCE)]
    run = await harness.run(server, protocol=protocol)
    assert run.result["final_response"] == run.text() == WHOLE
    assert run.actions() == ["continue"]


# ---- streams that break inside a call

HALF_CALL = Reply(text="Let me look.", tool_calls=[Call("look", ['{"a": "FIRST', 'SECOND"}'])])


@each_protocol
async def test_tool_call_cut_after_text_is_dropped_with_warning(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    ran_tools: list[Any] = []
    harness.offer(tool("look", lambda _, args: ran_tools.append(args) or {}))
    server.handler = scripted(*[cut_after("SECOND", HALF_CALL)] * 3)
    run = await harness.run(server, protocol=protocol)
    assert run.actions() == ["continue", "continue"]
    assert_failed(run, "stream_lost_tool", "provider_unavailable")
    assert run.result["partial"] is True
    warning = "Stream stalled mid tool-call (look); the call was not executed."
    assert run.result["final_response"].startswith("Let me look.")
    assert run.result["final_response"].endswith(warning)
    assert run.text() == run.result["final_response"]
    assert ran_tools == []
    assert run.events_of("tool.started") == []


@each_protocol
async def test_tool_call_cut_after_text_is_named_in_continuation(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    ran_tools: list[Any] = []
    harness.offer(tool("look", lambda _, args: ran_tools.append(args) or {}))
    server.handler = scripted(cut_after("SECOND", HALF_CALL), HALF_CALL, Reply(text="Done."))
    run = await harness.run(server, protocol=protocol)
    assert run.result["final_response"] == "Done."
    assert "look" in sent_messages(server.requests[1])[-1][1]
    assert ran_tools == [{"a": "FIRSTSECOND"}]
    assert run.result["messages"][1]["content"] == "Let me look."


@each_protocol
async def test_tool_call_cut_without_text_is_retried(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    ran_tools: list[Any] = []
    harness.offer(tool("look", lambda _, args: ran_tools.append(args) or {}))
    silent = Reply(tool_calls=HALF_CALL.tool_calls)
    server.handler = scripted(cut_after("SECOND", silent), silent, Reply(text="Done."))
    run = await harness.run(server, protocol=protocol)
    assert run.actions() == ["reconnect"]
    assert run.event("model.retrying")["failure"] == "stream_lost_tool"
    assert ran_tools == [{"a": "FIRSTSECOND"}]


async def test_tool_call_always_cut_fails_without_text(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.handler = scripted(*[cut_after("SECOND", Reply(tool_calls=HALF_CALL.tool_calls))] * 3)
    run = await harness.run(server)
    assert_failed(run, "stream_lost_tool", "provider_unavailable")
    assert (run.result["final_response"], run.result["partial"]) == ("", False)


# ---- silence


async def test_idle_timeout_before_text_reconnects(
    make_harness: MakeHarness, server: ModelServer, clock: Clock
) -> None:
    harness = make_harness(with_keys(server, KEY, stale_timeout_seconds=SILENT_S))
    server.script = [Reply(text="Hello", stall_at=0), Reply(text="Hello")]
    running = await harness.begin(harness.spec(None, route=TO_P))
    await clock.answered(server, 1)
    await clock.put_forward(SILENT_S + 1)
    run = await running.end()
    assert run.result["final_response"] == "Hello"
    assert run.event("model.retrying")["failure"] == "stale"
    assert run.actions() == ["reconnect"]
    await nothing_left(server)


async def test_idle_timeout_after_text_continues(make_harness: MakeHarness, server: ModelServer, clock: Clock) -> None:
    harness = make_harness(with_keys(server, KEY, stale_timeout_seconds=SILENT_S))
    server.script = [Reply(text=SENTENCE, gap_s=600), Reply(text=SENTENCE)]
    running = await harness.begin(harness.spec(None, route=TO_P))
    await running.wait_for("text.delta")
    await clock.put_forward(SILENT_S + 1)
    run = await running.end()
    assert run.result["final_response"] == WHOLE
    assert run.actions() == ["continue"]


async def test_keepalive_bytes_extend_idle_timeout_threefold(
    make_harness: MakeHarness, server: ModelServer, clock: Clock
) -> None:
    harness = make_harness(with_keys(server, KEY, stale_timeout_seconds=SILENT_S))
    server.script = [Reply(text="Hello", stall_at=0, comments=True), Reply(text="Hello")]
    running = await harness.begin(harness.spec(None, route=TO_P))
    await clock.answered(server, 1)
    for _ in range(5):
        await clock.hear()
        assert len(server.requests) == 1
        await clock.put_forward(0.62 * SILENT_S)  # five times are more than three of it, and four are less
    run = await running.end()
    assert run.result["final_response"] == "Hello"
    assert run.actions() == ["reconnect"]
    assert len(server.requests) == 2


@pytest.mark.usefixtures("quick")
async def test_request_timeout(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness(with_keys(server, KEY, request_timeout_seconds=0.2) | {"agent": {"api_max_retries": 0}})
    server.script = [Reply(text="Hello", stall_at=0, comments=True), Reply(text="Hello")]
    run = await harness.run(None, route=TO_P)
    assert run.events[2]["failure"] == "timeout"


# ---- providers that want to be asked otherwise


@each_protocol
async def test_streaming_rejection_disables_streaming_for_turn(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    harness.offer(tool("look"))
    whole = [Reply(tool_calls=[Call("look")]), Reply(text="Done."), Reply(text="Again.")]
    server.handler = lambda request: Reply(refuse_stream=True) if request.stream else whole.pop(0)
    first = await harness.run(server, protocol=protocol)
    assert first.result["final_response"] == first.text() == "Done."
    assert [request.stream for request in server.requests] == [True, False, False]
    second = await harness.run(server, protocol=protocol)
    assert second.result["final_response"] == "Again."
    assert [request.stream for request in server.requests[3:]] == [True, False]
    assert [event["streaming"] for event in second.events_of("model.started")] == [True, False]


@each_protocol
async def test_rejected_option_is_dropped_and_remembered(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    server.repeat, server.script = True, [Reply(reject_option="temperature", text="Done.", continues=False)]
    run = await harness.run(server, protocol=protocol, sampling={"temperature": 0.5})
    assert run.result["final_response"] == "Done."
    await harness.run(server, protocol=protocol, sampling={"temperature": 0.5})
    assert ["temperature" in request.body for request in server.requests] == [True, False, False]


async def test_remembered_rejected_option_is_named_in_every_run(harness: Harness, server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(reject_option="temperature", text="Done.", continues=False)]
    runs = [await harness.run(server, sampling={"temperature": 0.5}) for _ in range(2)]
    assert [any("temperature" in n["message"] for n in run.events_of("notice")) for run in runs] == [True, True]


@each_protocol
async def test_mutually_exclusive_option_is_dropped_with_notice(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    server.script = [Reply(text="Done.")]
    wanted = {"temperature": 0.5, "top_p": 0.9}
    run = await harness.run(server, protocol=protocol, sampling=wanted)
    left_out = wanted.keys() - server.requests[0].body.keys()
    text = " ".join(notice["message"] for notice in run.events_of("notice"))
    assert {name for name in left_out if name not in text} == set()


async def test_rejected_stream_options_estimates_usage(harness: Harness, server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(reject_option="stream_options", text="Done.")]
    run = await harness.run(server)
    assert run.result["final_response"] == "Done."
    assert run.event("usage")["measured"] == "estimate"


async def test_four_rejected_options_fail_turn(harness: Harness, server: ModelServer) -> None:
    options = ["temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"]
    server.script = [Reply(reject_option=option, text="Done.") for option in options]
    run = await harness.run(server, sampling=dict.fromkeys(options, 1))
    assert_failed(run, "option_rejected", "provider_rejected_request")
    assert len(server.requests) == 5


async def test_rejected_replay_items_are_dropped(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    refusal = "messages.1.content.0: Invalid `signature` in `thinking` block"
    server.script = [
        Reply(reasoning="hm", signature="c2ln", tool_calls=[Call("look")]),
        Reply(status=400, error=refusal),
        Reply(text="Done."),
    ]
    run = await harness.run(server, protocol="anthropic")
    assert run.result["final_response"] == "Done."
    assert ["c2ln" in json.dumps(request.body) for request in server.requests] == [False, True, False]


# ---- answers cut at the output limit


@each_protocol
async def test_truncated_answer_is_continued(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    parts = ["One. ", "Two. ", "Three. ", "Four."]
    server.script = [Reply(text=p, finish="length", continues=False) for p in parts[:3]]
    server.script = [*server.script, Reply(text=parts[3], continues=False)]
    run = await harness.run(server, protocol=protocol)
    assert run.result["final_response"] == run.text() == "".join(parts)
    assert run.result["completed"] is True
    assert run.event("message.completed")["finish_reason"] == "stop"
    assert [m["role"] for m in run.result["messages"]] == ["user", "assistant"]


@each_protocol
async def test_answer_truncated_four_times_is_kept_as_truncated(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    parts = ["One. ", "Two. ", "Three. ", "Four."]
    server.script = [Reply(text=p, finish="length", continues=False) for p in parts]
    spec = harness.spec(server, protocol=protocol, persist=True)
    run = await harness.carry_out(spec)
    assert run.final["type"] == "run.failed"
    assert (run.result["failure"], run.result["error_code"]) == ("truncated_text", "output_truncated")
    assert (run.result["failed"], run.result["partial"], run.result["completed"]) == (False, True, False)
    assert run.result["final_response"] == "".join(parts)
    assert "truncated" in run.result["error"]
    assert (await harness.rows(spec.session_id))[-1].finish_reason == "length"


@each_protocol
@pytest.mark.parametrize("window_ms", [0, 20])
async def test_endless_answer_is_cut(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, protocol: Protocol, window_ms: int
) -> None:
    harness.configure({"agent": {"max_answer_chars": 1_000, "delta_window_ms": window_ms}})
    go_on = hold_answers(monkeypatch)
    server.script = [Reply(text=["word " * 20] * 5_000, gap_s=1)]
    spec = harness.spec(server, protocol=protocol, persist=True)
    running = await harness.begin(spec)
    await running.wait_for("text.delta")
    go_on.set()
    run = await running.end()
    assert len(server.requests) == 1
    assert (run.result["failure"], run.result["error_code"]) == ("answer_too_long", "output_truncated")
    # What comes in one piece from the network may be more than the limit, but not half of it all.
    assert 1_000 < len(run.result["final_response"]) < 250_000
    assert "agent.max_answer_chars" in run.result["error"]
    assert (await harness.rows(spec.session_id))[-1].finish_reason == "length"


@each_protocol
async def test_endless_reasoning_is_cut(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    harness.configure({"agent": {"max_answer_chars": 1_000}})
    server.script = [Reply(reasoning=["hm " * 20] * 10_000, text="Done.")]
    run = await harness.run(server, protocol=protocol)
    assert len(server.requests) == 1
    assert run.result["error_code"] == "output_truncated"


@pytest.mark.parametrize("window_ms", [0, 20])
@pytest.mark.parametrize("field", ["text", "reasoning"])
@each_protocol
async def test_answer_over_limit_in_one_packet_is_cut(
    harness: Harness, server: ModelServer, protocol: Protocol, field: str, window_ms: int
) -> None:
    harness.configure({"agent": {"max_answer_chars": 1_000, "delta_window_ms": window_ms}})
    server.script = [Reply(**{"text": "Done.", field: ["w" * 100] * 30}, packets=65_536)]
    run = await harness.run(server, protocol=protocol)
    assert len(server.requests) == 1
    assert run.result["error_code"] == "output_truncated"


@each_protocol
async def test_plain_answer_over_limit_is_cut(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    harness.configure({"agent": {"max_answer_chars": 1_000}})
    server.script = [Reply(text="w" * 3_000, as_json=True)]
    run = await harness.run(server, protocol=protocol)
    assert len(server.requests) == 1
    assert run.result["error_code"] == "output_truncated"


@each_protocol
async def test_answer_at_max_tokens_of_caller_is_not_continued(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    server.script = [Reply(text="One two", finish="length")]
    run = await harness.run(server, protocol=protocol, max_output_tokens=64)
    assert server.requests[0].body[OUTPUT_LIMIT[protocol]] == 64
    assert len(server.requests) == 1
    assert run.result["final_response"] == "One two"
    assert (run.result["failed"], run.result["partial"]) == (False, True)
    assert run.result["error_code"] == "output_truncated"
    assert run.event("message.completed")["finish_reason"] == "length"


async def test_max_tokens_of_caller_may_cut_before_first_word(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(reasoning="hm", finish="length")]
    run = await harness.run(server, max_output_tokens=64)
    assert len(server.requests) == 1
    assert (run.result["final_response"], run.result["partial"], run.result["failed"]) == ("", True, False)
    assert run.result["error_code"] == "output_truncated"


@each_protocol
async def test_truncated_tool_call_is_retried_with_larger_limit(
    make_harness: MakeHarness, server: ModelServer, protocol: Protocol
) -> None:
    base = {"default": "m", "base_url": f"{server.url}/v1", "api_mode": MODES[protocol], "api_key": KEY}
    harness = make_harness({"model": {**base, "max_tokens": 100}})
    ran_tools: list[Any] = []
    harness.offer(tool("look", lambda _, args: ran_tools.append(args) or {}))
    cut = Reply(tool_calls=[Call("look", '{"a": "unfini')], finish="length")
    server.script = [cut, cut, cut, Reply(tool_calls=[Call("look", {"a": "short"})]), Reply(text="Done.")]
    run = await harness.run(None, protocol=protocol)
    assert [r.body[OUTPUT_LIMIT[protocol]] for r in server.requests[:3]] == [100, 200, 400]
    assert run.actions() == ["raise_output", "raise_output", "nudge"]
    assert sent_messages(server.requests[3])[-1][0] == "user"
    assert ran_tools == [{"a": "short"}]
    assert run.result["final_response"] == "Done."


async def test_tool_call_that_stays_truncated_fails(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.repeat, server.script = True, [Reply(tool_calls=[Call("look", '{"a": "unfini')], finish="length")]
    run = await harness.run(server)
    assert_failed(run, "truncated_tool", "agent_incomplete")
    assert "truncated" in run.result["error"]
    assert run.events_of("tool.started") == []


async def test_incomplete_arguments_count_as_truncated(harness: Harness, server: ModelServer) -> None:
    ran_tools: list[Any] = []
    harness.offer(tool("look", lambda _, args: ran_tools.append(args) or {}))
    server.repeat, server.script = True, [Reply(tool_calls=[Call("look", '{"a": "unfini')])]
    run = await harness.run(server)
    assert_failed(run, "truncated_tool", "agent_incomplete")
    assert ran_tools == []


# ---- filters, silence and wrong forms


@each_protocol
async def test_filtered_answer_keeps_text(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    server.script = [Reply(text="Once upon", finish="content_filter")]
    run = await harness.run(server, protocol=protocol)
    assert run.final["type"] == "run.failed"
    assert (run.result["failure"], run.result["error_code"]) == ("filtered", "content_filter")
    assert (run.result["final_response"], run.result["partial"], run.result["failed"]) == ("Once upon", True, False)
    assert run.event("message.completed")["finish_reason"] == "content_filter"


@each_protocol
async def test_filtered_answer_without_text_is_content_policy_violation(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    server.script = [Reply(finish="content_filter")]
    run = await harness.run(server, protocol=protocol)
    assert_failed(run, "filtered", "content_policy_violation")
    assert run.result["final_response"] == ""


@each_protocol
@pytest.mark.parametrize("thought", ["", "hm"], ids=["nothing", "only reasoning"])
async def test_empty_answer_is_nudged_and_nudge_is_not_stored(
    harness: Harness, server: ModelServer, protocol: Protocol, thought: str
) -> None:
    server.script = [Reply(reasoning=thought), Reply(text="Here.")]
    run = await harness.run(server, protocol=protocol)
    assert run.actions() == ["nudge"]
    assert run.result["final_response"] == run.text() == "Here."
    assert sent_messages(server.requests[1])[-1][0] == "user"
    assert [(m["role"], m["content"]) for m in run.result["messages"]] == [("user", "hi"), ("assistant", "Here.")]


@pytest.mark.usefixtures("quick")
async def test_answer_that_stays_empty_fails(harness: Harness, server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply()]
    run = await harness.run(server)
    assert run.actions() == ["nudge", "retry", "retry"]
    assert_failed(run, "empty", "agent_incomplete")
    assert all(event["message"] == "The model gave an empty answer." for event in run.events_of("model.retrying"))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("protocol", ["chat", "anthropic"])
async def test_announced_but_missing_tool_call_is_retried(
    harness: Harness, server: ModelServer, protocol: Protocol, streaming: bool
) -> None:
    calls: list[Any] = []
    harness.offer(tool("look", lambda _, args: calls.append(args) or {"ok": True}))
    announced = Reply(text="Let me look.", finish="tool_calls", as_json=not streaming)
    server.script = [announced, Reply(tool_calls=[Call("look")]), Reply(text="Done.")]
    run = await harness.run(server, protocol=protocol)
    assert run.actions() == ["nudge"]
    assert run.event("model.retrying")["failure"] == "missing_call"
    assert sent_messages(server.requests[1])[-2][1].startswith("Let me look.")
    assert sent_messages(server.requests[1])[-1][0] == "user"
    assert calls == [{}]
    assert run.text() == "Let me look.Done."
    assert run.result["final_response"] == "Done."


@pytest.mark.parametrize("protocol", ["chat", "anthropic"])
async def test_missing_tool_call_leaves_text_as_answer(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(text="It is five.", finish="tool_calls"), Reply(text=" Indeed.", finish="tool_calls")]
    run = await harness.run(server, protocol=protocol)
    assert run.actions() == ["nudge"]
    assert run.result["final_response"] == run.text() == "It is five. Indeed."
    assert run.result["completed"] is True
    assert (run.result["api_calls"], run.result["output_tokens"]) == (2, 10), "each answer is counted once"


@pytest.mark.usefixtures("quick")
async def test_missing_tool_call_without_text_is_empty_answer(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    server.repeat, server.script = True, [Reply(finish="tool_calls")]
    run = await harness.run(server)
    assert run.actions() == ["nudge", "retry", "retry"]
    assert_failed(run, "empty", "agent_incomplete")


async def test_tool_finish_reason_without_tools_is_plain_answer(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="It is five.", finish="tool_calls")]
    run = await harness.run(server)
    assert (run.result["final_response"], run.actions()) == ("It is five.", [])


# ---- reasoning and nothing else

THOUGHT = "Two and two.\n" * 400 + "It must be four."


@pytest.mark.usefixtures("quick")
@each_protocol
@pytest.mark.parametrize("streaming", [True, False])
async def test_reasoning_only_answer_gives_excerpt(
    harness: Harness, server: ModelServer, protocol: Protocol, streaming: bool
) -> None:
    server.repeat, server.script = True, [Reply(reasoning=THOUGHT, as_json=not streaming)]
    run = await harness.run(server, protocol=protocol)
    assert run.actions() == ["nudge", "retry", "retry"]
    answer = run.result["final_response"]
    assert answer == run.text()
    assert answer.startswith(f"{prompt.REASONING_EXCERPT}\n\n… ")
    assert answer.endswith("It must be four.")
    assert len(answer) < REASONING_EXCERPT_CHARS_MAX + 100
    assert (run.result["completed"], run.result["failed"]) == (True, False)
    assert [(n["level"], n["code"]) for n in run.events_of("notice")] == [("warn", "reasoning_only")]
    assert run.result["output_tokens"] == 20, "four answers, each counted once"


@pytest.mark.usefixtures("quick")
@each_protocol
async def test_truncated_reasoning_only_answer_gives_excerpt(
    harness: Harness, server: ModelServer, protocol: Protocol
) -> None:
    server.repeat, server.script = True, [Reply(reasoning="Hm, four?", finish="length")]
    run = await harness.run(server, protocol=protocol)
    assert run.result["final_response"].endswith("Hm, four?")
    assert (run.final["type"], run.result["error_code"]) == ("run.failed", "output_truncated")
    assert (run.result["partial"], run.result["failed"]) == (True, False)


@pytest.mark.usefixtures("quick")
async def test_reasoning_excerpt_is_not_used_for_json_format(harness: Harness, server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(reasoning="Hm.")]
    run = await harness.run(server, response_format=FORMAT)
    assert_failed(run, "empty", "agent_incomplete")


FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "strict": True, "schema": schema(["n"], n={"type": "integer"})},
}


@each_protocol
async def test_structured_output_is_repaired_once(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    server.script = [Reply(text='{"n": "one"}'), Reply(text='{"n": 1}')]
    run = await harness.run(server, protocol=protocol, response_format=FORMAT)
    assert run.result["final_response"] == '{"n": 1}'
    assert run.result["completed"] is True


async def test_structured_output_that_stays_invalid_fails(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="one"), Reply(text="two")]
    run = await harness.run(server, response_format=FORMAT)
    assert_failed(run, "bad_structure", "structured_output_failed")


# ---- deadlines


async def test_deadline_keeps_partial_text(harness: Harness, server: ModelServer, clock: Clock) -> None:
    server.script = [Reply(text=["Once ", "upon"], gap_s=600)]
    running = await harness.begin(harness.spec(server, deadline_seconds=300))
    await running.wait_for("text.delta")
    await clock.put_forward(301)
    run = await running.end()
    assert_failed(run, "deadline", "turn_timeout")
    assert (run.result["final_response"], run.result["partial"]) == ("Once ", True)
    await nothing_left(server)


async def test_deadline_before_text_fails_without_text(harness: Harness, server: ModelServer, clock: Clock) -> None:
    server.script = [Reply(text="Hello", delay_s=600)]
    running = await harness.begin(harness.spec(server, deadline_seconds=300))
    await server.until(lambda: server.open_streams == 1)
    await clock.put_forward(301)
    run = await running.end()
    assert_failed(run, "deadline", "turn_timeout")
    assert run.result["final_response"] == ""
    await nothing_left(server)


async def test_retry_wait_past_deadline_is_not_started(
    harness: Harness, server: ModelServer, other: ModelServer
) -> None:
    server.script = [Reply(status=429, headers={"Retry-After": "599"})]
    run = await harness.run(server, deadline_seconds=300)
    assert run.events_of("model.retrying") == []
    assert run.result["failed"] is True
    assert len(server.requests) == 1


async def test_deadline_ends_tool(harness: Harness, server: ModelServer, clock: Clock) -> None:
    async def forever(_: Any, __: Any) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    harness.offer(tool("look", forever))
    server.script = [Reply(text="Wait.", tool_calls=[Call("look")])]
    running = await harness.begin(harness.spec(server, deadline_seconds=300))
    await running.wait_for("tool.started")
    await clock.put_forward(301)
    run = await running.end()
    assert_failed(run, "deadline", "turn_timeout")
    assert len(run.events_of("tool.finished")) == 1
    await nothing_left(server)


# ---- failure is not speech, and secrets stay put


def everything_said(run: CompletedRun, rows: list[Any], caplog: pytest.LogCaptureFixture) -> str:
    """All that a failed run has left anywhere a person or a model could read it."""
    stored = [repr(run.spec), json.dumps(run.spec.stored(), default=str), repr(rows)]
    return "\n".join([json.dumps(run.result), json.dumps(run.events), caplog.text, *stored])


@pytest.mark.usefixtures("quick")
@each_protocol
@pytest.mark.parametrize("key", [KEY, ODD_KEY], ids=["by pattern", "by value"])
@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=401, quote_key=True),
        Reply(status=500, quote_key=True),
        Reply(status=429, quote_key=True),
        Reply(error_event={}, quote_key=True),
        Reply(text="Once ", error_event={}, quote_key=True),
    ],
    ids=["401", "500", "429", "in the stream", "after text"],
)
async def test_key_in_provider_error_is_redacted_everywhere(
    make_harness: MakeHarness,
    server: ModelServer,
    caplog: pytest.LogCaptureFixture,
    protocol: Protocol,
    key: str,
    reply: Reply,
) -> None:
    caplog.set_level(logging.DEBUG)
    harness = make_harness(with_keys(server, key, api_mode=MODES[protocol]))
    server.repeat, server.script = True, [reply]
    spec = harness.spec(None, route=TO_P, persist=True)
    run = await harness.carry_out(spec)
    assert run.result["failed"] is True
    assert server.requests[0].key == key
    rows = [*await harness.rows(spec.session_id), await harness.engine.get(spec.run_id)]
    assert key not in everything_said(run, rows, caplog)


@pytest.mark.usefixtures("quick")
async def test_key_given_with_run_is_redacted(
    harness: Harness, server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.script = [Reply(status=401, raw=f"<html>key={ODD_KEY} is bad</html>")]
    spec = harness.spec(server, api_key=ODD_KEY, persist=True)
    run = await harness.carry_out(spec)
    assert server.requests[0].key == ODD_KEY
    rows = [*await harness.rows(spec.session_id), await harness.engine.get(spec.run_id)]
    assert ODD_KEY not in everything_said(run, rows, caplog)


async def test_key_of_fallback_given_with_run_is_redacted(
    harness: Harness, server: ModelServer, other: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.script, other.script = [Reply(status=403)], [Reply(status=401, quote_key=True)]
    spec = harness.spec(server, fallbacks=(fallback_to(other, api_key=ODD_KEY),), persist=True)
    run = await harness.carry_out(spec)
    assert other.requests[0].key == ODD_KEY
    rows = [*await harness.rows(spec.session_id), await harness.engine.get(spec.run_id)]
    assert ODD_KEY not in everything_said(run, rows, caplog)


async def test_key_in_model_text_is_redacted_across_chunks(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness(with_keys(server, ODD_KEY))
    server.script = [Reply(text=["It is ", ODD_KEY[:9], ODD_KEY[9:14], ODD_KEY[14:], ", keep it."], gap_s=0.03)]
    run = await harness.run(None, route=TO_P)
    assert run.result["final_response"] == run.text() == "It is [redacted], keep it."


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("reply", [Reply(status=500, error="ZEBRA"), Reply(error_event={"message": "ZEBRA"})])
async def test_error_text_never_becomes_assistant_text(harness: Harness, server: ModelServer, reply: Reply) -> None:
    server.repeat, server.script = True, [reply]
    spec = harness.spec(server, persist=True)
    run = await harness.carry_out(spec)
    assert "ZEBRA" in run.result["error"]
    assert "ZEBRA" not in run.text()
    assert all("ZEBRA" not in str(row.content) for row in await harness.rows(spec.session_id))


async def test_attempts_are_numbered(harness: Harness, server: ModelServer) -> None:
    requests: list[Request] = []

    def answer(request: Request) -> Reply:
        requests.append(request)
        return Reply(reset_before_headers=True) if len(requests) < 3 else Reply(text="Done.")

    server.handler = answer
    run = await harness.run(server)
    assert [event["attempt"] for event in run.events_of("model.started")] == [1, 2, 3]
    assert run.event("run.completed")["steps"] == 1


# ---- odd answers


async def test_model_waiting_notice_every_thirty_seconds(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MODEL_WAITING_S", 0.02)
    go_on = asyncio.Event()

    async def answer(_: Request) -> Reply:
        await go_on.wait()
        return Reply(text="Done.")

    server.handler = answer
    running = await harness.begin(harness.spec(server))
    await running.until(lambda events: [event["type"] for event in events].count("notice") > 1)
    go_on.set()
    run = await running.end()
    codes = [notice["code"] for notice in run.events_of("notice")]
    assert codes == ["model_waiting"] * len(codes)
    assert len(codes) > 1
    assert run.result["final_response"] == "Done."


@pytest.mark.usefixtures("quick")
async def test_non_answer_body_is_not_accepted(harness: Harness, server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(raw="<html>Welcome to ZEBRA wifi</html>", as_json=True)]
    run = await harness.run(server)
    assert run.result["failed"] is True
    assert run.result["final_response"] == ""
    assert "ZEBRA" not in json.dumps(run.result["messages"])


@each_protocol
async def test_tool_calls_run_with_any_finish_reason(harness: Harness, server: ModelServer, protocol: Protocol) -> None:
    harness.offer(tool("look"))
    server.script = [Reply(tool_calls=[Call("look")], finish="stop"), Reply(text="Done.")]
    run = await harness.run(server, protocol=protocol)
    assert len(run.events_of("tool.started")) == 1
    assert run.result["final_response"] == "Done."


def chunk(delta: Any, finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}) + "\n\n"


@pytest.mark.usefixtures("quick")
async def test_lone_surrogates_in_stream_are_tolerated(harness: Harness, server: ModelServer) -> None:
    halves = [chunk({"content": half}) for half in ("Hi \ud83d", "\ude42 and \ud83d", " alone")]
    server.script = [Reply(raw="".join(halves) + chunk({}, "stop") + "data: [DONE]\n\n")]
    run = await harness.run(server, persist=True)
    assert run.result["completed"] is True
    text = run.result["final_response"]
    assert text.encode().decode() == run.text() == text
    assert text.startswith("Hi ")
    assert text.endswith(" alone")


async def test_lone_surrogate_in_message_is_sent(harness: Harness, server: ModelServer) -> None:
    server.script = [Reply(text="Done.")]
    run = await harness.run(server, "look: \ud83d!", persist=True)
    assert run.result["final_response"] == "Done."
    assert sent_messages(server.requests[0])[0][1].startswith("look: ")


async def test_duplicate_tool_call_ids_over_steps(harness: Harness, server: ModelServer) -> None:
    harness.offer(tool("look"))
    looks = [Reply(tool_calls=[Call("look", {"a": str(n)}, id="call_0")]) for n in range(2)]
    server.script = [*looks, Reply(text="Done.")]
    run = await harness.run(server, persist=True)
    assert run.tool_results() == [{"echo": {"a": "0"}}, {"echo": {"a": "1"}}]
    assert [m["content"] for m in server.requests[2].body["messages"] if m["role"] == "tool"] == [
        '{"echo": {"a": "0"}}',
        '{"echo": {"a": "1"}}',
    ]


PICTURE = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
]


async def test_rejected_image_is_described_by_vision_model(
    make_harness: MakeHarness, server: ModelServer, other: ModelServer
) -> None:
    spare = {"providers": {"spare": {"base_url": f"{other.url}/v1", "api_key": KEY}}}
    seeing = {"vision": {"provider": "spare", "model": "eyes"}, "title_generation": {"enabled": False}}
    harness = make_harness({**spare, "auxiliary": seeing})
    refusal = Reply(status=400, error="This model does not support image input.")
    server.handler = lambda r: refusal if "image_url" in json.dumps(r.body["messages"]) else Reply(text="A fox.")
    other.repeat, other.script = True, [Reply(text="A red fox in snow.", continues=False)]
    run = await harness.run(server, PICTURE)
    assert run.result["final_response"] == "A fox."
    assert "A red fox in snow." in json.dumps(server.requests[-1].body)


IMAGE_REFUSALS = [
    (400, "This model does not support image input."),
    (400, "Invalid image data."),
    (400, "image exceeds 5 MB maximum: 6 MB > 5 MB"),
    (413, "Request entity too large."),
]


@each_protocol
@pytest.mark.parametrize(("status", "refusal"), IMAGE_REFUSALS)
async def test_rejected_image_is_replaced_by_note(
    harness: Harness, server: ModelServer, protocol: Protocol, status: int, refusal: str
) -> None:
    def answer(request: Request) -> Reply:
        has_image = "iVBORw0KGgo" in json.dumps(request.body) or "image/jpeg" in json.dumps(request.body)
        return Reply(status=status, error=refusal) if has_image else Reply(text="I see no image.")

    server.handler = answer
    run = await harness.run(server, PICTURE, protocol=protocol)
    assert run.result["final_response"] == "I see no image."
    (text,) = [text for role, text in sent_messages(server.requests[-1]) if role == "user"]
    assert text.startswith("What is this?") and "refused by the model's provider" in text
    (notice,) = run.events_of("notice")
    assert (notice["level"], notice["code"]) == ("warn", "image_rejected")


async def test_rejected_image_in_history_is_replaced(harness: Harness, server: ModelServer) -> None:
    refusal = Reply(status=400, error="Unsupported image.")
    server.handler = lambda r: refusal if "image_url" in json.dumps(r.body["messages"]) else Reply(text="Well.")
    history = [{"role": "user", "content": PICTURE}, {"role": "assistant", "content": "A fox."}]
    run = await harness.run(server, "Sure?", history=history)
    assert run.result["final_response"] == "Well."


async def test_rejected_image_without_vision_fails(harness: Harness, server: ModelServer) -> None:
    server.repeat, server.script = True, [Reply(status=400, error="This model does not support image input.")]
    run = await harness.run(server, PICTURE)
    assert_failed(run, "image_rejected", "provider_rejected_request")


@pytest.mark.usefixtures("quick")
async def test_request_timeout_from_environment(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_API_TIMEOUT", "0.15")
    server.repeat, server.script = True, [Reply(text="Done.", delay_s=600)]
    run = await harness.run(server)
    assert run.events_of("model.retrying")[0]["failure"] == "timeout"


@pytest.mark.usefixtures("quick")
async def test_encoded_forms_of_key_are_redacted(
    make_harness: MakeHarness, server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "odd+key/with=signs&0123"
    spelled = [key, quote(key, safe=""), base64.b64encode(key.encode()).decode()]
    harness = make_harness(with_keys(server, key))
    server.script = [Reply(status=401, error=f"bad key {' or '.join(spelled)}")]
    run = await harness.run(None, route=TO_P)
    text = everything_said(run, [], caplog)
    assert [form for form in spelled if form.rstrip("=") in text] == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "reply",
    [Reply(status=500, error="sk-" * 100_000), Reply(error_event={"message": "sk-" * 100_000})],
    ids=["500", "in the stream"],
)
async def test_redaction_of_provider_error_is_bounded(
    harness: Harness, server: ModelServer, monkeypatch: pytest.MonkeyPatch, reply: Reply
) -> None:
    redact, lengths = Secrets.redact, list[int]()

    def record_length(secrets: Secrets, text: str) -> str:
        lengths.append(len(text))
        return redact(secrets, text)

    monkeypatch.setattr(Secrets, "redact", record_length)
    server.script = [reply] * 20
    run = await harness.run(server)
    assert run.final["type"] == "run.failed" and "sk-sk-" in run.result["error"]
    assert 500 < max(lengths) <= REDACTED_AT_ONCE_CHARS_MAX


async def test_incomplete_key_prefix_in_text_is_not_lost(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = make_harness(with_keys(server, ODD_KEY))
    text = f"It begins with {ODD_KEY[:12]}"
    server.script = [Reply(text=[text[:20], text[20:]])]
    run = await harness.run(None, route=TO_P)
    assert run.result["final_response"] == run.text() == text


async def test_deadline_while_waiting_for_session_asks_no_model(harness: Harness, server: ModelServer) -> None:
    go_on = asyncio.Event()

    async def answer(_: Request) -> Reply:
        await go_on.wait()
        return Reply(text="Done.")

    server.handler = answer
    running = await harness.begin(harness.spec(server, persist=True, session_id="s"))
    late = harness.spec(server, persist=True, session_id="s", deadline_seconds=0.1)
    await harness.engine.submit(late)
    events = [event.as_dict() async for event in harness.engine.subscribe(late.run_id)]
    assert (events[-1]["type"], events[-1]["failure"]) == ("run.failed", "deadline")
    go_on.set()
    await running.end()
    assert len(server.requests) == 1


async def test_stream_cut_while_key_prefix_is_held_back_loses_nothing(
    make_harness: MakeHarness, server: ModelServer
) -> None:
    harness = make_harness(with_keys(server, ODD_KEY))
    text = ["It begins with plain", ".value.", "of the house"]
    server.handler = scripted(cut_after("of the", Reply(text=text)), Reply(text=text))
    run = await harness.run(None, route=TO_P)
    assert run.text() == "".join(text)
    assert run.result["messages"][-1]["content"] == "".join(text)
