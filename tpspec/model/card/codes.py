"""Codes of 8 and 4 bits on a CUDA card: how they lie, and how, in Triton, they become numbers. model/quantized.py has
the reference. Must not know what a matrix is of, nor what is made of it. Imported on cards only.

Shapes: O outputs, W columns of the groups the shard touches, Y words or bytes of a row's codes, G groups, B of a
group's; N tiles of outputs, S outputs of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tpspec.model.card.tiles import TILE_OUTPUTS
from tpspec.model.quantized import TABLES, joined

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.quantized import Matrix, Quantized
    from tpspec.published.formats import Table
    from tpspec.published.groups import Grid

LEAST_INPUTS = 16  # that a product takes at a time
IN_WORD = 4  # of scales that are bytes: groups that are read as one, whose scales are a word


def columns_of(grid: Grid, table: Table | None) -> int:
    """That are read as one group."""
    return grid.group * (IN_WORD if table == "e2m1" else 1)


def are_words(matrix: Matrix) -> bool:
    """Whether its codes are read in words of 16 bits: no columns are left over."""
    return columns_of(matrix.grid, matrix.table) * matrix.bits >= 16 * LEAST_INPUTS


class Read(NamedTuple):
    """A matrix in tiles: codes [N, G, S, B], scales and zeros [N, G, S]; gains [O].

    kept_zeros: how. "apart"; or, where both are bfloat16, as we quantize, "beside" the group's scale, which is the
    upper half of a word of both; or "", for there are none.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    kept_zeros: str = ""
    gains: Tensor | None = None


