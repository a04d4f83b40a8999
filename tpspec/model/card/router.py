"""Where rows of a mixture of experts go on a CUDA card, in Triton: model/router.py is the reference. Imported on cards
only.

What a row is sent to is known on the card alone, and the host never asks: rows are put into tiles of one expert each,
of which as many are launched as there can be at most. The launches are then the same whatever the router says, so that
they can be recorded (model/graphs.py). Must not know what experts compute. Annotations are Triton's.

Shapes: T rows, N experts, K of them for each row, P = T * K pairs of both; L tiles of R pairs; D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tpspec.model.card.overlap import begin
from tpspec.model.card.tiles import TILE_ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.card.overlap import Overlap
    from tpspec.model.router import Router

MOST_SORTED, AT_ONCE = 1024, 32  # pairs that one program puts into tiles; that it looks at at a time


@dataclass(frozen=True, slots=True)
class Tiles:
    """expert_L: of each tile, -1: there is none. pairs_LR: -1 beyond its last."""

    expert_L: Tensor
    pairs_LR: Tensor


def routed(router: Router, x_TD: Tensor, slots_T: Tensor | None, how: Overlap) -> tuple[Tensor, Tensor]:
    """What the router says, its experts in int32, -1 for rows whose slot is below 0."""
    logits_TN, bias_N, experts = router.logits(x_TD), router.bias_N, router.experts
    K, closed_TN, scales_N = experts.chosen, logits_TN, router.scales_N
    if experts.is_divided:
        closed_TN = router.closed(router.ranked(logits_TN))
    chosen_TK = logits_TN.new_empty(len(x_TD), K, dtype=torch.int32)
    weights_TK = logits_TN.new_empty(len(x_TD), K)
    _choose[(len(x_TD),)](
        logits_TN, logits_TN if bias_N is None else bias_N, logits_TN if scales_N is None else scales_N, closed_TN,
        chosen_TK if slots_T is None else slots_T, chosen_TK, weights_TK, experts.count, experts.scale, experts.added,
        experts.margin or 0.0, num_chosen=K, wide=triton.next_power_of_2(experts.count),
        wide_chosen=triton.next_power_of_2(K), sigmoid=experts.sigmoid, corrected=experts.corrected or "",
        sums_to_one=experts.sums_to_one, divided=experts.is_divided, scaled=scales_N is not None,
        one_by_one=experts.margin is not None, padded=slots_T is not None, **how,
    )  # fmt: skip
    return chosen_TK, weights_TK


def most_tiles(num_pairs: int, count: int) -> int:
    """That so many pairs can fill or begin."""
    return min(num_pairs, count + num_pairs // TILE_ROWS)


def sorted_tiles(chosen_TK: Tensor, count: int, how: Overlap) -> Tiles:
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
        **how,
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
    added: float,
    margin: float,
    num_chosen: tl.constexpr,
    wide: tl.constexpr,
    wide_chosen: tl.constexpr,
    sigmoid: tl.constexpr,
    corrected: tl.constexpr,
    sums_to_one: tl.constexpr,
    divided: tl.constexpr,
    scaled: tl.constexpr,
    one_by_one: tl.constexpr,
    padded: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """The K largest of logits [T, N], in falling order, and their weights, both [T, K]. A program a row. See Router.

    Whatever the logits are, an expert that exists: what is no number makes weights that are none. corrected: see
    Experts; "": nothing is. divided: closed [T, N] is added to what they are chosen by. scaled: each weight by its
    expert's of scales [N]. one_by_one: within the margin, see Experts. padded: rows whose slot is below 0 get experts
    -1.
    """
    begin(overlaps)
    row = tl.program_id(0)
    experts, places = tl.arange(0, wide), tl.arange(0, wide_chosen)
    logits = tl.load(logits_at + row * count + experts, mask=experts < count, other=float("-inf"))
    scores = 1 / (1 + tl.exp(-logits)) if sigmoid else tl.exp(logits - tl.max(logits, 0))
    ranked = scores if corrected == "sigmoids" else logits
    if corrected != "":
        ranked += tl.load(bias_at + experts, mask=experts < count, other=float("-inf"))
    if divided:
        ranked += tl.load(closed_at + row * count + experts, mask=experts < count, other=0.0)
    total = tl.sum(scores, 0)
    tops, scales = tl.zeros((wide_chosen,), tl.float32), tl.full((wide_chosen,), scale, tl.float32)
    for place in tl.static_range(num_chosen):
        expert = tl.minimum(tl.argmax(ranked, 0), count - 1)
        sent = tl.where(tl.load(slots_at + row) >= 0, expert, -1) if padded else expert
        tl.store(chosen_at + row * num_chosen + place, sent)
        if one_by_one:
            best = tl.max(ranked, 0)
            far = best - logits > margin * tl.maximum(tl.abs(logits), best)
            top = 1 / tl.sum(tl.where(far, 0.0, tl.exp(ranked - best)), 0)
        else:
            top = tl.sum(tl.where(experts == expert, scores, 0.0), 0)
        tops = tl.where(places == place, top, tops)
        if scaled:
            scales = tl.where(places == place, scale * tl.load(scales_at + expert), scales)
        ranked = tl.where(experts == expert, float("-inf"), ranked)
    if sums_to_one:
        total = tl.sum(tops, 0) + (added if sigmoid else 0.0)
    elif sigmoid or one_by_one:
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
    overlaps: tl.constexpr,
) -> None:
    """Tiles [L] and [L, R] of chosen [P]; ranks [2 P] is room to work in. One program.

    A pair's rank is how many before it have its expert; every R-th of an expert leads a tile, and tiles are numbered in
    the order of their leaders.
    """
    begin(overlaps)
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
