"""Counter-based randomness: a pure function of (seed, position, stream, token id), the same on every rank and device.

Nothing is stored and nothing advances, so any rank can draw for any id it holds, in any order, and a drafter can
draw what the target will draw. Knows no rules, no requests. (float64 `log` may differ by an ulp between devices.)

Shapes: T rows, V ids of this shard, B blocks, L = 64 ids of a block, S listed ids; P pairs (row, block) and
Q pairs (row, id) still open.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tpspec.staged import sent
from tpspec.verify.largest import SHORT, largest
from tpspec.verify.words import GOLDEN, LENGTH, mixed_int, shifted, signed, words_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    import numpy.typing as npt
    from torch import Tensor

    Ints: TypeAlias = npt.NDArray[np.int64]
    Floats: TypeAlias = npt.NDArray[np.floating[Any]]

NUM_NEAR = 8  # blocks evaluated first; any number gives the same winner


class Stream(IntEnum):
    """What a draw is for. Draws of different streams are independent; no stream serves two purposes at a position."""

    target = 0
    accept = 1
    residual = 2
    draft = 3


class Use(IntEnum):
    """What a word is for, within a stream."""

    coin = 0
    least = 1
    place = 2
    each = 3


class Noise(Protocol):
    """The only source of chance. It owns every decision that chance takes, so that a test can enumerate them."""

    def best(
        self, scores_TV: Tensor, seeds: Sequence[int], positions: Sequence[int], stream: Stream, start: int
    ) -> tuple[Tensor, Tensor]:
        """argmax of score + Gumbel noise over the ids [start, start + V): a draw from softmax of each row.

        Returns the perturbed score, float32 [T], and the id, an integer [T]; the lowest id where float32 scores tie.
        A row that is all -inf gives -inf, one with a NaN gives NaN, and both an id without meaning.
        """

    def best_of(self, scores_S: Tensor, ids_S: Tensor, seed: int, position: int, stream: Stream) -> int:
        """The same for one row and listed ids, with the same noise for the same id; compared in float64."""

    def gumbels(self, seeds: Sequence[int], positions: Sequence[int], stream: Stream, ids_TS: Tensor) -> Tensor:
        """The noise itself, float64, of any ids of each row; for guesses, never for a verdict."""

    def uniform(self, seed: int, position: int, stream: Stream, index: int) -> float:
        """A number in the open interval (0, 1), independent of the Gumbel noise."""


class CounterNoise:
    """Noise by hashing. Gumbel noise has two levels, so that it is evaluated only where it can decide.

    The least of L exponentials of a block is drawn first (rate L), then where it stands (uniform); the others are
    that least plus exponentials of their own, for the exponential law has no memory. Together they are exactly L
    independent draws, and -log of the least bounds the Gumbel noise of its block from above.
    """

    def prepare(self, device: torch.device) -> None:
        """What would otherwise make the first draw slow: a card compiles."""
        for dtype in SHORT if device.type == "cuda" else SHORT[:1]:
            scores_TV = torch.zeros(1, 1, dtype=dtype, device=device)
            self.best(scores_TV, [0], [0], Stream.target, 0)
            largest(scores_TV)  # at temperature 0

    def gumbels(self, seeds: Sequence[int], positions: Sequence[int], stream: Stream, ids_TS: Tensor) -> Tensor:
        """The plain reference of `best`, too."""
        return torch.from_numpy(_gumbel(_keys(seeds, positions, stream), *_places(ids_TS.numpy())))

    def best(
        self, scores_TV: Tensor, seeds: Sequence[int], positions: Sequence[int], stream: Stream, start: int
    ) -> tuple[Tensor, Tensor]:
        keys = _keys(seeds, positions, stream)
        if scores_TV.is_cuda:
            from tpspec.verify import card_noise  # Triton comes with torch for cards only

            return card_noise.best(scores_TV, sent(torch.from_numpy(keys), scores_TV.device), start)
        blocked_TBL, first = _blocked(scores_TV, start)
        scores_TBL, top_TB = blocked_TBL.numpy(), blocked_TBL.amax(2).numpy()
        most_TB = -np.log(_least(keys, np.arange(first, first + scores_TBL.shape[1])))
        reach_TB = _reach(top_TB, most_TB)
        attained_T = _attained(keys, scores_TBL, reach_TB, first)
        row_Q, block_Q, within_Q, score_Q = _open(scores_TBL, most_TB, reach_TB, attained_T)
        noise_Q = _gumbel(keys[:, row_Q, 0], block_Q + first, within_Q)
        perturbed_Q = (score_Q.astype(np.float64) + noise_Q).astype(np.float32)
        value_T, ids_T = _best_of_rows(row_Q, (block_Q + first) * LENGTH + within_Q, perturbed_Q, len(scores_TV), start)
        # Nothing is open to a NaN.
        return torch.from_numpy(np.where(np.isnan(attained_T), attained_T, value_T)), torch.from_numpy(ids_T)

    def best_of(self, scores_S: Tensor, ids_S: Tensor, seed: int, position: int, stream: Stream) -> int:
        listed_S, keys = ids_S.numpy(), _keys([seed], [position], stream)
        perturbed_S = scores_S.double().numpy() + _gumbel(keys[..., 0], *_places(listed_S))
        return int(listed_S[perturbed_S == perturbed_S.max()].min())

    def uniform(self, seed: int, position: int, stream: Stream, index: int) -> float:
        word = mixed_int(_key(_base(seed, position), stream, Use.coin) + GOLDEN * index)
        return ((word >> 12) + 0.5) * 2.0**-52


def _base(seed: int, position: int) -> int:
    return mixed_int(mixed_int(GOLDEN + seed) + GOLDEN + position)


def _key(base: int, stream: Stream, use: Use) -> int:
    return mixed_int(base + GOLDEN + stream * len(Use) + use)


def _keys(seeds: Sequence[int], positions: Sequence[int], stream: Stream) -> npt.NDArray[np.int64]:
    """[3, T, 1]: for each of the three uses of Gumbel noise, one key a row."""
    bases = [_base(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    keys = [[signed(_key(base, stream, use)) for base in bases] for use in (Use.least, Use.place, Use.each)]
    return np.array(keys, dtype=np.int64).reshape(3, len(bases), 1)


# ---- the noise itself ----


def _places(ids: Ints) -> tuple[Ints, Ints]:
    """The block of each id, and where it stands in it."""
    return ids // LENGTH, ids % LENGTH


def _exponential(words: Ints) -> Floats:
    """-log u; u has 52 bits and a half, so that it is neither 0 nor 1."""
    numbers: Floats = -np.log((shifted(words, 12) + 0.5) * 2.0**-52)
    return numbers


def _least(keys: Ints, blocks: Ints) -> Floats:
    """The least exponential of each block."""
    return _exponential(words_of(keys[0], blocks)) / LENGTH


def _gumbel(keys: Ints, blocks: Ints, withins: Ints) -> Floats:
    """Gumbel noise of ids (see `_places`), float64; keys[i], blocks and withins broadcast."""
    ids = blocks * LENGTH + withins
    counters = np.empty((3, *ids.shape), dtype=np.int64)
    counters[:2], counters[2] = blocks, ids
    words = words_of(keys, counters)  # all at once: of few ids, the number of calls is what takes time
    least, own = _exponential(words[::2])
    place = shifted(words[1], 58)  # six bits: 0..63
    numbers: Floats = -np.log(least / LENGTH + own * (withins != place))
    return numbers


# ---- `best` by blocks, on the CPU ----


def _blocked(scores_TV: Tensor, start: int) -> tuple[Tensor, int]:
    """Scores by global block, [T, B, L], and the number of the first: a shard may begin and end within a block."""
    num_before = start % LENGTH
    num_after = -(num_before + scores_TV.shape[1]) % LENGTH
    if num_before or num_after:
        scores_TV = torch.nn.functional.pad(scores_TV, (num_before, num_after), value=-torch.inf)
    return scores_TV.reshape(len(scores_TV), -1, LENGTH), start // LENGTH


def _reach(scores: Floats, most: Floats) -> Floats:
    """What a perturbed score is never above, float32. Rounding keeps order; a `log` may not, to the last bit."""
    reach: Floats = (scores.astype(np.float64) + (most + 1e-9)).astype(np.float32)
    return reach


def _attained(keys: Ints, scores_TBL: Floats, reach_TB: Floats, first: int) -> Floats:
    """A perturbed score that some id of each row has, float32 [T]: the best of the most promising blocks.

    NaN where a score is: it is promising.
    """
    num_near = min(NUM_NEAR, scores_TBL.shape[1])
    near_TB = reach_TB.argpartition(-num_near, axis=1)[:, -num_near:]
    noise_TBL = _gumbel(keys[..., None], (near_TB + first)[..., None], np.arange(LENGTH))
    perturbed_TBL = np.take_along_axis(scores_TBL, near_TB[..., None], 1) + noise_TBL
    attained_T: Floats = perturbed_TBL.astype(np.float32).max((1, 2))
    return attained_T


def _open(scores_TBL: Floats, most_TB: Floats, reach_TB: Floats, attained_T: Floats) -> tuple[Ints, Ints, Ints, Floats]:
    """(row, block, place in it, score) of every id that may reach what its row attained: by block, then by id."""
    row_P, block_P = ((reach_TB >= attained_T[:, None]) & (reach_TB > -np.inf)).nonzero()
    scores_PL = scores_TBL[row_P, block_P]
    reach_PL = _reach(scores_PL, most_TB[row_P, block_P, None])
    pair_Q, within_Q = (reach_PL >= attained_T[row_P, None]).nonzero()
    return row_P[pair_Q], block_P[pair_Q], within_Q, scores_PL[pair_Q, within_Q]


def _best_of_rows(row_Q: Ints, id_Q: Ints, perturbed_Q: Floats, num_rows: int, start: int) -> tuple[Floats, Ints]:
    """The largest of each row and its id, the lowest where they tie; (-inf, start) for a row without any."""
    value_T = np.full(num_rows, -np.inf, dtype=np.float32)
    np.maximum.at(value_T, row_Q, perturbed_Q)
    none = np.iinfo(np.int64).max
    ids_T = np.full(num_rows, none)
    np.minimum.at(ids_T, row_Q, np.where(perturbed_Q < value_T[row_Q], none, id_Q))
    return value_T, np.where(ids_T == none, start, ids_T)
