"""A mixture of experts on a CUDA card, in Triton: experts.py is the reference. Imported on cards only.

What a row is sent to is known on the card alone, and the host never asks: rows are put into tiles of one expert each,
of which as many are launched as there can be at most. The launches are then the same whatever the router says, so that
they can be recorded (graphs.py), and an expert that has no row is not read; rows that are padding are sent to none. A
row's bits do not depend on where others are sent. Annotations are Triton's.

Shapes: T rows, N experts, K of them for each row, P = T * K pairs of both; L tiles of R pairs; O outputs and I inputs
of a shard's matrix, W columns of the groups it touches, G groups; D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tpspec.errors import UserError
from tpspec.model.card_coded import group_product, num_processors, paired
from tpspec.model.card_tiles import TILE_ROWS
from tpspec.model.experts import LEAST
from tpspec.model.linear import PlainLinear
from tpspec.model.quantized import DequantizedLinear, spread, unpacked_nibbles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.model.experts import Router
    from tpspec.model.linear import Linear
    from tpspec.model.mlp import GatedMlp
    from tpspec.model.steps import Steps
    from tpspec.topology.groups import Grid

COLUMNS = 64  # of a plain matrix that are read at a time
TILE_OUTPUTS, FEW_OUTPUTS = 32, 16  # of a program; few where more would leave processors idle
STAGES = {TILE_OUTPUTS: 3, FEW_OUTPUTS: 5}  # with which small programs ask for as much at once
WORD = 4  # exponents in one: of codes that are floats, as many groups are read at a time
MOST_SORTED, AT_ONCE = 1024, 32  # pairs that one program puts into tiles; that it looks at at a time
ADDED = 1024  # numbers of a row that a program adds up
_LEAST = tl.constexpr(LEAST)


@dataclass(frozen=True, slots=True)
class Tiles:
    """expert_L: of each tile, -1: there is none. pairs_LR: -1 beyond its last."""

    expert_L: Tensor
    pairs_LR: Tensor


class CardMixture:
    """Of experts whose products are the references. own_D: see Mixture."""

    def __init__(self, router: Router, experts: Sequence[GatedMlp], own_D: Tensor | None = None) -> None:
        self._router, self._count, self._own_D = router, len(experts), own_D
        chosen = router.experts.chosen
        self._gate_up = Stack([one.gate_up for one in experts], chosen)
        self._down = Stack([one.down for one in experts], chosen)

    def __call__(self, x_TD: Tensor, steps: Steps) -> Tensor:
        chosen_TK, weights_TK = self._chosen(x_TD, steps.slots(len(x_TD)))
        tiles = sorted_tiles(chosen_TK, self._count)
        x_TD = x_TD if self._own_D is None else x_TD * self._own_D
        gated_PC = steps.gate(self._gate_up(x_TD, tiles, chosen_TK.numel()))
        made_PD = self._down(gated_PC, tiles, chosen_TK.numel())
        sums_TD, dim = torch.empty_like(x_TD), x_TD.shape[1]
        _add[(len(x_TD), triton.cdiv(dim, ADDED))](
            made_PD, chosen_TK, weights_TK, sums_TD, dim, num_chosen=chosen_TK.shape[1], wide=ADDED
        )
        return sums_TD

    def _chosen(self, x_TD: Tensor, slots_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the router says, its experts in int32, -1 for rows whose slot is below 0."""
        logits_TN, bias_N, experts = self._router.logits(x_TD), self._router.bias_N, self._router.experts
        K, closed_TN, scales_N = experts.chosen, logits_TN, self._router.scales_N
        if experts.is_divided:
            closed_TN = self._router.closed(self._router.ranked(logits_TN))
        chosen_TK = logits_TN.new_empty(len(x_TD), K, dtype=torch.int32)
        weights_TK = logits_TN.new_empty(len(x_TD), K)
        _choose[(len(x_TD),)](
            logits_TN, logits_TN if bias_N is None else bias_N, logits_TN if scales_N is None else scales_N, closed_TN,
            chosen_TK if slots_T is None else slots_T, chosen_TK, weights_TK, self._count, experts.scale, num_chosen=K,
            wide=triton.next_power_of_2(self._count), wide_chosen=triton.next_power_of_2(K), sigmoid=experts.sigmoid,
            sums_to_one=experts.sums_to_one, divided=experts.is_divided, scaled=scales_N is not None,
            padded=slots_T is not None,
        )  # fmt: skip
        return chosen_TK, weights_TK


