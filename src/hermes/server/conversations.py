"""Conversations as objects: made with first items, added to by hand and by responses, listed, forgotten."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from hermes.server.errors import ApiError, answer
from hermes.server.models import ConversationItems, ConversationRequest, ConversationUpdate
from hermes.server.prepared_response import reader
from hermes.server.request_bodies import read
from hermes.server.responses import page

if TYPE_CHECKING:
    from hermes.server.adapter import APIServerAdapter

Json = dict[str, Any]


async def create(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations"""
    body = await read(adapter, request, ConversationRequest)
    owner, store = adapter.owner_of(request), adapter.stored_responses
    given = await reader(adapter, owner).read(body.model.items or [], "items")
    made = {
        "id": f"conv_{secrets.token_hex(16)}",
        "created_at": int(time.time()),
        "metadata": body.model.metadata or {},
    }
    await store.put_conversation_object(made["id"], owner, made["metadata"], made["created_at"])
    await store.add_conversation_items(made["id"], owner, given.items)
    return answer(_shown(made), 200, body.headers())


async def get(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/{conversation_id}"""
    return answer(_shown(await _found(adapter, request)))


async def update(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations/{conversation_id}"""
    found = await _found(adapter, request)
    body = await read(adapter, request, ConversationUpdate)
    found["metadata"] = body.model.metadata
    await adapter.stored_responses.put_conversation_object(
        found["id"], found["owner"], found["metadata"], found["created_at"]
    )
    return answer(_shown(found), 200, body.headers())


async def delete(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """DELETE /v1/conversations/{conversation_id}"""
    found = await _found(adapter, request)
    await adapter.stored_responses.delete_conversation_object(found["id"], found["owner"])
    return answer({"id": found["id"], "object": "conversation.deleted", "deleted": True})


async def items(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/{conversation_id}/items"""
    found = await _found(adapter, request)
    return answer(page(await adapter.stored_responses.conversation_items(found["id"], found["owner"]), request))


async def add_items(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """POST /v1/conversations/{conversation_id}/items"""
    found = await _found(adapter, request)
    body = await read(adapter, request, ConversationItems)
    given = await reader(adapter, found["owner"]).read(body.model.items, "items")
    kept = await adapter.stored_responses.add_conversation_items(found["id"], found["owner"], given.items)
    ends = {"first_id": kept[0]["id"], "last_id": kept[-1]["id"]} if kept else {"first_id": None, "last_id": None}
    return answer({"object": "list", "data": kept, **ends, "has_more": False}, 200, body.headers())


async def get_item(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """GET /v1/conversations/{conversation_id}/items/{item_id}"""
    found, item_id = await _found(adapter, request), request.match_info["item_id"]
    listed = await adapter.stored_responses.conversation_items(found["id"], found["owner"])
    item = next((item for item in listed if item["id"] == item_id), None)
    if item is None:
        raise _no_item(item_id)
    return answer(item)


async def delete_item(adapter: APIServerAdapter, request: web.Request) -> web.StreamResponse:
    """DELETE /v1/conversations/{conversation_id}/items/{item_id}"""
    found, item_id = await _found(adapter, request), request.match_info["item_id"]
    if not await adapter.stored_responses.delete_conversation_item(found["id"], found["owner"], item_id):
        raise _no_item(item_id)
    return answer(_shown(found))


def _no_item(item_id: str) -> ApiError:
    return ApiError(404, f"There is no item {item_id!r} in this conversation.", "item_not_found")


async def _found(adapter: APIServerAdapter, request: web.Request) -> Json:
    conversation_id, owner = request.match_info["conversation_id"], adapter.visible_owner(request)
    found: Json | None = await adapter.stored_responses.get_conversation_object(conversation_id, owner)
    if found is None:
        raise ApiError(404, f"There is no conversation {conversation_id!r}.", "conversation_not_found")
    return found


def _shown(found: Json) -> Json:
    told = {"id": found["id"], "object": "conversation"}
    return {**told, "created_at": found["created_at"], "metadata": found["metadata"]}
