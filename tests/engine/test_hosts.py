"""What a host lets pass of a source that fails, and of one that does not say the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny
from tests.draft.kits import draft_section
from tests.draft.liar import Liar
from tests.draft.table import ask
from tests.worlds import serve, topology
from tpspec.draft.protocol import Ask
from tpspec.engine.hosts import InlineHost
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
