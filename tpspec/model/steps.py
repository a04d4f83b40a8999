"""What happens between the matrix products of a layer: norm, rope and cache write, attention, gate. Here in torch.

This is the reference, and what runs for many rows on a CPU; compiled.py does the same for a few there, card/steps.py
for few and card/many.py for many on a card.
Knows rows, slots and masks; must not know drafts, ranks or which architecture it is.

Shapes: T rows of the round, D hidden, H query heads and G kv heads of this shard, E head dim, C mlp channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from tpspec.cache.store import as_slots
from tpspec.model import curves
from tpspec.model.attention import Branches, Folding, Layout, View, fused, stable
from tpspec.model.delta_net import Round as StateRound
from tpspec.model.late_norm import beside
from tpspec.model.mlp import GAIN, MOST
from tpspec.model.short_conv import Round as ConvRound
from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.cache.store import KVStore, Slots
    from tpspec.comm.peer import Meeting
    from tpspec.model.attention import Attend
    from tpspec.model.batch import Span
    from tpspec.model.gates import HeadGate
    from tpspec.model.joint_norm import Columns, JointNorm
    from tpspec.model.late_norm import LateNorm
    from tpspec.model.layers import ConvLayer, Layer, LinearLayer, Norm, Shape, Sight
    from tpspec.model.linear import Linear
    from tpspec.model.rope import Rope, Turns


class Steps(Protocol):
    """The steps, over rows that `begin` has made ready. Results may live in memory that the next call reuses."""

    def begin(self, spans: Sequence[Span], num_rows: int) -> Any:
        """The rows of one forward; num_rows counts padding below the last span's."""

    def add_norm(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        norm: Norm | None,
        delta_norm: Norm | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """(scale (x + delta), norm of that), x as it is where there is no delta, and twice the same where there is no
        norm; may overwrite x. delta_norm: of delta, before it is added."""

    def sum_add_norm(
        self,
        x_TD: Tensor,
        partial_TD: Tensor,
        meeting: Meeting,
        norm: Norm | None,
        delta_norm: Norm | None,
        scale: float,
    ) -> tuple[Tensor, Tensor] | None:
        """add_norm of the sum over ranks of their parts, by one kernel for all; None where there is none."""

    def joined(self, halves_TD: Tensor, norms: tuple[Norm, Norm]) -> Tensor:
        """[2 T, D] -> the sum of the halves' norms, [T, D]."""

    def squares(self, made_TX: Tensor, columns: Columns, before_T2: Tensor | None = None) -> Tensor:
        """Sums of those of queries and of keys, [T, 2] in float32; with those before, which it may overwrite."""

    def jointly_normed(self, qkv_TX: Tensor, sums_T2: Tensor, norm: JointNorm) -> Tensor:
        """With those of all ranks; may overwrite them."""

    def attention(self, layer: Layer, qkv_TX: Tensor, round: Any) -> Tensor:
        """Writes the rows' keys and values, if the layer keeps any, then attends: [T, H * E]."""

    def weighed(self, attended_TX: Tensor, gate: HeadGate, x_TD: Tensor) -> Tensor:
        """By the gate of what attention read, [T, H * E]."""

    def linear_attention(
        self,
        layer: LinearLayer,
        mixed_TM: Tensor,
        rates_TH: Tensor,
        gate_TX: Tensor,
        round: Any,
        squares_T: Tensor | None = None,
    ) -> Tensor:
        """What the mixer's `out` reads, [T, H V], of its other products; texts' states go on. squares: of a late norm,
        which is then not made; sums of those of each row's numbers come there, in float32."""

    def convolved(self, layer: ConvLayer, made_TX: Tensor, round: Any) -> Tensor:
        """What the `out` of a short convolution reads, [T, M], of what its `made` gives; what is left goes on."""

    def beside(self, made_TD: Tensor, squares_T: Tensor, rank: int, size: int) -> Tensor:
        """What ranks sum of what is to have a late norm: [T, Y], see late_norm.py."""

    def normed_late(self, total_TY: Tensor, norm: LateNorm, dim: int) -> Tensor:
        """The norm of that sum, [T, D]."""

    def gate(self, gate_up_TC: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        """act(gate) * up, for the act of the shape: [T, 2C] -> [T, C]; of one without a gate act(up), [T, C]. numbers:
        where act is silu, the limit of both, if there is one (limits.py); where it is xielu, its bends (rows.inc)."""

    def gated(self, gate_up: Linear, x_TD: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        """The same of what that product makes of rows: [T, D] -> [T, C]."""

    def slots(self, num_rows: int) -> Tensor | None:
        """Of the round's rows, on a card that knows them alone, below 0 where a row is padding; else None."""


class AddNorm(NamedTuple):
    """What the steps make of a sum over ranks. joined: norms of its halves, which are added then; or None. late: a norm
    that has yet to be made of it; or None."""

    steps: Steps
    x_TD: Tensor
    norm: Norm | None
    delta_norm: Norm | None = None
    scale: float = 1.0
    joined: tuple[Norm, Norm] | None = None
    late: LateNorm | None = None

    def __call__(self, total: Tensor) -> tuple[Tensor, Tensor]:
        if self.late is not None:
            total = self.steps.normed_late(total, self.late, self.x_TD.shape[1])
        if self.joined is not None:
            total = self.steps.joined(total, self.joined)
        return self.steps.add_norm(self.x_TD, total, self.norm, self.delta_norm, self.scale)

    def with_peers(self, x: Tensor, meeting: Meeting) -> tuple[Tensor, Tensor] | None:
        if self.joined is not None or self.late is not None:
            return None
        return self.steps.sum_add_norm(self.x_TD, x, meeting, self.norm, self.delta_norm, self.scale)


class MadeSteps(Steps, Protocol):
    """Steps made for some rows, as few or, on a card, many ones."""

    def fits(self, spans: Sequence[Span], num_rows: int) -> bool:
        """Whether these rows, padding and all, are such."""


class RecordedSteps(MadeSteps, Protocol):
    """Whose launches are the same for every forward of as many rows. `begin` is `write`, `put`, `copy` and
    `sent`, in order."""

    def write(self, spans: Sequence[Span], num_rows: int) -> Any:
        """What changes from forward to forward, but for tokens, into memory that no device reads; returns what `begin`
        does, the same for every forward of as many rows."""

    def put(self) -> None:
        """What was written, where `copy` takes it from."""

    def is_copied_whole(self, spans: Sequence[Span]) -> bool:
        """Whether `copy` takes all that is put of them, or `put` itself asks the device for the rest."""

    def copy(self) -> None:
        """What was put, to where the steps read it."""

    def sent(self) -> None:
        """What was put is copied by what the device has been asked for so far."""

    def left(self) -> None:
        """What was put has been copied."""


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
    keeps some."""

    turns: list[Turns]
    slots: Slots
    recent_slots: Slots
    views: dict[Sight, list[View | Branches]]
    states: StateRound | ConvRound | None
    num_real: int
    num_rows: int


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

    def linear_attention(
        self,
        layer: LinearLayer,
        mixed_TM: Tensor,
        rates_TH: Tensor,
        gate_TX: Tensor,
        round: TorchRound,
        squares_T: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(round.states, StateRound), "a decoder with such layers has a store for them"
        return round.states.answered(layer.mixer, layer.index, mixed_TM, rates_TH, gate_TX, squares_T)

    def convolved(self, layer: ConvLayer, made_TX: Tensor, round: TorchRound) -> Tensor:
        assert isinstance(round.states, ConvRound), "a decoder with such layers has a store for them"
        return round.states.convolved(layer.mixer, layer.index, made_TX)

    def gate(self, gate_up_TC: Tensor, numbers: tuple[float, ...] = ()) -> Tensor:
        if self._shape.gate == "relu2":
            return F.relu(gate_up_TC).square()
        silu, sigmoid = (curves.silu, curves.sigmoid) if self._whole else (F.silu, torch.sigmoid)
        gelu = curves.gelu if self._whole else partial(F.gelu, approximate="tanh")
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

    def _views(self, sight: Sight, spans: Sequence[Span], firsts: Sequence[int]) -> list[View | Branches]:
        """firsts: of each span, its first row."""
        width = self._foldings[sight.heads].width
        return [self._layout.views(span, first, sight, width) for span, first in zip(spans, firsts, strict=False)]

    def _attended(self, layer: Layer, q_THE: Tensor, round: TorchRound) -> Tensor:
        keys, values = self._store.keys[layer.kept_by], self._store.values[layer.kept_by]
        folding, scale = self._foldings[layer.sight.heads], self._shape.score_scale
        parts = [
            view.attend(self._attend, q_THE, keys, values, folding, scale, layer.sinks, self._shape.score_cap)
            for view in round.views[layer.sight]
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
