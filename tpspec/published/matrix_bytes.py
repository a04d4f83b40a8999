"""What matrices take as a model holds them: plain, quantized now, or as a published checkpoint has them.

Integers only, of shapes; must not know which matrices a model has.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tpspec.published.formats import check_unquantized
from tpspec.published.groups import BITS, grid_of, quantized_bytes, shuffled_grid, stored_grid
from tpspec.published.mixtures import has_narrow_columns
from tpspec.published.shape import check_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tpspec.published.formats import Scheme, Stored
    from tpspec.published.groups import Bits
    from tpspec.published.places import Fused, Place
    from tpspec.published.shape import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Held:
    """How the matrices of a model are held. quantize: to what, if at all. adds_biases: whether of products that are
    summed over shards, too. UserError where codes are to be quantized again, or a dtype is too small."""

    shape: ModelShape
    dtype: str
    quantize: str | None
    adds_biases: bool

    def __post_init__(self) -> None:
        check_dtype(self.shape.model_type, self.dtype)
        check_unquantized(self.shape.stored, self.quantize)

    def bytes_of(self, matrices: Iterable[Fused]) -> int:
        """Of their biases, too."""
        return sum(self._matrix(one) + self._bias(one) for one in matrices)

    def _matrix(self, one: Fused) -> int:
        if self.quantize is not None and not one.exact:
            return _quantized(one, one.bits or BITS[self.quantize])
        if self.shape.stored is None:
            return one.num_numbers * DTYPE_BYTES[self.dtype]
        return _stored(self.shape.stored, one, self.dtype)

    def _bias(self, one: Fused) -> int:
        return one.num_rows * DTYPE_BYTES[self.dtype] if one.biased and (self.adds_biases or not one.summed) else 0


@cache
def alike(stored: Stored | None, every: tuple[str, ...], matrices: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """The first of `every` for each way in which their matrices are stored, and how many are stored so."""
    if stored is None:
        return ((every[0], len(every)),) if every else ()
    first: dict[tuple[Scheme | None, ...], str] = {}
    times: Counter[str] = Counter()
    for at in every:
        schemes = tuple(stored.scheme_of(at + name) for name in matrices)
        times[first.setdefault(schemes, at)] += 1
    return tuple(times.items())


def _quantized(one: Fused, bits: Bits) -> int:
    first = one.parts[0]
    grid, _ = grid_of(first.columns, first.num_inputs, narrow=has_narrow_columns(first.name))
    return quantized_bytes(one.num_rows, grid, bits)


def _stored(stored: Stored, one: Fused, dtype: str) -> int:
    """Parts that are stored alike are computed as one, others each alone; of shuffled ones that is not known before,
    unless they are of one matrix."""
    schemes = [stored.scheme_of(part.name) for part in one.parts]
    alike = len(set(schemes)) == 1 and (schemes[0] is None or not schemes[0].shuffled)
    is_one = alike or len({part.name for part in one.parts}) == 1
    rows = [one.num_rows] if is_one else [part.num_rows for part in one.parts]
    return sum(_stored_rows(*some, one.parts[0], dtype) for some in zip(schemes, rows, strict=False))


def _stored_rows(scheme: Scheme | None, num_rows: int, place: Place, dtype: str) -> int:
    """place: one of those whose rows these are."""
    columns = place.columns
    if scheme is None or not scheme.is_small:
        return num_rows * len(columns) * DTYPE_BYTES[dtype]
    grid = (shuffled_grid if scheme.shuffled else stored_grid)(
        columns, place.num_inputs, scheme.group, narrow=has_narrow_columns(place.name)
    )
    codes = quantized_bytes(num_rows, grid, scheme.held_bits, zeros=scheme.zeros, scale_bits=scheme.scale_bits,
                            gain_bits=scheme.gain_bits)  # fmt: skip
    return codes + 8 * len(columns) * scheme.shuffled
