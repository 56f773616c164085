"""Skills are per owner and session key, as memory is; the shared ones are there for all, and read-only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hermes.cli.main import main
from hermes.core import home
from hermes.core.ids import scope_name
from hermes.services.skills import find_skills
from hermes.settings import config
from support.model_server import Call, Reply

from .clients import Json, read_json, system_of, user
from .conftest import Api, Start
from .test_keys import ANNA, BEN, KEYS, bearer

DEFAULT = ""
# key, session key, and where what it writes is put
SCOPES: dict[str, tuple[str, str | None, str]] = {
    "default": (DEFAULT, None, ""),
    "anna": (ANNA, None, f"scopes/{scope_name('anna', None)}/"),
    "ben": (BEN, None, f"scopes/{scope_name('ben', None)}/"),
    "anna's kitchen": (ANNA, "kitchen", f"scopes/{scope_name('anna', 'kitchen')}/"),
    "default's kitchen": (DEFAULT, "kitchen", f"scopes/{scope_name('default', 'kitchen')}/"),
}


def text_of(name: str) -> str:
    return f"---\nname: {name}\ndescription: About {name}.\n---\n\nDo {name}.\n"


def headers(scope: str) -> Json:
    key, session_key, _ = SCOPES[scope]
    return {**(bearer(key) if key else {}), **({"X-Hermes-Session-Key": session_key} if session_key else {})}


async def use(api: Api, scope: str, tool: str, **args: str) -> Json:
    """The result of one call of a tool, made in a new session of the scope."""
    api.model.script = [Reply(tool_calls=[Call(tool, args)]), Reply(text="Done.")]
    api.model.requests.clear()
    async with api.post("/v1/chat/completions", user("go"), headers=headers(scope)) as response:
        await read_json(response)
    answer: Json = json.loads(api.model.requests[-1].body["messages"][-1]["content"])
    return answer


async def skill_names(api: Api, scope: str) -> set[str]:
    """The names of a scope's skills, on which request, tool and prompt agree."""
    async with api.get("/v1/skills", headers=headers(scope)) as response:
        names = {skill["name"] for skill in (await read_json(response))["data"]}
    assert {skill["name"] for skill in (await use(api, scope, "skills_list"))["skills"]} == names
    system = system_of(api.model.requests[0])
    assert {name for name in ("shared", "written") if f"About {name}." in system} == names
    return names


@pytest.fixture
async def api(start: Start, home_folder: Path) -> Api:
    api_server = await start(keys=KEYS, toolsets=["skills"])
    shared = home_folder / "skills" / "writing" / "shared" / "SKILL.md"
    shared.parent.mkdir(parents=True)
    shared.write_text(text_of("shared"))
    return api_server


@pytest.mark.parametrize("writer", SCOPES)
@pytest.mark.parametrize("category", ["", "drinks"])
async def test_skill_is_written_to_own_scope(api: Api, home_folder: Path, writer: str, category: str) -> None:
    category_field = {"category": category} if category else {}
    result = await use(
        api, writer, "skill_manage", action="create", name="written", content=text_of("written"), **category_field
    )
    place = home_folder / "skills" / SCOPES[writer][2] / category / "written" / "SKILL.md"
    assert result["path"].endswith("written/SKILL.md") and place.read_text() == text_of("written")
    for reader in SCOPES:
        own = reader == writer or writer == "default"
        assert await skill_names(api, reader) == ({"shared", "written"} if own else {"shared"})
        view = await use(api, reader, "skill_view", name="written")
        assert ("Do written." in view.get("content", "")) is own
    # The command line is the default owner's.
    names = {skill.name for skill in find_skills(config.load(home.resolve()))}
    assert names == ({"shared", "written"} if writer == "default" else {"shared"})


@pytest.mark.parametrize("action", ["edit", "patch", "delete", "write_file"])
async def test_shared_skill_is_read_only_to_other_owners(api: Api, home_folder: Path, action: str) -> None:
    args = {"content": text_of("shared"), "old_string": "Do", "new_string": "Undo"}
    args |= {"file_path": "references/a.md", "file_content": "x"} if action == "write_file" else {}
    answer = await use(api, "anna", "skill_manage", action=action, name="shared", **args)
    assert answer["code"] == "path_refused"
    folder = home_folder / "skills" / "writing" / "shared"
    assert [path.name for path in folder.iterdir()] == ["SKILL.md"]
    assert (folder / "SKILL.md").read_text() == text_of("shared")


@pytest.mark.parametrize("arguments", [{"name": "scopes"}, {"name": "tea", "category": "scopes"}])
async def test_scopes_folder_is_not_a_skill_or_category(api: Api, arguments: Json) -> None:
    args = {"action": "create", "content": text_of(arguments["name"]), **arguments}
    assert (await use(api, "default", "skill_manage", **args))["code"] == "invalid_arguments"


async def test_session_key_of_skills_list_requires_key(start: Start) -> None:
    api = await start(key="")
    async with api.get("/v1/skills", headers={"X-Hermes-Session-Key": "k"}) as response:
        assert response.status == 403


async def test_cli_lists_skills_of_default_owner(
    api: Api, home_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await use(api, "anna", "skill_manage", action="create", name="written", content=text_of("written"))
    main(["skills", "list", "--json"])
    assert [skill["name"] for skill in json.loads(capsys.readouterr().out)["skills"]] == ["shared"]
