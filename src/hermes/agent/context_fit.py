"""Keeps a conversation within the model's context window: when to compact, and doing it."""

from __future__ import annotations

import json
from contextlib import suppress

import msgspec

from hermes.agent import compress
from hermes.agent.auxiliary import Auxiliary
from hermes.agent.turn import Turn
from hermes.agent.turn_start import set_system_prompt
from hermes.core import message_marks
from hermes.core.failures import Failure, explain
from hermes.core.json_types import JsonObject, Message
from hermes.core.limits import BYTES_PER_TOKEN, MESSAGES_AT_ONCE_MAX
from hermes.runs.commits import Commit
from hermes.runs.control import Stopped
from hermes.store.base import Row, StoreError
from hermes.store.rows import row_of_message
from hermes.tools.framework.round import last_answer

# The reason of a compaction that the user asked for, and how much of the window the kept end may then take.
ASKED = "asked"
_ASKED_SHARE = 0.05


async def fit(turn: Turn, reason: str) -> Failure | None:
    """Compact if the prompt has passed the threshold; returns a failure if it can never fit."""
    room = budget(turn)
    if len(turn.messages) > MESSAGES_AT_ONCE_MAX:
        await turn.scan(turn.prompt_tokens)  # which is known from then on
    if turn.prompt_tokens() <= room.limit:
        return None
    if not (turn.live.spec.compress and turn.settings.compression.enabled):
        return _overflow(turn, "It may not be compacted.") if turn.prompt_tokens() > room.total else None
    if reason == "start" and await _reuse_compaction(turn) and turn.prompt_tokens() <= room.limit:
        return None
    await compact(turn, reason)
    last = (await turn.scan(lambda: compress.plan(turn.messages, room))).tail[:1]
    if turn.fixed_tokens + compress.size_of(last) > room.total:
        return _overflow(turn, "One message is larger than the model's window.")
    return None


def _overflow(turn: Turn, message: str) -> Failure:
    provider = turn.route.provider
    return explain("context_overflow", provider, message=message, has_text=False)


def budget(turn: Turn) -> compress.Budget:
    compression = turn.settings.compression
    return compress.Budget(
        turn.window,
        turn.route.max_output_tokens or turn.capabilities.max_output,
        compression.threshold,
        compression.target_ratio,
        compression.protect_first_n,
    )


async def compact(turn: Turn, reason: str, topic: str = "") -> bool:
    """Shorten the middle of the conversation, keeping most of what is about a topic. False: nothing is left to
    shorten."""
    room, before = budget(turn), turn.prompt_tokens()
    if reason == ASKED:  # there may be space; everything except the last turns is compacted
        room = msgspec.structs.replace(room, threshold=_ASKED_SHARE, target_ratio=_ASKED_SHARE)
    plan: compress.Plan = await turn.scan(lambda: compress.plan(turn.messages, room))
    if not plan.middle and reason == "context_overflow":
        plan = await turn.scan(lambda: compress.plan(turn.messages, room, protect_first=0))
    if not plan.middle:
        return False
    shorter, method, usage = await _shorten(turn, plan, room, topic)
    if turn.live.controls.stop.reason is not None:
        raise Stopped
    places: list[int | None] = await turn.scan(lambda: _source_indexes(turn.messages, shorter))
    archived = len(turn.messages) - len(places) + places.count(None)
    if method == "prune":  # shortened messages stay in place
        places = list(range(len(shorter)))
    turn.messages, turn.counted_tokens = shorter, 0
    after = await turn.scan(turn.prompt_tokens)
    live = turn.live
    await live.log.put_on_record()
    await set_system_prompt(turn, await live.store.sessions.get_session(live.transcript_id), rebuild=True)
    data = {"reason": reason, "method": method, "tokens_before": before, "tokens_after": after}
    events = [live.log.event("context.compacted", **data, messages_archived=archived)]
    if usage:
        events.insert(0, live.log.event("usage", **usage))
    # A history that the client sent is the client's; only stored rows are replaced.
    replaces = turn.stored and not live.spec.verbatim
    rows: list[Row] = []
    if replaces:
        rows = await turn.scan(lambda: [row_of_message(live.transcript_id, message) for message in shorter])
        index = next((index for index, message in enumerate(shorter) if message is turn.user_message), None)
        turn.user_row = turn.user_row if index is None else rows[index]
    await live.log.commit(Commit(events, rows, replaces=places if replaces else ()))
    with suppress(StoreError):  # the next turn can do it again
        await _store_compaction(turn, plan, shorter)
    return turn.prompt_tokens() < before


def _source_indexes(messages: list[Message], shorter: list[Message]) -> list[int | None]:
    indexes = {id(message): index for index, message in enumerate(messages)}
    return [indexes.get(id(message)) for message in shorter]


async def _reuse_compaction(turn: Turn) -> bool:
    """Reuse the compaction of this history by an earlier turn. False: there is none."""
    if turn.incoming is None:
        return False
    digests, compaction = await turn.scan(turn.incoming.digests), None
    with suppress(StoreError):
        compaction = await turn.live.store.sessions.find_compaction(turn.live.spec.owner, digests)
    if compaction is None:
        return False
    digest, first_kept, instead = compaction
    turn.messages = [*turn.messages[:first_kept], *instead, *turn.messages[digests.index(digest) + 1 :]]
    return True


async def _store_compaction(turn: Turn, plan: compress.Plan, shorter: list[Message]) -> None:
    """Store the compaction of a client's history for the next turn that sends it."""
    history = turn.incoming.messages if turn.incoming is not None else []
    end = next((index for index, message in enumerate(history) if plan.tail and message is plan.tail[0]), 0)
    if turn.incoming is None or not end:
        return
    first = next((index for index, (a, b) in enumerate(zip(shorter, history, strict=False)) if a is not b), 0)
    instead = shorter[first : len(shorter) - len(plan.tail)]
    live = turn.live
    digests = await turn.services.files.call_for(len(history), turn.incoming.digests)
    await live.store.sessions.put_compaction(live.transcript_id, live.spec.owner, digests[end - 1], first, instead)


async def _shorten(
    turn: Turn, plan: compress.Plan, room: compress.Budget, topic: str
) -> tuple[list[Message], str, JsonObject | None]:
    pruned, todo, foreign = await turn.scan(lambda: _prune_results(turn, plan, room))
    if pruned is not None:
        return pruned, "prune", None
    todos = json.dumps(todo["todos"], ensure_ascii=False) if todo else None
    if (model_summary := await Auxiliary(turn).summary(plan.middle, room, topic)) is not None:
        text, usage = model_summary
        return compress.joined(plan, text, todos, foreign=foreign), "summary", usage
    summary = await turn.scan(lambda: compress.extract(plan.middle, int(room.tail * BYTES_PER_TOKEN / 2)))
    return compress.joined(plan, summary, todos, foreign=foreign), "extract", None


def _prune_results(
    turn: Turn, plan: compress.Plan, room: compress.Budget
) -> tuple[list[Message] | None, JsonObject | None, bool]:
    """The conversation without old tool results, if that is enough; the last todo list; and whether the part to be
    summarized has text from outside."""
    pruned = [*plan.head, *compress.prune(plan.middle), *plan.tail]
    if pruned != turn.messages and turn.fixed_tokens + compress.size_of(pruned) <= room.goal:
        return pruned, None, False
    return None, last_answer(turn.messages, "todo", "todos"), any(map(message_marks.is_foreign, plan.middle))
