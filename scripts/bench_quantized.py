#!/usr/bin/env python3
"""Rounds of the demo model in int8 and int4 against bfloat16 on the CPU, in one run, as ratios.

    OMP_NUM_THREADS=1 python scripts/bench_quantized.py [--turns 30] [--rows 1 2 6 8 128]

Whole rounds behind 200 cached tokens: layers, attention and head, with as many rows as a round has. The kinds of weight
are taken in turn, so that whatever else the machine does falls on all of them alike; a figure is the median, the ratio
that of the medians, and its spread that of the turns' own ratios, from the first to the third quartile.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from tpspec.comm.communicator import OneRank
from tpspec.model.batch import Span
from tpspec.model.decoder import Decoder
from tpspec.model.loader import Loader
from tpspec.published.checkpoint import find
from tpspec.published.shape import shape_of
from tpspec.topology.shards import split

MODEL = "smollm2-135m"
CACHED, SLOTS, WARM_UP = 200, 512, 3


def main() -> None:
    options = _parser().parse_args()
    (whole,) = split(shape_of(MODEL), (1.0,))
    cpu = torch.device("cpu")
    decoders = {
        kind or "bfloat16": Loader.open(find(MODEL), whole, torch.bfloat16, cpu, kind).decoder(OneRank(), SLOTS)
        for kind in (None, "int8", "int4")
    }
    table = Table("rows", *decoders, *(f"{kind} to bfloat16" for kind in list(decoders)[1:]))
    for rows in options.rows:
        seconds = timed(decoders, rows, options.turns)
        base, *others = seconds.values()
        table.add_row(
            str(rows),
            *(f"{1e3 * statistics.median(times):.2f} ms" for times in seconds.values()),
            *(faster(base, other) for other in others),
        )
    Console(width=120).print(f"{torch.get_num_threads()} threads", table)


def timed(decoders: dict[str, Decoder], rows: int, turns: int) -> dict[str, list[float]]:
    span = Span(0, CACHED, tuple(range(5, 5 + rows)), ((0, CACHED + rows),), rows)
    seconds: dict[str, list[float]] = {kind: [] for kind in decoders}
    for _ in range(WARM_UP + turns):
        for kind, decoder in decoders.items():
            started = time.perf_counter()
            decoder.forward([span])
            seconds[kind].append(time.perf_counter() - started)
    return {kind: times[WARM_UP:] for kind, times in seconds.items()}


def faster(base: list[float], other: list[float]) -> str:
    first, _, third = statistics.quantiles([a / b for a, b in zip(base, other, strict=True)], n=4)
    return f"{statistics.median(base) / statistics.median(other):.2f}x ({first:.2f} to {third:.2f})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="of each kind")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 6, 8, 128], help="of a round")
    return parser


if __name__ == "__main__":
    main()
