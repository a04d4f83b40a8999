"""What the server adds to text: prompts checked against the cache before they cost time, and stop strings.

Must not know requests, HTTP or the engine; the tokenizer and the detokenizer are those of `tpspec.text`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tpspec.serve.errors import ApiError, bad_request
from tpspec.text import NoChat, NoOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.text import Text


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template is given. answer: it ends where the answer begins. options: the template's own."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    answer: bool = True
    options: dict[str, bool | int | str] = field(default_factory=dict)

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) or any(one["role"] == "tool" or "tool_calls" in one for one in self.messages)


def encode(text: Text, prompt: str, limit: int, *, special: bool = True) -> tuple[int, ...]:
    """limit: the longest prompt that can be served. A text that cannot fit is refused before it costs seconds.

    special: with the beginning-of-text token where the model wants one.
    """
    _check_length(text, prompt, limit, "prompt")
    return text.encode(prompt) if special else text.encode_rendered(prompt)


def encode_chat(text: Text, chat: Chat, limit: int, param: str = "messages") -> tuple[int, ...]:
    """limit: as of encode. param: the field that holds the chat.

    Raises ApiError where the model has no template, or it refuses this chat.
    """
    if chat.uses_tools and text.has_chat_template and "tool" not in text.chat_template(tools=True):
        field = "tools" if chat.tools else param
        raise bad_request("the chat template of this model knows no tools", field, "chat_template_error")
    try:
        rendered = text.render_chat(chat.messages, tools=chat.tools, answer=chat.answer, options=chat.options)
    except NoOption as error:
        raise bad_request(f"chat_template_kwargs: {error}", "chat_template_kwargs", "invalid_value") from error
    except NoChat as error:
        hint = "" if text.has_chat_template else ": use /v1/completions"
        raise bad_request(f"{error}{hint}", param, "chat_template_error") from error
    _check_length(text, rendered, limit, param)
    return text.encode_rendered(rendered)


def _check_length(text: Text, prompt: str, limit: int, param: str) -> None:
    if len(prompt) > limit * text.longest:
        raise too_long(f"at least {len(prompt) // text.longest}", limit, param)


class StopFinder:
    """Lets text through up to the stop string that is completed first; holds back what may yet become one.

    keeps: the stop string itself is let through too.
    """

    def __init__(self, stops: Sequence[str], keeps: bool = False) -> None:
        self._stops, self._keeps = stops, keeps
        self._reach = max(map(len, stops), default=1) - 1
        self._held = ""
        self.hit = False

    def feed(self, piece: str) -> str:
        self._held += piece
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            return self._release(min(found)[0 if self._keeps else 1])
        return self._release(len(self._held) - self._num_held())

    def flush(self) -> str:
        return "" if self.hit else self._release(len(self._held))

    def _release(self, size: int) -> str:
        piece, self._held = self._held[:size], self._held[size:]
        return piece

    def _num_held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        sizes = range(min(len(self._held), self._reach), 0, -1)
        return next((size for size in sizes if any(s.startswith(self._held[-size:]) for s in self._stops)), 0)


class Speller(Protocol):
    """What a Detokenizer does."""

    def step(self, token: int) -> str: ...
    def flush(self) -> str: ...


class TextStream:
    """What a client sees of a sequence of tokens: text up to a stop string, and where each token's text begins.

    num_free: the text of so many tokens is no part of a stop string. length: of all text so far, shown or held back.
    """

    def __init__(
        self, detokenizer: Speller, stops: Sequence[str], *, keeps_stop: bool = False, num_free: int = 0
    ) -> None:
        self._detokenizer, self._finder = detokenizer, StopFinder(stops, keeps_stop)
        self._num_free = num_free
        self.length = 0

    @property
    def stopped(self) -> bool:
        return self._finder.hit

    def feed(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """The text these tokens let out, and where that of each begins; tokens after a stop string are not used."""
        text = ""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self.length)
            piece = self._detokenizer.step(token)
            self.length += len(piece)
            text += piece if self._num_free > 0 else self._finder.feed(piece)
            self._num_free -= 1
            if self.stopped:
                break
        return text, offsets

    def flush(self) -> str:
        if self.stopped:
            return ""
        rest = self._detokenizer.flush()
        self.length += len(rest)
        return (rest if self._num_free >= 0 else self._finder.feed(rest)) + self._finder.flush()


def too_long(size: object, limit: int, param: str) -> ApiError:
    """limit: the longest prompt that leaves room for one token. param: the field that holds it."""
    message = f"the prompt has {size} tokens; this server takes {limit + 1}, prompt and output together"
    return bad_request(message, param, "context_length_exceeded")
