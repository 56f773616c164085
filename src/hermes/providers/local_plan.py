"""What a request asks for, step by step, and what of it is not done yet. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Words for what is to be done, the tools of which one can do it, and what a command must hold that does it.
_ACTIONS = {
    "run": ("run|execute|start|führe?|starte", ("terminal",), r"\w"),
    "delete": ("delete|remove|lösche?|entferne?", ("terminal", "patch"), r"\b(rm|rmdir|unlink|mv|sed|git)\b|-delete"),
    "move": ("rename|move|benenne?|verschiebe?", ("terminal",), r"\b(mv|rename)\b"),
    "copy": ("copy|kopiere?", ("terminal",), r">|\b(cp|tee|rsync|install|git|python3?)\b"),
    "append": ("append|add|insert|füge?|hänge?", ("terminal",), r">>|\b(tee|sed|perl|git|python3?)\b"),
    "write": (
        "write|save|put|store|create|make|schreibe?|speichere?|erstelle?|lege?",
        ("write_file", "terminal"),
        r">|\b(mkdir|touch|tee|cp|mv|sort|sed|perl|git|python3?)\b",
    ),
    "change": (
        "change|replace|set|fix|correct|update|ändere?|ersetze?|setze?|korrigiere?",
        ("patch", "write_file", "terminal"),
        r">|\b(tee|cp|mv|sed|perl|git|python3?)\b",
    ),
}
# Something is shown that was not seen before: by a call that gives a text.
_SHOW = r"show|display|print|read|list|count|open|tell me (?:what|how many|which)|zeige?|lies|zähle?"
_LOOKS = ("read_file", "terminal")
# What these answer is of no interest in itself.
_ACTS = ("write_file", "patch", "memory", "cronjob")
# What is shown as it is, unless a part of it is asked for, or something about it.
_PART = r"first|last|lines?|words?|numbers?|which|how|what|only|names?|summary|count|tell|explain|erste\w*|letzte\w*|zeilen?|wörter|was|wie"
_TELL = r"tell|say|give|look|find|check|sum|explain|sage?|nenne?|suche?"
_POLITE = r"(?:(?:please|now|also|finally|bitte|(?:can|could|would) you(?: please)?|kannst du(?: bitte)?|(?:in|im) \S+\.\w+,?) )*"
_VERB = rf"{_POLITE}(?:{'|'.join(f'(?P<{kind}>{action[0]})' for kind, action in _ACTIONS.items())}|(?P<show>{_SHOW})|{_TELL})\b(?!\.)"
_BREAK = re.compile(
    rf"(?:[,;.]\s+(?:(?:and|then|und|dann)\s+)*|\s(?:(?:and|then|und|dann|danach)\s+)+)(?={_VERB})", re.I
)
_BEGINS = re.compile(rf"\W*{_VERB}", re.I)
_FILE = r"[\w./~-]*\w\.\w{1,5}\b"
_TARGET = re.compile(
    rf"\b(?:to|into|in|as|called|named|onto|nach|unter|namens)\s+(?:(?:the|a|new|file|die|der|das|eine|datei)\s+)*[`'\"]?({_FILE})",
    re.I,
)
_WHOLE = re.compile(
    rf"\W*{_POLITE}(?:show|display|print|list|read|open|zeige?|lies|liste)\b(?!.*\b(?:{_PART})\b)", re.I | re.S
)
# What is written if it is not a text for the user to read.
_THING = re.compile(
    rf"{_FILE}|\b(files?|folders?|director(y|ies)|scripts?|programs?|dateien?|ordner|verzeichnis)\b", re.I
)
_COUNTED = (
    "one two three four five six seven eight nine ten eleven twelve",
    "einer zwei drei vier fünf sechs sieben acht neun zehn elf zwölf",
)
_ROUND = {
    "a": 1,
    "an": 1,
    "einem": 1,
    "fifteen": 15,
    "twenty": 20,
    "thirty": 30,
    "fünfzehn": 15,
    "zwanzig": 20,
    "dreißig": 30,
}
_NUMBERS = _ROUND | {word: number for words in _COUNTED for number, word in enumerate(words.split(), 1)}
_UNITS = {"min": "m", "hou": "h", "stu": "h", "day": "d", "tag": "d"}
_SPAN = re.compile(
    rf"\bin (?:(?P<half>half an hour|einer halben stunde)|(?P<number>\d{{1,4}}|{'|'.join(_NUMBERS)}) (?P<unit>{'|'.join(_UNITS)}))",
    re.I,
)
# What comes later is something that was pasted.
_CHARS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was made: its tool, its arguments as text, whether it worked, and whether it gave a text."""

    tool: str
    arguments: str
    worked: bool
    spoke: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of a request: what is to be done to which file, if it is anything that a tool does."""

    action: str
    text: str
    file: str

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools of which one can do it."""
        return _LOOKS if self.action == "show" else _ACTIONS[self.action][1]

    def done_at(self, calls: list[Call], start: int) -> int | None:
        """Which call from `start` on, of those that worked, is what this asks for."""
        return next((at for at, call in enumerate(calls) if at >= start and call.worked and self._fits(call)), None)

    def _fits(self, call: Call) -> bool:
        if call.tool not in self.tools or self.file.rpartition("/")[2] not in call.arguments:
            return False
        if self.action == "show":
            return call.spoke
        return call.tool != "terminal" or re.search(_ACTIONS[self.action][2], call.arguments) is not None


