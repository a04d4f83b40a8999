"""Products of few rows with a matrix of 16 bits on a CUDA card, by a kernel of ours, in Triton. model/linear.py has the
reference. Must not know what a matrix is of. Imported on cards only.

Shapes: I inputs, O outputs; T rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from typing import TYPE_CHECKING, Generic

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tpspec.model.card.overlap import begin, fetch, overlap
from tpspec.model.card.rows import MOST_ROWS, gated
from tpspec.model.card.tiles import GATE_WORTH, GATED_TILES, TILES, Cut, Tile, Trial, chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

TENSOR_CORES = (8, 0)  # compute capability that Triton asks for; below it there is no bfloat16
LINES = 8  # of a row of weights: what a card reads in the time of a small kernel, for programs of a whole card
ALIGNED = 16  # numbers, at which rows of a matrix begin: what Triton needs to know for loads of 16 bytes


class TriedProduct(ABC, Generic[Cut]):
    """Of few rows by a kernel of ours, in tiles of which some are tried; where its outputs are those of an MLP's gate
    and then, as many, what is gated, one kernel may do both.

    tiles: of so many rows and fewer. gated_tiles: of such a kernel, None for two; none at all where there is no such
    kernel. Whoever inherits is made before this is, for `few` is tried.
    """

    def __init__(
        self, trial: Trial, tiles: Mapping[int, Sequence[Cut]], gated_tiles: Mapping[int, Sequence[Cut | None]]
    ) -> None:
        self._trial, self.gated_tiles = trial, gated_tiles
        self._tiles, self._rows = chosen(tiles, self.few, trial), [*tiles]
        self._gated_by = dict[str, list[Cut | None]]()

    @abstractmethod
    def __call__(self, x_TI: Tensor) -> Tensor: ...

    @abstractmethod
    def takes(self, x_TI: Tensor) -> bool:
        """Whether they are few."""

    @abstractmethod
    def few(self, x_TI: Tensor, tile: Cut, gate: str = "") -> Tensor:
        """[T, I] -> [T, O]; [T, O / 2] where there is a gate, of that kind."""

    def in_tiles(self, x_TI: Tensor) -> Tensor:
        """The same of few rows, without a gate, in the tiles that were found."""
        return self.few(x_TI, self._tiles[bisect_left(self._rows, len(x_TI))])

    def gated(self, x_TI: Tensor, gate: str, then: Callable[[Tensor], Tensor]) -> Tensor:
        """act(gate) * up, as `then` makes it of both; tried beside that as the first rows come."""

        def way(x_TI: Tensor, tile: Cut | None) -> Tensor:
            return then(self(x_TI)) if tile is None else self.few(x_TI, tile, gate)

        if not self.gated_tiles or not self.takes(x_TI):
            return way(x_TI, None)
        if gate not in self._gated_by:
            self._gated_by[gate] = chosen(self.gated_tiles, way, self._trial.beside(gate), GATE_WORTH)
        return way(x_TI, self._gated_by[gate][bisect_left([*self.gated_tiles], len(x_TI))])


class FewRowsLinear(TriedProduct[Tile]):
    """A matrix of 16 bits. Of as many rows as a recorded round may have the kernel is ours, so that what a row becomes
    does not depend, by a single bit, on how many stand beside it: verified drafts are what plain decoding computes.
    torch's kernels, which more rows take, are others for other row counts, and add in another order."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        missing = -weight_OI.shape[1] % ALIGNED
        self._weight_OI = F.pad(weight_OI, (0, missing)) if missing else weight_OI.contiguous()
        self._bias_O, self._overlap = bias_O, overlap(weight_OI.device)
        of, num_inputs = (len(weight_OI), bias_O is not None), weight_OI.shape[1]
        trial = Trial(of, num_inputs, weight_OI.nbytes, weight_OI.device, weight_OI.dtype)
        super().__init__(trial, TILES, GATED_TILES)

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self.takes(x_TI):
            return self.in_tiles(x_TI)
        return F.linear(x_TI, self._weight_OI[:, : x_TI.shape[1]], self._bias_O)

    def takes(self, x_TI: Tensor) -> bool:
        return 0 < len(x_TI) <= MOST_ROWS

    def few(self, x_TI: Tensor, tile: Tile, gate: str = "") -> Tensor:
        (num_rows, num_inputs), (num_outputs, stride) = x_TI.shape, self._weight_OI.shape
        num_outputs = num_outputs // 2 if gate else num_outputs
        y_TO, bias_O = x_TI.new_empty(num_rows, num_outputs), self._bias_O
        # Tiles of rows come first: those that read the same weights do so together.
        _few_rows[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs))](
            x_TI.contiguous(), self._weight_OI, y_TO if bias_O is None else bias_O, y_TO, num_rows, num_outputs,
            num_inputs, stride, columns=tile.columns, has_biases=bias_O is not None, tile_rows=tile.rows,
            tile_outputs=tile.outputs, gate=gate, lines=LINES, num_stages=tile.stages, num_warps=tile.warps,
            **self._overlap,
        )  # fmt: skip
        return y_TO


