"""Kernels of card_steps.py, in Triton: what a card does with a round's rows between the matrix products.

steps.py is the reference. All that changes from round to round is read from one tensor of integers, the table, so that
the same launches serve every round. Must not know drafts, spans or ranks. Imported on cards only: needs Triton.
Annotations are Triton's, which reads them: no name of Python's may stand there.

Shapes: T rows, D hidden, H query heads, G kv heads, E head dim, C mlp channels, S slots, N splits; R rows of a tile,
each row standing there once for each of the F query heads that read a kv head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card_overlap import begin, fetch_row

# The table, int64: for each of so many rows four numbers (in columns), then six for each of as many tiles, then three
# for each block of keys, as the names below say. A span's rows are a chain, which see all before them, and behind it a
# tree, of which a row sees the chain and those of the tree that it has a bit for. Places are counted from the text's
# beginning, as rows and their keys stand; positions are what rope knows, and of a tree's rows no places.
MOST_ROWS = 64  # of a recorded round; of a tree
ROW_POSITION, ROW_SLOT, ROW_SEES, ROW_BLOCKS = range(4)  # slot -1: padding
ROW_SIZE = 4
TILE_SIZE = 6  # first row of the span's tree, how far behind it the tile's begin, rows, the tree's place, blocks' range
TILE_PLACE = 3  # of these, the tree's place
BLOCK_SIZE = 3  # first slot, keys, place of the first key
KEYS = 64  # of a block at most

_POSITIONS, _SLOTS, _SEES, _BLOCKS = (tl.constexpr(column) for column in range(ROW_SIZE))
_ROW_SIZE, _TILE_SIZE, _BLOCK_SIZE = tl.constexpr(ROW_SIZE), tl.constexpr(TILE_SIZE), tl.constexpr(BLOCK_SIZE)
_HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it rounds a small float32 to a whole number


@triton.jit  # type: ignore[untyped-decorator]
def gated(x: tl.tensor, up: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """act(x) * up, in float32. See rows.inc for kinds of act."""
    z = x
    if kind == "gelu":
        z = 1.5957691216 * (x + 0.044715 * x * x * x)
    elif kind == "clamped":
        x = tl.where(x > 7.0, 7.0, x)  # what is no number stays none
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1
        z = 1.702 * x
    return x / (1 + tl.exp(-z)) * up


@triton.jit  # type: ignore[untyped-decorator]
def gate(
    gate_up_at: tl.tensor,
    out_at: tl.tensor,
    width: int,
    wide: tl.constexpr,
    kind: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """act(gate) * up: [T, 2C] -> [T, C]. A program for `wide` channels of a row."""
    begin(overlaps)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    real = columns < width
    x = tl.load(gate_up_at + row * 2 * width + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up_at + row * 2 * width + width + columns, mask=real, other=0.0).to(tl.float32)
    y = gated(x, up, kind)
    tl.store(out_at + row * width + columns, y.to(out_at.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _head(
    head_at: tl.tensor,
    weight_at: tl.tensor,
    eps: float,
    columns: tl.tensor,
    dim: tl.constexpr,
    wide: tl.constexpr,
    normed: tl.constexpr,
) -> tl.tensor:
    """One head of one row at `columns`, float32, after its norm if it has one."""
    x = tl.load(head_at + columns, mask=columns < dim, other=0.0)
    if normed:
        all_columns = tl.arange(0, wide)
        whole = tl.load(head_at + all_columns, mask=all_columns < dim, other=0.0).to(tl.float32)
        weight = tl.load(weight_at + columns, mask=columns < dim, other=0.0)
        x = (x.to(tl.float32) * tl.rsqrt(tl.sum(whole * whole) / dim + eps) * weight).to(x.dtype)
    return x.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def place(
    qkv_at: tl.tensor,
    q_weight_at: tl.tensor,
    k_weight_at: tl.tensor,
    v_weight_at: tl.tensor,
    eps: float,
    cos_at: tl.tensor,
    sin_at: tl.tensor,
    gains_at: tl.tensor,
    table_at: tl.tensor,
    q_at: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    key_scales_at: tl.tensor,
    value_scales_at: tl.tensor,
    num_slots: int,
    most_rows: int,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    num_lines: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,
    normed: tl.constexpr,
    values_normed: tl.constexpr,
    turned: tl.constexpr,
    grown: tl.constexpr,
    small: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Norms and turns the heads of qkv [T, N E]; queries go to q [T, H, E], keys and values to their slot.

    Programs: T x (H + 2G), or H + G where keys are their own values, or H where none are kept. N: of these, or H + G
    where keys and values are made of the same. grown: queries that are turned are multiplied by their position's gain,
    of gains [P]. small: the cache has codes and scales.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, wide)
    real = columns < dim
    line = tl.where(head < num_lines, head, head - num_kv_heads)
    head_at = qkv_at + (row * num_lines + line) * dim
    slot = tl.load(table_at + _SLOTS * most_rows + row)
    if turned:
        position = tl.load(table_at + _POSITIONS * most_rows + row)
        cos = tl.load(cos_at + position * dim + columns, mask=real, other=0.0).to(tl.float32)
        sin = tl.load(sin_at + position * dim + columns, mask=real, other=0.0).to(tl.float32)
        if grown:
            gain = tl.load(gains_at + position)
    if normed:
        fetch_row(tl.where(head < num_heads, q_weight_at, k_weight_at), dim, wide, overlaps)
    begin(overlaps)
    if head < num_heads + num_kv_heads:
        weight_at = q_weight_at if head < num_heads else k_weight_at
        x = _head(head_at, weight_at, eps, columns, dim, wide, normed)
        if turned:
            across = tl.where(columns < dim // 2, columns + dim // 2, columns - dim // 2)
            across = tl.where(real, across, columns)
            x = x * cos + _head(head_at, weight_at, eps, across, dim, wide, normed) * sin
        if head < num_heads:
            if turned and grown:
                x *= gain
            to = q_at + (row * num_heads + head) * dim + columns
            tl.store(to, x.to(q_at.dtype.element_ty), mask=real)
        elif slot >= 0:
            at = (head - num_heads).to(tl.int64) * num_slots + slot
            _keep(x.to(q_at.dtype.element_ty), keys_at, key_scales_at, at, columns, dim, small)
    elif slot >= 0:
        x = _head(head_at, v_weight_at, eps, columns, dim, wide, values_normed).to(q_at.dtype.element_ty)
        at = (head - num_heads - num_kv_heads).to(tl.int64) * num_slots + slot
        _keep(x, values_at, value_scales_at, at, columns, dim, small)


@triton.jit  # type: ignore[untyped-decorator]
def _keep(
    x: tl.tensor,
    cells_at: tl.tensor,
    scales_at: tl.tensor,
    at: tl.tensor,
    columns: tl.tensor,
    dim: tl.constexpr,
    small: tl.constexpr,
) -> None:
    """Writes one head of one token."""
    if small:
        x = x.to(tl.float32)
        scale = tl.max(tl.abs(x)) / 127 + tl.sum(x * 0.0)  # a maximum passes over NaN, which has to stay
        scale = tl.where(scale == 0, 1.0, scale)
        tl.store(scales_at + at, scale)
        x = x / scale + _HALF_EVEN - _HALF_EVEN
    tl.store(cells_at + at * dim + columns, x.to(cells_at.dtype.element_ty), mask=columns < dim)


@triton.jit  # type: ignore[untyped-decorator]
def attend(
    q_at: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    key_scales_at: tl.tensor,
    value_scales_at: tl.tensor,
    table_at: tl.tensor,
    heads_at: tl.tensor,
    sinks_at: tl.tensor,
    sums_at: tl.tensor,
    tops_at: tl.tensor,
    masses_at: tl.tensor,
    num_slots: int,
    most_rows: int,
    window: int,
    scale: float,
    num_heads: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,
    rest: tl.constexpr,
    fold: tl.constexpr,
    cuts: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    pieces: tl.constexpr,
    splits: tl.constexpr,
    cap: tl.constexpr,
    recorded: tl.constexpr,
    windowed: tl.constexpr,
    sinks: tl.constexpr,
    small: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Attention of a tile's rows to every N-th block of their keys, not yet divided by its mass (flash-decoding).

    Programs: tiles x F x N. heads [F + 1]: the first query head of each fold; `cuts` of them read one kv head. sums
    [T, H, N, E], tops and masses [T, H, N], float32: to be joined by `join`. recorded: there are T tiles, some of
    padding; where not, and N is 1, sums are what `join` would make of them, and tops and masses are none. window: a row
    sees the keys of so many positions, its own the last.

    rest: columns behind `wide` ones, if those are not all: a tile's sides are powers of two. tile_keys: of a block, how
    many at once, in so many pieces. cap: of scores, as attention.py has it; 0: none.
    """
    begin(overlaps)
    tile_at = table_at + _ROW_SIZE * most_rows + tl.program_id(0) * _TILE_SIZE
    kv, split, heads_at = tl.program_id(1) // cuts, tl.program_id(2), heads_at + tl.program_id(1)
    first, before, num_rows = tl.load(tile_at), _small(tile_at + 1), tl.load(tile_at + 2)
    tree_at, first_block, end_block = _small(tile_at + 3), tl.load(tile_at + 4), tl.load(tile_at + 5)
    if (num_rows == 0) | (split >= end_block - first_block):
        return  # most programs of a round of few rows and keys; `join` does not ask for what they have
    folded, columns = tl.arange(0, tile_rows), tl.arange(0, wide)
    rows, heads = first + before + folded // fold, tl.load(heads_at) + folded % fold
    real_rows = (folded // fold < num_rows) & (heads < tl.load(heads_at + 1))
    if recorded:
        real_rows &= rows < tl.num_programs(0)  # whatever a table says that was another round's
    at_rows = rows * num_heads + heads
    real = real_rows[:, None] & (columns < dim)[None, :]
    q = tl.load(q_at + at_rows[:, None] * dim + columns[None, :], mask=real, other=0.0)
    if rest:
        others = wide + tl.arange(0, rest)
        real_others = real_rows[:, None] & (others < dim)[None, :]
        more_q = tl.load(q_at + at_rows[:, None] * dim + others[None, :], mask=real_others, other=0.0)
        more_sums = tl.zeros((tile_rows, rest), tl.float32)
    places = tree_at + before + folded // fold
    sees = tl.load(table_at + _SEES * most_rows + rows, mask=real_rows, other=0)
    positions = tl.load(table_at + _POSITIONS * most_rows + rows, mask=real_rows, other=0).to(tl.int32)
    least, last = tree_at + tl.minimum(before, 0), tl.max(positions)  # place of what all see whole; position
    top = tl.full((tile_rows,), -float("inf"), tl.float32)
    mass = tl.zeros((tile_rows,), tl.float32)
    sums = tl.zeros((tile_rows, wide), tl.float32)
    blocks_at = table_at + (_ROW_SIZE + _TILE_SIZE) * most_rows
    # One loop over all pieces of all blocks: loads of loops within loops are not pipelined.
    for piece in range(tl.cdiv(end_block - first_block - split, splits) * pieces):
        block_at = blocks_at + (first_block + split + piece // pieces * splits) * _BLOCK_SIZE
        first_slot, num_keys, place = tl.load(block_at), _small(block_at + 1), _small(block_at + 2)
        keys = piece % pieces * tile_keys + tl.arange(0, tile_keys)
        real_keys = keys < num_keys
        at_keys = kv.to(tl.int64) * num_slots + first_slot + keys
        k = _cells(keys_at, at_keys[None, :], real_keys[None, :], columns[:, None], dim)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if rest:
            k = _cells(keys_at, at_keys[None, :], real_keys[None, :], others[:, None], dim)
            scores += tl.dot(more_q, k.to(q.dtype), input_precision="ieee")
        scores *= scale
        if small:
            scores *= tl.load(key_scales_at + at_keys, mask=real_keys, other=0.0)[None, :]
        if cap > 0:
            scores = cap - 2 * cap / (tl.exp(scores * (2 / cap)) + 1)  # cap tanh(scores / cap)
        # Most blocks of many rows are seen whole by all of them. Of few rows memory takes longer than masks.
        skipped = piece % pieces * tile_keys
        is_edge = (num_keys - skipped < tile_keys) | (place + skipped + tile_keys > least)
        if windowed:
            is_edge |= place + skipped <= last - window
        if recorded or is_edge:
            # Rows of the tree, from 0; before them is the chain, and before that the cache.
            own = place + keys - tree_at
            is_own = (own >= 0) & real_keys  # beyond the last key there is no bit of a word
            has_bit = (sees[:, None] >> tl.where(is_own, own, 0)[None, :]) & 1 != 0
            seen = tl.where(is_own[None, :], has_bit, (place + keys)[None, :] <= places[:, None])
            if windowed:
                at_own = table_at + _POSITIONS * most_rows + first + own
                stands = tl.where(is_own, tl.load(at_own, mask=is_own, other=0).to(tl.int32), place + keys)
                seen &= stands[None, :] > positions[:, None] - window
            scores = tl.where(seen & real_keys[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a row may see nothing of a block
        faded = tl.exp(top - base)
        odds = tl.exp(scores - base[:, None])
        mass = mass * faded + tl.sum(odds, 1)
        if small:
            odds *= tl.load(value_scales_at + at_keys, mask=real_keys, other=0.0)[None, :]
        odds = odds.to(q.dtype)
        v = _cells(values_at, at_keys[:, None], real_keys[:, None], columns[None, :], dim)
        sums = sums * faded[:, None] + tl.dot(odds, v.to(q.dtype), input_precision="ieee")
        if rest:
            v = _cells(values_at, at_keys[:, None], real_keys[:, None], others[None, :], dim)
            more_sums = more_sums * faded[:, None] + tl.dot(odds, v.to(q.dtype), input_precision="ieee")
        top = higher
    at = at_rows * splits + split
    if recorded or splits > 1:
        tl.store(tops_at + at, top, mask=real_rows)
        tl.store(masses_at + at, mass, mask=real_rows)
    else:
        share = 1 / tl.where(mass == 0, 1.0, mass)
        if sinks:
            sink = tl.load(sinks_at + heads, mask=real_rows, other=0.0)
            higher = tl.maximum(top, sink)
            share = tl.exp(top - higher)
            share /= mass * share + tl.exp(sink - higher)
        sums *= share[:, None]
        if rest:
            more_sums *= share[:, None]
    tl.store(sums_at + at[:, None] * dim + columns[None, :], sums.to(sums_at.dtype.element_ty), mask=real)
    if rest:
        more_sums = more_sums.to(sums_at.dtype.element_ty)
        tl.store(sums_at + at[:, None] * dim + others[None, :], more_sums, mask=real_others)


@triton.jit  # type: ignore[untyped-decorator]
def _small(number_at: tl.tensor) -> tl.tensor:
    """A number of the table, where many are made of it: half as wide, in half the registers."""
    return tl.load(number_at).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _cells(cells_at: tl.tensor, at: tl.tensor, real: tl.tensor, columns: tl.tensor, dim: tl.constexpr) -> tl.tensor:
    """Some columns of some cells, of which those that are real; float32."""
    return tl.load(cells_at + at * dim + columns, mask=real & (columns < dim), other=0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def join(
    sums_at: tl.tensor,
    tops_at: tl.tensor,
    masses_at: tl.tensor,
    table_at: tl.tensor,
    sinks_at: tl.tensor,
    out_at: tl.tensor,
    most_rows: int,
    num_heads: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,
    splits: tl.constexpr,
    sinks: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """out [T, H, E] of the splits that had blocks; 0 for padding. Programs: T x H x pieces of E. sinks: there are some,
    [H], scores beside those of the keys."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, split = tl.program_id(2) * wide + tl.arange(0, wide), tl.arange(0, splits)
    used = split < tl.load(table_at + _BLOCKS * most_rows + row)
    if sinks:
        sink = tl.load(sinks_at + head)
    begin(overlaps)
    at = (row * num_heads + head) * splits + split
    tops = tl.load(tops_at + at, mask=used, other=-float("inf"))
    top = tl.max(tops, 0)
    if sinks:
        top = tl.maximum(top, sink)
    weights = tl.where(used, tl.exp(tops - tl.where(top == -float("inf"), 0.0, top)), 0.0)
    mass = tl.sum(weights * tl.load(masses_at + at, mask=used, other=0.0), 0)
    if sinks:
        mass += tl.exp(sink - top)
    seen = used[:, None] & (columns < dim)[None, :]
    sums = tl.load(sums_at + at[:, None] * dim + columns[None, :], mask=seen, other=0.0)
    out = tl.sum(sums * weights[:, None], 0) / tl.where(mass == 0, 1.0, mass)
    tl.store(out_at + (row * num_heads + head) * dim + columns, out.to(out_at.dtype.element_ty), mask=columns < dim)
