"""The largest numbers of long rows, and where they stand. Pure functions of tensors.

On a CPU torch finds the largest of a row of a vocabulary in a tenth of the time that it takes to say where it stands.
So first the largest of each part of a row is found, then where it stands in the few parts that matter. Short rows do
as well without. On a card torch takes 27 us for a row of 128,000, and two kernels of ours 5 (an H200, in a round).

Shapes: T rows, V columns, C of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LONG = 8192  # columns
NUM_PARTS = 64  # of a row, each of neighbours
NUM_HEAPED = 32  # numbers of a heap, which stand far apart
SHORT = (torch.float32, torch.bfloat16, torch.float16)  # numbers that float32 holds


def largest(x_TV: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """The largest number of each row and its column, the first where several are: [T] each. NaN is larger than all;
    where it stands a card does not say. On a card the numbers are float32. start: the number of the first column."""
    num_columns = x_TV.shape[1]
    if x_TV.is_cuda and x_TV.dtype in SHORT:
        from tpspec.verify import card_noise  # Triton comes with torch for cards only

        return card_noise.best(x_TV, None, start)
    if x_TV.is_cuda or num_columns < LONG:
        value_T, column_T = x_TV.max(1)
        return value_T, column_T + start
    width = -(-num_columns // NUM_PARTS)
    whole = num_columns // width * width
    tops = [x_TV[:, :whole].view(len(x_TV), -1, width).amax(2)]
    if whole < num_columns:
        tops.append(x_TV[:, whole:].amax(1, keepdim=True))
    part_T = torch.cat(tops, 1).max(1).indices
    begin_T1 = (part_T * width).clamp(max=num_columns - width).unsqueeze(1)  # all are as long, and the last overlaps
    value_T, place_T = x_TV.gather(1, begin_T1 + torch.arange(width)).max(1)
    return value_T, place_T + begin_T1.squeeze(1) + start


def some_largest(x_TV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest numbers of each row, descending, and their columns: [T, C] each. Which of several alike is
    open."""
    num_columns = x_TV.shape[1]
    num_heaps = num_columns // NUM_HEAPED
    if x_TV.is_cuda or num_columns < LONG or num_heaps < num:
        values_TC, columns_TC = x_TV.topk(num)
        return values_TC, columns_TC
    # A heap takes every num_heaps-th column. Whoever is among the `num` largest is in one of as many heaps.
    whole = num_heaps * NUM_HEAPED
    heaps_THN = x_TV[:, :whole].view(-1, NUM_HEAPED, num_heaps)
    heap_TC = heaps_THN.amax(1).topk(num, sorted=False).indices
    columns_TX = (heap_TC.unsqueeze(1) + num_heaps * torch.arange(NUM_HEAPED).unsqueeze(1)).flatten(1)
    rest_X = torch.arange(whole, num_columns)
    columns_TX = torch.cat([columns_TX, rest_X.expand(len(x_TV), -1)], 1)
    values_TC, place_TC = x_TV.gather(1, columns_TX).topk(num)
    return values_TC, columns_TX.gather(1, place_TC)
