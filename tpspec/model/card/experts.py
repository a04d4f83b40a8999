"""A mixture of experts on a CUDA card, in Triton: model/experts.py is the reference. Imported on cards only.

Programs are launched for as many tiles as there can be (router.py): an expert that has no row is not read, and
rows that are padding are sent to none. A row's bits do not depend on where others are sent. Annotations are Triton's.

Shapes: T rows, N experts, K of them for each row, P = T * K pairs of both; L tiles of R pairs; O outputs and I inputs
of a shard's matrix, W columns of the groups it touches, G groups; D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from tpspec.errors import UserError
from tpspec.model.card.coded import few_coded, in_tile
from tpspec.model.card.codes import Read, as_read, columns_of, numbers_of
from tpspec.model.card.groups import floats_product, group_product
from tpspec.model.card.overlap import begin, overlap
from tpspec.model.card.products import has_tensor_cores
from tpspec.model.card.router import routed, sorted_tiles
from tpspec.model.card.shares import Shares, at_once, num_processors
from tpspec.model.card.tiles import FEWEST_ROWS, TILE_OUTPUTS, TILE_ROWS, CodedTile
from tpspec.model.experts import behind
from tpspec.model.linear import PlainLinear
from tpspec.model.quantized import DequantizedLinear, Ready, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.model.card.router import Tiles
    from tpspec.model.experts import Around
    from tpspec.model.linear import Linear
    from tpspec.model.mlp import GatedMlp
    from tpspec.model.router import Router
    from tpspec.model.steps import Steps
    from tpspec.published.groups import Grid

COLUMNS = 64  # of a plain matrix that are read at a time
MORE_OUTPUTS, FEW_OUTPUTS = 32, 16  # of a program; few where more would leave processors idle
STAGES = {MORE_OUTPUTS: 3, FEW_OUTPUTS: 5}  # with which small programs ask for as much at once
ADDED = 1024  # numbers of a row that a program adds up


class CardMixture:
    """Of experts whose products are the references, and whose numbers (model/mlp.py) are alike."""

    def __init__(self, router: Router, experts: Sequence[GatedMlp], around: Around | None = None) -> None:
        self._router, self._around, self._overlap = router, around, overlap(router.weight_ND.device)
        chosen, self._on_inputs = router.experts.chosen, router.experts.on_inputs
        self._gate_up = Stack([one.gate_up for one in experts], chosen)
        self._down = Stack([one.down for one in experts], chosen)
        (self._numbers,) = {one.numbers for one in experts}

    def __call__(self, x_TD: Tensor, steps: Steps) -> Tensor:
        chosen_TK, weights_TK = routed(self._router, x_TD, steps.slots(len(x_TD)), self._overlap)
        tiles = sorted_tiles(chosen_TK, self._router.experts.count, self._overlap)
        x_TD = x_TD if self._around is None else self._around.before(x_TD)
        sums_TD, dim, num_chosen = torch.empty_like(x_TD), x_TD.shape[1], chosen_TK.shape[1]
        how = {"num_chosen": num_chosen, "wide": ADDED, **self._overlap}
        if self._on_inputs:
            x_XD = x_TD.new_empty(weights_TK.numel(), dim)
            _weigh[(len(x_XD), triton.cdiv(dim, ADDED))](x_TD, weights_TK, x_XD, dim, **how)
        else:
            x_XD = x_TD
        gated_PC = steps.gate(self._gate_up(x_XD, tiles, chosen_TK.numel()), self._numbers)
        made_PD = self._down(gated_PC, tiles, chosen_TK.numel())
        _add[(len(x_TD), triton.cdiv(dim, ADDED))](
            made_PD, chosen_TK, weights_TK, sums_TD, dim, weighed=not self._on_inputs, **how
        )
        return behind(self._around, sums_TD)


class Stack:
    """The same matrix of every expert, in one piece: plain [N, O, I], or codes as codes.py has those of each; and
    biases and gains [N, O]. Raises UserError where they cannot be one piece. num_chosen: experts of a row."""

    def __init__(self, products: Sequence[Linear], num_chosen: int) -> None:
        self._grid: Grid | None = None
        bits, table, kept_zeros, columns, gains = 16, None, "", COLUMNS, None
        plain = [one for one in products if isinstance(one, PlainLinear)]
        coded = [one for one in products if isinstance(one, DequantizedLinear)]
        biases = [bias for bias in (*(one.bias_O for one in plain), *(one.bias_O for one in coded)) if bias is not None]
        layouts = {
            (
                *(one.bits, one.table, one.grid, one.scales_OG.dtype, one.gains_O is None),
                None if one.zeros_OG is None else one.zeros_OG.dtype,
            )
            for one in coded
        }
        if len(plain) == len(products):
            self._weights, self._num_outputs = torch.stack([one.weight_OI for one in plain]), len(plain[0].weight_OI)
            self._scales = self._zeros = self._weights  # never read
        elif len(coded) == len(products) and len(layouts) == 1:
            ((bits, table, self._grid, *_),) = layouts
            self._weights, self._scales, zeros, kept_zeros, gains = _stacked(coded)
            self._zeros, self._num_outputs = self._scales if zeros is None else zeros, len(coded[0].scales_OG)
            columns = columns_of(self._grid, table)
        else:
            raise UserError(
                "experts whose matrices are quantized in different ways, or with desc_act, run on CPUs only; should be "
                "stored alike, their columns in order"
            )
        self._biases = torch.stack(biases) if biases else self._weights
        self._gains, device = self._weights if gains is None else gains, self._weights.device
        # For a row alone: of others it would be another kernel, which may add in another order.
        self._shares = Shares(at_once(triton.cdiv(self._num_outputs, TILE_OUTPUTS) * num_chosen, device))
        self._tile_outputs = tile_outputs(self._num_outputs * num_chosen, device)
        self._has_kernel = self._weights.dtype == torch.int16 and has_tensor_cores(device)
        self._of_codes = {
            "group": columns, "bits": bits, "table": table or "", "kept_zeros": kept_zeros,
            "has_gains": gains is not None, "has_biases": bool(biases), **overlap(device),
        }  # fmt: skip

    def __call__(self, x: Tensor, tiles: Tiles, num_pairs: int) -> Tensor:
        """[P, O] of x [T, I] or [P, I]; rows without a tile are not written."""
        num_outputs, num_tiles, at_a_time = self._num_outputs, len(tiles.expert_L), self._tile_outputs
        y_PO = x.new_empty(num_pairs, num_outputs)
        x_XW = (x if self._grid is None else spread(x, self._grid)).contiguous()
        if self._has_kernel and x.itemsize == 2:
            self._of_words(x_XW, tiles, y_PO)
            return y_PO
        _tile_product[(triton.cdiv(num_outputs, at_a_time), num_tiles)](
            x_XW, self._weights, self._scales, self._zeros, self._biases, self._gains, tiles.expert_L, tiles.pairs_LR,
            y_PO, num_outputs, x_XW.shape[1], self._scales.shape[2], num_pairs // len(x), together=TILE_OUTPUTS,
            tile_rows=TILE_ROWS, tile_outputs=at_a_time, num_stages=STAGES[at_a_time], **self._of_codes,
        )  # fmt: skip
        return y_PO

    def _of_words(self, x_XW: Tensor, tiles: Tiles, y_PO: Tensor) -> None:
        """By a kernel of products with codes; in the smallest tiles where an expert has few rows, in the mean."""
        is_few = len(y_PO) <= FEWEST_ROWS * len(self._weights)
        tile = CodedTile(FEWEST_ROWS if is_few else TILE_ROWS, self._tile_outputs, STAGES[MORE_OUTPUTS])
        few_coded[(tiles.pairs_LR.numel() // tile.rows, triton.cdiv(y_PO.shape[1], tile.outputs))](
            x_XW, self._weights, self._scales, self._zeros, y_PO, *y_PO.shape, self._scales.shape[2], tiles.expert_L,
            tiles.pairs_LR, self._biases, self._gains, x_XW, x_XW, len(y_PO) // len(x_XW), x_XW.shape[1], gate="",
            sorted_rows=TILE_ROWS, **in_tile(tile, self._shares), **self._of_codes,
        )  # fmt: skip


def _stacked(products: Sequence[DequantizedLinear]) -> Read:
    """All of them, one behind the other."""
    stacks: dict[str, Any] = {}
    for number, product in enumerate(products):  # one after the other: a layer's are much of a card's memory
        one = as_read(Ready(product.made, product.grid))
        parts = {name: part for name, part in one._asdict().items() if isinstance(part, torch.Tensor)}
        stacks = stacks or {name: part.new_empty(len(products), *part.shape) for name, part in parts.items()}
        for name, part in parts.items():
            stacks[name][number] = part
    return one._replace(**stacks)


def tile_outputs(num_outputs: int, device: torch.device) -> int:
    """Of a program, so that a round of few rows gives every processor of the card one."""
    return MORE_OUTPUTS if triton.cdiv(num_outputs, MORE_OUTPUTS) >= num_processors(device) else FEW_OUTPUTS


@triton.jit  # type: ignore[untyped-decorator]
def _tile_product(
    x_at: tl.tensor,
    weights_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    biases_at: tl.tensor,
    gains_at: tl.tensor,
    expert_at: tl.tensor,
    pairs_at: tl.tensor,
    y_at: tl.tensor,
    num_outputs: int,
    width: int,
    num_scales: int,
    fan: int,
    group: tl.constexpr,
    bits: tl.constexpr,
    table: tl.constexpr,
    has_gains: tl.constexpr,
    kept_zeros: tl.constexpr,
    has_biases: tl.constexpr,
    together: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Some outputs of a tile: y [P, O] from x [P / fan, W] and the matrix of the tile's expert, as Stack has it: codes
    of outputs lie `together` by so many."""
    begin(overlaps)
    expert = tl.load(expert_at + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        pairs = tl.load(pairs_at + tl.program_id(1) * tile_rows + tl.arange(0, tile_rows))
        outputs = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
        real_rows, real_outputs = pairs >= 0, outputs < num_outputs
        from_x = x_at + (pairs // fan).to(tl.int64)[:, None] * width
        at = expert * num_outputs + outputs
        sums = tl.zeros((tile_rows, tile_outputs), tl.float32)
        num_blocks = num_scales if bits < 16 else tl.cdiv(width, group)
        for index in range(num_blocks):
            tile = expert * tl.cdiv(num_outputs, together) + outputs // together
            at_scale = (tile * num_scales + index) * together + outputs % together
            if table == "e2m1":
                scales = tl.load(scales_at + at_scale, mask=real_outputs, other=0)
                from_codes = weights_at + at_scale[None, :] * (group // 4)
                part = floats_product(
                    from_x, index * group, width, from_codes, scales, real_rows, real_outputs, group, has_gains, False
                )
            elif bits < 16:
                size: tl.constexpr = group * bits // weights_at.dtype.element_ty.primitive_bitwidth
                from_codes = weights_at + at_scale[None, :] * size
                part, total = group_product(
                    from_x + index * group, from_codes, real_rows, real_outputs, group, bits, table, False
                )
                scales, zeros = numbers_of(scales_at, zeros_at, at_scale, real_outputs, kept_zeros)
                part *= scales[None, :]
                if kept_zeros != "":
                    part += total[:, None] * zeros[None, :]
            else:
                columns = index * group + tl.arange(0, group)
                inside = columns < width
                x = tl.load(from_x + columns[None, :], mask=real_rows[:, None] & inside[None, :], other=0.0)
                from_weights = weights_at + at[None, :] * width + columns[:, None]
                weights = tl.load(from_weights, mask=real_outputs[None, :] & inside[:, None], other=0).to(x.dtype)
                part = tl.dot(x, weights, input_precision="ieee")
            sums += part
        if has_gains:
            sums *= tl.load(gains_at + at, mask=real_outputs, other=0.0)[None, :]
        if has_biases:
            sums += tl.load(biases_at + at, mask=real_outputs, other=0.0).to(tl.float32)[None, :]
        to = y_at + pairs.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        tl.store(to, sums.to(y_at.dtype.element_ty), mask=real_rows[:, None] & real_outputs[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(
    x_at: tl.tensor,
    weights_at: tl.tensor,
    y_at: tl.tensor,
    dim: int,
    num_chosen: tl.constexpr,
    wide: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """y [T, K, D]: x [T, D] by weights [T, K]. A program for some numbers of a pair."""
    begin(overlaps)
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    real = columns < dim
    x = tl.load(x_at + pair // num_chosen * dim + columns, mask=real, other=0.0).to(tl.float32)
    y = x * tl.load(weights_at + pair)
    tl.store(y_at + pair * dim + columns, y.to(y_at.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _add(
    made_at: tl.tensor,
    chosen_at: tl.tensor,
    weights_at: tl.tensor,
    sums_at: tl.tensor,
    dim: int,
    num_chosen: tl.constexpr,
    wide: tl.constexpr,
    weighed: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """sums [T, D]: of made [T, K, D], weighed: by weights [T, K], in float32, where chosen [T, K] names an expert. A
    program for some numbers of a row."""
    begin(overlaps)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    real = columns < dim
    total = tl.zeros((wide,), tl.float32)
    for place in tl.static_range(num_chosen):
        pair = row * num_chosen + place
        sent = tl.load(chosen_at + pair) >= 0
        made = tl.load(made_at + pair * dim + columns, mask=real & sent, other=0.0).to(tl.float32)
        total += made * tl.load(weights_at + pair) if weighed else made
    tl.store(sums_at + row * dim + columns, total.to(sums_at.dtype.element_ty), mask=real)
