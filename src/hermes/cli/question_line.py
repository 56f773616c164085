"""The input line while a question is open: text typed before it is set aside, and single keys answer an approval."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hermes.cli.screen import Open, Screen, choices

if TYPE_CHECKING:
    from hermes.cli.chat_loop import Chat

# A question takes no key before nobody has typed for so long: letters of a message must not answer it.
QUIET_S = 0.5
# How long the rest of a word that was begun by a key (`once`, and Enter) belongs to that key.
_REST_S = 1.0
# A key that allows something counts when nothing else follows it for so long: other words (`stop`, `abort`) begin with such
# letters too.
_HOLD_S = 0.4
_WORDS = {"once": "once", "yes": "once", "session": "session", "always": "always", "deny": "deny"}
_NO = re.compile(r"o\b[\s,.:;]*")


class QuestionLine:
    """What keys and lines mean at the oldest open question. `read` returns the text of the input line."""

    def __init__(self, chat: Chat, read: Callable[[], str]) -> None:
        assert isinstance(chat.screen, Screen)
        self._chat, self._screen, self._read = chat, chat.screen, read
        self._question: Open | None = None
        self._quiet_since = 0.0
        self._is_ready = self._is_commenting = False
        self._draft = ""
        self._rest, self._rest_until = "", 0.0
        # The word whose first letters were typed, how many of them, and when it becomes the answer.
        self._held, self._held_count, self._held_until = "", 0, 0.0

    def update(self) -> None:
        """Follow which question is open; called at events, at keys, and several times a second."""
        now = time.monotonic()
        question = next(iter(self._screen.questions), None)
        if question is not self._question:
            if self._is_ready and question is None:
                self._restore_draft()
            self._question, self._quiet_since = question, now
            self._is_ready = self._is_commenting = False
            self._held = ""
        if self._held and now >= self._held_until:
            self._allow()
        if question is None or self._is_ready:
            return
        at_once = question.kind == "answer" and not self._read()
        if at_once or now - self._quiet_since >= QUIET_S:
            self._is_ready = True
            self._draft = "\n".join(filter(None, (self._draft, self._read())))
            self._chat.typed("")

    def _restore_draft(self) -> None:
        text = "\n".join(filter(None, (self._draft, self._read())))
        self._draft = ""
        self._chat.typed(text)

    def typed(self) -> None:
        """The text of the line has changed."""
        if not self._is_ready:
            self._quiet_since = time.monotonic()

    # --- keys -------------------------------------------------------------------------------------------------------

    def wants_keys(self) -> bool:
        """Whether the next letter is one for `key`."""
        self.update()
        return self._takes_keys() or self._has_rest()

    def _takes_keys(self) -> bool:
        is_approval = self._question is not None and self._question.kind == "approve"
        return (
            is_approval
            and self._is_ready
            and self._chat.picking is None
            and not self._is_commenting
            and not self._read()
        )

    def _has_rest(self) -> bool:
        return bool(self._rest) and time.monotonic() < self._rest_until

    def key(self, letter: str) -> bool:
        """Take a letter, or Enter, as an answer. False: it is text."""
        if self._held:
            self._go_on_with_word(letter)
            return True
        if self._is_rest(letter):
            return True
        question = self._question
        if question is None or not self._takes_keys():
            return False
        word = next((word for word in (*_WORDS, "explain") if word[0] == letter.lower()), "")
        if letter == "\r":
            self._chat.answer_approval(question, "deny")
        elif letter.lower() == "n":
            self._is_commenting = True
        elif word == "explain":
            self._chat.explain(question.event)
        elif not word:
            return False
        elif word != "deny":
            self._held, self._held_count, self._held_until = word, 1, time.monotonic() + _HOLD_S
            return True
        else:
            self._chat.answer_approval(question, word)
        self._rest, self._rest_until = f"{word[1:]}\r" if word else "", time.monotonic() + _REST_S
        return True

    def _go_on_with_word(self, letter: str) -> None:
        """The next letter of the word, or Enter, which ends it; anything else was meant as text."""
        word, count = self._held, self._held_count
        if letter == "\r":
            self._allow()
        elif letter.lower() == word[count : count + 1]:
            self._held_count, self._held_until = count + 1, time.monotonic() + _HOLD_S
        else:
            self._held = ""
            self._chat.typed(word[:count] + letter)

    def _allow(self) -> None:
        word, self._held = self._held, ""
        if self._question is not None and _WORDS[word] in self._question.event["choices"]:
            self._chat.answer_approval(self._question, _WORDS[word])
        self._rest, self._rest_until = f"{word[self._held_count :]}\r", time.monotonic() + _REST_S

    def _is_rest(self, letter: str) -> bool:
        """Whether a letter goes on with the word whose first letter was an answer; whoever types it all ends by Enter."""
        rest, self._rest = (self._rest if self._has_rest() else ""), ""
        if rest and letter == rest[0]:
            self._rest, self._rest_until = rest[1:], time.monotonic() + _REST_S
            return True
        return bool(rest) and letter == "\r"

    def enter(self, text: str) -> None:
        """A whole line: a comment, an answer, or where no question is ready for it, a message."""
        self.update()
        question = self._question
        if self._is_commenting and question is not None:
            self._is_commenting = False
            self._chat.answer_approval(question, "deny", _NO.sub("", text.strip(), count=1))
        elif self._chat.picking is not None or question is None or not self._is_ready or text.startswith("/"):
            self._chat.enter(text)
        elif question.kind == "answer":
            self._chat.answer_question(question, text.strip())
        elif text.strip():
            self._screen.note(choices(question.event))

    # --- what is shown ----------------------------------------------------------------------------------------------

    def mark(self) -> str:
        if self._chat.picking is not None:
            return self._chat.picking.mark
        if self._question is None or not self._is_ready:
            return "›"
        if self._question.kind == "answer":
            return "answer:"
        return "instead:" if self._is_commenting else f"allow? {self._countdown()}"

    def hint(self) -> str:
        """The keys that answer, in a line above the prompt."""
        if self._chat.picking is not None:
            return "Type to search · ↑ ↓ choose · Enter takes the first match, alone it changes nothing"
        if self._question is None or not self._is_ready or self._question.kind != "approve":
            return ""
        if self._is_commenting:
            return f"Say what to do instead · Enter denies, with or without words · {self._countdown()}"
        return choices(self._question.event)

    def facts(self) -> list[str]:
        if self._question is None:
            return []
        facts = [f"{self._countdown()} to answer"] if self._question.kind == "answer" or not self._is_ready else []
        return [*facts, *(["your draft comes back"] if self._draft else [])]

    def _countdown(self) -> str:
        assert self._question is not None
        minutes, seconds = divmod(max(0, round(self._question.event["expires_at"] - time.time())), 60)
        return f"{minutes}:{seconds:02}"
