"""What work costs inside a CUDA graph, where no launch stands between it and its neighbours. Cards only."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from tpspec.capture import captured

CALLS = 20  # in a graph; a replay is timed as one


def seconds_in_graph(send: Callable[[Tensor], Tensor], x_E: Tensor, rounds: int) -> float:
    """Of one call, the median over replays on this rank. Every rank calls it. Sums grow in place; nobody reads them."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a communicator sets itself up at its first call, which cannot be captured
        send(x_E.clone())
    torch.cuda.current_stream().wait_stream(side)
    x_E = x_E.clone()
    graph = recorded(lambda: send(x_E), CALLS)
    graph.replay()
    return median(replay_s(graph) for _ in range(rounds)) / CALLS


def recorded(work: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """So many calls of it, one after the other; it has been called before."""
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        for _ in range(calls):
            work()
    return graph


def replay_s(graph: torch.cuda.CUDAGraph) -> float:
    """Of a replay, on this card."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
