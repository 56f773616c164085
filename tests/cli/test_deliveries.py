"""Results of jobs delivered: to files, webhooks, the notify command and by e-mail; retries and failures on record."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from hermes.core.errors import ServiceError
from hermes.core.home import Home
from hermes.services.delivery import checked_target, shown_target
from support.model_server import Reply

from .conftest import Cli


@contextmanager
def webhook(*statuses: int) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers with these statuses, and what it was sent."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(statuses[min(len(received), len(statuses)) - 1])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook/s3cr3t-path", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def program(folder: Path, body: str) -> Path:
    """A program of the operator's: a line of Python that has `sys`, `os` and `out`, a file beside it."""
    file = folder / "program"
    file.write_text(f"#!{sys.executable}\nimport sys, os\nout = open({str(folder / 'out')!r}, 'a')\n{body}\n")
    file.chmod(0o700)
    return file


def create(cli: Cli, deliver: str) -> str:
    result = cli.run("cron", "create", "every 1d", "Say hi.", "--name", "Daily news", "--deliver", deliver, "--json")
    assert result.returncode == 0, result.stderr
    return str(json.loads(result.stdout)["job"]["id"])


def history(cli: Cli, job_id: str) -> list[Any]:
    return list(json.loads(cli.run("cron", "runs", job_id, "--json").stdout)["runs"])


def test_result_is_written_to_a_file(cli: Cli) -> None:
    cli.script(Reply(text="Hello."), Reply(text="Again."))
    target = cli.folder / "news" / "today.md"
    job_id = create(cli, f"file:{target}")
    assert cli.run("cron", "run", job_id).returncode == 0
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("Hello.\n", 0o600)
    assert cli.run("cron", "edit", job_id, "--deliver", f"file:{target.parent}/").returncode == 0
    assert cli.run("cron", "run", job_id).returncode == 0
    [other] = [file for file in target.parent.iterdir() if file != target]
    assert other.name.startswith("Daily-news-") and other.read_text() == "Again.\n"
    assert [run["delivery"]["status"] for run in history(cli, job_id)] == ["delivered", "delivered"]


def test_file_that_exists_is_added_to(cli: Cli) -> None:
    cli.script(Reply(text="Hello."), Reply(text="Again."))
    target = cli.folder / "notes.md"
    target.write_text("Mine.\n")
    job_id = create(cli, f"file:{target}")
    for _ in range(2):
        assert cli.run("cron", "run", job_id).returncode == 0
    assert target.read_text() == "Mine.\n\n---\n\nHello.\n\n---\n\nAgain.\n"


def test_failed_delivery_shows_in_list_and_status(cli: Cli) -> None:
    cli.script(Reply(text="Hello."))
    os.mkfifo(cli.folder / "pipe")
    job_id = create(cli, f"file:{cli.folder}/pipe")
    assert "not delivered" not in cli.run("cron", "list").stdout
    assert cli.run("cron", "run", job_id).returncode == 0
    listed = cli.run("cron", "list")
    assert "completed, not delivered" in listed.stdout
    assert "Daily news is not delivered: " in listed.stderr and f"hermes cron runs {job_id}" in listed.stderr
    status = cli.run("cron", "status", "--json")
    assert json.loads(status.stdout)["undelivered"] == 1 and "Daily news is not delivered" in status.stderr


def test_result_is_posted_and_the_address_is_not_shown(cli: Cli) -> None:
    cli.script(Reply(text="Hello."))
    with webhook(200) as (url, received):
        job_id = create(cli, f"webhook:{url}")
        assert cli.run("cron", "run", job_id).returncode == 0
    [posted] = received
    assert (posted["event"], posted["job_name"], posted["status"]) == ("job.finished", "Daily news", "completed")
    assert posted["text"] == "Hello." and posted["run_id"].startswith("run_")
    stdout = cli.run("cron", "list", "--json").stdout + cli.run("cron", "runs", job_id).stdout
    logs = "".join(file.read_text() for file in (cli.home / "logs").glob("*.log"))
    assert "s3cr3t-path" not in stdout + logs
    assert json.loads(cli.run("cron", "list", "--json").stdout)["jobs"][0]["deliver"].startswith("webhook:http://")


def test_failed_delivery_is_on_record_and_tried_again(cli: Cli) -> None:
    cli.script(Reply(text="Hello."))
    with webhook(500) as (url, _):
        job_id = create(cli, f"webhook:{url}")
        assert cli.run("cron", "run", job_id).returncode == 0
    [run] = history(cli, job_id)
    delivery = run["delivery"]
    assert (run["status"], delivery["status"], delivery["attempts"]) == ("completed", "waiting", 1)
    assert delivery["error"] == "The webhook answered with status 500."
    assert delivery["next_at"] is not None
    assert "waiting: The webhook answered with status 500." in cli.run("cron", "runs", job_id).stdout