def as_read(matrix: Matrix) -> Read:
    made, group = joined([part for _, part in matrix.blocks(1)]), matrix.grid.group
    if made.table == "e2m1":
        return _floats_as_read(made)
    codes_OY, scales_OG, zeros_OG = made.codes_OW, made.scales_OG, made.zeros_OG
    del made  # or its codes would be there beside their words and their tiles
    kept_zeros = "" if zeros_OG is None else "apart"
    if zeros_OG is not None and zeros_OG.dtype == scales_OG.dtype == torch.bfloat16:
        kept_zeros = "beside"
        scales_OG, zeros_OG = torch.stack([zeros_OG, scales_OG], 2).view(torch.int32)[:, :, 0], None
    if are_words(matrix):
        codes_OY = in_words(codes_OY, 16 // matrix.bits, group)
    elif matrix.bits == 4:
        codes_OY = paired(codes_OY, group)
    codes_NGSB = _in_tiles(codes_OY.view(len(codes_OY), matrix.grid.num_groups, -1))
    return Read(codes_NGSB, _in_tiles(scales_OG), None if zeros_OG is None else _in_tiles(zeros_OG), kept_zeros)


def _floats_as_read(made: Quantized) -> Read:
    """The same of codes whose scales are bytes: a word has one of each of some groups, and the word of their scales
    stands where another's scale does. Groups that are missing are nothing."""
    num_groups = made.scales_OG.shape[1]
    missing, group = -num_groups % IN_WORD, made.codes_OW.shape[1] // num_groups
    codes_OY = in_words(F.pad(made.codes_OW, (0, missing * group)), IN_WORD, IN_WORD * group)
    words_OG = F.pad(made.scales_OG, (0, missing)).contiguous().view(torch.int32)
    return Read(_in_tiles(codes_OY.view(*words_OG.shape, -1)), _in_tiles(words_OG), gains=made.gains_O)


def paired(codes_OW: Tensor, group: int) -> Tensor:
    """[O, W / 2]: codes of 4 bits in pairs, one of each half of their group, so that the columns that a product reads
    at a time are side by side."""
    low_OGH, high_OGH = codes_OW.view(len(codes_OW), -1, 2, group // 2).unbind(2)
    return (low_OGH | high_OGH << 4).flatten(1)


def in_words(codes_OW: Tensor, count: int, group: int) -> Tensor:
    """[O, W / count] of int16: so many codes in a word, one of each half or quarter of their group. A product takes one
    of these after the other, with its rows; of words two lie in a register, and a mask makes two floats of them."""
    parts_OGPX = codes_OW.view(torch.uint8).view(len(codes_OW), -1, count, group // count)
    if count == 4:
        parts_OGPX = parts_OGPX[:, :, ::2] | parts_OGPX[:, :, 1::2] << 4
    return parts_OGPX.transpose(2, 3).contiguous().view(torch.int16).flatten(1)


def _in_tiles(x_OGX: Tensor) -> Tensor:
    """[O, G, ...] -> [N, G, S, ...]; nothing where there are no outputs."""
    if missing := -len(x_OGX) % TILE_OUTPUTS:
        x_OGX = F.pad(x_OGX, (0, 0) * (x_OGX.dim() - 1) + (0, missing))
    return x_OGX.view(-1, TILE_OUTPUTS, *x_OGX.shape[1:]).transpose(1, 2).contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def codes_of(words: tl.tensor, index: tl.constexpr, bits: tl.constexpr) -> tl.tensor:
    """int8: of 8 bits, or of 4, less 8; one of each word."""
    if bits == 8:
        return (words >> 8 * index).to(tl.int8)
    return ((words >> 4 * index) & 15).to(tl.int8) - 8


class Raised(NamedTuple):
    """How two codes of 4 bits of a register of words become floats of 16 bits, which are so much more than the codes:
    they are put below a power of two, so many bits from its last. What is too much is taken from a group's product, of
    32 bits, and not from each of them. PTX, for both at once."""

    power: int  # twice
    bits: int
    more: int

    def ptx(self, shift: int) -> str:
        way = "shr" if shift >= self.bits else "shl"
        return f"""{{
            .reg .b32 bits;
            {way}.b32 bits, $1, {abs(shift - self.bits)};
            lop3.b32 $0, bits, {0x000F000F << self.bits:#x}, {self.power:#x}, 0xea;
        }}"""


class Floats(NamedTuple):
    """The same of 8 bits, as they are: by an `and` and an `or` (or `xor`), and what is too much is taken again. Of
    bfloat16, which has no room for 8 bits below a power of two, the highest bit decides how much that is."""

    dtype: str
    mask: int
    power: int
    how: int  # of lop3: 0xea is (a & b) | c, and 0x6a is (a & b) ^ c
    one: int
    less: int
    sign: int = 0
    more: int = 0

    def ptx(self, shift: int) -> str:
        signed = f"lop3.b32 less, bits, {self.sign:#x}, {self.less:#x}, 0xea;"
        return f"""{{
            .reg .b32 bits, one, less;
            shr.b32 bits, $1, {shift};
            {signed if self.sign else f"mov.b32 less, {self.less:#x};"}
            lop3.b32 bits, bits, {self.mask:#x}, {self.power:#x}, {self.how:#x};
            mov.b32 one, {self.one:#x};
            fma.rn.{self.dtype}x2 $0, bits, one, less;
        }}"""


FLOATS: dict[tuple[torch.dtype, int], Raised | Floats] = {
    (torch.bfloat16, 4): Raised(0x43004300, 0, 128 + 8),
    (torch.float16, 4): Raised(0x4C004C00, 6, 16 + 8),
    (torch.bfloat16, 8): Floats("bf16", 0x007F007F, 0x43004300, 0xEA, 0x3F803F80, 0xC300C300, sign=0x00800080),
    (torch.float16, 8): Floats("f16", 0x00FF00FF, 0x64806480, 0x6A, 0x3C003C00, 0xE480E480),
}
_BFLOAT16_4, _FLOAT16_4, _BFLOAT16_8, _FLOAT16_8 = (
    tl.constexpr(tuple(how.ptx(shift) for shift in range(0, 16, bits))) for (_, bits), how in FLOATS.items()
)
_MORE_BFLOAT16, _MORE_FLOAT16 = (tl.constexpr(FLOATS[dtype, 4].more) for dtype in (torch.bfloat16, torch.float16))


class Minifloats(NamedTuple):
    """How two codes that are floats of 4 bits, or of 8, become floats of 16: exponent and fraction are put where those
    have theirs, which begin far lower, and a product with a power of two makes them what they are. PTX, for both at
    once."""

    dtype: str
    mask: int
    bits: int  # from the last
    power: int  # twice
    width: int = 4

    def ptx(self, shift: int) -> str:
        way = "shr" if shift >= self.bits else "shl"
        return f"""{{
            .reg .b32 bits, sign, power, none;
            {way}.b32 bits, $1, {abs(shift - self.bits)};
            shl.b32 sign, $1, {16 - self.width - shift};
            lop3.b32 bits, bits, {self.mask:#x}, 0, 0xea;
            lop3.b32 bits, sign, 0x80008000, bits, 0xea;
            mov.b32 power, {self.power:#x};
            mov.b32 none, 0x80008000;
            fma.rn.{self.dtype}x2 $0, bits, power, none;
        }}"""


MINIFLOATS = {
    torch.bfloat16: Minifloats("bf16", 0x01C001C0, 6, 0x7E807E80),
    torch.float16: Minifloats("f16", 0x0E000E00, 9, 0x74007400),
}
EIGHTS = {
    torch.bfloat16: Minifloats("bf16", 0x07F007F0, 4, 0x7B807B80, 8),
    torch.float16: Minifloats("f16", 0x3F803F80, 7, 0x5C005C00, 8),
}
_MINI_BFLOAT16, _MINI_FLOAT16, _E4M3_BFLOAT16, _E4M3_FLOAT16 = (
    tl.constexpr(tuple(how.ptx(shift) for shift in range(0, 16, how.width)))
    for how in (*MINIFLOATS.values(), *EIGHTS.values())
)


class LookedUp(NamedTuple):
    """How two codes of 4 bits become what a table has for them, in floats of 16 bits: three bits of a code are a place
    among eight bytes, of low halves or high ones, in either half of the table, and the fourth says in which. PTX, for
    both at once."""

    numbers: tuple[int, ...]  # as bits

    @classmethod
    def of(cls, table: Table, dtype: torch.dtype) -> LookedUp:
        bits = torch.tensor(TABLES[table]).to(dtype).view(torch.int16)
        return cls(tuple((bits.int() & 0xFFFF).tolist()))

    def ptx(self, shift: int) -> str:
        lows, highs = (bytes(number >> by & 255 for number in self.numbers) for by in (0, 8))
        words = [
            f"{int.from_bytes(part[at : at + 4], 'little'):#x}" for part in (lows, highs) for at in range(0, 16, 4)
        ]
        return f"""{{
            .reg .b32 codes, places, low, high, first, last, halves;
            shr.b32 codes, $1, {shift};
            prmt.b32 codes, codes, codes, 0x2020;
            and.b32 places, codes, 0x0707;
            prmt.b32 low, {words[0]}, {words[1]}, places;
            prmt.b32 high, {words[4]}, {words[5]}, places;
            prmt.b32 first, low, high, 0x6240;
            prmt.b32 low, {words[2]}, {words[3]}, places;
            prmt.b32 high, {words[6]}, {words[7]}, places;
            prmt.b32 last, low, high, 0x6240;
            shl.b32 halves, codes, 4;
            prmt.b32 halves, halves, halves, 0x9988;
            lop3.b32 $0, halves, last, first, 0xca;
        }}"""


def _looked_up(table: Table, dtype: torch.dtype) -> tuple[str, ...]:
    return tuple(LookedUp.of(table, dtype).ptx(shift) for shift in range(0, 16, 4))


_NF4_BFLOAT16, _NF4_FLOAT16, _FP4_BFLOAT16, _FP4_FLOAT16 = (
    tl.constexpr(_looked_up(table, dtype)) for table in ("nf4", "fp4") for dtype in (torch.bfloat16, torch.float16)
)
_NF4, _FP4 = tl.constexpr(TABLES["nf4"]), tl.constexpr(TABLES["fp4"])


@triton.jit  # type: ignore[untyped-decorator]
def _by_ptx(words: tl.tensor, like: tl.tensor, bfloat16: tl.constexpr, float16: tl.constexpr) -> tl.tensor:
    """Of each word a float, by what makes two of a register's."""
    ptx: tl.constexpr = bfloat16 if like.dtype == tl.bfloat16 else float16
    return tl.inline_asm_elementwise(ptx, "=r,r", [words], dtype=like.dtype, is_pure=True, pack=2)


@triton.jit  # type: ignore[untyped-decorator]
def minifloats_of(words: tl.tensor, like: tl.tensor, index: tl.constexpr, inline_ptx: tl.constexpr) -> tl.tensor:
    """What codes are that are floats, without their scales: one of each word."""
    if not inline_ptx:
        code = (words >> 4 * index) & 15
        bits = (code & 7).to(tl.uint16) << 9 | (code & 8).to(tl.uint16) << 12  # of a float16 2^14 times too small
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0).to(like.dtype)
    bfloat16: tl.constexpr = _MINI_BFLOAT16[index]  # given as they are here, they would be no constants by Triton 3.6
    float16: tl.constexpr = _MINI_FLOAT16[index]
    return _by_ptx(words, like, bfloat16, float16)


@triton.jit  # type: ignore[untyped-decorator]
def scale_in(words: tl.tensor, index: tl.constexpr, has_gains: tl.constexpr) -> tl.tensor:
    """What one byte of a word of scales stands for, in float32: an exponent, or, beside gains, a float."""
    byte = words >> 8 * index & 255
    if has_gains:
        return as_e4m3(byte)
    return (byte << 23).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def as_e4m3(bytes: tl.tensor) -> tl.tensor:
    """What a byte stands for as E4M3 has it, in float32: as a float16 it is 2^8 times smaller."""
    bits = (bytes & 127).to(tl.uint16) << 7 | (bytes & 128).to(tl.uint16) << 8
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit  # type: ignore[untyped-decorator]
def of_table(codes: tl.tensor, table: tl.constexpr) -> tl.tensor:
    """What codes of 4 bits stand for, float32."""
    numbers: tl.constexpr = _NF4 if table == "nf4" else _FP4
    made = tl.zeros(codes.shape, tl.float32)
    for code in tl.static_range(16):
        made = tl.where(codes == code, numbers[code], made)
    return made


@triton.jit  # type: ignore[untyped-decorator]
def floats_of(
    words: tl.tensor,
    like: tl.tensor,
    index: tl.constexpr,
    bits: tl.constexpr,
    table: tl.constexpr,
    inline_ptx: tl.constexpr,
) -> tl.tensor:
    """The same codes, as floats: what a table has for them, if there is one; else, of 4 bits, more than they are by
    what `zeros_of` takes from their products."""
    if table == "e4m3":
        if not inline_ptx:
            return as_e4m3(words >> 8 * index).to(like.dtype)
        wide: tl.constexpr = _E4M3_BFLOAT16[index]
        exact: tl.constexpr = _E4M3_FLOAT16[index]
        return _by_ptx(words, like, wide, exact)
    if table != "":
        if not inline_ptx:
            return of_table((words >> 4 * index) & 15, table).to(like.dtype)
        wide_4: tl.constexpr = _NF4_BFLOAT16[index] if table == "nf4" else _FP4_BFLOAT16[index]
        exact_4: tl.constexpr = _NF4_FLOAT16[index] if table == "nf4" else _FP4_FLOAT16[index]
        return _by_ptx(words, like, wide_4, exact_4)
    if not inline_ptx:
        more: tl.constexpr = _MORE_BFLOAT16 if like.dtype == tl.bfloat16 else _MORE_FLOAT16
        return (codes_of(words, index, bits).to(tl.float32) + (more if bits == 4 else 0)).to(like.dtype)
    bfloat16: tl.constexpr = _BFLOAT16_8[index] if bits == 8 else _BFLOAT16_4[index]
    float16: tl.constexpr = _FLOAT16_8[index] if bits == 8 else _FLOAT16_4[index]
    return _by_ptx(words, like, bfloat16, float16)


@triton.jit  # type: ignore[untyped-decorator]
def zeros_of(
    scales: tl.tensor, zeros: tl.tensor, like: tl.tensor, bits: tl.constexpr, kept_zeros: tl.constexpr
) -> tl.tensor:
    """What a row's sum is multiplied by, beside the product of the row and those floats by scales."""
    more: tl.constexpr = _MORE_BFLOAT16 if like.dtype == tl.bfloat16 else _MORE_FLOAT16
    less = (more if bits == 4 else 0) * scales
    return -less if kept_zeros == "" else zeros - less


@triton.jit  # type: ignore[untyped-decorator]
def numbers_of(
    scales_at: tl.tensor, zeros_at: tl.tensor, at: tl.tensor, real: tl.tensor, kept_zeros: tl.constexpr
) -> tl.tensor:
    """Scales and zeros of groups, float32. kept_zeros: as `Read` has it; where there are none, zeros are anything."""
    scales, zeros = kept_numbers(scales_at, zeros_at, at, real, kept_zeros)
    return as_numbers(scales, zeros, kept_zeros)


@triton.jit  # type: ignore[untyped-decorator]
def kept_numbers(
    scales_at: tl.tensor, zeros_at: tl.tensor, at: tl.tensor, real: tl.tensor, kept_zeros: tl.constexpr
) -> tl.tensor:
    """The same as they are read; what is not real is nothing."""
    scales = tl.load(scales_at + at, mask=real, other=0)
    zeros = scales
    if kept_zeros == "apart":
        zeros = tl.load(zeros_at + at, mask=real, other=0)
    return scales, zeros


@triton.jit  # type: ignore[untyped-decorator]
def as_numbers(scales: tl.tensor, zeros: tl.tensor, kept_zeros: tl.constexpr) -> tl.tensor:
    """What those are."""
    if kept_zeros == "beside":
        return (scales & -65536).to(tl.float32, bitcast=True), (scales << 16).to(tl.float32, bitcast=True)
    return scales.to(tl.float32), zeros.to(tl.float32)
