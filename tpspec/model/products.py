"""Products on a CPU with weights of 8 or 4 bits, or in bfloat16, in C (products.c), through ctypes.

Of quantized weights quantized.py is the reference, of others torch.

A row's result does not depend on the rows beside it, nor on the number of threads. Must not know what a matrix is of.

Shapes: O outputs, I inputs of this shard, W columns of the groups it touches; T rows.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tpspec.model.quantized import TABLES
from tpspec.native import library
from tpspec.published.groups import TILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.model.quantized import Matrix
    from tpspec.published.groups import Bits

LIBRARY = "tpspec.model._products"
VERSION = 9  # of products.c
NATIVE = (torch.bfloat16, torch.float32)
HALVES = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight codes of four bits: the even inputs, then the odd ones
BLOCK = 64 * TILE  # outputs that are put into tiles at a time
INT, POINTER = ctypes.c_int64, ctypes.c_void_p
_E4M3 = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()  # without a sign
_TABLES = {name: (ctypes.c_float * len(numbers))(*numbers) for name, numbers in {**TABLES, "e4m3": _E4M3}.items()}
_FOURS, _MIRRORED, _TABLED, _EIGHTS, _FLOATS, _HALVES = range(6)  # what a weight is made of, as products.c has them


class _Weight(ctypes.Structure):
    """`Weight` of products.c."""

    _fields_ = [("codes", INT), ("group", INT), ("num_groups", INT), ("num_outputs", INT), ("num_inputs", INT),
                ("before", INT), ("scale_bits", INT), ("words", POINTER),
                ("scales", POINTER), ("zeros", POINTER), ("table", POINTER), ("gains", POINTER)]  # fmt: skip


class _Product:
    """weight: points into the tensors that are `kept`, None among them where it has none."""

    def __init__(
        self, loaded: ctypes.CDLL, weight: _Weight, kept: Sequence[Tensor | None], bias_O: Tensor | None
    ) -> None:
        self._weight, self.kept, self._bias_O = weight, kept, bias_O
        self._num_outputs, self._at = weight.num_outputs, ctypes.addressof(weight)
        self._product = loaded.product
        self._product.argtypes = [POINTER, POINTER, POINTER, INT, INT, POINTER, INT]

    def __call__(self, x_TI: Tensor) -> Tensor:
        """x: bfloat16 or float32."""
        x_TI = x_TI.contiguous()
        y_TO = x_TI.new_empty(x_TI.shape[0], self._num_outputs)
        bias = None if self._bias_O is None else self._bias_O.data_ptr()
        half, num_rows, num_threads = x_TI.dtype == torch.bfloat16, x_TI.shape[0], torch.get_num_threads()
        if self._product(self._at, bias, x_TI.data_ptr(), half, num_rows, y_TO.data_ptr(), num_threads):
            raise MemoryError("a product found no memory for its rows")
        return y_TO


class CompiledLinear(_Product):
    """A quantized matrix, with scales in bfloat16, float32 or floats of 8 bits, in tiles of 32 outputs. float16 goes
    through float32; what a table says is rounded to bfloat16 for rows that are multiplied in pairs."""

    def __init__(self, loaded: ctypes.CDLL, matrix: Matrix, bias_O: Tensor | None) -> None:
        bits, grid = matrix.bits, matrix.grid
        tiles = -(-matrix.num_outputs // TILE)
        words = torch.empty(tiles, grid.width * bits // 32, TILE, dtype=torch.int32)
        gains = torch.zeros(tiles * TILE) if matrix.has_gains else None
        scales = zeros = None
        for first, part in matrix.blocks(TILE):
            at = first // TILE
            if scales is None:
                scales = part.scales_OG.new_empty(tiles, grid.num_groups, TILE)
                zeros = None if part.zeros_OG is None else torch.empty_like(scales)
            _tile(words[at:], _words(part.codes_OW, bits))
            _tile(scales[at:], part.scales_OG)
            if zeros is not None and part.zeros_OG is not None:
                _tile(zeros[at:], part.zeros_OG)
            if gains is not None and part.gains_O is not None:
                gains[first : first + len(part.gains_O)] = part.gains_O
        assert scales is not None, "a matrix has rows"
        weight = _Weight(_codes(matrix), grid.group, grid.num_groups, matrix.num_outputs, grid.inputs, grid.before,
                         8 * scales.itemsize, words.data_ptr(), scales.data_ptr(),
                         None if zeros is None else zeros.data_ptr(),
                         None if matrix.table is None else ctypes.addressof(_TABLES[matrix.table]),
                         None if gains is None else gains.data_ptr())  # fmt: skip
        bias_O = bias_O if bias_O is None or bias_O.dtype in NATIVE else bias_O.float()
        super().__init__(loaded, weight, (words, scales, zeros, gains), bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return super().__call__(x_TI) if x_TI.dtype in NATIVE else self(x_TI.float()).to(x_TI.dtype)


class TiledLinear(_Product):
    """A matrix in bfloat16, [O, I], in tiles of 32 outputs; for rows in bfloat16."""

    def __init__(self, loaded: ctypes.CDLL, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        num_outputs, num_inputs = weight_OI.shape
        width = num_inputs + num_inputs % 2
        words = torch.empty(-(-num_outputs // TILE), width // 2, TILE, dtype=torch.int32)
        for first in range(0, num_outputs, BLOCK):
            block = weight_OI[first : first + BLOCK]
            if width > num_inputs:
                block = F.pad(block, (0, width - num_inputs))
            _tile(words[first // TILE :], block.contiguous().view(torch.int32))
        weight = _Weight(_HALVES, width, 1, num_outputs, num_inputs, 0, 0, words.data_ptr(), None, None, None,
                         None)  # fmt: skip
        super().__init__(loaded, weight, (words,), bias_O)


def _codes(matrix: Matrix) -> int:
    if matrix.bits == 8:
        return _EIGHTS if matrix.table is None else _FLOATS
    if matrix.table is None:
        return _FOURS
    numbers = TABLES[matrix.table]
    return _MIRRORED if numbers[8:] == tuple(-number for number in numbers[:8]) else _TABLED


def _words(codes_OW: Tensor, bits: Bits) -> Tensor:
    """[O, W * bits / 32] as products.c reads them."""
    if bits == 8:
        return codes_OW.view(torch.int32)
    eights = codes_OW.contiguous().view(torch.int64)
    words = torch.zeros_like(eights)
    for place, code in enumerate(HALVES):
        words |= (eights >> 8 * code & 15) << 4 * place
    return words.to(torch.int32)


def _tile(to: Tensor, values_OX: Tensor) -> None:
    """[O, X] -> the first tiles of `to` [tiles, X, TILE]; zeros fill the last one up."""
    num_outputs, width = values_OX.shape
    if num_outputs % TILE:
        values_OX = F.pad(values_OX, (0, 0, 0, -num_outputs % TILE))
    tiles = values_OX.reshape(-1, TILE, width)
    to[: len(tiles)] = tiles.transpose(1, 2)


def multiplies_pairs(loaded: ctypes.CDLL) -> bool:
    """Whether this CPU multiplies pairs of bfloat16 and adds in float32 (AVX-512 BF16), and looks bytes up in tables of
    128 (VBMI), as all but the first such CPUs do: six rows then cost little more than one, where other CPUs are bound
    by arithmetic."""
    return bool(loaded.multiplies_pairs())


def compiled_products() -> ctypes.CDLL | None:
    """The library of this machine, if there is one."""
    loaded = library(LIBRARY)
    return loaded if loaded is not None and loaded.products_version() == VERSION else None
