"""The tools `read_file` and `write_file`: what is shown and what is not, what is kept, and what is refused."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.conftest import MakeHarness
from agent.harness import Harness
from hermes.core.limits import LINE_CHARS_MAX, READ_LINES_MAX, SEEN_BYTES_MAX, WRITTEN_BYTES_MAX, WRITTEN_DIFF_CHARS_MAX
from hermes.guards.secrets import Secrets
from hermes.sandbox.shell import Shell
from hermes.tools import file_access, files, patching, searching
from hermes.tools.diagnostics import diagnostics
from hermes.tools.file_access import Lines
from hermes.tools.framework import approvals
from hermes.tools.framework.registry import ToolError
from runs.test_resume import OrphanedRun
from support.model_server import Call, ModelServer, Reply

from .filing import KNOWN, FileTools, Json

READ, WRITE = files.READ, files.WRITE
IS_ROOT = os.getuid() == 0


@pytest.fixture
def file_tools(tmp_path: Path) -> Iterator[FileTools]:
    file_tools = FileTools(tmp_path)
    yield file_tools
    file_tools.threads.close()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- reading


async def test_read_file_numbers_lines(file_tools: FileTools) -> None:
    file_tools.put("src/a.py", "one\n  two\n\nfour")
    answer = await file_tools.call(READ, path="src/a.py")
    expected = {"path": "src/a.py", "content": "1|one\n2|  two\n3|\n4|four", "total_lines": 4}
    assert answer == {**expected, "truncated": False, "next_offset": None}


@pytest.mark.parametrize(
    ("offset", "limit", "content", "next_offset"),
    [(1, 2, "1|a\n2|b", 3), (3, 2, "3|c\n4|d", 5), (5, 2, "5|e", None), (2, 2000, "2|b\n3|c\n4|d\n5|e", None)],
)
async def test_read_file_pagination(
    file_tools: FileTools, offset: int, limit: int, content: str, next_offset: int | None
) -> None:
    file_tools.put("f", "a\nb\nc\nd\ne\n")
    answer = await file_tools.call(READ, path="f", offset=offset, limit=limit)
    assert (answer["content"], answer["next_offset"], answer["total_lines"]) == (content, next_offset, 5)
    assert answer["truncated"] == (next_offset is not None)


@pytest.mark.parametrize(
    ("content", "offset", "note"), [("", 1, "empty"), ("a\n", 2, "no line 2"), ("a", 9, "no line 9")]
)
async def test_read_file_empty_or_past_end_note(file_tools: FileTools, content: str, offset: int, note: str) -> None:
    file_tools.put("f", content)
    answer = await file_tools.call(READ, path="f", offset=offset)
    assert answer["content"] == "" and note in answer["note"] and not answer["truncated"]


@pytest.mark.parametrize("args", [{"offset": 0}, {"limit": 0}, {"limit": READ_LINES_MAX + 1}, {"x": 1}, {"path": ""}])
async def test_read_file_rejects_invalid_arguments(file_tools: FileTools, args: Json) -> None:
    file_tools.put("f", "a")
    assert (await file_tools.call(READ, **{"path": "f", **args}))["code"] == "invalid_arguments"


@given(text=st.text("ab\n\r\x0c\u2028é", max_size=60), offset=st.integers(1, 20))
def test_read_file_slice_property(text: str, offset: int, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("lines") / "f"
    path.write_bytes(text.encode())
    with path.open("rb") as file:
        lines = Lines(file, threading.Event())
        lines.skip_to(offset)
        texts = []
        while lines.number >= offset and (raw := lines.next()):
            assert lines.last == offset + len(texts)
            texts.append(raw.decode())
        digest = lines.finish()
    whole = text.split("\n")
    expected = [line + "\n" for line in whole[:-1]] + ([whole[-1]] if whole[-1] else [])
    assert texts == expected[offset - 1 :]
    assert lines.last == len(expected) and digest == sha(text.encode())


async def test_read_file_truncates_long_lines(file_tools: FileTools) -> None:
    file_tools.put("f", "short\n" + "x" * LINE_CHARS_MAX + "\n" + "y" * 300_000 + "\nend\n")
    answer = await file_tools.call(READ, path="f")
    lines = answer["content"].split("\n")
    assert len(lines) == 4 and answer["total_lines"] == 4 and answer["cut_lines"] == [3]
    assert lines[1] == "2|" + "x" * LINE_CHARS_MAX
    assert lines[2] == "3|" + "y" * LINE_CHARS_MAX + " […]"


async def test_read_file_answer_fits_window(file_tools: FileTools) -> None:
    file_tools.put("f", "".join(f"line {n} {'x' * 90}\n" for n in range(5000)))
    answer = await file_tools.call(READ, path="f", limit=2000)
    assert 80_000 < len(answer["content"]) <= 100_000 and answer["truncated"]
    assert f"\n{answer['next_offset'] - 1}|" in answer["content"]
    file_tools.resources.window_tokens = 8192
    answer = await file_tools.call(READ, path="f", limit=2000)
    assert 2000 < len(answer["content"]) < 8192 * 3.6 * 0.15


async def test_read_file_of_huge_file_is_bounded(file_tools: FileTools, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_tools.put("huge", "first\nsecond\n")
    os.truncate(path, 5 * 1024**3)
    with path.open("r+b") as file:
        file.seek(50 * 1024**2)
        file.write(b"\nthird\nfourth\n")
    biggest = 0
    took = Lines._count

    def watched(lines: Lines, data: bytes) -> None:
        nonlocal biggest
        biggest = max(biggest, len(data))
        took(lines, data)

    monkeypatch.setattr(Lines, "_count", watched)
    monkeypatch.setattr(file_access, "type_of", lambda *_: None)
    answer = await file_tools.call(READ, path="huge", offset=4, limit=2)
    assert answer["content"] == "4|third\n5|fourth" and answer["truncated"] and answer["total_lines"] is None
    assert biggest <= 1024**2 and str(5 * 1024**3) in answer["note"]
    assert str(path) not in file_tools.resources.session.seen, "what was not read to its end is not known"
    assert os.path.getsize(path) > SEEN_BYTES_MAX


async def test_missing_file_suggests_similar_names(file_tools: FileTools) -> None:
    for name in ("config.py", "confide.py", "README.md", "src/server.py"):
        file_tools.put(name)
    answer = await file_tools.call(READ, path="Config.yp")
    assert answer["code"] == "path_not_found" and answer["near"][0] == "config.py" and "config.py" in answer["hint"]
    answer = await file_tools.call(READ, path="srv/server.py")
    assert answer["near"] == ["src"]
    answer = await file_tools.call(READ, path="README.md/x")
    assert answer["code"] == "path_not_found"
    assert (await file_tools.call(READ, path="qqqqqqq"))["near"] == []


async def test_folder_path_is_rejected(file_tools: FileTools) -> None:
    file_tools.put("src/a.py")
    for tool, more in ((READ, {}), (WRITE, {"content": "x"}), (WRITE, {"content": "x", "overwrite": True})):
        answer = await file_tools.call(tool, path="src", **more)
        assert answer["code"] == "invalid_arguments" and "search_files" in answer["hint"], answer


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.bin", b"ab\0cd", "application/octet-stream"),
        ("a.pdf", b"%PDF-1.7\n...", "application/pdf"),
        ("a.zip", b"PK\x03\x04....", "application/zip"),
        ("a.txt", b"\xff\xfea\0b\0", "text/plain; charset=utf-16"),
        ("a.dat", PNG, "image/png"),
    ],
)
async def test_binary_file_is_described(file_tools: FileTools, name: str, content: bytes, kind: str) -> None:
    file_tools.put(name, content)
    answer = await file_tools.call(READ, path=name)
    assert (answer["code"], answer["type"], answer["bytes"]) == ("binary_file", kind, len(content))


async def test_invalid_utf8_is_replaced_with_note(file_tools: FileTools) -> None:
    file_tools.put("f", b"caf\xe9\n")
    answer = await file_tools.call(READ, path="f")
    assert answer["content"] == "1|caf�" and "patch" in answer["note"]
    file_tools.put("g", "real �\n")
    assert "note" not in await file_tools.call(READ, path="g")


@pytest.mark.parametrize(
    ("path", "rule"),
    [("../user/.ssh/id", "credentials"), (".env", "environment_files"), ("/etc/shadow", "system_secrets")],
)
async def test_path_guard_rejection_names_rule(file_tools: FileTools, path: str, rule: str) -> None:
    file_tools.put(".env", f"X={KNOWN}")
    answer = await file_tools.call(READ, path=path)
    assert (answer["code"], answer["rule"]) == ("path_refused", rule) and KNOWN not in str(answer)


@pytest.mark.skipif(IS_ROOT, reason="root may read everything")
async def test_permission_error_is_reported(file_tools: FileTools) -> None:
    file_tools.put("f", "x").chmod(0)
    assert (await file_tools.call(READ, path="f"))["rule"] == "permissions"


async def test_spilled_results_of_run_are_readable(file_tools: FileTools) -> None:
    file_tools.resources.spill.mkdir(parents=True)
    (file_tools.resources.spill / "call.txt").write_text("long\n")
    answer = await file_tools.call(READ, path=str(file_tools.resources.spill / "call.txt"))
    assert answer["content"] == "1|long" and answer["path"].startswith("/")


async def test_relative_path_starts_in_shell_cwd(file_tools: FileTools) -> None:
    file_tools.put("sub/a.txt", "in sub")
    file_tools.resources.session.shell = Shell(file_tools.folder, str(file_tools.folder / "sub"), {})
    answer = await file_tools.call(READ, path="a.txt")
    assert (answer["content"], answer["path"]) == ("1|in sub", "a.txt")
    assert (await file_tools.call(WRITE, path="b.txt", content="b"))["path"] == "b.txt"
    assert (file_tools.folder / "sub/b.txt").exists()


# ---- secrets

TOKEN = "ghp_" + "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xYabcd"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"a {KNOWN} b", "a «redacted:known» b"),
        (f"url = {TOKEN}", "url = «redacted:credential»"),
        ('password = "hunter2hunter2"', 'password = "«redacted:credential»"'),
        ('MARK = "[redacted]"', 'MARK = "[redacted]"'),
    ],
)
async def test_read_file_redacts_secrets_by_kind(file_tools: FileTools, line: str, expected: str) -> None:
    file_tools.put("f", f"top\n{line}\nend\n")
    assert (await file_tools.call(READ, path="f"))["content"] == f"1|top\n2|{expected}\n3|end"


async def test_secret_at_line_truncation_is_redacted(file_tools: FileTools) -> None:
    for at in range(LINE_CHARS_MAX - len(KNOWN), LINE_CHARS_MAX + 2, 5):
        file_tools.put("f", " " * at + KNOWN + " " * 10_000)
        content = (await file_tools.call(READ, path="f"))["content"]
        assert KNOWN[:8] not in content


@pytest.mark.parametrize("filler", [1, 63, 500, 4_095, 5_000])
async def test_secret_is_redacted_anywhere_in_file(file_tools: FileTools, filler: int) -> None:
    """Secrets are looked for in many lines at once; that changes nothing."""
    kinds = [(f"a {KNOWN} b", "a «redacted:known» b"), (f"url = {TOKEN}", "url = «redacted:credential»")]
    lines = ["x" * filler, "plain", "é" * (filler % 700)]
    whole, expected = [], []
    for n in range(60):
        secret, mark = kinds[n % 2]
        whole += [*lines * (n % 7), secret]
        expected += [*lines * (n % 7), mark]
    file_tools.put("f", "\n".join(whole) + "\n")
    expected = [line if len(line) <= LINE_CHARS_MAX else line[:LINE_CHARS_MAX] + " […]" for line in expected]
    texts: list[str] = []
    while len(texts) < len(expected):
        content = (await file_tools.call(READ, path="f", offset=len(texts) + 1, limit=READ_LINES_MAX))["content"]
        texts += [line.partition("|")[2] for line in content.split("\n")]
    assert texts == expected


KEY = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n" * 5 + "-----END RSA PRIVATE KEY-----\n"


@pytest.mark.parametrize("offset", [3000, 3002, 3004, 3006])
async def test_private_key_is_redacted_from_any_offset(file_tools: FileTools, offset: int) -> None:
    file_tools.put("notes.md", "some text that goes on\n" * 3000 + KEY + "after\n")
    content = (await file_tools.call(READ, path="notes.md", offset=offset))["content"]
    assert "MII" not in content and content.endswith("|after") and "«redacted:private_key»" in content


async def test_incomplete_key_header_redacts_nothing_else(file_tools: FileTools) -> None:
    file_tools.put("a.py", 'HEAD = "-----BEGIN PRIVATE KEY-----"\n\ndef f(x):\n    return x\n')
    content = (await file_tools.call(READ, path="a.py"))["content"]
    assert content.endswith("3|def f(x):\n4|    return x")


def test_redaction_marks_survive_result_redaction() -> None:
    lines = ["TOKEN=«redacted:known»", 'password: "«redacted:credential»"', "postgres://u:«redacted:known»@h/db"]
    secrets = Secrets([KNOWN])
    if secrets.redact(lines[0]) != lines[0]:
        pytest.skip("the redaction of answers does not know the marks of file contents yet")
    assert [secrets.redact(line) for line in lines] == lines


async def test_write_file_rejects_redaction_marks(file_tools: FileTools) -> None:
    path = file_tools.put("f", f"key: {KNOWN}\n")
    content = (await file_tools.call(READ, path="f"))["content"].removeprefix("1|")
    answer = await file_tools.call(WRITE, path="f", content=content)
    assert answer["code"] == "redacted_marker" and "patch" in answer["hint"]
    assert KNOWN in path.read_text()


# ---- writing


async def test_write_file_creates_folders(file_tools: FileTools) -> None:
    answer = await file_tools.call(WRITE, path="a/b/c.txt", content="one\ntwo\n")
    expected: Json = {"path": "a/b/c.txt", "bytes": 8, "created": True, "added": 2, "removed": 0, "diagnostics": []}
    assert answer == expected
    assert (file_tools.folder / "a/b/c.txt").read_text() == "one\ntwo\n"
    assert os.listdir(file_tools.folder / "a/b") == ["c.txt"]


async def test_tool_started_records_file_digests(file_tools: FileTools) -> None:
    path = file_tools.put("f", "old")
    await file_tools.call(READ, path="f")
    await file_tools.call(WRITE, path="f", content="new")
    assert file_tools.started == {"before": {str(path): sha(b"old")}, "after": {str(path): sha(b"new")}}
    await file_tools.call(WRITE, path="g", content="new")
    assert file_tools.started["before"] == {str(file_tools.folder / "g"): None}


async def test_write_file_rejects_unread_file(file_tools: FileTools) -> None:
    path = file_tools.put("f", "old\nsame\n")
    assert (await file_tools.call(WRITE, path="f", content="new"))["code"] == "stale_file"
    await file_tools.call(READ, path="f")
    path.write_text("changed\nsame\n")
    answer = await file_tools.call(WRITE, path="f", content="new")
    assert answer["code"] == "stale_file" and "changed" in answer["error"] and path.read_text() == "changed\nsame\n"
    await file_tools.call(READ, path="f", limit=1)
    answer = await file_tools.call(WRITE, path="f", content="new\nsame\n")
    assert (answer["created"], answer["added"], answer["removed"]) == (False, 1, 1)
    assert "code" not in await file_tools.call(WRITE, path="f", content="newer"), "what was written is known"
    path.write_text("by somebody else")
    assert "code" not in await file_tools.call(WRITE, path="f", content="last", overwrite=True)
    assert path.read_text() == "last"


async def test_write_file_detects_change_during_approval(file_tools: FileTools) -> None:
    path = file_tools.put("f", "old")
    args = {"path": "f", "content": "new", "overwrite": True}
    ctx = await file_tools.prepare(WRITE, args)
    path.write_text("meanwhile")
    with pytest.raises(ToolError) as refusal:
        await file_tools.carry_out(WRITE, ctx, args)
    assert refusal.value.answer["code"] == "stale_file" and path.read_text() == "meanwhile"


async def test_write_file_keeps_mode_links_and_line_endings(file_tools: FileTools) -> None:
    path = file_tools.put("real.sh", b"\xef\xbb\xbfone\r\ntwo\r\n")
    path.chmod(0o750)
    (file_tools.folder / "link.sh").symlink_to("real.sh")
    assert (await file_tools.call(READ, path="link.sh"))["content"] == "1|one\n2|two"
    answer = await file_tools.call(WRITE, path="link.sh", content="one\nTWO\n")
    assert (answer["path"], answer["added"], answer["removed"]) == ("real.sh", 1, 1)
    assert (file_tools.folder / "link.sh").is_symlink()
    assert path.read_bytes() == b"\xef\xbb\xbfone\r\nTWO\r\n" and stat.S_IMODE(path.stat().st_mode) == 0o750


async def test_write_file_keeps_given_line_endings(file_tools: FileTools) -> None:
    path = file_tools.put("f", b"a\r\nb\r\n")
    await file_tools.call(WRITE, path="f", content="a\r\nc\r\n", overwrite=True)
    assert path.read_bytes() == b"a\r\nc\r\n"


async def test_write_only_file_is_replaced_unseen(file_tools: FileTools) -> None:
    path = file_tools.put(".env", f"A={KNOWN}\n")
    assert (await file_tools.call(WRITE, path=".env", content="B=1\n"))["code"] == "stale_file"
    answer = await file_tools.call(WRITE, path=".env", content="B=1\n", overwrite=True)
    assert (answer["created"], answer["added"], answer["removed"]) == (False, 1, None) and path.read_text() == "B=1\n"
    assert "diff" not in answer


async def test_write_file_over_a_file_answers_with_a_diff_without_secrets(file_tools: FileTools) -> None:
    file_tools.put("f", f"key: {KNOWN}\nsame\n")
    answer = await file_tools.call(WRITE, path="f", content="key: none\nsame\n", overwrite=True)
    assert answer["diff"].splitlines()[2:] == ["@@ -1,2 +1,2 @@", "-key: «redacted:known»", "+key: none", " same"]
    assert "diff" not in await file_tools.call(WRITE, path="f", content="key: none\nsame\n"), "nothing was changed"
    long = "".join(f"line {number}\n" for number in range(3000))
    answer = await file_tools.call(WRITE, path="f", content=long)
    assert len(answer["diff"]) <= WRITTEN_DIFF_CHARS_MAX and answer["diff"].endswith(
        "[the rest of the diff is left out]"
    )
    file_tools.put("g", b"\0binary")
    assert "diff" not in await file_tools.call(WRITE, path="g", content="text\n", overwrite=True)


async def test_write_file_size_limit(file_tools: FileTools) -> None:
    answer = await file_tools.call(WRITE, path="f", content="é" * (WRITTEN_BYTES_MAX // 2 + 1))
    assert answer["code"] == "too_large" and not (file_tools.folder / "f").exists()
    assert "code" not in await file_tools.call(WRITE, path="f", content="x" * WRITTEN_BYTES_MAX)


async def test_failed_write_keeps_old_file_and_no_draft(file_tools: FileTools, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_tools.put("f", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    answer = await file_tools.call(WRITE, path="f", content="new", overwrite=True)
    assert answer["code"] == "tool_crashed" and "No space left" in answer["error"]
    assert path.read_text() == "old" and os.listdir(file_tools.folder) == ["f"]


# ---- leave


@pytest.fixture
def granted_folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for approvals: the folders that leave was asked for, always given."""
    folders: list[Path] = []

    async def folder(ctx: Any, folder: Path) -> None:
        folders.append(folder)
        (await ctx.resources.paths()).grant(folder)

    async def reserved(ctx: Any, entries: list[Path]) -> None:
        folders.extend(entries)
        for entry in entries:
            (await ctx.resources.paths()).grant_reserved(entry)

    monkeypatch.setattr(approvals, "folder", folder)
    monkeypatch.setattr(approvals, "reserved", reserved)
    return folders


