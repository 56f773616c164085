"""`hermes sessions`: results, exit codes, JSON, questions, secrets, and homes in which nothing is made."""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hermes.cli import session_format, sessions_command, sessions_transfer  # noqa: F401  (declares the actions)
from hermes.cli.command import actions_of
from hermes.cli.main import parser_with
from hermes.core import formatting
from hermes.core.errors import HermesError
from hermes.core.home import Home, write_private
from hermes.store.leases import Leases, this_process
from hermes.store.sessions import SessionDB
from hermes.store.sqlite import maintenance
from hermes.store.sqlite.schema import MIGRATIONS

SECRET = "sk-very-secret-0123456789"
DAY = 86_400.0
Capture = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return Home(tmp_path / "home")


@pytest.fixture
def db(home: Home) -> Iterator[SessionDB]:
    """Three sessions: two whose ids begin alike, and one that is archived."""
    with closing(SessionDB(home.state_db)) as db:
        create_conversation(db, "20260101_a", title="First steps", model="m-large", cwd="/work/a")
        create_conversation(db, "20260102_b", source="api_server", text="What about gardens?")
        create_conversation(db, "old", title="Put away")
        db.update_session("old", archived=True)
        yield db


def create_conversation(
    db: SessionDB, session_id: str, *, source: str = "cli", text: str = "Hello world", **fields: Any
) -> None:
    db.create_session(session_id, source, **fields)
    db.append_message(session_id, "user", text)
    call = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    db.append_message(session_id, "assistant", "I look.", tool_calls=[call], reasoning="Look first.")
    db.append_message(session_id, "tool", "a.txt\n```\nb.txt", tool_name="terminal", tool_call_id="c1")
    db.append_message(session_id, "assistant", "Two files.")


def run(home: Home, *argv: str, json: bool = False) -> int:
    args = parser_with({"sessions"}).parse_args(["sessions", *argv], argparse.Namespace(json=json))
    try:
        exit_code: int = args.work(args, home) or 0
        return exit_code
    except HermesError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def lines(capsys: Capture) -> list[str]:
    return capsys.readouterr().out.splitlines()


def document(capsys: Capture) -> Any:
    return json.loads(capsys.readouterr().out)


def ids(db: SessionDB) -> set[str]:
    return {session["id"] for session in db.list_sessions(limit=1000, include_children=True, archived="all")}


def alter(home: Home, sql: str) -> None:
    with closing(sqlite3.connect(home.state_db)) as connection, connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        connection.execute(sql)


def end(db: SessionDB, home: Home, session_id: str, days: float) -> None:
    """Ended, and left alone for so many days."""
    db.end_session(session_id, "cli_close")
    alter(home, f"UPDATE sessions SET last_active = {time.time() - days * DAY} WHERE id = '{session_id}'")


# ---- a home without a database


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("args", [["list"], ["search", "x"], ["stats"], ["export"], ["prune"], ["prune", "-y"]])
def test_sessions_commands_without_database_create_nothing(
    home: Home, capsys: Capture, args: list[str], as_json: bool
) -> None:
    assert run(home, *args, json=as_json) == 0
    printed = capsys.readouterr()
    assert printed.err and not home.path.exists()
    if as_json:
        assert isinstance(json.loads(printed.out), dict)


@pytest.mark.parametrize(
    "args",
    [
        ["show", "x"],
        ["rename", "x", "y"],
        ["fork", "x"],
        ["archive", "x"],
        ["delete", "x", "-y"],
        ["export", "x"],
        ["optimize"],
        ["backup", "copy.db"],
        ["repair"],
    ],
)
def test_sessions_commands_without_database_find_none(home: Home, capsys: Capture, args: list[str]) -> None:
    assert run(home, *args) == 5
    printed = capsys.readouterr()
    assert printed.out == "" and "Try: " in printed.err
    assert not home.path.exists()


# ---- which session


@pytest.mark.parametrize("text", ["20260101_a", "20260101", "First steps"])
def test_session_by_id_prefix_or_title(home: Home, db: SessionDB, capsys: Capture, text: str) -> None:
    assert (run(home, "show", text, json=True), document(capsys)["id"]) == (0, "20260101_a")


@pytest.mark.parametrize(
    "args", [["show", "2026"], ["delete", "old", "2026", "-y"], ["archive", "2026"], ["export", "2026"]]
)
def test_ambiguous_session_prefix_lists_candidates(home: Home, db: SessionDB, capsys: Capture, args: list[str]) -> None:
    assert run(home, *args) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "20260101_a  First steps" in printed.err and "20260102_b  What about" in printed.err
    assert len(ids(db)) == 3 and not db.get_session("20260101_a")["archived"]  # type: ignore[index]


