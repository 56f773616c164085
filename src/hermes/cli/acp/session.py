"""A session of an editor: a chat whose screen is the editor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from acp import RequestError
from acp.connection import Connection

from hermes.cli import slash
from hermes.cli.acp.client_files import READ, WRITE, ClientFiles
from hermes.cli.acp.client_terminals import ClientTerminals
from hermes.cli.acp.content import invalid, message_of
from hermes.cli.acp.updates import Updates, approval_call, message, thought
from hermes.cli.acp.wire import INTERNAL_ERROR, Wire
from hermes.cli.agents import ServerLost
from hermes.cli.chat_loop import Chat
from hermes.cli.conversation import Conversation
from hermes.cli.line_output import Lines
from hermes.cli.model_command import cached_lists
from hermes.cli.slash_table import COMMANDS
from hermes.core.errors import HermesError
from hermes.core.json_types import JsonObject
from hermes.core.result import Result
from hermes.core.spec import RouteChoice
from hermes.services import models
from hermes.settings.schema_types import EFFORTS

AUTH_REQUIRED = -32000
# Commands of a chat that an editor has no way of its own for. Those about the session itself are the editor's.
_COMMANDS = {
    "compress",
    "cron",
    "help",
    "mcp",
    "memory",
    "model",
    "processes",
    "prompt",
    "reasoning",
    "skills",
    "status",
}
_COMMANDS |= {"title", "tools", "usage", "yolo"}
_MODES = {
    "manual": ("Ask", "What could do harm needs approval"),
    "smart": ("Review", "A reviewing model decides what needs approval"),
    "off": ("No approvals", "Nothing needs approval"),
}
_STOP_REASONS = {
    "max_iterations": "max_turn_requests",
    "output_truncated": "max_tokens",
    "content_filter": "refusal",
    "content_policy_violation": "refusal",
}
_CHOICES = {
    "once": ("Allow once", "allow_once"),
    "session": ("Allow for this session", "allow_always"),
    "always": ("Always allow", "allow_always"),
    "deny": ("Reject", "reject_once"),
}
_NO_ANSWER = "[The user's editor cannot ask this. Put the question into your answer.]"
_DEFAULT = "default"
_CANCEL_AGAIN_S = 0.05


class EditorScreen(Lines):
    """What a chat shows, sent to the editor: the answer and what commands print as messages, notes as thoughts."""

    def __init__(self, updates: Updates, send: Callable[[JsonObject], None]) -> None:
        super().__init__(quiet=False)
        self._updates, self._send = updates, send
        self.on_event: Callable[[JsonObject], None] = lambda _: None
        self.result: Result | None = None
        self.failure: JsonObject = {}
        self.problems: list[str] = []

    def begin(self) -> None:
        self._updates.begin()
        self.result, self.failure = None, {}

    reset = Lines.begin

    def show(self, event: JsonObject) -> None:
        for update in self._updates.render(event):
            self._send(update)
        if event["event"] == "run.failed":
            self.failure = event
        self.on_event(event)

    def ended(self, result: Result) -> None:
        self.result = result

    def note(self, text: str, style: str = "") -> None:
        self._send(thought(f"{text}\n\n"))

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def plain(self, text: str) -> None:
        self._send(message(text))


class EditorSession:
    def __init__(self, talk: Conversation, wire: Wire, connection: Connection, client: JsonObject) -> None:
        self.talk, self._wire, self._connection, self._client = talk, wire, connection, client
        talk.answerable = True
        self.updates = Updates(self._folder, self._text_before, self._window)
        self.screen = EditorScreen(self.updates, self.send)
        self.screen.on_event = self._hear
        self.chat = Chat(talk, self.screen)
        self._files: ClientFiles | None = None
        self._questions: dict[str, asyncio.Task[None]] = {}
        self._prompting = asyncio.Lock()
        self._cancels = 0
        self._title: str | None = None
        self._window_tokens = 0
        if not talk.remote:
            self._use_editor()

    # --- what the editor offers ----------------------------------------------------------------------------------------

    def _use_editor(self) -> None:
        """Turns of this process read and write files through the editor, and run commands in its terminals where they
        have no sandbox, as far as it offers that."""
        offered = self._client.get("fs") or {}
        names = {READ: "readTextFile", WRITE: "writeTextFile"}
        methods = frozenset(method for method, name in names.items() if offered.get(name))
        outside, session_id = self.talk.app.services.outside, self.talk.session_id
        if methods:
            self._files = ClientFiles(self._connection, session_id, outside.sandboxes, methods)
            outside.editors[session_id] = self._files
        if self._client.get("terminal"):
            outside.terminals[session_id] = partial(
                ClientTerminals, connection=self._connection, session_id=session_id, shown=self._show_terminal
            )

    def _show_terminal(self, call_id: str, terminal_id: str) -> None:
        for update in self.updates.terminal(call_id, terminal_id):
            self.send(update)

    def _folder(self) -> str:
        shell = self.talk.app.services.session_states.of("default", self.talk.session_id).shell
        return self.talk.folder if shell is None else shell.cwd

    def _text_before(self, path: str) -> str | None:
        return None if self._files is None else self._files.texts.get(path)

    def _window(self) -> int:
        return self._window_tokens

    def send(self, update: JsonObject) -> None:
        self._wire.notify("session/update", {"sessionId": self.talk.session_id, "update": update})

    # --- prompts -----------------------------------------------------------------------------------------------------

    async def prompt(self, blocks: Sequence[Any]) -> JsonObject:
        content, text = message_of(blocks)
        cancels = self._cancels
        async with self._prompting:  # one after the other
            if not self.talk.remote:
                route = await self.talk.route()
                self._window_tokens = self.talk.app.services.model_lists.window(route) or models.window_of(route)
            if self._cancels == cancels:
                self.screen.problems.clear()
                self.screen.begin()
                if text.startswith("/") and text[1:].partition(" ")[0].strip() in self._commands():
                    await self._command(text)
                else:
                    self.chat.queue(content, text)
                await self.chat.idle()
                await self._tell_title()
            if self._cancels != cancels:
                return {"stopReason": "cancelled"}
            return self._outcome()

    async def _command(self, text: str) -> None:
        before = await self.config_options()
        try:
            await slash.run(self.chat, text.strip())
        except HermesError as error:
            self.send(message(str(error)))
        if (after := await self.config_options()) != before:
            self.send({"sessionUpdate": "config_option_update", "configOptions": after})
            self.send({"sessionUpdate": "current_mode_update", "currentModeId": self.mode})

    def _outcome(self) -> JsonObject:
        result, failure = self.screen.result, self.screen.failure
        code = str(failure.get("error_code") or "")
        if code in _STOP_REASONS:
            return {"stopReason": _STOP_REASONS[code]}
        if failure or self.screen.problems:
            number = AUTH_REQUIRED if code == "provider_auth_failed" else INTERNAL_ERROR
            raise RequestError(number, failure.get("error") or "\n".join(self.screen.problems), {"code": code or None})
        if result is None:
            return {"stopReason": "end_turn"}
        usage = {"totalTokens": result["total_tokens"], "inputTokens": result["input_tokens"]}
        usage |= {"outputTokens": result["output_tokens"]}
        return {"stopReason": "cancelled" if result["interrupted"] else "end_turn", "usage": usage}

    async def cancel(self) -> None:
        """Stop the turn, and whatever prompt waits behind it."""
        self._cancels += 1
        self.chat.waiting.clear()
        try:
            while self.chat.busy:
                if await self.talk.control("interrupt"):
                    return
                await asyncio.sleep(_CANCEL_AGAIN_S)  # a turn that is only about to begin does not take it yet
        except ServerLost:
            await self.chat.stop()

    async def _tell_title(self) -> None:
        title = (await self.talk.session()).get("title")
        if title != self._title:
            self._title = title
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self.send({"sessionUpdate": "session_info_update", "title": title, "updatedAt": now})

    async def replay(self) -> None:
        for update in self.updates.replay(await self.talk.sessions.get_messages(self.talk.session_id)):
            self.send(update)
        self._title = (await self.talk.session()).get("title")

    async def close(self) -> None:
        for task in self._questions.values():
            task.cancel()
        await self.chat.close()
        await self.talk.close(aloud=True)
        self.talk.app.services.mcp.take_away(self.talk.session_id)
        outside = self.talk.app.services.outside
        outside.editors.pop(self.talk.session_id, None)
        outside.terminals.pop(self.talk.session_id, None)

    # --- questions to the user ---------------------------------------------------------------------------------------

    def _hear(self, event: JsonObject) -> None:
        kind = event["event"]
        if kind == "approval.request":
            self._ask(event["approval_id"], self._approve(event))
        elif kind == "clarify.request":
            self._ask(event["request_id"], self._clarify(event))
        elif kind in ("approval.responded", "clarify.responded"):
            question = event.get("approval_id") or event.get("request_id")
            if (task := self._questions.pop(str(question), None)) is not None:
                task.cancel()

    def _ask(self, question_id: str, work: Any) -> None:
        self._questions[question_id] = asyncio.ensure_future(work)

    async def _approve(self, event: JsonObject) -> None:
        options = [{"optionId": one, "name": _CHOICES[one][0], "kind": _CHOICES[one][1]} for one in event["choices"]]
        choice = await self._select(approval_call(event), options)
        await self._answer("approve", id=event["approval_id"], choice=choice if choice in event["choices"] else "deny")

    async def _clarify(self, event: JsonObject) -> None:
        """A form where the editor has forms; else a question with buttons, as for an approval."""
        offered = event["choices"] or []
        answer: str | None = None
        if (self._client.get("elicitation") or {}).get("form") is not None:
            answer = await self._fill_form(event, offered)
        elif offered:
            options = [{"optionId": str(at), "name": one, "kind": "allow_once"} for at, one in enumerate(offered)]
            options.append({"optionId": "", "name": "None of these", "kind": "reject_once"})
            call = {"toolCallId": event["tool_call_id"], "title": event["question"], "kind": "other"}
            chosen = await self._select(call, options)
            answer = offered[int(chosen)] if chosen.isdecimal() and int(chosen) < len(offered) else None
        await self._answer("answer", id=event["request_id"], answer=answer or _NO_ANSWER)

    async def _fill_form(self, event: JsonObject, offered: Sequence[str]) -> str | None:
        choices = {"oneOf": [{"const": one, "title": one} for one in offered]} if offered else {}
        schema = {"type": "object", "properties": {"answer": {"type": "string", "title": "Answer", **choices}}}
        params = {"sessionId": self.talk.session_id, "toolCallId": event["tool_call_id"], "mode": "form"}
        params |= {"message": event["question"], "requestedSchema": {**schema, "required": ["answer"]}}
        try:
            filled = await self._connection.send_request("elicitation/create", params)
        except (RequestError, OSError):
            return None
        content = (filled or {}).get("content") or {} if isinstance(filled, dict) else {}
        return str(content["answer"]) if isinstance(content, dict) and content.get("answer") else None

    async def _select(self, call: JsonObject, options: list[JsonObject]) -> str:
        """The option that the user selects; empty where none is."""
        params = {"sessionId": self.talk.session_id, "toolCall": call, "options": options}
        try:
            answer = await self._connection.send_request("session/request_permission", params)
        except (RequestError, OSError):
            return ""
        outcome = answer.get("outcome") if isinstance(answer, dict) else None
        selected = isinstance(outcome, dict) and outcome.get("outcome") == "selected"
        return str(outcome.get("optionId", "")) if selected and outcome else ""

    async def _answer(self, kind: str, **data: str) -> None:
        try:
            await self.talk.control(kind, **data)
        except HermesError as error:
            self.screen.note(str(error))

    # --- modes, models, commands -------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        return "off" if self.talk.yolo else self.talk.approvals or self.talk.settings.approvals.mode

    def modes(self) -> JsonObject | None:
        """A server that is not of this home takes no mode: it has its own."""
        if self.talk.remote:
            return None
        named = [{"id": mode, "name": name, "description": about} for mode, (name, about) in _MODES.items()]
        return {"currentModeId": self.mode, "availableModes": named}

    def set_mode(self, mode: str) -> None:
        if mode not in _MODES or self.talk.remote:
            raise invalid("modeId", f"is {mode!r}, and no mode of this session")
        usual = self.talk.settings.approvals.mode
        self.talk.yolo, self.talk.approvals = mode == "off", None if mode == usual else mode

    async def config_options(self) -> list[JsonObject]:
        options: list[JsonObject] = []
        if (modes := self.modes()) is not None:
            named = [(one["id"], one["name"], one["description"]) for one in modes["availableModes"]]
            options.append(_select_option("mode", "Approvals", "mode", self.mode, named))
        names, current = await self._models()
        options.append(_select_option("model", "Model", "model", current, [(name, name, "") for name in names]))
        efforts = [(effort, effort, "") for effort in (_DEFAULT, *EFFORTS)]
        options.append(_select_option("effort", "Reasoning", "thought_level", self.talk.effort or _DEFAULT, efforts))
        return options

    async def _models(self) -> tuple[list[str], str]:
        """The models that can be chosen, and the one that the next turn asks."""
        talk = self.talk
        if talk.remote and talk.server is not None:
            listed = [str(one["id"]) for one in (await talk.server.call("GET", "/v1/models"))["data"]]
            current = talk.model or (await talk.session()).get("model") or next(iter(listed), "")
            return list(dict.fromkeys([current, *listed])), current
        routes = [await talk.route(), models.primary(talk.settings, RouteChoice())]
        current, usual = (f"{route.provider}/{route.model}" for route in routes)
        lists = await talk.blocking(partial(cached_lists, talk.home))
        cached = [f"{one.provider}/{name}" for one in routes for name in lists.get(one.base_url, {}).get("models", [])]
        return list(dict.fromkeys([current, usual, *models.listed(talk.settings), *cached])), current

    async def set_option(self, name: str, value: object) -> None:
        offered = {one["id"]: [choice["value"] for choice in one["options"]] for one in await self.config_options()}
        if name not in offered:
            raise invalid("configId", f"is {name!r}, and no option of this session")
        if value not in offered[name]:
            raise invalid("value", f"is none of the values of {name}")
        if name == "mode":
            self.set_mode(str(value))
        elif name == "effort":
            self.talk.effort = None if value == _DEFAULT else str(value)
        else:
            await self._set_model(str(value))

    async def _set_model(self, value: str) -> None:
        talk = self.talk
        provider, model = None, value
        if not talk.remote:
            provider, _, model = value.partition("/")
            # The provider of the settings need not have a name of its own.
            provider = None if provider == models.primary(talk.settings, RouteChoice()).provider else provider
            models.primary(talk.settings, RouteChoice(model=model, provider=provider))
        talk.model, talk.provider = model, provider
        if talk.saved and await talk.session():
            await talk.sessions.update_session(talk.session_id, model=model)

    def _commands(self) -> dict[str, str]:
        known = slash.names(self.chat)
        return {name: about for name, about in known.items() if name not in COMMANDS or self._fits(name)}

    def _fits(self, name: str) -> bool:
        return name in _COMMANDS and not (self.talk.remote and "shared" in COMMANDS[name].needs)

    def tell_commands(self) -> None:
        self.send({"sessionUpdate": "available_commands_update", "availableCommands": list(self._described())})

    def _described(self) -> Iterator[JsonObject]:
        for name, about in self._commands().items():
            declared = COMMANDS.get(name)
            hint = declared.arguments if declared is not None else "what to do"
            yield {"name": name, "description": about} | ({"input": {"hint": hint}} if hint else {})


def _select_option(
    name: str, title: str, category: str, current: str, values: Sequence[tuple[str, str, str]]
) -> JsonObject:
    options = [
        {"value": value, "name": label} | ({"description": about} if about else {}) for value, label, about in values
    ]
    option = {"id": name, "name": title, "category": category, "type": "select", "currentValue": current}
    return {**option, "options": options}
