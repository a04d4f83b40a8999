"""Builds one shard's decoder from a checkpoint: which slice of which matrix becomes which layer.

Reads slice by slice, packs it, drops it. Must not know topologies, processes or requests, nor how codes are stored.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpspec.cache.store import KVStore
from tpspec.comm.communicator import OneRank
from tpspec.errors import UserError
from tpspec.model.architectures import read_spec
from tpspec.model.decoder import Decoder
from tpspec.model.experts import CORRECTION, Router, Shared, mixture_of
from tpspec.model.linear import PlainLinear, Scattered, Stacked, linear, quantized_linear, rounded_linear
from tpspec.model.mlp import GatedMlp
from tpspec.model.quantized import Ready, joined
from tpspec.model.rope import Rope
from tpspec.model.steps import Layer, Norm, Shape
from tpspec.model.stored import Place, StoredMatrices, below
from tpspec.model.weights import Checkpoint
from tpspec.topology.experts import has_narrow_columns, mlp_names
from tpspec.topology.formats import HEAD, check_unquantized
from tpspec.topology.groups import BITS, HEAD_BITS, grid_of
from tpspec.topology.shape import MODEL_TYPES, check_dtype
from tpspec.topology.shards import split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from tpspec.comm.communicator import Communicator
    from tpspec.comm.ledger import Ledger
    from tpspec.model.architectures import LayerSpec, ModelSpec
    from tpspec.model.linear import Linear
    from tpspec.model.mlp import Mlp
    from tpspec.model.stored import Slice
    from tpspec.topology.config import Quantize
    from tpspec.topology.experts import Experts, MlpNames
    from tpspec.topology.formats import Scheme
    from tpspec.topology.groups import Bits, Grid
    from tpspec.topology.shape import ModelShape
    from tpspec.topology.shards import Shard


log = logging.getLogger(__name__)

PLAIN_BYTES = 2  # of a number, at least: in fewer, it is a code without its scale


@dataclass(frozen=True, slots=True)
class Loader:
    """Reads one shard of one checkpoint in one dtype onto one device. quantize: what its matrices are held in, if not
    that dtype. reference: products are the plain ones that others are made of."""

    spec: ModelSpec
    checkpoint: Checkpoint
    shard: Shard
    dtype: torch.dtype
    device: torch.device
    quantize: Quantize | None = None
    reference: bool = False

    @classmethod
    def open(
        cls, folder: Path, shard: Shard, dtype: torch.dtype, device: torch.device, quantize: Quantize | None = None
    ) -> Loader:
        spec, checkpoint = read_spec(folder), Checkpoint(folder)
        check_dtype(spec.model_type, str(dtype).removeprefix("torch."))
        check_unquantized(spec.stored, quantize)
        if shard.index == 0 and spec.stored is not None:
            _tell(folder, spec, dtype, quantize)
        return cls(spec, checkpoint, shard, dtype, device, quantize)

    def decoder(
        self,
        comm: Communicator,
        num_slots: int,
        *,
        fixed_rows: int | None = None,
        compiled: bool = True,
        small_cache: bool = False,
        num_recent: int = 0,
        ledger: Ledger | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Decoder:
        """The shard's decoder with an empty cache of num_slots tokens. progress: called with (layers done, layers).

        small_cache: of 8 bits. num_recent: slots of layers with a window, if they have their own. fixed_rows, compiled,
        ledger: see Decoder.
        """
        head = self._head()  # first, while little else is resident: no slice of a layer is nearly as large
        layers = []
        for index, layer in enumerate(self.spec.layers):
            layers.append(self._layer(index, layer, whole=fixed_rows is not None))
            _trim()
            if progress is not None:
                progress(index + 1, len(self.spec.layers))
        spec, scale = self.spec, self.spec.embedding_scale
        recent = [layer.index for layer in layers if layer.window is not None and num_recent]
        store = KVStore(
            len(layers), len(self.shard.kv_heads), num_slots, spec.head_dim, self.dtype, self.device, small=small_cache,
            num_recent=num_recent, recent=recent,
        )  # fmt: skip
        return Decoder(
            embedding_VD=self._embedding(),
            layers=layers,
            norm=self._norm("model.norm.weight", spec.hidden),
            head=head,
            ropes=[Rope(frequencies, num_slots, self.dtype, self.device) for frequencies in spec.ropes],
            shape=self._shape(),
            comm=comm,
            store=store,
            fixed_rows=fixed_rows,
            compiled=compiled,
            ledger=ledger,
            embedding_scale=None if scale is None else torch.tensor(scale, dtype=self.dtype).item(),
        )

    def _shape(self) -> Shape:
        group = self.spec.num_heads // self.spec.num_kv_heads
        return Shape(
            kv_of=tuple(head // group - self.shard.kv_heads.start for head in self.shard.heads),
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
            device=self.device,
            windows=frozenset(layer.window for layer in self.spec.layers),
            score_scale=self.spec.score_scale,
            gate=self.spec.gate,
        )

    def _layer(self, index: int, layer: LayerSpec, *, whole: bool) -> Layer:
        """whole: see Mixture."""
        spec, norms, at = self.spec, self.spec.norms, f"model.layers.{index}."

        def norm(name: str) -> Norm:
            return self._norm(f"{at}{name}.weight", spec.hidden)

        return Layer(
            index=index,
            attention_norm=norm(norms.attention),
            qkv=self._qkv(at + "self_attn."),
            q_norm=self._head_norm(at + "self_attn.q_norm.weight") if spec.qk_norm else None,
            k_norm=self._head_norm(at + "self_attn.k_norm.weight") if spec.qk_norm else None,
            o=self._o(at + "self_attn.o_proj"),
            attention_out_norm=None if norms.attention_out is None else norm(norms.attention_out),
            mlp_norm=norm(norms.mlp),
            mlp=self._mlp_or_mixture(index, at, whole=whole),
            mlp_out_norm=None if norms.mlp_out is None else norm(norms.mlp_out),
            rope=layer.rope,
            window=layer.window,
            sinks=self._sinks(at + "self_attn.sinks") if spec.sinks else None,
        )  # fmt: skip

    def _sinks(self, name: str) -> Tensor:
        return self._read(name, (self.spec.num_heads,), self.shard.heads).to(self.device, torch.float32)

    def _dims(self, heads: range) -> range:
        return range(heads.start * self.spec.head_dim, heads.stop * self.spec.head_dim)

    def _qkv(self, at: str) -> Linear:
        queries, keys = self._dims(self.shard.heads), self._dims(self.shard.kv_heads)
        num_q, num_kv = self.spec.num_heads * self.spec.head_dim, self.spec.num_kv_heads * self.spec.head_dim
        order, names = self.spec.head_order, [at + name for name in MODEL_TYPES[self.spec.model_type].qkv]
        parts = [self._rows(names[0], queries, num_q, order), self._rows(names[1], keys, num_kv, order),
                 self._rows(names[2], keys, num_kv)]  # fmt: skip
        return self._column_parallel(below(parts), biased=self.spec.qkv_bias)

    def _o(self, name: str) -> Linear:
        hidden, width = range(self.spec.hidden), self.spec.num_heads * self.spec.head_dim
        place = Place(name, len(hidden), width, hidden, self._dims(self.shard.heads))
        return self._row_parallel(place, biased=self.spec.o_bias)

    def _mlp_or_mixture(self, index: int, layer: str, *, whole: bool) -> Mlp:
        """layer: what the names of its modules begin with."""
        spec, shard, names, experts = self.spec, self.shard, mlp_names(self.spec.model_type), self.spec.experts
        at = f"{layer}{names.module}."
        if experts is None:
            return self._mlp(at, names, shard.channels, spec.intermediate)
        if index < experts.first_layer:
            return self._mlp(at, names, shard.dense, experts.dense)
        if names.together is None:
            self._check_apart(layer)
        mixture = self._mixture(at, names, experts, whole=whole)
        if not experts.shared:
            return mixture
        return Shared(mixture, self._mlp(f"{at}{names.shared}.", names, shard.shared, experts.shared))

    def _mixture(self, at: str, names: MlpNames, experts: Experts, *, whole: bool) -> Mlp:
        router, on_card = self._router(f"{at}{names.router}", experts), self.device.type == "cuda"
        loader = replace(self, reference=on_card)
        mlps = [loader._expert(f"{at}experts.", names, experts, index) for index in range(experts.count)]
        return mixture_of(router, mlps, on_card=on_card, whole=whole)

    def _expert(self, at: str, names: MlpNames, experts: Experts, index: int) -> GatedMlp:
        channels, size = self.shard.channels, self.spec.intermediate
        if names.together is None:
            return self._mlp(f"{at}{index}.", names, channels, size)
        hidden, one, biased = range(self.spec.hidden), (index, experts.count), experts.biased
        rows = range(2 * channels.start, 2 * channels.stop)
        gate_up = Place(at + names.together, 2 * size, len(hidden), rows, hidden, expert=one, alternate=True)
        down = Place(at + names.down, len(hidden), size, hidden, channels, expert=one)
        return GatedMlp(self._column_parallel([gate_up], biased=biased), self._row_parallel(down, biased=biased))

    def _check_apart(self, layer: str) -> None:
        """transformers 5 computes with the experts of a layer in one piece, by the same name for every type."""
        name = f"{layer}mlp.experts.gate_up_proj"
        if name in self.checkpoint:
            raise UserError(
                f"{self.checkpoint.folder}: {name} holds all experts of a layer; should be a tensor for each, as "
                "transformers' save_pretrained writes with save_original_format, which is its default"
            )

    def _router(self, name: str, experts: Experts) -> Router:
        held = self.checkpoint.under(name)
        if held and "weight" not in held:
            kind = ", ".join(sorted(held - {CORRECTION}))
            raise UserError(f"{self.checkpoint.folder}: router {name} is quantized ({kind}); should be a plain weight")
        place = self._rows(name, range(experts.count), experts.count)
        self._check_biases([place], biased=experts.biased)
        weight_ND = self._read(f"{name}.weight", (experts.count, self.spec.hidden)).to(self.device, torch.float32)
        if not (experts.sigmoid or experts.biased):
            return Router(weight_ND, experts)
        kind = CORRECTION if experts.sigmoid else "bias"
        bias_N = self._read(f"{name}.{kind}", (experts.count,)).to(self.device, torch.float32)
        return Router(weight_ND, experts, bias_N)

    def _mlp(self, at: str, names: MlpNames, channels: range, size: int) -> GatedMlp:
        """channels: of so many, those of this shard."""
        biased, hidden = self.spec.mlp_bias, range(self.spec.hidden)
        parts = [self._rows(at + names.gate, channels, size), self._rows(at + names.up, channels, size)]
        return GatedMlp(
            self._column_parallel(below(parts), biased=biased),
            self._row_parallel(Place(at + names.down, len(hidden), size, hidden, channels), biased=biased),
        )

    def _rows(self, name: str, rows: range, size: int, head_order: tuple[int, ...] | None = None) -> Place:
        """Some of the `size` output rows of a matrix that reads the hidden state."""
        return Place(name, size, self.spec.hidden, rows, range(self.spec.hidden), head_order)

    def _column_parallel(self, parts: Sequence[Place], *, biased: bool) -> Linear:
        """Some output rows of several matrices, fused into one: [sum of rows, D]."""
        self._check_biases(parts, biased=biased)
        if (product := self._of_codes(parts, biased=biased)) is not None:
            return product
        if len({self._scheme(part.name) for part in parts}) > 1:
            return Stacked([self._column_parallel([part], biased=biased) for part in parts])
        weight = torch.empty(sum(len(part.rows) for part in parts), self.spec.hidden, dtype=self.dtype)
        first = 0
        for part in parts:
            weight[first : first + len(part.rows)] = self._weight(part)[part.ordered()]
            first += len(part.rows)
        return self._linear(weight, self._biases(parts, biased=biased))

    def _row_parallel(self, place: Place, *, biased: bool) -> Linear:
        """Some input columns of a matrix. Its outputs are summed over shards, so only shard 0 adds the bias."""
        has_bias = biased and self.shard.index == 0
        self._check_biases([place], biased=biased)
        if (product := self._of_codes([place], biased=has_bias)) is not None:
            return product
        grid, whole_groups = grid_of(place.columns, place.num_inputs, narrow=has_narrow_columns(place.name))
        weight = self._weight(place if self.quantize is None else replace(place, columns=whole_groups))
        return self._linear(weight, self._biases([place], biased=has_bias), grid)

    def _embedding(self) -> Tensor:
        name = "model.embed_tokens.weight"
        return self._checked(name, self.checkpoint.mapped(name, (self.spec.vocab, self.spec.hidden)))

    def _head(self) -> Linear:
        place = self._rows("model.embed_tokens" if self.spec.tied else HEAD, self.shard.vocab, self.spec.vocab)
        self._check_biases([place], biased=False)
        if (product := self._of_codes([place], biased=False)) is not None:
            return product
        return self._linear(self._weight(place), None, bits=HEAD_BITS)

    def _scheme(self, name: str) -> Scheme | None:
        return None if self.spec.stored is None else self.spec.stored.scheme_of(name)

    def _weight(self, place: Place) -> Tensor:
        scheme = self._scheme(place.name)
        if scheme is not None:
            return StoredMatrices(self.checkpoint).plain(scheme, place, self.dtype)
        if place.expert is not None:
            (index, count), whole = place.expert, (place.num_inputs, place.num_outputs)
            read = self.checkpoint.read_one(place.name, (count, *whole), index, place.columns, place.rows)
            return self._checked(place.name, read).T.contiguous()
        return self._read(place.name + ".weight", (place.num_outputs, place.num_inputs), place.rows, place.columns)

    def _read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        return self._checked(name, self.checkpoint.read(name, shape, rows=rows, columns=columns))

    def _checked(self, name: str, numbers: Tensor) -> Tensor:
        if not numbers.is_floating_point() or numbers.itemsize < PLAIN_BYTES:
            kind = str(numbers.dtype).removeprefix("torch.")
            raise UserError(
                f"{self.checkpoint.folder}: {name} is {kind}, for which config.json has no "
                "quantization_config; should be float32, bfloat16 or float16"
            )
        return numbers

    def _biases(self, parts: Sequence[Place], *, biased: bool) -> Tensor | None:
        if not biased:
            return None
        return torch.cat([self._bias(part)[part.ordered()] for part in parts]).to(self.device, self.dtype)

    def _bias(self, place: Place) -> Tensor:
        if place.expert is None:
            return self._read(place.name + ".bias", (place.num_outputs,), place.rows)
        (index, count), name = place.expert, place.name + "_bias"
        return self._checked(name, self.checkpoint.read_one(name, (count, place.num_outputs), index, place.rows))

    def _check_biases(self, parts: Sequence[Place], *, biased: bool) -> None:
        for part in parts:
            if not biased:
                StoredMatrices(self.checkpoint).check_no_bias(part)

    def _of_codes(self, parts: Sequence[Place], *, biased: bool) -> Linear | None:
        """The product with matrices that are all stored in codes to compute with; None where they are not."""
        schemes = [scheme for part in parts if (scheme := self._scheme(part.name)) is not None and scheme.is_small]
        if len(schemes) < len(parts):
            return None
        read = StoredMatrices(self.checkpoint)
        slices = [read.small(scheme, part) for scheme, part in zip(schemes, parts, strict=True)]
        if len(set(schemes)) > 1 or not all(one.is_laid_out_like(slices[0]) for one in slices):
            return Stacked([self._sliced([one], self._biases([part], biased=biased))
                            for one, part in zip(slices, parts, strict=True)])  # fmt: skip
        return self._sliced(slices, self._biases(parts, biased=biased))

    def _sliced(self, slices: Sequence[Slice], bias: Tensor | None) -> Linear:
        grid, places = slices[0].matrix.grid, slices[0].places_I
        made = joined([one.matrix.made for one in slices]).to(self.device)
        product = quantized_linear(Ready(made, grid), bias, self.device, reference=self.reference)
        return product if places is None else Scattered(product, places.to(self.device), grid.width)

    def _linear(
        self, weight: Tensor, bias: Tensor | None, grid: Grid | None = None, bits: Bits | None = None
    ) -> Linear:
        """grid, bits: where a quantized weight's groups lie, if not over all columns; its bits, if not as asked for."""
        weight = weight.to(self.device, self.dtype)
        if self.quantize is None:
            return PlainLinear(weight, bias) if self.reference else linear(weight, bias)
        return rounded_linear(weight, bias, bits or BITS[self.quantize], grid, reference=self.reference)

    def _head_norm(self, name: str) -> Norm:
        norm, order = self._norm(name, self.spec.head_dim), self.spec.head_order
        return norm if order is None else replace(norm, weight=norm.weight[list(order)])

    def _norm(self, name: str, size: int) -> Norm:
        weight = self._read(name, (size,)).to(self.device, torch.float32)
        return Norm(weight + 1 if self.spec.one_more else weight, self.spec.eps)


