"""What rounds take of a card's memory beside weights and caches: logits, tables, and what rows are on their way.

Of shapes and shards, in bytes, rather more than less. What CUDA, NCCL and an allocator take is not of a model, and no
part of it. Must not know how a forward is made.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from tpspec.published.matrix_bytes import DTYPE_BYTES
from tpspec.topology import feeding
from tpspec.topology.caches import num_positions
from tpspec.topology.shards import by_heads
from tpspec.topology.sizes import WIDE_BYTES

if TYPE_CHECKING:
    from tpspec.published.places import Fused
    from tpspec.published.shape import ModelShape
    from tpspec.topology.config import Topology
    from tpspec.topology.shards import Shard

ROW_COUNTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # rows of forwards that are recorded
WIDE_COUNTS = (96, 128, 192, 256)  # the same of rounds that verify for many texts, as far as there may be such
SCATTERED_BLOCKS = 1 << 16  # that a table has room for in any case
BLOCK_BYTES = 24  # three integers
SPLITS = 8  # of the keys of rows that are few; of more rows they are fewer
DRAWN_BYTES = 12  # of a logit that is drawn from: in float32, and in float64 where sums are told
SCORE_BYTES = 14  # of a score, as softmax makes odds of it, and what is seen
USUAL_ROWS = 8  # that a text verifies at most, where a draft is as long as pays
STEPS = 2  # of few rows, and of many; each has tables of its own, as those of wide recordings have


def most_blocks(num_slots: int) -> int:
    """Pieces of keys in one run of slots that a round may have, in a cache of so many.

    One of a key each, and shared, in a small cache; of a large one in pages of eight slots or more, shared.
    """
    return min(2 * num_slots, max(SCATTERED_BLOCKS, num_slots // 4))


def most_verified(topology: Topology) -> int:
    """Rows of a round that verifies drafts for as many texts as may run; 0 where all rounds have as many rows. What is
    longer than usual, or than a text's rows of a recording, does without one."""
    if topology.deterministic:
        return 0
    draft, rows = topology.draft, USUAL_ROWS
    if draft.source == "none":
        rows = 1
    elif draft.tokens != "auto":
        rows = min(1 + draft.tokens, ROW_COUNTS[-1])
    return min(topology.engine.max_rows, rows * topology.serve.max_running)


def wide_counts(num_verified: int) -> tuple[int, ...]:
    """Rows of more recordings, where a round may verify so many."""
    if num_verified <= ROW_COUNTS[-1]:
        return ()
    return WIDE_COUNTS[: bisect_left(WIDE_COUNTS, num_verified) + 1]


def recorded_bytes(num_each: int, dtype: str, num_verified: int = 0) -> int:
    """Of what recordings keep, logits say, so many numbers a row."""
    return sum(ROW_COUNTS + wide_counts(num_verified)) * DTYPE_BYTES[dtype] * num_each


def fixed_bytes(shape: ModelShape, shard: Shard, dtype: str, num_slots: int, fixed_rows: int) -> int:
    """What rounds of so many rows each take besides, which torch's steps run: of the longest text in a layer its keys
    and values, and scores of every head and row."""
    positions = num_positions(shape, num_slots)
    sorts = by_heads(shape, shard)
    kept = max(2 * len(one.shard.kv_heads) * one.shape.head_dim for one in sorts) * DTYPE_BYTES[dtype]
    return positions * (kept + SCORE_BYTES * fixed_rows * max(len(one.shard.heads) for one in sorts))


def working_bytes(
    shape: ModelShape, shard: Shard, dtype: str, num_slots: int, max_rows: int, num_verified: int = 0
) -> int:
    """Of a shard whose cache has so many slots, in rounds of as many rows, which verify so many of them."""
    rows, wide = max(max_rows, ROW_COUNTS[-1]), wide_counts(num_verified)
    logits = recorded_bytes(1, dtype, num_verified) + rows * (DTYPE_BYTES[dtype] + DRAWN_BYTES)
    turned = 2 * DTYPE_BYTES[dtype] * num_positions(shape, num_slots)
    layers = [(one.shape.head_dim, bool(one.shape.num_windowed)) for one in by_heads(shape, shard)]
    tables = (STEPS + bool(wide)) * BLOCK_BYTES * most_blocks(num_slots) * (1 + (shape.window is not None))
    ropes = sum(head_dim * turned * (1 + windowed) for head_dim, windowed in layers)
    if shape.indexer is not None:
        ropes += shape.indexer.dim * turned
    made = (rows + max(wide, default=ROW_COUNTS[-1])) * _row_bytes(shape, shard, dtype)  # recordings have their own
    return logits * len(shard.vocab) + tables + ropes + made


def _row_bytes(shape: ModelShape, shard: Shard, dtype: str) -> int:
    """Of a row where it is widest: between products, and in attention, whose parts are float32."""
    net, number = shape.delta_net, DTYPE_BYTES[dtype]
    queries = max(len(one.shard.heads) * one.shape.head_dim for one in by_heads(shape, shard))
    wide = (SPLITS + 2) * queries
    if net is not None:
        wide += 2 * net.row_of(len(shard.delta_keys), len(shard.delta_values))
    return number * (4 * shape.hidden + _within_mlps(shape, shard) + 4 * queries) + WIDE_BYTES * wide


def _within_mlps(shape: ModelShape, shard: Shard) -> int:
    """Numbers of a row in the widest MLP, or in the experts that it is sent to, and what each of those gives."""
    experts, mlps = shape.experts, [feeding.mlp(shape, shard, "", shares=shares) for shares in (False, True)]
    if experts is None:
        return max(map(_within, mlps))
    one = feeding.expert(shape, experts, shard, "")
    beside = feeding.shared(shape, experts, shard, "")
    return max(experts.chosen * (_within(one) + one[-1].num_rows), *map(_within, (*mlps, beside)))


def _within(mlp: list[Fused]) -> int:
    """What the first product gives, and what the last reads."""
    first, last = mlp
    return first.num_rows + len(last.parts[0].columns)
