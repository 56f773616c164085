"""The tool `patch`: finding a place, changing several files as one, and what is told when it cannot be done."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.core.limits import DIFF_CHARS_MAX, WRITTEN_BYTES_MAX
from hermes.guards.paths import Paths
from hermes.tools import file_access, files
from hermes.tools.diffs import unified_diff
from hermes.tools.framework.registry import ToolError
from hermes.tools.patching import TOOL, apply_hunks, nearest, parse_patch, replace_text

from .filing import KNOWN, FileTools, Json


@pytest.fixture
def file_tools(tmp_path: Path) -> Iterator[FileTools]:
    file_tools = FileTools(tmp_path)
    yield file_tools
    file_tools.threads.close()


# ---- finding

REPLACED = [
    # text, old, new, result, found by
    ("a\nb\nc\n", "b", "B", "a\nB\nc\n", "exact"),
    ("x = 1; y = 2\n", "y = 2", "y = 3", "x = 1; y = 3\n", "exact"),
    ("a  \nb\t\nc\n", "a\nb\n", "A\nB\n", "A\nB\nc\n", "trailing_space"),
    ("a\nb\n", "a  \nb", "A", "A\n", "trailing_space"),
    ("a\r\nb\nc\n", "a\nb\n", "A\n", "A\nc\n", "trailing_space"),
    (
        "def f():\n    if x:\n        go()\n",
        "if x:\n    go()",
        "if y:\n    run()",
        "def f():\n    if y:\n        run()\n",
        "indentation",
    ),
    ("\tif x:\n\t\tgo()\n", "if x:\n\tgo()\n", "if x:\n\n\tgo()\n", "\tif x:\n\n\t\tgo()\n", "indentation"),
    ("a:\n  b\n", "    b\n", "    b\n  c\n", "a:\n  b\nc\n", "indentation"),
    ("one\ntwo", "  two", "  three", "one\nthree", "indentation"),
    ("a\nb \nc\n", "b\n", "", "a\nc\n", "trailing_space"),
    ("a \n\nb\n", "a\n\n", "A\n\n", "A\n\nb\n", "trailing_space"),
]


@pytest.mark.parametrize(("text", "old", "new", "result", "by"), REPLACED)
def test_patch_uses_strictest_matching_strategy(text: str, old: str, new: str, result: str, by: str) -> None:
    assert replace_text(text, old, new, False) == (result, by)


@pytest.mark.parametrize(
    ("text", "old", "lines"),
    [("b\na\nb\n", "b", [1, 3]), ("b \na\n  c\nb  \n", "b\n", [1, 4]), ("  x\n    x\n", "x ", [1, 2])],
)
def test_patch_reports_ambiguous_match_lines(text: str, old: str, lines: list[int]) -> None:
    with pytest.raises(ToolError) as refusal:
        replace_text(text, old, "c", False)
    answer = refusal.value.answer
    assert (answer["code"], answer["lines"]) == ("ambiguous_match", lines)
    assert ", ".join(map(str, lines)) in answer["error"] and "replace_all" in answer["hint"]


@pytest.mark.parametrize(
    ("text", "old", "new", "result"),
    [
        ("b\na\nb\n", "b", "c", "c\na\nc\n"),
        ("  b\na\n b\n", "b \n", "c\n", "  c\na\n c\n"),
        ("a \na \na \n", "a\na\n", "b\n", "a \nb\n"),
    ],
)
def test_patch_replace_all(text: str, old: str, new: str, result: str) -> None:
    assert replace_text(text, old, new, True)[0] == result


def test_patch_no_match_names_nearest_places() -> None:
    text = "\n".join(["import os", "", "def first(x):", "    return x", "", "def second(y):", "    return y + 1", ""])
    with pytest.raises(ToolError) as refusal:
        replace_text(text, "def second(y):\n    return y + 2", "", False)
    answer = refusal.value.answer
    assert answer["code"] == "no_match" and answer["nearest"][0]["line"] == 6
    assert answer["nearest"][0]["text"].startswith("def second(y):\n    return y + 1")
    assert nearest(text.split("\n"), ["def sekond(y):"]) == [5, 2]
    assert nearest(["a"], ["something else entirely"]) == []
    assert nearest([""] * 10, [""]) == []


def test_patch_end_of_file_is_not_a_line() -> None:
    with pytest.raises(ToolError):
        replace_text("a\nb \n", "b\n\n", "c\n", False)


def test_patch_blank_lines_are_not_matched_loosely() -> None:
    with pytest.raises(ToolError) as refusal:
        replace_text("a\n \nb\n", "\n\t\n", "", False)
    assert refusal.value.answer["code"] == "no_match"


@given(st.text("ab \n", max_size=40), st.text("ab \n", min_size=1, max_size=6), st.text("xy\n", max_size=5))
def test_patch_unique_exact_match_property(text: str, old: str, new: str) -> None:
    if text.count(old) == 1 and text.find(old) == text.rfind(old):
        assert replace_text(text, old, new, False) == (text.replace(old, new), "exact")


# ---- patches


def hunks(text: str) -> Any:
    return parse_patch(f"*** Begin Patch\n*** Update File: f\n{text}\n*** End Patch")[0].hunks


PATCHED = [
    ("a\nb\nc\n", "@@\n a\n-b\n+B\n c", "a\nB\nc\n", "exact"),
    ("a\nb\nc\n", " a\n-b\n+B", "a\nB\nc\n", "exact"),
    ("a\nb\nc", "@@\n-c\n+C\n+D", "a\nb\nC\nD", "exact"),
    (
        "x\ndef f():\n    go()\ndef g():\n    go()\n",
        "@@ def g():\n-    go()\n+    run()",
        "x\ndef f():\n    go()\ndef g():\n    run()\n",
        "exact",
    ),
    (
        "class A:\n def f():\n  x\nclass B:\n def f():\n  x\n",
        "@@ class B:\n@@ def f():\n-  x\n+  y",
        "class A:\n def f():\n  x\nclass B:\n def f():\n  y\n",
        "exact",
    ),
    ("a\nb\na\nb\n", "@@ -3,2 +3,2 @@\n a\n-b\n+c", "a\nb\na\nc\n", "exact"),
    ("a\nb\na\nb\n", "@@\n a\n-b\n+c\n@@\n a\n-b\n+d\n", None, "ambiguous_match"),
    ("a\nb\nc\nb\n", "@@\n-b\n+x\n c\n@@\n-b\n+y", "a\nx\nc\ny\n", "exact"),
    ("b\nb\n", "@@\n-b\n+x\n*** End of File", "b\nx\n", "exact"),
    ("a  \n\tb\n", "@@\n a\n-\tb\n+\tc", "a  \n\tc\n", "trailing_space"),
    (
        "if x:\n        a\n        b\n",
        "@@\n     a\n-    b\n+    c\n+        d",
        "if x:\n        a\n        c\n            d\n",
        "indentation",
    ),
    ("a\n", "@@ a\n+b", "a\nb\n", "exact"),
    ("a\n", "@@\n+b\n*** End of File", "a\nb\n", "exact"),
    ("a\n\nb\n", "@@\n a\n\n-b\n+c\n", "a\n\nc\n", "exact"),
    ("a\nb\n", "@@\n-a\n-b", "", "exact"),
    ("x\na\nx\na\nx\na\n", "@@ -1 +1,3 @@\n-x\n+1\n+2\n+3\n@@ -5 +7 @@\n-x\n+y", "1\n2\n3\na\nx\na\ny\na\n", "exact"),
    ("a\nb\n", "@@\n+c", None, "no_match"),
    ("a\nb\n", "@@\n-x\n+y", None, "no_match"),
    ("a\nb\n", "@@ zzz\n-a\n+y", None, "no_match"),
]


@pytest.mark.parametrize(("text", "patch", "result", "by"), PATCHED)
def test_patch_hunks_apply_in_order(text: str, patch: str, result: str | None, by: str) -> None:
    try:
        assert apply_hunks(text, hunks(patch)) == (result, by)
    except ToolError as refusal:
        assert result is None and refusal.answer["code"] == by


@pytest.mark.parametrize(
    "patch",
    [
        "",
        "*** Begin Patch\n*** End Patch",
        "hello",
        "*** Update File: f\n@@\nnot a row",
        "*** Update File: f",
        "*** Add File: f\n-x",
        "*** Delete File: f\n+x",
        "*** Add File: f\n*** Move to: g",
    ],
)
def test_invalid_patch_is_rejected_with_grammar(patch: str) -> None:
    with pytest.raises(ToolError) as refusal:
        parse_patch(patch)
    answer = refusal.value.answer
    assert answer["code"] == "invalid_arguments" and "*** Update File" in answer["hint"]


def test_patch_add_file_with_unsigned_empty_lines() -> None:
    [section] = parse_patch("*** Add File: f\n+a\n\n+b\n\n*** End Patch\n")
    assert apply_hunks("", section.hunks)[0] == "a\n\nb\n"


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abcd"), max_size=12))
def test_diff_round_trip_property(old: list[str], new: list[str]) -> None:
    text, added, removed = unified_diff(old, new, ("f", "f"))
    rows = text.split("\n")[2:]
    assert [sum(row.startswith(sign) for row in rows) for sign in "+-"] == [added, removed]
    if old and old != new and len(new) > 0:
        patched = apply_hunks("\n".join(old) + "\n", hunks("\n".join(rows)))[0]
        assert patched == "\n".join(new) + "\n"


def test_long_diff_is_computed_cheaply() -> None:
    old = [f"line {n}" for n in range(20_000)]
    text, added, removed = unified_diff(old, [*old[:5], "x", *old[10_000:]], ("f", "f"))
    assert (added, removed) == (1, 9995) and text.split("\n")[2] == "@@ -3,10001 +3,7 @@"


# ---- the tool


async def change(file_tools: FileTools, path: str, old: str, new: str, **more: Any) -> Json:
    return await file_tools.call(TOOL, mode="replace", path=path, old_string=old, new_string=new, **more)


async def test_patch_changes_part_of_file(file_tools: FileTools) -> None:
    path = file_tools.put("a.py", "one\ntwo\nthree\n")
    path.chmod(0o755)
    answer = await change(file_tools, "a.py", "two", "2")
    assert answer == {
        "diff": "--- a.py\n+++ a.py\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three",
        "files": [{"path": "a.py", "added": 1, "removed": 1}],
        "matched_by": "exact",
    }
    assert path.read_text() == "one\n2\nthree\n" and stat.S_IMODE(path.stat().st_mode) == 0o755
    digests = [hashlib.sha256(text).hexdigest() for text in (b"one\ntwo\nthree\n", b"one\n2\nthree\n")]
    assert file_tools.started == {"before": {str(path): digests[0]}, "after": {str(path): digests[1]}}


@pytest.mark.parametrize("data", [b"a\r\nb\r\nc\r\n", b"\xef\xbb\xbfa\r\nb\r\nc\r\n", b"caf\xe9\r\na\r\nb\r\nc\r\n"])
async def test_patch_keeps_other_bytes(file_tools: FileTools, data: bytes) -> None:
    path = file_tools.put("f", data)
    assert (await change(file_tools, "f", "a\nb", "x\ny\nz"))["matched_by"] == "exact"
    assert path.read_bytes() == data.replace(b"a\r\nb", b"x\r\ny\r\nz")


async def test_patched_file_counts_as_read_only_if_it_was(file_tools: FileTools) -> None:
    path = file_tools.put("f", "a\nb\n")
    await change(file_tools, "f", "a", "c")
    assert str(path) not in file_tools.resources.session.seen
    await file_tools.call(files.READ, path="f")
    await change(file_tools, "f", "b", "d")
    assert "code" not in await file_tools.call(files.WRITE, path="f", content="x")


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"mode": "replace", "path": "f", "old_string": "a"}, "invalid_arguments"),
        ({"mode": "replace", "path": "f", "old_string": "", "new_string": "x"}, "invalid_arguments"),
        ({"mode": "replace", "path": "f", "old_string": "a", "new_string": "a"}, "invalid_arguments"),
        ({"mode": "patch"}, "invalid_arguments"),
        ({"mode": "other"}, "invalid_arguments"),
        ({"mode": "replace", "path": "f", "old_string": "a", "new_string": "«redacted:known»"}, "redacted_marker"),
        ({"mode": "patch", "patch": "*** Add File: g\n+K=«redacted:known»"}, "redacted_marker"),
        ({"mode": "replace", "path": "gone", "old_string": "a", "new_string": "b"}, "path_not_found"),
        ({"mode": "replace", "path": "bin", "old_string": "a", "new_string": "b"}, "binary_file"),
        ({"mode": "replace", "path": "big", "old_string": "a", "new_string": "b"}, "too_large"),
        ({"mode": "replace", "path": ".env", "old_string": "a", "new_string": "b"}, "path_refused"),
        ({"mode": "replace", "path": "f", "old_string": "zzz", "new_string": "b"}, "no_match"),
        ({"mode": "replace", "path": "f", "old_string": "a", "new_string": "b"}, "ambiguous_match"),
        ({"mode": "patch", "patch": "*** Add File: f\n+x"}, "stale_file"),
        ({"mode": "patch", "patch": "*** Update File: f\n*** Move to: bin"}, "stale_file"),
        ({"mode": "patch", "patch": "*** Delete File: f\n*** Add File: f\n+x"}, "invalid_arguments"),
        ({"mode": "patch", "patch": "*** Delete File: gone"}, "path_not_found"),
    ],
)
async def test_failed_patch_changes_nothing(file_tools: FileTools, args: Json, code: str) -> None:
    file_tools.put("f", "a\na\n")
    file_tools.put("bin", b"a\0")
    file_tools.put(".env", "a")
    os.truncate(file_tools.put("big", "a"), WRITTEN_BYTES_MAX + 1)
    before = {path.name: path.stat().st_mtime_ns for path in file_tools.folder.iterdir()}
    answer = await file_tools.call(TOOL, **args)
    assert answer["code"] == code, answer
    assert {path.name: path.stat().st_mtime_ns for path in file_tools.folder.iterdir()} == before


async def test_patch_diff_is_redacted(file_tools: FileTools) -> None:
    file_tools.put("f", f"one\nkey {KNOWN}\nthree\n")
    answer = await change(file_tools, "f", "one\nkey", "x\nkez")
    assert KNOWN not in str(answer) and "+kez «redacted:known»" in answer["diff"]
    answer = await change(file_tools, "f", "x\nkez «redacted:known»\nthree", "y")
    assert answer["code"] == "no_match" and KNOWN not in str(answer) and "stands for a secret" in answer["hint"]
    assert answer["nearest"][0]["line"] == 1
    assert KNOWN in (file_tools.folder / "f").read_text()


async def test_patch_long_diff_is_truncated(file_tools: FileTools) -> None:
    file_tools.put("f", "line\n" * 20_000)
    answer = await change(file_tools, "f", "line", "some other text " + KNOWN, replace_all=True)
    assert len(answer["diff"]) <= DIFF_CHARS_MAX and KNOWN not in answer["diff"] and "left out" in answer["diff"]


SEVERAL = """*** Begin Patch
*** Update File: a.py
@@
-one
+1
*** Add File: new/b.py
+def f(:
*** Delete File: c.txt
*** Update File: run.sh
*** Move to: bin/run.sh
@@
 #!/bin/sh
-old
+new
*** End Patch
"""


def several(file_tools: FileTools) -> None:
    for name, content in (("a.py", "one\ntwo\n"), ("c.txt", "gone\n"), ("run.sh", "#!/bin/sh\nold\n")):
        file_tools.put(name, content).chmod(0o750)


def tree(file_tools: FileTools) -> dict[str, tuple[str, int]]:
    paths = (path for path in file_tools.folder.rglob("*") if path.is_file())
    return {str(p.relative_to(file_tools.folder)): (p.read_text(), stat.S_IMODE(p.stat().st_mode)) for p in paths}


async def test_patch_several_files_atomically(file_tools: FileTools) -> None:
    several(file_tools)
    answer = await file_tools.call(TOOL, mode="patch", patch=SEVERAL)
    created = tree(file_tools)
    assert {name: content for name, (content, _) in created.items()} == {
        "a.py": "1\ntwo\n",
        "new/b.py": "def f(:\n",
        "bin/run.sh": "#!/bin/sh\nnew\n",
    }
    assert created["bin/run.sh"][1] == 0o750 and created["a.py"][1] == 0o750
    assert answer["files"] == [
        {"path": "a.py", "added": 1, "removed": 1},
        {"path": "new/b.py", "added": 1, "removed": 0},
        {"path": "c.txt", "added": 0, "removed": 1},
        {"path": "bin/run.sh", "added": 1, "removed": 1},
    ]
    assert [(fault["path"], fault["line"]) for fault in answer["diagnostics"]] == [("new/b.py", 1)]
    assert "--- c.txt\n+++ /dev/null" in answer["diff"] and "--- run.sh\n+++ bin/run.sh" in answer["diff"]


async def test_patch_one_failing_hunk_changes_no_file(file_tools: FileTools) -> None:
    several(file_tools)
    before = tree(file_tools)
    answer = await file_tools.call(TOOL, mode="patch", patch=SEVERAL.replace("-old", "-older"))
    assert answer["code"] == "no_match" and answer["error"].startswith("run.sh: ")
    assert tree(file_tools) == before


@pytest.mark.parametrize("failing", range(5))
async def test_patch_write_failure_rolls_back(
    file_tools: FileTools, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    several(file_tools)
    before, count = tree(file_tools), 0

    def after_some(method: Any) -> Any:
        def act(paths: Paths, *args: Any) -> Any:
            nonlocal count
            count += 1
            if count == failing + 1:
                raise OSError(28, "No space left on device")
            return method(paths, *args)

        return act

    for name in ("replace", "remove"):
        monkeypatch.setattr(Paths, name, after_some(getattr(Paths, name)))
    answer = await file_tools.call(TOOL, mode="patch", patch=SEVERAL)
    assert answer["code"] == "tool_crashed" and "Nothing was changed" in answer["hint"]
    assert tree(file_tools) == before


async def test_patch_failed_rollback_is_reported(file_tools: FileTools, monkeypatch: pytest.MonkeyPatch) -> None:
    several(file_tools)
    count, replace = 0, Paths.replace

    def failing(paths: Paths, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count > 1:
            raise OSError(5, "Input/output error")
        return replace(paths, *args)

    monkeypatch.setattr(Paths, "replace", failing)
    answer = await file_tools.call(TOOL, mode="patch", patch=SEVERAL)
    assert answer["code"] == "tool_crashed" and answer["error"].endswith("undone in: a.py.")


async def test_patch_detects_concurrent_change(file_tools: FileTools) -> None:
    several(file_tools)
    args = {"mode": "patch", "patch": SEVERAL}
    ctx = await file_tools.prepare(TOOL, args)
    file_tools.put("c.txt", "changed")
    before = tree(file_tools)
    with pytest.raises(ToolError) as refusal:
        await file_tools.carry_out(TOOL, ctx, args)
    assert refusal.value.answer["code"] == "stale_file" and tree(file_tools) == before


async def test_patch_reconcile_by_digests(file_tools: FileTools) -> None:
    several(file_tools)
    args = {"mode": "patch", "patch": SEVERAL}
    ctx = await file_tools.prepare(TOOL, args)
    started = file_tools.started

    async def known() -> str:
        return await file_access.reconcile(file_tools.context(), args, started)

    assert await known() == "not_done"
    await file_tools.carry_out(TOOL, ctx, args)
    assert await known() == "done"
    file_tools.put("c.txt", "gone\n")
    assert await known() == "unclear", "some files are as before, some as after"


def test_patch_preview_names_files() -> None:
    assert TOOL.preview(TOOL.decode({"mode": "patch", "patch": SEVERAL})) == "a.py, new/b.py, c.txt, run.sh"
    assert TOOL.preview(TOOL.decode({"mode": "patch"})) == ""
