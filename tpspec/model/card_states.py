"""Linear attention of few rows on a card, by the kernels of card_delta.py; this is their host side.

A round's integers go into a table in the card's memory, as those of card_steps.py do. Must not know what rows mean.
Imported on cards only.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

from tpspec.model import card_delta as kernels
from tpspec.model.batch import paths
from tpspec.model.card_rows import MOST_ROWS
from tpspec.model.courses import NOTHING, courses
from tpspec.staged import Staged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.model.batch import Span
    from tpspec.model.card_overlap import Overlap
    from tpspec.model.steps import LinearLayer

TILE = 4096  # numbers of a state that a program holds in registers: 32 a thread
LEAST_PIECE = 8  # values of a head in a program


class CardStates:
    """Of one model. overlap: of launches."""

    def __init__(self, store: StateStore, device: torch.device, overlap: Overlap) -> None:
        self._store, self._overlap = store, overlap
        self._sights_at, self._sight = kernels.sights_at(store.sizes.num_before), store.sizes.num_before + 1
        self._table = Staged(self._sights_at + 2 * MOST_ROWS * self._sight, torch.int64, device)
        self._blank = np.zeros(len(self._table.there), np.int64)  # of rows that are all padding
        self._blank[kernels.ROWS_AT : kernels.SPANS_AT : kernels.ROW_SIZE] = kernels.PADDING
        self._blank[self._sights_at :] = NOTHING

    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether the rows that their texts have kept are few."""
        return sum(len(span.carried.rows) for span in spans if span.carried is not None) <= MOST_ROWS

    def put(self, spans: Sequence[Span]) -> None:
        """Rows behind the spans' are padding."""
        rows, in_turn, own_sights, kept_sights = list[int](), list[int](), list[int](), list[int]()
        num_kept = 0
        for number, course in enumerate(courses(spans, self._store)):
            kept, chained = course.num_kept, course.num_chained
            in_turn += course.slot, course.is_fresh, num_kept, kept, course.rows.start, chained, len(course.rows)
            in_turn += course.before
            rows += [kernels.CHAINED, 0] * chained
            for path in paths(course.parents):
                rows += number, path
            for sight in course.sights[:kept]:
                kept_sights += sight
            for sight in course.sights[kept:]:
                own_sights += sight
            num_kept += kept
        numbers = self._table.room().numpy()
        numbers[:] = self._blank
        words = numbers.data.cast("B").cast("q")  # takes few numbers in a tenth of numpy's time
        own_at = self._sights_at + self._sight * MOST_ROWS
        for at, ints in (
            (0, [num_kept]),
            (kernels.ROWS_AT, rows),
            (kernels.SPANS_AT, in_turn),
            (self._sights_at, kept_sights),
            (own_at, own_sights),
        ):
            words[at : at + len(ints)] = array("q", ints)

    def copy(self) -> None:
        self._table.copy(0, len(self._table.there))

    def sent(self) -> None:
        self._table.sent()

    def linear_attention(self, layer: LinearLayer, mixed_TM: Tensor, rates_TH: Tensor, gate_TX: Tensor) -> Tensor:
        """See `Steps`."""
        mixer, held, sizes, table = layer.mixer, self._store.of(layer.index), self._store.sizes, self._table.there
        T, H, G, K, V = len(mixed_TM), sizes.num_heads, mixer.num_keys, sizes.key_dim, sizes.value_dim
        num_left, before, X = self._store.num_rows, sizes.num_before, sizes.row
        heads = {"num_keys": G, "num_values": H, "key_dim": K, "value_dim": V} | self._overlap
        rows = torch.empty(MOST_ROWS + T, X, device=mixed_TM.device)
        wide = triton.next_power_of_2(max(K, V, 2 * H))
        kernels.convolve[(T, 2 * G + H + 1)](
            mixed_TM, rates_TH, held.left, table, mixer.kernel, mixer.decays_H, mixer.biases_H, rows, num_left,
            K**-0.5, sight=self._sight, sights_at=self._sights_at, wide=wide, **heads,
        )  # fmt: skip
        wide_key = triton.next_power_of_2(K)
        piece = min(triton.next_power_of_2(V), max(LEAST_PIECE, TILE // wide_key))
        programs, tile = (T, H, triton.cdiv(V, piece)), {"before": before, "wide_key": wide_key, "piece": piece}
        answers_THV = mixed_TM.new_empty(T, H, V)
        kernels.take_in[programs](
            rows, mixed_TM, rates_TH, held.left, table, mixer.key_of, held.states, answers_THV, num_left,
            self._store.length, wide_left=triton.next_power_of_2(triton.cdiv(X, H * programs[2])), **tile, **heads,
        )  # fmt: skip
        kernels.look_at[programs](rows, table, mixer.key_of, held.states, answers_THV, **tile, **heads)
        out_TX = torch.empty_like(gate_TX)
        kernels.gated[(T, H)](
            answers_THV, mixer.norm.weight, mixer.norm.eps, gate_TX, out_TX, dim=V, wide=triton.next_power_of_2(V),
            **self._overlap,
        )  # fmt: skip
        return out_TX
