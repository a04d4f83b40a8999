"""Exact enumeration of everything chance can do to the real rules: no sampling, no tolerance but rounding.

`BranchingNoise` is one uniform number for each (seed, position, stream) and each coin, known only as an interval. Every
question a rule asks cuts the interval, and `every` runs the program once for each answer, with its probability. A
number asked twice answers consistently, so noise shared between draft and target, or reused by mistake in a later
round, shows in the law. Winners are read off the cumulative law (any coupling with the right marginals will do).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.verify.noise import Stream

    Key = tuple[int, ...]  # position first
    Known = frozenset[tuple[Key, tuple[float, float]]]

Outcome = TypeVar("Outcome")
SLIVER = 1e-15  # intervals this short are rounding, not chance


class Choices:
    """One run's answers: a script to repeat, then the first possibility, remembering the others."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.weight = script, list[int](), 1.0
        self.others: list[list[int]] = []

    def choose(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > SLIVER]
        repeated = len(self.taken) < len(self.script)
        choice = self.script[len(self.taken)] if repeated else possible[0]
        if not repeated:
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.weight *= weights[choice] / sum(weights)
        return choice


def every(program: Callable[[Choices], Outcome]) -> dict[Outcome, float]:
    """The law of what `program` returns."""
    law: dict[Outcome, float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        choices = Choices(scripts.pop())
        law[program(choices)] += choices.weight
        scripts += choices.others
    return dict(law)


class Coin:
    """A uniform number that answers `u * q < p`."""

    def __init__(self, noise: BranchingNoise, key: Key, scale: float = 1.0) -> None:
        self.noise, self.key, self.scale = noise, key, scale

    def __mul__(self, factor: float) -> Coin:
        return Coin(self.noise, self.key, self.scale * factor)

    def __lt__(self, bound: float) -> bool:
        return self.noise.cell(self.key, [bound / self.scale]) == 0

    def __le__(self, bound: float) -> bool:
        return self < bound


class BranchingNoise:
    """A `Noise` that branches. `now`: the position of the next token to be emitted; what lies before it is spent.

    Spent numbers are forgotten, so that rounds that only differ in them are one; that is sound because `key` refuses
    them. A mutant that reuses them sets `remembers`.
    """

    remembers = False

    def __init__(self, choices: Choices, known: Known, now: int) -> None:
        self.choices, self.now = choices, now
        self.known = dict(known)

    def key(self, seed: int, position: int, stream: Stream) -> Key:
        assert position >= self.now, "noise of an emitted token was asked for again"
        return (position, seed, stream)

    def left(self, now: int) -> Known:
        """What is known of the numbers that position `now` and later ones may ask for."""
        return frozenset((key, span) for key, span in self.known.items() if self.remembers or key[0] >= now)

    def cell(self, key: Key, cuts: Sequence[float]) -> int:
        """Which of the cells between the cuts of (0, 1) holds the number."""
        low, high = self.known.get(key, (0.0, 1.0))
        edges = [low, *(min(max(cut, low), high) for cut in cuts), high]
        chosen = self.choices.choose([right - left for left, right in pairwise(edges)])
        self.known[key] = (edges[chosen], edges[chosen + 1])
        return chosen

    def winner(self, scores: Tensor, seed: int, position: int, stream: Stream) -> int:
        if bool(scores.isneginf().all()):
            return 0
        return self.cell(self.key(seed, position, stream), scores.double().softmax(0).cumsum(0)[:-1].tolist())

    def best(
        self, scores_TV: Tensor, seeds: Sequence[int], positions: Sequence[int], stream: Stream, start: int
    ) -> tuple[Tensor, Tensor]:
        rows = zip(scores_TV, seeds, positions, strict=True)
        columns = torch.tensor([self.winner(scores, seed, position, stream) for scores, seed, position in rows])
        return scores_TV.gather(1, columns.unsqueeze(1)).squeeze(1), columns + start

    def best_of(self, scores_S: Tensor, ids_S: Tensor, seed: int, position: int, stream: Stream) -> int:
        return int(ids_S[self.winner(scores_S, seed, position, stream)])

    def uniform(self, seed: int, position: int, stream: Stream, index: int) -> Coin:
        return Coin(self, (*self.key(seed, position, stream), index))


def distance(first: dict[tuple[int, ...], float], second: dict[tuple[int, ...], float]) -> float:
    """Total variation."""
    return sum(abs(first.get(x, 0.0) - second.get(x, 0.0)) for x in {*first, *second}) / 2
