"""`-m tpspec.train generate | taps | eagle | medusa | model`: a draft head, or model, from a model's own texts alone.

A front door: reads the command line, prints. Must not know how texts are made or heads trained.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tpspec.command import Parser
from tpspec.errors import UserError
from tpspec.prompts import read_prompts
from tpspec.published.checkpoint import find
from tpspec.roles.door import guarded, positive
from tpspec.text import Text
from tpspec.train.command import Apprenticeship, Order, tap
from tpspec.train.eagle import EagleHead
from tpspec.train.files import make_folder
from tpspec.train.generate import Author, open_engine
from tpspec.train.loop import Plan
from tpspec.train.medusa import MedusaHeads
from tpspec.train.model import DraftModel, at_random, of_layers
from tpspec.train.progress import Progress
from tpspec.train.prompts import Given, Invented, Prompts
from tpspec.train.target import taught
from tpspec.train.texts import TextFile

if TYPE_CHECKING:
    from tpspec.train.command import Make

MODULE = "tpspec.train"
IDS = "of the draft vocabulary; 4096"
MODEL = "a folder, a demo model's name or a hub id such as org/name"
TOKENIZER = ("tokenizer*", "*.jinja", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
PRECISIONS = {"auto": None, "bfloat16": True, "float32": False}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    return guarded(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _generate(options: argparse.Namespace) -> int:
    folder = find(options.model)
    text, prompts = Text.load(folder), None if options.prompts is None else read_prompts(options.prompts)
    asked: Prompts = Invented(text, options.seed) if prompts is None else Given(text, prompts)
    wanted = options.sequences or (len(prompts) if prompts else 1000)
    make_folder("--out", options.out)
    file = TextFile(options.out)
    file.mend()
    done = {told.number for told in file.read()}
    engine = open_engine(options.model, options.longest, cuda=torch.cuda.is_available())
    author = Author(engine, asked, options.tokens, options.longest, text.eos_ids, options.seed)
    progress = Progress("texts", wanted, len(done))
    for told in author.write(number for number in range(wanted) if number not in done):
        file.add(told)
        progress.step(tokens=len(told.answer))
    progress.end()
    if author.num_passed_over:
        passed = f"{author.num_passed_over} of {wanted} prompts leave no room for an answer within --longest"
        if author.num_passed_over == wanted:
            raise UserError(f"{passed} {options.longest}; should be more")
        print(f"{passed} {options.longest}, and are passed over", file=sys.stderr)
    return 0


def _taps(options: argparse.Namespace) -> int:
    tap(find(options.model), options.data)
    return 0


def _eagle(options: argparse.Namespace) -> int:
    return _train(options, lambda target, ids, size: EagleHead(target, ids, size, options.channels, options.depth))


def _medusa(options: argparse.Namespace) -> int:
    return _train(options, lambda target, ids, _: MedusaHeads(target, ids, options.heads, options.layers))


def _model(options: argparse.Namespace) -> int:
    target = taught(find(options.model))
    if options.hidden:
        design = at_random(target, options.layers, options.hidden)
    else:
        design = of_layers(target, options.layers, spread=options.from_layers == "spread")
    return _train(options, lambda target, *_: DraftModel(target, design, options.depth), TOKENIZER)


def _train(options: argparse.Namespace, make: Make, beside: tuple[str, ...] = ()) -> int:
    plan = Plan(options.steps, options.minutes, options.rate, options.rows, options.every, options.seed)
    order = Order(
        find(options.model), options.data, options.out, options.ids, plan, PRECISIONS[options.precision], make, beside
    )
    record = Apprenticeship(order).run()
    print(json.dumps(record["history"][-1] if record["history"] else record))
    return 0


def amount(text: str) -> float:
    """An option that measures something."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _seed(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of up to 18 digits")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=f"python -m {MODULE}", description="Train draft heads, or a draft model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="texts of the model itself, to train on")
    generate.set_defaults(run=_generate)
    generate.add_argument("model", help=MODEL)
    generate.add_argument("--out", type=Path, required=True, metavar="DIR", help="texts already there are kept")
    generate.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines; without them the model invents its prompts"
    )
    generate.add_argument(
        "--sequences", type=positive, metavar="N", help="texts; 1000, or as many as there are prompts"
    )
    generate.add_argument("--tokens", type=positive, default=256, metavar="N", help="of an answer at most; 256")
    generate.add_argument("--longest", type=positive, default=640, metavar="N", help="prompt and answer together; 640")
    generate.add_argument("--seed", type=int, default=0, help="another seed, other texts; 0")
    taps = commands.add_parser("taps", help="the model's hidden states over the texts; the others make them, too")
    taps.set_defaults(run=_taps)
    taps.add_argument("model", help=MODEL)
    taps.add_argument("--data", type=Path, required=True, metavar="DIR", help="texts made by `generate`")
    eagle = _training_parser(commands.add_parser("eagle", help="an EAGLE-3 head"), _eagle)
    eagle.add_argument("--ids", type=positive, default=4096, metavar="N", help=IDS)
    eagle.add_argument("--channels", type=positive, default=1024, metavar="N", help="of its MLP; 1024")
    eagle.add_argument("--depth", type=positive, default=4, metavar="K", help="draft steps it is trained for; 4")
    medusa = _training_parser(commands.add_parser("medusa", help="Medusa heads"), _medusa)
    medusa.add_argument("--ids", type=positive, default=4096, metavar="N", help=IDS)
    medusa.add_argument("--heads", type=positive, default=4, metavar="K", help="one for each draft step; 4")
    medusa.add_argument("--layers", type=positive, default=1, metavar="N", help="residual blocks of each; 1")
    model = _training_parser(commands.add_parser("model", help="a draft model of its own"), _model)
    model.set_defaults(ids=None)
    model.add_argument("--layers", type=positive, required=True, metavar="N", help="of the draft model")
    start = model.add_mutually_exclusive_group(required=True)
    start.add_argument("--hidden", type=positive, metavar="N", help="begin at random, so wide")
    start.add_argument(
        "--from-layers", choices=("first", "spread"), help="begin as layers of the target, as wide as it"
    )
    model.add_argument("--depth", type=positive, default=4, metavar="K", help="drafts in a row that are measured; 4")
    return parser


def _training_parser(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """What all kinds are asked for."""
    parser.set_defaults(run=run)
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="texts made by `generate`")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="goes on from a checkpoint that is there"
    )
    parser.add_argument("--steps", type=positive, default=2000, metavar="N", help="batches at most; 2000")
    parser.add_argument("--minutes", type=amount, metavar="M", help="of training at most, whatever the steps")
    parser.add_argument("--rate", type=amount, default=1e-3, metavar="R", help="highest learning rate; 0.001")
    parser.add_argument("--rows", type=positive, default=2048, metavar="N", help="positions of a batch; 2048")
    parser.add_argument("--every", type=positive, default=100, metavar="N", help="steps between checkpoints; 100")
    parser.add_argument("--precision", choices=PRECISIONS, default="auto", help="auto: the faster one here")
    parser.add_argument("--seed", type=_seed, default=0, help="of the order of texts, and of what begins at random; 0")
    return parser


if __name__ == "__main__":
    sys.exit(main())
