"""Whatever conversations clients hold, edit and prune, and however they meet: the model gets what each request says."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.model_server import Call, Reply, Request

from .clients import Json, read_json
from .conftest import Start
from .test_request_messages import CHAT, LAMP, call, calls, chat_message, file, image, model_messages, output, text

# Few things to say, so that conversations are often alike.
TEXTS = ["hi", "ok", "why?"]
PARTS = [
    image("cat"),
    image("dog"),
    file("a.txt", "milk"),
    file("a.txt", "bread"),
    file("b.md", "# x", "text/markdown"),
]
TODO = {"todos": [{"id": "1", "content": "tea", "status": "pending"}]}
NAMES = [None, None, None, "ada", "bob"]


@dataclass(frozen=True)
class Step:
    """What one client does, and how the model answers it."""

    conversation: int
    change: str
    place: int
    text: int
    part: int
    name: int
    answer: str
    together: bool


small = st.integers(0, 9)
STEPS = st.builds(
    Step,
    conversation=st.integers(0, 3),
    change=st.sampled_from(["", "", "", "edit", "prune", "again", "copy", "new", "drop"]),
    place=small,
    text=small,
    part=small,
    name=small,
    answer=st.sampled_from(["text", "text", "server", "client", "both"]),
    together=st.booleans(),
)


def content(step: Step) -> Any:
    chosen_text = TEXTS[step.text % len(TEXTS)]
    return [text(chosen_text), PARTS[step.part]] if step.part < len(PARTS) else chosen_text


def pieces(messages: list[Json]) -> list[list[Json]]:
    """Messages in groups that stay together: a message with its calls' outputs."""
    groups: list[list[Json]] = []
    for message in messages:
        if message["role"] == "tool":
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def changed(messages: list[Json], step: Step) -> list[Json]:
    """The messages as their client left them."""
    if step.change == "edit" and messages:
        message = messages[step.place % len(messages)]
        message["content"] = content(step) if message["role"] != "assistant" else TEXTS[step.text % len(TEXTS)]
    elif step.change == "prune" and len(groups := pieces(messages)) > 1:
        del groups[step.place % (len(groups) - 1)]
        return [message for group in groups for message in group]
    elif step.change == "again":
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        return messages[:-1]
    return messages


def request_messages(messages: list[Json], step: Step) -> list[Json]:
    """What is sent: the messages, and something new."""
    last = messages[-1] if messages else {}
    new: list[Json] = []
    if last.get("tool_calls"):
        if step.change == "drop":
            messages = messages[:-1]
        else:
            new = [output(call["id"], content(step)) for call in last["tool_calls"]]
    if not new or step.together:
        name = NAMES[step.name % len(NAMES)]
        new.append(chat_message("user", content(step), **({"name": name} if name else {})))
    return [*messages, *new]


def on_the_wire(messages: list[Json]) -> list[Json]:
    """The messages as a provider of chat completions is sent them."""
    wire: list[Json] = []
    images: list[Json] = []
    for message in messages:
        if images and message["role"] != "tool":
            wire.append(chat_message("user", images))
            images = []
        parts = message["content"]
        if isinstance(parts, list):
            parts = [as_text(part) if part["type"] == "file" else part for part in parts]
            if message["role"] == "tool":
                if image_parts := [part for part in parts if part["type"] == "image_url"]:
                    images += [text("Images from the result of the tool:"), *image_parts]
                parts = "\n".join(part["text"] for part in parts if part["type"] == "text")
        wire.append({**message, "content": parts})
    return [*wire, *([chat_message("user", images)] if images else [])]


def as_text(part: Json) -> Json:
    name = part["file"]["filename"]
    file_texts = {PARTS[2]["file"]["file_data"]: "milk", PARTS[3]["file"]["file_data"]: "bread"}
    return text(f"File {name}:\n{file_texts.get(part['file']['file_data'], '# x')}")


