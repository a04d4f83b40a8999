"""Objects whose keys stand as they are, and whose strings do, between two marks: as Gemma 4 writes what it calls with.

What models write instead is read, too: strings of JSON, text without marks, a comma too few, or one behind the last.
Nothing is ever evaluated. Must not know how calls begin or end, HTTP or bodies of requests.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tpspec.serve.arguments import as_json, read_value
from tpspec.serve.schemas import ANYTHING

if TYPE_CHECKING:
    from tpspec.serve.arguments import Arguments

STRING = r'"(?:[^"\\]|\\.)*+"'  # of JSON
BLANKS = re.compile(r"\s*+")
NO_KEY = r"{}\[\],:"  # as in brackets of a pattern: with these a key would be read otherwise


class Patterns(NamedTuple):
    """quoted: a string, or a string of JSON. plain: a key that is text. key: either. bare: a value that is text, up to
    what ends it."""

    quoted: re.Pattern[str]
    plain: re.Pattern[str]
    key: re.Pattern[str]
    bare: re.Pattern[str]


@cache
def patterns(quote: str) -> Patterns:
    mark = re.escape(quote)
    quoted = rf"{mark}(?P<marked>(?:(?!{mark}).)*+){mark}|(?P<json>{STRING})"
    plain = rf'(?!")(?:(?!{mark})[^{NO_KEY}])++'
    return Patterns(
        re.compile(quoted, re.DOTALL),
        re.compile(plain),
        re.compile(rf"(?:(?:{quoted})\s*+|(?P<bare>{plain})):", re.DOTALL),
        re.compile(rf"(?:(?!{mark})[^{{}}\[\],])++"),
    )


def read_object(text: str, quote: str, function: Arguments) -> dict[str, Any]:
    """The arguments that a text says. Raises ValueError or RecursionError where it is no such object."""
    reader = _Reader(text, patterns(quote), function)
    found = reader.object(is_whole=True)
    if reader.rest:
        raise ValueError("text behind an object")
    return found


class _Reader:
    def __init__(self, text: str, patterns: Patterns, function: Arguments) -> None:
        self._text, self._at, self._patterns, self._function = text, 0, patterns, function

    @property
    def rest(self) -> str:
        return self._text[self._at :].strip()

    def object(self, *, is_whole: bool = False) -> dict[str, Any]:
        """is_whole: the arguments, of which a schema may say what bare text stands for."""
        found = dict[str, Any]()
        self._take("{")
        while not self._is_over("}"):
            head = self._match(self._patterns.key)
            key = head["bare"].strip() if head["bare"] is not None else _said(head)
            found[key] = self._value(key if is_whole else None)
        return found

    def _list(self) -> list[Any]:
        found = list[Any]()
        self._take("[")
        while not self._is_over("]"):
            found.append(self._value(None))
        return found

    def _value(self, key: str | None) -> Any:
        """With the comma behind it, if there is one. key: of an argument."""
        self._skip_blanks()
        first = self._text[self._at : self._at + 1]
        if first == "{":
            value: Any = self.object()
        elif first == "[":
            value = self._list()
        elif quoted := self._patterns.quoted.match(self._text, self._at):
            self._at = quoted.end()
            value = _said(quoted)
        else:
            text = self._match(self._patterns.bare)[0].strip()
            value = _bare(text)
            if key is not None and (isinstance(value, str) or not self._function.allows(key, value)):
                value = self._function.value(key, text)
        self._skip_blanks()
        self._at += self._text.startswith(",", self._at)
        return value

    def _is_over(self, closing: str) -> bool:
        self._skip_blanks()
        if not self._text.startswith(closing, self._at):
            return False
        self._at += len(closing)
        return True

    def _take(self, opening: str) -> None:
        if not self._is_over(opening):
            raise ValueError(f"no {opening}")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ValueError("neither a key nor a value")
        self._at = found.end()
        return found

    def _skip_blanks(self) -> None:
        found = BLANKS.match(self._text, self._at)
        assert found is not None, "there may be none"
        self._at = found.end()


def _said(found: re.Match[str]) -> str:
    if found["marked"] is not None:
        return found["marked"]
    said: str = json.loads(found["json"], strict=False)  # lines are broken in it as they are
    return said


def _bare(text: str) -> Any:
    """JSON's numbers and words, and Python's; anything else is text."""
    try:
        value = read_value(text, ANYTHING)
        as_json({"": value})
    except ValueError:
        return text
    return value
