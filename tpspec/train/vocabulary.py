"""The reduced vocabulary of a draft head: the ids that the texts use most. Integers only.

A head that scores few ids is small and fast; a token outside is never drafted, and costs a rejection.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """ids: the target's ids in ascending order; the place of one is its draft id. size: of the target's vocabulary.

    coverage: share of the counted tokens that are among them.
    """

    ids: tuple[int, ...]
    size: int
    coverage: float

    @classmethod
    def most_used(
        cls, answers: Iterable[Sequence[int]], count: int, size: int, always: Collection[int]
    ) -> DraftVocabulary:
        """The `count` most frequent ids of the answers (unused ones fill up, lowest first), `always` among them."""
        counts = Counter(chain.from_iterable(answers))
        ranked = [*always, *(i for i, _ in counts.most_common()), *range(size)]
        ids = tuple(sorted([*dict.fromkeys(ranked)][: min(count, size)]))
        return cls(ids, size, sum(counts[i] for i in ids) / max(1, counts.total()))

    def place_of(self) -> Tensor:
        """[size]: the draft id of every target id, -1 for one that has none."""
        places = torch.full((self.size,), -1)
        places[torch.tensor(self.ids)] = torch.arange(len(self.ids))
        return places

    def d2t(self) -> Tensor:
        """[number of ids]: what is added to a draft id to give the target's (an offset, as EAGLE publishes it)."""
        return torch.tensor(self.ids) - torch.arange(len(self.ids))

    def t2d(self) -> Tensor:
        """[size] bool: whether a target id can be drafted."""
        return self.place_of() >= 0
