"""What the ledger counts is what torch.distributed was asked to do."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.emulated_card import emulated_card
from tpspec.comm import distributed
from tpspec.comm.communicator import ForOne, Made, OneRank, Purpose, Then
from tpspec.comm.distributed import GATHER_BYTES, Distributed
from tpspec.comm.ledger import Counted, Ledger, counted
from tpspec.comm.messages import Tally


class Group:
    """A process group of two in which this process plays both."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls and bytes that a stub in place of torch.distributed sees."""
    calls: Counter[str] = Counter()

    def all_reduce(x: torch.Tensor, group: object) -> None:
        calls.update({"count": 1, "bytes": x.nbytes})
        x *= 2

    def gather_into(out: torch.Tensor, x: torch.Tensor, group: object) -> None:
        calls.update({"count": 1, "bytes": x.nbytes})
        out.view(2, -1)[:] = x

    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(distributed, "gather_into", gather_into)
    return calls


def test_counts_what_torch_distributed_sees(seen: Counter[str]) -> None:
    ledger = Ledger()
    comm = counted(Distributed(Group()), ledger)  # type: ignore[arg-type]
    small, large = torch.ones(6, 8).bfloat16(), torch.ones(GATHER_BYTES)
    assert torch.equal(comm.all_reduce(small, Purpose.mlp), torch.full((6, 8), 2.0).bfloat16())
    assert torch.equal(comm.all_reduce(large, Purpose.attention), torch.full((GATHER_BYTES,), 2.0))
    assert comm.all_gather(torch.zeros(3, 2), Purpose.pick).shape == (2, 3, 2)
    totals = ledger.totals().values()
    assert sum(tally.count for tally in totals) == seen["count"] == 3
    assert sum(tally.bytes for tally in totals) == seen["bytes"] == 6 * 8 * 2 + GATHER_BYTES * 4 + 3 * 2 * 4


def test_a_group_of_one_is_not_counted() -> None:
    one = OneRank()
    assert counted(one, Ledger()) is one


def test_since_is_the_difference() -> None:
    ledger = Ledger()
    ledger.add(Purpose.mlp, 10, 1.0)
    before = ledger.totals()
    ledger.add(Purpose.mlp, 5, 0.5)
    ledger.add(Purpose.pick, 1, 0.25)
    ledger.mark_round()
    assert ledger.since(before) == {Purpose.mlp: Tally(1, 5, 0.5), Purpose.pick: Tally(1, 1, 0.25)}
    assert ledger.totals()[Purpose.mlp] == Tally(2, 15, 1.5)
    assert ledger.since(ledger.totals()) == {}
    assert ledger.rounds == 1


class Slow(OneRank):
    """A group that takes its time."""

    size = 2

    def all_reduce(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        time.sleep(0.02)
        return x


def test_seconds_are_those_spent_in_the_call() -> None:
    ledger = Ledger()
    Counted(Slow(), ledger).all_reduce(torch.ones(1), Purpose.mlp)
    assert 0.02 <= ledger.totals()[Purpose.mlp].seconds < 0.2


class Doubling:
    """What is made of a sum; slowly, where it is no part of the sum's kernel."""

    def __call__(self, total: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return 2 * total

    def with_peers(self, x: torch.Tensor, meeting: Any) -> torch.Tensor | None:
        return 2 * x if meeting is not None else None


class Joining(OneRank):
    """A group whose kernels may sum and go on. meeting: None where there are none."""

    size = 2

    def __init__(self, meeting: object) -> None:
        self.meeting = meeting

    def all_reduce_then(self, x: torch.Tensor, purpose: Purpose, then: Then[Made]) -> Made:
        made = then.with_peers(x, self.meeting)  # type: ignore[arg-type]
        return then(self.all_reduce(x, purpose)) if made is None else made


@pytest.mark.parametrize("meeting", [None, object()], ids=["in two kernels", "in one"])
@pytest.mark.parametrize("on_card", [False, True])
def test_a_sum_counts_once_whatever_is_made_of_it(on_card: bool, meeting: object) -> None:
    """Stands against sums that are counted twice or never, and the time of a norm that passes for a link's."""
    with emulated_card() if on_card else nullcontext():
        ledger = Ledger()
        comm = ForOne(Counted(Joining(meeting), ledger), Purpose.draft)
        made = comm.all_reduce_then(torch.ones(2, 3, device="cuda" if on_card else "cpu"), Purpose.mlp, Doubling())
        assert made.tolist() == [[2.0] * 3] * 2
        (tally,) = ledger.since({}).items()
    assert tally[0] is Purpose.draft
    assert (tally[1].count, tally[1].bytes) == (1, 24)
    assert tally[1].seconds < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_seconds_on_a_device_arrive_later_without_waiting() -> None:
    """Reading a CUDA event before it happened waits, or raises; a ledger that waits stalls the round."""

    class OnACard(Slow):
        """Whose work lies between the two events: with nothing there, a clock may show the same time twice."""

        def all_reduce(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
            torch.cuda._sleep(1_000_000)
            return super().all_reduce(x, purpose)

    ledger, x = Ledger(), torch.ones(1 << 20, device="cuda")
    comm = Counted(OnACard(), ledger)
    torch.cuda._sleep(200_000_000)
    comm.all_reduce(x, Purpose.mlp)
    assert ledger.totals()[Purpose.mlp] == Tally(1, x.nbytes, 0.0)
    torch.cuda.synchronize()
    ledger.mark_round()
    assert ledger.totals()[Purpose.mlp].seconds > 0
