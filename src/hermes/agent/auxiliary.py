"""Small model calls beside the conversation: summaries, titles, descriptions. They never fail a run."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence

from hermes.agent import compress
from hermes.agent.assembler import Assembler
from hermes.agent.call import Caller
from hermes.agent.turn import Turn
from hermes.core.errors import ConfigError
from hermes.core.failures import classify
from hermes.core.json_types import JsonObject, Message
from hermes.core.limits import AUXILIARY_TRIES_MAX, BYTES_PER_TOKEN, SUMMARY_TOKENS_MAX, TITLE_CHARS_MAX
from hermes.core.text import text_of
from hermes.http_client.exchange import Timeouts
from hermes.providers import routes
from hermes.providers.base import Prompt, Route
from hermes.providers.registry import provider_for
from hermes.runs.control import Stop

log = logging.getLogger(__name__)

_NAMED_KINDS = ("cli", "session")
_FINAL_KINDS = {"auth", "billing", "forbidden", "model_not_found", "bad_request", "tls", "policy_blocked"}


class Auxiliary:
    """Uses a task's own route, or the main one."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self.spent: list[JsonObject] = []

    async def summary(
        self, messages: list[Message], budget: compress.Budget, topic: str = ""
    ) -> tuple[str, JsonObject] | None:
        room = int(budget.total * BYTES_PER_TOKEN * 0.8)
        limit = min(SUMMARY_TOKENS_MAX, max(256, budget.total // 4))
        text = await self._turn.scan(lambda: compress.transcript(messages, room))
        request: list[Message] = [{"role": "user", "content": text}]
        prompt = (
            f"{compress.SUMMARY_REQUEST} Keep most of what is about: {topic}" if topic else compress.SUMMARY_REQUEST
        )
        return await self.ask("compression", prompt, request, limit)

    async def title(self, question: str, answer: str) -> tuple[str, JsonObject] | None:
        system = "Give a title of at most six words to the conversation. Answer with the title only, without quotes."
        text = f"User: {question[:2000]}\n\nAssistant: {answer[:2000]}"
        return await self.ask("title_generation", system, [{"role": "user", "content": text}], 64)

    async def describe(self, image: Message) -> str:
        system = "Describe the image exactly and completely, for somebody who cannot see it. Copy all text in it."
        answer = await self.ask("vision", system, [{"role": "user", "content": [image]}], 1024)
        if answer is None:
            return "it could not be described"
        description, usage = answer
        self.spent.append(usage)
        return description

    async def ask(
        self, task: str, system: str, messages: list[Message], max_output: int
    ) -> tuple[str, JsonObject] | None:
        """The text of a task's model and its usage; None on failure."""
        turn = self._turn
        if not turn.settings.auxiliary[task].enabled:
            return None
        try:
            task_route = routes.auxiliary(turn.settings, task)
        except ConfigError as error:
            log.warning("auxiliary task %s has no route of its own: %s", task, error)
            task_route = None
        for route in [task_route, turn.route] if task_route is not None and task_route != turn.route else [turn.route]:
            if route.api_mode == "local":
                continue
            if (answer := await self._ask_route(task, route, system, messages, max_output)) is not None:
                return answer
        return None

    async def _ask_route(
        self, task: str, route: Route, system: str, messages: list[Message], max_output: int
    ) -> tuple[str, JsonObject] | None:
        turn = self._turn
        provider = provider_for(route.api_mode)
        seconds = turn.settings.auxiliary[task].timeout
        credential = next(iter(route.credentials), None)
        stop = turn.live.controls.stop if not turn.live.log.state.ended else Stop()
        caller = Caller(stop, lambda _: None, lambda _: None)
        dropped = turn.services.route_health.dropped(route)
        request = Prompt([system], messages, max_output=max_output, stream=turn.stream, dropped=dropped)
        for tried in range(AUXILIARY_TRIES_MAX):
            timeouts = Timeouts(seconds, seconds)
            wire = provider.request(route, credential, request)
            attempt = await caller.ask(
                turn.services.http, provider, wire, timeouts, Assembler(), streaming=request.stream
            )
            message = attempt.assembler.message()
            if attempt.facts is None and message.text.strip():
                usage = {**turn.usage_event(message.usage, message.text, task)}
                return message.text.strip(), usage | {"model": route.model, "provider": route.provider}
            kind = classify(attempt.facts) if attempt.facts else "empty"
            log.info("auxiliary task %s: %s", task, kind)
            if kind in _FINAL_KINDS or kind == "interrupted" or tried + 1 == AUXILIARY_TRIES_MAX:
                return None
            if kind == "stream_unsupported":
                request.stream = False
            await asyncio.sleep(0.2 * (tried + 1))
        return None


def names_session(turn: Turn) -> bool:
    """Whether a model titles the turn's session: only if nobody else pays for the call or waits for a slow one."""
    if turn.live.spec.kind not in _NAMED_KINDS or turn.routes[0].api_mode == "local":
        return False
    return turn.settings.auxiliary.title_generation.enabled


def first_words(messages: Sequence[Message]) -> str:
    for message in messages:
        if message["role"] == "user" and (text := text_of(message["content"])).strip():
            return text
    return ""


def plain_title(text: str) -> str:
    """The beginning of the conversation as a title."""
    line = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]", " ", text).split())
    return line if len(line) <= TITLE_CHARS_MAX else f"{line[: TITLE_CHARS_MAX - 1].rstrip()}…"
