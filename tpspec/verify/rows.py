"""What a rule is given: the logits of this round's rows, possibly one vocabulary shard of them, and the cases to judge.

Pure data. `gather` is the only way out of a shard; it is handed in, so this room knows no communicator.

Shapes: T rows of the round, V vocabulary rows of this shard, N shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.request import Sampling
    from tpspec.tokens import TokenTree, Verdict
    from tpspec.verify.noise import Noise


def whole(x: Tensor) -> Tensor:
    """`gather` of an unsharded row: [*x.shape] -> [1, *x.shape]."""
    return x.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class RowLogits:
    """Raw logits of T rows for the ids [start, start + V) of a vocabulary of `vocab` ids; ids >= vocab are padding.

    gather: [*shape] -> [N, *shape], the same bytes on every rank, in rank order, one collective.
    width: the V of the widest shard (shards may differ); equal to V when unsharded.
    """

    logits_TV: Tensor
    vocab: int
    start: int = 0
    width: int = 0
    gather: Callable[[Tensor], Tensor] = whole


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence of the round. Its root is at row `row`, node i of its tree at row + 1 + i.

    context: prompt and output so far, the root last; the token judged at the root stands at position len(context).
    """

    seq: int
    row: int
    tree: TokenTree
    context: Sequence[int]
    num_prompt: int
    sampling: Sampling


class Rule(Protocol):
    """How a verdict is reached. Same arguments, same verdicts, on every rank."""

    @property
    def name(self) -> str: ...
    def judge(self, cases: Sequence[Case], rows: RowLogits, noise: Noise) -> list[Verdict]: ...
