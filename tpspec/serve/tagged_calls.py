"""Calls of tools with tags around each argument: what such a call says, and where it ends in a text that still grows.

The other forms are in call_formats.py, and their ends in call_endings.py. Must not know HTTP, bodies of requests or the
engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from tpspec.serve.arguments import LONGEST_KEY, as_json
from tpspec.serve.call_endings import LONGEST_HEAD, Ended, JsonString
from tpspec.serve.choices import BLANKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.serve.arguments import Arguments, Call, Functions
    from tpspec.serve.call_endings import Ending

    Piece = str | re.Pattern[str]

NOT_BLANK, JSON_BLANKS = re.compile(r"\S"), re.compile(f"[{BLANKS}]*")
LONGEST_TAGS = 2 * LONGEST_KEY  # all before a value, with blanks between tags
GAP = re.compile(r"\s{0,9}")  # between a key and its value


@dataclass(frozen=True)
class Tagged:
    """Tags around each argument, in one of two ways, of which the second says nothing where it is empty:

        NAME[0] name NAME[1]  (KEY[0] key KEY[1]  VALUE[0] value VALUE[1])*  END

    gap: what stands between them. pad: around a value, which is text; what it stands for, its schema says. Names and
    keys may stand in quotes of a tag; then they have none.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    name: tuple[str, str] = ("", "")
    end: str = ""
    gap: str = ""
    pad: str = ""
    many: bool = False
    first: ClassVar[str] = ""

    @property
    def name_letter(self) -> str:
        """A pattern, as that of any key is."""
        return rf"[^{self.barred}\s]"

    @property
    def any_key(self) -> str:
        return rf"[^{self.barred}\n]{{1,{LONGEST_KEY}}}"

    @property
    def barred(self) -> str:
        """Letters that are of tags alone."""
        return '<>"' if '"' in self.key[1] else "<>"

    @property
    def begin(self) -> str:
        return self.name[0]

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.key, *self.value, *self.name, self.end)

    def ending(self, around: tuple[str, str], functions: Functions) -> Ending:
        return TaggedEnd(self, around[1], functions)

    def read(self, text: str, functions: Functions) -> list[Call] | None:
        head = self._head.match(text)
        if head is None or head[1] not in functions:
            return None
        function, arguments, at = functions[head[1]], dict[str, Any](), head.end()
        while opened := self._argument.match(text, at):
            name = opened[1].strip()
            end = ValueEnd(self.value[1], opened.end(), function.json_letters(name)).find(text)
            if end is None:
                return None
            arguments[name] = function.value(name, self._without_pad(text[opened.end() : end]))
            at = end + len(self.value[1])
        if not self._tail.fullmatch(text, at):
            return None
        try:
            return [(head[1], as_json(arguments))]
        except ValueError:
            return None

    @cached_property
    def opened(self) -> re.Pattern[str]:
        """All before a value."""
        key = rf"{re.escape(self.key[0])}({self.any_key}){re.escape(self.key[1])}"
        return re.compile(rf"{key}{GAP.pattern}{re.escape(self.value[0])}" if self.value[0] else key)

    @cached_property
    def _head(self) -> re.Pattern[str]:
        before, behind = map(re.escape, self.name)
        return re.compile(rf"\s*+{before}({self.name_letter}++)\s*+{behind}")

    @cached_property
    def _argument(self) -> re.Pattern[str]:
        return re.compile(rf"\s*+{self.opened.pattern}")

    @cached_property
    def _tail(self) -> re.Pattern[str]:
        return re.compile(rf"\s*+(?:{re.escape(self.end)})?\s*+")

    def _without_pad(self, text: str) -> str:
        return text.removeprefix(self.pad).removesuffix(self.pad)


class ValueEnd:
    """Of the value that begins at `at`: at the tag that closes it, which inside a string of JSON is none.

    letters: with which it is JSON, after blanks.
    """

    def __init__(self, closing: str, at: int, letters: str) -> None:
        self._closing, self._at, self._letters = closing, at, letters
        self._is_json: bool | None = None if letters else False  # None before its first letter
        self._string = JsonString(within_line=True)  # what seems to go over lines is broken

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

    def __init__(self, form: Tagged, closing: str, functions: Functions) -> None:
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
