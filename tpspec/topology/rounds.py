"""What the ranks of a model tell each other in a round: how many collectives, and bytes of each.

Integers only, of shapes; must not know a communicator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpspec.topology.shape import ModelShape
    from tpspec.topology.sublayers import Sublayers


def collectives_per_round(shape: ModelShape, num_shards: int) -> int:
    """Two all-reduces in each layer and one all-gather of picks; a rank alone needs none."""
    return 2 * shape.num_layers + 1 if num_shards > 1 else 0


def collectives_per_draft(shape: ModelShape, num_shards: int, left_out: Sublayers) -> int:
    """Of a drafted token, where the target itself drafts: one for each sublayer that is left, and one to pick."""
    return 2 * shape.num_layers - len(left_out) + 1 if num_shards > 1 else 0


def round_bytes(
    shape: ModelShape, num_shards: int, rows: int, dtype_bytes: int, num_logit_rows: int | None = None
) -> dict[str, int]:
    """Bytes that one rank contributes to the collectives of a round, by purpose.

    rows: query positions in the round; num_logit_rows of them (None: all) are judged, at 8 bytes of (value, id) each.
    """
    if num_shards == 1:
        return {"attention": 0, "mlp": 0, "pick": 0}
    reduced = shape.num_layers * rows * shape.hidden * dtype_bytes
    judged = rows if num_logit_rows is None else num_logit_rows
    of_mlps = 2 * reduced if shape.experts and shape.experts.apart else reduced
    return {"attention": reduced, "mlp": of_mlps, "pick": 8 * judged}