def _trim() -> None:
    """Gives what was read and dropped back to the system. glibc keeps it, in holes between what stays: of a model with
    matrices of one to four megabytes, a fifth more than its weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _tell(folder: Path, spec: ModelSpec, dtype: torch.dtype, quantize: Quantize | None) -> None:
    """What a reader of a quantized checkpoint might not expect."""
    stored, kind = spec.stored, str(dtype).removeprefix("torch.")
    assert stored is not None, "only of such"
    if quantize is None and not all(scheme.is_small for _, scheme in stored.schemes):
        log.warning("%s: %s weights like these are held in %s, %d bytes each; with quantize: int8 it is one, rounded "
                    "once more", folder, stored.method, kind, dtype.itemsize)  # fmt: skip
    if stored.rounds:
        log.warning("%s: activations are not rounded to 8 bits here, as they are by its publisher's kernels", folder)


def load_whole(
    folder: Path,
    shape: ModelShape,
    dtype: torch.dtype,
    device: torch.device,
    num_slots: int,
    quantize: Quantize | None = None,
    *,
    small_cache: bool = False,
) -> Decoder:
    """A model that is not sharded, with an empty cache of num_slots tokens."""
    (whole,) = split(shape, (1.0,))
    loader = Loader.open(folder, whole, dtype, device, quantize)
    return loader.decoder(OneRank(), num_slots, small_cache=small_cache)