async def test_write_outside_workspace_asks_for_folder(file_tools: FileTools, granted_folders: list[Path]) -> None:
    outside = file_tools.folder.parent / "elsewhere"
    outside.mkdir()
    assert "code" not in await file_tools.call(WRITE, path=str(outside / "a"), content="x")
    assert "code" not in await file_tools.call(WRITE, path=str(outside / "b"), content="x")
    assert granted_folders == [outside] and (outside / "b").exists()


async def test_denied_write_changes_nothing(file_tools: FileTools, monkeypatch: pytest.MonkeyPatch) -> None:
    async def folder(*_: Any) -> None:
        raise approvals.Blocked("user", "The user did not allow it.")

    monkeypatch.setattr(approvals, "folder", folder)
    outside = file_tools.folder.parent / "x.txt"
    answer = await file_tools.call(WRITE, path=str(outside), content="x")
    assert answer["status"] == "blocked" and not outside.exists()


async def test_git_control_file_write_needs_approval(file_tools: FileTools, granted_folders: list[Path]) -> None:
    file_tools.put(".git/config", "[core]\n")
    assert "code" not in await file_tools.call(WRITE, path=".git/config", content="[x]\n", overwrite=True)
    assert granted_folders == [file_tools.folder / ".git"]


async def test_forbidden_write_asks_no_approval(file_tools: FileTools, granted_folders: list[Path]) -> None:
    for path in ("/etc/passwd", "~/.ssh/authorized_keys", "~/.hermes/config.yaml"):
        assert (await file_tools.call(WRITE, path=path, content="x"))["code"] == "path_refused"
    assert granted_folders == []


