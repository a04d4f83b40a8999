"""What a model that goes on from the target's own layers is told of texts, and remembers of its drafts.

Must not know how it reads them, nor what its features are.

Shapes: P positions of a text, n rows, W taps of a token, D numbers of a feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from tpspec.staged import sent
from tpspec.topology.caches import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpspec.draft.protocol import Taps
    from tpspec.model.batch import Span

FED = 0  # of a forward: what the next draft reads

Making = Callable[[int, int], Tensor]  # of rows [first, stop)


class Features:
    """Rows of one text by position, in blocks: it grows without a copy of what there is, and may share them with texts
    that begin alike."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._none = torch.empty(0, width, dtype=dtype, device=device)
        self._blocks: list[Tensor | None] = []  # None: not made yet
        self._num_begun = 0
        self._make: Making | None = None

    def begin(self, num_rows: int, make: Making, num_known: int) -> None:
        """With so many rows, of which those of a block are made when it is first wanted. num_known: that there are."""
        whole, num_blocks = num_known // BLOCK, -(-num_rows // BLOCK)
        self._blocks[whole:num_blocks] = [None] * (num_blocks - whole)
        self._num_begun, self._make = num_rows, make

    def write(self, first: int, rows_TD: Tensor) -> None:
        stop = first + len(rows_TD)
        self._blocks += [None] * (-(-stop // BLOCK) - len(self._blocks))
        for number, begin, end in _parts(first, stop):
            at = number * BLOCK + begin - first
            self._block(number)[begin:end] = rows_TD[at : at + end - begin]

    def share(self, number: int, name: bytes, blocks: WeakValueDictionary[bytes, Tensor]) -> None:
        """A whole block with whoever has one of that name, which is of the same text. blocks: those that are in use."""
        known = blocks.get(name)
        self._blocks[number] = blocks[name] = self._block(number) if known is None else known

    def read(self, first: int, stop: int) -> Tensor:
        """[stop - first, D]; none where that is none."""
        parts = [self._block(number)[begin:end] for number, begin, end in _parts(first, stop)]
        return parts[0] if len(parts) == 1 else torch.cat([self._none, *parts])

    def _block(self, number: int) -> Tensor:
        block = self._blocks[number]
        if block is None:
            block = self._blocks[number] = self._none.new_empty(BLOCK, self._none.shape[1])
            first, stop = number * BLOCK, min((number + 1) * BLOCK, self._num_begun)
            if first < stop and self._make is not None:
                block[: stop - first] = self._make(first, stop)
        return block


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

    def begin(self, num_rows: int, make: Making) -> None:
        """As others' does, with so many rows."""
        self.features.begin(num_rows, make, self.num_known)
        self.num_known = num_rows
        self.made.clear()

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
        for seq, rows_nW in taps.before.items():
            self._text(seq, self._made(rows_nW, 0, 1)).begin(len(rows_nW), partial(self._made, rows_nW))
        for seq, (first, rows_nW) in taps.rows.items():
            features_nD = self._made(rows_nW, 0, len(rows_nW))
            self._text(seq, features_nD).learn(first, features_nD)

    def _made(self, rows_nW: Tensor, first: int, stop: int) -> Tensor:
        return self._project(sent(rows_nW[first:stop], self._device).to(self._dtype))

    def _text(self, seq: int, features_nD: Tensor) -> Text:
        """features: some, of which it will have more."""
        if seq not in self._texts:
            self._texts[seq] = Text(Features(features_nD.shape[1], self._dtype, self._device))
        return self._texts[seq]

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
