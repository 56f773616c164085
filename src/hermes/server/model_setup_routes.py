"""The configured model, and connecting another: the steps of `hermes setup`, for an admin in a browser."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from hermes.agent.model_lists import list_models
from hermes.core.errors import ConfigError, ServiceError
from hermes.core.json_types import JsonObject
from hermes.core.limits import MODEL_TRIAL_S_MAX
from hermes.core.spec import RouteChoice
from hermes.runs.engine import Refused
from hermes.server import outcome
from hermes.server.errors import ApiError, invalid
from hermes.server.keys import caller_of
from hermes.server.models import ModelChoice, ModelSource
from hermes.server.routes import route
from hermes.services import model_setup as setup
from hermes.services.models import primary, problem_of

if TYPE_CHECKING:
    from hermes.server.context import ServerContext


class ModelStatus(Struct, kw_only=True, tag_field="object", tag="hermes.model_status"):
    """The configured model. `problem`: why it cannot be asked, as far as that is known without asking. `embedded`: it runs
    on the server itself, from a file of so many `bytes`."""

    provider: str | None
    model: str | None
    embedded: bool
    title: str | None
    bytes: int | None
    window: int | None
    max_output: int | None
    abilities: list[str]
    problem: str | None
    base_url: str | UnsetType | None = UNSET
    key: bool | UnsetType = UNSET


@route("GET /api/model", "model_status", "Which model answers", scope="any", features="model_setup")
async def model_status(context: ServerContext, request: web.Request) -> ModelStatus:
    """Its address, and whether there is a key for it, are shown to an admin."""
    return await _status(context, is_admin=caller_of(request).is_admin)


async def _status(context: ServerContext, *, is_admin: bool) -> ModelStatus:
    app = context.app
    facts = await app.services.files.call(partial(setup.status, app.home, app.settings))
    names = [name for name in ModelStatus.__struct_fields__ if is_admin or name not in ("base_url", "key")]
    status = ModelStatus(**{name: facts[name] for name in names})
    status.problem = context.redact(status.problem) if status.problem else None
    if isinstance(status.base_url, str):
        status.base_url = context.redact(status.base_url) or None
    return status


class Provider(Struct, kw_only=True, tag_field="object", tag="hermes.provider"):
    """Who can be asked for a model. `key_env` is the variable that may hold its key; `local` is the embedded model."""

    name: str
    base_url: str | None
    api_mode: str
    needs_key: bool
    has_key: bool
    key_env: str | None
    configured: bool
    problem: str | None


class ProviderList(Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[Provider]


@route("GET /api/model/providers", "model_providers", "List model providers", scope="admin")
async def providers(context: ServerContext, request: web.Request) -> ProviderList:
    app = context.app
    rows = await app.services.files.call(partial(setup.providers, app.home, app.settings))
    data = [Provider(**{**one, "base_url": one["base_url"] and context.redact(one["base_url"])}) for one in rows]
    return ProviderList(data=data)


class ProviderModel(Struct, kw_only=True):
    id: str
    window: int | None


class ProviderModels(Struct, kw_only=True, tag_field="object", tag="list"):
    """The models that a provider lists, and the one that is likely meant."""

    data: list[ProviderModel]
    likely: str | None


@route(
    "POST /api/model/models",
    "model_list",
    "List the models of a provider",
    scope="admin",
    example={"base_url": "http://127.0.0.1:8080/v1"},
    faults=(502,),
)
async def provider_models(context: ServerContext, request: web.Request, body: ModelSource) -> ProviderModels:
    listed = await _listed(context, _choice(context, body, "any"))
    models = [ProviderModel(id=name, window=listed["windows"].get(name)) for name in listed["models"]]
    return ProviderModels(data=models, likely=setup.likely_model(listed["models"]) if models else None)


class ModelTrial(Struct, kw_only=True):
    """What the model said to a small question, or why it did not."""

    provider: str
    model: str
    answer: str
    error: str | None
    seconds: float


class ModelConnected(Struct, kw_only=True, tag_field="object", tag="hermes.model_setup"):
    """`written`: the model is used from now on."""

    written: bool
    test: ModelTrial
    status: ModelStatus


@route(
    "POST /api/model",
    "model_connect",
    "Try another model, and use it from now on",
    scope="admin",
    example={"base_url": "http://127.0.0.1:8080/v1", "model": "any"},
    faults=(409, 502, 503),
)
async def connect_model(context: ServerContext, request: web.Request, body: ModelChoice) -> ModelConnected:
    """Nothing is written unless the model answers, or with `anyway`. The key goes to the home's .env."""
    app, wants_to_write = context.app, not body.test_only
    if wants_to_write:
        setup.check_changeable(app.settings)
    choice = _choice(context, body, body.model)
    if choice.model is None and choice.provider != setup.EMBEDDED:
        listed = await _listed(context, replace(choice, model="any"))
        if not listed["models"]:
            raise invalid("model", "The provider lists no models; name one.", "missing_required_parameter")
        choice = replace(choice, model=setup.likely_model(listed["models"]))
    test = await _tried(context, choice)
    written = wants_to_write and (test.error is None or body.anyway)
    if written:
        by = caller_of(request).credential or "api"
        changes = setup.changes_of(app.settings, choice)
        try:
            await app.services.files.call(partial(setup.write, app.home, changes, by=by))
        except ConfigError as error:
            raise ServiceError(f"{error.message} Change it at the machine.", "setting_read_only") from None
    elif wants_to_write:
        message = f"{test.provider}/{test.model} does not answer: {test.error} Nothing was changed."
        raise ApiError(502, message, "provider_unavailable", headers={"x-should-retry": "false"})
    return ModelConnected(written=written, test=test, status=await _status(context, is_admin=True))


def _choice(context: ServerContext, body: ModelSource, model: str | None) -> RouteChoice:
    return setup.choice_of(
        context.settings, provider=body.provider, base_url=body.base_url, model=model, api_key=body.api_key
    )


async def _listed(context: ServerContext, choice: RouteChoice) -> JsonObject:
    app = context.app
    if choice.provider == setup.EMBEDDED:
        raise invalid("provider", "The embedded model is the only one of its provider.")
    try:
        chosen = primary(app.settings, choice)
    except ConfigError as error:
        raise invalid("provider", error.message) from None
    if problem := problem_of(app.settings, chosen):
        raise invalid("api_key", problem)
    return await list_models(app.services.http, chosen)


async def _tried(context: ServerContext, choice: RouteChoice) -> ModelTrial:
    app, started_at = context.app, time.monotonic()
    try:
        trial = await setup.try_model(app.engine, app.settings, app.home, choice, MODEL_TRIAL_S_MAX)
    except ConfigError as error:
        raise invalid("provider", error.message) from None
    except Refused as error:
        raise outcome.refusal(error) from None
    fault: str | None = trial["error"]
    if fault and choice.api_key:  # which is not a known secret yet
        fault = fault.replace(choice.api_key, "[redacted]")
    return ModelTrial(
        provider=trial["provider"],
        model=trial["model"],
        answer=context.redact(trial["answer"] or ""),
        error=context.redact(fault) if fault else None,
        seconds=round(time.monotonic() - started_at, 2),
    )
