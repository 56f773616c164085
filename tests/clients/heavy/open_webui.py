"""Open WebUI as a process of its own, used through the routes that its pages use."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clients.drivers import MODEL
from clients.server import Hermes
from support.ports import reserved_port
from support.waiting import until_blocking

Json = dict[str, Any]
_PYTHON = Path(__file__).resolve().parent / ".venv/open-webui/bin/python"
_STARTS_WITHIN_S = 180
_ANSWERS_WITHIN_S = 60
TASKS = ("title_generation", "tags_generation", "follow_up_generation")


class OpenWebUI:
    """A signed-in user of a running Open WebUI."""

    def __init__(self, url: str) -> None:
        self.url, self.token = url, ""
        self.token = self.call("POST", "/api/v1/auths/signin", {"email": "", "password": ""})["token"]

    def call(self, method: str, path: str, body: Json | None = None) -> Any:
        """One request; an error is raised with what it says."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWERS_WITHIN_S) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from None

    def models(self) -> list[str]:
        """The models on offer."""
        return [model["id"] for model in self.call("GET", "/api/models")["data"]]

    def begin(self, text: str, tasks: tuple[str, ...] = (), **more: Any) -> Chat:
        """A new chat, up to its first answer."""
        chat = Chat(self)
        chat.ask(text, tasks, **more)
        return chat

    def connect(self, hermes: Hermes, api: str) -> None:
        """Speak one of the two protocols, as an administrator sets it for a connection."""
        self.call(
            "POST",
            "/openai/config/update",
            {
                "ENABLE_OPENAI_API": True,
                "OPENAI_API_BASE_URLS": [hermes.url],
                "OPENAI_API_KEYS": [hermes.key],
                "OPENAI_API_CONFIGS": {"0": {"enable": True, "api_type": "responses" if api == "responses" else ""}},
            },
        )
        self.models()

    def add_tool(self, name: str, source: str) -> None:
        """Add a tool that chats may use, as an administrator does in the workspace."""
        self.call(
            "POST", "/api/v1/tools/create", {"id": name, "name": name, "content": source, "meta": {"description": name}}
        )


class Chat:
    """One chat, as the page shows it."""

    def __init__(self, webui: OpenWebUI) -> None:
        self.webui, self.id, self.last = webui, "", ""
        self.messages: list[Json] = []

    def ask(self, text: str, tasks: tuple[str, ...] = (), files: list[Json] | None = None, **more: Any) -> Json:
        """Say something and wait for the answer."""
        question_id, answer_id = str(uuid.uuid4()), str(uuid.uuid4())
        message = {"id": question_id, "parentId": self.last or None, "childrenIds": [answer_id], "role": "user"}
        message |= {"content": text, "timestamp": int(time.time()), "models": [MODEL]}
        message |= {"files": files} if files else {}
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "parent_id": self.last or None, "id": answer_id, "user_message": message}
        return self._complete(answer_id, {**body, "background_tasks": dict.fromkeys(tasks, True), **more})

    def go_on(self) -> Json:
        """What "Continue Response" does."""
        body = {"messages": self.messages, "id": self.last, "assistant_message_id": self.last}
        return self._complete(self.last, body)

    def _complete(self, answer_id: str, body: Json) -> Json:
        place = {"chat_id": self.id} if self.id else {}
        base = {"stream": True, "model": MODEL, "params": {}, "features": {}, "variables": {}, "session_id": "page"}
        result = self.webui.call("POST", "/api/chat/completions", {**base, **place, **body})
        self.id, self.last = result["chat_id"], answer_id
        tasks = f"/api/tasks/chat/{self.id}"
        self.until(
            lambda chat: (
                not self.webui.call("GET", tasks)["task_ids"]
                and chat["history"]["messages"].get(answer_id, {}).get("done")
            )
        )
        chat = self.webui.call("GET", f"/api/v1/chats/{self.id}")["chat"]
        message: Json = chat["history"]["messages"][answer_id]
        self.messages = [m for m in self.messages if m.get("id") != answer_id]
        self.messages.append({"role": "assistant", "content": message.get("content", ""), "id": answer_id})
        return message

    def until(self, holds: Callable[[Json], Any]) -> Json:
        """The chat as it is kept, once something holds of it."""
        chat: Json = until_blocking(lambda: self.webui.call("GET", f"/api/v1/chats/{self.id}")["chat"], holds)
        return chat


@contextmanager
def running(home: Path, hermes: Hermes) -> Iterator[OpenWebUI]:
    """Open WebUI with its defaults, connected to this server. It is the slim variant: no models of its own."""
    with reserved_port() as port:
        yield from _running(home, hermes, port)


def _running(home: Path, hermes: Hermes, port: int) -> Iterator[OpenWebUI]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "DATA_DIR": str(home),
        "STATIC_DIR": str(home / "static"),
        "FROM_INIT_PY": "true",
        "USE_SLIM_DOCKER": "true",
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "not-a-secret",
        "OFFLINE_MODE": "True",
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": hermes.url,
        "OPENAI_API_KEY": hermes.key,
        # Its requests have nothing else by which the server could know it.
        "ENABLE_FORWARD_USER_INFO_HEADERS": "True",
    }
    command = [_PYTHON, "-m", "uvicorn", "open_webui.main:app", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        until_blocking(lambda: _answers(process, url, home), seconds=_STARTS_WITHIN_S)
        yield OpenWebUI(url)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(process: subprocess.Popen[bytes], url: str, home: Path) -> bool:
    assert process.poll() is None, "Open WebUI did not start: " + (home / "log.txt").read_text()[-4000:]
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False