@pytest.mark.parametrize(
    "args",
    [["show", "x"], ["show", ""], ["rename", "x", "y"], ["fork", "x"], ["archive", "old", "x"], ["delete", "x", "-y"]],
)
def test_unknown_session_is_not_found(home: Home, db: SessionDB, capsys: Capture, args: list[str]) -> None:
    assert run(home, *args) == 5
    assert capsys.readouterr().err.endswith("Try: hermes sessions list --all\n")


# ---- looking


def test_sessions_list_line_format(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "list") == 0
    first, second = lines(capsys)
    moment = r"\d{4}-\d\d-\d\d \d\d:\d\d"
    assert re.fullmatch(rf"20260102_b  What about gardens\?  api_server  - +4 messages  {moment}", first)
    assert re.fullmatch(rf"20260101_a  First steps +cli +m-large  4 messages  {moment}", second)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ["20260102_b", "20260101_a"]),
        (["--all"], ["old", "20260102_b", "20260101_a"]),
        (["--source", "cli"], ["20260101_a"]),
        (["--workspace", "/work/a/../a"], ["20260101_a"]),
        (["--search", "steps"], ["20260101_a"]),
        (["--limit", "1"], ["20260102_b"]),
    ],
)
def test_sessions_list_filters(
    home: Home, db: SessionDB, capsys: Capture, args: list[str], expected: list[str]
) -> None:
    assert run(home, "list", *args, json=True) == 0
    listing = document(capsys)
    assert [session["id"] for session in listing["sessions"]] == expected
    assert listing["more"] is ("--limit" in args)


def test_sessions_list_fits_terminal_width(db: SessionDB) -> None:
    create_conversation(db, "long", title="A title that is much longer than there is room for")
    wide = session_format.session_lines(db.list_sessions())
    narrow = session_format.session_lines(db.list_sessions(), 80)
    assert max(map(len, wide)) > 80 >= max(map(len, narrow))
    assert "A title that is much longer than there is room for" in wide[0]


def test_sessions_list_hints_at_more(home: Home, db: SessionDB, capsys: Capture) -> None:
    run(home, "list", "--limit", "1")
    assert capsys.readouterr().err == "There are more. Try: hermes sessions list --limit 20\n"


def test_json_times_are_iso(home: Home, db: SessionDB, capsys: Capture) -> None:
    run(home, "show", "old", json=True)
    output = document(capsys)
    for text in (output["started_at"], output["last_active"], output["messages"][0]["timestamp"]):
        assert datetime.fromisoformat(text).tzinfo is not None
    assert output["ended_at"] is None


def test_out_of_range_time_is_unknown() -> None:
    assert (formatting.local(1e300), formatting.iso(float("inf"))) == ("?", None)


def test_sessions_show_transcript(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "show", "First steps") == 0
    output = lines(capsys)
    for line in ("id: 20260101_a", "title: First steps", "folder: /work/a", "    Hello world", "    Two files."):
        assert line in output
    assert '    -> terminal {"command": "ls"}' in output
    assert "    (reasoning) Look first." not in output


def test_sessions_show_last_messages(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "show", "old", "--messages", "1", json=True) == 0
    assert [message["content"] for message in document(capsys)["messages"]] == ["Two files."]


def test_sessions_show_hints_at_more(home: Home, db: SessionDB, capsys: Capture) -> None:
    for number in range(20):
        db.append_message("old", "user", f"{number}")
    run(home, "show", "old")
    assert capsys.readouterr().err == "These are the last 20 of 24 messages. Try: --messages 24\n"


def test_sessions_show_truncates_unless_full(home: Home, db: SessionDB, capsys: Capture) -> None:
    db.append_message("old", "user", "word " * 1000 + "the end")
    run(home, "show", "old")
    assert "the end" not in capsys.readouterr().out
    run(home, "show", "old", "--full")
    printed = capsys.readouterr().out
    assert "the end" in printed and "(reasoning) Look first." in printed


def test_sessions_show_full_includes_rewound_and_prompt(home: Home, db: SessionDB, capsys: Capture) -> None:
    db.update_session("old", system_prompt="Be kind.")
    [first, *_] = db.get_messages("old")
    db.rewind_to_message("old", first["id"])
    run(home, "show", "old", json=True)
    output = document(capsys)
    assert (output["messages"], "system_prompt" in output) == ([], False)
    run(home, "show", "old", "--full", json=True)
    output = document(capsys)
    assert (len(output["messages"]), output["system_prompt"]) == (4, "Be kind.")


