"""Communicators over torch.distributed, and the world that hands them out: NCCL on CUDA, gloo on CPU.

Knows ranks, processes and time limits; must not know what a collective is for, nor read the environment. Ranks of one
host on CPU share memory instead (shared.py); gloo is then how they meet, and the reference.

Shapes: N ranks of the group.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]  # torch does not list them

from tpspec.comm.communicator import InTurn, OneRank, Purpose, as_line, note_in, sum_in_order
from tpspec.comm.shared import SharedMemory, Unavailable, share_memory
from tpspec.comm.through_host import ThroughHost
from tpspec.errors import UserError, WorldFailure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from tpspec.comm.communicator import Communicator

log = logging.getLogger(__name__)

Transport = Literal["auto", "gloo", "shared", "host", "peer"]
SHARING: tuple[Transport, ...] = ("host", "peer")  # by which several ranks may have the same card
# gloo alone: up to here gathering and adding takes less time than its all_reduce (6 x 576 bfloat16, 2 ranks: 0.17 ms
# instead of 0.28 ms), beyond it the all_reduce moves fewer bytes.
GATHER_BYTES = 1 << 18
# The name changed in torch 2.13, and the old one warns there.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where torchrun put this process. local_size: ranks on this host.

    address: of the host where the ranks meet, or a folder of theirs alone (rendezvous.py). restarts: how often the
    ranks have been started again.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    restarts: int = 0

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Place:
        """From torchrun's variables; without them, a world of one. Raises UserError where they are not numbers."""
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": environ.get("WORLD_SIZE", 1)}
        names |= {"TORCHELASTIC_RESTART_COUNT": 0}
        try:
            rank, world, local, here, restarts = (int(environ.get(name, default)) for name, default in names.items())
        except ValueError as error:
            seen = ", ".join(f"{name}={environ.get(name)!r}" for name in names)
            raise UserError(f"torchrun sets {', '.join(names)} to whole numbers; here {seen}") from error
        return cls(rank, world, local, here, environ.get("MASTER_ADDR", ""), restarts)

    @property
    def ranks_here(self) -> range:
        """The ranks of this host: torchrun numbers each host's one after another."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)

    @property
    def on_one_host(self) -> bool:
        return self.local_size == self.world_size

    @property
    def meets_in_folder(self) -> bool:
        return self.address.startswith("/")


class Distributed(InTurn):
    """A group of two or more processes. Not for two threads at once: a group has one order of collectives.

    ordered: add in rank order whatever the message, so that a row's bits do not depend on the rows beside it.
    """

    is_queued = True

    def __init__(self, group: dist.ProcessGroup, *, ordered: bool = False) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group: dist.ProcessGroup | None = group
        self._gather_bytes = _gather_bytes(dist.get_backend(group), ordered and self.size > 2)

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        """The sum, in x's memory. Raises WorldFailure when another rank is gone or late."""
        if x.nbytes <= self._gather_bytes and x.is_contiguous():
            return sum_in_order(self.all_gather(x, purpose).unbind(), out=x)
        try:
            dist.all_reduce(x, group=self._group)
        except RuntimeError as error:
            raise _failure(f"rank {self.rank} of {self.size}, collective for {purpose}", error) from error
        return x

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        """[N, *x.shape]. Raises WorldFailure when another rank is gone or late."""
        out = x.new_empty((self.size, *x.shape))
        try:
            gather_into(out.view(-1), x.reshape(-1), group=self._group)
        except RuntimeError as error:
            raise _failure(f"rank {self.rank} of {self.size}, collective for {purpose}", error) from error
        return out

    def close(self) -> None:
        """Lets go of the group, so that it ends before the interpreter does.

        Held until then, gloo's threads aborted 3 of 6 worlds of two at their exit (SIGABRT, torch 2.13); let go, none.
        """
        self._group = None


def _gather_bytes(backend: str, always: bool) -> float:
    """The largest message that all_reduce gathers and adds itself."""
    if always:
        return float("inf")
    return GATHER_BYTES if "gloo" in backend and "nccl" not in backend else 0


