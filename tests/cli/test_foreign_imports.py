"""`hermes sessions import` of exports of ChatGPT, Claude and Open WebUI: what is taken, once, and what is refused."""

from __future__ import annotations

import io
import json
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hermes.core.home import Home
from hermes.services import foreign_exports
from hermes.store.sessions import SessionDB

from .shell import Hermes


def node(name: str, parent: str | None, role: str, *parts: Any, **content: Any) -> tuple[str, Any]:
    message = {"author": {"role": role}, "create_time": 1_700_000_001.5, "recipient": content.pop("recipient", "all")}
    message["content"] = {"content_type": "text", "parts": list(parts), **content}
    return name, {"id": name, "parent": parent, "children": [], "message": message}


CHATGPT = {
    "title": "Dinner plans",
    "create_time": 1_700_000_000.0,
    "update_time": 1_700_000_100.0,
    "conversation_id": "67890abc-0000-4000-8000-000000000001",
    "default_model_slug": "gpt-x",
    "current_node": "d",
    "mapping": dict(
        [
            ("root", {"id": "root", "parent": None, "message": None, "children": ["s"]}),
            node("s", "root", "system", "be nice"),
            node("a", "s", "user", "What is for dinner?", {"asset_pointer": "file-service://x"}),
            node("b", "a", "assistant", "An old branch."),
            node("t", "a", "assistant", "thinking", content_type="thoughts"),
            node("c", "t", "tool", "results"),
            node("d", "c", "assistant", "Soup."),
        ]
    ),
}
CHATGPT_TOOLS = {
    "title": "Voice and tools",
    "create_time": 1_700_000_000.0,
    "conversation_id": "67890abc-0000-4000-8000-000000000009",
    "current_node": "f",
    "mapping": dict(
        [
            node("a", None, "user", {"content_type": "audio_transcription", "text": "Paint a cat."},
                 {"content_type": "audio_asset_pointer", "asset_pointer": "x"}, content_type="multimodal_text"),
            node("b", "a", "assistant", '{"prompt": "a cat"}', recipient="dalle.text2im"),
            node("c", "b", "assistant", "User likes cats.", recipient="bio"),
            node("d", "c", "user", {"content_type": "image_asset_pointer", "asset_pointer": "x"}, "Like this one?",
                 content_type="multimodal_text"),
            node("f", "d", "assistant", "Cats purr\ue200cite\ue202turn0search1\ue201. Yes.", recipient="all"),
        ]
    ),
}  # fmt: skip
CLAUDE = {
    "uuid": "67890abc-0000-4000-8000-000000000002",
    "name": "A poem",
    "created_at": "2024-01-02T03:04:05.678901Z",
    "updated_at": "2024-01-02T03:05:05Z",
    "chat_messages": [
        {"sender": "human", "text": "Write a poem.", "created_at": "2024-01-02T03:04:05Z",
         "attachments": [{"file_name": "notes.txt", "extracted_content": "roses"}]},
        {"sender": "assistant", "text": "", "content": [{"type": "text", "text": "Roses are red."}],
         "created_at": "2024-01-02T03:04:09Z"},
    ],
}  # fmt: skip
OPEN_WEBUI = {
    "id": "67890abc-0000-4000-8000-000000000003",
    "title": "Weather",
    "created_at": 1_700_000_000,
    "updated_at": 1_700_000_050,
    "chat": {
        "models": ["llama3.2"],
        "history": {
            "currentId": "2",
            "messages": {
                "1": {
                    "id": "1",
                    "parentId": None,
                    "role": "user",
                    "content": "Will it rain?",
                    "timestamp": 1_700_000_001,
                },
                "2": {"id": "2", "parentId": "1", "role": "assistant", "content": "Maybe.", "timestamp": 1_700_000_002},
                "3": {
                    "id": "3",
                    "parentId": "1",
                    "role": "assistant",
                    "content": "Another.",
                    "timestamp": 1_700_000_003,
                },
            },
        },
    },
}
DETAILS = '<details type="reasoning" done="true" duration="3">\n<summary>Thought for 3 seconds</summary>\n> Rain?\n</details>\n'
CALLS = '<details type="tool_calls" done="true" name="weather" arguments="&quot;x&quot;">\n<summary>Done</summary>\n</details>\n'


