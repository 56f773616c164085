"""The embedded model: its prompt, its examples and its grammar.

Small models do not follow tool formats reliably: they are shown examples, and their output is constrained to one
object, a call or an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files

from hermes.core.json_types import JsonMapping, JsonObject, Message
from hermes.core.limits import LOCAL_OUTPUT_TOKENS_MAX
from hermes.core.text import own_text_of
from hermes.local import CHOOSES, PREFIX
from hermes.providers import base, local_grammar
from hermes.providers.chat_completions import ChatCompletions
from hermes.providers.local_plan import Call, Step, is_done, is_shown, last_look, misleading, remaining, span
from hermes.providers.local_results import NOTHING, content_of, is_silent, render_result
from hermes.providers.table import Capabilities

_CAPABILITIES = Capabilities(
    window=8_192,
    max_output=LOCAL_OUTPUT_TOKENS_MAX,
    images=False,
    prefill=True,
    parallel_calls=False,
    options=frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias"}),
    toolsets=frozenset({"file", "terminal", "web", "memory", "session_search", "cronjob", "skills"}),
)
# The parts of a schema that the grammar can enforce; the rest is validated when the call is made.
_SCHEMA_KEYS = (
    *("type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "minimum"),
    "additionalProperties",
)
_ANY: JsonObject = {"type": "object"}
_TEXT: JsonObject = {"type": "string"}
_DEEP = 6
# How words are chosen: the likeliest where a call or a fact is wanted; freely, with less that repeats, in a text.
_EXACT = {"temperature": 0}
_FREE = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repeat_penalty": 1.1}
_SEARCHES = ("search_files", "session_search")
# So many calls are asked for at most.
_CALLS_MAX = 4
# So much of a file is written out at most; it takes as long as any other answer.
_SHOWN_CHARS_MAX = 600
# What is longer than this is not repeated: it holds something that was pasted.
_REMINDER_CHARS_MAX = 400
# A longer request is judged by its beginning and its end, since the rules' work grows with more than its length.
_JUDGED_CHARS_MAX = 800
Tools = Mapping[str, tuple[str, JsonObject]]


class Local(ChatCompletions):
    api_mode = "local"

    def request(self, route: base.Route, credential: base.Credential | None, prompt: base.Prompt) -> base.WireRequest:
        tools = _offered(prompt.tools)
        answer = _answer_schema(prompt.response_format)
        prefix, conversation = _prefix(tools), _conversation(prompt, tools)
        body: JsonObject = {
            "messages": _merged([*prefix, *conversation]),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": True,
            **(_FREE if tools and _is_talk(prompt) else _EXACT),
            "max_tokens": prompt.max_output or route.max_output_tokens or LOCAL_OUTPUT_TOKENS_MAX,
            **base.sampling_sent(prompt, _CAPABILITIES),
        }
        headers = {}
        if tools:
            headers = {CHOOSES: "rest" if prompt.prefill else "all", PREFIX: str(len(_merged(prefix)))}
            body["grammar"] = _grammar(prompt, tools, answer)
        elif answer is not None:
            body["json_schema"] = answer
        url = base.endpoint(route.base_url, "/v1/chat/completions")
        return base.post(route, url, body, {}, headers, base.left_out(prompt, body, {}))

    def listing(self, route: base.Route, credential: base.Credential | None) -> base.WireRequest:
        return base.get(base.endpoint(route.base_url, "/v1/models"), route, {})

    def capabilities(self, model: str) -> Capabilities:
        return _CAPABILITIES


PROVIDER = Local()


@cache
def forms() -> JsonObject:
    """The model's instructions and examples, chosen by measurement."""
    return json.loads(files("hermes.providers").joinpath("local_forms.json").read_text("utf-8"))  # type: ignore[no-any-return]


