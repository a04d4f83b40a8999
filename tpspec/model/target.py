"""The served model as a round sees it: spans in, this shard's logits out, slots to move. Knows no drafts, no rules."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING

import torch

from tpspec.comm.communicator import ForOne, Purpose
from tpspec.model.batch import with_tokens
from tpspec.verify.rows import RowLogits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpspec.model.batch import Moves, Span, StateCopy
    from tpspec.model.decoder import Decoder
    from tpspec.model.graphs import Forward
    from tpspec.topology.sublayers import Sublayers


class ShardedTarget:
    """One shard of the target.

    vocab_rows: the head rows this shard holds. vocab: token ids that exist. width: head rows of the widest shard.
    taps: what is kept of every forward, as `Decoder.tapped` counts it. launches: whether `launch` may be asked: on all
    shards or none.
    """

    def __init__(self, decoder: Decoder, vocab_rows: range, vocab: int, width: int, taps: Sequence[int] = ()) -> None:
        self.decoder, self._start, self._vocab, self._width = decoder, vocab_rows.start, vocab, width
        self._taps = tuple(taps)
        self._tapped: Mapping[int, Tensor] = {}
        self._foreseen: Sequence[Span] = ()
        self._launched: tuple[list[Span], Callable[[], Forward]] | None = None
        self.launches = False

    def runs_alone(self, num_rows: int, num_logits: int) -> bool:
        """Whether such rows are a replay, which a card does by itself."""
        return self.decoder.is_replay(num_rows, num_logits)

    def thinned(self, left_out: Sublayers) -> ShardedTarget:
        """The same shard and cache without some sublayers; what its collectives carry counts as drafting."""
        thin = copy(self)
        thin.decoder = self.decoder.thinned(left_out, ForOne(self.decoder.comm, Purpose.draft), recorded=True)
        thin._taps = ()
        return thin

    def logits(self, spans: Sequence[Span]) -> RowLogits:
        made = self._made_ahead(spans) or self.decoder.tapped(spans, self._taps)
        self._tapped = made.tapped
        return self.rows(made.logits_TV)

    def launch(self, spans: Sequence[Span]) -> bool:
        """Whether their forward has been launched: all is known of it but the token of each, for which the card waits
        until `release`. Until then nothing may be asked of the card; all of the last forward that is read has been."""
        self._foreseen = spans
        return self.decoder.launch(spans)

    def release(self, tokens: Sequence[int]) -> None:
        """The card goes on. If `logits` is not asked for the spans with these tokens next, it was in vain."""
        give = self.decoder.release(tokens)
        self._launched = with_tokens(self._foreseen, tokens), give

    def rows(self, logits_TV: Tensor) -> RowLogits:
        """What this shard's head made of some rows."""
        return RowLogits(
            logits_TV,
            vocab=self._vocab,
            start=self._start,
            width=self._width,
            gather=partial(self.decoder.comm.all_gather, purpose=Purpose.pick),
            gather_logits=partial(self.decoder.comm.all_gather, purpose=Purpose.logits),
        )

    def _made_ahead(self, spans: Sequence[Span]) -> Forward | None:
        """Of these spans, if it was they that were launched; counted in any case."""
        if self._launched is None:
            return None
        (launched, give), self._launched = self._launched, None
        made = give()
        return made if launched == list(spans) else None

    def taps(self) -> Tensor | None:
        """Of the last forward, [T, number of taps * D]; the same on every shard. None where nothing is kept."""
        return torch.cat([self._tapped[tap] for tap in self._taps], 1) if self._taps else None

    def prepare(self) -> None:
        """What would otherwise make first rounds slow. Every shard calls it."""
        self.launches = self.decoder.prepare(self._taps)

    def move(self, moves: Moves) -> None:
        self.decoder.store.move(*moves)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        if copies:
            assert self.decoder.states is not None, "who copies states keeps some"
            self.decoder.states.copy(copies)
