"""`python -m tpspec.topology check FILE`: what a topology means, rank by rank, before anything is started.

A front door, and the only place of this room that prints. Decides and computes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tpspec.errors import UserError
from tpspec.topology.config import load
from tpspec.topology.report import describe


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        print("\n".join(describe(load(options.file, options.set))))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpspec.topology", description="Looks at a topology file.")
    commands = parser.add_subparsers(required=True, metavar="check")
    check = commands.add_parser("check", help="check a file; print ranks, roles, slices, memory and collectives")
    check.add_argument("file", help="a YAML file, for example topologies/cpu-2.yaml")
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, e.g. draft.tokens=4")
    return parser


if __name__ == "__main__":
    sys.exit(main())
