"""Which tiles a card's products are cut into is tried, and changes nothing but their time. What a clock says is given
here; the kernels are in test_card_products.py, and what they compile to in test_card_kernels.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton import knobs
from triton.runtime.errors import OutOfResources

from tests import emulated_card
from tpspec.model.card import tiles as card_tiles

CPU = torch.device("cpu")


class Trial:
    """took_s: of each tile, which is its name; what is "others" adds otherwise, and what is "large" does not fit."""

    def __init__(self, took_s: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.took_s, self.timed = took_s, list[str]()
        monkeypatch.setattr(knobs.runtime, "interpret", False)
        monkeypatch.setattr(card_tiles, "_chosen", {})
        monkeypatch.setattr(card_tiles, "seconds", self.seconds)

    def seconds(self, works: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
        begun = len(self.timed)
        for work in works:
            work()
            self.timed.append(self._last)
        return [self.took_s[tile] for tile in self.timed[begun:]]

    def product(self, x_TI: Tensor, tile: str) -> Tensor:
        self._last = tile
        if tile == "large":
            raise OutOfResources(200, 100, "shared memory")
        return x_TI.sum(1) + (tile == "others")

    def chosen(
        self,
        *,
        num_bytes: int = 1 << 30,
        of: str = "a matrix",
        rows: tuple[int, ...] = (1,),
        worth: float = card_tiles.WORTH,
    ) -> list[str]:
        tiles = ["usual", *(tile for tile in self.took_s if tile != "usual")]
        trial = card_tiles.Trial(of, 32, num_bytes, CPU, torch.float32)
        return card_tiles.chosen(dict.fromkeys(rows, tiles), self.product, trial, worth)


def test_the_fastest_is_taken_and_tried_once_for_all_matrices_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a start that tries each of a model's layers, and one trial for matrices that are not alike."""
    trial = Trial({"usual": 1.0, "slow": 1.5, "fast": 0.6}, monkeypatch)
    assert trial.chosen() == ["fast"]
    assert trial.timed == ["usual", "slow", "fast"]
    assert trial.chosen() == ["fast"]
    assert len(trial.timed) == 3
    trial.took_s["fast"] = 2.0
    assert trial.chosen(of="another", rows=(1, 16)) == ["usual", "usual"]
    assert len(trial.timed) == 3 + 6


def test_what_gives_other_bits_or_does_not_fit_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stands against texts that depend on a clock, and a start that fails on a card that is smaller."""
    trial = Trial({"usual": 1.0, "others": 0.1, "large": 0.1, "fast": 0.9}, monkeypatch)
    assert trial.chosen() == ["fast"]
    assert "others, by which their last bits are others" in caplog.text


def test_a_difference_by_chance_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against another choice at every start, for nothing; a gate must be faster by more."""
    assert Trial({"usual": 1.0, "fast": 0.99}, monkeypatch).chosen() == ["usual"]
    assert Trial({"usual": 1.0, "fast": 0.97}, monkeypatch).chosen() == ["fast"]
    assert Trial({"usual": 1.0, "fast": 0.97}, monkeypatch).chosen(worth=card_tiles.GATE_WORTH) == ["usual"]


def test_matrices_that_are_not_finite_are_products_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a start that fails where a checkpoint has a NaN, which is no number's equal: the usual tile is
    there in any case."""
    trial = Trial({"usual": 1.0, "fast": 0.1}, monkeypatch)
    monkeypatch.setattr(trial, "product", lambda x_TI, tile: x_TI * torch.nan)
    monkeypatch.setattr(trial, "_last", "usual", raising=False)
    assert trial.chosen() == ["usual"]


def test_small_matrices_are_not_tried_nor_any_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against seconds of a start for products that take as long as their launch."""
    trial = Trial({"usual": 1.0, "fast": 0.1}, monkeypatch)
    assert trial.chosen(num_bytes=card_tiles.LEAST_BYTES - 1) == ["usual"]
    monkeypatch.setenv(card_tiles.SWITCH, "off")
    assert trial.chosen() == ["usual"]
    assert trial.timed == []


def test_without_memory_for_a_trial_the_usual_ones_are_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stands against a model that fits and does not start; and it is told once."""
    trial = Trial({"usual": 1.0, "fast": 0.1}, monkeypatch)

    def out_of_memory(*given: Any, **named: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(card_tiles, "seconds", out_of_memory)
    with caplog.at_level(logging.WARNING):
        assert trial.chosen() == trial.chosen() == ["usual"]
    assert len(caplog.records) == 1


def test_a_trial_is_timed_as_it_stands_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """In recordings, on an emulated card, where a replay takes as long as it has operations. Stands against launches,
    which take longer than two kernels and had a gate that is part of its product seem the quicker one; against what is
    read for the cache's sake, which is no part of it; and less than no time, of a card that others use."""
    monkeypatch.setattr(emulated_card.PROPERTIES, "L2_cache_size", 1 << 12)
    monkeypatch.setattr(card_tiles, "replay_s", lambda graph: float(len(graph.work)))
    with emulated_card.emulated_card():
        x = torch.ones(4, 4, device="cuda")
        one, two, nothing = card_tiles.seconds([lambda: x @ x, lambda: x @ x @ x, lambda: None], x.device)
    assert (one, two) == (1, 2)
    assert nothing == card_tiles.LEAST_S


def test_rows_are_compared_all_and_timed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a tile of 64 rows whose last ones have other bits than those beside which they stand alone, and
    against tiles that suit the most rows they are for, and seldom come."""
    trial, rows = Trial({"usual": 1.0, "fast": 0.5}, monkeypatch), list[int]()
    monkeypatch.setattr(trial, "product", lambda x_TI, tile: rows.append(len(x_TI)) or Trial.product(trial, x_TI, tile))
    assert trial.chosen(rows=(1, 16, 64)) == ["fast"] * 3
    assert rows == [1] * 4 + [16] * 2 + [9] * 2 + [64] * 2 + [40] * 2
