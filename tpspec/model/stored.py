"""Reads slices of the matrices of a published quantized checkpoint: GPTQ, AWQ, compressed-tensors, FP8, FP4.

A slice may begin and end anywhere: what is packed in words is read in whole words and trimmed. Codes of 2 and 3 bits
become the highest of 4, of 5 to 7 those of 8, and scales as many times smaller, which changes no weight. Knows tensors'
names and layouts (formats.py says which); must not know shards, layers or what is computed.

Shapes: O outputs and I inputs of the slice, G groups of the whole matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.model.laid import Codes, Slice, laid_by_group, laid_in_place
from tpspec.model.packed import Packing
from tpspec.model.quantized import AT_ONCE, FLOATS, MIDDLE, Ready, unpacked_nibbles
from tpspec.topology.formats import MXFP4, UNUSED

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpspec.model.places import Place
    from tpspec.model.weights import Checkpoint
    from tpspec.topology.formats import Kind, Scheme

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of a word in which each of eight outputs stands
SCALES = (torch.float16, torch.bfloat16, torch.float32)
FLOAT_SCALES = (*SCALES, torch.float8_e8m0fnu)  # of floats of 8 bits; the last are powers of two
TENSORS: dict[Kind, set[str]] = {
    "gptq": {"qweight", "qzeros", "scales", "g_idx"},
    "awq": {"qweight", "qzeros", "scales"},
    "packed": {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"},
    "int8": {"weight", "weight_scale", "weight_zero_point"},
    "float8": {"weight", "weight_scale", "weight_scale_inv"},
    "float4": {"weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale"},
    "mxfp4": set(),  # of all experts together, beside which nothing has a name
}


class StoredMatrices:
    """The quantized matrices of a checkpoint. Raises UserError with the tensor's name where one is not as it should."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def small(self, scheme: Scheme, place: Place) -> Slice:
        """Of a scheme whose codes are computed with."""
        codes = self._codes(scheme, place)
        in_order = torch.equal(codes.groups_I, _in_order(scheme, place))
        laid = laid_in_place(codes, scheme, place) if in_order else laid_by_group(codes)
        return Slice(Ready(laid.matrix.made.rows(place.ordered()), laid.matrix.grid), laid.places_I)

    def plain(self, scheme: Scheme, place: Place, dtype: torch.dtype) -> Tensor:
        """[O, I] in a dtype, for any scheme but mxfp4, whose codes are always computed with; some rows at a time."""
        if scheme.kind == "float8":
            return self._plain_floats(scheme, place, dtype)
        if scheme.kind == "float4":
            return self._plain_fours(scheme, place, dtype)
        codes = self._codes(scheme, place)
        weight_OI, zeros_OG = torch.empty(codes.codes_OI.shape, dtype=dtype), codes.zeros_OG
        middle = MIDDLE if scheme.held_bits == 4 else 0
        for rows in _chunks(*weight_OI.shape):
            part = (codes.codes_OI[rows].float() - middle) * codes.scales_OG[rows][:, codes.groups_I]
            if zeros_OG is not None:
                part += zeros_OG[rows][:, codes.groups_I]
            weight_OI[rows] = part
        return weight_OI

    def check_no_bias(self, place: Place) -> None:
        """Where the architecture has none; some tools write one of nothings beside every matrix."""
        name = f"{place.name}.bias"
        if name in self._checkpoint and self._checkpoint.read(name, (place.num_outputs,), rows=place.rows).any():
            raise self._refusal(place.name, "bias", "is not nothing, and the architecture has no such bias")

    def _codes(self, scheme: Scheme, place: Place) -> Codes:
        self._check_names(scheme, place.name)
        read: dict[Kind, Callable[[Scheme, Place], tuple[Tensor, Tensor, Tensor | None]]] = {
            "gptq": self._gptq, "awq": self._awq, "packed": self._packed, "int8": self._int8, "mxfp4": self._mxfp4,
        }  # fmt: skip
        codes_OI, scales_OG, points_OG = read[scheme.kind](scheme, place)
        if not scheme.zeros and points_OG is not None:
            if points_OG.any():
                raise self._refusal(place.name, "qzeros", "says that groups have a zero point, and config.json that "
                                    "they are symmetric; checkpoint_format or sym may be wrong")  # fmt: skip
            points_OG = None
        if scheme.step > 1:
            scales_OG = scales_OG / scheme.step
            points_OG = None if points_OG is None else points_OG * scheme.step
        return Codes(codes_OI, scales_OG, points_OG, self._groups(scheme, place))

    def _gptq(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, Tensor | None]:
        num_groups, packing = _num_groups(scheme, place), Packing.stream(scheme.bits)
        shape = (packing.num_words(place.num_inputs), place.num_outputs)
        words = self._take(place, "qweight", shape, packing.words_of(place.columns), place.rows)
        codes_OI = packing.numbers(words.T, place.columns)
        shape = (num_groups, packing.num_words(place.num_outputs))
        words = self._take(place, "qzeros", shape, range(num_groups), packing.words_of(place.rows))
        points_GO = (_raised if scheme.less_one else Packing.numbers)(packing, words, place.rows)
        scales = self._take(place, "scales", (num_groups, place.num_outputs), range(num_groups), place.rows, SCALES)
        return _held(codes_OI, scheme), scales.float().T, _points(points_GO.T, scheme)

    def _awq(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, Tensor | None]:
        num_groups, (words, skipped) = _num_groups(scheme, place), _words(place.rows, 8)
        num_words, kept = -(-place.num_outputs // 8), slice(skipped, skipped + len(place.rows))

        def ordered(packed: Tensor) -> Tensor:
            numbers = Packing.stream(4).every(packed)
            return numbers.view(len(packed), -1, 8)[..., AWQ_ORDER].flatten(1)[:, kept].T

        codes = ordered(self._take(place, "qweight", (place.num_inputs, num_words), place.columns, words))
        points = ordered(self._take(place, "qzeros", (num_groups, num_words), range(num_groups), words))
        scales = self._take(place, "scales", (num_groups, place.num_outputs), range(num_groups), place.rows, SCALES)
        return _held(codes, scheme), scales.float().T, _points(points, scheme)

    def _packed(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, Tensor | None]:
        packing, whole = self._packing(scheme, place), (place.num_outputs, place.num_inputs)
        sizes = self._checkpoint.read(f"{place.name}.weight_shape", (2,)).tolist()
        if tuple(sizes) != whole:
            raise self._refusal(place.name, "weight_shape", f"says {sizes}, config.json asks for {list(whole)}")
        shape = (place.num_outputs, packing.num_words(place.num_inputs))
        words = self._take(place, "weight_packed", shape, place.rows, packing.words_of(place.columns))
        codes_OI = packing.numbers(words, place.columns)
        return _held(codes_OI, scheme), self._scales(scheme, place), self._packed_points(scheme, place, packing)

    def _packing(self, scheme: Scheme, place: Place) -> Packing:
        """Of bits that do not divide 32, compressed-tensors 0.17 packed as many to a word as fit whole; since 0.18 it
        makes a stream. The number of words tells, but for some sizes below 160, which nobody publishes."""
        stream, spaced = Packing.stream(scheme.bits), Packing.spaced(scheme.bits)
        num_words = spaced.num_words(place.num_inputs)
        is_there = self._checkpoint.has(f"{place.name}.weight_packed", (place.num_outputs, num_words))
        if 32 % scheme.bits == 0 or not is_there:
            return stream
        if num_words == stream.num_words(place.num_inputs):
            what = f"has {num_words} words for {place.num_inputs} codes of {scheme.bits} bits"
            raise self._refusal(place.name, "weight_packed", f"{what}, which may lie in them in two ways")
        return spaced

    def _packed_points(self, scheme: Scheme, place: Place, packing: Packing) -> Tensor | None:
        if not scheme.zeros:
            return None
        groups, name = range(_num_groups(scheme, place)), "weight_zero_point"
        unpacked = (place.num_outputs, len(groups))
        if self._checkpoint.has(f"{place.name}.{name}", unpacked):  # as compressed-tensors kept them until 2025
            return self._take(place, name, unpacked, place.rows, groups, (torch.int8,)).float()
        shape = (packing.num_words(place.num_outputs), len(groups))
        words = self._take(place, name, shape, packing.words_of(place.rows), groups)
        return _points(packing.numbers(words.T, place.rows).T, scheme)

    def _int8(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, Tensor | None]:
        whole = (place.num_outputs, place.num_inputs)
        codes_OI = self._take(place, "weight", whole, place.rows, place.columns, (torch.int8,))
        points = None
        if scheme.zeros:
            num_groups = _num_groups(scheme, place)
            shape = (place.num_outputs, num_groups)
            points = self._take(place, "weight_zero_point", shape, place.rows, range(num_groups), (torch.int8,)).float()
        return codes_OI, self._scales(scheme, place), points

    def _mxfp4(self, scheme: Scheme, place: Place) -> tuple[Tensor, Tensor, None]:
        """Of an expert: codes in blocks of a group, [N, O, G, bytes], and exponents, [N, O, G]."""
        assert place.expert is not None, "formats.py refuses other models"
        assert scheme.group is not None, "always 32"
        if place.num_inputs % scheme.group:
            what = f"have {place.num_inputs} inputs; should be whole groups of {scheme.group}"
            raise UserError(f"{self._checkpoint.folder}: experts of {place.name} {what}")
        (expert, count), num_groups = place.expert, _num_groups(scheme, place)
        groups, skipped = _words(place.columns, scheme.group)
        shape = (count, place.num_outputs, num_groups, scheme.group // 2)
        blocks = self._of_bytes(place, "blocks", shape, expert, groups)
        codes_OI = unpacked_nibbles(blocks.flatten(1))[:, skipped : skipped + len(place.columns)]
        return codes_OI, self._of_bytes(place, "scales", shape[:3], expert, range(num_groups)), None

    def _of_bytes(self, place: Place, part: str, shape: tuple[int, ...], expert: int, groups: range) -> Tensor:
        name = f"{place.name}_{part}"
        taken = self._checkpoint.read_one(name, shape, expert, place.rows, groups)
        return self._typed(name, taken, (torch.uint8,))

    def _scales(self, scheme: Scheme, place: Place) -> Tensor:
        num_groups = _num_groups(scheme, place)
        shape = (place.num_outputs, num_groups)
        return self._take(place, "weight_scale", shape, place.rows, range(num_groups), SCALES).float()

    def _groups(self, scheme: Scheme, place: Place) -> Tensor:
        """Of the slice's columns. Tools write a table in order, or of nothings, where there is nothing to say."""
        name = f"{place.name}.{'g_idx' if scheme.kind == 'gptq' else 'weight_g_idx'}"
        in_order = _in_order(scheme, place)
        if not scheme.shuffled and name not in self._checkpoint:
            return in_order
        groups = self._checkpoint.read(name, (place.num_inputs,), rows=place.columns).long()
        if scheme.shuffled and not 0 <= int(groups.min()) <= int(groups.max()) < _num_groups(scheme, place):
            raise self._refusal(place.name, name.rpartition(".")[2], "names groups that do not exist")
        if not scheme.shuffled and groups.any() and not torch.equal(groups, in_order):
            raise self._refusal(place.name, name.rpartition(".")[2], "is not in order, and config.json says that it is "
                                "(desc_act, actorder)")  # fmt: skip
        return groups if scheme.shuffled else in_order

    def _plain_floats(self, scheme: Scheme, place: Place, dtype: torch.dtype) -> Tensor:
        whole = (place.num_outputs, place.num_inputs)
        rows, columns = scheme.block[0] or whole[0], scheme.block[1] or whole[1]
        if place.expert is not None:
            rows, columns, floats_OI, scales = self._floats_of_one(scheme, place)
        else:
            self._check_names(scheme, place.name)
            floats_OI = self._take(place, "weight", whole, place.rows, place.columns, (torch.float8_e4m3fn,))
            scales = self._float_scales(place, (-(-whole[0] // rows), -(-whole[1] // columns)))
        of_row = torch.arange(place.rows.start, place.rows.stop) // rows
        of_column = torch.arange(place.columns.start, place.columns.stop) // columns
        weight_OI = torch.empty(floats_OI.shape, dtype=dtype)
        for some in _chunks(*weight_OI.shape):
            weight_OI[some] = floats_OI[some].float() * scales[of_row[some]][:, of_column]
        return weight_OI

    def _floats_of_one(self, scheme: Scheme, place: Place) -> tuple[int, int, Tensor, Tensor]:
        """Of an expert, as transformers has them: rows and columns of a block, the floats, and a scale for each block;
        where no blocks are said, one for the matrix or for each of its halves."""
        assert place.expert is not None, "see above"
        (expert, count), name = place.expert, f"{place.name}_scale_inv"
        sizes, found = place.as_it_lies(place.num_outputs, place.num_inputs), self._checkpoint.shape(name)
        blocks = found[1:] if len(found) == 1 + len(sizes) else (1, 1)
        said = place.as_it_lies(*scheme.block)
        each = [own or -(-size // num) for own, size, num in zip(said, sizes, blocks, strict=True)]
        due = (count, *(-(-size // own) for size, own in zip(sizes, each, strict=True)))
        if found != due:
            raise UserError(f"{self._checkpoint.folder}: tensor {name} has shape {list(found)}; should be {list(due)}")
        slices = place.as_it_lies(place.rows, place.columns)
        taken = self._checkpoint.read_one(place.name, (count, *sizes), expert, *slices)
        floats = self._typed(place.name, taken, (torch.float8_e4m3fn,))
        scales = self._checkpoint.read_one(name, found, expert, range(found[1]), range(found[2])).float()
        rows, columns = place.as_it_lies(*each)
        return (rows, columns, floats, scales) if place.upright else (rows, columns, floats.T, scales.T)

    def _float_scales(self, place: Place, shape: tuple[int, int]) -> Tensor:
        """shape: blocks of outputs and of inputs. One for all may have other dimensions, or none."""
        name = self._one_of(place, ("weight_scale", "weight_scale_inv"))
        if shape == (1, 1):
            return self._number(f"{place.name}.{name}", FLOAT_SCALES)
        return self._take(place, name, shape, range(shape[0]), range(shape[1]), FLOAT_SCALES).float()

    def _plain_fours(self, scheme: Scheme, place: Place, dtype: torch.dtype) -> Tensor:
        """Two in a byte, as compressed-tensors names them or ModelOpt."""
        self._check_names(scheme, place.name)
        assert scheme.group is not None, "formats.py says how many"
        number_of, codes = torch.tensor(FLOATS), self._one_of(place, ("weight_packed", "weight"))
        pairs, skipped = _words(place.columns, 2)
        shape = (place.num_outputs, -(-place.num_inputs // 2))
        bytes_OB = self._take(place, codes, shape, place.rows, pairs, (torch.uint8,))
        scales_OG = self._scales_of_fours(scheme, place)
        groups_I = _in_order(scheme, place) - place.columns.start // scheme.group
        weight_OI = torch.empty((len(place.rows), len(place.columns)), dtype=dtype)
        for some in _chunks(*weight_OI.shape):
            codes_OI = unpacked_nibbles(bytes_OB[some])[:, skipped : skipped + weight_OI.shape[1]]
            weight_OI[some] = number_of[codes_OI.int()] * scales_OG[some][:, groups_I]
        return weight_OI

    def _scales_of_fours(self, scheme: Scheme, place: Place) -> Tensor:
        """Of the groups that the slice's columns touch."""
        groups, _ = _words(place.columns, scheme.group or 1)
        shape = place.num_outputs, _num_groups(scheme, place)
        if scheme.group == MXFP4:
            exponents = self._take(place, "weight_scale", shape, place.rows, groups, (torch.uint8,))
            return exponents.view(torch.float8_e8m0fnu).float()
        scales = self._take(place, "weight_scale", shape, place.rows, groups, (torch.float8_e4m3fn,)).float()
        of_all = self._one_of(place, ("weight_global_scale", "weight_scale_2"))
        one = self._number(f"{place.name}.{of_all}", SCALES)
        return scales / one if of_all == "weight_global_scale" else scales * one

    def _one_of(self, place: Place, names: tuple[str, str]) -> str:
        """Whichever is there."""
        found = sorted(self._checkpoint.under(place.name).intersection(names))
        if len(found) != 1:
            which = "both are there" if found else "neither is there"
            raise self._refusal(place.name, " or .".join(names), f"is needed, and {which}")
        return found[0]

    def _take(
        self, place: Place, suffix: str, shape: tuple[int, int], rows: range, columns: range,
        dtypes: tuple[torch.dtype, ...] = (torch.int32,),
    ) -> Tensor:  # fmt: skip
        name = f"{place.name}.{suffix}"
        return self._typed(name, self._checkpoint.read(name, shape, rows=rows, columns=columns), dtypes)

    def _number(self, name: str, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """The only one of a tensor, [1, 1] in float32."""
        return self._typed(name, self._checkpoint.one(name), dtypes).float().view(1, 1)

    def _typed(self, name: str, taken: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """What was taken of a tensor, where it is of one of these."""
        if taken.dtype not in dtypes:
            kind, *right = (str(dtype).removeprefix("torch.") for dtype in (taken.dtype, *dtypes))
            raise UserError(f"{self._checkpoint.folder}: tensor {name} is of {kind}, not {' or '.join(right)}")
        return taken

    def _check_names(self, scheme: Scheme, name: str) -> None:
        known = TENSORS[scheme.kind] | UNUSED | {"bias"}
        if not scheme.zeros:
            known -= {"weight_zero_point"}
        if extra := sorted(self._checkpoint.under(name) - known):
            raise self._refusal(
                name, extra[0], f"is none that {scheme.kind} weights consist of: {', '.join(sorted(known))}"
            )

    def _refusal(self, name: str, suffix: str, what: str) -> UserError:
        return UserError(f"{self._checkpoint.folder}: tensor {name}.{suffix} {what}")


def _in_order(scheme: Scheme, place: Place) -> Tensor:
    columns = torch.arange(place.columns.start, place.columns.stop)
    return columns // (scheme.group or place.num_inputs)


def _num_groups(scheme: Scheme, place: Place) -> int:
    return -(-place.num_inputs // (scheme.group or place.num_inputs))


def _words(wanted: range, each: int) -> tuple[range, int]:
    """The words that hold these of things packed `each` to a word, and how many in the first are not wanted."""
    return range(wanted.start // each, -(-wanted.stop // each)), wanted.start % each


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


def _chunks(num_rows: int, width: int) -> list[slice]:
    each = max(1, AT_ONCE // width)
    return [slice(first, first + each) for first in range(0, num_rows, each)]
