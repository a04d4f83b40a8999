"""A draft model of its own: reads tokens and says what may follow. Knows no rank, device, cache or draft length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tpspec.draft.protocol import Needs, Offer
from tpspec.tokens import NO_TOKEN
from tpspec.verify.draw import rank, sample
from tpspec.verify.rows import RowLogits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.draft.protocol import Place, Run
    from tpspec.model.batch import Span
    from tpspec.tokens import Draws
    from tpspec.verify.noise import Noise

Drawing = Literal["coupled", "sampled"]
SAMPLED_ODDS = 0.8  # of a token that was drawn: it was drawn because it was likely, and is judged by p / q


class ModelDrafter:
    """Drafts with an independent model that shares the target's vocabulary.

    coupled: draws as the target does, with the target's own noise, so that both choose the same token more often than
    two independent draws could (for `match`). sampled: draws with noise of its own from its `support` likeliest ids and
    says from what (for `rejection`). vocab: ids of the target; those beyond, or beyond the draft's own, are padding.
    taps: what its run needs of the target. ids: of the target, one for each column of the run's logits; None where they
    are 0, 1, 2 and so on. rows: what the run's logits are rows of, for a shard of a model.
    """

    def __init__(
        self,
        noise: Noise,
        drawing: Drawing,
        vocab: int,
        support: int = 64,
        *,
        taps: tuple[int, ...] = (),
        ids: Tensor | None = None,
        rows: Callable[[Tensor], RowLogits] | None = None,
    ) -> None:
        self.needs = Needs(own_model=True, gives_q=drawing == "sampled", taps=taps)
        self._noise, self._vocab, self._support, self._ids = noise, vocab, support, ids
        self._rows = rows

    def extend(self, spans: Sequence[Span], places: Sequence[Place], run: Run) -> list[Offer]:
        logits = run(spans)
        whole = RowLogits(logits, min(run.vocab, self._vocab), listed_V=self._ids)
        rows = whole if self._rows is None else self._rows(logits)
        draws = [place.draw for place in places]
        widths = [place.width for place in places]
        if not self.needs.gives_q:
            ranked = rank(rows, draws, max(widths), self._noise)
            return [Offer(ids[:width], tuple(odds[:width])) for (ids, odds), width in zip(ranked, widths, strict=True)]
        drawn = sample(rows, draws, self._noise, self._support)
        return [_offer(token, q, width) for (token, q), width in zip(drawn, widths, strict=True)]


def _offer(token: int, q: Draws, width: int) -> Offer:
    """The drawn token, and those that the target is likeliest to say instead."""
    if token == NO_TOKEN:
        return Offer((), ())
    drawn = zip(q.probs, q.ids, strict=True)
    others = sorted(((p, other) for p, other in drawn if other != token and p > 0), reverse=True)
    left = sum(p for p, _ in others)
    odds = [(1 - SAMPLED_ODDS) * p / left for p, _ in others[: width - 1]]
    return Offer((token, *(other for _, other in others[: width - 1])), (SAMPLED_ODDS, *odds), q)
