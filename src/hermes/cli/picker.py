"""Choosing one of many names at a terminal: a list below the line that what is typed narrows down."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from hermes.cli.output import near

_ROWS = 10


def matching(names: Iterable[str], text: str) -> list[str]:
    """The names that hold every word of the text; those that begin with it come first."""
    wanted = text.casefold().split()
    matches = [name for name in names if all(word in name.casefold() for word in wanted)]
    return sorted(matches, key=lambda name: not name.casefold().startswith(text.strip().casefold()))


def not_listed(name: str, names: Collection[str]) -> str:
    return f"{name} is not among the {len(names)} models that are listed.{near(name, names)}"


class Picking(NamedTuple):
    """A choice among many names that is open at the line of a chat, with what is shown beside each name. `unlisted` is
    what was typed and is none of them: typed again, it is meant."""

    mark: str
    names: Mapping[str, str]
    take: Callable[[str], Awaitable[None]]
    unlisted: str = ""


def can_pick() -> bool:
    """Whether there is a terminal to choose at."""
    try:
        return os.isatty(sys.stdin.fileno()) and os.isatty(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def pick(question: str, names: Mapping[str, str], default: str) -> str:
    """The name that is chosen, or another that was typed, matches none and was confirmed by a second Enter. Enter alone
    takes the default. It blocks, and raises EOFError at Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import Always
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import ColorDepth, create_output

    from hermes.cli.prompt_line import NameCompleter

    keys = KeyBindings()
    unlisted = ""

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        nonlocal unlisted
        buffer = event.current_buffer
        state = buffer.complete_state
        text = buffer.text.strip()
        if text and not (state and state.current_completion) and text not in names:
            match = next(iter(matching(names, text)), "")
            if not match and text != unlisted:
                unlisted = text
                return
            buffer.text = match or text
        buffer.validate_and_handle()

    def hint() -> str:
        if unlisted and session.default_buffer.text.strip() == unlisted:
            return f" {not_listed(unlisted, names)} Enter uses it anyway"
        return " Type to search · ↑ ↓ choose · Enter takes the first match"

    session: PromptSession[str] = PromptSession(
        completer=NameCompleter(names),
        complete_while_typing=True,
        reserve_space_for_menu=_ROWS,
        key_bindings=keys,
        bottom_toolbar=hint,
        output=create_output(sys.stderr),
        color_depth=ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
    )
    # The line of hints stands right below the list, not at the end of the screen.
    session.layout.current_window.dont_extend_height = Always()
    chosen = session.prompt(
        f"{question} [{default}]: ", pre_run=lambda: session.default_buffer.start_completion(select_first=False)
    )
    return chosen.strip() or default