class Stack:
    """The same matrix of every expert, in one piece: plain [N, O, I], or codes [N, O, W], scales and zeros [N, O, G];
    and biases [N, O]. Codes of 4 bits are in pairs, one of each half of their group. Raises UserError where they cannot
    be one piece. num_chosen: experts of a row."""

    def __init__(self, products: Sequence[Linear], num_chosen: int) -> None:
        self._grid: Grid | None = None
        self._bits, self._are_floats = 16, False
        plain = [one for one in products if isinstance(one, PlainLinear)]
        coded = [one for one in products if isinstance(one, DequantizedLinear)]
        zeros = [one.zeros_OG for one in coded if one.zeros_OG is not None]
        biases = [bias for bias in (*(one.bias_O for one in plain), *(one.bias_O for one in coded)) if bias is not None]
        layouts = {(one.bits, one.grid, one.scales_OG.dtype) for one in coded}
        if len(plain) == len(products):
            self._weights = torch.stack([one.weight_OI for one in plain])
            self._scales = self._zeros = self._weights  # never read
        elif len(coded) == len(products) and len(layouts) == 1 and len(zeros) in (0, len(products)):
            ((self._bits, self._grid, _),) = layouts
            whole = [
                one.codes if self._bits == 8 else paired(unpacked_nibbles(one.codes), self._grid.group) for one in coded
            ]
            self._weights = torch.stack(whole)
            self._are_floats = coded[0].scales_OG.dtype == torch.uint8
            scales = torch.stack([one.scales_OG for one in coded])
            self._scales = _in_words(scales) if self._are_floats else scales
            self._zeros = torch.stack(zeros) if zeros else self._scales
        else:
            raise UserError(
                "experts whose matrices are quantized in different ways, or with desc_act, run on CPUs only; should be "
                "stored alike, their columns in order"
            )
        self._biases = torch.stack(biases) if biases else self._weights
        self._has_zeros, self._has_biases = bool(zeros), bool(biases)
        # For a row alone: of others it would be another kernel, which may add in another order.
        self._tile_outputs = tile_outputs(self._weights.shape[1] * num_chosen, self._weights.device)

    def __call__(self, x: Tensor, tiles: Tiles, num_pairs: int) -> Tensor:
        """[P, O] of x [T, I] or [P, I]; rows without a tile are not written."""
        x_XW = x if self._grid is None else spread(x, self._grid)
        width, group = x_XW.shape[1], COLUMNS if self._grid is None else self._grid.group
        num_outputs, num_tiles = self._weights.shape[1], len(tiles.expert_L)
        y_PO, at_a_time = x.new_empty(num_pairs, num_outputs), self._tile_outputs
        _tile_product[(triton.cdiv(num_outputs, at_a_time), num_tiles)](
            x_XW.contiguous(), self._weights, self._scales, self._zeros, self._biases, tiles.expert_L, tiles.pairs_LR,
            y_PO, num_outputs, width, self._weights.shape[2], self._scales.shape[2], num_pairs // len(x), group=group,
            bits=self._bits, are_floats=self._are_floats, has_zeros=self._has_zeros, has_biases=self._has_biases,
            word=WORD, tile_rows=TILE_ROWS, tile_outputs=at_a_time, num_stages=STAGES[at_a_time],
        )  # fmt: skip
        return y_PO


def _in_words(exponents_NOG: Tensor) -> Tensor:
    """[N, O, G / 4] of int32, the first of four lowest."""
    return F.pad(exponents_NOG, (0, -exponents_NOG.shape[2] % WORD)).view(torch.int32)


def tile_outputs(num_outputs: int, device: torch.device) -> int:
    """Of a program, so that a round of few rows gives every processor of the card one."""
    return TILE_OUTPUTS if triton.cdiv(num_outputs, TILE_OUTPUTS) >= num_processors(device) else FEW_OUTPUTS


