#!/usr/bin/env python3
"""How far `savings` predicts off what it measures: plain and K drafts, without an emulated link and with two.

    OMP_NUM_THREADS=1 scripts/check_prediction.py [TOPOLOGY] [--links none ...] [--tokens 2 4 8] [--max-tokens 48]
        [--prompts FILE]

A figure is predicted over measured, of one run of two ranks; a run takes half a minute. Exit code 1 if any tokens per
second are off by more than 15%.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpspec.measure.stats import COMPARED, predictions

# Dilated so that communication is about 60% of a plain step of the demo model on two cores.
LINKS = {
    "none": (),
    "rtx3090x8_2socket_stock": ("link.emulate=true", "link.dilation=4.4"),
    "rtx4090x4_gen4_p2p_patched": ("link.emulate=true", "link.dilation=12"),
}
MOST_OFF = 0.15


def main() -> int:
    options = _parser().parse_args()
    print(f"predicted over measured: {', '.join(COMPARED)}", flush=True)
    worst = 0.0
    for name in options.links:
        for num_drafts in options.tokens:
            link = (f"link.table={name}", *LINKS[name]) if LINKS[name] else ()
            found = measured(options, [f"draft.tokens={num_drafts}", *link])
            ratios = [guess / seen if guess and seen else 0.0 for _, guess, seen in predictions(found)]
            print(f"{name:27} {num_drafts:>5} ", *(f"{ratio:6.2f}" for ratio in ratios), flush=True)
            worst = max(worst, *(abs(ratio - 1) for ratio in ratios[:2]))
    print(f"tokens per second at most {worst:.0%} off")
    return int(worst > MOST_OFF)


def measured(options: argparse.Namespace, keys: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tpspec.measure", "savings", options.topology, "--json", "--max-tokens", str(options.max_tokens)]
    command += [word for key in keys for word in ("--set", key)]
    if options.prompts is not None:
        command += ["--prompts", str(options.prompts)]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("topology", nargs="?", default="topologies/cpu-2.yaml", help="of two ranks, with drafts")
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS, help="that are emulated (all)")
    parser.add_argument("--tokens", nargs="+", default=["2", "4", "8"], metavar="K", help="draft lengths (2 4 8)")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="of each answer (48)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines; the built-in ones without it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
