"""Products with codes of 8 and 4 bits on a CUDA card, by kernels of ours, in Triton; model/quantized.py has the
reference. Must not know what a matrix is of. Imported on cards only.

Shapes: I inputs, O outputs, W columns of the groups the shard touches, G groups, B words (or bytes) of a group's codes;
T rows; N tiles of outputs, S outputs of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import torch
import triton
import triton.language as tl
from triton import knobs

from tpspec.model.card.codes import (
    are_words,
    as_read,
    columns_of,
    floats_of,
    minifloats_of,
    numbers_of,
    scale_in,
    zeros_of,
)
from tpspec.model.card.groups import MANY_OUTPUTS, MANY_ROWS, coded
from tpspec.model.card.overlap import begin, fetch, overlap
from tpspec.model.card.products import TriedProduct, as_kept, has_tensor_cores
from tpspec.model.card.rows import MOST_ROWS, gated
from tpspec.model.card.shares import Shares, added, is_last, share_of, shares
from tpspec.model.card.tiles import (
    CODED_TILES,
    GATED_CODED_TILES,
    TILE_OUTPUTS,
    TILE_ROWS,
    CodedTile,
    Cut,
    Trial,
)
from tpspec.model.quantized import spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tpspec.model.quantized import Matrix

CODE_LINES, SCALE_LINES = 64, 64  # of a tile: 8 KB of codes; scales, in words, of 16,384 columns

_SCALE_LINES = tl.constexpr(SCALE_LINES)


class CodedProduct(TriedProduct[Cut], Generic[Cut]):
    """Codes of 8 or 4 bits, which are exact in every dtype of the rows; sums are float32. A weight is never made. Those
    of a tile of outputs lie together, as they are read (codes.py). Who inherits makes products of few rows."""

    def __init__(
        self,
        matrix: Matrix,
        bias_O: Tensor | None,
        tiles: Mapping[int, Sequence[Cut]],
        gated_tiles: Mapping[int, Sequence[Cut | None]],
    ) -> None:
        self._num_outputs, self._bias_O, self._grid = matrix.num_outputs, bias_O, matrix.grid
        self._codes_NGSB, self._scales_NGS, self._zeros_NGS, kept_zeros, self._gains_O = as_read(matrix)
        device, scales_dtype = self._codes_NGSB.device, self._scales_NGS.dtype
        self._shares = shares(len(self._scales_NGS), self._scales_NGS.shape[1], device)
        self._counters = self._shares.counters(self._num_outputs, device)
        self._has_tensor_cores = has_tensor_cores(device)
        self._of_codes = {
            "group": columns_of(matrix.grid, matrix.table), "bits": matrix.bits, "kept_zeros": kept_zeros,
            **overlap(device),
        }  # fmt: skip
        self._looked_up = {"table": matrix.table or "", "has_gains": matrix.has_gains}
        self._has_kernel = self._has_tensor_cores and are_words(matrix)
        # Rows have the numbers of scales, mostly; in one kind of 16 bits they take as long as in the other.
        half = torch.float16 if scales_dtype == torch.float16 else torch.bfloat16
        kind = matrix.bits, matrix.table, matrix.grid.group, scales_dtype, kept_zeros
        of = type(self).__name__, self._num_outputs, *kind
        trial = Trial(of, matrix.grid.inputs, self._codes_NGSB.nbytes if self._has_kernel else 0, device, half)
        super().__init__(trial, tiles, gated_tiles if bias_O is None else {})  # which is added behind

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not len(x_TI):  # none of which logits are wanted
            return x_TI.new_empty(0, self._num_outputs)
        y_TO = self.in_tiles(x_TI) if self.takes(x_TI) else self._one_by_one(x_TI)
        return y_TO if self._bias_O is None else y_TO + self._bias_O

    def takes(self, x_TI: Tensor) -> bool:
        return self._has_kernel and x_TI.itemsize == 2 and 0 < len(x_TI) <= MOST_ROWS

    # Of all kernels tiles of rows come first: those that read the same codes do so together.

    def _one_by_one(self, x_TI: Tensor) -> Tensor:
        is_large = self._has_tensor_cores and x_TI.itemsize == 2 and len(x_TI) > MOST_ROWS
        rows, outputs, num_warps = (MANY_ROWS, MANY_OUTPUTS, 8) if is_large else (TILE_ROWS, TILE_OUTPUTS, 4)
        y_TO = x_TI.new_empty(len(x_TI), self._num_outputs)
        coded[(triton.cdiv(len(x_TI), rows), triton.cdiv(self._num_outputs, outputs))](
            *self.given(x_TI, y_TO), self._gains(x_TI), self._grid.width, tile_rows=rows, tile_outputs=outputs,
            together=TILE_OUTPUTS, num_warps=num_warps, inline_ptx=not knobs.runtime.interpret, **self._looked_up,
            **self._of_codes,
        )  # fmt: skip
        return y_TO

    def given(self, x_TI: Tensor, y_TO: Tensor) -> tuple[Any, ...]:
        """What kernels take first: rows, codes, scales, zeros, what is made, and counts."""
        x_TW, scales = spread(x_TI, self._grid).contiguous(), self._scales_NGS
        zeros = scales if self._zeros_NGS is None else self._zeros_NGS
        return x_TW, self._codes_NGSB, scales, zeros, y_TO, *y_TO.shape, scales.shape[1]

    def _gains(self, x_TI: Tensor) -> Tensor:
        """Anything where there are none."""
        return x_TI if self._gains_O is None else self._gains_O


class CodedLinear(CodedProduct[CodedTile]):
    """By a kernel in Triton's own language."""

    def __init__(self, matrix: Matrix, bias_O: Tensor | None) -> None:
        super().__init__(matrix, bias_O, CODED_TILES, GATED_CODED_TILES)

    def few(self, x_TI: Tensor, tile: CodedTile, gate: str = "") -> Tensor:
        y_TO = x_TI.new_empty(len(x_TI), self._num_outputs // 2 if gate else self._num_outputs)
        num_tiles = triton.cdiv(len(x_TI), tile.rows), triton.cdiv(y_TO.shape[1], tile.outputs)
        few_coded[(*num_tiles, self._shares.splits)](
            *self.given(x_TI, y_TO), x_TI, x_TI, x_TI, self._gains(x_TI), self._counters,
            self._shares.partials(x_TI, self._num_outputs), 1, self._grid.width, gate=gate, sorted_rows=0,
            has_biases=False, **self._looked_up, **in_tile(tile, self._shares), **self._of_codes,
        )  # fmt: skip
        return y_TO


def in_tile(tile: CodedTile, shares: Shares) -> dict[str, Any]:
    """Of `few_coded`."""
    groups = shares.at_once
    return {
        "tile_rows": tile.rows, "tile_outputs": tile.outputs, "together": TILE_OUTPUTS, "num_stages": tile.stages,
        "at_once": groups, "num_warps": groups, "splits": shares.splits, "stages": tile.stages,
        "code_lines": CODE_LINES, "inline_ptx": not knobs.runtime.interpret,
    }  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _fetch_tiles(
    output: tl.tensor,
    num_outputs: int,
    first_group: tl.tensor,
    codes_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    size: tl.tensor,
    columns: tl.constexpr,
    tiles: tl.constexpr,
    together: tl.constexpr,
    kept_zeros: tl.constexpr,
    code_lines: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """The first codes, scales and zeros, from that group on, of so many tiles, this output's and those behind it, as
    far as there are any. A tile has `size` scales, and words for each."""
    tile = tl.minimum(output + tl.arange(0, tiles) * together, num_outputs - 1) // together
    begin_at, left = tile.to(tl.int64) * size + first_group * together, size - first_group * together
    fetch(codes_at + begin_at * columns, left * columns, code_lines, overlaps)
    fetch(scales_at + begin_at, left, _SCALE_LINES, overlaps)
    if kept_zeros == "apart":
        fetch(zeros_at + begin_at, left, _SCALE_LINES, overlaps)


@triton.jit  # type: ignore[untyped-decorator]
def _columns(
    from_x: tl.tensor, real: tl.tensor, at: tl.tensor, behind: tl.constexpr, width: int, may_end: tl.constexpr
) -> tl.tensor:
    """Of rows, so many columns behind those at `at`. may_end: so that some are beyond the last."""
    if may_end:
        real = real & (at + behind < width)
    return tl.load(from_x + behind, mask=real, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _of_groups(
    sums: tl.tensor,
    x: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    last: tl.tensor,
    from_codes: tl.tensor,
    real: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    at: tl.tensor,
    bits: tl.constexpr,
    table: tl.constexpr,
    has_gains: tl.constexpr,
    kept_zeros: tl.constexpr,
    inline_ptx: tl.constexpr,
) -> tl.tensor:
    """Sums [N, O, R] of N groups at once go on by rows [N, columns, R] of each half or quarter of a group, and outputs
    whose words are at `from_codes` [N, O, columns], and scales at `at` [N, O], which of those are real [N, O]."""
    words = tl.load(from_codes, mask=real[:, :, None], other=0)
    if table == "e2m1":
        scales = tl.load(scales_at + at, mask=real, other=0)
        sums += tl.dot(minifloats_of(words, x, 0, inline_ptx), x) * scale_in(scales, 0, has_gains)[:, :, None]
        sums += tl.dot(minifloats_of(words, x, 1, inline_ptx), second) * scale_in(scales, 1, has_gains)[:, :, None]
        sums += tl.dot(minifloats_of(words, x, 2, inline_ptx), third) * scale_in(scales, 2, has_gains)[:, :, None]
        sums += tl.dot(minifloats_of(words, x, 3, inline_ptx), last) * scale_in(scales, 3, has_gains)[:, :, None]
        return sums
    scales, zeros = numbers_of(scales_at, zeros_at, at, real, kept_zeros)
    part = tl.dot(floats_of(words, x, 0, bits, table, inline_ptx), x)
    part = tl.dot(floats_of(words, x, 1, bits, table, inline_ptx), second, part)
    if bits == 4:
        part = tl.dot(floats_of(words, x, 2, bits, table, inline_ptx), third, part)
        part = tl.dot(floats_of(words, x, 3, bits, table, inline_ptx), last, part)
    sums += part * scales[:, :, None]
    if kept_zeros != "" or (bits == 4 and table == ""):
        ones = tl.full(words.shape, 1.0, x.dtype)
        total = tl.dot(ones, second, tl.dot(ones, x))  # of each row, as often as there are outputs
        if bits == 4:
            total = tl.dot(ones, last, tl.dot(ones, third, total))
        sums += total * zeros_of(scales, zeros, x, bits, kept_zeros)[:, :, None]
    return sums


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def few_coded(
    x_at: tl.tensor,
    codes_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    y_at: tl.tensor,
    num_rows: int,
    num_outputs: int,
    num_groups: int,
    expert_at: tl.tensor,
    pairs_at: tl.tensor,
    biases_at: tl.tensor,
    gains_at: tl.tensor,
    counters_at: tl.tensor,
    partials_at: tl.tensor,
    fan: int,
    width: int,
    group: tl.constexpr,
    bits: tl.constexpr,
    table: tl.constexpr,
    has_gains: tl.constexpr,
    kept_zeros: tl.constexpr,
    gate: tl.constexpr,
    sorted_rows: tl.constexpr,
    has_biases: tl.constexpr,
    at_once: tl.constexpr,
    splits: tl.constexpr,
    stages: tl.constexpr,
    code_lines: tl.constexpr,
    inline_ptx: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    together: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """A tile of y [T, O] from x [T, W]. Of some groups at once each has a warp and sums of its own, which are added at
    the end: the same for any number of rows. So are those of programs that share the tile's columns (shares.py).
    Outputs lie `together` by so many. gate: as of products.py.

    sorted_rows: of tiles of a mixture, whose matrices stand one behind the other, and of whose rows y [P, O] is made of
    x [P / fan, W] (router.py), with biases [O], and gains, behind each other, too; 0: of none. table: of codes of
    4 bits, or "". Of e2m1 scales are words of bytes; the last group may then have fewer columns.
    """
    first_output = tl.program_id(1) * tile_outputs
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    of_x, first = rows, 0
    if sorted_rows > 0:
        begin(overlaps)
        tile = tl.program_id(0) * tile_rows // sorted_rows
        rows = tl.load(pairs_at + rows)
        if tl.max(rows, 0) < 0:
            return
        expert = tl.load(expert_at + tile)
        of_x, first = rows // fan, expert * tl.cdiv(num_outputs, together)
        biases_at += expert * num_outputs
        gains_at += expert * num_outputs
    outputs = first_output + tl.arange(0, tile_outputs)
    own, real_rows, real_outputs = tl.arange(0, at_once), (rows >= 0) & (rows < num_rows), outputs < num_outputs
    columns: tl.constexpr = group * bits // 16  # that are read at a time, and words
    may_end: tl.constexpr = table == "e2m1"
    column = tl.arange(0, columns)
    first_group, end = share_of(num_groups, at_once, splits)
    # Of scales, which 32 bits count.
    first_at = (first + outputs // together) * (num_groups * together) + outputs % together
    from_x = x_at + of_x[None, None, :].to(tl.int64) * width + column[None, :, None]
    at = first_at[None, :] + (first_group + own)[:, None] * together
    sums = tl.zeros((at_once, tile_outputs, tile_rows), tl.float32)
    tiles: tl.constexpr = tile_outputs // together
    size, count = num_groups * together, num_outputs if gate == "" else 2 * num_outputs
    if sorted_rows == 0:
        _fetch_tiles(
            first_output, count, first_group, codes_at, scales_at, zeros_at, size, columns, tiles, together,
            kept_zeros, code_lines, overlaps,
        )  # fmt: skip
    if gate != "":
        more = num_outputs + outputs
        more_at = more // together * (num_groups * together) + more % together
        apart = (more_at - first_at)[None, :]
        _fetch_tiles(
            num_outputs + first_output, count, first_group, codes_at, scales_at, zeros_at, size, columns, tiles,
            together, kept_zeros, code_lines, overlaps,
        )  # fmt: skip
        ups = tl.zeros((at_once, tile_outputs, tile_rows), tl.float32)
    if sorted_rows == 0:
        begin(overlaps)
    for group_at in tl.range(first_group, end, at_once, num_stages=stages):  # what has 32 bits comes in the background
        index = group_at + own
        is_group = index < end
        real, real_x = is_group[:, None] & real_outputs[None, :], is_group[:, None, None] & real_rows[None, None, :]
        from_group, at_x = from_x + index[:, None, None] * group, index[:, None, None] * group + column[None, :, None]
        x = _columns(from_group, real_x, at_x, 0, width, may_end)
        second = _columns(from_group, real_x, at_x, columns, width, may_end)
        third, last = second, second
        if bits == 4:
            third = _columns(from_group, real_x, at_x, 2 * columns, width, may_end)
            last = _columns(from_group, real_x, at_x, 3 * columns, width, may_end)
        from_codes = codes_at + at.to(tl.int64)[:, :, None] * columns + column[None, None, :]
        sums = _of_groups(
            sums, x, second, third, last, from_codes, real, scales_at, zeros_at, at, bits, table, has_gains,
            kept_zeros, inline_ptx,
        )  # fmt: skip
        if gate != "":
            from_codes += apart.to(tl.int64)[:, :, None] * columns
            ups = _of_groups(
                ups, x, second, third, last, from_codes, real, scales_at, zeros_at, at + apart, bits, table,
                has_gains, kept_zeros, inline_ptx,
            )  # fmt: skip
        at += at_once * together
    made = tl.sum(sums, 0)
    real_y = real_rows[None, :] & real_outputs[:, None]
    if gate != "":
        more_made = tl.sum(ups, 0)
    if splits > 1:
        partials_at += rows[None, :] * count + outputs[:, None]
        share_at = partials_at + tl.program_id(2) * (num_rows * count)
        tl.store(share_at, made, mask=real_y)
        if gate != "":
            tl.store(share_at + num_outputs, more_made, mask=real_y)
        if not is_last(counters_at, splits):
            return
        made = added(partials_at, num_rows * count, real_y, splits)
        if gate != "":
            more_made = added(partials_at + num_outputs, num_rows * count, real_y, splits)
    if has_gains:
        made *= tl.load(gains_at + outputs, mask=real_outputs, other=0.0)[:, None]
        if gate != "":
            more_made *= tl.load(gains_at + num_outputs + outputs, mask=real_outputs, other=0.0)[:, None]
    if has_biases:
        made += tl.load(biases_at + outputs, mask=real_outputs, other=0.0).to(tl.float32)[:, None]
    if gate != "":
        made = gated(as_kept(made, y_at), as_kept(more_made, y_at), gate)
    to = y_at + rows[None, :].to(tl.int64) * num_outputs + outputs[:, None]
    tl.store(to, made.to(y_at.dtype.element_ty), mask=real_y)