def has_tensor_cores(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= TENSOR_CORES


@triton.jit  # type: ignore[untyped-decorator]
def as_kept(sums: tl.tensor, y_at: tl.tensor) -> tl.tensor:
    """Rounded as if they had been stored there, and read again."""
    return sums.to(y_at.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _few_rows(
    x_at: tl.tensor,  # no name of Python's may stand here: Triton reads annotations
    weights_at: tl.tensor,
    biases_at: tl.tensor,
    y_at: tl.tensor,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    stride: int,
    columns: tl.constexpr,
    has_biases: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    gate: tl.constexpr,
    lines: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """A tile of y [T, O] from x [T, I] and weights [O, stride]. The same code for any number of rows, of which each is
    added up by itself, in the order of columns. gate: of that kind, of which the weights come first, and then as many
    of what it gates; or none."""
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    outputs = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    real_rows, real_outputs = rows < num_rows, outputs < num_outputs
    from_x = x_at + rows[:, None] * num_inputs
    from_weights = weights_at + outputs[None, :].to(tl.int64) * stride
    fetched = tl.minimum(outputs, num_outputs - 1)
    fetch(weights_at + fetched.to(tl.int64) * stride, stride, lines, overlaps)
    if gate != "":
        fetch(weights_at + (num_outputs + fetched).to(tl.int64) * stride, stride, lines, overlaps)
    begin(overlaps)
    sums = tl.zeros((tile_rows, tile_outputs), tl.float32)
    if gate != "":
        from_ups = weights_at + (num_outputs + outputs)[None, :].to(tl.int64) * stride
        ups = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for first in range(0, num_inputs, columns):
        at = first + tl.arange(0, columns)
        inside = at < num_inputs
        x = tl.load(from_x + at[None, :], mask=real_rows[:, None] & inside[None, :], other=0.0)
        weights = tl.load(from_weights + at[:, None], mask=real_outputs[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(x, weights, sums, input_precision="ieee")
        if gate != "":
            weights = tl.load(from_ups + at[:, None], mask=real_outputs[None, :] & inside[:, None], other=0.0)
            ups = tl.dot(x, weights, ups, input_precision="ieee")
    if has_biases:
        sums += tl.load(biases_at + outputs, mask=real_outputs, other=0.0).to(tl.float32)[None, :]
    if gate != "":
        if has_biases:
            ups += tl.load(biases_at + num_outputs + outputs, mask=real_outputs, other=0.0).to(tl.float32)[None, :]
        sums = gated(as_kept(sums, y_at), as_kept(ups, y_at), gate)
    to = y_at + rows[:, None] * num_outputs + outputs[None, :]
    tl.store(to, sums.to(y_at.dtype.element_ty), mask=real_rows[:, None] & real_outputs[None, :])
