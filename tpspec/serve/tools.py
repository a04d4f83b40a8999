"""Tools in a model's text: how its chat template has calls written, and reading them out of the text as it comes.

A call is JSON between the marks of its format; what a format is, is data. Nothing a model writes is ever evaluated.
Must not know HTTP, bodies of requests or the engine.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Format:
    """How calls are written. sign: matches in the chat templates that ask for it. key: of the arguments.

    opening and closing: the marks around a call. Without them a call is bare JSON, with which a text begins.
    is_addressed: a call is no part of the text, but a message to the function.
    """

    name: str
    sign: str
    key: str
    opening: str = ""
    closing: str = ""
    is_addressed: bool = False


FORMATS = (
    # Hermes, and Qwen up to 3; others, such as Qwen3-Coder, have XML between the same marks
    Format("hermes", r'<tool_call>.*arguments\\?" *:', "arguments", "<tool_call>", "</tool_call>"),
    Format("llama", '"name": function name, "parameters":', "parameters"),  # Llama 3.1 and later
    Format("harmony", r"<\|channel\|>commentary", "arguments", is_addressed=True),  # gpt-oss
)
ADDRESS = "functions."  # of what clients have; other tools are the model's own
KEYS = ("arguments", "parameters")  # models mix them up
BETWEEN = " \t\r\n;"  # what may stand between bare calls


def format_of(template: str) -> Format | None:
    """The format a chat template has calls written in; None when it is none of ours."""
    return next((one for one in FORMATS if re.search(one.sign, template, re.DOTALL)), None)


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What a chat may call. shown: to the model, as chat templates read tools. schemas: of the arguments, by function.

    strict: functions whose arguments are bound to their schema, also where nothing has to be called.
    must: nothing but calls is wanted, at least one; where not parallel, at most one.
    """

    shown: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    strict: frozenset[str]
    must: bool
    parallel: bool


@dataclass(frozen=True, slots=True)
class Calling:
    """Which calls a text may hold: of the functions in `names`, and only one of them where they may not be parallel.

    lenient: JSON with which a text begins may be a call without its marks. Small models forget them.
    """

    format: Format
    names: frozenset[str]
    parallel: bool = True
    lenient: bool = True


@dataclass(frozen=True, slots=True)
class ToolCall:
    """index: of this call among those of its text. offset: how much is said before it. arguments: a JSON object."""

    id: str
    index: int
    offset: int
    name: str
    arguments: str


