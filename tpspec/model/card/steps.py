"""The steps of model/steps.py on a card: the host side of the kernels in {attention,heads,norms,rows}.py.

A round's integers go into a table in the card's memory, by one copy that nobody waits for; layers with a window have
one of their own, for they see fewer keys. Of few rows kernels and their launches are then the same for every round of
as many, so that they can be recorded once (model/graphs.py); many.py has the rest. Must not know what rows mean.
Imported on cards only.

Shapes: T rows of the round, D hidden, H query heads, G kv heads, E head dim, C mlp channels, N splits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton

from tpspec.model.card import rows as kernels
from tpspec.model.card.attention import attend, join
from tpspec.model.card.gates import weighed
from tpspec.model.card.heads import place
from tpspec.model.card.joint import jointly_normed, squares
from tpspec.model.card.late import beside, normed_late
from tpspec.model.card.norms import add_norm, norm_warps
from tpspec.model.card.overlap import IN_TURN, overlap
from tpspec.model.card.products import TriedProduct
from tpspec.model.card.states import CardStates
from tpspec.model.card.sums import sum_add_norm
from tpspec.model.card.tables import Seen, Table
from tpspec.model.card.tilings import LEAST_SIDE, Folds, Tiling, splits_of, tilings_of, wanted_programs
from tpspec.model.curves import ALONE
from tpspec.topology.rounds import LATE_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.cache.store import Cells, KVStore
    from tpspec.comm.meeting import Meeting
    from tpspec.model.batch import Span
    from tpspec.model.delta_net import Made
    from tpspec.model.gates import HeadGate
    from tpspec.model.joint_norm import Columns, JointNorm
    from tpspec.model.late_norm import LateNorm
    from tpspec.model.layers import ConvLayer, Layer, LinearLayer
    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm
    from tpspec.model.rope import Rope
    from tpspec.model.sight import Heads, Shape, Sight

MOST_ROWS = kernels.MOST_ROWS
GATE_WIDTH = 1024  # channels of a program
MOST_SPLITS = 32
JOINED = 256  # columns of a program, at most
NO_BENDS = (0.0, 0.0, 0.0)  # what a kernel takes of an act that has none
JOINTLY = 1024  # the same of norms over heads of all ranks


class CardSteps:
    """Of one model and cache. tilings: of its layers' attention. states: of layers that keep some.

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
        self._overlap = overlap(shape.device)
        places = self.is_recorded and not shape.keys_alone
        self._placed_by_attention = {heads for heads, tiling in tilings.items() if places and tiling.places}
        self._folds = {heads: Folds.of(heads, tilings[heads], shape.device) for heads in shape.heads}
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
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        norm: Norm | None,
        delta_norm: Norm | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """x is overwritten by what is the first of the two."""
        num_rows, dim = x_TD.shape
        normed_TD, wide = x_TD if norm is None else torch.empty_like(x_TD), triton.next_power_of_2(dim)
        # A round's first kernel stands behind copies, also where it has nothing to do.
        how = IN_TURN if delta_TD is None else self._overlap
        add_norm[(num_rows,)](
            x_TD, x_TD if delta_TD is None else delta_TD, *_weight(delta_norm or norm, x_TD), *_weight(norm, x_TD),
            _bias(norm, x_TD), scale, normed_TD, dim=dim, wide=wide, adds=delta_TD is not None,
            norms_delta=delta_norm is not None, scales=scale != 1, norms=_kind(norm), num_warps=norm_warps(wide), **how,
        )  # fmt: skip
        return x_TD, normed_TD

    def sum_add_norm(
        self,
        x_TD: Tensor,
        partial_TD: Tensor,
        meeting: Meeting,
        norm: Norm | None,
        delta_norm: Norm | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """x is overwritten."""
        num_rows, dim = x_TD.shape
        normed_TD, wide = x_TD if norm is None else torch.empty_like(x_TD), triton.next_power_of_2(dim)
        sum_add_norm[(num_rows,)](
            partial_TD, x_TD, *_weight(delta_norm or norm, x_TD), *_weight(norm, x_TD), _bias(norm, x_TD), scale,
            normed_TD, meeting.memories, meeting.epochs, meeting.lost, meeting.most_looks, rank=meeting.rank,
            size=meeting.size, leg=meeting.leg, dim=dim, wide=wide, norms_delta=delta_norm is not None,
            scales=scale != 1, norms=_kind(norm), on_card=meeting.on_card, num_warps=norm_warps(wide), **self._overlap,
        )  # fmt: skip
        return x_TD, normed_TD

    def joined(self, halves_TD: Tensor, norms: tuple[Norm, Norm]) -> Tensor:
        one_TD, other_TD = halves_TD.chunk(2)
        _, made_TD = self.add_norm(one_TD, None, norms[0])
        return self.add_norm(made_TD, other_TD, norms[1], norms[1])[0]  # what it makes besides is not read

    def squares(self, made_TX: Tensor, columns: Columns, before_T2: Tensor | None = None) -> Tensor:
        """In place, of sums that there are."""
        num_rows, width = made_TX.shape
        sums_T2 = made_TX.new_empty(num_rows, 2, dtype=torch.float32) if before_T2 is None else before_T2
        wide = triton.next_power_of_2(max(columns.num_queries, len(columns.keys)))
        squares[(num_rows, 2)](
            made_TX, sums_T2, width=width, num_queries=columns.num_queries, first_key=columns.keys.start,
            num_keys=len(columns.keys), adds=before_T2 is not None, wide=wide, num_warps=norm_warps(wide),
            **self._overlap,
        )  # fmt: skip
        return sums_T2

    def jointly_normed(self, qkv_TX: Tensor, sums_T2: Tensor, norm: JointNorm) -> Tensor:
        """In place."""
        num_rows, width = qkv_TX.shape
        num_normed = len(norm.weight_N)
        jointly_normed[(num_rows, triton.cdiv(num_normed, JOINTLY))](
            qkv_TX, sums_T2, norm.weight_N, norm.eps, norm.all_queries, norm.all_keys, width=width,
            num_queries=norm.num_queries, num_normed=num_normed, wide=JOINTLY, **self._overlap,
        )  # fmt: skip
        return qkv_TX

    def choose(self, *_: object) -> None: ...  # of models that no card runs yet: loader.py refuses them

    def attention(self, layer: Layer, qkv_TX: Tensor, round: Any) -> Tensor:
        if layer.sight.heads in self._placed_by_attention and layer.kept_by == layer.index:
            return self._attended(layer.sight, layer.kept_by, layer.sinks, qkv_TX, layer)
        return self.attended(layer.sight, layer.kept_by, layer.sinks, self._placed(layer, qkv_TX))

    def attended(self, sight: Sight, kept_by: int, sinks: Tensor | None, q_TX: Tensor) -> Tensor:
        """What the round's queries, [T, H * E], make of what the layer `kept_by` keeps."""
        return self._attended(sight, kept_by, sinks, q_TX, None)

    def _attended(
        self, sight: Sight, kept_by: int, sinks: Tensor | None, rows_TX: Tensor, placed: Layer | None
    ) -> Tensor:
        """rows: queries, or what the qkv of the layer `placed` made, which the kernel then places."""
        heads, window = sight.heads, sight.window
        folds, table = self._folds[heads], self._tables[heads, sight.is_windowed]
        keys, small, cells = self._cells(kept_by, rows_TX)
        num_rows, tiling = len(rows_TX), folds.tiling
        out_TX = rows_TX.new_empty(num_rows, heads.num * heads.dim)
        num_tiles, splits = self._shares(table, folds, num_rows)
        sums = tops = masses = out_TX
        are_parts = self.is_recorded or splits > 1  # which knows padding when it joins them
        if are_parts:
            sums = torch.empty(num_rows, heads.num, splits, heads.dim, device=rows_TX.device)
            tops, masses = torch.empty(2, num_rows, heads.num, splits, device=rows_TX.device).unbind()
        sunk = {"sinks_at": out_TX if sinks is None else sinks, "sinks": sinks is not None}
        folded = max(LEAST_SIDE, triton.next_power_of_2(self._tile_rows(folds, num_rows) * folds.most))
        attend[(num_tiles, len(folds.firsts) - 1, splits)](
            rows_TX, *cells, table.there, folds.firsts, sums_at=sums, tops_at=tops, masses_at=masses,
            num_slots=keys.num_slots, most_rows=table.most_rows, window=window or 0, scale=self._shape.score_scale,
            num_heads=heads.num, dim=heads.dim, wide=tiling.wide, rest=tiling.rest, fold=folds.most, cuts=folds.cuts,
            tile_rows=folded, tile_keys=tiling.keys, pieces=kernels.KEYS // tiling.keys, splits=splits,
            cap=self._shape.score_cap or 0.0, recorded=self.is_recorded, windowed=window is not None,
            chunked=sight.chunked, small=small, placing=placed is not None, **self._placing(placed, rows_TX),
            num_stages=tiling.stages, num_warps=tiling.warps, **sunk, **self._overlap,
        )  # fmt: skip
        if are_parts:
            joined = min(triton.next_power_of_2(heads.dim), JOINED)
            join[(num_rows, heads.num, triton.cdiv(heads.dim, joined))](
                sums, tops, masses, table.there, out_at=out_TX, most_rows=table.most_rows, num_heads=heads.num,
                dim=heads.dim, wide=joined, splits=splits, **sunk, **self._overlap,
            )  # fmt: skip
        return out_TX

    def linear_attention(self, layer: LinearLayer, made: Made, round: Any) -> Tensor:
        assert self._states is not None, "a decoder with such layers has a store for them"
        return self._states.linear_attention(layer, made, self._num_spans(len(made.mixed_TM)))

    def convolved(self, layer: ConvLayer, made_TX: Tensor, round: Any) -> Tensor:
        assert self._states is not None, "as above"
        return self._states.convolved(layer, made_TX, self._num_spans(len(made_TX)))

    def weighed(self, attended_TX: Tensor, gate: HeadGate, x_TD: Tensor) -> Tensor:
        (num_rows, width), gating = attended_TX.shape, gate.gating
        out_TX = torch.empty_like(attended_TX)
        weighed[(num_rows, triton.cdiv(width, GATE_WIDTH))](
            attended_TX, gate.product(x_TD), out_TX, width, dim=gate.head_dim, by_head=gating.by_head, act=gating.act,
            wide=GATE_WIDTH, **self._overlap,
        )  # fmt: skip
        return out_TX

    def beside(self, made_TD: Tensor, squares_T: Tensor, rank: int, size: int) -> Tensor:
        num_rows, dim = made_TD.shape
        out_TY = made_TD.new_empty(num_rows, dim + LATE_COLUMNS * size)
        beside[(num_rows, triton.cdiv(out_TY.shape[1], JOINTLY))](
            made_TD, squares_T, out_TY, dim=dim, rank=rank, size=size, wide=JOINTLY, **self._overlap
        )
        return out_TY

    def normed_late(self, total_TY: Tensor, norm: LateNorm, dim: int) -> Tensor:
        num_rows, width = total_TY.shape
        out_TD, told = total_TY.new_empty(num_rows, dim), width - dim
        normed_late[(num_rows, triton.cdiv(dim, JOINTLY))](
            total_TY, out_TD, norm.numbers, norm.eps, dim=dim, size=told // LATE_COLUMNS, wide=JOINTLY,
            wide_told=triton.next_power_of_2(told), **self._overlap,
        )  # fmt: skip
        return out_TD

    def gate(self, gate_up_TC: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        (num_rows, channels), kind = gate_up_TC.shape, self._shape.gate
        channels //= 1 if kind in ALONE else 2
        out_TC, programs = gate_up_TC.new_empty(num_rows, channels), (num_rows, triton.cdiv(channels, GATE_WIDTH))
        given, how = (gate_up_TC, out_TC, channels), {"wide": GATE_WIDTH, **self._overlap}
        if kind in ALONE:
            kernels.act[programs](*given, *(numbers or NO_BENDS), kind=kind, **how)
        else:
            kernels.gate[programs](*given, *(numbers or (0.0,)), kind="limited" if numbers else kind, **how)
        return out_TC

    def gated(self, gate_up: Linear, x_TD: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        """With a limit by a kernel of its own, for few layers have one."""
        if isinstance(gate_up, TriedProduct) and self._shape.gate not in ALONE and not numbers:
            return gate_up.gated(x_TD, self._shape.gate, self.gate)
        return self.gate(gate_up(x_TD), numbers)

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
        for sight in sorted(self._shape.sights, key=lambda sight: sight.window or 0):  # the longest counts
            num_slots = (self._store.num_recent if sight.is_windowed else 0) or self._store.num_slots
            table = Table(num_slots, sight, self._store.num_positions, device, most_rows)
            self._tables[sight.heads, sight.is_windowed] = table
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
        heads, table = layer.sight.heads, self._tables[layer.sight.heads, layer.sight.is_windowed]
        q_TX, kept = qkv_TX.new_empty(len(qkv_TX), heads.num * heads.dim), 1 if self._shape.keys_alone else 2
        num_written = heads.num_kv * kept if layer.kept_by == layer.index else 0
        place[(len(qkv_TX), heads.num + num_written)](
            qkv_TX, table.there, q_TX, *cells, num_slots=keys.num_slots, most_rows=table.most_rows,
            num_heads=heads.num, dim=heads.dim, wide=triton.next_power_of_2(heads.dim), small=small,
            **self._placing(layer, qkv_TX), **self._overlap,
        )  # fmt: skip
        return q_TX

    def _placing(self, layer: Layer | None, x: Tensor) -> dict[str, Any]:
        """What kernels ask for who norm and turn what the layer's qkv made, or do not; x: of what there is none."""
        if layer is None:
            no_tensors = dict.fromkeys(("q_weight_at", "k_weight_at", "v_weight_at", "cos_at", "sin_at", "gains_at"), x)
            never = {"normed": "", "values_normed": "", "turned": False, "grown": False}
            return {**no_tensors, **never, "eps": 0.0, "num_kv_heads": 0, "num_lines": 0}
        norms, heads = (layer.q_norm, layer.k_norm, layer.v_norm), layer.sight.heads
        rope = self._ropes[layer.rope or 0] if self._ropes else None  # of a model without, kernels read nothing
        cos, sin, gains = (x, x, None) if rope is None else (rope.cos_PE, rope.sin_PE, rope.gains_P)
        some = next((norm for norm in norms if norm is not None), None)  # kernels ask for the types of one of them
        absent, eps = (x, 0.0) if some is None else (some.weight, some.eps)
        q_weight, k_weight, v_weight = [absent if norm is None else norm.weight for norm in norms]
        return {
            "q_weight_at": q_weight, "k_weight_at": k_weight, "v_weight_at": v_weight, "eps": eps,
            "cos_at": cos, "sin_at": sin, "gains_at": cos if gains is None else gains, "num_kv_heads": heads.num_kv,
            "num_lines": x.shape[1] // heads.dim,
            "normed": "" if layer.q_norm is None else "behind" if layer.turns_first else "before",
            "values_normed": "" if layer.v_norm is None else "before", "turned": layer.rope is not None,
            "grown": gains is not None,
        }  # fmt: skip


def _weight(norm: Norm | None, x: Tensor) -> tuple[Tensor, float]:
    """What kernels take of a norm; of none, what they do not read."""
    return (x, 0.0) if norm is None else (norm.weight, norm.eps)


def _bias(norm: Norm | None, x: Tensor) -> Tensor:
    """Likewise."""
    return x if norm is None else norm.weight if norm.bias is None else norm.bias


def _kind(norm: Norm | None) -> str:
    if norm is None or not norm.centred:
        return "" if norm is None else "rms"
    return "centred" if norm.bias is None else "biased"


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