def test_result_goes_to_the_notify_command(cli: Cli) -> None:
    cli.script(Reply(text="-rf Hello; $(id)"))
    file = program(cli.folder, "out.write(repr(sys.argv[1:]) + sys.stdin.read() + str('API_SERVER_KEY' in os.environ))")
    assert cli.run("config", "set", "notify.command", f"{file} {{title}} {{text}}").returncode == 0
    job_id = create(cli, "notify")
    assert cli.run("cron", "run", job_id, API_SERVER_KEY="k" * 40).returncode == 0
    assert (cli.folder / "out").read_text() == "['Daily news', ' -rf Hello; $(id)']-rf Hello; $(id)False"
    assert [run["delivery"]["status"] for run in history(cli, job_id)] == ["delivered"]


def test_text_is_never_put_into_a_script(cli: Cli) -> None:
    cli.script(Reply(text="$(touch owned)"))
    command = "sh -c 'echo {text}'"
    assert cli.run("config", "set", "notify.command", command).returncode == 0
    job_id = create(cli, "notify")
    assert cli.run("cron", "run", job_id).returncode == 0
    assert "arguments of their own" in history(cli, job_id)[0]["delivery"]["error"]
    assert not (cli.folder / "owned").exists()


def test_result_is_sent_by_mail(cli: Cli) -> None:
    cli.script(Reply(text="Hello."))
    file = program(cli.folder, "out.write(repr(sys.argv[1:]) + sys.stdin.read())")
    assert cli.run("config", "set", "notify.sendmail", str(file)).returncode == 0
    job_id = create(cli, "email:me@example.org")
    assert cli.run("cron", "run", job_id).returncode == 0
    sent = (cli.folder / "out").read_text()
    assert sent.startswith("['-i', '-t']")
    assert "To: me@example.org\n" in sent and "Subject: Daily news\n" in sent and sent.endswith("\n\nHello.\n")


def test_failing_program_is_named(cli: Cli) -> None:
    cli.script(Reply(text="Hello."))
    file = program(cli.folder, "print('no display', file=sys.stderr); sys.exit(3)")
    assert cli.run("config", "set", "notify.command", str(file)).returncode == 0
    job_id = create(cli, "notify")
    assert cli.run("cron", "run", job_id).returncode == 0
    [run] = history(cli, job_id)
    assert "exit code 3: no display" in run["delivery"]["error"]


def test_silent_result_is_not_delivered(cli: Cli) -> None:
    cli.script(Reply(text="[SILENT]"))
    job_id = create(cli, f"file:{cli.folder}/news.md")
    assert cli.run("cron", "run", job_id).returncode == 0
    assert not (cli.folder / "news.md").exists()
    assert [run["delivery"] for run in history(cli, job_id)] == [None]


@pytest.mark.parametrize(
    "text",
    ["", "fax", "file:", "webhook:", "webhook:ftp://x/", "webhook:javascript:1", "email:", "email:-oQ/tmp@x.org",
     "email:a@b.org\nBcc: c@d.org", "email:a b@c.org", "notify:now", "file:{home}/state.db", "file:{home}/../home/.env"],
)  # fmt: skip
def test_bad_targets_are_refused(text: str, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.path.mkdir()
    with pytest.raises(ServiceError) as refused:
        checked_target(text.replace("{home}", str(home.path)), home)
    assert refused.value.field == "deliver"


def test_targets_are_stored_and_shown() -> None:
    assert checked_target("session") == checked_target("local") == "local"
    assert checked_target("file:/tmp/../tmp/x/") == "file:/tmp/x/"
    assert checked_target("webhook:${HOOK}") == shown_target("webhook:${HOOK}") == "webhook:${HOOK}"
    assert shown_target("webhook:https://hooks.example.org/T0/B1/key") == "webhook:https://hooks.example.org/…"


def test_delivery_to_a_symbolic_link_is_refused(cli: Cli) -> None:
    cli.script(Reply(text="Hello."))
    (cli.folder / "precious").write_text("mine")
    (cli.folder / "link.md").symlink_to(cli.folder / "precious")
    job_id = create(cli, f"file:{cli.folder}/link.md")
    assert cli.run("cron", "run", job_id).returncode == 0
    assert (cli.folder / "precious").read_text() == "mine"
    assert "symbolic link" in history(cli, job_id)[0]["delivery"]["error"]
