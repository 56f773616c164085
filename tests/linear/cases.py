"""What is given to every parser, renderer, guard and list, by size."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import resource
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hermes.agent import compress, leaked_calls, media_tags
from hermes.agent.assembler import Assembler
from hermes.agent.inline import InlineMarkup
from hermes.agent.media import MediaTagFilter
from hermes.bus import frames, nats_bus
from hermes.cli.markdown_lines import MarkdownLines
from hermes.core import failures, message_marks, text
from hermes.core.errors import HermesError
from hermes.core.events import Event
from hermes.core.spec import RunSpec
from hermes.core.stream_parts import Text, ToolDelta
from hermes.guards import commands, exfiltration, injection, path_lists, read_only, snippets, url_text
from hermes.guards.findings import Facts
from hermes.guards.secrets import Secrets, redact_tree
from hermes.guards.url_text import UrlRefused
from hermes.http_client.exchange import StreamBroken
from hermes.http_client.inflate import InflateError, Inflater
from hermes.providers.base import Prompt, Route, ToolSchema, ToolSchemas, WireEvent, refusal_facts
from hermes.providers.chunk_reader import ChunkReader
from hermes.providers.local_results import render_result
from hermes.providers.registry import provider_for
from hermes.runs import schedule
from hermes.sandbox import git_config
from hermes.server import chat, models, request_bodies, response_items, response_tools, turn_spec, turns
from hermes.server.errors import ApiError
from hermes.server.outcome import Outcome
from hermes.server.render_chat import ChatRenderer
from hermes.server.render_messages import MessagesRenderer
from hermes.server.render_ollama import OllamaRenderer
from hermes.server.render_responses import ResponseRenderer, VisibleItems
from hermes.server.render_run import RunRenderer
from hermes.server.render_session import SessionRenderer, turn_messages
from hermes.services import session_markdown, skills
from hermes.settings import check as config_check
from hermes.settings import files as config_files
from hermes.settings import splice as config_splice
from hermes.store import codec, digests, rows, search
from hermes.store.sessions import SessionDB
from hermes.tools import diffs, images, mcp_names, pages, patching, rg_fallback
from hermes.tools.framework import arguments
from hermes.tools.framework.registry import ToolError, render
from hermes.tools.framework.result_limits import ResultLimiter
from hermes.tools.framework.toolsets import builtin
from hermes.tools.output_buffer import HeadAndTail, OutputDecoder

Json = dict[str, Any]
# What a case may end with: an input may well be refused.
REFUSALS = (ApiError, HermesError, InflateError, ToolError, UrlRefused, ValueError, RecursionError)


class Case(NamedTuple):
    """`make` gives an input of a size, `work` is done with it; `large` is a size at which more than linear work would take
    minutes. `parts` are the modules that it is about. What is not linear has a limit on its input, which `large` is."""

    parts: str
    make: Callable[[int], Any]
    work: Callable[[Any], Any]
    size: int = 400
    large: int = 100_000
    linear: bool = True


CASES: dict[str, Case] = {}


def case(name: str, parts: str, make: Callable[[int], Any], work: Callable[[Any], Any], **sizes: int) -> None:
    assert name not in CASES
    CASES[name] = Case(parts, make, work, **sizes)


def texts(
    what: str, parts: str, work: Callable[[str], Any], repeated: Iterable[str], begin: str = "", **sizes: int
) -> None:
    """One case for each text, repeated so often that it has that many characters."""
    for pattern in repeated:
        make = partial(_repeated, begin, pattern)
        case(f"{what}: {pattern!r}", parts, make, work, **sizes)


def _repeated(begin: str, pattern: str, n: int) -> str:
    return begin + pattern * (n // len(pattern) + 1)


def run(work: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await work

    return asyncio.run(wait())


# ---- providers: events in, requests out

MODES = ("chat_completions", "anthropic_messages", "codex_responses")
# The model of this machine speaks like the first of them.


def fed(mode: str) -> Callable[[list[Json]], Any]:
    provider = provider_for(mode)

    def work(events: list[Json]) -> None:
        assembler = Assembler("run:1", accept=lambda name, args: (name, json.dumps(args)))
        for event in events:
            for part in provider.parts(WireEvent(str(event.get("type", "")), event)):
                list(assembler.feed(part))
        list(assembler.finish())
        assembler.message()

    return work


def chat_events(n: int) -> list[Json]:
    items: list[Json] = []
    for at in range(n):
        call = {"index": at, "id": f"c{at}", "function": {"name": "look", "arguments": "{"}}
        more = {"index": at, "function": {"arguments": "}"}}
        items += [{"choices": [{"index": 0, "delta": delta}]} for delta in
                 ({"content": "word "}, {"reasoning_content": "hm "}, {"tool_calls": [call]}, {"tool_calls": [more]})]  # fmt: skip
    return items


def anthropic_events(n: int) -> list[Json]:
    items: list[Json] = [{"type": "message_start", "message": {"id": "m", "usage": {}}}]
    for at in range(n):
        block = {"type": "tool_use", "id": f"c{at}", "name": "look", "input": {}}
        items += [
            {"type": "content_block_start", "index": at, "content_block": block},
            {"type": "content_block_delta", "index": at, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
            {"type": "content_block_stop", "index": at},
        ]
    return items


def responses_events(n: int) -> list[Json]:
    items: list[Json] = []
    for at in range(n):
        item = {"type": "function_call", "id": f"fc{at}", "call_id": f"c{at}", "name": "look", "arguments": ""}
        items += [
            {"type": "response.output_text.delta", "item_id": "m", "delta": "word "},
            {"type": "response.output_item.added", "output_index": at, "item": item},
            {"type": "response.function_call_arguments.delta", "output_index": at, "item_id": f"fc{at}", "delta": "{}"},
            {"type": "response.output_item.done", "output_index": at, "item": {**item, "arguments": "{}"}},
        ]
    return items


for mode, events in zip(MODES, (chat_events, anthropic_events, responses_events), strict=True):
    case(f"events of {mode}", f"providers.{mode} agent.assembler", events, fed(mode), size=60, large=20_000)


def conversation(n: int) -> list[Json]:
    """A conversation with calls, images, reasoning and foreign text."""
    messages: list[Json] = []
    for at in range(n):
        call = {"id": f"c{at}", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAAB"}}
        messages += [
            {"role": "user", "content": [{"type": "text", "text": f"word {at}"}, image]},
            {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": f"d{at}"}]},
            {"role": "tool", "content": "line " * 5, "tool_call_id": f"d{at}", "tool_name": "look"},
            {"role": "tool", "content": "line " * 5, "tool_call_id": f"c{at}", "tool_name": "look"},
            {"role": "assistant", "content": f"answer {at}"},
        ]
    return messages


def plain_talk(n: int) -> list[Json]:
    return [{"role": ("user", "assistant")[at % 2], "content": f"words {at}"} for at in range(n)]


def requested(mode: str) -> Callable[[list[Json]], Any]:
    route = Route("p", "m", "http://127.0.0.1/v1", mode)
    return lambda messages: provider_for(mode).request(route, None, Prompt(["s"], messages))


for mode in MODES:
    case(
        f"a request of {mode}", f"providers.{mode} providers.base", conversation, requested(mode), size=60, large=20_000
    )
    refused = json.dumps({"error": {"message": "x " * 10}})
    case(
        f"many tools for {mode}",
        f"providers.{mode}",
        lambda n: Prompt(["s"], [], ToolSchemas(ToolSchema(f"t{at}", "d", {"type": "object"}) for at in range(n))),
        lambda value, mode=mode: provider_for(mode).request(Route("p", "m", "http://h/v1", mode), None, value),  # type: ignore[misc]
        large=20_000,
    )
EMBEDDED_TOOLS = ToolSchemas(
    ToolSchema(tool.name, tool.description, tool.parameters)
    for tool in builtin().all()
    if tool.name in ("terminal", "read_file")
)


def embedded_request(text: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.csv"}'}}
    result = {"role": "tool", "content": "a,b", "tool_call_id": "c1", "tool_name": "read_file"}
    for messages in ([], [{"role": "assistant", "content": "", "tool_calls": [call]}, result]):
        request = Prompt(["s"], [{"role": "user", "content": text}, *messages], EMBEDDED_TOOLS)
        provider_for("local").request(Route("local", "m", "http://127.0.0.1/v1", "local"), None, request)


texts(
    "a request to the embedded model",
    "providers.local providers.local_plan",
    embedded_request,
    [
        "did we ",
        "what we ",
        "how many a.b.c.",
        "show the lines and write ",
        "remind me in a ",
        "the most ",
        "-----",
        "\n",
    ],
    large=1_000_000,
)
texts(
    "an error of a provider",
    "providers.base core.failures",
    lambda text: failures.classify(refusal_facts(400, {}, json.dumps({"error": {"message": text}}).encode())),
    [
        "image not supported ",
        "maximum context length 5 tokens ",
        "Invalid 'max_tokens' ",
        "temperature ",
        "[",
        "a",
        "5 ",
    ],
    large=300_000,
)


def decoded(pieces: Iterable[bytes]) -> None:
    reader = ChunkReader(provider_for("chat_completions"), joins=True)
    for piece in pieces:
        with suppress(StreamBroken):
            for _ in reader.feed(piece):
                pass


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
for name, make_chunks in {
    "one long line": lambda n: cut(b"data: " + b"x" * n * 20, 20),
    "many lines of one event": lambda n: cut(b"data: x\n" * n, 20),
    "empty lines": lambda n: cut(b"\n" * n * 20, 20),
    "lines with two ends": lambda n: cut(b"data: x\r\n\r\n" * n, 7),
    "comments": lambda n: cut(b": x\n" * n, 20),
    "named events": lambda n: cut(b"event: a\ndata: {}\n\n" * n, 13),
    "chunks alike": lambda n: cut(CHUNK * n, 50),
    "chunks alike in one packet": lambda n: [CHUNK * n],
    "a byte at a time": lambda n: cut(CHUNK * (n // 20), 1),
}.items():
    case(f"a stream with {name}", "http_client.sse providers.chunk_reader", make_chunks, decoded, large=60_000)  # type: ignore[arg-type]


def assembled(pieces: Iterable[str]) -> None:
    assembler = Assembler("run:1", accept=lambda name, args: None)
    for piece in pieces:
        list(assembler.feed(Text(piece)))
    list(assembler.finish())
    assembler.message()


MARKUP = ["<", "<think>", "</think>", "<think>a</think>", "`", "```\n", "\n```", "<tool_call>", "<tool_call>{", "</tool_call>",
          '<tool_call>{"name": "a", "arguments": {}}</tool_call>', "<function=a>", "<function=a><parameter=b>c", "[TOOL_CALLS]",
          "[TOOL_CALLS][", "<|tool_call_begin|>", "<｜tool▁call▁begin｜>", "functions.a:0", '{"name": "a", ', "\n", " ", "a\n<think"]  # fmt: skip
for markup in MARKUP:
    case(
        f"an answer with {markup!r} in pieces",
        "agent.inline agent.leaked_calls agent.assembler",
        lambda n, text=markup: cut_text(text * (n // len(text) + 1), 7),  # type: ignore[misc]
        assembled,
        size=600,
        large=100_000,
    )


def cut_text(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


texts(
    "a block of calls",
    "agent.leaked_calls",
    leaked_calls.parse,
    MARKUP,
    '<tool_call>{"name": "a", "arguments": ',
    large=200_000,
)
texts("markup at once", "agent.inline", lambda text: InlineMarkup(calls=True).feed(text), MARKUP, large=200_000)


def drafted(parts: Iterable[ToolDelta]) -> None:
    assembler = Assembler("r")
    for part in parts:
        list(assembler.feed(part))
    assembler.message()


for how, delta in {
    "with few indexes": lambda at: ToolDelta(index=at % 7, id=f"c{at}", name="look", arguments="{}"),
    "by their ids": lambda at: ToolDelta(id=f"c{at // 2}", name="look", arguments="{}"),
    "one behind the other": lambda at: ToolDelta(name="look", arguments="{}"),
    "in pieces": lambda at: ToolDelta(arguments="{"),
    "in pieces with their name": lambda at: ToolDelta(name="look", arguments='{"a": '),
}.items():
    make = lambda n, delta=delta: [delta(at) for at in range(n)]  # noqa: E731
    case(f"calls that are drafted {how}", "agent.assembler", make, drafted, large=30_000)


# ---- outgoing files, images, prompts


async def nothing_made(path: str) -> None:
    return None


async def write(pieces: Iterable[str]) -> None:
    outgoing = MediaTagFilter(lambda text: None, nothing_made)
    for piece in pieces:
        await outgoing.feed(piece)
    await outgoing.feed("", last=True)


TAGS = [
    "MEDIA:",
    "MEDIA:a ",
    'MEDIA:"a',
    "MEDIA:`a` ",
    "M",
    "MEDIA:/a.png\n",
    "ME",
    "[",
    "![",
    "[a](",
    "![a](data:image/",
    "](",
]
for markup in TAGS:
    case(
        f"tags of files: {markup!r}",
        "agent.media",
        lambda n, text=markup: cut_text(text * (n // len(text) + 1), 11),  # type: ignore[misc]
        lambda pieces: run(write(pieces)),
        large=100_000,
    )
texts("links in a message", "agent.media_tags", media_tags.strip_rendered_media, TAGS, large=300_000)
case("images that are not seen", "tools.images", conversation, images.hide_tool_images, size=60, large=20_000)
texts(
    "a steer in a result",
    "core.message_marks",
    message_marks.without_steer,
    ["[", "\n", "a", "[User said", "]"],
    large=300_000,
)
case(
    "messages from outside",
    "core.message_marks",
    conversation,
    lambda items: [message_marks.is_foreign(m) for m in items],
    size=60,
    large=20_000,
)
texts("what the user attached", "core.text", text.own_text_of, ["File ", "File a:\n", "File a", ":\n"], large=300_000)


# ---- guards

FACTS = Facts(("/work",), "/home/u", "/home/u/.hermes")
SHELL = ["a ", "a;", "a|", "a&&", "$(", "`", "\"", "'", "{a,b}", "$(a)", "${a}", "${a:-", "((", "<<a\n", "a\n", "\\", "\\\n", ">a ", "a=b ",
         "if a; then ", "for a in b; do ", "case a in b) ", "function a { ", "a() { ", "~", "*", "[", "eval ", "sh -c '", "find . -exec ",
         "xargs ", "sudo ", "env ", "rm -rf / ", "cd a;", "$((1+", "$'\\x41'", "#a\n", "echo a | sh;", "a & ", "! ", "{ ", "( "]  # fmt: skip
texts(
    "a command",
    "guards.commands guards.shell guards.shell_expansion guards.rules guards.findings",
    lambda text: commands.check(text, "/work", FACTS),
    SHELL,
    large=90_000,
)
texts("a command that may only read", "guards.read_only", read_only.is_read_only, SHELL, large=90_000)
texts(
    "the forms of a command",
    "guards.commands",
    commands.simple_forms,
    ["a ", "a;", "{a,b}", "$(a)", "'a'"],
    large=90_000,
)
CODE = [
    "'",
    "\\'",
    '"',
    "import os\n",
    "os.system(",
    "subprocess.run(['a'])\n",
    "check_",
    "spawn",
    "exec(",
    "(",
    "#",
    "a = 'b'\n",
    "`a`",
    "$x",
]
texts("code in a command", "guards.snippets", lambda text: list(snippets.rules_of(text)), CODE, large=200_000)
texts("literals of code", "guards.snippets", snippets.literals_of, CODE, large=200_000)
texts(
    "commands in code", "guards.snippets", lambda text: list(snippets.commands_of(text, "python")), CODE, large=200_000
)
texts(
    "SQL",
    "guards.snippets",
    snippets.is_destructive_sql,
    ["drop ", "table ", "delete from ", "--", "/*", "'", ";", "where "],
    large=200_000,
)
texts(
    "the prompt of a job", "guards.exfiltration", exfiltration.exfiltrates,
    [".ssh/", "send passwords ", "$KEY ", "b@c.d ", "http://a.b/", "curl ", "a", " "], large=200_000,
)  # fmt: skip
texts(
    "hosts in a text",
    "guards.url_text",
    url_text.hosts_in,
    ["a.b ", "http://", "a.", "www.", ".", "//a@", "a.b:1/"],
    large=200_000,
)
KNOWN = Secrets(["kn0wn-value-of-the-process"])
texts(
    "a URL", "guards.url_text guards.network", lambda text: (url_text.parse(text), url_text.has_secret(text, KNOWN)),
    ["http://a/", "%", "%2", "%25", "http://[", "@", "a.", "?a=b&", "/..", "#", "\\", "://"], "http://a.b/", large=200_000,
)  # fmt: skip
texts(
    "a path", "guards.path_lists guards.paths",
    lambda text: (path_lists.git_entry(text), path_lists.plain(text), path_lists.reserved_entry("/work", "/work/" + text)),
    ["/", "../", "a/", ".git/", "./", "a", ".git/hooks/", "\u202e"], large=200_000,
)  # fmt: skip
SECRETS = [
    "sk-",
    "password=",
    "eyJ",
    "-----BEGIN ",
    "Authorization: ",
    "://a:",
    "token",
    "kn0wn-v",
    "a",
    "\\",
    "key: '",
    "AKIA",
]
texts("redaction", "guards.secrets", KNOWN.redact, SECRETS, large=200_000)
texts("a mask", "guards.secrets", KNOWN.mask, SECRETS, large=300_000)


def masked(pieces: Iterable[str]) -> None:
    stream = KNOWN.stream()
    for piece in pieces:
        stream.feed(piece)
    stream.finish()


for markup in ("kn0wn-v", "kn0wn-value-of-the-process", "a", "k"):
    case(
        f"a mask of a stream: {markup!r}", "guards.secrets",
        lambda n, text=markup: cut_text(text * (n // len(text) + 1), 5), masked, size=2_000, large=300_000,  # type: ignore[misc]
    )  # fmt: skip
case(
    "redaction of a tree",
    "guards.secrets",
    conversation,
    lambda items: redact_tree(items, KNOWN.redact),
    size=60,
    large=4_000,
)
ORDERS = [
    "ignore ",
    "ignore all previous ",
    "reveal the ",
    "[system ",
    "<",
    "</",
    "\u200b",
    "do not ",
    "you are ",
    "\n",
]
texts("injected orders", "guards.injection", injection.suspicious, ORDERS, large=200_000)
texts("fenced text", "guards.injection", lambda text: injection.fenced(text, "a page"), ORDERS, large=200_000)
texts(
    "a git configuration", "sandbox.git_config", git_config.check_config,
    ["[a]\n", "a=b\n", "[include]\npath=a\n", "\\\n", '"', "#", "[", "a"], large=100_000,
)  # fmt: skip
texts(
    "paths of a git configuration",
    "sandbox.git_config",
    git_config.referenced_paths,
    ["[core]\nhooksPath=a\n", "[a]\n"],
)


# ---- compaction and stored conversations

BUDGET = compress.Budget(2_000, 500)
case("a plan", "agent.compress", conversation, lambda items: compress.plan(items, BUDGET), size=60, large=30_000)
case(
    "a plan for one user", "agent.compress", plain_talk, lambda items: compress.plan(items[::2], BUDGET), large=200_000
)
case("shorter results", "agent.compress", conversation, compress.prune, size=60, large=30_000)
case("an extract", "agent.compress", conversation, lambda items: compress.extract(items, 1_000), size=60, large=30_000)
case(
    "a transcript",
    "agent.compress",
    conversation,
    lambda items: compress.transcript(items, 1_000),
    size=60,
    large=30_000,
)
case(
    "the size of a conversation",
    "agent.compress core.tokens agent.turn",
    conversation,
    compress.size_of,
    size=60,
    large=30_000,
)


def message_rows(items: list[Json]) -> list[rows.Row]:
    return [rows.row_of_message("s", message) for message in items]


case("stored messages that are others", "store.rows", lambda n: (message_rows(plain_talk(n)), message_rows(conversation(n // 5))),
     lambda both: rows._origins(*both), large=30_000)  # fmt: skip
case("every third stored message", "store.rows", lambda n: (message_rows(plain_talk(n)), message_rows(plain_talk(n)[2::3])),
     lambda both: rows._origins(*both), large=30_000)  # fmt: skip
case("results in the order of their calls", "store.rows", lambda n: message_rows(conversation(n)), lambda items: list(rows.in_call_order(items)),
     size=60, large=20_000)  # fmt: skip


def many_calls(n: int) -> list[Json]:
    calls = [{"id": f"c{at}", "type": "function", "function": {"name": "look", "arguments": "{}"}} for at in range(n)]
    results = [{"role": "tool", "content": "x", "tool_call_id": f"c{at}"} for at in reversed(range(n))]
    return [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


for mode in MODES:
    case(f"many calls of one message, {mode}", f"providers.{mode}", many_calls, requested(mode), large=50_000)
case("many calls of one message, sorted", "store.rows", lambda n: message_rows(many_calls(n)), lambda items: list(rows.in_call_order(items)),
     large=50_000)  # fmt: skip
case(
    "many calls of one message, planned",
    "agent.compress",
    many_calls,
    lambda items: compress.plan(items, BUDGET),
    large=50_000,
)
case("many calls of one message, pruned", "agent.compress", many_calls, compress.prune, large=50_000)
case("calls that are open", "server.turns", many_calls, turns.open_calls, large=100_000)
case(
    "hashes of messages",
    "store.digests",
    conversation,
    lambda items: [digests.digest_of(m) for m in items],
    size=60,
    large=10_000,
)


def exchanged(events: list[Event]) -> None:
    """Published by one replica and read by another."""
    for data in nats_bus.encode_batches(events):
        _, encoded = nats_bus.decode_batch(data)
        assert isinstance(encoded, list)
        frames.decode_events("r", encoded)


case("events between replicas", "bus.nats_bus bus.frames", lambda n: [
    Event("r", "text.delta", 1, {"text": "word "}, seq) for seq in range(1, n + 1)], exchanged)  # fmt: skip
case(
    "a question to another replica",
    "bus.frames",
    lambda n: ["word \ud800"] * n,
    lambda items: frames.decode(frames.encode(items)),
)
texts("a text to be kept", "store.codec", lambda text: codec.columns_of(text, {}), ["a", "\0", "\ud800", "data:", '"$blob"'],
      large=300_000)  # fmt: skip
texts("words to be searched", "store.codec store.search", lambda text: codec.search_text(codec.spaced(text)),
      ["a ", "漢", "漢a", "a-b", "'"], large=200_000)  # fmt: skip
QUERIES = ["a ", '"a', '"', "a OR ", "NOT ", "a* ", "(", "-a ", "a:b "]
texts("a query", "store.search", search.fts_query, QUERIES, large=100_000)
texts("a query of plain words", "store.search", search.plain_query, QUERIES, large=100_000)
texts("a query of titles", "store.search", search.title_condition, QUERIES, large=100_000)
case("an excerpt", "store.search", lambda n: (["beta " * n], ["beta", "gamma"]),
     lambda both: search.excerpt(*both, (">>>", "<<<")), large=100_000)  # fmt: skip


def with_sessions(work: Callable[[SessionDB], Any]) -> Callable[[list[Json]], Any]:
    """On a database that holds the sessions."""

    def act(items: list[Json]) -> None:
        db = SessionDB(":memory:")
        try:
            report = db.import_sessions(items)
            assert report["ok"], report
            work(db)
        finally:
            db.close()

    return act


def sessions(n: int, messages: int = 1) -> list[Json]:
    turns = [{"role": "user", "content": "beta words", "timestamp": 1.0 + at} for at in range(messages)]
    form = {"format": "hermes.session/1", "source": "cli", "messages": turns}
    return [{**form, "id": f"s{at}", "title": f"beta {at}", "started_at": 1.0 + at} for at in range(n)]


case("an import", "store.transfer", sessions, with_sessions(lambda db: None), size=30, large=400)
case(
    "an import of one session",
    "store.transfer",
    lambda n: sessions(1, n),
    with_sessions(lambda db: None),
    size=60,
    large=9_000,
)
case(
    "an export",
    "store.transfer",
    lambda n: sessions(1, n),
    with_sessions(lambda db: db.export_session("s0")),
    size=60,
    large=9_000,
)
case("lists of sessions", "store.lists", sessions, with_sessions(lambda db: [
    db.list_sessions(limit=20, search=word, order=order) for word in (None, "beta", "b 1") for order in ("last_active", "started_at")
]), size=30, large=400)  # fmt: skip
case("pages of sessions", "store.lists", sessions, with_sessions(lambda db: [
    db.list_sessions(limit=5, offset=at) for at in range(0, 100, 5)
]), size=30, large=400)  # fmt: skip
case("a long filter of a list", "store.lists", lambda n: "a " * n,
     lambda text: with_sessions(lambda db: db.list_sessions(search=text))(sessions(2)), large=50_000)  # fmt: skip
case(
    "a search",
    "store.search",
    lambda n: sessions(1, n),
    with_sessions(lambda db: db.search_messages("beta words")),
    size=60,
    large=9_000,
)
case("messages of a session", "store.transcripts", lambda n: sessions(1, n), with_sessions(lambda db: (
    db.get_messages("s0", limit=50), db.get_messages_as_conversation("s0"), db.archive_and_compact("s0", plain_talk(10))
)), size=60, large=9_000)  # fmt: skip


# ---- requests


def parsed(kind: type[Any]) -> Callable[[bytes], Any]:
    return lambda data: request_bodies.parse(request_bodies.as_object(data), kind)


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def chat_messages(n: int) -> bytes:
    return body(messages=[*conversation(n), {"role": "user", "content": "go"}])


def split_messages(data: bytes) -> Any:
    return chat.split_messages(
        request_bodies.parse(request_bodies.as_object(data), models.ChatRequest).model.messages, 1_000_000
    )


CHAT, RESPONSE = parsed(models.ChatRequest), parsed(models.ResponseRequest)
case(
    "messages of a chat",
    "server.chat server.content server.request_bodies",
    chat_messages,
    split_messages,
    size=60,
    large=1_900,
)
case("parts of a message", "server.content", lambda n: body(messages=[
    {"role": "user", "content": [{"type": "text", "text": "a"}] * n}
]), split_messages, large=50_000)  # fmt: skip
case(
    "text of a message",
    "server.content",
    lambda n: body(messages=[{"role": "user", "content": "a\0\ud800" * n}]),
    split_messages,
    large=300_000,
)
case("unknown fields", "server.request_bodies", lambda n: json.dumps({f"f{at}": 1 for at in range(n)}).encode(),
     lambda data: CHAT(data).headers(), large=900)  # fmt: skip
case(
    "nested fields",
    "server.request_bodies",
    lambda n: b'{"a":' * n + b"1" + b"}" * n,
    request_bodies.as_object,
    large=100_000,
)
case(
    "nested lists",
    "server.request_bodies",
    lambda n: b'{"a":' + b"[" * n + b"]" * n + b"}",
    request_bodies.as_object,
    large=200_000,
)
case(
    "halves of characters",
    "server.request_bodies",
    lambda n: b'{"a":"' + rb"\ud800" * n + b'"}',
    request_bodies.as_object,
    large=200_000,
)
case("stop strings and metadata", "server.request_bodies", lambda n: body(messages=[], stop=["a"] * n, metadata={f"k{at}": "v" for at in range(n)}),
     CHAT, large=900)  # fmt: skip
case("tools of a chat", "server.turn_spec", lambda n: body(messages=[], tools=[
    {"type": "function", "function": {"name": f"t{at}", "parameters": {"type": "object"}}} for at in range(n)
]), lambda data: turn_spec.client_tools(CHAT(data).model.tools, None), large=20_000)  # fmt: skip


async def read_items(items: Any) -> Any:
    async def find(ids: Any) -> Json:
        return {}

    async def seal() -> Any:
        raise AssertionError

    return (await response_items.Reader(1_000_000, "o", find, seal).read(items)).split_messages()


def items(n: int) -> list[Json]:
    messages: list[Json] = []
    for at in range(n):
        messages += [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"word {at}"}]},
            {"type": "function_call", "call_id": f"c{at}", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{at}", "output": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        ]
    return [*messages, {"role": "user", "content": "go"}]


case("items of a response", "server.response_items", items, lambda items: run(read_items(items)), size=60, large=10_000)
case("calls among the items of a response", "server.response_items", lambda n: [
    *({"type": "function_call", "call_id": f"c{at}", "name": "look", "arguments": "{}"} for at in range(n)),
    *({"type": "function_call_output", "call_id": f"c{at}", "output": "x"} for at in range(n)),
], lambda items: run(read_items(items)), large=20_000)  # fmt: skip
case("tools of a response", "server.response_tools", lambda n: body(input="a", tools=[
    {"type": "function", "name": f"t{at}", "parameters": {"type": "object"}} for at in range(n)
]), lambda data: response_tools.response_tools(RESPONSE(data).model.tools or (), (), None, []), large=20_000)  # fmt: skip
case(
    "a body of a run",
    "server.request_bodies",
    lambda n: body(input=[{"role": "user", "content": "a"}] * n),
    parsed(models.RunRequest),
    large=50_000,
)
case("a body of a session turn", "server.request_bodies", lambda n: body(message=[{"type": "text", "text": "a"}] * n),
     parsed(models.SessionChatRequest), large=50_000)  # fmt: skip


# ---- renderers


def log(n: int) -> list[Event]:
    """A turn of that many steps, each with text, thought and a call."""
    events: list[Event] = []
    for at in range(n):
        call = {"id": f"c{at}", "name": "look", "arguments": "{}"}
        events += [
            Event("run_1", "reasoning.delta", at, {"message_id": f"m{at}", "text": "hm ", "form": "text", "offset": 0}),
            Event("run_1", "text.delta", at, {"message_id": f"m{at}", "text": "word ", "offset": 0}),
            Event("run_1", "message.completed", at, {"message_id": f"m{at}", "text": "word ", "tool_calls": [call], "row": at,
                                                     "finish_reason": "tool_calls", "partial": False}),
            Event("run_1", "tool.started", at, {"call_id": f"c{at}", "name": "look", "args": {}, "effect": "read", "preview": ""}),
            Event("run_1", "tool.output", at, {"call_id": f"c{at}", "text": "x", "stream": "stdout", "offset": 0}),
            Event("run_1", "tool.completed", at, {"call_id": f"c{at}", "name": "look", "status": "ok", "result": "x", "duration_s": 0.0}),
            Event("run_1", "usage", at, {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}),
        ]  # fmt: skip
    return [Event(e.run_id, e.type, e.step, e.data, seq, float(seq)) for seq, e in enumerate(events, 1)]


def drawn(renderer: Any, events: list[Event], *, at_once: bool) -> None:
    list(renderer.begin())
    for some in [events] if at_once else [[event] for event in events]:
        renderer.feed(some)
    if hasattr(renderer, "finish"):
        renderer.finish(Outcome(text="word", messages=[{"role": "assistant", "content": "word"}]))


def record() -> Any:
    spec = RunSpec(run_id="run_1", session_id="s", owner="o", source="api_server", user_message="hi")
    return type("Record", (), {"spec": spec})()


TEMPLATE: Json = {
    "id": "resp_1",
    "object": "response",
    "status": "in_progress",
    "output": [],
    "usage": None,
    "created_at": 1,
}
RENDERERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "chat chunks": ("server.render_chat", lambda: ChatRenderer("c", "m", 1, usage=True, reasoning=True)),
    "response events": (
        "server.render_responses",
        lambda: ResponseRenderer(TEMPLATE, VisibleItems(extensions=True), event_bytes_max=4_000),
    ),
    "message events": ("server.render_messages", lambda: MessagesRenderer("m", "m", thinking=True)),
    "lines of Ollama": ("server.render_ollama", lambda: OllamaRenderer("m", "2026-01-01T00:00:00Z", "message")),
    "run events": ("server.render_run", lambda: RunRenderer(record(), str, names=False, reasoning=True)),
    "session events": ("server.render_session", lambda: SessionRenderer("s", "run_1", "hi", str)),
}
for name, (parts, renderer) in RENDERERS.items():
    for way in (True, False):
        case(f"{name}, {'at once' if way else 'one by one'}", parts, log,
             lambda items, make=renderer, way=way: drawn(make(), items, at_once=way), size=40, large=4_000)  # type: ignore[misc]  # fmt: skip
    case(f"{name} of a long answer", parts,
         lambda n: [Event("run_1", "text.delta", 1, {"message_id": "m", "text": "word ", "offset": 0}, seq, 1.0) for seq in range(1, n)],
         lambda items, make=renderer: drawn(make(), items, at_once=False), large=50_000)  # type: ignore[misc]  # fmt: skip
case("result for the local model", "providers.local_results",
     lambda n: json.dumps({"matches": [{"path": "a", "line": 1, "text": "word"}] * n}),
     lambda text: render_result("search_files", text), large=20_000)  # fmt: skip
case("messages of a turn", "server.render_session", conversation, turn_messages, size=60, large=10_000)


# ---- tools

ARGUMENTS = ['{"a": ', "[", '"', "\\", "{", "}", ",", '{"a": "b",', "a", "1", "```json\n", "'a': ", '"a":"b" ', "\n"]
texts("arguments of a call", "tools.framework.arguments", arguments.parse, ARGUMENTS, large=100_000)
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
case(
    "arguments to be checked",
    "tools.framework.arguments",
    lambda n: {"a": ["1"] * n},
    lambda args: arguments.check(args, SCHEMA),
    large=50_000,
)
case(
    "faults of a value",
    "tools.framework.arguments",
    lambda n: {"a": ["x"] * n},
    lambda args: arguments.schema_faults(args, SCHEMA),
    large=50_000,
)
case("a large schema", "tools.framework.arguments", lambda n: {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(n)}},
     arguments.schema_problem, large=20_000)  # fmt: skip
texts("the name of a tool", "tools.framework.arguments", lambda text: arguments.settle_name(text, ["read_file", "todo"]),
      ["a", "_", "functions.", "read_file", ":0", "-tool"], large=100_000)  # fmt: skip
LINES = ["a\n", "  a\n", "\n", "a b\n", "}\n"]
texts(
    "a replacement",
    "tools.patching",
    lambda text: patching.replace_text(text, "a\n", "b\n", True),
    LINES,
    large=100_000,
)
texts("a replacement that fits nowhere", "tools.patching", lambda text: patching.replace_text(text, "a\n" * 20 + "z", "b", False), LINES,
      large=20_000)  # fmt: skip
texts("a patch", "tools.patching", patching.parse_patch, ["*** Update File: a\n@@\n-a\n+b\n", "*** Add File: a\n+a\n", "@@\n", "-a\n", "+a\n", "*** "],
      "*** Begin Patch\n*** Update File: a\n@@\n", large=100_000)  # fmt: skip
case("a difference", "tools.patching", lambda n: ([f"{at}\n" for at in range(n)], [f"{at + at % 3}\n" for at in range(n)]),
     lambda both: diffs.unified_diff(*both, ("a", "b")), large=4_000, linear=False)  # fmt: skip
case("a difference of equal lines", "tools.patching", lambda n: (["a\n"] * n, ["a\n", "b\n"] * (n // 2)),
     lambda both: diffs.unified_diff(*both, ("a", "b")), large=4_000, linear=False)  # fmt: skip
case("hunks of a patch", "tools.patching", lambda n: ("".join(f"line {at}\n" for at in range(n)), "*** Update File: a\n" + "".join(
    f"@@\n-line {at}\n+other {at}\n" for at in range(0, n, 10)
)), lambda both: patching.apply_hunks(both[0], patching.parse_patch(both[1])[0].hunks), large=100_000)  # fmt: skip
case("hunks of equal lines", "tools.patching", lambda n: ("a\n" * n, "*** Update File: a\n" + "".join(
    f"@@ -{at + 1},1 +{at + 1},1 @@\n-a\n+b\n" for at in range(n)
)), lambda both: patching.apply_hunks(both[0], patching.parse_patch(both[1])[0].hunks), large=100_000, linear=False)  # fmt: skip
case("a glob", "tools.rg_fallback", lambda n: ("**/" * 20 + "*a*b*c", ["a"] * n),
     lambda both: rg_fallback.Glob(both[0]).matches(both[1]), large=20_000)  # fmt: skip
texts(
    "a rule of an ignore file",
    "tools.rg_fallback",
    rg_fallback.rule_of,
    ["*", "a/", "[", "\\", "?", "**/", "!"],
    size=100,
    large=500,
)
HTML = ["<p>a", "<div>", "</div>", "<a href='b'>c</a>", "<li>", "<ul><li>", "<table><tr><td>a", "<", "&", "&amp;", "<!--", "<script>",
        "<pre>", "a ", "\n", "<b>", "<h1>a</h1>", "<br>", "<img src=a>"]  # fmt: skip
texts(
    "a page",
    "tools.pages",
    lambda text: pages.markdown(text, "http://a/"),
    HTML,
    large=60_000,
)
case("tools of an MCP server", "tools.mcp_names", lambda n: [
    {"name": f"t{at}", "description": "d", "inputSchema": {"type": "object"}} for at in range(n)
], lambda items: mcp_names.fit("s", items), large=5_000)  # fmt: skip
case("tools of one name", "tools.mcp_names", lambda n: [{"name": "t", "inputSchema": {"type": "object"}}] * n,
     lambda items: mcp_names.fit("s", items), large=5_000)  # fmt: skip
case("tools of similar names", "tools.mcp_names", lambda n: [{"name": "t" + "-" * at, "inputSchema": {"type": "object"}} for at in range(n)],
     lambda items: mcp_names.fit("s", items), size=100, large=1_000)  # fmt: skip
case(
    "an answer of an MCP server",
    "tools.mcp_names",
    lambda n: [{"type": "text", "text": "word "}] * n,
    mcp_names.answer,
    large=50_000,
)


def captured(pieces: Iterable[bytes]) -> None:
    readable, ends = OutputDecoder(KNOWN), HeadAndTail(1_000)
    for piece in pieces:
        ends.add(readable.feed(piece))
    ends.add(readable.feed(b"", end=True))
    ends.text()


for markup in (b"a", b"\x1b[", b"\x1b]0;", b"\r", b"a\r\n", b"\xf0\x9f", b"\x1b", b"\x1b[1m", b"\b"):
    case(f"output of a command: {markup!r}", "tools.output_buffer",
         lambda n, text=markup: cut(text * (n // len(text) + 1), 100), captured, size=4_000, large=300_000)  # type: ignore[misc]  # fmt: skip


async def shape(contents: list[str]) -> None:
    async def blocking(function: Callable[[], Any]) -> Any:
        return function()

    with tempfile.TemporaryDirectory() as folder:
        shaper = ResultLimiter(Path(folder), 5_000, 8_000, blocking)
        for at, content in enumerate(contents):
            await shaper.shaped({"text": content}, json.dumps({"text": content}), f"c{at}", foreign=True)


case(
    "answers of tools",
    "tools.framework.result_limits",
    lambda n: ["a\n" * 10] * n,
    lambda items: run(shape(items)),
    size=100,
    large=3_000,
)
case(
    "a long answer of a tool",
    "tools.framework.result_limits",
    lambda n: ["a\n" * n],
    lambda items: run(shape(items)),
    size=5_000,
    large=500_000,
)


# ---- settings, skills, jobs, texts

texts(
    "a schedule",
    "runs.schedule",
    lambda text: schedule.parse(text, 0.0, UTC),
    ["1,", "*/2 ", "every ", "1-5,", "0 ", "* ", "10m "],
    "0 0 1 1 1",
    large=100_000,
)
texts(
    "a skill",
    "services.skills",
    skills.front_matter,
    ["---\n", "a: b\n", "---", "\n", "name: a\n---\n"],
    large=200_000,
)


def configured(data: str) -> Any:
    return config_check.entries(config_files.parse_yaml(data.encode(), Path("config.yaml")))


case(
    "a configuration",
    "settings.files settings.check",
    lambda n: "".join(f"a{at}: [1, {{b: c}}]\n" for at in range(n)),
    configured,
    size=40,
    large=3_000,
)
case("a configuration with one long list", "settings.files settings.check", lambda n: "a:\n" + "".join("- b: c\n" for _ in range(n)), configured,
     size=40, large=3_000)  # fmt: skip
case(
    "a configuration that repeats itself",
    "settings.files settings.check",
    lambda n: "".join("a: 1\n" for _ in range(n)),
    configured,
    size=40,
    large=3_000,
)
case("a change of a configuration", "settings.splice", lambda n: "".join(f"a{at}:\n  b: c\n" for at in range(n)),
     lambda text: config_splice.replace_entry(text, ("a1", "b"), {"a1": {"b": "d"}}, remove=False), large=3_000)  # fmt: skip
texts("variables", "settings.files", lambda text: config_files.parse_env(text.encode()), ["A=b\n", "A='", 'A="', "#a\n", "\\\n", "export A=b\n"],
      large=60_000)  # fmt: skip
texts(
    "a session as Markdown",
    "services.session_markdown",
    lambda text: session_markdown.markdown(
        {
            "id": "s",
            "source": "cli",
            "model": "m",
            "cwd": "/",
            "title": "t",
            "preview": "",
            "started_at": 1.0,
            "last_active": 1.0,
            "messages": [{"role": "tool", "tool_name": "t", "content": text, "timestamp": 1.0}],
        }
    ),
    ["a", "`", "```", "\n", "\x1b"],
    large=300_000,
)
texts("a text that is shown", "core.text", text.visible, ["a", "\x1b", "\u202e", "\0", "\n"], large=300_000)
texts("a text with halves", "core.text", text.whole_text, ["a", "\ud800", "\ud83d\ude00"], large=300_000)


def shown_lines(text: str) -> None:
    drawer = MarkdownLines()
    for line in text.split("\n"):
        for part in cut_text(line, 3_900):
            list(drawer.line(part))
        list(drawer.line(line))
    list(drawer.end())


texts("Markdown in a terminal", "cli.markdown_lines", shown_lines, ["a\n", "|a|b|\n", "```\n", "*", "**a", "`", "[a](", "# a\n", "- a\n", "_", "\\"],
      large=20_000)  # fmt: skip


case(
    "answers of tools as text",
    "tools.framework.registry",
    lambda n: {"a": ["x"] * n, "b": {f"k{at}": at for at in range(n)}},
    render,
    large=50_000,
)


def inflated(data: bytes) -> None:
    inflater = Inflater("gzip")
    for piece in cut(data, 50):
        inflater.feed(piece)
        while inflater.read():
            pass
    inflater.finish()


case(
    "a packed body",
    "http_client.inflate",
    lambda n: gzip.compress(random.Random(n).randbytes(n)),
    inflated,
    size=2_000,
    large=1_000_000,
)


def main() -> None:
    """Do every case of one part of so many at its large size, each in a process of its own that may use so much processor
    time; what is printed are the names of those that ended by that."""
    part, parts, cpu_s_max = map(int, sys.argv[1:])
    for name in list(CASES)[part::parts]:
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s_max, cpu_s_max))
            with suppress(*REFUSALS):
                CASES[name].work(CASES[name].make(CASES[name].large))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(f"{name} ended with status {status}")


if __name__ == "__main__":
    main()
