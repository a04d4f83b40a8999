"""Trees of candidates that were made all at once, for each place after the root apart: of a text the last such guess.

A candidate's odds do not depend on the path to it, so the odds of a place are those of every node there. Tokens and
odds only; must not know what made them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpspec.draft.record import Calibration
from tpspec.draft.shapes import likeliest, rank_of
from tpspec.tokens import NO_DRAFT, ROOT, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.draft.protocol import Ask
    from tpspec.draft.shapes import Shape
    from tpspec.topology.rank_paths import RankPath

    Candidates = Sequence[tuple[tuple[int, ...], list[float]]]


@dataclass(frozen=True, slots=True)
class _Guess:
    """For each place after the root of `base` tokens: candidates, best first, and the odds that were said of them."""

    base: int
    candidates: Candidates


class Levels:
    """What the odds of each place are worth is learned over all texts.

    shape: of every tree, by rank; None where the likeliest candidates make it.
    """

    def __init__(self, num_places: int, shape: Shape | None) -> None:
        self._worth, self._shape = [Calibration() for _ in range(num_places)], shape
        self._guesses: dict[int, _Guess] = {}

    def guess(self, ask: Ask, candidates: Candidates) -> None:
        self._guesses[ask.seq] = _Guess(len(ask.tokens), candidates)

    def forget(self, seq: int) -> None:
        self._guesses.pop(seq, None)

    def tree(self, ask: Ask) -> TokenTree:
        guess = self._guesses.get(ask.seq)
        if guess is None:
            return NO_DRAFT
        if self._shape is None:
            believed = zip(self._worth, guess.candidates, strict=False)
            odds = [[worth.odds(said) for said in all_said] for worth, (_, all_said) in believed]
            paths = likeliest(odds, ask.num_tokens)
            return _tree(guess, paths, [odds[len(path) - 1][path[-1]] for path in paths])
        paths = [path for path in self._shape.paths(ask.num_tokens) if _is_there(path, guess)]
        return _tree(guess, paths, [self._shape.odds(path) for path in paths])

    def judge(self, ask: Ask) -> list[bool]:
        """The last guess against what came: whether it was right about each place, up to the first that was wrong."""
        guess = self._guesses.pop(ask.seq, None)
        if guess is None or len(ask.tokens) == guess.base:
            return []
        ranks: list[int | None] = []
        came = ask.tokens[guess.base :]
        for (tokens, all_said), worth, token in zip(guess.candidates, self._worth, came, strict=False):
            for candidate, said in zip(tokens, all_said, strict=True):
                worth.add(said, right=candidate == token)
            ranks.append(rank_of(token, tokens))
            if ranks[-1] is None:
                break
        if self._shape is not None:
            self._shape.saw(ranks)
        return [rank is not None for rank in ranks]


def _is_there(path: RankPath, guess: _Guess) -> bool:
    return len(path) <= len(guess.candidates) and all(
        rank < len(tokens) for rank, (tokens, _) in zip(path, guess.candidates, strict=False)
    )


def _tree(guess: _Guess, paths: Sequence[RankPath], odds: Sequence[float]) -> TokenTree:
    numbers = {path: number for number, path in enumerate(paths)}
    return TokenTree(
        tuple(guess.candidates[len(path) - 1][0][path[-1]] for path in paths),
        tuple(numbers.get(path[:-1], ROOT) for path in paths),
        odds=tuple(odds),
    )
