"""`-m tpspec.measure savings | links`: what speculation saves on the box at hand, and what its bus costs.

A front door, run by every rank of the world; the lead alone prints. Must not know tensors, nor how a number is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tpspec.errors import UserError
from tpspec.measure.page import Context, render, spread
from tpspec.measure.probe import links
from tpspec.measure.savings import Pairwise, Task, built_in_prompts, refuse_plain_topology, turns
from tpspec.measure.stats import report
from tpspec.prompts import Prompt, read_prompts, room_for_answer
from tpspec.roles.door import Seat, add_topology_options, guarded, open_seat
from tpspec.text import Text

MODULE = "tpspec.measure"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Every rank of the world calls it with the same arguments."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["links"]:
        return links(given[1:])
    return guarded(lambda: _run(_parser().parse_args(given)))


def _run(options: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _savings(options: argparse.Namespace) -> int:
    """Faults that every rank sees come first, so that no rank waits for another that has gone."""
    _refuse_page(options.html)
    prompts = _prompts(options.prompts)
    with open_seat(options, f"{MODULE} savings", refuse_plain_topology) as seat:
        return _lead(seat, prompts, options) if seat.leads else seat.follow()


def _lead(seat: Seat, prompts: list[Prompt] | None, options: argparse.Namespace) -> int:
    text = Text.load(seat.folder)
    tasks = _tasks(seat, text, prompts or built_in_prompts(chat=text.has_chat_template), options.max_tokens)
    with progress_bar(len(turns(len(tasks))), shown=sys.stderr.isatty()) as done:
        inbox = Pairwise(tasks, text.eos_ids, done)
        code = seat.lead(inbox)
    found = report(inbox.pairs())
    if found["speedup"] is None:
        raise UserError("every answer ended with its first token: there is nothing to compare; try other prompts")
    _show(found, seat, len(tasks), options)
    return code


def _tasks(seat: Seat, text: Text, prompts: Sequence[Prompt], max_tokens: int) -> list[Task]:
    encoded = [(prompt.category, prompt.encode(text)) for prompt in prompts]
    return [Task(category, ids, room_for_answer(ids, max_tokens, seat.max_tokens)) for category, ids in encoded]


def _show(found: dict[str, Any], seat: Seat, num_prompts: int, options: argparse.Namespace) -> None:
    if options.html is not None:
        made = seat.topology
        ran = Context(made.name, made.target.model, made.draft.source, len(made.target.ranks), num_prompts)
        _write(options.html, render(found, ran))
    if options.json:
        print(json.dumps(found, ensure_ascii=False), flush=True)
    else:
        _print_tables(found)


def _print_tables(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print("plain > speculative, counted from the first token on")
    console.print(_by_category(found))
    console.print(_by_purpose(found))
    console.print(*_closing(found), sep="\n")


def _closing(found: dict[str, Any]) -> list[str]:
    plain, speculative, predicted = found["plain"], found["speculative"], found["predicted"]
    acceptance = ", ".join(f"{share:.0%}" for share in speculative["acceptance"])
    return [
        f"share of the time in collectives: {_change(plain['wait_share'], speculative['wait_share'], '{:.0%}')}",
        f"milliseconds: to the first token {_change(plain['ttft'] * 1e3, speculative['ttft'] * 1e3)}, "
        f"between tokens {_change(plain['itl'] * 1e3, speculative['itl'] * 1e3)}",
        f"acceptance by position, where all before it were accepted: {acceptance or '-'}",
        f"predicted: {predicted['tokens_per_round']:.2f} tokens per round (measured "
        f"{speculative['tokens_per_round']:.2f}), speed-up {predicted['speedup']:.2f}x",
        f"measured speed-up: {spread(found)}; texts {'identical' if found['identical'] else 'DIFFER'}",
    ]


def _by_category(found: dict[str, Any]) -> Any:
    columns = ("tokens", "tokens\nper\nround", "collectives\nper token", "tokens\nper second", "speed", "95%", "same")
    table = _table(("", *columns))
    for name, side in {**found["by_category"], "all": found}.items():
        plain, speculative = side["plain"], side["speculative"]
        interval = (side["speedup_low"], side["speedup_high"])
        table.add_row(
            name,
            str(speculative["tokens"]),
            _number(speculative["tokens_per_round"]),
            _change(plain["collectives_per_token"]["total"], speculative["collectives_per_token"]["total"]),
            _change(plain["tokens_per_second"], speculative["tokens_per_second"]),
            _number(side["speedup"]),
            "-".join(f"{bound:.2f}" for bound in interval) if None not in interval else "-",
            "yes" if side["identical"] else "NO",
        )
    return table


def _by_purpose(found: dict[str, Any]) -> Any:
    table = _table(("per token", "collectives", "bytes", "microseconds"))
    plain, speculative = found["plain"], found["speculative"]
    for purpose in speculative["collectives_per_token"]:
        table.add_row(
            purpose,
            *(
                _change(_times(plain[key].get(purpose), factor), _times(speculative[key][purpose], factor))
                for key, factor in (("collectives_per_token", 1), ("bytes_per_token", 1), ("seconds_per_token", 1e6))
            ),
        )
    return table


def _table(columns: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _change(before: float | None, after: float | None, form: str = "{:.1f}") -> str:
    return f"{_number(before, form)} > {_number(after, form)}"


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """What to call with how many turns have ended. Drawn only then: no thread runs beside what is measured."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not shown) as bar:
        task = bar.add_task("plain and speculative", total=total)
        yield lambda done: bar.update(task, completed=done, refresh=True)


def _prompts(path: Path | None) -> list[Prompt] | None:
    """None: the built-in ones, which wait for the model's tokenizer."""
    if path is None:
        return None
    prompts = read_prompts(path)
    if not prompts:
        raise UserError(f"{path}: has no prompts")
    return prompts


def _refuse_page(path: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UserError(f"--html {path}: should be a file in a folder that exists")


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written: {error.strerror}") from error


class _Parser(argparse.ArgumentParser):
    """A wrong command is said once, by the lead, and not by every rank."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see python -m {MODULE} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=MODULE, description="Measure what speculation saves.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("links", help="what the collectives of this box cost, as a link table")
    savings = commands.add_parser(
        "savings",
        help="the same prompts plain and speculative, in one run",
        epilog=f"Start it with torchrun: torchrun --nproc-per-node 2 -m {MODULE} savings topologies/cpu-2.yaml",
    )
    savings.set_defaults(run=_savings)
    add_topology_options(savings)
    savings.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with "prompt", "kind" and "category"')
    savings.add_argument("--max-tokens", type=_two_or_more, default=64, metavar="N", help="of each answer; 64")
    savings.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    savings.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too")
    return parser


def _two_or_more(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{number} is not 2 or more (the first token is the prompt's)")
    return number


if __name__ == "__main__":
    sys.exit(main())