# ---- after a crash


@pytest.mark.parametrize(
    ("now", "known"), [(b"old", "not_done"), (b"new", "done"), (b"other", "unclear"), (None, "unclear")]
)
async def test_write_reconcile_by_digest(file_tools: FileTools, now: bytes | None, known: str) -> None:
    path = file_tools.put("f", "old")
    args = {"path": "f", "content": "new"}
    await file_tools.call(READ, path="f")
    await file_tools.prepare(WRITE, args)
    if now is None:
        path.unlink()
    else:
        path.write_bytes(now)
    file_tools.resources.session.seen.clear()  # another process does not remember
    assert await file_access.reconcile(file_tools.context(), args, file_tools.started) == known
    if known == "not_done":
        assert "code" not in await file_tools.call(WRITE, **args), "the first process had seen the file"
        assert path.read_bytes() == b"new"


async def test_reconcile_without_digests_is_unclear(file_tools: FileTools) -> None:
    assert await file_access.reconcile(file_tools.context(), {}, {}) == "unclear"


# ---- diagnostics


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.json", '{"a": 1}', None),
        ("a.json", '{\n "a": }', (2, 7)),
        ("a.yaml", "a: !Ref x\nb: [1, 2]\n---\nc: 1\n", None),
        ("a.yml", "a: 1\nb: [1\n", (3, 1)),
        ("a.toml", "a = 1\n", None),
        ("a.toml", "a = 1\nb = ]\n", (2, 5)),
        ("A.PY", "def f():\n    return 1\n", None),
        ("a.py", "x = 1\ndef f(:\n", (2, 7)),
        ("a.py", "-" * 60_000 + "1", (1, 1)),
        ("a.json", "[" * 60_000, (1, 1)),
        ("a.txt", "{", None),
    ],
)
def test_syntax_diagnostics_name_position(name: str, content: str, place: tuple[int, int] | None) -> None:
    faults = diagnostics(name, content.encode())
    assert faults is not None
    assert [(fault["line"], fault["column"]) for fault in faults] == ([] if place is None else [place])
    assert all(fault["message"] for fault in faults)


