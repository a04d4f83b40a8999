"""Builds the attention of a shard's layers from a checkpoint.

Which slices of which matrices these are is topology/mixing.py's matter, how they are read matrices.py's. Must not
know the other half of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpspec.model.builder import Builder
from tpspec.model.gates import HeadGate
from tpspec.model.indexer import KEY_EPS, Indexer
from tpspec.model.joint_norm import Columns, Others
from tpspec.model.keeping import Keeper
from tpspec.model.latent import KEY_NORM, QUERY_NORM, Reduced, around, turned_last
from tpspec.model.layer_spec import halves_apart
from tpspec.model.norm import Norm
from tpspec.model.short_values import Cut, Filled
from tpspec.model.sight import Heads, Sight
from tpspec.published.indexer import MODULE, NORM, WEIGHTS
from tpspec.published.places import rows_of
from tpspec.topology import mixing
from tpspec.topology.shards import of_one_sort

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.joint_norm import JointNorm
    from tpspec.model.layer_spec import LayerSpec
    from tpspec.model.linear import Linear
    from tpspec.published import indexer as published
    from tpspec.published.latent import Latent
    from tpspec.published.places import Fused
    from tpspec.topology.shards import Layers


@dataclass(frozen=True, slots=True)
class Attentions(Builder):
    """Of one shard of one checkpoint. at: what the names of a layer's attention begin with. replicates: what a norm of
    all heads is of, which ranks tell each other otherwise. width: numbers of what attention reads; 0: the hidden
    state's."""

    replicates: bool = False
    width: int = 0

    def sight(self, layer: LayerSpec) -> Sight:
        shape, shard, _ = self._alike(layer)
        chosen = None if self.shape.indexer is None else self.shape.indexer.chosen
        return Sight(Heads.of(shard.heads, shape.group, shape.head_dim), layer.window, layer.chunked, chosen)

    def _alike(self, layer: LayerSpec) -> Layers:
        """Those with such heads."""
        return of_one_sort(self.shape, self.shard, layer.is_global, layer.kept_by is None, layer.chooses)

    def _product(self, fused: Fused) -> Linear:
        """Of what attention reads."""
        return self.matrices.product(fused.reading(self.width) if self.width else fused)

    def sinks(self, at: str, layer: LayerSpec) -> Tensor | None:
        (shape, shard, _), usual = self._alike(layer), self.shape.usual
        if usual.sinks is None or not (usual.sinks_everywhere or layer.window):
            return None
        return self.matrices.wide(at + usual.sinks, (shape.num_heads,), shard.heads)

    def products(self, at: str, layer: LayerSpec) -> tuple[Linear, Linear]:
        """What stands before it, and behind it."""
        shape, shard, _ = self._alike(layer)
        out = mixing.out(shape, shard, at).scaled(self.spec.scales.out)
        if shape.latent is not None:
            return self._latent_attention(at, layer, shape.latent, out)
        qkv, o = self._product(self._qkv(at, layer)), self.matrices.product(out)
        if not shape.values:
            return qkv, o
        filled = Filled(qkv, len(shard.kv_heads), shape.values, shape.head_dim, self.spec.value_scale)
        return filled, Cut(o, shape.values, shape.head_dim)

    def _latent_attention(self, at: str, layer: LayerSpec, latent: Latent, out: Fused) -> tuple[Linear, Linear]:
        order, key_order = (
            turned_last(left, latent.turned, alternate=self.spec.alternate_rope) for left in (latent.plain, latent.rank)
        )
        shape, shard, _ = self._alike(layer)
        down, *more = mixing.latents(shape, latent, shard, at)
        reduced, indexer = None, shape.indexer
        if latent.queries is not None:
            product = self.matrices.product(more[0].in_heads(order))
            reduced = Reduced(self.norms.of(at + QUERY_NORM, latent.queries), product)
        made = mixing.made(shape, latent, shard, at)
        self.matrices.check_biases(made)
        return around(
            latent,
            down=self._product(down.in_heads(None if more else order, key_order, _index_order(indexer))),
            reduced=reduced,
            norm=self.norms.of(at + KEY_NORM, latent.rank),
            made_XL=self.matrices.plain(made.parts[0]).to(self.matrices.device, self.matrices.dtype),
            out=self.matrices.product(out),
            indexed=0 if indexer is None else indexer.dim,
        )

    def indexer(self, at: str, layer: LayerSpec) -> Indexer | None:
        """None of a layer that does not choose."""
        shape, shard, _ = self._alike(layer)
        if (sizes := shape.indexer) is None or shape.latent is None:
            return None
        *_, queries = mixing.latents(shape, shape.latent, shard, at)
        order, within, matrices = _index_order(sizes), f"{at}{MODULE}.", self.matrices
        assert order is not None, "as there is an index"
        weight, bias = (
            matrices.wide(f"{within}{NORM}.{kind}", (sizes.dim,))[list(order)] for kind in ("weight", "bias")
        )
        weights = rows_of(within + WEIGHTS, range(sizes.num_heads), sizes.num_heads, self.width or shape.hidden)
        return Indexer(
            queries=matrices.product(queries.in_heads(order)),
            norm=Norm(weight, KEY_EPS, centred=True, bias=bias),
            weights_ND=matrices.plain(weights).to(matrices.device, torch.float32)
            * (sizes.num_heads * sizes.dim) ** -0.5,
            rope=len(self.spec.ropes) - 1,
            chosen=sizes.chosen,
        )

    def _qkv(self, at: str, layer: LayerSpec) -> Fused:
        shape, shard, _ = self._alike(layer)
        return mixing.qkv(shape, shard, at).in_heads(layer.head_order, layer.head_order)

    def gate(self, at: str, layer: LayerSpec) -> HeadGate | None:
        shape, shard, _ = self._alike(layer)
        fused = mixing.gate(shape, shard, at)
        if shape.gating is None or fused is None:
            return None
        return HeadGate(self._product(fused), shape.gating, shape.head_dim)

    def head_norms(self, at: str, layer: LayerSpec) -> tuple[Norm | None, Norm | None, Norm | None]:
        """Of queries, keys and values, each head alone. A layer that keeps nothing makes queries alone."""
        spec, norms, keeps = self.spec, self.norms, layer.kept_by is None
        dim, order = self._alike(layer).shape.head_dim, layer.head_order
        has = spec.shape.qk_norm and not spec.shape.usual.joint_norm
        queries = norms.of_heads(f"{at}{spec.shape.norms.queries}.weight", dim, order) if has else None
        keys = norms.of_heads(f"{at}{spec.shape.norms.keys}.weight", dim, order) if has and keeps else None
        plain = norms.without_weight(dim)
        if spec.plain_norm and (not spec.shape.usual.turns_first or self._is_turned(layer)):
            queries, keys = plain, plain if keeps else None
        return queries, keys, plain if spec.v_norm and keeps else None

    def _is_turned(self, layer: LayerSpec) -> bool:
        return layer.rope is not None and self.spec.ropes[layer.rope].turns

    def joint_norm(self, at: str, layer: LayerSpec) -> JointNorm | None:
        if not self.shape.usual.joint_norm:
            return None
        return self.norms.joint(at, layer, self.shard, self._others(at) if self.replicates else None)

    def _others(self, at: str) -> Others | None:
        """None where all heads are here."""
        fused = mixing.others(self.shape, self.shard, at)
        if fused is None:
            return None
        queries = at + self.shape.usual.qkv[0]
        num_queries = sum(part.num_rows for part in fused.parts if part.name == queries)
        return Others(self._product(fused), Columns(num_queries, range(num_queries, fused.num_rows)))

    def keeper(self, index: int) -> Keeper:
        """Of a layer that keeps keys and values of heads."""
        spec, layer, before = self.spec, self.spec.layers[index], f"model.layers.{index}."
        at = f"{before}{spec.shape.usual.attention}."
        qkv = self._qkv(at, layer)
        _, k_norm, v_norm = self.head_norms(at, layer)
        return Keeper(
            sight=self.sight(layer),
            norm=self.norms.of_rows(f"{before}{spec.shape.norms.attention}.weight"),
            kv=self._product(replace(qkv, parts=qkv.parts[1:])),
            k_norm=k_norm,
            v_norm=v_norm,
            rope=layer.rope,
            turns_first=spec.shape.usual.turns_first,
        )


def _index_order(sizes: published.Indexer | None) -> tuple[int, ...] | None:
    """Of the numbers of a query of an index, and of its key; see Place.head_order."""
    return None if sizes is None else halves_apart(sizes.dim, sizes.turned, alternate=sizes.alternate)
