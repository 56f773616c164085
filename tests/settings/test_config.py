"""Settings: where each value comes from, what is wrong with it, and writing that keeps everything else."""

from __future__ import annotations

import operator
import os
import stat
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.core.home import Home
from hermes.settings import config
from hermes.settings.config import ConfigError, Problem, Settings
from hermes.settings.files import parse_env
from hermes.settings.keys import KEYS, find
from hermes.settings.write import without_secrets

SECRET = "sk-very-secret-0123456789"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def load(home: Home, yaml: str = "", env: str = "", environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    home.config_file.write_text(yaml)
    home.env_file.write_text(env)
    return config.load(home, {name.replace("__", "."): value for name, value in flags.items()}, environ or {})


def reached(settings: Settings, name: str) -> Any:
    return operator.attrgetter("model.default" if name == "model" else name)(settings)


def only(settings: Settings) -> Problem:
    assert len(settings.problems) == 1, settings.problems
    return settings.problems[0]


# ---- the table


def test_setting_names_are_unique() -> None:
    assert len({key.name for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_setting_has_a_description(key: Any) -> None:
    text = key.mark.text
    assert text.endswith(".") and text[0].isupper() and len(text) <= 140


def test_setting_variables_are_unique() -> None:
    variables = [key.env for key in KEYS if key.env]
    assert len(set(variables)) == len(variables)


@pytest.mark.parametrize("key", [key for key in KEYS if key.default is not None], ids=lambda key: key.name)
def test_every_default_is_valid(key: Any, home: Home) -> None:
    from hermes.settings.check import coerce

    assert coerce(key, key.default) == key.default


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", None),
        ("agent.max_turns", 90),
        ("agent.reasoning_overrides", {}),
        ("local.threads", "auto"),
        ("terminal.docker_image", "python:3.12-slim"),
        ("approvals.mode", "manual"),
        ("auxiliary.vision.timeout", 120),
        ("auxiliary.title_generation.timeout", 30),
        ("compression.threshold", 0.75),
        ("mcp_servers", {}),
        ("mcp_discovery_timeout", 1.5),
        ("platform_toolsets", {}),
        ("fallback_providers", []),
        ("api_server.port", 8642),
        ("api_server.max_body_bytes", 32_000_000),
        ("api_server.responses.max_stored", 1000),
        ("api_server.approval_timeout_seconds", 300),
        ("api_server.drain_seconds", 30),
    ],
)
def test_empty_home_has_defaults(tmp_path: Path, name: str, value: Any) -> None:
    home = Home(tmp_path / "none")
    settings = config.load(home, environ={})
    assert (reached(settings, name), settings.problems, home.path.exists()) == (value, (), False)


def test_store_default_is_in_home(home: Home) -> None:
    assert config.load(home, environ={}).storage.url == f"sqlite:///{home.path}/state.db"


def test_unset_setting_follows_another(home: Home) -> None:
    settings = load(home, "approvals: {timeout: 5}\nplatform_toolsets: {api_server: [web]}")
    assert settings.api_server.approval_timeout_seconds == 5
    assert settings.api_server.toolsets == ["web"]


# ---- precedence


@pytest.mark.parametrize(
    ("sources", "value", "source"),
    [
        ("flag environment .env file", 1, "flag"),
        ("environment .env file", 2, "environment"),
        (".env file", 3, ".env"),
        ("file", 4, "file"),
        ("", 8642, "default"),
    ],
)
def test_source_precedence_flag_environment_env_file_config_default(
    home: Home, sources: str, value: int, source: str
) -> None:
    settings = load(
        home,
        "api_server: {port: 4}" if "file" in sources else "",
        "API_SERVER_PORT=3" if ".env" in sources else "",
        {"API_SERVER_PORT": "2"} if "environment" in sources else {},
        **({"api_server__port": 1} if "flag" in sources else {}),
    )
    assert (settings.api_server.port, settings.source("api_server.port")) == (value, source)


def test_origin_names_line_or_variable(home: Home) -> None:
    settings = load(
        home, "\ntimezone: UTC", "# comment\nAPI_SERVER_HOST=::", {"HERMES_DATABASE_URL": "postgresql://db/x"}
    )
    names = ("timezone", "api_server.host", "storage.url", "bus.url")
    assert [settings.origin(name).where for name in names] == [
        "config.yaml line 2",
        ".env line 2",
        "HERMES_DATABASE_URL",
        "",
    ]


def test_empty_variable_is_unset(home: Home) -> None:
    settings = load(home, "", "API_SERVER_KEY=abc", {"API_SERVER_KEY": "", "API_SERVER_PORT": ""})
    assert (settings.api_server.key, settings.api_server.port) == ("abc", 8642)


def test_env_file_is_not_put_into_environment(home: Home) -> None:
    home.env_file.write_text("HERMES_TEST_ONLY_HERE=1")
    settings = config.load(home)
    assert ("HERMES_TEST_ONLY_HERE" in os.environ, settings.variable("HERMES_TEST_ONLY_HERE")) == (False, "1")


def test_process_variable_overrides_env_file(home: Home) -> None:
    assert load(home, "", "X=file", {"X": "process"}).variable("X") == "process"


def test_flag_none_is_ignored(home: Home) -> None:
    assert load(home, "model: a", model=None).model.default == "a"


def test_safe_mode_ignores_config_file(home: Home) -> None:
    home.config_file.write_text("a: [")
    home.env_file.write_text("API_SERVER_PORT=9")
    assert config.load(home, environ={}, safe_mode=True).api_server.port == 9


def test_list_variables_are_comma_separated(home: Home) -> None:
    settings = load(home, environ={"API_SERVER_CORS_ORIGINS": "http://a:1, http://b:2,"})
    assert settings.api_server.cors_origins == ["http://a:1", "http://b:2"]


def test_every_server_scalar_has_a_variable(home: Home) -> None:
    settings = load(home, environ={"API_SERVER_RESPONSES_MAX_STORED": "5", "API_SERVER_METRICS_PUBLIC": "yes"})
    assert settings.api_server.responses.max_stored == 5
    assert settings.api_server.metrics_public is True


# ---- shapes


def test_model_as_string(home: Home) -> None:
    assert load(home, "model: gpt").model.default == "gpt"


def test_model_as_mapping(home: Home) -> None:
    settings = load(home, "model: {default: gpt, provider: openai}")
    assert (settings.model.default, settings.model.provider) == ("gpt", "openai")


def test_bare_off_is_string(home: Home) -> None:
    settings = load(home, "approvals: {mode: off}\napi_server: {tool_progress: off}")
    assert (settings.approvals.mode, settings.api_server.tool_progress) == ("off", "off")


def test_free_names_may_contain_dots(home: Home) -> None:
    settings = load(home, "agent: {reasoning_overrides: {gpt-5.5: high}}\nproviders: {api.x.com: {base_url: u}}")
    assert settings.agent.reasoning_overrides == {"gpt-5.5": "high"}
    assert settings.providers["api.x.com"].base_url == "u"


def test_named_entry_has_all_defaults(home: Home) -> None:
    server = load(home, "mcp_servers: {files: {command: x}}").mcp_servers["files"]
    assert (server.command, server.timeout, server.approval) == ("x", 60, "destructive")


def test_empty_section_is_no_problem(home: Home) -> None:
    assert load(home, "agent:\nmodel:\napi_server:\n  port:\n").problems == ()


def test_yaml_anchors_and_merges(home: Home) -> None:
    text = "providers:\n  a: &a {base_url: u, api_mode: local}\n  b:\n    <<: *a\n    base_url: v\n"
    settings = load(home, text)
    assert settings.providers["b"] == msgspec.structs.replace(settings.providers["a"], base_url="v")
    assert settings.problems == ()


def test_returned_values_are_copies(home: Home) -> None:
    settings = load(home)
    settings.as_dict()["terminal"]["workspaces"].append("/")
    assert settings.terminal.workspaces == []


def test_settings_section_is_immutable_and_hides_values(home: Home) -> None:
    settings = load(home, f"model: {{api_key: {SECRET}}}")
    with pytest.raises(AttributeError):
        settings.model.api_key = "other"  # type: ignore[misc]
    assert (settings.model.api_key, SECRET in repr(settings.model)) == (SECRET, False)


def test_origin_of_unknown_name_suggests_nearest(home: Home) -> None:
    with pytest.raises(config.UnknownKey, match=r"Did you mean agent\.max_turns\?"):
        load(home).origin("agent.max_turn")


# ---- spellings of api_server

SPELLINGS = [
    "api_server: {port: %d}",
    "gateway: {api_server: {port: %d}}",
    "platforms: {api_server: {port: %d}}",
    "platforms: {api_server: {extra: {port: %d}}}",
    "gateway: {platforms: {api_server: {extra: {port: %d}}}}",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_port(home: Home, spelling: str) -> None:
    settings = load(home, spelling % 77)
    assert (settings.api_server.port, settings.problems) == (77, ())


@pytest.mark.parametrize("weaker", SPELLINGS[1:])
def test_conflicting_spellings_warn_and_first_wins(home: Home, weaker: str) -> None:
    settings = load(home, f"{weaker % 2}\n{SPELLINGS[0] % 1}")
    problem = only(settings)
    assert (settings.api_server.port, problem.severity, problem.line) == (1, "warn", 1)
    assert problem.message.endswith("is not used: api_server.port (line 2) comes first.")


def test_equal_spellings_are_no_problem(home: Home) -> None:
    assert load(home, f"{SPELLINGS[0] % 1}\n{SPELLINGS[1] % 1}").problems == ()


def test_secret_in_two_spellings_is_not_shown(home: Home) -> None:
    settings = load(home, f"api_server: {{key: {SECRET}}}\ngateway: {{api_server: {{key: {SECRET}2}}}}")
    assert SECRET not in str(only(settings))


# ---- references


def test_references_from_process_then_env_file(home: Home) -> None:
    settings = load(home, "network: {proxy: 'http://${A}:${B}/'}", "A=file\nB=file", {"A": "process"})
    assert settings.network.proxy == "http://process:file/"


def test_references_in_lists_and_numbers(home: Home) -> None:
    settings = load(home, "terminal: {workspaces: ['${A}/x']}\nagent: {max_turns: '${N}'}", "A=/a\nN=7")
    assert (settings.terminal.workspaces, settings.agent.max_turns) == (["/a/x"], 7)


def test_unknown_reference_is_an_error(home: Home) -> None:
    settings = load(home, "\nnetwork: {proxy: '${NOPE}'}")
    problem = only(settings)
    assert (problem.severity, problem.key, problem.line) == ("error", "network.proxy", 2)
    assert "NOPE" in problem.message
    assert settings.network.proxy == ""


def test_referenced_secret_of_wrong_type_is_not_shown(home: Home) -> None:
    assert SECRET not in str(only(load(home, "agent: {max_turns: '${KEY}'}", f"KEY={SECRET}")))


# ---- faults


@pytest.mark.parametrize(
    ("yaml", "name", "value", "message"),
    [
        ("agent: {max_turns: many}", "agent.max_turns", 90, "a whole number from 1 to 10000, not 'many'"),
        ("agent: {max_turns: 0}", "agent.max_turns", 90, "a whole number from 1 to 10000, not 0"),
        ("agent: {max_turns: 1.5}", "agent.max_turns", 90, "not 1.5"),
        ("agent: {max_turns: true}", "agent.max_turns", 90, "not True"),
        ("agent: {max_turns: [1]}", "agent.max_turns", 90, "not a list"),
        ("compression: {threshold: .nan}", "compression.threshold", 0.75, "a number from 0.05 to 0.99"),
        ("approvals: {timeout: -1}", "approvals.timeout", 300, "a number of at least 0, not -1"),
        ("approvals: {mode: sometimes}", "approvals.mode", "manual", "one of manual, smart, off"),
        ("terminal: {network: maybe}", "terminal.network", False, "true or false, not 'maybe'"),
        ("terminal: {cwd: 5}", "terminal.cwd", ".", "text, in quotes"),
        ("terminal: {cwd: 2024-01-01}", "terminal.cwd", ".", "text, in quotes"),
        ("terminal: {workspaces: {a: b}}", "terminal.workspaces", [], "a list of texts, not a mapping"),
        ("local: {threads: some}", "local.threads", "auto", "a whole number from 1 to 4096, or auto"),
        ("api_server: {port: 70000}", "api_server.port", 8642, "from 0 to 65535"),
        ("api_server: {keys: [a]}", "api_server.keys", [], "a list of mappings"),
        ("fallback_providers: {a: b}", "fallback_providers", [], "a list, not a mapping"),
    ],
)
def test_invalid_value_is_an_error_with_default(home: Home, yaml: str, name: str, value: Any, message: str) -> None:
    settings = load(home, yaml)
    problem = only(settings)
    assert (problem.severity, problem.key, problem.line, reached(settings, name)) == ("error", name, 1, value)
    assert message in problem.message


@pytest.mark.parametrize(
    ("yaml", "name", "value"),
    [
        ("agent: {max_turns: '12'}", "agent.max_turns", 12),
        ("agent: {max_turns: 12.0}", "agent.max_turns", 12),
        ("terminal: {network: 'false'}", "terminal.network", False),
        ("terminal: {network: 1}", "terminal.network", True),
        ("terminal: {workspaces: '/a, /b'}", "terminal.workspaces", ["/a", "/b"]),
        ("logging: {level: debug}", "logging.level", "DEBUG"),
        ("local: {threads: 4}", "local.threads", 4),
        ("fallback_providers: [a, {provider: b}]", "fallback_providers", ["a", {"provider": "b"}]),
    ],
)
def test_coercible_value_is_accepted(home: Home, yaml: str, name: str, value: Any) -> None:
    settings = load(home, yaml)
    assert (settings.origin(name).value, settings.problems) == (value, ())


def test_invalid_variable_is_an_error_with_default(home: Home) -> None:
    settings = load(home, environ={"API_SERVER_PORT": "not-a-port"})
    assert (settings.api_server.port, only(settings).where) == (8642, "API_SERVER_PORT")


def test_error_names_place_value_and_fix(home: Home) -> None:
    settings = load(home, "# 1\n# 2\n# 3\n# 4\n# 5\nagent:\n  max_turns: many\n")
    with pytest.raises(ConfigError) as caught:
        settings.require_valid()
    assert str(caught.value) == (
        "config.yaml line 7: agent.max_turns must be a whole number from 1 to 10000, not 'many'. "
        "Try: hermes config set agent.max_turns 90"
    )
    assert (caught.value.where, caught.value.hint) == ("config.yaml line 7", "hermes config set agent.max_turns 90")


def test_warnings_alone_are_valid(home: Home) -> None:
    settings = load(home, "agnet: 1")
    settings.require_valid()
    assert only(settings).severity == "warn"


@pytest.mark.parametrize("yaml", ["api_server: {key: [a]}", "api_server: 5", "gateway: {api_server: {keys: x}}"])
def test_invalid_server_key_is_always_rejected(home: Home, yaml: str) -> None:
    with pytest.raises(ConfigError):
        load(home, yaml).require_valid(*config.REFUSED_WHEN_BAD)


def test_other_errors_are_tolerated_with_valid_server_key(home: Home) -> None:
    settings = load(home, "agent: {max_turns: many}")
    settings.require_valid(*config.REFUSED_WHEN_BAD)
    assert settings.errors


@pytest.mark.parametrize(
    ("yaml", "key", "nearest"),
    [
        ("agnet: {max_turns: 1}", "agnet", "agent"),
        ("agent: {max_turn: 1}", "agent.max_turn", "agent.max_turns"),
        ("max_turns: 1", "max_turns", "agent.max_turns"),
        ("providers: {x: {base_ur: u}}", "providers.x.base_ur", "providers.x.base_url"),
        ("gateway: {api_server: {prot: 1}}", "gateway.api_server.prot", "api_server.port"),
        ("zzzzzzzzzzzz: 1", "zzzzzzzzzzzz", ""),
    ],
)
def test_unknown_name_warns_with_nearest(home: Home, yaml: str, key: str, nearest: str) -> None:
    problem = only(load(home, yaml))
    assert (problem.severity, problem.key, problem.nearest, problem.line) == ("warn", key, nearest, 1)


def test_unknown_server_variable_warns(home: Home) -> None:
    problem = only(load(home, environ={"API_SERVER_PROT": "1"}))
    assert (problem.severity, problem.nearest) == ("warn", "API_SERVER_PORT")


def test_duplicate_name_warns_with_line(home: Home) -> None:
    settings = load(home, "timezone: UTC\nagent:\n  max_turns: 1\n  max_turns: 2\n")
    assert (only(settings).key, only(settings).line, settings.agent.max_turns) == ("agent.max_turns", 4, 2)


def test_non_mapping_section_is_an_error(home: Home) -> None:
    assert only(load(home, "agent: 5")).message == "agent must be a mapping of settings."


@pytest.mark.parametrize(
    ("yaml", "place"),
    [
        (b"a: 1\nb: [1, 2\nc: 3\n", "line 3, column 2"),
        (b"a: 1\n\tb: 2\n", "line 2, column 1"),
        (b"- a\n- b\n", "line 1, column 1"),
        (b"a: 1\nb: \xff\n", "line 2, column 4"),
        (b"a: 1\nb: \x07\n", "line 2, column 4"),
        (b"agent: *nowhere\n", "line 1, column 8"),
    ],
)
def test_unparsable_file_names_line_and_column(home: Home, yaml: bytes, place: str) -> None:
    home.config_file.write_bytes(yaml)
    with pytest.raises(ConfigError) as caught:
        config.load(home, environ={})
    assert caught.value.where == f"config.yaml {place}"
    assert (str(home.config_file) in str(caught.value), caught.value.exit_code) == (True, 78)
    assert caught.value.hint == "hermes config edit"


@pytest.mark.parametrize("sign", ["*", "!", "&a *", "%", "@", "`"])
def test_secret_is_not_in_yaml_error(home: Home, sign: str) -> None:
    home.config_file.write_text(f"api_server:\n  key: {sign}{SECRET}\n  x: [\n")
    with pytest.raises(ConfigError) as caught:
        config.load(home, environ={})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "yaml",
    [
        "a: &a [*a]",
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join([f'*{o}'] * 10)}]\n" for o, n in zip("abcdef", "bcdefg", strict=True)),
        "a: " + "[" * 500 + "]" * 500,
        "a: " + "x" * 1_100_000,
    ],
    ids=["circle", "bomb", "depth", "size"],
)
def test_oversized_yaml_is_rejected(home: Home, yaml: str) -> None:
    home.config_file.write_text(yaml)
    with pytest.raises(ConfigError):
        config.load(home, environ={})


