"""Every setting, in one table: its name, type, range, default, environment variable, and whether it is a secret."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hermes.core.limits import ANSWER_CHARS_MAX, WORKERS_MAX

Kind = Literal["int", "float", "bool", "str", "variable", "enum", "list", "items", "maps", "any"]
KeyPath = tuple[str, ...]

ANY = "*"
# From least to most; a model offers some of them.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
API_MODES = ("chat_completions", "codex_responses", "anthropic_messages", "local")
TASK_TIMEOUTS_S = {"compression": 120, "vision": 120, "approval": 30, "title_generation": 30}


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. `*` in its name stands for any one name.

    `choices` are the words of an enum, or words that a number may be instead. `follows` names the setting whose value
    is the default. `<home>` in a default stands for the home folder. `null` is what a null in the file stands for; None:
    for the default.
    """

    name: str
    kind: Kind
    default: Any = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    env: str = ""
    secret: bool = False
    follows: str = ""
    null: Any = None

    @property
    def path(self) -> KeyPath:
        return tuple(self.name.split("."))

    @property
    def is_pattern(self) -> bool:
        return ANY in self.path


def _whole(name: str, default: int | str | None, low: int = 0, high: int = 2**53, **more: Any) -> Key:
    return Key(name, "int", default, low, high, **more)


def _number(name: str, default: float | None, low: float = 0, high: float | None = None, **more: Any) -> Key:
    return Key(name, "float", default, low, high, **more)


def _flag(name: str, default: bool, **more: Any) -> Key:
    return Key(name, "bool", default, **more)


def _text(name: str, default: str | None = None, **more: Any) -> Key:
    return Key(name, "str", default, **more)


def _choice(name: str, default: str | None, *choices: str, **more: Any) -> Key:
    return Key(name, "enum", default, choices=choices, **more)


def _list(name: str, *default: str, **more: Any) -> Key:
    return Key(name, "list", list(default), **more)


_MODEL = (
    _text("model.default", env="HERMES_INFERENCE_MODEL"),
    _text("model.provider", env="HERMES_INFERENCE_PROVIDER"),
    _text("model.base_url"),
    _text("model.api_key", secret=True),
    _choice("model.api_mode", None, *API_MODES),
    _whole("model.context_length", None, 1024),
    _whole("model.max_tokens", None, 1),
    _text("model.path"),
    _text("providers.*.base_url"),
    _text("providers.*.api_key", secret=True),
    Key("providers.*.key_env", "variable"),
    _list("providers.*.keys", secret=True),
    _choice("providers.*.api_mode", None, *API_MODES),
    Key("providers.*.models", "any"),
    _text("providers.*.headers.*", secret=True),
    _number("providers.*.request_timeout_seconds", None),
    _number("providers.*.stale_timeout_seconds", None),
    Key("providers.*.extra_body.*", "any"),
    Key("fallback_providers", "items", []),
    _whole("local.context", 8192, 256, choices=("auto",)),
    _whole("local.parallel", 1, 1, 64),
    _whole("local.threads", "auto", 1, 4096, choices=("auto",)),
    _whole("local.gpu_layers", "auto", 0, 10_000, choices=("auto",)),
    _number("local.idle_unload_seconds", 600),
)

_AGENT = (
    _whole("agent.max_turns", 90, 1, 10_000),
    _whole("agent.api_max_retries", 3, 0, 100),
    _whole("agent.max_answer_chars", ANSWER_CHARS_MAX, 1_000, 100_000_000),
    _whole("agent.tool_threads", 32, 1, 1024),
    _whole("agent.max_parallel_tools", 8, 1, 256),
    _number("agent.delta_window_ms", 20, 0, 10_000),
    _number("agent.restart_drain_timeout", 30),
    _choice("agent.reasoning_effort", None, *EFFORTS),
    _choice("agent.reasoning_overrides.*", None, *EFFORTS),
    _list("agent.disabled_toolsets"),
    _list("agent.context_files", ".hermes.md", "HERMES.md", "AGENTS.md"),
    _number("agent.clarify_timeout", 3600),
    _flag("compression.enabled", True),
    _number("compression.threshold", 0.75, 0.05, 0.99),
    _number("compression.target_ratio", 0.2, 0.01, 0.9),
    _whole("compression.protect_first_n", 3, 0, 1000),
    _choice("prompt_caching.cache_ttl", "5m", "5m", "1h"),
    _flag("memory.memory_enabled", True),
    _flag("memory.user_profile_enabled", True),
    _whole("memory.memory_char_limit", 2200, 0, 1_000_000),
    _whole("memory.user_char_limit", 1375, 0, 1_000_000),
    _flag("memory.write_approval", False),
    _whole("delegation.max_iterations", 50, 1, 10_000),
    _whole("delegation.max_concurrent_children", 3, 1, 64),
    _whole("delegation.max_summary_chars", 24_000, 100, 1_000_000),
    _list("skills.external_dirs"),
    _flag("skills.write_approval", False),
)

