"""The one decoder: a shard of a Llama-like transformer whose two all-reduces per layer stand in plain sight.

Knows rows and slots; must not know drafts, sequences' fates or which architecture it is (that is data, in its layers).

Shapes: T rows of the round, D hidden, H query heads and G kv heads of this shard, E head dim, C mlp channels of this
shard, V vocabulary rows of this shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tpspec.cache.store import as_slots
from tpspec.comm.communicator import Purpose
from tpspec.model.attention import Folding, Layout, View, fused, stable
from tpspec.model.rope import Rope, turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.cache.store import KVStore, Slots
    from tpspec.comm.communicator import Communicator
    from tpspec.model.batch import Span
    from tpspec.model.linear import Linear


class Norm:
    """RMSNorm over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._shape = weight, eps, tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of one shard. qkv: [D] -> [(H + 2G) E]; gate_up: [D] -> [2C]; o and down give partial sums."""

    index: int
    attention_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    rope: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class Round:
    """The rows of one forward, ready for every layer."""

    turns: tuple[Tensor, Tensor]
    slots: Slots
    views: dict[int | None, list[View]]
    num_rows: int


class Decoder:
    """embed -> layers -> norm -> head, over this rank's heads, channels and vocabulary rows.

    Every rank of `comm` runs the same spans. fixed_rows: every forward runs exactly that many rows (deterministic).
    """

    def __init__(
        self,
        *,
        embedding_VD: Tensor,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        rope: Rope,
        kv_of: Sequence[int],
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        comm: Communicator,
        store: KVStore,
        fixed_rows: int | None = None,
    ) -> None:
        self.embedding_VD, self.layers, self.norm, self.head, self.rope = embedding_VD, layers, norm, head, rope
        self.num_heads, self.head_dim, self.dtype, self.device = len(kv_of), head_dim, dtype, device
        self.comm, self.store, self.fixed_rows = comm, store, fixed_rows
        self.folding = Folding.of(kv_of, device)
        self.attend = fused if fixed_rows is None else stable
        self.layout = Layout(
            fold_width=self.folding.width,
            num_slots=store.keys_LGSE[0].shape[1],
            mask_dtype=dtype if fixed_rows is None else torch.float32,
            device=device,
            fixed_rows=fixed_rows,
        )
        self.windows = {layer.window for layer in layers}

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Logits of the last num_logits rows of every span, in order: [sum of num_logits, V] of this shard.

        Keys and values of all rows are written to the spans' slots.
        """
        round = self._prepare(spans)
        x_TD = self._embed(spans)
        for layer in self.layers:
            x_TD = x_TD + self.comm.all_reduce(self._attention(layer, x_TD, round), Purpose.attention)
            x_TD = x_TD + self.comm.all_reduce(self._mlp(layer, x_TD), Purpose.mlp)
        return self._logits(spans, x_TD)

    def _attention(self, layer: Layer, x_TD: Tensor, round: Round) -> Tensor:
        """This shard's heads' part of the sum, [T, D]."""
        H, G = self.num_heads, self.folding.num_kv_heads
        qkv_TXE = layer.qkv(layer.attention_norm(x_TD)).view(x_TD.shape[0], H + 2 * G, self.head_dim)
        qk_TXE, v_TGE = qkv_TXE[:, : H + G], qkv_TXE[: round.num_rows, H + G :]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk_TXE = torch.cat([layer.q_norm(qk_TXE[:, :H]), layer.k_norm(qk_TXE[:, H:])], 1)
        if layer.rope:
            qk_TXE = turn(qk_TXE, round.turns)
        self.store.write(layer.index, round.slots, qk_TXE[: round.num_rows, H:], v_TGE)
        return layer.o(self._attend(layer, qk_TXE[:, :H], round))

    def _attend(self, layer: Layer, q_THE: Tensor, round: Round) -> Tensor:
        keys, values = self.store.keys_LGSE[layer.index], self.store.values_LGSE[layer.index]
        parts = [view.attend(self.attend, q_THE, keys, values, self.folding) for view in round.views[layer.window]]
        if self._padding(round.num_rows):
            parts.append(parts[0].new_zeros(self._padding(round.num_rows), parts[0].shape[1]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mlp(self, layer: Layer, x_TD: Tensor) -> Tensor:
        """This shard's channels' part of the sum, [T, D]."""
        gate_TC, up_TC = layer.gate_up(layer.mlp_norm(x_TD)).chunk(2, -1)
        return layer.down(F.silu(gate_TC) * up_TC)

    def _prepare(self, spans: Sequence[Span]) -> Round:
        positions = [position for span in spans for position in span.positions()]
        positions += [0] * self._padding(len(positions))
        firsts = [0]
        for span in spans:
            firsts.append(firsts[-1] + len(span.tokens))
        return Round(
            turns=self.rope.at(torch.tensor(positions, device=self.device)),
            slots=as_slots([slot for span in spans for slot in span.own_slots()], self.device),
            views={
                window: [self.layout.view(span, first, window) for span, first in zip(spans, firsts, strict=False)]
                for window in self.windows
            },
            num_rows=firsts[-1],
        )

    def _embed(self, spans: Sequence[Span]) -> Tensor:
        """Rows of the table, which stays in host memory: no collective, no card memory."""
        ids = torch.tensor([token for span in spans for token in span.tokens])
        x_TD = self.embedding_VD[ids].to(self.device, self.dtype)
        padding = self._padding(len(ids))
        return F.pad(x_TD, (0, 0, 0, padding)) if padding else x_TD

    def _logits(self, spans: Sequence[Span], x_TD: Tensor) -> Tensor:
        if self.fixed_rows is not None:  # all rows go through the head: its row count is part of the promise
            return self.head(self.norm(x_TD))[_logit_rows(spans)]
        if sum(span.num_logits for span in spans) < x_TD.shape[0]:
            x_TD = x_TD[_logit_rows(spans)]
        return self.head(self.norm(x_TD))

    def _padding(self, num_rows: int) -> int:
        return 0 if self.fixed_rows is None else self.fixed_rows - num_rows


def _logit_rows(spans: Sequence[Span]) -> Tensor:
    rows: list[int] = []
    first = 0
    for span in spans:
        first += len(span.tokens)
        rows += range(first - span.num_logits, first)
    return torch.tensor(rows, dtype=torch.long)