def test_unreadable_file_is_an_error(home: Home) -> None:
    home.config_file.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(home, environ={})


# ---- .env


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=b", "b"),
        ("  A = b  ", "b"),
        ("export A=b", "b"),
        ("A=", ""),
        ("A=b # comment", "b"),
        ("A=b#c", "b#c"),
        ("A=#b", "#b"),
        ("A= # comment", ""),
        ("A='b # c' # comment", "b # c"),
        ('A="b\\n\\"c\\" \\$d"', 'b\n"c" $d'),
        ("A='$b\\n'", "$b\\n"),
        ("A=b=c", "b=c"),
        ("A=b\r", "b"),
        ("\ufeffA=b", "b"),
    ],
)
def test_env_line_parsing(line: str, value: str) -> None:
    assert parse_env(line.encode()).values == {"A": value}


def test_later_env_line_wins() -> None:
    assert parse_env(b"A=1\nA=2\n").values == {"A": "2"}


@pytest.mark.parametrize("line", ["just words", "1A=b", "A B=c", "A='b", 'A="b', "=b", "A='b' c"])
def test_invalid_env_line_warns_with_number(home: Home, line: str) -> None:
    settings = load(home, env=f"# comment\n\n{line}\nB=2\n")
    problem = only(settings)
    assert (problem.severity, problem.line, problem.where) == ("warn", 3, ".env line 3")
    assert settings.variable("B") == "2"


