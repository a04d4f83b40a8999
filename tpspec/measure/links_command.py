"""What `-m tpspec.measure links` is asked for: its options, and the sizes they mean, checked before the ranks meet.

Knows words and numbers; must not measure, join a world or touch a file.
"""

from __future__ import annotations

import argparse
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from tpspec.comm.distributed import Place, Transport
from tpspec.command import Parser
from tpspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMAND = "-m tpspec.measure links"
SIZES = tuple(1 << power for power in range(10, 23))  # bytes: 1 KB to 4 MB
STEP_BYTES = 64  # sizes are multiples of it, so that a gather's share of each is a size of its own
MOST_BYTES = 1 << 28
WIDEST_STEP = 16  # half of what a table may have: a gather's sizes are rounded down to whole elements for each rank


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog=f"python {COMMAND}", description="Measures the collectives of this box.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there; without it, it is printed")
    parser.add_argument("--name", default="this_box", help="of the box in the table (this_box)")
    parser.add_argument("--sizes", metavar="BYTES,BYTES,...", help="of the messages (1 KB to 4 MB, doubling)")
    parser.add_argument("--rounds", type=int, default=200, help="calls that count for each size (200)")
    parser.add_argument(
        "--transport",
        choices=get_args(Transport),
        default="auto",
        help="auto: cards if there is one for every rank, else the fastest way between CPU ranks; host, peer: cards "
        "through the host's memory, or each other's; others: CPU",
    )
    return parser


def checked_sizes(options: argparse.Namespace, place: Place, arguments: Sequence[str]) -> tuple[int, ...]:
    """The sizes. Raises UserError on every rank alike, before the ranks meet."""
    if place.world_size == 1:
        started = command(max(2, torch.cuda.device_count()), arguments)
        raise UserError(f"a world of one has no collectives: nothing to measure; start it with: {started}")
    if options.rounds < 2:
        raise UserError(f"--rounds {options.rounds}: should be at least 2")
    if not re.fullmatch(r"[A-Za-z][\w.-]*", options.name):
        raise UserError(f"--name {options.name!r}: should be a letter, then letters, digits, _ . or -")
    if options.out is not None and options.out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {options.out}: should end in .yaml, as a topology names it by that")
    return parse_sizes(options.sizes) if options.sizes is not None else SIZES


def parse_sizes(text: str) -> tuple[int, ...]:
    """Ascending, each once. Raises UserError where they make no table."""
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not _is_size(word)]:
        raise UserError(f"--sizes: {wrong[0]!r} should be a multiple of {STEP_BYTES} bytes up to {MOST_BYTES}")
    sizes = tuple(sorted({int(word) for word in words}))
    if len(sizes) < 2:
        raise UserError(f"--sizes {text}: should be at least two, for the slope between them")
    for low, high in pairwise(sizes):
        if high > WIDEST_STEP * low:
            raise UserError(f"--sizes: no size between {low} and {high}; should have one every {WIDEST_STEP} x")
    return sizes


def _is_size(word: str) -> bool:
    return re.fullmatch(r"[0-9]{1,9}", word) is not None and int(word) in range(STEP_BYTES, MOST_BYTES + 1, STEP_BYTES)


def command(num_ranks: int, arguments: Sequence[str]) -> str:
    return f"torchrun --nproc-per-node {num_ranks} {COMMAND} {shlex.join(arguments)}".rstrip()
