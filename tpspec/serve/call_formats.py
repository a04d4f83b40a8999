"""How models write calls of tools: where a call ends in a text that still grows, and what it says.

A format is data, read off published chat templates; how its calls are written is one of a few forms: JSON, a list of
it, JSON behind a name, or tags around each argument. Nothing a model writes is ever evaluated. Must not know HTTP,
bodies of requests or the engine.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tpspec.serve.arguments import as_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tpspec.serve.arguments import Arguments

    Functions = Mapping[str, Arguments]
    Call = tuple[str, str]  # a function's name, and its arguments as a JSON object

KEYS = ("arguments", "parameters")  # models mix them up
NAME = r"[\w.-]"  # a letter of it
NAME_AND_BLANKS, NOT_BLANK = re.compile(rf"{NAME}++\s*+"), re.compile(r"\S")
LONGEST_KEY = 256  # characters, of an argument's name
LONGEST_TAGS = 2 * LONGEST_KEY  # all before a value, with blanks between tags
LONGEST_HEAD = 256  # all before the arguments of a call


class Ending(Protocol):
    """Finds where a call ends. One for each call: it remembers how far it has read."""

    def find(self, text: str) -> int | None:
        """Where; None when it goes on. Where it turns out to be no call, how much of the text surely is none.

        text: from the call's beginning.
        """
        ...


class Form(Protocol):
    """What stands between the marks of a format.

    first: the character with which a call begins that is one without its marks, or none. begin: what every call begins
    with, and nothing else does; or none. marks: more of them, inside a call.
    """

    @property
    def first(self) -> str: ...
    @property
    def begin(self) -> str: ...
    @property
    def marks(self) -> tuple[str, ...]: ...
    def ending(self, closing: str, functions: Functions, *, is_marked: bool) -> Ending:
        """is_marked: it is a call whatever its name; where its mark was forgotten, only if it is of these functions."""
        ...

    def read(self, text: str, functions: Functions) -> list[Call] | None:
        """None where the text calls none of the functions."""
        ...


class JsonEnd:
    """Of the JSON that begins at `at`, reading each character once as the text grows."""

    def __init__(self, opening: str = "{", closing: str = "}", at: int = 0) -> None:
        self._opening, self._closing = opening, closing
        self._at, self._depth = at, 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        while self._at < len(text):
            char = text[self._at]
            if self._depth == 0 and char != self._opening and not char.isspace():
                return 0
            self._at += 1
            self._step(char)
            if char == self._closing and self._depth == 0:
                return self._at
        return None

    def _step(self, char: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        else:
            self._depth += {self._opening: 1, self._closing: -1}.get(char, 0)


@dataclass(frozen=True, slots=True)
class Json:
    """{"name": ..., KEY: {...}}"""

    key: str
    first: ClassVar[str] = "{"
    begin: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = ()

    def ending(self, closing: str, functions: Functions, *, is_marked: bool) -> Ending:
        return JsonEnd()

    def read(self, text: str, functions: Functions) -> list[Call] | None:
        call = _call_of(_parsed(text), functions)
        return None if call is None else [call]


@dataclass(frozen=True, slots=True)
class JsonList:
    """[{"name": ..., KEY: {...}}, ...]"""

    key: str
    first: ClassVar[str] = "["
    begin: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = ()

    def ending(self, closing: str, functions: Functions, *, is_marked: bool) -> Ending:
        return JsonEnd("[", "]")

    def read(self, text: str, functions: Functions) -> list[Call] | None:
        found = _parsed(text)
        calls = [_call_of(one, functions) for one in found] if isinstance(found, list) else []
        known = [call for call in calls if call is not None]
        return known if known and len(known) == len(calls) else None


@dataclass(frozen=True, slots=True)
class Named:
    """NAME MARK {...}. Between name and mark older models put an id behind `id_mark`; some forget the mark."""

    mark: str
    id_mark: str
    first: ClassVar[str] = ""
    begin: ClassVar[str] = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.mark, self.id_mark)

    def ending(self, closing: str, functions: Functions, *, is_marked: bool) -> Ending:
        return _NamedEnd()

    def read(self, text: str, functions: Functions) -> list[Call] | None:
        rest = rf"\s*+(?:{re.escape(self.id_mark)}\s*+\w*+\s*+)?(?:{re.escape(self.mark)})?\s*+(?={{)"
        head = re.match(rf"\s*+({NAME}+){rest}", text)
        if head is None or head[1] not in functions:
            return None
        arguments = read_arguments(text[head.end() :])
        return None if arguments is None else [(head[1], arguments)]


class _NamedEnd:
    def __init__(self) -> None:
        self._arguments: JsonEnd | None = None

    def find(self, text: str) -> int | None:
        if self._arguments is None:
            if (at := text.find("{", 0, LONGEST_HEAD)) < 0:
                return 0 if len(text) >= LONGEST_HEAD else None
            self._arguments = JsonEnd(at=at)
        return self._arguments.find(text)


@dataclass(frozen=True)
class Tagged:
    """Tags around each argument, in one of two ways, of which the second says nothing where it is empty:

        NAME[0] name NAME[1]  (KEY[0] key KEY[1]  VALUE[0] value VALUE[1])*  END

    gap: what stands between them. pad: around a value, which is text; what it stands for, its schema says.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    name: tuple[str, str] = ("", "")
    end: str = ""
    gap: str = ""
    pad: str = ""
    first: ClassVar[str] = ""

    @property
    def begin(self) -> str:
        return self.name[0]

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.key, *self.value, *self.name, self.end)

    def ending(self, closing: str, functions: Functions, *, is_marked: bool) -> Ending:
        return _TaggedEnd(self, closing, functions, is_marked)

    def read(self, text: str, functions: Functions) -> list[Call] | None:
        head = self._head.match(text)
        if head is None or head[1] not in functions:
            return None
        function, arguments, at = functions[head[1]], dict[str, Any](), head.end()
        while opened := self._argument.match(text, at):
            name = opened[1].strip()
            end = _ValueEnd(self.value[1], opened.end(), is_json=function.is_json(name)).find(text)
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
        key = rf"{re.escape(self.key[0])}([^<>\n]{{1,{LONGEST_KEY}}}){re.escape(self.key[1])}"
        return re.compile(rf"{key}\s{{0,9}}{re.escape(self.value[0])}" if self.value[0] else key)

    @cached_property
    def _head(self) -> re.Pattern[str]:
        before, behind = map(re.escape, self.name)
        return re.compile(rf"\s*+{before}({NAME}++)\s*+{behind}")

    @cached_property
    def _argument(self) -> re.Pattern[str]:
        return re.compile(rf"\s*+{self.opened.pattern}")

    @cached_property
    def _tail(self) -> re.Pattern[str]:
        return re.compile(rf"\s*+(?:{re.escape(self.end)})?\s*+")

    def _without_pad(self, text: str) -> str:
        return text.removeprefix(self.pad).removesuffix(self.pad)


