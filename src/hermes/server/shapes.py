"""What answers look like, as types: errors, discovery and turns. The API's description of them is made of these."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

Object = dict[str, Any]


class ErrorObject(Struct, kw_only=True):
    """What went wrong: a sentence, its kind, the field it is about, and a code for programs."""

    message: str
    type: Literal["invalid_request_error", "permission_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None
    hermes: Object | UnsetType = UNSET


class Error(Struct, kw_only=True):
    """The one form of every error."""

    error: ErrorObject


# --- discovery -------------------------------------------------------------------------------------------------------


class Health(Struct, kw_only=True):
    """A sign of life."""

    status: Literal["ok"]
    platform: str
    version: str


class Check(Struct, kw_only=True):
    """One thing that the server stands on; only the full key sees more than its status."""

    status: Literal["ok", "degraded"]
    error: str | UnsetType = UNSET


class Readiness(Struct, kw_only=True):
    """All checks."""

    status: Literal["ok", "degraded"]
    checks: dict[str, Check]


class DetailedHealth(Health, kw_only=True):
    """How the server is."""

    pid: int
    uptime_seconds: float
    gateway_state: str | None
    platforms: Object
    active_agents: int
    exit_reason: str | None
    updated_at: float | str | None
    gateway_busy: bool
    gateway_drainable: bool
    readiness: Readiness


class Ready(Struct, kw_only=True):
    """The server takes work."""

    status: Literal["ok"]
    readiness: Readiness


class NotReady(Error, kw_only=True):
    """The server takes no work now, and why."""

    readiness: Readiness


class About(Struct, kw_only=True):
    """What this is."""

    name: str
    version: str
    docs: str


class Model(Struct, kw_only=True):
    """A name under which the agent can be asked."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    permission: list[Any]
    root: str
    parent: str | None


class ModelList(Struct, kw_only=True):
    """All models, whole."""

    object: Literal["list"]
    data: list[Model]


class Endpoint(Struct, kw_only=True):
    """Where a route is."""

    method: str
    path: str


class Capabilities(Struct, kw_only=True):
    """What the server can do, within which limits, and where."""

    object: Literal["hermes.api_server.capabilities"]
    platform: str
    model: str
    version: str
    auth: Object
    runtime: Object
    features: dict[str, bool | str]
    limits: dict[str, float | None]
    endpoints: dict[str, Endpoint]


class Skill(Struct, kw_only=True):
    """A skill of the agent."""

    name: str
    description: str
    category: str | None


class SkillList(Struct, kw_only=True):
    """All skills, whole."""

    object: Literal["list"]
    data: list[Skill]


class Toolset(Struct, kw_only=True):
    """Tools that are switched on and off together."""

    name: str
    label: str
    description: str
    enabled: bool
    configured: bool
    available: bool
    tools: list[str]


class ToolsetList(Struct, kw_only=True):
    """All toolsets, whole."""

    object: Literal["list"]
    data: list[Toolset]
    platform: str


# --- turns -----------------------------------------------------------------------------------------------------------


class Usage(Struct, kw_only=True):
    """Tokens of a turn; those that came from a cache are among the input tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: Object | UnsetType = UNSET
    output_tokens_details: Object | UnsetType = UNSET


class ChatUsage(Struct, kw_only=True):
    """Tokens of a turn, as chat completions name them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Object
    completion_tokens_details: Object


class ChatAnswer(Struct, kw_only=True):
    """What the assistant said."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    annotations: list[Any]
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Object] | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    """The one choice of a chat completion."""

    index: int
    message: ChatAnswer
    logprobs: None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter", "error"]


class ChatCompletion(Struct, kw_only=True):
    """A chat completion. `hermes` is there only when the turn did not end well, or is not kept."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: str
    choices: list[Choice]
    usage: ChatUsage
    hermes: Object | UnsetType = UNSET


class Response(Struct, kw_only=True):
    """A response: what was asked for, and the items that came of it. `hermes` is there only where it is not kept."""

    id: str
    object: Literal["response"]
    created_at: float
    completed_at: float | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    incomplete_details: Object | None
    error: Object | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[Object]
    tools: list[Object]
    tool_choice: str | Object
    parallel_tool_calls: bool
    max_tool_calls: int | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    text: Object
    reasoning: Object
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None
    usage: Usage
    hermes: Object | UnsetType = UNSET
    conversation: Object | UnsetType = UNSET
    user: str | UnsetType = UNSET


class ResponseDeleted(Struct, kw_only=True):
    """A response that is gone."""

    id: str
    object: Literal["response"]
    deleted: bool


class ItemList(Struct, kw_only=True):
    """A page of items."""

    object: Literal["list"]
    data: list[Object]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Struct, kw_only=True):
    """How many tokens a request has."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ConversationItem(Struct, kw_only=True):
    """An item; what else it has depends on its type."""

    id: str
    type: str


class Compaction(Struct, kw_only=True):
    """A conversation made short: an item that stands for it as input."""

    id: str
    object: Literal["response.compaction"]
    created_at: float
    output: list[Object]
    usage: Usage


class Conversation(Struct, kw_only=True):
    """A conversation."""

    id: str
    object: Literal["conversation"]
    created_at: float
    metadata: dict[str, str]


class ConversationDeleted(Struct, kw_only=True):
    """A conversation that is gone."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: bool
