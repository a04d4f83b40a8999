"""A model whose logits depend on every token it sees: one stale or misplaced slot changes what it says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpspec.cache.seats import Seats
from tpspec.draft.protocol import Ask, Taps
from tpspec.model.batch import Span
from tpspec.request import Sampling
from tpspec.verify.draw import Draw, pick
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import RowLogits

VOCAB = 11


def logits_after(text: Sequence[int], vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(hash(tuple(text)) % (2**31))) * 2


class Table:
    """A `Run` whose cache is a token for each slot."""

    rereads = False
    seats: Seats | None = None

    def __init__(self, vocab: int = VOCAB, max_positions: int | None = None) -> None:
        self.vocab, self.max_positions = vocab, max_positions
        self.slots: dict[int, int] = {}
        self.calls: list[list[Span]] = []

    def __call__(self, spans: Sequence[Span]) -> torch.Tensor:
        self.calls.append(list(spans))
        for span in spans:
            assert max(span.tokens) < self.vocab, "it has no such row"
            self.slots.update(zip(span.own_slots(), span.tokens, strict=True))
        rows = [logits for span in spans for logits in self._logits(span)]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.slots.update(zip(targets, [self.slots[source] for source in sources], strict=True))

    def observe(self, taps: Taps) -> None: ...
    def can_read(self, seq: int, num_tokens: int) -> bool:
        return True

    def forget(self, seq: int) -> None: ...

    def _logits(self, span: Span) -> list[torch.Tensor]:
        seen = [self.slots[slot] for first, count in span.runs for slot in range(first, first + count)]
        assert len(seen) == span.start + len(span.tokens)
        return [logits_after(seen, self.vocab)] if span.num_logits else []


class StateTable(Table):
    """The same of a model that keeps states, each of which is the tokens that it has taken in."""

    def __init__(self, num_seats: int = 3, num_left: int = 65, **sizes: int) -> None:
        super().__init__(**sizes)
        self.seats = Seats(num_seats, num_left)
        self.states: dict[int, list[int]] = {}

    def _logits(self, span: Span) -> list[torch.Tensor]:
        assert self.seats is not None
        assert span.carried is not None
        slot, num_certain = span.carried.slot, span.carried.num_certain
        before = self.states[slot] if span.start else []
        slots = [slot for first, count in span.runs for slot in range(first, first + count)]
        assert span.carried.rows == ()
        assert [self.slots[at] for at in slots[: span.start]] == before
        assert [self.slots[at] for at in span.own_slots()] == list(span.tokens)
        assert len(span.tokens) - num_certain < self.seats.num_left
        self.states[slot] = [*before, *span.tokens[: num_certain - 1]]
        texts: list[list[int]] = []
        for token, parent in zip(span.tokens, span.parents or range(-1, len(span.tokens) - 1), strict=True):
            texts.append([*(texts[parent] if parent >= 0 else before), token])
        return [logits_after(text, self.vocab) for text in texts[len(texts) - span.num_logits :]]


def ask(seq: int, tokens: Sequence[int], num_tokens: int = 4, **sampling: float) -> Ask:
    return Ask(seq, list(tokens), 1, num_tokens, Sampling(**sampling))  # type: ignore[arg-type]


def next_token(tokens: Sequence[int], sampling: Sampling, vocab: int = VOCAB) -> int:
    """What the table's model says, without a cache."""
    return next_tokens(tokens, sampling, 1, vocab)[0]


def next_tokens(tokens: Sequence[int], sampling: Sampling, width: int, vocab: int = VOCAB) -> list[int]:
    """That, and what it would say if it could not say that, and so on."""
    logits_1V, said = logits_after(tokens, vocab).unsqueeze(0), list[int]()
    for _ in range(width):
        said += pick(RowLogits(logits_1V, VOCAB), [Draw(tokens, 1, sampling)], CounterNoise())
        logits_1V[0, said[-1]] = -torch.inf
    return said


def expected(asked: Ask, vocab: int = VOCAB) -> tuple[int, ...]:
    text = list(asked.tokens)
    for _ in range(asked.num_tokens):
        text.append(next_token(text, asked.sampling, vocab))
    return tuple(text[len(asked.tokens) :])
