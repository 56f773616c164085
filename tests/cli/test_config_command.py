"""`hermes config` and `hermes profile`: results, exit codes, JSON, and secrets that stay secret."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes.cli.main import parser_with
from hermes.core import home as homes
from hermes.core.errors import HermesError
from hermes.core.home import Home
from hermes.settings import config, profiles
from hermes.settings.keys import KEYS

SECRET = "sk-very-secret-0123456789"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in list(os.environ):
        if name.startswith(("API_SERVER_", "HERMES_")) or name in ("VISUAL", "EDITOR"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return Home(tmp_path / "home")


def run(home: Home, *argv: str, json: bool = False, **more: Any) -> int:
    args = parser_with({argv[0]}).parse_args(argv, argparse.Namespace(json=json, **more))
    try:
        exit_code: int = args.work(args, home) or 0
    except HermesError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return exit_code


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def document(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def write(home: Home, yaml: str = "", env: str = "") -> None:
    homes.write_private(home.config_file, yaml)
    homes.write_private(home.env_file, env)


# ---- looking


def test_config_show_names_value_and_source(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_SERVER_PORT", "5")
    write(home, "\nmodel: gpt", "API_SERVER_HOST=::")
    assert run(home, "config", "show", provider="openai") == 0
    output = lines(capsys)
    for line in (
        "model.default = gpt  (config.yaml line 2)",
        "model.provider = openai  (flag)",
        "api_server.host = ::  (.env line 1)",
        "api_server.port = 5  (environment API_SERVER_PORT)",
        "agent.max_turns = 90  (default)",
        'agent.context_files = [".hermes.md", "HERMES.md", "AGENTS.md"]  (default)',
    ):
        assert line in output


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "command", [("show",), ("get", "model.api_key"), ("get", "model"), ("get", "providers"), ("check",)]
)
def test_config_never_prints_secrets(
    home: Home, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], as_json: bool
) -> None:
    write(
        home,
        f"model: {{api_key: {SECRET}}}\nproviders: {{x: {{keys: [{SECRET}], headers: {{A: {SECRET}}}}}}}\n"
        f"api_server: {{keys: [{{name: a, key: {SECRET}}}]}}\nstorage: {{url: 'postgresql://u:{SECRET}@h/d'}}\n"
        f"agent: {{max_turns: '${{API_SERVER_KEY}}'}}\n",
        f"API_SERVER_KEY={SECRET}\nAPI_SERVER_KEY {SECRET}\n",
    )
    run(home, "config", *command, json=as_json)
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert printed.out


def test_config_show_json(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    write(home, "timezone: UTC")
    run(home, "config", "show", json=True)
    output = document(capsys)
    assert (output["profile"], output["home"]) == ("default", str(home.path))
    expected = {"key": "timezone", "value": "UTC", "source": "file", "where": "config.yaml line 1"}
    assert expected in output["settings"]


def test_config_show_creates_nothing(home: Home) -> None:
    run(home, "config", "show")
    assert not home.path.exists()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("agent.max_turns", "90"),
        ("terminal.network", "false"),
        ("terminal.workspaces", "[]"),
        ("model", "gpt"),
        ("timezone", ""),
    ],
)
def test_config_get_prints_value_only(home: Home, capsys: pytest.CaptureFixture[str], key: str, text: str) -> None:
    write(home, "model: gpt")
    assert (run(home, "config", "get", key), lines(capsys)) == (0, [text])


def test_config_get_section(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(home, "config", "get", "prompt_caching") == 0
    assert lines(capsys) == ["prompt_caching.cache_ttl = 5m  (default)"]


def test_config_get_json_has_source(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    run(home, "config", "get", "agent.max_turns", json=True)
    assert document(capsys) == {"key": "agent.max_turns", "value": 90, "source": "default", "where": ""}


@pytest.mark.parametrize(
    "command", [("get", "agent.max_turn"), ("set", "agent.max_turn", "1"), ("unset", "agent.max_turn")]
)
def test_config_unknown_setting_names_nearest(
    home: Home, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert run(home, "config", *command) == 5
    printed = capsys.readouterr()
    assert (printed.out, "Did you mean agent.max_turns?" in printed.err) == ("", True)


@pytest.mark.parametrize("command", [("show",), ("get", "model"), ("set", "model", "x"), ("unset", "model")])
def test_config_unreadable_file_is_exit_78(
    home: Home, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    write(home, "a: 1\nb: [\n")
    assert run(home, "config", *command) == 78
    assert capsys.readouterr().err.startswith("config.yaml line 3, column 1: ")


@pytest.mark.parametrize(("action", "name"), [("path", "config.yaml"), ("env-path", ".env")])
def test_config_paths_with_broken_file(home: Home, capsys: pytest.CaptureFixture[str], action: str, name: str) -> None:
    write(home, "a: [")
    assert (run(home, "config", action), lines(capsys)) == (0, [str(home.path / name)])


# ---- checking


def test_config_check_of_valid_settings(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    write(home, "model: gpt")
    assert (run(home, "config", "check"), lines(capsys)) == (0, ["The settings are in order."])


@pytest.mark.parametrize(
    ("yaml", "line"),
    [
        ("agnet: 1", "warn: config.yaml line 1: agnet is not a setting. Did you mean agent? Try: hermes config edit"),
        (
            "api_server: {port: 1}\ngateway: {api_server: {port: 2}}",
            "warn: config.yaml line 2: gateway.api_server.port is not used: api_server.port (line 1) comes first. "
            "Try: hermes config edit",
        ),
        (
            "agent: {max_turns: many}",
            "error: config.yaml line 1: agent.max_turns must be a whole number from 1 to 10000, not 'many'. "
            "Try: hermes config set agent.max_turns 90",
        ),
    ],
)
def test_config_check_reports_problems(home: Home, capsys: pytest.CaptureFixture[str], yaml: str, line: str) -> None:
    write(home, yaml)
    assert (run(home, "config", "check"), lines(capsys)) == (1, [line])


def test_config_check_reports_unreadable_file(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    write(home, "a: [")
    assert run(home, "config", "check", json=True) == 1
    report = document(capsys)
    assert (report["ok"], report["problems"][0]["where"]) == (False, "config.yaml line 2, column 1")


def test_config_check_json(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    write(home, "agnet: 1")
    run(home, "config", "check", json=True)
    problem = document(capsys)["problems"][0]
    assert (problem["severity"], problem["key"], problem["line"], problem["nearest"]) == ("warn", "agnet", 1, "agent")


def test_config_describe_explains_a_setting(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(home, "config", "describe", "model.default") == 0
    assert lines(capsys)[0] == "model.default"
    assert run(home, "config", "describe", "api_server.port") == 0
    output = lines(capsys)
    assert "  default: 8642" in output and "  environment: API_SERVER_PORT" in output
    assert any("from 0 to 65535" in line for line in output)
    assert run(home, "config", "describe", "api_server.drain_seconds") == 0
    assert "  default: that of agent.restart_drain_timeout" in lines(capsys)


def test_config_describe_lists_sections_and_free_names(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(home, "config", "describe", "model") == 0
    assert {line.partition(":")[0] for line in lines(capsys)} >= {"model.default", "model.temperature"}
    assert run(home, "config", "describe", "providers.openai.base_url") == 0
    assert lines(capsys)[0] == "providers.*.base_url"
    assert run(home, "config", "describe", "providers.openai") == 0
    assert "providers.*.api_key: " in capsys.readouterr().out
    assert run(home, "config", "describe", json=True) == 0
    assert len(document(capsys)["settings"]) == len(KEYS)


def test_config_describe_unknown_key(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(home, "config", "describe", "model.temprature") == 5
    assert "model.temperature" in capsys.readouterr().err


# ---- changing


def test_config_set_reports_file(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(home, "config", "set", "agent.max_turns", "12") == 0
    assert lines(capsys) == [f"agent.max_turns is in {home.config_file}."]
    assert config.load(home).agent.max_turns == 12


@pytest.mark.parametrize("value", ["many", "0", "20000"])
def test_config_set_invalid_value_is_usage_error(home: Home, capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert run(home, "config", "set", "agent.max_turns", value) == 2
    assert "must be a whole number from 1 to 10000" in capsys.readouterr().err
    assert not home.config_file.exists()


def test_config_set_secret_goes_to_env_file(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(home, "config", "set", "api_server.key", SECRET, json=True) == 0
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert json.loads(printed.out) == {
        "key": "api_server.key",
        "value": "***",
        "file": str(home.env_file),
        "variable": "API_SERVER_KEY",
    }
    assert home.env_file.read_text() == f"API_SERVER_KEY={SECRET}\n"


def test_config_set_from_stdin(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{SECRET}\n"))
    run(home, "config", "set", "api_server.key", "-")
    assert config.load(home).api_server.key == SECRET


def test_config_set_warns_if_overridden(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_SERVER_PORT", "5")
    run(home, "config", "set", "api_server.port", "6")
    expected = "api_server.port is still taken from API_SERVER_PORT, which comes first.\n"
    assert capsys.readouterr().err == expected


def test_config_unset(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    write(home, "timezone: UTC\nmodel: gpt\n")
    assert run(home, "config", "unset", "timezone") == 0
    assert lines(capsys) == [f"timezone is gone from {home.config_file}."]
    assert home.config_file.read_text() == "model: gpt\n"


def test_config_unset_of_unset_setting(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert (run(home, "config", "unset", "timezone"), capsys.readouterr().err) == (0, "timezone was not set.\n")


# ---- editing


def editor(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """An editor that runs a line of Python with `path` being the file."""
    script = f"from pathlib import Path; import sys; path = Path(sys.argv[1]); {program}"
    monkeypatch.setenv("EDITOR", f'"{sys.executable}" -c "{script}"')


def test_config_edit_saves(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home, "timezone: UTC\n")
    editor(monkeypatch, "path.write_text(path.read_text() + 'model: gpt')")
    assert run(home, "config", "edit") == 0
    assert home.config_file.read_text() == "timezone: UTC\nmodel: gpt"
    assert sorted(p.name for p in home.path.iterdir()) == [".env", "config.yaml"]


def test_config_edit_rejects_unparsable_and_keeps_it_aside(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(home, "timezone: UTC\n")
    editor(monkeypatch, "path.write_text('a: [')")
    assert run(home, "config", "edit") == 78
    assert home.config_file.read_text() == "timezone: UTC\n"
    assert (home.path / "config.rejected.yaml").read_text() == "a: ["
    assert "config.rejected.yaml" in capsys.readouterr().err


def test_config_edit_can_be_retried_on_terminal(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home, "timezone: UTC\n")
    editor(monkeypatch, "path.write_text('model: gpt' if '[' in path.read_text() else 'a: [')")
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert (run(home, "config", "edit"), home.config_file.read_text()) == (0, "model: gpt")


def test_config_edit_without_change_writes_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    editor(monkeypatch, "pass")
    assert (run(home, "config", "edit"), list(home.path.iterdir())) == (0, [])


def test_config_edit_detects_concurrent_change(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home, "timezone: UTC\n")
    editor(monkeypatch, "(path.parent / 'config.yaml').write_text('model: other'); path.write_text('model: mine')")
    assert (run(home, "config", "edit"), home.config_file.read_text()) == (4, "model: other")


@pytest.mark.parametrize("command", ["false", "/no/such/editor"])
def test_config_edit_with_failing_editor(home: Home, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("EDITOR", command)
    assert (run(home, "config", "edit"), list(home.path.iterdir())) == (1, [])


def test_config_edit_without_editor(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert (run(home, "config", "edit"), "EDITOR" in capsys.readouterr().err) == (2, True)


def test_config_edit_warns_of_invalid_values(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    editor(monkeypatch, "path.write_text('agent: {max_turns: many}')")
    assert (run(home, "config", "edit"), "not 'many'" in capsys.readouterr().err) == (0, True)


# ---- profiles


def test_profile_list_marks_current(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    work = profiles.create_profile(home, "work")
    assert run(work, "profile", "list") == 0
    assert lines(capsys) == [f"  default  {home.path}", f"* work  {work.path}"]


def test_profile_list_json(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    run(home, "profile", "list", json=True)
    expected = {"name": "default", "path": str(home.path), "current": True, "sticky": True}
    assert document(capsys) == {"profiles": [expected]}


def test_profile_create(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(home, "profile", "create", "work", json=True) == 0
    path = home.path / "profiles" / "work"
    assert (document(capsys), path.is_dir()) == ({"name": "work", "path": str(path), "cloned_from": None}, True)


@pytest.mark.parametrize(("flags", "secret"), [(["--clone"], False), (["--clone", "--with-secrets"], True)])
def test_profile_create_clones_secrets_on_request(home: Home, flags: list[str], secret: bool) -> None:
    write(home, "model: gpt", f"API_SERVER_KEY={SECRET}")
    assert run(home, "profile", "create", "work", *flags) == 0
    settings = config.load(homes.open_profile(home.path, "work"))
    assert (settings.model.default, bool(settings.api_server.key)) == ("gpt", secret)


@pytest.mark.parametrize("args", [["work", "--with-secrets"], ["Work"], ["default"], ["taken"]])
def test_profile_create_usage_errors(home: Home, args: list[str]) -> None:
    profiles.create_profile(home, "taken")
    assert run(home, "profile", "create", *args) == 2
    assert homes.list_profiles(home) == ["default", "taken"]


def test_profile_use_is_sticky(home: Home) -> None:
    profiles.create_profile(home, "work")
    assert (run(home, "profile", "use", "work"), homes.sticky_profile(home.path)) == (0, "work")


@pytest.mark.parametrize("args", [["use", "x"], ["show", "x"], ["rename", "x", "y"], ["delete", "x", "-y"]])
def test_missing_profile_is_not_found(home: Home, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(home, "profile", *args) == 5
    assert capsys.readouterr().err == "There is no profile 'x'. Try: hermes profile list\n"


def test_profile_show(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    write(home, "model: gpt", "A=1")
    homes.write_private(home.skills / "a" / "b" / "SKILL.md", "")
    assert run(home, "profile", "show", json=True) == 0
    assert document(capsys) == {
        "name": "default",
        "path": str(home.path),
        "current": True,
        "sticky": True,
        "model": "gpt",
        "settings": True,
        "secrets": True,
        "skills": 1,
        "database_bytes": 0,
        "server_running": False,
    }


def test_profile_show_with_broken_settings(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    write(home, "a: [")
    assert run(home, "profile", "show") == 0
    printed = capsys.readouterr()
    assert "model: none" in printed.out.splitlines()
    assert printed.err.startswith("config.yaml line 2")


def test_profile_rename(home: Home) -> None:
    profiles.create_profile(home, "work")
    assert (run(home, "profile", "rename", "work", "job"), homes.list_profiles(home)) == (0, ["default", "job"])


def test_profile_delete_without_terminal_names_flag(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    profiles.create_profile(home, "work")
    assert run(home, "profile", "delete", "work") == 2
    assert capsys.readouterr().err.endswith("Try: hermes profile delete work -y\n")
    assert homes.list_profiles(home) == ["default", "work"]


@pytest.mark.parametrize(
    ("typed", "exit_code", "remaining"), [("work\n", 0, []), ("yes\n", 1, ["work"]), ("", 1, ["work"])]
)
def test_profile_delete_asks_for_name(
    home: Home, monkeypatch: pytest.MonkeyPatch, typed: str, exit_code: int, remaining: list[str]
) -> None:
    profiles.create_profile(home, "work")
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert run(home, "profile", "delete", "work") == exit_code
    assert homes.list_profiles(home) == ["default", *remaining]


def test_profile_delete_with_yes(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    profiles.create_profile(home, "work")
    assert run(home, "profile", "delete", "work", "-y", json=True) == 0
    assert document(capsys) == {"name": "work", "deleted": True}
    assert homes.list_profiles(home) == ["default"]


@pytest.mark.parametrize(
    ("yaml", "key", "named"),
    [
        ("model: {default: m, base_url: 'localhost:8000'}", "model.base_url", "localhost:8000"),
        ("model: {default: m, base_url: 'ftp://user:passw@h/v1'}", "model.base_url", "***"),
        ("providers: {mine: {base_url: 'htp://h/v1'}}", "providers.mine.base_url", "htp://h/v1"),
        ("model: {default: m, provider: opnai}", "model.provider", "Did you mean openai?"),
        ("auxiliary: {vision: {provider: nobody}}", "auxiliary.vision.provider", "nobody"),
        ("fallback_providers: [openai/gpt, opnrouter/x]", "fallback_providers", "Did you mean openrouter?"),
        ("timezone: Europe/Berln", "timezone", "Did you mean Europe/Berlin?"),
    ],
)
def test_check_names_values_that_lead_nowhere(
    yaml: str, key: str, named: str, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    write(home, yaml)
    assert run(home, "config", "check", json=True) == 1
    [problem] = document(capsys)["problems"]
    assert (problem["severity"], problem["key"]) == ("warn", key) and named in problem["message"]
    assert "passw" not in problem["message"]


def test_config_check_accepts_valid_references(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        home,
        "model: {default: m, provider: mine}\nproviders: {mine: {base_url: 'http://[::1]:8000/v1'}}\n"
        "fallback_providers: [openai/gpt, mine]\ntimezone: Europe/Berlin\nauxiliary: {vision: {provider: anthropic}}\n",
    )
    assert run(home, "config", "check") == 0
    assert run(home, "config", "set", "model.base_url", "nonsense") == 0
    assert "model.base_url is no address" in capsys.readouterr().err
