"""What request bodies may hold, as types: they are checked against these, and the API's description is made of them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from hermes.core import limits
from hermes.core.json_types import JsonObject
from hermes.settings.schema_types import Effort

Verbosity = Literal["low", "medium", "high"]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**53)]
Label = Annotated[str, Meta(max_length=limits.METADATA_CHARS_MAX)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=limits.METADATA_KEY_CHARS_MAX)], Label],
    Meta(max_length=limits.METADATA_PAIRS_MAX),
]
FunctionName = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
# Text, or parts (text, images, files), which `content` validates.
Content = str | list[str | JsonObject]


class Reasoning(Struct, kw_only=True):
    """How much the model is to think, and whether that is shown."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class Parameters(Struct, kw_only=True):
    """What every turn may ask of its model."""

    model: str | None = None
    # A provider's name; an object is OpenRouter's own option, and has no effect.
    provider: str | JsonObject | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=limits.STOP_STRINGS_MAX)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    verbosity: Verbosity | None = None
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    parallel_tool_calls: bool | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    metadata: Metadata | None = None


class Function(Struct, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ChatTool(Struct, kw_only=True):
    type: str
    function: Function | None = None


class NamespacedTool(Struct, kw_only=True):
    """A tool of a namespace: a function, or a custom tool."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    format: JsonObject | None = None


class ResponseTool(NamespacedTool, kw_only=True):
    """A tool of a response. What types without an equivalent here bring besides is not looked at."""

    tools: Annotated[list[NamespacedTool], Meta(max_length=limits.CLIENT_TOOLS_MAX)] | None = None
    environment: JsonObject | None = None
    execution: str | None = None


class AdditionalTools(Struct, kw_only=True):
    tools: Annotated[list[ResponseTool], Meta(max_length=limits.CLIENT_TOOLS_MAX)]


class CalledFunction(Struct, kw_only=True):
    name: str
    arguments: str = "{}"


class Call(Struct, kw_only=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], Meta(max_length=limits.CLIENT_TOOLS_MAX)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Struct, kw_only=True):
    name: FunctionName = "answer"
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName = "answer"
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ChatRequest(Parameters, kw_only=True):
    UNSUPPORTED: ClassVar = ("audio", "functions", "function_call", "web_search_options")
    WITHOUT_EFFECT: ClassVar = ("prediction", "prompt_cache_retention", "moderation")

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=limits.MESSAGES_MAX)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[ChatTool], Meta(max_length=limits.CLIENT_TOOLS_MAX)] | None = None
    tool_choice: str | JsonObject | None = None
    response_format: ResponseFormat | None = None
    include_reasoning: bool | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    audio: Any = None
    modalities: list[str] | None = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    store: bool = True
    prediction: Any = None
    prompt_cache_retention: Any = None
    moderation: Any = None


class ConversationRef(Struct, kw_only=True):
    id: str


class ResponseRequest(Parameters, kw_only=True):
    UNSUPPORTED: ClassVar = ("prompt", "context_management")
    WITHOUT_EFFECT: ClassVar = ("prompt_cache_retention", "moderation", "client_metadata")

    input: str | Annotated[list[str | JsonObject], Meta(max_length=limits.MESSAGES_MAX)]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    conversation_history: Annotated[list[ChatMessage], Meta(max_length=limits.MESSAGES_MAX)] | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    background: bool = False
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Count | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=limits.CLIENT_TOOLS_MAX)] | None = None
    tool_choice: str | JsonObject | None = None
    include: list[str] | None = None
    prompt: Any = None
    context_management: Any = None
    top_logprobs: int | None = None
    prompt_cache_retention: Any = None
    moderation: Any = None
    client_metadata: Any = None


class SessionChatRequest(Parameters, kw_only=True):
    message: Content | None = None
    input: Content | None = None
    system_message: Any = field(default=None)
    instructions: Any = field(default=None)
    include_reasoning: bool | None = None


class RunRequest(Parameters, kw_only=True):
    UNSUPPORTED: ClassVar = ("tools",)

    input: str | Annotated[list[str | JsonObject], Meta(max_length=limits.MESSAGES_MAX)]
    instructions: str | None = None
    session_id: str | None = None
    previous_response_id: str | None = None
    conversation_history: Annotated[list[ChatMessage], Meta(max_length=limits.MESSAGES_MAX)] | None = None
    toolsets: list[str] | None = None
    tools: Any = None
    workdir: str | None = None
    max_iterations: Count | None = None


class CompactRequest(Struct, kw_only=True):
    model: str
    provider: str | None = None
    input: str | Annotated[list[str | JsonObject], Meta(max_length=limits.MESSAGES_MAX)] | None = None
    previous_response_id: str | None = None
    instructions: str | None = None


class ConversationRequest(Struct, kw_only=True):
    items: Annotated[list[JsonObject], Meta(max_length=limits.MESSAGES_MAX)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Struct, kw_only=True):
    metadata: Metadata


class ConversationItems(Struct, kw_only=True):
    items: Annotated[list[JsonObject], Meta(min_length=1, max_length=limits.MESSAGES_MAX)]


class SteerRequest(Struct, kw_only=True):
    """Words for a run that is at work, under either name."""

    text: str | None = None
    input: str | None = None


class ApprovalRequest(Struct, kw_only=True):
    """`comment`, only with a denial: what the model is told to do instead."""

    choice: str
    approval_id: str | None = None
    comment: str | None = None
    all: bool = False
    resolve_all: bool = False


class ClarifyRequest(Struct, kw_only=True):
    answer: str
    request_id: str | None = None


class LoginRequest(Struct, kw_only=True):
    """A key to sign in with."""

    key: Annotated[str, Meta(max_length=limits.KEY_CHARS_MAX)]


class LogoutRequest(Struct, kw_only=True):
    """`everywhere`: end all sign-ins of this owner."""

    everywhere: bool = False


class ModelSource(Struct, kw_only=True):
    """Where a model is asked: a provider that is known or configured, or the address of a compatible server."""

    provider: Annotated[str, Meta(max_length=200)] | None = None
    base_url: Annotated[str, Meta(max_length=2_000)] | None = None
    api_key: Annotated[str, Meta(max_length=limits.KEY_CHARS_MAX)] | None = None


class ModelChoice(ModelSource, kw_only=True):
    """A model to be used from now on. `test_only`: it is tried, and nothing changes; `anyway`: it is used even if it does
    not answer."""

    model: Annotated[str, Meta(max_length=200)] | None = None
    test_only: bool = False
    anyway: bool = False


class SettingPatch(Struct, kw_only=True):
    """The new value of a setting; null: none of its own."""

    value: Any = UNSET


MemoryText = Annotated[str, Meta(max_length=limits.PROMPT_FILE_BYTES_MAX)]


class MemoryOperation(Struct, kw_only=True):
    """A change of memory. `old_text` is the entry that is meant, or a piece of it that no other has."""

    action: Literal["add", "replace", "remove"]
    content: MemoryText | None = None
    old_text: MemoryText | None = None


class MemoryPatch(Struct, kw_only=True):
    operations: Annotated[list[MemoryOperation], Meta(min_length=1, max_length=100)]


class SkillRequest(Struct, kw_only=True):
    """A skill to be written: its SKILL.md begins with its name and description."""

    name: Annotated[str, Meta(max_length=limits.SKILL_NAME_CHARS_MAX)]
    content: str
    category: str | None = None


class SkillPatch(Struct, kw_only=True):
    content: str
    file: str | None = None


class SessionRequest(Struct, kw_only=True):
    """A session to be made. What is refused here has codes of its own, hence the plain types."""

    id: Any = None
    session_id: Any = None
    title: Any = None
    model: str | None = None
    system_prompt: Any = None
    pinned: bool = False
    workdir: str | None = None
    toolsets: Names | None = None
    max_iterations: Count | None = None
    reasoning_effort: Effort | None = None


class SessionPatch(Struct, kw_only=True):
    """What of a session is to be changed; null clears what need not be there."""

    title: Any = UNSET
    end_reason: str | UnsetType = UNSET
    archived: bool | UnsetType = UNSET
    model: str | UnsetType | None = UNSET
    system_prompt: Any = UNSET
    pinned: bool | UnsetType = UNSET
    workdir: str | UnsetType | None = UNSET
    toolsets: Names | UnsetType | None = UNSET
    max_iterations: Count | UnsetType | None = UNSET
    reasoning_effort: Effort | UnsetType | None = UNSET


class SessionCompactRequest(Struct, kw_only=True):
    """A session whose conversation is to be made shorter; what is said of `focus` is kept most fully."""

    focus: str | None = None
    instructions: str | None = None


class ForkRequest(Struct, kw_only=True):
    """A fork of a session: of all of it, up to and with a message, or of what comes before one."""

    id: Any = None
    title: Any = None
    at_message_id: int | None = None
    before_message_id: int | None = None


class ImportRequest(Struct, kw_only=True):
    sessions: Annotated[list[Any], Meta(max_length=limits.IMPORT_SESSIONS_MAX)]


JobName = Annotated[str, Meta(min_length=1, max_length=limits.JOB_NAME_CHARS_MAX)]
JobPrompt = Annotated[str, Meta(max_length=limits.JOB_PROMPT_CHARS_MAX)]
JobScript = Annotated[str, Meta(min_length=1, max_length=limits.JOB_SCRIPT_CHARS_MAX)]
Names = Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=64)]


class JobRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    schedule: str
    prompt: JobPrompt = ""
    name: JobName | None = None
    deliver: Literal["local"] | None = None
    skills: Names | None = None
    repeat: Count | None = None
    model: str | None = None
    provider: str | None = None
    enabled_toolsets: Names | None = None
    workdir: str | None = None
    session_id: str | None = None
    timezone: str | None = None
    script: JobScript | None = None
    effort: Effort | None = None
    continuity: bool | None = None


class JobPatch(Struct, kw_only=True, forbid_unknown_fields=True):
    schedule: str | UnsetType = UNSET
    prompt: JobPrompt | UnsetType = UNSET
    name: JobName | UnsetType = UNSET
    deliver: Literal["local"] | UnsetType = UNSET
    skills: Names | UnsetType = UNSET
    repeat: Count | UnsetType | None = UNSET
    model: str | UnsetType | None = UNSET
    provider: str | UnsetType | None = UNSET
    enabled_toolsets: Names | UnsetType | None = UNSET
    workdir: str | UnsetType | None = UNSET
    session_id: str | UnsetType | None = UNSET
    timezone: str | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET
    script: JobScript | UnsetType | None = UNSET
    effort: Effort | UnsetType | None = UNSET
    continuity: bool | UnsetType = UNSET