def test_sessions_output_has_no_terminal_escapes(home: Home, db: SessionDB, capsys: Capture) -> None:
    create_conversation(db, "red", text="\x1b[31m red\x9b0m")
    for args in (["show", "red"], ["list"], ["search", "red"], ["export", "red", "--format", "md"]):
        run(home, *args)
        printed = capsys.readouterr().out
        assert "[31m " in printed and not re.search("[\x1b\x9b]", printed)


def test_sessions_search_hits_with_context(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "search", "gardens") == 0
    head, hit, after = lines(capsys)
    assert head.startswith("20260102_b  [5] user, ")
    assert (hit, after) == ("  > What about >>>gardens<<<?", "    assistant: I look.")


def test_sessions_search_json(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "search", "hello", "--limit", "1", json=True) == 0
    report = document(capsys)
    assert (len(report["hits"]), report["complete"]) == (1, True)
    assert datetime.fromisoformat(report["hits"][0]["session_started"])


def test_sessions_search_without_hit(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert (run(home, "search", "unheard"), capsys.readouterr().err) == (0, "Nothing was found.\n")


def test_sessions_search_too_long_query_is_usage_error(home: Home, db: SessionDB) -> None:
    assert run(home, "search", "x" * 3000) == 2


@pytest.mark.parametrize("damage", ["DROP TABLE messages_fts", "UPDATE messages_fts_data SET block = x'ffffffffffff'"])
def test_sessions_search_rebuilds_damaged_index(home: Home, capsys: Capture, damage: str) -> None:
    with closing(SessionDB(home.state_db)) as db:
        create_conversation(db, "a")
    alter(home, damage)
    assert (run(home, "search", "hello", json=True), len(document(capsys)["hits"])) == (0, 1)


@pytest.mark.parametrize("args", [["list"], ["show", "old"], ["search", "hello"], ["stats"], ["export"]])
def test_sessions_read_commands_change_nothing(home: Home, args: list[str]) -> None:
    with closing(SessionDB(home.state_db)) as db:
        create_conversation(db, "old")
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in home.path.iterdir()}
    assert run(home, *args) == 0
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in home.path.iterdir()} == before


def test_sessions_migrates_older_database(home: Home, capsys: Capture) -> None:
    write_private(home.state_db, b"")
    for sql in (*MIGRATIONS[0], "PRAGMA user_version=1"):
        alter(home, sql)
    assert (run(home, "list", json=True), document(capsys)["sessions"]) == (0, [])


@pytest.mark.parametrize("args", [["list"], ["show", "a"], ["search", "a"], ["stats"], ["export"], ["optimize"]])
def test_sessions_damaged_database_suggests_repair(home: Home, capsys: Capture, args: list[str]) -> None:
    write_private(home.state_db, b"hello\n" * 2000)
    assert run(home, *args) == 74
    assert "hermes sessions repair" in capsys.readouterr().err


# ---- secrets


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "args", [["list"], ["show", "leak"], ["search", "hello"], ["export"], ["rename", "leak", f"it {SECRET}"]]
)
def test_sessions_output_is_redacted(
    home: Home, capsys: Capture, db: SessionDB, args: list[str], as_json: bool
) -> None:
    write_private(home.env_file, "API_SERVER_KEY=plain-but-secret\n")
    create_conversation(db, "leak", text="hello, the key is plain-but-secret")
    run(home, *args, json=as_json)
    printed = capsys.readouterr()
    assert "plain-but-secret" not in printed.out + printed.err
    assert printed.out


def test_sessions_export_with_secrets(home: Home, capsys: Capture, db: SessionDB) -> None:
    write_private(home.env_file, f"API_SERVER_KEY={SECRET}\n")
    create_conversation(db, "leak", text=f"the key is {SECRET}")
    assert run(home, "export", "leak", "--with-secrets") == 0
    assert SECRET in capsys.readouterr().out


def test_sessions_with_unreadable_settings(home: Home, capsys: Capture, db: SessionDB) -> None:
    write_private(home.config_file, "a: [")
    create_conversation(db, "leak", text=f"the key is {SECRET}")
    assert run(home, "show", "leak") == 0
    printed = capsys.readouterr()
    assert "the key is" in printed.out and SECRET not in printed.out
    assert printed.err.startswith("config.yaml line 2")
    assert run(home, "export", "leak") == 78


# ---- changing


