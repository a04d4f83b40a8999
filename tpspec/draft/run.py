"""A whole model with a cache of its own, run for a source that drafts with one. Knows no rank and no target.

Rejected drafts leave their keys and values behind; rolling back is feeding from an earlier position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.cache.pages import OutOfPages
from tpspec.model.batch import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.cache.pages import PagePool
    from tpspec.draft.protocol import Feed
    from tpspec.model.decoder import Decoder

MAX_ROWS = 256  # rows a feed adds to one forward; what is longer is read in pieces


class ModelRun:
    """The `Run` of an unsharded decoder and the pages of its cache."""

    def __init__(self, decoder: Decoder, pool: PagePool, vocab: int) -> None:
        self._decoder, self._pool, self.vocab = decoder, pool, vocab

    def __call__(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits after the last token of each feed, [len(feeds), vocab]."""
        self._reserve(feeds)
        return self._decoder.forward([self._tail(feed) for feed in feeds])

    def forget(self, seq: int) -> None:
        self._pool.release(seq)

    def _reserve(self, feeds: Sequence[Feed]) -> None:
        before = [self._pool.num_slots(feed.seq) for feed in feeds]
        try:
            for feed in feeds:
                self._pool.grow(feed.seq, feed.start + len(feed.tokens))
        except OutOfPages:
            for feed, slots in zip(feeds, before, strict=True):
                self._pool.shrink(feed.seq, slots)
            raise

    def _tail(self, feed: Feed) -> Span:
        """Runs all but the last MAX_ROWS tokens of a feed at once; the span of those last ones."""
        start, tokens = feed.start, tuple(feed.tokens)
        while len(tokens) > MAX_ROWS:
            self._decoder.forward([self._span(feed.seq, start, tokens[:MAX_ROWS], num_logits=0)])
            start, tokens = start + MAX_ROWS, tokens[MAX_ROWS:]
        return self._span(feed.seq, start, tokens, num_logits=1)

    def _span(self, seq: int, start: int, tokens: tuple[int, ...], num_logits: int) -> Span:
        return Span(seq, start, tokens, self._pool.runs(seq, start + len(tokens)), num_logits)
