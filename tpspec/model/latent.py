"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1), computed on the latents as they are cached.

For the latent c of a token, a head's key is W_k c, beside numbers that rope turned, and its value W_v c. As q (W_k c)
is (W_k^T q) c, and a sum of values W_v times the same sum of latents, queries are multiplied by W_k^T before attention
and what that gives by W_v behind it. In between all heads have one key, which is its own value, and attention need not
know more. Both ends are a `Linear`. Must not know attention or ranks.

What is cached of a token has two halves, as rope turns them against each other: [half of the numbers that rope turns,
half of the latent], twice.

Shapes: T rows, H query heads of the shard, L numbers of a latent, P and R of a query, which rope leaves and turns, V of
a head's value, E = L + R.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpspec.model.indexer import Read

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.linear import Linear
    from tpspec.model.norm import Norm
    from tpspec.published.latent import Latent

QUERY_NORM, KEY_NORM = "q_a_layernorm.weight", "kv_a_layernorm.weight"  # as checkpoints call them
EPS = 1e-6  # of the norms within attention, whatever the config says of the others; as transformers


@dataclass(frozen=True, slots=True)
class Reduced:
    """Queries of what the hidden state is reduced to: [Q] -> norm -> [H (P + R)]."""

    norm: Norm
    queries: Linear


@dataclass(frozen=True, slots=True)
class LatentQkv:
    """[T, D] -> [T, (H + 1) E], queries and the one key.

    down: [D] -> [X + L + R + I], the first X queries, or what `reduced` makes them of, the last I a key of an index, if
    there is one. keys: [H, P, L]. turned: R. indexed: I.
    """

    down: Linear
    reduced: Reduced | None
    norm: Norm
    keys_HPL: Tensor
    turned: int
    indexed: int = 0

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.beside(x_TI)[0]

    def beside(self, x_TD: Tensor) -> tuple[Tensor, Read]:
        """And what an index is made of."""
        H, P, L = self.keys_HPL.shape
        R, T = self.turned, len(x_TD)
        down_TX = self.down(x_TD)
        made_TX, latent_TL, turned_TR, key_TI = torch.split(
            down_TX, [down_TX.shape[1] - L - R - self.indexed, L, R, self.indexed], 1
        )
        q_TX = made_TX
        if self.reduced is not None:
            made_TX = self.reduced.norm(made_TX)
            q_TX = self.reduced.queries(made_TX)
        q_THX = q_TX.view(T, H, P + R)
        latents_HTL = torch.bmm(q_THX[..., :P].transpose(0, 1), self.keys_HPL)
        heads = q_TX.new_empty(T, H + 1, 2, (L + R) // 2)
        heads[:, :H, :, : R // 2] = q_THX[..., P:].view(T, H, 2, R // 2)
        heads[:, :H, :, R // 2 :] = latents_HTL.view(H, T, 2, L // 2).transpose(0, 1)
        heads[:, H, :, : R // 2] = turned_TR.view(T, 2, R // 2)
        heads[:, H, :, R // 2 :] = self.norm(latent_TL).view(T, 2, L // 2)
        return heads.flatten(1), Read(x_TD, made_TX, key_TI)


@dataclass(frozen=True, slots=True)
class LatentOut:
    """[T, H E] -> [T, D], a partial sum. values: [H, L, V]. out: [H V] -> [D]."""

    values_HLV: Tensor
    out: Linear

    def __call__(self, x_TI: Tensor) -> Tensor:
        H, L, _ = self.values_HLV.shape
        T = len(x_TI)
        halves_TH2X = x_TI.view(T, H, 2, -1)
        latents_HTL = halves_TH2X[..., halves_TH2X.shape[3] - L // 2 :].transpose(0, 1).reshape(H, T, L)
        return self.out(torch.bmm(latents_HTL, self.values_HLV).transpose(0, 1).flatten(1))


def around(
    latent: Latent,
    *,
    down: Linear,
    reduced: Reduced | None,
    norm: Norm,
    made_XL: Tensor,
    out: Linear,
    indexed: int = 0,
) -> tuple[LatentQkv, LatentOut]:
    """What stands before attention, and behind it. made: [H (P + V), L], as checkpoints have it. indexed: see
    LatentQkv."""
    keys_HPL, values_HVL = torch.split(made_XL.view(-1, latent.made, latent.rank), [latent.plain, latent.values], 1)
    if reduced is not None:
        reduced = replace(reduced, norm=replace(reduced.norm, eps=EPS))
    return (
        LatentQkv(down, reduced, replace(norm, eps=EPS), keys_HPL.contiguous(), latent.turned, indexed),
        LatentOut(values_HVL.transpose(1, 2).contiguous(), out),
    )


def turned_last(num_left: int, num_turned: int, *, alternate: bool) -> tuple[int, ...]:
    """An order of a head's numbers, the last of which rope turns, with those in two halves. alternate: it turns a
    number with the next."""
    order = torch.arange(num_turned).view(-1, 2).T.flatten() if alternate else torch.arange(num_turned)
    return (*range(num_left), *(num_left + order).tolist())
