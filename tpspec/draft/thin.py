"""Drafting with the target itself, less some of its sublayers, through the same shards and on the same cache.

The keys and values of the text are there, from the target's own forwards; a draft writes its own behind them, where the
verification writes anew. Every token costs the all-reduces of what is left, and a gather. Zhang et al., Draft & Verify,
arXiv 2309.08168; Elhoushi et al., LayerSkip, arXiv 2404.16710. Knows no rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpspec.draft.run import ModelRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.model.batch import Span


class ThinRun(ModelRun):
    """The `Run` of a shard of the target without some sublayers.

    rereads: what has come true is in the cache by then as the target itself reads it.
    """

    rereads = True

    def __call__(self, spans: Sequence[Span]) -> Tensor:
        """This shard's logits. Spans of a row each, as many at a time as a forward may have."""
        most = self._decoder.fixed_rows or len(spans)
        pieces = [spans[first : first + most] for first in range(0, len(spans), most)]
        return torch.cat([self._decoder.forward(piece) for piece in pieces])
