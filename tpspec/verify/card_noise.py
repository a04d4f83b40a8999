"""The winner of every row by its noise, on a CUDA card, in Triton: noise.py says what noise is. Imported on cards only.

Of every id, since a card evaluates all of them in less time than it takes to learn which matter; in two launches, where
torch's operations would be 75. Annotations are Triton's.

Shapes: T rows, V ids of this shard; B blocks of L ids, of which a program has some; P programs of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tpspec.verify.words import FIRST, GOLDEN, LENGTH, SECOND

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = 16  # of a program: 1024 ids
USUAL_PROGRAMS = 1024  # of a row, at most: one kernel serves every vocabulary of a million ids
_GOLDEN, _FIRST, _SECOND, _LENGTH = (tl.constexpr(number) for number in (GOLDEN, FIRST, SECOND, LENGTH))
_STEP = tl.constexpr(2.0**-52)
_SHARE = tl.constexpr(1 / LENGTH)
_NONE = tl.constexpr(1 << 62)  # more than any id


def best(scores_TV: Tensor, keys_3T: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
    """`Noise.best` of scores by the keys of their rows, int64 [3, T, 1]; None: without noise, the largest. The ids are
    int32, and stand behind the values."""
    num_rows, num_ids = scores_TV.shape
    first = start // LENGTH
    num_programs = triton.cdiv((start + num_ids - 1) // LENGTH + 1 - first, BLOCKS)
    values_TP, ids_TP = (
        scores_TV.new_empty(num_rows, num_programs, dtype=dtype) for dtype in (torch.float32, torch.int64)
    )
    value_T, id_T = scores_TV.new_empty(2, num_rows, dtype=torch.int32)
    value_T = value_T.view(torch.float32)
    _best_of_blocks[(num_rows, num_programs)](
        scores_TV.contiguous(), ids_TP if keys_3T is None else keys_3T, values_TP, ids_TP, num_ids, start, first,
        blocks=BLOCKS, noisy=keys_3T is not None,
    )  # fmt: skip
    wide = max(USUAL_PROGRAMS, triton.next_power_of_2(num_programs))
    _best_of_programs[(num_rows,)](values_TP, ids_TP, value_T, id_T, num_programs, wide=wide)
    return value_T, id_T


@triton.jit  # type: ignore[untyped-decorator]
def _word(key: tl.tensor, counters: tl.tensor) -> tl.tensor:
    """Of a key for each counter, uint64."""
    x = key + counters * _GOLDEN
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit  # type: ignore[untyped-decorator]
def _exponential(words: tl.tensor) -> tl.tensor:
    return -tl.log(((words >> 12).to(tl.float64) + 0.5) * _STEP)


@triton.jit  # type: ignore[untyped-decorator]
def _winner(perturbed: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """(the largest of N numbers, NaN where one is; the least id that has it)."""
    top = tl.max(perturbed, 0)
    winner = tl.min(tl.where(perturbed == top, ids, _NONE), 0)
    strange = tl.max((perturbed != perturbed).to(tl.int32), 0)
    return tl.where(strange > 0, float("nan"), top), winner


@triton.jit(do_not_specialize=["num_ids", "start", "first"])  # type: ignore[untyped-decorator]
def _best_of_blocks(
    scores_at: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    ids_at: tl.tensor,
    num_ids: int,
    start: int,
    first: int,
    blocks: tl.constexpr,
    noisy: tl.constexpr,
) -> None:
    """Of some blocks of a row: values [T, P] and ids [T, P] from scores [T, V] of the ids from `start` on, the first of
    which is in block `first`, and keys [3, T]; or the largest score itself."""
    row, program, num_rows = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    block = (first + program * blocks + tl.arange(0, blocks)).to(tl.int64)[:, None]
    within = tl.arange(0, _LENGTH).to(tl.int64)[None, :]
    ids = block * _LENGTH + within
    columns = ids - start
    real = (columns >= 0) & (columns < num_ids)
    scores = tl.load(scores_at + row.to(tl.int64) * num_ids + columns, mask=real, other=-float("inf"))
    perturbed = scores.to(tl.float32)
    if noisy:
        least_key = tl.load(keys_at + row).to(tl.uint64, bitcast=True)
        place_key = tl.load(keys_at + num_rows + row).to(tl.uint64, bitcast=True)
        each_key = tl.load(keys_at + 2 * num_rows + row).to(tl.uint64, bitcast=True)
        least = _exponential(_word(least_key, block.to(tl.uint64))) * _SHARE
        place = (_word(place_key, block.to(tl.uint64)) >> 58).to(tl.int64)
        own = _exponential(_word(each_key, ids.to(tl.uint64)))
        noise = -tl.log(least + tl.where(within != place, own, 0.0))
        perturbed = (perturbed.to(tl.float64) + noise).to(tl.float32)
    # What is not real has lost already, but in a row of nothing it would tie.
    value, winner = _winner(tl.ravel(perturbed), tl.ravel(tl.where(real, ids, _NONE)))
    at = row * tl.num_programs(1) + program
    tl.store(values_at + at, value)
    tl.store(ids_at + at, winner)


# Ids stand behind values, as it happens at a multiple of 16 bytes: of four rows there would be another kernel.
@triton.jit(do_not_specialize=["num_programs"], do_not_specialize_on_alignment=["id_at"])  # type: ignore[untyped-decorator]
def _best_of_programs(
    values_at: tl.tensor,
    ids_at: tl.tensor,
    value_at: tl.tensor,
    id_at: tl.tensor,
    num_programs: int,
    wide: tl.constexpr,
) -> None:
    """value [T] and id [T] from values [T, P] and ids [T, P]."""
    row, programs = tl.program_id(0), tl.arange(0, wide)
    real, at = programs < num_programs, row * num_programs + programs
    values = tl.load(values_at + at, mask=real, other=-float("inf"))
    value, winner = _winner(values, tl.load(ids_at + at, mask=real, other=_NONE))
    tl.store(value_at + row, value)
    tl.store(id_at + row, winner.to(tl.int32))
