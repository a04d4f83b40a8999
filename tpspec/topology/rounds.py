"""What the ranks of a model tell each other in a round: how many collectives, and bytes of each.

Integers only, of shapes; must not know a communicator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tpspec.topology.sublayers import NOTHING

if TYPE_CHECKING:
    from tpspec.published.shape import ModelShape
    from tpspec.topology.sublayers import Sublayers

NORM_BYTES = 8  # of a row, in the all-reduce of a norm over all heads: two sums, in float32
LATE_COLUMNS = 2  # of each rank in the all-reduce of what is normed behind it (model/late_norm.py)
FEW_ROWS = 32  # of a round in which each rank may make all heads' queries and keys; of more that is much to compute


class AllReduces(NamedTuple):
    """Of a forward: of rows, and of sums for norms over all heads."""

    rows: int
    norms: int = 0


def mean_bytes(shape: ModelShape, dtype_bytes: int) -> float:
    """Of a row in an all-reduce, whichever it is."""
    sent = round_bytes(shape, 2, 1, dtype_bytes, num_logit_rows=0)
    return sum(sent.values()) / sum(reduces(shape).values())


def reduces(shape: ModelShape, left_out: Sublayers = NOTHING) -> dict[str, int]:
    """All-reduces of a forward without some sublayers, by purpose. Of parallel ones the MLP's is attention's, too.

    Where norms over all heads are replicated, of a forward of at most FEW_ROWS.
    """
    attention, mlp = {*shape.mixing} - left_out.attention, {*shape.feeding} - left_out.mlp
    counts = {"attention": len(attention - mlp if shape.parallel else attention), "mlp": len(mlp)}
    normed = attention - (shape.delta_net.alone if shape.delta_net else frozenset())
    return counts | ({"norm": len(normed)} if shape.usual.joint_norm and not shape.replicates_norm else {})


def all_reduces(shape: ModelShape, left_out: Sublayers = NOTHING) -> AllReduces:
    counts = reduces(shape, left_out)
    norms = counts.pop("norm", 0)
    return AllReduces(sum(counts.values()), norms)


def collectives_per_round(shape: ModelShape, num_shards: int) -> int:
    """The all-reduces, as a rule two in each layer, and one all-gather of picks; a rank alone needs none."""
    return collectives_per_draft(shape, num_shards, NOTHING)


def collectives_per_draft(shape: ModelShape, num_shards: int, left_out: Sublayers) -> int:
    """Of a drafted token, where the target itself drafts: those of the sublayers that are left, and one to pick."""
    return sum(reduces(shape, left_out).values()) + 1 if num_shards > 1 else 0


def round_bytes(
    shape: ModelShape, num_shards: int, rows: int, dtype_bytes: int, num_logit_rows: int | None = None
) -> dict[str, int]:
    """Bytes that one rank contributes to the collectives of a round, by purpose.

    rows: query positions in the round; num_logit_rows of them (None: all) are judged, at 8 bytes of (value, id) each.
    """
    judged, hidden = rows if num_logit_rows is None else num_logit_rows, shape.hidden * dtype_bytes
    of_mlps = 2 * hidden if shape.experts and shape.experts.apart else hidden
    of_row = {"attention": hidden, "mlp": of_mlps, "norm": NORM_BYTES}
    sent = {purpose: count * rows * of_row[purpose] for purpose, count in reduces(shape).items()}
    if (net := shape.delta_net) is not None and net.shares_norm:
        sent["attention"] += len(net.layers) * rows * LATE_COLUMNS * num_shards * dtype_bytes
    return {purpose: num if num_shards > 1 else 0 for purpose, num in (sent | {"pick": 8 * judged}).items()}
