"""The tensors behind the pages: keys and values of one shard, all layers. Knows slots, not sequences.

Shapes: G kv heads of this shard, S slots (pages x page size), E head dim, T rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

Slots = slice | torch.Tensor  # a slice when the rows' slots follow each other: no index, no copy


class Cells:
    """Keys, or values, of one layer: head-major, so that a contiguous run of slots is one strided view for attention.

    Of 8 bits: codes from -127 to 127, and a float32 scale for each head of each slot.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, small: bool) -> None:
        self._dtype = dtype
        self.numbers_GSE = torch.zeros(shape, dtype=torch.int8 if small else dtype, device=device)
        self.scales_GS = torch.zeros(shape[:2], device=device) if small else None

    @property
    def num_slots(self) -> int:
        return self.numbers_GSE.shape[1]

    def write(self, slots: Slots, x_TGE: Tensor) -> None:
        x_GTE = x_TGE.transpose(0, 1)
        if self.scales_GS is not None:
            scales_GT = x_GTE.abs().amax(2).float() / 127
            scales_GT = torch.where(scales_GT == 0, 1, scales_GT)  # codes know no NaN; a scale does
            self.scales_GS[:, slots] = scales_GT
            x_GTE = (x_GTE / scales_GT[..., None]).round_().to(torch.int8)
        self.numbers_GSE[:, slots] = x_GTE

    def read(self, slots: Slots) -> Tensor:
        """[G, slots, E]"""
        numbers_GSE = self.numbers_GSE[:, slots]
        if self.scales_GS is None:
            return numbers_GSE
        return (numbers_GSE * self.scales_GS[:, slots, None]).to(self._dtype)

    def move(self, source: Tensor, target: Tensor) -> None:
        self.numbers_GSE[:, target] = self.numbers_GSE[:, source]
        if self.scales_GS is not None:
            self.scales_GS[:, target] = self.scales_GS[:, source]


class Kept(NamedTuple):
    """Of a token by a layer. is_recent: in slots of their own, where there are some, that only the last tokens have.
    index_dim: of its key in the layer's index; 0: there is none."""

    num_heads: int
    head_dim: int
    is_recent: bool = False
    index_dim: int = 0


class KVStore:
    """Keys and values of the layers that keep some, and keys of their indexes.

    small: in 8 bits, whatever the dtype they are written and read in. num_recent: slots of the layers that keep the
    last tokens, beside the num_slots that the others have; 0: they have those too. keys_alone: keys are their own
    values. num_positions: of a text at most; None: as many as there are slots.
    """

    def __init__(
        self,
        kept: Mapping[int, Kept],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        small: bool = False,
        num_recent: int = 0,
        keys_alone: bool = False,
        num_positions: int | None = None,
    ) -> None:
        self.recent = frozenset(layer for layer, of in kept.items() if of.is_recent and num_recent)
        self._whole = kept.keys() - self.recent

        def cells() -> dict[int, Cells]:
            counts = {layer: num_recent if layer in self.recent else num_slots for layer in kept}
            shapes = {layer: (of.num_heads, counts[layer], of.head_dim) for layer, of in kept.items()}
            return {layer: Cells(shape, dtype, device, small=small) for layer, shape in shapes.items()}

        self.keys = cells()
        self.values = self.keys if keys_alone else cells()
        indexed = {layer: of.index_dim for layer, of in kept.items() if of.index_dim}
        self.indexes = {
            layer: Cells((1, num_slots, size), dtype, device, small=small) for layer, size in indexed.items()
        }
        self._keys_alone = keys_alone
        self.num_slots, self.num_recent = num_slots, num_recent
        self.num_positions = num_slots if num_positions is None else min(num_slots, num_positions)
        self.device = device

    def positions_of(self, longest: int | None) -> int:
        """Of a text of a model that was made for so long ones; None: for any."""
        return self.num_positions if longest is None else min(longest, self.num_positions)

    @property
    def cells(self) -> list[Cells]:
        """All, each once."""
        values = [] if self._keys_alone else self.values.values()
        return [*self.keys.values(), *values, *self.indexes.values()]

    def write(self, layer: int, slots: Slots, k_TGE: Tensor, v_TGE: Tensor) -> None:
        """v: not looked at where keys are their own values."""
        self.keys[layer].write(slots, k_TGE)
        if not self._keys_alone:
            self.values[layer].write(slots, v_TGE)

    def move(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        recent_sources: Sequence[int] = (),
        recent_targets: Sequence[int] = (),
    ) -> None:
        """Copy slots to slots in every layer, the last two in the layers `recent`; all sources are read before any
        target is written."""
        self._move(self._whole, sources, targets)
        self._move(self.recent, recent_sources, recent_targets)

    def _move(self, layers: Collection[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        if not sources:
            return
        source, target = sent(sources, self.device), sent(targets, self.device)
        for layer in layers:
            self.keys[layer].move(source, target)
            if not self._keys_alone:
                self.values[layer].move(source, target)
            if layer in self.indexes:
                self.indexes[layer].move(source, target)


def as_slots(numbers: Sequence[int], device: torch.device) -> Slots:
    """Slot numbers as a slice when they are consecutive, else as an index tensor."""
    first, count = numbers[0], len(numbers)
    if numbers[-1] - first == count - 1 and all(numbers[i] == first + i for i in range(count)):
        return slice(first, first + count)
    return sent(numbers, device)


def within(slots: Slots, places: torch.Tensor) -> torch.Tensor:
    """Of slots those at some places."""
    return places + slots.start if isinstance(slots, slice) else slots[places]
