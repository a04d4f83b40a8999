"""The served model as a round sees it: spans in, this shard's logits out, slots to move. Knows no drafts, no rules."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tpspec.comm.communicator import Purpose
from tpspec.verify.rows import RowLogits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.model.batch import Span
    from tpspec.model.decoder import Decoder


class ShardedTarget:
    """One shard of the target.

    vocab_rows: the head rows this shard holds. vocab: token ids that exist. width: head rows of the widest shard.
    """

    def __init__(self, decoder: Decoder, vocab_rows: range, vocab: int, width: int) -> None:
        self.decoder, self._start, self._vocab, self._width = decoder, vocab_rows.start, vocab, width

    def logits(self, spans: Sequence[Span]) -> RowLogits:
        return RowLogits(
            self.decoder.forward(spans),
            vocab=self._vocab,
            start=self._start,
            width=self._width,
            gather=partial(self.decoder.comm.all_gather, purpose=Purpose.pick),
        )

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.decoder.store.move(sources, targets)
