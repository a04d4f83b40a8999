"""What the target's layers made of texts, for sources that go on from there, whoever has read the text.

The rows of every text are kept by cache slot: a text that begins with pages which others have read is given theirs. In
host memory, since they may be as large as keys and values. Knows rows, slots and verdicts; must not know layers.

Shapes: T rows of a forward, n of them in one text, S slots of the cache, W taps of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpspec.cache.store import as_slots
from tpspec.draft.protocol import Taps
from tpspec.staged import Fetched, sent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from tpspec.engine.plan import Plan
    from tpspec.model.batch import Span
    from tpspec.tokens import Verdict

HOST = torch.device("cpu")


class TapStore:
    """By slot of the cache; only of slots whose keys and values are those of text."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._rows_SW: Tensor | None = None
        self._coming: tuple[list[int], Fetched] | None = None  # slots, and the rows that go there

    def of_text(
        self,
        plan: Plan,
        verdicts: Sequence[Verdict],
        rows_TW: Tensor,
        adopted: Mapping[int, Sequence[int]],
        *,
        keeps: bool,
    ) -> Taps:
        """Of all rows those that have become text: chunks of prompts, roots, and accepted nodes. Not of who is gone,
        whom a source has forgotten and would remember for ever.

        adopted: the slots of what others have read, of sequences that begin so now. keeps: whether anybody may adopt.
        """
        before = {seq: self._read(slots) for seq, slots in adopted.items() if slots}
        paths = {verdict.seq: verdict.path for verdict in verdicts}
        num_nodes = {case.seq: len(case.tree) for case in plan.cases}
        first, text, counts, slots = 0, [], [], []
        for span in plan.spans:
            own = [*_text_rows(span, num_nodes.get(span.seq, 0), paths.get(span.seq, ()))]
            text += [first + row for row in own]
            slots += span.own_slots()[: len(own)]
            counts.append(len(own))
            first += len(span.tokens)
        text_TW = rows_TW[sent(text, rows_TW.device)]
        rows = zip(plan.spans, torch.split(text_TW, counts), strict=True)
        taken = {span.seq: (span.start, rows_nW) for span, rows_nW in rows if span.seq not in plan.gone}
        if keeps:
            self._put_down()
            self._coming = slots, Fetched(text_TW)
        return Taps(taken, before)

    def _put_down(self) -> None:
        """What was fetched before, which has come by now or soon will."""
        if self._coming is None:
            return
        slots, fetched = self._coming
        rows_nW, self._coming = fetched.here(), None
        if self._rows_SW is None:
            self._rows_SW = torch.empty(self._num_slots, rows_nW.shape[1], dtype=rows_nW.dtype)
        self._rows_SW[as_slots(slots, HOST)] = rows_nW

    def _read(self, slots: Sequence[int]) -> Tensor:
        self._put_down()
        assert self._rows_SW is not None, "who is followed has read something"
        return self._rows_SW[as_slots(slots, HOST)]


def _text_rows(span: Span, num_nodes: int, path: Sequence[int]) -> Iterator[int]:
    """Rows of a span, counted from its first; its last ones are the nodes of a tree."""
    num_known = len(span.tokens) - num_nodes
    yield from range(num_known)
    yield from (num_known + node for node in path)
