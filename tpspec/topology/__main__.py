"""`python -m tpspec.topology check | plan | whatif`: what a topology means, what a box should run, how boxes compare.

A front door, and the only place of this room that prints. Decides and computes nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpspec.command import Parser, ended
from tpspec.topology.cards import parse_gpus
from tpspec.topology.config import load
from tpspec.topology.here import box_here
from tpspec.topology.layout import Wish, boxed
from tpspec.topology.plan import plan
from tpspec.topology.proposal import propose, yaml_of
from tpspec.topology.report import describe
from tpspec.topology.whatif import what_if
from tpspec.written import write

if TYPE_CHECKING:
    from tpspec.topology.cards import Card


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _run(arguments), lambda error: print(error, file=sys.stderr))


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    print("\n".join(options.lines(options)))
    return 0


def _check(options: argparse.Namespace) -> list[str]:
    return describe(load(options.file, options.set))


def _plan(options: argparse.Namespace) -> list[str]:
    gpus, link, found = _box(options)
    wish = Wish(
        gpus=gpus,
        link=link,
        model=options.model,
        draft=options.draft,
        acceptance=options.acceptance,
        context=options.context,
    )
    ranking = plan(wish)
    text, lines = yaml_of(wish, ranking), [*found, *propose(wish, ranking)]
    if options.out is None:
        return [*lines, "", text]
    write(options.out, text, "--out")
    return [*lines, "", f"wrote {options.out}"]


def _box(options: argparse.Namespace) -> tuple[tuple[Card, ...], str | None, list[str]]:
    """Its cards and its link, as they were given or as they are here, and what there is to say of them."""
    if not options.here:
        return parse_gpus(options.gpus), options.link, []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    box = box_here(visible)
    among = "" if visible is None else f" among CUDA_VISIBLE_DEVICES={visible}"
    found = [f"this box: {boxed(box.cards)}, numbered as with CUDA_DEVICE_ORDER=PCI_BUS_ID{among}"]
    if options.link is not None or len(box.cards) == 1:
        return box.cards, options.link, found
    return box.cards, box.link, [*found, f"link {box.link}: named by its slots, not measured; better: {box.probe}"]


def _what_if(options: argparse.Namespace) -> list[str]:
    return what_if(options.model)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m tpspec.topology", description="Looks at topologies; starts none.")
    commands = parser.add_subparsers(required=True, metavar="check | plan | whatif")
    check = commands.add_parser("check", help="check a file; print ranks, roles, slices, memory and collectives")
    check.add_argument("file", help="a YAML file, for example topologies/cpu-2.yaml")
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, e.g. draft.tokens=4")
    check.set_defaults(lines=_check)
    _add_plan(commands.add_parser("plan", help="predict the fastest ways to run a model on a box; write a topology"))
    whatif = commands.add_parser("whatif", help="predict a model on well-known boxes, by width of weights")
    whatif.add_argument("--model", default="meta-llama/Llama-3.3-70B-Instruct", help="as in a topology file")
    whatif.set_defaults(lines=_what_if)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    cards = parser.add_mutually_exclusive_group(required=True)
    cards.add_argument("--gpus", action="append", metavar="NxCARD", help="8x3090; may be repeated")
    cards.add_argument("--here", action="store_true", help="the cards of this machine, as nvidia-smi lists them")
    parser.add_argument(
        "--link",
        help="a slot (pcie3, pcie4, pcie4_p2p, pcie5), a box of links.yaml, or a file that `measure links` wrote; "
        "with --here, by default the slot that the driver names",
    )
    parser.add_argument("--model", required=True, help="the target, as in a topology file")
    parser.add_argument(
        "--draft",
        default="ngram",
        help="the drafter's model, or a source without one: ngram, mtp, early_exit, none",
    )
    parser.add_argument("--acceptance", type=float, default=0.75, help="of a draft token (default 0.75)")
    parser.add_argument("--context", type=_num_tokens, default=4096, help="tokens cached and read (default 4096)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the topology goes; default: printed")
    parser.set_defaults(lines=_plan)


def _num_tokens(text: str) -> int:
    if not re.fullmatch("[0-9]{1,12}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0, of up to 12 digits")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