def most_tiles(num_pairs: int, count: int) -> int:
    """That so many pairs can fill or begin."""
    return min(num_pairs, count + num_pairs // TILE_ROWS)


def sorted_tiles(chosen_TK: Tensor, count: int) -> Tiles:
    """Each pair in a tile of its expert, by one program where they are few; those of expert -1 in none."""
    num_pairs = chosen_TK.numel()
    if num_pairs > MOST_SORTED:
        return sorted_by_torch(chosen_TK, count)
    num_tiles = most_tiles(num_pairs, count)
    expert_L = chosen_TK.new_empty(num_tiles)
    pairs_LR, ranks_P = chosen_TK.new_empty(num_tiles, TILE_ROWS), chosen_TK.new_empty(2 * num_pairs)
    _sort[(1,)](
        chosen_TK, ranks_P, expert_L, pairs_LR, num_pairs, num_tiles, wide=triton.next_power_of_2(num_pairs),
        wide_tiles=triton.next_power_of_2(num_tiles), at_once=AT_ONCE, tile_rows=TILE_ROWS, num_warps=8,
    )  # fmt: skip
    return Tiles(expert_L, pairs_LR)


def sorted_by_torch(chosen_TK: Tensor, count: int) -> Tiles:
    """The reference, and for many rows. Those of no expert stand behind all others, in a tile that is left out."""
    chosen_P = torch.where(chosen_TK < 0, count, chosen_TK).flatten().long()
    num_pairs, device = len(chosen_P), chosen_P.device
    num_tiles = most_tiles(num_pairs, count)
    sorted_P, pairs_P = chosen_P.sort(stable=True)
    counts_N = chosen_P.new_zeros(count + 1).scatter_add_(0, chosen_P, torch.ones_like(chosen_P))
    tiles_N = (counts_N + TILE_ROWS - 1) // TILE_ROWS
    first_tile_N, first_pair_N = tiles_N.cumsum(0) - tiles_N, counts_N.cumsum(0) - counts_N
    rank_P = torch.arange(num_pairs, device=device) - first_pair_N[sorted_P]
    tile_P = torch.where(sorted_P < count, first_tile_N[sorted_P] + rank_P // TILE_ROWS, num_tiles)
    expert_L = torch.full((num_tiles + 1,), -1, dtype=torch.int32, device=device)
    pairs_X = torch.full(((num_tiles + 1) * TILE_ROWS,), -1, dtype=torch.int32, device=device)
    expert_L.scatter_(0, tile_P, sorted_P.int())
    pairs_X.scatter_(0, tile_P * TILE_ROWS + rank_P % TILE_ROWS, pairs_P.int())
    return Tiles(expert_L[:num_tiles], pairs_X.view(-1, TILE_ROWS)[:num_tiles])


@triton.jit  # type: ignore[untyped-decorator]
def _choose(
    logits_at: tl.tensor,
    bias_at: tl.tensor,
    scales_at: tl.tensor,
    closed_at: tl.tensor,
    slots_at: tl.tensor,
    chosen_at: tl.tensor,
    weights_at: tl.tensor,
    count: int,
    scale: float,
    num_chosen: tl.constexpr,
    wide: tl.constexpr,
    wide_chosen: tl.constexpr,
    sigmoid: tl.constexpr,
    sums_to_one: tl.constexpr,
    divided: tl.constexpr,
    scaled: tl.constexpr,
    padded: tl.constexpr,
) -> None:
    """The K largest of logits [T, N], in falling order, and their weights, both [T, K]. A program a row. See Router.

    Whatever the logits are, an expert that exists: what is no number makes weights that are none. divided: closed
    [T, N] is added to what they are chosen by. scaled: each weight by its expert's of scales [N]. padded: rows whose
    slot is below 0 get experts -1.
    """
    row = tl.program_id(0)
    experts, places = tl.arange(0, wide), tl.arange(0, wide_chosen)
    logits = tl.load(logits_at + row * count + experts, mask=experts < count, other=float("-inf"))
    if sigmoid:
        scores = 1 / (1 + tl.exp(-logits))
        ranked = scores + tl.load(bias_at + experts, mask=experts < count, other=float("-inf"))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        ranked = logits
    if divided:
        ranked += tl.load(closed_at + row * count + experts, mask=experts < count, other=0.0)
    total = tl.sum(scores, 0)
    tops, scales = tl.zeros((wide_chosen,), tl.float32), tl.full((wide_chosen,), scale, tl.float32)
    for place in tl.static_range(num_chosen):
        expert = tl.minimum(tl.argmax(ranked, 0), count - 1)
        sent = tl.where(tl.load(slots_at + row) >= 0, expert, -1) if padded else expert
        tl.store(chosen_at + row * num_chosen + place, sent)
        tops = tl.where(places == place, tl.sum(tl.where(experts == expert, scores, 0.0), 0), tops)
        if scaled:
            scales = tl.where(places == place, scale * tl.load(scales_at + expert), scales)
        ranked = tl.where(experts == expert, float("-inf"), ranked)
    if sums_to_one:
        total = tl.sum(tops, 0) + (_LEAST if sigmoid else 0.0)
    elif sigmoid:
        total = 1.0
    tl.store(weights_at + row * num_chosen + places, tops / total * scales, mask=places < num_chosen)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])  # type: ignore[untyped-decorator]
