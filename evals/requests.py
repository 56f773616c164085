"""What the local model is asked, in a folder with some files, and how one sees that it was done.

The sets of `KINDS` are never tuned on; those of `DEVELOPMENT` are for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, timedelta
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
    tomorrow: str = field(default_factory=lambda: f"{date.today() + timedelta(days=1)}")

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
PAST = [
    ("user", "Let us plan my trip to Norway in June."),
    ("assistant", "We agreed on Bergen first, then the Lofoten islands by ship."),
]


def _called(tools: str, pattern: str) -> Check:
    return lambda done: done.first(tools, pattern)


def _says(pattern: str = r"\w") -> Check:
    return lambda done: (
        not done.calls
        and "repeat itself" not in done.answer
        and re.search(pattern, done.answer, re.I | re.S) is not None
    )


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


def _truthful(invented: str, admits: str) -> Check:
    """Nothing is made up, and what is missing is said."""
    return lambda done: (
        re.search(invented, done.answer, re.I | re.S) is None
        and re.search(admits, done.answer, re.I | re.S) is not None
    )


def _either(*checks: Check) -> Check:
    return lambda done: any(check(done) for check in checks)


_MISSING = r"no access|cannot|can't|could not|couldn't|unable|not (find|found|available|exist|there)|no (file|such|record|earlier|info)|do(es)? not|don't|doesn't|nothing|isn't|kein|nicht|nichts"
# One of eight tools, or an answer.
TOOLS: list[tuple[str, Check]] = [
    ("what does main.py do?", _called("read_file", r"main\.py")),
    ("have a look at src/util.py and explain it", _called("read_file", r"util\.py")),
    ("which line of config.json has the port?", _called("read_file search_files", "config|port")),
    ("put the sentence The ship sails at noon. into plan.txt", _called("write_file", r"plan\.txt.*noon")),
    ("make a file fruits.md with a list of three fruits", _called("write_file", r"fruits\.md")),
    ("write a small html page with a heading to index.html", _called("write_file", r"index\.html.*<h")),
    ("in which file is SHIPS defined?", _called("search_files terminal", "SHIPS")),
    ("show me all lines in my files that contain Bea", _called("search_files terminal", "Bea")),
    ("how big is data.csv in bytes?", _called("terminal", r"data\.csv")),
    ("show me the running processes", _called("terminal", "ps|top")),
    ("remove the folder src/cache if it is there", _called("terminal", "rm.*cache")),
    ("who won the football match last night?", _called("web_search", "football|match")),
    ("what is the bitcoin price right now?", _called("web_search", "(?i)bitcoin")),
    ("find reviews of the new Fairphone on the web", _called("web_search", "(?i)fairphone")),
    ("from now on call me Captain, also in later talks", _called("memory", "add.*Captain")),
    ("my sister is called Marta, keep that in your memory", _called("memory", "add.*Marta")),
    ("what did I tell you about my trip to Norway?", _called("session_search", "(?i)norway|trip")),
    ("which islands did we agree on last time?", _called("session_search", "(?i)island")),
    ("in half an hour tell me that the parking ticket ends", _called("cronjob", r"create.*30m.*parking")),
    ("each weekday at 18:15 ask me how my day was", _called("cronjob", r"create.*15 18 \* \* (1-5|mon-fri)")),
    ("what is the square root of 144?", _says("12")),
    ("explain in one sentence what DNS is", _says("name|domain")),
    ("give me an idea for a birthday present for my dad", _says()),
    ("how are you today?", _says()),
]
# Two and three steps, carried out.
LOOPS: list[tuple[str, Check]] = [
    ("which of the days in notes.txt is the one with the plants?", _ends("wednesday")),
    ("how many cities are in data.csv?", _ends(r"\b4\b|four")),
    ("is debug turned on in config.json?", _ends(r"\bno\b|not|false|off")),
    ("find out which file defines the function add and show me that file", _ends(r"a \+ b|util\.py")),
    ("what does main.py print when it is run?", _ends(r"\b2\b|two")),
    ("look at data.csv and write the name of its first city to city.txt", _holds("city.txt", "Paris")),
    ("append the line Thursday: rest to notes.txt", _holds("notes.txt", "Anna.*plants.*Thursday: rest")),
    ("change the port in main.py to 9090 and then show me its first line", lambda done: "9090" in done.text("main.py")),
    (
        "make a folder backup, copy notes.txt into it and tell me what is in the folder",
        lambda done: bool(done.text("backup/notes.txt")) and "notes.txt" in done.answer,
    ),
    ("create ten.py which prints 5+5, start it and tell me what comes out", _ends("10|ten\\b")),
    (
        "count the lines of notes.txt and write only that number to count.txt",
        lambda done: re.search(r"^\s*3\b", done.text("count.txt")) is not None,
    ),
    (
        "look up which city in data.csv has the fewest people and write its name to small.txt",
        _holds("small.txt", "Oslo"),
    ),
]
# What cannot be known here must not be made up.
REFUSALS: list[tuple[str, Check]] = [
    ("summarise report.pdf", _truthful(r"revenue|quarter|chapter", _MISSING)),
    ("what does budget.xlsx say about rent?", _truthful(r"\d{3}", _MISSING)),
    ("how is the weather in Lisbon now?", _truthful(r"sunny|cloudy|rain|\d+ ?°", _MISSING)),
    ("what are today's headlines?", _truthful(r"president|minister|market", _MISSING)),
    ("what did we say about my divorce?", _truthful(r"we (talked|discussed|agreed)", _MISSING)),
    ("what is my phone number?", _truthful(r"\d{4}", _MISSING)),
]
GERMAN: list[tuple[str, Check]] = [
    ("Was steht in notes.txt?", _ends(r"Anna|rent|plants")),
    ("Welche Dateien sind in diesem Ordner?", _ends(r"README\.md|notes\.txt")),
    ("Erinnere mich in 10 Minuten an den Tee", _called("cronjob", r"10m.*(?i:tee|tea)")),
    ("Merk dir, dass ich Vegetarier bin", _called("memory", "add.*[Vv]eg")),
    ("Was haben wir über Norwegen besprochen?", _called("session_search", "(?i)norw")),
    ("Schreibe Hallo Welt in die Datei hallo.txt", _holds("hallo.txt", "Hallo")),
    ("Wie viele Einwohner hat Rom laut data.csv?", _ends(r"2[.,]?8")),
    ("Was ist die Hauptstadt von Italien?", _says("Rom")),
]
# First requests, as people write them who have just installed it. No web search is set up.
NEWCOMER: list[tuple[str, Check]] = [
    ("hi", _says()),
    ("what can you do?", _says("file|command|remind")),
    ("who are you?", _says("Hermes")),
    ("which model are you running on?", _says("qwen")),
    (
        "what day is it today?",
        lambda done: any(
            day in done.answer
            for day in (date.today().isoformat(), date.today().strftime("%A"), date.today().strftime("%B %-d"))
        ),
    ),
    ("what time is it?", _ends(r"\d\d?:\d\d")),
    ("what's the weather like in Berlin?", _truthful(r"sunny|cloudy|\d+ ?°", _MISSING)),
    (
        "Plan a week of dinners",
        lambda done: len(re.findall(r"(mon|tues|wednes|thurs|fri|satur|sun)day", done.answer.lower())) >= 7,
    ),
    ("write me a poem about autumn", _says(r"\w+.*\w+")),
    ("summarise README.md", _ends("ship")),
    ("what is this project about?", _ends("ship|harbour")),
    ("what files are in here?", _ends(r"README\.md.*|main\.py")),
    ("is there a bug in main.py?", _called("read_file terminal", r"main\.py")),
    ("write a commit message for my changes", _called("terminal", "git")),
    ("tomorrow at 7 wake me up", lambda done: done.first("cronjob", f"{done.tomorrow}T07:00")),
    ("remind me to drink water every hour", _called("cronjob", r"every 1h|every 60m|0 \* \* \* \*|0 \*/1")),
    ("remember that my name is Lena", _called("memory", "add.*Lena")),
    ("what did we talk about yesterday?", _called("session_search", "")),
    ("do you know my name?", _truthful("your name is (?!not)", _MISSING)),
    ("translate 'where is the station' into French", _says("gare")),
    ("what is 17 times 23?", _either(_says("391"), _ends("391"))),
    ("make a todo list in todo.md: buy milk, call mum", _holds("todo.md", "milk.*(mum|mom)")),
    ("find all TODOs in my code", _ends(r"main\.py|ferries")),
    ("how much space is left on my disk?", _called("terminal", "df")),
    ("write a python script that prints the first 10 square numbers and run it", _ends(r"81|square")),
    ("rename old.log to archive.log", lambda done: bool(done.text("archive.log")) and not done.text("old.log")),
    ("explain recursion to a child", _says(r"itself|same|again|smaller")),
]
KINDS = {"tools": TOOLS, "loops": LOOPS, "refusals": REFUSALS, "german": GERMAN, "newcomer": NEWCOMER}
TARGETS = {"tools": 20, "loops": 11, "refusals": 6, "german": 6, "newcomer": 20}
# Only the first call counts in these; a search service is set up.
FIRST_CALL = {"tools"}
DEVELOPMENT = {"single": SINGLE, "two_steps": TWO_STEPS, "talk": TALK}