class World:
    """The processes that torchrun started, or this one alone (`join_world`). Every rank calls every verb."""

    def __init__(self, place: Place, device: torch.device, timeout_s: float) -> None:
        self.place, self.device, self.timeout_s = place, device, timeout_s
        self._members: list[Distributed | SharedMemory] = []

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.world_size

    def group(
        self, ranks: Sequence[int], *, ordered: bool = False, transport: Transport = "auto"
    ) -> Communicator | None:
        """A communicator of `ranks` (numbered anew from 0, ascending); None on the other ranks.

        transport: how ranks on the CPU reach each other. `auto`: through shared memory on one host, else gloo. `host`:
        ranks on cards, too, by that way. `peer`: ranks on cards by each other's memory, where that works and is faster.
        Raises UserError when `shared` is asked for and cannot be.
        """
        if len(ranks) == 1:
            return OneRank() if self.rank in ranks else None
        try:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise _failure(f"rank {self.rank}, making the group of ranks {list(ranks)}", error) from error
        if self.rank not in ranks:
            return None
        member = Distributed(group, ordered=ordered)
        self._members.append(member)
        on_cpu = self.device.type == "cpu"
        if transport == "host" and not on_cpu:
            return ThroughHost(self._faster(member, "auto"))
        if transport == "peer" and not on_cpu:
            return self._by_peers(member)
        return self._faster(member, transport) if transport == "shared" or (transport != "gloo" and on_cpu) else member

    def _faster(self, member: Distributed, transport: Transport) -> Communicator:
        """The same ranks over shared memory; the member itself, and a warning, where that fails and is not a must."""
        try:
            if self.device.type != "cpu" and transport == "shared":
                raise Unavailable(f"the ranks compute on {self.device.type}")
            shared = share_memory(member, self.timeout_s)
        except Unavailable as fault:
            if transport == "shared":
                raise UserError(f"link.transport: shared cannot be: {fault}") from fault
            if member.rank == 0 and not fault.expected:
                log.warning("collectives go through gloo, which is slower than shared memory: %s", fault)
            return member
        self._members.append(shared)
        return shared

    def _by_peers(self, member: Distributed) -> Communicator:
        """The same ranks by peer memory; without it, and with a warning, where that fails."""
        from tpspec.comm.peer_cards import share_cards  # Triton comes with torch for cards only

        host = self._faster(member, "auto")
        shares = self.place.local_size > torch.cuda.device_count()  # NCCL wants a card for every rank
        other: Communicator = ThroughHost(host) if shares else member
        try:
            peers = share_cards(other, host, self.device)
        except Unavailable as fault:
            if member.rank == 0:
                log.warning("collectives do not go through peer memory: %s", fault)
            return other
        if member.rank == 0:
            most = peers.most_bytes, peers.most_at_once
            log.info("messages of up to %d bytes go through peer memory, sums of up to %d in one leg", *most)
        return peers

    def announce(self, note: str | None, lead: int = 0) -> str:
        """A short text of the lead's, on every rank; the others pass None."""
        if self.size == 1:
            return note or ""
        line = as_line(note or "")
        try:
            dist.broadcast(line, src=lead)
        except RuntimeError as error:
            raise _failure(f"rank {self.rank}, an announcement of rank {lead}", error) from error
        return note_in(line)

    def close(self) -> None:
        for member in self._members:
            member.close()


@contextmanager
def join_world(place: Place, device: torch.device, timeout_s: float = 60.0) -> Iterator[World]:
    """Joins the processes of torchrun; alone, it starts nothing. Raises WorldFailure when they do not all come.

    timeout_s: after this long in a collective, another rank counts as dead.
    """
    world = World(place, device, timeout_s)
    if place.meets_in_folder:
        Path(place.address, str(os.getpid())).touch()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world_size == 1:
        yield world
        return
    _meet(place, device, timeout_s)
    clean = False
    try:
        yield world
        clean = True
    finally:
        world.close()
        # After a failure NCCL would wait for kernels that wait for a rank that is gone; the process ends anyway.
        if clean or device.type != "cuda":
            dist.destroy_process_group()


def _meet(place: Place, device: torch.device, timeout_s: float) -> None:
    # Announcements are CPU tensors, so gloo is there beside NCCL.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout_s)
    try:
        how = f"file://{place.address}/store" if place.meets_in_folder else "env://"
        found, _, _ = next(rendezvous(how, place.rank, place.world_size, timeout=limit))
        # torchrun's own store stays when the ranks do not, and with it the addresses of dead ones.
        store = PrefixStore(f"start-{place.restarts}", found)
        store.set_timeout(limit)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    except RuntimeError as error:
        raise _failure(f"rank {place.rank} of {place.world_size}, meeting the others", error) from error


def _failure(what: str, error: RuntimeError) -> WorldFailure:
    """One line for the user of what torch.distributed raised: its first sentence."""
    sentence = re.sub(r"^\[\S+:\d+\] ", "", str(error)).split("\n")[0].split(". ")[0]
    return WorldFailure(f"{what}: another rank is gone or late ({sentence})")
