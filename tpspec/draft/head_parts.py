"""The pieces that draft heads of one layer share, made of their files or the target's. Knows names, not layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.model.linear import linear, rounded_linear
from tpspec.model.mlp import GatedMlp
from tpspec.model.steps import Layer, Norm, Shape
from tpspec.model.weights import Checkpoint
from tpspec.topology.groups import BITS, HEAD_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.draft.head_files import HeadFiles
    from tpspec.draft.protocol import Given
    from tpspec.model.architectures import ModelSpec
    from tpspec.model.linear import Linear
    from tpspec.topology.groups import Bits
    from tpspec.topology.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Parts:
    """spec: of the head's own layer, whose index is 0 whichever it has in the files."""

    given: Given
    spec: ModelSpec
    target: ModelShape
    files: HeadFiles

    def layer(self, at: str, width: int) -> Layer:
        """The layer whose names begin with `at`; width: of what attention reads, which the head has normed."""
        spec, attention, mlp = self.spec, at + "self_attn.", at + "mlp."
        mlp_norm = self.norm(at + "post_attention_layernorm.weight")
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        names = [attention + "q_proj", attention + "k_proj", attention + "v_proj"]
        return Layer(
            index=0,
            attention_norm=mlp_norm,  # never called
            qkv=self.matrix(names, [queries, keys, keys], width, biased=spec.qkv_bias),
            q_norm=self.norm(attention + "q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=self.norm(attention + "k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            o=self.matrix([attention + "o_proj"], [spec.hidden], queries, biased=spec.o_bias),
            attention_out_norm=None,
            mlp_norm=mlp_norm,
            mlp=GatedMlp(
                self.matrix(
                    [mlp + "gate_proj", mlp + "up_proj"], [spec.intermediate] * 2, spec.hidden, biased=spec.mlp_bias
                ),
                self.matrix([mlp + "down_proj"], [spec.hidden], spec.intermediate, biased=spec.mlp_bias),
            ),
            mlp_out_norm=None,
            rope=spec.layers[-1].rope,
            window=spec.layers[-1].window,
        )

    def shape(self) -> Shape:
        spec, given = self.spec, self.given
        group = spec.num_heads // spec.num_kv_heads
        kv_of = tuple(head // group for head in range(spec.num_heads))
        windows = frozenset({spec.layers[-1].window})
        return Shape(kv_of, spec.head_dim, given.dtype, given.device, windows, spec.score_scale, spec.gate)

    def embedding(self) -> Tensor:
        """The head's own where it has one, else the target's, which stays in its file."""
        spec, name, wanted = self.spec, "embed_tokens.weight", self.given.vocab
        if name not in self.files:
            return Checkpoint(self.given.target).mapped("model." + name, (self.target.vocab, spec.hidden))
        if spec.vocab < wanted:
            raise UserError(f"{self.files.folder}: vocab_size is {spec.vocab}; should be the target's {wanted}")
        return self.files.take(name, spec.vocab, spec.hidden)

    def lm_head(self, num_ids: int) -> Linear:
        """The head's own where it has one, else the target's, whole."""
        name = "lm_head.weight"
        if name in self.files or num_ids != self.target.vocab:
            return self.linear(self.files.take(name, num_ids, self.spec.hidden), bits=HEAD_BITS)
        name = "model.embed_tokens.weight" if self.target.tied else name
        return self.linear(Checkpoint(self.given.target).read(name, (num_ids, self.spec.hidden)), bits=HEAD_BITS)

    def matrix(self, names: Sequence[str], sizes: Sequence[int], width: int, *, biased: bool = False) -> Linear:
        """Several matrices as one: [sum of sizes, width]."""
        named = list(zip(names, sizes, strict=True))
        weight_OI = torch.cat([self.files.take(f"{name}.weight", size, width) for name, size in named])
        bias_O = torch.cat([self.files.take(f"{name}.bias", size) for name, size in named]) if biased else None
        return self.linear(weight_OI, bias_O)

    def linear(self, weight_OI: Tensor, bias_O: Tensor | None = None, bits: Bits | None = None) -> Linear:
        """bits: of a quantized matrix, if not as asked for."""
        device, dtype, quantize = self.given.device, self.given.dtype, self.given.quantize
        bias_O, weight_OI = None if bias_O is None else bias_O.to(device, dtype), weight_OI.to(device, dtype)
        if quantize is None:
            return linear(weight_OI, bias_O)
        return rounded_linear(weight_OI, bias_O, bits or BITS[quantize])

    def norm(self, name: str, size: int | None = None) -> Norm:
        weight = self.files.take(name, self.spec.hidden if size is None else size)
        return Norm(weight.to(self.given.device, torch.float32), self.spec.eps)


def as_it_is(taps_TW: Tensor) -> Tensor:
    """The projection of a head that takes a tap for a feature."""
    return taps_TW
