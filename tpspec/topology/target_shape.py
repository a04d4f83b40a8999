"""The shape of a topology's target, as that has its ranks run it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tpspec.errors import UserError
from tpspec.published.checkpoint import find
from tpspec.published.shape import ModelShape, shape_of
from tpspec.topology.rounds import FEW_ROWS

if TYPE_CHECKING:
    from tpspec.topology.config import Topology


def target_shape(topology: Topology) -> ModelShape:
    """Touches the network only when the model is neither here nor well known."""
    return _as_run(topology, shape_of(topology.target.model))


def found_target(topology: Topology) -> ModelShape:
    """Of the model's files."""
    return _as_run(topology, ModelShape.of(find(topology.target.model)))


def _as_run(topology: Topology, shape: ModelShape) -> ModelShape:
    if topology.target.qk_norm == "reduce":
        return shape
    if not shape.usual.joint_norm:
        raise UserError(
            f"target.qk_norm: replicate: {topology.target.model} has no norm over the queries of all heads, for which "
            "ranks would have to wait; should be reduce"
        )
    if topology.deterministic and topology.engine.fixed_rows > FEW_ROWS:
        raise UserError(
            f"target.qk_norm: replicate: with engine.fixed_rows {topology.engine.fixed_rows} no round has so few rows; "
            f"should be reduce, or fixed_rows at most {FEW_ROWS}"
        )
    return replace(shape, replicates_norm=True)
