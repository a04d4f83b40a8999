"""A whole model with a cache of its own, run for a source that drafts with one. Knows no rank, target or pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.model.batch import Span
    from tpspec.model.decoder import Decoder


class ModelRun:
    """The `Run` of an unsharded decoder."""

    def __init__(self, decoder: Decoder, vocab: int, max_positions: int | None) -> None:
        self._decoder, self.vocab, self.max_positions = decoder, vocab, max_positions

    def __call__(self, spans: Sequence[Span]) -> Tensor:
        return self._decoder.forward(spans)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._decoder.store.move(sources, targets)
