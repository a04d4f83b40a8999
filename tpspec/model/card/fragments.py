"""Products of few rows with codes of 4 bits on a CUDA card, whose numbers go from memory to where tensor cores take
them: no memory of a processor lies between. In Gluon, which says what lies where; model/quantized.py has the reference.

A product in Triton's own language (coded.py) brings rows and codes into a processor's memory and from there to
tensor cores. Where a matrix has few tiles of outputs that takes longer: a program is short, and waits. By this one, on
an H200, a matrix of 6144 outputs took 7.2 us for 9.1, and one of 28672, of which there is enough to do meanwhile, 21.6
for 22.0; of codes of 8 bits all took longer. Which numbers meet in one instruction is another here, so that last bits
are: how a matrix is read follows from it and the card alone, whatever the number of rows. Must not know what a matrix
is of. Imported on cards only.

Layouts say where a tensor's numbers lie. Of sums [N, O, R] a warp has one of N groups; so it has of words [N, O, C],
several side by side a thread, which are one load, and of rows [N, C, R] as many columns. What is loaded are pairs, or
a thread would take apart what it carries from turn to turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from tpspec.model.card.coded import SCALE_LINES, CodedLinear, CodedProduct
from tpspec.model.card.codes import as_numbers, floats_of, kept_numbers, zeros_of
from tpspec.model.card.overlap import LINE_BYTES, begin, prefetch
from tpspec.model.card.products import as_kept
from tpspec.model.card.rows import gated
from tpspec.model.card.shares import added, has_few_tiles, is_last, share_of
from tpspec.model.card.tiles import FRAGMENT_TILES, GATED_FRAGMENT_TILES, TILE_OUTPUTS, FragmentTile

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.model.card.shares import Shares
    from tpspec.model.quantized import Matrix

BITS = 4  # of a code
MOST_SIDE_BY_SIDE = 8  # words of a thread: 16 bytes
FETCHED_GROUPS = 8  # of a tile of 16 outputs: what a card reads in the time of a small kernel, as of `few_coded`

_LINE_BYTES, _SCALE_LINES = tl.constexpr(LINE_BYTES), tl.constexpr(SCALE_LINES)


def product_of(matrix: Matrix, bias_O: Tensor | None, device: torch.device) -> CodedProduct[Any]:
    """Of few rows by the kernel that is faster there."""
    is_short = has_few_tiles(triton.cdiv(matrix.num_outputs, TILE_OUTPUTS), device)
    has_fragments = matrix.bits == BITS and matrix.table is None
    return (FragmentLinear if has_fragments and is_short else CodedLinear)(matrix, bias_O)


class FragmentLinear(CodedProduct[FragmentTile]):
    """By the kernel below, which adds in another order than that of `CodedLinear`: last bits are others."""

    def __init__(self, matrix: Matrix, bias_O: Tensor | None) -> None:
        assert matrix.bits == BITS, "a word has as many codes as it has quarters"
        assert matrix.table is None, "codes are put below a power of two"
        super().__init__(matrix, bias_O, FRAGMENT_TILES, GATED_FRAGMENT_TILES)

    def few(self, x_TI: Tensor, tile: FragmentTile, gate: str = "") -> Tensor:
        num_outputs = self._num_outputs
        y_TO = x_TI.new_empty(len(x_TI), num_outputs // 2 if gate else num_outputs)
        num_tiles = triton.cdiv(len(x_TI), tile.rows), triton.cdiv(num_outputs, tile.outputs)
        x_TW, codes, *others = self.given(x_TI, y_TO)
        few_fragments[(*num_tiles, self._shares.splits)](
            x_TW.flatten().view(torch.int32), codes.view(torch.int32), *others, self._counters,
            self._shares.partials(x_TI, num_outputs), self._grid.width, gate=gate,
            **in_tile(tile, self._shares, codes.shape[-1]), **self._of_codes,
        )  # fmt: skip
        return y_TO


def in_tile(tile: FragmentTile, shares: Shares, num_words: int) -> dict[str, Any]:
    """Of the kernel. num_words: of a group, of an output."""
    return {
        "tile_rows": tile.rows, "tile_outputs": tile.outputs, "together": TILE_OUTPUTS, "ahead": tile.ahead,
        "at_once": shares.at_once, "num_warps": shares.at_once, "splits": shares.splits,
        "side_by_side": side_by_side(num_words), "fetched_groups": FETCHED_GROUPS,
        "inline_ptx": not knobs.runtime.interpret,
    }  # fmt: skip


def side_by_side(num_words: int) -> int:
    """Of so many words of a group, which four threads have in turn."""
    return min(MOST_SIDE_BY_SIDE, num_words // 4)


@gluon.jit  # type: ignore[untyped-decorator]
def _first(size: tl.constexpr, layout: tl.constexpr) -> tl.tensor:
    """Indices [size, 1, 1] of what has that layout."""
    return gl.arange(0, size, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]


@gluon.jit  # type: ignore[untyped-decorator]
def _second(size: tl.constexpr, layout: tl.constexpr) -> tl.tensor:
    """[1, size, 1]."""
    return gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]


@gluon.jit  # type: ignore[untyped-decorator]
def _third(size: tl.constexpr, layout: tl.constexpr) -> tl.tensor:
    """[1, 1, size]."""
    return gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


@gluon.jit  # type: ignore[untyped-decorator]
def _column(size: tl.constexpr, layout: tl.constexpr) -> tl.tensor:
    """[size, 1], of two dimensions."""
    return gl.arange(0, size, layout=gl.SliceLayout(1, layout))[:, None]


@gluon.jit  # type: ignore[untyped-decorator]
def _row(size: tl.constexpr, layout: tl.constexpr) -> tl.tensor:
    """[1, size]."""
    return gl.arange(0, size, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit  # type: ignore[untyped-decorator]
def _outputs(within: tl.tensor, first: tl.tensor, own: tl.constexpr, num_outputs: int) -> tl.tensor:
    """Of a matrix, those of a tile, which begins with `own` of its own outputs; with a gate there are as many of what
    it gates. Where there are fewer, the last one once more."""
    return tl.minimum(first + within % own, num_outputs - 1) + within // own * num_outputs


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_scales(
    at: tl.tensor,
    tile: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    of_lines: tl.constexpr,
) -> None:
    """Of tiles [S, 1] of `size` scales each, the first lines from one on."""
    line = _row(_SCALE_LINES, of_lines) * (_LINE_BYTES // (at.dtype.element_ty.primitive_bitwidth // 8))
    prefetch(at + tile.to(tl.int64) * size + tl.minimum(first + line, size - 1))


@gluon.jit  # type: ignore[untyped-decorator]
def _read(
    from_pairs: tl.tensor,
    from_scales: tl.tensor,
    from_zeros: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    columns: tl.constexpr,
    kept_zeros: tl.constexpr,
    at_once: tl.constexpr,
    together: tl.constexpr,
    of_pairs: tl.constexpr,
    of_scales: tl.constexpr,
) -> tl.tensor:
    """Of so many groups at once pairs of words, scales and zeros as they are kept: whoever looks at them waits for
    them. Behind the end it is the last group once more, with scales of nothing."""
    group = tl.minimum(first + _first(at_once, of_pairs), end - 1)
    pairs = tl.load(from_pairs + group * (together * columns // 2), cache_modifier=".cg")
    group = first + _column(at_once, of_scales)
    at, real = tl.minimum(group, end - 1) * together, group < end
    scales, zeros = kept_numbers(from_scales, from_zeros, at, real, kept_zeros)
    return pairs, scales, zeros


@gluon.jit  # type: ignore[untyped-decorator]
def _apart(pairs: tl.tensor) -> tl.tensor:
    """[..., 2]: what has 16 bits, of pairs."""
    return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))


@gluon.jit  # type: ignore[untyped-decorator]
def _words(pairs: tl.tensor, of_words: tl.constexpr) -> tl.tensor:
    """[N, O, C] of pairs [N, O, C / 2]: what a thread carries from turn to turn is pairs, or it would take them apart.
    They stay where they are."""
    words = tl.reshape(_apart(pairs), (pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]))
    return gl.convert_layout(words, of_words, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_codes(
    lines_at: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    size: tl.constexpr,
    at_once: tl.constexpr,
    of_lines: tl.constexpr,
) -> None:
    """Of so many groups at once, each of `size` pairs."""
    prefetch(lines_at + tl.minimum(first + _column(at_once, of_lines), end - 1) * size)


@gluon.jit  # type: ignore[untyped-decorator]
def _read_rows(
    from_x: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    group: tl.constexpr,
    at_once: tl.constexpr,
    of_x_pairs: tl.constexpr,
) -> tl.tensor:
    """Of so many groups at once what rows have in each quarter, as pairs [N, C / 2, R]. Behind the end it is the last
    group once more."""
    pairs: tl.constexpr = group // 8
    from_x += tl.minimum(first + _first(at_once, of_x_pairs), end - 1) * (group // 2)
    x, second = tl.load(from_x), tl.load(from_x + pairs)
    return x, second, tl.load(from_x + 2 * pairs), tl.load(from_x + 3 * pairs)


@gluon.jit  # type: ignore[untyped-decorator]
def _rows(pairs: tl.tensor, like: tl.tensor, of_x: tl.constexpr) -> tl.tensor:
    """[N, C, R] of pairs [N, C / 2, R], of the type of `like`; as of `_words`."""
    numbers = tl.permute(_apart(pairs), (0, 1, 3, 2))
    numbers = tl.reshape(numbers, (pairs.shape[0], 2 * pairs.shape[1], pairs.shape[2]))
    return gl.convert_layout(numbers.to(like.dtype.element_ty, bitcast=True), of_x, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _turn(
    sums: tl.tensor,
    x: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    last: tl.tensor,
    y_at: tl.tensor,
    pairs: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bits: tl.constexpr,
    kept_zeros: tl.constexpr,
    of_sums: tl.constexpr,
    of_words: tl.constexpr,
    of_x: tl.constexpr,
    inline_ptx: tl.constexpr,
) -> tl.tensor:
    """Sums go on by so many groups at once."""
    x, second = _rows(x, y_at, of_x), _rows(second, y_at, of_x)
    third, last = _rows(third, y_at, of_x), _rows(last, y_at, of_x)
    words, none = _words(pairs, of_words), gl.full(sums.shape, 0.0, tl.float32, layout=of_sums)
    part = mma_v2(floats_of(words, x, 0, bits, "", inline_ptx), x, none)
    part = mma_v2(floats_of(words, x, 1, bits, "", inline_ptx), second, part)
    part = mma_v2(floats_of(words, x, 2, bits, "", inline_ptx), third, part)
    part = mma_v2(floats_of(words, x, 3, bits, "", inline_ptx), last, part)
    ones = gl.full(words.shape, 1.0, x.dtype, layout=of_words)
    total = mma_v2(ones, second, mma_v2(ones, x, none))  # of each row, as often as there are outputs
    total = mma_v2(ones, last, mma_v2(ones, third, total))
    scales, zeros = as_numbers(scales, zeros, kept_zeros)
    return sums + part * scales[:, :, None] + total * zeros_of(scales, zeros, x, bits, kept_zeros)[:, :, None]


@gluon.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def few_fragments(
    x_at: tl.tensor,
    pairs_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    y_at: tl.tensor,
    num_rows: int,
    num_outputs: int,
    num_groups: int,
    counters_at: tl.tensor,
    partials_at: tl.tensor,
    width: int,
    group: tl.constexpr,
    bits: tl.constexpr,
    kept_zeros: tl.constexpr,
    gate: tl.constexpr,
    at_once: tl.constexpr,
    splits: tl.constexpr,
    ahead: tl.constexpr,
    side_by_side: tl.constexpr,
    fetched_groups: tl.constexpr,
    inline_ptx: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    together: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """As `few_coded`: a tile of y [T, O] from x [T, W], of codes as pairs of words. What a turn multiplies comes while
    the one before it does; ahead: turns, of which codes then come into the card's cache."""
    columns: tl.constexpr = group // 4
    of_sums: tl.constexpr = gl.NVMMADistributedLayout([2, 0], [at_once, 1, 1], [1, 16, 8])
    of_words: tl.constexpr = gl.DotOperandLayout(0, of_sums, side_by_side)
    of_pairs: tl.constexpr = gl.DotOperandLayout(0, of_sums, side_by_side // 2)
    of_x: tl.constexpr = gl.DotOperandLayout(1, of_sums, side_by_side)
    of_x_pairs: tl.constexpr = gl.DotOperandLayout(1, of_sums, side_by_side // 2)
    of_scales: tl.constexpr = gl.SliceLayout(2, of_sums)
    # Where shares meet each number is read by one thread, not by one of each warp.
    of_shares: tl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, at_once], [0, 1])
    of_y: tl.constexpr = gl.SliceLayout(0, of_sums) if splits == 1 else of_shares
    of_lines: tl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [at_once, 1], [1, 0])
    own: tl.constexpr = tile_outputs if gate == "" else tile_outputs // 2
    of_group: tl.constexpr = together * columns // 2  # pairs of `together` outputs
    tile_lines: tl.constexpr = of_group * 4 // _LINE_BYTES
    first_row, first_output = tl.program_id(0) * tile_rows, tl.program_id(1) * own
    first, end = share_of(num_groups, at_once, splits)
    size = num_groups * together  # scales of `together` outputs

    line = _row(tile_outputs // together * tile_lines, of_lines)
    tile = _outputs(line // tile_lines * together, first_output, own, num_outputs) // together
    lines_at = pairs_at + tile.to(tl.int64) * (size * (columns // 2)) + line % tile_lines * (_LINE_BYTES // 4)
    fetched: tl.constexpr = fetched_groups // at_once if overlaps else 2  # turns; two are read at once
    if overlaps:
        for turn in tl.static_range(fetched):
            _fetch_codes(lines_at, first + turn * at_once, end, of_group, at_once, of_lines)
        tile = _column(tile_outputs // together, of_lines) * together
        tile = _outputs(tile, first_output, own, num_outputs) // together
        _fetch_scales(scales_at, tile, first * together, size, of_lines)
        if kept_zeros == "apart":
            _fetch_scales(zeros_at, tile, first * together, size, of_lines)

    output = _outputs(_second(tile_outputs, of_pairs), first_output, own, num_outputs)
    output = (output // together).to(tl.int64) * size + output % together
    from_pairs = pairs_at + output * (columns // 2) + _third(columns // 2, of_pairs)
    output = _outputs(_row(tile_outputs, of_scales), first_output, own, num_outputs)
    output = (output // together).to(tl.int64) * size + output % together
    from_scales, from_zeros = scales_at + output, zeros_at + output
    row = tl.minimum(first_row + _third(tile_rows, of_x_pairs), num_rows - 1)
    from_x = x_at + row.to(tl.int64) * (width // 2) + _second(columns // 2, of_x_pairs)
    sums = gl.full((at_once, tile_outputs, tile_rows), 0.0, tl.float32, layout=of_sums)
    pairs, scales, zeros = _read(
        from_pairs, from_scales, from_zeros, first, end, columns, kept_zeros, at_once, together, of_pairs, of_scales
    )
    more_pairs, more_scales, more_zeros = _read(
        from_pairs, from_scales, from_zeros, first + at_once, end, columns, kept_zeros, at_once, together, of_pairs,
        of_scales,
    )  # fmt: skip
    begin(overlaps)
    x, second, third, last = _read_rows(from_x, first, end, group, at_once, of_x_pairs)
    more_x, more_second, more_third, more_last = _read_rows(from_x, first + at_once, end, group, at_once, of_x_pairs)
    if inline_ptx:
        for turn in tl.static_range(fetched, ahead):
            _fetch_codes(lines_at, first + turn * at_once, end, of_group, at_once, of_lines)
    # Two turns, each with registers of its own: none is moved, for which it had to be there. The second stands behind a
    # branch, which no instruction passes: loads of the first begin before it, and come while it multiplies.
    for at in range(first, end, 2 * at_once):
        sums = _turn(
            sums, x, second, third, last, y_at, pairs, scales, zeros, bits, kept_zeros, of_sums, of_words, of_x,
            inline_ptx,
        )  # fmt: skip
        pairs, scales, zeros = _read(
            from_pairs, from_scales, from_zeros, at + 2 * at_once, end, columns, kept_zeros, at_once, together,
            of_pairs, of_scales,
        )  # fmt: skip
        x, second, third, last = _read_rows(from_x, at + 2 * at_once, end, group, at_once, of_x_pairs)
        if inline_ptx and ahead > 0:
            _fetch_codes(lines_at, at + ahead * at_once, end, of_group, at_once, of_lines)
        if at + at_once < end:
            sums = _turn(
                sums, more_x, more_second, more_third, more_last, y_at, more_pairs, more_scales, more_zeros, bits,
                kept_zeros, of_sums, of_words, of_x, inline_ptx,
            )  # fmt: skip
            more_pairs, more_scales, more_zeros = _read(
                from_pairs, from_scales, from_zeros, at + 3 * at_once, end, columns, kept_zeros, at_once, together,
                of_pairs, of_scales,
            )  # fmt: skip
            more_x, more_second, more_third, more_last = _read_rows(
                from_x, at + 3 * at_once, end, group, at_once, of_x_pairs
            )
            if inline_ptx and ahead > 0:
                _fetch_codes(lines_at, at + (ahead + 1) * at_once, end, of_group, at_once, of_lines)

    made = gl.convert_layout(tl.sum(sums, 0), of_y)
    row, within = first_row + _row(tile_rows, of_y), _column(tile_outputs, of_y)
    if splits > 1:
        count = num_outputs if gate == "" else 2 * num_outputs
        real = (row < num_rows) & (first_output + within % own < num_outputs)
        own_partials = partials_at + row * count + _outputs(within, first_output, own, num_outputs)
        tl.store(own_partials + tl.program_id(2) * (num_rows * count), made, mask=real)
        if not is_last(counters_at, splits):
            return
        made = added(own_partials, num_rows * count, real, splits)
    if gate != "":
        gates, ups = tl.split(tl.permute(tl.reshape(made, (2, own, tile_rows)), (1, 2, 0)))
        made = gl.convert_layout(gated(as_kept(gates, y_at), as_kept(ups, y_at), gate), of_y)
    output = first_output + _column(own, of_y)
    to = y_at + row.to(tl.int64) * num_outputs + output
    tl.store(to, made.to(y_at.dtype.element_ty), mask=(row < num_rows) & (output < num_outputs))
