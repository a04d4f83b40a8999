"""The steps of steps.py on a card, by the kernels of card_rows.py; this is their host side.

A round's integers go into a table in the card's memory, by one copy that nobody waits for; layers with a window have
one of their own, for they see fewer keys. Of few rows kernels and their launches are then the same for every round of
as many, so that they can be recorded once (graphs.py); card_many.py has the rest. Must not know what rows mean.
Imported on cards only.

Shapes: T rows of the round, D hidden, H query heads, G kv heads, E head dim, C mlp channels, N splits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import triton

from tpspec.model import card_rows as kernels
from tpspec.model.card_norms import add_norm
from tpspec.model.card_overlap import IN_TURN, overlap
from tpspec.model.card_products import TriedProduct
from tpspec.model.card_states import CardStates
from tpspec.model.card_sums import sum_add_norm
from tpspec.model.card_tables import Seen, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.cache.store import Cells, KVStore
    from tpspec.comm.peer import Meeting
    from tpspec.model.batch import Span
    from tpspec.model.linear import Linear
    from tpspec.model.rope import Rope
    from tpspec.model.steps import Heads, Layer, LinearLayer, Norm, Shape, Sight

MOST_ROWS = kernels.MOST_ROWS
GATE_WIDTH = 1024  # channels of a program
CARD_PROCESSORS = 2  # programs of attention for each of a card's processors, where keys are many enough
MOST_SPLITS = 32
MOST_HEAD_BYTES = 1280  # of a head that is read in pieces, as 576 numbers of a latent in 16 bits
USUAL_STAGES, USUAL_WARPS = 3, 4  # Triton's own
JOINED = 256  # columns of a program, at most
LEAST_SIDE = 16  # of what tensor cores take
MANY_ROWS, MANY_STAGES = 128, 5  # of a tile; so many give keys two places, for they come by way of a table
OLD_CARDS = (8, 0)  # compute capability; below it there is less to share, and products take more registers
# Compute capabilities, from 9.0 on, whose products of 64 rows are other instructions than those of fewer: a row's bits
# would depend on how many stand beside it.
OTHER_PRODUCTS = (9, 10, 11)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of attention: what fits into what a processor shares (tests/model/test_card_kernels.py).

    rows: of a tile, each standing there once for each query head of a fold. wide, rest, keys: see `attend`. stages: of
    loads, whose results have to fit as well. warps: of a program, whose threads hold a tile's sums. splits: programs
    that share the keys of a row and kv head; a power of two.
    """

    rows: int
    wide: int
    rest: int
    keys: int
    stages: int = USUAL_STAGES
    warps: int = USUAL_WARPS
    splits: int = 1

    @classmethod
    def of(cls, head_dim: int, item_bytes: int, capability: tuple[int, int]) -> Tiling | None:
        """Of few rows. None for heads that are too wide.

        With as many rows as a head is wide, or more, threads are laid out otherwise: sums over keys would be added in
        another order than with few rows, and a row's bits would depend on how many stand beside it.
        """
        tiling = cls._most(head_dim, item_bytes, capability)
        if tiling is None or tiling.wide == LEAST_SIDE:
            return tiling
        return replace(tiling, rows=min(tiling.rows, max(LEAST_SIDE, tiling.wide // 2)))

    @classmethod
    def of_many(cls, head_dim: int, item_bytes: int, capability: tuple[int, int]) -> Tiling | None:
        """Of many rows, whose bits may depend on how many they are: each thread has whole rows of a tile, if it can."""
        tiling = cls.of(head_dim, item_bytes, capability)
        if tiling is None or capability < OLD_CARDS or item_bytes > 2 or tiling.rest:
            return tiling
        has_others = capability[0] in OTHER_PRODUCTS
        if tiling.wide <= MANY_ROWS:  # there would be room for more keys, but not in registers
            keys = tiling.keys if has_others or tiling.wide < MANY_ROWS else tiling.keys // 2
            return replace(tiling, rows=MANY_ROWS, keys=keys, stages=MANY_STAGES, warps=2 * USUAL_WARPS)
        if has_others and tiling.wide == 2 * MANY_ROWS:
            return replace(tiling, rows=MANY_ROWS // 2, keys=tiling.keys // 2, stages=MANY_STAGES)
        return tiling

    @classmethod
    def _most(cls, head_dim: int, item_bytes: int, capability: tuple[int, int]) -> Tiling | None:
        """With as many rows as there is room for."""
        wide = max(LEAST_SIDE, triton.next_power_of_2(head_dim))
        if capability < OLD_CARDS:
            return cls(32, wide, 0, kernels.KEYS // 2, warps=2 * USUAL_WARPS) if wide * item_bytes <= 256 else None
        if wide * item_bytes <= 256 and item_bytes == 2:
            return cls(32 if capability[0] in OTHER_PRODUCTS else 64, wide, 0, kernels.KEYS)
        if wide * item_bytes <= 512:
            return cls(32, wide, 0, kernels.KEYS, warps=2 * USUAL_WARPS)
        wide //= 1 if head_dim == wide else 2
        rest = max(LEAST_SIDE, triton.next_power_of_2(head_dim - wide)) if head_dim > wide else 0
        if (wide + rest) * item_bytes > MOST_HEAD_BYTES:
            return None
        return cls(32, wide, rest, kernels.KEYS // 2, stages=1, warps=2 * USUAL_WARPS)


@dataclass(frozen=True, slots=True)
class Folds:
    """The query heads of a layer, as its programs share them: those of a kv head in so many `cuts`, each a fold of
    `most` at most. firsts: the first of each, and where the last ends, on the card."""

    tiling: Tiling
    cuts: int
    most: int
    firsts: Tensor

    @classmethod
    def of(cls, heads: Heads, tiling: Tiling, device: torch.device) -> Folds:
        counts = [heads.kv_of.count(kv) for kv in range(heads.num_kv)]
        cuts = triton.cdiv(max(counts), tiling.rows)
        folds = [cut for count in counts for cut in _even(count, cuts)]
        return cls(tiling, cuts, max(folds), torch.tensor([0, *accumulate(folds)], dtype=torch.int32).to(device))

    def tile_rows(self, num_rows: int) -> int:
        """No tile has more folded rows than it may, and none of few rows has many."""
        return max(1, min(self.tiling.rows // self.most, num_rows))


class CardSteps:
    """Of one model and cache. tilings: of its layers' attention. states: of layers with linear attention.

    What a round is stands in tables, one for each sort of heads, in layers with a window or not.
    """

    is_recorded = True  # or could be: its table may be another round's
    usual_rows = MOST_ROWS  # of a round at most

    def __init__(
        self,
        shape: Shape,
        ropes: Sequence[Rope],
        store: KVStore,
        tilings: Mapping[Heads, Tiling],
        states: StateStore | None = None,
    ) -> None:
        self._shape, self._ropes, self._store = shape, ropes, store
        self._folds = {heads: Folds.of(heads, tilings[heads], shape.device) for heads in shape.heads}
        self._overlap = overlap(shape.device)
        self._text_states = states
        self._make_room(self.usual_rows)

    def fits(self, spans: Sequence[Span], num_rows: int) -> bool:
        """Whether the rows are few, and there is room for what is said of them."""
        return num_rows <= MOST_ROWS and self._has_room(spans)

    def begin(self, spans: Sequence[Span], num_rows: int) -> Any:
        self.write(spans, num_rows)
        self.put()
        self.copy()
        self.sent()

    def write(self, spans: Sequence[Span], num_rows: int) -> None:
        if others := [(heads, table) for (heads, _), table in self._tables.items() if not table.goes_on(spans)]:
            seen = [Seen.by(span) for span in spans]
            for heads, table in others:
                table.write(spans, seen, self._tile_rows(self._folds[heads], num_rows))
        if self._states is not None:
            self._states.write(spans)

    def put(self) -> None:
        for table in self._staged:
            table.put()

    def is_copied_whole(self, spans: Sequence[Span]) -> bool:
        return all(table.is_copied_whole(spans) for table in self._tables.values())

    def copy(self) -> None:
        for table in self._staged:
            table.copy()

    def sent(self) -> None:
        for table in self._staged:
            table.sent()

    def left(self) -> None:
        for table in self._staged:
            table.left()

    def add_norm(
        self, x_TD: Tensor, delta_TD: Tensor | None, norm: Norm, delta_norm: Norm | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """x is overwritten by what is the first of the two."""
        num_rows, dim = x_TD.shape
        normed_TD, wide, first = torch.empty_like(x_TD), triton.next_power_of_2(dim), delta_norm or norm
        how = IN_TURN if delta_TD is None else self._overlap  # a round's first kernel stands behind copies
        add_norm[(num_rows,)](
            x_TD, x_TD if delta_TD is None else delta_TD, first.weight, first.eps, norm.weight, norm.eps, scale,
            normed_TD, dim=dim, wide=wide, adds=delta_TD is not None, norms_delta=delta_norm is not None,
            scales=scale != 1, num_warps=norm_warps(wide), **how,
        )  # fmt: skip
        return x_TD, normed_TD

    def sum_add_norm(
        self, x_TD: Tensor, partial_TD: Tensor, meeting: Meeting, norm: Norm, delta_norm: Norm | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """x is overwritten."""
        num_rows, dim = x_TD.shape
        normed_TD, wide, first = torch.empty_like(x_TD), triton.next_power_of_2(dim), delta_norm or norm
        sum_add_norm[(num_rows,)](
            partial_TD, x_TD, first.weight, first.eps, norm.weight, norm.eps, scale, normed_TD, meeting.memories,
            meeting.epochs, meeting.lost, meeting.most_looks, rank=meeting.rank, size=meeting.size, leg=meeting.leg,
            dim=dim, wide=wide, norms_delta=delta_norm is not None, scales=scale != 1, on_card=meeting.on_card,
            num_warps=norm_warps(wide), **self._overlap,
        )  # fmt: skip
        return x_TD, normed_TD

    def joined(self, halves_TD: Tensor, norms: tuple[Norm, Norm]) -> Tensor:
        one_TD, other_TD = halves_TD.chunk(2)
        _, made_TD = self.add_norm(one_TD, None, norms[0])
        return self.add_norm(made_TD, other_TD, norms[1], norms[1])[0]  # what it makes besides is not read

    def attention(self, layer: Layer, qkv_TX: Tensor, round: Any) -> Tensor:
        return self.attended(layer.sight, layer.kept_by, layer.sinks, self._placed(layer, qkv_TX))

    def attended(self, sight: Sight, kept_by: int, sinks: Tensor | None, q_TX: Tensor) -> Tensor:
        """What the round's queries, [T, H * E], make of what the layer `kept_by` keeps."""
        heads, window = sight
        folds, table = self._folds[heads], self._tables[heads, sight.is_windowed]
        keys, small, cells = self._cells(kept_by, q_TX)
        num_rows, tiling, out_TX = len(q_TX), folds.tiling, torch.empty_like(q_TX)
        num_tiles, splits = self._shares(table, folds, num_rows)
        sums = tops = masses = out_TX
        are_parts = self.is_recorded or splits > 1  # which knows padding when it joins them
        if are_parts:
            sums = torch.empty(num_rows, heads.num, splits, heads.dim, device=q_TX.device)
            tops, masses = torch.empty(2, num_rows, heads.num, splits, device=q_TX.device).unbind()
        sunk = {"sinks_at": out_TX if sinks is None else sinks, "sinks": sinks is not None}
        folded = max(LEAST_SIDE, triton.next_power_of_2(self._tile_rows(folds, num_rows) * folds.most))
        kernels.attend[(num_tiles, len(folds.firsts) - 1, splits)](
            q_TX, *cells, table.there, folds.firsts, sums_at=sums, tops_at=tops, masses_at=masses,
            num_slots=keys.num_slots, most_rows=table.most_rows, window=window or 0, scale=self._shape.score_scale,
            num_heads=heads.num, dim=heads.dim, wide=tiling.wide, rest=tiling.rest, fold=folds.most, cuts=folds.cuts,
            tile_rows=folded, tile_keys=tiling.keys, pieces=kernels.KEYS // tiling.keys, splits=splits,
            cap=self._shape.score_cap or 0.0, recorded=self.is_recorded, windowed=window is not None, small=small,
            num_stages=tiling.stages, num_warps=tiling.warps, **sunk, **self._overlap,
        )  # fmt: skip
        if are_parts:
            joined = min(triton.next_power_of_2(heads.dim), JOINED)
            kernels.join[(num_rows, heads.num, triton.cdiv(heads.dim, joined))](
                sums, tops, masses, table.there, out_at=out_TX, most_rows=table.most_rows, num_heads=heads.num,
                dim=heads.dim, wide=joined, splits=splits, **sunk, **self._overlap,
            )  # fmt: skip
        return out_TX

    def linear_attention(
        self, layer: LinearLayer, mixed_TM: Tensor, rates_TH: Tensor, gate_TX: Tensor, round: Any
    ) -> Tensor:
        assert self._states is not None, "a decoder with such layers has a store for them"
        return self._states.linear_attention(layer, mixed_TM, rates_TH, gate_TX, self._num_spans(len(mixed_TM)))

    def gate(self, gate_up_TC: Tensor) -> Tensor:
        num_rows, both = gate_up_TC.shape
        out_TC = gate_up_TC.new_empty(num_rows, both // 2)
        kernels.gate[(num_rows, triton.cdiv(both // 2, GATE_WIDTH))](
            gate_up_TC, out_TC, both // 2, wide=GATE_WIDTH, kind=self._shape.gate, **self._overlap
        )
        return out_TC

    def gated(self, gate_up: Linear, x_TD: Tensor) -> Tensor:
        if isinstance(gate_up, TriedProduct):
            return gate_up.gated(x_TD, self._shape.gate, self.gate)
        return self.gate(gate_up(x_TD))

    def slots(self, num_rows: int) -> Tensor:
        table = next(iter(self._tables.values()))
        first = kernels.ROW_SLOT * table.most_rows
        return table.there[first : first + num_rows]

    def _tile_rows(self, folds: Folds, num_rows: int) -> int:
        """Of a round of so many rows."""
        return folds.tile_rows(num_rows)

    def _shares(self, table: Table, folds: Folds, num_rows: int) -> tuple[int, int]:
        """Of attention: tiles, and splits of the keys of each. Whatever the rows are."""
        return num_rows, folds.tiling.splits

    def _num_spans(self, num_rows: int) -> int:
        """At most. Whatever they are."""
        return num_rows

    def _has_room(self, spans: Sequence[Span]) -> bool:
        """Whether their keys are not too scattered, and what their texts have kept of states is not too much."""
        if self._states is not None and not self._states.fits(spans):
            return False
        return all(table.fits(spans) for table in self._tables.values())

    def _make_room(self, most_rows: int) -> None:
        """For the integers of rounds of so many rows."""
        self._most_rows, device = most_rows, self._shape.device
        self._tables: dict[tuple[Heads, bool], Table] = {}
        for heads, window in sorted(self._shape.sights, key=lambda sight: sight.window or 0):  # the longest counts
            num_slots = (self._store.num_slots if window is None else self._store.num_recent) or self._store.num_slots
            table = Table(num_slots, window, self._store.num_positions, device, most_rows)
            self._tables[heads, window is not None] = table
        states = self._text_states
        self._states = None if states is None else CardStates(states, device, self._overlap, most_rows)
        self._staged: list[Table | CardStates] = [*self._tables.values()]
        if self._states is not None:
            self._staged.append(self._states)

    def _cells(self, kept_by: int, x: Tensor) -> tuple[Cells, bool, list[Tensor | None]]:
        """Where a layer's keys are, whether in 8 bits, and what kernels take of keys and values; x: of a cache without
        scales, which are not read."""
        keys, values = self._store.keys[kept_by], self._store.values[kept_by]
        small = keys.scales_GS is not None
        scales = (keys.scales_GS, values.scales_GS) if small else (x, x)
        return keys, small, [keys.numbers_GSE, values.numbers_GSE, *scales]

    def _placed(self, layer: Layer, qkv_TX: Tensor) -> Tensor:
        """Queries, [T, H * E]; keys and values are then in the cache."""
        keys, small, cells = self._cells(layer.kept_by, qkv_TX)
        heads, norms = layer.sight.heads, (layer.q_norm, layer.k_norm, layer.v_norm)
        q_TX = qkv_TX.new_empty(len(qkv_TX), heads.num * heads.dim)
        some = next((norm for norm in norms if norm is not None), None)  # kernels ask for the types of one of them
        absent, eps = (qkv_TX, 0.0) if some is None else (some.weight, some.eps)
        weights = [absent if norm is None else norm.weight for norm in norms]
        rope, kept = self._ropes[layer.rope or 0], 1 if self._shape.keys_alone else 2
        table = self._tables[heads, layer.sight.is_windowed]
        num_written = heads.num_kv * kept if layer.kept_by == layer.index else 0
        kernels.place[(len(qkv_TX), heads.num + num_written)](
            qkv_TX, *weights, eps, rope.cos_PE, rope.sin_PE,
            rope.cos_PE if rope.gains_P is None else rope.gains_P, table.there, q_TX, *cells,
            keys.num_slots, table.most_rows, num_heads=heads.num, num_kv_heads=heads.num_kv,
            num_lines=qkv_TX.shape[1] // heads.dim, dim=heads.dim, wide=triton.next_power_of_2(heads.dim),
            normed=layer.q_norm is not None, values_normed=layer.v_norm is not None, turned=layer.rope is not None,
            grown=rope.gains_P is not None, small=small, **self._overlap,
        )  # fmt: skip
        return q_TX


def norm_warps(wide: int) -> int:
    """Of the one program that a row's norm has: eight numbers a thread, as far as there are threads."""
    return max(4, min(16, wide // 256))


def card_steps(
    shape: Shape, ropes: Sequence[Rope], store: KVStore, states: StateStore | None = None
) -> CardSteps | None:
    """With as many splits as keep the card's processors busy for one sequence; None where heads are too wide."""
    if (cut := tilings_of(shape, Tiling.of)) is None:
        return None
    tilings: dict[Heads, Tiling] = {}
    for heads, tiling in cut.items():
        tilings[heads] = replace(tiling, splits=splits_of(heads.num_kv, wanted_programs(shape.device), MOST_SPLITS))
    return CardSteps(shape, ropes, store, tilings, states)


def tilings_of(
    shape: Shape, cut: Callable[[int, int, tuple[int, int]], Tiling | None]
) -> Mapping[Heads, Tiling] | None:
    """As `Tiling.of` cuts them, or `of_many`; None where some heads are too wide for the card."""
    capability = torch.cuda.get_device_capability(shape.device)
    made = {heads: cut(heads.dim, shape.dtype.itemsize, capability) for heads in shape.heads}
    tilings = {heads: tiling for heads, tiling in made.items() if tiling is not None}
    return tilings if len(tilings) == len(made) else None


def splits_of(num_programs: int, wanted: int, most: int) -> int:
    """Of the keys of so many programs, that there be as many as are wanted; a power of two."""
    splits: int = triton.next_power_of_2(max(1, triton.cdiv(wanted, num_programs)))
    return min(most, splits)


def wanted_programs(device: torch.device) -> int:
    """Of attention, that keep a card's processors busy."""
    return CARD_PROCESSORS * torch.cuda.get_device_properties(device).multi_processor_count


def _even(count: int, parts: int) -> list[int]:
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]
