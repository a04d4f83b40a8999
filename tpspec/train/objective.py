"""What a head is trained for, and how good it is: the target's law among the draft ids, and greedy agreement.

Every kind of head gives the same thing, rows for an output head at each draft step, so this knows none.

Shapes: B texts, A rows of each, R rows that predict, D hidden, E hidden of the target, V draft ids, K draft steps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.train.batches import Batch

Drafts = list[tuple["Tensor", "Tensor"]]  # of each step: rows that predict [B, A], and what enters the head [rows, D]
DECAY = 0.8  # weight of a step beside the one before it: what is never reached matters less (EAGLE-3)
SCORES, LEAST = 2**21, 64  # logits that exist at once, or of so many rows: those of a whole batch would not fit a cache


def _chunk(head_VD: Tensor) -> int:
    """Rows whose logits are made at once."""
    return max(LEAST, SCORES // len(head_VD))


class Caps(NamedTuple):
    """Of logits, which go through cap * tanh(logits / cap); None: they do not."""

    target: float | None
    own: float | None


UNCAPPED = Caps(None, None)


def capped(logits_RV: Tensor, cap: float | None) -> Tensor:
    return logits_RV if cap is None else (logits_RV / cap).tanh_().mul_(cap)


class _CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of softmax(x W^T) with the target's law, 0 of no rows. All of a chunk is made on the way,
    gradients too."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weight_VD: Tensor,
        judged_RE: Tensor,
        head_VE: Tensor,
        bias_V: Tensor | None,
        caps: Caps,
    ) -> Tensor:
        learns = ctx.needs_input_grad[1]
        grad_x, grad_w = torch.empty_like(x_RD), torch.zeros_like(weight_VD, dtype=torch.float32) if learns else None
        wide_VD, total = weight_VD.to(x_RD.dtype), x_RD.new_zeros((), dtype=torch.float32)
        size = _chunk(weight_VD)
        for at in range(0, len(x_RD), size):
            rows = x_RD[at : at + size]
            judged_RV = (judged_RE[at : at + size] @ head_VE.T).float()
            law = capped(judged_RV if bias_V is None else judged_RV + bias_V, caps.target).softmax(-1)
            logits = capped((rows @ wide_VD.T).float(), caps.own)
            log_q = logits.log_softmax(-1)
            total -= (law * log_q).sum()
            grad = log_q.exp_().sub_(law).div_(len(x_RD))
            if caps.own is not None:
                grad *= 1 - (logits / caps.own).square()
            grad = grad.to(x_RD.dtype)
            grad_x[at : at + size] = grad @ wide_VD
            if grad_w is not None:
                grad_w += grad.T @ rows
        ctx.save_for_backward(grad_x, None if grad_w is None else grad_w.to(weight_VD.dtype))
        return total / max(1, len(x_RD))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        grad_x, grad_w = ctx.saved_tensors
        return grad * grad_x, None if grad_w is None else grad * grad_w, None, None, None, None


def cross_entropy(
    x_RD: Tensor,
    weight_VD: Tensor,
    judged_RE: Tensor,
    head_VE: Tensor,
    caps: Caps = UNCAPPED,
    bias_V: Tensor | None = None,
) -> Tensor:
    """judged_RE, head_VE, bias_V: the target's last hidden states, and its head's rows of the same ids as weight_VD,
    and their bias, if it has one."""
    loss: Tensor = _CrossEntropy.apply(x_RD, weight_VD, judged_RE, head_VE, bias_V, caps)  # type: ignore[no-untyped-call]
    return loss


class Judge:
    """head_VE: the target's output rows of the draft ids. place_of: draft id of every id of the target, -1 for none.

    dtype: of the products with output heads. bias_V: of those rows, or None.
    """

    def __init__(
        self,
        head_VE: Tensor,
        place_of: Tensor,
        dtype: torch.dtype,
        caps: Caps = UNCAPPED,
        bias_V: Tensor | None = None,
    ) -> None:
        self._head_VE, self._place_of, self._dtype, self._caps, self._bias_V = head_VE, place_of, dtype, caps, bias_V

    def losses(self, drafts: Drafts, output_VD: Tensor, batch: Batch) -> list[Tensor]:
        """Cross-entropy of each step with the target's law; rows whose token cannot be drafted do not count."""
        judged_BAE = batch.judged_BAD()
        losses = []
        for step, (predicts_BA, x_RD) in enumerate(drafts):
            texts, rows = predicts_BA.nonzero(as_tuple=True)
            counts = self._places(step, predicts_BA, batch) >= 0
            judged_RE = judged_BAE[texts[counts], rows[counts] + step]
            x_RD = x_RD[counts].to(self._dtype)
            losses.append(cross_entropy(x_RD, output_VD, judged_RE, self._head_VE, self._caps, self._bias_V))
        return losses

    def agreed(self, drafts: Drafts, output_VD: Tensor, batch: Batch) -> Tensor:
        """[B, A, K] bool: the greedy drafts of all steps up to this one are the tokens of the text."""
        wide_VD = output_VD.to(self._dtype)
        found = [torch.zeros_like(predicts_BA) for predicts_BA, _ in drafts]
        for step, (predicts_BA, x_RD) in enumerate(drafts):
            chunks = torch.split(x_RD.to(self._dtype), _chunk(output_VD))
            guesses_R = torch.cat([(rows @ wide_VD.T).argmax(-1) for rows in chunks])
            found[step][predicts_BA] = guesses_R == self._places(step, predicts_BA, batch)
        return torch.stack(found, -1).cumprod(-1).bool()

    def _places(self, step: int, predicts_BA: Tensor, batch: Batch) -> Tensor:
        return self._place_of[batch.tokens(step + 2)[predicts_BA]]