def test_invalid_env_line_is_not_shown(home: Home) -> None:
    assert SECRET not in str(only(load(home, env=f"API_SERVER_KEY {SECRET}")))


# ---- secrets


def test_secrets_are_not_in_repr(home: Home) -> None:
    settings = load(home, f"model: {{api_key: {SECRET}}}", f"API_SERVER_KEY={SECRET}", {"X": SECRET})
    assert SECRET not in repr(settings) + repr(settings.problems) + repr(settings.origin("model.api_key"))


@pytest.mark.parametrize(
    "yaml",
    [
        f"model: {{api_key: [{SECRET}]}}",
        f"api_server: {{key: {{{SECRET}: 1}}}}",
        f"providers: {{x: {{key_env: {SECRET}}}}}",
        f"providers: {{x: {{keys: {{a: {SECRET}}}}}}}",
        f"api_server: {{keys: [{SECRET}]}}",
        f"mcp_servers: {{x: {{headers: {{Authorization: [{SECRET}]}}}}}}",
        f"storage: {{read_threads: 'nats://u:{SECRET}@h'}}",
    ],
)
def test_secret_of_wrong_type_is_not_shown(home: Home, yaml: str) -> None:
    settings = load(home, yaml)
    assert settings.errors
    assert SECRET not in str(settings.problems)


