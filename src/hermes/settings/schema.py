"""Every setting: its name, type, limits and default, and as a `Mark` its description, variable and whether it is
secret.

The names are those of config.yaml. `Mapping[str, …]` is a section with free names.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from hermes.core import limits
from hermes.settings.schema_server import ApiServer
from hermes.settings.schema_types import Amount, ApiMode, Count, Effort, Mark, Positive, Secret, Section, VariableName


class Model(Section, frozen=True):
    default: Annotated[
        str | None,
        Mark("Name of the model that is asked; without one the embedded model answers.", env="HERMES_INFERENCE_MODEL"),
    ] = None
    provider: Annotated[
        str | None,
        Mark(
            "Provider of the model: a known one (openai, anthropic, openrouter, ollama, …) or an entry of providers.",
            env="HERMES_INFERENCE_PROVIDER",
        ),
    ] = None
    base_url: Annotated[str | None, Mark("Address of the model's API, for a compatible server of your own.")] = None
    api_key: Annotated[Secret | None, Mark("Key for base_url or the provider; it is stored in .env.")] = None
    api_mode: Annotated[
        ApiMode | None, Mark("Protocol of the API; without one it follows from provider and address.")
    ] = None
    context_length: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        Mark("Context window in tokens, where the tables and the provider do not know it."),
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, Mark("Longest answer in tokens, unless a request sets its own limit.")
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        Mark("Sampling temperature, unless a request sets its own; not sent to models that refuse it."),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Mark("Nucleus sampling: only tokens within this probability mass, unless a request sets its own."),
    ] = None
    presence_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None,
        Mark("Penalty on tokens that have occurred, unless a request sets its own."),
    ] = None
    frequency_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None,
        Mark("Penalty on tokens by how often they have occurred, unless a request sets its own."),
    ] = None
    seed: Annotated[
        Count | None,
        Mark("Seed of the sampling, unless a request sets its own; providers treat it as best effort."),
    ] = None
    stop: Annotated[
        Sequence[str],
        Meta(max_length=limits.STOP_STRINGS_MAX),
        Mark("Texts at which an answer ends, unless a request sets its own."),
    ] = []
    path: Annotated[str | None, Mark("GGUF file of the embedded model, in place of the installed one.")] = None


class Provider(Section, frozen=True):
    base_url: Annotated[str | None, Mark("Address of this provider's API.")] = None
    api_key: Annotated[Secret | None, Mark("Key of this provider; it is stored in .env.")] = None
    key_env: Annotated[VariableName | None, Mark("Environment variable that holds the key.")] = None
    keys: Annotated[
        Sequence[str], Mark("Several keys: the next one is used when one is refused or out of quota.", secret=True)
    ] = []
    api_mode: Annotated[ApiMode | None, Mark("Protocol that this provider speaks.")] = None
    # A list of names, or a mapping of names to what is known of each model.
    models: Annotated[
        Any, Mark("Models of this provider: a list of names, or a mapping of names to context_length and max_tokens.")
    ] = None
    headers: Mapping[str, Annotated[Secret, Mark("Header that is sent with every request to this provider.")]] = {}
    request_timeout_seconds: Annotated[
        Amount | None, Mark("Longest time for a whole request; without one HERMES_API_TIMEOUT, else 1800.")
    ] = None
    stale_timeout_seconds: Annotated[
        Amount | None, Mark("How long a stream may be silent before it counts as lost.")
    ] = None
    extra_body: Mapping[str, Annotated[Any, Mark("Field that is added to the body of every request.")]] = {}


class Local(Section, frozen=True):
    context: Annotated[
        Annotated[int, Meta(ge=256)] | Literal["auto"],
        Mark("Context window of the embedded model in tokens; auto: by free memory."),
    ] = 8192
    parallel: Annotated[
        int, Meta(ge=1, le=64), Mark("Conversations that the embedded model works on at the same time.")
    ] = 1
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | Literal["auto"], Mark("Processor threads of the embedded model.")
    ] = "auto"
    gpu_layers: Annotated[
        Annotated[int, Meta(ge=0, le=10_000)] | Literal["auto"],
        Mark("Layers of the embedded model that are put on the GPU."),
    ] = "auto"
    idle_unload_seconds: Annotated[
        Amount, Mark("The embedded model is unloaded after being idle for this long; 0: never.")
    ] = 600


class Agent(Section, frozen=True):
    max_turns: Annotated[int, Meta(ge=1, le=10_000), Mark("How often the model may be asked within one turn.")] = 90
    api_max_retries: Annotated[
        int, Meta(ge=0, le=100), Mark("How often a failed request to the provider is repeated.")
    ] = 3
    max_answer_chars: Annotated[
        int, Meta(ge=1_000, le=100_000_000), Mark("Longest answer in characters; the rest is refused with a notice.")
    ] = limits.ANSWER_CHARS_MAX
    tool_threads: Annotated[int, Meta(ge=1, le=1024), Mark("Threads for tools that block.")] = 32
    max_parallel_tools: Annotated[
        int, Meta(ge=1, le=256), Mark("Tool calls of one message that run at the same time.")
    ] = 8
    delta_window_ms: Annotated[
        float, Meta(ge=0, le=10_000), Mark("Text that arrives within this time is joined into one event.")
    ] = 20
    restart_drain_timeout: Annotated[Amount, Mark("Seconds that running turns get to finish when a server stops.")] = 30
    reasoning_effort: Annotated[Effort | None, Mark("How much the model reasons before it answers, where it can.")] = (
        None
    )
    reasoning_overrides: Mapping[str, Annotated[Effort, Mark("Reasoning effort for one model, by its name.")]] = {}
    disabled_toolsets: Annotated[Sequence[str], Mark("Toolsets that are never offered.")] = []
    context_files: Annotated[
        Sequence[str],
        Mark("Names of project files whose text is added to the system prompt; the first that exists counts."),
    ] = (".hermes.md", "HERMES.md", "AGENTS.md")
    clarify_timeout: Annotated[Amount, Mark("Seconds that a question of the agent waits for an answer.")] = 3600


class Compression(Section, frozen=True):
    enabled: Annotated[bool, Mark("Shorten a conversation that no longer fits the context window.")] = True
    threshold: Annotated[
        float, Meta(ge=0.05, le=0.99), Mark("Share of the context window at which a conversation is shortened.")
    ] = 0.75
    target_ratio: Annotated[
        float, Meta(ge=0.01, le=0.9), Mark("Share of the context window that the most recent messages keep.")
    ] = 0.2
    protect_first_n: Annotated[
        int, Meta(ge=0, le=1000), Mark("First messages of a conversation that are never shortened.")
    ] = 3


class PromptCaching(Section, frozen=True):
    cache_ttl: Annotated[
        Literal["5m", "1h"], Mark("How long the provider keeps a cached prompt, where it lets the client choose.")
    ] = "5m"


class Memory(Section, frozen=True):
    memory_enabled: Annotated[
        bool, Mark("Show the agent its notes (MEMORY.md) in every session, and let it write them.")
    ] = True
    user_profile_enabled: Annotated[
        bool, Mark("Show the agent what it knows of the user (USER.md) in every session, and let it write it.")
    ] = True
    memory_char_limit: Annotated[int, Meta(ge=0, le=1_000_000), Mark("Largest size of MEMORY.md in characters.")] = 2200
    user_char_limit: Annotated[int, Meta(ge=0, le=1_000_000), Mark("Largest size of USER.md in characters.")] = 1375
    write_approval: Annotated[bool, Mark("Ask before memory is changed.")] = False


class Delegation(Section, frozen=True):
    max_iterations: Annotated[
        int, Meta(ge=1, le=10_000), Mark("How often the model may be asked within the turn of a sub-agent.")
    ] = 50
    max_concurrent_children: Annotated[
        int, Meta(ge=1, le=64), Mark("Sub-agents of one turn that run at the same time.")
    ] = 3
    max_summary_chars: Annotated[
        int, Meta(ge=100, le=1_000_000), Mark("Longest result of a sub-agent in characters.")
    ] = 24_000


class Skills(Section, frozen=True):
    external_dirs: Annotated[Sequence[str], Mark("Further folders with skills; they are only read.")] = []
    write_approval: Annotated[bool, Mark("Ask before a skill is changed.")] = False


class AuxiliaryTask(Section, frozen=True):
    provider: Annotated[str, Mark("Provider for this task; auto: the one of the conversation.")] = "auto"
    model: Annotated[str | None, Mark("Model for this task; without one the conversation's model.")] = None
    timeout: Annotated[Amount, Mark("Seconds after which this task is given up.")] = 30
    enabled: Annotated[bool, Mark("Whether a model is asked for this task at all.")] = True


class Auxiliary(Section, frozen=True):
    compression: AuxiliaryTask = AuxiliaryTask(timeout=120)
    vision: AuxiliaryTask = AuxiliaryTask(timeout=120)
    approval: AuxiliaryTask = AuxiliaryTask()
    title_generation: AuxiliaryTask = AuxiliaryTask()

    def __getitem__(self, task: str) -> AuxiliaryTask:
        return getattr(self, task)  # type: ignore[no-any-return]


class Terminal(Section, frozen=True):
    backend: Annotated[
        Literal["auto", "local", "bubblewrap", "docker"],
        Mark("Sandbox for commands; auto: bubblewrap, else docker; local is none."),
    ] = "auto"
    cwd: Annotated[str, Mark("Folder in which commands begin; '.' is where Hermes was started.")] = "."
    timeout: Annotated[
        float, Meta(ge=1), Mark("Seconds after which a command is ended, unless the call says otherwise.")
    ] = 180
    max_timeout: Annotated[float, Meta(ge=1), Mark("Longest timeout in seconds that a call may ask for.")] = 600
    network: Annotated[bool, Mark("Give commands in the sandbox the network without asking.")] = False
    allowed_hosts: Annotated[Sequence[str], Mark("Hosts that commands in the sandbox reach without asking.")] = []
    env_passthrough: Annotated[
        Sequence[str], Mark("Environment variables that commands get besides the harmless ones.")
    ] = []
    workspaces: Annotated[Sequence[str], Mark("Folders in which turns over the API and jobs may work.")] = []
    sandbox_ro: Annotated[Sequence[str], Mark("Further folders and files that the sandbox shows read-only.")] = []
    toolchains: Annotated[
        bool,
        Mark(
            "Show the user's toolchains and caches of packages (pyenv, cargo, rustup, nvm, uv, go) read-only in the sandbox."
        ),
    ] = True
    sandbox_rw: Annotated[Sequence[str], Mark("Further folders that commands in the sandbox may change.")] = []
    allow_local: Annotated[bool, Mark("Run commands without a sandbox where auto finds none.")] = False
    allow_exposed_local: Annotated[bool, Mark("Let a server that others can reach run commands without a sandbox.")] = (
        False
    )
    docker_image: Annotated[str, Mark("Image of the container that the docker backend starts.")] = "python:3.12-slim"
    container_cpu: Annotated[float, Meta(ge=0.01, le=4096), Mark("Processors that commands of one session get.")] = 1
    container_memory: Annotated[int, Meta(ge=16), Mark("Memory in MB that commands of one session get.")] = 5120
    disk_quota_mb: Annotated[Count, Mark("Disk space in MB that commands of one session may fill; 0: no limit.")] = (
        10_240
    )


class Approvals(Section, frozen=True):
    mode: Annotated[
        Literal["manual", "smart", "off"],
        Mark("Who decides on flagged calls: manual a person, smart a model in clear cases, off nobody."),
    ] = "manual"
    timeout: Annotated[Amount, Mark("Seconds that an approval waits; then the call is denied.")] = 300
    unattended: Annotated[
        Literal["deny", "allow"],
        Mark("What happens to calls that need approval where nobody can be asked, as in jobs."),
    ] = "deny"
    deny: Annotated[Sequence[str], Mark("Patterns of commands that are always denied.")] = []


class Security(Section, frozen=True):
    redact_secrets: Annotated[bool, Mark("Replace secrets in tool results and stored texts by a mark.")] = True
    allow_private_urls: Annotated[bool, Mark("Let the web tools reach private and local addresses.")] = False
    website_blocklist: Annotated[Sequence[str], Mark("Hosts that the web tools never reach.")] = []


class Network(Section, frozen=True):
    proxy: Annotated[str, Mark("Proxy for requests to providers and web pages; empty: those of the environment.")] = ""


class ToolOutput(Section, frozen=True):
    max_bytes: Annotated[int, Meta(ge=1000), Mark("Longest output of a command in bytes that the model gets.")] = 50_000
    max_chars: Annotated[
        int, Meta(ge=1000), Mark("Longest result of any tool in characters; what is longer is kept in a file.")
    ] = 100_000


class Web(Section, frozen=True):
    search_backend: Annotated[
        Literal["", "searxng", "brave", "tavily"],
        Mark("Search engine of web_search; empty: the one whose address or key is set."),
    ] = ""
    ask_hosts: Annotated[
        bool, Mark("Ask before a page of a new host is read that neither the user nor a search has named.")
    ] = True
    allowed_hosts: Annotated[Sequence[str], Mark("Hosts whose pages are read without asking.")] = []
    extract_char_limit: Annotated[
        int, Meta(ge=100, le=2_000_000), Mark("Longest text of a page in characters that the model gets.")
    ] = 15_000


class McpServer(Section, frozen=True):
    command: Annotated[str | None, Mark("Program of the server, for one that is started here.")] = None
    args: Annotated[Sequence[str], Mark("Arguments of the program.")] = []
    env: Mapping[str, Annotated[Secret, Mark("Environment variable of the program.")]] = {}
    url: Annotated[str | None, Mark("Address of the server, for one that is reached over HTTP.")] = None
    headers: Mapping[str, Annotated[Secret, Mark("Header that is sent to the server.")]] = {}
    enabled: Annotated[bool, Mark("Whether the server is used.")] = True
    sandbox: Annotated[bool, Mark("Run the program in a sandbox.")] = True
    tools: Annotated[Sequence[str] | None, Mark("Names of the tools to offer; without a list all.")] = None
    timeout: Annotated[Amount, Mark("Seconds after which a call is given up.")] = 60
    approval: Annotated[Literal["never", "destructive", "always"], Mark("Which calls need approval.")] = "destructive"
    connect: Annotated[Literal["lazy", "eager"], Mark("When to connect: with the first use, or at once.")] = "lazy"


class Sessions(Section, frozen=True):
    auto_prune: Annotated[bool, Mark("Let the server delete old sessions.")] = False
    retention_days: Annotated[Amount, Mark("Age in days at which auto_prune deletes ended sessions.")] = 90
    api_retention_days: Annotated[
        float,
        Meta(ge=0),
        Mark("Age in days at which sessions of single API requests are deleted; 0 or null: never.", null=0),
    ] = 7
    min_interval_hours: Annotated[Amount, Mark("Hours between two rounds of auto_prune.")] = 24
    turn_queue: Annotated[int, Meta(ge=0, le=10_000), Mark("Turns that may wait for one session.")] = 16


class Runs(Section, frozen=True):
    resume_within_seconds: Annotated[
        Amount, Mark("Runs that a crash has interrupted are resumed when they are younger than this.")
    ] = 3600


class Storage(Section, frozen=True):
    # `<home>` stands for the home folder.
    url: Annotated[
        str,
        Mark(
            "Database: sqlite:///FILE or postgresql://…; <home> stands for the home folder.", env="HERMES_DATABASE_URL"
        ),
    ] = "sqlite:///<home>/state.db"
    read_threads: Annotated[
        int, Meta(ge=1, le=64), Mark("Connections for reading beside the one that writes (SQLite).")
    ] = 4


class Bus(Section, frozen=True):
    url: Annotated[
        str, Mark("How replicas reach each other: memory: for a single server, or nats://….", env="HERMES_NATS_URL")
    ] = "memory:"
    # Servers with the same name and the same NATS work together.
    namespace: Annotated[
        str, Meta(pattern=r"^[a-z0-9_-]{1,32}\Z"), Mark("Servers with the same name and the same NATS work together.")
    ] = "default"
    max_inflight: Annotated[
        int, Meta(ge=1, le=100_000), Mark("Submitted runs that one replica works on at the same time.")
    ] = 64
    queue_copies: Annotated[
        int,
        Meta(ge=1, le=5),
        Mark(
            "Servers of a NATS cluster that each hold the queue of runs, when it is made.",
            env="HERMES_NATS_QUEUE_COPIES",
        ),
    ] = 1


class Notify(Section, frozen=True):
    command: Annotated[
        str,
        Mark("Program that shows notifications; {title} and {text} are replaced, its input is the whole text."),
    ] = ""
    sendmail: Annotated[str, Mark("Program that sends e-mail, as sendmail does.")] = "sendmail"
    email_from: Annotated[str, Mark("Sender of e-mail; empty: the user that Hermes runs as.")] = ""


class Display(Section, frozen=True):
    show_reasoning: Annotated[bool, Mark("Show the model's reasoning in a chat.")] = True
    busy_input_mode: Annotated[
        Literal["queue", "interrupt", "steer"],
        Mark("What Enter does while the agent works: queue the message, interrupt the turn, or steer it."),
    ] = "queue"
    notify: Annotated[
        Literal["off", "bell", "osc9", "osc777"],
        Mark("How a chat notifies the terminal at the end of a long turn and at an approval."),
    ] = "bell"
    notify_after_seconds: Annotated[Amount, Mark("Turns that took this long end with a notification.")] = 20


class Cron(Section, frozen=True):
    enabled: Annotated[bool, Mark("Run jobs when they are due.")] = True
    max_parallel_jobs: Annotated[int, Meta(ge=1, le=1000), Mark("Jobs that run at the same time.")] = 4


class Logging(Section, frozen=True):
    level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], Mark("Least severe messages that are logged.")
    ] = "INFO"
    max_size_mb: Annotated[Positive, Mark("Size in MB at which a log file is rotated.")] = 5
    backup_count: Annotated[int, Meta(ge=0, le=1000), Mark("Rotated log files that are kept.")] = 3


class Telemetry(Section, frozen=True):
    endpoint: Annotated[
        str | None,
        Mark(
            "Address of an OpenTelemetry collector (OTLP over HTTP) that gets traces.",
            env="OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
    ] = None


class Root(Section, frozen=True):
    model: Model = Model()
    providers: Mapping[str, Provider] = {}
    fallback_providers: Annotated[
        Sequence[Any],
        Mark("Providers to try in order when the main one fails: provider, provider/model, or a mapping."),
    ] = []
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
    command_allowlist: Annotated[Sequence[str], Mark("Commands that need no approval.")] = []
    security: Security = Security()
    network: Network = Network()
    platform_toolsets: Mapping[
        str, Annotated[Sequence[str], Mark("Toolsets that are offered on one surface: cli, api_server or cron.")]
    ] = {}
    tool_output: ToolOutput = ToolOutput()
    file_read_max_chars: Annotated[int, Meta(ge=1000), Mark("Longest text in characters that read_file returns.")] = (
        100_000
    )
    web: Web = Web()
    mcp_servers: Mapping[str, McpServer] = {}
    mcp_discovery_timeout: Annotated[Amount, Mark("Seconds that the first turn waits for MCP servers to connect.")] = (
        1.5
    )
    sessions: Sessions = Sessions()
    runs: Runs = Runs()
    storage: Storage = Storage()
    bus: Bus = Bus()
    display: Display = Display()
    notify: Notify = Notify()
    cron: Cron = Cron()
    logging: Logging = Logging()
    telemetry: Telemetry = Telemetry()
    timezone: Annotated[
        str, Mark("Time zone of schedules and of the agent's date, such as Europe/Berlin; empty: the system's.")
    ] = ""
    api_server: ApiServer = ApiServer()
