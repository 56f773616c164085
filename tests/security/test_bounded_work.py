"""Patterns and searches over what a client, a model or a page sends take work in proportion to its length."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from hermes.agent import media, media_tags
from hermes.guards import commands, findings, snippets
from hermes.store import search, words
from hermes.tools import output_buffer
from hermes.tools.framework import approvals, arguments
from support.regex_attacks import attacks
from support.regex_steps import steps_to_search

from .test_linear_redaction import CHARS, check_linear, shrunk

CPU_S_MAX = 12


def whole(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """A pattern for `fullmatch`, as one to search for."""
    return re.compile(rf"\A(?:{pattern.pattern})\Z", pattern.flags)


PATTERNS = {
    "links to images": media_tags._MADE,
    "a tag of a file": shrunk(media._WHOLE),
    "a tag of a file at the end": shrunk(media._LAST),
    "the beginning of a tag of a file": shrunk(media._OPEN),
    "commands of sed": commands._SED_RUNS,
    "modes that all may write": whole(commands._WORLD_WRITABLE),
    "modes that set the user": whole(commands._SETUID),
    "globs for anything": whole(findings._ANYTHING),
    "code that runs commands": shrunk(re.compile(snippets._RUNS.pattern.replace("64}", "100}"))),
    "a fenced answer": approvals._FENCE,
    "strings of JSON": arguments._STRING,
    "escapes of a terminal": output_buffer._ESCAPES,
    "a query": search._TOKEN,
    "terms of a query": search._TERM,
    "words of a message": words.WORD,
}


# What the pattern alone does not suggest.
FURTHER = [("", "\n", ""), ("", ",a=w", "\n"), ("", ",=s", "\n"), ("", "\x13", "")]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_regex_over_untrusted_text_is_linear(pattern: re.Pattern[str]) -> None:
    for begin, repeated, end in [*attacks(pattern), *FURTHER]:
        check_linear(lambda text: steps_to_search(pattern, text), begin, repeated, end, CHARS)


# Each in a process of its own that may use so much processor time; in proportion to the text they need about one second.
_WORK = {
    "a bracket in a long message": "strip_rendered_media('[' * 1_000_000 + '](data:image/')",
    "escaped brackets in a long message": "strip_rendered_media('[' + r'\\[' * 500_000 + '](data:image/')",
    "tags of files without an end": "write(['MEDIA:' * 200_000])",
    "tags of files without an end in pieces": "write(['MEDIA:MEDIA:MED', 'IA:'] * 30_000)",
    "quoted tags of files without an end": "write(['MEDIA:x' * 100_000, chr(10).join(['MEDIA:\"a MEDIA:`'] * 50_000)])",
    "many tags of files": "write(['MEDIA:a ' * 300_000])",
    "a word that is searched for often": "found('beta ' * 10_000, 'beta ' * 400)",
    "a word that is one of many alternatives": "found('beta ' * 10_000, 'beta OR ' * 200 + 'beta')",
    "phrases that overlap": """found('a ' * 8000, ' OR '.join('"' + 'a ' * n + '"' for n in range(1, 30)))""",
    "quotes that are not closed": """literals_of("'" + r"\\'" * 500_000)""",
    "names of functions": "list(rules_of('check_' * 100_000 + 'spawn' * 100_000))",
    "newlines for sed": """check("sed '" + chr(10) * 90_000 + "' f", "/ws", FACTS)""",
    "cut arguments of a long word": """parse('{"a": ' + 'a' * 500_000 + chr(1))""",
    "a block of equal lines": "find_blocks(['a'] * 600_000, ['a'] * 200_000, str)",
    "a wrong value that looks like a fault": "fault_of('Invalid enum value ' + ' - at `$' * 500_000)",
    "a long word in a job": "exfiltrates('.ssh/' * 200_000)",
    "many words in a job": "exfiltrates('send passwords $KEY .ssh/a.pub b@c.d ' * 20_000)",
    "a plan for many messages": "plan(talk(200_000), Budget(2_000, 500))",
    "a plan for many messages of one user": "plan(talk(200_000)[::2], Budget(2_000, 500))",
    "many tool results made shorter": "prune(list(rounds(100_000)))",
    "an extract of many messages": "extract(talk(100_000), 1_000)",
    "a transcript of many messages": "transcript(talk(100_000), 1_000)",
    "many messages that are none of the stored ones": "_origins(kept(talk(20_000)), kept(talk(20_000), 'other'))",
    "every third message of many": "_origins(kept(talk(30_000)), kept(talk(1), 'x') + kept(talk(30_000))[2::3][:-1])",
    "many calls of one message in their order": "list(in_call_order(kept([*rounds(1), *list(rounds(50_000))[1::2]])))",
    "many ignored fields": "Body(None, {}, ['field'] * 1_000_000).headers()",
}
_CHILD = """
import asyncio
import json
import os
import resource
import sys
from contextlib import suppress
from hermes.agent.compress import Budget, extract, plan, prune, transcript
from hermes.agent.media import MediaTagFilter
from hermes.agent.media_tags import strip_rendered_media
from hermes.guards.commands import check
from hermes.guards.exfiltration import exfiltrates
from hermes.guards.snippets import literals_of, rules_of
from hermes.store.rows import _origins, in_call_order, row_of_message
from hermes.store.sessions import SessionDB
from hermes.server.request_bodies import Body, field_error as fault_of
from hermes.tools.framework.arguments import parse
from hermes.tools.patching import find_blocks
from guards.test_commands import FACTS

def talk(count):
    return [{"role": ("user", "assistant")[at % 2], "content": f"words {at}"} for at in range(count)]

def rounds(count):
    for at in range(count):
        call = {"id": f"c{at}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
        yield {"role": "tool", "content": "line of output " * 20, "tool_call_id": f"c{at}"}

def kept(messages, begin=""):
    return [row_of_message("s", {**message, "content": begin + message["content"]}) for message in messages]

async def made(path):
    return None

async def feed(pieces):
    outgoing = MediaTagFilter(lambda text: None, made)
    for piece in pieces:
        await outgoing.feed(piece)
    await outgoing.feed("", last=True)

def write(pieces):
    asyncio.run(feed(pieces))

def found(text, query):
    db = SessionDB(":memory:")
    db.create_session("s", "cli")
    db.append_message("s", "user", text)
    assert ">>>" in db.search_messages(query)[0]["snippet"]
    db.close()

# What is imported above costs about as much as the work: it is imported once.
for name, work in json.loads(sys.argv[1]).items():
    if (pid := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX))
        with suppress(RecursionError):
            exec(work)
        os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:
        print(name)
"""


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "others"])
def test_long_input_stays_within_cpu_time(is_long: bool) -> None:
    work = {name: work for at, (name, work) in enumerate(_WORK.items()) if (at % 3 > 0) is is_long}
    child = subprocess.run(
        [sys.executable, "-c", _CHILD.replace("CPU_S_MAX", str(CPU_S_MAX)), json.dumps(work)],
        check=False,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"},
    )
    assert child.returncode == 0 and child.stdout == "", (child.stdout, child.stderr[-2000:])