@pytest.mark.parametrize(
    ("name", "yaml", "expected"),
    [
        ("model.api_key", f"model: {{api_key: {SECRET}}}", "***"),
        ("model.api_key", "", None),
        ("providers.x.keys", f"providers: {{x: {{keys: [{SECRET}, b]}}}}", ["***", "***"]),
        ("mcp_servers.x.env.TOKEN", f"mcp_servers: {{x: {{env: {{TOKEN: {SECRET}}}}}}}", "***"),
        (
            "api_server.keys",
            f"api_server: {{keys: [{{name: a, key: {SECRET}, scopes: [chat]}}]}}",
            [{"name": "a", "key": "***", "scopes": ["chat"]}],
        ),
        (
            "providers.x.extra_body.auth",
            f"providers: {{x: {{extra_body: {{auth: {{access_token: {SECRET}}}}}}}}}",
            {"access_token": "***"},
        ),
        ("storage.url", f"storage: {{url: 'postgresql://u:{SECRET}@h/db'}}", "postgresql://***@h/db"),
        (
            "storage.url",
            f"storage: {{url: 'postgresql://h/db?password={SECRET}&a=b'}}",
            "postgresql://h/db?password=***&a=b",
        ),
        ("model.max_tokens", "model: {max_tokens: 5}", 5),
    ],
)
def test_shown_values_are_masked(home: Home, name: str, yaml: str, expected: Any) -> None:
    settings = load(home, yaml)
    assert (settings.shown(name), settings.problems) == (expected, ())