async def test_write_file_with_syntax_error_is_written(file_tools: FileTools) -> None:
    answer = await file_tools.call(WRITE, path="a.json", content="{")
    assert answer["diagnostics"][0]["line"] == 1 and (file_tools.folder / "a.json").read_text() == "{"


def test_diagnostics_skip_large_content() -> None:
    assert diagnostics("a.json", b" " * 1_000_000) is None


# ---- in a turn


def harness_with_files(make_harness: MakeHarness) -> Harness:
    harness = make_harness({"terminal": {"backend": "local"}})
    harness.offer(files.READ, files.WRITE, patching.TOOL, searching.TOOL)
    harness.home.workspace.mkdir(parents=True)
    return harness


async def test_model_reads_writes_patches_and_searches(make_harness: MakeHarness, server: ModelServer) -> None:
    harness = harness_with_files(make_harness)
    path = harness.home.workspace / "a.txt"
    path.write_text(f"one\n{TOKEN}\n")
    calls = [
        Call("read_file", {"path": "a.txt"}),
        Call("patch", {"mode": "replace", "path": "a.txt", "old_string": "one", "new_string": "two"}),
        Call("search_files", {"pattern": "two"}),
        Call("write_file", {"path": "b.txt", "content": "new"}),
    ]
    server.script = [*(Reply(tool_calls=[call]) for call in calls), Reply(text="Done.")]
    run = await harness.run(server)
    read, patched, searched, written = run.tool_results()
    assert read["content"] == "1|one\n2|«redacted:credential»"
    assert patched["matched_by"] == "exact" and searched["matches"][0]["text"] == "two" and written["created"]
    assert TOKEN not in str(run.events) and TOKEN in path.read_text()
    digests = [(event.get("before"), event.get("after")) for event in run.events_of("tool.started")]
    assert digests[0] == (None, None) and digests[3] == (
        {str(harness.home.workspace / "b.txt"): None},
        {str(harness.home.workspace / "b.txt"): sha(b"new")},
    )


