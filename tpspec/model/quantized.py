"""Weights of 8 or 4 bits, quantized when they are read, and the product with them in torch: what each kind computes.

It is the reference of products.py and card_products.py, and what runs on a CPU where products.c was not built. Must not
know shards or checkpoints.

Shapes: O outputs, I inputs of this shard, W columns of the groups it touches, G groups, X columns of a group; T rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tpspec.topology.groups import Bits, Grid

MIDDLE = 8  # the code of four bits that zeros are given for, as torch's own kernels want them
AT_ONCE = 2**19  # weights that are quantized at a time, for what stands beside them in float32


@dataclass(frozen=True, slots=True)
class Quantized:
    """Some rows of a matrix. Of 8 bits: codes from -127 to 127, weight = scale * code, zeros_OG None.

    Of 4 bits: codes from 0 to 15, weight = scale * (code - 8) + zero.
    """

    codes_OW: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None

    def weights(self) -> Tensor:
        """[O, W] in float32."""
        codes_OGX = self.codes_OW.view(*self.scales_OG.shape, -1).float()
        scales_OG1 = self.scales_OG.float()[..., None]
        if self.zeros_OG is None:
            return (codes_OGX * scales_OG1).flatten(1)
        return ((codes_OGX - MIDDLE) * scales_OG1 + self.zeros_OG.float()[..., None]).flatten(1)


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
    """A group of equal weights has no scale; any will do."""
    scales_OG = scales_OG.bfloat16()
    return torch.where(scales_OG > 0, scales_OG, 1)


def blocks(weight_OW: Tensor, bits: Bits, group: int, step: int) -> Iterator[tuple[int, Quantized]]:
    """The matrix quantized some rows at a time, a multiple of `step` of them but for the last: (first row, block)."""
    num_rows = max(1, AT_ONCE // weight_OW.shape[1] // step) * step
    for first in range(0, weight_OW.shape[0], num_rows):
        yield first, quantize(weight_OW[first : first + num_rows], bits, group)


def spread(x_TI: Tensor, grid: Grid) -> Tensor:
    """[T, I] -> [T, W], zero where columns of other shards stand."""
    after = grid.width - grid.before - grid.inputs
    return F.pad(x_TI, (grid.before, after)) if grid.before or after else x_TI


def packed_nibbles(codes_OW: Tensor) -> Tensor:
    """[O, W / 2], the even columns in the low bits."""
    return codes_OW[:, ::2] | (codes_OW[:, 1::2] << 4)


def unpacked_nibbles(nibbles_OY: Tensor) -> Tensor:
    return torch.stack([nibbles_OY & 15, nibbles_OY >> 4], -1).flatten(1)


class DequantizedLinear:
    """The reference: makes the whole weight in float32 at every call."""

    def __init__(self, weight_OW: Tensor, bias_O: Tensor | None, bits: Bits, grid: Grid) -> None:
        parts = [part for _, part in blocks(weight_OW, bits, grid.group, 1)]
        codes = [part.codes_OW if bits == 8 else packed_nibbles(part.codes_OW) for part in parts]
        self._codes, self._scales_OG = torch.cat(codes), torch.cat([part.scales_OG for part in parts])
        zeros = [part.zeros_OG for part in parts if part.zeros_OG is not None]
        self._zeros_OG = torch.cat(zeros) if zeros else None
        self._bias_O, self._grid = bias_O, grid

    def __call__(self, x_TI: Tensor) -> Tensor:
        codes_OW = self._codes if self._zeros_OG is None else unpacked_nibbles(self._codes)
        weight_OW = Quantized(codes_OW, self._scales_OG, self._zeros_OG).weights()
        bias_O = None if self._bias_O is None else self._bias_O.float()
        return F.linear(spread(x_TI, self._grid).float(), weight_OW, bias_O).to(x_TI.dtype)