def test_secret_values_come_from_env_settings_and_named_variables(home: Home) -> None:
    settings = load(
        home,
        "model: {api_key: from-the-file}\nproviders: {x: {key_env: NAMED}}",
        "API_SERVER_KEY=from-dot-env\nSHORT=short",
        {"NAMED": "from-a-variable", "OTHER": "not-a-secret"},
    )
    assert settings.secret_values() == {"from-the-file", "from-dot-env", "from-a-variable"}


# ---- reloading


def changed(home: Home, yaml: str) -> None:
    """A new file, as an editor leaves it: the time alone need not differ on a coarse clock."""
    before = home.config_file.stat().st_mtime_ns
    home.config_file.write_text(yaml)
    os.utime(home.config_file, ns=(before + 1_000_000_000, before + 1_000_000_000))


def test_reload_without_change_returns_same_object(home: Home) -> None:
    settings = load(home, "timezone: UTC")
    assert config.reload_if_changed(settings) == (settings, None)


def test_reload_reads_changed_file(home: Home) -> None:
    settings = load(home, "timezone: UTC", agent__max_turns=3)
    changed(home, "timezone: CET")
    fresh, notice = config.reload_if_changed(settings)
    assert (fresh.timezone, fresh.agent.max_turns, notice) == ("CET", 3, None)


def test_reload_reads_changed_env_file(home: Home) -> None:
    settings = load(home, "", "API_SERVER_PORT=1")
    home.env_file.write_text("API_SERVER_PORT=22")
    assert config.reload_if_changed(settings)[0].api_server.port == 22


def test_reload_of_deleted_file_gives_defaults(home: Home) -> None:
    settings = load(home, "timezone: UTC")
    home.config_file.unlink()
    assert config.reload_if_changed(settings)[0].timezone == ""


@pytest.mark.parametrize("yaml", ["approvals: [", "approvals: {deny: {a: b}}"], ids=["unreadable", "wrong type"])
def test_reload_of_broken_file_keeps_settings_with_one_notice(home: Home, yaml: str) -> None:
    settings = load(home, "approvals: {deny: [rm]}")
    changed(home, yaml)
    current, notice = config.reload_if_changed(settings)
    assert current.approvals.deny == ["rm"]
    assert notice is not None
    assert notice.startswith("The settings stay as they were. config.yaml line ")
    assert config.reload_if_changed(current) == (current, None)


