"""Builds the norms of a checkpoint, as its architecture has them. How tensors are read is matrices.py's matter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpspec.model.joint_norm import Columns, JointNorm
from tpspec.model.norm import Norm
from tpspec.published.places import numbers_of

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.joint_norm import Others
    from tpspec.model.layer_spec import LayerSpec
    from tpspec.model.matrices import Matrices
    from tpspec.model.spec import ModelSpec
    from tpspec.topology.shards import Shard


@dataclass(frozen=True, slots=True)
class Norms:
    """Of one checkpoint."""

    spec: ModelSpec
    matrices: Matrices

    def of(self, name: str, size: int) -> Norm:
        if not self.spec.norms_weighed:
            return self.without_weight(size)
        weight = self.matrices.wide(name, (size,))
        return Norm(weight + 1 if self.spec.adds_one(name) else weight, self.spec.eps)

    def without_weight(self, size: int) -> Norm:
        return Norm(torch.ones(size, device=self.matrices.device), self.spec.eps)

    def of_rows(self, name: str) -> Norm:
        """Of the hidden state."""
        bias, size = f"{name.removesuffix('weight')}bias", self.spec.shape.hidden
        bias_D = self.matrices.wide(bias, (size,)) if self.spec.shape.usual.norms_biased else None
        return replace(self.of(name, size), centred=self.spec.centred, bias=bias_D)

    def of_heads(self, name: str, head_dim: int, order: tuple[int, ...] | None) -> Norm:
        """Of each query or key head. order: see LayerSpec.head_order."""
        norm = self.of(name, head_dim)
        return norm if order is None else replace(norm, weight=norm.weight[list(order)])

    def joint(self, at: str, layer: LayerSpec, shard: Shard, others: Others | None) -> JointNorm:
        """at: what the names of a layer's attention begin with. others: queries and keys, where this shard makes them,
        too."""
        shape, heads, kept, order = self.spec.shape, shard.heads, shard.kv_heads, layer.head_order
        group, dim = shape.group, shape.head_dim
        first, end = -(-heads.start // group), -(-heads.stop // group)  # key heads whose first query head is here
        behind = len(heads) - kept.start  # key heads stand behind the queries
        queries = self._of_some(f"{at}{shape.norms.queries}.weight", shape.num_heads, heads, order)
        keys = self._of_some(f"{at}{shape.norms.keys}.weight", shape.num_kv_heads, kept, order)
        return JointNorm(
            weight_N=torch.cat([queries, keys]),
            eps=self.spec.eps,
            own=Columns(len(queries), numbers_of(range(behind + first, behind + end), dim)),
            all_queries=shape.num_heads * dim,
            all_keys=shape.num_kv_heads * dim,
            others=others,
        )

    def _of_some(self, name: str, num_heads: int, heads: range, order: tuple[int, ...] | None) -> Tensor:
        """The weights of some heads."""
        dim = self.spec.shape.head_dim
        weight = self.matrices.wide(name, (num_heads * dim,), numbers_of(heads, dim))
        return weight if order is None else weight.view(-1, dim)[:, list(order)].flatten()
