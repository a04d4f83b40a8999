"""Products with weights of 8 or 4 bits on a CPU, in C (products.c), through ctypes; quantized.py is the reference.

A row's result does not depend on the rows beside it, nor on the number of threads. Must not know what a matrix is of.

Shapes: O outputs, I inputs of this shard, W columns of the groups it touches; T rows.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tpspec.model.quantized import packed_nibbles
from tpspec.native import library
from tpspec.topology.groups import TILE

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.quantized import Matrix
    from tpspec.topology.groups import Bits

LIBRARY = "tpspec.model._products"
VERSION = 2  # of products.c
NATIVE = (torch.bfloat16, torch.float32)
HALVES = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight codes of four bits: the even inputs, then the odd ones
INT, POINTER = ctypes.c_int64, ctypes.c_void_p


class _Weight(ctypes.Structure):
    """`Weight` of products.c."""

    _fields_ = [("bits", INT), ("group", INT), ("num_groups", INT), ("num_outputs", INT), ("num_inputs", INT),
                ("before", INT), ("is_wide", INT), ("words", POINTER), ("scales", POINTER),
                ("zeros", POINTER)]  # fmt: skip


class CompiledLinear:
    """A quantized matrix, with scales in bfloat16 or float32, in tiles of 32 outputs. float16 goes through float32."""

    def __init__(self, loaded: ctypes.CDLL, matrix: Matrix, bias_O: Tensor | None) -> None:
        self._num_outputs, bits, grid = matrix.num_outputs, matrix.bits, matrix.grid
        self._bias_O = bias_O if bias_O is None or bias_O.dtype in NATIVE else bias_O.float()
        tiles = -(-self._num_outputs // TILE)
        self._words = torch.empty(tiles, grid.width * bits // 32, TILE, dtype=torch.int32)
        self._scales = self._zeros = None
        for first, part in matrix.blocks(TILE):
            at = first // TILE
            if self._scales is None:
                self._scales = part.scales_OG.new_empty(tiles, grid.num_groups, TILE)
                self._zeros = None if part.zeros_OG is None else torch.empty_like(self._scales)
            _tile(self._words[at:], _words(part.codes_OW, bits))
            _tile(self._scales[at:], part.scales_OG)
            if self._zeros is not None and part.zeros_OG is not None:
                _tile(self._zeros[at:], part.zeros_OG)
        assert self._scales is not None, "a matrix has rows"
        zeros = None if self._zeros is None else self._zeros.data_ptr()
        is_wide = self._scales.dtype == torch.float32
        self._weight = _Weight(bits, grid.group, grid.num_groups, self._num_outputs, grid.inputs, grid.before, is_wide,
                               self._words.data_ptr(), self._scales.data_ptr(), zeros)  # fmt: skip
        self._at = ctypes.addressof(self._weight)
        self._product = loaded.product
        self._product.argtypes = [POINTER, POINTER, POINTER, INT, INT, POINTER, INT]

    def __call__(self, x_TI: Tensor) -> Tensor:
        if x_TI.dtype not in NATIVE:
            return self(x_TI.float()).to(x_TI.dtype)
        x_TI = x_TI.contiguous()
        y_TO = x_TI.new_empty(x_TI.shape[0], self._num_outputs)
        bias = None if self._bias_O is None else self._bias_O.data_ptr()
        half, num_rows, num_threads = x_TI.dtype == torch.bfloat16, x_TI.shape[0], torch.get_num_threads()
        if self._product(self._at, bias, x_TI.data_ptr(), half, num_rows, y_TO.data_ptr(), num_threads):
            raise MemoryError("a product with a quantized matrix found no memory for its rows")
        return y_TO


def _words(codes_OW: Tensor, bits: Bits) -> Tensor:
    """[O, W * bits / 32] as products.c reads them."""
    if bits == 4:
        codes_OW = packed_nibbles(codes_OW.view(len(codes_OW), -1, 8)[..., HALVES].flatten(1))
    return codes_OW.view(torch.int32)


def _tile(to: Tensor, values_OX: Tensor) -> None:
    """[O, X] -> the first tiles of `to` [tiles, X, TILE]; zeros fill the last one up."""
    num_outputs, width = values_OX.shape
    filled = F.pad(values_OX, (0, 0, 0, -num_outputs % TILE)).view(-1, TILE, width)
    to[: len(filled)] = filled.transpose(1, 2)


def compiled_products() -> ctypes.CDLL | None:
    """The library of this machine, if there is one."""
    loaded = library(LIBRARY)
    return loaded if loaded is not None and loaded.products_version() == VERSION else None
