"""A mixture of experts in place of an MLP: a router sends each row to some of them, and adds up what they make of it.

Every shard has its channels of every expert and the whole router, so all shards must send a row to the same ones: the
router computes in float32, whatever the model's dtype, where two experts hardly ever come so close that machines which
round differently would choose differently. card/experts.py does the same on a card. Must not know ranks or names.

Shapes: T rows, D hidden, N experts, K of them for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from tpspec.model.curves import sigmoid
from tpspec.published.experts import GROUP_SCORES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tpspec.model.linear import Linear
    from tpspec.model.mlp import GatedMlp, Mlp
    from tpspec.model.steps import Steps
    from tpspec.published.experts import Experts


class Router:
    """weight_ND, bias_N: float32. The second is added to the logits; where `experts` are corrected, to what they are
    chosen by, and only to choose. scales_N: float32, of the weight of each; or None."""

    def __init__(
        self, weight_ND: Tensor, experts: Experts, bias_N: Tensor | None = None, scales_N: Tensor | None = None
    ) -> None:
        self.weight_ND, self.bias_N, self.experts, self.scales_N = weight_ND, bias_N, experts, scales_N

    def __call__(self, x_TD: Tensor, *, whole: bool = False) -> tuple[Tensor, Tensor]:
        """The experts of every row, [T, K], and the weights of what they make of it, float32. whole: see Mixture."""
        made_TN = self._made(x_TD)
        # Of which torch makes other bits at the end of a tensor.
        if whole and (self.experts.sigmoid or self.experts.margin is not None):
            alone = [self._chosen(self._bent(row_1N)) for row_1N in torch.split(made_TN, 1)]
            indices, weights = zip(*alone, strict=True)
            return torch.cat(indices), torch.cat(weights)
        return self._chosen(self._bent(made_TN))

    def _chosen(self, logits_TN: Tensor) -> tuple[Tensor, Tensor]:
        if self.experts.margin is not None:
            return self._one_by_one(logits_TN, self.experts.margin)
        experts, ranked_TN = self.experts, self.ranked(logits_TN)
        if experts.is_divided:
            ranked_TN = ranked_TN + self.closed(ranked_TN)
        chosen = ranked_TN.topk(experts.chosen)
        if experts.sigmoid:
            weights_TK = logits_TN.sigmoid().gather(1, chosen.indices)
            if experts.sums_to_one:
                weights_TK /= weights_TK.sum(1, keepdim=True) + experts.added
            return chosen.indices, weights_TK * experts.scale
        total_T1 = (chosen.values if experts.sums_to_one else logits_TN).logsumexp(1, keepdim=True)
        weights_TK = (chosen.values - total_T1).exp() * experts.scale
        return chosen.indices, weights_TK if self.scales_N is None else weights_TK * self.scales_N[chosen.indices]

    def _one_by_one(self, logits_TN: Tensor, margin: float) -> tuple[Tensor, Tensor]:
        """Of which each is chosen among those that are left."""
        left_TN, indices, weights = logits_TN, [], []
        for _ in range(self.experts.chosen):
            best_T1, index_T1 = left_TN.max(1, keepdim=True)
            far_TN = best_T1 - logits_TN > margin * logits_TN.abs().maximum(best_T1)
            indices.append(index_T1)
            weights.append(1 / (left_TN - best_T1).exp().masked_fill(far_TN, 0).sum(1, keepdim=True))
            left_TN = left_TN.scatter(1, index_T1, -torch.inf)
        return torch.cat(indices, 1), torch.cat(weights, 1)

    def ranked(self, logits_TN: Tensor) -> Tensor:
        """[T, N], what experts are chosen by."""
        if self.experts.corrected is None:
            return logits_TN
        assert self.bias_N is not None, "it is what corrects"
        return (logits_TN.sigmoid() if self.experts.corrected == "sigmoids" else logits_TN) + self.bias_N

    def closed(self, ranked_TN: Tensor) -> Tensor:
        """[T, N], 0 for experts of the groups that are best for a row, -inf for others."""
        experts = self.experts
        num_scores = GROUP_SCORES if experts.sigmoid else 1
        best_TG = ranked_TN.view(len(ranked_TN), experts.groups, -1).topk(num_scores).values.sum(2)
        closed_TG = torch.full_like(best_TG, -torch.inf).scatter_(1, best_TG.topk(experts.groups_chosen).indices, 0)
        return closed_TG[..., None].expand(-1, -1, experts.count // experts.groups).flatten(1)

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, N] in float32; of experts that are chosen by parts of a softmax, what has those for sigmoids."""
        return self._bent(self._made(x_TD))

    def _made(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD.float(), self.weight_ND, None if self.experts.corrected else self.bias_N)

    def _bent(self, logits_TN: Tensor) -> Tensor:
        if self.experts.cap is not None:
            logits_TN = (logits_TN / self.experts.cap).tanh() * self.experts.cap
        return logits_TN.softmax(1).logit() if self.experts.of_parts else logits_TN


