"""The tensors of which a published quantized matrix consists, as they are read and checked. Must not know how codes lie
in them (stored.py, stored_floats.py, stored_blocks.py), nor shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpspec.errors import UserError
from tpspec.model.quantized import AT_ONCE
from tpspec.published.formats import UNUSED

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.weights import Checkpoint
    from tpspec.published.formats import Kind, Scheme
    from tpspec.published.places import Place

SCALES = (torch.float16, torch.bfloat16, torch.float32)
TENSORS: dict[Kind, set[str]] = {
    "gptq": {"qweight", "qzeros", "scales", "g_idx"},
    "awq": {"qweight", "qzeros", "scales"},
    "packed": {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"},
    "int8": {"weight", "weight_scale", "weight_zero_point"},
    "llm_int8": {"weight", "SCB", "weight_format"},
    "float8": {"weight", "weight_scale", "weight_scale_inv"},
    "float4": {"weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale"},
    "mxfp4": set(),  # of all experts together, beside which nothing has a name
    "fp4": {"weight"},  # of which more is said below its name
    "nf4": {"weight"},
}


class Parts:
    """Of the matrices of a checkpoint. Raises UserError with the tensor's name where one is not as it should."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def take(
        self, place: Place, suffix: str, shape: tuple[int, int], rows: range, columns: range,
        dtypes: tuple[torch.dtype, ...] = (torch.int32,),
    ) -> Tensor:  # fmt: skip
        name = f"{place.name}.{suffix}"
        return self.typed(name, self.checkpoint.read(name, shape, rows=rows, columns=columns), dtypes)

    def number(self, name: str, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """The only one of a tensor, [1, 1] in float32."""
        return self.typed(name, self.checkpoint.one(name), dtypes).float().view(1, 1)

    def one_of(self, place: Place, names: tuple[str, str]) -> str:
        """Whichever is there."""
        found = sorted(self.checkpoint.under(place.name).intersection(names))
        if len(found) != 1:
            which = "both are there" if found else "neither is there"
            raise self.refusal(place.name, " or .".join(names), f"is needed, and {which}")
        return found[0]

    def typed(self, name: str, taken: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """What was taken of a tensor, where it is of one of these."""
        if taken.dtype not in dtypes:
            kind, *right = (str(dtype).removeprefix("torch.") for dtype in (taken.dtype, *dtypes))
            raise UserError(f"{self.checkpoint.folder}: tensor {name} is of {kind}, not {' or '.join(right)}")
        return taken

    def check_names(self, scheme: Scheme, name: str) -> None:
        known = TENSORS[scheme.kind] | UNUSED | {"bias"}
        if not scheme.zeros:
            known -= {"weight_zero_point"}
        if extra := sorted(self.checkpoint.under(name) - known):
            raise self.refusal(
                name, extra[0], f"is none that {scheme.kind} weights consist of: {', '.join(sorted(known))}"
            )

    def refusal(self, name: str, suffix: str, what: str) -> UserError:
        return UserError(f"{self.checkpoint.folder}: tensor {name}.{suffix} {what}")


def wanted_rows(place: Place) -> Tensor | slice:
    """Which of those that were read are wanted, in which order."""
    if place.picked is None and place.head_order is None:
        return slice(None)
    picked = (range(len(place.rows)),) if place.picked is None else place.picked
    rows = torch.cat([torch.arange(some.start, some.stop, some.step) for some in picked])
    return (
        rows if place.head_order is None else rows.view(-1, len(place.head_order))[:, list(place.head_order)].flatten()
    )


def groups_in_order(scheme: Scheme, place: Place) -> Tensor:
    columns = torch.arange(place.columns.start, place.columns.stop)
    return columns // (scheme.group or place.num_inputs)


def count_groups(scheme: Scheme, place: Place) -> int:
    return -(-place.num_inputs // (scheme.group or place.num_inputs))


def whole_words(wanted: range, each: int) -> tuple[range, int]:
    """The words that hold these of things packed `each` to a word, and how many in the first are not wanted."""
    return range(wanted.start // each, -(-wanted.stop // each)), wanted.start % each


def row_chunks(num_rows: int, width: int) -> list[slice]:
    each = max(1, AT_ONCE // width)
    return [slice(first, first + each) for first in range(0, num_rows, each)]
