"""Kernels of states.py, in Triton: linear attention of a round's rows on a card, between its products.

model/delta_net.py is the reference. All that changes from round to round is read from one tensor of integers, the
table, so that the same launches serve every round. A state goes from row to row, in registers, so that a row's bits are
the same whatever stands beside it, and however the rows before it were taken in. Must not know drafts, spans or ranks.
Imported on cards only: needs Triton. Annotations are Triton's, which reads them: no name of Python's may stand there.

Shapes: T rows, H value heads, G key heads, K and V of a key and a value, M = 2 G K + H V numbers of a row that the
convolution sees, F decays of all heads, X = M + H + F. Rows that are computed with: up to `most_rows` that were left,
then the round's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card.norms import rms_normed
from tpspec.model.card.overlap import begin

# The table, int64, of rounds of `most_rows` at most: how many rows that were left are computed with; for each row of
# the round two numbers; for each span seven and what is left before its root; for each row that is computed with what
# its convolution sees. Inputs are rows of the round, or ~ the number of one that is left, of all that are; beyond those
# is nothing, which is 0.
ROWS_AT = 1
ROW_SIZE = 2  # its span, if it is of a tree, else CHAINED or PADDING; a bit for each row of the tree on its path
CHAINED, PADDING = -2, -1
SPAN_SIZE = 7  # slot, whether it is fresh, first kept row, kept rows, first row, rows of the chain, rows

_ROWS_AT, _ROW_SIZE, _SPAN_SIZE = tl.constexpr(ROWS_AT), tl.constexpr(ROW_SIZE), tl.constexpr(SPAN_SIZE)
_PADDING = tl.constexpr(PADDING)
_LEAST = tl.constexpr(1e-6)  # see model/delta_net.py


def spans_at(most_rows: int) -> int:
    """Where spans stand in the table."""
    return ROWS_AT + ROW_SIZE * most_rows


def sights_at(before: int, most_rows: int) -> int:
    """Where what rows see does, of spans with so many rows before the root."""
    return spans_at(most_rows) + (SPAN_SIZE + before) * most_rows


@triton.jit  # type: ignore[untyped-decorator]
def _input(
    name: tl.tensor,
    columns: tl.tensor,
    real: tl.tensor,
    mixed_at: tl.tensor,
    rates_at: tl.tensor,
    left_at: tl.tensor,
    num_left: int,
    num_mixed: tl.constexpr,
    num_rates: tl.constexpr,
) -> tl.tensor:
    """Some columns of an input that the table names."""
    is_own, left = name >= 0, -1 - name
    is_mixed = columns < num_mixed
    x = tl.load(mixed_at + name * num_mixed + columns, mask=real & is_own & is_mixed, other=0.0)
    x += tl.load(rates_at + name * num_rates + columns - num_mixed, mask=real & is_own & ~is_mixed, other=0.0)
    is_left = real & (left >= 0) & (left < num_left)
    return x + tl.load(left_at + left * (num_mixed + num_rates) + columns, mask=is_left, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def convolve(
    mixed_at: tl.tensor,
    rates_at: tl.tensor,
    left_at: tl.tensor,
    table_at: tl.tensor,
    kernel_at: tl.tensor,
    decays_at: tl.tensor,
    biases_at: tl.tensor,
    conv_biases_at: tl.tensor,
    rows_at: tl.tensor,
    num_left: int,
    most_rows: int,
    scale: float,
    num_keys: tl.constexpr,
    num_values: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    sight: tl.constexpr,
    wide: tl.constexpr,
    sums: tl.constexpr,
    by_channel: tl.constexpr,
    biased: tl.constexpr,
    most_written: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """rows [most_rows + T, X]: queries, keys and values behind the convolution, of length one but for the values, then
    writes and logarithms of decays. Of mixed [T, M], rates [T, H + F] and left [num_left, X]. most_written: of a
    write. sums: see model/delta_rule.py; then lengths are left, and both rates one. by_channel: F is H K, and not H.

    Programs: T x the heads of a row, one for rates, and by_channel one for each head's decays; what was left is shared
    among those of the rows.
    """
    begin(overlaps)
    line, num_rows = tl.program_id(1), tl.num_programs(0)
    num_mixed: tl.constexpr = 2 * num_keys * key_dim + num_values * value_dim
    num_rates: tl.constexpr = num_values * (1 + key_dim) if by_channel else 2 * num_values
    is_key, is_rate = line < 2 * num_keys, line >= 2 * num_keys + num_values
    of_head = line - 2 * num_keys - num_values - 1  # whose decays; below 0: none, or all heads' rates
    size = tl.where(is_key, key_dim, tl.where(is_rate, num_values if by_channel else num_rates, value_dim))
    first = tl.where(is_key, line * key_dim, 2 * num_keys * key_dim + (line - 2 * num_keys) * value_dim)
    if by_channel:
        size = tl.where(of_head >= 0, key_dim, size)
        first = tl.where(of_head >= 0, num_mixed + num_values + of_head * key_dim, first)
    real, columns = tl.arange(0, wide) < size, first + tl.arange(0, wide)
    sights_at = table_at + _ROWS_AT + (_ROW_SIZE + _SPAN_SIZE + sight - 1) * most_rows
    for work in range(tl.program_id(0), num_rows + tl.load(table_at).to(tl.int32), num_rows):
        row = tl.where(work < num_rows, most_rows + work, work - num_rows)
        sight_at = sights_at + row * sight
        if is_rate:
            name = tl.load(sight_at + sight - 1)
            x = _input(name, columns, real, mixed_at, rates_at, left_at, num_left, num_mixed, num_rates)
            is_write = columns < num_mixed + num_values
            rate = tl.where(is_write, columns - num_mixed, columns - num_mixed - num_values)
            head = rate
            if by_channel:
                head = tl.where(is_write, rate, of_head)
            step = x.to(tl.float32) + tl.load(biases_at + rate, mask=real, other=0.0)
            step = tl.where(step > 20, step, tl.log(1 + tl.exp(step)))
            write = step
            if not sums:
                write = (1 / (1 + tl.exp(-x.to(tl.float32)))).to(x.dtype).to(tl.float32) * most_written
            made = tl.where(is_write, write, -step * tl.load(decays_at + head, mask=real, other=0.0))
        else:
            seen = tl.zeros((wide,), tl.float32)
            if biased:
                seen += tl.load(conv_biases_at + columns, mask=real, other=0.0)
            for back in tl.static_range(sight):
                name = tl.load(sight_at + back)
                x = _input(name, columns, real, mixed_at, rates_at, left_at, num_left, num_mixed, num_rates)
                seen += x.to(tl.float32) * tl.load(kernel_at + back * num_mixed + columns, mask=real, other=0.0)
            made = seen.to(mixed_at.dtype.element_ty).to(tl.float32)
            made = (made / (1 + tl.exp(-made))).to(mixed_at.dtype.element_ty).to(tl.float32)
            if is_key and not sums:
                made *= tl.rsqrt(tl.sum(made * made) + _LEAST)
                if line < num_keys:
                    made *= scale
        tl.store(rows_at + row.to(tl.int64) * (num_mixed + num_rates) + columns, made, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _taken_in(
    state: tl.tensor,
    row_at: tl.tensor,
    key: tl.tensor,
    head: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    num_keys: tl.constexpr,
    num_values: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    sums: tl.constexpr,
    by_channel: tl.constexpr,
) -> tl.tensor:
    """The state behind a row."""
    k = tl.load(row_at + (num_keys + key) * key_dim + keys, mask=keys < key_dim, other=0.0)
    values_at = row_at + 2 * num_keys * key_dim
    v = tl.load(values_at + head * value_dim + values, mask=values < value_dim, other=0.0)
    write_at = values_at + num_values * value_dim + head
    write, decays_at = tl.load(write_at), write_at + num_values
    if by_channel:
        decays_at += head * (key_dim - 1) + keys
        state *= tl.exp(tl.load(decays_at, mask=keys < key_dim, other=0.0))[:, None]
    else:
        state *= tl.exp(tl.load(decays_at))
    if not sums:
        v -= tl.sum(state * k[:, None], 0)
    return state + k[:, None] * (v * write)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _answer(
    state: tl.tensor,
    row_at: tl.tensor,
    key: tl.tensor,
    head: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    skips_at: tl.tensor,
    num_keys: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    sums: tl.constexpr,
) -> tl.tensor:
    """What a row's query is answered by the state behind it, and by the row's own value where states sum."""
    q = tl.load(row_at + key * key_dim + keys, mask=keys < key_dim, other=0.0)
    answer = tl.sum(state * q[:, None], 0)
    if sums:
        v_at = row_at + 2 * num_keys * key_dim + head * value_dim + values
        answer += tl.load(skips_at + head) * tl.load(v_at, mask=values < value_dim, other=0.0)
    return answer


@triton.jit  # type: ignore[untyped-decorator]
def take_in(
    rows_at: tl.tensor,
    mixed_at: tl.tensor,
    rates_at: tl.tensor,
    left_at: tl.tensor,
    table_at: tl.tensor,
    key_of_at: tl.tensor,
    skips_at: tl.tensor,
    states_at: tl.tensor,
    answers_at: tl.tensor,
    num_left: int,
    most_rows: int,
    length: int,
    num_keys: tl.constexpr,
    num_values: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    before: tl.constexpr,
    wide_key: tl.constexpr,
    piece: tl.constexpr,
    wide_left: tl.constexpr,
    sums: tl.constexpr,
    by_channel: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """States [slots, H, K, V] behind the spans' chains, whose rows in the round are answered: answers [T, H, V]. And
    what is left, in `length` rows a slot, from now on: what stands before the root, and the trees' rows.

    Programs: spans (as many as rows, at most) x H x pieces of V. Each leaves `wide_left` columns of an input.
    """
    begin(overlaps)
    span_at = table_at + _ROWS_AT + _ROW_SIZE * most_rows + tl.program_id(0) * (_SPAN_SIZE + before)
    num_rows = tl.load(span_at + 6)
    if num_rows == 0:
        return  # there are fewer spans
    slot, is_fresh, first_kept, num_kept = (
        tl.load(span_at),
        tl.load(span_at + 1),
        tl.load(span_at + 2),
        tl.load(span_at + 3),
    )
    first, num_chained = tl.load(span_at + 4), tl.load(span_at + 5)
    head = tl.program_id(1)
    key = tl.load(key_of_at + head)
    num_mixed: tl.constexpr = 2 * num_keys * key_dim + num_values * value_dim
    num_rates: tl.constexpr = num_values * (1 + key_dim) if by_channel else 2 * num_values
    num_inputs: tl.constexpr = num_mixed + num_rates
    keys, values = tl.arange(0, wide_key), tl.program_id(2) * piece + tl.arange(0, piece)
    real = (keys < key_dim)[:, None] & (values < value_dim)[None, :]
    state_at = states_at + (slot * num_values + head) * key_dim * value_dim
    state_at = state_at + keys[:, None] * value_dim + values[None, :]
    state = tl.load(state_at, mask=real & (is_fresh == 0), other=0.0)
    for i in tl.range(0, num_kept + num_chained, num_stages=3):  # the next rows come while one is taken in
        row = tl.where(i < num_kept, first_kept + i, most_rows + first + i - num_kept)
        row_at = rows_at + row * num_inputs
        state = _taken_in(
            state, row_at, key, head, keys, values, num_keys, num_values, key_dim, value_dim, sums, by_channel
        )  # fmt: skip
        if i >= num_kept:
            answer = _answer(
                state, row_at, key, head, keys, values, skips_at, num_keys, key_dim, value_dim, sums
            )  # fmt: skip
            to = answers_at + ((first + i - num_kept) * num_values + head) * value_dim + values
            tl.store(to, answer.to(answers_at.dtype.element_ty), mask=values < value_dim)
    tl.store(state_at, state, mask=real)

    columns = (head * tl.num_programs(2) + tl.program_id(2)) * wide_left + tl.arange(0, wide_left)
    to = left_at + slot * length * num_inputs + columns
    real_left = columns < num_inputs
    for i in tl.static_range(before):  # what comes from the same slot stands behind where it goes, or there
        name = tl.load(span_at + _SPAN_SIZE + i)
        x = _input(name, columns, real_left, mixed_at, rates_at, left_at, num_left, num_mixed, num_rates)
        tl.store(to + i * num_inputs, x, mask=real_left)
    for i in range(num_rows - num_chained):
        name = first + num_chained + i
        x = _input(name, columns, real_left, mixed_at, rates_at, left_at, num_left, num_mixed, num_rates)
        tl.store(to + (before + i) * num_inputs, x, mask=real_left)


@triton.jit  # type: ignore[untyped-decorator]
def look_at(
    rows_at: tl.tensor,
    table_at: tl.tensor,
    key_of_at: tl.tensor,
    skips_at: tl.tensor,
    states_at: tl.tensor,
    answers_at: tl.tensor,
    most_rows: int,
    num_keys: tl.constexpr,
    num_values: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    before: tl.constexpr,
    wide_key: tl.constexpr,
    piece: tl.constexpr,
    sums: tl.constexpr,
    by_channel: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Answers of the trees' rows, each from the state behind its span's chain down its path; 0 for padding. Programs:
    T x H x pieces of V."""
    begin(overlaps)
    this, head = tl.program_id(0), tl.program_id(1)
    span = tl.load(table_at + _ROWS_AT + this * _ROW_SIZE)
    keys, values = tl.arange(0, wide_key), tl.program_id(2) * piece + tl.arange(0, piece)
    to = answers_at + (this.to(tl.int64) * num_values + head) * value_dim + values
    if span < 0:
        if span == _PADDING:
            tl.store(to, tl.zeros((piece,), answers_at.dtype.element_ty), mask=values < value_dim)
        return
    path = tl.load(table_at + _ROWS_AT + this * _ROW_SIZE + 1)
    span_at = table_at + _ROWS_AT + _ROW_SIZE * most_rows + span * (_SPAN_SIZE + before)
    slot, root = tl.load(span_at), tl.load(span_at + 4) + tl.load(span_at + 5)
    key = tl.load(key_of_at + head)
    real = (keys < key_dim)[:, None] & (values < value_dim)[None, :]
    state_at = states_at + (slot * num_values + head) * key_dim * value_dim
    state = tl.load(state_at + keys[:, None] * value_dim + values[None, :], mask=real, other=0.0)
    num_mixed: tl.constexpr = 2 * num_keys * key_dim + num_values * value_dim
    num_inputs: tl.constexpr = num_mixed + (num_values * (1 + key_dim) if by_channel else 2 * num_values)
    for i in range(this - root + 1):
        if (path >> i) & 1 != 0:
            row_at = rows_at + (most_rows + root + i) * num_inputs
            state = _taken_in(
                state, row_at, key, head, keys, values, num_keys, num_values, key_dim, value_dim, sums, by_channel
            )  # fmt: skip
    own_at = rows_at + (most_rows + this.to(tl.int64)) * num_inputs
    answer = _answer(state, own_at, key, head, keys, values, skips_at, num_keys, key_dim, value_dim, sums)
    tl.store(to, answer.to(answers_at.dtype.element_ty), mask=values < value_dim)


