"""A communicator of processes that share one host's memory: shared.c, called through ctypes, which frees Python.

Knows processes and time limits; must not know what a collective is for, nor which groups should use it. Every rank adds
in rank order in float32 and rounds once, so no bit depends on the rank or on where an element stands in the message.

Shapes: N ranks.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import torch

from tpspec import native
from tpspec.comm.communicator import InTurn, Purpose, sum_in_order, told_by_all
from tpspec.comm.process import Peer, num_cores
from tpspec.errors import WorldFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tpspec.comm.communicator import Communicator

Result = TypeVar("Result")

LIBRARY = "tpspec.comm._shared"  # built by setuptools from shared.c where there is a compiler
VERSION = 1  # of shared.c
SUMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # what shared.c adds; it gathers anything
DONE, DIVERGED = 0, -1
SLOT_BYTES = 1 << 18  # longer messages go in pieces
SPIN_US = 150.0  # longer than a wake-up (60 us here): else two ranks can keep waking each other for ever
CROWDED_SPIN_US = 2.0  # more ranks than cores: who spins holds up the one it waits for
TRIAL_TIMEOUT_S = 5.0


class Unavailable(Exception):
    """Why these ranks cannot share memory, the same on each. expected: they do not sit on one host."""

    def __init__(self, reason: str, *, expected: bool = False) -> None:
        super().__init__(reason)
        self.expected = expected


class SharedMemory(InTurn):
    """A group of two or more processes of one host, made by `share_memory`. Not for two threads at once."""

    is_queued = False

    def __init__(self, library: ctypes.CDLL, rank: int, peers: Sequence[Peer]) -> None:
        self.rank, self.size = rank, len(peers)
        self.timeout_s = TRIAL_TIMEOUT_S
        self._library, self._peers = library, peers
        self._reduce: Callable[..., int] = library.tp_all_reduce
        self._gather: Callable[..., int] = library.tp_all_gather
        self._handle: int | None = None

    def open(self, name: str, *, create: bool) -> None:
        """Maps the segment. Raises OSError."""
        spin_us = SPIN_US if self.size <= num_cores() else CROWDED_SPIN_US
        shape = (int(create), self.rank, self.size, SLOT_BYTES, int(spin_us * 1000))
        self._handle = self._library.tp_open(name.encode(), *shape)
        if self._handle is None:
            raise OSError(ctypes.get_errno(), f"shared memory: {os.strerror(ctypes.get_errno())}")

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        """The sum, in x's memory if it is contiguous. Raises WorldFailure when another rank is gone or late."""
        kind = SUMS.get(x.dtype)
        if kind is None:
            return sum_in_order(self.all_gather(x, purpose).unbind(), out=x)
        x = x.contiguous()
        self._run(purpose, self._reduce, x.data_ptr(), x.nbytes, kind)
        return x

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        """[N, *x.shape]. Raises WorldFailure when another rank is gone or late."""
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        self._run(purpose, self._gather, x.data_ptr(), x.nbytes, out.data_ptr())
        return out

    def close(self) -> None:
        """Lets go of the memory. Collectives are refused from here on."""
        handle, self._handle = self._handle, None
        self._library.tp_close(handle)
        for peer in self._peers:
            peer.close()

    def _run(self, purpose: Purpose, verb: Callable[..., int], *message: int) -> None:
        """Repeats the call, which waits for a tenth of a second at most, until all have come or one never will."""
        if (code := verb(self._handle, *message)) == DONE:
            return
        deadline = monotonic() + self.timeout_s
        while code > 0:
            rank = code - 1
            why = self._lost(rank, deadline)
            code = verb(self._handle, *message)  # in any case: it may have come just before it ended
            if why and code == rank + 1:
                raise self._failure(purpose, f"another rank is gone or late (rank {rank}: {why})")
        if code != DONE:
            raise self._failure(purpose, "the ranks diverged" if code == DIVERGED else "the group is closed")

    def _lost(self, rank: int, deadline: float) -> str:
        if self._peers[rank].has_ended():
            return "its process has ended"
        return f"nothing came for {self.timeout_s:g} s" if monotonic() > deadline else ""

    def _failure(self, purpose: Purpose, why: str) -> WorldFailure:
        return WorldFailure(f"rank {self.rank} of {self.size}, collective for {purpose}: {why}")


