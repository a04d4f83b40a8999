"""How the columns of a product of few rows with codes are shared out on a CUDA card: how many groups a program reads at
a time, and how many programs have a share of the groups each and, in Triton, put together what they made of it.

Both decide on the order in which a row is added up, so they follow from the matrix and the card alone: neither from how
many rows there are, nor from the tiles they are cut into, nor from whether a gate is part of the product. Must not know
what a matrix is of. Imported on cards only.

Shapes: O outputs; T rows; S shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from tpspec.model.card.rows import MOST_ROWS
from tpspec.model.card.tiles import FEWEST_ROWS, TILE_OUTPUTS

if TYPE_CHECKING:
    from torch import Tensor

# Of the least tiles of outputs, that each of a card's processors should have: with one or two it has too few warps to
# ask for a matrix as fast as it could come.
PROGRAMS = 4
# Groups that are read at a time, each by a warp of its own: more where there are fewer programs than that. (Eight
# warps, which do the same at a time, took as long as four, or longer.)
FEW_GROUPS, MORE_GROUPS = 2, 4
MOST_SPLITS = 4  # programs that share a tile's columns: all that they made is read by one of them
# Of a share: a program reads so many groups in each. Where it has fewer, what is gained is lost again as shares meet:
# of 4096 outputs, two shares of 14 turns took 15.1 us where one of 28 took 17.4, and of 8 turns 8.4 for 7.3 (an H200).
LEAST_TURNS = 8


class Shares(NamedTuple):
    """at_once: groups that a program reads at a time. splits: programs of a tile, each of which has some of the turns
    in which these are read, the last perhaps fewer or none."""

    at_once: int
    splits: int = 1

    def counters(self, num_outputs: int, device: torch.device) -> Tensor:
        """Of each tile there may be, how many of its programs are done: zeros between products, of which no two with
        the same matrix run at a time. Empty where a tile has one program."""
        tiles = triton.cdiv(MOST_ROWS, FEWEST_ROWS) * triton.cdiv(num_outputs, TILE_OUTPUTS)
        return torch.zeros(tiles if self.splits > 1 else 0, dtype=torch.int32, device=device)

    def partials(self, x_TI: Tensor, num_outputs: int) -> Tensor:
        """Room for what they make, [S, T, O]; empty where a tile has one program."""
        num_shares = self.splits if self.splits > 1 else 0
        return x_TI.new_empty(num_shares, len(x_TI), num_outputs, dtype=torch.float32)


def shares(num_tiles: int, num_groups: int, device: torch.device) -> Shares:
    """Of a matrix of so many of the least tiles of outputs: as many programs as make `PROGRAMS` for each of the card's
    processors, a power of two."""
    groups, splits = at_once(num_tiles, device), 1
    turns, wanted = triton.cdiv(num_groups, groups), PROGRAMS * num_processors(device)
    while num_tiles * splits < wanted and 2 * splits <= min(MOST_SPLITS, turns // LEAST_TURNS):
        splits *= 2
    return Shares(groups, splits)


def at_once(num_tiles: int, device: torch.device) -> int:
    """Groups, of so many of the least tiles of outputs."""
    return MORE_GROUPS if has_few_tiles(num_tiles, device) else FEW_GROUPS


def has_few_tiles(num_tiles: int, device: torch.device) -> bool:
    """Whether a program for each of the least tiles of outputs is less than the card's processors should have."""
    return num_tiles < PROGRAMS * num_processors(device)


def num_processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@triton.jit  # type: ignore[untyped-decorator]
def share_of(num_groups: int, at_once: tl.constexpr, splits: tl.constexpr) -> tl.tensor:
    """Where the groups of this program begin, and where they end."""
    first, end = 0, num_groups
    if splits > 1:
        size = tl.cdiv(num_groups, at_once * splits) * at_once
        first = tl.minimum(tl.program_id(2) * size, num_groups)
        end = tl.minimum(first + size, num_groups)
    return first, end


@triton.jit  # type: ignore[untyped-decorator]
def is_last(counters_at: tl.tensor, splits: tl.constexpr) -> tl.tensor:
    """Whether the other programs of its tile have stored what they made, as this one has: then it sees all of it, and
    the next product counts anew."""
    counter = counters_at + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.debug_barrier()  # what all threads have stored is released by the one that counts
    are_all = tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
    if are_all:
        tl.store(counter, 0)
    return are_all


@triton.jit  # type: ignore[untyped-decorator]
def added(partials_at: tl.tensor, size: int, real: tl.tensor, splits: tl.constexpr) -> tl.tensor:
    """What all of them made, which lies `size` apart; in the order of columns, whoever came last. It is read from the
    cache of the card: that of a processor does not see what others wrote."""
    total = tl.load(partials_at, mask=real, other=0.0, cache_modifier=".cg")
    for share in tl.static_range(1, splits):
        total += tl.load(partials_at + share * size, mask=real, other=0.0, cache_modifier=".cg")
    return total
