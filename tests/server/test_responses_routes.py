"""What there is around a response: its input, compaction, conversations, and how long it is kept."""

from __future__ import annotations

from typing import Any

import pytest

from support.model_server import Reply

from .clients import Json, read_error, read_json, sent_messages
from .conftest import Api, Start

PATH, TALKS = "/v1/responses", "/v1/conversations"


def message(role: str, text: str) -> Json:
    return {"type": "message", "role": role, "content": text}


async def create(api: Api, input: Any = "hi", **fields: Any) -> Json:
    async with api.post(PATH, {"input": input, **fields}) as response:
        return await read_json(response)


async def look(api: Api, path: str) -> Json:
    async with api.get(path) as response:
        return await read_json(response)


# ---- the input of a response


async def test_input_items_are_listed_with_ids(api: Api) -> None:
    api.model.script = [Reply(text="a", continues=False)] * 2
    first = await create(
        api, [message("user", f"m{n}") if n % 2 == 0 else message("assistant", f"m{n}") for n in range(5)]
    )
    second = await create(api, "only this", previous_response_id=first["id"])
    path = f"{PATH}/{first['id']}/input_items"
    whole = await look(api, f"{path}?order=asc")
    assert set(whole) == {"object", "data", "first_id", "last_id", "has_more"}
    assert (whole["object"], whole["has_more"]) == ("list", False)
    ids = [item["id"] for item in whole["data"]]
    assert len(set(ids)) == 5
    assert (whole["first_id"], whole["last_id"]) == (ids[0], ids[-1])
    assert [item["role"] for item in whole["data"]] == ["user", "assistant", "user", "assistant", "user"]
    assert [item["id"] for item in (await look(api, path))["data"]] == ids[::-1]
    page = await look(api, f"{path}?order=asc&limit=2&after={ids[1]}")
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids[2:4], True)
    last = await look(api, f"{path}?order=asc&limit=2&after={ids[3]}")
    assert ([item["id"] for item in last["data"]], last["has_more"]) == (ids[4:], False)
    (item,) = (await look(api, f"{PATH}/{second['id']}/input_items"))["data"]
    assert (item["type"], item["role"]) == ("message", "user")
    assert item["content"] == [{"type": "input_text", "text": "only this"}]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=nobody"])
async def test_invalid_page_parameters_are_rejected(api: Api, query: str) -> None:
    api.model.script = [Reply(text="a")]
    created = await create(api)
    async with api.get(f"{PATH}/{created['id']}/input_items?{query}") as response:
        error = (await read_json(response, 400))["error"]
        assert error["param"] == query.split("=")[0]


# ---- compaction


async def test_compacted_conversation_replaces_history(api: Api) -> None:
    api.model.script = [Reply(text="The code word is slate."), Reply(text="Slate.")]
    items = [message("user", "The code word is slate."), message("assistant", "OK."), message("user", "Remember it.")]
    async with api.post(
        f"{PATH}/compact", {"model": "m", "input": items, "instructions": "Keep code words."}
    ) as response:
        body = await read_json(response)
    assert set(body) >= {"id", "object", "created_at", "output", "usage"}
    assert body["object"] == "response.compaction"
    assert body["id"].startswith("cmp_")
    item = body["output"][-1]
    assert item["type"] == "compaction"
    assert item["id"].startswith("cmp_")
    assert "slate" not in item["encrypted_content"].lower()
    assert body["usage"]["output_tokens"] > 0
    await create(api, [*body["output"], message("user", "What was it?")])
    messages = sent_messages(api.model.requests[-1])
    assert messages[-1] == ("user", "What was it?")
    assert "slate" in str(api.model.requests[-1].body).lower()
    assert "Remember it." not in str(api.model.requests[-1].body)


async def test_stored_response_can_be_compacted(api: Api) -> None:
    api.model.script = [Reply(text="OK."), Reply(text="Summary: the word is slate."), Reply(text="Slate.")]
    first = await create(api, "The code word is slate.")
    async with api.post(f"{PATH}/compact", {"model": "m", "previous_response_id": first["id"]}) as response:
        body = await read_json(response)
    await create(api, [*body["output"], message("user", "What was it?")])
    assert "Summary: the word is slate." in str(api.model.requests[-1].body)