def test_reload_with_existing_error_applies_other_changes(home: Home) -> None:
    settings = load(home, "agent: {max_turns: many}")
    changed(home, "agent: {max_turns: many}\ntimezone: CET")
    assert config.reload_if_changed(settings)[0].timezone == "CET"


def test_reload_of_fixed_file(home: Home) -> None:
    settings = load(home, "timezone: UTC")
    changed(home, "timezone: [")
    broken, _ = config.reload_if_changed(settings)
    changed(home, "timezone: CET")
    assert config.reload_if_changed(broken)[0].timezone == "CET"


# ---- writing

COMMENTED = """\
# first line
model: gpt   # the model

# about the agent
agent:
    # the budget
    max_turns: 5   # five
    disabled_toolsets:   # none of these
        - web
        - file   # no files
    # end of the agent

# about the terminal
terminal:
    cwd: "."   # here
    docker_image: 'x:1'
approvals: {mode: off, timeout: 5}   # in braces
providers:
    api.x.com:
        base_url: http://x/   # x
timezone: |
    Europe/
    Berlin
# last line
"""


def comments(text: str) -> list[str]:
    return [line[line.index("#") :] for line in text.splitlines() if "#" in line]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "claude"),
        ("model.provider", "openai"),
        ("agent.max_turns", 7),
        ("agent.api_max_retries", 4),
        ("terminal.cwd", "/x"),
        ("terminal.network", True),
        ("approvals.timeout", 9),
        ("approvals.deny", ["rm *"]),
        ("providers.api.x.com.api_mode", "local"),
        ("providers.new.base_url", "http://new"),
        ("agent.reasoning_overrides.gpt-5.5", "high"),
        ("timezone", "UTC"),
        ("sessions.auto_prune", True),
        ("platform_toolsets.cli", ["web"]),
    ],
)
def test_set_keeps_comments_and_other_values(home: Home, name: str, value: Any) -> None:
    before = load(home, COMMENTED)
    config.set_value(home, name, value, {})
    after = config.load(home, environ={})
    assert comments(home.config_file.read_text()) == comments(COMMENTED)
    assert after.origin(name).value == value
    assert after.problems == ()
    values = {n: v.value for n, key, v in before.items() if not key.mark.follows} | {".".join(find(name)[1]): value}
    assert {n: v.value for n, key, v in after.items() if not key.mark.follows} == values


def test_set_changes_only_its_line(home: Home) -> None:
    load(home, COMMENTED)
    config.set_value(home, "agent.max_turns", "7")
    old, new = COMMENTED.splitlines(), home.config_file.read_text().splitlines()
    differing = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    assert differing == [("    max_turns: 5   # five", "    max_turns: 7   # five")]


def test_set_list_keeps_comment_beside_name(home: Home) -> None:
    load(home, "terminal:\n  workspaces:  # mine\n  - /a\n  - /b\n  # next\n  cwd: .\n")
    config.set_value(home, "terminal.workspaces", ["/c"])
    expected = "terminal:\n  workspaces:  # mine\n    - /c\n  # next\n  cwd: .\n"
    assert home.config_file.read_text() == expected


def test_set_new_value_is_placed_in_its_section(home: Home) -> None:
    load(home, "agent:\n  max_turns: 5\n\n# next\nterminal:\n  cwd: .\n")
    config.set_value(home, "agent.api_max_retries", 4)
    expected = "agent:\n  max_turns: 5\n  api_max_retries: 4\n\n# next\nterminal:\n  cwd: .\n"
    assert home.config_file.read_text() == expected


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}\n", "---\n", "agent:\n", "agent: {}", "timezone: UTC"])
def test_set_in_nearly_empty_file(home: Home, text: str) -> None:
    load(home, text)
    config.set_value(home, "agent.max_turns", 7)
    assert config.load(home, environ={}).agent.max_turns == 7


def test_first_set_creates_home_and_private_file(tmp_path: Path) -> None:
    home = Home(tmp_path / "new")
    written = config.set_value(home, "model", "gpt")
    assert (written.file, home.config_file.read_text()) == (home.config_file, "model: gpt\n")
    assert stat.S_IMODE(home.config_file.stat().st_mode) == 0o600


def test_set_writes_to_existing_spelling(home: Home) -> None:
    load(home, "platforms:\n  api_server:\n    extra:\n      port: 1\n")
    config.set_value(home, "api_server.port", 2)
    assert home.config_file.read_text() == "platforms:\n  api_server:\n    extra:\n      port: 2\n"


