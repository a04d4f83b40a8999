"""Kernels of steps.py, in Triton: attention of a round's rows to the keys and values that a cache keeps.

torch_steps.py and model/attention.py are the reference; the table is rows.py's. Must not know drafts, spans or
ranks. Imported on cards only: needs Triton. Annotations are Triton's, which reads them: no name of Python's may stand
there.

Shapes: T rows, H query heads, E head dim, S slots, N splits; R rows of a tile, each row standing there once for each of
the F query heads that read a kv head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card.heads import angles, keep, turned_heads
from tpspec.model.card.overlap import begin, fetch_row, fetch_rows
from tpspec.model.card.rows import BLOCK_SIZE, KEYS, ROW_BLOCKS, ROW_POSITION, ROW_SEES, ROW_SIZE, ROW_SLOT, TILE_SIZE

_POSITIONS, _SLOTS, _SEES, _BLOCKS = (tl.constexpr(column) for column in (ROW_POSITION, ROW_SLOT, ROW_SEES, ROW_BLOCKS))
_ROW_SIZE, _TILE_SIZE, _BLOCK_SIZE = tl.constexpr(ROW_SIZE), tl.constexpr(TILE_SIZE), tl.constexpr(BLOCK_SIZE)
_KEYS = tl.constexpr(KEYS)
_FETCHED_BLOCKS = tl.constexpr(2)  # of a program's keys and values, before it waits
_OWN_ROWS = tl.constexpr(8)  # of a round, that a program places at a time: fewer than a tile has


@triton.jit  # type: ignore[untyped-decorator]
def attend(
    rows_at: tl.tensor,
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
    q_weight_at: tl.tensor,
    k_weight_at: tl.tensor,
    v_weight_at: tl.tensor,
    eps: float,
    cos_at: tl.tensor,
    sin_at: tl.tensor,
    gains_at: tl.tensor,
    num_slots: int,
    most_rows: int,
    window: int,
    scale: float,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    num_lines: tl.constexpr,
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
    placing: tl.constexpr,
    normed: tl.constexpr,
    values_normed: tl.constexpr,
    turned: tl.constexpr,
    grown: tl.constexpr,
    windowed: tl.constexpr,
    chunked: tl.constexpr,
    sinks: tl.constexpr,
    small: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Attention of a tile's rows to every N-th block of their keys, not yet divided by its mass (flash-decoding).

    Programs: tiles x F x N. heads [F + 1]: the first query head of each fold; `cuts` of them read one kv head. rows:
    queries [T, H, E]; placing: qkv, as `place` reads it, whose work is done here, of a head's keys and values by each
    program that reads them; it then writes what others write, too. So no span may read, as cached, what another one of
    its round writes. sums [T, H, N, E], tops and masses [T, H, N],
    float32: to be joined by `join`. recorded: there are T tiles, some of padding; where not, and N is 1, sums are what
    `join` would make of them, and tops and masses are none. window: a row sees the keys of so many positions, its own
    the last; chunked: those of its chunk of so many, up to its own.

    rest: columns behind `wide` ones, if those are not all: a tile's sides are powers of two. tile_keys: of a block, how
    many at once, in so many pieces. cap: of scores, as model/attention.py has it; 0: none.
    """
    tile_at = table_at + _ROW_SIZE * most_rows + tl.program_id(0) * _TILE_SIZE
    kv, split, heads_at = tl.program_id(1) // cuts, tl.program_id(2), heads_at + tl.program_id(1)
    if not placing:
        begin(overlaps)
    first, before, num_rows = tl.load(tile_at), _small(tile_at + 1), tl.load(tile_at + 2)
    tree_at, first_block, end_block = _small(tile_at + 3), tl.load(tile_at + 5), tl.load(tile_at + 6)
    blocks_at = table_at + (_ROW_SIZE + _TILE_SIZE) * most_rows + (first_block + split) * _BLOCK_SIZE
    num_blocks = tl.where(num_rows == 0, 0, tl.cdiv(end_block - first_block - split, splits))
    # Most programs of a round of few rows and keys; `join` does not ask for what they have.
    if (num_blocks <= 0) & _waits_no_more(placing):
        return
    folded, columns = tl.arange(0, tile_rows), tl.arange(0, wide)
    rows, heads = first + before + folded // fold, tl.load(heads_at) + folded % fold
    real_rows = (folded // fold < num_rows) & (heads < tl.load(heads_at + 1))
    if recorded:
        real_rows &= rows < tl.num_programs(0)  # whatever a table says that was another round's
    at_rows = rows * num_heads + heads
    real = real_rows[:, None] & (columns < dim)[None, :]
    sees = tl.load(table_at + _SEES * most_rows + rows, mask=real_rows, other=0)
    positions = tl.load(table_at + _POSITIONS * most_rows + rows, mask=real_rows, other=0).to(tl.int32)
    if placing:
        cos, sin = angles(cos_at, sin_at, positions, real_rows, dim, wide, turned)
        if turned and grown:
            gain = tl.load(gains_at + positions, mask=real_rows, other=0.0)
        if normed != "":
            fetch_row(q_weight_at, dim, wide, overlaps)
            fetch_row(k_weight_at, dim, wide, overlaps)
        for at in range(tl.minimum(num_blocks, _FETCHED_BLOCKS)):
            block_at = blocks_at + at * (splits * _BLOCK_SIZE)
            _fetch_block(block_at, keys_at, values_at, kv, num_slots, dim, wide, overlaps)
        low, high = _own(blocks_at, num_blocks, first.to(tl.int32) - tree_at, tree_at - _small(tile_at + 4), splits)
        slots, own_cos, own_sin = _own_places(low, high, table_at, most_rows, cos_at, sin_at, dim, wide, turned)
        begin(overlaps)
        if num_blocks <= 0:
            return
        lines_at = rows_at + (rows * num_lines + heads) * dim
        q = turned_heads(lines_at, real_rows, q_weight_at, eps, cos, sin, dim, wide, normed, turned)
        if turned and grown:
            q *= gain[:, None]
        q = q.to(rows_at.dtype.element_ty)
        kv_at, cells = rows_at + (num_heads + kv) * dim, kv.to(tl.int64) * num_slots
        _place_own(
            kv_at, low, slots, own_cos, own_sin, k_weight_at, v_weight_at, eps, keys_at, values_at, key_scales_at,
            value_scales_at, cells, num_heads, num_kv_heads, num_lines, dim, wide, normed, values_normed, turned, small,
        )  # fmt: skip
        for row in tl.range(low + _OWN_ROWS, high, _OWN_ROWS, num_stages=1):
            slots, own_cos, own_sin = _own_places(row, high, table_at, most_rows, cos_at, sin_at, dim, wide, turned)
            _place_own(
                kv_at, row, slots, own_cos, own_sin, k_weight_at, v_weight_at, eps, keys_at, values_at, key_scales_at,
                value_scales_at, cells, num_heads, num_kv_heads, num_lines, dim, wide, normed, values_normed, turned,
                small,
            )  # fmt: skip
        tl.debug_barrier()  # what a thread has written others read
    else:
        q = tl.load(rows_at + at_rows[:, None] * dim + columns[None, :], mask=real, other=0.0)
    if rest:
        others = wide + tl.arange(0, rest)
        real_others = real_rows[:, None] & (others < dim)[None, :]
        more_q = tl.load(rows_at + at_rows[:, None] * dim + others[None, :], mask=real_others, other=0.0)
        more_sums = tl.zeros((tile_rows, rest), tl.float32)
    places = tree_at + before + folded // fold
    least, last = tree_at + tl.minimum(before, 0), tl.max(positions)  # place of what all see whole; position
    top = tl.full((tile_rows,), -float("inf"), tl.float32)
    mass = tl.zeros((tile_rows,), tl.float32)
    sums = tl.zeros((tile_rows, wide), tl.float32)
    # One loop over all pieces of all blocks: loads of loops within loops are not pipelined.
    for piece in range(num_blocks * pieces):
        block_at = blocks_at + piece // pieces * (splits * _BLOCK_SIZE)
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
            is_edge |= place + skipped < _first_seen(last, window, chunked)
        if recorded or is_edge:
            # Rows of the tree, from 0; before them is the chain, and before that the cache.
            own = place + keys - tree_at
            is_own = (own >= 0) & real_keys  # beyond the last key there is no bit of a word
            has_bit = (sees[:, None] >> tl.where(is_own, own, 0)[None, :]) & 1 != 0
            seen = tl.where(is_own[None, :], has_bit, (place + keys)[None, :] <= places[:, None])
            if windowed:
                at_own = table_at + _POSITIONS * most_rows + first + own
                stands = tl.where(is_own, tl.load(at_own, mask=is_own, other=0).to(tl.int32), place + keys)
                seen &= stands[None, :] >= _first_seen(positions, window, chunked)[:, None]
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
def _first_seen(position: tl.tensor, window: int, chunked: tl.constexpr) -> tl.tensor:
    """By a row at that position."""
    return position - (position % window if chunked else window - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _waits_no_more(placing: tl.constexpr) -> tl.tensor:
    """Whether a program that has nothing to do may end before all in front have: one of each launch waits, or what
    waits for the launch would wait for nobody."""
    return not placing or tl.program_id(0) + tl.program_id(1) + tl.program_id(2) > 0


@triton.jit  # type: ignore[untyped-decorator]
def _fetch_block(
    block_at: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    kv: tl.tensor,
    num_slots: int,
    dim: tl.constexpr,
    wide: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """What is cached of a block comes into the card's cache, and with it what is not yet."""
    key = tl.minimum(tl.arange(0, _KEYS), _small(block_at + 1) - 1)
    at = (kv.to(tl.int64) * num_slots + tl.load(block_at) + key) * dim
    fetch_rows(keys_at + at, dim, wide, overlaps)
    fetch_rows(values_at + at, dim, wide, overlaps)


@triton.jit  # type: ignore[untyped-decorator]
def _own(
    blocks_at: tl.tensor, num_blocks: tl.tensor, row_at: tl.tensor, own_from: tl.tensor, splits: tl.constexpr
) -> tl.tensor:
    """Of these blocks of a tile's keys, every N-th, the rows of the round whose own keys are in them: the first, and
    where they end. The last blocks have them, or none. row_at: a key's row less its place. own_from: the place of the
    span's first row."""
    low, high, at, is_own = own_from, own_from, num_blocks - 1, num_blocks > 0
    while is_own:
        block_at = blocks_at + at * (splits * _BLOCK_SIZE)
        place = _small(block_at + 2)
        end = place + _small(block_at + 1)
        low, high = tl.where(end > own_from, tl.maximum(place, own_from), low), tl.maximum(high, end)
        at -= 1
        is_own = (end > own_from) & (at >= 0)
    return tl.maximum(row_at + low, 0), tl.minimum(row_at + high, tl.num_programs(0))


@triton.jit  # type: ignore[untyped-decorator]
def _own_places(
    low: tl.tensor,
    high: tl.tensor,
    table_at: tl.tensor,
    most_rows: int,
    cos_at: tl.tensor,
    sin_at: tl.tensor,
    dim: tl.constexpr,
    wide: tl.constexpr,
    turned: tl.constexpr,
) -> tl.tensor:
    """Of some rows from `low` on, which end at `high`: their slots, below 0 behind the end, and angles."""
    rows = low + tl.arange(0, _OWN_ROWS)
    slots = tl.load(table_at + _SLOTS * most_rows + rows, mask=rows < high, other=-1)
    positions = tl.load(table_at + _POSITIONS * most_rows + rows, mask=rows < high, other=0)
    cos, sin = angles(cos_at, sin_at, positions, slots >= 0, dim, wide, turned)
    return slots, cos, sin


@triton.jit  # type: ignore[untyped-decorator]
def _place_own(
    keys_lines_at: tl.tensor,
    low: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    k_weight_at: tl.tensor,
    v_weight_at: tl.tensor,
    eps: float,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    key_scales_at: tl.tensor,
    value_scales_at: tl.tensor,
    cells: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    num_lines: tl.constexpr,
    dim: tl.constexpr,
    wide: tl.constexpr,
    normed: tl.constexpr,
    values_normed: tl.constexpr,
    turned: tl.constexpr,
    small: tl.constexpr,
) -> None:
    """Keys and values of these rows of one kv head, whose cells begin at `cells`. keys_lines: in qkv, of row 0."""
    at, real = cells + slots, slots >= 0
    lines_at = keys_lines_at + (low + tl.arange(0, _OWN_ROWS)) * (num_lines * dim)
    values_lines_at = lines_at + (num_lines - num_kv_heads - num_heads) * dim
    k = turned_heads(lines_at, real, k_weight_at, eps, cos, sin, dim, wide, normed, turned)
    v = turned_heads(values_lines_at, real, v_weight_at, eps, cos, sin, dim, wide, values_normed, False)
    keep(k.to(keys_lines_at.dtype.element_ty), keys_at, key_scales_at, at, real, dim, wide, small)
    keep(v.to(keys_lines_at.dtype.element_ty), values_at, value_scales_at, at, real, dim, wide, small)


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