def chained(agreed_BAK: Tensor, depth: int) -> Tensor:
    """[B, A, depth]: as given; of one step alone, which a model repeats from row to row, so many rows on."""
    if agreed_BAK.shape[-1] == depth:
        return agreed_BAK
    right_BA = F.pad(agreed_BAK[..., 0], (0, depth - 1))
    return right_BA.unfold(1, depth, 1).cumprod(-1).bool()


def weighted(losses: list[Tensor]) -> Tensor:
    """Their mean, each step counting DECAY times the one before."""
    weights = [DECAY**step for step in range(len(losses))]
    return torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)


@dataclass(slots=True)
class _Walk:
    """Rounds of chain drafting over the texts of one kind. alive: rows at which so many drafts in a row were right."""

    rounds: int = 0
    tokens: int = 0
    rows: int = 0
    alive: list[int] = field(default_factory=list)


class Acceptance:
    """What greedy chain drafting would have had accepted in texts that the target wrote greedily."""

    def __init__(self) -> None:
        self._walks: dict[str, _Walk] = defaultdict(_Walk)

    def add(self, kind: str, lengths: list[int], depth: int) -> None:
        """lengths: at each row of one text in turn, how many drafts in a row were right."""
        for name in (kind, "all"):
            walk, at = self._walks[name], 0
            while at < len(lengths):
                walk.rounds += 1
                walk.tokens += lengths[at] + 1
                at += lengths[at] + 1
            walk.rows += len(lengths)
            alive = [sum(length > step for length in lengths) for step in range(depth)]
            walk.alive = [a + b for a, b in zip(alive, walk.alive or [0] * depth, strict=True)]

    def report(self) -> dict[str, dict[str, Any]]:
        """By kind: tokens per round, and per depth the share of rows where that many drafts in a row were right."""
        return {
            kind: {
                "tokens_per_round": round(walk.tokens / walk.rounds, 3),
                "by_depth": [round(alive / walk.rows, 4) for alive in walk.alive],
            }
            for kind, walk in sorted(self._walks.items())
        }


def lengths(agreed_AK: Tensor, real_A: Tensor) -> list[int]:
    """Of one text: at each row, how many drafts in a row were right."""
    counts: list[int] = agreed_AK.sum(-1)[real_A].tolist()
    return counts
