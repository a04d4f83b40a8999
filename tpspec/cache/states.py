"""What layers of linear attention keep of each text: a state of fixed size, and the rows behind it; and those with a
short convolution, whose state is but the rows before. Whose is where, is seats.py's matter.

A state cannot give a token up again, so it never takes one in that may have to go. It stands before the last token that
was certain when its text was last computed; the inputs of that token and of all drafts behind it are left beside it,
and the next forward is told which of those the text has kept (`model/batch.py`: Carried). So a text goes back, and down
any path of a tree, without a copy of a state.

Shapes: X numbers of a row, H heads, K and V of a key and a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from tpspec.model.batch import StateCopy


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Of one layer. num_heads: none where rows are all that is kept. num_before: rows before those that are left, which
    the first of them sees."""

    num_heads: int
    key_dim: int
    value_dim: int
    row: int
    num_before: int


@dataclass(frozen=True, slots=True)
class State:
    """Of one layer, of each text: in its slot, the last slot being that of texts of which nothing is kept.

    states: [slots, H, K, V], float32. left: [slots, num_before + num_left, X].
    """

    states: torch.Tensor
    left: torch.Tensor


def kept_slots(num_states: int, num_kept: int) -> range:
    """Of beginnings: behind those of texts and of what is not kept."""
    return range(num_states + 1, num_states + 1 + num_kept)


class StateStore:
    """num_left: rows of a text's last forward, at most, from the last certain one on.

    num_kept: states of beginnings, in `kept_slots`, which are for copies only. kept_left: rows beside each.
    """

    def __init__(
        self,
        layers: Collection[int],
        sizes: StateSizes,
        num_states: int,
        num_left: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_kept: int = 0,
        kept_left: int = 0,
    ) -> None:
        def empty(num_slots: int, num_rows: int) -> State:
            states = torch.zeros(num_slots, sizes.num_heads, sizes.key_dim, sizes.value_dim, device=device)
            return State(states, torch.zeros(num_slots, num_rows, sizes.row, dtype=dtype, device=device))

        self.num_states, self.num_left, self.sizes = num_states, num_left, sizes
        self._of = {layer: empty(num_states + 1, self.length) for layer in layers}
        self._kept_slots = kept_slots(num_states, num_kept)
        self._kept = {layer: empty(num_kept, sizes.num_before + kept_left) for layer in layers}

    @property
    def length(self) -> int:
        """Rows that are left in a slot, with those before them."""
        return self.sizes.num_before + self.num_left

    @property
    def num_rows(self) -> int:
        """Rows that are left, in all slots of a layer."""
        return (self.num_states + 1) * self.length

    def of(self, layer: int) -> State:
        return self._of[layer]

    def copy(self, copies: Iterable[StateCopy]) -> None:
        """In order, in every layer."""
        for one in copies:
            stop = self.sizes.num_before + one.num_left
            for layer in self._of:
                source, target = self._slot(layer, one.source), self._slot(layer, one.target)
                target.states.copy_(source.states)
                target.left[:stop].copy_(source.left[:stop])

    def _slot(self, layer: int, slot: int) -> State:
        """Of one text or beginning: [H, K, V] and [rows, X]."""
        is_kept = slot in self._kept_slots
        held, at = (self._kept[layer], slot - self._kept_slots.start) if is_kept else (self._of[layer], slot)
        return State(held.states[at], held.left[at])
