"""The command `llm`, its memory a file; called within this process, for it is slow to begin."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from click.testing import CliRunner
from llm.cli import cli

from clients.drivers import MODEL, PLAIN, Answer, Conversation, How, Refused
from clients.drivers.shapes import Person
from clients.scenes import WEATHER

_FUNCTION = f"def weather(city: str) -> str:\n    return {WEATHER!r}\n"


@cache
def _folder(url: str) -> TemporaryDirectory[str]:
    """A folder with a model for each protocol; one for all talks, for its database is slow to be made."""
    able = {"api_key_name": "hermes", "supports_tools": True, "supports_schema": True}
    models = [
        {"model_id": api, "model_name": MODEL, "api_base": url, "responses": api == "responses", **able}
        for api in ("chat", "responses")
    ]
    folder = TemporaryDirectory()
    Path(folder.name, "extra-openai-models.yaml").write_text(json.dumps(models))
    return folder


class LLMTalk(Conversation):
    """A model of `extra-openai-models.yaml`, asked at the command line."""

    chains = False
    returns_server_items = False
    shows_pieces = False
    # It refuses a temperature like that itself; of this it says max_output_tokens in the other protocol.
    bad_option = ("max_tokens", -1)

    def __init__(self, url: str, key: str, api: str) -> None:
        super().__init__(url, key, api)
        self.environment = {"LLM_USER_PATH": _folder(url).name}
        self.has_turns = False

    def ask(self, prompt: str, how: How = PLAIN) -> Answer:
        args = ["prompt", prompt, "-m", self.api, "--key", self.key, "--usage"]
        args += ["-s", how.system] if how.system else []
        args += ["-c"] if self.has_turns else []
        args += [] if how.stream else ["--no-stream"]
        args += ["--functions", _FUNCTION, "--td"] if how.tools else []
        args += ["--schema", json.dumps(Person.model_json_schema())] if how.schema else []
        args += [word for name, value in how.options.items() for word in ("-o", name, str(value))]
        result = CliRunner().invoke(cli, args, env=self.environment)
        if result.exit_code:
            status = re.search(r"Error code: (\d{3})", result.stderr)
            raise Refused(int(status[1]) if status else None, result.stderr)
        self.has_turns = True
        text = result.stdout.removesuffix("\n")
        # It tells of the last request, as `Token usage: 10 input, 5 output`.
        usage = re.search(r"Token usage: (\d+) input, (\d+) output", result.stderr)
        tokens = int(usage[1]) + int(usage[2]) if usage else 0
        return Answer(text, 1, _calls(result.stderr), json.loads(text) if how.schema else None, tokens)


def _calls(output: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of which the command tells, as `Tool call: name({…})`."""
    matches = re.findall(r"Tool call: (\w+)\((.*)\)", output)
    return [(name, json.loads(arguments.replace("'", '"'))) for name, arguments in matches]
