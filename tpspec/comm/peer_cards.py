"""Opens the memory of every card of a group to every other (CUDA IPC), tries it, and finds up to which size it wins.

Knows the CUDA runtime, through ctypes: torch hands out peer memory with counters of its own, and no addresses. Must not
know what a collective is for. Imported on cards only.
"""

from __future__ import annotations

import ctypes
from itertools import takewhile
from subprocess import CalledProcessError
from typing import TYPE_CHECKING

import torch
from triton import TritonError

from tpspec.comm.communicator import NOTE_BYTES, Purpose
from tpspec.comm.peer import PeerMemory, attempt, memory_bytes, warm_up
from tpspec.comm.peer_kernel import CAPACITY
from tpspec.comm.replay_time import seconds_in_graph
from tpspec.comm.shared import agreed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpspec.comm.communicator import Communicator

HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
OWN_BYTES = 2 << 20  # smaller allocations may be part of another, which a handle then stands for
LAZY_PEER_ACCESS = 1
SIZES = (4096, 8192, 16384, 32768, 65536, 98304, CAPACITY, 2 * CAPACITY, 4 * CAPACITY, 8 * CAPACITY)
ROUNDS = 20
MISSING = (
    "C compiler",
    "Cannot find",
)  # Triton's words for what is not installed; the second: ptxas
MOST_SHOWN = NOTE_BYTES // 8  # characters of up to four bytes


class _Handle(ctypes.Structure):
    """`cudaIpcMemHandle_t`."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class Runtime:
    """The CUDA runtime that torch has loaded. Its calls raise OSError, with CUDA's own words."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").partition(".")[0]
        self._library = ctypes.CDLL(f"libcudart.so.{major}")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, num_bytes: int) -> int:
        """Of zeros, for the life of the process."""
        at, num_bytes = ctypes.c_void_p(), -(-num_bytes // OWN_BYTES) * OWN_BYTES
        self._call("cudaMalloc", ctypes.byref(at), ctypes.c_size_t(num_bytes))
        self._call("cudaMemset", at, 0, ctypes.c_size_t(num_bytes))
        self._call("cudaDeviceSynchronize")
        assert at.value is not None, "cudaMalloc has said that it succeeded"
        return at.value

    def handle(self, at: int) -> bytes:
        made = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(made), ctypes.c_void_p(at))
        return bytes(made)

    def open(self, handle: bytes) -> int:
        """Memory of another process."""
        at = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(at), given, ctypes.c_uint(LAZY_PEER_ACCESS))
        assert at.value is not None, "cudaIpcOpenMemHandle has said that it succeeded"
        return at.value

    def _call(self, name: str, *given: object) -> None:
        code = self._library[name](*given)
        if code:
            self._library.cudaGetLastError()  # or torch's next launch would find the error and take it for its own
            raise OSError(code, f"{name}: {self._library.cudaGetErrorString(code).decode()}")


def share_cards(other: Communicator, host: Communicator, device: torch.device) -> PeerMemory:
    """`other`, with small messages through peer memory. Raises Unavailable, on all ranks alike. Collective.

    host: joins the same ranks through the host's memory.
    """
    runtime = agreed(host, Runtime)
    own = agreed(host, lambda: runtime.allocate(memory_bytes(host.size)))
    handle = agreed(host, lambda: runtime.handle(own))
    handles = host.all_gather(torch.frombuffer(bytearray(handle), dtype=torch.uint8), Purpose.control)
    others = {rank: bytes(one.tolist()) for rank, one in enumerate(handles) if rank != host.rank}
    opened = agreed(host, lambda: {rank: runtime.open(one) for rank, one in others.items()})
    addresses = [opened.get(rank, own) for rank in range(host.size)]
    peers = PeerMemory(other, addresses, device)
    agreed(host, lambda: _built(lambda: warm_up(peers, device)))
    agreed(host, lambda: attempt(peers, device))
    if other.is_queued:  # what the host takes part in is slower at any size
        sizes = [size for size in SIZES if size <= peers.most_bytes]
        once_s = _slowest_s(peers, host, device, [size for size in sizes if size <= CAPACITY])
        peers.most_at_once = 0
        twice_s, other_s = (_slowest_s(comm, host, device, sizes) for comm in (peers, other))
        peers.most_at_once, peers.most_bytes = largest_won(once_s, twice_s, other_s)
    return peers


def _built(work: Callable[[], None]) -> None:
    """What launches kernels for the first time. Raises OSError where Triton cannot compile them, or what it loads
    them with: that takes a C compiler, Python's headers and an assembler."""
    try:
        work()
    except (CalledProcessError, TritonError) as error:
        raise _no_kernels(error) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in MISSING):
            raise
        raise _no_kernels(error) from error


def _no_kernels(error: Exception) -> OSError:
    """Its beginning, which says what: there follow a command, a log or a program, and ranks tell each other notes."""
    return OSError(f"Triton cannot build its kernels: {str(error)[:MOST_SHOWN]}")


def largest_won(once_s: Sequence[float], twice_s: Sequence[float], other_s: Sequence[float]) -> tuple[int, int]:
    """Of SIZES, of which one leg takes so many seconds, and two, and the other way: the largest up to which every size
    takes less in one leg than in two, and up to which what is then taken is less than the other way. 0 where the
    smallest does not."""
    num_once = _num_won(once_s, twice_s)
    num_won = _num_won([*once_s[:num_once], *twice_s[num_once:]], other_s)
    sizes = (0, *SIZES)
    return sizes[min(num_once, num_won)], sizes[num_won]


def _num_won(own_s: Sequence[float], other_s: Sequence[float]) -> int:
    """How many of the first take less."""
    return sum(1 for _ in takewhile(lambda both: both[0] < both[1], zip(own_s, other_s, strict=False)))


def _slowest_s(comm: Communicator, host: Communicator, device: torch.device, sizes: Sequence[int]) -> list[float]:
    """Seconds of an all-reduce of each size inside a graph, on the slowest rank: the same numbers on each."""
    messages = [torch.zeros(size // 2, dtype=torch.bfloat16, device=device) for size in sizes]
    own = [seconds_in_graph(lambda x: comm.all_reduce(x, Purpose.control), x, ROUNDS) for x in messages]
    slowest: list[float] = host.all_gather(torch.tensor(own, dtype=torch.float64), Purpose.control).amax(0).tolist()
    return slowest
