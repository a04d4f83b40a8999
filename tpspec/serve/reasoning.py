"""Answers of models that reason, taken apart as their tokens come: what was thought, what is said, and who is called.

Tokens that no text spells tell the parts from one another: `<think>`, `</think>` and their like, or those of OpenAI's
harmony (openai/harmony, docs/format.md). Must not know requests, HTTP or the engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from tpspec.serve.lark import FREE, marked
from tpspec.text import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.serve.tools import AddressedCalls, ToolCall
    from tpspec.text import Text

TAGS = "<think>", "</think>"
CHANNEL_TAGS = "<|channel>", "<channel|>"  # Gemma 4's
ALL_TAGS = (
    TAGS,
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    CHANNEL_TAGS,
)
ANSWER_TAGS = "<|START_RESPONSE|>", "<|END_RESPONSE|>"  # around what is said: Command A's
LABELS = {CHANNEL_TAGS: "thought\n"}  # what a thought begins with that is none of it
HEADER = START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END = "<|end|>"
ENDS = (END, "<|return|>", "<|call|>")
HARMONY = (*HEADER, *ENDS)


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of an answer. A mark stands between two of them and is shown to nobody.

    to: whom it is addressed to, where that is not the reader.
    """

    kind: Literal["thought", "said", "mark"]
    to: str = ""


THOUGHT, SAID, MARK = Section("thought"), Section("said"), Section("mark")


class Splitter(Protocol):
    """Says of each token of an answer, in order, which section it is in. It has read the prompt.

    closing: what has to follow the prompt, so that all of the answer is said. thoughts: as a rule of a grammar names
    them, what may come before anything is said; FREE is any text.
    """

    closing: str
    thoughts: str

    def step(self, token: int) -> Section: ...


class ThinkTags:
    """What stands between the tags at the beginning of an answer was thought, but for a label that it may begin with;
    templates may open them in the prompt."""

    def __init__(self, text: Text, prompt: Sequence[int], tags: tuple[str, str]) -> None:
        self._text = text
        self._open, self._close = (text.added[tag] for tag in tags)
        self._around = {text.added[tag] for tag in ANSWER_TAGS if tag in text.added}
        self._label, self._head = LABELS.get(tags, "").encode(), b""  # head: of what may be a label
        is_open = self._opens(prompt)
        self._section, self._may_open = THOUGHT if is_open else SAID, not is_open
        self.closing = f"{tags[1]}\n\n" if is_open else ""
        opening, closing = (marked(tag, text.added) for tag in tags)
        self.thoughts = f"{FREE} {closing}" if is_open else f"({opening} {FREE} {closing})?"

    def step(self, token: int) -> Section:
        is_inside = self._section == THOUGHT
        if token == self._open and (is_inside or self._may_open):
            self._section, self._may_open, self._head = THOUGHT, False, b""
            return MARK
        if token == self._close and is_inside:
            self._section = SAID
            return MARK
        if token in self._around:
            return MARK
        self._may_open = self._may_open and self._is_blank(token)
        return MARK if is_inside and self._is_of_label(token) else self._section

    def _opens(self, prompt: Sequence[int]) -> bool:
        """Whether it ends within a thought of which there is nothing yet."""
        spelled = b""
        for token in reversed(prompt):
            if token == self._open:
                self._head = spelled.lstrip()
                return True
            spelled = self._text.spell(token) + spelled
            if spelled.strip() and not self._label.strip().endswith(spelled.strip()):
                return False
        return False

    def _is_of_label(self, token: int) -> bool:
        """Of what a thought begins with, token by token."""
        spelled = self._head + self._text.spell(token)
        if self._head == self._label or not self._label.startswith(spelled):
            self._head = self._label
            return False
        self._head = spelled
        return True

    def _is_blank(self, token: int) -> bool:
        return not self._text.spell(token).strip()


class Harmonic:
    """Messages, each with a header that names its channel, and whom it calls: `analysis` was thought, the rest is said.

    So is what comes without a header.
    """

    thoughts = ""  # tools have a grammar of their own in this format

    def __init__(self, text: Text, prompt: Sequence[int]) -> None:
        self._text, self._marks = text, {text.added[mark]: mark for mark in HARMONY}
        self._section, self._header = SAID, bytearray()  # MARK inside a header
        self._may_speak = False  # no header has begun where one might
        start = text.added[START]
        last = next((i for i in reversed(range(len(prompt))) if prompt[i] == start), len(prompt))
        for token in prompt[last:]:
            self.step(token)
        self._may_speak = self._section == MARK and CHANNEL.encode() not in self._header
        self.closing = f"{CHANNEL}final{MESSAGE}" if self._may_speak else ""

    def step(self, token: int) -> Section:
        mark = self._marks.get(token)
        is_begin, self._may_speak = self._may_speak, mark in ENDS
        if mark == MESSAGE and self._section == MARK:
            self._section = _section(self._header.decode(errors="replace"))
            return MARK
        if mark in (START, *ENDS) or (mark == CHANNEL and self._section != MARK):
            self._section, self._header = MARK, bytearray()
        if mark is None and is_begin and not _begins_header(self._text.spell(token)):
            self._section = SAID
        if self._section == MARK:
            self._header += self._text.spell(token)
        return MARK if mark else self._section