def test_reasoning_and_tool_calls_are_not_imported() -> None:
    claude = {**CLAUDE, "chat_messages": [
        {"sender": "human", "text": "Look it up.", "content": [{"type": "text", "text": "Look it up."}]},
        {"sender": "assistant", "text": "This block is not supported on your current device yet.",
         "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "tool_use", "name": "web"}]},
        {"sender": "assistant", "text": "x", "content": [{"type": "text", "text": "Here it is."}]},
    ]}  # fmt: skip
    webui = json.loads(json.dumps(OPEN_WEBUI))
    webui["chat"]["history"]["messages"]["2"]["content"] = (
        f"{DETAILS}{CALLS}It may. <details>shown</details>{DETAILS[:40]}"
    )
    data = io.BytesIO(json.dumps([CHATGPT_TOOLS, claude, webui]).encode())
    texts = [
        [message["content"] for message in session["messages"]] if session else fault
        for _, session, fault in foreign_exports.conversations(data)
    ]
    assert texts == [
        ["Paint a cat.\n\n[image]\n\nLike this one?", "Cats purr. Yes."],
        ["Look it up.", "Here it is."],
        ["Will it rain?", f"It may. <details>shown</details>{DETAILS[:40]}"],
    ]


FORMATS = {
    "chatgpt": (CHATGPT, ["What is for dinner?\n\n[image]", "Soup."]),
    "claude": (CLAUDE, ["Write a poem.\n\nFile notes.txt:\nroses", "Roses are red."]),
    "openwebui": (OPEN_WEBUI, ["Will it rain?", "Maybe."]),
}


def packed(path: Path, *names: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in names:
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("form", ["json", "zip"])
@pytest.mark.parametrize("source", list(FORMATS))
def test_conversations_are_imported_once(
    home: Home, hermes: Hermes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, form: str
) -> None:
    conversation, texts = FORMATS[source]
    data = json.dumps([conversation], indent=1).encode()
    file = tmp_path / "export.json"
    file.write_bytes(data)
    if form == "zip":
        file = packed(tmp_path / "export.zip", ("user.json", b"{}"), ("export/conversations.json", data))
    args = ("sessions", "import", str(file))
    result = hermes(*args, "--json")
    assert result.code == 0, result.err
    assert (result.json["imported"], result.json["skipped"]) == (1, 0)
    assert hermes(*args, "--json").json["skipped"] == 1
    with closing(SessionDB(home.state_db)) as db:
        [session] = db.list_sessions()
        messages = db.get_messages_as_conversation(session["id"])
    assert session["id"].startswith(f"{source}-67890abc-") and session["source"] == source
    assert [message["content"] for message in messages] == texts
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert 1_600_000_000 < session["started_at"] <= session["last_active"] < 1_800_000_000
    assert hermes("sessions", "search", texts[1].split()[0]).code == 0


def test_faulty_conversations_stay_out_alone(home: Home, hermes: Hermes, tmp_path: Path) -> None:
    circle = {**CHATGPT, "conversation_id": "circle", "mapping": {
        "d": {"parent": "e", "message": CHATGPT["mapping"]["d"]["message"]}, "e": {"parent": "d"}}}  # type: ignore[index]  # fmt: skip
    items: list[Any] = [CHATGPT, {"mapping": 3}, {"nothing": 1}, 5, {**CLAUDE, "chat_messages": []}, circle]
    (tmp_path / "e.json").write_text(json.dumps(items))
    result = hermes("sessions", "import", str(tmp_path / "e.json"), "--json")
    assert result.code == 1
    assert (result.json["imported"], result.json["refused"]) == (2, 4)
    assert [error["line"] for error in result.json["errors"]] == [2, 3, 4, 5]
    assert "no conversation of ChatGPT, Claude or Open WebUI" in result.err + str(result.json)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[1, 2", "not JSON"),
        (b"[]", "no conversations"),
        (b'["\xff"]', "UTF-8"),
        (b"PK\x03\x04 broken", "archive cannot be read"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_files_get_a_clear_error(home: Home, hermes: Hermes, tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "bad"
    file.write_bytes(data)
    result = hermes("sessions", "import", str(file))
    assert result.code == 2 and message in result.err and str(file) in result.err
    assert not home.state_db.exists()


def test_archive_without_conversations_is_refused(home: Home, hermes: Hermes, tmp_path: Path) -> None:
    result = hermes("sessions", "import", str(packed(tmp_path / "x.zip", ("readme.txt", b"hi"))))
    assert result.code == 2 and "no export of" in result.err


def test_unpacked_size_is_bounded(home: Home, hermes: Hermes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_exports, "FOREIGN_EXPORT_BYTES_MAX", 100_000)
    bomb = packed(tmp_path / "bomb.zip", ("conversations.json", b"[" + b" " * 10_000_000))
    result = hermes("sessions", "import", str(bomb))
    assert result.code == 2 and "more than 100000 bytes" in result.err
