"""Every setting, once: its name, type, limits and default, and as a `Mark` its variable and whether it is a secret.

The names are those of config.yaml. `Mapping[str, …]` is a section whose names are free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from hermes.core import limits
from hermes.core.json_types import JsonMapping


@dataclass(frozen=True, slots=True)
class Mark:
    """What is to be known of a setting beyond its type.

    `env` is the environment variable that sets it; those of `api_server` follow from their names. `names_variable`: the
    value is itself the name of a variable, which holds a secret. `follows` names the setting whose value is the default.
    `null` is what a null in the file stands for; None: for the default.
    """

    env: str = ""
    secret: bool = False
    names_variable: bool = False
    follows: str = ""
    null: Any = None


ApiMode = Literal["chat_completions", "codex_responses", "anthropic_messages", "local"]
# From least to most; a model offers some of them.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)

Secret = Annotated[str, Mark(secret=True)]
VariableName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z"), Mark(names_variable=True)]
Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(ge=0.01)]


class Section(Struct, frozen=True):
    def __repr__(self) -> str:
        # The values may be secrets.
        return f"{type(self).__name__}()"


class Model(Section, frozen=True):
    default: Annotated[str | None, Mark(env="HERMES_INFERENCE_MODEL")] = None
    provider: Annotated[str | None, Mark(env="HERMES_INFERENCE_PROVIDER")] = None
    base_url: str | None = None
    api_key: Secret | None = None
    api_mode: ApiMode | None = None
    context_length: Annotated[int, Meta(ge=1024)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    path: str | None = None


class Provider(Section, frozen=True):
    base_url: str | None = None
    api_key: Secret | None = None
    key_env: VariableName | None = None
    keys: Annotated[Sequence[str], Mark(secret=True)] = []
    api_mode: ApiMode | None = None
    # A list of names, or a mapping of names to what is known of each model.
    models: Any = None
    headers: Mapping[str, Secret] = {}
    request_timeout_seconds: Amount | None = None
    stale_timeout_seconds: Amount | None = None
    extra_body: JsonMapping = {}


class Local(Section, frozen=True):
    context: Annotated[int, Meta(ge=256)] | Literal["auto"] = 8192
    parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    threads: Annotated[int, Meta(ge=1, le=4096)] | Literal["auto"] = "auto"
    gpu_layers: Annotated[int, Meta(ge=0, le=10_000)] | Literal["auto"] = "auto"
    idle_unload_seconds: Amount = 600


class Agent(Section, frozen=True):
    max_turns: Annotated[int, Meta(ge=1, le=10_000)] = 90
    api_max_retries: Annotated[int, Meta(ge=0, le=100)] = 3
    max_answer_chars: Annotated[int, Meta(ge=1_000, le=100_000_000)] = limits.ANSWER_CHARS_MAX
    tool_threads: Annotated[int, Meta(ge=1, le=1024)] = 32
    max_parallel_tools: Annotated[int, Meta(ge=1, le=256)] = 8
    delta_window_ms: Annotated[float, Meta(ge=0, le=10_000)] = 20
    restart_drain_timeout: Amount = 30
    reasoning_effort: Effort | None = None
    reasoning_overrides: Mapping[str, Effort] = {}
    disabled_toolsets: Sequence[str] = []
    context_files: Sequence[str] = (".hermes.md", "HERMES.md", "AGENTS.md")
    clarify_timeout: Amount = 3600


class Compression(Section, frozen=True):
    enabled: bool = True
    threshold: Annotated[float, Meta(ge=0.05, le=0.99)] = 0.75
    target_ratio: Annotated[float, Meta(ge=0.01, le=0.9)] = 0.2
    protect_first_n: Annotated[int, Meta(ge=0, le=1000)] = 3


class PromptCaching(Section, frozen=True):
    cache_ttl: Literal["5m", "1h"] = "5m"


class Memory(Section, frozen=True):
    memory_enabled: bool = True
    user_profile_enabled: bool = True
    memory_char_limit: Annotated[int, Meta(ge=0, le=1_000_000)] = 2200
    user_char_limit: Annotated[int, Meta(ge=0, le=1_000_000)] = 1375
    write_approval: bool = False


class Delegation(Section, frozen=True):
    max_iterations: Annotated[int, Meta(ge=1, le=10_000)] = 50
    max_concurrent_children: Annotated[int, Meta(ge=1, le=64)] = 3
    max_summary_chars: Annotated[int, Meta(ge=100, le=1_000_000)] = 24_000


class Skills(Section, frozen=True):
    external_dirs: Sequence[str] = []
    write_approval: bool = False


class AuxiliaryTask(Section, frozen=True):
    provider: str = "auto"
    model: str | None = None
    timeout: Amount = 30
    enabled: bool = True


class Auxiliary(Section, frozen=True):
    compression: AuxiliaryTask = AuxiliaryTask(timeout=120)
    vision: AuxiliaryTask = AuxiliaryTask(timeout=120)
    approval: AuxiliaryTask = AuxiliaryTask()
    title_generation: AuxiliaryTask = AuxiliaryTask()

    def __getitem__(self, task: str) -> AuxiliaryTask:
        return getattr(self, task)  # type: ignore[no-any-return]


class Terminal(Section, frozen=True):
    backend: Literal["auto", "local", "bubblewrap", "docker"] = "auto"
    cwd: str = "."
    timeout: Annotated[float, Meta(ge=1)] = 180
    max_timeout: Annotated[float, Meta(ge=1)] = 600
    network: bool = False
    allowed_hosts: Sequence[str] = []
    env_passthrough: Sequence[str] = []
    workspaces: Sequence[str] = []
    sandbox_ro: Sequence[str] = []
    sandbox_rw: Sequence[str] = []
    allow_local: bool = False
    allow_exposed_local: bool = False
    docker_image: str = "python:3.12-slim"
    container_cpu: Annotated[float, Meta(ge=0.01, le=4096)] = 1
    container_memory: Annotated[int, Meta(ge=16)] = 5120
    disk_quota_mb: Count = 10_240


class Approvals(Section, frozen=True):
    mode: Literal["manual", "smart", "off"] = "manual"
    timeout: Amount = 300
    unattended: Literal["deny", "allow"] = "deny"
    deny: Sequence[str] = []


class Security(Section, frozen=True):
    redact_secrets: bool = True
    allow_private_urls: bool = False
    website_blocklist: Sequence[str] = []


class Network(Section, frozen=True):
    proxy: str = ""


class ToolOutput(Section, frozen=True):
    max_bytes: Annotated[int, Meta(ge=1000)] = 50_000
    max_chars: Annotated[int, Meta(ge=1000)] = 100_000


class Web(Section, frozen=True):
    search_backend: Literal["", "searxng", "brave", "tavily"] = ""
    ask_hosts: bool = True
    allowed_hosts: Sequence[str] = []
    extract_char_limit: Annotated[int, Meta(ge=100, le=2_000_000)] = 15_000


class McpServer(Section, frozen=True):
    command: str | None = None
    args: Sequence[str] = []
    env: Mapping[str, Secret] = {}
    url: str | None = None
    headers: Mapping[str, Secret] = {}
    enabled: bool = True
    sandbox: bool = True
    tools: Sequence[str] | None = None
    timeout: Amount = 60
    approval: Literal["never", "destructive", "always"] = "destructive"
    connect: Literal["lazy", "eager"] = "lazy"


class Sessions(Section, frozen=True):
    auto_prune: bool = False
    retention_days: Amount = 90
    api_retention_days: Annotated[float, Meta(ge=0), Mark(null=0)] = 7
    min_interval_hours: Amount = 24
    turn_queue: Annotated[int, Meta(ge=0, le=10_000)] = 16


class Runs(Section, frozen=True):
    resume_within_seconds: Amount = 3600


class Storage(Section, frozen=True):
    # `<home>` stands for the home folder.
    url: Annotated[str, Mark(env="HERMES_DATABASE_URL")] = "sqlite:///<home>/state.db"
    read_threads: Annotated[int, Meta(ge=1, le=64)] = 4


class Bus(Section, frozen=True):
    url: Annotated[str, Mark(env="HERMES_NATS_URL")] = "memory:"
    # Servers with the same name and the same NATS work together.
    namespace: Annotated[str, Meta(pattern=r"^[a-z0-9_-]{1,32}\Z")] = "default"
    max_inflight: Annotated[int, Meta(ge=1, le=100_000)] = 64


class Display(Section, frozen=True):
    show_reasoning: bool = True
    busy_input_mode: Literal["queue", "interrupt", "steer"] = "queue"


class Cron(Section, frozen=True):
    enabled: bool = True
    max_parallel_jobs: Annotated[int, Meta(ge=1, le=1000)] = 4


class Logging(Section, frozen=True):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    max_size_mb: Positive = 5
    backup_count: Annotated[int, Meta(ge=0, le=1000)] = 3


class Telemetry(Section, frozen=True):
    endpoint: Annotated[str | None, Mark(env="OTEL_EXPORTER_OTLP_ENDPOINT")] = None


class ModelRoute(Section, frozen=True):
    model: str | None = None
    provider: str | None = None
    base_url: str | None = None
    api_key: Secret | None = None


class StoredResponses(Section, frozen=True):
    max_stored: Annotated[int, Meta(ge=1)] = 1000
    max_age_days: Amount = 30


class StoredRuns(Section, frozen=True):
    max_stored: Annotated[int, Meta(ge=1)] = 1000
    max_age_days: Amount = 7


class Idempotency(Section, frozen=True):
    ttl_hours: Amount = 24


class ApiServer(Section, frozen=True):
    enabled: bool = False
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8642
    key: Secret = ""
    keys: Sequence[JsonMapping] = []
    cors_origins: Sequence[str] = []
    allowed_hosts: Sequence[str] = []
    trusted_proxies: Sequence[str] = []
    model_name: str = ""
    model_routes: Mapping[str, ModelRoute] = {}
    strict_models: bool = False
    strict_parameters: bool = False
    toolsets: Annotated[Sequence[str] | None, Mark(follows="platform_toolsets.api_server")] = None
    tool_progress: Literal["auto", "off", "event", "chunk"] = "auto"
    tool_items: Literal["auto", "function", "mcp", "none"] = "auto"
    strict_clients: Sequence[str] | None = None
    show_reasoning: bool = False
    memory_scope: Literal["key", "user"] = "key"
    on_disconnect: Literal["interrupt", "detach"] = "interrupt"
    disconnect_grace_seconds: Amount = 0
    approval_timeout_seconds: Annotated[float, Meta(ge=0), Mark(follows="approvals.timeout")] = Approvals().timeout
    max_body_bytes: Annotated[int, Meta(ge=1000)] = 32_000_000
    max_text_chars: Annotated[int, Meta(ge=1)] = 1_048_576
    max_event_bytes: Annotated[int, Meta(ge=4_000)] = 100_000
    max_concurrent_runs: Count = 256
    session_wait_seconds: Amount = 30
    run_queue_seconds: Amount = 600
    turn_timeout_seconds: Amount = 3600
    keepalive_seconds: Positive = 15
    write_stall_seconds: Positive = 60
    drain_seconds: Annotated[float, Meta(ge=0), Mark(follows="agent.restart_drain_timeout")] = (
        Agent().restart_drain_timeout
    )
    responses: StoredResponses = StoredResponses()
    runs: StoredRuns = StoredRuns()
    idempotency: Idempotency = Idempotency()
    metrics: bool = True
    metrics_public: bool = False
    docs: bool = True
    ui: bool = True
    ollama: bool = False
    profiles: Sequence[str] = []
    workers: Annotated[int, Meta(ge=1, le=limits.WORKERS_MAX)] = 1


class Root(Section, frozen=True):
    model: Model = Model()
    providers: Mapping[str, Provider] = {}
    fallback_providers: Sequence[Any] = []
    local: Local = Local()
    agent: Agent = Agent()
    compression: Compression = Compression()
    prompt_caching: PromptCaching = PromptCaching()
    memory: Memory = Memory()
    delegation: Delegation = Delegation()
    skills: Skills = Skills()
    auxiliary: Auxiliary = Auxiliary()
    terminal: Terminal = Terminal()
    approvals: Approvals = Approvals()
    command_allowlist: Sequence[str] = []
    security: Security = Security()
    network: Network = Network()
    platform_toolsets: Mapping[str, Sequence[str]] = {}
    tool_output: ToolOutput = ToolOutput()
    file_read_max_chars: Annotated[int, Meta(ge=1000)] = 100_000
    web: Web = Web()
    mcp_servers: Mapping[str, McpServer] = {}
    mcp_discovery_timeout: Amount = 1.5
    sessions: Sessions = Sessions()
    runs: Runs = Runs()
    storage: Storage = Storage()
    bus: Bus = Bus()
    display: Display = Display()
    cron: Cron = Cron()
    logging: Logging = Logging()
    telemetry: Telemetry = Telemetry()
    timezone: str = ""
    api_server: ApiServer = ApiServer()
