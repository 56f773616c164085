"""The table of attempts, and carrying one out: through the tools as a model calls them, or with nothing in its way."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from agent.harness import Json
from guards.stage import WORLD, Stage, serving
from hermes.core.threads import Threads
from hermes.tools import files, patching, searching, vision
from hermes.tools import web as web_tools
from support.model_server import Call
from tools.commanding import ToolSession
from tools.turns import unframed

from .canaries import Canaries

TOOLS = (files.READ, files.WRITE, patching.TOOL, searching.TOOL, vision.TOOL, web_tools.SEARCH, web_tools.EXTRACT)
_PLAIN_S = 20


@dataclass(frozen=True)
class Attempt:
    """A line of the table: what stops it in a sandbox and without, whether it works where nothing does, its steps."""

    defence: str
    alone: str
    bites: bool
    steps: tuple[tuple[str, str], ...]
    text: str

    @property
    def has_target(self) -> bool:
        """Whether what it is aimed at is a canary, and not the machine."""
        return "@" in self.text


def _attempts() -> Iterator[Attempt]:
    for line in Path(__file__).with_name("attempts.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            defence, alone, bites, text = line.split(" ", 3)
            steps = [step.replace("⏎", "\n").split(" ", 1) for step in text.split(" → ")]
            yield Attempt(defence, alone, bites == "+", tuple((tool, arguments) for tool, arguments in steps), text)


ATTEMPTS = tuple(_attempts())

# What each tool is told to do with the text of an attempt.
_ARGUMENTS: dict[str, Callable[[str], Json]] = {
    "terminal": lambda text: {"command": text},
    "execute_code": lambda text: {"code": text},
    "read_file": lambda text: {"path": text},
    "write_file": lambda text: {"path": text, "content": "x\n", "overwrite": True},
    "patch": lambda text: {"mode": "patch", "patch": text},
    "search_files": lambda text: dict(zip(("pattern", "path"), text.split(" in "), strict=False)),
    "web_extract": lambda text: {"urls": [text]},
    "vision_analyze": lambda text: {"image_url": text, "question": "?"},
}


def _given(tool: str, text: str) -> Json:
    with contextlib.suppress(ValueError):
        payload = json.loads(text)
        if isinstance(payload, dict):
            return payload
    return _ARGUMENTS[tool](text)


class RunResources(Stage):
    """Names that lead outside and inside; what the machine itself is called it says itself."""

    def __init__(self, threads: Threads, port: int) -> None:
        super().__init__(threads)
        self.answers = {"page.test": [[WORLD]], "inner.test": [["127.0.0.1"]], "mixed.test": [[WORLD, "127.0.0.1"]]}
        self.servers = {WORLD: port}

    async def addresses(self, host: str, port: int) -> list[str]:
        if host == "localhost":
            return await super(Stage, self).addresses(host, port)
        return await super().addresses(host, port)


async def _redirecting(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound(request.query_string) if request.query_string else web.HTTPNotFound


async def carried_out(tool_session: ToolSession, canaries: Canaries, attempt: Attempt) -> tuple[list[Json], str]:
    """The answer to each step, and all answers as one text."""
    tool_session.offer(*TOOLS)
    tool_answers: list[Any] = []
    answers: list[Json] = []
    async with serving(_redirecting) as port:
        tool_session.harness.app.services.outside.network = RunResources(tool_session.harness.app.services.files, port)
        for tool, text in attempt.steps:
            run = await tool_session.run(Call(tool, _given(tool, canaries.substitute(text))))
            contents = [m["content"] for m in run.result["messages"] if m["role"] == "tool"]
            answers.append(json.loads(unframed(contents[-1])))
            tool_answers += [contents, [event for event in run.events if event["type"] != "tool.started"]]
    return answers, json.dumps(tool_answers, ensure_ascii=False)


# ---- with nothing in its way


def _plain(argv: list[str], canaries: Canaries, cwd: str = "") -> str:
    with open(os.devnull) as null, contextlib.suppress(subprocess.TimeoutExpired):
        result = subprocess.run(
            argv, cwd=cwd or canaries.workspace, stdin=null, capture_output=True, timeout=_PLAIN_S, check=False
        )
        return (result.stdout + result.stderr).decode(errors="replace")
    return ""


def _run(text: str, canaries: Canaries) -> str:
    arguments = _given("terminal", text)
    return _plain(["bash", "-c", arguments["command"]], canaries, arguments.get("workdir", ""))


def _opened(text: str, canaries: Canaries) -> str:
    return _where(text, canaries).read_text()


def _where(text: str, canaries: Canaries) -> Path:
    return canaries.workspace / os.path.expanduser(json.loads(text)["path"] if text.startswith("{") else text)


def _written(text: str, canaries: Canaries) -> str:
    path = _where(text, canaries)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x\n")
    return ""


def _fetched(url: str, canaries: Canaries) -> str:
    with urllib.request.urlopen(url, timeout=_PLAIN_S) as answer:
        return str(answer.read().decode())


def _searched(text: str, canaries: Canaries) -> str:
    arguments = _given("search_files", text)
    return _plain(["grep", "-rs", "--", arguments["pattern"], arguments.get("path", ".")], canaries)


_UNGUARDED: dict[str, Callable[[str, Canaries], str]] = {
    "terminal": _run,
    "execute_code": lambda text, canaries: _plain([sys.executable, "-c", text], canaries),
    "read_file": _opened,
    "vision_analyze": _opened,
    "write_file": _written,
    "search_files": _searched,
    "web_extract": _fetched,
}


def done_plainly(canaries: Canaries, attempt: Attempt) -> str:
    """What comes of an attempt that no guard sees and no sandbox holds."""
    together = itertools.groupby(attempt.steps, key=lambda step: step[0])
    steps = [(tool, "\n".join(text for _, text in same)) for tool, same in together]
    return "\n".join(_UNGUARDED[tool](canaries.substitute(text), canaries) for tool, text in steps)
