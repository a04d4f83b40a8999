"""What a rule is given: the logits of this round's rows, possibly one vocabulary shard of them, and the cases to judge.

Pure data. `gather` is the only way out of a shard; it is handed in, so this room knows no communicator.

Shapes: T rows of the round, V vocabulary rows of this shard, N shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.request import Sampling
    from tpspec.tokens import TokenTree, Verdict
    from tpspec.verify.allowed import Constraint, Ids
    from tpspec.verify.noise import Noise
    from tpspec.verify.occurring import Occurring


def whole(x: Tensor) -> Tensor:
    """`gather` of an unsharded row: [*x.shape] -> [1, *x.shape]."""
    return x.unsqueeze(0)


def take(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of a tensor, uncopied when they are all of them in order."""
    if list(rows) == list(range(len(x))):
        return x
    return x[sent(rows, x.device)]


@dataclass(frozen=True, slots=True)
class RowLogits:
    """Raw logits of T rows for the ids [start, start + V) of a vocabulary of `vocab` ids; ids >= vocab are padding.

    gather: [*shape] -> [N, *shape], the same bytes on every rank, in rank order, one collective. gather_logits: the
    same for what a verdict does not need.
    width: the V of the widest shard (shards may differ); equal to V when unsharded, where 0 stands for it.
    listed_V: of a drafter that knows some ids only, unsharded: the id of each column, in any order.
    """

    logits_TV: Tensor
    vocab: int
    start: int = 0
    width: int = 0
    gather: Callable[[Tensor], Tensor] = whole
    listed_V: Tensor | None = None
    gather_logits: Callable[[Tensor], Tensor] = whole

    def select(self, rows: Sequence[int]) -> RowLogits:
        return replace(self, logits_TV=take(self.logits_TV, rows))


class Draw(msgspec.Struct, frozen=True):
    """One next token to draw, after `context` (prompt and output so far) and then `path` (drafts not yet accepted).

    allowed: by a grammar, of all ids; None where there is none. occurring: of the context, for penalties; None: whoever
    needs it counts anew.
    """

    context: Sequence[int]
    num_prompt: int
    sampling: Sampling
    path: tuple[int, ...] = ()
    allowed: Ids | None = None
    occurring: Occurring | None = None

    @property
    def position(self) -> int:
        """Where the drawn token will stand; with the seed, the key of its noise."""
        return len(self.context) + len(self.path)

    @property
    def withheld(self) -> frozenset[int]:
        """Ids that may not be drawn here, because the output is too short to end; unless a grammar allows no others."""
        if self.position - self.num_prompt >= self.sampling.min_tokens:
            return frozenset()
        withheld = self.sampling.withheld
        if self.allowed is not None:
            known = [token for token in withheld if token < len(self.allowed)]
            return withheld if self.allowed.sum() > self.allowed[known].sum() else frozenset()
        return withheld

    @property
    def edits(self) -> bool:
        """Whether scores of single ids change."""
        wanted = self.sampling
        return self.allowed is not None or bool(wanted.logit_bias or wanted.penalizes or self.withheld)


class Case(msgspec.Struct, frozen=True):
    """One sequence of the round. Its root is at row `row`, node i of its tree at row + 1 + i.

    context: prompt and output so far, the root last; the token judged at the root stands at position len(context).
    constraint: of a request with a grammar. occurring: of the context, see Draw.
    """

    seq: int
    row: int
    tree: TokenTree
    context: Sequence[int]
    num_prompt: int
    sampling: Sampling
    constraint: Constraint | None = None
    occurring: Occurring | None = None

    def rows(self) -> range:
        return range(self.row, self.row + 1 + len(self.tree))

    def draws(self) -> list[Draw]:
        """What is to be drawn at each of its rows, the root first."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tree.tokens, self.tree.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        allowed: Sequence[Ids | None] = [None] * len(paths)
        if self.constraint is not None:
            allowed = self.constraint.allowed(self.context[self.num_prompt :], self.tree)
        return [
            Draw(self.context, self.num_prompt, self.sampling, path, ids, self.occurring)
            for path, ids in zip(paths, allowed, strict=True)
        ]


class Listener(Protocol):
    """Who goes on while rows are judged, and before they are."""

    def asked(self) -> None:
        """All that a verdict needs has been asked of the device, and nobody has waited for it yet. From here on nothing
        else is, before one of the others is called."""

    def given_up(self) -> None:
        """It was not all: more is about to be asked. On every rank alike."""

    def drawn(self, tokens: Sequence[int]) -> None:
        """Of every row, as soon as they are known. One that cannot be drawn from has NO_TOKEN."""


class Rule(Protocol):
    """How a verdict is reached. Same arguments, same verdicts, on every rank."""

    @property
    def name(self) -> str: ...

    @property
    def draws_at_once(self) -> bool:
        """Whether it draws a token of every row, by what it mostly asks of the device once (`draw.is_told_once`)."""

    def judge(
        self, cases: Sequence[Case], rows: RowLogits, noise: Noise, listener: Listener | None = None
    ) -> list[Verdict]:
        """listener: where all is drawn at once."""