_AUXILIARY = tuple(
    key
    for task, timeout_s in TASK_TIMEOUTS_S.items()
    for key in (
        _text(f"auxiliary.{task}.provider", "auto"),
        _text(f"auxiliary.{task}.model"),
        _number(f"auxiliary.{task}.timeout", timeout_s),
        _flag(f"auxiliary.{task}.enabled", True),
    )
)

_TOOLS = (
    _choice("terminal.backend", "auto", "auto", "local", "bubblewrap", "docker"),
    _text("terminal.cwd", "."),
    _number("terminal.timeout", 180, 1),
    _number("terminal.max_timeout", 600, 1),
    _flag("terminal.network", False),
    _list("terminal.allowed_hosts"),
    _list("terminal.env_passthrough"),
    _list("terminal.workspaces"),
    _list("terminal.sandbox_ro"),
    _list("terminal.sandbox_rw"),
    _flag("terminal.allow_local", False),
    _flag("terminal.allow_exposed_local", False),
    _text("terminal.docker_image", "python:3.12-slim"),
    _number("terminal.container_cpu", 1, 0.01, 4096),
    _whole("terminal.container_memory", 5120, 16),
    _whole("terminal.disk_quota_mb", 10_240, 0),
    _choice("approvals.mode", "manual", "manual", "smart", "off"),
    _number("approvals.timeout", 60),
    _choice("approvals.unattended", "deny", "deny", "allow"),
    _list("approvals.deny"),
    _list("command_allowlist"),
    _flag("security.redact_secrets", True),
    _flag("security.allow_private_urls", False),
    _list("security.website_blocklist"),
    _text("network.proxy", ""),
    Key("platform_toolsets.*", "list"),
    _whole("tool_output.max_bytes", 50_000, 1000),
    _whole("tool_output.max_chars", 100_000, 1000),
    _whole("file_read_max_chars", 100_000, 1000),
    _choice("web.search_backend", "", "", "searxng", "brave", "tavily"),
    _flag("web.ask_hosts", True),
    _list("web.allowed_hosts"),
    _whole("web.extract_char_limit", 15_000, 100, 2_000_000),
    _text("mcp_servers.*.command"),
    _list("mcp_servers.*.args"),
    _text("mcp_servers.*.env.*", secret=True),
    _text("mcp_servers.*.url"),
    _text("mcp_servers.*.headers.*", secret=True),
    _flag("mcp_servers.*.enabled", True),
    _flag("mcp_servers.*.sandbox", True),
    Key("mcp_servers.*.tools", "list"),
    _number("mcp_servers.*.timeout", 60),
    _choice("mcp_servers.*.approval", "destructive", "never", "destructive", "always"),
    _choice("mcp_servers.*.connect", "lazy", "lazy", "eager"),
    _number("mcp_discovery_timeout", 1.5),
)

