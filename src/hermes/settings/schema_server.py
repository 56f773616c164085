"""The settings of the server: the section `api_server`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from hermes.core import limits
from hermes.core.json_types import JsonMapping
from hermes.settings.schema_types import Amount, Count, Mark, Positive, Secret, Section


class ModelRoute(Section, frozen=True):
    model: Annotated[str | None, Mark("Model that this alias stands for.")] = None
    provider: Annotated[str | None, Mark("Provider of that model.")] = None
    base_url: Annotated[str | None, Mark("Address of that model's API.")] = None
    api_key: Annotated[Secret | None, Mark("Key for that address.")] = None


class StoredResponses(Section, frozen=True):
    max_stored: Annotated[
        int, Meta(ge=1), Mark("Stored responses per owner; the least recently used is deleted first.")
    ] = 1000
    max_age_days: Annotated[Amount, Mark("Age in days at which a stored response is deleted.")] = 30


class StoredRuns(Section, frozen=True):
    max_stored: Annotated[int, Meta(ge=1), Mark("Ended runs per owner whose events are kept.")] = 1000
    max_age_days: Annotated[Amount, Mark("Age in days at which the events of an ended run are deleted.")] = 7


class Idempotency(Section, frozen=True):
    ttl_hours: Annotated[Amount, Mark("Hours for which an Idempotency-Key is remembered.")] = 24


class ApiServer(Section, frozen=True):
    enabled: Annotated[
        bool, Mark("Whether the server listens; `hermes gateway run` enables it unless it is set to false.")
    ] = False
    host: Annotated[str, Mark("Address that the server listens at.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535), Mark("Port that the server listens at; 0: any free one.")] = 8642
    key: Annotated[Secret, Mark("API key with all rights; it is stored in .env.")] = ""
    keys: Annotated[
        Sequence[JsonMapping], Mark("Further keys, each with name, key, owner, scopes, models, toolsets and rates.")
    ] = []
    cors_origins: Annotated[Sequence[str], Mark("Origins whose web pages may use the API.")] = []
    allowed_hosts: Annotated[
        Sequence[str], Mark("Host names under which the server answers besides its own addresses.")
    ] = []
    trusted_proxies: Annotated[Sequence[str], Mark("Addresses of proxies whose X-Forwarded-For is believed.")] = []
    model_name: Annotated[str, Mark("Name under which the server offers its model; empty: the profile's name.")] = ""
    model_routes: Mapping[str, ModelRoute] = {}
    strict_models: Annotated[bool, Mark("Refuse unknown model names instead of using the configured model.")] = False
    strict_parameters: Annotated[bool, Mark("Refuse unknown request parameters instead of ignoring them.")] = False
    toolsets: Annotated[
        Sequence[str] | None, Mark("Toolsets that the server offers.", follows="platform_toolsets.api_server")
    ] = None
    tool_progress: Annotated[
        Literal["auto", "off", "event", "chunk"],
        Mark("How streams of chat completions show tool calls; auto: by client."),
    ] = "auto"
    tool_items: Annotated[
        Literal["auto", "function", "mcp", "none"],
        Mark("How responses show tool calls of the server; auto: by client."),
    ] = "auto"
    strict_clients: Annotated[
        Sequence[str] | None,
        Mark(
            "Patterns of User-Agent headers of clients that get no events beyond OpenAI's; without a list the built-in one."
        ),
    ] = None
    show_reasoning: Annotated[bool, Mark("Send the model's reasoning to clients.")] = False
    memory_scope: Annotated[
        Literal["key", "user"],
        Mark("Whose memory a request uses where no session key is given: one per key, or one per user field."),
    ] = "key"
    on_disconnect: Annotated[
        Literal["interrupt", "detach"], Mark("What becomes of a turn whose client disconnects.")
    ] = "interrupt"
    disconnect_grace_seconds: Annotated[
        Amount, Mark("Seconds that a disconnected client has to come back before its turn is interrupted.")
    ] = 0
    approval_timeout_seconds: Annotated[
        float, Meta(ge=0), Mark("Seconds that an approval waits over the API.", follows="approvals.timeout")
    ] = 300
    max_body_bytes: Annotated[int, Meta(ge=1000), Mark("Largest request body in bytes.")] = 32_000_000
    max_text_chars: Annotated[int, Meta(ge=1), Mark("Longest text of one message in characters.")] = 1_048_576
    max_event_bytes: Annotated[
        int, Meta(ge=4_000), Mark("Longest line of a stream in bytes; outputs of tools are shortened to fit.")
    ] = 100_000
    max_concurrent_runs: Annotated[Count, Mark("Turns at the same time; further requests get 429. 0: no limit.")] = 256
    session_wait_seconds: Annotated[Amount, Mark("Seconds that a request waits for a busy session.")] = 30
    run_queue_seconds: Annotated[
        Amount, Mark("Seconds that a run or a background response waits for a busy session.")
    ] = 600
    turn_timeout_seconds: Annotated[Amount, Mark("Longest time of a turn in seconds; 0: no limit.")] = 3600
    keepalive_seconds: Annotated[Positive, Mark("Seconds of silence after which a stream gets a comment.")] = 15
    write_stall_seconds: Annotated[
        Positive, Mark("Seconds after which a client that reads nothing is disconnected.")
    ] = 60
    drain_seconds: Annotated[
        float,
        Meta(ge=0),
        Mark("Seconds that running turns get to finish when the server stops.", follows="agent.restart_drain_timeout"),
    ] = 30
    responses: StoredResponses = StoredResponses()
    runs: StoredRuns = StoredRuns()
    idempotency: Idempotency = Idempotency()
    metrics: Annotated[bool, Mark("Serve /metrics.")] = True
    metrics_public: Annotated[bool, Mark("Serve /metrics without a key.")] = False
    docs: Annotated[bool, Mark("Serve /docs and /openapi.json.")] = True
    ui: Annotated[bool, Mark("Serve the web page.")] = True
    ollama: Annotated[bool, Mark("Serve clients of Ollama: /api/tags, /api/chat and others.")] = False
    profiles: Annotated[Sequence[str], Mark("Other profiles that this server serves below /p/NAME.")] = []
    workers: Annotated[int, Meta(ge=1, le=limits.WORKERS_MAX), Mark("Processes of the server.")] = 1
