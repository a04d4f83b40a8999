"""y = x W^T + b, in the layout that suits the machine. Callers do not know which one they hold.

On CPU the weight is reordered once. In bfloat16, where the CPU multiplies pairs, and where oneDNN does not know its
vectors (AVX2), into the tiles of products.c: a row's result is then independent of the rows beside it. Elsewhere into
oneDNN's blocked layout (the one torch's compiler uses); where there is neither, the plain product serves. On a card a
row's result is independent of the rows beside it in 16 bits, too (card/products.py).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from tpspec.model.products import CompiledLinear, TiledLinear, compiled_products, multiplies_pairs
from tpspec.model.quantized import DequantizedLinear, Rounded
from tpspec.published.groups import grid_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.model.quantized import Matrix
    from tpspec.published.groups import Bits, Grid

LEAST_OUTPUTS = 4
PACK_ROWS = 8  # row count the blocked layout is tuned for: a root and a draft of seven
# Not float32: its blocked product adds in longer chains. SmolLM2's logits then are 1.1e-4 from those of float64, and
# 0.6e-4 with the plain one, which is also what transformers' own attention variants differ by.
HALVES = (torch.bfloat16, torch.float16)


class Linear(Protocol):
    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""


class PlainLinear:
    """The reference: the weight as it stands in the checkpoint, [O, I]."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias_O)


class ThinLinear:
    """Of fewer outputs than LEAST_OUTPUTS, in float32: of so few torch adds some rows up in another order than others,
    and a row's result would depend on the rows beside it."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO = torch.stack([(x_TI * weight_I).sum(1) for weight_I in self.weight_OI], 1)
        return y_TO if self.bias_O is None else y_TO.add_(self.bias_O)


class PackedLinear:
    """The weight in oneDNN's blocked layout. The plain weight can be dropped after construction."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), PACK_ROWS)
        self._bias_O = bias_O
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO: Tensor = self._product(x_TI, self._packed, self._bias_O, "none", [], "")
        return y_TO


class Scattered:
    """A product over columns in an order of its own. places_I: the column of each input; the others get nothing."""

    def __init__(self, product: Linear, places_I: Tensor, width: int) -> None:
        self._product, self._places_I, self._width = product, places_I, width

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI.new_zeros(x_TI.shape[0], self._width).index_copy_(1, self._places_I, x_TI))


def capped(y: Tensor, cap: float) -> Tensor:
    """cap tanh(y / cap), in place: as Gemma's logits and scores are (arXiv 2408.00118, 2)."""
    return y.div_(cap).tanh_().mul_(cap)


class Capped:
    """A product whose results are capped."""

    def __init__(self, product: Linear, cap: float) -> None:
        self._product, self._cap = product, cap

    def __call__(self, x_TI: Tensor) -> Tensor:
        return capped(self._product(x_TI), self._cap)


class Stacked:
    """Products of the same input that cannot be one, one after the other."""

    def __init__(self, products: Sequence[Linear]) -> None:
        self._products = products

    def __call__(self, x_TI: Tensor) -> Tensor:
        return torch.cat([product(x_TI) for product in self._products], 1)


class Scaled:
    """A product of which some results are multiplied. scales: of as many, one part behind the other."""

    def __init__(self, product: Linear, scales: Sequence[tuple[int, float]]) -> None:
        self._product, self._scales = product, scales

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO = self._product(x_TI)
        parts = torch.split(y_TO, [size for size, _ in self._scales], 1)
        for part_TX, (_, scale) in zip(parts, self._scales, strict=True):
            if scale != 1:
                part_TX.mul_(scale)
        return y_TO


class Chained:
    """A product of what another gives."""

    def __init__(self, first: Linear, second: Linear) -> None:
        self._first, self._second = first, second

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._second(self._first(x_TI))


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch, CPU and dtype have the packed product; tried once on a small matrix, not assumed."""
    if dtype not in HALVES or not torch._C._has_mkldnn:
        return False
    try:
        x = torch.ones(2, 16, dtype=dtype)
        return bool(torch.equal(PackedLinear(torch.ones(16, 16, dtype=dtype))(x), 16 * x))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
    dtype, on_cpu = weight_OI.dtype, weight_OI.device.type == "cpu"
    if weight_OI.device.type == "cuda" and dtype in HALVES:
        from tpspec.model.card.products import FewRowsLinear, has_tensor_cores  # Triton comes with torch for cards only

        if has_tensor_cores(weight_OI.device):
            return FewRowsLinear(weight_OI, bias_O)
    loaded = compiled_products() if on_cpu and dtype == torch.bfloat16 else None
    if loaded is not None and (multiplies_pairs(loaded) or not can_pack(dtype)):
        return TiledLinear(loaded, weight_OI, bias_O)
    if on_cpu and can_pack(dtype):
        return PackedLinear(weight_OI, bias_O)
    if on_cpu and dtype == torch.float32 and 0 < len(weight_OI) < LEAST_OUTPUTS:
        return ThinLinear(weight_OI, bias_O)
    return PlainLinear(weight_OI, bias_O)


def quantized_linear(matrix: Matrix, bias_O: Tensor | None, device: torch.device, *, reference: bool = False) -> Linear:
    """For x of the inputs of the matrix's grid. The blocks of the matrix are on the device. reference: in torch."""
    if reference:
        return DequantizedLinear(matrix, bias_O)
    if device.type == "cuda":
        from tpspec.model.card.fragments import product_of  # Triton comes with torch for cards only

        return product_of(matrix, bias_O, device)
    if device.type == "cpu" and (loaded := compiled_products()) is not None:
        return CompiledLinear(loaded, matrix, bias_O)
    return DequantizedLinear(matrix, bias_O)


def rounded_linear(
    weight_OW: Tensor, bias_O: Tensor | None, bits: Bits, grid: Grid | None = None, *, reference: bool = False
) -> Linear:
    """A plain weight, quantized as it is taken. grid: where its groups lie, if not over all columns. reference: in
    torch."""
    num_columns = weight_OW.shape[1]
    matrix = Rounded(weight_OW, bits, grid or grid_of(range(num_columns), num_columns)[0])
    return quantized_linear(matrix, bias_O, weight_OW.device, reference=reference)
