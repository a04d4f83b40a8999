"""Builds one shard's decoder from a checkpoint: which slice of which tensor becomes which layer.

Reads slice by slice, packs it, drops it. Must not know topologies, processes or requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.cache.store import KVStore
from tpspec.comm.communicator import OneRank
from tpspec.model.architectures import read_spec
from tpspec.model.decoder import Decoder
from tpspec.model.linear import can_pack, linear, quantized_linear
from tpspec.model.rope import Rope
from tpspec.model.steps import Layer, Norm, Shape
from tpspec.model.weights import Checkpoint
from tpspec.topology.groups import BITS, HEAD_BITS, grid_of
from tpspec.topology.shards import split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from tpspec.comm.communicator import Communicator
    from tpspec.model.architectures import LayerSpec, ModelSpec
    from tpspec.model.linear import Linear
    from tpspec.topology.config import Quantize
    from tpspec.topology.groups import Bits, Grid
    from tpspec.topology.shape import ModelShape
    from tpspec.topology.shards import Shard


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `rows` of the tensor `name`, whose first dimension is `size`, as a piece of a fused matrix."""

    name: str
    rows: range
    size: int


@dataclass(frozen=True, slots=True)
class Loader:
    """Reads one shard of one checkpoint in one dtype onto one device. quantize: what its matrices are held in, if not
    that dtype."""

    spec: ModelSpec
    checkpoint: Checkpoint
    shard: Shard
    dtype: torch.dtype
    device: torch.device
    packed: bool
    quantize: Quantize | None = None

    @classmethod
    def open(
        cls, folder: Path, shard: Shard, dtype: torch.dtype, device: torch.device, quantize: Quantize | None = None
    ) -> Loader:
        spec, checkpoint = read_spec(folder), Checkpoint(folder)
        return cls(spec, checkpoint, shard, dtype, device, can_pack(device, dtype), quantize)

    def decoder(
        self,
        comm: Communicator,
        num_slots: int,
        *,
        fixed_rows: int | None = None,
        compiled: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Decoder:
        """The shard's decoder with an empty cache of num_slots tokens. progress: called with (layers done, layers).

        fixed_rows, compiled: see Decoder.
        """
        head = self._head()  # first, while little else is resident: no slice of a layer is nearly as large
        layers = []
        for index, layer in enumerate(self.spec.layers):
            layers.append(self._layer(index, layer))
            if progress is not None:
                progress(index + 1, len(self.spec.layers))
        spec = self.spec
        num_kv_heads = len(self.shard.kv_heads)
        return Decoder(
            embedding_VD=self.checkpoint.mapped("model.embed_tokens.weight", (spec.vocab, spec.hidden)),
            layers=layers,
            norm=self._norm("model.norm.weight", spec.hidden),
            head=head,
            rope=Rope(spec.inv_freq, spec.rope_scale, num_slots, self.dtype, self.device),
            shape=self._shape(),
            comm=comm,
            store=KVStore(len(layers), num_kv_heads, num_slots, spec.head_dim, self.dtype, self.device),
            fixed_rows=fixed_rows,
            compiled=compiled,
        )

    def _shape(self) -> Shape:
        group = self.spec.num_heads // self.spec.num_kv_heads
        return Shape(
            kv_of=tuple(head // group - self.shard.kv_heads.start for head in self.shard.heads),
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
            device=self.device,
            windows=frozenset(layer.window for layer in self.spec.layers),
        )

    def _layer(self, index: int, layer: LayerSpec) -> Layer:
        spec, at = self.spec, f"model.layers.{index}."
        return Layer(
            index=index,
            attention_norm=self._norm(at + "input_layernorm.weight", spec.hidden),
            qkv=self._qkv(at + "self_attn."),
            q_norm=self._norm(at + "self_attn.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=self._norm(at + "self_attn.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            o=self._row_parallel(at + "self_attn.o_proj", self._dims(self.shard.heads), spec.num_heads * spec.head_dim,
                                 biased=spec.o_bias),
            mlp_norm=self._norm(at + "post_attention_layernorm.weight", spec.hidden),
            gate_up=self._gate_up(at + "mlp."),
            down=self._row_parallel(at + "mlp.down_proj", self.shard.channels, spec.intermediate, biased=spec.mlp_bias),
            rope=layer.rope,
            window=layer.window,
        )  # fmt: skip

    def _dims(self, heads: range) -> range:
        return range(heads.start * self.spec.head_dim, heads.stop * self.spec.head_dim)

    def _qkv(self, at: str) -> Linear:
        queries, keys = self._dims(self.shard.heads), self._dims(self.shard.kv_heads)
        num_q, num_kv = self.spec.num_heads * self.spec.head_dim, self.spec.num_kv_heads * self.spec.head_dim
        parts = [Part(at + "q_proj", queries, num_q), Part(at + "k_proj", keys, num_kv),
                 Part(at + "v_proj", keys, num_kv)]  # fmt: skip
        return self._column_parallel(parts, biased=self.spec.qkv_bias)

    def _gate_up(self, at: str) -> Linear:
        channels, size = self.shard.channels, self.spec.intermediate
        parts = [Part(at + "gate_proj", channels, size), Part(at + "up_proj", channels, size)]
        return self._column_parallel(parts, biased=self.spec.mlp_bias)

    def _column_parallel(self, parts: Sequence[Part], *, biased: bool) -> Linear:
        """Some output rows of several matrices, fused into one: [sum of rows, D]."""
        weight = torch.empty(sum(len(part.rows) for part in parts), self.spec.hidden, dtype=self.dtype)
        first = 0
        for part in parts:
            weight[first : first + len(part.rows)] = self.checkpoint.read(
                part.name + ".weight", (part.size, self.spec.hidden), rows=part.rows
            )
            first += len(part.rows)
        biases = [self.checkpoint.read(p.name + ".bias", (p.size,), rows=p.rows) for p in parts] if biased else []
        return self._linear(weight, torch.cat(biases) if biased else None)

    def _row_parallel(self, name: str, columns: range, size: int, *, biased: bool) -> Linear:
        """Some input columns of a matrix. Its outputs are summed over shards, so only shard 0 adds the bias."""
        grid, whole_groups = grid_of(columns, size)
        read = columns if self.quantize is None else whole_groups
        weight = self.checkpoint.read(name + ".weight", (self.spec.hidden, size), columns=read)
        has_bias = biased and self.shard.index == 0
        bias = self.checkpoint.read(name + ".bias", (self.spec.hidden,)) if has_bias else None
        return self._linear(weight, bias, grid)

    def _head(self) -> Linear:
        name = "model.embed_tokens.weight" if self.spec.tied else "lm_head.weight"
        weight = self.checkpoint.read(name, (self.spec.vocab, self.spec.hidden), rows=self.shard.vocab)
        return self._linear(weight, None, bits=HEAD_BITS)

    def _linear(
        self, weight: Tensor, bias: Tensor | None, grid: Grid | None = None, bits: Bits | None = None
    ) -> Linear:
        """grid, bits: where a quantized weight's groups lie, if not over all columns; its bits, if not as asked for."""
        bias = None if bias is None else bias.to(self.device, self.dtype)
        weight = weight.to(self.device, self.dtype)
        if self.quantize is None:
            return linear(weight, bias, packed=self.packed)
        num_columns = weight.shape[1]
        grid = grid or grid_of(range(num_columns), num_columns)[0]
        return quantized_linear(weight, bias, bits or BITS[self.quantize], grid)

    def _norm(self, name: str, size: int) -> Norm:
        return Norm(self.checkpoint.read(name, (size,)).to(self.device, self.dtype), self.spec.eps)


def load_whole(
    folder: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    num_slots: int,
    quantize: Quantize | None = None,
) -> Decoder:
    """A model that is not sharded, with an empty cache of num_slots tokens."""
    (whole,) = split(shape, (1.0,))
    return Loader.open(folder, whole, dtype, device, quantize).decoder(OneRank(), num_slots)
