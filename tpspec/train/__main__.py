"""`-m tpspec.train generate`: texts of the target to train on.

A front door: reads the command line, prints. Must not know how texts are made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tpspec.errors import UserError
from tpspec.prompts import read_prompts
from tpspec.roles.door import guarded
from tpspec.text import Text
from tpspec.topology.checkpoint import find
from tpspec.train.generate import Author, open_engine
from tpspec.train.progress import Progress
from tpspec.train.prompts import Given, Invented, Prompts
from tpspec.train.texts import TextFile

MODULE = "tpspec.train"


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
    options.out.mkdir(parents=True, exist_ok=True)
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
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Train draft heads for a model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="texts of the model itself, to train on")
    generate.set_defaults(run=_generate)
    generate.add_argument("model", help="a folder, a demo model's name or a hub id such as org/name")
    generate.add_argument("--out", type=Path, required=True, metavar="DIR", help="texts already there are kept")
    generate.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines; without them the model invents its prompts"
    )
    generate.add_argument("--sequences", type=_positive, metavar="N", help="texts; 1000, or as many as there are prompts")
    generate.add_argument("--tokens", type=_positive, default=256, metavar="N", help="of an answer at most; 256")
    generate.add_argument("--longest", type=_positive, default=640, metavar="N", help="prompt and answer together; 640")
    generate.add_argument("--seed", type=int, default=0, help="another seed, other texts; 0")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
