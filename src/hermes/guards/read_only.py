"""Commands that are known to change nothing, for use without a sandbox. Pure."""

from __future__ import annotations

import shlex


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Whatever their arguments are.
_PLAIN = _set(
    "basename cat cd cmp cut df diff dirname du echo false grep head id ls nl printf pwd readlink realpath sleep stat "
    "tail test tr true type uname wc which whoami ["
)
# With these options only, and nothing else.
_OPTIONS = {"date": frozenset({"-u", "-R", "-I"})}
_GIT = _set("blame describe diff log ls-files rev-parse show status")
# Options of git that write a file or run a program; git takes them also when they are shortened.
_GIT_REFUSED = ("--ou", "--ext", "--textc")
_JOINING = frozenset({"&&", "||", "|", ";"})
# Redirection, substitution, groups, comments, escapes: what has any of these is not looked at more closely.
_REFUSED = frozenset("`$<>(){}\\!#\n\r\0")


def is_read_only(command: str) -> bool:
    """Whether a command line consists of such commands only; False if in doubt."""
    if not command.strip() or not _REFUSED.isdisjoint(command):
        return False
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        return False
    commands: list[list[str]] = [[]]
    for word in tokens:
        if word in _JOINING:
            commands.append([])
        elif set(word) <= set("&|;"):
            return False  # `&`, and what is no operator at all; a quoted one is not told apart, and needs not be
        else:
            commands[-1].append(word)
    if not commands[-1]:  # a `;` at the end
        commands.pop()
    return bool(commands) and all(argv and _changes_nothing(argv) for argv in commands)


def _changes_nothing(argv: list[str]) -> bool:
    name, *args = argv
    if name in _PLAIN:
        return True
    if name in _OPTIONS:
        return all(arg in _OPTIONS[name] or arg.startswith("+") for arg in args)
    if name != "git" or not args or args[0] not in _GIT:
        return False
    # A pattern may stand for a file that is named like an option, and so may what is not known (…).
    return not any(arg.startswith(_GIT_REFUSED) or not set("*?[…").isdisjoint(arg) for arg in args[1:])
