"""Weights of 8 or 4 bits, and the product with them in torch: what each kind computes, and how plain ones are rounded.

What codes of a table stand for: OCP Microscaling Formats 1.0 (E2M1), QLoRA (arXiv 2305.14314, appendix E: NF4) and
bitsandbytes (its FP4: 2 bits of exponent with one of fraction, but for the least).

It is the reference of products.py and card/coded.py, and what runs on a CPU where products.c was not built. Must not
know shards or checkpoints.

Shapes: O outputs, I inputs of this shard, W columns of the groups it touches, G groups, X columns of a group; T rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from tpspec.staged import copied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from tpspec.published.formats import Table
    from tpspec.published.groups import Bits, Grid

MIDDLE = 8  # the code of four bits that zeros are given for
TABLES: dict[str, tuple[float, ...]] = {  # what each code of four bits stands for
    "e2m1": tuple(sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
    "fp4": tuple(sign * size / 12 for sign in (1.0, -1.0) for size in (0.0, 1 / 16, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)),
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
}
LEAST_SCALE = 2.0**-64
AT_ONCE = 2**19  # weights that are quantized at a time, for what stands beside them in float32


@dataclass(frozen=True, slots=True)
class Quantized:
    """Some rows of a matrix. Of 8 bits: codes of int8, weight = scale * code + zero; or, where the table is E4M3, the
    scale times what that has for a byte.

    Of 4 bits: codes of uint8 from 0 to 15, weight = scale * (code - 8) + zero; or, where there is a table of what they
    stand for, scale * table[code]. zeros_OG None: all of them nothing.

    Where scales are uint8, the table is E2M1, and they are floats of 8 bits: exponents of powers of two, as a float32
    has them (E8M0, together MXFP4), of which 0 makes nothing and 255 infinity, but nobody writes either; or, where
    outputs have gains, E4M3 (together NVFP4), and weight = gain * scale * table[code].
    """

    codes_OW: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None = None
    table: Table | None = None
    gains_O: Tensor | None = None

    @property
    def bits(self) -> Bits:
        return 8 if self.codes_OW.dtype == torch.int8 else 4

    def weights(self) -> Tensor:
        """[O, W] in float32."""
        scales_OG = scales_of(self.scales_OG, self.gains_O)
        weight_OGX = numbers_of(self.codes_OW, self.table).view(*scales_OG.shape, -1) * scales_OG[..., None]
        if self.zeros_OG is not None:
            weight_OGX += self.zeros_OG.float()[..., None]
        return weight_OGX.flatten(1)

    def to(self, device: torch.device) -> Quantized:
        return self._with(lambda x: x.to(device))

    def rows(self, which: slice | Tensor) -> Quantized:
        return self._with(lambda x: x[which] if isinstance(which, slice) else x.index_select(0, which))

    def _with(self, made: Callable[[Tensor], Tensor]) -> Quantized:
        zeros, gains = (None if one is None else made(one) for one in (self.zeros_OG, self.gains_O))
        return Quantized(made(self.codes_OW), made(self.scales_OG), zeros, self.table, gains)


def numbers_of(codes: Tensor, table: Table | None) -> Tensor:
    """What codes of any shape stand for, in float32: int8 as they are, of 4 bits less their middle, or by the table."""
    if table == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if table is not None:
        return torch.tensor(TABLES[table], device=codes.device)[codes.int()]
    return codes.float() if codes.dtype == torch.int8 else codes.float() - MIDDLE


def scales_of(scales_OG: Tensor, gains_O: Tensor | None) -> Tensor:
    """[O, G] in float32, gains included."""
    if scales_OG.dtype != torch.uint8:
        return scales_OG.float()
    if gains_O is None:
        return (scales_OG.int() << 23).view(torch.float32)
    return scales_OG.view(torch.float8_e4m3fn).float() * gains_O[:, None]


def joined(parts: Sequence[Quantized]) -> Quantized:
    """One under the other; all have zeros, or none, and gains, or none, and the same table, if any."""

    def under(some: Iterable[Tensor | None]) -> Tensor | None:
        there = [one for one in some if one is not None]
        return torch.cat(there) if there else None

    codes, scales = (torch.cat(each) for each in zip(*((part.codes_OW, part.scales_OG) for part in parts), strict=True))
    zeros, gains = under(part.zeros_OG for part in parts), under(part.gains_O for part in parts)
    return Quantized(codes, scales, zeros, parts[0].table, gains)


class Matrix(Protocol):
    """What a product is made of: a quantized matrix, some rows at a time."""

    @property
    def bits(self) -> Bits: ...
    @property
    def table(self) -> Table | None: ...
    @property
    def has_gains(self) -> bool: ...
    @property
    def grid(self) -> Grid: ...
    @property
    def num_outputs(self) -> int: ...
    def blocks(self, step: int) -> Iterator[tuple[int, Quantized]]:
        """(first row, block), each of a multiple of `step` rows but for the last."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """A plain weight with the columns of whole groups, quantized as it is taken."""

    weight_OW: Tensor
    bits: Bits
    grid: Grid
    table: None = None
    has_gains = False

    @property
    def num_outputs(self) -> int:
        return self.weight_OW.shape[0]

    def blocks(self, step: int) -> Iterator[tuple[int, Quantized]]:
        for first, last in _spans(self.weight_OW, step):
            yield first, quantize(self.weight_OW[first:last], self.bits, self.grid.group)


@dataclass(frozen=True, slots=True)
class Ready:
    """A matrix that was quantized by others."""

    made: Quantized
    grid: Grid

    @property
    def bits(self) -> Bits:
        return self.made.bits

    @property
    def table(self) -> Table | None:
        return self.made.table

    @property
    def has_gains(self) -> bool:
        return self.made.gains_O is not None

    @property
    def num_outputs(self) -> int:
        return self.made.codes_OW.shape[0]

    def blocks(self, step: int) -> Iterator[tuple[int, Quantized]]:
        for first, last in _spans(self.made.codes_OW, step):
            yield first, self.made.rows(slice(first, last))


def _spans(rows_OW: Tensor, step: int) -> Iterator[tuple[int, int]]:
    num_rows, width = rows_OW.shape
    each = max(1, AT_ONCE // width // step) * step
    for first in range(0, num_rows, each):
        yield first, min(first + each, num_rows)


def quantize(weight_OW: Tensor, bits: Bits, group: int) -> Quantized:
    """To the nearest code. Columns beyond the last whole group count as zeros. Scales and zeros are bfloat16."""
    missing = -weight_OW.shape[1] % group
    weight_OGX = F.pad(weight_OW.float(), (0, missing)).view(len(weight_OW), -1, group)
    return _eight(weight_OGX) if bits == 8 else _four(weight_OGX)


def _eight(weight_OGX: Tensor) -> Quantized:
    scales_OG = _usable(weight_OGX.abs().amax(2) / 127)
    codes_OGX = (weight_OGX / scales_OG.float()[..., None]).round_().clamp_(-127, 127)
    return Quantized(codes_OGX.to(torch.int8).flatten(1), scales_OG, None)


def _four(weight_OGX: Tensor) -> Quantized:
    low_OG, high_OG = weight_OGX.amin(2), weight_OGX.amax(2)
    scales_OG = _usable((high_OG - low_OG) / 15)
    zeros_OG = torch.where(high_OG > low_OG, low_OG + MIDDLE * scales_OG.float(), low_OG).bfloat16()
    shifted_OGX = (weight_OGX - zeros_OG.float()[..., None]) / scales_OG.float()[..., None]
    codes_OGX = (shifted_OGX + MIDDLE).round_().clamp_(0, 15)
    return Quantized(codes_OGX.to(torch.uint8).flatten(1), scales_OG, zeros_OG)


def _usable(scales_OG: Tensor) -> Tensor:
    """A group of equal weights has no scale; one by which a product's rounding is nothing will do. What is not finite
    stays, for codes cannot say so."""
    scales_OG = scales_OG.bfloat16()
    return torch.where(scales_OG == 0, LEAST_SCALE, scales_OG)


def spread(x_TI: Tensor, grid: Grid) -> Tensor:
    """[T, I] -> [T, W], zero where columns of other shards stand."""
    if grid.width == grid.inputs:
        return x_TI
    x_TW = x_TI.new_zeros(len(x_TI), grid.width)
    copied(x_TI, x_TW[:, grid.before : grid.before + grid.inputs])
    return x_TW


def packed_nibbles(codes_OW: Tensor) -> Tensor:
    """[O, W / 2], the even columns in the low bits."""
    return codes_OW[:, ::2] | (codes_OW[:, 1::2] << 4)


def unpacked_nibbles(nibbles_OY: Tensor) -> Tensor:
    return torch.stack([nibbles_OY & 15, nibbles_OY >> 4], -1).flatten(1)


class DequantizedLinear:
    """The reference: makes the whole weight in float32 at every call. codes: those of 4 bits as packed_nibbles."""

    def __init__(self, matrix: Matrix, bias_O: Tensor | None) -> None:
        made = joined([part for _, part in matrix.blocks(1)])
        self.bits, self.table, self.grid, self.bias_O = matrix.bits, matrix.table, matrix.grid, bias_O
        self.codes = made.codes_OW if self.bits == 8 else packed_nibbles(made.codes_OW)
        self.scales_OG, self.zeros_OG, self.gains_O = made.scales_OG, made.zeros_OG, made.gains_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        weight_OW = self.made.weights()
        bias_O = None if self.bias_O is None else self.bias_O.float()
        return F.linear(spread(x_TI, self.grid).float(), weight_OW, bias_O).to(x_TI.dtype)

    @property
    def made(self) -> Quantized:
        """The matrix, its codes one by one."""
        codes_OW = self.codes if self.bits == 8 else unpacked_nibbles(self.codes)
        return Quantized(codes_OW, self.scales_OG, self.zeros_OG, self.table, self.gains_O)
