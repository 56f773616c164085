"""`hermes migrate`: what it prints, refuses and writes."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hermes.core.home import Home
from hermes.server.status import hold
from hermes.settings import config
from hermes.store.base import MIGRATION
from hermes.store.stores import open_store, place_of
from hermes.store.tables import TABLES

from .shell import Hermes


@pytest.fixture
def filled_home(home: Home) -> Home:
    with closing(open_store(f"sqlite://{home.state_db}")) as store:
        store.sessions.create_session("s", "cli")
        store.sessions.append_message("s", "user", "hello")
    return home


@pytest.fixture
def target(postgres_database: str) -> str:
    return postgres_database


def password_of(url: str) -> str:
    password = urlsplit(url).password
    assert password
    return password


def messages_in(url: str) -> int:
    with closing(open_store(url)) as store:
        return len(store.sessions.get_messages("s"))


def test_migrate_moves_the_store_of_the_settings(filled_home: Home, target: str, hermes: Hermes) -> None:
    result = hermes("migrate", "--to", target)
    assert result.code == 0, result.err
    assert f"2 rows in {place_of(target)}" in result.out
    assert "storage.url" in result.err
    assert password_of(target) not in result.out + result.err
    assert messages_in(target) == 1
    assert config.load(filled_home).storage.url.endswith("/state.db")


def test_migrate_names_the_address_that_a_file_has_in_the_settings(
    filled_home: Home, hermes: Hermes, tmp_path: Path
) -> None:
    (tmp_path / "copy").mkdir()
    url = f"sqlite://{tmp_path}/copy/state.db"
    assert f"set storage.url to {url}:" in hermes("migrate", "--to", url).err


def test_migrate_json_has_rows_and_digests_by_table(filled_home: Home, target: str, hermes: Hermes) -> None:
    document = hermes("--json", "migrate", "--to", target).json
    assert set(document["tables"]) == {table.name for table in TABLES}
    assert document["tables"]["messages"]["rows"] == 1
    assert len(document["tables"]["messages"]["digest"]) == 64
    assert (document["rows"], document["switched"], document["unchanged"]) == (2, False, False)
    assert hermes("--json", "migrate", "--to", target).json["unchanged"] is True


def test_switch_writes_the_new_address_after_the_copy(filled_home: Home, target: str, hermes: Hermes) -> None:
    result = hermes("migrate", "--to", target, "--switch")
    assert result.code == 0, result.err
    assert password_of(target) not in result.out + result.err
    assert config.load(filled_home).storage.url == target
    assert not filled_home.config_file.exists() or password_of(target) not in filled_home.config_file.read_text()
    listed = hermes("--json", "sessions", "list").json
    assert [session["id"] for session in listed["sessions"]] == ["s"]


def test_migrate_back_to_another_file(filled_home: Home, target: str, hermes: Hermes, tmp_path: Path) -> None:
    assert hermes("migrate", "--to", target, "--switch").code == 0
    (tmp_path / "back").mkdir()
    back = f"sqlite://{tmp_path}/back/state.db"
    result = hermes("sessions", "migrate", "--to", back, "--switch")
    assert result.code == 0, result.err
    assert messages_in(back) == 1
    assert config.load(filled_home).storage.url == back


def test_failed_migration_does_not_switch(filled_home: Home, target: str, hermes: Hermes) -> None:
    with closing(open_store(target)) as store:
        store.sessions.create_session("other", "cli")
    result = hermes("migrate", "--to", target, "--switch")
    assert result.code == 2
    assert "not empty" in result.err and password_of(target) not in result.err
    assert config.load(filled_home).storage.url.endswith("/state.db")


@pytest.mark.parametrize("to", ["postgres", "sqlite"])
def test_unfinished_copy_is_not_served(
    filled_home: Home, target: str, hermes: Hermes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    (tmp_path / "copy").mkdir()
    url = target if to == "postgres" else f"sqlite://{tmp_path}/copy/state.db"
    with closing(open_store(url)) as store:
        store.sessions.set_meta(MIGRATION, json.dumps({"source": str(filled_home.state_db), "table": "", "after": []}))
    monkeypatch.setenv("HERMES_DATABASE_URL", url)
    for args in (["gateway", "run", "--port", "0"], ["sessions", "list"], ["sessions", "export", "s"]):
        result = hermes(*args)
        assert result.code == 78, (args, result.err)
        assert "was interrupted" in result.err and "hermes migrate" in result.err
    result = hermes("migrate", "--from", f"sqlite://{filled_home.state_db}", "--to", url)
    assert result.code == 0, result.err
    assert hermes("sessions", "list").code == 0


def test_served_home_is_refused(filled_home: Home, target: str, hermes: Hermes) -> None:
    with hold(filled_home):
        result = hermes("migrate", "--to", target)
    assert result.code == 4
    assert "holds this home" in result.err


def test_home_of_the_target_file_is_refused_while_served(filled_home: Home, hermes: Hermes, tmp_path: Path) -> None:
    other = Home(tmp_path / "other")
    with hold(other):
        result = hermes("migrate", "--to", f"sqlite://{other.state_db}")
    assert result.code == 4


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--to", "mysql://u:pa55-never-shown@h/db"], 78, "no store of the kind 'mysql'"),
        (["--to", "postgresql://u:pa55-never-shown@127.0.0.1:CLOSED/db"], 69, "out of reach"),
        (["--to", "postgresql://u:pa55-never@shown@127.0.0.1:1/db"], 78, "address of PostgreSQL is not valid"),
        (["--to", "password=pa55-never-shown host=h"], 78, "not an address"),
        (["--to", "postgresql:///"], 78, "storage.url"),
        (["--to", "postgresql://"], 78, "storage.url"),
        (["--to", "sqlite://"], 78, "in memory"),
        (["--to", "sqlite://copy/state.db"], 78, "sqlite:///"),
        (["--from", "sqlite:////nonexistent/state.db", "--to", "sqlite:////tmp/x/state.db"], 5, "no such store"),
        ([], 2, "--to"),
    ],
)
def test_wrong_addresses(
    filled_home: Home, hermes: Hermes, closed_port: int, args: list[str], code: int, message: str
) -> None:
    result = hermes("migrate", *(word.replace("CLOSED", str(closed_port)) for word in args))
    assert result.code == code, result.err
    assert message in result.err
    assert "pa55" not in result.err and "Traceback" not in result.err


def test_unfinished_runs_are_named(filled_home: Home, target: str, hermes: Hermes) -> None:
    from hermes.core.spec import RunSpec

    with closing(open_store(f"sqlite://{filled_home.state_db}")) as store:
        store.runs.create(RunSpec("hello", "s"))
    result = hermes("migrate", "--to", target)
    assert result.code == 0
    assert "1 unfinished run moved too" in result.err


def test_quiet_prints_no_notes(filled_home: Home, target: str, hermes: Hermes) -> None:
    result = hermes("--quiet", "migrate", "--to", target)
    assert (result.code, result.err) == (0, "")


def test_progress_is_shown_on_a_terminal(
    filled_home: Home, target: str, hermes: Hermes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes.cli.migrate_command._SHOWN_EVERY_S", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    result = hermes("migrate", "--to", target)
    assert "\rcopying messages: 1 of 1" in result.err and "\rcomparing messages: 1 of 1" in result.err
    assert "\r" not in result.out