def test_sessions_rename(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert (run(home, "rename", "20260102", "  The   garden "), lines(capsys)[0][:22]) == (0, "20260102_b  The garden")
    assert db.get_session("20260102_b")["title"] == "The garden"  # type: ignore[index]


@pytest.mark.parametrize("args", [["rename", "20260102", "First steps"], ["rename", "old", "x" * 101]])
def test_sessions_rename_invalid_title_is_usage_error(home: Home, db: SessionDB, args: list[str]) -> None:
    assert run(home, *args) == 2


def test_sessions_fork(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "fork", "First steps", json=True) == 0
    fork = document(capsys)
    assert (fork["title"], fork["parent_session_id"], fork["message_count"]) == ("First steps #2", "20260101_a", 4)


def test_sessions_fork_at_message(home: Home, db: SessionDB, capsys: Capture) -> None:
    [first, *_] = db.get_messages("old")
    assert run(home, "fork", "old", "--at", str(first["id"]), "--title", "Again", json=True) == 0
    fork = document(capsys)
    assert (fork["title"], fork["message_count"]) == ("Again", 1)


@pytest.mark.parametrize(
    ("args", "exit_code"), [(["--at", "999"], 5), (["--title", "Put away"], 2), (["--title", "x" * 101], 2)]
)
def test_failed_sessions_fork_leaves_nothing(home: Home, db: SessionDB, args: list[str], exit_code: int) -> None:
    assert (run(home, "fork", "20260101_a", *args), len(ids(db))) == (exit_code, 3)


def test_sessions_archive_and_unarchive(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "archive", "20260101_a", "20260102_b") == 0
    assert all(line.endswith("  archived") for line in lines(capsys))
    assert db.list_sessions() == []
    assert run(home, "archive", "First steps", "old", "--undo", json=True) == 0
    assert [session["archived"] for session in document(capsys)["sessions"]] == [False, False]


# ---- deleting


def test_sessions_delete_without_terminal_names_flag(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "delete", "old") == 2
    printed = capsys.readouterr()
    assert "  old  Put away  " in printed.err and printed.err.endswith("Try: the same with -y\n")
    assert len(ids(db)) == 3


@pytest.mark.parametrize(("typed", "exit_code", "remaining"), [("y\n", 0, 1), ("n\n", 1, 3), ("\n", 1, 3), ("", 1, 3)])
def test_sessions_delete_asks_for_confirmation(
    home: Home, db: SessionDB, monkeypatch: pytest.MonkeyPatch, typed: str, exit_code: int, remaining: int
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert (run(home, "delete", "old", "Put away", "20260101"), len(ids(db))) == (exit_code, remaining)


def test_sessions_delete_with_yes(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "delete", "old", "-y", json=True) == 0
    printed = capsys.readouterr()
    assert (json.loads(printed.out), printed.err) == ({"deleted": ["old"]}, "")


def test_sessions_delete_of_busy_session_needs_force(home: Home, db: SessionDB, capsys: Capture) -> None:
    Leases(db.engine).acquire("session:old", this_process(), 60)
    assert run(home, "delete", "20260101", "old", "-y") == 4
    assert capsys.readouterr().err.endswith("Nothing was deleted. Try: the same with --force\n")
    assert len(ids(db)) == 3
    assert (run(home, "delete", "20260101", "old", "-y", "--force"), ids(db)) == (0, {"20260102_b"})


@pytest.mark.parametrize(
    ("args", "removed"),
    [
        ([], {"20260101_a"}),
        (["--older-than", "49h"], {"20260101_a", "old"}),
        (["--older-than", "2w"], {"20260101_a"}),
        (["--older-than", "1d", "--archived"], {"old"}),
        (["--older-than", "1d", "--no-archived"], {"20260101_a"}),
        (["--source", "api_server"], set()),
        (["--workspace", "/work"], {"20260101_a"}),
        (["--older-than", "1d", "--title", "away"], {"old"}),
        (["--model", "large"], {"20260101_a"}),
        (["--older-than", "1d", "--max-messages", "3"], set()),
    ],
)
def test_sessions_prune_filters(home: Home, db: SessionDB, capsys: Capture, args: list[str], removed: set[str]) -> None:
    end(db, home, "20260101_a", 100)
    end(db, home, "old", 3)
    assert run(home, "prune", *args, "--dry-run", json=True) == 0
    report = document(capsys)
    assert (report["dry_run"], set(report["sessions"]), len(ids(db))) == (True, removed, 3)
    assert run(home, "prune", *args, "-y", json=True) == 0
    assert set(document(capsys)["sessions"]) == removed
    assert len(ids(db)) == 3 - len(removed)


def test_sessions_prune_gives_space_back(home: Home, db: SessionDB) -> None:
    for _ in range(400):
        db.append_message("old", "tool", "x" * 4000, synthetic=True)
    end(db, home, "old", 100)
    before = db.engine.read(lambda tx: tx.value("PRAGMA page_count"))
    assert run(home, "prune", "-y") == 0
    assert db.engine.read(lambda tx: tx.value("PRAGMA page_count")) < before / 2


def test_sessions_prune_without_terminal_names_flag(home: Home, db: SessionDB, capsys: Capture) -> None:
    end(db, home, "old", 100)
    assert run(home, "prune") == 2
    printed = capsys.readouterr()
    assert "  old  Put away  " in printed.err and printed.err.endswith("Try: the same with -y\n")
    assert len(ids(db)) == 3


def test_sessions_prune_asks_for_confirmation(
    home: Home, db: SessionDB, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(db, home, "old", 100)
    monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
    assert (run(home, "prune"), len(ids(db))) == (1, 3)
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    assert (run(home, "prune"), lines(capsys), len(ids(db))) == (0, ["1 session deleted."], 2)


def test_sessions_prune_skips_busy_sessions(home: Home, db: SessionDB) -> None:
    end(db, home, "old", 100)
    db.create_session("child", "subagent", parent_session_id="old", kind="delegate")
    Leases(db.engine).acquire("session:child", this_process(), 60)
    assert run(home, "prune", "-y") == 0
    assert "old" in ids(db)


@pytest.mark.parametrize("age", ["90", "d", "-1d", "1y", "1e3d", "nand"])
def test_sessions_prune_age_without_unit_is_usage_error(home: Home, age: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(home, "prune", f"--older-than={age}")
    assert caught.value.code == 2


# ---- export


def test_sessions_export_json_lines_oldest_first(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "export") == 0
    items = [json.loads(line) for line in lines(capsys)]
    assert [item["id"] for item in items] == ["20260101_a", "20260102_b", "old"]
    assert items[0] == db.export_session("20260101_a")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["old", "20260101"], ["old", "20260101_a"]),
        (["old", "20260101", "--no-archived"], ["20260101_a"]),
        (["--archived"], ["old"]),
        (["--source", "api_server"], ["20260102_b"]),
        (["--workspace", "/work"], ["20260101_a"]),
        (["--title", "STEPS"], ["20260101_a"]),
        (["--model", "large"], ["20260101_a"]),
        (["--max-messages", "3"], []),
        (["--older-than", "1d"], []),
    ],
)
def test_sessions_export_filters(
    home: Home, db: SessionDB, capsys: Capture, args: list[str], expected: list[str]
) -> None:
    assert run(home, "export", *args, json=True) == 0
    assert [item["id"] for item in document(capsys)["sessions"]] == expected


def test_sessions_export_pagination(
    home: Home, db: SessionDB, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_transfer, "_PAGE", 2)
    create_conversation(db, "fourth")
    run(home, "export")
    assert len(lines(capsys)) == 4


def test_sessions_export_markdown(home: Home, db: SessionDB, capsys: Capture) -> None:
    [first, *_] = db.get_messages("20260102_b")
    db.archive_and_compact("20260102_b", [{"role": "user", "content": "Summary"}])
    assert run(home, "export", "20260101", "20260102", "--format", "md") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# First steps\n\n- Session: 20260101_a\n")
    assert "\n---\n\n# What about gardens?\n" in printed
    assert "````\na.txt\n```\nb.txt\n````\n" in printed
    assert "Summary" not in printed and first["content"] in printed


def test_sessions_export_file_is_private_and_not_overwritten(
    home: Home, db: SessionDB, capsys: Capture, tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    assert run(home, "export", "-o", str(file), json=True) == 0
    assert document(capsys) == {"file": str(file), "format": "jsonl", "sessions": 3}
    assert file.stat().st_mode & 0o777 == 0o600
    assert run(home, "export", "old", "-o", str(file)) == 2
    assert "--force" in capsys.readouterr().err
    assert len(file.read_text().splitlines()) == 3
    assert run(home, "export", "old", "-o", str(file), "--force") == 0
    assert len(file.read_text().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["out.jsonl"]


@pytest.mark.parametrize(("name", "exit_code"), [("folder", 2), ("no/such/folder/file", 1)])
def test_sessions_export_to_invalid_path_leaves_nothing(
    home: Home, db: SessionDB, tmp_path: Path, name: str, exit_code: int
) -> None:
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    assert (run(home, "export", "--force", "-o", str(tmp_path / name)), sorted(tmp_path.iterdir())) == (
        exit_code,
        before,
    )


def test_failed_sessions_export_leaves_no_file(home: Home, db: SessionDB, tmp_path: Path) -> None:
    assert run(home, "export", "unknown", "-o", str(tmp_path / "out")) == 5
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_sessions_export_markdown_as_json_is_usage_error(home: Home, db: SessionDB) -> None:
    assert run(home, "export", "--format", "md", json=True) == 2


# ---- import


def import_file(tmp_path: Path, *items: Any) -> str:
    file = tmp_path / "in.jsonl"
    file.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
    return str(file)


def session(session_id: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi", "timestamp": 1.0}]
    return {"format": "hermes.session/1", "id": session_id, "messages": messages, **fields}


def test_sessions_export_import_round_trip(home: Home, db: SessionDB, capsys: Capture, tmp_path: Path) -> None:
    file, other = tmp_path / "out.jsonl", Home(tmp_path / "other")
    run(home, "export", "-o", str(file))
    capsys.readouterr()
    assert run(other, "import", str(file), json=True) == 0
    none = {"skipped": 0, "detached": 0, "refused": 0, "errors": []}
    assert document(capsys) == {"ok": True, "imported": 3, **none}
    with closing(SessionDB(other.state_db)) as there:
        assert there.export_session("old") == db.export_session("old")
    assert run(other, "import", str(file)) == 0
    assert lines(capsys) == ["0 sessions imported, 3 skipped: already there."]


def test_sessions_import_from_stdin(home: Home, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps(session("a")).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + data + b"\n\n")))
    assert (run(home, "import", "-"), lines(capsys)) == (0, ["1 session imported, 0 skipped: already there."])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "This is not JSON: "),
        ("[" * 100_000, "This is not JSON"),
        ('{"format": NaN}', "NaN is not a number"),
        ("7", "A session is an object."),
        ('{"format": "other"}', "`format` is not 'hermes.session/1'."),
        (json.dumps(session("../x")), "A session id holds no "),
        (json.dumps(session("b", title="x" * 101)), "A title has at most 100 characters"),
    ],
)
def test_sessions_import_invalid_line_rejects_its_batch(
    home: Home, capsys: Capture, tmp_path: Path, line: str, message: str
) -> None:
    assert run(home, "import", import_file(tmp_path, session("a"), "", line, session("c"))) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("line 3: ") and message in printed.err
    assert printed.out.splitlines()[1] == "3 sessions refused: one fault keeps its whole batch out."
    with closing(SessionDB(home.state_db)) as db:
        assert ids(db) == set()


