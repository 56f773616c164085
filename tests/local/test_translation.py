"""Prompts of the local model: few tools, short descriptions, examples, and a grammar for the answer."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from hermes.local import CHOOSES, PREFIX
from hermes.providers.base import Prompt, ToolSchema, ToolSchemas, WireRequest
from hermes.providers.local import PROVIDER, forms
from hermes.providers.routes import LOCAL
from hermes.tools.framework.toolsets import builtin

TOOLS = [
    ToolSchema(tool.name, tool.description, tool.parameters)
    for tool in builtin().all()
    if tool.toolset in (PROVIDER.capabilities("local").toolsets or ())
]
FACTS = "Working folder: /work. Today is Monday, 2026-01-05."


def request(question: str = "do it", tools: list[ToolSchema] | None = None, **more: Any) -> WireRequest:
    messages = more.pop("messages", [{"role": "user", "content": question}])
    offered = ToolSchemas(TOOLS if tools is None else tools)
    return PROVIDER.request(LOCAL, None, Prompt(more.pop("system", [FACTS]), messages, offered, **more))


def names(wire: WireRequest) -> list[str]:
    """The tools that may be called."""
    root = wire.body["grammar"].partition("\n")[0]
    return re.findall(r'tool\\": " "\\"(\w+)', root)


def may_answer(wire: WireRequest) -> bool:
    return 'answer\\": ' in wire.body["grammar"].partition("\n")[0]


def steps() -> list[dict[str, Any]]:
    return [step for shot in forms()["shots"] for step in shot.get("steps", ())]


def test_example_calls_match_tool_schemas() -> None:
    from hermes.tools.framework.arguments import check

    for step in steps():
        tool = builtin().get(step["tool"])
        assert tool is not None and check(step["arguments"], tool.parameters) == (step["arguments"], "")


def test_examples_show_every_kind_of_work() -> None:
    counts = Counter(step["tool"] for step in steps())
    most_used = ("read_file", "search_files", "patch", "terminal", "memory", "session_search", "cronjob")
    assert all(counts[name] >= 2 for name in most_used)
    assert {name for name, form in forms()["tools"].items() if not form.get("hidden")} == set(counts)
    assert any(len(shot.get("steps", ())) > 1 for shot in forms()["shots"])
    assert any("steps" not in shot for shot in forms()["shots"])


def test_tool_forms_match_real_tools() -> None:
    for name, form in forms()["tools"].items():
        tool = builtin().get(name)
        assert tool is not None
        for call in form.get("calls", ()):
            assert set(call) <= set(tool.parameters["properties"])
            assert set(tool.parameters.get("required", ())) <= set(call)


def test_prefix_is_same_for_every_folder_and_question() -> None:
    first, other = request("read a.txt"), request("hello", system=["Working folder: /elsewhere. You know: x."])
    count = int(first.headers[PREFIX])
    assert count == int(other.headers[PREFIX]) > 20
    assert first.body["messages"][:count] == other.body["messages"][:count]
    rest = first.body["messages"][count:]
    assert len(rest) == 1 and rest[0]["role"] == "user"
    assert FACTS in rest[0]["content"] and FACTS not in str(first.body["messages"][:count])


def test_prefix_is_same_when_tools_are_turned_off() -> None:
    everything, few = request(), request(tools=[tool for tool in TOOLS if tool.name in ("read_file", "terminal")])
    count = int(few.headers[PREFIX])
    assert few.body["messages"][:count] == everything.body["messages"][:count] and len(names(few)) == 2
    assert "Turned off: cronjob, memory, patch" in few.body["messages"][-1]["content"]


def test_web_address_is_opened_only_when_there_is_one() -> None:
    assert "web_extract" not in names(request("good morning"))
    assert names(request("what does http://a.org say?")) == ["web_extract"]


@pytest.mark.parametrize(
    ("question", "rule"),
    [
        ("remind me in a few minutes to eat", "span"),
        ("every morning at 9 tell me the news", "daily"),
        ("wake me tomorrow at 7", "schedule"),
        ("every Monday remind me of the bins", "schedule"),
    ],
)
def test_words_for_a_time_narrow_the_schedule(question: str, rule: str) -> None:
    wire = request(question)
    root = wire.body["grammar"].partition("\n")[0]
    assert names(wire) == ["cronjob"] and re.findall(r'schedule\\": " (\w+)', root) == [rule]


@pytest.mark.parametrize(
    ("question", "schedule"),
    [
        ("remind me in two hours to eat", "2h"),
        ("tell me in half an hour that it is time", "30m"),
        ("wake me in 45 minutes", "45m"),
        ("Erinnere mich in zehn Minuten an den Tee", "10m"),
        ("weck mich in einer halben Stunde", "30m"),
        ("erinnere mich in 3 Tagen an die Rechnung", "3d"),
    ],
)
def test_schedule_interval_is_taken_from_the_request(question: str, schedule: str) -> None:
    wire = request(question)
    root = wire.body["grammar"].partition("\n")[0]
    assert names(wire) == ["cronjob"] and re.findall(r'schedule\\": " "\\"(\w+)', root) == [schedule]


def test_changes_are_looked_at_and_not_made() -> None:
    looks = ("git status --short && git diff HEAD", "git log --oneline -10")
    assert "cat README*" in request("what is this project about?").body["grammar"]
    for question in ("write a commit message for my changes", "what has changed in git?"):
        root = request(question).body["grammar"].partition("\n")[0]
        assert names(request(question)) == ["terminal"] and all(command in root for command in looks)
    assert looks[0] not in request("commit my changes, git message x").body["grammar"]


FILE_TOOLS = {"read_file", "search_files", "write_file", "patch", "terminal"}
REQUESTS = [
    ("summarise README.md", {"read_file"}),
    ("is there a mistake in main.py?", {"read_file"}),
    ("change the title in README.md", FILE_TOOLS),
    ("write a commit message for my changes", {"terminal"}),
    ("was steht in notizen.txt?", FILE_TOOLS),
    ("what does a.py print?", {"terminal"}),
    ("what is the output of tools/a.sh?", {"terminal"}),
    ("write b.py which prints 2", FILE_TOOLS - {"patch"}),
    ("how many lines does a.csv have?", {"terminal"}),
    ("how many cities are in a.csv?", FILE_TOOLS),
    ("what did we talk about yesterday?", {"session_search"}),
    ("worüber haben wir letzte Woche gesprochen?", {"session_search"}),
    ("Was hatten wir zum Umzug ausgemacht?", {"session_search"}),
    ("did I mention to you that I play chess?", {"session_search"}),
    ("wake me tomorrow at 7", {"cronjob"}),
    ("erinnere mich morgen an den Zahnarzt", {"cronjob"}),
    ("remember that I like tea", {"memory"}),
    ("how is the weather in Oslo?", {"web_search"}),
    ("what time is it?", {"terminal"}),
]


@pytest.mark.parametrize(("question", "tools"), REQUESTS)
def test_request_that_needs_a_result_starts_with_a_call(question: str, tools: set[str]) -> None:
    wire = request(question)
    assert set(names(wire)) == tools and not may_answer(wire)


@pytest.mark.parametrize(
    "question",
    [
        "hello there, which ship is the largest?",
        "what is the capital of France?",
        "how do I read a csv in Python? data.csv",
    ],
)
def test_other_questions_may_be_answered(question: str) -> None:
    wire = request(question)
    assert may_answer(wire) and len(names(wire)) >= 6


@pytest.mark.parametrize(
    "question", ["Hi!", "thank you!", "what can you do?", "Guten Morgen", "wer bist du?", "Plan a week of dinners"]
)
def test_small_talk_is_answered(question: str) -> None:
    wire = request(question)
    assert may_answer(wire) and names(wire) == [] and wire.body["temperature"] == 0.7
    assert request("read a.txt").body["temperature"] == 0
    assert request(question, sampling={"temperature": 0.2}).body["temperature"] == 0.2


def test_text_is_asked_for_in_full() -> None:
    assert request("Plan a week of dinners").body["messages"][-1]["content"].endswith("ask back.)")
    assert request("write a poem").body["messages"][-1]["content"].endswith("in full.)")
    assert 'answer\\": " text' in request("Plan a week of dinners").body["grammar"]
    assert 'answer\\": " string' in request("hello").body["grammar"]


def test_language_of_the_answer_is_that_of_the_request() -> None:
    german = "Antworte auf Deutsch.)"
    for question in ("Was ist ein Schiff?", "Welche Dateien gibt es hier?", "Erzähl mir von dem Meer"):
        assert request(question).body["messages"][-1]["content"].endswith(german)
    for question in ("who was in the war?", "will it rain in Köln?", "translate 'ich bin da' to English"):
        assert not request(question).body["messages"][-1]["content"].endswith(german)
    read = called("read_file", {"path": "a.txt"}, {"content": "1|hi"})
    assert reminder(after("Was steht in a.txt?", read)) == "(Antworte jetzt auf Deutsch: Was steht in a.txt?)"


def test_missing_tool_is_named() -> None:
    wire = request("how is the weather in Oslo?", [tool for tool in TOOLS if not tool.name.startswith("web")])
    assert wire.body["messages"][-1]["content"].endswith("(You have no access to the web. Say so.)") and may_answer(
        wire
    )


DONE = "(That worked. Say in one sentence what you did.)"


def after(question: str, *result: list[dict[str, Any]]) -> WireRequest:
    return request(messages=[{"role": "user", "content": question}, *(message for call in result for message in call)])


def reminder(wire: WireRequest) -> str:
    return str(wire.body["messages"][-1]["content"]).rpartition("\n")[2]


def test_requested_file_is_written_before_the_answer() -> None:
    question = "read a.txt and write its first word to b.txt"
    read = called("read_file", {"path": "a.txt"}, {"content": "1|hi"})
    refused = called("write_file", {"path": "b.txt", "content": "hi"}, {"error": "b.txt was not read."})
    written = called("write_file", {"path": "b.txt", "content": "hi"}, {"path": "b.txt"})
    assert not may_answer(after(question)) and "read_file" in names(after(question))
    assert names(after(question, read)) == ["write_file", "terminal"] and not may_answer(after(question, read))
    assert reminder(after(question, read)) == "(Not done yet: write its first word to b.txt. Use a tool.)"
    assert reminder(after(question, read, written)) == DONE
    assert "read_file" in names(after(question, read, refused)) and not may_answer(after(question, read, refused))
    nothing = called("search_files", {"pattern": "a.txt"}, {"matches": []})
    assert "read_file" in names(after(question, nothing)) and "read_file" not in names(after(question, read))
    assert may_answer(after(question, read, written))
    given_up = after(question, read, refused, refused, refused)
    assert may_answer(given_up)
    assert reminder(given_up) == "(This was not done: write its first word to b.txt. Say so.)"


def test_requested_program_runs_before_the_answer() -> None:
    question = "write two.py that prints 2 and run it"
    written = called("write_file", {"path": "two.py", "content": "print(2)"}, {"path": "two.py"})
    run = called("terminal", {"command": "python3 two.py"}, {"output": "2"})
    assert names(after(question, written)) == ["terminal"] and not may_answer(after(question, written))
    assert may_answer(after(question, written, run))


def test_tool_that_is_called_twice_alike_is_not_offered_again() -> None:
    question = "find out where add is defined"
    run = called("search_files", {"pattern": "add"}, {"matches": [{"path": "a.py", "line": 1, "text": "def add"}]})
    other = called("search_files", {"pattern": "sub"}, {"matches": []})
    assert "search_files" in names(after(question, other))
    assert "search_files" not in names(after(question, other, other)) and may_answer(after(question, other, other))
    assert "search_files" not in names(after(question, run)) and "read_file" in names(after(question, run))


def test_last_read_file_is_answered() -> None:
    question = "find the file with add in it and show me that file"
    run = called("search_files", {"pattern": "add"}, {"matches": [{"path": "a.py", "line": 1, "text": "def add"}]})
    read = called("read_file", {"path": "a.py"}, {"content": "1|def add"})
    assert names(after(question, run)) == ["read_file", "terminal"] and not may_answer(after(question, run))
    assert names(after(question, run, read)) == [] and may_answer(after(question, run, read))
    assert reminder(after(question, run, read)) == "(Answer now: show me that file)"


def test_pasted_text_is_not_repeated() -> None:
    read = called("read_file", {"path": "a.txt"}, {"content": "1|hi"})
    assert after(f"compare this with a.txt: {'x ' * 300}", read).body["messages"][-1]["content"] == "[result] 1|hi"


def test_web_search_is_offered_only_for_current_or_outside_facts() -> None:
    assert not {"web_search", "session_search", "memory"} & set(names(request("name three large rivers")))
    assert "web_search" in names(request("what does the ferry cost today?"))


def test_after_result_it_may_answer() -> None:
    messages = [{"role": "user", "content": "read a.txt"}, *called("read_file", {"path": "a.txt"}, {"content": "1|hi"})]
    assert may_answer(request(messages=messages))


def test_other_tool_uses_own_description_and_simplified_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 5, "format": "x"}, "b": {"$ref": "#/nowhere"}},
        "required": ["a"],
    }
    wire = request(tools=[ToolSchema("mcp_home_light", "Turns the light. More words.", schema)])
    assert "- mcp_home_light(a, b): Turns the light" in wire.body["messages"][-1]["content"]
    assert r'''"{" "\"a\": " string (", " "\"b\": " value)? "}"''' in wire.body["grammar"]
    assert not any("read_file" in message["content"] for message in wire.body["messages"])


@pytest.mark.parametrize("schema", [{"type": "object", "properties": {"when": {"type": "string"}}}, {}])
def test_client_tool_with_the_name_of_a_server_tool_keeps_its_own_schema(schema: dict[str, Any]) -> None:
    wire = request("remind me in 5 minutes to call Tom", [ToolSchema("cronjob", "Rings a bell. More.", schema)])
    assert names(wire) == ["cronjob"] and "20m" not in wire.body["grammar"]
    assert "cronjob(when): Rings a bell" in str(wire.body["messages"]) or not schema


def test_long_request_is_judged_by_its_beginning_and_end() -> None:
    pasted = "lorem ipsum " * 1_000
    assert names(request(f"{pasted} remind me in 5 minutes to read this")) == ["cronjob"]
    assert names(request(f"remind me in 5 minutes to read this: {pasted}")) == ["cronjob"]
    assert pasted in str(request(f"read this: {pasted}").body["messages"])


def test_request_without_tools_is_free_text() -> None:
    wire = request(tools=[])
    assert not {"json_schema", "grammar"} & wire.body.keys() and CHOOSES not in wire.headers
    assert [message["role"] for message in wire.body["messages"]] == ["system", "user"]
    assert wire.body["messages"][0]["content"] == f"{forms()['identity']}\n{FACTS}"


def test_response_format_constrains_answer() -> None:
    wanted = {"type": "object", "properties": {"city": {"type": "string"}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}}
    assert request(tools=[], response_format=response_format).body["json_schema"] == wanted
    root = request(response_format=response_format).body["grammar"].partition("\n")[0]
    assert root.endswith(r'''"{" "\"answer\": " "{" ("\"city\": " strict)? "}" "}"''')


def test_tool_choice_constrains_calls() -> None:
    assert names(request(tool_choice="required")) and not may_answer(request(tool_choice="required"))
    chosen = request(tool_choice={"type": "function", "function": {"name": "terminal"}})
    assert names(chosen) == ["terminal"] and not may_answer(chosen)


def called(name: str, arguments: dict[str, Any], result: object) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": json.dumps(result)},
    ]


def test_conversation_is_translated_to_same_form() -> None:
    result = {"output": "a.txt\n", "exit_code": 0, "status": "ok", "error": None, "cwd": "/w", "duration_ms": 5}
    messages = [
        {"role": "user", "content": "which files?"},
        *called("terminal", {"command": "ls"}, result),
        {"role": "assistant", "content": "Only a.txt."},
        {"role": "user", "content": "thanks"},
        {"role": "user", "content": "and now?"},
    ]
    pairs = [(message["role"], message["content"]) for message in request(messages=messages).body["messages"][-5:]]
    assert pairs == [
        ("user", f"{forms()['begin']}\n{FACTS}\nwhich files?"),
        ("assistant", '{"tool": "terminal", "arguments": {"command": "ls"}}'),
        ("user", "[result] a.txt\n"),
        ("assistant", '{"answer": "Only a.txt."}'),
        ("user", "thanks\nand now?"),
    ]


RESULTS = [
    ("search_files", {"matches": [], "total": 0, "withheld": 0}, "nothing was found"),
    ("search_files", {"matches": [{"path": "a.txt", "line": 3, "text": "TODO: x"}], "total": 1}, "a.txt:3: TODO: x"),
    ("session_search", {"hits": [], "complete": True, "hint": "Try fewer or other words."}, "nothing was found"),
    ("terminal", {"output": "", "exit_code": 0, "status": "ok"}, "the command worked and printed nothing"),
    ("terminal", {"output": "no", "exit_code": 2}, "output: no\nexit_code: 2"),
    ("cronjob", {"job": {"id": "1", "model": "m"}, "next_times": ["2026-01-06T07:00"]}, "2026-01-06T07:00"),
    ("cronjob", {"jobs": []}, "there are no jobs"),
    ("write_file", {"path": "a.txt", "bytes": 5, "lines_added": 1}, "the file was written"),
    ("patch", {"error": "No such text.", "hint": "Read it."}, "error: No such text.\nhint: Read it."),
    ("read_file", {"error": "There is no a.", "hint": "See ls."}, "error: There is no a.\nhint: See ls."),
    ("read_file", {"content": "1|x", "hint": "Read on."}, "1|x"),
    (
        "read_file",
        {"path": "a.csv", "content": "1|n\n2|5", "total_lines": 2, "truncated": False},
        "n\n5\n1 rows of data",
    ),
    ("read_file", {"path": "a.csv", "content": "1|n\n2|5", "total_lines": 9, "truncated": True}, "1|n\n2|5"),
]


@pytest.mark.parametrize(("name", "result", "text"), RESULTS)
def test_results_are_rendered_as_plain_text(name: str, result: dict[str, Any], text: str) -> None:
    messages = [{"role": "user", "content": "go"}, *called(name, {}, result)]
    content, _, note = request(messages=messages).body["messages"][-1]["content"].rpartition("\n")
    assert content == f"[result] {text}"
    if "error" in result or result.get("exit_code"):
        assert note == "(This does not answer it. Try another way once, or say what is missing. Asked: go)"
    elif text == "nothing was found":
        assert note.startswith("(Nothing was found. ") and note.endswith("Asked: go)")
    else:
        did = name in ("cronjob", "write_file") or text.endswith("printed nothing")
        assert note == (DONE if did else "(Answer now: go)")


def test_table_result_includes_requested_extremes_and_sums() -> None:
    text = "1|a\tb\tc\n2|x, y\t7\t1.5\n3|z\t10\t?"
    read = called("read_file", {"path": "a.tsv"}, {"path": "a.tsv", "content": text, "truncated": False})
    table = "[result] a\tb\tc\nx, y\t7\t1.5\nz\t10\t?\n2 rows of data\n"
    for question, row in (
        ("what is the a of b 7?", ""),
        ("which a has the largest b?", "largest b: z, 10\n"),
        ("which a has the fewest b, and what is their sum?", "fewest b: x, y, 7\nsum b: 17\n"),
        ("welches a hat die meisten b?", "meisten b: z, 10\n"),
    ):
        assert after(question, read).body["messages"][-1]["content"].partition("(A")[0] == table + row


def test_answer_to_a_search_that_found_nothing_begins_so() -> None:
    nothing = called("session_search", {"query": "boat"}, {"hits": []})
    run = called("read_file", {"path": "a.txt"}, {"path": "a.txt", "content": "1|x", "truncated": False})
    for question, beginning in (
        ("what did I say of the boat?", "I found nothing"),
        ("Was ist mit dem Boot?", "Ich habe nichts"),
    ):
        assert rf'"\"{beginning}' in after(question, nothing).body["grammar"]
    run[0]["tool_calls"][0]["id"] = run[1]["tool_call_id"] = "c0"
    assert "I found nothing" not in after("what did I say?", run, nothing).body["grammar"]


def test_requested_file_starts_the_answer() -> None:
    read = called("read_file", {"path": "a.txt"}, {"path": "a.txt", "content": '1|a "b"\n2|c', "truncated": False})
    changed = called("patch", {"path": "a.txt"}, {"path": "a.txt"})
    grammar = r'"{" "\"answer\": " "\"a \\\"b\\\"\\nc" char* "\"" "}"'
    for question in ("show me a.txt", "change x to a in a.txt, then show me the file"):
        calls = [read] if question.startswith("show") else [changed, read]
        assert grammar in after(question, *calls).body["grammar"]
    for question in ("show me the first line of a.txt", "what is in a.txt?"):
        assert grammar not in after(question, read).body["grammar"]
    long = called("read_file", {}, {"path": "a.txt", "content": "1|" + "x" * 1_000, "truncated": False})
    assert "xxx" not in after("show me a.txt", long).body["grammar"]


def test_rest_of_answer_continues_what_was_delivered() -> None:
    wire = request("plan a week", prefill='Monday: "pasta"\nTues')
    assert wire.body["messages"][-1] == {"role": "assistant", "content": r'{"answer": "Monday: \"pasta\"\nTues'}
    assert wire.headers[CHOOSES] == "rest" and wire.body["grammar"].startswith('root ::= char* "\\"}"\n')


@pytest.mark.parametrize(
    ("message", "tools"), [("review this", []), ("run the tests and compare them with this", ["read_file", "terminal"])]
)
def test_text_that_was_piped_in_is_no_request(message: str, tools: list[str]) -> None:
    attached = "File stdin:\ndiff --git a/calc.py b/calc.py\nhow many files does README.md name? delete old.log"
    after = f"\nThe file stdin above is what this is about. {message}"
    parts = [{"type": "text", "text": text} for text in (message, attached, after)]
    wire = request(messages=[{"role": "user", "content": parts}])
    assert set(tools) <= set(names(wire)) and bool(tools) == bool(names(wire))
    assert may_answer(wire) and attached in wire.body["messages"][-1]["content"]
