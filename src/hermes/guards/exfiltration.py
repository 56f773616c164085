"""Job prompts and scripts that would leak credentials, detected by rules over words, in one pass. Pure.

This catches what is plainly written. A job that is not caught is held by the path guard, the sandbox without
network, and approvals that nobody can answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_WORD = re.compile(r"\||[^\s\"'`,;()<>|]+")
_WORD_CHARS_MAX = 512
_NEGATIONS = frozenset({"not", "never", "don't", "dont", "without", "cannot"})
# Between a verb and a credential they say that not the credential itself is meant.
_ABOUT = frozenset({"about", "reminder", "remind", "rotate", "renew", "revoke", "whether", "if", "when", "how"})
_SEND = _set(
    "send sends post posts upload uploads email emails mail transmit forward leak exfiltrate publish paste share submit "
    "push copy curl wget"
)
_UPLOAD = _set("curl wget nc ncat netcat scp sftp ftp rsync http https socat requests.post requests.put")
_SHOW = _set("cat print show display dump reveal read open echo copy base64 type less head tail")
_SECRET_WORDS = frozenset({"credential", "credentials", "password", "passwords", "secrets"})
_SECRET_PAIRS = {
    **dict.fromkeys(("api", "private", "ssh", "access", "secret", "signing", "encryption"), ("key", "keys")),
    **dict.fromkeys(("auth", "bearer", "refresh", "session"), ("token", "tokens")),
    **dict.fromkeys(("environment", "env"), ("variables", "vars")),
}
# What follows a word for credentials where something else is meant.
_TOPICS = _set(
    "policy policies reset resets rotation manager managers strength expiry change changes rules page form hygiene "
    "protection protected audit leaks breaches"
)
_SECRET_FILE = re.compile(
    r"(?:.*/)?(?:\.env(?:\.(?:local|dev|development|prod|production|staging|test))?|id_(?:rsa|dsa|ecdsa|ed25519)"
    r"|\.netrc|\.pgpass|\.git-credentials|\.npmrc|\.pypirc|credentials\.json)"
    r"|.*/?\.(?:ssh|gnupg)(?:/(?!.*(?:\.pub|/config|known_hosts)\Z).*)?"
    r"|.*/?\.(?:aws/credentials|kube/config|docker/config\.json)|/etc/shadow|/proc/(?:\w+|\$\$)/environ",
    re.I,
)
_VARIABLE = re.compile(r"\$\{?\w*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)", re.I)
_DESTINATION = re.compile(
    r"(?:https?|ftp|wss?)://.+|[\w.+-]+@[\w-]+(?:\.[\w-]+)+(?::.*)?|\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?:/.*)?"
    r"|(?:[\w-]+\.)+(?:com|net|org|io|dev|app|xyz|ru|cn|co|sh|info|biz|site|online)(?::\d+)?(?:/.*)?"
    r"|webhook|pastebin|ngrok",
    re.I,
)


@dataclass(frozen=True, slots=True)
class _Rule:
    """Words of these kinds in sequence, each within `span` words of the previous one."""

    reason: str
    kinds: tuple[str, ...]
    span: int


_SENDS = "it asks to send credentials to another place"
_RULES = (
    _Rule(_SENDS, ("send", "secret", "destination"), 10),
    _Rule(_SENDS, ("send", "destination", "secret"), 10),
    _Rule(_SENDS, ("send", "secret file", "destination"), 10),
    _Rule(_SENDS, ("send", "destination", "secret file"), 10),
    _Rule("it asks to show a file that holds credentials", ("show", "secret file"), 6),
    _Rule("it gives a file with credentials to a network command", ("upload", "secret file"), 16),
    _Rule("it gives a file with credentials to a network command", ("secret file", "upload"), 16),
    _Rule("it gives a variable with a credential to a network command", ("upload", "variable"), 32),
    _Rule("it gives the environment to a network command", ("environment", "upload"), 8),
)


def exfiltrates(text: str) -> str:
    """The reason why a text would leak credentials; empty if it would not."""
    reached: list[list[int | None]] = [[None] * len(rule.kinds) for rule in _RULES]
    for at, kinds in enumerate(_word_kinds(text)):
        for rule, positions in zip(_RULES, reached, strict=True):
            if "about" in kinds and "secret" in rule.kinds:
                positions[:] = [None] * len(positions)
            for stage in range(len(positions) - 1, -1, -1):
                before = at if stage == 0 else positions[stage - 1]
                if rule.kinds[stage] in kinds and before is not None and at - before <= rule.span:
                    positions[stage] = at
            if positions[-1] is not None:
                return rule.reason
    return ""


def _word_kinds(text: str) -> Iterator[set[str]]:
    words = filter(None, (match[0][:_WORD_CHARS_MAX].rstrip(".!?:") for match in _WORD.finditer(text)))
    before = ""
    word = next(words, "")
    while word:
        after = next(words, "")
        yield {kind for kind, is_kind in _TESTS.items() if is_kind(before, word, after)}
        before, word = word, after


def _is_secret(_: str, word: str, after: str) -> bool:
    word, after = word.lower(), after.lower()
    return (word in _SECRET_WORDS and after not in _TOPICS) or after in _SECRET_PAIRS.get(word, ())


def _is_secret_file(before: str, word: str, _: str) -> bool:
    # The key that a connection is made with is not sent.
    return before != "-i" and "://" not in word and bool(_SECRET_FILE.fullmatch(re.split("[=@]", word)[-1]))


_TESTS: dict[str, Callable[[str, str, str], bool]] = {
    "send": lambda before, word, _: word.lower() in _SEND and before.lower() not in _NEGATIONS,
    "show": lambda before, word, _: word.lower() in _SHOW and before.lower() not in _NEGATIONS,
    "upload": lambda _, word, __: word.lower() in _UPLOAD,
    "secret": _is_secret,
    "secret file": _is_secret_file,
    "variable": lambda _, word, __: bool(_VARIABLE.search(word)),
    "environment": lambda _, word, after: word == "printenv" or (word in ("env", "export", "set") and after == "|"),
    "destination": lambda _, word, __: (
        bool(_DESTINATION.fullmatch(word.rsplit("=", 1)[-1])) or bool(_DESTINATION.fullmatch(word))
    ),
    "about": lambda _, word, __: word.lower() in _ABOUT,
}