async def test_tampered_compaction_item_is_rejected(api: Api) -> None:
    api.model.script = [Reply(text="Summary.")]
    async with api.post(f"{PATH}/compact", {"model": "m", "input": "remember"}) as response:
        item = (await read_json(response))["output"][-1]
    sealed = item["encrypted_content"]
    for broken in (sealed[:-4] + "AAAA", sealed[4:], "x", sealed[: len(sealed) // 2]):
        async with api.post(PATH, {"input": [{**item, "encrypted_content": broken}, "x"]}) as response:
            await read_error(response, 400, "invalid_compaction_item")


async def test_compaction_of_unknown_response_is_404(api: Api) -> None:
    async with api.post(f"{PATH}/compact", {"model": "m", "previous_response_id": "resp_0"}) as response:
        await read_error(response, 404, "previous_response_not_found", "previous_response_id")


async def test_failed_compaction_is_reported(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.agent.decisions.RETRY_WAIT_S_MAX", 0.01)
    api.model.handler = lambda _: Reply(status=401, error="no")
    async with api.post(f"{PATH}/compact", {"model": "m", "input": "remember"}) as response:
        await read_error(response, 502, "provider_auth_failed")


# ---- conversations


async def test_conversation_lifecycle(api: Api) -> None:
    async with api.post(TALKS, {"metadata": {"room": "hall"}}) as response:
        body = await read_json(response)
    assert set(body) == {"id", "object", "created_at", "metadata"}
    assert (body["object"], body["metadata"]) == ("conversation", {"room": "hall"})
    assert body["id"].startswith("conv_")
    path = f"{TALKS}/{body['id']}"
    assert await look(api, path) == body
    async with api.post(path, {"metadata": {"room": "garden"}}) as response:
        assert (await read_json(response))["metadata"] == {"room": "garden"}
    assert (await look(api, path))["metadata"] == {"room": "garden"}
    async with api.delete(path) as response:
        assert await read_json(response) == {"id": body["id"], "object": "conversation.deleted", "deleted": True}
    async with api.get(path) as response:
        await read_error(response, 404, "conversation_not_found")
    async with api.post(PATH, {"input": "x", "conversation": body["id"]}) as response:
        await read_error(response, 404, "conversation_not_found")


async def test_responses_continue_in_conversation(api: Api) -> None:
    api.model.script = [Reply(text=f"answer {n}.", continues=False) for n in range(4)]
    async with api.post(
        TALKS, {"items": [message("user", "I am Ann."), message("assistant", "Hello Ann.")]}
    ) as response:
        talk = (await read_json(response))["id"]
    first = await create(api, "one", conversation=talk)
    assert first["conversation"] == {"id": talk}
    assert [text for _, text in sent_messages(api.model.requests[0])] == ["I am Ann.", "Hello Ann.", "one"]
    second = await create(api, "two", conversation={"id": talk})
    assert [text for _, text in sent_messages(api.model.requests[1])] == [
        "I am Ann.",
        "Hello Ann.",
        "one",
        "answer 0.",
        "two",
    ]
    items = await look(api, f"{TALKS}/{talk}/items?order=asc")
    assert [item["role"] for item in items["data"]] == ["user", "assistant"] * 3
    async with api.delete(f"{PATH}/{second['id']}") as response:
        await read_json(response)
    await create(api, "again", conversation=talk)
    assert [text for _, text in sent_messages(api.model.requests[2])] == ["I am Ann.", "Hello Ann.", "again"]


async def test_items_are_added_to_conversation(api: Api) -> None:
    api.model.script = [Reply(text="Ann.")]
    async with api.post(TALKS, {}) as response:
        talk = (await read_json(response))["id"]
    async with api.post(f"{TALKS}/{talk}/items", {"items": [message("user", "I am Ann.")]}) as response:
        added = await read_json(response)
    assert added["object"] == "list"
    assert added["data"][0]["id"]
    page = await look(api, f"{TALKS}/{talk}/items")
    assert set(page) == {"object", "data", "first_id", "last_id", "has_more"}
    assert [item["id"] for item in page["data"]] == [item["id"] for item in added["data"]]
    await create(api, "who am I?", conversation=talk)
    assert sent_messages(api.model.requests[0])[0] == ("user", "I am Ann.")


async def begin(api: Api, *items: Json) -> str:
    """A conversation with these items; the path of its items."""
    async with api.post(TALKS, {"items": list(items)}) as response:
        return f"{TALKS}/{(await read_json(response))['id']}/items"


async def test_conversation_item_read_and_delete(api: Api) -> None:
    path = await begin(api, message("user", "I am Ann."), message("assistant", "Hello Ann."))
    first, second = (await look(api, f"{path}?order=asc"))["data"]
    assert await look(api, f"{path}/{first['id']}") == first
    async with api.delete(f"{path}/{second['id']}") as response:
        assert await read_json(response) == await look(api, path.removesuffix("/items"))
    assert (await look(api, path))["data"] == [first]
    other = await begin(api)
    for wrong in (f"{path}/{second['id']}", f"{path}/nobody", f"{other}/{first['id']}"):
        for method in (api.get, api.delete):
            async with method(wrong) as response:
                await read_error(response, 404, "item_not_found")


async def test_response_continues_from_remaining_items(api: Api) -> None:
    api.model.script = [Reply(text=f"answer {n}.", continues=False) for n in range(5)]
    path = await begin(api, message("user", "I am Ann."))
    talk = path.split("/")[3]
    await create(api, "one", conversation=talk)
    await create(api, "two", conversation=talk)
    for item in (await look(api, f"{path}?limit=2"))["data"]:
        async with api.delete(f"{path}/{item['id']}") as response:
            await read_json(response)
    await create(api, "three", conversation=talk)
    assert [text for _, text in sent_messages(api.model.requests[2])] == ["I am Ann.", "one", "answer 0.", "three"]
    await create(api, "four", conversation=talk)
    assert [text for _, text in sent_messages(api.model.requests[3])][-3:] == ["three", "answer 2.", "four"]
    assert len((await look(api, path))["data"]) == 7


async def test_repeated_items_get_own_ids(api: Api) -> None:
    """With duplicate item ids, pagination by id would never end."""
    api.model.script = [Reply(text="Hi.")]
    path = await begin(api, {**message("user", "one"), "id": "msg_1"}, {**message("user", "two"), "id": "msg_1"})
    async with api.post(path, {"items": [{**message("user", "three"), "id": "msg_1"}]}) as response:
        (added,) = (await read_json(response))["data"]
    assert added["id"] not in ("", "msg_1")
    await create(api, [{**message("user", "four"), "id": "msg_1"}], conversation=path.split("/")[3])
    items = (await look(api, f"{path}?order=asc"))["data"]
    assert [item["content"][0]["text"] for item in items] == ["one", "two", "three", "four", "Hi."]
    assert len({item["id"] for item in items}) == 5 and items[2]["id"] == added["id"]


PICTURE = "data:image/png;base64,iVBORw0KGgo="
CALL = {"type": "function_call", "call_id": "c1", "name": "photo", "arguments": "{}"}


@pytest.mark.parametrize(
    ("input_item", "listed"),
    [
        (CALL, {**CALL, "status": "completed"}),
        ({**CALL, "status": "incomplete"}, {**CALL, "status": "incomplete"}),
        (
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
            {"type": "function_call_output", "call_id": "c1", "output": "done", "status": "completed"},
        ),
        (
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [
                    {"type": "input_image", "image_url": PICTURE, "detail": None},
                    {"type": "input_text", "text": "A dot."},
                ],
            },
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [
                    {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
                    {"type": "input_text", "text": "A dot."},
                ],
                "status": "completed",
            },
        ),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": PICTURE, "detail": "low"}]},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_image", "image_url": PICTURE, "detail": "low"}],
                "status": "completed",
            },
        ),
    ],
)
async def test_listed_items_have_fields_of_official_client(api: Api, input_item: Json, listed: Json) -> None:
    """The types of the official package need a status, and a detail of images."""
    (item,) = (await look(api, await begin(api, input_item)))["data"]
    assert {**item, "id": ""} == {**listed, "id": ""}