@pytest.mark.parametrize(
    "text", ["off", "yes", "012", "1e3", "2024-01-01", "12:30", "null", "~", "#x", "a: b", "", " x ", "*a"]
)
def test_set_text_that_looks_like_other_type(home: Home, text: str) -> None:
    config.set_value(home, "timezone", text)
    settings = config.load(home, environ={})
    assert (settings.timezone, settings.problems) == (text, ())


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])))
def test_set_text_round_trip_property(text: str) -> None:
    with TemporaryDirectory() as folder:
        home = Home(Path(folder))
        if "${" in text or "://" in text:
            return
        config.set_value(home, "terminal.cwd", text, {})
        assert config.load(home, environ={}).terminal.cwd == text


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("terminal.workspaces", "/a, /b", ["/a", "/b"]),
        ("terminal.workspaces", "[/a, /b]", ["/a", "/b"]),
        ("terminal.network", "on", True),
        ("approvals.mode", "OFF", "off"),
        ("fallback_providers", "[{provider: x}]", [{"provider": "x"}]),
        ("providers.x.extra_body.top_k", "5", 5),
        ("gateway.api_server.port", "5", 5),
    ],
)
def test_set_converts_text_to_setting_type(home: Home, name: str, given_value: str, value: Any) -> None:
    config.set_value(home, name, given_value)
    assert config.load(home, environ={}).origin(name).value == value


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("agent.max_turns", "many", config.BadValue),
        ("agent.max_turns", "0", config.BadValue),
        ("approvals.mode", "sometimes", config.BadValue),
        ("providers.x.models", "[a", config.BadValue),
        ("model.api_key", "", config.BadValue),
        ("model.api_key", "a\nb", config.BadValue),
        ("api_server.keys", f"[{{name: a, key: {SECRET}}}]", config.BadValue),
        ("agent.max_turn", "1", config.UnknownKey),
        ("agent", "1", config.UnknownKey),
    ],
)
def test_set_invalid_value_writes_nothing(tmp_path: Path, name: str, value: str, error: type[ConfigError]) -> None:
    home = Home(tmp_path / "new")
    with pytest.raises(error) as caught:
        config.set_value(home, name, value)
    assert SECRET not in str(caught.value)
    assert not home.config_file.exists()
    assert not home.env_file.exists()


def test_set_in_broken_file_is_rejected(home: Home) -> None:
    home.config_file.write_text("a: [")
    with pytest.raises(ConfigError, match="line 2"):
        config.set_value(home, "timezone", "UTC")
    assert home.config_file.read_text() == "a: ["


def test_set_in_file_with_duplicate_name_is_rejected(home: Home) -> None:
    home.config_file.write_text("timezone: a\ntimezone: b\n")
    with pytest.raises(ConfigError, match=r"line 2: timezone is there twice"):
        config.set_value(home, "agent.max_turns", 1)


def test_set_that_would_change_anchor_is_rejected(home: Home) -> None:
    text = "providers:\n  a: &a\n    base_url: u\n  b: *a\n"
    home.config_file.write_text(text)
    with pytest.raises(ConfigError, match="without touching other lines"):
        config.set_value(home, "providers.a.base_url", "v")
    assert home.config_file.read_text() == text


def test_set_on_alias_entry_gets_own_lines(home: Home) -> None:
    home.config_file.write_text("providers:\n  a: &a\n    base_url: u\n  b: *a   # like a\n")
    config.set_value(home, "providers.b.base_url", "v")
    settings = config.load(home, environ={})
    assert (settings.providers["a"].base_url, settings.providers["b"].base_url) == ("u", "v")


def test_concurrent_sets_lose_nothing(home: Home) -> None:
    load(home, COMMENTED)
    program = (
        "import sys; from pathlib import Path; from hermes.settings import config; from hermes.core.home import Home\n"
        "home, who = Home(Path(sys.argv[1])), sys.argv[2]\n"
        "for i in range(10):\n"
        "    config.set_value(home, f'platform_toolsets.{who}{i}', [who])\n"
        "    config.set_value(home, f'providers.{who}{i}.api_key', f'secret-{who}{i}')\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(home.path), who]) for who in "abcd"]
    assert [writer.wait() for writer in writers] == [0] * 4
    settings = config.load(home, environ={})
    names = {f"{who}{i}" for who in "abcd" for i in range(10)}
    assert set(settings.platform_toolsets) == names
    assert {settings.providers[name].api_key for name in names} == {f"secret-{name}" for name in names}
    assert comments(home.config_file.read_text()) == comments(COMMENTED)


# ---- writing secrets


def test_set_secret_goes_to_env_file(home: Home) -> None:
    load(home, COMMENTED)
    written = config.set_value(home, "api_server.key", SECRET)
    assert (written.file, written.variable) == (home.env_file, "API_SERVER_KEY")
    assert SECRET not in home.config_file.read_text()
    assert stat.S_IMODE(home.env_file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "value", "variable"),
    [
        ("model.api_key", SECRET, "HERMES_MODEL_API_KEY"),
        ("providers.api.x.com.api_key", SECRET, "HERMES_PROVIDERS_API_X_COM_API_KEY"),
        ("providers.x.keys", [SECRET, "other"], "HERMES_PROVIDERS_X_KEYS"),
        ("mcp_servers.x.headers.Authorization", f"Bearer {SECRET}", "HERMES_MCP_SERVERS_X_HEADERS_AUTHORIZATION"),
        ("storage.url", f"postgresql://u:{SECRET}@h/db", "HERMES_DATABASE_URL"),
        ("network.proxy", f"http://u:{SECRET}@h", "HERMES_NETWORK_PROXY"),
    ],
)
def test_every_secret_round_trip(home: Home, name: str, value: Any, variable: str) -> None:
    assert config.set_value(home, name, value, {}).variable == variable
    settings = config.load(home, environ={})
    assert (settings.origin(name).value, settings.problems) == (value, ())
    assert not home.config_file.exists() or SECRET not in home.config_file.read_text()


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1))
def test_any_secret_round_trip_property(secret: str) -> None:
    with TemporaryDirectory() as folder:
        home = Home(Path(folder))
        if "${" in secret:
            return
        config.set_value(home, "model.api_key", secret, {})
        config.set_value(home, "api_server.key", secret, {})
        settings = config.load(home, environ={})
        assert (settings.model.api_key, settings.api_server.key) == (secret, secret)


