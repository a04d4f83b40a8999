"""Which experts of a mixture a row is sent to, and what each of them weighs.

Every shard has the whole router, and all must send a row to the same experts: it computes in float32, whatever the
model's dtype, where two experts hardly ever come so close that machines which round differently would choose
differently. card/router.py does the same on a card. Must not know ranks or names, nor what experts do.

Shapes: T rows, D hidden, N experts, K of them for each row, G groups of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tpspec.published.experts import GROUP_SCORES

if TYPE_CHECKING:
    from torch import Tensor

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