def test_sessions_import_rejects_invalid_utf8(home: Home, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'{"id": "\xff"}\n')
    assert (run(home, "import", str(tmp_path / "in")), capsys.readouterr().err) == (1, "line 1: This is not UTF-8.\n")


def test_sessions_import_rejects_out_of_range_number(home: Home, capsys: Capture, tmp_path: Path) -> None:
    assert run(home, "import", import_file(tmp_path, session("a"), session("b", message_count=10**30))) == 1
    assert capsys.readouterr().err.startswith("line ")
    with closing(SessionDB(home.state_db)) as db:
        assert ids(db) == set()


def test_sessions_import_fault_affects_own_batch_only(
    home: Home, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_transfer, "_BATCH_SESSIONS", 2)
    items = [session("a"), session("b"), session("c"), {"id": "d"}, session("e", parent_session_id="gone")]
    assert run(home, "import", import_file(tmp_path, *items), json=True) == 1
    report = document(capsys)
    assert (report["ok"], report["imported"], report["refused"], report["detached"]) == (False, 3, 2, 1)
    assert [error["line"] for error in report["errors"]] == [4]
    with closing(SessionDB(home.state_db)) as db:
        assert ids(db) == {"a", "b", "e"}


def test_sessions_import_batches_stay_within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hermes.core.limits import IMPORT_BYTES_MAX, IMPORT_SESSIONS_MAX

    assert sessions_transfer._BATCH_SESSIONS <= IMPORT_SESSIONS_MAX
    assert sessions_transfer._BATCH_BYTES < IMPORT_BYTES_MAX
    monkeypatch.setattr(sessions_transfer, "_BATCH_BYTES", 10)
    batches = list(
        sessions_transfer._batches(
            sessions_transfer._line_entries([b'"1234"\n', b"2\n", b'"a line that is too long"\n', b"4\n"])
        )
    )
    assert [[number for number, _, _ in batch] for batch in batches] == [[1, 2], [3], [4]]