def test_set_secret_keeps_other_env_lines(home: Home) -> None:
    home.env_file.write_text("# keys\nexport API_SERVER_KEY=old # mine\n\nnot a line\nB='x'")
    config.set_value(home, "api_server.key", "new")
    assert home.env_file.read_text() == "# keys\nexport API_SERVER_KEY=new\n\nnot a line\nB='x'\n"


def test_set_secret_removes_it_from_config(home: Home) -> None:
    load(home, f"api_server:\n  key: {SECRET}  # old\n  port: 1\n")
    config.set_value(home, "api_server.key", "new")
    assert home.config_file.read_text() == "api_server:\n  port: 1\n"


def test_reference_to_secret_goes_to_config(home: Home) -> None:
    config.set_value(home, "model.api_key", "${MY_KEY}")
    assert home.config_file.read_text() == "model:\n  api_key: ${MY_KEY}\n"
    assert not home.env_file.exists()


def test_similar_provider_names_keep_separate_secrets(home: Home) -> None:
    config.set_value(home, "providers.a-b.api_key", "first")
    config.set_value(home, "providers.a_b.api_key", "second")
    settings = config.load(home, environ={})
    assert [settings.providers[name].api_key for name in ("a-b", "a_b")] == ["first", "second"]


# ---- taking out


@pytest.mark.parametrize(
    "name",
    ["model", "agent.max_turns", "terminal.cwd", "approvals.timeout", "providers.api.x.com.base_url", "timezone"],
)
def test_unset_restores_default_and_keeps_comments(home: Home, name: str) -> None:
    load(home, COMMENTED)
    removed = config.unset_value(home, name)
    own = next(
        (line[line.index("#") :] for line in COMMENTED.splitlines() if name.split(".")[-1] in line and "#" in line), ""
    )
    remaining = comments(home.config_file.read_text())
    assert [written.file for written in removed] == [home.config_file]
    assert config.load(home, environ={}).source(name) == "default"
    assert remaining in (comments(COMMENTED), [comment for comment in comments(COMMENTED) if comment != own])


def test_unset_of_list_removes_its_lines_only(home: Home) -> None:
    load(home, COMMENTED)
    config.unset_value(home, "agent.disabled_toolsets")
    lines = COMMENTED.splitlines(keepends=True)
    assert home.config_file.read_text() == "".join(lines[:7] + lines[10:])


def test_unset_removes_all_spellings(home: Home) -> None:
    load(home, "gateway: {api_server: {port: 1}}\napi_server: {port: 2}\n")
    config.unset_value(home, "api_server.port")
    assert config.load(home, environ={}).source("api_server.port") == "default"


@pytest.mark.parametrize("name", ["api_server.key", "model.api_key"])
def test_unset_removes_secret_from_env_file(home: Home, name: str) -> None:
    home.env_file.write_text("# keys\nB=1\n")
    config.set_value(home, name, SECRET)
    config.unset_value(home, name)
    assert home.env_file.read_text() == "# keys\nB=1\n"


def test_unset_keeps_referenced_variable(home: Home) -> None:
    load(home, "model: {api_key: '${MY_KEY}'}", "MY_KEY=x\n")
    config.unset_value(home, "model.api_key")
    assert home.env_file.read_text() == "MY_KEY=x\n"


def test_unset_of_unset_value_creates_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path / "new")
    assert (config.unset_value(home, "timezone"), home.path.exists()) == ([], False)


# ---- a copy without secrets


def test_copy_without_secrets_keeps_rest() -> None:
    text = f"""\
# mine
model: {{default: gpt, api_key: {SECRET}}}
providers:
  x:
    base_url: http://x  # x
    api_key: {SECRET}
    headers:
      Authorization: Bearer {SECRET}
    extra_body: {{auth: {{token: {SECRET}, id: 5}}}}
  y:
    api_key: ${{Y_KEY}}
# api_key: {SECRET}
api_server:
  keys:
    - name: tablet
      key: {SECRET}
storage: {{url: "postgresql://u:{SECRET}@h/db"}}
my.typo: {{api_key: {SECRET}}}
platforms: {{api_server: {{extra: {{key: {SECRET}}}}}}}
timezone: UTC  # home
"""
    copy = without_secrets(text.encode()).decode()
    assert SECRET not in copy
    assert [part in copy for part in ("# mine", "http://x  # x", "${Y_KEY}", "tablet", "id: 5", "UTC  # home")] == [
        True
    ] * 6


# ---- imports


def test_importing_settings_loads_no_yaml() -> None:
    program = (
        "import sys, hermes.settings.config, hermes.core.home, hermes.server.settings\n"
        "print(sorted({'yaml', 'ruamel', 'ruamel.yaml', 'aiohttp'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
