"""Products with codes of 8 and 4 bits on a CUDA card, by kernels of ours, in Triton; quantized.py has the reference.
Must not know what a matrix is of. Imported on cards only.

Shapes: I inputs, O outputs, W columns of the groups the shard touches, G groups, B bytes of a group's codes; T rows; N
tiles of outputs, S outputs of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton import knobs

from tpspec.model.card_overlap import begin, overlap
from tpspec.model.card_products import TriedProduct, as_kept, has_tensor_cores
from tpspec.model.card_rows import MOST_ROWS, gated
from tpspec.model.card_tiles import (
    CODED_TILES,
    GATED_CODED_TILES,
    TILE_OUTPUTS,
    TILE_ROWS,
    CodedTile,
    Trial,
)
from tpspec.model.quantized import joined, spread

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.quantized import Matrix

# Of codes: groups that are read at a time, each by a warp of its own, where programs are few and where they are many
# for each processor of the card.
GROUPS, FEWER_GROUPS, MANY_TILES = 4, 2, 4
LEAST_COLUMNS = 32  # of codes of 8 bits, or pairs of 4, that such a product takes at a time
MANY_ROWS, MANY_OUTPUTS = 64, 128  # of a program where rows are many: codes are read and converted once for so many


class CodedLinear(TriedProduct[CodedTile]):
    """Codes of 8 or 4 bits, which are exact in every dtype of the rows; sums are float32. A weight is never made. Those
    of a tile of outputs lie together, as they are read: codes [N, G, S, B], scales and zeros [N, G, S]."""

    def __init__(self, matrix: Matrix, bias_O: Tensor | None) -> None:
        made = joined([part for _, part in matrix.blocks(1)])
        codes_OY = made.codes_OW if matrix.bits == 8 else paired(made.codes_OW, matrix.grid.group)
        self._num_outputs, self._bias_O, self._grid = matrix.num_outputs, bias_O, matrix.grid
        self._codes_NGSB = _in_tiles(codes_OY.view(len(codes_OY), matrix.grid.num_groups, -1))
        self._scales_NGS = _in_tiles(made.scales_OG)
        self._zeros_NGS = None if made.zeros_OG is None else _in_tiles(made.zeros_OG)
        device = codes_OY.device
        self._at_once = FEWER_GROUPS if len(self._codes_NGSB) >= MANY_TILES * num_processors(device) else GROUPS
        self._has_tensor_cores = has_tensor_cores(device)
        self._of_codes = {
            "group": matrix.grid.group, "bits": matrix.bits, "has_zeros": made.zeros_OG is not None, **overlap(device)
        }  # fmt: skip
        self._has_kernel = self._has_tensor_cores and matrix.grid.group * matrix.bits >= LEAST_COLUMNS * 8
        # Rows have the numbers of scales, mostly; in one kind of 16 bits they take as long as in the other.
        half = torch.float16 if made.scales_OG.dtype == torch.float16 else torch.bfloat16
        of = self._num_outputs, matrix.bits, matrix.grid.group, made.scales_OG.dtype, made.zeros_OG is not None
        trial = Trial(of, matrix.grid.inputs, codes_OY.nbytes if self._has_kernel else 0, device, half)
        super().__init__(trial, CODED_TILES, GATED_CODED_TILES if bias_O is None else {})  # which is added behind

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not len(x_TI):  # none of which logits are wanted
            return x_TI.new_empty(0, self._num_outputs)
        y_TO = self.in_tiles(x_TI) if self.takes(x_TI) else self._one_by_one(x_TI)
        return y_TO if self._bias_O is None else y_TO + self._bias_O

    def takes(self, x_TI: Tensor) -> bool:
        return self._has_kernel and x_TI.itemsize == 2 and 0 < len(x_TI) <= MOST_ROWS

    # Of both kernels tiles of rows come first: those that read the same codes do so together.

    def few(self, x_TI: Tensor, tile: CodedTile, gate: str = "") -> Tensor:
        y_TO = x_TI.new_empty(len(x_TI), self._num_outputs // 2 if gate else self._num_outputs)
        _few_coded[(triton.cdiv(len(x_TI), tile.rows), triton.cdiv(y_TO.shape[1], tile.outputs))](
            *self._given(x_TI, y_TO), gate=gate, at_once=self._at_once, inline_ptx=not knobs.runtime.interpret,
            tile_rows=tile.rows, tile_outputs=tile.outputs, together=TILE_OUTPUTS, num_stages=tile.stages,
            num_warps=self._at_once, **self._of_codes,
        )  # fmt: skip
        return y_TO

    def _one_by_one(self, x_TI: Tensor) -> Tensor:
        is_large = self._has_tensor_cores and x_TI.itemsize == 2 and len(x_TI) > MOST_ROWS
        rows, outputs, num_warps = (MANY_ROWS, MANY_OUTPUTS, 8) if is_large else (TILE_ROWS, TILE_OUTPUTS, 4)
        y_TO = x_TI.new_empty(len(x_TI), self._num_outputs)
        _coded[(triton.cdiv(len(x_TI), rows), triton.cdiv(self._num_outputs, outputs))](
            *self._given(x_TI, y_TO), tile_rows=rows, tile_outputs=outputs, together=TILE_OUTPUTS,
            num_warps=num_warps, **self._of_codes,
        )  # fmt: skip
        return y_TO

    def _given(self, x_TI: Tensor, y_TO: Tensor) -> tuple[Any, ...]:
        x_TW, scales = spread(x_TI, self._grid).contiguous(), self._scales_NGS
        zeros = scales if self._zeros_NGS is None else self._zeros_NGS
        return x_TW, self._codes_NGSB, scales, zeros, y_TO, *y_TO.shape, self._grid.num_groups


def num_processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def paired(codes_OW: Tensor, group: int) -> Tensor:
    """[O, W / 2]: codes of 4 bits in pairs, one of each half of their group, so that the columns that a product reads
    at a time are side by side."""
    low_OGH, high_OGH = codes_OW.view(len(codes_OW), -1, 2, group // 2).unbind(2)
    return (low_OGH | high_OGH << 4).flatten(1)


def _in_tiles(x_OGX: Tensor) -> Tensor:
    """[O, G, ...] -> [N, G, S, ...]; nothing where there are no outputs."""
    if missing := -len(x_OGX) % TILE_OUTPUTS:
        x_OGX = F.pad(x_OGX, (0, 0) * (x_OGX.dim() - 1) + (0, missing))
    return x_OGX.view(-1, TILE_OUTPUTS, *x_OGX.shape[1:]).transpose(1, 2).contiguous()


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


def _nibbles(dtype: str, above: int, one: int, less: int, shift: int) -> str:
    """Of four bytes, of each four bits as a float of 16, less 8: they are put below what makes a float of 2 to some
    power and them, and so much is taken from it again, two at a time. PTX."""
    return f"""{{
        .reg .b32 four, one, less;
        shr.b32 four, $2, {shift};
        and.b32 four, four, 0x0f0f0f0f;
        prmt.b32 $0, four, {above:#x}, 0x4140;
        prmt.b32 $1, four, {above:#x}, 0x4342;
        mov.b32 one, {one:#x};
        mov.b32 less, {less:#x};
        fma.rn.{dtype}x2 $0, $0, one, less;
        fma.rn.{dtype}x2 $1, $1, one, less;
    }}"""


BFLOAT16, FLOAT16 = ("bf16", 0x43434343, 0x3F803F80, 0xC308C308), ("f16", 0x64646464, 0x3C003C00, 0xE408E408)
_BFLOAT16_ONE, _FLOAT16_ONE = (
    tl.constexpr(f"mov.b32 $0, {one:#x}; mov.b32 $1, {one:#x};") for _, _, one, _ in (BFLOAT16, FLOAT16)
)
_BFLOAT16_LOW, _BFLOAT16_HIGH = (tl.constexpr(_nibbles(*BFLOAT16, shift)) for shift in (0, 4))
_FLOAT16_LOW, _FLOAT16_HIGH = (tl.constexpr(_nibbles(*FLOAT16, shift)) for shift in (0, 4))


@triton.jit  # type: ignore[untyped-decorator]
def _four_bits(both: tl.tensor, like: tl.tensor, is_high: tl.constexpr, inline_ptx: tl.constexpr) -> tl.tensor:
    """Codes, less 8, of the low or the high halves of bytes."""
    if not inline_ptx:
        return (((both >> 4) if is_high else (both & 15)).to(tl.int8) - 8).to(like.dtype)
    bfloat16: tl.constexpr = _BFLOAT16_HIGH if is_high else _BFLOAT16_LOW
    float16: tl.constexpr = _FLOAT16_HIGH if is_high else _FLOAT16_LOW
    ptx: tl.constexpr = bfloat16 if like.dtype == tl.bfloat16 else float16
    return tl.inline_asm_elementwise(ptx, "=r,=r,r", [both], dtype=like.dtype, is_pure=True, pack=4)


@triton.jit  # type: ignore[untyped-decorator]
def _ones(codes: tl.tensor, like: tl.tensor, inline_ptx: tl.constexpr) -> tl.tensor:
    """As if they were made of codes, so that a product takes its other side as that with codes does, which is then read
    once."""
    if not inline_ptx:
        return tl.full(codes.shape, 1.0, like.dtype)
    ptx: tl.constexpr = _BFLOAT16_ONE if like.dtype == tl.bfloat16 else _FLOAT16_ONE
    return tl.inline_asm_elementwise(ptx, "=r,=r,r", [codes], dtype=like.dtype, is_pure=True, pack=4)


@triton.jit  # type: ignore[untyped-decorator]
def _of_groups(
    sums: tl.tensor,
    x: tl.tensor,
    last: tl.tensor,
    codes_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    first_at: tl.tensor,
    index: tl.tensor,
    real: tl.tensor,
    column: tl.tensor,
    size: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    together: tl.constexpr,
    inline_ptx: tl.constexpr,
) -> tl.tensor:
    """Sums [N, R, O] of N groups at once go on by rows x [N, R, columns], and `last` beside them where pairs are read:
    of outputs whose scales are `first_at` [O], in groups `index` [N], of both of which those are real [N, O]."""
    of_scales = first_at[None, :] + index[:, None] * together
    from_codes = codes_at + of_scales[:, None, :] * size + column[None, :, None]
    codes = tl.load(from_codes, mask=real[:, None, :], other=0)
    scales = tl.load(scales_at + of_scales, mask=real, other=0.0).to(tl.float32)
    if bits == 8:
        part = tl.dot(x, codes.to(x.dtype))
    else:
        part = tl.dot(x, _four_bits(codes, x, False, inline_ptx))
        part = tl.dot(last, _four_bits(codes, x, True, inline_ptx), part)
    sums += part * scales[:, None, :]
    if has_zeros:
        ones = _ones(codes, x, inline_ptx)
        total = tl.dot(x, ones)  # of each row, as often as there are outputs
        if bits == 4:
            total = tl.dot(last, ones, total)
        zeros = tl.load(zeros_at + of_scales, mask=real, other=0.0).to(tl.float32)
        sums += total * zeros[:, None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _few_coded(
    x_at: tl.tensor,
    codes_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    y_at: tl.tensor,
    num_rows: int,
    num_outputs: int,
    num_groups: int,
    group: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    gate: tl.constexpr,
    at_once: tl.constexpr,
    inline_ptx: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    together: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """A tile of y [T, O] from x [T, W]. Of some groups at once each has a warp and sums of its own, which are added at
    the end: the same for any number of rows. Outputs lie `together` by so many. gate: as of card_products.py."""
    begin(overlaps)
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    outputs = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    own, real_rows, real_outputs = tl.arange(0, at_once), rows < num_rows, outputs < num_outputs
    size: tl.constexpr = group * bits // 8  # of a group's codes
    columns: tl.constexpr = group if bits == 8 else group // 2  # that are read at a time
    column = tl.arange(0, columns)
    first_at = (outputs // together).to(tl.int64) * (num_groups * together) + outputs % together  # of scales
    from_x = x_at + rows[None, :, None].to(tl.int64) * (num_groups * group) + column[None, None, :]
    sums = tl.zeros((at_once, tile_rows, tile_outputs), tl.float32)
    if gate != "":
        more = num_outputs + outputs
        more_at = (more // together).to(tl.int64) * (num_groups * together) + more % together
        ups = tl.zeros((at_once, tile_rows, tile_outputs), tl.float32)
    for first in range(0, num_groups, at_once):
        index = first + own
        real = (index < num_groups)[:, None] & real_outputs[None, :]
        real_x = (index < num_groups)[:, None, None] & real_rows[None, :, None]
        x = tl.load(from_x + index[:, None, None] * group, mask=real_x, other=0.0)
        last = x
        if bits == 4:
            last = tl.load(from_x + index[:, None, None] * group + columns, mask=real_x, other=0.0)
        sums = _of_groups(
            sums, x, last, codes_at, scales_at, zeros_at, first_at, index, real, column, size, bits, has_zeros,
            together, inline_ptx,
        )  # fmt: skip
        if gate != "":
            ups = _of_groups(
                ups, x, last, codes_at, scales_at, zeros_at, more_at, index, real, column, size, bits, has_zeros,
                together, inline_ptx,
            )  # fmt: skip
    made = tl.sum(sums, 0)
    if gate != "":
        made = gated(as_kept(made, y_at), as_kept(tl.sum(ups, 0), y_at), gate)
    to = y_at + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    mask = real_rows[:, None] & real_outputs[None, :]
    tl.store(to, made.to(y_at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _coded(
    x_at: tl.tensor,
    codes_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    y_at: tl.tensor,
    num_rows: int,
    num_outputs: int,
    num_groups: int,
    group: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    together: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """The same, one group after the other."""
    begin(overlaps)
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    outputs = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    real_outputs, real_rows = outputs < num_outputs, rows < num_rows
    size: tl.constexpr = group * bits // 8
    first = (outputs // together).to(tl.int64) * (num_groups * together) + outputs % together  # of scales
    from_x = x_at + rows[:, None].to(tl.int64) * (num_groups * group)
    sums = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for index in range(num_groups):
        at = first + index * together
        part, total = group_product(
            from_x + index * group, codes_at + at[None, :] * size, real_rows, real_outputs, group, bits
        )
        scales = tl.load(scales_at + at, mask=real_outputs, other=0.0).to(tl.float32)
        sums += part * scales[None, :]
        if has_zeros:
            zeros = tl.load(zeros_at + at, mask=real_outputs, other=0.0).to(tl.float32)
            sums += total[:, None] * zeros[None, :]
    to = y_at + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(to, sums.to(y_at.dtype.element_ty), mask=real_rows[:, None] & real_outputs[None, :])
