"""The cost model's constants for the box at hand: fitted to rounds that were measured there, by least squares.

Knows seconds and counts; must not know what measured them, nor import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from tpspec.errors import UserError
from tpspec.topology.cost import RankCost, StepCost
from tpspec.topology.links import Curve, LinkTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

OUTLIER, PASSES = 1.5, 5  # a round is believed up to so many times what is fitted, in so many fits


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured round, or the mean of several alike. rows: through the layers, the root included.

    context: tokens before the rows. step_s: of the target's forward, collectives included; reduce_s: in its
    all-reduces, of which there were `reduces`; draft_s: of drafting num_drafted tokens, when the target waited for it;
    host_s: all the rest of the round.
    """

    rows: int
    step_s: float
    reduce_s: float = 0.0
    reduces: int = 0
    draft_s: float = 0.0
    num_drafted: int = 0
    host_s: float = 0.0
    context: int = 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds. weights_s: of a forward without rows; row_s: of a row; look_s: of a row's look at a token before it.

    What more rows read of a mixture's experts is fitted as part of row_s: true for about as many rows as were measured.
    link: of the collectives, by bytes, times dilation. draft_s: of a drafted token; host_s: of a round. reduces: in a
    step; row_bytes: of one row in each.
    """

    weights_s: float
    row_s: float
    link: LinkTable | None
    draft_s: float
    host_s: float
    reduces: int
    row_bytes: int
    look_s: float = 0.0
    dilation: float = 1.0

    def step(self, link: LinkTable | None = None, dilation: float = 1.0, context: float = 0.0) -> StepCost:
        """The forward and the host's part of a round over this box's own link, or over one that is emulated on it."""
        own = RankCost(weights_s=self.weights_s, row_s=self.row_s + context * self.look_s)
        link, dilation = (link, dilation) if link else (self.link, self.dilation)
        return StepCost((own,), self.host_s, self.reduces, self.row_bytes, link, dilation)


def fit(
    samples: Sequence[Sample], row_bytes: int, emulated: LinkTable | None = None, dilation: float = 1.0
) -> Calibration:
    """row_bytes: of one row in an all-reduce. emulated: the link that the samples' collectives were held to.

    UserError when the samples cannot tell weights from rows.
    """
    rows = {sample.rows for sample in samples}
    if len(rows) < 2:
        raise UserError(f"calibration has rounds of {sorted(rows)} rows; should have at least two lengths")
    terms = [(1, sample.rows, sample.rows * sample.context) for sample in samples]
    weights_s, row_s, look_s = _constants(terms, [sample.step_s - sample.reduce_s for sample in samples])
    drafted = sum(sample.num_drafted for sample in samples)
    return Calibration(
        weights_s=weights_s,
        row_s=row_s,
        link=_link(samples, row_bytes, emulated, dilation),
        draft_s=sum(sample.draft_s for sample in samples) / drafted if drafted else 0.0,
        host_s=fmean(sample.host_s for sample in samples),
        reduces=round(fmean(sample.reduces for sample in samples)),
        row_bytes=row_bytes,
        look_s=look_s,
        dilation=dilation if emulated else 1.0,
    )


def _link(samples: Sequence[Sample], row_bytes: int, emulated: LinkTable | None, dilation: float) -> LinkTable | None:
    """The box's own as a line; of an emulated one the time is known, and what was waited beyond it is skew."""
    sent = [sample for sample in samples if sample.reduces]
    if not sent:
        return None
    each_s = [sample.reduce_s / sample.reduces for sample in sent]
    sizes = [sample.rows * row_bytes for sample in sent]
    if emulated is None:
        alpha_s, s_per_byte = _constants([(1, size) for size in sizes], each_s)
        curve = Curve((), alpha_s, 1 / s_per_byte if s_per_byte else float("inf"))
        return LinkTable("this box", curve, provenance="fitted to measured rounds")
    beyond = [s / dilation - emulated.seconds(size) for s, size in zip(each_s, sizes, strict=True)]
    return replace(emulated, skew_s=max(0.0, fmean(beyond)))


def _constants(terms: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """What each term costs, the first one of a round whatever it holds; none below 0. Least squares.

    Of the errors relative to what is fitted, so that long rounds do not rule; relative to what was measured, a round
    that was fast by chance would count for more than a slow one. What something else on the machine took of a round
    could have struck any: beyond OUTLIER it is shared out, and says nothing about rows.
    """
    y = np.array(seconds)
    x = np.array(terms, dtype=float)
    x_scale = np.maximum(x.mean(axis=0), 1e-300)
    x, kept = x / x_scale, y
    found = _non_negative(x, y)
    for _ in range(PASSES):
        fitted = np.maximum(x @ found, 1e-12)
        kept = np.minimum(y, OUTLIER * fitted)
        found = _non_negative(x / fitted[:, None], kept / fitted)
    found[0] += (y - kept).mean()
    return [float(value) for value in found / x_scale]


def _non_negative(x: Matrix, y: Matrix) -> Matrix:
    """Least squares; a term that would be below 0 is left out, the lowest first."""
    found, kept = np.zeros(x.shape[1]), list(range(x.shape[1]))
    while kept:
        solved = np.linalg.lstsq(x[:, kept], y, rcond=None)[0]
        if solved.min() >= 0:
            found[kept] = solved
            break
        kept.pop(int(solved.argmin()))
    return found
