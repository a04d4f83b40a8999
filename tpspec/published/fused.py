"""What matrices take as a model holds them: plain, quantized now, or as a published checkpoint has them.

Integers only, of shapes; must not know which matrices a model has.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpspec.published.formats import check_unquantized
from tpspec.published.groups import BITS, grid_of, quantized_bytes, shuffled_grid, stored_grid
from tpspec.published.mixtures import has_narrow_columns
from tpspec.published.shape import check_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tpspec.published.formats import Scheme, Stored
    from tpspec.published.groups import Bits
    from tpspec.published.shape import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Fused:
    """Matrices of a shard that are computed as one: the name and rows of each, and which columns of how many."""

    parts: tuple[tuple[str, int], ...]
    columns: range
    size: int

    @property
    def num_rows(self) -> int:
        return sum(rows for _, rows in self.parts)

    @property
    def is_narrow(self) -> bool:
        return has_narrow_columns(self.parts[0][0])


@dataclass(frozen=True, slots=True)
class Held:
    """How the matrices of a model are held. shape: stored as it is, where it is not quantized now. published: as it is
    stored whatever is done now."""

    shape: ModelShape
    dtype: str
    quantize: str | None
    published: Stored | None

    @classmethod
    def of(cls, shape: ModelShape, dtype: str, quantize: str | None) -> Held:
        """UserError where codes are to be quantized again, or a dtype is too small."""
        check_dtype(shape.model_type, dtype)
        check_unquantized(shape.stored, quantize)
        return cls(shape if quantize is None else replace(shape, stored=None), dtype, quantize, shape.stored)

    @property
    def as_published(self) -> Held:
        """Of matrices that are not quantized now, whatever others are."""
        return replace(self, shape=replace(self.shape, stored=self.published), quantize=None)

    def bytes_of(self, matrices: Sequence[Fused], bits: Bits | None = None) -> int:
        """bits: of those that are quantized now, if not as asked for."""
        if self.quantize is not None:
            return sum(_quantized(one, bits or BITS[self.quantize]) for one in matrices)
        if self.shape.stored is None:
            return sum(one.num_rows * len(one.columns) for one in matrices) * DTYPE_BYTES[self.dtype]
        return sum(_stored(self.shape.stored, one, self.dtype) for one in matrices)


def alike(stored: Stored | None, every: Iterable[str], matrices: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The first of `every` for each way in which their matrices are stored, and how many are stored so."""
    first: dict[tuple[Scheme | None, ...], str] = {}
    times: Counter[str] = Counter()
    for at in every:
        schemes = () if stored is None else tuple(stored.scheme_of(at + name) for name in matrices)
        times[first.setdefault(schemes, at)] += 1
    return tuple(times.items())


def _quantized(matrix: Fused, bits: Bits) -> int:
    return quantized_bytes(matrix.num_rows, grid_of(matrix.columns, matrix.size, narrow=matrix.is_narrow)[0], bits)


def _stored(stored: Stored, matrix: Fused, dtype: str) -> int:
    """Parts that are stored alike are computed as one, others each alone; of shuffled ones that is not known before."""
    schemes = [stored.scheme_of(name) for name, _ in matrix.parts]
    alike = len(set(schemes)) == 1 and (schemes[0] is None or not schemes[0].shuffled)
    rows = [(schemes[0], matrix.num_rows)] if alike else zip(schemes, (rows for _, rows in matrix.parts), strict=True)
    return sum(_stored_rows(scheme, num_rows, matrix, dtype) for scheme, num_rows in rows)


def _stored_rows(scheme: Scheme | None, num_rows: int, matrix: Fused, dtype: str) -> int:
    if scheme is None or not scheme.is_small:
        return num_rows * len(matrix.columns) * DTYPE_BYTES[dtype]
    grid = (shuffled_grid if scheme.shuffled else stored_grid)(
        matrix.columns, matrix.size, scheme.group, narrow=matrix.is_narrow
    )
    codes = quantized_bytes(num_rows, grid, scheme.held_bits, zeros=scheme.zeros, scale_bits=scheme.scale_bits,
                            gain_bits=scheme.gain_bits)  # fmt: skip
    return codes + 8 * len(matrix.columns) * scheme.shuffled
