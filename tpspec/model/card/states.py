"""Linear attention and short convolutions of a round's rows on a card, by the kernels of delta.py and of
conv.py; this is their host side.

A round's integers go into a table in the card's memory, as those of steps.py do. Must not know what rows mean.
Imported on cards only.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton

from tpspec.model.batch import paths
from tpspec.model.card import delta as kernels
from tpspec.model.card.conv import convolved
from tpspec.model.card.norms import norm_warps
from tpspec.model.card.rows import MOST_ROWS
from tpspec.model.card.tables import words_of
from tpspec.model.courses import NOTHING, courses
from tpspec.staged import Staged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.model.batch import Span
    from tpspec.model.card.overlap import Overlap
    from tpspec.model.delta_net import Made
    from tpspec.model.layers import ConvLayer, LinearLayer

TILE = 4096  # numbers of a state that a program holds in registers: 32 a thread
LEAST_PIECE = 8  # values of a head in a program
CONV_ROWS, CONV_CHANNELS = 8, 64  # of a convolution, that a program takes at a time


class CardStates:
    """Of one model, and rounds of `most_rows`. overlap: of launches."""

    def __init__(self, store: StateStore, device: torch.device, overlap: Overlap, most_rows: int = MOST_ROWS) -> None:
        self._store, self._overlap, self._most_rows, self.num_spans = store, overlap, most_rows, 0
        before = store.sizes.num_before
        self._sights_at, self._sight = kernels.sights_at(before, most_rows), before + 1
        self._table = Staged(self._sights_at + 2 * most_rows * self._sight, torch.int64, device)
        self._blank = np.zeros(len(self._table.there), np.int64)  # of rows that are all padding
        self._blank[kernels.ROWS_AT : kernels.spans_at(most_rows) : kernels.ROW_SIZE] = kernels.PADDING
        self._blank[self._sights_at :] = NOTHING
        self._numbers = self._blank.copy()  # of the round that was written last
        self._words = words_of(self._numbers)

    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether there is room for the rows that their texts have kept, and their trees have few."""
        carried = [span.carried for span in spans if span.carried is not None]
        trees = (len(span.tokens) - span.carried.num_certain for span in spans if span.carried is not None)
        return sum(len(one.rows) for one in carried) <= self._most_rows and all(rows < MOST_ROWS for rows in trees)

    def write(self, spans: Sequence[Span]) -> None:
        """Rows behind the spans' are padding."""
        rows, in_turn, own_sights, kept_sights = list[int](), list[int](), list[int](), list[int]()
        num_kept, self.num_spans = 0, len(spans)
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
        self._numbers[:] = self._blank
        own_at = self._sights_at + self._sight * self._most_rows
        for at, ints in (
            (0, [num_kept]),
            (kernels.ROWS_AT, rows),
            (kernels.spans_at(self._most_rows), in_turn),
            (self._sights_at, kept_sights),
            (own_at, own_sights),
        ):
            self._words[at : at + len(ints)] = array("q", ints)

    def put(self) -> None:
        self._table.room()[:] = self._numbers

    def copy(self) -> None:
        self._table.copy(0, len(self._table.there))

    def sent(self) -> None:
        self._table.sent()

    def left(self) -> None:
        self._table.left()

    def linear_attention(self, layer: LinearLayer, made: Made, num_spans: int) -> Tensor:
        """See `Steps`. num_spans: at most."""
        mixed_TM, rates_TH, gate_TX, squares_T = made
        mixer, held, sizes, table = layer.mixer, self._store.of(layer.index), self._store.sizes, self._table.there
        T, H, G, K, V = len(mixed_TM), sizes.num_heads, mixer.num_keys, sizes.key_dim, sizes.value_dim
        num_left, before, X, most_rows = self._store.num_rows, sizes.num_before, sizes.row, self._most_rows
        heads: dict[str, Any] = {"num_keys": G, "num_values": H, "key_dim": K, "value_dim": V, "sums": mixer.sums}
        heads |= {"by_channel": mixer.by_channel} | self._overlap
        rows = torch.empty(most_rows + T, X, device=mixed_TM.device)
        wide = triton.next_power_of_2(max(K, V, H if mixer.by_channel else 2 * H))
        skips = rows if mixer.skips_H is None else mixer.skips_H
        conv_biases = rows if mixer.conv_biases_M is None else mixer.conv_biases_M
        kernels.convolve[(T, 2 * G + H + 1 + H * mixer.by_channel)](
            mixed_TM, rates_TH, held.left, table, mixer.kernel, mixer.decays_H, mixer.biases_F, conv_biases, rows,
            num_left, most_rows, K**-0.5, sight=self._sight, wide=wide, biased=mixer.conv_biases_M is not None,
            most_written=mixer.most_written, **heads,
        )  # fmt: skip
        wide_key = triton.next_power_of_2(K)
        piece = min(triton.next_power_of_2(V), max(LEAST_PIECE, TILE // wide_key))
        # One answers chains, the other trees. Multiplied and added in one step, where a compiler likes to, a row would
        # have other bits in the one than in the other.
        pieces, tile = triton.cdiv(V, piece), {"before": before, "wide_key": wide_key, "piece": piece}
        tile |= {"enable_fp_fusion": False}
        answers_THV = mixed_TM.new_empty(T, H, V)
        kernels.take_in[(num_spans, H, pieces)](
            rows, mixed_TM, rates_TH, held.left, table, mixer.key_of, skips, held.states, answers_THV, num_left,
            most_rows, self._store.length, wide_left=triton.next_power_of_2(triton.cdiv(X, H * pieces)), **tile,
            **heads,
        )  # fmt: skip
        kernels.look_at[(T, H, pieces)](
            rows, table, mixer.key_of, skips, held.states, answers_THV, most_rows, **tile, **heads
        )  # fmt: skip
        out_TX = torch.empty_like(gate_TX)
        num_norms = G if mixer.sums and mixer.norm is not None else H
        weight, eps = (rows, 0.0) if mixer.norm is None else (mixer.norm.weight, mixer.norm.eps)
        wide = triton.next_power_of_2(dim := H * V // num_norms)
        kernels.gated[(T, num_norms)](
            answers_THV, weight, eps, gate_TX, out_TX, rows if squares_T is None else squares_T, dim=dim, wide=wide,
            sums=mixer.sums, normed=mixer.norm is not None, late=squares_T is not None, by_channel=mixer.by_channel,
            num_warps=norm_warps(wide), **self._overlap,
        )  # fmt: skip
        return out_TX

    def convolved(self, layer: ConvLayer, made_TX: Tensor, num_spans: int) -> Tensor:
        """See `Steps`. num_spans: at most."""
        conv, store, num_rows = layer.mixer, self._store, len(made_TX)
        out_TM = made_TX.new_empty(num_rows, store.sizes.row)
        convolved[(num_spans, triton.cdiv(store.sizes.row, CONV_CHANNELS))](
            made_TX, store.of(layer.index).left, self._table.there, conv.kernel,
            conv.kernel if conv.biases_M is None else conv.biases_M, out_TM, num_rows, store.num_rows,
            self._most_rows, store.length, num_channels=store.sizes.row, sight=self._sight, tile=CONV_ROWS,
            wide=CONV_CHANNELS, biased=conv.biases_M is not None, **self._overlap,
        )  # fmt: skip
        return out_TM
