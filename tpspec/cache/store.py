"""The tensors behind the pages: keys and values of one shard, all layers. Knows slots, not sequences.

Shapes: L layers, G kv heads of this shard, S slots (pages x page size), E head dim, T rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Slots = slice | torch.Tensor  # a slice when the rows' slots follow each other: no index, no copy


class KVStore:
    """Keys and values, head-major so that a contiguous run of slots is one strided view for attention."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        num_slots: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_kv_heads, num_slots, head_dim)
        self.keys_LGSE = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values_LGSE = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.num_slots, self.device = num_slots, device

    def write(self, layer: int, slots: Slots, k_TGE: Tensor, v_TGE: Tensor) -> None:
        self.keys_LGSE[layer][:, slots] = k_TGE.transpose(0, 1)
        self.values_LGSE[layer][:, slots] = v_TGE.transpose(0, 1)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots to slots in every layer; all sources are read before any target is written."""
        if not sources:
            return
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for tensor_GSE in (*self.keys_LGSE, *self.values_LGSE):
            tensor_GSE[:, target] = tensor_GSE[:, source]


def as_slots(numbers: Sequence[int], device: torch.device) -> Slots:
    """Slot numbers as a slice when they are consecutive, else as an index tensor."""
    first, count = numbers[0], len(numbers)
    if numbers[-1] - first == count - 1 and all(numbers[i] == first + i for i in range(count)):
        return slice(first, first + count)
    return torch.tensor(numbers, device=device)