# ---- how long a response is kept


async def test_response_lru_eviction(start: Start) -> None:
    api = await start(*[Reply(text="a", continues=False)] * 4, responses={"max_stored": 3})
    ids = [(await create(api, f"q{n}", conversation=f"c{n}"))["id"] for n in range(3)]
    await look(api, f"{PATH}/{ids[0]}")
    await create(api, "one more")
    async with api.get(f"{PATH}/{ids[1]}") as response:
        await read_error(response, 404, "response_not_found")
    for remaining_id in (ids[0], ids[2]):
        await look(api, f"{PATH}/{remaining_id}")
    # A name that led to what is gone starts afresh.
    api.model.script = [Reply(text="b")]
    await create(api, "afresh", conversation="c1")
    assert sent_messages(api.model.requests[-1]) == [("user", "afresh")]


async def test_deleted_response_is_gone_for_chains(api: Api) -> None:
    api.model.script = [Reply(text="a")]
    created = await create(api)
    async with api.delete(f"{PATH}/{created['id']}") as response:
        assert await read_json(response) == {"id": created["id"], "object": "response", "deleted": True}
    async with api.delete(f"{PATH}/{created['id']}") as response:
        await read_error(response, 404, "response_not_found")
    async with api.post(PATH, {"input": "x", "previous_response_id": created["id"]}) as response:
        await read_error(response, 404, "previous_response_not_found")