class _ValueEnd:
    """Of the value that begins at `at`: at the tag that closes it, which inside a string of JSON is none."""

    def __init__(self, closing: str, at: int, *, is_json: bool) -> None:
        self._closing, self._at, self._is_json = closing, at, is_json
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """None where it goes on."""
        if not self._is_json:
            found = text.find(self._closing, self._at)
            self._at = max(self._at, len(text) - len(self._closing))
            return None if found < 0 else found
        while self._at < len(text):
            char = text[self._at]
            if self._in_string:  # none goes over lines: what looks like that is broken
                self._in_string = (self._escaped or char != '"') and char != "\n"
                self._escaped = char == "\\" and not self._escaped
            elif text.startswith(self._closing, self._at):
                return self._at
            elif char == self._closing[0] and self._closing.startswith(text[self._at : self._at + len(self._closing)]):
                return None
            else:
                self._in_string = char == '"'
            self._at += 1
        return None


class _TaggedEnd:
    """What looks like the end inside a value is part of it."""

    def __init__(self, form: Tagged, closing: str, functions: Functions, is_marked: bool) -> None:
        self._form, self._closing, self._functions, self._is_marked = form, closing, functions, is_marked
        ends = "|".join(re.escape(end) for end in (form.end, closing) if end)
        self._next = re.compile(rf"(?P<end>{ends})|{form.opened.pattern}")
        self._behind_name = (form.name[1],) if form.name[1] else (form.key[0], closing)
        behind = "|".join(map(re.escape, self._behind_name))
        self._head = re.compile(rf"{re.escape(form.begin)}({NAME}++)\s*+(?={behind})")
        self._at, self._has_begun = 0, False
        self._function: Arguments | None = None
        self._value: _ValueEnd | None = None  # inside one

    def find(self, text: str) -> int | None:
        if not self._has_begun:
            no_call = self._read_head(text)
            if not self._has_begun:
                return no_call
        while True:
            if self._value is not None:
                at = self._value.find(text)
                if at is None:
                    return None
                self._at, self._value = at + len(self._form.value[1]), None
            found = self._next.search(text, self._at)
            if found is None:
                self._at = max(self._at, len(text) - LONGEST_TAGS)
                return None
            if end := found["end"]:
                return found.start() if end == self._closing else found.end()
            is_json = self._function is not None and self._function.is_json(found[2].strip())
            self._value = _ValueEnd(self._form.value[1], found.end(), is_json=is_json)

    def _read_head(self, text: str) -> int | None:
        """How much of the text surely is no call, where it has not begun now; None where it may yet begin."""
        start = NOT_BLANK.search(text, self._at)
        if start is None:
            self._at = len(text)
            return None
        self._at = start.start()
        rest = text[self._at : self._at + LONGEST_HEAD]
        head = self._head.match(rest)
        if head is None:
            if len(rest) < LONGEST_HEAD and self._may_become_head(rest):
                return None
            return self._at + (len(self._form.begin) if rest.startswith(self._form.begin) else 0)
        self._at += head.end()
        self._function = self._functions.get(head[1])
        self._has_begun = self._is_marked or self._function is not None
        return self._at

    def _may_become_head(self, rest: str) -> bool:
        begin = self._form.begin
        if not rest.startswith(begin):
            return begin.startswith(rest)
        name = NAME_AND_BLANKS.match(rest, len(begin))
        behind = rest[name.end() if name else len(begin) :]
        return not behind or (name is not None and any(one.startswith(behind) for one in self._behind_name))