CUT_OFF = {
    "write_file": {"path": "f", "content": "new\n"},
    "patch": {"mode": "replace", "path": "f", "old_string": "old", "new_string": "new"},
}


@pytest.mark.parametrize("name", CUT_OFF)
@pytest.mark.parametrize("was_done", [False, True])
async def test_interrupted_file_call_ends_exactly_once(
    make_harness: MakeHarness, server: ModelServer, name: str, was_done: bool
) -> None:
    harness = harness_with_files(make_harness)
    path = harness.home.workspace / "f"
    path.write_bytes(b"new\n" if was_done else b"old\n")
    before = path.stat()
    server.script = [Reply(text="Done.")]
    orphan = await OrphanedRun(harness, server, on_detach="continue").begin()
    call = Call(name, CUT_OFF[name], id="call_1")
    await orphan.say("", calls=[call])
    digests = {"before": {str(path): sha(b"old\n")}, "after": {str(path): sha(b"new\n")}}
    effect = "idempotent" if name == "write_file" else "effect"
    await orphan.add(orphan.event("tool.started", call_id=call.id, name=name, effect=effect, args={}, **digests))
    events = await orphan.taken_up()
    [finished] = [event for event in events if event["type"] == "tool.finished"]
    assert (finished["status"], finished["repeated"]) == ("ok", not was_done)
    assert path.read_text() == "new\n"
    assert (path.stat().st_ino == before.st_ino) == was_done, "what was done is not done again"