def test_sessions_import_batch_message_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from hermes.core.limits import IMPORT_ROWS_AT_ONCE_MAX

    assert sessions_transfer._BATCH_MESSAGES <= IMPORT_ROWS_AT_ONCE_MAX
    monkeypatch.setattr(sessions_transfer, "_BATCH_MESSAGES", 3)
    data = [json.dumps({"messages": [{}] * count}).encode() for count in (2, 1, 1, 9, 0, 3)]
    batches = list(sessions_transfer._batches(sessions_transfer._line_entries([*data, b'{"messages": 7}', b"["])))
    assert [[number for number, _, _ in batch] for batch in batches] == [[1, 2], [3], [4], [5, 6, 7, 8]]


@pytest.mark.parametrize(("name", "exit_code"), [("missing", 5), (".", 1)])
def test_sessions_import_of_unreadable_file_creates_no_database(
    home: Home, tmp_path: Path, name: str, exit_code: int
) -> None:
    assert (run(home, "import", str(tmp_path / name)), home.path.exists()) == (exit_code, False)


# ---- care


def test_sessions_stats(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "stats", json=True) == 0
    report = document(capsys)
    counted = {name: report[name] for name in ("sessions", "open", "archived", "messages", "blobs", "runs")}
    assert counted == {"sessions": 3, "open": 3, "archived": 1, "messages": 12, "blobs": 0, "runs": 0}
    assert set(report["parts"]) == {"rows", "index", "blobs", "logs", "other", "free"}
    assert sum(report["parts"].values()) == report["bytes"] > 0