def _sort(
    chosen_at: tl.tensor,
    ranks_at: tl.tensor,
    expert_at: tl.tensor,
    pairs_at: tl.tensor,
    num_pairs: int,
    num_tiles: int,
    wide: tl.constexpr,
    wide_tiles: tl.constexpr,
    at_once: tl.constexpr,
    tile_rows: tl.constexpr,
) -> None:
    """Tiles [L] and [L, R] of chosen [P]; ranks [2 P] is room to work in. One program.

    A pair's rank is how many before it have its expert; every R-th of an expert leads a tile, and tiles are numbered in
    the order of their leaders.
    """
    pairs, tiles = tl.arange(0, wide), tl.arange(0, wide_tiles)
    chosen = tl.load(chosen_at + pairs, mask=pairs < num_pairs, other=-1)
    real = chosen >= 0
    tl.store(expert_at + tiles, tl.full((wide_tiles,), -1, tl.int32), mask=tiles < num_tiles)
    for slot in tl.static_range(tile_rows):
        tl.store(pairs_at + tiles * tile_rows + slot, tl.full((wide_tiles,), -1, tl.int32), mask=tiles < num_tiles)
    rank = tl.zeros((wide,), tl.int32)
    for first in range(0, num_pairs, at_once):
        others = first + tl.arange(0, at_once)
        theirs = tl.load(chosen_at + others, mask=others < num_pairs, other=-2)
        before = (theirs[None, :] == chosen[:, None]) & (others[None, :] < pairs[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    leads = real & (rank % tile_rows == 0)
    number = tl.cumsum(leads.to(tl.int32), 0) - 1
    tl.store(ranks_at + pairs, rank, mask=pairs < num_pairs)
    tl.store(ranks_at + num_pairs + pairs, number, mask=pairs < num_pairs)
    tl.debug_barrier()
    tile = tl.zeros((wide,), tl.int32)
    for first in range(0, num_pairs, at_once):
        others = first + tl.arange(0, at_once)
        inside = others < num_pairs
        theirs = tl.load(chosen_at + others, mask=inside, other=-2)
        ranks = tl.load(ranks_at + others, mask=inside, other=-1)
        numbers = tl.load(ranks_at + num_pairs + others, mask=inside, other=0)
        leader = (theirs[None, :] == chosen[:, None]) & (ranks[None, :] == (rank - rank % tile_rows)[:, None])
        tile += tl.sum(tl.where(leader, numbers[None, :], 0), 1)
    tl.store(expert_at + tile, chosen, mask=leads)
    tl.store(pairs_at + tile * tile_rows + rank % tile_rows, pairs, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _tile_product(
    x_at: tl.tensor,
    weights_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    biases_at: tl.tensor,
    expert_at: tl.tensor,
    pairs_at: tl.tensor,
    y_at: tl.tensor,
    num_outputs: int,
    width: int,
    row: int,
    num_scales: int,
    fan: int,
    group: tl.constexpr,
    bits: tl.constexpr,
    are_floats: tl.constexpr,
    has_zeros: tl.constexpr,
    has_biases: tl.constexpr,
    word: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
) -> None:
    """Some outputs of a tile: y [P, O] from x [P / fan, W] and the matrix of the tile's expert, as Stack has it: of
    rows of `row` numbers, or bytes of codes."""
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
            if are_floats:
                pair = tl.arange(0, word * group // 2)
                of_group, inside = pair // (group // 2), index * (word * group // 2) + pair < row
                columns = index * word * group + of_group * group + pair % (group // 2)
                real_columns = real_rows[:, None] & inside[None, :]
                first = tl.load(from_x + columns[None, :], mask=real_columns, other=0.0)
                last = tl.load(from_x + (columns + group // 2)[None, :], mask=real_columns, other=0.0)
                real_codes = real_outputs[None, :] & inside[:, None]
                from_codes = weights_at + at[None, :] * row + (index * (word * group // 2) + pair)[:, None]
                both = tl.load(from_codes, mask=real_codes, other=0)
                words = tl.load(scales_at + at * num_scales + index, mask=real_outputs, other=0)
                exponents = words[None, :] >> (8 * of_group)[:, None] & 255
                low, high = _floats(both & 15, exponents), _floats(both >> 4, exponents)
                part = tl.dot(first, low.to(first.dtype), input_precision="ieee")
                part += tl.dot(last, high.to(first.dtype), input_precision="ieee")
            elif bits < 16:
                from_codes = weights_at + at[None, :] * row + index * (group * bits // 8)
                part, total = group_product(from_x + index * group, from_codes, real_rows, real_outputs, group, bits)
                scales = tl.load(scales_at + at * num_scales + index, mask=real_outputs, other=0.0).to(tl.float32)
                part *= scales[None, :]
                if has_zeros:
                    zeros = tl.load(zeros_at + at * num_scales + index, mask=real_outputs, other=0.0).to(tl.float32)
                    part += total[:, None] * zeros[None, :]
            else:
                columns = index * group + tl.arange(0, group)
                inside = columns < width
                x = tl.load(from_x + columns[None, :], mask=real_rows[:, None] & inside[None, :], other=0.0)
                from_weights = weights_at + at[None, :] * row + columns[:, None]
                weights = tl.load(from_weights, mask=real_outputs[None, :] & inside[:, None], other=0).to(x.dtype)
                part = tl.dot(x, weights, input_precision="ieee")
            sums += part
        if has_biases:
            sums += tl.load(biases_at + at, mask=real_outputs, other=0.0).to(tl.float32)[None, :]
        to = y_at + pairs.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        tl.store(to, sums.to(y_at.dtype.element_ty), mask=real_rows[:, None] & real_outputs[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _floats(codes: tl.tensor, exponents: tl.tensor) -> tl.tensor:
    """What codes and exponents stand for, float32: see quantized.py. A code's bits are those of a float16 2^14 times
    too small; with three of them bfloat16 holds all that it makes."""
    bits = (codes & 7).to(tl.uint16) << 9 | (codes & 8).to(tl.uint16) << 12
    scales = (exponents << 23).to(tl.float32, bitcast=True)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0 * scales


@triton.jit  # type: ignore[untyped-decorator]
def _add(
    made_at: tl.tensor,
    chosen_at: tl.tensor,
    weights_at: tl.tensor,
    sums_at: tl.tensor,
    dim: int,
    num_chosen: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """sums [T, D]: of made [T, K, D] by weights [T, K], in float32, where chosen [T, K] names an expert. A program for
    some numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    real = columns < dim
    total = tl.zeros((wide,), tl.float32)
    for place in tl.static_range(num_chosen):
        pair = row * num_chosen + place
        sent = tl.load(chosen_at + pair) >= 0
        made = tl.load(made_at + pair * dim + columns, mask=real & sent, other=0.0).to(tl.float32)
        total += made * tl.load(weights_at + pair)
    tl.store(sums_at + row * dim + columns, total.to(sums_at.dtype.element_ty), mask=real)
