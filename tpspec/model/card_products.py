"""Products on a CUDA card by kernels of ours, in Triton: of few rows, and of many with small weights; with those of 4
bits by torch's own, where it runs. linear.py and quantized.py have the references. Must not know what a matrix is of.
Imported on cards only.

Shapes: I inputs, O outputs, W columns of the groups the shard touches, G groups, X columns of a group; T rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tpspec.model.card_overlap import begin_with, overlap
from tpspec.model.card_rows import MOST_ROWS
from tpspec.model.quantized import joined, spread

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.quantized import Matrix

OUTPUTS = 8  # that torch's kernel takes at a time
TENSOR_CORES = (8, 0)  # compute capability that it and Triton ask for; below it there is no bfloat16
TILE_ROWS, TILE_OUTPUTS = 16, 32  # of a program of ours; fewer rows than 16 no tensor core takes
FEW_OUTPUTS = 16  # where programs of more would leave processors idle: a processor alone reads too slowly
# Of Triton's, by outputs of a program: one more than groups that are on their way at a time. Smaller programs, of which
# there are as many more, ask for no more at once unless each has more groups on their way.
STAGES = {TILE_OUTPUTS: 3, FEW_OUTPUTS: 5}
MANY_ROWS, MANY_OUTPUTS = 64, 128  # of a program where rows are many: codes are read and converted once for so many
# Of a matrix of 16 bits: columns that are read at a time, what Triton calls stages, and warps of a program. On an H200
# these read the matrices of an 8B at nine tenths of what its memory gives; with four warps and 128 columns it was two
# thirds.
COLUMNS, COLUMN_STAGES, COLUMN_WARPS = 256, 5, 2
ALIGNED = 16  # numbers, at which its rows begin: what Triton needs to know for loads of 16 bytes


class FewRowsLinear:
    """A matrix of 16 bits. Of as many rows as a recorded round may have the kernel is ours, so that what a row becomes
    does not depend, by a single bit, on how many stand beside it: verified drafts are what plain decoding computes.
    torch's kernels, which more rows take, are others for other row counts, and add in another order."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        missing = -weight_OI.shape[1] % ALIGNED
        self._weight_OI = F.pad(weight_OI, (0, missing)) if missing else weight_OI.contiguous()
        self._bias_O, self._overlap = bias_O, overlap(weight_OI.device)

    def __call__(self, x_TI: Tensor) -> Tensor:
        (num_rows, num_inputs), (num_outputs, stride) = x_TI.shape, self._weight_OI.shape
        if not 0 < num_rows <= MOST_ROWS:
            return F.linear(x_TI, self._weight_OI[:, :num_inputs], self._bias_O)
        y_TO, bias_O = x_TI.new_empty(num_rows, num_outputs), self._bias_O
        # Tiles of rows come first: those that read the same weights do so together.
        _few_rows[(triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(num_outputs, FEW_OUTPUTS))](
            x_TI.contiguous(), self._weight_OI, y_TO if bias_O is None else bias_O, y_TO, num_rows, num_outputs,
            num_inputs, stride, columns=COLUMNS, has_biases=bias_O is not None, tile_rows=TILE_ROWS,
            tile_outputs=FEW_OUTPUTS, num_stages=COLUMN_STAGES, num_warps=COLUMN_WARPS, **self._overlap,
        )  # fmt: skip
        return y_TO