@dataclass
class Clients:
    """Several users of one key, and the model that answers them."""

    api: Any = None
    numbers: Any = field(default_factory=itertools.count)
    steps: dict[str, Step] = field(default_factory=dict)
    first: dict[str, Request] = field(default_factory=dict)
    # What a client had seen when the server made a call of its own.
    origin: dict[str, str] = field(default_factory=dict)

    def answer(self, request: Request) -> Reply:
        mark = request.body["user"]
        step, own = self.steps[mark], f"srv_{mark}"
        self.first.setdefault(mark, request)
        reply_text = TEXTS[step.place % len(TEXTS)]
        if step.answer == "text" or request.body["messages"][-1].get("tool_call_id") == own:
            return Reply(text=reply_text, continues=False)
        tool_calls = [Call("todo", TODO, id=own)] if step.answer != "client" else []
        tool_calls += [Call("lamp", {"room": "hall"}, id=f"c{step.place % 2}")] if step.answer != "server" else []
        return Reply(tool_calls=tool_calls)

    async def take(self, step: Step, items: list[Json]) -> list[Json]:
        """One request; the conversation with its answer."""
        sent, mark = request_messages(items, step), f"r{next(self.numbers)}"
        self.steps[mark] = step
        body = {"messages": sent, "tools": [LAMP], "user": mark}
        async with self.api.post(CHAT, body) as response:
            message = (await read_json(response))["choices"][0]["message"]
        self.check(mark, sent)
        answer = chat_message("assistant", message["content"])
        if message.get("tool_calls"):
            answer = calls(*(call(tool_call["id"]) for tool_call in message["tool_calls"]), content=message["content"])
        self.origin[f"srv_{mark}"] = json.dumps([*sent, answer])
        return [*sent, answer]

    def check(self, mark: str, sent: list[Json]) -> None:
        """The model was given these messages; what is more are calls that the server made in this conversation."""
        messages: list[Json] = []
        for message in model_messages(self.first[mark]):
            server_calls = [call for call in message.get("tool_calls") or () if call["id"].startswith("srv_")]
            ours = str(message.get("tool_call_id")).startswith("srv_")
            added = [server_call["id"] for server_call in server_calls]
            assert all(self.of_this(item, sent) for item in added), (added, sent)
            if ours or (server_calls and len(server_calls) == len(message["tool_calls"])):
                continue
            entries = [call for call in message.get("tool_calls") or () if call not in server_calls]
            messages.append({**message, "tool_calls": entries} if server_calls else message)
        assert messages == on_the_wire(sent), self.steps[mark]

    def of_this(self, call_id: str, sent: list[Json]) -> bool:
        before = [json.dumps(sent[:end]) for end in range(1, len(sent))]
        return self.origin[call_id] in before


async def run_plan(clients: Clients, plan: list[Step]) -> None:
    """Carry a plan out; steps that are taken together meet at the server."""
    histories: list[list[Json]] = [[], [], [], []]
    at_once: dict[int, Any] = {}

    async def settle() -> None:
        results = await asyncio.gather(*at_once.values())
        for place, messages in zip([*at_once], results, strict=True):
            histories[place] = messages
        at_once.clear()

    for step in plan:
        if step.conversation in at_once or not step.together:
            await settle()
        mine = copy.deepcopy(histories[step.place % 4] if step.change == "copy" else histories[step.conversation])
        mine = [] if step.change == "new" else changed(mine, step)
        at_once[step.conversation] = clients.take(step, mine)
    await settle()


@pytest.mark.parametrize("examples", [10, pytest.param(200, marks=pytest.mark.long)])
async def test_model_receives_request_messages_property(start: Start, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.lists(STEPS, min_size=4, max_size=14))
    def draws(plan: list[Step]) -> None:
        plans.append(plan)

    plans: list[list[Step]] = []
    draws()
    clients = Clients()
    clients.api = await start(handler=clients.answer)
    for plan in plans:
        await run_plan(clients, plan)
    put_back = [request for request in clients.first.values() if "srv_" in json.dumps(request.body["messages"])]
    assert put_back, "no plan has led to a conversation that is gone on with after a call of the server's"
