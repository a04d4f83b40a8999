"""The shape of a tree: which of the candidates after each node it holds. Ranks and odds; must not know tokens or texts.

A rank path names a node by the rank of each node from below the root down to it: (0, 2) is the third candidate after
the first. A node comes true when all on its path do, so a tree is worth the sum of its path odds, and no path is
likelier than its beginning: the likeliest paths, best first, are the best tree of any size. That is the tree that
Sequoia's dynamic programme finds (Chen et al., arXiv 2402.12374), which plans for a given size and odds by rank.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import prod
from typing import TYPE_CHECKING

from tpspec.draft.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.topology.rank_paths import RankPath

MOST_DEPTH = 16
MOST_NODES = 64
PLAN_ROUNDS = 64  # what a tree holds is planned anew after so many
BELIEF, BELIEF_WEIGHT = 0.6, 8.0  # that the first candidate is right, before anything was seen; the r-th: that over r^2


def likeliest(odds: Sequence[Sequence[float]], most: int) -> list[RankPath]:
    """The best tree of `most` nodes: best first, so that any beginning of it is the best of its size.

    odds[depth][rank]: of a candidate, if the path to it came true. One without any is never proposed. Of the equally
    likely the one nearest to the root comes first: a parent is never behind its child.
    """
    paths: list[RankPath] = []
    open: list[tuple[float, int, RankPath]] = [(-1.0, 0, ())]
    while open and len(paths) <= most:
        minus_p, depth, path = heappop(open)
        paths.append(path)
        for rank, p in enumerate(odds[depth] if depth < len(odds) else ()):
            if p > 0:
                heappush(open, (minus_p * p, depth + 1, (*path, rank)))
    return paths[1:]


class Shape:
    """A tree that is the same for every text, until what was seen of all texts says that another is better.

    choices: rank paths that it holds, as Medusa's lists; without any, the best tree is planned. num_depths: tokens that
    are proposed in a row at most. branches: candidates that are needed after each node.
    """

    def __init__(self, branches: int, choices: Sequence[RankPath], num_depths: int) -> None:
        self._choices = [path for path in closed(choices) if len(path) <= num_depths]
        self.branches = 1 + max(map(max, self._choices)) if self._choices else branches
        self._num_depths, self._num_seen = num_depths, 0
        beliefs = [BELIEF / (1 + rank) ** 2 for _ in range(num_depths) for rank in range(self.branches)]
        self._record = Record(beliefs, BELIEF_WEIGHT)
        self._plan()

    def paths(self, most: int) -> Sequence[RankPath]:
        """Of a tree of at most so many nodes, best first."""
        return self._paths[:most]

    def odds(self, path: RankPath) -> float:
        """Of the last node on the path, if those before it came true."""
        return self._odds[len(path) - 1][path[-1]]

    def saw(self, ranks: Sequence[int | None]) -> None:
        """What came: at each depth the rank of the token that did, None where it was no candidate."""
        for depth, came in enumerate(ranks[: self._num_depths]):
            for rank in range(self.branches):
                self._record.add(self._kind(depth, rank), right=rank == came)
        self._num_seen += 1
        if self._num_seen % PLAN_ROUNDS == 0:
            self._plan()

    def _plan(self) -> None:
        self._odds = [
            [self._record.odds(self._kind(depth, rank)) for rank in range(self.branches)]
            for depth in range(self._num_depths)
        ]
        if self._choices:
            self._paths = sorted(self._choices, key=lambda path: (-self._path_odds(path), len(path), path))
        else:
            self._paths = likeliest(self._odds, MOST_NODES)

    def _path_odds(self, path: RankPath) -> float:
        return prod(self.odds(path[: depth + 1]) for depth in range(len(path)))

    def _kind(self, depth: int, rank: int) -> int:
        return depth * self.branches + rank


def rank_of(token: int, candidates: Sequence[int]) -> int | None:
    return candidates.index(token) if token in candidates else None


def closed(paths: Sequence[RankPath]) -> list[RankPath]:
    """These paths and all that lead to them, once each, none before its parent."""
    return list(dict.fromkeys(path[:stop] for path in paths for stop in range(1, len(path) + 1)))
