"""`-m tpspec.generate`: one-shot text on the terminal, and what it cost in collective rounds.

A front door: reads the command line, prints. Must not know tensors; the rank's work is in `roles`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpspec import grammar
from tpspec.comm.messages import Stats, Stop, Submit, Tally
from tpspec.command import Parser
from tpspec.errors import UserError
from tpspec.prompts import Prompt, read_prompts, room_for_answer
from tpspec.request import Request, Sampling
from tpspec.roles.door import add_topology_options, find_place, guarded, open_seat, positive
from tpspec.roles.seat import Seat
from tpspec.text import Detokenizer, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tpspec.comm.messages import ToLead
    from tpspec.request import Delta

MODULE = "tpspec.generate"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Every rank of the world calls it with the same arguments."""
    return guarded(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    prompts, sampling = _prompts(options), _sampling(options)
    with open_seat(options, MODULE) as seat:
        if not seat.leads:
            return seat.follow()
        text = Text.load(seat.folder)
        inbox = OneByOne(seat, text, prompts, sampling, options)
        return seat.lead(inbox)


@dataclass(slots=True)
class Answer:
    """What one prompt gave; `before` is what the engine had counted when it began."""

    prompt: tuple[int, ...]
    before: Stats
    started: float = field(default_factory=time.perf_counter)
    first_token_at: float = 0.0
    ids: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    def add(self, delta: Delta) -> None:
        self.first_token_at = self.first_token_at or time.perf_counter()
        self.ids += delta.tokens
        self.drafted += sum(delta.drafted)
        self.accepted += sum(delta.accepted)
        self.rounds += 1

    def report(self, text: str, finish: str | None, after: Stats) -> dict[str, Any]:
        """The object `--json` prints. tokens_per_second counts from the first token on; the prompt is not in it."""
        seconds = time.perf_counter() - self.first_token_at
        collectives = {
            purpose: tally_between(self.before.collectives.get(purpose, Tally()), tally)
            for purpose, tally in after.collectives.items()
        }
        return {
            "text": text,
            "ids": self.ids,
            "prompt_tokens": len(self.prompt),
            "tokens": len(self.ids),
            "rounds": self.rounds,
            "tokens_per_round": len(self.ids) / max(1, self.rounds),
            "drafted": self.drafted,
            "acceptance": self.accepted / self.drafted if self.drafted else None,
            "tokens_per_second": (len(self.ids) - 1) / seconds if seconds > 0 and len(self.ids) > 1 else None,
            "ttft": self.first_token_at - self.started,
            "finish": finish,
            "collectives": collectives,
        }


def tally_between(before: Tally, after: Tally) -> dict[str, float]:
    return {
        "count": after.count - before.count,
        "bytes": after.bytes - before.bytes,
        "seconds": after.seconds - before.seconds,
    }


class OneByOne:
    """The lead's inbox: one prompt at a time, so that each has its own account; text goes out as it comes."""

    def __init__(
        self, seat: Seat, text: Text, prompts: Sequence[Prompt], sampling: Sampling, options: argparse.Namespace
    ) -> None:
        self._seat, self._text, self._sampling, self._options = seat, text, sampling, options
        self._left = [(number, *self._fitted(prompt)) for number, prompt in enumerate(prompts)][::-1]
        self._stats = seat.stats()
        self._answer: Answer | None = None
        self._stream: Detokenizer | None = None
        self._written: list[str] = []

    def receive(self, *, wait: bool) -> Sequence[ToLead]:
        if not wait:
            return []
        if not self._left:
            return [Stop()]
        number, ids, num_tokens = self._left.pop()
        bound = self._options.json_schema or ""
        request = Request(number, ids, num_tokens, self._sampling, self._stop_ids(), grammar=bound)
        self._answer, self._written = Answer(ids, self._stats), []
        self._stream = Detokenizer(self._text, ids, skip_special=True)
        return [Submit(request)]

    def report(self, deltas: list[Delta], stats: Stats) -> None:
        self._stats = stats
        for delta in deltas:
            if delta.error is not None:
                raise UserError(delta.error)
            self._read(delta, stats)

    def _read(self, delta: Delta, stats: Stats) -> None:
        assert self._answer is not None
        assert self._stream is not None
        self._answer.add(delta)
        ended_by_token = delta.finish == "stop" and not self._stop_ids().isdisjoint(delta.tokens)
        for token in delta.tokens[: len(delta.tokens) - ended_by_token]:
            self._write(self._stream.step(token))
        if delta.finish is not None:
            self._write(self._stream.flush())
            self._finish(self._answer.report("".join(self._written), delta.finish, stats))

    def _write(self, piece: str) -> None:
        self._written.append(piece)
        if not self._options.json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def _finish(self, report: dict[str, Any]) -> None:
        if self._options.json:
            print(json.dumps(report, ensure_ascii=False), flush=True)
        else:
            print("\n", flush=True)
            _print_table(report)

    def _fitted(self, prompt: Prompt) -> tuple[tuple[int, ...], int]:
        """Its ids, and how many tokens its answer may have."""
        ids = prompt.encode(self._text)
        return ids, room_for_answer(ids, self._options.max_tokens, self._seat.max_tokens, prompt.where)

    def _stop_ids(self) -> frozenset[int]:
        return frozenset() if self._options.ignore_eos else self._text.eos_ids


def _print_table(report: dict[str, Any]) -> None:
    """Tokens, rounds, and the collectives of each purpose per token."""
    from rich.console import Console
    from rich.table import Table

    tokens = max(1, report["tokens"])
    table = Table(title=None, box=None, pad_edge=False)
    for column in ("per token", "collectives", "bytes", "seconds"):
        table.add_column(column, justify="left" if column == "per token" else "right")
    for purpose, tally in report["collectives"].items():
        count, num_bytes, seconds = (tally[key] / tokens for key in ("count", "bytes", "seconds"))
        table.add_row(purpose, f"{count:.2f}", f"{num_bytes:,.0f}", f"{seconds:.6f}")
    acceptance = "-" if report["acceptance"] is None else f"{report['acceptance']:.1%}"
    speed = "-" if report["tokens_per_second"] is None else f"{report['tokens_per_second']:.1f}"
    console = Console(highlight=False)
    console.print(
        f"{report['tokens']} tokens, {report['rounds']} rounds, {report['tokens_per_round']:.2f} tokens per round, "
        f"acceptance {acceptance}, {speed} tokens/s"
    )
    if report["collectives"]:
        console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"python -m {MODULE}",
        description="Generate text with a sharded model, and say what it cost in collective rounds.",
        epilog=f"Start it with torchrun: torchrun --nproc-per-node 2 -m {MODULE} topologies/cpu-2.yaml --prompt Hello",
    )
    add_topology_options(parser)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help='JSON lines with "prompt" and, if it is chat, "kind": "chat"'
    )
    parser.add_argument("--chat", action="store_true", help="put --prompt through the model's chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt instead of text")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="of an answer at most; 128")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default) takes the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest tokens; 0: among all"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="among the likeliest that have P of the odds; 1: among all",
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="among those with P of the likeliest's odds; 0: among all"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1, of tokens that were there; 1: none"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn; 0")
    parser.add_argument("--json-schema", type=_schema, metavar="FILE", help="answers are JSON that this schema accepts")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    return parser


def _schema(path: str) -> str:
    """The grammar of a schema in a file."""
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(schema, dict):
            return grammar.json_schema(schema)
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path}: cannot be read: {error}") from error
    raise argparse.ArgumentTypeError(f"{path}: the schema should be a JSON object")


def _sampling(options: argparse.Namespace) -> Sampling:
    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )
    if fault := sampling.fault():
        raise UserError(f"--{fault.replace('_', '-', 1)}")
    return sampling


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    prompts = [Prompt(text, options.chat) for text in options.prompt or ()]
    if options.prompts is not None:
        prompts += read_prompts(options.prompts, find_place().world_size)
    if not prompts:
        raise UserError("nothing to do: give --prompt TEXT or --prompts FILE")
    return prompts


if __name__ == "__main__":
    sys.exit(main())
