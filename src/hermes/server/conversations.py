"""Conversation objects: create with items, add, list and delete items."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Literal

from aiohttp import web
from msgspec import Struct

from hermes.core.json_types import JsonObject
from hermes.server.errors import ApiError, answer
from hermes.server.keys import caller_of
from hermes.server.models import ConversationItems, ConversationRequest, ConversationUpdate
from hermes.server.prepared_response import reader
from hermes.server.query_params import ItemQuery
from hermes.server.responses import EXAMPLE_ITEM, item_list, page
from hermes.server.routes import route
from hermes.server.shapes import ItemList

if TYPE_CHECKING:
    from hermes.server.context import ServerContext

_CONVERSATION = "/v1/conversations/{conversation_id}"


class Conversation(Struct, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: float
    metadata: dict[str, str]


@route(
    "POST /v1/conversations",
    "conversations",
    "Create a conversation",
    scope="chat",
    example={"items": [EXAMPLE_ITEM], "metadata": {"topic": "files"}},
    faults=(404,),
    link=("conversation_id", "/id"),
    features="conversations_api",
    idempotent=True,
)
async def create_conversation(context: ServerContext, request: web.Request, body: ConversationRequest) -> Conversation:
    owner, store = caller_of(request).owner, context.stored_responses
    given = await reader(context, owner).read(body.items or [], "items")
    conversation_id, created_at, metadata = f"conv_{secrets.token_hex(16)}", int(time.time()), body.metadata or {}
    await store.put_conversation_object(conversation_id, owner, metadata, created_at)
    await store.add_conversation_items(conversation_id, owner, given.items)
    return Conversation(id=conversation_id, created_at=created_at, metadata=metadata)


@route(f"GET {_CONVERSATION}", "conversation", "Get a conversation", scope="chat")
async def get_conversation(context: ServerContext, request: web.Request) -> Conversation:
    return _shown(await _stored(context, request))


@route(
    f"POST {_CONVERSATION}",
    "conversation_update",
    "Update a conversation",
    scope="chat",
    example={"metadata": {"topic": "letters"}},
)
async def update_conversation(context: ServerContext, request: web.Request, body: ConversationUpdate) -> Conversation:
    stored = await _stored(context, request)
    stored["metadata"] = body.metadata
    await context.stored_responses.put_conversation_object(
        stored["id"], stored["owner"], body.metadata, stored["created_at"]
    )
    return _shown(stored)


class ConversationDeleted(Struct, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


@route(f"DELETE {_CONVERSATION}", "conversation_delete", "Delete a conversation", scope="chat")
async def delete_conversation(context: ServerContext, request: web.Request) -> ConversationDeleted:
    stored = await _stored(context, request)
    await context.stored_responses.delete_conversation_object(stored["id"], stored["owner"])
    return ConversationDeleted(id=stored["id"])


@route(f"GET {_CONVERSATION}/items", "conversation_items", "List the items of a conversation", scope="chat")
async def conversation_items(context: ServerContext, request: web.Request, query: ItemQuery) -> ItemList:
    stored = await _stored(context, request)
    return page(await context.stored_responses.conversation_items(stored["id"], stored["owner"]), query)


@route(
    f"POST {_CONVERSATION}/items",
    "conversation_items_add",
    "Add items to a conversation",
    scope="chat",
    example={"items": [EXAMPLE_ITEM]},
)
async def add_conversation_items(context: ServerContext, request: web.Request, body: ConversationItems) -> ItemList:
    stored = await _stored(context, request)
    given = await reader(context, stored["owner"]).read(body.items, "items")
    items = await context.stored_responses.add_conversation_items(stored["id"], stored["owner"], given.items)
    return item_list(items, has_more=False)


class ConversationItem(Struct, kw_only=True):
    """An item; what else it has depends on its type."""

    id: str
    type: str


@route(
    f"GET {_CONVERSATION}/items/{{item_id}}",
    "conversation_item",
    "Get an item of a conversation",
    scope="chat",
    answers=ConversationItem,
)
async def get_conversation_item(context: ServerContext, request: web.Request) -> web.Response:
    stored, item_id = await _stored(context, request), request.match_info["item_id"]
    items = await context.stored_responses.conversation_items(stored["id"], stored["owner"])
    item = next((item for item in items if item["id"] == item_id), None)
    if item is None:
        raise _no_item(item_id)
    return answer(item)


@route(
    f"DELETE {_CONVERSATION}/items/{{item_id}}",
    "conversation_item_delete",
    "Delete an item of a conversation",
    scope="chat",
)
async def delete_conversation_item(context: ServerContext, request: web.Request) -> Conversation:
    stored, item_id = await _stored(context, request), request.match_info["item_id"]
    if not await context.stored_responses.delete_conversation_item(stored["id"], stored["owner"], item_id):
        raise _no_item(item_id)
    return _shown(stored)


def _no_item(item_id: str) -> ApiError:
    return ApiError(404, f"There is no item {item_id!r} in this conversation.", "item_not_found")


async def _stored(context: ServerContext, request: web.Request) -> JsonObject:
    conversation_id, owner = request.match_info["conversation_id"], caller_of(request).visible_owner
    stored: JsonObject | None = await context.stored_responses.get_conversation_object(conversation_id, owner)
    if stored is None:
        raise ApiError(404, f"There is no conversation {conversation_id!r}.", "conversation_not_found")
    return stored


def _shown(stored: JsonObject) -> Conversation:
    return Conversation(id=stored["id"], created_at=stored["created_at"], metadata=stored["metadata"])
