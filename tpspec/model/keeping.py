"""Keys and values of one layer of a model, made once more of what enters the layer: for who attends to them elsewhere.

A shard has those of its own heads alone, and in its own memory; what enters a layer every rank has whole. Knows rows;
must not know who asks.

Shapes: T rows, D hidden, G kv heads, E numbers of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.cache.store import KVStore, Slots
    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm
    from tpspec.model.rope import Rope
    from tpspec.model.sight import Sight


@dataclass(frozen=True, slots=True)
class Keeper:
    """norm: of what enters. kv: [D] -> [2 G E], or [G E] where values are made of what keys are made of. rope: which of
    the model's turns keys, or None. turns_first: see Layer."""

    sight: Sight
    norm: Norm
    kv: Linear
    k_norm: Norm | None
    v_norm: Norm | None
    rope: int | None
    turns_first: bool = False

    def keep(self, x_TD: Tensor, rope: Rope | None, positions_T: Tensor, store: KVStore, at: int, slots: Slots) -> None:
        """Into the slots of layer `at` of a store."""
        heads = self.sight.heads
        kv_TXE = self.kv(self.norm(x_TD)).view(len(x_TD), -1, heads.dim)
        k_TGE, v_TGE = kv_TXE[:, : heads.num_kv], kv_TXE[:, -heads.num_kv :]
        if self.k_norm is not None and not self.turns_first:
            k_TGE = self.k_norm(k_TGE)
        k_TGE = k_TGE if rope is None else rope.at(positions_T).turn(k_TGE)
        if self.k_norm is not None and self.turns_first:
            k_TGE = self.k_norm(k_TGE)
        store.write(at, slots, k_TGE, v_TGE if self.v_norm is None else self.v_norm(v_TGE))