def steps(text: str) -> list[Step]:
    """The request in pieces, each of which begins with a word for what is to be done."""
    text = text[:_CHARS_MAX]
    breaks = list(_BREAK.finditer(text))
    starts, ends = [0, *(match.end() for match in breaks)], [*(match.start() for match in breaks), len(text)]
    return [_step(text[start:end].strip(), start == 0) for start, end in zip(starts, ends, strict=True)]


def _step(text: str, is_first: bool) -> Step:
    begins = _BEGINS.match(text)
    action = begins.lastgroup if begins is not None else None
    if action is None or (action in ("write", "change") and not _THING.search(text)) or (action == "show" and is_first):
        return Step("", text, "")
    if action == "show":
        return Step(action, text, "")
    files = _TARGET.findall(text) or re.findall(_FILE, text)
    return Step(action, text, files[-1] if files else "")


def remaining(text: str, calls: list[Call]) -> list[Step]:
    """The pieces from the first on that asks for an action which is not done, in the order in which they stand."""
    pieces, last = steps(text), 0
    for at, piece in enumerate(pieces):
        if piece.action:
            done_at = piece.done_at(calls, last)
            if done_at is None:
                return pieces[at:]
            last = done_at
    return []


def last_look(text: str, calls: list[Call]) -> str:
    """The last piece, if it was to show something that was looked at: all that is left is to say it."""
    last = steps(text)[-1]
    return last.text if last.action == "show" and not remaining(text, calls) else ""


def is_shown(text: str, calls: list[Call]) -> bool:
    """Whether all that is left is to show what the last call gave, as it is."""
    last = steps(text)[-1]
    gave = bool(calls) and calls[-1].worked and calls[-1].spoke and calls[-1].tool in (*_LOOKS, "search_files")
    return gave and _WHOLE.match(last.text) is not None and not remaining(text, calls)


def is_done(text: str, calls: list[Call]) -> bool:
    """Whether the last call did the last thing that was asked for: all that is left is to say so."""
    pieces, call = steps(text), calls[-1]
    acts = call.tool in _ACTS and '"list"' not in call.arguments if call.tool != "terminal" else not call.spoke
    asks = pieces[-1].action == "show" or (not pieces[-1].action and len(pieces) > 1)
    return acts and call.worked and not asks and not remaining(text, calls)


def misleading(text: str) -> set[str]:
    """The tools that change files, but cannot do what is asked for first: a file that is written is not added to."""
    first = next((piece for piece in steps(text) if piece.action), None)
    return {"write_file", "patch"} - set(first.tools) if first is not None and first.action != "show" else set()


def span(text: str) -> str:
    """How long from now something is to happen, as a schedule says it; empty if the request does not say."""
    if (match := _SPAN.search(text[:_CHARS_MAX])) is None:
        return ""
    number = (match["number"] or "").lower()
    return "30m" if match["half"] else f"{_NUMBERS.get(number, number)}{_UNITS[match['unit'].lower()]}"
