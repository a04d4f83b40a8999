"""A layer's short convolution (LFM2, arXiv 2511.23404), of one shard's channels. What is between its products is here
in torch: the reference, and, on a CPU, what runs for many rows.

Knows rows and slots; must not know drafts, ranks or whose a row is (courses.py).

Shapes: T rows of the round, M channels, K rows that the convolution sees, L those that are left in slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.model.courses import NOTHING, courses
from tpspec.staged import sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.cache.states import StateStore
    from tpspec.model.batch import Span
    from tpspec.model.linear import Linear


@dataclass(frozen=True, slots=True)
class GatedConv:
    """What is between a layer's norm and its all-reduce. made: [D] -> [3 M], B, C and x. out: [M] -> [D], a partial
    sum. kernel: [K, M], float32, the newest row last. biases: [M], likewise, or None.

    The convolution sees B x of a row and of those before it, and what it makes is multiplied with C.
    """

    made: Linear
    out: Linear
    kernel: Tensor
    biases_M: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """The spans of one forward, ready for every short convolution.

    Inputs of a layer are the round's rows, behind them those of what is left in the slots that are seen (left), and a
    row of zeros. sights: which of them each row's convolution sees. kept: which are left from now on, and where (to),
    of all that is.
    """

    store: StateStore
    left_L: Tensor
    sights_KT: Tensor
    kept_N: Tensor
    to_N: Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], store: StateStore, num_rows: int, device: torch.device) -> Round:
        """Rows behind the spans' see nothing."""
        every, num_before = courses(spans, store), store.sizes.num_before
        sights = [sight for one in every for sight in one.sights[one.num_kept :]]
        sights += [[NOTHING] * (num_before + 1)] * (num_rows - len(sights))
        kept = [name for one in every for name in (*one.before, *one.tree)]
        starts = [(one.slot * store.length, num_before + len(one.tree)) for one in every]
        left = sorted({name for seen in (*sights, kept) for name in seen if name < 0} - {NOTHING})
        places = {name: num_rows + at for at, name in enumerate([*left, NOTHING])}

        def placed(names: Sequence[int]) -> list[int]:
            return [name if name >= 0 else places[name] for name in names]

        return cls(
            store=store,
            left_L=sent([~name for name in left], device),
            sights_KT=sent(torch.tensor([placed(sight) for sight in sights]).T.contiguous(), device),
            kept_N=sent(placed(kept), device),
            to_N=sent([start + i for start, count in starts for i in range(count)], device),
        )

    def convolved(self, conv: GatedConv, layer: int, made_TX: Tensor) -> Tensor:
        """What `out` reads, [T, M], of what `made` gives; what is left goes on. All is added in one order."""
        before_TM, behind_TM, x_TM = made_TX.chunk(3, 1)
        left_M = self.store.of(layer).left.flatten(0, 1)
        inputs_M = torch.cat([before_TM * x_TM, left_M[self.left_L], x_TM.new_zeros(1, x_TM.shape[1])])
        sums_TM = torch.zeros_like(x_TM, dtype=torch.float32)
        if conv.biases_M is not None:
            sums_TM += conv.biases_M
        for sight_T, weights_M in zip(self.sights_KT, conv.kernel, strict=True):
            sums_TM += inputs_M[sight_T].float() * weights_M
        left_M[self.to_N] = inputs_M[self.kept_N]
        return behind_TM * sums_TM.to(x_TM.dtype)