def share_memory(over: Communicator, timeout_s: float) -> SharedMemory:
    """A group of the ranks of `over`, which serves to meet and no more. Raises Unavailable, on all ranks alike.

    Sums and gathers were verified when it returns, and the segment has no name any more: it goes with the last process,
    however that ends. timeout_s: after this long in a collective, another rank counts as dead.
    """
    pids = _pids_of_one_host(over)
    library = agreed(over, load_library)
    leads = over.rank == 0
    name = told_by_all(over, f"/tpspec-{os.getpid()}-{secrets.token_hex(6)}" if leads else "")[0]
    with ExitStack() as undo, ExitStack() as named:
        group = SharedMemory(library, over.rank, agreed(over, lambda: [Peer(pid) for pid in pids]))
        undo.callback(group.close)
        if leads:
            named.callback(library.tp_unlink, name.encode())
        agreed(over, lambda: group.open(name, create=True) if leads else None)
        agreed(over, lambda: None if leads else group.open(name, create=False))
        named.close()  # everybody holds it; before the last agreement, so that no rank leaves while the name is there
        agreed(over, lambda: _try(group))
        undo.pop_all()
    group.timeout_s = timeout_s
    return group


def load_library() -> ctypes.CDLL:
    """The compiled shared.c. Raises OSError."""
    library = native.library(LIBRARY)
    if library is None:
        raise OSError("shared.c was not compiled: install a C compiler, then tpspec again")
    if library.tp_version() != VERSION:
        raise OSError("the compiled shared.c is of another version: install tpspec again")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.tp_open.restype = pointer
    library.tp_open.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint32, size, ctypes.c_uint64)
    library.tp_unlink.argtypes = (ctypes.c_char_p,)
    library.tp_close.argtypes = (pointer,)
    library.tp_all_reduce.argtypes = (pointer, pointer, size, ctypes.c_int)
    library.tp_all_gather.argtypes = (pointer, pointer, size, pointer)
    return library


def _try(group: SharedMemory) -> None:
    """Sums and gathers what every rank can foretell, over more than a slot. Raises WorldFailure where it differs."""
    for dtype in SUMS:
        parts = [_sample(rank, dtype) for rank in range(group.size)]
        total = sum_in_order(parts, torch.empty_like(parts[0]))
        summed = group.all_reduce(parts[group.rank].clone(), Purpose.control)
        gathered = group.all_gather(parts[group.rank], Purpose.control)
        if not torch.equal(summed, total) or not torch.equal(gathered, torch.stack(parts)):
            raise WorldFailure(f"the trial of shared memory went wrong in {dtype}")


def _sample(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SLOT_BYTES // dtype.itemsize + 33, generator=generator).to(dtype)


def agreed(over: Communicator, work: Callable[[], Result]) -> Result:
    """`work` on every rank. Where it fails on one, Unavailable on all."""
    result, fault = [], ""
    try:
        result = [work()]
    except (OSError, WorldFailure) as error:
        fault = str(error)
    faults = [f"rank {rank}: {told}" for rank, told in enumerate(told_by_all(over, fault)) if told]
    if faults:
        raise Unavailable(faults[0])
    return result[0]


def _pids_of_one_host(over: Communicator) -> list[int]:
    """The process id of each rank. Raises Unavailable when they do not see each other's memory and ids."""
    notes = [note.rpartition(" ") for note in told_by_all(over, f"{_host()} {os.getpid()}")]
    if len({host for host, _, _ in notes}) > 1:
        raise Unavailable("the ranks do not sit on one host", expected=True)
    return [int(pid) for _, _, pid in notes]


def _host() -> str:
    """The same text for processes that share memory and process ids: containers of one machine may not."""
    boot, ids, memory = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid"), Path("/dev/shm")
    if not (boot.exists() and ids.exists() and memory.exists()):
        return socket.gethostname()
    return f"{boot.read_text().strip()} {ids.stat().st_ino} {memory.stat().st_dev}"