def test_sessions_stats_separate_blobs_and_index(home: Home, db: SessionDB, capsys: Capture) -> None:
    run(home, "stats", json=True)
    before = document(capsys)["parts"]
    picture = "data:image/png;base64," + "QUJD" * 100_000
    db.append_message("old", "user", [{"type": "image_url", "image_url": {"url": picture}}])
    run(home, "stats", json=True)
    after = document(capsys)["parts"]
    assert after["blobs"] - before["blobs"] > 250_000
    assert (after["index"], after["logs"]) == (before["index"], before["logs"])


def test_sessions_stats_without_dbstat() -> None:
    class Plain:
        def rows(self, sql: str) -> list[Any]:
            return sqlite3.connect(":memory:").execute(sql.replace("dbstat", "no_dbstat")).fetchall()

    assert maintenance._part_sizes(Plain(), 0) == {}  # type: ignore[arg-type]


def test_sessions_stats_text(home: Home, db: SessionDB, capsys: Capture) -> None:
    assert run(home, "stats") == 0
    output = lines(capsys)
    assert "sessions: 3" in output and output[-1].startswith(f"all of {home.state_db}: ")


def test_sessions_optimize(home: Home, db: SessionDB, capsys: Capture) -> None:
    create_conversation(db, "big", text="x" * 1_000_000)
    db.delete_session("big")
    assert run(home, "optimize", json=True) == 0
    report = document(capsys)
    assert report["bytes_after"] < report["bytes_before"]
    assert (run(home, "optimize"), " before, " in capsys.readouterr().out) == (0, True)


