"""Reads slices of published matrices that bitsandbytes quantized: of 4 bits (NF4, FP4), and LLM.int8. Must not know
shards, layers or what is computed.

Of 4 bits, a matrix is one row of bytes, each of two codes, the first high. Each 64 codes have a scale, which may be a
code itself, of 8 bits, by a table (double quantization: arXiv 2305.14314, 3).

Shapes: O outputs and I inputs of the slice, G groups of the whole matrix.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.model.quantized import TABLES
from tpspec.model.stored_parts import count_groups, row_chunks
from tpspec.published.reads import Reads

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.stored_parts import Parts
    from tpspec.published.formats import Scheme
    from tpspec.published.places import Place

LARGEST = 127  # the code of a row's largest weight, where codes have 8 bits
NEAR = 1e-6  # what a number of a table may be off by in a file


class StoredBlocks:
    """Of the matrices of a checkpoint. Raises UserError with the tensor's name where one is not as it should."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._checkpoint = parts, parts.checkpoint

    def eights(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, None]:
        """Codes [O, I] and scales [O, 1]."""
        self._parts.check_names(scheme, place.name)
        if "weight_format" in self._checkpoint.under(place.name):
            way = int(self._checkpoint.one(f"{place.name}.weight_format"))
            if way:
                raise self._parts.refusal(place.name, "weight_format", f"is {way}; should be 0, for rows as they are")
        whole = (place.num_outputs, place.num_inputs)
        codes_OI = self._parts.take(place, "weight", whole, place.rows, place.columns, (torch.int8,))
        largest_O = self._numbers(f"{place.name}.SCB", place.num_outputs, place.rows)
        return codes_OI, largest_O[:, None] / LARGEST, None

    def fours(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, None]:
        """Codes [O, I] and scales [O, G]."""
        assert scheme.group is not None, "published/formats.py says how many"
        self._parts.check_names(scheme, place.name)
        if place.num_inputs % scheme.group:
            what = f"{place.num_inputs} inputs; should be whole blocks of {scheme.group}"
            raise UserError(f"{self._checkpoint.folder}: {place.name}, in {scheme.kind}, has {what}")
        said, num_bytes = self._said(scheme, place), place.num_inputs // 2
        self._check_table(scheme, f"{place.name}.weight.quant_map")
        codes_OI = torch.empty(len(place.rows), len(place.columns), dtype=torch.uint8)
        for some in row_chunks(len(place.rows), place.num_inputs):
            lines = _times(place.rows[some], num_bytes)
            shape = (place.num_outputs * num_bytes, 1)
            bytes_OB = self._parts.take(place, "weight", shape, lines, range(1), (torch.uint8,)).view(-1, num_bytes)
            of_rows = torch.stack([bytes_OB >> 4, bytes_OB & 15], -1).flatten(1)
            codes_OI[some] = of_rows[:, place.columns.start : place.columns.stop]
        return codes_OI, self._scales(scheme, place, said), None

    def _said(self, scheme: Scheme, place: Place) -> Reads:
        """What the tool says of a matrix: JSON, byte by byte."""
        name = f"{place.name}.weight.quant_state.bitsandbytes__{scheme.kind}"
        raw = self._parts.typed(name, self._checkpoint.read(name, self._checkpoint.shape(name)), (torch.uint8,))
        where = f"{self._checkpoint.folder}: tensor {name}"
        try:
            told = json.loads(bytes(raw.tolist()))
        except ValueError as error:
            raise UserError(f"{where} is no JSON in bytes: {error}") from error
        read = Reads(told if isinstance(told, dict) else {}, where)
        whole = [place.num_outputs, place.num_inputs]
        if read.config.get("shape") != whole:
            raise read.refusal("shape", f"{whole}, as config.json asks for")
        read.one_of("quant_type", (scheme.kind,))
        read.one_of("blocksize", (scheme.group,))
        return read

    def _check_table(self, scheme: Scheme, name: str) -> None:
        assert scheme.table is not None, "of 4 bits"
        due = torch.tensor(TABLES[scheme.table])
        if not torch.allclose(self._numbers(name, len(due)), due, rtol=0, atol=NEAR):
            raise UserError(f"{self._checkpoint.folder}: tensor {name} has other numbers than {scheme.kind}")

    def _scales(self, scheme: Scheme, place: Place, said: Reads) -> Tensor:
        num_groups, inside = count_groups(scheme, place), f"{place.name}.weight"
        count, which = place.num_outputs * num_groups, _times(place.rows, num_groups)
        if "nested_absmax" not in self._checkpoint.under(inside):
            return self._numbers(f"{inside}.absmax", count, which).view(-1, num_groups)
        each, name = said.size("nested_blocksize"), f"{inside}.absmax"
        codes = self._parts.typed(name, self._checkpoint.read(name, (count,), rows=which), (torch.uint8,))
        table = self._numbers(f"{inside}.nested_quant_map", 1 << 8)
        outer = self._numbers(f"{inside}.nested_absmax", -(-count // each))
        of_each = outer[torch.arange(which.start, which.stop) // each]
        is_nothing = said.config.get("nested_offset") == 0  # the mean of what all are, of a matrix of zeros
        scales = table[codes.int()] * of_each + (0.0 if is_nothing else said.number("nested_offset"))
        return scales.view(-1, num_groups)

    def _numbers(self, name: str, count: int, which: range | None = None) -> Tensor:
        return self._parts.typed(name, self._checkpoint.read(name, (count,), rows=which), (torch.float32,))


def _times(rows: range, each: int) -> range:
    """Of things of which each row has so many."""
    return range(rows.start * each, rows.stop * each)
