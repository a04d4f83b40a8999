#!/usr/bin/env python3
"""How long an all-reduce takes between the ranks of this host: gloo and shared memory, interleaved in one run.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 scripts/bench_comm.py [--rounds 20] [--calls 100]
        [--spin-us 0 5 50] [--slot-kib 64 256]

A figure is of rank 0: microseconds from the call to the sum, ranks in step, bfloat16. The transports take turns,
--calls collectives each, so that both see the same disturbances; the first turn warms up and is not counted. --spin-us
and --slot-kib try other values of the constants in tpspec/comm/shared.py, each as a column of its own. The last line
is what the ledger takes: the same call with and without it on a communicator that does nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from tpspec.comm import shared
from tpspec.comm.communicator import Communicator, OneRank, Purpose
from tpspec.comm.distributed import Place, World, join_world
from tpspec.comm.ledger import Counted, Ledger

SIZES = tuple(1 << power for power in range(10, 21))  # bytes: 1 KB to 1 MB
DEMO_COLLECTIVES = 61  # two in each of 30 layers, and the picks
DEFAULTS = (shared.SPIN_US, shared.SLOT_BYTES)


def main() -> None:
    options = _parser().parse_args()
    with join_world(Place.from_env(os.environ), torch.device("cpu")) as world:
        comms = groups(world, options)
        times = {size: measured(comms, size, options.rounds, options.calls) for size in SIZES}
    if world.rank == 0:
        Console().print(table(times, f"all-reduce of {world.size} ranks, microseconds: median / 90% / 99%"))
        Console().print(cost_of_counting(options.rounds, options.calls))


def groups(world: World, options: argparse.Namespace) -> dict[str, Communicator]:
    made: dict[str, Communicator | None] = {"gloo": _group(world, "gloo")}
    for spin_us in options.spin_us:
        for slot_kib in options.slot_kib:
            shared.SPIN_US = shared.CROWDED_SPIN_US = spin_us
            shared.SLOT_BYTES = slot_kib << 10
            made[f"shared, spin {spin_us:g}, slot {slot_kib} KiB"] = _group(world, "shared")
    return {name: comm for name, comm in made.items() if comm is not None}


def _group(world: World, transport: str) -> Communicator | None:
    return world.group(list(range(world.size)), transport=transport)  # type: ignore[arg-type]


def measured(comms: dict[str, Communicator], size: int, rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds of every counted call, by transport."""
    times: dict[str, list[float]] = {name: [] for name in comms}
    x = torch.zeros(size // 2, dtype=torch.bfloat16)
    for turn in range(rounds + 1):
        for name, comm in comms.items():
            took = [_timed(comm, x) for _ in range(calls)]
            if turn:
                times[name] += took
    return times


def _timed(comm: Communicator, x: torch.Tensor) -> float:
    begin = perf_counter()
    comm.all_reduce(x, Purpose.mlp)
    return (perf_counter() - begin) * 1e6


def cost_of_counting(rounds: int, calls: int) -> str:
    bare, ledger = OneRank(), Ledger()
    turns = [(_each_us(bare, calls), _each_us(Counted(bare, ledger), calls)) for _ in range(rounds + 1)][1:]
    cost_us = statistics.median(counted_us - bare_us for bare_us, counted_us in turns)
    per_round_us = cost_us * DEMO_COLLECTIVES
    return (
        f"counting: {cost_us:.2f} us a collective, {per_round_us:.0f} us in a round of {DEMO_COLLECTIVES} (the demo "
        f"model's); under 1% of a step above {per_round_us / 10:.1f} ms"
    )


def _each_us(comm: Communicator, calls: int) -> float:
    x = torch.zeros(576, dtype=torch.bfloat16)
    begin = perf_counter()
    for _ in range(calls):
        comm.all_reduce(x, Purpose.mlp)
    return (perf_counter() - begin) * 1e6 / calls


def table(times: dict[int, dict[str, list[float]]], title: str) -> Table:
    made = Table(title=title)
    made.add_column("bytes", justify="right")
    names = list(next(iter(times.values())))
    for name in names:
        made.add_column(name, justify="right")
    made.add_column("gloo / best", justify="right")
    for size, by_name in times.items():
        medians = [statistics.median(by_name[name]) for name in names]
        ratio = medians[0] / min(medians[1:])
        made.add_row(f"{size:,}", *(_figures(by_name[name]) for name in names), f"{ratio:.1f}x")
    return made


def _figures(times: list[float]) -> str:
    percent = statistics.quantiles(times, n=100)
    return f"{percent[49]:.1f} / {percent[89]:.1f} / {percent[98]:.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns of each transport for each size (20)")
    parser.add_argument("--calls", type=int, default=100, help="collectives in a turn (100)")
    parser.add_argument("--spin-us", type=float, nargs="+", default=[DEFAULTS[0]], help="spin so long before sleeping")
    parser.add_argument("--slot-kib", type=int, nargs="+", default=[DEFAULTS[1] >> 10], help="size of a slot")
    return parser


if __name__ == "__main__":
    main()
