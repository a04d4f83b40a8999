"""The pieces that draft heads of one layer share, made of their files or the target's. Knows names, not layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.model.attentions import Attentions
from tpspec.model.embedding import TABLE, Embedding, head_of
from tpspec.model.layers import Layer
from tpspec.model.matrices import Matrices
from tpspec.model.mlps import Mlps
from tpspec.model.norms import Norms
from tpspec.model.sight import Shape
from tpspec.model.weights import Checkpoint
from tpspec.published.formats import HEAD
from tpspec.published.groups import HEAD_BITS
from tpspec.published.places import all_of
from tpspec.topology.shards import whole_shard

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.draft.head_files import HeadFiles
    from tpspec.draft.protocol import Given
    from tpspec.model.layer_spec import LayerSpec
    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm
    from tpspec.model.spec import ModelSpec
    from tpspec.published.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Parts:
    """spec: of a model whose last layer the head's own is like, whichever index that has in the files."""

    given: Given
    spec: ModelSpec
    target: ModelShape
    files: HeadFiles

    @property
    def matrices(self) -> Matrices:
        given = self.given
        return Matrices(self.files, None, given.dtype, given.device, given.quantize, adds_biases=True)

    def layer(self, at: str, width: int) -> Layer:
        """The layer whose names begin with `at`; width: of what attention reads, which the head has normed."""
        shape, layer, attentions, inner = self.spec.shape, self._layer, self._attentions(width), f"{at}self_attn."
        qkv, o = attentions.products(inner, layer)
        q_norm, k_norm, v_norm = attentions.head_norms(inner, layer)
        return Layer(
            index=0,
            kept_by=0,
            sight=attentions.sight(layer),
            attention_norm=None,
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=v_norm,
            o=o,
            mlp_norm=self.norm(f"{at}post_attention_layernorm.weight"),
            mlp=Mlps(self.spec, attentions.shard, self.matrices).of_layer(shape.num_layers - 1, at, whole=False),
            rope=layer.rope,
            turns_first=shape.usual.turns_first,
            sinks=attentions.sinks(inner, layer),
            gate=attentions.gate(inner, layer),
            indexer=attentions.indexer(inner, layer),
        )

    @property
    def _layer(self) -> LayerSpec:
        """Its own, as the target's last."""
        return self.spec.layers[-1]

    def _attentions(self, width: int) -> Attentions:
        return Attentions(self.spec, whole_shard(self.spec.shape), self.matrices, width=width)

    def shape(self) -> Shape:
        spec, given = self.spec, self.given
        sight = self._attentions(0).sight(self._layer)
        return Shape(
            frozenset({sight}), given.dtype, given.device, spec.score_scale, spec.gate,
            keys_alone=spec.shape.latent is not None,
        )  # fmt: skip

    def embedding(self) -> Embedding:
        """The head's own where it has one, else the target's, which stays in its file."""
        return Embedding(self._table(), self.given.dtype)

    def _table(self) -> Tensor:
        name, size, wanted = "embed_tokens.weight", self.spec.shape.vocab, self.given.vocab
        hidden = self.spec.shape.hidden
        if name not in self.files:
            return Checkpoint(self.given.target).mapped(f"{TABLE}.weight", (self.target.vocab, hidden))
        if size < wanted:
            raise UserError(f"{self.files.folder}: vocab_size is {size}; should be the target's {wanted}")
        return self.files.take(name, size, hidden)

    def lm_head(self, num_ids: int) -> Linear:
        """The head's own where it has one, else the target's, whole."""
        hidden = self.spec.shape.hidden
        if f"{HEAD}.weight" in self.files or num_ids != self.target.vocab:
            return self.matrices.product(replace(all_of(HEAD, num_ids, hidden), bits=HEAD_BITS))
        checkpoint = Checkpoint(self.given.target)
        own = head_of(checkpoint, (num_ids, hidden), tied=self.target.tied)
        matrices = replace(self.matrices, checkpoint=checkpoint, stored=self.target.stored)
        return matrices.product(replace(all_of(own, num_ids, hidden, biased=self.target.head_bias), bits=HEAD_BITS))

    def matrix(self, name: str, width: int, *, biased: bool = False) -> Linear:
        """[width] -> [D]."""
        return self.matrices.product(all_of(name, self.spec.shape.hidden, width, biased=biased))

    def norm(self, name: str, size: int | None = None) -> Norm:
        """size: None: of the head's hidden state."""
        return Norms(self.spec, self.matrices).of(name, self.spec.shape.hidden if size is None else size)
