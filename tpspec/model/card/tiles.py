"""Which tiles a product of few rows is cut into on a card, and whether a gate is part of it: of some ways the fastest,
tried as the first matrix of a shape is loaded, or the first rows come.

It is another one for other cards (by how much a program may hold of a matrix, and how many run at once), matrices and
rows: where tiles have 16 rows, 64 of them have the matrix go from the card's cache to its programs four times. All that
are tried add up a row by the same instructions in the same order, so that texts do not depend on what is taken; one
that gives other bits is not. Must not know how a product is launched. Imported on cards only.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from triton import knobs
from triton.errors import TritonError

from tpspec.comm.replay_time import recorded, replay_s
from tpspec.switches import OFF, switch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

log = logging.getLogger(__name__)

SWITCH = "TPSPEC_TILES"  # variable: "off" where the usual ones should be taken
LEAST_BYTES = 4 << 20  # of a matrix: one that is smaller takes little longer than its launch
CALLS, REPLAYS = 8, 8  # in a recording, and of each recording; the first replay tells how fast a cold card is
FLUSHED = 2  # times what the card's cache holds is read before each call
LEAST_S = 1e-9  # that work takes: less is what other processes took of the card meanwhile
WORTH = 0.985  # of the usual one's time: by less they differ by chance
# The same of a gate in the kernel of its product: of what it gains here, little is left in a round. One that seemed 2%
# faster for 32 rows was in rounds that took a seventh longer.
GATE_WORTH = 0.95

TILE_ROWS, TILE_OUTPUTS = 16, 16  # of the usual ones; fewer no tensor core takes of what stands first in a product


class Tile(NamedTuple):
    """Of a program, for a matrix of 16 bits: rows and outputs, columns that are read at a time, what Triton calls
    stages, and warps. Of 64 rows four warps would have other instructions, which add in another order."""

    rows: int
    outputs: int
    columns: int
    stages: int
    warps: int


# On an H200 this reads the matrices of an 8B at 71 (the smallest) to 97% of its copy rate. In a program the rows are
# read beside the matrix: as many numbers as of its outputs.
USUAL = Tile(TILE_ROWS, TILE_OUTPUTS, 256, 5, 2)
NARROW = (USUAL, Tile(16, 16, 128, 4, 4), Tile(16, 16, 128, 6, 2), Tile(16, 16, 512, 3, 4), Tile(16, 32, 128, 5, 2),
          Tile(16, 32, 256, 3, 4))  # fmt: skip
TILES = {
    1: NARROW,
    16: NARROW,
    32: (USUAL, Tile(32, 16, 128, 5, 2), Tile(32, 32, 128, 4, 2), Tile(32, 32, 128, 4, 4)),
    64: (USUAL, Tile(32, 32, 128, 4, 2), Tile(64, 16, 128, 4, 2), Tile(64, 32, 64, 5, 2), Tile(64, 64, 64, 4, 2)),
}


class CodedTile(NamedTuple):
    """Of a program, for codes: rows and outputs, and what Triton calls stages. Eight rows of a group are as many bytes
    as the codes of 16 outputs, or 32 of 4 bits. What else there is decides on how sums are added. Outputs are what
    tensor cores have 16 of, so that of rows there may be 8."""

    rows: int
    outputs: int
    stages: int


FEWEST_ROWS = 8
USUAL_CODED = CodedTile(FEWEST_ROWS, TILE_OUTPUTS, 3)
CODED_TILES = {
    8: (USUAL_CODED, CodedTile(8, 16, 5), CodedTile(8, 32, 3), CodedTile(8, 32, 4), CodedTile(8, 64, 3)),
    16: (USUAL_CODED, CodedTile(16, 16, 3), CodedTile(16, 32, 2), CodedTile(16, 64, 2)),
    32: (USUAL_CODED, CodedTile(32, 16, 2), CodedTile(32, 32, 2)),
    64: (USUAL_CODED, CodedTile(32, 16, 3), CodedTile(32, 32, 2)),
}  # fmt: skip


class FragmentTile(NamedTuple):
    """Of a program of fragments.py: rows and outputs, and of how many turns ahead codes come into the card's
    cache."""

    rows: int
    outputs: int
    ahead: int


# Of more rows a thread's registers do not hold those that it multiplies and those that come.
FRAGMENT_TILES = {
    8: (FragmentTile(8, 16, 4), FragmentTile(8, 16, 0), FragmentTile(8, 32, 4), FragmentTile(8, 32, 0)),
} | dict.fromkeys((16, 32, 64), (FragmentTile(16, 32, 4), FragmentTile(16, 32, 0), FragmentTile(16, 16, 4)))
# Of an MLP's gate and what it gates by one kernel, which reads twice as much a program; None: by two.
NARROW_GATED = None, Tile(16, 16, 128, 5, 2), Tile(16, 16, 256, 3, 4), Tile(16, 32, 128, 3, 4)
GATED_TILES = dict.fromkeys((1, 16), NARROW_GATED) | dict.fromkeys((32, 64), (None, Tile(32, 16, 128, 4, 2)))
GATED_CODED_TILES = {
    8: (None, USUAL_CODED, CodedTile(8, 32, 3)),
    16: (None, CodedTile(16, 32, 2)),
} | dict.fromkeys((32, 64), (None, CodedTile(32, 16, 2)))
# Half of a tile's outputs are what it gates.
GATED_FRAGMENT_TILES = {8: (None, FragmentTile(8, 32, 4))} | dict.fromkeys(
    (16, 32, 64), (None, FragmentTile(16, 32, 4))
)

Cut = TypeVar("Cut", bound="Hashable")  # a Tile, say
_chosen: dict[Trial, list[int]] = {}  # places among the candidates


class Trial(NamedTuple):
    """Of products by a matrix of so many bytes, of rows of so many inputs. of: what else their time depends on."""

    of: Hashable
    num_inputs: int
    num_bytes: int
    device: torch.device
    dtype: torch.dtype

    def beside(self, what: Hashable) -> Trial:
        """Another, of the same matrix."""
        return self._replace(of=(self.of, what))


def chosen(
    candidates: Mapping[int, Sequence[Cut]],
    product: Callable[[Tensor, Cut], Tensor],
    trial: Trial,
    worth: float = WORTH,
) -> list[Cut]:
    """One for each number of rows among the candidates, which so many and fewer take. Those that stand first are the
    usual ones, unless another takes less than `worth` of their time. product: of x [T, num_inputs], in such tiles. Of
    trials that are alike one is made."""
    if trial in _chosen:
        return [tiles[found] for tiles, found in zip(candidates.values(), _chosen[trial], strict=True)]
    if trial.num_bytes < LEAST_BYTES or knobs.runtime.interpret or switch(SWITCH) == OFF:
        return [tiles[0] for tiles in candidates.values()]
    noise = torch.Generator().manual_seed(0)
    x_TI = torch.randn(max(candidates), trial.num_inputs, generator=noise).to(trial.device, trial.dtype)
    try:
        found = [
            _fastest(product, x_TI[:most], (fewer + most + 1) // 2, tiles, trial.of, worth)
            for (fewer, most), tiles in zip(pairwise([0, *candidates]), candidates.values(), strict=True)
        ]
    except RuntimeError as error:
        if "out of memory" not in str(error):  # so say torch, and CUDA itself
            raise
        log.warning("products %s are made in the usual tiles: there is no memory left to try others", trial.of)
        found = [0] * len(candidates)
    _chosen[trial] = found
    return chosen(candidates, product, trial)


def _fastest(
    product: Callable[[Tensor, Cut], Tensor],
    x_TI: Tensor,
    usual: int,
    tiles: Sequence[Cut],
    of: Hashable,
    worth: float,
) -> int:
    """Its place among them. usual: of the rows, those that are timed: neither the fewest nor the most."""
    expected, sound = product(x_TI, tiles[0]), [0]
    for place, tile in enumerate(tiles[1:], 1):
        try:
            is_other = not torch.equal(product(x_TI, tile), expected)
        except TritonError as error:  # it shares more than this card has, say
            log.info("products %s are not made in %s: %s", of, tile, error)
            continue
        if is_other:
            log.warning("products %s are not made in %s, by which their last bits are others", of, tile)
        else:
            sound.append(place)
    works = [partial(product, x_TI[:usual], tiles[place]) for place in sound]
    took_s = dict(zip(sound, seconds(works, x_TI.device), strict=True))
    best = min(took_s, key=took_s.__getitem__)
    found = best if took_s[best] < worth * took_s[0] else 0
    way, share = tiles[found] or "one kernel after the other", took_s[found] / took_s[0]
    log.info("products %s of up to %d rows: %s, %.2f of the usual way's time", of, len(x_TI), way, share)
    return found


def seconds(works: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Of a call of each: in recordings, where no launch stands between kernels as none does in a round, while the
    card's cache holds nothing of what it reads. (What is read in front of it does not let it begin before the end.)"""
    flushed = FLUSHED * torch.cuda.get_device_properties(device).L2_cache_size
    others = torch.zeros(flushed // 8, dtype=torch.int64, device=device)

    def behind_others(work: Callable[[], object]) -> None:
        others.sum()  # what is written instead would leave the cache while the work runs
        work()

    graphs = [recorded(partial(behind_others, work), CALLS) for work in (lambda: None, *works)]
    in_turn = [[replay_s(graph) for graph in graphs] for _ in range(REPLAYS)]
    without, *took = (min(times) / CALLS for times in zip(*in_turn[1:], strict=True))
    return [max(LEAST_S, with_work - without) for with_work in took]