def test_sessions_backup(home: Home, db: SessionDB, capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "copy.db"
    assert run(home, "backup", str(file), json=True) == 0
    assert document(capsys) == {"file": str(file), "bytes": file.stat().st_size}
    assert file.stat().st_mode & 0o777 == 0o600
    with closing(SessionDB(file, read_only=True)) as copy:
        assert ids(copy) == ids(db)
    assert run(home, "backup", str(file)) == 2


def test_sessions_backup_failure(home: Home, db: SessionDB, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(home, "backup", str(tmp_path / "file" / "copy.db")) == 1
    assert "The copy cannot be made: " in capsys.readouterr().err


@pytest.mark.parametrize("args", [["repair"], ["repair", "--deep"]])
def test_sessions_repair_of_healthy_file(home: Home, capsys: Capture, args: list[str]) -> None:
    with closing(SessionDB(home.state_db)) as db:
        create_conversation(db, "a")
    before = home.state_db.read_bytes()
    assert run(home, *args) == 0
    assert lines(capsys) == [f"No fault was found in {home.state_db}; nothing was done to it."]
    assert home.state_db.read_bytes() == before
    assert [path.name for path in home.path.iterdir()] == ["state.db"]


def test_sessions_repair_rebuilds_index(home: Home, capsys: Capture) -> None:
    with closing(SessionDB(home.state_db)) as db:
        create_conversation(db, "a")
    alter(home, "DELETE FROM messages_fts_data")
    assert run(home, "repair", json=True) == 0
    report = document(capsys)
    assert report["sound"] and "has been made anew" in report["notices"][0]


def corrupt(home: Home) -> None:
    """Noise in the pages in which one session's messages stand."""
    with closing(SessionDB(home.state_db)) as db:
        for number in range(40):
            create_conversation(db, f"s{number:02}", text=f"number {number} " + "x" * 3000)
    data = bytearray(home.state_db.read_bytes())
    at = data.index(b"number 20 x") // 4096 * 4096
    data[at : at + 4096] = b"\xa5" * 4096
    home.state_db.write_bytes(data)


def test_sessions_repair_saves_readable_rows(home: Home, capsys: Capture) -> None:
    corrupt(home)
    before = home.state_db.read_bytes()
    assert run(home, "repair", json=True) == 0
    report = document(capsys)
    assert (report["sound"], report["repair"]["repaired"], report["left"]) == (False, True, [])
    assert report["faults"] and report["repair"]["rows"] > 0
    assert Path(report["repair"]["backup_path"]).read_bytes() == before
    assert run(home, "repair", "--deep") == 0


def test_sessions_repair_text(home: Home, capsys: Capture) -> None:
    corrupt(home)
    assert run(home, "repair") == 0
    first, *missing, last = lines(capsys)
    assert first.startswith("What could be read is in a new file. It holds ") and first.endswith("sessions.")
    assert [line.partition(":")[0] for line in missing] == ["Rows of these tables could not be read"]
    assert last.startswith("A copy of the database as it was: ")


def test_sessions_repair_of_non_database_fails(home: Home, capsys: Capture) -> None:
    write_private(home.state_db, b"hello\n" * 2000)
    assert run(home, "repair") == 74
    assert capsys.readouterr().out.startswith("It could not be repaired: ")
    assert home.state_db.read_bytes() == b"hello\n" * 2000


def test_sessions_repair_reports_remaining_faults(home: Home, capsys: Capture) -> None:
    with closing(SessionDB(home.state_db)) as db:
        create_conversation(db, "a")
    alter(home, "DELETE FROM sessions")
    exit_code = run(home, "repair", json=True)
    report = document(capsys)
    with closing(SessionDB(home.state_db)) as db:
        assert db.check() == report["left"]
    assert exit_code == (74 if report["left"] else 0)


def test_sessions_repair_refuses_while_server_runs(home: Home, db: SessionDB, capsys: Capture) -> None:
    with open(home.lock_file, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(home, "repair") == 4
    assert capsys.readouterr().err.endswith("Try: hermes gateway stop\n")


def test_sessions_repair_refuses_open_database(home: Home, db: SessionDB, capsys: Capture) -> None:
    alter(home, "DELETE FROM sessions WHERE id = 'old'")
    assert run(home, "repair") == 4
    assert capsys.readouterr().out == ""


# ---- the command itself


def command(home: Home, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HERMES_HOME": str(home.path), "HOME": str(home.path)}
    return subprocess.run(
        [sys.executable, "-m", "hermes", "sessions", *args],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,
    )


def test_sessions_without_action_lists_them(home: Home) -> None:
    result, listed = command(home), command(home, "list")
    assert result.returncode == 0 and (result.stdout, result.stderr) == (listed.stdout, listed.stderr)


@pytest.mark.parametrize("action", actions_of("sessions"))
def test_sessions_actions_have_help(home: Home, capsys: Capture, action: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(home, action, "--help")
    assert caught.value.code == 0
    assert not home.path.exists()


def test_sessions_help_loads_no_database(home: Home) -> None:
    code = (
        "import sys; from hermes.cli.main import main\n"
        "try: main(['sessions', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'sqlite3', 'msgspec', 'yaml', 'ruamel', 'hermes.store.sessions'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_sessions_command_end_to_end(home: Home) -> None:
    with closing(SessionDB(home.state_db)) as db:
        create_conversation(db, "a", title="One")
    listed = command(home, "list", "--json")
    assert [session["id"] for session in json.loads(listed.stdout)["sessions"]] == ["a"]
    assert "    Two files." in command(home, "show", "One").stdout.splitlines()
    assert command(home, "delete", "a").returncode == 2
    assert command(home, "delete", "a", "-y").stdout == "1 session deleted.\n"
    assert command(home, "show", "a").returncode == 5


def test_sessions_export_broken_pipe_is_quiet(home: Home) -> None:
    with closing(SessionDB(home.state_db)) as db:
        for number in range(20):
            create_conversation(db, f"s{number}", text="x" * 100_000)
    environ = {"PATH": os.environ["PATH"], "HERMES_HOME": str(home.path), "HOME": str(home.path)}
    command = [sys.executable, "-m", "hermes", "sessions", "export"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stderr is not None
        program.stdout.readline()
        program.stdout.close()
        assert (program.stderr.read(), program.wait(60)) == ("", 0)


def test_import_of_a_database_has_a_hint(home: Home, db: SessionDB, capsys: Capture, tmp_path: Path) -> None:
    assert run(Home(tmp_path / "other"), "import", str(home.state_db)) == 2
    errors = capsys.readouterr().err
    assert (
        "This is a database, not an export." in errors and "sessions export" in errors and len(errors.splitlines()) < 4
    )


def test_import_reports_only_the_first_errors(home: Home, capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("nonsense\n" * 30)
    assert run(home, "import", str(file)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11 and "20 more faults" in lines[-1]
