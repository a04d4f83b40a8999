"""Slices of a checkpoint's matrices as products: read, put in order, fused or not, in codes or not.

Reads slice by slice, packs it, drops it. Must not know architectures, layers or shards, nor how codes are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.model.linear import PlainLinear, Scaled, Scattered, Stacked, linear, quantized_linear, rounded_linear
from tpspec.model.quantized import Ready, joined
from tpspec.model.stored import StoredMatrices
from tpspec.model.stored_floats import scales_of_all
from tpspec.model.stored_parts import wanted_rows
from tpspec.published.groups import BITS, grid_of
from tpspec.published.mixtures import has_narrow_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.model.laid import Slice
    from tpspec.model.linear import Linear
    from tpspec.model.weights import Checkpoint
    from tpspec.published.formats import Scheme, Stored
    from tpspec.published.groups import Bits
    from tpspec.published.places import Fused, Place
    from tpspec.topology.config import Quantize


@dataclass(frozen=True, slots=True)
class Matrices:
    """Of one checkpoint, in one dtype on one device. stored: how they are, if not plain. quantize: what they are held
    in, if not that dtype. adds_biases: whether this shard does, where products are summed over shards. reference:
    products are the plain ones that others are made of."""

    checkpoint: Checkpoint
    stored: Stored | None
    dtype: torch.dtype
    device: torch.device
    quantize: Quantize | None
    adds_biases: bool
    reference: bool = False

    def product(self, fused: Fused) -> Linear:
        """[sum of rows, columns]. Of what is summed over shards, only one of them adds the bias."""
        if fused.exact and self.quantize is not None:
            return replace(self, quantize=None).product(fused)
        self.check_biases(fused)
        parts, biased = fused.parts, fused.biased and (self.adds_biases or not fused.summed)
        if (product := self._of_codes(parts, biased=biased)) is not None:
            return product
        if self.quantize is not None:
            return self._rounded(fused, BITS[self.quantize], biased=biased)
        if len({self._scheme(part.name) for part in parts}) > 1:
            return Stacked([self.product(replace(fused, parts=(part,))) for part in parts])
        weight, bias = self._rows(parts), self._biases(parts, biased=biased)
        return PlainLinear(weight, bias) if self.reference else linear(weight, bias)

    def _rounded(self, fused: Fused, bits: Bits, *, biased: bool) -> Linear:
        """Quantized as it is taken."""
        grid, parts = None, fused.parts
        if fused.summed:  # of whole groups, which may reach into other shards' columns
            narrow = parts[0].expert is not None or has_narrow_columns(parts[0].name)
            grid, columns = grid_of(parts[0].columns, parts[0].num_inputs, narrow=narrow)
            parts = fused.each(columns=columns).parts
        weight, bias = self._rows(parts), self._biases(fused.parts, biased=biased)
        return rounded_linear(weight, bias, fused.bits or bits, grid, reference=self.reference)

    def _rows(self, places: Sequence[Place]) -> Tensor:
        """Of all of them, one below the other, on the device: read to where they stay, if they stay as they are."""
        num_rows = [place.num_rows for place in places]
        weight_OI = torch.empty(sum(num_rows), len(places[0].columns), dtype=self.dtype, device=self.device)
        for place, there in zip(places, torch.split(weight_OI, num_rows), strict=True):
            if self._scheme(place.name) is None and place.is_plain:
                whole = place.num_outputs, place.num_inputs
                self.checkpoint.read_into(there, f"{place.name}.weight", whole, place.rows, place.columns)
            else:
                rows = self.plain(place)[wanted_rows(place)]
                there.copy_(rows if place.scale == 1 else rows.float() * place.scale)
        return weight_OI

    def plain(self, place: Place) -> Tensor:
        scheme = self._scheme(place.name)
        if scheme is not None:
            return StoredMatrices(self.checkpoint).plain(scheme, place, self.dtype)
        if place.expert is not None:
            (index, count), sizes = place.expert, place.as_it_lies(place.num_outputs, place.num_inputs)
            slices = place.as_it_lies(place.rows, place.columns)
            read = self.checkpoint.read_one(place.name, (count, *sizes), index, *slices)
            checked = self.checkpoint.checked(place.name, read)
            return checked if place.upright else checked.T.contiguous()
        return self.read(place.name + ".weight", (place.num_outputs, place.num_inputs), place.rows, place.columns)

    def read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        return self.checkpoint.checked(name, self.checkpoint.read(name, shape, rows=rows, columns=columns))

    def wide(self, name: str, shape: tuple[int, ...], rows: range | None = None) -> Tensor:
        """What is held in float32 whatever the rest is."""
        return self.read(name, shape, rows).to(self.device, torch.float32)

    def number(self, name: str) -> Tensor:
        """The only one of a tensor, in float32."""
        return self.checkpoint.checked(name, self.checkpoint.one(name)).view(()).float()

    def check_plain(self, name: str) -> None:
        """Raises UserError where a tensor that holds all experts of a layer is said to be in codes, but for FP8."""
        scheme, has_scales = self._scheme(name), scales_of_all(name, self.checkpoint) in self.checkpoint
        if scheme is not None and not (scheme.kind == "float8" and has_scales):
            raise UserError(
                f"{self.checkpoint.folder}: {name} holds all experts of a layer, which config.json says are quantized; "
                "should be tensors for each of them, or listed there among what is not"
            )

    def check_biases(self, fused: Fused) -> None:
        """Raises UserError where there are some, and none should be."""
        for part in () if fused.biased else fused.parts:
            StoredMatrices(self.checkpoint).check_no_bias(part)

    def _biases(self, parts: Sequence[Place], *, biased: bool) -> Tensor | None:
        if not biased:
            return None
        return torch.cat([self._bias(part)[wanted_rows(part)] for part in parts]).to(self.device, self.dtype)

    def _bias(self, place: Place) -> Tensor:
        if place.expert is None:
            return self.read(place.name + ".bias", (place.num_outputs,), place.rows)
        (index, count), name = place.expert, place.name + "_bias"
        return self.checkpoint.checked(
            name, self.checkpoint.read_one(name, (count, place.num_outputs), index, place.rows)
        )

    def _scheme(self, name: str) -> Scheme | None:
        """Of a module, or of a tensor that holds all experts of a layer and may be called as a module's weight is."""
        return None if self.stored is None else self.stored.scheme_of(name.removesuffix(".weight"))

    def _of_codes(self, parts: Sequence[Place], *, biased: bool) -> Linear | None:
        """The product with matrices that are all stored in codes to compute with; None where they are not, or are to be
        rounded."""
        schemes = [scheme for part in parts if (scheme := self._scheme(part.name)) is not None and scheme.is_small]
        is_rounded = self.quantize is not None and all(scheme.can_be_rounded for scheme in schemes)
        if is_rounded or len(schemes) < len(parts):
            return None
        read = StoredMatrices(self.checkpoint)
        slices = [read.small(scheme, part) for scheme, part in zip(schemes, parts, strict=True)]
        if len(set(schemes)) > 1 or not all(one.is_laid_out_like(slices[0]) for one in slices):
            each = [self._sliced([one], self._biases([part], biased=biased))
                    for one, part in zip(slices, parts, strict=True)]  # fmt: skip
            return self._scaled(Stacked(each), parts)
        return self._scaled(self._sliced(slices, self._biases(parts, biased=biased)), parts)

    def _scaled(self, product: Linear, parts: Sequence[Place]) -> Linear:
        """Codes stay what they are."""
        if all(part.scale == 1 for part in parts):
            return product
        return Scaled(product, [(part.num_rows, part.scale) for part in parts])

    def _sliced(self, slices: Sequence[Slice], bias: Tensor | None) -> Linear:
        grid, places = slices[0].matrix.grid, slices[0].places_I
        made = joined([one.matrix.made for one in slices]).to(self.device)
        product = quantized_linear(Ready(made, grid), bias, self.device, reference=self.reference)
        return product if places is None else Scattered(product, places.to(self.device), grid.width)
