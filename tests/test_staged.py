"""Numbers on their way to an emulated card."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.emulated_card import CARD, emulated_card
from tpspec.staged import MOST_UNPINNED, Staged, sent

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one: tests/gpu"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to tell torch of a card"),
]
LARGE = torch.arange(MOST_UNPINNED).view(64, -1)


def test_what_is_large_leaves_from_pinned_memory_and_nobody_waits() -> None:
    """Stands against a host that waits for the round before, for it sends the next one's rows; of a view, too, numbers
    in the order they had."""
    with emulated_card() as card:
        small, large, view = sent([1, 2], CARD), sent(LARGE, CARD), sent(LARGE.T, CARD)
        assert (len(card.pinned), card.waits) == (2, [])
        assert (small.tolist(), large.tolist(), view.tolist()) == ([1, 2], LARGE.tolist(), LARGE.T.tolist())


def test_nothing_is_overwritten_before_it_has_left_and_nobody_asks_who_knows_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stands against numbers of the next round in a copy of this one's, of which nobody has said when it is done."""
    asked: list[str] = []
    with emulated_card():
        for name in ("record", "synchronize"):
            monkeypatch.setattr(torch.cuda.Event, name, lambda event, name=name: asked.append(name))
        staged = Staged(4, torch.float32, CARD)
        staged.room()
        staged.sent()
        assert asked == ["record"]
        staged.room()
        assert asked == ["record", "synchronize"]
        staged.left()
        staged.room()
        assert asked == ["record", "synchronize"]
        staged.room()  # it was written, and is copied by whatever was asked for since
        assert asked == ["record", "synchronize"] * 2


def test_what_is_there_stays() -> None:
    """Stands against what heads keep of a text taking the way to the host and back."""
    with emulated_card() as card:
        large = sent(LARGE, CARD)
        assert sent(large, CARD) is large
        assert card.waits == []
