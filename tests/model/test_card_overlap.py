"""What kernels that overlap ask of a card's driver. That they do, and what they compute: tests/gpu."""

from __future__ import annotations

import ctypes
import logging

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

from tpspec.model.card import overlap as card_overlap

CARD = torch.device("cuda", 0)


class Driver:
    """In place of libcuda. told: the error that it answers with."""

    def __init__(self, told: int = 0) -> None:
        self.asked, self._told = list[tuple[int | None, int, int]](), told

    def cuFuncSetAttribute(self, kernel: ctypes.c_void_p, attribute: int, value: int) -> int:
        self.asked.append((kernel.value, attribute, value))
        return self._told


def loaded(driver: Driver, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """As Triton tells of a kernel that it has loaded, on such a card, of which two products were made."""
    monkeypatch.setattr(card_overlap, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    hooks = type(knobs.runtime.kernel_load_end_hook)(reversed=True)
    monkeypatch.setattr(knobs.runtime, "kernel_load_end_hook", hooks)
    for _ in range(2):
        card_overlap.overlap(CARD)
    hooks("a module", 1234, "place", {}, "a hash")


def test_what_triton_loads_shares_all_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against small kernels that leave a processor's memory divided otherwise than products want it, which then
    begin late, and crowded: of int4 of an 8B `o` took 10.0 us on an H200, and 6.8 for that alone."""
    driver = Driver()
    loaded(driver, monkeypatch)
    assert driver.asked == [(1234, 9, 100)]


def test_where_kernels_wait_for_each_others_end_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor any more, where they do from now on: both are measured in one process."""
    driver = Driver()
    loaded(driver, monkeypatch, capability=(8, 6))
    monkeypatch.setenv(card_overlap.SWITCH, "off")
    loaded(driver, monkeypatch)
    assert driver.asked == []
    monkeypatch.delenv(card_overlap.SWITCH)
    loaded(driver, monkeypatch)
    monkeypatch.setattr(card_overlap, "OVERLAP_FROM", (99, 0))
    card_overlap.overlap(CARD)
    knobs.runtime.kernel_load_end_hook("a module", 1234, "place", {}, "a hash")
    assert len(driver.asked) == 1


def test_a_driver_that_declines_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaded(Driver(told=1), monkeypatch)
    assert "place divides a processor's memory in its own way" in caplog.text
    assert "CUDA error 1" in caplog.text
