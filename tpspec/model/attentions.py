"""Builds the attention of a shard's layers from a checkpoint: which slices of which matrices, for which heads.

How these are read is matrices.py's matter. Must not know the other half of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpspec.model.gates import HeadGate
from tpspec.model.joint_norm import Columns, Others
from tpspec.model.keeping import Keeper
from tpspec.model.latent import KEY_NORM, QUERY_NORM, Reduced, around, turned_last
from tpspec.model.norms import Norms
from tpspec.model.places import Place, below, numbers_of, rows_of
from tpspec.model.short_values import Cut, Filled
from tpspec.model.sight import Heads, Sight
from tpspec.published.latent import LATENT, MADE, REDUCED

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.joint_norm import JointNorm
    from tpspec.model.layer_spec import LayerSpec
    from tpspec.model.linear import Linear
    from tpspec.model.matrices import Matrices
    from tpspec.model.norm import Norm
    from tpspec.model.spec import ModelSpec
    from tpspec.published.latent import Latent
    from tpspec.published.shape import ModelShape
    from tpspec.topology.shards import Shard


@dataclass(frozen=True, slots=True)
class Attentions:
    """Of one shard of one checkpoint. at: what the names of a layer's attention begin with. replicates: what a norm of
    all heads is of, which ranks tell each other otherwise. width: numbers of what attention reads; 0: the hidden
    state's."""

    spec: ModelSpec
    shard: Shard
    matrices: Matrices
    replicates: bool = False
    width: int = 0

    @property
    def shape(self) -> ModelShape:
        return self.spec.shape

    @property
    def norms(self) -> Norms:
        return Norms(self.spec, self.matrices)

    def sight(self, layer: LayerSpec) -> Sight:
        group = layer.num_heads // layer.num_kv_heads
        return Sight(Heads.of(self._heads(layer), group, layer.head_dim), layer.window, layer.chunked)

    def _heads(self, layer: LayerSpec) -> range:
        return self.shard.global_heads if layer.is_global else self.shard.heads

    def _kv_heads(self, layer: LayerSpec) -> range:
        return self.shard.global_kv_heads if layer.is_global else self.shard.kv_heads

    def sinks(self, at: str, layer: LayerSpec) -> Tensor | None:
        usual = self.shape.usual
        if usual.sinks is None or not (usual.sinks_everywhere or layer.window):
            return None
        return self.matrices.wide(at + usual.sinks, (layer.num_heads,), self._heads(layer))

    def products(self, at: str, layer: LayerSpec) -> tuple[Linear, Linear]:
        """What stands before it, and behind it."""
        if self.shape.latent is not None:
            return self._latent_attention(at, self.shape.latent)
        size = self.shape.values or layer.head_dim
        qkv = self._qkv(at, layer)
        o = self._o(at, layer.num_heads * size, numbers_of(self._heads(layer), size))
        if not self.shape.values:
            return qkv, o
        filled = Filled(qkv, len(self._kv_heads(layer)), size, layer.head_dim, self.spec.value_scale)
        return filled, Cut(o, size, layer.head_dim)

    def _latent_attention(self, at: str, latent: Latent) -> tuple[Linear, Linear]:
        heads, count, alternate = self.shard.heads, self.shape.num_heads, self.spec.alternate_rope
        order, key_order = (
            turned_last(left, latent.turned, alternate=alternate) for left in (latent.plain, latent.rank)
        )
        keys = self._rows(at + LATENT, range(latent.cached), latent.cached, key_order)
        of_heads, size = numbers_of(heads, latent.head_dim), count * latent.head_dim
        queries, reduced = self._rows(at + latent.query_name, of_heads, size, order), None
        if latent.queries is not None:
            queries = replace(queries, num_inputs=latent.queries, columns=range(latent.queries))
            product = self.matrices.column_parallel([queries], biased=False)
            reduced = Reduced(self.norms.of(at + QUERY_NORM, latent.queries), product)
            queries = self._rows(at + REDUCED, range(latent.queries), latent.queries)
        made = Place(at + MADE, count * latent.made, latent.rank, numbers_of(heads, latent.made), range(latent.rank))
        self.matrices.check_biases([made], biased=False)
        return around(
            latent,
            down=self.matrices.column_parallel([queries, keys], biased=False),
            reduced=reduced,
            norm=self.norms.of(at + KEY_NORM, latent.rank),
            made_XL=self.matrices.plain(made).to(self.matrices.device, self.matrices.dtype),
            out=self._o(at, count * latent.values, numbers_of(heads, latent.values)),
        )

    def _qkv(self, at: str, layer: LayerSpec) -> Linear:
        return self.matrices.column_parallel(below(self._qkv_places(at, layer)), biased=self.shape.qkv_bias)

    def _qkv_places(self, at: str, layer: LayerSpec) -> list[Place]:
        queries, keys = (numbers_of(heads, layer.head_dim) for heads in (self._heads(layer), self._kv_heads(layer)))
        num_q, num_kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        order, names = layer.head_order, [at + name for name in self.shape.usual.qkv]
        of_queries = self._rows(names[0], queries, num_q, order)
        if self.shape.gating is not None and self.shape.gating.own is None:
            of_queries = self._beside_gate(names[0], tuple(order or range(self.shape.head_dim)))
        size = self.shape.values or layer.head_dim
        of_values = self._rows(names[2], numbers_of(self._kv_heads(layer), size), layer.num_kv_heads * size)
        parts = [of_queries, self._rows(names[1], keys, num_kv, order), of_values]
        return parts[: 1 if layer.kept_by is not None else 2 if layer.reuses_keys else 3]

    def gate(self, at: str, layer: LayerSpec) -> HeadGate | None:
        gating, size = self.shape.gating, layer.head_dim
        if gating is None:
            return None
        if gating.own is None:
            name = at + self.shape.usual.qkv[0]
            part = self._beside_gate(name, tuple(range(size, 2 * size)))
            return HeadGate(self.matrices.column_parallel([part], biased=self.shape.qkv_bias), gating, size)
        each = gating.num_rows(1, size)
        part = self._rows(at + gating.own, numbers_of(self._heads(layer), each), layer.num_heads * each)
        return HeadGate(self.matrices.column_parallel([part], biased=False), gating, size)

    def _beside_gate(self, name: str, wanted: tuple[int, ...]) -> Place:
        """Those numbers of each head, of a matrix that makes a gate as long behind its query."""
        heads, each = self.shard.heads, 2 * self.shape.head_dim
        picked = tuple(head * each + number for head in range(len(heads)) for number in wanted)
        return replace(self._rows(name, numbers_of(heads, each), self.shape.num_heads * each), picked=picked)

    def _o(self, at: str, width: int, columns: range) -> Linear:
        """columns: of so many, what the heads of this shard give."""
        hidden = range(self.shape.hidden)
        name = at + self.shape.usual.out
        place = Place(name, len(hidden), width, hidden, columns, scale=self.spec.scales.out)
        return self.matrices.row_parallel(place, biased=self.shape.o_bias)

    def _rows(self, name: str, rows: range, size: int, head_order: tuple[int, ...] | None = None) -> Place:
        return replace(rows_of(name, rows, size, self.width or self.shape.hidden), head_order=head_order)

    def head_norms(self, at: str, layer: LayerSpec) -> tuple[Norm | None, Norm | None, Norm | None]:
        """Of queries, keys and values, each head alone. A layer that keeps nothing makes queries alone."""
        spec, norms, keeps = self.spec, self.norms, layer.kept_by is None
        has = spec.shape.qk_norm and not spec.shape.usual.joint_norm
        queries = norms.of_heads(f"{at}{spec.shape.norms.queries}.weight", layer) if has else None
        keys = norms.of_heads(f"{at}{spec.shape.norms.keys}.weight", layer) if has and keeps else None
        plain = norms.without_weight(layer.head_dim)
        if spec.plain_norm and (not spec.shape.usual.turns_first or self._is_turned(layer)):
            queries, keys = plain, plain if keeps else None
        return queries, keys, plain if spec.v_norm and keeps else None

    def _is_turned(self, layer: LayerSpec) -> bool:
        return layer.rope is not None and self.spec.ropes[layer.rope].turns

    def joint_norm(self, at: str, layer: LayerSpec) -> JointNorm | None:
        if not self.shape.usual.joint_norm:
            return None
        return self.norms.joint(at, layer, self.shard, self._others(at, layer) if self.replicates else None)

    def _others(self, at: str, layer: LayerSpec) -> Others | None:
        """None where all heads are here."""
        names, dim = self.shape.usual.qkv, layer.head_dim
        totals = layer.num_heads, layer.num_kv_heads
        queries, keys = (
            [self._rows(at + name, numbers_of(heads, dim), total * dim) for heads in _beside(here, total)]
            for name, here, total in zip(names, (self._heads(layer), self._kv_heads(layer)), totals, strict=False)
        )
        if not queries:
            return None
        num_queries, num_keys = (sum(place.num_rows for place in places) for places in (queries, keys))
        product = self.matrices.column_parallel([*queries, *keys], biased=self.shape.qkv_bias)
        return Others(product, Columns(num_queries, range(num_queries, num_queries + num_keys)))

    def keeper(self, index: int) -> Keeper:
        """Of a layer that keeps keys and values of heads."""
        spec, layer, before = self.spec, self.spec.layers[index], f"model.layers.{index}."
        at = f"{before}{spec.shape.usual.attention}."
        _, *parts = self._qkv_places(at, layer)
        _, k_norm, v_norm = self.head_norms(at, layer)
        return Keeper(
            sight=self.sight(layer),
            norm=self.norms.of_rows(f"{before}{spec.shape.norms.attention}.weight"),
            kv=self.matrices.column_parallel(parts, biased=spec.shape.qkv_bias),
            k_norm=k_norm,
            v_norm=v_norm,
            rope=layer.rope,
            turns_first=spec.shape.usual.turns_first,
        )


def _beside(here: range, total: int) -> list[range]:
    """Heads before and behind those that are here."""
    return [heads for heads in (range(here.start), range(here.stop, total)) if heads]
