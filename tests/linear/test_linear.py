"""Twice the input takes at most 2.3 times the steps, for what reads or writes what others send.

The steps of Python are counted at two small sizes. Regular expressions and other work inside C cannot be counted: a long
text that is read in more than linear work reaches the time limit of the test.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hermes.agent import compress, leaked_calls, media_tags
from hermes.agent.assembler import Assembler
from hermes.agent.media import MediaTagFilter
from hermes.bus import frames, nats_bus
from hermes.core import failures, message_marks, text
from hermes.core.errors import HermesError
from hermes.core.events import Event
from hermes.core.spec import RunSpec
from hermes.core.stream_parts import Text
from hermes.guards import commands, exfiltration, injection, path_lists, read_only, snippets, url_text
from hermes.guards.findings import Facts
from hermes.guards.secrets import Secrets
from hermes.guards.url_text import UrlRefused
from hermes.http_client.exchange import StreamBroken
from hermes.providers.base import Prompt, Route, WireEvent, refusal_facts
from hermes.providers.chunk_reader import ChunkReader
from hermes.providers.registry import provider_for
from hermes.runs import schedule
from hermes.sandbox import git_config
from hermes.server import chat, models, request_bodies
from hermes.server.errors import ApiError
from hermes.server.outcome import Outcome
from hermes.server.render_chat import ChatRenderer
from hermes.server.render_messages import MessagesRenderer
from hermes.server.render_ollama import OllamaRenderer
from hermes.server.render_responses import ResponseRenderer, VisibleItems
from hermes.server.render_run import RunRenderer
from hermes.server.render_session import SessionRenderer, turn_messages
from hermes.services import skills
from hermes.settings import check as config_check
from hermes.settings import files as config_files
from hermes.store import codec, rows, search
from hermes.tools import pages, patching
from hermes.tools.framework import arguments
from hermes.tools.framework.registry import ToolError
from hermes.tools.output_buffer import HeadAndTail, OutputDecoder

Json = dict[str, Any]
# An input may well be refused.
REFUSALS = (ApiError, HermesError, ToolError, UrlRefused, ValueError, RecursionError)
RATIO_MAX = 2.3
# What a call costs whatever it is given.
STEPS_MIN = 500
# Methods of C that read all of their text, bytes or list.
WHOLE = frozenset(
    {"casefold", "copy", "decode", "encode", "expandtabs", "insert", "isascii", "lower", "partition", "remove"}
    | {"replace", "reverse", "rpartition", "rsplit", "sort", "split", "splitlines", "title", "translate", "upper"}
)
CHARS_PER_STEP = 64
# Quadratic work on so long a text takes longer than a test may.
LONG_CHARS = 800_000


def steps_of(work: Callable[[], Any]) -> int:
    """The lines of Python that run on this thread, and the calls of C with the length of what they read."""
    count = 0

    def lines(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return lines

    def calls(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event == "c_call":
            count += 1
            if argument.__name__ in WHOLE and isinstance(argument.__self__, str | bytes | bytearray | list):
                count += len(argument.__self__) // CHARS_PER_STEP

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(lines)
    sys.setprofile(calls)
    try:
        with suppress(*REFUSALS):
            work()
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
    return count


class Row(NamedTuple):
    work: Callable[[Any], Any]
    inputs: Iterable[Callable[[int], Any]]
    size: int = 400


# ---- texts: a piece that is repeated


def repeat(piece: str, n: int) -> str:
    return piece * (n // len(piece) + 1)


def cut(whole: Any, size: int) -> list[Any]:
    return [whole[at : at + size] for at in range(0, len(whole), size)]


FACTS = Facts(("/work",), "/home/u", "/home/u/.hermes")
KNOWN = Secrets(["kn0wn-value-of-the-process"])
MARKUP = [
    *("<", "<think>", "</think>", "`", "```\n", "<tool_call>", "<tool_call>{", '<tool_call>{"name": "a", "arguments": {}}</tool_call>'),
    *("<function=a><parameter=b>c", "[TOOL_CALLS][", "<|tool_call_begin|>", "<｜tool▁call▁begin｜>", "functions.a:0", '{"name": "a", '),
]  # fmt: skip
TAGS = ["MEDIA:", "MEDIA:a ", 'MEDIA:"a', "MEDIA:`a` ", "M", "[", "\\[", "![", "[a](", "![a](data:image/", "]("]
SHELL = [
    *("a ", "a;", "a|", "a&&", "$(", "`", '"', "'", "{a,b}", "$(a)", "${a:-", "((", "<<a\n", "a\n", "\\", "\\\n", ">a ", "a=b ", "if a; then "),
    *("for a in b; do ", "case a in b) ", "a() { ", "~", "*", "[", "eval ", "sh -c '", "find . -exec ", "xargs ", "env ", "rm -rf / ", "cd a;"),
    *("$((1+", "$'\\x41'", "#a\n", "echo a | sh;", "! ", "{ ", "( ", "sed '\n", "chmod 0777 ", ",a=w"),
]  # fmt: skip
CODE = ["'", "\\'", '"', "import os\n", "os.system(", "check_", "spawn", "exec(", "(", "#", "a = 'b'\n", "`a`", "$x"]
SECRETS = [
    *("sk-", "sk-a-", "AKIA", "SG.", "ya29.", "eyJ", "eyJ.", "-eyJ.eyJ", "eyJaaaaaaaa.a.", "Authorization: ", "bearer ", "://", "://a:", "a://a:a"),
    *("password=", 'password=\\"', "password='x\"", "api_key", "token", "pwd=\\'\\", "-----BEGIN ", "-----BEGIN A", "-----END ", "-"),
    *("a", "A", "0", "_", " ", "\n", "\\", '"', "'", "=", "@", ".", "/", ":", "kn0wn-v", "kn0wn-value-of-the-process "),
]  # fmt: skip
ORDERS = [
    "ignore ",
    "ignore all previous ",
    "reveal the ",
    "[system ",
    "<system ",
    "<",
    "</",
    "\u200b",
    "do not ",
    "\n",
]
HTML = ["<p>a", "<div>", "</div>", "<a href='b'>c</a>", "<ul><li>", "<table><tr><td>a", "<", "&", "<!--", "<script>", "<pre>", "a "]  # fmt: skip
QUERIES = ["a ", '"a', '"', "a OR ", "NOT ", "a* ", "(", "-a ", "a:b "]
JSON = ['{"a": ', "[", '"', "\\", "{", "}", ",", '{"a": "b",', "a", "```json\n", "'a': ", "\n", "Invalid value - at `$"]


def assemble(written: str) -> None:
    assembler = Assembler("run:1", accept=lambda name, args: None)
    for piece in cut(written, 7):
        list(assembler.feed(Text(piece)))
    list(assembler.finish())


def send_files(written: str) -> None:
    async def write() -> None:
        async def create(path: str) -> None:
            return None

        outgoing = MediaTagFilter(lambda text: None, create)
        for piece in cut(written, 11):
            await outgoing.feed(piece)
        await outgoing.feed("", last=True)

    asyncio.run(write())


def mask_stream(written: str) -> None:
    stream = KNOWN.stream()
    for piece in cut(written, 64):
        stream.feed(piece)
    stream.finish()


def read_events(written: str) -> None:
    reader = ChunkReader(provider_for("chat_completions"), joins=True)
    for piece in cut(written.encode(), 20):
        with suppress(StreamBroken):
            list(reader.feed(piece))


def show_output(written: str) -> None:
    readable, ends = OutputDecoder(KNOWN), HeadAndTail(1_000)
    for piece in cut(written.encode(), 100):
        ends.add(readable.feed(piece))
    ends.add(readable.feed(b"", end=True))


def classify(written: str) -> None:
    body = json.dumps({"error": {"message": written}}).encode()
    failures.classify(refusal_facts(400, {}, body))


CHUNK = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
TEXTS: dict[str, tuple[Callable[[str], Any], list[str]]] = {
    "an answer": (assemble, MARKUP),
    "a block of calls": (lambda text: leaked_calls.parse('<tool_call>{"name": "a", "arguments": ' + text), MARKUP),
    "an answer with files": (send_files, TAGS),
    "links in a message": (media_tags.strip_rendered_media, TAGS),
    "a stream of events": (read_events, ["data: x", "data: x\n", "\n", "data: x\r\n\r\n", ": x\n", "event: a\ndata: {}\n\n", CHUNK]),
    "an error of a provider": (classify, ["maximum context length 5 tokens ", "Invalid 'max_tokens' ", "[", "a", "5 "]),
    "a steer": (message_marks.without_steer, ["[", "\n", "a", "[User said", "]"]),
    "an attachment": (text.own_text_of, ["File ", "File a:\n", ":\n"]),
    "a shown text": (text.visible, ["a", "\x1b", "\u202e", "\0", "\n"]),
    "a command": (lambda text: commands.check(text, "/work", FACTS), SHELL),
    "a reading command": (read_only.is_read_only, SHELL[:8]),
    "code": (lambda text: list(snippets.rules_of(text)), CODE),
    "commands in code": (lambda text: list(snippets.commands_of(text, "python")), CODE),
    "literals in code": (snippets.literals_of, CODE),
    "SQL": (snippets.is_destructive_sql, ["drop ", "table ", "delete from ", "--", "/*", "'", ";"]),
    "the prompt of a job": (exfiltration.exfiltrates, [".ssh/", "send passwords ", "$KEY ", "b@c.d ", "http://a.b/", "curl "]),
    "hosts in a text": (url_text.hosts_in, ["a.b ", "http://", "a.", ".", "//a@", "a.b:1/"]),
    "a URL": (lambda text: url_text.parse("http://a.b/" + text), ["%", "%25", "@", "a.", "?a=b&", "/..", "#", "\\", "://"]),
    "a path": (lambda text: path_lists.reserved_entry("/work", "/work/" + text), ["/", "../", "a/", ".git/", "./", "a", "\u202e"]),
    "redaction": (KNOWN.redact, SECRETS),
    "redaction after a prefix": (lambda text: KNOWN.redact(f"password='{text}!"), SECRETS),
    "redaction of a stream": (mask_stream, ["kn0wn-v", "kn0wn-value-of-the-process", "a"]),
    "injected orders": (injection.suspicious, ORDERS),
    "fenced text": (lambda text: injection.fenced(text, "a page"), ORDERS),
    "a git configuration": (git_config.check_config, ["[a]\n", "a=b\n", "[include]\npath=a\n", "\\\n", '"', "#", "["]),
    "a query": (search.fts_query, QUERIES),
    "a query of titles": (search.title_condition, QUERIES),
    "words to be searched": (lambda text: codec.search_text(codec.spaced(text)), ["a ", "漢", "漢a", "a-b", "'"]),
    "an excerpt": (lambda text: search.excerpt([text], ["beta", "gamma"], (">>>", "<<<")), ["beta "]),
    "a stored text": (lambda text: codec.columns_of(text, {}), ["a", "\0", "\ud800", "data:", '"$blob"']),
    "arguments of a call": (arguments.parse, JSON),
    "the name of a tool": (lambda text: arguments.settle_name(text, ["read_file", "todo"]), ["a", "_", "functions.", "read_file"]),
    "a patch": (patching.parse_patch, ["*** Begin Patch\n*** Update File: a\n@@\n-a\n+b\n", "@@\n", "-a\n", "*** "]),
    "a replacement": (lambda text: patching.replace_text(text, "a\n", "b\n", True), ["a\n", "  a\n", "\n", "a b\n"]),
    "a page": (lambda text: pages.markdown(text, "http://a/"), HTML),
    "output of a command": (show_output, ["a", "\x1b[", "\x1b]0;", "\r", "a\r\n", "\x1b", "\x1b[1m", "\b"]),
    "a schedule": (lambda text: schedule.parse("0 0 1 1 1" + text, 0.0, UTC), ["1,", "*/2 ", "every ", "1-5,", "* ", "10m "]),
    "a skill": (skills.front_matter, ["---\n", "a: b\n", "\n", "name: a\n---\n"]),
    "variables": (lambda text: config_files.parse_env(text.encode()), ["A=b\n", "A='", 'A="', "#a\n", "\\\n"]),
    "a body": (lambda text: request_bodies.as_object(f'{{"a":{text}'.encode()), ['{"a":', "[", '"\\ud800"', "1,"]),
}  # fmt: skip


# ---- lists: messages, events, calls


def conversation(n: int) -> list[Json]:
    messages: list[Json] = []
    for at in range(n):
        call = {"id": f"c{at}", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
        messages += [
            {"role": "user", "content": [{"type": "text", "text": f"word {at}"}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "line " * 5, "tool_call_id": f"c{at}", "tool_name": "look"},
            {"role": "assistant", "content": f"answer {at}"},
        ]
    return messages


def one_round(n: int) -> list[Json]:
    calls = [{"id": f"c{at}", "type": "function", "function": {"name": "look", "arguments": "{}"}} for at in range(n)]
    results = [{"role": "tool", "content": "x", "tool_call_id": f"c{at}"} for at in reversed(range(n))]
    return [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def row_list(messages: list[Json]) -> list[rows.Row]:
    return [rows.row_of_message("s", message) for message in messages]


def chat_body(n: int) -> bytes:
    return json.dumps({"messages": [*conversation(n), {"role": "user", "content": "go"}]}).encode()


def read_chat(data: bytes) -> None:
    body = request_bodies.parse(request_bodies.as_object(data), models.ChatRequest)
    chat.split_messages(body.model.messages, 1_000_000)


def turn_log(n: int) -> list[Event]:
    """A turn of that many steps, each with text, thought and a call."""
    events: list[tuple[str, int, Json]] = []
    for at in range(n):
        call = {"id": f"c{at}", "name": "look", "arguments": "{}"}
        message: Json = {"message_id": f"m{at}", "text": "word "}
        end = {"tool_calls": [call], "row": at, "finish_reason": "tool_calls", "partial": False}
        begin = {"call_id": f"c{at}", "name": "look", "args": {}, "effect": "read", "preview": ""}
        done = {"call_id": f"c{at}", "name": "look", "status": "ok", "result": "x", "duration_s": 0.0}
        events += [
            ("reasoning.delta", at, {**message, "form": "text", "offset": 0}),
            ("text.delta", at, {**message, "offset": 0}),
            ("message.completed", at, {**message, **end}),
            ("tool.started", at, begin),
            ("tool.completed", at, done),
            ("usage", at, {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}),
        ]
    return [Event("run_1", kind, step, data, seq, float(seq)) for seq, (kind, step, data) in enumerate(events, 1)]


def render(make: Callable[[], Any], events: list[Event]) -> None:
    renderer = make()
    list(renderer.begin())
    for event in events:
        renderer.feed([event])
    if hasattr(renderer, "finish"):
        renderer.finish(Outcome(text="word", messages=[{"role": "assistant", "content": "word"}]))


def exchange(events: list[Event]) -> None:
    """Published by one replica and read by another."""
    for data in nats_bus.encode_batches(events):
        _, encoded = nats_bus.decode_batch(data)
        assert isinstance(encoded, list)
        frames.decode_events("r", encoded)


def wire_events(mode: str, n: int) -> list[Json]:
    events: list[Json] = []
    for at in range(n):
        call = {"index": at, "id": f"c{at}", "function": {"name": "look", "arguments": "{"}}
        block = {"type": "tool_use", "id": f"c{at}", "name": "look", "input": {}}
        item = {"type": "function_call", "id": f"fc{at}", "call_id": f"c{at}", "name": "look", "arguments": ""}
        deltas = (
            {"content": "word "},
            {"tool_calls": [call]},
            {"tool_calls": [{"index": at, "function": {"arguments": "}"}}]},
        )
        events += {
            "chat_completions": [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas],
            "anthropic_messages": [
                {"type": "content_block_start", "index": at, "content_block": block},
                {"type": "content_block_delta", "index": at, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
                {"type": "content_block_stop", "index": at},
            ],
            "codex_responses": [
                {"type": "response.output_item.added", "output_index": at, "item": item},
                {"type": "response.function_call_arguments.delta", "output_index": at, "item_id": f"fc{at}", "delta": "{}"},
                {"type": "response.output_item.done", "output_index": at, "item": {**item, "arguments": "{}"}},
            ],
        }[mode]  # fmt: skip
    return events


def read_answer(mode: str, events: list[Json]) -> None:
    assembler = Assembler("run:1", accept=lambda name, args: (name, json.dumps(args)))
    for event in events:
        for part in provider_for(mode).parts(WireEvent(str(event.get("type", "")), event)):
            list(assembler.feed(part))
    list(assembler.finish())


def write_request(mode: str, messages: list[Json]) -> None:
    provider_for(mode).request(Route("p", "m", "http://127.0.0.1/v1", mode), None, Prompt(["s"], messages))


MODES = ("chat_completions", "anthropic_messages", "codex_responses")
RECORD: Any = type(
    "Record", (), {"spec": RunSpec(run_id="run_1", session_id="s", owner="o", source="cli", user_message="hi")}
)()
TEMPLATE: Json = {
    "id": "resp_1",
    "object": "response",
    "status": "in_progress",
    "output": [],
    "usage": None,
    "created_at": 1,
}
RENDERERS: dict[str, Callable[[], Any]] = {
    "chat chunks": lambda: ChatRenderer("c", "m", 1, usage=True, reasoning=True),
    "response events": lambda: ResponseRenderer(TEMPLATE, VisibleItems(extensions=True), event_bytes_max=4_000),
    "message events": lambda: MessagesRenderer("m", "m", thinking=True),
    "lines of Ollama": lambda: OllamaRenderer("m", "2026-01-01T00:00:00Z", "message"),
    "run events": lambda: RunRenderer(RECORD, str, names=False, reasoning=True),
    "session events": lambda: SessionRenderer("s", "run_1", "hi", str),
}  # fmt: skip
BUDGET = compress.Budget(2_000, 500)
MESSAGES = (conversation, one_round)
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
LISTS = {
    "a plan": Row(lambda items: compress.plan(items, BUDGET), MESSAGES, 60),
    "shorter results": Row(compress.prune, MESSAGES, 60),
    "an extract": Row(lambda items: compress.extract(items, 1_000), MESSAGES, 60),
    "a transcript": Row(lambda items: compress.transcript(items, 1_000), MESSAGES, 60),
    "results in the order of their calls": Row(lambda items: list(rows.in_call_order(row_list(items))), MESSAGES, 60),
    "messages that others sent before": Row(
        lambda items: rows._origins(row_list(items), row_list(items[2::3])), MESSAGES, 60
    ),
    "messages of a turn": Row(turn_messages, MESSAGES, 60),
    "messages of a chat": Row(read_chat, [chat_body], 60),
    "events between replicas": Row(exchange, [turn_log], 60),
    "checked arguments": Row(lambda args: arguments.check(args, SCHEMA), [lambda n: {"a": ["1"] * n}]),
    "faults of arguments": Row(lambda args: arguments.schema_faults(args, SCHEMA), [lambda n: {"a": ["x"] * n}]),
    "a configuration": Row(
        lambda text: config_check.entries(config_files.parse_yaml(text.encode(), Path("config.yaml"))),
        [lambda n: "".join(f"a{at}: [1, {{b: c}}]\n" for at in range(n)), lambda n: "a:\n" + "- b: c\n" * n],
        40,
    ),
    "hunks of a patch": Row(
        lambda both: patching.apply_hunks(both[0], patching.parse_patch(both[1])[0].hunks),
        [lambda n: ("a\n" * n, "*** Update File: a\n" + "".join(f"@@\n-line {at}\n+b\n" for at in range(0, n, 10)))],
    ),
    **{f"an answer of {mode}": Row(partial(read_answer, mode), [partial(wire_events, mode)], 60) for mode in MODES},
    **{f"a request of {mode}": Row(partial(write_request, mode), MESSAGES, 60) for mode in MODES},
    **{name: Row(partial(render, make), [turn_log], 40) for name, make in RENDERERS.items()},
}
ROWS = {name: Row(work, [partial(repeat, piece) for piece in pieces]) for name, (work, pieces) in TEXTS.items()} | LISTS


@pytest.mark.parametrize("name", ROWS)
def test_work_is_linear_in_input_size(name: str) -> None:
    work, inputs, size = ROWS[name]
    for make in inputs:
        # The first time counts what is made once and kept.
        _, once, twice = [steps_of(partial(work, make(n))) for n in (size // 2, size, 2 * size)]
        assert twice <= RATIO_MAX * once + STEPS_MIN, f"{make}: {once} steps, then {twice}"


# Patterns that change often; the others are run by `make test-long`.
OFTEN = {"redaction", "redaction after a prefix", "injected orders", "links in a message", "code", "SQL"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in OFTEN)) for name in TEXTS])
def test_long_text_is_read_in_linear_time(name: str) -> None:
    work, pieces = TEXTS[name]
    for piece in pieces:
        with suppress(*REFUSALS):
            work(repeat(piece, LONG_CHARS))
