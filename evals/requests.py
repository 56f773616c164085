"""What the local model is asked, in a folder with some files, and how one sees that it was done."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILES = {
    "README.md": "# Harbour\n\nA small program that counts ships.\n\nRun it with `python3 main.py`.\n",
    "main.py": 'PORT = 8080\n\n\ndef count(ships):\n    # TODO: leave out ferries\n    return len(ships)\n\n\nprint(count(["Ada", "Bea"]))\n',
    "config.json": '{"name": "harbour", "port": 8080, "debug": false}\n',
    "notes.txt": "Monday: call Anna\nTuesday: pay the rent\nWednesday: water the plants\n",
    "data.csv": "city,people\nParis,2100000\nRome,2800000\nOslo,700000\nLima,10000000\n",
    "old.log": "2020 started\n2020 stopped\n",
    "src/util.py": "def add(a, b):\n    return a + b\n",
    "src/ships.py": 'SHIPS = ["Ada", "Bea", "Cleo"]\n',
    "list.txt": "apples\npears\n",
}


@dataclass(slots=True)
class Done:
    """What came of a request: the calls that were made, the answer, the folder afterwards."""

    calls: list[tuple[str, dict[str, Any]]]
    answer: str
    folder: Path
    results: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        """A file of the folder; nothing if it is not there."""
        path = self.folder / name
        return path.read_text() if path.is_file() else ""

    def first(self, tools: str, pattern: str) -> bool:
        """Whether the first call was of one of these tools, with arguments that look like this."""
        if not self.calls:
            return False
        name, arguments = self.calls[0]
        return name in tools.split() and re.search(pattern, str(arguments), re.S) is not None


Check = Callable[[Done], bool]


def _called(tools: str, pattern: str) -> Check:
    return lambda done: done.first(tools, pattern)


def _says(pattern: str = r"\w") -> Check:
    return lambda done: not done.calls and re.search(pattern, done.answer, re.I | re.S) is not None


def _ends(pattern: str) -> Check:
    return lambda done: bool(done.calls) and re.search(pattern, done.answer, re.I | re.S) is not None


def _holds(name: str, pattern: str) -> Check:
    return lambda done: re.search(pattern, done.text(name), re.S | re.I) is not None


SINGLE: list[tuple[str, Check]] = [
    ("list the files in this folder", _called("terminal search_files", r"ls|find|\*")),
    ("which files are here?", _called("terminal search_files", r"ls|find|\*")),
    ("where is the word apples?", _called("search_files terminal", "apples")),
    ("what's in the folder src?", _called("terminal search_files", "src")),
    ("read README.md", _called("read_file terminal", r"README\.md")),
    ("show me notes.txt", _called("read_file terminal", r"notes\.txt")),
    ("open config.json", _called("read_file terminal", r"config\.json")),
    ("write a file called todo.txt with the text buy bread", _holds("todo.txt", "buy bread")),
    ("create hello.py which prints hello world", _holds("hello.py", r"print\(.hello,? world")),
    ("save a shopping list with apples and plums to shopping.md", _holds("shopping.md", "apples.*plums")),
    ("find all files that mention Anna", _called("search_files terminal", "Anna")),
    ("search for TODO in the code", _called("search_files terminal", "TODO")),
    ("how many lines does data.csv have?", _called("terminal read_file", r"data\.csv")),
    ("how many files are in this folder?", _called("terminal", "ls|find")),
    ("what is today's date?", _called("terminal", "date")),
    ("how much disk space is free?", _called("terminal", "df")),
    ("run main.py", _called("terminal", r"python3? +(\./)?main\.py")),
    ("delete old.log", lambda done: not (done.folder / "old.log").exists()),
    ("rename list.txt to fruit.txt", lambda done: not done.text("list.txt") and "apples" in done.text("fruit.txt")),
    ("make a folder called photos", lambda done: (done.folder / "photos").is_dir()),
    ("copy notes.txt to backup.txt", _holds("backup.txt", "call Anna")),
    ("in notes.txt change Anna to Paul", _holds("notes.txt", "call Paul")),
    ("in config.json change the port from 8080 to 9000", _holds("config.json", '"port": 9000')),
    ("who am I logged in as?", _called("terminal", "whoami|id")),
    ("what python version is installed?", _called("terminal", r"python3? *(--version|-V)|sys")),
    ("sort list.txt and show the result", _called("terminal", r"sort.*list\.txt")),
]
TWO_STEPS: list[tuple[str, Check]] = [
    ("which port is set in config.json?", _ends("8080")),
    ("what does the README say the program does?", _ends("ship")),
    ("what do I have to do on Tuesday, according to notes.txt?", _ends("rent")),
    ("which city in data.csv has the most people?", _ends("Lima")),
    ("how many ships are in src/ships.py?", _ends(r"3|three")),
    ("how many lines are in notes.txt?", _ends(r"3|three")),
    ("run main.py and tell me what it prints", _ends(r"2|two")),
    ("find the file with the word ferries and tell me its name", _ends(r"main\.py")),
    ("write the numbers 1 to 3 into numbers.txt, one on each line", _holds("numbers.txt", r"1\s*\n2\s*\n3")),
    ("what is the name in config.json?", _ends("harbour")),
    ("which files are in src?", lambda done: {*re.findall(r"\w+\.\w+", done.answer)} == {"util.py", "ships.py"}),
    (
        "make a folder docs and move README.md into it",
        lambda done: bool(done.text("docs/README.md")) and not done.text("README.md"),
    ),
    (
        "copy list.txt to fruit.txt, then delete list.txt",
        lambda done: "pears" in done.text("fruit.txt") and not done.text("list.txt"),
    ),
    (
        "write a python script sum.py that prints 2+3 and run it",
        lambda done: bool(done.text("sum.py")) and "5" in done.answer,
    ),
    ("write two lines about the sea into poem.txt", _holds("poem.txt", r"\w.*\n.*\w")),
    ("read notes.txt and write its first line into first.txt", _holds("first.txt", "call Anna")),
]
TALK: list[tuple[str, Check]] = [
    ("hi there", _says()),
    ("tell me a joke", _says()),
    ("what is the capital of France?", _says("paris")),
    ("thank you!", _says()),
    ("explain what a hash map is in two sentences", _says("key")),
    ("translate 'good morning' to Spanish", _says("buenos")),
    ("what is 12 plus 30?", _says("42")),
    ("who wrote Hamlet?", _says("shakespeare")),
    ("write a haiku about rain", _says()),
    ("what can you do?", _says()),
    ("how do I reverse a list in Python?", _says(r"reverse|\[::-1\]")),
    ("good night", _says()),
    ("what colour is the sky?", _says("blue")),
    ("is a whale a fish?", _says("mammal|no")),
]
KINDS = {"single": SINGLE, "two_steps": TWO_STEPS, "talk": TALK}
TARGETS = {"single": 0.9, "two_steps": 0.8, "talk": 0.9}
