"""What a host lets pass of a source that fails, and of one that does not say the same on every rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny
from tests.draft.kits import draft_section
from tests.draft.liar import Liar
from tests.draft.table import ask
from tests.worlds import serve, topology
from tpspec.draft.protocol import Ask, Needs, Taps
from tpspec.draft.texts import OverTexts
from tpspec.engine.hosts import Failsafe, InlineHost
from tpspec.errors import WorldFailure
from tpspec.request import Request, Sampling
from tpspec.tokens import TokenTree
from tpspec.verify.rows import RowLogits


class Lost(Liar):
    def propose(self, asks: list[Ask]) -> list[TokenTree]:  # type: ignore[override]
        raise WorldFailure("rank 1 is gone")


def test_a_lost_rank_is_not_a_failed_draft() -> None:
    """Against a rank that decodes on without drafts after a draft's collective failed: the next one hangs."""
    with pytest.raises(WorldFailure, match="rank 1 is gone"):
        InlineHost(Lost(263)).ask([ask(0, [1, 2])])


@pytest.mark.parametrize("method", ["observe", "_read"])
def test_a_source_that_fails_as_it_reads_drafts_for_later_texts_only(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a card has no memory left for what it is told. Stands against a world that ends; and against a text that
    has a hole in what is known of it, in which lies whatever lay there."""
    target = tiny("smollm2", tmp_path / "target")
    section = draft_section("eagle", target, tmp_path / "head") | {"tokens": 3}
    asks = [Request(i, (5, 6, 7, 8 + i) * 3, 12, Sampling()) for i in range(2)]
    texts = serve(topology(target), asks).texts()
    usual, reads, calls, read = getattr(OverTexts, method), OverTexts._read, Counter[str](), set[int]()

    def fails_once(run: OverTexts, given: Any) -> Any:
        calls[method] += 1
        if calls[method] == 3:
            raise RuntimeError("CUDA out of memory")
        return usual(run, given)

    def noted(run: OverTexts, spans: Any) -> Any:
        if calls[method] > 2:
            read.update(span.seq for span in spans)
        return (fails_once if method == "_read" else reads)(run, spans)

    monkeypatch.setattr(OverTexts, method, fails_once)
    monkeypatch.setattr(OverTexts, "_read", noted)
    told = serve(topology(target, draft=section, serve={"max_running": 1}), asks)
    assert told.texts() == texts
    assert sum("draft source failed" in record.message for record in caplog.records) == 1
    assert len(read) == 1, "more was read of the first text"


class Forgetful(Liar):
    """Which texts it is told of; it fails while it is broken."""

    needs = Needs(taps=(0,))

    def __init__(self) -> None:
        super().__init__(263)
        self.told, self.is_broken = list[set[int]](), False

    def observe(self, verdicts: Any, taps: Any) -> None:
        self.told.append(set(taps.rows))
        if self.is_broken:
            raise RuntimeError("CUDA out of memory")


def test_a_text_that_was_lost_is_told_no_more_unless_it_begins_anew() -> None:
    """Stands against features that fill a card's memory and nobody reads, and against one text that takes others along
    every time that it fails."""
    drafter, tapped = Forgetful(), torch.zeros(1, 2)
    guarded = Failsafe(drafter)

    def tell(firsts: dict[int, int]) -> None:
        guarded.observe([], Taps({seq: (first, tapped) for seq, first in firsts.items()}))

    def drafts_for() -> list[int]:
        asks = [ask(seq, [1, 2]) for seq in (0, 1)]
        return [one.seq for one, tree in zip(asks, guarded.propose(asks), strict=True) if len(tree)]

    drafter.is_broken = True
    tell({0: 0})
    drafter.is_broken = False
    tell({0: 1, 1: 0})
    assert (drafter.told, drafts_for()) == ([{0}, {1}], [1])
    tell({0: 0, 1: 1})
    assert (drafter.told[-1], drafts_for()) == ({0, 1}, [0, 1])


@pytest.mark.parametrize("source", ["model", "eagle", "mtp", "medusa", "pard", "ngram+eagle", "lookahead+eagle"])
def test_ranks_that_compute_differently_verify_the_same_drafts(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against a box of unlike cards on which every rank drafts for itself: the last bit of one logit makes
    another draft, and the first one ends the world."""
    target = tiny("smollm2", tmp_path / "target")
    names = source.split("+")
    section = draft_section(names[-1], target, tmp_path / "head") | {"tokens": 3, "source": names}

    def rounded_its_own_way(logits_TV: torch.Tensor, *rest: Any, **more: Any) -> RowLogits:
        return RowLogits(logits_TV + torch.randn_like(logits_TV), *rest, **more)

    for room in ("model", "medusa", "pard"):
        monkeypatch.setattr(f"tpspec.draft.{room}.RowLogits", rounded_its_own_way)
    asks = [Request(i, (5, 6, 7, 8 + i) * 3, 12, Sampling()) for i in range(2)]
    told = serve(topology(target, 2, draft=section), asks)
    assert told.texts() == serve(topology(target, 2), asks).texts()
    assert told.stats[-1].drafted > 0
