"""Emulated links: exact on a virtual clock, within 5% and this machine's floor on the real one."""

from __future__ import annotations

from statistics import median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpspec.comm.communicator import Communicator, OneRank, Purpose
from tpspec.comm.emulate import Emulated, MonotonicClock, VirtualClock, emulated
from tpspec.comm.ledger import Ledger, counted
from tpspec.comm.threads import ThreadWorld
from tpspec.topology.config import LinkConfig
from tpspec.topology.links import link, straight

pytestmark = pytest.mark.alone

ROW = torch.zeros(8192, dtype=torch.bfloat16)  # 16 KiB
STOCK = link("rtx3090x8_gen4x16_stock")  # 50 us for it, 4 us of skew


class Two(OneRank):
    """A group of two whose collectives take `inner_s` of a virtual clock."""

    size = 2

    def __init__(self, clock: VirtualClock | None = None, inner_s: float = 0.0) -> None:
        self._clock, self._inner_s = clock, inner_s

    def all_reduce(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        if self._clock:
            self._clock.advance(self._inner_s)
        return x * 2

    def all_gather(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        return torch.stack([x, x])


def test_a_collective_takes_the_tables_time_and_the_skew_dilated() -> None:
    clock = VirtualClock(now=100.0)
    comm = Emulated(Two(clock), STOCK, dilation=20, clock=clock)
    comm.all_reduce(ROW, Purpose.mlp)
    assert clock.now() == pytest.approx(100 + 20 * 54e-6, abs=1e-12)
    assert comm.sums.link_s == pytest.approx(20 * 50e-6)
    assert comm.sums.skew_s == pytest.approx(20 * 4e-6)
    assert (comm.sums.calls, comm.sums.late_s) == (1, 0.0)


def test_the_inner_time_is_part_of_it() -> None:
    """Against gloo's time added to the emulated link's."""
    clock = VirtualClock()
    comm = Emulated(Two(clock, inner_s=30e-6), STOCK, clock=clock)
    comm.all_reduce(ROW, Purpose.mlp)
    assert clock.now() == pytest.approx(54e-6, abs=1e-15)


class Passing(Two):
    """As ranks on cards, whose tensors this machine may not have."""

    def all_reduce(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        super().all_reduce(ROW, purpose)
        return x

    def all_gather(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        return self.all_reduce(x, purpose)


@pytest.mark.parametrize("verb", ["all_reduce", "all_gather"])
def test_what_a_card_still_computes_is_not_the_links_time(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead of a card, and waits for it where it fetches what is to be sent. Against a link that costs
    nothing wherever a layer takes longer than it."""
    clock = VirtualClock()
    computing = SimpleNamespace(synchronize=lambda: clock.advance(1e-3))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    comm = Emulated(Passing(clock, inner_s=30e-6), STOCK, clock=clock)
    x: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), nbytes=ROW.nbytes)
    getattr(comm, verb)(x, Purpose.mlp)
    assert clock.now() == pytest.approx(1e-3 + comm.sums.link_s + comm.sums.skew_s, abs=1e-12)
    assert comm.sums.link_s > 30e-6


def test_a_link_faster_than_the_inner_one_is_reported_as_late() -> None:
    """Against an emulation that cannot be kept and does not say so."""
    clock = VirtualClock()
    comm = Emulated(Two(clock, inner_s=80e-6), STOCK, clock=clock)
    comm.all_reduce(ROW, Purpose.mlp)
    assert clock.now() == pytest.approx(80e-6)
    assert comm.sums.late_s == pytest.approx(26e-6)


def test_an_all_gather_costs_its_gathered_size() -> None:
    """Against pricing it by what one rank brings: half, between two."""
    clock = VirtualClock()
    Emulated(Two(), straight(10, 1.0), clock=clock).all_gather(ROW, Purpose.pick)
    assert clock.now() == pytest.approx(10e-6 + 2 * ROW.nbytes / 1e9)


def test_results_are_the_inner_ones() -> None:
    comm = Emulated(Two(), straight(0), clock=VirtualClock())
    assert (comm.rank, comm.size) == (0, 2)
    assert torch.equal(comm.all_reduce(torch.ones(3), Purpose.mlp), torch.full((3,), 2.0))
    assert comm.all_gather(torch.ones(3), Purpose.pick).shape == (2, 3)


@pytest.mark.parametrize("table", ["rtx3090x8_2socket_stock", "pcie4", "v100x4_plx_gen3x16_p2p/push1shot"])
@pytest.mark.parametrize("dilation", [1.0, 20.0])
def test_real_time_is_within_5_percent_and_the_floor(table: str, dilation: float, record_property) -> None:
    """The median of 100 calls; at most 0.3 s. The floor, what a call takes over no link at all, is reported."""

    def taken(comm: Communicator) -> float:
        times = []
        for _ in range(100):
            begin = perf_counter()
            comm.all_reduce(ROW, Purpose.mlp)
            times.append(perf_counter() - begin)
        return median(times)

    cost = link(table)
    floor_s = taken(Emulated(Two(), straight(0)))
    record_property("floor_us", floor_s * 1e6)
    expected_s = (cost.seconds(ROW.nbytes) + cost.skew_s) * dilation
    took_s = taken(Emulated(Two(), cost, dilation))
    assert expected_s <= took_s <= 1.05 * expected_s + floor_s, f"floor {floor_s * 1e6:.1f} us"
    assert floor_s < 100e-6


def test_waiting_leaves_the_core_to_others() -> None:
    """Against a spin: 40 waits of 5 ms may burn 10% of their time, the final spins and the interpreter's work."""
    clock = MonotonicClock()
    burnt, begin = process_time(), perf_counter()
    for _ in range(40):
        clock.wait_until(clock.now() + 5e-3)
    assert process_time() - burnt < 0.1 * (perf_counter() - begin)


def test_a_moment_that_has_passed_is_not_waited_for() -> None:
    clock = MonotonicClock()
    begin = perf_counter()
    clock.wait_until(begin - 1)
    assert perf_counter() - begin < 0.05


def test_the_ledger_sees_the_emulated_time() -> None:
    ledger = Ledger()
    comm = counted(Emulated(Two(), straight(3000)), ledger)
    comm.all_reduce(ROW, Purpose.attention)
    tally = ledger.totals()[Purpose.attention]
    assert (tally.count, tally.bytes) == (1, ROW.nbytes)
    assert 3e-3 <= tally.seconds < 30e-3


def test_ranks_over_an_emulated_link_still_add() -> None:
    """Against a wait that breaks the order of collectives between ranks."""

    def rank_main(comm: Communicator) -> tuple[float, float]:
        slow = Emulated(comm, straight(500))
        begin = perf_counter()
        total = sum(float(slow.all_reduce(torch.ones(1), Purpose.mlp)) for _ in range(10))
        return total, perf_counter() - begin

    for total, seconds in ThreadWorld(3).run(rank_main):
        assert total == 30
        assert seconds >= 10 * 500e-6


def test_only_what_asks_for_it_is_emulated() -> None:
    """Against a topology with a link table, for the planner's sake, that runs at the speed of its table."""
    two, on = Two(), LinkConfig(table="pcie4", emulate=True, dilation=3.0)
    assert emulated(two, LinkConfig(table="pcie4")) is two
    assert isinstance(emulated(two, on), Emulated)
    alone = OneRank()
    assert emulated(alone, on) is alone
