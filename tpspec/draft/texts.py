"""What a model that goes on from the target's own layers is told of texts, and remembers of its drafts.

Must not know how it reads them, nor what its features are.

Shapes: P positions of a text, n rows, W taps of a token, D numbers of a feature.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from tpspec.topology.caches import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tpspec.draft.protocol import Taps
    from tpspec.model.batch import Span

FED = 0  # of a forward: what the next draft reads


class Features:
    """Rows of one text by position, in blocks: it grows without a copy of what there is, and may share them with texts
    that begin alike."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._none = torch.empty(0, width, dtype=dtype, device=device)
        self._blocks: list[Tensor] = []

    @property
    def num_rows(self) -> int:
        """That there is room for."""
        return len(self._blocks) * BLOCK

    def write(self, first: int, rows_TD: Tensor) -> None:
        stop = first + len(rows_TD)
        while self.num_rows < stop:
            self._blocks.append(self._none.new_empty(BLOCK, self._none.shape[1]))
        for block, begin, end in _parts(first, stop):
            at = block * BLOCK + begin - first
            self._blocks[block][begin:end] = rows_TD[at : at + end - begin]

    def share(self, number: int, name: bytes, blocks: WeakValueDictionary[bytes, Tensor]) -> None:
        """A whole block with whoever has one of that name, which is of the same text. blocks: those that are in use."""
        self._blocks[number] = blocks.setdefault(name, self._blocks[number])

    def read(self, first: int, stop: int) -> Tensor:
        """[stop - first, D]; none where that is none."""
        parts = [self._blocks[block][begin:end] for block, begin, end in _parts(first, stop)]
        return parts[0] if len(parts) == 1 else torch.cat([self._none, *parts])


def _parts(first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Of each block that positions lie in its number, and which of its rows they are."""
    for block in range(first // BLOCK, -(-stop // BLOCK) if stop > first else 0):
        at = block * BLOCK
        yield block, max(first - at, 0), min(stop - at, BLOCK)


@dataclass(slots=True)
class Text:
    """What is known of one sequence: features of its text by position, and by cache slot what the head made of drafts.

    All of the text's are kept: it is read anew where the cache had to let it go. names: of whole blocks of it that have
    been read, each of all tokens up to there. tail: tokens behind those.
    """

    features: Features
    num_known: int = 0
    made: dict[int, Tensor] = field(default_factory=dict)
    names: list[bytes] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)

    def learn(self, first: int, features_TD: Tensor) -> None:
        """The features from position `first` on; drafts that led here are text now, or nothing."""
        self.features.write(first, features_TD)
        self.num_known = first + len(features_TD)
        self.made.clear()

    def see(self, span: Span, blocks: WeakValueDictionary[bytes, Tensor]) -> None:
        """What the span reads of the text, for the first time or again, and what of it is in whole blocks."""
        num_seen = len(self.names) * BLOCK + len(self.tail)
        stop = min(span.start + len(span.tokens), self.num_known)
        if not span.start <= num_seen < stop:
            return
        self.tail += span.tokens[num_seen - span.start : stop - span.start]
        while len(self.tail) >= BLOCK:
            whole, self.tail = self.tail[:BLOCK], self.tail[BLOCK:]
            name = blake2b(b"".join((*self.names[-1:], np.asarray(whole, np.int64).tobytes()))).digest()
            self.features.share(len(self.names), name, blocks)
            self.names.append(name)

    def before(self, span: Span) -> Tensor:
        """For each row of `span` (of `_paired`) the feature of the token before: [len(span.tokens), D]."""
        stop = span.start + len(span.tokens)
        return self.features.read(span.start, stop) if stop <= self.num_known else self.made[slots_at_end(span)[0]]


class OverTexts:
    """Of a `Run`, what it is told of texts. project: [n, W] -> [n, D], their features, in that dtype on that device."""

    rereads, seats = True, None

    def __init__(self, project: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._project, self._dtype, self._device = project, dtype, device
        self._texts: dict[int, Text] = {}
        self._blocks = WeakValueDictionary[bytes, Tensor]()  # of all texts, by name

    @torch.inference_mode()
    def observe(self, taps: Taps) -> None:
        for seq, (first, rows_TW) in taps.rows.items():
            features_TD = self._project(rows_TW.to(self._device, self._dtype))
            if seq not in self._texts:
                self._texts[seq] = Text(Features(features_TD.shape[1], self._dtype, self._device))
            self._texts[seq].learn(first, features_TD)

    def _read(self, spans: Sequence[Span]) -> list[Text]:
        """What is known of the texts of these spans, which are read now."""
        texts = [self._texts[span.seq] for span in spans]
        for span, text in zip(spans, texts, strict=True):
            text.see(span, self._blocks)
        return texts

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
