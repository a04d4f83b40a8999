"""Codes of a published quantized checkpoint, laid out as products take them: where columns are, or group by group.

Must not know how they were stored, nor what is computed.

Shapes: O outputs and I inputs of the slice, G groups of the whole matrix, W columns of its grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tpspec.model.quantized import Quantized, Ready
from tpspec.published.groups import GROUPS, Grid, stored_grid
from tpspec.published.mixtures import has_narrow_columns

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.published.formats import Scheme, Table
    from tpspec.published.places import Place


@dataclass(frozen=True, slots=True)
class Codes:
    """A slice as it is stored: weight = scale * (code - middle - point), with scale and point of the column's group; or
    as `Quantized` says of codes of a table.

    points_OG: whole numbers, None: all nothing. groups_I: the group of each column. gains_O: as of `Quantized`.
    """

    codes_OI: Tensor
    scales_OG: Tensor
    points_OG: Tensor | None
    groups_I: Tensor
    table: Table | None = None
    gains_O: Tensor | None = None

    @property
    def zeros_OG(self) -> Tensor | None:
        return None if self.points_OG is None else -self.scales_OG * self.points_OG


@dataclass(frozen=True, slots=True)
class Slice:
    """A quantized slice. places_I: the column of the grid in which each input stands; None: as the grid says."""

    matrix: Ready
    places_I: Tensor | None

    def is_laid_out_like(self, other: Slice) -> bool:
        """Whether one product can serve both, one under the other."""
        mine, its = self.places_I, other.places_I
        same = mine is its or (mine is not None and its is not None and torch.equal(mine, its))
        return same and self.matrix.grid == other.matrix.grid


def laid_in_place(codes: Codes, scheme: Scheme, place: Place) -> Slice:
    """Columns stay where they are; those of other shards in the first and last group get any code."""
    grid = stored_grid(place.columns, place.num_inputs, scheme.group, narrow=has_narrow_columns(place.name))
    first = place.columns.start - grid.before
    starts = torch.arange(first, first + grid.width, grid.group)
    groups = starts // (scheme.group or starts[-1] + 1)
    codes_OW = F.pad(codes.codes_OI, (grid.before, grid.width - grid.before - grid.inputs))
    return Slice(Ready(_cut(codes_OW, codes, groups), grid), None)


def laid_by_group(codes: Codes) -> Slice:
    """Columns of a group side by side, each group filled up to whole groups of the grid."""
    counts = torch.bincount(codes.groups_I, minlength=codes.scales_OG.shape[1])
    group = next((own for own in GROUPS if not (counts % own).any()), GROUPS[-1])
    nums = -(-counts // group)
    starts, before = (nums.cumsum(0) - nums) * group, counts.cumsum(0) - counts
    order = codes.groups_I.argsort(stable=True)
    sorted_I = codes.groups_I[order]
    places_I = torch.empty_like(order)
    places_I[order] = starts[sorted_I] + torch.arange(len(order)) - before[sorted_I]
    grid = Grid(group, 0, int(nums.sum()) * group)
    codes_OW = codes.codes_OI.new_zeros(codes.codes_OI.shape[0], grid.width)
    codes_OW[:, places_I] = codes.codes_OI
    groups = torch.arange(len(counts)).repeat_interleave(nums)
    return Slice(Ready(_cut(codes_OW, codes, groups), grid), places_I)


def _cut(codes_OW: Tensor, codes: Codes, groups: Tensor) -> Quantized:
    """groups: of the checkpoint's, one for each of the grid's."""
    zeros = None if codes.zeros_OG is None else codes.zeros_OG[:, groups]
    return Quantized(codes_OW, codes.scales_OG[:, groups], zeros, codes.table, codes.gains_O)
