"""The tool `search_files`: with ripgrep and without, what is found, what is left out, and what is never shown."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hermes.core.limits import SEARCH_CONTEXT_LINES_MAX, SEARCH_HITS_MAX, SEARCH_PATTERN_CHARS_MAX
from hermes.sandbox import bubblewrap
from hermes.sandbox.base import Sandbox, SandboxError
from hermes.sandbox.bubblewrap import Bubblewrap
from hermes.sandbox.local import Local
from hermes.tools import searching
from hermes.tools.rg_fallback import Glob
from hermes.tools.searching import TOOL

from .filing import KNOWN, FileTools, Json

HAS_RG = shutil.which("rg", path="/usr/local/bin:/usr/bin:/bin") is not None
needs_rg = pytest.mark.skipif(not HAS_RG, reason="ripgrep is not installed")


class NoRipgrep(Sandbox):
    """Where there is no ripgrep."""

    async def spawn(self, argv: Any, **options: Any) -> Any:
        if argv[0] == "rg":
            raise SandboxError("no such command")
        return await super().spawn(argv, **options)


class LocalWithoutRipgrep(NoRipgrep, Local):
    """A machine without ripgrep."""


@pytest.fixture(params=[pytest.param("rg", marks=needs_rg), "plain"])
def file_tools(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileTools]:
    """A workspace on a machine with ripgrep, and one without."""
    file_tools = FileTools(tmp_path)
    file_tools.resources.make = Local if request.param == "rg" else LocalWithoutRipgrep
    yield file_tools
    file_tools.threads.close()


async def search(file_tools: FileTools, pattern: str, **args: Any) -> Json:
    return await file_tools.call(TOOL, pattern=pattern, **args)


async def places(file_tools: FileTools, pattern: str, **args: Any) -> list[str]:
    return [f"{hit['path']}:{hit['line']}" for hit in (await search(file_tools, pattern, **args))["matches"]]


# ---- content


async def test_search_finds_lines_in_order(file_tools: FileTools) -> None:
    file_tools.put("b/x.py", "def f():\n    return needle\n")
    file_tools.put("a.txt", "needle\nno\nneedle two needle\n")
    answer = await search(file_tools, "needle")
    assert answer == {
        "matches": [
            {"path": "a.txt", "line": 1, "text": "needle"},
            {"path": "a.txt", "line": 3, "text": "needle two needle"},
            {"path": "b/x.py", "line": 2, "text": "    return needle"},
        ],
        "total": 3,
        "truncated": False,
        "next_offset": None,
        "withheld": 0,
    }


async def test_search_pagination_has_no_gap(file_tools: FileTools) -> None:
    for name in "abc":
        file_tools.put(name, "x 1\nx 2\nno\nx 3\n")
    whole = (await search(file_tools, "x"))["matches"]
    assert len(whole) == 9
    matches: list[Json] = []
    offset: int | None = 0
    while offset is not None:
        answer = await search(file_tools, "x", offset=offset, limit=2)
        assert answer["total"] == 9 and answer["truncated"] == (answer["next_offset"] is not None)
        matches += answer["matches"]
        offset = answer["next_offset"]
    assert matches == whole
    answer = await search(file_tools, "x", offset=9)
    assert answer["matches"] == [] and answer["next_offset"] is None


async def test_search_context_lines(file_tools: FileTools) -> None:
    file_tools.put("f", "1\n2\n3 x\n4\n5 x\n6\n7\n")
    hits = (await search(file_tools, "x", context=2))["matches"]
    assert [(hit["before"], hit["text"], hit["after"]) for hit in hits] == [
        (["1", "2"], "3 x", ["4", "5 x"]),
        (["3 x", "4"], "5 x", ["6", "7"]),
    ]


async def test_search_output_modes_count_and_files(file_tools: FileTools) -> None:
    file_tools.put("a", "x\nx\n")
    file_tools.put("b", "y\n")
    file_tools.put("c", "x x\n")
    answer = await search(file_tools, "x", output_mode="count")
    assert answer["matches"] == [{"path": "a", "count": 2}, {"path": "c", "count": 1}] and answer["total"] == 2
    answer = await search(file_tools, "x", output_mode="files_only", limit=1)
    assert answer["matches"] == ["a"] and answer["total"] == 2 and answer["next_offset"] == 1


@pytest.mark.parametrize(
    ("pattern", "args", "expected"),
    [
        (r"^def \w+\(", {}, ["a.py:1"]),
        ("DEF", {}, []),
        ("DEF", {"ignore_case": True}, ["a.py:1"]),
        (r"two$", {}, ["crlf.txt:2"]),
        (r"(?<=on)e", {}, ["crlf.txt:1"]),
        (r"(a)\1\1", {}, ["a.py:3"]),
        (r"é", {}, ["a.py:2"]),
        ("f() {", {}, []),
        (r"return", {"file_glob": "*.txt"}, []),
        (r"return|one", {"file_glob": "*.{py,txt}"}, ["a.py:2", "crlf.txt:1"]),
        (r"return", {"path": "a.py"}, ["a.py:2"]),
        (r"deep", {"path": "sub"}, ["sub/inner/d.txt:1"]),
        (r"deep", {"file_glob": "sub/**/*.txt"}, ["sub/inner/d.txt:1"]),
        (r"deep", {"file_glob": "inner/*.txt"}, []),
        ("--", {}, ["a.py:4"]),
    ],
)
async def test_search_patterns_and_globs(file_tools: FileTools, pattern: str, args: Json, expected: list[str]) -> None:
    file_tools.put("a.py", "def f(x):\n    return 'é'\naaa\n--help\n")
    file_tools.put("crlf.txt", "one\r\ntwo\r\n")
    file_tools.put("sub/inner/d.txt", "deep\n")
    assert await places(file_tools, pattern, **args) == expected


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"pattern": "foo("}, "invalid_arguments"),
        ({"pattern": "[z-a]"}, "invalid_arguments"),
        ({"pattern": "x", "file_glob": "[a"}, "invalid_arguments"),
        ({"pattern": "x", "path": "gone"}, "path_not_found"),
        ({"pattern": "x", "path": "~/.ssh"}, "path_refused"),
        ({"pattern": "x", "path": ".env"}, "path_refused"),
        ({"pattern": "x", "path": "bin"}, "binary_file"),
        ({"pattern": ""}, "invalid_arguments"),
        ({"pattern": "x" * (SEARCH_PATTERN_CHARS_MAX + 1)}, "invalid_arguments"),
        ({"pattern": "x", "limit": SEARCH_HITS_MAX + 1}, "invalid_arguments"),
        ({"pattern": "x", "limit": 0}, "invalid_arguments"),
        ({"pattern": "x", "context": SEARCH_CONTEXT_LINES_MAX + 1}, "invalid_arguments"),
        ({"pattern": "x", "offset": -1}, "invalid_arguments"),
    ],
)
async def test_search_rejects_invalid_requests(file_tools: FileTools, args: Json, code: str) -> None:
    file_tools.put("bin", b"\0x")
    file_tools.put(".env", "x")
    answer = await file_tools.call(TOOL, **args)
    assert answer["code"] == code and answer["error"], answer


async def test_search_limits_are_accepted(file_tools: FileTools) -> None:
    file_tools.put("f", "x\n")
    pattern = "x" + "y?" * (SEARCH_PATTERN_CHARS_MAX // 2 - 1)
    answer = await search(file_tools, pattern, limit=SEARCH_HITS_MAX, context=SEARCH_CONTEXT_LINES_MAX)
    assert answer["total"] == 1


# ---- what is left out


async def test_search_skips_ignored_hidden_and_binary_files(file_tools: FileTools) -> None:
    file_tools.put(".gitignore", "*.log\n/build/\n!keep.log\n")
    for name in ("a.txt", "b.log", "keep.log", "build/x.txt", "sub/build/y.txt", ".hidden", ".dir/z.txt"):
        file_tools.put(name, "needle\n")
    file_tools.put("bin.dat", b"needle\n\0\n")
    file_tools.put("late.dat", b"needle\n" * 20_000 + b"\0")
    (file_tools.folder / "link.txt").symlink_to("a.txt")
    assert await places(file_tools, "needle") == ["a.txt:1", "keep.log:1", "sub/build/y.txt:1"]
    assert await places(file_tools, "needle", path=".dir") == [".dir/z.txt:1"]
    assert await places(file_tools, "needle", path=".hidden") == [".hidden:1"]
    assert await places(file_tools, "needle", path="build") == ["build/x.txt:1"]
    assert await places(file_tools, "needle", file_glob=".hid*") == [".hidden:1"]
    assert await places(file_tools, "needle", file_glob=".dir/*") == [".dir/z.txt:1"]
    assert await places(file_tools, "needle", file_glob="*.log") == ["keep.log:1"]


async def test_search_counts_withheld_files(file_tools: FileTools) -> None:
    file_tools.put("a.txt", "needle\n")
    file_tools.put("store.kdbx", "needle\n")
    file_tools.put("other.kdbx", "nothing\n")
    answer = await search(file_tools, "needle")
    assert [hit["path"] for hit in answer["matches"]] == ["a.txt"] and answer["total"] == 1
    assert answer["withheld"] == 2
    file_tools.put(".env", "needle\n")
    named = [await search(file_tools, pattern, file_glob=".env") for pattern in ("needle", "^n", "zzz")]
    assert [(answer["matches"], answer["withheld"]) for answer in named] == [([], 1)] * 3


async def test_search_withholds_private_key_matches(file_tools: FileTools) -> None:
    file_tools.put(
        "server.pem", "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n-----END PRIVATE KEY-----\n"
    )
    answer = await search(file_tools, "MII")
    assert (answer["matches"], answer["total"], answer["withheld"]) == ([], 0, 1)


async def test_search_redacts_secrets_by_kind(file_tools: FileTools) -> None:
    file_tools.put("f", f"needle {KNOWN} end\n" + f"needle {'x' * 490} {KNOWN}\n")
    hits = (await search(file_tools, "needle"))["matches"]
    assert hits[0]["text"] == "needle «redacted:known» end"
    assert KNOWN[:6] not in str(hits) and len(hits[1]["text"]) <= 500


async def test_search_answer_fits_window(file_tools: FileTools) -> None:
    file_tools.put("f", ("needle " + "x" * 200 + "\n") * 400)
    file_tools.resources.window_tokens = 8192
    answer = await search(file_tools, "needle", limit=400)
    assert 5 < len(answer["matches"]) < 40 and answer["truncated"] and answer["total"] == 400
    assert answer["next_offset"] == len(answer["matches"])


async def test_search_in_spilled_results(file_tools: FileTools) -> None:
    file_tools.resources.spill.mkdir(parents=True)
    path = file_tools.resources.spill / "call.txt"
    path.write_text("a\nneedle\n")
    assert await places(file_tools, "needle", path=str(path)) == [f"{path}:2"]


# ---- files


@pytest.mark.parametrize(
    ("pattern", "args", "expected"),
    [
        ("*.py", {}, ["a.py", "src/b.py", "src/deep/c.py"]),
        ("src/*.py", {}, ["src/b.py"]),
        ("src/**/*.py", {}, ["src/b.py", "src/deep/c.py"]),
        ("**/deep/*", {}, ["src/deep/c.py", "src/deep/d.txt"]),
        ("[ab].py", {}, ["a.py", "src/b.py"]),
        ("[!a].py", {}, ["src/b.py", "src/deep/c.py"]),
        ("?.{py,txt}", {"path": "src"}, ["src/b.py", "src/deep/c.py", "src/deep/d.txt"]),
        ("A.PY", {}, []),
        ("A.PY", {"ignore_case": True}, ["a.py"]),
        ("*", {"file_glob": "*.txt"}, ["src/deep/d.txt"]),
        (".github/**", {}, [".github/w/ci.yml"]),
        (".git*", {}, [".gitignore"]),
        ("*", {"path": ".github"}, [".github/w/ci.yml"]),
        ("a.py", {"path": "a.py"}, ["a.py"]),
        ("*.kdbx", {}, []),
    ],
)
async def test_search_files_by_name(file_tools: FileTools, pattern: str, args: Json, expected: list[str]) -> None:
    for name in ("a.py", "src/b.py", "src/deep/c.py", "src/deep/d.txt", ".github/w/ci.yml", "out/x.py", "k.kdbx"):
        file_tools.put(name)
    file_tools.put(".gitignore", "out/\n")
    answer = await search(file_tools, pattern, target="files", **args)
    assert answer["matches"] == expected
    assert answer["withheld"] == (pattern == "*.kdbx")


@pytest.mark.parametrize("glob", ["*a" * 40 + "b", "**/" * 20 + "x", "{a,b}" * 6])
def test_glob_matching_is_fast(glob: str) -> None:
    assert not Glob(glob).matches(["a" * 250] * 30)


@pytest.mark.parametrize("glob", ["[", "a\\", "{a,b}" * 7, "[z-a]"])
def test_invalid_glob_is_rejected(glob: str) -> None:
    with pytest.raises(ValueError):
        Glob(glob)


# ---- time


async def test_search_with_endless_pattern_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_tools = FileTools(tmp_path)
    file_tools.resources.make = LocalWithoutRipgrep
    file_tools.put("a", "x\n")
    file_tools.put("b", "a" * 60 + "\n")
    for seconds in (1.0, 10.0, 40.0):
        monkeypatch.setattr(searching.limits, "SEARCH_FILES_S_MAX", seconds)
        answer = await search(file_tools, r"x|(a+)+$|(a+)+b", output_mode="files_only")
        assert "code" not in answer
        answer = await search(file_tools, r"x|(a+)+b", output_mode="files_only")
        if answer["matches"]:  # a slow machine has more time to come to the second file
            break
    assert answer["timed_out"] and answer["truncated"] and answer["matches"] == ["a"] and "smaller" in answer["hint"]
    file_tools.threads.close()


async def test_search_without_sandbox_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no(*_: Any, **__: Any) -> Any:
        raise SandboxError("no")

    file_tools = FileTools(tmp_path)
    monkeypatch.setattr(Local, "spawn", no)
    assert (await search(file_tools, "x"))["code"] == "tool_unavailable"
    file_tools.threads.close()


class WrappedWithoutRipgrep(NoRipgrep, Bubblewrap):
    """A sandbox in which there is no ripgrep."""


@pytest.mark.parametrize("kind", [Bubblewrap, WrappedWithoutRipgrep])
async def test_search_in_sandbox(tmp_path: Path, kind: Any) -> None:
    if failure := bubblewrap.probe():
        pytest.skip(f"bubblewrap does not work here: {failure}")
    file_tools = FileTools(tmp_path)
    file_tools.resources.make = kind
    file_tools.put("src/a.txt", "needle\n")
    assert await places(file_tools, "needle", path="src") == ["src/a.txt:1"]
    assert (await search(file_tools, "*.txt", target="files"))["matches"] == ["src/a.txt"]
    file_tools.resources.spill.mkdir(parents=True)
    (file_tools.resources.spill / "call.txt").write_text("needle")
    assert len(await places(file_tools, "needle", path=str(file_tools.resources.spill))) == 1
    file_tools.threads.close()


# ---- both ways

NAMES = st.sampled_from(["a", "b", "a.py", "b.log", ".h", "build", "x y", "é.txt", "[c]"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
RULES = st.sampled_from(
    [
        "*.log",
        "a",
        "/a",
        "b/",
        "!b",
        "!*.log",
        "a/b",
        "**/b",
        "a/**",
        "!a/b",
        "*",
        "!*/",
        "!.h",
        "build/*",
        "# a",
        "",
        "x\\ y",
        "x y  ",
        "[ab]",
        "[!ab]*",
        "\\[c\\]",
        "*.{py,log}",
        "?",
        "a*",
        "**/a/**/b",
        "é*",
        "/build",
        "\\!b",
        "[",
    ]
)
IGNORING = st.dictionaries(
    st.tuples(st.sampled_from(["", "a/", "build/"]), st.sampled_from([".gitignore", ".ignore", ".rgignore"])),
    st.lists(RULES, min_size=1, max_size=3),
    max_size=3,
)
CONTENTS = st.lists(st.sampled_from(["needle", "Needle x", "", "other", "né", "a\0", "needle\r"]), max_size=4)


@needs_rg
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tree=st.dictionaries(PATHS, CONTENTS, max_size=8),
    ignoring=IGNORING,
    pattern=st.sampled_from(["needle", "^needle$", r"n.+e\b", "[^a-z]", "x|é", ""]),
    args=st.fixed_dictionaries(
        {},
        optional={
            "path": st.sampled_from([".", "a", "build"]),
            "file_glob": st.sampled_from(["*.py", "*.{py,log}", ".h", "a/*", "**/b", "[ab]*"]),
            "ignore_case": st.booleans(),
            "context": st.integers(0, 2),
            "git": st.booleans(),
        },
    ),
)
@example({"a/b": ["needle"], "b": ["needle"]}, {("", ".gitignore"): ["*", "!a/", "!a/b"]}, "needle", {})
@example({"a/b": ["needle"]}, {("", ".gitignore"): ["b"], ("a/", ".ignore"): ["!b"]}, "needle", {"path": "a"})
@example(
    {"a/b/c": ["needle"], "a/a": ["needle"]},
    {("", ".gitignore"): ["a"], ("a/", ".rgignore"): ["b/"]},
    "needle",
    {"path": "a"},
)
async def test_search_with_and_without_ripgrep_agree_property(
    tmp_path_factory: pytest.TempPathFactory,
    tree: dict[str, list[str]],
    ignoring: dict[tuple[str, str], list[str]],
    pattern: str,
    args: Json,
) -> None:
    folder = tmp_path_factory.mktemp("both")
    file_tools = FileTools(folder)
    for path, lines in tree.items():
        if (
            not any((file_tools.folder / above).is_file() for above in Path(path).parents)
            and not (file_tools.folder / path).exists()
        ):
            file_tools.put(path, "\n".join(lines))
    for (where, name), rules in ignoring.items():
        if not (file_tools.folder / where).is_file() and not os.path.isfile(file_tools.folder / where.rstrip("/")):
            file_tools.put(where + name, "\n".join(rules) + "\n")
    arguments = dict(args)
    if arguments.pop("git", False) and (file_tools.folder / "a").is_dir():
        (file_tools.folder / "a/.git").mkdir(exist_ok=True)
    results = []
    for make in (Local, LocalWithoutRipgrep):
        file_tools.resources.make = make
        content = await search(file_tools, pattern or "x?", **arguments)
        names = await search(file_tools, "*", target="files", **{k: v for k, v in arguments.items() if k != "context"})
        results.append((content, names))
    file_tools.threads.close()
    assert results[0] == results[1]
    shutil.rmtree(folder)
