#!/usr/bin/env python3
"""Write random tiny checkpoints to try things on: `python scripts/tiny_checkpoints.py llama qwen3 --to DIR`.

The command line around tests/checkpoints.py, which the tests call directly; it must hold no recipe of its own.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python adds scripts/ to the path, not the repository

from tests.checkpoints import KINDS, tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="each checkpoint becomes DIR/KIND")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1, help="number of safetensors files, at least")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))} (there are {', '.join(KINDS)})")
    for kind in options.kinds or KINDS:
        print(tiny(kind, options.to / kind, seed=options.seed, shards=options.shards))


if __name__ == "__main__":
    main()
