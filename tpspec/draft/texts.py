"""What a model that goes on from the target's own layers is told of texts, and remembers of its drafts.

Must not know how it reads them, nor what its features are.

Shapes: P positions of a text, n rows, W taps of a token, D numbers of a feature.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpspec.draft.protocol import Taps
    from tpspec.model.batch import Span

FED = 0  # of a forward: what the next draft reads


@dataclass(slots=True)
class Text:
    """What is known of one sequence: features of its text by position, and by cache slot what the head made of drafts.

    All of the text's are kept: it is read anew where the cache had to let it go.
    """

    features_PD: Tensor
    num_known: int = 0
    made: dict[int, Tensor] = field(default_factory=dict)

    def learn(self, first: int, features_TD: Tensor) -> None:
        """The features from position `first` on; drafts that led here are text now, or nothing."""
        self.num_known = first + len(features_TD)
        if self.num_known > len(self.features_PD):
            room = self.features_PD.new_empty(2 * self.num_known - len(self.features_PD), features_TD.shape[1])
            self.features_PD = torch.cat([self.features_PD, room])
        self.features_PD[first : self.num_known] = features_TD
        self.made.clear()

    def before(self, span: Span) -> Tensor:
        """For each row of `span` (of `_paired`) the feature of the token before: [len(span.tokens), D]."""
        stop = span.start + len(span.tokens)
        return self.features_PD[span.start : stop] if stop <= self.num_known else self.made[slots_at_end(span)[0]]


class OverTexts:
    """Of a `Run`, what it is told of texts. project: [n, W] -> [n, D], their features, in that dtype on that device."""

    rereads, seats = True, None

    def __init__(self, project: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._project, self._dtype, self._device = project, dtype, device
        self._texts: dict[int, Text] = {}

    @torch.inference_mode()
    def observe(self, taps: Taps) -> None:
        for seq, (first, rows_TW) in taps.rows.items():
            features_TD = self._project(rows_TW.to(self._device, self._dtype))
            if seq not in self._texts:
                self._texts[seq] = Text(features_TD[:0])
            self._texts[seq].learn(first, features_TD)

    def can_read(self, seq: int, num_tokens: int) -> bool:
        """A token is read with the feature of the one before it, so the first is not read at all."""
        text = self._texts.get(seq)
        return text is not None and 1 < num_tokens <= text.num_known + 1

    def forget(self, seq: int) -> None:
        self._texts.pop(seq, None)


def as_it_is(taps_TW: Tensor) -> Tensor:
    """The projection of who takes taps for a feature."""
    return taps_TW


def slots_at_end(span: Span) -> tuple[int, int]:
    """The slots of the last row and of the one before it, that first."""
    first, count = span.runs[-1]
    last = first + count - 1
    return (last - 1, last) if count > 1 else (sum(span.runs[-2]) - 1 if len(span.runs) > 1 else -1, last)