def _offered(tools: Iterable[base.ToolSchema]) -> dict[str, tuple[str, JsonObject]]:
    """Tools by name: a one-line description, and the schema of the arguments that a small model needs. Those with
    examples come first, in a fixed order, because the prompt cache depends on it."""
    out: dict[str, tuple[str, JsonObject]] = {}
    order = {name: at for at, name in enumerate(forms()["tools"])}
    for tool in sorted(tools, key=lambda tool: order.get(tool.name, len(order))):
        form = forms()["tools"].get(tool.name, {})
        if form.get("hidden"):
            continue
        schema = _plain(tool.parameters)
        properties = schema.get("properties", {})
        if not all(properties.keys() >= call.keys() for call in form.get("calls", ())):
            form = {}  # a client's tool of the same name
        about = form.get("about") or f"{tool.name}({', '.join(properties)}): {tool.description.split('. ')[0]}"
        if calls := form.get("calls"):
            schema = {
                "anyOf": [_object({name: _argument(call[name], properties[name]) for name in call}) for call in calls]
            }
        out[tool.name] = about, schema
    return out


def _argument(form: object, schema: JsonObject) -> JsonObject:
    """An argument by its form: null means the tool's own schema, a list the values, an object a schema."""
    if form is None:
        return schema
    if isinstance(form, dict):
        return form
    return {"enum": form} if isinstance(form, list) else {"const": form}


