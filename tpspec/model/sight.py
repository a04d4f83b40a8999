"""How rows of a layer see each other, through which heads; and what the steps must know of a shard. Data.

Must not know products, ranks, or which architecture it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from tpspec.model.curves import Curve


class Heads(NamedTuple):
    """Of one layer and shard. kv_of: the local kv head each local query head reads, ascending. dim: numbers of one."""

    kv_of: tuple[int, ...]
    dim: int

    @classmethod
    def of(cls, heads: range, group: int, dim: int) -> Heads:
        """heads: of all query heads those of the shard, so many of which share a kv head."""
        return cls(tuple(head // group - heads.start // group for head in heads), dim)

    @property
    def num(self) -> int:
        return len(self.kv_of)

    @property
    def num_kv(self) -> int:
        return self.kv_of[-1] + 1


class Sight(NamedTuple):
    """How rows of a layer see each other. window: how many last positions a row sees, or None. chunked: those of its
    chunk of so many, up to it. chosen: how many positions a row attends to at most, which an indexer chooses among
    those that it sees; or None."""

    heads: Heads
    window: int | None
    chunked: bool = False
    chosen: int | None = None

    @property
    def is_windowed(self) -> bool:
        return self.window is not None

    def first_seen(self, position: int) -> int:
        """By a row at that position."""
        if self.window is None:
            return 0
        return position - position % self.window if self.chunked else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the steps must know of a shard. sights: of its layers, each once. score_scale: of the products of queries
    and keys. gate: what the gate of an MLP goes through, or what comes up where it has none. keys_alone: keys are their
    own values, and cached once. score_cap: see attention.py; or None.
    """

    sights: frozenset[Sight]
    dtype: torch.dtype
    device: torch.device
    score_scale: float
    gate: Curve
    keys_alone: bool = False
    score_cap: float | None = None

    @property
    def chosen(self) -> int | None:
        """Of the layers whose rows an indexer chooses for, which are all or none."""
        return next((sight.chosen for sight in self.sights), None)

    @property
    def heads(self) -> frozenset[Heads]:
        return frozenset(sight.heads for sight in self.sights)
