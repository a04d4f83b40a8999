"""The steps between the matrix products of a layer, in torch: the reference, and what runs for many rows on a CPU.

Knows rows, slots and masks; see steps.py.

Shapes: T rows of the round, D hidden, H query heads and G kv heads of this shard, E head dim, C mlp channels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from tpspec.cache.store import as_slots
from tpspec.model import curves
from tpspec.model.attention import Branches, Folding, Layout, fused, stable
from tpspec.model.delta_net import Round as StateRound
from tpspec.model.late_norm import beside
from tpspec.model.mlp import GAIN, MOST
from tpspec.model.picked import Choosing
from tpspec.model.short_conv import Round as ConvRound
from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.cache.store import KVStore, Slots
    from tpspec.model.attention import Attend, Seen
    from tpspec.model.batch import Span
    from tpspec.model.delta_net import Made
    from tpspec.model.gates import HeadGate
    from tpspec.model.indexer import Indexer, Read
    from tpspec.model.joint_norm import Columns, JointNorm
    from tpspec.model.late_norm import LateNorm
    from tpspec.model.layers import ConvLayer, Layer, LinearLayer
    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm
    from tpspec.model.rope import Rope, Turns
    from tpspec.model.sight import Shape, Sight


class Curves(NamedTuple):
    """What gates go through."""

    silu: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor], Tensor]
    sigmoid: Callable[[Tensor], Tensor]


FASTEST = Curves(F.silu, partial(F.gelu, approximate="tanh"), torch.sigmoid)
EVEN = Curves(curves.silu, curves.gelu, curves.sigmoid)  # wherever in a tensor a number stands


class WithoutKernels:
    """Those of `Steps` for which nothing but a card has kernels of its own, in torch."""

    def sum_add_norm(self, *_: object) -> None:
        return None

    def joined(self, halves_TD: Tensor, norms: tuple[Norm, Norm]) -> Tensor:
        one_TD, other_TD = halves_TD.chunk(2)
        return norms[0](one_TD) + norms[1](other_TD)

    def squares(self, made_TX: Tensor, columns: Columns, before_T2: Tensor | None = None) -> Tensor:
        sums_T2 = columns.squares(made_TX)
        return sums_T2 if before_T2 is None else before_T2 + sums_T2

    def jointly_normed(self, qkv_TX: Tensor, sums_T2: Tensor, norm: JointNorm) -> Tensor:
        return norm.normed(qkv_TX, sums_T2)

    def weighed(self, attended_TX: Tensor, gate: HeadGate, x_TD: Tensor) -> Tensor:
        return attended_TX * gate(x_TD)

    def beside(self, made_TD: Tensor, squares_T: Tensor, rank: int, size: int) -> Tensor:
        return beside(made_TD, squares_T, rank, size)

    def normed_late(self, total_TY: Tensor, norm: LateNorm, dim: int) -> Tensor:
        return norm.normed(total_TY, dim)

    def slots(self, num_rows: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class TorchRound:
    """The rows of one forward, ready for every layer. recent_slots: of layers with a window. states: of a model that
    keeps some. chosen: what rows attend to of the keys that an index chooses among; empty where they attend to all."""

    turns: list[Turns]
    slots: Slots
    recent_slots: Slots
    views: dict[Sight, list[Seen]]
    states: StateRound | ConvRound | None
    num_real: int
    num_rows: int
    chosen: list[Seen] = field(default_factory=list)


class TorchSteps(WithoutKernels):
    """ropes: of the model. fixed_rows: every forward has so many rows, and a row's bits may not depend on the others
    (deterministic). attend: in place of torch's fused kernel. states: of layers that
    keep some.
    """

    def __init__(
        self,
        shape: Shape,
        ropes: Sequence[Rope],
        store: KVStore,
        fixed_rows: int | None,
        attend: Attend = fused,
        states: StateStore | None = None,
    ) -> None:
        self._shape, self._ropes, self._store = shape, ropes, store
        self._states, self._whole = states, fixed_rows is not None
        self._curves = EVEN if self._whole else FASTEST
        self._foldings = {heads: Folding.of(heads.kv_of, shape.device) for heads in shape.heads}
        self._attend = attend if fixed_rows is None else stable
        self._layout = Layout(
            mask_dtype=shape.dtype if fixed_rows is None else torch.float32,
            device=shape.device,
            fixed_rows=fixed_rows,
        )

    def begin(self, spans: Sequence[Span], num_rows: int) -> TorchRound:
        positions = [position for span in spans for position in span.positions()]
        firsts = [0]
        for span in spans:
            firsts.append(firsts[-1] + len(span.tokens))
        padded_T = sent(positions + [0] * (num_rows - len(positions)), self._shape.device)
        slots = self._slots(spans, windowed=False)
        return TorchRound(
            turns=[rope.at(padded_T) for rope in self._ropes],
            slots=slots,
            recent_slots=self._slots(spans, windowed=True) if self._store.recent else slots,
            views={sight: self._views(sight, spans, firsts) for sight in self._shape.sights},
            states=None if self._states is None else self._state_round(self._states, spans, num_rows),
            num_real=len(positions),
            num_rows=num_rows,
        )

    def add_norm(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        norm: Norm | None,
        delta_norm: Norm | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        if delta_TD is not None:
            x_TD = x_TD + (delta_TD if delta_norm is None else delta_norm(delta_TD))
            x_TD = x_TD if scale == 1 else x_TD * scale
        return x_TD, x_TD if norm is None else norm(x_TD)

    def choose(self, layer: Layer, indexer: Indexer, read: Read, round: TorchRound) -> None:
        turns, views, index = round.turns[indexer.rope], round.views[layer.sight], self._store.indexes[layer.index]
        index.write(round.slots, indexer.keys(read.key_TI, turns)[: round.num_real])
        round.chosen.clear()
        if any(isinstance(view, Choosing | Branches) for view in views):
            asked = indexer.asked(read, turns)
            round.chosen.extend(view.chosen(asked, index) for view in views)

    def attention(self, layer: Layer, qkv_TX: Tensor, round: TorchRound) -> Tensor:
        H, G, E = layer.sight.heads.num, layer.sight.heads.num_kv, layer.sight.heads.dim
        qkv_TXE = qkv_TX.view(round.num_rows, -1, E)
        qk_TXE, v_TGE = qkv_TXE[:, : H + G], qkv_TXE[: round.num_real, -G:]
        if layer.v_norm is not None:
            v_TGE = layer.v_norm(v_TGE)
        qk_TXE = qk_TXE if layer.turns_first else _normed_heads(layer, qk_TXE)
        if layer.rope is not None:
            qk_TXE = round.turns[layer.rope].turn(qk_TXE)
        qk_TXE = _normed_heads(layer, qk_TXE) if layer.turns_first else qk_TXE
        slots = round.recent_slots if layer.sight.is_windowed else round.slots
        if layer.kept_by == layer.index:
            self._store.write(layer.index, slots, qk_TXE[: round.num_real, H:], v_TGE)
        q_THE = qk_TXE[:, :H]
        return self._attended(layer, q_THE if layer.rope is None else round.turns[layer.rope].grown(q_THE), round)

    def linear_attention(self, layer: LinearLayer, made: Made, round: TorchRound) -> Tensor:
        assert isinstance(round.states, StateRound), "a decoder with such layers has a store for them"
        return round.states.answered(layer.mixer, layer.index, made)

    def convolved(self, layer: ConvLayer, made_TX: Tensor, round: TorchRound) -> Tensor:
        assert isinstance(round.states, ConvRound), "a decoder with such layers has a store for them"
        return round.states.convolved(layer.mixer, layer.index, made_TX)

    def gate(self, gate_up_TC: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        if self._shape.gate == "relu2":
            return F.relu(gate_up_TC).square()
        silu, gelu, sigmoid = self._curves
        if self._shape.gate == "gelu_alone":
            return gelu(gate_up_TC)
        if self._shape.gate == "xielu":
            return _xielu(gate_up_TC.float(), *numbers).to(gate_up_TC.dtype)
        gate_TC, up_TC = gate_up_TC.chunk(2, -1)
        if numbers:
            (limit,) = numbers
            return silu(gate_TC).clamp(max=limit) * up_TC.clamp(-limit, limit)
        if self._shape.gate == "clamped":
            gate_TC = gate_TC.clamp(max=MOST)
            return gate_TC * sigmoid(GAIN * gate_TC) * (up_TC.clamp(-MOST, MOST) + 1)
        return (silu if self._shape.gate == "silu" else gelu)(gate_TC) * up_TC

    def gated(self, gate_up: Linear, x_TD: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        return self.gate(gate_up(x_TD), numbers)

    def _state_round(self, store: StateStore, spans: Sequence[Span], num_rows: int) -> StateRound | ConvRound:
        if not store.sizes.num_heads:
            return ConvRound.of(spans, store, num_rows, self._shape.device)
        return StateRound.of(spans, store, num_rows, self._shape.device, whole=self._whole)

    def _slots(self, spans: Sequence[Span], *, windowed: bool) -> Slots:
        slots = [slot for span in spans for slot in span.own_slots(windowed=windowed)]
        return as_slots(slots, self._shape.device)

    def _views(self, sight: Sight, spans: Sequence[Span], firsts: Sequence[int]) -> list[Seen]:
        """firsts: of each span, its first row."""
        width = self._foldings[sight.heads].width
        return [self._layout.views(span, first, sight, width) for span, first in zip(spans, firsts, strict=False)]

    def _attended(self, layer: Layer, q_THE: Tensor, round: TorchRound) -> Tensor:
        keys, values = self._store.keys[layer.kept_by], self._store.values[layer.kept_by]
        folding, scale = self._foldings[layer.sight.heads], self._shape.score_scale
        parts = [
            view.attend(self._attend, q_THE, keys, values, folding, scale, layer.sinks, self._shape.score_cap)
            for view in round.chosen or round.views[layer.sight]
        ]
        if num_padding := round.num_rows - round.num_real:
            parts.append(parts[0].new_zeros(num_padding, parts[0].shape[1]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _normed_heads(layer: Layer, qk_TXE: Tensor) -> Tensor:
    """Of queries, and keys where there are some behind them."""
    if layer.q_norm is None:
        return qk_TXE
    if layer.k_norm is None:
        return layer.q_norm(qk_TXE)
    H = layer.sight.heads.num
    return torch.cat([layer.q_norm(qk_TXE[:, :H]), layer.k_norm(qk_TXE[:, H:])], 1)


def _xielu(x_TC: Tensor, above: float, below: float, slope: float) -> Tensor:
    return torch.where(x_TC > 0, above * x_TC.square(), below * (torch.expm1(x_TC) - x_TC)) + slope * x_TC
