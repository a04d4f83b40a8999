"""Where a call of a tool ends in a text that still grows: a reader for each way in which calls are written, but tags.

Each reads a character a few times at most, however the text comes in pieces. Must not know which functions there are,
HTTP, bodies of requests or the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_HEAD = 256  # characters, all before the arguments of a call


class Ended(NamedTuple):
    """at: how much of the text that is. is_call: otherwise it surely is none, as far as that."""

    at: int
    is_call: bool


class Ending(Protocol):
    """Of one call. It remembers how far it has read."""

    def find(self, text: str) -> Ended | None:
        """None when it goes on. text: from the call's beginning, all of it each time."""
        ...


class JsonString:
    """Whether a text has come into a string of JSON. within_line: none goes over lines."""

    def __init__(self, *, within_line: bool = False) -> None:
        self._within_line = within_line
        self.is_open = self._escaped = False

    def step(self, char: str, *, opens: bool = True) -> bool:
        """Whether the next letter is of a string, its quotes too. opens: whether one may begin here."""
        was_open = self.is_open
        if was_open:
            self.is_open = (self._escaped or char != '"') and not (self._within_line and char == "\n")
            self._escaped = char == "\\" and not self._escaped
        else:
            self.is_open = opens and char == '"'
        return was_open or self.is_open


class JsonEnd:
    """Of the JSON that begins at `at`. stop: a mark that is none; where it stands outside of strings, braces lack."""

    def __init__(self, stop: str, opening: str = "{", closing: str = "}", at: int = 0) -> None:
        self._stop, self._opening, self._closing = stop, opening, closing
        self._at, self._depth = at, 0
        self._string = JsonString()

    def find(self, text: str) -> Ended | None:
        while self._at < len(text):
            char = text[self._at]
            if self._depth == 0 and char != self._opening and not char.isspace():
                return Ended(0, is_call=False)
            if not self._string.is_open and self._stop[:1] == char:
                if text.startswith(self._stop, self._at):
                    return Ended(self._at, is_call=False)
                if self._stop.startswith(text[self._at : self._at + len(self._stop)]):
                    return None
            self._at += 1
            if not self._string.step(char):
                self._depth += {self._opening: 1, self._closing: -1}.get(char, 0)
            if char == self._closing and self._depth == 0:
                return Ended(self._at, is_call=True)
        return None


class UnquotedEnd:
    """Of the object that begins at `at`, with strings between two `quote`s or JSON's. stop: as of JsonEnd."""

    def __init__(self, stop: str, quote: str, at: int) -> None:
        self._stop, self._quote, self._at, self._depth = stop, quote, at, 0
        self._in_marks, self._string = False, JsonString()
        self._may_quote = False  # by JSON's quotes: where a key or a value may begin

    def find(self, text: str) -> Ended | None:
        while self._at < len(text):
            if self._in_marks:
                end = text.find(self._quote, self._at)
                if end < 0:
                    self._at = max(self._at, len(text) - len(self._quote) + 1)
                    return None
                self._in_marks, self._may_quote, self._at = False, False, end + len(self._quote)
                continue
            rest = text[self._at : self._at + max(len(self._quote), len(self._stop))]
            if not self._string.is_open:
                if rest.startswith(self._stop):
                    return Ended(self._at, is_call=False)
                if rest.startswith(self._quote):
                    self._in_marks, self._at = True, self._at + len(self._quote)
                    continue
                if self._quote.startswith(rest) or self._stop.startswith(rest):
                    return None
            self._step(text[self._at])
            self._at += 1
            if self._depth == 0:
                return Ended(self._at, is_call=True)
        return None

    def _step(self, char: str) -> None:
        if self._string.step(char, opens=self._may_quote):
            self._may_quote = False
            return
        self._depth += {"{": 1, "}": -1}.get(char, 0)
        if not char.isspace():
            self._may_quote = char in "{[,:"


class NamedEnd:
    """Of an object behind a name. make: what reads that, from where it begins."""

    def __init__(self, stop: str, make: Callable[[int], Ending]) -> None:
        self._stop, self._make = stop, make
        self._arguments: Ending | None = None

    def find(self, text: str) -> Ended | None:
        if self._arguments is None:
            head = text[:LONGEST_HEAD]
            if (stop := head.find(self._stop)) >= 0 and "{" not in head[:stop]:
                return Ended(stop, is_call=False)
            if (at := head.find("{")) < 0:
                return Ended(0, is_call=False) if len(text) >= LONGEST_HEAD else None
            self._arguments = self._make(at)
        return self._arguments.find(text)