@triton.jit  # type: ignore[untyped-decorator]
def gated(
    answers_at: tl.tensor,
    weight_at: tl.tensor,
    eps: float,
    gate_at: tl.tensor,
    out_at: tl.tensor,
    squares_at: tl.tensor,
    dim: tl.constexpr,
    wide: tl.constexpr,
    sums: tl.constexpr,
    normed: tl.constexpr,
    late: tl.constexpr,
    by_channel: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """RMSNorm of each head's answer times silu of its gate, by_channel its sigmoid; all [T, H, V]. Where states sum,
    RMSNorm of that, for heads with `dim` numbers together, each of which has a weight, if normed. late: those of other
    ranks are among them, and what would be divided by is told: squares [T]. Programs: T x H, or as many as have one
    norm."""
    columns, part = tl.arange(0, wide), tl.program_id(1)
    own = part * dim if sums else 0
    weight = 0.0
    if normed:
        weight = tl.load(weight_at + own + columns, mask=columns < dim, other=0.0)
    begin(overlaps)
    at = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + part) * dim + columns
    x = tl.load(answers_at + at, mask=columns < dim, other=0.0)
    gate = tl.load(gate_at + at, mask=columns < dim, other=0.0).to(tl.float32)
    passes = gate / (1 + tl.exp(-gate))
    if not normed:
        made = x.to(tl.float32) * passes
    elif by_channel:
        made = rms_normed(x, weight, eps, dim) / (1 + tl.exp(-gate))
    elif late:
        passed = x.to(tl.float32) * passes
        tl.store(squares_at + tl.program_id(0), tl.sum(passed * passed))
        made = passed * weight
    elif sums:
        made = rms_normed(x.to(tl.float32) * passes, weight, eps, dim)
    else:
        made = rms_normed(x, weight, eps, dim).to(x.dtype).to(tl.float32) * passes
    tl.store(out_at + at, made.to(out_at.dtype.element_ty), mask=columns < dim)
