"""`python -m tpspec.measure skips MODEL`: a skip set for source `layer_skip`, found on a few prompts, saved beside it.

A front door of its own, in one process. Must not know how sets are chosen (skips.py).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tpspec.comm.communicator import OneRank
from tpspec.command import Parser
from tpspec.errors import UserError
from tpspec.measure.savings import built_in_prompts
from tpspec.measure.skips import Found, Price, search
from tpspec.model.batch import Span
from tpspec.model.loader import load_whole
from tpspec.prompts import read_prompts
from tpspec.published.checkpoint import find
from tpspec.published.shape import ModelShape
from tpspec.roles.door import guarded, positive
from tpspec.text import Text
from tpspec.topology.report import table
from tpspec.topology.sources import check_thins
from tpspec.topology.sublayers import FILE, Sublayers
from tpspec.written import check, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tpspec.model.decoder import Decoder

COMMAND = "python -m tpspec.measure skips"
MOST_ROWS = 32  # of a forward: as many as the compiled steps take
LONGEST = 256  # tokens of a prompt that are read
HEADS = ("attention out", "mlp out", "agreement", "predicted speed")


def skips(arguments: Sequence[str]) -> int:
    return guarded(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    folder = find(options.model)
    path = options.out or folder / FILE
    check(path, "--out")
    text, shape = Text.load(folder), ModelShape.of(folder)
    check_thins(shape)
    prompts = _prompts(text, options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_slots = MOST_ROWS + sum(len(prompt) + options.tokens for prompt in prompts)
    answers = Answers(
        load_whole(folder, shape, torch.bfloat16, device, num_slots), prompts, options.tokens, text.eos_ids
    )
    if not answers.num_tokens:
        raise UserError("every prompt ends with an end of text, so nothing answers it; should be other --prompts")
    price = Price(shape, options.waiting)
    found = list(_shown(search(price, answers.agreement, options.tries), 2 * shape.num_layers))
    if not found:
        raise UserError(f"{options.model} can do without none of its sublayers: no token of such a draft is right")
    best = max(found, key=lambda one: one.speed)
    sys.stdout.write("\n".join(_lines(found, best)) + "\n")
    said = json.dumps(best.left_out.dump() | {"agreement": best.agreement})
    write(path, f"{said}\n", "--out")
    sys.stdout.write(f"wrote {path}\n")
    return 0


class Answers:
    """Greedy answers of a model, with the keys and values of all of it in its cache: where drafts would set out."""

    def __init__(
        self, decoder: Decoder, prompts: Sequence[Sequence[int]], num_tokens: int, stop_ids: frozenset[int]
    ) -> None:
        self._decoder = decoder
        self._places: list[_Place] = []
        first = MOST_ROWS  # the slots before it are for what is drafted
        for prompt in prompts:
            text = _answered(decoder, prompt, num_tokens, stop_ids, first)
            self._places += [_Place(text, first, at) for at in range(len(prompt), len(text))]
            first += len(prompt) + num_tokens

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return len(self._places)

    def agreement(self, left_out: Sublayers) -> float:
        """Part of the answers' tokens that the model says without these sublayers, each after the true text."""
        thin = self._decoder.thinned(left_out, OneRank())
        right = 0
        for begin in range(0, len(self._places), MOST_ROWS):
            places = self._places[begin : begin + MOST_ROWS]
            said = thin.forward([place.span(row) for row, place in enumerate(places)]).argmax(1).tolist()
            right += sum(place.text[place.at] == token for place, token in zip(places, said, strict=True))
        return right / len(self._places)


@dataclass(frozen=True, slots=True)
class _Place:
    """The token at `at` of a text whose slots begin at `first`."""

    text: list[int]
    first: int
    at: int

    def span(self, row: int) -> Span:
        """What drafts it: the token before it, read at a slot that is no text's, after the text as it is cached."""
        before = ((self.first, self.at - 1),) if self.at > 1 else ()
        return Span(row, self.at - 1, (self.text[self.at - 1],), (*before, (row, 1)), 1)


def _answered(
    decoder: Decoder, prompt: Sequence[int], num_tokens: int, stop_ids: frozenset[int], first: int
) -> list[int]:
    text, start = list(prompt), 0
    while len(text) < len(prompt) + num_tokens and text[-1] not in stop_ids:
        span = Span(0, start, tuple(text[start:]), ((first, len(text)),), 1)
        start = len(text)
        text.append(int(decoder.forward([span]).argmax()))
    return text


def _prompts(text: Text, options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Some of them, from all over the file."""
    given = read_prompts(options.prompts) if options.prompts else built_in_prompts(chat=text.has_chat_template)
    number = min(options.num_prompts, len(given))
    chosen = [given[len(given) * i // number] for i in range(number)]
    return [prompt.encode(text)[-LONGEST:] for prompt in chosen]


def _shown(found: Iterator[Found], total: int) -> Iterator[Found]:
    """As they are found, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console, shown = Console(stderr=True), sys.stderr.isatty()
    yield from track(found, "leaving out sublayers", total, console=console, transient=True, disable=not shown)


def _lines(found: Sequence[Found], best: Found) -> list[str]:
    rows = [
        (str(len(one.left_out.attention)), str(len(one.left_out.mlp)), f"{one.agreement:.0%}", f"{one.speed:.3f}")
        for one in found
    ]
    verdict = "is the best" if best.speed > 1 else "is the best, and does not pay: plain decoding is faster"
    return [
        *table([HEADS, *rows]),
        "",
        f"{len(best.left_out)} sublayers less {verdict} (predicted speed {best.speed:.3f}, plain 1)",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=COMMAND, description="Which sublayers a model can do without when it drafts for itself.")
    parser.add_argument("model", help="a folder, a demo model's name or a hub id such as org/name")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines; without them, the ones built in")
    parser.add_argument("--num-prompts", type=positive, default=4, metavar="N", help="that are answered; 4")
    parser.add_argument("--tokens", type=positive, default=32, metavar="N", help="of an answer; 32")
    parser.add_argument("--tries", type=positive, default=8, metavar="N", help="sublayers tried at each turn; 8")
    parser.add_argument(
        "--waiting", type=part, default=0.5, metavar="PART", help="of a plain step that collectives take; 0.5"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {FILE} beside the model")
    return parser


def part(text: str) -> float:
    """An option that is a part of something, or a probability."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number