@dataclass(frozen=True, slots=True)
class Format:
    """How calls are written. sign: matches in the chat templates that ask for it. form: of what stands in a call.

    opening and closing: the marks around it; a format may have none, or only the first. gap: between marks and what
    they hold. between: one call and the next. short_ids: templates want ids of nine letters and digits.
    is_addressed: a call is no part of the text, but a message to the function.
    """

    name: str
    sign: str
    form: Form
    opening: str = ""
    closing: str = ""
    gap: str = ""
    between: str = "\n"
    short_ids: bool = False
    is_addressed: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them that may be tokens."""
        return tuple(mark for mark in (self.opening, self.closing, *self.form.marks) if mark)


TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER = ("<function=", ">"), ("<parameter=", ">")
ARG_KEY, ARG_VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
LINES = Tagged(PARAMETER, ("", "</parameter>"), FUNCTION, "</function>", gap="\n")

# The first whose sign a template has.
FORMATS = (
    Format("seed", "<seed:tool_call>", LINES, "<seed:tool_call>", "</seed:tool_call>", gap="\n"),  # Seed-OSS
    Format(  # Qwen3-Coder
        "qwen3-coder", "<tool_call>.*<parameter=", replace(LINES, pad="\n"), TOOL_CALL, TOOL_CALL_END, gap="\n"
    ),
    Format("glm-4.7", "</arg_key><arg_value>", Tagged(ARG_KEY, ARG_VALUE), TOOL_CALL, TOOL_CALL_END, between=""),
    Format("glm-4.5", "<arg_key>", Tagged(ARG_KEY, ARG_VALUE, gap="\n"), TOOL_CALL, TOOL_CALL_END),
    Format(  # Qwen up to 3
        "hermes", r'<tool_call>.*arguments\\?" *:', Json("arguments"), TOOL_CALL, TOOL_CALL_END, gap="\n"
    ),
    Format("llama", '"name": function name, "parameters":', Json("parameters")),  # Llama 3.1 and later
    Format("harmony", r"<\|channel\|>commentary", Json("arguments"), is_addressed=True),  # gpt-oss
    Format(  # Ministral 3, Devstral, Mistral Small 3.2
        "mistral", r"\[ARGS\]", Named("[ARGS]", "[CALL_ID]"), "[TOOL_CALLS]", between="", short_ids=True
    ),
    Format("mistral-list", r"\[TOOL_CALLS\] ?\[", JsonList("arguments"), "[TOOL_CALLS]", short_ids=True),
)


def format_of(template: str) -> Format | None:
    """The format a chat template has calls written in; None when it is none of ours."""
    return next((one for one in FORMATS if re.search(one.sign, template, re.DOTALL)), None)


def read_arguments(text: str) -> str | None:
    """A JSON object, written anew; None where the text is none."""
    value = _parsed(text)
    return _as_object(value) if isinstance(value, dict) else None


def _parsed(text: str) -> Any:
    """None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any, functions: Functions) -> Call | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments: Any = next((value[key] for key in KEYS if key in value), {})
    if not isinstance(name, str) or name not in functions or not isinstance(arguments, dict):
        return None
    written = _as_object(arguments)
    return None if written is None else (name, written)


def _as_object(value: dict[str, Any]) -> str | None:
    try:
        return as_json(value)
    except (ValueError, RecursionError):
        return None
