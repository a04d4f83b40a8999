"""Attention of rows to the keys that an index has chosen for each of them, in place of all that they see.

Keys are gathered, a row's behind another's: attention takes as long in a text of a hundred thousand tokens as in one
of as many as are chosen. Rows are scored one by one, so that none of them has its choice by what is beside it. Must not
know tokens, or how an index comes by its numbers.

Shapes: T rows of a span, N of them that have a choice, K keys that each attends to, S keys in view, E head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpspec.cache.store import within
from tpspec.model.indexer import best, scores

if TYPE_CHECKING:
    from torch import Tensor

    from tpspec.cache.store import Cells, Slots
    from tpspec.model.attention import Attend, Folding, Seen
    from tpspec.model.indexer import Asked

MOST_GATHERED = 1 << 25  # numbers of keys at once


@dataclass(frozen=True, slots=True)
class Picked:
    """few: what the first rows see, which attend to all of it; or None: there are none. rows: of the round, these and
    the others. slots_NK: of the cache, that each of the others attends to."""

    few: Seen | None
    rows: slice | Tensor
    slots_NK: Tensor

    def chosen(self, asked: Asked, index: Cells) -> Picked:
        """It has been."""
        return self

    def attend(
        self, attend: Attend, q_THE: Tensor, keys: Cells, values: Cells, fold: Folding, scale: float,
        sinks_H: Tensor | None, cap: float | None,
    ) -> Tensor:  # fmt: skip
        """As of View, of one kv head, whose keys are their own values, and without sinks."""
        few = [] if self.few is None else [self.few.attend(attend, q_THE, keys, values, fold, scale, sinks_H, cap)]
        (N, K), dim = self.slots_NK.shape, q_THE.shape[2]
        q_NHE, at_once, made = q_THE[self.rows][-N:], max(1, MOST_GATHERED // (K * dim)), list[torch.Tensor]()
        for first in range(0, N, at_once):
            slots_XK = self.slots_NK[first : first + at_once]
            keys_XKE = keys.read(slots_XK.flatten()).view(*slots_XK.shape, dim)
            q_XHE = q_NHE[first : first + at_once]
            made.append(attend(q_XHE, keys_XKE, keys_XKE, None, scale, None, cap).flatten(1))
        return torch.cat([*few, *made])


@dataclass(frozen=True, slots=True)
class Choosing:
    """What rows of a span see, of which all but the first see more keys than the `most` that they attend to. few, rows:
    as of Picked. keys: all slots in view. places: of the rows' own keys among these, the last. own_TT: bool, which of
    the rows each sees; None: those up to it."""

    few: Seen | None
    rows: slice | Tensor
    keys: Slots
    most: int
    places: range
    own_TT: Tensor | None

    def chosen(self, asked: Asked, index: Cells) -> Picked:
        """asked: by all rows of the round. index: its keys."""
        q_TNI, weights_TN = asked.q_TNI[self.rows], asked.weights_TN[self.rows]
        key_IS = index.read(self.keys)[0].float().T
        chosen: list[Tensor] = []
        for row, place in enumerate(self.places):
            if place < self.most:  # of `few`
                continue
            scores_S = scores(q_TNI[row], weights_TN[row], key_IS[:, : place + 1])
            if self.own_TT is not None:
                scores_S[self.places.start :].masked_fill_(~self.own_TT[row, : row + 1], -torch.inf)
            chosen.append(best(scores_S, self.most))
        return Picked(self.few, self.rows, within(self.keys, torch.stack(chosen)))

    def attend(
        self, attend: Attend, q_THE: Tensor, keys: Cells, values: Cells, fold: Folding, scale: float,
        sinks_H: Tensor | None, cap: float | None,
    ) -> Tensor:  # fmt: skip
        raise AssertionError("a layer whose rows an index chooses for stands behind one that has chosen")
