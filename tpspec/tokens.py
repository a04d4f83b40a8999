"""Nouns of drafting and verifying: a tree of proposed tokens, the verdict on it. No tensors of a model, no ranks.

A chain is a tree. Row 0 of a verification span is the root (the last committed token); node i of the tree is row i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import isclose
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = -1
NO_TOKEN = -1  # drawn from a row that cannot be drawn from


@dataclass(frozen=True, slots=True)
class Draws:
    """The distribution q from which the children of one row were drawn: its whole support, sparse.

    ids: token ids, ascending. probs: float64 probabilities, same order, sum 1. Children of the row were drawn from it
    without replacement in the order in which they stand in the tree. `None` in place of a `Draws` means that the
    children were chosen deterministically (each is a point mass).
    """

    ids: tuple[int, ...]
    probs: tuple[float, ...]

    @property
    def is_sound(self) -> bool:
        """Whether it is a distribution at all."""
        ascends = all(one < next for one, next in pairwise(self.ids))
        return len(self.ids) == len(self.probs) and ascends and _are_odds(self.probs) and isclose(sum(self.probs), 1)


class TokenTree(msgspec.Struct, frozen=True):
    """Tokens proposed under the root.

    tokens[i] is node i; parents[i] < i is its parent node, or ROOT. Siblings stand in draw order and differ.
    draws[j], when given, belongs to row j (0 the root, i + 1 node i) and says how that row's children were drawn.
    odds[i], when given, is the source's estimate that node i is accepted if its parent is.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draws: tuple[Draws | None, ...] | None = None
    odds: tuple[float, ...] | None = None

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        draws: Sequence[Draws | None] | None = None,
        odds: Sequence[float] | None = None,
    ) -> TokenTree:
        """K tokens, each the child of the one before; draws: one for each row that has a child (K of them)."""
        rows = None if draws is None else (*draws, None)
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), rows, None if odds is None else tuple(odds))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_sound(self) -> bool:
        """Whether it is a tree at all, whatever its tokens are."""
        size = len(self.tokens)
        if len(self.parents) != size or not all(ROOT <= parent < i for i, parent in enumerate(self.parents)):
            return False
        if self.odds is not None and not (len(self.odds) == size and _are_odds(self.odds)):
            return False
        return self.draws is None or (
            len(self.draws) == size + 1 and all(draws is None or draws.is_sound for draws in self.draws)
        )

    @property
    def is_chain(self) -> bool:
        return not self.parents or self.parents == tuple(range(-1, len(self.tokens) - 1))

    def children(self, node: int) -> list[int]:
        """Nodes whose parent is `node` (ROOT for the root), in draw order."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to `node`, inclusive; empty for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def depths(self) -> list[int]:
        """Distance of each node from the root; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def known(self, vocab: int) -> TokenTree:
        """The nodes before the first whose token is no id of a vocabulary of `vocab` ids; usually the tree itself."""
        if not self.tokens or (min(self.tokens) >= 0 and max(self.tokens) < vocab):
            return self
        return self.pruned(next(node for node, token in enumerate(self.tokens) if not 0 <= token < vocab))

    def only(self, nodes: Sequence[int]) -> TokenTree:
        """These nodes, ascending, each with its parent among them; they are numbered anew."""
        number = {ROOT: ROOT} | {node: i for i, node in enumerate(nodes)}
        tokens = tuple(self.tokens[node] for node in nodes)
        parents = tuple(number[self.parents[node]] for node in nodes)
        draws = None if self.draws is None else tuple(self.draws[row] for row in (0, *(node + 1 for node in nodes)))
        odds = None if self.odds is None else tuple(self.odds[node] for node in nodes)
        return TokenTree(tokens, parents, draws, odds)

    def pruned(self, size: int) -> TokenTree:
        """The first `size` nodes: parents come first, so a prefix is a tree."""
        return self if size >= len(self.tokens) else self.only(range(size))

    def up_to_depth(self, depth: int) -> TokenTree:
        """The longest prefix of the tree that is no deeper than `depth`.

        A prefix, so that nodes keep their numbers: a drafter reads the path of a verdict in the tree it proposed.
        """
        if len(self.tokens) <= depth:
            return self
        too_deep = (node for node, below in enumerate(self.depths()) if below > depth)
        return self.pruned(next(too_deep, len(self.tokens)))


NO_DRAFT = TokenTree()


class Verdict(msgspec.Struct, frozen=True):
    """What one round decided for one sequence.

    path: the accepted nodes of its tree, from the root down. tokens: what is emitted, the accepted tokens and then
    the target's own next token, so len(tokens) == len(path) + 1. picks: the target's own next token at the root and at
    every node, whether it was reached or not; empty where the rule does not know them.
    corrupt: the row after the path holds a NaN or an infinity, or nothing that may be drawn. The tokens are then those
    of the path alone.
    """

    seq: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    picks: tuple[int, ...] = ()
    corrupt: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    """What a drafter expects of sequence `seq`, when it had `base` tokens, after the drafts of `path`.

    tokens: best first, a chain goes on with the first; odds: that each comes, if the path did. draws: how the first
    was drawn, where that matters.
    """

    seq: int
    base: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    odds: tuple[float, ...]
    draws: Draws | None = None

    @property
    def is_sound(self) -> bool:
        """Whether it can be one at all, whatever its tokens are."""
        is_drawn = self.draws is None or self.draws.is_sound
        return len(self.tokens) == len(self.odds) and _are_odds(self.odds) and self.base >= 0 and is_drawn


def path_odds(parents: Sequence[int], odds: Sequence[float]) -> list[float]:
    """Of each node of a tree, that it is accepted with all above it; odds: that it is, if its parent is."""
    paths: list[float] = []
    for parent, p in zip(parents, odds, strict=True):
        paths.append(p * (paths[parent] if parent != ROOT else 1.0))
    return paths


def _are_odds(values: Sequence[float]) -> bool:
    return all(0 <= value <= 1 for value in values)  # NaN is not
