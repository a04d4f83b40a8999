"""One sequence's deltas as pieces of its answer: text, and what else its request wants to know of each token.

The prompt may stand before the text (echo). Must not know who reads, HTTP or JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from tpspec.request import Request
from tpspec.serve.reasoning import Parts, Thought, splitter_of
from tpspec.serve.text import TextStream
from tpspec.serve.tools import AddressedCalls, CallReader, ToolCall
from tpspec.text import MOST_WAITING, PARTIAL, Detokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpspec.request import Delta, FinishReason, Logprob, Sampling
    from tpspec.serve.tools import Calling
    from tpspec.text import Text


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence to generate. stops: strings; the engine itself ends at stop_ids and max_tokens.

    echo: the prompt as text, which then begins the answer. keeps_stop: what ends the text is shown. logprobs: as of a
    Request; with echo, of the prompt too. salt, grammar: likewise. calling: of tools, where the text may hold calls.
    is_chat: what was thought is no part of the text. choice: its number among those of one prompt.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    stops: tuple[str, ...] = ()
    skip_special: bool = True
    num_drafts: int | None = None
    echo: str | None = None
    keeps_stop: bool = False
    logprobs: int | None = None
    salt: str = ""
    grammar: str = ""
    calling: Calling | None = None
    is_chat: bool = False
    choice: int = 0

    @property
    def rates_prompt(self) -> bool:
        return self.echo is not None and self.logprobs is not None

    def request(self, number: int) -> Request:
        return Request(
            id=number,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
            num_drafts=self.num_drafts,
            logprobs=self.logprobs,
            prompt_logprobs=self.rates_prompt,
            salt=self.salt,
            grammar=self.grammar,
        )


@dataclass(frozen=True, slots=True)
class Rated:
    """A token, where its text begins in the answer, and how likely it was; the first of a prompt follows nothing."""

    token: int
    offset: int
    logprob: Logprob | None


@dataclass(slots=True)
class Piece:
    """What one round (or several, for a reader who lags) adds to sequence `index` of a call.

    tokens: those that num_tokens counts. rated: only where log-probabilities are asked for. prompt: of the first piece.
    asides: what comes between the text, in order. num_thought: tokens of it that were thought. has_called: whether this
    piece of the sequence or one before it calls a tool.
    """

    index: int
    text: str = ""
    num_tokens: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    tokens: list[int] = field(default_factory=list)
    rated: list[Rated] = field(default_factory=list)
    prompt: tuple[int, ...] = ()
    asides: list[Thought | ToolCall] = field(default_factory=list)
    num_thought: int = 0
    has_called: bool = False

    @property
    def calls(self) -> list[ToolCall]:
        return [one for one in self.asides if isinstance(one, ToolCall)]

    @property
    def thought(self) -> str:
        return "".join(one.text for one in self.asides if isinstance(one, Thought))

    def absorb(self, later: Piece) -> None:
        self.text += later.text
        self.num_tokens += later.num_tokens
        self.finish, self.error = later.finish, later.error
        self.tokens += later.tokens
        self.rated += later.rated
        self.prompt = self.prompt or later.prompt
        self.asides += later.asides
        self.num_thought += later.num_thought
        self.has_called = self.has_called or later.has_called


class Reader:
    """Reads the deltas of one sequence, in order."""

    def __init__(self, ask: Ask, text: Text, index: int) -> None:
        self._ask, self._index = ask, index
        self._echo = ask.echo or ""
        self._parts = _parts(ask, text)
        detokenizer = self._parts or Detokenizer(text, ask.prompt, ask.skip_special)
        num_free = ask.sampling.min_tokens
        self._stream = TextStream(detokenizer, ask.stops, keeps_stop=ask.keeps_stop, num_free=num_free)
        self._prompt = _offsets(ask, text) if ask.rates_prompt else iter(())
        self._calls = None if ask.calling is None or ask.calling.format.is_addressed else CallReader(ask.calling)
        self._asides: list[Thought | ToolCall] = []  # which wait for what is said before them, and may be a stop string
        self._num_shown = 0
        self._has_begun = self._has_called = False

    def read(self, delta: Delta) -> Piece:
        """The token that ends it is counted but not shown; tokens after a stop string, or after a call behind which
        nothing is wanted, are neither: they are there only where a draft went on."""
        piece = Piece(self._index, error=delta.error)
        offsets: list[int] = []
        for token in self._shown(delta):
            text, begun = self._stream.feed([token])
            offsets += begun
            self._tell(piece, text)
            if self._has_ended:
                break
        is_cut, piece.finish = self._has_ended, "stop" if self._has_ended else delta.finish
        if piece.finish is not None:
            self._tell(piece, self._stream.flush(), is_last=True)
            is_cut, piece.finish = (True, "stop") if self._stream.stopped else (is_cut, piece.finish)
        piece.num_tokens = len(offsets) if is_cut else len(delta.tokens)
        piece.tokens = list(delta.tokens[: piece.num_tokens])
        offsets += [self._stream.length] * (piece.num_tokens - len(offsets))
        self._begin(piece)
        piece.rated += [Rated(*row) for row in _joined(self._prompt, delta.prompt_logprobs)]
        piece.rated += [
            Rated(token, len(self._echo) + offset, logprob)
            for token, offset, logprob in zip(piece.tokens, offsets, delta.logprobs, strict=False)
        ]
        return piece

    def end(self, reason: FinishReason, error: str | None) -> Piece:
        """What still waits when a sequence ends from outside."""
        piece = Piece(self._index, finish=reason, error=error)
        self._tell(piece, self._stream.flush(), is_last=True)
        self._begin(piece)
        return piece

    @property
    def _has_ended(self) -> bool:
        """By a stop string, or by a call after which no more are wanted."""
        by_call = any(one is not None and one.ended for one in (self._parts, self._calls))
        return self._stream.stopped or by_call

    def _tell(self, piece: Piece, text: str, *, is_last: bool = False) -> None:
        """Text of a token. What was thought has left it; so do calls."""
        if self._parts is not None:
            asides, num_thought = self._parts.take()
            piece.num_thought += num_thought
            self._num_shown += len(text)
            self._asides += asides
            num_due = sum(is_last or one.offset <= self._num_shown for one in self._asides)
            piece.asides += self._asides[:num_due]
            del self._asides[:num_due]
        if self._calls is not None:
            text, calls = self._calls.feed(text)
            piece.asides += calls
            text += self._calls.flush() if is_last else ""
        piece.text += text
        self._has_called = piece.has_called = self._has_called or bool(piece.calls)

    def _shown(self, delta: Delta) -> Sequence[int]:
        ends = delta.finish == "stop" and delta.tokens and delta.tokens[-1] in self._ask.stop_ids
        return delta.tokens[:-1] if ends and not self._ask.keeps_stop else delta.tokens

    def _begin(self, piece: Piece) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        piece.text = self._echo + piece.text
        piece.prompt = self._ask.prompt
        piece.rated += [Rated(token, offset, None) for token, offset in islice(self._prompt, 1)]


def _parts(ask: Ask, text: Text) -> Parts | None:
    """None where all of an answer is said."""
    splitter = splitter_of(text, ask.prompt) if ask.is_chat else None
    if splitter is None:
        return None
    calls = AddressedCalls(ask.calling) if ask.calling is not None and ask.calling.format.is_addressed else None
    return Parts(splitter, text, ask.prompt, ask.skip_special, calls)


def _offsets(ask: Ask, text: Text) -> Iterator[tuple[int, int]]:
    """Each token of the prompt and where its text begins in the echo, which shows special tokens that were written."""
    detokenizer, offset, echo = Detokenizer(text, (), skip_special=False), 0, ask.echo or ""
    for token in ask.prompt:
        yield token, min(offset, len(echo))
        if token not in text.hidden or _stands_at(offset, text.spell(token).decode(), echo):
            offset += len(detokenizer.step(token))


def _stands_at(offset: int, word: str, echo: str) -> bool:
    """Perhaps behind bytes of no character, which a detokenizer still holds."""
    return echo[offset : offset + MOST_WAITING + len(word)].lstrip(PARTIAL).startswith(word)


def _joined(prompt: Iterator[tuple[int, int]], logprobs: Sequence[Logprob]) -> Iterator[tuple[int, int, Logprob]]:
    """The next tokens of the prompt, as many as there are log-probabilities."""
    for logprob, (token, offset) in zip(logprobs, islice(prompt, len(logprobs)), strict=True):
        yield token, offset, logprob
