"""Reads slices of the matrices of a published quantized checkpoint: GPTQ, AWQ, compressed-tensors and gpt-oss' experts
here, floats in stored_floats.py, bitsandbytes in stored_blocks.py.

A slice may begin and end anywhere: what is packed in words is read in whole words and trimmed. Codes of 2 and 3 bits
become the highest of 4, of 5 to 7 those of 8, and scales as many times smaller, which changes no weight. Knows tensors'
names and layouts (published/formats.py says which); must not know shards, layers or what is computed.

Shapes: O outputs and I inputs of the slice, G groups of the whole matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.model.laid import Codes, Slice, laid_by_group, laid_in_place
from tpspec.model.packed import Packing
from tpspec.model.quantized import Ready, numbers_of, scales_of, unpacked_nibbles
from tpspec.model.stored_blocks import StoredBlocks
from tpspec.model.stored_floats import StoredFloats
from tpspec.model.stored_parts import SCALES, Parts, count_groups, groups_in_order, row_chunks, wanted_rows, whole_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpspec.model.weights import Checkpoint
    from tpspec.published.formats import Kind, Scheme
    from tpspec.published.places import Place

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of a word in which each of eight outputs stands


class StoredMatrices:
    """The quantized matrices of a checkpoint. Raises UserError with the tensor's name where one is not as it should."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._parts = Parts(checkpoint)
        self._floats, self._blocks = StoredFloats(self._parts), StoredBlocks(self._parts)

    def small(self, scheme: Scheme, place: Place) -> Slice:
        """Of a scheme whose codes are computed with."""
        codes = self._codes(scheme, place)
        in_order = torch.equal(codes.groups_I, groups_in_order(scheme, place))
        laid = laid_in_place(codes, scheme, place) if in_order else laid_by_group(codes)
        return Slice(Ready(laid.matrix.made.rows(wanted_rows(place)), laid.matrix.grid), laid.places_I)

    def plain(self, scheme: Scheme, place: Place, dtype: torch.dtype) -> Tensor:
        """[O, I] in a dtype, for any scheme; some rows at a time."""
        codes = self._codes(scheme, place)
        weight_OI, zeros_OG = torch.empty(codes.codes_OI.shape, dtype=dtype), codes.zeros_OG
        scales_OG = scales_of(codes.scales_OG, codes.gains_O)
        for rows in row_chunks(*weight_OI.shape):
            part = numbers_of(codes.codes_OI[rows], scheme.table) * scales_OG[rows][:, codes.groups_I]
            if zeros_OG is not None:
                part += zeros_OG[rows][:, codes.groups_I]
            weight_OI[rows] = part
        return weight_OI

    def check_no_bias(self, place: Place) -> None:
        """Where the architecture has none; some tools write one of nothings beside every matrix."""
        checkpoint, name = self._parts.checkpoint, f"{place.name}.bias"
        if name in checkpoint and checkpoint.read(name, (place.num_outputs,), rows=place.rows).any():
            raise self._parts.refusal(place.name, "bias", "is not nothing, and the architecture has no such bias")

    def _codes(self, scheme: Scheme, place: Place) -> Codes:
        codes = self._read(scheme, place)
        if not scales_of(codes.scales_OG, codes.gains_O).isfinite().all():
            raise UserError(f"{self._parts.checkpoint.folder}: {place.name} has scales that are no numbers")
        return codes

    def _read(self, scheme: Scheme, place: Place) -> Codes:
        if scheme.kind == "float8":
            return self._floats.eights(scheme, place)
        self._parts.check_names(scheme, place.name)
        if scheme.kind == "float4":
            return self._floats.fours(scheme, place)
        read: dict[Kind, Callable[[Scheme, Place], tuple[Tensor, Tensor, Tensor | None]]] = {
            "gptq": self._gptq, "awq": self._awq, "packed": self._packed, "int8": self._int8, "mxfp4": self._mxfp4,
            "llm_int8": self._blocks.eights, "fp4": self._blocks.fours, "nf4": self._blocks.fours,
        }  # fmt: skip
        codes_OI, scales_OG, points_OG = read[scheme.kind](scheme, place)
        if not scheme.zeros and points_OG is not None:
            if points_OG.any():
                what = "says that groups have a zero point, and config.json that they are symmetric"
                raise self._parts.refusal(place.name, "qzeros", f"{what}; checkpoint_format or sym may be wrong")
            points_OG = None
        if scheme.step > 1:
            scales_OG = scales_OG / scheme.step
            points_OG = None if points_OG is None else points_OG * scheme.step
        return Codes(codes_OI, scales_OG, points_OG, self._groups(scheme, place), scheme.table)

    def _gptq(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, Tensor | None]:
        num_groups, packing = count_groups(scheme, place), Packing.stream(scheme.bits)
        shape = (packing.num_words(place.num_inputs), place.num_outputs)
        words = self._parts.take(place, "qweight", shape, packing.words_of(place.columns), place.rows)
        codes_OI = packing.numbers(words.T, place.columns)
        shape = (num_groups, packing.num_words(place.num_outputs))
        words = self._parts.take(place, "qzeros", shape, range(num_groups), packing.words_of(place.rows))
        points_GO = (_raised if scheme.less_one else Packing.numbers)(packing, words, place.rows)
        scales = self._parts.take(
            place, "scales", (num_groups, place.num_outputs), range(num_groups), place.rows, SCALES
        )
        return _held(codes_OI, scheme), scales.float().T, _points(points_GO.T, scheme)

    def _awq(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, Tensor | None]:
        num_groups, (words, skipped) = count_groups(scheme, place), whole_words(place.rows, 8)
        num_words, kept = -(-place.num_outputs // 8), slice(skipped, skipped + len(place.rows))

        def ordered(packed: Tensor) -> Tensor:
            numbers = Packing.stream(4).every(packed)
            return numbers.view(len(packed), -1, 8)[..., AWQ_ORDER].flatten(1)[:, kept].T

        codes = ordered(self._parts.take(place, "qweight", (place.num_inputs, num_words), place.columns, words))
        points = ordered(self._parts.take(place, "qzeros", (num_groups, num_words), range(num_groups), words))
        scales = self._parts.take(
            place, "scales", (num_groups, place.num_outputs), range(num_groups), place.rows, SCALES
        )
        return _held(codes, scheme), scales.float().T, _points(points, scheme)

    def _packed(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, Tensor | None]:
        packing, whole = self._packing(scheme, place), (place.num_outputs, place.num_inputs)
        sizes = self._parts.checkpoint.read(f"{place.name}.weight_shape", (2,)).tolist()
        if tuple(sizes) != whole:
            raise self._parts.refusal(place.name, "weight_shape", f"says {sizes}, config.json asks for {list(whole)}")
        shape = (place.num_outputs, packing.num_words(place.num_inputs))
        words = self._parts.take(place, "weight_packed", shape, place.rows, packing.words_of(place.columns))
        codes_OI = packing.numbers(words, place.columns)
        return _held(codes_OI, scheme), self._scales(scheme, place), self._packed_points(scheme, place, packing)

    def _packing(self, scheme: Scheme, place: Place) -> Packing:
        """Of bits that do not divide 32, compressed-tensors 0.17 packed as many to a word as fit whole; since 0.18 it
        makes a stream. The number of words tells, but for some sizes below 160, which nobody publishes."""
        stream, spaced = Packing.stream(scheme.bits), Packing.spaced(scheme.bits)
        num_words = spaced.num_words(place.num_inputs)
        is_there = self._parts.checkpoint.has(f"{place.name}.weight_packed", (place.num_outputs, num_words))
        if 32 % scheme.bits == 0 or not is_there:
            return stream
        if num_words == stream.num_words(place.num_inputs):
            what = f"has {num_words} words for {place.num_inputs} codes of {scheme.bits} bits"
            raise self._parts.refusal(place.name, "weight_packed", f"{what}, which may lie in them in two ways")
        return spaced

    def _packed_points(self, scheme: Scheme, place: Place, packing: Packing) -> Tensor | None:
        if not scheme.zeros:
            return None
        groups, name = range(count_groups(scheme, place)), "weight_zero_point"
        unpacked = (place.num_outputs, len(groups))
        if self._parts.checkpoint.has(f"{place.name}.{name}", unpacked):  # as compressed-tensors kept them until 2025
            return self._parts.take(place, name, unpacked, place.rows, groups, (torch.int8,)).float()
        shape = (packing.num_words(place.num_outputs), len(groups))
        words = self._parts.take(place, name, shape, packing.words_of(place.rows), groups)
        return _points(packing.numbers(words.T, place.rows).T, scheme)

    def _int8(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, Tensor | None]:
        whole = (place.num_outputs, place.num_inputs)
        codes_OI = self._parts.take(place, "weight", whole, place.rows, place.columns, (torch.int8,))
        points = None
        if scheme.zeros:
            num_groups = count_groups(scheme, place)
            shape = (place.num_outputs, num_groups)
            points = self._parts.take(
                place, "weight_zero_point", shape, place.rows, range(num_groups), (torch.int8,)
            ).float()
        return codes_OI, self._scales(scheme, place), points

    def _mxfp4(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, None]:
        """Of an expert: codes in blocks of a group, [N, O, G, bytes], and exponents, [N, O, G]."""
        assert place.expert is not None, "published/quantizers.py refuses other models"
        assert scheme.group is not None, "always 32"
        if place.num_inputs % scheme.group:
            what = f"have {place.num_inputs} inputs; should be whole groups of {scheme.group}"
            raise UserError(f"{self._parts.checkpoint.folder}: experts of {place.name} {what}")
        (expert, count), num_groups = place.expert, count_groups(scheme, place)
        groups, skipped = whole_words(place.columns, scheme.group)
        shape = (count, place.num_outputs, num_groups, scheme.group // 2)
        blocks = self._of_bytes(place, "blocks", shape, expert, groups)
        codes_OI = unpacked_nibbles(blocks.flatten(1))[:, skipped : skipped + len(place.columns)]
        return codes_OI, self._of_bytes(place, "scales", shape[:3], expert, range(num_groups)), None

    def _of_bytes(self, place: Place, part: str, shape: tuple[int, ...], expert: int, groups: range) -> Tensor:
        name = f"{place.name}_{part}"
        taken = self._parts.checkpoint.read_one(name, shape, expert, place.rows, groups)
        return self._parts.typed(name, taken, (torch.uint8,))

    def _scales(self, scheme: Scheme, place: Place) -> Tensor:
        num_groups = count_groups(scheme, place)
        shape = (place.num_outputs, num_groups)
        return self._parts.take(place, "weight_scale", shape, place.rows, range(num_groups), SCALES).float()

    def _groups(self, scheme: Scheme, place: Place) -> Tensor:
        """Of the slice's columns. Tools write a table in order, or of nothings, where there is nothing to say."""
        name = f"{place.name}.{'g_idx' if scheme.kind == 'gptq' else 'weight_g_idx'}"
        in_order = groups_in_order(scheme, place)
        if not scheme.shuffled and name not in self._parts.checkpoint:
            return in_order
        groups = self._parts.checkpoint.read(name, (place.num_inputs,), rows=place.columns).long()
        if scheme.shuffled and not 0 <= int(groups.min()) <= int(groups.max()) < count_groups(scheme, place):
            raise self._parts.refusal(place.name, name.rpartition(".")[2], "names groups that do not exist")
        if not scheme.shuffled and groups.any() and not torch.equal(groups, in_order):
            what = "is not in order, and config.json says that it is (desc_act, actorder)"
            raise self._parts.refusal(place.name, name.rpartition(".")[2], what)
        return groups if scheme.shuffled else in_order


def _raised(packing: Packing, words_RW: Tensor, wanted: range) -> Tensor:
    """Zero points that are stored one too low. Of 3 bits each was lessened alone; of others whole words were, and one
    of 0 borrows from the next."""
    if packing.bits == 3:
        return (packing.numbers(words_RW, wanted) + 1) & 7
    return packing.numbers(words_RW + sum(1 << at for at in range(0, 32, packing.bits)), wanted)


def _held(codes: Tensor, scheme: Scheme) -> Tensor:
    """Codes from 0 on as they are computed with: of 4 bits, or as int8, 128 less."""
    codes = codes * scheme.step if scheme.step > 1 else codes
    return codes.contiguous() if scheme.held_bits == 4 else (codes ^ 128).contiguous().view(torch.int8)


def _points(points: Tensor, scheme: Scheme) -> Tensor:
    return points.float() - (1 << (scheme.bits - 1))
