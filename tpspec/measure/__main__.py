"""`-m tpspec.measure savings | links | simulate | quality | skips`: what speculation saves on the box at hand, what its
bus costs, and what smaller weights and fewer sublayers do.

A front door, run by every rank of the world; the lead alone prints. Must not know tensors, nor how a number is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpspec.command import Parser
from tpspec.engine.engine import Supply
from tpspec.engine.pace import MOST
from tpspec.errors import UserError
from tpspec.measure import side_by_side
from tpspec.measure.calibrate import Filled, calibration, trials
from tpspec.measure.contenders import Contender, LeftOut, Named, contenders, parsed
from tpspec.measure.page import Context, render, render_sources
from tpspec.measure.probe import links
from tpspec.measure.quality_command import quality
from tpspec.measure.savings import Pairwise, Task, built_in_prompts, recordings, refuse_plain_topology
from tpspec.measure.simulate_command import simulation
from tpspec.measure.skips_command import skips
from tpspec.measure.stats import report, source_beside_plain
from tpspec.measure.tables import print_sources, print_tables
from tpspec.measure.trace import write
from tpspec.prompts import Prompt, read_prompts, room_for_answer
from tpspec.request import Sampling
from tpspec.roles.door import add_topology_options, find_place, guarded, open_seat
from tpspec.roles.seat import Seat
from tpspec.text import Text
from tpspec.topology.config import Topology
from tpspec.written import check, write as write_file

MODULE = "tpspec.measure"
NOTHING = "every answer ended with its first token: there is nothing to compare; try other prompts"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Every rank of the world calls it with the same arguments."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["links"]:
        return links(given[1:])
    if given[:1] == ["simulate"]:
        return simulation(given[1:])
    if given[:1] == ["skips"]:
        return skips(given[1:])
    if given[:1] == ["quality"]:
        return quality(given[1:])
    return guarded(lambda: _run(_parser().parse_args(given)))


def _run(options: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _savings(options: argparse.Namespace) -> int:
    """Faults that every rank sees come first, so that no rank waits for another that has gone."""
    for option, path in (("--html", options.html), ("--trace", options.trace)):
        if path is not None:
            check(path, option)
    prompts = _prompts(options.prompts)
    if options.sources is not None:
        return _side_by_side(options, parsed(options.sources), prompts)
    with open_seat(options, f"{MODULE} savings", lambda topology, _: refuse_plain_topology(topology)) as seat:
        if seat.holds_shard:
            seat.engine.host = Filled(seat.engine.host)
            seat.engine.scheduler.reuse.is_on = False  # who comes second has his prompt to read, too
        return _lead(seat, prompts, options) if seat.leads else seat.follow()


def _lead(seat: Seat, prompts: list[Prompt] | None, options: argparse.Namespace) -> int:
    text = Text.load(seat.folder)
    tasks = _tasks(seat, text, prompts or built_in_prompts(chat=text.has_chat_template), options)
    inbox = Pairwise(tasks, trials([task.ids for task in tasks], seat.max_tokens), text.eos_ids)
    with progress_bar(inbox.num_turns, shown=sys.stderr.isatty()) as inbox.done:
        code = seat.lead(inbox)
    found = report(inbox.pairs(), calibration(inbox.timed.samples(), seat.topology)) | _emulation(seat)
    if found["speedup"] is None:
        raise UserError(NOTHING)
    _show(found, options, print_tables)
    if options.trace is not None:
        tokens = seat.topology.draft.tokens
        write(options.trace, recordings(tasks, inbox.pairs(), MOST if tokens == "auto" else tokens))
    context = _context(seat.topology, " then ".join(seat.topology.draft.sources), tasks)
    _write(options.html, lambda: render(found, context))
    return code


def _side_by_side(options: argparse.Namespace, named: Sequence[Named], prompts: list[Prompt] | None) -> int:
    """Every rank: the same turns for all of them."""
    if options.trace is not None:
        raise UserError("--trace: records one source; should stand without --sources")
    with open_seat(options, f"{MODULE} savings", fills=False) as seat:
        supplies, outcomes = side_by_side.made(seat, contenders(named, seat.topology))
        if seat.leads:
            return _lead_sources(seat, supplies, outcomes, prompts, options)
        return side_by_side.run(seat, supplies, len(prompts or built_in_prompts(chat=False)), None)


def _lead_sources(
    seat: Seat,
    supplies: Sequence[Supply | None],
    outcomes: Sequence[Contender | LeftOut],
    prompts: list[Prompt] | None,
    options: argparse.Namespace,
) -> int:
    labels = ["plain", *(one.label for one in outcomes if isinstance(one, Contender))]
    left_out = [one for one in outcomes if isinstance(one, LeftOut)]
    if len(labels) == 1:
        raise UserError("; ".join(["nothing to compare", *(f"{one.label}: {one.reason}" for one in left_out)]))
    text = Text.load(seat.folder)
    tasks = _tasks(seat, text, prompts or built_in_prompts(chat=text.has_chat_template), options)
    recorder = side_by_side.Recorder(tasks, text.eos_ids)
    with progress_bar((1 + len(tasks)) * len(supplies), shown=sys.stderr.isatty()) as recorder.done:
        code = side_by_side.run(seat, supplies, len(tasks), recorder)
    found = _sources_found(labels, recorder, left_out) | _emulation(seat)
    _show(found, options, print_sources)
    context = _context(seat.topology, ", ".join(labels[1:]), tasks)
    _write(options.html, lambda: render_sources(found, context))
    return code


def _sources_found(
    labels: Sequence[str], recorder: side_by_side.Recorder, left_out: Sequence[LeftOut]
) -> dict[str, Any]:
    """What `--json` prints, plain decoding as the first of the sources."""
    plain = recorder.records(0)
    sources = [
        {"source": label} | source_beside_plain(plain, recorder.records(way)) for way, label in enumerate(labels)
    ]
    if sources[0]["speedup"] is None:
        raise UserError(NOTHING)
    return {"sources": sources, "left_out": [{"source": one.label, "reason": one.reason} for one in left_out]}


def _emulation(seat: Seat) -> dict[str, Any]:
    emulation = seat.emulation
    if emulation is None:
        return {}
    return {"emulation": {"late_share": emulation.late_share, "floor_us": emulation.floor_s * 1e6}}


def _tasks(seat: Seat, text: Text, prompts: Sequence[Prompt], options: argparse.Namespace) -> list[Task]:
    """Each prompt has a seed of its own, the same in every turn."""
    tasks = []
    for seed, prompt in enumerate(prompts):
        ids, sampling = prompt.encode(text), Sampling(temperature=options.temperature, seed=seed)
        room = room_for_answer(ids, options.max_tokens, seat.max_tokens, prompt.where)
        tasks.append(Task(prompt.category, ids, room, sampling))
    return tasks


def _show(found: dict[str, Any], options: argparse.Namespace, tables: Callable[[dict[str, Any]], None]) -> None:
    """First of all, as no file can fail to be written before it."""
    if options.json:
        print(json.dumps(found, ensure_ascii=False), flush=True)
    else:
        tables(found)


def _context(topology: Topology, source: str, tasks: Sequence[Task]) -> Context:
    link = topology.link
    return Context(
        topology=topology.name,
        model=topology.target.model,
        source=source,
        num_ranks=len(topology.target.ranks),
        num_prompts=len(tasks),
        temperature=tasks[0].sampling.temperature,
        link=link.table or f"{link.latency_us or 0:g} us, {link.gbytes_per_s or 'any'} GB/s",
        emulate=link.emulate,
        dilation=link.dilation,
    )


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
    return None if path is None else read_prompts(path, find_place().world_size)


def _write(path: Path | None, page: Callable[[], str]) -> None:
    if path is not None:
        write_file(path, page(), "--html")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=f"python -m {MODULE}", description="Measure what speculation saves.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("links", help="what the collectives of this box cost, as a link table")
    commands.add_parser("simulate", help="a topology's rounds on paper, from a trace of savings; no torchrun, no card")
    commands.add_parser("quality", help="what int8 and int4 weights cost in quality; no torchrun")
    commands.add_parser("skips", help="sublayers a model can do without when it drafts; no torchrun")
    savings = commands.add_parser(
        "savings",
        help="the same prompts plain and speculative, in one run",
        epilog=f"Start it with torchrun: torchrun --nproc-per-node 2 -m {MODULE} savings topologies/cpu-2.yaml",
    )
    savings.set_defaults(run=_savings)
    add_topology_options(savings)
    savings.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with "prompt", "kind" and "category"')
    savings.add_argument("--max-tokens", type=_two_or_more, default=64, metavar="N", help="of each answer; 64")
    savings.add_argument("--temperature", type=_temperature, default=0.0, metavar="T", help="0 takes likeliest tokens")
    savings.add_argument(
        "--sources",
        metavar="LIST",
        help="draft sources side by side, each prompt plain and with every one in turn: names with commas between, "
        "FOLDER where one loads a model or a head, + where one stands in for another that is silent, as in "
        "ngram,eagle=FOLDER,ngram+model=FOLDER; all: every source that needs no file, and the topology's own",
    )
    savings.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    savings.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too")
    savings.add_argument("--trace", type=Path, metavar="FILE", help="write what simulate replays, too")
    return parser


def _two_or_more(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} is not 2 or more (the first token is the prompt's)")
    return int(text)


def _temperature(text: str) -> float:
    try:
        sampling = Sampling(temperature=float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number") from None
    if fault := sampling.fault():
        raise argparse.ArgumentTypeError(fault)
    return sampling.temperature


if __name__ == "__main__":
    sys.exit(main())
