"""What a layer of a shard is made of: its norms, products and heads. Data.

What happens between the products is steps.py's matter. Must not know ranks, or which architecture it is.

Shapes: T rows of the round, D hidden, H query heads and G kv heads of this shard, E head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpspec.cache.store import Kept
from tpspec.model.latent import LatentQkv

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.comm.communicator import Communicator
    from tpspec.model.delta_net import Mixer
    from tpspec.model.gates import HeadGate
    from tpspec.model.indexer import Indexer
    from tpspec.model.joint_norm import JointNorm
    from tpspec.model.late_norm import LateNorm
    from tpspec.model.linear import Linear
    from tpspec.model.mlp import Mlp
    from tpspec.model.norm import Norm
    from tpspec.model.per_layer import LayerInputs
    from tpspec.model.short_conv import GatedConv
    from tpspec.model.sight import Sight
    from tpspec.model.steps import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyLayer:
    """What every layer of a shard may have. mlp, where there is one, gives partial sums.

    mlp_norm: of what the MLP reads, or None. mlp_out_norm: of the whole sums that it gives, before they are added; or
    None. mlp_joined: see AddNorm. inputs: what reads a token's numbers for this layer, behind the MLP; or None.
    parallel: the MLP reads what attention reads, and ranks sum what both give at once. scale: of what leaves the layer.
    """

    index: int
    mlp_norm: Norm | None
    mlp: Mlp | None
    mlp_out_norm: Norm | None = None
    mlp_joined: tuple[Norm, Norm] | None = None
    inputs: LayerInputs | None = None
    parallel: bool = False
    scale: float = 1.0


class MlpLayer(AnyLayer):
    """A layer that is an MLP alone."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingLayer(AnyLayer, ABC):
    """A layer whose rows tell each other something before its MLP. attention_norm, attention_out_norm: of what that
    reads, and of the whole sums that it gives; or None."""

    attention_norm: Norm | None
    attention_out_norm: Norm | None = None

    @property
    def late_norm(self) -> LateNorm | None:
        """Of what ranks sum behind it."""
        return None

    @abstractmethod
    def mixed(self, x_TD: Tensor, steps: Steps, round: Any, comm: Communicator | None = None) -> Tensor:
        """What its rows tell each other: this shard's part of the sum, [T, D]; of a layer with a late norm what that is
        to be made of, [T, Y]. comm: for a norm over ranks' heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(MixingLayer):
    """A layer with attention. qkv: [D] -> [(H + 2G) E]; [(H + G) E] where keys are their own values, or values are made
    of what keys are made of, before its norm and rope; [H E] where it keeps nothing. o gives partial sums.
    kept_by: the index of the layer whose keys and values it reads, which may be its own.

    joint_norm: of queries and keys, in place of q_norm and k_norm; or None. turns_first: those two are of what rope has
    turned, not of what it turns. v_norm: of values; or None. rope: which of the model's ropes turns queries and keys;
    or None. sinks: [H] of this shard, float32; or None. gate: what attention gives is multiplied with it; or None.
    indexer: what chooses the tokens that rows attend to, here and in the layers behind it that have none, of a model
    with such; its key is kept, too. beside: linear attention that reads the same, and is summed likewise; or None.
    """

    kept_by: int
    sight: Sight
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    rope: int | None
    joint_norm: JointNorm | None = None
    turns_first: bool = False
    v_norm: Norm | None = None
    sinks: Tensor | None = None
    gate: HeadGate | None = None
    indexer: Indexer | None = None
    beside: LinearLayer | None = None

    @property
    def kept(self) -> Kept:
        """Of a token, by this layer or by the one whose keys and values it reads."""
        heads, index_dim = self.sight.heads, 0 if self.indexer is None else self.indexer.dim
        return Kept(heads.num_kv, heads.dim, self.sight.is_windowed, index_dim)

    def mixed(self, x_TD: Tensor, steps: Steps, round: Any, comm: Communicator | None = None) -> Tensor:
        if self.indexer is None:
            qkv_TX = self.qkv(x_TD)
        else:
            assert isinstance(self.qkv, LatentQkv), "which alone makes what an index is made of"
            qkv_TX, read = self.qkv.beside(x_TD)
            steps.choose(self, self.indexer, read, round)
        if self.joint_norm is not None:
            assert comm is not None, "the decoder that has such layers gives it"
            qkv_TX = self.joint_norm(x_TD, qkv_TX, steps, comm)
        attended_TX = steps.attention(self, qkv_TX, round)
        given_TD = self.o(attended_TX if self.gate is None else steps.weighed(attended_TX, self.gate, x_TD))
        return given_TD if self.beside is None else given_TD + self.beside.mixed(x_TD, steps, round, comm)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer(MixingLayer):
    """A layer with linear attention in place of attention."""

    mixer: Mixer

    @property
    def late_norm(self) -> LateNorm | None:
        return self.mixer.late

    def mixed(self, x_TD: Tensor, steps: Steps, round: Any, comm: Communicator | None = None) -> Tensor:
        mixer, made = self.mixer, self.mixer.made(x_TD)
        given_TD = mixer.out(steps.linear_attention(self, made, round))
        if mixer.late is None:
            return given_TD
        assert comm is not None, "as of a joint norm"
        assert made.squares_T is not None, "what has a late norm makes them"
        return mixer.late.partly(given_TD, made.squares_T, steps, comm)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvLayer(MixingLayer):
    """A layer with a short convolution in place of attention."""

    mixer: GatedConv

    def mixed(self, x_TD: Tensor, steps: Steps, round: Any, comm: Communicator | None = None) -> Tensor:
        return self.mixer.out(steps.convolved(self, self.mixer.made(x_TD), round))
