"""Reads slices of published matrices whose codes are floats of 8 or 4 bits: FP8, NVFP4, and MXFP4 but for gpt-oss'
experts, which stored.py reads. Must not know shards, layers or what is computed.

Shapes: O outputs and I inputs of the slice, G groups of the whole matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.model.laid import Codes
from tpspec.model.quantized import unpacked_nibbles
from tpspec.model.stored_parts import SCALES, count_groups, groups_in_order, whole_words
from tpspec.published.formats import MXFP4

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.stored_parts import Parts
    from tpspec.model.weights import Checkpoint
    from tpspec.published.formats import Scheme
    from tpspec.published.places import Place

FLOAT8 = torch.float8_e4m3fn
FLOAT_SCALES = (*SCALES, torch.float8_e8m0fnu)  # of floats of 8 bits; the last are powers of two
USUAL, FBGEMM = "_scale_inv", "_scale"  # how names of scales end that are of all experts of a layer
NO_NUMBER = 0x7F  # in E4M3, whatever the sign


def scales_of_all(name: str, checkpoint: Checkpoint) -> str:
    """What the tensor of scales beside one of that name, of all experts of a layer, is called, or would be."""
    return name + (FBGEMM if name + FBGEMM in checkpoint else USUAL)


class StoredFloats:
    """Of the matrices of a checkpoint."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def eights(self, scheme: Scheme, place: Place) -> Codes:
        """Scales are of whole rows of the slice; of all columns of the matrix."""
        whole = (place.num_outputs, place.num_inputs)
        rows = scheme.rows or place.num_outputs
        if place.expert is not None:
            rows, floats_OI, scales = self._floats_of_one(scheme, place)
        else:
            self._parts.check_names(scheme, place.name)
            floats_OI = self._parts.take(place, "weight", whole, place.rows, place.columns, (FLOAT8,))
            scales = self._float_scales(place, (-(-place.num_outputs // rows), count_groups(scheme, place)))
        codes_OI = floats_OI.contiguous().view(torch.int8)
        if ((codes_OI & NO_NUMBER) == NO_NUMBER).any():
            raise UserError(f"{self._parts.checkpoint.folder}: {place.name} has floats of 8 bits that are no numbers")
        scales_OG = scales[torch.arange(place.rows.start, place.rows.stop) // rows]
        return Codes(codes_OI, scales_OG, None, groups_in_order(scheme, place), scheme.table)

    def _floats_of_one(self, scheme: Scheme, place: Place) -> tuple[int, Tensor, Tensor]:
        """Of an expert, as transformers has them: rows of a block, the floats, and a scale for each block; where no
        blocks are said, one for the matrix or for each of its halves."""
        assert place.expert is not None, "see above"
        (expert, count), name = place.expert, scales_of_all(place.name, self._parts.checkpoint)
        sizes, there = place.as_it_lies(place.num_outputs, place.num_inputs), self._parts.checkpoint.shape(name)
        # FBGEMM's of what is down stand as of a matrix that has a row for each output.
        stands = name.endswith(FBGEMM) and not place.upright and there == (count, place.num_outputs, 1)
        found = (count, 1, place.num_outputs) if stands else there
        blocks = found[1:] if len(found) == 1 + len(sizes) else (1, 1)
        blocks = place.as_it_lies(place.as_it_lies(*blocks)[0], 1)  # of what is not said inputs share one
        said = place.as_it_lies(scheme.rows, scheme.group)
        each = [own or -(-size // num) for own, size, num in zip(said, sizes, blocks, strict=True)]
        due = (count, *(-(-size // own) for size, own in zip(sizes, each, strict=True)))
        if found != due:
            raise UserError(
                f"{self._parts.checkpoint.folder}: tensor {name} has shape {list(found)}; should be {list(due)}"
            )
        slices = place.as_it_lies(place.rows, place.columns)
        taken = self._parts.checkpoint.read_one(place.name, (count, *sizes), expert, *slices)
        floats = self._parts.typed(place.name, taken, (FLOAT8,))
        scales = self._parts.checkpoint.read_one(name, there, expert, range(there[1]), range(there[2]))
        scales = self._parts.typed(name, scales.T if stands else scales, FLOAT_SCALES).float()
        rows, _ = place.as_it_lies(*each)
        return (rows, floats, scales) if place.upright else (rows, floats.T, scales.T)

    def _float_scales(self, place: Place, shape: tuple[int, int]) -> Tensor:
        """shape: blocks of outputs and of inputs. One for all may have other dimensions, or none."""
        name = self._parts.one_of(place, ("weight_scale", "weight_scale_inv"))
        if shape == (1, 1):
            return self._parts.number(f"{place.name}.{name}", FLOAT_SCALES)
        return self._parts.take(place, name, shape, range(shape[0]), range(shape[1]), FLOAT_SCALES).float()

    def fours(self, scheme: Scheme, place: Place) -> Codes:
        """Two in a byte, as compressed-tensors names them or ModelOpt; a scale of a whole matrix is each output's."""
        name, (pairs, skipped) = self._parts.one_of(place, ("weight_packed", "weight")), whole_words(place.columns, 2)
        shape = (place.num_outputs, -(-place.num_inputs // 2))
        bytes_OB = self._parts.take(place, name, shape, place.rows, pairs, (torch.uint8,))
        codes_OI = unpacked_nibbles(bytes_OB)[:, skipped : skipped + len(place.columns)]
        gains_O = None if scheme.group == MXFP4 else self._gain(place).expand(len(place.rows)).contiguous()
        shape, kind = (place.num_outputs, count_groups(scheme, place)), torch.uint8 if gains_O is None else FLOAT8
        taken = self._parts.take(place, "weight_scale", shape, place.rows, range(shape[1]), (kind,))
        scales_OG, groups_I = taken.view(torch.uint8), groups_in_order(scheme, place)
        if gains_O is not None and (scales_OG >= NO_NUMBER).any():
            raise self._parts.refusal(place.name, "weight_scale", "has numbers below 0, or that are none")
        return Codes(codes_OI.contiguous(), scales_OG, None, groups_I, scheme.table, gains_O)

    def _gain(self, place: Place) -> Tensor:
        """What scales are multiplied by, [1]; one tool writes what they are divided by."""
        name = self._parts.one_of(place, ("weight_global_scale", "weight_scale_2"))
        one = self._parts.number(f"{place.name}.{name}", SCALES)[0]
        return 1 / one if name == "weight_global_scale" else one
