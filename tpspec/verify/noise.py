"""Counter-based randomness: a pure function of (seed, position, stream, token id), the same on every rank and device.

Nothing is stored and nothing advances, so any rank can draw for any id it holds, in any order, and a drafter can
draw what the target will draw. Knows no rules, no requests. (float64 `log` may differ by an ulp between devices.)

Shapes: T rows, V ids of this shard, B blocks, L = 64 ids of a block, S listed ids; P pairs (row, block) and
Q pairs (row, id) still open.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch

from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LENGTH = 64  # ids of a block; fixed, for every choice of it is another noise
NUM_NEAR = 8  # blocks evaluated first; any number gives the same winner
WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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

        Returns the perturbed score, float32 [T], and the id, int64 [T]; the lowest id where float32 scores tie.
        A row that is all -inf gives -inf, one with a NaN gives NaN, and both an id without meaning.
        """

    def best_of(self, scores_S: Tensor, ids_S: Tensor, seed: int, position: int, stream: Stream) -> int:
        """The same for one row and listed ids, with the same noise for the same id; compared in float64."""

    def gumbel(self, seed: int, position: int, stream: Stream, ids: Tensor) -> Tensor:
        """The noise itself, float64, of any ids, in their shape; for guesses, never for a verdict."""

    def gumbels(self, seeds: Sequence[int], positions: Sequence[int], stream: Stream, ids_TS: Tensor) -> Tensor:
        """The same of several rows, each with ids of its own."""

    def uniform(self, seed: int, position: int, stream: Stream, index: int) -> float:
        """A number in the open interval (0, 1), independent of the Gumbel noise."""


class CounterNoise:
    """Noise by hashing. Gumbel noise has two levels, so that it is evaluated only where it can decide.

    The least of L exponentials of a block is drawn first (rate L), then where it stands (uniform); the others are
    that least plus exponentials of their own, for the exponential law has no memory. Together they are exactly L
    independent draws, and -log of the least bounds the Gumbel noise of its block from above.
    """

    def gumbel(self, seed: int, position: int, stream: Stream, ids: Tensor) -> Tensor:
        """Gumbel noise of any ids, float64, the shape of ids: the plain reference of `best`."""
        return self.gumbels([seed], [position], stream, ids.reshape(1, -1)).reshape(ids.shape)

    def gumbels(self, seeds: Sequence[int], positions: Sequence[int], stream: Stream, ids_TS: Tensor) -> Tensor:
        return _gumbel(_keys(seeds, positions, stream, ids_TS.device), ids_TS)

    def best(
        self, scores_TV: Tensor, seeds: Sequence[int], positions: Sequence[int], stream: Stream, start: int
    ) -> tuple[Tensor, Tensor]:
        keys = _keys(seeds, positions, stream, scores_TV.device)
        if scores_TV.is_cuda:  # where all ids take less time than to learn which of them matter
            return _best_of_all(keys, scores_TV, start)
        scores_TBL, first = _blocked(scores_TV, start)
        blocks = torch.arange(first, first + scores_TBL.shape[1], device=scores_TV.device)
        most_TB = -_least(keys, blocks).log()
        reach_TB = _reach(scores_TBL.amax(2), most_TB)
        attained_T = _attained(keys, scores_TBL, reach_TB, first)
        row_Q, id_Q, score_Q = _open(scores_TBL, most_TB, reach_TB, attained_T, first)
        perturbed_Q = (score_Q.double() + _gumbel(keys[:, row_Q, 0], id_Q)).float()
        value_T, ids_T = _best_of_rows(row_Q, id_Q, perturbed_Q, len(scores_TV), start)
        return torch.where(attained_T.isnan(), attained_T, value_T), ids_T  # nothing is open to a NaN

    def best_of(self, scores_S: Tensor, ids_S: Tensor, seed: int, position: int, stream: Stream) -> int:
        perturbed = scores_S.double() + self.gumbel(seed, position, stream, ids_S)
        return int(ids_S[perturbed == perturbed.max()].min())

    def uniform(self, seed: int, position: int, stream: Stream, index: int) -> float:
        word = _mix_int(_key(seed, position, stream, Use.coin) + GOLDEN * index)
        return ((word >> 12) + 0.5) * 2.0**-52


