"""Tools in a model's text: calls are read out of it as it comes, in the format that the chat template asks for.

Must not know how a format writes them, HTTP, bodies of requests or the engine.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpspec.serve.call_formats import read_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpspec.serve.arguments import Call, Functions
    from tpspec.serve.call_endings import Ending
    from tpspec.serve.call_formats import Format

ADDRESS = "functions."  # of what clients have; other tools are the model's own
BETWEEN = " \t\r\n;"  # what may stand between bare calls


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
    """Which calls a text may hold: of these functions, and only one of them where they may not be parallel.

    lenient: what a text begins with may be a call without its marks, and so may what nothing but a call begins with.
    Small models forget them. must: as of a Toolbox.
    """

    format: Format
    functions: Functions
    parallel: bool = True
    lenient: bool = True
    must: bool = False

    def read(self, text: str) -> list[Call] | None:
        """None where the text calls no function of the request."""
        return self.format.form.read(text, self.functions)

    def new(self, index: int, offset: int, call: Call) -> ToolCall:
        return ToolCall(self._id(), index, offset, *call)

    def _id(self) -> str:
        if not self.format.short_ids:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


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

    What stands between marks but calls no function of the request is text; the marks themselves never are. Blanks
    before a call belong to it, as templates write calls of earlier turns.
    """

    def __init__(self, calling: Calling) -> None:
        self._calling, form = calling, calling.format.form
        self._marks = tuple(mark for mark in (calling.format.opening, calling.format.closing) if mark)
        self._begin = form.begin if calling.lenient else ""
        self._begins_next = form.begin if form.many else ""  # calls behind the first of those between two marks
        self._is_within = False  # two of those
        self._first = form.first if calling.lenient or self._is_bare else ""
        self._blanks = ""  # behind what was said, or between calls; they may yet belong to one
        self._held = ""  # what may yet turn out to be a mark or a call
        self._ending: Ending | None = None  # inside a call
        self._may_begin = bool(self._first)  # a bare call: nothing else was said
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
        rest = "" if self.ended else self._blanks + self._held
        self._blanks = self._held = ""
        if self._ending is not None:
            rest = self._without_marks(rest)
            return rest if rest.strip() or not self._has_to_be_a_call else ""
        if self._has_to_be_a_call and any(mark.startswith(rest.strip()) for mark in self._marks):
            return ""  # the beginning of one
        return rest.rstrip(BETWEEN if self._is_bare else None) if self._num_calls else rest

    @property
    def _has_to_be_a_call(self) -> bool:
        """What comes, as far as anybody can tell."""
        return self._num_calls > 0 or (self._calling.must and not self._num_said)

    @property
    def _is_bare(self) -> bool:
        return not self._marks

    def _found(self) -> Iterator[str | ToolCall]:
        while not self.ended:
            if self._ending is not None:
                ended = self._ending.find(self._held)
                if ended is None:
                    return
                self._ending = None
                yield from self._calls_or_text(self._take(ended.at), ended.is_call)
                continue
            size = len(self._held)
            yield self._said()
            if self._ending is None and len(self._held) == size:
                return

    def _said(self) -> str:
        """Text up to the next mark or call, or up to what may become one."""
        start = self._held.lstrip(BETWEEN if self._num_calls else None)
        if self._may_begin and start[:1] in ("", self._first) and not start.startswith(self._marks):
            if start and not any(mark.startswith(start) for mark in self._marks):
                self._blanks += self._held[: -len(start)]
                self._held, self._ending = start, self._new_ending()
            return ""
        said = self._take(len(self._held)) if self._is_bare else self._before_mark()
        self._may_begin = self._may_begin and not said
        return said

    def _before_mark(self) -> str:
        found = self._next_mark()
        if found is None:
            return self._say(self._take(len(self._held) - self._num_of_a_mark()))
        at, mark = found
        said = self._say(self._take(at))
        if mark in self._marks:
            self._take(len(mark))
        self._is_within = mark != self._calling.format.closing and (mark in self._marks or self._is_within)
        if mark == self._calling.format.closing:
            self._blanks = ""
        else:
            self._ending = self._new_ending()
        return said

    def _say(self, text: str) -> str:
        """Without the blanks behind it."""
        said = text.rstrip()
        before, self._blanks = (self._blanks, text[len(said) :]) if said else ("", self._blanks + text)
        self._may_begin = self._may_begin and not (self._num_calls and self._blanks.strip(BETWEEN))
        return before + said

    def _new_ending(self) -> Ending:
        format = self._calling.format
        return format.form.ending((format.opening, format.closing), self._calling.functions)

    @property
    def _signs(self) -> tuple[str, ...]:
        """With which a call begins, or has ended."""
        begin = self._begins_next if self._is_within and self._begins_next else self._begin
        return (*self._marks, begin) if begin else self._marks

    def _next_mark(self) -> tuple[int, str] | None:
        return min(((at, mark) for mark in self._signs if (at := self._held.find(mark)) >= 0), default=None)

    def _num_of_a_mark(self) -> int:
        """Length of the longest end of what is held that begins a mark."""
        sizes = range(min(len(self._held), max(map(len, self._signs))), 0, -1)
        return next((size for size in sizes if any(mark.startswith(self._held[-size:]) for mark in self._signs)), 0)

    def _without_marks(self, text: str) -> str:
        for mark in self._marks:
            text = text.replace(mark, "")
        return text

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _calls_or_text(self, text: str, is_call: bool) -> Iterator[str | ToolCall]:
        calls = self._calling.read(text) if is_call else None
        if calls is None:
            self._may_begin = False
            yield self._say(self._without_marks(text))
            return
        self._blanks = ""
        for call in calls if self._calling.parallel else calls[:1]:
            self._num_calls += 1
            yield self._calling.new(self._num_calls - 1, self._num_said, call)


class AddressedCalls:
    """Calls that come one by one, each with the function beside its arguments."""

    def __init__(self, calling: Calling) -> None:
        self._calling = calling
        self._num_calls = 0

    @property
    def ended(self) -> bool:
        """As of a CallReader."""
        return self._num_calls > 0 and not self._calling.parallel

    def knows(self, to: str) -> bool:
        """Whether that is a function of the request."""
        return to.removeprefix(ADDRESS) in self._calling.functions

    def read(self, to: str, text: str, offset: int) -> ToolCall | None:
        """to: a function that it knows. offset: as of the call. None where the text is no object of arguments."""
        arguments = read_arguments(text.strip() or "{}")
        if arguments is None:
            return None
        self._num_calls += 1
        return self._calling.new(self._num_calls - 1, offset, (to.removeprefix(ADDRESS), arguments))
