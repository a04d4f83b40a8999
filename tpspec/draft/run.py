"""A whole model with a cache of its own, run for a source that drafts with one. Knows no rank, target or pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.cache.seats import Seats
from tpspec.model.loader import load_whole
from tpspec.published.shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.draft.protocol import Given, Taps
    from tpspec.model.batch import Span
    from tpspec.model.decoder import Decoder


class ModelRun:
    """The `Run` of an unsharded decoder, which needs nothing from the target."""

    rereads: bool = False

    def __init__(self, decoder: Decoder, vocab: int, max_positions: int | None) -> None:
        self._decoder, self.vocab, self.max_positions = decoder, vocab, max_positions
        states = decoder.states
        self.seats = None if states is None else Seats(states.num_states, states.num_left)

    def __call__(self, spans: Sequence[Span]) -> Tensor:
        return self._decoder.forward(spans)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._decoder.store.move(sources, targets)

    def observe(self, taps: Taps) -> None: ...
    def can_read(self, seq: int, num_tokens: int) -> bool:
        return True

    def forget(self, seq: int) -> None: ...


def load_run(given: Given) -> ModelRun:
    """The whole model in `given.folder`."""
    assert given.folder is not None, "the rules of a topology ask for it"
    shape = ModelShape.of(given.folder)
    decoder = load_whole(
        given.folder, shape, given.dtype, given.device, given.num_slots, given.quantize, num_states=given.num_states,
        num_positions=given.num_positions,
    )  # fmt: skip
    decoder.prepare()
    return ModelRun(decoder, shape.vocab, decoder.store.positions_of(shape.max_positions))
