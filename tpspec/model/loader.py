"""Builds one shard's decoder from a checkpoint: which matrices become which layer.

How these are read is matrices.py's matter. Must not know topologies, processes or requests.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpspec.cache.store import KVStore
from tpspec.comm.communicator import OneRank
from tpspec.model.architecture import FINAL_NORM
from tpspec.model.attentions import Attentions
from tpspec.model.builder import Builder
from tpspec.model.convolutions import Convolutions
from tpspec.model.decoder import Decoder
from tpspec.model.embedding import TABLE, Embedding, Joined, Tables, head_of
from tpspec.model.layers import ConvLayer, Layer, LinearLayer, MlpLayer
from tpspec.model.linear import Capped
from tpspec.model.matrices import Matrices
from tpspec.model.mixers import Mixers
from tpspec.model.mlps import Mlps
from tpspec.model.per_layer import LayerInputs, TokenInputs
from tpspec.model.rope import Rope
from tpspec.model.sight import Shape
from tpspec.model.spec import read_spec
from tpspec.model.weights import Checkpoint
from tpspec.published import per_layer
from tpspec.published.blocks import MIXTURE, MLP
from tpspec.published.formats import check_unquantized
from tpspec.published.shape import check_card, check_dtype
from tpspec.topology import feeding
from tpspec.topology.shards import whole_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tpspec.comm.communicator import Communicator
    from tpspec.comm.ledger import Ledger
    from tpspec.model.layer_spec import LayerSpec
    from tpspec.model.layers import AnyLayer
    from tpspec.model.linear import Linear
    from tpspec.model.mlp import Mlp
    from tpspec.model.norm import Norm
    from tpspec.model.sight import Sight
    from tpspec.model.spec import ModelSpec
    from tpspec.published.shape import ModelShape
    from tpspec.topology.config import Quantize
    from tpspec.topology.shards import Shard


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loader(Builder):
    """Reads one shard of one checkpoint. replicates: see Attentions."""

    replicates: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.matrices.dtype

    @property
    def device(self) -> torch.device:
        return self.matrices.device

    @property
    def attentions(self) -> Attentions:
        return Attentions(self.spec, self.shard, self.matrices, self.replicates)

    @classmethod
    def open(
        cls,
        folder: Path,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        quantize: Quantize | None = None,
        *,
        replicates: bool = False,
    ) -> Loader:
        """In one dtype onto one device. quantize: what its matrices are held in, if not that dtype."""
        spec, checkpoint = read_spec(folder), Checkpoint(folder)
        check_dtype(spec.shape.model_type, str(dtype).removeprefix("torch."))
        check_unquantized(spec.shape.stored, quantize)
        if device.type == "cuda":
            check_card(spec.shape)
        if shard.index == 0 and spec.shape.stored is not None:
            _tell(folder, spec, dtype, quantize)
        matrices = Matrices(checkpoint, spec.shape.stored, dtype, device, quantize, adds_biases=shard.index == 0)
        return cls(spec, shard, matrices, replicates)

    def alone(
        self, num_slots: int, small_cache: bool = False, num_states: int = 0, num_positions: int | None = None
    ) -> Decoder:
        """The decoder of a model that is not sharded."""
        return self.decoder(
            OneRank(), num_slots, small_cache=small_cache, num_states=num_states, num_positions=num_positions
        )

    def decoder(
        self,
        comm: Communicator,
        num_slots: int,
        *,
        fixed_rows: int | None = None,
        compiled: bool = True,
        small_cache: bool = False,
        num_recent: int = 0,
        num_states: int = 0,
        num_kept: int = 0,
        num_positions: int | None = None,
        ledger: Ledger | None = None,
        most_verified: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Decoder:
        """The shard's decoder with an empty cache of num_slots tokens. progress: called with (layers done, layers).

        small_cache: of 8 bits. num_recent: slots of layers with a window, if they have their own. num_states, num_kept:
        texts, and beginnings, that are kept in layers that have states. num_positions: of a text at most, if they
        are fewer than slots. fixed_rows, compiled, ledger, most_verified: see Decoder.
        """
        head = self._head()  # first, while little else is resident: no slice of a layer is nearly as large
        layers: list[AnyLayer] = []
        for index, layer in enumerate(self.spec.layers):
            layers.append(self._any_layer(index, layer, whole=fixed_rows is not None))
            _trim()
            if progress is not None:
                progress(index + 1, len(self.spec.layers))
        spec, mixers = self.spec, self._mixers
        attending = [layer for layer in layers if isinstance(layer, Layer)]
        sights = {layer.kept_by: layer.sight for layer in attending}
        kept = {layer.kept_by: layer.kept for layer in attending}
        store = KVStore(
            kept, num_slots, self.dtype, self.device, small=small_cache, num_recent=num_recent,
            keys_alone=spec.shape.latent is not None, num_positions=num_positions,
        )  # fmt: skip
        return Decoder(
            embedding=self._embedding(),
            inputs=self._context() if spec.shape.per_layer else None,
            layers=layers,
            norm=self._final_norm(),
            head=head,
            ropes=[Rope(frequencies, store.num_positions, self.dtype, self.device) for frequencies in spec.ropes],
            shape=self._shape(sights.values()),
            comm=comm,
            store=store,
            fixed_rows=fixed_rows,
            compiled=compiled,
            ledger=ledger,
            states=None if mixers is None else mixers.store(num_states, num_kept),
            most_verified=most_verified,
            hidden_scale=spec.hidden_scale,
        )

    @property
    def _mixers(self) -> Mixers | Convolutions | None:
        shape = self.shape
        if shape.short_conv is not None:
            return Convolutions(shape.short_conv, self.shard, self.matrices, shape.hidden)
        if shape.delta_net is None:
            return None
        eps = self.spec.eps * self.spec.hidden_scale**2
        return Mixers(shape.delta_net, self.shard, self.matrices, shape.hidden, eps, self.spec.scales)

    def _shape(self, sights: Iterable[Sight]) -> Shape:
        return Shape(
            sights=frozenset(sights),
            dtype=self.dtype,
            device=self.device,
            score_scale=self.spec.score_scale,
            score_cap=self.spec.score_cap,
            gate=self.spec.gate,
            keys_alone=self.shape.latent is not None,
        )

    def _any_layer(self, index: int, layer: LayerSpec, *, whole: bool) -> AnyLayer:
        """whole: see Mixture."""
        mixers, at = self._mixers, f"model.layers.{index}."
        norms, linear = self.shape.norms, self.shape.usual.linear_norms or self.shape.norms
        kind, mlp = self.shape.blocks[index] if self.shape.blocks else None, None
        if kind in (None, MLP, MIXTURE):
            mlp = Mlps(self.spec, self.shard, self.matrices).of_layer(index, at, whole=whole)
        if kind is not None and mlp is not None:
            return MlpLayer(index=index, mlp_norm=self.norms.of_rows(f"{at}{norms.mlp}.weight"), mlp=mlp)
        if mixers is None or index not in mixers.net.layers:
            return self._layer(index, layer, mlp)
        norm = self.norms.of_rows(f"{at}{linear.attention}.weight")
        mlp_norm = None if mlp is None else self.norms.of_rows(f"{at}{linear.mlp}.weight")
        if isinstance(mixers, Convolutions):
            return ConvLayer(
                index=index,
                attention_norm=norm,
                mixer=mixers.mixer(at),
                attention_out_norm=self._out_norm(at, norms.attention_out),
                mlp_norm=mlp_norm,
                mlp=mlp,
                mlp_out_norm=self._out_norm(at, norms.mlp_out),
            )
        if mixers.net.beside:
            beside = LinearLayer(index=index, attention_norm=norm, mixer=mixers.mixer(at), mlp_norm=None, mlp=None)
            return replace(self._layer(index, layer, mlp), attention_norm=norm, beside=beside)
        return LinearLayer(index=index, attention_norm=norm, mixer=mixers.mixer(at), mlp_norm=mlp_norm, mlp=mlp)

    def _layer(self, index: int, layer: LayerSpec, mlp: Mlp | None) -> Layer:
        spec, shape, names, at = self.spec, self.shape, self.shape.norms, f"model.layers.{index}."

        def norm(name: str) -> Norm:
            return self.norms.of_rows(f"{at}{name}.weight")

        attentions, inner = self.attentions, f"{at}{shape.usual.attention}."
        qkv, o = attentions.products(inner, layer)
        q_norm, k_norm, v_norm = attentions.head_norms(inner, layer)
        attention_norm = None if names.attention is None else norm(names.attention)
        mlp_norm = attention_norm if shape.parallel else None
        mlp_out = names.mlp_out
        if shape.experts is not None and index in shape.experts.layers(len(spec.layers)):
            mlp_out = names.mixture_out or mlp_out
        is_apart = shape.experts is not None and shape.experts.apart
        if is_apart:
            mlp_norm = self.norms.without_weight(shape.hidden)
        elif names.mlp is not None and mlp is not None:
            mlp_norm = norm(names.mlp)
        return Layer(
            index=index,
            kept_by=index if layer.kept_by is None else layer.kept_by,
            sight=attentions.sight(layer),
            attention_norm=attention_norm,
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            o=o,
            attention_out_norm=self._out_norm(at, names.attention_out),
            mlp_norm=mlp_norm,
            mlp=mlp,
            mlp_out_norm=self._out_norm(at, mlp_out),
            mlp_joined=(norm(f"{names.mlp_out}_1"), norm(f"{names.mlp_out}_2")) if is_apart else None,
            rope=layer.rope,
            joint_norm=attentions.joint_norm(inner, layer),
            turns_first=shape.usual.turns_first,
            v_norm=v_norm,
            sinks=attentions.sinks(inner, layer),
            gate=attentions.gate(inner, layer),
            indexer=attentions.indexer(inner, layer),
            inputs=self._inputs(at) if shape.per_layer else None,
            parallel=shape.parallel,
            scale=self.matrices.wide(at + "layer_scalar", (1,)).item() if spec.scaled_layers else 1.0,
        )

    def _out_norm(self, at: str, name: str | None) -> Norm | None:
        """Of what a sublayer gives, where there is one."""
        return None if name is None else replace(self.norms.of_rows(f"{at}{name}.weight"), eps=self.spec.out_eps)

    def embedding(self) -> Embedding:
        """Of tokens, and nothing besides."""
        size = self.shape.vocab, self.shape.hidden
        return self._table(TABLE, size, self.spec.embedding_scale, self.spec.embedding_eps)

    def _embedding(self) -> Tables:
        tokens, each = self.embedding(), self.shape.per_layer
        if not each:
            return tokens
        size = self.spec.num_per_layer_ids, self.shape.num_layers * each
        return Joined([tokens, self._table(f"model.{per_layer.TABLE}", size, each**0.5)])

    def _table(self, name: str, shape: tuple[int, int], scale: float | None, eps: float | None = None) -> Embedding:
        table_VD = self.matrices.checkpoint.mapped(f"{name}.weight", shape)
        held = None if scale is None else torch.tensor(scale, dtype=self.dtype).item()
        return Embedding(table_VD, self.dtype, held, eps)

    def _context(self) -> TokenInputs:
        """Whole on every rank, as what layers make of it is."""
        size, num_layers, hidden = self.shape.per_layer, self.shape.num_layers, self.shape.hidden
        product = self.matrices.product(per_layer.context(num_layers, size, hidden))
        return TokenInputs(product, self.norms.of(f"model.{per_layer.NORM}.weight", size), hidden, num_layers)

    def _inputs(self, at: str) -> LayerInputs:
        gate, out = map(self.matrices.product, per_layer.inputs(at, self.shape.per_layer, self.shape.hidden))
        return LayerInputs(
            gate=gate,
            out=out,
            norm=self.norms.of_rows(f"{at}{per_layer.OUT_NORM}.weight"),
        )

    def _head(self) -> Linear:
        shape, cap = self.shape, self.spec.cap
        name = head_of(self.matrices.checkpoint, (shape.vocab, shape.hidden), tied=shape.tied)
        head = self.matrices.product(feeding.head(shape, self.shard, name))
        return head if cap is None else Capped(head, cap)

    def _final_norm(self) -> Norm:
        norm, scale = self.norms.of_rows(FINAL_NORM), self.spec.final_scale
        bias = None if norm.bias is None else norm.bias * scale
        return norm if scale == 1 else replace(norm, weight=norm.weight * scale, bias=bias)


def _trim() -> None:
    """Gives what was read and dropped back to the system. glibc keeps it, in holes between what stays: of a model with
    matrices of one to four megabytes, a fifth more than its weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _tell(folder: Path, spec: ModelSpec, dtype: torch.dtype, quantize: Quantize | None) -> None:
    """What a reader of a quantized checkpoint might not expect."""
    stored, kind = spec.shape.stored, str(dtype).removeprefix("torch.")
    assert stored is not None, "only of such"
    if quantize is None and not stored.is_small:
        way = "" if stored.widths else "; with quantize: int8 it is one, rounded once more"
        log.warning("%s: %s weights like these are held in %s, %d bytes each%s", folder, stored.method, kind,
                    dtype.itemsize, way)  # fmt: skip
    if stored.rounds:
        log.warning("%s: activations are not rounded here, as they are by its publisher's kernels", folder)


def load_whole(
    folder: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    num_slots: int,
    quantize: Quantize | None = None,
    *,
    small_cache: bool = False,
    num_states: int = 1,
    num_positions: int | None = None,
) -> Decoder:
    """A model that is not sharded, with an empty cache of num_slots tokens. num_states: texts that it may keep a state
    of, if it does. num_positions: see Loader.decoder."""
    loader = Loader.open(folder, whole_shard(shape), dtype, device, quantize)
    return loader.alone(num_slots, small_cache, num_states, num_positions)
