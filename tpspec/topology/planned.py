"""A plan as a topology. Everything that it says is decided (`plan.py`); must not write a file (`proposal.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpspec.published.shape import shape_of
from tpspec.topology.config import Topology
from tpspec.topology.layout import boxed
from tpspec.topology.placement import Placement
from tpspec.topology.plan import FAN_OUT, widths

if TYPE_CHECKING:
    from tpspec.topology.layout import Plan, Wish


def topology_of(wish: Wish, best: Plan) -> Topology:
    """The topology file's content for a plan, checked."""
    layout = best.layout
    target: dict[str, object] = {"model": wish.model, "ranks": list(range(len(layout.shards))), "dtype": best.dtype}
    if len({*best.weights}) > 1:
        target["weights"] = list(best.weights)
    if quantize := widths(shape_of(wish.model))[layout.bits]:
        target["quantize"] = quantize
    if layout.replicates_norm:
        target["qk_norm"] = "replicate"
    ahead = layout.placement in ("dedicated", "gaps")
    return Topology.model_validate(
        {
            "name": f"planned: {boxed(wish.gpus)}, {wish.model}",
            "target": target,
            "draft": _draft(wish, best),
            **({"pipeline": {"policy": "fan_out", "fan_out": FAN_OUT}} if ahead else {}),
            "device": "cuda",
            **({"link": {"table": wish.link}} if wish.link else {}),
            "cache": {"tokens": "auto"},
        }
    )


def _draft(wish: Wish, best: Plan) -> dict[str, object]:
    layout = best.layout
    if layout.placement == "none":
        return {"source": "none"}
    draft: dict[str, object] = {"source": "model" if wish.draft_model else wish.draft, "tokens": best.num_drafted}
    if wish.draft_model:
        draft["model"] = wish.draft_model
    if layout.placement in ("dedicated", "gaps"):
        draft["placement"] = Placement(layout.placement, layout.rank_of_drafter).plain()
    return draft