@dataclass(frozen=True, slots=True)
class Multiplied:
    """Each number of a row by one of its own."""

    own_D: Tensor

    def __call__(self, x_TI: Tensor) -> Tensor:
        return x_TI * self.own_D


class Around(NamedTuple):
    """What makes of rows what experts, and not the router, read; and of what these give together, a partial sum, one of
    rows again, or None."""

    before: Linear
    behind: Linear | None


class Mixture:
    """whole: every expert that has a row gets all of them, so that a row's bits do not depend on where others are sent
    (deterministic); else the rows that are its own."""

    def __init__(self, router: Router, experts: Sequence[Mlp], *, whole: bool, around: Around | None = None) -> None:
        self.router, self.experts, self._whole, self._around = router, experts, whole, around

    def __call__(self, x_TD: Tensor, steps: Steps) -> Tensor:
        chosen_TK, weights_TK = self.router(x_TD, whole=self._whole)
        x_TD = x_TD if self._around is None else self._around.before(x_TD)
        weights_P, sums_TD = weights_TK.flatten(), x_TD.new_zeros(x_TD.shape, dtype=torch.float32)
        for expert, pairs in _by_expert(chosen_TK):
            rows, weights_R1 = pairs // chosen_TK.shape[1], weights_P[pairs, None]
            sums_TD.index_add_(0, rows, self._weighed(self.experts[expert], x_TD, rows, weights_R1, steps))
        return behind(self._around, sums_TD.to(x_TD.dtype))

    def _weighed(self, mlp: Mlp, x_TD: Tensor, rows: Tensor, weights_R1: Tensor, steps: Steps) -> Tensor:
        """What an expert makes of some rows, or of what these come to by their weights; [R, D] in float32."""
        if not self.router.experts.on_inputs:
            made_RD = mlp(x_TD, steps)[rows] if self._whole else mlp(x_TD[rows], steps)
            return made_RD.float() * weights_R1
        read_RD = (x_TD[rows] * weights_R1).to(x_TD.dtype)
        made_RD = mlp(x_TD.index_copy(0, rows, read_RD), steps)[rows] if self._whole else mlp(read_RD, steps)
        return made_RD.float()


def behind(around: Around | None, sums_TD: Tensor) -> Tensor:
    return sums_TD if around is None or around.behind is None else around.behind(sums_TD)


def mixture_of(
    router: Router, experts: Sequence[GatedMlp], *, on_card: bool, whole: bool = False, around: Around | None = None
) -> Mlp:
    """For where the experts are: on a card, their products are the references. whole: see Mixture."""
    if not on_card:
        return Mixture(router, experts, whole=whole, around=around)
    from tpspec.model.card.experts import CardMixture  # Triton comes with torch for cards only

    return CardMixture(router, experts, around)


class Shared:
    """A mixture, and beside it an MLP that every row goes through. gate_1D: of what that gives, float32; or None.
    scale: of it, behind that gate."""

    def __init__(self, mixture: Mlp, shared: Mlp, gate_1D: Tensor | None = None, scale: float = 1.0) -> None:
        self.mixture, self.shared, self.gate_1D, self.scale = mixture, shared, gate_1D, scale

    def __call__(self, x_TD: Tensor, steps: Steps) -> Tensor:
        made_TD = self.shared(x_TD, steps)
        if self.gate_1D is not None:
            made_TD = made_TD * sigmoid((x_TD.float() * self.gate_1D).sum(1, keepdim=True)).to(x_TD.dtype)
        return torch.add(self.mixture(x_TD, steps), made_TD, alpha=self.scale)


class Apart:
    """An MLP that every row goes through, and a mixture, each of whose sums over ranks has a norm of its own: the parts
    of this shard stand one behind the other, [2 T, D]. own_D: what rows are multiplied by before the MLP reads them."""

    def __init__(self, shared: Mlp, mixture: Mlp, own_D: Tensor) -> None:
        self.shared, self.mixture, self.own_D = shared, mixture, own_D

    def __call__(self, x_TD: Tensor, steps: Steps) -> Tensor:
        made_TD = self.shared(x_TD * self.own_D, steps)
        return torch.cat([made_TD, self.mixture(x_TD, steps)])


def _by_expert(chosen_TK: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each expert that has rows, and its places in the flattened T * K, ascending."""
    chosen_P = chosen_TK.flatten()
    places = torch.split(chosen_P.argsort(stable=True), chosen_P.bincount().tolist())
    return ((expert, pairs) for expert, pairs in enumerate(places) if len(pairs))
