"""Texts that commands are given: code of other languages, SQL, output of echo and printf. Judged by pattern; pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hermes.guards.shell_expansion import GLOBS, UNKNOWN, clean, unescape

_SQL = re.compile(
    r"\bdrop\s+(?:table|database|schema|view|index|column|user|role|keyspace|materialized|type|function|owned)\b"
    r"|\btruncate\s+\w|\bflush(?:all|db)\b|\bdropdatabase\(|\.drop\(\s*\)|\b(?:deletemany|remove)\(\s*\{\s*\}"
)
_SQL_ALL = re.compile(r"\bdelete\s+from\b|\bupdate\s+\S+\s+set\b")
_FORKS = re.compile(r"fork\s+while\s+fork|while\s+(?:True|1)\s*:\s*(?:os\.)?fork\(|loop\s*\{\s*fork")
_RUNS = re.compile(
    r"(?:system|[pP]open|check_\w{1,64}+|spawn\w{0,64}+|\bexec(?:Sync|File\w{0,64}+|[vl]p?e?)?|getoutput|passthru|\bqx|%x|do shell script"
    r"|\b(run|call))\s*[\[({ ]+([^][(){}]*)|`([^`]*)`"
)
_REMOVES = re.compile(
    r"(?:rmtree|remove_tree|rm_rf?|rmSync|rmdirSync|rimraf|remove_dir_all)\s*[( ]\s*(?:['\"]([^'\"\n]*))?"
)
_QUOTE = re.compile("['\"]")
_LITERALS = {quote: re.compile(rf"{quote}([^{quote}\\\n]*+(?:\\.[^{quote}\\\n]*+)*+)({quote}?)") for quote in "'\""}
_JOINED = re.compile(r"['\"]\s*[+.]\s*\w|\+\s*['\"]|\bchr$|join$|decode|\[::-1")
_DECODES = re.compile(r"b64decode|fromhex|unhexlify|rot.?13|decompress|\bchr\(|marshal|atob\(|['\"]base64['\"]|pack\(")
_EVALUATES = re.compile(r"\b(?:exec|eval|compile|loadstring|instance_eval|Function|__import__)\s*[( ]")
_FETCHES = re.compile(r"urlopen|urllib|requests\.|http\.client|https?\.get|fetch\(|LWP|Net::HTTP")
_REVERSES = re.compile(r"dup2|pty\.spawn|/bin/(?:ba|z|da)?sh|cmd\.exe")
_UNMATCHED = dict.fromkeys(map(ord, GLOBS), UNKNOWN)


def rules_of(code: str) -> Iterator[str]:
    if _FORKS.search(code):
        yield "hard"
    evaluates = _EVALUATES.search(code)
    if evaluates and _DECODES.search(code):
        yield "opaque"
    if (evaluates and _FETCHES.search(code)) or ("socket" in code.lower() and _REVERSES.search(code)):
        yield "remote"
    if "execute" in code and is_destructive_sql(code):
        yield "data"
    if any(_JOINED.search(match[2] or "") and literals_of(match[2]) for match in _RUNS.finditer(code)):
        yield "opaque"


def commands_of(code: str, language: str) -> Iterator[list[str] | str]:
    for match in _REMOVES.finditer(code):
        yield ["rm", "-rf", clean(match[1] or "") or UNKNOWN]
    for match in _RUNS.finditer(code):
        arguments = [match[3]] if match[3] and language in ("perl", "ruby", "php") else literals_of(match[2] or "")
        if arguments and (not match[1] or "subprocess" in code):
            yield arguments if len(arguments) > 1 and " " not in arguments[0] else arguments[0]


def literals_of(code: str) -> list[str]:
    literals: list[str] = []
    # Where a quote is not closed on its line, neither is any escaped one after it: up to there none is tried again.
    at, open_until = 0, dict.fromkeys(_LITERALS, 0)
    while match := _QUOTE.search(code, at):
        quote, at = match[0], match.end()
        if match.start() >= open_until[quote] and (literal := _LITERALS[quote].match(code, match.start())):
            if literal[2]:
                literals.append(clean(literal[1]))
                at = literal.end()
            else:
                open_until[quote] = literal.end()
    return literals


def is_destructive_sql(sql: str) -> bool:
    first, *others = sql.lower().split("/*")
    text = " ".join([first, *(other.partition("*/")[2] for other in others)])
    text = " ".join(line.partition("-- ")[0] for line in text.splitlines())
    return bool(_SQL.search(text)) or any(_SQL_ALL.search(part) and "where" not in part for part in text.split(";"))


def printed_text(argv: list[str], here: str) -> str | None:
    """What echo, printf, pwd and which print, if known; empty for other commands."""
    name, args = argv[0], [arg.translate(_UNMATCHED) for arg in argv[1:]]
    if name == "pwd":
        return f"{here}\n"
    if name == "which":
        return f"/usr/bin/{args[-1]}\n" if args else None
    if name == "echo":
        options = ""
        while args and re.fullmatch(r"-[neE]+", args[0]):
            options += args.pop(0)
        text = " ".join(args)
        if "\\" in text and "e" not in options:  # some shells decode it anyway
            return None
        return (unescape(text) if "e" in options else text) + ("" if "n" in options else "\n")
    if name != "printf":
        return ""
    if not args or args[0][:1] == "-" or re.search(r"%(?![sbd%])", args[0]):
        return None
    template, values = unescape(args[0]), iter(args[1:])
    conversions = len(re.findall("%[sbd]", template))

    def value(match: re.Match[str]) -> str:
        text = "%" if match[1] == "%" else next(values, "")
        return unescape(text) if match[1] == "b" else text

    rounds = -(-len(args[1:]) // conversions) if conversions else 1
    return "".join(re.sub("%([sbd%])", value, template) for _ in range(max(1, rounds)))
