"""How models write calls of tools, and what a call says; where it ends, call_endings finds.

A format is data, read off published chat templates; how its calls are written is one of a few forms: JSON, a list of
it, JSON behind a name, an object without JSON's quotes, or tags around each argument (tagged_calls.py). Nothing a model
writes is ever evaluated. Must not know HTTP, bodies of requests or the engine.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tpspec.serve.arguments import as_json
from tpspec.serve.call_endings import JsonEnd, NamedEnd, UnquotedEnd
from tpspec.serve.tagged_calls import Tagged
from tpspec.serve.unquoted import read_object

if TYPE_CHECKING:
    from tpspec.serve.arguments import Call, Functions
    from tpspec.serve.call_endings import Ending

KEYS = ("arguments", "parameters")  # models mix them up
NAME = r"[\w.-]"  # a letter of it


class Form(Protocol):
    """What stands between the marks of a format.

    first: the character with which a call begins that is one without its marks, or none. begin: what every call begins
    with, and nothing else does; or none. marks: more of them, inside a call. many: several calls may stand between one
    pair of marks, each of which begins so.
    """

    @property
    def first(self) -> str: ...
    @property
    def begin(self) -> str: ...
    @property
    def marks(self) -> tuple[str, ...]: ...
    @property
    def many(self) -> bool: ...
    def ending(self, around: tuple[str, str], functions: Functions) -> Ending:
        """around: the marks around it, which may be none."""
        ...

    def read(self, text: str, functions: Functions) -> list[Call] | None:
        """None where the text calls none of the functions."""
        ...


@dataclass(frozen=True, slots=True)
class Json:
    """{"name": ..., KEY: {...}}"""

    key: str
    many: ClassVar[bool] = False
    first: ClassVar[str] = "{"
    begin: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = ()

    def ending(self, around: tuple[str, str], functions: Functions) -> Ending:
        return JsonEnd(_stop(around))

    def read(self, text: str, functions: Functions) -> list[Call] | None:
        call = _call_of(_parsed(text), functions)
        return None if call is None else [call]


@dataclass(frozen=True, slots=True)
class JsonList:
    """[{"name": ..., KEY: {...}}, ...]"""

    key: str
    many: ClassVar[bool] = False
    first: ClassVar[str] = "["
    begin: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = ()

    def ending(self, around: tuple[str, str], functions: Functions) -> Ending:
        return JsonEnd(_stop(around), "[", "]")

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
    many: ClassVar[bool] = False
    first: ClassVar[str] = ""
    begin: ClassVar[str] = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.mark, self.id_mark)

    def ending(self, around: tuple[str, str], functions: Functions) -> Ending:
        stop = _stop(around)
        return NamedEnd(stop, lambda at: JsonEnd(stop, at=at))

    def read(self, text: str, functions: Functions) -> list[Call] | None:
        rest = rf"\s*+(?:{re.escape(self.id_mark)}\s*+\w*+\s*+)?(?:{re.escape(self.mark)})?\s*+(?={{)"
        head = re.match(rf"\s*+({NAME}+){rest}", text)
        if head is None or head[1] not in functions:
            return None
        arguments = read_arguments(text[head.end() :])
        return None if arguments is None else [(head[1], arguments)]


@dataclass(frozen=True, slots=True)
class Unquoted:
    """HEAD NAME {key: value, ...}: keys without quotes, and strings between two of its own, as they are."""

    head: str
    quote: str
    many: ClassVar[bool] = False
    first: ClassVar[str] = ""
    begin: ClassVar[str] = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.quote,)

    def ending(self, around: tuple[str, str], functions: Functions) -> Ending:
        stop = _stop(around)
        return NamedEnd(stop, lambda at: UnquotedEnd(stop, self.quote, at))

    def read(self, text: str, functions: Functions) -> list[Call] | None:
        head = re.match(rf"\s*+{re.escape(self.head)}\s*+({NAME}+)\s*+(?={{)", text)
        if head is None or head[1] not in functions:
            return None
        try:
            return [(head[1], as_json(read_object(text[head.end() :], self.quote, functions[head[1]])))]
        except (ValueError, RecursionError):
            return None


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

INVOKED = Tagged(
    ('<parameter name="', '">'), ("", "</parameter>"), ('<invoke name="', '">'), "</invoke>", "\n", many=True
)

# The first whose sign a template has.
FORMATS = (
    Format(  # MiniMax-M2
        "minimax-m2", "<minimax:tool_call>", INVOKED, "<minimax:tool_call>", "</minimax:tool_call>", gap="\n"
    ),
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
    Format("gemma-4", r"<\|tool_call>call:", Unquoted("call:", '<|"|>'), "<|tool_call>", "<tool_call|>", between=""),
    Format(
        "functiongemma",
        "<start_function_call>call:",
        Unquoted("call:", "<escape>"),
        "<start_function_call>",
        "<end_function_call>",
        between="",
    ),
)


def format_of(template: str) -> Format | None:
    """The format a chat template has calls written in; None when it is none of ours."""
    return next((one for one in FORMATS if re.search(one.sign, template, re.DOTALL)), None)


def _stop(around: tuple[str, str]) -> str:
    """The mark that no call goes beyond."""
    opening, closing = around
    return closing or opening


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
