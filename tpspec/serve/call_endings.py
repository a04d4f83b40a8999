"""Where a call of a tool ends in a text that still grows: one reader for each way in which calls are written.

Each reads a character a few times at most, however the text comes in pieces. Must not know which functions there are
beyond what their arguments stand for, HTTP, bodies of requests or the engine.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tpspec.serve.choices import BLANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tpspec.serve.arguments import Arguments
    from tpspec.serve.call_formats import Tagged

    Piece = str | re.Pattern[str]

NOT_BLANK, JSON_BLANKS = re.compile(r"\S"), re.compile(f"[{BLANKS}]*")
LONGEST_KEY = 256  # characters, of an argument's name
LONGEST_TAGS = 2 * LONGEST_KEY  # all before a value, with blanks between tags
LONGEST_HEAD = 256  # all before the arguments of a call
GAP = re.compile(r"\s{0,9}")  # between a key and its value


class Ended(NamedTuple):
    """at: how much of the text that is. is_call: otherwise it surely is none, as far as that."""

    at: int
    is_call: bool


class Ending(Protocol):
    """Of one call. It remembers how far it has read."""

    def find(self, text: str) -> Ended | None:
        """None when it goes on. text: from the call's beginning, all of it each time."""
        ...


class _JsonString:
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
        self._string = _JsonString()

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
        self._in_marks, self._string = False, _JsonString()
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


class ValueEnd:
    """Of the value that begins at `at`: at the tag that closes it, which inside a string of JSON is none.

    letters: with which it is JSON, after blanks.
    """

    def __init__(self, closing: str, at: int, letters: str) -> None:
        self._closing, self._at, self._letters = closing, at, letters
        self._is_json: bool | None = None if letters else False  # None before its first letter
        self._string = _JsonString(within_line=True)  # what seems to go over lines is broken

    def find(self, text: str) -> int | None:
        """None where it goes on."""
        if self._is_json is None:
            self._at = JSON_BLANKS.match(text, self._at).end()  # type: ignore[union-attr]  # it always matches
            if self._at == len(text):
                return None
            self._is_json = text[self._at] in self._letters
        if not self._is_json:
            found = text.find(self._closing, self._at)
            self._at = max(self._at, len(text) - len(self._closing))
            return None if found < 0 else found
        while self._at < len(text):
            char = text[self._at]
            if not self._string.is_open and char == self._closing[0]:
                rest = text[self._at : self._at + len(self._closing)]
                if self._closing.startswith(rest):
                    return self._at if rest == self._closing else None
            self._string.step(char)
            self._at += 1
        return None


class TaggedEnd:
    """Of arguments between tags. Behind the name, and behind each value, comes another argument or the end.

    Where anything else does it was no call, but an answer that speaks of one. What looks like either inside a value is
    part of it.
    """

    def __init__(self, form: Tagged, closing: str, functions: Mapping[str, Arguments]) -> None:
        self._form, self._closing, self._functions = form, closing, functions
        ends = [end for end in (form.end, closing) if end]
        self._next = re.compile(rf"(?P<end>{'|'.join(map(re.escape, ends))})|{form.opened.pattern}")
        behind_name = [form.name[1]] if form.name[1] else [form.key[0], closing]
        behind = "|".join(map(re.escape, behind_name))
        self._head = re.compile(rf"{re.escape(form.begin)}({form.name_letter}++)\s*+(?={behind})")
        name, blanks = re.compile(f"{form.name_letter}+"), re.compile(r"\s*")
        self._heads: list[Sequence[Piece]] = [(form.begin, name, blanks, one) for one in behind_name]
        argument = (form.key[0], re.compile(form.any_key), form.key[1], GAP, form.value[0])
        self._nexts: list[Sequence[Piece]] = [argument, *((end,) for end in ends)]
        self._at, self._has_begun = 0, False
        self._function: Arguments | None = None
        self._value: ValueEnd | None = None  # inside one

    def find(self, text: str) -> Ended | None:
        while True:
            if self._value is not None:
                end = self._value.find(text)
                if end is None:
                    return None
                self._at, self._value = end + len(self._form.value[1]), None
            start = NOT_BLANK.search(text, self._at)
            self._at = len(text) if start is None else start.start()
            if start is None:
                return None
            if not self._has_begun:
                if self._read_head(text):
                    continue
                return self._none_unless(self._heads, text, LONGEST_HEAD)
            found = self._next.match(text, self._at)
            if found is None:
                return self._none_unless(self._nexts, text, LONGEST_TAGS)
            if end_tag := found["end"]:
                return Ended(found.start() if end_tag == self._closing else found.end(), is_call=True)
            letters = "" if self._function is None else self._function.json_letters(found[2].strip())
            self._value = ValueEnd(self._form.value[1], found.end(), letters)

    def _read_head(self, text: str) -> bool:
        head = self._head.match(text, self._at, self._at + LONGEST_HEAD)
        if head is not None:
            self._at = head.end() + len(self._form.name[1])
            self._function, self._has_begun = self._functions.get(head[1]), True
        return self._has_begun

    def _none_unless(self, ways: list[Sequence[Piece]], text: str, longest: int) -> Ended | None:
        """What comes here is none of these; None where it may yet become one."""
        rest = text[self._at : self._at + longest]
        if len(rest) < longest and any(_may_become(rest, pieces) for pieces in ways):
            return None
        begin = "" if self._has_begun else self._form.begin  # with which another call would seem to begin here
        return Ended(self._at + (len(begin) if rest.startswith(begin) else 0), is_call=False)


def _may_become(text: str, pieces: Sequence[Piece]) -> bool:
    """Whether a text is the beginning of these in a row. A pattern takes all it can."""
    for piece in pieces:
        if isinstance(piece, str):
            if not text.startswith(piece):
                return piece.startswith(text)
            text = text.removeprefix(piece)
        else:
            found = piece.match(text)
            if found is None:
                return not text
            text = text[found.end() :]
    return True
