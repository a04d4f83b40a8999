"""N ranks as threads of one process, for tests and for looking closely: collectives without torchrun.

Sums in rank order, as `ordered` groups do, and refuses ranks that do not call the same verb with the same shape. Must
not be used for speed.

Shapes: N ranks.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

from tpspec.comm.communicator import InTurn, sum_in_order
from tpspec.errors import WorldFailure

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tpspec.comm.communicator import Communicator, Purpose

Result = TypeVar("Result")


class _Meeting:
    """Where the threads put their tensors.

    Two sets of places, used in turn, so that one barrier a collective is enough: whoever writes into a set
    again has passed the barrier of the other one, and everybody who came there has read the first.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.places: list[dict[int, tuple[str, Tensor]]] = [{}, {}]

    def exchange(self, rank: int, turn: int, call: str, x: Tensor) -> list[Tensor]:
        """Everybody's x, in rank order; copies, for x may be overwritten before the slowest has read it."""
        places = self.places[turn % 2]
        places[rank] = (f"{call} of {x.dtype} {list(x.shape)}", x.clone())
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise WorldFailure(f"rank {rank}, {call}: another rank is gone or late") from error
        calls = {places[other][0] for other in places}
        if len(calls) > 1:
            raise WorldFailure(f"the ranks diverged: {'; '.join(sorted(calls))}")
        return [places[other][1] for other in sorted(places)]


class ThreadCommunicator(InTurn):
    """One rank of a `ThreadWorld`."""

    is_queued = False

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._turn = meeting, 0

    def all_reduce(self, x: Tensor, purpose: Purpose) -> Tensor:
        return sum_in_order(self._exchange(f"all_reduce for {purpose}", x), out=x)

    def all_gather(self, x: Tensor, purpose: Purpose) -> Tensor:
        return torch.stack(self._exchange(f"all_gather for {purpose}", x))

    def _exchange(self, call: str, x: Tensor) -> list[Tensor]:
        self._turn += 1
        return self._meeting.exchange(self.rank, self._turn, call, x)


class ThreadWorld:
    """Runs a function once for each of `size` ranks, each in a thread of its own."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size, self.timeout_s = size, timeout_s

    def run(self, rank_main: Callable[[Communicator], Result]) -> list[Result]:
        """What each rank returned, in rank order. Raises what the first failing rank raised; the others do not hang."""
        meeting = _Meeting(self.size, self.timeout_s)
        failures: list[BaseException] = []

        def ended(future: Future[Result]) -> None:
            error = future.exception()
            if error is not None:
                failures.append(error)
                meeting.barrier.abort()

        comms = [ThreadCommunicator(rank, self.size, meeting) for rank in range(self.size)]
        with ThreadPoolExecutor(self.size, thread_name_prefix="rank") as pool:
            futures = [pool.submit(rank_main, comm) for comm in comms]
            for future in futures:
                future.add_done_callback(ended)
        if failures:
            raise failures[0]
        return [future.result() for future in futures]