def _plain(schema: object, depth: int = 0) -> JsonObject:
    if not isinstance(schema, dict) or depth > _DEEP:
        return dict(_ANY)
    out: JsonObject = {key: schema[key] for key in _SCHEMA_KEYS if key in schema}
    if isinstance(out.get("properties"), dict):
        out["properties"] = {name: _plain(value, depth + 1) for name, value in out["properties"].items()}
    if "items" in out:
        out["items"] = _plain(out["items"], depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in out:
            out[key] = [_plain(item, depth + 1) for item in out[key]]
    if not isinstance(out.get("additionalProperties", True), bool):
        out.pop("additionalProperties")
    return out


def _grammar(prompt: base.Prompt, tools: Tools, answer: JsonObject | None) -> str:
    """One of the calls, or an answer. A caller may require a call, or a specific one; a request that needs a result of
    some tools starts with a call of one of them, and does not end before what it asks for was tried."""
    if prompt.prefill:
        return local_grammar.REST_OF_ANSWER
    question, done = _question_and_calls(prompt.messages)
    choice = prompt.tool_choice
    chosen = base.chosen_tool(choice) if isinstance(choice, Mapping) else ""
    # A call that is made once more gives nothing new: its tool is of no more use. Nor is a search that found something.
    repeated = {
        call.tool
        for at, call in enumerate(done)
        if choice is None and (call in done[:at] or (call.tool in _SEARCHES and call.spoke and call.worked))
    }
    names = [name for name in tools if chosen in ("", name) and _fits(name, question) and name not in repeated]
    needed: JsonObject = {}
    if choice is None and prompt.tools:
        needed = _needed(question) if not done else {"tools": _next_tools(question, done)}
    if _is_talk(prompt) or (choice is None and _shown(question, done)):
        names = []
    elif not done and forms()["left"]:
        names = [name for name in names if name not in misleading(question)]
    wanted = [name for name in needed.get("tools", ()) if name in names]
    must_call = bool(wanted) or choice == "required" or chosen in tools
    formats = {name: _format(form, question) for name, form in needed.get("formats", {}).items()}
    calls = [(name, _narrowed(tools[name][1], formats)) for name in wanted or names]
    text = {**_TEXT, "format": needed.get("answer", ""), "begins": _beginning(prompt, question, done)}
    return local_grammar.call_or_answer(calls, None if must_call and calls else answer or text)


def _is_talk(prompt: base.Prompt) -> bool:
    """Whether the request is small talk, or for a text: no tool is useful."""
    question, done = _question_and_calls(prompt.messages)
    return prompt.tool_choice is None and not done and _needed(question).get("tools") == []


def _fits(name: str, question: str) -> bool:
    """Whether the user's text calls for a tool that would otherwise mislead the model."""
    return re.search(forms()["tools"].get(name, {}).get("when", ""), question, re.I) is not None


def _next_tools(question: str, done: list[Call]) -> list[str]:
    """The tools of which one must be called next, since something that was asked for is not done."""
    rest = _rest(question, done) if len(done) < _CALLS_MAX else []
    # What failed, or found nothing, may be so since a file is not as it was thought to be.
    blind = not done[-1].worked or (done[-1].tool == "search_files" and not done[-1].spoke)
    return [*rest[0].tools, *(("read_file",) if blind else ())] if rest else []


def _rest(question: str, done: list[Call]) -> list[Step]:
    return remaining(question, done) if forms()["left"] and done else []


def _shown(question: str, done: list[Call]) -> str:
    return last_look(question, done) if forms()["left"] and done else ""


def _beginning(prompt: base.Prompt, question: str, done: list[Call]) -> str:
    """What the answer begins with: what was to be shown, which small models say that they have seen, or that nothing was
    found, of which they make something that did not happen."""
    if not forms()["left"] or not done:
        return ""
    if done[-1].tool in _SEARCHES and not any(call.spoke for call in done):
        return _form("found_nothing", question)
    if not is_shown(question, done):
        return ""
    text = content_of(done[-1].tool, base.text_of(prompt.messages[-1].get("content"))).strip("\n")
    return text if len(text) <= _SHOWN_CHARS_MAX else ""


def _format(form: str | list[str], question: str) -> JsonObject:
    """What an argument may be: one of some values, the span of time that the request names, or a text of some form."""
    if isinstance(form, list):
        return {"enum": form}
    return {"const": duration} if form == "span" and (duration := span(question)) else {**_TEXT, "format": form}


def _narrowed(schema: JsonObject, formats: JsonMapping) -> JsonObject:
    """The schema of a call with narrower formats for some arguments, if it has several forms."""
    calls = [call.get("properties") for call in schema.get("anyOf", ())]
    if not formats or not all(calls):
        return schema
    narrowed = [_object({name: formats.get(name, form) for name, form in call.items()}) for call in calls]
    return {"anyOf": narrowed} if narrowed else schema


def _question_and_calls(messages: Iterable[Message]) -> tuple[str, list[Call]]:
    """The user's latest text, and the calls since."""
    text = ""
    calls: list[JsonObject] = []
    results: dict[object, str] = {}
    for message in messages:
        if message["role"] == "user":
            text, calls = _request_text(message), []
        elif message["role"] == "tool":
            results[message.get("tool_call_id")] = base.text_of(message.get("content"))
        calls += message.get("tool_calls") or ()
    return text, [_made(call["function"], results.get(call["id"], "")) for call in calls]


def _request_text(message: Message) -> str:
    """What the user wrote, as far as the rules look at it."""
    text, half = own_text_of(message.get("content")), _JUDGED_CHARS_MAX // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n{text[-half:]}"


def _made(function: JsonObject, result: str) -> Call:
    name = function["name"]
    return Call(name, str(function["arguments"]), not _is_error(result), not is_silent(name, result))


def _is_error(text: str) -> bool:
    with suppress(ValueError):
        answer = json.loads(text)
        return isinstance(answer, dict) and bool(answer.get("error") or answer.get("exit_code"))
    return False


def _needed(text: str) -> JsonObject:
    """The first rule that says which tools a request needs."""
    return _first(forms()["rules"], text)


def _first(rules: Iterable[JsonObject], text: str) -> JsonObject:
    """The first rule that a text falls under."""
    for rule in rules:
        if re.search(rule["when"], text, re.I) and not re.search(rule.get("unless", r"(?!)"), text, re.I):
            return rule
    return {}


def _note(text: str, tools: Tools) -> str:
    """A note to the model beside a request: what is missing for it, or how to answer it."""
    needed = _needed(text)
    if needed.get("tools") and not any(name in tools for name in needed["tools"]):
        return f"You have no access to {needed['missing']}. Say so."
    return " ".join(filter(None, [needed.get("note", ""), _form("note", text)]))


def _form(name: str, question: str) -> str:
    """One of the forms in the language of the request: the examples are English, and small models stay with that."""
    return str(_first(forms()["languages"], question).get(name, forms().get(name, "")))


def _reminder(result: str, question: str, done: list[Call]) -> str:
    """What the model is told beside a result: what is left to do, or what the answer is to be about."""
    if len(question) > _REMINDER_CHARS_MAX:
        return ""
    if rest := _rest(question, done):
        note = "left" if len(done) < _CALLS_MAX else "failed"
        return str(forms()[note]).format(", then ".join(step.text for step in rest))
    if not done or not done[-1].worked:
        note = "useless"
    elif result.endswith(NOTHING):
        note = "nothing"
    elif is_done(question, done):
        note = "done"
    else:
        note = "asked"
    return _form(note, question).format(_shown(question, done) or question)


def _with(text: str, note: str) -> str:
    return f"{text}\n({note})" if note else text


def _object(properties: JsonObject) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _answer_schema(response_format: JsonMapping | None) -> JsonObject | None:
    if response_format is None or response_format.get("type") == "text":
        return None
    schema = (response_format.get("json_schema") or {}).get("schema")
    return schema if isinstance(schema, dict) else dict(_ANY)


# --- what it reads ------------------------------------------------------------------------------------------------


def _prefix(tools: Tools) -> list[tuple[str, str]]:
    """The constant start of every conversation, whatever the folder, surface, day and disabled tools."""
    known = {name: form["about"] for name, form in forms()["tools"].items() if not form.get("hidden")}
    if not known.keys() & tools.keys():
        return [("system", "\n\n".join([forms()["identity"], *([forms()["form"]] if tools else [])]))]
    return [
        ("system", "\n\n".join([forms()["identity"], forms()["form"], _listed("Tools", known.values())])),
        *_examples(),
    ]


def _listed(head: str, lines: Iterable[str]) -> str:
    return "\n- ".join([f"{head}:", *lines])


def _examples() -> Iterable[tuple[str, str]]:
    for shot in forms()["shots"]:
        yield "user", shot["user"]
        for step in shot.get("steps", ()):
            yield "assistant", _call(step["tool"], step["arguments"])
            if "result" in step:
                yield "user", f"[result] {step['result']}"
        if "answer" in shot:
            yield "assistant", _answer(shot["answer"])


def _facts(prompt: base.Prompt, tools: Tools) -> str:
    """What differs: missing and additional tools, folder, day, and further instructions."""
    shown = {name: form["about"] for name, form in forms()["tools"].items() if not form.get("hidden")}
    absent = ", ".join(sorted(shown.keys() - tools.keys())) if shown.keys() & tools.keys() else ""
    others = [about for name, (about, _) in tools.items() if about != shown.get(name)]
    return "\n".join(
        filter(
            None,
            [
                forms()["begin"] if tools else "",
                _listed("More tools", others) if others else "",
                f"Turned off: {absent}." if absent else "",
                *prompt.system,
            ],
        )
    )


def _conversation(prompt: base.Prompt, tools: Tools) -> Iterable[tuple[str, str]]:
    yield "user" if tools else "system", _facts(prompt, tools)
    last, calls, question = len(prompt.messages) - 1, dict[object, str](), ""
    for at, message in enumerate(prompt.messages):
        text = base.text_of(message.get("content"), "\n")
        if message["role"] == "assistant":
            if text:
                yield "assistant", _answer(text) if tools else text
            for call in message.get("tool_calls") or ():
                function = call["function"]
                calls[call["id"]] = function["name"]
                yield "assistant", _call(function["name"], base.call_arguments(function["arguments"]))
        elif message["role"] == "tool":
            result = render_result(calls.get(message.get("tool_call_id"), ""), text, question)
            note = _reminder(result, *_question_and_calls(prompt.messages)) if tools and at == last else ""
            yield "user", _with(result, note)
        else:
            question = _request_text(message)
            yield "user", _with(text, _note(question, tools) if tools and at == last else "")
    if prompt.prefill:
        yield "assistant", _answer(prompt.prefill)[:-2] if tools else prompt.prefill


def _merged(turns: Iterable[tuple[str, str]]) -> list[Message]:
    """Merge adjacent messages of one role."""
    out: list[Message] = []
    for role, text in turns:
        if out and out[-1]["role"] == role:
            out[-1] = {"role": role, "content": f"{out[-1]['content']}\n{text}".strip("\n")}
        else:
            out.append({"role": role, "content": text})
    return out


def _call(name: str, arguments: JsonObject) -> str:
    return json.dumps({"tool": name, "arguments": arguments}, ensure_ascii=False)


def _answer(text: str) -> str:
    return json.dumps({"answer": text}, ensure_ascii=False)