class CallReader:
    """Parts a text that comes in pieces into what is said and what is called; how it is cut changes neither.

    What stands between marks but calls no function of the request is text; the marks themselves never are. Spaces
    before a call belong to it, as templates write calls of earlier turns.
    """

    def __init__(self, calling: Calling) -> None:
        self._calling, self._format = calling, calling.format
        self._held = ""  # what may yet turn out to be a mark or a call
        self._object: ObjectEnd | None = None  # inside a call
        self._may_begin = calling.lenient or not calling.format.opening  # a bare call: nothing else was said
        self._num_calls = self._num_said = 0

    @property
    def ended(self) -> bool:
        """Nothing more is wanted of this text."""
        return self._num_calls > 0 and not self._calling.parallel

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        said: list[str] = []
        calls: list[ToolCall] = []
        for one in self._found():
            if isinstance(one, str):
                said.append(one)
                self._num_said += len(one)
            else:
                calls.append(one)
        return "".join(said), calls

    def flush(self) -> str:
        """What is held when the text ends; a call that was cut short is text."""
        rest, self._held = "" if self.ended else self._held, ""
        if self._object is not None:
            return self._without_marks(rest)
        return rest.rstrip(BETWEEN if self._is_bare else None) if self._num_calls else rest

    @property
    def _is_bare(self) -> bool:
        return not self._format.opening

    def _found(self) -> Iterator[str | ToolCall]:
        while not self.ended:
            if self._object is not None:
                end = self._object.find(self._held)
                if end is None:
                    return
                self._object = None
                yield self._call_or_text(self._take(end))
                continue
            size = len(self._held)
            yield (said := self._said())
            if self._object is None and size - len(self._held) == len(said):
                return  # no mark was taken out

    def _said(self) -> str:
        """Text up to the next mark or call, or up to what may become one."""
        start = self._held.lstrip(BETWEEN if self._num_calls else None)
        if self._may_begin and start[:1] in ("", "{"):
            if start:
                self._held, self._object = start if self._num_calls else self._held, ObjectEnd()
            return ""
        said = self._take(len(self._held)) if self._is_bare else self._before_mark()
        self._may_begin = self._may_begin and not said
        return said

    def _before_mark(self) -> str:
        found = self._next_mark()
        if found is None:
            return self._take(len(self._held[: len(self._held) - self._num_of_a_mark()].rstrip()))
        at, mark = found
        said = self._take(at).rstrip()
        self._take(len(mark))
        if mark == self._format.opening:
            self._object = ObjectEnd()
        return said

    def _next_mark(self) -> tuple[int, str] | None:
        marks = (self._format.opening, self._format.closing)
        return min(((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=None)

    def _num_of_a_mark(self) -> int:
        """Length of the longest end of what is held that begins a mark."""
        marks = (self._format.opening, self._format.closing)
        sizes = range(min(len(self._held), max(map(len, marks))), 0, -1)
        return next((size for size in sizes if any(mark.startswith(self._held[-size:]) for mark in marks)), 0)

    def _without_marks(self, text: str) -> str:
        return text.replace(self._format.opening, "").replace(self._format.closing, "")

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _call_or_text(self, text: str) -> str | ToolCall:
        found = _read_call(text, self._calling.names)
        if found is None:
            self._may_begin = False
            return self._without_marks(text)
        self._num_calls += 1
        return _new_call(self._num_calls - 1, self._num_said, *found)


class AddressedCalls:
    """Calls that come one by one, each with the function beside its arguments."""

    def __init__(self, calling: Calling) -> None:
        self._calling = calling
        self._num_calls = 0

    @property
    def ended(self) -> bool:
        """As of a CallReader."""
        return self._num_calls > 0 and not self._calling.parallel

    def read(self, to: str, text: str, offset: int) -> ToolCall | None:
        """offset: as of the call. None where the text calls no function of the request."""
        name = to.removeprefix(ADDRESS)
        arguments = _read_arguments(text.strip() or "{}") if name in self._calling.names else None
        if arguments is None:
            return None
        self._num_calls += 1
        return _new_call(self._num_calls - 1, offset, name, arguments)


def _new_call(index: int, offset: int, name: str, arguments: str) -> ToolCall:
    return ToolCall(f"call_{secrets.token_hex(12)}", index, offset, name, arguments)


class ObjectEnd:
    """Finds the end of the JSON object with which a text begins, reading each character once as the text grows."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Where it ends; 0 when the text begins with something else; None when it goes on."""
        while self._at < len(text):
            char = text[self._at]
            if self._depth == 0 and char != "{" and not char.isspace():
                return 0
            self._at += 1
            self._step(char)
            if char == "}" and self._depth == 0:
                return self._at
        return None

    def _step(self, char: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        else:
            self._depth += {"{": 1, "}": -1}.get(char, 0)


def _read_call(text: str, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments, where the text is a call of one of `names`."""
    try:
        call = json.loads(text)
        arguments: Any = next((call[key] for key in KEYS if key in call), {})
        if call.get("name") not in names or not isinstance(arguments, dict):
            return None
        return call["name"], as_json(arguments)
    except (ValueError, TypeError, RecursionError):
        return None


def _read_arguments(text: str) -> str | None:
    try:
        value = json.loads(text)
        return as_json(value) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def as_json(value: dict[str, Any]) -> str:
    """Raises ValueError for what JSON or UTF-8 cannot say: numbers that are not finite, halves of a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text
