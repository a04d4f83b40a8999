"""What builds the parts of a shard's layers has at hand, whichever parts those are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.model.norms import Norms

if TYPE_CHECKING:
    from tpspec.model.matrices import Matrices
    from tpspec.model.spec import ModelSpec
    from tpspec.published.shape import ModelShape
    from tpspec.topology.shards import Shard


@dataclass(frozen=True, slots=True)
class Builder:
    """Of one shard of one checkpoint."""

    spec: ModelSpec
    shard: Shard
    matrices: Matrices

    @property
    def shape(self) -> ModelShape:
        return self.spec.shape

    @property
    def norms(self) -> Norms:
        return Norms(self.spec, self.matrices)
