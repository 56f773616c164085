"""Which credential answered a question, and over which surface, is on record in the run and in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hermes.core.spec import Control
from hermes.settings.config import set_value, unset_value
from hermes.store.runs import Runs
from support.model_server import Call, Reply
from support.waiting import until

from .clients import Json, read_json
from .conftest import KEY, Api, Start
from .test_keys import ANNA, KEYS, bearer

RISKY = Call("terminal", {"command": "rm -rf build"})
QUESTION = Call("clarify", {"question": "Which one?"})
SETTINGS: Json = {"terminal": {"backend": "local"}}
# who answers: headers of the request, and what is recorded
ANSWERS: dict[str, tuple[Json, tuple[str, str]]] = {
    "owner": (bearer(ANNA), ("anna", "api")),
    "admin": ({}, ("default", "api")),
}


async def start_question(api: Api, key: str, pending: str) -> str:
    """The run of a question that waits for its answer."""
    async with api.post("/v1/runs", {"input": "go"}, headers=bearer(key)) as response:
        run_id: str = (await read_json(response, 202))["run_id"]

    async def state() -> Json:
        async with api.get(f"/v1/runs/{run_id}", headers=bearer(key)) as response:
            return await read_json(response)

    await until(state, lambda value: value[pending])
    return run_id


async def resolved(api: Api, run_id: str) -> dict[str, Any]:
    async def events() -> list[Any]:
        return [event for event in await api.app.engine.durable(run_id) if event.type.endswith(".resolved")]

    [event] = await until(events)
    return dict(event.data)


@pytest.mark.parametrize("by", ANSWERS)
async def test_approval_records_credential(start: Start, caplog: pytest.LogCaptureFixture, by: str) -> None:
    api = await start(Reply(tool_calls=[RISKY]), Reply(text="Done."), keys=KEYS, settings=SETTINGS)
    run_id = await start_question(api, ANNA, "pending_approvals")
    headers, expected = ANSWERS[by]
    with caplog.at_level(logging.INFO, "hermes"):
        async with api.post(f"/v1/runs/{run_id}/approval", {"choice": "deny"}, headers=headers) as response:
            await read_json(response)
    resolved_settings = await resolved(api, run_id)
    assert (resolved_settings["credential"], resolved_settings["surface"]) == expected and resolved_settings[
        "by"
    ] == "user"
    assert f"approve of run {run_id} with the credential '{expected[0]}' over '{expected[1]}'" in caplog.text
    received = next(event for event in await api.app.engine.durable(run_id) if event.type == "control.received")
    assert (received.data["credential"], received.data["surface"]) == expected


@pytest.mark.parametrize("by", ANSWERS)
async def test_clarify_answer_records_credential(start: Start, caplog: pytest.LogCaptureFixture, by: str) -> None:
    api = await start(Reply(tool_calls=[QUESTION]), Reply(text="Done."), keys=KEYS, toolsets=["clarify"])
    run_id = await start_question(api, ANNA, "pending_question")
    headers, expected = ANSWERS[by]
    with caplog.at_level(logging.INFO, "hermes"):
        async with api.post(f"/v1/runs/{run_id}/clarify", {"answer": "the red one"}, headers=headers) as response:
            await read_json(response)
    resolved_settings = await resolved(api, run_id)
    assert (resolved_settings["credential"], resolved_settings["surface"], resolved_settings["answered"]) == (
        *expected,
        True,
    )
    assert f"answer of run {run_id} with the credential '{expected[0]}'" in caplog.text


async def test_answer_of_other_process_records_its_credential(start: Start) -> None:
    api = await start(Reply(tool_calls=[RISKY]), Reply(text="Done."), settings=SETTINGS)
    run_id = await start_question(api, KEY, "pending_approvals")
    control = Control("approve", {"choice": "deny"}, surface="cli", credential="default")
    assert Runs(api.app.store.blocking.engine).add_control(run_id, control)
    resolved_settings = await resolved(api, run_id)
    assert (resolved_settings["credential"], resolved_settings["surface"]) == ("default", "cli")


async def test_always_approval_logs_credential(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    api = await start(Reply(tool_calls=[RISKY]), Reply(text="Done."), keys=KEYS, settings=SETTINGS)
    run_id = await start_question(api, KEY, "pending_approvals")
    with caplog.at_level(logging.INFO, "hermes"):
        async with api.post(f"/v1/runs/{run_id}/approval", {"choice": "always"}) as response:
            await read_json(response)
        record = await until(lambda: api.app.engine.get(run_id), lambda value: value.state.ended)
    assert record.state.status == "completed"
    assert "the setting command_allowlist is changed by 'default'" in caplog.text


async def test_changed_settings_are_logged_without_values(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hermes"):
        set_value(api.app.home, "api_server.key", "sk-a-new-key-0123456789")
        unset_value(api.app.home, "timezone", by="anna")
    assert "the setting api_server.key is changed by 'cli'" in caplog.text
    assert "the setting timezone is unset by 'anna'" in caplog.text and "sk-a-new" not in caplog.text
