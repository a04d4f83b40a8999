#!/usr/bin/env python3
"""Compiles, on a machine without a card, what bench_gpu.py has one launch: for cards that are at hand for minutes.

    TRITON_CACHE_DIR=DIR python scripts/compile_bench.py [--only decode quantized gaps] [--capability 9.0]

Of two layers of each model's shape, in all tiles that a start would try. A machine with a card, the same Triton and
that folder under the same path has nothing left to compile. Nothing is computed. `./scripts/test-gpu compile` does the
same for tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench_gpu
import torch
from bench_gpu import GAPS_LINK, PROMPT, ROWS, gaps_sources, open_engine, rounds, rounds_of, topology_of
from random_checkpoint import at, write

from tests.compiling_card import compiling_card, refused

LAYERS = 2
ROUNDS = 4  # of a text: behind the one that reads its prompt, rounds that are launched ahead


def main() -> None:
    options = _options()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        sys.exit("compile_bench: TRITON_INTERPRET is set; should not be, for Triton's interpreter compiles nothing")
    if options.worker:
        major, _, minor = options.capability.partition(".")
        with compiling_card((int(major), int(minor))) as names:
            PARTS[options.worker](options)
        print(f"{options.worker}: {len(names)} kernels")
        if refused:  # a start goes on without such a tile
            sys.exit("compile_bench: not compiled: " + "; ".join(dict.fromkeys(refused)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.to or Path(temporary)
        for model in (options.model, *([options.draft] if "gaps" in options.only else [])):
            write(model, at(model, folder), repeats=True, num_hidden_layers=LAYERS)
        for name in options.only:
            begun = time.monotonic()
            # A process each: what stands for a card is there once in a process.
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--to", str(folder), "--worker", name], check=True)
            print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)


def decode(options: argparse.Namespace) -> None:
    """Greedy and warm rounds, forwards of every number of rows; the same of kernels in turn."""
    from tpspec.model.card import overlap as card_overlap

    asked(options, temperatures=(0.0, 0.8), counts=ROWS)
    with patch.object(card_overlap, "OVERLAP_FROM", (99, 0)):
        asked(options)


def quantized(options: argparse.Namespace) -> None:
    for kind in ("bfloat16", "int8", "int4"):
        asked(options, {"target.quantize": kind} if kind != "bfloat16" else {}, counts=(1, 6))


def gaps(options: argparse.Namespace) -> None:
    """A shard whose collectives take a link's time, plain and with drafts; and its drafter, alone."""
    from card_link import CardOnALink

    from tpspec.roles.build import build_engine
    from tpspec.roles.build_drafter import build_ahead

    *of_the_shard, beside = gaps_sources(options)
    for draft in of_the_shard:
        topology = topology_of(options, **draft, **{"link.table": GAPS_LINK})
        assert topology.link.cost is not None
        built = build_engine(topology, CardOnALink(topology.link.cost), torch.device(options.device))
        built.own.prepare()
        run(built.engine)
    build_ahead(topology_of(options, **beside), torch.device(options.device))


def asked(
    options: argparse.Namespace,
    keys: Mapping[str, Any] = {},
    temperatures: tuple[float, ...] = (0.0,),
    counts: tuple[int, ...] = (1,),
) -> None:
    engine = open_engine(options, **keys).engine
    for temperature in temperatures:
        run(engine, temperature)
    for num_rows in counts:
        rounds_of(engine.target.decoder, num_rows, PROMPT + ROUNDS)[0]()


def run(engine: Any, temperature: float = 0.0) -> None:
    for _ in rounds(engine, ROUNDS, temperature):
        pass


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"decode": decode, "quantized": quantized, "gaps": gaps}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=bench_gpu.MODEL, help="a shape of models.yaml")
    parser.add_argument("--draft", default=bench_gpu.DRAFT, help="likewise, for gaps")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="of bench_gpu.py's sections"
    )
    parser.add_argument("--capability", default="9.0", help="of the card")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where checkpoints are written and kept")
    parser.add_argument("--worker", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.set_defaults(device="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