def _section(header: str) -> Section:
    """Of the message with this header: models write whom it is for before the channel or after it."""
    is_thought = re.search(re.escape(CHANNEL) + r"\s*analysis", header)
    to = re.search(r"to=([^\s<]+)", header)
    return Section("thought" if is_thought else "said", to[1] if to else "")


def _begins_header(spelled: bytes) -> bool:
    """Of what follows the role of a message."""
    return b"to=".startswith(spelled.strip()[:3])


def splitter_of(text: Text, prompt: Sequence[int]) -> Splitter | None:
    """None where the vocabulary has no marks."""
    if all(map(text.has_token, HARMONY)):
        return Harmonic(text, prompt)
    tags = next((tags for tags in ALL_TAGS if all(map(text.has_token, tags))), None)
    return None if tags is None else ThinkTags(text, prompt, tags)


@dataclass(frozen=True, slots=True)
class Thought:
    """offset: how much is said before it."""

    offset: int
    text: str


class Parts:
    """A detokenizer of what is said. What was thought, and calls that are sections of their own, are taken from it.

    Whitespace around what was thought belongs to nobody. Sections of one kind are joined by a newline.
    """

    def __init__(
        self, splitter: Splitter, text: Text, prompt: Sequence[int], skip_special: bool, calls: AddressedCalls | None
    ) -> None:
        self._splitter, self._text, self._skip, self._calls = splitter, text, skip_special, calls
        self._section, self._detokenizer = SAID, Detokenizer(text, prompt, skip_special)
        self._lead = self._blank = self._called = ""  # held back: of what is said, of what was thought, of a call
        self._is_parted = self._has_begun = self._has_thought = False
        self._num_said = self._num_thought = 0
        self._asides: list[Thought | ToolCall] = []

    @property
    def ended(self) -> bool:
        """Nothing more is wanted of this answer."""
        return self._calls is not None and self._calls.ended

    def step(self, token: int) -> str:
        if self.ended:
            return ""
        section = self._splitter.step(token)
        said = self._turn(section) if section != self._section else ""
        self._num_thought += section.kind == "thought"
        return said if section == MARK else said + self._add(self._detokenizer.step(token))

    def flush(self) -> str:
        return self._end() + ("" if self._is_parted or self._has_begun else self._lead)

    def take(self) -> tuple[list[Thought | ToolCall], int]:
        """What has come since the last time beside what was said, and how many tokens of it were thought."""
        taken = self._asides, self._num_thought
        self._asides, self._num_thought = [], 0
        return taken

    def _turn(self, section: Section) -> str:
        said = self._end()
        self._section, self._detokenizer = section, Detokenizer(self._text, (), self._skip)
        self._lead, self._is_parted, self._has_begun = "", True, False
        self._blank = "\n"
        return said

    def _end(self) -> str:
        """Of a section: a call is read now, or is text where it is none."""
        whole, self._called = self._called + self._detokenizer.flush(), ""
        calls = self._calls_here
        call = None if calls is None else calls.read(self._section.to, whole, self._num_said)
        if call is None:
            return self._show(whole)
        self._asides.append(call)
        return ""

    @property
    def _calls_here(self) -> AddressedCalls | None:
        """None where the section calls no function of the request."""
        return self._calls if self._calls is not None and self._calls.knows(self._section.to) else None

    def _add(self, text: str) -> str:
        if self._calls_here is None:
            return self._show(text)
        self._called += text
        return ""

    def _show(self, text: str) -> str:
        return self._think(text) if self._section.kind == "thought" else self._say(text)

    def _think(self, text: str) -> str:
        whole = self._blank + text if self._has_thought else text.lstrip()
        thought = whole.rstrip()
        self._blank = whole[len(thought) :]
        if thought:
            self._has_thought = True
            self._asides.append(Thought(self._num_said, thought))
        return ""

    def _say(self, text: str) -> str:
        if not self._has_begun:
            self._lead += text
            if not self._lead.strip():
                return ""
            self._has_begun = True
            text = ("\n" if self._num_said else "") + (self._lead.lstrip() if self._is_parted else self._lead)
        self._num_said += len(text)
        return text
