"""The cost model's constants for the box at hand: fitted to rounds that were measured there, by least squares.

Knows seconds and counts; must not know what measured them, nor import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from tpspec.errors import UserError
from tpspec.topology.cost import RankCost, StepCost
from tpspec.topology.links import Curve, LinkTable

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured round, or the mean of several alike. rows: through the layers, the root included.

    step_s: of the target's forward, collectives included; reduce_s: in its all-reduces, of which there were `reduces`;
    draft_s: of drafting num_drafted tokens, when the target waited for it; host_s: all the rest of the round.
    """

    rows: int
    step_s: float
    reduce_s: float = 0.0
    reduces: int = 0
    draft_s: float = 0.0
    num_drafted: int = 0
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds. weights_s: of a forward without rows; row_s: of a row; draft_s: of a drafted token; host_s: of a round.

    link: the box's own collectives, by bytes. reduces: in a step; row_bytes: of one row in each.
    """

    weights_s: float
    row_s: float
    link: LinkTable | None
    draft_s: float
    host_s: float
    reduces: int
    row_bytes: int

    def step(self, link: LinkTable | None = None, dilation: float = 1.0) -> StepCost:
        """The forward over this box's own link, or over one that is emulated on it."""
        own = RankCost(weights_s=self.weights_s, row_s=self.row_s)
        return StepCost((own,), self.host_s, self.reduces, self.row_bytes, link or self.link, dilation if link else 1.0)


def fit(samples: Sequence[Sample], row_bytes: int) -> Calibration:
    """row_bytes: of one row in an all-reduce. UserError when the samples cannot tell weights from rows."""
    rows = [sample.rows for sample in samples]
    if len(set(rows)) < 2:
        raise UserError(f"calibration has rounds of {sorted(set(rows))} rows; should have at least two lengths")
    weights_s, row_s = _line(rows, [sample.step_s - sample.reduce_s for sample in samples])
    drafted = sum(sample.num_drafted for sample in samples)
    return Calibration(
        weights_s=weights_s,
        row_s=row_s,
        link=_link(samples, row_bytes),
        draft_s=sum(sample.draft_s for sample in samples) / drafted if drafted else 0.0,
        host_s=fmean(sample.host_s for sample in samples),
        reduces=round(fmean(sample.reduces for sample in samples)),
        row_bytes=row_bytes,
    )


def _link(samples: Sequence[Sample], row_bytes: int) -> LinkTable | None:
    sent = [sample for sample in samples if sample.reduces]
    if not sent:
        return None
    sizes = [sample.rows * row_bytes for sample in sent]
    alpha_s, s_per_byte = _line(sizes, [sample.reduce_s / sample.reduces for sample in sent])
    curve = Curve((), alpha_s, 1 / s_per_byte if s_per_byte else float("inf"))
    return LinkTable("this box", curve, provenance="fitted to measured rounds")


def _line(at: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, neither below 0: the relative errors' least squares, so that long rounds do not rule."""
    x, y = np.array(at, dtype=float), np.array(seconds)
    weight = 1 / np.maximum(y, 1e-9)
    slope_free = np.linalg.lstsq(np.stack([weight, x * weight], axis=1), y * weight, rcond=None)[0]
    intercept, slope = (float(value) for value in slope_free)
    if slope < 0:
        return float(np.average(y, weights=weight**2)), 0.0
    if intercept < 0:
        return 0.0, float(np.average(y / x, weights=(x * weight) ** 2))
    return intercept, slope
