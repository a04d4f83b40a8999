"""The pieces that draft heads of one layer share, made of their files or the target's. Knows names, not layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.model.embedding import Embedding, head_of
from tpspec.model.experts import Router, Shared, mixture_of
from tpspec.model.gates import HeadGate
from tpspec.model.latent import KEY_NORM, QUERY_NORM, Reduced, around, turned_last
from tpspec.model.layers import Heads, Layer, Norm, Shape, Sight
from tpspec.model.linear import PlainLinear, linear, rounded_linear
from tpspec.model.mlp import GatedMlp
from tpspec.model.places import in_heads
from tpspec.model.weights import Checkpoint
from tpspec.published.groups import BITS, HEAD_BITS
from tpspec.published.latent import LATENT, MADE, REDUCED
from tpspec.published.mixtures import mlp_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.draft.head_files import HeadFiles
    from tpspec.draft.protocol import Given
    from tpspec.model.layer_spec import LayerSpec
    from tpspec.model.linear import Linear
    from tpspec.model.mlp import Mlp
    from tpspec.model.spec import ModelSpec
    from tpspec.published.gating import Gating
    from tpspec.published.groups import Bits
    from tpspec.published.latent import Latent
    from tpspec.published.mlp_names import MlpNames
    from tpspec.published.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Parts:
    """spec: of the head's own layer, whose index is 0 whichever it has in the files. reference: see Loader."""

    given: Given
    spec: ModelSpec
    target: ModelShape
    files: HeadFiles
    reference: bool = False

    def layer(self, at: str, width: int) -> Layer:
        """The layer whose names begin with `at`; width: of what attention reads, which the head has normed."""
        spec, attention = self.spec, at + "self_attn."
        mlp_norm = self.norm(at + "post_attention_layernorm.weight")
        # First, for its rows stand among those that make queries.
        gate = None if spec.shape.gating is None else self._gate(spec.shape.gating, attention, width)
        qkv, o = self._attention(attention, width)
        return Layer(
            index=0,
            kept_by=0,
            sight=self._sight(),
            attention_norm=mlp_norm,  # never called
            qkv=qkv,
            q_norm=self._head_norm(attention + "q_norm.weight") if spec.shape.qk_norm else None,
            k_norm=self._head_norm(attention + "k_norm.weight") if spec.shape.qk_norm else None,
            o=o,
            attention_out_norm=None,
            mlp_norm=mlp_norm,
            mlp=self._mlp_or_mixture(at),
            mlp_out_norm=None,
            rope=self._layer.rope,
            gate=gate,
        )

    @property
    def _layer(self) -> LayerSpec:
        """Its own, as the target's last."""
        return self.spec.layers[-1]

    def _sight(self) -> Sight:
        layer = self._layer
        heads = Heads.of(range(layer.num_heads), layer.num_heads // layer.num_kv_heads, layer.head_dim)
        return Sight(heads, layer.window, layer.chunked)

    def _gate(self, gating: Gating, at: str, width: int) -> HeadGate:
        """Whose rows stand behind those of each head's query."""
        sizes = [self._layer.head_dim] * 2 * self._layer.num_heads
        self.files.divide(at + "q_proj", at + "gate", sizes)
        product = self.matrix([at + "gate"], [sum(sizes) // 2], width, biased=self.spec.shape.qkv_bias)
        return HeadGate(product, gating, self._layer.head_dim)

    def _attention(self, at: str, width: int) -> tuple[Linear, Linear]:
        """What stands before it, and behind it."""
        spec = self.spec
        if spec.shape.latent is not None:
            return self._latent_attention(at, spec.shape.latent, width)
        layer, names = self._layer, [at + "q_proj", at + "k_proj", at + "v_proj"]
        queries, keys, order = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.head_order
        qkv = self.matrix(names, [queries, keys, keys], width, biased=spec.shape.qkv_bias, orders=[order, order, None])
        return qkv, self._o(at, queries)

    def _latent_attention(self, at: str, latent: Latent, width: int) -> tuple[Linear, Linear]:
        count, alternate = self.spec.shape.num_heads, self.spec.alternate_rope
        order, key_order = (
            turned_last(left, latent.turned, alternate=alternate) for left in (latent.plain, latent.rank)
        )
        name, size, reduced = at + latent.query_name, count * latent.head_dim, None
        if latent.queries is not None:
            product = self.matrix([name], [size], latent.queries, orders=[order])
            reduced = Reduced(self.norm(at + QUERY_NORM, latent.queries), product)
            name, size, order = at + REDUCED, latent.queries, tuple(range(latent.queries))
        made_XL = self.files.take(f"{at}{MADE}.weight", count * latent.made, latent.rank)
        return around(
            latent,
            down=self.matrix([name, at + LATENT], [size, latent.cached], width, orders=[order, key_order]),
            reduced=reduced,
            norm=self.norm(at + KEY_NORM, latent.rank),
            made_XL=made_XL.to(self.given.device, self.given.dtype),
            out=self._o(at, count * latent.values),
        )

    def _o(self, at: str, width: int) -> Linear:
        return self.matrix([at + "o_proj"], [self.spec.shape.hidden], width, biased=self.spec.shape.o_bias)

    def _mlp_or_mixture(self, layer: str) -> Mlp:
        spec, names, experts = self.spec, mlp_names(self.spec.shape.model_type), self.spec.shape.experts
        at = f"{layer}{names.module}."
        if experts is None:
            return self._mlp(at, names, spec.shape.intermediate)
        weight_ND = self._wide(f"{at}{names.router}.weight", experts.count, spec.shape.hidden)
        bias_N = self._wide(f"{layer}{names.correction}", experts.count) if experts.corrected else None
        router, on_card = Router(weight_ND, experts, bias_N), self.given.device.type == "cuda"
        parts = replace(self, reference=on_card)
        mlps = [parts._mlp(f"{at}experts.{index}.", names, spec.shape.intermediate) for index in range(experts.count)]
        mixture = mixture_of(router, mlps, on_card=on_card)
        if not experts.shared:
            return mixture
        gate = self._wide(f"{at}{names.shared_gate}.weight", 1, spec.shape.hidden) if experts.shared_gated else None
        shared = self._mlp(f"{layer}{names.shared}.", names.plain, experts.shared)
        return Shared(mixture, shared, gate, experts.shared_scale)

    def _mlp(self, at: str, names: MlpNames, channels: int) -> GatedMlp:
        spec, read = self.spec, [at + name for name in (names.gate, names.up) if name is not None]
        return GatedMlp(
            self.matrix(read, [channels] * len(read), spec.shape.hidden, biased=spec.shape.mlp_bias),
            self.matrix([at + names.down], [spec.shape.hidden], channels, biased=spec.shape.mlp_bias),
        )

    def shape(self) -> Shape:
        spec, given = self.spec, self.given
        return Shape(
            frozenset({self._sight()}), given.dtype, given.device, spec.score_scale, spec.gate,
            keys_alone=spec.shape.latent is not None,
        )  # fmt: skip

    def embedding(self) -> Embedding:
        """The head's own where it has one, else the target's, which stays in its file."""
        return Embedding(self._table(), self.given.dtype)

    def _table(self) -> Tensor:
        spec, name, wanted = self.spec, "embed_tokens.weight", self.given.vocab
        if name not in self.files:
            return Checkpoint(self.given.target).mapped("model." + name, (self.target.vocab, spec.shape.hidden))
        if spec.shape.vocab < wanted:
            raise UserError(f"{self.files.folder}: vocab_size is {spec.shape.vocab}; should be the target's {wanted}")
        return self.files.take(name, spec.shape.vocab, spec.shape.hidden)

    def lm_head(self, num_ids: int) -> Linear:
        """The head's own where it has one, else the target's, whole."""
        name = "lm_head.weight"
        if name in self.files or num_ids != self.target.vocab:
            return self.linear(self.files.take(name, num_ids, self.spec.shape.hidden), bits=HEAD_BITS)
        checkpoint, shape = Checkpoint(self.given.target), (num_ids, self.spec.shape.hidden)
        own = head_of(checkpoint, shape, tied=self.target.tied)
        bias_O = checkpoint.read(f"{own}.bias", (num_ids,)) if self.target.head_bias else None
        return self.linear(checkpoint.read(f"{own}.weight", shape), bias_O, HEAD_BITS)

    def matrix(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        width: int,
        *,
        biased: bool = False,
        orders: Sequence[tuple[int, ...] | None] | None = None,
    ) -> Linear:
        """Several matrices as one: [sum of sizes, width]. orders: of the heads that the rows of each are; None: as they
        are."""

        def taken(part: str, *columns: int) -> Tensor:
            read = [self.files.take(f"{name}.{part}", size, *columns) for name, size in zip(names, sizes, strict=True)]
            each = zip(read, orders or [None] * len(read), strict=True)
            return torch.cat([x if order is None else x[in_heads(len(x), order)] for x, order in each])

        return self.linear(taken("weight", width), taken("bias") if biased else None)

    def linear(self, weight_OI: Tensor, bias_O: Tensor | None = None, bits: Bits | None = None) -> Linear:
        """bits: of a quantized matrix, if not as asked for."""
        device, dtype, quantize = self.given.device, self.given.dtype, self.given.quantize
        bias_O, weight_OI = None if bias_O is None else bias_O.to(device, dtype), weight_OI.to(device, dtype)
        if quantize is None:
            return PlainLinear(weight_OI, bias_O) if self.reference else linear(weight_OI, bias_O)
        return rounded_linear(weight_OI, bias_O, bits or BITS[quantize], reference=self.reference)

    def norm(self, name: str, size: int | None = None) -> Norm:
        weight = self._wide(name, self.spec.shape.hidden if size is None else size)
        return Norm(weight + 1 if self.spec.one_more else weight, self.spec.eps)

    def _head_norm(self, name: str) -> Norm:
        norm, order = self.norm(name, self._layer.head_dim), self._layer.head_order
        return norm if order is None else replace(norm, weight=norm.weight[list(order)])

    def _wide(self, name: str, *shape: int) -> Tensor:
        """What is held in float32 whatever the rest is."""
        return self.files.take(name, *shape).to(self.given.device, torch.float32)
