"""Drafting with a head for made-up targets, every logit of it checked against the head's formulas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.draft.heads.eagle import Written
from tests.draft.table import ask
from tpspec.cache.pages import PagePool
from tpspec.draft.ahead import Ahead, Policy
from tpspec.draft.eagle import EagleRun, Head
from tpspec.draft.protocol import Given, Needs, Offer, Place, Run, Taps
from tpspec.model.batch import Span
from tpspec.verify.noise import CounterNoise

SLOTS = 1024


def given(target: Path, head: Path) -> Given:
    cpu = torch.device("cpu")
    return Given(CounterNoise(), "match", 263, target, head, torch.float32, cpu, SLOTS)


class Listener:
    """Makes drafts of the likeliest ids, and keeps what the run said after which text and drafts."""

    needs = Needs(own_model=True)

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self.said: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def extend(self, spans: Sequence[Span], places: Sequence[Place], run: Run) -> list[Offer]:
        logits = run(spans)
        for place, row in zip(places, logits, strict=True):
            self.said[tuple(place.draw.context), place.draw.path] = row
        return [self._offer(row, place.width) for place, row in zip(places, logits, strict=True)]

    def _offer(self, row: Tensor, width: int) -> Offer:
        odds, columns = row.softmax(0).topk(width)
        return Offer(tuple(self._ids[column] for column in columns.tolist()), tuple(odds.tolist()))


class Told:
    """Texts that a head drafts for, and what a target is said to have made of them."""

    def __init__(self, written: Written, head: Head, branches: int) -> None:
        self.written, self.listener = written, Listener(written.ids)
        run = EagleRun(head, 263, SLOTS)
        self.ahead = Ahead(self.listener, run, PagePool(SLOTS // 16, 16), Policy(branches=branches, max_rows=4))
        self.noise = torch.Generator().manual_seed(7)
        self.texts: dict[int, list[int]] = {}
        self.taps: dict[int, Tensor] = {}

    def grow(self, seq: int, tokens: Sequence[int]) -> None:
        """The target reads all but the last token."""
        text = self.texts.setdefault(seq, [])
        before = max(len(text) - 1, 0)
        text.extend(tokens)
        new = torch.randn(len(text) - 1 - before, self.written.width, generator=self.noise)
        self.taps[seq] = torch.cat([self.taps[seq], new]) if before else new
        self.ahead.observe(Taps({seq: (before, new)}))

    def draft(self, num_tokens: int) -> dict[int, Any]:
        for seq, text in self.texts.items():
            self.ahead.hear(ask(seq, text, num_tokens))
        trees = {}
        while len(trees) < len(self.texts):
            trees.update({answer.seq: answer.tree for answer in self.ahead.answers()})
            self.ahead.work()
        return trees

    def check(self) -> int:
        """All that was said since, against the formulas; how much that was."""
        for (text, path), row in self.listener.said.items():
            seq = next(seq for seq, known in self.texts.items() if tuple(known[: len(text)]) == text)
            expected = self.written.logits(text, self.taps[seq][: len(text) - 1], path)
            assert (row - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
        return len(self.listener.said)


def exercise(told: Told, branches: int) -> None:
    """Several rounds, every logit of them checked."""
    told.grow(0, [5, 17, 200, 31, 5, 90, 4])
    told.grow(1, [9, 8, 7])
    trees = told.draft(9)
    assert all(len(tree) == 9 for tree in trees.values())
    assert told.check() >= 2 * (9 if branches == 1 else 4)
    # Of one text two drafts come true, of the other none; then they are drafted for again.
    deep = next(node for node, depth in enumerate(trees[0].depths()) if depth == 2)
    told.grow(0, [*(trees[0].tokens[node] for node in trees[0].path(deep)), 262])
    told.grow(1, [trees[1].tokens[0] ^ 1])
    told.draft(4)
    told.check()
