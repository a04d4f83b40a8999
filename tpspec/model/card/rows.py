"""The table that tells a card of a round's rows, and what an MLP does between its products, in Triton; heads are in
heads.py and attention.py.

All that changes from round to round is read from one tensor of integers, the table, so that the same launches serve
every round. Must not know drafts, spans or ranks. Imported on cards only: needs Triton. Annotations are Triton's, which
reads them: no name of Python's may stand there.

Shapes: T rows, C mlp channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpspec.model.card.overlap import begin

# The table, int64: for each of so many rows four numbers (in columns), then seven for each of as many tiles, then three
# for each block of keys, as the names below say. A span's rows are a chain, which see all before them, and behind it a
# tree, of which a row sees the chain and those of the tree that it has a bit for. Places are counted from the text's
# beginning, as rows and their keys stand; positions are what rope knows, and of a tree's rows no places.
MOST_ROWS = 64  # of a recorded round; of a tree
ROW_POSITION, ROW_SLOT, ROW_SEES, ROW_BLOCKS = range(4)  # slot -1: padding
ROW_SIZE = 4
# First row of the span's tree, how far behind it the tile's begin, rows, the tree's place, rows of the span before its
# tree, the range of the blocks that the tile sees.
TILE_SIZE = 7
TILE_PLACE = 3  # of these, the tree's place
BLOCK_SIZE = 3  # first slot, keys, place of the first key
KEYS = 64  # of a block at most


@triton.jit  # type: ignore[untyped-decorator]
def gated(x: tl.tensor, up: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """act(x) * up, in float32. See model/rows.inc for kinds of act."""
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
    limit: float,
    wide: tl.constexpr,
    kind: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """act(gate) * up: [T, 2C] -> [T, C]. limit: of "limited" alone. A program for `wide` channels of a row."""
    begin(overlaps)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    real = columns < width
    x = tl.load(gate_up_at + row * 2 * width + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up_at + row * 2 * width + width + columns, mask=real, other=0.0).to(tl.float32)
    if kind == "limited":
        x = x / (1 + tl.exp(-x))
        y = tl.where(x > limit, limit, x) * tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    else:
        y = gated(x, up, kind)
    tl.store(out_at + row * width + columns, y.to(out_at.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def act(
    up_at: tl.tensor,
    out_at: tl.tensor,
    width: int,
    above: float,
    below: float,
    slope: float,
    wide: tl.constexpr,
    kind: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Of an MLP without a gate: act(up), [T, C] -> [T, C]. above, below, slope: of "xielu" alone. Programs as above."""
    begin(overlaps)
    at = tl.program_id(0).to(tl.int64) * width
    columns = tl.program_id(1) * wide + tl.arange(0, wide)
    real = columns < width
    x = tl.load(up_at + at + columns, mask=real, other=0.0).to(tl.float32)
    if kind == "gelu_alone":
        y = gated(x, 1.0, "gelu")
    elif kind == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    else:
        powers = 1 / 120 + x * (1 / 720 + x * (1 / 5040))
        powers = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * powers)))
        bent = tl.where(x < -0.5, tl.exp(tl.minimum(x, 0.0)) - 1 - x, powers)
        y = tl.where(x > 0, above * x * x, below * bent) + slope * x
    tl.store(out_at + at + columns, y.to(out_at.dtype.element_ty), mask=real)
