"""Memory and skills over HTTP: read, changed as a whole or not at all, and each owner's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.model_server import Reply

from .clients import Json, read_error, read_json, system_of, user
from .conftest import KEY, Api, Start
from .test_keys import ANNA, BEN, KEYS, bearer

MEMORY = "/api/memory"
SKILLS = "/v1/skills"


def text_of(name: str, steps: str = "Water first.") -> str:
    return f"---\nname: {name}\ndescription: About {name}.\n---\n\n{steps}\n"


async def memory_of(api: Api, key: str = KEY, **headers: str) -> Json:
    async with api.get(MEMORY, headers={**bearer(key), **headers}) as response:
        return await read_json(response)


async def changed(api: Api, target: str, *operations: Json, key: str = KEY) -> Json:
    async with api.patch(f"{MEMORY}/{target}", {"operations": list(operations)}, headers=bearer(key)) as response:
        return await read_json(response)


# ---- memory


async def test_memory_is_read_and_changed_and_reaches_the_model(api: Api) -> None:
    empty = await memory_of(api)
    assert empty["object"] == "hermes.memory" and empty["memory"]["entries"] == empty["user"]["entries"] == []
    assert empty["memory"]["limit"] > 0 and empty["memory"]["enabled"] is True
    await changed(api, "memory", {"action": "add", "content": "Tea at four."}, {"action": "add", "content": "Tea"})
    # The whole entry names itself, although it is part of another.
    told_entries = await changed(api, "memory", {"action": "replace", "old_text": "Tea", "content": "Cake at five."})
    assert told_entries["entries"] == ["Tea at four.", "Cake at five."]
    await changed(api, "user", {"action": "add", "content": "Likes cats."})
    memory = await memory_of(api)
    assert memory["memory"]["entries"] == ["Tea at four.", "Cake at five."]
    assert memory["user"]["entries"] == ["Likes cats."] and memory["user"]["chars"] == len("Likes cats.")
    api.model.script = [Reply(text="Yes.")]
    async with api.post("/v1/chat/completions", user("hi")) as response:
        await read_json(response)
    assert "Cake at five." in system_of(api.model.requests[-1]) and "Likes cats." in system_of(api.model.requests[-1])
    assert (await changed(api, "memory", {"action": "remove", "old_text": "Tea"}))["entries"] == ["Cake at five."]


@pytest.mark.parametrize(
    ("operations", "code", "param"),
    [
        ([{"action": "add", "content": ""}], "invalid_value", None),
        ([{"action": "add"}], "invalid_value", None),
        ([{"action": "add", "content": "x" * 50_000}], "memory_full", None),
        ([{"action": "add", "content": "a\n§\nb"}], "invalid_value", None),
        ([{"action": "add", "content": KEY}], "prompt_blocked", None),
        ([{"action": "remove", "old_text": "nowhere"}], "no_match", None),
        ([{"action": "remove"}], "invalid_value", None),
        ([{"action": "remove", "old_text": "e"}], "ambiguous_match", None),
        ([{"action": "shout", "content": "x"}], "invalid_value", "operations[0].action"),
        ([], "invalid_value", "operations"),
        (None, "missing_required_parameter", "operations"),
        ("x", "invalid_type", "operations"),
    ],
)
async def test_refused_change_of_memory_changes_nothing(
    api: Api, operations: object, code: str, param: str | None
) -> None:
    before = [{"action": "add", "content": "one"}, {"action": "add", "content": "three"}]
    await changed(api, "memory", *before)
    all_operations = (
        [{"action": "add", "content": "new"}, *operations]
        if isinstance(operations, list) and operations
        else operations
    )
    if param == "operations[0].action":
        param = "operations[1].action"
    async with api.patch(f"{MEMORY}/memory", {"operations": all_operations}) as response:
        error = await read_error(response, 400, code)
    if param is not None:
        assert error["param"] == param
    assert (await memory_of(api))["memory"]["entries"] == ["one", "three"]


async def test_memory_of_no_such_name(api: Api) -> None:
    body = {"operations": [{"action": "add", "content": "x"}]}
    async with api.patch(f"{MEMORY}/diary", body) as response:
        await read_error(response, 404, "not_found")


async def test_memory_is_each_owners_own(start: Start) -> None:
    api = await start(keys=KEYS)
    await changed(api, "memory", {"action": "add", "content": "Anna's."}, key=ANNA)
    assert (await memory_of(api, ANNA))["memory"]["entries"] == ["Anna's."]
    for key in (BEN, KEY):
        assert (await memory_of(api, key))["memory"]["entries"] == []
    kitchen = await memory_of(api, ANNA, **{"X-Hermes-Session-Key": "kitchen"})
    assert kitchen["memory"]["entries"] == []


# ---- skills


async def test_skill_is_written_read_changed_and_deleted(api: Api) -> None:
    body = {"name": "tea", "content": text_of("tea"), "category": "kitchen"}
    async with api.post(SKILLS, body) as response:
        skill = await read_json(response, 201)
    assert (skill["object"], skill["name"], skill["category"], skill["editable"]) == (
        "hermes.skill",
        "tea",
        "kitchen",
        True,
    )
    assert (skill["content"], skill["file"], skill["files"]) == (text_of("tea"), "SKILL.md", [])
    async with api.get(SKILLS) as response:
        assert (await read_json(response))["data"] == [
            {"name": "tea", "description": "About tea.", "category": "kitchen"},
        ]
    async with api.patch(f"{SKILLS}/tea", {"content": text_of("tea", "Leaves first.")}) as response:
        assert "Leaves first." in (await read_json(response))["content"]
    notes = {"content": "Green, 80 °C.", "file": "references/kinds.md"}
    async with api.patch(f"{SKILLS}/tea", notes) as response:
        skill = await read_json(response)
    assert (skill["file"], skill["content"], skill["files"]) == (
        "references/kinds.md",
        "Green, 80 °C.",
        ["references/kinds.md"],
    )
    async with api.get(f"{SKILLS}/tea") as response:
        assert "Leaves first." in (await read_json(response))["content"]
    async with api.delete(f"{SKILLS}/tea?file=references/kinds.md") as response:
        await read_json(response)
    async with api.get(f"{SKILLS}/tea?file=references/kinds.md") as response:
        await read_error(response, 404, "skill_not_found")
    async with api.delete(f"{SKILLS}/tea") as response:
        assert await read_json(response) == {"object": "hermes.skill.deleted", "name": "tea", "deleted": True}
    async with api.get(f"{SKILLS}/tea") as response:
        await read_error(response, 404, "skill_not_found")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"name": "Tea!", "content": text_of("tea")}, "invalid_value"),
        ({"name": "../tea", "content": text_of("tea")}, "invalid_value"),
        ({"name": "scopes", "content": text_of("scopes")}, "invalid_value"),
        ({"name": "tea", "content": "no head"}, "invalid_value"),
        ({"name": "tea", "content": text_of("coffee")}, "invalid_value"),
        ({"name": "tea", "content": text_of("tea"), "category": "../x"}, "invalid_value"),
        ({"name": "tea", "content": text_of("tea", "x" * 200_000)}, "string_above_max_length"),
        ({"name": "tea", "content": text_of("tea", KEY)}, "prompt_blocked"),
        ({"name": "cake", "content": text_of("cake")}, "invalid_value"),
        ({"name": "tea"}, "missing_required_parameter"),
        ({"name": 5, "content": "x"}, "invalid_type"),
    ],
)
async def test_refused_skill(api: Api, body: Json, code: str) -> None:
    async with api.post(SKILLS, {"name": "cake", "content": text_of("cake")}) as response:
        await read_json(response, 201)
    async with api.post(SKILLS, body) as response:
        await read_error(response, 400, code)
    async with api.get(SKILLS) as response:
        assert [skill["name"] for skill in (await read_json(response))["data"]] == ["cake"]


@pytest.mark.parametrize(
    "file", ["../../config.yaml", "/etc/passwd", "references/../../SKILL.md", "notes.md", "references/.x", "x" * 9000]
)
async def test_files_of_a_skill_lie_in_its_folder(api: Api, file: str) -> None:
    async with api.post(SKILLS, {"name": "tea", "content": text_of("tea")}) as response:
        await read_json(response, 201)
    async with api.patch(f"{SKILLS}/tea", {"content": "x", "file": file}) as response:
        assert response.status in (400, 403), await response.text()
    async with api.get(f"{SKILLS}/tea", params={"file": file[:4000]}) as response:
        assert response.status in (400, 403), await response.text()


async def test_skills_of_others_are_read_only_or_unknown(start: Start, home_folder: Path) -> None:
    api = await start(keys=KEYS)
    async with api.post(SKILLS, {"name": "shared", "content": text_of("shared")}) as response:
        await read_json(response, 201)  # that of the full key is there for all
    async with api.post(SKILLS, {"name": "own", "content": text_of("own")}, headers=bearer(ANNA)) as response:
        await read_json(response, 201)
    async with api.get(f"{SKILLS}/shared", headers=bearer(ANNA)) as response:
        assert (await read_json(response))["editable"] is False
    async with api.patch(f"{SKILLS}/shared", {"content": text_of("shared", "x")}, headers=bearer(ANNA)) as response:
        await read_error(response, 403, "skill_read_only")
    async with api.delete(f"{SKILLS}/shared", headers=bearer(ANNA)) as response:
        await read_error(response, 403, "skill_read_only")
    for key in (BEN, KEY):
        async with api.get(f"{SKILLS}/own", headers=bearer(key)) as response:
            await read_error(response, 404, "skill_not_found")
        async with api.delete(f"{SKILLS}/own", headers=bearer(key)) as response:
            await read_error(response, 404, "skill_not_found")
    assert "Water first." in next((home_folder / "skills" / "scopes").rglob("own/SKILL.md")).read_text()
