"""Collectives of small messages through the cards' own view of each other's memory; larger ones go another way.

To be used only after `warm_up` and `attempt`, in which every rank writes to every other and reads what it should:
drivers claim peer access that is dead or wrong. Knows tensors and addresses; must not know what a collective is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from tpspec.card_words import PATIENCE
from tpspec.comm.communicator import Purpose
from tpspec.comm.meeting import Meeting
from tpspec.comm.peer_kernel import (
    CAPACITY,
    CHUNK_BYTES,
    PROGRAMS,
    ROW_BYTES,
    ROWS,
    exchange,
    leg_bytes,
    sum_by_shares,
)
from tpspec.errors import WorldFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tpspec.comm.communicator import Communicator, Made, Then

TRIAL_LOOKS = 1 << 25  # at a flag, before a peer counts as lost: some seconds
TRIALS = 50  # of each size
TRIAL_BYTES = (8, 4096, 16384, 98304, CAPACITY)
SUMMED = (torch.bfloat16, torch.float16, torch.float32)
ALIGNED = 16  # numbers, at which the share of a rank begins: what Triton needs to know for stores of 16 bytes


def memory_bytes(size: int) -> int:
    """Of each of `size` ranks, zeros at the start."""
    return 3 * leg_bytes(size)


class PeerMemory:
    """A group of ranks that see each other's memory. other: for what is too large or of another kind.

    addresses: of every rank's memory as this rank sees it, in rank order. most_at_once and most_bytes, which may be
    lowered: of what is summed this way, in one leg and at all; what is gathered goes in one leg.
    """

    def __init__(self, other: Communicator, addresses: Sequence[int], device: torch.device) -> None:
        self.rank, self.size, self.is_queued = other.rank, other.size, other.is_queued
        self.most_at_once, self.most_bytes = CAPACITY, other.size * CAPACITY
        self.most_looks = PATIENCE  # a rank that is gone is somebody else's to notice
        self._other, self._on_card = other, device.type == "cuda"
        self._memories = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._epochs, self._row_epochs = torch.zeros(2, PROGRAMS, dtype=torch.int32, device=device).unbind()
        self._lost = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def is_lost(self) -> bool:
        """Whether a flag has not come in time. Waits for the device."""
        return bool(self._lost.item())

    def forget_lost(self) -> None:
        self._lost.zero_()

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        """The sum, in x's memory, added in rank order: the same bits on every rank."""
        if x.nbytes > self.most_bytes or x.dtype not in SUMMED or not x.is_contiguous():
            return self._other.all_reduce(x, purpose)
        if x.nbytes <= self.most_at_once:
            self._exchange(x, x, sums=True)
        else:
            self._sum_by_shares(x)
        return x

    def all_reduce_then(self, x: Tensor, purpose: Purpose, then: Then[Made]) -> Made:
        """x [T, D]: of few rows. Such as go in one leg, for the same words go the same way, by one kernel less."""
        made = then.with_peers(x, self._meeting()) if self._is_of_few_rows(x) else None
        return then(self.all_reduce(x, purpose)) if made is None else made

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        if x.nbytes > min(self.most_bytes, CAPACITY):
            return self._other.all_gather(x, purpose)
        out = x.new_empty((self.size, *x.shape))
        self._exchange(x.contiguous().view(-1).view(torch.uint8), out.view(-1).view(torch.uint8), sums=False)
        return out

    def _is_of_few_rows(self, x: Tensor) -> bool:
        is_small = x.nbytes <= self.most_at_once and len(x) <= ROWS and x.nbytes <= len(x) * ROW_BYTES
        return is_small and x.dtype in SUMMED and x.is_contiguous()

    def _meeting(self) -> Meeting:
        return Meeting(
            self.rank,
            self.size,
            self._memories,
            self._row_epochs,
            self._lost,
            2 * leg_bytes(self.size),
            self.most_looks,
            self._on_card,
        )

    def _exchange(self, x: Tensor, out: Tensor, *, sums: bool) -> None:
        chunk = CHUNK_BYTES // x.itemsize
        exchange[(triton.cdiv(x.numel(), chunk),)](
            x, out, self._memories, self._epochs, self._lost, x.numel(), self.most_looks, rank=self.rank,
            size=self.size, chunk=chunk, sums=sums, on_card=self._on_card,
        )  # fmt: skip

    def _sum_by_shares(self, x: Tensor) -> None:
        chunk = CHUNK_BYTES // x.itemsize
        share = triton.cdiv(x.numel(), self.size * ALIGNED) * ALIGNED
        sum_by_shares[(triton.cdiv(share, chunk),)](
            x, self._memories, self._epochs, self._lost, x.numel(), share, self.most_looks, rank=self.rank,
            size=self.size, chunk=chunk, leg=leg_bytes(self.size), on_card=self._on_card,
        )  # fmt: skip


def warm_up(peers: PeerMemory, device: torch.device) -> None:
    """Launches what `attempt` does, and waits for nobody: what must be compiled for it, is.

    Every rank does so, then waits until all have: in the attempt nobody's looks run out while another compiles.
    """
    patience, peers.most_looks = peers.most_looks, 0
    at_once = peers.most_at_once
    for num_bytes in TRIAL_BYTES[:2]:  # numbers that fill words of 16 bytes, and such that do not
        for peers.most_at_once in (0, at_once):
            _is_right(peers, num_bytes // 4, 0, device)
    peers.most_looks = patience
    peers.forget_lost()


def attempt(peers: PeerMemory, device: torch.device, most_looks: int = TRIAL_LOOKS) -> None:
    """Sums in one leg and two of every size, and gathers as far as they go this way, many times over. Raises
    WorldFailure where one is wrong or does not end.

    A rank that gives up here is one that the others wait for, once, until their own looks are spent.
    """
    patience, peers.most_looks = peers.most_looks, most_looks
    at_once = peers.most_at_once
    for num_bytes in (*TRIAL_BYTES, peers.most_bytes):
        for turn in range(TRIALS):
            peers.most_at_once = at_once if turn % 2 else 0
            if not _is_right(peers, num_bytes // 4, turn, device):
                how = "did not come" if peers.is_lost else "came wrong"
                raise WorldFailure(f"rank {peers.rank}: a message of {num_bytes} bytes from another card {how}")
    peers.most_looks, peers.most_at_once = patience, at_once


def _is_right(peers: PeerMemory, count: int, turn: int, device: torch.device) -> bool:
    """Of whole numbers that differ by place, rank and turn, whose sum float32 holds."""
    ranks = range(peers.size)
    brought = [(torch.arange(count, device=device) % 997 + 1000 * rank + turn).float() for rank in ranks]
    stacked = torch.stack(brought)
    # What is gathered another way is not on trial, and would wait long for a rank that has given up.
    goes_here = brought[peers.rank].nbytes <= CAPACITY
    gathered = peers.all_gather(brought[peers.rank], Purpose.control) if goes_here else stacked
    total = peers.all_reduce(brought[peers.rank].clone(), Purpose.control)
    return torch.equal(gathered, stacked) and torch.equal(total, stacked.sum(0)) and not peers.is_lost
