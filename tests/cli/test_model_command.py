"""`hermes model` and `hermes setup`, against a model server that speaks the real protocol."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hermes import local
from hermes.core.home import Home, write_private
from hermes.local.install import NAME
from hermes.settings import config
from hermes.store.sessions import SessionDB
from local.conftest import tiny_model
from support.model_server import ModelServer, Reply
from support.server_thread import serving
from support.waiting import DEADLINE_S, until_blocking

from .conftest import HERMES
from .shell import Hermes
from .terminal import Terminal

SECRET = "sk-very-secret-0123456789"


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with serving(Reply(text="Hello there."), Reply(text="Hello again.")) as model:
        yield model


def configure(home: Home, server: ModelServer, more: str = "") -> None:
    write_private(home.config_file, f"model: {{default: m, base_url: '{server.url}/v1'{more}}}\n")


def names(home: Home) -> list[str]:
    """The names of the files in the home, without the cache."""
    return sorted(path.name for path in home.path.iterdir() if path != home.cache)


# ---- model


def test_model_shows_route_window_and_abilities(home: Home, hermes: Hermes, server: ModelServer) -> None:
    configure(home, server, f", api_key: '{SECRET}', context_length: 50000")
    result = hermes("model")
    assert result.code == 0 and "window: 50000" in result.lines and SECRET not in result.out
    route = hermes("model", "--json").json["route"]
    assert (route["model"], route["key"], route["problem"]) == ("m", True, None) and "tools" in route["abilities"]
    assert hermes("-m", "other", "model", "--json").json["route"]["model"] == "other"
    assert not server.requests


def test_model_reports_missing_configuration(home: Home, hermes: Hermes) -> None:
    assert hermes("model").code == 3
    write_private(home.config_file, "model: {default: m, provider: groq}\n")
    result = hermes("model")
    assert result.code == 3 and "GROQ_API_KEY" in result.out
    assert hermes("model", "--provider", "nonsense").code == 78


def test_model_set_tests_before_writing(home: Home, hermes: Hermes, server: ModelServer) -> None:
    configure(home, server)
    result = hermes("model", "better", "--json")
    assert result.code == 0 and result.json["test"]["answer"] == "Hello there."
    assert server.requests[0].body["model"] == "better"
    assert config.load(home).model.default == "better"


def test_model_set_rejects_unanswering_model(home: Home, hermes: Hermes) -> None:
    with serving(Reply(status=404, error="no such model"), Reply(status=404), Reply(status=404)) as server:
        configure(home, server)
        assert hermes("model", "worse").code == 2
        assert hermes("model", "worse", typed="n\n").code == 3
        assert config.load(home).model.default == "m"
        assert hermes("model", "worse", "-y").code == 0
    assert config.load(home).model.default == "worse"


def test_model_set_drops_key_of_other_address(home: Home, hermes: Hermes, server: ModelServer) -> None:
    write_private(home.config_file, f"model: {{default: m, base_url: 'http://old.test/v1', api_key: '{SECRET}'}}\n")
    assert hermes("model", "n", "--base-url", f"{server.url}/v1").code == 0
    assert SECRET not in str(server.requests[0].headers)
    settings = config.load(home)
    assert settings.model.base_url == f"{server.url}/v1" and settings.model.api_key is None


def test_switching_provider_drops_address_and_key(home: Home, hermes: Hermes, server: ModelServer) -> None:
    with serving(Reply(text="Hello.")) as old:
        write_private(
            home.config_file,
            f"model: {{default: m, base_url: '{old.url}/v1', api_key: '{SECRET}'}}\n"
            f"providers: {{mine: {{base_url: '{server.url}/v1'}}}}\n",
        )
        assert hermes("model", "n", "--provider", "mine").code == 0
        assert old.requests == [] and SECRET not in str(server.requests[0].headers)
    settings = config.load(home)
    assert (settings.model.provider, settings.model.default, settings.model.base_url) == ("mine", "n", None)
    assert settings.model.api_key is None


def test_model_set_for_one_session(home: Home, hermes: Hermes, server: ModelServer) -> None:
    configure(home, server)
    with closing(SessionDB(home.state_db)) as db:
        db.create_session("talk", "cli")
        assert hermes("model", "better", "--session", "ta").code == 0
        session = db.get_session("talk")
    assert session is not None and session["model"] == "better"
    assert config.load(home).model.default == "m"
    assert hermes("model", "better", "--session", "nothing").code == 5


def test_model_list_is_cached_and_refreshed(home: Home, hermes: Hermes, server: ModelServer) -> None:
    configure(home, server)
    server.models = [{"id": "a", "context_length": 9000}, {"id": "b"}]
    provider = {"provider": "custom"}
    listed = [{"id": "a", "window": 9000, **provider}, {"id": "b", "window": None, **provider}]
    assert hermes("model", "list", "--json").json["models"] == listed
    server.models = [{"id": "c"}]
    assert hermes("model", "list", "--json").json["models"] == listed
    assert [line.split() for line in hermes("model", "list", "--refresh").lines] == [["c", "custom"]]


def test_model_list_has_the_embedded_model(home: Home, hermes: Hermes, server: ModelServer) -> None:
    home.models.mkdir()
    file = home.models / "small.gguf"
    file.write_bytes(b"GGUF")
    embedded = {"id": str(file), "window": 8192, "provider": "local"}
    assert hermes("model", "list", "--json").json["models"] == [embedded]
    configure(home, server)
    server.models = [{"id": "a"}]
    assert [row["id"] for row in hermes("model", "list", "--json").json["models"]] == ["a", str(file)]


@pytest.mark.long
def test_model_install_reads_what_every_conversation_begins_with(home: Home, hermes: Hermes) -> None:
    model = tiny_model()
    if model is None or local.runtime_version() is None:
        pytest.skip("there is no runtime for the local model on this machine")
    home.models.mkdir()
    (home.models / NAME).symlink_to(model)
    write_private(home.config_file, "local: {context: 4096}\n")
    result = hermes("model", "install")
    assert result.code == 0 and len(list(home.models.glob("*.state"))) == 1, result.err


def test_model_use_requires_model_file(home: Home, hermes: Hermes, tmp_path: Path) -> None:
    assert hermes("model", "use").code == 2
    assert hermes("model", "use", str(tmp_path / "missing.gguf")).code == 5
    (tmp_path / "text.gguf").write_text("no model")
    assert hermes("model", "use", str(tmp_path / "text.gguf"), "-y").code == 2
    assert hermes("model", "better", "words").code == 2
    assert names(home) == []


def test_model_use_of_broken_file_needs_force(home: Home, hermes: Hermes, tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF and nothing else")
    configure_text = "model: {default: m, provider: openai, api_key: x}\n"
    write_private(home.config_file, configure_text)
    assert hermes("model", "use", str(file)).code == 2
    assert home.config_file.read_text() == configure_text
    assert hermes("model", "use", str(file), "-y", "--json").json["model"] == str(file)
    assert {name: value for name, value in config.load(home).as_dict()["model"].items() if value} == {
        "provider": "local",
        "path": str(file),
    }


# ---- setup


def test_setup_without_terminal_names_flag(home: Home, hermes: Hermes) -> None:
    result = hermes("setup")
    assert result.code == 2 and "--non-interactive" in result.err and names(home) == []


def test_setup_interactive_questions(home: Home, hermes: Hermes, server: ModelServer) -> None:
    result = hermes("setup", typed=f"{server.url}/v1 m\nweb, vision\nlocal\ny\nthis is never read\n")
    assert result.code == 0 and result.err.count("]: ") == 4
    assert "Hello there." in result.err
    settings = config.load(home)
    assert (settings.model.default, settings.model.base_url) == ("m", f"{server.url}/v1")
    assert settings.agent.disabled_toolsets == ["web", "vision"]
    assert settings.terminal.backend == "local"
    key = settings.api_server.key
    assert len(key) > 40 and key not in result.out + result.err and key in home.env_file.read_text()
    again = hermes("acp", "--setup", typed="\n\n\n\n")  # as editors start it
    assert again.code == 0 and config.load(home).api_server.key == key


def test_setup_writes_nothing_if_test_fails(home: Home, hermes: Hermes) -> None:
    with serving(Reply(status=401), Reply(status=401)) as server:
        result = hermes("setup", "model", typed=f"{server.url}/v1 m\nn\n")
        assert result.code == 3 and names(home) == []
        assert hermes("setup", "model", typed=f"{server.url}/v1 m\ny\n").code == 0
    assert config.load(home).model.default == "m"


def test_setup_asks_for_missing_key_without_echo(home: Home, server: ModelServer) -> None:
    write_private(home.config_file, f"providers: {{groq: {{base_url: '{server.url}/v1'}}}}\n")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hermes", "setup", "model"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    screen = typed(ours, "Which", "groq m\n") + typed(ours, "Key for groq", f"{SECRET}\n")
    screen += typed(ours, "Written:", "")
    assert process.wait(timeout=DEADLINE_S) == 0
    os.close(ours)
    assert SECRET not in screen and SECRET in str(server.requests[0].headers)
    assert SECRET in home.env_file.read_text() and SECRET not in home.config_file.read_text()


def typed(terminal: int, question: str, answer: str) -> str:
    """Wait for a question, and type the answer; what was seen until then."""
    data = b""
    while question.encode() not in data:
        data += os.read(terminal, 4096)
    # What asks in secret throws away what was typed before it asked: wait until it has turned the echo off.
    if question.startswith("Key"):
        until_blocking(lambda: not termios.tcgetattr(terminal)[3] & termios.ECHO)
    os.write(terminal, answer.encode())
    return data.decode("utf-8", "replace")


def test_setup_sends_no_old_key_to_new_address(home: Home, hermes: Hermes, server: ModelServer) -> None:
    write_private(home.config_file, f"model: {{default: m, base_url: 'http://old.test/v1', api_key: '{SECRET}'}}\n")
    assert hermes("setup", "model", typed=f"{server.url}/v1 n\n").code == 0
    assert SECRET not in str(server.requests[0].headers)
    assert config.load(home).model.api_key is None


def test_setup_uses_only_listed_model(home: Home, hermes: Hermes, server: ModelServer) -> None:
    server.models = [{"id": "only"}]
    assert hermes("setup", "model", typed=f"{server.url}/v1\n").code == 0
    assert config.load(home).model.default == "only"


def test_setup_non_interactive(
    home: Home, hermes: Hermes, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    args = ("--base-url", f"{server.url}/v1", "--model", "m", "--api-key-env", "MY_KEY", "--sandbox", "local")
    result = hermes("setup", "--non-interactive", *args, "--json")
    assert result.code == 0 and result.json["test"]["answer"] == "Hello there."
    assert result.json["written"] == ["model.api_key", "model.base_url", "model.default", "terminal.backend"]
    assert SECRET in str(server.requests[0].headers) and SECRET not in home.config_file.read_text()
    assert "${MY_KEY}" in home.config_file.read_text() and not home.env_file.exists()
    assert hermes("setup", "server", "--non-interactive").code == 0
    assert config.load(home).api_server.key


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("--model-file", "/no/such/file.gguf"), 5),
        (("--provider", "nonsense"), 2),
        (("--provider", "groq", "--model", "m"), 3),
        ((), 3),
    ],
)
def test_setup_failure_writes_nothing(args: tuple[str, ...], code: int, home: Home, hermes: Hermes) -> None:
    assert hermes("setup", "model", "--non-interactive", *args).code == code
    assert names(home) == []


def test_setup_rejects_unknown_toolset_and_part(home: Home, hermes: Hermes) -> None:
    assert hermes("setup", "tools", typed="nonsense\n").code == 2
    assert hermes("setup", "nonsense", typed="").code == 2
    assert names(home) == []


def test_setup_reset_keeps_old_file(home: Home, hermes: Hermes, server: ModelServer) -> None:
    for number in range(2):
        write_private(home.config_file, f"timezone: UTC\nagent: {{max_turns: {number + 1}}}\n")
        args = ("--non-interactive", "--reset", "--base-url", f"{server.url}/v1", "--model", "m")
        assert hermes("setup", "model", *args).code == 0
    assert config.load(home).timezone == "" and config.load(home).model.default == "m"
    assert "max_turns: 1" in (home.path / "config.yaml.bak").read_text()
    assert "max_turns: 2" in (home.path / "config.yaml.bak1").read_text()


# ---- setup at a terminal


@pytest.fixture
def at_terminal(home: Home, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    with ExitStack() as stack:

        def start(*args: str) -> Terminal:
            env = {"PATH": os.environ["PATH"], "HERMES_HOME": str(home.path), "HOME": str(tmp_path)}
            terminal = Terminal([*HERMES, "setup", *args], env, tmp_path)
            stack.callback(terminal.close)
            return terminal

        yield start


def test_setup_asks_again_after_unusable_answers(
    home: Home, server: ModelServer, at_terminal: Callable[..., Terminal], closed_port: int
) -> None:
    terminal = at_terminal()
    for answer, complaint in (
        ("opnai", "Did you mean openai?"),
        ("htp://127.0.0.1", "is no address"),
        ("127.0.0.1:8080/v1", "Did you mean http://127.0.0.1:8080/v1?"),
        (server.url, f"Did you mean {server.url}/v1?"),
        (f"http://127.0.0.1:{closed_port}/v1", f"http://127.0.0.1:{closed_port}/v1 cannot be reached"),
        ("/no/such.gguf", "cannot be read"),
        ("one two three", "more than a route and a model"),
    ):
        before = str(terminal).count("Which [")
        terminal.until(lambda screen, count=before: screen.count("Which [") >= max(1, count))
        terminal.send(answer)
        terminal.until(lambda screen, complaint=complaint: complaint in screen and screen.endswith("Which [local]:"))
    terminal.send(f"{server.url}/v1 m")
    assert "Hello there." in terminal.until("Toolsets to switch off")
    terminal.send("nonsense")
    terminal.until("There is no toolset")
    terminal.send("n")
    terminal.until("Sandbox:")
    terminal.send("loc")
    terminal.until("There is no sandbox")
    terminal.send("local")
    terminal.until("Make a key")
    terminal.send("what?")
    terminal.until("neither y nor n")
    terminal.send("n")
    assert terminal.wait() == 0
    settings = config.load(home)
    assert (settings.model.default, settings.terminal.backend, settings.api_server.key) == ("m", "local", "")


def test_setup_answer_n_keeps_the_model_and_continues(home: Home, hermes: Hermes) -> None:
    result = hermes("setup", typed="n\nweb\nlocal\nn\n")
    assert "No model is configured yet. Try: hermes setup model" in result.err and "hermes chat" not in result.err
    assert result.code == 0 and config.load(home).agent.disabled_toolsets == ["web"]
    with serving(Reply(status=400)) as server:
        result = hermes("setup", typed=f"{server.url}/v1 m\nn\nvision\n\nn\n")
    assert result.code == 3 and "The model is left as it was" in result.err
    settings = config.load(home)
    assert (settings.model.base_url, settings.agent.disabled_toolsets) == (None, ["vision"])


def test_setup_model_picker_searches(home: Home, server: ModelServer, at_terminal: Callable[..., Terminal]) -> None:
    server.models = [{"id": f"vendor/{name}", "context_length": 9_000} for name in ("tiny", "small-chat", "large-chat")]
    terminal = at_terminal("model")
    terminal.until("Which [")
    terminal.send(f"{server.url}/v1")
    terminal.until("vendor/large-chat")
    terminal.type("chat sm")
    terminal.until(lambda screen: "vendor/small-chat" in screen and "vendor/large-chat" not in screen)
    terminal.send("")
    assert terminal.wait() == 0
    assert config.load(home).model.default == "vendor/small-chat"


def test_setup_model_picker_asks_about_a_name_that_is_not_listed(
    home: Home, server: ModelServer, at_terminal: Callable[..., Terminal]
) -> None:
    server.models = [{"id": "vendor/small-chat"}, {"id": "vendor/large-chat"}]
    terminal = at_terminal("model")
    terminal.until("Which [")
    terminal.send(f"{server.url}/v1")
    terminal.until("vendor/large-chat")
    terminal.send("vendr/large-chat")
    terminal.until("not among the 2 models that are listed. Did you mean vendor/large-chat")
    assert server.requests == []
    terminal.type("\x15small")
    terminal.until(lambda screen: "Enter takes the first match" in screen)
    terminal.type("\x15other")
    terminal.send("")
    terminal.until("other is not among")
    terminal.send("")
    assert terminal.wait() == 0
    assert config.load(home).model.default == "other"


def test_setup_ends_at_ctrl_d_in_the_model_picker(
    home: Home, server: ModelServer, at_terminal: Callable[..., Terminal]
) -> None:
    server.models = [{"id": "one"}, {"id": "two"}]
    terminal = at_terminal("model")
    terminal.until("Which [")
    terminal.send(f"{server.url}/v1")
    terminal.until("Which of 2 models")
    terminal.type("\x04")
    assert terminal.wait() == 2
    assert "The input ended" in str(terminal) and "defect" not in str(terminal) and names(home) == []


def test_setup_asks_for_refused_key(home: Home, at_terminal: Callable[..., Terminal]) -> None:
    with serving(Reply(text="Hello.")) as server:
        server.models, server.listing_key = [{"id": "only"}], SECRET
        terminal = at_terminal("model")
        terminal.until("Which [")
        terminal.send(f"{server.url}/v1")
        terminal.until("Its key")
        terminal.until_silent()
        terminal.send(SECRET)
        assert terminal.wait() == 0
        assert server.requests[0].key == SECRET
    assert "refuses the key: it answers 401" in str(terminal) and SECRET not in str(terminal)
    assert SECRET in home.env_file.read_text() and config.load(home).model.default == "only"


def test_setup_names_models_near_an_unknown_one(home: Home, hermes: Hermes) -> None:
    with serving(Reply(status=404, error="no such model")) as server:
        server.models = [{"id": "large-chat"}, {"id": "tiny"}]
        result = hermes("setup", "model", typed=f"{server.url}/v1 larg-chat\nn\n")
    assert (
        result.code == 3
        and "larg-chat is not among the 2 models" in result.err
        and "Did you mean large-chat?" in result.err
    )


def test_download_of_the_model_is_one_line(tmp_path: Path) -> None:
    script = (
        "from hermes.cli.install_model import progress_bar\nfrom hermes.cli.streams import plain_streams\n"
        "with plain_streams():\n    show = progress_bar()\n    for part in range(4): show(part, 3)\n"
    )
    terminal = Terminal([sys.executable, "-c", script], {"PATH": os.environ["PATH"]}, tmp_path)
    try:
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert len(str(terminal).splitlines()) == 1 and str(terminal).startswith("Model  [##############################]")