_STATE = (
    _flag("sessions.auto_prune", False),
    _number("sessions.retention_days", 90),
    _number("sessions.api_retention_days", 7, null=0),
    _number("sessions.min_interval_hours", 24),
    _whole("sessions.turn_queue", 16, 0, 10_000),
    _number("runs.resume_within_seconds", 3600),
    _text("storage.url", "sqlite:///<home>/state.db", env="HERMES_DATABASE_URL"),
    _whole("storage.read_threads", 4, 1, 64),
    _text("bus.url", "memory:", env="HERMES_NATS_URL"),
    _text("bus.namespace", "default"),
    _whole("bus.max_inflight", 64, 1, 100_000),
    _flag("display.show_reasoning", True),
    _choice("display.busy_input_mode", "interrupt", "interrupt", "queue", "steer"),
    _flag("cron.enabled", True),
    _whole("cron.max_parallel_jobs", 4, 1, 1000),
    _choice("logging.level", "INFO", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
    _number("logging.max_size_mb", 5, 0.01),
    _whole("logging.backup_count", 3, 0, 1000),
    _text("telemetry.endpoint", env="OTEL_EXPORTER_OTLP_ENDPOINT"),
    _text("timezone", ""),
)

_SERVER = (
    _flag("api_server.enabled", False),
    _text("api_server.host", "127.0.0.1"),
    _whole("api_server.port", 8642, 0, 65_535),
    _text("api_server.key", "", secret=True),
    Key("api_server.keys", "maps", []),
    _list("api_server.cors_origins"),
    _list("api_server.allowed_hosts"),
    _list("api_server.trusted_proxies"),
    _text("api_server.model_name", ""),
    _text("api_server.model_routes.*.model"),
    _text("api_server.model_routes.*.provider"),
    _text("api_server.model_routes.*.base_url"),
    _text("api_server.model_routes.*.api_key", secret=True),
    _flag("api_server.strict_models", False),
    _flag("api_server.strict_parameters", False),
    Key("api_server.toolsets", "list", follows="platform_toolsets.api_server"),
    _choice("api_server.tool_progress", "auto", "auto", "off", "event", "chunk"),
    _choice("api_server.tool_items", "auto", "auto", "function", "mcp", "none"),
    Key("api_server.strict_clients", "list"),
    _flag("api_server.show_reasoning", False),
    _choice("api_server.memory_scope", "key", "key", "user"),
    _choice("api_server.on_disconnect", "interrupt", "interrupt", "detach"),
    _number("api_server.disconnect_grace_seconds", 0),
    _number("api_server.approval_timeout_seconds", None, follows="approvals.timeout"),
    _whole("api_server.max_body_bytes", 32_000_000, 1000),
    _whole("api_server.max_text_chars", 1_048_576, 1),
    _whole("api_server.max_event_bytes", 100_000, 4_000),
    _whole("api_server.max_concurrent_runs", 256, 0),
    _number("api_server.session_wait_seconds", 30),
    _number("api_server.run_queue_seconds", 600),
    _number("api_server.turn_timeout_seconds", 3600),
    _number("api_server.keepalive_seconds", 15, 0.01),
    _number("api_server.write_stall_seconds", 60, 0.01),
    _number("api_server.drain_seconds", None, follows="agent.restart_drain_timeout"),
    _whole("api_server.responses.max_stored", 1000, 1),
    _number("api_server.responses.max_age_days", 30),
    _whole("api_server.runs.max_stored", 1000, 1),
    _number("api_server.runs.max_age_days", 7),
    _number("api_server.idempotency.ttl_hours", 24),
    _flag("api_server.metrics", True),
    _flag("api_server.metrics_public", False),
    _flag("api_server.docs", True),
    _flag("api_server.ui", True),
    _list("api_server.profiles"),
    _whole("api_server.workers", 1, 1, WORKERS_MAX),
)


def _with_variable(key: Key) -> Key:
    """All of the server's settings that fit into one line of text can come from the environment."""
    if key.is_pattern or key.kind == "maps":
        return key
    return replace(key, env=key.name.replace(".", "_").upper())


KEYS: tuple[Key, ...] = (*_MODEL, *_AGENT, *_AUXILIARY, *_TOOLS, *_STATE, *map(_with_variable, _SERVER))

# A section that may be given as one value, and the setting which that value is.
SHORT_FORMS: Mapping[str, str] = {"model": "model.default"}
# Other places where `api_server` may stand in the file, in order; the first that holds a setting wins.
SPELLINGS: tuple[str, ...] = (
    "api_server",
    "gateway.api_server",
    "platforms.api_server",
    "platforms.api_server.extra",
    "gateway.platforms.api_server",
    "gateway.platforms.api_server.extra",
)
# A server does not start with a bad value here; anything else bad is a warning and the default.
REFUSED_WHEN_BAD = ("api_server.key", "api_server.keys")


Tree = dict[str, "Tree | Key"]


def _build_tree() -> Tree:
    tree: Tree = {}
    for key in KEYS:
        node = tree
        for part in key.path[:-1]:
            below = node.setdefault(part, {})
            assert isinstance(below, dict), key.name
            node = below
        node[key.path[-1]] = key
    return tree


TREE = _build_tree()
_PLAIN = {key.name: key for key in KEYS if not key.is_pattern}


def canonical(path: KeyPath) -> KeyPath:
    """The path with another spelling of `api_server`, or a short form, put right."""
    for spelling in reversed(SPELLINGS):
        parts = tuple(spelling.split("."))
        if path[: len(parts)] == parts:
            return ("api_server", *path[len(parts) :])
    short = SHORT_FORMS.get(".".join(path))
    return tuple(short.split(".")) if short else path


def at(path: KeyPath) -> Tree | Key | None:
    """The setting or the section at a path of names; None where there is neither."""
    node: Tree | Key | None = TREE
    for part in path:
        if not isinstance(node, dict):
            return None
        node = node.get(part) or node.get(ANY)
    return node


@functools.cache
def _patterns() -> tuple[tuple[Key, re.Pattern[str]], ...]:
    keys = sorted((key for key in KEYS if key.is_pattern), key=lambda key: -len(key.path))
    return tuple((key, re.compile(re.escape(key.name).replace(r"\*", "(.+?)"))) for key in keys)


def find(name: str) -> tuple[Key, KeyPath] | None:
    """The setting of a dotted name, and its path. Where a name is free it may itself hold dots, as a model's does."""
    name = ".".join(canonical(tuple(name.split("."))))
    if name in _PLAIN:
        return _PLAIN[name], _PLAIN[name].path
    for key, pattern in _patterns():
        if match := pattern.fullmatch(name):
            free = iter(match.groups())
            return key, tuple(next(free) if part == ANY else part for part in key.path)
    return None


def nearest(path: KeyPath) -> str:
    """The known setting or section that looks most like an unknown one, or nothing."""
    import difflib

    wanted = ".".join(canonical(path))
    found = difflib.get_close_matches(wanted, sorted(set(_candidates(path))), n=1, cutoff=0.6)
    return found[0] if found else ""


def _candidates(path: KeyPath) -> Iterator[str]:
    for key in KEYS:
        for end in range(1, len(key.path) + 1):
            # A free name is taken to be meant as it was written.
            parts = [path[i] if part == ANY and i < len(path) else part for i, part in enumerate(key.path[:end])]
            if ANY not in parts:
                yield ".".join(parts)