class FourBitLinear:
    """torch's kernel (tinygemm) computes in bfloat16, whatever the rows have, on cards that have it. Scales and zeros
    of others are rounded to it: by at most a 64th of a step between two codes."""

    def __init__(self, matrix: Matrix, bias_O: Tensor | None) -> None:
        self._num_outputs, self._bias_O, self._grid = matrix.num_outputs, bias_O, matrix.grid
        codes, scales_zeros = [], []
        for _, part in matrix.blocks(OUTPUTS):
            missing = (0, 0, 0, -len(part.codes_OW) % OUTPUTS)
            zeros_OG = torch.zeros_like(part.scales_OG) if part.zeros_OG is None else part.zeros_OG
            codes.append(F.pad(part.codes_OW[:, ::2] << 4 | part.codes_OW[:, 1::2], missing))
            both_OG2 = torch.stack([F.pad(part.scales_OG, missing), F.pad(zeros_OG, missing)], -1)
            scales_zeros.append(both_OG2.bfloat16())
        self._packed = torch.ops.aten._convert_weight_to_int4pack(torch.cat(codes), self._grid.group // 16)
        self._scales_zeros_GO2 = torch.cat(scales_zeros).transpose(0, 1).contiguous()

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not len(x_TI):  # no row of which logits are wanted: a card refuses to launch nothing
            return x_TI.new_empty(0, self._num_outputs)
        x_TW = spread(x_TI, self._grid).bfloat16().contiguous()
        y_TO: Tensor = torch.ops.aten._weight_int4pack_mm(x_TW, self._packed, self._grid.group, self._scales_zeros_GO2)[
            :, : self._num_outputs
        ].to(x_TI.dtype)
        return y_TO.contiguous() if self._bias_O is None else y_TO + self._bias_O


class CodedLinear:
    """Codes of 8 or 4 bits, which are exact in every dtype of the rows; sums are float32. A weight is never made."""

    def __init__(self, matrix: Matrix, bias_O: Tensor | None) -> None:
        made = joined([part for _, part in matrix.blocks(1)])
        self._codes = made.codes_OW if matrix.bits == 8 else paired(made.codes_OW, matrix.grid.group)
        self._scales_OG, self._zeros_OG, self._bits = made.scales_OG, made.zeros_OG, matrix.bits
        self._bias_O, self._grid = bias_O, matrix.grid
        self._tile_outputs = tile_outputs(len(self._codes), self._codes.device)
        self._has_large_tiles = has_tensor_cores(self._codes.device)
        self._overlap = overlap(self._codes.device)

    def __call__(self, x_TI: Tensor) -> Tensor:
        num_rows, num_outputs = x_TI.shape[0], self._codes.shape[0]
        y_TO = x_TI.new_empty(num_rows, num_outputs)
        if not num_rows:  # none of which logits are wanted
            return y_TO
        tile = {"tile_rows": TILE_ROWS, "tile_outputs": self._tile_outputs, "num_stages": STAGES[self._tile_outputs]}
        if num_rows > MOST_ROWS and self._has_large_tiles and x_TI.itemsize == 2:
            tile = {"tile_rows": MANY_ROWS, "tile_outputs": MANY_OUTPUTS, "num_warps": 8}
        x_TW, scales_OG, grid = spread(x_TI, self._grid).contiguous(), self._scales_OG, self._grid
        # Tiles of rows come first: those that read the same codes do so together.
        _product[(triton.cdiv(num_rows, tile["tile_rows"]), triton.cdiv(num_outputs, tile["tile_outputs"]))](
            x_TW, self._codes, scales_OG, scales_OG if self._zeros_OG is None else self._zeros_OG, y_TO, num_rows,
            num_outputs, grid.num_groups, self._codes.shape[1], group=grid.group, bits=self._bits,
            has_zeros=self._zeros_OG is not None, **tile, **self._overlap,
        )  # fmt: skip
        return y_TO if self._bias_O is None else y_TO + self._bias_O


def has_tensor_cores(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= TENSOR_CORES


def paired(codes_OW: Tensor, group: int) -> Tensor:
    """[O, W / 2]: codes of 4 bits in pairs, one of each half of their group, so that the columns that a product reads
    at a time are side by side."""
    low_OGH, high_OGH = codes_OW.view(len(codes_OW), -1, 2, group // 2).unbind(2)
    return (low_OGH | high_OGH << 4).flatten(1)


def tile_outputs(num_outputs: int, device: torch.device) -> int:
    """Of a program, so that a round of few rows gives every processor of the card one."""
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return TILE_OUTPUTS if triton.cdiv(num_outputs, TILE_OUTPUTS) >= num_processors else FEW_OUTPUTS


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _few_rows(
    x_at: tl.tensor,  # no name of Python's may stand here: Triton reads annotations
    weights_at: tl.tensor,
    biases_at: tl.tensor,
    y_at: tl.tensor,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    stride: int,
    columns: tl.constexpr,
    has_biases: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """A tile of y [T, O] from x [T, I] and weights [O, stride]. The same code for any number of rows, of which each is
    added up by itself, in the order of columns."""
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    outputs = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    real_rows, real_outputs = rows < num_rows, outputs < num_outputs
    from_x = x_at + rows[:, None] * num_inputs
    from_weights = weights_at + outputs[None, :].to(tl.int64) * stride
    begin_with(weights_at + tl.minimum(outputs, num_outputs - 1).to(tl.int64) * stride, stride, overlaps)
    sums = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for first in range(0, num_inputs, columns):
        at = first + tl.arange(0, columns)
        inside = at < num_inputs
        x = tl.load(from_x + at[None, :], mask=real_rows[:, None] & inside[None, :], other=0.0)
        weights = tl.load(from_weights + at[:, None], mask=real_outputs[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(x, weights, sums, input_precision="ieee")
    if has_biases:
        sums += tl.load(biases_at + outputs, mask=real_outputs, other=0.0).to(tl.float32)[None, :]
    to = y_at + rows[:, None] * num_outputs + outputs[None, :]
    tl.store(to, sums.to(y_at.dtype.element_ty), mask=real_rows[:, None] & real_outputs[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def group_product(
    from_x: tl.tensor,
    from_codes: tl.tensor,
    real_rows: tl.tensor,
    real_outputs: tl.tensor,
    group: tl.constexpr,
    bits: tl.constexpr,
) -> tl.tensor:
    """Of rows [R, 1] and outputs [1, O], by where their group begins: products [R, O] without scales, and what the rows
    sum up to, [R]."""
    if bits == 4:
        half = tl.arange(0, group // 2)
        first = tl.load(from_x + half[None, :], mask=real_rows[:, None], other=0.0)
        last = tl.load(from_x + (group // 2 + half)[None, :], mask=real_rows[:, None], other=0.0)
        both = tl.load(from_codes + half[:, None], mask=real_outputs[None, :], other=0)
        low, high = ((both & 15).to(tl.int8) - 8).to(first.dtype), ((both >> 4).to(tl.int8) - 8).to(first.dtype)
        part = tl.dot(first, low, input_precision="ieee") + tl.dot(last, high, input_precision="ieee")
        total = tl.sum(first.to(tl.float32), 1) + tl.sum(last.to(tl.float32), 1)
    else:
        columns = tl.arange(0, group)
        x = tl.load(from_x + columns[None, :], mask=real_rows[:, None], other=0.0)
        codes = tl.load(from_codes + columns[:, None], mask=real_outputs[None, :], other=0).to(x.dtype)
        part = tl.dot(x, codes, input_precision="ieee")
        total = tl.sum(x.to(tl.float32), 1)
    return part, total


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _product(
    x_at: tl.tensor,
    codes_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    y_at: tl.tensor,
    num_rows: int,
    num_outputs: int,
    num_groups: int,
    row: int,
    group: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """A tile of y [T, O] from x [T, W], codes [O, `row` bytes], scales and zeros [O, G]."""
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    outputs = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    real_outputs, real_rows = outputs < num_outputs, rows < num_rows
    from_codes = codes_at + outputs[None, :].to(tl.int64) * row
    begin_with(codes_at + tl.minimum(outputs, num_outputs - 1).to(tl.int64) * row, row, overlaps)
    from_x = x_at + rows[:, None].to(tl.int64) * (num_groups * group)
    sums = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for index in range(num_groups):
        at = index * (group * bits // 8)
        part, total = group_product(from_x + index * group, from_codes + at, real_rows, real_outputs, group, bits)
        scales = tl.load(scales_at + outputs * num_groups + index, mask=real_outputs, other=0.0).to(tl.float32)
        sums += part * scales[None, :]
        if has_zeros:
            zeros = tl.load(zeros_at + outputs * num_groups + index, mask=real_outputs, other=0.0).to(tl.float32)
            sums += total[:, None] * zeros[None, :]
    to = y_at + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(to, sums.to(y_at.dtype.element_ty), mask=real_rows[:, None] & real_outputs[None, :])
