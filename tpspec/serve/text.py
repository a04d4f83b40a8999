"""What the server adds to text: prompts checked against the cache before they cost time, and stop strings.

Must not know requests, HTTP or the engine; the tokenizer and the detokenizer are those of `tpspec.text`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.serve.errors import ApiError, bad_request
from tpspec.text import NoChat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.text import Detokenizer, Text


def encode(text: Text, prompt: str, limit: int) -> tuple[int, ...]:
    """limit: the longest prompt that can be served. A text that cannot fit is refused before it costs seconds."""
    _check_length(text, prompt, limit)
    return text.encode(prompt)


def encode_chat(text: Text, messages: list[dict[str, str]], answer: bool, limit: int) -> tuple[int, ...]:
    try:
        rendered = text.render_chat(messages, answer=answer)
    except NoChat as error:
        hint = "" if text.has_chat_template else ": use /v1/completions"
        raise bad_request(f"{error}{hint}", "messages", "chat_template_error") from error
    _check_length(text, rendered, limit)
    return text.encode_rendered(rendered)


def _check_length(text: Text, prompt: str, limit: int) -> None:
    if len(prompt) > limit * text.longest:
        raise too_long(f"at least {len(prompt) // text.longest}", limit)


class StopFinder:
    """Lets text through up to the stop string that is completed first; holds back what may yet become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._reach = max(map(len, stops), default=1) - 1
        self._held = ""
        self.hit = False

    def feed(self, piece: str) -> str:
        self._held += piece
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            return self._release(min(found)[1])
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


class TextStream:
    """What a client sees of a sequence of tokens: text without stop strings, and how many tokens it took."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer, self._finder = detokenizer, StopFinder(stops)

    @property
    def stopped(self) -> bool:
        return self._finder.hit

    def feed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The text these tokens let out, and how many of them were used: those after a stop string are not."""
        text = ""
        for used, token in enumerate(tokens, start=1):
            text += self._finder.feed(self._detokenizer.step(token))
            if self.stopped:
                return text, used
        return text, len(tokens)

    def flush(self) -> str:
        if self.stopped:
            return ""
        return self._finder.feed(self._detokenizer.flush()) + self._finder.flush()


def too_long(size: object, limit: int) -> ApiError:
    """limit: the longest prompt that leaves room for one token."""
    message = f"the prompt has {size} tokens; this server takes {limit + 1}, prompt and output together"
    return bad_request(message, "prompt", "context_length_exceeded")