def _mix_int(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on an unsigned word."""
    x &= WORD
    x = (x ^ (x >> 30)) * FIRST & WORD
    x = (x ^ (x >> 27)) * SECOND & WORD
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the bits of a word, as torch wants it."""
    x &= WORD
    return x - (1 << 64) if x >> 63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """`_mix_int` on int64, whose products wrap."""
    x = (x ^ _shifted(x, 30)) * _signed(FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(SECOND)
    return x ^ _shifted(x, 31)


def _key(seed: int, position: int, stream: Stream, use: Use) -> int:
    key = 0
    for word in (seed, position, stream * len(Use) + use):
        key = _mix_int(key + GOLDEN + word)
    return key


def _keys(seeds: Sequence[int], positions: Sequence[int], stream: Stream, device: torch.device) -> Tensor:
    """[3, T, 1] int64: for each of the three uses of Gumbel noise, one key a row. Made in one small copy."""
    pairs = list(zip(seeds, positions, strict=True))
    uses = (Use.least, Use.place, Use.each)
    keys = [[_signed(_key(seed, position, stream, use)) for seed, position in pairs] for use in uses]
    return sent(torch.tensor(keys, dtype=torch.int64).reshape(len(uses), len(pairs), 1), device)


def _words(keys: Tensor, counters: Tensor) -> Tensor:
    return _mix(keys + counters * _signed(GOLDEN))


def _exponential(words: Tensor) -> Tensor:
    """-log u; u has 52 bits and a half, so that it is neither 0 nor 1."""
    return -((_shifted(words, 12).double() + 0.5) * 2.0**-52).log()


def _least(keys: Tensor, blocks: Tensor) -> Tensor:
    """The least exponential of each block."""
    return _exponential(_words(keys[0], blocks)) / LENGTH


def _gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise of ids, float64; keys[i] broadcasts against ids."""
    blocks = ids // LENGTH
    least = _least(keys, blocks)
    place = _shifted(_words(keys[1], blocks), 58)  # six bits: 0..63
    own = _exponential(_words(keys[2], ids))
    return -torch.where(ids % LENGTH == place, least, least + own).log()


def _best_of_all(keys: Tensor, scores_TV: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """`best` by the noise of every id: no step depends on what was found before, so that nobody waits for a device."""
    ids_V = torch.arange(start, start + scores_TV.shape[1], device=scores_TV.device)
    perturbed_TV = (scores_TV.double() + _gumbel(keys, ids_V)).float()
    value_T = perturbed_TV.amax(1)
    beaten_TV = perturbed_TV < value_T.unsqueeze(1)
    return value_T, ids_V.expand_as(beaten_TV).masked_fill(beaten_TV, torch.iinfo(torch.int64).max).amin(1)


def _blocked(scores_TV: Tensor, start: int) -> tuple[Tensor, int]:
    """Scores by global block, [T, B, L], and the number of the first: a shard may begin and end within a block."""
    num_before = start % LENGTH
    num_after = -(num_before + scores_TV.shape[1]) % LENGTH
    if num_before or num_after:
        scores_TV = torch.nn.functional.pad(scores_TV, (num_before, num_after), value=-torch.inf)
    return scores_TV.reshape(len(scores_TV), -1, LENGTH), start // LENGTH


def _reach(scores: Tensor, most: Tensor) -> Tensor:
    """What a perturbed score is never above, float32. Rounding keeps order; a `log` may not, to the last bit."""
    return (scores.double() + (most + 1e-9)).float()


def _attained(keys: Tensor, scores_TBL: Tensor, reach_TB: Tensor, first: int) -> Tensor:
    """A perturbed score that some id of each row has, float32 [T]: the best of the most promising blocks."""
    near_TB = reach_TB.topk(min(NUM_NEAR, scores_TBL.shape[1])).indices
    rows = torch.arange(len(near_TB), device=near_TB.device).unsqueeze(1)
    ids = (near_TB + first).unsqueeze(2) * LENGTH + torch.arange(LENGTH, device=near_TB.device)
    perturbed = scores_TBL[rows, near_TB].double() + _gumbel(keys.unsqueeze(2), ids)
    return perturbed.float().flatten(1).amax(1)


def _open(
    scores_TBL: Tensor, most_TB: Tensor, reach_TB: Tensor, attained_T: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(row, id, score) of every id that may reach what its row attained: first by block, then by id."""
    row_P, block_P = ((reach_TB >= attained_T.unsqueeze(1)) & ~reach_TB.isneginf()).nonzero(as_tuple=True)
    scores_PL = scores_TBL[row_P, block_P]
    reach_PL = _reach(scores_PL, most_TB[row_P, block_P].unsqueeze(1))
    pair_Q, within_Q = (reach_PL >= attained_T[row_P].unsqueeze(1)).nonzero(as_tuple=True)
    return row_P[pair_Q], (block_P[pair_Q] + first) * LENGTH + within_Q, scores_PL[pair_Q, within_Q]


def _best_of_rows(row_Q: Tensor, id_Q: Tensor, perturbed_Q: Tensor, num_rows: int, start: int) -> tuple[Tensor, Tensor]:
    """The largest of each row and its id, the lowest where they tie; (-inf, start) for a row without any."""
    value_T = perturbed_Q.new_full((num_rows,), -torch.inf).scatter_reduce(0, row_Q, perturbed_Q, "amax")
    beaten_Q = perturbed_Q < value_T[row_Q]
    none = torch.iinfo(torch.int64).max
    ids_T = id_Q.new_full((num_rows,), none).scatter_reduce(0, row_Q, id_Q.masked_fill(beaten_Q, none), "amin")
    return value_T, ids_T.masked_fill(ids_T == none, start)
